"""What the choice of a queue depends on: whether io_uring may be used, and how many processors there are. Changes nothing.

Facts about the machine come from ssdgram.machine, the words for a refusal from ssdgram.doctor, so that the log line of a
store and the doctor say the same.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ssdgram import machine
from ssdgram.doctor import why_refused
from ssdgram.queues._ring import Ring


@dataclass(frozen=True)
class Finding:
    """ok: io_uring may be used; found: with which flags, or what is in the way and what to do."""

    ok: bool
    found: str


def io_uring(root: Path = machine.ROOT) -> Finding:
    """Whether this process may make a ring as the queue would make it."""
    try:
        ring = Ring(8, 16)
    except OSError as error:
        return Finding(False, f"{error.strerror}: {why_refused(error.errno or 0, root)}")
    flags = ring.flag_names
    ring.close()
    return Finding(True, f"kernel {platform.release()}, {flags}")


def cpu_count(root: Path = machine.ROOT) -> int:
    """Processors that this process may use: its CPU set, cut to its cgroups' quota (rounded up), at least 1."""
    quota, allowed = machine.cpu_quota(root), len(os.sched_getaffinity(0))
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))
