"""The vLLM plug-in on stand-ins of vLLM's classes, CPU only: every mode's rows bit for bit, dummy batches, refusals, loud failure."""

import types

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from rank_groups import Group, agreeing
from vllm_stubs import Breakable, CUDAGraphMode, Layout, NgramHashState, Requests, config, dummy_batch, engram_module, state_module

import ssdgram
from ssdgram.engines.vllm import plugin
from ssdgram.kernels.dequant import value_table

MODES = CUDAGraphMode


def values(made, layer, tokens, **context):
    """bf16 bits of the rows that a fresh run of `tokens` reads, by vLLM's rule for scale bytes."""
    packed, geometry = made.expected(layer, tokens, **context), made.geometry
    codes, scales = packed[..., :geometry.row_dim], packed[..., geometry.row_dim:]
    table = value_table("fp8_ue8m0", scale_rule="vllm")
    return table[np.repeat(scales, 32, axis=-1)[..., :geometry.row_dim].astype(np.int64) * 256 + codes]


class Server:
    """A model with its Engram layers and its state, changed by the plug-in, and the requests that it serves."""

    def __init__(self, made, monkeypatch, store=None, group=None):
        self.made = made
        monkeypatch.setenv("SSDGRAM_STORE", str(store or made.out))
        monkeypatch.setenv("SSDGRAM_DRAM", "8MiB")
        self.cuda = FakeCuda(monkeypatch)
        world, rank = (1, 0) if group is None else (group.world_size, group.rank_in_group)
        monkeypatch.setattr(plugin, "tp_group", lambda parallel: group if parallel.tensor_parallel_size > 1 else None)
        self.module, states = engram_module(world, rank), state_module()
        self.module.config = config(world=world, rank=rank)
        self.module.tensor_model_parallel_all_gather = None if group is None else group.all_gather
        plugin.patch_engram(self.module)
        plugin.patch_state(states)
        self.layout = Layout(made.geometry)
        self.layers = [self.module.Engram(self.layout, index) for index in range(len(self.layout.layer_ids))]
        self.model = torch.nn.ModuleList([*self.layers, NgramHashState(self.layout, made.geometry.multiplier_array, made.token_map)])
        self.state = states.DeepseekV41ModelState(self.module.config, self.model, None, torch.device("cpu"))
        self.requests = Requests()

    @property
    def stager(self):
        return self.state._ssdgram_stager

    def forward(self, count):
        """What the model does with its Engram layers: all lookups up front, each layer's rows where it needs them."""
        ids = torch.zeros(count, self.made.geometry.columns, dtype=torch.int32)
        for layer in self.layers:
            layer.prepare_embeddings(ids)
        return [layer.embed(ids) for layer in self.layers]

    def step(self, scheduled, mode=MODES.NONE, drafts=0, padded=0):
        """A step as execute_model runs it; the rows that each layer would read."""
        batch = self.requests.batch(scheduled, drafts, padded)
        self.state.prepare_attn(batch, mode, None, None, None, None)
        self.state.prepare_inputs(batch, self.requests)
        if mode == MODES.FULL:
            rows = [layer.staged_rows[:batch.num_tokens] for layer in self.layers]      # a graph is replayed: no Python runs
        elif mode == MODES.PIECEWISE:
            self.graph.replay()
            rows = [layer.staged_rows[:batch.num_tokens] for layer in self.layers]
        else:
            rows = self.forward(batch.num_tokens)
        rows = [part.clone() for part in rows]
        for name, count in scheduled.items():
            self.requests.computed[name] += count
        return rows

    def capture_piecewise(self, count):
        self.state.prepare_dummy_inputs(1, count)
        with Breakable() as self.graph:
            self.forward(count)

    def wanted(self, scheduled):
        """The rows of a fresh run, of the same positions: bf16 bits."""
        found = []
        for layer in self.layout.layer_ids:
            parts = []
            for name, count in scheduled.items():
                stop = self.requests.computed[name]
                tokens = np.array(self.requests.tokens[name][:stop], np.int64)
                parts.append(values(self.made, layer, tokens, participates=tokens != plugin.IMAGE_ID)[stop - count:])
            found.append(np.concatenate(parts))
        return found

    def check(self, scheduled, **options):
        rows = self.step(scheduled, **options)
        for found, wanted in zip(rows, self.wanted(scheduled)):
            np.testing.assert_array_equal(found.view(torch.int16).numpy().view(np.uint16), wanted)


