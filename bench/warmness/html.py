"""The report as one page that needs nothing else: styles and plots are in it, no script, no link to anywhere.

It says what was measured on which machine, with which text and table, what each state means, every cell, and what was not run or
refused and why. All that comes from the result is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ssdgram.bench.warmness.report import BARS_HEADS, PLACES, STATES, UNSTABLE_IS, count, figure, hits, ms, reasons, verdict

if TYPE_CHECKING:
    from ssdgram.bench.warmness.plots import Plot

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #111; background: #fff }
h1 { font-size: 1.6em } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 3px 9px; border-bottom: 1px solid #e2e2e2; text-align: right; vertical-align: top; white-space: nowrap }
th { border-bottom: 2px solid #888; background: #f4f4f4 } td.l, th.l { text-align: left } td.w { white-space: normal; text-align: left }
tr.first td { border-top: 1px solid #888 } .missed { font-weight: bold } .note { color: #555 }
.warn { border: 2px solid #000; padding: .6em 1em; font-weight: bold } svg { max-width: 100%; height: auto } .scroll { overflow-x: auto }
"""

MEANINGS = {
    "cold": "nothing resident. The page cache gave up every file before each lookup (a cell with more than 1 % left is refused); "
            "SSDGram was opened anew before each chunk, and its decode steps ask for n-grams that the store never saw.",
    "mixed": "one half of every step's positions is of text that is resident, the other half is new: for decode n-grams that nobody asked "
             "for, for prefill the text that follows in the trace (which shares n-grams with what is resident).",
    "steady": "after one half of the trace was served, measured on the other half, in order, which goes on into the cache. What was "
              "resident after the first half was kept as a hot set, from which both passes start.",
    "warm": "every bundle of the measured steps resident and loaded beforehand: a cell with a single miss is refused. No text is repeated "
            "as filler: a pass asks for each step once.",
}
PLACED = {
    "hbm": "the whole table in GPU memory, looked up row by row; tokens copied to the GPU and hashed there",
    "dram-uva": "the whole table pinned; the GPU reads it row by row over PCIe; tokens copied to the GPU and hashed there",
    "dram-copy": "the whole table in memory; the CPU gathers with up to 16 threads, one copy",
    "ssd-mmap": "the checkpoint mapped: distinct ids (numpy.unique), numpy gather, pinned buffer, copy; below 2048 tokens without "
                "read-ahead",
    "ssd-pread": "page files read through the page cache by 32 threads, one row a read",
    "ssdgram": "a store: bundles cached in DRAM, pages read past the page cache. On a GPU a chunk is asked for in pieces (Store.staging), "
               "and counted so: what a later piece finds of an earlier one's bundles is a hit, or joined, cold too",
    "ssdgram-hbm": "warm: the same store with its hottest bundles in GPU memory besides (size: budget, below); all of the warm text's are",
    "...-frame": "in the step model, warm, on a GPU: everything behind layer 0 in one CUDA graph, as engines run decode steps; of a store "
                 "both gathers (Store.frame), of a whole table the hash and both lookups",
}


def page(result: dict[str, Any], plots: dict[str, Plot]) -> str:
    """The page."""
    parts = [_head(result), _bars(result)]
    for plot in plots.values():
        parts.append(f'<h2>{escape(plot.title)}</h2><p class="note">{escape(plot.text)}</p>'
                     f'<figure role="img" aria-label="{escape(plot.title)}">{plot.svg}</figure>')
    parts += [_meanings(), _cells(result), _steps(result), _missing(result), _facts(result)]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>SSDGram: warmness</title><style>{STYLE}</style></head>'
            f"<body>{''.join(parts)}</body></html>\n")


def _head(result: dict[str, Any]) -> str:
    facts, trace, table, budget = result["facts"], result["trace"], result["table"], result["budget"]
    machine = f"{facts.get('gpu', 'no GPU')}, {facts['cpu']}, {facts['cpus']} processors, {facts['memory_gib']} GiB"
    warning = ""
    if trace["filler"]:
        warning = (f'<p class="warn">The trace is filler: {trace["repeated"]:.0%} of its positions repeat the text before them. Every hit '
                   f"rate below is worthless as a forecast.</p>")
    return (f"<h1>SSDGram: how warm must each tier be?</h1>{warning}<p>{escape(machine)}, {escape(facts.get('drive', 'drive unknown'))}; "
            f"{escape(facts['date'])}. Table of {table['bytes'] / 2**30:.2f} GiB{' of made-up rows' if table['made_up'] else ''} in the "
            f"real layout; SSDGram has {budget['dram'] / 2**30:.3f} GiB of DRAM ({budget['share']:.4f} of the table) and "
            f"{budget['hbm'] / 2**30:.3f} GiB of GPU memory for ssdgram-hbm. "
            f"A lookup is from token ids in host memory to the rows of all layers. "
            f"Text: {trace['tokens']:,} tokens, SHA-256 <code>{escape(trace['digest'][:16])}…</code>. One read of the drive takes "
            f"{result['one_read_us']['p50']:.0f} us (p99 {result['one_read_us']['p99']:.0f}).</p>")


