"""A step's rows into fixed tensors by one call: the same as a batch's, whatever the step's size, whatever it is cut into."""

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
        assert sum(map(len, cut)) == 101 and all(len(part) <= size for part, size in zip(cut, [*sizes, *[sizes[-1]] * 101]))
        assert np.array_equal(np.concatenate([store._keys_of(*flatten([part], n)[:2]) for part in cut]), store._keys_of(
            *flatten([whole], n)[:2]))


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
    one = dict(list(buffers(store, 4).items())[:1])
    with pytest.raises(ssdgram.ConfigError, match="expected those of the store"):
        store.staging(one)
    with pytest.raises(ssdgram.ConfigError, match="expected contiguous"):
        store.staging({layer: target[:, :, :-1] for layer, target in buffers(store, 4).items()})
    store.close()
    with pytest.raises(ssdgram.StoreClosedError):
        staging.fill(engram.tokens(3))
