"""manifest.json: what a finished store is. Written last and atomically, so a folder with a manifest is a whole store.

    {"format": 1, "generation": "16 hex digits", "geometry": {...}, "row_bytes": .., "rows_per_page": .., "roots": [..],
     "digest_algorithm": "sha256", "files": [{"path", "layer", "column", "rows", "pages", "size", "sha256"}, ...],
     "token_map": {"size", "compressed_size", "sha256"} | null, "global_scales": [one a layer] | null,
     "source": {"name", "tensors": [{"name", "dtype", "shape"}, ...]}}

Reading trusts nothing: every number that follows from another is computed and compared, paths included, so that what passes
is exactly what `convert` would have written for this geometry. It knows nothing of the page files' contents (`files`, `verify`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdgram.errors import ConfigError, ManifestError
from ssdgram.geometry import Geometry
from ssdgram.layout.bounded import read_bounded
from ssdgram.layout.format import FORMAT, MAX_ROW_BYTES, PAGE_BYTES, pages_of, rows_per_page
from ssdgram.layout.places import column_path
from ssdgram.layout.strict_json import parse_object

MANIFEST = "manifest.json"
JOURNAL = "conversion.journal"                               # finished columns of a conversion that is not yet published
TOKEN_MAP = "token_map.npy"
DIGEST = "sha256"                                            # over all bytes of a column file
MAX_MANIFEST_BYTES = 64 << 20
MAX_STRIPES = 1024
SETTLED_NS = 2_000_000_000                                   # a file that changed later may change again at the same time of its clock
FIELDS = ("format", "generation", "geometry", "row_bytes", "rows_per_page", "roots", "digest_algorithm", "files", "token_map",
          "global_scales", "source")


@dataclass(frozen=True)
class ColumnFile:
    """One file: the rows of one column of one layer. `layer` is the decoder layer; `size` = pages * 4096 bytes."""

    layer: int
    column: int
    rows: int
    pages: int
    size: int
    sha256: str

    @property
    def path(self) -> str:
        """Its path under its root: always computed, never free (design section 4)."""
        return column_path(self.layer, self.column)


@dataclass(frozen=True)
class TokenMapFile:
    """token_map.npy: `size` raw ids, `compressed_size` compressed ones, SHA-256 of the map as little-endian int32."""

    size: int
    compressed_size: int
    sha256: str


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that the store was made from."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """A finished store. `roots`: absolute folders of the stripes, empty if the store's own folder holds the files."""

    geometry: Geometry
    generation: int
    row_bytes: int
    rows_per_page: int
    roots: tuple[str, ...]
    files: tuple[ColumnFile, ...]                            # in file-index order: layer index * columns + column
    token_map: TokenMapFile | None
    global_scales: tuple[float, ...] | None                  # one a layer, for encodings with a scale for the whole table
    source_name: str
    source: tuple[SourceTensor, ...]

    @property
    def stripes(self) -> int:
        """Number of roots that the columns are spread over: column c lies under root c % stripes."""
        return max(1, len(self.roots))

    @property
    def size(self) -> int:
        """Bytes of all column files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """The object that manifest.json holds."""
        token_map = self.token_map
        return {
            "format": FORMAT,
            "generation": f"{self.generation:016x}",
            "geometry": self.geometry.to_json(),
            "row_bytes": self.row_bytes,
            "rows_per_page": self.rows_per_page,
            "roots": list(self.roots),
            "digest_algorithm": DIGEST,
            "files": [{"path": file.path, "layer": file.layer, "column": file.column, "rows": file.rows, "pages": file.pages,
                       "size": file.size, "sha256": file.sha256} for file in self.files],
            "token_map": None if token_map is None else {"size": token_map.size, "compressed_size": token_map.compressed_size,
                                                         "sha256": token_map.sha256},
            "global_scales": None if self.global_scales is None else list(self.global_scales),
            "source": {"name": self.source_name, "tensors": [
                {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in self.source]},
        }

    @classmethod
    def load(cls, out: str | os.PathLike[str]) -> Manifest:
        """The manifest of the store in folder `out`. ManifestError if it is missing, malformed or contradicts itself."""
        path = Path(out, MANIFEST)
        try:
            text = read_bounded(path, MAX_MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            if Path(out, JOURNAL).exists():
                raise ManifestError(f"{path} is missing: conversion not finished; run `ssdgram convert` again with the same "
                                    f"arguments, it goes on where it stopped") from None
            if Path(out, "config.json").exists():
                raise ManifestError(f"{path} is missing: {out} is a checkpoint, not a store; make one with `ssdgram convert {out} OUT`, "
                                    "and give OUT") from None
            raise ManifestError(f"{path} is missing: not a store; make one with `ssdgram convert CKPT {out}`") from None
        except OSError as error:
            raise ManifestError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            return cls.from_json(parse_object(text))
        except (ValueError, ConfigError) as error:
            raise ManifestError(f"{path}: {error}; the file is damaged or none of ours: copy it again, or remove {out} and convert again"
                                ) from error

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`, checking all of it. ManifestError says what was found and what was expected."""
        version = value.get("format")
        if version != FORMAT or type(version) is not int:
            raise ManifestError(f"format {version!r}, this version reads format {FORMAT}: convert again, or use the version that "
                                f"wrote it")
        _fields(value, FIELDS, "manifest")
        geometry = Geometry.from_json(_typed(value["geometry"], dict, "geometry"))
        if not 1 <= geometry.row_bytes <= MAX_ROW_BYTES:
            raise ManifestError(f"geometry: rows of {geometry.row_bytes} bytes do not fit into a page")
        per_page = rows_per_page(geometry.row_bytes)
        _equal(value["row_bytes"], geometry.row_bytes, "row_bytes")
        _equal(value["rows_per_page"], per_page, "rows_per_page")
        _equal(value["digest_algorithm"], DIGEST, "digest_algorithm")
        generation = _hex(value["generation"], 16, "generation")
        return cls(
            geometry=geometry, generation=int(generation, 16), row_bytes=geometry.row_bytes, rows_per_page=per_page,
            roots=_roots(value["roots"]), files=_files(value["files"], geometry),
            token_map=_token_map(value["token_map"], geometry), global_scales=_scales(value["global_scales"], geometry),
            source_name=_typed(_typed(value["source"], dict, "source").get("name"), str, "source.name"),
            source=_source(value["source"]))

    def publish(self, out: str | os.PathLike[str]) -> None:
        """Write manifest.json into `out` atomically and durably: temporary file, fsync, rename, fsync of the folder."""
        text = json.dumps(self.to_json(), indent=1).encode() + b"\n"
        write_durably(Path(out, MANIFEST), text)


