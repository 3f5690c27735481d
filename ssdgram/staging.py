"""Staging: the rows of a whole step into fixed tensors by one call, the shortest way from tokens to rows.

    staging = store.staging({layer: out, ...})            once; out: bf16 [most tokens, columns, dim]
    count = staging.fill(tokens)                          each step: rows 0 .. count - 1 of every `out` are the tokens'

A small step (a decode step) is planned by the calling thread, put into a frame and gathered by one launch of a CUDA graph that
was captured here. A large one (a prefill) is cut into pieces: while the GPU gathers the first the next is planned, so the plan
costs the time of one piece. Each piece begins at a row that is known beforehand, so pieces have captured graphs, too. Where there is
none (the GPU is behind, or the step is very long) that piece and all after it are gathered by single launches, the layers by turns
on the current stream and on one beside it: the end of one gather, which leaves the link idle, is filled by the other. Of large
pieces each distinct bundle is read once. It knows neither cache nor planner; it is built on batches and frames.
Invariant: when `fill` returns or raises, what is launched on the current stream runs behind all gathers, and their slots are held
until they have run.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ssdgram.errors import BatchTooLargeError, ConfigError, StoreBusyError, TokenError
from ssdgram.sequence import Sequence, check_ids, cuts, flatten, pieces

if TYPE_CHECKING:
    from ssdgram.batch import Batch
    from ssdgram.store import Store

GRAPHS = (16, 64, 128, 256, 512)                             # positions of the graphs that begin a step
AHEAD = 3                                                    # pieces under way at a time
PIECES = (512, 1024, 2048)                                   # positions of the first pieces, and of all others: while one is gathered
                                                             # the next is planned, so the first are small; multiples of 8, for a gather
                                                             # writes to 16-byte boundaries
CAPTURED = 16384                                             # rows that the graphs of pieces reach over
DISTINCT = 256                                               # positions from which a gather reads each distinct bundle once
NOTHING = contextlib.nullcontext()


def graphs_of(most: int) -> list[tuple[int, int]]:
    """(first row, positions) of the graphs for steps of up to `most` positions: those that begin a step, few positions first, then
    for each later piece one of each size that it may have."""
    found = {(0, min(size, most)) for size in GRAPHS}
    for start, stop in cuts(most, PIECES):
        if 0 < start < CAPTURED:
            found |= {(start, min(size, stop - start)) for size in PIECES}
    return sorted(found)


class Staging:
    """Made by `Store.staging`. `most`: positions that fit. One thread and one stream at a time."""

    def __init__(self, store: Store, targets: Mapping[int, Any]) -> None:
        self.store, self.targets = store, dict(targets)
        if set(self.targets) != set(store.layers):
            raise ConfigError(f"tensors are given for layers {sorted(self.targets)}: expected those of the store, {list(store.layers)}")
        self.most = min(len(target) for target in self.targets.values())
        shape = (len(store.columns), store.dim)
        for layer, target in self.targets.items():
            if tuple(target.shape[1:]) != shape or str(target.dtype) != "torch.bfloat16" or not target.is_contiguous():
                raise ConfigError(f"layer {layer}'s tensor is {target.dtype} {list(target.shape)}: expected contiguous torch.bfloat16 "
                                  f"[tokens, {shape[0]}, {shape[1]}]")
        self.places = {layer: (target.data_ptr(), target.shape[0], target.dtype) for layer, target in self.targets.items()}
        self._graphs: dict[int, list[tuple[int, Any, Any]]] = {}     # first row -> (positions, frame, graph), from few to many
        self._beside: Any = None                             # the other stream
        self._distinct: Any = ()                             # of each layer, the gather for large pieces
        self._in_order: Any = None                           # entered for large steps
        if store._cuda is not None:
            from ssdgram import staging_gpu

            self._beside, self._in_order = staging_gpu.Beside(store._cuda.device), staging_gpu.InOrder(store._cuda.device)
            if self.most >= DISTINCT and store._cuda.slab_memory is None:
                self._distinct = store._cuda.gathers_for(min(self.most, max(PIECES)))
            self._graphs = staging_gpu.capture(store, self.targets, graphs_of(self.most), self._distinct)

    def fill(self, step: Any, timeout_s: float = 30.0) -> int:
        """Rows of the step's positions into the first rows of every tensor; how many positions there are.

        `step`: a Sequence, or what `prefetch` takes as tokens. Waits for reads; for the GPU only while it still gathers the last small
        step by the same graph, while it is so many pieces behind that no batch is free, and after a step that ended with an exception.
        Rows behind the step's are left or set to zero.
        Raises what `prefetch` and `Batch.wait` raise, when some rows may have been written already; BatchTooLargeError for more
        positions than fit.
        """
        sequence = step if isinstance(step, Sequence) else Sequence(step)
        count = len(sequence)
        if count > self.most:
            raise BatchTooLargeError(count, self.most)
        for size, frame, graph in self._graphs.get(0, ()):
            if count <= size:
                if count:
                    with self._order(size):
                        self._replay(sequence, frame, graph, timeout_s)
                return count
        with self._order(count):
            self._gather(sequence, timeout_s)
        return count

    def _order(self, positions: int) -> contextlib.AbstractContextManager[Any]:
        """What is launched under it runs behind what was launched so before, on whatever stream: gathers of distinct bundles share
        tables, which small steps do not use. These too come behind a step that was interrupted."""
        if self._in_order is None:
            return NOTHING
        if positions < DISTINCT:
            self._in_order.mend()
            return NOTHING
        return self._in_order                                # type: ignore[no-any-return]

    def _replay(self, sequence: Sequence, frame: Any, graph: Any, timeout_s: float) -> None:
        store = self.store
        store._check()
        store._look_at_manifest()
        batch = store._submit([sequence], "step", 0, soon=True)
        try:
            batch.plan_now()
            self._load_and_replay(batch, frame, graph, timeout_s)
        finally:
            batch.release()

    def _load_and_replay(self, batch: Batch, frame: Any, graph: Any, timeout_s: float) -> None:
        try:
            known = frame.load_now(batch)
            if not known:
                frame.load(batch, timeout_s)
            graph.replay()
        except BaseException:                                # Ctrl-C may come behind the load, and behind the launch
            frame.discard(batch)
            raise
        if known:                                            # counted behind the launch: the GPU works already
            self.store._count_wait(0.0, len(self.targets))

    def _gather(self, sequence: Sequence, timeout_s: float) -> None:
        """Piece by piece; the next ones are begun before the first is waited for, so that the planner always has one."""
        store, deadline, start = self.store, time.monotonic() + timeout_s, 0
        n = store.geometry.max_ngram
        parts = pieces(sequence, n, PIECES)
        begun: collections.deque[Batch] = collections.deque()
        coming, forked = next(parts, None), False
        try:
            while begun or coming is not None:
                while coming is not None and len(begun) < AHEAD:
                    try:
                        begun.append(store.prefetch(coming))
                    except StoreBusyError:                   # of few batches at once, or others have them: one will do
                        if not begun:
                            raise
                        break
                    except TokenError:                       # names the position in the step, not in a piece
                        check_ids([sequence], n, *flatten([sequence], n)[:2], store._vocabulary)
                        raise
                    coming = next(parts, None)
                # A graph writes zeros behind its rows and shares the tables of `_distinct`, so all of them are on the stream before
                # the fork.
                graph = None if forked else self._graph_for(start, len(begun[0]))
                if graph is not None:
                    self._load_and_replay(begun[0], *graph, max(0.0, deadline - time.monotonic()))
                elif len(begun[0]) > 0:
                    if self._beside is not None and not forked:
                        self._beside.fork()
                        forked = True
                    self._launch(begun[0], start, deadline)
                start += len(begun[0])
                begun.popleft().release()
        finally:
            try:
                if forked:
                    self._beside.join()
            finally:
                for batch in begun:
                    batch.release()

    def _graph_for(self, start: int, count: int) -> tuple[Any, Any] | None:
        """Frame and graph of the fewest positions from row `start` on that take so many; None if none does, or the GPU has not run its
        last launch yet."""
        if count == 0:
            return None
        return next(((frame, graph) for size, frame, graph in self._graphs.get(start, ()) if count <= size and frame.idle), None)

    def _launch(self, batch: Batch, start: int, deadline: float) -> None:
        """The gathers of a piece whose first row is row `start` of the step, once its bundles are there."""
        cuda, row_bytes = self.store._cuda, 2 * len(self.store.columns) * self.store.dim
        for number, (layer, (place, _, _)) in enumerate(self.places.items()):
            batch.wait(layer, max(0.0, deadline - time.monotonic()))
            if cuda is None:
                batch.rows(layer, out=self.targets[layer][start:start + len(batch)])
                continue
            index, gather = self.store._layer_index(layer), None
            if self._distinct and DISTINCT <= len(batch) <= self._distinct[index].tokens:
                gather = self._distinct[index]
                cuda.kept_by_row[batch._row] = self._distinct        # until its words arrived, whatever becomes of this object
            with self._beside.use() if number % 2 else NOTHING:
                cuda.rows_to(batch, index, place + start * row_bytes, gather)
