"""A Batch: the claim of one prefetch on its bundles, from the call until it is released.

    batch = store.prefetch(tokens)          returns at once
    batch.wait(layer)                       until that layer's rows are in their slots; raises what the reads raised
    rows = batch.rows(layer)                new memory, outlives the batch
    batch.release()                         its slots may be used again (also the end of a `with`)

It belongs to one thread at a time. It reads the planner's words and its own plan, never the cache. Invariant: between
prefetch and release every slot of its plan holds the bundle that was planned, or its layer fails.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._calls import FAILED, READY, REFUSED, TIMED_OUT, all_ready, hurry, outcome, wait_layer
from ssdgram.cache.directory import mix
from ssdgram.errors import (
    BatchReleasedError,
    BatchTooLargeError,
    ConfigError,
    ReadError,
    ReadTimeoutError,
    RowCheckError,
    StoreBusyError,
    TokenError,
)
from ssdgram.kernels.hash import OUTPUT, STARTS
from ssdgram.layout.page import describe, page_fault, signed

if TYPE_CHECKING:
    import torch

    from ssdgram.store import Store

SPIN_NS = 20_000 if len(os.sched_getaffinity(0)) < 8 else 200_000      # before a wait sleeps: a wake-up takes 50 us
HURRY_NS = 5_000_000                                         # how long a wait looks for a GPU's tokens itself, before it sleeps
NAP_NS = 50_000_000                                          # a wait comes back to Python this often, so that Ctrl-C is answered


class Batch:
    """What `Store.prefetch` returns. `len(batch)` = T positions; `ticket` numbers the batches of a store from 1."""

    __slots__ = ("__weakref__", "_base", "_device_slots", "_events", "_flag", "_flat", "_held", "_ready", "_released", "_row", "_slots",
                 "_store", "ticket")

    def __init__(self, store: Store, row: int, ticket: int, slots: np.ndarray, held: np.ndarray,
                 flat: tuple[np.ndarray, np.ndarray]) -> None:
        self._store, self._row, self.ticket = store, row, ticket
        self._slots, self._held, self._flat = slots, held, flat
        self._base = row * store._line
        self._ready = [False] * slots.shape[0]
        self._flag = 0                                       # address of the word that says that the GPU's tokens are there
        self._device_slots: Any = None                       # the plan as the GPU reads it, [layers, T, orders]
        self._events: dict[int, int] = {}                    # layer index -> handle of the CUDA stream of its newest gather
        self._released = False

    def __len__(self) -> int:
        return int(self._slots.shape[1])

    def __repr__(self) -> str:
        state = "released" if self._released else "open"
        return f"<Batch {self.ticket}: {len(self)} positions, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Batch is a claim on its store's memory and cannot be pickled; pickle the tokens instead")

    # ------------------------------------------------------------ waiting

    def wait(self, layer: int | None = None, timeout_s: float = 30.0) -> None:
        """Until the rows of `layer` (0-based decoder layer; None: of all layers) are in their slots.

        Raises what their reads raised (ReadError, RowCheckError), ReadTimeoutError after `timeout_s`, StoreBusyError if there
        were no slots in that time, BatchTooLargeError if there never can be. A degraded store cuts the time short.
        """
        self._check()
        if layer is None and self._all_ready(timeout_s):
            return
        if timeout_s != timeout_s:
            raise ConfigError(f"timeout_s is {timeout_s}: expected seconds")
        deadline = time.monotonic() + timeout_s
        for index in range(len(self._ready)) if layer is None else (self._store._layer_index(layer),):
            if not self._ready[index]:
                self._wait_for(index, deadline)

    def ready(self, layer: int | None = None) -> bool:
        """Whether `wait(layer)` would return, or raise, at once. Never blocks."""
        self._check()
        words = self._store._plan.words
        return all(self._ready[index] or int(outcome(words, self._base, index)) != TIMED_OUT
                   for index in (range(len(self._ready)) if layer is None else (self._store._layer_index(layer),)))

    def _all_ready(self, timeout_s: float) -> bool:
        """Whether every layer is, found out in one call and noted: the usual case of a warm step. May look for as long as a spin takes."""
        if not all_ready(self._store._plan.words, self._base, len(self._ready)):
            return False
        self._note_ready(0.0)
        return True

    def _note_ready(self, waited_s: float) -> None:
        """Every layer is ready, after that wait for those of which that was not known."""
        self._store._count_wait(waited_s, len(self._ready) - sum(self._ready))
        self._ready = [True] * len(self._ready)

    def _wait_for(self, index: int, deadline: float) -> None:
        store = self._store
        words = store._plan.words
        result = int(outcome(words, self._base, index))
        if result == READY:
            store._count_wait(0.0)
            self._ready[index] = True
            return
        self.plan_now()
        begin = time.monotonic()
        while result == TIMED_OUT:
            now = time.monotonic()
            if now >= self._cut_short(deadline, begin):
                break
            result = int(wait_layer(words, self._base, index, int(min(NAP_NS, max(0.0, (deadline - now) * 1e9))), SPIN_NS, False))
            if result == TIMED_OUT:
                self._check()
        store._count_wait(time.monotonic() - begin)
        if result != READY:
            raise self._error(index, result, time.monotonic() - begin)
        self._ready[index] = True

    def plan_now(self) -> None:
        """Look for tokens that a GPU sends, and plan them on this thread if the planner sleeps. Nothing to do for others."""
        if self._flag:
            if hurry(self._flag, self.ticket, HURRY_NS):
                self._store._plan_here(self._row)
            else:
                self._store._wake_planner()                  # which was perhaps not told of it: it looks for them from now on
            self._flag = 0

    def _cut_short(self, deadline: float, begin: float) -> float:
        """The deadline; while the drive does not answer, a much nearer one."""
        if self._store._plan.control[p.C_STATE] != p.DEGRADED:
            return deadline
        return min(deadline, begin + self._store.tuning.degraded_wait_s)

    # ------------------------------------------------------------ results

    def rows(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's rows as torch bfloat16 [T, columns, dim]: value = bf16(code * 2^(scale - 127)) (spec A7); waits for it."""
        from ssdgram import _gather

        return _gather.rows(self, self._store._layer_index(layer), out)

    def packed(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's rows as torch uint8 [T, columns, row_bytes], byte for byte as in the checkpoint (codes, then scales)."""
        from ssdgram import _gather

        return _gather.packed(self, self._store._layer_index(layer), out)

    def addresses(self, layer: int) -> torch.Tensor:
        """Device addresses of the layer's bundles, torch int64 [T, orders], valid until release; 0: not served here."""
        from ssdgram import _gather

        return _gather.addresses(self, self._store._layer_index(layer))

    @property
    def timing(self) -> dict[str, float]:
        """What the planner noted, in microseconds since the request was taken, and its counts. Only for a batch not released."""
        self._check()
        record = self._store._plan.batches[self._row]
        taken = int(record["taken_ns"])
        published = self._store._plan.layers["published_ns"][self._row * len(self._ready):(self._row + 1) * len(self._ready)]
        return {"queued_us": (taken - int(record["submitted_ns"])) / 1e3,
                "planned_us": (int(record["planned_ns"]) - taken) / 1e3,
                "published_us": (int(published.max()) - taken) / 1e3,
                "probes": int(record["probes"]), "misses": int(record["misses"]), "joined": int(record["joined"]),
                "reads": int(record["reads"]), "bundles": int(record["need"])}

    # ------------------------------------------------------------ the end

    def release(self) -> None:
        """Give the slots back. Idempotent. Reads under way go on and fill the cache; nothing of them reaches this batch."""
        if self._released and self._store._usable():
            return
        self._store._hand_back(self)
        self._released = True

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._store._inherited():                     # a child that leaves its parent's `with` has nothing to release
            self.release()

    def __del__(self) -> None:
        if not getattr(self, "_released", True) and self._store._usable():
            self.release()
            warnings.warn(f"{self!r} was dropped without release()", ResourceWarning, stacklevel=2, source=self)

    def _disown(self) -> None:
        """This object stands for the planner's batch no more: nothing happens when it is dropped."""
        self._released = True

    def _check(self) -> None:
        self._store._check()
        if self._released:
            raise BatchReleasedError(f"batch {self.ticket} was released: its slots may hold other bundles by now")

    # ------------------------------------------------------------ errors

    def _error(self, index: int, result: int, waited_s: float) -> Exception:
        layer = self._store.layers[index]
        if result == FAILED:
            return self._read_error(index, layer)
        if result == REFUSED:
            error = int(self._store._plan.words[self._base + p.W_ERROR])
            if error == p.TOO_LARGE:
                return BatchTooLargeError(self._distinct_bundles(), self._store.capacity)
            index = int(self._store._plan.batches["bad_token"][self._row])
            return TokenError(f"batch {self.ticket}: token {index} (lookbacks counted) is {self._flat[0][index]}: expected 0 .. "
                              f"{self._store._vocabulary - 1} (a vocabulary of {self._store._vocabulary})")
        return self._timeout_error(index, layer, waited_s)

    def _distinct_bundles(self) -> int:
        """Bundles served here that the batch needs at once, those apart that every store holds anyway. For messages only."""
        store = self._store
        keys, dead = store._keys_of(*self._flat), store._keys_of(np.zeros(1, np.int32), np.full(1, STARTS | OUTPUT, np.uint8))[0]
        rank, world = store._owner
        count = 0
        for g, group in enumerate(store._plan.groups):
            if group["heads"] > 0:
                distinct = np.setdiff1d(keys[:, g], dead[g:g + 1])
                count += sum(int(mix(x, group["number"])) % world == rank for x in distinct) if world > 1 else len(distinct)
        return count

    def _timeout_error(self, index: int, layer: int, waited_s: float) -> Exception:
        store, plan = self._store, self._store._plan
        active = [int(b) for b in plan.active[:int(plan.control[p.C_ACTIVE])]]
        stages = {b: int(plan.words[b * store._line + p.W_STAGE]) for b in active}
        starved = any(plan.words[b * store._line + p.W_STARVED] for b in active)
        if starved and stages.get(self._row) in (p.QUEUED, p.PLANNING, p.UNWINDING):
            need = self._distinct_bundles()
            if need > store.capacity:
                return BatchTooLargeError(need, store.capacity)
            budget = "dram" if store._gds is None else "hbm"         # where the slots lie
            others = sorted(int(plan.batches["ticket"][b]) for b in active if b != self._row and plan.batches["ticket"][b] > 0)
            return StoreBusyError(f"batch {self.ticket} found no free slots for {waited_s:.3g} s: unreleased batches {others} hold "
                                  f"them; release batches earlier, or open the store with a larger {budget}= budget", others)
        state = p.STATE_NAMES[int(plan.control[p.C_STATE])]
        outstanding = self._outstanding(index)
        return ReadTimeoutError(f"layer {layer} of batch {self.ticket}: {outstanding} rows have not arrived after {waited_s:.3g} s (store "
                                f"{state}, oldest read {store.stats().oldest_read_age_s:.3g} s old); is the drive answering?",
                                layer=layer, outstanding=outstanding, age_s=waited_s)

    def _outstanding(self, index: int) -> int:
        """Rows of a layer that are not in their slots yet, of the bundles planned so far."""
        plan = self._store._plan
        if plan.words[self._base + p.W_STAGE] in (p.QUEUED, p.SUBMITTED):   # its records may still be those of the batch before
            return 0
        held = np.unique(self._held[index, :int(plan.layers["held"][self._row * len(self._ready) + index])])
        slots = plan.slots[held[(held >= 0) & (held < len(plan.slots))]]     # the planner may be writing there
        unread = slots["status"] == p.SLOT_RESERVED
        heads = plan.groups["heads"][plan.group_index[slots["group"][unread]]]
        return int(slots["pending"][slots["status"] == p.SLOT_READING].sum() + heads.sum())

    def _read_error(self, index: int, layer: int) -> ReadError:
        """The error of a layer that failed: all that is wrong with the page of its first bad bundle, and how many more there are."""
        store, plan = self._store, self._store._plan
        line = self._row * len(store.layers) + index
        first = int(plan.layers["failed_slot"][line])
        file, status = int(plan.failures["file"][first]), int(plan.failures["status"][first])
        column_rows, per_page = int(store._state.files["rows"][file]), store.manifest.rows_per_page
        page = int(plan.slots["x"][first]) % column_rows // per_page
        held = np.unique(self._held[index, :int(plan.layers["held"][line])])
        failed = held[plan.slots["status"][held] == p.SLOT_FAILED]
        row_of = plan.slots["x"][failed] % column_rows
        here = (plan.failures["file"][failed] == file) & (row_of // per_page == page)
        rows = np.unique(row_of[here]).tolist()
        positions = np.flatnonzero(np.isin(self._slots[index], failed[here]).any(axis=1)).tolist()
        more = f" ({len(failed) - int(here.sum())} more bundles of this layer failed)" if not here.all() else ""
        path = str(store._paths[file])
        where = f"layer {layer}, {path}, page {page}, rows {_some(rows)}, token positions {_some(positions)}{more}"
        details: dict[str, Any] = {"layer": layer, "file": path, "page": page, "rows": rows, "positions": positions}
        tries = f"{store.tuning.retries + 2} reads by two paths"
        if status == s.READ_CHECK:
            return RowCheckError(f"{where}: wrong checksum after {tries}; {self._page_says(file, page)}; run `ssdgram verify`, then "
                                 f"restore the file or convert again", **details)
        if status == s.READ_SHORT:
            return ReadError(f"{where}: the file ends before this page; it was truncated: restore it or convert again", **details)
        error = ReadError(f"{where}: {os.strerror(status)} after {tries}; look at the drive (dmesg), restore the file or convert "
                          f"again", **details)
        error.errno = status
        return error

    def _page_says(self, file: int, page: int) -> str:
        """What a look at the whole page finds, in words."""
        store = self._store
        record = store._state.files[file]
        buffer = np.zeros(4096, np.uint8)
        try:
            data = os.pread(int(record["buffered_fd"]), 4096, page * 4096)
        except OSError as error:
            return f"the page cannot be read ({error.strerror})"
        buffer[:len(data)] = np.frombuffer(data, np.uint8)
        fault = int(page_fault(buffer.ctypes.data, store.manifest.row_bytes, int(record["rows"]), signed(store.manifest.generation),
                               int(record["layer"]), int(record["column"]), page))
        return f"the page is {describe(fault, store.manifest.row_bytes, page)}"


def _some(numbers: list[int]) -> str:
    """The first few, for a message."""
    return f"[{', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}]"
