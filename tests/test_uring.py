"""What the io_uring queue has for itself: set-up flags, registration, submissions, and a ring that fails after open."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_stores import descriptors
from queue_pages import PAGES, Rig, make_columns, running, until

from ssdgram import _state as s
from ssdgram.queues import READER_PLAIN, READER_RETURNED, _flight, _ring, probe
from ssdgram.queues._ring import Ring
from ssdgram.queues.state import push

pytestmark = pytest.mark.skipif(not probe.io_uring().ok, reason="io_uring is refused here")


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    return folder, make_columns(folder)


def serve_all(rig, rows):
    """Read 200 pages and check their rows."""
    for index in range(200):
        rig.want(index, index % 2, index % PAGES, [index % 15])
    assert set(rig.serve(range(200))) == {s.READ_OK}
    rig.check(rows)


def test_struct_sizes():
    assert _ring.PARAMS.itemsize == 120
    assert (_ring.PARAMS.fields["sq"][1], _ring.PARAMS.fields["cq"][1], _ring.PARAMS.fields["features"][1]) == (40, 80, 20)
    assert (_ring.PARAMS["sq"].fields["array"][1], _ring.PARAMS["cq"].fields["cqes"][1]) == (24, 20)
    assert _flight.SLOT.itemsize == 16
    assert _flight.ARGUMENT_TIME == _flight.ARGUMENT + 2         # struct io_uring_getevents_arg is three words
    assert _flight.TIME_NS == _flight.TIME_S + 1


@pytest.mark.parametrize("flags", _ring.flag_sets(), ids=range(len(_ring.flag_sets())))
def test_every_set_of_flags_serves(columns, monkeypatch, flags):
    """Older kernels refuse the newer flags: the loop is right with each set that is tried."""
    folder, rows = columns
    monkeypatch.setattr(_ring, "flag_sets", lambda: [flags])
    try:
        Ring(8, 16).close()
    except OSError as error:
        pytest.skip(f"this kernel does not know these flags: {error}")
    with running(folder, "uring") as rig:
        assert rig.queue._rings[0].flags & ~_ring.SETUP_R_DISABLED == flags & ~_ring.SETUP_R_DISABLED
        serve_all(rig, rows)


def test_flags_are_given_up_one_by_one(monkeypatch):
    asked = []

    def call(number, *arguments):
        if number != 425:
            return real(number, *arguments)
        params = np.ctypeslib.as_array((_ring.ctypes.c_uint32 * 30).from_address(arguments[1]))
        asked.append(int(params[2]))
        if asked[-1] & (_ring.SETUP_DEFER_TASKRUN | _ring.SETUP_SINGLE_ISSUER):
            raise OSError(errno.EINVAL, "old kernel")
        return real(number, *arguments)

    real = _ring._call
    monkeypatch.setattr(_ring, "_call", call)
    ring = Ring(8, 16)
    assert asked == _ring.flag_sets()[:4]
    assert ring.flag_names == "SUBMIT_ALL|COOP_TASKRUN"
    ring.close()


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_other_errors_are_not_retried(monkeypatch, error):
    calls = []

    def refuse(number, *arguments):
        calls.append(number)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(_ring, "_call", refuse)
    with pytest.raises(OSError, match=os.strerror(error)):
        Ring(8, 16)
    assert calls == [425]
    assert not probe.io_uring().ok


@pytest.mark.parametrize("method", ["register_files", "register_buffer"])
def test_without_registration_it_reads_plainly_and_says_so(columns, monkeypatch, method):
    folder, rows = columns

    def refuse(*arguments):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Ring, method, refuse)
    with running(folder, "uring", readers=2) as rig:
        assert len(rig.queue.notices) == 1
        assert "Cannot allocate memory" in rig.queue.notices[0]
        assert "ulimit" in rig.queue.notices[0]
        serve_all(rig, rows)


def test_registration_is_used_where_it_works(columns):
    with running(columns[0], "uring") as rig:
        assert rig.queue.notices == ()
        assert rig.queue._own[0][_flight.FIXED_FILES] == rig.queue._own[0][_flight.FIXED_BUFFERS] == 1


@pytest.mark.parametrize(("readers", "depth"), [(1, 1), (1, 3), (2, 300), (5, 7)])
def test_any_depth(columns, readers, depth):
    folder, rows = columns
    with running(folder, "uring", readers=readers, depth=depth, pages=2048, targets=2048) as rig:
        for index in range(2000):
            rig.want(index, index % 2, index % PAGES, [index % 15])
        assert set(rig.serve(range(2000))) == {s.READ_OK}
        rig.check(rows)
        assert rig.total(s.R_READS) == 2000
        assert rig.total(s.R_ENTERS) <= 4000                 # at the worst one to submit and one to wait


def test_deep_queues_take_few_calls(columns):
    """Many reads go in with one enter and many come back with one: less than one call for four reads."""
    with running(columns[0], "uring", depth=256, pages=4096) as rig:
        for index in range(4000):
            rig.want(index, 0, index % PAGES)
        push(rig.state, np.arange(4000))
        assert until(lambda: rig.total(s.R_READS) == 4000)
        assert rig.total(s.R_ENTERS) < 1000


def test_in_flight_never_exceeds_depth(columns):
    with running(columns[0], "uring", depth=5) as rig:
        rig.fault(s.FAULT_STALL)
        for index in range(50):
            rig.want(index, 0, index % PAGES)
        push(rig.state, np.arange(50))
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == 5)
        assert rig.state.control[s.STEP_HEAD] == 5
        assert not until(lambda: rig.total(s.R_IN_FLIGHT) != 5, timeout_s=0.2)


def test_the_child_of_a_fork_has_no_ring(columns):
    rig = Rig(columns[0], "uring")
    ring = rig.queue._rings[0]
    fd = ring.fd
    pid = os.fork()
    if pid == 0:
        closed = ring.fd == -1
        try:
            os.fstat(fd)
            closed = False
        except OSError:
            pass
        ring.close()                                         # does nothing here
        os._exit(0 if closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ring.fd == fd
    rig.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_descriptors_are_given_back(columns):
    before = descriptors()                                   # rings and events: others may come and go
    for _ in range(3):
        with running(columns[0], "uring", readers=3):
            assert len(descriptors()) > len(before)
    assert descriptors() == before


LOST_RING = """
import sys
from pathlib import Path
import numpy as np
import deny_io_uring
from queue_pages import Rig, make_columns, until
from ssdgram import _state as s
from ssdgram.queues.state import collect, push
folder = Path(sys.argv[1])
rows = make_columns(folder)
rig = Rig(folder, "uring", readers=2, depth=8)
rig.queue.start()
rig.want(0, 0, 0, [0])
assert list(rig.serve([0])) == [s.READ_OK]
if sys.argv[2] == "busy":                                    # reads in flight as the ring is lost
    rig.fault(s.FAULT_STALL)
    for index in range(1, 101):
        rig.want(index, index % 2, index % 40, [index % 15])
    push(rig.state, np.arange(1, 101))
    assert until(lambda: rig.total(s.R_IN_FLIGHT) == 16)
