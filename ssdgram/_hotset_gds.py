"""Reading a hot set into a slab in GPU memory: file ─► GPU, rows checked there, right ones copied to their slots by the same kernel.

    KvikIO there    file ─► HBM (by GPUDirect Storage where the machine has it), only the entries' keys come to the CPU
    else            file ─► pinned memory (O_DIRECT, several in flight), from where the kernel reads

KvikIO is for this and not for pages: its Python layer has no batch call, and reads below 16 KiB block in it. An entry whose
check fails is taken out of the cache again before the store serves. Each wait has a time; after it the store does not open.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ssdgram._compiled import address_of, compiled_lean, load_u64
from ssdgram._cufile import CALL_TIMEOUT_S, in_time
from ssdgram._hotset_load import BUFFERS, ENTRY_HEAD, WORKERS, Chunks, direct, keep_free, key_is_right, place_entries, read_whole
from ssdgram._plan_state import C_IDLE
from ssdgram._slots import forget, give_back
from ssdgram._state import P_CODE_BYTES, P_SCALE_BYTES, P_SLOT_STRIDE
from ssdgram.errors import UnavailableError

if TYPE_CHECKING:
    from ssdgram.queues.gds import Device
    from ssdgram.store import Store

log = logging.getLogger("ssdgram")
KVIKIO = {"num_threads": 8, "task_size": 1 << 20, "auto_direct_io_read": True}
_kept: list[Any] = []                                        # memory that a read may still land in


# ---------------------------------------------------------------- compiled: keys, jobs, what failed


@compiled_lean
def check_keys(plan, data, count, per_block, block_bytes, entry_bytes, good):  # type: ignore[no-untyped-def]
    """good[k] (uint8) = 1 for the entries whose key can be one of this store; their rows are the GPU's to check."""
    for k in range(count):
        entry = address_of(data, (k // per_block) * block_bytes + (k % per_block) * entry_bytes)
        good[k] = key_is_right(plan, np.int64(load_u64(entry)), np.int64(load_u64(entry + 8)))


@compiled_lean
def entry_jobs(plan, state, data, count, per_block, block_bytes, entry_bytes, slots, base, file_per_block,  # type: ignore[no-untyped-def]
               file_block_bytes, file_entry_bytes, slab, jobs, job_entry):
    """The jobs (kernels.deliver) of the entries that have a slot; the file's blocks lie at device address `base`. How many."""
    params, made = state.params, 0
    code_bytes, scale_bytes = params[P_CODE_BYTES], params[P_SCALE_BYTES]
    for k in range(count):
        if slots[k] < 0:
            continue
        key = address_of(data, (k // per_block) * block_bytes + (k % per_block) * entry_bytes)
        x = np.int64(load_u64(key))
        group = plan.groups[plan.group_index[load_u64(key + 8) & np.uint64(255)]]
        entry = base + (k // file_per_block) * file_block_bytes + (k % file_per_block) * file_entry_bytes
        bundle, target = entry + ENTRY_HEAD + 4 * group.heads, slab + slots[k] * params[P_SLOT_STRIDE]
        for head in range(group.heads):
            file = state.files[group.file + head]
            jobs[8 * made] = bundle + head * code_bytes
            jobs[8 * made + 1] = bundle + group.heads * code_bytes + head * scale_bytes
            jobs[8 * made + 2] = entry + ENTRY_HEAD + 4 * head
            jobs[8 * made + 3] = np.int64(file.layer) | np.int64(file.column) << 32
            jobs[8 * made + 4] = x % file.rows
            jobs[8 * made + 5] = target + head * code_bytes
            jobs[8 * made + 6] = target + group.heads * code_bytes + head * scale_bytes
            job_entry[made] = k
            made += 1
    return made


@compiled_lean
def drop_entries(plan, slots, bad):  # type: ignore[no-untyped-def]
    """Take the entries marked in `bad` (uint8) out of the cache again. How many had a place in it."""
    dropped = 0
    for k in range(slots.shape[0]):
        if bad[k] != 0 and slots[k] >= 0:
            forget(plan.control, plan.directory, plan.slots, plan.overflow, np.int64(slots[k]))
            give_back(plan.control, plan.slots, plan.hbm, np.int64(slots[k]))
            plan.control[C_IDLE] -= 1
            slots[k] = -1
            dropped += 1
    return dropped


# ---------------------------------------------------------------- where chunks come from


class Chunk(NamedTuple):
    """A chunk that came: `got` bytes of it at device address `base`; its entries' keys at `keys` (uint8), of that shape."""

    keys: np.ndarray
    shape: tuple[int, int, int]
    base: int
    got: int


class Source(Protocol):
    """Reads chunks ahead. A chunk stays until `depth` later ones were asked for."""

    depth: int

    def start(self, step: int) -> None:
        """Begin to read a chunk."""

    def wait(self, step: int) -> Chunk:
        """The chunk, once it is there. OSError."""

    def close(self) -> None:
        """End what is under way."""


class HostSource:
    """Chunks in pinned host memory, which the GPU reads in place."""

    depth = BUFFERS

    def __init__(self, device: Device, chunks: Chunks, descriptor: int) -> None:
        self._chunks, self._descriptor = chunks, descriptor
        self._buffers = [device.host_buffer(chunks.bytes) for _ in range(self.depth)]
        self._pool = ThreadPoolExecutor(WORKERS, "ssdgram-hotset")
        self._reads: dict[int, Future[int]] = {}

    def start(self, step: int) -> None:
        """See Source."""
        buffer = self._buffers[step % self.depth][0][:self._chunks.size(step)]
        self._reads[step] = self._pool.submit(read_whole, self._descriptor, buffer, self._chunks.offset(step))

    def wait(self, step: int) -> Chunk:
        """See Source."""
        got = self._reads.pop(step).result()
        buffer, address = self._buffers[step % self.depth]
        return Chunk(buffer, self._chunks.shape, address, got)

    def close(self) -> None:
        """See Source."""
        self._pool.shutdown()


class KvikioSource:
    """Chunks in GPU memory, read by KvikIO; their keys are copied to the host. RuntimeError, OSError, UnavailableError."""

    depth = 4

    def __init__(self, device: Device, chunks: Chunks, path: str | os.PathLike[str]) -> None:
        import torch

        kvikio, defaults = importlib.import_module("kvikio"), importlib.import_module("kvikio.defaults")
        self._chunks = chunks
        self._settings = defaults.set(KVIKIO)                # as they were before, again, in `close`
        try:
            self._file = in_time(lambda: kvikio.CuFile(os.fspath(path), "r"), "opening a file by KvikIO", device.entered)
        except BaseException:
            self._settings.__exit__(None, None, None)
            raise
        self._buffers = [torch.empty(chunks.bytes, dtype=torch.uint8, device=device.device) for _ in range(self.depth)]
        self._reads: dict[int, Any] = {}

    def start(self, step: int) -> None:
        """See Source."""
        size = self._chunks.size(step)
        self._reads[step] = self._file.pread(self._buffers[step % self.depth][:size], size, self._chunks.offset(step))

    def wait(self, step: int) -> Chunk:
        """See Source."""
        future, limit = self._reads[step], time.monotonic() + CALL_TIMEOUT_S
        while not future.done():
            if time.monotonic() > limit:
                _kept.append(self)
                raise UnavailableError(f"KvikIO has not read a part of the hot set for {CALL_TIMEOUT_S:g} s; open without hotset=")
            time.sleep(0.0001)
        got = int(future.get())
        del self._reads[step]
        per_block, block_bytes, entry_bytes = self._chunks.shape
        buffer = self._buffers[step % self.depth]
        blocks = buffer[:self._chunks.size(step)].unflatten(0, (-1, block_bytes))
        keys = blocks[:, :per_block * entry_bytes].unflatten(1, (per_block, entry_bytes))[:, :, :ENTRY_HEAD]
        return Chunk(keys.contiguous().cpu().numpy().reshape(-1), (1 << 40, 0, ENTRY_HEAD), int(buffer.data_ptr()), got)

    def close(self) -> None:
        """See Source."""
        if self in _kept:
            return
        for step in list(self._reads):
            self._reads.pop(step).get()
        self._file.close()
        self._settings.__exit__(None, None, None)


def source_for(store: Store, device: Device, chunks: Chunks, path: str | os.PathLike[str], descriptor: int) -> Source:
    """KvikIO if it is installed and opens the file, else pinned memory; the log says which."""
    try:
        source = KvikioSource(device, chunks, path)
    except ImportError:
        log.info("hot set: KvikIO is not installed (pip install 'ssdgram[gds]'): it is read into pinned memory")
    except (RuntimeError, OSError) as error:
        store._note(f"hot set: KvikIO does not open it ({error}): it is read into pinned memory")
    else:
        log.info("hot set: read into GPU memory by KvikIO")
        return source
    return HostSource(device, chunks, descriptor)


# ---------------------------------------------------------------- the load


def load_to_gpu(store: Store, chunks: Chunks, path: str | os.PathLike[str], descriptor: int) -> int:
    """Fill the cache with the front of the hot set; entries dropped because a row of theirs was wrong. OSError, UnavailableError."""
    device: Device = store._queue.device  # type: ignore[attr-defined]
    with direct(path) as opened, device.entered():
        source = source_for(store, device, chunks, path, descriptor if opened is None else opened)
        try:
            return _load(store, chunks, device, source)
        finally:
            source.close()


def _load(store: Store, chunks: Chunks, device: Device, source: Source) -> int:
    plan, state, free, steps = store._plan, store._state, keep_free(store), len(chunks.counts)
    most = chunks.entries * max(store._selection.heads)
    rounds = device.rounds(1, most)
    good, bad = np.zeros(chunks.entries, np.uint8), np.zeros(chunks.entries, np.uint8)
    slots, job_entry, dropped = np.full(chunks.entries, -1, np.int32), np.zeros(most, np.int32), 0
    for step in range(min(source.depth - 1, steps)):
        source.start(step)
    for step in range(steps):
        chunk = source.wait(step)
        whole = chunks.whole(step, chunk.got)
        check_keys(plan, chunk.keys, whole, *chunk.shape, good)
        slots[:] = -1
        looked = int(place_entries(plan, chunk.keys, whole, *chunk.shape, good, free, slots))
        bad[:] = 1                                           # until the GPU has said otherwise
        try:
            count = int(entry_jobs(plan, state, chunk.keys, looked, *chunk.shape, slots, chunk.base, *chunks.shape, device.slab,
                                   rounds.jobs, job_entry))
            wrong = _checked(rounds, count, step + 1)
            bad[:] = 0
            bad[job_entry[:count][wrong]] = 1
        finally:
            dropped += int(drop_entries(plan, slots, bad))
        dropped += looked - int(good[:looked].sum())
        if looked < chunks.counts[step]:
            break
        if step + source.depth - 1 < steps:
            source.start(step + source.depth - 1)            # into the buffer of the chunk before, which is done with
    return dropped


def _checked(rounds: Any, count: int, number: int, wait: Callable[[float], None] = time.sleep) -> np.ndarray:
    """Run a round; bool [count], the rows that are wrong."""
    rounds.results[:count] = -1
    if count > 0:
        rounds.launch(0, count, number)
        limit = time.monotonic() + CALL_TIMEOUT_S
        while rounds.words[0] < number:
            if time.monotonic() > limit:
                _kept.append(rounds)
                raise UnavailableError(f"the GPU has not checked a part of the hot set for {CALL_TIMEOUT_S:g} s")
            wait(0.00002)
    return rounds.results[:count] != 0
