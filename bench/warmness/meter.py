"""What lookups cost besides time: processor seconds, page faults, context switches, bytes from the drive, page cache, memory.

Counters are those of the whole process (the store's threads belong to it), taken before and after a block of lookups that
nothing else runs beside. `cached_bytes` asks the kernel what it holds of files: by cachestat where there is one (Linux 6.5), else
by mincore. It knows nothing of placements.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ssdgram.bench import mapped

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
_CACHESTAT = 451                                             # the same number on x86-64 and Arm


@dataclass(frozen=True)
class Counters:
    """Of this process since it started; the difference of two is what happened between them."""

    cpu_s: float = 0.0
    minor_faults: int = 0
    major_faults: int = 0
    voluntary_switches: int = 0
    involuntary_switches: int = 0
    drive_bytes: int = 0                                     # that this process caused to be read from drives

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def counters() -> Counters:
    """The counters now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Counters(usage.ru_utime + usage.ru_stime, usage.ru_minflt, usage.ru_majflt, usage.ru_nvcsw, usage.ru_nivcsw, _drive_bytes())


def _drive_bytes() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


def resident_memory() -> int:
    """Bytes of memory that the process holds now (RSS)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of the files that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    total, left = 0, []
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
            status = libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(descriptor), ctypes.byref(span), ctypes.byref(found),
                                  ctypes.c_uint(0))
        finally:
            os.close(descriptor)
        if status == 0:
            total += int(found[0]) * mapped.PAGE
        else:
            left.append(path)
    return total + mapped.resident(left)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99, max and mean."""
    array = np.fromiter(values, np.float64)
    return {name: float(np.percentile(array, share)) for name, share in PERCENTILES.items()} | {"mean": float(array.mean())}
