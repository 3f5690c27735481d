"""Facts about this machine, read from /proc, /sys, limits and one scratch file: CPUs, memory, file systems, io_uring.

Facts only, no judgement: what they mean for speed is ssdgram.doctor's business. Nothing is changed, no GPU and no cuFile
driver is opened, and what cannot be read is None or empty, never an error. `root` is where proc/, sys/ and dev/ are
looked for, so that tests can describe any machine.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path("/")


def read_text(path: Path) -> str:
    """The file's text, or an empty string if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def version_of(*packages: str) -> str | None:
    """"package NAME VERSION" of the first of these distributions that is installed, or None. Imports nothing."""
    for package in packages:
        try:
            return f"package {package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return None


# ---------------------------------------------------------------- CPUs and memory


def _own_cgroups(root: Path) -> Iterator[tuple[list[str], list[Path]]]:
    """(controllers, folders) of this process's cgroups; the tightest limit of a cgroup and those above it holds.

    cgroup v2 has no controllers in its line and is mounted at the top; v1 has a mount for each set of controllers. Inside
    a container the path may not exist below the mount: the mount itself is then the container's.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, text = rest.partition(":")
        controllers = names.split(",") if names else []
        path = Path(text.lstrip("/"))
        below = [path, *path.parents]
        mounts = [mount / name for name in dict.fromkeys([names, *controllers])] if controllers else [mount]
        yield controllers, [place / inner for place in mounts for inner in dict.fromkeys(below)]


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the cgroups allow, or None without a quota (cgroup v1 and v2)."""
    quotas = []
    for controllers, folders in _own_cgroups(root):
        for folder in folders:
            if not controllers:
                words = read_text(folder / "cpu.max").split()
            elif "cpu" in controllers:
                words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            else:
                break
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes of memory that the cgroups allow, or None without a limit (cgroup v1 and v2)."""
    limits = []
    for controllers, folders in _own_cgroups(root):
        if controllers and "memory" not in controllers:
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        texts = [read_text(folder / name).strip() for folder in folders]
        limits += [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]    # v1 writes "none" as a huge number
    return min(limits, default=None)


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Bytes of memory in the machine, and of these what can be had without swapping; 0 where it is not told."""
    values = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values.get("MemTotal", 0), values.get("MemAvailable", 0)


def has_capability(number: int, root: Path = ROOT) -> bool:
    """Whether the process has this Linux capability in effect (14: CAP_IPC_LOCK)."""
    for line in read_text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


# ---------------------------------------------------------------- io_uring

_SETUP = 425                                                 # io_uring_setup, the same number on x86_64 and aarch64
SINGLE_ISSUER, DEFER_TASKRUN, NO_SQARRAY = 1 << 12, 1 << 13, 1 << 16


def io_uring_error(flags: int = 0) -> int:
    """0 if the kernel makes a small ring with these set-up flags for this process, else the errno of its refusal."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = (ctypes.c_uint32 * 30)()                    # struct io_uring_params: 120 bytes, flags in the third word
    parameters[2] = flags
    ring = libc.syscall(ctypes.c_long(_SETUP), ctypes.c_uint(2), ctypes.byref(parameters))
    if ring < 0:
        return ctypes.get_errno()
    os.close(ring)
    return 0


def nvidia_fs(root: Path = ROOT) -> bool:
    """Whether the kernel module of GPUDirect Storage is loaded."""
    return (root / "proc/driver/nvidia-fs").exists()


def cufile() -> str | None:
    """Where cuFile would come from; it is not loaded: on a machine without a GPU opening its driver does not return."""
    name = version_of("nvidia-cufile", "nvidia-cufile-cu12")
    if name is None:
        library = ctypes.util.find_library("cufile")
        name = f"system library {library}" if library else None
    return name


# ---------------------------------------------------------------- file systems and drives


def file_system(folder: Path, root: Path = ROOT) -> tuple[str, str]:
    """(type, source) of the file system that `folder` is on, from mountinfo; ("unknown", "unknown") where it is not told."""
    place, best, answer = str(folder.resolve()), -1, ("unknown", "unknown")
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        words, tail = left.split(), right.split()
        if len(words) < 5 or len(tail) < 2:
            continue
        mount = words[4].replace("\\040", " ")
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:                    # a later mount on the same place hides the earlier
            best, answer = len(mount), (tail[0], tail[1])
    return answer


def direct_io_error(folder: Path) -> int | None:
    """None if a 4096-byte O_DIRECT read works in `folder`, else its errno; -1 if no scratch file could be made there."""
    try:
        number, name = tempfile.mkstemp(dir=folder, prefix=".ssdgram-doctor-")
    except OSError:
        return -1
    try:
        os.write(number, bytes(4096))
        file = os.open(name, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 4096) as page:                # page aligned, as O_DIRECT wants it
                os.preadv(file, [page], 0)
        finally:
            os.close(file)
    except OSError as error:
        return error.errno or 0
    finally:
        os.close(number)
        os.unlink(name)
    return None


def block_device(folder: Path, root: Path = ROOT) -> Path | None:
    """The /sys folder of the whole device below `folder`, or None (network, memory, overlay)."""
    number = os.stat(folder).st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not link.exists():
        return None
    device = link.resolve()
    return next((place for place in (device, device.parent) if (place / "queue").is_dir()), None)


def chosen(path: Path) -> str:
    """The value in brackets of a /sys choice such as "always [madvise] never", or "unknown"."""
    text = read_text(path)
    return text.partition("[")[2].partition("]")[0] or "unknown"
