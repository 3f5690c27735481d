"""Random 4 KiB page reads: the uring queue against fio, same file, same depth, runs in turn; and with a busy interpreter.

    python -m ssdgram.bench.io --file PATH_ON_THE_DRIVE [--gil]

fio: io_uring, direct, registered buffers and files, iodepth_batch_submit = depth / 4; once more without batching, for its
CPU per read. The queue: one reader, page numbers drawn beforehand and pushed to the step ring at once, pages without
targets (nothing to deliver). Each figure is the median of the rounds. CPU per read is that of the thread that submits and
reaps: fio's own account (usr + sys), and the reader thread's clock. On file systems where the kernel gives reads to worker
threads (tmpfs), `all` shows the CPU of the whole process beside it: for both alike, fio's start included.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from ssdgram import _state as s
from ssdgram.bench.facts import facts, write_results
from ssdgram.errors import ConfigError, UnavailableError
from ssdgram.queues import choose
from ssdgram.queues.state import file_records, new_state

PAGE = 4096
BAR_DISK, BAR_MEMORY, BAR_CPU, BAR_GIL = 0.9, 0.7, 1.3, 0.9


def make_file(path: Path, size: int) -> bool:
    """A file of `size` random bytes at `path`, unless something is there already: that is never written to. Whether it was made.

    ConfigError if what is there is no file of at least `size` bytes: it may be anybody's. A file that could not be finished is removed.
    """
    if path.exists():
        if not path.is_file() or path.stat().st_size < size:
            what = f"holds {path.stat().st_size} bytes" if path.is_file() else "is no file"
            raise ConfigError(f"{path} {what}: expected one of at least {size} bytes, which is only read, or a name that is free, where "
                              "one is made; give another --file, or a smaller --gib")
        return False
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder: is the drive mounted? Give a --file in a folder that is there")
    click.echo(f"making {path}, {size / 2**30:g} GiB", err=True)
    random, partial = np.random.default_rng(0), path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            for begin in range(0, size, 1 << 24):
                file.write(random.bytes(min(1 << 24, size - begin)))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:                                    # no room, or Ctrl-C
        partial.unlink(missing_ok=True)
        raise
    return True


def open_direct(path: Path) -> tuple[int, bool]:
    """A descriptor for `path`, direct if its file system can; whether it is."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDONLY), False


def run_fio(path: Path, size: int, depth: int, seconds: float, direct: bool, batched: bool) -> dict[str, float]:
    """One fio run: reads/s and CPU us per read."""
    command = ["fio", "--name=io", f"--filename={path}", f"--size={size}", "--rw=randread", "--bs=4k", f"--direct={int(direct)}",
               "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", f"--iodepth={depth}", "--randrepeat=0",
               "--time_based=1", f"--runtime={seconds}s", "--output-format=json"]
    if batched:
        command.append(f"--iodepth_batch_submit={max(1, depth // 4)}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_us = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e6
    job = json.loads(text[text.index("{"):])["jobs"][0]
    cpu_us = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] * 1000
    reads = max(1, job["read"]["total_ios"])
    return {"reads_s": job["read"]["iops"], "cpu_us": cpu_us / reads, "all_us": all_us / reads}


