"""vLLM's part of bench/engines.py over two ranks: its real Engram modules with TP 2 over NCCL, each rank with and without the plug-in.

One process a rank, and a server (`ssdgram serve`) that both attach to. The stock modules have their own pinned tables, half of the
columns each, and gather rows over NCCL; the plug-in's read whole bundles from the server's slab. Beside the bits of the outputs it
counts: bytes that the server read for two ranks against those for one rank alone with the same steps, and the shared memory that
all processes hold together against the server's one budget. Nothing here waits for ever: ranks are killed when one of them
fails, or when their time is over. Invariant: every process that was started is gone when `measure` returns.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DRAM = "2GiB"
START_S = 120.0                                              # until a server answers
PATIENCE_S = 60.0                                            # for answers of processes that have done their work


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a rank's work is told. `rendezvous`: a file for torch.distributed; `timeout_s`: of a collective."""

    rank: int
    world: int
    rendezvous: str
    checkpoint: Path
    store: Path
    socket: Path
    steps: int
    timeout_s: float


Work = Callable[[Rank], dict[str, Any]]                      # a module's function, so that a new process can import it


class RankError(RuntimeError):
    """A rank, or the server, failed or took too long."""


def shared_memory() -> int:
    """Bytes of this process's shared memory of stores; a page that several processes map is divided among them (PSS)."""
    held, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.partition(" ")[0]
        if "-" in first and not first.endswith(":"):
            counts = "/memfd:ssdgram" in line
        elif counts and first == "Pss:":
            held += int(line.split()[1]) << 10
    return held


def _serve(pipe: Connection, store: Path, socket: Path, dram: str, ranks: int) -> None:
    from ssdgram.serve.server import Server

    with Server(store, socket, dram=dram, clients=ranks, positions=4096) as server:
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                what = pipe.recv()
                stats = server.store.stats()
                pipe.send(shared_memory() if what == "memory" else {"page_reads": stats.reads, "bytes_read": stats.bytes_read,
                                                                    "budget": stats.budgets["dram"][1]})


def _run(pipe: Connection, work: Work, rank: Rank) -> None:
    """A rank's process: the work, then questions. It leaves without torch's own farewell, which would wait for the other rank."""
    faulthandler.dump_traceback_later(rank.timeout_s + 5, exit=True)
    status = 1
    try:
        pipe.send(("done", work(rank)))
        while pipe.poll(PATIENCE_S) and pipe.recv() == "memory":
            pipe.send(("memory", shared_memory()))
        status = 0
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))
    finally:
        os._exit(status)


@contextlib.contextmanager
def _processes() -> Iterator[tuple[Callable[..., Connection], list[Any]]]:
    """start(target, ...) -> a pipe to a new process; all of them are ended at the end."""
    context, started, pipes = multiprocessing.get_context("spawn"), [], []

    def start(target: Any, *arguments: Any) -> Connection:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        started.append(process)
        pipes.append(here)
        return here

    try:
        yield start, started
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join(5)
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    end()
                    process.join(5)


def _answer(pipe: Connection, timeout_s: float, who: str) -> Any:
    try:
        if pipe.poll(timeout_s):
            return pipe.recv()
    except (EOFError, OSError):
        raise RankError(f"{who} has ended") from None
    raise RankError(f"{who} has not answered within {timeout_s:g} s")


