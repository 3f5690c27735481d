"""check: CRC-32C of rows in bundles against a bytewise CRC; every kind of wrong row is found, and named by its bit."""

import struct

import numpy as np
import pytest
import torch
from where import DEVICE, pinned, put, slab, synchronize

from ssdgram.kernels.check import Check, bit_constants, signed

GENERATION = 0xFEDCBA9876543210


def crc32c(data):
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_constants_give_the_check_value():
    constants, zeros = bit_constants(9)
    data = np.frombuffer(b"123456789", np.uint8)
    bits = (data[None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    found = np.bitwise_xor.reduce(np.where(bits, constants, 0), axis=(0, 1)) ^ np.uint32(zeros)
    assert found == 0xE3069283 == crc32c(b"123456789")


def case(heads, code_bytes, scale_bytes, count=3, layer=14, seed=0):
    generator = np.random.default_rng(seed)
    stride = -(-heads * (code_bytes + scale_bytes) // 64) * 64
    bundles = slab(count, stride)
    columns = generator.integers(0, 24, (count, heads)).astype(np.int32)
    rows = generator.integers(0, 1 << 40, (count, heads))
    checks = np.empty((count, heads), np.uint32)
    for b in range(count):
        raw = bundles[b].numpy().tobytes()
        for h in range(heads):
            scales = heads * code_bytes + h * scale_bytes
            checks[b, h] = crc32c(struct.pack("<QIIQ", GENERATION, layer, columns[b, h], rows[b, h])
                                  + raw[h * code_bytes:(h + 1) * code_bytes] + raw[scales:scales + scale_bytes])
    return bundles, bundles.data_ptr() + stride * torch.arange(count), columns, rows, checks


def results(check, addresses, columns, rows, checks, found=False):
    words = pinned(torch.full((len(addresses),), -1, dtype=torch.int32))
    crcs = torch.zeros(len(addresses), check.heads, dtype=torch.int32, device=DEVICE) if found else None
    check(put(addresses), put(columns), put(rows), put(checks.view(np.int32)), words, crcs)
    synchronize()
    return (words.tolist(), crcs.cpu().numpy().view(np.uint32)) if found else words.tolist()


@pytest.mark.parametrize("heads,code_bytes,scale_bytes", (
    (8, 256, 8), (3, 256, 8), (1, 256, 8), (8, 64, 2), (4, 80, 10), (8, 320, 0)))
def test_right_rows_pass_and_the_crcs_are_those_of_the_format(heads, code_bytes, scale_bytes):
    _, addresses, columns, rows, checks = case(heads, code_bytes, scale_bytes)
    check = Check(heads, code_bytes, scale_bytes, generation=GENERATION, layer=14, device=DEVICE)
    words, crcs = results(check, addresses, columns, rows, checks, found=True)
    assert words == [0, 0, 0]
    assert (crcs == checks).all()


def test_a_wrong_byte_row_column_or_store_is_found():
    bundles, addresses, columns, rows, checks = case(8, 256, 8)
    check = Check(8, 256, 8, generation=GENERATION, layer=14, device=DEVICE)
    bundles[1, 3 * 256 + 255] ^= 1                           # last code of head 3
    bundles[2, 2048 + 7 * 8] ^= 0x80                         # first scale of head 7
    assert results(check, addresses, columns, rows, checks) == [0, 1 << 3, 1 << 7]
    bundles[1, 3 * 256 + 255] ^= 1
    bundles[2, 2048 + 7 * 8] ^= 0x80
    columns[0, 0] ^= 1
    rows[1, 1] ^= 1 << 39
    checks[2, 2] ^= 1 << 31
    assert results(check, addresses, columns, rows, checks) == [1, 2, 4]
    columns[0, 0] ^= 1
    rows[1, 1] ^= 1 << 39
    checks[2, 2] ^= 1 << 31
    addresses[1] = 0
    words, crcs = results(check, addresses, columns, rows, checks, found=True)
    assert words == [0, 255, 0]
    assert results(check, addresses, columns, rows, crcs) == [0, 255, 0]    # not even if zeros were the right bytes
    for other in ({"generation": GENERATION ^ 1, "layer": 14}, {"generation": GENERATION, "layer": 13}):
        assert results(Check(8, 256, 8, device=DEVICE, **other), addresses, columns, rows, checks) == [255] * 3


def test_no_bundles_and_what_does_not_fit():
    check = Check(8, 256, 8, generation=1, layer=1, device=DEVICE)
    empty = torch.zeros(0, 8, dtype=torch.int32)
    check(torch.zeros(0, dtype=torch.int64), empty, empty.long(), empty, torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="rows"):
        Check(32, 256, 8, generation=1, layer=1, device=DEVICE)
    with pytest.raises(ValueError, match="must be contiguous"):
        check(torch.zeros(1, dtype=torch.int64), empty, empty.long(), empty, torch.zeros(1, dtype=torch.int32))


def test_signed():
    assert [signed(0xFFFFFFFF, 32), signed(5, 32), signed(1 << 63, 64)] == [-1, 5, -(1 << 63)]
