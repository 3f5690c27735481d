"""Files opened by a path that somebody gave: only if they are files, and read whole only up to a bound.

Opening a FIFO waits for its other end, for ever if there is none; reading a device need not end. So whatever is not a
regular file is refused, before a byte of it is read. It knows nothing of what the files hold.
"""

from __future__ import annotations

import errno
import os
import stat


def regular(path: str, flags: int) -> int:
    """Opener for `open(path, ..., opener=regular)`: OSError(EINVAL) if something other than a regular file lies there."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    os.set_blocking(descriptor, True)
    return descriptor


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of a regular file; OSError(EFBIG) if it has more than `most`."""
    with open(path, "rb", opener=regular) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data