def _table(heads: list[str], rows: list[list[str]], left: int = 1, first: list[bool] | None = None) -> str:
    """A table; its first `left` columns are set left. Cells are HTML already."""
    def line(tag: str, cells: list[str]) -> str:
        return "".join(f'<{tag}{" class=l" if k < left else ""}>{cell}</{tag}>' for k, cell in enumerate(cells))

    marks = first or [False] * len(rows)
    body = "".join(f'<tr{" class=first" if mark else ""}>{line("td", row)}</tr>' for mark, row in zip(marks, rows))
    return f'<div class="scroll"><table><tr>{line("th", heads)}</tr>{body}</table></div>'


def _bars(result: dict[str, Any]) -> str:
    rows = [[escape(bar["what"]), figure(bar["found"]), figure(bar["mean"]), escape(bar["bar"]),
             f'<span class="missed">{verdict(bar["ok"])}</span>' if bar["ok"] is False else verdict(bar["ok"])] for bar in result["bars"]]
    return "<h2>What this run is held to</h2>" + _table(list(BARS_HEADS), rows) + _drive(result)


def _drive(result: dict[str, Any]) -> str:
    """The drive that steady text would need."""
    if not result["step"] or not result["step"]["drive"]:
        return ""
    names = {"as_dram_uva_ahead": "as fast as dram-uva begun ahead", "as_dram_uva_in_line": "as fast as dram-uva in line",
             "hidden": "hidden but for 1 % of a step"}
    rows = []
    for need in result["step"]["drive"]:
        for key, text in names.items():
            if key in need:
                rate = "no drive is fast enough" if need[key] is None else f"{need[key]:,.0f} reads/s"
                seen = [f"{need['reads_a_step']:,.0f}", f"{need['reads_s_seen']:,.0f}"]
                rows.append([f"{need['tokens']} streams", text, rate, *seen])
    return ("<h2>The drive that steady text needs</h2><p class=note>Computed from the reads of a steady step and the time that the layers "
            "before each n-gram layer give.</p>" + _table(["batch", "to be", "reads/s needed", "reads a step", "reads/s seen"], rows, 2))


def _meanings() -> str:
    states = "".join(f"<li><b>{name}</b>: {escape(text)}</li>" for name, text in MEANINGS.items())
    places = "".join(f"<li><b>{name}</b>: {escape(text)}</li>" for name, text in PLACED.items())
    return f"<h2>What the words mean</h2><ul>{states}</ul><ul>{places}</ul>"


def _cells(result: dict[str, Any]) -> str:
    heads = ["placement", "p50", "p90", "p99", "max, ms", "stall p50, ms", "rows/s", "hits by order, %", "reads", "reads/s",
             "bytes per useful", "CPU, ms", "minor / major faults", "switches", "PCIe, MiB", "pinned, GiB", "RSS, GiB",
             "page cache before / after, %"]
    parts = [f"<h2>Every cell</h2><p class=note>Per lookup, all layers. * unstable: {UNSTABLE_IS}. "
             "RSS is that of the whole process, all placements in it. PCIe bytes are computed.</p>"]
    for state in STATES:
        rows, first, before = [], [], None
        for cell in sorted((cell for cell in result["cells"] if cell["warmness"] == state), key=_order):
            batch = f"{cell['kind']} {cell['tokens']}"
            if batch != before:
                rows.append([f"<b>{batch}</b>", *[""] * (len(heads) - 1)])
                first.append(True)
                before = batch
            rows.append(_cell(cell, len(heads)))
            first.append(False)
        if rows:
            parts.append(f"<h3>{state}</h3>" + _table(heads, rows, 1, first))
    return "".join(parts)


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["kind"], cell["tokens"], PLACES.index(cell["placement"])


