"""project: golden vectors, random operands against float64, edges (short blocks, split k, absent bundles), fused gather."""

import functools

import numpy as np
import pytest
import torch
from where import BF16, DEVICE, INTERPRETED, from_bits, golden, put, slab

from ssdgram.kernels.gather import Bundles, Gather
from ssdgram.kernels.project import CUT_CHOICES, CUTS, Cut, Projection

GOLDEN = golden("wkv_mxfp8_small.npz")
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(nan=0.0).numpy()
CODES = (Cut("codes", 64, 4, 16, 4, 3), Cut("codes", 32, 2, 16, 4, 3), Cut("codes", 64, 2, 32, 4, 3, 3),
         Cut("codes", 64, 2, 16, 4, 3, 1, 7), Cut("codes", 128, 4, 16, 4, 2, 2), Cut("codes", 64, 4, 4, 4, 3, 1, 5),
         Cut("codes", 64, 4, 8, 4, 3), *(cut for _, cut in CUTS if cut.kind == "codes"))
ROWS = (Cut("rows", 64, 2, 16, 4, 3), Cut("rows", 128, 4, 16, 8, 3), Cut("rows", 64, 2, 64, 4, 3, 2),
        Cut("rows", 64, 2, 64, 4, 3, 1, 7), Cut("rows", 64, 4, 16, 4, 3, 1, 3))


def values(codes, scales, rows_too=False):
    """float64 of codes and scales; rows_too: a scale per 32 rows as well."""
    scales = np.repeat(np.repeat(scales, 32, 0)[:len(codes)] if rows_too else scales, 32, -1)
    return E4M3[codes] * np.exp2(scales.astype(float) - 127)


def summed(kind):
    """How far the sums may be off, of the terms' size: Hopper's FP8 units add the 32 products of a block with some 14 bits."""
    return 2.0**-12 if kind == "codes" and not INTERPRETED else 1e-5


def close(found, exact, terms, kind, subnormal=0.0):
    """Within the summation's error, and (a rounded result) one bf16 ulp. `subnormal`: what bf16's smallest step in each weight comes to."""
    found = found.double().cpu().numpy()
    bound = summed(kind) * terms + subnormal
    if not INTERPRETED:
        bound = bound + np.abs(exact) * 2.0**-8
    assert (np.abs(found - exact) <= bound).all()


@pytest.mark.parametrize("cut", CODES)
@pytest.mark.parametrize("kind", ("table", "general"))
def test_golden_codes(cut, kind):
    projection = Projection(put(GOLDEN["wkv_weight_e4m3"]), put(GOLDEN["wkv_scale_e8m0"]))
    codes, scales = GOLDEN[f"{kind}/act_codes_reference"], GOLDEN[f"{kind}/act_scales_reference"]
    out = torch.full((len(codes), 320), 7.0, dtype=BF16, device=DEVICE)
    projection.codes(put(codes), put(scales), out, cut=cut)
    terms = np.abs(values(codes, scales)) @ np.abs(values(GOLDEN["wkv_weight_e4m3"], GOLDEN["wkv_scale_e8m0"], True)).T
    close(out, GOLDEN[f"{kind}/kv_f64"], terms, "codes")


@pytest.mark.parametrize("cut", ROWS)
def test_golden_rows(cut):
    projection = Projection(put(GOLDEN["wkv_weight_e4m3"]), put(GOLDEN["wkv_scale_e8m0"]))
    rows = from_bits(GOLDEN["table/act_bf16"]).to(BF16)      # the interpreter multiplies bf16 by its bits
    out = torch.full((len(rows), 320), 7.0, dtype=BF16, device=DEVICE)
    projection.rows(rows, out, cut=cut)
    weight = np.abs(values(GOLDEN["wkv_weight_e4m3"], GOLDEN["wkv_scale_e8m0"], True))
    close(out, GOLDEN["table/kv_f64"], np.abs(rows.double().cpu().numpy()) @ weight.T, "rows")


