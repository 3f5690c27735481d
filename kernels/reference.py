"""Reference mathematics in PyTorch and NumPy: what every other kernel is checked against (spec A7, A8, A9, B4, B5).

Plain and slow on purpose, each function one step of the specification, in float32 or float64. Arrays may be NumPy or torch;
raw formats are uint8 (e4m3fn, e8m0, e2m1 pairs) and uint16 or torch.bfloat16 (bf16). torch is imported by what needs it.
Invariant: the order of roundings is the specification's; where sources differ, the first column of A7 and DS-model's rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssdgram._compiled import compiled, copy_bytes, crc32c_update, crc32c_word, load_u32
from ssdgram.errors import ConfigError
from ssdgram.kernels.dequant import E4M3, E8M0, bf16_bits, value_table
from ssdgram.kernels.gather_cpu import expand_rows, row_format

if TYPE_CHECKING:
    import torch

MXFP8_BLOCK = 32
MXFP8_FLOOR = 1e-4                                           # DeepSeek's; vLLM has float32's smallest normal


# ---------------------------------------------------------------- rows (A7, B4), NumPy


def dequantise_rows(packed: np.ndarray, encoding: str, row_dim: int, global_scale: float | None = None) -> np.ndarray:
    """Rows as in the checkpoint (uint8 [..., row_bytes]: codes, then scales) -> bf16 bits, uint16 [..., row_dim]. Compiled."""
    row = row_format(encoding, row_dim, global_scale)
    row_bytes = row.code_bytes + row.scale_bytes
    if packed.dtype != np.uint8 or packed.shape[-1:] != (row_bytes,):
        raise ConfigError(f"rows are {packed.dtype} {list(packed.shape)}: expected uint8 [..., {row_bytes}] for {encoding} rows "
                          f"of {row_dim} values")
    rows = np.require(packed, requirements=["C", "W"]).reshape(-1, row_bytes)
    out = np.empty((len(rows), row_dim), np.uint16)
    expand_rows(rows, row, out)
    return out.reshape(*packed.shape[:-1], row_dim)


def dequantise(codes: np.ndarray, scales: np.ndarray | None, encoding: str = "fp8_ue8m0",
               global_scale: float | None = None) -> np.ndarray:
    """Codes (uint8 [..., code_bytes]) and scales (uint8 [..., scale_bytes], None without) -> bf16 bits, uint16 [..., row_dim].

    By the table of `value_table` and nothing else: the twin of the compiled paths.
    """
    table = value_table(encoding, global_scale)
    if encoding == "bf16":
        return np.ascontiguousarray(codes).view(np.uint16)
    if encoding == "fp8_global":
        return table[codes]
    if scales is None:
        raise ConfigError(f"scales are None: expected uint8 scales for {encoding}")
    if encoding == "fp8_ue8m0":
        return table.reshape(256, 256)[np.repeat(scales, MXFP8_BLOCK, axis=-1), codes]
    pairs = table.reshape(256, 256, 2)[np.repeat(scales, 8, axis=-1), codes]
    return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


# ---------------------------------------------------------------- torch <-> raw formats


def from_bits(bits: Any, dtype: torch.dtype) -> torch.Tensor:
    """bf16 as uint16 (or torch.bfloat16), or any float array, as a tensor of `dtype`."""
    import torch

    tensor = torch.from_numpy(np.array(bits)) if isinstance(bits, np.ndarray) else bits
    if tensor.dtype == torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.to(dtype)


def to_bits(values: torch.Tensor) -> np.ndarray:
    """Rounded to bf16 (float64 through float32: the specification rounds float32 values), as uint16; NaN is 0x7FC0."""
    return bf16_bits(values.detach().float().cpu().numpy())


# ---------------------------------------------------------------- projection (A8)


def mxfp8_quantise(values: Any, floor: float = MXFP8_FLOOR) -> tuple[np.ndarray, np.ndarray]:
    """Activations [T, K] -> e4m3fn codes uint8 [T, K] and e8m0 scales uint8 [T, ceil(K / 32)] (A8).

    Per 32 consecutive inputs: amax = max(|x|, floor), s = 2^ceil(log2(fl32(amax * fl32(1/448)))), q = e4m3(clamp(x / s)).
    The last block may be short. A NaN gives NaN codes.
    """
    import torch

    x = from_bits(values, torch.float32)
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -width % MXFP8_BLOCK)).unflatten(-1, (-1, MXFP8_BLOCK))
    amax = blocks.abs().nan_to_num(nan=0.0).amax(-1).clamp(min=floor)
    mantissa, exponent = torch.frexp(amax * torch.tensor(1 / 448, dtype=torch.float32))   # amax / 448 = mantissa * 2^exponent
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)       # a power of two is its own ceiling
    scaled = torch.ldexp(blocks.double(), -exponent[..., None]).clamp(-448, 448).float()
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :width]
    return codes.numpy(), (exponent + 127).to(torch.uint8).numpy()


def mxfp8_values(codes: np.ndarray, scales: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """e4m3fn codes [T, K] times e8m0 scales [T, ceil(K / 32)], exact in `dtype` (float32 or float64)."""
    import torch

    width = codes.shape[-1]
    factors = torch.from_numpy(np.repeat(E8M0[scales], MXFP8_BLOCK, axis=-1)[..., :width]).to(dtype)
    return torch.from_numpy(E4M3[codes]).to(dtype) * factors


def weight_values(codes: np.ndarray, scales: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """`wkv.weight` e4m3fn [N, K] with e8m0 scales [ceil(N / 32), ceil(K / 32)], one per 32 x 32 block, exact in `dtype`."""
    rows = np.repeat(scales, MXFP8_BLOCK, axis=0)[:len(codes)]
    return mxfp8_values(codes, rows, dtype)


def project(codes: np.ndarray, scales: np.ndarray, weight: np.ndarray, weight_scales: np.ndarray,
            dtype: torch.dtype) -> torch.Tensor:
    """The projection of quantised activations (A8): `dtype` [T, N], before the rounding to bf16 (`to_bits`).

    In float64 it is exact up to the sum's rounding; float32 sums in the matrix product's order. 2048 outputs at a time, so that
    the real weight (25600 x 6144) takes 100 MB, not 1.3 GB.
    """
    import torch

    x = mxfp8_values(codes, scales, dtype)
    step = 64 * MXFP8_BLOCK
    parts = [x @ weight_values(weight[n:n + step], weight_scales[n // MXFP8_BLOCK:(n + step) // MXFP8_BLOCK], dtype).T
             for n in range(0, len(weight), step)]
    return torch.cat(parts, dim=-1)


def wkv(rows: Any, weight: np.ndarray, weight_scales: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Keys and value of T tokens (A8): rows bf16 [T, K] or [T, columns, row_dim] -> `dtype` [T, N], before the rounding."""
    import torch

    codes, scales = mxfp8_quantise(from_bits(rows, torch.float32).flatten(1))
    return project(codes, scales, weight, weight_scales, dtype)


