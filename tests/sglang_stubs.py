"""Small stand-ins for the modules of SGLang 0.5.23 that the plug-in changes, with the same names, signatures and order of calls.

They are ours, not SGLang's text; `make test-engines` checks that SGLang's own have what these have.
"""

import enum
import functools
import sys
import types

import numpy as np
import torch
from torch import nn


class ForwardMode(enum.Enum):
    EXTEND, DECODE, IDLE, TARGET_VERIFY = range(4)

    def is_extend_without_speculative(self):
        return self == ForwardMode.EXTEND

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY


class HookType(enum.Enum):
    AFTER, AROUND, REPLACE = range(3)


class HookRegistry:
    """As much of SGLang's as the plug-in uses. `broken`: a target that is not patched, as when it is missing there."""

    def __init__(self, broken=None):
        self.hooks, self.broken = [], broken

    def register(self, target, hook, kind):
        self.hooks.append((target, hook, kind))

    def apply_hooks(self):
        for target, hook, kind in self.hooks:
            path, _, name = target.rpartition(".")
            if target == self.broken:
                continue
            module = next(path[:end] for end in range(len(path), 0, -1) if path[:end] in sys.modules)
            holder = sys.modules[module]
            for part in path[len(module) + 1:].split("."):
                holder = getattr(holder, part) if part else holder
            original = holder.__dict__[name] if isinstance(holder, type) else getattr(holder, name)
            if isinstance(hook, type):
                setattr(holder, name, hook)
                continue
            is_class = isinstance(original, classmethod)
            function = original.__func__ if is_class else original

            def wrap(hook=hook, kind=kind, function=function):
                @functools.wraps(function)
                def wrapper(*args, **kwargs):
                    if kind == HookType.REPLACE:
                        return hook(*args, **kwargs)
                    if kind == HookType.AROUND:
                        return hook(function, *args, **kwargs)
                    result = function(*args, **kwargs)
                    changed = hook(result, *args, **kwargs)
                    return result if changed is None else changed

                return wrapper

            setattr(holder, name, classmethod(wrap()) if is_class else wrap())


