"""The placements with a GPU at the end: the whole table in its memory, or pinned and read in place; and where rows arrive there.

    hbm         a row lookup over the table in GPU memory
    dram-uva    the same lookup over a pinned table, row by row over PCIe, on a side stream if it is begun ahead (as vLLM does)

The lookup is vLLM 0.33.0's own kernel if its file is there (bench/peers/vllm_lookup.py), else the one below; the report says which.
Both hash on the GPU, with our kernel, to int32 ids [T, layers, columns], which is where vLLM's own hash puts them. What the CPU
placements gather lands in pinned memory, is copied, and becomes bf16 in torch. Every result is bfloat16 [T, columns, dim] on the
device. Invariant: nothing here is imported on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ssdgram import staging
from ssdgram.bench.gpu_timing import GIB, HostMemory
from ssdgram.bench.peers.vllm_lookup import Lookup, load
from ssdgram.bench.warmness.placements import (
    DramCopy,
    HostTable,
    Landing,
    Placement,
    Ssdgram,
    SsdMmap,
    SsdPread,
    all_in,
)
from ssdgram.bench.warmness.text import Step
from ssdgram.errors import ConfigError, UnavailableError
from ssdgram.geometry import Geometry
from ssdgram.kernels.gather import scale_value
from ssdgram.kernels.hash import OUTPUT, PLE_RULE
from ssdgram.kernels.hash_gpu import NO_FAULT, Hash
from ssdgram.kernels.launch import Launch
from ssdgram.layout.manifest import Manifest
from ssdgram.sequence import cuts
from ssdgram.store import Store

SORTED_FROM = 256                                            # tokens from which vLLM's pinned lookup is faster with sorted ids
COPY_BYTES = 1 << 26
BLOCK = 16


class DeviceLanding(Landing):
    """Pinned buffers, and the rows of every layer on the device, bfloat16 [most * columns, dim]."""

    def __init__(self, geometry: Geometry, token_map: np.ndarray | None, most: int, device: torch.device) -> None:
        if geometry.encoding != "fp8_ue8m0":
            raise ConfigError(f"rows are {geometry.encoding}: on a GPU this bench knows fp8_ue8m0 (DeepSeek-V4.1) alone")
        self.device, self._pinned = device, []               # type: ignore[var-annotated]
        super().__init__(geometry, token_map, most)
        count, layers = most * geometry.columns, len(geometry.layers)
        self.rows = [torch.zeros(count, geometry.row_dim, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        self._inverse = [torch.zeros(count, dtype=torch.int64).pin_memory() for _ in range(layers)]
        self._side = torch.cuda.Stream(device)

    def _memory(self, rows: int, size: int) -> np.ndarray:
        tensor = torch.zeros(rows, size, dtype=torch.uint8).pin_memory()
        self._pinned.append(tensor)
        array: np.ndarray = tensor.numpy()
        return array

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def deliver_split(self, layer: int, rows: int, count: int, inverse: np.ndarray | None) -> None:
        values = self._values(self._to_device(self.codes[layer][:rows]), self._to_device(self.scales[layer][:rows]))
        if inverse is not None:
            self._inverse[layer][:count].numpy()[:] = inverse
            values = values.index_select(0, self._inverse[layer][:count].to(self.device, non_blocking=True))
        self.rows[layer][:count].copy_(values)

    def deliver_whole(self, layer: int, count: int) -> None:
        whole = self._to_device(self.whole[layer][:count])
        codes = self.geometry.code_bytes
        self.rows[layer][:count].copy_(self._values(whole[:, :codes].contiguous(), whole[:, codes:].contiguous()))

    def _values(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """bf16(code * 2^(scale - 127)) (spec A7): codes uint8 [N, dim], scales uint8 [N, dim / 32], 1 .. 254."""
        factors = (scales.to(torch.int32) << 23).view(torch.float32)
        values = codes.view(torch.float8_e4m3fn).to(torch.float32).view(len(codes), scales.shape[1], -1) * factors[:, :, None]
        return values.view(len(codes), -1).to(torch.bfloat16)

    def result(self, layer: int, count: int, split: bool) -> np.ndarray:
        array: np.ndarray = self.rows[layer][:count].view(torch.int16).cpu().numpy()
        return array

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    @contextlib.contextmanager
    def beside(self) -> Any:
        """A thread's own stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            yield


class PinnedTable(HostTable):
    """The whole table in memory that the GPU reads in place, in huge pages."""

    def _memory(self, size: int) -> np.ndarray:
        self.memory = HostMemory(size, huge=True)
        array: np.ndarray = self.memory.tensor.numpy()[:size]
        return array

    def close(self) -> None:
        super().close()
        self.memory.close()


