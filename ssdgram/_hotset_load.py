"""Reading a hot set into the cache of a store that does not serve yet, at the rate at which its drive gives it.

    workers   read a chunk (O_DIRECT, several in flight) and check every row of it ─┐        ┌─► copy its bundles into their slots
    caller                                                 give the right entries slots, in order

Hottest entries come first, so an entry whose set is full already, or that would take one of the last free slots, is left out:
nothing that was placed is pushed out again, which is what lets copies run side by side. It knows blocks and entries
(hotset.py) and the planner's arrays, which nobody else looks at yet. Invariant: an entry has a slot only if all its rows are right.
For a slab in GPU memory see `_hotset_gds`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ssdgram._compiled import address_of, compiled_lean, copy_bytes, crc32c_update, crc32c_word, load_u32, load_u64
from ssdgram._plan_state import C_FREE, C_IDLE, SLOT_READY
from ssdgram._slots import take
from ssdgram._state import P_CODE_BYTES, P_GENERATION, P_SCALE_BYTES, P_SLOT_STRIDE
from ssdgram.cache.directory import EMPTY, WAYS, probe, set_of
from ssdgram.cache.policy import touch

if TYPE_CHECKING:
    from ssdgram.hotset import Layout
    from ssdgram.store import Store

ENTRY_HEAD = 16
BLOCK = 4096
CHUNK_BYTES = 4 << 20                                        # of blocks, read at a time
BUFFERS, WORKERS = 6, 4


# ---------------------------------------------------------------- compiled: entries to slots


@compiled_lean
def row_check(generation, layer, column, row, codes, code_bytes, scales, scale_bytes):  # type: ignore[no-untyped-def]
    """The row check (layout.page.row_crc) of a row whose codes and scales lie apart, uint32."""
    state = crc32c_word(np.uint32(0xFFFFFFFF), generation)
    state = crc32c_word(state, np.int64(layer) | (np.int64(column) << 32))
    state = crc32c_word(state, row)
    state = crc32c_update(state, codes, code_bytes)
    return crc32c_update(state, scales, scale_bytes) ^ np.uint32(0xFFFFFFFF)


@compiled_lean
def head_check(state, group, x, head, bundle):  # type: ignore[no-untyped-def]
    """The row check of head `head` of the bundle (x, group) that lies at address `bundle`."""
    code_bytes, scale_bytes = state.params[P_CODE_BYTES], state.params[P_SCALE_BYTES]
    file = state.files[group.file + head]
    return row_check(state.params[P_GENERATION], file.layer, file.column, x % file.rows, bundle + head * code_bytes, code_bytes,
                     bundle + group.heads * code_bytes + head * scale_bytes, scale_bytes)


@compiled_lean
def key_is_right(plan, x, word):  # type: ignore[no-untyped-def]
    """Whether an entry's first words can be those of a bundle that is served here."""
    if x < 0 or word < 0 or word > 255 or plan.group_index[word] < 0:
        return False
    return plan.groups[plan.group_index[word]].heads > 0


