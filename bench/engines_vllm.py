"""vLLM's part of bench/engines.py: its real Engram modules without a server, twice: with their own pinned table, and with the plug-in.

The stock twin is a subclass with the methods as they were before the plug-in changed the class. Both get the same weights and the
same steps; ids come from vLLM's own hash kernel. What is compared is the bits of the layers' outputs. Invariant: nothing of vLLM
is copied here; its files come from the peer folder, unchanged.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ssdgram.engines import opening
from ssdgram.engines.settings import Settings
from ssdgram.engines.stager import Stager
from ssdgram.engines.vllm import plugin

MOST = 256                                                   # tokens of a step
REQUESTS = 24
DEPTH = 3
METHODS = ("_create_embedding", "_init_staging", "embed", "_start_prefetch", "_finish_prefetch")


class Vllm:
    """vLLM's engram module, imported outside of a server, its current configuration, and a layout of the checkpoint's config.

    `rank`, `world`: of tensor parallelism, which meets at file `rendezvous` (none: a process by itself); `timeout`: of a collective.
    """

    def __init__(self, checkpoint: Path, device: str = "cuda", *, rank: int = 0, world: int = 1, rendezvous: str | None = None,
                 timeout: datetime.timedelta | None = None) -> None:
        import vllm.platforms as platforms
        from vllm.platforms.interface import UnspecifiedPlatform

        platforms._current_platform = UnspecifiedPlatform()
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.config.engram import EngramConfig
        from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

        self.device = device
        self.config = VllmConfig(device_config=DeviceConfig(device=device))
        object.__setattr__(self.config, "engram_config", EngramConfig(cpu_offload=True))
        self.config.scheduler_config.max_num_batched_tokens = MOST
        for name, value in (("tensor_parallel_size", world), ("world_size", world), ("rank", rank)):
            object.__setattr__(self.config.parallel_config, name, value)
        self.context = lambda: set_current_vllm_config(self.config)
        with self.context():
            with tempfile_name() as name:
                init_distributed_environment(world, rank, f"file://{rendezvous or name}", rank, "nccl" if device == "cuda" else "gloo",
                                             timeout)
                initialize_model_parallel(world, 1)
            import vllm.compilation.breakable_cudagraph as breakable
            import vllm.models.deepseek_v41.common.engram as engram

        breakable.weak_ref_tensor = lambda value: value      # vLLM's own needs its compiled part; a strong reference does here
        object.__setattr__(self.config, "model_config", SimpleNamespace(model=str(checkpoint), quantization="fp8"))
        self.module = engram
        self.module.is_uva_available = lambda: True
        self.module.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor       # pinned memory is read at its own address
        text = json.loads((checkpoint / "config.json").read_bytes())
        fields = {**text, **text.get("text_config", {})}
        self.model_config = SimpleNamespace(**{key: value for key, value in fields.items() if isinstance(key, str)})
        self.layout = engram.EngramLayout.from_config(self.model_config)
        original = {name: engram.Engram.__dict__[name] for name in METHODS}
        self.stock_class = type("StockEngram", (engram.Engram,), original)
        plugin.patch_engram(engram)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """As models are built: under the configuration, on the device, in bfloat16."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.context(), torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)

    def layers(self, kind: type) -> list[Any]:
        """The model's Engram layers, of this class."""
        with self.building():
            stream = torch.cuda.Stream()
            return [kind(self.model_config, None, self.layout, index, False, f"layers.{layer}.engram", stream)
                    for index, layer in enumerate(self.layout.layer_ids)]

    def hash_state(self, store: Any) -> Any:
        """vLLM's hash module with the store's token map (its own would ask a tokenizer of the transformers package)."""
        state = self.module.NgramHashState.__new__(self.module.NgramHashState)
        nn.Module.__init__(state)
        token_map = opening._map_of(store)
        state.layout, state.block_size, state.lookback_depth, state.use_slot_cache, state._cache = self.layout, 1, DEPTH, False, None
        state.pad_id = int(token_map[self.layout.pad_token_id])
        multipliers = self.module.compute_hash_multipliers(self.layout.layer_ids, self.layout.max_ngram_size,
                                                           self.layout.compressed_vocab_size)
        for name, value in (("token_map", torch.tensor(token_map, dtype=torch.int32)), ("primes", torch.tensor(self.layout.primes)),
                            ("offsets", self.layout.offsets), ("multipliers", multipliers)):
            state.register_buffer(name, value.to(self.device), persistent=False)
        return state


