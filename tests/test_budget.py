"""The budget: sizes as people write them, arithmetic that is exact, and memory that agrees with it."""

import itertools
import math

import numpy as np
import pytest
from made_stores import QUICK, run

import ssdgram
from ssdgram import _budget as budget
from ssdgram import _opening
from ssdgram._arena import Arena, size_of

SHAPE = budget.Shape(layers=2, orders=3, files=48, vocabulary=129_280, stride=2112, heads=8, readers=1, depth=256, batches=256)


@pytest.mark.parametrize("text, size", [
    (0, 0), (1, 1), (1 << 40, 1 << 40), ("0", 0), ("4096", 4096), ("1GiB", 1 << 30), ("1.5GiB", 3 << 29), ("512MiB", 512 << 20),
    ("512 MiB", 512 << 20), (" 2 kib ", 2048), ("3K", 3072), ("3KB", 3000), ("1g", 1 << 30), ("2TB", 2 * 10**12), ("1T", 1 << 40),
    ("0.5M", 1 << 19), ("7b", 7)])
def test_sizes(text, size):
    assert budget.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 GiB 2", "-1GiB", "1e9", "0x10", "1,5GiB", "1GiBs", "one", None, 1.5, True, b"1GiB",
                                  [1], "nan", "inf", "1 PiB", "--", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(ssdgram.BudgetError, match=r"hbm is .*: expected bytes such as 1073741824, '512MiB' or '1\.5GiB'"):
        budget.parse_size(text, "hbm")


def test_negative_bytes():
    with pytest.raises(ssdgram.BudgetError, match="dram is -1: expected a number of bytes, 0 or more"):
        budget.parse_size(-1, "dram")


@pytest.mark.parametrize("size", [8 << 20, 33 << 20, 1 << 30, (1 << 30) + 12345, 8 << 30, 200 << 30])
def test_the_largest_cache_that_fits(size):
    """All arrays together are within the budget, and one slot more would not be."""
    found = budget.sizes(size, SHAPE)
    assert found.total == size_of(found.specs) <= size
    assert size - found.total < 4096 * len(found.specs) + 2 * SHAPE.stride + 512
    assert found.sets * 16 + 16 <= found.slots               # slots for bundles that are in no set
    assert found.slots * SHAPE.stride > 0.8 * size or size < 32 << 20


def test_a_budget_too_small_names_one_that_works():
    with pytest.raises(ssdgram.BudgetError) as caught:
        budget.sizes(1000, SHAPE)
    need = int(str(caught.value).split("at least ")[1].split()[0])
    assert budget.sizes(need, SHAPE).slots >= SHAPE.groups + budget.MIN_FREE_SLOTS
    with pytest.raises(ssdgram.BudgetError):
        budget.sizes(need - (1 << 20), SHAPE)


def test_small_budgets_get_shallow_staging():
    """Staging never takes more than a small part."""
    for size in (9 << 20, 16 << 20, 64 << 20, 1 << 30):
        found = budget.sizes(size, SHAPE)
        assert found.depth * 4096 <= max(size // 32, 16 * 4096) and 16 <= found.depth <= SHAPE.depth


def test_rings_are_powers_of_two_and_hold_every_record():
    for size in (9 << 20, 100 << 20, 3 << 30):
        found = budget.sizes(size, SHAPE)
        lengths = {name: math.prod(shape) for name, _, shape in found.specs}
        for name in ("step_ring", "background_ring", "buckets", "requests"):
            assert lengths[name] & (lengths[name] - 1) == 0
        assert lengths["step_ring"] >= found.pages == lengths["pages"] and lengths["requests"] >= 3 * SHAPE.batches
        assert found.pages >= 4 * SHAPE.heads and lengths["overflow"] > found.slots


def test_an_absurd_budget_stays_within_int32():
    assert budget.sizes(1 << 60, SHAPE).slots <= 1 << 30


def test_the_arena_is_what_was_measured(engram):
    """Exactly the arrays of the list, none overlapping, each on a page of its own."""
    selection = _opening.Selection.of(engram.geometry, None, None)
    shape = _opening.shape_of(engram.geometry, selection, engram.vocabulary, QUICK.readers, QUICK.depth, QUICK.batches)
    found = budget.sizes(4 << 20, shape)
    arena = Arena(found.specs, private=budget.PRIVATE)
    spans = []
    for name, dtype, dimensions in found.specs:
        array = arena[name]
        assert array.dtype == dtype and array.shape == dimensions and array.ctypes.data % 4096 == 0
        assert not array.view(np.uint8).any() if array.nbytes else True
        spans.append((array.ctypes.data, array.ctypes.data + array.nbytes))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert budget.PRIVATE <= {name for name, _, _ in found.specs}
    arena.close()


MEASURE = """
import sys
from pathlib import Path
from made_stores import Made
made = Made(Path(sys.argv[1]))
def resident():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("RssAnon", "RssShmem")))
def work(store, rounds):
    for seed in range(rounds):
        with store.prefetch(made.tokens(500, seed)) as batch:
            batch.wait()
            batch.packed(1)
with made.open(dram="3MiB") as store:                      # everything compiled and loaded
    work(store, 3)
before = resident()
store = made.open(dram=int(sys.argv[2]))
opened = resident()
work(store, 30)
full = store.stats()
print(before, opened, resident(), full.slots_free, full.slots)
"""


def test_resident_memory_agrees_with_the_budget(engram):
    """A cache filled to the brim: the process has grown by the budget, and by hardly more."""
    dram = 24 << 20
    result = run(MEASURE, str(engram.out), str(dram))
    assert result.returncode == 0, result.stderr
    before, opened, full, free, slots = map(int, result.stdout.split())
    assert free < 0.05 * slots
    assert opened - before < dram
    assert 0.8 * dram < full - before < 1.02 * dram + (6 << 20)              # ... the outputs of a batch, and the allocator's slack
