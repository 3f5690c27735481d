"""Who waits for a batch whose tokens a GPU sends looks for them itself, and then plans the batch; it gives up looking in time."""

import threading

import numpy as np
from made_stores import quiet, until

from ssdgram import Sequence
from ssdgram import _plan_state as p
from ssdgram._calls import hurry


def test_it_gives_up_in_time():
    flag = np.zeros(1, np.int64)
    assert not hurry(flag.ctypes.data, 5, 1_000_000)


def test_it_sees_tokens_that_are_there():
    flag = np.full(1, 5, np.int64)
    assert hurry(flag.ctypes.data, 5, 0)


def test_a_wait_takes_tokens_as_they_come(engram, served, monkeypatch):
    """A store on the CPU with the flag of a GPU: another thread stores the ticket while `wait` looks."""
    from ssdgram import store as module

    store = served(engram)
    flag, submit = np.zeros(1, np.int64), module.submit

    def with_flag(*arguments):
        submit(*arguments[:5], flag.ctypes.data, *arguments[6:])

    monkeypatch.setattr(module, "submit", with_flag)
    monkeypatch.setattr(module, "PLANNED_HERE", -1)
    batch = store.prefetch(Sequence(engram.tokens(7)))
    monkeypatch.undo()
    batch._flag = flag.ctypes.data
    assert until(lambda: store._plan.words[batch._base + p.W_STAGE] == p.AWAITING)
    threading.Timer(0.002, lambda: flag.__setitem__(0, batch.ticket)).start()
    batch.wait()
    assert batch._flag == 0
    batch.release()
    assert quiet(store)
