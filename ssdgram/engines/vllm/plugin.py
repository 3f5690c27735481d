"""What becomes of vLLM 0.33.0's Engram classes: the tables are empty, the rows come from the store.

    ParallelEngramEmbedding   a subclass: 0-row tables, a loader that copies nothing, one shard with all columns, no lookup
                              (SSDGRAM_SPLIT=columns: vLLM's own shards, which its own `embed` gathers)
    Engram                    _start_prefetch, _finish_prefetch: eager breaks as before, delivering the step's rows
    EngramPrefetch            (specialised decode) start: the rows are delivered before the projections that run ahead
    DeepseekV41ModelState     opens the store; prepare_inputs begins the step; in FULL graphs it also fills all staged rows
                              add_request, remove_request: early prefetch

A step begins in `prepare_inputs`, the last eager point before every forward: a kernel packs tokens and lookback windows, from
the very tensors that vLLM's hash reads, into pinned memory; the planner takes it from there. In eager and piecewise steps a layer
waits for its reads in `_finish_prefetch`. A FULL graph runs no Python, so `prepare_inputs` waits for the reads and gathers into
`staged_rows` on the main stream before the launch, by a small graph of our own (see ssdgram.staging); the engine's graph captures
its lookup as nothing. (Gathers inside the engine's graph were not taken: they would buy one gather's overlap with layer 0.)
Invariant: dummy, idle and capture batches read nothing, and a step's rows are in `staged_rows` before anything reads them.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ssdgram.engines import opening, ranks
from ssdgram.engines.early import EarlyPrefetch
from ssdgram.engines.settings import Settings, read_settings
from ssdgram.engines.stager import Stager
from ssdgram.engines.vllm.loading import check_loader
from ssdgram.engines.windows import Windows
from ssdgram.geometry import ENGRAM, Geometry

log = logging.getLogger("ssdgram")
IMAGE_ID = 129264                                            # vLLM: every position of an image span, whatever the config says
STAGER = "_ssdgram_stager"                                   # attribute of Engram and ModelState


def settings_now() -> Settings:
    """The settings; the entry point has seen that there are some."""
    settings = read_settings()
    if settings is None:
        raise SystemExit("SSDGram: SSDGRAM_STORE was unset after the plug-in had become active")
    return settings


# ---------------------------------------------------------------- the embedding and the layer


def embedding_class(module: ModuleType) -> type:
    """The subclass of `module.ParallelEngramEmbedding` that holds no table."""

    class StoredEngramEmbedding(module.ParallelEngramEmbedding):  # type: ignore[name-defined,misc]
        """A table that is in the store: no rows here, and nothing to load."""

        _weight_loader = staticmethod(_load_nothing)

        def _get_shard_info(self) -> tuple[int, int]:
            self.dp_size = 1
            if settings_now().split == "none":
                self.tp_size = 1                             # all columns on every rank: no gather, bundles stay whole
                return 1, 0
            shards: tuple[int, int] = super()._get_shard_info()              # vLLM's own: a rank's columns, which its `embed` gathers
            return shards

        def _allocate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
            where = "meta" if torch.get_default_device().type == "meta" else "cpu"
            return (torch.empty(0, self.dim, dtype=torch.float8_e4m3fn, device=where),
                    torch.empty(0, self.dim // self.block_size, dtype=torch.uint8, device=where))

        def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
            """Nothing: the rows are delivered by `_finish_prefetch`, or before the graph is launched."""

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("SSDGram: rows are looked up by a step's tokens, not by ids; nothing in vLLM 0.33.0 calls this")

    return StoredEngramEmbedding


def _load_nothing(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """The checkpoint's table, mapped and untouched."""


