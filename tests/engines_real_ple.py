"""vLLM's own Qwen4Exp PLE classes on a CPU, twice: with their own table, and changed by the plug-in. Run by test_engine_real.py.

    python tests/engines_real_ple.py ENGINES CHECKPOINT STORE       prints {"steps": ..., "tokens": ..., "wrong": ...}

ENGINES holds vLLM's files and the packages that they import, as tests/fetch_engines.py leaves them. CUDA's streams are stand-ins; ids,
windows, model state, loaders and dequantisation are vLLM's.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

REQUESTS, MOST = 6, 64


def imported(engines):
    """vLLM as imported outside of a server."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(engines / "vllm"))
    sys.path.append(str(engines / "site"))
    import vllm.platforms as platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    platforms._current_platform = UnspecifiedPlatform()
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.engram import EngramConfig
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    object.__setattr__(config, "engram_config", EngramConfig(cpu_offload=False))
    config.scheduler_config.max_num_batched_tokens = MOST
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    import vllm.models.qwen4_exp.nvidia.model_state as states
    import vllm.models.qwen4_exp.nvidia.ngram_embedding as ngram

    return config, lambda: set_current_vllm_config(config), ngram, states


def weights_of(checkpoint, layer):
    """(name below the PLE module, tensor) of a layer's PLE tensors, as vLLM's loader hands them on."""
    from safetensors import safe_open

    index = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())["weight_map"]
    for name, file in index.items():
        _, found, rest = name.partition(f"layers.{layer}.ple.ple_embedding.")
        if found:
            with safe_open(checkpoint / file, framework="pt") as tensors:
                yield rest, tensors.get_tensor(name)


class Steps:
    """Requests as a server runs them."""

    def __init__(self, vocabulary, eos):
        self.generator = np.random.default_rng(3)
        self.tokens = self.generator.integers(0, vocabulary, (REQUESTS, 400)).astype(np.int32)
        self.tokens[self.generator.random(self.tokens.shape) < 0.1] = eos
        self.done = np.zeros(REQUESTS, np.int64)
        self.states = SimpleNamespace(req_id_to_index={str(number): number for number in range(REQUESTS)},
                                      all_token_ids=SimpleNamespace(gpu=torch.from_numpy(self.tokens)),
                                      num_computed_tokens=SimpleNamespace(gpu=torch.from_numpy(self.done)))

    def batch(self):
        chosen = self.generator.permutation(REQUESTS)[:int(self.generator.integers(1, REQUESTS + 1))]
        counts = [int(self.generator.integers(1, 9)) if self.generator.random() < 0.4 else 1 for _ in chosen]
        ids = np.concatenate([self.tokens[r, self.done[r]:self.done[r] + n] for r, n in zip(chosen, counts)])
        positions = np.concatenate([np.arange(self.done[r], self.done[r] + n) for r, n in zip(chosen, counts)])
        starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        return SimpleNamespace(req_ids=[str(r) for r in chosen], num_reqs=len(chosen), num_reqs_after_padding=len(chosen),
                               num_tokens=len(ids), num_draft_tokens=0, idx_mapping=torch.from_numpy(chosen), query_start_loc=starts,
                               input_ids=torch.from_numpy(ids), positions=torch.from_numpy(positions)), dict(zip(chosen, counts))


def main(engines, checkpoint, store, steps=60):
    from _pytest.monkeypatch import MonkeyPatch
    from fake_cuda import FakeCuda

    from ssdgram.engines.vllm import ple, plugin

    config, context, ngram, states = imported(engines)
    FakeCuda(MonkeyPatch())
    torch.Tensor.record_stream = lambda self, stream: None
    text = json.loads((checkpoint / "config.json").read_bytes())
    fields = SimpleNamespace(**{"seed": 1234, "ple_embedding_dtype": None, **text.get("text_config", text)})
    layers = sorted(layer - 1 for layer in fields.ple_layer_ids)
    torch.set_default_dtype(torch.bfloat16)

    def build():
        with context():
            parts = [ngram.Qwen4ExpNGramEmbedding(fields, fields.ple_embed_dim, number, MOST, data_parallel_rank=0,
                                                  prefix=f"model.layers.{layer}.ple.ple_embedding") for number, layer in enumerate(layers)]
        for part, layer in zip(parts, layers):
            part.load_weights(weights_of(checkpoint, layer))
        return torch.nn.ModuleList(parts)

    stock = build()
    os.environ.update(SSDGRAM_STORE=str(store), SSDGRAM_DRAM="16MiB")
    object.__setattr__(config, "model_config", SimpleNamespace(model=str(checkpoint), quantization=None))
    type(config).use_v2_model_runner = property(lambda self: True)
    for base in states.Qwen4ExpModelState.__mro__[1:]:       # what these do has to do with other layers and devices
        for name, function in (("__init__", lambda self, *_: None), ("prepare_inputs", lambda self, *_: {}),
                               ("prepare_attn", lambda self, *_, **__: {})):
            if name in vars(base) and base is not object:
                setattr(base, name, function)
    ple.patch_ngram(ngram)
    ple.patch_state(states)
    config.engram_config.cpu_offload = True
    ours = build()
    state = states.Qwen4ExpModelState.__new__(states.Qwen4ExpModelState)
    state.model_config = SimpleNamespace(hf_text_config=fields)
    state.max_num_reqs, state.device = REQUESTS, torch.device("cpu")
    with context():
        state.__init__(config, ours, None, torch.device("cpu"))
    run = Steps(fields.vocab_size, fields.eos_token_id)
    wrong = tokens = 0
    for number in range(steps):
        batch, counts = run.batch()
        full = SimpleNamespace(name="FULL" if number % 2 else "NONE")
        state.prepare_attn(batch, full, None, None, None, None)
        inputs = state.prepare_inputs(batch, run.states)
        arguments = batch.input_ids, inputs["query_start_loc"], inputs["ngram_context"]
        for part in ours:
            part.start_prefetch(*arguments)
        for expected, part in zip(stock, ours):
            wanted = expected.ngram_embedding.dequantize(expected(None, *arguments), torch.bfloat16)
            found = part.ngram_embedding.dequantize(part(None, *arguments), torch.bfloat16)
            wrong += not torch.equal(wanted.view(torch.int16), found.view(torch.int16))
        tokens += batch.num_tokens
        for request, count in counts.items():
            run.done[request] += count
    stager = getattr(state, plugin.STAGER)
    result = {"steps": steps, "tokens": tokens, "wrong": int(wrong), "graph_steps": stager.counts.graph_steps,
              "reads": stager.store.stats().reads, "rows_of_our_tables": sum(part.ngram_embedding.weight.shape[0] for part in ours)}
    stager.close()
    print(json.dumps(result))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    main(*(Path(argument) for argument in sys.argv[1:4]))
