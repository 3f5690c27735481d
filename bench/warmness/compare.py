"""Do the numbers repeat? A run beside an earlier one of the same command: every cell whose median moved by 10 % or more is marked.

    ssdgram bench warmness ... --against EARLIER/report.json                             measure, then mark
    ssdgram bench warmness --report LATER/report.json --against EARLIER/report.json      mark what is there, write the report anew

Within a run a cell is stable if its two passes agree; beside an earlier run, if the two runs' medians do, which is what a reader
who measures again will see. Runs of different text, tables, budgets or devices are refused: they may differ for a reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssdgram.bench.warmness.bars import bars
from ssdgram.bench.warmness.cells import UNSTABLE
from ssdgram.errors import ConfigError

WHAT, SAME = "ssdgram bench warmness", (("trace", "digest"), ("table", "generation"), ("table", "bytes"), ("budget", "dram"),
                                        ("budget", "hbm"), ("facts", "gpu"), ("facts", "cpu"))
Key = tuple[Any, ...]


def load(path: Path) -> dict[str, Any]:
    """A report.json; ConfigError for anything else."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): expected a report.json of `{WHAT}`") from error
    if not isinstance(result, dict) or result.get("what") != WHAT:
        raise ConfigError(f"{path} is no report of `{WHAT}`: expected its report.json")
    return result


def mark(later: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The later result, its cells marked by how far their medians are from the earlier one's; it is changed, and returned."""
    for part, name in SAME:
        here, there = (result[part].get(name) for result in (later, earlier))
        if here != there:
            raise ConfigError(f"the two reports differ in {part} {name} ({here} and {there}): a run is compared with one of the same "
                              f"command on the same machine")
    before, counts = _medians(earlier), {"cells": 0, "stable": 0}
    for key, row in _measured(later):
        if key in before:
            pair = [before[key], _median(row)]
            row["medians_of_runs"], row["stable"] = pair, max(pair) < (1 + UNSTABLE) * min(pair)
            counts["cells"] += 1
            counts["stable"] += row["stable"]
        else:
            row["stable"] = False                            # the earlier run has no such cell: nothing says that it repeats
    later["compared"] = {"with": earlier["facts"]["date"], "seconds": earlier["seconds"], **counts}
    later["bars"] = bars(later)
    return later


def _measured(result: dict[str, Any]) -> list[tuple[Key, dict[str, Any]]]:
    """Every row of matrix and step model that has figures, by what it is of."""
    rows: list[tuple[Key, dict[str, Any]]] = [(("cell",), row) for row in result["cells"]]
    rows += [(("step", row["prefetch"]), row) for row in (result["step"]["rows"] if result["step"] else [])]
    return [((*kind, row["placement"], row["warmness"], row["kind"], row["tokens"]), row) for kind, row in rows if row["status"] == "ok"]


def _median(row: dict[str, Any]) -> float:
    return float(row["lookup_us"]["p50"] if "lookup_us" in row else row["step_ms"]["p50"])


def _medians(result: dict[str, Any]) -> dict[Key, float]:
    return {key: _median(row) for key, row in _measured(result)}
