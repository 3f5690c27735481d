"""Reads that fail, come back wrong, late or not at all: a typed error that names file, page, rows and positions, and nothing wrong.

The fault injector of the queues spoils reads as a drive would; damaged files are damaged on disk.
"""

import dataclasses
import errno
import os
import time

import numpy as np
import pytest
from made_stores import IMPATIENT, QUEUES, QUICK, assert_served, clear_faults, file_number, packed, quiet, reading, set_fault, until

import ssdgram
from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram.store import Tuning

torch = pytest.importorskip("torch")


@pytest.fixture(params=QUEUES)
def queue(request):
    return request.param


def column(made, layer, number):
    return made.out / f"layer-{layer:03}" / f"column-{number:02}.rows"


def damage(made, layer, number, row, place=0, bit=1):
    """Flip a bit of one row of a column, on disk; its page number."""
    per_page, row_bytes = made.manifest.rows_per_page, made.manifest.row_bytes
    page = row // per_page
    at = page * 4096 + row % per_page * row_bytes + place
    with open(column(made, layer, number), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
    return page


def column_rows(made, tokens, layer, number):
    """Row numbers within a column, int64 [T]."""
    index = made.geometry.layer_index(layer)
    return made.row_ids(tokens)[:, index, number] - made.geometry.offset_array[index, number]


# ---------------------------------------------------------------- faults that pass


@pytest.mark.parametrize("result", [-errno.EIO, -errno.EAGAIN, 0, 100, 4095, s.FAULT_FLIP])
def test_faults_that_pass_are_nobodys_business(engram, served, queue, result):
    """Any three tries of a page may fail: the fourth, by the other path, is right, and so are the rows."""
    store = served(engram, queue=queue)
    tokens = engram.tokens(5)
    set_fault(store, result, times=3)
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
    assert store.stats().retries == 3 and store.stats().read_errors == 0 and store.stats().failed_rows == 0


def test_one_read_in_three_fails(engram, served, queue):
    store = served(engram, queue=queue, dram=engram.dram_for(200))
    for seed in range(30):
        set_fault(store, (-errno.EIO, 512, s.FAULT_FLIP)[seed % 3], after=seed % 7, times=2)
        tokens = engram.tokens(12, seed)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
    assert store.stats().retries == 60


# ---------------------------------------------------------------- faults that stay


@pytest.mark.parametrize("result, kind, number, words", [
    (-errno.EIO, ssdgram.ReadError, errno.EIO, "Input/output error after 4 reads by two paths"),
    (-errno.EBADF, ssdgram.ReadError, errno.EBADF, "Bad file descriptor after 4 reads"),
    (1000, ssdgram.ReadError, None, "the file ends before this page; it was truncated"),
    (s.FAULT_FLIP, ssdgram.RowCheckError, None, "wrong checksum after 4 reads by two paths; the page is right")])
def test_a_fault_that_stays(engram, served, queue, result, kind, number, words):
    """One column fails for good: that layer of this batch, and nothing else, now or later."""
    store = served(engram, queue=queue)
    before, tokens = engram.tokens(10, 1), engram.tokens(10, 2)
    with store.prefetch(before) as batch:
        batch.wait()
    set_fault(store, result, file=file_number(store, 14, 7))
    with store.prefetch(tokens) as batch, store.prefetch(before) as hit:
        assert np.array_equal(packed(batch, 1), engram.expected(1, tokens))
        for call in (batch.rows, batch.packed, batch.addresses, batch.wait):
            with pytest.raises(kind, match=words) as caught:
                call(14)
            assert type(caught.value) is kind and isinstance(caught.value, OSError) and caught.value.errno == number
        assert_served(engram, store, hit, before)            # what is in memory is served
        error = caught.value
        assert error.layer == 14 and error.file == str(column(engram, 14, 7))
        rows = column_rows(engram, tokens, 14, 7)
        here = rows // engram.manifest.rows_per_page == error.page
        assert here.any() and list(error.rows) == sorted(set(rows[here].tolist()))
        assert list(error.positions) == np.flatnonzero(here).tolist()
        assert f"page {error.page}, rows [" in str(error) and "token positions [" in str(error)
    assert store.stats().failed_rows > 0 and store.stats().read_errors > 0
    clear_faults(store)
    with store.prefetch(tokens) as batch:                    # failed bundles are read anew
        assert_served(engram, store, batch, tokens)


def test_a_batch_that_joined_fails_too_and_a_later_one_does_not(engram, served, queue):
    store = served(engram, queue=queue)
    tokens = engram.tokens(6)
    set_fault(store, s.FAULT_STALL)
    first, joined = store.prefetch(tokens), store.prefetch(tokens)
    assert until(lambda: reading(store) and sum(store.stats().joins.values()) > 0)
    set_fault(store, -errno.EIO)
    for batch in (first, joined):
        with pytest.raises(ssdgram.ReadError):
            batch.wait()
        batch.release()
    assert until(lambda: store.stats().pending_pages == 0)   # who joins a bundle that failed in part fails with it
    clear_faults(store)
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)


