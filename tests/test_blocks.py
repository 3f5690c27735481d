"""Streams by blocks: every block once, in_order in order and one at a time, and a failure that stops all and closes all."""

import threading
import time

import pytest

from ssdgram.layout.blocks import Stream, default_jobs, run_blocks, threads_for


class Recorder(Stream):
    def __init__(self, blocks, slow=None, fail_at=None):
        super().__init__(blocks)
        self.events, self.processed, self.ordered = [], [], []
        self.slow, self.fail_at, self.inside = slow, fail_at, 0

    def open(self):
        self.events.append("open")

    def process(self, block, workspace):
        workspace.append(block)
        if block == self.slow:
            time.sleep(0.05)
        if block == self.fail_at:
            raise OSError(5, "Input/output error")
        self.processed.append(block)
        return block * 10

    def in_order(self, block, result):
        self.inside += 1
        assert self.inside == 1 and result == block * 10
        self.ordered.append(block)
        self.inside -= 1

    def finish(self):
        self.events.append("finish")

    def close(self):
        self.events.append("close")


@pytest.mark.parametrize("jobs, threads", [(1, 1), (1, 8), (3, 8), (16, 4), (2, 32)])
def test_every_block_once_and_in_order(jobs, threads):
    streams = [Recorder(blocks, slow=blocks // 3) for blocks in (1, 7, 2, 30, 1, 12)]
    workspaces, ticks = [], []

    def workspace():
        workspaces.append([])
        return workspaces[-1]

    run_blocks(streams, jobs, threads, workspace, lambda: ticks.append(1))
    for stream in streams:
        assert sorted(stream.processed) == list(range(stream.blocks)) and stream.ordered == list(range(stream.blocks))
        assert stream.events == ["open", "finish", "close"]
    assert len(workspaces) <= threads and ticks


def test_nothing_to_do():
    run_blocks([], 1, 1, list)


@pytest.mark.parametrize("fail_at", [0, 3, 19])
def test_the_first_failure_stops_all_and_closes_all(fail_at):
    streams = [Recorder(20, fail_at=fail_at), *[Recorder(10_000) for _ in range(30)]]        # more than are done before it fails
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Input/output error"):
        run_blocks(streams, 2, 6, list)
    assert set(threading.enumerate()) <= before
    assert "finish" not in streams[0].events and streams[0].events[-1] == "close"
    opened = [stream for stream in streams if stream.events]
    assert all(stream.events[0] == "open" and stream.events.count("close") == 1 for stream in opened)
    assert len(opened) < len(streams)


def test_a_failure_in_order_wakes_those_that_wait():
    class Failing(Recorder):
        def in_order(self, block, result):
            if block == 1:
                time.sleep(0.05)                             # the others are waiting for their turn by now
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_blocks([Failing(50)], 1, 8, list)


def test_an_interrupt_from_the_tick_stops_all():
    """Ctrl-C reaches the thread that waits; here its tick raises it."""
    stream = Recorder(10**6)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_blocks([stream], 1, 4, list, interrupt)
    assert stream.events == ["open", "close"] and len(stream.ordered) < 10**6


def test_counts():
    assert 1 <= default_jobs() <= 16 and threads_for(1) == threads_for(2) == 12 and threads_for(16) == 32
