"""The CPU gather against NumPy twins: every encoding, column subsets, other ranks' positions, any split of the positions."""

from __future__ import annotations

import numpy as np
import pytest
from vectors import arrays

from ssdgram.kernels.dequant import value_table
from ssdgram.kernels.gather_cpu import expand_rows, gather_bf16, gather_packed, row_format

ENCODINGS = [("fp8_ue8m0", 64, None), ("fp8_ue8m0", 256, None), ("bf16", 160, None), ("bf16", 5, None),
             ("fp8_global", 160, 0.0123), ("fp8_global", 7, 2.5), ("nvfp4", 160, 0.0123), ("nvfp4", 16, 1.0)]


def values_twin(encoding, codes, scales, global_scale):
    """One row's bf16 bits, one value at a time."""
    table = value_table(encoding, global_scale)
    if encoding == "bf16":
        return codes.view(np.uint16)
    if encoding == "fp8_global":
        return np.array([table[code] for code in codes])
    if encoding == "fp8_ue8m0":
        return np.array([table[256 * int(scales[j // 32]) + int(code)] for j, code in enumerate(codes)])
    return np.array([table[512 * int(scales[k // 8]) + 2 * int(byte) + half] for k, byte in enumerate(codes) for half in (0, 1)])


def gather_twin(slab, stride, slots, groups, row, encoding, global_scale, columns):
    """(bf16 bits, packed rows) of every position, a byte at a time."""
    values = np.full((len(slots), columns, row.row_dim), 7, np.uint16)
    packed = np.full((len(slots), columns, row.code_bytes + row.scale_bytes), 7, np.uint8)
    for t, order in np.ndindex(slots.shape):
        heads, first = groups[order]
        for head in range(heads):
            bundle = slab[slots[t, order] * stride:]
            codes = bundle[head * row.code_bytes:][:row.code_bytes]
            scales = bundle[heads * row.code_bytes + head * row.scale_bytes:][:row.scale_bytes]
            if slots[t, order] < 0:
                values[t, first + head], packed[t, first + head] = 0, 0
            else:
                values[t, first + head] = values_twin(encoding, codes, scales, global_scale)
                packed[t, first + head] = np.concatenate([codes, scales])
    return values, packed


@pytest.mark.parametrize("encoding, row_dim, global_scale", ENCODINGS)
@pytest.mark.parametrize("groups", [[(3, 0), (3, 3)], [(2, 0), (0, 0), (1, 2)], [(1, 0)]], ids=["whole", "subset", "one"])
def test_rows_are_the_twins(encoding, row_dim, global_scale, groups):
    random = np.random.default_rng(row_dim)
    row = row_format(encoding, row_dim, global_scale)
    most = max(heads for heads, _ in groups)
    stride = -(-(row.code_bytes + row.scale_bytes) * most // 64) * 64
    slab = random.integers(0, 256, 40 * stride, dtype=np.uint8)
    count, layers, columns = 9, 2, sum(heads for heads, _ in groups)
    slots = random.integers(-1, 40, (count, layers, len(groups))).astype(np.int32)
    expected = gather_twin(slab, stride, slots[:, 1], groups, row, encoding, global_scale, columns)
    found = np.full_like(expected[0], 9), np.full_like(expected[1], 9)
    group_array = np.array(groups)
    for start, stop in ((0, 4), (4, 5), (5, 5), (5, count)):
        for gather, out in zip((gather_bf16, gather_packed), found):
            gather(slab.ctypes.data, stride, slots.ravel(), len(groups), layers * len(groups), group_array, row, out, start, stop)
    assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])


def test_only_the_positions_asked_for_are_written():
    row = row_format("bf16", 4)
    slab = np.arange(640, dtype=np.uint8)
    slots, groups = np.zeros(5, np.int32), np.array([[1, 0]])
    out = np.full((5, 1, 4), 9, np.uint16)
    gather_bf16(slab.ctypes.data, 64, slots, 0, 1, groups, row, out, 1, 3)
    assert (out[[0, 3, 4]] == 9).all() and (out[1:3] == slab[:8].view(np.uint16)).all()


def test_every_scale_and_code_by_the_vector_path():
    codes = np.arange(256, dtype=np.uint8)
    packed = np.concatenate([np.broadcast_to(codes, (256, 256)), np.repeat(codes[:, None], 8, 1)], axis=1)
    out = np.empty((256, 256), np.uint16)
    expand_rows(np.ascontiguousarray(packed), row_format("fp8_ue8m0", 256), out)
    assert np.array_equal(out, arrays("dequant.npz")["table_bf16_by_scale_then_code"])


def test_row_formats():
    assert row_format("fp8_ue8m0", 256)[:4] == (0, 256, 256, 8)
    assert row_format("bf16", 160)[:4] == (1, 160, 320, 0)
    assert row_format("fp8_global", 160, 1.0)[:4] == (2, 160, 160, 0)
    assert row_format("nvfp4", 160, 1.0)[:4] == (3, 160, 80, 10)