@pytest.fixture
def server(engram, monkeypatch):
    server = Server(engram, monkeypatch)
    yield server
    server.stager.close()


def drawn(server, generator, count):
    return generator.integers(0, server.made.vocabulary, count).tolist()


def test_tables_are_empty_and_nothing_is_loaded(server):
    for layer in server.layers:
        table = layer.embed_tokens
        assert table.weight.shape == (0, server.layout.head_dim) and table.weight_scale_inv.shape == (0, server.layout.head_dim // 32)
        assert table.cpu_offload and (table.dp_size, table.tp_size) == (1, 1)

        class Untouchable:
            def __getattr__(self, name):
                raise AssertionError(f"the loader looked at .{name} of a table")

        table.weight.weight_loader(table.weight, Untouchable())
        assert torch.equal(layer.staged_rows, torch.zeros_like(layer.staged_rows))


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


def test_image_spans_take_no_part(server):
    tokens = [5, 6, plugin.IMAGE_ID, plugin.IMAGE_ID, 7, 8, 9, 10]
    server.requests.add("a", tokens)
    for count in (3, 1, 2, 2):
        server.check({"a": count})


def test_a_request_without_tokens_in_the_step_is_no_trouble(server):
    server.requests.add("a", [1, 2, 3])
    server.requests.add("b", [4, 5, 6])
    server.check({"a": 0, "b": 2})
    server.check({"b": 1, "a": 3})


def test_rejected_drafts_are_replaced_by_the_tokens_that_came(server):
    server.requests.add("a", [3, 4, 5, 6, 7, 8])
    server.check({"a": 2})
    server.requests.tokens["a"][2:] = [9, 9, 9, 9]            # drafts, of which one is accepted
    server.check({"a": 3}, mode=MODES.FULL, drafts=2)
    server.requests.computed["a"] = 3
    server.requests.tokens["a"][3:] = [11, 12, 13]
    server.requests.all_token_ids[server.requests.req_id_to_index["a"], 2:6] = [9, 11, 12, 13]
    server.check({"a": 2}, mode=MODES.FULL, drafts=1)
    assert server.stager.counts.drafts == 3


def test_preempted_and_resumed_requests_are_hashed_anew(server):
    server.requests.add("a", range(1, 20))
    server.check({"a": 7})
    server.state.remove_request("a")
    assert server.state.calls[-1] == "remove_request"
    del server.requests.req_id_to_index["a"]
    server.requests.add("b", range(30, 50))
    server.check({"b": 4})
    server.requests.add("a", range(1, 20), computed=5)        # resumed: prefix-cache hit of five tokens
    server.check({"a": 4, "b": 1})


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.FULL])
def test_dummy_batches_read_nothing(server, mode):
    before = server.stager.store.stats()
    batch = dummy_batch(5)
    server.state.prepare_attn(batch, mode, None, None, None, None, for_capture=True)
    server.state.prepare_inputs(batch, server.requests)
    server.forward(5)
    server.state.prepare_dummy_inputs(1, 5)
    server.forward(5)
    after = server.stager.store.stats()
    assert (after.reads, after.hits, after.misses) == (before.reads, before.hits, before.misses)
    assert server.stager.counts.idle_steps == 2 and server.stager.counts.steps == 0


def test_a_dummy_batch_behind_a_real_one_gets_none_of_its_rows_late(server):
    server.requests.add("a", [1, 2, 3])
    batch = server.requests.batch({"a": 3})
    server.state.prepare_attn(batch, MODES.NONE, None, None, None, None)
    server.state.prepare_inputs(batch, server.requests)
    server.state.prepare_inputs(dummy_batch(3), server.requests)
    assert all(not rows.any() for rows in server.forward(3))
    assert server.stager.counts.abandoned == 1


def test_whole_graphs_capture_the_streams_and_no_rows(server):
    server.state.prepare_dummy_inputs(1, 4)
    server.cuda.log.clear()
    with server.cuda.capture():
        server.forward(4)
    log = server.cuda.log
    assert log.count(("side", "waits for", "main")) == log.count(("side", "records", "")) == len(server.layers)
    assert log.count(("main", "waits for event of", "side")) == len(server.layers)
    assert server.stager.counts.steps == 0


