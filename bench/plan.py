"""The planner against a store: predicted and measured hit rates and stalls, for several budgets and batch shapes.

    python -m ssdgram bench plan --folder DIR           a store is made there, on the drive that is to be measured

Text is cut into requests of --piece tokens; of each two neighbours one goes to each half. The planner sees one half; the store serves
the other, of which the first batches fill its cache, as fast as they come, and the next are measured at the pace of a model. So no
measured token was planned with, and both halves are of one kind of text. What still differs between them is no error of the
planner's; how much it is shows in `text`, the planner's own figure for the measured half. Reads are direct: the page cache has no
part. The drive is measured before, between and after the measured steps, by bursts of reads through a store of its own.
Bars: hit rate within 0.02; stall within 25 %, or both below 1 % of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

import ssdgram
from ssdgram._budget import parse_size
from ssdgram.bench.facts import RESULTS, facts, write_results
from ssdgram.bench.material import Material, discard, make, random_tokens, text
from ssdgram.errors import ConfigError
from ssdgram.layout.writing import missing, remove_empty
from ssdgram.store import Tuning
from ssdgram.tools.drive import Drive
from ssdgram.tools.model import model_of
from ssdgram.tools.plan import Load, Planner, Prices, Row
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_replay import Pace, Replayed, joined, replay
from ssdgram.tools.trace_shapes import Batches, decode, prefill, recorded, requests

HIT_BAR, STALL_BAR, NO_STALL = 0.02, 0.25, 0.01
PARTS, LEAST_PART = 5, 10                                    # of the measured batches; batches of a part, at the least
BURSTS = (1, 2, 4, 16, 64, 256)                              # random tokens that the drive is measured with: 48 reads each
PATIENT = Tuning(degraded_after_s=30)
FREE = Prices(0.0, 0.0, 0.0)                                 # money is not what is checked


@dataclasses.dataclass(frozen=True)
class Cell:
    """A shape of batches, the model's pace, batches ahead, and how many batches warm the cache and are measured."""

    shape: str                                               # decode, prefill, recorded
    size: int
    pace: Pace
    ahead: int
    warm: int
    measured: int

    @property
    def name(self) -> str:
        """As it is printed."""
        return {"decode": f"decode {self.size}", "prefill": f"prefill {self.size}", "recorded": "recorded"}[self.shape]

    def batches(self, trace: Trace, lookback: int) -> Batches:
        """The batches of the cell, those that warm first. ConfigError if the trace has too few."""
        if self.shape == "recorded":
            made = recorded(trace)
        else:
            made = (decode if self.shape == "decode" else prefill)(trace, self.size, lookback).while_full(self.size)
        if len(made) < self.warm + self.measured:
            raise ConfigError(f"{self.name}: half of the trace has {len(made)} batches, {self.warm} + {self.measured} are wanted: give a "
                              f"longer trace")
        return made.part(0, self.warm + self.measured)


