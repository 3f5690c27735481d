"""SGLang's part of bench/engines.py in time: the Engram part of a decode step, ids ready to both layers' rows staged.

The plug-in stages a step's rows before the decode graph is replayed; SGLang's own class looks them up in the graph, in a table in
pinned memory as large as is asked for. All tokens come from a stream that was served before (hits), then from nowhere (misses).
Invariant: both sides are timed by turns in the same run, on ids drawn anew for each.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ssdgram.bench.engines_sglang import sglang
from ssdgram.engines import opening
from ssdgram.engines.settings import Settings
from ssdgram.engines.sglang import plugin

DEPTH, DIM = 3, 256
WARM_UP, COLD = 20, 20                                       # steps that are not counted, and steps of misses


def timing(checkpoint: Path, store_path: Path, table_gib: int, repetitions: int = 200) -> dict[str, Any]:
    """us from ids ready to both layers' rows staged, host clock with a synchronisation at its end: medians, interleaved."""
    results: dict[str, Any] = {"table_gib": table_gib, "repetitions": repetitions}
    with sglang() as engram:
        settings = Settings(store=str(store_path), dram="2GiB")
        store = opening.open_store(settings, layers=(1, 14), device="cuda:0", engine="sglang")
        try:
            table = pinned_table(engram, table_gib)
            stream = np.random.default_rng(5).integers(0, store._vocabulary, 60_000)
            for start in range(0, len(stream), 2048):
                with store.prefetch(stream[start:start + 2048], lookback=stream[max(0, start - DEPTH):start]) as batch:
                    batch.wait()
            for count in (64, 256):
                results[str(count)] = Step(store, table, stream, count, settings).times(repetitions)
        finally:
            store.close()
    return results


def pinned_table(engram: Any, gib: int) -> Any:
    """SGLang's embedding over a host table of one rank and of that size; its memory is pinned by torch, not by its own allocator."""
    rows = (gib << 30) // (DIM + DIM // engram.FP8_BLOCK_SIZE)
    memory = torch.empty(rows * (DIM + DIM // engram.FP8_BLOCK_SIZE), dtype=torch.uint8, pin_memory=True)
    table = engram.EngramEmbedding.__new__(engram.EngramEmbedding)
    nn.Module.__init__(table)
    table.dim, table.tp_size, table.row_start, table.rows, table.peer = DIM, 1, 0, rows, None
    table.host_table = SimpleNamespace(layout="per_rank", bytes=memory)
    table._host_table_ptrs = (memory.data_ptr(), memory.data_ptr() + rows * DIM)
    table._sort_host_reads = engram._sorted_host_reads(torch.cuda.current_device())
    table.staged_by_scheduler = False
    return table


class Step:
    """A decode step of `count` requests, on both sides."""

    def __init__(self, store: Any, table: Any, stream: np.ndarray, count: int, settings: Settings, where: str = "cuda:0") -> None:
        self.store, self.table, self.stream, self.count = store, table, stream, count
        self.generator = np.random.default_rng(count)
        device, shape = torch.device(where), (count, len(store.columns), store.dim)
        embeds = [SimpleNamespace(layer_id=layer, graph_rows=torch.zeros(shape, dtype=torch.bfloat16, device=device))
                  for layer in store.layers]
        self.hasher = SimpleNamespace(image_token_id=None, max_ngram_size=DEPTH + 1,
                                      history=torch.zeros(count + 1, DEPTH, dtype=torch.int32, device=device))
        self.backend = plugin.Backend(store, self.hasher, embeds, device, settings, count, 0)
        mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.batch = SimpleNamespace(forward_mode=mode.DECODE)
        self.buffers = SimpleNamespace(input_ids=torch.zeros(count, dtype=torch.int64, device=device),
                                       positions=torch.full((count,), 100, dtype=torch.int64, device=device),
                                       req_pool_indices=torch.arange(count, dtype=torch.int64, device=device))
        self.runner = SimpleNamespace(raw_bs=count, captured_req_width=1, ragged_verify_mode=False, buffers=self.buffers)
        self.ids = torch.zeros(len(embeds), *shape[:2], dtype=torch.int64, device=device)
        self.graph = self._captured()

    def stock(self) -> list[torch.Tensor]:
        """What SGLang's layers do: each looks its rows up on the stream that it runs on."""
        return [self.table(ids) for ids in self.ids]

    def ours(self) -> None:
        """What the plug-in does behind `load_batch`."""
        self.backend.begin_graph(self.runner, self.batch)

    def _captured(self) -> Any:
        self.stock()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._kept = self.stock()
        return graph

    def draw(self, fresh: bool) -> None:
        """Other tokens: of the stream, or (`fresh`) any; other ids for SGLang's table."""
        places = self.generator.integers(DEPTH, len(self.stream), self.count)
        windows = self.generator.integers(0, self.store._vocabulary, (self.count, DEPTH + 1)) if fresh else \
            self.stream[places[:, None] - np.arange(DEPTH, -1, -1)]
        self.hasher.history[:self.count].copy_(torch.from_numpy(windows[:, :DEPTH].astype(np.int32)))
        self.buffers.input_ids.copy_(torch.from_numpy(windows[:, DEPTH].astype(np.int64)))
        self.ids.copy_(torch.from_numpy(self.generator.integers(0, self.table.rows, self.ids.shape)))

    def times(self, repetitions: int) -> dict[str, Any]:
        """Medians and 99th percentiles in us of all hits by turns, then of all misses with their reads."""
        sides = {"ours": self.ours, "engine_graph": self.graph.replay, "engine_eager": self.stock}
        found: dict[str, list[float]] = {name: [] for name in sides}
        before = self.store.stats()
        for number in range(repetitions + WARM_UP):
            for name, work in sides.items():
                self.draw(fresh=False)                       # for each side: ids looked up a moment ago are found faster
                taken = timed(work)
                if number >= WARM_UP:
                    found[name].append(taken)
        misses = sum(self.store.stats().misses.values()) - sum(before.misses.values())
        cold, pages = [], []
        for _ in range(COLD):
            self.draw(fresh=True)
            reads = self.store.stats().reads
            cold.append(timed(self.ours))
            pages.append(self.store.stats().reads - reads)
        stall, count = float(np.median(cold)), float(np.median(pages))
        return {**{name: {"us": round(float(np.median(values)), 1), "p99_us": round(float(np.quantile(values, 0.99)), 1)}
                   for name, values in found.items()}, "misses_while_hits_are_timed": misses,
                "all_misses": {"us": round(stall, 1), "page_reads": count, "reads_per_s": round(count / stall * 1e6)}}


def timed(work: Callable[[], Any]) -> float:
    """us of work that is launched on an idle GPU, until all of it has run."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e6
