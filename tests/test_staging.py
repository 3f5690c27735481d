"""A step's rows into fixed tensors by one call: the same as a batch's, whatever the step's size, whatever it is cut into."""

import contextlib
import types

import numpy as np
import pytest
import torch
from made_stores import quiet

import ssdgram
from ssdgram import Sequence
from ssdgram import staging as module
from ssdgram.sequence import flatten, pieces


def buffers(store, tokens):
    return {layer: torch.zeros(tokens, len(store.columns), store.dim, dtype=torch.bfloat16) for layer in store.layers}


def same_as_batch(store, staging, step, count):
    assert staging.fill(step) == count
    with store.prefetch(step) as batch:
        for layer, target in staging.targets.items():
            assert torch.equal(batch.rows(layer).view(torch.int16), target[:count].view(torch.int16))


def test_rows_are_those_of_a_batch(engram, served, monkeypatch):
    monkeypatch.setattr(module, "PIECES", (20, 50))
    store = served(engram)
    staging = store.staging(buffers(store, 300))
    for count in (0, 1, 7, 50, 51, 299, 300):
        same_as_batch(store, staging, engram.tokens(count, seed=count), count)
    long = engram.tokens(220, seed=9)
    same_as_batch(store, staging, Sequence(long[20:], lookback=long[:20]), 200)
    lengths = [0, 3, 90, 1, 47, 0, 30]
    windows = engram.tokens(3 * len(lengths), seed=3).reshape(-1, 3)
    same_as_batch(store, staging, Sequence.ragged(engram.tokens(171, seed=4), lengths, windows), 171)
    assert quiet(store)


def test_tokens_that_a_callback_brings(engram, served):
    store = served(engram)
    staging, tokens = store.staging(buffers(store, 20)), engram.tokens(20)
    flat = Sequence(tokens)

    def fill(into, flags, mark):
        into.copy_(torch.from_numpy(flat.flat_tokens))
        flags.copy_(torch.from_numpy(flat.flat_flags))

    assert staging.fill(Sequence.deferred(20, 20, fill)) == 20
    with store.prefetch(tokens) as batch:
        assert all(torch.equal(batch.rows(layer).view(torch.int16), staging.targets[layer].view(torch.int16)) for layer in store.layers)


def test_pieces_give_the_keys_of_the_whole(engram, served):
    store = served(engram)
    n = store.geometry.max_ngram
    whole = Sequence(engram.tokens(101, seed=1), lookback=engram.tokens(7, seed=2))
    for sizes in ((1,), (2,), (1, 10), (64, 3), (103, 7), (104,), (1000,)):
        cut = list(pieces(whole, n, sizes))
        assert sum(map(len, cut)) == 101 and all(len(part) == size for part, size in zip(cut[:-1], [*sizes, *[sizes[-1]] * 101]))
        assert np.array_equal(np.concatenate([store._keys_of(*flatten([part], n)[:2]) for part in cut]), store._keys_of(
            *flatten([whole], n)[:2]))


class Side:
    """What a staging asks of a store on a GPU, noted: where rows were gathered to, under which stream, between which marks."""

    def __init__(self):
        self.log, self.beside, self.kept_by_row = [], False, {}

    def plan_memory(self, row, shape):
        return np.empty(shape, np.int32), None

    def rows_to(self, batch, index, place, gather):
        self.log.append((index, place, len(batch), self.beside, *([gather] if gather else [])))

    def fork(self):
        self.log.append("fork")

    def join(self):
        self.log.append("join")

    @contextlib.contextmanager
    def use(self):
        self.beside = True
        yield
        self.beside = False


@pytest.mark.parametrize("interrupted", (False, True))
def test_pieces_lie_behind_one_another_and_run_between_fork_and_join(engram, served, monkeypatch, interrupted):
    """Layers by turns on the two streams, every piece at its rows' addresses; joined whatever happens."""
    monkeypatch.setattr(module, "PIECES", (4, 8))
    store = served(engram)
    staging, side = store.staging(buffers(store, 25)), Side()
    staging._beside = side
    with monkeypatch.context() as patched:
        patched.setattr(store, "_cuda", side)
        if interrupted:
            patched.setattr(staging, "_launch", lambda batch, start, deadline: (side.log.append(start), 1 / 0))
            with pytest.raises(ZeroDivisionError):
                staging.fill(engram.tokens(25))
        else:
            assert staging.fill(engram.tokens(25)) == 25
    if interrupted:
        assert side.log == ["fork", 0, "join"]
    else:
        row = 2 * len(store.columns) * store.dim
        assert side.log == ["fork", *((index, staging.targets[layer].data_ptr() + start * row, count, index % 2 == 1)
                                      for start, count in ((0, 4), (4, 8), (12, 8), (20, 5)) for index, layer in enumerate(store.layers)),
                            "join"]
    assert quiet(store)


