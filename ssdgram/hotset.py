"""Hot set: the bundles that were worth keeping, in a file, so that a restarted store serves from memory at once.

    header, 4096 bytes   | magic u32 | version u32 | generation u64 | row_bytes u32 | entry_bytes u32 | count u64 | columns u32 |
                         | layers u32 | column numbers u32 ... | decoder layers u32 ... | zeros ... | CRC-32C of bytes 0..4091 u32 |
    blocks               | whole entries | zeros to the block's end |        a block: 4096 bytes, or as many as one entry takes
    entry                | x u64 | group u8 | 7 zeros | row CRCs u32 ... | bundle: codes of its heads, then their scales | zeros |

Hottest first, so a smaller cache takes the front. Written under a temporary name, synced, renamed. A row's CRC is that of its
page (design section 4), which binds it to store, layer, column and row: a damaged or foreign entry is dropped, never served.
Written at close, read at open, before the planner runs; it knows the planner's arrays, not batches.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ssdgram._compiled import address_of, compiled_lean, copy_bytes, crc32c, crc32c_update, crc32c_word, load_u32, load_u64
from ssdgram._plan_state import C_FREE, C_IDLE, SLOT_READY
from ssdgram._slots import take
from ssdgram._state import P_CODE_BYTES, P_GENERATION, P_SCALE_BYTES, P_SLOT_STRIDE
from ssdgram.cache.directory import EMPTY, WAYS, probe, set_of
from ssdgram.cache.policy import rank, touch
from ssdgram.errors import HotSetError
from ssdgram.layout.bounded import regular
from ssdgram.layout.manifest import sync_folder

if TYPE_CHECKING:
    from ssdgram.store import Store

log = logging.getLogger("ssdgram")
MAGIC, VERSION, BLOCK = 0x48474453, 1, 4096                  # "SDGH"
_FIXED = struct.Struct("<IIQIIQII")
READ_BYTES = 8 << 20                                         # of blocks, at a time
ENTRY_HEAD = 16


class _Layout:
    """Sizes of the entries and blocks of a store's hot set."""

    def __init__(self, store: Store) -> None:
        heads = max(store._selection.heads)
        self.entry_bytes = -(-(ENTRY_HEAD + heads * (4 + store.row_bytes)) // 8) * 8
        self.block_bytes = -(-self.entry_bytes // BLOCK) * BLOCK
        self.per_block = self.block_bytes // self.entry_bytes

    def header(self, store: Store, count: int) -> bytes:
        numbers = [*store.columns, *store.layers]
        text = _FIXED.pack(MAGIC, VERSION, store.manifest.generation, store.row_bytes, self.entry_bytes, count, len(store.columns),
                           len(store.layers)) + struct.pack(f"<{len(numbers)}I", *numbers)
        if len(text) > BLOCK - 4:
            raise HotSetError(f"{len(store.columns)} columns and {len(store.layers)} layers do not fit into a hot set's header")
        body = text.ljust(BLOCK - 4, b"\0")
        return body + struct.pack("<I", _checksum(body))


def _checksum(text: bytes) -> int:
    return int(crc32c(np.frombuffer(text, np.uint8).ctypes.data, len(text)))


# ---------------------------------------------------------------- compiled: entries to and from slots


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
def entry_is_right(plan, state, entry):  # type: ignore[no-untyped-def]
    """Whether the entry at that address is one of this store whose rows are all right."""
    x, word = np.int64(load_u64(entry)), np.int64(load_u64(entry + 8))
    if x < 0 or word < 0 or word > 255 or plan.group_index[word] < 0:
        return False
    group = plan.groups[plan.group_index[word]]
    for head in range(group.heads):
        if head_check(state, group, x, head, entry + ENTRY_HEAD + 4 * group.heads) != load_u32(entry + ENTRY_HEAD + 4 * head):
            return False
    return group.heads > 0


@compiled_lean
def put_entry(plan, state, entry):  # type: ignore[no-untyped-def]
    """Give the bundle of an entry that is right a slot and a directory entry. The planner does not run yet."""
    x, number = np.int64(load_u64(entry)), np.uint8(load_u64(entry + 8) & np.uint64(255))
    group = plan.groups[plan.group_index[number]]
    s = set_of(x, number, plan.directory.shape[0])
    if probe(plan.directory, s, x, number) >= 0:
        return
    slot = take(plan.control, plan.stats, plan.directory, plan.sketch, plan.slots, plan.hbm, plan.overflow, s, x, number, 1)
    row_bytes = state.params[P_CODE_BYTES] + state.params[P_SCALE_BYTES]
    copy_bytes(address_of(state.slab, slot * state.params[P_SLOT_STRIDE]), entry + ENTRY_HEAD + 4 * group.heads, group.heads * row_bytes)
    plan.slots[slot].status = SLOT_READY
    plan.control[C_IDLE] += 1
    way = probe(plan.directory, s, x, number)
    if way >= 0:
        touch(plan.directory, plan.sketch, s, way)
        touch(plan.directory, plan.sketch, s, way)           # it was hot: a newcomer has to earn its place


@compiled_lean
def put_entries(plan, state, data, count, per_block, block_bytes, entry_bytes, keep_free):  # type: ignore[no-untyped-def]
    """Put the first `count` entries of the blocks in `data` (uint8) into the cache. (looked at, dropped); stops while
    `keep_free` slots are left."""
    dropped = 0
    for k in range(count):
        if plan.control[C_FREE + 1] <= keep_free:
            return k, dropped
        entry = address_of(data, (k // per_block) * block_bytes + (k % per_block) * entry_bytes)
        if entry_is_right(plan, state, entry):
            put_entry(plan, state, entry)
        else:
            dropped += 1
    return count, dropped


@compiled_lean
def rank_entries(plan, ranks, slots_out):  # type: ignore[no-untyped-def]
    """List the READY bundles of the directory: their ranks (int64) and slots (int32), arrays as long as there are ways. How many."""
    count = 0
    for s in range(plan.directory.shape[0]):
        for way in range(WAYS):
            slot = plan.directory[s].slot[way]
            if plan.directory[s].group[way] != EMPTY and plan.slots[slot].status == SLOT_READY:
                ranks[count] = rank(plan.directory, plan.sketch, s, way)
                slots_out[count] = slot
                count += 1
    return count


@compiled_lean
def fill_entries(plan, state, chosen, data, per_block, block_bytes, entry_bytes):  # type: ignore[no-untyped-def]
    """Write the bundles of the slots `chosen` (int32) as entries into the blocks in `data` (uint8, zeroed)."""
    row_bytes = state.params[P_CODE_BYTES] + state.params[P_SCALE_BYTES]
    for k in range(chosen.shape[0]):
        slot = np.int64(chosen[k])
        entry = (k // per_block) * block_bytes + (k % per_block) * entry_bytes
        group = plan.groups[plan.group_index[plan.slots[slot].group]]
        bundle = address_of(state.slab, slot * state.params[P_SLOT_STRIDE])
        put_u64(data, entry, np.uint64(plan.slots[slot].x))
        put_u64(data, entry + 8, np.uint64(plan.slots[slot].group))
        for head in range(group.heads):
            check = head_check(state, group, plan.slots[slot].x, head, bundle)
            for byte in range(4):
                data[entry + ENTRY_HEAD + 4 * head + byte] = (check >> np.uint32(8 * byte)) & np.uint32(255)
        copy_bytes(address_of(data, entry + ENTRY_HEAD + 4 * group.heads), bundle, group.heads * row_bytes)


@compiled_lean
def put_u64(data, place, value):  # type: ignore[no-untyped-def]
    """A little-endian uint64 at data[place]."""
    for byte in range(8):
        data[place + byte] = (value >> np.uint64(8 * byte)) & np.uint64(255)


# ---------------------------------------------------------------- reading and writing


def load(store: Store, path: str | os.PathLike[str]) -> int:
    """Fill the cache of a store that does not serve yet from the hot set at `path`; bundles taken. A file that is missing,
    malformed or of another store is passed over with a warning: the store then starts cold."""
    layout = _Layout(store)
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            count = _checked_header(store, layout, file.read(BLOCK), os.fstat(file.fileno()).st_size, path)
            return _load_blocks(store, layout, file.fileno(), count, path)
    except FileNotFoundError:
        log.info("hot set %s is not there yet: the store starts cold, and writes it when it is closed", path)
    except (OSError, HotSetError) as error:
        store._note(f"hot set passed over: {error}")
    return 0


def _checked_header(store: Store, layout: _Layout, text: bytes, size: int, path: str | os.PathLike[str]) -> int:
    """Entries of the hot set; HotSetError if it is damaged or not of this store, its columns and layers."""
    if len(text) < BLOCK or struct.unpack_from("<I", text, BLOCK - 4)[0] != _checksum(text[:BLOCK - 4]):
        raise HotSetError(f"{path}: its header is damaged, or it is no hot set")
    count = _FIXED.unpack_from(text)[5]
    if text != layout.header(store, count):
        raise HotSetError(f"{path}: written by another store, version, or choice of columns and layers; expected generation "
                          f"{store.manifest.generation:016x}")
    blocks = -(-count // layout.per_block)
    if size != BLOCK + blocks * layout.block_bytes:
        raise HotSetError(f"{path}: expected {BLOCK + blocks * layout.block_bytes} bytes for {count} entries, found {size}")
    return int(count)


def _load_blocks(store: Store, layout: _Layout, descriptor: int, count: int, path: str | os.PathLike[str]) -> int:
    blocks_at_once = max(1, READ_BYTES // layout.block_bytes)
    keep_free = len(store._plan.slots) // 64 + len(store._plan.groups)
    buffers = [np.frombuffer(mmap.mmap(-1, blocks_at_once * layout.block_bytes), np.uint8) for _ in range(2)]
    steps = [(start, min(blocks_at_once * layout.per_block, count - start))
             for start in range(0, count, blocks_at_once * layout.per_block)]
    dropped = 0
    with _direct(path) as direct, ThreadPoolExecutor(1) as reading:
        source = direct if direct is not None else descriptor

        def read(step: int) -> int:
            start, entries = steps[step]
            wanted = -(-entries // layout.per_block) * layout.block_bytes
            return _read_whole(source, buffers[step % 2][:wanted], BLOCK + start // layout.per_block * layout.block_bytes)

        ahead = reading.submit(read, 0) if steps else None
        for step, (_, entries) in enumerate(steps):
            assert ahead is not None
            got = ahead.result()
            ahead = reading.submit(read, step + 1) if step + 1 < len(steps) else None
            whole = min(entries, got // layout.block_bytes * layout.per_block)
            looked, bad = put_entries(store._plan, store._state, buffers[step % 2], whole, layout.per_block, layout.block_bytes,
                                      layout.entry_bytes, keep_free)
            dropped += bad
            if looked < entries:
                break
    if dropped:
        store._note(f"hot set {path}: {dropped} entries whose rows have a wrong checksum were dropped")
    return int(store._plan.control[C_IDLE])


def _read_whole(descriptor: int, buffer: np.ndarray, offset: int) -> int:
    """Fill `buffer` from the file; bytes read, fewer at its end."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [memoryview(buffer.data)[done:]], offset + done)
        if got <= 0:
            break
        done += got
    return done


@contextlib.contextmanager
def _direct(path: str | os.PathLike[str]) -> Iterator[int | None]:
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


def save(store: Store, path: str | os.PathLike[str]) -> int:
    """Write the cache of a store whose threads have ended, hottest bundles first; bundles written. OSError if it cannot."""
    layout, plan = _Layout(store), store._plan
    ways = len(plan.directory) * WAYS
    ranks, slots = np.empty(ways, np.int64), np.empty(ways, np.int32)
    count = int(rank_entries(plan, ranks, slots))
    chosen = slots[:count][np.argsort(-ranks[:count], kind="stable")]
    target = Path(path)
    temporary = target.with_name(target.name + ".partial")
    per_write = max(1, READ_BYTES // layout.block_bytes) * layout.per_block
    try:
        with open(temporary, "wb", buffering=0) as file:
            file.write(layout.header(store, count))
            for start in range(0, count, per_write):
                part = chosen[start:start + per_write]
                data = np.zeros(-(-len(part) // layout.per_block) * layout.block_bytes, np.uint8)
                fill_entries(plan, store._state, part, data, layout.per_block, layout.block_bytes, layout.entry_bytes)
                _write_whole(file.fileno(), data)
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return count


def _write_whole(descriptor: int, data: np.ndarray) -> None:
    view = memoryview(data.data)
    while view:
        view = view[os.write(descriptor, view):]
