"""The memory from which every array of a store is cut, in one pass: a memfd block, and one of the planner's own.

    arena = Arena([("slots", SLOT, (n,)), ...])     sizes are known before anything is allocated
    arena["slots"]                                  NumPy view, 4096-aligned
    mapped = Mapped(fd, size, writable=False)       what another process's arena shares

What other processes or a GPU may look at lies in the memfd block. The rest is anonymous memory, because only that comes in
huge pages everywhere: planning is random access over it, and with small pages every access would miss the TLB. Pages are
handed out when they are first touched. Neither block is inherited by forked children (MADV_DONTFORK): a child would read a
parent's memory in mid-change. It knows nothing of what the arrays hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ssdgram import _numa

Spec = tuple[str, np.dtype | type, tuple[int, ...]]
ALIGNMENT = 4096
HUGE_PAGE = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MADV_DONTNEED, MADV_REMOVE, MADV_DONTFORK, MADV_HUGEPAGE = 4, 9, 10, 14


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def rounded(size: int, to: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def size_of(specs: Iterable[Spec]) -> int:
    """Bytes that an arena of these arrays takes."""
    return sum(rounded(math.prod(shape) * np.dtype(dtype).itemsize) for _, dtype, shape in specs)


class Arena:
    """Arrays in a memfd mapping, and those named in `private` in anonymous memory of huge pages where the system has them.

    `fd` may be handed to another process; `offsets` say where each shared array lies.
    """

    def __init__(self, specs: Sequence[Spec], name: str = "ssdgram", private: Collection[str] = ()) -> None:
        shared = [spec for spec in specs if spec[0] not in private]
        own = [spec for spec in specs if spec[0] in private]
        self.size = max(ALIGNMENT, size_of(shared))
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._file, self._kept = os.fstat(self.fd), False
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)   # who maps it need not fear that its end moves
            self._map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED)
            self._own = mmap.mmap(-1, size_of(own) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            os.close(self.fd)
            raise
        _mappings.update((self._map, self._own))
        whole, rest = np.frombuffer(self._map, np.uint8), np.frombuffer(self._own, np.uint8)
        rest = rest[-rest.ctypes.data % HUGE_PAGE:]
        self.address = whole.ctypes.data
        self._regions = ((self.address, self.size, MADV_REMOVE), (rest.ctypes.data, size_of(own), MADV_DONTNEED))
        for address, size, _ in self._regions:
            _advise(address, size, MADV_DONTFORK)
        self.huge_pages = _advise(rest.ctypes.data, size_of(own), MADV_HUGEPAGE)
        self._arrays: dict[str, np.ndarray] = _cut(whole, shared) | _cut(rest, own)
        self.offsets = {spec[0]: self._arrays[spec[0]].ctypes.data - self.address for spec in shared}

    def __getitem__(self, key: str) -> np.ndarray:
        return self._arrays[key]

    def prefer_node(self, node: int) -> bool:
        """Have the pages, none of which was touched yet, taken from a NUMA node. Whether the kernel agreed."""
        return all(_numa.prefer(address, size, node) for address, size, _ in self._regions)

    def forget(self) -> None:
        """In a forked child: give up the descriptors. The mappings were not inherited (see `_keep_in_child`)."""
        if self.fd >= 0:
            _close_all_of(self._file)
            self.fd = -1

    def close(self) -> None:
        """Give the memory back to the system, views of it or not: they read zeros from now on. Nobody writes to it any more."""
        for address, size, advice in self._regions:
            if not (self._kept and advice == MADV_REMOVE):
                _advise(address, size, advice)
        self._give_up_descriptor()
        self._arrays.clear()

    def keep_shared(self) -> None:
        """`close` leaves the memfd block as it is: other processes may be reading it. It goes with the last mapping."""
        self._kept = True

    def read_only(self) -> int:
        """A new descriptor of the memfd block by which nobody can map it for writing. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_descriptor(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Mapped:
    """The memfd block of another process's arena: `memory`, uint8, as long as this object or a view of it lives.

    OSError if the descriptor is of no sealed memfd of exactly that size: one that may shrink would kill who reads it.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self._file = os.fstat(fd)
        there, seals = self._file.st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if there != size or seals & SEALS != SEALS:
            raise OSError(f"shared memory of {there} bytes with seals {seals:#x}: expected {size} bytes, sealed ({SEALS:#x})")
        self.size, self.writable = size, writable
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        _mappings.add(mapping)
        self.address = np.frombuffer(mapping, np.uint8).ctypes.data
        _advise(self.address, size, MADV_DONTFORK)
        block = (ctypes.c_uint8 * size).from_address(self.address)           # one type of array, read-only memory or not, for ...
        vars(block)["owner"] = mapping                       # compiled code; it keeps the mapping
        self.memory: np.ndarray = np.frombuffer(memoryview(block), np.uint8)

    def forget(self) -> None:
        """In a forked child: give up the descriptor that the mapping has; the mapping itself was not inherited."""
        _close_all_of(self._file)

    def cut(self, specs: Iterable[Spec], offset: int = 0) -> dict[str, np.ndarray]:
        """The arrays that an arena with these shared specs has, from byte `offset` on."""
        return _cut(self.memory[offset:], specs)


def _close_all_of(file: os.stat_result) -> None:
    """Close every descriptor of that file; a mapping has one of its own."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), file):
                os.close(number)


def _cut(memory: np.ndarray, specs: Iterable[Spec]) -> dict[str, np.ndarray]:
    """The arrays of `specs`, one behind the other in `memory` (uint8)."""
    arrays, offset = {}, 0
    for key, dtype, shape in specs:
        length = math.prod(shape) * np.dtype(dtype).itemsize
        arrays[key] = memory[offset:offset + length].view(dtype).reshape(shape)
        offset += rounded(length)
    return arrays


def _advise(address: int, size: int, advice: int) -> bool:
    """madvise on whole pages; whether the system took the advice."""
    if size == 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) == 0)


def _keep_in_child() -> None:
    """A mapping that was not inherited must not be unmapped by the child either, now that something of its own may lie there:
    the objects that would do it, of open stores and of closed ones, live for ever."""
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_in_child)
