"""What both plug-ins need for Qwen4Exp's PLE tables: is the store the model's, and in which form are its rows delivered.

An engine hands its rows on as they are stored: bf16, or fp8 codes that it multiplies by its own copy of the table's one scale. So
a PLE table is delivered as bf16 rows or as bytes, and the two scales have to agree. It knows no engine: what an engine has comes
as arguments. Invariant: a store that passed gives the engine's own row ids and its own bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ssdgram.engines import opening
from ssdgram.errors import ConfigError, IdentityError
from ssdgram.geometry import PLE, Geometry
from ssdgram.kernels.dequant import bf16_bits

ENCODINGS = {"bfloat16": "bf16", "float8_e4m3fn": "fp8_global"}          # what an engine's table is made of -> what a store's is


def check_table(geometry: Geometry | None, *, layer: int, dim: int, dtype: Any) -> None:
    """Refuse a store that cannot hold this layer's table: rows of `dim` values of that torch dtype. None: it is looked at later.

    ConfigError: a dtype that is not served. IdentityError: tables of another family, layer, width or encoding.
    """
    name = str(dtype).rpartition(".")[2]
    if name not in ENCODINGS:
        raise ConfigError(f"a PLE table of {name} is not served: bfloat16 and float8_e4m3fn with one scale are; unset SSDGRAM_STORE to "
                          f"serve it with the engine's own tables")
    if geometry is None:
        return
    opening.check_layout(geometry, layers=[layer], primes=geometry.prime_array[_index(geometry, layer)],
                         offsets=geometry.offset_array[_index(geometry, layer)], row_dim=dim, family=PLE)
    if geometry.encoding != ENCODINGS[name]:
        raise IdentityError(f"the store's rows are {geometry.encoding}, the model's table is {name}: convert the checkpoint that is served")


def _index(geometry: Geometry, layer: int) -> int:
    return geometry.layers.index(layer) if layer in geometry.layers else 0


def check_hash(geometry: Geometry, *, layer: int, multipliers: Any, sizes: Any, offsets: Any, heads: int, eos: int) -> None:
    """IdentityError unless the layer's row ids come from these constants: multipliers [n], bucket sizes and offsets [columns]."""
    opening.check_layout(geometry, layers=[layer], primes=sizes, offsets=offsets, row_dim=geometry.row_dim, family=PLE)
    wanted = np.asarray(multipliers, np.int64)
    found = geometry.multiplier_array[geometry.layers.index(layer)]
    if not np.array_equal(wanted, found):
        raise IdentityError("the store's hash multipliers are not the model's: it was converted from another model; convert this one")
    if (geometry.heads, geometry.eos_token_id) != (heads, eos):
        raise IdentityError(f"the store has {geometry.heads} heads and EOS token {geometry.eos_token_id}, the model {heads} and {eos}: "
                            f"convert this model")


def check_scale(store: Any, *, layer: int, scale: float) -> None:
    """IdentityError unless the engine's scale of an fp8 table is the store's, to bfloat16, which is what both multiply by (spec B4)."""
    scales = store.manifest.global_scales
    if scales is None:
        raise IdentityError("the store's rows have no scale of their own: it was converted from another checkpoint; convert this one")
    found = scales[store.geometry.layers.index(layer)]
    if len(set(bf16_bits(np.array([scale, found], np.float32)).tolist())) > 1:
        raise IdentityError(f"the store's table of layer {layer} has scale {found}, the model's {scale}: it was converted from another "
                            f"checkpoint; convert this one")
