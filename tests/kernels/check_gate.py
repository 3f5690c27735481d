"""gate: golden vectors in float32 and bf16, DEAD rows bit for bit, in place, other widths."""

import numpy as np
import pytest
import torch
from where import DEVICE, INTERPRETED, from_bits, golden, put

from ssdgram.kernels.gate import CUT_CHOICES, Cut, Gate

SMALL, FULL = golden("gate_small.npz"), golden("gate_full.npz")
CUTS = (Cut(32, 4), Cut(16, 4, 1), Cut(1024, 2), Cut(16, 2, 2))


def exact(x, kv, q, k, eps=1e-20):
    """float64 [T, hc, d] by spec A9."""
    x, kv, q, k = (tensor.double().cpu() for tensor in (x, kv, q, k))
    tokens, streams, width = x.shape
    key = kv[:, :streams * width].view(tokens, streams, width)
    value = kv[:, streams * width:].view(tokens, 1, width)
    scale = (x.square().mean(-1) + eps).rsqrt() * (key.square().mean(-1) + eps).rsqrt()
    dot = (x * q * k * key).sum(-1) * scale / width**0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return x + gate[..., None] * value


@pytest.mark.parametrize("cut", CUTS)
def test_golden_float32(cut):
    x, kv, q, k = (put(SMALL[f"f32/{name}"]) for name in ("x", "kv", "q_weight", "k_weight"))
    part = put(SMALL["participates"])
    out = torch.full_like(x, 7.0)
    Gate(q, k)(x, kv, out, part, cut=cut)
    wanted = torch.from_numpy(SMALL["f32/out_f64"])
    error = (out.double().cpu() - wanted).abs()
    assert (error <= 2e-6 * wanted.abs().clamp(min=1)).all()
    dead = ~SMALL["participates"]
    assert torch.equal(out.cpu()[dead], x.cpu()[dead])


@pytest.mark.parametrize("cut", CUTS[:2])
def test_golden_bf16(cut):
    x, kv, q, k = (from_bits(SMALL[f"bf16/{name}"]) for name in ("x", "kv", "q_weight", "k_weight"))
    out = torch.full_like(x, 7.0)
    Gate(q, k)(x, kv, out, put(SMALL["participates"]), cut=cut)
    public = from_bits(SMALL["bf16/out_public"])
    alive = SMALL["participates"]
    near(out[put(alive)], public[put(alive)])
    assert torch.equal(out[put(~alive)].view(torch.int16), x[put(~alive)].view(torch.int16))


def near(out, wanted):
    """bf16: equal but for values whose rounding is a toss-up (GPU) or cut (interpreter): one ulp."""
    difference = (out.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert difference.max() <= 1
    if not INTERPRETED:
        assert (difference > 0).float().mean() < 0.002


@pytest.mark.parametrize("cut", (Cut(1024, 4), Cut(8192, 16), Cut(512, 2, 1)) if INTERPRETED else CUT_CHOICES)
def test_golden_full_width(cut):
    x, kv, q, k = (from_bits(FULL[name]) for name in ("x", "kv", "q_weight", "k_weight"))
    out = torch.full_like(x, 7.0)
    Gate(q, k)(x, kv, out, cut=cut)
    near(out, from_bits(FULL["out_public"]))
    again = x.clone()
    Gate(q, k)(again, kv, again, cut=cut)                    # in place
    assert torch.equal(again.view(torch.int16), out.view(torch.int16))


@pytest.mark.parametrize("tokens,streams,width", ((3, 2, 48), (1, 4, 100), (70, 1, 16), (0, 4, 32)))
def test_other_shapes_against_float64(tokens, streams, width):
    generator = torch.Generator().manual_seed(1)
    x = put(torch.randn(tokens, streams, width, generator=generator))
    kv = put(torch.randn(tokens, (streams + 1) * width, generator=generator))
    q, k = (put(torch.randn(streams, width, generator=generator)) for _ in range(2))
    out = torch.full_like(x, 7.0)
    Gate(q, k)(x, kv, out)
    assert torch.allclose(out.double().cpu(), exact(x, kv, q, k), rtol=1e-5, atol=1e-5)


def test_dead_rows_keep_signs_and_ignore_what_is_not_finite():
    x = put(torch.tensor([-0.0, 0.0] * 16).repeat(2, 2, 1)).to(torch.bfloat16)
    kv = torch.full((2, 96), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    out = torch.full_like(x, 7.0)
    ones = torch.ones(2, 32, dtype=torch.bfloat16, device=DEVICE)
    Gate(ones, ones)(x, kv, out, put(np.array([False, True])))
    assert torch.equal(out[0].view(torch.int16), x[0].view(torch.int16))
    assert out[1].isnan().all()


def test_what_does_not_fit_is_refused():
    ones = torch.ones(4, 32, device=DEVICE)
    x = torch.ones(2, 4, 32, device=DEVICE)
    with pytest.raises(ValueError, match="kv"):
        Gate(ones, ones)(x, torch.ones(2, 128, device=DEVICE), torch.empty_like(x))
    with pytest.raises(ValueError, match="participates"):
        part = torch.ones(3, dtype=torch.bool, device=DEVICE)
        Gate(ones, ones)(x, torch.ones(2, 160, device=DEVICE), torch.empty_like(x), part)
