"""The compiled hash against its twin in plain Python: the specification's words, with Python's integers."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ssdgram.kernels.hash import ENGRAM_RULE, OUTPUT, PARTICIPATES, PLE_RULE, STARTS, check_tokens, ngram_keys, rows_of_keys
from ssdgram.sequence import Sequence, flatten


def engram_twin(tokens, alive, position, table, multipliers, fill):
    """x of one position of a whole sequence, for every order (spec A5, A6)."""
    x, found = 0, []
    for s, multiplier in enumerate(multipliers):
        blocked = position - s < 0 or not all(alive[position - k] for k in range(s + 1))
        x ^= (fill if blocked else table[tokens[position - s]]) * multiplier
        found.append(x)
    return found[1:]


def ple_twin(tokens, alive, position, table, multipliers, eos):
    """x of one position of a whole sequence, for every order (spec B3); a DEAD token is all EOS and ends a segment."""
    x, found = 0, []
    for s, multiplier in enumerate(multipliers):
        inside = position - s >= 0 and all(alive[position - k] for k in range(s + 1)) and \
            all(tokens[position - k] != eos for k in range(1, s + 1))
        x ^= (tokens[position - s] if inside else eos) * multiplier
        found.append(x)
    return found[1:]


@st.composite
def models(draw):
    """(rule, vocabulary, table or empty, multipliers [L, n], filler)"""
    rule = draw(st.sampled_from([ENGRAM_RULE, PLE_RULE]))
    n, layers, vocabulary = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(2, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = random.integers(0, 7, vocabulary).astype(np.int32) if rule == ENGRAM_RULE else np.empty(0, np.int32)
    largest = (2**63 - 1) // max(6, vocabulary - 1)          # the largest that does not overflow
    multipliers = random.integers(0, largest, (layers, n), endpoint=True)
    fill = draw(st.integers(0, 6 if rule == ENGRAM_RULE else vocabulary - 1))
    return rule, vocabulary, table, multipliers, fill


def twin(model, tokens, alive, first):
    """Keys of positions `first` and on."""
    rule, _, table, multipliers, fill = model
    one = engram_twin if rule == ENGRAM_RULE else ple_twin
    tokens, alive, table = tokens.tolist(), alive.tolist(), table.tolist()
    keys = [[one(tokens, alive, p, table, row, fill) for row in multipliers.tolist()] for p in range(first, len(tokens))]
    return np.array(keys, object).reshape(len(tokens) - first, *np.subtract(multipliers.shape, (0, 1)))


def compiled_keys(model, sequences, cuts=()):
    rule, _, table, multipliers, fill = model
    flat_tokens, flat_flags, count = flatten(sequences, multipliers.shape[1])
    out = np.full((count + 1, multipliers.shape[0], multipliers.shape[1] - 1), -7)
    written = 0
    edges = [0, *sorted(min(cut, len(flat_tokens)) for cut in cuts), len(flat_tokens)]
    for start, stop in itertools.pairwise(edges):
        written += ngram_keys(flat_tokens, flat_flags, start, stop, table, multipliers, rule, fill, out[written:])
    assert written == count and (out[count:] == -7).all()
    return out[:count]


@st.composite
def texts(draw, vocabulary, longest=12):
    length = draw(st.integers(0, longest))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    alive = random.random(length) < draw(st.sampled_from([1.0, 0.8, 0.3]))
    tokens = random.integers(0, vocabulary, length)
    return np.where(alive, tokens, random.integers(-2**31, 2**31, length)), alive


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=400, deadline=None)
def test_keys_are_the_twins(data):
    """Several sequences, each a chunk behind a lookback of any length, hashed in slices cut anywhere."""
    model = data.draw(models())
    n = model[3].shape[1]
    sequences, expected = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        tokens, alive = data.draw(texts(model[1]))
        first = data.draw(st.integers(0, len(tokens)))
        kept = data.draw(st.integers(0, n - 2)) if first > 0 and data.draw(st.booleans()) else len(tokens)
        oldest = max(0, first - kept)                        # a lookback shorter than n - 1: the sequence starts there
        sequences.append(Sequence(tokens[first:], alive[first:], tokens[oldest:first], alive[oldest:first]))
        expected.append(twin(model, tokens[oldest:], alive[oldest:], first - oldest))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=4))
    found = compiled_keys(model, sequences, cuts)
    assert np.array_equal(found, np.concatenate(expected).astype(np.int64))
    assert (found >= 0).all()


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_chunking_gives_the_keys_of_the_whole(data):
    model = data.draw(models())
    tokens, alive = data.draw(texts(model[1], 30))
    whole = compiled_keys(model, [Sequence(tokens, alive)])
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))), len(tokens)]
    chunks = [Sequence(tokens[a:b], alive[a:b], tokens[:a], alive[:a]) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(compiled_keys(model, chunks), whole)


def test_a_dead_token_ends_a_ple_segment_and_hashes_as_all_eos():
    multipliers = np.array([[3, 5, 7]])
    part = [True, False, True]
    flat_tokens, flat_flags, _ = flatten([Sequence([4, -1, 6], part)], 3)
    out = np.empty((3, 1, 2), np.int64)
    ngram_keys(flat_tokens, flat_flags, 0, 3, np.empty(0, np.int32), multipliers, PLE_RULE, 1, out)
    assert out[:, 0].tolist() == [[4 * 3 ^ 5, 4 * 3 ^ 5 ^ 7], [3 ^ 5, 3 ^ 5 ^ 7], [6 * 3 ^ 5, 6 * 3 ^ 5 ^ 7]]


@pytest.mark.parametrize("bad, expected", [((), -1), ((3,), 3), ((7, 2), 2)])
def test_check_tokens(bad, expected):
    tokens = np.arange(8, dtype=np.int32)
    flags = np.full(8, PARTICIPATES, np.uint8)
    tokens[0], flags[0] = -5, STARTS | OUTPUT                # takes no part
    tokens[list(bad)] = -1
    assert check_tokens(tokens, flags, 8) == expected
    tokens[list(bad)] = 8
    assert check_tokens(tokens, flags, 8) == expected


@hypothesis.given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
@hypothesis.settings(max_examples=30, deadline=None)
def test_rows_are_the_twins(orders, heads, seed):
    random = np.random.default_rng(seed)
    keys = random.integers(0, 2**63 - 1, (5, 2, orders), endpoint=True)
    primes, offsets = random.integers(1, 2**40, (2, orders * heads)), random.integers(0, 2**40, (2, orders * heads))
    out = np.empty((5, 2, orders * heads), np.int64)
    rows_of_keys(keys, primes, offsets, out)
    for (t, l, c), row in np.ndenumerate(out):
        assert row == int(keys[t, l, c // heads]) % int(primes[l, c]) + int(offsets[l, c])


def test_a_compiled_function_can_call_it():
    """As the planner does: slices of a longer text, no Python in between."""
    from ssdgram._compiled import compiled

    def loop(tokens, flags, table, multipliers, out):        # type: ignore[no-untyped-def]
        done = 0
        for start in range(0, len(tokens), 128):
            done += ngram_keys(tokens, flags, start, min(start + 128, len(tokens)), table, multipliers, 0, 2, out[done:])
        return done

    table = np.arange(50, dtype=np.int32)
    tokens, flags, count = flatten([Sequence(np.arange(300) % 50)], 4)
    multipliers = np.arange(1, 9).reshape(2, 4)
    whole, sliced = np.empty((300, 2, 3), np.int64), np.empty((300, 2, 3), np.int64)
    assert compiled(loop)(tokens, flags, table, multipliers, sliced) == count == 300
    ngram_keys(tokens, flags, 0, 300, table, multipliers, 0, 2, whole)
    assert np.array_equal(sliced, whole)
