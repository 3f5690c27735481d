"""One suite for both queues, with and without faults; then the choice between them and the hand-over's small parts."""

import errno
import os
import threading
import time

import numba
import numpy as np
import pytest
from queue_pages import CODES, PAGES, PER_PAGE, SCALES, Rig, make_columns, running, until

from ssdgram import _state as s
from ssdgram import queues
from ssdgram._calls import give_way
from ssdgram._compiled import atomic_load_at, compiled, now_ns
from ssdgram.errors import UnavailableError
from ssdgram.queues import _faults, _handoff, probe
from ssdgram.queues.state import collect, file_records, new_state, push

URING = probe.io_uring().ok


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    return folder, make_columns(folder)


@pytest.fixture(params=[pytest.param("uring", marks=pytest.mark.skipif(not URING, reason="io_uring is refused here")), "threads"])
def name(request):
    return request.param


# ---------------------------------------------------------------- reads that succeed


def test_every_wanted_row_arrives(columns, name):
    folder, rows = columns
    with running(folder, name) as rig:
        random = np.random.default_rng(2)
        for index in range(200):
            rig.want(index, index % 2, random.integers(PAGES), random.choice(PER_PAGE, random.integers(0, 5), replace=False))
        assert set(rig.serve(range(200))) == {s.READ_OK}
        rig.check(rows)
        assert rig.total(s.R_READS) == 200
        assert rig.total(s.R_ERRORS) == rig.total(s.R_RETRIES) == 0
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == rig.total(s.R_OLDEST_NS) == 0)
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        assert np.all((rig.state.pages["submit_ns"][:200] > now - 60e9) & (rig.state.pages["submit_ns"][:200] <= now))


def test_background_pages_arrive_and_give_their_budget_back(columns, name):
    folder, rows = columns
    with running(folder, name, background_depth=3) as rig:
        for index in range(100):
            rig.want(index, 0, index % PAGES, [index % PER_PAGE])
        assert set(rig.serve(range(100), s.BACKGROUND)) == {s.READ_OK}
        rig.check(rows)
        assert rig.state.control[s.BACKGROUND_IN_FLIGHT] == 0


@pytest.mark.parametrize("direct", [True, False])
def test_one_page_at_a_time_and_bursts_after_sleep(columns, name, direct):
    """No wake-up is lost: pushes that meet sleeping, spinning and busy readers."""
    folder, _ = columns
    with running(folder, name, readers=3, depth=4 if name == "uring" else 1, direct=direct, spin_us=50) as rig:
        random = np.random.default_rng(3)
        for turn in range(300):
            count = int(random.choice([1, 1, 2, 40]))
            for index in range(count):
                rig.want(index, 0, int(random.integers(PAGES)))
            assert set(rig.serve(range(count), int(random.integers(2)))) == {s.READ_OK}, turn
            if turn % 10 == 0:
                time.sleep(0.002)


def test_steps_are_pulled_before_background(columns, name):
    folder, _ = columns
    rig = Rig(folder, name, readers=1, depth=1)
    try:
        for index in range(60):
            rig.want(index, 0, index % PAGES)
        push(rig.state, np.arange(50), s.BACKGROUND)
        push(rig.state, np.arange(50, 60), s.STEP)
        rig.queue.start()
        assert list(collect(rig.state, 60)[:10]) == list(range(50, 60))
    finally:
        rig.close()


def test_background_leaves_room_for_steps(columns, name):
    """Background reads that the drive does not answer fill their budget, and a step goes past them."""
    folder, rows = columns
    with running(folder, name, background_depth=8) as rig:
        limit = 3 if name == "threads" else 8                # four readers: one is kept for steps
        rig.fault(s.FAULT_STALL, file=1)
        for index in range(100):
            rig.want(index, 1, index % PAGES)
        push(rig.state, np.arange(100), s.BACKGROUND)
        assert until(lambda: rig.state.control[s.BACKGROUND_IN_FLIGHT] == limit)
        for index in range(100, 150):
            rig.want(index, 0, index % PAGES, [3])
        assert set(rig.serve(range(100, 150))) == {s.READ_OK}
        rig.check(rows)
        assert rig.state.control[s.BACKGROUND_IN_FLIGHT] == rig.total(s.R_IN_FLIGHT) == limit
        rig.state.faults[s.FAULT_TIMES] = 0
        assert len(collect(rig.state, 100)) == 100


