"""The CUDA side of a store: its memory registered with the driver, results as device tensors, copies into the HBM tier.

    slab, words, copies   one memfd mapping, registered in chunks: the GPU reads slots and stores words at the same addresses
    plan of a batch       pinned, read in place by the gather: no copy, no synchronisation per step
    word of a gather      stored by the GPU behind it; the planner gives the slots back only after it arrived (hazard 1)

Every kernel is loaded at open, because one that loads lazily behind a waiting stream hangs the process (design 1.6). It
does not know the cache; it knows addresses. Nothing here runs for device="cpu".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton

from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._calls import wait_for_copies
from ssdgram.errors import ConfigError, UnavailableError
from ssdgram.kernels.distinct import Distinct
from ssdgram.kernels.gather import SLOTS, TILES, Bundles, Gather, mark_done, mark_launch
from ssdgram.kernels.launch import Launch, aligned, forget, preload, raw_stream
from ssdgram.kernels.promote import Promote
from ssdgram.sequence import Mark
from ssdgram.staging import DISTINCT

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from ssdgram.batch import Batch
    from ssdgram.sequence import Sequence
    from ssdgram.store import Store

log = logging.getLogger("ssdgram")
CHUNK = 1 << 30                                              # bytes registered by one call: a multiple of every page size
MAPPED_PORTABLE, READ_ONLY = 3, 8                            # cudaHostRegisterMapped | cudaHostRegisterPortable; cudaHostRegisterReadOnly
LEAST_BUFFER = 1 << 12
LEAST_TRITON = (3, 6)
NOTHING = contextlib.nullcontext()


def checked_device(name: str) -> torch.device:
    """The CUDA device of that name; UnavailableError if this machine or this torch has none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: expected 'cpu' or a CUDA device such as 'cuda:0'") from error
    if device.type != "cuda":
        raise ConfigError(f"device={name!r}: expected 'cpu' or a CUDA device such as 'cuda:0'")
    if not torch.cuda.is_available():
        raise UnavailableError(f"device={name!r}: torch {torch.__version__} sees no CUDA device; install a CUDA build of torch, "
                               f"or open with device='cpu'")
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < LEAST_TRITON:
        raise UnavailableError(f"device={name!r}: triton {triton.__version__} is installed, which cannot compile the gathers: expected "
                               f"{'.'.join(map(str, LEAST_TRITON))} or newer, which comes with torch 2.10")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


class Registration:
    """A host region registered with CUDA, chunk by chunk; all of it or, with UnavailableError, none of it.

    `read_only`: it is mapped so (of a server's slab), and CUDA has to be told.
    """

    def __init__(self, address: int, size: int, read_only: bool = False) -> None:
        self._chunks: list[int] = []
        runtime = torch.cuda.cudart()
        for start in range(0, size, CHUNK):
            length = min(CHUNK, size - start)
            error = int(runtime.cudaHostRegister(address + start, length, MAPPED_PORTABLE | (READ_ONLY if read_only else 0)))
            if error != 0:
                self.release()
                raise UnavailableError(f"CUDA refused to pin bytes {start} .. {start + length} of {size} (error {error}): lower dram=, or "
                                       f"raise the memlock limit (`ssdgram doctor`)")
            self._chunks.append(address + start)

    def release(self) -> None:
        """Unpin. Idempotent."""
        runtime = torch.cuda.cudart()
        while self._chunks:
            runtime.cudaHostUnregister(self._chunks.pop())
        forget()


class PinnedPool:
    """Pinned buffers for plans and tokens, by size class; a buffer comes back when its batch's row is free again."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self.bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """A pinned uint8 buffer of at least `size` bytes. The caller holds the store's lock."""
        length = max(LEAST_BUFFER, 1 << (size - 1).bit_length())
        free = self._free.setdefault(length, [])
        if free:
            return free.pop()
        self.bytes += length
        return torch.empty(length, dtype=torch.uint8, pin_memory=True)

    def give(self, buffer: torch.Tensor) -> None:
        """Take the buffer back."""
        self._free[len(buffer)].append(buffer)


