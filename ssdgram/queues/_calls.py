"""System call numbers, errno values and struct constants that the queues need, for x86-64 and AArch64.

Only numbers: it makes no call and knows nothing of pages or rings. A machine that is neither was refused by `_compiled`.
"""

from __future__ import annotations

import platform

SYS_READ, SYS_WRITE, SYS_PREAD = {"x86_64": (0, 1, 17), "aarch64": (63, 64, 67)}[platform.machine()]
SYS_IO_URING_SETUP, SYS_IO_URING_ENTER, SYS_IO_URING_REGISTER = 425, 426, 427          # the same on both

EINTR, EAGAIN, ENOMEM, EBUSY, ETIME = 4, 11, 12, 16, 62

PAGE_BYTES = 4096

# io_uring_enter
ENTER_GETEVENTS, ENTER_EXT_ARG = 1, 8
# operations and SQE flags
OP_READ_FIXED, OP_READ = 4, 22
SQE_FIXED_FILE = 1