@compiled_lean
def check_entries(plan, state, data, count, per_block, block_bytes, entry_bytes, good):  # type: ignore[no-untyped-def]
    """good[k] (uint8) = 1 for the entries of the blocks in `data` (uint8) that are this store's and whose rows are all right."""
    for k in range(count):
        entry = address_of(data, (k // per_block) * block_bytes + (k % per_block) * entry_bytes)
        x, word = np.int64(load_u64(entry)), np.int64(load_u64(entry + 8))
        good[k] = key_is_right(plan, x, word)
        if good[k] == 0:
            continue
        group = plan.groups[plan.group_index[word]]
        for head in range(group.heads):
            if head_check(state, group, x, head, entry + ENTRY_HEAD + 4 * group.heads) != load_u32(entry + ENTRY_HEAD + 4 * head):
                good[k] = 0
                break


@compiled_lean
def has_room(directory, s):  # type: ignore[no-untyped-def]
    """Whether a set has an empty way."""
    for way in range(WAYS):
        if directory[s].group[way] == EMPTY:
            return True
    return False


@compiled_lean
def place_entries(plan, data, count, per_block, block_bytes, entry_bytes, good, keep_free, slots):  # type: ignore[no-untyped-def]
    """slots[k] (int32): where the bundle of each good entry is to be copied, READY; -1: it gets none. The planner does not run yet.

    Stops while `keep_free` slots are left; how many entries were looked at.
    """
    for k in range(count):
        slots[k] = -1
        if plan.control[C_FREE + 1] <= keep_free:
            return k
        if good[k] == 0:
            continue
        entry = address_of(data, (k // per_block) * block_bytes + (k % per_block) * entry_bytes)
        x, number = np.int64(load_u64(entry)), np.uint8(load_u64(entry + 8) & np.uint64(255))
        s = set_of(x, number, plan.directory.shape[0])
        if probe(plan.directory, s, x, number) >= 0 or not has_room(plan.directory, s):
            continue
        slot = take(plan.control, plan.stats, plan.directory, plan.sketch, plan.slots, plan.hbm, plan.overflow, s, x, number, 1)
        plan.slots[slot].status = SLOT_READY
        plan.control[C_IDLE] += 1
        way = probe(plan.directory, s, x, number)
        touch(plan.directory, plan.sketch, s, way)
        touch(plan.directory, plan.sketch, s, way)           # it was hot: a newcomer has to earn its place
        slots[k] = slot
    return count


@compiled_lean
def copy_entries(plan, state, data, count, per_block, block_bytes, entry_bytes, slots):  # type: ignore[no-untyped-def]
    """Copy the bundles of the entries that were placed into their slots."""
    row_bytes = state.params[P_CODE_BYTES] + state.params[P_SCALE_BYTES]
    for k in range(count):
        if slots[k] >= 0:
            entry = address_of(data, (k // per_block) * block_bytes + (k % per_block) * entry_bytes)
            heads = np.int64(plan.groups[plan.group_index[load_u64(entry + 8) & np.uint64(255)]].heads)
            copy_bytes(address_of(state.slab, slots[k] * state.params[P_SLOT_STRIDE]), entry + ENTRY_HEAD + 4 * heads, heads * row_bytes)


# ---------------------------------------------------------------- chunks of the file


class Chunks:
    """How `count` entries are cut into reads: whole blocks, about CHUNK_BYTES at a time."""

    def __init__(self, layout: Layout, count: int) -> None:
        self.layout = layout
        self.blocks = max(1, CHUNK_BYTES // layout.block_bytes)
        self.bytes, self.entries = self.blocks * layout.block_bytes, self.blocks * layout.per_block
        self.counts = [min(self.entries, count - start) for start in range(0, count, self.entries)]

    def offset(self, step: int) -> int:
        """Where a chunk begins in the file."""
        return BLOCK + step * self.bytes

    def size(self, step: int) -> int:
        """Bytes of a chunk."""
        return -(-self.counts[step] // self.layout.per_block) * self.layout.block_bytes

    def whole(self, step: int, got: int) -> int:
        """Entries of a chunk of which `got` bytes came."""
        return min(self.counts[step], got // self.layout.block_bytes * self.layout.per_block)

    @property
    def shape(self) -> tuple[int, int, int]:
        """per_block, block_bytes, entry_bytes."""
        return self.layout.per_block, self.layout.block_bytes, self.layout.entry_bytes


def keep_free(store: Store) -> int:
    """Slots that a hot set leaves free."""
    return len(store._plan.slots) // 64 + len(store._plan.groups)


def load_blocks(store: Store, layout: Layout, path: str | os.PathLike[str], descriptor: int, count: int) -> int:
    """Fill the cache with the front of the hot set's `count` entries; bundles taken. OSError if the file cannot be read."""
    chunks = Chunks(layout, count)
    if not chunks.counts:
        return 0
    if store._gds is not None:
        from ssdgram._hotset_gds import load_to_gpu

        dropped = load_to_gpu(store, chunks, path, descriptor)
    else:
        dropped = _load_to_slab(store, chunks, path, descriptor)
    if dropped:
        store._note(f"hot set {path}: {dropped} entries whose rows have a wrong checksum were dropped")
    return int(store._plan.control[C_IDLE])


def _load_to_slab(store: Store, chunks: Chunks, path: str | os.PathLike[str], descriptor: int) -> int:
    """Entries dropped."""
    plan, state, free, dropped = store._plan, store._state, keep_free(store), 0
    buffers = [np.frombuffer(mmap.mmap(-1, chunks.bytes), np.uint8) for _ in range(BUFFERS)]
    good = np.zeros((BUFFERS, chunks.entries), np.uint8)
    slots = np.full((BUFFERS, chunks.entries), -1, np.int32)
    steps = len(chunks.counts)
    with direct(path) as opened, ThreadPoolExecutor(WORKERS, "ssdgram-hotset") as pool:
        source = descriptor if opened is None else opened

        def read(step: int) -> int:
            k = step % BUFFERS
            whole = chunks.whole(step, read_whole(source, buffers[k][:chunks.size(step)], chunks.offset(step)))
            check_entries(plan, state, buffers[k], whole, *chunks.shape, good[k])
            return whole

        def copy(step: int, looked: int) -> None:
            k = step % BUFFERS
            copy_entries(plan, state, buffers[k], looked, *chunks.shape, slots[k])

        reads = {step: pool.submit(read, step) for step in range(min(BUFFERS - 1, steps))}
        copies: dict[int, Future[None]] = {}
        for step in range(steps):
            whole, k = reads.pop(step).result(), step % BUFFERS
            looked = int(place_entries(plan, buffers[k], whole, *chunks.shape, good[k], free, slots[k]))
            dropped += looked - int(good[k][:looked].sum())
            copies[step] = pool.submit(copy, step, looked)
            if looked < chunks.counts[step]:
                break
            if step > 0:
                copies.pop(step - 1).result()                # its buffer is the next read's
            if step + BUFFERS - 1 < steps:
                reads[step + BUFFERS - 1] = pool.submit(read, step + BUFFERS - 1)
        for last in copies.values():
            last.result()
    return dropped


def read_whole(descriptor: int, buffer: np.ndarray, offset: int) -> int:
    """Fill `buffer` from the file; bytes read, fewer at its end."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [memoryview(buffer.data)[done:]], offset + done)
        if got <= 0:
            break
        done += got
    return done


@contextlib.contextmanager
def direct(path: str | os.PathLike[str]) -> Iterator[int | None]:
    """An O_DIRECT descriptor of the file, None where the file system has none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
