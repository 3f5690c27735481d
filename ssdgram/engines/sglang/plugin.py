"""What becomes of SGLang 0.5.23's Engram: the tables are empty, the rows come from the store.

    EngramEmbedding                     replaced: no rows, nothing to load; rows of the step under way, or of what was staged
                                        (SSDGRAM_SPLIT=owner: added up over the tensor-parallel group)
    EngramRowStager.from_model, stage   the scheduler's stager: reads begin when an extend batch is scheduled
    EngramHasher.forward                around: begins the step of a batch whose tokens are on the device (decode, verify, mixed)
    DecodeCudaGraphRunner.load_batch    after, within execute: begins the step and fills the buffers that the graph reads
    Scheduler._add_request_to_queue     after: early prefetch

The hash commits a decode step's tokens to its history, so the windows are packed before it runs. Decode graphs read one buffer a
layer, as large as the largest step that ran eagerly before a capture; nothing else may be captured around the lookup.
Invariant: a batch's rows are those of its own tokens; dummy, idle and capture batches read nothing and get zeros.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from ssdgram.engines import opening, ranks
from ssdgram.engines.early import EarlyPrefetch
from ssdgram.engines.settings import Settings, read_settings
from ssdgram.engines.sglang.loading import check_loader
from ssdgram.engines.stager import Stager
from ssdgram.engines.windows import Windows
from ssdgram.errors import SSDGramError
from ssdgram.geometry import ENGRAM as ENGRAM_TABLES
from ssdgram.geometry import Geometry
from ssdgram.sequence import Sequence

log = logging.getLogger("ssdgram")
ENGRAM = "sglang.srt.layers.engram"
STAGING = "sglang.srt.layers.engram_staging"
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
CAPTURE = "sglang.srt.model_executor.runner_utils.capture_mode"
SCHEDULER = "sglang.srt.managers.scheduler"
RUNNER = "sglang.srt.model_executor.model_runner"
_backend: list[Any] = []                                     # of this process, once its model is loaded: Backend, or ple.PLEBackend


def settings_now() -> Settings:
    """The settings; the entry point has seen that there are some."""
    settings = read_settings()
    if settings is None:
        raise SystemExit("SSDGram: SSDGRAM_STORE was unset after the plug-in had become active")
    return settings


def register() -> None:
    """Register all hooks, have them applied, and look whether they were. RuntimeError if one was not."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ssdgram.engines.sglang.ple import after_manager

    engram = importlib.import_module(ENGRAM)
    embedding = embedding_class(engram)
    for target, hook, kind in ((f"{ENGRAM}.EngramEmbedding", embedding, HookType.REPLACE),
                               (f"{ENGRAM}.EngramHasher.forward", around_hash, HookType.AROUND),
                               (f"{STAGING}.EngramRowStager.from_model", from_model, HookType.REPLACE),
                               (f"{GRAPHS}.DecodeCudaGraphRunner.load_batch", after_load_batch, HookType.AFTER),
                               (f"{GRAPHS}.DecodeCudaGraphRunner.execute", around_execute, HookType.AROUND),
                               (f"{RUNNER}.ModelRunner.init_ngram_embedding_manager", after_manager, HookType.AFTER),
                               (f"{SCHEDULER}.Scheduler._add_request_to_queue", after_request, HookType.AFTER)):
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    staging, graphs, runner, scheduler = (importlib.import_module(name) for name in (STAGING, GRAPHS, RUNNER, SCHEDULER))
    taken = {"EngramEmbedding": engram.EngramEmbedding is embedding,
             **{name: hasattr(function, "__wrapped__") for name, function in (
                 ("EngramHasher.forward", engram.EngramHasher.forward), ("EngramRowStager.from_model", staging.EngramRowStager.from_model),
                 ("DecodeCudaGraphRunner.load_batch", graphs.DecodeCudaGraphRunner.load_batch),
                 ("DecodeCudaGraphRunner.execute", graphs.DecodeCudaGraphRunner.execute),
                 ("ModelRunner.init_ngram_embedding_manager", runner.ModelRunner.init_ngram_embedding_manager),
                 ("Scheduler._add_request_to_queue", scheduler.Scheduler._add_request_to_queue))}}
    if not all(taken.values()):
        raise RuntimeError(f"hooks that were not applied: {[name for name, done in taken.items() if not done]}")
    log.info("SGLang's Engram tables come from %s", settings_now().store)