def test_breaks_stay_breaks(server):
    assert server.module.Engram._start_prefetch.is_break and server.module.Engram._finish_prefetch.is_break


def test_rows_that_are_late_are_gathered_on_the_side_stream_before_the_layer_goes_on(server):
    server.requests.add("a", [1, 2, 3])
    server.cuda.log.clear()
    server.check({"a": 3})
    assert server.cuda.log[-1] == ("main", "waits for event of", "side")


def test_the_specialised_decode_reads_staged_rows_only_when_they_are_there(server):
    """It waits for `_prefetch_done` itself and never calls `_finish_prefetch`."""
    seen = []

    class EngramPrefetch:
        def __init__(self, engrams):
            self._buffers = dict.fromkeys(engrams)

        def start(self, num_tokens):
            seen.extend(engram.staged_rows[:num_tokens].clone() for engram in self._buffers)

    plugin.patch_prefetch(types.SimpleNamespace(EngramPrefetch=EngramPrefetch))
    server.requests.add("a", [4, 5, 6, 7])
    batch = server.requests.batch({"a": 3})
    server.state.prepare_attn(batch, MODES.NONE, None, None, None, None)
    server.state.prepare_inputs(batch, server.requests)
    for layer in server.layers:
        layer.prepare_embeddings(torch.zeros(3, server.made.geometry.columns, dtype=torch.int32))
    EngramPrefetch(server.layers).start(3)
    server.requests.computed["a"] = 3
    for found, wanted in zip(seen, server.wanted({"a": 3})):
        np.testing.assert_array_equal(found.view(torch.int16).numpy().view(np.uint16), wanted)
    with server.cuda.capture():
        EngramPrefetch(server.layers).start(3)               # nothing is delivered into a capture


def test_sequence_parallel_layers_get_their_own_chunk(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    FakeCuda(monkeypatch)
    for rank in range(3):
        module = engram_module(world=3, rank=rank)
        plugin.patch_engram(module)
        layer = module.Engram(Layout(engram.geometry), 0, use_sequence_parallel=True)
        layer.staged_rows[:7] = torch.arange(1, 8)[:, None, None].to(torch.bfloat16)
        chunk = layer.embed(torch.zeros(7, engram.geometry.columns, dtype=torch.int32))
        assert chunk[:, 0, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 0]][rank]


def test_a_read_error_ends_the_step_and_the_next_one_is_served(engram, monkeypatch):
    import errno

    from made_stores import clear_faults, quiet, set_fault

    server = Server(engram, monkeypatch)
    server.requests.add("a", range(1, 40))
    set_fault(server.stager.store, -errno.EIO)
    with pytest.raises(ssdgram.ReadError):
        server.step({"a": 4}, mode=MODES.FULL)
    assert not server.stager.active
    clear_faults(server.stager.store)
    assert quiet(server.stager.store)                        # no read of the failed step is under way that this one could join
    server.check({"a": 4}, mode=MODES.FULL)
    server.stager.close()


def test_two_ranks_that_attach_to_a_server_read_once(engram, monkeypatch, tmp_path):
    from served_stores import serving

    tokens = engram.tokens(60).tolist()
    with serving(engram, tmp_path, check=False) as service:
        ranks = [Server(engram, monkeypatch, store=service.path) for _ in range(2)]
        try:
            for rank in ranks:
                rank.requests.add("a", tokens)
            reads = 0
            for count, mode in ((9, MODES.NONE), (1, MODES.FULL), (20, MODES.FULL), (1, MODES.NONE)):
                for number, rank in enumerate(ranks):
                    rank.check({"a": count}, mode=mode)
                    if number == 0:
                        reads = service.store.stats().reads
                assert service.store.stats().reads == reads   # the second rank found all of it
        finally:
            for rank in ranks:
                rank.stager.close()


def test_a_server_that_takes_less_than_a_step_is_refused(engram, monkeypatch, tmp_path):
    from served_stores import serving

    with serving(engram, tmp_path, check=False, positions=32) as service, \
            pytest.raises(ssdgram.ConfigError, match="--batch-tokens 64"):
        Server(engram, monkeypatch, store=service.path)


# ---------------------------------------------------------------- ranks that share no memory


