"""Warm steps: what the planner's work costs, beside computing Python, and during a cold background prefetch.

Each measurement opens a store, prints its medians and its bar, and returns them. The times of the engine are those that the
planner notes (`Batch.timing`); the caller's are printed beside them. A step counts only if it found every bundle ready.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import ssdgram
from ssdgram.bench.io import compute
from ssdgram.bench.material import chunks, random_tokens
from ssdgram.store import Store, Tuning

STEP = 64                                                    # tokens of a decode step
PLAN_BAR_US, GIL_BAR = 1.0, 0.1
DRAWS = 5                                                    # of random tokens, for a set of them that fits into the cache
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
    return int(Path(f"/proc/self/task/{store._threads[0].native_id}/schedstat").read_text().split()[0]) / 1e3


# ---------------------------------------------------------------- plan


def plan(out: Path, tokens: np.ndarray, *, positions: int = 4096, each: int = 2, rounds: int = 20, dram: str = "1GiB") -> Result:
    """The planner's time per token of a warm batch: request taken to last layer published; its processor time with the release.

    tokens: text, at least 2 * positions * each of them. Four kinds of batches, `each` different ones of a kind, in turn.
    """
    random = np.random.default_rng()
    with ssdgram.open(out, dram=dram, tuning=PATIENT) as store:
        for _ in range(DRAWS):
            kinds = _batches_of_four_kinds(random, store._vocabulary, tokens, positions, each)
            if _all_resident(store, kinds):
                break
        samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for k in range(each):
                for kind, batches in kinds.items():
                    before = cpu_us(store)
                    timing, _ = warm_step(store, batches[k])
                    time.sleep(0.003)                        # for the release
                    if is_warm(timing):
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


def _batches_of_four_kinds(random: np.random.Generator, vocabulary: int, tokens: np.ndarray, positions: int,
                           each: int) -> dict[str, list[Any]]:
    """What `plan` asks for: the text is always the same, the random tokens are drawn."""
    def some(count: int) -> np.ndarray:
        return random_tokens(random, vocabulary, count)

    pieces = chunks(tokens[positions * each:], STEP)
    return {"random": [some(positions) for _ in range(each)],
            "random, four times over": [np.tile(some(positions // 4), 4) for _ in range(each)],
            "text, one piece": [*chunks(tokens[:positions * each], positions)],
            "text, 64-token pieces": [[ssdgram.Sequence(piece) for piece in pieces[k::each][:positions // STEP]] for k in range(each)]}


def _all_resident(store: Store, kinds: dict[str, list[Any]]) -> bool:
    """Bring all batches in, twice, and once more to see that none pushes another's bundles out.

    Of 130,000 bundles in 30,000 sets of 16, 17 share a set in one draw of thirteen (a Poisson tail); asked for in a circle, they evict
    each other for ever, and two batches would never be warm. Another draw has other sets.
    """
    found = [[is_warm(warm_step(store, batch)[0]) for batches in kinds.values() for batch in batches] for _ in range(3)]
    return all(found[-1])


# ---------------------------------------------------------------- gil


def paced(count: int, period_s: float) -> Iterator[int]:
    """0 .. count - 1, each `period_s` behind the one before, or later; what is late is not caught up with."""
    due = time.perf_counter()
    for number in range(count):
        due = max(due + period_s, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        yield number


def gil(out: Path, tokens: np.ndarray, *, cold_tokens: int = 2048, steps: int = 300, rounds: int = 5, period_s: float = 0.02,
        dram: str = "1GiB") -> Result:
    """Reads/s of a cold prefetch, and warm steps of 64 tokens, alone and beside a computing Python thread, in turn.

    The steps begin `period_s` apart in both cases. The caller waits for the interpreter some milliseconds a step beside the thread, so
    steps with a mere pause between them would come further apart there, and find colder caches: another thing than the thread's effect.
    """
    random = np.random.default_rng()
    sets = chunks(tokens, STEP)[:64]
    rates: dict[bool, list[float]] = {False: [], True: []}
    engine: dict[bool, list[float]] = {False: [], True: []}
    caller: dict[bool, list[float]] = {False: [], True: []}
    apart: dict[bool, list[float]] = {False: [], True: []}
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
                    begun = 0.0
                    for k in paced(steps, period_s):
                        before, begun = begun, time.perf_counter()
                        timing, caller_us = warm_step(store, sets[k % len(sets)])
                        if not is_warm(timing):
                            cold_steps += 1
                            continue
                        if k:
                            apart[busy].append(1e3 * (begun - before))
                        engine[busy].append(timing["published_us"])
                        caller[busy].append(caller_us)
    result: Result = {"cold_tokens": cold_tokens, "period_s": period_s, "steps_left_out": cold_steps,
                      "apart_ms": {"alone": quantiles(apart[False]), "beside": quantiles(apart[True])},
                      "reads_s": {name: statistics.median(rates[busy]) for name, busy in (("alone", False), ("beside", True))},
                      "engine_us": {"alone": quantiles(engine[False]), "beside": quantiles(engine[True])},
                      "caller_us": {"alone": quantiles(caller[False]), "beside": quantiles(caller[True])}}
    rate, ratio = result["reads_s"], result["reads_s"]["beside"] / result["reads_s"]["alone"]
    oks = [ratio >= 1 - GIL_BAR]
    click.echo(f"  cold prefetch of {cold_tokens} tokens: {rate['alone']:,.0f} reads/s alone, {rate['beside']:,.0f} beside "
               f"computing Python: ratio {ratio:.3f}, {bar(f'{1 - GIL_BAR}', oks[0])}")
    click.echo(f"  warm steps begin {result['apart_ms']['alone']['p50']:.1f} ms apart alone, "
               f"{result['apart_ms']['beside']['p50']:.1f} beside")
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

    read = one_read_us(max(out.rglob("*"), key=lambda path: path.stat().st_size))
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
