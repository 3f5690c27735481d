"""A model's checkpoint folder, as far as its n-gram tables are concerned: which tensors hold the rows, and in what format.

    Engram (spec A11)   [any.prefix.]layers.{L}.engram.embed.weight / .scale; vLLM's embed_tokens, weight_scale[_inv] too
    PLE    (spec B4)    [any.prefix.]layers.{L}.ple.ple_embedding.ngram_embedding.shard_{i}.weight, i = 0, 1, ..
                        with int64 buffers layer_multipliers, ngram_heads_vocab_sizes, ngram_heads_offsets, and weight_scale

Only headers and a few small tensors are read here. Every table's dtype and shape are checked against the config, so that a row
number below the geometry's bounds always lies inside the tensors. It knows nothing of stores.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssdgram.errors import CheckpointError, ConfigError
from ssdgram.geometry import PLE, Geometry
from ssdgram.layout.safetensors import Tensor, find_tensors, read_index

log = logging.getLogger("ssdgram")
MAX_SMALL_BYTES = 1 << 20                                    # buffers and scales that are read whole

_ENGRAM = re.compile(r"(?:.*\.)?layers\.(\d{1,9})\.engram\.(?:embed|embed_tokens)\.(weight|scale|weight_scale|weight_scale_inv)")
_PLE_PREFIX = r"(?:.*\.)?layers\.(\d{1,9})\.ple\.ple_embedding\."
_PLE_TABLE = re.compile(_PLE_PREFIX + r"ngram_embedding\.(?:shard_(\d{1,9})\.)?(weight|weight_scale)")
_SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale")
_PLE_SCALE = re.compile(_PLE_PREFIX + r"(?:ngram_embedding\.)?(?:shard_\d{1,9}\.)?(" + "|".join(_SCALES) + ")")
_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_PLE_BUFFER = re.compile(_PLE_PREFIX + "(" + "|".join(_BUFFERS) + ")")

_SCALE_DTYPES = {"fp8_ue8m0": ("F8_E8M0", "U8"), "nvfp4": ("F8_E4M3", "U8"), "bf16": (), "fp8_global": ()}


@dataclass(frozen=True)
class Table:
    """One layer's table: its codes and scales as pieces in row order; `scales` is empty if the rows have none.

    `others`: further tensors that the table's values depend on (PLE's buffers and scales), named in the manifest.
    """

    layer: int
    codes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    global_scale: float | None
    others: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the table comes from."""
        return self.codes + self.scales + self.others


@dataclass(frozen=True)
class Checkpoint:
    """The n-gram tables of a checkpoint folder. `notices`: what was found to differ, and what was done about it."""

    folder: Path
    geometry: Geometry
    tables: tuple[Table, ...]                                # one a layer, in geometry.layers' order
    notices: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Path:
        """Where its tokenizer.json would be."""
        return self.folder / "tokenizer.json"

    @property
    def global_scales(self) -> tuple[float, ...] | None:
        """The scale of each layer's whole table, or None if its encoding has none."""
        scales = tuple(table.global_scale for table in self.tables if table.global_scale is not None)
        return scales or None


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read config.json, the index and the headers that matter. ConfigError or CheckpointError say what is wrong."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder that holds the checkpoint's config.json")
    geometry = Geometry.from_config(folder / "config.json")
    files = read_index(folder)
    if geometry.family == PLE:
        return _open_ple(folder, geometry, files)
    tables = []
    for index, layer in enumerate(geometry.layers):
        names = _engram_names(folder, files, layer)
        tensors = find_tensors(files, list(names.values()))
        codes, scales = tensors[names["weight"]], tensors[names["scale"]]
        rows = geometry.table_rows[index]
        _expect(codes, ("F8_E4M3",), (rows, geometry.code_bytes))
        _expect(scales, _SCALE_DTYPES[geometry.encoding], (rows, geometry.scale_bytes))
        tables.append(Table(layer, (codes,), (scales,), None))
    return Checkpoint(folder, geometry, tuple(tables))


def _engram_names(folder: Path, files: Mapping[str, Path], layer: int) -> dict[str, str]:
    """The names of layer `layer`'s codes ("weight") and scales ("scale")."""
    found: dict[str, str] = {}
    for name in files:
        match = _ENGRAM.fullmatch(name)
        if match and int(match[1]) == layer:
            kind = "weight" if match[2] == "weight" else "scale"
            if kind in found:
                raise CheckpointError(f"{folder}: both {found[kind]!r} and {name!r} could be the table of layer {layer}")
            found[kind] = name
    for kind in ("weight", "scale"):
        if kind not in found:
            raise CheckpointError(f"{folder}: no tensor layers.{layer}.engram.embed.{kind} in the index: the checkpoint is not "
                                  f"whole, or belongs to another config.json")
    return found


