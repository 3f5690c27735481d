"""Model configs: the `engram_*` fields of DeepSeek-V4.1 (spec A1) and the `ple_*` fields of Qwen4Exp (B1).

Fields may be flat or under `text_config`. It computes the constants that the config implies; it does not know checkpoints.
Invariant: counts are checked before any work that grows with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdgram.constants import INT64_MAX, deal_primes, engram_multipliers, ple_multipliers, running_sums
from ssdgram.errors import ConfigError
from ssdgram.fields import Fields, read_object, show
from ssdgram.geometry import ENGRAM, MAX_COLUMNS, MAX_NGRAM, MAX_ROW_DIM, MAX_TOKEN_IDS, PLE, Geometry, check_counts

MAX_CONFIG_BYTES = 16 << 20
_PLE_ENCODINGS = {None: "bf16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_global", "nvfp4": "nvfp4"}


def read_config(path: Path) -> Geometry:
    """Geometry of a config.json, or of the one in a folder."""
    return parse_config(_read_json(path))


def parse_config(config: Mapping[str, Any]) -> Geometry:
    """Geometry of a parsed config."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(f"text_config is {show(nested)}: expected an object")
    fields = Fields({**config, **{name: value for name, value in (nested or {}).items() if value is not None}})
    engram, ple = fields.get("engram_layer_ids"), fields.get("ple_layer_ids")
    if engram and ple:
        raise ConfigError("the config has both engram_layer_ids and ple_layer_ids: expected one of them")
    if engram:
        return _from_engram(fields)
    if ple:
        return _from_ple(fields)
    raise ConfigError("the config has no n-gram layers: expected engram_layer_ids (DeepSeek-V4.1) or ple_layer_ids "
                      f"(Qwen4Exp) with at least one layer, found engram_layer_ids = {show(engram)}, "
                      f"ple_layer_ids = {show(ple)}")


def _from_engram(fields: Fields) -> Geometry:
    """Spec A1, A3, A4."""
    layers = fields.integers("engram_layer_ids", 0, MAX_TOKEN_IDS)
    n = fields.integer("engram_max_ngram_size", 2, MAX_NGRAM)
    heads = fields.integer("engram_n_heads", 1, MAX_COLUMNS)
    check_counts(layers, n - 1, heads, fields)
    row_dim = fields.integer("engram_head_dim", 1, MAX_ROW_DIM)
    vocab_size = fields.optional("vocab_size", 1, MAX_TOKEN_IDS)
    compressed = fields.integer("engram_compressed_vocab_size", 1, vocab_size or MAX_TOKEN_IDS)
    pad_name = "engram_pad_token_id" if fields.get("engram_pad_token_id") is not None else "engram_pad_id"
    if fields.get(pad_name) is None:
        raise ConfigError("engram_pad_token_id is missing: expected the raw id that fills blocked slots")
    pad = fields.integer(pad_name, 0, (vocab_size or MAX_TOKEN_IDS) - 1)
    if isinstance(fields.get("engram_vocab_size"), (list, tuple)):      # the paper's demo: a start per order
        starts = fields.integers("engram_vocab_size", 1, INT64_MAX, n - 1)
    else:
        starts = [fields.integer("engram_vocab_size", 1, INT64_MAX)] * (n - 1)
    rows = fields.integers("engram_num_embeddings", 1, INT64_MAX, len(layers))
    primes = deal_primes(starts, len(layers), heads, "engram_vocab_size")
    for layer, sizes, found in zip(layers, primes, rows):
        if sum(sizes) > found:
            raise ConfigError(f"engram_num_embeddings of layer {layer} is {found}: expected at least {sum(sizes)}, the sum of "
                              f"its {len(sizes)} primes from engram_vocab_size = {show(fields.get('engram_vocab_size'))} on")
    return Geometry(
        family=ENGRAM, layers=tuple(layers), orders=n - 1, heads=heads, primes=primes, offsets=running_sums(primes),
        multipliers=tuple(engram_multipliers(compressed, layer, n) for layer in layers), table_rows=tuple(rows),
        row_dim=row_dim, encoding="fp8_ue8m0", vocab_size=vocab_size, compressed_vocab_size=compressed,
        pad_token_id=pad, eos_token_id=None, image_token_id=_image_token(fields))


def _from_ple(fields: Fields) -> Geometry:
    """Spec B1, B2."""
    one_based = sorted(fields.integers("ple_layer_ids", 1, MAX_TOKEN_IDS))
    layers = [layer - 1 for layer in one_based]
    n = fields.integer("ngram_size", 2, MAX_NGRAM, 3)
    heads = fields.integer("heads_per_ngram", 1, MAX_COLUMNS, 8)
    check_counts(layers, n - 1, heads, fields)
    columns = (n - 1) * heads
    width_name = "hidden_size" if fields.get("ple_embed_dim") is None else "ple_embed_dim"
    width = fields.integer(width_name, 1, MAX_ROW_DIM * MAX_COLUMNS)
    if width % columns:
        raise ConfigError(f"{width_name} is {width}: expected a multiple of (ngram_size - 1) * heads_per_ngram = {columns}")
    vocab_size = fields.integer("vocab_size", 1, MAX_TOKEN_IDS)
    base = fields.integer("ngram_vocab_size_base", 1, INT64_MAX, 20_000_000)
    multiple = fields.integer("make_ngram_vocab_size_divisible_by", 1, 2**31, 128)
    seed = fields.integer("seed", -2**63, 2**64 - 1, 1234)
    if isinstance(fields.get("eos_token_id"), (list, tuple)):
        eos = fields.integers("eos_token_id", 0, vocab_size - 1)[0]
    else:
        eos = fields.integer("eos_token_id", 0, vocab_size - 1)
    dtype = fields.get("ple_embedding_dtype")
    if not (dtype is None or isinstance(dtype, str)) or dtype not in _PLE_ENCODINGS:
        raise ConfigError(f"ple_embedding_dtype is {show(dtype)}: expected one of {list(_PLE_ENCODINGS)}")
    primes = deal_primes([base] * (n - 1), len(layers), heads, "ngram_vocab_size_base")
    return Geometry(
        family=PLE, layers=tuple(layers), orders=n - 1, heads=heads, primes=primes, offsets=running_sums(primes),
        multipliers=tuple(ple_multipliers(vocab_size, seed, k, n) for k in range(len(layers))),
        table_rows=tuple(-(-sum(sizes) // multiple) * multiple for sizes in primes), row_dim=width // columns,
        encoding=_PLE_ENCODINGS[dtype], vocab_size=vocab_size, compressed_vocab_size=None, pad_token_id=None,
        eos_token_id=eos, image_token_id=_image_token(fields))


def _image_token(fields: Fields) -> int | None:
    return fields.optional("image_token_id", 0, MAX_TOKEN_IDS)


def _read_json(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    return read_object(path, MAX_CONFIG_BYTES, ConfigError, "a model's config.json")
