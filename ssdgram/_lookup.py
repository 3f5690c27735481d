"""Looking up: a batch's next tokens to keys, keys to slots; a bundle that nobody has gets a slot, still empty.

    tokens ─► keys ─► sets asked for, a block at a time ─► probed ─► slot (found, or taken) ─► counted once a batch ─► plan

Many tokens are looked up by the crew side by side (_crew.py); what it leaves is settled here. Knows nothing of pages: it may only
hurry reads that are queued already. The invariant: each distinct slot of a plan is in the batch's `held` list once and counted
once in its `refs`, so that unwinding gives back what was taken; a slice left half done (LOOK_ON) goes on behind the keys that are
settled. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._batches import end_of_window
from ssdgram._compiled import address_of, compiled_inner, prefetch, view_i32, view_u8
from ssdgram._crew import chunk_words, chunks_of_job, cut_chunks, learn, run_job
from ssdgram._hbm_tier import consider_copy, want_copy
from ssdgram._pages import promote
from ssdgram._plan_state import (ABSENT, BLOCK, COPIES, C_COPYING, C_IDLE, C_OVERFLOW, C_WANTED, K_COUNT, K_FIRST, K_HELD, K_HOT, K_IDLE,
                                 K_LEFT, K_STOP, NOT_SERVED, NOWHERE, NO_COPY, PP_FILL, PP_LAYERS, PP_ORDERS, PP_RANK, PP_RULE, PP_WORLD,
                                 SLICE, SLOT_READING, SLOT_READY, S_HBM_HITS, S_HITS, S_JOINS, S_MISSES, S_REPEATS, S_TOKENS)
from ssdgram._slots import LOOK_ON, NO_SLOT, overflow_find, take
from ssdgram._state import BACKGROUND, STEP
from ssdgram.cache.directory import mix, prefetch_entry, prefetch_tags, probe, set_of
from ssdgram.cache.policy import touch
from ssdgram.cache.sketch import prefetch_sketch
from ssdgram.kernels.hash import ngram_keys

PLANNED = 0                                                  # beside NO_SLOT and LOOK_ON


@compiled_inner
def find_slot(plan, set_index, x, group):  # type: ignore[no-untyped-def]
    """Slot of the bundle, or -1; a hit in the directory is made known to the policy."""
    way = probe(plan.directory, set_index, x, group)
    if way >= 0:
        touch(plan.directory, plan.sketch, set_index, way)
        return np.int64(plan.directory[set_index].slot[way])
    if plan.control[C_OVERFLOW] > 0:
        return np.int64(overflow_find(plan.overflow, x, group))
    return np.int64(-1)


@compiled_inner
def look_up_block(plan, first, count):  # type: ignore[no-untyped-def]
    """Ask for the sets of `count` positions' keys, then probe them: slot, ABSENT or NOT_SERVED into `found`."""
    groups = plan.groups.shape[0]
    sets, world, rank = plan.directory.shape[0], plan.params[PP_WORLD], plan.params[PP_RANK]
    k = 0
    for _ in range(count):
        for g in range(groups):
            plan.sets[k] = set_of(plan.keys[first * groups + k], plan.groups[g].number, sets)
            prefetch_tags(plan.directory, plan.sets[k])
            k += 1
    k = 0
    for _ in range(count):
        for g in range(groups):
            prefetch_entry(plan.directory, plan.sets[k], plan.keys[first * groups + k], plan.groups[g].number)
            k += 1
    k = 0
    for _ in range(count):
        for g in range(groups):
            x, group = plan.keys[first * groups + k], plan.groups[g].number
            if plan.groups[g].heads > 0 and (world == 1 or np.int64(mix(x, group) % np.uint64(world)) == rank):
                slot = find_slot(plan, plan.sets[k], x, group)
                if slot >= 0:
                    prefetch(address_of(plan.slots, slot))
                else:
                    prefetch_sketch(plan.sketch, x, group)
                plan.found[k] = slot
            else:
                plan.found[k] = NOT_SERVED
            k += 1


