"""The hot set: what a closed store kept, the next one has; what is damaged or foreign is dropped, never served."""

import numpy as np
import pytest

import ssdgram
from ssdgram import hotset
from ssdgram.tools.synth import expected_rows

SEED = 3


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hot")
    tokenizer = __file__.rpartition("/")[0] + "/golden/tiny_tokenizer.json"
    ssdgram.synthesize(folder / "ckpt", vocab_size=2000, layers=(1, 3), seed=SEED, tokenizer=tokenizer)
    ssdgram.convert(folder / "ckpt", folder / "out")
    return folder / "out"


def serve(store, tokens):
    with store.prefetch(tokens) as batch:
        for layer in store.layers:
            ids = store.geometry.row_ids(tokens, store._token_map)[:, store.geometry.layers.index(layer)]
            rows = expected_rows(SEED, layer, ids, store.geometry)[:, list(store.columns)]
            assert np.array_equal(batch.packed(layer).numpy(), rows)


def misses(store):
    return sum(store.stats().misses.values())


@pytest.fixture
def written(store_folder, tmp_path):
    path, tokens = tmp_path / "hot", np.random.default_rng(0).integers(0, 258, 300)
    with ssdgram.open(store_folder, dram="16MiB", hotset=path) as store:
        serve(store, tokens)
        served = misses(store)
    return path, tokens, served


def test_a_reopened_store_serves_from_memory_at_once(store_folder, written):
    path, tokens, served = written
    with ssdgram.open(store_folder, dram="16MiB", hotset=path) as store:
        assert store.hot_bundles >= served
        before = store.stats().reads
        serve(store, tokens)
        assert store.stats().reads == before


def test_a_smaller_store_takes_the_front_and_still_has_free_slots(store_folder, written):
    path, tokens, served = written
    with ssdgram.open(store_folder, dram="5MiB", hotset=path) as store:
        assert 0 < store.hot_bundles < served
        for part in np.split(tokens, 10):
            serve(store, part)


def test_a_damaged_entry_is_dropped_and_read_anew(store_folder, written):
    path, tokens, _ = written
    data = bytearray(path.read_bytes())
    data[hotset.BLOCK + 200] ^= 1
    data[hotset.BLOCK * 3] ^= 1                              # the key of another entry
    path.write_bytes(data)
    with ssdgram.open(store_folder, dram="16MiB", hotset=path) as store:
        assert any("2 entries" in notice for notice in store.notices)
        serve(store, tokens)


@pytest.mark.parametrize("damage", ["header", "short", "long", "empty"])
def test_a_damaged_file_is_passed_over(store_folder, written, damage):
    path, tokens, _ = written
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[20] ^= 1
    path.write_bytes({"header": data, "short": data[:-1], "long": data + b"x", "empty": b""}[damage])
    with ssdgram.open(store_folder, dram="16MiB", hotset=path) as store:
        assert store.hot_bundles == 0 and any("hot set passed over" in notice for notice in store.notices)
        serve(store, tokens)


def test_other_columns_or_another_store_are_passed_over(store_folder, written, tmp_path):
    path, tokens, _ = written
    with ssdgram.open(store_folder, dram="16MiB", columns=range(12), hotset=path) as store:
        assert store.hot_bundles == 0 and any("written by another store" in notice for notice in store.notices)
        serve(store, tokens)
    tokenizer = __file__.rpartition("/")[0] + "/golden/tiny_tokenizer.json"
    ssdgram.synthesize(tmp_path / "ckpt", vocab_size=2000, layers=(1, 3), seed=SEED + 1, tokenizer=tokenizer)
    ssdgram.convert(tmp_path / "ckpt", tmp_path / "out")
    with ssdgram.open(tmp_path / "out", dram="16MiB", hotset=path) as store:     # the same geometry, other rows
        assert store.hot_bundles == 0 and any("written by another store" in notice for notice in store.notices)


def test_another_stores_hot_set_is_left_at_close(store_folder, written, tmp_path, caplog):
    path = written[0]
    before = path.read_bytes()
    tokenizer = __file__.rpartition("/")[0] + "/golden/tiny_tokenizer.json"
    ssdgram.synthesize(tmp_path / "ckpt", vocab_size=2000, layers=(1, 3), seed=SEED + 2, tokenizer=tokenizer)
    ssdgram.convert(tmp_path / "ckpt", tmp_path / "out")
    with ssdgram.open(tmp_path / "out", dram="16MiB", hotset=path) as store, store.prefetch(np.arange(20)) as batch:
        batch.wait()
    assert path.read_bytes() == before and "the hot set of another store" in caplog.text
    with ssdgram.open(store_folder, dram="16MiB", columns=range(12), hotset=path) as store, store.prefetch(np.arange(20)) as batch:
        batch.wait()
    assert path.read_bytes() != before                       # the same store: its to replace


@pytest.mark.parametrize("content", [b"x", b"something that somebody wants to keep " * 200])
def test_a_file_that_is_no_hot_set_is_left_at_close(store_folder, tmp_path, caplog, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    ssdgram.open(store_folder, dram="16MiB", hotset=path).close()
    assert path.read_bytes() == content and "is no hot set, and is left as it is" in caplog.text


def test_entries_twice_in_the_file_take_one_slot(store_folder, written):
    path, tokens, _ = written
    data = bytearray(path.read_bytes())
    data[2 * hotset.BLOCK:3 * hotset.BLOCK] = data[hotset.BLOCK:2 * hotset.BLOCK]
    path.write_bytes(data)
    with ssdgram.open(store_folder, dram="16MiB", hotset=path) as store:
        serve(store, tokens)
        stats = store.stats()
        assert stats.slots_free + stats.slots_idle + stats.slots_in_use == stats.slots


def test_a_hot_set_that_cannot_be_written_does_not_keep_a_store_from_closing(store_folder, tmp_path, caplog):
    store = ssdgram.open(store_folder, dram="16MiB", hotset=tmp_path / "no" / "folder")
    store.close()
    assert "was not written" in caplog.text


def test_a_hot_set_that_has_no_header_does_not_keep_a_store_from_closing(store_folder, tmp_path, caplog, monkeypatch):
    def refuse(layout, store, count):
        raise ssdgram.HotSetError("too many columns")

    store = ssdgram.open(store_folder, dram="16MiB", hotset=tmp_path / "hot")
    monkeypatch.setattr(hotset.Layout, "header", refuse)
    store.close()
    assert "was not written: too many columns" in caplog.text


def test_a_hot_set_needs_a_name(store_folder):
    with pytest.raises(ssdgram.ConfigError, match="expected the path of a file"):
        ssdgram.open(store_folder, hotset="")


def test_a_hot_set_in_the_stores_folder_is_refused_early(store_folder, tmp_path):
    (tmp_path / "link").symlink_to(store_folder)
    for place in (store_folder / "hot", store_folder / "manifest.json", tmp_path / "link" / "a" / "hot", store_folder):
        with pytest.raises(ssdgram.ConfigError, match=r"lies in the store's folder .*expected a file outside"):
            ssdgram.open(store_folder, hotset=place)
    assert not (store_folder / "hot").exists()


def test_a_header_of_another_file_is_a_typed_error(store_folder, tmp_path):
    with ssdgram.open(store_folder, dram="16MiB") as store, pytest.raises(ssdgram.HotSetError, match="no hot set"):
        hotset._checked_header(store, hotset.Layout(store), b"x" * hotset.BLOCK, hotset.BLOCK, tmp_path / "other")
