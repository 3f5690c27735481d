"""Who stays in the cache: the bundles with the most requests per time since the last one.

An entry has a count (requests, at most 15) and an age (misses of its set since its last request). Its worth is
count / (age + PATIENCE): what a frequent bundle has earned fades while it is not asked for, in proportion; a new one has
1 / PATIENCE and soon less. An age at the end of its byte is halved with its count, so the worth goes on falling. A miss pushes
out the entry of its set with the lowest worth, whether batches use its slot or not, and takes its place, so every bundle gets
its chance. The sketch remembers the counts of those pushed out: a bundle that comes back goes on counting where it was. A hit
writes two bytes of a line that the probe has read; all else is done on misses, when a disk read is due anyway.
After hyperbolic caching (requests per time in the cache: Blankstein, Sen and Freedman 2017) with the ghosts of ARC and S3-FIFO,
within sets. `bench/policy.py` measures it against others; docs/lab-log.md has what was tried.

This module decides, directory.py finds and writes, sketch.py remembers.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import compiled_lean
from ssdgram.cache.directory import EMPTY, WAYS, mix, probe, remove, set_of, write
from ssdgram.cache.sketch import TOP, count_of, recall, remember

PATIENCE = 8                                                 # in misses of a set, of which 16 make one turnover
OLDEST = 255
RANK_ONE = 1 << 16                                           # rank of worth 1


@compiled_lean
def touch(directory, sketch, s, way):  # type: ignore[no-untyped-def]
    """A hit."""
    count = directory[s].count[way]
    directory[s].count[way] = count + np.uint8(count < TOP)
    directory[s].age[way] = 0


@compiled_lean
def _least_worth(directory, s):  # type: ignore[no-untyped-def]
    """Way of the lowest worth in a set: an empty one if there is one, the longest unasked among equals."""
    counts, ages = directory[s].count, directory[s].age
    least, count, age = 0, np.int64(counts[0]), np.int64(ages[0]) + PATIENCE
    for way in range(1, WAYS):
        other_count, other_age = np.int64(counts[way]), np.int64(ages[way]) + PATIENCE
        ahead = other_count * age - count * other_age        # compares the two quotients without dividing
        if ahead < 0 or (ahead == 0 and other_age > age):
            least, count, age = way, other_count, other_age
    return least


@compiled_lean
def _grow_older(directory, s):  # type: ignore[no-untyped-def]
    """One more miss for all entries of a set."""
    counts, ages = directory[s].count, directory[s].age
    for way in range(WAYS):
        if ages[way] < OLDEST:
            ages[way] += np.uint8(1)
        elif counts[way] > 1:
            counts[way] >>= np.uint8(1)
            ages[way] = OLDEST >> 1


@compiled_lean
def insert(directory, sketch, s, x, group, slot):  # type: ignore[no-untyped-def]
    """Give a bundle that missed its entry; the slot that was pushed out, or -1. The bundle must not be in the set already."""
    count = min(recall(sketch, s, mix(x, group)) + 1, TOP)
    way = _least_worth(directory, s)
    pushed_out = evict(directory, sketch, s, way)
    _grow_older(directory, s)
    write(directory, s, way, x, group, slot, count)
    return pushed_out


@compiled_lean
def evict(directory, sketch, s, way):  # type: ignore[no-untyped-def]
    """Take an entry out and remember its count; its slot, or -1 for a way that is empty already."""
    slot = np.int64(directory[s].slot[way])
    if directory[s].group[way] != EMPTY:
        remember(sketch, s, mix(directory[s].x[way], directory[s].group[way]), np.int64(directory[s].count[way]))
        remove(directory, s, way)
    return slot


@compiled_lean
def rank(directory, sketch, s, way):  # type: ignore[no-untyped-def]
    """An entry's worth as int64, comparable across sets: evict the smallest first. -1 for an empty way."""
    if directory[s].group[way] == EMPTY:
        return np.int64(-1)
    return np.int64(directory[s].count[way]) * RANK_ONE // (np.int64(directory[s].age[way]) + PATIENCE)


@compiled_lean
def frequency(directory, sketch, x, group):  # type: ignore[no-untyped-def]
    """Requests for a bundle as far as the cache remembers, int64 in 0..15, whether it is in the directory or not."""
    s = set_of(x, group, directory.shape[0])
    way = probe(directory, s, x, group)
    if way >= 0:
        return np.int64(directory[s].count[way])
    return count_of(sketch, s, mix(x, group))


@compiled_lean
def standing(directory, sketch, x, group):  # type: ignore[no-untyped-def]
    """The `rank` of a bundle's entry, -1 for a bundle without entry: by this the HBM tier chooses what it gives up."""
    s = set_of(x, group, directory.shape[0])
    way = probe(directory, s, x, group)
    if way < 0:
        return np.int64(-1)
    return rank(directory, sketch, s, way)
