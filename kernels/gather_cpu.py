"""Gather on the CPU: the rows of many positions out of bundle slots, as bf16 bits or as the checkpoint's own bytes.

    slot     | codes head 0 | codes head 1 | ... | scales head 0 | scales head 1 | ... |      (row_bytes * heads bytes)
    out      [T, columns, ...]: position t, order o fills columns first[o] .. first[o] + heads[o] - 1
    slots    flat int32: position t, order o is slots[base + t * step + o]; -1 (a position of another rank) gives zeros

It knows neither keys nor where slots come from. Positions are independent, so callers split [start, stop) over threads.
Invariant: what it writes equals `value_table`'s entries bit for bit; the vector path covers only the scales for which the
result is a normal bf16 number, the table all the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ssdgram._compiled import address_of, compiled, copy_bytes, load_u8, load_u32, prefetch
from ssdgram.geometry import ENCODINGS
from ssdgram.kernels.dequant import NAN_BITS, value_table

FP8_UE8M0, BF16, FP8_GLOBAL, NVFP4 = range(4)
_KINDS = {"fp8_ue8m0": FP8_UE8M0, "bf16": BF16, "fp8_global": FP8_GLOBAL, "nvfp4": NVFP4}
_LOW_SCALE, _HIGH_SCALE = 10, 246                            # 2^-9 * 2^(10-127) = 2^-126; 448 * 2^(246-127) < 2^128


class RowFormat(NamedTuple):
    """How a row's bytes become values; an argument of compiled functions."""

    kind: int                                                # FP8_UE8M0, BF16, FP8_GLOBAL, NVFP4
    row_dim: int
    code_bytes: int
    scale_bytes: int
    table: np.ndarray                                        # uint16, `value_table` of the encoding


