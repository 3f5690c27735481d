"""Directory of the bundle cache: which slot holds the bundle (x, group), in sets of 16 ways.

    one set, 256 bytes, 4 cache lines
    line 0   fingerprint u8[16] | group u8[16], 255 = empty | count u8[16] | age u8[16]
    line 1   slot i32[16]
    line 2-3 x i64[16]

A probe compares 16 fingerprints at once and looks at x and group only where they agree. Who has the slots' own records, in which x
and group stand too, looks at lines 0 and 1 alone (`guess`), which most processors fetch as a pair. What count and age mean and
who is pushed out is the policy's business (policy.py); this module only finds, writes and clears entries. Invariants: a bundle has
at most one entry, in the set that `set_of` names; an empty way has group 255, count 0 and slot -1. One thread writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ssdgram._compiled import address_of, compiled_lean, prefetch

WAYS = 16
EMPTY = 255                                                  # group of a way without entry

SET = np.dtype([
    ("fingerprint", np.uint8, WAYS),
    ("group", np.uint8, WAYS),
    ("count", np.uint8, WAYS),
    ("age", np.uint8, WAYS),
    ("slot", np.int32, WAYS),
    ("x", np.int64, WAYS),
])
SET_BYTES = SET.itemsize


def sets_for(entries: int) -> int:
    """Sets that hold at most `entries` bundles; at least 1."""
    return max(1, entries // WAYS)


def on_lines(count: int, dtype: np.dtype) -> np.ndarray:
    """Zeroed array [count] of its own that starts on a cache line (the store lays its arrays over one arena instead)."""
    memory = np.zeros(count * dtype.itemsize + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * dtype.itemsize].view(dtype)


def allocate(sets: int) -> np.ndarray:
    """An empty directory of its own, SET [sets]."""
    directory = on_lines(sets, SET)
    init(directory)
    return directory


@intrinsic
def lowest_bit(typingctx, mask):  # type: ignore[no-untyped-def]
    """Index of the lowest one bit of `mask` (int64, not 0)."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


def _matcher(bits: int, lanes: int, integer: Any) -> Any:
    """A compiled function match(address, value, kept): the lanes at `address` of which the bits `kept` equal `value`."""

    @intrinsic
    def match(typingctx, address, value, kept):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            vector, i32 = ir.VectorType(ir.IntType(bits), lanes), ir.IntType(32)

            def everywhere(scalar: Any) -> Any:
                undefined = ir.Constant(vector, ir.Undefined)
                first = builder.insert_element(undefined, scalar, ir.Constant(i32, 0))
                return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(i32, lanes), [0] * lanes))

            found = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=16)
            equal = builder.icmp_unsigned("==", builder.and_(found, everywhere(arguments[2])), everywhere(arguments[1]))
            return builder.zext(builder.bitcast(equal, ir.IntType(lanes)), ir.IntType(64))

        return types.int64(types.int64, integer, integer), codegen

    return match


match_16_bytes = _matcher(8, 16, types.uint8)                # bit masks (int64), addresses 16-aligned: no branch per lane
match_32_words = _matcher(16, 32, types.uint16)


@compiled_lean
def mix(x, group):  # type: ignore[no-untyped-def]
    """A well mixed uint64 of (x int64, group): bits 32-63 choose the set, 0-7 are the fingerprint, 8-19 the sketch's."""
    h = np.uint64(x) ^ (np.uint64(group) * np.uint64(0x9E3779B97F4A7C15))
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return h ^ (h >> np.uint64(32))


@compiled_lean
def set_of_mixed(h, sets):  # type: ignore[no-untyped-def]
    """Set of the bundle of mixed hash `h` (uint64), int64 in [0, sets)."""
    return np.int64(((h >> np.uint64(32)) * np.uint64(sets)) >> np.uint64(32))


@compiled_lean
def set_of(x, group, sets):  # type: ignore[no-untyped-def]
    """Set of the bundle, int64 in [0, sets); `sets` < 2**31, any number."""
    return set_of_mixed(mix(x, group), sets)


@compiled_lean
def init(directory):  # type: ignore[no-untyped-def]
    """Make every set empty."""
    for s in range(directory.shape[0]):
        for way in range(WAYS):
            remove(directory, s, way)


@compiled_lean
def prefetch_tags(directory, s):  # type: ignore[no-untyped-def]
    """Ask for the first two lines of set `s` (fingerprints, groups, counts, ages; slots) without waiting."""
    prefetch(address_of(directory, s))
    prefetch(address_of(directory, s) + 64)


@compiled_lean
def guess(directory, s, h):  # type: ignore[no-untyped-def]
    """First way of set `s` with the fingerprint of mixed hash `h` (uint64), or -1: 15 of 16 times the bundle's, if it is there."""
    mask = match_16_bytes(address_of(directory, s), np.uint8(h & np.uint64(0xFF)), np.uint8(0xFF))
    return lowest_bit(mask) if mask != 0 else np.int64(-1)


@compiled_lean
def probe(directory, s, x, group):  # type: ignore[no-untyped-def]
    """Way of the bundle in set `s` (= set_of(x, group, sets)), or -1."""
    mask = match_16_bytes(address_of(directory, s), np.uint8(mix(x, group) & np.uint64(0xFF)), np.uint8(0xFF))
    while mask != 0:
        way = lowest_bit(mask)
        if directory[s].x[way] == x and directory[s].group[way] == group:
            return way
        mask &= mask - 1
    return -1


@compiled_lean
def write(directory, s, way, x, group, slot, count):  # type: ignore[no-untyped-def]
    """Make way `way` of set `s` the entry of (x, group) in slot `slot`, of age 0."""
    directory[s].fingerprint[way] = np.uint8(mix(x, group) & np.uint64(0xFF))
    directory[s].group[way] = group
    directory[s].count[way] = count
    directory[s].age[way] = 0
    directory[s].x[way] = x
    directory[s].slot[way] = slot


@compiled_lean
def remove(directory, s, way):  # type: ignore[no-untyped-def]
    """Make way `way` of set `s` empty; its slot is the caller's. Nothing remembers the bundle (policy.evict does)."""
    directory[s].fingerprint[way] = 0
    directory[s].group[way] = EMPTY
    directory[s].count[way] = 0
    directory[s].age[way] = 0
    directory[s].x[way] = -1
    directory[s].slot[way] = -1


@compiled_lean
def entries(directory):  # type: ignore[no-untyped-def]
    """Number of entries. Walks the whole directory: for tests and statistics."""
    count = 0
    for s in range(directory.shape[0]):
        for way in range(WAYS):
            count += directory[s].group[way] != EMPTY
    return count
