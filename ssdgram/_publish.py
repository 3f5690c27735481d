"""Publishing: layers whose rows are all there are shown to those who wait; afterwards the batch's slots are given back.

    slots READY or FAILED ─► layer published, bell ─► all layers: DONE ─► released, or window over ─► UNWINDING ─► FREE or next window

Knows nothing of reads: it looks at slots. The invariants: a layer is published once every slot of its list is READY or FAILED, and a
released batch's slots are given back once the GPU has stored every word that it owes. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._batches import enqueue, free_batch, reset_plan, ring_bell, set_stage, unwind_from_start, words_arrived
from ssdgram._compiled import address_of, atomic_store, compiled_inner, now_ns, prefetch, view_i32
from ssdgram._plan_state import (C_GIVEN, DONE, LAYER_FAILED, LAYER_READY, NO_ERROR, PP_BATCH_LINE, PP_LAYERS, PP_ORDERS, QUEUED,
                                 SLOT_FAILED, SLOT_READY, S_ENGINE_US, W_ERROR, W_LAYER, W_STARVED)
from ssdgram._slots import drop_reference

UNWIND_SLICE = 4096
AHEAD = 16                                                   # slots asked for ahead of the one in hand
UNMARKED, COUNTED = -1, -2                                   # in a slot's ticket word: no batch's


@compiled_inner
def publish_layers(plan, b):  # type: ignore[no-untyped-def]
    """Move each layer's cursor over the slots that are ready; publish the layers whose cursor is at its end."""
    batch, layers, line = plan.batches[b], plan.params[PP_LAYERS], b * plan.params[PP_BATCH_LINE]
    room = batch.positions * plan.params[PP_ORDERS]           # of each layer's list of distinct slots
    held = view_i32(batch.held, layers * room)
    complete = True
    for layer in range(layers):
        if plan.words[line + W_LAYER + layer] != 0:
            continue
        mine = plan.layers[b * layers + layer]
        if mine.unready == 0:
            mine.cursor = mine.held
        while mine.cursor < mine.held:
            status = plan.slots[held[layer * room + mine.cursor]].status
            if status == SLOT_FAILED and mine.failed_slot < 0:
                mine.failed_slot = held[layer * room + mine.cursor]
            if status != SLOT_READY and status != SLOT_FAILED:
                break
            mine.cursor += 1
        if mine.cursor < mine.held:
            complete = False
            continue
        mine.published_ns = now_ns()
        atomic_store(plan.words, line + W_LAYER + layer, np.int32(LAYER_READY if mine.failed_slot < 0 else LAYER_FAILED))
        ring_bell(plan, b)
    if complete:
        finish_batch(plan, b)


@compiled_inner
def finish_batch(plan, b):  # type: ignore[no-untyped-def]
    """Every layer is published. A windowed batch gives its slots back at once and goes on with its next window."""
    batch = plan.batches[b]
    batch.published_ns = now_ns()
    us = (batch.published_ns - batch.taken_ns) // 1000
    bucket = 0
    while us > 0 and bucket < 31:
        us >>= 1
        bucket += 1
    plan.stats[S_ENGINE_US + bucket] += 1
    set_stage(plan, b, DONE)
    ring_bell(plan, b)
    if batch.window > 0:
        unwind_from_start(plan, b)


@compiled_inner
def after_unwinding(plan, b):  # type: ignore[no-untyped-def]
    """The batch holds nothing: free it, or let it plan (its next window, or from the start if it had starved)."""
    batch, layers, line = plan.batches[b], plan.params[PP_LAYERS], b * plan.params[PP_BATCH_LINE]
    windowed_end = batch.window > 0 and batch.cursor >= batch.flat and plan.words[line + W_STARVED] == 0
    if batch.released != 0 or windowed_end:
        free_batch(plan, b)
        return
    if plan.words[line + W_ERROR] != NO_ERROR:
        reset_plan(plan, b, 0)
        set_stage(plan, b, DONE)                             # until it is released
        return
    starved = plan.words[line + W_STARVED] != 0
    if not starved:
        batch.start = batch.cursor
    for layer in range(layers):
        atomic_store(plan.words, line + W_LAYER + layer, np.int32(0))
    reset_plan(plan, b, batch.start)
    if starved:
        set_stage(plan, b, QUEUED)                           # it never left the queue: first come, first served
    else:
        enqueue(plan, b)


@compiled_inner
def unwind_slice(plan, b):  # type: ignore[no-untyped-def]
    """Drop the next references of the batch; after the last it waits for GPU words, goes on with a window, or queues again."""
    batch, layers = plan.batches[b], plan.params[PP_LAYERS]
    room = batch.positions * plan.params[PP_ORDERS]           # of each layer's list of distinct slots
    held = view_i32(batch.held, layers * room)
    if batch.released != 0 and not words_arrived(plan, b):
        return False                                         # the GPU may still read these slots
    budget = UNWIND_SLICE
    while batch.layer < layers:
        mine = plan.layers[b * layers + batch.layer]
        stop = min(mine.held, batch.expand + budget)
        budget -= stop - batch.expand
        given = plan.control[C_GIVEN]
        for k in range(batch.expand, stop):
            slot = np.int64(held[batch.layer * room + k])
            prefetch(address_of(plan.slots, np.int64(held[batch.layer * room + min(k + AHEAD, mine.held - 1)])))
            if plan.slots[slot].ticket == batch.ticket:
                plan.slots[slot].ticket = UNMARKED           # a plan begun again has to count itself in again
            drop_reference(plan.control, plan.directory, plan.slots, plan.hbm, plan.overflow, slot)
        batch.given += plan.control[C_GIVEN] - given         # its own slots are no news to it
        batch.expand = stop
        if stop < mine.held:
            return True
        batch.layer += 1
        batch.expand = 0
    after_unwinding(plan, b)
    return True
