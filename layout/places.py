"""Where a table's columns go: the rows of each, and the file under its root. Arithmetic on a geometry, no files are touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssdgram.geometry import Geometry
from ssdgram.layout.format import PAGE_BYTES, pages_of


@dataclass(frozen=True)
class Place:
    """Column `column` of decoder layer `layer`: rows first_row .. first_row + rows - 1 of its table, in the file at `path`."""

    index: int                                               # of the file: layer index * columns + column
    layer_index: int
    layer: int
    column: int
    first_row: int
    rows: int
    pages: int
    path: Path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.pages * PAGE_BYTES


def column_path(layer: int, column: int) -> str:
    """`layer-LLL/column-CC.rows`: the path of a column's file under its root, computed and never read (design section 4)."""
    return f"layer-{layer:03d}/column-{column:02d}.rows"


def places(geometry: Geometry, roots: Sequence[Path]) -> list[Place]:
    """All columns in file-index order; column c lies under root c % len(roots)."""
    return [
        Place(index * geometry.columns + column, index, layer, column, geometry.offsets[index][column],
              rows := geometry.primes[index][column], pages_of(rows, geometry.row_bytes),
              roots[column % len(roots)] / column_path(layer, column))
        for index, layer in enumerate(geometry.layers) for column in range(geometry.columns)]
