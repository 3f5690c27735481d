"""The n-gram hash on the GPU (spec A5, A6, B3): flat tokens in, keys x and row ids out; `kernels/hash.py` for tokens that
already live on the device.

Takes the flat form of `ssdgram.sequence.flatten` (lookback inline before the tokens, one flag byte per token) and writes the
OUTPUT positions one behind the other; one program does a block of flat positions of one layer. It knows neither caches nor
slots. Invariant: the id of a token that takes no part is never looked at; a bad id of one that does is reported, not hashed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ssdgram.kernels.launch import Launch

PARTICIPATES, STARTS, OUTPUT = 1, 2, 4                       # flag bits, as in kernels/hash.py
NO_FAULT = 0x7FFFFFFF


@triton.jit(do_not_specialize=["length", "fill", "vocabulary"],
            do_not_specialize_on_alignment=["tokens", "flags", "ranks", "keys", "rows", "fault"])
def hash_kernel(tokens, flags, ranks, token_map, multipliers, primes, offsets, keys, rows, fault,  # type: ignore[no-untyped-def]
                length: tl.int32, fill: tl.int64, vocabulary: tl.int32,
                SHIFTS: tl.constexpr, HEADS: tl.constexpr, LAYERS: tl.constexpr, PLE: tl.constexpr, MAPPED: tl.constexpr,
                KEYS: tl.constexpr, ROW_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Flat positions program_id(0) * BLOCK .. of layer index program_id(1); see `Hash`."""
    layer = tl.program_id(1)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < length
    flag = tl.load(flags + position, mask=inside, other=0).to(tl.int32)
    out = inside & ((flag & 4) != 0)
    rank = tl.load(ranks + position, mask=out, other=1).to(tl.int64) - 1
    blocked = (flag & 1) == 0
    start = (flag & 2) != 0                                  # nothing before the token last looked at
    x = tl.zeros([BLOCK], tl.int64)
    for shift in tl.static_range(SHIFTS):
        before = position - shift
        if shift > 0:
            blocked = blocked | start | (before < 0)
        look = out & ~blocked
        flag = tl.load(flags + before, mask=look, other=0).to(tl.int32)
        blocked = blocked | ((flag & 1) == 0)
        start = (flag & 2) != 0
        look = out & ~blocked
        token = tl.load(tokens + before, mask=look, other=0)
        bad = look & ((token < 0) | (token >= vocabulary))
        tl.atomic_min(fault + before * 0, before, mask=bad, sem="relaxed")
        token = tl.where(bad, 0, token)
        value = token.to(tl.int64)
        if PLE:
            if shift > 0:
                blocked = blocked | (value == fill)          # EOS ends the segment for the tokens behind it
        if MAPPED:
            value = tl.load(token_map + token, mask=look, other=0).to(tl.int64)
        x = x ^ (tl.where(blocked, fill, value) * tl.load(multipliers + layer * SHIFTS + shift))
        if shift > 0:
            if KEYS:
                tl.store(keys + (rank * LAYERS + layer) * (SHIFTS - 1) + (shift - 1), x, mask=out)
            if ROW_IDS:
                for head in tl.static_range(HEADS):
                    column = (shift - 1) * HEADS + head
                    place = layer * ((SHIFTS - 1) * HEADS) + column
                    row = x % tl.load(primes + place) + tl.load(offsets + place)
                    tl.store(rows + (rank * LAYERS + layer) * ((SHIFTS - 1) * HEADS) + column, row, mask=out)


