"""The GPU's side, in one run: gathers against the peer's lookup, host tokens to rows against it, projection, gate, launch cost, what a
matmul beside it notices.

    python -m ssdgram.bench.gpu [--tune] [--sections launch,project,gate,beside,gather,steps] [--table-gib 40] [--out FOLDER]

Needs an NVIDIA GPU and, for the peer, its file in .peer/ (bench/peers/vllm_lookup.py says how to get it); about six minutes.

bench/gpu_timing.py says how a figure is taken; the launch itself is timed apart, on the host. The peer is vLLM's kernel over one
table of the given size in pinned memory (small pages, huge pages; ids as they come, and sorted: the sort is part of its time,
the kernel alone is shown beside it) and in HBM. With --tune the cuts that the kernels offer are tried first and the best are
used; without, those that the package ships. Every section adds to bench/results/gpu.json when it is done.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from triton.runtime.errors import TritonError

from ssdgram.bench import gpu_kernels
from ssdgram.bench.facts import facts, need_cuda, write_results
from ssdgram.bench.gpu_timing import GIB, LAUNCHES, HostMemory, best, graph_us
from ssdgram.bench.peers.vllm_lookup import Lookup, load
from ssdgram.kernels.gather import SLOTS, TILE_CHOICES, Bundles, Gather, Tile, tile_for
from ssdgram.kernels.launch import Launch

TOKENS = (1, 16, 64, 256, 1024, 8192)
SHAPES = {"whole": (8, 8, 8), "whole, lines": (8, 8, 8), "tp2": (8, 4), "tp8": (3,)}
BOUNDARY = {"whole, lines": 128}                             # what slots are rounded up to: 64, or the lines that PCIe carries
COLUMNS = {"whole": 24, "tp2": 12, "tp8": 3}
SUBSET_TILES = (Tile(8, 4), Tile(8, 4, 264), Tile(16, 4))
PINNED = ("pinned, huge pages", "pinned, small pages")
AS_LAUNCHED = "as launched"
STORE_ROWS, STORE_DRAM = 60_000, "4GiB"                     # of the store that steps are taken from: all that is asked for fits


def bundles_of(name: str) -> Bundles:
    heads = SHAPES[name]
    boundary = BOUNDARY.get(name, 64)
    return Bundles(heads, stride=-(-max(heads) * 264 // boundary) * boundary)


# ---------------------------------------------------------------- ours


def gather_time(name: str, memory: torch.Tensor, tokens: int, tile: Tile | None) -> float:
    """us of a gather of T tokens from random slots of `memory`; slots on the device."""
    bundles = bundles_of(name)
    gather, base = Gather(bundles), memory.data_ptr()
    slots = torch.empty(LAUNCHES, tokens, bundles.orders, dtype=torch.int32, device="cuda")
    out = torch.empty(tokens, bundles.columns, 256, dtype=torch.bfloat16, device="cuda")
    return graph_us(lambda number: gather(slots[number], out, dram=base, tile=tile),
                    lambda: slots.random_(0, memory.numel() // bundles.stride))


def as_launched_time(memory: torch.Tensor, tokens: int, tile: Tile | None) -> float:
    """us of a gather as the store launches it: slots in pinned memory, the word stored behind it."""
    bundles = bundles_of("whole")
    gather, base = Gather(bundles), memory.data_ptr()
    slots = torch.empty(LAUNCHES, tokens, 3, dtype=torch.int32).pin_memory()
    out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device="cuda")
    counter = torch.zeros(LAUNCHES, 1, dtype=torch.int32, device="cuda")
    done = torch.zeros(LAUNCHES, 1, dtype=torch.int64).pin_memory()

    def launch(number: int) -> None:
        gather(slots[number], out, dram=base, counter=counter[number], done=done[number], ticket=number + 1, tile=tile)

    time_us = graph_us(launch, lambda: slots.random_(0, memory.numel() // bundles.stride))
    if done.flatten().tolist() != list(range(1, LAUNCHES + 1)):
        raise RuntimeError(f"the words hold {done.flatten().tolist()}, not their tickets")
    return time_us


def ours(dram: torch.Tensor, hbm: torch.Tensor, tune: bool) -> dict[str, Any]:
    """Gather times in us as {line: [by T]}, the tiles used, and what tuning tried."""
    us: dict[str, list[float]] = {}
    tiles: dict[str, list[str]] = {}
    tuning: dict[str, dict[str, float]] = {}
    for name in SHAPES:
        for tier, memory in (("dram", dram), ("hbm", hbm)):
            line = f"{name} {tier}"
            us[line], tiles[line] = [], []
            for tokens in TOKENS:
                tile: Tile | None = None
                if tune:
                    choices = TILE_CHOICES if name == "whole" else SUBSET_TILES
                    tile, tuning[f"{line} {tokens}"] = best(choices, functools.partial(gather_time, name, memory, tokens))
                us[line].append(gather_time(name, memory, tokens, tile))
                tiles[line].append(str(tile or tile_for(tokens)))
                if line == "whole dram":
                    us.setdefault(AS_LAUNCHED, []).append(as_launched_time(memory, tokens, tile))
    return {"us": us, "tiles": tiles, "tuning": tuning}


# ---------------------------------------------------------------- the peer


def lookup_time(lookup: Lookup, tokens: int, how: str, columns: int = 24) -> float:
    """us of the peer for T tokens. how: "" ids as they come, "sorted" (the sort included), "presorted" (it is not)."""
    ids = torch.empty(LAUNCHES, tokens, 24, dtype=torch.int32, device="cuda")
    out = torch.empty(tokens, columns, 256, dtype=torch.bfloat16, device="cuda")
    order = torch.empty(LAUNCHES, tokens * 24, dtype=torch.int32, device="cuda")
    place = torch.empty_like(order)

    def refresh() -> None:
        ids.random_(0, lookup.rows)
        if how == "presorted":
            found = ids.flatten(1).sort()
            order.copy_(found.values)
            place.copy_(found.indices)

    def launch(number: int) -> None:
        if how == "":
            lookup(ids[number], out, columns=columns)
        elif how == "sorted":
            lookup.sorted(ids[number], out)
        else:
            lookup.presorted(order[number], place[number], out)

    return graph_us(launch, refresh)


def lookup_lines(lookup: Lookup, kind: str, hows: Sequence[str]) -> dict[str, list[float]]:
    """{line: [us by T]} of one table."""
    lines = {f"{kind} {how}".strip(): [lookup_time(lookup, tokens, how) for tokens in TOKENS] for how in hows}
    for name in ("tp2", "tp8"):
        lines[f"{kind} {name}"] = [lookup_time(lookup, tokens, "", COLUMNS[name]) for tokens in TOKENS]
    return lines


def peers(table_gib: float) -> dict[str, Any]:
    """All of the peer's times, one table after the other."""
    module = load()
    if module is None:
        print("the peer's file is not there (bench/peers/vllm_lookup.py says how to get it): its lines are left out")
        return {}
    rows = int(table_gib * GIB) // 264
    table = torch.empty(rows * 264, dtype=torch.uint8, device="cuda").random_(0, 127)
    results: dict[str, Any] = {"table_gib": table_gib}
    results["us"] = lookup_lines(lookup_over(module, table, rows), "hbm", ("",))
    del table
    torch.cuda.empty_cache()
    for kind in PINNED:
        begun = time.monotonic()
        memory = HostMemory(rows * 264, huge=kind == PINNED[0])
        results[kind] = {"huge_share": memory.huge_share, "setup_s": round(time.monotonic() - begun, 1)}
        print(f"{kind}: {memory.size / GIB:.0f} GiB, {memory.huge_share:.0%} huge, {results[kind]['setup_s']} s", flush=True)
        results["us"] |= lookup_lines(lookup_over(module, memory.tensor, rows), kind, ("", "sorted", "presorted"))
        memory.close()
    return results


