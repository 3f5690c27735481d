"""Sketch of the past: how often bundles that were pushed out had been asked for, 32 of them per directory set.

    one block, 64 bytes, one cache line:  ghost u16[32], a word = 12 bits of fingerprint, 4 bits of count; 0 = none
    remember:  asked for once        ──► enters at place ONCE, those behind move back, the last is forgotten
               asked for more often  ──► enters at place 0
    recall:    taken out, those behind move up

So a set remembers its last 24 or more evictions, and longer those that were wanted more than once. The fingerprint makes a
false memory possible (below 1 % of recalls at 32 ghosts of 12 bits), which costs a wrong count and nothing else. Each step
works on one line; there is no ageing pass. It knows nothing of slots and ways. Invariant: no word behind an empty one.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, compiled_lean, prefetch
from ssdgram.cache.directory import lowest_bit, match_32_words, on_lines

GHOSTS = 32
ONCE = 8                                                     # where bundles enter that were asked for only once
TOP = 15                                                     # counts stop here

BLOCK = np.dtype([("ghost", np.uint16, GHOSTS)])
BLOCK_BYTES = BLOCK.itemsize


def allocate(sets: int) -> np.ndarray:
    """An empty sketch of its own for a directory of `sets` sets, BLOCK [sets]."""
    return on_lines(sets, BLOCK)


@compiled_lean
def init(sketch):  # type: ignore[no-untyped-def]
    """Forget everything."""
    for block in range(sketch.shape[0]):
        for place in range(GHOSTS):
            sketch[block].ghost[place] = 0


@compiled_lean
def prefetch_sketch(sketch, block):  # type: ignore[no-untyped-def]
    """Ask for a block, of the set of the same number, without waiting: worth it for a bundle that missed."""
    prefetch(address_of(sketch, block))


@compiled_lean
def _place(sketch, block, h):  # type: ignore[no-untyped-def]
    """Place of the bundle of mixed hash `h` among the ghosts of its block, or GHOSTS."""
    mask = match_32_words(address_of(sketch, block), np.uint16((h >> np.uint64(4)) & np.uint64(0xFFF0)), np.uint16(0xFFF0))
    while mask != 0:
        place = lowest_bit(mask)
        if sketch[block].ghost[place] != 0:                  # an empty word looks like fingerprint 0
            return place
        mask &= mask - 1
    return np.int64(GHOSTS)


@compiled_lean
def count_of(sketch, block, h):  # type: ignore[no-untyped-def]
    """Remembered count of the bundle of mixed hash `h`, int64, 0 if it is forgotten."""
    place = _place(sketch, block, h)
    if place == GHOSTS:
        return np.int64(0)
    return np.int64(sketch[block].ghost[place] & 15)


@compiled_lean
def remember(sketch, block, h, count):  # type: ignore[no-untyped-def]
    """The bundle of mixed hash `h` is pushed out after `count` (1..TOP) requests."""
    ghosts = sketch[block].ghost
    place = ONCE if count == 1 else 0
    while place > 0 and ghosts[place - 1] == 0:              # no gap in a block that is filling
        place -= 1
    for k in range(GHOSTS - 1, place, -1):
        ghosts[k] = ghosts[k - 1]
    ghosts[place] = np.uint16(((h >> np.uint64(4)) & np.uint64(0xFFF0)) | np.uint64(count))


@compiled_lean
def recall(sketch, block, h):  # type: ignore[no-untyped-def]
    """Take the bundle of mixed hash `h` out of the ghosts: its count, or 0 if it is forgotten."""
    place = _place(sketch, block, h)
    if place == GHOSTS:
        return np.int64(0)
    ghosts = sketch[block].ghost
    count = np.int64(ghosts[place] & 15)
    for k in range(place, GHOSTS - 1):
        ghosts[k] = ghosts[k + 1]
    ghosts[GHOSTS - 1] = 0
    return count
