"""The matrix: placement x warmness x batch. Placements take turns on the same steps, block by block, in each of two passes.

A cell is refused rather than shown when it is not what it says: "cold" with more than 1 % of the files in the page cache, "warm"
with a single bundle missing (of files: with 1 % of the bytes, and the files not whole in the page cache). One that fails says so,
with its error, and the others go on. It does not know what a placement does; it knows when to ask, and what it cost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ssdgram.bench.warmness.meter import Counters, cached_bytes, counters, percentiles, resident_memory
from ssdgram.bench.warmness.placements import Placement, Ssdgram
from ssdgram.bench.warmness.sizes import PASSES, Sizes
from ssdgram.bench.warmness.states import States, load
from ssdgram.bench.warmness.text import Span, Step, Text

COLD_SHARE = 0.01                                            # of the files in the page cache, at most
WARM_SHARE = 0.01                                            # of a warm step's bytes from the drive, at most
OWN = 1 << 20                                                # bytes that may be pages of libraries, read as they are needed
TELLING = 16                                                 # tokens of a lookup whose rows/s say something of larger ones
BLOCKS = 4                                                   # turns of a placement in a cell's pass
FRESH = 6                                                    # 1 / this of the trace, its end: where never seen positions are taken from
UNSTABLE = 0.10                                              # medians of two passes that differ by more are marked
ORDER = ("cold", "warm", "steady", "mixed")
Say = Callable[[str], None]
T = TypeVar("T")


class Refused(Exception):
    """A cell that is not what it says; the text tells why."""


class Clock:
    """The time that a run has. `late` cells are not begun."""

    def __init__(self, limit_s: float) -> None:
        self.begun, self.limit_s = time.monotonic(), limit_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.begun

    def late(self, share: float = 1.0) -> bool:
        """Whether more than that share of the time has passed."""
        return self.spent_s > share * self.limit_s


@dataclass(frozen=True)
class Row:
    """What the placements are compared on."""

    warmness: str
    kind: str                                                # decode or prefill
    tokens: int                                              # streams, or the chunk's tokens


@dataclass
class Turn:
    """What one placement did in one row and pass."""

    times_us: list[float] = field(default_factory=list)
    stalls_us: list[float] = field(default_factory=list)
    spent: Counters = field(default_factory=Counters)
    done: list[Step] = field(default_factory=list)
    accounts: list[dict[str, Any]] = field(default_factory=list)
    cached_before: float = 0.0
    cached_after: float = 0.0
    rss: int = 0
    held: int = 0
    pinned: int = 0
    why: str = ""                                            # refused, or failed
    status: str = "ok"


class Matrix:
    """Runs the rows; `cells()` gives what came of them."""

    def __init__(self, placements: dict[str, Placement], states: States, text: Text, sizes: Sizes, clock: Clock, say: Say,
                 share: float = 1.0) -> None:
        self.share = share                                   # of the run's time, what the matrix may take
        self.placements, self.states, self.text, self.sizes, self.clock, self.say = placements, states, text, sizes, clock, say
        half = len(text) // 2
        self.warm_span, self.first_half = (0, sizes.warm_tokens), (0, half)
        self._next, self._end = half, len(text) - len(text) // FRESH         # dealt out to the steady and mixed cells
        self._fresh = text.never_seen((self._end, len(text)), (0, sizes.warm_tokens))
        self._fresh_next = 0
        self._steps: dict[Row, list[Step]] = {}
        self._turns: dict[tuple[str, Row], list[Turn]] = {}
        self._unopened: dict[str, Turn] = {}                 # what became of opening the stores of the present state
        self._rates: dict[tuple[str, str, str], float] = {}  # (placement, warmness, manner) -> rows/s seen last
        self._sizes_of = {name: max(1, sum(path.stat().st_size for path in placement.files())) for name, placement in placements.items()}

    def rows(self, warmness: str) -> list[Row]:
        """All rows of a state, small batches first."""
        return [Row(warmness, kind, tokens) for kind, sizes in (("decode", self.sizes.decode), ("prefill", self.sizes.prefill))
                for tokens in sizes]

    # ------------------------------------------------------------ steps

    def take(self, count: int) -> Span:
        """The next `count` positions of the second half: nobody gets them twice."""
        start = self._next
        if start + count > self._end:
            raise Refused(f"the trace is too short: its second half has {self._end - start} of {count} tokens left")
        self._next = start + count
        return start, start + count

    def steps(self, row: Row) -> list[Step]:
        """The row's steps, the same in both passes."""
        if row not in self._steps:
            self._steps[row] = self._cut(row)
        return self._steps[row]

    def _cut(self, row: Row) -> list[Step]:
        count, text = self.sizes.lookups(row.warmness, row.kind, row.tokens), self.text
        half = (len(text) // 2, len(text))
        if row.warmness == "warm":
            cut = text.decode if row.kind == "decode" else text.prefill
            steps = cut(self.warm_span, row.tokens, count)
        elif row.warmness == "steady":
            cut = text.decode if row.kind == "decode" else text.prefill
            steps = cut(self.take(row.tokens * count), row.tokens, count)
        elif row.warmness == "cold":
            steps = text.scattered(self._fresh, row.tokens, count) if row.kind == "decode" else text.prefill(half, row.tokens, count)
        else:
            steps = self._mixed(row, count)
        if not steps:
            raise Refused(f"the trace is too short for {row.kind} steps of {row.tokens} tokens")
        return steps

    def _mixed(self, row: Row, count: int) -> list[Step]:
        """Half of a step's positions from the warm text, half new to the store: for decode 2-grams nobody asked for."""
        new, old = row.tokens - row.tokens // 2, row.tokens // 2
        if old == 0:
            raise Refused("a step of one position has no halves")
        if row.kind == "prefill":
            known = [(k * old % (self.warm_span[1] - old), k * old % (self.warm_span[1] - old) + old) for k in range(count)]
            return [self.text.step([known[k], self.take(new)]) for k in range(count)]
        steps = []
        for k in range(count):
            fresh = self._fresh[self._fresh_next:self._fresh_next + new]
            if len(fresh) < new:
                break
            self._fresh_next += new
            places = [(k * old + i) % self.warm_span[1] for i in range(old)]
            steps.append(self.text.step([(int(p), int(p) + 1) for p in [*places, *fresh]]))
        return steps

    # ------------------------------------------------------------ running

    def run(self, warmness: tuple[str, ...]) -> None:
        """Both passes over all rows of a state, then the next state: cold, then warm, for which files are read once, then the rest."""
        for state in sorted(warmness, key=ORDER.index):
            for number in range(PASSES):
                begun = time.monotonic()
                whole = Turn()
                with guarded(whole), self._state(state):
                    for row in self.rows(state):
                        self._row(row, number)
                if whole.status != "ok":
                    self._all_failed(state, number, whole)
                self.say(f"{state}, pass {number + 1}: {time.monotonic() - begun:.0f} s ({self.clock.spent_s:.0f} s since the start)")

    def _all_failed(self, state: str, number: int, whole: Turn) -> None:
        for row in self.rows(state):
            for name in self.placements:
                turns = self._turns.setdefault((name, row), [])
                if len(turns) <= number:
                    turns.append(Turn(status=whole.status, why=whole.why))

    @contextmanager
    def _state(self, state: str) -> Iterator[None]:
        """Files and store of a state; the store is closed at the end."""
        files = [placement for placement in self.placements.values() if not placement.warm_only]
        stores = stores_of(self.placements, state)
        self._unopened = {name: Turn() for name in stores}
        try:
            for name, ours in stores.items():
                with guarded(self._unopened[name]):
                    self._open(ours, state)
            for placement in files:                          # behind the stores, which give some pages up when they open
                if state == "cold":
                    placement.forget()
                elif state == "warm" and not isinstance(placement, Ssdgram):
                    placement.load()
            yield
        finally:
            for ours in stores.values():
                ours.close_store()

    def _open(self, ours: Ssdgram, state: str) -> None:
        spans = {"mixed": self.warm_span, "warm": self.warm_span, "steady": self.first_half}
        ours.use(self.states.after(spans[state], hbm=ours.hbm) if state in spans else self.states.cold(hbm=ours.hbm))
        if ours.heated and state == "warm":
            share = self.states.heat(ours.opened, self.warm_span)
            self.say(f"{ours.name}: {share:.1%} of the warm text's bundles are in GPU memory")

    def _row(self, row: Row, number: int) -> None:
        stores = stores_of(self.placements, row.warmness)
        here = {name: placement for name, placement in self.placements.items()
                if name in stores or placement.warm_only or (not isinstance(placement, Ssdgram) and row.warmness in ("cold", "warm"))}
        turns = {name: Turn() for name in here}
        for name, turn in turns.items():
            self._turns.setdefault((name, row), []).append(turn)
        try:
            steps = self.steps(row)
        except Refused as error:
            for turn in turns.values():
                turn.status, turn.why = "not run", str(error)
            return
        for name, placement in here.items():
            if name in stores and stores[name].store is None:
                turns[name].status, turns[name].why = "failed", f"its store could not be opened: {self._unopened[name].why}"
                continue
            self._begin(row, name, placement, steps, turns[name])
        size = -(-len(steps) // BLOCKS)
        blocks = [steps[k:k + size] for k in range(0, len(steps), size)]
        for k, block in enumerate(blocks):
            for name in in_turn(here, k):
                if turns[name].status == "ok":
                    self._block(row, name, here[name], block, turns[name])
        for name, placement in here.items():
            self._finish(row, name, placement, turns[name])

    def _begin(self, row: Row, name: str, placement: Placement, steps: list[Step], turn: Turn) -> None:
        """Whether the placement can take part; what has to be there before."""
        rate, rows = self._rates.get((name, row.warmness, placement.manner(row.tokens))), row.tokens * self._rows_a_token()
        if self.clock.late(self.share):
            turn.status, turn.why = "not run", f"{self.share * self.clock.limit_s:.0f} s, what the matrix may take, had passed"
        elif rate and rows / rate > self.sizes.longest_s:
            turn.status = "not run"
            turn.why = f"one lookup would take about {rows / rate:.0f} s at the {rate:,.0f} rows/s of smaller batches"
        else:
            with guarded(turn):
                placement.prepare(steps)
                if row.warmness == "warm":
                    self._warm(name, placement, steps)
                elif placement.warm_only:
                    placement.lookup(steps[0])
                if row.warmness != "cold":
                    turn.cached_before = self._share(name, placement)

    def _warm(self, name: str, placement: Placement, steps: list[Step]) -> None:
        """Everything resident, or Refused."""
        if isinstance(placement, Ssdgram):
            load(placement.opened, steps)
            missed = load(placement.opened, steps)
            if missed:
                raise Refused(f"{missed} bundles of the steps are not resident after loading: a larger --dram would hold them")
        for step in steps[:placement.settling]:
            placement.lookup(step)

    def _block(self, row: Row, name: str, placement: Placement, block: list[Step], turn: Turn) -> None:
        cold = row.warmness == "cold" and not placement.warm_only
        if not cold:
            self._lead_in(row, placement, turn)
        for part in ([step] for step in block) if cold else [block]:
            if turn.times_us and sum(turn.times_us) > self.sizes.budget_s * 1e6:
                return
            with guarded(turn):
                if cold:
                    self._make_cold(row, name, placement, turn)
                before, snapshot = counters(), placement.snapshot()
                for step in part:
                    begin = time.perf_counter()
                    stall = placement.lookup(step)
                    turn.times_us.append((time.perf_counter() - begin) * 1e6)
                    turn.stalls_us.append(stall * 1e6)
                    turn.done.append(step)
                spent = counters() - before
                turn.spent += spent
                turn.accounts.append(placement.account(snapshot, placement.snapshot(), part, spent.drive_bytes, spent.major_faults))

    def _lead_in(self, row: Row, placement: Placement, turn: Turn) -> None:
        """One untimed lookup of a step that was measured before: what is timed is a loop, not the first call after another placement's
        work, which has the processor's caches and the GPU's clocks to itself no more."""
        known = turn.done[-1:] or (self.steps(row)[-1:] if row.warmness == "warm" or placement.warm_only else [])
        if known and placement.leads_in and turn.status == "ok":
            with guarded(turn):
                placement.lookup(known[0])

    def _make_cold(self, row: Row, name: str, placement: Placement, turn: Turn) -> None:
        """Nothing resident, or Refused. A decode step's bundles were never asked for; before a chunk the store is opened anew."""
        if isinstance(placement, Ssdgram) and (row.kind == "prefill" or not turn.times_us):
            placement.close_store()
            placement.use(self.states.cold(hbm=placement.hbm))
        placement.forget()
        share = self._share(name, placement)
        turn.cached_before = max(turn.cached_before, share)
        if share > COLD_SHARE:
            raise Refused(f"{share:.1%} of the files are in the page cache, which is not cold (at most {COLD_SHARE:.0%}); are they on a "
                          f"file system in memory, or in use by another process?")

    def _finish(self, row: Row, name: str, placement: Placement, turn: Turn) -> None:
        turn.rss, turn.held, turn.pinned = resident_memory(), placement.held_bytes, placement.pinned_bytes
        turn.cached_after = self._share(name, placement)
        if turn.status == "ok" and row.warmness == "warm" and any(a.get("misses", 0) + a.get("joined", 0) for a in turn.accounts):
            turn.status, turn.why = "refused", "bundles of a warm step were not resident when it came to it"
        if turn.status == "ok" and row.warmness == "warm" and self._read_again(placement, turn):
            turn.status = "refused"
            turn.why = (f"{turn.spent.drive_bytes} bytes of warm steps came from the drive although they were read before: "
                        f"this machine has too little memory to keep the files")
        if turn.times_us and row.tokens >= TELLING:
            rows = len(turn.times_us) * row.tokens * self._rows_a_token()
            self._rates[name, row.warmness, placement.manner(row.tokens)] = rows / sum(turn.times_us) * 1e6

    def _read_again(self, placement: Placement, turn: Turn) -> bool:
        """Whether what the warm steps asked for came from the drive. The kernel counts a process's bytes, of whatever file: of files that
        are whole in the page cache before and behind the steps there were none, and a store counts its reads itself."""
        if isinstance(placement, Ssdgram):
            return any(account["reads"] for account in turn.accounts)
        much = turn.spent.drive_bytes > WARM_SHARE * self._useful(turn)
        if placement.files():
            return much and min(turn.cached_before, turn.cached_after) < 1
        return much and turn.spent.drive_bytes > OWN

    def _useful(self, turn: Turn) -> int:
        return sum(len(step) for step in turn.done) * self._rows_a_token() * self.text.geometry.row_bytes

    def _share(self, name: str, placement: Placement) -> float:
        files = placement.files()
        return cached_bytes(files) / self._sizes_of[name] if files else 0.0

    def _rows_a_token(self) -> int:
        return self.text.geometry.columns * len(self.text.geometry.layers)

    # ------------------------------------------------------------ results

    def cells(self) -> list[dict[str, Any]]:
        """One object for each placement and row that was tried; both passes and what they have in common."""
        return [self._cell(name, row, turns) for (name, row), turns in self._turns.items()]

    def _cell(self, name: str, row: Row, turns: list[Turn]) -> dict[str, Any]:
        cell: dict[str, Any] = {"placement": name, **asdict(row)}
        good = [turn for turn in turns if turn.status == "ok" and turn.times_us]
        if not good or any(turn.status in ("refused", "failed") for turn in turns):
            bad = next((turn for turn in turns if turn.status != "ok"), turns[0])
            return {**cell, "status": bad.status if bad.status != "ok" else "not run", "why": bad.why}
        rows, useful = row.tokens * self._rows_a_token(), row.tokens * self._rows_a_token() * self.text.geometry.row_bytes
        times = [us for turn in good for us in turn.times_us]
        lookups, spent = len(times), sum((turn.spent for turn in good), Counters())
        accounts = [account for turn in good for account in turn.accounts]
        reads, bytes_read = (sum(account[key] for account in accounts) for key in ("reads", "bytes_read"))
        medians = [percentiles(turn.times_us)["p50"] for turn in good]
        seconds, placement = sum(times) / 1e6, self.placements[name]
        cell |= {
            "status": "ok", "lookups": lookups, "passes": len(good), "medians_us": medians,
            "stable": len(medians) > 1 and max(medians) < (1 + UNSTABLE) * min(medians),
            "lookup_us": percentiles(times), "stall_us": percentiles([us for turn in good for us in turn.stalls_us]),
            "rows_s": rows * lookups / seconds, "hit_rate": mean_rates(accounts),
            "reads": reads / lookups, "reads_s": reads / seconds, "bytes_read": bytes_read / lookups,
            "bytes_per_useful_byte": bytes_read / lookups / useful,
            "cpu_s": spent.cpu_s / lookups, "minor_faults": spent.minor_faults / lookups, "major_faults": spent.major_faults / lookups,
            "voluntary_switches": spent.voluntary_switches / lookups, "involuntary_switches": spent.involuntary_switches / lookups,
            "drive_bytes": spent.drive_bytes / lookups,
            "pcie_bytes": sum(placement.pcie_bytes(step) for turn in good for step in turn.done) / lookups,
            "held_bytes": max(turn.held for turn in good), "pinned_bytes": max(turn.pinned for turn in good),
            "rss": max(turn.rss for turn in good),
            "cached_before": max(turn.cached_before for turn in good), "cached_after": max(turn.cached_after for turn in good),
        }
        if any("hit_rate_all" in account for account in accounts):
            asked, missed = (sum(account[key] for account in accounts) for key in ("bundles", "misses"))
            joined = sum(account["joined"] for account in accounts)
            cell |= {"bundles": asked / lookups, "hit_rate_all": 1 - (missed + joined) / max(1, asked)}
        return cell


def in_turn(names: Iterable[T], block: int) -> list[T]:
    """The order of a block: another for each, the same in every run, so that nobody always comes behind the same neighbour (who leaves
    the GPU hot or cool, and the caches to itself)."""
    order = list(names)
    random.Random(block).shuffle(order)
    return order


def stores_of(placements: dict[str, Placement], state: str) -> dict[str, Ssdgram]:
    """The placements that are stores and take part in the state."""
    return {name: placement for name, placement in placements.items() if isinstance(placement, Ssdgram) and state in placement.states}


@contextmanager
def guarded(turn: Turn) -> Iterator[None]:
    """What goes wrong in a placement is its own result; Ctrl-C is not."""
    try:
        yield
    except Refused as error:
        turn.status, turn.why = "refused", str(error)
    except Exception as error:                               # a peer or a driver may raise anything: the report says it
        turn.status, turn.why = "failed", f"{type(error).__name__}: {error}"


def mean_rates(accounts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Hit rates by tier and order over several accounts: weighted by their bundles where these are told."""
    totals: dict[str, dict[str, float]] = {}
    weight = 0.0
    for account in accounts:
        share = float(account.get("bundles", 1))
        weight += share
        for tier, orders in account["hit_rate"].items():
            for order, rate in orders.items():
                if rate == rate:
                    totals.setdefault(tier, {}).setdefault(order, 0.0)
                    totals[tier][order] += rate * share
    return {tier: {order: total / weight for order, total in orders.items()} for tier, orders in totals.items()} if weight else {}
