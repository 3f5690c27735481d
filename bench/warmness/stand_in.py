"""Stand-ins for a model's layers: something that takes a known time per layer, on the device or on a clock.

    begin()      a step starts now, the device is idle
    run(n)       n layers are launched; they start when what was launched before is done, and not before now
    reach()      the caller waits until everything launched is done
    finish()     the same; the step's seconds

`Sleeping` is a clock: the device is imagined, the caller sleeps, nothing else on the machine notices. `Multiplying` launches bf16
products on a GPU, from CUDA graphs, as many as take a layer's time there: memory-bound, as decode is. Neither knows a table.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

# Microseconds of a layer by batch: what the report states as the default. Decode at so many streams; prefill per token of a chunk.
DECODE_US = {1: 150.0, 16: 180.0, 64: 250.0, 256: 400.0}
PREFILL_US_A_TOKEN = 0.5
LAYERS, ENGRAM = 40, (1, 14)


def decode_us(streams: int, given: dict[int, float] | None = None) -> float:
    """Microseconds of a decode layer: the table's entry, between two entries in proportion, beyond them the nearest."""
    table = sorted((given or DECODE_US).items())
    for (low, low_us), (high, high_us) in itertools.pairwise(table):
        if low <= streams <= high:
            return low_us + (high_us - low_us) * (streams - low) / (high - low)
    return table[0][1] if streams < table[0][0] else table[-1][1]


class Sleeping:
    """A device that is imagined: layers take their time on a clock that starts when they are launched."""

    kind = "a clock: no device, the caller sleeps"

    def __init__(self, layer_us: float) -> None:
        self.layer_us = layer_us
        self._begun = self._done = 0.0

    def begin(self) -> None:
        self._begun = self._done = time.perf_counter()

    def run(self, layers: int) -> None:
        self._done = max(self._done, time.perf_counter()) + layers * self.layer_us / 1e6

    def reach(self) -> None:
        left = self._done - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def finish(self) -> float:
        """Oversleeping is not part of the step."""
        self.reach()
        return self._done - self._begun


class Multiplying:
    """bf16 products of [rows, 4096] with weights of more than the L2 cache, in CUDA graphs."""

    kind = "bf16 matrix products on the GPU, from CUDA graphs"

    def __init__(self, layer_us: float, rows: int, device: str = "cuda") -> None:
        import torch

        self._torch, self.asked_us = torch, layer_us
        self._rows = min(rows, 8192)
        self._graphs: dict[int, Any] = {}
        self._input = torch.randn(self._rows, 4096, dtype=torch.bfloat16, device=device)
        width = 16_384
        while True:
            self._weights = [torch.randn(4096, width, dtype=torch.bfloat16, device=device) for _ in range(4)]
            self._output = torch.empty(self._rows, width, dtype=torch.bfloat16, device=device)
            self._each = 8
            took = self._time(self._capture(1)) / self._each
            if took <= layer_us / 4 or width <= 1024:
                break
            width //= 2
        self._each = max(1, round(layer_us / took))
        self.layer_us = self._time(self._capture(8)) / 8
        self.width = width

    def _capture(self, layers: int) -> Any:
        torch = self._torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.mm(self._input, self._weights[0], out=self._output)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.launch(layers)
        return graph

    def launch(self, layers: int) -> None:
        """The products of so many layers on the current stream, or into the graph that is being captured."""
        for number in range(layers * self._each):
            self._torch.mm(self._input, self._weights[number % len(self._weights)], out=self._output)

    def _time(self, graph: Any) -> float:
        """Microseconds of a replay, median of nine."""
        torch = self._torch
        start, stop, times = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
        for _ in range(12):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        return float(sorted(times[3:])[4])

    def ready(self, parts: list[int]) -> None:
        """Capture the graphs of the parts beforehand."""
        for layers in parts:
            if layers > 0 and layers not in self._graphs:
                self._graphs[layers] = self._capture(layers)

    def begin(self) -> None:
        self._torch.cuda.synchronize()
        self._begun = time.perf_counter()

    def run(self, layers: int) -> None:
        if layers > 0:
            self._graphs[layers].replay()

    def reach(self) -> None:
        self._torch.cuda.current_stream().synchronize()

    def finish(self) -> float:
        self._torch.cuda.synchronize()
        return time.perf_counter() - self._begun
