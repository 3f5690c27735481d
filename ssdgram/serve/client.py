"""A store that a server of this node owns, as its clients see it: the same calls, results and errors as an opened one.

    store = ssdgram.attach("/run/ssdgram.sock")              ranks and replicas of an engine: one cache, one read for all
    with store.prefetch(tokens) as batch: ...

`prefetch` copies the tokens into this client's share of memory and rings; the server plans and reads; `rows` gathers out of
the server's slab, mapped read-only, over this process's own link. Only statistics and the words of errors go over the socket.
The invariant: once the server is gone every call says so (ServerDiedError), and no call waits longer than it would have.
"""

from __future__ import annotations

import json
import os
import select
import socket as sockets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ssdgram import _opening
from ssdgram import _plan_state as p
from ssdgram._arena import Mapped, rounded, size_of
from ssdgram._budget import parse_size
from ssdgram._calls import READY, TIMED_OUT, hurry, wait_layer
from ssdgram._compiled import compile_for
from ssdgram.batch import HURRY_NS, NAP_NS, Batch
from ssdgram.errors import (
    ConfigError,
    ReadTimeoutError,
    ServerDiedError,
    StoreBusyError,
    StoreReplacedError,
    UnavailableError,
)
from ssdgram.geometry import Geometry
from ssdgram.kernels.gather_cpu import RowFormat
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES
from ssdgram.sequence import Sequence, check_ids, flatten
from ssdgram.serve import protocol, share
from ssdgram.stats import WAIT_BUCKETS, Stats, bounds
from ssdgram.store import PRIORITIES, ROW_WAIT_S, SCALE_RULES, WARM_WINDOW, Store, Tuning, _leaked, _open_stores, _sequences, log

if TYPE_CHECKING:
    from ssdgram._cuda import CudaSide
    from ssdgram.frame import Frame
    from ssdgram.tools.trace_record import Recorder

GOING = (share.SERVING, share.REPLACED)
LOOK_S = 0.005                                               # how long a look at the server's end of the socket is good for
SPIN_NS = 200_000                                            # before a wait sleeps: it gives way to whoever wants the CPU meanwhile
ANSWER_S, WHY_S = 5.0, 0.5                                   # how long an answer may take; why a wait took too long is not worth it


def attach(socket: str | os.PathLike[str], device: str = "cpu", hbm: str | int = "0", *, scale_rule: str = "spec",
           timeout_s: float = 10.0) -> AttachedStore:
    """Attach to the server whose socket that is (`ssdgram serve STORE --socket PATH`); a Store in all that it does.

    `device`: "cpu", or the CUDA device whose link this process gathers over. `hbm`: "0"; a tier in GPU memory belongs to a store that
    its process opened itself. `scale_rule`: as of `ssdgram.open`; each client's own. Raises UnavailableError if no server answers, or
    not within `timeout_s`, or it refuses; ConfigError.
    """
    return AttachedStore(socket, device=device, hbm=parse_size(hbm, "hbm"), scale_rule=scale_rule, timeout_s=timeout_s)


@dataclass(frozen=True)
class About:
    """What of a manifest matters to who only gathers."""

    geometry: Geometry
    generation: int
    global_scales: tuple[float, ...] | None


