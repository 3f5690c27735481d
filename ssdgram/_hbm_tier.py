"""The HBM tier: which bundles get a copy there, and when a copy counts.

    hit often enough ─► wanted ─► a slot of the tier, from a bundle that is less hot ─► list of copies ─► copier ─► GPU's word ─► ready

One list of copies at a time: the planner fills it, any thread with a GPU launches it (see _cuda.py), the GPU stores a word behind
it. Knows no GPU. The invariant: a bundle keeps its slot from being wanted until its copy is made or given up, and no plan
names a copy before `ready` says that it was made. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import atomic_add, atomic_load, atomic_store, compiled_inner, futex_wake
from ssdgram._plan_state import (COPIES, C_COPIES, C_COPYING, C_COPY_REQUESTED, C_HBM_FREE, C_HBM_HAND, C_QUEUES, C_WANTED, NO_COPY,
                                 PP_BATCH_LINE, PP_HOT, S_COPIED, S_DROPPED, S_HBM_HITS, WANTS_COPY, W_STARVED)
from ssdgram._slots import drop_copy, drop_reference
from ssdgram._state import COPIER_WORD
from ssdgram.cache.policy import frequency, standing

HBM_PROBES = 16                                              # slots of the HBM tier looked at for one that may be dropped


@compiled_inner
def want_copy(plan, slot):  # type: ignore[no-untyped-def]
    """Note a bundle that a batch holds as wanted in HBM. There is room in the list, and it has no copy."""
    plan.slots[slot].hbm = WANTS_COPY
    plan.slots[slot].refs += 1                               # until the copy is made or given up
    plan.wants[plan.control[C_WANTED]] = slot
    plan.control[C_WANTED] += 1


@compiled_inner
def consider_copy(plan, slot, order):  # type: ignore[no-untyped-def]
    """A hit of a store with an HBM tier: count it there, or note the bundle as wanted there if it is hot enough."""
    control, slots = plan.control, plan.slots
    if slots[slot].hbm >= 0:
        plan.stats[S_HBM_HITS + order] += 1
    elif slots[slot].hbm == NO_COPY and control[C_WANTED] < COPIES and control[C_COPYING] == 0:
        if frequency(plan.directory, plan.sketch, slots[slot].x, slots[slot].group) >= plan.params[PP_HOT]:
            want_copy(plan, slot)


@compiled_inner
def hbm_slot_for(plan, slot):  # type: ignore[no-untyped-def]
    """A slot of the HBM tier for a hot bundle: a free one, or that of a bundle that is less hot and that no batch uses; -1."""
    control, hbm, slots = plan.control, plan.hbm, plan.slots
    if control[C_HBM_FREE] < 0:
        worth = standing(plan.directory, plan.sketch, slots[slot].x, slots[slot].group)
        for _ in range(HBM_PROBES):
            control[C_HBM_HAND] = control[C_HBM_HAND] + 1 if control[C_HBM_HAND] + 1 < hbm.shape[0] else 0
            owner = hbm[control[C_HBM_HAND]].owner
            if slots[owner].refs == 0 and standing(plan.directory, plan.sketch, slots[owner].x, slots[owner].group) < worth:
                drop_copy(control, slots, hbm, owner)
                plan.stats[S_DROPPED] += 1
                break
    copy = control[C_HBM_FREE]
    if copy >= 0:
        control[C_HBM_FREE] = hbm[copy].next
    return copy


@compiled_inner
def request_copies(plan):  # type: ignore[no-untyped-def]
    """Turn the wanted bundles into a list of copies and hand it to the copier. How many."""
    control, slots, hbm = plan.control, plan.slots, plan.hbm
    count = 0
    for k in range(control[C_WANTED]):
        slot = np.int64(plan.wants[k])
        copy = hbm_slot_for(plan, slot)
        if copy < 0:
            slots[slot].hbm = NO_COPY
            drop_reference(control, plan.directory, slots, hbm, plan.overflow, slot)
            continue
        hbm[copy].owner = slot
        hbm[copy].ready = 0
        slots[slot].hbm = copy
        plan.copies[2 * count] = slot
        plan.copies[2 * count + 1] = copy
        count += 1
    control[C_WANTED] = 0
    control[C_COPIES] = count
    if count > 0:
        control[C_COPYING] = 1
        atomic_store(plan.control, C_COPY_REQUESTED, control[C_COPY_REQUESTED] + 1)
    return count


@compiled_inner
def finish_copies(plan):  # type: ignore[no-untyped-def]
    """The GPU made the copies: publish them."""
    control, slots, hbm = plan.control, plan.slots, plan.hbm
    for k in range(control[C_COPIES]):
        hbm[plan.copies[2 * k + 1]].ready = 1
        drop_reference(control, plan.directory, slots, hbm, plan.overflow, np.int64(plan.copies[2 * k]))
    plan.stats[S_COPIED] += control[C_COPIES]
    control[C_COPIES] = control[C_COPYING] = 0


@compiled_inner
def tend_hbm(plan, state):  # type: ignore[no-untyped-def]
    """Publish copies that are made, ask for those that are wanted. (slices of work, 1 if the GPU is awaited)."""
    control = plan.control
    if control[C_COPYING] != 0:
        if atomic_load(plan.copy_word, 0) < control[C_COPY_REQUESTED]:
            return 0, 1
        finish_copies(plan)
        return 1, 0
    step = control[C_QUEUES]
    if control[C_WANTED] > 0 and (step < 0 or plan.words[step * plan.params[PP_BATCH_LINE] + W_STARVED] != 0):
        if request_copies(plan) > 0:
            atomic_add(state.words, COPIER_WORD, np.int32(1))
            futex_wake(state.words, COPIER_WORD, 1)
        return 1, 0
    return 0, 0
