"""The store on a GPU, in one run: host tokens to rows of all layers, the hot set's load, memory against the budgets.

    python -m ssdgram.bench.gpu_store [--folder F] [--rows 120000] [--sections memory,hotset,steps] [--tokens 64,256] [--out FOLDER]

Makes a store of its own (made-up rows, the real tokenizer's map; about 3 GiB at the default size) and serves random tokens that
were all served before (warm, in DRAM). All rows of each list's bytes are checked, and one step's of each way. The peer's figures
for the same machine come from bench/gpu.py: run it beside. A time is host wall clock from the call of `prefetch` to the end of
the last gather; medians over --rounds rounds, in which the token lists take turns.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import ssdgram
from ssdgram.bench.facts import facts, need_cuda, write_results
from ssdgram.store import Tuning
from ssdgram.tools.synth import expected_rows

TOKENS = (1, 16, 64, 256, 1024, 8192)
SECTIONS = ("memory", "hotset", "steps")
PROMPTS = 6                                                  # token lists for each T: fresh ids from round to round


def build(folder: Path, rows: int) -> Path:
    """A store of about `rows` rows a column under `folder`, made if it is not there."""
    if not (folder / "out" / "manifest.json").exists():
        ssdgram.synthesize(folder / "ckpt", vocab_size=rows, seed=1)
        ssdgram.convert(folder / "ckpt", folder / "out")
        shutil.rmtree(folder / "ckpt")
    return folder / "out"


def check(store: Any, tokens: np.ndarray) -> int:
    """Rows of all layers that are not the made-up ones (0)."""
    wrong = 0
    ids = store.geometry.row_ids(tokens, store._token_map)
    with store.prefetch(tokens) as batch:
        for index, layer in enumerate(store.layers):
            found = batch.packed(layer).cpu().numpy()
            wrong += int((found != expected_rows(1, layer, ids[:, index], store.geometry)).any(axis=2).sum())
    return wrong


def one_round(store: Any, tokens: np.ndarray, outs: list[torch.Tensor]) -> tuple[float, float, float]:
    """(us from tokens to the last row, us of the `prefetch` call, us of the plan) of one batch."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    batch = store.prefetch(tokens)
    called = time.perf_counter()
    for layer, out in zip(store.layers, outs, strict=True):
        batch.rows(layer, out=out)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    planned = batch.timing["published_us"]
    batch.release()
    return (ended - begun) * 1e6, (called - begun) * 1e6, planned


def captured(store: Any, count: int, outs: list[torch.Tensor]) -> tuple[Any, torch.cuda.CUDAGraph]:
    """A frame for `count` tokens and the graph that gathers all layers through it, side by side: small gathers leave the link idle."""
    frame, graph, side = store.frame(count), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for number, (layer, out) in enumerate(zip(store.layers, outs, strict=True)):
            with torch.cuda.stream(side if number % 2 else main):
                frame.rows(layer, out=out)
        main.wait_stream(side)
    return frame, graph


def framed_round(store: Any, tokens: np.ndarray, frame: Any, graph: torch.cuda.CUDAGraph) -> tuple[float, float, float]:
    """As `one_round`, by a captured graph: what an engine's decode step does."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    batch = store.prefetch(tokens)
    called = time.perf_counter()
    frame.load(batch)
    graph.replay()
    planned = batch.timing["published_us"]
    batch.release()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e6, (called - begun) * 1e6, planned


def staged_round(tokens: np.ndarray, staging: Any) -> tuple[float, float, float]:
    """As `one_round`, by `Store.staging`."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    staging.fill(tokens)
    called = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e6, (called - begun) * 1e6, float("nan")