class AttachedBatch(Batch):
    """A batch of an attached store. Which batch row it has is the server's to say: another client's, if that asked for the same."""

    __slots__ = ("_seated",)

    _store: AttachedStore

    def __init__(self, store: AttachedStore, row: int, ticket: int, positions: int, flat: tuple[np.ndarray, np.ndarray]) -> None:
        layers = len(store.layers)
        super().__init__(store, row, ticket, np.empty((layers, positions, 0), np.int32), np.empty((layers, 0), np.int32), flat)
        self._seated = False

    def _all_ready(self, timeout_s: float) -> bool:
        store, begin = self._store, time.monotonic()
        if self._flag or not timeout_s >= 0:
            return False
        row = share.ready_row(store._seats, self._row, self.ticket, store._plan.words, store._line, len(self._ready),
                              min(SPIN_NS, int(min(timeout_s, 1.0) * 1e9)))
        if row < 0:
            return False
        self._take_row(row)
        if self._device_slots is not None:
            for index, seen in enumerate(self._ready):
                if not seen:
                    self._show_device(index)
        self._note_ready(time.monotonic() - begin)
        return True

    def _take_row(self, row: int) -> None:
        """The batch row that the server gave to this batch: its words and its plan are this batch's."""
        if not self._seated:
            self._base, self._slots, self._seated = row * self._store._line, self._store._plan_of(row, len(self)), True

    def _show_device(self, index: int) -> None:
        """The layer is ready: its plan goes to where the GPU reads it."""
        if self._device_slots is not None:
            self._device_slots[index].numpy()[:] = self._slots[index]

    def _wait_for(self, index: int, deadline: float) -> None:
        store, begin = self._store, time.monotonic()
        result = self._look(index, 0)
        while result == TIMED_OUT:
            now = time.monotonic()
            if now >= self._cut_short(deadline, begin):
                break
            result = self._look(index, int(min(NAP_NS, max(0.0, (deadline - now) * 1e9))))
            if result == TIMED_OUT:
                self._check()
        waited = time.monotonic() - begin
        store._count_wait(waited)
        if result != READY:
            raise store._error_of(self, index, waited, WHY_S if result == TIMED_OUT else ANSWER_S)
        self._ready[index] = True
        self._show_device(index)

    def plan_now(self) -> None:
        """Nothing: the server's desk plans."""

    def _look(self, index: int, nap_ns: int) -> int:
        """What the layer has come to, after at most `nap_ns`."""
        store = self._store
        if self._flag and nap_ns > 0:                        # the desk looks for such words now and then only
            if hurry(self._flag, self.ticket, HURRY_NS):
                share.ring(store._bell)
            self._flag = 0
        if not self._seated:
            begin = time.monotonic_ns()
            row = int(share.wait_seated(store._seats, store._seat_words, self._row, self.ticket, nap_ns, SPIN_NS))
            if row < 0:
                return TIMED_OUT
            nap_ns = max(0, nap_ns - (time.monotonic_ns() - begin))
            self._take_row(row)
        return int(wait_layer(store._plan.words, self._base, index, nap_ns, SPIN_NS, True))

    def ready(self, layer: int | None = None) -> bool:
        """Whether `wait(layer)` would return, or raise, at once. Never blocks."""
        self._check()
        return all(self._ready[index] or self._look(index, 0) != TIMED_OUT
                   for index in (range(len(self._ready)) if layer is None else (self._store._layer_index(layer),)))

    @property
    def timing(self) -> dict[str, float]:
        """As Batch.timing; of the batch that did the work, if this one joined another's. Empty before the server took it."""
        self._check()
        return dict(self._store._ask(protocol.ASK_TIMING, self._row) or {})


