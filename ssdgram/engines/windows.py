"""The hash windows of a step, from the tensors that the engine's own hash reads to the flat form that the planner reads.

    request r   | window: the n - 1 ids before its chunk | its tokens of this step |      flat index starts[r] + (n - 1) r + ...
    flags       | PARTICIPATES where there is one        | OUTPUT, PARTICIPATES    |      STARTS on the first of a request

A step's newest tokens exist on the GPU only (sampled, drafted), so one small kernel writes tokens and flags into pinned memory
behind what produces them; nobody waits for it but the planner. It knows neither engine; a `Windows` says where things lie.
Invariant: the kernel and `pack_on_host` write the same. What is not there (before a request's first token) takes no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS
from ssdgram.sequence import Mark, Sequence


@dataclass(slots=True, kw_only=True)                      # one a step: a frozen one is slow to make
class Windows:
    """Where a step's tokens and windows lie; torch tensors of one device.

    tokens: integers [>= T]; positions: integers [>= T], of the tokens in their requests; starts: int32 [>= R], first token of each
    request (None: every request has `block` tokens). before: int32 [>= R or slots, n - 1], ids before each chunk, a request's row
    being `rows[r]` (None: r), newest first or oldest first. image: the id of positions that take no part, -1: none; ids from
    `images_from` on count as images too (0: none do).
    """

    tokens: Any
    positions: Any
    before: Any
    count: int                                               # T
    requests: int                                            # R
    starts: Any = None
    block: int = 1
    rows: Any = None
    newest_first: bool = True
    image: int = -1
    images_from: int = 0

    def sequence(self) -> Sequence:
        """The step as one Sequence, whose tokens and flags are written when it is submitted."""
        requests = self.requests if self.count > 0 else 0    # requests without tokens are not looked up
        return Sequence.deferred(self.count, self.count + requests * self.before.shape[1], self.fill)

    def fill(self, tokens: Any, flags: Any, mark: Mark | None) -> bool:
        """Write flat tokens (int32) and flags (uint8): a kernel on the current stream, which stores the mark; or at once for tensors
        on the CPU. Whether the mark is taken care of."""
        if self.count == 0:
            return False
        if self.tokens.device.type == "cpu":
            pack_on_host(self, tokens.numpy(), flags.numpy())
            return False
        from ssdgram.engines import windows_gpu

        windows_gpu.pack(self, tokens, flags, mark)
        return mark is not None

    def load(self) -> None:
        """Load the kernels of steps with tensors like these, on their GPU: before the first step."""
        if self.tokens.device.type != "cpu":
            from ssdgram.engines import windows_gpu

            windows_gpu.load(self)


def pack_on_host(windows: Windows, tokens: np.ndarray, flags: np.ndarray) -> None:
    """The kernel's twin in NumPy."""
    w, depth = windows, windows.before.shape[1]
    count, requests = w.count, w.requests
    starts = np.arange(requests) * w.block if w.starts is None else w.starts.numpy()[:requests].astype(np.int64)
    ids = w.tokens.numpy()[:count].astype(np.int64)
    positions = w.positions.numpy()[:count].astype(np.int64)
    rows = np.arange(requests) if w.rows is None else w.rows.numpy()[:requests].astype(np.int64)
    before = w.before.numpy()[rows].astype(np.int64)
    if w.newest_first:
        before = before[:, ::-1]                             # oldest first
    request_of = np.searchsorted(starts, np.arange(count), side="right") - 1
    first = positions[np.minimum(starts, count - 1)]
    flat_starts = starts + depth * np.arange(requests)
    tokens[:], flags[:] = 0, 0
    own = np.arange(count) + depth * (request_of + 1)
    tokens[own] = ids
    flags[own] = OUTPUT | (PARTICIPATES * ~_is_image(w, ids)).astype(np.uint8)
    there = (first[:, None] - np.arange(depth, 0, -1) >= 0) & (before >= 0)
    lookback = (flat_starts[:, None] + np.arange(depth)).reshape(-1)
    tokens[lookback] = np.where(there, before, 0).reshape(-1)
    flags[lookback] = (PARTICIPATES * (there & ~_is_image(w, before))).astype(np.uint8).reshape(-1)
    flags[flat_starts] |= STARTS


def _is_image(windows: Windows, ids: np.ndarray) -> np.ndarray:
    image = ids == windows.image
    return image | (ids >= windows.images_from) if windows.images_from > 0 else image
