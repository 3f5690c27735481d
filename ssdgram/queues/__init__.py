"""Queues: how pages get from the drive to their slots. One interface, three back ends, a reasoned choice.

    queue = choose(name, state, affinity=None)     "uring" | "threads" | "auto" | "gds"; arrays as in ssdgram._state
    queue.start(); ... wake_readers(state) after every push ...
    state.control[STOP] = 1; queue.wake_all(); queue.join(5); queue.close()

The hand-over of pages (`_handoff`), the tries of a page (`_tries`) and the fault injector (`_faults`) are the same compiled
code under all. A queue knows pages and files, nothing of batches, keys or the cache. If `queue.stuck` is true after the
join, reads are still in the drive or a reader still runs: the memory behind `state` must then never be freed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ssdgram._state import P_DEPTH, P_READERS, State
from ssdgram.errors import ConfigError, UnavailableError
from ssdgram.queues import probe
from ssdgram.queues._handoff import READER_NEW, READER_PLAIN, READER_RETURNED, READER_RUNNING, READER_STUCK, wake_planner, wake_readers
from ssdgram.queues._lanes import BATCH_MOST
from ssdgram.queues.gds import GdsQueue
from ssdgram.queues.state import file_records, new_state
from ssdgram.queues.threads import ThreadsQueue
from ssdgram.queues.uring import UringQueue

__all__ = ["NAMES", "READER_NEW", "READER_PLAIN", "READER_RETURNED", "READER_RUNNING", "READER_STUCK", "Queue", "choose",
           "compile_all", "default_depth", "default_readers", "resolve", "wake_planner", "wake_readers"]

log = logging.getLogger("ssdgram")
NAMES = ("auto", "uring", "threads", "gds")


class Queue(Protocol):
    """What a queue offers to the store, on the Python side."""

    name: str
    reason: str                                              # why this one
    notices: tuple[str, ...]                                 # what it had to do without, and how to change that

    @property
    def stuck(self) -> bool:
        """After the join: whether the memory behind the state must never be freed."""

    def start(self) -> None:
        """Start the readers' threads. Raises UnavailableError if one could not start."""

    def wake_all(self) -> None:
        """Wake every reader, after STOP was set."""

    def join(self, timeout_s: float = 5.0) -> bool:
        """Whether all readers returned within that time. They wait up to 2 s for reads in the drive."""

    def close(self) -> None:
        """Free rings and descriptors, after the join."""

    def forget(self) -> None:
        """In a forked child: give up what was inherited."""


def resolve(name: str) -> tuple[str, str]:
    """("uring", "threads" or "gds", why) for a queue name, before any array is laid out. Raises UnavailableError, ConfigError."""
    if name not in NAMES:
        raise ConfigError(f"queue {name!r}: expected one of {', '.join(NAMES)}")
    if name in ("threads", "gds"):                           # "auto" never is "gds": the slab would have to lie in HBM
        return name, "asked for by name"
    finding = probe.io_uring()
    if name == "auto":
        return ("uring", f"io_uring works: {finding.found}") if finding.ok else ("threads", f"no io_uring: {finding.found}")
    if not finding.ok:
        raise UnavailableError(f"queue 'uring' was asked for by name, but io_uring is refused ({finding.found}); "
                               f"or open with queue='threads'")
    return name, "asked for by name"


def choose(name: str, state: State, readers: int | None = None, depth: int | None = None,
           affinity: Sequence[int] | None = None, gds: dict[str, Any] | None = None) -> Queue:
    """A queue over `state`, not yet started; its name and reason are logged.

    readers, depth: must be what `state` was laid out for, if given. affinity: CPUs that the readers may run on. gds: for that
    queue, the keyword arguments of GdsQueue.
    Raises UnavailableError if a queue that was asked for by name cannot run; "auto" falls back to `threads`.
    """
    for given, word, place in ((readers, "readers", P_READERS), (depth, "depth", P_DEPTH)):
        if given is not None and given != state.params[place]:
            raise ValueError(f"the state is laid out for {word} = {state.params[place]}, not {given}")
    if affinity is not None and not set(affinity) & os.sched_getaffinity(0):
        raise ValueError(f"affinity {sorted(affinity)}: none of these CPUs is in this process's set")
    chosen, reason = resolve(name)
    queue: Queue | None = None
    if chosen == "gds":
        if gds is None:
            raise UnavailableError("queue 'gds' needs a GPU and cuFile: open a store with device='cuda' and queue='gds'")
        queue = GdsQueue(state, reason, affinity, **gds)
    elif chosen == "uring":
        try:
            queue = UringQueue(state, reason, affinity)
        except OSError as error:
            if name == "uring":
                raise UnavailableError(f"queue 'uring': its rings cannot be made ({error.strerror}); open with queue='threads', "
                                       f"or see `ssdgram doctor`") from error
            reason = f"the rings of io_uring cannot be made ({error.strerror})"
    if queue is None:
        queue = ThreadsQueue(state, reason, affinity)
    log.info("queue %s (%s), %d readers of depth %d", queue.name, queue.reason, state.params[P_READERS], state.params[P_DEPTH])
    for notice in queue.notices:
        log.warning("queue %s: %s", queue.name, notice)
    return queue


def default_readers(name: str, cpus: int | None = None) -> int:
    """Readers for a queue on that many processors (those of this process: CPU set and cgroup quota).

    uring: a core drives several hundred thousand reads/s, deliveries included, so 1 up to 4 cores, 2 up to 16, 4 beyond.
    threads: each has one read in the drive, so 16 to 32 of them whatever the cores. gds: one, whose calls are Python's.
    """
    if name == "gds":
        return 1
    cpus = probe.cpu_count() if cpus is None else cpus
    if name == "threads":
        return min(32, max(16, 2 * cpus))
    return 1 if cpus <= 4 else 2 if cpus <= 16 else 4


def default_depth(name: str) -> int:
    """Reads in the drive per reader: 256 for "uring", 1 for "threads", eight full batches for "gds"."""
    return {"threads": 1, "gds": 8 * BATCH_MOST}.get(name, 256)


def compile_all() -> None:
    """Make the compiled code of both queues ahead of use (that of `uring` only where io_uring works)."""
    with open(os.devnull, "rb") as file:
        state = new_state(file_records([(file.fileno(), file.fileno())]), readers=1, depth=1, pages=1)
        ThreadsQueue(state, "compile").close()
        if probe.io_uring().ok:
            UringQueue(state, "compile").close()
