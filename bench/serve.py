"""Serving on the CPU: planning, decode steps, the GIL, priorities, cold text against a memory map, memory, opening.

    python -m ssdgram bench serve [plan step gil priority cold rss open]      all seven if none is named

Each prints its medians over rounds that alternate what is compared, with fresh inputs, its bar, and the machine's load (other
work on the processors spoils every figure; the bars are for an idle machine). Checkpoint and stores are made in --folder and
deleted afterwards unless --keep. A result goes to bench/results/serve-NAME.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from ssdgram.bench.cold import cold, opening, rss
from ssdgram.bench.facts import facts, write_results
from ssdgram.bench.material import Material, chunks, discard, make, text
from ssdgram.bench.step import STEPS, step
from ssdgram.bench.warm import gil, plan, priority
from ssdgram.layout.writing import missing, remove_empty

NAMES = ("plan", "step", "gil", "priority", "cold", "rss", "open")
COLD = 2048                                                  # tokens of a cold batch


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--folder", type=click.Path(path_type=Path), default=Path("bench-serve"), show_default=True,
              help="Where checkpoint and stores are made: on the drive that is to be measured.")
@click.option("--rows", default=600_000, show_default=True,
              help="Rows of a column: 600,000 make a checkpoint of 7.1 GiB and a store of 7.3.")
@click.option("--small-rows", default=20_000, show_default=True, help="Those of the small store (plan, step, rss, open).")
@click.option("--dram", default="1GiB", show_default=True)
@click.option("--rounds", type=int, help="Instead of each measurement's own number.")
@click.option("--keep", is_flag=True, help="Leave checkpoint and stores for the next run.")
@click.option("--save/--no-save", default=True, help="Write bench/results/serve-NAME.json.")
def main(names: tuple[str, ...], folder: Path, rows: int, small_rows: int, dram: str, rounds: int | None, keep: bool,
         save: bool) -> None:
    """Make, run, print, write, delete."""
    chosen = names or NAMES
    small, large, made = Material(folder, small_rows), Material(folder, rows), missing(folder)
    try:
        make(small)
        if set(chosen) - {"plan", "step", "rss"}:
            make(large)
        traces = {kind: text(folder, kind, small.tokenizer, 60_000) for kind in ("code", "prose")}
        for kind, trace in traces.items():
            click.echo(f"text: {kind}, {len(trace.tokens):,} tokens of {trace.about['documents']}, sha256 "
                       f"{trace.about['text_sha256'][:16]}")
        about = {kind: {key: trace.about[key] for key in ("text_sha256", "tokenizer_sha256", "documents")}
                 for kind, trace in traces.items()}
        measurements = _measurements(small, large, traces["prose"].tokens, traces["code"].tokens, dram, rounds)
        for name in chosen:
            begin = os.getloadavg()
            click.echo(f"{name} (load {begin[0]:.2f} on {len(os.sched_getaffinity(0))} processors)")
            result = measurements[name]()
            if save:
                load = [round(begin[0], 2), round(os.getloadavg()[0], 2)]
                payload = {"facts": facts(folder), "load": load, "rows_a_column": rows, "dram": dram, "text": about, **result}
                click.echo(f"  written: {write_results(f'serve-{name}', payload)}")
    finally:
        if not keep:
            discard(small, large)
        remove_empty(made)


def _measurements(small: Material, large: Material, prose: np.ndarray, code: np.ndarray, dram: str,
                  rounds: int | None) -> dict[str, Callable[[], dict[str, Any]]]:
    tokens = np.concatenate([prose, code])
    in_turn = np.concatenate([piece for pair in zip(chunks(prose, COLD), chunks(code, COLD)) for piece in pair])
    stores = {f"{material.rows:,} rows a column": material.out for material in (small, large)}
    times: dict[str, int] = {} if rounds is None else {"rounds": rounds}
    return {
        "plan": lambda: plan(small.out, tokens, dram=dram, **times),
        "step": lambda: step(small.out, dram=dram, rounds=rounds or STEPS),
        "gil": lambda: gil(large.out, tokens, dram=dram, **times),
        "priority": lambda: priority(large.out, tokens, dram=dram, **times),
        "cold": lambda: cold(large, in_turn, positions=COLD, dram=dram, **times),
        "rss": lambda: rss(small.out, dram=dram),
        "open": lambda: opening(stores, dram=dram, **times),
    }


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