class Hash:
    """The hash of one geometry on one device.

    multipliers int64 [L, n]; primes, offsets int64 [L, columns]; token_map int32 [V] or None (ids are hashed as they are);
    fill: the (compressed) id of a blocked slot; rule: "engram" or "ple"; vocabulary: ids must be below it.
    """

    BLOCK = 64

    def __init__(self, multipliers: Any, primes: Any, offsets: Any, *, token_map: Any = None, fill: int, vocabulary: int,
                 rule: str = "engram", device: torch.device | str = "cuda") -> None:
        if rule not in ("engram", "ple"):
            raise ValueError(f"the hash rule is engram or ple; found {rule!r}")

        def on_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(device).contiguous()

        self.multipliers = on_device(multipliers, torch.int64)
        self.primes = on_device(primes, torch.int64)
        self.offsets = on_device(offsets, torch.int64)
        self.layers, self.shifts = self.multipliers.shape
        self.columns = self.primes.shape[1]
        self.heads = self.columns // (self.shifts - 1)
        if tuple(self.offsets.shape) != (self.layers, self.heads * (self.shifts - 1)) or self.offsets.shape != self.primes.shape:
            raise ValueError(f"primes and offsets must be [{self.layers}, orders * heads] with {self.shifts - 1} orders; found "
                             f"{tuple(self.primes.shape)} and {tuple(self.offsets.shape)}")
        self.token_map = None if token_map is None else on_device(token_map, torch.int32)
        self.fill, self.vocabulary, self.rule = int(fill), int(vocabulary), rule
        if self.token_map is not None and self.vocabulary > self.token_map.shape[0]:
            raise ValueError(f"a vocabulary of {vocabulary} ids needs a token map of as many; this one has "
                             f"{self.token_map.shape[0]}")
        self._launches: dict[tuple[bool, bool], Launch] = {}

    def launch(self, keys: bool, rows: bool) -> Launch:
        """The compiled variant that writes keys, row ids or both."""
        if (keys, rows) not in self._launches:
            words = [torch.int32, torch.uint8, torch.int32, torch.int32] + [torch.int64] * 5 + [torch.int32, 1, 1, 1]
            self._launches[keys, rows] = Launch(hash_kernel, words, {
                "SHIFTS": self.shifts, "HEADS": self.heads, "LAYERS": self.layers, "PLE": self.rule == "ple",
                "MAPPED": self.token_map is not None, "KEYS": keys, "ROW_IDS": rows, "BLOCK": self.BLOCK}, warps=2)
        return self._launches[keys, rows]

    def __call__(self, tokens: torch.Tensor, flags: torch.Tensor, *, keys: torch.Tensor | None = None,
                 rows: torch.Tensor | None = None, ranks: torch.Tensor | None = None,
                 fault: torch.Tensor | None = None) -> None:
        """Hash on the current stream.

        tokens int32 [N], flags uint8 [N]; ranks int32 [N]: running count of the OUTPUT flags, this position included (made
        here if not given). Of T OUTPUT positions: keys int64 [T, L, n - 1] and/or rows int64 [T, L, columns] (spec A5).
        fault int32 [1]: gets the lowest flat index of a token that takes part and whose id is below 0 or not below the
        vocabulary (set it to NO_FAULT before; keys that saw such a token are not to be used).
        """
        length = tokens.shape[0]
        if tokens.dtype != torch.int32 or flags.dtype != torch.uint8 or flags.shape != tokens.shape or tokens.dim() != 1:
            raise ValueError(f"tokens must be int32 [N] and flags uint8 [N]; found {tokens.dtype} {tuple(tokens.shape)} and "
                             f"{flags.dtype} {tuple(flags.shape)}")
        orders = self.shifts - 1
        for name, tensor, width in (("keys", keys, orders), ("rows", rows, self.columns)):
            if tensor is not None and (tensor.dtype != torch.int64 or tuple(tensor.shape[1:]) != (self.layers, width)
                                       or not tensor.is_contiguous()):
                raise ValueError(f"{name} must be contiguous int64 [T, {self.layers}, {width}]; found {tensor.dtype} "
                                 f"{tuple(tensor.shape)}")
        if length == 0 or (keys is None and rows is None):
            return
        if ranks is None:
            ranks = torch.cumsum((flags & OUTPUT) != 0, 0, dtype=torch.int32)
        if fault is None:
            fault = torch.full([1], NO_FAULT, dtype=torch.int32, device=tokens.device)
        nothing = self.multipliers
        self.launch(keys is not None, rows is not None)(
            (-(-length // self.BLOCK), self.layers), tokens, flags, ranks, flags if self.token_map is None else self.token_map,
            self.multipliers, self.primes, self.offsets, nothing if keys is None else keys, nothing if rows is None else rows,
            fault, length, self.fill, self.vocabulary)