def lookup_over(module: Any, table: torch.Tensor, rows: int) -> Lookup:
    return Lookup(module, table[:rows * 256].view(rows, 256), table[rows * 256:rows * 264].view(rows, 8))


def at_best(theirs: dict[str, list[float]]) -> list[float]:
    """us by T of the peer's pinned lookup: small or huge pages, ids as they come or sorted (the sort included)."""
    return [min(values) for values in zip(*(theirs[kind + how] for kind in PINNED for how in ("", " sorted")))]


def ratios(us: dict[str, list[float]], theirs: dict[str, list[float]]) -> dict[str, list[float]]:
    """The peer's time over ours, by T."""
    unsorted, least = [min(values) for values in zip(*(theirs[kind] for kind in PINNED))], at_best(theirs)
    alone = [min(values) for values in zip(unsorted, *(theirs[f"{kind} presorted"] for kind in PINNED))]

    def over(numerator: list[float], line: str) -> list[float]:
        return [a / b for a, b in zip(numerator, us[line])]

    return {
        "pinned best / dram": over(least, "whole dram"),
        "pinned unsorted / dram": over(unsorted, "whole dram"),
        "pinned best, sort free / dram": over(alone, "whole dram"),
        "pinned best / as launched": over(least, AS_LAUNCHED),
        "hbm / hbm": over(theirs["hbm"], "whole hbm"),
    }


