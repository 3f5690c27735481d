"""vLLM's Qwen4Exp part of bench/engines.py: its real PLE modules without a server, with their own table and with the plug-in.

Both get the same weights through vLLM's loader and the same steps; windows, hash and dequantisation are vLLM's own, and so is the model
state that the plug-in changes. What is compared is the bits of the rows that the layer projects: eagerly, and (on a GPU) from the
replay of a whole graph. tests/engines_real_ple.py runs it on a CPU. Invariant: nothing of vLLM is copied here.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import ssdgram
from ssdgram.engines.vllm import ple, plugin

REQUESTS, MOST = 16, 128
ENCODINGS = ("bf16", "fp8_global")


def build(folder: Path, encoding: str, rows: int) -> tuple[Path, Path]:
    """(checkpoint, store) of the real model's shape, with about `rows` rows a column, made if they are not there."""
    here = folder / f"ple-{encoding}"
    if not (here / "store" / "manifest.json").exists():
        ssdgram.synthesize(here / "checkpoint", vocab_size=rows, layers=(1,), seed=2, family="ple", encoding=encoding, hidden_size=2560,
                           token_vocab_size=5_000, eos_token_id=3)
        ssdgram.convert(here / "checkpoint", here / "store")
    return here / "checkpoint", here / "store"


def identity(folder: Path, rows: int, steps: int, device: str = "cuda") -> dict[str, Any]:
    """Steps of each encoding and mode, and how many of them gave other bits than the stock modules."""
    before = os.environ.get("SSDGRAM_STORE", "")
    try:
        results: dict[str, Any] = {encoding: run(*build(folder, encoding, rows), steps, device) for encoding in ENCODINGS}
    finally:
        os.environ["SSDGRAM_STORE"] = before
    return {**results, "wrong": sum(part["wrong"] for part in results.values())}


class Modules:
    """vLLM's PLE modules and model state as imported outside of a server, changed by the plug-in; `stock`: made before that."""

    def __init__(self, checkpoint: Path, store: Path, device: str) -> None:
        import vllm.platforms as platforms
        from vllm.platforms.interface import UnspecifiedPlatform

        platforms._current_platform = UnspecifiedPlatform()
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.config.engram import EngramConfig
        from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

        self.device, self.checkpoint = device, checkpoint
        self.config = VllmConfig(device_config=DeviceConfig(device=device))
        object.__setattr__(self.config, "engram_config", EngramConfig(cpu_offload=False))
        self.config.scheduler_config.max_num_batched_tokens = MOST
        self.context = lambda: set_current_vllm_config(self.config)
        transformers: Any = importlib.import_module("transformers")
        if not hasattr(transformers, "Qwen4ExpTextConfig"):  # an annotation is all that it is for
            transformers.Qwen4ExpTextConfig = SimpleNamespace
        with self.context():
            if not model_parallel_is_initialized():
                with tempfile.TemporaryDirectory() as name:
                    init_distributed_environment(1, 0, f"file://{name}/rendezvous", 0, "nccl" if device == "cuda" else "gloo")
                    initialize_model_parallel(1, 1)
            import vllm.models.qwen4_exp.nvidia.model_state as states
            import vllm.models.qwen4_exp.nvidia.ngram_embedding as ngram
        self.ngram, self.states = ngram, states
        text = json.loads((checkpoint / "config.json").read_bytes())
        self.fields = SimpleNamespace(**{"seed": 1234, "ple_embedding_dtype": None, **text.get("text_config", text)})
        self.layers = sorted(layer - 1 for layer in self.fields.ple_layer_ids)
        changed = hasattr(ngram.Qwen4ExpNGramEmbedding.__init__, "__wrapped__")
        if not changed:
            Modules.own = (ngram.Qwen4ExpPLEDeviceEmbedding, ngram.Qwen4ExpPLEPinnedHostEmbedding)
        os.environ["SSDGRAM_STORE"] = str(store)
        stored = ngram.Qwen4ExpPLEDeviceEmbedding if changed else None
        ngram.Qwen4ExpPLEDeviceEmbedding = Modules.own[0]
        self.stock = self._build()
        object.__setattr__(self.config, "model_config", SimpleNamespace(model=str(checkpoint), quantization=None))
        type(self.config).use_v2_model_runner = property(lambda self: True)
        if stored is None:
            for base in states.Qwen4ExpModelState.__mro__[1:-1]:         # what these do has to do with other layers and devices
                for method, stand_in in (("__init__", lambda self, *_: None), ("prepare_inputs", lambda self, *_: {}),
                                         ("prepare_attn", lambda self, *_, **__: {}), ("prepare_dummy_inputs", lambda self, *_: {})):
                    if method in vars(base):
                        setattr(base, method, stand_in)
            ple.patch_ngram(ngram)
            ple.patch_state(states)
        else:
            ngram.Qwen4ExpPLEDeviceEmbedding = stored
        self.ours = self._build()
        self.state = states.Qwen4ExpModelState.__new__(states.Qwen4ExpModelState)
        self.state.model_config = SimpleNamespace(hf_text_config=self.fields)
        self.state.max_num_reqs, self.state.device = REQUESTS, torch.device(device)
        with self.context():
            self.state.__init__(self.config, self.ours, None, torch.device(device))

    own: tuple[Any, Any]                                     # vLLM's classes as they came

    def _build(self) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.context(), torch.device(self.device):
                parts = [self.ngram.Qwen4ExpNGramEmbedding(self.fields, self.fields.ple_embed_dim, number, MOST, data_parallel_rank=0,
                                                           prefix=f"model.layers.{layer}.ple.ple_embedding")
                         for number, layer in enumerate(self.layers)]
        finally:
            torch.set_default_dtype(before)
        for part, layer in zip(parts, self.layers, strict=True):
            part.load_weights(weights_of(self.checkpoint, layer))
        return torch.nn.ModuleList(parts)