# ---------------------------------------------------------------- row lookups


@triton.jit
def rows_kernel(codes, scales, ids, out, count, stride, COLUMNS: tl.constexpr, DIM: tl.constexpr,  # type: ignore[no-untyped-def]
                BLOCK: tl.constexpr):
    """The first `count` rows of ids [T, COLUMNS], `stride` entries from one token to the next, one after the other, as bf16."""
    for tile in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        inside = row < count
        number = tl.load(ids + row // COLUMNS * stride + row % COLUMNS, mask=inside, other=0).to(tl.int64)
        lane = tl.arange(0, DIM)
        part = tl.arange(0, DIM // 32)
        code = tl.load(codes + number[:, None] * DIM + lane[None, :], mask=inside[:, None], other=0)
        scale = tl.load(scales + number[:, None] * (DIM // 32) + part[None, :], mask=inside[:, None], other=0)
        values = tl.reshape(code, [BLOCK, DIM // 32, 32]).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        values = tl.reshape(values * scale_value(scale)[:, :, None], [BLOCK, DIM])
        tl.store(out + row.to(tl.int64)[:, None] * DIM + lane[None, :], values.to(out.dtype.element_ty), mask=inside[:, None])


class OwnLookup:
    """Row-by-row lookup over codes uint8 [R, dim] and scales uint8 [R, dim / 32]: device tensors, or registered host memory."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales
        self.programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def __call__(self, ids: torch.Tensor, out: torch.Tensor, *, background: bool = False) -> None:
        """ids int32 [T, columns], of every token one behind the other -> out bfloat16 [T, columns, dim]."""
        grid = min(triton.cdiv(ids.numel(), BLOCK), self.programs // 2 if background else self.programs)
        rows_kernel[(grid,)](self.codes, self.scales, ids, out, ids.numel(), ids.stride(0), COLUMNS=ids.shape[1],
                             DIM=self.codes.shape[1], BLOCK=BLOCK)


class GpuRowIds:
    """Flat tokens on the device to row ids there, by our hash kernel: one launch for all layers."""

    def __init__(self, geometry: Geometry, token_map: np.ndarray | None, most: int, device: torch.device) -> None:
        table = geometry.checked_map(token_map)
        self.hash = Hash(geometry.multiplier_array, geometry.prime_array, geometry.offset_array, fill=geometry.fill(table),
                         vocabulary=geometry.vocabulary(table), token_map=table if len(table) else None,
                         rule="ple" if geometry.rule == PLE_RULE else "engram", device=device)
        words = [torch.int32, torch.uint8, torch.int32, torch.int32] + [torch.int64] * 4 + [torch.int32, torch.int32, 1, 1, 1]
        compiled = self.hash.launch(False, True)
        self._launch = Launch(compiled.kernel, words, compiled.constants, warps=2)       # the same, but for rows of int32
        self._rows = torch.empty(most, self.hash.layers, self.hash.columns, dtype=torch.int32, device=device)
        self._fault = torch.full([1], NO_FAULT, dtype=torch.int32, device=device)

    def __call__(self, flat: torch.Tensor, length: int, count: int) -> torch.Tensor:
        """int32 [count, layers, columns] of `packed` tokens on the device; valid until the next call."""
        tokens, ranks, flags = parts(flat, length)
        h = self.hash
        self._launch((-(-length // h.BLOCK), h.layers), tokens, flags, ranks, flags if h.token_map is None else h.token_map, h.multipliers,
                     h.primes, h.offsets, h.multipliers, self._rows, self._fault, length, h.fill, h.vocabulary)
        return self._rows[:count]


def packed(step: Step, length: int = 0) -> torch.Tensor:
    """A step's flat tokens (int32), the running count of those that have rows (int32) and their flags (uint8) in one buffer.

    `length`: at least so many of each; what is filled up takes no part.
    """
    more = max(0, length - len(step.sequence.flat_tokens))
    tokens, flags = np.pad(step.sequence.flat_tokens, (0, more)), np.pad(step.sequence.flat_flags, (0, more))
    ranks = np.cumsum((flags & OUTPUT) != 0, dtype=np.int32)
    return torch.from_numpy(np.concatenate([tokens.view(np.uint8), ranks.view(np.uint8), flags]))


def parts(flat: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ranks and flags of a `packed` buffer."""
    return flat[:4 * length].view(torch.int32), flat[4 * length:8 * length].view(torch.int32), flat[8 * length:]


class RowLookup(Placement):
    """A lookup kernel over a whole table, wherever its tensors are.

    A lookup brings the tokens to the device in one copy and hashes them there. In the step model they are there already, as an
    engine's are, and the hash alone is in its time.
    """

    on_host = False

    def __init__(self, geometry: Geometry, landing: DeviceLanding, tables: list[tuple[torch.Tensor, torch.Tensor]], pinned: bool) -> None:
        super().__init__(geometry, landing)
        module = load()
        self.kernel = "vLLM 0.33.0" if module is not None else "ours, row by row"
        self._lookups: list[Any] = [OwnLookup(*table) if module is None else Lookup(module, *table) for table in tables]
        self._sorts = pinned and module is not None
        self._pinned, self._tokens = pinned, {}              # type: ignore[var-annotated]
        self._device, self._rows = landing.device, landing.rows
        self._stream = torch.cuda.Stream(landing.device)
        self._hash = GpuRowIds(geometry, landing.row_ids.token_map, landing.most, landing.device)
        self.bytes = sum(codes.numel() + scales.numel() for codes, scales in tables)

    def prepare(self, steps: list[Step]) -> None:
        for step in steps:
            if id(step) not in self._tokens:
                host = packed(step).pin_memory()
                self._tokens[id(step)] = step, host, host.to(self._device)

    def lookup(self, step: Step) -> float:
        begin = time.perf_counter()
        if id(step) not in self._tokens:
            self.prepare([step])
        _, host, there = self._tokens[id(step)]
        there.copy_(host, non_blocking=True)
        super().lookup(step)
        return time.perf_counter() - begin

    def gather(self, step: Step, layer: int, background: bool = False) -> None:
        if id(step) not in self._tokens:
            self.prepare([step])
        self.look_up(self._tokens[id(step)][2], len(step.sequence.flat_tokens), len(step), layer, background)

    def look_up(self, flat: torch.Tensor, length: int, count: int, layer: int, background: bool = False) -> None:
        """Launch the lookup of `packed` tokens on the device, `count` of which have rows; layer 0 comes first, and hashes for all."""
        if layer == 0:
            self._hashed = self._hash(flat, length, count)
        ids = self._hashed[:, layer]
        columns = self.geometry.columns
        out = self._rows[layer][:count * columns].view(count, columns, -1)
        if self._sorts and count >= SORTED_FROM:
            self._lookups[layer].sorted(ids, out, background=background)
        else:
            self._lookups[layer](ids, out, background=background)

    def begin(self, step: Step) -> Any:
        """Both layers on a stream of their own and half of the multiprocessors, an event behind each: what vLLM does."""
        events = []
        with torch.cuda.stream(self._stream):
            for layer in range(len(self.geometry.layers)):
                self.gather(step, layer, background=True)
                events.append(torch.cuda.Event())
                events[-1].record()
        return events

    def take(self, begun: Any, step: Step, layer: int) -> None:
        torch.cuda.current_stream().wait_event(begun[layer])

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        return {"hit_rate": all_in("dram" if self._pinned else "hbm", self.geometry), "reads": 0, "bytes_read": 0}

    def close(self) -> None:
        super().close()
        self._lookups, self._tokens = [], {}


class Hbm(RowLookup):
    """The table in GPU memory."""

    name = "hbm"


class DramUva(RowLookup):
    """The table pinned, read by the GPU over PCIe."""

    name = "dram-uva"

    def pcie_bytes(self, step: Step) -> int:
        return sum(ids.size for ids in step.ids) * self.geometry.row_bytes

    @property
    def held_bytes(self) -> int:
        return self.bytes

    pinned_bytes = held_bytes


# ---------------------------------------------------------------- the CPU's placements, rows copied to the device


class DeviceDramCopy(DramCopy):
    """One copy of all rows."""

    def pcie_bytes(self, step: Step) -> int:
        return sum(ids.size for ids in step.ids) * self.geometry.row_bytes


class DeviceSsdMmap(SsdMmap):
    """Distinct rows and the list that expands them."""

    def pcie_bytes(self, step: Step) -> int:
        return sum(len(np.unique(ids)) * self.geometry.row_bytes + 8 * ids.size for ids in step.ids)


class DeviceSsdPread(SsdPread):
    """One copy of all rows."""

    def pcie_bytes(self, step: Step) -> int:
        return sum(ids.size for ids in step.ids) * self.geometry.row_bytes


class DeviceSsdgram(Ssdgram):
    """A store on the GPU: bf16 rows gathered from its slots, for a lookup and a step in line by `Store.staging`. `hbm`: its GPU memory
    (of queue gds: all of its bundles)."""

    def __init__(self, geometry: Geometry, landing: DeviceLanding, paths: list[Path], hbm: int = 0) -> None:
        super().__init__(geometry, landing, paths)
        self.hbm = hbm
        self._outs = [rows.view(landing.most, geometry.columns, geometry.row_dim) for rows in landing.rows]
        self._staging: Any = None

    def use(self, store: Store) -> None:
        super().use(store)
        self._staging = store.staging(dict(zip(self.geometry.layers, self._outs, strict=True)))

    def close_store(self) -> None:
        self._staging = None
        super().close_store()

    def _stage(self, step: Step) -> None:
        """All layers' rows, on their way when this returns."""
        if self._staging is None:
            raise RuntimeError("no store is open")
        self._staging.fill(step.sequence, timeout_s=120)

    def lookup(self, step: Step) -> float:
        begin = time.perf_counter()
        self._stage(step)
        waited = time.perf_counter() - begin
        self.landing.finish()
        return waited

    def fetch(self, begun: Any, step: Step, layer: int) -> Any:
        """The first call brings all layers: a store has no other way."""
        if layer == 0:
            self._stage(step)
        return None

    def _rows(self, batch: Any, step: Step, layer: int) -> None:
        batch.rows(self.geometry.layers[layer], out=self._outs[layer][:len(step)])

    def pcie_bytes(self, step: Step) -> int:
        """Whole bundles, as if none were in HBM: of a large piece the distinct ones, of a small one those of every position."""
        rows = sum(self._crossing(ids[start:stop], start) for start, stop in cuts(len(step), staging.PIECES) for ids in step.ids)
        return rows * self.geometry.row_bytes

    def _crossing(self, ids: np.ndarray, start: int) -> int:
        """Rows of a piece (int64 [positions, columns]) that cross the link. Its graph, if it has one, says how it is gathered."""
        sizes = [size for first, size in staging.graphs_of(self.landing.most) if first == start and size >= len(ids)]
        if min(sizes, default=len(ids)) < staging.DISTINCT:
            return int(ids.size)
        heads = self.geometry.heads
        return sum(len(np.unique(ids[:, first:first + heads], axis=0)) * heads for first in range(0, ids.shape[1], heads))

    @property
    def pinned_bytes(self) -> int:
        if self.store is None or self.store._cuda is None:
            return 0
        return self.store._arena.size + self.store._cuda.pool.bytes


class HotSsdgram(DeviceSsdgram):
    """The same store with a tier of its hottest bundles in GPU memory beside the DRAM budget; warm: the warm text is there."""

    name = "ssdgram-hbm"
    states = ("warm",)
    heated = True

    def pcie_bytes(self, step: Step) -> int:
        """None but for a bundle that is not there; those are not counted."""
        return 0


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of a table in GPU memory, by pieces of ordinary memory: one copy may not reach over memory that was registered in parts."""
    tensor = torch.empty(array.shape, dtype=torch.uint8, device=device)
    step = max(1, COPY_BYTES // array.shape[1])
    for start in range(0, len(array), step):
        tensor[start:start + step].copy_(torch.from_numpy(array[start:start + step].copy()))
    return tensor


class Framed(Placement):
    """A warm decode step with everything behind layer 0 in one CUDA graph, lookups included: what an engine's FULL graphs are."""

    def __init__(self, whole: Placement) -> None:
        super().__init__(whole.geometry, whole.landing)
        self.whole, self.name = whole, f"{whole.name}-frame"
        self._graph: Any = None

    def ready(self, compute: Any, steps: list[Step], parts: list[int]) -> None:
        """Capture the graph of these steps, all of one size; `parts`: layers behind each lookup."""
        self.drop()
        self._make_room(steps)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):                      # whatever is made at its first use is there when it is captured
            self._warm_up()
            compute.launch(1)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for k, layers in enumerate(parts):
                self._look_up(k)
                compute.launch(layers)
        self._graph = graph

    def _make_room(self, steps: list[Step]) -> None:
        """Memory at fixed addresses for what a step brings."""
        raise NotImplementedError

    def _warm_up(self) -> None:
        """The lookups once, if that makes something."""

    def _look_up(self, k: int) -> None:
        """Launch the lookup of the k-th layer."""
        raise NotImplementedError

    def whole_step(self, step: Step, compute: Any, first: int) -> float:
        """Seconds of a step; `first`: layers before the first lookup."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget the graph and what belongs to it."""
        self._graph = None

    def snapshot(self) -> Any:
        return self.whole.snapshot()

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        return self.whole.account(before, after, steps, drive_bytes, major_faults)


class FramedRows(Framed):
    """The hash and the row lookups, of tokens that lie at one place on the device, as an engine's do when a step begins."""

    whole: RowLookup

    def _make_room(self, steps: list[Step]) -> None:
        self._length, self._count = max(len(step.sequence.flat_tokens) for step in steps), len(steps[0])
        device = self.whole._device
        self._tokens = {id(step): (step, packed(step, self._length).to(device)) for step in steps}
        self._flat = next(iter(self._tokens.values()))[1].clone()

    def _warm_up(self) -> None:
        for k in range(len(self.geometry.layers)):
            self._look_up(k)

    def _look_up(self, k: int) -> None:
        self.whole.look_up(self._flat, self._length, self._count, k)

    def whole_step(self, step: Step, compute: Any, first: int) -> float:
        self._flat.copy_(self._tokens[id(step)][1])
        compute.begin()
        compute.run(first)
        self._graph.replay()
        seconds: float = compute.finish()
        return seconds

    def drop(self) -> None:
        super().drop()
        self._tokens = {}


class FramedStore(Framed):
    """Both gathers of a store, by `Store.frame`: the slots of both layers have to be there before the graph starts."""

    whole: Ssdgram
    _frame: Any = None

    def _make_room(self, steps: list[Step]) -> None:
        self._count, self._frame = len(steps[0]), self.whole.opened.frame(len(steps[0]))

    def _look_up(self, k: int) -> None:
        self._frame.rows(self.geometry.layers[k], out=self.whole._outs[k][:self._count])         # type: ignore[attr-defined]

    def whole_step(self, step: Step, compute: Any, first: int) -> float:
        compute.begin()
        compute.run(first)
        with self.whole.opened.prefetch(step.sequence) as batch:
            try:
                self._frame.load(batch)
                self._graph.replay()
            except BaseException:                            # not launched: its slots are not waited for
                self._frame.discard()
                raise
            seconds: float = compute.finish()
        return seconds

    def drop(self) -> None:
        """Frame and graph belong to a store."""
        super().drop()
        self._frame = None


def framed(placements: dict[str, Placement], stores: dict[str, Ssdgram]) -> dict[str, Framed]:
    """The warm steps in one graph, by name: of the lookups over whole tables, and of the stores."""
    made: list[Framed] = [FramedRows(placement) for placement in placements.values() if isinstance(placement, RowLookup)]
    made += [FramedStore(store) for store in stores.values()]
    return {frame.name: frame for frame in made}


def makers(manifest: Manifest, paths: list[Path], checkpoint: Path | None, token_map: np.ndarray | None, most: int, name: str, hbm: int,
           gds: bool, stack: contextlib.ExitStack) -> dict[str, Callable[[], Placement]]:
    """How each placement is made; the pinned table is made once, by the first that wants it. `hbm`: GPU memory of ssdgram-hbm, or of
    ssdgram itself with queue `gds`."""
    geometry, device = manifest.geometry, torch.device(name)
    landing = DeviceLanding(geometry, token_map, most, device)
    made: list[PinnedTable] = []

    def table() -> PinnedTable:
        if not made:
            begun = time.monotonic()
            made.append(PinnedTable(manifest, paths))
            stack.callback(made[0].close)
            print(f"  pinned table of {made[0].bytes / GIB:.1f} GiB, {made[0].memory.huge_share:.0%} in huge pages: "
                  f"{time.monotonic() - begun:.0f} s", flush=True)
        return made[0]

    def tensors() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.from_numpy(codes), torch.from_numpy(scales)) for codes, scales in zip(table().codes, table().scales)]

    def mapped_checkpoint() -> Path:
        if checkpoint is None:
            raise UnavailableError("the mapped checkpoint is not there: give --checkpoint, the folder that the store was converted from")
        return checkpoint

    hot: dict[str, Callable[[], Placement]] = {"ssdgram-hbm": lambda: HotSsdgram(geometry, landing, paths, hbm)}
    return (hot if hbm and not gds else {}) | {
        "hbm": lambda: Hbm(geometry, landing, [(on_device(codes, device), on_device(scales, device))
                                               for codes, scales in zip(table().codes, table().scales)], pinned=False),
        "dram-uva": lambda: DramUva(geometry, landing, tensors(), pinned=True),
        "dram-copy": lambda: DeviceDramCopy(geometry, landing, table()),
        "ssd-mmap": lambda: DeviceSsdMmap(geometry, landing, mapped_checkpoint()),
        "ssd-pread": lambda: DeviceSsdPread(geometry, landing, manifest, paths),
        "ssdgram": lambda: DeviceSsdgram(geometry, landing, paths, hbm if gds else 0),
    }
