"""GPUDirect Storage on this machine: what cuFile can do here, its queue beside uring, a damaged page, the hot set's load.

    python -m ssdgram.bench.gds --dir FOLDER_ON_THE_DRIVE [--rows 60000] [--device cuda|cpu] [--out FOLDER]

    probe     a process of its own asks cuFile: version, properties, and which path its counters prove for a batch of four reads
    serve     fresh random tokens, nearly all their bundles cold (O_DIRECT): page reads/s and the time of one token, both queues in turn
    damaged   a byte of one row flipped on disk: the read that wants it must fail by name, the others must be right
    hot set   the rate at which it loads against a plain sequential O_DIRECT read of the same file, in turn, page cache dropped

Every row of three prompts per queue is compared bit by bit. What this machine does not have is recorded with cuFile's own words,
and everything else goes on; `--device cpu` leaves probe and gds out. Parts with cuFile run in a process that is ended if it hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import ssdgram
from ssdgram import _cufile
from ssdgram.bench.facts import facts, need_cuda, write_results
from ssdgram.bench.material import Material, make
from ssdgram.errors import SSDGramError
from ssdgram.store import Store
from ssdgram.tools.synth import expected_rows

POSITIONS, ROUNDS, SINGLES, FILL = 1024, 5, 40, 1 << 16
PART_LIMIT_S = 280.0
DRAM = "1GiB"
Result = dict[str, Any]


def opened(out: Path, queue: str, device: str, hotset: Path | None = None, dram: str = "") -> Store:
    """The store under one queue; its slab is about as large under either."""
    dram = dram or DRAM
    return ssdgram.open(out, dram=dram, hbm=dram if queue == "gds" else "0", device=device, queue=queue, hotset=hotset)


def drawn(store: Store, random: np.random.Generator, count: int) -> np.ndarray:
    """Random ids of the store's vocabulary: nearly all of their n-grams are new."""
    return random.integers(3, store._vocabulary, count)


def wrong_rows(store: Store, tokens: np.ndarray) -> int:
    """Rows of all layers that are not the made-up ones."""
    ids, wrong = store.geometry.row_ids(tokens, store._token_map), 0
    with store.prefetch(tokens) as batch:
        for index, layer in enumerate(store.layers):
            found = batch.packed(layer).cpu().numpy()
            wrong += int((found != expected_rows(0, layer, ids[:, index], store.geometry)).any(axis=2).sum())
    return wrong


def one_cold(store: Store, tokens: np.ndarray) -> tuple[float, int]:
    """Seconds until every row of the tokens is in its slot, and page reads that took."""
    before, begun = store.stats().reads, time.perf_counter()
    with store.prefetch(tokens) as batch:
        batch.wait(timeout_s=60)
        seconds = time.perf_counter() - begun
    return seconds, store.stats().reads - before


def serve(out: Path, device: str, names: list[str]) -> Result:
    """Reads/s and time of one token of each queue that opens, in turn over fresh tokens; what the others answered."""
    result: Result = {"positions": POSITIONS, "rounds": ROUNDS, "queues": {}}
    with contextlib.ExitStack() as stack:
        stores: dict[str, Store] = {}
        for name in names:
            try:
                stores[name] = stack.enter_context(opened(out, name, device))
            except SSDGramError as error:
                result["queues"][name] = {"error": f"{type(error).__name__}: {error}"}
                click.echo(f"  queue {name}: {error}")
        random = np.random.default_rng(11)
        rates: dict[str, list[float]] = {name: [] for name in stores}
        singles: dict[str, list[float]] = {name: [] for name in stores}
        wrong = {name: sum(wrong_rows(store, drawn(store, random, 200)) for _ in range(3)) for name, store in stores.items()}
        for number in range(ROUNDS):
            for name in (list(stores) if number % 2 else list(stores)[::-1]):
                seconds, reads = one_cold(stores[name], drawn(stores[name], random, POSITIONS))
                rates[name].append(reads / seconds)
        for _ in range(SINGLES):
            for name, store in stores.items():
                singles[name].append(one_cold(store, drawn(store, random, 1))[0] * 1e6)
        for name, store in stores.items():
            stats = store.stats()
            found = {"reads_per_s": statistics.median(rates[name]), "reads_per_s_all": rates[name],
                     "token_us": statistics.median(singles[name]), "wrong_rows": wrong[name], "reads": stats.reads,
                     "retries": stats.retries, "notices": list(stats.notices)}
            if name == "gds":
                found |= {"mode": stats.gds_mode, "counters": stats.gds_counters}
            result["queues"][name] = found
            click.echo(f"  queue {name}: {found['reads_per_s']:,.0f} page reads/s, one cold token {found['token_us']:.0f} us, wrong rows "
                       f"{wrong[name]}" + (f", mode {stats.gds_mode}, counters {stats.gds_counters}" if name == "gds" else ""))
    return result