# ---------------------------------------------------------------- PLE


def _open_ple(folder: Path, geometry: Geometry, files: Mapping[str, Path]) -> Checkpoint:
    tables, constants, notices = [], [], []
    encodings = set()
    for index, layer in enumerate(geometry.layers):
        pieces = _ple_pieces(folder, files, layer)
        scale_names = _matching(files, _PLE_SCALE, _SCALES, layer)
        buffers = _matching(files, _PLE_BUFFER, _BUFFERS, layer)
        small = [name for names in (*scale_names.values(), *buffers.values()) for name in names]
        wanted = [piece["weight"] for piece in pieces] + [piece["weight_scale"] for piece in pieces if "weight_scale" in piece]
        tensors = find_tensors(files, list(dict.fromkeys(wanted + small)))
        codes = tuple(tensors[piece["weight"]] for piece in pieces)
        encoding = _ple_encoding(geometry, codes[0])
        encodings.add(encoding)
        shaped = geometry.with_encoding(encoding)
        dtypes, width = _ple_codes(encoding, shaped)
        for piece in codes:
            _expect(piece, dtypes, (None, width))
        scales: tuple[Tensor, ...] = ()
        if encoding == "nvfp4":
            if not all("weight_scale" in piece for piece in pieces):
                raise CheckpointError(f"{folder}: layer {layer}'s NVFP4 pieces lack their weight_scale tensors")
            scales = tuple(tensors[piece["weight_scale"]] for piece in pieces)
            for piece, scale in zip(codes, scales, strict=True):
                _expect(scale, _SCALE_DTYPES[encoding], (piece.shape[0], shaped.scale_bytes))
        global_names = {"bf16": [], "fp8_global": scale_names["weight_scale"],
                        "nvfp4": scale_names["weight_scale_2"] + scale_names["weight_global_scale"]}[encoding]
        global_scale = _global_scale(folder, layer, encoding, [tensors[name] for name in global_names])
        others = [tensors[name] for name in global_names] + [tensors[name] for names in buffers.values() for name in names]
        found = {kind: _one_vector(folder, layer, kind, [tensors[name] for name in names]) for kind, names in buffers.items()}
        constants.append((found["layer_multipliers"] or geometry.multipliers[index],
                          found["ngram_heads_vocab_sizes"] or geometry.primes[index],
                          found["ngram_heads_offsets"] or geometry.offsets[index]))
        for what, mine, theirs in zip(("multipliers", "sizes", "offsets"),
                                      (geometry.multipliers[index], geometry.primes[index], geometry.offsets[index]),
                                      constants[-1], strict=True):
            if mine != theirs:
                notices.append(f"layer {layer}: the checkpoint's {what} {list(theirs)} replace those that follow from the "
                               f"config, {list(mine)}")
        tables.append(Table(layer, codes, scales, global_scale, tuple(others)))
    if len(encodings) != 1:
        raise CheckpointError(f"{folder}: layers with different row formats {sorted(encodings)}: expected one")
    multipliers, sizes, offsets = (tuple(values) for values in zip(*constants, strict=True))
    table_rows = tuple(sum(piece.shape[0] for piece in table.codes) for table in tables)
    try:
        geometry = dataclasses.replace(geometry, encoding=encodings.pop(), table_rows=table_rows, multipliers=multipliers,
                                       primes=sizes, offsets=offsets)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: the table's tensors or its int64 buffers do not fit the config: {error}") from error
    for notice in notices:
        log.warning("%s", notice)
    return Checkpoint(folder, geometry, tuple(tables), tuple(notices))


