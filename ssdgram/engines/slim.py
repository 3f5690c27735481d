"""A checkpoint without its tables: for loaders that read whole files, and for machines that have a store but not the tables.

    SLIM/model-00047-of-00048.safetensors    written anew: the small tensors of the shard, byte for byte, without the table
    SLIM/model.safetensors.index.json        written anew: the weight map without the tables, the new total
    SLIM/everything else                     a hard link, or a symbolic link where that cannot be

It takes out exactly what conversion puts into a store and knows nothing of engines. Strict: a shard that is not as the index says
is refused. Invariant: the folder appears under its name only when it is whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdgram.errors import CheckpointError, ConfigError
from ssdgram.layout.checkpoint import open_checkpoint
from ssdgram.layout.safetensors import INDEX, Tensor, read_header, read_index
from ssdgram.layout.strict_json import parse_object
from ssdgram.layout.writing import writing

COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Slimmed:
    """What `slim` did: shards written anew, shards that held nothing but tables, files linked, bytes of tables left out."""

    written: tuple[str, ...]
    dropped: tuple[str, ...]
    linked: int
    bytes_left_out: int


def slim(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]) -> Slimmed:
    """Make folder `out`: the checkpoint without its n-gram tables. `out` must not exist; the checkpoint is only read.

    Raises ConfigError (the place), CheckpointError (the checkpoint), NoSpaceError or ConversionError (the operating system refused).
    """
    source, target = Path(checkpoint).resolve(), Path(out).absolute()
    tables = {tensor.name: tensor for table in open_checkpoint(source).tables for tensor in (*table.codes, *table.scales)}
    if target.exists():
        raise ConfigError(f"{target} exists: give a folder that is to be made")
    if source == target or source in target.resolve().parents:
        raise ConfigError(f"{target} lies in the checkpoint's folder {source}: give a place outside of it")
    with writing(target, "nothing is left of it"):
        return _slim(source, target, tables)


def _slim(source: Path, target: Path, tables: dict[str, Tensor]) -> Slimmed:
    """The work, in a folder that gets its name at the end."""
    shards = sorted({tensor.file for tensor in tables.values()})
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error       # not a name that nobody gave
    try:
        files = read_index(source)
        written: list[str] = []
        dropped: list[str] = []
        for shard in shards:
            kept = _kept(shard, files, tables)
            if kept:
                _write_shard(shard, kept, work / shard.name)
            (written if kept else dropped).append(shard.name)
        left_out = sum(tensor.size for tensor in tables.values())
        replaced = {*shards}
        if (source / INDEX).exists():
            _write_index(source / INDEX, work / INDEX, tables, left_out)
            replaced.add(source / INDEX)
        linked = _link_rest(source, work, replaced)
        work.chmod(0o755)
        _sync(work)
        work.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Slimmed(tuple(written), tuple(dropped), linked, left_out)


def _kept(shard: Path, files: dict[str, Path], tables: Collection[str]) -> list[Tensor]:
    """The tensors of a shard that stay, in the order of their bytes; CheckpointError if shard and index disagree."""
    header = read_header(shard)
    listed = {name for name, path in files.items() if path == shard}
    for name in sorted(listed ^ set(header)):
        where = "in the index and not in the file" if name in listed else "in the file and not in the index"
        raise CheckpointError(f"{shard}: tensor {name!r} is {where}: the checkpoint is damaged or mixed from two; fetch it again")
    return [tensor for name, tensor in header.items() if name not in tables]


def _write_shard(shard: Path, tensors: list[Tensor], out: Path) -> None:
    """A safetensors file of these tensors of `shard`, their bytes and the file's metadata as they are."""
    with open(shard, "rb") as source, open(out, "xb") as target:
        length = int.from_bytes(source.read(8), "little")
        metadata = parse_object(source.read(length)).get("__metadata__")
        entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        end = 0
        for tensor in tensors:
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.size]}
            end += tensor.size
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            source.seek(tensor.offset)
            left = tensor.size
            while left > 0:
                block = source.read(min(left, COPY_BYTES))
                if not block:
                    raise CheckpointError(f"{shard}: {tensor.name!r} ends {left} bytes early: the file was truncated; fetch it again")
                target.write(block)
                left -= len(block)
        target.flush()
        os.fsync(target.fileno())
    read_header(out)


def _write_index(source: Path, out: Path, tables: Collection[str], left_out: int) -> None:
    index = parse_object(source.read_bytes())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in tables}
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int | float):
        metadata["total_size"] = max(0, metadata["total_size"] - left_out)
    with open(out, "x", encoding="utf-8") as file:
        json.dump(index, file, ensure_ascii=False, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _link_rest(source: Path, work: Path, replaced: Collection[Path]) -> int:
    """Link every other file of the checkpoint, folders below included; how many."""
    count = 0
    for folder, folders, names in os.walk(source):
        here = work / Path(folder).relative_to(source)
        for name in folders:
            (here / name).mkdir()
        for name in names:
            path = Path(folder, name)
            if path in replaced:
                continue
            real = path.resolve(strict=True)                 # a hub's cache holds links to its blobs
            try:
                os.link(real, here / name)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
                os.symlink(real, here / name)
            count += 1
    return count


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
