"""The page: 4096 bytes that say by themselves whose rows they hold (design section 4, format 1, little-endian).

    0                                        4064-4n        4064                                        4096
    | row 0 | row 1 | ... | row n-1 | zeros  | n CRC-32C    | magic+version u32, layer u32, page u64,    |
    |  row = codes, then its scales          | one per row  | generation u64, column u32, trailer CRC u32 |

Row r of a column is row r % n of page r // n; no row crosses a page. Rows that the column does not have, and the gap, are
zero, and so are the CRCs of those rows. A row's CRC also covers (generation, layer, column, row number), so the right bytes
in the wrong place fail; the trailer binds the page to the same. The compiled half of the format (`format` has the numbers).

Invariant: the bytes of a page depend only on its identity and its rows, so the same source gives the same files.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, compiled, copy_bytes, crc32c, crc32c_update, crc32c_word, load_u8, load_u32, load_u64
from ssdgram.layout.format import MAGIC, MAX_ROW_BYTES, PAGE_BYTES, TRAILER, VERSION, pages_of, rows_per_page

__all__ = ["MAX_ROW_BYTES", "PAGE_BYTES", "TRAILER", "check_pages", "compare_pages", "describe", "pack_pages", "page_fault",
           "pages_of", "row_crc", "rows_per_page", "signed"]

PAGE_OK = 0
FAULT_MAGIC, FAULT_VERSION, FAULT_TRAILER, FAULT_GENERATION, FAULT_LAYER, FAULT_COLUMN, FAULT_NUMBER = range(1, 8)
FAULT_ROW, FAULT_PADDING = 8, 9
FAULTS = (
    "right", "no page of a store (magic)", "a page of another format version", "a trailer whose checksum is wrong",
    "a page of another conversion (generation)", "a page of another layer", "a page of another column",
    "a page of another place (page number)", "a row whose checksum is wrong", "bytes beyond the rows that are not zero",
)


def signed(generation: int) -> int:
    """The u64 `generation` as the int64 of the same bits: what the compiled functions take."""
    return generation - (1 << 64) if generation >> 63 else generation


@compiled
def row_crc(address, row_bytes, generation, layer, column, row):  # type: ignore[no-untyped-def]
    """CRC-32C over (generation u64, layer u32, column u32, row u64) and the row's bytes, uint32 (design section 4)."""
    state = crc32c_word(np.uint32(0xFFFFFFFF), generation)
    state = crc32c_word(state, np.int64(layer) | (np.int64(column) << 32))
    state = crc32c_word(state, row)
    return crc32c_update(state, address, row_bytes) ^ np.uint32(0xFFFFFFFF)


@compiled
def pack_pages(codes, scales, code_bytes, scale_bytes, out, first_page, pages, column_rows, generation, layer,  # type: ignore[no-untyped-def]
               column):
    """Fill `pages` pages from `first_page` on in `out` (uint8 [>= pages * 4096], 4-aligned), all bytes written.

    `codes`, `scales`: addresses of the first page's first row; the rows lie one after the other, `code_bytes` and
    `scale_bytes` (may be 0) each. `column_rows`: rows of the whole column, where the last page ends.
    """
    row_bytes = code_bytes + scale_bytes
    n = TRAILER // (row_bytes + 4)
    start = address_of(out, 0)
    words = out[: pages * PAGE_BYTES].view(np.uint32)
    for k in range(pages):
        number = first_page + k
        page = start + k * PAGE_BYTES
        held = min(n, column_rows - number * n)
        out[k * PAGE_BYTES + held * row_bytes : k * PAGE_BYTES + TRAILER] = 0
        checks = (k * PAGE_BYTES + TRAILER) // 4 - n
        for slot in range(held):
            row = page + slot * row_bytes
            copy_bytes(row, codes, code_bytes)
            codes += code_bytes
            if scale_bytes > 0:
                copy_bytes(row + code_bytes, scales, scale_bytes)
                scales += scale_bytes
            words[checks + slot] = row_crc(row, row_bytes, generation, layer, column, number * n + slot)
        trailer = (k * PAGE_BYTES + TRAILER) // 4
        words[trailer] = MAGIC | (VERSION << 24)
        words[trailer + 1] = layer
        words[trailer + 2] = number & 0xFFFFFFFF
        words[trailer + 3] = number >> 32
        words[trailer + 4] = generation & 0xFFFFFFFF
        words[trailer + 5] = (generation >> 32) & 0xFFFFFFFF
        words[trailer + 6] = column
        words[trailer + 7] = crc32c(page + TRAILER, 28)


