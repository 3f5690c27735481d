"""`ssdgram inspect PATH`: geometry, sizes, stripes and a decoded row of a store; geometry and tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ssdgram.errors import SSDGramError

if TYPE_CHECKING:
    import numpy as np

    from ssdgram.geometry import Geometry
    from ssdgram.layout.inspect import CheckpointInfo, StoreInfo


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--stripe", "stripes", multiple=True, type=click.Path(path_type=Path),
              help="Where the stripes are now, in their order, if they moved.")
@click.option("--layer", type=int, help="Decoder layer of the decoded row; default: the first.")
@click.option("--column", type=click.IntRange(0), default=0, show_default=True, help="Column of the decoded row.")
@click.option("--row", type=click.IntRange(0), default=0, show_default=True, help="Number of the decoded row in its column.")
def inspect(path: Path, stripes: tuple[Path, ...], layer: int | None, column: int, row: int) -> None:
    """Print what is in PATH: a store, or a checkpoint that is not converted yet."""
    from ssdgram.layout.inspect import StoreInfo, describe, read_row

    info = describe(path, stripes or None)
    if not isinstance(info, StoreInfo):
        _print_checkpoint(info)
        _print_geometry(info.geometry)
        return
    wanted = info.geometry.layers[0] if layer is None else layer
    try:
        packed = read_row(info, wanted, column, row)         # before anything is printed
    except SSDGramError:
        _print_store(info)
        _print_geometry(info.geometry)
        raise
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    _print_store(info)
    _print_geometry(info.geometry)
    _print_row(info, wanted, column, row, packed)


def _line(label: str, text: str) -> None:
    click.echo(click.style(f"{label:<13}", bold=True) + text)


def _size(count: int) -> str:
    return f"{count} bytes ({count / 2**30:.2f} GiB)"


def _print_geometry(geometry: Geometry) -> None:
    compressed = geometry.compressed_vocab_size
    _line("family", geometry.family)
    _line("layers", ", ".join(map(str, geometry.layers)))
    _line("columns", f"{geometry.columns} a layer: orders 2 .. {geometry.max_ngram}, {geometry.heads} heads each")
    _line("rows", f"{sum(geometry.rows_per_layer)} in all: {', '.join(map(str, geometry.rows_per_layer))} a layer")
    _line("row", f"{geometry.row_bytes} bytes: {geometry.row_dim} values, {geometry.encoding} ({geometry.code_bytes} of codes, "
                 f"{geometry.scale_bytes} of scales)")
    _line("vocabulary", f"{geometry.vocab_size} ids, " + (f"compressed to {compressed}" if compressed else "not compressed"))


def _print_store(info: StoreInfo) -> None:
    manifest = info.manifest
    useful = sum(file.rows for file in manifest.files) * manifest.row_bytes
    _line("store", f"format 1, generation {manifest.generation:016x}, from {manifest.source_name}")
    _line("files", f"{len(manifest.files)}, {_size(manifest.size)}, {manifest.rows_per_page} rows a page, "
                   f"{manifest.size / useful:.4f} bytes stored per byte of rows")
    if manifest.global_scales is not None:
        _line("global scale", ", ".join(map(str, manifest.global_scales)))
    for number, root in enumerate(info.roots):
        held = [file for file in manifest.files if file.column % len(info.roots) == number]
        _line(f"stripe {number}", f"{root}: {len(held)} files, {_size(sum(file.size for file in held))}")


def _print_row(info: StoreInfo, layer: int, column: int, row: int, packed: np.ndarray) -> None:
    from ssdgram.layout.inspect import decoded

    order, head = divmod(column, info.geometry.heads)
    values = [f"{value:.6g}" for value in decoded(info, layer, packed)]
    _line(f"row {row}", f"of layer {layer}, column {column} ({order + 2}-gram, head {head}): its check is right")
    parts = {"codes": bytes(packed[: info.geometry.code_bytes]), "scales": bytes(packed[info.geometry.code_bytes :])}
    for label, data in parts.items():
        if data:
            _line(f"  {label}", data[:16].hex(" ") + (" .." if len(data) > 16 else ""))
    _line("  values", " ".join(values[:8]) + (" .." if len(values) > 8 else ""))


def _print_checkpoint(info: CheckpointInfo) -> None:
    checkpoint = info.checkpoint
    _line("checkpoint", f"{checkpoint.folder}: {_size(info.table_bytes)} of rows")
    for table in checkpoint.tables:
        for kind, tensors in (("codes", table.codes), ("scales", table.scales)):
            if tensors:
                first = tensors[0]
                pieces = f", and {len(tensors) - 1} pieces more" if len(tensors) > 1 else ""
                where = f"{first.name} {first.dtype} {list(first.shape)} in {first.file.name}"
                _line(f"layer {table.layer}", f"{kind}: {where}{pieces}")
    for notice in checkpoint.notices:
        _line("notice", notice)
    _line("as a store", f"{_size(info.store_bytes)}: ssdgram convert {checkpoint.folder} OUT")
