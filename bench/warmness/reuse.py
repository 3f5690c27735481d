"""Hit rate of SSDGram's cache policy against its size, by n-gram order: the trace replayed through the directory alone, no reads.

One layer's bundles, decode order of a number of streams; what holds for one layer holds for all. The same compiled probe, touch and
insert as the store's. It starts empty and every request counts, so it is a lower bound for a store that runs longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ssdgram._compiled import compiled_lean
from ssdgram.cache import directory as cache_directory
from ssdgram.cache import sketch as cache_sketch
from ssdgram.cache.directory import probe, set_of
from ssdgram.cache.policy import insert, touch
from ssdgram.geometry import Geometry
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_shapes import decode, requests

STREAMS = 64


@compiled_lean
def replay_by_group(directory, sketch, x, groups, hits):  # type: ignore[no-untyped-def]
    """Ask for bundle after bundle as the planner would; hits int64 [groups] counts what was there."""
    sets = directory.shape[0]
    for i in range(len(x)):
        s = set_of(x[i], groups[i], sets)
        way = probe(directory, s, x[i], groups[i])
        if way >= 0:
            hits[groups[i]] += 1
            touch(directory, sketch, s, way)
        else:
            insert(directory, sketch, s, x[i], groups[i], i)


def curve(trace: Trace, geometry: Geometry, token_map: np.ndarray | None, bundle_bytes: int, streams: int = STREAMS) -> dict[str, Any]:
    """{streams, requests, distinct, points: [{bundles, bytes, hit_rate: {order: rate}}]}, sizes from 1/256 of the distinct bundles up.

    `bytes` is what that many bundles of every layer take.
    """
    asked_for = requests(decode(trace, streams, geometry.max_ngram - 1), geometry, token_map)
    x, groups = asked_for.x, asked_for.groups
    distinct = sum(len(np.unique(x[groups == group])) for group in range(geometry.orders))
    points = []
    asked = np.bincount(groups, minlength=geometry.orders)
    for share in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        capacity = max(64, distinct // share)
        sets = cache_directory.sets_for(capacity)
        hits = np.zeros(geometry.orders, np.int64)
        replay_by_group(cache_directory.allocate(sets), cache_sketch.allocate(sets), x, groups, hits)
        points.append({"bundles": capacity, "bytes": capacity * bundle_bytes * len(geometry.layers),
                       "hit_rate": {str(order + 2): float(hits[order] / asked[order]) for order in range(geometry.orders)},
                       "hit_rate_all": float(hits.sum() / asked.sum())})
    return {"streams": streams, "requests": len(x), "distinct": distinct, "points": points}