@compiled_inner
def slot_for(plan, b, slot, set_index, x, group, order):  # type: ignore[no-untyped-def]
    """The slot that the look-up found (-1: none), or a new one for a bundle that is absent; or NO_SLOT, LOOK_ON."""
    slots = plan.slots
    if slot >= 0 and (slots[slot].x != x or slots[slot].group != group or slots[slot].where == NOWHERE):
        slot = np.int64(-1)                                  # pushed out by this very block
    if slot < 0:
        slot = find_slot(plan, set_index, x, group)          # a neighbour in this block may have brought it
    if slot >= 0:
        return slot
    slot = take(plan.control, plan.stats, plan.directory, plan.sketch, slots, plan.hbm, plan.overflow, set_index, x, group,
                plan.batches[b].priority)
    if slot >= 0:
        plan.batches[b].misses += 1
        plan.stats[S_MISSES + order] += 1
    return slot


@compiled_inner
def hold(plan, state, b, slot, layer, order, held):  # type: ignore[no-untyped-def]
    """Count the batch among the users of the slot, once, and list the slot. Joining a read of the other class may speed it up."""
    slots, batches = plan.slots, plan.batches
    if slots[slot].ticket == batches[b].ticket:
        plan.stats[S_REPEATS + order] += 1
        return
    slots[slot].ticket = batches[b].ticket
    if slots[slot].refs == 0 and slots[slot].status == SLOT_READY:
        plan.control[C_IDLE] -= 1
    slots[slot].refs += 1
    line = b * plan.params[PP_LAYERS] + layer
    held[layer * batches[b].positions * plan.params[PP_ORDERS] + plan.layers[line].held] = slot
    plan.layers[line].held += 1
    batches[b].need += 1
    status = slots[slot].status
    if status == SLOT_READY:
        plan.stats[S_HITS + order] += 1
        if plan.hbm.shape[0] > 0:
            consider_copy(plan, slot, order)
        return
    plan.layers[line].unready += 1
    if slots[slot].refs > 1:                                 # another batch has it, read or about to be
        batches[b].joined += 1
        plan.stats[S_JOINS + order] += 1
        if status == SLOT_READING and batches[b].priority == STEP and slots[slot].priority == BACKGROUND:
            promote(plan, state, slot)


@compiled_inner
def settle_key(plan, state, b, t, g, x, found, set_index, out, held):  # type: ignore[no-untyped-def]
    """Give key x of position t and group g its slot. PLANNED, NO_SLOT or LOOK_ON."""
    group, slot = plan.groups[g], np.int64(-1)
    if found != NOT_SERVED:
        slot = slot_for(plan, b, found, set_index, x, group.number, group.order)
        if slot < 0:
            return slot
        hold(plan, state, b, slot, group.layer, group.order, held)
        if plan.slots[slot].hbm >= 0 and plan.hbm[plan.slots[slot].hbm].ready != 0:
            slot = -2 - np.int64(plan.slots[slot].hbm)
    out[(group.layer * plan.batches[b].positions + t) * plan.params[PP_ORDERS] + group.order] = slot
    return PLANNED


@compiled_inner
def settle_block(plan, state, b, first, block, out, held):  # type: ignore[no-untyped-def]
    """Give each of the looked-up keys its slot, in `out`, and count the batch among its users. PLANNED, NO_SLOT or LOOK_ON."""
    groups, base = plan.groups.shape[0], first * plan.groups.shape[0]
    begun = max(0, plan.batches[b].settled - base)
    t, g = plan.batches[b].planned + first + begun // groups, begun % groups
    for k in range(begun, block * groups):
        outcome = settle_key(plan, state, b, t, g, plan.keys[base + k], np.int64(plan.found[k]), plan.sets[k], out, held)
        if outcome != PLANNED:
            plan.batches[b].settled = base + k
            return outcome
        g += 1
        if g == groups:
            t, g = t + 1, 0
    return PLANNED


