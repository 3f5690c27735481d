"""Where a table may be, one class a placement, all with the same methods: look up a step, or begin it and take layer by layer.

    dram-copy    the whole table in memory; the CPU gathers rows, one copy
    ssd-mmap     the checkpoint mapped into memory; distinct rows gathered by NumPy, expanded at the end (the public mmap designs)
    ssd-pread    the page files read by a pool of threads, one row a read
    ssdgram      a store; its state (cold, mixed, steady, warm) is states.py's business

Rows arrive in a Landing: on a CPU the bytes of all rows, with a GPU (device.py) bf16 rows in its memory. A lookup begins with token
ids in host memory, for all: the hash to row ids is in everybody's time. Invariant: all deliver the same rows of the same table.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram import machine
from ssdgram.bench import mapped
from ssdgram.bench.warmness.meter import cached_bytes
from ssdgram.bench.warmness.sizes import WARMNESS
from ssdgram.bench.warmness.text import RowIds, Step
from ssdgram.errors import BudgetError
from ssdgram.geometry import Geometry
from ssdgram.layout.checkpoint import open_checkpoint
from ssdgram.layout.manifest import Manifest
from ssdgram.layout.page import PAGE_BYTES
from ssdgram.store import Store

THREADS = 32                                                 # of ssd-pread
MEMORY_SHARE = 0.6                                           # of the free memory that a whole table may take
COPY_ROWS = 2048                                             # least rows for a thread of dram-copy
FILL_PAGES = 1024                                            # pages read at once when a table is filled
RANDOM_BELOW = 2048                                          # lookups of fewer tokens map without read-ahead


class Landing:
    """Buffers for the rows of up to `most` tokens of every layer, in ordinary memory; what is gathered there has arrived.

    `row_ids`: how a step's tokens become row ids on the CPU.
    """

    def __init__(self, geometry: Geometry, token_map: np.ndarray | None, most: int) -> None:
        rows, layers = most * geometry.columns, len(geometry.layers)
        self.geometry, self.most = geometry, most
        self.row_ids = RowIds(geometry, token_map, most)
        self.codes = [self._memory(rows, geometry.code_bytes) for _ in range(layers)]
        self.scales = [self._memory(rows, geometry.scale_bytes) for _ in range(layers)]
        self.whole = [self._memory(rows, geometry.row_bytes) for _ in range(layers)]

    def _memory(self, rows: int, size: int) -> np.ndarray:
        return np.zeros((rows, size), np.uint8)

    def deliver_split(self, layer: int, rows: int, count: int, inverse: np.ndarray | None) -> None:
        """`rows` rows are in `codes` and `scales`; the step has `count`, of which number k is row inverse[k]."""
        whole, codes = self.whole[layer][:count], self.geometry.code_bytes
        if inverse is None:
            return                                           # codes and scales are as good as whole rows
        whole[:, :codes] = self.codes[layer][inverse]
        whole[:, codes:] = self.scales[layer][inverse]

    def deliver_whole(self, layer: int, count: int) -> None:
        """`count` rows are in `whole`."""

    def result(self, layer: int, count: int, split: bool) -> np.ndarray:
        """What arrived, uint8 [count, row_bytes]: for comparisons."""
        if split:
            return np.concatenate([self.codes[layer][:count], self.scales[layer][:count]], axis=1)
        return self.whole[layer][:count].copy()

    def finish(self) -> None:
        """Until everything delivered has arrived."""

    def beside(self) -> AbstractContextManager[Any]:
        """What a thread that works beside the caller's delivers in."""
        return nullcontext()


