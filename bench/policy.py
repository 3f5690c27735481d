"""Cache policy: hit rates on real text beside LRU, S3-FIFO, W-TinyLFU, ARC (libcachesim) and the offline optimum.

    python -m ssdgram bench policy                      two traces: code and prose that this machine has on disk
    python -m ssdgram bench policy --text NAME=PATH     text of your own instead, a file or a folder

Each text is cut at --tokens and decoded by --streams streams in step; a request is one bundle (one layer, every order). The cache
starts empty and every request counts. Sizes are in bundles; the last is 1/27 of the distinct ones. The text is named and
hashed in the result. The optimum (Belady, which may decline to keep a bundle) knows the future: nothing can reach it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import click
import numpy as np

from ssdgram._compiled import compiled, compiled_lean
from ssdgram.bench.facts import facts, write_results
from ssdgram.cache import directory as cache_directory
from ssdgram.cache import sketch as cache_sketch
from ssdgram.cache.directory import prefetch_tags, probe, set_of
from ssdgram.cache.policy import insert, touch
from ssdgram.tools.model import default_tokenizer, v41_flash
from ssdgram.tools.text import documents, from_paths
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_build import build
from ssdgram.tools.trace_shapes import decode, requests

BASELINES = ("LRU", "S3FIFO", "WTinyLFU", "ARC")
SIZES = (4096, 16384, 65536, 262144)
SHARE = 27                                                   # the last size: distinct bundles / SHARE
BARS = {4096: 0.03, 16384: 0.015, 65536: 0.015, 262144: 0.015}
SHARE_BAR = 0.98                                             # there: of the best baseline's hit rate
BLOCK = 64                                                   # probes prefetched together, as the planner does


# ---------------------------------------------------------------- this cache


@compiled_lean
def replay(directory, sketch, x, groups):  # type: ignore[no-untyped-def]
    """Ask for bundle after bundle as the planner would; the number of hits. Slots are the requests' numbers."""
    hits, sets = 0, directory.shape[0]
    for i in range(len(x)):
        s = set_of(x[i], groups[i], sets)
        way = probe(directory, s, x[i], groups[i])
        if way >= 0:
            hits += 1
            touch(directory, sketch, s, way)
        else:
            insert(directory, sketch, s, x[i], groups[i], i)
    return hits


def hit_rate(x: np.ndarray, groups: np.ndarray, capacity: int) -> float:
    """Hit rate of this cache with room for `capacity` bundles over requests x int64 [N], groups uint8 [N]."""
    sets = cache_directory.sets_for(capacity)
    hits = replay(cache_directory.allocate(sets), cache_sketch.allocate(sets), x, groups)
    return hits / max(1, len(x))


@compiled_lean
def _hits_in_blocks(directory, sketch, x, groups, sets):  # type: ignore[no-untyped-def]
    """Probe and touch with the sets of a block asked for ahead; a sum over the slots, so that nothing is left out."""
    total = 0
    for first in range(0, len(x), BLOCK):
        for i in range(first, min(first + BLOCK, len(x))):
            sets[i - first] = set_of(x[i], groups[i], directory.shape[0])
            prefetch_tags(directory, sets[i - first])
        for i in range(first, min(first + BLOCK, len(x))):
            way = probe(directory, sets[i - first], x[i], groups[i])
            if way >= 0:
                touch(directory, sketch, sets[i - first], way)
                total += directory[sets[i - first]].slot[way]
    return total


