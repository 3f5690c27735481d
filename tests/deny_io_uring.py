"""Run a command with io_uring refused (EPERM), as container run-times refuse it: python deny_io_uring.py COMMAND ...

`deny` puts a real seccomp filter on the calling thread, or with every_thread on all threads of the process; no root needed.
"""

import ctypes
import os
import platform
import sys

SETUP, ENTER, REGISTER = 425, 426, 427
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06       # BPF: LD|W|ABS, JMP|JEQ|K, RET|K
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1                 # SECCOMP_RET_ERRNO with EPERM
_NO_NEW_PRIVILEGES, _SECCOMP_SET_MODE_FILTER, _EVERY_THREAD = 38, 1, 1
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def deny(calls=(SETUP, ENTER, REGISTER), every_thread=False):
    """Have the kernel answer these system calls with EPERM from now on. Cannot be undone."""
    steps = [_Instruction(_LOAD_WORD, 0, 0, 0)]              # the system call's number
    for left, call in zip(range(len(calls), 0, -1), calls, strict=True):
        steps.append(_Instruction(_JUMP_IF_EQUAL, left, 0, call))
    steps += [_Instruction(_RETURN, 0, 0, _ALLOW), _Instruction(_RETURN, 0, 0, _REFUSE)]
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.syscall(_SYS_SECCOMP[platform.machine()], _SECCOMP_SET_MODE_FILTER, _EVERY_THREAD if every_thread else 0,
                    ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    deny()
    os.execvp(sys.argv[1], sys.argv[1:])
