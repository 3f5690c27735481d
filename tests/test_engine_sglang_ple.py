"""The SGLang plug-in's PLE part on stand-ins of SGLang's classes, CPU only: prefill, decode, graphs, verify, EOS, refusals."""

import sys
import types

import numpy as np
import pytest
import sglang_ple_stubs
import sglang_stubs
import torch
from checkpoints import small_ple
from fake_cuda import FakeCuda
from made_stores import Made
from rank_groups import added, agreeing
from sglang_stubs import ForwardMode

import ssdgram
from ssdgram.engines.sglang import ple, plugin


@pytest.fixture(scope="module", params=["bf16", "fp8_global"])
def made(tmp_path_factory, request):
    """Two PLE layers, the first of which has no layer in front, of each encoding that is served."""
    folder = tmp_path_factory.mktemp(f"ple-{request.param}")
    ssdgram.convert(small_ple(folder / "checkpoint", vocab_size=700, encoding=request.param, seed=5, layers=(0, 3)), folder / "store")
    return Made(folder / "store", 5)


class Server:
    """A model with its PLE layers, a decode graph runner, and the requests that it serves."""

    def __init__(self, made, monkeypatch, store=None, fp8=None, spoil=lambda part: None, world=1, rank=0):
        self.made, geometry = made, made.geometry
        monkeypatch.setenv("SSDGRAM_STORE", str(store or made.out))
        monkeypatch.setenv("SSDGRAM_DRAM", "8MiB")
        self.engram = sglang_stubs.install(monkeypatch, world=world, rank=rank)
        self.cuda = FakeCuda(monkeypatch)
        plugin.register()
        self.pool = sglang_ple_stubs.Pool(geometry.max_ngram - 1, geometry.eos_token_id)
        self.module = sglang_ple_stubs.module_of(self.pool, geometry, geometry.encoding != "bf16" if fp8 is None else fp8, world)
        ple.patch(self.module)
        config = types.SimpleNamespace(ple_offload_embedding=False)
        self.layers = [self.module.Qwen4ExpPLELayer(config, layer_id=layer) for layer in geometry.layers]
        for layer, part in zip(geometry.layers, self.layers):
            if geometry.encoding != "bf16":
                part.ple_embedding.ngram_embedding.weight_scale.copy_(torch.tensor([made.scale_of(layer)]))
            spoil(part.ple_embedding)
        self.model_runner = sys.modules[plugin.RUNNER].ModelRunner(torch.nn.ModuleList(self.layers), self.pool)
        self.model_runner.init_ngram_embedding_manager()
        (self.backend,) = plugin._backend
        self.runner = sys.modules[plugin.GRAPHS].DecodeCudaGraphRunner(self.layers)
        self.tokens, self.done = {}, {}

    def add(self, name, tokens):
        self.tokens[name], self.done[name] = list(tokens), 0

    def slot(self, name):
        return sorted(self.tokens).index(name)

    def batch(self, scheduled, mode, block=1, padded=0):
        ids, lengths, geometry = [], [], self.made.geometry
        for name, count in scheduled.items():
            first = self.done[name]
            before = self.tokens[name][max(0, first - (geometry.max_ngram - 1)):first]
            before = [geometry.eos_token_id] * (geometry.max_ngram - 1 - len(before)) + before
            self.pool.context[self.slot(name) + 1] = torch.tensor(before)
            ids += self.tokens[name][first:first + count]
            lengths.append(count)
        return types.SimpleNamespace(
            forward_mode=mode, input_ids=torch.tensor(ids + [0] * padded), spec_info=types.SimpleNamespace(draft_token_num=block),
            req_pool_indices=torch.tensor([self.slot(name) for name in scheduled]),
            positions=torch.zeros(len(ids) + padded, dtype=torch.int64),
            extend_seq_lens_cpu=lengths if mode == ForwardMode.EXTEND else None)

    def forward(self, batch):
        geometry = self.made.geometry
        prepared = self.module._prepare_ple_batch(batch.input_ids, batch, ngram_size=geometry.max_ngram,
                                                  ngram_eos_token_id=geometry.eos_token_id)
        for layer in self.layers[1:]:
            layer.start_prefetch(prepared, batch)
        count = batch.input_ids.shape[0] if prepared is None else prepared.processed_tokens
        return [layer(count) for layer in self.layers]

    def graph_rows(self, count):
        """What a replayed graph reads: its own copy of the staged rows, scaled."""
        tables = [layer.ple_embedding.ngram_embedding for layer in self.layers]
        return [table.graph_rows[:count].flatten(-2) * table.weight_scale for table in tables]

    def step(self, scheduled, mode=ForwardMode.EXTEND, graph=False, block=1, padded=0):
        batch = self.batch(scheduled, mode, block, padded)
        if graph:
            self.runner.captured_req_width = block
            self.runner.layers = []
            self.runner.execute(batch)
            rows = self.graph_rows(sum(scheduled.values()))
        else:
            rows = self.forward(batch)
        for name, count in scheduled.items():
            self.done[name] += count
        self.compare(rows, scheduled)

    def compare(self, rows, scheduled):
        for layer, found in zip(self.made.geometry.layers, rows):
            parts = []
            for name, count in scheduled.items():
                stop = self.done[name]
                parts.append(self.made.values(layer, np.array(self.tokens[name][:stop], np.int64))[stop - count:])
            wanted = np.concatenate(parts)
            np.testing.assert_array_equal(found.view(torch.int16).numpy().view(np.uint16).reshape(-1, *wanted.shape[1:]), wanted)

    def capture(self, count, mode=ForwardMode.DECODE, block=1):
        """As a decode graph is captured: eagerly, then under capture, with made-up tokens."""
        sys.modules[plugin.CAPTURE].is_capture_mode = True
        batch = types.SimpleNamespace(forward_mode=mode, input_ids=torch.zeros(count, dtype=torch.int64), extend_seq_lens_cpu=None,
                                      req_pool_indices=torch.zeros(count // block, dtype=torch.int64),
                                      spec_info=types.SimpleNamespace(draft_token_num=block))
        rows = self.forward(batch)
        with self.cuda.capture():
            self.forward(batch)
        sys.modules[plugin.CAPTURE].is_capture_mode = False
        return rows


@pytest.fixture
def server(made, monkeypatch):
    server = Server(made, monkeypatch)
    yield server
    server.backend.stager.close()
    plugin._backend.clear()


@pytest.fixture(autouse=True)
def closed():
    """Stores of servers that could not be built are closed by who refused them."""
    yield
    plugin._backend.clear()


def drawn(server, generator, count):
    """Tokens among which the segments end often."""
    tokens = generator.integers(0, server.made.vocabulary, count)
    tokens[generator.random(count) < 0.15] = server.made.geometry.eos_token_id
    return tokens.tolist()


def test_tables_are_empty_and_no_row_is_copied_from_a_file(server):
    for layer in server.layers:
        table = layer.ple_embedding.ngram_embedding
        assert table.weight.shape == (0, server.made.geometry.row_dim) and table.weight.device.type == "cpu"
        assert table.tp_size == 1 and table.shard_indices.org_vocab_start_index == table.shard_indices.org_vocab_end_index
        assert table.layer_id == layer.layer_id and isinstance(table, server.module.Qwen4ExpPinnedHostEmbedding)


def test_prefill_and_decode_give_a_fresh_runs_rows(server):
    generator = np.random.default_rng(4)
    for name in "abc":
        server.add(name, drawn(server, generator, 60))
    server.capture(8)
    for number in range(24):
        names = [name for name in "abc" if generator.random() < 0.7 and server.done[name] < 40] or ["c"]
        if number % 2:
            server.step({name: int(generator.integers(1, 5)) for name in names}, padded=number % 3)
        else:
            server.step(dict.fromkeys(names, 1), ForwardMode.DECODE, graph=number % 4 == 0)
    assert server.backend.stager.counts.graph_steps > 0


class OneOfSeveral(Server):
    """A rank that owns bundles: its steps' rows are kept, to be added up with those of the others."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.kept = []

    def compare(self, rows, scheduled):
        self.kept.append((rows, dict(scheduled), dict(self.done)))


def test_ranks_that_own_bundles_give_them_to_sglangs_sum(made, monkeypatch):
    monkeypatch.setenv("SSDGRAM_SPLIT", "owner")
    agreeing(monkeypatch)
    ranks = []
    for rank in range(2):
        server = OneOfSeveral(made, monkeypatch, world=2, rank=rank)
        generator = np.random.default_rng(4)
        for name in "abc":
            server.add(name, drawn(server, generator, 60))
        server.capture(8)
        for number in range(16):
            names = [name for name in "abc" if generator.random() < 0.7 and server.done[name] < 40] or ["c"]
            before = len(server.engram.added)
            if number % 2:
                server.step({name: int(generator.integers(1, 5)) for name in names}, padded=number % 3)
            else:
                server.step(dict.fromkeys(names, 1), ForwardMode.DECODE, graph=number % 4 == 0)
            assert len(server.engram.added) - before == (0 if number % 4 == 0 else len(server.layers))     # a replay has its own
        server.backend.stager.close()
        plugin._backend.clear()
        ranks.append(server)
    for kept in zip(*(server.kept for server in ranks)):
        _, scheduled, server.done = kept[0]
        Server.compare(server, [added(parts) for parts in zip(*(rows for rows, _, _ in kept))], scheduled)
    shapes = [[tuple(part.shape) for part in server.engram.added] for server in ranks]
    assert shapes[0] == shapes[1]


def test_columns_are_refused_where_rows_are_added_up(made, monkeypatch):
    monkeypatch.setenv("SSDGRAM_SPLIT", "columns")
    with pytest.raises(ssdgram.ConfigError, match=r"SGLang adds up the rows of a PLE table.*set SSDGRAM_SPLIT=owner"):
        Server(made, monkeypatch, world=2)


def test_verification_looks_up_every_draft_and_a_rejected_one_leaves_nothing(server):
    server.add("a", server.made.tokens(30, 1).tolist())
    server.add("b", server.made.tokens(30, 2).tolist())
    server.step({"a": 4, "b": 1})
    server.capture(8, ForwardMode.TARGET_VERIFY, block=4)
    server.step({"a": 4, "b": 4}, ForwardMode.TARGET_VERIFY, graph=True, block=4)
    server.done.update(a=6, b=2)                             # two and one of them were accepted
    server.tokens["a"][6:] = server.made.tokens(20, 3).tolist()
    server.step({"a": 4, "b": 4}, ForwardMode.TARGET_VERIFY, block=4)
    assert server.backend.stager.counts.drafts == 12


def test_captures_and_idle_batches_read_nothing_and_get_zeros(server):
    before = server.backend.store.stats()
    assert not any(rows.any() for rows in server.capture(6))
    server.add("a", [3, 4, 5])
    idle = server.batch({"a": 2}, ForwardMode.IDLE)
    assert not any(rows.any() for rows in server.forward(idle))
    after = server.backend.store.stats()
    assert (after.reads, after.hits, after.misses) == (before.reads, before.hits, before.misses)
    assert server.backend.stager.counts.steps == 0


def test_a_captured_buffer_stays_where_it_is(server):
    server.capture(4)
    tables = [layer.ple_embedding.ngram_embedding for layer in server.layers]
    places = [table.graph_rows.data_ptr() for table in tables]
    server.capture(2)
    for name in "abcdef":
        server.add(name, [5, 6, 7, 8])
    server.step(dict.fromkeys("abcdef", 1), ForwardMode.DECODE)
    assert [table.graph_rows.data_ptr() for table in tables] == places
    server.step(dict.fromkeys("abcd", 1), ForwardMode.DECODE, graph=True)


def test_graphs_that_cannot_be_served_are_refused(server):
    server.add("a", [5, 6, 7, 8])
    with server.cuda.capture(), pytest.raises(RuntimeError, match="cuda-graph-backend-prefill"):
        server.forward(server.batch({"a": 2}, ForwardMode.EXTEND))
    with server.cuda.capture(), pytest.raises(RuntimeError, match="captured before any eager step"):
        server.forward(server.batch({"a": 1}, ForwardMode.DECODE))
    server.capture(1)
    server.runner.ragged_verify_mode = True
    with pytest.raises(RuntimeError, match="ragged verification"):
        server.step({"a": 1}, ForwardMode.DECODE, graph=True)


def test_prefills_at_capture_do_not_size_the_decode_buffer(server):
    sys.modules[plugin.CAPTURE].is_capture_mode = True
    server.add("a", [5, 6, 7, 8])
    server.forward(server.batch({"a": 4}, ForwardMode.EXTEND))
    sys.modules[plugin.CAPTURE].is_capture_mode = False
    assert all(layer.ple_embedding.ngram_embedding.graph_rows is None for layer in server.layers)


def test_rows_that_are_late_are_written_where_they_are_used(server, monkeypatch):
    monkeypatch.setattr(server.backend.stager, "ready", lambda layer: False)
    server.add("a", server.made.tokens(20, 6).tolist())
    server.step({"a": 9})
    assert not any(layer.ple_embedding.ngram_embedding.late for layer in server.layers)


def test_prompts_are_fetched_early(server):
    prompt = server.made.tokens(40, 2).tolist()
    sys.modules[plugin.SCHEDULER].Scheduler()._add_request_to_queue(types.SimpleNamespace(rid="a", origin_input_ids=prompt, output_ids=[]))
    assert server.backend.early.tokens == len(prompt)
    server.add("a", prompt)
    server.step({"a": 20})


def test_activation_changes_the_models_module_when_it_is_imported(made, monkeypatch):
    from ssdgram.engines import seams, sglang
    from ssdgram.engines.watch import forget

    monkeypatch.setenv("SSDGRAM_STORE", str(made.out))
    sglang_stubs.install(monkeypatch)
    monkeypatch.setattr(seams, "fault", lambda engine, found: None)
    monkeypatch.setattr(sglang, "_active", [])
    module = sglang_ple_stubs.module_of(None, made.geometry)
    own = module.Qwen4ExpPinnedHostEmbedding
    try:
        sglang.activate()
        assert module.Qwen4ExpPinnedHostEmbedding is own
        monkeypatch.setitem(sys.modules, sglang.PLE, module)
        monkeypatch.setattr(sglang, "_active", [])
        sglang.activate()                                    # the module is there: at once
        assert module.Qwen4ExpPinnedHostEmbedding is not own and issubclass(module.Qwen4ExpPinnedHostEmbedding, own)
        monkeypatch.delattr(module, "_prepare_ple_batch")
        with pytest.raises(SystemExit, match="cannot be active: AttributeError"):
            sglang._patch_ple(module)
    finally:
        forget([sglang.PLE])


# ---------------------------------------------------------------- refusals


def test_other_encodings_stores_and_layouts_are_refused(made, engram, monkeypatch):
    with pytest.raises(ssdgram.IdentityError, match="convert the checkpoint that is served"):
        Server(made, monkeypatch, fp8=made.geometry.encoding == "bf16")
    with pytest.raises(ssdgram.IdentityError, match="the store holds engram tables, the model wants ple"):
        Server(made, monkeypatch, store=engram.out)
    build = sglang_ple_stubs.module_of

    def over_ranks(*arguments):
        module = build(*arguments)
        module.gather_dp_tokens = True
        return module

    monkeypatch.setattr(sglang_ple_stubs, "module_of", over_ranks)
    with pytest.raises(ssdgram.ConfigError, match="SGLANG_USE_ATTN_TP_NGRAM=1"):
        Server(made, monkeypatch)


@pytest.mark.parametrize(("buffer", "message"), [
    ("layer_multipliers", "multipliers are not the model's"),
    ("ngram_heads_vocab_sizes", "primes are not the model's"),
    ("weight_scale", "has scale"),
])
def test_a_checkpoint_with_other_constants_is_refused_when_its_weights_are_loaded(made, monkeypatch, buffer, message):
    if buffer == "weight_scale" and made.geometry.encoding == "bf16":
        return                                               # such tables have none

    def spoil(part):
        getattr(part.ngram_embedding if buffer == "weight_scale" else part, buffer)[0] += 1

    with pytest.raises(ssdgram.IdentityError, match=message):
        Server(made, monkeypatch, spoil=spoil)


def test_context_parallelism_is_refused(made, monkeypatch):
    def spoil(part):
        sys.modules[plugin.ENGRAM].parallel.attn_cp_size = 2

    with pytest.raises(ssdgram.ConfigError, match="context parallelism"):
        Server(made, monkeypatch, spoil=spoil)


def test_a_model_without_ple_layers_opens_nothing(made, monkeypatch):
    monkeypatch.setenv("SSDGRAM_STORE", str(made.out))
    sglang_stubs.install(monkeypatch)
    plugin.register()
    sys.modules[plugin.RUNNER].ModelRunner(torch.nn.Linear(1, 1), None).init_ngram_embedding_manager()
    assert plugin._backend == []
