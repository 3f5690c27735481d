"""Who stays in the cache: recency in a window, frequency at its border (W-TinyLFU within each set of 16 ways).

A bundle that missed always enters the window of its set, as its most recent entry. The window has WINDOW ways; when it is
full, its least recent entry leaves it and contends with the least recent entry of the set's main part: the one that the
sketch saw more often stays (in the main part), the other is pushed out; the resident wins a tie. A hit makes an entry the
most recent one of its set, wherever it is.

    age byte of a way:  bit 7 = in the window, bits 0-3 = recency rank in the set (0 = most recent; a permutation of 0..15)

This module decides, directory.py writes, sketch.py counts. Invariant: the ranks of a set are always a permutation.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import compiled
from ssdgram.cache.directory import EMPTY, WAYS, clear, empty_ways, lowest_bit, write
from ssdgram.cache.sketch import frequency

WINDOW = 4                                                   # ways of a set that recency alone decides about
IN_WINDOW = 0x80
RANK = 0x0F


@compiled
def touch(directory, sketch, s, way):  # type: ignore[no-untyped-def]
    """A hit: the entry becomes the most recent of its set."""
    ages = directory[s].age
    old = ages[way] & RANK
    for other in range(WAYS):
        ages[other] += np.uint8((ages[other] & RANK) < old)
    ages[way] = ages[way] & IN_WINDOW


@compiled
def _oldest(directory, s, window):  # type: ignore[no-untyped-def]
    """Least recent entry of the window (IN_WINDOW) or main part (0) of a set, or -1; and the number of entries of that part."""
    oldest, rank_of_oldest, count = -1, -1, 0
    for way in range(WAYS):
        age = np.int64(directory[s].age[way])
        if directory[s].group[way] != EMPTY and (age & IN_WINDOW) == window:
            count += 1
            if (age & RANK) > rank_of_oldest:
                oldest, rank_of_oldest = way, age & RANK
    return oldest, count


@compiled
def insert(directory, sketch, s, x, group, slot):  # type: ignore[no-untyped-def]
    """Give a bundle that missed its entry; the slot that was pushed out, or -1. The bundle must not be in the set already."""
    border, in_window = _oldest(directory, s, IN_WINDOW)
    empty = empty_ways(directory, s)
    pushed_out = np.int64(-1)
    if empty != 0:
        way = lowest_bit(empty)
        if in_window >= WINDOW:
            directory[s].age[border] &= RANK
    else:
        way = border
        victim, in_main = _oldest(directory, s, 0)
        if border < 0:
            way = victim
        elif victim >= 0 and in_window >= WINDOW:
            seen = frequency(sketch, directory[s].x[border], directory[s].group[border])
            if seen > frequency(sketch, directory[s].x[victim], directory[s].group[victim]):
                directory[s].age[border] &= RANK
                way = victim
        elif victim >= 0:                                    # the window lost entries to `remove`: it grows back
            way = victim
        pushed_out = np.int64(directory[s].slot[way])
    write(directory, s, way, x, group, slot)
    touch(directory, sketch, s, way)
    directory[s].age[way] |= IN_WINDOW
    return pushed_out


@compiled
def remove(directory, s, way):  # type: ignore[no-untyped-def]
    """Take an entry out (its slot is the caller's); its way becomes the least recent of the set."""
    ages = directory[s].age
    old = ages[way] & RANK
    for other in range(WAYS):
        ages[other] -= np.uint8((ages[other] & RANK) > old)
    ages[way] = WAYS - 1
    clear(directory, s, way)


@compiled
def rank(directory, sketch, s, way):  # type: ignore[no-untyped-def]
    """How much an entry deserves to stay, int64: for the reclaim sweep, which takes the smallest first. Empty ways: -1."""
    if directory[s].group[way] == EMPTY:
        return -1
    seen = frequency(sketch, directory[s].x[way], directory[s].group[way])
    return seen * WAYS + (WAYS - 1 - np.int64(directory[s].age[way] & RANK))