def patch_engram(module: ModuleType) -> None:
    """Change `Engram` of vllm.models.deepseek_v41.common.engram in place."""
    if module.current_platform.is_rocm():
        raise SystemExit("SSDGram: vLLM on ROCm is not served by this plug-in: unset SSDGRAM_STORE")
    engram, stored = module.Engram, embedding_class(module)
    init_staging, embed_columns = engram._init_staging, engram.embed

    def _create_embedding(self: Any, layout: Any, layer_hash_index: int) -> Any:
        config = module.get_current_vllm_config()
        settings = settings_now()
        check_config(config)
        check_loader(config)
        if ranks.is_split(settings, "vllm", ENGRAM):
            check_columns(layout.n_heads * (layout.max_ngram_size - 1), module.get_tensor_model_parallel_world_size())
        check_against(opening.geometry_of(settings), layout, layout.layer_ids[layer_hash_index])
        self._ssdgram_layer = layout.layer_ids[layer_hash_index]
        sizes = tuple(size for order in layout.primes[layer_hash_index] for size in order)
        return stored(layout.num_embeddings[layer_hash_index], layout.head_dim, sizes, cpu_offload=True)

    def _init_staging(self: Any, max_tokens: int, head_dim: int) -> None:
        init_staging(self, max_tokens, head_dim)
        self.staged_rows.zero_()                             # rows that pad a graph are read before any step wrote them

    @module.eager_break_during_capture
    def _start_prefetch(self: Any, hash_ids: torch.Tensor, rows: torch.Tensor) -> None:
        stream = self._prefetch_stream
        stream.wait_stream(torch.cuda.current_stream())      # who read the staged rows before has done so
        stager = getattr(self, STAGER, None)
        if not capturing() and stager is not None and stager.ready(self._ssdgram_layer):
            with torch.cuda.stream(stream):
                stager.fill(self._ssdgram_layer)
        self._prefetch_done.record(stream)

    @module.eager_break_during_capture
    def _finish_prefetch(self: Any, event: torch.cuda.Event) -> None:
        deliver(self)
        torch.cuda.current_stream().wait_event(event)

    def embed(self: Any, hash_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens.tp_size > 1:                    # its ranks hold columns
            return embed_columns(self, hash_ids)
        rows = self._ready_rows(hash_ids.shape[0])[:, :self.embed_tokens.n_hash_cols]
        if not self.use_sequence_parallel:
            return rows
        return local_chunk(rows, module.get_tensor_model_parallel_rank(), module.get_tensor_model_parallel_world_size())

    for name, function in (("_create_embedding", _create_embedding), ("_init_staging", _init_staging), ("embed", embed),
                           ("_start_prefetch", _start_prefetch), ("_finish_prefetch", _finish_prefetch)):
        setattr(engram, name, function)
    log.info("vLLM's Engram tables come from %s", settings_now().store)


def deliver(engram: Any) -> None:
    """The step's rows of a layer into its staged rows, on the prefetch stream, unless that was done; waits for their reads."""
    stager = getattr(engram, STAGER, None)
    if not capturing() and stager is not None and stager.waits_for(engram._ssdgram_layer):
        with torch.cuda.stream(engram._prefetch_stream):
            stager.fill(engram._ssdgram_layer)
        engram._prefetch_done.record(engram._prefetch_stream)


def patch_prefetch(module: ModuleType) -> None:
    """Change `EngramPrefetch` of the specialised decode: its projections read staged rows without `_finish_prefetch`, so the rows come
    before them."""
    start = module.EngramPrefetch.start

    @functools.wraps(start)
    def start_with_rows(self: Any, num_tokens: int) -> None:
        for engram in self._buffers:
            deliver(engram)
        start(self, num_tokens)

    module.EngramPrefetch.start = start_with_rows


def capturing() -> bool:
    """Whether the current stream is being captured: in a whole graph then, for the pieces' breaks run outside of theirs."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def local_chunk(rows: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The rows of this rank's tokens under sequence parallelism, as vLLM cuts them: equal chunks, the last ones padded by zeros."""
    chunk = -(-rows.shape[0] // world)
    part = rows[rank * chunk:(rank + 1) * chunk]
    if part.shape[0] == chunk:
        return part
    return torch.cat([part, part.new_zeros((chunk - part.shape[0], *part.shape[1:]))])


# ---------------------------------------------------------------- checks


def check_config(config: Any) -> None:
    """ConfigError for what the plug-in does not serve."""
    opening.refuse(not config.use_v2_model_runner, "vLLM's V1 model runner is not served (VLLM_USE_V2_MODEL_RUNNER=0, or a feature that "
                                                   "falls back to it): use the V2 model runner, or unset SSDGRAM_STORE")
    parallel = config.parallel_config
    opening.refuse(parallel.prefill_context_parallel_size > 1, "prefill context parallelism is not served: set its size to 1, or unset "
                                                               "SSDGRAM_STORE")


def check_columns(columns: int, world: int) -> None:
    """ConfigError unless the columns can be divided among the ranks."""
    opening.refuse(columns % world > 0, f"SSDGRAM_SPLIT=columns: {columns} columns cannot be divided evenly among {world} ranks: choose a "
                                        f"tensor-parallel size that divides them, or unset SSDGRAM_SPLIT: every rank then has all rows")


def check_against(geometry: Geometry | None, layout: Any, layer: int) -> None:
    """IdentityError unless the store's geometry gives the layout's row ids for that layer. None: it is looked at later."""
    if geometry is None:
        return
    index = layout.layer_ids.index(layer)
    opening.check_layout(geometry, layers=[layer], primes=[[size for order in layout.primes[index] for size in order]],
                         offsets=layout.offsets[index:index + 1].tolist(), row_dim=layout.head_dim)


# ---------------------------------------------------------------- the model's state


def patch_state(module: ModuleType) -> None:
    """Change `DeepseekV41ModelState` of vllm.models.deepseek_v41.nvidia.model_state in place; its subclass inherits."""
    change_state(module.DeepseekV41ModelState, attach, begin_step)


def change_state(state: Any, attach: Callable[..., None], begin_step: Callable[..., None]) -> None:
    """Change a class of model states in place: `attach(self, vllm_config, model, device)` when one is made, `begin_step(self,
    input_batch, req_states)` behind the inputs of each step, and early prefetch."""

    def before(name: str) -> Callable[[Any], Any]:
        def decorate(hook: Callable[..., None]) -> Any:
            original = getattr(state, name)

            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                hook(self, *args, **kwargs)
                return original(self, *args, **kwargs)

            setattr(state, name, method)
            return hook

        return decorate

    def after(name: str) -> Callable[[Any], Any]:
        def decorate(hook: Callable[..., None]) -> Any:
            original = getattr(state, name)

            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(self, *args, **kwargs)
                hook(self, *args, **kwargs)
                return result

            setattr(state, name, method)
            return hook

        return decorate

    @after("__init__")
    def _attach(self: Any, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        attach(self, vllm_config, model, device)

    @after("add_request")
    def _offer(self: Any, req_index: int, new_req_data: Any) -> None:
        early = getattr(self, "_ssdgram_early", None)
        if early is not None and new_req_data.prefill_token_ids is not None:
            early.offer(new_req_data.req_id, new_req_data.prefill_token_ids, new_req_data.num_computed_tokens)

    @before("remove_request")
    def _drop(self: Any, req_id: str) -> None:
        early = getattr(self, "_ssdgram_early", None)
        if early is not None:
            early.drop(req_id)

    @before("prepare_attn")
    def _note_mode(self: Any, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> None:
        self._ssdgram_full = cudagraph_mode.name == "FULL"

    @before("prepare_dummy_inputs")
    def _idle(self: Any, num_reqs: int, num_tokens: int) -> None:
        if getattr(self, STAGER, None) is not None:
            getattr(self, STAGER).begin(None)

    @after("prepare_inputs")
    def _begin(self: Any, input_batch: Any, req_states: Any) -> None:
        if getattr(self, STAGER, None) is not None:
            begin_step(self, input_batch, req_states)


def attach(state: Any, vllm_config: Any, model: Any, device: torch.device) -> None:
    """Open the store for the Engram layers of this rank, once the model is loaded and before memory is profiled."""
    layers = sorted((part for part in model.modules() if hasattr(part, "_ssdgram_layer")), key=lambda part: part.layer_hash_index)
    if not layers or state.lookback_token_ids is None:
        return                                               # a rank of a pipeline without Engram layers
    settings = settings_now()
    rank = rank_on_node(vllm_config.parallel_config)
    numbers = [part._ssdgram_layer for part in layers]
    table = layers[0].embed_tokens
    part = {} if settings.split == "none" else {"columns": range(table.head_start, table.head_start + table.part_n_hash_cols)}
    store = ranks.open_store(settings, tp_group(vllm_config.parallel_config), layers=numbers, device=str(device), engine="vllm", rank=rank,
                             part=part)
    try:
        hasher = next(part for part in model.modules() if type(part).__name__ == "NgramHashState")
        for layer in numbers:
            check_against(store.geometry, hasher.layout, layer)
        opening.check_hash(store, layers=hasher.layout.layer_ids, multipliers=hasher.multipliers.cpu().numpy(),
                           token_map=hasher.token_map.cpu().numpy())
        stager = Stager(store, {part._ssdgram_layer: part.staged_rows for part in layers}, timeout_s=settings.timeout_s)
        windows_like(state.lookback_token_ids).load()
    except BaseException:
        store.close()
        raise
    state._ssdgram_early = EarlyPrefetch(store, settings.early, image=IMAGE_ID) if settings.early else None
    state._ssdgram_metrics = opening.metrics_of(store, settings, rank)
    state._ssdgram_full = False
    for owner in (state, *layers):
        object.__setattr__(owner, STAGER, stager)


def windows_like(before: torch.Tensor, newest_first: bool = True) -> Windows:
    """The windows of a step of one token, with tensors of the types that vLLM's steps have."""
    like = {"tokens": torch.int32, "positions": torch.int64, "starts": torch.int32}
    return Windows(before=before, count=1, requests=1, newest_first=newest_first,
                   **{name: torch.zeros(2, dtype=kind, device=before.device) for name, kind in like.items()})


def tp_group(parallel: Any) -> Any:
    """vLLM's tensor-parallel group, if this process is in one of several ranks."""
    if int(parallel.tensor_parallel_size) == 1:
        return None
    return importlib.import_module("vllm.distributed.parallel_state").get_tp_group()


def rank_on_node(parallel: Any) -> int:
    """The number of this process among those of its node."""
    return int(getattr(parallel, "data_parallel_rank_local", 0) or 0) * int(parallel.world_size) + int(parallel.rank)


def begin_step(state: Any, input_batch: Any, req_states: Any, *, before: Any = None, newest_first: bool = True,
               image: int = IMAGE_ID) -> None:
    """Start a real batch's reads; for a FULL graph, stage its rows too. Dummy batches (of requests that nobody added) read nothing.

    `before`: the windows of ids before each request's chunk (None: DeepSeek's), `newest_first` or oldest; `image`: as in Windows.
    """
    stager = getattr(state, STAGER)
    if not input_batch.req_ids or input_batch.req_ids[0] not in req_states.req_id_to_index:
        stager.begin(None)
        return
    step = stager.stage if state._ssdgram_full else stager.begin
    step(Windows(tokens=input_batch.input_ids, positions=input_batch.positions, starts=input_batch.query_start_loc,
                 before=state.lookback_token_ids if before is None else before, count=int(input_batch.num_tokens),
                 requests=int(input_batch.num_reqs), newest_first=newest_first, image=image), drafts=int(input_batch.num_draft_tokens))
    early = state._ssdgram_early
    if early is not None and len(early) > 0:
        advance(early, input_batch)
        early.pump()


def advance(early: EarlyPrefetch, input_batch: Any) -> None:
    """What this step schedules of prompts that wait is in the step."""
    index = {request: number for number, request in enumerate(input_batch.req_ids)}
    for request in early.requests():
        number = index.get(request)                          # type: ignore[call-overload]
        if number is not None:
            early.advance(request, int(input_batch.num_computed_tokens_np[number] + input_batch.num_scheduled_tokens[number]))
