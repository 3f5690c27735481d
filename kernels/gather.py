"""Gather: bundles at their addresses, wherever they lie (HBM, pinned DRAM), to rows in the order of the columns.

    bundle   | codes head 0 | codes head 1 | ... | scales head 0 | scales head 1 | ... |      64-byte aligned
    row r = t * columns + c  <-  bundle of (t, order of c):  codes at head * code_bytes, scales behind all heads' codes

A program takes tiles of whole rows, so the rows of a bundle are read as one contiguous run, 16 bytes a thread; over PCIe
that is what makes the difference (design 1.3). It knows neither tiers nor tickets' meaning: an address is an address, and the
ticket is a number that the last program to finish reading stores into the word `done`.
Invariant: that store happens after every byte of every bundle of this launch was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ssdgram.kernels.launch import Launch, aligned, dependents, next_power_of_two

ROWS, PACKED, MXFP8 = 0, 1, 2                                # what comes out
BLOCK_SCALES, NO_SCALE, GLOBAL_SCALE = 0, 1, 2               # encodings: fp8 + ue8m0 per 32, bf16, fp8 with one scale
ADDRESSES, SLOTS = 0, 1                                      # what goes in
ENCODINGS = {"fp8_ue8m0": BLOCK_SCALES, "bf16": NO_SCALE, "fp8_global": GLOBAL_SCALE}
SCALE_BLOCK = 32                                             # values per scale byte
SCALE_RULES = {"spec": 0, "vllm": 1, "sglang": 2}            # what scale bytes 0 and 255 stand for (spec A7)


@dataclass(frozen=True)
class Bundles:
    """What a layer's bundles look like. heads: rows per bundle of each order (8, 8, 8; a column subset has fewer, or 0).

    stride: bytes between slots, a multiple of 64. global_scale: of "fp8_global", rounded to bf16 when used (spec B4).
    scale_rule: a key of SCALE_RULES; "spec" but for serving engines, which treat two scale bytes in ways of their own.
    """

    heads: tuple[int, ...]
    dim: int = 256
    code_bytes: int = 256
    scale_bytes: int = 8
    stride: int = 2112
    encoding: str = "fp8_ue8m0"
    global_scale: float = 1.0
    scale_rule: str = "spec"

    def __post_init__(self) -> None:
        if self.scale_rule not in SCALE_RULES:
            raise ValueError(f"scale_rule is {self.scale_rule!r}: expected one of {list(SCALE_RULES)}")
        if not 1 <= len(self.heads) <= 8 or min(self.heads) < 0 or not 0 < sum(self.heads) < 256:
            raise ValueError(f"heads per order must be 1 to 8 numbers, 1 to 255 in all; found {self.heads}")
        if self.stride % 64 or self.stride < max(self.heads) * self.row_bytes:
            raise ValueError(f"a slot stride of {self.stride} bytes is no multiple of 64 or less than the "
                             f"{max(self.heads) * self.row_bytes} bytes of a bundle")
        if self.encoding == "fp8_ue8m0" and (self.code_bytes != self.dim or self.scale_bytes * SCALE_BLOCK != self.dim):
            raise ValueError(f"rows of {self.dim} values with a scale per {SCALE_BLOCK} take {self.dim} + "
                             f"{self.dim // SCALE_BLOCK} bytes; found {self.code_bytes} + {self.scale_bytes}")

    @property
    def columns(self) -> int:
        return sum(self.heads)

    @property
    def orders(self) -> int:
        return len(self.heads)

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes

    @property
    def packed_heads(self) -> int:
        """The heads of order o in bits 8 o .. 8 o + 7: one constant for the kernel."""
        return sum(count << (8 * order) for order, count in enumerate(self.heads))

    @property
    def constants(self) -> dict[str, int]:
        """What the gathers' kernels are told of the layout, in their order."""
        return {"HEADS": self.packed_heads, "ORDERS": self.orders, "COLUMNS": self.columns, "DIM": self.dim,
                "CODE_BYTES": self.code_bytes, "SCALE_BYTES": self.scale_bytes, "STRIDE": self.stride}

    def encoding_number(self, mode: int) -> int:
        """The kernels' ENCODING for results of that mode; ValueError if there are none."""
        found = ENCODINGS.get(self.encoding)
        if mode == MXFP8 and found != BLOCK_SCALES:
            raise ValueError(f"only fp8_ue8m0 rows are MXFP8 operands; these are {self.encoding}")
        if found is None and mode != PACKED:
            raise ValueError(f"rows of encoding {self.encoding} are gathered as packed bytes only")
        return NO_SCALE if found is None else found


