"""Row checks on the GPU: CRC-32C of rows in bundles that the CPU never sees (the GDS path; design 3, rule 2).

    row check = CRC-32C over (generation u64, layer u32, column u32, row u64; little-endian) and the row's bytes

A CRC is linear over GF(2): the bits of the message select 32-bit constants whose exclusive or, with one constant for the
message's length, is the result. So all bytes of all rows of a bundle are folded side by side, without tables' latency chains.
It knows neither pages nor slots. Invariant: a result word is 0 if every row of the bundle is right, and only then.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from ssdgram.kernels.launch import Launch, next_power_of_two

PREFIX = 24                                                  # bytes before the row's own
POLYNOMIAL = 0x82F63B78                                      # Castagnoli, reflected


@functools.cache
def bit_constants(length: int) -> tuple[np.ndarray, int]:
    """For messages of `length` bytes: uint32 [8, length], what bit b of byte j adds to the CRC, and the CRC of all zeros."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(POLYNOMIAL), table >> 1).astype(np.uint32)
    constants = np.zeros((8, length), np.uint32)
    state = table[1 << np.arange(8)]                         # the last byte's bits
    for byte in range(length - 1, -1, -1):
        constants[:, byte] = state
        state = (state >> 8) ^ table[state & 0xFF]           # one zero byte further from the end
    zeros = np.uint32(0xFFFFFFFF)
    for _ in range(length):
        zeros = (zeros >> np.uint32(8)) ^ table[zeros & np.uint32(0xFF)]
    return constants, int(zeros ^ np.uint32(0xFFFFFFFF))


@triton.jit
def xor(a, b):  # type: ignore[no-untyped-def]
    return a ^ b


@triton.jit
def prefix_bytes(generation, place, row, byte):  # type: ignore[no-untyped-def]
    """int32 [rows, bytes]: the bytes before the rows' own, where byte < 24: generation, place (layer and column << 32), row."""
    word = tl.where((byte < 8)[None, :], generation, tl.where((byte < 16)[None, :], place[:, None], row[:, None]))
    return ((word >> ((byte % 8) * 8).to(tl.int64)[None, :]) & 0xFF).to(tl.int32)


@triton.jit
def crc_of(value, byte, constants, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 [rows]: what the messages in `value` (int32 [rows, bytes], LENGTH bytes each) add to the CRC of zeros."""
    state = value * 0
    for bit in tl.static_range(8):
        constant = tl.load(constants + bit * LENGTH + byte, mask=byte < LENGTH, other=0)
        state = state ^ (constant[None, :] & -((value >> bit) & 1))
    return tl.reduce(state, 1, xor)


@triton.jit(do_not_specialize=["bundles", "generation", "layer", "zeros"],
            do_not_specialize_on_alignment=["addresses", "columns", "rows", "checks", "results", "found"])
def check_kernel(addresses, columns, rows, checks, constants, results, found,  # type: ignore[no-untyped-def]
                 generation: tl.int64, layer: tl.int32, zeros: tl.int32, bundles: tl.int32,
                 HEADS: tl.constexpr, HEADS_P2: tl.constexpr, CODE_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
                 BYTES_P2: tl.constexpr, FOUND: tl.constexpr):
    """Bundle program_id(0); see `Check`."""
    bundle = tl.program_id(0).to(tl.int64)
    LENGTH: tl.constexpr = 24 + CODE_BYTES + SCALE_BYTES
    base = tl.load(addresses + bundle)
    head = tl.arange(0, HEADS_P2)
    used = head < HEADS
    there = used & (base + head != head)
    column = tl.load(columns + bundle * HEADS + head, mask=used, other=0).to(tl.int64)
    row = tl.load(rows + bundle * HEADS + head, mask=used, other=0)
    byte = tl.arange(0, BYTES_P2)
    prefix = prefix_bytes(generation, (layer.to(tl.int64) & 0xFFFFFFFF) + (column << 32), row, byte)
    code = byte - 24
    scale = code - CODE_BYTES
    offset = tl.where((scale >= 0)[None, :], HEADS * CODE_BYTES + head[:, None] * SCALE_BYTES + scale[None, :],
                      head[:, None] * CODE_BYTES + code[None, :])
    pointer = base.to(tl.pointer_type(tl.uint8)) + offset
    body = (code >= 0) & (byte < LENGTH)
    value = tl.load(pointer, mask=there[:, None] & body[None, :], other=0).to(tl.int32)
    value = tl.where((code < 0)[None, :], prefix, value)
    crc = crc_of(value, byte, constants, LENGTH) ^ zeros
    expected = tl.load(checks + bundle * HEADS + head, mask=used, other=0)
    wrong = tl.where(used & ((crc != expected) | ~there), 1 << head, 0)
    tl.store(results + bundle, tl.sum(wrong, 0))
    if FOUND:
        tl.store(found + bundle * HEADS + head, crc, mask=used)


class Check:
    """Checks bundles of `heads` rows (at most 31) of one layer of one store."""

    def __init__(self, heads: int, code_bytes: int, scale_bytes: int, *, generation: int, layer: int,
                 device: torch.device | str = "cuda") -> None:
        if not 1 <= heads <= 31:
            raise ValueError(f"a bundle has 1 to 31 rows; found {heads}")
        self.heads, self.code_bytes, self.scale_bytes = heads, code_bytes, scale_bytes
        self.generation, self.layer = signed(generation, 64), signed(layer, 32)
        constants, zeros = bit_constants(PREFIX + code_bytes + scale_bytes)
        self.constants = torch.from_numpy(constants.view(np.int32).copy()).to(device)
        self.zeros = signed(zeros, 32)
        self._launches: dict[bool, Launch] = {}

    def __call__(self, addresses: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor, checks: torch.Tensor,
                 results: torch.Tensor, found: torch.Tensor | None = None) -> None:
        """On the current stream: results int32 [B] (pinned or device): bit h set = head h's row is not the right one.

        addresses int64 [B] (device or pinned memory; 0: all heads wrong); columns int32 [B, heads], rows int64 [B, heads]
        (row of the column's file), checks int32 [B, heads] (the expected CRC's bits); found int32 [B, heads]: the CRCs.
        """
        count = addresses.shape[0]
        shape = (count, self.heads)
        for name, tensor, dtype, wanted in (("addresses", addresses, torch.int64, (count,)), ("rows", rows, torch.int64, shape),
                                            ("columns", columns, torch.int32, shape), ("checks", checks, torch.int32, shape),
                                            ("results", results, torch.int32, (count,))):
            if tensor.dtype != dtype or tuple(tensor.shape) != wanted or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous {dtype} {wanted}; found {tensor.dtype} {tuple(tensor.shape)}")
        if count == 0:
            return
        self.launch(found is not None)(count, addresses, columns, rows, checks, self.constants, results,
                                       results if found is None else found, self.generation, self.layer, self.zeros, count)

    def launch(self, found: bool = False) -> Launch:
        """The compiled variant."""
        if found not in self._launches:
            words = [torch.int64, torch.int32, torch.int64] + [torch.int32] * 4 + [1, 1, 1, 1]
            self._launches[found] = Launch(check_kernel, words, {
                "HEADS": self.heads, "HEADS_P2": next_power_of_two(self.heads), "CODE_BYTES": self.code_bytes,
                "SCALE_BYTES": self.scale_bytes, "BYTES_P2": next_power_of_two(PREFIX + self.code_bytes + self.scale_bytes),
                "FOUND": found}, warps=4)
        return self._launches[found]


def signed(number: int, bits: int) -> int:
    """The signed integer with the bits of an unsigned one."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
