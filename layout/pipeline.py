"""The streaming part of a conversion: many threads, each of which takes one block of one column from source to disk.

    thread:  claim (column, block) -> read codes, scales (O_DIRECT) -> pack -> write (O_DIRECT) -> hash, in the column's order

`jobs` columns are in work at once and a column's blocks are claimed in order, so the thread with a column's lowest block never
waits for another: no deadlock. Reads, packing and writes of different blocks overlap because the threads do; none of them
needs the GIL for more than the bookkeeping. Memory is threads x (one block in, one block out), whatever the tables' size.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from ssdgram._compiled import compile_for
from ssdgram.layout.direct import DirectFile, aligned_buffer
from ssdgram.layout.page import PAGE_BYTES, pack_pages, pages_of, rows_per_page, signed
from ssdgram.layout.source import SLACK, RowSource

BLOCK_PAGES = 512                                            # 2 MiB out, and a little less in
Progress = Callable[[int, int], None]                        # bytes done, bytes in all


class Column:
    """One column to write: `rows` rows of its layer's table from `first_row` on, into the file at `path`."""

    def __init__(self, index: int, layer: int, column: int, first_row: int, rows: int, path: Path, codes: RowSource,
                 scales: RowSource) -> None:
        self.index, self.layer, self.column = index, layer, column
        self.first_row, self.rows, self.path = first_row, rows, path
        self.codes, self.scales = codes, scales
        self.pages = pages_of(rows, codes.row_bytes + scales.row_bytes)
        self.size = self.pages * PAGE_BYTES
        self.blocks = -(-self.pages // BLOCK_PAGES)
        self.claimed = 0                                     # blocks that a thread took
        self.hashed = 0                                      # blocks that are written and in the digest
        self.digest = hashlib.sha256()
        self.turn = threading.Condition()                    # guards `hashed`

    def open(self) -> DirectFile:
        """Make the file, with all its blocks reserved on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return DirectFile(self.path, writable=True, size=self.size)


class Pipeline:
    """Writes `columns`; `finished(column, digest)` is called once for each, from any thread, when its bytes are durable."""

    def __init__(self, columns: Sequence[Column], generation: int, jobs: int, threads: int,
                 finished: Callable[[Column, str], None]) -> None:
        self.done_bytes = 0
        self._generation = signed(generation)
        self._waiting = deque(columns)
        self._active: deque[Column] = deque()                # columns with blocks to claim
        self._files: dict[Column, DirectFile] = {}           # columns in work
        self._jobs, self._threads, self._finished = jobs, threads, finished
        self._lock = threading.Lock()                        # guards all of the above
        self._stopped = False

    def run(self, progress: Progress | None = None, done: int = 0, total: int = 0) -> None:
        """Write everything, or raise what the first failing thread raised.

        `progress(done + bytes written, total)` is called a few times a second, from this thread.
        """
        if not self._waiting:
            return
        compile_for(pack_pages, 0, 0, 0, 0, np.zeros(PAGE_BYTES, np.uint8), 0, 0, 0, 0, 0, 0)
        try:
            with ThreadPoolExecutor(self._threads, "ssdgram-convert") as pool:
                try:
                    running = {pool.submit(self._work) for _ in range(self._threads)}
                    while running:
                        ended, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
                        for future in ended:
                            future.result()
                        if progress is not None:
                            progress(done + self.done_bytes, total)
                finally:
                    self._stop()
        finally:
            for file in self._files.values():                # of columns that were not finished
                file.close()

    def _work(self) -> None:
        """One thread: blocks until none is left, or until another thread failed."""
        first = next(iter([*self._active, *self._waiting]), None)
        if first is None:
            return
        rows = BLOCK_PAGES * rows_per_page(first.codes.row_bytes + first.scales.row_bytes)
        codes, scales = (aligned_buffer(rows * source.row_bytes + SLACK) for source in (first.codes, first.scales))
        out = aligned_buffer(BLOCK_PAGES * PAGE_BYTES)
        whole = False
        try:
            while (claim := self._claim()) is not None:
                self._block(*claim, codes, scales, out)
            whole = True
        finally:
            if not whole:
                self._stop()

    def _claim(self) -> tuple[Column, DirectFile, int] | None:
        """The next block to work on, from the active columns in turn. None when nothing is left."""
        with self._lock:
            if self._stopped:
                return None
            while len(self._active) < self._jobs and self._waiting:
                column = self._waiting.popleft()
                self._files[column] = column.open()
                self._active.append(column)
            if not self._active:
                return None
            column = self._active.popleft()
            block = column.claimed
            column.claimed += 1
            if column.claimed < column.blocks:
                self._active.append(column)
            return column, self._files[column], block

    def _block(self, column: Column, file: DirectFile, block: int, codes: np.ndarray, scales: np.ndarray,
               out: np.ndarray) -> None:
        code_bytes, scale_bytes = column.codes.row_bytes, column.scales.row_bytes
        per_page = rows_per_page(code_bytes + scale_bytes)
        first_page = block * BLOCK_PAGES
        pages = min(BLOCK_PAGES, column.pages - first_page)
        first = first_page * per_page
        rows = min(pages * per_page, column.rows - first)
        codes_at = codes.ctypes.data + column.codes.read(column.first_row + first, rows, codes)
        scales_at = scales.ctypes.data + column.scales.read(column.first_row + first, rows, scales)
        pack_pages(codes_at, scales_at, code_bytes, scale_bytes, out, first_page, pages, column.rows, self._generation,
                   column.layer, column.column)
        view = out[: pages * PAGE_BYTES]
        file.write(view, first_page * PAGE_BYTES)
        with column.turn:
            while column.hashed != block and not self._stopped:
                column.turn.wait()
            if self._stopped:
                return
        column.digest.update(view.data)                           # outside the lock: it is this thread's turn until it says otherwise
        with column.turn:
            column.hashed += 1
            column.turn.notify_all()
        with self._lock:
            self.done_bytes += len(view)
        if block == column.blocks - 1:
            self._finish(column, file)

    def _finish(self, column: Column, file: DirectFile) -> None:
        file.sync()
        with self._lock:
            del self._files[column]
        file.close()
        self._finished(column, column.digest.hexdigest())

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            columns = list(self._files)
        for column in columns:
            with column.turn:
                column.turn.notify_all()
