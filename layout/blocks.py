"""Streams over many files by many threads: each thread takes one block of one file through all of its steps.

    thread:  claim (file, block) -> process: read, pack or check, write; any order -> in_order: digest; one block after the other

`jobs` files are in work at once and a file's blocks are claimed in order, so the thread with a file's lowest block never waits
for another: no deadlock. Reads, computing and writes of different blocks overlap because the threads do; none of them needs the
GIL for more than the bookkeeping. Memory is threads x workspace, whatever the files' sizes. It knows nothing of what a block is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from ssdgram.layout.format import PAGE_BYTES

BLOCK_PAGES = 512
BLOCK_BYTES = BLOCK_PAGES * PAGE_BYTES                       # 2 MiB
MAX_JOBS = 16
Progress = Callable[[int, int], None]                        # bytes done, bytes in all


class Stream:
    """One file's work, as `run_blocks` drives it. Subclasses say what a block is."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.claimed = 0                                     # blocks that a thread took
        self.passed = 0                                      # blocks that went through in_order
        self.turn = threading.Condition()                    # guards `passed`

    def open(self) -> None:
        """Called once, before the first block."""

    def process(self, block: int, workspace: Any) -> Any:
        """The parallel part, any order. What it returns, `in_order` gets."""
        raise NotImplementedError

    def in_order(self, block: int, result: Any) -> None:
        """The serial part: called for block 0, 1, .. of this stream, never two at a time."""

    def finish(self) -> None:
        """Called once, after the last block's `in_order`."""

    def close(self) -> None:
        """Called once, after `finish` or when the run failed."""


def run_blocks(streams: Sequence[Stream], jobs: int, threads: int, workspace: Callable[[], Any],
               tick: Callable[[], None] | None = None) -> None:
    """Put all blocks of all streams through their steps, or raise what the first failing thread raised.

    `workspace()` makes one thread's buffers. `tick()` is called a few times a second, from this thread.
    """
    if not streams:
        return
    run = _Run(streams, jobs, workspace)
    try:
        with ThreadPoolExecutor(threads, "ssdgram-blocks") as pool:
            try:
                running = {pool.submit(run.work) for _ in range(threads)}
                while running:
                    ended, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
                    if tick is not None:
                        tick()
            finally:
                run.stop()
    finally:
        for stream in run.in_work:                           # of a failed run; no thread uses them any more
            stream.close()


class _Run:
    """What the threads of one `run_blocks` share."""

    def __init__(self, streams: Sequence[Stream], jobs: int, workspace: Callable[[], Any]) -> None:
        self.in_work: set[Stream] = set()                    # opened and not closed
        self._waiting = deque(streams)
        self._active: deque[Stream] = deque()                # streams with blocks to claim
        self._jobs, self._workspace = jobs, workspace
        self._lock = threading.Lock()                        # guards all of the above
        self._stopped = False

    def work(self) -> None:
        """One thread: blocks until none is left, or until another thread failed."""
        workspace = self._workspace()
        whole = False
        try:
            while (claim := self._claim()) is not None:
                self._step(*claim, workspace)
            whole = True
        finally:
            if not whole:
                self.stop()

    def stop(self) -> None:
        """Let every thread return after its block; those that wait for their turn at once."""
        with self._lock:
            self._stopped = True
            streams = list(self.in_work)
        for stream in streams:
            with stream.turn:
                stream.turn.notify_all()

    def _claim(self) -> tuple[Stream, int] | None:
        """The next block to work on, from the active streams in turn. None when nothing is left."""
        with self._lock:
            if self._stopped:
                return None
            while len(self._active) < self._jobs and self._waiting:
                stream = self._waiting.popleft()
                self.in_work.add(stream)
                stream.open()
                self._active.append(stream)
            if not self._active:
                return None
            stream = self._active.popleft()
            block = stream.claimed
            stream.claimed += 1
            if stream.claimed < stream.blocks:
                self._active.append(stream)
            return stream, block

    def _step(self, stream: Stream, block: int, workspace: Any) -> None:
        result = stream.process(block, workspace)
        with stream.turn:
            while stream.passed != block and not self._stopped:
                stream.turn.wait()
            if self._stopped:
                return
        stream.in_order(block, result)                       # outside the lock: it is this thread's turn until it says otherwise
        if block == stream.blocks - 1:
            stream.finish()
            with self._lock:
                self.in_work.discard(stream)
            stream.close()
            return
        with stream.turn:
            stream.passed = block + 1
            stream.turn.notify_all()


def default_jobs() -> int:
    """Files in work at once: the CPUs of this process (its CPU set, and what its cgroup grants), at most 16."""
    import os

    from ssdgram.machine import cpu_quota

    cpus, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return min(MAX_JOBS, max(1, cpus if quota is None else min(cpus, round(quota))))


def threads_for(jobs: int) -> int:
    """Threads, hence blocks in flight, for that many files at once."""
    return max(12, min(4 * jobs, 32))
