"""Slots: the search for one that no batch uses has an end, and goes on where it stopped."""

import numpy as np

from ssdgram import _plan_state as p
from ssdgram import _slots
from ssdgram._compiled import compiled
from ssdgram.cache import directory as d
from ssdgram.cache import sketch as s


@compiled
def reclaim(control, stats, directory, sketch, slots, hbm):  # type: ignore[no-untyped-def]
    return _slots.reclaim(control, stats, directory, sketch, slots, hbm)


def test_a_search_has_an_end_and_is_gone_on_with():
    """One idle bundle in a thousand sets, the others in use."""
    sets, idle = 1000, 700
    control, stats, slots, hbm = (np.zeros(*shape) for shape in ((p.C_COUNT, np.int64), (p.S_COUNT, np.int64), (sets, p.SLOT),
                                                                 (0, p.HBM_SLOT)))
    directory, sketch = d.allocate(sets), s.allocate(sets)
    for number in range(sets):
        d.write(directory, number, 3, number, 0, number, 1)
    slots["status"], slots["where"], slots["hbm"] = p.SLOT_READY, p.IN_DIRECTORY, p.NO_COPY
    slots["refs"] = np.arange(sets) != idle
    control[p.C_FREE], control[p.C_IDLE], control[p.C_HAND] = -1, 1, sets - 1
    arrays = control, stats, directory, sketch, slots, hbm
    for turn in range(1, idle // _slots.RECLAIM_SETS + 1):
        assert reclaim(*arrays) == _slots.LOOK_ON
        assert control[p.C_HAND] == turn * _slots.RECLAIM_SETS - 1
    assert reclaim(*arrays) == 0
    assert control[[p.C_FREE, p.C_FREE + 1, p.C_IDLE, p.C_HAND]].tolist() == [idle, 1, 0, idle] and stats[p.S_RECLAIMS] == 1
    assert slots["status"][idle] == p.SLOT_FREE and d.entries(directory) == sets - 1
    assert reclaim(*arrays) == _slots.NO_SLOT and control[p.C_HAND] == idle
