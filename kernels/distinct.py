"""The gather that reads a bundle once, however many positions of the launch ask for it: for the steps of real text.

    program   one position's bundle ─► claims it in a table ─► first:   reads it, stores its rows, says where
                                                            └► another: waits for that, copies the rows within GPU memory

Of a step of text a quarter to three quarters of the bundles come again in it (docs/lab-log.md), and L2 does not keep what comes from
host memory, so each of them crosses the link again in `gather.py`. Who waits, waits for a program that runs already and
waits for nobody, so the wait ends. Bundles in HBM, and those whose cell of the table belongs to another, are read as they are.
Invariant: a cell is believed only if it carries this launch's number, and no two launches that share a table run at the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdgram.kernels.gather import PACKED, ROWS, SCALE_RULES, Bundles, Gather, is_last, store_done, store_rows
from ssdgram.kernels.launch import Launch, next_power_of_two

HEADER = 16                                                  # int64 words before the cells; [0] is the launch's number
SPARSE = 4                                                   # cells for each bundle of the largest launch, at least: few share one
LAST = 0x7FFFFFFF                                            # launch number after which the table is emptied
WARPS = 4


@triton.jit
def claim(cell, key, number):  # type: ignore[no-untyped-def]
    """Whether this program is the first to claim the cell for `key`, and whether another of the launch claimed it for the same.

    By atomics alone, which one thread does for all: warps that each load the cell may see different things.
    """
    found = tl.atomic_add(cell, 0, sem="relaxed", scope="gpu")
    mine = number < 0                                        # never: a launch's number is 1 .. LAST
    if (found >> 32) != number:
        before = tl.atomic_cas(cell, found, key, sem="relaxed", scope="gpu")
        mine = before == found
        found = before
    return mine, found == key                                # who replaced a cell found an old number there


@triton.jit(do_not_specialize=["ticket", "dram", "hbm", "global_scale", "bits"],
            do_not_specialize_on_alignment=["source", "ticket_word", "done", "counter"])
def distinct_kernel(source, out, table, counter, done, ticket_word, dram: tl.int64, hbm: tl.int64, ticket: tl.int64,  # type: ignore[no-untyped-def]
                    global_scale: tl.float32, bits: tl.int32,
                    HEADS: tl.constexpr, ORDERS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, CODE_BYTES: tl.constexpr,
                    SCALE_BYTES: tl.constexpr, STRIDE: tl.constexpr, MODE: tl.constexpr, ENCODING: tl.constexpr, TICKET: tl.constexpr,
                    CODE_P2: tl.constexpr, SCALE_P2: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
                    WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr, HEADER: tl.constexpr, LAST: tl.constexpr):
    """One bundle; see the module's text and `Distinct`."""
    entry = tl.program_id(0)
    order = entry % ORDERS
    heads = HEADS & 255
    start = 0
    for o in tl.static_range(1, ORDERS):
        start = tl.where(order >= o, start + ((HEADS >> (8 * (o - 1))) & 255), start)
        heads = tl.where(order == o, (HEADS >> (8 * o)) & 255, heads)
    head = tl.arange(0, BLOCK)
    inside = head < heads
    first = (entry // ORDERS).to(tl.int64) * COLUMNS + start
    number = tl.load(table)
    slot = tl.load(source + entry).to(tl.int64)
    cell = table + HEADER + 2 * (((slot * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - bits))
    mine = number < 0
    other = number < 0
    if slot >= 0:
        mine, other = claim(cell, (number << 32) | slot, number)
    if other:
        where = tl.atomic_add(cell + 1, 0, sem="acquire", scope="gpu")
        while (where >> 32) != number:
            where = tl.atomic_add(cell + 1, 0, sem="acquire", scope="gpu")
        lane = tl.arange(0, WIDTH_P2)
        wanted = inside[:, None] & (lane < WIDTH)[None, :]
        place = head.to(tl.int64)[:, None] * WIDTH + lane[None, :]
        rows = tl.load(out + (where & 0xFFFFFFFF) * WIDTH + place, mask=wanted, cache_modifier=".cg")
        tl.store(out + first * WIDTH + place, rows, mask=wanted)
    else:
        base = tl.where(slot >= 0, dram + slot * STRIDE, hbm + (-2 - slot) * STRIDE)
        base = tl.full([BLOCK], 0, tl.int64) + tl.where(slot == -1, 0, base)
        there = inside & (base != 0)
        bundle = tl.multiple_of(base.to(tl.pointer_type(tl.uint8)), 64)
        store_rows(bundle, head, tl.full([BLOCK], 0, tl.int32) + heads, there, inside, first + head, out, out, global_scale, BLOCK, DIM,
                   CODE_BYTES, SCALE_BYTES, MODE, ENCODING, CODE_P2, SCALE_P2, RULE)
        if mine:
            tl.debug_barrier()                               # all warps' rows are stored, and the release below makes them visible
            tl.atomic_xchg(cell + 1, (number << 32) | first, sem="release", scope="gpu")
    if is_last(counter):                                     # the table is ready for the next launch before anybody hears of the end
        if number == LAST:
            for block in range(0, 2 << bits, 1024):
                tl.store(table + HEADER + block + tl.arange(0, 1024), tl.zeros([1024], tl.int64))
            tl.store(table, tl.full([], 1, tl.int64))
        else:
            tl.store(table, number + 1)
        tl.debug_barrier()
        tl.atomic_xchg(counter, 0, sem="acq_rel", scope="gpu")
        store_done(done, ticket_word, ticket, TICKET)


class Distinct:
    """A `Gather` of one layer for slots, with its table: for launches of up to `tokens` positions that run one after the other.

    Calls as `Gather`'s, in mode "rows" or "packed" with a counter and a word: what they write is the same. A slot holds a bundle of
    one order. `memory`: int64 on the device, 16 bytes a cell. `launches`: compiled variants, shared with others of these bundles.
    """

    MODES = {"rows": ROWS, "packed": PACKED}

    def __init__(self, bundles: Bundles, tokens: int, device: torch.device | str,
                 launches: dict[tuple[str, int, torch.dtype], Launch] | None = None) -> None:
        self.bundles, self.tokens = bundles, tokens
        self.cell_bits = max(9, (SPARSE * next_power_of_two(max(1, tokens * bundles.orders))).bit_length() - 1)
        if tokens * bundles.columns >= 1 << 31 or self.cell_bits > 26:
            raise ValueError(f"{tokens} tokens are too many for one gather; split the call")
        self.memory = torch.zeros(HEADER + (2 << self.cell_bits), dtype=torch.int64, device=device)
        self.memory[0] = 1
        self._table = self.memory.data_ptr()
        self._launches = {} if launches is None else launches
        self._plain = Gather(bundles)

    def __call__(self, source: torch.Tensor, out: torch.Tensor, *, dram: int = 0, hbm: int = 0, counter: torch.Tensor,
                 done: torch.Tensor, ticket: int | torch.Tensor, mode: str = "rows") -> None:
        by_word, b, tokens = isinstance(ticket, torch.Tensor), self.bundles, source.shape[0]
        if out.dtype == torch.bfloat16 and b.encoding == "bf16":
            out = out.view(torch.uint8)                      # such rows are their own bytes
        self._check(tokens)
        if source.shape != (tokens, b.orders) or source.dtype != torch.int32 or not source.is_contiguous():
            raise ValueError(f"slots must be contiguous int32 [T, {b.orders}]; found {source.dtype} {tuple(source.shape)}")
        self._plain.checked(source, out, mode, None, counter, done)
        self.launch(mode, 2 if by_word else 1, out.dtype)(
            tokens * b.orders, source, out, self.memory, counter, done, ticket if by_word else out, dram, hbm, 0 if by_word else ticket,
            self._plain.global_scale, self.cell_bits)

    def at(self, tokens: int, source: int, out: int, *, mode: str, dram: int, hbm: int, counter: int, done: int, ticket: int) -> None:
        """As `Gather.at`."""
        self._check(tokens)
        self.launch(mode, 1).at((tokens * self.bundles.orders, 1, 1), source, out, self._table, counter, done, out, dram, hbm, ticket,
                                self._plain.global_scale, self.cell_bits)

    def _check(self, tokens: int) -> None:
        if tokens > self.tokens:
            raise ValueError(f"{tokens} tokens are gathered: expected at most {self.tokens}, which the table was made for")

    def launch(self, mode: str, ticket: int, dtype: torch.dtype | None = None) -> Launch:
        """The compiled variant (see `launch.preload`). ticket: 1 a number, 2 a word."""
        rows = mode == "rows" and self.bundles.encoding != "bf16"
        dtype = dtype or (torch.bfloat16 if rows else torch.uint8)
        found = self._launches.get((mode, ticket, dtype))
        if found is None:
            b = self.bundles
            width = b.dim if rows else b.row_bytes
            found = Launch(distinct_kernel, [torch.int32, dtype, torch.int64, torch.int32, torch.int64, torch.int64, 1 << 40, 1 << 40, 1,
                                             1.0, 9], {
                **b.constants, "MODE": self.MODES[mode], "ENCODING": b.encoding_number(self.MODES[mode]), "TICKET": ticket,
                "CODE_P2": next_power_of_two(b.code_bytes), "SCALE_P2": next_power_of_two(max(1, b.scale_bytes)),
                "BLOCK": next_power_of_two(max(b.heads)), "RULE": SCALE_RULES[b.scale_rule],
                "WIDTH": width, "WIDTH_P2": next_power_of_two(width), "HEADER": HEADER, "LAST": LAST}, warps=WARPS)
            self._launches[mode, ticket, dtype] = found
        return found

    def launches(self) -> list[Launch]:
        """All variants that a store's calls can need (for `launch.preload`)."""
        modes = ("packed",) if self.bundles.encoding == "nvfp4" else ("rows", "packed")
        return [self.launch(mode, ticket) for mode in modes for ticket in (1, 2)]
