"""Queue gds over a fake cuFile: every row exact and checked before it is stored, cuFile's limits kept, faults survived or named."""

import contextlib
import errno
import os
import threading
import time

import numpy as np
import pytest
from fake_cufile import FakeCufile, HostDevice
from queue_pages import CODES, GENERATION, LAYER, PAGES, PER_PAGE, SCALES, STRIDE, Rig, make_columns, until

from ssdgram import _state as s
from ssdgram.errors import UnavailableError
from ssdgram.queues import _handoff, choose, gds
from ssdgram.queues.state import collect, new_state, push


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    return folder, make_columns(folder)


class GdsRig(Rig):
    """The rig of the other queues, over a fake cuFile."""

    def __init__(self, folder, *, fake=None, pages=256, targets=1024, readers=1, depth=32, **settings):
        self.fds = []
        files = np.zeros(2, s.FILE)
        for column in range(2):
            path = folder / f"column-{column:02}.rows"
            fd = self.open(path, os.O_RDONLY)
            files[column] = (fd, self.open(path, os.O_RDONLY), LAYER, column, 0, column, 2, 0, PAGES * PER_PAGE, PAGES)
        self.state = new_state(files, readers=readers, depth=depth, pages=pages, targets=targets, slots=targets,
                               code_bytes=CODES, scale_bytes=SCALES, rows_per_page=PER_PAGE, slot_stride=STRIDE,
                               generation=GENERATION, **settings)
        self.fake = fake or FakeCufile()
        self.device = HostDevice(self.state)
        self.queue = choose("gds", self.state, gds={"cufile": self.fake, "device": self.device})
        self.used = 0
        self.wanted = []


@contextlib.contextmanager
def running(folder, clean=True, **settings):
    rig = GdsRig(folder, **settings)
    try:
        rig.queue.start()
        yield rig
    finally:
        rig.fake.hold = False
        rig.device.release()
        rig.close()
    if clean:
        assert rig.fake.clean and rig.device.closed, rig.fake.complaints
    else:
        assert len(rig_descriptors(rig.fake)) == 2           # a lost batch may still read: no other file may get its number


def rig_descriptors(fake):
    """Descriptors that a fake was given and that are still open."""
    return [fd for fd in fake.given if os.path.exists(f"/proc/self/fd/{fd}")]


def spread(rig, count, rows=4, seed=2):
    """Page records 0 .. count - 1 over both files, each with up to `rows` rows wanted."""
    random = np.random.default_rng(seed)
    for index in range(count):
        rig.want(index, index % 2, random.integers(PAGES), random.choice(PER_PAGE, random.integers(0, rows + 1), replace=False))


# ---------------------------------------------------------------- reads that succeed


@pytest.mark.parametrize("depth", [1, 2, 32, 512])
def test_every_wanted_row_arrives(columns, depth):
    folder, rows = columns
    with running(folder, depth=depth) as rig:
        spread(rig, 200)
        assert set(rig.serve(range(200))) == {s.READ_OK}
        rig.check(rows)
        assert rig.total(s.R_READS) == 200
        assert rig.total(s.R_ERRORS) == rig.total(s.R_RETRIES) == 0
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == rig.total(s.R_OLDEST_NS) == 0)


def test_batches_keep_to_128_entries_and_several_handles_are_in_flight(columns):
    folder, rows = columns
    with running(folder, depth=1024, pages=1024, targets=2048) as rig:
        assert (rig.queue.lanes, rig.queue.entries) == (8, 128)
        spread(rig, 1000, rows=1)
        assert set(rig.serve(range(1000))) == {s.READ_OK}
        rig.check(rows)
        assert max(rig.fake.sizes) == 128 and rig.fake.most_busy >= 4
        assert sum(rig.fake.sizes) == 1001                   # and the first one, which tries cuFile out


