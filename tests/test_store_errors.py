"""What a Store refuses, with which error, and what the message says: found, expected, what to do."""

import errno
import os
import shutil
import threading
import time

import numpy as np
import pytest
from made_stores import IMPATIENT, QUICK, Made, assert_served, descriptors, packed, set_fault, starves, until

import ssdgram
from ssdgram._state import FAULT_STALL
from ssdgram.layout.manifest import MANIFEST
from ssdgram.store import Tuning


@pytest.fixture
def store(engram, served):
    return served(engram)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("bad, words", [(-1, "mark placeholders with participates=False"), (-(2**40), "placeholders"),
                                        (2**33 + 5, "is this the model's tokenizer"), (2**31 - 1, "tokenizer")])
def test_bad_ids_raise_in_prefetch(engram, store, bad, words):
    tokens = engram.tokens(20).astype(np.int64)
    tokens[13] = bad
    with pytest.raises(ssdgram.TokenError, match=rf"position 13 holds token id {bad}: expected 0 \.\. {engram.vocabulary - 1}.*{words}"):
        store.prefetch(tokens)
    with pytest.raises(ssdgram.TokenError, match=f"lookback position -2 .* {bad}"):
        store.prefetch([1, 2, 3], lookback=[5, bad, 6])
    with pytest.raises(ssdgram.TokenError, match=f"position 13 of sequence 1 holds token id {bad}"):
        store.prefetch([ssdgram.Sequence([1, 2]), ssdgram.Sequence(tokens)])
    with pytest.raises(ssdgram.TokenError):
        store.warm(tokens)
    assert store.stats().batches == 0


def test_the_first_id_beyond_the_vocabulary(engram, store):
    with store.prefetch([engram.vocabulary - 1]) as batch:
        assert_served(engram, store, batch, [engram.vocabulary - 1])
    with pytest.raises(ssdgram.TokenError, match=f"holds token id {engram.vocabulary}: "):
        store.prefetch([engram.vocabulary])


def test_tokens_of_a_gpu_need_a_store_on_it(engram, store):
    sequence = ssdgram.Sequence(engram.tokens(3))
    sequence.device_tokens = object()                        # as of a CUDA tensor
    for step in (sequence, [ssdgram.Sequence([1]), sequence]):
        with pytest.raises(ssdgram.ConfigError, match=r"open with device='cuda' .this store has 'cpu'., or copy them"):
            store.prefetch(step)
    deferred = ssdgram.Sequence.deferred(1, 1, lambda *_: None)
    with pytest.raises(ssdgram.ConfigError, match="a batch of its own"):
        store.prefetch([deferred, sequence])


def test_lookback_too_old_to_count_is_not_looked_at(engram, store):
    with store.prefetch([4, 5], lookback=[-9, 7, 8, 9]) as batch:
        assert_served(engram, store, batch, [4, 5], lookback=[7, 8, 9])


@pytest.mark.parametrize("tokens", [[1.5], np.zeros((2, 2), int), ["a"], None, [[1], [2, 3]], np.array([True]), 7])
def test_what_is_no_vector_of_ids(store, tokens):
    with pytest.raises(ssdgram.TokenError, match="expected integers"):
        store.prefetch(tokens)


def test_arguments_that_do_not_go_together(engram, store):
    with pytest.raises(ssdgram.TokenError, match=r"participates is bool \[3\]: expected bool of shape \[2\]"):
        store.prefetch([1, 2], participates=[True, False, True])
    with pytest.raises(ssdgram.ConfigError, match="belong to the Sequence"):
        store.prefetch(ssdgram.Sequence([1, 2]), participates=[True, False])
    with pytest.raises(ssdgram.ConfigError, match="belong to the Sequence"):
        store.warm([ssdgram.Sequence([1, 2])], lookback=[1])
    with pytest.raises(ssdgram.ConfigError, match="list of Sequences holds something else"):
        store.prefetch([ssdgram.Sequence([1, 2]), [3]])
    with pytest.raises(ssdgram.ConfigError, match=r"priority is 'soon': expected one of \['step', 'background'\]"):
        store.prefetch([1], priority="soon")


