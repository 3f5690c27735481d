"""A drive as the planner sees it: reads a second at each number of reads in flight, and how long a burst of reads takes.

    reads_s(d), from `ssdgram bench io` or from a rate and a latency
    a burst of r reads, all wanted at once:   seconds(r) = r / reads_s(min(r, depth))

With d reads in flight each takes d / reads_s(d) (Little's law). A burst of r <= depth reads is in flight as a whole, and its last is there
when each of them is; of a longer one, those beyond `depth` go in as others come out, at the rate of that depth. So one read takes
the latency, and many take their number over the top rate. It knows no layers and no cache.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import ConfigError
from ssdgram.layout.strict_json import parse_object

DEPTH = 256                                                  # reads that a store keeps in flight at the most, unless told
MOST_BYTES = 1 << 24                                         # of a result file


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
    def _short(self) -> np.ndarray:
        """Seconds of bursts of 0 .. depth reads; more reads never take less, whatever the noise of what was measured."""
        reads = np.arange(1, self.depth + 1)
        return np.concatenate([[0.0], np.maximum.accumulate(reads / self.rate(reads))])

    def seconds(self, reads: np.ndarray | float) -> np.ndarray:
        """Seconds until the last of a burst of `reads` reads is there; 0 for none. Fractions (means) lie between."""
        wanted = np.asarray(reads, np.float64)
        inside = np.interp(np.minimum(wanted, self.depth), np.arange(self.depth + 1), self._short)
        return inside + np.maximum(wanted - self.depth, 0) / self.top

    def faster(self, times: float) -> Drive:
        """`times` (1 or more) such drives side by side, each with its share of the reads: the same latency, `times` the rate."""
        if times <= 1:
            return self
        return Drive((1.0, *(depth * times for depth in self.depths)), (float(self.rate(1)), *(rate * times for rate in self.reads_s)),
                     math.ceil(self.depth * times))

    def to_json(self) -> dict[str, Any]:
        """What it was measured or given as."""
        return {"depths": list(self.depths), "reads_s": list(self.reads_s), "depth": self.depth}
