"""Serving on the CPU: planning, the GIL, priorities, cold text against a memory map, memory, opening.

    python -m ssdgram bench serve [plan gil priority cold rss open]      all six if none is named

Each prints its medians over rounds that alternate what is compared, with fresh inputs, its bar, and the machine's load (other
work on the processors spoils every figure; the bars are for an idle machine). Checkpoint and stores are made in --folder and
deleted afterwards unless --keep. A result goes to bench/results/serve-NAME.json.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import ssdgram
from ssdgram.bench import footprint, mapped
from ssdgram.bench.facts import facts, write_results
from ssdgram.bench.io import compute
from ssdgram.bench.material import Material, chunks, discard, make, random_tokens, text
from ssdgram.store import Store, Tuning

STEP = 64                                                    # tokens of a decode step
PLAN_BAR_US, GIL_BAR, COLD_BAR, GROWTH_BAR, OPEN_BAR_S = 1.0, 0.1, 5.0, 1.02, 1.0
PATIENT = Tuning(degraded_after_s=30)                        # other work on the drive is no reason to give up a measurement
Result = dict[str, Any]


# ---------------------------------------------------------------- common to all


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and how many."""
    if not values:
        raise RuntimeError("no batch was warm: the cache is too small for what is measured; give a larger --dram")
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99)), "count": len(values)}


def touch(store: Store, tokens: Any) -> None:
    """Bring what the tokens need into the cache."""
    with store.prefetch(tokens) as batch:
        batch.wait(timeout_s=120)


def warm_step(store: Store, tokens: Any) -> tuple[dict[str, float], float]:
    """One batch: what the planner noted of it, and the caller's time from call to rows in us."""
    begin = time.perf_counter()
    with store.prefetch(tokens) as batch:
        batch.wait(timeout_s=120)
        caller = 1e6 * (time.perf_counter() - begin)
        return batch.timing, caller


def is_warm(timing: dict[str, float]) -> bool:
    """Whether the batch found every bundle ready."""
    return timing["misses"] == 0 and timing["joined"] == 0


@contextlib.contextmanager
def computing(really: bool = True) -> Iterator[None]:
    """Beside it, a thread that computes in Python all the time (if `really`)."""
    stop = threading.Event()
    thread = threading.Thread(target=compute, args=(stop,), daemon=True)
    if really:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if really:
            thread.join()


def bar(limit: str, ok: bool) -> str:
    """The end of a printed line."""
    return f"bar {limit}: {'ok' if ok else 'MISSED'}"


def cpu_us(store: Store) -> float:
    """Processor time of the planner's thread so far: what other work on the machine cannot stretch. Exact while it sleeps."""
    return int(Path(f"/proc/self/task/{store._thread.native_id}/schedstat").read_text().split()[0]) / 1e3


# ---------------------------------------------------------------- plan


