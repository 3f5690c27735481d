"""The plots of a report, each as SVG (for the page) and PNG: markers, line styles and lightness differ, so they read in grey.

Drawn from the result alone. Matplotlib is imported here and nowhere else in the package; nothing is fetched, text becomes outlines.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ssdgram.bench.warmness.report import PLACES, STATES

LOOKS: dict[str, tuple[str, str, Any, str]] = {              # colour (dark to light), marker, line, hatch
    "ssdgram": ("#000000", "o", "-", ""),
    "ssdgram-frame": ("#6b6b6b", "X", "-", "oo"),
    "ssdgram-hbm": ("#4b1238", "*", (0, (3, 1, 1, 1)), "**"),
    "ssdgram-hbm-frame": ("#e8c3da", "h", (0, (3, 1, 1, 1)), "OO"),
    "hbm": ("#1f4e9e", "s", "--", "//"),
    "hbm-frame": ("#9db8e0", "d", "--", "///"),
    "dram-uva": ("#cc6a35", "^", "-.", "\\\\"),
    "dram-uva-frame": ("#f0c4a8", "<", "-.", "\\\\\\"),
    "dram-copy": ("#5cb48c", "D", ":", ".."),
    "ssd-mmap": ("#d9b64a", "v", (0, (6, 1)), "xx"),
    "ssd-pread": ("#d4d4d4", "P", (0, (1, 1)), "--"),
}
ORDER_LOOKS = {"2": ("#000000", "o", "-"), "3": ("#1f6fb5", "s", "--"), "4": ("#d98b2b", "^", "-."), "all": ("#9a9a9a", "D", ":")}
SETTINGS = {"font.size": 10, "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True, "axes.spines.top": False,
            "axes.spines.right": False, "svg.fonttype": "path", "hatch.linewidth": 0.6, "legend.frameon": False}


@dataclass(frozen=True)
class Plot:
    """One figure. `text`: what it shows, for readers who do not see it."""

    title: str
    text: str
    svg: str
    png: bytes


def draw(result: dict[str, Any]) -> dict[str, Plot]:
    """All plots that the result has figures for, by file name."""
    makers: dict[str, tuple[str, str, Callable[[dict[str, Any]], Figure | None]]] = {
        "latency": ("Lookup latency by warmness", "Marker: median; line: to the 99th percentile; tick: maximum.", latency),
        "throughput": ("Rows a second by batch", "Median passes of cold and warm lookups; both axes logarithmic.", throughput),
        "hit_rate": ("Hit rate against cache size, by n-gram order",
                     "The trace replayed through the cache's policy from empty; the dashed line is this run's budget.", hit_rate),
        "tokens": ("Decode tokens/s by warmness", "The step model with prefetch on; dashed: the layers alone, same cell.", tokens),
        "budget": ("Decode tokens/s against the DRAM budget", "Steady text; the lines across are the placements that hold the whole "
                   "table in memory.", budget),
    }
    drawn = {}
    with matplotlib.rc_context(SETTINGS):
        for name, (title, text, make) in makers.items():
            figure = make(result)
            if figure is not None:
                drawn[name] = Plot(title, text, _svg(figure, name), _png(figure))
    return drawn


def _svg(figure: Figure, name: str) -> str:
    with matplotlib.rc_context({"svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg"):], flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)         # several in one page: every id its own


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
    return buffer.getvalue()


def good(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The cells that were measured and match."""
    return [cell for cell in result["cells"] if cell["status"] == "ok" and all(cell[name] == value for name, value in wanted.items())]


def _time(value: float, _: Any = None) -> str:
    for limit, scale, unit in ((1e3, 1.0, "us"), (1e6, 1e3, "ms")):
        if value < limit:
            return f"{value / scale:g} {unit}"
    return f"{value / 1e6:g} s"


def _count(value: float, _: Any = None) -> str:
    for limit, scale, unit in ((1e3, 1.0, ""), (1e6, 1e3, " k"), (1e9, 1e6, " M")):
        if value < limit:
            return f"{value / scale:g}{unit}"
    return f"{value / 1e9:g} G"


def _bytes(value: float, _: Any = None) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:g} B"


def _panels(count: int, height: float = 4.2) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(5.4 * count + 0.6, height))
    return figure, [figure.add_subplot(1, count, number + 1) for number in range(count)]