@functools.cache
def the_vllm(checkpoint: Path) -> Vllm:
    """vLLM is set up, and changed by the plug-in, once a process."""
    return Vllm(checkpoint)


@contextlib.contextmanager
def tempfile_name() -> Iterator[str]:
    """A name for the rendezvous of one process with itself."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/rendezvous"


def load_weights(vllm: Vllm, checkpoint: Path, stock: list[Any], ours: list[Any]) -> None:
    """The tables through each parameter's own loader; the projections and norms random, the same in both."""
    from safetensors import safe_open

    generator = torch.Generator(device=vllm.device).manual_seed(3)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())["weight_map"]
    for layer, number in enumerate(vllm.layout.layer_ids):
        for name, file in index.items():
            kind = "weight" if name.endswith(f"layers.{number}.engram.embed.weight") else \
                "weight_scale_inv" if name.endswith(f"layers.{number}.engram.embed.scale") else None
            if kind is not None:
                with safe_open(checkpoint / file, framework="pt") as tensors:
                    for side in (stock, ours):
                        parameter = getattr(side[layer].embed_tokens, kind)
                        parameter.weight_loader(parameter, tensors.get_tensor(name))
        for name in ("wkv.weight", "q_weight", "k_weight"):
            value = stock[layer].get_parameter(name)
            value.data.copy_(torch.randn(value.shape, generator=generator, device=vllm.device) * 0.05)
            ours[layer].get_parameter(name).data.copy_(value.data)
        if ours[layer].embed_tokens.weight.numel() or not stock[layer].embed_tokens.weight.numel():
            raise AssertionError("the stock layer has a table, the plug-in's has none: they do not")


class Steps:
    """Requests as a server would run them, and a step's inputs in buffers that stay where they are (graphs read them)."""

    def __init__(self, device: str, vocabulary: int, image: int, seed: int, longest: int = 4096) -> None:
        self.generator = np.random.default_rng(seed)
        self.tokens = self.generator.integers(0, vocabulary, (REQUESTS, longest))
        for row in self.tokens if image >= 0 else ():
            start = int(self.generator.integers(5, 200))
            row[start:start + 9] = image
        self.done = np.zeros(REQUESTS, np.int64)
        self.input_ids = torch.zeros(MOST, dtype=torch.int32, device=device)
        self.positions = torch.zeros(MOST, dtype=torch.int64, device=device)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
        self.window = torch.full((REQUESTS, DEPTH), -1, dtype=torch.int32, device=device)

    def draw(self, decode_only: bool) -> dict[int, int]:
        """{request: tokens} of the next step: decodes, and unless `decode_only` a few prefill chunks."""
        chosen = self.generator.permutation(REQUESTS)[:int(self.generator.integers(1, REQUESTS + 1))]
        scheduled = dict.fromkeys(map(int, chosen), 1)
        if not decode_only:
            for request in chosen[:3]:
                scheduled[int(request)] = int(self.generator.integers(1, 64))
        return scheduled

    def prepare(self, scheduled: dict[int, int]) -> SimpleNamespace:
        """Write the step into the buffers; the batch as vLLM's runner describes it."""
        ids, positions, starts = [], [], [0]
        window = np.full((REQUESTS, DEPTH), -1, np.int32)
        for number, (request, count) in enumerate(scheduled.items()):
            first = int(self.done[request])
            if first + count > self.tokens.shape[1]:
                first = self.done[request] = 0               # a new request in the same slot
            ids.append(self.tokens[request, first:first + count])
            positions.append(np.arange(first, first + count))
            starts.append(starts[-1] + count)
            for back in range(min(DEPTH, first)):
                window[number, back] = self.tokens[request, first - 1 - back]
            self.done[request] += count
        total = starts[-1]
        self.input_ids.zero_()
        self.positions.zero_()
        self.input_ids[:total].copy_(torch.from_numpy(np.concatenate(ids).astype(np.int32)))
        self.positions[:total].copy_(torch.from_numpy(np.concatenate(positions)))
        self.starts.fill_(total)
        self.starts[:len(starts)].copy_(torch.tensor(starts, dtype=torch.int32))
        self.window.copy_(torch.from_numpy(window))
        return SimpleNamespace(req_ids=[str(request) for request in scheduled], num_reqs=len(scheduled), num_tokens=total,
                               num_draft_tokens=0, query_start_loc=self.starts, input_ids=self.input_ids, positions=self.positions)