def plan(out: Path, tokens: np.ndarray, *, positions: int = 4096, each: int = 2, rounds: int = 20, dram: str = "1GiB") -> Result:
    """The planner's time per token of a warm batch: request taken to last layer published; its processor time with the release.

    tokens: text, at least 2 * positions * each of them. Four kinds of batches, `each` different ones of a kind, in turn.
    """
    random = np.random.default_rng()
    with ssdgram.open(out, dram=dram, tuning=PATIENT) as store:
        def some(count: int) -> np.ndarray:
            return random_tokens(random, store._vocabulary, count)

        pieces = chunks(tokens[positions * each:], STEP)
        kinds: dict[str, list[Any]] = {
            "random": [some(positions) for _ in range(each)],
            "random, four times over": [np.tile(some(positions // 4), 4) for _ in range(each)],
            "text, one piece": [*chunks(tokens[:positions * each], positions)],
            "text, 64-token pieces": [[ssdgram.Sequence(piece) for piece in pieces[k::each][:positions // STEP]]
                                      for k in range(each)],
        }
        samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for number in range(rounds + 2):                     # the first two bring everything in
            for k in range(each):
                for kind, batches in kinds.items():
                    before = cpu_us(store)
                    timing, _ = warm_step(store, batches[k])
                    time.sleep(0.003)                        # for the release
                    if number > 1 and is_warm(timing):
                        samples[kind].append({"us": timing["published_us"] / positions, "bundles": timing["bundles"] / positions,
                                              "cpu_us": (cpu_us(store) - before) / positions})
    figures = {}
    for kind, taken in samples.items():
        if not taken:
            raise RuntimeError(f"{kind}: no batch was warm: {dram} is too little for {4 * each} batches of {positions} tokens")
        figure: Result = {name: statistics.median(sample[name] for sample in taken) for name in taken[0]}
        figure |= {"least_us": min(sample["us"] for sample in taken), "batches": len(taken), "ok": figure["us"] <= PLAN_BAR_US}
        figures[kind] = figure
        click.echo(f"  {kind:24s} {figure['us']:.2f} us per token (least {figure['least_us']:.2f}; processor time with the "
                   f"release {figure['cpu_us']:.2f}; {figure['bundles']:.2f} bundles per token; {len(taken)} batches): "
                   f"{bar(f'{PLAN_BAR_US} us', figure['ok'])}")
    return {"positions": positions, "kinds": figures, "ok": all(figure["ok"] for figure in figures.values())}


# ---------------------------------------------------------------- gil


def gil(out: Path, tokens: np.ndarray, *, cold_tokens: int = 2048, steps: int = 300, rounds: int = 5, pause_s: float = 0.002,
        dram: str = "1GiB") -> Result:
    """Reads/s of a cold prefetch, and warm steps of 64 tokens, alone and beside a computing Python thread, in turn.

    The steps come `pause_s` apart in both cases: what is compared is the thread's effect, not that of a longer pause.
    """
    random = np.random.default_rng()
    sets = chunks(tokens, STEP)[:64]
    rates: dict[bool, list[float]] = {False: [], True: []}
    engine: dict[bool, list[float]] = {False: [], True: []}
    caller: dict[bool, list[float]] = {False: [], True: []}
    cold_steps = 0
    with ssdgram.open(out, dram=dram, tuning=PATIENT) as store:
        for piece in sets:
            touch(store, piece)
        for number in range(rounds):
            for busy in (False, True) if number % 2 == 0 else (True, False):
                fresh = random_tokens(random, store._vocabulary, cold_tokens)
                with computing(busy):
                    timing, _ = warm_step(store, fresh)
                    rates[busy].append(1e6 * timing["reads"] / timing["published_us"])
                    for k in range(steps):
                        time.sleep(pause_s)
                        timing, caller_us = warm_step(store, sets[k % len(sets)])
                        if not is_warm(timing):
                            cold_steps += 1
                            continue
                        engine[busy].append(timing["published_us"])
                        caller[busy].append(caller_us)
    result: Result = {"cold_tokens": cold_tokens, "pause_s": pause_s, "steps_left_out": cold_steps,
                      "reads_s": {name: statistics.median(rates[busy]) for name, busy in (("alone", False), ("beside", True))},
                      "engine_us": {"alone": quantiles(engine[False]), "beside": quantiles(engine[True])},
                      "caller_us": {"alone": quantiles(caller[False]), "beside": quantiles(caller[True])}}
    rate, ratio = result["reads_s"], result["reads_s"]["beside"] / result["reads_s"]["alone"]
    oks = [ratio >= 1 - GIL_BAR]
    click.echo(f"  cold prefetch of {cold_tokens} tokens: {rate['alone']:,.0f} reads/s alone, {rate['beside']:,.0f} beside "
               f"computing Python: ratio {ratio:.3f}, {bar(f'{1 - GIL_BAR}', oks[0])}")
    for name in ("p50", "p99"):
        alone, beside = result["engine_us"]["alone"][name], result["engine_us"]["beside"][name]
        oks.append(beside <= alone * (1 + GIL_BAR))
        click.echo(f"  warm batch of {STEP}, engine {name}: {alone:.0f} us alone, {beside:.0f} us beside: ratio "
                   f"{beside / alone:.2f}, {bar(f'{1 + GIL_BAR}', oks[-1])} (caller {result['caller_us']['alone'][name]:.0f} and "
                   f"{result['caller_us']['beside'][name]:.0f} us)")
    return {**result, "reads_ratio": ratio, "ok": all(oks)}


# ---------------------------------------------------------------- priority


def one_read_us(path: Path, count: int = 300) -> dict[str, float]:
    """Times in us of single 4 KiB reads at random places, direct where the file system can."""
    import mmap

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
    page, times = mmap.mmap(-1, 4096), []
    try:
        for number in np.random.default_rng().integers(0, max(1, path.stat().st_size // 4096), count):
            begin = time.perf_counter()
            os.preadv(descriptor, [page], int(number) * 4096)
            times.append(1e6 * (time.perf_counter() - begin))
    finally:
        os.close(descriptor)
    return quantiles(times)


def priority(out: Path, tokens: np.ndarray, *, background: int = 8192, steps: int = 500, rounds: int = 3, pause_s: float = 0.001,
             dram: str = "1GiB") -> Result:
    """Engine time of warm steps of 64 tokens, undisturbed and during a cold background prefetch, in turn."""
    random = np.random.default_rng()
    sets = chunks(tokens, STEP)[:64]
    quiet: list[float] = []
    during: list[float] = []
    cold_steps, seconds = 0, []

    def step(k: int) -> float | None:
        time.sleep(pause_s)
        timing, _ = warm_step(store, sets[k % len(sets)])
        return timing["published_us"] if is_warm(timing) else None

    read = one_read_us(max((path for path in mapped.files_below(out)), key=lambda path: path.stat().st_size))
    with ssdgram.open(out, dram=dram, tuning=PATIENT) as store:
        for piece in sets:
            touch(store, piece)
        for _ in range(rounds):
            taken = [step(k) for k in range(steps)]
            cold_steps += taken.count(None)
            quiet += [us for us in taken if us is not None]
            begin, k = time.perf_counter(), 0
            with store.prefetch(random_tokens(random, store._vocabulary, background), priority="background") as batch:
                while not all(_is_ready(batch, layer) for layer in store.layers):
                    us = step(k)
                    k += 1
                    cold_steps += us is None
                    during += [us] if us is not None else []
                batch.wait()
            seconds.append(time.perf_counter() - begin)
    if not during:
        raise RuntimeError(f"the background prefetch of {background} tokens ended before one warm step did")
    still, busy = quantiles(quiet), quantiles(during)
    limit = 2 * still["p99"] + read["p50"]
    result: Result = {"background": background, "one_read_us": read, "undisturbed_us": still, "during_us": busy,
                      "limit_us": limit, "background_s": statistics.median(seconds), "steps_left_out": cold_steps,
                      "ok": busy["p99"] <= limit}
    click.echo(f"  warm batch of {STEP}, engine p99: {still['p99']:.0f} us undisturbed (p50 {still['p50']:.0f}), "
               f"{busy['p99']:.0f} us (p50 {busy['p50']:.0f}, {len(during)} steps) during a cold background prefetch of "
               f"{background} ({result['background_s']:.1f} s); one read takes {read['p50']:.0f} us: "
               f"{bar(f'{limit:.0f} us', result['ok'])}")
    return result


def _is_ready(batch: ssdgram.Batch, layer: int) -> bool:
    """Whether the layer has arrived; does not wait."""
    try:
        batch.wait(layer, timeout_s=0)
    except (ssdgram.ReadTimeoutError, ssdgram.StoreBusyError):
        return False
    return True


# ---------------------------------------------------------------- cold


def cold(material: Material, tokens: np.ndarray, *, positions: int = 2048, rounds: int = 5, dram: str = "1GiB") -> Result:
    """Rows of never seen text: prefetch and packed rows of both layers, against a gather from a memory map of the checkpoint.

    Before each, the page cache gives up every file of checkpoint and store (checked), and the store is opened anew.
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
                      "resident_after_dropping": max(left), "ok": ratio >= COLD_BAR}
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
    share = {name: (marks["end"] - marks[name]) / budget for name in ("imported", "started")}
    result = {**found, "growth_since": share, "longest": longest, "ok": max(share.values()) <= GROWTH_BAR}
    click.echo(f"  dram {dram}: {share['imported']:.4f} of it since the import, {share['started']:.4f} since open and first "
               f"batch ({found['slots']:,} slots, {found['slots_free']:,} free; {found['filling_batches']} batches of {longest} "
               f"tokens, then {batches} of {STEP}): {bar(f'{GROWTH_BAR}', result['ok'])}")
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


# ---------------------------------------------------------------- the command

NAMES = ("plan", "gil", "priority", "cold", "rss", "open")


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--folder", type=click.Path(path_type=Path), default=Path("bench-serve"), show_default=True,
              help="Where checkpoint and stores are made: on the drive that is to be measured.")
@click.option("--rows", default=350_000, show_default=True, help="Rows of a column: 350,000 make a checkpoint of 4.1 GiB.")
@click.option("--small-rows", default=20_000, show_default=True, help="Those of the small store (memory, opening).")
@click.option("--dram", default="1GiB", show_default=True)
@click.option("--rounds", type=int, help="Instead of each measurement's own number.")
@click.option("--keep", is_flag=True, help="Leave checkpoint and stores for the next run.")
@click.option("--save/--no-save", default=True, help="Write bench/results/serve-NAME.json.")
def main(names: tuple[str, ...], folder: Path, rows: int, small_rows: int, dram: str, rounds: int | None, keep: bool,
         save: bool) -> None:
    """Make, run, print, write, delete."""
    chosen = names or NAMES
    small = make(folder, small_rows)
    large = make(folder, rows) if set(chosen) - {"rss"} else small
    traces = {kind: text(folder, kind, small.tokenizer, 60_000) for kind in ("code", "prose")}
    tokens = np.concatenate([traces["prose"].tokens, traces["code"].tokens])
    times: dict[str, int] = {} if rounds is None else {"rounds": rounds}
    measurements: dict[str, Callable[[], Result]] = {
        "plan": lambda: plan(large.out, tokens, dram=dram, **times),
        "gil": lambda: gil(large.out, tokens, dram=dram, **times),
        "priority": lambda: priority(large.out, tokens, dram=dram, **times),
        "cold": lambda: cold(large, np.concatenate(_in_turn(tokens)), dram=dram, **times),
        "rss": lambda: rss(small.out, dram=dram),
        "open": lambda: opening({f"{count:,} rows a column": store.out for count, store in ((small_rows, small), (rows, large))},
                                dram=dram, **times),
    }
    for kind, trace in traces.items():
        click.echo(f"text: {kind}, {len(trace.tokens):,} tokens of {trace.about['documents']}, sha256 "
                   f"{trace.about['text_sha256'][:16]}")
    try:
        for name in chosen:
            begin = os.getloadavg()
            click.echo(f"{name} (load {begin[0]:.2f} on {len(os.sched_getaffinity(0))} processors)")
            result = measurements[name]()
            if save:
                about = {kind: {key: trace.about[key] for key in ("text_sha256", "tokenizer_sha256", "documents")}
                         for kind, trace in traces.items()}
                load = [round(begin[0], 2), round(os.getloadavg()[0], 2)]
                payload = {"facts": facts(folder), "load": load, "rows": rows, "dram": dram, "text": about, **result}
                click.echo(f"  written: {write_results(f'serve-{name}', payload).name}")
    finally:
        if not keep:
            discard(*{small, large})


def _in_turn(tokens: np.ndarray) -> list[np.ndarray]:
    """The 2048-token pieces of text with prose and code in turn (prose is the first half of `tokens`)."""
    half = len(tokens) // 2
    prose, code = chunks(tokens[:half], 2048), chunks(tokens[half:], 2048)
    return [piece for pair in zip(prose, code) for piece in pair]


if __name__ == "__main__":
    main()
