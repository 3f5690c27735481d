"""What a run's result becomes: a table in the terminal, JSON, CSV. It computes nothing but the units that are shown."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Cell = dict[str, Any]
PLACES = ["hbm", "hbm-frame", "dram-uva", "dram-uva-frame", "dram-copy", "ssd-mmap", "ssd-pread", "ssdgram", "ssdgram-frame", "ssdgram-hbm",
          "ssdgram-hbm-frame"]
STATES = ["cold", "mixed", "steady", "warm"]
BARS_HEADS = ("what", "by medians", "by means", "bar", "")
UNSTABLE_IS = "the medians of the two passes (beside an earlier run: of the two runs) differ by 10 % or more"


def us(value: float) -> str:
    """A time in a readable unit, three figures."""
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if abs(value) < limit * 0.9995:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e6:.3g} s"


def ms(us: float) -> str:
    """Microseconds as milliseconds, three figures."""
    return f"{us / 1e3:.3g}" if us < 1e6 else f"{us / 1e3:.0f}"


def count(value: float) -> str:
    """A count: 12, 3.4k, 5.6M."""
    for limit, scale, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (float("inf"), 1e9, "G")):
        if abs(value) < limit * 0.9995:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def hits(cell: Cell) -> str:
    """Hit rates by tier, orders 2/3/4, in percent."""
    return "; ".join(f"{tier} " + "/".join(f"{100 * rate:.0f}" for _, rate in sorted(orders.items()))
                     for tier, orders in cell["hit_rate"].items()) or "-"


def table_of(result: dict[str, Any]) -> Table:
    """The matrix, one line a cell."""
    heads = ("p50/p90/p99/max\nms", "rows/s", "hits, %\n2/3/4-gram", "reads", "bytes per\nuseful", "stall p50\nms", "CPU\nms",
             "faults\nmin/maj", "page cache, %\nbefore/after")
    caption = f"hits: share of a step's distinct bundles, by n-gram order; * unstable: {UNSTABLE_IS}"
    return _sections("placement x warmness x batch", caption, ("warmness", "batch", "placement"), heads,
                     sorted(result["cells"], key=_order), _cell_line)


def _cell_line(cell: Cell) -> tuple[list[str], list[str]]:
    if cell["status"] != "ok":
        return [cell["placement"]], [f"[dim]{cell['status']}[/]"]
    times, mark = cell["lookup_us"], "" if cell["stable"] else " *"
    return [cell["placement"]], ["/".join(ms(times[name]) for name in ("p50", "p90", "p99", "max")) + mark, count(cell["rows_s"]),
                                 hits(cell), count(cell["reads"]), f"{cell['bytes_per_useful_byte']:.2f}", ms(cell["stall_us"]["p50"]),
                                 ms(1e6 * cell["cpu_s"]), f"{count(cell['minor_faults'])}/{count(cell['major_faults'])}",
                                 f"{100 * cell['cached_before']:.3g}/{100 * cell['cached_after']:.3g}"]


def _order(cell: Cell) -> tuple[Any, ...]:
    return STATES.index(cell["warmness"]), cell["kind"], cell["tokens"], PLACES.index(cell["placement"])


def step_table(result: dict[str, Any]) -> Table:
    """The step model, one line a loop."""
    step = result["step"]
    heads = ("tokens/s", "ms a step\np50/p90/p99", "exposed, ms\np50/p99", "window\np50/p99", "hits, %", "reads/s")
    return _sections(f"step model: {step['layers']} layers, n-gram rows needed at {', '.join(map(str, step['engram']))}",
                     "exposed: what a step takes longer than the layers alone; window: layers that would hide it",
                     ("text", "batch", "placement", "prefetch"), heads, sorted(step["rows"], key=_step_order), _step_line)


def _step_line(row: Cell) -> tuple[list[str], list[str]]:
    left = [row["placement"], "on" if row["prefetch"] else "off"]
    if row["status"] != "ok":
        return left, [f"[dim]{row['status']}[/]"]
    times, exposed, window = row["step_ms"], row["exposed_us"], row.get("window_layers")
    return left, [f"{row['tokens_s']:,.0f}" + ("" if row["stable"] else " *"),
                  "/".join(f"{times[name]:.3g}" for name in ("p50", "p90", "p99")),
                  f"{ms(exposed['p50'])}/{ms(exposed['p99'])}", f"{window['p50']}/{window['p99']}" if window else "",
                  f"{100 * row['hit_rate_all']:.0f}" if "hit_rate_all" in row else "", count(row["reads_s"]) if "reads_s" in row else ""]


def _step_order(row: Cell) -> tuple[Any, ...]:
    return (row["kind"], STATES.index(row["warmness"]), row["tokens"], ["none", *PLACES].index(row["placement"]), not row["prefetch"])


def _sections(title: str, caption: str, left: tuple[str, ...], right: tuple[str, ...], rows: list[Cell],
              line: Callable[[Cell], tuple[list[str], list[str]]]) -> Table:
    """Sorted rows by state and batch, which are told once for each section; `line`: what stands left of the figures, and these."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows:
        place = (row["warmness"], row["kind"], row["tokens"])
        if before is not None and place != before:
            table.add_section()
        head = (row["warmness"], f"{row['kind']} {row['tokens']}") if place != before else ("", "")
        before = place
        names, figures = line(row)
        table.add_row(*head, *names, *figures)
    return table


def bars_table(result: dict[str, Any]) -> Table:
    """What the run is held to."""
    from rich.table import Table

    table = Table(title="bars", title_justify="left")
    for name in BARS_HEADS:
        table.add_column(name, justify="right" if name in BARS_HEADS[1:3] else "left")
    for bar in result["bars"]:
        table.add_row(bar["what"], figure(bar["found"]), figure(bar["mean"]), bar["bar"], verdict(bar["ok"]))
    return table


