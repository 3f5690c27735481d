"""What the pread queue has for itself: its depth is its threads, and it needs nothing of the machine."""

import numpy as np
import pytest
from queue_pages import PAGES, make_columns, running, until

from ssdgram import _state as s
from ssdgram.queues.state import collect, push


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    return folder, make_columns(folder)


def test_every_reader_takes_part(columns):
    """The planner wakes two, they wake the others: a held read per reader, and no more."""
    with running(columns[0], "threads", readers=9) as rig:
        rig.fault(s.FAULT_STALL)
        for index in range(50):
            rig.want(index, 0, index % PAGES)
        push(rig.state, np.arange(50))
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == 9)
        assert not until(lambda: rig.total(s.R_IN_FLIGHT) != 9, timeout_s=0.1)
        rig.state.faults[s.FAULT_TIMES] = 0
        assert len(collect(rig.state, 50)) == 50


def test_readers_with_staging_for_a_ring(columns):
    """A State laid out for rings of depth 8 (the fall-back after a failed set-up) serves as well."""
    folder, rows = columns
    with running(folder, "threads", readers=2, depth=8) as rig:
        for index in range(100):
            rig.want(index, index % 2, index % PAGES, [index % 15])
        assert set(rig.serve(range(100))) == {s.READ_OK}
        rig.check(rows)
        assert rig.total(s.R_ENTERS) == 0
