"""A frame's loads and what takes them out again, without a GPU: interrupts, failures and lifetimes at every point of a staged step."""

import gc
import types
import weakref

import numpy as np
import pytest
from made_stores import QUICK, quiet, until

import ssdgram
from ssdgram import _plan_state as p
from ssdgram import frame as module
from ssdgram import staging as staging_module
from ssdgram.batch import Batch
from ssdgram.store import Tuning

torch = pytest.importorskip("torch")
MOST = 8


class Graph:
    """The launch of a frame's graph, which the GPU runs when it is told to, or is waited for."""

    def __init__(self, frame):
        self.frame, self.queued, self.replays, self.error, self.launches = frame, False, 0, None, True

    def replay(self):
        self.replays += 1
        self.queued = self.queued or self.launches
        if self.error is not None:
            raise self.error

    def run(self):
        if self.queued:
            self.frame._words_array[:] = self.frame._numbers_array
        self.queued = False


class Gathers:
    """Of a layer, with a table."""


@pytest.fixture
def made(engram, served, monkeypatch):
    """(store, frame, graph, staging) of a step of up to MOST positions."""
    store = served(engram)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    store._cuda = types.SimpleNamespace(
        device=torch.device("cpu"), kept_by_row={}, gathers_for=lambda tokens: [Gathers()], drain=lambda: graph.run())
    frame = store.frame(MOST)
    store._cuda = None
    graph = Graph(frame)
    frame._used[:] = 1
    staging = store.staging({layer: torch.zeros(MOST, len(store.columns), store.dim, dtype=torch.bfloat16) for layer in store.layers})
    staging._graphs = {0: [(MOST, frame, graph)]}
    return store, frame, graph, staging


def works(engram, store, frame, graph, staging, seed):
    """A step goes through, its slots in the frame, and its batch is given back when the GPU has run it."""
    tokens = engram.tokens(MOST, seed=seed)
    assert staging.fill(tokens) == MOST
    with store.prefetch(tokens) as batch:
        batch.wait()
        np.testing.assert_array_equal(frame._slots_array, batch._slots)
    graph.run()
    return quiet(store)


def test_steps_go_through_a_frame(engram, made):
    assert all(works(engram, *made, seed) for seed in range(3))


@pytest.mark.parametrize("interrupted", (False, True))
def test_the_first_piece_of_a_large_step_goes_through_a_frame(engram, made, monkeypatch, interrupted):
    """The others are gathered behind it; whatever comes in between, the frame and all slots are free afterwards."""
    store, frame, graph, _ = made
    monkeypatch.setattr(staging_module, "PIECES", (MOST, 4))
    staging = store.staging({layer: torch.zeros(30, len(store.columns), store.dim, dtype=torch.bfloat16) for layer in store.layers})
    staging._graphs, tokens = {0: [(MOST, frame, graph)]}, engram.tokens(30)
    if interrupted:
        def launch(batch, start, deadline):
            raise KeyboardInterrupt

        monkeypatch.setattr(staging, "_launch", launch)
        with pytest.raises(KeyboardInterrupt):
            staging.fill(tokens)
    else:
        assert staging.fill(tokens) == 30
    with store.prefetch(tokens) as batch:
        batch.wait()
        np.testing.assert_array_equal(frame._slots_array, batch._slots[:, :MOST])
        for layer in store.layers if not interrupted else ():
            assert torch.equal(batch.rows(layer)[MOST:].view(torch.int16), staging.targets[layer][MOST:].view(torch.int16))
            assert not staging.targets[layer][:MOST].any()   # the graph's
    assert graph.replays == 1 and not quiet(store, 0.05)     # the first piece's slots are held until the GPU has run it
    graph.run()
    assert quiet(store) and works(engram, store, frame, graph, made[3], 5)


@pytest.mark.parametrize("where", ["load_now", "load", "load_frame", "replay", "behind the launch"])
def test_an_interrupt_leaks_nothing_and_leaves_the_frame_usable(engram, made, monkeypatch, where):
    store, frame, graph, staging = made
    assert works(engram, *made, 1)

    def interrupted(real):
        def call(*arguments):
            assert until(lambda: real(*arguments) or where != "load_now")
            raise KeyboardInterrupt
        return call

    if where == "load_now":
        monkeypatch.setattr(module, "load_ready", interrupted(module.load_ready))
    elif where in ("load", "load_frame"):
        monkeypatch.setattr(module, "load_ready", lambda *_: False)
        monkeypatch.setattr(*((frame, "_take") if where == "load" else (module, "load_frame")),
                            interrupted(frame._take if where == "load" else module.load_frame))
    else:
        graph.error, graph.launches = KeyboardInterrupt(), where == "behind the launch"
    with pytest.raises(KeyboardInterrupt):
        staging.fill(engram.tokens(5))
    monkeypatch.undo()
    graph.error, graph.launches = None, True
    assert quiet(store) and not graph.queued
    assert works(engram, *made, 2) and works(engram, *made, 3)


