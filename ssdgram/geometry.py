"""Geometry: which rows a token needs, as numbers: layers, orders, heads, primes, offsets, multipliers, row format.

Two families are known: "engram" (DeepSeek-V4.1, spec part A) and "ple" (Qwen4Exp, spec part B). A Geometry comes from a
model's config, or from a manifest (`from_json`); it is immutable, compares by value and pickles. It knows neither files
nor caches. Invariant: whatever built it, every constant was checked, so that no hash overflows 63 bits, no key is
negative and no row id lies outside its column's bucket; and no config makes it work or allocate without bound.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import ConfigError, TokenMapError
from ssdgram.primes import consecutive_primes

INT64_MAX = 2**63 - 1
MAX_TOKEN_IDS = 2**31 - 1                                    # ids are int32
MAX_NGRAM = 16
MAX_GROUPS = 255                                             # a group is a u8, and 255 means "empty"
MAX_COLUMNS = 4096                                           # of all layers together: bounds the prime search
MAX_ROW_DIM = 65536
MAX_CONFIG_BYTES = 16 << 20

ENGRAM, PLE = "engram", "ple"
ENCODINGS = {                                                # bits of a code, values that share a scale byte (0: none)
    "fp8_ue8m0": (8, 32),
    "bf16": (16, 0),
    "fp8_global": (8, 0),
    "nvfp4": (4, 16),
}
_PLE_ENCODINGS = {None: "bf16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_global", "nvfp4": "nvfp4"}

# NumPy does not promise its generators' streams for ever: the constants of the released model, by (compressed size, layer)
KNOWN_MULTIPLIERS = {
    (99092, 1): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (99092, 14): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}

_ints = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The n-gram tables of one model. L layers, `orders` = n - 1 orders (2-gram .. n-gram), columns = orders x heads.

    Column c = order index x heads + head; its bucket is rows [offset, offset + prime) of its layer's table.
    """

    family: str                                              # "engram" or "ple"
    layers: _ints                                            # 0-based decoder layers, in hash order
    orders: int
    heads: int                                               # per order
    primes: tuple[_ints, ...]                                # [L][columns] rows of each column's bucket
    offsets: tuple[_ints, ...]                               # [L][columns] first row of each column's bucket
    multipliers: tuple[_ints, ...]                           # [L][orders + 1]
    table_rows: _ints                                        # [L] rows of the checkpoint's table (>= what the columns use)
    row_dim: int                                             # values per row
    encoding: str                                            # a key of ENCODINGS
    vocab_size: int | None                                   # raw ids; None: the config does not say (then the map does)
    compressed_vocab_size: int | None                        # None: the model does not compress
    pad_token_id: int | None                                 # raw id that fills blocked slots (engram)
    eos_token_id: int | None                                 # segment boundary and filler (ple)
    image_token_id: int | None = None                        # raw id of the positions of an image span, if known

    def __post_init__(self) -> None:
        _check(self)

    # ------------------------------------------------------------ derived numbers

    @property
    def columns(self) -> int:
        """Rows per token and layer."""
        return self.orders * self.heads

    @property
    def max_ngram(self) -> int:
        """n: the longest n-gram; n - 1 tokens of lookback count."""
        return self.orders + 1

    @property
    def groups(self) -> int:
        """(layer, order) pairs; group g = layer index x orders + order index."""
        return len(self.layers) * self.orders

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.row_dim * ENCODINGS[self.encoding][0] // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, behind its codes."""
        block = ENCODINGS[self.encoding][1]
        return self.row_dim // block if block else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: codes, then scales."""
        return self.code_bytes + self.scale_bytes

    @property
    def rows_per_layer(self) -> _ints:
        """Rows that the columns of each layer use: the sum of its primes."""
        return tuple(sum(sizes) for sizes in self.primes)

    @property
    def rule(self) -> int:
        """The hash kernel's rule: 0 blocks at the sequence's start and at DEAD tokens (A5), 1 ends segments at EOS (B3)."""
        return 0 if self.family == ENGRAM else 1

    @functools.cached_property
    def multiplier_array(self) -> np.ndarray:
        """`multipliers` as int64 [L, orders + 1]."""
        return np.array(self.multipliers, np.int64)

    @functools.cached_property
    def prime_array(self) -> np.ndarray:
        """`primes` as int64 [L, columns]."""
        return np.array(self.primes, np.int64)

    @functools.cached_property
    def offset_array(self) -> np.ndarray:
        """`offsets` as int64 [L, columns]."""
        return np.array(self.offsets, np.int64)

    def layer_index(self, layer: int) -> int:
        """Position of decoder layer `layer` in `layers`; ConfigError if it has no table."""
        if layer not in self.layers:
            raise ConfigError(f"layer {layer} has no n-gram table: the layers that have one are {list(self.layers)}")
        return self.layers.index(layer)

    # ------------------------------------------------------------ from and to files

    @classmethod
    def from_config(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Geometry:
        """Geometry of a model's config: a path to config.json (or to its folder), or the parsed dict.

        Fields may be flat or under `text_config` (spec A1, B1). ConfigError says what was found and what was expected.
        """
        config = source if isinstance(source, Mapping) else _read_json(Path(source))
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise ConfigError(f"text_config is {_show(nested)}: expected an object")
        fields = _Fields({**config, **{name: value for name, value in (nested or {}).items() if value is not None}})
        engram, ple = fields.get("engram_layer_ids"), fields.get("ple_layer_ids")
        if engram and ple:
            raise ConfigError("the config has both engram_layer_ids and ple_layer_ids: expected one of them")
        if engram:
            return _from_engram(fields)
        if ple:
            return _from_ple(fields)
        raise ConfigError("the config has no n-gram layers: expected engram_layer_ids (DeepSeek-V4.1) or ple_layer_ids "
                          f"(Qwen4Exp) with at least one layer, found engram_layer_ids = {_show(engram)}, "
                          f"ple_layer_ids = {_show(ple)}")

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types; `from_json` takes it back."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Geometry:
        """The inverse of `to_json`: exactly its keys, every value checked; ConfigError otherwise."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"the geometry is {_show(data)}: expected an object")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(data) != names:
            raise ConfigError(f"the geometry's fields are not those expected: missing {sorted(names - set(data))}, "
                              f"unknown {_show(sorted(map(str, set(data) - names)))}")
        return cls(**{name: _tuples(value) for name, value in data.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return Geometry.from_json, (self.to_json(),)

    def with_constants(self, multipliers: Any, sizes: Any, offsets: Any) -> Geometry:
        """This geometry with a checkpoint's own constants (PLE's int64 buffers, spec B2): [L][orders + 1], [L][columns] twice.

        For one layer the vectors may come without the leading dimension. ConfigError if they do not fit the table.
        """
        return dataclasses.replace(self, multipliers=_rows(multipliers, len(self.layers)),
                                   primes=_rows(sizes, len(self.layers)), offsets=_rows(offsets, len(self.layers)))

    def with_encoding(self, encoding: str, table_rows: Sequence[int] | None = None) -> Geometry:
        """This geometry with the row format (and the table sizes) that a checkpoint turned out to have."""
        rows = self.table_rows if table_rows is None else tuple(int(rows) for rows in table_rows)
        return dataclasses.replace(self, encoding=encoding, table_rows=rows)

    # ------------------------------------------------------------ tokens to keys and rows

    def checked_map(self, token_map: Any) -> np.ndarray:
        """`token_map` as a contiguous int32 [V] array that fits this geometry; empty for a model that does not compress.

        TokenMapError if it is missing, of a wrong type or shape, or does not give the config's compressed size.
        """
        if self.compressed_vocab_size is None:
            if token_map is not None:
                raise TokenMapError("this model does not compress its vocabulary: expected no token map (None), found one")
            return np.empty(0, np.int32)
        if token_map is None:
            raise TokenMapError(f"this model compresses its vocabulary to {self.compressed_vocab_size} ids: "
                                "expected a token map (ssdgram.token_map of its tokenizer.json), found None")
        array = np.asarray(token_map)
        if array.ndim != 1 or array.dtype.kind not in "iu" or not 0 < array.size <= MAX_TOKEN_IDS:
            raise TokenMapError(f"the token map is {array.dtype} {list(array.shape)}: expected integers, one per raw id")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high + 1 != self.compressed_vocab_size:
            raise TokenMapError(f"the token map's compressed ids are {low} .. {high}: expected 0 .. "
                                f"{self.compressed_vocab_size - 1} (engram_compressed_vocab_size = "
                                f"{self.compressed_vocab_size}); use the tokenizer.json that the model was trained with")
        if self.pad_token_id is not None and self.pad_token_id >= array.size:
            raise TokenMapError(f"the token map has {array.size} ids: expected more than engram_pad_token_id = "
                                f"{self.pad_token_id}")
        return np.require(array, np.int32, ["C", "A", "W"])

    def vocabulary(self, token_map: np.ndarray | None) -> int:
        """Number of raw ids that may be hashed: ids are 0 .. vocabulary - 1. `token_map` as from `checked_map`."""
        sizes = [size for size in (self.vocab_size, len(token_map) if token_map is not None else 0) if size]
        return min(sizes)

    def fill(self, token_map: np.ndarray | None) -> int:
        """The hash kernel's filler of blocked slots: the pad token's compressed id, or EOS. `token_map` as from `checked_map`."""
        if self.family == PLE:
            assert self.eos_token_id is not None             # for the type checker: _check saw to it
            return self.eos_token_id
        assert token_map is not None and self.pad_token_id is not None
        return int(token_map[self.pad_token_id])

    def keys(self, tokens: Any, token_map: Any, participates: Any = None, lookback: Any = None,
             lookback_participates: Any = None) -> np.ndarray:
        """The n-gram keys x (spec A5, B3) of a sequence's T tokens: int64 [T, L, orders], all >= 0.

        `tokens`: integers [T], raw ids (NumPy, torch or a list). `participates`: bool [T], False where a token takes no part
        (DEAD, A6); its id is not looked at. `lookback`: the raw ids before the tokens, oldest first; None or shorter
        than n - 1: the sequence starts there; longer: the last n - 1 count. TokenError names the first bad id.
        """
        from ssdgram.kernels.hash import ngram_keys
        from ssdgram.sequence import Sequence, check_ids, flatten

        table = self.checked_map(token_map)
        sequences = [Sequence(tokens, participates, lookback, lookback_participates, on_host=True)]
        flat_tokens, flat_flags, count = flatten(sequences, self.max_ngram)
        check_ids(sequences, self.max_ngram, flat_tokens, flat_flags, self.vocabulary(table))
        out = np.empty((count, len(self.layers), self.orders), np.int64)
        ngram_keys(flat_tokens, flat_flags, 0, len(flat_tokens), table, self.multiplier_array, self.rule, self.fill(table), out)
        return out

    def row_ids(self, tokens: Any, token_map: Any, participates: Any = None, lookback: Any = None,
                lookback_participates: Any = None) -> np.ndarray:
        """The rows (spec A5, B3) of a sequence's T tokens in their layers' tables: int64 [T, L, columns]. Arguments as `keys`."""
        from ssdgram.kernels.hash import rows_of_keys

        keys = self.keys(tokens, token_map, participates, lookback, lookback_participates)
        out = np.empty((len(keys), len(self.layers), self.columns), np.int64)
        rows_of_keys(keys, self.prime_array, self.offset_array, out)
        return out

    def dead_keys(self, token_map: Any) -> np.ndarray:
        """The keys of a position that takes no part (all slots blocked, A6): int64 [L, orders]."""
        return self.keys(np.zeros(1, np.int32), token_map, participates=np.zeros(1, bool))[0]


# ---------------------------------------------------------------- configs


class _Fields:
    """A config's fields, read with a type and a range each."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{name} is missing: expected an integer of {low} .. {high}")
            return default
        return _integer(name, value, low, high)

    def optional(self, name: str, low: int, high: int) -> int | None:
        return None if self._values.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, low: int, high: int, length: int | None = None) -> list[int]:
        value = self._values.get(name)
        if not isinstance(value, (list, tuple)) or not value or len(value) > MAX_COLUMNS:
            raise ConfigError(f"{name} is {_show(value)}: expected a list of integers of {low} .. {high}")
        if length is not None and len(value) != length:
            raise ConfigError(f"{name} has {len(value)} entries: expected {length}")
        return [_integer(f"{name}[{k}]", entry, low, high) for k, entry in enumerate(value)]


