"""Conversion of a checkpoint's n-gram tables into a store (design section 4): `convert(ckpt, out)`.

    headers -> room? -> lock -> generation -> journal -> token map -> columns (pipeline) -> manifest -> journal removed

Finished columns are journaled and never rewritten; a second run on a finished store writes nothing. The manifest is the last
thing written, so until then nobody can open the store. The result depends on the source alone: not on jobs, kills or resumes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssdgram.errors import ConversionError, FormatError, ManifestError, NoSpaceError, SSDGramError
from ssdgram.layout.checkpoint import Checkpoint, open_checkpoint
from ssdgram.layout.direct import aligned_buffer
from ssdgram.layout.files import load_token_map, resolve, write_stripe, write_token_map
from ssdgram.layout.generation import generation_of
from ssdgram.layout.journal import Journal
from ssdgram.layout.manifest import (
    MANIFEST,
    ColumnFile,
    Manifest,
    SourceTensor,
    TokenMapFile,
    column_path,
    sync_folder,
)
from ssdgram.layout.page import PAGE_BYTES, page_fault, rows_per_page, signed
from ssdgram.layout.pipeline import Column, Pipeline, Progress
from ssdgram.layout.source import RowSource, Shards
from ssdgram.token_map import map_digest, token_map

log = logging.getLogger("ssdgram")
MAX_JOBS = 16
PROBES = 8                                                   # pages looked at to believe that a journaled column is there
SPARE_BYTES = 16 << 20                                       # token map, manifest, the file systems' own books


def convert(ckpt: str | os.PathLike[str], out: str | os.PathLike[str], stripe: Sequence[str | os.PathLike[str]] = (),
            jobs: int | None = None, progress: Progress | None = None) -> Manifest:
    """Convert the checkpoint folder `ckpt` into a store in folder `out`, going on where a killed run stopped.

    `stripe`: folders that the columns are spread over (column c to number c % len); none: `out` itself, or those of the run
    that is gone on with. `jobs`: columns in work at once (default: as many as the process has CPUs). `progress(bytes done,
    bytes in all)` is called now and then. NoSpaceError before the first byte if there is no room; ConversionError if `out`
    holds something else; ConfigError, CheckpointError, TokenMapError for a source that is not as it must be.
    """
    if jobs is not None and jobs < 1:
        raise ConversionError(f"jobs = {jobs}: expected at least 1")
    out = Path(os.path.abspath(out))
    checkpoint = open_checkpoint(ckpt)
    stripes = _stripes(out, stripe)
    try:
        with Shards() as shards:
            plan = _Plan(checkpoint, open_sources(checkpoint, shards), out, stripes)
            plan.check_room()
            for folder in (out, *plan.roots):
                folder.mkdir(parents=True, exist_ok=True)
            with _locked([out, *plan.roots]):
                return plan.run(min(jobs or _cpus(), MAX_JOBS), progress)
    except OSError as error:
        if isinstance(error, SSDGramError):
            raise
        where = error.filename or out
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{where}: {error.strerror}; finished columns stay: make room and run the same command "
                               f"again") from error
        raise ConversionError(f"{where}: {error.strerror or error}; finished columns stay: run the same command again when "
                              f"the cause is removed") from error


def open_sources(checkpoint: Checkpoint, shards: Shards) -> list[tuple[RowSource, RowSource]]:
    """Codes and scales of each layer's table, readable by row number. Rows without scales have scales of 0 bytes."""
    geometry = checkpoint.geometry
    return [(RowSource(table.codes, geometry.code_bytes, shards), RowSource(table.scales, geometry.scale_bytes, shards))
            for table in checkpoint.tables]