def speed(entries: int = 500_000, seed: int = 0) -> dict[str, float]:
    """Nanoseconds per hit (probe, touch, slot; blocks asked for ahead) and per insertion, random keys, least of 5 rounds."""
    random = np.random.default_rng(seed)
    sets, sweep = cache_directory.sets_for(entries), np.empty(BLOCK, np.int64)
    directory, sketch = cache_directory.allocate(sets), cache_sketch.allocate(sets)
    hit_ns, insert_ns = [], []
    for _ in range(5):
        x, groups = random.integers(0, 1 << 62, entries), random.integers(0, 6, entries).astype(np.uint8)
        begin = time.perf_counter_ns()
        replay(directory, sketch, x, groups)
        insert_ns.append((time.perf_counter_ns() - begin) / entries)
        chosen = random.integers(entries // 2, entries, entries)
        hot_x, hot_groups = x[chosen], groups[chosen]
        begin = time.perf_counter_ns()
        _hits_in_blocks(directory, sketch, hot_x, hot_groups, sweep)
        hit_ns.append((time.perf_counter_ns() - begin) / entries)
    return {"hit_ns": min(hit_ns[1:]), "insert_ns": min(insert_ns[1:])}


# ---------------------------------------------------------------- the others


@compiled
def _belady(next_use, capacity):  # type: ignore[no-untyped-def]
    """Hits of the optimum. next_use[i]: the next request for the same bundle as request i, or N. What is kept is kept until
    its next use; when there is no room, the one whose next use is farthest goes (it may be the one just asked for)."""
    count = len(next_use)
    kept = np.zeros(count, np.bool_)                         # kept[i]: the bundle of request i will be there
    farthest = [np.int64(0)]                                 # minus the next uses; those in the past never come up
    farthest.pop()
    hits, live = 0, 0
    for i in range(count):
        if kept[i]:
            hits += 1
            live -= 1
        if next_use[i] < count:
            kept[next_use[i]] = True
            heappush(farthest, -next_use[i])
            live += 1
            if live > capacity:
                kept[-heappop(farthest)] = False
                live -= 1
    return hits


def number_bundles(x: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The requests' bundles as numbers 0, 1, ...: int64 [N]; equal x of different groups are different bundles."""
    numbers, used = np.empty(len(x), np.int64), 0
    for group in np.unique(groups):
        distinct, numbers_of_group = np.unique(x[groups == group], return_inverse=True)
        numbers[groups == group] = numbers_of_group + used
        used += len(distinct)
    return numbers


def next_uses(numbers: np.ndarray) -> np.ndarray:
    """For each request the position of the next one for the same bundle, or N: int64 [N]."""
    order = np.argsort(numbers, kind="stable")
    result = np.full(len(numbers), len(numbers), np.int64)
    same = numbers[order[1:]] == numbers[order[:-1]]
    result[order[:-1][same]] = order[1:][same]
    return result


def optimum(numbers: np.ndarray, capacity: int) -> float:
    """Hit rate of the offline optimum over requests named by bundle numbers [N]."""
    return _belady(next_uses(numbers), capacity) / max(1, len(numbers))


@contextlib.contextmanager
def libcachesim_trace(numbers: np.ndarray, folder: Path) -> Iterator[Path]:
    """A temporary file of the requests in libcachesim's oracleGeneral format, every bundle of size 1."""
    records = np.zeros(len(numbers), [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records["time"], records["id"], records["size"] = np.arange(len(numbers)) // 192, numbers + 1, 1
    following = next_uses(numbers)
    records["next"] = np.where(following < len(numbers), following, -1)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".oracleGeneral") as file:
        records.tofile(file.name)
        yield Path(file.name)


def baseline(path: Path, name: str, capacity: int) -> float:
    """Hit rate of libcachesim's policy `name`, with its default settings, over a trace file."""
    import libcachesim

    settings = libcachesim.ReaderInitParam(ignore_obj_size=True)
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, settings)
    misses, _ = getattr(libcachesim, name)(cache_size=capacity).process_trace(reader)
    return 1.0 - misses


# ---------------------------------------------------------------- the comparison


def compare(x: np.ndarray, groups: np.ndarray, sizes: tuple[int, ...], folder: Path, jobs: int) -> list[dict[str, Any]]:
    """One row per size: hit rates of ours, the baselines and the optimum, and whether the bar is met."""
    numbers = number_bundles(x, groups)
    distinct = int(numbers.max()) + 1
    rows: list[dict[str, Any]] = []
    with libcachesim_trace(numbers, folder) as path, \
            ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        share = distinct // SHARE
        others = {(size, name): pool.submit(baseline, path, name, size) for size in (*sizes, share) for name in BASELINES}
        for size in (*sizes, share):
            row: dict[str, Any] = {"bundles": size, "ours": hit_rate(x, groups, size), "optimum": optimum(numbers, size)}
            row |= {name: others[size, name].result() for name in BASELINES}
            best = max(row[name] for name in BASELINES)
            row["over_best"] = row["ours"] - best
            row["ok"] = row["ours"] >= SHARE_BAR * best if size == share else row["over_best"] >= -BARS.get(size, 0.015)
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one text."""
    columns = ("ours", *BASELINES, "optimum")
    click.echo(f"  {'bundles':>8}  " + "  ".join(f"{name:>8}" for name in columns) + "  over best")
    for row in rows:
        figures = "  ".join(f"{row[name]:8.4f}" for name in columns)
        click.echo(f"  {row['bundles']:>8}  {figures}  {row['over_best']:+9.4f}  {'ok' if row['ok'] else 'BELOW THE BAR'}")


def texts(chosen: tuple[str, ...], folder: Path, tokenizer: Path, limit: int) -> Iterator[tuple[str, Trace]]:
    """(name, trace) of the texts asked for; those of this machine are kept in `folder` for the next run."""
    for item in chosen or ("code", "prose"):
        name, _, source = item.partition("=")
        kept = folder / f"text-{name}.trace"
        if source:
            yield name, build(tokenizer, from_paths([Path(source)]), limit)
        elif kept.exists() and len((trace := Trace.load(kept)).tokens) == limit:
            yield name, trace
        else:
            trace = build(tokenizer, documents(name), limit)
            trace.save(kept)
            yield name, trace


@click.command(help=__doc__)
@click.option("--text", "chosen", multiple=True, metavar="NAME[=PATH]", help="Default: code and prose.")
@click.option("--tokens", default=2_500_000, show_default=True, help="At most, of each text.")
@click.option("--streams", default=64, show_default=True)
@click.option("--size", "sizes", type=int, multiple=True, help="Bundles; default: " + ", ".join(map(str, SIZES)))
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keeps tokenised text; default: temporary.")
@click.option("--jobs", type=int, default=len(os.sched_getaffinity(0)), show_default=True, help="Baselines at once.")
@click.option("--save/--no-save", default=True, help="Write bench/results/policy-NAME.json.")
def main(chosen: tuple[str, ...], tokens: int, streams: int, sizes: tuple[int, ...], folder: Path | None, jobs: int,
         save: bool) -> None:
    """Build, replay, print, write."""
    import libcachesim  # noqa: F401  (said now, not after the text was tokenised)

    tokenizer = default_tokenizer()
    geometry, table = v41_flash(tokenizer)
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssdgram-policy-")))
        place.mkdir(parents=True, exist_ok=True)
        pace = speed()
        click.echo(f"one hit {pace['hit_ns']:.0f} ns, one insertion {pace['insert_ns']:.0f} ns (500,000 entries, random keys)")
        for name, trace in texts(chosen, place, tokenizer, tokens):
            asked = requests(decode(trace, streams, geometry.orders), geometry, table)
            x, groups = asked.x, asked.groups
            click.echo(f"{name}: {len(trace.tokens):,} tokens of {trace.about['documents']}, sha256 "
                       f"{trace.about['text_sha256'][:16]}; {len(x):,} requests by {streams} streams")
            rows = compare(x, groups, sizes or SIZES, place, jobs)
            show(rows)
            if save:
                result = {"facts": facts(), "text": trace.about, "streams": streams, "requests": len(x), "speed": pace,
                          "rows": rows}
                click.echo(f"  written: {write_results(f'policy-{name}', result)}")


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
