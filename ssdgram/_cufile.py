"""cuFile as this project calls it: loaded and opened late and within a time, its mode proven by its own counters.

    cufile = load()                    the bindings, or UnavailableError with what to install
    open_driver(cufile)                once per process, only after CUDA has answered
    in_time(call, what)                no call of cuFile is waited for longer than its time
    mode(before, after)                "gds" | "p2p" | "compatibility", from what cuFile counted between two looks

Opening the cuFile driver on a machine without a GPU never returns (seen), so whoever calls this has a CUDA device at hand, and
`ssdgram doctor` asks in a process of its own. It knows nothing of pages or stores. Call forms are those of cuda-bindings 12.9.4
to 13.5, where every structure may be given by its address.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import UnavailableError

INSTALL = "pip install 'ssdgram[gds]' (cuda-bindings, nvidia-cufile and KvikIO), or open with queue='auto'"
PROPERTIES = np.dtype([                                      # CUfileDrvProps_t (cufile.h)
    ("major", np.uint32), ("minor", np.uint32), ("poll_threshold", np.uint64), ("max_direct_io", np.uint64),
    ("status_flags", np.uint32), ("control_flags", np.uint32), ("features", np.uint32), ("max_device_cache", np.uint32),
    ("per_buffer_cache", np.uint32), ("max_pinned", np.uint32), ("max_batch", np.uint32), ("max_batch_timeout_ms", np.uint32)])
BATCH_SUPPORTED, P2P_SUPPORTED = 1 << 1, 1 << 4              # features
ALLOW_COMPAT = 1 << 1                                        # control flags
COUNTERS = {                                                 # cuFile's level-1 statistics -> what they are called here
    "batch_nvfs_submit_ops": "nvfs", "batch_p2p_submit_ops": "p2p", "batch_posix_enqueued_ops": "posix",
    "batch_aio_submit_ops": "aio", "batch_iouring_submit_ops": "io_uring", "batch_mixed_io_submit_ops": "mixed",
    "batch_total_submit_ops": "total"}
GDS, P2P, COMPATIBILITY, UNKNOWN = "gds", "p2p", "compatibility", "unknown"

CALL_TIMEOUT_S = 20.0                                        # for a call of cuFile outside the readers

_lock = threading.Lock()
_opened: dict[int, Any] = {}                                 # id of the bindings -> them, opened


class CallTimedOut(UnavailableError):
    """A call of cuFile did not return in time: it goes on, and what it was given must be kept."""


def in_time(call: Callable[[], Any], what: str, current: Callable[[], AbstractContextManager[Any]] = nullcontext,
            timeout_s: float | None = None) -> Any:
    """The result of `call`, made in a thread of its own inside `current()`; CallTimedOut if it has none in time."""
    outcome: list[Any] = []
    failure: list[BaseException] = []
    limit = CALL_TIMEOUT_S if timeout_s is None else timeout_s

    def run() -> None:
        try:
            with current():
                outcome.append(call())
        except BaseException as error:                       # whatever it is, the caller raises it
            failure.append(error)

    thread = threading.Thread(target=run, name="cufile-call", daemon=True)
    thread.start()
    thread.join(limit)
    if failure:
        raise failure[0]
    if not outcome:
        raise CallTimedOut(f"queue 'gds': {what} has not returned for {limit:g} s; open with queue='auto', see `ssdgram doctor`")
    return outcome[0]


def load() -> Any:
    """The module cuda.bindings.cufile; UnavailableError says what to install. No driver is opened."""
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        raise UnavailableError(f"queue 'gds' needs cuFile's Python bindings, which are not there ({error}): {INSTALL}") from error
    if not hasattr(cufile, "io_params_dtype"):
        raise UnavailableError(f"queue 'gds' needs newer bindings of cuFile (cuda-bindings 12.9.4, 13.0.3 and 13.5 will do): {INSTALL}")
    return cufile


def open_driver(cufile: Any) -> bool:
    """Open the driver (True), once per process (it stays open until the process ends), and have it count. The caller's CUDA device has
    answered, and the caller bounds the time (`in_time`). UnavailableError."""
    with _lock:
        if id(cufile) in _opened:
            return True
        try:
            cufile.driver_open()
        except cufile.cuFileError as error:
            raise UnavailableError(f"queue 'gds': the cuFile driver does not open: {error}; see `ssdgram doctor`") from error
        except RuntimeError as error:                        # the bindings found no libcufile
            raise UnavailableError(f"queue 'gds': libcufile is not there ({_first_line(error)}): {INSTALL}") from error
        if hasattr(cufile, "set_stats_level"):               # cuda-bindings from 13.0 up
            with suppress(cufile.cuFileError, RuntimeError):                 # without counters the mode stays unknown
                cufile.set_stats_level(1)
                cufile.stats_start()
        _opened[id(cufile)] = cufile
        return True


def properties(cufile: Any) -> dict[str, int]:
    """What the opened driver says of itself (CUfileDrvProps_t); empty if it says nothing."""
    record = np.zeros(1, PROPERTIES)
    try:
        cufile.driver_get_properties(record.ctypes.data)
    except cufile.cuFileError:
        return {}
    return {name: int(record[name][0]) for name in PROPERTIES.names or ()}


def counters(cufile: Any) -> dict[str, int]:
    """Batch submissions that cuFile counted since its driver was opened, by path; empty if it does not count."""
    if not hasattr(cufile, "stats_level1_dtype"):
        return {}
    record = np.zeros(1, cufile.stats_level1_dtype)
    try:
        cufile.get_stats_l1(record.ctypes.data)
    except (cufile.cuFileError, RuntimeError):
        return {}
    return {ours: int(record[theirs]["ok"][0]) for theirs, ours in COUNTERS.items() if theirs in (record.dtype.names or ())}


def mode(before: dict[str, int], after: dict[str, int]) -> str:
    """Which path cuFile's counters prove between two looks: "gds" (nvidia-fs), "p2p", "compatibility", or "unknown"."""
    grown = {name for name, count in after.items() if count > before.get(name, 0)}
    if "nvfs" in grown:
        return GDS
    if "p2p" in grown:
        return P2P
    return COMPATIBILITY if grown & {"posix", "aio", "io_uring"} else UNKNOWN


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# ---------------------------------------------------------------- a look from outside


