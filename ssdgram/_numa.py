"""Memory and threads on the GPU's NUMA node, where the machine has several and says which that is.

A GPU reads memory of another processor's node over the link between the two, which is slower and shared. `node_of_gpu` asks sysfs,
`prefer` asks the kernel to take a region's pages from a node as they are touched (mbind, MPOL_PREFERRED: from elsewhere when that
is full). It knows no store. Invariant: nothing here fails an open; what cannot be told or done is left to the system.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())


def node_of_gpu(bus_id: str, root: Path = Path("/")) -> int | None:
    """The node of the PCI device "0000:3b:00.0" if this machine has several nodes and says so, else None."""
    if len(nodes(root)) < 2:
        return None
    try:
        number = int((root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return number if number in nodes(root) else None


def nodes(root: Path = Path("/")) -> list[int]:
    """Numbers of this machine's nodes; empty if it tells none."""
    found = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sorted(int(path.name[4:]) for path in found if path.name[4:].isdigit())


def cpus_of(node: int, root: Path = Path("/")) -> tuple[int, ...]:
    """CPUs of a node that this process may use; empty if that cannot be told."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [part.split("-") for part in text.split(",") if part]
        cpus = {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return ()
    return tuple(sorted(cpus & os.sched_getaffinity(0)))


def prefer(address: int, size: int, node: int) -> bool:
    """Have pages of [address, address + size) that are not there yet taken from the node. `address`: of a page. Whether the kernel
    agreed."""
    if _MBIND is None or node < 0:
        return False
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << (node % 64)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    arguments = (ctypes.c_long(_MBIND), ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(MPOL_PREFERRED), words,
                 ctypes.c_ulong(64 * len(words) + 1), ctypes.c_uint(0))
    return bool(call(*arguments) == 0)
