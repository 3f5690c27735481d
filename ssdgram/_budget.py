"""From a byte budget to sizes: how many slots, sets, page records and staging pages a DRAM budget pays for.

Everything the store keeps for as long as it is open is inside the budget: slab, directory, sketch, slot records, page
records, rings, staging, token map. Per-batch arrays (the plan's result and its list of slots, 8 bytes per position and
group) are the caller's, like its outputs. It knows nothing of files; the arithmetic is exact, because the same list of
arrays that is measured here is what the arena then allocates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._arena import Spec, rounded, size_of
from ssdgram._plan_state import SLICE
from ssdgram.cache import directory, overflow, sketch
from ssdgram.errors import BudgetError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
         "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
PRIVATE = frozenset({
    "pages", "targets", "claims", "batches", "layers", "active", "slots", "failures", "directory", "sketch", "overflow", "hbm",
    "wants", "buckets", "building", "groups", "group_index", "multipliers", "token_map", "keys", "found", "entries", "crew",
    "crew_futex", "chunks"})
# the planner's (and readers') own arrays: no other process and no GPU looks at them
MIN_FREE_SLOTS = 64                                          # slots beyond the dead bundles, at the least
MOST_SLOTS = 1 << 30                                         # their numbers are int32
MOST_PAGES = 1 << 16
LEAST_PAGES = 1 << 10


def parse_size(value: str | int, name: str = "size") -> int:
    """Bytes of "1GiB", "512 MiB", "0", 1073741824, …; BudgetError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise BudgetError(f"{name} is {value}: expected a number of bytes, 0 or more")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in UNITS or len(match[1]) > 64:
        raise BudgetError(f"{name} is {value!r}: expected bytes such as 1073741824, '512MiB' or '1.5GiB'")
    return int(float(match[1]) * UNITS[match[2].upper()])


@dataclass(frozen=True)
class Shape:
    """What does not depend on the budget."""

    layers: int
    orders: int
    files: int
    vocabulary: int                                          # entries of the token map, 0: none
    stride: int                                              # bytes of a slot
    heads: int                                               # of the largest bundle
    readers: int
    depth: int
    batches: int
    hbm_slots: int = 0
    slab_slots: int | None = None                            # slots of a slab in GPU memory; None: in DRAM, as many as the budget pays for
    crew: int = 0                                            # threads that help the planner

    @property
    def groups(self) -> int:
        """Served layers x orders."""
        return self.layers * self.orders