def mixed_steps(server, seed=5):
    """Steps of prefill and decode in every mode: what the layers would read, and what they should, of each."""
    generator, found = np.random.default_rng(seed), []
    server.capture_piecewise(16)
    for name in "abc":
        server.requests.add(name, drawn(server, generator, 60))
    for number in range(18):
        chosen = [name for name in "abc" if server.requests.computed[name] < 50 and generator.random() < 0.8] or ["c"]
        scheduled = {name: int(generator.integers(1, 4)) for name in chosen}
        rows = server.step(scheduled, mode=list(MODES)[number % 3], padded=number % 2)
        found.append((rows, server.wanted(scheduled)))
    return found


@pytest.mark.parametrize("world", [2, 3, 6])
def test_ranks_that_hold_columns_give_them_to_vllms_gather(engram, monkeypatch, world):
    """Each rank by itself goes through the same steps. Side by side their rows are those of one store, and their gathers agree."""
    monkeypatch.setenv("SSDGRAM_SPLIT", "columns")
    agreeing(monkeypatch)
    runs, groups, share = [], [Group(rank, world) for rank in range(world)], engram.geometry.columns // world
    for group in groups:
        server = Server(engram, monkeypatch, group=group)
        assert list(server.stager.store.columns) == list(range(group.rank_in_group * share, (group.rank_in_group + 1) * share))
        assert all(layer.staged_rows.shape[1:] == (share, engram.geometry.row_dim) for layer in server.layers)
        runs.append(mixed_steps(server))
        assert server.stager.counts.graph_steps == 6 and server.stager.store.stats().reads > 0
        server.stager.close()
    for steps in zip(*runs):
        for layer, wanted in enumerate(steps[0][1]):
            rows = torch.cat([rows[layer] for rows, _ in steps], dim=1)
            np.testing.assert_array_equal(rows.view(torch.int16).numpy().view(np.uint16), wanted)
    assert groups[0].shapes and all(group.shapes == groups[0].shapes for group in groups)


def test_ranks_that_do_not_serve_the_same_do_not_serve(engram, monkeypatch):
    agreeing(monkeypatch, others="SSDGRAM_SPLIT=columns, generation 00000000000000ff")
    with pytest.raises(ssdgram.ConfigError, match=r"rank 0 on here: SSDGRAM_SPLIT=none, .*; rank 1 on there: SSDGRAM_SPLIT=columns"):
        Server(engram, monkeypatch, group=Group(0, 2))


def test_ranks_with_all_rows_each_gather_nothing(engram, monkeypatch):
    agreeing(monkeypatch)
    group = Group(1, 2)
    server = Server(engram, monkeypatch, group=group)
    server.requests.add("a", engram.tokens(9).tolist())
    server.check({"a": 9})
    assert group.given == []
    server.stager.close()


@pytest.mark.parametrize(("split", "world", "message"), [
    ("columns", 5, "12 columns cannot be divided evenly among 5 ranks"),
    ("owner", 2, "SSDGRAM_SPLIT=owner: vLLM gathers whole columns.*set SSDGRAM_SPLIT=columns"),
])
def test_splits_that_vllm_cannot_put_together_are_refused_as_the_model_is_built(engram, monkeypatch, split, world, message):
    monkeypatch.setenv("SSDGRAM_SPLIT", split)
    with pytest.raises(ssdgram.ConfigError, match=message):
        Server(engram, monkeypatch, group=Group(0, world))


def test_a_server_is_not_split(engram, monkeypatch, tmp_path):
    from served_stores import serving

    monkeypatch.setenv("SSDGRAM_SPLIT", "columns")
    with serving(engram, tmp_path, check=False) as service, pytest.raises(ssdgram.ConfigError, match="nothing to split: unset"):
        Server(engram, monkeypatch, store=service.path, group=Group(0, 2))


def test_a_node_without_the_store_says_which_it_is(engram, monkeypatch, tmp_path):
    import socket

    with pytest.raises(ssdgram.ManifestError, match=f"SSDGRAM_STORE on {socket.gethostname()}: .*Every node needs"):
        Server(engram, monkeypatch, store=tmp_path / "elsewhere", group=Group(1, 2))


# ---------------------------------------------------------------- refusals


def made(engram, monkeypatch, **changes):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    FakeCuda(monkeypatch)
    module = engram_module()
    module.config = config(**changes)
    plugin.patch_engram(module)
    return module


