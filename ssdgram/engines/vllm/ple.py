"""What becomes of vLLM 0.33.0's Qwen4Exp PLE classes: the table is empty, the rows come from the store.

    Qwen4ExpPLEPinnedHostEmbedding   a subclass, also where the table was to be on the device: 0 rows, nothing to load, one owner of
                                     all rows; the lookup on the prefetch stream and the reduction behind it deliver the step's rows
    Qwen4ExpNGramEmbedding           no reduce-scatter: every rank has every row, so sequence parallelism cuts and adds nothing
    Qwen4ExpModelState               as plugin.py does with DeepSeek's: opens the store, begins steps, fills before FULL graphs

vLLM's start_prefetch and _finalize_prefetch stay what they are, eager breaks of piecewise graphs. It hands rows on as they are
stored (bf16, or fp8 codes that its PLE layer multiplies by the table's scale), in `_prefetch_buffer`, which FULL graphs read at its
address; so do we. Invariant: the buffer's first T rows are the step's before anything reads them; behind them are zeros or older
rows. Dummy, idle and capture batches read nothing.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from types import ModuleType
from typing import Any

import torch

from ssdgram.engines import opening, ple, ranks
from ssdgram.engines.early import EarlyPrefetch
from ssdgram.engines.stager import Stager
from ssdgram.engines.vllm import plugin
from ssdgram.engines.vllm.loading import check_loader
from ssdgram.engines.vllm.plugin import STAGER, capturing, settings_now
from ssdgram.errors import ConfigError
from ssdgram.geometry import PLE

log = logging.getLogger("ssdgram")


def embedding_class(module: ModuleType) -> type:
    """The subclass of `module.Qwen4ExpPLEPinnedHostEmbedding` that holds no table."""
    pinned = module.Qwen4ExpPLEPinnedHostEmbedding

    class StoredPLEEmbedding(pinned):  # type: ignore[valid-type,misc]
        """A table that is in the store."""

        etp_data_parallel_size: int

        def __init__(self, num_embeddings: int, embedding_dim: int, *, prefix: str, embedding_method: Any, num_ngram_heads: int = 1,
                     max_total_tokens: int = 0, **options: Any) -> None:
            if isinstance(embedding_method, module.Qwen4ExpPLENvFp4EmbeddingMethod):
                raise ConfigError("an NVFP4 PLE table is not served: bfloat16 and FP8 with one scale are; unset SSDGRAM_STORE to serve it "
                                  "with vLLM's own tables")
            config = module.get_current_vllm_config()
            plugin.check_config(config)
            check_loader(config)
            super(pinned, self).__init__(num_embeddings, embedding_dim, prefix=prefix, embedding_method=embedding_method,
                                         num_ngram_heads=num_ngram_heads, max_total_tokens=max_total_tokens, **options)
            self._ssdgram_layer = layer_of(prefix)
            ple.check_table(opening.geometry_of(settings_now()), layer=self._ssdgram_layer, dim=embedding_dim, dtype=self.weight.dtype)
            self.split = ranks.is_split(settings_now(), "vllm", PLE)         # bundles on their owners, and rows to add up; or else:
            opening.refuse(self.split and self.etp_data_parallel_size > 1,
                           "SSDGRAM_SPLIT=owner: vLLM would divide this PLE table among data-parallel ranks too, whose tokens differ: "
                           "leave embedding_across_dp off, or unset SSDGRAM_SPLIT")
            self.tp_size = self.etp_data_parallel_size = 1   # all rows on every rank: nothing to gather, nothing to add
            self.reduce_results = True                       # ... and our "reduction" is called
            self._num_ngram_heads, self._output_dim = num_ngram_heads, num_ngram_heads * embedding_dim
            self._uva_weight, self._prefetch_rows, self._prefetch_alloc_lock = self.weight.data, max_total_tokens, threading.Lock()
            self._prefetch_stream = torch.cuda.Stream()
            buffer = torch.zeros(max_total_tokens, num_ngram_heads, embedding_dim, dtype=torch.bfloat16)
            if self.weight.dtype.itemsize == 1:
                buffer = torch.zeros_like(buffer, dtype=torch.uint8).view(self.weight.dtype)
            self._prefetch_buffer = buffer

        def allocate_embedding_weight(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> torch.Tensor:
            where = "meta" if torch.get_default_device().type == "meta" else "cpu"
            return torch.empty(0, embedding_dim, dtype=dtype, device=where)

        def weight_loader(self, param: torch.Tensor, loaded_weight: torch.Tensor, checkpoint_start: int | None = None) -> None:
            """The checkpoint's table stays mapped and untouched; its scale is loaded."""
            if checkpoint_start is None and param is not self.weight:
                super().weight_loader(param, loaded_weight)

        def _lookup(self, input_ids: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
            """Called by start_prefetch, on its stream: the step's rows, if they are read already."""
            if output is None:
                raise NotImplementedError("SSDGram: rows are looked up by a step's tokens, not by ids; nothing in vLLM 0.33.0 on CUDA "
                                          "calls this")
            stager = getattr(self, STAGER, None)
            if not capturing() and stager is not None and stager.ready(self._ssdgram_layer):
                stager.fill(self._ssdgram_layer)
            return output

        def _reduce_etp_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
            """Called by _finalize_prefetch, on the stream that the layer runs on: the step's rows, if they were late."""
            stager = getattr(self, STAGER, None)
            if not capturing() and stager is not None and stager.waits_for(self._ssdgram_layer):
                stager.fill(self._ssdgram_layer)
            if not self.split:
                return embeddings
            # Bytes are added up, as vLLM does with FP8 codes: all ranks but one have zeros, so -0.0 and NaN stay what they are.
            return self.parallel_group.all_reduce(embeddings.view(torch.int8)).view(embeddings.dtype)

    return StoredPLEEmbedding


def layer_of(prefix: str) -> int:
    """Decoder layer (0-based) of a module by its name."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", prefix)
    if found is None:
        raise ConfigError(f"the PLE table {prefix!r} names no decoder layer: expected ...layers.N. in it")
    return int(found[1])


def patch_ngram(module: ModuleType) -> None:
    """Change vllm.models.qwen4_exp.nvidia.ngram_embedding in place."""
    stored = embedding_class(module)
    module.Qwen4ExpPLEPinnedHostEmbedding = module.Qwen4ExpPLEDeviceEmbedding = stored  # type: ignore[attr-defined]
    ngram = module.Qwen4ExpNGramEmbedding
    build = ngram.__init__

    @functools.wraps(build)
    def build_without_owners(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.use_reduce_scatter = False

    ngram.__init__ = build_without_owners
    log.info("vLLM's PLE tables come from %s", settings_now().store)


# ---------------------------------------------------------------- the model's state


def patch_state(module: ModuleType) -> None:
    """Change `Qwen4ExpModelState` of vllm.models.qwen4_exp.nvidia.model_state in place."""
    plugin.change_state(module.Qwen4ExpModelState, attach, begin_step)


def attach(state: Any, vllm_config: Any, model: Any, device: torch.device) -> None:
    """Open the store for the PLE layers, once the model is loaded and before memory is profiled."""
    parts = sorted((part for part in model.modules() if hasattr(getattr(part, "ngram_embedding", None), "_ssdgram_layer")),
                   key=lambda part: part.ngram_embedding._ssdgram_layer)
    if not parts:
        return                                               # a model without PLE layers
    settings = settings_now()
    rank = plugin.rank_on_node(vllm_config.parallel_config)
    tables = [part.ngram_embedding for part in parts]
    part = ranks.owner_of(tables[0].parallel_group) if tables[0].split else {}
    store = ranks.open_store(settings, plugin.tp_group(vllm_config.parallel_config), layers=[table._ssdgram_layer for table in tables],
                             device=str(device), engine="vllm", rank=rank, part=part)
    try:
        for part, table in zip(parts, tables, strict=True):
            layer = table._ssdgram_layer
            ple.check_table(store.geometry, layer=layer, dim=table.embedding_dim, dtype=table.weight.dtype)
            ple.check_hash(store.geometry, layer=layer, multipliers=part.layer_multipliers.cpu().numpy(), heads=part.heads_per_ngram,
                           sizes=part.ngram_heads_vocab_sizes.cpu().numpy(), offsets=part.ngram_heads_offsets.cpu().numpy(),
                           eos=part.eos_token_id)
            if table.weight.dtype.itemsize == 1 and str(vllm_config.load_config.load_format) != "dummy":
                ple.check_scale(store, layer=layer, scale=float(table.weight_scale))
        stager = Stager(store, {table._ssdgram_layer: bytes_or_rows(table._prefetch_buffer) for table in tables},
                        timeout_s=settings.timeout_s)
        plugin.windows_like(state.ngram_context, newest_first=False).load()
    except BaseException:
        store.close()
        raise
    state._ssdgram_early = EarlyPrefetch(store, settings.early) if settings.early else None
    state._ssdgram_metrics = opening.metrics_of(store, settings, rank)
    state._ssdgram_full = False
    for owner in (state, *tables):
        object.__setattr__(owner, STAGER, stager)


def bytes_or_rows(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer as the stager fills it: fp8 codes as bytes, bf16 as it is."""
    return buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer


def begin_step(state: Any, input_batch: Any, req_states: Any) -> None:
    """As plugin.begin_step, over the context that vLLM's PLE hash reads: raw ids, oldest first, EOS where there is none."""
    plugin.begin_step(state, input_batch, req_states, before=state.ngram_context, newest_first=False, image=-1)
