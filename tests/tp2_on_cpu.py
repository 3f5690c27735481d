"""Work of ranks for test_bench_tp2.py, importable by the processes that it starts: on the CPU, over gloo."""

import datetime
import os
import time

import numpy as np


def rows_work(rank):
    """As engines_tp2.gpu_work, in small: each rank holds half of the columns and gathers the rest; the attached store has them all."""
    import torch
    import torch.distributed as dist

    import ssdgram
    from ssdgram.tools.synth import expected_rows

    if rank.world > 1:
        dist.init_process_group("gloo", f"file://{rank.rendezvous}", datetime.timedelta(seconds=30), rank.world, rank.rank)
    generator, wrong = np.random.default_rng(1), 0
    with ssdgram.attach(rank.socket) as store:
        geometry = store.geometry
        token_map = np.load(rank.store / "token_map.npy")
        columns = geometry.columns // rank.world
        mine = slice(rank.rank * columns, (rank.rank + 1) * columns)
        for _ in range(rank.steps):
            tokens = generator.integers(0, store._vocabulary, 30)
            ids = geometry.row_ids(tokens, token_map)
            with store.prefetch(tokens) as batch:
                for index, layer in enumerate(store.layers):
                    part = torch.from_numpy(np.ascontiguousarray(expected_rows(0, layer, ids[:, index], geometry)[:, mine]))
                    parts = [torch.empty_like(part) for _ in range(rank.world)]
                    if rank.world > 1:
                        dist.all_gather(parts, part)
                    else:
                        parts = [part]
                    wrong += not torch.equal(batch.packed(layer), torch.cat(parts, 1))
    return {"wrong": int(wrong), "columns_of_the_stock_table": columns}


def wrong_work(rank):
    return {"wrong": rank.rank}


def failing_work(rank):
    if rank.rank == 1:
        raise ValueError("the second rank has had enough")
    time.sleep(600)


def dying_work(rank):
    if rank.rank == 1:
        os._exit(9)
    time.sleep(600)


def sleeping_work(rank):
    time.sleep(600)


def vllm_columns_work(rank):
    """As vllm_work, each rank with a store of its own columns."""
    return vllm_work(rank, split="columns")


def vllm_work(rank, split="none"):
    """vLLM's own Engram layers with TP, over gloo, with and without the plug-in: the rows of all columns as `embed` gives them."""
    import json
    import sys
    from pathlib import Path
    from types import SimpleNamespace

    folder = Path(os.environ.get("SSDGRAM_TEST_ENGINES", Path(__file__).parents[1] / ".peer/engines"))
    os.environ.update(CUDA_VISIBLE_DEVICES="", SSDGRAM_STORE=str(rank.socket if split == "none" else rank.store), SSDGRAM_SPLIT=split,
                      SSDGRAM_DRAM="64MiB")
    sys.path.insert(0, str(folder / "vllm"))
    sys.path.append(str(folder / "site"))
    import torch
    from _pytest.monkeypatch import MonkeyPatch
    from fake_cuda import FakeCuda

    import ssdgram
    from ssdgram.bench import engines_vllm
    from ssdgram.engines.vllm import plugin

    vllm = engines_vllm.Vllm(rank.checkpoint, "cpu", rank=rank.rank, world=rank.world, rendezvous=rank.rendezvous,
                             timeout=datetime.timedelta(seconds=60))
    FakeCuda(MonkeyPatch())
    torch.Tensor.record_stream = lambda self, stream: None
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=1, major=9, minor=0)
    type(vllm.config).use_v2_model_runner = property(lambda self: True)

    def lookup(self, indices, out, background=False):        # vLLM's own is a Triton kernel
        ids = indices.long()[:, self.head_start:self.head_start + self.part_n_hash_cols] - self.vocab_start_idx
        scales = torch.exp2(self.weight_scale_inv.view(torch.uint8).float() - 127)[ids]
        values = self.weight[ids].float().unflatten(-1, (-1, self.block_size)) * scales.unsqueeze(-1)
        out.copy_(values.flatten(-2).to(torch.bfloat16))

    vllm.module.ParallelEngramEmbedding.lookup = lookup
    vllm.config.engram_config.cpu_offload = False
    stock, ours = vllm.layers(vllm.stock_class), vllm.layers(vllm.module.Engram)
    engines_vllm.load_weights(vllm, rank.checkpoint, stock, ours)
    geometry, token_map = ssdgram.Manifest.load(rank.store).geometry, np.load(rank.store / "token_map.npy")
    inputs = engines_vllm.Steps("cpu", geometry.vocabulary(geometry.checked_map(token_map)), -1, seed=1, longest=400)
    state = SimpleNamespace(lookback_token_ids=inputs.window)
    hasher = vllm.hash_state(SimpleNamespace(_token_map=token_map))
    plugin.attach(state, vllm.config, torch.nn.ModuleList([*ours, hasher]), torch.device("cpu"))
    store = getattr(state, plugin.STAGER).store
    requests = SimpleNamespace(req_id_to_index={str(number): number for number in range(engines_vllm.REQUESTS)})
    wrong = 0
    for number in range(rank.steps):
        scheduled = inputs.draw(decode_only=False)
        batch = inputs.prepare(scheduled)
        ids = np.concatenate([geometry.row_ids(inputs.tokens[r, :inputs.done[r]], token_map)[-n:] for r, n in scheduled.items()])
        state._ssdgram_full = bool(number % 2)
        plugin.begin_step(state, batch, requests)
        for index, (theirs, layer) in enumerate(zip(stock, ours)):
            hashes = torch.from_numpy(ids[:, index].astype(np.int32))
            theirs.prepare_embeddings(hashes)
            layer.prepare_embeddings(hashes)
            wanted, found = theirs.embed(hashes), layer.embed(hashes)
            wrong += not torch.equal(wanted.view(torch.int16), found.view(torch.int16))
    reads = store.stats().reads
    store.close()
    return {"wrong": int(wrong), "columns_of_the_stock_table": [layer.embed_tokens.part_n_hash_cols for layer in stock],
            "columns": list(store.columns), "reads": reads,
            "config": json.dumps(vllm.config.parallel_config.tensor_parallel_size)}
