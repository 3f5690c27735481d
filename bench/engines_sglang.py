"""SGLang's part of bench/engines.py: its real Engram modules without a server, with their own table in HBM and with the plug-in.

Both sides get the same weights, the same steps and the ids of SGLang's own hash, whose history runs on as in a server. Prefill steps
are staged as the scheduler stages them, or left to the forward; decode steps run eagerly or as the replay of a graph.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ssdgram.engines import opening
from ssdgram.engines.settings import Settings
from ssdgram.engines.sglang import plugin

REQUESTS, MOST = 16, 256


class _Thing:
    """Whatever a compiled kernel package may offer: called with one function it is a decorator, else it stays what it is."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Anything(types.ModuleType):
    """A module with every name: enough to import what needs compiled kernels."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()


class _Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel`, SGLang's compiled kernels, which Engram does not use."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "sgl_kernel" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


@contextlib.contextmanager
def sglang() -> Iterator[Any]:
    """SGLang's engram module, imported outside of a server, under the parallel sizes of one process."""
    sys.meta_path.insert(0, _Stand())
    import sglang.srt.layers.engram as engram

    with engram.get_parallel().override(tp_size=1, tp_rank=0, attn_dp_size=1, attn_cp_size=1):
        yield engram


def hasher_of(engram: Any, layout: Any, config: Any, store: Any, device: str) -> Any:
    """SGLang's hash with the store's token map (its own would ask a tokenizer of the transformers package)."""
    hasher = engram.EngramHasher.__new__(engram.EngramHasher)
    nn.Module.__init__(hasher)
    token_map = np.asarray(store._token_map)
    flat = [[prime for order in layer for prime in order] for layer in layout.primes]
    hasher.max_ngram_size, hasher.pad_id = layout.max_ngram_size, int(token_map[config.engram_pad_token_id])
    for name, value in (("token_map", torch.tensor(token_map, dtype=torch.int64)),
                        ("multipliers", engram.compute_hash_multipliers(layout.layer_ids, layout.max_ngram_size,
                                                                        config.engram_compressed_vocab_size)),
                        ("primes", torch.tensor(layout.primes)),
                        ("offsets", torch.tensor(np.array([np.cumsum([0, *sizes[:-1]]) for sizes in flat])))):
        hasher.register_buffer(name, value.to(device), persistent=False)
    hasher.image_token_id, hasher.history, hasher.pad_row, hasher._cpu_hash_params = None, None, 0, None
    hasher.init_history(REQUESTS, device)
    return hasher


