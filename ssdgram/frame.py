"""Frame: fixed addresses for gathers that are captured in a CUDA graph, and filled anew before each launch of it.

    frame = store.frame(256)                      once: for steps of up to 256 tokens
    with torch.cuda.graph(graph):
        rows = [frame.rows(layer) for layer in store.layers]
    ...
    with store.prefetch(tokens) as batch:         each step
        frame.load(batch)                         waits for the batch's rows and for the launch before, then fills the frame
        graph.replay()

Positions beyond the batch's tokens gather zeros. The gathers store the frame's number behind them, as those of a batch store
theirs, so the slots of a loaded batch are given back only after the replay has read them: a loaded batch must be replayed
before it is released, or taken out again by `discard`. A frame belongs to one thread and one graph at a time. Its memory lives
until the planner has looked at the words of all that was loaded, whether or not the frame does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ssdgram._calls import F_COUNT, F_NUMBER, F_NUMBERS, F_POSITIONS, F_SLOTS, F_USED, F_WORDS, frame_is_idle, load_frame, load_ready
from ssdgram.errors import BatchTooLargeError, ConfigError, ReadTimeoutError

if TYPE_CHECKING:
    from ssdgram.batch import Batch
    from ssdgram.kernels.distinct import Distinct
    from ssdgram.kernels.gather import Gather
    from ssdgram.store import Store


class Frame:
    """Made by `Store.frame`. `tokens`: the most positions that a loaded batch may have. `gathers`: of each layer; None: its own."""

    def __init__(self, store: Store, tokens: int, gathers: Sequence[Gather | Distinct] | None = None) -> None:
        if store._cuda is None:
            raise ConfigError("a frame holds addresses for a GPU: open the store with device='cuda'")
        if tokens < 1:
            raise ConfigError(f"tokens is {tokens}: expected the most tokens of a step, 1 or more")
        self._store, self._cuda, self.tokens = store, store._cuda, int(tokens)
        self._gathers = gathers or self._cuda.gathers_for(self.tokens)       # of each layer
        layers, orders = len(store.layers), store.geometry.orders
        self._slots = torch.full((layers, tokens, orders), -1, dtype=torch.int32).pin_memory()
        self._numbers = torch.zeros(layers, dtype=torch.int64).pin_memory()          # what the gathers store next
        self._words = torch.zeros(layers, dtype=torch.int64).pin_memory()            # what they stored last
        self._counters = torch.zeros(layers, dtype=torch.int32, device=self._cuda.device)
        self._slots_array, self._words_array = self._slots.numpy(), self._words.numpy()
        self._numbers_array = self._numbers.numpy()
        self._memory = self._slots, self._numbers, self._words, self._counters, self._gathers
        self._used = np.zeros(layers, np.uint8)              # layers that this frame gathers
        self._about = np.zeros(F_COUNT, np.int64)            # all of that, as compiled code finds it
        self._about[[F_SLOTS, F_NUMBERS, F_WORDS, F_USED, F_POSITIONS]] = (
            self._slots_array.ctypes.data, self._numbers_array.ctypes.data, self._words_array.ctypes.data, self._used.ctypes.data, tokens)
        self._loaded: Batch | None = None                    # set before a load, kept until the next one

    def rows(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Launch (or capture) the gather of a layer into bfloat16 [tokens, columns, dim] on the current stream."""
        return self._gather(layer, "rows", out)

    def packed(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Launch (or capture) the gather of a layer into uint8 [tokens, columns, row_bytes] on the current stream."""
        return self._gather(layer, "packed", out)

    def _gather(self, layer: int, mode: str, out: torch.Tensor | None) -> torch.Tensor:
        store, index = self._store, self._store._layer_index(layer)
        if self._used[index]:
            raise ConfigError(f"layer {layer} is gathered by this frame already: one gather of a layer, one word; make another frame")
        shape, dtype = self._cuda.output_of(store, self.tokens, mode)
        result = self._cuda.checked_output(out, shape, dtype)
        self._used[index] = 1
        self._gathers[index](self._slots[index], result, mode=mode, dram=self._cuda.slab, hbm=self._cuda.hbm.data_ptr(),
                             counter=self._counters[index:index + 1], done=self._words[index:index + 1],
                             ticket=self._numbers[index:index + 1])
        return result

    @property
    def idle(self) -> bool:
        """Whether the gathers of the last launch have run, so that a load waits for nothing but its batch."""
        return bool(frame_is_idle(self._words_array, self._used, self._number))

    def load(self, batch: Batch, timeout_s: float = 30.0) -> None:
        """Wait for the batch's rows and for the last launch's gathers, then put the batch's slots into the frame.

        Raises what `Batch.wait` raises, BatchTooLargeError for more positions than the frame has.
        """
        if len(batch) > self.tokens:
            raise BatchTooLargeError(len(batch), self.tokens)
        self._loaded = None                                  # the one before was replayed
        batch.wait(timeout_s=timeout_s)
        if not self.idle:
            self._wait_for_launch(timeout_s)
        self._take(batch)
        number = self._number + 1
        load_frame(self._store._plan.layers, batch._row, batch._slots, self._slots_array, self._numbers_array, self._words_array,
                   self._used, number)
        self._about[F_NUMBER] = number

    def load_now(self, batch: Batch) -> bool:
        """`load` if that waits for nothing, in one step: for a batch of the frame's own store. Whether it was done."""
        self._take(batch)
        if not load_ready(self._store._address, batch._row, self._about):
            self._loaded = None
            return False
        if self._store._closed:                              # by another thread: what was read is memory that was given back
            self._store._check()
        return True

    def _take(self, batch: Batch) -> None:
        """The batch is about to be loaded: Ctrl-C behind that finds it, and the words that its row will point to stay."""
        self._loaded = batch
        self._cuda.kept_by_row[batch._row] = self._memory

    @property
    def _number(self) -> int:
        """The number that the gathers of the last load store, or will store."""
        return int(self._about[F_NUMBER])

    def _wait_for_launch(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.idle:
            if time.monotonic() > deadline:
                raise ReadTimeoutError("the graph that was launched with this frame has not gathered its rows; was the batch "
                                       "that was loaded before ever replayed?", age_s=timeout_s)
            time.sleep(0)

    def discard(self, batch: Batch | None = None) -> None:
        """The batch that was loaded last (if it is `batch`; None: whichever) will not be replayed: it may be released.

        For who does not know whether it was launched, because an exception came, the current stream is waited for. Nothing happens
        if nothing was loaded since the last discard, or a load failed.
        """
        loaded = self._loaded
        if loaded is None or (batch is not None and batch is not loaded):
            return
        records: Any = self._store._plan.layers
        first, words = loaded._row * len(self._used), self._words_array.ctypes.data
        mine = [index for index in np.flatnonzero(self._used) if records[first + index]["word"] == words + 8 * index]
        if mine:
            self._cuda.drain()
            for index in mine:
                records[first + index]["word"], records[first + index]["expected"] = 0, 0
            self._about[F_NUMBER] = int(self._words_array[self._used != 0].max(initial=0))
        self._loaded = None
