"""Queue `threads`: a pool of readers that pread(2), one page at a time each, for kernels and containers without io_uring.

Python threads, but none of them takes the GIL after it entered its compiled loop, so a busy interpreter does not slow
them. The depth in the drive is the number of readers; each uses the first page of its part of the staging memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdgram._compiled import address_of, compile_for, compiled
from ssdgram._state import P_DEPTH, State
from ssdgram.queues._lean import borrowed
from ssdgram.queues._plain import plain_loop
from ssdgram.queues._readers import Readers


@compiled
def thread_loop(state, reader):  # type: ignore[no-untyped-def]
    """The whole life of one reader: serve pages until STOP."""
    state = borrowed(state)
    plain_loop(state, reader, address_of(state.staging, reader * state.params[P_DEPTH] * 4096))


class ThreadsQueue(Readers):
    """A pread pool over `state`'s readers."""

    name = "threads"

    def __init__(self, state: State, reason: str, affinity: Sequence[int] | None = None) -> None:
        super().__init__(state, reason, affinity)
        self.compile()

    def compile(self) -> None:
        """Load the loop from the cache of compiled code, or compile it."""
        compile_for(thread_loop, self.state, 0)

    def serve(self, reader: int) -> None:
        """Enter the compiled loop."""
        thread_loop(self.state, reader)
