"""A store with queue gds over a fake cuFile: the whole way from tokens to rows, its slab outside of DRAM's budget."""

import errno

import numpy as np
import pytest
from fake_cufile import FakeCufile, FakePort
from made_stores import QUICK, assert_served, clear_faults, packed, quiet, reading, set_fault, until

import ssdgram
from ssdgram import _cufile, _gds
from ssdgram import _state as s

torch = pytest.importorskip("torch")


@pytest.fixture
def fake(monkeypatch):
    """A fake cuFile that stores of this test open; it must be clean afterwards."""
    fake = FakeCufile("nvfs")
    monkeypatch.setattr(_gds, "open_port", lambda device: FakePort(fake))
    return fake


def opened(served, made, **options):
    return served(made, queue="gds", hbm=options.pop("hbm", "2MiB"), **options)


def test_rows_are_exact_and_nothing_of_them_is_in_dram(engram, served, fake):
    store = opened(served, engram)
    for seed in range(10):
        tokens = engram.tokens(40, seed)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
    stats = store.stats()
    assert stats.queue == "gds" and stats.retries == 0
    assert {tier for tier, _ in stats.hits} == {"hbm"}
    assert stats.budgets["dram"][0] < stats.budgets["dram"][1] and stats.budgets["hbm"][0] <= stats.budgets["hbm"][1] == 2 << 20
    assert len(store._plan.slots) == ((2 << 20) - 16 * 4096) // store._stride        # what the staging leaves of the budget
    assert max(fake.sizes) <= 128


def test_every_shape_of_row(ple, wide, served, fake):
    for made in (ple, wide):
        store = opened(served, made)
        tokens = made.tokens(60)
        with store.prefetch(tokens) as batch:
            assert_served(made, store, batch, tokens)


def test_a_small_slab_evicts_and_serves_on(engram, served, fake):
    stride = 320
    store = opened(served, engram, hbm=16 * 4096 + 100 * stride)
    for seed in range(30):
        tokens = engram.tokens(8, seed)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
    assert store.stats().evictions > 0


def test_the_mode_is_what_cufile_counted(engram, served, fake, caplog):
    with caplog.at_level("INFO", "ssdgram"):
        store = opened(served, engram)
    assert store.stats().gds_mode == "gds" and store.stats().gds_counters["nvfs"] > 0
    assert "mode gds, by cuFile's own counters" in caplog.text
    fake.path = "p2p"
    fake.sizes.extend([1] * 100)
    assert _cufile.mode({"p2p": 3}, {"p2p": 4}) == "p2p"
    assert _cufile.mode({"posix": 3}, {"posix": 4, "nvfs": 0}) == "compatibility"
    assert _cufile.mode({}, {}) == _cufile.mode({"total": 1}, {"total": 2}) == "unknown"


def test_without_counters_the_mode_is_unknown(engram, served, monkeypatch):
    fake = FakeCufile()
    monkeypatch.delattr(FakeCufile, "stats_level1_dtype")
    monkeypatch.setattr(_gds, "open_port", lambda device: FakePort(fake))
    store = opened(served, engram)
    assert store.stats().gds_mode == "unknown" and store.stats().gds_counters == {}


def column(made, layer, number):
    return made.out / f"layer-{layer:03}" / f"column-{number:02}.rows"


def test_a_corrupt_page_is_named_and_never_served(engram, served, fake, tmp_path):
    made = engram.copy(tmp_path / "store")
    tokens = made.tokens(6, 1)
    index = made.geometry.layer_index(14)
    row = int(made.row_ids(tokens)[2, index, 5] - made.geometry.offset_array[index, 5])
    page = row // made.manifest.rows_per_page
    with open(column(made, 14, 5), "r+b") as file:
        at = page * 4096 + row % made.manifest.rows_per_page * made.manifest.row_bytes
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    store = opened(served, made)
    with store.prefetch(tokens) as batch:
        np.testing.assert_array_equal(packed(batch, 1), made.expected(1, tokens))
        with pytest.raises(ssdgram.RowCheckError, match="wrong checksum after 4 reads by two paths; the page is") as caught:
            batch.wait(14)
    error = caught.value
    assert (error.layer, error.page, list(error.rows)) == (14, page, [row]) and 2 in error.positions
    assert error.file == str(column(made, 14, 5))
    with store.prefetch(made.tokens(30, 2)) as batch:        # others go on
        np.testing.assert_array_equal(packed(batch, 1), made.expected(1, made.tokens(30, 2)))


