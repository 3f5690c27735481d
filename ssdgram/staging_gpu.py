"""The captured part of `ssdgram.staging`: one CUDA graph per size that gathers all layers through a frame.

The layers' gathers run side by side, for a small one leaves the link idle. It knows nothing of steps. Invariant: what is
captured here allocates nothing and waits for nothing, so a graph can be launched behind any work of the current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ssdgram._cuda import cuda_runtime
from ssdgram.errors import StoreError
from ssdgram.frame import Frame
from ssdgram.kernels.launch import raw_stream
from ssdgram.staging import DISTINCT

if TYPE_CHECKING:
    from ssdgram.kernels.distinct import Distinct
    from ssdgram.kernels.gather import Gather
    from ssdgram.store import Store


class Graph:
    """A captured graph that is launched by one call of CUDA's: torch's `replay` looks after random numbers too, which costs more."""

    def __init__(self, graph: Any, device: int) -> None:
        self._graph, self._device = graph, device            # torch's graph owns what is launched
        self._launch: Callable[[int, int], int] | None = None
        if hasattr(graph, "raw_cuda_graph_exec"):            # torch 2.9 and newer
            self._handle = int(graph.raw_cuda_graph_exec())
            self._launch = cuda_runtime().cudaGraphLaunch
            self._launch.argtypes, self._launch.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int     # type: ignore[attr-defined]

    def replay(self) -> None:
        """Launch it on the current stream of its device."""
        if self._launch is None or torch.cuda.current_device() != self._device:
            self._graph.replay()
            return
        error = self._launch(self._handle, raw_stream(self._device))
        if error != 0:
            raise StoreError(f"a step's gathers could not be launched: cudaGraphLaunch answered {error} (cudaError_t); an error of earlier "
                             f"work on this GPU shows up here, too: look for the first one in the log")


class Beside:
    """A stream beside the current one. From `fork` to `join` what is launched under `use` runs behind all that the current stream had been
    given before, and side by side with what it is given meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def fork(self) -> None:
        """Work launched here from now on runs behind the current stream's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Makes it the current stream."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream's next work runs behind all that was launched here."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class InOrder:
    """From one `with` to the next: what is launched on the current stream runs behind what was launched under the last one, even if that
    was another stream's. Behind one that ended with an exception (Ctrl-C may come between any two calls) the device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._end, self._ended = device, -1, torch.cuda.Event(), True

    def __enter__(self) -> None:
        self.mend()
        stream = raw_stream(self._device.index)
        self._ended = False
        if stream != self._stream:
            if self._stream != -1:
                torch.cuda.current_stream(self._device).wait_event(self._end)
            self._stream = stream

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self._end.record(torch.cuda.current_stream(self._device))
            self._ended = True

    def mend(self) -> None:
        """Wait for the device if the last `with` ended with an exception: what it launched may be on streams that nobody joined."""
        if not self._ended:
            torch.cuda.synchronize(self._device)
            self._ended, self._stream = True, -1


def capture(store: Store, targets: Mapping[int, torch.Tensor], sizes: list[tuple[int, int]],
            distinct: Sequence[Gather | Distinct]) -> dict[int, list[tuple[int, Frame, Graph]]]:
    """For each (start, positions) of `sizes` a graph that writes those rows of every layer's tensor, listed by start. `distinct`: of
    each layer, the gather for DISTINCT positions or more (empty: as for fewer)."""
    made: dict[int, list[tuple[int, Frame, Graph]]] = {}
    with torch.cuda.device(store._cuda.device):              # type: ignore[union-attr]
        first, side = torch.cuda.Stream(), torch.cuda.Stream()               # torch's own default may be another device's
        for start, size in sizes:
            frame, graph = Frame(store, size, distinct if size >= DISTINCT else None), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=first, capture_error_mode="thread_local"):
                main = torch.cuda.current_stream()
                side.wait_stream(main)
                for number, (layer, target) in enumerate(targets.items()):
                    with torch.cuda.stream(side if number % 2 else main):
                        frame.rows(layer, out=target[start:start + size])
                main.wait_stream(side)
            made.setdefault(start, []).append((size, frame, Graph(graph, store._cuda.device.index)))         # type: ignore[union-attr]
    return made