def _shared_legend(figure: Figure, axes: list[Any], below: float = -0.01) -> None:
    """One legend under the panels, every entry once, in the order of the placements."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    names = sorted(entries, key=lambda name: PLACES.index(name) if name in PLACES else len(PLACES))
    figure.tight_layout()
    figure.legend([entries[name] for name in names], names, loc="upper center", bbox_to_anchor=(0.5, below),
                  ncol=max(1, min(8, len(names))))


# ---------------------------------------------------------------- the figures


def latency(result: dict[str, Any]) -> Figure | None:
    """Percentiles by warmness, for one decode batch and one chunk."""
    shown = [row for row in (_middle(result, "decode", 64), _middle(result, "prefill", 2048)) if row is not None]
    if not shown:
        return None
    figure, axes = _panels(len(shown))
    for axis, (kind, batch) in zip(axes, shown):
        states = [state for state in STATES if good(result, kind=kind, tokens=batch, warmness=state)]
        names = [name for name in PLACES if good(result, kind=kind, tokens=batch, placement=name)]
        for place, name in enumerate(names):
            colour, marker, _, _ = LOOKS[name]
            for x, state in enumerate(states):
                for cell in good(result, kind=kind, tokens=batch, warmness=state, placement=name):
                    at, times = x + (place - (len(names) - 1) / 2) * min(0.13, 0.9 / len(names)), cell["lookup_us"]
                    axis.plot([at, at], [times["p50"], times["p99"]], color=colour, linewidth=1.6)
                    axis.plot([at - 0.035, at + 0.035], [times["max"]] * 2, color=colour, linewidth=1.2)
                    axis.plot([at], [times["p50"]], marker, color=colour, markersize=7, markeredgecolor="black", markeredgewidth=0.6,
                              linestyle="none", label=name)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(_time))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(range(len(states)), states)
        axis.grid(axis="x", visible=False)
        axis.set_xlim(-0.5, len(states) - 0.5)
        axis.set_xlabel("state of the caches")
        axis.set_ylabel("time of a lookup, both layers\n(median, to 99th percentile, maximum)")
        axis.set_title(f"{batch} decode streams" if kind == "decode" else f"prefill chunk of {batch} tokens")
    _shared_legend(figure, axes)
    return figure


def _middle(result: dict[str, Any], kind: str, wanted: int) -> tuple[str, int] | None:
    """The batch of a kind that is nearest to the wanted one."""
    sizes = {cell["tokens"] for cell in good(result, kind=kind)}
    return (kind, min(sizes, key=lambda size: abs(size - wanted))) if sizes else None


def throughput(result: dict[str, Any]) -> Figure | None:
    """Rows a second against the batch, cold and warm."""
    states = [state for state in ("cold", "warm") if good(result, warmness=state)]
    if not states:
        return None
    figure, axes = _panels(len(states))
    for axis, state in zip(axes, states):
        sizes = sorted({cell["tokens"] for cell in good(result, warmness=state)})
        for name in PLACES:
            cells = sorted(good(result, warmness=state, placement=name), key=lambda cell: int(cell["tokens"]))
            if cells:
                colour, marker, line, _ = LOOKS[name]
                axis.plot([cell["tokens"] for cell in cells], [cell["rows_s"] for cell in cells], color=colour, marker=marker,
                          linestyle=line, markeredgecolor="black", markeredgewidth=0.6, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter(FuncFormatter(_count))
        axis.set_xlabel("tokens of a lookup (up to 256: decode streams; above: prefill)")
        axis.set_ylabel("rows/s")
        axis.set_title(state)
    _shared_legend(figure, axes)
    return figure


def hit_rate(result: dict[str, Any]) -> Figure | None:
    """Hit rate against size by order."""
    points = result["reuse"]["points"]
    if not points:
        return None
    figure, (axis,) = _panels(1, 4.4)
    sizes = [point["bytes"] for point in points]
    for order, (colour, marker, line) in ORDER_LOOKS.items():
        rates = [100 * (point["hit_rate_all"] if order == "all" else point["hit_rate"].get(order, float("nan"))) for point in points]
        axis.plot(sizes, rates, color=colour, marker=marker, linestyle=line, markeredgecolor="black", markeredgewidth=0.6,
                  label="all orders" if order == "all" else f"{order}-grams")
    axis.axvline(result["budget"]["dram"], color="#555555", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=4))
    axis.xaxis.set_major_formatter(FuncFormatter(_bytes))
    axis.set_ylim(0, 100)
    axis.text(result["budget"]["dram"], 2, " budget", color="#555555", va="bottom", rotation=90, ha="right")
    axis.set_xlabel("memory for bundles, both layers")
    axis.set_ylabel("hit rate, %")
    axis.set_title(f"{result['trace']['tokens']:,} tokens, {result['reuse']['streams']} streams, cache empty at the start", fontsize=10)
    axis.legend(loc="upper left")
    figure.tight_layout()
    return figure


def _loops(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    rows = result["step"]["rows"] if result["step"] else []
    return [row for row in rows if row["status"] == "ok" and all(row[name] == value for name, value in wanted.items())]


def tokens(result: dict[str, Any]) -> Figure | None:
    """Bars of tokens/s by warmness; the stand-in alone as a line."""
    batches = sorted({row["tokens"] for row in _loops(result, kind="decode")})
    if not batches:
        return None
    figure, axes = _panels(len(batches))
    for axis, batch in zip(axes, batches):
        states = [state for state in STATES if _loops(result, kind="decode", tokens=batch, warmness=state)]
        for x, state in enumerate(states):
            rows = [row for name in PLACES
                    for row in _loops(result, kind="decode", tokens=batch, warmness=state, placement=name, prefetch=True)]
            for k, row in enumerate(rows):
                colour, _, _, hatch = LOOKS[row["placement"]]
                apart = min(0.13, 0.9 / len(rows))
                axis.bar(x + (k - (len(rows) - 1) / 2) * apart, row["tokens_s"], 0.92 * apart, color=colour, hatch=hatch,
                         edgecolor="white" if colour in ("#000000", "#4b1238") else "black", linewidth=0.5, label=row["placement"])
            for alone in _loops(result, kind="decode", tokens=batch, warmness=state, placement="none", prefetch=True):
                axis.plot([x - 0.46, x + 0.46], [alone["tokens_s"]] * 2, color="#555555", linestyle="--", linewidth=1, label="layers alone")
        axis.set_xticks(range(len(states)), states)
        axis.grid(axis="x", visible=False)
        axis.yaxis.set_major_formatter(FuncFormatter(_count))
        axis.set_xlabel("state of the caches")
        axis.set_ylabel("decode tokens/s")
        axis.set_title(f"{batch} streams, prefetch on")
    _shared_legend(figure, axes)
    return figure


def budget(result: dict[str, Any]) -> Figure | None:
    """Steady tokens/s against the budget."""
    sweep = [entry for entry in (result["step"]["sweep"] if result["step"] else []) if entry["status"] == "ok" and "tokens_s" in entry]
    if not sweep:
        return None
    figure, (axis,) = _panels(1, 4.4)
    axis.plot([entry["dram"] for entry in sweep], [entry["tokens_s"] for entry in sweep], color="black", marker="o",
              label="ssdgram, steady text")
    for entry in sweep:
        text = f"{100 * entry['hit_rate_all']:.0f} % hits"
        axis.annotate(text, (entry["dram"], entry["tokens_s"]), textcoords="offset points", xytext=(0, -16), ha="center", fontsize=9)
    for name, warmness in (("none", "warm"), ("hbm", "warm"), ("dram-uva", "warm"), ("dram-copy", "warm"), ("ssdgram", "warm")):
        for row in _loops(result, kind="decode", tokens=64, placement=name, warmness=warmness, prefetch=True):
            colour, _, line, _ = LOOKS.get(name, ("#555555", "", "-", ""))
            axis.axhline(row["tokens_s"], color=colour, linestyle=(0, (1, 2)) if name == "ssdgram" else line, linewidth=1.2,
                         label={"none": "layers alone", "ssdgram": "ssdgram, warm"}.get(name, name))
    axis.set_xscale("log", base=2)
    axis.set_xticks([entry["dram"] for entry in sweep], [f"{_bytes(entry['dram'])}\n1/{1 / entry['share']:.0f}" for entry in sweep])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(_count))
    axis.margins(x=0.15)
    axis.set_ylim(0)
    axis.set_xlabel("DRAM budget: bytes, and share of the table")
    axis.set_ylabel("decode tokens/s, 64 streams")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    return figure
