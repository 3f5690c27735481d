"""How a trace uses bundles again: a sample of its requests, stack distances, and hit rates of every cache size from one pass.

    Requests ──sample(rate)──► Sample ──lru_curve──► Curve: hit rate of an LRU cache of any size, by order

A stack distance is the number of distinct bundles asked for since the last request for the same one; an LRU cache of C bundles
hits the requests whose distance is below C (Mattson, Gecsei, Slutz and Traiger 1970). The sample keeps the bundles whose hash is
below a limit, all of their requests, so distances in it are `rate` times as long (SHARDS: Waldspurger, Park, Garthwaite and Ahmad
2015), and misses are counted against the exact number of requests, not the sample's (their SHARDS-adj). As a store counts:
requests are the distinct bundles of a batch. It knows no budget and no policy; `miniature` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssdgram._compiled import compiled, compiled_lean
from ssdgram.cache.directory import mix
from ssdgram.errors import ConfigError
from ssdgram.tools.trace_shapes import Requests

NEVER = -1                                                   # distance of the first request for a bundle
_ALL = 1 << 32


@dataclass(frozen=True)
class Sample:
    """Requests of a share `rate` of the bundles: x int64, groups uint8, `first` uint8 (1: the batch asks for it the first time).

    Batch b's are [bounds[b], bounds[b + 1]). `distinct` int64 [B, orders]: distinct bundles of each batch, of all, not of the sample.
    """

    x: np.ndarray
    groups: np.ndarray
    first: np.ndarray
    bounds: np.ndarray
    distinct: np.ndarray
    rate: float

    @property
    def orders(self) -> int:
        """N-gram orders."""
        return int(self.distinct.shape[1])


@dataclass(frozen=True)
class Curve:
    """Hit rates of LRU caches. `distances[order]`: sorted distances of requests again, in bundles of one layer, at full rate;
    `asked[order]`: requests, of all bundles, times the sample's rate."""

    distances: tuple[np.ndarray, ...]
    asked: np.ndarray
    sampled: np.ndarray                                      # of these, how many the sample had

    def hit_rates(self, bundles: float) -> np.ndarray:
        """float64 [orders]: hit rates with room for `bundles` bundles of one layer; nan for an order nobody asked for."""
        hits = np.array([np.searchsorted(distances, bundles, side="left") for distances in self.distances], np.float64)
        return self._of(hits, self.asked, self.sampled)

    def hit_rate(self, bundles: float) -> float:
        """Over all orders."""
        hits = sum(float(np.searchsorted(distances, bundles, side="left")) for distances in self.distances)
        return float(self._of(np.array([hits]), self.asked.sum(keepdims=True), self.sampled.sum(keepdims=True))[0])

    def hits(self, bundles: float) -> float:
        """Requests that such a cache would hit, of all bundles, times the sample's rate."""
        return self.hit_rate(bundles) * float(self.asked.sum()) if self.asked.sum() else 0.0

    @staticmethod
    def _of(hits: np.ndarray, asked: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.clip(1 - (sampled - hits) / asked, 0, 1)

    def bundles_for(self, share: float) -> int:
        """The least bundles of one layer that give `share` of the hits which a cache without end has; 0 if it has none."""
        whole = np.sort(np.concatenate([*self.distances, np.empty(0, np.int64)]))
        if len(whole) == 0:
            return 0
        return int(whole[min(len(whole) - 1, max(0, int(np.ceil(share * len(whole))) - 1))]) + 1


# ---------------------------------------------------------------- sampling


@compiled_lean
def chosen(x, group, limit):  # type: ignore[no-untyped-def]
    """Whether a sample that keeps hashes below `limit` (of 2**32) keeps the bundle; independent of its set and fingerprint."""
    h = mix(x, group) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64(h >> np.uint64(32)) < limit


@compiled
def _mark_first(x, groups, bounds, first, distinct):  # type: ignore[no-untyped-def]
    """first[i] = 1 where the batch of request i has not asked for its bundle before; count these by batch and order."""
    longest = 1
    for b in range(len(bounds) - 1):
        longest = max(longest, bounds[b + 1] - bounds[b])
    cells = 4
    while cells < 2 * longest:
        cells *= 2
    last = np.uint64(cells - 1)
    owner, place = np.full(cells, -1, np.int64), np.zeros(cells, np.int64)
    for b in range(len(bounds) - 1):
        for i in range(bounds[b], bounds[b + 1]):
            cell = mix(x[i], groups[i]) & last
            while owner[cell] == b and (x[place[cell]] != x[i] or groups[place[cell]] != groups[i]):
                cell = (cell + np.uint64(1)) & last
            if owner[cell] == b:
                first[i] = 0
            else:
                owner[cell], place[cell], first[i] = b, i, 1
                distinct[b, groups[i] % distinct.shape[1]] += 1


@compiled_lean
def _choose(x, groups, limit, keep):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        keep[i] = chosen(x[i], groups[i], limit)


def sample(requests: Requests, rate: float = 1.0) -> Sample:
    """The requests of a share `rate` (0 < rate <= 1) of the bundles."""
    if not 0 < rate <= 1:
        raise ConfigError(f"a sample of {rate} of the bundles: expected more than 0 and at most 1")
    first = np.empty(len(requests.x), np.uint8)
    distinct = np.zeros((len(requests.bounds) - 1, requests.orders), np.int64)
    _mark_first(requests.x, requests.groups, requests.bounds, first, distinct)
    limit = max(1, round(rate * _ALL))
    if limit == _ALL:
        return Sample(requests.x, requests.groups, first, requests.bounds, distinct, 1.0)
    keep = np.empty(len(first), np.bool_)
    _choose(requests.x, requests.groups, limit, keep)
    bounds = np.concatenate([[0], np.cumsum(keep)])[requests.bounds]
    return Sample(requests.x[keep], requests.groups[keep], first[keep], bounds, distinct, limit / _ALL)


# ---------------------------------------------------------------- stack distances


@compiled
def number_bundles(x, groups):  # type: ignore[no-untyped-def]
    """The requests' bundles as numbers 0, 1, ... in the order of their first requests: (int64 [n], how many)."""
    cells = 4
    while cells < 2 * len(x):
        cells *= 2
    last = np.uint64(cells - 1)
    place, numbers, count = np.full(cells, -1, np.int64), np.empty(len(x), np.int64), 0
    for i in range(len(x)):
        cell = mix(x[i], groups[i]) & last
        while place[cell] >= 0 and (x[place[cell]] != x[i] or groups[place[cell]] != groups[i]):
            cell = (cell + np.uint64(1)) & last
        if place[cell] < 0:
            place[cell], numbers[i] = i, count
            count += 1
        else:
            numbers[i] = numbers[place[cell]]
    return numbers, count


@compiled
def stack_distances(numbers, distinct):  # type: ignore[no-untyped-def]
    """Distinct bundles between each request and the last one for the same bundle, NEVER for the first: int64 [n].

    A tree of sums (Fenwick 1994) over the positions that are some bundle's last request: O(n log n), one pass.
    """
    count, marked = len(numbers), 0
    latest, sums, out = np.full(distinct, NEVER, np.int64), np.zeros(count + 1, np.int32), np.empty(count, np.int64)
    for i in range(count):
        before = latest[numbers[i]]
        if before < 0:
            out[i] = NEVER
            marked += 1
        else:
            up_to, k = 0, before + 1
            while k > 0:
                up_to += sums[k]
                k -= k & -k
            out[i] = marked - up_to
            k = before + 1
            while k <= count:
                sums[k] -= 1
                k += k & -k
        k = i + 1
        while k <= count:
            sums[k] += 1
            k += k & -k
        latest[numbers[i]] = i
    return out


def lru_curve(taken: Sample, warm: int = 0) -> Curve:
    """Hit rates of LRU caches over the batches from `warm` on, those before having filled them."""
    once = taken.first != 0
    groups = taken.groups[once]
    counted = np.repeat(np.arange(len(taken.bounds) - 1) >= warm, np.diff(taken.bounds))[once]
    numbers, distinct = number_bundles(taken.x[once], groups)
    distances = stack_distances(numbers, distinct)
    orders = groups % taken.orders
    of_order = [distances[counted & (orders == order)] for order in range(taken.orders)]
    asked = taken.rate * taken.distinct[warm:].sum(axis=0)
    again = tuple(np.sort((found[found != NEVER] / taken.rate).astype(np.int64)) for found in of_order)
    return Curve(again, asked, np.array([len(found) for found in of_order], np.int64))
