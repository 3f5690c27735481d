"""How planner and readers hand pages to each other, and how each wakes the other.

    planner: push, fence, look for sleepers, wake          reader: asleep = 1, fence, look at the rings, sleep
    reader:  push to its done ring, fence, wake planner    planner: the same with PLANNER_ASLEEP

Of the two sides' stores and looks one always sees the other (Dekker), so no wake-up is lost. A push wakes two readers at
the most; a reader that pulls and leaves work behind wakes the next two, so a long queue wakes all of them and the planner
pays for two. The number of background reads in the drive is reserved before it is used, over all readers; whoever holds
a part of it looks at the background ring again before it sleeps, so a reader that found the budget spent may sleep.

This module knows neither io_uring nor files.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import (address_of, atomic_add, atomic_cas, atomic_exchange, atomic_load, atomic_store, compiled, fence,
                               futex_wake, syscall)
from ssdgram._state import (ASLEEP, AWAKE, BACKGROUND_HEAD, BACKGROUND_IN_FLIGHT, BACKGROUND_TAIL, P_BACKGROUND_DEPTH, P_DEPTH,
                            P_DONE_CAPACITY, P_READERS, PLANNER_ASLEEP, PLANNER_WORD, R_ASLEEP, R_DONE_TAIL, R_ERRORS,
                            R_READS, R_WAKE_FD, READ_OK, READER_LINES, READER_WORDS, STEP_HEAD, STEP_TAIL,
                            WORD_LINE)
from ssdgram.queues._calls import SYS_WRITE
from ssdgram.queues._lean import inlined

R_ROOM = R_DONE_TAIL + 1                                     # pages that the reader could take now (its own line)

# values of R_STATE
READER_NEW, READER_RUNNING, READER_PLAIN, READER_RETURNED, READER_STUCK = range(5)
# plain: the ring failed after open, the reader goes on with preads; returned: saw STOP, nothing left in the drive;
# stuck: returned while reads were in the drive, so its staging may still be written to and must never be freed

PORTION = 32                                                 # pages handled between two looks around: well below 100 us
WAKES = 2                                                    # readers that one call wakes at the most
_ONE = np.ones(1, np.int64)                                  # what is written to an eventfd


@inlined
@compiled
def wake_reader(control, words, reader):  # type: ignore[no-untyped-def]
    """Wake `reader` if it sleeps; whether it did."""
    line = READER_LINES + reader * READER_WORDS
    if atomic_load(control, line + R_ASLEEP) == 0 or atomic_exchange(control, line + R_ASLEEP, 0) == 0:
        return False
    fd = atomic_load(control, line + R_WAKE_FD)
    if fd >= 0:
        syscall(SYS_WRITE, fd, address_of(_ONE, 0), 8, 0, 0, 0)
    else:
        word = (1 + reader) * WORD_LINE
        atomic_add(words, word, 1)
        futex_wake(words, word, 1)
    return True


@inlined
@compiled
def background_limit(params):  # type: ignore[no-untyped-def]
    """Background reads that may be in the drive at once, over all readers: a quarter of all room is left to steps."""
    room = params[P_READERS] * params[P_DEPTH]
    return max(1, min(params[P_BACKGROUND_DEPTH], room - max(1, room // 4)))


@compiled
def wake_readers(state):  # type: ignore[no-untyped-def]
    """Wake as many sleeping readers as the waiting pages can use, two at the most. To be called after a push."""
    control, words, params = state.control, state.words, state.params
    fence()
    waiting = atomic_load(control, BACKGROUND_TAIL) - atomic_load(control, BACKGROUND_HEAD)
    if waiting > 0:
        waiting = min(waiting, max(0, background_limit(params) - atomic_load(control, BACKGROUND_IN_FLIGHT)))
    waiting += atomic_load(control, STEP_TAIL) - atomic_load(control, STEP_HEAD)
    woken = 0
    for reader in range(params[P_READERS]):
        if waiting <= 0 or woken == WAKES:
            return
        room = atomic_load(control, READER_LINES + reader * READER_WORDS + R_ROOM)
        if wake_reader(control, words, reader):
            woken += 1
        elif room == 0:
            continue                                         # awake and full: others must take the pages
        waiting -= max(1, min(room // 4, PORTION))           # one that is awake with room looks at the rings by itself


@compiled
def wake_all(state):  # type: ignore[no-untyped-def]
    """Wake every sleeping reader (to be called after STOP was set)."""
    fence()
    for reader in range(state.params[P_READERS]):
        wake_reader(state.control, state.words, reader)


@inlined
@compiled
def wake_planner(state):  # type: ignore[no-untyped-def]
    """Wake the planner if it sleeps. To be called after pages were pushed to a done ring."""
    control, words = state.control, state.words
    fence()
    if atomic_load(control, PLANNER_ASLEEP) == ASLEEP and atomic_cas(control, PLANNER_ASLEEP, ASLEEP, AWAKE):
        atomic_add(words, PLANNER_WORD, 1)
        futex_wake(words, PLANNER_WORD, 1)


@inlined
@compiled
def pull(control, ring, head_word, tail_word, want, found):  # type: ignore[no-untyped-def]
    """Take at most `want` entries off a ring into `found`; how many. Any number of readers may pull at once."""
    mask = ring.size - 1
    while True:
        head = atomic_load(control, head_word)
        count = min(want, atomic_load(control, tail_word) - head)
        if count <= 0:
            return 0
        for k in range(count):                               # may be stale, but then the head moved and the swap fails
            found[k] = ring[(head + k) & mask]
        if atomic_cas(control, head_word, head, head + count):
            return count


@inlined
@compiled
def pull_claimed(control, claims, ring, head_word, tail_word, want, found):  # type: ignore[no-untyped-def]
    """Take at most `want` pages off a ring into `found` that nobody else claimed (by its other entry); how many."""
    kept = 0
    while kept == 0:
        count = pull(control, ring, head_word, tail_word, want, found)
        if count == 0:
            return 0
        for k in range(count):
            if atomic_exchange(claims, found[k], 1) == 0:
                found[kept] = found[k]
                kept += 1
    return kept


@inlined
@compiled
def pull_step(state, want, found):  # type: ignore[no-untyped-def]
    """Take at most `want` step pages into `found`; how many."""
    return pull_claimed(state.control, state.claims, state.step_ring, STEP_HEAD, STEP_TAIL, want, found)


@inlined
@compiled
def pull_background(state, want, found):  # type: ignore[no-untyped-def]
    """Take at most `want` background pages into `found`, within the budget over all readers; how many."""
    control = state.control
    if want <= 0 or atomic_load(control, BACKGROUND_TAIL) == atomic_load(control, BACKGROUND_HEAD):
        return 0
    before = atomic_add(control, BACKGROUND_IN_FLIGHT, want)
    granted = max(0, min(want, background_limit(state.params) - before))
    count = pull_claimed(control, state.claims, state.background_ring, BACKGROUND_HEAD, BACKGROUND_TAIL, granted, found)
    if count < want:
        atomic_add(control, BACKGROUND_IN_FLIGHT, count - want)
    return count


@inlined
@compiled
def work_waits(state, step_room, background_room):  # type: ignore[no-untyped-def]
    """Whether a ring holds a page that a reader with that much room could take now."""
    control = state.control
    if step_room > 0 and atomic_load(control, STEP_TAIL) != atomic_load(control, STEP_HEAD):
        return True
    return (background_room > 0 and atomic_load(control, BACKGROUND_TAIL) != atomic_load(control, BACKGROUND_HEAD)
            and atomic_load(control, BACKGROUND_IN_FLIGHT) < background_limit(state.params))


@inlined
@compiled
def push_done(state, reader, index, status):  # type: ignore[no-untyped-def]
    """Give page `index` back to the planner with its status. The caller wakes the planner after a portion of them."""
    control = state.control
    line = READER_LINES + reader * READER_WORDS
    state.pages[index].status = status
    atomic_store(control, line + R_READS, control[line + R_READS] + 1)
    if status != READ_OK:
        atomic_store(control, line + R_ERRORS, control[line + R_ERRORS] + 1)
    capacity = state.params[P_DONE_CAPACITY]
    tail = control[line + R_DONE_TAIL]
    state.done_ring[reader * capacity + (tail & (capacity - 1))] = index
    atomic_store(control, line + R_DONE_TAIL, tail + 1)
