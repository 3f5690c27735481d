"""Reads in flight: a reader's slots, what it puts into its ring, and what becomes of the completions.

    free ─occupy─► in the ring ─reap─► judged ─┬─ right, or out of tries ─vacate─► free, page in the done ring
                        ▲                      └─ the next try
                        └──────────────────────────┘

Slots 0 .. depth-1 of the reader's staging memory are linked in order of submission, oldest first. The invariant: a slot is
free, or in that list with exactly one read of it in the ring (pending, in the kernel, or completed and not yet reaped) or
held by the fault injector. All of it belongs to one reader; it does not know when to submit or to wait.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, atomic_add, atomic_load, atomic_store, compiled, now_ns
from ssdgram._state import BACKGROUND_IN_FLIGHT, FAULT_STALL, P_DEPTH, READ_OK
from ssdgram.queues._calls import OP_READ, OP_READ_FIXED, PAGE_BYTES, SQE_FIXED_FILE
from ssdgram.queues._faults import spoil
from ssdgram.queues._handoff import PORTION, pull_background, pull_step, push_done, wake_planner
from ssdgram.queues._lean import inlined
from ssdgram.queues._tries import again, is_last, judge

SQ_ENTRIES = 4 * PORTION                                     # a turn submits two portions and one wake at the most
WAKE = -1                                                    # user data of the eventfd's read; others are slots

# own: a reader's private int64 words. Set once:
(RING_FD, SQ_TAIL_AT, SQ_MASK, CQ_HEAD_AT, CQ_TAIL_AT, CQ_MASK, FIXED_FILES, FIXED_BUFFERS, EVENT_FD, STAGING, SPARE,
 # changing:
 SQ_TAIL, PENDING, CQ_HEAD, IN_FLIGHT, BACKGROUNDS, HELD, FREE, OLDEST, NEWEST, ARMED, PATIENT, AWAKE_NS,
 # read by the kernel: the eventfd's value, struct io_uring_getevents_arg (three words), its time-out (two words)
 EVENT, ARGUMENT, ARGUMENT_SIZE, ARGUMENT_TIME, TIME_S, TIME_NS, OWN_WORDS) = range(30)

SLOT = np.dtype([("page", np.int32), ("newer", np.int32), ("older", np.int32), ("background", np.int16), ("held", np.int16)],
                align=True)                                  # free slots are chained by `newer`


# ---------------------------------------------------------------- submissions


@inlined
@compiled
def submission(sqes, own):  # type: ignore[no-untyped-def]
    """First word of the next submission, all zero. The caller saw to it that there is room."""
    at = (own[SQ_TAIL] & own[SQ_MASK]) * 8
    for k in range(8):
        sqes[at + k] = 0
    own[SQ_TAIL] += 1
    own[PENDING] += 1
    return at


@inlined
@compiled
def submit_read(state, sqes, own, slots, slot):  # type: ignore[no-untyped-def]
    """Put the next try of the page in `slot` into the ring."""
    index = np.int64(slots[slot].page)
    file = np.int64(state.pages[index].file)
    last = is_last(state, index)
    at = submission(sqes, own)
    operation = OP_READ_FIXED if own[FIXED_BUFFERS] != 0 and not last else OP_READ
    if last:
        sqes[at] = operation | np.int64(state.files[file].buffered_fd) << 32
    elif own[FIXED_FILES] != 0:
        sqes[at] = operation | SQE_FIXED_FILE << 8 | file << 32
    else:
        sqes[at] = operation | np.int64(state.files[file].fd) << 32
    sqes[at + 1] = state.pages[index].number * PAGE_BYTES
    sqes[at + 2] = own[STAGING] + slot * PAGE_BYTES
    sqes[at + 3] = PAGE_BYTES
    sqes[at + 4] = slot


@inlined
@compiled
def arm(sqes, own):  # type: ignore[no-untyped-def]
    """Put a read of the eventfd into the ring, unless one is there; whether one is there now."""
    if own[ARMED] == 0 and own[PENDING] < SQ_ENTRIES:
        at = submission(sqes, own)
        sqes[at] = OP_READ | own[EVENT_FD] << 32
        sqes[at + 2] = address_of(own, EVENT)
        sqes[at + 3] = 8
        sqes[at + 4] = WAKE
        own[ARMED] = 1
    return own[ARMED] != 0


@inlined
@compiled
def occupy(state, own, slots, index, background, time_ns):  # type: ignore[no-untyped-def]
    """A free slot for page record `index`, linked as the newest."""
    slot = own[FREE]
    own[FREE] = slots[slot].newer
    slots[slot].page = index
    slots[slot].background = background
    slots[slot].held = 0
    slots[slot].newer = -1
    slots[slot].older = own[NEWEST]
    if own[NEWEST] >= 0:
        slots[own[NEWEST]].newer = slot
    else:
        own[OLDEST] = slot
    own[NEWEST] = slot
    own[IN_FLIGHT] += 1
    own[BACKGROUNDS] += background
    state.pages[index].tries = 0
    state.pages[index].submit_ns = time_ns
    return slot


@inlined
@compiled
def vacate(state, own, slots, slot):  # type: ignore[no-untyped-def]
    """Unlink `slot` and free it."""
    newer, older = np.int64(slots[slot].newer), np.int64(slots[slot].older)
    if newer >= 0:
        slots[newer].older = older
    else:
        own[NEWEST] = older
    if older >= 0:
        slots[older].newer = newer
    else:
        own[OLDEST] = newer
    slots[slot].newer = own[FREE]
    own[FREE] = slot
    own[IN_FLIGHT] -= 1
    if slots[slot].background != 0:
        own[BACKGROUNDS] -= 1
        atomic_add(state.control, BACKGROUND_IN_FLIGHT, -1)


@inlined
@compiled
def step_room(params, own):  # type: ignore[no-untyped-def]
    """Reads that this reader could still put into the drive."""
    return params[P_DEPTH] - own[IN_FLIGHT]


@inlined
@compiled
def background_room(params, own):  # type: ignore[no-untyped-def]
    """Of those, reads that may be background: a quarter of the depth is kept for steps."""
    depth = params[P_DEPTH]
    return min(depth - own[IN_FLIGHT], max(1, depth - depth // 4) - own[BACKGROUNDS])


@inlined
@compiled
def take_pages(state, sqes, own, slots, found):  # type: ignore[no-untyped-def]
    """Pull a portion of pages, steps first, and put their reads into the ring; how many."""
    params = state.params
    want = min(PORTION, min(step_room(params, own), SQ_ENTRIES - 1 - own[PENDING]))
    if want <= 0:
        return 0
    steps = pull_step(state, want, found)
    count = steps
    if count < want:
        count += pull_background(state, min(want - count, background_room(params, own)), found[steps:])
    if count > 0:
        time_ns = now_ns()
        for k in range(count):
            slot = occupy(state, own, slots, np.int64(found[k]), 0 if k < steps else 1, time_ns)
            submit_read(state, sqes, own, slots, slot)
    return count


# ---------------------------------------------------------------- completions


@inlined
@compiled
def completions(ring, own):  # type: ignore[no-untyped-def]
    """Completions that wait to be reaped."""
    return (np.int64(atomic_load(ring, own[CQ_TAIL_AT])) - own[CQ_HEAD]) & 0xFFFFFFFF


@inlined
@compiled
def conclude(state, reader, sqes, own, slots, slot, result):  # type: ignore[no-untyped-def]
    """Judge the read of `slot` that returned `result`: try again, or give the page back and free the slot."""
    index = np.int64(slots[slot].page)
    status = judge(state, index, result, own[STAGING] + slot * PAGE_BYTES)
    if status != READ_OK and again(state, reader, index):
        submit_read(state, sqes, own, slots, slot)
        return
    vacate(state, own, slots, slot)
    push_done(state, reader, index, status)


@inlined
@compiled
def reap(state, reader, ring, sqes, cqes, own, slots):  # type: ignore[no-untyped-def]
    """Handle at most a portion of completions, each of which may need a submission; how many."""
    count = min(completions(ring, own), min(PORTION, SQ_ENTRIES - 1 - own[PENDING]))
    for _ in range(count):
        at = (own[CQ_HEAD] & own[CQ_MASK]) * 2
        slot, result = cqes[at], np.int64(np.int32(cqes[at + 1] & 0xFFFFFFFF))
        own[CQ_HEAD] += 1
        if slot == WAKE:
            own[ARMED] = 0
            continue
        result = spoil(state, np.int64(slots[slot].page), result, own[STAGING] + slot * PAGE_BYTES)
        if result == FAULT_STALL:
            slots[slot].held = 1
            own[HELD] += 1
        else:
            conclude(state, reader, sqes, own, slots, slot, result)
    if count > 0:
        atomic_store(ring, own[CQ_HEAD_AT], np.int32(own[CQ_HEAD]))
        own[PATIENT] = 1
        wake_planner(state)
    return count


@inlined
@compiled
def release_held(state, reader, sqes, own, slots):  # type: ignore[no-untyped-def]
    """Conclude the reads that the fault injector no longer holds."""
    slot = own[OLDEST]
    while slot >= 0 and own[PENDING] < SQ_ENTRIES - 1:
        newer = np.int64(slots[slot].newer)
        if slots[slot].held != 0:
            slots[slot].held = 0
            own[HELD] -= 1
            conclude(state, reader, sqes, own, slots, slot, np.int64(PAGE_BYTES))
        slot = newer
    wake_planner(state)
