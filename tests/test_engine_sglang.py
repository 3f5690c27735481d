"""The SGLang plug-in on stand-ins of SGLang's classes, CPU only: staged prefill, eager decode, graphs, verify, refusals, loudness."""

import sys
import types

import numpy as np
import pytest
import sglang_stubs
import torch
from fake_cuda import FakeCuda
from rank_groups import added, agreeing
from sglang_stubs import ForwardMode

import ssdgram
from ssdgram.engines.sglang import plugin
from ssdgram.kernels.dequant import value_table

IMAGE = 11


def values(made, layer, tokens, **context):
    """bf16 bits of the rows that a fresh run of `tokens` reads, by SGLang's rule for scale bytes."""
    packed, geometry = made.expected(layer, tokens, **context), made.geometry
    codes, scales = packed[..., :geometry.row_dim], packed[..., geometry.row_dim:]
    table = value_table("fp8_ue8m0", scale_rule="sglang")
    return table[np.repeat(scales, 32, axis=-1)[..., :geometry.row_dim].astype(np.int64) * 256 + codes]


class Server:
    """A model with its Engram layers, the scheduler's stager, a decode graph runner, and the requests that it serves."""

    def __init__(self, made, monkeypatch, image=IMAGE, world=1, rank=0):
        monkeypatch.setenv("SSDGRAM_STORE", str(made.out))
        monkeypatch.setenv("SSDGRAM_DRAM", "8MiB")
        self.made, self.image = made, image
        self.engram = sglang_stubs.install(monkeypatch, world=world, rank=rank)
        self.cuda = FakeCuda(monkeypatch)
        plugin.register()
        self.layers = [self.engram.Engram(made.geometry, layer) for layer in made.geometry.layers]
        self.hasher = self.engram.EngramHasher(made.geometry, made.token_map, image)
        self.model = nn_list([*self.layers, self.hasher])
        self.backend = sys.modules[plugin.STAGING].EngramRowStager.from_model(self.model, self.hasher, torch.device("cpu"))
        self.runner = sys.modules[plugin.GRAPHS].DecodeCudaGraphRunner(self.layers)
        self.scheduler = sys.modules[plugin.SCHEDULER].Scheduler()
        self.tokens, self.done = {}, {}

    def add(self, name, tokens):
        self.tokens[name], self.done[name] = list(tokens), 0

    def slot(self, name):
        return sorted(self.tokens).index(name)

    def history(self, name, stop):
        before = self.tokens[name][max(0, stop - 3):stop]
        return [0] * (3 - len(before)) + [min(token, 1_000_000) for token in before]

    def check(self, rows, scheduled):
        for layer, found in zip(self.made.geometry.layers, rows):
            parts = []
            for name, count in scheduled.items():
                stop = self.done[name]
                tokens = np.array(self.tokens[name][:stop], np.int64)
                part = (tokens != self.image) & (tokens < 1_000_000)
                parts.append(values(self.made, layer, tokens, participates=part)[stop - count:])
            wanted = np.concatenate(parts)
            found = found.view(torch.int16).numpy().view(np.uint16)
            np.testing.assert_array_equal(found[:len(wanted)], wanted)
            assert not found[len(wanted):].any()

    def forward(self, batch, padded=0):
        ids = self.hasher(batch.input_ids, batch)
        if padded:
            ids = torch.cat([ids, ids.new_zeros(padded, *ids.shape[1:])])
        return [layer.embed_rows(ids[:, layer.layer_hash_index], batch) for layer in self.layers]

    def device_batch(self, scheduled, mode, block=1):
        ids, positions, lengths = [], [], []
        for name, count in scheduled.items():
            first = self.done[name]
            self.hasher.history[self.slot(name)] = torch.tensor(self.history(name, first))
            ids += self.tokens[name][first:first + count]
            positions += range(first, first + count)
            lengths.append(count)
        starts = np.cumsum([0, *lengths])[:-1]
        return types.SimpleNamespace(
            forward_mode=mode, input_ids=torch.tensor(ids), positions=torch.tensor(positions), engram_staged_rows=None, engram_history=None,
            req_pool_indices=torch.tensor([self.slot(name) for name in scheduled]), spec_info=types.SimpleNamespace(draft_token_num=block),
            extend_seq_lens_cpu=lengths, extend_start_loc=torch.tensor(starts, dtype=torch.int32))

    def prefill(self, scheduled, padded=0, history_rows=False, on_host=True):
        reqs = [types.SimpleNamespace(rid=name, full_untruncated_fill_ids=self.tokens[name][:None if on_host else self.done[name]])
                for name in scheduled]
        staged = self.backend.stage(types.SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, reqs=reqs, prefix_lens=[self.done[name] for name in scheduled],
            extend_lens=list(scheduled.values()), encoder_swa_reset=None))
        assert (staged is not None) == on_host
        batch = self.device_batch(scheduled, ForwardMode.EXTEND)
        batch.engram_staged_rows = staged
        if history_rows:
            batch.engram_history = torch.tensor([self.history(name, self.done[name]) for name in scheduled], dtype=torch.int32)
            self.hasher.history.zero_()
        rows = self.forward(batch, padded)
        self.finish(scheduled)
        self.check(rows, scheduled)

    def finish(self, scheduled):
        for name, count in scheduled.items():
            self.done[name] += count

    def decode(self, names, graph=False, block=1):
        scheduled = dict.fromkeys(names, block)
        mode = ForwardMode.DECODE if block == 1 else ForwardMode.TARGET_VERIFY
        batch = self.device_batch(scheduled, mode, block)
        rows = self.runner.execute(batch) if graph else self.forward(batch)
        self.finish(scheduled)
        self.check(rows, scheduled)

    def capture(self, count, mode=ForwardMode.DECODE, block=1):
        """As a decode graph is captured: twice eagerly, then under capture, with made-up tokens."""
        sys.modules[plugin.CAPTURE].is_capture_mode = True
        batch = types.SimpleNamespace(forward_mode=mode, input_ids=torch.zeros(count, dtype=torch.int64), engram_staged_rows=None,
                                      req_pool_indices=torch.full((count // block,), 8), positions=torch.zeros(count, dtype=torch.int64),
                                      spec_info=types.SimpleNamespace(draft_token_num=block), engram_history=None)
        self.forward(batch)
        with self.cuda.capture():
            rows = self.forward(batch)
        sys.modules[plugin.CAPTURE].is_capture_mode = False
        return rows


def nn_list(parts):
    return torch.nn.ModuleList(parts)


@pytest.fixture
def server(engram, monkeypatch):
    server = Server(engram, monkeypatch)
    yield server
    server.backend.stager.close()
    plugin._backend.clear()


def drawn(server, generator, count):
    return generator.integers(12, server.made.vocabulary, count).tolist()


def test_tables_are_empty_and_nothing_is_loaded(server):
    for layer in server.layers:
        embed = layer.embed
        assert embed.weight.shape == (0, server.made.geometry.row_dim) and embed.scale.dtype == torch.float8_e8m0fnu
        assert embed.host_table is embed.peer is None and embed.staged_by_scheduler and embed.tp_size == 1
        embed.weight.weight_loader(embed.weight, object())
        embed.scale.weight_loader(embed.scale, object())
        embed.finish_load("layer")


@pytest.mark.parametrize("on_host", [True, False])
def test_prefill_and_decode_give_a_fresh_runs_rows(server, on_host):
    generator = np.random.default_rng(4)
    for name in "abc":
        server.add(name, drawn(server, generator, 50))
    server.capture(8)
    for number in range(20):
        names = [name for name in "abc" if generator.random() < 0.7 and server.done[name] < 40] or ["c"]
        if number % 2:
            server.prefill({name: int(generator.integers(1, 5)) for name in names}, padded=number % 3, on_host=on_host,
                           history_rows=number % 4 == 1)
        else:
            server.decode(names, graph=number % 4 == 0)
    assert server.backend.stager.counts.graph_steps > 0


def test_image_spans_and_multimodal_pads_take_no_part(server):
    tokens = [20, 21, IMAGE, IMAGE, 2_000_000_123, 22, 23, 24, 25, 26, 27, 28]
    server.add("a", tokens)
    for count in (3, 2, 1):
        server.prefill({"a": count})
    server.prefill({"a": 2}, on_host=False)
    server.decode("a")
    server.capture(1)
    server.decode("a", graph=True)


def test_verification_looks_up_every_draft_and_a_rejected_one_leaves_nothing(server):
    server.add("a", range(30, 50))
    server.add("b", range(60, 80))
    server.prefill({"a": 4, "b": 1})
    server.capture(8, ForwardMode.TARGET_VERIFY, block=4)
    server.runner.captured_req_width = 4
    server.decode("ab", graph=True, block=4)
    server.done.update(a=6, b=2)                             # two and one of them were accepted
    server.tokens["a"][6:] = range(90, 104)
    server.decode("ab", block=4)
    assert server.backend.stager.counts.drafts == 12


def test_captures_and_dummy_batches_read_nothing(server):
    before = server.backend.store.stats()
    rows = server.capture(6)
    assert [part.data_ptr() for part in rows] == [layer.embed.graph_rows.data_ptr() for layer in server.layers]
    idle = types.SimpleNamespace(forward_mode=ForwardMode.IDLE, input_ids=torch.zeros(2, dtype=torch.int64), engram_staged_rows=None,
                                 req_pool_indices=torch.zeros(2, dtype=torch.int64))
    assert all(not part.any() for part in server.forward(idle))
    after = server.backend.store.stats()
    assert (after.reads, after.hits, after.misses) == (before.reads, before.hits, before.misses)


def test_a_captured_buffer_stays_where_it_is(server):
    server.capture(4)
    places = [layer.embed.graph_rows.data_ptr() for layer in server.layers]
    for name in "abcdef":
        server.add(name, range(20, 30))
    server.decode("abcdef")                                  # eager, and larger than any graph
    assert [layer.embed.graph_rows.data_ptr() for layer in server.layers] == places
    server.decode("abcd", graph=True)


def test_a_graph_around_a_prefills_lookup_is_refused(server):
    batch = types.SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    with server.cuda.capture(), pytest.raises(RuntimeError, match="cuda-graph-backend-prefill"):
        server.layers[0].embed(torch.zeros(2, 12, dtype=torch.int64), batch)


def test_a_graph_larger_than_any_step_before_is_refused(server):
    batch = types.SimpleNamespace(forward_mode=ForwardMode.DECODE)
    with server.cuda.capture(), pytest.raises(RuntimeError, match="captured before any eager step"):
        server.layers[0].embed(torch.zeros(2, 12, dtype=torch.int64), batch)


def test_ragged_verification_is_refused(server):
    server.add("a", range(20, 30))
    server.capture(1)
    server.runner.ragged_verify_mode = True
    with pytest.raises(RuntimeError, match="ragged verification"):
        server.decode("a", graph=True)


def test_the_draft_models_graphs_and_loads_outside_of_a_replay_begin_nothing(server):
    server.add("a", range(20, 30))
    server.capture(1)
    batch = server.device_batch({"a": 1}, ForwardMode.DECODE)
    server.runner.load_batch(batch)
    server.runner.model_runner.is_draft_worker = True
    server.runner.execute(batch)
    assert server.backend.stager.counts.steps == 0


def test_a_batch_that_never_runs_gives_its_slots_back(server):
    server.add("a", range(20, 60))
    store = server.backend.store
    for _ in range(40):
        request = types.SimpleNamespace(rid="a", full_untruncated_fill_ids=server.tokens["a"])
        staged = server.backend.stage(types.SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=[request], prefix_lens=[0],
                                                            extend_lens=[30], encoder_swa_reset=None))
        assert staged is not None
        del staged
    from made_stores import quiet

    assert quiet(store)


def test_replayed_windows_and_other_modes_are_left_to_the_forward(server):
    request = types.SimpleNamespace(rid="a", full_untruncated_fill_ids=[1, 2])
    batch = types.SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=[request], prefix_lens=[0], extend_lens=[2],
                                  encoder_swa_reset=[True])
    assert server.backend.stage(batch) is None
    batch.encoder_swa_reset, batch.forward_mode = None, ForwardMode.DECODE
    assert server.backend.stage(batch) is None
    batch.forward_mode, batch.extend_lens = ForwardMode.EXTEND, [0]
    assert server.backend.stage(batch) is None


