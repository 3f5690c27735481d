"""Batches: stages, queues, the words that others see, and how each one begins and ends.

    request ring ─► AWAITING its tokens ─► queue of its class ─► (planned, read, published) ─► UNWINDING ─► FREE

A batch is seen by other threads through its line of words only (release/acquire), and whoever sleeps there is woken by its
bell. Knows nothing of bundles. The invariant: a batch stands in the queue of its class while its stage is one of `in_queue`,
or while it unwinds because it starved, and at no other time. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import atomic_load, atomic_load_at, atomic_store, compiled_inner, fence, futex_wake, now_ns, view_i32, view_u8
from ssdgram._plan_state import (AWAITING, BAD_TOKEN, C_ACTIVE, C_CHUNKS, C_PUSH, C_QUEUES, C_REQUEST_HEAD, C_REQUEST_TAIL, C_TAKEN_NS,
                                 DONE, EXPANDING, FREE_BATCH, PLANNING, PP_BATCH_LINE, PP_LAYERS, PP_REQUESTS, PP_VOCABULARY, QUEUED,
                                 SUBMIT, SUBMITTED, S_BATCHES, S_CANCELLED, UNWINDING, W_ERROR, W_SEQUENCE, W_SLEEPERS, W_STAGE,
                                 W_STARVED)
from ssdgram.kernels.hash import check_tokens


@compiled_inner
def set_stage(plan, b, stage):  # type: ignore[no-untyped-def]
    """Publish a batch's stage."""
    atomic_store(plan.words, b * plan.params[PP_BATCH_LINE] + W_STAGE, np.int32(stage))


@compiled_inner
def stage_of(plan, b):  # type: ignore[no-untyped-def]
    """A batch's stage."""
    return plan.words[b * plan.params[PP_BATCH_LINE] + W_STAGE]


@compiled_inner
def ring_bell(plan, b):  # type: ignore[no-untyped-def]
    """Something about batch b changed: wake those who wait for it."""
    line = b * plan.params[PP_BATCH_LINE]
    atomic_store(plan.words, line + W_SEQUENCE, np.int32(plan.words[line + W_SEQUENCE] + 1))
    fence()
    if atomic_load(plan.words, line + W_SLEEPERS) > 0:
        futex_wake(plan.words, line + W_SEQUENCE, 1 << 30)


@compiled_inner
def in_queue(stage):  # type: ignore[no-untyped-def]
    """Whether a batch of this stage stands in the queue of its class."""
    return stage == QUEUED or stage == PLANNING or stage == EXPANDING


@compiled_inner
def enqueue(plan, b):  # type: ignore[no-untyped-def]
    """Append the batch to the queue of its class."""
    queue = C_QUEUES + 2 * plan.batches[b].priority
    plan.batches[b].queue_next = -1
    if plan.control[queue] < 0:
        plan.control[queue] = b
    else:
        plan.batches[plan.control[queue + 1]].queue_next = b
    plan.control[queue + 1] = b
    set_stage(plan, b, QUEUED)


@compiled_inner
def dequeue(plan, b):  # type: ignore[no-untyped-def]
    """Take the batch out of the queue of its class, wherever it stands in it."""
    queue = C_QUEUES + 2 * plan.batches[b].priority
    following = plan.batches[b].queue_next
    if plan.control[queue] == b:
        plan.control[queue] = following
        return
    before = plan.control[queue]
    while plan.batches[before].queue_next != b:
        before = plan.batches[before].queue_next
    plan.batches[before].queue_next = following
    if following < 0:
        plan.control[queue + 1] = before


@compiled_inner
def reset_plan(plan, b, cursor):  # type: ignore[no-untyped-def]
    """The batch holds nothing; its plan begins (again) at flat token `cursor`."""
    layers = plan.params[PP_LAYERS]
    plan.batches[b].cursor = cursor
    plan.batches[b].start = cursor
    plan.batches[b].planned = 0
    plan.batches[b].layer = 0
    plan.batches[b].expand = 0
    plan.batches[b].need = 0
    plan.batches[b].chunks = plan.control[C_CHUNKS + plan.batches[b].priority]
    plan.batches[b].settled = 0
    for layer in range(layers):
        plan.layers[b * layers + layer].held = 0
        plan.layers[b * layers + layer].unready = 0
        plan.layers[b * layers + layer].cursor = 0
        plan.layers[b * layers + layer].failed_slot = -1


