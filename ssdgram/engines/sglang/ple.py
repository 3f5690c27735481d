"""What becomes of SGLang 0.5.23's Qwen4Exp PLE classes: the table is empty, the rows come from the store.

    Qwen4ExpPinnedHostEmbedding         a subclass: no rows, nothing to load, all rows on every rank; gather and reduce deliver rows
    Qwen4ExpPLELayer.__init__           --ple-offload-embedding is taken as given; the embedding learns its decoder layer
    _prepare_ple_batch                  and then the forward's step begins, over the history that SGLang's hash reads
    ModelRunner.init_ngram_embedding_manager    and then the store is opened: weights are loaded, nothing is captured yet
    DecodeCudaGraphRunner.load_batch            (plugin.py's hook) the step begins, and its rows are staged before the graph is replayed

SGLang's gather gives bf16 of the stored values; its PLE layer multiplies by the table's scale. The rows of a step that are not
read yet when the prefetch starts are written where they are used, behind the layer before. The first three are set when the
model's module is imported (watch.py): HookRegistry would import a model that most servers do not have.
Invariant: a batch's rows are those of its own tokens; dummy, idle and capture batches read nothing and get zeros.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ssdgram.engines import opening, ple, ranks
from ssdgram.engines.early import EarlyPrefetch
from ssdgram.engines.settings import Settings
from ssdgram.engines.sglang import plugin
from ssdgram.engines.sglang.loading import check_loader
from ssdgram.engines.stager import Stager
from ssdgram.engines.windows import Windows
from ssdgram.geometry import PLE

log = logging.getLogger("ssdgram")
FAR = 1 << 20                                                # a position behind which every id of a window is there


def patch(module: ModuleType) -> None:
    """Change sglang.srt.models.qwen4_exp in place, as it was imported."""
    module.Qwen4ExpPinnedHostEmbedding = embedding_class(module)  # type: ignore[attr-defined]
    layer = module.Qwen4ExpPLELayer
    layer.__init__ = _around(layer.__init__, around_layer)
    module._prepare_ple_batch = _around(module._prepare_ple_batch, around_prepare)  # type: ignore[attr-defined]
    log.info("SGLang's PLE tables come from %s", plugin.settings_now().store)


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def embedding_class(module: Any) -> type:
    """The replacement of `module.Qwen4ExpPinnedHostEmbedding`, a subclass of it that holds no table."""
    original = module.Qwen4ExpPinnedHostEmbedding

    class StoredPLEEmbedding(original):  # type: ignore[valid-type,misc]
        """A table that is in the store."""

        def __init__(self, embedding: Any, *, backend: str = "pinned", table_dir: str | None = None) -> None:
            nn.Module.__init__(self)
            opening.refuse(bool(embedding.num_added_embeddings), "a PLE table with added vocabulary rows is not served: unset "
                                                                 "SSDGRAM_STORE")
            for name in self._COPIED_ATTRIBUTES:
                setattr(self, name, getattr(embedding, name))
            self.quant_method = None
            shared = int(embedding.tp_size) > 1
            self.split = ranks.is_split(plugin.settings_now(), "sglang", PLE) and shared
            self.tp_size = 1                                 # all rows on every rank: nothing that SGLang would add up
            self.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=0)        # no row is copied from a file
            table = torch.empty(0, self.embedding_dim, dtype=embedding.weight.dtype, device="cpu")
            self.register_parameter("weight", nn.Parameter(table, requires_grad=False))
            self.register_buffer("weight_scale", embedding.weight_scale, persistent=True)
            del embedding.weight
            self.layer_id = -1                               # the layer says it
            self.late = False                                # rows were asked for that are still to be written
            self.graph_rows: torch.Tensor | None = None      # what decode graphs read
            self.captured = False
            check_loader(importlib.import_module(plugin.ENGRAM))

        def gather(self, input_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            """bf16 rows [*ids, dim] of the step under way, zeros where there is none. With `out`, which goes to `reduce` before it is
            used, rows that are not read yet are left to that. In a decode graph: what is staged before its replay."""
            output = self.allocate_output((*input_ids.shape, self.embedding_dim), input_ids.device) if out is None else out
            self.late = False
            count = input_ids.shape[0]
            if plugin.capturing():
                output.copy_(self._captured_rows(count))
                return output
            if plugin._backend and plugin._backend[0].warming_up:
                self._make_room(output, count)
            stager = plugin._backend[0].stager if plugin._backend else None
            if out is not None and stager is not None and stager.waits_for(self.layer_id) and not stager.ready(self.layer_id):
                self.late = True
            else:
                self.deliver(output)
            return output

        def reduce(self, output: torch.Tensor) -> torch.Tensor:
            """Late rows are waited for here, and those of other owners come from there."""
            if self.late:
                self.late = False
                self.deliver(output.view(output.shape[0], -1, self.embedding_dim))
            return plugin.add_up(output, self.group()) if self.split else output

        def group(self) -> Any:
            """SGLang's group whose ranks would share the table."""
            parallel = importlib.import_module(plugin.ENGRAM).get_parallel()
            return parallel.attn_tp_group if self.use_attn_tp_group else parallel.tp_group

        def deliver(self, out: torch.Tensor) -> None:
            """The step's rows into the first rows of `out`, bf16 [T, columns, dim], on the current stream; zeros behind them."""
            backend = plugin._backend[0] if plugin._backend else None
            count = backend.count if backend is not None and backend.stager.waits_for(self.layer_id) else 0
            if count < out.shape[0]:
                out[count:].zero_()
            if backend is None or count == 0:
                return
            if self.weight.dtype.itemsize == 2:
                backend.stager.fill(self.layer_id, out)
            else:
                codes = torch.empty(out.shape, dtype=torch.uint8, device=out.device)
                backend.stager.fill(self.layer_id, codes)
                out[:count].copy_(codes[:count].view(self.weight.dtype))

        def _make_room(self, output: torch.Tensor, count: int) -> None:
            """Graphs are captured from the largest batch down, each behind eager runs of its size."""
            if not self.captured and (self.graph_rows is None or self.graph_rows.shape[0] < count):
                self.graph_rows = torch.zeros_like(output)

        def _captured_rows(self, count: int) -> torch.Tensor:
            if self.graph_rows is None or self.graph_rows.shape[0] < count:
                raise RuntimeError(f"SSDGram: a decode graph of {count} tokens is captured before any eager step of that size")
            self.captured = True
            return self.graph_rows[:count]

    StoredPLEEmbedding.__name__ = StoredPLEEmbedding.__qualname__ = "Qwen4ExpPinnedHostEmbedding"
    return StoredPLEEmbedding


