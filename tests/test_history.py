"""History: whatever was appended, rewound, forked and exported, the keys are those of a fresh run of the final sequence."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from vectors import PLE_CASES, engram_case, ple_config

from ssdgram.errors import FormatError, TokenError
from ssdgram.geometry import Geometry
from ssdgram.history import History
from ssdgram.kernels.hash import ngram_keys
from ssdgram.sequence import flatten

ENGRAM, TABLE = engram_case("small_d")[:2]
PLE = Geometry.from_config(ple_config(PLE_CASES[2])[0])


def keys_of(geometry, table, sequence):
    tokens, flags, count = flatten([sequence], geometry.max_ngram)
    out = np.empty((count, len(geometry.layers), geometry.orders), np.int64)
    ngram_keys(tokens, flags, 0, len(tokens), table, geometry.multiplier_array, geometry.rule, geometry.fill(table), out)
    return out


@pytest.mark.parametrize("geometry, table, seed", [(ENGRAM, TABLE, 1), (PLE, np.empty(0, np.int32), 2)], ids=["engram", "ple"])
def test_random_scripts_equal_a_fresh_run(geometry, table, seed):
    """Thousands of scripts of append, rewind, fork, export; after each step some chunk is compared with a fresh run."""
    random = np.random.default_rng(seed)
    vocabulary = geometry.vocabulary(table)
    for _ in range(1500):
        history, tokens, alive = History(), [], []
        for _ in range(random.integers(2, 7)):
            step = random.integers(0, 6)
            if step == 0:
                keep = int(random.integers(0, len(tokens) + 1))
                history.rewind(keep)
                tokens, alive = tokens[:keep], alive[:keep]
            elif step == 1:
                keep = int(random.integers(0, len(tokens) + 1))
                parent, history = history, history.fork(keep)
                parent.rewind(0)
                parent.append([1, 2, 3])                     # must not be seen by the fork
                tokens, alive = tokens[:keep], alive[:keep]
            elif step == 2:
                history = pickle.loads(pickle.dumps(history))
            else:
                count = int(random.integers(0, 5))
                part = random.random(count) < 0.8
                ids = np.where(part, random.integers(0, vocabulary, count), -1)
                assert history.append(ids, part if random.random() < 0.5 or not part.all() else None) == len(tokens)
                tokens += ids.tolist()
                alive += part.tolist()
            assert len(history) == len(tokens)
        start = int(random.integers(0, len(tokens) + 1))
        stop = int(random.integers(start, len(tokens) + 1))
        fresh = History(tokens, alive)
        assert history == fresh
        expected = keys_of(geometry, table, fresh.sequence(0))
        assert np.array_equal(keys_of(geometry, table, history.sequence(start, stop)), expected[start:stop])


def test_lookback_and_sequence():
    history = History([5, 6, -1, 8], [True, True, False, True])
    ids, part = history.lookback(3, 4)
    assert ids.tolist() == [5, 6, -1] and part.tolist() == [True, True, False]
    assert history.lookback(1, 4)[0].tolist() == [5] and history.lookback(0, 4)[0].tolist() == []
    assert history.lookback(4, 2)[0].tolist() == [8]
    sequence = history.sequence(3)
    assert sequence.flat_tokens.tolist() == [5, 6, -1, 8] and len(sequence) == 1
    expected = ENGRAM.keys([8], TABLE, lookback=ids, lookback_participates=part)
    assert np.array_equal(keys_of(ENGRAM, TABLE, sequence), expected)
    ids[:] = 0                                               # a copy
    assert history.tokens.tolist() == [5, 6, -1, 8] and history.participates.tolist() == [True, True, False, True]


def test_growth_keeps_everything():
    history = History()
    for k in range(300):
        history.append(np.arange(k % 7) + k)
    assert history.tokens.tolist() == [k + j for k in range(300) for j in range(k % 7)]


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    assert History(torch.tensor([1, 2]), torch.tensor([True, False])) == History([1, 2], [1, 0])


def test_a_refused_append_changes_nothing():
    history = History([1, 2])
    for bad, message in (([3, -4], "position 3 holds token id -4: expected 0"),
                         ([2**40], "position 2 holds token id 1099511627776"), ([0.5], "tokens are float64")):
        with pytest.raises(TokenError, match=message):
            history.append(bad)
        assert history == History([1, 2])
    history.append([2**40, -9], [False, False])              # placeholders are remembered as such
    assert history.participates.tolist() == [True, True, False, False]


@pytest.mark.parametrize("call, message", [
    (lambda h: h.rewind(3), "length is 3: expected 0 .. 2, the history's length"),
    (lambda h: h.rewind(-1), "length is -1: expected 0 .. 2"),
    (lambda h: h.fork(3), "length is 3"),
    (lambda h: h.lookback(3, 4), "position is 3"),
    (lambda h: h.sequence(0, 3), "stop is 3"),
    (lambda h: h.sequence(2, 1), "start is 2: expected at most stop = 1"),
])
def test_positions_that_are_not_there(call, message):
    with pytest.raises(TokenError, match=message):
        call(History([1, 2]))


def test_export():
    history = History([1, -1, 70000], [1, 0, 1])
    data = history.export_bytes()
    assert History.import_bytes(data) == history and len(data) == 16 + 3 * 5
    assert History.import_bytes(History().export_bytes()) == History()
    assert history != History([1, -1, 70000], [1, 0, 0]) and history != 5
    assert repr(history) == "History(3 tokens)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(history)


@pytest.mark.parametrize("spoil", [
    lambda data: b"", lambda data: data[:15], lambda data: data[:-1], lambda data: data + b"12345", lambda data: b"X" + data[1:],
    lambda data: data[:8] + b"\xff" * 8 + data[16:], lambda data: data[:-1] + b"\x02",
])
def test_what_is_no_export(spoil):
    with pytest.raises(FormatError):
        History.import_bytes(spoil(History([1, 2]).export_bytes()))