# ---------------------------------------------------------------- slots


def test_a_batch_that_is_too_large(engram, served):
    """Exactly what it needs and what there is; nothing stays behind."""
    store = served(engram, dram=engram.dram_for(200))
    for seed in range(3):
        tokens = engram.tokens(300, seed)
        with store.prefetch(tokens) as batch:
            for layer in (None, 1, 14):
                with pytest.raises(ssdgram.BatchTooLargeError, match=r"split the batch, or open the store with a larger dram=") as caught:
                    batch.wait(layer)
                assert (caught.value.need, caught.value.have) == (engram.distinct((tokens, {})), store.capacity)
        with store.prefetch(engram.tokens(10, seed)) as batch:
            assert_served(engram, store, batch, engram.tokens(10, seed))
    assert issubclass(ssdgram.BatchTooLargeError, ValueError)


@pytest.mark.parametrize("owner", [None, (0, 3), (2, 3)])
def test_need_and_have_are_exact(engram, served, owner):
    """One bundle more than there are slots is too large, one less is not."""
    store = served(engram, dram=engram.dram_for(150), owner=owner)
    count, last_need = 1, 0
    while True:
        tokens = engram.tokens(count, 4)
        tokens = np.concatenate([tokens[:1], [-1], tokens[1:]])              # a dead position, whose bundles take no slot
        participates = tokens >= 0
        with store.prefetch(tokens, participates=participates) as batch:
            try:
                batch.wait()
            except ssdgram.BatchTooLargeError as error:
                assert error.need > error.have == store.capacity
                if owner is None:
                    assert error.need == engram.distinct((tokens, {"participates": participates}))
                assert error.need - last_need <= 6
                break
            last_need = batch.timing["bundles"] - store.stats().slots + store.capacity
            if owner is None:
                assert last_need == engram.distinct((tokens, {"participates": participates}))
        count += 1


def test_a_batch_that_others_keep_from_slots_is_not_too_large(engram, served):
    """It meets every dead bundle, and others hold the slots that it lacks: it waits for them."""
    store = served(engram, dram=engram.dram_for(100))
    size = 1
    while engram.distinct((engram.tokens(size + 1, 8), {})) <= store.capacity:
        size += 1
    tokens = np.concatenate([[-1], engram.tokens(size, 8)])
    participates = tokens >= 0
    assert store.capacity - engram.distinct((tokens, {"participates": participates})) < 6
    for other_size in (1, 2, 3):
        other = store.prefetch(engram.tokens(other_size, 9))
        other.wait()
        batch = store.prefetch(tokens, participates=participates)
        assert until(lambda: starves(store, batch))          # noqa: B023
        with pytest.raises(ssdgram.StoreBusyError) as caught:
            batch.wait(timeout_s=0.1)
        assert caught.value.tickets == (other.ticket,)
        other.release()
        with batch:
            assert_served(engram, store, batch, tokens, participates=participates)


def test_a_store_whose_slots_are_held(engram, served):
    """StoreBusyError names the batches that hold them, oldest first; when they are released, the batch is served."""
    store = served(engram, dram=engram.dram_for(200))
    size = store.capacity // 6 // 2
    holders = [store.prefetch(engram.tokens(size, seed)) for seed in range(2)]
    for holder in holders:
        holder.wait()
    late = store.prefetch(engram.tokens(size, 5))
    assert until(lambda: starves(store, late))
    begin = time.monotonic()
    with pytest.raises(ssdgram.StoreBusyError, match=r"unreleased batches \[1, 2\] hold them; release batches earlier") as caught:
        late.wait(timeout_s=0.3)
    assert 0.29 < time.monotonic() - begin < 20 and caught.value.tickets == (1, 2)
    assert issubclass(ssdgram.StoreBusyError, TimeoutError)
    with pytest.raises(ssdgram.StoreBusyError):
        late.wait(1, timeout_s=0)
    holders[1].release()
    assert_served(engram, store, late, engram.tokens(size, 5))
    assert_served(engram, store, holders[0], engram.tokens(size, 0))
    assert store.stats().starved >= 1
    late.release()
    holders[0].release()


