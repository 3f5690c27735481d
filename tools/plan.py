"""The planner: from a trace and a machine to hit rates, stalls, budgets and money.

    trace ── sample ──► one miniature for each budget ──► misses of each batch ──► page reads ──► drive ──► stalls ──► tokens/s ──► tokens/$

A batch's reads are wanted at once; the drive serves them in the order of the layers (tools/drive.py); a layer whose rows are
not there when the model wants them stalls the step, and what follows it. In decode a step's tokens are known when the one before
has ended, so its reads begin with it; a prompt's chunks can be fetched `ahead`. docs/planning.md has the formulas. It knows no store:
what it says is checked against one by tools/plan_check.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssdgram import queues
from ssdgram._budget import Sizes, sizes
from ssdgram._compiled import compiled_lean
from ssdgram._opening import Selection, shape_of
from ssdgram.errors import BudgetError, ConfigError
from ssdgram.geometry import Geometry
from ssdgram.store import Tuning
from ssdgram.tools.drive import Drive
from ssdgram.tools.miniature import LEAST_SETS, Misses, simulate
from ssdgram.tools.reuse import Curve, Sample, lru_curve, number_bundles, sample
from ssdgram.tools.trace_replay import Pace
from ssdgram.tools.trace_shapes import Requests

PLAN_US = 0.5                                                # the planner's time per token (docs/measurements.md)
SIMULATED = 3_000_000                                        # requests that each miniature sees; of a longer trace a sample
GIB = 1 << 30


@dataclass(frozen=True)
class Prices:
    """Per hour: the machine without the memory in question, a GiB of DRAM, a GiB of SSD."""

    machine: float
    dram_gib: float
    ssd_gib: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(price) and price >= 0 for price in (self.machine, self.dram_gib, self.ssd_gib)):
            raise ConfigError(f"prices {self.machine}, {self.dram_gib}, {self.ssd_gib}: expected 0 or more")


@dataclass(frozen=True)
class Load:
    """What is asked, and how fast the model is: requests in batches, positions int64 [B] of each, the pace, batches ahead.

    The batches before `warm` fill the cache; the figures are of those from there on.
    """

    name: str
    requests: Requests
    positions: np.ndarray
    pace: Pace
    ahead: int
    warm: int
    notice: str = ""                                         # what the reader of the figures has to know about the batches


@dataclass(frozen=True)
class Row:
    """One budget's figures. Rates are of the distinct bundles of a batch; times in seconds."""

    dram: int                                                # bytes
    bundles: int                                             # slots that it pays for
    hit_rates: tuple[float, ...]                             # by order
    hit_rate: float
    lru: float                                               # what an LRU cache of that size would have
    reads: float                                             # page reads a batch, mean
    stall_s: float                                           # a batch, mean
    stall_p99_s: float
    tokens_s: float
    tokens_dollar: float
    too_small: bool                                          # some batch does not fit
    beyond: bool                                             # larger than all that the trace asked for: the trace is too short for it

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


# ---------------------------------------------------------------- sizes


def store_sizes(geometry: Geometry, vocabulary: int, dram: int, queue: str = "auto", tuning: Tuning | None = None) -> Sizes:
    """What a store of this geometry makes of a DRAM budget. BudgetError if it is too small."""
    tuning = tuning or Tuning()
    chosen, _ = queues.resolve(queue)
    return sizes(dram, shape_of(geometry, Selection.of(geometry, None, None), vocabulary, tuning.readers or queues.default_readers(chosen),
                                tuning.depth or queues.default_depth(chosen), tuning.batches))


def budgets_up_to(geometry: Geometry, vocabulary: int, most: int) -> list[int]:
    """Budgets to look at: powers of two from the least that works, and at least 1/1024 of `most`, up to `most`, and `most`."""
    least = max(1 << 20, 1 << max(0, (most >> 10).bit_length() - 1))
    while least <= most:
        try:
            store_sizes(geometry, vocabulary, least)
            break
        except BudgetError:
            least *= 2
    else:
        store_sizes(geometry, vocabulary, most)              # raises, and says what is needed
    return [*(1 << k for k in range(least.bit_length() - 1, most.bit_length()) if 1 << k < most), most]


