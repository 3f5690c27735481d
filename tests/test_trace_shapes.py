"""Batches of a trace and the bundles that they ask for, against plain Python and against the geometry's own keys."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import GOLDEN, read_json

from ssdgram.errors import ConfigError, TokenError
from ssdgram.geometry import Geometry
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS
from ssdgram.sequence import Sequence, flatten
from ssdgram.token_map import token_map
from ssdgram.tools.trace import NO_PART, Trace
from ssdgram.tools.trace_shapes import decode, prefill, recorded, recorded_requests, requests


@pytest.fixture(scope="module")
def model():
    return Geometry.from_config(read_json("tiny_v41/config.json")), token_map(GOLDEN / "tiny_v41" / "tokenizer.json")


def documents(lengths, seed=0):
    tokens = np.random.default_rng(seed).integers(3, 300, sum(lengths)).astype(np.int32)
    return Trace.of_documents(tokens, np.cumsum([0, *lengths]).astype(np.int64), {})


def plain_steps(starts, streams):
    """Positions of each step, by lists."""
    waiting = [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    running, steps = [[] for _ in range(streams)], []
    while any(waiting) or any(running):
        step = []
        for stream in range(streams):
            while not running[stream] and waiting:
                running[stream] = waiting.pop(0)
            if running[stream]:
                step.append(running[stream].pop(0))
        if step:
            steps.append(step)
    return steps


def pieces_flat(trace, pieces, lookback):
    """The flat form that ssdgram.sequence makes of pieces [first, stop)."""
    made = []
    for first, stop in pieces:
        start = max(s for s in trace.starts.tolist() if s <= first)
        made.append(Sequence(trace.tokens[first:stop], lookback=trace.tokens[start:first][-lookback:]))
    return flatten(made, lookback + 1)


def same_as(batches, trace, wanted, lookback):
    assert len(batches) == len(wanted) == len(batches.positions())
    for number, pieces in enumerate(wanted):
        tokens, flags, count = pieces_flat(trace, pieces, lookback)
        mine = batches.sequence(number)
        assert (mine.flat_tokens == tokens).all() and (mine.flat_flags == flags).all()
        assert len(mine) == count == batches.positions()[number]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5), st.integers(1, 4))
def test_streams_take_turns_and_the_next_document_when_one_ends(lengths, streams, lookback):
    trace = documents(lengths)
    wanted = [[(position, position + 1) for position in step] for step in plain_steps(trace.starts.tolist(), streams)]
    same_as(decode(trace, streams, lookback), trace, wanted, lookback)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12), st.integers(1, 4))
def test_chunks_follow_each_other_over_the_ends_of_documents(lengths, chunk, lookback):
    trace = documents(lengths)
    count = len(trace.tokens)
    wanted = []
    for begin in range(0, count, chunk):
        end = min(begin + chunk, count)
        edges = sorted({begin, end, *(s for s in trace.starts.tolist() if begin < s < end)})
        wanted.append(list(itertools.pairwise(edges)))
    same_as(prefill(trace, chunk, lookback), trace, wanted, lookback)


def test_a_token_that_takes_no_part_keeps_its_place():
    trace = Trace.of_documents(np.array([5, NO_PART, 7], np.int32), np.array([0, 3]), {})
    batches = prefill(trace, 3)
    assert batches.flags.tolist() == [PARTICIPATES | OUTPUT | STARTS, OUTPUT, PARTICIPATES | OUTPUT]
    assert batches.tokens.tolist() == [5, 0, 7]


def test_recorded_batches_are_as_they_were():
    trace = Trace(np.array([5, 6, 7, NO_PART, 9, 6, 7, 8], np.int32), np.array([0, 3, 5, 8]), {}, np.array([0, 0, 2], np.uint8),
                  batches=np.array([0, 2, 3]))
    batches = recorded(trace)
    first = flatten([Sequence([5, 6, 7]), Sequence([0, 9], participates=[False, True])], 4)
    second = flatten([Sequence([8], lookback=[6, 7])], 4)
    for number, (tokens, flags, count) in enumerate([first, second]):
        mine = batches.sequence(number)
        assert (mine.flat_tokens.tolist(), mine.flat_flags.tolist(), len(mine)) == (tokens.tolist(), flags.tolist(), count)


def test_parts_of_batches_are_batches():
    batches = decode(documents([5, 6, 7]), 2)
    part = batches.part(2, 5)
    assert len(part) == 3
    for number in range(3):
        assert (part.sequence(number).flat_tokens == batches.sequence(number + 2).flat_tokens).all()
    assert [len(sequence) for sequence in part] == part.positions().tolist()


def test_requests_are_the_keys_of_each_document_in_the_order_of_decoding(model):
    geometry, table = model
    trace = documents([40, 1, 0, 33, 12])
    keys = np.concatenate([geometry.keys(trace.tokens[start:stop], table) for start, stop in itertools.pairwise(trace.starts)])[:, 0]
    asked = requests(decode(trace, 3, geometry.orders), geometry, table)
    steps = plain_steps(trace.starts.tolist(), 3)
    order = list(itertools.chain.from_iterable(steps))
    assert (asked.x.reshape(-1, geometry.orders) == keys[order]).all()
    assert (asked.groups.reshape(-1, geometry.orders) == np.arange(geometry.orders)).all() and asked.orders == geometry.orders
    assert asked.bounds.tolist() == [geometry.orders * n for n in itertools.accumulate([0, *(len(step) for step in steps)])]
    chunks = requests(prefill(trace, 16, geometry.orders), geometry, table)
    assert (chunks.x.reshape(-1, geometry.orders) == keys).all()


def test_requests_of_a_trace_longer_than_a_slice(model, monkeypatch):
    monkeypatch.setattr("ssdgram.tools.trace_shapes.SLICE", 7)
    geometry, table = model
    trace = documents([40, 33])
    asked = requests(decode(trace, 2, geometry.orders), geometry, table)
    monkeypatch.undo()
    assert (asked.x == requests(decode(trace, 2, geometry.orders), geometry, table).x).all()


def test_requests_of_recorded_keys():
    trace = Trace(np.empty(0, np.int32), np.array([0, 2, 3]), {}, np.array([0, 3], np.uint8), keys=np.arange(6).reshape(3, 2))
    asked = recorded_requests(trace)
    assert asked.x.tolist() == list(range(6)) and asked.groups.tolist() == [0, 1] * 3 and asked.bounds.tolist() == [0, 4, 6]


def test_what_cannot_be_shaped_is_refused(model):
    keys = Trace(np.empty(0, np.int32), np.array([0, 3]), {}, np.array([0], np.uint8), keys=np.arange(6).reshape(3, 2))
    recording = Trace(np.arange(3, dtype=np.int32), np.array([0, 3]), {}, np.array([0], np.uint8), batches=np.array([0, 1]))
    for trace in (keys, recording):
        with pytest.raises(ConfigError, match="expected a trace of documents"):
            decode(trace, 4)
    for trace in (keys, documents([3])):
        with pytest.raises(ConfigError, match="expected a recording"):
            recorded(trace)
    for shape in (decode, prefill):
        with pytest.raises(ConfigError, match="expected 1 or more"):
            shape(documents([3]), 0)
    with pytest.raises(ConfigError, match="one of tokens"):
        recorded_requests(recording)


def test_a_trace_of_another_tokenizer_is_refused(model):
    geometry, table = model
    trace = Trace.of_documents(np.array([1, len(table)], np.int32), np.array([0, 2]), {})
    with pytest.raises(TokenError, match=f"token 1 .* is {len(table)}"):
        requests(prefill(trace, 2), geometry, table)


def test_the_end_where_streams_run_out_can_be_left_out():
    batches = decode(documents([3, 9, 5]), 2)
    full = batches.while_full(2)
    assert (full.positions() == 2).all() and (batches.positions()[len(full):] < 2).all() and len(full) < len(batches)
    assert len(batches.while_full(3)) == len(batches)
