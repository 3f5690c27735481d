"""The kernel of `ssdgram.engines.windows`: a step's tokens, windows and flags into pinned memory, one launch.

A program writes BLOCK flat entries and finds their requests by bisection over the starts, so chunks of any lengths are as cheap
as a decode step. The last program to finish stores the ticket that says so to the planner. Its twin on the host is
`windows.pack_on_host`. Invariant: it reads only what the engine's hash reads, and the ticket comes behind all that is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssdgram.engines.windows import Windows
from ssdgram.errors import ConfigError
from ssdgram.kernels.launch import Launch, preload
from ssdgram.sequence import Mark

BLOCK = 128


@triton.jit(do_not_specialize=["ticket", "count", "requests", "row_stride", "steps", "image", "images_from"],
            do_not_specialize_on_alignment=["tokens", "positions", "before", "starts", "rows", "out", "out_flags", "counter", "done"])
def pack_kernel(tokens, positions, before, starts, rows, out, out_flags, counter, done, ticket: tl.int64,  # type: ignore[no-untyped-def]
                count: tl.int32, requests: tl.int32, row_stride: tl.int32, steps: tl.int32, image: tl.int64, images_from: tl.int64,
                DEPTH: tl.constexpr, UNIFORM: tl.constexpr,
                BY_ROW: tl.constexpr, NEWEST_FIRST: tl.constexpr, MARK: tl.constexpr, BLOCK: tl.constexpr):
    """See the module's text. UNIFORM: tokens of every request, 0: `starts` says. Flags: 1 takes part, 2 starts, 4 output."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count + requests * DEPTH
    if UNIFORM > 0:
        request = flat // (UNIFORM + DEPTH)
        start = request * UNIFORM
    else:
        low = tl.zeros([BLOCK], tl.int32)                    # the last request whose flat start is not behind `flat`
        high = tl.zeros([BLOCK], tl.int32) + requests - 1
        for _ in range(steps):
            middle = (low + high + 1) // 2
            place = tl.load(starts + middle, mask=inside & (low < high), other=0).to(tl.int32) + middle * DEPTH
            beyond = place > flat
            searching = low < high
            high = tl.where(searching & beyond, middle - 1, high)
            low = tl.where(searching & (beyond == 0), middle, low)
        request = low
        start = tl.load(starts + request, mask=inside, other=0).to(tl.int32)
    offset = flat - start - request * DEPTH                  # below DEPTH: of the window
    own = inside & (offset >= DEPTH)
    looks_back = inside & (offset < DEPTH)
    token = tl.load(tokens + (start + offset - DEPTH), mask=own, other=0).to(tl.int64)
    first = tl.load(positions + tl.minimum(start, count - 1), mask=looks_back, other=0).to(tl.int64)
    row = request.to(tl.int64)
    if BY_ROW:
        row = tl.load(rows + request, mask=looks_back, other=0).to(tl.int64)
    column = offset
    if NEWEST_FIRST:
        column = DEPTH - 1 - offset
    earlier = tl.load(before + row * row_stride + column, mask=looks_back, other=-1).to(tl.int64)
    there = looks_back & (first - DEPTH + offset >= 0) & (earlier >= 0)
    value = tl.where(own, token, tl.where(there, earlier, 0))
    is_image = (value == image) | ((images_from > 0) & (value >= images_from))
    flag = tl.where((own | there) & (is_image == 0), 1, 0) + tl.where(offset == 0, 2, 0) + tl.where(own, 4, 0)
    value = tl.minimum(tl.maximum(value, -2147483648), 2147483647)
    tl.store(out + flat, value.to(tl.int32), mask=inside)
    tl.store(out_flags + flat, flag.to(tl.uint8), mask=inside)
    if MARK:
        # what this program wrote has reached the host before the counter says so: the host must see it when it sees the ticket
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
            tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
            tl.store(done, ticket, cache_modifier=".wt")


_launches: dict[tuple[Any, ...], Launch] = {}


def launch_for(windows: Windows, marks: bool) -> Launch:
    """The compiled variant for these tensors' types (see `launch.preload`). `marks`: it stores a ticket."""
    w = windows
    other = (w.before.dtype if w.starts is None else w.starts.dtype, w.before.dtype if w.rows is None else w.rows.dtype)
    key = (w.tokens.dtype, w.positions.dtype, w.before.dtype, *other, w.before.shape[1], w.block if w.starts is None else 0,
           w.rows is not None, w.newest_first, marks)
    if key not in _launches:
        samples = [*key[:5], torch.int32, torch.uint8, torch.int32, torch.int64, 1, 1, 1, 1, 1, 1 << 40, 1 << 40]
        _launches[key] = Launch(pack_kernel, samples, {"DEPTH": key[5], "UNIFORM": key[6], "BY_ROW": key[7], "NEWEST_FIRST": key[8],
                                                       "MARK": marks, "BLOCK": BLOCK}, warps=4)
    return _launches[key]


def load(windows: Windows) -> None:
    """Compile and load what steps with tensors of these types need, before the first step."""
    preload(windows.tokens.device, [launch_for(windows, True)])


def pack(windows: Windows, tokens: torch.Tensor, flags: torch.Tensor, mark: Mark | None = None) -> None:
    """Launch on the current stream; `tokens` int32 and `flags` uint8 are pinned, `windows.count` + (n - 1) requests long, not 0."""
    w = windows
    total = w.count + w.requests * w.before.shape[1]
    if w.tokens.stride(0) != 1 or w.positions.stride(0) != 1 or w.before.stride(1) != 1:
        raise ConfigError("a step's tokens, positions and windows must lie without gaps")
    counter, done, ticket = (flags, flags, 0) if mark is None else mark
    launch_for(w, mark is not None)(-(-total // BLOCK), w.tokens, w.positions, w.before, w.before if w.starts is None else w.starts,
                                    w.before if w.rows is None else w.rows, tokens, flags, counter, done, ticket, w.count, w.requests,
                                    w.before.stride(0), w.requests.bit_length(), w.image, w.images_from)