@triton.jit
def bundle_base(source, index, live, dram, hbm, STRIDE: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address (int64) of entry `index` of `source`; 0 where there is none (another rank's position, or not `live`)."""
    if KIND == 0:
        return tl.load(source + index, mask=live, other=0)
    slot = tl.load(source + index, mask=live, other=-1).to(tl.int64)
    address = tl.where(slot >= 0, dram + slot * STRIDE, hbm + (-2 - slot) * STRIDE)
    return tl.where(slot == -1, 0, address)


@triton.jit
def scale_value(byte, RULE: tl.constexpr = 0):  # type: ignore[no-untyped-def]
    """float32 of a ue8m0 byte (spec A7). RULE 0: byte 0 is 2^-127 (subnormal), 255 NaN; 1: 0 and infinity; 2: 2^-127 and infinity."""
    number = byte.to(tl.int32)
    bits = number << 23
    if RULE != 1:
        bits = tl.maximum(bits, 0x00400000)
    if RULE == 0:
        bits |= ((number + 1) & 256) << 14                   # of 255 alone
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_rows(bundle, head, heads, there, inside, place, out, out_scales, global_scale,  # type: ignore[no-untyped-def]
               BLOCK: tl.constexpr, DIM: tl.constexpr, CODE_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, MODE: tl.constexpr,
               ENCODING: tl.constexpr, CODE_P2: tl.constexpr, SCALE_P2: tl.constexpr, RULE: tl.constexpr):
    """Rows of bundles to rows of `out`. All [BLOCK]: bundle its first byte, heads how many rows it has, head which one, place the row
    of `out`; not `there`: zeros, not `inside`: nothing."""
    codes_at = bundle + head * CODE_BYTES
    scales_at = bundle + (heads * CODE_BYTES + head * SCALE_BYTES)
    if ENCODING == 0:
        if MODE != 1:
            # the codes of a row as one run: a warp asks for 512 bytes in a row, whole lines, which PCIe is charged by
            lane = tl.arange(0, SCALE_P2 * 32)
            block = tl.arange(0, SCALE_P2)
            codes = tl.load(codes_at[:, None] + lane[None, :], mask=there[:, None] & (lane < DIM)[None, :], other=0)
            if SCALE_BYTES == 8 and CODE_BYTES % 8 == 0:                 # one word holds the scales of a row
                word = tl.load(tl.multiple_of(scales_at, 8).to(tl.pointer_type(tl.int64)), mask=there, other=0)
                scales = (word[:, None] >> (block * 8)[None, :].to(tl.int64)).to(tl.uint8)
            else:
                scales = tl.load(scales_at[:, None] + block[None, :], other=0,
                                 mask=there[:, None] & (block < SCALE_BYTES)[None, :])
            written = inside[:, None] & (lane < DIM)[None, :]
            if MODE == 0:
                values = tl.reshape(codes, [BLOCK, SCALE_P2, 32]).to(tl.float8e4nv, bitcast=True).to(tl.float32)
                values = tl.reshape(values * scale_value(scales, RULE)[:, :, None], [BLOCK, SCALE_P2 * 32])
                tl.store(out + (place * DIM)[:, None] + lane[None, :], values.to(out.dtype.element_ty), mask=written)
            else:
                tl.store(out + (place * DIM)[:, None] + lane[None, :], codes, mask=written)
                tl.store(out_scales + (place * SCALE_BYTES)[:, None] + block[None, :], scales,
                         mask=inside[:, None] & (block < SCALE_BYTES)[None, :])
    if ENCODING == 2 and MODE == 0:
        lane = tl.arange(0, CODE_P2)
        wanted = there[:, None] & (lane < CODE_BYTES)[None, :]
        codes = tl.load(codes_at[:, None] + lane[None, :], mask=wanted, other=0)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * global_scale
        tl.store(out + (place * DIM)[:, None] + lane[None, :], values.to(out.dtype.element_ty),
                 mask=inside[:, None] & (lane < CODE_BYTES)[None, :])
    if MODE == 1 or ENCODING == 1:                       # bytes as they are; bf16 rows are their own bytes
        lane = tl.arange(0, CODE_P2)
        ROW_BYTES: tl.constexpr = CODE_BYTES + SCALE_BYTES
        wanted = there[:, None] & (lane < CODE_BYTES)[None, :]
        codes = tl.load(codes_at[:, None] + lane[None, :], mask=wanted, other=0)
        tl.store(out + (place * ROW_BYTES)[:, None] + lane[None, :], codes,
                 mask=inside[:, None] & (lane < CODE_BYTES)[None, :])
        if SCALE_BYTES > 0:
            lane = tl.arange(0, SCALE_P2)
            wanted = there[:, None] & (lane < SCALE_BYTES)[None, :]
            scales = tl.load(scales_at[:, None] + lane[None, :], mask=wanted, other=0)
            tl.store(out + (place * ROW_BYTES + CODE_BYTES)[:, None] + lane[None, :], scales,
                     mask=inside[:, None] & (lane < SCALE_BYTES)[None, :])


@triton.jit
def store_done(done, ticket_word, ticket, TICKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the ticket (TICKET 1: the number `ticket`; 2: the number that the word `ticket_word` holds) into `done`."""
    if TICKET == 2:
        ticket = tl.load(ticket_word, volatile=True)
    tl.store(done, ticket, cache_modifier=".wt")             # one writer: no atomic, which PCIe may not offer


@triton.jit
def is_last(counter):  # type: ignore[no-untyped-def]
    """Whether all programs of the launch have read their bundles: asked by each at its end, true for the last.

    What a program loaded it has stored (or scaled) before, so its loads have returned; the barrier says so for all warps. The order of
    the stores does not matter, so no fence is paid for: they belong to the stream, not to the word.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1


@triton.jit(do_not_specialize=["tokens", "ticket", "dram", "hbm", "global_scale"],
            do_not_specialize_on_alignment=["source", "ticket_word", "done", "counter"])
def gather_kernel(source, out, out_scales, counter, done, ticket_word, dram: tl.int64, hbm: tl.int64, ticket: tl.int64,  # type: ignore[no-untyped-def]
                  tokens: tl.int32, global_scale: tl.float32,
                  HEADS: tl.constexpr, ORDERS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
                  CODE_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, STRIDE: tl.constexpr,
                  KIND: tl.constexpr, MODE: tl.constexpr, ENCODING: tl.constexpr, TICKET: tl.constexpr,
                  CODE_P2: tl.constexpr, SCALE_P2: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, OVERLAP: tl.constexpr):
    """One tile of BLOCK rows at a time; see the module's text and `Gather`."""
    if OVERLAP:
        gdc_launch_dependents()
    total = tokens * COLUMNS
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        inside = row < total
        token = row // COLUMNS
        column = row % COLUMNS
        order = tl.zeros([BLOCK], tl.int32)
        head = column
        heads = tl.full([BLOCK], HEADS & 255, tl.int32)
        start = HEADS & 255
        for o in tl.static_range(1, ORDERS):
            behind = column >= start
            order = tl.where(behind, o, order)
            head = tl.where(behind, column - start, head)
            heads = tl.where(behind, (HEADS >> (8 * o)) & 255, heads)
            start += (HEADS >> (8 * o)) & 255
        base = bundle_base(source, token * ORDERS + order, inside, dram, hbm, STRIDE, KIND)
        there = base != 0
        bundle = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 64)
        store_rows(bundle, head, heads, there, inside, row.to(tl.int64), out, out_scales, global_scale, BLOCK, DIM, CODE_BYTES, SCALE_BYTES,
                   MODE, ENCODING, CODE_P2, SCALE_P2, RULE)
    if TICKET > 0:
        if is_last(counter):
            tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
            store_done(done, ticket_word, ticket, TICKET)


@triton.jit(do_not_specialize=["ticket"], do_not_specialize_on_alignment=["done", "ticket_word"])
def mark_kernel(done, ticket_word, ticket: tl.int64, TICKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """The word alone: behind other work of the stream that reads bundles by address."""
    store_done(done, ticket_word, ticket, TICKET)


@dataclass(frozen=True)
class Tile:
    """How the work is cut. rows: per tile; warps: per program; programs: at most so many (0: one a tile)."""

    rows: int
    warps: int
    programs: int = 0


# Measured choices (docs/lab-log.md): the first entry whose token count is not below T. bench/gpu.py --tune tries TILE_CHOICES.
TILES: tuple[tuple[int, Tile], ...] = ((1 << 31, Tile(8, 4)),)
TILE_CHOICES: tuple[Tile, ...] = (
    Tile(4, 2), Tile(8, 2), Tile(8, 4), Tile(8, 8), Tile(16, 4), Tile(16, 8), Tile(8, 4, 132), Tile(8, 4, 264), Tile(8, 4, 396),
    Tile(8, 4, 528), Tile(8, 4, 1056), Tile(16, 8, 132), Tile(16, 8, 264), Tile(4, 2, 528), Tile(16, 4, 264),
)


def tile_for(tokens: int) -> Tile:
    """The tile of TILES for that many tokens."""
    return next(tile for limit, tile in TILES if tokens <= limit)


class Gather:
    """Launches the gather of one bundle layout. Stateless but for what it compiled; any thread, any stream.

    Arguments of a call:
      source       addresses int64 [T, orders] (0: zeros), or slots int32 [T, orders] (s >= 0: dram + s * stride; s <= -2:
                   hbm + (-2 - s) * stride; -1: zeros). On the device or in pinned host memory (read in place).
      out          "rows" bfloat16 (or float32) [T, columns, dim]; "packed" uint8 [T, columns, row_bytes]; "mxfp8" uint8
                   [T, columns * dim] with `scales` uint8 [T, columns * scale_bytes]. Contiguous, 16-byte aligned.
      dram, hbm    base addresses as the device sees them (slots only)
      done         int64 word, pinned: gets the ticket once all bundles were read. With `counter`, an int32 device word that is
                   zero (and is left zero) and belongs to one launch at a time.
      ticket       the number, or an int64 word (pinned or device) that holds it when the kernel runs (for graphs)
      overlap      let the next kernel on the stream begin early, if it was launched as a dependent that waits (`Projection`)

    Values (spec A7): bf(fl32(e4m3(code) * 2^(scale - 127))), scale 0 = 2^-127, 255 = NaN, NaN codes NaN, -0 kept.
    """

    MODES = {"rows": ROWS, "packed": PACKED, "mxfp8": MXFP8}

    def __init__(self, bundles: Bundles) -> None:
        self.bundles = bundles
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self.global_scale = float(torch.tensor(bundles.global_scale).to(torch.bfloat16))
        self._plans: dict[tuple[Any, ...], tuple[Launch, int]] = {}

    def __call__(self, source: torch.Tensor, out: torch.Tensor, *, mode: str = "rows", scales: torch.Tensor | None = None,
                 dram: int = 0, hbm: int = 0, counter: torch.Tensor | None = None, done: torch.Tensor | None = None,
                 ticket: int | torch.Tensor = 0, tile: Tile | None = None, overlap: bool = False) -> None:
        by_word = isinstance(ticket, torch.Tensor)
        if out.dtype == torch.bfloat16 and self.bundles.encoding == "bf16":
            out = out.view(torch.uint8)                      # such rows are their own bytes
        key = (mode, source.shape, source.dtype, out.shape, out.dtype, None if scales is None else scales.shape, done is None,
               counter is None, by_word, tile, overlap)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, source, out, mode, scales, counter, done, 0 if done is None else 2 if by_word else 1, tile,
                              overlap and dependents(out.device))
        if not (source.is_contiguous() and out.is_contiguous() and aligned(out)):
            raise ValueError("the bundles' addresses and out must be contiguous, out 16-byte aligned too")
        launch, programs = plan
        launch(programs, source, out, out if scales is None else scales, out if counter is None else counter,
               out if done is None else done, ticket if by_word else out, dram, hbm, 0 if by_word else ticket, source.shape[0],
               self.global_scale)

    def at(self, tokens: int, source: int, out: int, *, mode: str, dram: int, hbm: int, counter: int, done: int, ticket: int) -> None:
        """A call for slots with a word and a number, by addresses: for a caller who keeps that memory and knows its shapes (the store:
        looking at tensors is most of what a call takes). `out`: bfloat16 rows or packed bytes."""
        plan = self._plans.get((mode, tokens))
        if plan is None:
            self._check_size(tokens)
            plan = self._keep((mode, tokens), tokens, mode, SLOTS, torch.bfloat16 if mode == "rows" else torch.uint8, 1, None, False)
        launch, programs = plan
        launch.at((programs, 1, 1), source, out, out, counter, done, out, dram, hbm, ticket, tokens, self.global_scale)

    def _plan(self, key: tuple[Any, ...], source: torch.Tensor, out: torch.Tensor, mode: str, scales: torch.Tensor | None,
              counter: torch.Tensor | None, done: torch.Tensor | None, ticket: int, tile: Tile | None,
              overlap: bool) -> tuple[Launch, int]:
        """Check what the next calls with the same shapes need not check again; the variant, and how many programs."""
        tokens = self.checked(source, out, mode, scales, counter, done)
        return self._keep(key, tokens, mode, SLOTS if source.dtype == torch.int32 else ADDRESSES, out.dtype, ticket, tile, overlap)

    def _keep(self, key: tuple[Any, ...], tokens: int, mode: str, kind: int, dtype: torch.dtype, ticket: int, tile: Tile | None,
              overlap: bool) -> tuple[Launch, int]:
        """The variant, and how many programs: kept for the next calls."""
        tile = tile or tile_for(tokens)
        tiles = -(-tokens * self.bundles.columns // tile.rows)
        launch = self.launch(mode, kind, dtype, ticket, tile, overlap)
        if len(self._plans) >= 4096:
            self._plans.clear()
        self._plans[key] = launch, max(1, min(tiles, tile.programs or tiles))
        return self._plans[key]

    def launch(self, mode: str, kind: int, dtype: torch.dtype, ticket: int, tile: Tile, overlap: bool = False) -> Launch:
        """The compiled variant (see `launch.preload`)."""
        key = (mode, kind, dtype, ticket, tile, overlap)
        found = self._launches.get(key)
        if found is None:
            b = self.bundles
            number = self.MODES[mode]
            encoding = b.encoding_number(number)
            if number == ROWS and encoding == NO_SCALE:
                dtype = torch.uint8
            word = torch.int32 if kind == SLOTS else torch.int64
            words = [word, dtype, torch.uint8, torch.int32, torch.int64, torch.int64, 1 << 40, 1 << 40, 1, 1, 1.0]
            found = Launch(gather_kernel, words, {
                **b.constants, "KIND": kind, "MODE": number, "ENCODING": encoding,
                "TICKET": ticket, "CODE_P2": next_power_of_two(b.code_bytes),
                "SCALE_P2": next_power_of_two(max(1, b.scale_bytes)), "BLOCK": tile.rows,
                "RULE": SCALE_RULES[b.scale_rule], "OVERLAP": overlap}, warps=tile.warps)
            self._launches[key] = found
        return found

    def launches(self, mode: str = "rows", *, kind: int = SLOTS, tickets: tuple[int, ...] = (0, 1, 2)) -> list[Launch]:
        """All variants that calls of this mode can need, whatever T (for `launch.preload`). tickets: 0 without a word, 1 a
        number, 2 a word."""
        dtype = torch.bfloat16 if mode == "rows" else torch.uint8
        return [self.launch(mode, kind, dtype, ticket, tile) for ticket in tickets for tile in {tile for _, tile in TILES}]

    def checked(self, source: torch.Tensor, out: torch.Tensor, mode: str, scales: torch.Tensor | None,
                 counter: torch.Tensor | None, done: torch.Tensor | None) -> int:
        b = self.bundles
        tokens = source.shape[0]
        if source.shape != (tokens, b.orders) or source.dtype not in (torch.int64, torch.int32) or not source.is_contiguous():
            raise ValueError(f"the bundles' addresses must be contiguous int64 (or slots int32) [T, {b.orders}]; found "
                             f"{source.dtype} {tuple(source.shape)}")
        rows = ((tokens, b.columns, b.code_bytes), (torch.uint8,)) if b.encoding == "bf16" else (
            (tokens, b.columns, b.dim), (torch.bfloat16, torch.float32))
        wanted, dtypes = {"rows": rows,
                          "packed": ((tokens, b.columns, b.row_bytes), (torch.uint8,)),
                          "mxfp8": ((tokens, b.columns * b.dim), (torch.uint8,))}[mode]
        if tuple(out.shape) != wanted or out.dtype not in dtypes or not out.is_contiguous() or not aligned(out):
            raise ValueError(f"out must be contiguous, 16-byte aligned {dtypes[0]} {wanted}; found {out.dtype} "
                             f"{tuple(out.shape)}")
        if mode == "mxfp8" and (scales is None or tuple(scales.shape) != (tokens, b.columns * b.scale_bytes)
                                or scales.dtype != torch.uint8 or not scales.is_contiguous() or not aligned(scales)):
            raise ValueError(f"mode mxfp8 needs scales: contiguous, 16-byte aligned uint8 "
                             f"[{tokens}, {b.columns * b.scale_bytes}]")
        if (done is None) != (counter is None) or (done is not None and done.dtype != torch.int64):
            raise ValueError("the word `done` (int64) needs a `counter` (int32 on the device), and a counter a word")
        self._check_size(tokens)
        return tokens

    def _check_size(self, tokens: int) -> None:
        b = self.bundles
        if tokens * b.columns * max(b.dim, b.row_bytes) >= 1 << 40 or tokens * b.columns >= 1 << 31:
            raise ValueError(f"{tokens} tokens are too many for one gather; split the call")


_mark: dict[int, Launch] = {}


def mark_done(done: torch.Tensor, ticket: int | torch.Tensor) -> None:
    """Store `ticket` into the pinned int64 word `done` behind everything on the current stream."""
    mode = 2 if isinstance(ticket, torch.Tensor) else 1
    launch = mark_launch(mode)
    if isinstance(ticket, torch.Tensor):
        launch(1, done, ticket, 0)
    else:
        launch(1, done, done, ticket)


def mark_launch(mode: int) -> Launch:
    """The compiled `mark_done` (1: the ticket is a number; 2: a word)."""
    if mode not in _mark:
        _mark[mode] = Launch(mark_kernel, [torch.int64, torch.int64, 1], {"TICKET": mode}, warps=1)
    return _mark[mode]
