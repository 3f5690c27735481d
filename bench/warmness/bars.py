"""What the run is held to: each bar with what was found, and why it does not apply where it does not.

Nothing is measured here, and nothing rounded in the project's favour. Each bar has a line for a store with DRAM alone and one for a
store whose hot set is in GPU memory too. A step is held to each way of the whole table, captured ones (`NAME-frame`) to captured ones:
these take their turns with each other, the others with the others, and clocks differ from one to the other. All are held to medians:
means differ by a percent from loop to loop of the stand-in alone, and by more where a cell has a long tail. What the means give stands
beside it. What this run could not test is said to be untested.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

COLD_TIMES, WARM_TIMES, OF_HBM = 5.0, 10.0, 0.99
CHUNK, BATCHES, MOST_SHARE = 2048, (64, 256), 1 / 8
HOW = AHEAD, IN_LINE, CAPTURED = "begun ahead", "in line", "captured"         # how the whole table is looked up: a bar for each


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """{what, found, mean, bar, ok}: `found` by medians, `mean` by means; ok is None where the run has no figure for it; `what` ends
    in * where a figure is an unstable cell's."""
    return [*_lookups(result), *_steps(result), _stability(result)]


def _bar(what: str, text: str, ok: Callable[[float], bool], ours: dict[str, Any] | None, theirs: dict[str, Any] | None,
         times: str, rate: str) -> dict[str, Any]:
    """A ratio of two rows: of the medians of their `times`, and of their `rate`, which comes of means."""
    if ours is None or theirs is None:
        return {"what": what, "found": None, "mean": None, "bar": text, "ok": None}
    found = theirs[times]["p50"] / ours[times]["p50"]
    return {"what": what, "found": found, "mean": ours[rate] / theirs[rate], "bar": text, "ok": ok(found)}


def _stores(result: dict[str, Any]) -> tuple[str, ...]:
    """The stores that bars are told of: ssdgram-hbm where there was GPU memory for it."""
    return ("ssdgram",) if "ssdgram-hbm" in result.get("not_run", {}) else ("ssdgram", "ssdgram-hbm")


def _cell(result: dict[str, Any], placement: str, warmness: str) -> dict[str, Any] | None:
    return next((cell for cell in result["cells"] if cell["status"] == "ok" and cell["placement"] == placement
                 and cell["warmness"] == warmness and cell["kind"] == "prefill" and cell["tokens"] == CHUNK), None)


def _lookups(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for warmness, name, bar in (("cold", "ssdgram", COLD_TIMES), *(("warm", store, WARM_TIMES) for store in _stores(result))):
        ours, theirs = _cell(result, name, warmness), _cell(result, "ssd-mmap", warmness)
        yield _bar(f"{warmness} {name} over {warmness} ssd-mmap, rows/s, prefill {CHUNK}{_mark(ours, theirs)}", f">= {bar:g}",
                   functools.partial(operator.le, bar), ours, theirs, "lookup_us", "rows_s")


def _mark(*figures: dict[str, Any] | None) -> str:
    """What stands behind a bar one of whose figures is unstable."""
    return "" if all(figure is None or figure["stable"] for figure in figures) else " *"


def _steps(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rows = result["step"]["rows"] if result["step"] else []
    loops = {(row["placement"], row["tokens"], row["prefetch"]): row for row in rows
             if row["status"] == "ok" and row["kind"] == "decode" and row["warmness"] == "warm"}
    within = result["budget"]["share"] <= MOST_SHARE + 1e-6
    for batch, store in itertools.product(BATCHES, _stores(result)):
        for (name, bar, text), how in itertools.product((("hbm", OF_HBM, f">= {OF_HBM}"), ("dram-uva", 1.0, "> 1")), HOW):
            way, their_way = (f"{store}-frame", f"{name}-frame") if how == CAPTURED else (store, name)
            ours, theirs = loops.get((way, batch, True)), loops.get((their_way, batch, how != IN_LINE))
            ahead = "" if how == CAPTURED else f" ({AHEAD})"
            yield _bar(f"warm {way}{ahead} over {name} ({how}), step-model tokens/s, batch {batch}{_mark(ours, theirs)}", text,
                       functools.partial(operator.le if name == "hbm" else operator.lt, bar), ours if within else None, theirs,
                       "step_ms", "tokens_s")


def _stability(result: dict[str, Any]) -> dict[str, Any]:
    rows = [*result["cells"], *(result["step"]["rows"] if result["step"] else [])]
    measured = [row for row in rows if row["status"] == "ok"]
    stable = sum(row["stable"] for row in measured)
    twice = "runs" if "compared" in result else "passes"
    return {"what": f"cells whose medians of the two {twice} differ by less than 10 % (the others are marked)",
            "found": stable / len(measured) if measured else None, "mean": None, "bar": "marked", "ok": None}