def operands(tokens, n, k, seed=0):
    """Random weight and activations; scales of both spread over 2^-12 .. 2^3."""
    generator = np.random.default_rng(seed)
    weight = generator.integers(0, 256, (n, k)).astype(np.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0
    codes = generator.integers(0, 256, (tokens, k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return (weight, generator.integers(115, 131, (-(-n // 32), k // 32)).astype(np.uint8),
            codes, generator.integers(115, 131, (tokens, k // 32)).astype(np.uint8))


@pytest.mark.parametrize("cut", CODES + ROWS)
@pytest.mark.parametrize("tokens,n,k", ((1, 64, 128), (19, 200, 288), (3, 40, 32)))
def test_any_size_against_float64(cut, tokens, n, k):
    weight, weight_scales, codes, scales = operands(tokens, n, k)
    projection = Projection(put(weight), put(weight_scales))
    out = torch.full((tokens, n), 7.0, dtype=BF16, device=DEVICE)
    if cut.kind == "codes":
        projection.codes(put(codes[:, ::-1].copy()), put(scales), out, cut=cut)        # leaves other parts in the scratch
        projection.codes(put(codes), put(scales), out, cut=cut)
        x = values(codes, scales)
    else:
        rows = torch.from_numpy(values(codes, scales)).to(BF16).to(DEVICE)
        projection.rows(rows.flip(1), out, cut=cut)
        projection.rows(rows, out, cut=cut)
        x = rows.double().cpu().numpy()
    w = values(weight, weight_scales, True)
    close(out, x @ w.T, np.abs(x) @ np.abs(w).T, cut.kind)


@pytest.mark.parametrize("heads,cut", (((2, 2), CODES[0]), ((1, 1, 2), CODES[1]), ((4,), CODES[2])))
def test_fused_gather_equals_gather_and_projection(heads, cut):
    bundles = Bundles(heads, 128, 128, 4, 576)
    weight, weight_scales, _, _ = operands(1, 96, 512)
    hbm = slab(10, bundles.stride, DEVICE)
    hbm[:] = hbm & 0x77 | 0x40                               # as codes no NaN, as scales 2^-63 .. 2^-8
    index = torch.randint(0, 10, (5, len(heads)), device=DEVICE)
    addresses = hbm.data_ptr() + index * bundles.stride
    addresses[3, 0] = 0
    projection = Projection(put(weight), put(weight_scales))
    codes = torch.empty(5, 512, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty(5, 16, dtype=torch.uint8, device=DEVICE)
    Gather(bundles)(addresses, codes, mode="mxfp8", scales=scales)
    out = torch.empty(2, 5, 96, dtype=BF16, device=DEVICE)
    projection.codes(codes, scales, out[0], cut=cut)
    projection.bundles(addresses, out[1], bundles, cut=cut)
    assert torch.equal(out[0], out[1])
    assert out.isfinite().all()


def test_extreme_scales_and_nan():
    weight, weight_scales, codes, scales = operands(4, 64, 64)
    scales[:] = [[0, 127], [255, 127], [254, 100], [127, 127]]
    codes[:, :32] &= 0x8F                                    # small values, so that 2^127 does not overflow
    weight_scales[:] = 120
    out = torch.empty(4, 64, dtype=BF16, device=DEVICE)
    Projection(put(weight), put(weight_scales)).codes(put(codes), put(scales), out, cut=CODES[1])
    assert out[1].isnan().all()
    assert out[[0, 3]].isfinite().all()
    x, w = values(codes, scales), values(weight, weight_scales, True)
    close(out[[0, 3]], (x @ w.T)[[0, 3]], (np.abs(x) @ np.abs(w).T)[[0, 3]], "codes")


@pytest.mark.parametrize("cut", (CODES[0], CODES[1], ROWS[0]), ids=str)
def test_extreme_scales_of_the_weight(cut):
    weight, weight_scales, codes, scales = operands(5, 96, 128)
    weight[weight & 0x7F == 0] = 1                           # so that 255 is NaN in every row of its group
    weight_scales[:] = [[0, 0, 0, 0], [120, 120, 255, 120], [254, 120, 120, 120]]
    weight[64:, :32] &= 0x8F                                 # small values, so that 2^127 does not overflow
    codes[:, :32] &= 0x8F
    scales[:] = [200, 199, 198, 200] if cut.kind == "codes" else 127         # 2^-127 shows: those sums are no subnormals
    scales[:, 0] = 120
    out = torch.empty(5, 96, dtype=BF16, device=DEVICE)
    projection, x = Projection(put(weight), put(weight_scales)), values(codes, scales)
    if cut.kind == "codes":
        projection.codes(put(codes), put(scales), out, cut=cut)
    else:
        projection.rows(torch.from_numpy(x).to(BF16).to(DEVICE), out, cut=cut)
    assert out[:, 32:64].isnan().all()
    w = values(weight, weight_scales, True)
    for group in (slice(0, 32), slice(64, 96)):
        exact, terms = x @ w[group].T, np.abs(x) @ np.abs(w[group]).T
        assert (np.abs(exact) > 0).all()
        close(out[:, group], exact, terms, cut.kind, 2.0**-133 * np.abs(x).sum(1)[:, None] if cut.kind == "rows" else 0.0)


@pytest.mark.skipif(INTERPRETED, reason="instructions of the GPU")
@pytest.mark.parametrize("cut", (ROWS[0], *(cut for _, cut in CUTS if cut.kind == "rows")), ids=str)
def test_every_code_under_every_scale_of_a_plain_weight(cut):
    """A row with a single one picks single weights out: they are bf16(code * 2^(scale - 127))."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    scales = np.arange(135, dtype=np.uint8)                  # 32 rows a scale, 8 blocks; all codes lie in every group of rows
    weight = np.tile(np.resize(codes, 256)[(np.arange(32)[:, None] * 8 + np.arange(256)[None, :]) % 256], (135, 1))
    scales = np.repeat(scales[:, None], 8, 1)
    projection = Projection(put(weight), put(scales))
    general = Projection(put(np.vstack([weight, weight[:32]])), put(np.vstack([scales, np.full((1, 8), 135, np.uint8)])))
    assert projection.plain and not general.plain
    exact = torch.from_numpy(values(weight, scales, True)).to(BF16)
    for column in range(0, 256, 29):                          # picks every code somewhere
        rows = torch.zeros(cut.block_t, 256, dtype=BF16, device=DEVICE)
        rows[0, column] = 1.0
        for each in (projection, general):
            out = torch.empty(cut.block_t, each.n, dtype=torch.float32, device=DEVICE)
            each.rows(rows, out, cut=cut)
            found = out[0, :135 * 32].to(BF16).cpu()
            normal = exact[:, column].abs() >= 2.0**-126     # subnormal ones are rounded here, cut off in the general form
            assert torch.equal(found[normal], exact[normal, column])
            if each is projection:
                assert torch.equal(found, exact[:, column])


def test_what_is_not_plain():
    weight, weight_scales, _, _ = operands(1, 64, 64)
    assert Projection(put(weight), put(weight_scales)).plain is not INTERPRETED
    for place, value in (((3, 5), 0x7F), ((63, 63), 0xFF)):
        other = weight.copy()
        other[place] = value
        assert not Projection(put(other), put(weight_scales)).plain
    weight_scales[1, 1] = 135
    assert not Projection(put(weight), put(weight_scales)).plain


def test_what_does_not_fit_is_refused():
    weight, weight_scales, codes, scales = operands(2, 64, 128)
    projection = Projection(put(weight), put(weight_scales))
    with pytest.raises(ValueError, match="blocks of 32"):
        Projection(put(weight[:, :100]), put(weight_scales))
    with pytest.raises(ValueError, match="codes must"):
        projection.codes(put(codes[:, :64]), put(scales), torch.empty(2, 64, dtype=BF16, device=DEVICE))
    with pytest.raises(ValueError, match="orders"):
        projection.bundles(put(np.zeros((2, 1), np.int64)), torch.empty(2, 64, dtype=BF16, device=DEVICE), Bundles((8,)))


@functools.cache
def real_weight():
    """A weight of the real size on the device, and its values in float64."""
    n, k = 25600, 6144
    weight = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=DEVICE)
    weight[(weight & 0x7F) == 0x7F] = 0
    scales = torch.randint(115, 131, (n // 32, k // 32), dtype=torch.uint8, device=DEVICE)
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return weight, scales, weight.view(torch.float8_e4m3fn).double() * factors


@pytest.mark.skipif(INTERPRETED, reason="the real size: GPU only")
@pytest.mark.parametrize("tokens", (1, 5, 16, 17, 32, 33, 64, 100))
@pytest.mark.parametrize("cuts", ([cut for _, cut in CUTS], CUT_CHOICES), ids=("as shipped", "all that are offered"))
def test_the_real_size(cuts, tokens):
    weight, weight_scales, w = real_weight()
    projection = Projection(weight, weight_scales)
    _, _, codes, scales = operands(tokens, 32, 6144)
    x = put(values(codes, scales))
    exact, terms = x @ w.T, x.abs() @ w.abs().T
    rows = x.to(torch.bfloat16)
    assert torch.equal(rows.double(), x)
    for cut in cuts:
        if cut.kind == "rows" and cut.block_t < min(tokens, 64):
            continue
        for repeat in range(2):
            out = torch.full((tokens, 25600), 7.0, dtype=torch.bfloat16, device=DEVICE)
            if cut.kind == "codes":
                projection.codes(put(codes), put(scales), out, cut=cut)
            else:
                projection.rows(rows, out, cut=cut)
            wrong = (out.double() - exact).abs() > summed(cut.kind) * terms + exact.abs() * 2.0**-8
            assert not wrong.any(), (cut, repeat, int(wrong.sum()))