# ---------------------------------------------------------------- gate (A9)


class Gate(NamedTuple):
    """What `gate` computes: `out` [T, hc, d] in x's dtype; `dot` and `gate` [T, hc] in the dtype of the computation."""

    out: torch.Tensor
    dot: torch.Tensor
    gate: torch.Tensor


def gate(x: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *, participates: Any = None,
         eps: float = 1e-20, clamp: float = 1e-6, dtype: torch.dtype | None = None) -> Gate:
    """The gated write into the hyper-connection streams (A9).

    x [T, hc, d]; kv [T, (hc + 1) * d]: the streams' keys, then the shared value; q_weight, k_weight [hc, d]; participates
    bool [T]. Computed in `dtype` (float32 by default), rounded to x's dtype once. DEAD tokens keep x bit for bit.
    """
    import torch

    dtype = dtype or torch.float32
    tokens, streams, width = x.shape
    wide = x.to(dtype)
    keys = kv[:, :streams * width].reshape(tokens, streams, width).to(dtype)
    value = kv[:, streams * width:].reshape(tokens, 1, width).to(dtype)
    weight = q_weight.to(dtype) * k_weight.to(dtype)
    norm_x = torch.rsqrt(wide.square().mean(-1) + eps)
    norm_key = torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (wide * weight * keys).sum(-1) * norm_x * norm_key / width**0.5
    strength = torch.sigmoid(torch.copysign(dot.abs().clamp(min=clamp).sqrt(), dot))
    out = (wide + strength[..., None] * value).to(x.dtype)
    if participates is not None:
        alive = torch.as_tensor(np.asarray(participates, bool), device=x.device)
        strength = strength * alive[:, None]
        out = torch.where(alive[:, None, None], out, x)
    return Gate(out, dot, strength)


