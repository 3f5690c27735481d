"""Small stand-ins for the classes of vLLM 0.33.0 that the plug-in changes, with the same names, signatures and order of calls.

They are ours, not vLLM's text; `make test-engines` checks that vLLM's own have what these have.
"""

import functools
import types
from enum import Enum

import numpy as np
import torch
from torch import nn


class CUDAGraphMode(Enum):
    NONE, PIECEWISE, FULL = range(3)


class Breakable:
    """A piecewise capture: eager functions are recorded and run again at replay."""

    active = None

    def __init__(self):
        self.eager = []

    def __enter__(self):
        Breakable.active = self
        return self

    def __exit__(self, *_):
        Breakable.active = None

    def replay(self):
        for function in self.eager:
            function()


def eager_break_during_capture(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if Breakable.active is None:
            return function(*args, **kwargs)
        Breakable.active.eager.append(lambda: function(*args, **kwargs))
        return function(*args, **kwargs)

    wrapper.is_break = True
    return wrapper


def config(**changes):
    """As much of a VllmConfig as the plug-in looks at."""
    parts = {"use_v2_model_runner": True, "max_tokens": 64, "load_format": "auto", "strategy": None, "extra": {}, "model": "/nowhere",
             "pcp": 1, "world": 1, "rank": 0, **changes}
    return types.SimpleNamespace(
        use_v2_model_runner=parts["use_v2_model_runner"],
        parallel_config=types.SimpleNamespace(prefill_context_parallel_size=parts["pcp"], data_parallel_rank_local=0,
                                              tensor_parallel_size=parts["world"], world_size=parts["world"], rank=parts["rank"]),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=parts["max_tokens"]),
        load_config=types.SimpleNamespace(load_format=parts["load_format"], safetensors_load_strategy=parts["strategy"],
                                          model_loader_extra_config=parts["extra"]),
        model_config=types.SimpleNamespace(model=parts["model"]))


class Layout:
    """EngramLayout of a store's geometry."""

    def __init__(self, geometry):
        self.layer_ids = geometry.layers
        self.num_embeddings = geometry.rows_per_layer
        self.head_dim, self.n_heads, self.max_ngram_size = geometry.row_dim, geometry.heads, geometry.max_ngram
        self.primes = tuple(tuple(layer[o * geometry.heads:(o + 1) * geometry.heads] for o in range(geometry.orders))
                            for layer in geometry.primes)
        self.offsets = torch.tensor(geometry.offset_array)


class NgramHashState(nn.Module):
    def __init__(self, layout, multipliers, token_map):
        super().__init__()
        self.layout = layout
        self.register_buffer("multipliers", torch.tensor(multipliers))
        self.register_buffer("token_map", torch.tensor(token_map))