@compiled_inner
def plan_slice(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan the next SLICE flat tokens of the batch. PLANNED; NO_SLOT: the batch must give back what it holds; LOOK_ON: the slice is
    half done, to be gone on with."""
    batch, groups, orders = plan.batches[b], plan.groups.shape[0], plan.params[PP_ORDERS]
    tokens, flags = view_i32(batch.tokens, batch.flat), view_u8(batch.flags, batch.flat)
    layers = plan.params[PP_LAYERS]
    out = view_i32(batch.slots, layers * batch.positions * orders)
    held = view_i32(batch.held, layers * batch.positions * orders)
    stop = min(batch.cursor + SLICE, end_of_window(plan, b))
    count = ngram_keys(tokens, flags, batch.cursor, stop, plan.token_map, plan.multipliers, plan.params[PP_RULE],
                       plan.params[PP_FILL], plan.keys[: SLICE * groups].reshape(SLICE, layers, orders))
    for first in range(0, count, BLOCK):
        block = min(BLOCK, count - first)
        if batch.settled >= (first + block) * groups:
            continue
        look_up_block(plan, first, block)
        outcome = settle_block(plan, state, b, first, block, out, held)
        if outcome != PLANNED:
            return outcome
        batch.probes += block * groups
    batch.cursor = stop
    batch.planned += count
    batch.settled = 0
    plan.stats[S_TOKENS] += count
    return PLANNED


@compiled_inner
def plan_job(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan the next chunks of the batch with the crew. PLANNED, or NO_SLOT: the batch must give back what it holds."""
    count = cut_chunks(plan, b, end_of_window(plan, b), chunks_of_job(plan, b))
    run_job(plan, b, count)
    left = 0
    for k in range(count):
        left += take_over(plan, b, k)
    learn(plan, b, count, left)
    for k in range(count):
        if plan.chunks[k * chunk_words(plan) + K_LEFT] > 0 and settle_rest(plan, state, b, k) != PLANNED:
            return NO_SLOT
    return PLANNED


@compiled_inner
def take_over(plan, b, k):  # type: ignore[no-untyped-def]
    """Add chunk k to the batch: its lists of slots behind those of the chunks before, its counts. How many keys it left."""
    batch, layers, orders, words = plan.batches[b], plan.params[PP_LAYERS], plan.params[PP_ORDERS], k * chunk_words(plan)
    chunks, counts = plan.chunks, words + K_HELD + layers
    held = view_i32(batch.held, layers * batch.positions * orders)
    for layer in range(layers):
        mine = plan.layers[b * layers + layer]
        start = (layer * batch.positions + chunks[words + K_FIRST]) * orders
        end = layer * batch.positions * orders + mine.held
        for i in range(chunks[words + K_HELD + layer]):
            held[end + i] = held[start + i]
        mine.held += chunks[words + K_HELD + layer]
        batch.need += chunks[words + K_HELD + layer]
    for order in range(orders):
        plan.stats[S_HITS + order] += chunks[counts + order]
        plan.stats[S_REPEATS + order] += chunks[counts + orders + order]
        plan.stats[S_HBM_HITS + order] += chunks[counts + 2 * orders + order]
    plan.control[C_IDLE] -= chunks[words + K_IDLE]
    hot = chunks[words + K_HOT]
    if hot >= 0 and plan.slots[hot].hbm == NO_COPY and plan.control[C_WANTED] < COPIES and plan.control[C_COPYING] == 0:
        want_copy(plan, hot)
    batch.cursor = chunks[words + K_STOP]
    batch.planned += chunks[words + K_COUNT]
    batch.probes += chunks[words + K_COUNT] * plan.groups.shape[0]
    plan.stats[S_TOKENS] += chunks[words + K_COUNT]
    return chunks[words + K_LEFT]


@compiled_inner
def settle_rest(plan, state, b, k):  # type: ignore[no-untyped-def]
    """Give slots to the keys of chunk k that the crew left. PLANNED or NO_SLOT: `crew_helps` saw to it that none is far to find."""
    batch, groups, words = plan.batches[b], plan.groups.shape[0], k * chunk_words(plan)
    room = plan.params[PP_LAYERS] * batch.positions * plan.params[PP_ORDERS]
    out, held = view_i32(batch.slots, room), view_i32(batch.held, room)
    base, sets = k * SLICE * groups, plan.directory.shape[0]
    for j in range(plan.chunks[words + K_COUNT] * groups):
        if plan.found[base + j] == ABSENT:
            x, g = plan.keys[base + j], j % groups
            set_index, t = set_of(x, plan.groups[g].number, sets), plan.chunks[words + K_FIRST] + j // groups
            outcome = LOOK_ON
            while outcome == LOOK_ON:
                outcome = settle_key(plan, state, b, t, g, x, np.int64(ABSENT), set_index, out, held)
            if outcome != PLANNED:
                return NO_SLOT
    return PLANNED
