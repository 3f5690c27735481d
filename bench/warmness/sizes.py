"""How much of everything one run takes: rows, text, batches, lookups, seconds. Three presets: quick, cpu, gpu.

What follows from a size is computed here too, so that a report can state it; nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

WARMNESS = ("cold", "mixed", "steady", "warm")
BUDGET_SHARE = 8                                             # DRAM budget of SSDGram: 1 / this of the table
HBM_SHARE = 32                                               # GPU memory of ssdgram-hbm: 1 / this of the table
PASSES = 2


@dataclass(frozen=True)
class Sizes:
    """One run. Token counts are those of the trace; seconds bound what a single placement may take."""

    name: str
    rows: int                                                # rows a column of a table that is made for the run, about
    trace_tokens: int                                        # first half: served before steady; second half: measured, and new text
    warm_tokens: int                                         # of the first half: the text of warm steps
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    budget_s: float                                          # of lookups of one placement in one cell and pass, after the first
    longest_s: float                                         # a lookup that would take longer is not run
    step_batches: tuple[int, ...]
    step_count: int                                          # decode steps of one step-model cell and pass
    prompt: int                                              # tokens of the prompt behind the time to first token
    limit_s: float                                           # cells that would begin later are not run
    in_line: tuple[str, ...] = ("warm", "steady")            # states in which the step model also runs without prefetch

    def lookups(self, warmness: str, kind: str, tokens: int) -> int:
        """Lookups of a cell in one pass, at most."""
        if kind == "prefill":
            return max(2, min(32, self.warm_tokens // tokens)) if warmness == "warm" else 2
        most, few = (self.warm_tokens, 100) if warmness == "warm" else (2_048, 12 if self.name == "quick" else 24)
        return max(4, min(few, most // tokens))

    def changed(self, **given: Any) -> Sizes:
        """With what was given (not None) in place of the preset's."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


PRESETS = {                                                  # quick: three minutes with the report, code to be compiled first or not
    "quick": Sizes("quick", rows=150_000, trace_tokens=32_768, warm_tokens=8_192, decode=(1, 64, 256), prefill=(512, 2048),
                   budget_s=0.4, longest_s=3.0, step_batches=(64, 256), step_count=10, prompt=2048, limit_s=162, in_line=("warm",)),
    "cpu": Sizes("cpu", rows=500_000, trace_tokens=98_304, warm_tokens=16_384, decode=(1, 16, 64, 256), prefill=(512, 2048, 8192),
                 budget_s=1.0, longest_s=12.0, step_batches=(64, 256), step_count=16, prompt=2048, limit_s=400),
    "gpu": Sizes("gpu", rows=640_000, trace_tokens=262_144, warm_tokens=32_768, decode=(1, 16, 64, 256), prefill=(512, 2048, 8192),
                 budget_s=0.8, longest_s=12.0, step_batches=(64, 256), step_count=40, prompt=2048, limit_s=500),
}
