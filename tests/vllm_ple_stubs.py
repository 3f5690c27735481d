"""Small stand-ins for the PLE classes of vLLM 0.33.0 that the plug-in changes, with the same names, signatures and order of calls.

They are ours, not vLLM's text; `make test-engines` checks that vLLM's own have what these have, and runs the plug-in on those.
"""

import types

import torch
from torch import nn
from vllm_stubs import DefaultModelState, config, eager_break_during_capture


class Method:
    """A quantisation method: what the table is made of, and what becomes of its rows."""

    dtype = torch.bfloat16

    def create_weights(self, layer, rows, dim):
        weight = nn.Parameter(layer.allocate_embedding_weight(rows, dim, self.dtype), requires_grad=False)
        weight.weight_loader = layer.weight_loader
        layer.register_parameter("weight", weight)

    def lookup_dtype(self, layer):
        return layer.weight.dtype

    def dequantize(self, layer, embeddings, output_dtype):
        return embeddings


class Fp8Method(Method):
    dtype = torch.float8_e4m3fn

    def create_weights(self, layer, rows, dim):
        super().create_weights(layer, rows, dim)
        scale = nn.Parameter(torch.zeros(1, dtype=torch.float32), requires_grad=False)
        scale.weight_loader = layer.weight_loader
        layer.register_parameter("weight_scale", scale)

    def dequantize(self, layer, embeddings, output_dtype):
        return embeddings.to(output_dtype) * layer.weight_scale.to(output_dtype)


class NvFp4Method(Method):
    dtype = torch.uint8