def table_bytes(geometry: Geometry) -> int:
    """Bytes of all tables' rows."""
    return sum(geometry.rows_per_layer) * geometry.row_bytes


# ---------------------------------------------------------------- misses to reads to stalls


def reads_of(misses: Misses, geometry: Geometry) -> np.ndarray:
    """Page reads of each batch for one layer, float64 [B]: `heads` a missing bundle.

    Rows that share a page are counted apart: of real tables hardly any two of a batch do. Of a sampled trace the counts vary more than
    the true ones; they are drawn together around their mean until they vary as much as those do.
    """
    counts = misses.by_batch.sum(axis=1)
    if len(counts) and misses.noise.any():
        mean, spread = counts.mean(), float(counts.var())
        counts = mean + (counts - mean) * (math.sqrt(max(0.0, 1 - float(misses.noise.mean()) / spread)) if spread > 0 else 0.0)
    return geometry.heads * counts


@compiled_lean
def _stall(ready, busy, ahead, step, slack, begun, stalls):  # type: ignore[no-untyped-def]
    """Stall of each batch. ready float64 [B, L]: seconds from a burst's begin to each layer's last read; busy [B]: the drive's time."""
    batches, layers = ready.shape
    free = 0.0
    for b in range(batches):
        if b > 0:
            begun[b] = begun[b - 1] + step + stalls[b - 1]
        begin = max(begun[max(0, b - ahead)], free)
        free = begin + busy[b]
        stalls[b] = 0.0
        for layer in range(layers):
            late = begin + ready[b, layer] - (begun[b] + slack[layer] + stalls[b])
            stalls[b] += max(0.0, late)


def stalls_of(reads: np.ndarray, positions: np.ndarray, load: Load, drive: Drive) -> np.ndarray:
    """Stall of each batch in seconds, float64 [B]; reads [B] of each of the layers that the pace names."""
    layers = len(load.pace.slack_s)
    planned = 1e-6 * PLAN_US * positions
    ready = np.stack([drive.seconds((layer + 1) * reads) + planned for layer in range(layers)], axis=1)
    stalls = np.zeros(len(reads))
    _stall(ready, layers * reads / drive.top, load.ahead, load.pace.step_s, np.array(load.pace.slack_s), np.zeros(len(reads)), stalls)
    return stalls


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """Rows by budget, and what is recommended. `needs_reads_s`: top rate at which the recommended budget stalls no more than wanted
    (None: no rate does, the latency is too long); `window`: batches ahead that would do it with this drive (None: none up to 64)."""

    load: Load
    rate: float                                              # of the sample
    rows: tuple[Row, ...]
    recommended: Row
    limit: str
    needs_reads_s: float | None
    window: int | None
    whole_in_dram: float                                     # tokens a dollar with the whole table in DRAM, without stalls