def around_layer(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Qwen4ExpPLELayer.__init__: the table is of the class that is replaced, whatever was asked for."""
    config.ple_offload_embedding = True
    original(self, config, *args, **kwargs)
    table = self.ple_embedding.ngram_embedding
    table.layer_id = self.layer_id
    opening.refuse(self.ple_embedding.gather_dp_tokens, "PLE tables that span data-parallel attention ranks are not served: set "
                                                        "SGLANG_USE_ATTN_TP_NGRAM=1, or unset SSDGRAM_STORE")
    ple.check_table(opening.geometry_of(plugin.settings_now()), layer=table.layer_id, dim=table.embedding_dim, dtype=table.weight.dtype)


# ---------------------------------------------------------------- the process's backend


class PLEBackend:
    """The store of this process and the step under way, as plugin.py's hooks see a backend."""

    hasher = None                                            # DeepSeek's

    def __init__(self, store: Any, tables: list[Any], pool: Any, device: torch.device, settings: Settings, most_tokens: int) -> None:
        self.store, self.tables, self.pool, self.device = store, tables, pool, device
        self.depth = store.geometry.max_ngram - 1
        self.stager = Stager(store, {}, most_tokens=most_tokens, timeout_s=settings.timeout_s)
        self.early = EarlyPrefetch(store, settings.early) if settings.early else None
        self.metrics: Any = None
        self.count = 0                                       # tokens of the step
        self.warming_up = False                              # in a decode step that comes before its graph's capture
        self._far = torch.full((max(1, most_tokens),), FAR, dtype=torch.int64, device=device)

    def begin(self, tokens: torch.Tensor, batch: Any, decodes: bool, lengths: list[int] | None) -> None:
        """Begin the step of an eager forward: `batch` is SGLang's _PLEBatch; `lengths`: of the chunks of a prefill, where the host knows
        them."""
        count = batch.processed_tokens if lengths is None else min(batch.processed_tokens, sum(lengths))
        if count == 0:
            self.stager.begin(None)
            return
        requests = int(batch.lengths.shape[0])
        block = int(batch.row_width) if decodes else 1
        starts = None if decodes else torch.cumsum(batch.lengths, 0) - batch.lengths
        self.stager.begin(self._windows(tokens, batch.ngram_context[:, :self.depth], count, requests, starts, block),
                          drafts=requests * (block - 1))
        if self.early is not None and len(self.early) > 0:
            self.early.pump()

    def begin_graph(self, runner: Any, forward_batch: Any) -> None:
        """Before a decode graph is replayed: its batch's rows into the buffers that it reads."""
        if forward_batch.forward_mode.is_idle() or not plugin.is_decode(forward_batch) or runner.raw_bs == 0:
            self.stager.begin(None)
            return
        if runner.ragged_verify_mode:
            raise RuntimeError("SSDGram: ragged verification is not served: set SGLANG_RAGGED_VERIFY_MODE=static, or unset SSDGRAM_STORE")
        buffers, requests, block = runner.buffers, int(runner.raw_bs), int(runner.captured_req_width)
        history = self.pool.get_ngram_context(self.pool.get_mamba_indices(buffers.req_pool_indices[:requests]).long())
        windows = self._windows(buffers.input_ids, history, requests * block, requests, None, block)
        drafts = requests * (block - 1)
        if self.tables[0].weight.dtype.itemsize == 2:
            self.stager.stage(windows, drafts=drafts, targets={table.layer_id: table.graph_rows for table in self.tables})
            return
        self.stager.begin(windows, drafts=drafts)
        self.stager.counts.graph_steps += 1
        for table in self.tables:
            table.deliver(table.graph_rows[:self.count])

    def _windows(self, tokens: torch.Tensor, before: torch.Tensor, count: int, requests: int, starts: Any, block: int) -> Windows:
        """The history holds EOS where there is no token, and an EOS hides what lies before it: so every position is a far one."""
        if self._far.shape[0] < count:
            self._far = torch.full((count,), FAR, dtype=torch.int64, device=self.device)
        self.count = count
        return Windows(tokens=tokens.reshape(-1), positions=self._far, before=before, starts=starts, block=block, count=count,
                       requests=requests, newest_first=False)

    def load(self, block: int) -> None:
        """Load the kernels of the steps to come, on their GPU: prefill, decode, verification of `block` tokens."""
        tokens = torch.zeros(block, dtype=torch.int64, device=self.device)
        before = torch.zeros(1, self.depth, dtype=torch.int64, device=self.device)
        for size, starts in ((1, torch.zeros(1, dtype=torch.int64, device=self.device)), (1, None), (block, None)):
            self._windows(tokens, before, size, 1, starts, size).load()


def around_prepare(original: Any, input_ids: torch.Tensor, forward_batch: Any, **options: Any) -> Any:
    """_prepare_ple_batch: a forward's step begins, unless a graph is captured around this."""
    batch = original(input_ids, forward_batch, **options)
    if not plugin._backend or not isinstance(plugin._backend[0], PLEBackend):
        return batch
    backend = plugin._backend[0]
    decodes = batch is not None and bool(batch.mode.is_decode() or batch.mode.is_target_verify())
    backend.warming_up = decodes and plugin.in_capture()
    if plugin.capturing():
        if batch is not None and not decodes:
            raise RuntimeError("SSDGram: this graph would capture a prefill's lookup: use --cuda-graph-backend-prefill=breakable or "
                               "disabled")
    elif batch is None or plugin.in_capture():
        backend.stager.begin(None)
    else:
        backend.begin(input_ids, batch, decodes, None if decodes else forward_batch.extend_seq_lens_cpu)
    return batch


def after_manager(result: Any, runner: Any) -> None:
    """ModelRunner.init_ngram_embedding_manager: open the store, if the model has PLE layers; draft models have none."""
    tables = [part for part in runner.model.modules() if hasattr(part, "graph_rows") and hasattr(part, "layer_id")
              and hasattr(part, "late")]
    if tables:
        attach(runner, sorted(tables, key=lambda table: table.layer_id))


def attach(runner: Any, tables: list[Any]) -> None:
    """Open the store for these tables of a model, checked against the constants that its weights brought."""
    engram = importlib.import_module(plugin.ENGRAM)
    parallel = engram.get_parallel()
    opening.refuse(parallel.attn_cp_size > 1, "prefill context parallelism is not served: set its size to 1, or unset SSDGRAM_STORE")
    settings = plugin.settings_now()
    device = torch.device(runner.device)
    rank = 0 if device.type == "cpu" else int(runner.gpu_id)
    where = device if device.type == "cpu" else torch.device("cuda", rank)
    part = ranks.owner_of(tables[0].group()) if tables[0].split else {}
    store = ranks.open_store(settings, parallel.tp_group if parallel.tp_size > 1 else None, layers=[table.layer_id for table in tables],
                             device=str(where), engine="sglang", rank=rank, part=part)
    try:
        owners = {id(part.ngram_embedding): part for part in runner.model.modules() if hasattr(part, "ngram_embedding")}
        for table in tables:
            part, layer = owners[id(table)], table.layer_id
            ple.check_table(store.geometry, layer=layer, dim=table.embedding_dim, dtype=table.weight.dtype)
            ple.check_hash(store.geometry, layer=layer, multipliers=part.layer_multipliers.cpu().numpy(), heads=part.heads_per_ngram,
                           sizes=part.ngram_heads_vocab_sizes.cpu().numpy(), offsets=part.ngram_heads_offsets.cpu().numpy(),
                           eos=part.eos_token_id)
            if table.weight.dtype.itemsize == 1:
                ple.check_scale(store, layer=layer, scale=float(table.weight_scale))
        backend = PLEBackend(store, tables, runner.req_to_token_pool, where, settings, plugin.most_tokens(engram))
        backend.load(int(getattr(runner.server_args, "speculative_num_draft_tokens", None) or 1))
    except BaseException:
        store.close()
        raise
    backend.metrics = opening.metrics_of(store, settings, rank)
    plugin._backend[:] = [backend]
