"""One block of shared memory (memfd) from which every array of a store is cut, in one pass.

    arena = Arena([("slots", SLOT, (n,)), ...])     sizes are known before anything is allocated
    arena["slots"]                                  NumPy view, 4096-aligned

The pages are handed out by the kernel when they are first touched. The block is not inherited by forked children
(MADV_DONTFORK): a child that used it would read a parent's memory in mid-change. It knows nothing of what it holds.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable

import numpy as np

Spec = tuple[str, np.dtype | type, tuple[int, ...]]
ALIGNMENT = 4096
MADV_REMOVE, MADV_DONTFORK, MADV_HUGEPAGE = 9, 10, 14


def rounded(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def size_of(specs: Iterable[Spec]) -> int:
    """Bytes that an arena of these arrays takes."""
    return sum(rounded(math.prod(shape) * np.dtype(dtype).itemsize) for _, dtype, shape in specs)


class Arena:
    """Arrays in one memfd mapping. `fd` may be handed to another process, `offsets` say where each array lies."""

    def __init__(self, specs: list[Spec], name: str = "ssdgram", huge_pages: bool = False) -> None:
        self.size = max(ALIGNMENT, size_of(specs))
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size)
            self._map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(self.fd)
            raise
        whole = np.frombuffer(self._map, np.uint8)
        self.address = whole.ctypes.data
        self._advise(MADV_DONTFORK)
        self.huge_pages = huge_pages and self._advise(MADV_HUGEPAGE)
        self.offsets: dict[str, int] = {}
        self._arrays: dict[str, np.ndarray] = {}
        offset = 0
        for key, dtype, shape in specs:
            length = math.prod(shape) * np.dtype(dtype).itemsize
            self.offsets[key] = offset
            self._arrays[key] = whole[offset:offset + length].view(dtype).reshape(shape)
            offset += rounded(length)

    def _advise(self, advice: int) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), advice) == 0)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._arrays[key]

    def forget(self) -> None:
        """In a forked child: give up the descriptor; the mapping was not inherited. Nor may it be unmapped here: something else
        of the child may lie there by then, so the object that would do it lives for ever."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        self._give_up_descriptor()

    def close(self) -> None:
        """Give the memory back to the system, views of it or not: they read zeros from now on. Nobody writes to it any more."""
        self._advise(MADV_REMOVE)
        self._give_up_descriptor()
        self._arrays.clear()

    def _give_up_descriptor(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