def _cell(cell: dict[str, Any], width: int) -> list[str]:
    if cell["status"] != "ok":
        return [cell["placement"], escape(cell["status"]), *[""] * (width - 2)]
    times = cell["lookup_us"]
    return [cell["placement"] + ("" if cell["stable"] else " *"), *(ms(times[name]) for name in ("p50", "p90", "p99", "max")),
            ms(cell["stall_us"]["p50"]), count(cell["rows_s"]), escape(hits(cell)), count(cell["reads"]), count(cell["reads_s"]),
            f"{cell['bytes_per_useful_byte']:.2f}", ms(1e6 * cell["cpu_s"]),
            f"{count(cell['minor_faults'])} / {count(cell['major_faults'])}",
            f"{count(cell['voluntary_switches'])} + {count(cell['involuntary_switches'])}", f"{cell['pcie_bytes'] / 2**20:.3g}",
            f"{cell['pinned_bytes'] / 2**30:.3g}", f"{cell['rss'] / 2**30:.3g}",
            f"{100 * cell['cached_before']:.3g} / {100 * cell['cached_after']:.3g}"]


def _steps(result: dict[str, Any]) -> str:
    step = result["step"]
    if not step:
        return ""
    times = "; ".join(f"{name}: {compute['layer_us']:.0f} us a layer" for name, compute in step["stand_in"].items())
    kind = next((compute["kind"] for compute in step["stand_in"].values()), "")
    asked = ", ".join(f"{streams}: {us:g}" for streams, us in step["asked_layer_us"].items())
    needed = " and ".join(map(str, step["engram"]))
    parts = [f"<h2>The step model</h2><p>{step['layers']} layers, n-gram rows needed before layers {needed} (0-based). The layers are "
             f"{escape(kind)}. Asked for (the committed defaults unless given): us a decode layer by streams {escape(asked)}, us a prefill "
             f"layer {step['prefill_us_a_token']:g} a token; calibrated: {escape(times)}. Exposed is what a step takes longer than the "
             f"layers alone; the window is how many layers' time would hide it, from the runs without prefetch.</p>"]
    heads = ["text", "placement", "prefetch", "tokens/s", "p50", "p90", "p99, ms", "exposed p50", "p99, ms", "window p50", "p99, layers",
             "hits, %", "reads/s"]
    for kind, title in (("decode", "decode: time per output token"), ("prefill", "one prompt: time to first token")):
        for tokens in sorted({row["tokens"] for row in step["rows"] if row["kind"] == kind}):
            rows, first, before = [], [], None
            for row in sorted((row for row in step["rows"] if row["kind"] == kind and row["tokens"] == tokens), key=_loop_order):
                rows.append(_loop(row, len(heads)))
                first.append(row["warmness"] != before)
                before = row["warmness"]
            parts.append(f"<h3>{title}, {tokens} {'streams' if kind == 'decode' else 'tokens'}</h3>" + _table(heads, rows, 3, first))
    return "".join(parts)


def _loop_order(row: dict[str, Any]) -> tuple[Any, ...]:
    return STATES.index(row["warmness"]), ["none", *PLACES].index(row["placement"]), not row["prefetch"]


def _loop(row: dict[str, Any], width: int) -> list[str]:
    head = [row["warmness"], "layers alone" if row["placement"] == "none" else row["placement"], "on" if row["prefetch"] else "off"]
    if row["status"] != "ok":
        return [*head, escape(row["status"]), *[""] * (width - 4)]
    window, exposed, times = row.get("window_layers", {}), row["exposed_us"], row["step_ms"]
    return [*head, f"{row['tokens_s']:,.0f}" + ("" if row["stable"] else " *"), *(f"{times[name]:.4g}" for name in ("p50", "p90", "p99")),
            ms(exposed["p50"]), ms(exposed["p99"]), str(window.get("p50", "")), str(window.get("p99", "")),
            f"{100 * row['hit_rate_all']:.0f}" if "hit_rate_all" in row else "", count(row["reads_s"]) if "reads_s" in row else ""]


def _missing(result: dict[str, Any]) -> str:
    found = reasons(result)
    items = "".join(f"<li>{escape(line)}</li>" for line in found) or "<li>nothing</li>"
    checked = ", ".join(f"{escape(name)}: {escape(text)}" for name, text in result["checked"].items())
    kernel = f" Lookup kernel of hbm and dram-uva: {escape(result['lookup_kernel'])}." if result.get("lookup_kernel") else ""
    return (f"<h2>Not run, refused, failed</h2><ul>{items}</ul><p>Rows compared with the store's on a step of each kind: {checked}."
            f"{kernel}</p>")


def _facts(result: dict[str, Any]) -> str:
    rows = [[escape(str(name)), escape(str(value))] for part in ("facts", "table", "budget", "trace", "sizes", "compared")
            for name, value in ((f"{part}: {key}", value) for key, value in result.get(part, {}).items())]
    return "<h2>Machine, versions, text, sizes</h2>" + _table(["what", "value"], rows, 2)
