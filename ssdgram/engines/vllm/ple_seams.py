"""The part of vLLM's table (seams.py) that its Qwen4Exp PLE classes are. Standard library only."""

from __future__ import annotations

from ssdgram.engines.seams import Seam

_COMMON = "models/qwen4_exp/common/ngram_embedding.py"
_NGRAM = "models/qwen4_exp/nvidia/ngram_embedding.py"
_STATE = "models/qwen4_exp/nvidia/model_state.py"
_LAYER = "models/qwen4_exp/nvidia/ple_layer.py"
_MODEL = "models/qwen4_exp/nvidia/model.py"
_VOCAB = "model_executor/layers/vocab_parallel_embedding.py"
_OPTIONS = ("(self, num_embeddings, embedding_dim, *, params_dtype, padding_size, prefix, embedding_method, num_ngram_heads=1, "
            "max_total_tokens=0, data_parallel_rank=0, reduce_results=True)")
_PINNED = "Qwen4ExpPLEPinnedHostEmbedding"

PLE_SEAMS = (
    # the embedding: what the subclass overrides, what of the class above it runs, and what its own methods read
    Seam(_COMMON, _PINNED, _OPTIONS),
    Seam(_COMMON, f"{_PINNED}.__init__", None,
         ("get_accelerator_view_from_cpu_tensor", "self.weight", "self._uva_weight", "self._prefetch_stream", "self._prefetch_buffer",
          "self._prefetch_alloc_lock", "self._prefetch_rows", "self._num_ngram_heads", "self._output_dim"),
         why="it takes a view of the table, so it is passed over, and these are set"),
    Seam(_COMMON, f"{_PINNED}.supports_prefetch", None, ("True",)),
    Seam(_COMMON, f"{_PINNED}.allocate_embedding_weight", "(self, num_embeddings, embedding_dim, dtype)"),
    Seam(_COMMON, f"{_PINNED}._lookup", "(self, input_ids, output=None)"),
    Seam(_COMMON, f"{_PINNED}._reduce_etp_embeddings", "(self, embeddings)",
         ("self.parallel_group.all_reduce", "embeddings.view", "torch.int8"),
         why="bytes can be added up over the group"),
    Seam(_COMMON, f"{_PINNED}.start_prefetch", "(self, ngram_ids)",
         ("self._prefetch_buffer", "self._get_dp_gather_slot", "self._gather_dp_ids", "active_output", "prefetch_stream.wait_stream",
          "torch.cuda.stream", "self._lookup", "output="), ("eager_break_during_capture",),
         why="the lookup is called on the prefetch stream, with the buffer's first rows"),
    Seam(_COMMON, f"{_PINNED}._finalize_prefetch", "(self, prefetch_output, output)",
         ("prefetch_stream", "self.reduce_results", "self._reduce_etp_embeddings", "self._select_embeddings", "output.copy_"),
         ("eager_break_during_capture",), ordered=True, why="the reduction comes behind the join and before the rows are used"),
    Seam(_COMMON, f"{_PINNED}.finalize_prefetch", "(self, total_tokens)",
         ("self._prefetch_buffer", "self._output_dim", "self._finalize_prefetch")),
    Seam(_COMMON, "Qwen4ExpPLEEmbedding", _OPTIONS),
    Seam(_COMMON, "Qwen4ExpPLEEmbedding.__init__", None, ("self.embedding_method", "self.tp_size", "self.etp_data_parallel_size")),
    Seam(_COMMON, "Qwen4ExpPLEEmbedding._get_dp_gather_slot", "(self, local_num_tokens)", ("self.etp_data_parallel_size",)),
    Seam(_COMMON, "Qwen4ExpPLEEmbedding._gather_dp_ids", "(self, ngram_ids, slot_size)", ("self.etp_data_parallel_size",)),
    Seam(_COMMON, "Qwen4ExpPLEEmbedding._select_embeddings", "(self, embeddings, local_num_tokens, slot_offset)",
         ("self.etp_data_parallel_size",)),
    Seam(_COMMON, "Qwen4ExpPLEUnquantizedEmbeddingMethod.create_weights", None,
         ("layer.allocate_embedding_weight", "params_dtype", "'weight'", "layer.register_parameter")),
    Seam(_COMMON, "Qwen4ExpPLEFp8EmbeddingMethod.create_weights", None,
         ("layer.allocate_embedding_weight", "torch.float8_e4m3fn", "'weight'", "'weight_scale'", "torch.float32", "weight_loader")),
    Seam(_COMMON, "Qwen4ExpPLEFp8EmbeddingMethod.dequantize", "(self, layer, embeddings, output_dtype)",
         ("embeddings.to", "weight_scale.to"), why="bf16 of the code times bf16 of the scale"),
    Seam(_COMMON, "Qwen4ExpPLENvFp4EmbeddingMethod"),
    Seam(_COMMON, "Qwen4ExpPLEEmbeddingMethod.lookup_dtype", "(self, layer)", ("layer.weight.dtype",)),
    Seam("models/qwen4_exp/common/ple.py", "PLEVocabParallelEmbedding.weight_loader",
         "(self, param, loaded_weight, checkpoint_start=None)"),
    Seam(_VOCAB, "VocabParallelEmbedding.__init__", None,
         ("self.parallel_group", "self.tp_size", "self.reduce_results", "self.quant_method.create_weights", "weight_loader=",
          "self.weight_loader")),
    # the n-gram module that holds it
    Seam(_NGRAM, _PINNED),
    Seam(_NGRAM, "Qwen4ExpPLEDeviceEmbedding"),
    Seam(_NGRAM, "Qwen4ExpPLENvFp4EmbeddingMethod"),
    Seam(_NGRAM, "get_current_vllm_config"),
    Seam(_NGRAM, "Qwen4ExpNGramEmbedding.__init__", None,
         (_PINNED, "Qwen4ExpPLEDeviceEmbedding", "self.heads_per_ngram", "self.eos_token_id", "'layer_multipliers'",
          "'ngram_heads_vocab_sizes'", "'ngram_heads_offsets'", "self.use_reduce_scatter", "self.ngram_embedding", "prefix=",
          "embedding_method=", "num_ngram_heads=", "max_total_tokens=", "reduce_results=")),
    Seam(_NGRAM, "Qwen4ExpNGramEmbedding._sp_shard_embeddings", "(self, embeddings)",
         ("self.use_reduce_scatter", "sp_reduce_scatter", "sp_shard")),
    Seam(_NGRAM, "Qwen4ExpNGramEmbedding.forward", None, ("embedding.supports_prefetch", "embedding.finalize_prefetch", "input_ids.shape")),
    Seam(_NGRAM, "Qwen4ExpNGramEmbedding.start_prefetch", "(self, input_ids, query_start_loc, ngram_context)",
         ("embedding.supports_prefetch", "self.compute_ngram_ids", "embedding.start_prefetch")),
    Seam(_NGRAM, "Qwen4ExpNGramEmbedding.load_weights", "(self, weights)",
         ("persistent_buffers", "parameter.shape", "parameter.weight_loader", "checkpoint_start=", "embedding.org_vocab_size")),
    Seam(_LAYER, "Qwen4ExpPLELayer.__init__", None,
         ("Qwen4ExpNGramEmbedding", "vllm_config.scheduler_config.max_num_batched_tokens", "prefix=")),
    Seam(_LAYER, "Qwen4ExpPLELayer.forward", None, ("self.ple_embedding", "self._dequantize_embeddings", "self.kv_proj"), ordered=True),
    Seam(_MODEL, "Qwen4ExpModel._start_layer_ple_prefetch", None, ("ple.start_prefetch", "ngram_context")),
    Seam(_MODEL, "Qwen4ExpModel.forward", None, ("self._start_layer_ple_prefetch", "query_start_loc", "ngram_context")),
    Seam(_MODEL, "Qwen4ExpForCausalLM.get_model_state_cls", "()", ("Qwen4ExpModelState",)),
    Seam(_MODEL, "Qwen4ExpForConditionalGeneration.get_model_state_cls", "()", ("Qwen4ExpModelState",)),
    Seam("models/qwen4_exp/__init__.py", "__getattr__", None, ("current_platform.is_rocm",), why="the AMD model is a module of its own"),
    # the model's state
    Seam(_STATE, "Qwen4ExpModelState", "(self, vllm_config, model, encoder_cache, device)"),
    Seam(_STATE, "Qwen4ExpModelState.__init__", None, ("self.uses_ngram_embedding", "self.ngram_context", "self.ngram_eos_token_id")),
    Seam(_STATE, "Qwen4ExpModelState._prepare_ngram_context", "(self, input_batch, req_states)",
         ("input_batch.idx_mapping", "self.ngram_context_offsets", "self.ngram_eos_token_id", "req_states.all_token_ids.gpu"),
         why="raw ids, oldest first, EOS before the first token"),
    Seam(_STATE, "Qwen4ExpModelState.prepare_inputs", "(self, input_batch, req_states)",
         ("input_batch.query_start_loc", "self._prepare_ngram_context")),
    Seam(_STATE, "Qwen4ExpModelState.prepare_dummy_inputs", "(self, num_reqs, num_tokens)", ("self.ngram_context",)),
    Seam("v1/worker/gpu/model_states/mamba_hybrid.py", "MambaHybridModelState.add_request", "(self, req_index, new_req_data)"),
    Seam("v1/worker/gpu/model_states/mamba_hybrid.py", "MambaHybridModelState.prepare_attn",
         "(self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture=False, ubatch_idx=0, "
         "model_specific_attn_metadata=None)"),
)
