"""The step model: a decode loop with stand-in compute for the layers, and the lookups of the n-gram layers in their places.

    tokens known ─ layer 0 ─┬─ layers 1..13 ─┬─ layers 14..39 ─ next token        (40 layers, n-gram rows needed at 1 and 14)
    prefetch on:  begin ────┴ take rows of 1 ┴ take rows of 14                      the lookup begins when the tokens are known
    prefetch off:           └ fetch rows of 1 └ fetch rows of 14                    ... when the layer is reached

A step's time is from its tokens to its end; what it takes longer than the stand-in alone is the exposed fetch. "Off", a store is
asked at the first n-gram layer and brings both layers' rows. A prompt's chunk goes through the same loop for the time to first
token. Placements take turns, warm ones in both ways in the same cell, those on a GPU in a third: everything behind layer 0 captured
in one CUDA graph (NAME-frame), as engines run decode steps. The store's states are those of the matrix.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any

from ssdgram.bench.warmness import stand_in
from ssdgram.bench.warmness.cells import FRESH, UNSTABLE, Clock, Say, Turn, guarded, in_turn, stores_of
from ssdgram.bench.warmness.meter import percentiles
from ssdgram.bench.warmness.placements import Placement, Ssdgram
from ssdgram.bench.warmness.sizes import PASSES, Sizes
from ssdgram.bench.warmness.stand_in import ENGRAM, LAYERS, PREFILL_US_A_TOKEN, decode_us
from ssdgram.bench.warmness.states import States, load
from ssdgram.bench.warmness.text import Step, Text

NONE = "none"                                                # the stand-in alone
HIDDEN = 0.01                                                # of a step: what counts as hidden
SHARES = (64, 32, 16, 8)                                     # DRAM budgets of the sweep: 1 / these of the table
SWEEP_STREAMS = 64
BLOCKS = 8                                                   # turns of a placement in a cell's pass: clocks and neighbours even out
FRAME_BLOCK = 2                                              # steps of a turn of what is captured, which differs by less than clocks do
WAYS = ("ssdgram", "ssdgram-frame", "ssdgram-hbm", "ssdgram-hbm-frame")       # SSDGram's, warm
ORDER = ("warm", "steady", "mixed", "cold")                  # warm first: the files are still in the page cache
Key = tuple[str, str, str, int, bool]                        # placement, warmness, kind, tokens, prefetch


@dataclass
class Loop:
    """What one placement did in one cell and pass of the step model."""

    seconds: list[float] = field(default_factory=list)
    accounts: list[dict[str, Any]] = field(default_factory=list)
    turn: Turn = field(default_factory=Turn)                 # its status


def one_step(placement: Placement | None, step: Step, compute: Any, prefetch: bool) -> float:
    """Seconds of one step; None: the stand-in alone."""
    compute.begin()
    compute.run(ENGRAM[0])
    begun = placement.begin(step) if placement is not None and prefetch else None
    for k, (layer, following) in enumerate(zip(ENGRAM, (*ENGRAM[1:], LAYERS))):
        if placement is not None and prefetch:
            placement.take(begun, step, k)
        elif placement is not None:
            if placement.on_host:
                compute.reach()
            begun = placement.fetch(begun, step, k)
        compute.run(following - layer)
    seconds: float = compute.finish()
    if placement is not None and begun is not None:
        placement.end(begun)
    return seconds


class StepModel:
    """Runs the loops; `results()` gives what came of them."""

    def __init__(self, placements: dict[str, Placement], states: States, text: Text, sizes: Sizes, clock: Clock, say: Say,
                 *, share: float, one_read_us: float, layer_us: dict[int, float] | None = None,
                 prefill_us: float = PREFILL_US_A_TOKEN) -> None:
        self.placements, self.states, self.text, self.sizes, self.clock, self.say = placements, states, text, sizes, clock, say
        self.layer_us, self.prefill_us = dict(layer_us or stand_in.DECODE_US), prefill_us
        self.half, self.share, self.one_read_us = len(text) // 2, share, one_read_us         # share: the DRAM budget over the table
        self._fresh = text.never_seen((len(text) - len(text) // FRESH, len(text)), (0, sizes.warm_tokens))
        self._computes: dict[tuple[str, int], Any] = {}
        self._loops: dict[Key, list[Loop]] = {}
        self._steps: dict[tuple[str, str, int], list[Step]] = {}
        self.sweep: list[dict[str, Any]] = []
        self._frames: dict[str, Any] = {}                    # warm steps in one CUDA graph, where there is a GPU
        if states.device != "cpu":
            from ssdgram.bench.warmness.device import framed

            self._frames = framed(placements, stores_of(placements, "warm"))

    # ------------------------------------------------------------ what a loop needs

    def compute(self, kind: str, tokens: int) -> Any:
        """The stand-in for steps of that kind, calibrated once."""
        if (kind, tokens) not in self._computes:
            layer_us = decode_us(tokens, self.layer_us) if kind == "decode" else self.prefill_us * tokens
            if self.states.device == "cpu":
                made: Any = stand_in.Sleeping(layer_us)
            else:
                made = stand_in.Multiplying(layer_us, tokens, self.states.device)
                edges = (0, *ENGRAM, LAYERS)
                made.ready([stop - start for start, stop in itertools.pairwise(edges)])
            self._computes[kind, tokens] = made
        return self._computes[kind, tokens]

    def steps(self, warmness: str, kind: str, tokens: int) -> list[Step]:
        """The same in both passes, with and without prefetch."""
        key = (warmness, kind, tokens)
        if key not in self._steps:
            self._steps[key] = self._cut(warmness, kind, tokens)
        return self._steps[key]

    def _cut(self, warmness: str, kind: str, tokens: int) -> list[Step]:
        text, count = self.text, self.sizes.step_count if kind == "decode" else 1 if warmness == "cold" else 2
        if kind == "prefill":
            start = 0 if warmness == "warm" else self.half
            return text.prefill((start, start + count * tokens), tokens, count)
        if warmness == "warm":
            return text.decode((0, self.sizes.warm_tokens), tokens, count)
        if warmness == "steady":
            start = self.half + 2 * self.sizes.prompt + sum(size for size in self.sizes.step_batches if size < tokens) * count
            return text.decode((start, min(len(text), start + tokens * count)), tokens, count)
        if warmness == "cold":
            return text.scattered(self._fresh, tokens, min(count, 6))
        steps, new, old = [], tokens - tokens // 2, tokens // 2
        for k in range(min(count, len(self._fresh) // new)):
            places = [*((k * old + i) % self.sizes.warm_tokens for i in range(old)), *self._fresh[k * new:(k + 1) * new].tolist()]
            steps.append(text.step([(p, p + 1) for p in places]))
        return steps

    # ------------------------------------------------------------ running

    def run(self, warmness: tuple[str, ...]) -> None:
        """Both passes of a state, then the next state, warm first: the files are in the page cache; then the budgets.

        Without prefetch: in the states that the sizes name.
        """
        for state in sorted(warmness, key=ORDER.index):
            begun = time.monotonic()
            for number in range(PASSES):
                for tokens in self.sizes.step_batches:
                    both = (True, False) if state in self.sizes.in_line else (True,)
                    for ways in (both,) if state == "warm" else ((way,) for way in both):      # others change the store as they go
                        self._together(state, "decode", tokens, ways, number)
                self._together(state, "prefill", self.sizes.prompt, (True,), number)
                self._close_stores()
            self.say(f"step model, {state}: {time.monotonic() - begun:.0f} s ({self.clock.spent_s:.0f} s since the start)")
        ours = self.placements.get("ssdgram")
        if "steady" in warmness and isinstance(ours, Ssdgram):
            self._run_sweep(ours)

    def _together(self, state: str, kind: str, tokens: int, ways: tuple[bool, ...], number: int) -> None:
        """All that take part in a cell, with and without prefetch as `ways` says, block by block in turn."""
        names = [name for name, placement in self.placements.items()
                 if (state in placement.states if isinstance(placement, Ssdgram)
                     else state == "warm" or (state == "cold" and not placement.warm_only))]
        loops = {(name, way): Loop() for way in ways for name in (NONE, *names)}
        if (state, kind) == ("warm", "decode"):
            loops |= {(name, True): Loop() for name in self._frames}
        for (name, way), loop in loops.items():
            self._loops.setdefault((name, state, kind, tokens, way), []).append(loop)
        if self.clock.late():
            for loop in loops.values():
                loop.turn.status, loop.turn.why = "not run", f"the time limit of {self.sizes.limit_s:.0f} s had passed"
            return
        whole = Turn()
        with guarded(whole):
            steps = self.steps(state, kind, tokens)
            if not steps:
                raise ValueError("the trace is too short for this")
            compute = self.compute(kind, tokens)
            self._prepare(state, steps, loops, compute)
            framed = {key: loop for key, loop in loops.items() if key[0] in self._frames}
            others = {key: loop for key, loop in loops.items() if key not in framed}
            self._take_turns(others, state, kind, steps, 1 if state == "cold" else max(1, -(-len(steps) // BLOCKS)), compute)
            self._take_turns(framed, state, kind, steps, FRAME_BLOCK, compute)
        if state != "warm":                                  # a warm store stays as it is, the others do not
            self._close_stores()
        if whole.status != "ok":
            for loop in loops.values():
                loop.turn.status, loop.turn.why = whole.status, whole.why

    def _take_turns(self, loops: dict[tuple[str, bool], Loop], state: str, kind: str, steps: list[Step], size: int, compute: Any) -> None:
        """The loops' steps by blocks of `size`."""
        for k, first in enumerate(range(0, len(steps), size)):
            for name, way in in_turn(loops, k):
                self._block(name, state, kind, steps[first:first + size], steps[first - 1], compute, way, loops[name, way])

    def _close_stores(self) -> None:
        for framed in self._frames.values():
            framed.drop()
        for placement in self.placements.values():
            if isinstance(placement, Ssdgram):
                placement.close_store()

    def _placement(self, name: str) -> Placement | None:
        """None for the stand-in alone."""
        return self._frames.get(name) or self.placements.get(name)

    def _prepare(self, state: str, steps: list[Step], loops: dict[tuple[str, bool], Loop], compute: Any) -> None:
        """The store of the state; files dropped, or read into the page cache. What fails has failed in both ways."""
        for name in dict.fromkeys(name for name, _ in loops):
            placement, turn = self._placement(name), Turn()
            if placement is None:
                continue
            with guarded(turn):
                if name in self._frames:                     # behind its placement's own loop, which opened the store
                    self._frames[name].ready(compute, steps, [b - a for a, b in itertools.pairwise((*ENGRAM, LAYERS))])
                    continue
                placement.prepare(steps)
                if isinstance(placement, Ssdgram):
                    self._open(placement, state)
                    if state == "warm":
                        load(placement.opened, steps)
                        missed = load(placement.opened, steps)
                        if missed:
                            raise ValueError(f"{missed} bundles of the steps are not resident after loading")
                elif not placement.warm_only and state == "warm":
                    placement.load()
                if state == "warm":                          # files: all of their pages; the others: buffers and kernels
                    for step in steps[:placement.settling]:
                        placement.lookup(step)
            for (other, _), loop in loops.items():
                if other == name:
                    loop.turn.status, loop.turn.why = turn.status, turn.why

    def _open(self, ours: Ssdgram, state: str) -> None:
        """The store of the state, unless it is open."""
        if ours.store is not None:
            return
        warm = (0, self.sizes.warm_tokens)
        spans = {"mixed": warm, "warm": warm, "steady": (0, self.half)}
        ours.use(self.states.after(spans[state], hbm=ours.hbm) if state in spans else self.states.cold(hbm=ours.hbm))
        if ours.heated and state == "warm":
            self.states.heat(ours.opened, warm)

    def _block(self, name: str, state: str, kind: str, block: list[Step], before: Step, compute: Any, prefetch: bool, loop: Loop) -> None:
        """Time the block's steps. `before`: one of another block, which leads in."""
        placement = self._placement(name)
        if loop.turn.status != "ok" or sum(loop.seconds) > self.sizes.budget_s:
            return
        with guarded(loop.turn):
            if placement is not None and state == "cold":
                placement.forget()
            if state == "warm" and (placement is None or placement.leads_in):            # untimed: first after another's work
                self._step(name, before, compute, prefetch)
            snapshot = placement.snapshot() if placement is not None else None
            loop.seconds += [self._step(name, step, compute, prefetch) for step in block]
            if placement is not None:
                loop.accounts.append(placement.account(snapshot, placement.snapshot(), block, 0, 0))

    def _step(self, name: str, step: Step, compute: Any, prefetch: bool) -> float:
        """Seconds of one step of a loop."""
        if name in self._frames:
            seconds: float = self._frames[name].whole_step(step, compute, ENGRAM[0])
            return seconds
        return one_step(self._placement(name), step, compute, prefetch)

    def _run_sweep(self, ours: Ssdgram) -> None:
        """Steady tokens/s and hit rate of SSDGram with smaller budgets."""
        steps, compute = self.steps("steady", "decode", SWEEP_STREAMS), self.compute("decode", SWEEP_STREAMS)
        whole = self.states.dram
        for share in SHARES:
            if self.clock.late():
                return
            loop, dram = Loop(), whole * SHARES[-1] // share
            with guarded(loop.turn):
                ours.use(self.states.after((0, self.half), dram=dram, hbm=ours.hbm))
                try:
                    self._block("ssdgram", "steady", "decode", steps, steps[-1], compute, True, loop)
                finally:
                    ours.close_store()
            entry: dict[str, Any] = {"dram": dram, "share": self.share * SHARES[-1] / share, "status": loop.turn.status,
                                     "why": loop.turn.why}
            if loop.turn.status == "ok" and loop.seconds:
                entry |= {"tokens_s": SWEEP_STREAMS * len(loop.seconds) / sum(loop.seconds), **_hits(loop.accounts)}
            self.sweep.append(entry)

    # ------------------------------------------------------------ results

    def results(self) -> dict[str, Any]:
        """The stand-ins, a row for each loop, the sweep, and the drive that steady text would need."""
        rows = [self._result(key, loops) for key, loops in self._loops.items()]
        computes = {f"{kind} {tokens}": {"layer_us": compute.layer_us, "kind": compute.kind}
                    for (kind, tokens), compute in self._computes.items()}
        result = {"layers": LAYERS, "engram": list(ENGRAM), "asked_layer_us": {str(k): v for k, v in self.layer_us.items()},
                  "prefill_us_a_token": self.prefill_us, "stand_in": computes, "rows": rows, "sweep": self.sweep}
        result["drive"] = [need for tokens in self.sizes.step_batches if (need := self._drive(rows, tokens)) is not None]
        return result

    def _result(self, key: Key, loops: list[Loop]) -> dict[str, Any]:
        name, state, kind, tokens, prefetch = key
        row: dict[str, Any] = {"placement": name, "warmness": state, "kind": kind, "tokens": tokens, "prefetch": prefetch}
        good = [loop for loop in loops if loop.turn.status == "ok" and loop.seconds]
        if len(good) < len(loops) or not good:
            bad = next((loop.turn for loop in loops if loop.turn.status != "ok"), Turn(status="not run"))
            return {**row, "status": bad.status, "why": bad.why}
        seconds = [s for loop in good for s in loop.seconds]
        medians = [percentiles(loop.seconds)["p50"] for loop in good]
        alone = [s for loop in self._loops[NONE, state, kind, tokens, prefetch] for s in loop.seconds]
        base = percentiles(alone)["p50"] if alone else float("nan")
        exposed = percentiles([max(0.0, s - base) * 1e6 for s in seconds])
        layer_us = self._computes[kind, tokens].layer_us
        row |= {"status": "ok", "steps": len(seconds), "step_ms": {p: 1e3 * v for p, v in percentiles(seconds).items()},
                "tokens_s": tokens * len(seconds) / sum(seconds), "alone_ms": 1e3 * base, "exposed_us": exposed,
                "medians_ms": [1e3 * m for m in medians],
                "stable": len(medians) > 1 and max(medians) < (1 + UNSTABLE) * min(medians)}
        if not prefetch and name != NONE:
            row["window_layers"] = {p: math.ceil(exposed[p] / layer_us) if exposed[p] > HIDDEN * 1e6 * base else 0 for p in ("p50", "p99")}
        accounts = [account for loop in good for account in loop.accounts]
        if any("bundles" in account for account in accounts):
            row |= _hits(accounts)
            row["reads"] = sum(account["reads"] for account in accounts) / len(seconds)
            row["reads_s"] = row["reads"] * len(seconds) / sum(seconds)
        return row

    def _drive(self, rows: list[dict[str, Any]], tokens: int) -> dict[str, Any] | None:
        """The reads/s at which a steady step, whose reads are known, would be as fast as dram-uva's, or hidden: by `drive_rate`."""
        found = {(row["placement"], row["warmness"], row["prefetch"]): row for row in rows
                 if row["kind"] == "decode" and row["tokens"] == tokens and row["status"] == "ok"}
        steady = found.get(("ssdgram", "steady", True))
        ways = [found[name, "warm", True] for name in WAYS if (name, "warm", True) in found]
        if steady is None or not ways:
            return None
        warm = min(ways, key=lambda row: float(row["exposed_us"]["mean"]))
        layer_s, one_read_s = self._computes["decode", tokens].layer_us / 1e6, self.one_read_us / 1e6
        without = warm["exposed_us"]["mean"] / 1e6           # what is exposed without any read
        need: dict[str, Any] = {"tokens": tokens, "reads_a_step": steady["reads"], "reads_s_seen": steady["reads_s"],
                                "exposed_warm_us": warm["exposed_us"]["mean"], "warm_way": warm["placement"],
                                "exposed_steady_us": steady["exposed_us"]["mean"],
                                "hidden": drive_rate(steady["reads"], one_read_s, layer_s, HIDDEN * steady["alone_ms"] / 1e3 - without)}
        for name, prefetch in (("ahead", True), ("in_line", False)):
            uva = found.get(("dram-uva", "warm", prefetch))
            if uva is not None:
                need[f"as_dram_uva_{name}"] = drive_rate(steady["reads"], one_read_s, layer_s, uva["exposed_us"]["mean"] / 1e6 - without)
        return need


def _hits(accounts: list[dict[str, Any]]) -> dict[str, float]:
    asked = sum(account["bundles"] for account in accounts)
    missed = sum(account["misses"] + account["joined"] for account in accounts)
    return {"hit_rate_all": 1 - missed / asked if asked else float("nan")}


def drive_rate(reads: float, one_read_s: float, layer_s: float, exposed_s: float,
               engram: tuple[int, int] = (ENGRAM[0], ENGRAM[1])) -> float | None:
    """Reads/s at which a step's reads expose it by `exposed_s`; None: no drive is fast enough.

    The first n-gram layer's half of the reads comes first, then the other half; each is there one read's time after its turn.
    """
    def exposed(rate: float) -> float:
        first = max(0.0, reads / 2 / rate + one_read_s - engram[0] * layer_s)
        return first + max(0.0, reads / rate + one_read_s - engram[1] * layer_s - first)

    low, high = 1.0, 1e12
    if exposed_s < 0 or exposed(high) > exposed_s:
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if exposed(middle) <= exposed_s else (middle, high)
    return high
