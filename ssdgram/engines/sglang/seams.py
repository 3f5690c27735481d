"""The table of what the SGLang plug-in relies on, for SGLang 0.5.23. Standard library only; checked by ssdgram.engines.seams."""

from __future__ import annotations

from ssdgram.engines.seams import Engine, Seam
from ssdgram.engines.sglang.ple_seams import PLE_SEAMS

_ENGRAM = "srt/layers/engram.py"
_STAGING = "srt/layers/engram_staging.py"
_MANAGER = "srt/model_executor/model_runner_components/ngram_embedding_manager.py"
_GRAPHS = "srt/model_executor/runner/decode_cuda_graph_runner.py"
_BATCH = "srt/model_executor/forward_batch_info.py"
_GROUPS = "srt/distributed/parallel_state.py"
_PARALLEL = "srt/arg_groups/fields/parallel.py"
_HOOKS = "srt/plugins/hook_registry.py"

SGLANG = Engine("sglang", "sglang", "0.5.23", (
    # the embedding that is replaced, and what asks it
    Seam(_ENGRAM, "EngramEmbedding", "(self, num_embeddings, dim, layer_id, column_bounds)"),
    Seam(_ENGRAM, "EngramEmbedding.forward", "(self, indices, forward_batch=None, *, cp_all_tokens=False)"),
    Seam(_ENGRAM, "EngramEmbedding.new_rows", "(self, indices)", ("torch.empty", "self.dim", "torch.bfloat16")),
    Seam(_ENGRAM, "EngramEmbedding.dequant_staged", "(self, rows, scales, copied, hash_shape)"),
    Seam(_ENGRAM, "EngramEmbedding.finish_load", "(self, label)"),
    Seam(_ENGRAM, "Engram", "(self, config, layer_id, layout, quant_config=None, prefix='', *, image_token_id=None)"),
    Seam(_ENGRAM, "Engram.__init__", None, ("self.layer_hash_index", "self.embed", "EngramEmbedding", "layout.num_embeddings",
                                            "layout.head_dim", "column_bounds=", "layout.column_bounds")),
    Seam(_ENGRAM, "Engram.forward", "(self, x, hash_ids, forward_batch=None, *, input_ids, cp_all_tokens=False)",
         ("self.embed.staged_by_scheduler", "forward_batch.forward_mode.is_extend_without_speculative", "is_in_breakable_cuda_graph",
          "_bcg_engram_embed", "self.embed_rows"), why="in a breakable graph a prefill's lookup runs between segments"),
    Seam(_ENGRAM, "Engram.embed_rows", "(self, hash_ids, forward_batch, cp_all_tokens)",
         ("forward_batch.engram_staged_rows", "self.embed.dequant_staged", "staged", "hash_ids.shape", "self.embed", "cp_all_tokens=")),
    Seam(_ENGRAM, "_bcg_engram_embed", "(engram, hash_ids, cp_all_tokens, out)",
         ("get_tc_piecewise_forward_context", "engram.embed_rows"), ("eager_on_graph",)),
    Seam(_ENGRAM, "EngramLayout.column_bounds", "(self, hash_index)"),
    Seam(_ENGRAM, "FP8_BLOCK_SIZE"),
    Seam(_ENGRAM, "MM_PAD_SHIFT_VALUE"),
    Seam(_ENGRAM, "get_parallel"),
    Seam(_ENGRAM, "inplace_all_reduce"),
    Seam(_ENGRAM, "EngramEmbedding._reduce_owned_rows", None, ("inplace_all_reduce", "values.view", "torch.int32", "group_name=",
                                                               "get_parallel().tp_group.unique_name"),
         why="whole numbers can be added up over the group"),
    Seam(_GROUPS, "inplace_all_reduce", "(tensor, group_name)", ("group._all_reduce_in_place",)),
    Seam(_GROUPS, "GroupCoordinator.__init__", None, ("self.world_size", "self.rank_in_group", "self.cpu_group", "self.unique_name")),
    Seam(_PARALLEL, "Parallel", None, ("tp_size", "attn_dp_size", "tp_group", "attn_tp_group")),
    Seam(_ENGRAM, "get_model"),
    # the hash: what it reads, and that a decode changes its history
    Seam(_ENGRAM, "EngramHasher.forward", "(self, input_ids, forward_batch)",
         ("self.history", "forward_batch.positions", "forward_batch.req_pool_indices", "forward_batch.extend_start_loc",
          "forward_batch.extend_seq_lens_cpu", "forward_batch.engram_history", "forward_batch.spec_info.draft_token_num", "mode.is_idle")),
    Seam(_ENGRAM, "EngramHasher.__init__", None, ("self.max_ngram_size", "self.image_token_id", "self.history", "'token_map'",
                                                  "'multipliers'")),
    Seam(_ENGRAM, "EngramHasher.history_row", "(self, ids)", ("MM_PAD_SHIFT_VALUE",), why="oldest first, images clamped"),
    Seam(_ENGRAM, "EngramHasher.hash_windows", "(self, tokens, blocked)", ("MM_PAD_SHIFT_VALUE", "self.image_token_id"),
         why="images and ids from the shift on take no part"),
    Seam("srt/models/deepseek_v4.py", "deepseek_v4_engram_hash_ids", "(hasher, input_ids, out)",
         ("get_tc_piecewise_forward_context", "hasher")),
    # the scheduler's stager
    Seam(_STAGING, "EngramRowStager.from_model", "(cls, model, hasher, device)", (), ("classmethod",)),
    Seam(_STAGING, "EngramRowStager.stage", "(self, batch)", ("batch.forward_mode.is_extend_without_speculative",)),
    Seam(_STAGING, "EngramRowStager._windows", None, ("batch.encoder_swa_reset", "batch.prefix_lens", "batch.extend_lens",
                                                      "req.full_untruncated_fill_ids")),
    Seam(_MANAGER, "NgramEmbeddingManager.from_model", None, ("module.init_history", "EngramRowStager.from_model", "engram_hasher"),
         why="after the weights are loaded and before any capture"),
    Seam(_MANAGER, "NgramEmbeddingManager.prepare_for_forward", "(self, batch, *, chunked_req)",
         ("self._prepare_engram_history", "batch.engram_staged_rows", "self.engram_stager.stage")),
    Seam("srt/model_executor/model_runner.py", "ModelRunner.init_ngram_embedding_manager", "(self)", ("NgramEmbeddingManager.from_model",)),
    Seam(_BATCH, "ForwardBatch", None,
         ("forward_mode", "req_pool_indices", "positions", "extend_start_loc", "extend_seq_lens_cpu", "spec_info", "engram_history",
          "engram_staged_rows")),
    Seam(_BATCH, "ForwardMode.is_extend_without_speculative", "(self)"),
    Seam(_BATCH, "ForwardMode.is_decode", "(self)"),
    Seam(_BATCH, "ForwardMode.is_idle", "(self)"),
    Seam(_BATCH, "ForwardMode.is_target_verify", "(self)"),
    Seam("srt/managers/schedule_batch.py", "ScheduleBatch", None, ("reqs", "prefix_lens", "extend_lens", "encoder_swa_reset")),
    Seam("srt/managers/schedule_batch.py", "Req.__init__", None,
         ("self.rid", "self.origin_input_ids", "self.output_ids", "self.full_untruncated_fill_ids")),
    # decode graphs
    Seam(_GRAPHS, "DecodeCudaGraphRunner.load_batch", "(self, forward_batch, pp_proxy_tensors=None)",
         ("self.raw_bs", "self.captured_req_width", "self.buffer_registry.fill_from")),
    Seam(_GRAPHS, "DecodeCudaGraphRunner.execute", "(self, forward_batch, pp_proxy_tensors=None)",
         ("self.load_batch", "self.backend.replay"), ordered=True, why="what is staged behind load_batch is staged before the launch"),
    Seam(_GRAPHS, "DecodeCudaGraphRunner.__init__", None, ("self.captured_req_width", "self.ragged_verify_mode", "model_capture_mode",
                                                           "self.capture")),
    Seam(_GRAPHS, "DecodeCudaGraphRunner._copy_replay_inputs", None, ("self.buffers.input_ids", "self.buffers.positions")),
    Seam("srt/model_executor/runner_backend/full_cuda_graph_backend.py", "FullCudaGraphBackend.capture_one", None,
         ("forward_fn", "torch.cuda.CUDAGraph"), ordered=True, why="eager runs of the shape come before its capture"),
    Seam("srt/model_executor/runner_utils/capture_mode.py", "is_capture_mode"),
    Seam("srt/model_executor/runner_utils/capture_mode.py", "model_capture_mode", None, ("is_capture_mode",)),
    # queue, hooks, configuration, loading
    Seam("srt/managers/scheduler.py", "Scheduler._add_request_to_queue", "(self, req, is_retracted=False)"),
    Seam(_HOOKS, "HookRegistry.register", "(cls, target, hook, hook_type=HookType.AFTER, *, source=None)", (), ("classmethod",)),
    Seam(_HOOKS, "HookRegistry.apply_hooks", "(cls)", ("cls._apply_target",), ("classmethod",)),
    Seam(_HOOKS, "_wrap_fn", "(original_fn, hook, hook_type)", ("wrapper.__wrapped__", "hook", "original_fn")),
    Seam(_HOOKS, "HookType", None, ("AFTER", "AROUND", "REPLACE")),
    Seam("srt/plugins/__init__.py", "GENERAL_PLUGINS_GROUP", None, ("'sglang.srt.plugins'",)),
    Seam("srt/plugins/__init__.py", "load_plugins", "()", ("Exception", "HookRegistry.apply_hooks")),
    Seam("srt/runtime_context.py", "get_schedule", "()"),
    Seam("srt/runtime_context.py", "get_model", "()"),
    Seam("srt/model_loader/loader.py", "DefaultModelLoader._get_weights_iterator", None,
         ("weight_loader_disable_mmap", "get_model", "LoadFormat.FASTSAFETENSORS")),
    Seam("srt/model_loader/weight_utils.py", "safetensors_weights_iterator", None, ("disable_mmap", "prefetch", "safetensors.safe_open")),
    *PLE_SEAMS,
))