@contextlib.contextmanager
def damaged(path: Path, at: int) -> Iterator[None]:
    """One bit of a file flipped, for as long as this lasts."""

    def flip() -> None:
        with open(path, "r+b", buffering=0) as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())

    flip()
    try:
        yield
    finally:
        flip()


def damage(out: Path, device: str, names: list[str]) -> Result:
    """What each queue says of a damaged row, and that it serves the others."""
    result: Result = {}
    for name in names:
        try:
            store = opened(out, name, device)
        except SSDGramError as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        with store:
            tokens, geometry, manifest = drawn(store, np.random.default_rng(12), 5), store.geometry, store.manifest
            row = int(geometry.row_ids(tokens, store._token_map)[2, 0, 0] - geometry.offset_array[0, 0])
            page, place = divmod(row, manifest.rows_per_page)
            with damaged(Path(store._paths[0]), page * 4096 + place * manifest.row_bytes):
                said = ""
                try:
                    with store.prefetch(tokens) as batch:
                        batch.wait(store.layers[0])
                except ssdgram.RowCheckError as error:
                    said = str(error)
            caught = f"page {page}" in said and "wrong checksum" in said
            result[name] = {"caught": caught, "said": said.replace(str(out), "STORE"), "wrong_rows_after": wrong_rows(store, tokens)}
            click.echo(f"  queue {name}: a damaged row was {'caught' if caught else 'NOT CAUGHT'}; rows wrong after it was repaired: "
                       f"{result[name]['wrong_rows_after']}")
    return result


# ---------------------------------------------------------------- hot set


