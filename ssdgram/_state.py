"""The arrays that planner and readers share, and what every word of them means.

    planner ──step_ring────────┐ page indices           ┌─► reader 0 ─ring─► drive
            ──background_ring──┴───(many readers pull)──┼─► reader 1
            ◄─done_ring[r]──── page indices, one ring a reader ◄──┘

The planner alone fills `pages` and `targets` and pushes page indices; a reader that has room pulls one (compare-and-swap
on the head: step class first), reads the page, hands it to `deliver`, stores the page's `status` and pushes the index to
its done ring. From push to done a page record belongs to the reader that pulled it, before and after to the planner.
An index may stand in both rings (a step batch wants what a background batch asked for): whoever exchanges its claim word
from 0 to 1 first reads it, the other entry is skipped.
Nothing here is a pointer: slots, pages and files are numbers, so that the arrays may live in memory shared by processes.

Sleeping: a sleeper stores 1 into its `asleep` word, looks once more at its rings (`fence` between), then sleeps; a waker
pushes, `fence`s, exchanges the `asleep` word to 0 and wakes if it was 1. The planner's word has a third value (_planner.plan_here).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LINE = 8                                                     # int64 words in a cache line

# control: int64 words. One line for each word that another thread writes.
STOP = 0 * LINE                                              # 1: planner and readers return
STEP_HEAD, STEP_TAIL = 1 * LINE, 2 * LINE                    # positions in step_ring, ever growing
BACKGROUND_HEAD, BACKGROUND_TAIL = 3 * LINE, 4 * LINE        # positions in background_ring
PLANNER_ASLEEP = 5 * LINE                                    # of these:
AWAKE, ASLEEP, BORROWED = 0, 1, 2                            # borrowed: a caller plans while the planner's thread sleeps
BACKGROUND_IN_FLIGHT = 6 * LINE                              # background reads in the drive, all readers (atomic_add)
READER_LINES = 8 * LINE                                      # reader r's words start at READER_LINES + r * READER_WORDS
READER_WORDS = 4 * LINE
# ... written by the reader (first line), the waker (second), the planner (third), the reader (fourth)
R_OLDEST_NS, R_IN_FLIGHT, R_READS, R_RETRIES, R_ERRORS, R_ENTERS, R_BUSY_NS, R_STATE = range(8)
R_ASLEEP, R_WAKE_FD = LINE, LINE + 1                         # wake fd: an eventfd, or -1 (then futex words[reader_word(r)])
R_DONE_HEAD = 2 * LINE
R_DONE_TAIL = 3 * LINE

# words: int32 futex words, one line each
WORD_LINE = 16
PLANNER_WORD = 0
COPIER_WORD = 1                                              # the thread that launches copies to HBM sleeps on it


def reader_line(reader: int) -> int:
    """Index of reader `reader`'s first control word."""
    return READER_LINES + reader * READER_WORDS


def reader_word(reader: int) -> int:
    """Index of reader `reader`'s futex word."""
    return (1 + reader) * WORD_LINE


# params: int64, constant after open
(P_READERS, P_DEPTH, P_BACKGROUND_DEPTH, P_ROWS_PER_PAGE, P_CODE_BYTES, P_SCALE_BYTES, P_SLOT_STRIDE, P_GENERATION,
 P_RETRIES, P_SPIN_NS, P_DONE_CAPACITY, P_RING_CAPACITY, P_COUNT) = range(13)
# depth: reads in the drive per reader; background_depth: of those that may be background, over all readers;
# generation: the bits of the u64; retries: re-reads before the last one (buffered pread); spin_ns: before sleeping

# page status
READ_OK = 0                                                  # > 0: errno of the last try
READ_SHORT = -1                                              # the file ends before the page does
READ_CHECK = -2                                              # a wanted row's checksum is wrong
READ_PENDING = -3

STEP, BACKGROUND = 0, 1                                      # priority classes

PAGE = np.dtype([
    ("number", np.int64),                                    # page number in its file
    ("submit_ns", np.int64),                                 # set by the reader
    ("file", np.int32),                                      # file index = layer index * columns + column
    ("target", np.int32),                                    # first target, -1: none
    ("status", np.int32),
    ("tries", np.int16),
    ("priority", np.int16),
    ("ticket", np.int64),                                    # planner's own
    ("next", np.int32),                                      # planner's own
    ("spare", np.int32),
], align=True)

TARGET = np.dtype([                                          # one wanted row of a page
    ("slot", np.int32),                                      # where its bundle is put together
    ("place", np.int32),                                     # row in the page: 0 .. rows_per_page - 1
    ("next", np.int32),                                      # next target of the page, -1: last
    ("bad", np.int32),                                       # set by deliver: this row's checksum is wrong
], align=True)

FILE = np.dtype([
    ("fd", np.int32),                                        # O_DIRECT where the file system has it
    ("buffered_fd", np.int32),                               # the other path, for the last try
    ("layer", np.int32),                                     # decoder layer (for the row check)
    ("column", np.int32),
    ("group", np.int32),
    ("position", np.int32),                                  # of its row in the bundle
    ("heads", np.int32),                                     # rows in that bundle
    ("spare", np.int32),
    ("rows", np.int64),
    ("pages", np.int64),
], align=True)

# faults: int64[4], all zero outside tests. A reader consults it once per completed read.
FAULT_AFTER, FAULT_TIMES, FAULT_RESULT, FAULT_FILE = range(4)
# after: reads to let pass; times: reads to spoil then (-1: all); result: what those reads return instead (minus errno, a
# short count, FAULT_FLIP: one byte of the page is flipped, FAULT_STALL: not completed until times is set to 0); file: -1 any
FAULT_FLIP, FAULT_STALL = 1 << 20, 1 << 21


class State(NamedTuple):
    """All arrays are 1-D and C-contiguous; lengths: P pages, T targets, F files, R readers."""

    control: np.ndarray                                      # int64
    words: np.ndarray                                        # int32
    params: np.ndarray                                       # int64 [P_COUNT]
    faults: np.ndarray                                       # int64 [4]
    step_ring: np.ndarray                                    # int32 [P_RING_CAPACITY], a power of two >= P
    background_ring: np.ndarray                              # int32 [P_RING_CAPACITY]
    done_ring: np.ndarray                                    # int32 [R * P_DONE_CAPACITY], a power of two >= P each
    pages: np.ndarray                                        # PAGE [P]
    targets: np.ndarray                                      # TARGET [T]
    files: np.ndarray                                        # FILE [F]
    claims: np.ndarray                                       # int32 [P]: 0 from push to the pull that reads it (atomic_exchange to 1)
    staging: np.ndarray                                      # uint8 [R * P_DEPTH * 4096], 4096-aligned
    slab: np.ndarray                                         # uint8 [slots * P_SLOT_STRIDE], 4096-aligned


def control_words(readers: int) -> int:
    """Length of `control` for that many readers."""
    return READER_LINES + readers * READER_WORDS


def futex_words(readers: int) -> int:
    """Length of `words` for that many readers."""
    return (1 + readers) * WORD_LINE
