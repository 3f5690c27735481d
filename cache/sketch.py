"""Frequency sketch: how often a bundle was asked for lately, up to 15, for bundles in the cache and for those that are not.

    one block, 64 bytes, one cache line:  3 rows of 37 four-bit counters in 7 words | added u32 | spare
    a bundle owns one counter of each row of its block; its frequency is the smallest of the three

A count-min sketch in blocks: an estimate is never below the true count since the block was last halved (as long as that is
below 15), and too high only where all three counters are shared. There is one block per directory set, chosen by the same
hash: the bundles that contend with each other are counted in one block and age together. After LIMIT additions the counters
of that block are halved, 64 bytes of work and never more at once. Counters that stand at 15 add nothing, so one very hot
bundle does not age its neighbours. It knows nothing of slots, ways or tiers: the HBM tier asks the same sketch.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, compiled, prefetch
from ssdgram.cache.directory import mix, set_of

ROWS, WIDTH, TOP = 3, 37, 15
LIMIT = 160                                                  # additions to a block between two halvings: 10 per way

BLOCK = np.dtype([("counters", np.uint64, 7), ("added", np.uint32), ("spare", np.uint32)])
BLOCK_BYTES = BLOCK.itemsize


def allocate(sets: int) -> np.ndarray:
    """An empty sketch of its own, BLOCK [sets], on a cache-line boundary (the store lays its own over the arena)."""
    memory = np.zeros((sets + 1) * BLOCK_BYTES, np.uint8)
    start = -memory.ctypes.data % 64
    sketch: np.ndarray = memory[start : start + sets * BLOCK_BYTES].view(BLOCK)
    return sketch


@compiled
def init(sketch):  # type: ignore[no-untyped-def]
    """Forget everything."""
    for block in range(sketch.shape[0]):
        for word in range(7):
            sketch[block].counters[word] = np.uint64(0)
        sketch[block].added = np.uint32(0)


@compiled
def prefetch_sketch(sketch, x, group):  # type: ignore[no-untyped-def]
    """Ask for the bundle's block without waiting."""
    prefetch(address_of(sketch, set_of(x, group, sketch.shape[0])))


@compiled
def _place(h, row):  # type: ignore[no-untyped-def]
    """Counter (0..110) of a mixed hash in a row, from ten bits that chose neither the set nor another row's counter."""
    bits = (h >> np.uint64(10 * row)) & np.uint64(0x3FF)
    return row * WIDTH + np.int64((bits * np.uint64(WIDTH)) >> np.uint64(10))


@compiled
def _counter(sketch, block, place):  # type: ignore[no-untyped-def]
    return np.int64((sketch[block].counters[place >> 4] >> np.uint64(4 * (place & 15))) & np.uint64(15))


@compiled
def frequency(sketch, x, group):  # type: ignore[no-untyped-def]
    """Estimated requests for the bundle since about two halvings, int64 in 0..15."""
    h = mix(x, group)
    block = set_of(x, group, sketch.shape[0])
    return min(_counter(sketch, block, _place(h, 0)), _counter(sketch, block, _place(h, 1)),
               _counter(sketch, block, _place(h, 2)))


@compiled
def record_access(sketch, x, group):  # type: ignore[no-untyped-def]
    """Count one request for the bundle, hit or miss."""
    h = mix(x, group)
    block = set_of(x, group, sketch.shape[0])
    lowest = frequency(sketch, x, group)
    if lowest == TOP:
        return
    for row in range(ROWS):                                  # conservative update: only the smallest counters grow
        place = _place(h, row)
        if _counter(sketch, block, place) == lowest:
            sketch[block].counters[place >> 4] += np.uint64(1) << np.uint64(4 * (place & 15))
    sketch[block].added += np.uint32(1)
    if sketch[block].added >= LIMIT:
        halve(sketch, block)


@compiled
def halve(sketch, block):  # type: ignore[no-untyped-def]
    """Halve all counters of one block."""
    for word in range(7):
        sketch[block].counters[word] = (sketch[block].counters[word] >> np.uint64(1)) & np.uint64(0x7777777777777777)
    sketch[block].added >>= np.uint32(1)
