"""The results of a Batch: rows as bf16, rows as bytes, addresses, as torch tensors; here on the CPU, over compiled gathers.

It waits for the one layer that it gathers, then reads its slots; the batch's claim keeps them as they are. A given `out` is
checked before anything is written. It knows neither keys nor the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ssdgram.errors import ConfigError
from ssdgram.kernels.gather_cpu import gather_bf16, gather_packed

if TYPE_CHECKING:
    import torch

    from ssdgram.batch import Batch


def rows(batch: Batch, index: int, out: torch.Tensor | None) -> torch.Tensor:
    """bfloat16 [T, columns, dim] of the layer with that index."""
    import torch

    store = batch._store
    if store._cuda is not None:
        batch.wait(store.layers[index])
        return store._cuda.run(batch, index, "rows", out)
    result = _output(out, (len(batch), len(store.columns), store.dim), torch.bfloat16)
    batch.wait(store.layers[index])
    _run(gather_bf16, batch, index, result.detach().view(torch.int16).numpy().view(np.uint16))
    return result


def packed(batch: Batch, index: int, out: torch.Tensor | None) -> torch.Tensor:
    """uint8 [T, columns, row_bytes] of the layer with that index."""
    import torch

    store = batch._store
    if store._cuda is not None:
        batch.wait(store.layers[index])
        return store._cuda.run(batch, index, "packed", out)
    result = _output(out, (len(batch), len(store.columns), store.row_bytes), torch.uint8)
    batch.wait(store.layers[index])
    _run(gather_packed, batch, index, result.numpy())
    return result


def addresses(batch: Batch, index: int) -> torch.Tensor:
    """int64 [T, orders] of the layer with that index; 0 where the bundle is not served here."""
    import torch

    store = batch._store
    batch.wait(store.layers[index])
    if store._cuda is not None:
        return store._cuda.addresses(batch, index)
    slots = batch._slots[index].astype(np.int64)
    slab = store._state.slab.ctypes.data
    return torch.from_numpy(np.where(slots < 0, 0, slab + slots * store._stride))


def _run(gather: Any, batch: Batch, index: int, out: np.ndarray) -> None:
    store, positions = batch._store, len(batch)
    orders = store.geometry.orders
    gather(store._state.slab.ctypes.data, store._stride, batch._slots.reshape(-1), index * positions * orders, orders,
           store._gather_groups, store._row_format(index), out, 0, positions)
    batch._check()                                           # closed meanwhile: the slots may hold anything
    store._count_served(positions * len(store.columns) * store.row_bytes)


def _output(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    if out is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    expected = f"expected a contiguous {dtype} {list(shape)} on the CPU"
    if not isinstance(out, torch.Tensor):
        raise ConfigError(f"out is a {type(out).__name__}: {expected}")
    if tuple(out.shape) != shape or out.dtype != dtype or out.device.type != "cpu" or not out.is_contiguous():
        raise ConfigError(f"out is {out.dtype} {list(out.shape)} on {out.device}: {expected}")
    return out