def test_what_failed_is_read_anew_while_the_failed_batch_is_kept(engram, served, queue):
    """A later batch does not meet the failed slots, though they are in use until the failed batch is released."""
    store = served(engram, queue=queue)
    tokens = engram.tokens(6)
    set_fault(store, -errno.EIO, file=file_number(store, 14, 7))
    failed = store.prefetch(tokens)
    with pytest.raises(ssdgram.ReadError):
        failed.wait(14)
    clear_faults(store)
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
        with pytest.raises(ssdgram.ReadError):
            failed.packed(14)
        failed.release()
        assert_served(engram, store, batch, tokens)


def test_nothing_of_another_batch_is_seen(engram, served, queue):
    """A failed read leaves the given `out` as it was, and slots that held other rows are not handed out."""
    store = served(engram, queue=queue, dram=engram.dram_for(100))
    for seed in range(10):
        tokens = engram.tokens(10, seed)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
    set_fault(store, -errno.EIO)
    out = torch.full((10, 12, 66), 0xA5, dtype=torch.uint8)
    values = torch.full((10, 12, 64), 3.0, dtype=torch.bfloat16)
    for seed in range(100, 110):
        with store.prefetch(engram.tokens(10, seed)) as batch:
            with pytest.raises(ssdgram.ReadError):
                batch.packed(1, out=out)
            with pytest.raises(ssdgram.ReadError):
                batch.rows(14, out=values)
    assert (out == 0xA5).all() and (values == 3.0).all()
    clear_faults(store)
    for seed in range(100, 110):
        tokens = engram.tokens(10, seed)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)


def test_failures_and_cancellations_under_pressure(engram, served, queue):
    """Random faults, random releases, a tiny cache: either the right rows or a typed error."""
    store = served(engram, queue=queue, dram=engram.dram_for(120))
    random = np.random.default_rng(11)
    served_batches = failed = 0
    for turn in range(400):
        if turn % 4 == 0:
            result = (-errno.EIO, 77, s.FAULT_FLIP)[int(random.integers(3))]
            set_fault(store, result, file=int(random.integers(24)), times=int(random.integers(-1, 8)))
        elif turn % 4 == 3:
            clear_faults(store)
        tokens = engram.tokens(int(random.integers(1, 12)), int(random.integers(100)))
        batch = store.prefetch(tokens)
        if random.random() < 0.3:
            batch.release()
            continue
        with batch:
            for layer in store.layers:
                try:
                    found = packed(batch, layer)
                except ssdgram.ReadError as error:
                    failed += 1
                    assert error.layer == layer and error.positions and error.rows
                else:
                    served_batches += 1
                    assert np.array_equal(found, engram.expected(layer, tokens))
    assert served_batches > 100 and failed > 15


def test_warming_survives_failures(engram, served, queue):
    store = served(engram, queue=queue)
    set_fault(store, -errno.EIO, times=40)
    store.warm(engram.tokens(200))
    assert quiet(store)
    assert store.stats().failed_rows > 0
    clear_faults(store)
    with store.prefetch(engram.tokens(200)) as batch:
        assert_served(engram, store, batch, engram.tokens(200))


# ---------------------------------------------------------------- damage on disk


@pytest.fixture
def copy(engram, tmp_path):
    return engram.copy(tmp_path / "copy")


@pytest.mark.parametrize("place", [0, 31, 63, 64, 65])       # codes and scales
def test_a_flipped_bit(engram, copy, queue, place):
    tokens = engram.tokens(40)
    rows = column_rows(engram, tokens, 14, 5)
    victim = int(rows[17])
    page = damage(copy, 14, 5, victim, place)
    with copy.open(queue=queue) as store:
        with store.prefetch(tokens) as batch:
            assert np.array_equal(packed(batch, 1), engram.expected(1, tokens))
            words = f"the page is a row whose checksum is wrong: row {victim}; run `ssdgram verify`"
            with pytest.raises(ssdgram.RowCheckError, match=words) as caught:
                batch.packed(14)
            error = caught.value
            assert (error.layer, error.file, error.page, error.rows) == (14, str(column(copy, 14, 5)), page, (victim,))
            assert list(error.positions) == np.flatnonzero(rows == victim).tolist()
        neighbours = [t for t in range(40) if rows[t] != victim]
        for t in neighbours[:5]:                             # rows of the same page, and the other columns, are served
            with store.prefetch(tokens[t:t + 1], lookback=tokens[:t]) as batch:
                assert np.array_equal(packed(batch, 14), engram.expected(14, tokens)[t:t + 1])
        damage(copy, 14, 5, victim, place)                   # mended
        with store.prefetch(tokens) as batch:
            assert np.array_equal(packed(batch, 14), engram.expected(14, tokens))


