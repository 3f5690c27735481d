"""Page reads: from the bundles that a batch misses to page records, each page once, and back to the slots.

    expand   bundle ─► heads x (file, page, row): a record being built for that page gets one more target, or a new one is made
    push     the records built so far ─► the ring of their class
    settle   a record that a reader is done with ─► its targets' slots, then both are free again

A record can be merged into only while it is being built, that is before a reader can see it. Every record is in a chain of
`buckets` from its making to its settling. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import atomic_exchange, atomic_load, atomic_store, compiled_inner, compiled_lean
from ssdgram._plan_state import (C_BUILDING, C_ISSUED, C_PAGES, PP_BUCKETS, PP_STEP_PAGES, SLOT_READING, S_FAILED_ROWS, S_MERGED,
                                 S_PROMOTED, S_READS)
from ssdgram._slots import row_placed
from ssdgram._state import (BACKGROUND, BACKGROUND_HEAD, BACKGROUND_TAIL, P_RING_CAPACITY, P_ROWS_PER_PAGE, READ_CHECK, READ_OK,
                            READ_PENDING, STEP, STEP_HEAD, STEP_TAIL)

FREE_PAGE, FREE_PAGES, FREE_TARGET, FREE_TARGETS, BACKGROUND_PAGES = (C_PAGES + k for k in range(5))
BUILT = 0                                                    # PAGE.spare: being built
PUSHED = 1


@compiled_lean
def free_all(control, pages, targets, buckets):  # type: ignore[no-untyped-def]
    """Every record and target free, every chain empty."""
    for i in range(pages.shape[0]):
        pages[i].next = i + 1 if i + 1 < pages.shape[0] else -1
    for i in range(targets.shape[0]):
        targets[i].next = i + 1 if i + 1 < targets.shape[0] else -1
    buckets[:] = -1
    control[FREE_PAGE], control[FREE_PAGES] = 0, pages.shape[0]
    control[FREE_TARGET], control[FREE_TARGETS] = 0, targets.shape[0]
    control[BACKGROUND_PAGES] = 0


@compiled_inner
def bucket_of(file, number, buckets):  # type: ignore[no-untyped-def]
    """Chain of (file, page): a multiplicative hash, `buckets` a power of two."""
    h = (np.uint64(number) * np.uint64(64) + np.uint64(file)) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((h >> np.uint64(32)) & np.uint64(buckets - 1))


@compiled_inner
def want_row(plan, state, file, row, slot, ticket, priority):  # type: ignore[no-untyped-def]
    """Add (file, row) -> slot to the page reads. There is a free record and a free target. Pages added: 0 or 1."""
    control, pages, targets = plan.control, state.pages, state.targets
    rows_per_page = state.params[P_ROWS_PER_PAGE]
    number = row // rows_per_page
    target = control[FREE_TARGET]
    control[FREE_TARGET] = targets[target].next
    control[FREE_TARGETS] -= 1
    targets[target].slot = slot
    targets[target].place = row - number * rows_per_page
    targets[target].bad = 0
    bucket = bucket_of(file, number, plan.params[PP_BUCKETS])
    page = plan.buckets[bucket]
    while page >= 0:
        if (pages[page].number == number and pages[page].file == file and pages[page].ticket == ticket
                and pages[page].spare == BUILT):
            targets[target].next = pages[page].target
            pages[page].target = target
            plan.stats[S_MERGED] += 1
            return 0
        page = pages[page].next
    page = control[FREE_PAGE]
    control[FREE_PAGE] = pages[page].next
    control[FREE_PAGES] -= 1
    control[BACKGROUND_PAGES] += priority == BACKGROUND
    targets[target].next = -1
    pages[page].number = number
    pages[page].file = file
    pages[page].target = target
    pages[page].status = READ_PENDING
    pages[page].tries = 0
    pages[page].priority = priority
    pages[page].ticket = ticket
    pages[page].spare = BUILT
    pages[page].next = plan.buckets[bucket]
    plan.buckets[bucket] = page
    plan.building[priority * pages.shape[0] + control[C_BUILDING + priority]] = page
    control[C_BUILDING + priority] += 1
    plan.stats[S_READS] += 1
    return 1


@compiled_inner
def expand_bundle(plan, state, slot, ticket, priority):  # type: ignore[no-untyped-def]
    """Make the page reads of a RESERVED bundle; it is READING after. Pages added, -1: too few free records (nothing changed)."""
    slots, files = plan.slots, state.files
    group = plan.groups[plan.group_index[slots[slot].group]]
    heads = group.heads
    if plan.control[FREE_PAGES] < heads or plan.control[FREE_TARGETS] < heads:
        return -1
    if priority == BACKGROUND and plan.control[BACKGROUND_PAGES] + heads > state.pages.shape[0] - plan.params[PP_STEP_PAGES]:
        return -1                                            # the rest is kept for steps
    slots[slot].status = SLOT_READING
    slots[slot].priority = priority
    slots[slot].pending = heads
    slots[slot].refs += 1
    pages = 0
    for k in range(heads):
        file = group.file + k
        pages += want_row(plan, state, file, slots[slot].x % files[file].rows, slot, ticket, priority)
    return pages


@compiled_inner
def push_pages(plan, state, priority, most):  # type: ignore[no-untyped-def]
    """Push up to `most` of the records built for a class, in the order of their making. How many."""
    control, pages = plan.control, state.pages
    building, issued = C_BUILDING + priority, C_ISSUED + priority
    pushed = 0
    while control[issued] < control[building] and pushed < most:
        page = plan.building[priority * pages.shape[0] + control[issued]]
        if not push_page(state, page):
            break
        control[issued] += 1
        pushed += 1
    if control[issued] == control[building]:
        control[issued] = control[building] = 0
    return pushed


@compiled_inner
def ring_has_room(state, priority):  # type: ignore[no-untyped-def]
    """Whether the ring of a class takes one more entry."""
    if priority == STEP:
        used = state.control[STEP_TAIL] - atomic_load(state.control, STEP_HEAD)
    else:
        used = state.control[BACKGROUND_TAIL] - atomic_load(state.control, BACKGROUND_HEAD)
    return used < state.params[P_RING_CAPACITY]


@compiled_inner
def push_page(state, page):  # type: ignore[no-untyped-def]
    """Push one record into the ring of its class; False if that is full of entries that nobody has looked at yet."""
    priority = state.pages[page].priority
    if not ring_has_room(state, priority):
        return False
    mask = state.params[P_RING_CAPACITY] - 1
    state.pages[page].spare = PUSHED
    atomic_store(state.claims, page, np.int32(0))
    if priority == STEP:
        tail = state.control[STEP_TAIL]
        state.step_ring[tail & mask] = page
        atomic_store(state.control, STEP_TAIL, tail + 1)
    else:
        tail = state.control[BACKGROUND_TAIL]
        state.background_ring[tail & mask] = page
        atomic_store(state.control, BACKGROUND_TAIL, tail + 1)
    return True


@compiled_inner
def promote_page(plan, state, page):  # type: ignore[no-untyped-def]
    """Move a background record that no reader has taken yet to the step class. Whether it could be.

    The entry in the background ring stays; whichever entry is pulled first claims the record, the other is skipped.
    """
    pages = state.pages
    if pages[page].priority != BACKGROUND or not ring_has_room(state, STEP):
        return False
    if pages[page].spare == PUSHED and atomic_exchange(state.claims, page, np.int32(1)) != 0:
        return False                                         # in the drive, or done
    pages[page].priority = STEP
    plan.control[BACKGROUND_PAGES] -= 1
    if pages[page].spare == PUSHED:
        push_page(state, page)
    return True


@compiled_inner
def promote(plan, state, slot):  # type: ignore[no-untyped-def]
    """A step batch joins a bundle whose background reads may still be queued: let them go first. Records moved."""
    slots, files = plan.slots, state.files
    slots[slot].priority = STEP
    group = plan.groups[plan.group_index[slots[slot].group]]
    moved = 0
    for k in range(group.heads):
        file = group.file + k
        number = slots[slot].x % files[file].rows // state.params[P_ROWS_PER_PAGE]
        page = plan.buckets[bucket_of(file, number, plan.params[PP_BUCKETS])]
        while page >= 0:
            if state.pages[page].number == number and state.pages[page].file == file:
                moved += promote_page(plan, state, page)
            page = state.pages[page].next
    plan.stats[S_PROMOTED] += moved
    return moved


@compiled_inner
def settle_page(plan, state, page):  # type: ignore[no-untyped-def]
    """A reader is done with the record: tell the slots of its targets, then free it and them."""
    control, pages, targets, slots = plan.control, state.pages, state.targets, plan.slots
    status = pages[page].status
    target = pages[page].target
    while target >= 0:
        slot = targets[target].slot
        if status != READ_OK and (status != READ_CHECK or targets[target].bad != 0):
            slots[slot].failed = 1
            plan.failures[slot].status = status
            plan.failures[slot].file = pages[page].file
            plan.stats[S_FAILED_ROWS] += 1
        row_placed(control, plan.directory, slots, plan.hbm, plan.overflow, slot)
        following = targets[target].next
        targets[target].next = control[FREE_TARGET]
        control[FREE_TARGET] = target
        control[FREE_TARGETS] += 1
        target = following
    bucket = bucket_of(pages[page].file, pages[page].number, plan.params[PP_BUCKETS])
    before = plan.buckets[bucket]
    if before == page:
        plan.buckets[bucket] = pages[page].next
    else:
        while pages[before].next != page:
            before = pages[before].next
        pages[before].next = pages[page].next
    control[BACKGROUND_PAGES] -= pages[page].priority == BACKGROUND
    pages[page].next = control[FREE_PAGE]
    control[FREE_PAGE] = page
    control[FREE_PAGES] += 1
