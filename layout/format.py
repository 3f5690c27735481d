"""The numbers of format 1 (design section 4): page size, version, how many rows a page holds. The bytes are `page`'s business.

Plain Python without compiled code, so that reading a manifest or refusing a conversion costs milliseconds.
"""

from __future__ import annotations

FORMAT = 1
PAGE_BYTES = 4096
VERSION = 1                                                  # of the page, in its trailer
MAGIC = 0x00504753                                           # "SGP", and the version in the fourth byte
TRAILER = 4064                                               # byte at which the checksums end and the trailer starts
MAX_ROW_BYTES = TRAILER - 4                                  # one row and its CRC


def rows_per_page(row_bytes: int) -> int:
    """Rows in a page: (4096 - 32) // (row_bytes + 4). ValueError if a row does not fit into a page."""
    if not 1 <= row_bytes <= MAX_ROW_BYTES:
        raise ValueError(f"a row of {row_bytes} bytes: a page holds rows of 1 to {MAX_ROW_BYTES} bytes")
    return TRAILER // (row_bytes + 4)


def pages_of(rows: int, row_bytes: int) -> int:
    """Pages of a column of `rows` rows."""
    return -(-rows // rows_per_page(row_bytes))