def run_queue(path: Path, size: int, depth: int, seconds: float, rate: float, busy: bool = False,
              name: str = "uring") -> dict[str, float]:
    """One run of the queue: reads/s and CPU us per read. rate: the most reads/s to prepare for. busy: beside a Python loop."""
    count = int(rate * (seconds + 1))
    fd, _ = open_direct(path)
    buffered_fd = os.open(path, os.O_RDONLY)
    readers, each = (1, depth) if name == "uring" else (depth, 1)
    state = new_state(file_records([(fd, buffered_fd)]), readers=readers, depth=each, pages=count)
    state.pages["number"] = np.random.default_rng().integers(0, size // PAGE, count)
    state.step_ring[:count] = np.arange(count)
    state.control[s.STEP_TAIL] = count
    queue = choose(name, state)
    stop = threading.Event()
    computing = threading.Thread(target=compute, args=(stop,), daemon=True)
    if busy:
        computing.start()
    queue.start()
    time.sleep(0.3)
    begin, first, cpu, everything = time.perf_counter(), completed(state), reader_cpu(), time.process_time()
    time.sleep(seconds)
    reads, elapsed = completed(state) - first, time.perf_counter() - begin
    cpu, everything = reader_cpu() - cpu, time.process_time() - everything
    exhausted = completed(state) == count
    stop.set()
    state.control[s.STOP] = 1
    queue.wake_all()
    if not queue.join(10):
        sys.exit("the readers did not return within 10 s")
    queue.close()
    os.close(fd)
    os.close(buffered_fd)
    if np.any(state.pages["status"][state.done_ring[:min(1000, reads)]] != s.READ_OK):
        sys.exit("a read failed")
    if exhausted:
        return run_queue(path, size, depth, seconds, 2 * rate, busy, name)
    return {"reads_s": reads / elapsed, "cpu_us": cpu / max(1, reads) * 1e6, "all_us": everything / max(1, reads) * 1e6}


def reader_cpu() -> float:
    """CPU seconds that the queue's threads used so far."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threading.enumerate()
               if thread.name.startswith("ssdgram-") and thread.ident is not None)


def completed(state: s.State) -> int:
    """Page reads completed so far, all readers."""
    return sum(int(state.control[s.reader_line(reader) + s.R_READS]) for reader in range(int(state.params[s.P_READERS])))


def compute(stop: threading.Event) -> None:
    """Python code that never lets go of the GIL by itself."""
    value = 0
    while not stop.is_set():
        for k in range(10_000):
            value += k * k


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure, and the range of reads/s."""
    rates = [run["reads_s"] for run in runs]
    figures = {key: statistics.median(run[key] for run in runs) for key in ("reads_s", "cpu_us", "all_us")}
    return {**figures, "least": min(rates), "most": max(rates)}


def shown(figures: dict[str, float]) -> str:
    """The figures of one contender in a line."""
    return f"{figures['reads_s']:,.0f} reads/s, {figures['cpu_us']:.2f} us CPU (all {figures['all_us']:.2f})"


def against_fio(path: Path, size: int, depths: list[int], seconds: float, rounds: int, bar: float) -> list[dict[str, Any]]:
    """The queue and fio in turn, at each depth."""
    fd, direct = open_direct(path)
    os.close(fd)
    results = []
    for depth in depths:
        ours, batched, plain = [], [], []
        rate = 1.5 * run_fio(path, size, depth, 1, direct, True)["reads_s"]
        for _ in range(rounds):
            batched.append(run_fio(path, size, depth, seconds, direct, True))
            ours.append(run_queue(path, size, depth, seconds, rate))
            plain.append(run_fio(path, size, depth, seconds, direct, False))
        result: dict[str, Any] = {"depth": depth, "direct": direct, "uring": middle(ours), "fio": middle(batched),
                                  "fio_unbatched": middle(plain)}
        result["rate_ratio"] = result["uring"]["reads_s"] / result["fio"]["reads_s"]
        result["cpu_ratio"] = result["uring"]["cpu_us"] / result["fio_unbatched"]["cpu_us"]
        result["ok"] = result["rate_ratio"] >= bar and result["cpu_ratio"] <= BAR_CPU
        click.echo(f"depth {depth}{'' if direct else ' (page cache)'}: uring {shown(result['uring'])} | "
                   f"fio {shown(result['fio'])} | fio unbatched {shown(result['fio_unbatched'])} | "
                   f"rate ratio {result['rate_ratio']:.3f} (bar {bar}), CPU ratio {result['cpu_ratio']:.2f} (bar {BAR_CPU}): "
                   f"{'ok' if result['ok'] else 'BELOW'}")
        results.append(result)
    return results


def with_busy_python(path: Path, size: int, depths: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Each queue alone and beside a computing Python thread, in turn."""
    results = []
    for name in ("uring", "threads"):
        for depth in depths if name == "uring" else [16]:
            rate = 1.5 * run_queue(path, size, depth, 0.5, 400_000, name=name)["reads_s"]
            idle, busy = [], []
            for _ in range(rounds):
                idle.append(run_queue(path, size, depth, seconds, rate, name=name))
                busy.append(run_queue(path, size, depth, seconds, rate, True, name=name))
            result: dict[str, Any] = {"queue": name, "depth": depth, "idle": middle(idle), "busy": middle(busy)}
            result["ratio"] = result["busy"]["reads_s"] / result["idle"]["reads_s"]
            result["ok"] = result["ratio"] >= BAR_GIL
            click.echo(f"{name}, depth {depth:4d}: idle {result['idle']['reads_s']:9,.0f} reads/s, beside computing Python "
                       f"{result['busy']['reads_s']:9,.0f}: ratio {result['ratio']:.3f} (bar {BAR_GIL}): "
                       f"{'ok' if result['ok'] else 'BELOW'}")
            results.append(result)
    return results


@click.command(help=__doc__)
@click.option("--file", "path", type=click.Path(path_type=Path), default=Path("bench-io.data"), show_default=True,
              help="File on the drive: one that is there is only read; else one is made, and stays.")
@click.option("--gib", type=click.FloatRange(1e-3), default=4.0, show_default=True, help="Its size, or the part of it that is read.")
@click.option("--memory-file", type=click.Path(path_type=Path), default=Path("/dev/shm/ssdgram-bench-io"), show_default=True,
              help="File in memory; one that was made is removed afterwards.")
@click.option("--memory-gib", type=click.FloatRange(0), default=1.0, show_default=True, help="Its size; 0: leave it out.")
@click.option("--depth", "depths", multiple=True, type=click.IntRange(1, 4096), default=(1, 32, 256), show_default=True)
@click.option("--seconds", type=click.FloatRange(0.05), default=2.0, show_default=True, help="Of one run.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--gil", is_flag=True, help="Instead: each queue alone and beside a computing Python thread.")
@click.option("--save/--no-save", default=True, help="Write bench/results/io.json (io-gil.json).")
def main(path: Path, gib: float, memory_file: Path, memory_gib: float, depths: tuple[int, ...], seconds: float, rounds: int,
         gil: bool, save: bool) -> None:
    """Run, print, write."""
    size, memory_size = int(gib * 2**30), int(memory_gib * 2**30)
    if not gil and shutil.which("fio") is None:
        raise UnavailableError("the program fio is not there: install it (apt install fio), or run with --gil, which needs none")
    if make_file(path, size):
        click.echo(f"made {path} ({gib:g} GiB); it stays for the next run: remove it when you are done")
    payload: dict[str, Any] = {"facts": facts(path.parent), "seconds": seconds, "rounds": rounds, "gib": gib}
    if gil:
        payload["busy_python"] = with_busy_python(path, size, list(depths), seconds, rounds)
    else:
        click.echo("on the drive:")
        payload["drive"] = against_fio(path, size, list(depths), seconds, rounds, BAR_DISK)
        if memory_size > 0:
            click.echo("in memory:")
            own = make_file(memory_file, memory_size)
            try:
                payload["memory"] = against_fio(memory_file, memory_size, list(depths), seconds, rounds, BAR_MEMORY)
            finally:
                if own:
                    memory_file.unlink(missing_ok=True)
    if save:
        click.echo(f"written: {write_results('io-gil' if gil else 'io', payload)}")


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