def ngram_module(world=1, rank=0):
    """A fresh stand-in for vllm.models.qwen4_exp.nvidia.ngram_embedding, as the plug-in finds it. `module.config` is the current one."""
    module = types.SimpleNamespace(config=config(world=world, rank=rank), Qwen4ExpPLENvFp4EmbeddingMethod=NvFp4Method, group=None,
                                   data_parallel=2)
    module.get_current_vllm_config = lambda: module.config

    class Qwen4ExpPLEEmbedding(nn.Module):
        supports_prefetch = False

        def __init__(self, num_embeddings, embedding_dim, *, params_dtype, padding_size, prefix, embedding_method, num_ngram_heads=1,
                     max_total_tokens=0, data_parallel_rank=0, reduce_results=True):
            super().__init__()
            self.org_vocab_size, self.embedding_dim, self.prefix, self.tp_size = num_embeddings, embedding_dim, prefix, world
            self.reduce_results, self.embedding_method = reduce_results, embedding_method
            self.etp_data_parallel_size, self.parallel_group = module.data_parallel, module.group
            embedding_method.create_weights(self, num_embeddings // world, embedding_dim)

        def allocate_embedding_weight(self, num_embeddings, embedding_dim, dtype):
            raise NotImplementedError

        def weight_loader(self, param, loaded_weight, checkpoint_start=None):
            param.data.copy_(loaded_weight.reshape(param.shape))

        def dequantize(self, embeddings, output_dtype):
            return self.embedding_method.dequantize(self, embeddings, output_dtype)

        def _get_dp_gather_slot(self, local_num_tokens):
            assert self.etp_data_parallel_size == 1
            return local_num_tokens, 0

    class Qwen4ExpPLEDeviceEmbedding(Qwen4ExpPLEEmbedding):
        def allocate_embedding_weight(self, num_embeddings, embedding_dim, dtype):
            raise AssertionError("a table was allocated")

    class Qwen4ExpPLEPinnedHostEmbedding(Qwen4ExpPLEEmbedding):
        supports_prefetch = True

        def __init__(self, num_embeddings, embedding_dim, **options):
            raise AssertionError("vLLM's own was built")

        def allocate_embedding_weight(self, num_embeddings, embedding_dim, dtype):
            raise AssertionError("a table was allocated")

        def _lookup(self, input_ids, output=None):
            raise AssertionError("a table was read")

        def _reduce_etp_embeddings(self, embeddings):
            raise AssertionError("rows were added up over ranks")

        @eager_break_during_capture
        def start_prefetch(self, ngram_ids):
            slot_size, _ = self._get_dp_gather_slot(ngram_ids.shape[0])
            assert slot_size <= self._prefetch_buffer.shape[0]
            active_output = self._prefetch_buffer[:slot_size]
            self._prefetch_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._prefetch_stream):
                self._lookup(ngram_ids, output=active_output)

        @eager_break_during_capture
        def _finalize_prefetch(self, prefetch_output, output):
            torch.cuda.current_stream().wait_stream(self._prefetch_stream)
            embeddings = prefetch_output[:output.shape[0]]
            if self.reduce_results:
                embeddings = self._reduce_etp_embeddings(embeddings)
            output.copy_(embeddings.flatten(-2))

        def finalize_prefetch(self, total_tokens):
            output = self._prefetch_buffer.new_empty((total_tokens, self._output_dim))
            self._finalize_prefetch(self._prefetch_buffer, output)
            return output

    class Qwen4ExpNGramEmbedding(nn.Module):
        """The constants of a store's geometry, and the two calls that a layer makes."""

        def __init__(self, geometry, layer, method, cpu_offload=True, use_sequence_parallel=False):
            super().__init__()
            number = geometry.layers.index(layer)
            self.heads_per_ngram, self.eos_token_id = geometry.heads, geometry.eos_token_id
            self.ngram_heads, self.use_sequence_parallel = geometry.columns, use_sequence_parallel
            self.register_buffer("layer_multipliers", torch.tensor(geometry.multiplier_array[number]))
            self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(geometry.prime_array[number]))
            self.register_buffer("ngram_heads_offsets", torch.tensor(geometry.offset_array[number]))
            self.use_reduce_scatter = use_sequence_parallel
            kind = module.Qwen4ExpPLEPinnedHostEmbedding if cpu_offload else module.Qwen4ExpPLEDeviceEmbedding
            self.ngram_embedding = kind(
                geometry.table_rows[number], geometry.row_dim, params_dtype=torch.bfloat16, padding_size=128,
                prefix=f"model.layers.{layer}.ple.ple_embedding.ngram_embedding", embedding_method=method,
                num_ngram_heads=geometry.columns, max_total_tokens=module.config.scheduler_config.max_num_batched_tokens,
                data_parallel_rank=0, reduce_results=not self.use_reduce_scatter)

        def start_prefetch(self, count):
            self.ngram_embedding.start_prefetch(torch.zeros(count, self.ngram_heads, dtype=torch.int64))

        def forward(self, count):
            rows = self.ngram_embedding.finalize_prefetch(total_tokens=count)
            if self.use_sequence_parallel:
                assert not self.use_reduce_scatter
                chunk = -(-count // world)
                rows = torch.cat([rows.view(torch.uint8), rows.new_zeros(chunk * world - count, rows.shape[1]).view(torch.uint8)])
                rows = rows.view(self.ngram_embedding.weight.dtype)[rank * chunk:(rank + 1) * chunk]
            return self.ngram_embedding.dequantize(rows, torch.bfloat16)

    module.Qwen4ExpPLEEmbedding, module.Qwen4ExpNGramEmbedding = Qwen4ExpPLEEmbedding, Qwen4ExpNGramEmbedding
    module.Qwen4ExpPLEDeviceEmbedding, module.Qwen4ExpPLEPinnedHostEmbedding = Qwen4ExpPLEDeviceEmbedding, Qwen4ExpPLEPinnedHostEmbedding
    return module


def state_module(depth, eos):
    """A fresh stand-in for vllm.models.qwen4_exp.nvidia.model_state."""

    class Qwen4ExpModelState(DefaultModelState):
        def __init__(self, vllm_config, model, encoder_cache, device):
            super().__init__(vllm_config, model, encoder_cache, device)
            self.ngram_context = torch.full((8, depth), eos, dtype=torch.int32)

        def prepare_inputs(self, input_batch, req_states):
            inputs = super().prepare_inputs(input_batch, req_states)
            starts = input_batch.query_start_loc.tolist()
            self.ngram_context.fill_(eos)
            for r, slot in enumerate(input_batch.idx_mapping):
                first = int(input_batch.positions[starts[r]]) if starts[r + 1] > starts[r] else 0
                for c in range(depth):
                    if first - depth + c >= 0:
                        self.ngram_context[r, c] = int(req_states.all_token_ids[slot, first - depth + c])
            return inputs | {"ngram_context": self.ngram_context}

    return types.SimpleNamespace(Qwen4ExpModelState=Qwen4ExpModelState)