def probe(folder: str) -> dict[str, Any]:
    """What this machine does for a batch of four reads of a scratch file in `folder`: version, properties, counters, mode, or `error`.

    Only for a process that may be ended if it hangs: see `probe_in_child`.
    """
    import torch

    from ssdgram._gds_cuda import CudaDevice
    from ssdgram.queues.gds import GdsQueue
    from ssdgram.queues.state import collect, file_records, new_state, push

    found: dict[str, Any] = {}
    try:
        cufile = load()
        if not torch.cuda.is_available():
            raise UnavailableError(f"torch {torch.__version__} sees no CUDA device")
        memory = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()                             # CUDA has answered
        open_driver(cufile)
        found |= {"version": int(cufile.get_version()), "properties": properties(cufile)}
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            state = new_state(file_records([(direct, file.fileno())], pages=16), depth=8, pages=16)
            before = counters(cufile)
            device = CudaDevice(memory.device, memory.data_ptr(), state, pinned=False)
            queue = GdsQueue(state, "probe", cufile=cufile, device=device)
            queue.start()
            state.pages["number"][:4] = range(4)
            push(state, np.arange(4))
            done = collect(state, 4)
            found["statuses"] = state.pages["status"][done].tolist()
            if len(done) < 4 or any(found["statuses"]):
                raise UnavailableError(f"of four reads by a batch {len(done)} came back, with status {found['statuses']}")
            found |= {"counters": counters(cufile), "mode": mode(before, counters(cufile))}
    except (UnavailableError, OSError, RuntimeError) as error:
        found["error"] = _first_line(error)
    return found


PROBE = ("import json, os, sys; from ssdgram._cufile import probe; print(json.dumps(probe(sys.argv[1])), flush=True); "
         "os._exit(0)")                                      # not by way of destructors: what hangs in a driver stays behind


def probe_in_child(folder: Path, timeout_s: float = 60.0) -> dict[str, Any]:
    """As `probe`, in a process that is ended after `timeout_s`: for those who only want to know."""
    command = [sys.executable, "-c", PROBE, str(folder)]
    package = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"cuFile has not answered for {timeout_s:g} s"}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return {"error": f"the process that asked ended with status {done.returncode}: {done.stderr.strip()[-200:]}"}