def end_to_end(store: Any, rounds: int, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Medians by T, and rows that were wrong."""
    generator, results = np.random.default_rng(7), {}
    for count in sizes:
        prompts = [generator.integers(0, 129_000, count) for _ in range(PROMPTS)]
        wrong = sum(check(store, prompt) for prompt in prompts)
        outs = [torch.empty(count, len(store.columns), store.dim, dtype=torch.bfloat16, device="cuda") for _ in store.layers]
        for prompt in prompts:
            one_round(store, prompt, outs)
        frame, graph = captured(store, count, outs)
        before = store.stats().reads
        staging = store.staging(dict(zip(store.layers, outs, strict=True)))
        ways: dict[str, Any] = {"eager": functools.partial(one_round, store, outs=outs),
                                "staged": functools.partial(staged_round, staging=staging),
                                "graph": functools.partial(framed_round, store, frame=frame, graph=graph)}
        taken: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for number in range(rounds):
            for way, run in ways.items():
                taken[way].append(run(tokens=prompts[number % PROMPTS]))
        wrong += check_outs(store, prompts[0], ways["graph"], outs)
        wrong += check_outs(store, prompts[1], ways["staged"], outs)
        results[str(count)] = {"wrong_rows": wrong, "reads": store.stats().reads - before}
        for way, rows in taken.items():
            median, p99 = np.median(rows, axis=0), float(np.quantile([row[0] for row in rows], 0.99))
            results[str(count)] |= {f"{way}_us": round(float(median[0]), 1), f"{way}_p99_us": round(p99, 1),
                                    f"{way}_prefetch_us": round(float(median[1]), 1), f"{way}_plan_us": round(float(median[2]), 1)}
            print(f"T {count:6} {way}: {median[0]:9.1f} us  p99 {p99:9.1f}  prefetch {median[1]:7.1f}  plan {median[2]:8.1f}  "
                  f"wrong rows {wrong}  reads {results[str(count)]['reads']}", flush=True)
    return results


def check_outs(store: Any, tokens: np.ndarray, run: Callable[..., Any], outs: list[torch.Tensor]) -> int:
    """Rows that `run(tokens=...)` brings into `outs` other than those of `Batch.rows` (0)."""
    run(tokens=tokens)
    with store.prefetch(tokens) as batch:
        return sum(int((batch.rows(layer).view(torch.int16) != out.view(torch.int16)).any(dim=2).sum())
                   for layer, out in zip(store.layers, outs, strict=True))


def memory_section(out: Path, dram: int, hbm: int) -> dict[str, float]:
    """GPU and pinned memory that a store takes, as shares of its budgets, after batches went through it and bundles were promoted.

    A small store comes before: what the process takes once and keeps (torch's pool of streams, kernels) is told apart.
    """
    first = _memory_taken(out, 64 << 20, 64 << 20)
    taken = _memory_taken(out, dram, hbm)
    return {"gpu_bytes_over_hbm": taken["gpu"] / hbm, "pinned_bytes_over_dram": taken["pinned"] / dram,
            "kept_by_process": first["gpu_after"], "hbm_hits": taken["hbm_hits"], "dram_hits": taken["dram_hits"]}


def _memory_taken(out: Path, dram: int, hbm: int) -> dict[str, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_before = torch.cuda.mem_get_info()[0]
    with ssdgram.open(out, dram=dram, hbm=hbm, device="cuda") as store:
        generator = np.random.default_rng(8)
        prompts = [generator.integers(0, 129_000, 256) for _ in range(PROMPTS)]
        for number in range(24 * PROMPTS):
            with store.prefetch(prompts[number % PROMPTS]) as batch:
                batch.rows(store.layers[0])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gpu = free_before - torch.cuda.mem_get_info()[0]
        pinned = store._arena.size + store._cuda.pool.bytes  # type: ignore[union-attr]
        hits = store.stats().hits
    torch.cuda.empty_cache()
    return {"gpu": gpu, "pinned": pinned, "gpu_after": free_before - torch.cuda.mem_get_info()[0],
            **{f"{tier}_hits": sum(count for (of, _), count in hits.items() if of == tier) for tier in ("hbm", "dram")}}


def hotset_section(out: Path, folder: Path, dram: int) -> dict[str, float]:
    """Hit rate before and after a restart with a hot set, and the rate at which it loads, against a plain direct read of it."""
    path, generator = folder / "hot", np.random.default_rng(9)
    phrases = generator.integers(0, 129_000, (4000, 32))     # a prompt is made of phrases, some of them far more common than others
    prompts = [phrases[np.minimum(generator.geometric(0.002, 64), 4000) - 1].reshape(-1) for _ in range(30)]

    def rate(store: Any, part: list[np.ndarray]) -> float:
        before = store.stats()
        for prompt in part:
            with store.prefetch(prompt) as batch:
                batch.wait()
        after = store.stats()
        missed = sum(after.misses.values()) - sum(before.misses.values())
        found = sum(after.hits.values()) + sum(after.joins.values()) - sum(before.hits.values()) - sum(before.joins.values())
        return found / (found + missed)

    with ssdgram.open(out, dram=dram, device="cuda", hotset=path) as store:
        rate(store, prompts[:20])
        steady = rate(store, prompts[20:25])
    ssdgram.open(out, dram=dram, device="cuda", hotset=path).close()         # the loader is compiled now
    drop(path)
    with ssdgram.open(out, dram=dram, device="cuda", hotset=path) as store:
        first = rate(store, prompts[25:])
        loaded, bundles = store.hotset_load_s, store.hot_bundles
    drop(path)
    size, begun = path.stat().st_size, time.perf_counter()
    direct_read(path)
    sequential = time.perf_counter() - begun
    return {"steady_hit_rate": steady, "first_hit_rate": first, "bundles": bundles, "bytes": size, "load_s": loaded,
            "sequential_read_s": sequential, "share_of_sequential_rate": sequential / loaded if loaded else 0.0}


def drop(path: Path) -> None:
    """Take the file out of the page cache."""
    import os

    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def direct_read(path: Path) -> None:
    """Read the whole file by 8 MiB, two in flight, past the page cache."""
    import mmap
    import os
    from concurrent.futures import ThreadPoolExecutor

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, 8 << 20) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        steps = range(-(-path.stat().st_size // (8 << 20)))
        list(pool.map(lambda k: os.preadv(descriptor, [buffers[k % 2]], k * (8 << 20)), steps))
    os.close(descriptor)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="where the store is made; a temporary folder if not given")
@click.option("--rows", default=120_000, help="rows a column, about")
@click.option("--dram", default="4GiB")
@click.option("--rounds", default=60)
@click.option("--crew", default=None, type=int, help="threads that help the planner")
@click.option("--sections", default=",".join(SECTIONS), show_default=True)
@click.option("--tokens", default=",".join(map(str, TOKENS)), show_default=True, help="sizes of the steps")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="a folder that gets a copy of the results")
def main(folder: Path | None, rows: int, dram: str, rounds: int, crew: int | None, sections: str, tokens: str, out: Path | None) -> None:
    """Measure the store on a GPU: memory, hot set, end to end."""
    wanted, unknown = sections.split(","), set(sections.split(",")) - set(SECTIONS)
    if unknown:
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SECTIONS)}", param_hint="--sections")
    try:
        sizes = [int(word) for word in tokens.split(",")]
    except ValueError:
        raise click.BadParameter(f"{tokens!r}: expected numbers with commas between them", param_hint="--tokens") from None
    need_cuda()
    own = folder is None
    folder = folder or Path(tempfile.mkdtemp(prefix="ssdgram-"))
    try:
        begun = time.monotonic()
        store_folder = build(folder, rows)
        print(f"store made in {time.monotonic() - begun:.0f} s", flush=True)
        payload: dict[str, Any] = {"facts": facts() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}}
        if "memory" in wanted:                               # the short ones first: a run that is cut short has them
            payload["memory"] = memory_section(store_folder, 1 << 30, 1 << 30)
            print(json.dumps(payload["memory"]), flush=True)
        if "hotset" in wanted:
            payload["hotset"] = hotset_section(store_folder, folder, 256 << 20)
            print(json.dumps(payload["hotset"]), flush=True)
        if "steps" in wanted:
            with ssdgram.open(store_folder, dram=dram, device="cuda", tuning=Tuning(crew=crew)) as store:
                payload["queue"], payload["capacity"] = store.queue, store.capacity
                payload["end_to_end"] = end_to_end(store, rounds, sizes)
        path = write_results("gpu-store", payload)
        if out is not None:
            shutil.copy(path, out / path.name)
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