def row_format(encoding: str, row_dim: int, global_scale: float | None = None, scale_rule: str = "spec") -> RowFormat:
    """The RowFormat of a geometry's `encoding` and `row_dim`; `global_scale` for fp8_global and nvfp4. ConfigError."""
    table = value_table(encoding, global_scale, scale_rule)
    bits, block = ENCODINGS[encoding]
    return RowFormat(_KINDS[encoding], row_dim, row_dim * bits // 8, row_dim // block if block else 0, table)


# ---------------------------------------------------------------- stores and the vector step

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _storer(name: str, type_: ir.Type, numba_type: types.Type):  # type: ignore[no-untyped-def]
    @intrinsic
    def store(typingctx, address, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            builder.store(arguments[1], builder.inttoptr(arguments[0], type_.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    store.__doc__ = f"Store a {name} at an address (int64), at any alignment."
    return store


_store_u16 = _storer("uint16", _i16, types.uint16)
_store_u32 = _storer("uint32", _i32, types.uint32)
_store_u64 = _storer("uint64", _i64, types.uint64)


@intrinsic
def _zero_bytes(typingctx, address, length):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        cgutils.memset(builder, builder.inttoptr(arguments[0], _i8.as_pointer()), arguments[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _expand_32(typingctx, codes, scale, out):  # type: ignore[no-untyped-def]
    """32 e4m3fn codes at `codes` times 2^(scale - 127), as bf16 bits at `out`; scale in _LOW_SCALE .. _HIGH_SCALE.

    In 16-bit lanes, m = the code without its sign. Both formats have 3 known mantissa bits at most, so nothing rounds:
    m >= 8 is normal: (m << 4) has exponent and mantissa where bf16 has them, off by the difference of the biases (120) and
    the scale. m = 1 .. 7 is m * 2^-9: its highest bit becomes the exponent, the bits below it move up to the mantissa.
    """
    lanes = ir.VectorType(_i16, 32)

    def constant(value: int) -> ir.Constant:
        return ir.Constant(lanes, [value] * 32)

    def codegen(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        source = b.inttoptr(arguments[0], ir.VectorType(_i8, 32).as_pointer())
        code = b.zext(b.load(source, align=1), lanes)
        shifted = b.trunc(b.shl(b.sub(arguments[1], ir.Constant(_i64, 7)), ir.Constant(_i64, 7)), _i16)
        one = b.insert_element(ir.Constant(lanes, ir.Undefined), shifted, ir.Constant(_i32, 0))
        exponent = b.shuffle_vector(one, ir.Constant(lanes, ir.Undefined), ir.Constant(ir.VectorType(_i32, 32), [0] * 32))
        m = b.and_(code, constant(0x7F))
        value = b.add(b.shl(m, constant(4)), exponent)
        four = b.add(b.shl(b.and_(m, constant(3)), constant(5)), exponent)
        two = b.add(b.shl(b.and_(m, constant(1)), constant(6)), b.sub(exponent, constant(1 << 7)))
        one = b.sub(exponent, constant(2 << 7))
        value = b.select(b.icmp_unsigned("<", m, constant(8)), four, value)
        value = b.select(b.icmp_unsigned("<", m, constant(4)), two, value)
        value = b.select(b.icmp_unsigned("==", m, constant(1)), one, value)
        value = b.select(b.icmp_unsigned("==", m, constant(0)), constant(0), value)
        value = b.or_(value, b.shl(b.and_(code, constant(0x80)), constant(8)))
        value = b.select(b.icmp_unsigned("==", m, constant(0x7F)), constant(NAN_BITS), value)
        b.store(value, b.inttoptr(arguments[2], lanes.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# ---------------------------------------------------------------- rows


@compiled
def _look_up(codes, table, base, count, out):  # type: ignore[no-untyped-def]
    """`count` one-byte codes at `codes`: table[base + code] (uint16) at `out`, four to a store."""
    byte = np.uint64(255)
    origin = np.uint64(base)
    for k in range(0, count - 3, 4):
        word = np.uint64(load_u32(codes + k))
        four = np.uint64(table[origin + (word & byte)])
        four |= np.uint64(table[origin + ((word >> np.uint64(8)) & byte)]) << np.uint64(16)
        four |= np.uint64(table[origin + ((word >> np.uint64(16)) & byte)]) << np.uint64(32)
        four |= np.uint64(table[origin + (word >> np.uint64(24))]) << np.uint64(48)
        _store_u64(out + 2 * k, four)
    for k in range(count & ~3, count):
        _store_u16(out + 2 * k, table[origin + np.uint64(load_u8(codes + k))])


@compiled
def expand_row(codes, scales, row, out):  # type: ignore[no-untyped-def]
    """One row's values as bf16 bits: codes and scales at their addresses, 2 * row_dim bytes written at address `out`."""
    if row.kind == FP8_UE8M0:
        for block in range(row.scale_bytes):
            scale = np.int64(load_u8(scales + block))
            if _LOW_SCALE <= scale <= _HIGH_SCALE:
                _expand_32(codes + 32 * block, scale, out + 64 * block)
            else:
                _look_up(codes + 32 * block, row.table, scale * 256, 32, out + 64 * block)
    elif row.kind == BF16:
        copy_bytes(out, codes, row.code_bytes)
    elif row.kind == FP8_GLOBAL:
        _look_up(codes, row.table, 0, row.row_dim, out)
    else:
        for block in range(row.scale_bytes):
            pairs = address_of(row.table, np.int64(load_u8(scales + block)) * 512)
            for k in range(8 * block, 8 * block + 8):
                _store_u32(out + 4 * k, load_u32(pairs + 4 * np.int64(load_u8(codes + k))))


@compiled
def expand_rows(packed, row, out):  # type: ignore[no-untyped-def]
    """packed uint8 [R, row_bytes] (codes, then scales) -> out uint16 [R, row_dim]; both C-contiguous."""
    row_bytes = row.code_bytes + row.scale_bytes
    for index in range(len(packed)):
        source = address_of(packed, index * row_bytes)
        expand_row(source, source + row.code_bytes, row, address_of(out, index * row.row_dim))


@compiled
def _ask_for(slab, slot_stride, slots, first, groups, row):  # type: ignore[no-untyped-def]
    """Prefetch the bundles of the position whose slots start at slots[first]: their first lines, and their scales."""
    for order in range(len(groups)):
        slot = np.int64(slots[first + order])
        if slot >= 0:
            bundle = slab + slot * slot_stride
            prefetch(bundle)
            prefetch(bundle + 64)
            prefetch(bundle + 128)
            if row.scale_bytes > 0:
                prefetch(bundle + groups[order, 0] * row.code_bytes)


@compiled
def gather_bf16(slab, slot_stride, slots, base, step, groups, row, out, start, stop):  # type: ignore[no-untyped-def]
    """Rows of positions [start, stop) as bf16 bits: out uint16 [T, columns, row_dim].

    slab: address of slot 0 (int64); slots int32, flat (see the module's drawing); groups int64 [orders, 2]: rows of that
    order's bundles (0: not served), first output column; row: RowFormat.
    """
    columns = out.shape[1]
    for position in range(start, stop):
        first = base + position * step
        if position + 1 < stop:
            _ask_for(slab, slot_stride, slots, first + step, groups, row)
        for order in range(len(groups)):
            heads = groups[order, 0]
            target = address_of(out, (position * columns + groups[order, 1]) * row.row_dim)
            slot = np.int64(slots[first + order])
            if slot < 0:
                _zero_bytes(target, 2 * heads * row.row_dim)
                continue
            codes = slab + slot * slot_stride
            scales = codes + heads * row.code_bytes
            for head in range(heads):
                expand_row(codes + head * row.code_bytes, scales + head * row.scale_bytes, row, target + 2 * head * row.row_dim)


@compiled
def gather_packed(slab, slot_stride, slots, base, step, groups, row, out, start, stop):  # type: ignore[no-untyped-def]
    """Rows of positions [start, stop) as in the checkpoint, codes then scales: out uint8 [T, columns, row_bytes].

    Arguments as `gather_bf16`.
    """
    columns = out.shape[1]
    row_bytes = row.code_bytes + row.scale_bytes
    for position in range(start, stop):
        first = base + position * step
        if position + 1 < stop:
            _ask_for(slab, slot_stride, slots, first + step, groups, row)
        for order in range(len(groups)):
            heads = groups[order, 0]
            target = address_of(out, (position * columns + groups[order, 1]) * row_bytes)
            slot = np.int64(slots[first + order])
            if slot < 0:
                _zero_bytes(target, heads * row_bytes)
                continue
            codes = slab + slot * slot_stride
            scales = codes + heads * row.code_bytes
            for head in range(heads):
                copy_bytes(target + head * row_bytes, codes + head * row.code_bytes, row.code_bytes)
                if row.scale_bytes > 0:
                    copy_bytes(target + head * row_bytes + row.code_bytes, scales + head * row.scale_bytes, row.scale_bytes)