def test_a_driver_that_takes_smaller_batches_gets_them(columns):
    folder, _ = columns
    fake = FakeCufile()
    fake.max_batch = 5
    rig = GdsRig.__new__(GdsRig)
    with pytest.raises(UnavailableError, match="5022"):
        GdsRig.__init__(rig, folder, fake=fake)
    assert gds.shape_of(1024, 5) == (8, 5) and gds.shape_of(1) == (1, 1) and gds.shape_of(4096) == (16, 128)
    for fd in rig.fds:
        os.close(fd)


def test_completions_in_any_order_and_a_few_at_a_time(columns):
    folder, rows = columns
    fake = FakeCufile(seed=7)
    fake.events_most = 3
    with running(folder, fake=fake, depth=64) as rig:
        spread(rig, 200)
        assert set(rig.serve(range(200))) == {s.READ_OK}
        rig.check(rows)


def test_more_rows_than_a_round_takes(columns, monkeypatch):
    folder, rows = columns
    with running(folder, targets=4096, pages=64) as rig:
        for index in range(40):
            rig.want(index, 0, index, [place for _ in range(6) for place in range(PER_PAGE)])
        assert set(rig.serve(range(40))) == {s.READ_OK}
        rig.check(rows)
        assert max(rig.device.launches) <= gds.JOBS
    with running(folder, targets=4096, pages=64) as rig:     # one page whose rows alone need several rounds
        rig.want(0, 1, 3, [k % PER_PAGE for k in range(3000)])
        assert set(rig.serve([0])) == {s.READ_OK}
        rig.check(rows)
        assert len(rig.device.launches) == 3


def test_background_pages_arrive_and_leave_room_for_steps(columns):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, fake=fake, depth=32) as rig:
        fake.hold = True
        for index in range(60):
            rig.want(index, 0, index % PAGES, [index % PER_PAGE])
        push(rig.state, np.arange(50), s.BACKGROUND)
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == 16)  # one of two lanes: the other is kept for steps
        push(rig.state, np.arange(50, 60))
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == 26)
        fake.hold = False
        assert sorted(collect(rig.state, 60)) == list(range(60))
        rig.check(rows)
        assert rig.state.control[s.BACKGROUND_IN_FLIGHT] == 0


def test_two_readers_share_the_work(columns):
    folder, rows = columns
    with running(folder, readers=2, depth=16) as rig:
        spread(rig, 250)
        assert set(rig.serve(range(250))) == {s.READ_OK}
        rig.check(rows)


def test_an_idle_reader_wakes_for_a_page(columns):
    folder, rows = columns
    with running(folder) as rig:
        for index in range(20):
            time.sleep(0.005)
            rig.want(index, 0, index, [1])
            assert rig.serve([index]) == [s.READ_OK]
        rig.check(rows)


# ---------------------------------------------------------------- nothing before its check


def test_nothing_is_done_before_the_gpu_says_so(columns):
    folder, rows = columns
    with running(folder) as rig:
        rig.device.hold = True
        rig.want(0, 0, 3, [2, 5])
        push(rig.state, np.array([0]))
        assert until(lambda: len(rig.device.held) == 1)
        assert len(collect(rig.state, 1, timeout_s=0.1)) == 0
        assert rig.total(s.R_OLDEST_NS) > 0                  # a GPU that does not answer is seen as a read that takes long
        rig.device.release()
        assert collect(rig.state, 1).tolist() == [0]
        rig.check(rows)