def halves(traces: Sequence[Trace], piece: int, seed: int = 0) -> tuple[Trace, Trace]:
    """Two traces of requests of at most `piece` tokens: of each two neighbours one goes to each, so no token of one is in the other. The
    pairs come in a random order. Recordings: their first and second half of the batches."""
    if any(trace.batches is not None for trace in traces):
        if len(traces) != 1:
            raise ConfigError("several recordings: expected one, or traces of documents")
        middle = (len(traces[0].batches) - 1) // 2           # type: ignore[arg-type]
        return traces[0].part(0, middle), traces[0].part(middle, 2 * middle)
    pieces = [trace.tokens[start:min(start + piece, stop)] for trace in traces
              for begin, stop in zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist()) for start in range(begin, stop, piece)]
    random = np.random.default_rng(seed)
    pairs = 2 * random.permutation(len(pieces) // 2)
    first = random.integers(0, 2, len(pairs))
    made = []
    for half in (pairs + first, pairs + 1 - first):
        chosen = [pieces[number] for number in half]
        starts = np.cumsum([0, *map(len, chosen)]).astype(np.int64)
        made.append(Trace.of_documents(np.concatenate(chosen) if chosen else np.empty(0, np.int32), starts, {"piece": piece, "seed": seed}))
    return made[0], made[1]


def measured_drive(store: Path, rounds: int = 5) -> Drive:
    """The drive as a store has it, delivery and checks included: how long bursts of reads for random tokens take a small store of its own.

    A burst of r reads that takes t seconds is a rate of r / t with r reads in flight (tools/drive.py). No two bursts begin with the same
    token while the vocabulary has others: a burst of one token that came before would read nothing.
    """
    random, seconds, reads = np.random.default_rng(), [], []
    with ssdgram.open(store, dram="64MiB", tuning=PATIENT) as opened:
        first = np.resize(3 + random.permutation(opened._vocabulary - 3), rounds * len(BURSTS)).tolist()
        for _ in range(rounds):
            for count in BURSTS:
                tokens = random_tokens(random, opened._vocabulary, count)
                tokens[0] = first.pop()
                with opened.prefetch(tokens) as batch:
                    batch.wait(timeout_s=60)
                    timing = batch.timing
                seconds.append(1e-6 * timing["published_us"])
                reads.append(timing["reads"])
    middle = np.median(np.reshape(seconds, (rounds, -1)), axis=0)
    sizes = np.median(np.reshape(reads, (rounds, -1)), axis=0)
    return Drive(tuple(sizes.tolist()), tuple(np.maximum.accumulate(sizes / middle).tolist()), int(sizes[-1]))


def _measured(store: ssdgram.Store, batches: Batches, cell: Cell) -> tuple[Replayed, Drive]:
    """The batches served at the cell's pace in a few parts, the drive measured before, between and behind them: on a machine that does
    other things too, a drive that was measured at another time is another drive. Its rates are the means."""
    parts = max(1, min(PARTS, len(batches) // LEAST_PART))
    edges = np.linspace(0, len(batches), parts + 1).astype(int)
    done, drives = [], [measured_drive(store.path)]
    for first, stop in itertools.pairwise(edges.tolist()):
        done.append(replay(store, batches.part(first, stop), cell.pace, cell.ahead))
        drives.append(measured_drive(store.path))
    rates = np.mean([[float(drive.rate(depth)) for depth in drives[0].depths] for drive in drives], axis=0)
    return joined(done), Drive(drives[0].depths, tuple(np.maximum.accumulate(rates).tolist()), drives[0].depth)


def check(store: Path, traces: Sequence[Trace], cells: Sequence[Cell], budgets: Sequence[int],
          piece: int = 128) -> Iterator[dict[str, Any]]:
    """One row for each cell and budget: predicted from one half, measured on the other, printed as they come."""
    geometry, token_map = model_of(store=store)
    vocabulary = 0 if token_map is None else len(token_map)
    planned_with, served = halves(traces, piece)
    click.echo(f"{'':14} {'dram':>9}  {'hit rate':>8} {'measured':>9} {'error':>7} {'text':>7}   {'stall':>9} {'measured':>9} "
               f"{'error':>7}   {'reads':>7} {'measured':>9}   drive")
    for cell in cells:
        ours, theirs = cell.batches(planned_with, geometry.orders), cell.batches(served, geometry.orders)
        loads = [Load(cell.name, requests(batches, geometry, token_map), batches.positions(), cell.pace, cell.ahead, cell.warm)
                 for batches in (ours, theirs)]
        for dram in budgets:
            with ssdgram.open(store, dram=dram, tuning=PATIENT) as opened:
                replay(opened, theirs.part(0, cell.warm), None, cell.ahead)
                done, drive = _measured(opened, theirs.part(cell.warm, len(theirs)), cell)
            row, of_text = (Planner(geometry, vocabulary, load, drive, FREE).row(dram) for load in loads)
            compared = {**_compared(cell, dram, row, of_text, done, drive), "piece": piece}
            _show(compared)
            yield compared


def _compared(cell: Cell, dram: int, row: Row, of_text: Row, done: Replayed, drive: Drive) -> dict[str, Any]:
    stall, predicted = float(done.stall_s.mean()), row.stall_s
    both_none = max(stall, predicted) <= NO_STALL * cell.pace.step_s
    error = predicted / stall - 1 if stall > 0 else 0.0
    hit_error = row.hit_rate - done.hit_rate()
    return {
        "cell": cell.name, "ahead": cell.ahead, "step_ms": 1e3 * cell.pace.step_s, "slack_ms": [1e3 * slack for slack in cell.pace.slack_s],
        "warm": cell.warm, "measured_batches": cell.measured, "positions": int(done.positions.sum()), "dram": dram, "bundles": row.bundles,
        "hit_rate": {"predicted": row.hit_rate, "measured": done.hit_rate(), "lru": row.lru, "predicted_for_this_text": of_text.hit_rate,
                     "by_order": {order + 2: [row.hit_rates[order], done.hit_rate(order + 2)] for order in range(len(row.hit_rates))}},
        "reads_a_batch": {"predicted": row.reads, "measured": float(done.reads.mean())},
        "stall_ms": {"predicted": 1e3 * predicted, "measured": 1e3 * stall, "predicted_for_this_text": 1e3 * of_text.stall_s,
                     "p99": [1e3 * row.stall_p99_s, 1e3 * float(np.percentile(done.stall_s, 99))]},
        "hit_error": hit_error, "stall_error": error, "drive": drive.to_json(), "load": round(os.getloadavg()[0], 2),
        "ok": bool(abs(hit_error) <= HIT_BAR and (both_none or abs(error) <= STALL_BAR)),
    }


def _show(row: dict[str, Any]) -> None:
    hit, stall, reads = row["hit_rate"], row["stall_ms"], row["reads_a_batch"]
    click.echo(f"{row['cell']:14} {row['dram'] / 2**20:6.0f}MiB  {hit['predicted']:8.4f} {hit['measured']:9.4f} {row['hit_error']:+7.4f} "
               f"{hit['predicted_for_this_text']:7.4f}   {stall['predicted']:7.2f}ms {stall['measured']:7.2f}ms "
               f"{row['stall_error']:+7.1%}   {reads['predicted']:7.0f} {reads['measured']:9.0f}   "
               f"{row['drive']['reads_s'][-1]:,.0f}/s  {'ok' if row['ok'] else 'MISSED'}")


def cells_of(layers: Sequence[int], streams: Sequence[int], chunks: Sequence[int], tokens: int, step_ms: float,
             chunk_tokens_s: float, ahead: int) -> list[Cell]:
    """Cells of decode streams and prefill chunks; each warms with `tokens` tokens and measures as many."""
    def pace(step_s: float) -> Pace:
        return Pace(step_s, tuple(step_s * min(1.0, layer / 40) for layer in layers))

    made = [Cell("decode", size, pace(step_ms / 1e3), 0, tokens // size, tokens // size) for size in streams if size]
    return made + [Cell("prefill", size, pace(size / chunk_tokens_s), ahead, tokens // size, tokens // size) for size in chunks if size]


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("bench-plan"), show_default=True,
              help="Where checkpoint, store and text are made: on the drive that is to be measured.")
@click.option("--rows", default=250_000, show_default=True, help="Rows of a column: 250,000 make a store of 3.1 GiB.")
@click.option("--dram", "budgets", multiple=True, default=("64MiB", "256MiB", "1GiB"), show_default=True)
@click.option("--decode", "streams", type=int, multiple=True, default=(64,), show_default=True, help="Streams; 0: none.")
@click.option("--prefill", "chunks", type=int, multiple=True, default=(2048,), show_default=True, help="Tokens of a chunk; 0: none.")
@click.option("--tokens", default=40_960, show_default=True, help="That warm the cache, and that are measured.")
@click.option("--piece", default=128, show_default=True, help="Tokens of a request.")
@click.option("--step-ms", default=20.0, show_default=True, help="A decode step without stalls.")
@click.option("--prefill-tokens-s", default=16_000.0, show_default=True, help="What the model prefills without stalls.")
@click.option("--ahead", default=1, show_default=True, help="Prefill chunks prefetched before the one in use.")
@click.option("--keep", is_flag=True, help="Leave what was made for the next run.")
@click.option("--add", is_flag=True, help="Add the rows to those of an earlier run.")
@click.option("--save/--no-save", default=True, help="Write bench/results/plan.json.")
def main(folder: Path, rows: int, budgets: tuple[str, ...], streams: tuple[int, ...], chunks: tuple[int, ...], tokens: int, piece: int,
         step_ms: float, prefill_tokens_s: float, ahead: int, keep: bool, add: bool, save: bool) -> None:
    """Make, predict, measure, print, write."""
    material, made = Material(folder, rows), missing(folder)
    try:
        make(material)
        traces = [text(folder, kind, material.tokenizer, 1_000_000) for kind in ("prose", "code")]
        cells = cells_of(model_of(store=material.out)[0].layers, streams, chunks, tokens, step_ms, prefill_tokens_s, ahead)
        found = json.loads((RESULTS / "plan.json").read_text())["rows"] if add and (RESULTS / "plan.json").exists() else []
        payload = {"facts": facts(folder), "rows_a_column": rows, "text": {trace.sha256[:16]: trace.about for trace in traces},
                   "bars": {"hit_rate": HIT_BAR, "stall": STALL_BAR}, "rows": found}
        for row in check(material.out, traces, cells, [parse_size(budget, "dram") for budget in budgets], piece):
            found.append(row)
            if save:
                write_results("plan", payload)               # after each row: a run that is ended keeps what it has
        if save:
            click.echo(f"written: {RESULTS / 'plan.json'}")
    finally:
        if not keep:
            discard(material)
        remove_empty(made)


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
