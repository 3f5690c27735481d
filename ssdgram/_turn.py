"""One turn of the planner: a look at everything that may have changed, and a slice of work on each.

    requests ─► pages that readers are done with ─► batches that may go on ─► heads of the queues ─► page reads to the readers ─► HBM

A slice is about 100 us at most, so that a decode step waits for one slice of a prefill and not for the prefill. Also looks at the
age of the drive's reads. The invariant: whoever takes a turn owns the planner's memory (see _planner.py), and after a turn without
work all that is left waits for a request, for a read, or for the GPU.
"""

from __future__ import annotations

import numpy as np

from ssdgram._batches import admit_tokens, ring_bell, stage_of, take_requests
from ssdgram._compiled import atomic_load, atomic_store, compiled_inner, now_ns
from ssdgram._hbm_tier import tend_hbm
from ssdgram._heads import push_built_pages, step_is_due, work_on_heads
from ssdgram._pages import settle_page
from ssdgram._plan_state import (AWAITING, C_ACTIVE, C_STATE, C_TICKS, DEGRADED, PP_DEGRADED_NS, SERVING, S_BUSY_NS, S_DEGRADED,
                                 S_LONGEST_NS, S_LOOPS, S_PROMOTED, UNWINDING, WAITING)
from ssdgram._publish import publish_layers, unwind_slice
from ssdgram._state import P_DONE_CAPACITY, P_READERS, READER_LINES, READER_WORDS, R_DONE_HEAD, R_DONE_TAIL, R_OLDEST_NS
from ssdgram.queues._handoff import wake_readers

SETTLE_SLICE = 256                                           # page records settled without looking up


@compiled_inner
def settle_reads(plan, state, most):  # type: ignore[no-untyped-def]
    """Settle up to `most` page records that readers are done with, a share from each reader. How many."""
    capacity, count = state.params[P_DONE_CAPACITY], 0
    for reader in range(state.params[P_READERS]):
        line = READER_LINES + reader * READER_WORDS
        head = state.control[line + R_DONE_HEAD]
        stop = min(atomic_load(state.control, line + R_DONE_TAIL), head + most // state.params[P_READERS] + 1)
        while head < stop:
            settle_page(plan, state, np.int64(state.done_ring[reader * capacity + (head & (capacity - 1))]))
            head += 1
            count += 1
        atomic_store(state.control, line + R_DONE_HEAD, head)
    return count


@compiled_inner
def tend_batches(plan, settled):  # type: ignore[no-untyped-def]
    """Publish what became ready, unwind what is to be unwound. (slices of work done, batches that wait for the GPU)."""
    work, waiting_for_gpu, k = 0, 0, 0
    while k < plan.control[C_ACTIVE]:
        b = np.int64(plan.active[k])
        stage = stage_of(plan, b)
        if stage == WAITING and settled > 0:
            publish_layers(plan, b)
        elif stage == AWAITING:
            if admit_tokens(plan, b):
                work += 1
            else:
                waiting_for_gpu += 1
        elif stage == UNWINDING:
            if step_is_due(plan):
                work += 1                                    # its references can wait: a step that finds no slot is due no more
            elif unwind_slice(plan, b):
                work += 1
            else:
                waiting_for_gpu += 1
        if k < plan.control[C_ACTIVE] and plan.active[k] == b:
            k += 1
    return work, waiting_for_gpu


@compiled_inner
def oldest_read_ns(state):  # type: ignore[no-untyped-def]
    """When the oldest read in any drive was submitted, 0: none is under way."""
    oldest = np.int64(0)
    for reader in range(state.params[P_READERS]):
        submitted = atomic_load(state.control, READER_LINES + reader * READER_WORDS + R_OLDEST_NS)
        if submitted > 0 and (oldest == 0 or submitted < oldest):
            oldest = submitted
    return oldest


@compiled_inner
def look_at_drive(plan, state, now):  # type: ignore[no-untyped-def]
    """DEGRADED while a read is under way for longer than it may be; SERVING again when that is over. Whether any is."""
    oldest = oldest_read_ns(state)
    late = oldest > 0 and now - oldest > plan.params[PP_DEGRADED_NS]
    if late and plan.control[C_STATE] != DEGRADED:
        plan.stats[S_DEGRADED] += 1
        atomic_store(plan.control, C_STATE, np.int64(DEGRADED))
        for k in range(plan.control[C_ACTIVE]):
            ring_bell(plan, np.int64(plan.active[k]))
    elif not late and plan.control[C_STATE] == DEGRADED:
        atomic_store(plan.control, C_STATE, np.int64(SERVING))
    return oldest > 0


@compiled_inner
def turn(plan, state):  # type: ignore[no-untyped-def]
    """Look at everything once and do a slice of each. (slices of work done, things that the GPU is awaited for)."""
    begin = now_ns()
    work = take_requests(plan)
    settled = settle_reads(plan, state, SETTLE_SLICE)
    tended, waiting_for_gpu = tend_batches(plan, settled)
    promoted = plan.stats[S_PROMOTED]
    work += settled + tended + work_on_heads(plan, state) + push_built_pages(plan, state)
    if plan.stats[S_PROMOTED] != promoted:
        wake_readers(state)                                  # records came into the step ring by another way than a push
    if plan.hbm.shape[0] > 0:
        copied, awaited = tend_hbm(plan, state)
        work += copied
        waiting_for_gpu += awaited
    plan.stats[S_LOOPS] += 1
    if work > 0:
        now = now_ns()
        plan.stats[S_BUSY_NS] += now - begin
        plan.stats[S_LONGEST_NS] = max(plan.stats[S_LONGEST_NS], now - begin)
        plan.control[C_TICKS] += 1
        if plan.control[C_TICKS] & 1023 == 0:
            look_at_drive(plan, state, now)
    return work, waiting_for_gpu
