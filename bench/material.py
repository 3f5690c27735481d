"""What serving is measured on: made-up stores of a wanted size, real text as tokens, random tokens.

    folder/checkpoint-V, folder/store-V      made once and kept until `discard`; V = rows of a column, about
    folder/text-KIND.trace                    a token trace, with the digest of its text

The geometry is the real one (2 layers, 3 orders, 8 heads, 264-byte rows); only the columns are shorter. It measures nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

import ssdgram
from ssdgram.errors import NoSpaceError
from ssdgram.tools.text import documents
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_build import build

COLUMNS, ROW_BYTES, ROWS_PER_PAGE = 48, 264, 15


@dataclass(frozen=True)
class Material:
    """Where a checkpoint and the store converted from it are, or will be. `rows`: of a column, about."""

    folder: Path
    rows: int

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder."""
        return self.folder / f"checkpoint-{self.rows}"

    @property
    def out(self) -> Path:
        """The store's folder."""
        return self.folder / f"store-{self.rows}"

    @property
    def tokenizer(self) -> Path:
        """Its tokenizer.json."""
        return self.checkpoint / "tokenizer.json"

    @property
    def bytes(self) -> int:
        """Bytes of the checkpoint's files."""
        return sum(path.stat().st_size for path in self.checkpoint.iterdir())


def make(material: Material) -> Material:
    """Synthesise and convert, unless both are there; `material` again. NoSpaceError before anything is written."""
    if not (material.checkpoint / "config.json").exists():
        need = int(1.05 * COLUMNS * material.rows * (ROW_BYTES + 4096 / ROWS_PER_PAGE))
        material.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(material.folder).free
        if free < need:
            raise NoSpaceError(f"{material.folder}: checkpoint and store take {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: "
                               f"give --folder another place, or a smaller --rows")
        click.echo(f"making a checkpoint of {material.rows:,} rows a column")
        ssdgram.synthesize(material.checkpoint, material.rows)
    if not (material.out / "manifest.json").exists():
        click.echo("converting it")
        ssdgram.convert(material.checkpoint, material.out)
    return material


def text(folder: Path, kind: str, tokenizer: Path, limit: int) -> Trace:
    """`limit` tokens of text that machines have on disk ("code" or "prose"), from `folder` if they were made before."""
    path = folder / f"text-{kind}.trace"
    if path.exists():
        trace = Trace.load(path)
        if len(trace.tokens) >= limit:
            return trace
    trace = build(tokenizer, documents(kind), limit)
    trace.save(path)
    return trace


def chunks(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """Consecutive pieces of exactly `length` tokens."""
    return [tokens[start:start + length] for start in range(0, len(tokens) - length + 1, length)]


def random_tokens(random: np.random.Generator, vocab_size: int, count: int) -> np.ndarray:
    """int32 [count]: any ids; practically all their n-grams are new."""
    return random.integers(3, vocab_size, count).astype(np.int32)


def discard(*materials: Material) -> None:
    """Delete checkpoints and stores."""
    for material in materials:
        shutil.rmtree(material.checkpoint, ignore_errors=True)
        shutil.rmtree(material.out, ignore_errors=True)
