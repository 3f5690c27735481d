"""SSDGram stores in a known state of warmth.

    cold     nothing resident: opened anew, page cache dropped
    warm     every bundle of the measured steps resident: loaded beforehand, and each step asked for once, without a miss, before
    mixed    opened with the warm text alone; one half of every step's positions is of it, the other half is new to the store
    steady   after one half of the trace; measured on the other half, which goes on into the cache as it is served

Text is read from the drive once; what the cache then holds is kept as a hot set, and both passes start from it. A store belongs to
one cell's pass at a time. Nothing is measured here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ssdgram
from ssdgram.bench.warm import PATIENT
from ssdgram.bench.warmness.text import Span, Step, Text
from ssdgram.store import Store

CHUNK = 2048                                                 # tokens of a loading prefetch


@dataclass(frozen=True)
class States:
    """How stores are opened. `folder`: for hot sets."""

    out: Path
    folder: Path
    text: Text
    dram: int
    hbm: int
    device: str
    queue: str = "auto"

    def cold(self, dram: int | None = None) -> Store:
        """A store that holds nothing."""
        return ssdgram.open(self.out, dram=dram or self.dram, hbm=self.hbm, device=self.device, queue=self.queue, tuning=PATIENT)

    def after(self, span: Span, dram: int | None = None) -> Store:
        """A store after the span was served: read from the drive the first time, from a hot set afterwards."""
        kept = self.folder / f"hot-{span[0]}-{span[1]}"
        mine = kept.with_name(kept.name + "-open")           # a store writes its hot set when it closes: to a name of its own
        mine.unlink(missing_ok=True)
        if not kept.exists():
            with ssdgram.open(self.out, dram=self.dram, device="cpu", queue=self.queue, hotset=kept, tuning=PATIENT) as store:
                steps = self.text.prefill(span, min(CHUNK, span[1] - span[0]), 1 << 30)
                load(store, steps)
        os.link(kept, mine)
        return ssdgram.open(self.out, dram=dram or self.dram, hbm=self.hbm, device=self.device, queue=self.queue, hotset=mine,
                            tuning=PATIENT)

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
