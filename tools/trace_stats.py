"""What is in a trace: reuse by n-gram order, working set, duplicates within batches, and what a prefix cache leaves of the reuse.

Every figure is of one layer, for which all stand. A *row cache* (ours) finds bundles again wherever they come from; an engine's
*prefix cache* skips the positions of a prompt whose beginning it has computed before, so these never ask for rows, and reuse
that only they had is none of ours. It knows no budget and no policy. Nothing is drawn at random.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ssdgram._compiled import compiled
from ssdgram.geometry import Geometry
from ssdgram.tools.reuse import Curve, lru_curve, sample
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_shapes import Batches, Requests, decode, prefill, recorded, recorded_requests, requests

STREAMS, CHUNKS = (1, 16, 64, 256), (512, 2048, 8192)        # shapes whose duplicates are counted
ORDER_STREAMS = 64                                           # the order of requests that distances are of
PREFIX_BLOCK = 16                                            # tokens that an engine's prefix cache keeps or loses together
SHARES = (0.5, 0.8, 0.9, 0.99)                               # of the hits of a cache without end
SAMPLED = 4_000_000                                          # requests whose distances are computed; more are sampled


@compiled
def _shared_prefixes(values, starts, fresh, block, covered):  # type: ignore[no-untyped-def]
    """covered[s]: leading positions of sequence s, in whole blocks, that an earlier sequence began with too.

    values int64 [N, W]: what a position is known by. fresh [S]: whether the sequence begins a request.
    """
    cells = 4
    while cells < 2 * (len(values) // block + len(covered)):
        cells *= 2
    last, seen = np.uint64(cells - 1), np.zeros(cells, np.uint64)
    for s in range(len(covered)):
        if not fresh[s]:
            continue
        h, known = np.uint64(0x9E3779B97F4A7C15), True
        for i in range(starts[s], starts[s + 1]):
            for k in range(values.shape[1]):
                h = (h ^ np.uint64(values[i, k] + 2)) * np.uint64(0xD6E8FEB86659FD93)
                h ^= h >> np.uint64(32)
            if (i + 1 - starts[s]) % block == 0:
                name = h | np.uint64(1)                      # 0 is an empty cell
                cell = (h >> np.uint64(20)) & last
                while seen[cell] != 0 and seen[cell] != name:
                    cell = (cell + np.uint64(1)) & last
                if seen[cell] == 0:
                    seen[cell], known = name, False
                elif known:
                    covered[s] = i + 1 - starts[s]


def shared_prefixes(trace: Trace, block: int = PREFIX_BLOCK) -> np.ndarray:
    """For each sequence, the leading positions that an unbounded prefix cache of blocks of `block` tokens would have: int64 [S].

    0 for a sequence that has lookback: it goes on with a request, or its engine's prefix cache has already had its effect.
    """
    values = trace.tokens.astype(np.int64).reshape(-1, 1) if trace.keys is None else trace.keys
    covered = np.zeros(len(trace.lookback), np.int64)
    _shared_prefixes(values, trace.starts, trace.lookback == 0, block, covered)
    return covered


def _covered_positions(trace: Trace, covered: np.ndarray) -> np.ndarray:
    """bool [positions that ask], in the trace's order: whether the position lies in a shared prefix."""
    lengths = np.diff(trace.starts)
    place = np.arange(int(trace.starts[-1])) - np.repeat(trace.starts[:-1], lengths)
    inside = place < np.repeat(covered, lengths)
    return inside if trace.keys is not None else inside[place >= np.repeat(trace.lookback, lengths)]


def _without(asked: Requests, drop: np.ndarray) -> Requests:
    """The requests of the positions that `drop` leaves."""
    keep = np.repeat(~drop, asked.orders)
    return Requests(asked.x[keep], asked.groups[keep], np.concatenate([[0], np.cumsum(keep)])[asked.bounds], asked.orders)


def _in_order(trace: Trace, geometry: Geometry | None, token_map: np.ndarray | None, streams: int) -> Requests:
    """Requests in the order in which reuse is looked at: as recorded, or as that many decode streams would ask."""
    if geometry is None:
        return recorded_requests(trace)
    return requests(recorded(trace) if trace.batches is not None else decode(trace, streams, geometry.orders), geometry, token_map)


