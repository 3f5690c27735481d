"""Strict reading of safetensors headers and of model.safetensors.index.json. It reads headers only, never a tensor's bytes.

    u64 N | N bytes of JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {...}} | tensors

Nothing in a header is believed: lengths are bounded before anything is allocated, every tensor's bytes are exactly what its
dtype and shape take, and the tensors tile the rest of the file without overlap or hole. So a tensor's bytes always lie
inside its file. Every violation is a CheckpointError that names the file and what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdgram.errors import CheckpointError
from ssdgram.layout.bounded import read_bounded, regular
from ssdgram.layout.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000                               # the bound of the format's own reader
MAX_INDEX_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a shard: where its bytes are. `offset` and `size` in bytes, from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int


def read_header(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name, in the order of their bytes. CheckpointError if anything is off."""
    return read_whole_header(path)[0]


def read_whole_header(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `read_header`, and the file's metadata."""
    path = Path(path)
    try:
        with open(path, "rb", opener=regular) as file:
            file_size = os.fstat(file.fileno()).st_size
            if file_size < 8:
                raise CheckpointError(f"{path}: {file_size} bytes, too short for a safetensors file (8 bytes of header length)")
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed: damaged, or "
                                      f"another format")
            if length > file_size - 8:
                raise CheckpointError(f"{path}: header of {length} bytes in a file of {file_size}: truncated, or another format")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) != length:
        raise CheckpointError(f"{path}: header ends after {len(text)} of {length} bytes")
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: header does not start with '{{'")
    entries = _strict_json(path, text, "header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not an object of strings")
    data_start = 8 + length
    tensors = [_tensor(path, name, entry, data_start, file_size - data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    end, previous = data_start, ""
    for tensor in tensors:
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} overlaps {previous!r}")
        if tensor.offset > end:
            raise CheckpointError(f"{path}: {tensor.offset - end} bytes before tensor {tensor.name!r} belong to no tensor")
        end, previous = tensor.offset + tensor.size, tensor.name
    if end != file_size:
        raise CheckpointError(f"{path}: tensors end at byte {end}, the file at {file_size}")
    return {tensor.name: tensor for tensor in tensors}, metadata


def _tensor(path: Path, name: str, entry: Any, data_start: int, data_size: int) -> Tensor:
    what = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{what}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(side) for side in shape):
        raise CheckpointError(f"{what}: shape is not a list of integers from 0 to 2^63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{what}: data_offsets are not two integers from 0 to 2^63 - 1")
    begin, end = offsets
    if begin > end or end > data_size:
        raise CheckpointError(f"{what}: data_offsets {offsets} do not lie in the file's {data_size} bytes of tensors")
    bits = DTYPE_BITS[dtype]
    for side in shape:
        bits *= side
        if bits >> 63:
            raise CheckpointError(f"{what}: shape {shape} is larger than any file")
    if bits != 8 * (end - begin):
        raise CheckpointError(f"{what}: {dtype} {shape} takes {bits / 8:g} bytes, data_offsets hold {end - begin}")
    return Tensor(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def read_index(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Which file of the checkpoint `folder` holds each tensor: from the index, or from the one model.safetensors.

    Files are those named in the index; a name that leaves the folder is refused. Whether a file holds what the index says
    is seen when its header is read (`find_tensors`).
    """
    folder = Path(folder)
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        if not single.exists():
            raise CheckpointError(f"{folder}: neither {INDEX} nor {SINGLE} is there; give the folder of a checkpoint")
        return dict.fromkeys(read_header(single), single)
    try:
        text = read_bounded(index, MAX_INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror or error}") from error
    weight_map = _strict_json(index, text, "file").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing, empty or no object")
    files: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name):
            raise CheckpointError(f"{index}: weight_map[{name!r}] is {file_name!r}, not the name of a file in the folder")
        files[name] = folder / file_name
    return files


def _is_plain_name(name: str) -> bool:
    """A file name without any folder: what cannot leave the checkpoint's folder."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


def find_tensors(files: Mapping[str, Path], names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors `names`, each from the header of its file in `files`; every header is read once."""
    headers: dict[Path, dict[str, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name in names:
        path = files.get(name)
        if path is None:
            raise CheckpointError(f"tensor {name!r} is not in the checkpoint's index")
        if path not in headers:
            headers[path] = read_header(path)
        if name not in headers[path]:
            raise CheckpointError(f"{path}: tensor {name!r} is not in it, although the index says so")
        found[name] = headers[path][name]
    return found


def _strict_json(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:                              # JSON and UTF-8 errors are ValueErrors
        raise CheckpointError(f"{path}: {what} is not strict JSON: {error}") from error
