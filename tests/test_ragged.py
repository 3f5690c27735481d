"""Sequence.ragged: many requests' chunks as one Sequence, equal to a list of Sequences; deferred ones; bad ids' places."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram import Sequence, TokenError
from ssdgram.kernels.hash import OUTPUT
from ssdgram.sequence import bad_id, flatten


def keys_of(geometry, token_map, sequences):
    """Keys of all positions by the compiled hash over the flat arrays."""
    from ssdgram.kernels.hash import ngram_keys

    tokens, flags, positions = flatten(sequences, geometry.max_ngram)
    out = np.empty((positions, len(geometry.layers), geometry.orders), np.int64)
    count = ngram_keys(tokens, flags, 0, len(tokens), token_map, geometry.multiplier_array, geometry.rule, geometry.fill(token_map), out)
    assert count == positions
    return out


@st.composite
def steps(draw):
    """Requests of a step: their tokens so far, where the chunk begins, which positions take part."""
    requests = []
    for _ in range(draw(st.integers(0, 6))):
        total = draw(st.integers(0, 9))
        tokens = draw(st.lists(st.integers(0, 40), min_size=total, max_size=total))
        part = draw(st.lists(st.booleans(), min_size=total, max_size=total))
        requests.append((np.array(tokens, np.int64), np.array(part, bool), draw(st.integers(0, total))))
    return requests


def ragged_of(requests, width=3):
    lengths = [len(tokens) - start for tokens, _, start in requests]
    windows, valid, part = (np.zeros((len(requests), width), kind) for kind in (np.int64, bool, bool))
    for r, (tokens, takes_part, start) in enumerate(requests):
        for back in range(1, min(start, width) + 1):
            windows[r, width - back], valid[r, width - back] = tokens[start - back], True
            part[r, width - back] = takes_part[start - back]
    own = [tokens[start:] for tokens, _, start in requests]
    own_part = [takes_part[start:] for _, takes_part, start in requests]
    return Sequence.ragged(np.concatenate([np.empty(0, np.int64), *own]), lengths, windows, valid,
                           participates=np.concatenate([np.empty(0, bool), *own_part]), windows_participate=part)


@settings(max_examples=200, deadline=None)
@given(steps())
def test_a_ragged_sequence_hashes_as_the_list_of_its_requests(engram, requests):
    one = ragged_of(requests)
    many = [Sequence(tokens[start:], part[start:], tokens[:start], part[:start]) for tokens, part, start in requests]
    assert len(one) == sum(map(len, many)) == int((one.flat_flags & OUTPUT != 0).sum())
    np.testing.assert_array_equal(keys_of(engram.geometry, engram.token_map, [one]), keys_of(engram.geometry, engram.token_map, many))


def test_two_ragged_sequences_in_a_list_do_not_see_each_other(engram):
    first, second = Sequence.ragged([5, 6], [2]), Sequence.ragged([7], [1], [[1, 2, 3]], [[False, True, True]])
    want = [Sequence([5, 6]), Sequence([7], None, [2, 3])]
    np.testing.assert_array_equal(keys_of(engram.geometry, engram.token_map, [first, second]),
                                  keys_of(engram.geometry, engram.token_map, want))


def test_a_ragged_prefetch_serves_the_rows_of_every_request(engram, served):
    store = served(engram)
    with store.prefetch(Sequence.ragged([1, 2, 3, 4], [3, 1], [[0, 0, 9], [7, 8, 9]], [[False, False, True], [True] * 3])) as batch, \
            store.prefetch([Sequence([1, 2, 3], None, [9]), Sequence([4], None, [7, 8, 9])]) as want:
        for layer in store.layers:
            np.testing.assert_array_equal(batch.packed(layer).numpy(), want.packed(layer).numpy())
        assert batch.ready() and batch.ready(store.layers[0])


def test_ids_where_nothing_takes_part_are_never_looked_at():
    one = Sequence.ragged([-1, 2**40], [1, 1], [[-5], [2**50]], [[False], [True]], participates=[False, False],
                          windows_participate=[[True], [False]])
    assert (one.flat_flags & 1).sum() == 0


def test_a_bad_id_is_named_by_request_and_position(engram, served):
    store = served(engram)
    with pytest.raises(TokenError, match=r"position 1 of request 2 holds token id -7"):
        store.prefetch(Sequence.ragged([1, 2, 3, -7], [2, 0, 2]))
    with pytest.raises(TokenError, match=r"lookback position -1 .* of request 1 holds token id 999999999999"):
        store.prefetch(Sequence.ragged([1, 2], [1, 1], [[1], [999999999999]]))
    with pytest.raises(TokenError, match=r"position 0 of request 0 of sequence 1"):
        raise bad_id([Sequence([1]), Sequence.ragged([-1], [1])], 4, 1, 50)


@pytest.mark.parametrize(("arguments", "message"), [
    (([1, 2], [1]), "whose sum is the 2 tokens"),
    (([1], [-1, 2]), "numbers from 0 on"),
    (([1], [1], [[1, 2, 3, 4]] * 1), None),
    (([1], [1], [1]), r"windows is int64 \[1\]"),
    (([1], [1], [[1], [2]]), r"windows is int64 \[2, 1\]"),
    (([1], [1], [[1.5]]), "windows is float64"),
    (([1], [1], [[1]], [[True, False]]), "valid is .*: expected the windows' shape"),
    (([[1]], [1]), "tokens are"),
])
def test_wrong_shapes_are_refused(arguments, message):
    if message is None:
        assert len(Sequence.ragged(*arguments)) == 1         # MAX_NGRAM - 1 is wider than three
    else:
        with pytest.raises(TokenError, match=message):
            Sequence.ragged(*arguments)


def test_a_deferred_sequence_is_filled_when_it_is_submitted(engram, served):
    def fill(tokens, flags, mark):
        assert mark is None                                  # it is called in place: nobody waits for a word
        tokens[:] = tokens.new_tensor([9, 4, 5])
        flags[:] = flags.new_tensor([1 | 2, 1 | 4, 1 | 4])

    store = served(engram)
    with store.prefetch(Sequence.deferred(2, 3, fill)) as batch, store.prefetch(Sequence([4, 5], None, [9])) as want:
        for layer in store.layers:
            np.testing.assert_array_equal(batch.packed(layer).numpy(), want.packed(layer).numpy())


def test_a_deferred_sequence_is_a_batch_of_its_own(engram, served):
    from ssdgram import ConfigError

    with pytest.raises(ConfigError, match="a batch of its own"):
        served(engram).prefetch([Sequence.deferred(1, 1, lambda *_: None), Sequence([1])])