@dataclass(frozen=True)
class Sizes:
    """What a budget pays for."""

    slots: int
    sets: int
    pages: int
    depth: int
    specs: tuple[Spec, ...]

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return size_of(self.specs)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def specs_of(shape: Shape, slots: int, sets: int, pages: int, depth: int) -> tuple[Spec, ...]:
    """Name, dtype and shape of every array that a store keeps."""
    groups, readers = shape.groups, shape.readers
    slab = slots if shape.slab_slots is None else 1          # what lies in GPU memory is not paid for here
    chunks = p.CHUNKS if shape.crew else 1                   # that are planned side by side
    return (
        ("control", np.int64, (s.control_words(readers),)),
        ("words", np.int32, (s.futex_words(readers),)),
        ("params", np.int64, (s.P_COUNT,)),
        ("faults", np.int64, (4,)),
        ("step_ring", np.int32, (2 * pages,)),
        ("background_ring", np.int32, (2 * pages,)),
        ("done_ring", np.int32, (readers * pages,)),
        ("pages", s.PAGE, (pages,)),
        ("targets", s.TARGET, (2 * pages,)),
        ("files", s.FILE, (shape.files,)),
        ("claims", np.int32, (pages,)),
        ("staging", np.uint8, (readers * depth * 4096,)),
        ("plan_control", np.int64, (p.C_COUNT,)),
        ("plan_params", np.int64, (p.PP_COUNT,)),
        ("stats", np.int64, (p.S_COUNT,)),
        ("requests", np.int32, (_power_of_two(4 * shape.batches),)),
        ("batches", p.BATCH, (shape.batches,)),
        ("layers", p.LAYER, (shape.batches * shape.layers,)),
        ("batch_words", np.int32, (shape.batches * p.batch_line(shape.layers),)),
        ("active", np.int32, (shape.batches,)),
        ("gpu_words", np.int64, (shape.batches * shape.layers,)),
        ("token_words", np.int64, (shape.batches,)),
        ("hbm", p.HBM_SLOT, (shape.hbm_slots,)),
        ("wants", np.int32, (p.COPIES if shape.hbm_slots else 0,)),
        ("copies", np.int32, (2 * p.COPIES if shape.hbm_slots else 0,)),
        ("copy_word", np.int64, (8,)),
        ("slots", p.SLOT, (slots,)),
        ("failures", p.FAILURE, (slots,)),
        ("directory", directory.SET, (sets,)),
        ("sketch", sketch.BLOCK, (sets,)),
        ("overflow", overflow.CELL, (overflow.cells(slots // 2 + 1),)),
        ("buckets", np.int32, (2 * pages,)),
        ("building", np.int32, (2 * pages,)),
        ("groups", p.GROUP, (groups,)),
        ("group_index", np.int32, (256,)),
        ("multipliers", np.int64, (shape.layers, shape.orders + 1)),
        ("token_map", np.int32, (shape.vocabulary,)),
        ("keys", np.int64, (chunks * SLICE * groups,)),
        ("found", np.int64, (chunks * SLICE * groups,)),
        ("entries", np.int64, (chunks * SLICE * groups,)),
        ("crew", np.int64, (p.CREW_WORDS,)),
        ("crew_futex", np.int32, (16,)),
        ("chunks", np.int64, (chunks * p.chunk_line(shape.layers, shape.orders),)),
        ("slab", np.uint8, (slab * shape.stride,)),
    )


def sizes(budget: int, shape: Shape) -> Sizes:
    """The largest cache that `budget` bytes pay for; BudgetError(with the least that works) if none."""
    pages = min(MOST_PAGES, max(LEAST_PAGES, _power_of_two(4 * shape.heads), _power_of_two(budget >> 12) // 4))
    depth = shape.depth
    while depth > 16 and shape.readers * depth * 4096 > budget // 32:
        depth //= 2

    def with_slots(slots: int) -> Sizes:
        spare = max(16, slots // 64)                         # slots for bundles that are in no set
        sets = directory.sets_for(max(directory.WAYS, slots - spare))
        return Sizes(slots, sets, pages, depth, specs_of(shape, slots, sets, pages, depth))

    least = shape.groups + MIN_FREE_SLOTS
    if shape.slab_slots is not None:
        return _around_slab(budget, shape, least, with_slots)
    if with_slots(least).total > budget:
        need = rounded(with_slots(least).total, 1 << 20)
        raise BudgetError(f"dram is {budget} bytes: the tables of this store need at least {need} bytes ({need >> 20} MiB)")
    low, high = least, min(MOST_SLOTS, max(least + 1, budget // shape.stride + 1))
    while high - low > 1:
        middle = (low + high) // 2
        if with_slots(middle).total <= budget:
            low = middle
        else:
            high = middle
    return with_slots(low)


def _around_slab(budget: int, shape: Shape, least: int, with_slots: Callable[[int], Sizes]) -> Sizes:
    """Sizes for a slab in GPU memory, whose slots are given: its tables have to fit into the DRAM budget."""
    slots = min(shape.slab_slots or 0, MOST_SLOTS)
    if slots < least:
        raise BudgetError(f"hbm pays for {slots} bundles: this store needs at least {least} there, {least * shape.stride} bytes beside the "
                          f"staging of queue 'gds'")
    found = with_slots(slots)
    if found.total > budget:
        need = rounded(found.total, 1 << 20)
        raise BudgetError(f"dram is {budget} bytes: the tables of {slots} bundles in GPU memory need at least {need} bytes; give more, or "
                          f"lower hbm=")
    return found
