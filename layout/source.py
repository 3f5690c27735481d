"""Rows of a table that lies in one or many tensors (pieces), read as if they lay one after the other.

    piece 0 | piece 1 | ...        row r of the table is row r - start[i] of piece i; a piece is a tensor anywhere in a file

A block inside one piece is read with O_DIRECT: the whole 4096-byte units around it, so that its first byte is somewhere in
the first 4096 bytes of the buffer and nothing is copied. A block over a border of pieces (a few in 100 GB) is put together
through the page cache. It knows nothing of what a row means.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ssdgram.errors import CheckpointError
from ssdgram.layout.checkpoint import Checkpoint
from ssdgram.layout.direct import ALIGNMENT, DirectFile
from ssdgram.layout.safetensors import Tensor

SLACK = 2 * ALIGNMENT                                        # what a buffer needs beyond the rows' own bytes


class Shards:
    """The checkpoint files opened so far, each once; close them together."""

    def __init__(self) -> None:
        self._files: dict[Path, DirectFile] = {}

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, path: Path) -> DirectFile:
        """The open file at `path`."""
        if path not in self._files:
            try:
                self._files[path] = DirectFile(path)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error
        return self._files[path]

    def close(self) -> None:
        """Close all of them."""
        while self._files:
            self._files.popitem()[1].close()


class RowSource:
    """The rows of the tensors `pieces`, concatenated. All have the same number of bytes a row. Any thread may read."""

    def __init__(self, pieces: Sequence[Tensor], row_bytes: int, shards: Shards) -> None:
        self.row_bytes = row_bytes
        self._pieces = tuple(pieces)
        self._files = [shards.open(piece.file) for piece in pieces]
        self._starts = [0]
        for piece in pieces:
            self._starts.append(self._starts[-1] + piece.shape[0])
        self.rows = self._starts[-1]

    def read(self, first: int, rows: int, buffer: np.ndarray) -> int:
        """Read rows first .. first + rows - 1 into `buffer`; the offset in it of the first row's first byte.

        `buffer`: uint8, 4096-aligned, at least rows * row_bytes + SLACK bytes. CheckpointError if the file ended meanwhile.
        """
        if rows == 0 or self.row_bytes == 0:
            return 0
        piece = bisect.bisect_right(self._starts, first) - 1
        try:
            if first + rows <= self._starts[piece + 1]:
                begin = self._pieces[piece].offset + (first - self._starts[piece]) * self.row_bytes
                shift = begin % ALIGNMENT
                need = shift + rows * self.row_bytes
                whole = -(-need // ALIGNMENT) * ALIGNMENT
                self._files[piece].read(buffer[:whole], begin - shift, need)
                return shift
            self._read_over_borders(piece, first, rows, buffer[: rows * self.row_bytes].data)
        except (OSError, EOFError) as error:
            tensor = self._pieces[piece]
            raise CheckpointError(f"{tensor.file}: rows of {tensor.name!r} cannot be read: {error}") from error
        return 0

    def _read_over_borders(self, piece: int, first: int, rows: int, view: memoryview) -> None:
        at, end = first, first + rows
        while at < end:
            stop = min(end, self._starts[piece + 1])
            begin = self._pieces[piece].offset + (at - self._starts[piece]) * self.row_bytes
            part = view[(at - first) * self.row_bytes : (stop - first) * self.row_bytes]
            self._files[piece].read_exactly(part, begin)
            at, piece = stop, piece + 1

    def row(self, number: int) -> bytes:
        """The bytes of one row, through the page cache."""
        data = bytearray(self.row_bytes)
        if self.row_bytes:
            piece = bisect.bisect_right(self._starts, number) - 1
            begin = self._pieces[piece].offset + (number - self._starts[piece]) * self.row_bytes
            try:
                self._files[piece].read_exactly(memoryview(data), begin)
            except (OSError, EOFError) as error:
                raise CheckpointError(f"{self._pieces[piece].file}: row {number} cannot be read: {error}") from error
        return bytes(data)


def open_sources(checkpoint: Checkpoint, shards: Shards) -> list[tuple[RowSource, RowSource]]:
    """Codes and scales of each layer's table, readable by row number. Rows without scales have scales of 0 bytes."""
    geometry = checkpoint.geometry
    return [(RowSource(table.codes, geometry.code_bytes, shards), RowSource(table.scales, geometry.scale_bytes, shards))
            for table in checkpoint.tables]
