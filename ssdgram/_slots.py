"""Slots: taken, found, counted, given back. Part of the planner's compiled loop; see the drawing in _plan_state.py.

Each function does one thing to one slot. The invariant they keep together: a live slot is found in exactly one place, is in
the free list only when nothing refers to it, and C_IDLE counts the READY ones of the directory that no batch uses, so that
"can a slot be had at all" is one comparison and never a search in vain. A search has an end: where few bundles are idle it says
LOOK_ON after some sets, and goes on from there when it is asked again.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import compiled_inner, compiled_lean
from ssdgram._plan_state import (C_FREE, C_GIVEN, C_HAND, C_HBM_FREE, C_IDLE, C_OVERFLOW, IN_DIRECTORY, IN_OVERFLOW, NOWHERE,
                                 NO_COPY, SLOT_FAILED, SLOT_FREE, SLOT_READY, SLOT_RESERVED, S_EVICTIONS, S_RECLAIMS)
from ssdgram.cache import directory as cache_directory
from ssdgram.cache import overflow as cache_overflow
from ssdgram.cache.directory import EMPTY, WAYS, probe, remove, set_of
from ssdgram.cache.policy import evict, insert, rank

overflow_find, overflow_insert, overflow_remove = cache_overflow.find, cache_overflow.insert, cache_overflow.remove
directory_init, overflow_init = cache_directory.init, cache_overflow.init

NO_SLOT, LOOK_ON = -1, -2                                    # instead of a slot: there is none; there is one further on
RECLAIM_SETS = 128                                           # sets looked at for one idle bundle: about 100 us


@compiled_lean
def free_all(control, slots):  # type: ignore[no-untyped-def]
    """Put every slot into the free list, lowest first out."""
    count = slots.shape[0]
    for slot in range(count):
        slots[slot].status = SLOT_FREE
        slots[slot].ticket = -1
        slots[slot].hbm = NO_COPY
        slots[slot].x = slot + 1 if slot + 1 < count else -1
    control[C_FREE] = 0 if count > 0 else -1
    control[C_FREE + 1] = count


@compiled_lean
def free_hbm_slots(control, hbm):  # type: ignore[no-untyped-def]
    """Put every slot of the HBM tier into its free list."""
    for h in range(hbm.shape[0]):
        hbm[h].owner = -1
        hbm[h].next = h + 1 if h + 1 < hbm.shape[0] else -1
    control[C_HBM_FREE] = 0 if hbm.shape[0] > 0 else -1


@compiled_inner
def drop_copy(control, slots, hbm, slot):  # type: ignore[no-untyped-def]
    """Give up the HBM copy of the slot's bundle, which no batch uses."""
    copy = slots[slot].hbm
    slots[slot].hbm = NO_COPY
    if copy >= 0:
        hbm[copy].owner = -1
        hbm[copy].next = control[C_HBM_FREE]
        control[C_HBM_FREE] = copy


@compiled_inner
def give_back(control, slots, hbm, slot):  # type: ignore[no-untyped-def]
    """Slot to the free list, and its copy's. Nothing refers to it any more."""
    drop_copy(control, slots, hbm, slot)
    slots[slot].status = SLOT_FREE
    slots[slot].where = NOWHERE
    slots[slot].ticket = -1
    slots[slot].x = control[C_FREE]
    control[C_FREE] = slot
    control[C_FREE + 1] += 1


@compiled_inner
def reclaim(control, stats, directory, sketch, slots, hbm):  # type: ignore[no-untyped-def]
    """Evict one bundle that no batch uses, the least useful one of the next set that has any: 0, NO_SLOT or LOOK_ON."""
    if control[C_IDLE] == 0:
        return NO_SLOT
    sets = directory.shape[0]
    for _ in range(RECLAIM_SETS):
        s = control[C_HAND] = control[C_HAND] + 1 if control[C_HAND] + 1 < sets else 0
        worst, least = -1, 0
        for way in range(WAYS):
            slot = directory[s].slot[way]
            if directory[s].group[way] != EMPTY and slots[slot].refs == 0 and slots[slot].status == SLOT_READY:
                value = rank(directory, sketch, s, way)
                if worst < 0 or value < least:
                    worst, least = way, value
        if worst >= 0:
            slot = evict(directory, sketch, s, worst)
            control[C_IDLE] -= 1
            stats[S_RECLAIMS] += 1
            give_back(control, slots, hbm, slot)
            return 0
    return LOOK_ON