@compiled_inner
def unwind_from_start(plan, b):  # type: ignore[no-untyped-def]
    """Begin to drop the batch's references."""
    plan.batches[b].layer = 0
    plan.batches[b].expand = 0
    set_stage(plan, b, UNWINDING)


@compiled_inner
def end_of_window(plan, b):  # type: ignore[no-untyped-def]
    """Flat token at which the batch's plan ends, or its present window."""
    batch = plan.batches[b]
    return min(batch.flat, batch.start + batch.window) if batch.window > 0 else batch.flat


@compiled_inner
def window_is_planned(plan, b):  # type: ignore[no-untyped-def]
    """Whether the plan reached the end of the batch, or of its present window."""
    return plan.batches[b].cursor >= end_of_window(plan, b)


@compiled_inner
def tokens_arrived(plan, b):  # type: ignore[no-untyped-def]
    """Whether the batch's tokens are in its memory (those from a GPU come later)."""
    return plan.batches[b].flag == 0 or atomic_load_at(plan.batches[b].flag) == plan.batches[b].ticket


@compiled_inner
def admit_tokens(plan, b):  # type: ignore[no-untyped-def]
    """Queue an AWAITING batch if its tokens are there and are tokens. Whether it left AWAITING."""
    batch = plan.batches[b]
    if not tokens_arrived(plan, b):
        return False
    if batch.flag != 0:
        bad = check_tokens(view_i32(batch.tokens, batch.flat), view_u8(batch.flags, batch.flat), plan.params[PP_VOCABULARY])
        if bad >= 0:
            batch.bad_token = bad
            atomic_store(plan.words, b * plan.params[PP_BATCH_LINE] + W_ERROR, np.int32(BAD_TOKEN))
            set_stage(plan, b, DONE)
            ring_bell(plan, b)
            return True
    enqueue(plan, b)
    return True


@compiled_inner
def take_requests(plan):  # type: ignore[no-untyped-def]
    """New batches into their queues, releases into unwinding. How many."""
    control, mask = plan.control, plan.params[PP_REQUESTS] - 1
    head, tail = control[C_REQUEST_HEAD], atomic_load(control, C_REQUEST_TAIL)
    count = 0
    while head < tail and count < 64:
        request = np.int64(plan.requests[head & mask])
        head += 1
        count += 1
        b = request >> 1
        if (request & 1) == SUBMIT:
            plan.active[control[C_ACTIVE]] = b
            control[C_ACTIVE] += 1
            plan.stats[S_BATCHES] += 1
            reset_plan(plan, b, 0)
            set_stage(plan, b, AWAITING)
            admit_tokens(plan, b)
        else:
            release(plan, b)
    atomic_store(control, C_REQUEST_HEAD, head)
    if count > 0:
        control[C_TAKEN_NS] = now_ns()
    return count


@compiled_inner
def release(plan, b):  # type: ignore[no-untyped-def]
    """Nobody wants the batch any more: leave its queue and unwind. A second release changes nothing."""
    stage = stage_of(plan, b)
    if plan.batches[b].released != 0 or stage == FREE_BATCH or stage == SUBMITTED:       # SUBMITTED: it was the row's last batch's
        return
    plan.batches[b].released = 1
    if stage < DONE:
        plan.stats[S_CANCELLED] += 1
    if in_queue(stage) or (stage == UNWINDING and plan.words[b * plan.params[PP_BATCH_LINE] + W_STARVED] != 0):
        dequeue(plan, b)
    if stage == EXPANDING:
        plan.control[C_PUSH + plan.batches[b].priority] = 1  # what it built must be read: another batch may have joined it
    if stage != UNWINDING:
        unwind_from_start(plan, b)


@compiled_inner
def words_arrived(plan, b):  # type: ignore[no-untyped-def]
    """Whether the GPU is done with everything that it does for the batch: its tokens, and the gathers that read its slots."""
    layers = plan.params[PP_LAYERS]
    if not tokens_arrived(plan, b):
        return False
    for layer in range(layers):
        mine = plan.layers[b * layers + layer]
        if mine.word != 0 and atomic_load_at(mine.word) < mine.expected:
            return False
    return True


@compiled_inner
def free_batch(plan, b):  # type: ignore[no-untyped-def]
    """Take the batch out of the active list; its row may be used again."""
    control = plan.control
    k = 0
    while plan.active[k] != b:
        k += 1
    control[C_ACTIVE] -= 1
    for j in range(k, control[C_ACTIVE]):
        plan.active[j] = plan.active[j + 1]
    set_stage(plan, b, FREE_BATCH)
    ring_bell(plan, b)