def test_an_index_in_both_rings_is_read_once(columns, name):
    folder, _ = columns
    rig = Rig(folder, name)
    try:
        for index in range(20):
            rig.want(index, 0, index)
        push(rig.state, np.arange(20), s.BACKGROUND)
        push(rig.state, np.arange(10), s.STEP)               # ten of them are wanted sooner
        rig.queue.start()
        assert sorted(collect(rig.state, 20)) == list(range(20))
        assert len(collect(rig.state, 1, timeout_s=0.1)) == 0
        assert rig.state.control[s.BACKGROUND_IN_FLIGHT] == 0
    finally:
        rig.close()


@numba.njit(nogil=False)
def keep_gil_until(addresses, total, timeout_ns):
    """Wait for a sum of words, and let no thread run Python meanwhile. Whether it came."""
    begin = now_ns()
    while now_ns() - begin < timeout_ns:
        found = 0
        for address in addresses:
            found += atomic_load_at(address)
        if found == total:
            return True
        give_way()
    return False


def test_readers_do_not_need_the_gil(columns, name):
    folder, _ = columns
    with running(folder, name, pages=2048) as rig:
        for index in range(2000):
            rig.want(index, index % 2, index % PAGES)
        rig.serve(range(8))                                  # all set up
        counts = np.array([rig.state.control[s.reader_line(reader) + s.R_READS:].ctypes.data for reader in range(rig.queue.readers)])
        keep_gil_until(counts, -1, 0)                        # compiled by now
        push(rig.state, np.arange(2000))
        assert keep_gil_until(counts, 2008, 20_000_000_000)


# ---------------------------------------------------------------- faults


FAULTS = {"EIO": -errno.EIO, "EINTR": -errno.EINTR, "EAGAIN": -errno.EAGAIN, "short": 512, "unaligned": 1000, "nothing": 0,
          "flip": s.FAULT_FLIP}
STATUS = {"EIO": errno.EIO, "EINTR": errno.EINTR, "EAGAIN": errno.EAGAIN, "short": s.READ_SHORT, "unaligned": s.READ_SHORT,
          "nothing": s.READ_SHORT, "flip": s.READ_CHECK}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_read_spoiled_once_is_read_again(columns, name, fault):
    """The n-th read fails, for every n: the rows arrive all the same."""
    folder, rows = columns
    with running(folder, name) as rig:
        for n in range(12):
            rig.fault(FAULTS[fault], after=n, times=1)
            for index in range(8):
                rig.want(index, index % 2, index, [index])
            assert set(rig.serve(range(8))) == {s.READ_OK}
            assert rig.total(s.R_RETRIES) == min(n + 1, 8)
        rig.check(rows)
        assert rig.total(s.R_ERRORS) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_tries_are_bounded_and_the_last_status_is_kept(columns, name, fault):
    folder, rows = columns
    with running(folder, name, retries=2) as rig:
        rig.fault(FAULTS[fault], file=1)
        for index in range(40):
            rig.want(index, index % 2, index % PAGES, [1, 14])
        status = rig.serve(range(40))
        assert set(status[0::2]) == {s.READ_OK}
        assert set(status[1::2]) == {STATUS[fault]}
        if fault != "flip":                                  # of a flipped page, the rows that are right are delivered
            rig.check(rows)
        assert rig.total(s.R_RETRIES) == 20 * 3              # two more, and the one by the buffered descriptor
        assert rig.total(s.R_ERRORS) == 20
        rig.fault(0, times=0)
        assert set(rig.serve(range(40))) == {s.READ_OK}      # and the queue goes on


def test_the_last_try_takes_the_other_path(columns, name):
    """The direct descriptor cannot be read at all; the buffered one serves."""
    folder, rows = columns
    for retries in (0, 2):
        rig = Rig(folder, name, retries=retries)
        try:
            rig.state.files["fd"][1] = rig.open(folder, os.O_RDONLY)   # a directory
            if name == "uring":                              # descriptors are registered as the queue is made
                rig.queue.close()
                rig.queue = queues.choose(name, rig.state)
            rig.queue.start()
            rig.want(0, 1, 5, [2])
            assert list(rig.serve([0])) == [s.READ_OK]
            rig.check(rows)
            assert rig.state.pages["tries"][0] == retries + 1
        finally:
            rig.close()


def test_a_wrong_row_is_never_delivered(columns, name):
    """Another column's page under this column's name: right checksums, wrong place."""
    folder, rows = columns
    rig = Rig(folder, name)
    try:
        rig.state.files["column"][0] = 9
        rig.queue.start()
        rig.want(0, 0, 0, range(PER_PAGE))
        rig.want(1, 1, 0, range(PER_PAGE))
        assert list(rig.serve([0, 1])) == [s.READ_CHECK, s.READ_OK]
        rig.check(rows)
        assert set(rig.state.targets["bad"][:PER_PAGE]) == {1}
    finally:
        rig.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_within_a_page(tmp_path, name, direct):
    rows = make_columns(tmp_path)
    for column, size in ((0, 4096 * 3 + 1), (1, 4096 * 5 + 2048)):
        os.truncate(tmp_path / f"column-{column:02}.rows", size)
    with running(tmp_path, name, direct=direct) as rig:
        for index, (file, page) in enumerate([(0, 2), (0, 3), (0, 4), (1, 4), (1, 5), (1, 39)]):
            rig.want(index, file, page, [0, 14])
        assert list(rig.serve(range(6))) == [s.READ_OK, s.READ_SHORT, s.READ_SHORT, s.READ_OK, s.READ_SHORT, s.READ_SHORT]
        rig.check(rows)


# ---------------------------------------------------------------- a drive that does not answer; stopping


def test_unanswered_reads_are_reported_and_others_go_on(columns, name):
    folder, rows = columns
    with running(folder, name) as rig:
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        rig.fault(s.FAULT_STALL, times=2)
        for index in range(20):
            rig.want(index, 0, index, [0])
        push(rig.state, np.arange(20))
        assert len(collect(rig.state, 18)) == 18
        assert until(lambda: rig.total(s.R_IN_FLIGHT) == 2)
        oldest = [int(rig.state.control[s.reader_line(reader) + s.R_OLDEST_NS]) for reader in range(rig.queue.readers)]
        assert all(ns == 0 or before < ns < time.clock_gettime_ns(time.CLOCK_MONOTONIC) for ns in oldest)
        assert any(oldest)
        rig.state.faults[s.FAULT_TIMES] = 0
        assert len(collect(rig.state, 2)) == 2
        assert until(lambda: rig.total(s.R_OLDEST_NS) == 0)
        rig.check(rows)


def test_stop_with_unanswered_reads_is_bounded(columns, name):
    folder, _ = columns
    rig = Rig(folder, name)
    rig.queue.start()
    rig.fault(s.FAULT_STALL)
    for index in range(3):
        rig.want(index, 0, index)
    push(rig.state, np.arange(3))
    assert until(lambda: rig.total(s.R_IN_FLIGHT) == 3)
    assert 1.5 < rig.stop() < 5
    assert rig.queue.stuck
    rig.close()


def test_stop_finds_sleeping_and_spinning_readers(columns, name):
    folder, _ = columns
    for spin_us in (0, 60_000_000):
        rig = Rig(folder, name, spin_us=spin_us)
        rig.queue.start()
        rig.want(0, 0, 0)
        rig.serve([0])
        time.sleep(0.05)
        rig.stop()                                           # long before the spin would end, or at all
        assert not rig.queue.stuck
        states = {int(rig.state.control[s.reader_line(reader) + s.R_STATE]) for reader in range(rig.queue.readers)}
        assert states == {queues.READER_RETURNED}
        rig.close()
        rig.queue.close()                                    # idempotent


def test_idle_readers_take_no_cpu(columns, name):
    folder, _ = columns
    with running(folder, name, spin_us=100) as rig:
        rig.want(0, 0, 0)
        rig.serve([0])
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_affinity_and_signals(columns, name):
    folder, _ = columns
    rig = Rig(folder, name)
    cpu = min(os.sched_getaffinity(0))
    rig.queue.close()
    rig.queue = queues.choose(name, rig.state, affinity=[cpu])
    rig.queue.start()
    for thread in rig.queue._threads:
        assert os.sched_getaffinity(thread.native_id) == {cpu}
        with open(f"/proc/self/task/{thread.native_id}/status") as file:
            blocked = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
        assert blocked >> 1 & 1                              # SIGINT goes to the thread that waits
    assert cpu in os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) != {cpu} or os.cpu_count() == 1
    rig.close()


def test_a_reader_that_cannot_start_is_named(columns, name, monkeypatch):
    folder, _ = columns
    rig = Rig(folder, name)

    def refuse(reader):
        if reader == rig.queue.readers - 1:
            raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(rig.queue, "prepare", refuse)
    with pytest.raises(UnavailableError, match="could not start"):
        rig.queue.start()
    assert not any(thread.is_alive() for thread in rig.queue._threads)
    rig.close()


def test_a_thread_that_cannot_be_had_is_named(columns, name, monkeypatch):
    """A limit of threads: those that started are ended."""
    folder, _ = columns
    rig, start, started = Rig(folder, name), threading.Thread.start, []

    def refuse(thread):
        if len(started) == rig.queue.readers - 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UnavailableError, match="a reader could not start: can't start new thread"):
        rig.queue.start()
    assert not any(thread.is_alive() for thread in started)
    rig.close()


# ---------------------------------------------------------------- the choice


@pytest.fixture
def small(tmp_path):
    (tmp_path / "f").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield new_state(file_records([(fd, fd)]), readers=2, depth=4, pages=4)
    os.close(fd)


def test_choose_by_name(small, name, caplog):
    with caplog.at_level("INFO", logger="ssdgram"):
        queue = queues.choose(name, small, 2, 4)
    assert queue.name == name
    assert queue.reason == "asked for by name"
    assert [record.message for record in caplog.records if record.message.startswith(f"queue {name} (asked for by name)")]
    queue.close()


def test_auto_falls_back_and_says_why(small, monkeypatch, caplog):
    monkeypatch.setattr(probe, "io_uring", lambda: probe.Finding(False, "a seccomp profile refuses it"))
    assert queues.resolve("auto")[0] == "threads"
    with caplog.at_level("INFO", logger="ssdgram"):
        queue = queues.choose("auto", small)
    assert queue.name == "threads"
    assert "seccomp" in queue.reason
    assert "seccomp" in caplog.text
    with pytest.raises(UnavailableError, match=r"asked for by name.*seccomp.*threads"):
        queues.choose("uring", small)


def test_auto_falls_back_if_the_real_rings_are_refused(small, monkeypatch):
    def refuse(state, reason, affinity):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(probe, "io_uring", lambda: probe.Finding(True, "works"))
    monkeypatch.setattr(queues, "UringQueue", refuse)
    queue = queues.choose("auto", small)
    assert (queue.name, "Cannot allocate memory" in queue.reason) == ("threads", True)
    with pytest.raises(UnavailableError, match="Cannot allocate memory"):
        queues.choose("uring", small)


def test_choose_refuses_what_does_not_fit(small):
    with pytest.raises(ValueError, match="expected one of auto, uring, threads"):
        queues.choose("mmap", small)
    with pytest.raises(ValueError, match="laid out for readers = 2, not 3"):
        queues.choose("threads", small, 3)
    with pytest.raises(ValueError, match="laid out for depth = 4, not 1"):
        queues.choose("threads", small, 2, 1)
    with pytest.raises(ValueError, match="none of these CPUs"):
        queues.choose("threads", small, affinity=[100_000])


