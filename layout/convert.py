"""Conversion of a checkpoint's n-gram tables into a store (design section 4): `convert(ckpt, out)`.

    headers -> room? -> lock -> generation -> journal -> columns (blocks), token map beside -> manifest -> journal removed

Finished columns are journaled and never rewritten; a second run on a finished store writes nothing. The manifest is the last
thing written, so until then nobody can open the store. The result depends on the source alone: not on jobs, kills or resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssdgram.errors import ConversionError, FormatError, IdentityError, ManifestError, NoSpaceError
from ssdgram.geometry import Geometry
from ssdgram.layout.blocks import MAX_JOBS, Progress, default_jobs, run_blocks, threads_for
from ssdgram.layout.checkpoint import Checkpoint, open_checkpoint
from ssdgram.layout.compression import TokenMapProcess
from ssdgram.layout.direct import aligned_buffer
from ssdgram.layout.files import check_stripe, load_token_map, resolve, write_stripe, write_token_map
from ssdgram.layout.format import PAGE_BYTES, rows_per_page
from ssdgram.layout.generation import generation_of
from ssdgram.layout.journal import Journal
from ssdgram.layout.manifest import JOURNAL, MANIFEST, ColumnFile, Manifest, SourceTensor, TokenMapFile, sync_folder
from ssdgram.layout.places import Place, places
from ssdgram.layout.source import RowSource, Shards, open_sources
from ssdgram.layout.writing import check_place, missing, remove_empty, writing
from ssdgram.token_map import map_digest

log = logging.getLogger("ssdgram")
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
    for folder in (out, *map(Path, stripe)):
        check_place(folder)
    checkpoint = open_checkpoint(ckpt)
    with writing(out, "finished columns stay"):
        plan = _Plan(checkpoint, out, _stripes(out, stripe))
        for folder in (out, *plan.roots):
            _check_apart(folder, checkpoint.folder)
        plan.check_room()
        plan.check_tokenizer()
        folders = () if (out / MANIFEST).exists() else (out, *plan.roots)
        made = [place for folder in folders for place in missing(folder)]
        try:
            for folder in folders:
                folder.mkdir(parents=folder == out, exist_ok=True)       # of a stripe: a misspelt mount point is not made
            with Shards() as shards, _locked([out, *plan.roots]):
                return plan.run(open_sources(checkpoint, shards), min(jobs or default_jobs(), MAX_JOBS), progress)
        except BaseException:
            remove_empty(made)
            raise


class _Compression:
    """The token map on its way into `out`."""

    def __init__(self, geometry: Geometry, process: TokenMapProcess, out: Path) -> None:
        self.process = process
        self._geometry, self._out = geometry, out
        self._record: TokenMapFile | None = None

    def record(self) -> TokenMapFile:
        """What the manifest says of token_map.npy, once it is there. TokenMapError if it is not the model's."""
        if self._record is None:
            table = self._geometry.checked_map(self.process.result())
            write_token_map(self._out, table)
            self._record = TokenMapFile(len(table), int(table.max()) + 1, map_digest(table))
        return self._record


