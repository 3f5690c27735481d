"""Made-up rows: every 8 bytes of a row follow from (seed, layer, row number, place in the row), so any wrong row is recognisable.

    word k of row r in layer l = shape(splitmix64 finaliser of (key(seed, l) + (1024 r + k) * golden ratio))
    codes are words 0, 1, ..; scales are words 512, 513, ..; a row's last word is cut where the row ends

`shape` keeps values ordinary: no NaN codes (0x7F, 0xFF), scales within a few powers of two of 1. `r` is the row's number in the
layer's whole table, as `Geometry.row_ids` gives it. This module knows nothing of files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ssdgram._compiled import compiled
from ssdgram.geometry import Geometry

E4M3, E8M0, BF16, NIBBLES, E4M3_SCALE = range(5)             # shapes of a word
CODE_SHAPES = {"fp8_ue8m0": E4M3, "fp8_global": E4M3, "bf16": BF16, "nvfp4": NIBBLES}
SCALE_SHAPES = {"fp8_ue8m0": E8M0, "nvfp4": E4M3_SCALE, "fp8_global": E8M0, "bf16": E8M0}
SCALE_WORD = 512                                             # first word of a row's scales; a row has at most 4060 bytes
_MASK = (1 << 64) - 1


def row_key(seed: int, layer: int) -> int:
    """The u64 that a layer's words start from."""
    value = (seed * 0xD1342543DE82EF95 + layer * 0x2545F4914F6CDD1D + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ value >> 32


@compiled
def word(key, counter, shape):  # type: ignore[no-untyped-def]
    """One word, uint64: key and counter uint64."""
    value = key + counter * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    if shape == E4M3:                                        # a code of 0x7F or 0xFF loses its lowest bit
        low = value & np.uint64(0x7F7F7F7F7F7F7F7F)
        return value ^ (((low + np.uint64(0x0101010101010101)) & np.uint64(0x8080808080808080)) >> np.uint64(7))
    if shape == E8M0:                                        # 2^-15 .. 2^-8: values below 2, blocks above 1e-4
        return (value & np.uint64(0x0707070707070707)) | np.uint64(0x7070707070707070)
    if shape == BF16:                                        # either sign, exponents 2^-7 .. 2^0
        return (value & np.uint64(0x83FF83FF83FF83FF)) | np.uint64(0x3C003C003C003C00)
    if shape == E4M3_SCALE:                                  # 2^-5 .. 2^-2
        return (value & np.uint64(0x1F1F1F1F1F1F1F1F)) + np.uint64(0x1010101010101010)
    return value


@compiled
def fill_rows(out, row_bytes, first_row, rows, key, first_word, shape):  # type: ignore[no-untyped-def]
    """Fill `out` (uint8 [rows * row_bytes], 8-aligned) with the codes or scales of consecutive rows."""
    if row_bytes & 7 == 0:
        words = out[: rows * row_bytes].view(np.uint64)
        count = row_bytes >> 3
        for row in range(rows):
            counter = np.uint64((first_row + row) * 1024 + first_word)
            for k in range(count):
                words[row * count + k] = word(key, counter + np.uint64(k), shape)
    else:
        for row in range(rows):
            put_row(out, row * row_bytes, row_bytes, first_row + row, key, first_word, shape)


@compiled
def put_row(out, start, length, row, key, first_word, shape):  # type: ignore[no-untyped-def]
    """Put `length` bytes of one row's codes or scales at out[start]."""
    value = np.uint64(0)
    for k in range(length):
        if k & 7 == 0:
            value = word(key, np.uint64(row * 1024 + first_word + (k >> 3)), shape)
        out[start + k] = np.uint8((value >> np.uint64(8 * (k & 7))) & np.uint64(255))


@compiled
def gather_rows(out, rows, code_bytes, scale_bytes, key, code_shape, scale_shape):  # type: ignore[no-untyped-def]
    """Fill `out` (uint8 [N * row_bytes]) with the whole rows numbered `rows` (int64 [N])."""
    row_bytes = code_bytes + scale_bytes
    for n in range(rows.size):
        put_row(out, n * row_bytes, code_bytes, rows[n], key, 0, code_shape)
        put_row(out, n * row_bytes + code_bytes, scale_bytes, rows[n], key, SCALE_WORD, scale_shape)


def expected_rows(seed: int, layer: int, rows: Any, geometry: Geometry) -> np.ndarray:
    """The bytes of made-up rows as a checkpoint of `synthesize(seed=seed)` holds them: uint8 [..., row_bytes].

    `layer`: decoder layer. `rows`: integers [...], row numbers in that layer's table (`Geometry.row_ids`).
    """
    numbers = np.ascontiguousarray(rows, np.int64)
    out = np.empty(numbers.size * geometry.row_bytes, np.uint8)
    gather_rows(out, numbers.reshape(-1), geometry.code_bytes, geometry.scale_bytes, np.uint64(row_key(seed, layer)),
                CODE_SHAPES[geometry.encoding], SCALE_SHAPES[geometry.encoding])
    return out.reshape(*numbers.shape, geometry.row_bytes)