def duplicates(batches: Batches, geometry: Geometry, token_map: np.ndarray | None) -> dict[int, float]:
    """By order (2, 3, ...): share of a batch's requests that are for a bundle it has asked for already; over all batches."""
    return _duplicates(requests(batches, geometry, token_map))


def _duplicates(asked: Requests) -> dict[int, float]:
    distinct = sample(asked).distinct.sum(axis=0)
    each = max(1, len(asked.x) // asked.orders)
    return {order + 2: round(1 - int(distinct[order]) / each, 4) for order in range(asked.orders)}


def statistics(trace: Trace, geometry: Geometry | None, token_map: np.ndarray | None, bundle_bytes: int = 0,
               block: int = PREFIX_BLOCK) -> dict[str, Any]:
    """The figures of a trace as JSON values. `geometry`: None for a trace of keys. `bundle_bytes`: for sizes in bytes, 0: none."""
    asked = _in_order(trace, geometry, token_map, ORDER_STREAMS)
    each = len(asked.x) // asked.orders
    whole = sample(Requests(asked.x, asked.groups, np.array([0, len(asked.x)]), asked.orders))
    distinct = whole.distinct[0]
    orders = {order + 2: {"requests": each, "distinct": int(distinct[order]), "again": round(1 - distinct[order] / max(1, each), 4)}
              for order in range(asked.orders)}
    curve = lru_curve(sample(asked, min(1.0, SAMPLED / max(1, len(asked.x)))))
    result: dict[str, Any] = {
        "sha256": trace.sha256, "kind": trace.kind, "recorded": trace.batches is not None, "sequences": len(trace.lookback),
        "positions": trace.positions, "orders": orders, "distinct": int(distinct.sum()),
        "working_set": [_working_set(curve, share, bundle_bytes) for share in SHARES],
    }
    result["duplicates"] = {}
    if trace.kind == "tokens" and trace.batches is None and geometry is not None:
        for streams in STREAMS:
            result["duplicates"][f"decode {streams}"] = duplicates(decode(trace, streams, geometry.orders), geometry, token_map)
        for chunk in CHUNKS:
            result["duplicates"][f"prefill {chunk}"] = duplicates(prefill(trace, chunk, geometry.orders), geometry, token_map)
    else:
        result["duplicates"]["recorded"] = _duplicates(asked)
    result["prefix"] = _prefix_effect(trace, geometry, token_map, block)
    return result


def _working_set(curve: Curve, share: float, bundle_bytes: int) -> dict[str, Any]:
    bundles = curve.bundles_for(share)
    return {"share": share, "bundles": bundles, "hit_rate": round(curve.hit_rate(bundles), 4)} | (
        {"bytes": bundles * bundle_bytes} if bundle_bytes else {})


def _prefix_effect(trace: Trace, geometry: Geometry | None, token_map: np.ndarray | None, block: int) -> dict[str, Any]:
    """Hit rates of row caches of several sizes, with all positions and without those that a prefix cache serves.

    In the trace's own order, a request after the other: prompts are computed whole, and so are their prefixes.
    """
    covered = shared_prefixes(trace, block)
    drop = _covered_positions(trace, covered)
    if trace.batches is not None or geometry is None:
        asked = _in_order(trace, geometry, token_map, 1)
    else:
        whole = requests(prefill(trace, CHUNKS[1], geometry.orders), geometry, token_map)
        asked = Requests(whole.x, whole.groups, trace.starts * whole.orders, whole.orders)     # a batch is a prompt
    rate = min(1.0, SAMPLED / max(1, len(asked.x)))
    with_all, left = lru_curve(sample(asked, rate)), lru_curve(sample(_without(asked, drop), rate))
    largest = sum(len(found) for found in with_all.distances) and int(max(found[-1] for found in with_all.distances if len(found))) + 1
    sizes = sorted({max(1, largest // part) for part in (64, 8, 1)})
    rows = []
    for size in sizes:
        hits, remaining = with_all.hits(size), left.hits(size)
        rows.append({"bundles": size, "all": round(with_all.hit_rate(size), 4), "behind_prefix_cache": round(left.hit_rate(size), 4),
                     "reuse_gone": round(1 - remaining / hits, 4) if hits else 0.0})
    return {"block": block, "covered": round(float(drop.mean()), 4) if len(drop) else 0.0, "sequences": int((covered > 0).sum()),
            "row_cache": rows}


