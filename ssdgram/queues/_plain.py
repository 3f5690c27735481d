"""The reading loop without io_uring: pull a page, pread it, deliver it, give it back, one page at a time.

It is the whole of the `threads` queue (one such loop per thread) and what a ring's reader falls back to if its ring fails
after open, for example because the process gave itself a seccomp filter. Idle it spins for P_SPIN_NS, then sleeps on its
futex word. The invariant: a page that was pulled is pushed to the done ring, unless STOP's grace ends first.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import atomic_add, atomic_load, atomic_store, compiled, fence, futex_wait, now_ns
from ssdgram._state import (BACKGROUND_IN_FLIGHT, P_SPIN_NS, R_ASLEEP, R_BUSY_NS, R_IN_FLIGHT,
                            R_OLDEST_NS, R_STATE, READER_LINES, READER_WORDS, STOP, WORD_LINE)
from ssdgram.queues._handoff import (R_ROOM, READER_RETURNED, READER_STUCK, pull_background, pull_step, push_done,
                                     wake_planner, wake_readers, work_waits)
from ssdgram.queues._lean import inlined
from ssdgram.queues._tries import ABANDONED, read_page


@inlined
@compiled
def serve_page(state, reader, index, page, background):  # type: ignore[no-untyped-def]
    """Read page record `index` to address `page` and give it back; False if it was abandoned because of STOP.

    background: whether the page counts as a background read in the drive.
    """
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    start = now_ns()
    state.pages[index].submit_ns = start
    atomic_store(control, line + R_OLDEST_NS, start)
    status = read_page(state, reader, index, page)
    if status == ABANDONED:
        return False
    if background:
        atomic_add(control, BACKGROUND_IN_FLIGHT, -1)
    atomic_store(control, line + R_OLDEST_NS, 0)
    push_done(state, reader, index, status)
    atomic_store(control, line + R_BUSY_NS, control[line + R_BUSY_NS] + now_ns() - start)
    wake_planner(state)
    return True


@inlined
@compiled
def sleep(state, reader):  # type: ignore[no-untyped-def]
    """Sleep on this reader's futex word until it is woken, unless there is work or STOP."""
    control, words = state.control, state.words
    asleep = READER_LINES + reader * READER_WORDS + R_ASLEEP
    word = (1 + reader) * WORD_LINE
    seen = atomic_load(words, word)
    atomic_store(control, asleep, 1)
    fence()
    if not work_waits(state, 1, 1) and atomic_load(control, STOP) == 0:
        futex_wait(words, word, seen, -1)
    atomic_store(control, asleep, 0)


@inlined
@compiled
def plain_loop(state, reader, page):  # type: ignore[no-untyped-def]
    """Serve pages one at a time, read to address `page` (4096 aligned bytes), until STOP. Sets R_STATE as it returns."""
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    found = np.empty(1, np.int32)
    idle_ns = np.int64(0)
    while atomic_load(control, STOP) == 0:
        background = pull_step(state, 1, found) == 0
        if background and pull_background(state, 1, found) == 0:
            if idle_ns == 0:
                idle_ns = now_ns()
            if now_ns() - idle_ns >= state.params[P_SPIN_NS]:
                sleep(state, reader)
                idle_ns = 0
            continue
        idle_ns = 0
        index = np.int64(found[0])
        state.pages[index].tries = 0
        atomic_store(control, line + R_IN_FLIGHT, 1)
        atomic_store(control, line + R_ROOM, 0)
        wake_readers(state)                                  # those whom the planner left to us
        if not serve_page(state, reader, index, page, background):
            atomic_store(control, line + R_STATE, READER_STUCK)
            return
        atomic_store(control, line + R_IN_FLIGHT, 0)
        atomic_store(control, line + R_ROOM, 1)
    atomic_store(control, line + R_STATE, READER_RETURNED)