def weights_of(checkpoint: Path, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name below the PLE module, tensor) of a layer's PLE tensors, as vLLM's loader hands them on."""
    from safetensors import safe_open

    index = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())["weight_map"]
    for name, file in index.items():
        _, found, rest = name.partition(f"layers.{layer}.ple.ple_embedding.")
        if found:
            with safe_open(checkpoint / file, framework="pt") as tensors:
                yield rest, tensors.get_tensor(name)


class Steps:
    """Requests as a server runs them: segments end often, and the state is where vLLM's own code looks for it."""

    def __init__(self, vocabulary: int, eos: int, device: str) -> None:
        self.generator, self.device = np.random.default_rng(3), device
        self.tokens = self.generator.integers(0, vocabulary, (REQUESTS, 2000)).astype(np.int32)
        self.tokens[self.generator.random(self.tokens.shape) < 0.1] = eos
        self.done = np.zeros(REQUESTS, np.int64)
        self.computed = torch.zeros(REQUESTS, dtype=torch.int64, device=device)
        self.states = SimpleNamespace(req_id_to_index={str(number): number for number in range(REQUESTS)},
                                      all_token_ids=SimpleNamespace(gpu=torch.from_numpy(self.tokens).to(device)),
                                      num_computed_tokens=SimpleNamespace(gpu=self.computed))
        self.input_ids = torch.zeros(MOST, dtype=torch.int32, device=device)

    def batch(self) -> tuple[SimpleNamespace, dict[int, int]]:
        """The next step as vLLM's runner describes it, and {request: tokens}."""
        chosen = self.generator.permutation(REQUESTS)[:int(self.generator.integers(1, REQUESTS + 1))]
        counts = [int(self.generator.integers(1, 8)) if self.generator.random() < 0.4 else 1 for _ in chosen]
        for r, n in zip(chosen, counts, strict=True):
            if self.done[r] + n > self.tokens.shape[1]:
                self.done[r] = 0                             # a new request in the same slot
        pairs = list(zip(chosen.tolist(), counts, strict=True))
        ids = np.concatenate([self.tokens[r, self.done[r]:self.done[r] + n] for r, n in pairs])
        positions = np.concatenate([np.arange(self.done[r], self.done[r] + n) for r, n in pairs])
        self.computed.copy_(torch.from_numpy(self.done))
        self.input_ids[:len(ids)].copy_(torch.from_numpy(ids))
        starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=self.device)
        return SimpleNamespace(req_ids=[str(r) for r in chosen], num_reqs=len(chosen), num_reqs_after_padding=len(chosen),
                               num_tokens=len(ids), num_draft_tokens=0, idx_mapping=torch.from_numpy(chosen).to(self.device),
                               query_start_loc=starts, input_ids=self.input_ids,
                               positions=torch.from_numpy(positions).to(self.device)), dict(pairs)