def test_a_load_that_fails_does_not_touch_the_launch_before(engram, made):
    """The first batch's replay is still under way when the second's load gives up: nobody may take its slots."""
    store, frame, graph, _ = made
    first = store.prefetch(engram.tokens(MOST))
    frame.load(first)
    graph.replay()
    first.release()
    record, words = store._plan.layers[first._row * len(store.layers)], store._plan.words
    with store.prefetch(engram.tokens(3)) as second:
        with pytest.raises(ssdgram.ReadTimeoutError, match="ever replayed"):
            frame.load(second, timeout_s=0.01)
        frame.discard()
        assert not frame.load_now(second)
        frame.discard(second)
        assert int(record["expected"]) == 1 and frame._number == 1 and words[first._base + p.W_STAGE] == p.UNWINDING
        graph.run()
        assert until(lambda: words[first._base + p.W_STAGE] == p.FREE_BATCH)
        assert frame.load_now(second) and frame._number == 2
        frame.discard()
        frame.discard()
    assert quiet(store)


def test_a_frames_memory_outlives_it_while_its_words_are_awaited(engram, made):
    store, frame, graph, staging = made
    staging.fill(engram.tokens(MOST))
    framed, kept, numbers, words = frame._cuda.kept_by_row, weakref.ref(frame._words), frame._numbers_array, frame._words_array
    tables = weakref.ref(frame._gathers[0])
    staging._graphs.clear()
    del frame, graph, made
    gc.collect()
    assert tables() is not None and kept() is not None and [memory[2] is kept() for memory in framed.values()] == [True]
    words[:] = numbers                                       # the GPU ran it after all
    assert quiet(store)


def test_a_store_closed_meanwhile_launches_nothing(engram, made, monkeypatch):
    """Its memory reads as zeros by then, of which a batch without layers seems ready."""
    store, _, graph, staging = made
    tokens = engram.tokens(MOST)
    assert works(engram, *made, 1)
    replays = graph.replays
    monkeypatch.setattr(Batch, "plan_now", lambda self: store.close())
    with pytest.raises(ssdgram.StoreClosedError):
        staging.fill(tokens)
    assert graph.replays == replays


def test_pieces_make_do_with_the_batches_there_are(engram, served, monkeypatch):
    """Two rows: one is the store's own, the other takes one piece behind the other."""
    monkeypatch.setattr(staging_module, "PIECES", (4,))
    store = served(engram, tuning=Tuning(readers=QUICK.readers, depth=QUICK.depth, batches=2, crew=0))
    targets = {layer: torch.zeros(30, len(store.columns), store.dim, dtype=torch.bfloat16) for layer in store.layers}
    staging, tokens = store.staging(targets), engram.tokens(30)
    assert staging.fill(tokens) == 30
    with store.prefetch(tokens) as batch:
        assert all(torch.equal(batch.rows(layer).view(torch.int16), targets[layer].view(torch.int16)) for layer in store.layers)
        with pytest.raises(ssdgram.StoreBusyError):
            staging.fill(tokens)
    assert quiet(store)


def test_tokens_that_could_not_be_sent_are_waited_for(engram, served, monkeypatch):
    """What the GPU was asked to write before the exception is written before another batch gets the row and its memory."""
    store, log = served(engram), []

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "_cuda", types.SimpleNamespace(
            plan_memory=lambda row, shape: (np.empty(shape, np.int32), None), tokens_to_host=interrupted,
            drain=lambda: log.append("drained")))
        with pytest.raises(KeyboardInterrupt):
            store.prefetch(ssdgram.Sequence.deferred(4, 4, lambda *_: None))
    assert log == ["drained"] and quiet(store)


@pytest.mark.parametrize("current,raw,answer", ((0, True, 0), (0, True, 700), (1, True, 0), (0, False, 0)))
def test_a_graph_is_launched_on_its_devices_stream_or_by_torch(monkeypatch, current, raw, answer):
    """By CUDA's call where its device is the current one and torch tells the handle; what CUDA refuses is an error."""
    pytest.importorskip("triton")
    from ssdgram import staging_gpu

    launched = []

    def launch(handle, stream):
        launched.append((handle, stream))
        return answer

    captured = types.SimpleNamespace(replay=lambda: launched.append("torch"), **({"raw_cuda_graph_exec": lambda: 77} if raw else {}))
    monkeypatch.setattr(staging_gpu, "cuda_runtime", lambda: types.SimpleNamespace(cudaGraphLaunch=launch))
    monkeypatch.setattr(staging_gpu, "raw_stream", lambda device: 500 + device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    graph = staging_gpu.Graph(captured, 0)
    if answer:
        with pytest.raises(ssdgram.StoreError, match="answered 700"):
            graph.replay()
    else:
        graph.replay()
    assert launched == [(77, 500) if raw and current == 0 else "torch"]


def test_a_gather_by_addresses_launches_what_one_by_tensors_does(monkeypatch):
    pytest.importorskip("triton")
    from ssdgram.kernels import gather, launch

    slots, out = torch.zeros(64, 3, dtype=torch.int32), torch.zeros(64, 24, 256, dtype=torch.bfloat16)
    counter, word = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "raw_stream", lambda device: 7)
    monkeypatch.setattr(launch, "address", lambda tensor: tensor.data_ptr())
    launched = []
    made = gather.Gather(gather.Bundles((8, 8, 8)))
    variant = made.launch("rows", gather.SLOTS, torch.bfloat16, 1, gather.tile_for(64))
    variant._interpreted = False
    variant._compiled[0] = types.SimpleNamespace(function=1, packed_metadata=2, run=lambda *arguments: launched.append(arguments))
    made(slots, out, dram=9, hbm=8, counter=counter, done=word, ticket=5)
    made.at(64, slots.data_ptr(), out.data_ptr(), mode="rows", dram=9, hbm=8, counter=counter.data_ptr(), done=word.data_ptr(), ticket=5)
    assert len(launched) == 2 and launched[0] == launched[1]
