"""The vLLM plug-in's PLE part on stand-ins of vLLM's classes, CPU only: every mode's rows bit for bit, EOS, scales, refusals."""

import types

import numpy as np
import pytest
import torch
from checkpoints import small_ple
from fake_cuda import FakeCuda
from made_stores import Made
from rank_groups import Group, added, agreeing
from vllm_ple_stubs import Fp8Method, Method, NvFp4Method, ngram_module, state_module
from vllm_stubs import Breakable, CUDAGraphMode, Requests, dummy_batch

import ssdgram
from ssdgram.engines.vllm import ple as plugin
from ssdgram.engines.vllm import plugin as vllm

MODES = CUDAGraphMode
METHODS = {"bf16": Method, "fp8_global": Fp8Method}


@pytest.fixture(scope="module", params=["bf16", "fp8_global"])
def made(tmp_path_factory, request):
    """Two PLE layers, orders 2 and 3, of each encoding that is served."""
    folder = tmp_path_factory.mktemp(f"ple-{request.param}")
    ssdgram.convert(small_ple(folder / "checkpoint", vocab_size=700, encoding=request.param, seed=5, layers=(1, 4)), folder / "store")
    return Made(folder / "store", 5)


class Server:
    """A model with its PLE layers and its state, changed by the plug-in, and the requests that it serves."""

    def __init__(self, made, monkeypatch, store=None, world=1, rank=0, offload=True, parallel=False, data_parallel=2):
        self.made, geometry, self.group = made, made.geometry, Group(rank, world)
        monkeypatch.setenv("SSDGRAM_STORE", str(store or made.out))
        monkeypatch.setenv("SSDGRAM_DRAM", "8MiB")
        self.cuda = FakeCuda(monkeypatch)
        monkeypatch.setattr(vllm, "tp_group", lambda parallel: self.group if parallel.tensor_parallel_size > 1 else None)
        self.module, states = ngram_module(world, rank), state_module(geometry.max_ngram - 1, geometry.eos_token_id)
        self.module.group, self.module.data_parallel = self.group, data_parallel
        plugin.patch_ngram(self.module)
        plugin.patch_state(states)
        self.layers = [self.module.Qwen4ExpNGramEmbedding(geometry, layer, METHODS[geometry.encoding](), offload, parallel)
                       for layer in geometry.layers]
        self.load()
        self.state = states.Qwen4ExpModelState(self.module.config, torch.nn.ModuleList(self.layers), None, torch.device("cpu"))
        self.requests = Requests()

    def load(self):
        """As load_weights does: the table in pieces, the scale as it is."""
        for layer, part in zip(self.made.geometry.layers, self.layers):
            table = part.ngram_embedding
            table.weight.weight_loader(table.weight, Untouchable(), checkpoint_start=0)
            table.weight.weight_loader(table.weight, Untouchable())
            if hasattr(table, "weight_scale"):
                table.weight_scale.weight_loader(table.weight_scale, torch.tensor([self.made.scale_of(layer)]))

    @property
    def stager(self):
        return self.state._ssdgram_stager

    def forward(self, count):
        """What the model does: each lookup begins before the layer in front of it, its rows are joined where they are used."""
        for layer in self.layers:
            layer.start_prefetch(count)
        return [layer(count) for layer in self.layers]

    def step(self, scheduled, mode=MODES.NONE, drafts=0, padded=0):
        """A step as execute_model runs it; the dequantised rows that each layer would project."""
        batch = self.requests.batch(scheduled, drafts, padded)
        self.state.prepare_attn(batch, mode, None, None, None, None)
        self.state.prepare_inputs(batch, self.requests)
        if mode == MODES.NONE:
            rows = self.forward(batch.num_tokens)
        else:
            if mode == MODES.PIECEWISE:
                self.graph.replay()                          # else a graph is replayed: no Python runs
            rows = [layer.ngram_embedding.dequantize(layer.ngram_embedding._prefetch_buffer[:batch.num_tokens].flatten(-2),
                                                     torch.bfloat16) for layer in self.layers]
        for name, count in scheduled.items():
            self.requests.computed[name] += count
        return rows

    def capture_piecewise(self, count):
        self.state.prepare_dummy_inputs(1, count)
        with Breakable() as self.graph:
            self.forward(count)

    def check(self, scheduled, **options):
        self.compare(self.step(scheduled, **options), scheduled)

    def compare(self, rows, scheduled):
        for layer, found in zip(self.made.geometry.layers, rows):
            parts = []
            for name, count in scheduled.items():
                stop = self.requests.computed[name]
                parts.append(self.made.values(layer, np.array(self.requests.tokens[name][:stop], np.int64))[stop - count:])
            wanted = np.concatenate(parts)
            np.testing.assert_array_equal(found.view(torch.int16).numpy().view(np.uint16).reshape(wanted.shape), wanted)