def _from_engram(fields: _Fields) -> Geometry:
    """Spec A1, A3, A4."""
    layers = fields.integers("engram_layer_ids", 0, MAX_TOKEN_IDS)
    n = fields.integer("engram_max_ngram_size", 2, MAX_NGRAM)
    heads = fields.integer("engram_n_heads", 1, MAX_COLUMNS)
    _check_counts(layers, n - 1, heads, fields)
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
    primes = _deal_primes(starts, len(layers), heads, "engram_vocab_size")
    for layer, sizes, found in zip(layers, primes, rows):
        if sum(sizes) > found:
            raise ConfigError(f"engram_num_embeddings of layer {layer} is {found}: expected at least {sum(sizes)}, the sum of "
                              f"its {len(sizes)} primes from engram_vocab_size = {_show(fields.get('engram_vocab_size'))} on")
    return Geometry(
        family=ENGRAM, layers=tuple(layers), orders=n - 1, heads=heads, primes=primes, offsets=_running_sums(primes),
        multipliers=tuple(engram_multipliers(compressed, layer, n) for layer in layers), table_rows=tuple(rows),
        row_dim=row_dim, encoding="fp8_ue8m0", vocab_size=vocab_size, compressed_vocab_size=compressed,
        pad_token_id=pad, eos_token_id=None, image_token_id=_image_token(fields))


