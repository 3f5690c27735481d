"""The key/value projection (spec A8): `wkv` straight from its stored e4m3 codes and ue8m0 32 x 32 block scales.

    out[t, n] = bf16( sum over k of x[t, k] * w[n, k] ),   w[n, k] = e4m3(code[n, k]) * 2^(scale[n // 32, k // 32] - 127)

For few tokens this is one pass over the weights (157 MB), so everything else must hide behind that read:

    codes_kernel   x as stored codes and scales (which is lossless: spec A8), read from a gather's "mxfp8" output or from the
                   bundles themselves. Weights and activations go to the FP8 tensor cores as they lie in memory; the two block
                   scales meet in the products. A step's product has a column for each of its blocks of each token, so that one
                   product per step keeps the blocks' sums apart. Hopper's FP8 units add the 32 products of a block with
                   some 14 bits, as in every FP8 product there (seen: at most 2.1e-4 of the sum of the terms' sizes beyond
                   bfloat16's own rounding; 31 small products beside a large one may lose more); all else is float32. The two
                   scales are multiplied first, so the sum of their exponents has to be one of float32. Work per weight grows
                   with the tokens: best up to 16.
    rows_kernel    x as bfloat16 rows; the weights are scaled into bfloat16 on their way to the tensor cores (exactly, but for
                   subnormal ones, below 2^-126), the sums are float32. Work per weight does not grow with the tokens. Weights
                   without NaN and with scales up to 2^7 (as any model has) need less of it: their bits are moved to where
                   bfloat16 has them, which is the number times 2^-120, and the scales make up for that.

On Hopper and newer both are launched as dependents of the kernel before them: they begin while it still runs, ask for their first
weights (which nobody writes) into the L2 cache, and wait for its end before they touch anything else. So a gather that says early
that dependents may begin (`Gather(..., overlap=True)`) costs little more than its launch.

It knows nothing of caches, and of bundles only their layout. Invariant: every weight byte is read once per
BLOCK_T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ssdgram.kernels.gather import Bundles, scale_value
from ssdgram.kernels.launch import Launch, aligned, dependents, interpreted, next_power_of_two

BLOCK = 32                                                   # values per scale, of weights and of activations
CODES, ADDRESSES = 0, 1
SHIFT = 120                                                  # e4m3 bits in bfloat16's place are the number times 2^-120
FLOATS = (torch.bfloat16, torch.float32)                     # float32 rows or results: for tests


@triton.jit
def share(tile, STEPS: tl.constexpr, TOTAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Steps first .. last of a tile that fall to this program: TOTAL steps are dealt evenly, in order, to program_id(0)."""
    begin = tl.program_id(0) * TOTAL // tl.num_programs(0)
    end = (tl.program_id(0) + 1) * TOTAL // tl.num_programs(0)
    return tl.maximum(begin - tile * STEPS, 0), tl.minimum(end - tile * STEPS, STEPS)


@triton.jit
def begin_early(weight, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for the weights of this program's first AHEAD steps, then wait for the kernel before this one."""
    STEPS: tl.constexpr = (K // 32 + BLOCKS - 1) // BLOCKS
    TOTAL: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * STEPS
    tile = tl.program_id(0) * TOTAL // tl.num_programs(0) // STEPS
    first, last = share(tile, STEPS, TOTAL)
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    size = tl.minimum(tl.minimum(last - first, AHEAD) * BLOCKS * 32, K - first * BLOCKS * 32)
    at = (weight + n * K + first * BLOCKS * 32).to(tl.int64)
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, size], dtype=tl.int32,
                              is_pure=False, pack=1)
    gdc_wait()