def run(checkpoint: Path, store: Path, steps: int, device: str = "cuda") -> dict[str, Any]:
    """Steps of one store, half of them eager, half as before and from a whole graph's replay (on a CPU: without the graph)."""
    modules = Modules(checkpoint, store, device)
    stager = getattr(modules.state, plugin.STAGER)
    inputs = Steps(modules.fields.vocab_size, modules.fields.eos_token_id, device)
    try:
        graph, kept = (None, []) if device == "cpu" else _captured(modules, inputs)
        wrong = {"eager": 0, "full": 0}
        tokens, before = 0, stager.store.stats()
        for number in range(2 * steps):
            mode = ("eager", "full")[number % 2]
            batch, counts = inputs.batch()
            modules.state.prepare_attn(batch, SimpleNamespace(name="FULL" if mode == "full" else "NONE"), None, None, None, None)
            found = modules.state.prepare_inputs(batch, inputs.states)
            count = batch.num_tokens
            arguments = (batch.input_ids[:count], found["query_start_loc"], found["ngram_context"])
            wanted = [_stock_rows(part, arguments) for part in modules.stock]
            if mode == "full" and graph is not None:
                graph.replay()
                rows = [part[:count] for part in kept]
            else:
                rows = _our_rows(modules.ours, arguments)
            wrong[mode] += any(not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(wanted, rows, strict=True))
            tokens += count
            for request, n in counts.items():
                inputs.done[request] += n
        after = stager.store.stats()
        return {"steps_of_each_mode": steps, "tokens": tokens, "wrong_steps": wrong, "wrong": sum(wrong.values()),
                "graph_steps": stager.counts.graph_steps, "page_reads": after.reads - before.reads,
                "rows_of_our_tables": sum(part.ngram_embedding.weight.shape[0] for part in modules.ours)}
    finally:
        stager.close()


def _stock_rows(part: Any, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What vLLM's own table gives for the ids of its own hash."""
    table, ids = part.ngram_embedding, part.compute_ngram_ids(*arguments)
    rows = table.weight.data.view(torch.uint8)[ids].view(table.weight.dtype).flatten(-2)
    return table.dequantize(rows, torch.bfloat16)


def _our_rows(parts: Any, arguments: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    for part in parts:
        part.start_prefetch(*arguments)
    return [part.ngram_embedding.dequantize(part(None, *arguments), torch.bfloat16) for part in parts]


def _captured(modules: Modules, inputs: Steps) -> tuple[Any, list[torch.Tensor]]:
    """A whole graph of the lookups and their dequantisation, for all tokens that fit, and the rows that it leaves."""
    static = modules.state.prepare_dummy_inputs(REQUESTS, MOST)
    arguments = (inputs.input_ids, static["query_start_loc"], static["ngram_context"])
    _our_rows(modules.ours, arguments)                       # everything is compiled before a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = _our_rows(modules.ours, arguments)
    return graph, kept