def capturing() -> bool:
    """Whether the current stream is being captured."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


# ---------------------------------------------------------------- the embedding


def embedding_class(engram: Any) -> type:
    """The replacement of `engram.EngramEmbedding`, a subclass of it that holds no table."""
    original = engram.EngramEmbedding

    class StoredEngramEmbedding(original):  # type: ignore[valid-type,misc]
        """A table that is in the store."""

        def __init__(self, num_embeddings: int, dim: int, layer_id: int, column_bounds: tuple[int, ...]) -> None:
            nn.Module.__init__(self)
            self.dim, self.layer_id, self.column_bounds = dim, layer_id, tuple(column_bounds)
            self.tp_size, self.row_start, self.rows = 1, 0, 0                # all columns on every rank: nothing to reduce,
            self.split = is_split(engram)                                    # ... or bundles on their owners, and rows to add up
            self.host_table = self.peer = None
            self._sort_host_reads, self.staged_by_scheduler = False, True
            self.weight = nn.Parameter(torch.empty(0, dim, dtype=torch.float8_e4m3fn), requires_grad=False)
            self.scale = nn.Parameter(torch.empty(0, dim // engram.FP8_BLOCK_SIZE, dtype=torch.float8_e8m0fnu), requires_grad=False)
            self.weight.weight_loader = self.scale.weight_loader = _load_nothing
            self.graph_rows: torch.Tensor | None = None      # what decode graphs read
            self.captured = False
            check_loader(engram)
            geometry_check(opening.geometry_of(settings_now()), layer_id, dim, self.column_bounds)

        def finish_load(self, label: str) -> None:
            """Nothing was loaded."""

        def forward(self, indices: torch.Tensor, forward_batch: Any = None, *, cp_all_tokens: bool = False) -> torch.Tensor:
            """The rows of the step under way; zeros where there is none. In a decode graph: the buffer that is filled before it."""
            if capturing():
                rows = self._captured_rows(indices.shape[0], forward_batch)
                return self._of_all_ranks(rows.clone()) if self.split else rows          # sums in the buffer would grow behind a batch
            if is_decode(forward_batch):
                self._make_room(indices)
            out = self.new_rows(indices).zero_()
            if _backend:
                _backend[0].stager.fill(self.layer_id, out)
            return self._of_all_ranks(out)

        def dequant_staged(self, rows: Any, scales: Any, copied: Any, hash_shape: Any) -> torch.Tensor:
            """`rows`: the Staged of a batch (its stager's), which takes the place of staged rows; zeros behind its tokens."""
            out = torch.zeros(*hash_shape, self.dim, dtype=torch.bfloat16, device=rows.device)
            rows.fill(self.layer_id, out)
            return self._of_all_ranks(out)

        def _of_all_ranks(self, rows: torch.Tensor) -> torch.Tensor:
            return add_up(rows, engram.get_parallel().tp_group) if self.split else rows

        def _make_room(self, indices: torch.Tensor) -> None:
            """Graphs are captured from the largest batch down, each behind eager runs of its size."""
            if not self.captured and (self.graph_rows is None or self.graph_rows.shape[0] < indices.shape[0]):
                self.graph_rows = self.new_rows(indices).zero_()

        def _captured_rows(self, count: int, forward_batch: Any) -> torch.Tensor:
            if not is_decode(forward_batch):
                raise RuntimeError("SSDGram: this graph would capture a prefill's lookup: use --cuda-graph-backend-prefill=breakable or "
                                   "disabled")
            if self.graph_rows is None or self.graph_rows.shape[0] < count:
                raise RuntimeError(f"SSDGram: a decode graph of {count} tokens is captured before any eager step of that size")
            self.captured = True
            return self.graph_rows[:count]

    StoredEngramEmbedding.__name__ = StoredEngramEmbedding.__qualname__ = "EngramEmbedding"
    return StoredEngramEmbedding


def is_split(engram: Any) -> bool:
    """Whether the ranks of SGLang's tensor-parallel group divide the tables among them; ConfigError where they cannot."""
    split, parallel = ranks.is_split(settings_now(), "sglang", ENGRAM_TABLES), engram.get_parallel()
    opening.refuse(split and parallel.attn_dp_size > 1, "SSDGRAM_SPLIT=owner: the ranks of data-parallel attention have different tokens, "
                                                        "so their rows cannot be added up: unset SSDGRAM_SPLIT")
    return split and parallel.tp_size > 1


def add_up(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """bf16 rows of which each rank of a group of SGLang's has some, and zeros for the others: all of them, in place; collective.

    Whole numbers are added up, as SGLang does on ROCm: x + 0 is x then, -0.0 and every NaN included.
    """
    if rows.numel() > 0:
        importlib.import_module(ENGRAM).inplace_all_reduce(rows.view(torch.int32), group_name=group.unique_name)
    return rows


def is_decode(forward_batch: Any) -> bool:
    """Whether the batch is one that decode graphs serve."""
    mode = None if forward_batch is None else forward_batch.forward_mode
    return mode is not None and bool(mode.is_decode() or mode.is_target_verify())


def _load_nothing(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """The checkpoint's table, mapped and untouched."""


def geometry_check(geometry: Geometry | None, layer: int, dim: int, bounds: tuple[int, ...]) -> None:
    """IdentityError unless the store's table of that layer has these columns. None: it is looked at later."""
    if geometry is not None:
        opening.check_layout(geometry, layers=[layer], primes=[np.diff(bounds)], offsets=[bounds[:-1]], row_dim=dim)


# ---------------------------------------------------------------- the process's backend


class Staged:
    """An extend batch whose reads began in the scheduler: what `dequant_staged` gets in place of staged rows."""

    def __init__(self, backend: Backend, sequence: Sequence) -> None:
        self.device, self._count = backend.device, len(sequence)
        self._batch, self._left = backend.store.prefetch(sequence), set(backend.store.layers)
        self._timeout_s = backend.stager.timeout_s

    def fill(self, layer: int, out: torch.Tensor) -> None:
        """The layer's rows into the first rows of `out`; the batch is released behind the last layer."""
        self._batch.wait(layer, timeout_s=self._timeout_s)
        self._batch.rows(layer, out=out[:self._count])
        self._left.discard(layer)
        if not self._left:
            self._batch.release()

    def __del__(self) -> None:
        batch = getattr(self, "_batch", None)
        if batch is not None and batch._store._usable():
            with contextlib.suppress(SSDGramError):          # a batch that never ran
                batch.release()


class Backend:
    """The store of this process, the model's hasher, the step under way. It is the stager that SGLang's scheduler calls."""

    def __init__(self, store: Any, hasher: Any, embeds: list[Any], device: torch.device, settings: Settings, most_tokens: int,
                 images_from: int) -> None:
        self.store, self.hasher, self.device = store, hasher, device
        self.layers = [embed.layer_id for embed in embeds]
        self.embeds = embeds
        self.image = -1 if hasher.image_token_id is None else int(hasher.image_token_id)
        self.images_from = 0 if hasher.image_token_id is None else images_from
        self.stager = Stager(store, {}, most_tokens=most_tokens, timeout_s=settings.timeout_s)
        self.early = EarlyPrefetch(store, settings.early, image=self.image, images_from=self.images_from) if settings.early else None
        self.metrics: Any = None

    # ---- extend batches, in the scheduler

    def stage(self, batch: Any) -> list[tuple[Any, None, None]] | None:
        """Begin the reads of an extend batch whose tokens are all on the host; None leaves them to the forward."""
        if not batch.forward_mode.is_extend_without_speculative() or any(batch.encoder_swa_reset or ()):
            return None
        sequence = self._on_host(batch)
        if sequence is None:
            return None
        staged = Staged(self, sequence)
        self.stager.counts.steps += 1
        self.stager.counts.tokens += len(sequence)
        return [(staged, None, None)] * len(self.layers)

    def _on_host(self, batch: Any) -> Sequence | None:
        depth = self.hasher.max_ngram_size - 1
        tokens, lengths, windows, valid = [], [], [], []
        for request, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            ids = request.full_untruncated_fill_ids
            if prefix + extend > len(ids):
                return None                                  # a decode row's newest token can still be on the device
            before = np.asarray(ids[max(0, prefix - depth):prefix], np.int64)
            tokens.append(np.asarray(ids[prefix:prefix + extend], np.int64))
            lengths.append(extend)
            windows.append(np.concatenate([np.zeros(depth - len(before), np.int64), before]))
            valid.append(np.arange(depth) >= depth - len(before))
            if self.early is not None:
                self.early.advance(request.rid, prefix + extend)
        if self.early is not None:
            self.early.pump()
        if sum(lengths) == 0:
            return None
        flat, before = np.concatenate(tokens), np.stack(windows)
        return Sequence.ragged(flat, lengths, before, np.stack(valid), participates=self._takes_part(flat),
                               windows_participate=self._takes_part(before))

    def _takes_part(self, ids: np.ndarray) -> np.ndarray:
        part = ids != self.image
        return part & (ids < self.images_from) if self.images_from else part

    # ---- batches whose tokens are on the device

    def begin(self, input_ids: torch.Tensor, forward_batch: Any) -> None:
        """Begin the step of a forward, before the hash changes its history."""
        mode = forward_batch.forward_mode
        if input_ids.shape[0] == 0 or mode.is_idle():
            self.stager.begin(None)
            return
        slots, history = forward_batch.req_pool_indices, self.hasher.history
        common: dict[str, Any] = {"tokens": input_ids, "positions": forward_batch.positions, "newest_first": False, "image": self.image,
                                  "images_from": self.images_from, "requests": int(slots.shape[0])}
        if mode.is_decode() or mode.is_target_verify():
            block = int(forward_batch.spec_info.draft_token_num) if mode.is_target_verify() else 1
            windows = Windows(before=history, rows=slots, block=block, count=int(slots.shape[0]) * block, **common)
            self.stager.begin(windows, drafts=int(slots.shape[0]) * (block - 1))
            return
        lengths = forward_batch.extend_seq_lens_cpu
        count = int(sum(lengths)) if lengths is not None else int(input_ids.shape[0])
        given = forward_batch.engram_history
        self.stager.begin(Windows(before=history if given is None else given, rows=slots if given is None else None,
                                  starts=forward_batch.extend_start_loc, count=count, **common))

    def begin_graph(self, runner: Any, forward_batch: Any) -> None:
        """Before a decode graph is replayed: its batch's rows into the buffers that it reads."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or not is_decode(forward_batch) or runner.raw_bs == 0:
            self.stager.begin(None)
            return
        if runner.ragged_verify_mode:
            raise RuntimeError("SSDGram: ragged verification is not served: set SGLANG_RAGGED_VERIFY_MODE=static, or unset SSDGRAM_STORE")
        buffers, requests, block = runner.buffers, int(runner.raw_bs), int(runner.captured_req_width)
        self.stager.stage(Windows(tokens=buffers.input_ids, positions=buffers.positions, before=self.hasher.history, block=block,
                                  rows=buffers.req_pool_indices, newest_first=False, image=self.image, images_from=self.images_from,
                                  count=requests * block, requests=requests), drafts=requests * (block - 1),
                          targets={embed.layer_id: embed.graph_rows for embed in self.embeds})


def from_model(cls: type, model: torch.nn.Module, hasher: Any, device: torch.device) -> Backend:
    """EngramRowStager.from_model: open the store for this model's layers. Called once its weights are loaded, before any capture."""
    engram = importlib.import_module(ENGRAM)
    parallel = engram.get_parallel()
    opening.refuse(parallel.attn_cp_size > 1, "prefill context parallelism is not served: set its size to 1, or unset SSDGRAM_STORE")
    settings = settings_now()
    embeds = [part.embed for part in sorted((part for part in model.modules() if isinstance(part, engram.Engram)),
                                            key=lambda part: part.layer_hash_index)]
    opening.refuse(not embeds or not all(hasattr(embed, "graph_rows") for embed in embeds),
                   "the model's Engram layers were built before the plug-in was active")
    rank = 0 if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
    layers = [embed.layer_id for embed in embeds]
    group = parallel.tp_group if parallel.tp_size > 1 else None
    store = ranks.open_store(settings, group, layers=layers, device=str(device), engine="sglang", rank=rank,
                             part=ranks.owner_of(group) if embeds[0].split else {})
    try:
        for embed in embeds:
            geometry_check(store.geometry, embed.layer_id, embed.dim, embed.column_bounds)
        opening.check_hash(store, layers=layers, multipliers=hasher.multipliers.cpu().numpy(), token_map=hasher.token_map.cpu().numpy())
        backend = Backend(store, hasher, embeds, device, settings, most_tokens(engram), int(engram.MM_PAD_SHIFT_VALUE))
    except BaseException:
        store.close()
        raise
    backend.metrics = opening.metrics_of(store, settings, rank)
    _backend[:] = [backend]
    return backend


def most_tokens(engram: Any) -> int:
    """The most tokens of a step by the server's settings; 0 if they do not say."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    return int(chunk) if chunk is not None and chunk > 0 else int(schedule.max_prefill_tokens or 0)


# ---------------------------------------------------------------- the hooks


def around_hash(original: Any, hasher: Any, input_ids: torch.Tensor, forward_batch: Any) -> Any:
    """EngramHasher.forward: a step begins, unless the scheduler began it, or a graph is captured around this."""
    if _backend and hasher is _backend[0].hasher and not capturing() and hasher.history is not None:
        if forward_batch.engram_staged_rows is None and not in_capture():
            _backend[0].begin(input_ids, forward_batch)
        else:
            _backend[0].stager.end()
    return original(hasher, input_ids, forward_batch)


def in_capture() -> bool:
    """Whether a graph runner captures, or warms up for it: tokens are made up then."""
    return bool(importlib.import_module(CAPTURE).is_capture_mode)


def around_execute(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """DecodeCudaGraphRunner.execute: only what is loaded in here is about to be replayed."""
    runner._ssdgram_executing = True
    try:
        return original(runner, *args, **kwargs)
    finally:
        runner._ssdgram_executing = False


def after_load_batch(result: Any, runner: Any, forward_batch: Any, pp_proxy_tensors: Any = None) -> None:
    """DecodeCudaGraphRunner.load_batch: the graph's inputs are in their buffers; the draft model's graphs have no Engram."""
    if _backend and getattr(runner, "_ssdgram_executing", False) and not runner.model_runner.is_draft_worker:
        _backend[0].begin_graph(runner, forward_batch)


def after_request(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Scheduler._add_request_to_queue: a prompt waits from here on; a retracted request brings its output along."""
    early = _backend[0].early if _backend else None
    if early is not None:
        early.offer(req.rid, [*req.origin_input_ids, *req.output_ids])
        early.pump()