@triton.jit
def finish(r, out, partial, locks, n, t, tile, tokens, N: tl.constexpr, STEPS: tl.constexpr, TOTAL: tl.constexpr,  # type: ignore[no-untyped-def]
           SHARED: tl.constexpr):
    """Store r float32 [n, t]; of the programs that share a tile the last one adds the parts in order and stores."""
    live = (t < tokens)[None, :] & (n < N)[:, None]
    place = t.to(tl.int64)[None, :] * N + n[:, None]
    if not SHARED:
        tl.store(out + place, r.to(out.dtype.element_ty), mask=live)
    else:
        programs = tl.num_programs(0)
        owner = ((tile * STEPS + 1) * programs - 1) // TOTAL         # of the tile's first step, and of its last
        parts = ((tile + 1) * STEPS * programs - 1) // TOTAL - owner + 1
        if parts == 1:
            tl.store(out + place, r.to(out.dtype.element_ty), mask=live)
        else:
            size = tokens.to(tl.int64) * N
            tl.store(partial + (tl.program_id(0) - owner) * size + place, r, mask=live)
            tl.debug_barrier()
            lock = locks + tl.program_id(1) * (TOTAL // STEPS) + tile
            before = tl.atomic_add(lock, 1, sem="acq_rel", scope="gpu")
            if before == parts - 1:
                tl.debug_barrier()
                total = tl.zeros_like(r)
                for part in range(parts):
                    total += tl.load(partial + part * size + place, mask=live, other=0.0, cache_modifier=".cg")
                tl.store(out + place, total.to(out.dtype.element_ty), mask=live)
                tl.atomic_xchg(lock, 0, sem="relaxed", scope="gpu")


@triton.jit
def factor(bits):  # type: ignore[no-untyped-def]
    """float32 of a factor's bf16 bits (int16, or the low half of an int32)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def row_place(column, base0, base1, base2, base3, HEADS: tl.constexpr, ORDERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the row of a column (a scalar): the bundles [t] that hold it, its head in them, and how many heads those have."""
    order = 0
    head = column
    heads = HEADS & 255
    start = HEADS & 255
    for o in tl.static_range(1, ORDERS):
        behind = column >= start
        order = tl.where(behind, o, order)
        head = tl.where(behind, column - start, head)
        heads = tl.where(behind, (HEADS >> (8 * o)) & 255, heads)
        start += (HEADS >> (8 * o)) & 255
    base = tl.where(order == 0, base0, tl.where(order == 1, base1, tl.where(order == 2, base2, base3)))
    return tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 64), head, heads


@triton.jit
def bundle_bases(addresses, t, ORDERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the bundles of tokens t lie, by order (beyond ORDERS: one of those)."""
    at = addresses + t * ORDERS
    return tl.load(at), tl.load(at + 1 % ORDERS), tl.load(at + 2 % ORDERS), tl.load(at + 3 % ORDERS)


@triton.jit
def code_scales_of(source, t, base0, base1, base2, base3, first, K: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,  # type: ignore[no-untyped-def]
                   SOURCE: tl.constexpr, HEADS: tl.constexpr, ORDERS: tl.constexpr, DIM: tl.constexpr):
    """Scale bytes of blocks first .. first + BLOCKS - 1 of tokens t: one int32 word [t] if WORDS, else int32 bytes [blocks, t]."""
    block = tl.arange(0, BLOCKS)
    if SOURCE == 0:
        at = source + t * (K // 32) + first
        there = t >= 0
        inside = first + block < K // 32
    else:
        bundle, head, heads = row_place(first * 32 // DIM, base0, base1, base2, base3, HEADS, ORDERS)
        at = bundle + (heads * DIM + head * (DIM // 32) + first % (DIM // 32))
        there = bundle.to(tl.int64) != 0
        inside = block >= 0
    if WORDS:
        return tl.load(tl.multiple_of(at, 4).to(tl.pointer_type(tl.int32)), mask=there, other=0)
    else:
        return tl.load(at[None, :] + block[:, None], mask=there[None, :] & inside[:, None], other=0).to(tl.int32)


@triton.jit
def weight_scales_of(factors, group, first, KB: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 bits of the scales of blocks first .. first + BLOCKS - 1: one int64 word [group] if WORDS, else int16 [group, blocks]."""
    at = factors + group * KB + first
    block = tl.arange(0, BLOCKS)
    if WORDS:
        return tl.load(tl.multiple_of(at, 4).to(tl.pointer_type(tl.int64)))
    else:
        return tl.load(at[:, None] + block[None, :], mask=(first + block < KB)[None, :], other=0)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["addresses"])
