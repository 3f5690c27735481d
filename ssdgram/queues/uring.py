"""Queue `uring`: each reader owns one io_uring and lives in one compiled loop that never takes the GIL.

    turn:  reap ≤ 32 completions ─► judge, deliver ─► done ring (or the next try)
           pull ≤ 32 pages: steps first, then background within its budget ─► submissions
           one io_uring_enter: submit, and wait if there is nothing else to do

A wait asks for several completions while many reads are out (an eighth of them), so a deep queue costs few wake-ups, and
for one as soon as that takes a millisecond. A reader that has room announces itself asleep before it waits for one, and
keeps a read of its eventfd in the ring: a push ends the wait. Idle, it spins for P_SPIN_NS, then waits like that for ever;
with reads in the drive for 100 ms at the most, so that STOP is seen whatever the drive does. What is in flight is `_flight`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

import numpy as np

from ssdgram._compiled import address_of, atomic_load, atomic_store, compile_for, compiled, fence, now_ns, syscall
from ssdgram._state import (P_DEPTH, P_READERS, P_SPIN_NS, R_ASLEEP, R_BUSY_NS, R_ENTERS, R_IN_FLIGHT, R_OLDEST_NS, R_STATE,
                            R_WAKE_FD, READER_LINES, READER_WORDS, STOP, State, reader_line)
from ssdgram.queues import _flight as flight
from ssdgram.queues._calls import (EAGAIN, EBUSY, EINTR, ENOMEM, ENTER_EXT_ARG, ENTER_GETEVENTS, ETIME, PAGE_BYTES,
                                   SYS_IO_URING_ENTER)
from ssdgram.queues._faults import stalled
from ssdgram.queues._handoff import PORTION, R_ROOM, READER_PLAIN, READER_RETURNED, READER_STUCK, wake_readers, work_waits
from ssdgram.queues._lean import borrowed, inlined
from ssdgram.queues._plain import plain_loop, serve_page
from ssdgram.queues._readers import Readers
from ssdgram.queues._ring import Ring
from ssdgram.queues._tries import STOP_GRACE_NS, pause

log = logging.getLogger("ssdgram")

MANY = 16                                                    # reads out from which a wait asks for an eighth of them

# ---------------------------------------------------------------- the loop


@inlined
@compiled
def publish(state, reader, own, slots):  # type: ignore[no-untyped-def]
    """Show others what this reader has in the drive."""
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    oldest = np.int64(0)
    if own[flight.OLDEST] >= 0:
        oldest = state.pages[slots[own[flight.OLDEST]].page].submit_ns
    atomic_store(control, line + R_OLDEST_NS, oldest)
    atomic_store(control, line + R_IN_FLIGHT, own[flight.IN_FLIGHT])
    atomic_store(control, line + R_ROOM, flight.step_room(state.params, own))


@inlined
@compiled
def enter(state, reader, ring, own, least, timeout_ns):  # type: ignore[no-untyped-def]
    """Submit what is pending and wait for `least` completions, at most `timeout_ns` (< 0: for ever). 0 or minus errno."""
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    atomic_store(ring, own[flight.SQ_TAIL_AT], np.int32(own[flight.SQ_TAIL]))
    own[flight.TIME_S], own[flight.TIME_NS] = timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000
    own[flight.ARGUMENT_TIME] = address_of(own, flight.TIME_S) if timeout_ns >= 0 else 0
    if least > 0:
        before = now_ns()
        atomic_store(control, line + R_BUSY_NS, control[line + R_BUSY_NS] + before - own[flight.AWAKE_NS])
    result = syscall(SYS_IO_URING_ENTER, own[flight.RING_FD], own[flight.PENDING], least, ENTER_GETEVENTS | ENTER_EXT_ARG,
                     address_of(own, flight.ARGUMENT), 24)
    if least > 0:
        own[flight.AWAKE_NS] = now_ns()
    atomic_store(control, line + R_ENTERS, control[line + R_ENTERS] + 1)
    if result >= 0:
        own[flight.PENDING] -= result
        return np.int64(0)
    if result == -ETIME or result == -EINTR:
        own[flight.PATIENT] = 0
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
    out = own[flight.IN_FLIGHT] - own[flight.HELD]
    room = flight.step_room(params, own)
    least, timeout_ns = np.int64(1), np.int64(-1)
    if own[flight.HELD] > 0:
        timeout_ns = 2_000_000
    elif out > 0:
        timeout_ns = 100_000_000
    if own[flight.PATIENT] != 0 and out >= MANY:
        least = min(out // 8, 8 if room > 0 else PORTION)
        timeout_ns = 1_000_000
    announced = room > 0 and least == 1 and not stopping
    if announced:
        if not flight.arm(sqes, own):
            timeout_ns = 1_000_000
        atomic_store(control, asleep, 1)
        fence()
        if atomic_load(control, STOP) != 0 or work_waits(state, room, flight.background_room(params, own)):
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
    busy = flight.completions(ring, own) > 0
    if not stopping and not busy:
        busy = work_waits(state, flight.step_room(params, own), flight.background_room(params, own))
    if busy or (idle_ns > 0 and now_ns() - idle_ns < params[P_SPIN_NS]):
        return enter(state, reader, ring, own, 0, -1) if own[flight.PENDING] > 0 else np.int64(0)
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
    own[flight.AWAKE_NS] = now_ns()
    while True:
        done = flight.reap(state, reader, ring, sqes, cqes, own, slots)
        if own[flight.HELD] > 0 and not stalled(state):
            flight.release_held(state, reader, sqes, own, slots)
        stopping = atomic_load(control, STOP) != 0
        if stopping:
            stop_ns = now_ns() if stop_ns == 0 else stop_ns
            if own[flight.IN_FLIGHT] == 0 or now_ns() - stop_ns > STOP_GRACE_NS:
                break
        taken = 0 if stopping else flight.take_pages(state, sqes, own, slots, found)
        publish(state, reader, own, slots)
        if taken > 0 and state.params[P_READERS] > 1:
            wake_readers(state)                              # those whom the planner left to us
        if own[flight.IN_FLIGHT] > 0 or done + taken > 0:
            idle_ns = 0
        elif idle_ns == 0:
            idle_ns = now_ns()
        result = turn_end(state, reader, ring, sqes, own, stopping, idle_ns)
        if result < 0:
            return result
    publish(state, reader, own, slots)
    atomic_store(control, line + R_STATE, READER_RETURNED if own[flight.IN_FLIGHT] == 0 else READER_STUCK)
    return np.int64(0)


@inlined
@compiled
def in_kernel(sqes, own):  # type: ignore[no-untyped-def]
    """Reads that were submitted and not reaped."""
    count = own[flight.IN_FLIGHT] - own[flight.HELD]
    for k in range(own[flight.SQ_TAIL] - own[flight.PENDING], own[flight.SQ_TAIL]):
        count -= sqes[(k & own[flight.SQ_MASK]) * 8 + 4] != flight.WAKE
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
    slot = own[flight.OLDEST]
    while slot >= 0:
        state.pages[slots[slot].page].tries = 0
        if not serve_page(state, reader, np.int64(slots[slot].page), own[flight.SPARE], slots[slot].background != 0):
            break
        slot = np.int64(slots[slot].newer)
    atomic_store(control, line + R_IN_FLIGHT, 0)
    plain_loop(state, reader, own[flight.SPARE])
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
        ring = Ring(flight.SQ_ENTRIES, max(2 * flight.SQ_ENTRIES, 1 << (depth + 1).bit_length()))
        self._rings.append(ring)
        own, slots = np.zeros(flight.OWN_WORDS, np.int64), np.zeros(depth, flight.SLOT)
        self._own.append(own)
        self._slots.append(slots)
        slots["newer"] = np.append(np.arange(1, depth), -1)
        memory = np.zeros(2 * PAGE_BYTES, np.uint8)
        self._spares.append(memory)
        own[flight.SPARE] = -(-memory.ctypes.data // PAGE_BYTES) * PAGE_BYTES
        own[flight.STAGING] = state.staging.ctypes.data + reader * depth * PAGE_BYTES
        own[flight.RING_FD], own[flight.EVENT_FD] = ring.fd, os.eventfd(0, os.EFD_CLOEXEC)
        own[flight.SQ_TAIL_AT], own[flight.CQ_HEAD_AT], own[flight.CQ_TAIL_AT] = ring.sq_tail_at, ring.cq_head_at, ring.cq_tail_at
        own[flight.SQ_MASK], own[flight.CQ_MASK] = ring.sq_entries - 1, ring.cq_entries - 1
        own[flight.OLDEST] = own[flight.NEWEST] = -1
        own[flight.PATIENT] = 1
        own[flight.ARGUMENT_SIZE] = 8                               # size of a signal set; none is given
        state.control[reader_line(reader) + R_WAKE_FD] = own[flight.EVENT_FD]
        state.control[reader_line(reader) + R_ROOM] = depth
        try:
            ring.register_files(np.ascontiguousarray(state.files["fd"]))
            own[flight.FIXED_FILES] = 1
        except OSError as error:
            notices.add(f"files are not registered with io_uring ({error.strerror}): raise the limit of open files (ulimit -n)")
        try:
            ring.register_buffer(int(own[flight.STAGING]), depth * PAGE_BYTES)
            own[flight.FIXED_BUFFERS] = 1
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

    def forget(self) -> None:
        """In a forked child: close the inherited descriptors of rings and eventfds."""
        for ring, own in zip(self._rings, self._own, strict=False):
            for descriptor in (ring.fd, int(own[flight.EVENT_FD])):
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def close(self) -> None:
        """Unmap and close the rings. Does nothing while a reader still runs. Idempotent."""
        if any(thread.is_alive() for thread in self._threads):
            return
        for ring, own in zip(self._rings, self._own, strict=False):
            if ring.fd >= 0:
                ring.close()
                os.close(int(own[flight.EVENT_FD]))
