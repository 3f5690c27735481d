"""Where the kernel checks run, and what the interpreter makes of bf16."""

import os
from pathlib import Path

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
GOLDEN = Path(__file__).parent.parent / "golden"
BF16 = torch.float32 if INTERPRETED else torch.bfloat16      # results that a kernel rounds: the interpreter cuts, so keep float32


def golden(name):
    with np.load(GOLDEN / name) as file:
        return dict(file)


def put(values, dtype=None):
    """A tensor on the device."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    return tensor.to(DEVICE) if dtype is None else tensor.to(dtype).to(DEVICE)


def pinned(tensor):
    """The tensor in memory that host and device see."""
    return tensor if INTERPRETED else tensor.pin_memory()


def from_bits(bits):
    """bf16 tensor on the device from its bits (uint16)."""
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16).to(DEVICE)


def to_bits(values):
    """bf16 bits (uint16) of a result: bf16 as it is, float32 rounded."""
    return values.detach().cpu().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def synchronize():
    if not INTERPRETED:
        torch.cuda.synchronize()


def slab(count, stride, device=None):
    """uint8 [count, stride], 64-byte aligned, random bytes. device: None: memory that both see."""
    size = count * stride
    whole = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)
    whole = pinned(whole) if device is None else whole.to(device)
    start = -whole.data_ptr() % 64
    return whole[start:start + size].view(count, stride)