def figure(value: float | None) -> str:
    """A ratio, or that there is none."""
    return "-" if value is None else f"{value:.5g}"


def verdict(ok: bool | None) -> str:
    """ok, MISSED, or nothing to say."""
    return "" if ok is None else "ok" if ok else "MISSED"


def reasons(result: dict[str, Any]) -> list[str]:
    """Why something was not run, refused or failed; each reason once, with where it applies."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, absent in result["not_run"].items():
        found.setdefault((name, absent["status"], absent["why"]), [])
    steps = [{**row, "kind": f"step model, {row['kind']}"} for row in (result["step"]["rows"] if result["step"] else [])]
    for cell in [*sorted(result["cells"], key=_order), *steps]:
        if cell["status"] != "ok":
            found.setdefault((cell["placement"], cell["status"], cell["why"]), []).append(
                f"{cell['warmness']} {cell['kind']} {cell['tokens']}")
    return [f"{name} {status}{': ' if where else ''}{_some(list(dict.fromkeys(where)))}: {why}"
            for (name, status, why), where in found.items()]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"


def statement(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value): what a reader has to know of the run before any figure."""
    facts, budget, trace, step = result["facts"], result["budget"], result["trace"], result["step"]
    names = ("python", "numpy", "numba", "torch", "triton", "cuda", "driver_version")
    lines = [("machine", f"{facts.get('gpu', 'no GPU')}; {facts['cpu']}, {facts['cpus']} processors, {facts['memory_gib']} GiB; kernel "
                         f"{facts['kernel']}; {facts.get('drive', '')}"),
             ("date, versions", f"{facts['date']}; {', '.join(f'{name} {facts[name]}' for name in names if name in facts)}"),
             ("table", f"{result['table']['bytes'] / 2**30:.2f} GiB" + ", made-up rows in the real layout" * result["table"]["made_up"]),
             ("SSDGram's budget", f"{budget['dram'] / 2**20:.0f} MiB of DRAM, {budget['share']:.4f} of the table; ssdgram-hbm: "
                                  f"{budget['hbm'] / 2**20:.0f} MiB of GPU memory besides"),
             ("text", f"{trace['tokens']:,} tokens, sha256 {trace['digest'][:16]}" + (", FILLER" if trace["filler"] else ""))]
    if step:
        times = ", ".join(f"{name} {made['layer_us']:.0f}" for name, made in step["stand_in"].items())
        asked = ", ".join(f"{streams} streams {us:g}" for streams, us in step["asked_layer_us"].items())
        lines.append(("a layer of the step model", f"us: {times} (asked for: {asked}, prefill {step['prefill_us_a_token']:g} a token)"))
        for need in step["drive"]:
            lines.append((f"drive that steady text needs, {need['tokens']} streams", rates(need)))
    lines.append(("one read of the drive", f"{result['one_read_us']['p50']:.0f} us, p99 {result['one_read_us']['p99']:.0f}"))
    lines.append(("the run", f"{result['seconds']:.0f} s, load {facts['load']} at its end"))
    if "compared" in result:
        compared = result["compared"]
        lines.append((f"beside the run of {compared['with']}", f"{compared['stable']} of {compared['cells']} medians within 10 %"))
    return lines


def rates(need: dict[str, Any]) -> str:
    """The reads/s at which a steady step is as fast as dram-uva's, or hidden."""
    names = {"as_dram_uva_in_line": "as dram-uva in line", "as_dram_uva_ahead": "as dram-uva ahead", "hidden": "hidden but for 1 %"}
    found = [f"{text} {'no drive' if need[key] is None else f'{need[key]:,.0f} reads/s'}" for key, text in names.items() if key in need]
    return f"{'; '.join(found)} ({need['reads_a_step']:,.0f} reads a step, {need['reads_s_seen']:,.0f} reads/s seen)"


def show(result: dict[str, Any]) -> None:
    """Print the tables, what the run was, and the reasons."""
    from rich.console import Console

    console = Console()
    if console.width < 150:
        console = Console(width=170)
    console.print(table_of(result))
    if result["step"]:
        console.print(step_table(result))
    console.print(bars_table(result))
    for name, value in statement(result):
        console.print(f"{name}: {value}", highlight=False)
    for line in reasons(result):
        console.print(line, highlight=False)


def write(result: dict[str, Any], out: Path) -> list[Path]:
    """Write JSON, CSV, the plots as PNG and report.html into the folder; the paths. Without matplotlib: the first two."""
    from ssdgram.bench.warmness import html

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "report.json", out / "cells.csv"]
    paths[0].write_text(json.dumps(result, indent=1, default=str) + "\n")
    write_csv(paths[1], result["cells"])
    if result["step"]:
        paths.append(out / "steps.csv")
        write_csv(paths[-1], result["step"]["rows"])
    try:
        from ssdgram.bench.warmness import plots
    except ModuleNotFoundError as error:
        print(f"no plots and no HTML: {error} (pip install 'ssdgram[bench]')")
        return paths
    drawn = plots.draw(result)
    for name, plot in drawn.items():
        paths.append(out / f"{name}.png")
        paths[-1].write_bytes(plot.png)
    paths.append(out / "report.html")
    paths[-1].write_text(html.page(result, drawn))
    return paths


def write_csv(path: Path, cells: list[Cell]) -> None:
    """One line a cell; nested objects become columns with dots in their names."""
    flat = [flatten(cell) for cell in cells]
    names = list(dict.fromkeys(name for cell in flat for name in cell))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(flat)


def flatten(cell: Cell, prefix: str = "") -> dict[str, Any]:
    """Nested dicts to one level."""
    flat: dict[str, Any] = {}
    for name, value in cell.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat
