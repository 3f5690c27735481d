"""Who waits for a batch whose tokens a GPU sends wakes the planner when they are there; it gives up looking in time."""

import threading
import time

import numpy as np
from made_stores import quiet

from ssdgram import Sequence
from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._calls import hurry


def words():
    return np.zeros(256, np.int64), np.zeros(64, np.int32)


def test_it_gives_up_in_time_and_wakes_nobody():
    flag, (control, bells) = np.zeros(1, np.int64), words()
    control[s.PLANNER_ASLEEP] = 1
    assert not hurry(flag.ctypes.data, 5, control, bells, 1_000_000)
    assert control[s.PLANNER_ASLEEP] == 1 and bells[s.PLANNER_WORD] == 0


def test_tokens_that_are_there_wake_a_planner_that_sleeps():
    flag, (control, bells) = np.full(1, 5, np.int64), words()
    assert hurry(flag.ctypes.data, 5, control, bells, 0) and bells[s.PLANNER_WORD] == 0
    control[s.PLANNER_ASLEEP] = 1
    assert hurry(flag.ctypes.data, 5, control, bells, 0)
    assert control[s.PLANNER_ASLEEP] == 0 and bells[s.PLANNER_WORD] == 1


def test_a_wait_takes_tokens_as_they_come(engram, served, monkeypatch):
    """A store on the CPU with the flag of a GPU: another thread stores the ticket while `wait` looks."""
    from ssdgram import store as module

    store = served(engram)
    flag, submit = np.zeros(1, np.int64), module.submit

    def with_flag(*arguments):
        submit(*arguments[:12], flag.ctypes.data, *arguments[13:])

    monkeypatch.setattr(module, "submit", with_flag)
    batch = store.prefetch(Sequence(engram.tokens(7)))
    monkeypatch.undo()
    batch._flag = flag.ctypes.data
    time.sleep(0.01)
    assert store._plan.words[batch._base + p.W_STAGE] == p.AWAITING
    threading.Timer(0.002, lambda: flag.__setitem__(0, batch.ticket)).start()
    batch.wait()
    assert batch._flag == 0
    batch.release()
    assert quiet(store)
