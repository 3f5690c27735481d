"""The files of a store: where each column's file lies, and whether what lies there can be it.

    OUT/manifest.json, OUT/token_map.npy
    ROOT/stripe.json                            ROOT: OUT itself (root 0 of 1), or each of the stripe folders
    ROOT/layer-LLL/column-CC.rows               the columns with column % stripes == the root's number

A path is computed from layer and column; nothing read from a file ever becomes part of one, except the roots, and a root
counts only if its own stripe.json carries the store's generation and the root's number. It knows nothing of pages.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from ssdgram.errors import FormatError, IdentityError
from ssdgram.layout.bounded import read_bounded
from ssdgram.layout.format import FORMAT
from ssdgram.layout.manifest import TOKEN_MAP, ColumnFile, Manifest, write_durably
from ssdgram.layout.strict_json import parse_object
from ssdgram.token_map import map_digest

STRIPE = "stripe.json"
MAX_STRIPE_BYTES = 4096


def resolve(out: str | os.PathLike[str], manifest: Manifest,
            stripes: Sequence[str | os.PathLike[str]] | None = None) -> list[Path]:
    """The paths of all column files in file-index order, after checking roots, kind, place and size of each.

    `stripes`: where the roots are now, in their order, if they moved since the conversion. IdentityError: a root that belongs
    to another store or place. FormatError: a file that is missing, leaves its root, or has another size.
    """
    roots = roots_of(out, manifest, stripes)
    paths = []
    for file in manifest.files:
        root = roots[file.column % len(roots)]
        paths.append(root / file.path)
        check_file(paths[-1], root, file)
    return paths


def check_file(path: Path, root: Path, file: ColumnFile) -> None:
    """FormatError unless `path` is a regular file of the right size that lies where it should below `root`."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; the store is not whole: copy the file again or convert "
                          f"again") from error
    real = os.path.realpath(path)
    if real != os.path.join(os.path.realpath(root), file.path):
        raise FormatError(f"{path}: leads to {real}, out of its place; links are not followed below a root")
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file")
    if status.st_size != file.size:
        raise FormatError(f"{path}: expected {file.size} bytes, found {status.st_size}; copy the file again or convert again")


def roots_of(out: str | os.PathLike[str], manifest: Manifest,
             stripes: Sequence[str | os.PathLike[str]] | None = None) -> list[Path]:
    """The store's root folders, each checked to be the one of its number."""
    roots = [Path(root) for root in (stripes or manifest.roots or (out,))]
    if len(roots) != manifest.stripes:
        raise IdentityError(f"{out}: the store was converted into {manifest.stripes} roots, {len(roots)} were given")
    for number, root in enumerate(roots):
        check_stripe(root, manifest.generation, number, len(roots))
    return roots


def check_stripe(root: Path, generation: int, number: int, stripes: int) -> None:
    """IdentityError unless `root` holds a stripe.json of this generation, number and count."""
    path = root / STRIPE
    try:
        found = parse_object(read_bounded(path, MAX_STRIPE_BYTES))
    except OSError as error:
        raise IdentityError(f"{path}: {error.strerror or error}; is stripe {number} mounted? If it moved, give all roots in "
                            f"their order") from error
    except ValueError as error:
        raise IdentityError(f"{path}: {error}; not a stripe of a store") from error
    expected = _stripe(generation, number, stripes)
    if found != expected:
        raise IdentityError(f"{path}: expected {expected}, found {found}; the roots are out of order or belong to another store")


def write_stripe(root: Path, generation: int, number: int, stripes: int) -> None:
    """Mark `root` as stripe `number` of `stripes` of the store `generation`, durably."""
    write_durably(root / STRIPE, json.dumps(_stripe(generation, number, stripes)).encode() + b"\n")


def _stripe(generation: int, number: int, stripes: int) -> dict[str, object]:
    return {"format": FORMAT, "generation": f"{generation:016x}", "stripe": number, "stripes": stripes}


# ---------------------------------------------------------------- token map


def load_token_map(out: str | os.PathLike[str], manifest: Manifest) -> np.ndarray | None:
    """The token map of the store, int32 [raw vocabulary], read-only; None if the model does not compress.

    FormatError unless its digest is the manifest's and every value is a compressed id.
    """
    if manifest.token_map is None:
        return None
    path = Path(out, TOKEN_MAP)
    expected = manifest.token_map
    limit = 4 * expected.size + 4096
    try:
        data = read_bounded(path, limit)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}; the store is not whole: convert again") from error
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        shape, _, dtype = npy.read_array_header_1_0(stream)
    except ValueError as error:
        raise FormatError(f"{path}: not a token map: {error}; convert again") from error
    body = data[stream.tell():]
    if dtype != np.dtype("<i4") or shape != (expected.size,) or len(body) != 4 * expected.size:
        raise FormatError(f"{path}: expected int32 [{expected.size}], found {dtype} {shape} in {len(body)} bytes; convert again")
    table = np.frombuffer(body, "<i4")
    if map_digest(table) != expected.sha256:
        raise FormatError(f"{path}: digest is not the manifest's: the file was damaged or replaced; convert again")
    if table.min() < 0 or table.max() >= expected.compressed_size:
        raise FormatError(f"{path}: ids outside 0 .. {expected.compressed_size - 1}")
    return table


def write_token_map(out: Path, table: np.ndarray) -> None:
    """Put token_map.npy into `out`, durably. `table`: int32 [raw vocabulary]."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(table, "<i4"))
    write_durably(out / TOKEN_MAP, buffer.getvalue())