@pytest.mark.parametrize("result, kind, words", [
    (-errno.EIO, ssdgram.ReadError, "Input/output error after 4 reads by two paths"),
    (1000, ssdgram.ReadError, "the file ends before this page"),
    (s.FAULT_FLIP, ssdgram.RowCheckError, "wrong checksum after 4 reads")])
def test_what_stays_wrong_is_a_typed_error_and_later_batches_are_right(engram, served, fake, result, kind, words):
    store = opened(served, engram)
    tokens = engram.tokens(5)
    set_fault(store, result)
    with store.prefetch(tokens) as batch, pytest.raises(kind, match=words):
        batch.wait()
    assert quiet(store)                                      # the reads of its other layer have failed as well
    clear_faults(store)
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)


def test_a_cancelled_batchs_reads_land_before_anything_of_theirs_is_used_again(engram, served, fake):
    store = opened(served, engram)
    for seed in range(12):
        fake.hold = True
        gone = store.prefetch(engram.tokens(20, seed))
        assert until(lambda: reading(store))
        gone.release()
        tokens = engram.tokens(12, seed + 100)
        with store.prefetch(tokens) as batch:
            fake.hold = False
            assert_served(engram, store, batch, tokens)
    assert quiet(store)
    assert not fake.complaints


def test_close_with_reads_in_flight(engram, fake):
    store = engram.open(queue="gds", hbm="2MiB")
    fake.hold = True
    batch = store.prefetch(engram.tokens(30))
    assert until(lambda: reading(store))
    batch.release()
    fake.hold = False
    store.close()
    assert fake.clean, fake.complaints
    with pytest.raises(ssdgram.StoreClosedError):
        store.stats()


def test_close_while_the_drive_does_not_answer_keeps_the_memory(engram, fake, caplog):
    store = engram.open(queue="gds", hbm="2MiB")
    fake.hold, fake.batch_io_cancel = True, lambda batch: None
    batch = store.prefetch(engram.tokens(3))
    assert until(lambda: reading(store))
    batch.release()
    store.close(timeout_s=3)
    assert "their memory is kept" in caplog.text and fake.batches


# ---------------------------------------------------------------- what is refused, and how


def test_the_cpu_is_refused_before_anything_is_opened(engram):
    with pytest.raises(ssdgram.ConfigError, match=r"device='cpu'.*queue='auto'"):
        engram.open(queue="gds", hbm="2MiB")


def test_a_machine_without_a_gpu_never_opens_the_cufile_driver(engram, monkeypatch):
    fake = FakeCufile()
    monkeypatch.setattr(_cufile, "load", lambda: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ssdgram.UnavailableError, match="no CUDA device"):
        engram.open(queue="gds", hbm="2MiB", device="cuda")
    assert fake.opens == 0


def test_without_the_bindings_it_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", None)
    with pytest.raises(ssdgram.UnavailableError, match=r"ssdgram\[gds\]"):
        _cufile.load()
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", object())
    with pytest.raises(ssdgram.UnavailableError, match="newer bindings"):
        _cufile.load()


def test_a_driver_that_does_not_open_is_said_in_its_own_words():
    fake = FakeCufile()

    def refuse():
        raise fake.cuFileError("CU_FILE_DRIVER_INVALID_PROPS (5002)")

    fake.driver_open = refuse
    with pytest.raises(ssdgram.UnavailableError, match="does not open: CU_FILE_DRIVER_INVALID_PROPS"):
        _cufile.open_driver(fake)

    def missing():
        raise RuntimeError('Failure finding "libcufile.so.0"\nmore')

    fake.driver_open = missing
    with pytest.raises(ssdgram.UnavailableError, match=r"libcufile is not there.*ssdgram\[gds\]"):
        _cufile.open_driver(fake)
    del fake.driver_open
    assert _cufile.open_driver(fake) and _cufile.open_driver(fake) and fake.opens == 1
    assert _cufile.properties(fake)["features"] == _cufile.BATCH_SUPPORTED
    _cufile._opened.pop(id(fake))


def test_budgets_that_do_not_fit_say_which(engram, fake):
    with pytest.raises(ssdgram.BudgetError, match=r"hbm pays for \d+ bundles: this store needs at least 70"):
        engram.open(queue="gds", hbm=16 * 4096 + 320)
    with pytest.raises(ssdgram.BudgetError, match="dram is 8388608 bytes: the tables of"):
        engram.open(queue="gds", hbm="4GiB")
    assert not fake.batches


def test_auto_is_never_gds(engram, served, fake):
    store = served(engram, queue="auto")
    assert store.queue in ("uring", "threads") and not fake.sizes and store.stats().gds_mode == ""
    assert QUICK.readers == 1
