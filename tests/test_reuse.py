"""Stack distances against a brute-force stack, marks against sets, samples within their error, LRU curves against an LRU cache."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.errors import ConfigError
from ssdgram.tools.reuse import NEVER, lru_curve, number_bundles, sample, stack_distances
from ssdgram.tools.trace_shapes import Requests

PAIRS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=60)


def requests_of(pairs, batch=1, orders=3):
    x, groups = np.array([x for x, _ in pairs], np.int64), np.array([group for _, group in pairs], np.uint8)
    return Requests(x, groups, np.append(np.arange(0, len(pairs), batch), len(pairs)), orders)


def zipf(count, batch, seed=0, orders=3, wide=50_000):
    random = np.random.default_rng(seed)
    x = random.zipf(1.2, count) % wide
    return Requests(x.astype(np.int64), random.integers(0, orders, count).astype(np.uint8),
                    np.append(np.arange(0, count, batch), count), orders)


def plain_distances(keys):
    """By a list that has the last used first."""
    stack, found = [], []
    for key in keys:
        found.append(stack.index(key) if key in stack else NEVER)
        if key in stack:
            stack.remove(key)
        stack.insert(0, key)
    return found


@settings(deadline=None, max_examples=200)
@given(PAIRS)
def test_distances_are_those_of_a_stack(pairs):
    asked = requests_of(pairs)
    numbers, distinct = number_bundles(asked.x, asked.groups)
    assert distinct == len(set(pairs)) and numbers.tolist() == [list(dict.fromkeys(pairs)).index(pair) for pair in pairs]
    assert stack_distances(numbers, distinct).tolist() == plain_distances(pairs)


@settings(deadline=None, max_examples=100)
@given(PAIRS, st.integers(1, 7))
def test_a_batch_asks_for_a_bundle_once(pairs, batch):
    taken = sample(requests_of(pairs, batch))
    wanted, distinct = [], []
    for begin in range(0, len(pairs), batch):
        seen = set()
        for pair in pairs[begin:begin + batch]:
            wanted.append(pair not in seen)
            seen.add(pair)
        distinct.append([sum(group == order for _, group in seen) for order in range(3)])
    assert taken.first.tolist() == wanted and taken.distinct.tolist() == distinct and taken.rate == 1


def lru_hits(keys, firsts, capacity, warm):
    """An LRU cache that is asked once a batch: (hits, requests) from request `warm` on."""
    cache, hits, asked = OrderedDict(), 0, 0
    for number, key in enumerate(keys):
        if not firsts[number]:
            continue
        asked += number >= warm
        hits += number >= warm and key in cache
        cache[key] = cache.pop(key, None)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits, asked


@settings(deadline=None, max_examples=60)
@given(PAIRS.filter(bool), st.integers(1, 5), st.integers(1, 9), st.integers(0, 4))
def test_one_pass_gives_the_hits_of_every_lru_cache(pairs, batch, capacity, warm):
    taken = sample(requests_of(pairs, batch))
    warm = min(warm, len(taken.distinct) - 1)
    hits, asked = lru_hits(pairs, taken.first.tolist(), capacity, warm * batch)
    curve = lru_curve(taken, warm)
    assert curve.hit_rate(capacity) == pytest.approx(hits / asked) and curve.hits(capacity) == pytest.approx(hits)


def test_hit_rates_by_order_add_up():
    curve = lru_curve(sample(zipf(20_000, 32)), 100)
    for capacity in (10, 100, 1000, 10**9):
        rates = curve.hit_rates(capacity)
        assert (rates * curve.asked).sum() / curve.asked.sum() == pytest.approx(curve.hit_rate(capacity))
    assert curve.hit_rate(0) == 0


def test_bundles_for_a_share_of_the_hits_are_the_least():
    curve = lru_curve(sample(zipf(20_000, 32)))
    most = curve.hits(10**9)
    for share in (0.3, 0.9, 1.0):
        bundles = curve.bundles_for(share)
        assert curve.hits(bundles) >= share * most - 1e-6 and curve.hits(bundles - 1) < share * most + 1e-6
    assert lru_curve(sample(requests_of([(1, 0), (2, 0)]))).bundles_for(0.5) == 0


@pytest.mark.parametrize("rate", [0.3, 0.1])
def test_a_sample_keeps_its_share_and_its_error(rate):
    """An LRU curve from a sample of some ten thousand bundles is within 0.02 of the exact one (SHARDS saw less than that)."""
    random = np.random.default_rng(3)
    asked = Requests((1e6 * random.random(400_000) ** 6).astype(np.int64), random.integers(0, 3, 400_000).astype(np.uint8),
                     np.append(np.arange(0, 400_000, 64), 400_000), 3)
    exact, small = lru_curve(sample(asked)), lru_curve(sample(asked, rate))
    distinct = len({*zip(asked.x.tolist(), asked.groups.tolist())})
    taken = sample(asked, rate)
    kept = len({*zip(taken.x.tolist(), taken.groups.tolist())})
    assert abs(kept / distinct - rate) < 5 * np.sqrt(rate * (1 - rate) / distinct)
    for capacity in (1000, 10_000, 100_000):
        assert abs(exact.hit_rate(capacity) - small.hit_rate(capacity)) < 0.02, capacity


def test_a_sample_has_all_requests_of_its_bundles_in_their_batches():
    asked = zipf(5_000, 50)
    taken = sample(asked, 0.25)
    kept = {*zip(taken.x.tolist(), taken.groups.tolist())}
    for batch in range(len(asked.bounds) - 1):
        begin, end = asked.bounds[batch:batch + 2]
        wanted = [pair for pair in zip(asked.x[begin:end].tolist(), asked.groups[begin:end].tolist()) if pair in kept]
        begin, end = taken.bounds[batch:batch + 2]
        assert list(zip(taken.x[begin:end].tolist(), taken.groups[begin:end].tolist())) == wanted
    assert (taken.distinct == sample(asked).distinct).all(), "counted over all bundles"


def test_nothing_asked_for_is_no_division_by_zero():
    curve = lru_curve(sample(requests_of([])))
    assert np.isnan(curve.hit_rate(10)) and np.isnan(curve.hit_rates(10)).all() and curve.hits(10) == 0


@pytest.mark.parametrize("rate", [0, -1, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(ConfigError, match="at most 1"):
        sample(zipf(10, 1), rate)