def link_gb_s(memory: torch.Tensor) -> float:
    """GB/s of copying `memory` to the device."""
    staging = torch.empty_like(memory, device="cuda")
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        start.record()
        staging.copy_(memory, non_blocking=True)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return memory.numel() / min(times) / 1e6


def gather_section(tune: bool, table_gib: float, slab_gib: float) -> dict[str, Any]:
    """Gathers of both tiers and all shapes, then the peer's lookups; prints the table."""
    slab = HostMemory(int(slab_gib * GIB), huge=True)
    hbm = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda").random_(0, 127)
    link = link_gb_s(slab.tensor[:GIB // 2])
    results: dict[str, Any] = {"slab_gib": slab_gib, "slab_huge_share": slab.huge_share, "link_gb_s": link}
    print(f"\nhost to device {link:.1f} GB/s; slab {slab_gib} GiB, {slab.huge_share:.0%} in huge pages", flush=True)
    results |= ours(slab.tensor, hbm, tune)
    us = results["us"]
    show("ours, us", us)
    del hbm
    slab.close()
    torch.cuda.empty_cache()
    results["peer"] = peers(table_gib)
    if results["peer"]:
        show("peer, us", results["peer"]["us"])
        results["ratios"] = ratios(us, results["peer"]["us"])
        show("ratios", results["ratios"], 2)
    return results


def show(title: str, lines: dict[str, list[float]], digits: int = 1) -> None:
    print(f"\n{title:34}" + "".join(f"{'T ' + str(tokens):>10}" for tokens in TOKENS))
    for line, values in lines.items():
        print(f"{line:34}" + "".join(f"{value:10.{digits}f}" for value in values), flush=True)


# ---------------------------------------------------------------- end to end


def steps_section(rounds: int = 40) -> dict[str, Any]:
    """Host token ids to all layers' rows, of a store of its own, all bundles warm in DRAM (as bench/gpu_store.py); prints the table."""
    import ssdgram
    from ssdgram.bench.gpu_store import build, end_to_end

    with tempfile.TemporaryDirectory(prefix="ssdgram-") as folder, ssdgram.open(
            build(Path(folder), STORE_ROWS), dram=STORE_DRAM, device="cuda") as store:
        found = end_to_end(store, rounds, TOKENS)
        layers = len(store.layers)
    us = {way: [found[str(tokens)][f"{way}_us"] for tokens in TOKENS] for way in ("staged", "graph", "eager")}
    show(f"host tokens to rows of {layers} layers, us", us)
    return {"layers": layers, "us": us, "wrong_rows": sum(int(found[str(tokens)]["wrong_rows"]) for tokens in TOKENS), "found": found}


def share_of_peer(steps: dict[str, Any], theirs: dict[str, list[float]]) -> dict[str, list[float]]:
    """Time from host tokens to rows, over that of the peer's pinned lookup alone, at its best, for as many layers, by T."""
    return {f"{way} / peer's lookups alone": [ours / (steps["layers"] * peer) for ours, peer in zip(us, at_best(theirs))]
            for way, us in steps["us"].items()}


# ---------------------------------------------------------------- all


def variants() -> list[Launch]:
    """Every variant that --tune tries, in a fixed order."""
    found: list[Launch] = []
    for name in SHAPES:
        gather = Gather(bundles_of(name))
        tiles = TILE_CHOICES if name == "whole" else SUBSET_TILES
        found += [gather.launch("rows", SLOTS, torch.bfloat16, 0, tile) for tile in tiles]
        if name == "whole":
            found += [gather.launch("rows", SLOTS, torch.bfloat16, 1, tile) for tile in tiles]
    return found + gpu_kernels.variants()


def load_variant(number: int) -> str:
    """Compile variant `number` into Triton's cache; what went wrong, if anything did."""
    try:
        variants()[number].load(0)
    except (RuntimeError, TritonError) as error:
        return f"{variants()[number].constants}: {error}"
    return ""


def compile_ahead(workers: int) -> None:
    """Compile all variants with several processes."""
    begun = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(load_variant, range(len(variants())), chunksize=2) if fault]
    print(f"{len(variants())} variants compiled in {time.monotonic() - begun:.0f} s", *faults, sep="\n  ", flush=True)


def gpu_facts() -> dict[str, Any]:
    fields = ("driver_version", "clocks.max.sm", "clocks.max.mem", "pcie.link.gen.current", "pcie.link.width.current")
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=20, check=True)
        told = dict(zip(fields, done.stdout.strip().splitlines()[0].split(", ")))
    except (OSError, subprocess.SubprocessError, IndexError):
        told = {}
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "multiprocessors": properties.multi_processor_count,
            "gpu_memory_gib": round(properties.total_memory / GIB, 1), "cuda": torch.version.cuda, **told}