def identity(out: str | os.PathLike[str]) -> str:
    """A fingerprint of manifest.json's bytes, "" if there is none: differs after the store was replaced. Costs one small read."""
    try:
        return hashlib.sha256(read_bounded(Path(out, MANIFEST), MAX_MANIFEST_BYTES)).hexdigest()
    except OSError:
        return ""


def stamp(out: str | os.PathLike[str]) -> tuple[int, ...]:
    """What the file system says of manifest.json without reading it; () if there is none, or one that changed a moment ago.

    As long as it stays the same and is not (), so does `identity`, which takes fifty times as long.
    """
    try:
        found = os.stat(Path(out, MANIFEST))
    except OSError:
        return ()
    settled = time.time_ns() - found.st_ctime_ns > SETTLED_NS
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns) if settled else ()


def write_durably(path: Path, data: bytes) -> None:
    """Put `data` at `path`: whoever looks sees the old file or the whole new one, after a power cut too."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync of a folder, which makes the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- reading


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ManifestError(f"{what}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def _equal(value: Any, expected: Any, what: str) -> None:
    if type(value) is not type(expected) or value != expected:
        raise ManifestError(f"{what}: expected {expected!r}, found {value!r}")


def _fields(value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    found = _typed(value, dict, what)
    if set(found) != set(names):
        missing, extra = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        raise ManifestError(f"{what}: missing fields {missing}, unknown fields {extra}")
    return dict(found)


def _hex(value: Any, digits: int, what: str) -> str:
    if type(value) is not str or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ManifestError(f"{what}: expected {digits} hexadecimal digits, found {value!r}")
    return value


def _roots(value: Any) -> tuple[str, ...]:
    roots = tuple(_typed(root, str, "roots[]") for root in _typed(value, list, "roots"))
    if len(roots) > MAX_STRIPES:
        raise ManifestError(f"roots: {len(roots)} of them, at most {MAX_STRIPES} allowed")
    for root in roots:
        if not os.path.isabs(root) or "\0" in root or os.path.normpath(root) != root:
            raise ManifestError(f"roots: {root!r} is no absolute, normalised path")
    if len(set(roots)) != len(roots):
        raise ManifestError("roots: the same folder twice")
    return roots


def _files(value: Any, geometry: Geometry) -> tuple[ColumnFile, ...]:
    entries = _typed(value, list, "files")
    expected = [(index, column) for index in range(len(geometry.layers)) for column in range(geometry.columns)]
    if len(entries) != len(expected):
        raise ManifestError(f"files: expected {len(expected)} (layers x columns), found {len(entries)}")
    files = []
    for number, (entry, (index, column)) in enumerate(zip(entries, expected, strict=True)):
        what = f"files[{number}]"
        _fields(entry, ("path", "layer", "column", "rows", "pages", "size", "sha256"), what)
        layer, rows = geometry.layers[index], geometry.primes[index][column]
        pages = pages_of(rows, geometry.row_bytes)
        for name, right in (("path", column_path(layer, column)), ("layer", layer), ("column", column), ("rows", rows),
                            ("pages", pages), ("size", pages * PAGE_BYTES)):
            _equal(entry[name], right, f"{what}.{name}")
        files.append(ColumnFile(layer, column, rows, pages, pages * PAGE_BYTES, _hex(entry["sha256"], 64, f"{what}.sha256")))
    return tuple(files)


def _token_map(value: Any, geometry: Geometry) -> TokenMapFile | None:
    if (value is None) != (geometry.compressed_vocab_size is None):
        raise ManifestError(f"token_map: {'missing' if value is None else 'present'}, but the geometry's compressed vocabulary "
                            f"is {geometry.compressed_vocab_size}")
    if value is None:
        return None
    _fields(value, ("size", "compressed_size", "sha256"), "token_map")
    size = _typed(value["size"], int, "token_map.size")
    if not 0 < size < 1 << 31:
        raise ManifestError(f"token_map.size: {size} is no number of tokens")
    _equal(value["compressed_size"], geometry.compressed_vocab_size, "token_map.compressed_size")
    return TokenMapFile(size, value["compressed_size"], _hex(value["sha256"], 64, "token_map.sha256"))


def _scales(value: Any, geometry: Geometry) -> tuple[float, ...] | None:
    if value is None:
        return None
    scales = tuple(_typed(scale, float, "global_scales[]") for scale in _typed(value, list, "global_scales"))
    if len(scales) != len(geometry.layers) or not all(math.isfinite(scale) for scale in scales):
        raise ManifestError(f"global_scales: expected {len(geometry.layers)} finite numbers, found {list(scales)}")
    return scales


def _source(value: Any) -> tuple[SourceTensor, ...]:
    _fields(value, ("name", "tensors"), "source")
    tensors = []
    for number, entry in enumerate(_typed(value["tensors"], list, "source.tensors")):
        what = f"source.tensors[{number}]"
        _fields(entry, ("name", "dtype", "shape"), what)
        shape = tuple(_typed(side, int, f"{what}.shape[]") for side in _typed(entry["shape"], list, f"{what}.shape"))
        name, dtype = (_typed(entry[field], str, f"{what}.{field}") for field in ("name", "dtype"))
        tensors.append(SourceTensor(name, dtype, shape))
    return tuple(tensors)
