"""From nothing: a cold batch against a memory map of the checkpoint, memory as the cache fills, opening in a fresh process.

Each measurement prints its medians and its bar, and returns them. Rows that differ from the map's end the measurement.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import ssdgram
from ssdgram import machine
from ssdgram.bench import footprint, mapped
from ssdgram.bench.material import Material, chunks
from ssdgram.bench.warm import PATIENT, STEP, Result, bar

COLD_BAR, GROWTH_BAR, OPEN_BAR_S = 5.0, 1.02, 1.0


def read_ahead_kib(folder: Path) -> int | None:
    """Read-ahead of the drive below `folder`, if the kernel tells."""
    device = machine.block_device(folder)
    told = "" if device is None else machine.read_text(device / "queue/read_ahead_kb").strip()
    return int(told) if told.isdigit() else None


def cold(material: Material, tokens: np.ndarray, *, positions: int = 2048, rounds: int = 5, dram: str = "1GiB") -> Result:
    """Rows of never seen text: prefetch and packed rows of both layers, against a gather from a memory map of the checkpoint.

    Before each, the page cache gives up every file of checkpoint and store (checked), and the store is opened anew. A small table
    flatters the map: with a large read-ahead (some drives' is 8 MiB) its first faults read the whole of it in sequence.
    """
    files = mapped.files_below(material.checkpoint) + mapped.files_below(material.out)
    map_of = ssdgram.token_map(material.tokenizer)
    times: dict[str, list[float]] = {"ssdgram": [], "map": [], "map, MADV_RANDOM": []}
    left, reads = [], []

    def forget() -> None:
        mapped.drop(files)
        left.append(mapped.resident(files))

    for number, part in enumerate(chunks(tokens, positions)[:rounds]):
        order = list(times)[number % 3:] + list(times)[:number % 3]
        found: dict[str, list[np.ndarray]] = {}
        for name in order:
            if name == "ssdgram":
                with ssdgram.open(material.out, dram=dram, tuning=PATIENT) as store:
                    geometry = store.geometry
                    with store.prefetch(np.arange(3, 19, dtype=np.int32)) as batch:     # torch and the gather are loaded
                        _ = [batch.packed(layer) for layer in store.layers]
                    forget()
                    begin = time.perf_counter()
                    with store.prefetch(part) as batch:
                        found[name] = [batch.packed(layer).numpy() for layer in store.layers]
                        times[name].append(time.perf_counter() - begin)
                        reads.append(batch.timing["reads"])
            else:
                forget()
                with mapped.MappedTables(material.checkpoint, random=name != "map") as tables:
                    ids = tables.geometry.row_ids(part, map_of)
                    begin = time.perf_counter()
                    found[name] = tables.gather(ids)
                    times[name].append(time.perf_counter() - begin)
        for name, rows in found.items():
            if not all(np.array_equal(mine, theirs) for mine, theirs in zip(found["map"], rows)):
                raise RuntimeError(f"the rows of {name} are not those of the map")
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ratio = min(seconds["map"], seconds["map, MADV_RANDOM"]) / seconds["ssdgram"]
    result: Result = {"positions": positions, "rows": positions * geometry.columns * len(geometry.layers), "seconds": seconds,
                      "ratio": ratio, "reads": statistics.median(reads), "checkpoint_gib": material.bytes / 2**30,
                      "resident_after_dropping": max(left), "read_ahead_kib": read_ahead_kib(material.checkpoint), "ok": ratio >= COLD_BAR}
    ms = {name: f"{1e3 * value:.0f} ms" for name, value in seconds.items()}
    click.echo(f"  {positions} tokens of text cold: ssdgram {ms['ssdgram']} ({result['reads']:,.0f} page reads), memory map "
               f"{ms['map']}, with MADV_RANDOM {ms['map, MADV_RANDOM']} (checkpoint of "
               f"{result['checkpoint_gib']:.1f} GiB, {max(left) >> 10} KiB resident after dropping): {ratio:.1f} times the "
               f"faster map, {bar(f'{COLD_BAR}', result['ok'])}")
    return result


# ---------------------------------------------------------------- memory and opening


def rss(out: Path, *, dram: str = "1GiB", batches: int = 3000, longest: int = 8192) -> Result:
    """Growth of a fresh process's memory once the cache is full and thousands of batches have run."""
    found = footprint.ask("growth", out, dram, batches, longest)
    marks, budget = found["marks"], found["budget"]
    most = max(marks.values())
    share = {name: (most - marks[name]) / budget for name in ("imported", "started")}
    result = {**found, "growth_since": share, "longest": longest, "ok": max(share.values()) <= GROWTH_BAR}
    click.echo(f"  dram {dram}: {share['imported']:.4f} of it since the import, {share['started']:.4f} since open and first "
               f"batch ({found['slots']:,} slots, {found['slots_free']:,} free; {found['filling_batches']} batches of {longest} "
               f"tokens, then {batches} of {STEP}, then {batches // 10} long ones): {bar(f'{GROWTH_BAR}', result['ok'])}")
    return result


def opening(outs: dict[str, Path], *, rounds: int = 7, dram: str = "1GiB") -> Result:
    """Time and memory of `open` in fresh processes, for stores of several sizes, in turn."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in outs}
    for number in range(rounds + 1):
        for name, out in outs.items():
            run = footprint.ask("opening", out, dram)
            if number > 0:                                   # the first may compile
                runs[name].append(run)
    figures = {}
    for name, taken in runs.items():
        keys = ("import_s", "open_s", "open_cpu_s", "bytes")
        figure: Result = {key: statistics.median(run[key] for run in taken) for key in keys}
        figure |= {"most_s": max(run["open_s"] for run in taken), "torch": any(run["torch"] for run in taken)}
        figure["ok"] = figure["open_s"] <= OPEN_BAR_S and not figure["torch"]
        figures[name] = figure
        click.echo(f"  {name}: open {figure['open_s']:.2f} s (most {figure['most_s']:.2f}; processor time "
                   f"{figure['open_cpu_s']:.2f}), import {figure['import_s']:.2f} s apart, "
                   f"{figure['bytes'] / 2**20:.1f} MiB, torch {'imported' if figure['torch'] else 'not imported'}: "
                   f"{bar(f'{OPEN_BAR_S} s', figure['ok'])}")
    return {"dram": dram, "stores": figures, "ok": all(figure["ok"] for figure in figures.values())}