@compiled
def page_fault(page, row_bytes, column_rows, generation, layer, column, number):  # type: ignore[no-untyped-def]
    """What is wrong with the 4096 bytes at address `page`: PAGE_OK or a FAULT_ code; a FAULT_ROW has its slot << 8 added.

    `column_rows`: rows of the whole column; `number`: the page that should be there. Trailer first: it says who lies here.
    """
    trailer = page + TRAILER
    tag = np.int64(load_u32(trailer))
    if tag & 0xFFFFFF != MAGIC:
        return FAULT_MAGIC
    if tag >> 24 != VERSION:
        return FAULT_VERSION
    if crc32c(trailer, 28) != load_u32(trailer + 28):
        return FAULT_TRAILER
    if load_u64(trailer + 16) != np.uint64(generation):
        return FAULT_GENERATION
    if np.int64(load_u32(trailer + 4)) != layer:
        return FAULT_LAYER
    if np.int64(load_u32(trailer + 24)) != column:
        return FAULT_COLUMN
    if load_u64(trailer + 8) != np.uint64(number):
        return FAULT_NUMBER
    n = TRAILER // (row_bytes + 4)
    held = max(0, min(n, column_rows - number * n))
    checks = trailer - 4 * n
    for slot in range(held):
        found = row_crc(page + slot * row_bytes, row_bytes, generation, layer, column, number * n + slot)
        if found != load_u32(checks + 4 * slot):
            return FAULT_ROW + (slot << 8)
    for address in range(page + held * row_bytes, checks):
        if load_u8(address) != 0:
            return FAULT_PADDING
    for address in range(checks + 4 * held, trailer):
        if load_u8(address) != 0:
            return FAULT_PADDING
    return PAGE_OK


@compiled
def check_pages(pages, count, row_bytes, column_rows, generation, layer, column, first_page,  # type: ignore[no-untyped-def]
                bad):
    """Check `count` pages in `pages` (uint8, one after the other); `bad` (int64) gets the numbers of those that fail.

    The number of failing pages, which may exceed the length of `bad`.
    """
    found = 0
    for k in range(count):
        fault = page_fault(address_of(pages, k * PAGE_BYTES), row_bytes, column_rows, generation, layer, column,
                           first_page + k)
        if fault != PAGE_OK:
            if found < bad.size:
                bad[found] = first_page + k
            found += 1
    return found


@compiled
def compare_pages(pages, count, codes, scales, code_bytes, scale_bytes, column_rows, first_page,  # type: ignore[no-untyped-def]
                  bad):
    """Compare the rows in `count` pages with the source rows at addresses `codes` and `scales`; `bad` gets row numbers.

    The number of rows that differ, which may exceed the length of `bad` (int64).
    """
    row_bytes = code_bytes + scale_bytes
    n = TRAILER // (row_bytes + 4)
    found = 0
    for k in range(count):
        for slot in range(min(n, column_rows - (first_page + k) * n)):
            row = address_of(pages, k * PAGE_BYTES + slot * row_bytes)
            if not (_same_bytes(row, codes, code_bytes) and _same_bytes(row + code_bytes, scales, scale_bytes)):
                if found < bad.size:
                    bad[found] = (first_page + k) * n + slot
                found += 1
            codes += code_bytes
            scales += scale_bytes
    return found


@compiled
def _same_bytes(a, b, length):  # type: ignore[no-untyped-def]
    """Whether the `length` bytes at two addresses are equal."""
    words = length >> 3
    for k in range(words):
        if load_u64(a + 8 * k) != load_u64(b + 8 * k):
            return False
    same = True
    for k in range(words * 8, length):
        same &= load_u8(a + k) == load_u8(b + k)
    return same


def describe(fault: int, row_bytes: int, number: int) -> str:
    """A `page_fault` code in words, with the row's number in the column where one row is meant."""
    code, slot = fault & 0xFF, fault >> 8
    row = f": row {number * rows_per_page(row_bytes) + slot}" if code == FAULT_ROW else ""
    return FAULTS[code] + row
