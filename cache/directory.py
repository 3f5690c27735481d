"""Directory of the bundle cache: which slot holds the bundle (x, group), in sets of 16 ways.

    one set, 256 bytes, 4 cache lines
    line 0   fingerprint u16[16] | group u8[16], 255 = empty | age u8[16], the policy's own byte
    line 1-2 x i64[16]
    line 3   slot i32[16]

A probe compares 16 fingerprints at once and looks at x and group only where they agree, so a hit reads lines 0, 3 and one of
1-2, a miss mostly line 0 alone. What `age` means and who is pushed out is the policy's business (policy.py); this module only
finds, writes and clears entries. Invariant: a bundle has at most one entry, in the set that `set_of` names. One thread writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ssdgram._compiled import address_of, compiled, prefetch

WAYS = 16
EMPTY = 255                                                  # group of a way without entry

SET = np.dtype([
    ("fingerprint", np.uint16, WAYS),
    ("group", np.uint8, WAYS),
    ("age", np.uint8, WAYS),
    ("x", np.int64, WAYS),
    ("slot", np.int32, WAYS),
])
SET_BYTES = SET.itemsize
_GROUP_OFFSET = 32


def sets_for(entries: int) -> int:
    """Sets that hold at most `entries` bundles; at least 1."""
    return max(1, entries // WAYS)


def allocate(sets: int) -> np.ndarray:
    """An empty directory of its own, SET [sets], on a cache-line boundary (the store lays its own over the arena)."""
    memory = np.zeros((sets + 1) * SET_BYTES, np.uint8)
    start = -memory.ctypes.data % 64
    directory: np.ndarray = memory[start : start + sets * SET_BYTES].view(SET)
    init(directory)
    return directory


@intrinsic
def lowest_bit(typingctx, mask):  # type: ignore[no-untyped-def]
    """Index of the lowest one bit of `mask` (int64, not 0)."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


def _matcher(bits: int, value_type: Any) -> Any:
    @intrinsic
    def match(typingctx, address, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            vector = ir.VectorType(ir.IntType(bits), WAYS)
            lanes = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=16)
            undefined = ir.Constant(vector, ir.Undefined)
            first = builder.insert_element(undefined, arguments[1], ir.Constant(ir.IntType(32), 0))
            wanted = builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), WAYS), [0] * WAYS))
            equal = builder.icmp_unsigned("==", lanes, wanted)
            return builder.zext(builder.bitcast(equal, ir.IntType(WAYS)), ir.IntType(64))

        return types.int64(types.int64, value_type), codegen

    match.__doc__ = f"Bit mask (int64) of the 16 {bits}-bit lanes at an address (16-aligned) that equal `value`."
    return match


match_u16 = _matcher(16, types.uint16)
match_u8 = _matcher(8, types.uint8)


@compiled
def mix(x, group):  # type: ignore[no-untyped-def]
    """A well mixed uint64 of (x int64, group): bits 32-63 choose the set, 0-15 are the fingerprint."""
    h = np.uint64(x) ^ (np.uint64(group) * np.uint64(0x9E3779B97F4A7C15))
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return h ^ (h >> np.uint64(32))


@compiled
def set_of(x, group, sets):  # type: ignore[no-untyped-def]
    """Set of the bundle, int64 in [0, sets); `sets` < 2**31, any number."""
    return np.int64(((mix(x, group) >> np.uint64(32)) * np.uint64(sets)) >> np.uint64(32))


@compiled
def init(directory):  # type: ignore[no-untyped-def]
    """Make every set empty."""
    for s in range(directory.shape[0]):
        for way in range(WAYS):
            clear(directory, s, way)
            directory[s].age[way] = way                      # the policy's recency ranks start as a permutation


@compiled
def prefetch_set(directory, s):  # type: ignore[no-untyped-def]
    """Ask for the four lines of set `s` without waiting."""
    address = address_of(directory, s)
    prefetch(address)
    prefetch(address + 64)
    prefetch(address + 128)
    prefetch(address + 192)


@compiled
def probe(directory, s, x, group):  # type: ignore[no-untyped-def]
    """Way of the bundle in set `s` (= set_of(x, group, sets)), or -1."""
    mask = match_u16(address_of(directory, s), np.uint16(mix(x, group) & np.uint64(0xFFFF)))
    while mask != 0:
        way = lowest_bit(mask)
        if directory[s].x[way] == x and directory[s].group[way] == group:
            return way
        mask &= mask - 1
    return -1


@compiled
def empty_ways(directory, s):  # type: ignore[no-untyped-def]
    """Bit mask (int64) of the ways of set `s` without entry."""
    return match_u8(address_of(directory, s) + _GROUP_OFFSET, np.uint8(EMPTY))


@compiled
def write(directory, s, way, x, group, slot):  # type: ignore[no-untyped-def]
    """Make way `way` of set `s` the entry of (x, group) in slot `slot`. Its age is the caller's business."""
    directory[s].fingerprint[way] = np.uint16(mix(x, group) & np.uint64(0xFFFF))
    directory[s].group[way] = group
    directory[s].x[way] = x
    directory[s].slot[way] = slot


@compiled
def clear(directory, s, way):  # type: ignore[no-untyped-def]
    """Make way `way` of set `s` empty. A cleared way's fingerprint may still agree with a probe: its group never does."""
    directory[s].group[way] = EMPTY
    directory[s].x[way] = -1
    directory[s].slot[way] = -1


@compiled
def entries(directory):  # type: ignore[no-untyped-def]
    """Number of entries. Walks the whole directory: for tests and statistics."""
    count = 0
    for s in range(directory.shape[0]):
        for way in range(WAYS):
            count += directory[s].group[way] != EMPTY
    return count