def sequential(path: Path) -> float:
    """Seconds of a plain O_DIRECT read of the whole file, 4 MiB at a time, four in flight."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    part, size = 4 << 20, path.stat().st_size
    buffers = [mmap.mmap(-1, part) for _ in range(8)]
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        begun = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            read = sum(pool.map(lambda k: os.preadv(descriptor, [buffers[k % 8]], k * part), range(-(-size // part))))
        seconds = time.perf_counter() - begun
    finally:
        os.close(descriptor)
    if read != size:
        raise OSError(f"read {read} of {size} bytes")
    return seconds


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def hot_set(out: Path, folder: Path, device: str, names: list[str], dram: str) -> Result:
    """Load rate of a hot set under each queue against a sequential read, in turn; medians, and wrong rows after a load."""
    path = folder / "hot"
    path.unlink(missing_ok=True)
    with opened(out, names[-1], device, path, dram) as store:
        tokens = drawn(store, np.random.default_rng(13), min(512, store.capacity // 12))
        for part in np.array_split(drawn(store, np.random.default_rng(14), FILL), 16):
            if store.stats().slots_free < store.stats().slots // 50:
                break
            with store.prefetch(part) as batch:
                batch.wait(timeout_s=120)
        with store.prefetch(tokens) as batch:
            batch.wait()
    size, result = path.stat().st_size, Result()
    copy = folder / "hot-read"
    shutil.copyfile(path, copy)                              # a store writes its hot set anew when it closes
    loads: dict[str, list[float]] = {name: [] for name in names}
    reads: list[float] = []
    for number in range(ROUNDS):
        drop(copy)
        reads.append(sequential(copy))
        for name in (names if number % 2 else names[::-1]):
            shutil.copyfile(copy, path)
            drop(path)
            try:
                with opened(out, name, device, path, dram) as store:
                    loads[name].append(store.hotset_load_s)
                    found = {"bundles": store.hot_bundles, "wrong_rows": wrong_rows(store, tokens[:200]), "notices": list(store.notices)}
            except SSDGramError as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            result[name] = found
    copy.unlink()
    plain = statistics.median(reads)
    for name, seconds in loads.items():
        if seconds:
            result[name] |= {"load_s": statistics.median(seconds), "load_s_all": seconds,
                             "share_of_sequential_rate": plain / statistics.median(seconds)}
            click.echo(f"  queue {name}: {size / 2**20:.0f} MiB, {result[name]['bundles']} bundles in {result[name]['load_s']:.3f} s, "
                       f"{result[name]['share_of_sequential_rate']:.2f} of the sequential rate ({size / plain / 1e9:.2f} GB/s); wrong rows "
                       f"{result[name].get('wrong_rows')}")
    return {"bytes": size, "sequential_s": plain, "sequential_s_all": reads, "queues": result}


# ---------------------------------------------------------------- parts, each in a process of its own


def run_part(part: str, out: Path, folder: Path, device: str, names: list[str], dram: str) -> Result:
    """A part in a process that is ended after its time: cuFile calls may hang, and a machine that is lent must not."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".json") as file:
        command = [sys.executable, "-m", "ssdgram.bench.gds", "--dir", str(folder), "--part", part, "--store", str(out), "--device", device,
                   "--dram", dram, "--result", file.name, *(f"--queue={name}" for name in names)]
        try:
            done = subprocess.run(command, timeout=PART_LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {PART_LIMIT_S:g} s"}
        text = Path(file.name).read_text()
    return dict(json.loads(text)) if text else {"error": f"ended with status {done.returncode}"}


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="a folder on the measured drive")
@click.option("--rows", default=60_000, help="rows of a column, about (60000: a store of 0.8 GiB and its checkpoint)")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--dram", default="256MiB", help="budget of the slab for the hot set")
@click.option("--out", "copy_to", type=click.Path(path_type=Path), default=None, help="a folder that gets a copy of the results")
@click.option("--part", hidden=True, default=None)
@click.option("--store", "store_folder", hidden=True, type=click.Path(path_type=Path), default=None)
@click.option("--result", hidden=True, type=click.Path(path_type=Path), default=None)
@click.option("--queue", "names", hidden=True, multiple=True)
def main(folder: Path, rows: int, device: str, dram: str, copy_to: Path | None, part: str | None, store_folder: Path | None,
         result: Path | None, names: tuple[str, ...]) -> None:
    """Measure GPUDirect Storage beside io_uring, and the hot set's load, on the drive of FOLDER."""
    if part is not None and store_folder is not None and result is not None:
        chosen = list(names)
        found = (serve(store_folder, device, chosen) if part == "serve" else damage(store_folder, device, chosen) if part == "damaged"
                 else hot_set(store_folder, folder, device, chosen, dram))
        result.write_text(json.dumps(found))
        os._exit(0)                                          # whatever hangs in a driver stays behind
    if device == "cuda":
        need_cuda()
    folder.mkdir(parents=True, exist_ok=True)
    payload: Result = {"facts": facts(folder), "device": device, "rows": rows}
    queues = ["gds", "uring"] if device == "cuda" else ["uring"]
    if device == "cuda":
        import torch

        payload["facts"] |= {"gpu": torch.cuda.get_device_name()}
        payload["probe"] = _cufile.probe_in_child(folder)
        click.echo(f"probe: {json.dumps(payload['probe'])}")
    out = make(Material(folder, rows)).out
    for title in ("serve", "damaged", "hotset"):
        click.echo(f"{title}:")
        payload[title] = run_part(title, out, folder, device, queues, dram)
        if "error" in payload[title]:
            click.echo(f"  {payload[title]['error']}")
            if "gds" in queues:                              # once more without what may have hung
                payload[title] |= {"without_gds": run_part(title, out, folder, device, ["uring"], dram)}
    path = write_results("gds" if device == "cuda" else "gds-cpu", payload)
    if copy_to is not None:
        shutil.copy(path, copy_to / path.name)


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
