"""Arrays for a queue that runs without a store: benchmarks, raw page reads, tests.

The store lays the same arrays out inside its budget (`_arena`); here each is memory of its own. It knows nothing of what
the pages hold. `push` and `collect` are the planner's two moves in plain Python: for set-up and tests, not for serving.
"""

from __future__ import annotations

import mmap
import time

import numpy as np

from ssdgram import _state as s
from ssdgram._state import State
from ssdgram.queues._handoff import wake_readers


def aligned(count: int, dtype: np.dtype | type) -> np.ndarray:
    """A zeroed array of `count` elements that starts at a page boundary."""
    kind = np.dtype(dtype)
    memory = mmap.mmap(-1, max(1, count * kind.itemsize))
    return np.frombuffer(memory, kind, count)


def file_records(fds: list[tuple[int, int]], pages: int = 0) -> np.ndarray:
    """FILE records of (fd, buffered fd) pairs: layer 0, column = file index, one row a bundle."""
    files = np.zeros(len(fds), s.FILE)
    for index, (fd, buffered_fd) in enumerate(fds):
        files[index] = (fd, buffered_fd, 0, index, 0, 0, 1, 0, 0, pages)
    return files


def new_state(files: np.ndarray, *, readers: int = 1, depth: int = 32, pages: int = 64, targets: int = 1, slots: int = 1,
              code_bytes: int = 256, scale_bytes: int = 8, rows_per_page: int = 15, slot_stride: int = 320,
              generation: int = 0, retries: int = 2, spin_us: float = 0, background_depth: int | None = None,
              ring_capacity: int | None = None) -> State:
    """A State for `readers` readers of `depth` reads each and `pages` page records, none of them in use.

    files: FILE records. background_depth: all of the depth if None. ring_capacity: a power of two >= pages (the next, if None).
    """
    capacity = ring_capacity or 1 << max(0, pages - 1).bit_length()
    params = aligned(s.P_COUNT, np.int64)
    for name, value in ((s.P_READERS, readers), (s.P_DEPTH, depth),
                        (s.P_BACKGROUND_DEPTH, readers * depth if background_depth is None else background_depth),
                        (s.P_ROWS_PER_PAGE, rows_per_page), (s.P_CODE_BYTES, code_bytes), (s.P_SCALE_BYTES, scale_bytes),
                        (s.P_SLOT_STRIDE, slot_stride), (s.P_GENERATION, generation), (s.P_RETRIES, retries),
                        (s.P_SPIN_NS, int(spin_us * 1000)), (s.P_DONE_CAPACITY, capacity), (s.P_RING_CAPACITY, capacity)):
        params[name] = value
    state = State(
        control=aligned(s.control_words(readers), np.int64), words=aligned(s.futex_words(readers), np.int32), params=params,
        faults=aligned(4, np.int64), step_ring=aligned(capacity, np.int32), background_ring=aligned(capacity, np.int32),
        done_ring=aligned(readers * capacity, np.int32), pages=aligned(pages, s.PAGE), targets=aligned(max(1, targets), s.TARGET),
        files=files, claims=aligned(pages, np.int32), staging=aligned(readers * depth * 4096, np.uint8),
        slab=aligned(slots * slot_stride, np.uint8))
    state.pages["target"] = -1
    return state




def push(state: State, indices: np.ndarray, priority: int = s.STEP) -> None:
    """Push page indices to the ring of their class and wake readers. The records are filled; they fit into the ring."""
    ring, tail = ((state.step_ring, s.STEP_TAIL) if priority == s.STEP else (state.background_ring, s.BACKGROUND_TAIL))
    state.pages["priority"][indices] = priority
    state.pages["status"][indices] = s.READ_PENDING
    state.claims[indices] = 0
    position = int(state.control[tail])
    ring[(position + np.arange(len(indices))) & (len(ring) - 1)] = indices
    state.control[tail] = position + len(indices)
    wake_readers(state)


def collect(state: State, count: int, timeout_s: float = 10.0) -> np.ndarray:
    """The next `count` page indices off the done rings, or fewer if they do not come within `timeout_s`."""
    capacity, deadline = int(state.params[s.P_DONE_CAPACITY]), time.monotonic() + timeout_s
    found: list[int] = []
    while len(found) < count and time.monotonic() < deadline:
        for reader in range(int(state.params[s.P_READERS])):
            line = s.reader_line(reader)
            head, tail = int(state.control[line + s.R_DONE_HEAD]), int(state.control[line + s.R_DONE_TAIL])
            positions = reader * capacity + (np.arange(head, tail) & (capacity - 1))
            found.extend(state.done_ring[positions].tolist())
            state.control[line + s.R_DONE_HEAD] = tail
        if len(found) < count:
            time.sleep(0.0005)
    return np.array(found, np.int64)