class Placement:
    """The base: a lookup is every layer's, one after the other, then the end of the landing."""

    name = ""
    warm_only = True                                         # its speed does not depend on any cache of files
    split = False                                            # whether codes and scales arrive apart
    on_host = True                                           # whether the caller's processor does the work of a lookup
    settling = 2                                             # lookups of a warm cell's steps before it is measured, at most
    leads_in = True                                          # whether a turn begins with an untimed lookup

    def __init__(self, geometry: Geometry, landing: Landing) -> None:
        self.geometry, self.landing = geometry, landing
        self._ahead: ThreadPoolExecutor | None = None
        self._ids: list[np.ndarray] = []

    def manner(self, tokens: int) -> str:
        """How lookups of that many tokens are done, if there is more than one way: times of one way say nothing of another."""
        return ""

    def prepare(self, steps: list[Step]) -> None:
        """Whatever a lookup of these steps is given for nothing."""

    def ids(self, step: Step, layer: int) -> np.ndarray:
        """The layer's row ids, int64 [T, columns], hashed from the step's tokens for all layers when the first is asked for."""
        if layer == 0:
            self._ids = self.landing.row_ids(step.sequence.flat_tokens, step.sequence.flat_flags)
        return self._ids[layer]

    def gather(self, step: Step, layer: int) -> None:
        """Bring the rows of the layer with that index into the landing; layer 0 comes first."""
        raise NotImplementedError

    def lookup(self, step: Step) -> float:
        """Until the rows of all layers have arrived; the seconds in which the caller could do nothing else."""
        begin = time.perf_counter()
        for layer in range(len(self.geometry.layers)):
            self.gather(step, layer)
        self.landing.finish()
        return time.perf_counter() - begin

    # ------------------------------------------------------------ for the step model

    def begin(self, step: Step) -> Any:
        """Start on all layers in a thread beside the caller's."""
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, thread_name_prefix=f"ahead-{self.name}")
        return [self._ahead.submit(self._one, step, layer) for layer in range(len(self.geometry.layers))]

    def _one(self, step: Step, layer: int) -> None:
        with self.landing.beside():
            self.gather(step, layer)
            self.landing.finish()

    def take(self, begun: Any, step: Step, layer: int) -> None:
        """Until the layer's rows are there, or are certain to be there before what the caller launches next."""
        futures: list[Future[None]] = begun
        futures[layer].result()

    def fetch(self, begun: Any, step: Step, layer: int) -> Any:
        """Without a begin: the layer's rows now. Returns what `end` is to get."""
        self.gather(step, layer)

    def end(self, begun: Any) -> None:
        """The step is done."""

    # ------------------------------------------------------------ the account

    def snapshot(self) -> Any:
        """Whatever `account` compares."""
        return None

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        """Hits, reads and bytes of the steps between two snapshots."""
        return {"hit_rate": {}, "reads": 0, "bytes_read": 0}

    def pcie_bytes(self, step: Step) -> int:
        """Bytes that a lookup moves over PCIe, computed; 0 without a GPU."""
        return 0

    @property
    def held_bytes(self) -> int:
        """Host memory that the placement needs, its landing not counted."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """Of it, pinned for a GPU."""
        return 0

    def forget(self) -> None:
        """Have the kernel drop what it holds of the placement's files."""

    def files(self) -> list[Path]:
        """The files that it reads."""
        return []

    def load(self) -> None:
        """Bring all of the files into the page cache, unless they are there to the last page."""
        files = self.files()
        if cached_bytes(files) >= sum(-(-path.stat().st_size // mapped.PAGE) * mapped.PAGE for path in files):
            return
        for path in files:
            with open(path, "rb", buffering=0) as file:
                buffer = bytearray(8 << 20)
                while file.readinto(buffer):
                    pass

    def close(self) -> None:
        """Give everything back."""
        if self._ahead is not None:
            self._ahead.shutdown()


# ---------------------------------------------------------------- a table in memory


class HostTable:
    """The whole table in ordinary memory, in a checkpoint's layout: codes [rows, code_bytes] and scales of every layer."""

    def __init__(self, manifest: Manifest, paths: list[Path]) -> None:
        geometry = manifest.geometry
        self.bytes = sum(rows * geometry.row_bytes for rows in geometry.rows_per_layer)
        free = machine.memory()[1]
        if self.bytes > MEMORY_SHARE * free:
            raise BudgetError(f"the table has {self.bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of memory are free: too little "
                              f"beside the page cache that the other placements need")
        parts = [rows * size for rows in geometry.rows_per_layer for size in (geometry.code_bytes, geometry.scale_bytes)]
        memory = self._memory(sum(-(-part // PAGE_BYTES) * PAGE_BYTES for part in parts))
        self.codes: list[np.ndarray] = []
        self.scales: list[np.ndarray] = []
        start = 0
        for rows in geometry.rows_per_layer:
            for size, tables in ((geometry.code_bytes, self.codes), (geometry.scale_bytes, self.scales)):
                tables.append(memory[start:start + rows * size].reshape(rows, size))
                start += -(-rows * size // PAGE_BYTES) * PAGE_BYTES              # kernels are slower on tables that begin anywhere
        with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
            list(pool.map(lambda number: self._fill(manifest, paths[number], number), range(len(paths))))
        mapped.drop(paths)

    def _memory(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    def _fill(self, manifest: Manifest, path: Path, number: int) -> None:
        """Copy the rows of one column's page file to their places."""
        geometry, per_page = manifest.geometry, manifest.rows_per_page
        layer, column = divmod(number, geometry.columns)
        place, left = int(geometry.offset_array[layer, column]), int(geometry.prime_array[layer, column])
        buffer = np.empty((FILL_PAGES, PAGE_BYTES), np.uint8)
        with open(path, "rb", buffering=0) as file:
            while left > 0:
                pages = (file.readinto(buffer.data.cast("B")) or 0) // PAGE_BYTES
                if pages == 0:
                    raise RuntimeError(f"{path} ends {left} rows early: run `ssdgram verify`")
                rows = buffer[:pages, :per_page * geometry.row_bytes].reshape(pages * per_page, geometry.row_bytes)[:left]
                self.codes[layer][place:place + len(rows)] = rows[:, :geometry.code_bytes]
                self.scales[layer][place:place + len(rows)] = rows[:, geometry.code_bytes:]
                place, left = place + len(rows), left - len(rows)

    def close(self) -> None:
        """Forget it."""
        self.codes, self.scales = [], []


class DramCopy(Placement):
    """The CPU gathers with a few threads (as the public designs with tables in memory do), then one copy of what it gathered."""

    name = "dram-copy"
    split = True

    def __init__(self, geometry: Geometry, landing: Landing, table: HostTable) -> None:
        super().__init__(geometry, landing)
        self.table, self._threads = table, min(16, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dram-copy")

    def gather(self, step: Step, layer: int) -> None:
        ids = self.ids(step, layer).reshape(-1)
        each = max(COPY_ROWS, -(-len(ids) // self._threads))
        starts = range(0, len(ids), each)
        if len(starts) == 1:
            self._part(ids, layer, 0)
        else:
            list(self._pool.map(lambda start: self._part(ids[start:start + each], layer, start), starts))
        self.landing.deliver_split(layer, len(ids), len(ids), None)

    def _part(self, ids: np.ndarray, layer: int, start: int) -> None:
        for table, landed in ((self.table.codes, self.landing.codes), (self.table.scales, self.landing.scales)):
            np.take(table[layer], ids, axis=0, out=landed[layer][start:start + len(ids)], mode="clip")

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        return {"hit_rate": all_in("dram", self.geometry), "reads": 0, "bytes_read": 0}

    @property
    def held_bytes(self) -> int:
        return self.table.bytes

    def close(self) -> None:
        super().close()
        self._pool.shutdown()


def all_in(tier: str, geometry: Geometry) -> dict[str, dict[str, float]]:
    """Hit rates of a placement that has everything in one tier."""
    return {tier: {str(order + 2): 1.0 for order in range(geometry.orders)}}


# ---------------------------------------------------------------- files without a store


class SsdMmap(Placement):
    """The checkpoint as memory maps: distinct ids, a NumPy gather of codes and scales, expanded where they arrive.

    Lookups of fewer than RANDOM_BELOW tokens use maps with MADV_RANDOM (each fault reads a page), longer ones the kernel's
    read-ahead: whichever is the faster of the two at that size on drives with a large read-ahead (docs/performance.md).
    """

    name = "ssd-mmap"
    warm_only = False
    settling = 1 << 30                                       # all: each of their pages is in the map's page table then

    def __init__(self, geometry: Geometry, landing: Landing, checkpoint: Path) -> None:
        super().__init__(geometry, landing)
        self.plain, self.random = mapped.MappedTables(checkpoint), mapped.MappedTables(checkpoint, random=True)
        self._files = sorted({tensor.file for table in open_checkpoint(checkpoint).tables
                              for tensor in (table.codes[0], table.scales[0])})

    def manner(self, tokens: int) -> str:
        return "random" if tokens < RANDOM_BELOW else "read-ahead"

    def gather(self, step: Step, layer: int) -> None:
        tables = self.random if self.manner(len(step)) == "random" else self.plain
        codes, scales = tables._tables[layer]
        wanted, inverse = np.unique(self.ids(step, layer).reshape(-1), return_inverse=True)
        np.take(codes, wanted, axis=0, out=self.landing.codes[layer][:len(wanted)], mode="clip")
        np.take(scales, wanted, axis=0, out=self.landing.scales[layer][:len(wanted)], mode="clip")
        self.landing.deliver_split(layer, len(wanted), len(inverse), inverse)

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        return {"hit_rate": {}, "reads": major_faults, "bytes_read": drive_bytes}

    def forget(self) -> None:
        for tables in (self.plain, self.random):
            for mapping in tables._maps:
                mapping.madvise(mmap.MADV_DONTNEED)          # what is mapped cannot be dropped
        mapped.drop(self._files)

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        super().close()
        self.plain.close()
        self.random.close()


class SsdPread(Placement):
    """A pool of threads reads the store's page files through the page cache: one row a read, nothing deduplicated."""

    name = "ssd-pread"
    warm_only = False
    settling, leads_in = 1, False                            # its lookups are slow, and much alike

    def __init__(self, geometry: Geometry, landing: Landing, manifest: Manifest, paths: list[Path]) -> None:
        super().__init__(geometry, landing)
        self._paths, self._per_page = paths, manifest.rows_per_page
        self._descriptors = np.array([os.open(path, os.O_RDONLY) for path in paths])
        for descriptor in self._descriptors:
            os.posix_fadvise(int(descriptor), 0, 0, os.POSIX_FADV_RANDOM)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pread")

    def gather(self, step: Step, layer: int) -> None:
        geometry = self.geometry
        rows = self.ids(step, layer) - geometry.offset_array[layer]
        places = (rows // self._per_page * PAGE_BYTES + rows % self._per_page * geometry.row_bytes).reshape(-1)
        files = np.broadcast_to(self._descriptors[layer * geometry.columns:(layer + 1) * geometry.columns], rows.shape).reshape(-1)
        buffer = self.landing.whole[layer].data.cast("B")
        each = -(-len(places) // THREADS)
        parts = [(files[k:k + each].tolist(), places[k:k + each].tolist(), k) for k in range(0, len(places), each)]
        list(self._pool.map(lambda part: self._read(buffer, *part), parts))
        self.landing.deliver_whole(layer, len(places))

    def _read(self, buffer: memoryview, files: list[int], places: list[int], first: int) -> None:
        size = self.geometry.row_bytes
        for number, (file, place) in enumerate(zip(files, places), first):
            if os.preadv(file, [buffer[number * size:(number + 1) * size]], place) != size:
                raise RuntimeError("a page file ended before its row: run `ssdgram verify`")

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        asked = sum(ids.size for step in steps for ids in step.ids)
        return {"hit_rate": {}, "reads": asked, "bytes_read": drive_bytes}

    def forget(self) -> None:
        mapped.drop(self._paths)

    def files(self) -> list[Path]:
        return self._paths

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
        for descriptor in self._descriptors:
            os.close(int(descriptor))


# ---------------------------------------------------------------- a store


class Ssdgram(Placement):
    """A store on the CPU: packed rows. Whoever opens stores hands them over (`use`), and has them closed (`close_store`).

    `states`: those that it takes part in. `hbm`: GPU memory of its stores.
    """

    name = "ssdgram"
    warm_only = False
    settling = 1 << 30
    states: tuple[str, ...] = WARMNESS
    hbm = 0
    heated = False                                           # whether warm text is brought into GPU memory beforehand

    def __init__(self, geometry: Geometry, landing: Landing, paths: list[Path]) -> None:
        import torch

        super().__init__(geometry, landing)
        self.store: Store | None = None
        self._paths = paths
        shape = (landing.most, geometry.columns, geometry.row_bytes)
        self._outs: list[Any] = [torch.from_numpy(whole.reshape(shape)) for whole in landing.whole]

    @property
    def opened(self) -> Store:
        """The store; RuntimeError if none was given."""
        if self.store is None:
            raise RuntimeError("no store is open")
        return self.store

    def use(self, store: Store) -> None:
        """Take a store that was just opened, and make ready what its first lookup would make: nobody times that."""
        self.store = store

    def close_store(self) -> None:
        """Close the store, if one is open."""
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def lookup(self, step: Step) -> float:
        waited = 0.0
        with self.opened.prefetch(step.sequence) as batch:
            for layer, number in enumerate(self.geometry.layers):
                begin = time.perf_counter()
                batch.wait(number, timeout_s=120)
                waited += time.perf_counter() - begin
                self._rows(batch, step, layer)
            self.landing.finish()
        return waited

    def _rows(self, batch: Any, step: Step, layer: int) -> None:
        batch.packed(self.geometry.layers[layer], out=self._outs[layer][:len(step)])

    def begin(self, step: Step) -> Any:
        return self.opened.prefetch(step.sequence)

    def take(self, begun: Any, step: Step, layer: int) -> None:
        self._rows(begun, step, layer)

    def fetch(self, begun: Any, step: Step, layer: int) -> Any:
        """The first call asks for all layers: a store has no other way."""
        begun = self.begin(step) if begun is None else begun
        self._rows(begun, step, layer)
        return begun

    def end(self, begun: Any) -> None:
        begun.release()

    def snapshot(self) -> Any:
        return self.opened.stats()

    def account(self, before: Any, after: Any, steps: list[Step], drive_bytes: int, major_faults: int) -> dict[str, Any]:
        misses = {order: after.misses[order] - before.misses[order] for order in after.misses}
        joins = {order: after.joins[order] - before.joins[order] for order in after.joins}
        hits = {key: count - before.hits.get(key, 0) for key, count in after.hits.items()}
        rates: dict[str, dict[str, float]] = {}
        for (tier, order), count in hits.items():
            asked = sum(n for (_, other), n in hits.items() if other == order) + misses[order] + joins[order]
            rates.setdefault(tier, {})[str(order)] = count / asked if asked else float("nan")
        reads = after.reads - before.reads
        found, asked = sum(hits.values()), sum(hits.values()) + sum(misses.values()) + sum(joins.values())
        return {"hit_rate": rates, "hit_rate_all": found / asked if asked else float("nan"), "misses": sum(misses.values()),
                "joined": sum(joins.values()), "bundles": asked, "reads": reads, "bytes_read": PAGE_BYTES * reads,
                "merged_rows": after.merged_rows - before.merged_rows, "evictions": after.evictions - before.evictions}

    @property
    def held_bytes(self) -> int:
        return 0 if self.store is None else self.store._budget

    def forget(self) -> None:
        mapped.drop(self._paths)

    def files(self) -> list[Path]:
        return self._paths