class AttachedStore(Store):
    """A store that a server owns; made by `ssdgram.attach`. Close it, or use it as a context manager; the server stays."""

    _made_by = "attach"
    manifest: Any
    _cuda: Any
    _block: Mapped
    _mapped: tuple[Mapped, ...]
    _numbers: protocol.Welcome
    _plan: Any
    _state: Any

    def __init__(self, socket: str | os.PathLike[str], *, device: str, hbm: int, scale_rule: str, timeout_s: float) -> None:
        self._closed, self._pid = True, os.getpid()          # until everything stands
        self.socket_path, self.device, self.scale_rule = Path(socket), device, scale_rule
        if scale_rule not in SCALE_RULES:
            raise ConfigError(f"scale_rule={scale_rule!r}: expected one of {list(SCALE_RULES)}")
        if device != "cpu":
            from ssdgram import _cuda

            cuda_device = _cuda.checked_device(device)
        if hbm > 0:
            raise ConfigError(f"hbm={hbm} bytes of an attached store: a tier in GPU memory belongs to a store that its process opened "
                              f"itself (ssdgram.open); attach with hbm='0'")
        self._connection = _connect(self.socket_path)
        try:
            numbers, descriptors = self._greet(timeout_s)
            try:
                self._map(numbers, descriptors)
                self._compile_ahead()
                if device != "cpu":
                    self._cuda = self._reach(cuda_device, descriptors[0])
            except UnavailableError:
                raise
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UnavailableError(f"{self.socket_path}: what the server gave cannot be used: {error}") from error
            finally:
                protocol.close_all(descriptors)
        except BaseException:
            self._connection.close()
            raise
        self._closed = False
        _open_stores.add(self)

    def _greet(self, timeout_s: float) -> tuple[protocol.Welcome, list[int]]:
        """Say hello, take the welcome and its descriptors."""
        layout = share.layout_digest()
        try:
            self._connection.send(protocol.hello(layout))
            if not select.select([self._connection], [], [], timeout_s)[0]:
                raise UnavailableError(f"{self.socket_path}: no answer within {timeout_s:g} s: is the server stopped?")
            data, descriptors = protocol.receive(self._connection, protocol.WELCOME.size + 1024, protocol.DESCRIPTORS)
        except ConnectionError as error:
            raise UnavailableError(f"{self.socket_path}: the server broke off ({error}); its log says why") from error
        try:
            numbers = protocol.read_welcome(data, layout)
            if len(descriptors) != protocol.DESCRIPTORS:
                raise UnavailableError(f"{self.socket_path}: {len(descriptors)} descriptors came, expected {protocol.DESCRIPTORS}")
        except BaseException:
            protocol.close_all(descriptors)
            raise
        return numbers, descriptors

    def _reach(self, device: Any, store_file: int) -> CudaSide:
        """Register the server's slab, read-only, and what of the share a GPU writes. Where CUDA knows no read-only memory the slab
        is mapped anew, for writing: nothing here does."""
        from ssdgram._cuda import CudaSide

        try:
            return CudaSide(self, device, 0)
        except UnavailableError:
            again = os.open(f"/proc/self/fd/{store_file}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._block = Mapped(again, self._block.size, writable=True)
            finally:
                os.close(again)
            self._mapped = (self._block, *self._mapped[1:])
            self._look_into(self._numbers)
            return CudaSide(self, device, 0)

    def _regions(self) -> list[tuple[int, int, bool]]:
        slab = self._state.slab
        words = [(self._arrays[name].ctypes.data, rounded(self._arrays[name].nbytes), False) for name in ("gpu_words", "token_words")]
        return [(slab.ctypes.data, rounded(slab.nbytes), not self._block.writable), *words]

    def _map(self, numbers: protocol.Welcome, descriptors: list[int]) -> None:
        """Map what the server shares; every size is checked against the memory files' own."""
        n, (store_file, plans_file, bell_file, share_file) = numbers, descriptors
        plan = share.plan_words(n.layers, n.orders, n.positions)
        specs = share.share_specs(n.rows, n.layers, n.flat, n.about)
        self._block = Mapped(store_file, n.store_bytes, writable=False)
        plans = Mapped(plans_file, size_of([("plans", np.int32, (n.batch_rows * plan,))]), writable=False)
        bell = Mapped(bell_file, size_of(share.BELL_SPECS), writable=True)
        self._share = Mapped(share_file, size_of(specs), writable=True)
        self._mapped = (self._block, plans, bell, self._share)
        self._plans = plans.cut([("plans", np.int32, (n.batch_rows * plan,))])["plans"].reshape(n.batch_rows, plan)
        self._bell = bell.cut(share.BELL_SPECS)["bell"]
        mine = self._share.cut(specs)
        self._board, self._requests, self._seats, self._seat_words = (mine[name] for name in ("board", "requests", "seats", "seat_words"))
        self._board_words = self._board.data                 # as Python reads a word quickest
        self._tokens, self._flags, self._expected = mine["tokens"], mine["flags"], mine["expected"]
        self._arrays = mine
        about = json.loads(mine["about"].tobytes())
        geometry = Geometry.from_json(about["geometry"])
        self.geometry = geometry
        self.manifest = About(geometry, about["generation"], None if about["global_scales"] is None else tuple(about["global_scales"]))
        self._selection = _opening.Selection.of(geometry, about["layers"], about["columns"])
        self.layers, self.columns = self._selection.layers, self._selection.columns
        if (n.layers, n.orders, n.stride) != (len(self.layers), geometry.orders, _opening.slot_stride(geometry, self._selection)):
            raise ValueError(f"{n.layers} layers, {n.orders} orders, slots of {n.stride} bytes are not those of the geometry")
        self.path, self.queue, self.notices = Path(about["path"]), str(about["queue"]), list(about["notices"])
        self._vocabulary, self.capacity = int(about["vocabulary"]), int(about["capacity"])
        self.tuning = replace(Tuning(), degraded_wait_s=float(about["degraded_wait_s"]))
        self._stride, self._line, self._gather_groups = n.stride, n.line, _opening.gather_groups(self._selection)
        self.positions, self._rows, self._first, self._server_pid = n.positions, n.rows, n.first, n.pid
        self._plan = SimpleNamespace(layers=np.zeros(n.rows * n.layers, p.LAYER), batches=np.zeros(n.rows, p.BATCH),
                                     gpu_words=mine["gpu_words"][:n.rows * n.layers], token_words=mine["token_words"])
        self._numbers = n
        self._look_into(n)
        self._last = np.zeros(n.rows, np.int64)              # newest ticket of each seat
        self._unreleased: set[int] = set()
        self._lock, self._asking = threading.RLock(), threading.Lock()
        self._tickets = self._questions = self._frames = 0
        self._hotset, self.hot_bundles, self.hotset_load_s = None, 0, 0.0
        self._cuda = self._gds = self._recorder = None
        self._token_rows: dict[int, Any] = {}                # seat -> its tokens and flags as torch has them, registered
        self._row_formats: dict[int, RowFormat] = {}
        self._wait_counts, self._wait_us_sum, self._served_bytes = [0] * WAIT_BUCKETS, 0.0, 0
        self._gone, self._looked = "", 0.0

    def _compile_ahead(self) -> None:
        """What a step calls is loaded, or compiled, now: a wait's time-out is for the drive."""
        board, requests, bell, seats, words, control = (self._board, self._requests, self._bell, self._seats, self._plan.words,
                                                        self._plan.control)
        compile_for(share.push, board, requests, bell, control, *[0] * 8)
        compile_for(share.ring, bell)
        compile_for(share.free_seat, seats, words, 0, 0, self._last)
        compile_for(share.ready_row, seats, 0, 0, words, 0, 0, 0)
        compile_for(share.wait_seated, seats, self._seat_words, 0, 0, 0, 0)
        compile_for(wait_layer, words, 0, 0, 0, 0, True)

    def _look_into(self, n: protocol.Welcome) -> None:
        """The parts of the store's own block that are looked at here."""
        self._plan.words = self._block.cut([("words", np.int32, (n.batch_rows * n.line,))], n.words_at)["words"]
        self._plan.control = self._block.cut([("control", np.int64, (p.C_COUNT,))], n.control_at)["control"]
        self._state = SimpleNamespace(slab=self._block.memory[n.slab_at:n.slab_at + n.slots * n.stride])

    # ------------------------------------------------------------ the public face

    def warm(self, sequences: Any, *, participates: Any = None, lookback: Any = None) -> None:
        """Fill the server's cache with what the sequences need, in the background class. Returns at once and holds no slots."""
        self._check()
        chosen = [_on_host(sequence) for sequence in _sequences(sequences, participates, lookback, None)]
        self._look_at_manifest()
        before = self.geometry.max_ngram - 1
        tokens, flags, _ = flatten(chosen, before + 1)
        check_ids(chosen, before + 1, tokens, flags, self._vocabulary)
        window = max(1, min(WARM_WINDOW, self.capacity // (len(self.layers) * self.geometry.orders)))
        for start in range(0, len(tokens), self.positions):
            first = max(0, start - before)                   # what a piece looks back at goes with it, and puts nothing out
            part, part_flags = tokens[first:start + self.positions], flags[first:start + self.positions].copy()
            part_flags[:start - first] &= ~np.uint8(OUTPUT)
            with self._lock:
                row = self._free_seat()
                self._tokens[row, :len(part)] = part
                self._flags[row, :len(part)] = part_flags
                self._push(row, len(part), int(np.count_nonzero(part_flags & OUTPUT)), "background", window)

    def frame(self, tokens: int) -> Frame:
        """Fixed addresses for gathers in a CUDA graph (see Frame). Needs device="cuda"; ConfigError after 512 of them."""
        from ssdgram.serve.frame import AttachedFrame

        self._check()
        return AttachedFrame(self, tokens)

    def _frame_words(self) -> np.ndarray:
        """The next frame's line of GPU words, int64 [layers]."""
        layers = len(self.layers)
        with self._lock:
            if self._frames == share.FRAMES:
                raise ConfigError(f"{share.FRAMES} frames were made of this attached store: make fewer, or attach once more")
            first = (self._rows + self._frames) * layers
            self._frames += 1
        return self._arrays["gpu_words"][first:first + layers]

    def record(self, path: str | os.PathLike[str], *, limit: int = 1 << 20, keys: bool = False) -> Recorder:
        """As Store.record: what this process asks for. Only tokens: the keys' arithmetic is the server's."""
        if keys:
            raise ConfigError("keys=True of an attached store: only tokens are recorded here; record keys where a store is opened")
        return super().record(path, limit=limit)

    def stats(self) -> Stats:
        """The server's counters; waits and bytes served are this process's own."""
        self._check()
        body = self._ask(protocol.ASK_STATS)
        return replace(protocol.stats_from_json(body), bytes_served=self._served_bytes, wait_us_buckets=bounds(self._wait_counts),
                       wait_us_sum=self._wait_us_sum)

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave the server; it takes back what this process held. Idempotent."""
        if not self._end_calls():
            return
        if self._cuda is not None and not self._cuda.close(timeout_s):      # its gathers are done before the server hears of the end
            self._leak("kernels that may read the cache are still under way", timeout_s)
            return
        self._connection.close()

    def _leak(self, why: str, timeout_s: float) -> None:
        """Keep the server's memory mapped and this client's seats taken until the process ends: the server hears of that."""
        log.error("%s: %s after %g s: this process stays attached until it ends", self.socket_path, why, timeout_s)
        _leaked.append((self._mapped, self._cuda, self._connection, self._token_rows, self._plan))

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r} at {str(self.socket_path)!r}{' (closed)' if getattr(self, '_closed', True) else ''}>"

    # ------------------------------------------------------------ what Batch, stats and metrics use

    def _check(self) -> None:
        super()._check()
        now = time.monotonic()
        if self._gone or self._board_words[share.B_STATE] not in GOING:
            self._lost("was stopped, or put this process out")
        if now - self._looked > LOOK_S:
            self._looked = now
            try:
                if self._connection.recv(1, sockets.MSG_PEEK | sockets.MSG_DONTWAIT) == b"":
                    self._lost("ended")
            except BlockingIOError:                          # nothing to read: it is there
                pass
            except OSError:
                self._lost("ended")

    def _expect_step(self) -> None:
        share.ring(self._bell)                               # the desk wakes up while the tokens are looked at here

    def _lost(self, how: str) -> None:
        """Raise ServerDiedError, now and at every later call."""
        self._gone = self._gone or how
        raise ServerDiedError(f"{self.socket_path}: the server (process {self._server_pid}) {self._gone}: its batches are void; attach "
                              f"again once it runs, and prefetch again")

    def _look_at_manifest(self) -> None:
        if self._board_words[share.B_STATE] == share.REPLACED:
            raise StoreReplacedError(f"the files of {self.path} are not those that the server opened (generation "
                                     f"{self.manifest.generation:016x}): restart the server, and attach again")

    def _submit(self, sequences: list[Sequence], priority: str, window: int, ticket: int | None = None,
                soon: bool = False) -> Batch:
        on_device = self._from_device(sequences)
        tokens, flags, positions = flatten(sequences, self.geometry.max_ngram)
        if not on_device:
            check_ids(sequences, self.geometry.max_ngram, tokens, flags, self._vocabulary)
        if positions > self.positions or len(tokens) > self._tokens.shape[1]:
            raise ConfigError(f"a batch of {positions} tokens ({len(tokens)} with lookbacks): the server takes {self.positions} "
                              f"({self._tokens.shape[1]}): split it, or start the server with more --batch-tokens")
        with self._lock:
            row = self._free_seat()
            batch = AttachedBatch(self, row, self._tickets + 1, positions, (tokens, flags))     # Ctrl-C from here on finds an owner
            if self._cuda is not None:
                _, batch._device_slots = self._cuda.plan_memory(row, (len(self.layers), positions, self.geometry.orders))
                mine = slice(row * len(self.layers), (row + 1) * len(self.layers))
                self._plan.layers[mine], self._plan.gpu_words[mine] = 0, 0
            if not on_device or sequences[0].fill is None:
                self._flags[row, :len(flags)] = flags
            if on_device:
                try:
                    _, _, batch._flag = self._cuda.tokens_to_host(sequences, self.geometry.max_ngram, tokens, flags, row, batch.ticket,
                                                                  self._registered(row))
                except BaseException:                        # the seat is free: what the next batch there writes is not written over
                    self._cuda.drain()
                    raise
            else:
                self._tokens[row, :len(tokens)] = tokens
                if self._recorder is not None:
                    self._recorder.add(tokens, flags)
            self._push(row, len(tokens), positions, priority, window, on_device)
            self._unreleased.add(row)
        return batch

    def _registered(self, row: int) -> Any:
        """The seat's tokens and flags as tensors that the GPU can write, registered when they are first wanted."""
        if row not in self._token_rows:
            import torch

            parts = self._tokens[row], self._flags[row]
            for part in parts:
                self._cuda.register(part.ctypes.data, part.nbytes)
            self._token_rows[row] = tuple(map(torch.from_numpy, parts))
        return self._token_rows[row]

    def _push(self, row: int, flat: int, positions: int, priority: str, window: int, on_device: bool = False) -> None:
        """Announce a request whose tokens and flags stand in the seat, or will; the caller holds the lock."""
        self._tickets += 1
        self._last[row] = self._tickets
        share.push(self._board, self._requests, self._bell, self._plan.control, share.TAKE_SEAT, row, self._tickets, flat, positions,
                   window, PRIORITIES[priority], int(on_device))

    def _free_seat(self) -> int:
        """A seat that is free; the caller holds the lock. Batches that were released may still be leaving: they are waited for."""
        deadline = time.monotonic() + ROW_WAIT_S
        while True:
            row = int(share.free_seat(self._seats, self._plan.words, self._line, self._first, self._last))
            if row >= 0:
                return row
            self._check()
            if len(self._unreleased) == self._rows or time.monotonic() > deadline:
                break
            share.ring(self._bell)                           # it may doze, with releases before it
            time.sleep(0.0002)
        tickets = sorted(int(self._last[row]) for row in self._unreleased)
        raise StoreBusyError(f"{len(tickets)} of this client's {self._rows} batches are unreleased, the oldest is "
                             f"{min(tickets, default=0)}: release batches, or start the server with more --batches", tickets)

    def _hand_back(self, batch: Batch) -> None:
        """Release a batch, if it was submitted."""
        if self._inherited():
            self._check()                                    # raises
        with self._lock:
            row = batch._row
            if self._closed or self._gone or self._last[row] != batch.ticket or row not in self._unreleased:
                return
            if self._cuda is not None:
                layers = len(self.layers)
                share.name_words(self._plan.layers, row * layers, layers, self._expected, self._arrays["gpu_words"])
            share.push(self._board, self._requests, self._bell, self._plan.control, share.LEAVE_SEAT, row, batch.ticket, 0, 0, 0, 0, 0)
            self._unreleased.discard(row)

    def _error_of(self, batch: AttachedBatch, index: int, waited: float, limit_s: float) -> Exception:
        """Why a layer of the batch is not ready, in the server's words if they come within that time."""
        try:
            body = self._ask(protocol.ASK_ERROR, batch._row, index, waited, limit_s)
        except UnavailableError as error:
            body, why = None, str(error)
        else:
            why = "the server has not taken the batch"
        if body is not None:
            return protocol.error_from_json(body)
        return ReadTimeoutError(f"layer {self.layers[index]} of batch {batch.ticket} is not there after {waited:.3g} s: {why}",
                                layer=self.layers[index], age_s=waited)

    def _ask(self, kind: int, row: int = 0, layer: int = 0, waited: float = 0.0, limit: float = ANSWER_S) -> Any:
        """The answer to a question. ServerDiedError, or UnavailableError if none came in time."""
        with self._asking:
            self._questions = (self._questions + 1) % (1 << 32)
            number, deadline = self._questions, time.monotonic() + limit
            try:
                self._connection.send(protocol.QUESTION.pack(kind, number, row, layer, waited))
                while True:
                    if not select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                        raise UnavailableError(f"{self.socket_path}: the server has not answered within {limit:g} s")
                    data, _ = protocol.receive(self._connection, protocol.MOST_TEXT)
                    if not data:
                        self._lost("ended")
                    if data[4:8] == number.to_bytes(4, "little"):            # else one that came too late for its question
                        return protocol.read_answer(data, kind, number)
            except (ConnectionError, json.JSONDecodeError) as error:
                if isinstance(error, ServerDiedError):
                    raise
                self._lost("ended" if isinstance(error, BrokenPipeError | ConnectionResetError) else f"answered nonsense ({error})")

    def _plan_of(self, row: int, positions: int) -> np.ndarray:
        """The slots of a batch row's plan, int32 [layers, T, orders], as the server wrote them."""
        shape = (len(self.layers), positions, self.geometry.orders)
        return self._plans[row, :shape[0] * shape[1] * shape[2]].reshape(shape)

    def _close_files(self) -> None:
        """There are none here."""

    def _wake_planner(self) -> None:
        """Nothing: the server's desk looks for tokens of a GPU itself."""

    def _forget(self) -> None:
        """In a forked child: the server is to notice when the parent ends, whether or not the child lives on."""
        self._connection.close()
        for mapped in self._mapped:
            mapped.forget()


def _on_host(sequence: Sequence) -> Sequence:
    """The sequence, its tokens brought from the device if they are there: what is warmed is in no hurry."""
    if sequence.fill is not None:
        raise ConfigError("a deferred Sequence is of a step: warm with tokens that are there")
    if sequence.device_tokens is None:
        return sequence
    kept, flags = sequence.lookback_length, sequence.flat_flags
    return Sequence(sequence.device_tokens.cpu(), flags[kept:] & PARTICIPATES, sequence.flat_tokens[:kept] if kept else None,
                    flags[:kept] & PARTICIPATES if kept else None)


def _connect(path: Path) -> sockets.socket:
    """A connection to the server's socket, its other end checked. UnavailableError."""
    connection = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET | sockets.SOCK_CLOEXEC)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise UnavailableError(f"{path}: no server answers there ({error.strerror or error}): start one with `ssdgram serve STORE --socket "
                               f"{path}`, as the same user") from error
    connection.setblocking(False)
    _, uid = protocol.peer(connection)
    if not protocol.may_speak(uid):
        connection.close()
        raise UnavailableError(f"{path}: the server runs as user {uid}, this process as {os.geteuid()}: only the same user's, or "
                               f"root's, is trusted")
    return connection
