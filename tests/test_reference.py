"""The reference mathematics against the golden vectors of public code, and the miniature checkpoint from ids to output."""

from __future__ import annotations

import json

import numpy as np
import pytest
from vectors import GOLDEN, arrays, checkpoint_tensors

from ssdgram.errors import ConfigError
from ssdgram.geometry import Geometry
from ssdgram.kernels.dequant import bf16_values
from ssdgram.kernels.reference import (
    PleWeights,
    dequantise,
    dequantise_rows,
    from_bits,
    gate,
    mxfp8_quantise,
    mxfp8_values,
    ple_fuse,
    project,
    to_bits,
    weight_values,
    wkv,
)
from ssdgram.token_map import token_map

torch = pytest.importorskip("torch")
ROWS = arrays("dequant.npz")
WKV = arrays("wkv_mxfp8_small.npz")


def ulps(found: np.ndarray, expected: np.ndarray) -> int:
    """Largest distance of two bf16 arrays in units of the last place."""
    def line(bits: np.ndarray) -> np.ndarray:
        magnitude = (bits & 0x7FFF).astype(int)
        return np.where(bits & 0x8000, -magnitude, magnitude)

    return int(np.abs(line(found) - line(expected)).max())


# ------------------------------------------------------------ rows


@pytest.mark.parametrize("kind, expected", [("rand", "rand_bf16"), ("edge", "edge_bf16_reference")])
def test_rows(kind, expected):
    codes, scales, wanted = ROWS[f"{kind}_weight"], ROWS[f"{kind}_scale"], ROWS[expected]
    nan = np.isnan(bf16_values(wanted))
    for found in (dequantise(codes, scales), dequantise_rows(np.concatenate([codes, scales], axis=1), "fp8_ue8m0", 256)):
        assert np.array_equal(found[~nan], wanted[~nan]) and (found[nan] == 0x7FC0).all()


@pytest.mark.parametrize("encoding, row_dim, scale", [
    ("fp8_ue8m0", 64, None), ("bf16", 160, None), ("fp8_global", 160, 0.37), ("nvfp4", 160, 0.37)])
def test_compiled_rows_are_the_tables(encoding, row_dim, scale):
    sizes = {"fp8_ue8m0": (64, 2), "bf16": (320, 0), "fp8_global": (160, 0), "nvfp4": (80, 10)}[encoding]
    packed = np.random.default_rng(3).integers(0, 256, (4, 5, sum(sizes)), dtype=np.uint8)
    found = dequantise_rows(packed, encoding, row_dim, scale)
    expected = dequantise(packed[..., :sizes[0]], packed[..., sizes[0]:], encoding, scale)
    assert found.shape == (4, 5, row_dim) and np.array_equal(found, expected)
    assert np.array_equal(dequantise_rows(packed[:, ::2], encoding, row_dim, scale), expected[:, ::2])
    with pytest.raises(ConfigError, match=r"rows are uint8 \[4, 5, \d+\]: expected uint8 \[\.\.\., \d+\]"):
        dequantise_rows(packed[..., 1:], encoding, row_dim, scale)


def test_a_missing_scale():
    with pytest.raises(ConfigError, match="scales are None: expected uint8 scales for nvfp4"):
        dequantise(np.zeros((1, 8), np.uint8), None, "nvfp4", 1.0)


def test_global_scale_rows_are_torch_bf16_products():
    codes = np.arange(256, dtype=np.uint8)
    for scale in (1.0, 0.0117, 3.14159, 2e-38, 3e38):
        product = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.bfloat16) * torch.tensor(scale, dtype=torch.bfloat16)
        assert np.array_equal(dequantise(codes, None, "fp8_global", scale), to_bits(product))


# ------------------------------------------------------------ projection


@pytest.mark.parametrize("kind", ["table", "general"])
def test_mxfp8_quantise(kind):
    codes, scales = mxfp8_quantise(WKV[f"{kind}/act_bf16"])
    assert np.array_equal(codes, WKV[f"{kind}/act_codes_reference"])
    assert np.array_equal(scales, WKV[f"{kind}/act_scales_reference"])