@compiled_inner
def pushed_out(control, stats, slots, hbm, overflow, slot):  # type: ignore[no-untyped-def]
    """The policy took this slot's bundle out of the directory: free it, or keep it findable while it is in use."""
    stats[S_EVICTIONS] += 1
    if slots[slot].refs == 0:
        control[C_IDLE] -= 1
        give_back(control, slots, hbm, slot)
    else:
        overflow_insert(overflow, slots[slot].x, slots[slot].group, slot)
        slots[slot].where = IN_OVERFLOW
        control[C_OVERFLOW] += 1


@compiled_inner
def take(control, stats, directory, sketch, slots, hbm, overflow, s, x, group, priority):  # type: ignore[no-untyped-def]
    """A RESERVED slot for the bundle (x, group), which set `s` does not have, entered into the directory; or NO_SLOT, LOOK_ON."""
    if control[C_FREE + 1] == 0:
        found = reclaim(control, stats, directory, sketch, slots, hbm)
        if found < 0:
            return np.int64(found)
    slot = control[C_FREE]
    control[C_FREE] = slots[slot].x
    control[C_FREE + 1] -= 1
    slots[slot].x = x
    slots[slot].group = group
    slots[slot].ticket = -1
    slots[slot].refs = 0
    slots[slot].pending = 0
    slots[slot].status = SLOT_RESERVED
    slots[slot].failed = 0
    slots[slot].priority = priority
    slots[slot].where = IN_DIRECTORY
    out = insert(directory, sketch, s, x, group, slot)
    if out >= 0:
        pushed_out(control, stats, slots, hbm, overflow, out)
    return slot


@compiled_inner
def forget(control, directory, slots, overflow, slot):  # type: ignore[no-untyped-def]
    """Take the slot's bundle out of directory or overflow table, so that the next batch that wants it reads it anew."""
    if slots[slot].where == IN_DIRECTORY:
        s = set_of(slots[slot].x, slots[slot].group, directory.shape[0])
        way = probe(directory, s, slots[slot].x, slots[slot].group)
        if way >= 0:
            remove(directory, s, way)
    elif slots[slot].where == IN_OVERFLOW:
        overflow_remove(overflow, slots[slot].x, slots[slot].group)
        control[C_OVERFLOW] -= 1
    slots[slot].where = NOWHERE


@compiled_inner
def drop_reference(control, directory, slots, hbm, overflow, slot):  # type: ignore[no-untyped-def]
    """One user less. The last one leaves the bundle to the directory if that has it whole, else gives the slot back."""
    slots[slot].refs -= 1
    if slots[slot].refs > 0:
        return
    control[C_GIVEN] += 1
    if slots[slot].where == IN_DIRECTORY and slots[slot].status == SLOT_READY:
        control[C_IDLE] += 1
        return
    forget(control, directory, slots, overflow, slot)
    give_back(control, slots, hbm, slot)


@compiled_inner
def row_placed(control, directory, slots, hbm, overflow, slot):  # type: ignore[no-untyped-def]
    """One of the slot's rows is in place, or failed for good. The last one makes the bundle READY, or FAILED and forgotten."""
    slots[slot].pending -= 1
    if slots[slot].pending > 0:
        return
    if slots[slot].failed != 0:
        forget(control, directory, slots, overflow, slot)
        slots[slot].status = SLOT_FAILED
    else:
        slots[slot].status = SLOT_READY
    drop_reference(control, directory, slots, hbm, overflow, slot)
