"""Small stand-ins for the PLE classes of SGLang 0.5.23 that the plug-in changes, with the same names, signatures and order of calls.

They are ours, not SGLang's text; `make test-engines` checks that SGLang's own have what these have.
"""

import types

import torch
from sglang_stubs import ForwardMode
from torch import nn


class Pool:
    """ReqToTokenPool: the last n - 1 raw ids of each request, EOS before its first, int64 by state index."""

    def __init__(self, depth, eos, size=8):
        self.eos, self.context = eos, torch.full((size + 1, depth), eos, dtype=torch.int64)

    def get_mamba_indices(self, req_pool_indices):
        return (req_pool_indices + 1).to(torch.int32)        # slot 0 is nobody's

    def get_ngram_context(self, ngram_indices):
        return self.context.index_select(0, ngram_indices)


def module_of(pool, geometry, fp8=False, world=1):
    """A fresh stand-in for sglang.srt.models.qwen4_exp."""
    module = types.ModuleType("sglang.srt.models.qwen4_exp")
    module.gather_dp_tokens, module.world = False, world

    class VocabParallelEmbedding(nn.Module):
        """Built on the meta device where it is only looked at."""

        def __init__(self, num_embeddings, embedding_dim, dtype):
            super().__init__()
            self.tp_size, self.use_attn_tp_group = module.world, False
            self.embedding_dim, self.num_added_embeddings, self.org_vocab_size = embedding_dim, 0, num_embeddings
            self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, dtype=dtype, device="meta"), requires_grad=False)

    class Qwen4ExpPinnedHostEmbedding(VocabParallelEmbedding):
        _COPIED_ATTRIBUTES = ("embedding_dim", "num_added_embeddings", "org_vocab_size", "tp_size", "use_attn_tp_group")

        def __init__(self, embedding, *, backend="pinned", table_dir=None):
            raise AssertionError("a table was allocated")

        def allocate_output(self, shape, device):
            return torch.full(shape, float("nan"), dtype=torch.bfloat16)

        def gather(self, input_ids, out=None):
            raise AssertionError("a table was read")

        def reduce(self, output):
            raise AssertionError("rows were added up over ranks")

        def forward(self, input_ids):
            return self.reduce(self.gather(input_ids))

    class Qwen4ExpNGramEmbedding(nn.Module):
        def __init__(self, config, layer_id):
            super().__init__()
            number = geometry.layers.index(layer_id)
            self.heads_per_ngram, self.ngram_heads, self.eos_token_id = geometry.heads, geometry.columns, geometry.eos_token_id
            self.gather_dp_tokens = module.gather_dp_tokens
            for name, value in (("layer_multipliers", geometry.multiplier_array), ("ngram_heads_vocab_sizes", geometry.prime_array),
                                ("ngram_heads_offsets", geometry.offset_array)):
                self.register_buffer(name, torch.tensor(value[number]))
            table = VocabParallelEmbedding(geometry.table_rows[number], geometry.row_dim, torch.float8_e4m3fn if fp8 else torch.bfloat16)
            table.register_buffer("weight_scale", torch.ones(1, dtype=torch.bfloat16))
            assert config.ple_offload_embedding
            self.ngram_embedding = module.Qwen4ExpPinnedHostEmbedding(table, backend="pinned", table_dir=None)

    class Qwen4ExpPLELayer(nn.Module):
        def __init__(self, config, quant_config=None, prefix="", layer_id=None, ple_layer_index=0):
            super().__init__()
            self.layer_id, self.ple_embedding = layer_id, Qwen4ExpNGramEmbedding(config, layer_id)
            self.width = geometry.columns * geometry.row_dim
            self._prefetch_stream, self._prefetch_state, self.graph_buffer = torch.cuda.Stream(), None, None

        def start_prefetch(self, batch, forward_batch):
            if batch is None:
                return
            count = batch.processed_tokens
            prefetched = self.ple_embedding.ngram_embedding.allocate_output((count, self.width), torch.device("cpu"))
            if torch.cuda.is_current_stream_capturing():
                self.graph_buffer = prefetched
            self._prefetch_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._prefetch_stream):
                self.ple_embedding.ngram_embedding.gather(torch.zeros(count, geometry.columns, dtype=torch.int64),
                                                          out=prefetched.view(count, geometry.columns, -1))
            self._prefetch_state = prefetched

        def forward(self, count):
            """The rows that the layer projects."""
            table = self.ple_embedding.ngram_embedding
            if self._prefetch_state is None:                 # nothing ran in front of this layer
                rows = table(torch.zeros(count, geometry.columns, dtype=torch.int64)).flatten(-2)
            else:
                torch.cuda.current_stream().wait_stream(self._prefetch_stream)
                rows, self._prefetch_state = table.reduce(self._prefetch_state), None
            return rows * table.weight_scale

    def _prepare_ple_batch(input_ids, forward_batch, *, ngram_size, ngram_eos_token_id):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return None
        count = int(input_ids.shape[0]) if forward_batch.extend_seq_lens_cpu is None else sum(forward_batch.extend_seq_lens_cpu)
        width = int(forward_batch.spec_info.draft_token_num) if mode.is_target_verify() else 1
        if mode == ForwardMode.EXTEND:
            lengths = torch.tensor(forward_batch.extend_seq_lens_cpu)
            width = max(forward_batch.extend_seq_lens_cpu, default=0)
        else:
            lengths = torch.full((count // width,), width)
        requests = lengths.shape[0]
        padded = torch.full((requests, width), ngram_eos_token_id)
        flat = 0
        for row, length in enumerate(lengths.tolist()):
            padded[row, :length] = input_ids[flat:flat + length]
            flat += length
        history = pool.get_ngram_context(pool.get_mamba_indices(forward_batch.req_pool_indices[:requests]).long())
        return types.SimpleNamespace(mode=mode, physical_tokens=int(input_ids.shape[0]), processed_tokens=count, lengths=lengths,
                                     row_width=width, ngram_context=torch.cat([history, padded], 1))

    module.Qwen4ExpPinnedHostEmbedding, module.Qwen4ExpPLELayer = Qwen4ExpPinnedHostEmbedding, Qwen4ExpPLELayer
    module._prepare_ple_batch = _prepare_ple_batch
    return module