@pytest.mark.parametrize("byte", [0, 264 * 7 + 255, 264 * 7 + 263])
def test_a_corrupt_page_is_caught_by_the_check_and_read_again(columns, byte):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, fake=fake) as rig:
        first = fake.reads
        fake.effect = lambda number, offset: ("flip", byte) if number - first < 3 else None
        rig.want(0, 0, 9, [byte // 264, 3])
        assert rig.serve([0]) == [s.READ_OK]
        rig.check(rows)
        assert rig.total(s.R_RETRIES) == 3 and fake.reads - first == 3         # the fourth was a pread


def test_a_page_that_is_corrupt_on_disk_delivers_its_right_rows_only(columns, tmp_path):
    folder, rows = columns
    for column in range(2):
        data = bytearray((folder / f"column-{column:02}.rows").read_bytes())
        data[4096 * 2 + 264 * 4 + 17] ^= 0x40
        (tmp_path / f"column-{column:02}.rows").write_bytes(data)
    with running(tmp_path) as rig:
        rig.want(0, 0, 2, [4, 5])
        rig.want(1, 1, 1, [4])
        assert rig.serve([0, 1]).tolist() == [s.READ_CHECK, s.READ_OK]
        bad = [int(rig.state.targets["bad"][slot]) for slot in range(3)]
        assert bad == [1, 0, 0]                              # place 4 of page 2; place 5 is right
        assert not rig.bundle(0, 0).any()                    # never stored
        assert np.array_equal(rig.bundle(0, 1), rows[0, 2 * PER_PAGE + 5])
        assert rig.total(s.R_RETRIES) == 3


def test_another_stores_page_is_refused(columns):
    folder, _ = columns
    with running(folder) as rig:
        rig.device.generation += 1
        rig.want(0, 0, 2, [4])
        assert rig.serve([0]).tolist() == [s.READ_CHECK]
        assert not rig.bundle(0, 0).any()


# ---------------------------------------------------------------- reads that fail


@pytest.mark.parametrize("effect", [("error", errno.EIO), ("short", 0), ("short", 4095), ("error", 5030), ("error", 0)])
def test_three_failures_are_nobodys_business(columns, effect):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, fake=fake) as rig:
        first = fake.reads
        fake.effect = lambda number, offset: effect if number - first < 3 else None
        rig.want(0, 0, 9, [1, 2])
        assert rig.serve([0]) == [s.READ_OK]
        rig.check(rows)
        assert rig.total(s.R_RETRIES) == 3


def test_every_third_read_fails_one_way_or_another(columns):
    folder, rows = columns
    fake = FakeCufile()
    kinds = [("error", errno.EIO), ("short", 100), ("flip", 0), ("error", errno.EAGAIN)]
    fake.effect = lambda number, offset: kinds[number // 3 % 4] if number % 3 == 2 else None
    with running(folder, fake=fake, depth=64) as rig:
        spread(rig, 250)
        assert set(rig.serve(range(250))) == {s.READ_OK}
        rig.check(rows)
        assert rig.total(s.R_RETRIES) >= 60


def test_all_reads_by_cufile_fail_and_every_page_comes_by_pread(columns):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, fake=fake, depth=16) as rig:
        fake.effect = lambda number, offset: ("error", errno.EIO)
        spread(rig, 200)
        assert set(rig.serve(range(200), timeout_s=30)) == {s.READ_OK}
        rig.check(rows)
        assert rig.total(s.R_RETRIES) == 600


def test_the_file_ends_before_the_page(columns, tmp_path):
    folder, rows = columns
    for column in range(2):
        data = (folder / f"column-{column:02}.rows").read_bytes()
        (tmp_path / f"column-{column:02}.rows").write_bytes(data[:4096 * 5 + 1000])
    with running(tmp_path) as rig:
        for index, page in enumerate((4, 5, 6)):
            rig.want(index, 0, page, [0])
        assert rig.serve(range(3)).tolist() == [s.READ_OK, s.READ_SHORT, s.READ_SHORT]
        rig.check(rows)


@pytest.mark.parametrize("result, status", [(-errno.EIO, errno.EIO), (100, s.READ_SHORT), (s.FAULT_FLIP, s.READ_CHECK)])
def test_the_fault_injector_of_the_other_queues_works_here_too(columns, result, status):
    folder, rows = columns
    with running(folder) as rig:
        rig.want(0, 0, 9, [1])
        rig.fault(result)
        assert rig.serve([0]).tolist() == [status]
        rig.fault(result, times=3)
        rig.want(1, 0, 9, [1])
        assert rig.serve([1]).tolist() == [s.READ_OK]
        rig.check(rows)


# ---------------------------------------------------------------- cuFile itself fails


def test_a_lost_batch_handle_costs_no_page(columns):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, clean=False, fake=fake, depth=64) as rig:
        fake.refuse_submit = lambda number: "CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR (5040)" if number == 1 else None
        spread(rig, 200)
        assert set(rig.serve(range(200))) == {s.READ_OK}
        rig.check(rows)
    assert not rig.device.closed                             # its staging is cuFile's until the process ends