def test_a_good_row_beside_a_bad_one_on_the_same_page(wide, tmp_path, queue):
    """Delivery is row by row: the page's other rows are placed."""
    copy = wide.copy(tmp_path / "copy")
    tokens = wide.tokens(200)
    rows = column_rows(wide, tokens, 1, 3)
    pages = rows // wide.manifest.rows_per_page
    t = next(t for t in range(3, 200) if len(set(rows[pages == pages[t]].tolist())) > 1)
    damage(copy, 1, 3, int(rows[t]))
    other = next(u for u in range(3, 200) if pages[u] == pages[t] and rows[u] != rows[t])
    with copy.open(queue=queue) as store:
        pair = [ssdgram.Sequence(tokens[u:u + 1], lookback=tokens[:u]) for u in (t, other)]
        with store.prefetch(pair) as batch:
            batch.wait(14)
            with pytest.raises(ssdgram.RowCheckError) as caught:
                batch.packed(1)
        assert caught.value.rows == (int(rows[t]),) and caught.value.positions == (0,)
        reads = store.stats().reads
        with store.prefetch(pair[1]) as batch:
            assert np.array_equal(packed(batch, 1), wide.expected(1, tokens)[other:other + 1])
        assert store.stats().reads == reads                  # its bundle came whole, page and all


def test_damage_to_the_page_beside_the_rows_is_verifys_business(engram, copy):
    """A trailer or the padding of a page beyond the first: the rows' own checks bind them, so they are served."""
    tokens = engram.tokens(5)
    for layer in (1, 14):
        for number in range(12):
            size = column(copy, layer, number).stat().st_size
            with open(column(copy, layer, number), "r+b") as file:
                for page in range(1, size // 4096):
                    file.seek(4096 * page + 4064)
                    file.write(bytes(32))
    with copy.open() as store, store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)


def test_a_truncated_file_under_an_open_store(engram, copy, queue):
    tokens = engram.tokens(30)
    with copy.open(queue=queue) as store:
        path = column(copy, 14, 2)
        whole = path.read_bytes()
        rows = column_rows(engram, tokens, 14, 2)
        cut = int(np.median(rows)) // engram.manifest.rows_per_page * 4096 + 1000
        os.truncate(path, cut)
        with store.prefetch(tokens) as batch:
            assert np.array_equal(packed(batch, 1), engram.expected(1, tokens))
            with pytest.raises(ssdgram.ReadError, match="the file ends before this page; it was truncated: restore it") as caught:
                batch.packed(14)
            assert type(caught.value) is ssdgram.ReadError
            assert caught.value.file == str(path) and caught.value.page * 4096 + 4096 > cut
        path.write_bytes(whole)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)


def test_a_removed_file_under_an_open_store(engram, copy):
    """It is open: the data is there until the store is closed."""
    tokens = engram.tokens(30)
    with copy.open() as store:
        for layer in (1, 14):
            for number in range(12):
                column(copy, layer, number).unlink()
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)


def test_a_damaged_dead_bundle_is_met_at_open(engram, copy, queue):
    """What every position may need is read first: open says what is wrong, and leaves nothing behind."""
    key = int(engram.geometry.dead_keys(engram.token_map)[1, 2])
    row = key % engram.manifest.files[12 + 9].rows
    damage(copy, 14, 9, row)
    with pytest.raises(ssdgram.RowCheckError, match=f"layer 14, .*column-09.rows, page .*rows \\[{row}\\]"):
        copy.open(queue=queue)
    damage(copy, 14, 9, row)
    copy.open(queue=queue).close()


def test_several_bad_pages_are_counted(engram, copy):
    tokens = engram.tokens(20)
    rows = column_rows(engram, tokens, 1, 0)
    for t in (4, 9, 15):
        damage(copy, 1, 0, int(rows[t]))
    with copy.open() as store, store.prefetch(tokens) as batch, \
            pytest.raises(ssdgram.RowCheckError, match=r"\(2 more bundles of this layer failed\)"):
        batch.wait(1)


# ---------------------------------------------------------------- a drive that does not answer


