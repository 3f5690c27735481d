"""Stores for every test of this run, made once. `served` opens one and checks, as it closes, that the planner is as it must be."""

import gc
import threading
from collections import Counter

import pytest
from checkpoints import TINY, small_engram, small_ple
from made_stores import Made, check_planner, clear_faults, descriptors

import ssdgram

# Files that take longest, longest first: begun first, so that no process is left alone with one at the end. (Triton's needs no code of
# Numba's: in an empty cache the other process compiles for a minute meanwhile.)
LONG = ("kernels_triton", "planner", "bench_tp2", "warmness", "store_lifetime", "bench_serve", "store_faults", "demo", "bench_gds", "serve",
        "stager", "history_scripts", "crew", "wheel", "hotset_gds", "gds_store", "cancelled_while_expanding", "store_errors", "convert",
        "cli_plan", "serve_death", "serve_protocol", "store", "plan", "budget", "hotset", "miniature", "convert_kill", "readme", "warmup")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """In the order of LONG, the others behind them."""
    place = {f"test_{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish():
    """A full collection, one at the end of each test with a store, would go through all modules' objects for nothing: a quarter of a
    second each time."""
    gc.collect()
    gc.freeze()


def _converted(tmp_path_factory, name, make, *, stripes=0, seed=0, **options):
    folder = tmp_path_factory.mktemp(name)
    make(folder / "checkpoint", seed=seed, **options)
    ssdgram.convert(folder / "checkpoint", folder / "store", stripe=[folder / f"stripe-{k}" for k in range(stripes)])
    return Made(folder / "store", seed)


@pytest.fixture(scope="session")
def engram(tmp_path_factory):
    """Two layers, three orders, four heads, rows of 66 bytes, about 5000 rows a column."""
    return _converted(tmp_path_factory, "engram", small_engram, vocab_size=5000, heads=4, max_ngram=4, layers=(1, 14))


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """The shape of the real model: eight heads of 264-byte rows; few rows, so that pages are shared."""
    return _converted(tmp_path_factory, "wide", small_engram, vocab_size=400, heads=8, head_dim=256, max_ngram=4, layers=(1, 14),
                      seed=3)


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """The geometry of `engram`, made from another checkpoint."""
    return _converted(tmp_path_factory, "other", small_engram, vocab_size=5000, heads=4, max_ngram=4, layers=(1, 14), seed=1)


@pytest.fixture(scope="session")
def striped(tmp_path_factory):
    """Three roots."""
    return _converted(tmp_path_factory, "striped", small_engram, vocab_size=900, stripes=3, layers=(1, 3), seed=4)


@pytest.fixture(scope="session", params=["bf16", "fp8_global", "nvfp4"])
def ple(tmp_path_factory, request):
    """The PLE family, one store an encoding."""
    return _converted(tmp_path_factory, request.param, small_ple, vocab_size=700, encoding=request.param, seed=5)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The golden checkpoint, converted: what the published code says about it is in expected.npz."""
    out = tmp_path_factory.mktemp("tiny") / "store"
    ssdgram.convert(TINY, out)
    return Made(out)


@pytest.fixture
def served():
    """served(made, ...) opens a store; at the end it is closed and its bookkeeping checked, its bundles byte by byte."""
    before = descriptors()
    opened = []

    def open_it(made, check=True, **options):
        store = made.open(**options)
        opened.append((made if check else None, store))
        return store

    try:
        yield open_it
        for made, store in opened:
            if not store._closed and made is not None:
                clear_faults(store)
                check_planner(store, made)
    finally:
        for _, store in opened:
            store.close()
        made = store = None
        opened.clear()
    gc.collect()
    gc.freeze()                                              # what is left is not of this test's stores: loaded code, other fixtures
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ssdgram-")]
    assert not Counter(descriptors()) - Counter(before), "descriptors stay open"
