"""The tables of docs/performance.md, written from the JSON of a run: no figure there is copied by hand.

    python -m ssdgram.bench.warmness.document docs/performance.md

The page holds pairs of marks; what stands between two is replaced:

    <!-- table NAME of bench/results/FILE.json -->
    <!-- end -->

NAME: run, bars, lookups, states, steps, prompts, drive, refused. A file that is not there yet leaves a line that says so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssdgram.bench.warmness.report import BARS_HEADS, PLACES, STATES, count, figure, hits, ms, reasons, statement, verdict

MARK = re.compile(r"(<!-- table (\w+) of (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SHOWN = (("decode", 1), ("decode", 64), ("decode", 256), ("prefill", 512), ("prefill", 2048), ("prefill", 8192))


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def cell_of(result: dict[str, Any], placement: str, warmness: str, kind: str, tokens: int) -> dict[str, Any] | None:
    """A cell, or None."""
    wanted = {"placement": placement, "warmness": warmness, "kind": kind, "tokens": tokens}
    return next((cell for cell in result["cells"] if all(cell[name] == value for name, value in wanted.items())), None)


def run_table(result: dict[str, Any]) -> str:
    """What was measured on."""
    return table(["", ""], [list(line) for line in statement(result)])


def bars_table(result: dict[str, Any]) -> str:
    """The bars."""
    rows = [[bar["what"], figure(bar["found"]), figure(bar["mean"]), bar["bar"],
             f"**{verdict(False)}**" if bar["ok"] is False else verdict(bar["ok"])] for bar in result["bars"]]
    return table(list(BARS_HEADS), rows)


def lookups_table(result: dict[str, Any]) -> str:
    """Median of a lookup, cold and warm."""
    rows = []
    for name in PLACES:
        for warmness in ("cold", "warm"):
            cells = [cell_of(result, name, warmness, kind, tokens) for kind, tokens in SHOWN]
            if any(cells):
                rows.append([name, warmness, *(_median(cell) for cell in cells)])
    return table(["placement", "", *(f"{kind} {tokens}" for kind, tokens in SHOWN)], rows)


def _median(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["status"] != "ok":
        return str(cell["status"])
    return f"{ms(cell['lookup_us']['p50'])} ({count(cell['rows_s'])}/s)" + ("" if cell["stable"] else " *")


def states_table(result: dict[str, Any]) -> str:
    """SSDGram in every state."""
    rows = []
    for kind, tokens in SHOWN:
        for state in STATES:
            cell = cell_of(result, "ssdgram", state, kind, tokens)
            if cell is not None and cell["status"] == "ok":
                times = cell["lookup_us"]
                rows.append([f"{kind} {tokens}", state, *(ms(times[name]) for name in ("p50", "p90", "p99", "max")), hits(cell),
                             count(cell["reads"]), count(cell["reads_s"]), f"{cell['bytes_per_useful_byte']:.2f}", ms(1e6 * cell["cpu_s"])])
    heads = ["batch", "state", "p50", "p90", "p99", "max, ms", "hits 2/3/4, %", "reads", "reads/s", "bytes per useful", "CPU, ms"]
    return table(heads, rows)


def steps_table(result: dict[str, Any], kind: str = "decode") -> str:
    """The step model."""
    rows = []
    for row in sorted(result["step"]["rows"], key=lambda row: (row["tokens"], STATES.index(row["warmness"]),
                                                               ["none", *PLACES].index(row["placement"]), not row["prefetch"])):
        if row["kind"] != kind or row["status"] != "ok":
            continue
        times, window = row["step_ms"], row.get("window_layers")
        rows.append([str(row["tokens"]), row["warmness"], "layers alone" if row["placement"] == "none" else row["placement"],
                     "on" if row["prefetch"] else "off", f"{row['tokens_s']:,.0f}" + ("" if row["stable"] else " *"),
                     "/".join(f"{times[name]:.4g}" for name in ("p50", "p90", "p99")),
                     f"{ms(row['exposed_us']['p50'])}/{ms(row['exposed_us']['p99'])}",
                     f"{window['p50']}/{window['p99']}" if window else "",
                     f"{100 * row['hit_rate_all']:.0f}" if "hit_rate_all" in row else "",
                     count(row["reads_s"]) if "reads_s" in row else ""])
    heads = ["batch", "state", "placement", "prefetch", "tokens/s", "ms p50/p90/p99", "exposed ms p50/p99", "window, layers p50/p99",
             "hits, %", "reads/s"]
    return table(heads, rows)


def prompts_table(result: dict[str, Any]) -> str:
    """Time to first token."""
    return steps_table(result, "prefill")


def drive_table(result: dict[str, Any]) -> str:
    """The drive that steady text needs."""
    keys = {"as_dram_uva_in_line": "as dram-uva in line", "as_dram_uva_ahead": "as dram-uva ahead", "hidden": "hidden but for 1 %"}

    def rate(need: dict[str, Any], key: str) -> str:
        return "" if key not in need else "no drive" if need[key] is None else f"{need[key]:,.0f}"

    return table(["streams", "reads a step", "reads/s seen", *keys.values()],
                 [[str(need["tokens"]), f"{need['reads_a_step']:,.0f}", f"{need['reads_s_seen']:,.0f}", *(rate(need, key) for key in keys)]
                  for need in result["step"]["drive"]])


def refused_list(result: dict[str, Any]) -> str:
    """What is missing, and why."""
    return "".join(f"- {line}\n" for line in reasons(result)) or "- nothing\n"


MAKERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": run_table, "bars": bars_table, "lookups": lookups_table, "states": states_table, "steps": steps_table, "prompts": prompts_table,
    "drive": drive_table, "refused": refused_list,
}


def fill(text: str, root: Path) -> str:
    """The page with its tables written anew; files are looked for below `root`."""
    def made(match: re.Match[str]) -> str:
        path = root / match.group(3)
        if not path.exists():
            return f"{match.group(1)}*not run yet: {match.group(3)}*\n{match.group(5)}"
        return match.group(1) + MAKERS[match.group(2)](json.loads(path.read_text())) + match.group(5)

    return MARK.sub(made, text)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text(), Path.cwd()))