def test_a_read_that_does_not_come(engram, served, queue):
    """Layer, outstanding reads and age; then the drive answers, and the same batch is served."""
    store = served(engram, queue=queue)
    tokens = engram.tokens(4)
    set_fault(store, s.FAULT_STALL)
    with store.prefetch(tokens) as batch:
        assert until(lambda: reading(store) and store._plan.words[batch._base + p.W_STAGE] == p.WAITING)
        for timeout_s in (0.05, 0.2):
            begin = time.monotonic()
            words = r"layer 14 of batch 1: \d+ rows have not arrived after .* is the drive answering\?"
            with pytest.raises(ssdgram.ReadTimeoutError, match=words) as caught:
                batch.wait(14, timeout_s=timeout_s)
            took = time.monotonic() - begin
            error = caught.value
            assert error.layer == 14 and error.outstanding == 4 * engram.distinct((tokens, {})) // 2
            assert timeout_s <= error.age_s <= took < 20
            assert isinstance(error, TimeoutError) and isinstance(error, OSError)
        clear_faults(store)
        assert_served(engram, store, batch, tokens)


def test_a_degraded_store(engram, served, queue):
    """Waits are short, not 30 s each; what is in memory is served; recovery is noticed without anybody's help."""
    store = served(engram, queue=queue, tuning=dataclasses.replace(IMPATIENT, degraded_after_s=1.0))       # no real read takes as long
    known, new = engram.tokens(20, 1), engram.tokens(6, 2)
    with store.prefetch(known) as batch:
        batch.wait()
    assert store.stats().state == "ready" and store.stats().degraded == 0
    set_fault(store, s.FAULT_STALL)
    begin = time.monotonic()
    stuck = store.prefetch(new)
    with pytest.raises(ssdgram.ReadTimeoutError, match="store degraded"):
        stuck.wait()
    assert time.monotonic() - begin < 20                     # a wait's own limit is 30 s
    assert store.stats().state == "degraded" and store.stats().degraded == 1
    assert store.stats().oldest_read_age_s > 1.0
    begin = time.monotonic()
    for seed in range(10, 15):                               # each wait is bounded
        with store.prefetch(engram.tokens(5, seed)) as batch, pytest.raises(TimeoutError):
            batch.wait()
    assert time.monotonic() - begin < 20
    with store.prefetch(known) as batch:
        assert until(batch.ready)
        assert_served(engram, store, batch, known)
    clear_faults(store)
    assert until(lambda: store.stats().state == "ready") and until(stuck.ready)
    assert_served(engram, store, stuck, new)
    stuck.release()
    for seed in range(10, 15):
        with store.prefetch(engram.tokens(5, seed)) as batch:
            assert_served(engram, store, batch, engram.tokens(5, seed))
    assert store.stats().degraded == 1


def test_a_wait_under_way_is_cut_short(engram, served):
    """The drive stops answering while a caller waits for half a minute: the caller hears of it."""
    store = served(engram, tuning=Tuning(readers=1, depth=16, degraded_after_s=0.5, degraded_wait_s=0.3))
    set_fault(store, s.FAULT_STALL)
    with store.prefetch(engram.tokens(3)) as batch:
        begin = time.monotonic()
        with pytest.raises(ssdgram.ReadTimeoutError):
            batch.packed(1)
        assert 0.3 < time.monotonic() - begin < 20


def test_a_drive_that_does_not_answer_at_open(engram, copy, monkeypatch, queue):
    """open gives up in bounded time, and the process goes on."""
    from ssdgram import store as module

    started = []

    def stalling(self):
        set_fault(self, s.FAULT_STALL)
        started.append(self)
        return module_read(self)

    module_read = module.Store._read_dead_bundles
    monkeypatch.setattr(module.Store, "_read_dead_bundles", stalling)
    begin = time.monotonic()
    with pytest.raises(ssdgram.ReadTimeoutError):
        copy.open(queue=queue, tuning=IMPATIENT)
    assert time.monotonic() - begin < 20
    clear_faults(started[0])


def test_tuned_retries(engram, served):
    """retries=0: one read, and one by the other path."""
    store = served(engram, tuning=Tuning(readers=1, depth=16, retries=0))
    set_fault(store, -errno.EIO, times=1)
    with store.prefetch([5]) as batch:
        assert_served(engram, store, batch, [5])
    set_fault(store, -errno.EIO, file=file_number(store, 1, 0))
    with store.prefetch([9]) as batch, pytest.raises(ssdgram.ReadError, match="after 2 reads by two paths"):
        batch.wait(1)
    assert QUICK.retries == 2