def test_a_read_that_timed_out_costs_its_handle_and_no_page(columns):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, clean=False, fake=fake, depth=64) as rig:
        first = fake.reads
        fake.effect = lambda number, offset: "timeout" if number == first + 5 else None
        spread(rig, 200)
        assert set(rig.serve(range(200))) == {s.READ_OK}
        rig.check(rows)
        assert rig.queue._lanes[0].lanes["lost"].sum() == 1 and not fake.complaints
    assert not rig.device.closed                             # the read may land after all


@pytest.mark.parametrize("what", ["submit", "status"])
def test_without_any_handle_the_reader_goes_on_with_preads(columns, what):
    folder, rows = columns
    fake = FakeCufile()
    with running(folder, clean=False, fake=fake, depth=64) as rig:
        setattr(fake, f"refuse_{what}", lambda number: "CU_FILE_IO_ERROR (5044)")
        spread(rig, 200)
        assert set(rig.serve(range(150))) == {s.READ_OK}
        assert set(rig.serve(range(150, 200), s.BACKGROUND)) == {s.READ_OK}
        rig.check(rows)
        assert rig.state.control[s.BACKGROUND_IN_FLIGHT] == 0


def test_a_gpu_that_takes_no_work_fails_every_read_and_hangs_none(columns):
    folder, _ = columns
    with running(folder, depth=16) as rig:
        rig.device.broken = True
        spread(rig, 120, rows=1)
        wanting = rig.state.pages["target"][:120] >= 0
        statuses = rig.serve(range(120))
        assert set(statuses[wanting]) == {errno.EIO} and not rig.state.slab.any()
        assert rig.serve([0]).tolist() == [errno.EIO]


def test_events_of_no_read_are_passed_over(columns):
    folder, rows = columns

    class Odd(FakeCufile):
        def batch_io_get_status(self, batch, least, count_address, events_address, timeout_address):
            super().batch_io_get_status(batch, least, count_address, events_address, timeout_address)
            from fake_cufile import at
            count, events = at(count_address, np.uint32), at(events_address, self.io_events_dtype, 4)
            if self.statuses > 1 and count[0] == 0:
                events["cookie"], events["status"], events["ret"] = (0, -5, 1 << 40, 3), 16, 4096
                count[0] = 4

    with running(folder, fake=Odd()) as rig:
        for index in range(30):
            rig.want(index, 0, index, [1])
            assert rig.serve([index]) == [s.READ_OK]
        rig.check(rows)


@pytest.mark.parametrize("call", ["handle_register", "batch_io_set_up", "batch_io_submit"])
def test_what_cufile_cannot_do_is_said_at_open_in_its_own_words(columns, call):
    folder, _ = columns
    fake = FakeCufile()

    def refuse(*arguments):
        raise fake.cuFileError("CU_FILE_BATCH_NOCOMPAT_ERROR (5049): compat mode off error")

    setattr(fake, call, refuse)
    rig = GdsRig.__new__(GdsRig)
    with pytest.raises(UnavailableError, match=r"5049.*queue='auto'"):
        GdsRig.__init__(rig, folder, fake=fake)
    assert rig.device.closed and not fake.batches and not fake.files and not rig_descriptors(fake)
    for fd in rig.fds:
        os.close(fd)


