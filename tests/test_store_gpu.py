"""The store on a CUDA device: every tier and mix of tiers bit for bit, tickets, tokens from the GPU. Skipped without a GPU."""

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ssdgram  # noqa: E402
from ssdgram import _plan_state as p  # noqa: E402
from ssdgram.tools.synth import expected_rows  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
VOCABULARY = 331


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    tokenizer = __file__.rpartition("/")[0] + "/golden/tiny_tokenizer.json"
    ssdgram.synthesize(folder / "ckpt", vocab_size=3000, layers=(1, 3), seed=5, tokenizer=tokenizer)
    ssdgram.convert(folder / "ckpt", folder / "out")
    return folder / "out"


def vocabulary(store):
    return store._vocabulary


def wanted(store, tokens, layer, **context):
    ids = store.geometry.row_ids(tokens, store._token_map, **context)[:, store.geometry.layers.index(layer)]
    return expected_rows(5, layer, ids, store.geometry)


def drawn(generator, store, count):
    return generator.integers(0, vocabulary(store), count)


@pytest.mark.parametrize("hbm", ["0", "1MiB", "32MiB"])
def test_packed_rows_are_the_checkpoints_bytes_in_every_tier(built, hbm):
    generator = np.random.default_rng(1)
    with ssdgram.open(built, dram="24MiB", hbm=hbm, device="cuda") as store:
        for _ in range(60):
            tokens = drawn(generator, store, int(generator.integers(1, 400)))
            with store.prefetch(tokens) as batch:
                for layer in store.layers:
                    found = batch.packed(layer).cpu().numpy()
                    assert np.array_equal(found, wanted(store, tokens, layer))
        if hbm != "0":
            assert sum(count for (tier, _), count in store.stats().hits.items() if tier == "hbm") > 0


def test_rows_are_the_cpus_rows(built):
    generator = np.random.default_rng(2)
    with ssdgram.open(built, dram="24MiB", hbm="4MiB", device="cuda") as gpu, ssdgram.open(built, dram="24MiB") as cpu:
        for _ in range(20):
            tokens = drawn(generator, gpu, 100)
            with gpu.prefetch(tokens) as a, cpu.prefetch(tokens) as b:
                for layer in gpu.layers:
                    assert torch.equal(a.rows(layer).cpu().view(torch.int16), b.rows(layer).view(torch.int16))


def test_results_go_into_out_and_wrong_outs_are_refused(built):
    with ssdgram.open(built, dram="24MiB", device="cuda") as store, store.prefetch(np.arange(7)) as batch:
        out = torch.empty((7, store.geometry.columns, store.row_bytes), dtype=torch.uint8, device="cuda")
        assert batch.packed(1, out=out) is out
        assert np.array_equal(out.cpu().numpy(), wanted(store, np.arange(7), 1))
        with pytest.raises(ssdgram.ConfigError, match="expected a contiguous"):
            batch.packed(1, out=out.cpu())


def test_tokens_on_the_device_give_the_same_rows(built):
    generator = np.random.default_rng(3)
    with ssdgram.open(built, dram="24MiB", device="cuda") as store:
        for _ in range(20):
            tokens, before = drawn(generator, store, 50), drawn(generator, store, 3)
            sequences = [ssdgram.Sequence(torch.from_numpy(tokens).cuda(), lookback=before), ssdgram.Sequence(tokens)]
            with store.prefetch(sequences) as batch:
                found = batch.packed(3).cpu().numpy()
            assert np.array_equal(found[:50], wanted(store, tokens, 3, lookback=before))
            assert np.array_equal(found[50:], wanted(store, tokens, 3))


def test_a_bad_token_on_the_device_is_reported_at_the_wait(built):
    with ssdgram.open(built, dram="24MiB", device="cuda") as store:
        for bad in (-1, vocabulary(store), 2**40):
            with store.prefetch(torch.tensor([1, 2, bad], device="cuda")) as batch, pytest.raises(ssdgram.TokenError):
                batch.rows(1)
        with store.prefetch(torch.tensor([1, 2, 3], device="cuda")) as batch:
            assert np.array_equal(batch.packed(1).cpu().numpy(), wanted(store, np.array([1, 2, 3]), 1))


def test_slots_are_not_given_back_before_the_gpu_has_read_them(built):
    with ssdgram.open(built, dram="24MiB", device="cuda") as store:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)                   # the gather waits behind this
            batch = store.prefetch(np.arange(64))
            result = batch.packed(1)
            row = batch._row
            batch.release()
        time.sleep(0.05)
        assert store._plan.words[row * store._line + p.W_STAGE] == p.UNWINDING
        stream.synchronize()
        deadline = time.monotonic() + 5
        while store._plan.words[row * store._line + p.W_STAGE] != p.FREE_BATCH and time.monotonic() < deadline:
            time.sleep(0.001)
        assert store._plan.words[row * store._line + p.W_STAGE] == p.FREE_BATCH
        assert np.array_equal(result.cpu().numpy(), wanted(store, np.arange(64), 1))


