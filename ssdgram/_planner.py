"""The planner: one long compiled loop that turns batches of tokens into slots, without the GIL; and whose loop it is, when.

    requests ─► queues (step, background) ─► look up ─► page reads ─► rings ─► readers         _batches _heads _lookup _pages
                                                                      done ─► slots ─► layers published, waiters woken _publish

    AWAKE ─── nothing to do for a while ──► ASLEEP ──── a caller plans, plan_here ────► BORROWED
      ◄── wake_planner, or its own clock ───       ◄─────── he has done, or had his time ───

The word is PLANNER_ASLEEP; the thread spins a moment before it sleeps, on a futex, and naps if it wakes while BORROWED. The
invariant: what _plan_state.py describes belongs to the planner's thread while the word is AWAKE, to the caller who made it BORROWED
until he stores ASLEEP again, and else to nobody; whoever takes it does so by a compare and swap from ASLEEP.
"""

from __future__ import annotations

import numpy as np

from ssdgram._batches import in_queue, stage_of
from ssdgram._compiled import atomic_cas, atomic_exchange, atomic_load, compiled_inner, compiled_lean, fence, futex_wait, now_ns
from ssdgram._kept import PLAN_AT, plan_at, state_at
from ssdgram._plan_state import AWAITING, C_LONG_SLEEP, C_PAGES, C_REQUEST_HEAD, C_REQUEST_TAIL, C_TAKEN_NS, PP_SPIN_NS, S_SLEEPS
from ssdgram._state import (ASLEEP, AWAKE, BORROWED, PLANNER_ASLEEP, PLANNER_WORD, P_READERS, READER_LINES, READER_WORDS, R_DONE_HEAD,
                            R_DONE_TAIL, STOP)
from ssdgram._turn import look_at_drive, turn
from ssdgram.queues._handoff import wake_planner

NAP_NS = 50_000_000                                          # longest sleep while reads are under way: the drive's age is looked at
POLL_NS = 100_000                                            # longest sleep while GPU words are awaited
TICK_NS = 2_000_000                                          # longest sleep in busy times, which last ...
BUSY_NS = 1_000_000_000                                      # ... so long after the last request
BORROW_NS = 200_000                                          # how long a caller plans for himself
BORROWED_NAP_NS = 50_000                                     # between looks whether he has done


@compiled_inner
def nothing_arrived(plan, state):  # type: ignore[no-untyped-def]
    """Whether request ring and done rings are empty."""
    if atomic_load(plan.control, C_REQUEST_TAIL) != plan.control[C_REQUEST_HEAD]:
        return False
    for reader in range(state.params[P_READERS]):
        line = READER_LINES + reader * READER_WORDS
        if atomic_load(state.control, line + R_DONE_TAIL) != state.control[line + R_DONE_HEAD]:
            return False
    return True


@compiled_inner
def longest_sleep(plan, state, now, waiting_for_gpu):  # type: ignore[no-untyped-def]
    """How long the planner may sleep although nobody rings; -1: for ever."""
    if waiting_for_gpu > 0:
        return POLL_NS
    if now - plan.control[C_TAKEN_NS] < BUSY_NS:
        return TICK_NS                                       # what callers left undone, so as not to wake anybody, is done then
    reading = plan.control[C_PAGES + 1] < state.pages.shape[0]   # in a ring, or in a drive whose age is to be watched
    return NAP_NS if reading else -1


@compiled_inner
def sleep(plan, state, longest_ns):  # type: ignore[no-untyped-def]
    """Sleep until somebody rings, or for `longest_ns` (< 0: no limit). A caller may plan meanwhile (`plan_here`)."""
    word = state.words[PLANNER_WORD]
    plan.control[C_LONG_SLEEP] = longest_ns < 0 or longest_ns > TICK_NS
    atomic_exchange(state.control, PLANNER_ASLEEP, np.int64(ASLEEP))
    fence()
    if nothing_arrived(plan, state) and atomic_load(state.control, STOP) == 0:
        plan.stats[S_SLEEPS] += 1
        futex_wait(state.words, PLANNER_WORD, word, longest_ns)
    while atomic_load(state.control, PLANNER_ASLEEP) != AWAKE and not atomic_cas(
            state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(AWAKE)):
        futex_wait(state.words, PLANNER_WORD, atomic_load(state.words, PLANNER_WORD), np.int64(BORROWED_NAP_NS))


@compiled_inner
def plan_here(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan batch b, just submitted (or its tokens just there), on the caller's thread while the planner's sleeps: waking it takes
    longer than a step's plan.

    The planner's memory belongs to whoever changed PLANNER_ASLEEP from ASLEEP to BORROWED until he changes it back. Returns
    when the batch is planned, has to wait for something, or has had its time; the planner's thread goes on from there.
    """
    fence()
    if not atomic_cas(state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(BORROWED)):
        return                                               # it is awake, and sees the request
    begin, work = now_ns(), 1
    while work > 0 and now_ns() - begin < BORROW_NS and (plan.control[C_REQUEST_HEAD] != plan.control[C_REQUEST_TAIL]
                                                         or in_queue(stage_of(plan, b)) or stage_of(plan, b) == AWAITING):
        work, _ = turn(plan, state)
    undone = plan.control[C_LONG_SLEEP] != 0 or in_queue(stage_of(plan, b))
    atomic_exchange(state.control, PLANNER_ASLEEP, np.int64(ASLEEP))
    fence()
    if undone or not nothing_arrived(plan, state):
        wake_planner(state)


@compiled_lean
def planner_loop(kept, b):  # type: ignore[no-untyped-def]
    """The whole life of the planner's thread (b < 0), until STOP; or a caller's look after the batch that he submitted (b >= 0).

    One function for both, because they compile to the same code.
    """
    state, plan = state_at(kept), plan_at(kept + PLAN_AT)
    if b >= 0:
        plan_here(plan, state, b)
        return
    last_work = now_ns()
    while atomic_load(state.control, STOP) == 0:
        work, waiting_for_gpu = turn(plan, state)
        now = now_ns()
        if work > 0:
            last_work = now
        elif now - last_work > plan.params[PP_SPIN_NS]:
            look_at_drive(plan, state, now)
            sleep(plan, state, longest_sleep(plan, state, now, waiting_for_gpu))