@pytest.mark.parametrize("lengths", ([0, 0, 0, 0, 20], [20], [3, 0, 17]), ids=str)
@pytest.mark.parametrize("log,busy,graphs", (
    (["graph 0 8", "graph 8 8", "graph 16 4"], None, {0: (8,), 8: (4, 8), 16: (4, 8)}),
    (["graph 0 8", "fork", 8, 16, "join"], None, {0: (8,), 16: (4,)}),        # the last has a graph: behind a fork it is not used
    (["graph 0 8", "graph 8 8", "fork", 16, "join"], None, {0: (8,), 8: (8,), 16: (3,)}),
    (["graph 0 8", "fork", 8, 16, "join"], 8, {0: (8,), 8: (8,), 16: (8,)}),  # the GPU is behind: pieces are queued there, nobody waits
    (["fork", 0, 8, 16, "join"], 0, {0: (8,), 8: (8,), 16: (8,)})))
def test_graphs_lie_before_the_fork(engram, served, monkeypatch, lengths, log, busy, graphs):
    """They write zeros behind their rows and share tables with what is launched behind: on the other stream that could come before."""
    monkeypatch.setattr(module, "PIECES", (8,))
    store = served(engram)
    staging, side = store.staging(buffers(store, 25)), Side()
    staging._beside = side
    staging._graphs = {start: [(size, types.SimpleNamespace(idle=start != busy), (start, size)) for size in sizes]
                       for start, sizes in graphs.items()}
    windows = engram.tokens(3 * len(lengths), seed=3).reshape(-1, 3)
    step = Sequence.ragged(engram.tokens(20), lengths, windows)
    monkeypatch.setattr(staging, "_load_and_replay", lambda batch, frame, graph, timeout_s: side.log.append(
        f"graph {graph[0]} {len(batch)}") if len(batch) <= graph[1] else 1 / 0)
    monkeypatch.setattr(staging, "_launch", lambda batch, start, deadline: side.log.append(start))
    assert staging.fill(step) == 20
    assert side.log == log


def test_large_pieces_are_gathered_by_distinct_bundles(engram, served, monkeypatch):
    """Those that the layer's table was made for; the others as they are."""
    monkeypatch.setattr(module, "PIECES", (4, 9, 6))
    monkeypatch.setattr(module, "DISTINCT", 6)
    store = served(engram)
    staging, side = store.staging(buffers(store, 40)), Side()
    staging._beside, staging._distinct = side, [types.SimpleNamespace(tokens=8, layer=layer) for layer in store.layers]
    with monkeypatch.context() as patched:
        patched.setattr(store, "_cuda", side)
        assert staging.fill(engram.tokens(22)) == 22
    assert set(map(id, side.kept_by_row.values())) == {id(staging._distinct)}     # its tables live until the batch's words arrived
    assert [(entry[2], entry[4].layer if len(entry) > 4 else None) for entry in side.log if isinstance(entry, tuple)] == [
        (count, layer if count == 6 else None) for count in (4, 9, 6, 3) for layer in store.layers]