class Run:
    """Both sides, and the requests' state."""

    def __init__(self, engram: Any, checkpoint: Path, store_path: Path, device: str) -> None:
        text = json.loads((checkpoint / "config.json").read_bytes())
        self.config = SimpleNamespace(**{**text, **text.get("text_config", {})})
        self.engram, self.device = engram, device
        self.layout = engram.EngramLayout.from_config(self.config)
        self.stock = self._layers()
        settings = Settings(store=str(store_path), dram="2GiB" if device != "cpu" else "64MiB")
        self.store = opening.open_store(settings, layers=self.layout.layer_ids, device=device, engine="sglang")
        original = engram.EngramEmbedding
        engram.EngramEmbedding = plugin.embedding_class(engram)
        try:
            self.ours = self._layers()
        finally:
            engram.EngramEmbedding = original
        self.hasher = hasher_of(engram, self.layout, self.config, self.store, device)
        opening.check_hash(self.store, layers=self.layout.layer_ids, multipliers=self.hasher.multipliers.cpu().numpy(),
                           token_map=self.hasher.token_map.cpu().numpy())
        self.backend = plugin.Backend(self.store, self.hasher, [part.embed for part in self.ours], torch.device(device), settings, MOST,
                                      int(engram.MM_PAD_SHIFT_VALUE))
        plugin._backend[:] = [self.backend]
        self._load(checkpoint)
        self.generator = np.random.default_rng(11)
        self.tokens = self.generator.integers(0, self.store._vocabulary, (REQUESTS, 4096))
        self.done = np.zeros(REQUESTS, np.int64)

    def _layers(self) -> list[Any]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                return [self.engram.Engram(self.config, layer, self.layout) for layer in self.layout.layer_ids]
        finally:
            torch.set_default_dtype(before)

    def _load(self, checkpoint: Path) -> None:
        from safetensors import safe_open

        index = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())["weight_map"]
        generator = torch.Generator(device=self.device).manual_seed(5)
        for layer, number in enumerate(self.layout.layer_ids):
            for name, file in index.items():
                kind = name.rpartition(".")[2]
                if f"layers.{number}.engram.embed." in name:
                    with safe_open(checkpoint / file, framework="pt") as tensors:
                        for side in (self.stock, self.ours):
                            parameter = getattr(side[layer].embed, kind)
                            parameter.weight_loader(parameter, tensors.get_tensor(name))
            for name in ("wkv.weight", "q_weight", "k_weight"):
                value = self.stock[layer].get_parameter(name)
                value.data.copy_(torch.randn(value.shape, generator=generator, device=self.device) * 0.05)
                self.ours[layer].get_parameter(name).data.copy_(value.data)

    def batch(self, scheduled: dict[int, int], mode: Any, staged: bool) -> Any:
        """A ForwardBatch as far as Engram looks, and for prefill the scheduler's ScheduleBatch before it."""
        firsts = {request: int(self.done[request]) for request in scheduled}
        ids = np.concatenate([self.tokens[request, first:first + scheduled[request]] for request, first in firsts.items()])
        positions = np.concatenate([np.arange(first, first + scheduled[request]) for request, first in firsts.items()])
        lengths = list(scheduled.values())
        rows = [[0] * (3 - min(3, first)) + self.tokens[request, max(0, first - 3):first].tolist() for request, first in firsts.items()]

        def put(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        forward = SimpleNamespace(
            forward_mode=mode, input_ids=put(ids), positions=put(positions), req_pool_indices=put(list(scheduled)), spec_info=None,
            extend_seq_lens=put(lengths, torch.int32), extend_seq_lens_cpu=lengths, engram_staged_rows=None,
            extend_start_loc=put(np.cumsum([0, *lengths])[:-1], torch.int32), out_cache_loc=torch.ones(len(ids), dtype=torch.int64,
                                                                                                     device=self.device),
            engram_history=put(rows, torch.int32) if mode.is_extend_without_speculative() else None)
        if staged:
            requests = [SimpleNamespace(rid=str(request), full_untruncated_fill_ids=self.tokens[request]) for request in scheduled]
            forward.engram_staged_rows = self.backend.stage(SimpleNamespace(
                forward_mode=mode, reqs=requests, prefix_lens=list(firsts.values()), extend_lens=lengths, encoder_swa_reset=None))
        for request, count in scheduled.items():
            self.done[request] += count
        return forward

    def forward(self, layers: list[Any], hidden: torch.Tensor, ids: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """What the model does with its Engram layers."""
        return [layer(hidden[:ids.shape[0]], ids[:, layer.layer_hash_index], batch, input_ids=batch.input_ids) for layer in layers]

    def hash(self, batch: Any) -> torch.Tensor:
        """The step's ids, through the plug-in's hook."""
        return plugin.around_hash(self.engram.EngramHasher.forward, self.hasher, batch.input_ids, batch)


def identity(checkpoint: Path, store_path: Path, steps: int, device: str = "cuda:0") -> dict[str, Any]:
    """Steps of each kind, and how many of them gave other bits than the stock layers."""
    with sglang() as engram:
        run = Run(engram, checkpoint, store_path, device)
        try:
            hidden = torch.randn(MOST, run.config.hc_mult, run.config.hidden_size, device=device).to(torch.bfloat16)
            results = {"eager": _eager(run, hidden, steps), "decode_graph": _graph(run, hidden, steps)}
        finally:
            plugin._backend.clear()
            run.store.close()
    return {**results, "wrong": sum(part["wrong_steps"] for part in results.values())}


def _differ(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, wanted, strict=True))


def _eager(run: Run, hidden: torch.Tensor, steps: int) -> dict[str, Any]:
    mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    counts = {"staged": 0, "prefill": 0, "decode": 0}
    wrong, tokens = 0, 0
    for number in range(steps):
        chosen = [int(request) for request in run.generator.permutation(REQUESTS)[:int(run.generator.integers(1, REQUESTS))]]
        kind = ("staged", "decode", "prefill")[number % 3]
        if kind == "decode":
            chosen = [request for request in chosen if run.done[request] > 0] or [0]
            batch = run.batch(dict.fromkeys(chosen, 1), mode.DECODE, staged=False)
        else:
            batch = run.batch({request: int(run.generator.integers(1, 16)) for request in chosen}, mode.EXTEND, staged=kind == "staged")
        ids = run.hash(batch)
        found = run.forward(run.ours, hidden, ids, batch)
        plain = SimpleNamespace(**{**vars(batch), "engram_staged_rows": None})
        wrong += _differ(found, run.forward(run.stock, hidden, ids, plain))
        counts[kind] += 1
        tokens += ids.shape[0]
    return {"steps": counts, "tokens": tokens, "wrong_steps": wrong}


def _graph(run: Run, hidden: torch.Tensor, steps: int) -> dict[str, Any]:
    """Decode steps of all requests by the replay of a graph that holds hash, lookup, projection and gate."""
    mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    static = run.batch(dict.fromkeys(range(REQUESTS), 1), mode.DECODE, staged=False)
    capture: Any = importlib.import_module(plugin.CAPTURE)
    capture.is_capture_mode = True
    try:
        history = run.hasher.history.clone()
        for _ in range(2):
            run.forward(run.ours, hidden, run.hash(static), static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ids = run.hash(static)
            kept = run.forward(run.ours, hidden, ids, static)
        run.hasher.history.copy_(history)
    finally:
        capture.is_capture_mode = False
    runner = SimpleNamespace(raw_bs=REQUESTS, captured_req_width=1, ragged_verify_mode=False, model_runner=SimpleNamespace(
        is_draft_worker=False), buffers=static, _ssdgram_executing=True)
    wrong, first = 0, True
    for _ in range(steps):
        if not first:                                        # the first step's tokens are in the buffers
            live = run.batch(dict.fromkeys(range(REQUESTS), 1), mode.DECODE, staged=False)
            static.input_ids.copy_(live.input_ids)
            static.positions.copy_(live.positions)
        first = False
        plugin.after_load_batch(None, runner, static)
        graph.replay()
        wrong += _differ([part.clone() for part in kept], run.forward(run.stock, hidden, ids, SimpleNamespace(
            **{**vars(static), "engram_staged_rows": None})))
    return {"steps": steps, "tokens": steps * REQUESTS, "wrong_steps": wrong}
