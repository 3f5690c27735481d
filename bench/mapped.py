"""The baseline without SSDGram: rows gathered from a memory map of the checkpoint, page cache dropped before.

`MappedTables` maps codes and scales of every layer and gathers with NumPy, plainly or with MADV_RANDOM (no read-ahead: each
fault reads one page). `drop` asks the kernel to forget files (posix_fadvise, no privileges needed; nothing may have them
mapped), `resident` counts what it still holds (mincore). It gets its row ids for nothing; hashing is not in its time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.layout.checkpoint import open_checkpoint
from ssdgram.layout.safetensors import Tensor

PAGE = mmap.PAGESIZE


def drop(paths: Iterable[Path]) -> None:
    """Have the kernel forget the contents of the files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)                         # dirty pages are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(paths: Iterable[Path]) -> int:
    """Bytes of the files that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in paths:
        size = path.stat().st_size
        if size == 0:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            present = np.zeros(-(-size // PAGE), np.uint8)
            status = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(present.ctypes.data))
            del view
            if status != 0:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            total += int(np.count_nonzero(present & 1)) * PAGE
    return total


def files_below(folder: Path) -> list[Path]:
    """Every regular file of a checkpoint or store."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


class MappedTables:
    """The tables of an Engram checkpoint as memory maps. Also a context manager that unmaps them."""

    def __init__(self, checkpoint: Path, *, random: bool = False) -> None:
        self._maps: list[mmap.mmap] = []
        opened = open_checkpoint(checkpoint)
        self.geometry = opened.geometry
        advice = mmap.MADV_RANDOM if random else mmap.MADV_NORMAL
        self._tables = [(self._map(table.codes[0], advice), self._map(table.scales[0], advice)) for table in opened.tables]

    def _map(self, tensor: Tensor, advice: int) -> np.ndarray:
        with open(tensor.file, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapping.madvise(advice)
        self._maps.append(mapping)
        return np.frombuffer(mapping, np.uint8, tensor.shape[0] * tensor.shape[1], tensor.offset).reshape(tensor.shape)

    def gather(self, ids: np.ndarray) -> list[np.ndarray]:
        """Rows of ids int64 [T, L, columns], by layer: uint8 [T, columns, row_bytes], codes then scales."""
        results = []
        for layer, (codes, scales) in enumerate(self._tables):
            wanted = ids[:, layer]
            rows = np.empty((*wanted.shape, self.geometry.row_bytes), np.uint8)
            rows[..., :self.geometry.code_bytes] = codes[wanted]
            rows[..., self.geometry.code_bytes:] = scales[wanted]
            results.append(rows)
        return results

    def close(self) -> None:
        """Unmap."""
        self._tables.clear()
        for mapping in self._maps:
            mapping.close()

    def __enter__(self) -> MappedTables:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
