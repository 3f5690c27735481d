"""The gate (spec A9): how much of the projected value each hyper-connection stream of a token takes.

    rx = 1 / sqrt(mean(x^2) + eps);  rk = 1 / sqrt(mean(key^2) + eps)                         per token and stream
    dot = sum(x * (q * k) * key) * rx * rk / sqrt(d)
    out = bf16(x + sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) * value)                    DEAD tokens: out = x, bit for bit

One program does all streams of a token (or, for few tokens, one stream): x and kv are read once, the value is kept for all
streams, all arithmetic is float32 with one rounding at the end. It knows nothing of where key and value come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ssdgram.kernels.launch import Launch, aligned

CLAMP = 1e-6


@triton.jit(do_not_specialize=["eps", "tokens"], do_not_specialize_on_alignment=["participates"])
def gate_kernel(x, kv, weights, participates, out, eps: tl.float32, tokens: tl.int32,  # type: ignore[no-untyped-def]
                STREAMS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
                TOGETHER: tl.constexpr, MASKED: tl.constexpr):
    """TOGETHER streams of a token; the programs of a token follow each other, so its value is read from DRAM once.
    WIDTH <= CHUNKS * BLOCK."""
    token = (tl.program_id(0) // (STREAMS // TOGETHER)).to(tl.int64)
    first = tl.program_id(0) % (STREAMS // TOGETHER) * TOGETHER
    dead = False
    if MASKED:
        dead = tl.load(participates + token) == 0
    lane = tl.arange(0, BLOCK)
    x_row = x + token * (STREAMS * WIDTH)
    kv_row = kv + token * ((STREAMS + 1) * WIDTH)
    out_row = out + token * (STREAMS * WIDTH)
    values = ()
    if TOGETHER > 1:
        for chunk in tl.static_range(CHUNKS):
            place = chunk * BLOCK + lane
            value = tl.load(kv_row + STREAMS * WIDTH + place, mask=place < WIDTH, other=0.0, cache_modifier=".cg")
            values = values + (value,)                       # type: ignore[assignment]
    for step in tl.static_range(TOGETHER):
        stream = first + step
        own = ()
        x_squares = tl.zeros([BLOCK], tl.float32)
        key_squares = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            place = chunk * BLOCK + lane
            there = place < WIDTH
            row = tl.load(x_row + stream * WIDTH + place, mask=there, other=0.0, cache_modifier=".cg")
            key = tl.load(kv_row + stream * WIDTH + place, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
            weight = tl.load(weights + stream * WIDTH + place, mask=there, other=0.0)
            own = own + (row,)                               # type: ignore[assignment]
            wide = row.to(tl.float32)
            x_squares += wide * wide
            key_squares += key * key
            products += wide * weight * key
        if TOGETHER == 1:                                    # for its only stream: on its way during the sums
            for chunk in tl.static_range(CHUNKS):
                place = chunk * BLOCK + lane
                value = tl.load(kv_row + STREAMS * WIDTH + place, mask=place < WIDTH, other=0.0, cache_modifier=".cg")
                values = values + (value,)                   # type: ignore[assignment]
        # three sums in one: their parts cross the warps together
        both, rest = tl.split(tl.sum(tl.join(tl.join(x_squares, key_squares), tl.join(products, products)), 0))
        x_square, key_square = tl.split(both)
        product, _ = tl.split(rest)
        x_scale = 1.0 / tl.sqrt_rn(x_square / WIDTH + eps)
        key_scale = 1.0 / tl.sqrt_rn(key_square / WIDTH + eps)
        dot = product * x_scale * key_scale / tl.sqrt_rn(WIDTH * 1.0)
        root = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
        root = tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root)          # the sign of -0.0 counts
        gate = 1.0 / (1.0 + tl.exp(-root))
        for chunk in tl.static_range(CHUNKS):
            place = chunk * BLOCK + lane
            row = own[chunk]
            result = (row.to(tl.float32) + gate * values[chunk].to(tl.float32)).to(out.dtype.element_ty)
            if MASKED:
                result = tl.where(dead, row.to(out.dtype.element_ty), result)
            tl.store(out_row + stream * WIDTH + place, result, mask=place < WIDTH)


@dataclass(frozen=True)
class Cut:
    """How the work is cut. block: values per step; warps: per program; together: streams per program (0: all);
    registers: a limit per thread (0: none), for more programs at a time."""

    block: int
    warps: int
    together: int = 0
    registers: int = 0


# Measured choices: the first entry whose token count is not below T. bench/gpu.py --tune tries CUT_CHOICES.
CUTS: tuple[tuple[int, Cut], ...] = ((16, Cut(1024, 8, 1)), (66, Cut(2048, 16, 1)), (1 << 31, Cut(512, 4, 1)))
CUT_CHOICES: tuple[Cut, ...] = (
    Cut(1024, 4), Cut(1024, 8), Cut(2048, 8), Cut(1024, 4, 2), Cut(1024, 8, 2), Cut(2048, 8, 2), Cut(512, 2, 1), Cut(512, 4, 1),
    Cut(1024, 2, 1), Cut(1024, 4, 1), Cut(1024, 4, 1, 128), Cut(1024, 4, 0, 128),
    Cut(1024, 8, 1), Cut(2048, 8, 1), Cut(2048, 16, 1), Cut(8192, 8, 1), Cut(8192, 16, 1),
)


class Gate:
    """The gate of one layer's weights: q_weight, k_weight bfloat16 (or float32) [streams, width]."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, *, eps: float = 1e-20) -> None:
        if q_weight.shape != k_weight.shape or q_weight.dim() != 2 or q_weight.dtype != k_weight.dtype:
            raise ValueError(f"q_weight and k_weight must be [streams, width] of one dtype; found {q_weight.dtype} "
                             f"{tuple(q_weight.shape)} and {k_weight.dtype} {tuple(k_weight.shape)}")
        self.weights, self.eps = (q_weight.float() * k_weight.float()).contiguous(), float(eps)  # exact of bfloat16 weights
        self.streams, self.width = q_weight.shape
        self._launches: dict[tuple[Cut, bool, torch.dtype], Launch] = {}

    def __call__(self, x: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, participates: torch.Tensor | None = None, *,
                 cut: Cut | None = None) -> torch.Tensor:
        """x, out bfloat16 [T, streams, width] (out may be x); kv [T, (streams + 1) * width]: keys of stream 0.., then the
        value; participates uint8 or bool [T] (0: DEAD, the row of x is kept bit for bit). On the current stream; returns out."""
        tokens = x.shape[0]
        wide = (self.streams + 1) * self.width
        if (tuple(x.shape) != (tokens, self.streams, self.width) or out.shape != x.shape or tuple(kv.shape) != (tokens, wide)
                or not x.dtype == kv.dtype == out.dtype):
            found = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (x, out, kv))
            raise ValueError(f"x and out must be [T, {self.streams}, {self.width}] and kv [T, {wide}] of one dtype; "
                             f"found {found}")
        if not (x.is_contiguous() and kv.is_contiguous() and out.is_contiguous() and aligned(x) and aligned(kv) and aligned(out)):
            raise ValueError("x, kv and out must be contiguous and 16-byte aligned")
        if participates is not None:
            participates = participates.view(torch.uint8)
            if tuple(participates.shape) != (tokens,):
                raise ValueError(f"participates must be uint8 or bool [{tokens}]; found {tuple(participates.shape)}")
        if tokens == 0:
            return out
        cut = cut or next(choice for limit, choice in CUTS if tokens <= limit)
        launch = self.launch(cut, participates is not None, x.dtype)
        launch(tokens * (self.streams // (cut.together or self.streams)), x, kv, self.weights,
               x if participates is None else participates, out, self.eps, tokens)
        return out

    def launch(self, cut: Cut, masked: bool, dtype: torch.dtype = torch.bfloat16) -> Launch:
        """The compiled variant."""
        key = (cut, masked, dtype)
        if key not in self._launches:
            limit = {"maxnreg": cut.registers} if cut.registers else {}
            block = min(cut.block, max(16, 1 << (self.width - 1).bit_length()))
            words = [dtype, dtype, torch.float32, torch.uint8 if masked else dtype, dtype, 1e-20, 1]
            self._launches[key] = Launch(gate_kernel, words, {
                "STREAMS": self.streams, "WIDTH": self.width, "CHUNKS": -(-self.width // block), "BLOCK": block,
                "TOGETHER": cut.together or self.streams, "MASKED": masked}, warps=cut.warps, **limit)
        return self._launches[key]
