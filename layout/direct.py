"""Files read and written past the page cache (O_DIRECT), with the buffered path behind it where a file system refuses.

Conversion and verification stream tables of hundreds of GB; through the page cache that would push out everything else and
cost a copy. Buffers, offsets and lengths are multiples of 4096 here; a short or refused transfer is finished through the
buffered descriptor, so callers see either all bytes or an error. It knows nothing of rows or pages.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from pathlib import Path

import numpy as np

log = logging.getLogger("ssdgram")
ALIGNMENT = 4096
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)                # how a file system without O_DIRECT answers
_noticed: set[tuple[int, str]] = set()


def aligned_buffer(size: int) -> np.ndarray:
    """`size` zero bytes, uint8, at a multiple of 4096; freed with the array."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


class DirectFile:
    """A file opened with O_DIRECT where possible, and a second, buffered descriptor. Any thread may read or write.

    `writable`: created if missing, and its whole `size` is reserved on the disk at once.
    """

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = False, size: int = 0) -> None:
        self.path = Path(path)
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        self._buffered = os.open(self.path, flags, 0o644)
        self._direct = -1
        self._lock = threading.Lock()
        try:
            if writable:
                os.ftruncate(self._buffered, size)
                _reserve(self._buffered, size)
            self.size = os.fstat(self._buffered).st_size
            self._direct = self._open_direct(flags)
        except OSError:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._direct >= 0

    def read(self, buffer: np.ndarray, offset: int, need: int) -> None:
        """Read from `offset` into `buffer` (aligned, as `offset` is): at least `need` bytes, or EOFError if the file ends."""
        view = buffer.data
        done = 0
        while done < need:
            aligned = self.direct and done % ALIGNMENT == 0
            try:
                count = os.preadv(self._direct if aligned else self._buffered, [view[done:]], offset + done)
            except OSError as error:
                if not (aligned and error.errno in REFUSED):
                    raise
                self._give_up_direct()
                continue
            if count == 0:
                raise self._too_short(offset + need)
            done += count

    def read_exactly(self, view: memoryview, offset: int) -> None:
        """Fill `view` (any alignment) from `offset` through the page cache, or EOFError."""
        done = 0
        while done < len(view):
            count = os.preadv(self._buffered, [view[done:]], offset + done)
            if count == 0:
                raise self._too_short(offset + len(view))
            done += count

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Write all of `buffer` (aligned address and length) at `offset`."""
        view = buffer.data
        done = 0
        while done < len(view):
            aligned = self.direct and done % ALIGNMENT == 0
            try:
                done += os.pwritev(self._direct if aligned else self._buffered, [view[done:]], offset + done)
            except OSError as error:
                if not (aligned and error.errno in REFUSED):
                    raise
                self._give_up_direct()

    def sync(self) -> None:
        """fsync: everything written is on the medium."""
        os.fsync(self._buffered)

    def close(self) -> None:
        """Close both descriptors; once is enough."""
        for name in ("_direct", "_buffered"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def _open_direct(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
        _notice(self.path, self._buffered)
        return -1

    def _too_short(self, end: int) -> EOFError:
        return EOFError(f"{self.path}: has {os.fstat(self._buffered).st_size} bytes, expected at least {end}")

    def _give_up_direct(self) -> None:
        """The file system opened the file with O_DIRECT and refuses the transfer: go on buffered.

        The descriptor stays open (another thread may be using its number) until `close`, under the buffered one's meaning.
        """
        with self._lock:
            if self._direct >= 0:
                os.dup2(self._buffered, self._direct)        # same number, no O_DIRECT: safe for threads in the middle of a call
                _notice(self.path, self._buffered)


def _notice(path: Path, descriptor: int) -> None:
    """Say once per file system that its files go through the page cache."""
    key = (os.fstat(descriptor).st_dev, "O_DIRECT")
    if key not in _noticed:
        _noticed.add(key)
        log.warning("%s: this file system refuses O_DIRECT: its files go through the page cache, which is slower and fills it",
                    path.parent)


def _reserve(descriptor: int, size: int) -> None:
    """Reserve disk blocks for the whole file, so that a full disk shows now; where there is no such call, nothing."""
    if size == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if fallocate is None:
        return
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while fallocate(descriptor, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        raise OSError(number, os.strerror(number))
