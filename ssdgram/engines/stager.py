"""The step under way in one engine process: its batch, and the buffers of the engine that its rows go to.

    begin(windows)      the step's tokens are on their way: prefetch        (nothing: a dummy or idle step reads nothing)
    fill(layer)         the layer's rows into its buffer, on the current stream; waits on the host for reads, not for the GPU
    stage(windows)      begin and fill all layers at once: before a graph is launched that reads the buffers
    end()               the step is over, whatever came of it

Both engines' plug-ins drive it; it knows neither. The batch is released as soon as the last layer's gather is launched: the
planner gives the slots back when the GPU has run it. Invariant: a buffer's first T rows are those of the step that began last.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssdgram.errors import BatchTooLargeError, ConfigError, SSDGramError
from ssdgram.sequence import Sequence

if TYPE_CHECKING:
    from ssdgram.batch import Batch
    from ssdgram.engines.windows import Windows
    from ssdgram.staging import Staging
    from ssdgram.store import Store


@dataclass
class Counts:
    """What a process's plug-in did; `drafts` are positions of draft tokens, among `tokens`."""

    steps: int = 0
    idle_steps: int = 0                                      # dummy and idle ones: nothing was read for them
    graph_steps: int = 0                                     # filled before a whole graph was launched
    tokens: int = 0
    drafts: int = 0
    abandoned: int = 0                                       # steps whose rows nobody took
    wait_s: float = 0.0                                      # on the host, for ids and reads


class Stager:
    """One per process. `targets`: decoder layer -> torch bf16 [most tokens, columns, dim], written from row 0 on; may be empty, or
    grow later, where every `fill` says its `out`. `most_tokens`: of a step, if the targets do not say. A target or `out` of uint8
    gets the rows' bytes instead."""

    def __init__(self, store: Store, targets: Mapping[int, Any], *, most_tokens: int = 0, timeout_s: float = 30.0) -> None:
        self.store, self.timeout_s = store, timeout_s
        self.targets = dict(targets)
        self.counts = Counts()
        self._staging: Staging | None = None                 # of the buffers that graphs read
        self._batch: Batch | None = None
        self._left: list[int] = []
        self._positions = 0
        self.most_tokens = min((target.shape[0] for target in self.targets.values()), default=most_tokens)
        shape = (len(store.columns), store.dim)
        for layer, target in self.targets.items():
            if tuple(target.shape[1:]) != shape or not target.is_contiguous():
                raise ConfigError(f"layer {layer}'s buffer is {target.dtype} {list(target.shape)}: expected rows of {list(shape)}")
        most = getattr(store, "positions", self.most_tokens)             # of a server
        if self.most_tokens > most:
            raise ConfigError(f"a step may have {self.most_tokens} tokens, the server takes {most} at a time: start it with "
                              f"--batch-tokens {self.most_tokens}")
        orders = len({column // store.geometry.heads for column in store.columns})       # of which there are bundles here
        need = self.most_tokens * orders * len(store.layers)
        if need > store.capacity:
            missing = (need - store.capacity) * store._stride >> 20
            raise ConfigError(f"a step of {self.most_tokens} tokens may need {need} bundles at once, the DRAM budget holds "
                              f"{store.capacity}: raise SSDGRAM_DRAM by {missing + 1} MiB, or lower the engine's tokens per step")

    @property
    def active(self) -> bool:
        """Whether a step is under way whose rows are not all taken."""
        return self._batch is not None

    def begin(self, step: Windows | Sequence | None, *, drafts: int = 0) -> None:
        """A step begins; what was left of the one before is given up. None: a step without real tokens."""
        self.end()
        if step is None:
            self.counts.idle_steps += 1
            return
        sequence = step if isinstance(step, Sequence) else step.sequence()
        if self.targets and len(sequence) > min(target.shape[0] for target in self.targets.values()):
            raise BatchTooLargeError(len(sequence), self.most_tokens)
        self._batch = self.store.prefetch(sequence)
        self._left = list(self.store.layers)
        self._positions = len(sequence)
        self._count(len(sequence), drafts)

    def stage(self, step: Windows | Sequence, *, drafts: int = 0, targets: Mapping[int, Any] | None = None) -> None:
        """A step begins, and the rows of all its layers go into the buffers before anything else is launched on the current stream.

        `targets`: the buffers, where the stager was given none; the same ones from call to call, or the graphs that fill them are
        captured anew.
        """
        targets = self.targets if targets is None else targets
        staging = self._staging_into(targets)
        if staging is None:
            self.begin(step, drafts=drafts)                  # bytes are gathered a layer at a time
            self.counts.graph_steps += 1
            for layer in tuple(self._left):
                self.fill(layer, targets[layer])
            return
        self.end()
        begun = time.monotonic()
        count = staging.fill(step if isinstance(step, Sequence) else step.sequence(), self.timeout_s)
        self.counts.wait_s += time.monotonic() - begun
        self.counts.graph_steps += 1
        self._count(count, drafts)

    def _count(self, positions: int, drafts: int) -> None:
        self.counts.steps += 1
        self.counts.tokens += positions
        self.counts.drafts += drafts

    def _staging_into(self, targets: Mapping[int, Any]) -> Staging | None:
        """The staging of these buffers, which graphs read: that of the last step, as a rule. None: they take bytes."""
        staging = self._staging
        if staging is not None:
            for layer, target in targets.items():
                if staging.places[layer] != (target.data_ptr(), target.shape[0], target.dtype):
                    break
            else:
                return staging
        if any(target.element_size() == 1 for target in targets.values()):
            return None
        self._staging = self.store.staging(targets)
        return self._staging

    def ready(self, layer: int) -> bool:
        """Whether `fill(layer)` would not wait."""
        return self._batch is not None and layer in self._left and self._batch.ready(layer)

    def waits_for(self, layer: int) -> bool:
        """Whether the step's rows of the layer are not in its buffer yet."""
        return self._batch is not None and layer in self._left

    def fill(self, layer: int, out: Any = None) -> bool:
        """Put the layer's rows into the first rows of its buffer, or of `out`; once per layer and step. Whether there were any."""
        batch = self._batch
        if batch is None or layer not in self._left:
            return False
        with self._given_up_on_error():
            begun = time.monotonic()
            batch.wait(layer, timeout_s=self.timeout_s)
            self.counts.wait_s += time.monotonic() - begun
            target = (self.targets[layer] if out is None else out)[:self._positions]
            (batch.packed if target.element_size() == 1 else batch.rows)(layer, out=target)
        self._left.remove(layer)
        if not self._left:
            self._batch = None
            batch.release()
        return True

    def end(self) -> None:
        """Give up what is left of the step. Idempotent."""
        batch, self._batch = self._batch, None
        self._left = []
        if batch is not None:
            self.counts.abandoned += 1
            with contextlib.suppress(SSDGramError):          # closed meanwhile
                batch.release()

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.end()
            raise

    def close(self) -> None:
        """End the step and close the store."""
        self.end()
        self.store.close()
