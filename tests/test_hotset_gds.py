"""The hot set of a store whose slab lies in GPU memory: checked there before it is served, with and without KvikIO."""

import os
import sys
import types

import numpy as np
import pytest
from fake_cufile import FakeCufile, FakePort
from made_stores import assert_served, check_planner

import ssdgram
from ssdgram import _gds, _hotset_gds, hotset

torch = pytest.importorskip("torch")


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCufile()
    monkeypatch.setattr(_gds, "open_port", lambda device: FakePort(fake))
    return fake


@pytest.fixture(params=["kvikio", "pinned"])
def source(request, monkeypatch):
    """KvikIO as far as this project uses it, over host memory, or none; what was asked of it."""
    asked = types.SimpleNamespace(reads=0, settings=[], open=0, fail=None, name=request.param)
    if request.param == "pinned":
        monkeypatch.setitem(sys.modules, "kvikio", None)
        return asked

    class Future:
        def __init__(self, buffer, size, offset, fd):
            self.work, self.polls = (buffer, size, offset, fd), 0

        def done(self):
            self.polls += 1
            return self.polls > 1

        def get(self):
            buffer, size, offset, fd = self.work
            data = os.pread(fd, size, offset)
            buffer[:len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
            return len(data)

    class CuFile:
        def __init__(self, file, flags="r"):
            if asked.fail:
                raise RuntimeError(asked.fail)
            self.fd, asked.open = os.open(file, os.O_RDONLY), asked.open + 1

        def pread(self, buf, size=None, file_offset=0, task_size=None):
            asked.reads += 1
            assert size == len(buf) and file_offset % 4096 == size % 4096 == 0
            return Future(buf, size, file_offset, self.fd)

        def close(self):
            os.close(self.fd)
            asked.open -= 1

    class Settings:
        def __init__(self, values):
            asked.settings.append(values)

        def __exit__(self, *error):
            asked.settings.pop()

    kvikio, defaults = types.ModuleType("kvikio"), types.ModuleType("kvikio.defaults")
    kvikio.CuFile, defaults.set = CuFile, Settings
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    return asked


def opened(made, path, **options):
    return made.open(queue="gds", hbm=options.pop("hbm", "2MiB"), hotset=path, **options)


@pytest.fixture
def written(engram, tmp_path):
    """A hot set of 400 tokens, and the tokens; written by a store in DRAM, which reads quicker than a cuFile that is made up."""
    path, tokens = tmp_path / "hot", engram.tokens(400)
    with engram.open(dram="8MiB", hotset=path) as store, store.prefetch(tokens) as batch:
        batch.wait()
    return path, tokens


def test_a_reopened_store_serves_from_gpu_memory_at_once(engram, fake, source, written):
    path, tokens = written
    with opened(engram, path) as store:
        assert store.hot_bundles > 1000
        before = store.stats().reads
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
        assert store.stats().reads == before
        check_planner(store, engram)
    assert source.settings == [] and source.open == 0
    assert (source.reads > 0) == (source.name == "kvikio")
    assert fake.clean


def test_it_is_the_file_that_the_other_queues_read(engram, fake, source, tmp_path):
    path, tokens = tmp_path / "hot", engram.tokens(400)
    with opened(engram, path) as store, store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
    with engram.open(queue="auto", dram="8MiB", hotset=path) as store:
        before = store.stats().reads
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
        assert store.stats().reads == before


def test_a_smaller_slab_takes_the_front(engram, fake, source, written):
    path, _ = written
    with opened(engram, path, hbm=16 * 4096 + 300 * 320) as store:
        assert 0 < store.hot_bundles < 300
        for seed in range(5):
            tokens = engram.tokens(10, seed)
            with store.prefetch(tokens) as batch:
                assert_served(engram, store, batch, tokens)
        check_planner(store, engram)


def test_a_damaged_entry_is_caught_by_the_check_and_read_anew(engram, fake, source, written):
    path, tokens = written
    data = bytearray(path.read_bytes())
    data[hotset.BLOCK + 200] ^= 1                            # a code of the first entry
    data[hotset.BLOCK * 3 + 16] ^= 1                         # a CRC of another
    data[hotset.BLOCK * 4 + 8] = 200                         # no group of this store
    data[hotset.BLOCK * 5] ^= 1                              # the key of one
    path.write_bytes(data)
    with opened(engram, path) as store:
        assert any("4 entries" in notice for notice in store.notices), store.notices
        check_planner(store, engram)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)


def test_a_file_that_ends_early_gives_what_there_is(engram, fake, source, written, monkeypatch):
    path, _ = written
    monkeypatch.setattr(hotset, "_checked_header", lambda store, layout, text, size, path: 10**5)
    with opened(engram, path) as store:
        assert store.hot_bundles > 1000
        check_planner(store, engram)


def test_a_gpu_that_does_not_check_leaves_nothing_in_the_cache(engram, fake, source, written, monkeypatch):
    path, _ = written
    monkeypatch.setattr(_hotset_gds, "CALL_TIMEOUT_S", 0.05)
    from fake_cufile import HostRounds

    monkeypatch.setattr(HostRounds, "launch", lambda self, lane, count, number: None)
    with pytest.raises(ssdgram.UnavailableError, match=r"has not checked a part of the hot set for 0\.05 s"):
        opened(engram, path)


def test_kvikio_that_does_not_open_the_file_is_done_without(engram, fake, source, written):
    path, tokens = written
    source.fail = "cuFile has no such file system"
    with opened(engram, path) as store:
        if source.name == "kvikio":
            assert any("KvikIO does not open it (cuFile has no such file system)" in notice for notice in store.notices)
        before = store.stats().reads
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
        assert store.stats().reads == before
    assert source.settings == []


def test_rows_without_scales(ple, fake, source, tmp_path):
    path, tokens = tmp_path / "hot", ple.tokens(100)
    for _ in range(2):
        with opened(ple, path) as store:
            with store.prefetch(tokens) as batch:
                assert_served(ple, store, batch, tokens)
            check_planner(store, ple)
    assert np.fromfile(path, np.uint8).any()
