"""Attached stores on CUDA devices: the server's slab gathered over this process's link, words and tokens through the share.

Skipped without a GPU; the ranks of the last test are processes of their own, on two GPUs where there are two.
"""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from made_stores import until

torch = pytest.importorskip("torch")

import ssdgram  # noqa: E402
from ssdgram.serve import desk  # noqa: E402
from ssdgram.serve.server import Server  # noqa: E402
from ssdgram.tools.synth import expected_rows  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    tokenizer = __file__.rpartition("/")[0] + "/golden/tiny_tokenizer.json"
    ssdgram.synthesize(folder / "ckpt", vocab_size=3000, layers=(1, 3), seed=5, tokenizer=tokenizer)
    ssdgram.convert(folder / "ckpt", folder / "out")
    return folder / "out"


@pytest.fixture
def server(built, tmp_path):
    with Server(built, tmp_path / "s", dram="24MiB", clients=4, rows=16, positions=1024) as server:
        yield server


def wanted(server, tokens, layer, **context):
    store = server.store
    ids = store.geometry.row_ids(tokens, store._token_map, **context)[:, store.geometry.layers.index(layer)]
    return expected_rows(5, layer, ids, store.geometry)


def test_packed_rows_are_the_checkpoints_bytes(server):
    generator = np.random.default_rng(1)
    with ssdgram.attach(server.path, device="cuda") as store, ssdgram.attach(server.path) as cpu:
        for _ in range(60):
            tokens = generator.integers(0, store._vocabulary, int(generator.integers(1, 400)))
            with store.prefetch(tokens) as batch, cpu.prefetch(tokens) as other:
                for layer in store.layers:
                    assert np.array_equal(batch.packed(layer).cpu().numpy(), wanted(server, tokens, layer))
                    assert torch.equal(batch.rows(layer).cpu().view(torch.int16), other.rows(layer).view(torch.int16))
        assert server.joined > 0


def test_tokens_on_the_device(server):
    generator = np.random.default_rng(3)
    with ssdgram.attach(server.path, device="cuda") as store:
        for _ in range(20):
            tokens, before = generator.integers(0, store._vocabulary, 50), generator.integers(0, store._vocabulary, 3)
            sequences = [ssdgram.Sequence(torch.from_numpy(tokens).cuda(), lookback=before), ssdgram.Sequence(tokens)]
            with store.prefetch(sequences) as batch:
                found = batch.packed(3).cpu().numpy()
            assert np.array_equal(found[:50], wanted(server, tokens, 3, lookback=before))
            assert np.array_equal(found[50:], wanted(server, tokens, 3))
        for bad in (-1, store._vocabulary, 2**40):
            with store.prefetch(torch.tensor([1, 2, bad], device="cuda")) as batch, pytest.raises(ssdgram.TokenError):
                batch.rows(1)
        store.warm(ssdgram.Sequence(torch.arange(200, device="cuda")))


def test_slots_are_not_given_back_before_the_gpu_has_read_them(server):
    with ssdgram.attach(server.path, device="cuda") as store:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)                   # the gather waits behind this
            batch = store.prefetch(np.arange(64))
            result = batch.packed(1)
            row = batch._row
            batch.release()
        time.sleep(0.05)
        assert server._desk.seats["stage"][row] == desk.LEAVING
        stream.synchronize()
        assert until(lambda: server._desk.seats["stage"][row] == desk.EMPTY)
        assert np.array_equal(result.cpu().numpy(), wanted(server, np.arange(64), 1))


