"""Several ranks on one server against a store in each: latency of a warm step, bytes read, memory.

    python -m ssdgram bench serve_ranks

A rank is a process of its own. For each number of ranks the same steps are served twice: by `ssdgram serve` with every rank
attached, and by a store that every rank opens itself, rounds of the two in alternation. A step: every rank prefetches the same
64 tokens and waits for all layers, all at the same moment; what is timed is each rank's own prefetch and wait. Warm steps are
made back to back, and again as a model makes them, 10 ms apart: then all that they touch has left the CPU's caches. Memory is
the sum of the processes' proportional share (PSS), so that a page mapped by several counts once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

from ssdgram.bench.facts import facts, write_results
from ssdgram.bench.material import Material, discard, make
from ssdgram.layout.writing import missing, remove_empty

STEP = 64                                                    # tokens
COLD_STEPS, WARM_STEPS, SPACED_STEPS = 32, 200, 100
APART_S = 0.01                                               # between spaced steps


def _memory() -> int:
    """Bytes of this process, shared pages divided among those that map them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _rank(pipe: Connection, barrier: Any, out: Path, path: Path | None, dram: str, steps: np.ndarray) -> None:
    """One rank: attaches, or opens a store of its own; does what it is told until the pipe ends."""
    import ssdgram

    store = ssdgram.open(out, dram=dram) if path is None else ssdgram.attach(path, timeout_s=60)
    try:
        pipe.send("ready")
        for what in _orders(pipe):
            if what == "memory":
                pipe.send(_memory())
            elif what == "reads":
                pipe.send(store.stats().bytes_read)
            else:
                count, apart_s = {"cold": (COLD_STEPS, 0.0), "warm": (WARM_STEPS, 0.0), "spaced": (SPACED_STEPS, APART_S)}[what]
                pipe.send(_steps(store, barrier, steps[np.arange(count) % len(steps)], apart_s))
    finally:
        store.close()


def _steps(store: Any, barrier: Any, steps: np.ndarray, apart_s: float) -> list[float]:
    """Microseconds of each step: prefetch, and the wait for all layers."""
    times = []
    for tokens in steps:
        if apart_s > 0:
            time.sleep(apart_s)
        barrier.wait()
        begin = time.perf_counter()
        with store.prefetch(tokens) as batch:
            batch.wait()
            times.append((time.perf_counter() - begin) * 1e6)
    return times


def _serve(pipe: Connection, out: Path, path: Path, dram: str, ranks: int) -> None:
    from ssdgram.serve.server import Server

    with Server(out, path, dram=dram, clients=ranks) as server:
        pipe.send("ready")
        for what in _orders(pipe):
            pipe.send(_memory() if what == "memory" else server.joined)


def _orders(pipe: Connection) -> Iterator[str]:
    """What the other end of the pipe wants done, until it is closed."""
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


@contextlib.contextmanager
def _processes(out: Path, path: Path | None, dram: str, ranks: int, steps: np.ndarray) -> Iterator[tuple[list[Any], Any]]:
    """The pipes of that many ranks, and of their server (None without one)."""
    context = multiprocessing.get_context("spawn")
    barrier, started, pipes, server = context.Barrier(ranks), [], [], None

    def start(target: Any, *arguments: Any) -> Any:
        here, there = context.Pipe()
        started.append(context.Process(target=target, args=(there, *arguments)))
        started[-1].start()
        there.close()
        return here

    try:
        if path is not None:
            server = start(_serve, out, path, dram, ranks)
            server.recv()
        pipes = [start(_rank, barrier, out, path, dram, steps) for _ in range(ranks)]
        for pipe in pipes:
            pipe.recv()
        yield pipes, server
    finally:
        for pipe in [*pipes, *([server] if server is not None else [])]:
            pipe.close()
        for process in started:
            process.join(30)


def _asked(pipes: list[Any], what: str) -> list[Any]:
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


def measure(out: Path, folder: Path, vocabulary: int, dram: str, ranks: int, rounds: int) -> dict[str, Any]:
    """The figures of both ways for one number of ranks."""
    kept = ("warm_us", "spaced_us", "bytes_read", "memory", "joined")
    found: dict[str, dict[str, Any]] = {way: {name: [] for name in kept} for way in ("served", "opened")}
    for number in range(rounds):
        steps = np.random.default_rng(number).integers(0, vocabulary, (COLD_STEPS, STEP), np.int32)
        for way in ("served", "opened") if number % 2 else ("opened", "served"):
            here = found[way]
            with _processes(out, folder / "s" if way == "served" else None, dram, ranks, steps) as (pipes, server):
                _asked(pipes, "cold")
                here["bytes_read"].append(_asked(pipes, "reads")[0] if server is not None else sum(_asked(pipes, "reads")))
                _asked(pipes, "warm")                        # the second time over: caches, clocks
                here["warm_us"].extend(float(np.median(times)) for times in _asked(pipes, "warm"))
                here["spaced_us"].extend(float(np.median(times)) for times in _asked(pipes, "spaced"))
                here["memory"].append(sum(_asked([*pipes, *([server] if server is not None else [])], "memory")))
                if server is not None:
                    here["joined"].append(_asked([server], "joined")[0])
    return {way: {"warm_step_us": round(float(np.median(here["warm_us"])), 1),
                  "spaced_step_us": round(float(np.median(here["spaced_us"])), 1),
                  "rounds_us": {name: [round(us, 1) for us in here[name]] for name in ("warm_us", "spaced_us")},
                  "bytes_read": int(np.median(here["bytes_read"])),
                  "memory_bytes": int(np.median(here["memory"])), "joined": here["joined"]} for way, here in found.items()}


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("bench-ranks"), show_default=True, help="Where the store is made.")
@click.option("--rows", default=20_000, show_default=True, help="Rows of a column.")
@click.option("--dram", default="256MiB", show_default=True)
@click.option("--ranks", default="1,2", show_default=True, help="Numbers of ranks, with commas.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--keep", is_flag=True, help="Leave checkpoint and store for the next run.")
@click.option("--save/--no-save", default=True, help="Write bench/results/serve-ranks.json.")
def main(folder: Path, rows: int, dram: str, ranks: str, rounds: int, keep: bool, save: bool) -> None:
    """Make, run, print, write, delete."""
    import ssdgram

    material, made, result, load = Material(folder, rows), missing(folder), {}, os.getloadavg()[0]
    try:
        make(material)
        with ssdgram.open(material.out, dram=dram) as store:
            vocabulary = store._vocabulary
        for count in map(int, ranks.split(",")):
            result[str(count)] = measure(material.out, folder, vocabulary, dram, count, rounds)
            for way, figures in result[str(count)].items():
                click.echo(f"{count} ranks, {way}: warm step of {STEP} tokens {figures['warm_step_us']} us, 10 ms apart "
                           f"{figures['spaced_step_us']} us, {figures['bytes_read']:,} bytes read, "
                           f"{figures['memory_bytes'] / 2**20:.0f} MiB of memory")
        if save:
            payload = {"facts": facts(folder), "load": [round(load, 2), round(os.getloadavg()[0], 2)], "rows_a_column": rows, "dram": dram,
                       "rounds": rounds, "ranks": result}
            click.echo(f"written: {write_results('serve-ranks', payload)}")
    finally:
        if not keep:
            discard(material)
        remove_empty(made)


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
