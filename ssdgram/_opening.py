"""Opening a store: from a manifest, its files and a budget to the filled arrays of planner and readers.

Nothing here runs after open. It knows the manifest and the arrays; it does not know batches. Invariant: what it returns has
been checked, so the compiled loops need not look at a size, a file or a count again.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssdgram import _pages, _slots
from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._arena import rounded
from ssdgram._budget import Shape, Sizes
from ssdgram._plan_state import Plan
from ssdgram._state import State
from ssdgram.cache import sketch
from ssdgram.errors import ConfigError, FormatError, IdentityError, ReadError
from ssdgram.geometry import Geometry
from ssdgram.layout.direct import REFUSED
from ssdgram.layout.manifest import Manifest
from ssdgram.layout.page import PAGE_BYTES, describe, page_fault, signed


HOT = 3                                                      # requests (policy.frequency) that make a bundle wanted in HBM


@dataclass(frozen=True)
class Selection:
    """What of a store is served: layers and columns, in the store's order. `heads[order]`: served columns of that order."""

    layers: tuple[int, ...]                                  # decoder layers
    indices: tuple[int, ...]                                 # their positions in geometry.layers
    columns: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, geometry: Geometry, layers: Sequence[int] | None, columns: Sequence[int] | range | slice | None) -> Selection:
        """Checked against the geometry; ConfigError says what the store has."""
        chosen = geometry.layers if layers is None else tuple(operator.index(layer) for layer in layers)
        if not chosen or len(set(chosen)) != len(chosen):
            raise ConfigError(f"layers={list(chosen)}: expected some of {list(geometry.layers)}, each once")
        indices = tuple(sorted(geometry.layer_index(layer) for layer in chosen))
        if isinstance(columns, slice):
            columns = range(*columns.indices(geometry.columns))
        kept = range(geometry.columns) if columns is None else tuple(operator.index(column) for column in columns)
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= geometry.columns:
            raise ConfigError(f"columns={list(kept)}: expected ascending numbers out of 0 .. {geometry.columns - 1}")
        heads = tuple(sum(1 for column in kept if column // geometry.heads == order) for order in range(geometry.orders))
        return cls(tuple(geometry.layers[index] for index in indices), indices, tuple(kept), heads)


def slot_stride(geometry: Geometry, selection: Selection) -> int:
    """Bytes from slot to slot: the largest bundle, in whole cache lines."""
    return rounded(max(selection.heads) * geometry.row_bytes, 64)


def open_files(paths: Sequence[Path]) -> tuple[list[tuple[int, int]], list[Path]]:
    """(O_DIRECT descriptor, buffered descriptor) of each path, and the paths whose file system has no O_DIRECT."""
    pairs: list[tuple[int, int]] = []
    refused: list[Path] = []
    try:
        for path in paths:
            buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            pairs.append((-1, buffered))                     # closed with the others whatever happens next
            try:
                pairs[-1] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), buffered
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                pairs[-1] = os.dup(buffered), buffered
                refused.append(path)
    except OSError as error:
        close_files(pairs)
        advice = "raise the limit of open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else \
            "the store is not whole, or may not be read"
        raise FormatError(f"{error.filename or path}: {error.strerror}; {advice}") from error
    return pairs, refused


def close_files(pairs: Sequence[tuple[int, int]]) -> None:
    """Close all of them."""
    for pair in pairs:
        for descriptor in pair:                              # -1: was not opened
            with contextlib.suppress(OSError):
                os.close(descriptor)


def check_first_pages(manifest: Manifest, files: np.ndarray, paths: Sequence[Path]) -> None:
    """IdentityError unless the first page of every file is the one of its store, layer and column."""
    buffer = np.zeros(PAGE_BYTES, np.uint8)
    for record, path in zip(files, paths, strict=True):
        try:
            data = os.pread(int(record["buffered_fd"]), PAGE_BYTES, 0)
        except OSError as error:
            raise ReadError(f"{path}, page 0: {error.strerror}; look at the drive (dmesg), restore the file or convert again",
                            layer=int(record["layer"]), file=str(path), page=0) from error
        os.posix_fadvise(int(record["buffered_fd"]), 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        buffer[:] = 0
        buffer[:len(data)] = np.frombuffer(data, np.uint8)
        fault = int(page_fault(buffer.ctypes.data, manifest.row_bytes, int(record["rows"]), signed(manifest.generation),
                               int(record["layer"]), int(record["column"]), 0))
        if 1 <= fault & 0xFF <= 7:                           # the trailer; a damaged row is that row's reader's business
            raise IdentityError(f"{path}: its first page is {describe(fault, manifest.row_bytes, 0)}; expected generation "
                                f"{manifest.generation:016x}, layer {record['layer']}, column {record['column']}: put the right "
                                f"file there, or convert again")


def file_records(manifest: Manifest, selection: Selection, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """FILE records of the served columns, ordered by layer and column, so that a bundle's files follow each other."""
    geometry = manifest.geometry
    records = np.zeros(len(pairs), s.FILE)
    position, group_before = 0, -1
    for number, (index, column) in enumerate((i, c) for i in selection.indices for c in selection.columns):
        file = manifest.files[index * geometry.columns + column]
        order = column // geometry.heads
        group = index * geometry.orders + order
        position = position + 1 if group == group_before else 0
        group_before = group
        records[number] = (*pairs[number], file.layer, column, group, position, selection.heads[order], 0, file.rows, file.pages)
    return records


def group_records(geometry: Geometry, selection: Selection) -> np.ndarray:
    """GROUP records of the served layers, by layer and order; an order without served columns has no heads."""
    records = np.zeros(len(selection.layers) * geometry.orders, p.GROUP)
    file = 0
    for layer, index in enumerate(selection.indices):
        for order in range(geometry.orders):
            heads = selection.heads[order]
            records[layer * geometry.orders + order] = (index * geometry.orders + order, heads, file, order, layer)
            file += heads
    return records


def gather_groups(selection: Selection) -> np.ndarray:
    """int64 [orders, 2]: rows of an order's bundles here, and its first output column (as `kernels.gather_cpu` takes it)."""
    heads = np.array(selection.heads, np.int64)
    return np.stack([heads, np.cumsum(heads) - heads], axis=1)


def shape_of(geometry: Geometry, selection: Selection, vocabulary: int, readers: int, depth: int, batches: int,
             hbm_slots: int = 0, slab_slots: int | None = None, crew: int = 0) -> Shape:
    """What the budget is divided by."""
    return Shape(layers=len(selection.layers), orders=geometry.orders, files=len(selection.layers) * len(selection.columns),
                 vocabulary=vocabulary, stride=slot_stride(geometry, selection), heads=max(selection.heads), readers=readers,
                 depth=depth, batches=batches, hbm_slots=hbm_slots, slab_slots=slab_slots, crew=crew)


def fill(state: State, plan: Plan, *, manifest: Manifest, selection: Selection, files: np.ndarray, token_map: np.ndarray,
         sizes: Sizes, shape: Shape, owner: tuple[int, int], background_depth: int, retries: int, spin_ns: int,
         degraded_ns: int) -> None:
    """Everything that planner and readers find when they start."""
    geometry = manifest.geometry
    state.files[:] = files
    for name, value in ((s.P_READERS, shape.readers), (s.P_DEPTH, sizes.depth), (s.P_BACKGROUND_DEPTH, background_depth),
                        (s.P_ROWS_PER_PAGE, manifest.rows_per_page), (s.P_CODE_BYTES, geometry.code_bytes),
                        (s.P_SCALE_BYTES, geometry.scale_bytes), (s.P_SLOT_STRIDE, shape.stride),
                        (s.P_GENERATION, signed(manifest.generation)), (s.P_RETRIES, retries), (s.P_SPIN_NS, spin_ns),
                        (s.P_DONE_CAPACITY, sizes.pages), (s.P_RING_CAPACITY, 2 * sizes.pages)):
        state.params[name] = value
    state.pages["target"] = -1
    state.claims[:] = 1
    plan.token_map[:] = token_map
    plan.multipliers[:] = geometry.multiplier_array[list(selection.indices)]
    plan.groups[:] = group_records(geometry, selection)
    plan.group_index[:] = -1
    plan.group_index[plan.groups["number"]] = np.arange(len(plan.groups))
    for name, value in ((p.PP_LAYERS, shape.layers), (p.PP_ORDERS, shape.orders), (p.PP_GROUPS, shape.groups),
                        (p.PP_SLOTS, sizes.slots), (p.PP_SETS, sizes.sets), (p.PP_BATCHES, shape.batches), (p.PP_PAGES, sizes.pages),
                        (p.PP_TARGETS, len(state.targets)), (p.PP_BUCKETS, len(plan.buckets)), (p.PP_RULE, geometry.rule),
                        (p.PP_FILL, geometry.fill(token_map)), (p.PP_RANK, owner[0]), (p.PP_WORLD, owner[1]),
                        (p.PP_REQUESTS, len(plan.requests)), (p.PP_SPIN_NS, spin_ns), (p.PP_DEGRADED_NS, degraded_ns),
                        (p.PP_STEP_PAGES, max(sizes.pages // 4, shape.heads)), (p.PP_BATCH_LINE, p.batch_line(shape.layers)),
                        (p.PP_VOCABULARY, geometry.vocabulary(token_map)), (p.PP_HOT, HOT), (p.PP_CREW, shape.crew)):
        plan.params[name] = value
    plan.control[p.C_QUEUES:p.C_QUEUES + 4] = -1
    _slots.free_all(plan.control, plan.slots)
    _slots.free_hbm_slots(plan.control, plan.hbm)
    _pages.free_all(plan.control, state.pages, state.targets, plan.buckets)
    _slots.directory_init(plan.directory)
    _slots.overflow_init(plan.overflow)
    sketch.init(plan.sketch)