class Untouchable:
    def __getattr__(self, name):
        raise AssertionError(f"the loader looked at .{name} of a table")


@pytest.fixture
def server(made, monkeypatch):
    server = Server(made, monkeypatch)
    yield server
    server.stager.close()


def drawn(server, generator, count):
    """Tokens among which the segments end often."""
    tokens = generator.integers(0, server.made.vocabulary, count)
    tokens[generator.random(count) < 0.15] = server.made.geometry.eos_token_id
    return tokens.tolist()


@pytest.mark.parametrize("offload", [True, False])
def test_tables_are_empty_and_nothing_is_loaded(made, monkeypatch, offload):
    server = Server(made, monkeypatch, offload=offload)
    for layer in server.layers:
        table = layer.ngram_embedding
        assert table.weight.shape == (0, made.geometry.row_dim) and table.supports_prefetch and table.tp_size == 1
        assert sorted(name for name, _ in table.named_parameters()) == (["weight"] if made.geometry.encoding == "bf16" else
                                                                        ["weight", "weight_scale"])
        assert not table._prefetch_buffer.view(torch.uint8).any()
    server.stager.close()


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.PIECEWISE, MODES.FULL])
def test_mixed_prefill_and_decode_give_a_fresh_runs_rows(server, mode):
    generator = np.random.default_rng(int(mode.value))
    server.capture_piecewise(16)
    for name in "abc":
        server.requests.add(name, drawn(server, generator, 60))
    for _ in range(25):
        chosen = [name for name in "abc" if server.requests.computed[name] < 50 and generator.random() < 0.8] or ["c"]
        scheduled = {name: int(generator.integers(1, 4)) for name in chosen}
        if all(server.requests.computed[name] + count <= 60 for name, count in scheduled.items()):
            server.check(scheduled, mode=mode, padded=int(generator.integers(0, 3)))
    assert server.stager.counts.graph_steps == (server.stager.counts.steps if mode == MODES.FULL else 0)


def test_rejected_drafts_and_resumed_requests_are_hashed_anew(server):
    server.requests.add("a", [3, 4, 5, 6, 7, 8])
    server.check({"a": 2})
    server.requests.tokens["a"][2:] = [9, 9, 9, 9]            # drafts, of which one is accepted
    server.check({"a": 3}, mode=MODES.FULL, drafts=2)
    server.requests.computed["a"] = 3
    server.requests.tokens["a"][3:] = [11, 12, 13]
    server.requests.all_token_ids[server.requests.req_id_to_index["a"], 2:6] = [9, 11, 12, 13]
    server.check({"a": 2}, mode=MODES.FULL, drafts=1)
    assert server.stager.counts.drafts == 3
    server.state.remove_request("a")
    del server.requests.req_id_to_index["a"]
    server.requests.add("a", [3, 4, 9, 11, 12, 13, 14], computed=4)
    server.check({"a": 3})