class _Plan:
    """What is to be written where, and what of it is there already."""

    def __init__(self, checkpoint: Checkpoint, out: Path, stripes: tuple[str, ...]) -> None:
        self.checkpoint, self.geometry = checkpoint, checkpoint.geometry
        self.out, self.stripes = out, stripes
        self.roots = [Path(root) for root in stripes] or [out]
        self.places = places(self.geometry, self.roots)
        self.size = sum(place.size for place in self.places)
        self.generation = 0

    def check_room(self) -> None:
        """NoSpaceError unless every file system has room for what is still to be written there."""
        if (self.out / MANIFEST).exists():
            return
        journal = Journal.load(self.out)
        finished = journal.finished if journal else {}
        need: dict[int, int] = {}
        folders: dict[int, Path] = {}
        for place in self.places:
            nearest = _existing(place.path)
            device = os.stat(nearest).st_dev
            folders.setdefault(device, nearest if nearest.is_dir() else nearest.parent)
            need.setdefault(device, SPARE_BYTES)
            if place.index not in finished:
                need[device] += max(0, place.size - _allocated(place.path))
        for device, wanted in need.items():
            free = shutil.disk_usage(folders[device]).free
            if free < wanted:
                raise NoSpaceError(f"{folders[device]}: {_bytes(wanted)} are needed there, {_bytes(free)} are free; the store "
                                   f"takes {_bytes(self.size)} in all: make room, or spread it over drives with --stripe")

    def check_tokenizer(self) -> None:
        """ConversionError if the token map would have nothing to come from."""
        tokenizer = self.checkpoint.tokenizer
        if self.geometry.compressed_vocab_size is not None and not (self.out / MANIFEST).exists() and not tokenizer.exists():
            raise ConversionError(f"{tokenizer} is missing: this model compresses its vocabulary to "
                                  f"{self.geometry.compressed_vocab_size} ids, which follow from the tokenizer; put the model's "
                                  f"own tokenizer.json there and run the same command again")

    def run(self, sources: Sequence[tuple[RowSource, RowSource]], jobs: int, progress: Progress | None) -> Manifest:
        """Do what is left to do. The folders are locked."""
        self.generation = generation_of(self.checkpoint, sources)
        if (self.out / MANIFEST).exists():
            manifest = self._finished_store()
            if manifest is not None:
                if (self.out / JOURNAL).exists():            # killed between the manifest and the journal's end
                    Journal(self.out, self.generation, self.stripes, {}).remove()
                return manifest
            self.check_room()
            self.check_tokenizer()
        journal = self._journal()
        for number, root in enumerate(self.roots):
            write_stripe(root, self.generation, number, len(self.roots))
        with contextlib.ExitStack() as stack:
            compression = None
            if self.geometry.compressed_vocab_size is not None:
                process = stack.enter_context(TokenMapProcess(self.checkpoint.tokenizer))
                compression = _Compression(self.geometry, process, self.out)
            self._write(journal, sources, jobs, progress, compression)
            token_map_file = compression.record() if compression else None
        for folder in {place.path.parent for place in self.places} | set(self.roots):
            sync_folder(folder)
        manifest = self._manifest(journal, token_map_file)
        manifest.publish(self.out)
        journal.remove()
        return manifest

    def _write(self, journal: Journal, sources: Sequence[tuple[RowSource, RowSource]], jobs: int, progress: Progress | None,
               compression: _Compression | None) -> None:
        """Write the columns that the journal does not have, or has and are not there."""
        from ssdgram.layout.columns import Column, compile_packing, workspace  # compiled code: after what can be refused

        for place in self.places:
            if place.index in journal.finished and not self._is_there(place):
                log.warning("%s: journaled as finished, but not as it was written: it is written again", place.path)
                del journal.finished[place.index]
        columns = [Column(place, *sources[place.layer_index], self.generation,
                          lambda place, digest: journal.add(place.index, place.size, digest))
                   for place in self.places if place.index not in journal.finished]
        done = self.size - sum(column.place.size for column in columns)

        def tick() -> None:
            if compression is not None and compression.process.done():
                compression.record()                         # raises what is wrong with the tokenizer: now, not in an hour
            if progress is not None:
                progress(done + sum(column.written for column in columns), self.size)

        compile_packing()
        geometry = self.geometry
        run_blocks(columns, jobs, threads_for(jobs), lambda: workspace(geometry.code_bytes, geometry.scale_bytes), tick)

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
        except IdentityError:
            raise                                            # a root that is not mounted: nothing to repair
        except FormatError as error:
            log.warning("%s: the manifest is withdrawn and what is missing is written again", error)
            Journal.begin(self.out, self.generation, self.stripes, {
                place.index: (file.size, file.sha256) for place, file in zip(self.places, manifest.files, strict=True)
                if self._is_there(place)})
            (self.out / MANIFEST).unlink()
            sync_folder(self.out)
            return None
        return manifest

    def _journal(self) -> Journal:
        """The journal to go on with, or a new one, on the disk before any column is."""
        journal = Journal.load(self.out)
        if journal is None:
            for place in self.places:
                if place.path.exists():
                    raise ConversionError(f"{place.path} exists, but {self.out} has neither a manifest nor a journal: it "
                                          f"belongs to something else; give an empty folder, or remove it")
            return Journal.begin(self.out, self.generation, self.stripes, {})
        if journal.generation != self.generation:
            raise ConversionError(f"{self.out} holds an unfinished conversion of another source (generation "
                                  f"{journal.generation:016x}; {self.checkpoint.folder} has {self.generation:016x}): give "
                                  f"another folder, or remove it")
        finished = {index: entry for index, entry in journal.finished.items() if 0 <= index < len(self.places)}
        if finished:                                         # an empty mount point must not pass for a lost stripe
            for number, root in enumerate(self.roots):
                check_stripe(root, self.generation, number, len(self.roots))
        return Journal.begin(self.out, self.generation, self.stripes, finished)      # without a torn line

    def _is_there(self, place: Place) -> bool:
        """Whether the file of a journaled column has its size and, at a few places, its pages. Cheap: a few reads."""
        from ssdgram.layout.page import page_fault, signed

        buffer = aligned_buffer(PAGE_BYTES)
        address, generation = buffer.ctypes.data, signed(self.generation)
        try:
            with open(place.path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != place.size:
                    return False
                for number in {(place.pages - 1) * probe // (PROBES - 1) for probe in range(PROBES)}:
                    if os.preadv(file.fileno(), [buffer.data], number * PAGE_BYTES) != PAGE_BYTES:
                        return False
                    if page_fault(address, self.geometry.row_bytes, place.rows, generation, place.layer, place.column, number):
                        return False
        except FileNotFoundError:
            return False
        return True

    def _manifest(self, journal: Journal, token_map: TokenMapFile | None) -> Manifest:
        geometry = self.geometry
        return Manifest(
            geometry=geometry, generation=self.generation, row_bytes=geometry.row_bytes,
            rows_per_page=rows_per_page(geometry.row_bytes), roots=self.stripes,
            files=tuple(ColumnFile(place.layer, place.column, place.rows, place.pages, place.size,
                                   journal.finished[place.index][1]) for place in self.places),
            token_map=token_map, global_scales=self.checkpoint.global_scales,
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


def _check_apart(folder: Path, checkpoint: Path) -> None:
    """ConversionError if the folder is the checkpoint's, or lies in it: what reads or links checkpoints would take the store along."""
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(checkpoint)):
        raise ConversionError(f"{folder} lies in the checkpoint {checkpoint}: give a folder of its own")


@contextlib.contextmanager
def _locked(folders: Sequence[Path]) -> Iterator[None]:
    """Hold the folders for one converter. The lock is the kernel's and writes nothing; it ends with the process."""
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders if folder.is_dir()):
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


def _bytes(count: int) -> str:
    return f"{count} bytes" + (f" ({count / 2**30:.1f} GiB)" if count >= 1 << 30 else "")
