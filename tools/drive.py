"""A drive as the planner sees it: reads a second at each number of reads in flight, and how long a burst of reads takes.

    reads_s(d), from `ssdgram bench io` or from a rate and a latency
    a burst of r reads, all wanted at once, drains:   seconds(r) = sum over k = 1 .. r of 1 / reads_s(min(k, depth))

While k reads are left, the drive works on min(k, depth) of them at the rate that it has then (Little's law turns the rate at a depth
into a latency, and back). So one read takes the latency, many take their number over the top rate and the tail of the last ones.
It knows no layers and no cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import ConfigError
from ssdgram.layout.strict_json import parse_object

DEPTH = 256                                                  # reads that a store keeps in flight at the most, unless told
MOST_BYTES = 1 << 24                                         # of a result file
TABLE = 1 << 16                                              # bursts up to here are summed, longer ones go on at the top rate


@dataclass(frozen=True)
class Drive:
    """Reads a second `reads_s[k]` with `depths[k]` reads in flight; ascending. `depth`: reads that a store keeps in flight."""

    depths: tuple[float, ...]
    reads_s: tuple[float, ...]
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if not self.depths or len(self.depths) != len(self.reads_s) or list(self.depths) != sorted(set(self.depths)) or self.depths[0] < 1:
            raise ConfigError(f"a drive measured at depths {list(self.depths)}: expected ascending depths from 1 on, a rate for each")
        if not all(np.isfinite(rate) and rate > 0 for rate in self.reads_s) or self.depth < 1:
            raise ConfigError(f"a drive of {list(self.reads_s)} reads a second with {self.depth} in flight: expected more than 0")

    @classmethod
    def of(cls, reads_s: float, latency_us: float, depth: int = DEPTH) -> Drive:
        """A drive that answers one read after `latency_us`, and never more than `reads_s` reads a second."""
        if not latency_us > 0 or not reads_s > 0:
            raise ConfigError(f"a drive of {reads_s} reads/s and {latency_us} us: expected more than 0 of both")
        knee = max(1.0, reads_s * latency_us * 1e-6)
        if knee == 1.0:
            return cls((1.0,), (reads_s,), depth)
        return cls((1.0, knee), (1e6 / latency_us, reads_s), depth)

    @classmethod
    def of_bench(cls, path: Path, depth: int = DEPTH) -> Drive:
        """From the JSON that `ssdgram bench io` writes (its `drive` part). ConfigError if it is something else."""
        try:
            with open(path, "rb") as file:
                parsed = parse_object(file.read(MOST_BYTES))
            points = {float(point["depth"]): float(point["uring"]["reads_s"]) for point in parsed["drive"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: no result of `ssdgram bench io`: expected `drive`, a list of depths with uring.reads_s") from error
        depths = sorted(points)
        rising = np.maximum.accumulate([points[at] for at in depths])       # a noisy point does not make a deeper queue slower
        return cls(tuple(depths), tuple(rising.tolist()), depth)

    def rate(self, in_flight: np.ndarray | float) -> np.ndarray:
        """Reads a second with that many in flight: between the measured depths in proportion of logarithms, in proportion below."""
        at = np.maximum(np.asarray(in_flight, np.float64), 1e-9)
        rates = np.exp(np.interp(np.log(at), np.log(self.depths), np.log(self.reads_s)))
        return np.where(at < self.depths[0], self.reads_s[0] * at / self.depths[0], rates)

    @property
    def top(self) -> float:
        """Reads a second of a burst without end."""
        return float(self.rate(self.depth))

    @property
    def latency_s(self) -> float:
        """Seconds of one read alone."""
        return float(1 / self.rate(1))

    @functools.cached_property
    def _sums(self) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(1 / self.rate(np.minimum(np.arange(1, TABLE + 1), self.depth)))])

    def seconds(self, reads: np.ndarray | float) -> np.ndarray:
        """Seconds until the last of a burst of `reads` reads is there; 0 for none. Fractions (means) lie between."""
        wanted = np.asarray(reads, np.float64)
        inside = np.interp(np.minimum(wanted, TABLE), np.arange(TABLE + 1), self._sums)
        return inside + np.maximum(wanted - TABLE, 0) / self.top

    def faster(self, times: float) -> Drive:
        """The same latency, `times` the top rate: as many drives side by side would be. `times` >= 1."""
        return Drive(tuple(depth * times if depth > 1 else depth for depth in self.depths),
                     tuple(rate * times if depth > 1 else rate for depth, rate in zip(self.depths, self.reads_s)),
                     max(1, int(self.depth * times)))

    def to_json(self) -> dict[str, Any]:
        """What it was measured or given as."""
        return {"depths": list(self.depths), "reads_s": list(self.reads_s), "depth": self.depth}
