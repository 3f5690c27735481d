"""The page format against a plain-Python twin, byte by byte, and every way in which a page can be wrong."""

import struct

import numpy as np
import pytest

from ssdgram.layout import page as p

GENERATION = 0xFEDCBA9876543210


def crc32c(data):
    """CRC-32C bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def twin_check(row, generation, layer, column, number):
    return crc32c(struct.pack("<QIIQ", generation, layer, column, number) + row)


def twin_page(rows, generation, layer, column, number):
    """A page holding `rows` (equal-length bytes), as design section 4 spells it."""
    size = len(rows[0])
    n = (4096 - 32) // (size + 4)
    page = bytearray(4096)
    for slot, row in enumerate(rows):
        page[slot * size : (slot + 1) * size] = row
        check = twin_check(row, generation, layer, column, number * n + slot)
        page[4064 - 4 * n + 4 * slot : 4064 - 4 * n + 4 * slot + 4] = check.to_bytes(4, "little")
    page[4064:4068] = b"SGP\x01"
    page[4068:4072] = layer.to_bytes(4, "little")
    page[4072:4080] = number.to_bytes(8, "little")
    page[4080:4088] = generation.to_bytes(8, "little")
    page[4088:4092] = column.to_bytes(4, "little")
    page[4092:4096] = crc32c(page[4064:4092]).to_bytes(4, "little")
    return bytes(page)


def pack(codes, scales, first_page, pages, rows, layer=14, column=23, generation=GENERATION):
    """Pack with the compiled function; the buffer was dirty before."""
    out = np.full(pages * 4096, 0xA5, np.uint8)
    p.pack_pages(codes.ctypes.data, scales.ctypes.data, codes.shape[1], scales.shape[1], out, first_page, pages, rows,
                 p.signed(generation), layer, column)
    return out


def made(rows, code_bytes, scale_bytes, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, code_bytes), np.uint8), rng.integers(0, 256, (rows, scale_bytes), np.uint8)


def fault(page, row_bytes, rows, number=0, generation=GENERATION, layer=14, column=23):
    data = np.frombuffer(bytes(page), np.uint8)
    return p.page_fault(data.ctypes.data, row_bytes, rows, p.signed(generation), layer, column, number)


def test_rows_per_page():
    assert [p.rows_per_page(size) for size in (264, 66, 160, 90, 320)] == [15, 58, 24, 43, 12]
    assert p.rows_per_page(1) == 812 and p.rows_per_page(4060) == 1
    assert [p.pages_of(rows, 264) for rows in (0, 1, 15, 16)] == [0, 1, 1, 2]
    for size in (0, -1, 4061):
        with pytest.raises(ValueError, match="1 to 4060"):
            p.rows_per_page(size)


def test_row_check_of_known_bytes():
    row = np.frombuffer(b"123456789", np.uint8)
    head = bytes.fromhex("0500000000000000 01000000 02000000 0300000000000000")
    assert crc32c(b"123456789") == 0xE3069283                # the polynomial's published check value
    assert p.row_crc(row.ctypes.data, 9, 5, 1, 2, 3) == crc32c(head + b"123456789")


@pytest.mark.parametrize("code_bytes, scale_bytes", [(256, 8), (64, 2), (160, 0), (80, 10), (320, 0), (1, 0), (4052, 8)])
def test_pages_equal_the_twin(code_bytes, scale_bytes):
    size = code_bytes + scale_bytes
    n = p.rows_per_page(size)
    first_page, pages = 3, 3
    rows = (first_page + 2) * n + max(1, n // 2)             # the last page is half full
    held = rows - first_page * n
    codes, scales = made(held, code_bytes, scale_bytes)
    out = pack(codes, scales, first_page, pages, rows)
    packed = [bytes(codes[k]) + bytes(scales[k]) for k in range(held)]
    for k in range(pages):
        expected = twin_page(packed[k * n : (k + 1) * n], GENERATION, 14, 23, first_page + k)
        assert out[k * 4096 : (k + 1) * 4096].tobytes() == expected, k
    assert p.check_pages(out, pages, size, rows, p.signed(GENERATION), 14, 23, first_page, np.zeros(1, np.int64)) == 0


def test_any_changed_byte_is_a_fault():
    codes, scales = made(40, 256, 8)
    page = bytearray(pack(codes, scales, 2, 1, 40)[:4096])
    assert fault(page, 264, 40, 2) == p.PAGE_OK
    for place in range(4096):
        page[place] ^= 0x10
        assert fault(page, 264, 40, 2) != p.PAGE_OK, place
        page[place] ^= 0x10


def test_faults_say_what_is_wrong():
    codes, scales = made(17, 256, 8)
    out = pack(codes, scales, 0, 2, 17)
    first, second = out[:4096].tobytes(), out[4096:].tobytes()

    def changed(page, at, value):
        return page[:at] + value + page[at + len(value) :]

    def name(code):
        return p.describe(code, 264, 1)

    assert name(fault(bytes(4096), 264, 17)) == "no page of a store (magic)"
    assert name(fault(changed(first, 4067, b"\x02"), 264, 17)) == "a page of another format version"
    assert name(fault(changed(first, 4092, b"\0\0\0\0"), 264, 17)) == "a trailer whose checksum is wrong"
    assert name(fault(first, 264, 17, generation=1)) == "a page of another conversion (generation)"
    assert name(fault(first, 264, 17, layer=13)) == "a page of another layer"
    assert name(fault(first, 264, 17, column=22)) == "a page of another column"
    assert name(fault(second, 264, 17, number=0)) == "a page of another place (page number)"
    other = changed(second, 264, bytes([second[264] ^ 1]))
    assert name(fault(other, 264, 17, number=1)) == "a row whose checksum is wrong: row 16"
    for gap in (2 * 264, 4003, 4012, 4063):                  # rows that are not there, the gap, checksums that are not there
        assert name(fault(changed(second, gap, b"\1"), 264, 17, number=1)) == "bytes beyond the rows that are not zero"


def test_right_rows_under_another_identity_fail_by_their_own_check():
    """A trailer made right for the wrong place does not help: every row's checksum holds the place too."""
    codes, scales = made(15, 256, 8)
    page = bytearray(pack(codes, scales, 0, 1, 15, column=3))
    page[4064:] = pack(codes, scales, 0, 1, 15, column=4)[4064:].tobytes()
    assert p.describe(fault(page, 264, 15, column=4), 264, 0) == "a row whose checksum is wrong: row 0"