def test_a_first_read_that_fails_is_said_at_open(columns):
    folder, _ = columns
    fake = FakeCufile()
    fake.effect = lambda number, offset: ("error", errno.EINVAL)
    rig = GdsRig.__new__(GdsRig)
    with pytest.raises(UnavailableError, match=r"^queue 'gds': the first read by a cuFile batch came to status 64, result -22"):
        GdsRig.__init__(rig, folder, fake=fake)
    for fd in rig.fds:
        os.close(fd)


def test_a_call_that_does_not_return_is_not_waited_for(columns, monkeypatch):
    folder, _ = columns
    from ssdgram import _cufile

    monkeypatch.setattr(_cufile, "CALL_TIMEOUT_S", 0.5)
    fake, over = FakeCufile(), threading.Event()
    fake.batch_io_set_up = lambda count: over.wait(60) or 1
    rig = GdsRig.__new__(GdsRig)
    with pytest.raises(UnavailableError, match=r"set-up has not returned for 0\.5 s"):
        GdsRig.__init__(rig, folder, fake=fake)
    over.set()
    assert not rig.device.closed                             # the call may yet use its memory
    for fd in rig.fds:
        os.close(fd)


def test_a_layout_that_is_not_known_is_refused():
    class Other(FakeCufile):
        io_events_dtype = np.dtype([("cookie", "<i8"), ("ret", "<u8"), ("status", "<i4")])

    with pytest.raises(UnavailableError, match="lays its structs out"):
        gds.check_layout(Other())
    gds.check_layout(FakeCufile())


def test_the_queue_alone_says_what_it_needs():
    state = new_state(np.zeros(1, s.FILE))
    with pytest.raises(UnavailableError, match="device='cuda'"):
        choose("gds", state)


# ---------------------------------------------------------------- the end


def test_stop_waits_for_reads_and_rounds_under_way(columns):
    folder, rows = columns
    fake = FakeCufile()
    rig = GdsRig(folder, fake=fake)
    rig.queue.start()
    fake.hold = True
    spread(rig, 20)
    push(rig.state, np.arange(20))
    assert until(lambda: rig.total(s.R_IN_FLIGHT) == 20)
    rig.state.control[s.STOP] = 1
    rig.queue.wake_all()
    assert not rig.queue.join(0.1)
    fake.hold = False
    assert rig.queue.join(5) and not rig.queue.stuck
    rig.check(rows)                                          # what was under way landed, and was delivered
    rig.close()
    assert fake.clean


def test_reads_that_never_complete_are_cancelled_then_their_memory_is_kept(columns):
    folder, _ = columns
    fake = FakeCufile()
    rig = GdsRig(folder, fake=fake)
    rig.queue.start()
    fake.effect = lambda number, offset: "stall"
    rig.want(0, 0, 1, [1])
    push(rig.state, np.array([0]))
    assert until(lambda: rig.total(s.R_IN_FLIGHT) == 1)
    assert 0.9 < rig.stop()                                  # a second of grace, then cuFile is asked to cancel
    assert not rig.queue.stuck
    rig.close()
    assert fake.clean and rig.device.closed

    fake = FakeCufile()
    fake.batch_io_cancel = lambda batch: None                # and one that cannot cancel
    rig = GdsRig(folder, fake=fake)
    rig.queue.start()
    fake.effect = lambda number, offset: "stall"
    rig.want(0, 0, 1, [1])
    push(rig.state, np.array([0]))
    assert until(lambda: rig.total(s.R_IN_FLIGHT) == 1)
    rig.stop()
    assert rig.queue.stuck
    assert rig.state.control[s.reader_line(0) + s.R_STATE] == _handoff.READER_STUCK
    rig.close()
    assert len(rig_descriptors(fake)) == 2
    assert not rig.device.closed and fake.batches            # nothing of it was freed or destroyed


def test_stop_on_an_idle_queue_is_quick(columns):
    folder, _ = columns
    with running(folder) as rig:
        assert rig.stop() < 0.9