class Planner:
    """A load on a machine, budget by budget. The sample is made once; each budget costs one miniature."""

    def __init__(self, geometry: Geometry, vocabulary: int, load: Load, drive: Drive, prices: Prices, least_sets: int = 1 << 40) -> None:
        if len(load.requests.bounds) - 1 <= load.warm:
            raise ConfigError(f"{load.name}: the trace has {len(load.requests.bounds) - 1} batches, {load.warm} of them to warm the cache: "
                              f"expected a longer trace")
        if load.requests.orders != geometry.orders:
            raise ConfigError(f"the trace has {load.requests.orders} n-gram orders, the model {geometry.orders}: it is another model's")
        self.geometry, self.vocabulary, self.load, self.drive, self.prices = geometry, vocabulary, load, drive, prices
        layers = len(geometry.layers)
        wanted = max(SIMULATED / max(1, len(load.requests.x)), LEAST_SETS * layers / least_sets)
        self.taken: Sample = sample(load.requests, min(1.0, wanted))
        self.curve: Curve = lru_curve(self.taken, load.warm)
        self.distinct = number_bundles(self.taken.x, self.taken.groups)[1] / self.taken.rate    # of one layer
        self._reads: dict[int, np.ndarray] = {}

    def row(self, dram: int) -> Row:
        """The figures of one budget."""
        size, load, layers = store_sizes(self.geometry, self.vocabulary, dram), self.load, len(self.geometry.layers)
        misses = simulate(self.taken, size.slots, size.sets, layers, load.ahead)
        self._reads[dram] = reads_of(misses, self.geometry)
        stalls = stalls_of(self._reads[dram], load.positions, load, self.drive)[load.warm:]
        seconds = load.pace.step_s * len(stalls) + float(stalls.sum())
        tokens_s = float(load.positions[load.warm:].sum()) / seconds if seconds else math.inf
        hourly = self.prices.machine + self.prices.dram_gib * dram / GIB + self.prices.ssd_gib * table_bytes(self.geometry) / GIB
        return Row(dram, size.slots, tuple(misses.hit_rates(self.taken, load.warm).tolist()), misses.hit_rate(self.taken, load.warm),
                   self.curve.hit_rate(size.sets * 16 / layers), layers * float(self._reads[dram][load.warm:].mean()),
                   float(stalls.mean()), float(np.percentile(stalls, 99)), tokens_s, _per_dollar(tokens_s, hourly), misses.refused > 0,
                   size.slots / layers > self.distinct)

    def plan(self, budgets: Sequence[int], most_stall: float = 0.01) -> Plan:
        """All budgets, and the least of them that stalls for at most `most_stall` of a step; if none does, the one that gives the most
        tokens for the money, and what would have to be better."""
        rows = tuple(self.row(dram) for dram in sorted(set(budgets)))
        usable = [row for row in rows if not row.too_small] or list(rows[-1:])
        target = most_stall * self.load.pace.step_s
        good = [row for row in usable if row.stall_s <= target]
        best = good[0] if good else max(usable, key=lambda row: row.tokens_dollar)
        window = self._window(best.dram, target)
        needed = None if good else self._rate_needed(best.dram, target)
        table, step = table_bytes(self.geometry), self.load.pace.step_s
        seconds = step * (len(self.load.positions) - self.load.warm)
        whole = float(self.load.positions[self.load.warm:].sum()) / seconds if seconds else math.inf
        hourly = self.prices.machine + self.prices.dram_gib * table / GIB
        return Plan(self.load, self.taken.rate, rows, best, self._limit(usable, best, target, needed), needed, window,
                    _per_dollar(whole, hourly))

    def _mean_stall(self, dram: int, drive: Drive, ahead: int) -> float:
        load = self.load
        changed = Load(load.name, load.requests, load.positions, load.pace, ahead, load.warm)
        return float(stalls_of(self._reads[dram], load.positions, changed, drive)[load.warm:].mean())

    def _window(self, dram: int, target: float) -> int | None:
        """The fewest batches ahead at which the mean stall is at most the target; None: no window up to 64 does."""
        return next((ahead for ahead in range(65) if self._mean_stall(dram, self.drive, ahead) <= target), None)

    def _rate_needed(self, dram: int, target: float) -> float | None:
        """The top rate of a drive of the same latency at which the mean stall is at most the target; None: even 1024 times is too slow."""
        low, high = 1.0, 1024.0
        if self._mean_stall(dram, self.drive.faster(high), self.load.ahead) > target:
            return None
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._mean_stall(dram, self.drive.faster(middle), self.load.ahead) <= target else (middle, high)
        return self.drive.faster(high).top

    def _limit(self, usable: list[Row], best: Row, target: float, needed: float | None) -> str:
        """What keeps the recommended budget from more tokens a second."""
        if best.stall_s <= target:
            return "the model: its steps hide the reads"
        if needed is None:
            return "the drive's latency: it is longer than the time until the first rows are wanted, whatever the rate"
        if usable[-1].stall_s < 0.8 * best.stall_s:
            return "the DRAM budget: a larger one stalls less, but costs more than it brings"
        return "the drive's reads a second: what misses is text that the cache has not seen, and a larger cache does not help"


def _per_dollar(tokens_s: float, hourly: float) -> float:
    return 3600 * tokens_s / hourly if hourly > 0 else math.inf
