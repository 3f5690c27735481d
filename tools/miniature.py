"""The cache's real policy on a sample of a trace: a store's directory, slots and releases, scaled down, without rows.

Stack distances tell an LRU cache's hit rate; ours is another policy (cache/policy.py), in sets, with slots that batches in flight
hold. So the store's own code (cache/, _slots.py) is run on the sampled requests with `rate` times the slots and sets: a miniature
simulation (Waldspurger, Saemundson, Ahmad and Park 2017). One layer stands for all: its share of slots and sets. It knows no
drive: a read is over when its batch is. Invariant: at rate 1 and one layer it decides as the store would, request by request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssdgram import _plan_state as p
from ssdgram._compiled import compiled_lean
from ssdgram._plan_state import C_IDLE, C_OVERFLOW, SLOT_READY
from ssdgram._slots import directory_init, drop_reference, free_all, overflow_find, overflow_init, take
from ssdgram.cache import directory, overflow, sketch
from ssdgram.cache.directory import WAYS, probe, set_of
from ssdgram.cache.policy import touch
from ssdgram.tools.reuse import Sample

LEAST_SETS = 64                                              # of a miniature: fewer, and single sets decide


@dataclass(frozen=True)
class Misses:
    """What a cache of one size missed: `by_batch` float64 [B, orders], of one layer, at full rate; `refused`: requests for which
    there was no slot (a store would refuse such a batch)."""

    by_batch: np.ndarray
    refused: int
    noise: np.ndarray                                        # [B]: variance of the sum over orders that sampling alone adds

    def hit_rates(self, taken: Sample, warm: int = 0) -> np.ndarray:
        """float64 [orders] over the batches from `warm` on."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.clip(1 - self.by_batch[warm:].sum(axis=0) / taken.distinct[warm:].sum(axis=0), 0, 1)

    def hit_rate(self, taken: Sample, warm: int = 0) -> float:
        """Over all orders; nan without requests."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.clip(1 - self.by_batch[warm:].sum() / np.float64(taken.distinct[warm:].sum()), 0, 1))


@compiled_lean
def _run(x, groups, first, bounds, ahead, control, stats, ways, ghosts, slots, hbm, cells, held, counts, misses):  # type: ignore[no-untyped-def]
    """Plan batch after batch; batch b is released when batch b + ahead + 1 is planned. held int32 [n], counts int64 [B] are scratch.
    Requests that found no slot."""
    refused, orders = 0, misses.shape[1]
    for b in range(len(bounds) - 1):
        leaving = b - ahead - 1
        if leaving >= 0:
            for k in range(bounds[leaving], bounds[leaving] + counts[leaving]):
                drop_reference(control, ways, slots, hbm, cells, np.int64(held[k]))
        for i in range(bounds[b], bounds[b + 1]):
            s = set_of(x[i], groups[i], ways.shape[0])
            way, slot = probe(ways, s, x[i], groups[i]), np.int64(-1)
            if way >= 0:
                touch(ways, ghosts, s, way)
                slot = np.int64(ways[s].slot[way])
            elif control[C_OVERFLOW] > 0:
                slot = np.int64(overflow_find(cells, x[i], groups[i]))
            if slot < 0:
                misses[b, groups[i] % orders] += first[i]
                slot = np.int64(take(control, stats, ways, ghosts, slots, hbm, cells, s, x[i], groups[i], 0))
                if slot < 0:
                    refused += 1
                    continue
            if slots[slot].ticket != b:
                slots[slot].ticket = b
                if slots[slot].refs == 0 and slots[slot].status == SLOT_READY:
                    control[C_IDLE] -= 1
                slots[slot].refs += 1
                held[bounds[b] + counts[b]] = slot
                counts[b] += 1
        for k in range(bounds[b], bounds[b] + counts[b]):
            slots[held[k]].status = SLOT_READY
    return refused


def simulate(taken: Sample, slots: int, sets: int, layers: int, ahead: int = 0) -> Misses:
    """Misses of a store with `slots` slots and `sets` sets that serves `layers` layers, each of which asks as `taken` does.

    `ahead`: batches that are planned before the one in use is released.
    """
    scale = taken.rate / layers
    small_sets = max(1, round(sets * scale))
    small_slots = WAYS * small_sets + max(1, round((slots - WAYS * sets) * scale))
    batches = len(taken.bounds) - 1
    control, stats = np.zeros(p.C_COUNT, np.int64), np.zeros(p.S_COUNT, np.int64)
    ways, ghosts = directory.on_lines(small_sets, directory.SET), sketch.allocate(small_sets)
    records, cells = np.zeros(small_slots, p.SLOT), np.zeros(overflow.cells(small_slots // 2 + 1), overflow.CELL)
    free_all(control, records)
    directory_init(ways)
    overflow_init(cells)
    misses = np.zeros((batches, taken.orders), np.int64)
    refused = _run(taken.x, taken.groups, taken.first, taken.bounds, ahead, control, stats, ways, ghosts, records,
                   np.zeros(0, p.HBM_SLOT), cells, np.empty(len(taken.x), np.int32), np.zeros(batches, np.int64), misses)
    return Misses(misses / taken.rate, int(refused), misses.sum(axis=1) * (1 - taken.rate) / taken.rate**2)