def codes_kernel(weight, factors, codes, code_scales, addresses, out, partial, locks, tokens: tl.int32,  # type: ignore[no-untyped-def]
                 N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
                 SHARED: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, SOURCE: tl.constexpr, HEADS: tl.constexpr,
                 ORDERS: tl.constexpr, DIM: tl.constexpr):
    """The share of program_id(0) in all tiles of BLOCK_N rows of the weight, for tokens program_id(1) * BLOCK_T .."""
    KB: tl.constexpr = K // 32
    STEPS: tl.constexpr = (KB + BLOCKS - 1) // BLOCKS
    TOTAL: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * STEPS
    BLOCK_K: tl.constexpr = BLOCKS * 32
    WORDS: tl.constexpr = BLOCKS == 4 and KB % 4 == 0        # four scales of a token, or of a group of the weight, are one word
    if AHEAD > 0:
        begin_early(weight, N, K, BLOCK_N, BLOCKS, AHEAD)
    block = tl.arange(0, BLOCKS)
    inner = tl.arange(0, BLOCK_K)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    # a column of the product is one block of one token: the token's codes of that block, 0 in the step's others
    column = tl.arange(0, BLOCKS * BLOCK_T)
    own = (column // BLOCK_T)[:, None] == (inner // 32)[None, :]
    token = tl.minimum(t, tokens - 1)                        # beyond the tokens: the last one again, for nobody
    column_token = tl.minimum(tl.program_id(1) * BLOCK_T + column % BLOCK_T, tokens - 1)
    x_at = codes + (column_token * K)[:, None] + inner[None, :]
    scales0, scales1, scales2, scales3 = token, token, token, token
    codes0, codes1, codes2, codes3 = column_token, column_token, column_token, column_token
    if SOURCE == 1:                                          # a step lies in one row; addresses of all orders stay at hand
        scales0, scales1, scales2, scales3 = bundle_bases(addresses, token, ORDERS)
        codes0, codes1, codes2, codes3 = bundle_bases(addresses, column_token, ORDERS)
    first_tile = tl.program_id(0) * TOTAL // tl.num_programs(0) // STEPS
    last_tile = ((tl.program_id(0) + 1) * TOTAL // tl.num_programs(0) - 1) // STEPS
    for tile in range(first_tile, last_tile + 1):
        first, last = share(tile, STEPS, TOTAL)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        group = tl.minimum(tile * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32), (N + 31) // 32 - 1)     # rows of the factors
        w_at = weight.to(tl.pointer_type(tl.float8e4nv)) + tl.minimum(n, N - 1)[:, None] * K + inner[None, :]
        xs_next = code_scales_of(code_scales, token, scales0, scales1, scales2, scales3, first * BLOCKS, K, BLOCKS, WORDS, SOURCE,
                                 HEADS, ORDERS, DIM)
        s_next = weight_scales_of(factors, group, first * BLOCKS, KB, BLOCKS, WORDS)
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in range(first, last):
            k = step * BLOCKS
            if WORDS:
                xs = scale_value((xs_next[None, :] >> (block * 8)[:, None]) & 255)
                s = factor((s_next[:, None] >> (block * 16)[None, :].to(tl.int64)).to(tl.int32))
            else:
                xs = scale_value(xs_next)
                s = factor(s_next)
            ahead = tl.minimum(step + 1, STEPS - 1) * BLOCKS                     # those of the next step are on their way
            xs_next = code_scales_of(code_scales, token, scales0, scales1, scales2, scales3, ahead, K, BLOCKS, WORDS, SOURCE,
                                     HEADS, ORDERS, DIM)
            s_next = weight_scales_of(factors, group, ahead, KB, BLOCKS, WORDS)
            if EVEN:
                w = tl.load(w_at + k * 32)
            else:
                w = tl.load(w_at + k * 32, mask=(k * 32 + inner < K)[None, :], other=0.0)
            if SOURCE == 0:
                if EVEN:
                    x = tl.load((x_at + k * 32).to(tl.pointer_type(tl.float8e4nv)), mask=own, other=0.0)
                else:
                    x = tl.load((x_at + k * 32).to(tl.pointer_type(tl.float8e4nv)), mask=own & (k * 32 + inner < K)[None, :],
                                other=0.0)
            else:
                bundle, head, _ = row_place(k * 32 // DIM, codes0, codes1, codes2, codes3, HEADS, ORDERS)
                x_row = tl.multiple_of(bundle + (head * DIM + k * 32 % DIM), 32)
                x = tl.load((x_row[:, None] + inner[None, :]).to(tl.pointer_type(tl.float8e4nv)),
                            mask=own & (bundle.to(tl.int64) != 0)[:, None], other=0.0)
            products = tl.reshape(tl.dot(w, tl.trans(x)), [BLOCK_N, BLOCKS, BLOCK_T])
            scale = tl.reshape(tl.broadcast_to(s[:, None, :], [BLOCK_N // 32, 32, BLOCKS]), [BLOCK_N, BLOCKS])
            acc += tl.sum(products * (scale[:, :, None] * xs[None, :, :]), 1)
        finish(acc, out, partial, locks, n, t, tile, tokens, N, STEPS, TOTAL, SHARED)


@triton.jit
def narrowed(codes):  # type: ignore[no-untyped-def]
    """bfloat16 of e4m3 codes other than NaN, times 2^-120: their bits, moved to where bfloat16 has them (subnormal ones, too)."""
    return tl.inline_asm_elementwise("""{
            .reg .b32 low, high;
            prmt.b32 low, $2, 0, 0x1804;                     // bytes 0 and 1, each in the upper half of 16 bits
            prmt.b32 high, $2, 0, 0x3a24;                    // bytes 2 and 3
            shr.s32 low, low, 4;
            shr.s32 high, high, 4;
            and.b32 $0, low, 0x87f087f0;
            and.b32 $1, high, 0x87f087f0;
            }""", "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def carried(bits, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A factor as rows_kernel takes it from step to step."""
    if PLAIN:
        result = bits.to(tl.int32)                           # as they were loaded they would keep Triton from loading ahead
    else:
        result = factor(bits)
    return result


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(weight, factors, rows, out, partial, locks, tokens: tl.int32,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
                SHARED: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PLAIN: tl.constexpr):
    """As codes_kernel, with BLOCK_K = 32 * BLOCKS values of k a step. PLAIN: no weight is NaN, and the factors are 2^120 times as large."""
    KB: tl.constexpr = K // 32
    STEPS: tl.constexpr = (KB + BLOCKS - 1) // BLOCKS
    TOTAL: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * STEPS
    BLOCK_K: tl.constexpr = BLOCKS * 32
    if AHEAD > 0:
        begin_early(weight, N, K, BLOCK_N, BLOCKS, AHEAD)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inner = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCKS)
    x_at = rows + (tl.minimum(t, tokens - 1) * K)[None, :] + inner[:, None]
    first_tile = tl.program_id(0) * TOTAL // tl.num_programs(0) // STEPS
    last_tile = ((tl.program_id(0) + 1) * TOTAL // tl.num_programs(0) - 1) // STEPS
    for tile in range(first_tile, last_tile + 1):
        first, last = share(tile, STEPS, TOTAL)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        group = tile * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32)
        w_at = weight + n[:, None] * K + inner[None, :]
        s_at = factors + tl.minimum(group, (N + 31) // 32 - 1)[:, None] * KB
        s = carried(tl.load(s_at + tl.minimum(first * BLOCKS + block, KB - 1)[None, :]), PLAIN)
        s_next = tl.load(s_at + tl.minimum(first * BLOCKS + BLOCKS + block, KB - 1)[None, :])
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in range(first, last):
            k = step * BLOCKS
            if EVEN:
                w = tl.load(w_at + k * 32)
                x = tl.load(x_at + k * 32)
            else:
                w = tl.load(w_at + k * 32, mask=(n < N)[:, None] & (k * 32 + inner < K)[None, :], other=0)
                x = tl.load(x_at + k * 32, mask=(k * 32 + inner < K)[:, None], other=0.0)
            if PLAIN:
                s = s.to(tl.int16).to(tl.bfloat16, bitcast=True)
            scale = tl.reshape(tl.broadcast_to(s[:, None, :, None], [BLOCK_N // 32, 32, BLOCKS, 32]), [BLOCK_N, BLOCK_K])
            if PLAIN:
                scaled = narrowed(w) * scale
            else:
                wide = w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
                if rows.dtype.element_ty == tl.bfloat16:     # exact, so its upper half is all: cheaper than a conversion
                    scaled = (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                else:
                    scaled = wide
            acc = tl.dot(scaled, x, acc)
            s = carried(s_next, PLAIN)                       # of the next step; those of the one after it are on their way
            s_next = tl.load(s_at + tl.minimum(k + 2 * BLOCKS + block, KB - 1)[None, :])
        finish(acc, out, partial, locks, n, t, tile, tokens, N, STEPS, TOTAL, SHARED)


@dataclass(frozen=True)
class Cut:
    """How the work is cut. kind: "codes" or "rows"; blocks: of 32 values of k per step; split: programs along k.

    programs: so many in all, the steps of all tiles dealt to them evenly (0: a program per tile and split). 132
    multiprocessors take whole programs: 400 tiles are 3.03 rounds, so 4; 528 shares of them are 4 shorter ones.
    """

    kind: str
    block_n: int
    blocks: int
    block_t: int
    warps: int
    stages: int
    split: int = 1
    programs: int = 0
    registers: int = 0                                       # a limit on registers per thread, for more programs at a time
    ahead: int = 4                                           # steps whose weights are asked for before the kernel before has ended


# Measured choices (docs/lab-log.md): the first entry whose token count is not below T. bench/gpu.py --tune tries CUT_CHOICES.
CUTS: tuple[tuple[int, Cut], ...] = (
    (4, Cut("codes", 128, 4, 4, 4, 3, 1, 396)),
    (8, Cut("codes", 128, 4, 8, 4, 3, 1, 396, 168)),
    (16, Cut("codes", 128, 4, 16, 4, 3, 1, 264)),
    (16, Cut("rows", 128, 4, 16, 4, 3, 1, 396, 168)),
    (32, Cut("rows", 128, 4, 32, 4, 3, 1, 264)),
    (1 << 31, Cut("rows", 128, 4, 64, 4, 3, 1, 264)),
    (1 << 31, Cut("codes", 64, 4, 32, 4, 3, 1, 396, 168)),
)
CUT_CHOICES: tuple[Cut, ...] = (
    Cut("rows", 64, 4, 16, 4, 4), Cut("rows", 64, 4, 16, 4, 4, 1, 528, 128), Cut("rows", 64, 4, 16, 4, 3, 1, 528, 128),
    Cut("rows", 64, 4, 16, 4, 4, 1, 396), Cut("rows", 64, 4, 16, 4, 5, 1, 396), Cut("rows", 64, 4, 16, 4, 6, 1, 396),
    Cut("rows", 64, 4, 16, 4, 3, 1, 660, 96), Cut("rows", 64, 4, 16, 4, 3, 2, 0, 96), Cut("rows", 64, 4, 16, 4, 3, 3, 0, 96),
    Cut("rows", 64, 2, 16, 4, 6, 1, 528, 128), Cut("rows", 64, 2, 16, 4, 5, 1, 660, 96), Cut("rows", 64, 8, 16, 4, 3, 1, 396),
    Cut("rows", 64, 8, 16, 4, 2, 1, 528, 128), Cut("rows", 64, 8, 16, 4, 4, 1, 264), Cut("rows", 128, 4, 16, 4, 4, 1, 264),
    Cut("rows", 128, 4, 16, 4, 3, 1, 396, 168), Cut("rows", 128, 2, 16, 4, 5, 1, 396, 168),
    Cut("rows", 128, 2, 16, 4, 4, 1, 528, 128), Cut("rows", 128, 4, 16, 8, 4, 1, 264, 128),
    Cut("rows", 128, 4, 16, 8, 3, 1, 396, 80), Cut("rows", 128, 2, 16, 8, 5, 1, 396, 80),
    Cut("codes", 128, 4, 4, 4, 3, 1, 396), Cut("codes", 128, 4, 4, 4, 3, 1, 528), Cut("codes", 128, 4, 4, 4, 4, 1, 396),
    Cut("codes", 128, 4, 8, 4, 3, 1, 396, 168), Cut("codes", 128, 4, 8, 4, 2, 1, 528, 128),
    Cut("codes", 128, 4, 16, 4, 3, 1, 264), Cut("codes", 128, 4, 16, 4, 4, 1, 264), Cut("codes", 128, 4, 16, 4, 3, 1, 396, 168),
    Cut("codes", 64, 4, 16, 4, 3, 1, 528, 128), Cut("codes", 64, 4, 32, 4, 3, 1, 396, 168),
    Cut("rows", 128, 4, 32, 8, 3), Cut("rows", 128, 4, 32, 8, 3, 1, 264, 128), Cut("rows", 128, 4, 32, 8, 4, 1, 264, 128),
    Cut("rows", 128, 2, 32, 8, 5, 1, 264, 128), Cut("rows", 128, 4, 32, 4, 3, 1, 264), Cut("rows", 128, 2, 32, 4, 4, 1, 396, 168),
    Cut("rows", 64, 4, 32, 4, 3, 1, 528, 128), Cut("rows", 64, 4, 32, 4, 4, 1, 396, 168), Cut("rows", 256, 4, 32, 8, 3, 1, 132),
    Cut("rows", 128, 4, 64, 8, 3), Cut("rows", 128, 4, 64, 8, 3, 1, 264, 128), Cut("rows", 128, 2, 64, 8, 4, 1, 264, 128),
    Cut("rows", 128, 2, 64, 8, 5, 1, 264, 128), Cut("rows", 128, 4, 64, 4, 3, 1, 264), Cut("rows", 128, 2, 64, 4, 4, 1, 396, 168),
    Cut("rows", 64, 4, 64, 4, 3, 1, 396, 168), Cut("rows", 64, 2, 64, 4, 4, 1, 528, 128), Cut("rows", 256, 4, 64, 8, 3, 1, 132),
    Cut("rows", 256, 4, 64, 8, 4, 1, 132), Cut("rows", 256, 2, 64, 8, 4, 1, 264, 128), Cut("rows", 256, 2, 64, 8, 6, 1, 132),
)


class Projection:
    """One layer's `wkv`. weight: e4m3 codes uint8 (or float8_e4m3fn) [N, K]; scales: ue8m0 bytes [ceil(N / 32), K / 32].
    Three ways in: `codes`, `rows`, and `bundles` (the gather fused; for bundles in HBM only: every program reads all of them).
    Weight and scales are looked at once, here: no code may become NaN later, and no scale may change.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self.weight, self.scales = weight.view(torch.uint8), scales.view(torch.uint8)
        self.n, self.k = self.weight.shape
        if self.k % BLOCK or tuple(self.scales.shape) != (-(-self.n // BLOCK), self.k // BLOCK):
            raise ValueError(f"a weight [N, K] needs K in blocks of {BLOCK} and scales [ceil(N / {BLOCK}), K / {BLOCK}]; found "
                             f"{tuple(self.weight.shape)} and {tuple(self.scales.shape)}")
        if not (self.weight.is_contiguous() and self.scales.is_contiguous() and aligned(self.weight) and aligned(self.scales)):
            raise ValueError("weight and scales must be contiguous and 16-byte aligned")
        bits = self.scales.to(torch.int16) << 7              # the scales as bf16 bits: 0 is 2^-127 (subnormal), 255 is NaN
        bits = torch.where(self.scales == 0, 0x0040, torch.where(self.scales == 255, 0x7FC0, bits))
        self.factors = bits.to(torch.int16).contiguous()
        self.plain = not interpreted() and bool((self.scales.amax() <= 254 - SHIFT) & ((self.weight & 0x7F).amax() < 0x7F))
        self.plain_factors = ((self.scales.to(torch.int16) + SHIFT) << 7).contiguous() if self.plain else self.factors
        self._early = dependents(self.weight.device)
        self._launches: dict[tuple[Cut, Bundles | None, torch.dtype, torch.dtype], Launch] = {}
        self._shared: dict[tuple[Cut, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def codes(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, cut: Cut | None = None) -> torch.Tensor:
        """codes uint8 [T, K], scales uint8 [T, K / 32] (a gather's "mxfp8" output) -> out bfloat16 [T, N]; returns out."""
        tokens = codes.shape[0]
        self._check("codes", codes, torch.uint8, (tokens, self.k))
        self._check("scales", scales, torch.uint8, (tokens, self.k // BLOCK))
        self._check("out", out, FLOATS, (tokens, self.n))
        cut = cut or cut_for(tokens, "codes")
        self._run(self.launch(cut, out=out.dtype), cut, tokens, out, (codes, scales, codes))
        return out

    def rows(self, rows: torch.Tensor, out: torch.Tensor, *, cut: Cut | None = None) -> torch.Tensor:
        """rows bfloat16 [T, K] (or [T, columns, dim]) -> out bfloat16 [T, N]; returns out."""
        tokens = rows.shape[0]
        rows = rows.reshape(tokens, self.k)
        self._check("rows", rows, FLOATS, (tokens, self.k))
        self._check("out", out, FLOATS, (tokens, self.n))
        cut = cut or cut_for(tokens, "rows")
        self._run(self.launch(cut, out=out.dtype, rows=rows.dtype), cut, tokens, out, (rows,))
        return out

    def bundles(self, addresses: torch.Tensor, out: torch.Tensor, bundles: Bundles, *, cut: Cut | None = None) -> torch.Tensor:
        """addresses int64 [T, orders] of whole bundles (0: a zero row), read inside the projection -> out bfloat16 [T, N]."""
        tokens = addresses.shape[0]
        if bundles.encoding != "fp8_ue8m0" or bundles.columns * bundles.dim != self.k or not 1 <= bundles.orders <= 4:
            raise ValueError(f"the fused gather takes 1 to 4 orders of fp8_ue8m0 rows that make up {self.k} values; found "
                             f"{bundles.orders} orders, {bundles.columns} rows of {bundles.dim} ({bundles.encoding})")
        self._check("out", out, FLOATS, (tokens, self.n))
        self._check("addresses", addresses, torch.int64, (tokens, bundles.orders))
        cut = cut or cut_for(tokens, "codes")
        if (bundles.dim // BLOCK) % cut.blocks:
            raise ValueError(f"a step of {cut.blocks} blocks does not divide a row of {bundles.dim // BLOCK}")
        self._run(self.launch(cut, bundles, out=out.dtype), cut, tokens, out, (self.weight, self.scales, addresses))
        return out

    def launch(self, cut: Cut, bundles: Bundles | None = None, *, out: torch.dtype = torch.bfloat16,
               rows: torch.dtype = torch.bfloat16) -> Launch:
        """The compiled variant."""
        key = (cut, bundles, out, rows)
        if key not in self._launches:
            blocks, programs = self.k // BLOCK, self._grid(cut, 1)[0]
            constants = {"N": self.n, "K": self.k, "BLOCK_N": cut.block_n, "BLOCKS": cut.blocks, "BLOCK_T": cut.block_t,
                         "SHARED": programs > -(-self.n // cut.block_n) or (cut.programs > 0 and programs > 1),
                         "EVEN": self.n % cut.block_n == 0 and blocks % cut.blocks == 0, "AHEAD": cut.ahead * self._early}
            options: dict[str, int] = {"warps": cut.warps, "stages": cut.stages}
            if self._early and cut.ahead:
                options["launch_pdl"] = True
            if cut.registers:
                options["maxnreg"] = cut.registers
            ends = [out, torch.float32, torch.int32, 1]
            if cut.kind == "codes":
                heads, orders, dim = (0, 1, BLOCK) if bundles is None else (bundles.packed_heads, bundles.orders, bundles.dim)
                constants |= {"SOURCE": CODES if bundles is None else ADDRESSES, "HEADS": heads, "ORDERS": orders, "DIM": dim}
                words = [torch.uint8, torch.int16] + [torch.uint8] * 2 + [torch.uint8 if bundles is None else torch.int64, *ends]
                self._launches[key] = Launch(codes_kernel, words, constants, **options)
            else:
                constants["PLAIN"] = self.plain and rows == torch.bfloat16
                words = [torch.uint8, torch.int16, rows, *ends]
                self._launches[key] = Launch(rows_kernel, words, constants, **options)
        return self._launches[key]

    def _run(self, launch: Launch, cut: Cut, tokens: int, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
        if tokens == 0:
            return
        grid = self._grid(cut, tokens)
        partial, locks = self._parts(cut, tokens, grid) if launch.constants["SHARED"] else (out, out)
        factors = self.plain_factors if launch.constants.get("PLAIN") else self.factors
        launch(grid, self.weight, factors, *inputs, out, partial, locks, tokens)

    def _grid(self, cut: Cut, tokens: int) -> tuple[int, int]:
        """Programs along the weight (at most one a step), and along the tokens."""
        tiles, steps = -(-self.n // cut.block_n), -(-self.k // BLOCK // cut.blocks)
        return min(tiles * steps, cut.programs or tiles * min(cut.split, steps)), -(-tokens // cut.block_t)

    def _parts(self, cut: Cut, tokens: int, grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch of a shared cut: made once, so that one stream at a time may use it (and a graph may capture it)."""
        key = (cut, next_power_of_two(tokens))
        if key not in self._shared:
            tiles = -(-self.n // cut.block_n)
            parts = -(-grid[0] // tiles) + 1                 # programs that a tile can have
            self._shared[key] = (torch.empty(parts * key[1] * self.n, dtype=torch.float32, device=self.weight.device),
                                 torch.zeros(tiles * -(-key[1] // cut.block_t), dtype=torch.int32, device=self.weight.device))
        return self._shared[key]

    @staticmethod
    def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not tensor.is_contiguous() or not (
                aligned(tensor) or tensor.dtype == torch.int64):
            raise ValueError(f"{name} must be contiguous, 16-byte aligned {dtypes[0]} {shape}; found {tensor.dtype} "
                             f"{tuple(tensor.shape)}")


def cut_for(tokens: int, kind: str) -> Cut:
    """The cut of CUTS for that many tokens, of the kind that the operand allows."""
    return next(cut for limit, cut in CUTS if cut.kind == kind and tokens <= limit)