def test_dummy_batches_and_captures_read_nothing(server):
    before = server.stager.store.stats()
    server.state.prepare_dummy_inputs(1, 4)
    with server.cuda.capture():
        server.forward(4)
    batch = dummy_batch(5)
    server.state.prepare_attn(batch, MODES.FULL, None, None, None, None)
    server.state.prepare_inputs(batch, server.requests)
    assert not any(rows.any() for rows in server.forward(5))
    after = server.stager.store.stats()
    assert (after.reads, after.hits, after.misses) == (before.reads, before.hits, before.misses)
    assert server.stager.counts.steps == 0
    assert server.cuda.log.count(("side", "waits for", "main")) == server.cuda.log.count(("main", "waits for", "side"))


def test_sequence_parallel_ranks_cut_their_chunk_and_add_nothing(made, monkeypatch):
    agreeing(monkeypatch)
    tokens = made.tokens(7, 3).tolist()
    for rank in range(2):
        server = Server(made, monkeypatch, world=2, rank=rank, parallel=True)
        server.requests.add("a", tokens)
        rows = server.step({"a": 7})
        for layer, found in zip(made.geometry.layers, rows):
            wanted = made.values(layer, np.array(tokens)).reshape(7, -1)[rank * 4:(rank + 1) * 4]
            np.testing.assert_array_equal(found.view(torch.int16).numpy().view(np.uint16)[:len(wanted)], wanted)
        assert server.group.given == []
        server.stager.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_own_bundles_give_them_to_vllms_sum(made, monkeypatch, world):
    """Each rank by itself goes through the same steps. Added up as whole numbers their rows are those of one store."""
    monkeypatch.setenv("SSDGRAM_SPLIT", "owner")
    agreeing(monkeypatch)
    runs, groups = [], []
    for rank in range(world):
        server = Server(made, monkeypatch, world=world, rank=rank, data_parallel=1)
        generator = np.random.default_rng(6)
        server.capture_piecewise(16)
        for name in "ab":
            server.requests.add(name, drawn(server, generator, 60))
        steps = [({"a": int(generator.integers(1, 4)), "b": 1}, mode) for mode in list(MODES) * 4]
        runs.append([[part.clone() for part in server.step(scheduled, mode=mode, padded=1)] for scheduled, mode in steps])
        groups.append(server.group)
        server.stager.close()
    server.requests.computed = dict.fromkeys("ab", 0)
    for (scheduled, _), rows in zip(steps, zip(*runs)):
        for name, count in scheduled.items():
            server.requests.computed[name] += count
        server.compare([added(parts) for parts in zip(*rows)], scheduled)
    assert groups[0].shapes and {dtype for _, dtype in groups[0].shapes} == {torch.int8}
    assert all(group.shapes == groups[0].shapes for group in groups)


@pytest.mark.parametrize(("split", "data_parallel", "message"), [
    ("columns", 1, "SSDGRAM_SPLIT=columns: vLLM adds up the rows of a PLE table.*set SSDGRAM_SPLIT=owner"),
    ("owner", 2, "data-parallel ranks too.*embedding_across_dp"),
])
def test_splits_that_vllm_cannot_put_together_are_refused(made, monkeypatch, split, data_parallel, message):
    monkeypatch.setenv("SSDGRAM_SPLIT", split)
    with pytest.raises(ssdgram.ConfigError, match=message):
        Server(made, monkeypatch, world=2, data_parallel=data_parallel)


def test_two_ranks_that_attach_to_a_server_read_once(made, monkeypatch, tmp_path):
    from served_stores import serving

    tokens = made.tokens(60).tolist()
    with serving(made, tmp_path, check=False) as service:
        ranks = [Server(made, monkeypatch, store=service.path) for _ in range(2)]
        try:
            for rank in ranks:
                rank.requests.add("a", tokens)
            for count, mode in ((9, MODES.NONE), (1, MODES.FULL), (20, MODES.FULL)):
                ranks[0].check({"a": count}, mode=mode)
                reads = service.store.stats().reads
                ranks[1].check({"a": count}, mode=mode)
                assert service.store.stats().reads == reads
        finally:
            for rank in ranks:
                rank.stager.close()