def test_defaults():
    assert [queues.default_readers("uring", cpus) for cpus in (1, 2, 4, 5, 16, 17, 128)] == [1, 1, 1, 2, 2, 4, 4]
    assert [queues.default_readers("threads", cpus) for cpus in (1, 8, 12, 128)] == [16, 16, 24, 32]
    assert queues.default_readers("uring") == queues.default_readers("uring", probe.cpu_count())
    assert (queues.default_depth("uring"), queues.default_depth("threads")) == (256, 1)


# ---------------------------------------------------------------- small parts, with plain twins


@compiled
def call_pull(state, want, found):
    return _handoff.pull_step(state, want, found)


@compiled
def call_pull_background(state, want, found):
    return _handoff.pull_background(state, want, found)


@compiled
def call_spoil(state, index, result, page):
    return _faults.spoil(state, index, result, page)


def test_pull_is_a_queue_and_skips_claimed_pages(small):
    found, twin, pushed = np.zeros(8, np.int32), [], 0
    random = np.random.default_rng(4)
    for _ in range(200):                                     # positions go round the ring of four many times
        while len(twin) < 4 and random.integers(3):
            push(small, np.array([pushed % 4]))
            if random.integers(4) == 0:
                small.claims[pushed % 4] = 1
            else:
                twin.append(pushed % 4)
            pushed += 1
            if pushed - small.control[s.STEP_HEAD] == 4:
                break
        want = int(random.integers(1, 5))
        count = call_pull(small, want, found)
        assert count <= want
        assert (count > 0) == bool(twin)
        assert list(found[:count]) == twin[:count]
        del twin[:count]


def test_many_pullers_take_each_page_once(small):
    state = new_state(small.files, readers=4, depth=1, pages=20_000)
    push(state, np.arange(20_000))
    taken = [[] for _ in range(4)]

    def work(mine):
        found = np.zeros(7, np.int32)
        while count := call_pull(state, 7, found):
            mine.extend(found[:count].tolist())

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(index for mine in taken for index in mine) == list(range(20_000))
    assert all(mine == sorted(mine) for mine in taken)


def test_background_budget(small):
    small.params[s.P_BACKGROUND_DEPTH] = 3
    found = np.zeros(8, np.int32)
    push(small, np.arange(4), s.BACKGROUND)
    assert call_pull_background(small, 2, found) == 2
    assert call_pull_background(small, 2, found) == 1
    assert call_pull_background(small, 2, found) == 0
    assert small.control[s.BACKGROUND_IN_FLIGHT] == 3
    small.control[s.BACKGROUND_IN_FLIGHT] -= 2
    assert call_pull_background(small, 2, found) == 1
    assert small.control[s.BACKGROUND_IN_FLIGHT] == 2


def plain_spoil(faults, count):
    """Twin of `spoil` for `count` reads of file 0, each of which returned 4096."""
    after, times, result, file = (int(word) for word in faults)
    return [result if times != 0 and file in (-1, 0) and k >= after and (times < 0 or k < after + times) else 4096
            for k in range(count)]


@pytest.mark.parametrize("faults", [(0, 0, -5, -1), (0, -1, -5, -1), (2, 3, -5, -1), (3, -1, 100, 0), (0, 2, -5, 1),
                                    (0, 1, 0, -1)])
def test_spoil(small, faults):
    small.faults[:] = faults
    page = np.zeros(4096, np.uint8)
    assert [call_spoil(small, 0, 4096, page.ctypes.data) for _ in range(8)] == plain_spoil(faults, 8)


def test_flip_spoils_a_wanted_row(small):
    small.params[[s.P_CODE_BYTES, s.P_SCALE_BYTES]] = CODES, SCALES
    small.faults[:] = (0, -1, s.FAULT_FLIP, -1)
    page = np.zeros(4096, np.uint8)
    assert call_spoil(small, 0, 4096, page.ctypes.data) == 4096
    assert list(np.flatnonzero(page)) == [0]
    page[:] = 0
    small.targets[0] = (0, 4, -1, 0)
    small.pages["target"][0] = 0
    call_spoil(small, 0, 4096, page.ctypes.data)
    assert list(np.flatnonzero(page)) == [4 * (CODES + SCALES)]