@pytest.mark.parametrize(("changes", "message"), [
    ({"use_v2_model_runner": False}, "V1 model runner is not served"),
    ({"pcp": 2}, "prefill context parallelism"),
    ({"load_format": "fastsafetensors"}, "fastsafetensors loader reads whole files.*ssdgram slim"),
    ({"load_format": "runai_streamer"}, "runai_streamer loader reads whole files"),
    ({"strategy": "eager"}, "safetensors_load_strategy=eager"),
    ({"strategy": "prefetch"}, "safetensors_load_strategy=prefetch"),
    ({"extra": {"enable_multithread_load": True}}, "multi-threaded loader"),
])
def test_what_is_not_served_is_refused_with_advice(engram, monkeypatch, changes, message):
    module = made(engram, monkeypatch, **changes)
    with pytest.raises(ssdgram.ConfigError, match=message):
        module.Engram(Layout(engram.geometry), 0)


@pytest.mark.parametrize("changes", [{"load_format": "dummy"}, {"load_format": "safetensors"}, {"strategy": "lazy"}])
def test_loaders_that_map_files_are_served(engram, monkeypatch, changes):
    assert made(engram, monkeypatch, **changes).Engram(Layout(engram.geometry), 0).embed_tokens.weight.numel() == 0


def test_rocm_is_refused(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    with pytest.raises(SystemExit, match="ROCm"):
        plugin.patch_engram(engram_module(rocm=True))


def test_a_store_of_another_model_is_refused(engram, wide, monkeypatch):
    module = made(engram, monkeypatch)
    with pytest.raises(ssdgram.IdentityError, match="primes are not the model's"):
        module.Engram(Layout(wide.geometry), 0)


def test_another_tokenizer_is_refused(engram, monkeypatch):
    module = made(engram, monkeypatch)
    states = state_module()
    plugin.patch_state(states)
    layer = module.Engram(Layout(engram.geometry), 0)
    token_map = np.array(engram.token_map)
    token_map[3] += 1
    model = torch.nn.ModuleList([layer, NgramHashState(Layout(engram.geometry), engram.geometry.multiplier_array, token_map)])
    monkeypatch.setenv("SSDGRAM_DRAM", "8MiB")
    with pytest.raises(ssdgram.IdentityError, match="token map"):
        states.DeepseekV41ModelState(module.config, model, None, torch.device("cpu"))


def test_a_budget_that_a_full_step_could_exceed_is_refused_at_the_start(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    monkeypatch.setenv("SSDGRAM_DRAM", "4MiB")
    FakeCuda(monkeypatch)
    module, states = engram_module(), state_module()
    module.config = config(max_tokens=4096)
    plugin.patch_engram(module)
    plugin.patch_state(states)
    layout = Layout(engram.geometry)
    model = torch.nn.ModuleList([module.Engram(layout, 0), NgramHashState(layout, engram.geometry.multiplier_array, engram.token_map)])
    with pytest.raises(ssdgram.ConfigError, match="raise SSDGRAM_DRAM by"):
        states.DeepseekV41ModelState(module.config, model, None, torch.device("cpu"))


def test_a_rank_without_engram_layers_opens_nothing(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    states = state_module()
    plugin.patch_state(states)
    state = states.DeepseekV41ModelState(config(), torch.nn.ModuleList(), None, torch.device("cpu"))
    assert not hasattr(state, "_ssdgram_stager")
    state.add_request(0, types.SimpleNamespace(req_id="a", prefill_token_ids=[1], num_computed_tokens=0))
    state.remove_request("a")
    state.prepare_dummy_inputs(1, 1)
    assert state.calls == ["add_request", "remove_request"]


def test_prompts_are_fetched_early_and_their_steps_find_them(server):
    prompt = list(range(1, 120))
    slot = server.requests.add("a", prompt)
    server.requests.add("b", [1, 2, 3])
    server.state.add_request(slot, types.SimpleNamespace(req_id="a", prefill_token_ids=prompt, num_computed_tokens=0))
    server.check({"b": 1})
    early = server.state._ssdgram_early
    assert early.tokens == len(prompt) and len(early) == 0
    from made_stores import until

    assert until(lambda: all(flight.done for flights in early._flights.values() for flight in flights))
    misses = sum(server.stager.store.stats().misses.values())
    server.check({"a": 40})
    assert sum(server.stager.store.stats().misses.values()) == misses
    server.state.remove_request("a")