def _ple_pieces(folder: Path, files: Mapping[str, Path], layer: int) -> list[dict[str, str]]:
    """Names of the pieces' tensors in index order: shard_0, shard_1, .. without a gap, or one whole table."""
    pieces: dict[int, dict[str, str]] = {}
    for name in files:
        match = _PLE_TABLE.fullmatch(name)
        if match and int(match[1]) == layer:
            number = -1 if match[2] is None else int(match[2])
            names = pieces.setdefault(number, {})
            if match[3] in names:
                raise CheckpointError(f"{folder}: both {names[match[3]]!r} and {name!r} could be piece {number} of layer {layer}")
            names[match[3]] = name
    pieces = {number: names for number, names in pieces.items() if "weight" in names}
    expected = [-1] if -1 in pieces else list(range(len(pieces)))
    if not pieces or sorted(pieces) != expected:
        numbers = sorted(pieces)
        raise CheckpointError(f"{folder}: pieces {numbers[:8]}{'..' if len(numbers) > 8 else ''} of layer {layer}'s table "
                              f"(…ngram_embedding.shard_{{i}}.weight): expected 0, 1, 2, .. without a gap")
    return [pieces[number] for number in expected]


def _matching(files: Mapping[str, Path], pattern: re.Pattern[str], kinds: tuple[str, ...], layer: int) -> dict[str, list[str]]:
    """Names that match `pattern` for `layer`, by the kind that its last group found."""
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for name in files:
        match = pattern.fullmatch(name)
        if match and int(match[1]) == layer:
            found[match[2]].append(name)
    return found


def _ple_encoding(geometry: Geometry, codes: Tensor) -> str:
    """The row format that a piece's dtype means (spec B4)."""
    if codes.dtype == "BF16":
        return "bf16"
    if codes.dtype == "F8_E4M3":
        return "fp8_global"
    if codes.dtype == "U8" and len(codes.shape) == 2 and codes.shape[1] * 2 == geometry.row_dim:
        return "nvfp4"
    raise CheckpointError(f"{codes.file}: {codes.name!r} is {codes.dtype} {list(codes.shape)}: expected BF16 or F8_E4M3 "
                          f"[rows, {geometry.row_dim}], or NVFP4 as U8 [rows, {geometry.row_dim // 2}]")


def _ple_codes(encoding: str, geometry: Geometry) -> tuple[tuple[str, ...], int]:
    dtype = {"bf16": "BF16", "fp8_global": "F8_E4M3", "nvfp4": "U8"}[encoding]
    return (dtype,), geometry.row_dim // 2 if encoding == "nvfp4" else geometry.row_dim


def _global_scale(folder: Path, layer: int, encoding: str, tensors: list[Tensor]) -> float | None:
    """The scale of the whole table; every tensor that states it must state the same."""
    if encoding == "bf16":
        return None
    values = set()
    for tensor in tensors:
        if tensor.dtype not in ("BF16", "F32") or math.prod(tensor.shape) != 1:
            raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}: expected one BF16 or "
                                  f"F32 number")
        data = _small(tensor)
        values.add(float(np.frombuffer(b"\0\0" + data if tensor.dtype == "BF16" else data, "<f4")[0]))
    if len(values) != 1 or not math.isfinite(next(iter(values))):
        raise CheckpointError(f"{folder}: layer {layer}'s table ({encoding}) needs one finite scale (weight_scale), found "
                              f"{sorted(values, key=repr)} in {len(tensors)} tensors")
    return values.pop()


def _one_vector(folder: Path, layer: int, kind: str, tensors: list[Tensor]) -> tuple[int, ...]:
    """An int64 buffer's values; empty if the checkpoint has none."""
    if not tensors:
        return ()
    if len(tensors) > 1:
        raise CheckpointError(f"{folder}: {len(tensors)} tensors could be layer {layer}'s {kind}: "
                              f"{[tensor.name for tensor in tensors[:4]]}")
    tensor = tensors[0]
    if tensor.dtype != "I64":
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype}: expected I64")
    return tuple(int(value) for value in np.frombuffer(_small(tensor), "<i8"))


def _small(tensor: Tensor) -> bytes:
    """All bytes of a small tensor."""
    if tensor.size > MAX_SMALL_BYTES:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} has {tensor.size} bytes: expected at most {MAX_SMALL_BYTES}")
    try:
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.size)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error.strerror or error}") from error
    if len(data) != tensor.size:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} ends after {len(data)} of {tensor.size} bytes")
    return data


def _expect(tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int | None, int]) -> None:
    """CheckpointError unless the tensor is [rows, width] of one of `dtypes`; rows None: any."""
    rows = shape[0] if shape[0] is not None else (tensor.shape[0] if tensor.shape else 0)
    if tensor.dtype not in dtypes or tensor.shape != (rows, shape[1]):
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}: expected "
                              f"{' or '.join(dtypes)} [{'any' if shape[0] is None else rows}, {shape[1]}] by config.json")