@pytest.mark.parametrize("kind", ["table", "general"])
def test_mxfp8_quantise_with_vllms_floor(kind):
    codes, scales = mxfp8_quantise(WKV[f"{kind}/act_bf16"], floor=float(np.finfo(np.float32).tiny))
    assert np.array_equal(scales, WKV[f"{kind}/act_scales_vllm"]) and np.array_equal(codes, WKV[f"{kind}/act_codes_vllm"])


def test_mxfp8_quantise_by_hand():
    x = torch.zeros(1, 40)
    x[0, 0], x[0, 1], x[0, 33] = 448.0, 3 * 2.0**-10, -449.0            # a power-of-two quotient is its own ceiling
    codes, scales = mxfp8_quantise(x)
    assert scales.tolist() == [[127, 128]] and codes.shape == (1, 40)
    assert codes[0, :2].tolist() == [0x7E, 0x02]                         # 1.5 steps of 2^-9: a tie, to even
    assert codes[0, 33] == 0x80 | 0x76                                   # 224.5 -> 224
    zero = mxfp8_quantise(torch.zeros(1, 32))
    assert zero[1].tolist() == [[127 - 22]] and not zero[0].any()        # the floor 1e-4
    assert mxfp8_quantise(torch.full((1, 32), float("nan")))[0].tolist() == [[0x7F] * 32]


def test_quantising_rows_of_the_table_loses_nothing():
    for floor in (1e-4, 1.2e-38):
        codes, scales = mxfp8_quantise(WKV["table/act_bf16"], floor)
        assert np.array_equal(mxfp8_values(codes, scales, torch.float32).numpy(), bf16_values(WKV["table/act_bf16"]))


@pytest.mark.parametrize("kind", ["table", "general"])
def test_projection(kind):
    weight = WKV["wkv_weight_e4m3"], WKV["wkv_scale_e8m0"]
    exact = wkv(WKV[f"{kind}/act_bf16"], *weight, torch.float64)
    golden = WKV[f"{kind}/kv_f64"]
    assert exact.dtype == torch.float64
    assert np.abs(exact.numpy() - golden).max() <= 1e-12 * np.abs(golden).max()
    assert ulps(to_bits(exact), WKV[f"{kind}/kv_bf16"]) <= 1
    single = wkv(WKV[f"{kind}/act_bf16"], *weight, torch.float32)
    assert single.dtype == torch.float32
    assert np.abs(single.numpy() - golden).max() <= 1e-5 * np.abs(golden).max()
    near_zero = np.abs(golden) < 1e-3 * np.abs(golden).max()             # there a unit of bf16 is less than float32's error
    assert ulps(to_bits(single)[~near_zero], WKV[f"{kind}/kv_bf16"][~near_zero]) <= 1


def test_projection_in_parts_and_with_short_blocks():
    """More outputs than one part, and sizes that are no multiples of a block."""
    random = np.random.default_rng(5)
    weight = random.integers(0, 0x7E, (2100, 40), dtype=np.uint8)
    weight_scales = random.integers(120, 130, (66, 2), dtype=np.uint8)
    codes, scales = mxfp8_quantise(torch.from_numpy(random.standard_normal((3, 40))))
    exact = project(codes, scales, weight, weight_scales, torch.float64).numpy()
    x, w = mxfp8_values(codes, scales, torch.float64).numpy(), weight_values(weight, weight_scales, torch.float64).numpy()
    assert exact.shape == (3, 2100) and np.allclose(exact, x @ w.T, rtol=1e-12)
    row, column = 2099, 39
    one = float(bf16_values(dequantise(weight[row, 32:].repeat(4), weight_scales[65, 1:]))[4 * (column - 32)])
    assert w[row, column] == one


# ------------------------------------------------------------ gate