def _results(pipes: list[Connection], deadline: float) -> list[dict[str, Any]]:
    """What each rank's work came to; RankError as soon as one failed, ended or the time is over."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        left = [pipe for number, pipe in enumerate(pipes) if number not in found]
        ready = wait(left, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"rank {[number for number in range(len(pipes)) if number not in found]} did not end in time")
        for pipe in ready:
            number = pipes.index(pipe)                       # type: ignore[arg-type]
            kind, result = _answer(pipes[number], 1.0, f"rank {number}")
            if kind == "failed":
                raise RankError(f"rank {number} failed:\n{result}")
            found[number] = result
    return [found[number] for number in range(len(pipes))]


def measure(work: Work, checkpoint: Path, store: Path, *, world: int, steps: int, timeout_s: float,
            dram: str | None = None) -> dict[str, Any]:
    """Run the work on so many ranks, attached to one server: {"ranks": [...], "page_reads", "bytes_read", "held", "budget"}."""
    with tempfile.TemporaryDirectory() as name, _processes() as (start, _):
        folder = Path(name)
        server = start(_serve, store, folder / "socket", dram or DRAM, world)
        _answer(server, START_S, "the server")
        deadline = time.monotonic() + timeout_s
        told: dict[str, Any] = {"world": world, "rendezvous": str(folder / "rendezvous"), "checkpoint": checkpoint, "store": store,
                                "socket": folder / "socket", "steps": steps, "timeout_s": timeout_s}
        ranks = [start(_run, work, Rank(rank=number, **told)) for number in range(world)]
        results = _results(ranks, deadline)
        held = 0
        for pipe in (server, *ranks):
            pipe.send("memory")
        held += _answer(server, PATIENCE_S, "the server")
        held += sum(_answer(pipe, PATIENCE_S, f"rank {number}")[1] for number, pipe in enumerate(ranks))
        server.send("stats")
        counts = _answer(server, PATIENCE_S, "the server")
        return {"ranks": results, **counts, "held": held}


def identity(checkpoint: Path, store: Path, steps: int, timeout_s: float = 200.0, work: Work | None = None) -> dict[str, Any]:
    """One rank alone, then two: outputs that differ, bytes read, memory held. `wrong`: whatever is not as it should be, counted.

    `timeout_s`: of each of the two runs.
    """
    chosen = gpu_work if work is None else work
    one = measure(chosen, checkpoint, store, world=1, steps=steps, timeout_s=timeout_s)
    two = measure(chosen, checkpoint, store, world=2, steps=steps, timeout_s=timeout_s)
    wrong = {"outputs": sum(rank["wrong"] for run in (one, two) for rank in run["ranks"]),
             "bytes_read": int(two["bytes_read"] != one["bytes_read"]),
             "held": sum(run["held"] > run["budget"] for run in (one, two))}
    return {"one_rank": one, "two_ranks": two, "not_as_wanted": wrong, "wrong": sum(wrong.values())}


# ---------------------------------------------------------------- on two GPUs


def gpu_work(rank: Rank) -> dict[str, Any]:
    """The real modules on GPU number `rank`: eager, piecewise, whole graph."""
    import torch

    from ssdgram.bench import engines_vllm
    from ssdgram.engines import opening
    from ssdgram.engines.settings import Settings
    from ssdgram.engines.vllm import plugin

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ["SSDGRAM_STORE"] = str(rank.socket)
    torch.cuda.set_device(rank.rank)
    collective = datetime.timedelta(seconds=min(60.0, rank.timeout_s))
    vllm = engines_vllm.Vllm(rank.checkpoint, rank=rank.rank, world=rank.world, rendezvous=rank.rendezvous, timeout=collective)
    stock, ours = vllm.layers(vllm.stock_class), vllm.layers(vllm.module.Engram)
    engines_vllm.load_weights(vllm, rank.checkpoint, stock, ours)
    columns = [layer.embed_tokens.part_n_hash_cols for layer in stock]
    store = opening.open_store(Settings(store=str(rank.socket)), layers=vllm.layout.layer_ids, device=f"cuda:{rank.rank}", engine="vllm",
                               rank=rank.rank)
    try:
        hasher = vllm.hash_state(store)
        opening.check_hash(store, layers=vllm.layout.layer_ids, multipliers=hasher.multipliers.cpu().numpy(),
                           token_map=hasher.token_map.cpu().numpy())
        image = plugin.IMAGE_ID if store._vocabulary > plugin.IMAGE_ID else -1
        torch.manual_seed(7)
        hidden = torch.randn(engines_vllm.MOST, vllm.model_config.hc_mult, vllm.model_config.hidden_size).to("cuda", torch.bfloat16)
        results: dict[str, Any] = {"columns_of_the_stock_table": columns, "wrong": 0}
        for mode in ("eager", "piecewise", "full"):
            results[mode] = engines_vllm._one_mode(vllm, store, stock, ours, hasher, hidden, mode, rank.steps, image)
            results["wrong"] += results[mode]["wrong_steps"]
        torch.cuda.synchronize()
        return results
    finally:
        store.close()
