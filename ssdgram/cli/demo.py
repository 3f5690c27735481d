"""`ssdgram demo`: runs ssdgram.demo in a folder of its own and prints what it showed as one table."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from ssdgram.layout.writing import check_writable
from ssdgram.machine import file_system

if TYPE_CHECKING:
    from rich.table import Table

    from ssdgram.demo import Outcome, Phase


@click.command()
@click.option("--dir", "place", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="Where the folder of the demonstration is made (default: the temporary folder, if that is on a drive).")
@click.option("--keep", is_flag=True, help="Leave checkpoint and store there.")
@click.option("--vocab-size", type=click.IntRange(1), default=100_000, show_default=True,
              help="Rows of a column, about; files take 26 kB times that.")
@click.option("--tokens", type=click.IntRange(1), default=16_384, show_default=True, help="Tokens of a phase.")
@click.option("--chunk", type=click.IntRange(1), default=256, show_default=True, help="Tokens of a step.")
@click.option("--dram", default="512MiB", show_default=True, help="The store's memory budget.")
@click.option("--queue", default="auto", show_default=True, type=click.Choice(["auto", "uring", "threads"]))
def demo(place: Path | None, keep: bool, vocab_size: int, tokens: int, chunk: int, dram: str, queue: str) -> None:
    """Make up a small store, serve real text from it cold, mixed and warm, check every row bit by bit, print a table.

    Exits with status 1 if a single row was wrong.
    """
    from rich.console import Console

    from ssdgram.demo import run

    console = Console()
    with _folder(place, keep) as folder:
        console.print(f"in {folder}{' (kept)' if keep else ' (removed at the end)'}", highlight=False)
        outcome = run(folder, vocab_size=vocab_size, tokens=tokens, chunk=chunk, dram=dram, queue=queue,
                      say=lambda text: console.print(f"  {text}", highlight=False))
    console.print(table_of(outcome))
    for name, fact in outcome.facts.items():
        console.print(f"{name}: {fact}", highlight=False)
    style = "bold red" if outcome.wrong else "bold green"
    console.print(f"{outcome.rows} rows compared bit by bit, {outcome.wrong} wrong", style=style, highlight=False)
    if outcome.wrong:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _folder(place: Path | None, keep: bool) -> Iterator[Path]:
    """A new folder on a drive rather than in memory, removed at the end unless it is kept."""
    if place is None:
        place = Path(tempfile.gettempdir())
        if file_system(place)[0] in ("tmpfs", "ramfs"):
            place = Path.cwd()
    check_writable(place, "--dir")
    folder = Path(tempfile.mkdtemp(prefix="ssdgram-demo-", dir=place))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def table_of(outcome: Outcome) -> Table:
    """One line a phase: hits by tier and order, page reads, bytes read for a useful byte, times of a step."""
    from rich.table import Table

    tiers = sorted({tier for phase in outcome.phases for tier, _ in phase.hits})
    orders = sorted({order for phase in outcome.phases for _, order in phase.hits})
    grams = "/".join(map(str, orders))
    table = Table(caption="hits: share of a step's distinct bundles that were there; ms: a step, from request to tensors",
                  caption_justify="left")
    table.add_column("text\n")
    for name in ("tokens\n", *(f"{tier} hits, %\n{grams}-gram" for tier in tiers), "page\nreads", "bytes read\nper useful",
                 "ms a step\np50/p90/p99", "wrong\nrows"):
        table.add_column(name, justify="right")
    for phase in outcome.phases:
        times = [_short(value) for value in np.percentile(phase.wait_ms, (50, 90, 99))]
        hits = ["/".join(_share(phase, tier, order) for order in orders) for tier in tiers]
        table.add_row(phase.name, str(phase.tokens), *hits, str(phase.reads),
                      f"{phase.bytes_read / phase.useful_bytes:.2f}", "/".join(times), str(phase.wrong))
    return table


def _short(value: float) -> str:
    """Four characters, up to 9999."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _share(phase: Phase, tier: str, order: int) -> str:
    asked = phase.misses.get(order, 0) + sum(count for (_, other), count in phase.hits.items() if other == order)
    return f"{100 * phase.hits.get((tier, order), 0) / asked:.0f}" if asked else "-"
