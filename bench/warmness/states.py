"""SSDGram stores in a known state of warmth.

    cold     nothing resident: opened anew, page cache dropped
    warm     every bundle of the measured steps resident: loaded beforehand, and each step asked for once, without a miss, before
    mixed    opened with the warm text alone; one half of every step's positions is of it, the other half is new to the store
    steady   after one half of the trace; measured on the other half, which goes on into the cache as it is served

Text is read from the drive once; what the cache then holds is kept as a hot set, and both passes start from it. A store with a tier
in GPU memory is heated besides: bundles go there when they were asked for a few times. Nothing is measured here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ssdgram
from ssdgram.bench.warm import PATIENT
from ssdgram.bench.warmness.text import Span, Step, Text
from ssdgram.store import Store

CHUNK = 2048                                                 # tokens of a loading prefetch
PIECE = 256                                                  # ... of one that heats: the planner copies all hot bundles of small batches
ROUNDS = 40                                                  # of heating, at most
IDLE_ROUNDS = 4                                              # ... in which nothing more came to GPU memory: that is all of it


@dataclass(frozen=True)
class States:
    """How stores are opened. `folder`: for hot sets."""

    out: Path
    folder: Path
    text: Text
    dram: int
    device: str
    queue: str = "auto"

    def cold(self, dram: int | None = None, hbm: int = 0) -> Store:
        """A store that holds nothing."""
        return ssdgram.open(self.out, dram=dram or self.dram, hbm=hbm, device=self.device, queue=self.queue, tuning=PATIENT)

    def after(self, span: Span, dram: int | None = None, hbm: int = 0) -> Store:
        """A store after the span was served: read from the drive the first time, from a hot set afterwards."""
        kept = self.folder / f"hot-{span[0]}-{span[1]}"
        if not kept.exists():
            with ssdgram.open(self.out, dram=self.dram, device="cpu", queue=self.queue, hotset=kept, tuning=PATIENT) as store:
                steps = self.text.prefill(span, min(CHUNK, span[1] - span[0]), 1 << 30)
                load(store, steps)
        store = ssdgram.open(self.out, dram=dram or self.dram, hbm=hbm, device=self.device, queue=self.queue, hotset=kept, tuning=PATIENT)
        store._hotset = None                                 # not written when it closes: the next one starts from the same
        return store

    def heat(self, store: Store, span: Span) -> float:
        """Ask for the span until all of it is in GPU memory, or no more comes there. The share of the hits found there at last."""
        pieces = self.text.prefill(span, min(PIECE, span[1] - span[0]), 1 << 30)
        share, idle = 0.0, 0
        for _ in range(ROUNDS):
            before = store.stats().hits
            load(store, pieces)
            found = {key: count - before.get(key, 0) for key, count in store.stats().hits.items()}
            there = sum(count for (tier, _), count in found.items() if tier == "hbm") / max(1, sum(found.values()))
            idle = idle + 1 if 0 < there <= share else 0     # (at first nothing was asked for often enough)
            share = max(share, there)
            if share == 1.0 or idle == IDLE_ROUNDS:
                break
        return share

    def discard(self) -> None:
        """Delete the hot sets."""
        shutil.rmtree(self.folder, ignore_errors=True)


def load(store: Store, steps: Iterable[Step]) -> int:
    """Serve the steps without using them; bundles that were not there."""
    missed = 0
    for step in steps:
        with store.prefetch(step.sequence) as batch:
            batch.wait(timeout_s=120)
            missed += int(batch.timing["misses"] + batch.timing["joined"])
    return missed