def state_for(store: Any, layers: list[Any], window: torch.Tensor, full: bool) -> SimpleNamespace:
    """What `plugin.begin_step` needs of a ModelState."""
    stager = Stager(store, {part._ssdgram_layer: part.staged_rows for part in layers})
    state = SimpleNamespace(lookback_token_ids=window, _ssdgram_early=None, _ssdgram_full=full)
    for owner in (state, *layers):
        object.__setattr__(owner, plugin.STAGER, stager)
    return state


def identity(checkpoint: Path, store_path: Path, steps: int) -> dict[str, Any]:
    """Steps of each mode, and how many of them gave other bits than the stock layers."""
    vllm = the_vllm(checkpoint)
    settings = Settings(store=str(store_path), dram="2GiB")
    stock, ours = vllm.layers(vllm.stock_class), vllm.layers(vllm.module.Engram)
    load_weights(vllm, checkpoint, stock, ours)
    store = opening.open_store(settings, layers=vllm.layout.layer_ids, device="cuda:0", engine="vllm")
    hasher = vllm.hash_state(store)
    opening.check_hash(store, layers=vllm.layout.layer_ids, multipliers=hasher.multipliers.cpu().numpy(),
                       token_map=hasher.token_map.cpu().numpy())
    image = plugin.IMAGE_ID if store._vocabulary > plugin.IMAGE_ID else -1
    results: dict[str, Any] = {"images": image >= 0, "wrong": 0}
    hidden = torch.randn(MOST, vllm.model_config.hc_mult, vllm.model_config.hidden_size, device="cuda").to(torch.bfloat16)
    try:
        for mode in ("eager", "piecewise", "full"):
            results[mode] = _one_mode(vllm, store, stock, ours, hasher, hidden, mode, steps, image)
            results["wrong"] += results[mode]["wrong_steps"]
    finally:
        store.close()
    return results


def _one_mode(vllm: Vllm, store: Any, stock: list[Any], ours: list[Any], hasher: Any, hidden: torch.Tensor, mode: str, steps: int,
              image: int) -> dict[str, Any]:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    inputs = Steps("cuda", store._vocabulary, image, seed={"eager": 1, "piecewise": 2, "full": 3}[mode])
    state = state_for(store, ours, inputs.window, full=mode == "full")
    requests = SimpleNamespace(req_id_to_index={str(number): number for number in range(REQUESTS)})

    def forward(layers: list[Any], count: int) -> list[torch.Tensor]:
        ids, mask = inputs.input_ids[:count], inputs.input_ids[:count] != plugin.IMAGE_ID
        hashes = hasher(ids, inputs.positions[:count], inputs.starts, ~mask, inputs.window, inputs.window == plugin.IMAGE_ID, None, None)
        for layer in layers:
            layer.prepare_embeddings(hashes[:, layer.layer_hash_index])
        return [layer(hidden[:count], hashes[:, layer.layer_hash_index], mask) for layer in layers]

    replay: dict[str, Callable[[], None]] = {}
    kept: dict[str, list[torch.Tensor]] = {}
    if mode != "eager":
        getattr(state, plugin.STAGER).begin(None)
        inputs.prepare({0: 1})
        for name, layers in (("stock", stock), ("ours", ours)):
            forward(layers, MOST)                            # as the engine: everything is compiled before a capture
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                if mode == "piecewise":
                    capture = BreakableCUDAGraphCapture()
                    with capture:
                        kept[name] = forward(layers, MOST)
                    replay[name] = capture.replay
                    breaks = capture.num_eager_breaks
                else:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode="thread_local"):       # NCCL's own thread asks for events
                        kept[name] = forward(layers, MOST)
                    replay[name] = graph.replay
                    breaks = 0
        torch.cuda.synchronize()
        inputs.done[:] = 0
    wrong, tokens, before = 0, 0, store.stats()
    for _ in range(steps):
        batch = inputs.prepare(inputs.draw(decode_only=mode == "full"))
        if mode == "eager":
            wanted = forward(stock, batch.num_tokens)
            plugin.begin_step(state, batch, requests)
            found = forward(ours, batch.num_tokens)
        else:
            replay["stock"]()
            wanted = [part[:batch.num_tokens].clone() for part in kept["stock"]]
            plugin.begin_step(state, batch, requests)
            replay["ours"]()
            found = [part[:batch.num_tokens] for part in kept["ours"]]
        wrong += any(not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, wanted, strict=True))
        tokens += batch.num_tokens
    after = store.stats()
    result = {"steps": steps, "tokens": tokens, "wrong_steps": wrong, "page_reads": after.reads - before.reads}
    return result if mode == "eager" else {**result, "eager_breaks": breaks}


# ---------------------------------------------------------------- time


