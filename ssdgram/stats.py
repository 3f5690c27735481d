"""Statistics: a snapshot of a store's counters, taken without stopping anything.

`hits` and `misses` count distinct bundles per batch; a bundle that a batch asks for again counts once more under `repeats`,
one that another batch was already reading under `joins`. It knows only the arrays that planner and readers count in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ssdgram import _plan_state as p
from ssdgram import _state as s

if TYPE_CHECKING:
    from ssdgram.store import Store

WAIT_BUCKETS = 32                                            # bucket k: waits of 2**(k-1) .. 2**k us


def bounds(counts: Sequence[int] | np.ndarray) -> dict[float, int]:
    """Power-of-two buckets as {upper bound in us: count in this bucket alone}; the last is unbounded."""
    last = len(counts) - 1
    return {float("inf") if k == last else float(1 << k): int(count) for k, count in enumerate(counts)}


@dataclass(frozen=True)
class Stats:
    """Counters since open unless said otherwise; sizes in bytes. `orders` in the keys are 2, 3, 4, ... (n of the n-gram)."""

    state: str                                               # loading, warming, ready, degraded
    queue: str
    batches: int
    tokens: int
    reads: int                                               # completed page reads
    retries: int
    read_errors: int
    bytes_read: int
    bytes_served: int                                        # rows handed out by `rows` and `packed`
    hits: dict[tuple[str, int], int]                         # (tier, order): distinct bundles of a batch that were there
    joins: dict[int, int]                                    # order: another batch was reading them already
    misses: dict[int, int]                                   # order: read for this batch
    repeats: dict[int, int]                                  # order: asked for again within the batch
    merged_rows: int                                         # rows that came with a page another row had asked for
    evictions: int
    failed_rows: int
    starved: int                                             # plans that found no slot and were put back
    cancelled: int
    promoted_reads: int                                      # background reads that a step came to wait for
    wait_us_buckets: dict[float, int]                        # callers' waits for a layer
    wait_us_sum: float
    engine_us_buckets: dict[float, int]                      # request taken to last row published
    queue_depth: int                                         # reads in the drives now
    pending_pages: int                                       # page reads asked for and not done now
    oldest_ticket: int | None                                # of the batches not yet complete
    oldest_ticket_age_s: float
    oldest_read_age_s: float
    degraded: int                                            # times the drive stopped answering
    slots: int
    slots_free: int
    slots_idle: int                                          # bundles in the cache that no batch uses
    slots_in_use: int
    planner_busy_s: float
    longest_slice_us: float
    budgets: dict[str, tuple[int, int]] = field(default_factory=dict)   # tier: (bytes in use, bytes allowed)
    gds_mode: str = ""                                       # queue gds: the path that cuFile's own counters prove (docs/gds.md)
    gds_counters: dict[str, int] = field(default_factory=dict)          # and those: batch submissions by path since open
    notices: tuple[str, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of the distinct bundles that needed no read of their own; nan before the first batch."""
        found = sum(self.hits.values()) + sum(self.joins.values())
        total = found + sum(self.misses.values())
        return found / total if total else float("nan")


def _hits_by_tier(all_hits: dict[int, int], hbm_hits: dict[int, int], has_hbm: bool, slab: str) -> dict[tuple[str, int], int]:
    hits = {(slab, order): count - hbm_hits[order] for order, count in all_hits.items()}
    if has_hbm:
        hits |= {("hbm", order): count for order, count in hbm_hits.items()}
    return hits


def snapshot(store: Store) -> Stats:
    """The statistics of an open store."""
    plan, state = store._plan, store._state
    orders = store.geometry.orders
    counted = plan.stats.copy()
    lines = [s.reader_line(reader) for reader in range(int(state.params[s.P_READERS]))]
    now = time.monotonic_ns()

    def by_order(first: int) -> dict[int, int]:
        return {order + 2: int(counted[first + order]) for order in range(orders)}

    def over_readers(word: int) -> int:
        return sum(int(state.control[line + word]) for line in lines)

    started = [int(state.control[line + s.R_OLDEST_NS]) for line in lines]
    oldest_read = min((at for at in started if at), default=0)
    alive = [(int(plan.batches["ticket"][b]), int(plan.batches["submitted_ns"][b]))
             for b in plan.active[:int(plan.control[p.C_ACTIVE])] if plan.batches["ticket"][b] > 0]
    ticket, since = min(alive, default=(0, now))
    free, idle = int(plan.control[p.C_FREE + 1]), int(plan.control[p.C_IDLE])
    slots = len(plan.slots)
    reads = over_readers(s.R_READS)
    return Stats(
        state=p.STATE_NAMES[int(plan.control[p.C_STATE])], queue=store.queue, batches=int(counted[p.S_BATCHES]) - 1,
        tokens=int(counted[p.S_TOKENS]), reads=reads, retries=over_readers(s.R_RETRIES), read_errors=over_readers(s.R_ERRORS),
        bytes_read=reads * 4096, bytes_served=store._served_bytes,
        hits=_hits_by_tier(by_order(p.S_HITS), by_order(p.S_HBM_HITS), len(plan.hbm) > 0,
                           "dram" if store._gds is None else "hbm"),
        joins=by_order(p.S_JOINS), misses=by_order(p.S_MISSES), repeats=by_order(p.S_REPEATS),
        merged_rows=int(counted[p.S_MERGED]), evictions=int(counted[p.S_EVICTIONS]) + int(counted[p.S_RECLAIMS]),
        failed_rows=int(counted[p.S_FAILED_ROWS]), starved=int(counted[p.S_STARVED]), cancelled=int(counted[p.S_CANCELLED]),
        promoted_reads=int(counted[p.S_PROMOTED]),
        wait_us_buckets=bounds(store._wait_counts), wait_us_sum=store._wait_us_sum,
        engine_us_buckets=bounds(counted[p.S_ENGINE_US:p.S_ENGINE_US + 32]),
        queue_depth=over_readers(s.R_IN_FLIGHT), pending_pages=len(state.pages) - int(plan.control[p.C_PAGES + 1]),
        oldest_ticket=ticket if alive else None, oldest_ticket_age_s=(now - since) / 1e9 if alive else 0.0,
        oldest_read_age_s=(now - oldest_read) / 1e9 if oldest_read else 0.0,
        degraded=int(counted[p.S_DEGRADED]), slots=slots, slots_free=free, slots_idle=idle, slots_in_use=slots - free - idle,
        planner_busy_s=int(counted[p.S_BUSY_NS]) / 1e9, longest_slice_us=int(counted[p.S_LONGEST_NS]) / 1e3,
        budgets=store._budgets(slots - free), gds_mode="" if store._gds is None else store._gds.mode,
        gds_counters={} if store._gds is None else store._gds.counters(), notices=tuple(store.notices))
