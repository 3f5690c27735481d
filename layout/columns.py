"""Writing one column of a table into its page file: what one stream of a conversion does with a block.

    read codes, scales (O_DIRECT) -> pack into pages -> write (O_DIRECT, space reserved before) -> SHA-256, in order -> fsync

The journal hears of the column when its bytes are durable. It knows nothing of other columns or of what a resumed run skips.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ssdgram._compiled import compile_for
from ssdgram.layout.blocks import BLOCK_BYTES, BLOCK_PAGES, Stream
from ssdgram.layout.direct import DirectFile, aligned_buffer
from ssdgram.layout.format import PAGE_BYTES, rows_per_page
from ssdgram.layout.page import pack_pages, signed
from ssdgram.layout.places import Place
from ssdgram.layout.source import SLACK, RowSource


class Workspace(NamedTuple):
    """One thread's buffers: a block of codes, of scales, and of pages."""

    codes: np.ndarray
    scales: np.ndarray
    pages: np.ndarray


def workspace(code_bytes: int, scale_bytes: int) -> Workspace:
    """Buffers for blocks of rows of that format, uint8, aligned to 4096."""
    rows = BLOCK_PAGES * rows_per_page(code_bytes + scale_bytes)
    return Workspace(aligned_buffer(rows * code_bytes + SLACK), aligned_buffer(rows * scale_bytes + SLACK),
                     aligned_buffer(BLOCK_BYTES))


class Column(Stream):
    """One column to write, at `place`, from its layer's codes and scales; `finished(place, digest)` when it is durable."""

    def __init__(self, place: Place, codes: RowSource, scales: RowSource, generation: int,
                 finished: Callable[[Place, str], None] = lambda place, digest: None) -> None:
        super().__init__(-(-place.pages // BLOCK_PAGES))
        self.place, self.codes, self.scales = place, codes, scales
        self.written = 0
        self._generation, self._finished = signed(generation), finished
        self._digest = hashlib.sha256()
        self._file: DirectFile | None = None

    def read_rows(self, block: int, space: Workspace) -> tuple[int, int, int, int]:
        """Read the rows of a block; (first page, pages, address of the first row's codes, of its scales)."""
        per_page = rows_per_page(self.codes.row_bytes + self.scales.row_bytes)
        first_page = block * BLOCK_PAGES
        pages = min(BLOCK_PAGES, self.place.pages - first_page)
        first = first_page * per_page
        rows = min(pages * per_page, self.place.rows - first)
        codes = space.codes.ctypes.data + self.codes.read(self.place.first_row + first, rows, space.codes)
        scales = space.scales.ctypes.data + self.scales.read(self.place.first_row + first, rows, space.scales)
        return first_page, pages, codes, scales

    def open(self) -> None:
        """Make the file, with all its blocks reserved on the disk."""
        self.place.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = DirectFile(self.place.path, writable=True, size=self.place.size)

    def process(self, block: int, space: Workspace) -> np.ndarray:
        first_page, pages, codes, scales = self.read_rows(block, space)
        out = space.pages[: pages * PAGE_BYTES]
        pack_pages(codes, scales, self.codes.row_bytes, self.scales.row_bytes, out, first_page, pages, self.place.rows,
                   self._generation, self.place.layer, self.place.column)
        assert self._file is not None                        # for the type checker: open() came first
        self._file.write(out, first_page * PAGE_BYTES)
        return out

    def in_order(self, block: int, result: np.ndarray) -> None:
        self._digest.update(result.data)
        self.written += len(result)

    def finish(self) -> None:
        assert self._file is not None
        self._file.sync()
        self._finished(self.place, self._digest.hexdigest())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def compile_packing() -> None:
    """Load or compile the packing loop now, in this thread, instead of in all threads at once."""
    compile_for(pack_pages, 0, 0, 0, 0, np.zeros(PAGE_BYTES, np.uint8), 0, 0, 0, 0, 0, 0)
