"""Value tables: all 65536 (scale, code) pairs, the golden rows with their edge bytes, and the other encodings by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from vectors import arrays

from ssdgram.errors import ConfigError
from ssdgram.kernels.dequant import E2M1, E4M3, E8M0, NAN_BITS, bf16_bits, bf16_values, value_table

GOLDEN = arrays("dequant.npz")


def test_every_scale_and_code():
    assert np.array_equal(value_table("fp8_ue8m0").reshape(256, 256), GOLDEN["table_bf16_by_scale_then_code"])


@pytest.mark.parametrize("kind, expected", [("rand", "rand_bf16"), ("edge", "edge_bf16_reference")])
def test_golden_rows(kind, expected):
    scales = np.repeat(GOLDEN[f"{kind}_scale"], 32, axis=1)
    found = value_table("fp8_ue8m0").reshape(256, 256)[scales, GOLDEN[f"{kind}_weight"]]
    wanted = GOLDEN[expected]
    nan = np.isnan(bf16_values(wanted))
    assert np.array_equal(found[~nan], wanted[~nan]) and (found[nan] == NAN_BITS).all()


def test_code_values():
    assert E4M3[0] == 0 and E4M3[1] == 2**-9 and E4M3[7] == 7 * 2**-9 and E4M3[8] == 2**-6 and E4M3[0x7E] == 448
    assert np.signbit(E4M3[0x80]) and E4M3[0x80] == 0 and np.array_equal(E4M3[128:255], -E4M3[:127])
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all() and np.isnan(E4M3).sum() == 2
    assert E8M0[0] == 2**-127 and E8M0[127] == 1 and E8M0[254] == 2.0**127 and np.isnan(E8M0[255])
    assert E2M1[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6] and np.array_equal(E2M1[8:], -E2M1[:8])


def test_torch_agrees_on_codes_and_rounding():
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(codes.view(torch.float8_e4m3fn).float().numpy(), E4M3, equal_nan=True)
    assert np.array_equal(codes.view(torch.float8_e8m0fnu).float().numpy(), E8M0, equal_nan=True)
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[:4] = [0x7F7FFFFF, 0x7F7F8000, 0x00000001, 0x80008000]      # to infinity; ties; subnormals
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    assert np.array_equal(bf16_bits(values), torch.from_numpy(values).bfloat16().view(torch.uint16).numpy())


def test_bf16_round_trip():
    bits = np.arange(65536, dtype=np.uint16)
    values = bf16_values(bits)
    assert np.array_equal(bf16_bits(values)[~np.isnan(values)], bits[~np.isnan(values)])
    assert (bf16_bits(values[np.isnan(values)]) == NAN_BITS).all()


def rounded(value: float) -> int:
    """float -> bf16 bits by way of exact comparison with the two neighbours."""
    low = int(np.float32(abs(value)).view(np.uint32)) >> 16
    options = [(abs(float(bf16_values(np.array([bits], np.uint16))[0]) - abs(value)), bits & 1, bits) for bits in (low, low + 1)]
    return min(options)[2] | (0x8000 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("scale", [1.0, 0.0123, 3e-5])
def test_one_scale_for_the_whole_table(scale):
    table = value_table("fp8_global", scale)
    bf_scale = float(bf16_values(bf16_bits(np.array([scale], np.float32)))[0])
    for code in range(256):
        expected = NAN_BITS if code & 0x7F == 0x7F else rounded(float(np.float32(float(E4M3[code]) * bf_scale)))
        assert table[code] == expected, code


@pytest.mark.parametrize("scale", [1.0, 0.0123, 0.7])
def test_nvfp4(scale):
    table = value_table("nvfp4", scale).reshape(256, 256, 2)
    for block in range(256):
        for byte in (0x00, 0x21, 0x7F, 0x8A, 0xF5):
            for place, nibble in enumerate((byte & 15, byte >> 4)):       # the low nibble is the even element
                if block & 0x7F == 0x7F:
                    assert table[block, byte, place] == NAN_BITS
                else:
                    product = float(E2M1[nibble]) * float(E4M3[block]) * float(np.float32(scale))
                    assert table[block, byte, place] == rounded(float(np.float32(product))), (block, byte, place)


@pytest.mark.parametrize("encoding, scale, message", [
    ("fp8_global", None, "global_scale is None for fp8_global: expected a number"),
    ("nvfp4", None, "global_scale is None for nvfp4"),
    ("bf16", 1.0, "global_scale is 1.0 for bf16"),
    ("int4", None, "encoding is 'int4': expected fp8_ue8m0, bf16, fp8_global or nvfp4"),
])
def test_refused(encoding, scale, message):
    with pytest.raises(ConfigError, match=message):
        value_table(encoding, scale)
