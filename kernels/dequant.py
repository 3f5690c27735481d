"""Row values as tables (spec A7, B4): what every code stands for under every scale, as bf16 bits, by exact arithmetic in NumPy.

It knows value formats only, not where rows lie. Invariant: a table's entry is the value of the specification's first column:
one float32 product, one rounding to bfloat16 (nearest, ties to even), NaN as 0x7FC0.

    e4m3fn   s eeee mmm   bias 7, no infinity, 0x7F and 0xFF are NaN        e8m0   2^(b - 127), 255 is NaN
    e2m1     s ee m       0, 0.5, 1, 1.5, 2, 3, 4, 6                        bf16   the upper half of a float32
"""

from __future__ import annotations

import numpy as np

from ssdgram.errors import ConfigError

NAN_BITS = 0x7FC0


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits (uint16), nearest-even; every NaN becomes 0x7FC0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(NAN_BITS), rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def _e8m0_values() -> np.ndarray:
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)                         # 2^-127 is a float32 subnormal, and exact


E4M3 = _e4m3_values()                                        # float32 [256]
E8M0 = _e8m0_values()                                        # float32 [256]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scales_by(rule: str) -> np.ndarray:
    """float32 [256]: what scale bytes stand for under a rule (spec A7: "spec" is its first column)."""
    values = E8M0.copy()
    if rule == "vllm":
        values[0] = 0
    if rule in ("vllm", "sglang"):
        values[255] = np.inf
    elif rule != "spec":
        raise ConfigError(f"scale_rule is {rule!r}: expected spec, vllm or sglang")
    return values


def value_table(encoding: str, global_scale: float | None = None, scale_rule: str = "spec") -> np.ndarray:
    """bf16 bits (uint16) of every (scale, code) of an encoding; `global_scale`: of the whole table, where the encoding has one.

    fp8_ue8m0: [256 scales x 256 codes], index scale * 256 + code (A7). fp8_global: [256], bf(code) * bf(global) (B4).
    `scale_rule`: of fp8_ue8m0, what scale bytes 0 and 255 are: 2^-127 and NaN ("spec"), 0 and infinity ("vllm"), 2^-127 and infinity
    ("sglang"). nvfp4: [256 scales x 256 bytes x 2], the two values of a byte of codes (low nibble first), each
    fl32(fl32(e2m1 * e4m3) * global). bf16: [0], the codes are the bits. ConfigError for a scale that is missing or not wanted.
    """
    if (global_scale is None) != (encoding not in ("fp8_global", "nvfp4")):
        raise ConfigError(f"global_scale is {global_scale} for {encoding}: expected a number for fp8_global or nvfp4, else None")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if encoding == "fp8_ue8m0":
            return bf16_bits(_scales_by(scale_rule)[:, None] * E4M3).reshape(-1)
        if encoding == "bf16":
            return np.empty(0, np.uint16)
        if encoding == "fp8_global":
            scale = bf16_values(bf16_bits(np.array([global_scale], np.float32)))
            return bf16_bits(E4M3 * scale)
        if encoding == "nvfp4":
            values = bf16_bits(E4M3[:, None] * E2M1 * np.float32(global_scale))
            byte = np.arange(256)
            return np.stack([values[:, byte & 15], values[:, byte >> 4]], axis=-1).reshape(-1)
    raise ConfigError(f"encoding is {encoding!r}: expected fp8_ue8m0, bf16, fp8_global or nvfp4")
