"""Everything compiled ahead: tiny stores of each encoding are made, converted, verified, and served by each queue.

Nothing is compiled by name here: what the package really does is done once, so what is compiled is what will be called.
Further steps can be registered (the GPU kernels do). It knows the public API only; the compiled code goes where
ssdgram._compiled keeps it, and a second run finds everything there and takes seconds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import event

import ssdgram
from ssdgram._compiled import CACHE_FOLDER
from ssdgram.errors import UnavailableError
from ssdgram.machine import version_of
from ssdgram.queues.gds import compile_ahead

KINDS: dict[str, dict[str, Any]] = {                         # what synthesize is asked for; row formats differ, so does the hash
    "Engram, fp8 with block scales": {"family": "engram"},
    "PLE, bf16": {"family": "ple", "encoding": "bf16"},
    "PLE, fp8 with one scale": {"family": "ple", "encoding": "fp8_global"},
    "PLE, nvfp4": {"family": "ple", "encoding": "nvfp4"},
}
QUEUES = ("threads", "uring")


@dataclass(frozen=True)
class Step:
    """Something to do once. `run` gets an empty folder; UnavailableError from it: this machine has no use for the step."""

    name: str
    run: Callable[[Path], None]


@dataclass(frozen=True)
class Done:
    """A step that was done: how long it took, how many functions it had to compile; or why it was left out."""

    name: str
    seconds: float
    functions: int
    left_out: str = ""


_registered: list[Step] = []


def register(step: Step) -> None:
    """Add a step to every later `warm_up` of this process (for code that only some machines have a use for)."""
    _registered.append(step)


def steps() -> list[Step]:
    """All steps, in order."""
    return [*(Step(name, partial(_serve_once, wanted)) for name, wanted in KINDS.items()), *_registered]


def warm_up(folder: Path, begin: Callable[[str], None] = lambda name: None) -> Iterator[Done]:
    """Do every step in a folder of its own below `folder`; `begin(name)` is called before each."""
    for number, step in enumerate(steps()):
        place = folder / str(number)
        place.mkdir()
        begin(step.name)
        start, left_out = time.monotonic(), ""
        with event.install_listener("numba:compile", Compilations()) as compilations:
            try:
                step.run(place)
            except UnavailableError as error:
                left_out = str(error)
        yield Done(step.name, time.monotonic() - start, compilations.count, left_out)


def without_hint(record: logging.LogRecord) -> bool:
    """A filter for the package's logger: a long compilation says what it is, and not that `ssdgram warmup` would do it ahead."""
    record.msg = str(record.msg).replace("; `ssdgram warmup` does it ahead", "")
    return True


class Compilations(event.Listener):
    """Counts the functions of this package that this process compiles, a function once for each set of argument types; those that
    it loads from the disk are not compiled. (The folder would not tell: other processes fill it too.)"""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: event.Event) -> None:
        self.count += event.data["dispatcher"].py_func.__module__.startswith("ssdgram.")

    def on_end(self, event: event.Event) -> None:
        pass


def functions() -> int:
    """Number of compiled functions that are kept on disk, a function once for each set of argument types, as `Compilations` counts."""
    return sum(1 for _ in CACHE_FOLDER.glob("*.nbc"))


def size() -> int:
    """Bytes of compiled code that are kept on disk."""
    return sum(path.stat().st_size for path in CACHE_FOLDER.iterdir() if path.is_file())


# ---------------------------------------------------------------- the built-in step


def _serve_once(wanted: dict[str, Any], folder: Path) -> None:
    """One tiny checkpoint made, converted, verified, and served by every queue that this machine has."""
    checkpoint, out = folder / "checkpoint", folder / "store"
    tokenizer = None
    if wanted["family"] == "engram":
        tokenizer = folder / "tokenizer.json"
        _write_tokenizer(tokenizer)
    sizes: dict[str, Any] = {} if tokenizer else {"token_vocab_size": 512, "eos_token_id": 1, "parts": 2}
    ssdgram.synthesize(checkpoint, vocab_size=211, layers=(0, 2), tokenizer=tokenizer, hidden_size=64, **sizes, **wanted)
    ssdgram.convert(checkpoint, out)
    ssdgram.verify(out, against=checkpoint)
    for queue in QUEUES:
        try:
            store = ssdgram.open(out, dram="32MiB", queue=queue)
        except UnavailableError:
            if queue == "uring":                             # refused here: nothing will call it
                continue
            raise
        with store:
            _use(store)


def _attach_once(folder: Path) -> None:
    """A tiny store, served and attached to: what `ssdgram serve` and its clients compile besides."""
    from ssdgram.serve.server import MOST_PATH, Server

    path = folder / "s"
    if len(os.fsencode(path)) > MOST_PATH:
        raise UnavailableError(f"{path} is too long for a socket: set TMPDIR to a shorter folder")
    checkpoint, out = folder / "checkpoint", folder / "store"
    _write_tokenizer(folder / "tokenizer.json")
    ssdgram.synthesize(checkpoint, vocab_size=211, layers=(0, 2), tokenizer=folder / "tokenizer.json", hidden_size=64)
    ssdgram.convert(checkpoint, out)
    with Server(out, path, dram="32MiB", clients=1, rows=2, positions=256) as server, ssdgram.attach(server.path) as store:
        _use(store)


def _use(store: ssdgram.Store) -> None:
    tokens = np.arange(3, 40, dtype=np.int32)
    mask = np.ones(len(tokens), bool)
    store.warm(ssdgram.Sequence(tokens))
    with store.prefetch([ssdgram.Sequence(tokens, participates=mask, lookback=tokens[:3]), ssdgram.Sequence(tokens)]) as batch:
        batch.wait()
        if find_spec("torch"):
            for layer in store.layers:
                batch.rows(layer)
                batch.packed(layer)
    store.stats()


def _write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer.json of 96 tokens: three special ones, the rest single characters."""
    vocabulary = {chr(0x21 + k): 3 + k for k in range(93)}
    special = [{"id": k, "content": f"<{k}>", "special": True} for k in range(3)]
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": special,
                                "decoder": {"type": "ByteLevel"}}))


register(Step("a server and its client", _attach_once))
if version_of("cuda-bindings") is not None:
    register(Step("Queue gds", lambda folder: compile_ahead()))
