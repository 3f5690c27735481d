"""What the GPU benches share: host memory that the GPU reads in place, timing under graph replay, trying cuts, compiling ahead.

A figure is the median over replays of a CUDA graph of 20 launches, each on its own operands, divided by 20; ids are drawn anew
before every replay, outside the timing. Buffers that would otherwise stay in the L2 cache rotate: that is the caller's part.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import TritonError

LAUNCHES = 20
GIB = 1 << 30
TILE = 1 << 24                                               # bytes that one thread fills at a time


class HostMemory:
    """Anonymous memory that the GPU reads in place: touched by many threads, registered a GiB at a time. `tensor`: uint8."""

    def __init__(self, size: int, *, huge: bool) -> None:
        self.size = -(-size // TILE) * TILE
        self.map = mmap.mmap(-1, self.size + (1 << 21), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        whole = np.frombuffer(self.map, np.uint8)
        start = -whole.ctypes.data % (1 << 21)
        array = whole[start:start + self.size]
        random = np.random.default_rng(0).integers(0, 127, TILE, np.uint8)

        def fill(part: int) -> None:
            array[part * TILE:(part + 1) * TILE] = random

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            list(threads.map(fill, range(self.size // TILE)))
        self.tensor = torch.from_numpy(array)
        self.registered: list[int] = []
        for offset in range(0, self.size, GIB):
            address, length = self.tensor.data_ptr() + offset, min(GIB, self.size - offset)
            error = int(torch.cuda.cudart().cudaHostRegister(address, length, 3))        # portable, mapped
            if error != 0:
                raise RuntimeError(f"cudaHostRegister of {length} bytes failed with error {error}")
            self.registered.append(address)
        self.huge_share = huge_share(self.tensor.data_ptr(), self.size)

    def close(self) -> None:
        """Unregister and give the pages back; views of `tensor` that are left read zeros."""
        torch.cuda.synchronize()
        for address in self.registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        del self.tensor
        self.map.madvise(mmap.MADV_DONTNEED)


def huge_share(address: int, size: int) -> float:
    """How much of a range lies in huge pages, by /proc/self/smaps."""
    huge, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            inside = start < address + size and end > address
        elif inside and words[0] == "AnonHugePages:":
            huge += int(words[1]) * 1024
    return min(1.0, huge / size)


def graph_us(launch: Callable[[int], Any], refresh: Callable[[], Any] | None = None, *, count: int = LAUNCHES, replays: int = 9,
             budget_s: float = 3.0) -> float:
    """Median microseconds of one launch: launch(0) .. launch(count - 1) captured, replayed; refresh() before each replay."""
    stream = torch.cuda.Stream()
    if refresh is not None:
        refresh()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(min(count, 2)):
            launch(number)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(count):
            launch(number)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    begun = time.monotonic()
    for replay in range(replays + 2):
        if refresh is not None:
            refresh()
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(stop) * 1e3 / count)
        if len(times) >= 5 and time.monotonic() - begun > budget_s:
            break
    return statistics.median(times)


def host_us(launch: Callable[[], Any], count: int = 200) -> float:
    """Median microseconds that the host spends on one launch onto an empty stream."""
    times = []
    for number in range(count + 5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        launch()
        if number >= 5:
            times.append((time.perf_counter() - begun) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def best(candidates: Iterable[Any], measure: Callable[[Any], float]) -> tuple[Any, dict[str, float]]:
    """(the candidate with the least time, all times by name); one that cannot run here is shown and left out."""
    times: dict[Any, float] = {}
    for candidate in candidates:
        try:
            times[candidate] = measure(candidate)
        except (RuntimeError, TritonError) as error:
            print(f"  {candidate}: {error}")
    ranked = sorted(times, key=lambda candidate: times[candidate])
    return ranked[0], {str(candidate): round(times[candidate], 2) for candidate in ranked}