deny_io_uring.deny(every_thread=True)
if sys.argv[2] == "busy":
    rig.state.faults[s.FAULT_TIMES] = 0
    assert len(collect(rig.state, 100)) == 100
for index in range(101, 200):
    rig.want(index, index % 2, index % 40, [index % 15])
assert set(rig.serve(range(101, 200))) == {s.READ_OK}
assert set(rig.serve(range(101, 150), s.BACKGROUND)) == {s.READ_OK}
rig.check(rows)
assert rig.state.control[s.BACKGROUND_IN_FLIGHT] == 0
print("states", [int(rig.state.control[s.reader_line(r) + s.R_STATE]) for r in range(2)])
rig.stop()
print("after", [int(rig.state.control[s.reader_line(r) + s.R_STATE]) for r in range(2)])
rig.close()
"""


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_ring_lost_after_open_is_replaced_by_preads(tmp_path, when):
    """The process forbids itself io_uring once the store is open: every page still arrives, read by preads."""
    result = subprocess.run([sys.executable, "-c", LOST_RING, str(tmp_path), when], capture_output=True, text=True, timeout=120,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])})
    assert result.returncode == 0, result.stderr
    states, after = (line.split(" ", 1)[1] for line in result.stdout.splitlines())
    assert str(READER_PLAIN) in states
    if when == "idle":                                       # nothing is left in the kernel: staging may be freed
        assert after == str([READER_RETURNED] * 2)
    assert "goes on with preads" in result.stderr
