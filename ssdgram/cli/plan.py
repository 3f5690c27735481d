"""`ssdgram plan TRACE`: hit rates, stalls, budgets and money for a model on a machine; --check holds them against a store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ssdgram.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from ssdgram.geometry import Geometry
    from ssdgram.tools.drive import Drive
    from ssdgram.tools.plan import Load, Plan
    from ssdgram.tools.trace import Trace
    from ssdgram.tools.trace_replay import Pace

A_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
A_PATH = click.Path(path_type=Path)
DECODER_LAYERS = 40


@click.command()
@click.argument("path", type=A_FILE, metavar="TRACE")
@click.option("--store", type=A_PATH, help="Plan for this store's model; else --config, else DeepSeek-V4.1-Flash.")
@click.option("--config", type=A_FILE, help="Plan for the model of this config.json.")
@click.option("--tokenizer", type=A_FILE, help="Its tokenizer.json.")
@click.option("--drive", "drive_file", type=A_FILE, help="What `ssdgram bench io` wrote about the drive.")
@click.option("--reads-s", type=click.FloatRange(1), help="Or: random 4 KiB reads a second that the drive gives at its best ...")
@click.option("--latency-us", type=click.FloatRange(0.1), default=90.0, show_default=True, help="... and what one read alone takes.")
@click.option("--dram", "most", default="16GiB", show_default=True, help="DRAM to spend.")
@click.option("--hbm", default="0", show_default=True, help="GPU memory to spend.")
@click.option("--decode", "streams", type=click.IntRange(1), multiple=True, help="Decode streams; may be given many times.")
@click.option("--prefill", "chunks", type=click.IntRange(1), multiple=True, help="Tokens of a prefill chunk; the same.")
@click.option("--step-ms", type=click.FloatRange(0.001), default=20.0, show_default=True, help="A decode step without stalls.")
@click.option("--prefill-tokens-s", type=click.FloatRange(1), default=16_000.0, show_default=True, help="Prefill without stalls.")
@click.option("--slack", "slacks", type=click.FloatRange(0, 1), multiple=True,
              help="Share of a step before a layer wants its rows; once a layer [default: its number of 40].")
@click.option("--ahead", type=click.IntRange(0), default=1, show_default=True, help="Prefill chunks prefetched before the one in use.")
@click.option("--most-stall", type=click.FloatRange(0, 1), default=0.01, show_default=True, help="Share of a step that may be stall.")
@click.option("--machine-hour", type=click.FloatRange(0), default=3.0, show_default=True,
              help="Price of an hour of the machine without the memory for tables. This and the next two: assumptions, give your own.")
@click.option("--dram-gib-hour", type=click.FloatRange(0), default=0.004, show_default=True, help="Of a GiB of DRAM.")
@click.option("--ssd-gib-hour", type=click.FloatRange(0), default=0.0001, show_default=True, help="Of a GiB of SSD.")
@click.option("--check", "check_store", type=A_PATH, help="Instead: measure this store and compare; minutes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(path: Path, store: Path | None, config: Path | None, tokenizer: Path | None, drive_file: Path | None, reads_s: float | None,
         latency_us: float, most: str, hbm: str, streams: tuple[int, ...], chunks: tuple[int, ...], step_ms: float, prefill_tokens_s: float,
         slacks: tuple[float, ...], ahead: int, most_stall: float, machine_hour: float, dram_gib_hour: float, ssd_gib_hour: float,
         check_store: Path | None, as_json: bool) -> None:
    """From a TRACE and facts about a machine: hit rates by DRAM budget, stalls, the budget to choose and what limits it.

    Half of the trace fills the cache, the other half is counted. See docs/planning.md for how to read the table.
    """
    from ssdgram._budget import parse_size
    from ssdgram.tools.model import model_of
    from ssdgram.tools.plan import Planner, Prices, budgets_up_to, store_sizes, table_bytes
    from ssdgram.tools.trace import Trace

    loaded = Trace.load(path)
    if check_store is not None:
        _check(loaded, check_store, parse_size(most, "dram"), streams, chunks, step_ms, prefill_tokens_s, ahead, as_json)
        return
    geometry, token_map = model_of(store, config, tokenizer)
    drive, assumed = _drive(drive_file, reads_s, latency_us)
    vocabulary = 0 if token_map is None else len(token_map)
    budgets = budgets_up_to(geometry, vocabulary, parse_size(most, "dram"))
    sets = store_sizes(geometry, vocabulary, budgets[0]).sets
    prices = Prices(machine_hour, dram_gib_hour, ssd_gib_hour)
    plans = [Planner(geometry, vocabulary, load, drive, prices, sets).plan(budgets, most_stall)
             for load in _loads(loaded, geometry, token_map, streams, chunks, step_ms / 1e3, prefill_tokens_s, slacks, ahead)]
    gpu = parse_size(hbm, "hbm")
    if as_json:
        click.echo(json.dumps({"trace": loaded.sha256, "positions": loaded.positions, "table_bytes": table_bytes(geometry),
                               "drive": drive.to_json(), "drive_assumed": assumed, "prices": vars(prices),
                               "plans": [_as_json(made, gpu, geometry) for made in plans]}, indent=1))
        return
    _say(loaded, geometry, drive, assumed, prices)
    for made in plans:
        _show(made, gpu, geometry, most_stall)


def _drive(path: Path | None, reads_s: float | None, latency_us: float) -> tuple[Drive, bool]:
    """The drive, and whether it is an assumption."""
    from ssdgram.tools.drive import Drive

    if path is not None and reads_s is not None:
        raise click.UsageError("--drive and --reads-s: give one of them")
    if path is not None:
        return Drive.of_bench(path), False
    return Drive.of(reads_s or 1_000_000.0, latency_us), reads_s is None


def _pace(step_s: float, slacks: Sequence[float], geometry: Geometry) -> Pace:
    from ssdgram.tools.trace_replay import Pace

    wanted = slacks or tuple(min(1.0, layer / DECODER_LAYERS) for layer in geometry.layers)
    if len(wanted) != len(geometry.layers):
        raise click.UsageError(f"--slack: given {len(wanted)} times, the model has {len(geometry.layers)} layers with tables")
    return Pace(step_s, tuple(share * step_s for share in wanted))


def _loads(loaded: Trace, geometry: Geometry, token_map: np.ndarray | None, streams: Sequence[int], chunks: Sequence[int], step_s: float,
           prefill_tokens_s: float, slacks: Sequence[float], ahead: int) -> list[Load]:
    """What is asked: the shapes that were named, or the recording's own batches, or decode of 64 streams and prefill of 2048."""
    import numpy as np

    from ssdgram.tools.plan import Load
    from ssdgram.tools.trace_shapes import decode, prefill, recorded, recorded_requests, requests

    if loaded.kind == "keys" or loaded.batches is not None:
        if streams or chunks:
            raise ConfigError("the trace is a recording: its batches are what they were; --decode and --prefill are for documents")
        if loaded.kind == "keys":
            asked = recorded_requests(loaded)
            positions = np.diff(asked.bounds) // asked.orders
        else:
            made = recorded(loaded)
            asked, positions = requests(made, geometry, token_map), made.positions()
        return [Load("as recorded", asked, positions, _pace(step_s, slacks, geometry), 0, len(positions) // 2)]
    loads = []
    if not streams and not chunks:
        streams, chunks = (64,), (2048,)
    for size in streams:
        made = decode(loaded, size, geometry.orders).while_full(size)
        loads.append(Load(f"decode, {size} streams", requests(made, geometry, token_map), made.positions(), _pace(step_s, slacks, geometry),
                          0, len(made) // 2, made.shortfall(size)))
    for size in chunks:
        made = prefill(loaded, size, geometry.orders).while_full(size)
        loads.append(Load(f"prefill, chunks of {size}", requests(made, geometry, token_map), made.positions(),
                          _pace(size / prefill_tokens_s, slacks, geometry), ahead, len(made) // 2))
    return loads


def _check(loaded: Trace, store: Path, most: int, streams: Sequence[int], chunks: Sequence[int], step_ms: float, prefill_tokens_s: float,
           ahead: int, as_json: bool) -> None:
    """Predict from one half of the trace, serve the other from the store, compare."""
    from ssdgram.bench.plan import Cell, cells_of, check
    from ssdgram.tools.model import model_of

    layers = model_of(store=store)[0].layers
    if loaded.batches is not None:
        quarter = (len(loaded.batches) - 1) // 4
        pace = cells_of(layers, (1,), (), 1, step_ms, prefill_tokens_s, ahead)[0].pace
        cells = [Cell("recorded", 0, pace, 0, quarter, quarter)]
    else:
        if not streams and not chunks:
            streams, chunks = (64,), (2048,)
        cells = cells_of(layers, streams, chunks, int(0.2 * loaded.positions), step_ms, prefill_tokens_s, ahead)
    rows = list(check(store, [loaded], cells, [budget for budget in (most // 16, most // 4, most) if budget >> 20]))
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    if not all(row["ok"] for row in rows):
        raise click.exceptions.Exit(1)


# ---------------------------------------------------------------- output


def _hbm(made: Plan, gpu: int, geometry: Geometry) -> tuple[int, float]:
    """Bundles that the GPU memory holds, and the share of distinct bundles found there: the hottest are copied, so at least what a
    cache of that size hits; never more than the DRAM cache hits."""
    bundles = gpu // (geometry.heads * geometry.row_bytes)
    smaller = [row for row in made.rows if row.bundles <= bundles and not row.too_small]
    return bundles, min(smaller[-1].hit_rate if smaller else 0.0, made.recommended.hit_rate)


def _as_json(made: Plan, gpu: int, geometry: Geometry) -> dict[str, Any]:
    bundles, share = _hbm(made, gpu, geometry)
    return {"load": made.load.name, "step_ms": 1e3 * made.load.pace.step_s, "slack_ms": [1e3 * slack for slack in made.load.pace.slack_s],
            "ahead": made.load.ahead, "notice": made.load.notice,
            "sample": made.rate, "warm_batches": made.load.warm, "rows": [row.to_json() for row in made.rows],
            "recommended_dram": made.recommended.dram, "hbm": {"bytes": gpu, "bundles": bundles, "hit_rate_at_least": share},
            "limit": made.limit, "needs_reads_s": made.needs_reads_s, "window": made.window,
            "tokens_dollar_whole_table_in_dram": made.whole_in_dram}


def _say(loaded: Trace, geometry: Geometry, drive: Drive, assumed: bool, prices: Any) -> None:
    from ssdgram.tools.plan import table_bytes

    click.echo(f"trace: {loaded.positions:,} positions, sha256 {loaded.sha256[:16]}; tables: {table_bytes(geometry) / 2**30:.1f} GiB "
               f"in layers {', '.join(map(str, geometry.layers))}")
    click.echo(f"drive: {drive.top:,.0f} reads/s at best, {1e6 * drive.latency_s:.0f} us for one"
               + (" (assumed: give --drive or --reads-s)" if assumed else ""))
    click.echo(f"prices an hour: machine {prices.machine}, GiB of DRAM {prices.dram_gib}, GiB of SSD {prices.ssd_gib}")


def _show(made: Plan, gpu: int, geometry: Geometry, most_stall: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console, load = Console(highlight=False), made.load
    slack = ", ".join(f"layer {layer} after {1e3 * at:.1f}" for layer, at in zip(geometry.layers, load.pace.slack_s))
    sampled = "" if made.rate == 1 else f", a sample of {made.rate:.1%} of the bundles"
    console.print(f"\n{load.name}: steps of {1e3 * load.pace.step_s:.1f} ms, {slack} ms{sampled}", soft_wrap=True)
    if load.notice:
        console.print(f"  {load.notice}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("DRAM", "hits", "by order", "LRU", "reads", "stall ms", "p99", "tokens/s", "M/$", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in made.rows:
        mark = ("!" if row.too_small else "?" if row.beyond else "") + ("<-" if row is made.recommended else "")
        table.add_row(_size(row.dram), f"{row.hit_rate:.3f}", " ".join(map(_share, row.hit_rates)), f"{row.lru:.3f}", f"{row.reads:,.0f}",
                      _ms(row.stall_s), _ms(row.stall_p99_s), f"{row.tokens_s:,.0f}", f"{row.tokens_dollar / 1e6:,.2f}", mark)
    console.print(table)
    if any(row.too_small for row in made.rows):
        console.print("  !: some batch needs more bundles at once than the budget holds", soft_wrap=True)
    if any(row.beyond for row in made.rows):
        console.print("  ?: larger than all that the trace asked for; a longer trace would tell more", soft_wrap=True)
    best = made.recommended
    ratio = best.tokens_dollar / made.whole_in_dram
    console.print(f"  choose --dram {_size(best.dram)}: for the same money {ratio:.2f} times the tokens that the whole table in DRAM gives "
                  f"({made.whole_in_dram:,.0f})", soft_wrap=True)
    console.print(f"  limited by {made.limit}", soft_wrap=True)
    if best.stall_s > most_stall * load.pace.step_s:
        if made.needs_reads_s is not None:
            console.print(f"  a drive of {made.needs_reads_s:,.0f} reads/s would stall for at most {most_stall:.0%} of a step",
                          soft_wrap=True)
        if made.window is not None and load.ahead > 0:
            console.print(f"  or chunks prefetched {made.window} ahead", soft_wrap=True)
    if gpu:
        bundles, share = _hbm(made, gpu, geometry)
        console.print(f"  --hbm {_size(gpu)} holds {bundles:,} bundles: at least {share:.3f} of the requests stay off PCIe", soft_wrap=True)


def _share(rate: float) -> str:
    """Two decimals in three characters."""
    return f"{rate:.2f}"[1:] if rate < 0.995 else "1.0"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f}"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= unit and count % (unit >> 2) == 0:
            return f"{count / unit:g}{name}"
    return f"{count}"
