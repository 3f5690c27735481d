"""The part of SGLang's table (seams.py) that its Qwen4Exp PLE classes are. Standard library only."""

from __future__ import annotations

from ssdgram.engines.seams import Seam

_MODEL = "srt/models/qwen4_exp.py"
_POOL = "srt/mem_cache/memory_pool.py"
_STATE = "srt/mem_cache/ple_state_pool.py"
_RUNNER = "srt/model_executor/model_runner.py"
_PINNED = "Qwen4ExpPinnedHostEmbedding"

PLE_SEAMS = (
    # the embedding that is replaced, and what its own methods and its layer read of it
    Seam(_MODEL, _PINNED, "(self, embedding, *, backend='pinned', table_dir=None)"),
    Seam(_MODEL, f"{_PINNED}.__init__", None,
         ("self._COPIED_ATTRIBUTES", "self.quant_method", "embedding.num_added_embeddings", "'weight'", "'weight_scale'",
          "embedding.weight_scale", "embedding.weight")),
    Seam(_MODEL, f"{_PINNED}._COPIED_ATTRIBUTES", None,
         ("'tp_size'", "'use_attn_tp_group'", "'shard_indices'", "'embedding_dim'", "'org_vocab_size'")),
    Seam(_MODEL, f"{_PINNED}.allocate_output", "(self, shape, device)", ("self.tp_size", "torch.empty", "torch.bfloat16")),
    Seam(_MODEL, f"{_PINNED}.gather", "(self, input_ids, out=None)", ("self.embedding_dim",), why="bf16 rows [*ids, dim], not scaled"),
    Seam(_MODEL, f"{_PINNED}.reduce", "(self, output)",
         ("self.use_attn_tp_group", "attn_tp_all_reduce", "tensor_model_parallel_all_reduce"),
         why="which group would share the table"),
    Seam(_MODEL, f"{_PINNED}.forward", "(self, input_ids)", ("self.reduce", "self.gather")),
    Seam(_MODEL, "_gather_ple_embedding_from_pinned_kernel", None, ("tl.bfloat16", "in_range"), why="rows that a rank lacks are zero"),
    Seam(_MODEL, "Qwen4ExpNGramEmbedding.__init__", None,
         ("config.ple_offload_embedding", "self.gather_dp_tokens", "self.heads_per_ngram", "self.eos_token_id", "'layer_multipliers'",
          "'ngram_heads_vocab_sizes'", "'ngram_heads_offsets'", "'weight_scale'", _PINNED, "self.ngram_embedding")),
    Seam(_MODEL, "Qwen4ExpNGramEmbedding._embed_ngram_ids", None, ("self.ngram_embedding", "self.ngram_embedding.weight_scale")),
    # the layer: where it asks for rows, where it uses them
    Seam(_MODEL, "Qwen4ExpPLELayer", "(self, config, quant_config=None, prefix='', layer_id=None, ple_layer_index=0)"),
    Seam(_MODEL, "Qwen4ExpPLELayer.__init__", None,
         ("self.layer_id", "self.ple_embedding", "Qwen4ExpNGramEmbedding", "config.ple_offload_embedding")),
    Seam(_MODEL, "Qwen4ExpPLELayer.start_prefetch", "(self, batch, forward_batch)",
         ("self._get_prefetch_buffer", "output_view", "stream.wait_stream", "torch.cuda.stream", "offloaded_embedding.gather", "out=",
          "self._prefetch_state"), why="the rows go to a buffer, from the prefetch stream"),
    Seam(_MODEL, "Qwen4ExpPLELayer._consume_prefetched_embeddings", "(self, forward_batch)",
         ("self._prefetch_stream", "self.ple_embedding.ngram_embedding.reduce", "self.ple_embedding.ngram_embedding.weight_scale"),
         ordered=True, why="the reduction comes behind the join and before the rows are used"),
    Seam(_MODEL, "Qwen4ExpPLELayer._get_prefetch_buffer", "(self, lookup_tokens, lookup_ids)",
         ("get_is_capture_mode", "is_in_breakable_cuda_graph", "self._graph_prefetch_buffers")),
    Seam(_MODEL, "Qwen4ExpPLELayer.forward", "(self, hidden_states, forward_batch, batch)",
         ("self._consume_prefetched_embeddings", "self.ple_embedding")),
    # the forward's batch
    Seam(_MODEL, "_prepare_ple_batch", "(input_ids, forward_batch, *, ngram_size, ngram_eos_token_id)",
         ("mode.is_idle", "extend_seq_lens_cpu",
          "get_req_to_token_pool().get_ngram_context", "history", "padded", "_PLEBatch", "ngram_context=")),
    Seam(_MODEL, "_PLEBatch", None, ("mode", "processed_tokens", "lengths", "row_width", "ngram_context"),
         why="ngram_context: history, oldest first, then the step's tokens"),
    Seam(_MODEL, "_breakable_prepare_ple_batch", None, ("_prepare_ple_batch",), ("eager_on_graph",)),
    Seam(_MODEL, "_breakable_ple_prefetch", "(ple, batch)", ("ple.start_prefetch",), ("eager_on_graph",)),
    Seam(_MODEL, "_breakable_ple_forward", "(ple, hidden_states, batch, output)", ("ple.forward_idle",), ("eager_on_graph",)),
    Seam(_MODEL, "_commit_ple_batch", "(batch, forward_batch)", ("pool.set_ngram_context",), why="the history changes behind the layers"),
    Seam(_MODEL, "Qwen4ExpModel.forward", None, ("_prepare_ple_batch", "next_ple.start_prefetch", "_commit_ple_batch"),
         why="one batch a forward"),
    Seam(_MODEL, "Qwen4ExpForConditionalGeneration.load_weights", "(self, weights)",
         ("emb.shard_indices.org_vocab_start_index", "emb.shard_indices.org_vocab_end_index", "ov_start", "ov_end", _PINNED),
         why="a rank without rows has nothing copied"),
    Seam("srt/models/qwen4_exp_mtp.py", "Qwen4ExpForCausalLMMTP.__init__", None, ("config.ple_layer_ids",), why="draft layers have none"),
    # the history, and when the store is opened
    Seam(_POOL, "HybridReqToTokenPool.get_ngram_context", "(self, ngram_indices)", ("self.ngram_pool.get_context",)),
    Seam(_POOL, "HybridReqToTokenPool.get_mamba_indices", "(self, req_indices)", ("self.req_index_to_mamba_index_mapping",)),
    Seam(_STATE, "NGramPool.__init__", None, ("self.context", "eos_token_id", "torch.long"), why="EOS where there is no token"),
    Seam(_STATE, "NGramPool.get_context", "(self, indices)", ("self.context.index_select",)),
    Seam(_RUNNER, "ModelRunner.init_ngram_embedding_manager", "(self)", ("self.model", "self.req_to_token_pool", "self.device")),
    Seam(_RUNNER, "ModelRunner.__init__", None, ("self.gpu_id", "self.device", "self.server_args")),
)