def gate_inputs(prefix: str, golden: dict[str, np.ndarray], dtype: torch.dtype) -> list[torch.Tensor]:
    return [from_bits(golden[f"{prefix}{name}"], dtype) for name in ("x", "kv", "q_weight", "k_weight")]


@pytest.mark.parametrize("prefix", ["f32/", "bf16/"])
def test_gate_in_float64(prefix):
    golden = arrays("gate_small.npz")
    result = gate(*gate_inputs(prefix, golden, torch.float64), participates=golden["participates"], dtype=torch.float64)
    assert np.allclose(result.dot.numpy(), golden[f"{prefix}dot_f64"], rtol=1e-12, atol=1e-300)
    assert np.allclose(result.gate.numpy(), golden[f"{prefix}gate_f64"], rtol=1e-12, atol=0)
    assert np.allclose(result.out.numpy(), golden[f"{prefix}out_f64"], rtol=1e-12, atol=1e-300)


def test_gate_in_float32():
    golden = arrays("gate_small.npz")
    result = gate(*gate_inputs("f32/", golden, torch.float32), participates=golden["participates"])
    assert result.out.dtype == torch.float32
    scale = np.abs(golden["f32/out_f64"]).max(axis=(1, 2), keepdims=True)
    for expected in (golden["f32/out_f64"], golden["f32/out_public"]):
        assert (np.abs(result.out.numpy() - expected) <= 2e-6 * scale).all()


def test_gate_in_bf16():
    golden = arrays("gate_small.npz")
    result = gate(*gate_inputs("bf16/", golden, torch.bfloat16), participates=golden["participates"])
    assert result.out.dtype == torch.bfloat16
    assert ulps(to_bits(result.out), golden["bf16/out_public"]) <= 1


def test_dead_rows_keep_every_bit():
    """Negative zeros and a value that is not finite: x comes back as it went in."""
    golden = arrays("gate_small.npz")
    x, kv, q_weight, k_weight = gate_inputs("bf16/", golden, torch.bfloat16)
    x[7, 0, :4] = torch.tensor([-0.0, 0.0, float("inf"), -1.5])
    kv[7] = float("nan")
    kv[6, -32:] = float("inf")
    result = gate(x, kv, q_weight, k_weight, participates=golden["participates"])
    assert np.array_equal(to_bits(result.out[7]), to_bits(x[7])) and not result.out[6].isfinite().any()
    assert not golden["participates"][7] and (result.gate[7] == 0).all() | result.gate[7].isnan().all()


def test_a_small_product_counts_as_the_clamp_with_its_sign():
    one = torch.ones(1, 1, 2)
    for sign in (1.0, -1.0):
        kv = torch.tensor([[sign * 1e-30, sign * 1e-30, 1.0, 1.0]])
        found = gate(one, kv, torch.ones(1, 2), torch.ones(1, 2)).gate
        assert torch.equal(found, torch.sigmoid(torch.tensor([[sign * 1e-6**0.5]])))


def test_gate_at_full_width():
    golden = arrays("gate_full.npz")
    result = gate(*gate_inputs("", golden, torch.bfloat16))
    assert ulps(to_bits(result.out), golden["out_public"]) <= 1
    exact = gate(*gate_inputs("", golden, torch.float64), dtype=torch.float64)
    assert np.allclose(exact.dot.numpy(), golden["dot_f64"], rtol=1e-11) and np.allclose(exact.gate.numpy(), golden["gate_f64"])
    assert np.allclose(result.gate.numpy(), golden["gate_f64"], rtol=1e-6)


# ------------------------------------------------------------ the miniature checkpoint, ids to output