class FillMemory(NamedTuple):
    """Pinned memory that a row's deferred sequences are written to, as torch and as NumPy see it."""

    length: int
    tokens: torch.Tensor
    flags: torch.Tensor
    tokens_array: np.ndarray
    flags_array: np.ndarray
    buffer: torch.Tensor | None                              # of the pool
    done: torch.Tensor
    counter: torch.Tensor


class CudaSide:
    """What a store on a CUDA device has besides the arrays. `slab_slots`: the slab lies in its memory (None: in DRAM)."""

    def __init__(self, store: Store, device: torch.device, hbm_slots: int, slab_slots: int | None = None) -> None:
        self.device = device
        plan, state = store._plan, store._state
        layers, rows = len(store.layers), len(plan.batches)
        with torch.cuda.device(device):
            self._registrations: list[Registration] = []
            for address, size, read_only in store._regions():
                self.register(address, size, read_only)
            self.slab_memory: torch.Tensor | None = None     # [slots, stride], if the slab lies in HBM (queue gds)
            self.slab = device_address(state.slab.ctypes.data)
            if slab_slots is not None:
                self.slab_memory = torch.zeros((len(plan.slots), store._stride), dtype=torch.uint8, device=device)
                self.slab = self.slab_memory.data_ptr()
            self.hbm = torch.empty(hbm_slots * store._stride, dtype=torch.uint8, device=device)
            self._hbm_base = self.hbm.data_ptr()
            self.words = torch.from_numpy(plan.gpu_words)
            self.flags = torch.from_numpy(plan.token_words)
            # of each row's gathers, of the copier, of each row's tokens
            self.counters = torch.zeros(rows * layers + 1 + len(self.flags), dtype=torch.int32, device=device)
            self.pool = PinnedPool()
            self._plans: dict[int, tuple[tuple[int, ...], np.ndarray, torch.Tensor, torch.Tensor]] = {}
            self._token_buffers: dict[int, list[torch.Tensor]] = {}
            self._fills: dict[int, FillMemory] = {}
            self.kept_by_row: dict[int, Any] = {}            # row -> what the gathers of its batch use beside the row's own memory
            self._counters_at, self._words_at = self.counters.data_ptr(), self.words.data_ptr()
            self._word, self._expected = plan.layers["word"], plan.layers["expected"]        # of each row's layers
            self.gathers: list[Gather] = [self._gather(store, index) for index in range(layers)]
            self._distinct: list[dict[tuple[str, int, torch.dtype], Launch]] = [{} for _ in self.gathers]    # compiled for all tables
            self._promote = Promote(store._stride)
            preload(device, [*(launch for gather in self._distinct_gathers(1) for launch in gather.launches()),
                             *(g.launch(mode, SLOTS, dtype, ticket, tile) for g in self.gathers for _, tile in TILES
                               for mode, dtype in (("rows", torch.bfloat16), ("packed", torch.uint8)) for ticket in (1, 2)
                               if mode == "packed" or g.bundles.encoding != "nvfp4"),
                             self._promote.launch, mark_launch(1)])
            counter = self.counters[rows * layers:rows * layers + 1]
            self._copier = threading.Thread(target=_copy_loop, name="ssdgram-copier", daemon=True, args=(
                plan, state, device, self._promote, counter, self.slab, self.hbm.data_ptr())) if hbm_slots else None
        if self._copier is not None:
            self._copier.start()

    def register(self, address: int, size: int, read_only: bool = False) -> None:
        """Let the GPU reach more of this process's memory, until `close`. UnavailableError: nothing is registered then."""
        try:
            self._registrations.append(Registration(address, size, read_only))
        except UnavailableError:
            self._unregister()
            raise

    def _unregister(self) -> None:
        while self._registrations:
            self._registrations.pop().release()

    @staticmethod
    def _gather(store: Store, index: int) -> Gather:
        scales = store.manifest.global_scales
        geometry = store.geometry
        return Gather(Bundles(heads=store._selection.heads, dim=geometry.row_dim, code_bytes=geometry.code_bytes,
                              scale_bytes=geometry.scale_bytes, stride=store._stride, encoding=geometry.encoding,
                              global_scale=1.0 if scales is None else scales[store._selection.indices[index]],
                              scale_rule=store.scale_rule))

    def gathers_for(self, tokens: int) -> SequenceOf[Gather | Distinct]:
        """Each layer's gather for launches of up to `tokens` positions, one behind the other: for many, those that bring each distinct
        bundle over the link once, with tables of their own. Who launches keeps them until the GPU is done."""
        if tokens < DISTINCT or self.slab_memory is not None:
            return self.gathers
        return self._distinct_gathers(tokens)

    def _distinct_gathers(self, tokens: int) -> list[Distinct]:
        with torch.cuda.device(self.device):
            return [Distinct(gather.bundles, tokens, self.device, launches)
                    for gather, launches in zip(self.gathers, self._distinct, strict=True)]

    # ------------------------------------------------------------ plans and tokens in pinned memory

    def plan_memory(self, row: int, shape: tuple[int, int, int]) -> tuple[np.ndarray, torch.Tensor]:
        """Pinned int32 memory for the slots of a batch that uses `row` anew, as NumPy and as torch see it.

        What the row had before is free, for its words arrived; a row that is used for the same shape keeps its memory, so a
        steady decode loop makes no tensors here. The row's words start from 0: `submit` sees to that.
        """
        for buffer in self._token_buffers.pop(row, ()):
            self.pool.give(buffer)
        known = self._plans.get(row)
        if known is not None and known[0] == shape:
            return known[1], known[2]
        if known is not None:
            self.pool.give(known[3])
        size = 4 * math.prod(shape)
        buffer = self.pool.take(max(4, size))
        slots = buffer[:size].view(torch.int32).view(shape)
        self._plans[row] = (shape, slots.numpy(), slots, buffer)
        return slots.numpy(), slots

    def tokens_to_host(self, sequences: list[Sequence], n: int, flat_tokens: np.ndarray, flat_flags: np.ndarray, row: int, ticket: int,
                       into: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Copy tokens that live on the GPU into pinned memory on the current stream, then store the ticket into the row's flag.

        `into`: registered memory for tokens (int32) and flags (uint8); None: the pool's. Returns the flat tokens, their flags, and
        the address of the row's flag. The caller does not wait.
        """
        if sequences[0].fill is not None:
            return self._filled(sequences[0], row, ticket, into)
        size = 4 * len(flat_tokens)
        if into is None:
            buffer = self.pool.take(max(4, size))
            self._token_buffers.setdefault(row, []).append(buffer)
            host = buffer[:size].view(torch.int32)
        else:
            host = into[0][:len(flat_tokens)]
        host.numpy()[:] = flat_tokens
        stop = 0
        with torch.cuda.device(self.device):
            for sequence in sequences:
                stop += len(sequence.flat_tokens) - max(0, sequence.lookback_length - (n - 1))
                if sequence.device_tokens is not None and len(sequence) > 0:
                    ids = sequence.device_tokens.clamp(-1, 2**31 - 1).to(torch.int32)
                    host[stop - len(sequence):stop].copy_(ids, non_blocking=True)
            mark_done(self.flags[row:row + 1], ticket)
        return host.numpy(), flat_flags, self.flags.data_ptr() + 8 * row

    def _filled(self, sequence: Sequence, row: int, ticket: int,
                into: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[np.ndarray, np.ndarray, int]:
        """`tokens_to_host` for a deferred sequence: its own kernels write tokens and flags."""
        memory = self._fill_memory(row, sequence._flat_length, into)
        with self.current():
            mark = Mark(memory.counter, memory.done, ticket)
            if memory.length == 0 or sequence.fill is None or not sequence.fill(memory.tokens, memory.flags, mark):
                mark_done(memory.done, ticket)
        return memory.tokens_array, memory.flags_array, self.flags.data_ptr() + 8 * row

    def _fill_memory(self, row: int, length: int, into: tuple[torch.Tensor, torch.Tensor] | None) -> FillMemory:
        """Where a deferred sequence of that length is written; a row that is used for the same length again keeps its memory."""
        known = self._fills.get(row)
        if known is not None and known.length == length:
            return known
        if known is not None and known.buffer is not None:
            self.pool.give(known.buffer)
        buffer = None
        if into is None:
            buffer = self.pool.take(max(8, 5 * length))
            into = buffer[:4 * length].view(torch.int32), buffer[4 * length:5 * length]
        tokens, flags = (part[:length] for part in into)
        counters = len(self.counters) - len(self.flags)
        self._fills[row] = FillMemory(length, tokens, flags, tokens.numpy(), flags.numpy(), buffer, self.flags[row:row + 1],
                                      self.counters[counters + row:counters + row + 1])
        return self._fills[row]

    def drain(self) -> None:
        """Wait for all that was launched on the current stream: behind an exception that may have come after a launch."""
        torch.cuda.current_stream(self.device).synchronize()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the store's device the current one, if it is not: asking is ten times as cheap as setting."""
        return NOTHING if torch.cuda.current_device() == self.device.index else torch.cuda.device(self.device)

    # ------------------------------------------------------------ results

    def run(self, batch: Batch, index: int, mode: str, out: torch.Tensor | None) -> torch.Tensor:
        """Launch the gather of a layer on the current stream and note its word; the layer is ready."""
        shape, dtype = self.output_of(batch._store, len(batch), mode)
        with self.current():
            result = self.checked_output(out, shape, dtype)
            self._launch(batch, index, mode, result.data_ptr(), self.gathers[index])
        return result

    def rows_to(self, batch: Batch, index: int, place: int, gather: Gather | Distinct | None = None) -> None:
        """As `run`, the rows to the address `place`: for who has checked what lies there. `gather`: another one than the store's."""
        with self.current():
            self._launch(batch, index, "rows", place, gather or self.gathers[index])

    @staticmethod
    def output_of(store: Store, positions: int, mode: str) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape and dtype of a result."""
        if mode == "rows":
            return (positions, len(store.columns), store.dim), torch.bfloat16
        return (positions, len(store.columns), store.row_bytes), torch.uint8

    def _launch(self, batch: Batch, index: int, mode: str, place: int, gather: Gather | Distinct) -> None:
        tokens, orders = batch._slots.shape[1:]
        if tokens == 0:
            return
        stream = raw_stream(torch.cuda.current_device())
        before = batch._events.get(index)
        if before is not None and before != stream:          # the word counts launches: they have to finish in order
            wait_for_stream(before)
        batch._events[index] = stream
        line = batch._row * len(batch._ready) + index
        word, number = self._words_at + 8 * line, int(self._expected[line]) + 1
        self._word[line], self._expected[line] = word, number
        try:
            gather.at(tokens, batch._device_slots.data_ptr() + 4 * index * tokens * orders, place, mode=mode, dram=self.slab,
                      hbm=self._hbm_base, counter=self._counters_at + 4 * line, done=word, ticket=number)
        except BaseException:                                # Ctrl-C may come before the launch, and behind it
            self.drain()
            if int(batch._store._plan.gpu_words[line]) < number:
                self._expected[line] = number - 1            # nobody will store that number: nothing is to be waited for
            raise
        batch._store._served_bytes += tokens * len(batch._store.columns) * batch._store.row_bytes

    def checked_output(self, out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """`out`, or a new tensor; ConfigError if `out` cannot take the result."""
        if out is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if (tuple(out.shape) != shape or out.dtype != dtype or out.device != self.device or not out.is_contiguous()
                or not aligned(out)):                        # before the gather's word is awaited, which an error would never store
            raise ConfigError(f"out is {out.dtype} {list(out.shape)} on {out.device}, its address {out.data_ptr():#x}: expected a "
                              f"contiguous {dtype} {list(shape)} on {self.device}, 16-byte aligned")
        return out

    def addresses(self, batch: Batch, index: int) -> torch.Tensor:
        """int64 [T, orders] on the device, copied asynchronously from pinned memory; 0 where nothing is served."""
        slots = batch._slots[index].astype(np.int64)
        stride = batch._store._stride
        found = np.where(slots >= 0, self.slab + slots * stride, self.hbm.data_ptr() + (-2 - slots) * stride)
        host = torch.empty(slots.shape, dtype=torch.int64, pin_memory=True)
        host.numpy()[:] = np.where(slots == -1, 0, found)
        return host.to(self.device, non_blocking=True)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Unpin, after all words arrived and the threads ended. False: the GPU was not done within `timeout_s`, so nothing was unpinned or
        freed, and the caller keeps all that the GPU can reach until the process ends."""
        deadline = time.monotonic() + timeout_s
        if self._copier is not None:                         # first, because it may launch something yet
            self._copier.join(timeout_s)
            if self._copier.is_alive():
                return False
        waiter = threading.Thread(target=_wait_for_device, args=(self.device,), name="ssdgram-last-wait", daemon=True)
        waiter.start()                                       # in a thread, because CUDA's wait has no time-out
        waiter.join(max(0.0, deadline - time.monotonic()))
        if waiter.is_alive():
            return False
        self._unregister()
        self.hbm = self.counters = None  # type: ignore[assignment]
        self.slab_memory = None
        return True


def _wait_for_device(device: torch.device) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:                            # the context is lost, and nothing runs in it any more
        log.error("%s: its last work failed: %s", device, error)


def bus_id(device: torch.device) -> str:
    """The PCI address of a GPU, such as "0000:3b:00.0"; "" if CUDA does not tell."""
    name = ctypes.create_string_buffer(64)
    with contextlib.suppress(UnavailableError, OSError, AttributeError):     # not to know it costs a little speed, nothing else
        if cuda_runtime().cudaDeviceGetPCIBusId(name, len(name), device.index) == 0:
            return name.value.decode()
    return ""


def wait_for_stream(handle: int) -> None:
    """The current stream goes on when all that was launched on the stream of that handle has ended."""
    torch.cuda.current_stream().wait_stream(torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream())


def device_address(address: int) -> int:
    """The address by which the current GPU reads registered host memory; the same on all systems with unified addressing."""
    runtime = cuda_runtime()
    pointer = ctypes.c_void_p()
    error = runtime.cudaHostGetDevicePointer(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
    if error != 0 or pointer.value is None:
        raise UnavailableError(f"CUDA gives no device address for registered host memory (error {error})")
    return pointer.value


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded into this process, for what torch does not offer."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line[line.find("/"):].strip() if "/" in line else ""
            if os.path.basename(path).startswith("libcudart"):
                return ctypes.CDLL(path)
    raise UnavailableError("libcudart is not loaded: this torch was built without CUDA")


def _copy_loop(plan: Any, state: Any, device: torch.device, promote: Promote, counter: torch.Tensor, slab: int, hbm: int) -> None:
    """The copier's thread: launches each list of copies that the planner asks for, on a stream of its own."""
    pairs, done = torch.from_numpy(plan.copies), torch.from_numpy(plan.copy_word)
    launched = 0
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        while int(state.control[s.STOP]) == 0:
            requested = int(wait_for_copies(plan.control, state.control, state.words, launched, 100_000_000))
            if requested > launched:
                promote(pairs, int(plan.control[p.C_COPIES]), counter, done[:1], slab, hbm, requested)
                launched = requested
