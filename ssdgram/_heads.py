"""The heads of the two queues: planned slice by slice, their page reads made layer by layer, or sent back because they starved.

    QUEUED ─► PLANNING ─► EXPANDING ─► WAITING: out of the queue
                 └─ no slot to be had ─► UNWINDING, in its place in the queue, until others gave slots back

Step before background: only with no step batch queued does a background batch begin. The invariant: a batch has all its slots
or, once it starved, none, so batches cannot wait for each other in a circle. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._batches import dequeue, end_of_window, ring_bell, set_stage, stage_of, unwind_from_start, window_is_planned
from ssdgram._compiled import atomic_store, compiled_inner, now_ns, view_i32
from ssdgram._crew import crew_helps
from ssdgram._lookup import plan_job, plan_slice
from ssdgram._pages import expand_bundle, push_pages
from ssdgram._plan_state import (C_BUILDING, C_GIVEN, C_PUSH, C_QUEUES, EXPANDING, PLANNING, PP_BATCH_LINE, PP_LAYERS, PP_ORDERS, PP_SLOTS,
                                 QUEUED, SLOT_RESERVED, S_STARVED, TOO_LARGE, UNWINDING, WAITING, W_ERROR, W_STARVED)
from ssdgram._publish import COUNTED, UNMARKED, publish_layers
from ssdgram._slots import NO_SLOT
from ssdgram._state import STEP
from ssdgram.queues._handoff import wake_readers

EXPAND_SLICE = 64                                            # bundles whose page reads are made without looking up
EXPAND_SCAN = 16384                                          # list entries looked at for them
PUSH_SLICE = 2048
BLOCKED, MORE, LAYER_DONE, ALL_DONE = range(4)
TRY_AGAIN = -(1 << 62)                                       # in BATCH.given: whether or not anything is given back


@compiled_inner
def expand_slice(plan, state, b):  # type: ignore[no-untyped-def]
    """Make the page reads of the next bundles of one layer that the batch holds and nobody reads yet: BLOCKED (no free
    records), MORE, LAYER_DONE or ALL_DONE."""
    batch, layers = plan.batches[b], plan.params[PP_LAYERS]
    room = batch.positions * plan.params[PP_ORDERS]           # of each layer's list of distinct slots
    held = view_i32(batch.held, layers * room)
    mine = plan.layers[b * layers + batch.layer]
    stop = min(mine.held, batch.expand + EXPAND_SCAN) if mine.unready > 0 else batch.expand
    made = 0
    while batch.expand < stop and made < EXPAND_SLICE:
        slot = held[batch.layer * room + batch.expand]
        if plan.slots[slot].status == SLOT_RESERVED:
            pages = expand_bundle(plan, state, slot, batch.ticket, batch.priority)
            if pages < 0:
                return BLOCKED
            batch.reads += pages
            made += 1
        batch.expand += 1
    if batch.expand < mine.held and mine.unready > 0:
        return MORE
    batch.layer += 1
    batch.expand = 0
    return ALL_DONE if batch.layer == layers else LAYER_DONE


@compiled_inner
def mark_held(plan, b, mark):  # type: ignore[no-untyped-def]
    """Write `mark` into the ticket word of the slots that the batch holds. How many had another there."""
    batch, layers = plan.batches[b], plan.params[PP_LAYERS]
    room = batch.positions * plan.params[PP_ORDERS]
    held = view_i32(batch.held, layers * room)
    count = 0
    for layer in range(layers):
        for k in range(plan.layers[b * layers + layer].held):
            slot = np.int64(held[layer * room + k])
            count += plan.slots[slot].ticket != mark
            plan.slots[slot].ticket = mark
    return count


@compiled_inner
def has_every_slot(plan, b):  # type: ignore[no-untyped-def]
    """Whether the batch and the dead bundles' (row 0) hold all slots between them. The marks are lost: the batch is to unwind.

    `need` alone does not tell: it counts a bundle twice if another batch met it in between.
    """
    if plan.batches[b].need < plan.params[PP_SLOTS] - plan.groups.shape[0]:
        return False
    mark_held(plan, 0, np.int64(UNMARKED))
    mark_held(plan, b, np.int64(UNMARKED))
    return mark_held(plan, 0, np.int64(COUNTED)) + mark_held(plan, b, np.int64(COUNTED)) == plan.params[PP_SLOTS]


@compiled_inner
def must_wait_for_slots(plan, b):  # type: ignore[no-untyped-def]
    """Whether the batch starved and nothing was given back since."""
    return plan.words[b * plan.params[PP_BATCH_LINE] + W_STARVED] != 0 and plan.batches[b].given == plan.control[C_GIVEN]


@compiled_inner
def starve(plan, b):  # type: ignore[no-untyped-def]
    """No slot was to be had. The batch is too large, or gives all back and tries again later; it keeps its place in the queue."""
    line = b * plan.params[PP_BATCH_LINE]
    plan.stats[S_STARVED] += 1
    if has_every_slot(plan, b):
        dequeue(plan, b)
        atomic_store(plan.words, line + W_ERROR, np.int32(TOO_LARGE))
        ring_bell(plan, b)
    else:
        atomic_store(plan.words, line + W_STARVED, np.int32(1))
        plan.batches[b].given = plan.control[C_GIVEN]
    unwind_from_start(plan, b)
    other = plan.control[C_QUEUES + 2]
    if plan.batches[b].priority == STEP and other >= 0 and stage_of(plan, other) == PLANNING:
        atomic_store(plan.words, other * plan.params[PP_BATCH_LINE] + W_STARVED, np.int32(1))
        plan.batches[other].given = TRY_AGAIN                # half a plan holds slots and cannot go on before this one
        unwind_from_start(plan, other)


@compiled_inner
def nothing_to_read(plan, b):  # type: ignore[no-untyped-def]
    """Whether every bundle of the batch was ready when it was planned."""
    layers = plan.params[PP_LAYERS]
    for layer in range(layers):
        if plan.layers[b * layers + layer].unready > 0:
            return False
    return True


@compiled_inner
def finish_expanding(plan, b):  # type: ignore[no-untyped-def]
    """All page reads are made: leave the queue, wait for the rows."""
    dequeue(plan, b)
    set_stage(plan, b, WAITING)
    publish_layers(plan, b)


@compiled_inner
def advance_head(plan, state, b):  # type: ignore[no-untyped-def]
    """One slice of work on the batch at the head of its queue. Whether there was any to do."""
    if stage_of(plan, b) == UNWINDING:
        return False                                         # it starved, and others wait until it gave all back
    if stage_of(plan, b) == QUEUED:
        if must_wait_for_slots(plan, b):
            return False
        if plan.batches[b].taken_ns == 0:
            plan.batches[b].taken_ns = now_ns()
        atomic_store(plan.words, b * plan.params[PP_BATCH_LINE] + W_STARVED, np.int32(0))
        set_stage(plan, b, PLANNING)
    if stage_of(plan, b) == PLANNING:
        outcome = plan_job(plan, state, b) if crew_helps(plan, b, end_of_window(plan, b)) else plan_slice(plan, state, b)
        if outcome == NO_SLOT:
            starve(plan, b)
        elif window_is_planned(plan, b):
            plan.batches[b].planned_ns = now_ns()
            set_stage(plan, b, EXPANDING)
            if nothing_to_read(plan, b):
                finish_expanding(plan, b)
        return True
    push = C_PUSH + plan.batches[b].priority
    if plan.control[push] != 0:
        return False                                         # first the records of the layer before
    outcome = expand_slice(plan, state, b)
    if outcome != MORE:
        plan.control[push] = 1
    if outcome == ALL_DONE:
        finish_expanding(plan, b)
    return outcome != BLOCKED


@compiled_inner
def step_is_due(plan):  # type: ignore[no-untyped-def]
    """Whether a step batch is to be planned next, and does not wait for slots."""
    step = plan.control[C_QUEUES]
    if step < 0:
        return False
    stage = stage_of(plan, step)
    return stage == PLANNING or (stage == QUEUED and not must_wait_for_slots(plan, step))


@compiled_inner
def work_on_heads(plan, state):  # type: ignore[no-untyped-def]
    """A slice on the step queue's head, or, when there is none, on the background queue's. Slices of work done.

    Behind a step batch that waits for slots, a background batch may finish what it began but not begin.
    """
    step, background = plan.control[C_QUEUES], plan.control[C_QUEUES + 2]
    work = 0
    if step >= 0:
        work += advance_head(plan, state, step)
    if background >= 0 and (step < 0 or (work == 0 and stage_of(plan, background) == EXPANDING)):
        work += advance_head(plan, state, background)
    return work


@compiled_inner
def push_built_pages(plan, state):  # type: ignore[no-untyped-def]
    """Hand records to the readers once their layer is complete (until then more rows may join them). Slices of work done."""
    control, work = plan.control, 0
    for priority in range(2):
        if control[C_PUSH + priority] != 0:
            if push_pages(plan, state, priority, PUSH_SLICE) > 0:
                work += 1
                wake_readers(state)
            if control[C_BUILDING + priority] == 0:
                control[C_PUSH + priority] = 0
    return work