class _Plan:
    """What is to be written where, and what of it is there already."""

    def __init__(self, checkpoint: Checkpoint, sources: list[tuple[RowSource, RowSource]], out: Path,
                 stripes: tuple[str, ...]) -> None:
        geometry = checkpoint.geometry
        self.checkpoint, self.geometry, self.sources = checkpoint, geometry, sources
        self.out, self.stripes = out, stripes
        self.roots = [Path(root) for root in stripes] or [out]
        self.generation = 0
        self.columns = [
            Column(index * geometry.columns + column, layer, column, geometry.offsets[index][column],
                   geometry.primes[index][column], self.roots[column % len(self.roots)] / column_path(layer, column),
                   *sources[index])
            for index, layer in enumerate(geometry.layers) for column in range(geometry.columns)]
        self.size = sum(column.size for column in self.columns)

    def check_room(self) -> None:
        """NoSpaceError unless every file system has room for what is still to be written there."""
        if (self.out / MANIFEST).exists():
            return
        journal = Journal.load(self.out)
        finished = journal.finished if journal else {}
        need: dict[int, int] = {}
        places: dict[int, Path] = {}
        for column in self.columns:
            place = _existing(column.path)
            device = os.stat(place).st_dev
            places.setdefault(device, place if place.is_dir() else place.parent)
            need.setdefault(device, SPARE_BYTES)
            if column.index not in finished:
                need[device] += max(0, column.size - _allocated(column.path))
        for device, wanted in need.items():
            free = shutil.disk_usage(places[device]).free
            if free < wanted:
                raise NoSpaceError(f"{places[device]}: {_bytes(wanted)} are needed there, {_bytes(free)} are free; the store "
                                   f"takes {_bytes(self.size)} in all: make room, or spread it over drives with --stripe")

    def run(self, jobs: int, progress: Progress | None) -> Manifest:
        """Do what is left to do. The folders are locked."""
        self.generation = generation_of(self.checkpoint, self.sources)
        if (self.out / MANIFEST).exists() and (manifest := self._finished_store()) is not None:
            return manifest
        journal = self._journal()
        for number, root in enumerate(self.roots):
            write_stripe(root, self.generation, number, len(self.roots))
        compression = self._token_map()
        for index in [index for index in journal.finished if not self._is_there(self.columns[index])]:
            log.warning("%s: journaled as finished, but not as it was written: it is written again", self.columns[index].path)
            del journal.finished[index]
        left = [column for column in self.columns if column.index not in journal.finished]
        done = self.size - sum(column.size for column in left)
        Pipeline(left, self.generation, jobs, max(12, min(4 * jobs, 32)),
                 lambda column, digest: journal.add(column.index, column.size, digest)).run(progress, done, self.size)
        for folder in {column.path.parent for column in self.columns} | set(self.roots):
            sync_folder(folder)
        manifest = self._manifest(journal, compression)
        manifest.publish(self.out)
        journal.remove()
        if progress is not None:
            progress(self.size, self.size)
        return manifest

    def _finished_store(self) -> Manifest | None:
        """The store that is already there; None after its manifest was withdrawn because files of it are missing or torn."""
        manifest = Manifest.load(self.out)
        if manifest.geometry != self.geometry or manifest.generation != self.generation:
            what = "geometry" if manifest.geometry != self.geometry else "source"
            raise ConversionError(f"{self.out} holds a store of another {what} (generation {manifest.generation:016x}; "
                                  f"{self.checkpoint.folder} has {self.generation:016x}): give another folder, or remove it")
        try:
            resolve(self.out, manifest)
            load_token_map(self.out, manifest)
        except FormatError as error:
            log.warning("%s: the manifest is withdrawn and what is missing is written again", error)
            Journal.begin(self.out, self.generation, self.stripes, {
                column.index: (file.size, file.sha256) for column, file in zip(self.columns, manifest.files, strict=True)
                if self._is_there(column)})
            (self.out / MANIFEST).unlink()
            sync_folder(self.out)
            return None
        return manifest

    def _journal(self) -> Journal:
        """The journal to go on with, or a new one, on the disk before any column is."""
        journal = Journal.load(self.out)
        if journal is None:
            for column in self.columns:
                if column.path.exists():
                    raise ConversionError(f"{column.path} exists, but {self.out} has neither a manifest nor a journal: it "
                                          f"belongs to something else; give an empty folder, or remove it")
            return Journal.begin(self.out, self.generation, self.stripes, {})
        if journal.generation != self.generation:
            raise ConversionError(f"{self.out} holds an unfinished conversion of another source (generation "
                                  f"{journal.generation:016x}; {self.checkpoint.folder} has {self.generation:016x}): give "
                                  f"another folder, or remove it")
        finished = {index: entry for index, entry in journal.finished.items() if 0 <= index < len(self.columns)}
        return Journal.begin(self.out, self.generation, self.stripes, finished)      # without a torn line

    def _is_there(self, column: Column) -> bool:
        """Whether the file of a journaled column has its size and, at a few places, its pages. Cheap: a few reads."""
        buffer = aligned_buffer(PAGE_BYTES)
        address, generation = buffer.ctypes.data, signed(self.generation)
        row_bytes = column.codes.row_bytes + column.scales.row_bytes
        try:
            with open(column.path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != column.size:
                    return False
                for number in {(column.pages - 1) * probe // (PROBES - 1) for probe in range(PROBES)}:
                    if os.preadv(file.fileno(), [buffer.data], number * PAGE_BYTES) != PAGE_BYTES:
                        return False
                    if page_fault(address, row_bytes, column.rows, generation, column.layer, column.column, number):
                        return False
        except FileNotFoundError:
            return False
        return True

    def _token_map(self) -> TokenMapFile | None:
        """Make token_map.npy, if the model compresses its vocabulary."""
        if self.geometry.compressed_vocab_size is None:
            return None
        tokenizer = self.checkpoint.tokenizer
        if not tokenizer.exists():
            raise ConversionError(f"{tokenizer} is missing: this model compresses its vocabulary to "
                                  f"{self.geometry.compressed_vocab_size} ids, which follow from the tokenizer; put the model's "
                                  f"own tokenizer.json there and run the same command again")
        table = self.geometry.checked_map(token_map(tokenizer))
        write_token_map(self.out, table)
        return TokenMapFile(len(table), self.geometry.compressed_vocab_size, map_digest(table))

    def _manifest(self, journal: Journal, compression: TokenMapFile | None) -> Manifest:
        geometry = self.geometry
        return Manifest(
            geometry=geometry, generation=self.generation, row_bytes=geometry.row_bytes,
            rows_per_page=rows_per_page(geometry.row_bytes), roots=self.stripes,
            files=tuple(ColumnFile(column.layer, column.column, column.rows, column.pages, column.size,
                                   journal.finished[column.index][1]) for column in self.columns),
            token_map=compression, global_scales=self.checkpoint.global_scales,
            source_name=self.checkpoint.folder.resolve().name,
            source=tuple(SourceTensor(tensor.name, tensor.dtype, tensor.shape)
                         for table in self.checkpoint.tables for tensor in table.tensors))


def _stripes(out: Path, given: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The stripes to use: those given, or those of the store or unfinished conversion in `out`. They must not contradict."""
    stripes = tuple(os.path.abspath(root) for root in given)
    if len({os.path.realpath(root) for root in stripes}) != len(stripes):
        raise ConversionError(f"the stripes {list(stripes)} name a folder twice: give each drive's folder once")
    if (out / MANIFEST).exists():
        try:
            found = Manifest.load(out).roots
        except ManifestError as error:
            raise ConversionError(f"{error}; {out} holds no store of this version: give another folder, or remove it") from error
    elif journal := Journal.load(out):
        found = journal.roots
    else:
        return stripes
    if stripes and stripes != found:
        raise ConversionError(f"{out}: the conversion there has the stripes {list(found)}, this call {list(stripes)}: give the "
                              f"same ones in the same order, or none, or remove it")
    return found


@contextlib.contextmanager
def _locked(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the folders for one converter. The lock is the kernel's and writes nothing; it ends with the process."""
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConversionError(f"{folder}: another conversion is at work there: wait for it, or stop it") from None
            except OSError as error:                         # some network file systems lock no folders
                log.warning("%s: cannot be locked (%s): see to it that no other conversion works there", folder, error.strerror)
        yield


def _existing(path: Path) -> Path:
    """The path itself if it exists, or the nearest folder above that does."""
    while not path.exists():
        path = path.parent
    return path


def _allocated(path: Path) -> int:
    """Bytes that the file already holds on the disk."""
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def _cpus() -> int:
    """CPUs of this process: its CPU set, and what its cgroup grants."""
    from ssdgram.machine import cpu_quota

    cpus = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return max(1, cpus if quota is None else min(cpus, round(quota)))


def _bytes(count: int) -> str:
    return f"{count} bytes ({count / 2**30:.1f} GiB)"