# ---------------------------------------------------------------- PLE fusion (B5)


class PleWeights(NamedTuple):
    """The fusion's weights, as in the checkpoint: hc streams of width d, E = width of a token's concatenated rows."""

    key: torch.Tensor                                        # [hc * d, E]
    value: torch.Tensor                                      # [d, E]
    norm_key: torch.Tensor                                   # [hc * d], used as 1 + w
    norm_query: torch.Tensor                                 # [hc * d]
    norm_conv: torch.Tensor                                  # [hc * d]
    conv: torch.Tensor                                       # [hc * d, 1, kernel], depthwise; the last tap is the current token


def ple_fuse(x: torch.Tensor, rows: torch.Tensor, weights: PleWeights, *, streams: int, dilation: int, eps: float = 1e-6,
             state: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What PLE adds to the streams (B5), `dtype` [T, hc * d], and the convolution state after these tokens.

    x [T, hc * d]; rows [T, E] or [T, columns, row_dim]; dilation = ngram_size. state: the last (kernel - 1) * dilation vectors
    z before these tokens, oldest first, [.., hc * d]; None: the sequence starts here (zeros).
    """
    import torch

    dtype = dtype or torch.float32
    w = PleWeights(*(tensor.to(dtype) for tensor in weights))
    embedding = rows.flatten(1).to(dtype)
    count, wide = x.shape
    taps = w.conv.shape[-1]
    span = (taps - 1) * dilation

    def norm(z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = z.unflatten(-1, (streams, -1))
        return parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps) * (1 + weight).unflatten(-1, (streams, -1))

    key = norm(embedding @ w.key.T, w.norm_key)
    dot = (key * norm(x.to(dtype), w.norm_query)).sum(-1) / (wide // streams) ** 0.5
    strength = torch.sigmoid(torch.sign(dot) * dot.abs().clamp(min=1e-6).sqrt())
    update = (strength[..., None] * (embedding @ w.value.T)[:, None]).flatten(1)
    z = norm(update, w.norm_conv).flatten(1)
    before = torch.zeros(span, wide, dtype=dtype) if state is None else state.to(dtype)
    if before.shape != (span, wide):
        raise ConfigError(f"the state is {list(before.shape)}: expected [(kernel - 1) * dilation, hc * d] = [{span}, {wide}]")
    history = torch.cat([before, z])
    mixed = sum((history[tap * dilation:tap * dilation + count] * w.conv[:, 0, tap] for tap in range(taps)), torch.zeros_like(z))
    return update + torch.nn.functional.silu(mixed), history[len(history) - span:]


# ---------------------------------------------------------------- delivery (design section 4, row check)


@compiled
def deliver(jobs, count, generation, code_bytes, scale_bytes, results):  # type: ignore[no-untyped-def]
    """What `kernels.deliver` does, on host addresses: jobs int64 [n, 8] -> results int32 [n], rows that are right copied. Compiled."""
    for k in range(count):
        codes, scales = jobs[k, 0], jobs[k, 1]
        state = crc32c_word(crc32c_word(crc32c_word(np.uint32(0xFFFFFFFF), generation), jobs[k, 3]), jobs[k, 4])
        state = crc32c_update(crc32c_update(state, codes, code_bytes), scales, scale_bytes) ^ np.uint32(0xFFFFFFFF)
        results[k] = state != load_u32(jobs[k, 2])
        if results[k] == 0:
            copy_bytes(jobs[k, 5], codes, code_bytes)
            copy_bytes(jobs[k, 6], scales, scale_bytes)
