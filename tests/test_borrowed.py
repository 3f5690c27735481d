"""Whose the planner's memory is: its thread's while that is awake, a caller's while it is borrowed, and never two's (_planner.py).

The test borrows it as a caller does, by the compare and swap, and looks whether anybody plans meanwhile.
"""

import time

from made_stores import IMPATIENT, assert_served, clear_faults, nobody_plans, set_fault, until

from ssdgram import _plan_state as p
from ssdgram._calls import ring
from ssdgram._state import ASLEEP, BORROWED, FAULT_STALL, PLANNER_ASLEEP

TEN_TICKS_S = 0.02                                           # the planner's thread looks up every 2 ms in busy times


def stage(store, batch):
    return int(store._plan.words[batch._base + p.W_STAGE])


def test_nobody_else_plans_while_it_is_borrowed(engram, served):
    """Not the planner's thread when its clock wakes it, nor when it is rung; not another caller."""
    store = served(engram)
    known, large = engram.tokens(5, 1), engram.tokens(600, 2)
    with store.prefetch(known) as batch:
        batch.wait()
    control, stats = store._state.control, store._plan.stats
    with nobody_plans(store):
        loops = int(stats[p.S_LOOPS])
        time.sleep(TEN_TICKS_S)
        assert (control[PLANNER_ASLEEP], stats[p.S_LOOPS]) == (BORROWED, loops)
        ring(store._address)
        background = store.prefetch(large, priority="background")            # rings too
        step = store.prefetch(known)                         # would plan it
        time.sleep(TEN_TICKS_S)
        assert (control[PLANNER_ASLEEP], stats[p.S_LOOPS]) == (BORROWED, loops)
        assert stage(store, background) == stage(store, step) == p.SUBMITTED
    with background, step:
        assert_served(engram, store, step, known)
        assert_served(engram, store, background, large)


def test_a_caller_who_planned_wakes_a_thread_that_sleeps_for_ever(engram, served):
    """Reads are under way then, and their age is to be watched, though nobody rings."""
    store = served(engram, tuning=IMPATIENT)
    control, plan = store._state.control, store._plan
    for seed in range(3):
        assert until(lambda: plan.control[p.C_ACTIVE] == 1)
        plan.control[p.C_TAKEN_NS] = 0                       # as if the last request had been long ago
        assert until(lambda: control[PLANNER_ASLEEP] == ASLEEP and plan.control[p.C_LONG_SLEEP] == 1)
        set_fault(store, FAULT_STALL)
        batch = store.prefetch(engram.tokens(1, seed))
        assert until(lambda: store.stats().state == "degraded")
        clear_faults(store)
        assert until(batch.ready)                            # (a wait gives up at once as long as the store is degraded)
        with batch:
            assert_served(engram, store, batch, engram.tokens(1, seed))