def test_slots_go_first_come_first_served(engram, served):
    """A small batch behind one that waits for slots waits as well, and is served after it."""
    store = served(engram, dram=engram.dram_for(200))
    size = store.capacity // 6
    holder = store.prefetch(engram.tokens(size // 2, 0))
    holder.wait()
    large, small = store.prefetch(engram.tokens(size - 2, 1)), store.prefetch(engram.tokens(2, 2))
    assert until(lambda: starves(store, small))
    with pytest.raises(ssdgram.StoreBusyError) as caught:
        small.wait(timeout_s=0.1)
    assert caught.value.tickets[:2] == (holder.ticket, large.ticket)
    holder.release()
    assert_served(engram, store, large, engram.tokens(size - 2, 1))
    large.release()
    assert_served(engram, store, small, engram.tokens(2, 2))
    small.release()


def test_too_many_unreleased_batches(engram, served):
    store = served(engram, tuning=Tuning(readers=1, depth=16, batches=8))
    batches = [store.prefetch([token]) for token in range(7)]                # the eighth is the dead bundles'
    with pytest.raises(ssdgram.StoreBusyError, match=r"8 batches are unreleased, the oldest is 1") as caught:
        store.prefetch([9])
    assert caught.value.tickets == (1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(ssdgram.StoreBusyError):
        store.warm([9])
    batches[3].release()
    with store.prefetch([9]) as batch:
        assert_served(engram, store, batch, [9])
    for batch in batches:
        batch.release()


def test_released_batches_make_room_at_once(engram, served):
    """However quickly they come and go: a released batch is nobody's reason for a StoreBusyError."""
    store = served(engram, tuning=Tuning(readers=1, depth=16, batches=4))
    for seed in range(500):
        store.prefetch(engram.tokens(40, seed)).release()


def test_who_waits_for_a_row_holds_up_nobody(engram, served):
    """A released batch leaves when the GPU's word arrives; until then another thread can release its own, which makes room."""
    store = served(engram, tuning=Tuning(readers=1, depth=16, batches=3))
    leaving, other = store.prefetch([1]), store.prefetch([2])
    word = np.zeros(1, np.int64)
    for batch in (leaving, other):
        batch.wait()
    record = store._plan.layers[leaving._row * len(store.layers)]
    record["word"], record["expected"] = word.ctypes.data, 1
    leaving.release()
    outcome = []

    def prefetch():
        try:
            with store.prefetch([3]) as batch:
                assert_served(engram, store, batch, [3])
            outcome.append("served")
        except ssdgram.StoreBusyError:                       # after five seconds without a row
            outcome.append("busy")

    thread = threading.Thread(target=prefetch)
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    other.release()
    thread.join()
    word[0] = 1
    assert outcome == ["served"]


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize("options, error, words", [
    ({"layers": []}, ssdgram.ConfigError, r"layers=\[\]: expected some of \[1, 14\]"),
    ({"layers": [1, 1]}, ssdgram.ConfigError, "each once"),
    ({"layers": [2]}, ssdgram.ConfigError, r"layer 2 has no n-gram table"),
    ({"columns": []}, ssdgram.ConfigError, r"expected ascending numbers out of 0 \.\. 11"),
    ({"columns": [3, 2]}, ssdgram.ConfigError, "ascending"),
    ({"columns": [1, 1]}, ssdgram.ConfigError, "ascending"),
    ({"columns": [12]}, ssdgram.ConfigError, "ascending"),
    ({"columns": [-1]}, ssdgram.ConfigError, "ascending"),
    ({"owner": (2, 2)}, ssdgram.ConfigError, r"expected \(rank, world\)"),
    ({"owner": (-1, 2)}, ssdgram.ConfigError, r"expected \(rank, world\)"),
    ({"owner": (0, 0)}, ssdgram.ConfigError, r"expected \(rank, world\)"),
    ({"owner": (0, 1, 2)}, ssdgram.ConfigError, r"expected \(rank, world\)"),
    ({"owner": 3}, ssdgram.ConfigError, r"expected \(rank, world\)"),
    ({"dram": "0"}, ssdgram.BudgetError, r"dram is 0 bytes: the tables of this store need at least \d+ bytes"),
    ({"dram": "lots"}, ssdgram.BudgetError, "dram is 'lots': expected bytes such as"),
    ({"dram": -5}, ssdgram.BudgetError, "dram is -5"),
    ({"dram": "900000 TiB"}, ssdgram.BudgetError, r"dram is 9\d+ bytes: this machine .* has \d+ bytes of memory; give less"),
    ({"dram": "1e30"}, ssdgram.BudgetError, "dram is '1e30'"),
    ({"hbm": "much"}, ssdgram.BudgetError, "hbm is 'much'"),
    ({"queue": "carrier pigeon"}, ssdgram.ConfigError, "queue"),
    ({"queue": "gds"}, ssdgram.ConfigError, "gds"),
    ({"stripes": ["a", "b"]}, ssdgram.IdentityError, "1 roots, 2 were given"),
])
def test_open_refuses(engram, served, options, error, words):
    served(engram)                                           # the fixture looks for what an open that failed left behind
    with pytest.raises(error, match=words):
        engram.open(**options)


@pytest.mark.parametrize("changes", [{"batches": 1}, {"readers": 0}, {"depth": -1}, {"retries": -1}, {"retries": 10**6}, {"spin_us": -1.0},
                                     {"degraded_after_s": float("nan")}, {"affinity": (4000,)}, {"background_depth": 0}])
def test_a_tuning_that_cannot_be(changes):
    name, = changes
    with pytest.raises(ssdgram.ConfigError, match=f"Tuning: {name} is .*: expected"):
        Tuning(**changes)


def test_the_budget_that_is_named_is_enough(engram, served):
    with pytest.raises(ssdgram.BudgetError) as caught:
        engram.open(dram="100KiB")
    store = served(engram, dram=int(str(caught.value).split("at least ")[1].split()[0]))
    with store.prefetch(engram.tokens(5)) as batch:
        assert_served(engram, store, batch, engram.tokens(5))


def test_no_store_there(tmp_path):
    with pytest.raises(ssdgram.ManifestError, match="not a store; make one with `ssdgram convert"):
        ssdgram.open(tmp_path)
    with pytest.raises(ssdgram.ManifestError, match="missing"):
        ssdgram.open(tmp_path / "nothing")


# ---------------------------------------------------------------- files that are not the store's


def column(made, layer, number):
    return made.out / f"layer-{layer:03}" / f"column-{number:02}.rows"


@pytest.fixture
def copy(engram, tmp_path):
    return engram.copy(tmp_path / "copy")


def test_swapped_columns(engram, copy):
    """Two columns of the same size, in each other's place."""
    geometry = engram.geometry
    pair = next((a, b) for a in range(12) for b in range(a) if column(engram, 1, a).stat().st_size == column(engram, 1, b).stat().st_size)
    first, second = (column(copy, 1, number) for number in pair)
    shutil.move(first, first.with_suffix(".aside"))
    shutil.move(second, first)
    shutil.move(first.with_suffix(".aside"), second)
    with pytest.raises(ssdgram.IdentityError, match=r"column-\d\d.rows: its first page is a page of another column; expected generation"):
        copy.open()
    assert geometry == copy.geometry


def test_a_column_of_another_layer(engram, copy):
    """The same column number, the same size."""
    pairs = [(c, d) for c in range(12) for d in range(12) if column(engram, 1, c).stat().st_size == column(engram, 14, d).stat().st_size]
    if not pairs:
        pytest.skip("no two columns of equal size")
    shutil.copyfile(column(engram, 14, pairs[0][1]), column(copy, 1, pairs[0][0]))
    with pytest.raises(ssdgram.IdentityError, match="a page of another layer"):
        copy.open()


def test_a_column_of_another_conversion_of_the_same_geometry(engram, other, copy):
    assert column(other, 14, 3).stat().st_size == column(engram, 14, 3).stat().st_size
    shutil.copyfile(column(other, 14, 3), column(copy, 14, 3))
    with pytest.raises(ssdgram.IdentityError, match=r"column-03.rows: its first page is a page of another conversion \(generation\)"):
        copy.open()
    copy.open(layers=[1]).close()                            # only what is served is looked at


def test_pages_of_another_conversion_behind_a_right_first_page(engram, other, copy):
    """What open cannot see the row checks do: never a wrong row."""
    path = column(copy, 14, 3)
    per_page = engram.manifest.rows_per_page
    dead = int(engram.geometry.dead_keys(engram.token_map)[1, 0]) % engram.manifest.files[12 + 3].rows // per_page
    right, wrong = path.read_bytes(), column(other, 14, 3).read_bytes()
    kept = {0, dead}                                         # what open itself reads
    path.write_bytes(b"".join((right if page in kept else wrong)[4096 * page:4096 * (page + 1)] for page in range(len(right) // 4096)))
    tokens = engram.tokens(30)
    with copy.open() as store, store.prefetch(tokens) as batch:
        assert np.array_equal(packed(batch, 1), engram.expected(1, tokens))
        with pytest.raises(ssdgram.RowCheckError, match="a page of another conversion"):
            batch.packed(14)


@pytest.mark.parametrize("name", ["no store at all", "zeros"])
def test_a_first_page_that_is_none(copy, name):
    path = column(copy, 1, 5)
    with open(path, "r+b") as file:
        file.write(name.encode().ljust(4096, b"x") if name != "zeros" else bytes(4096))
    with pytest.raises(ssdgram.IdentityError, match=r"no page of a store \(magic\)"):
        copy.open()


def test_a_file_that_is_missing_truncated_or_a_link(copy, tmp_path):
    path = column(copy, 1, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    with pytest.raises(ssdgram.FormatError, match=f"expected {len(whole)} bytes, found {len(whole) - 4096}"):
        copy.open()
    path.unlink()
    with pytest.raises(ssdgram.FormatError, match="No such file"):
        copy.open()
    (tmp_path / "outside").write_bytes(whole)
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(ssdgram.FormatError, match="out of its place"):
        copy.open()
    path.unlink()
    path.mkdir()
    with pytest.raises(ssdgram.FormatError):
        copy.open()


@pytest.mark.parametrize("number, words", [(errno.EMFILE, "raise the limit of open files"), (errno.EIO, "not whole, or may not be read")])
def test_files_that_cannot_be_opened(engram, monkeypatch, number, words):
    """Whichever open fails, direct or buffered: none of those before stays open, and no other error passes for "no O_DIRECT"."""
    really, calls = os.open, []

    def refuse(path, flags, *more):
        if str(path).endswith(".rows"):
            calls.append(path)
            if len(calls) == last:
                raise OSError(number, os.strerror(number), path)
        return really(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    before = descriptors()
    for last in (1, 2, 9, 48):
        calls.clear()
        with pytest.raises(ssdgram.FormatError, match=words):
            engram.open()
        assert descriptors() == before and len(calls) == last


def test_a_first_page_that_cannot_be_read(engram, monkeypatch):
    def refuse(descriptor, length, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = descriptors()
    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(ssdgram.ReadError, match=r"column-00.rows, page 0: Input/output error"):
        engram.open()
    assert descriptors() == before


def test_a_planner_that_has_no_thread(engram, monkeypatch):
    """A limit of threads: readers end, files and memory are given back."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "ssdgram-planner":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = descriptors()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ssdgram.UnavailableError, match="the planner's threads cannot be started"):
        engram.open()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ssdgram-")]
    assert descriptors() == before


@pytest.mark.parametrize("path", ["../outside.rows", "/etc/passwd", "layer-014/column-05.rows", "layer-001/../layer-001/column-05.rows"])
def test_a_manifest_that_points_elsewhere(copy, path):
    text = (copy.out / MANIFEST).read_text()
    (copy.out / MANIFEST).write_text(text.replace('"layer-001/column-05.rows"', f'"{path}"'))
    with pytest.raises(ssdgram.ManifestError, match=r"files\[5\].path: expected 'layer-001/column-05.rows'"):
        copy.open()


def test_a_damaged_token_map(copy):
    path = copy.out / "token_map.npy"
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    with pytest.raises(ssdgram.FormatError, match=r"token_map\.npy: digest is not the manifest's"):
        copy.open()


# ---------------------------------------------------------------- a store replaced while it is open


def often(**changes):
    return Tuning(readers=1, depth=16, identity_check_s=0.0, **changes)


def test_a_replaced_store_is_noticed(engram, other, copy):
    tokens = engram.tokens(40)
    with copy.open(tuning=often()) as store:
        before = store.prefetch(tokens)
        before.wait()
        shutil.rmtree(copy.out)
        shutil.copytree(other.out, copy.out)
        for call in (store.prefetch, store.warm):
            with pytest.raises(ssdgram.StoreReplacedError, match=r"manifest.json is not the one .* opened with .* open it again"):
                call(tokens)
        assert_served(engram, store, before, tokens)         # what was asked for before is what it was
        before.release()
    with Made(copy.out, seed=1).open() as store, store.prefetch(tokens) as batch:
        assert_served(other, store, batch, tokens)


def test_the_manifest_is_read_again_only_if_it_may_have_changed(engram, copy, monkeypatch):
    """Reading it takes as long as a step: who has seen that the file is the same need not."""
    from ssdgram import store as module
    from ssdgram.layout import manifest

    monkeypatch.setattr(manifest, "SETTLED_NS", -1)
    read = []
    identity = module.identity
    monkeypatch.setattr(module, "identity", lambda path: read.append(path) or identity(path))
    with copy.open(tuning=often()) as store:
        for _ in range(3):
            store.prefetch([1]).release()
        assert len(read) == 1                                # at open
        shutil.copyfile(engram.out / MANIFEST, copy.out / "another")
        os.replace(copy.out / "another", copy.out / MANIFEST)
        for _ in range(3):
            store.prefetch([1]).release()
        assert len(read) == 2
        (copy.out / MANIFEST).write_bytes(b"{}")
        for _ in range(2):
            with pytest.raises(ssdgram.StoreReplacedError):
                store.prefetch([1])


def test_a_removed_store_is_noticed(engram, copy):
    with copy.open(tuning=often()) as store:
        (copy.out / MANIFEST).unlink()
        with pytest.raises(ssdgram.StoreReplacedError):
            store.prefetch([1])
        shutil.copyfile(engram.out / MANIFEST, copy.out / MANIFEST)
        with store.prefetch([1]) as batch:                   # the same bytes again: the same store
            batch.wait()


def test_the_manifest_is_looked_at_now_and_then(copy, other):
    with copy.open(tuning=Tuning(readers=1, depth=16, identity_check_s=0.4)) as store:
        shutil.copyfile(other.out / MANIFEST, copy.out / MANIFEST)

        def noticed():
            try:
                store.prefetch([1]).release()
            except ssdgram.StoreReplacedError:
                return True
            return False

        assert until(noticed, 5.0)
        assert noticed()                                     # and it is not forgotten


def test_pages_that_change_under_an_open_store(engram, other, copy):
    """Written over in place by another conversion's, before anybody notices the manifest: refused row by row."""
    tokens = engram.tokens(30)
    with copy.open() as store:
        for layer in (1, 14):
            for number in range(12):
                with open(column(copy, layer, number), "r+b") as file:
                    file.write(column(other, layer, number).read_bytes())
        with store.prefetch(tokens) as batch:
            for layer in (1, 14):
                with pytest.raises(ssdgram.RowCheckError, match="another conversion"):
                    batch.packed(layer)


def test_errors_of_a_batch_raise_again(engram, served):
    store = served(engram, tuning=IMPATIENT)
    set_fault(store, FAULT_STALL)
    with store.prefetch(engram.tokens(5)) as batch:
        for _ in range(2):
            for call in (batch.wait, batch.rows, batch.packed, batch.addresses):
                with pytest.raises(ssdgram.ReadTimeoutError):
                    call(1) if call != batch.wait else call(1, timeout_s=0.01)


def test_tuning_for_tests_is_a_valid_one(engram, served):
    served(engram, tuning=QUICK)
