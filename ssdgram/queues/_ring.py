"""One io_uring instance: made, mapped and registered by the three raw system calls; used by nobody yet.

    ring fd ─ mmap 0           ─► words  int32 view: heads, tails, masks (at the offsets that the kernel told)
            │                     cqes   int64 view of 16-byte completions: user data, result | flags << 32
            └ mmap 0x10000000  ─► sqes   int64 view of 64-byte submissions

Raw calls rather than liburing's: the ABI of the calls is the kernel's and stable, that of liburing's structs belongs to the
version installed; they need no package, and are the same on Arm. The ring is made disabled, so that whoever opens the
queue meets every failure of set-up; the reader's thread then enables it and is from there on its only issuer.
A ring is not inherited: its mappings are not copied on fork and the child closes its descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref

import numpy as np

from ssdgram.queues._calls import SYS_IO_URING_REGISTER, SYS_IO_URING_SETUP

SETUP_CQSIZE, SETUP_R_DISABLED, SETUP_SUBMIT_ALL, SETUP_COOP_TASKRUN = 1 << 3, 1 << 6, 1 << 7, 1 << 8
SETUP_SINGLE_ISSUER, SETUP_DEFER_TASKRUN, SETUP_NO_SQARRAY = 1 << 12, 1 << 13, 1 << 16
FEATURE_SINGLE_MMAP, FEATURE_EXT_ARG = 1 << 0, 1 << 8
REGISTER_BUFFERS, REGISTER_FILES, REGISTER_ENABLE_RINGS = 0, 2, 12
FLAG_NAMES = {SETUP_SUBMIT_ALL: "SUBMIT_ALL", SETUP_COOP_TASKRUN: "COOP_TASKRUN", SETUP_SINGLE_ISSUER: "SINGLE_ISSUER",
              SETUP_DEFER_TASKRUN: "DEFER_TASKRUN", SETUP_NO_SQARRAY: "NO_SQARRAY"}
_SQES_OFFSET = 0x10000000
_PROT_READ_WRITE, _MAP_SHARED_POPULATE, _MADV_DONTFORK = 3, 0x8001, 10

_OFFSETS = [(name, np.uint32) for name in ("head", "tail", "mask", "entries")]
PARAMS = np.dtype([
    ("sq_entries", np.uint32), ("cq_entries", np.uint32), ("flags", np.uint32), ("sq_thread_cpu", np.uint32),
    ("sq_thread_idle", np.uint32), ("features", np.uint32), ("wq_fd", np.uint32), ("reserved", np.uint32, 3),
    ("sq", [*_OFFSETS, ("flags", np.uint32), ("dropped", np.uint32), ("array", np.uint32), ("reserved", np.uint32),
            ("user_address", np.uint64)]),
    ("cq", [*_OFFSETS, ("overflow", np.uint32), ("cqes", np.uint32), ("flags", np.uint32), ("reserved", np.uint32),
            ("user_address", np.uint64)]),
])                                                           # struct io_uring_params, 120 bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def flag_sets() -> list[int]:
    """Set-up flags to try in turn: all, then without the newest flag that is left (6.6, 6.1, 6.0, 5.19, 5.18)."""
    base = SETUP_CQSIZE | SETUP_R_DISABLED
    single = base | SETUP_SUBMIT_ALL | SETUP_SINGLE_ISSUER
    return [single | SETUP_DEFER_TASKRUN | SETUP_NO_SQARRAY, single | SETUP_DEFER_TASKRUN, single | SETUP_COOP_TASKRUN,
            base | SETUP_SUBMIT_ALL | SETUP_COOP_TASKRUN, base | SETUP_SUBMIT_ALL, base]


def _call(number: int, *arguments: int) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments]))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


class Ring:
    """A disabled ring of at least that many entries. Raises OSError as the kernel refused it (EPERM, ENOSYS, ENOMEM, …)."""

    def __init__(self, entries: int, completions: int) -> None:
        self.fd, self._maps = -1, list[tuple[int, int]]()
        self._pid = os.getpid()
        params = np.zeros(1, PARAMS)
        for flags in flag_sets():
            params[:] = np.zeros(1, PARAMS)
            params["flags"], params["cq_entries"] = flags, completions
            try:
                self.fd = _call(SYS_IO_URING_SETUP, entries, params.ctypes.data)
                break
            except OSError as error:
                if error.errno != 22 or flags == flag_sets()[-1]:    # EINVAL: a flag that this kernel does not know
                    raise
        found = params[0]
        _rings.add(self)
        try:
            if int(found["features"]) & (FEATURE_SINGLE_MMAP | FEATURE_EXT_ARG) != FEATURE_SINGLE_MMAP | FEATURE_EXT_ARG:
                raise OSError(38, "the kernel's io_uring is older than 5.11: it lacks waits with a time-out")
            self._map(found)
        except OSError:
            self.close()
            raise

    def _map(self, found: np.void) -> None:
        self.flags = int(found["flags"])
        self.sq_entries, self.cq_entries = int(found["sq_entries"]), int(found["cq_entries"])
        sq, cq = found["sq"], found["cq"]
        array_at = 0 if self.flags & SETUP_NO_SQARRAY else int(sq["array"])
        length = max(int(cq["cqes"]) + 16 * self.cq_entries, array_at + 4 * self.sq_entries)
        base = self._mmap(length, 0)
        self.words = _view(base, length // 4, np.int32)
        self.cqes = _view(base + int(cq["cqes"]), 2 * self.cq_entries, np.int64)
        self.sqes = _view(self._mmap(64 * self.sq_entries, _SQES_OFFSET), 8 * self.sq_entries, np.int64)
        if array_at:                                         # submissions are taken in order: entry k is SQE k
            self.words[array_at // 4:array_at // 4 + self.sq_entries] = np.arange(self.sq_entries)
        self.sq_tail_at, self.cq_head_at, self.cq_tail_at = (int(at) // 4 for at in (sq["tail"], cq["head"], cq["tail"]))

    def _mmap(self, length: int, offset: int) -> int:
        address = _libc.mmap(None, length, _PROT_READ_WRITE, _MAP_SHARED_POPULATE, self.fd, offset)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the ring cannot be mapped")
        self._maps.append((address, length))
        _libc.madvise(address, length, _MADV_DONTFORK)
        return int(address)

    def register_files(self, fds: np.ndarray) -> None:
        """Register descriptors (int32) as fixed files 0, 1, …"""
        _call(SYS_IO_URING_REGISTER, self.fd, REGISTER_FILES, fds.ctypes.data, len(fds))

    def register_buffer(self, address: int, length: int) -> None:
        """Register that memory as fixed buffer 0."""
        vector = np.array([address, length], np.int64)
        _call(SYS_IO_URING_REGISTER, self.fd, REGISTER_BUFFERS, vector.ctypes.data, 1)

    def enable(self) -> None:
        """Enable the ring; the calling thread becomes its only issuer."""
        _call(SYS_IO_URING_REGISTER, self.fd, REGISTER_ENABLE_RINGS, 0, 0)

    @property
    def flag_names(self) -> str:
        """The flags in effect, for the log."""
        return "|".join(name for flag, name in FLAG_NAMES.items() if self.flags & flag) or "no flags"

    def close(self) -> None:
        """Unmap and close. Nobody may be using the arrays. Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        self.words = self.cqes = self.sqes = np.empty(0, np.int64)
        while self._maps:
            _libc.munmap(*self._maps.pop())
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _view(address: int, count: int, dtype: type) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(dtype)


def _close_in_child() -> None:
    for ring in list(_rings):
        if ring.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(ring.fd)
            ring.fd = -1


os.register_at_fork(after_in_child=_close_in_child)