@click.command(help=__doc__)
@click.option("--tune", is_flag=True, help="Try the cuts that the kernels offer first.")
@click.option("--sections", default="launch,project,gate,beside,gather,steps", show_default=True)
@click.option("--table-gib", default=40.0, show_default=True, help="Size of the peer's table.")
@click.option("--slab-gib", default=8.0, show_default=True, help="Size of the pinned slab of bundles.")
@click.option("--workers", default=min(16, os.cpu_count() or 1), show_default=True, help="Processes that compile ahead; 0: none.")
@click.option("--name", default="gpu", show_default=True, help="The result is bench/results/NAME.json.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder that gets a copy of the result.")
def main(tune: bool, sections: str, table_gib: float, slab_gib: float, workers: int, name: str, out: Path | None) -> None:
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "launch": gpu_kernels.launch_section,
        "project": lambda: gpu_kernels.project_section(tune),
        "gate": lambda: gpu_kernels.gate_section(tune, TOKENS),
        "beside": gpu_kernels.beside_section,
        "gather": lambda: gather_section(tune, table_gib, slab_gib),
        "steps": steps_section,
    }
    wanted = sections.split(",")
    if set(wanted) - set(work):
        raise click.BadParameter(f"sections are {', '.join(work)}; found {sections}", param_hint="--sections")
    need_cuda()
    begun = time.monotonic()
    payload: dict[str, Any] = {"facts": facts() | gpu_facts(), "tuned": tune}
    print(json.dumps(payload["facts"]), flush=True)
    if tune and workers:
        compile_ahead(workers)
    for section in [section for section in work if section in wanted]:
        started = time.monotonic()
        payload[section] = work[section]()
        payload[section]["seconds"] = round(time.monotonic() - started, 1)
        if section == "steps" and payload.get("gather", {}).get("peer"):
            payload[section]["shares"] = share_of_peer(payload[section], payload["gather"]["peer"]["us"])
            show("shares", payload[section]["shares"], 2)
        path = write_results(name, payload)                  # after every section: a run that is cut short keeps what it had
        if out is not None:
            (out / path.name).write_text(path.read_text())
        torch.cuda.empty_cache()
    print("\nseconds: " + ", ".join(f"{section} {payload[section]['seconds']}" for section in work if section in payload)
          + f"; all {time.monotonic() - begun:.0f}")


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