def timing(checkpoint: Path, store_path: Path, table_gib: int, repetitions: int = 200) -> dict[str, Any]:
    """us from ids ready to both layers' rows staged, host clock with a synchronisation at its end: medians, interleaved."""
    vllm = the_vllm(checkpoint)
    settings = Settings(store=str(store_path), dram="2GiB")
    store = opening.open_store(settings, layers=(1, 14), device="cuda:0", engine="vllm")
    results: dict[str, Any] = {"table_gib": table_gib, "repetitions": repetitions}
    try:
        with vllm.context():
            table = _pinned_table(vllm.module, table_gib)
        stream_tokens = np.random.default_rng(5).integers(0, store._vocabulary, 60_000)
        for start in range(0, len(stream_tokens), 2048):
            with store.prefetch(stream_tokens[start:start + 2048], lookback=stream_tokens[max(0, start - 3):start]) as batch:
                batch.wait()
        for count in (64, 256):
            results[str(count)] = _time_steps(store, table, stream_tokens, count, repetitions)
    finally:
        store.close()
    return results


def _pinned_table(engram: Any, gib: int) -> Any:
    """vLLM's embedding over a pinned table of that size, 24 columns."""
    rows = (gib << 30) // 256 // 24
    return engram.ParallelEngramEmbedding(rows * 24, 256, (rows,) * 24, cpu_offload=True)


def _time_steps(store: Any, table: Any, stream: np.ndarray, count: int, repetitions: int) -> dict[str, Any]:
    generator = np.random.default_rng(count)
    layers = [SimpleNamespace(_ssdgram_layer=layer, staged_rows=torch.zeros(MOST, 24, 256, dtype=torch.bfloat16, device="cuda"))
              for layer in store.layers]
    window = torch.full((count, DEPTH), -1, dtype=torch.int32, device="cuda")
    state = state_for(store, layers, window, full=True)
    ids = torch.zeros(2, count, 24, dtype=torch.int32, device="cuda")
    outs = torch.zeros(2, count, 24, 256, dtype=torch.bfloat16, device="cuda")
    side, done = torch.cuda.Stream(), torch.cuda.Event()

    def stock() -> None:                                     # what vLLM captures: both lookups on the prefetch stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for layer in range(2):
                table.lookup(ids[layer], outs[layer], background=True)
        done.record(side)
        torch.cuda.current_stream().wait_event(done)

    stock()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stock()
    batch = SimpleNamespace(req_ids=["0"], num_reqs=count, num_tokens=count, num_draft_tokens=0,
                            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device="cuda"),
                            input_ids=torch.zeros(count, dtype=torch.int32, device="cuda"),
                            positions=torch.full((count,), 100, dtype=torch.int64, device="cuda"))
    requests = SimpleNamespace(req_id_to_index={"0": 0})
    rows = table.num_embeddings

    def draw(fresh: bool) -> None:
        places = generator.integers(3, len(stream), count)
        windows = generator.integers(0, store._vocabulary, (count, 4)) if fresh else stream[places[:, None] - np.arange(4)]
        batch.input_ids.copy_(torch.from_numpy(windows[:, 0].astype(np.int32)))
        window.copy_(torch.from_numpy(windows[:, 1:].astype(np.int32)))
        ids.copy_(torch.from_numpy(generator.integers(0, rows, (2, count, 24)).astype(np.int32)))

    def timed(work: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e6

    sides = {"ours": lambda: plugin.begin_step(state, batch, requests), "engine_graph": graph.replay, "engine_eager": stock}
    times: dict[str, list[float]] = {name: [] for name in sides}
    before = store.stats()
    for number in range(repetitions + 20):
        for name, work in sides.items():
            draw(fresh=False)                                # for each side: ids looked up a moment ago are found faster
            taken = timed(work)
            if number >= 20:
                times[name].append(taken)
    after = store.stats()
    result = {name: {"us": round(float(np.median(values)), 1), "p99_us": round(float(np.quantile(values, 0.99)), 1)}
              for name, values in times.items()}
    misses = sum(after.misses.values()) - sum(before.misses.values())
    cold = []
    for _ in range(20):
        draw(fresh=True)
        reads = store.stats().reads
        taken = timed(sides["ours"])
        cold.append((taken, store.stats().reads - reads))
    stall, pages = np.median([taken for taken, _ in cold]), np.median([count for _, count in cold])
    return {**result, "misses_while_hits_are_timed": misses,
            "all_misses": {"us": round(float(stall), 1), "page_reads": float(pages), "reads_per_s": round(float(pages / stall * 1e6))}}
