"""The Python threads under a queue's compiled loops: started, woken, joined; each enters its loop once and stays there.

It knows nothing of rings or files: a queue says what a thread does first (`prepare`, whose failure `start` raises) and
which loop it enters (`serve`). Reader threads take no signals, so that Ctrl-C reaches the thread that waits.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence

from ssdgram._state import P_READERS, R_ASLEEP, R_STATE, R_WAKE_FD, STOP, State, reader_line
from ssdgram.errors import UnavailableError
from ssdgram.queues._handoff import R_ROOM, READER_NEW, READER_RETURNED, READER_RUNNING, READER_STUCK, wake_all

log = logging.getLogger("ssdgram")


class Readers:
    """One daemon thread per reader of `state`. Subclasses give `name` and the two steps."""

    name = ""

    def __init__(self, state: State, reason: str, affinity: Sequence[int] | None) -> None:
        self.state, self.reason, self.notices = state, reason, tuple[str, ...]()
        self.affinity = None if affinity is None else frozenset(affinity)
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._entered = threading.Semaphore(0)
        for reader in range(self.readers):
            line = reader_line(reader)
            state.control[line + R_STATE], state.control[line + R_ASLEEP] = READER_NEW, 0
            state.control[line + R_WAKE_FD] = -1
            state.control[line + R_ROOM] = 1

    @property
    def readers(self) -> int:
        """How many readers there are."""
        return int(self.state.params[P_READERS])

    def prepare(self, reader: int) -> None:
        """What the reader's own thread does before its loop."""

    def serve(self, reader: int) -> None:
        """Enter the compiled loop; returns after STOP."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the threads; returns once all are about to enter their loops, or raises what kept one from it."""
        for reader in range(self.readers):
            thread = threading.Thread(target=self._run, args=(reader,), name=f"ssdgram-{self.name}-{reader}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:                    # a limit of threads
                self._failure = error
                break
            self._threads.append(thread)
        for _ in self._threads:
            self._entered.acquire()
        if self._failure is not None:
            self.state.control[STOP] = 1
            self.wake_all()
            self.join(5.0)
            raise UnavailableError(f"queue {self.name}: a reader could not start: {self._failure}") from self._failure

    def _run(self, reader: int) -> None:
        line = reader_line(reader)
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            if self.affinity is not None:
                os.sched_setaffinity(0, self.affinity)       # 0: the calling thread alone
            self.prepare(reader)
            self.state.control[line + R_STATE] = READER_RUNNING
        except (OSError, ValueError) as error:
            self._failure = error
            self.state.control[line + R_STATE] = READER_RETURNED
            return
        finally:
            self._entered.release()
        self.serve(reader)

    def wake_all(self) -> None:
        """Wake every sleeping reader, for example after STOP was set."""
        wake_all(self.state)

    def join(self, timeout_s: float = 5.0) -> bool:
        """Wait until all loops returned (STOP was set and `wake_all` called); whether they did within that time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def stuck(self) -> bool:
        """Whether a reader still runs, or returned with reads in the drive: then state's memory must never be freed."""
        states = [int(self.state.control[reader_line(reader) + R_STATE]) for reader in range(self.readers)]
        return READER_STUCK in states or any(thread.is_alive() for thread in self._threads)

    def forget(self) -> None:
        """In a forked child: give up descriptors that were inherited; the parent keeps its own."""

    def close(self) -> None:
        """Free what the queue holds beside `state`. Does nothing while a reader still runs. Idempotent."""