def _from_ple(fields: _Fields) -> Geometry:
    """Spec B1, B2."""
    one_based = sorted(fields.integers("ple_layer_ids", 1, MAX_TOKEN_IDS))
    layers = [layer - 1 for layer in one_based]
    n = fields.integer("ngram_size", 2, MAX_NGRAM, 3)
    heads = fields.integer("heads_per_ngram", 1, MAX_COLUMNS, 8)
    _check_counts(layers, n - 1, heads, fields)
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
        raise ConfigError(f"ple_embedding_dtype is {_show(dtype)}: expected one of {list(_PLE_ENCODINGS)}")
    primes = _deal_primes([base] * (n - 1), len(layers), heads, "ngram_vocab_size_base")
    return Geometry(
        family=PLE, layers=tuple(layers), orders=n - 1, heads=heads, primes=primes, offsets=_running_sums(primes),
        multipliers=tuple(ple_multipliers(vocab_size, seed, k, n) for k in range(len(layers))),
        table_rows=tuple(-(-sum(sizes) // multiple) * multiple for sizes in primes), row_dim=width // columns,
        encoding=_PLE_ENCODINGS[dtype], vocab_size=vocab_size, compressed_vocab_size=None, pad_token_id=None,
        eos_token_id=eos, image_token_id=_image_token(fields))


def engram_multipliers(compressed_size: int, layer: int, n: int) -> _ints:
    """The n odd multipliers of decoder layer `layer` (spec A4)."""
    known = KNOWN_MULTIPLIERS.get((compressed_size, layer))
    if known is not None and n <= len(known):                # a shorter draw of the same seed is a prefix of a longer one
        return known[:n]
    bound = max(1, INT64_MAX // compressed_size // 2)
    draws = np.random.Generator(np.random.PCG64(10007 * layer)).integers(0, bound, size=n, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def ple_multipliers(vocab_size: int, seed: int, dense_layer: int, n: int) -> _ints:
    """The n odd multipliers of PLE layer number `dense_layer` (0, 1, ..) (spec B2)."""
    half = max(1, INT64_MAX // vocab_size // 2)
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    result = []
    for i in range(n):
        value = (seed + 10007 * dense_layer + golden * (i + 2)) & mask   # + golden * (i + 1), then splitmix64's own step
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        result.append(2 * ((value ^ (value >> 31)) % half) + 1)
    return tuple(result)


def _check_counts(layers: list[int], orders: int, heads: int, fields: _Fields) -> None:
    """The counts that bound all later work, before any of it."""
    if len(set(layers)) != len(layers):
        raise ConfigError(f"the layer ids are {_show(layers)} (0-based): expected each once")
    if len(layers) * orders > MAX_GROUPS:
        raise ConfigError(f"{len(layers)} layers of {orders} orders: expected at most {MAX_GROUPS} pairs of layer and order")
    if len(layers) * orders * heads > MAX_COLUMNS:
        raise ConfigError(f"{len(layers)} layers x {orders} orders x {heads} heads: expected at most {MAX_COLUMNS} columns")
    depth = fields.optional("num_hidden_layers", 1, MAX_TOKEN_IDS)
    if depth is not None and max(layers) >= depth:
        raise ConfigError(f"layer {max(layers)} (0-based) has an n-gram table: expected layers below num_hidden_layers = {depth}")


def _deal_primes(starts: list[int], layers: int, heads: int, name: str) -> tuple[_ints, ...]:
    """[L][columns]: primes from each order's start on, none twice, in (layer, order, head) order (spec A3, B2)."""
    if sum(starts) * heads > INT64_MAX:
        raise ConfigError(f"{name} is {_show(starts[0])}: {len(starts) * heads} columns of that size overflow 63-bit row ids")
    used: set[int] = set()
    search = {start: consecutive_primes(start) for start in starts}
    dealt = []
    for _ in range(layers):
        sizes: list[int] = []
        for start in starts:
            for _ in range(heads):
                prime = next(prime for prime in search[start] if prime not in used)
                used.add(prime)
                sizes.append(prime)
        if sum(sizes) > INT64_MAX:
            raise ConfigError(f"{name} is {_show(starts[0])}: the sum of the {len(sizes)} primes overflows 63-bit row ids")
        dealt.append(tuple(sizes))
    return tuple(dealt)


def _running_sums(primes: tuple[_ints, ...]) -> tuple[_ints, ...]:
    return tuple(tuple(sum(sizes[:c]) for c in range(len(sizes))) for sizes in primes)


def _image_token(fields: _Fields) -> int | None:
    return fields.optional("image_token_id", 0, MAX_TOKEN_IDS)


# ---------------------------------------------------------------- checks


def _check(g: Geometry) -> None:
    """Every field of a geometry against every other; raises ConfigError."""
    if g.family not in (ENGRAM, PLE):
        raise ConfigError(f"family is {_show(g.family)}: expected {ENGRAM!r} or {PLE!r}")
    if not isinstance(g.encoding, str) or g.encoding not in ENCODINGS:
        raise ConfigError(f"encoding is {_show(g.encoding)}: expected one of {list(ENCODINGS)}")
    _integer("orders", g.orders, 1, MAX_NGRAM - 1)
    _integer("heads", g.heads, 1, MAX_COLUMNS)
    _vector("layers", g.layers, None, 0, MAX_TOKEN_IDS)
    _check_counts(list(g.layers), g.orders, g.heads, _Fields({}))
    _integer("row_dim", g.row_dim, 1, MAX_ROW_DIM)
    bits, block = ENCODINGS[g.encoding]
    if g.row_dim % max(block, 8 // bits, 1):
        raise ConfigError(f"a row has {g.row_dim} values: expected a multiple of {block} for {g.encoding}")
    if g.vocab_size is not None:
        _integer("vocab_size", g.vocab_size, 1, MAX_TOKEN_IDS)
    if g.image_token_id is not None:
        _integer("image_token_id", g.image_token_id, 0, MAX_TOKEN_IDS)
    if g.family == ENGRAM:
        ids = _integer("compressed_vocab_size", g.compressed_vocab_size, 1, g.vocab_size or MAX_TOKEN_IDS)
        _integer("pad_token_id", g.pad_token_id, 0, (g.vocab_size or MAX_TOKEN_IDS) - 1)
        absent = {"eos_token_id": g.eos_token_id}
    else:
        ids = _integer("vocab_size", g.vocab_size, 1, MAX_TOKEN_IDS)
        _integer("eos_token_id", g.eos_token_id, 0, ids - 1)
        absent = {"compressed_vocab_size": g.compressed_vocab_size, "pad_token_id": g.pad_token_id}
    for name, value in absent.items():
        if value is not None:
            raise ConfigError(f"{name} is {_show(value)}: expected none for the family {g.family}")
    count = len(g.layers)
    _vector("table_rows", g.table_rows, count, 1, INT64_MAX)
    for name in ("primes", "offsets", "multipliers"):
        value = getattr(g, name)
        if not isinstance(value, tuple) or len(value) != count:
            raise ConfigError(f"{name} is {_show(value)}: expected one list for each of {count} layers")
    for index, rows in enumerate(g.table_rows):
        _vector(f"primes[{index}]", g.primes[index], g.columns, 1, rows)
        _vector(f"offsets[{index}]", g.offsets[index], g.columns, 0, rows)
        _vector(f"multipliers[{index}]", g.multipliers[index], g.orders + 1, 0, INT64_MAX // max(ids - 1, 1))
        for column, (size, offset) in enumerate(zip(g.primes[index], g.offsets[index])):
            if offset + size > rows:
                raise ConfigError(f"column {column} of layer {g.layers[index]} ends at row {offset + size}: "
                                  f"expected at most {rows}, the rows of its table")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {_show(value)}: expected an integer of {low} .. {high}")
    return value


def _vector(name: str, value: Any, length: int | None, low: int, high: int) -> None:
    if not isinstance(value, tuple) or not value or length not in (None, len(value)):
        raise ConfigError(f"{name} is {_show(value)}: expected {length or 'a list of'} integers of {low} .. {high}")
    for k, entry in enumerate(value):
        _integer(f"{name}[{k}]", entry, low, high)


def _show(value: Any) -> str:
    """A short repr: a config may hold anything of any length."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _tuples(value: Any, depth: int = 2) -> Any:
    if isinstance(value, (list, tuple)) and depth > 0:
        return tuple(_tuples(entry, depth - 1) for entry in value)
    return value


def _rows(value: Any, layers: int) -> tuple[_ints, ...]:
    """A [L][k] tuple of Python ints from nested lists or integer arrays (NumPy or torch); ConfigError otherwise."""
    array = np.asarray(value)
    if array.ndim == 1 and layers == 1:
        array = array[None]
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ConfigError(f"constants are {array.dtype} {list(array.shape)}: expected integers, a row for each of {layers} layers")
    return tuple(tuple(int(entry) for entry in row) for row in array)


def _read_json(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): expected a model's config.json") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: expected a model's config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): expected a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {_show(config)}: expected an object")
    return config
