"""Queue `uring`: each reader owns one io_uring and lives in one compiled loop that never takes the GIL.

    turn:  reap ≤ 32 completions ─► judge, deliver ─► done ring (or the next try)
           pull ≤ 32 pages: steps first, then background within its budget ─► submissions
           one io_uring_enter: submit, and wait if there is nothing else to do

A wait asks for several completions while many reads are out (an eighth of them), so a deep queue costs few wake-ups, and
for one as soon as that takes a millisecond. A reader that has room announces itself asleep before it waits for one, and
keeps a read of its eventfd in the ring: a push ends the wait. Idle, it spins for P_SPIN_NS, then waits like that for ever;
with reads in the drive for 100 ms at the most, so that STOP is seen whatever the drive does.

Slots 0 .. depth-1 of the reader's staging memory are linked in order of submission, oldest first (R_OLDEST_NS). The
invariant: a slot is free, or in that list with exactly one read of it in the ring or held by the fault injector.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np

from ssdgram._compiled import (address_of, atomic_add, atomic_load, atomic_store, compile_for, compiled, fence, now_ns,
                               syscall)
from ssdgram._state import (BACKGROUND_IN_FLIGHT, FAULT_STALL, P_DEPTH, P_READERS, P_SPIN_NS, R_ASLEEP, R_BUSY_NS, R_ENTERS,
                            R_IN_FLIGHT, R_OLDEST_NS, R_STATE, R_WAKE_FD, READ_OK, READER_LINES, READER_WORDS, STOP, State,
                            reader_line)
from ssdgram.queues._calls import (EAGAIN, EBUSY, EINTR, ENOMEM, ENTER_EXT_ARG, ENTER_GETEVENTS, ETIME, OP_READ,
                                   OP_READ_FIXED, PAGE_BYTES, SQE_FIXED_FILE, SYS_IO_URING_ENTER)
from ssdgram.queues._faults import spoil, stalled
from ssdgram.queues._handoff import (PORTION, R_ROOM, READER_PLAIN, READER_RETURNED, READER_STUCK, pull_background, pull_step,
                                     push_done, wake_planner, wake_readers, work_waits)
from ssdgram.queues._lean import borrowed, inlined
from ssdgram.queues._plain import plain_loop, serve_page
from ssdgram.queues._readers import Readers
from ssdgram.queues._ring import Ring
from ssdgram.queues._tries import STOP_GRACE_NS, again, is_last, judge, pause

log = logging.getLogger("ssdgram")

SQ_ENTRIES = 4 * PORTION                                     # a turn submits two portions and one wake at the most
WAKE = -1                                                    # user data of the eventfd's read; others are slots
MANY = 16                                                    # reads out from which a wait asks for an eighth of them

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


# ---------------------------------------------------------------- the loop


@inlined
@compiled
def publish(state, reader, own, slots):  # type: ignore[no-untyped-def]
    """Show others what this reader has in the drive."""
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    oldest = np.int64(0)
    if own[OLDEST] >= 0:
        oldest = state.pages[slots[own[OLDEST]].page].submit_ns
    atomic_store(control, line + R_OLDEST_NS, oldest)
    atomic_store(control, line + R_IN_FLIGHT, own[IN_FLIGHT])
    atomic_store(control, line + R_ROOM, step_room(state.params, own))


@inlined
@compiled
def enter(state, reader, ring, own, least, timeout_ns):  # type: ignore[no-untyped-def]
    """Submit what is pending and wait for `least` completions, at most `timeout_ns` (< 0: for ever). 0 or minus errno."""
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    atomic_store(ring, own[SQ_TAIL_AT], np.int32(own[SQ_TAIL]))
    own[TIME_S], own[TIME_NS] = timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000
    own[ARGUMENT_TIME] = address_of(own, TIME_S) if timeout_ns >= 0 else 0
    if least > 0:
        before = now_ns()
        atomic_store(control, line + R_BUSY_NS, control[line + R_BUSY_NS] + before - own[AWAKE_NS])
    result = syscall(SYS_IO_URING_ENTER, own[RING_FD], own[PENDING], least, ENTER_GETEVENTS | ENTER_EXT_ARG,
                     address_of(own, ARGUMENT), 24)
    if least > 0:
        own[AWAKE_NS] = now_ns()
    atomic_store(control, line + R_ENTERS, control[line + R_ENTERS] + 1)
    if result >= 0:
        own[PENDING] -= result
        return np.int64(0)
    if result == -ETIME or result == -EINTR:
        own[PATIENT] = 0
        return np.int64(0)
    if result == -EAGAIN or result == -EBUSY or result == -ENOMEM:
        pause(state, reader, 100_000)                        # the kernel is short of memory: not for long
        return np.int64(0)
    return result


@inlined
@compiled
def wait(state, reader, ring, sqes, own, stopping):  # type: ignore[no-untyped-def]
    """Enter the ring with nothing else to do: wait for completions or, announced as asleep, for a push. 0 or minus errno."""
    control, params = state.control, state.params
    asleep = READER_LINES + reader * READER_WORDS + R_ASLEEP
    out = own[IN_FLIGHT] - own[HELD]
    room = step_room(params, own)
    least, timeout_ns = np.int64(1), np.int64(-1)
    if own[HELD] > 0:
        timeout_ns = 2_000_000
    elif out > 0:
        timeout_ns = 100_000_000
    if own[PATIENT] != 0 and out >= MANY:
        least = min(out // 8, 8 if room > 0 else PORTION)
        timeout_ns = 1_000_000
    announced = room > 0 and least == 1 and not stopping
    if announced:
        if not arm(sqes, own):
            timeout_ns = 1_000_000
        atomic_store(control, asleep, 1)
        fence()
        if atomic_load(control, STOP) != 0 or work_waits(state, room, background_room(params, own)):
            atomic_store(control, asleep, 0)
            return np.int64(0)
    result = enter(state, reader, ring, own, least, timeout_ns)
    if announced:
        atomic_store(control, asleep, 0)
    return result


@inlined
@compiled
def turn_end(state, reader, ring, sqes, own, stopping, idle_ns):  # type: ignore[no-untyped-def]
    """Submit, and wait if there is nothing else to do. idle_ns: since when this reader is idle, 0 if not. 0 or minus errno."""
    params = state.params
    busy = completions(ring, own) > 0
    if not stopping and not busy:
        busy = work_waits(state, step_room(params, own), background_room(params, own))
    if busy or (idle_ns > 0 and now_ns() - idle_ns < params[P_SPIN_NS]):
        return enter(state, reader, ring, own, 0, -1) if own[PENDING] > 0 else np.int64(0)
    return wait(state, reader, ring, sqes, own, stopping)


@compiled
def ring_loop(state, reader, ring, sqes, cqes, own, slots):  # type: ignore[no-untyped-def]
    """The whole life of one reader: serve pages until STOP, then wait a bounded time for the drive. 0 or minus errno.

    A negative result says that the ring failed; reads may be left in it (`abandon_ring` goes on from there).
    """
    state = borrowed(state)
    ring, sqes, cqes, own, slots = borrowed(ring), borrowed(sqes), borrowed(cqes), borrowed(own), borrowed(slots)
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    found = np.empty(PORTION, np.int32)
    idle_ns, stop_ns = np.int64(0), np.int64(0)
    own[AWAKE_NS] = now_ns()
    while True:
        done = reap(state, reader, ring, sqes, cqes, own, slots)
        if own[HELD] > 0 and not stalled(state):
            release_held(state, reader, sqes, own, slots)
        stopping = atomic_load(control, STOP) != 0
        if stopping:
            stop_ns = now_ns() if stop_ns == 0 else stop_ns
            if own[IN_FLIGHT] == 0 or now_ns() - stop_ns > STOP_GRACE_NS:
                break
        taken = 0 if stopping else take_pages(state, sqes, own, slots, found)
        publish(state, reader, own, slots)
        if taken > 0 and state.params[P_READERS] > 1:
            wake_readers(state)                              # those whom the planner left to us
        if own[IN_FLIGHT] > 0 or done + taken > 0:
            idle_ns = 0
        elif idle_ns == 0:
            idle_ns = now_ns()
        result = turn_end(state, reader, ring, sqes, own, stopping, idle_ns)
        if result < 0:
            return result
    publish(state, reader, own, slots)
    atomic_store(control, line + R_STATE, READER_RETURNED if own[IN_FLIGHT] == 0 else READER_STUCK)
    return np.int64(0)


@inlined
@compiled
def in_kernel(sqes, own):  # type: ignore[no-untyped-def]
    """Reads that were submitted and not reaped."""
    count = own[IN_FLIGHT] - own[HELD]
    for k in range(own[SQ_TAIL] - own[PENDING], own[SQ_TAIL]):
        count -= sqes[(k & own[SQ_MASK]) * 8 + 4] != WAKE
    return count


@compiled
def abandon_ring(state, reader, sqes, own, slots):  # type: ignore[no-untyped-def]
    """Go on without the ring: read what it left by preads into the spare page, then serve pages like that until STOP."""
    state, sqes, own, slots = borrowed(state), borrowed(sqes), borrowed(own), borrowed(slots)
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    atomic_store(control, line + R_STATE, READER_PLAIN)
    atomic_store(control, line + R_WAKE_FD, -1)
    left = in_kernel(sqes, own)
    slot = own[OLDEST]
    while slot >= 0:
        state.pages[slots[slot].page].tries = 0
        if not serve_page(state, reader, np.int64(slots[slot].page), own[SPARE], slots[slot].background != 0):
            break
        slot = np.int64(slots[slot].newer)
    atomic_store(control, line + R_IN_FLIGHT, 0)
    plain_loop(state, reader, own[SPARE])
    if left > 0:                                             # the kernel may yet write to the staging slots
        atomic_store(control, line + R_STATE, READER_STUCK)


class UringQueue(Readers):
    """One ring per reader of `state`. Raises OSError if a ring cannot be made."""

    name = "uring"

    def __init__(self, state: State, reason: str, affinity: Sequence[int] | None = None) -> None:
        super().__init__(state, reason, affinity)
        self._rings: list[Ring] = []
        self._own: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []
        self._spares: list[np.ndarray] = []
        notices: set[str] = set()
        try:
            for reader in range(self.readers):
                notices.update(self._set_up(reader))
        except OSError:
            self.close()
            raise
        self.notices = tuple(sorted(notices))
        self.compile()

    def _set_up(self, reader: int) -> set[str]:
        """Make ring, private words and slots of one reader; what had to be done without."""
        state, notices = self.state, set()
        depth = int(state.params[P_DEPTH])
        ring = Ring(SQ_ENTRIES, max(2 * SQ_ENTRIES, 1 << (depth + 1).bit_length()))
        self._rings.append(ring)
        own, slots = np.zeros(OWN_WORDS, np.int64), np.zeros(depth, SLOT)
        self._own.append(own)
        self._slots.append(slots)
        slots["newer"] = np.append(np.arange(1, depth), -1)
        memory = np.zeros(2 * PAGE_BYTES, np.uint8)
        self._spares.append(memory)
        own[SPARE] = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        own[STAGING] = state.staging.ctypes.data + reader * depth * PAGE_BYTES
        own[RING_FD], own[EVENT_FD] = ring.fd, os.eventfd(0, os.EFD_CLOEXEC)
        own[SQ_TAIL_AT], own[CQ_HEAD_AT], own[CQ_TAIL_AT] = ring.sq_tail_at, ring.cq_head_at, ring.cq_tail_at
        own[SQ_MASK], own[CQ_MASK] = ring.sq_entries - 1, ring.cq_entries - 1
        own[OLDEST] = own[NEWEST] = -1
        own[PATIENT] = 1
        own[ARGUMENT_SIZE] = 8                               # size of a signal set; none is given
        state.control[reader_line(reader) + R_WAKE_FD] = own[EVENT_FD]
        state.control[reader_line(reader) + R_ROOM] = depth
        try:
            ring.register_files(np.ascontiguousarray(state.files["fd"]))
            own[FIXED_FILES] = 1
        except OSError as error:
            notices.add(f"files are not registered with io_uring ({error.strerror}): raise the limit of open files (ulimit -n)")
        try:
            ring.register_buffer(int(own[STAGING]), depth * PAGE_BYTES)
            own[FIXED_BUFFERS] = 1
        except OSError as error:
            notices.add(f"staging memory is not registered with io_uring ({error.strerror}): raise the limit of locked memory "
                        f"to {depth * PAGE_BYTES * self.readers >> 10} KiB or more (ulimit -l)")
        return notices

    def _arguments(self, reader: int) -> tuple[object, ...]:
        ring = self._rings[reader]
        return (self.state, reader, ring.words, ring.sqes, ring.cqes, self._own[reader], self._slots[reader])

    def compile(self) -> None:
        """Load the loops from the cache of compiled code, or compile them."""
        compile_for(ring_loop, *self._arguments(0))
        compile_for(abandon_ring, self.state, 0, self._rings[0].sqes, self._own[0], self._slots[0])

    def prepare(self, reader: int) -> None:
        """Make this thread the ring's issuer."""
        self._rings[reader].enable()

    def serve(self, reader: int) -> None:
        """Enter the compiled loop; if the ring fails later, go on by preads."""
        result = int(ring_loop(*self._arguments(reader)))
        if result < 0:
            log.warning("queue uring: reader %d lost its ring (%s) and goes on with preads", reader, os.strerror(-result))
            abandon_ring(self.state, reader, self._rings[reader].sqes, self._own[reader], self._slots[reader])

    @property
    def flag_names(self) -> str:
        """Set-up flags in effect."""
        return self._rings[0].flag_names

    def close(self) -> None:
        """Unmap and close the rings. Does nothing while a reader still runs. Idempotent."""
        if any(thread.is_alive() for thread in self._threads):
            return
        for ring, own in zip(self._rings, self._own, strict=False):
            if ring.fd >= 0:
                ring.close()
                os.close(int(own[EVENT_FD]))
