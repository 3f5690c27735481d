"""Verification of a store: every page against its identity and checksums, every file against its digest, and, with
`against`, every row against the checkpoint it came from.

Everything is read (O_DIRECT, several files at once, bounded memory) and nothing written. What is wrong becomes a Failure that
names file, page and rows; only a store whose manifest or roots cannot be trusted raises. It does not use the serving path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ssdgram._compiled import compile_for
from ssdgram.errors import ConversionError, FormatError
from ssdgram.layout.blocks import BLOCK_BYTES, BLOCK_PAGES, MAX_JOBS, Progress, Stream, default_jobs, run_blocks, threads_for
from ssdgram.layout.checkpoint import Checkpoint, open_checkpoint
from ssdgram.layout.columns import Column, Workspace, workspace
from ssdgram.layout.direct import DirectFile
from ssdgram.layout.files import check_file, load_token_map, roots_of
from ssdgram.layout.format import PAGE_BYTES
from ssdgram.layout.format import TRAILER as CRC_END
from ssdgram.layout.generation import generation_of
from ssdgram.layout.manifest import ColumnFile, Manifest
from ssdgram.layout.page import PAGE_OK, check_pages, compare_pages, describe, page_fault, row_crc, signed
from ssdgram.layout.places import Place, places
from ssdgram.layout.source import RowSource, Shards, open_sources

MAX_LISTED = 100                                             # failures listed for a file; the others are counted
_BAD = 128                                                   # bad pages and rows that a block reports one by one


@dataclass(frozen=True)
class Failure:
    """Something wrong. `page`: None if it concerns the whole file; `rows`: numbers in the column of the rows that are wrong."""

    file: str
    what: str
    layer: int | None = None
    column: int | None = None
    page: int | None = None
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        page = "" if self.page is None else f", page {self.page}"
        rows = f" (rows {self.rows[0]} .. {self.rows[-1]})" if self.rows else ""
        return f"{self.file}{page}: {self.what}{rows}"


@dataclass(frozen=True)
class Report:
    """What `verify` found. `pages`: checked; `rows`: compared with the source; `unlisted`: failures beyond those listed."""

    pages: int
    rows: int
    failed: tuple[Failure, ...]
    unlisted: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything was right."""
        return not self.failed


def verify(out: str | os.PathLike[str], against: str | os.PathLike[str] | None = None, *,
           stripes: Sequence[str | os.PathLike[str]] | None = None, jobs: int | None = None,
           progress: Progress | None = None) -> Report:
    """Check every page of the store in folder `out`; with `against`, compare every row with that checkpoint folder.

    `stripes`: where the roots are now, if they moved. ManifestError or IdentityError if manifest or roots are not to be trusted;
    ConversionError if `against` has another geometry. Everything else that is wrong is in the Report.
    """
    out = Path(out)
    manifest = Manifest.load(out)
    roots = roots_of(out, manifest, stripes)
    failed: list[Failure] = []
    try:
        load_token_map(out, manifest)
    except FormatError as error:
        failed.append(Failure(str(out), str(error)))
    with Shards() as shards:
        sources: list[tuple[RowSource, RowSource]] | None = None
        if against is not None:
            checkpoint = open_checkpoint(against)
            sources = _matching_sources(manifest, checkpoint, shards, out, failed)
        streams = [_Check(place, file, roots[file.column % len(roots)], manifest, sources)
                   for place, file in zip(places(manifest.geometry, roots), manifest.files, strict=True)]
        size = manifest.size

        def tick() -> None:
            if progress is not None:
                progress(sum(stream.done for stream in streams), size)

        _compile()
        jobs = min(jobs or default_jobs(), MAX_JOBS)
        geometry = manifest.geometry
        run_blocks(streams, jobs, threads_for(jobs), lambda: workspace(geometry.code_bytes, geometry.scale_bytes), tick)
    for stream in streams:
        failed += stream.failed
    return Report(sum(stream.pages for stream in streams), sum(stream.rows for stream in streams), tuple(failed),
                  sum(stream.unlisted for stream in streams))


def _matching_sources(manifest: Manifest, checkpoint: Checkpoint, shards: Shards, out: Path,
                      failed: list[Failure]) -> list[tuple[RowSource, RowSource]]:
    """Row sources of the checkpoint, if it has the store's geometry; another generation is a failure, and rows are compared."""
    if checkpoint.geometry != manifest.geometry:
        raise ConversionError(f"{checkpoint.folder} has another geometry than {out}: it is not what the store was converted from")
    sources = open_sources(checkpoint, shards)
    generation = generation_of(checkpoint, sources)
    if generation != manifest.generation:
        failed.append(Failure(str(out), f"converted from another source: the store's generation is {manifest.generation:016x}, "
                                        f"that of {checkpoint.folder} is {generation:016x}"))
    return sources


class _Found(NamedTuple):
    """What is wrong in one block: pages (their bytes may be gone by now) and rows, and how many of each beyond those listed."""

    pages: list[Failure]
    unlisted: int
    data: np.ndarray


