"""Facts that every benchmark's result carries: processor, kernel, memory, drive, versions; and where results are written.

A result without them cannot be compared with another. Nothing here identifies the machine: no host name, no paths.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ssdgram import machine
from ssdgram.errors import UnavailableError

_SOURCE = Path(__file__).resolve().parent                    # bench/ of a checkout, or a folder of the installed package
_CHECKOUT = (_SOURCE.parent / "pyproject.toml").is_file()
RESULTS = (_SOURCE if _CHECKOUT else Path.cwd() / "bench") / "results"      # nobody looks for results inside site-packages
PACKAGES = ("numpy", "numba", "torch", "triton", "libcachesim", "tokenizers")


def _match(pattern: str, path: str) -> str:
    found = re.search(pattern, machine.read_text(Path(path)), re.MULTILINE)
    return found.group(1).strip() if found else "unknown"


def _program(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def drive(folder: Path) -> str:
    """What `folder` lies on: file system, device and its model as far as the kernel tells."""
    kind, _ = machine.file_system(folder)
    device = machine.block_device(folder)
    if device is None:
        return kind
    model = machine.read_text(device / "device/model").strip()
    return f"{kind} on {device.name}" + (f" ({model})" if model else "")


def facts(folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """CPU, kernel, memory, versions, date, commit; with `folder`, also the drive that it lies on."""
    total, available = machine.memory()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _program("git", "-C", str(_SOURCE), "rev-parse", "--short", "HEAD") if _CHECKOUT else None,
        "cpu": _match(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo"),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_quota": machine.cpu_quota(),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release().split("-")[0],
        "architecture": platform.machine(),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(available / 2**30, 1),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if folder is not None:
        result["drive"] = drive(Path(folder))
    return result


def write_results(name: str, payload: dict[str, Any]) -> Path:
    """Write `payload` with the machine's facts (unless it brings its own) to NAME.json in RESULTS: bench/results of the checkout
    that this runs from, of the current folder if the package is installed. The path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"facts": facts(), **payload}, indent=1, sort_keys=False) + "\n")
    return path


def need_cuda() -> None:
    """UnavailableError unless torch sees a CUDA device: said before anything is made or measured."""
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("no CUDA device: this benchmark measures an NVIDIA GPU; `ssdgram doctor` says what is missing")