def test_prompts_are_fetched_early(server):
    prompt = server.made.tokens(40, 2).tolist()
    slot = server.requests.add("a", prompt)
    server.state.add_request(slot, types.SimpleNamespace(req_id="a", prefill_token_ids=prompt, num_computed_tokens=0))
    server.requests.add("b", [2, 3])
    server.check({"b": 1})
    assert server.state._ssdgram_early.tokens == len(prompt)
    server.state.remove_request("a")


# ---------------------------------------------------------------- refusals


def test_nvfp4_is_refused(made, monkeypatch):
    monkeypatch.setitem(METHODS, made.geometry.encoding, NvFp4Method)
    with pytest.raises(ssdgram.ConfigError, match="NVFP4 PLE table is not served"):
        Server(made, monkeypatch)


def test_a_table_of_the_other_encoding_is_refused(made, monkeypatch):
    monkeypatch.setitem(METHODS, made.geometry.encoding, Fp8Method if made.geometry.encoding == "bf16" else Method)
    with pytest.raises(ssdgram.IdentityError, match="convert the checkpoint that is served"):
        Server(made, monkeypatch)


def test_an_engram_store_is_refused(made, engram, monkeypatch):
    with pytest.raises(ssdgram.IdentityError, match="the store holds engram tables, the model wants ple"):
        Server(made, monkeypatch, store=engram.out)


def test_the_v1_runner_and_whole_file_loaders_are_refused(made, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(made.out))
    FakeCuda(monkeypatch)
    module = ngram_module()
    plugin.patch_ngram(module)
    method = METHODS[made.geometry.encoding]()
    module.config.use_v2_model_runner = False
    with pytest.raises(ssdgram.ConfigError, match="V1 model runner"):
        module.Qwen4ExpNGramEmbedding(made.geometry, 1, method)
    module.config.use_v2_model_runner, module.config.load_config.load_format = True, "fastsafetensors"
    with pytest.raises(ssdgram.ConfigError, match="fastsafetensors loader reads whole files"):
        module.Qwen4ExpNGramEmbedding(made.geometry, 1, method)


@pytest.mark.parametrize(("buffer", "message"), [
    ("layer_multipliers", "multipliers are not the model's"),
    ("ngram_heads_vocab_sizes", "primes are not the model's"),
    ("ngram_heads_offsets", "offsets are not the model's"),
    ("eos_token_id", "EOS token"),
    ("weight_scale", "has scale"),
])
def test_a_checkpoint_with_other_constants_is_refused_when_its_weights_are_loaded(made, monkeypatch, buffer, message):
    if buffer == "weight_scale" and made.geometry.encoding == "bf16":
        return                                               # such tables have none
    load = Server.load

    def load_another(self):
        load(self)
        part = self.layers[1]
        if buffer == "eos_token_id":
            part.eos_token_id += 1
        else:
            getattr(part.ngram_embedding if buffer == "weight_scale" else part, buffer)[0] += 1

    monkeypatch.setattr(Server, "load", load_another)
    with pytest.raises(ssdgram.IdentityError, match=message):
        Server(made, monkeypatch)


def test_a_name_without_a_layer_is_refused():
    assert plugin.layer_of("language_model.model.layers.12.ple.ple_embedding.ngram_embedding") == 12
    with pytest.raises(ssdgram.ConfigError, match="names no decoder layer"):
        plugin.layer_of("ngram_embedding")


def test_a_model_without_ple_layers_opens_nothing(made, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(made.out))
    states = state_module(2, 1)
    plugin.patch_state(states)
    state = states.Qwen4ExpModelState(ngram_module().config, torch.nn.ModuleList(), None, torch.device("cpu"))
    state.prepare_dummy_inputs(1, 1)
    assert not hasattr(state, "_ssdgram_stager")