def test_a_step_waits_for_no_stream(server):
    """Hazard 6: torch raises at any operation that would synchronise."""
    with ssdgram.attach(server.path, device="cuda") as store:
        tokens = torch.arange(50, device="cuda")
        for layer in store.layers:                           # what is made once is made
            with store.prefetch(tokens) as batch:
                batch.rows(layer)
                batch.packed(layer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                with store.prefetch(tokens) as batch:
                    found = {layer: batch.packed(layer) for layer in store.layers}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for layer, rows in found.items():
            assert np.array_equal(rows.cpu().numpy(), wanted(server, np.arange(50), layer))


def test_frames_in_a_graph(server):
    """A captured gather, loaded anew before each replay; the slots of a loaded batch stay until the replay has read them."""
    generator = np.random.default_rng(8)
    with ssdgram.attach(server.path, device="cuda") as store:
        frame, graph = store.frame(64), torch.cuda.CUDAGraph()
        out = {layer: torch.empty((64, len(store.columns), store.row_bytes), dtype=torch.uint8, device="cuda") for layer in store.layers}
        with store.prefetch(np.arange(64)) as batch:         # what is loaded lazily is loaded before the capture
            for layer in store.layers:
                batch.packed(layer)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in store.layers:
                frame.packed(layer, out=out[layer])
        for step in range(30):
            tokens = generator.integers(0, store._vocabulary, int(generator.integers(1, 65)))
            with store.prefetch(tokens) as batch:
                frame.load(batch)
                if step == 7:
                    torch.cuda._sleep(200_000_000)
                graph.replay()
                row = batch._row
            if step == 7:
                time.sleep(0.02)
                assert server._desk.seats["stage"][row] == desk.LEAVING
            torch.cuda.synchronize()
            for layer in store.layers:
                found = out[layer].cpu().numpy()
                assert np.array_equal(found[:len(tokens)], wanted(server, tokens, layer)) and not found[len(tokens):].any()
        with store.prefetch(np.arange(9)) as batch:
            frame.load(batch)
            frame.discard()
        assert until(lambda: (server._desk.seats["stage"] == desk.EMPTY).all())


def test_eviction_and_cancellation_on_two_streams(server):
    generator = np.random.default_rng(4)
    streams, waiting, checked = [torch.cuda.Stream(), torch.cuda.Stream()], [], 0
    stores = [ssdgram.attach(server.path, device="cuda"), ssdgram.attach(server.path, device="cuda")]
    while checked < 200_000:
        store = stores[int(generator.integers(2))]
        if generator.random() < 0.2:
            tokens = generator.integers(0, store._vocabulary, 200)
            store.prefetch(tokens, ("step", "background")[int(generator.integers(2))]).release()
        stream = streams[int(generator.integers(2))]
        tokens = np.minimum(generator.geometric(0.02, 600), store._vocabulary) - 1
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
                assert np.array_equal(rows.cpu().numpy(), wanted(server, tokens, layer))
                checked += rows.shape[0] * rows.shape[1]
    for store in stores:
        store.close()
    assert until(lambda: server.attached == 0) and server.store.stats().slots_in_use <= 6


def _rank(path, rank, steps, pipe):
    """A tensor-parallel rank: the steps' rows, summed up as a checksum on its own GPU; then it waits to be killed."""
    device = f"cuda:{rank % torch.cuda.device_count()}"
    with torch.cuda.device(device):
        store = ssdgram.attach(path, device=device)
        pipe.send("attached")
        for tokens in steps:
            pipe.recv()
            batch = store.prefetch(tokens)
            pipe.send({layer: batch.packed(layer).cpu().numpy() for layer in store.layers})
            batch.release()
        pipe.recv()
        torch.cuda._sleep(2_000_000_000)                     # dies with gathers in its stream
        batch = store.prefetch(steps[0])
        batch.packed(1)
        pipe.send("dying")
        signal.pause()


def test_two_ranks_read_once_and_die_alone(server):
    context = multiprocessing.get_context("spawn")
    generator = np.random.default_rng(6)
    steps = [generator.integers(0, server.store._vocabulary, 100) for _ in range(10)]
    pipes, ranks = [], []
    for rank in range(2):
        here, there = context.Pipe()
        ranks.append(context.Process(target=_rank, args=(server.path, rank, steps, there)))
        ranks[-1].start()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes] == ["attached"] * 2
    for tokens in steps:
        for pipe in pipes:
            pipe.send("go")
        for found in [pipe.recv() for pipe in pipes]:
            for layer, rows in found.items():
                assert np.array_equal(rows, wanted(server, tokens, layer))
    with ssdgram.open(server.store.path, dram="24MiB") as alone:
        for tokens in steps:
            with alone.prefetch(tokens) as batch:
                batch.wait()
        ours, one = server.store.stats().reads, alone.stats().reads
        assert abs(ours - one) <= one // 100             # a page that several bundles want is read once or twice, by their timing
    for pipe, rank in zip(pipes, ranks):
        pipe.send("go")
        assert pipe.recv() == "dying"
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
    assert until(lambda: server.attached == 0)
    assert server.store.stats().slots_in_use <= 6
    with ssdgram.attach(server.path, device="cuda") as store, store.prefetch(steps[3]) as batch:
        assert np.array_equal(batch.packed(3).cpu().numpy(), wanted(server, steps[3], 3))