def install(monkeypatch, broken=None, world=1, rank=0):
    """Put stand-ins into sys.modules; the module of `srt.layers.engram`. `engram.added`: what was given to all-reduces, which are left to
    the test."""
    registry = HookRegistry(broken)
    names = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry", "sglang.srt.layers",
             "sglang.srt.layers.engram", "sglang.srt.layers.engram_staging",
             "sglang.srt.model_executor", "sglang.srt.model_executor.model_runner", "sglang.srt.model_executor.runner",
             "sglang.srt.model_executor.runner.decode_cuda_graph_runner", "sglang.srt.model_executor.runner_utils",
             "sglang.srt.model_executor.runner_utils.capture_mode", "sglang.srt.managers", "sglang.srt.managers.scheduler",
             "sglang.srt.runtime_context")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    hooks = modules["sglang.srt.plugins.hook_registry"]
    hooks.HookRegistry, hooks.HookType = registry, HookType
    engram = modules["sglang.srt.layers.engram"]
    engram.FP8_BLOCK_SIZE, engram.MM_PAD_SHIFT_VALUE = 32, 1_000_000
    group = types.SimpleNamespace(rank_in_group=rank, world_size=world, cpu_group=None, unique_name="tp:0")
    engram.parallel = types.SimpleNamespace(attn_cp_size=1, attn_dp_size=1, tp_size=world, tp_group=group, attn_tp_group=group)
    engram.get_parallel = lambda: engram.parallel
    engram.added = []

    def inplace_all_reduce(tensor, group_name):
        assert group_name == group.unique_name and tensor.dtype == torch.int32
        engram.added.append(tensor)

    engram.inplace_all_reduce = inplace_all_reduce
    engram.model = types.SimpleNamespace(model_path="/nowhere", load_format="auto", weight_loader_disable_mmap=False,
                                         weight_loader_prefetch_checkpoints=False)
    engram.get_model = lambda: engram.model

    class EngramEmbedding(nn.Module):
        def __init__(self, num_embeddings, dim, layer_id, column_bounds):
            raise AssertionError("a table was allocated")

        def new_rows(self, indices):
            return torch.empty(*indices.shape, self.dim, dtype=torch.bfloat16, device=indices.device)

    class EngramHasher(nn.Module):
        """Keeps the history as SGLang's does; its ids do not matter here."""

        def __init__(self, geometry, token_map, image_token_id=None, slots=8):
            super().__init__()
            self.max_ngram_size, self.image_token_id = geometry.max_ngram, image_token_id
            self.register_buffer("multipliers", torch.tensor(geometry.multiplier_array))
            self.register_buffer("token_map", torch.tensor(token_map))
            self.columns = geometry.columns
            self.layers = len(geometry.layers)
            self.history = torch.zeros(slots + 1, self.max_ngram_size - 1, dtype=torch.int32)

        def forward(self, input_ids, forward_batch):
            if forward_batch.forward_mode.is_decode():
                slots = forward_batch.req_pool_indices
                self.history[slots] = torch.cat([self.history[slots][:, 1:], input_ids[:, None].to(torch.int32)], 1)
            return torch.zeros(input_ids.shape[0], self.layers, self.columns, dtype=torch.int64)

    class Engram(nn.Module):
        def __init__(self, geometry, layer):
            super().__init__()
            self.layer_hash_index = geometry.layers.index(layer)
            bounds = (0, *np.cumsum(geometry.primes[self.layer_hash_index]).tolist())
            self.embed = engram.EngramEmbedding(bounds[-1], geometry.row_dim, layer, column_bounds=bounds)

        def embed_rows(self, hash_ids, forward_batch, cp_all_tokens=False):
            staged = None if forward_batch is None else forward_batch.engram_staged_rows
            if staged is not None:
                return self.embed.dequant_staged(*staged[self.layer_hash_index], hash_ids.shape)
            return self.embed(hash_ids, forward_batch, cp_all_tokens=cp_all_tokens)

    engram.EngramEmbedding, engram.EngramHasher, engram.Engram = EngramEmbedding, EngramHasher, Engram

    class EngramRowStager:
        @classmethod
        def from_model(cls, model, hasher, device):
            return None

        def stage(self, batch):
            raise AssertionError("not replaced")

    modules["sglang.srt.layers.engram_staging"].EngramRowStager = EngramRowStager

    class DecodeCudaGraphRunner:
        """The buffers that a graph reads, and a graph that runs no Python: `replayed` gets what it would read."""

        def __init__(self, layers, is_draft=False, width=1):
            self.buffers = types.SimpleNamespace(input_ids=torch.zeros(16, dtype=torch.int64), positions=torch.zeros(16, dtype=torch.int64),
                                                 req_pool_indices=torch.zeros(16, dtype=torch.int64))
            self.captured_req_width, self.ragged_verify_mode = width, False
            self.model_runner = types.SimpleNamespace(is_draft_worker=is_draft)
            self.layers = layers

        def load_batch(self, forward_batch, pp_proxy_tensors=None):
            self.raw_bs = forward_batch.req_pool_indices.shape[0]
            count = forward_batch.input_ids.shape[0]
            self.buffers.input_ids[:count], self.buffers.positions[:count] = forward_batch.input_ids, forward_batch.positions
            self.buffers.req_pool_indices[:self.raw_bs] = forward_batch.req_pool_indices

        def execute(self, forward_batch, pp_proxy_tensors=None):
            self.load_batch(forward_batch, pp_proxy_tensors)
            count = forward_batch.input_ids.shape[0]
            return [layer.embed.graph_rows[:count].clone() for layer in self.layers]

    modules["sglang.srt.model_executor.runner.decode_cuda_graph_runner"].DecodeCudaGraphRunner = DecodeCudaGraphRunner
    modules["sglang.srt.model_executor.runner_utils.capture_mode"].is_capture_mode = False

    class ModelRunner:
        def __init__(self, model, pool):
            self.model, self.req_to_token_pool, self.device, self.gpu_id = model, pool, "cpu", 0
            self.server_args = types.SimpleNamespace(speculative_num_draft_tokens=None)

        def init_ngram_embedding_manager(self):
            self.ngram_embedding_manager = types.SimpleNamespace()

    modules["sglang.srt.model_executor.model_runner"].ModelRunner = ModelRunner

    class Scheduler:
        def __init__(self):
            self.waiting_queue = []

        def _add_request_to_queue(self, req, is_retracted=False):
            self.waiting_queue.append(req)

    modules["sglang.srt.managers.scheduler"].Scheduler = Scheduler
    modules["sglang.srt.runtime_context"].get_schedule = lambda: types.SimpleNamespace(chunked_prefill_size=64, max_prefill_tokens=64)
    return engram
