"""What becomes of one page read: its result judged, its rows delivered, or a plain read made in its place.

The order of tries is one for both queues: the first read and P_RETRIES more go through the file's direct descriptor, the
last through the buffered one (another path of the kernel: page cache, no registered buffer or file). After that the page
keeps the last try's status. A page that did not come whole is never delivered, whatever rows it holds: the staging page
may have older bytes behind them.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import atomic_load, atomic_store, compiled, futex_wait, now_ns, syscall
from ssdgram._deliver import deliver
from ssdgram._state import (FAULT_STALL, P_RETRIES, R_RETRIES, READ_OK, READ_SHORT, READER_LINES, READER_WORDS, STOP,
                            WORD_LINE)
from ssdgram.queues._calls import EINTR, PAGE_BYTES, SYS_PREAD
from ssdgram.queues._faults import spoil, stalled
from ssdgram.queues._lean import inlined

STOP_GRACE_NS = 2_000_000_000                                # how long a stopped reader waits for the drive
ABANDONED = -(1 << 40)                                       # result of a read that was given up because of STOP


@inlined
@compiled
def judge(state, index, result, page):  # type: ignore[no-untyped-def]
    """Status of page record `index` after a try that returned `result`; its rows are delivered if the page is whole."""
    if result == PAGE_BYTES:
        return np.int64(READ_OK) if state.pages[index].target < 0 else np.int64(deliver(state, index, page))
    if result >= 0:
        return np.int64(READ_SHORT)
    return np.int64(-result)


@inlined
@compiled
def again(state, reader, index):  # type: ignore[no-untyped-def]
    """Count a failed try of page record `index`; whether it may be tried again."""
    if state.pages[index].tries > state.params[P_RETRIES]:
        return False
    state.pages[index].tries += 1
    word = READER_LINES + reader * READER_WORDS + R_RETRIES
    atomic_store(state.control, word, state.control[word] + 1)
    return True


@inlined
@compiled
def is_last(state, index):  # type: ignore[no-untyped-def]
    """Whether the next try of page record `index` is the one by the buffered descriptor."""
    return state.pages[index].tries > state.params[P_RETRIES]


@inlined
@compiled
def plain_read(state, index, page):  # type: ignore[no-untyped-def]
    """pread(2) page record `index` to address `page`: bytes read or minus errno; the rest of a short read is read too."""
    file = state.files[state.pages[index].file]
    fd = np.int64(file.buffered_fd if is_last(state, index) else file.fd)
    start = state.pages[index].number * PAGE_BYTES
    done = np.int64(0)
    interrupted = 0
    while done < PAGE_BYTES:
        result = syscall(SYS_PREAD, fd, page + done, PAGE_BYTES - done, start + done, 0, 0)
        if result == -EINTR and interrupted < 100:
            interrupted += 1
        elif result > 0:
            done += result
        else:
            return done if done > 0 else result              # the end of the file, or an unaligned rest: a short read
    return done


@inlined
@compiled
def pause(state, reader, wait_ns):  # type: ignore[no-untyped-def]
    """Sleep for `wait_ns`, or less if this reader is woken by its futex word."""
    word = (1 + reader) * WORD_LINE
    futex_wait(state.words, word, atomic_load(state.words, word), wait_ns)


@inlined
@compiled
def hold(state, reader):  # type: ignore[no-untyped-def]
    """Wait as a read that the drive does not answer would; False if it was still held when STOP's grace ended."""
    stop_ns = np.int64(0)
    while stalled(state):
        if atomic_load(state.control, STOP) != 0:
            stop_ns = now_ns() if stop_ns == 0 else stop_ns
            if now_ns() - stop_ns > STOP_GRACE_NS:
                return False
        pause(state, reader, 2_000_000)
    return True


@inlined
@compiled
def read_page(state, reader, index, page):  # type: ignore[no-untyped-def]
    """Read page record `index` by preads to address `page`, all tries; its status, or ABANDONED."""
    while True:
        result = spoil(state, index, plain_read(state, index, page), page)
        if result == FAULT_STALL:
            if not hold(state, reader):
                return np.int64(ABANDONED)
            result = PAGE_BYTES
        status = judge(state, index, result, page)
        if status == READ_OK or not again(state, reader, index):
            return status