class _Check(Stream):
    """One column file being checked."""

    def __init__(self, place: Place, file: ColumnFile, root: Path, manifest: Manifest,
                 sources: list[tuple[RowSource, RowSource]] | None) -> None:
        super().__init__(max(1, -(-file.pages // BLOCK_PAGES)))
        self.record, self.root, self.path = file, root, place.path
        self.row_bytes, self.per_page = manifest.row_bytes, manifest.rows_per_page
        self.generation = signed(manifest.generation)
        self.source: Column | None = None
        if sources is not None:
            self.source = Column(place, *sources[place.layer_index], manifest.generation)
        self.failed: list[Failure] = []
        self.unlisted = self.pages = self.rows = self.done = 0
        self._whole = True                                   # read from end to end: the digest means something
        self._file: DirectFile | None = None
        self._digest = hashlib.sha256()

    def open(self) -> None:
        try:
            check_file(self.path, self.root, self.record)
        except FormatError as error:
            what = str(error).removeprefix(f"{self.path}: ")
            self._fail(Failure(str(self.path), what, self.record.layer, self.record.column))
            self._whole = False                              # what is there of it is checked all the same
        if self.path.is_file() and not self.path.is_symlink():
            try:
                self._file = DirectFile(self.path)
            except OSError as error:
                if self._whole:                              # else check_file said what is wrong with it
                    what = f"cannot be opened: {error.strerror or error}; run this as a user that may read it"
                    self._fail(Failure(str(self.path), what, self.record.layer, self.record.column))
                self._whole = False

    def process(self, block: int, space: Workspace) -> _Found | None:
        first = block * BLOCK_PAGES
        if self._file is None:
            return None
        pages = max(0, min(BLOCK_PAGES, self.record.pages - first, self._file.size // PAGE_BYTES - first))
        data = space.pages[: pages * PAGE_BYTES]
        try:
            self._file.read(data, first * PAGE_BYTES, len(data))
        except (OSError, EOFError) as error:
            what = f"cannot be read: {error}"
            return _Found([Failure(str(self.path), what, self.record.layer, self.record.column, first)], pages - 1, data[:0])
        bad = np.zeros(_BAD, np.int64)
        args = (self.record.rows, self.generation, self.record.layer, self.record.column)
        count = check_pages(data, pages, self.row_bytes, *args, first, bad)
        found = [self._page_failure(data, first, number) for number in bad[:count].tolist()]
        unlisted = max(0, count - _BAD)
        if self.source is not None and pages:
            _, _, codes, scales = self.source.read_rows(block, space)
            count = compare_pages(data, pages, codes, scales, self.source.codes.row_bytes, self.source.scales.row_bytes,
                                  self.record.rows, first, bad)
            found += self._row_failures(bad[:count].tolist())
            unlisted += max(0, count - _BAD)
        return _Found(found, unlisted, data)

    def in_order(self, block: int, result: _Found | None) -> None:
        if result is None:
            return
        for failure in result.pages:
            self._fail(failure)
        self.unlisted += result.unlisted
        pages = len(result.data) // PAGE_BYTES
        self.pages += pages
        rows = min(pages * self.per_page, self.record.rows - block * BLOCK_PAGES * self.per_page)
        self.rows += rows if self.source is not None else 0
        self.done += len(result.data)
        if self._whole:
            self._digest.update(result.data.data)

    def finish(self) -> None:
        if self._whole and not self.failed and self._digest.hexdigest() != self.record.sha256:
            what = (f"every page is right by itself, but the file's SHA-256 is {self._digest.hexdigest()}, not the manifest's "
                    f"{self.record.sha256}: a file of another conversion")
            self._fail(Failure(str(self.path), what, self.record.layer, self.record.column))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _fail(self, failure: Failure) -> None:
        if len(self.failed) < MAX_LISTED:
            self.failed.append(failure)
        else:
            self.unlisted += 1

    def _page_failure(self, data: np.ndarray, first: int, number: int) -> Failure:
        """What is wrong with a page, and which of its rows do not have their checksum."""
        page = data.ctypes.data + (number - first) * PAGE_BYTES
        record = self.record
        fault = page_fault(page, self.row_bytes, record.rows, self.generation, record.layer, record.column, number)
        start = (number - first) * PAGE_BYTES + CRC_END - 4 * self.per_page
        checks = data[start : start + 4 * self.per_page].view("<u4")
        rows = []
        for slot in range(min(self.per_page, record.rows - number * self.per_page)):
            address, row = page + slot * self.row_bytes, number * self.per_page + slot
            if row_crc(address, self.row_bytes, self.generation, record.layer, record.column, row) != checks[slot]:
                rows.append(row)
        what = describe(fault, self.row_bytes, number) if fault != PAGE_OK else "changed while it was checked"
        return Failure(str(self.path), what, record.layer, record.column, number, tuple(rows))

    def _row_failures(self, rows: list[int]) -> list[Failure]:
        """Rows that differ from the source, page by page."""
        record, by_page = self.record, dict[int, list[int]]()
        for row in rows:
            by_page.setdefault(row // self.per_page, []).append(row)
        return [Failure(str(self.path), "rows differ from the source", record.layer, record.column, page, tuple(numbers))
                for page, numbers in by_page.items()]


def _compile() -> None:
    """Load or compile the checking loops in this thread."""
    pages, bad = np.zeros(BLOCK_BYTES, np.uint8), np.zeros(1, np.int64)
    compile_for(check_pages, pages, 0, 0, 0, 0, 0, 0, 0, bad)
    compile_for(compare_pages, pages, 0, 0, 0, 0, 0, 0, 0, bad)