def engram_module(world=1, rank=0, rocm=False):
    """A fresh stand-in for vllm.models.deepseek_v41.common.engram, as the plug-in finds it. `module.config` is the current one."""
    module = types.SimpleNamespace(config=config(), eager_break_during_capture=eager_break_during_capture,
                                   get_tensor_model_parallel_rank=lambda: rank, get_tensor_model_parallel_world_size=lambda: world,
                                   current_platform=types.SimpleNamespace(is_rocm=lambda: rocm), NgramHashState=NgramHashState)
    module.get_current_vllm_config = lambda: module.config

    class ParallelEngramEmbedding(nn.Module):
        @staticmethod
        def _weight_loader(param, loaded_weight):
            param.data.copy_(loaded_weight)

        def __init__(self, num_embeddings, dim, head_sizes, block_size=32, cpu_offload=False, dp_shared_memory=False, use_thp=False):
            super().__init__()
            self.cpu_offload, self.dim, self.block_size = cpu_offload, dim, block_size
            self.dp_size, self.n_hash_cols, self.tp_size = 2, len(head_sizes), world
            shards, number = self._get_shard_info()
            self.part_n_hash_cols = -(-self.n_hash_cols // shards)
            self.head_start = number * self.part_n_hash_cols
            weight, scales = self._allocate_weights()
            self.weight, self.weight_scale_inv = nn.Parameter(weight, False), nn.Parameter(scales, False)
            for parameter in (self.weight, self.weight_scale_inv):
                parameter.weight_loader = self._weight_loader

        def _get_shard_info(self):
            assert self.dp_size == 1
            return self.tp_size, rank

        def _allocate_weights(self):
            raise AssertionError("a table was allocated")

        def lookup(self, indices, out, background=False):
            raise AssertionError("a table was read")

    class Engram(nn.Module):
        _prefetch_stream = _prefetch_done = _batch = None

        def __init__(self, layout, layer_hash_index, use_sequence_parallel=False):
            super().__init__()
            self.layer_hash_index, self.use_sequence_parallel = layer_hash_index, use_sequence_parallel
            self.embed_tokens = self._create_embedding(layout, layer_hash_index)
            self._init_staging(module.config.scheduler_config.max_num_batched_tokens, layout.head_dim)

        def _create_embedding(self, layout, layer_hash_index):
            raise AssertionError("not replaced")

        def _init_staging(self, max_tokens, head_dim):
            self.staged_rows = torch.full((max_tokens * self.embed_tokens.dp_size, self.embed_tokens.part_n_hash_cols, head_dim),
                                          float("nan"), dtype=torch.bfloat16)
            if self.embed_tokens.cpu_offload:
                self._prefetch_stream = torch.cuda.Stream()
                self._prefetch_done = torch.cuda.Event()

        def prepare_embeddings(self, hash_ids):
            rows = self.staged_rows[:hash_ids.shape[0]]
            if self._prefetch_stream is None:
                self.embed_tokens.lookup(hash_ids, rows)
            else:
                self._start_prefetch(hash_ids, rows)

        @eager_break_during_capture
        def _start_prefetch(self, hash_ids, rows):
            self.embed_tokens.lookup(hash_ids, rows)

        @eager_break_during_capture
        def _finish_prefetch(self, event):
            raise AssertionError("not replaced")

        def _ready_rows(self, num_tokens):
            if self._prefetch_done is not None:
                self._finish_prefetch(self._prefetch_done)
            return self.staged_rows[:num_tokens]

        def embed(self, hash_ids):
            assert self.embed_tokens.tp_size > 1             # else the plug-in has an answer of its own
            return module.tensor_model_parallel_all_gather(self._ready_rows(hash_ids.shape[0]), dim=1)[:, :self.embed_tokens.n_hash_cols]

    module.ParallelEngramEmbedding, module.Engram = ParallelEngramEmbedding, Engram
    return module


class DefaultModelState:
    """What the models' states derive from; the plug-ins change the derived classes alone."""

    def __init__(self, vllm_config, model, encoder_cache, device):
        self.vllm_config, self.calls = vllm_config, []

    def add_request(self, req_index, new_req_data):
        self.calls.append("add_request")

    def remove_request(self, req_id):
        self.calls.append("remove_request")

    def prepare_inputs(self, input_batch, req_states):
        return {}

    def prepare_dummy_inputs(self, num_reqs, num_tokens):
        return {}

    def prepare_attn(self, input_batch, cudagraph_mode, *args, **kwargs):
        return {"mode": cudagraph_mode}


def state_module():
    """A fresh stand-in for vllm.models.deepseek_v41.nvidia.model_state."""

    class DeepseekV41ModelState(DefaultModelState):
        def __init__(self, vllm_config, model, encoder_cache, device):
            super().__init__(vllm_config, model, encoder_cache, device)
            self.lookback_token_ids = torch.full((8, 3), -1, dtype=torch.int32)

        def prepare_inputs(self, input_batch, req_states):
            inputs = super().prepare_inputs(input_batch, req_states)
            starts = input_batch.query_start_loc.tolist()
            self.lookback_token_ids.fill_(-1)
            for r, slot in enumerate(input_batch.idx_mapping):
                if starts[r + 1] == starts[r]:
                    continue
                first = int(input_batch.positions[starts[r]])
                for c in range(min(3, first)):
                    self.lookback_token_ids[r, c] = req_states.all_token_ids[slot, first - 1 - c]
            return inputs | {"lookback_token_ids": self.lookback_token_ids}

    return types.SimpleNamespace(DeepseekV41ModelState=DeepseekV41ModelState)


class Requests:
    """RequestState: requests by slot, all their tokens."""

    def __init__(self, longest=200):
        self.req_id_to_index, self.all_token_ids = {}, np.zeros((8, longest), np.int32)
        self.tokens, self.computed = {}, {}

    def add(self, name, tokens, computed=0):
        index = next(i for i in range(8) if i not in self.req_id_to_index.values())
        self.req_id_to_index[name] = index
        self.tokens[name], self.computed[name] = list(tokens), computed
        self.all_token_ids[index, :len(tokens)] = tokens
        return index

    def batch(self, scheduled, drafts=0, padded=0):
        """An InputBatch of {request: tokens this step}; advances nothing."""
        ids, positions, starts = [], [], [0]
        for name, count in scheduled.items():
            begin = self.computed[name]
            ids += self.tokens[name][begin:begin + count]
            positions += range(begin, begin + count)
            starts.append(len(ids))
        total = len(ids)
        return types.SimpleNamespace(
            req_ids=list(scheduled), num_reqs=len(scheduled), num_tokens=total, num_draft_tokens=drafts,
            idx_mapping=[self.req_id_to_index[name] for name in scheduled], query_start_loc=torch.tensor(starts, dtype=torch.int32),
            input_ids=torch.tensor(ids + [0] * padded, dtype=torch.int32), positions=torch.tensor(positions + [0] * padded),
            num_computed_tokens_np=np.array([self.computed[name] for name in scheduled]),
            num_scheduled_tokens=np.array(list(scheduled.values())))


def dummy_batch(count):
    return types.SimpleNamespace(
        req_ids=["req_0_x"], num_reqs=1, num_tokens=count, num_draft_tokens=0, idx_mapping=[0],
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        input_ids=torch.zeros(count, dtype=torch.int32), positions=torch.zeros(count, dtype=torch.int64),
        num_computed_tokens_np=np.zeros(1, int), num_scheduled_tokens=np.array([count]))
