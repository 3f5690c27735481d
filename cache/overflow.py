"""Slots without a directory entry: a hash table from (x, group) to slot, by open addressing.

A bundle that was pushed out of the directory while batches still use its slot lives here until its last batch is released,
so that a later batch finds it and a bundle never has two slots. Linear probing in a table at most half full; removal shifts
the followers back, so there are no tombstones and a lookup stays short for ever. Invariant: between an entry's home and its
place there is no empty cell. One thread writes; nothing is allocated after `init`.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import compiled_lean
from ssdgram.cache.directory import EMPTY, mix

CELL = np.dtype([("x", np.int64), ("slot", np.int32), ("group", np.uint8), ("spare", np.uint8, 3)])


def cells(entries: int) -> int:
    """Cells of a table for at most `entries` entries: a power of two, at least twice as many."""
    return max(2, 1 << (2 * entries - 1).bit_length())


@compiled_lean
def init(overflow):  # type: ignore[no-untyped-def]
    """Make the table (CELL [cells(entries)]) empty."""
    for cell in range(overflow.shape[0]):
        overflow[cell].group = EMPTY
        overflow[cell].slot = -1


@compiled_lean
def _home(overflow, x, group):  # type: ignore[no-untyped-def]
    return np.int64(mix(x, group) & np.uint64(overflow.shape[0] - 1))


@compiled_lean
def _cell(overflow, x, group):  # type: ignore[no-untyped-def]
    """Cell of the bundle, or the empty cell where it would go; -1 if it is absent and the table is full."""
    last = overflow.shape[0] - 1
    cell = _home(overflow, x, group)
    for _ in range(overflow.shape[0]):
        if overflow[cell].group == EMPTY or (overflow[cell].x == x and overflow[cell].group == group):
            return cell
        cell = (cell + 1) & last
    return -1


@compiled_lean
def find(overflow, x, group):  # type: ignore[no-untyped-def]
    """Slot of the bundle, or -1."""
    cell = _cell(overflow, x, group)
    if cell < 0 or overflow[cell].group == EMPTY:
        return -1
    return np.int64(overflow[cell].slot)


@compiled_lean
def insert(overflow, x, group, slot):  # type: ignore[no-untyped-def]
    """Remember the bundle's slot (replacing what was remembered); whether there was room."""
    cell = _cell(overflow, x, group)
    if cell < 0:
        return False
    overflow[cell].x = x
    overflow[cell].slot = slot
    overflow[cell].group = group
    return True


@compiled_lean
def remove(overflow, x, group):  # type: ignore[no-untyped-def]
    """Forget the bundle; its slot, or -1 if it was not there."""
    hole = _cell(overflow, x, group)
    if hole < 0 or overflow[hole].group == EMPTY:
        return -1
    slot = np.int64(overflow[hole].slot)
    last = overflow.shape[0] - 1
    cell = hole
    for _ in range(last):
        cell = (cell + 1) & last
        if overflow[cell].group == EMPTY:
            break
        home = _home(overflow, overflow[cell].x, overflow[cell].group)
        if ((cell - home) & last) >= ((cell - hole) & last):  # its way from home leads over the hole: it may fill it
            overflow[hole].x = overflow[cell].x
            overflow[hole].slot = overflow[cell].slot
            overflow[hole].group = overflow[cell].group
            hole = cell
    overflow[hole].group = EMPTY
    overflow[hole].slot = -1
    return slot


@compiled_lean
def size(overflow):  # type: ignore[no-untyped-def]
    """Number of entries. Walks the whole table: for tests and statistics."""
    count = 0
    for cell in range(overflow.shape[0]):
        count += overflow[cell].group != EMPTY
    return count