def test_prompts_are_fetched_while_they_wait(server):
    from made_stores import until

    server.add("a", drawn(server, np.random.default_rng(3), 60))
    server.scheduler._add_request_to_queue(types.SimpleNamespace(rid="a", origin_input_ids=server.tokens["a"][:50],
                                                                 output_ids=server.tokens["a"][50:]))
    early = server.backend.early
    assert early.tokens == 60 and until(lambda: early._under_way() == 0)
    misses = sum(server.backend.store.stats().misses.values())
    server.prefill({"a": 50})
    assert sum(server.backend.store.stats().misses.values()) == misses


# ---------------------------------------------------------------- ranks that share no memory


class OneOfSeveral(Server):
    """A rank that owns bundles: its steps' rows are kept, each with what it should be once those of all ranks are added up."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.kept = []

    def check(self, rows, scheduled):
        given = self.engram.added[-len(self.layers):]
        if not self.graph:                                   # a replayed graph has captured its sum
            assert [part.data_ptr() for part in rows] == [part.data_ptr() for part in given]         # the sum is what a layer gets
        self.kept.append((rows, dict(scheduled), dict(self.done)))

    def decode(self, names, graph=False, block=1):
        self.graph = graph
        super().decode(names, graph, block)
        self.graph = False

    graph = False


@pytest.mark.parametrize(("world", "on_host"), [(2, True), (2, False), (5, True)])
def test_ranks_that_own_bundles_give_them_to_sglangs_sum(engram, monkeypatch, world, on_host):
    monkeypatch.setenv("SSDGRAM_SPLIT", "owner")
    agreeing(monkeypatch)
    ranks = []
    for rank in range(world):
        server = OneOfSeveral(engram, monkeypatch, world=world, rank=rank)
        assert server.backend.store._owner == (rank, world)
        generator = np.random.default_rng(4)
        for name in "abc":
            server.add(name, drawn(server, generator, 50))
        captured = server.capture(8)
        buffers = [layer.embed.graph_rows.data_ptr() for layer in server.layers]
        assert [part.data_ptr() for part in captured] == [part.data_ptr() for part in server.engram.added[-len(captured):]]
        assert not {part.data_ptr() for part in captured} & set(buffers)     # a sum into the buffer would grow behind a batch's rows
        for number in range(20):
            names = [name for name in "abc" if generator.random() < 0.7 and server.done[name] < 40] or ["c"]
            if number % 2:
                server.prefill({name: int(generator.integers(1, 5)) for name in names}, padded=number % 3, on_host=on_host)
            else:
                server.decode(names, graph=number % 4 == 0)
        assert server.backend.stager.counts.graph_steps > 0
        server.backend.stager.close()
        plugin._backend.clear()
        ranks.append(server)
    for kept in zip(*(server.kept for server in ranks)):
        _, scheduled, server.done = kept[0]
        Server.check(server, [added(parts) for parts in zip(*(rows for rows, _, _ in kept))], scheduled)
    shapes = [[tuple(part.shape) for part in server.engram.added] for server in ranks]
    assert all(other == shapes[0] for other in shapes)       # else a rank would wait for ever


def test_idle_batches_without_tokens_add_nothing_up(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_SPLIT", "owner")
    agreeing(monkeypatch)
    server = OneOfSeveral(engram, monkeypatch, world=2)
    for layer in server.layers:
        layer.embed(torch.zeros(0, 12, dtype=torch.int64), types.SimpleNamespace(forward_mode=ForwardMode.IDLE))
    assert server.engram.added == []
    server.backend.stager.close()
    plugin._backend.clear()


def test_ranks_with_all_rows_each_add_nothing_up(engram, monkeypatch):
    agreeing(monkeypatch)
    server = Server(engram, monkeypatch, world=2, rank=1)
    server.add("a", range(20, 30))
    server.prefill({"a": 4})
    server.decode("a")
    assert server.engram.added == []
    server.backend.stager.close()
    plugin._backend.clear()


def test_ranks_that_do_not_serve_the_same_do_not_serve(engram, monkeypatch):
    agreeing(monkeypatch, others="ManifestError: /store/manifest.json is missing")
    with pytest.raises(ssdgram.ConfigError, match=r"rank 1 on there: ManifestError: /store/manifest\.json is missing"):
        Server(engram, monkeypatch, world=2)


@pytest.mark.parametrize(("split", "data_parallel", "message"), [
    ("columns", 1, "SSDGRAM_SPLIT=columns: SGLang adds up the rows.*set SSDGRAM_SPLIT=owner"),
    ("owner", 2, "data-parallel attention have different tokens"),
])
def test_splits_that_sglang_cannot_put_together_are_refused(engram, monkeypatch, split, data_parallel, message):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    monkeypatch.setenv("SSDGRAM_SPLIT", split)
    module = sglang_stubs.install(monkeypatch, world=2)
    module.parallel.attn_dp_size = data_parallel
    plugin.register()
    with pytest.raises(ssdgram.ConfigError, match=message):
        module.Engram(engram.geometry, 1)


# ---------------------------------------------------------------- refusals


@pytest.fixture
def environment(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    monkeypatch.setenv("SSDGRAM_DRAM", "8MiB")
    FakeCuda(monkeypatch)
    yield sglang_stubs.install(monkeypatch)
    plugin._backend.clear()


def test_a_hook_that_does_not_take_ends_the_start(engram, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(engram.out))
    sglang_stubs.install(monkeypatch, broken=f"{plugin.GRAPHS}.DecodeCudaGraphRunner.load_batch")
    from ssdgram.engines import seams, sglang

    monkeypatch.setattr(seams, "fault", lambda engine, found: None)
    monkeypatch.setattr(sglang, "_active", [])
    with pytest.raises(SystemExit, match=r"hooks that were not applied: \['DecodeCudaGraphRunner.load_batch'\]"):
        sglang.activate()


@pytest.mark.parametrize(("changes", "message"), [
    ({"load_format": "fastsafetensors"}, "fastsafetensors loader reads whole files.*ssdgram slim"),
    ({"weight_loader_disable_mmap": True}, "--weight-loader-disable-mmap reads whole files"),
    ({"weight_loader_prefetch_checkpoints": True}, "--weight-loader-prefetch-checkpoints reads whole files"),
])
def test_loaders_that_read_whole_files_are_refused(engram, environment, changes, message):
    plugin.register()
    for name, value in changes.items():
        setattr(environment.model, name, value)
    with pytest.raises(ssdgram.ConfigError, match=message):
        environment.Engram(engram.geometry, 1)


def test_context_parallelism_and_other_models_stores_are_refused(engram, wide, environment):
    plugin.register()
    with pytest.raises(ssdgram.IdentityError, match="primes are not the model's"):
        environment.Engram(wide.geometry, 1)
    layer = environment.Engram(engram.geometry, 1)
    hasher = environment.EngramHasher(engram.geometry, engram.token_map)
    environment.parallel.attn_cp_size = 2
    with pytest.raises(ssdgram.ConfigError, match="context parallelism"):
        sys.modules[plugin.STAGING].EngramRowStager.from_model(nn_list([layer]), hasher, torch.device("cpu"))


def test_layers_that_were_built_before_the_plug_in_are_refused(engram, environment):
    hasher = environment.EngramHasher(engram.geometry, engram.token_map)
    plugin.register()
    with pytest.raises(ssdgram.ConfigError, match="built before the plug-in"):
        sys.modules[plugin.STAGING].EngramRowStager.from_model(nn_list([torch.nn.Linear(1, 1)]), hasher, torch.device("cpu"))
