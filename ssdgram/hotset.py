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

import logging
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ssdgram._compiled import address_of, compiled_lean, copy_bytes, crc32c
from ssdgram._hotset_load import BLOCK, ENTRY_HEAD, head_check, load_blocks
from ssdgram._plan_state import SLOT_READY
from ssdgram._state import P_CODE_BYTES, P_SCALE_BYTES, P_SLOT_STRIDE
from ssdgram.cache.directory import EMPTY, WAYS
from ssdgram.cache.policy import rank
from ssdgram.errors import HotSetError, UnavailableError
from ssdgram.layout.bounded import regular
from ssdgram.layout.manifest import sync_folder

if TYPE_CHECKING:
    from ssdgram.store import Store

log = logging.getLogger("ssdgram")
MAGIC, VERSION = 0x48474453, 1                               # "SDGH"
_FIXED = struct.Struct("<IIQIIQII")
WRITE_BYTES = 8 << 20                                        # of blocks, at a time


class Layout:
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
def fill_entries(plan, state, bundles, in_order, chosen, data, per_block, block_bytes, entry_bytes):  # type: ignore[no-untyped-def]
    """Write the bundles of the slots `chosen` (int32) as entries into the blocks in `data` (uint8, zeroed).

    bundles: uint8, the slab, or (`in_order`) only the chosen slots, one behind the other.
    """
    row_bytes = state.params[P_CODE_BYTES] + state.params[P_SCALE_BYTES]
    for k in range(chosen.shape[0]):
        slot = np.int64(chosen[k])
        entry = (k // per_block) * block_bytes + (k % per_block) * entry_bytes
        group = plan.groups[plan.group_index[plan.slots[slot].group]]
        bundle = address_of(bundles, (k if in_order else slot) * state.params[P_SLOT_STRIDE])
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
    layout = Layout(store)
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            count = _checked_header(store, layout, file.read(BLOCK), os.fstat(file.fileno()).st_size, path)
            return load_blocks(store, layout, path, file.fileno(), count)
    except UnavailableError:                                 # a GPU or a driver that does not answer: not the file's fault
        raise
    except FileNotFoundError:
        log.info("hot set %s is not there yet: the store starts cold, and writes it when it is closed", path)
    except (OSError, HotSetError) as error:
        store._note(f"hot set passed over: {error}")
    return 0


def _checked_header(store: Store, layout: Layout, text: bytes, size: int, path: str | os.PathLike[str]) -> int:
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


def _check_place(store: Store, path: str | os.PathLike[str]) -> None:
    """HotSetError if what is at `path` is not this store's to replace: the hot set of another store, or some other file."""
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            text = file.read(BLOCK)
    except FileNotFoundError:
        return
    if not text:
        return
    if len(text) < _FIXED.size or struct.unpack_from("<I", text)[0] != MAGIC:
        raise HotSetError("the file there is no hot set, and is left as it is: choose another path")
    if len(text) == BLOCK and struct.unpack_from("<I", text, BLOCK - 4)[0] == _checksum(text[:BLOCK - 4]):
        generation = _FIXED.unpack_from(text)[2]
        if generation != store.manifest.generation:
            raise HotSetError(f"the file there is the hot set of another store (generation {generation:016x}, this one has "
                              f"{store.manifest.generation:016x}), and is left as it is: remove it, or choose another path")


def save(store: Store, path: str | os.PathLike[str]) -> int:
    """Write the cache of a store whose threads have ended, hottest bundles first; bundles written. OSError if it cannot; HotSetError if
    the file there is another store's, which is left (one of this store, damaged or of other columns, is replaced)."""
    _check_place(store, path)
    layout, plan = Layout(store), store._plan
    in_gpu = None if store._cuda is None else store._cuda.slab_memory
    ways = len(plan.directory) * WAYS
    ranks, slots = np.empty(ways, np.int64), np.empty(ways, np.int32)
    count = int(rank_entries(plan, ranks, slots))
    chosen = slots[:count][np.argsort(-ranks[:count], kind="stable")]
    target = Path(path)
    temporary = target.with_name(target.name + ".partial")
    per_write = max(1, WRITE_BYTES // layout.block_bytes) * layout.per_block
    try:
        with open(temporary, "wb", buffering=0) as file:
            file.write(layout.header(store, count))
            for start in range(0, count, per_write):
                part = chosen[start:start + per_write]
                data = np.zeros(-(-len(part) // layout.per_block) * layout.block_bytes, np.uint8)
                bundles = store._state.slab if in_gpu is None else in_gpu[part.tolist()].cpu().numpy().reshape(-1)
                fill_entries(plan, store._state, bundles, in_gpu is not None, part, data, layout.per_block, layout.block_bytes,
                             layout.entry_bytes)
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