def test_one_batchs_gathers_on_two_streams_end_in_order(built):
    """The word counts launches: the second one's must not arrive before the first one's."""
    with ssdgram.open(built, dram="24MiB", device="cuda") as store:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        batch = store.prefetch(np.arange(64))
        batch.wait()
        with torch.cuda.stream(first):
            torch.cuda._sleep(400_000_000)
            results = [batch.packed(1)]
        with torch.cuda.stream(second):
            results.append(batch.packed(1))
        row = batch._row
        batch.release()
        time.sleep(0.05)
        assert not first.query() and store._plan.words[row * store._line + p.W_STAGE] == p.UNWINDING
        torch.cuda.synchronize()
        for result in results:
            assert np.array_equal(result.cpu().numpy(), wanted(store, np.arange(64), 1))


def test_a_step_waits_for_no_stream(built):
    """Hazard 6: torch raises at any operation that would synchronise."""
    with ssdgram.open(built, dram="24MiB", hbm="1MiB", device="cuda") as store:
        tokens = torch.arange(50, device="cuda")
        for layer in store.layers:                           # what is made once is made
            with store.prefetch(tokens) as batch:
                batch.rows(layer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                with store.prefetch(tokens) as batch:
                    found = {layer: batch.packed(layer) for layer in store.layers}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for layer, rows in found.items():
            assert np.array_equal(rows.cpu().numpy(), wanted(store, np.arange(50), layer))


def test_ten_million_rows_under_eviction_promotion_and_cancellation_on_two_streams(built):
    generator = np.random.default_rng(4)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    checked, mismatches, waiting = 0, 0, []
    with ssdgram.open(built, dram="16MiB", hbm="2MiB", device="cuda") as store:
        while checked < 10_000_000:
            if generator.random() < 0.2:
                store.prefetch(drawn(generator, store, 200), priority=("step", "background")[int(generator.integers(2))]).release()
            stream = streams[int(generator.integers(2))]
            tokens = np.minimum(generator.geometric(0.02, 900), vocabulary(store)) - 1
            with torch.cuda.stream(stream):
                if generator.random() < 0.3:
                    torch.cuda._sleep(int(generator.integers(1, 2_000_000)))
                with store.prefetch(tokens) as batch:
                    found = {layer: batch.packed(layer) for layer in store.layers}
            waiting.append((stream, tokens, found))
            if len(waiting) >= 6:
                stream, tokens, found = waiting.pop(int(generator.integers(len(waiting))))
                stream.synchronize()
                for layer, rows in found.items():
                    mismatches += int((rows.cpu().numpy() != wanted(store, tokens, layer)).any(axis=2).sum())
                    checked += rows.shape[0] * rows.shape[1]
        stats = store.stats()
    assert mismatches == 0
    assert stats.evictions > 0 and stats.cancelled > 0 and any(count for (tier, _), count in stats.hits.items() if tier == "hbm")


def test_a_captured_graph_gathers_what_each_load_brought(built):
    generator = np.random.default_rng(6)
    with ssdgram.open(built, dram="16MiB", hbm="2MiB", device="cuda") as store:
        frame, graph = store.frame(96), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            found = {layer: frame.packed(layer) for layer in store.layers}
        for step in range(200):
            tokens = drawn(generator, store, int(generator.integers(1, 97)))
            with store.prefetch(tokens) as batch:
                frame.load(batch)
                if step % 7 == 3:
                    frame.discard()
                    continue
                graph.replay()
            torch.cuda.synchronize()
            for layer, rows in found.items():
                assert np.array_equal(rows[:len(tokens)].cpu().numpy(), wanted(store, tokens, layer))
                assert not rows[len(tokens):].any()
        with pytest.raises(ssdgram.ConfigError, match="gathered by this frame already"):
            frame.rows(1)
        with store.prefetch(drawn(generator, store, 97)) as batch, pytest.raises(ssdgram.BatchTooLargeError):
            frame.load(batch)


def test_cudas_memory_is_what_was_asked_for(built):
    """Within 2 %, apart from what the process takes once (torch's streams, kernels): a store before this one took it."""
    with ssdgram.open(built, dram="64MiB", hbm="1MiB", device="cuda") as store:
        shape = 2048, len(store.columns), store.dim
        store.staging({layer: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for layer in store.layers})
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    with ssdgram.open(built, dram="1GiB", hbm="1GiB", device="cuda") as store:
        taken = free - torch.cuda.mem_get_info()[0]
        assert (1 << 30) * 0.98 < taken < (1 << 30) * 1.02
        assert store._arena.size + store._cuda.pool.bytes <= (1 << 30) * 1.02


def test_distinct_bundles_are_read_once_and_exact(built, monkeypatch):
    """Steps in which most n-grams come again, by every way to a gather of many positions, while bundles come, go and are promoted."""
    generator = np.random.default_rng(21)
    with ssdgram.open(built, dram="96MiB", hbm="1MiB", device="cuda") as store:
        outs = {layer: torch.zeros(2600, len(store.columns), store.dim, dtype=torch.bfloat16, device="cuda") for layer in store.layers}
        staging, frame, other = store.staging(outs), store.frame(700), torch.cuda.Stream()
        tables, forks, fork = [*staging._distinct, *frame._gathers], [], staging._beside.fork
        monkeypatch.setattr(staging._beside, "fork", lambda: (forks.append(1), fork()))
        framed = {layer: torch.zeros(700, len(store.columns), store.dim, dtype=torch.bfloat16, device="cuda") for layer in store.layers}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for layer in store.layers:
                frame.rows(layer, out=framed[layer])
        for step in range(40):
            phrases = drawn(generator, store, 240).reshape(12, 20)
            count = int(generator.integers(130, 2601))
            tokens = phrases[generator.integers(0, 12, -(-count // 20))].reshape(-1)[:count]
            with torch.cuda.stream(other if step % 3 == 1 else torch.cuda.current_stream()):       # tables are used in order
                assert staging.fill(tokens) == count         # reads what is missing
                torch.cuda._sleep(40_000_000 * (step % 3 > 0))               # some 20 ms
                assert staging.fill(tokens) == count
                found = [out[:count].clone() for out in outs.values()]
                assert staging.fill(tokens) == count         # the first pieces' frames are busy: gathers are launched one by one
                with store.prefetch(tokens[:700]) as batch:
                    frame.load(batch)
                    graph.replay()
            torch.cuda.synchronize()
            with store.prefetch(tokens) as batch:
                for layer, rows in zip(store.layers, found, strict=True):
                    wanted = batch.rows(layer).view(torch.int16)
                    assert torch.equal(wanted, rows.view(torch.int16)) and torch.equal(wanted, outs[layer][:count].view(torch.int16))
                    assert torch.equal(wanted[:700], framed[layer][:min(count, 700)].view(torch.int16))
        assert all(int(table.memory[0]) > 40 for table in tables) and len(forks) > 10


def test_staged_steps_of_all_sizes_are_exact(built):
    """By graph and by pieces, of tokens from the host and from the GPU, while bundles come and go and are promoted."""
    generator = np.random.default_rng(16)
    with ssdgram.open(built, dram="24MiB", hbm="2MiB", device="cuda") as store:
        outs = {layer: torch.zeros(700, len(store.columns), store.dim, dtype=torch.bfloat16, device="cuda") for layer in store.layers}
        staging = store.staging(outs)
        for step in range(200):
            count = int(generator.integers(1, 64 if step % 3 else 701))
            tokens = drawn(generator, store, count)
            assert staging.fill(torch.from_numpy(tokens).cuda() if step % 2 else tokens) == count
            with store.prefetch(tokens) as batch:
                for layer, out in outs.items():
                    assert torch.equal(batch.rows(layer).view(torch.int16), out[:count].view(torch.int16))
        with pytest.raises(ssdgram.TokenError):
            staging.fill(torch.tensor([1, vocabulary(store)], device="cuda"))
        tokens = drawn(generator, store, 40)
        assert staging.fill(tokens) == 40                    # the refused step left its frame usable


def test_a_large_staged_step_is_in_order_with_the_callers_stream(built):
    """Its gathers run on two streams: behind what the caller had launched (here something slow that overwrites the rows), and before what
    the caller launches next."""
    generator = np.random.default_rng(18)
    with ssdgram.open(built, dram="96MiB", hbm="2MiB", device="cuda") as store:
        outs = {layer: torch.zeros(4500, len(store.columns), store.dim, dtype=torch.bfloat16, device="cuda") for layer in store.layers}
        staging = store.staging(outs)
        for step in range(16):
            count = int(generator.integers(520, 3001))
            tokens = drawn(generator, store, count)
            torch.cuda._sleep(20_000_000 * (step % 2))       # 10 ms
            for out in outs.values():
                out.fill_(-7)
            assert staging.fill(tokens) == count
            found = [out[:count].clone() for out in outs.values()]
            for out in outs.values():
                out.fill_(-9)
            with store.prefetch(tokens) as batch:
                for layer, rows in zip(outs, found, strict=True):
                    assert torch.equal(batch.rows(layer).view(torch.int16), rows.view(torch.int16))
        tokens = drawn(generator, store, 4000)
        tokens[3900] = vocabulary(store)
        with pytest.raises(ssdgram.TokenError, match="position 3900 "):
            staging.fill(tokens)                             # found in the fourth piece, when the first is on its way
        assert staging.fill(tokens[:3900]) == 3900


def test_a_staged_step_behind_a_busy_stream_waits_for_its_tokens(built):
    """Its tokens come a long time after the call: the planner is woken to look for them."""
    with ssdgram.open(built, dram="24MiB", device="cuda") as store:
        outs = {layer: torch.zeros(64, len(store.columns), store.dim, dtype=torch.bfloat16, device="cuda") for layer in store.layers}
        staging = store.staging(outs)
        tokens = drawn(np.random.default_rng(17), store, 64)
        on_device = torch.from_numpy(tokens).cuda()
        time.sleep(1.5)                                      # the planner sleeps for good by now
        torch.cuda._sleep(100_000_000)                       # some 50 ms
        assert staging.fill(on_device) == 64
        with store.prefetch(tokens) as batch:
            assert all(torch.equal(batch.rows(layer).view(torch.int16), out.view(torch.int16)) for layer, out in outs.items())
