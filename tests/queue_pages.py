"""What the queue tests share: two column files of real pages, a State over them, and a queue that runs for a test's length."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np

from ssdgram import _state as s
from ssdgram.layout.page import pack_pages
from ssdgram.queues import choose
from ssdgram.queues.state import collect, new_state, push

CODES, SCALES, GENERATION, LAYER, PER_PAGE, PAGES = 256, 8, 0x1234_5678_9ABC, 7, 15, 40
ROW = CODES + SCALES
STRIDE = 2 * ROW + 48                                        # two heads, rounded up to 64


def make_columns(folder):
    """Two page files of one group (heads 0 and 1) and their rows, uint8 [2, PAGES * 15, 264]."""
    rows = np.random.default_rng(1).integers(0, 256, (2, PAGES * PER_PAGE, ROW), np.uint8)
    for column in range(2):
        codes, scales = (np.ascontiguousarray(part) for part in np.split(rows[column], [CODES], axis=1))
        pages = np.zeros(PAGES * 4096, np.uint8)
        pack_pages(codes.ctypes.data, scales.ctypes.data, CODES, SCALES, pages, 0, PAGES, PAGES * PER_PAGE, GENERATION, LAYER,
                   column)
        (folder / f"column-{column:02}.rows").write_bytes(pages.tobytes())
    return rows


class Rig:
    """A queue over two columns. `want(index, file, page, places)` fills a page record; row k of all goes to slot k."""

    def __init__(self, folder, name, *, direct=True, pages=256, targets=1024, readers=None, depth=None, **settings):
        self.fds = []
        files = np.zeros(2, s.FILE)
        for column in range(2):
            path = folder / f"column-{column:02}.rows"
            fd = self.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            files[column] = (fd, self.open(path, os.O_RDONLY), LAYER, column, 0, column, 2, 0, PAGES * PER_PAGE, PAGES)
        readers = readers or (1 if name == "uring" else 4)
        depth = depth or (16 if name == "uring" else 1)
        self.state = new_state(files, readers=readers, depth=depth, pages=pages, targets=targets, slots=targets,
                               code_bytes=CODES, scale_bytes=SCALES, rows_per_page=PER_PAGE, slot_stride=STRIDE,
                               generation=GENERATION, **settings)
        self.queue = choose(name, self.state)
        self.used = 0
        self.wanted = []                                     # (page index, file, row, slot)

    def open(self, path, flags):
        """A descriptor that is closed with the rig."""
        self.fds.append(os.open(path, flags))
        return self.fds[-1]

    def want(self, index, file, page, places=()):
        """Fill page record `index`; each wanted place takes the next free slot."""
        record = self.state.pages[index:index + 1]
        record["file"], record["number"], record["target"] = file, page, -1
        for place in places:
            slot, self.used = self.used, self.used + 1
            self.state.targets[slot] = (slot, place, record["target"][0], 0)
            record["target"] = slot
            self.wanted.append((index, file, page * PER_PAGE + place, slot))

    def bundle(self, file, slot):
        """The row of `file` in a slot, uint8 [264]."""
        slot = self.state.slab[slot * STRIDE:(slot + 1) * STRIDE]
        codes, scales = slot[:2 * CODES].reshape(2, CODES), slot[2 * CODES:2 * ROW].reshape(2, SCALES)
        return np.concatenate([codes[file], scales[file]])

    def check(self, rows):
        """Every wanted row of a page that came is in its slot; of one that failed, nothing is."""
        for index, file, row, slot in self.wanted:
            expected = rows[file, row] if self.state.pages["status"][index] == s.READ_OK else np.zeros(ROW, np.uint8)
            assert np.array_equal(self.bundle(file, slot), expected), (index, file, row, slot)

    def total(self, word):
        """Sum of a reader word over the readers."""
        return sum(int(self.state.control[s.reader_line(reader) + word]) for reader in range(self.queue.readers))

    def fault(self, result, *, after=0, times=-1, file=-1):
        """Set the fault injector."""
        self.state.faults[:] = 0
        self.state.faults[[s.FAULT_AFTER, s.FAULT_RESULT, s.FAULT_FILE]] = after, result, file
        self.state.faults[s.FAULT_TIMES] = times

    def serve(self, indices, priority=s.STEP, timeout_s=20.0):
        """Push pages and wait for them; their statuses."""
        push(self.state, np.asarray(indices), priority)
        found = collect(self.state, len(indices), timeout_s)
        assert sorted(found) == sorted(indices)
        return self.state.pages["status"][np.asarray(indices)]

    def stop(self, timeout_s=10.0):
        """Stop the readers, within that time; how long they took."""
        begin = time.monotonic()
        self.state.control[s.STOP] = 1
        self.queue.wake_all()
        assert self.queue.join(timeout_s)
        return time.monotonic() - begin

    def close(self):
        """Stop and close what is open."""
        self.state.faults[s.FAULT_TIMES] = 0
        self.stop()
        self.queue.close()
        for fd in self.fds:
            os.close(fd)


@contextlib.contextmanager
def running(folder, name, **settings):
    """A started rig."""
    rig = Rig(folder, name, **settings)
    try:
        rig.queue.start()
        yield rig
    finally:
        rig.close()


def until(condition, timeout_s=20.0):
    """Wait for a condition; whether it came."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()