def test_steps_that_share_tables_are_in_order(engram, served, monkeypatch):
    """Whatever stream each comes on; small ones have no tables. The order ends when a step fails, too."""
    monkeypatch.setattr(module, "PIECES", (6, 8))
    monkeypatch.setattr(module, "DISTINCT", 6)
    store, log = served(engram), []
    staging = store.staging(buffers(store, 40))

    class InOrder:
        def __enter__(self):
            log.append("begin")

        def __exit__(self, *_):
            log.append("end")

        def mend(self):
            log.append("mend")

    staging._in_order = InOrder()
    staging._graphs = {0: [(size, None, size) for size in (4, 7)]}
    monkeypatch.setattr(staging, "_replay", lambda sequence, frame, graph, timeout_s: log.append(f"graph {graph}"))
    monkeypatch.setattr(staging, "_gather", lambda sequence, timeout_s: log.append(len(sequence)))
    for count in (0, 3, 5, 9):
        assert staging.fill(engram.tokens(count)) == count
    assert log == ["mend", "graph 4", "begin", "graph 7", "end", "begin", 9, "end"]
    monkeypatch.setattr(staging, "_gather", lambda sequence, timeout_s: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        staging.fill(engram.tokens(9))
    assert log[-2:] == ["begin", "end"]


class Stream:
    """What the streams before it had been given when it began to wait for them."""

    def __init__(self, handle):
        self.handle, self.work, self.behind = handle, 0, {}

    def wait_event(self, event):
        stream, work = event.mark
        self.behind[stream.handle] = work


@pytest.mark.parametrize("interrupted", ("", "body", "record"))
def test_a_stream_runs_behind_the_last_one(monkeypatch, interrupted):
    """Or behind everything, if the last step did not end as it should."""
    pytest.importorskip("triton")
    from ssdgram import staging_gpu

    current, synchronized, failing = [], [], []

    class Event:
        def record(self, stream):
            if failing:
                raise failing.pop()
            self.mark = stream, stream.work

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(staging_gpu, "raw_stream", lambda index: current[-1].handle)
    device = types.SimpleNamespace(index=0)
    order, streams = staging_gpu.InOrder(device), [Stream(handle) for handle in (0, 7, 9)]

    def step(stream, error=None):
        current.append(stream)
        with order:
            stream.work += 1
            if error is not None:
                raise error

    step(streams[0])
    step(streams[0])
    assert not streams[0].behind
    if interrupted == "record":
        failing.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        step(streams[1], KeyboardInterrupt() if interrupted == "body" else None)
    assert streams[1].behind == {0: 2} and not synchronized
    step(streams[2])
    assert (streams[2].behind, synchronized) == (({}, [device]) if interrupted else ({7: 1}, []))
    order.mend()
    assert synchronized == [device] * bool(interrupted)


def test_a_bad_id_behind_the_last_output_is_found(engram, served, monkeypatch):
    """However the step is cut: a request without tokens has a window."""
    monkeypatch.setattr(module, "PIECES", (4,))
    store = served(engram)
    windows = engram.tokens(6, seed=2).reshape(2, 3)
    windows[1, 2] = store._vocabulary
    step = Sequence.ragged(engram.tokens(12), [12, 0], windows)
    with pytest.raises(ssdgram.TokenError):
        store.prefetch(step)
    with pytest.raises(ssdgram.TokenError):
        store.staging(buffers(store, 20)).fill(step)
    assert quiet(store)


@pytest.mark.parametrize("most", (1, 16, 512, 513, 2048, 3000, 8192, 50_000))
def test_every_piece_of_a_step_has_a_graph_within_the_rows(most):
    graphs = module.graphs_of(most)
    assert all(0 < size <= most - start for start, size in graphs) and len(set(graphs)) == len(graphs) < 40
    for count in {1, most // 2, most - 1, most} - {0}:
        start = 0
        for piece in (512, 1024, *[2048] * 30):
            mine = min(piece, count - start)
            if mine <= 0 or start >= module.CAPTURED:
                break
            fits = [size for first, size in graphs if first == start and size >= mine]
            assert fits and min(fits) < 2 * mine + 512, (count, start)
            start += mine


def test_what_cannot_be_is_refused(engram, served, monkeypatch):
    monkeypatch.setattr(module, "PIECES", (2, 4))
    store = served(engram)
    staging = store.staging(buffers(store, 12))
    with pytest.raises(ssdgram.BatchTooLargeError):
        staging.fill(engram.tokens(13))
    tokens = engram.tokens(12)
    tokens[9] = store._vocabulary
    with pytest.raises(ssdgram.TokenError, match="position 9 "):
        staging.fill(tokens)
    long, tokens = store.staging(buffers(store, 30)), engram.tokens(30)
    tokens[20] = store._vocabulary                           # in the sixth piece: the first are gathered already
    with pytest.raises(ssdgram.TokenError, match="position 20 "):
        long.fill(tokens)
    assert long.targets[store.layers[-1]][0].any() and quiet(store)
    one = dict(list(buffers(store, 4).items())[:1])
    with pytest.raises(ssdgram.ConfigError, match="expected those of the store"):
        store.staging(one)
    with pytest.raises(ssdgram.ConfigError, match="expected contiguous"):
        store.staging({layer: target[:, :, :-1] for layer, target in buffers(store, 4).items()})
    store.close()
    with pytest.raises(ssdgram.StoreClosedError):
        staging.fill(engram.tokens(3))
