"""What is in a store or a checkpoint, for people: numbers and names as plain values, and single rows read and decoded.

`describe(path)` looks at a store's manifest and files, or at a checkpoint's headers; its cost does not depend on the tables'
size. `read_row` is the slow, simple way to one row: a buffered read, the row check, no cache. It prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssdgram.errors import FormatError, ManifestError, RowCheckError
from ssdgram.geometry import Geometry
from ssdgram.layout.checkpoint import Checkpoint, open_checkpoint
from ssdgram.layout.files import resolve, roots_of
from ssdgram.layout.format import PAGE_BYTES, TRAILER, rows_per_page
from ssdgram.layout.manifest import JOURNAL, MANIFEST, Manifest
from ssdgram.layout.places import places


@dataclass(frozen=True)
class StoreInfo:
    """A store: its manifest, its roots, its files in file-index order."""

    out: Path
    manifest: Manifest
    roots: tuple[Path, ...]
    files: tuple[Path, ...]

    @property
    def geometry(self) -> Geometry:
        """The store's geometry."""
        return self.manifest.geometry


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, and what a store of it would take."""

    checkpoint: Checkpoint
    table_bytes: int
    store_bytes: int

    @property
    def geometry(self) -> Geometry:
        """The checkpoint's geometry."""
        return self.checkpoint.geometry


def describe(path: str | os.PathLike[str], stripes: Sequence[str | os.PathLike[str]] | None = None) -> StoreInfo | CheckpointInfo:
    """What lies in the folder `path`: a store, or a checkpoint if it has a config.json and no manifest.

    ManifestError, FormatError or IdentityError for a store, ConfigError or CheckpointError for a checkpoint that is not whole.
    """
    folder = Path(path)
    if (folder / MANIFEST).exists() or (folder / JOURNAL).exists():
        manifest = Manifest.load(folder)
        return StoreInfo(folder, manifest, tuple(roots_of(folder, manifest, stripes)), tuple(resolve(folder, manifest, stripes)))
    if not (folder / "config.json").exists():
        raise ManifestError(f"{folder}: neither a store ({MANIFEST}) nor a checkpoint (config.json) is there")
    checkpoint = open_checkpoint(folder)
    table_bytes = sum(tensor.size for table in checkpoint.tables for tensor in table.codes + table.scales)
    return CheckpointInfo(checkpoint, table_bytes, store_bytes(checkpoint.geometry))


def store_bytes(geometry: Geometry) -> int:
    """Bytes of the page files of a store of that geometry."""
    return sum(place.size for place in places(geometry, [Path()]))


def read_row(store: StoreInfo, layer: int, column: int, row: int) -> np.ndarray:
    """Row `row` of a column (0 .. rows - 1), codes then scales: uint8 [row_bytes]. RowCheckError if it is not the right bytes.

    ConfigError: no such layer. ValueError: no such column or row.
    """
    from ssdgram.layout.page import describe as describe_fault
    from ssdgram.layout.page import page_fault, row_crc, signed

    manifest, geometry = store.manifest, store.geometry
    index = geometry.layer_index(layer)
    if not 0 <= column < geometry.columns:
        raise ValueError(f"column {column}: expected 0 .. {geometry.columns - 1}")
    number = index * geometry.columns + column
    record, path = manifest.files[number], store.files[number]
    if not 0 <= row < record.rows:
        raise ValueError(f"row {row}: expected 0 .. {record.rows - 1}")
    per_page = rows_per_page(manifest.row_bytes)
    page, slot = divmod(row, per_page)
    data = np.zeros(PAGE_BYTES, np.uint8)
    try:
        with open(path, "rb", buffering=0) as file:
            count = os.preadv(file.fileno(), [data.data], page * PAGE_BYTES)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from error
    start = slot * manifest.row_bytes
    check = int(data[TRAILER - 4 * (per_page - slot) :][:4].view("<u4")[0])
    generation = signed(manifest.generation)
    found = row_crc(data.ctypes.data + start, manifest.row_bytes, generation, layer, column, row)
    if count != PAGE_BYTES or found != check:
        fault = page_fault(data.ctypes.data, manifest.row_bytes, record.rows, generation, layer, column, page)
        what = describe_fault(fault, manifest.row_bytes, page) if count == PAGE_BYTES else f"{count} of {PAGE_BYTES} bytes"
        raise RowCheckError(f"{path}, page {page}, row {row}: {what}; run `ssdgram verify` and copy or convert the file again",
                            layer=layer, file=str(path), page=page, rows=(row,))
    return data[start : start + manifest.row_bytes].copy()


def decoded(store: StoreInfo, layer: int, packed: np.ndarray) -> np.ndarray:
    """The values of a row as the model sees them (bf16, spec A7, B4), as float32 [row_dim]."""
    from ssdgram.kernels.reference import dequantise_rows

    scales = store.manifest.global_scales
    scale = None if scales is None else scales[store.geometry.layer_index(layer)]
    bits = dequantise_rows(packed, store.geometry.encoding, store.geometry.row_dim, scale)
    return (bits.astype(np.uint32) << 16).view(np.float32)