def test_the_miniature_checkpoint():
    folder = GOLDEN / "tiny_v41"
    geometry, tensors, golden = Geometry.from_config(folder), checkpoint_tensors(folder), arrays("tiny_v41/expected.npz")
    eps = json.loads((folder / "config.json").read_text())["text_config"]["rms_norm_eps"]
    ids = geometry.row_ids(golden["token_ids"], token_map(folder), golden["participates"])
    assert np.array_equal(ids, golden["row_ids"])
    for index, layer in enumerate(geometry.layers):
        name = f"layers.{layer}.engram"
        rows = dequantise(tensors[f"{name}.embed.weight"][ids[:, index]], tensors[f"{name}.embed.scale"][ids[:, index]])
        assert np.array_equal(rows, golden[f"l{layer}/emb_bf16"])
        kv = wkv(rows, tensors[f"{name}.wkv.weight"], tensors[f"{name}.wkv.scale"], torch.float64)
        wanted = golden[f"l{layer}/kv_f64"]
        assert np.abs(kv.numpy() - wanted).max() <= 1e-12 * np.abs(wanted).max()
        assert ulps(to_bits(kv), golden[f"l{layer}/kv_bf16"]) <= 1
        weights = [from_bits(tensors[f"{name}.{which}"], torch.bfloat16) for which in ("q_weight", "k_weight")]
        inputs = [from_bits(golden[f"l{layer}/{which}"], torch.bfloat16) for which in ("x_bf16", "kv_bf16")]
        result = gate(*inputs, *weights, participates=golden["participates"], eps=eps)
        assert ulps(to_bits(result.out), golden[f"l{layer}/out_bf16"]) <= 1


# ------------------------------------------------------------ PLE


PLE = arrays("ple_layer_small.npz")


def ple_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, PleWeights]:
    names = ("key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d")
    weights = PleWeights(*(torch.from_numpy(PLE[f"w/{name}/weight"]) for name in names))
    rows = PLE["w/ple_embedding/ngram_embedding/weight"][PLE["row_ids"]]
    return torch.from_numpy(PLE["x"]).to(dtype), torch.from_numpy(rows).to(dtype), weights


@pytest.mark.parametrize("dtype, golden, tolerance", [(torch.float64, "ple_out_f64", 1e-12), (torch.float32, "ple_out", 2e-6)])
def test_ple_fusion(dtype, golden, tolerance):
    x, rows, weights = ple_inputs(dtype)
    out, state = ple_fuse(x, rows, weights, streams=4, dilation=3, eps=float(PLE["eps"]), dtype=dtype)
    assert out.dtype == dtype and state.shape == (9, 128)
    assert np.abs(out.numpy() - PLE[golden]).max() <= tolerance * np.abs(PLE[golden]).max()


@pytest.mark.parametrize("chunks", [[1] * 18, [5, 13], [10, 1, 7], [0, 18]])
def test_ple_state_carries_over_chunks(chunks):
    x, rows, weights = ple_inputs(torch.float64)
    whole, final = ple_fuse(x, rows, weights, streams=4, dilation=3, dtype=torch.float64)
    parts, state, start = [], None, 0
    for length in chunks:
        part, state = ple_fuse(x[start:start + length], rows[start:start + length], weights, streams=4, dilation=3, state=state,
                               dtype=torch.float64)
        parts.append(part)
        start += length
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-12, atol=1e-14)
    assert torch.allclose(state, final, rtol=1e-12, atol=1e-14)


def test_ple_state_of_another_shape():
    x, rows, weights = ple_inputs(torch.float32)
    with pytest.raises(ConfigError, match=r"the state is \[8, 128\]: expected .* = \[9, 128\]"):
        ple_fuse(x, rows, weights, streams=4, dilation=3, state=torch.zeros(8, 128))


def test_ple_gate_is_one_half_at_zero():
    """sign(0) = 0 here, unlike A9: no keys, no preference."""
    x, rows, weights = ple_inputs(torch.float64)
    silent = weights._replace(key=torch.zeros_like(weights.key), conv=torch.zeros_like(weights.conv))
    out, _ = ple_fuse(x, rows, silent, streams=4, dilation=3, dtype=torch.float64)
    value = rows.flatten(1) @ weights.value.double().T
    assert torch.allclose(out.unflatten(1, (4, 32)), 0.5 * value[:, None].expand(-1, 4, -1))
