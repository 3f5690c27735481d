"""Conversion against a direct-I/O copy of the same bytes on the same disk, in turn; and its peak memory.

    python -m ssdgram.bench.convert --dir FOLDER_ON_THE_DRIVE [--gib 4] [--rounds 3]

The copy: the files that hold the tables, 1 MiB blocks, O_DIRECT in and out, 8 blocks in flight (8 threads that each read a
block and write it, so reads and writes overlap), space reserved beforehand as the converter does, fsync of every file. The
conversion: `ssdgram.convert` in a process of its own, from call to return, and the whole process beside it. Both from a cold
page cache (they do not use it). Figures are medians of the rounds. Bars: ratio at most 1.25, peak RSS at most 600 MiB.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from ssdgram.bench.facts import facts, write_results
from ssdgram.layout.direct import DirectFile, aligned_buffer
from ssdgram.tools.synth import synthesize

BLOCK, IN_FLIGHT = 1 << 20, 8
BAR_RATIO, BAR_RSS = 1.25, 600 << 20
ROWS_GIB = 48 * 264 / 2**30                                  # of one row in each of the 48 columns

CONVERT = """
import sys, time
from ssdgram.layout.convert import convert
start = time.monotonic()
convert(sys.argv[1], sys.argv[2], jobs=int(sys.argv[3]) or None)
seconds = time.monotonic() - start
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
usage = __import__("os").times()
print(seconds, peak, usage.user + usage.system)
"""


def copy(source: Path, target: Path) -> None:
    """Copy one file by direct I/O, IN_FLIGHT blocks at a time, and make it durable."""
    size = source.stat().st_size
    whole = -(-size // 4096) * 4096
    read, write = DirectFile(source), DirectFile(target, writable=True, size=whole)

    def run(first: int) -> None:
        buffer = aligned_buffer(BLOCK)
        for offset in range(first * BLOCK, size, IN_FLIGHT * BLOCK):
            length = min(BLOCK, whole - offset)
            read.read(buffer[:length], offset, min(length, size - offset))
            write.write(buffer[:length], offset)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(run, range(IN_FLIGHT)))
    write.sync()
    read.close()
    write.close()


def time_copy(ckpt: Path, folder: Path) -> float:
    """Seconds of copying the shards that hold tables."""
    shards = [path for path in sorted(ckpt.glob("*.safetensors")) if path.stat().st_size > BLOCK]
    folder.mkdir()
    start = time.monotonic()
    for shard in shards:
        copy(shard, folder / shard.name)
    seconds = time.monotonic() - start
    shutil.rmtree(folder)
    return seconds


def time_convert(ckpt: Path, out: Path, jobs: int) -> dict[str, float]:
    """Seconds of the call and of the whole process, peak RSS, CPU seconds."""
    start = time.monotonic()
    command = [sys.executable, "-c", CONVERT, str(ckpt), str(out), str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    process = time.monotonic() - start
    seconds, peak, cpu = map(float, done.stdout.split())
    shutil.rmtree(out)
    return {"seconds": seconds, "process_seconds": process, "peak_rss": peak, "cpu_seconds": cpu}


def settle() -> None:
    """What the round before left to write is written, and what it removed is discarded, before the next is timed."""
    os.sync()
    time.sleep(1)


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="A folder on the drive.")
@click.option("--gib", type=float, default=4.0, show_default=True, help="Size of the made-up tables.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--jobs", type=int, default=0, help="Columns at once; default: the CPUs.")
@click.option("--save/--no-save", default=True, help="Write bench/results/convert.json.")
def main(folder: Path, gib: float, rounds: int, jobs: int, save: bool) -> None:
    """Conversion against a direct-I/O copy of the same bytes on the same disk, in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="ssdgram-bench-convert-") as name:
        scratch = Path(name)
        ckpt = synthesize(scratch / "ckpt", int(gib / ROWS_GIB))
        time_convert(synthesize(scratch / "small", 1000), scratch / "warm", jobs)       # compiled code is cached from here on
        copied = sum(path.stat().st_size for path in ckpt.glob("*.safetensors"))
        copies: list[float] = []
        converted: list[dict[str, float]] = []
        for number in range(rounds):
            for what in ("copy", "convert") if number % 2 == 0 else ("convert", "copy"):
                settle()
                if what == "copy":
                    copies.append(time_copy(ckpt, scratch / "copy"))
                else:
                    converted.append(time_convert(ckpt, scratch / "out", jobs))
            click.echo(f"round {number}: copy {copies[-1]:.2f} s, convert {converted[-1]['seconds']:.2f} s "
                       f"({converted[-1]['cpu_seconds']:.2f} s of CPU)")
        result: dict[str, Any] = {"facts": facts(folder), "bytes": copied, "copy_seconds": copies, "convert": converted}
        copy_s = statistics.median(copies)
        convert_s = statistics.median(run["seconds"] for run in converted)
        process_s = statistics.median(run["process_seconds"] for run in converted)
        peak = max(run["peak_rss"] for run in converted)
        result |= {"ratio": convert_s / copy_s, "process_ratio": process_s / copy_s, "peak_rss": peak,
                   "within_bars": convert_s / copy_s <= BAR_RATIO and peak <= BAR_RSS}
    click.echo(f"{copied / 2**30:.2f} GiB: copy {copy_s:.2f} s ({copied / copy_s / 1e6:.0f} MB/s), convert {convert_s:.2f} s")
    click.echo(f"ratio {result['ratio']:.3f} (bar {BAR_RATIO}; whole process {result['process_ratio']:.3f}), "
               f"peak RSS {peak / 2**20:.0f} MiB (bar {BAR_RSS >> 20})")
    if save:
        click.echo(f"written: {write_results('convert', result)}")
    else:
        click.echo(json.dumps(result["facts"]))


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