def test_bad_pages_are_counted_and_numbered():
    codes, scales = made(150, 256, 8)
    out = pack(codes, scales, 0, 10, 150)
    for number in (1, 4, 9):
        out[number * 4096 + 7] ^= 1
    bad = np.zeros(2, np.int64)
    assert p.check_pages(out, 10, 264, 150, p.signed(GENERATION), 14, 23, 0, bad) == 3
    assert bad.tolist() == [1, 4]


@pytest.mark.parametrize("code_bytes, scale_bytes", [(256, 8), (61, 3), (160, 0)])
def test_rows_that_differ_from_the_source_are_counted_and_numbered(code_bytes, scale_bytes):
    n = p.rows_per_page(code_bytes + scale_bytes)
    rows = 3 * n - 2
    codes, scales = made(rows, code_bytes, scale_bytes)
    out = pack(codes, scales, 0, 3, rows)

    def differing():
        bad = np.zeros(3, np.int64)
        count = p.compare_pages(out, 3, codes.ctypes.data, scales.ctypes.data, code_bytes, scale_bytes, rows, 0, bad)
        return count, bad.tolist()

    assert differing() == (0, [0, 0, 0])
    codes[n + 1, code_bytes - 1] ^= 1
    codes[rows - 1, 0] ^= 1
    if scale_bytes:
        scales[2, scale_bytes - 1] ^= 1
    expected = [2, n + 1, rows - 1] if scale_bytes else [n + 1, rows - 1, 0]
    assert differing() == (3 if scale_bytes else 2, expected)


def test_generation_bits():
    assert p.signed(0) == 0 and p.signed((1 << 63) - 1) == (1 << 63) - 1
    assert p.signed(1 << 63) == -(1 << 63) and p.signed((1 << 64) - 1) == -1
