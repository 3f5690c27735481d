"""Drive a store with the batches of a trace, at their own pace or an engine's, and see what it did.

    step b    prefetch(b + ahead) ─ ... ─ layer 1 wanted ─ stalled? ─ ... ─ layer 14 wanted ─ stalled? ─ ... ─ release(b)

The pace is that of a model whose step takes `step_s` if nothing stalls, and which wants a layer's rows `slack_s[layer]` after the
step began; a stall delays all that follows. No work per token or row is done here. It knows the public face of a store only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssdgram.errors import ConfigError
from ssdgram.tools.trace_shapes import Batches

if TYPE_CHECKING:
    from ssdgram.batch import Batch
    from ssdgram.store import Store

WAIT_S = 120.0                                               # for one layer of one batch


@dataclass(frozen=True)
class Pace:
    """Seconds of a step without stalls, and from its beginning to where each served layer's rows are wanted."""

    step_s: float
    slack_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.step_s < 0 or any(slack < 0 or slack > self.step_s for slack in self.slack_s) or list(self.slack_s) != sorted(self.slack_s):
            raise ConfigError(f"a step of {self.step_s} s with rows wanted after {list(self.slack_s)} s: expected ascending times "
                              f"within the step")


@dataclass(frozen=True)
class Replayed:
    """What happened, batch by batch. Times in seconds."""

    positions: np.ndarray                                    # int64 [B]
    lookup_s: np.ndarray                                     # float64 [B]: from the call to the last layer ready in its slots
    stall_s: np.ndarray                                      # float64 [B]: what the consumer waited, all layers
    reads: np.ndarray                                        # int64 [B]: page reads
    hits: dict[int, int]                                     # by order: distinct bundles of a batch that were there (or under way)
    misses: dict[int, int]
    repeats: dict[int, int]
    elapsed_s: float

    def hit_rate(self, order: int | None = None) -> float:
        """Share of the distinct bundles of the batches that needed no read of their own; nan if there were none."""
        orders = list(self.hits) if order is None else [order]
        found = sum(self.hits[order] for order in orders)
        asked = found + sum(self.misses[order] for order in orders)
        return found / asked if asked else float("nan")

    def summary(self) -> dict[str, Any]:
        """The figures as JSON values."""
        def quantiles(values: np.ndarray) -> dict[str, float]:
            points = np.percentile(values, [50, 90, 99, 100]) if len(values) else np.full(4, np.nan)
            return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), (1e3 * points).round(4).tolist()))

        count = int(self.positions.sum())
        return {"batches": len(self.positions), "positions": count, "seconds": round(self.elapsed_s, 3),
                "positions_s": round(count / self.elapsed_s, 1) if self.elapsed_s else 0.0, "hit_rate": round(self.hit_rate(), 4),
                "hit_rate_by_order": {order: round(self.hit_rate(order), 4) for order in self.hits},
                "reads": int(self.reads.sum()), "reads_s": round(float(self.reads.sum()) / self.elapsed_s, 1) if self.elapsed_s else 0.0,
                "lookup": quantiles(self.lookup_s), "stall": {**quantiles(self.stall_s),
                                                              "mean_ms": round(1e3 * float(self.stall_s.mean()), 4)
                                                              if len(self.stall_s) else float("nan")}}


def joined(parts: Sequence[Replayed]) -> Replayed:
    """Several replays, at least one, as if they were one."""
    def added(counts: Sequence[dict[int, int]]) -> dict[int, int]:
        return {order: sum(count[order] for count in counts) for order in counts[0]}

    return Replayed(np.concatenate([part.positions for part in parts]), np.concatenate([part.lookup_s for part in parts]),
                    np.concatenate([part.stall_s for part in parts]), np.concatenate([part.reads for part in parts]),
                    added([part.hits for part in parts]), added([part.misses for part in parts]), added([part.repeats for part in parts]),
                    sum(part.elapsed_s for part in parts))


def replay(store: Store, batches: Batches, pace: Pace | None = None, ahead: int = 0) -> Replayed:
    """Serve every batch, `ahead` of them prefetched before the one in use. Without a pace: as fast as they come.

    Raises what the store raises; batches under way are released then.
    """
    if pace is not None and len(pace.slack_s) != len(store.layers):
        raise ConfigError(f"{len(pace.slack_s)} times at which rows are wanted: the store serves {len(store.layers)} layers")
    if ahead < 0:
        raise ConfigError(f"ahead is {ahead}: expected 0 or more batches")
    slack: Sequence[float] = pace.slack_s if pace is not None else (0.0,) * len(store.layers)
    count, under_way = len(batches), deque["Batch"]()
    lookup_s, stall_s, reads = np.zeros(count), np.zeros(count), np.zeros(count, np.int64)
    before, begin = store.stats(), time.perf_counter()
    asked = 0
    try:
        for number in range(count):
            started = time.perf_counter()
            while asked < min(count, number + ahead + 1):
                under_way.append(store.prefetch(batches.sequence(asked)))
                asked += 1
            stalled = 0.0
            for layer, wanted in zip(store.layers, slack):
                _sleep_until(started + wanted + stalled)
                came = time.perf_counter()
                under_way[0].wait(layer, timeout_s=WAIT_S)
                stalled += time.perf_counter() - came
            timing = under_way[0].timing
            lookup_s[number], reads[number] = 1e-6 * (timing["queued_us"] + timing["published_us"]), timing["reads"]
            stall_s[number] = stalled
            if pace is not None:
                _sleep_until(started + pace.step_s + stalled)
            under_way.popleft().release()
    finally:
        for batch in under_way:
            batch.release()
    elapsed, after = time.perf_counter() - begin, store.stats()
    orders = list(after.misses)
    found = {order: sum(count for (_, of), count in after.hits.items() if of == order) + after.joins[order]
             - sum(count for (_, of), count in before.hits.items() if of == order) - before.joins[order] for order in orders}
    return Replayed(batches.positions(), lookup_s, stall_s, reads, found,
                    {order: after.misses[order] - before.misses[order] for order in orders},
                    {order: after.repeats[order] - before.repeats[order] for order in orders}, elapsed)


def _sleep_until(moment: float) -> None:
    """Wait for a moment of time.perf_counter; the thread sleeps, so that store threads have the processor."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
