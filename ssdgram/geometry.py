"""Geometry: which rows a token needs, as numbers: layers, orders, heads, primes, offsets, multipliers, row format.

Two families are known: "engram" (DeepSeek-V4.1, spec part A) and "ple" (Qwen4Exp, spec part B). A Geometry comes from a
model's config, or from a manifest (`from_json`); it is immutable, compares by value and pickles. It knows neither files
nor caches. Invariant: whatever built it, every constant was checked, so that no hash overflows 63 bits, no key is
negative and no row id lies outside its column's bucket; and no config makes it work or allocate without bound.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ssdgram.constants import INT64_MAX, Ints
from ssdgram.errors import ConfigError, TokenMapError
from ssdgram.fields import Fields, integer, show, vector

MAX_TOKEN_IDS = 2**31 - 1                                    # ids are int32
MAX_NGRAM = 16
MAX_GROUPS = 255                                             # a group is a u8, and 255 means "empty"
MAX_COLUMNS = 4096                                           # of all layers together: bounds the prime search
MAX_ROW_DIM = 65536

ENGRAM, PLE = "engram", "ple"
ENCODINGS = {                                                # bits of a code, values that share a scale byte (0: none)
    "fp8_ue8m0": (8, 32),
    "bf16": (16, 0),
    "fp8_global": (8, 0),
    "nvfp4": (4, 16),
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The n-gram tables of one model. L layers, `orders` = n - 1 orders (2-gram .. n-gram), columns = orders x heads.

    Column c = order index x heads + head; its bucket is rows [offset, offset + prime) of its layer's table.
    """

    family: str                                              # "engram" or "ple"
    layers: Ints                                            # 0-based decoder layers, in hash order
    orders: int
    heads: int                                               # per order
    primes: tuple[Ints, ...]                                # [L][columns] rows of each column's bucket
    offsets: tuple[Ints, ...]                               # [L][columns] first row of each column's bucket
    multipliers: tuple[Ints, ...]                           # [L][orders + 1]
    table_rows: Ints                                        # [L] rows of the checkpoint's table (>= what the columns use)
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
    def rows_per_layer(self) -> Ints:
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
        from ssdgram.configs import parse_config, read_config

        return parse_config(source) if isinstance(source, Mapping) else read_config(Path(source))

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types; `from_json` takes it back."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Geometry:
        """The inverse of `to_json`: exactly its keys, every value checked; ConfigError otherwise."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"the geometry is {show(data)}: expected an object")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(data) != names:
            raise ConfigError(f"the geometry's fields are not those expected: missing {sorted(names - set(data))}, "
                              f"unknown {show(sorted(map(str, set(data) - names)))}")
        return cls(**{name: _tuples(value) for name, value in data.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return Geometry.from_json, (self.to_json(),)

    def with_constants(self, multipliers: Any, sizes: Any, offsets: Any) -> Geometry:
        """This geometry with a checkpoint's own constants (PLE's int64 buffers, spec B2): [L][orders + 1], [L][columns] twice.

        For one layer the vectors may come without the leading dimension. ConfigError if they do not fit the table.
        """
        return dataclasses.replace(self, multipliers=_rows(multipliers, len(self.layers)),
                                   primes=_rows(sizes, len(self.layers)), offsets=_rows(offsets, len(self.layers)))

    def with_encoding(self, encoding: str, table_rows: Iterable[int] | None = None) -> Geometry:
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
        if self.eos_token_id is not None:                    # PLE, and only PLE (_check)
            return self.eos_token_id
        return int(cast(np.ndarray, token_map)[self.pad_token_id])

    def keys(self, tokens: Any, token_map: Any, participates: Any = None, lookback: Any = None,
             lookback_participates: Any = None) -> np.ndarray:
        """The n-gram keys x (spec A5, B3) of a sequence's T tokens: int64 [T, L, orders], all >= 0.

        `tokens`: integers [T], raw ids (NumPy, torch or a list). `participates`: bool [T], False where a token takes no part
        (DEAD, A6); its id is not looked at. `lookback`: the raw ids before the tokens, oldest first; None or shorter
        than n - 1: the sequence starts there; longer: the last n - 1 count. TokenError names the first bad id.
        """
        from ssdgram.kernels.hash import ngram_keys
        from ssdgram.sequence import Sequence, check_ids, flatten, on_host

        table = self.checked_map(token_map)
        sequences = [Sequence(on_host(tokens), participates, lookback, lookback_participates)]
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


# ---------------------------------------------------------------- checks


def _check(g: Geometry) -> None:
    """Every field of a geometry against every other; raises ConfigError."""
    if g.family not in (ENGRAM, PLE):
        raise ConfigError(f"family is {show(g.family)}: expected {ENGRAM!r} or {PLE!r}")
    if not isinstance(g.encoding, str) or g.encoding not in ENCODINGS:
        raise ConfigError(f"encoding is {show(g.encoding)}: expected one of {list(ENCODINGS)}")
    integer("orders", g.orders, 1, MAX_NGRAM - 1)
    integer("heads", g.heads, 1, MAX_COLUMNS)
    vector("layers", g.layers, None, 0, MAX_TOKEN_IDS)
    check_counts(list(g.layers), g.orders, g.heads, Fields({}))
    integer("row_dim", g.row_dim, 1, MAX_ROW_DIM)
    bits, block = ENCODINGS[g.encoding]
    if g.row_dim % max(block, 8 // bits, 1):
        raise ConfigError(f"a row has {g.row_dim} values: expected a multiple of {block} for {g.encoding}")
    if g.vocab_size is not None:
        integer("vocab_size", g.vocab_size, 1, MAX_TOKEN_IDS)
    if g.image_token_id is not None:
        integer("image_token_id", g.image_token_id, 0, MAX_TOKEN_IDS)
    if g.family == ENGRAM:
        ids = integer("compressed_vocab_size", g.compressed_vocab_size, 1, g.vocab_size or MAX_TOKEN_IDS)
        integer("pad_token_id", g.pad_token_id, 0, (g.vocab_size or MAX_TOKEN_IDS) - 1)
        absent = {"eos_token_id": g.eos_token_id}
    else:
        ids = integer("vocab_size", g.vocab_size, 1, MAX_TOKEN_IDS)
        integer("eos_token_id", g.eos_token_id, 0, ids - 1)
        absent = {"compressed_vocab_size": g.compressed_vocab_size, "pad_token_id": g.pad_token_id}
    for name, value in absent.items():
        if value is not None:
            raise ConfigError(f"{name} is {show(value)}: expected none for the family {g.family}")
    count = len(g.layers)
    vector("table_rows", g.table_rows, count, 1, INT64_MAX)
    for name in ("primes", "offsets", "multipliers"):
        value = getattr(g, name)
        if not isinstance(value, tuple) or len(value) != count:
            raise ConfigError(f"{name} is {show(value)}: expected one list for each of {count} layers")
    for index, rows in enumerate(g.table_rows):
        vector(f"primes[{index}]", g.primes[index], g.columns, 1, rows)
        vector(f"offsets[{index}]", g.offsets[index], g.columns, 0, rows)
        vector(f"multipliers[{index}]", g.multipliers[index], g.orders + 1, 0, INT64_MAX // max(ids - 1, 1))
        for column, (size, offset) in enumerate(zip(g.primes[index], g.offsets[index])):
            if offset + size > rows:
                raise ConfigError(f"column {column} of layer {g.layers[index]} ends at row {offset + size}: "
                                  f"expected at most {rows}, the rows of its table")


def check_counts(layers: list[int], orders: int, heads: int, fields: Fields) -> None:
    """The counts that bound all later work, before any of it."""
    if len(set(layers)) != len(layers):
        raise ConfigError(f"the layer ids are {show(layers)} (0-based): expected each once")
    if len(layers) * orders > MAX_GROUPS:
        raise ConfigError(f"{len(layers)} layers of {orders} orders: expected at most {MAX_GROUPS} pairs of layer and order")
    if len(layers) * orders * heads > MAX_COLUMNS:
        raise ConfigError(f"{len(layers)} layers x {orders} orders x {heads} heads: expected at most {MAX_COLUMNS} columns")
    depth = fields.optional("num_hidden_layers", 1, MAX_TOKEN_IDS)
    if depth is not None and max(layers) >= depth:
        raise ConfigError(f"layer {max(layers)} (0-based) has an n-gram table: expected layers below num_hidden_layers = {depth}")


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _tuples(value: Any, depth: int = 2) -> Any:
    if isinstance(value, (list, tuple)) and depth > 0:
        return tuple(_tuples(entry, depth - 1) for entry in value)
    return value


def _rows(value: Any, layers: int) -> tuple[Ints, ...]:
    """A [L][k] tuple of Python ints from nested lists or integer arrays (NumPy or torch); ConfigError otherwise."""
    try:
        array = np.asarray(value)
    except ValueError as error:                              # rows of different lengths
        raise ConfigError(f"constants are {show(value)}: expected one row of integers for each of the {layers} layers") from error
    if array.ndim == 1 and layers == 1:
        array = array[None]
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ConfigError(f"constants are {array.dtype} {list(array.shape)}: expected integers, one row for each of the "
                          f"{layers} layers")
    return tuple(tuple(int(entry) for entry in row) for row in array)
