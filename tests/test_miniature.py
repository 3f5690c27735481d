"""Miniatures: at rate 1 what a real store misses, at smaller rates nearly that; slots that run out; batches held ahead."""

import numpy as np
import pytest
from made_stores import until

from ssdgram.tools.miniature import simulate
from ssdgram.tools.reuse import sample
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_replay import replay
from ssdgram.tools.trace_shapes import Requests, decode, prefill, requests


def text_like(count, vocabulary, seed=0):
    """Documents of tokens with the repeats of text: words of one to four tokens, the frequent ones often."""
    random = np.random.default_rng(seed)
    words = [random.integers(3, vocabulary, random.integers(1, 5)).astype(np.int32) for _ in range(3000)]
    tokens = np.concatenate([words[k] for k in random.zipf(1.3, count) % len(words)])[:count]
    starts = np.append(np.arange(0, len(tokens), 700), len(tokens))
    return Trace.of_documents(tokens, starts, {})


def settled(store):
    """The batches that were released have left."""
    assert until(lambda: store.stats().slots_in_use == len(store._plan.groups))


@pytest.mark.parametrize(("shape", "size"), [(decode, 16), (prefill, 96)])
def test_at_rate_one_it_misses_what_a_store_of_one_layer_misses(engram, served, shape, size):
    trace = text_like(12_000, engram.vocabulary)
    batches = shape(trace, size)
    store = served(engram, dram=engram.dram_for(900, layers=[1]), layers=[1])
    wanted = []
    for number in range(len(batches)):
        done = replay(store, batches.part(number, number + 1))
        wanted.append([done.misses[order] for order in (2, 3, 4)])
        settled(store)
    taken = sample(requests(batches, engram.geometry, engram.token_map))
    dead = requests(prefill(Trace.of_documents(np.array([-1], np.int32), np.array([0, 1]), {}), 1), engram.geometry, engram.token_map)
    assert len(dead.x) == 3
    ours = simulate(taken, store._sizes.slots - len(dead.x), store._sizes.sets, 1)
    assert ours.refused == 0 and not ours.noise.any()
    # the store's dead bundles keep three ways of its sets: some sets are smaller than the miniature's
    assert np.abs(ours.by_batch.sum(axis=0) - np.sum(wanted, axis=0)).max() <= 0.01 * np.sum(wanted)
    assert np.mean(np.abs(ours.by_batch - np.array(wanted))) < 0.2


def zipf(count, batch, seed=0):
    random = np.random.default_rng(seed)
    x = (random.zipf(1.15, count) % (1 << 20)).astype(np.int64)
    return Requests(x, random.integers(0, 3, count).astype(np.uint8), np.append(np.arange(0, count, batch), count), 3)


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_a_smaller_one_misses_nearly_as_much(rate):
    asked = zipf(300_000, 192)
    whole, small = sample(asked), sample(asked, rate)
    warm = len(asked.bounds) // 2
    for slots in (4_000, 32_000):
        exact = simulate(whole, slots + slots // 64, slots // 16, 1)
        ours = simulate(small, slots + slots // 64, slots // 16, 1)
        assert abs(ours.hit_rate(small, warm) - exact.hit_rate(whole, warm)) < 0.02
        assert np.abs(ours.hit_rates(small, warm) - exact.hit_rates(whole, warm)).max() < 0.03
        assert ours.by_batch.sum() == pytest.approx(exact.by_batch.sum(), rel=0.03)
        assert ours.noise.mean() == pytest.approx(exact.by_batch.sum(axis=1).mean() * (1 - rate) / rate, rel=0.1)


def test_two_layers_share_the_slots():
    asked = zipf(50_000, 192)
    taken = sample(asked)
    one, two = simulate(taken, 4_160, 256, 1), simulate(taken, 8_320, 512, 2)
    assert (one.by_batch == two.by_batch).all()


def test_a_batch_larger_than_the_cache_is_seen():
    x = np.arange(3_000, dtype=np.int64)
    taken = sample(Requests(x, np.zeros(3_000, np.uint8), np.array([0, 1_000, 3_000]), 3))
    ours = simulate(taken, 1_100, 64, 1)
    assert ours.refused == 3_000 - 1_000 - 1_100 and ours.by_batch.sum() == 3_000


def test_batches_ahead_hold_their_slots():
    asked = zipf(60_000, 600)
    taken = sample(asked)
    counts = [simulate(taken, 1_100, 64, 1, ahead).by_batch.sum() for ahead in (0, 1)]
    assert counts[1] > counts[0]
