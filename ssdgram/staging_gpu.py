"""The captured part of `ssdgram.staging`: one CUDA graph per size that gathers all layers through a frame.

The layers' gathers run side by side, for a small one leaves the link idle. It knows nothing of steps. Invariant: what is
captured here allocates nothing and waits for nothing, so a graph can be launched behind any work of the current stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ssdgram.frame import Frame
    from ssdgram.store import Store


def capture(store: Store, targets: Mapping[int, torch.Tensor], sizes: list[int]) -> list[tuple[int, Frame, torch.cuda.CUDAGraph]]:
    """(positions, frame, graph) of each size: the graph writes rows 0 .. positions - 1 of every layer's tensor."""
    made: list[tuple[int, Frame, Any]] = []
    with torch.cuda.device(store._cuda.device):              # type: ignore[union-attr]
        first, side = torch.cuda.Stream(), torch.cuda.Stream()               # torch's own default may be another device's
        for size in sizes:
            frame, graph = store.frame(size), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=first, capture_error_mode="thread_local"):
                main = torch.cuda.current_stream()
                side.wait_stream(main)
                for number, (layer, target) in enumerate(targets.items()):
                    with torch.cuda.stream(side if number % 2 else main):
                        frame.rows(layer, out=target[:size])
                main.wait_stream(side)
            made.append((size, frame, graph))
    return made
