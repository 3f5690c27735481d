"""Geometry: value semantics, the JSON form, constants from a checkpoint, token maps, keys and rows through the public calls."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
from vectors import HASH_CASES, PLE_CASES, arrays, engram_case, ple_config, read_json, v41_map

from ssdgram.errors import ConfigError, TokenError, TokenMapError
from ssdgram.geometry import Geometry

V41 = Geometry.from_config(read_json("v41_constants.json")["config"])
MAP = v41_map()


GEOMETRIES = [*(engram_case(name)[0] for name in HASH_CASES), *(Geometry.from_config(ple_config(name)[0]) for name in PLE_CASES)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=[*HASH_CASES, *PLE_CASES])
def test_json_pickle_and_equality(geometry):
    text = json.dumps(geometry.to_json())
    assert Geometry.from_json(json.loads(text)) == geometry
    assert geometry.multiplier_array.dtype == np.int64       # cached, and not part of what pickles
    assert pickle.loads(pickle.dumps(geometry)) == geometry
    assert hash(pickle.loads(pickle.dumps(geometry))) == hash(geometry)
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.heads = 1


SMALL = engram_case("small_c")[0]
SMALL_PLE = Geometry.from_config(ple_config("small")[0])


@pytest.mark.parametrize("geometry, field, value, message", [
    (SMALL, "family", "longcat", "family is 'longcat': expected 'engram' or 'ple'"),
    (SMALL, "encoding", "int4", "encoding is 'int4': expected one of"),
    (SMALL, "encoding", [], r"encoding is \(\): expected one of"),
    (SMALL, "orders", 0, "orders is 0: expected an integer of 1"),
    (SMALL, "orders", 16, "orders is 16: expected an integer of 1 .. 15"),
    (SMALL, "heads", True, "heads is True"),
    (SMALL, "layers", [], r"layers is \(\): expected a list of integers"),
    (SMALL, "layers", 7, "layers is 7"),
    (SMALL, "layers", [-7], r"layers\[0\] is -7"),
    (SMALL, "row_dim", 33, "a row has 33 values: expected a multiple of 32"),
    (SMALL, "vocab_size", 0, "vocab_size is 0"),
    (SMALL, "compressed_vocab_size", None, "compressed_vocab_size is None"),
    (SMALL, "pad_token_id", -1, "pad_token_id is -1"),
    (SMALL, "eos_token_id", 3, "eos_token_id is 3: expected none for the family engram"),
    (SMALL, "image_token_id", -3, "image_token_id is -3"),
    (SMALL, "table_rows", [4], r"primes\[0\]\[0\] is 5: expected an integer of 1 .. 4"),
    (SMALL, "table_rows", [5, 5], r"table_rows is \(5, 5\): expected 1 integers"),
    (SMALL, "primes", [[5], [5]], "expected one list for each of 1 layers"),
    (SMALL, "primes", [[5, 7]], r"primes\[0\] is \(5, 7\): expected 1 integers"),
    (SMALL, "primes", [[0]], r"primes\[0\]\[0\] is 0"),
    (SMALL, "offsets", [[1]], "column 0 of layer 7 ends at row 6: expected at most 5"),
    (SMALL, "offsets", [[-1]], r"offsets\[0\]\[0\] is -1"),
    (SMALL, "multipliers", [[1, -1]], r"multipliers\[0\]\[1\] is -1"),
    (SMALL, "multipliers", [[1, 2**61]], "is 2305843009213693952: expected an integer of 0 .. 1152921504606846975"),
    (SMALL, "multipliers", [[1, [3]]], r"multipliers\[0\]\[1\] is \[3\]"),
    (SMALL_PLE, "vocab_size", None, "vocab_size is None"),
    (SMALL_PLE, "eos_token_id", None, "eos_token_id is None"),
    (SMALL_PLE, "pad_token_id", 1, "pad_token_id is 1: expected none for the family ple"),
    (SMALL_PLE, "compressed_vocab_size", 9, "compressed_vocab_size is 9: expected none"),
])
def test_json_is_not_trusted(geometry, field, value, message):
    with pytest.raises(ConfigError, match=message):
        Geometry.from_json({**geometry.to_json(), field: value})


def test_json_with_other_fields():
    data = SMALL.to_json()
    with pytest.raises(ConfigError, match=r"missing \[\], unknown \['extra'\]"):
        Geometry.from_json({**data, "extra": 1})
    del data["heads"]
    with pytest.raises(ConfigError, match=r"missing \['heads'\], unknown \[\]"):
        Geometry.from_json(data)
    with pytest.raises(ConfigError, match=r"the geometry is \[\]: expected an object"):
        Geometry.from_json([])


def test_constants_of_a_checkpoint():
    weights = arrays("ple_layer_small.npz")
    multipliers, sizes, offsets = (weights[f"w/ple_embedding/{name}"] for name in (
        "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"))
    base = dataclasses.replace(SMALL_PLE, heads=4, primes=((1,) * 8,), offsets=((0,) * 8,), table_rows=(928,), vocab_size=200,
                               multipliers=((1, 1, 1),), eos_token_id=int(weights["eos_token_id"]))
    geometry = base.with_constants(multipliers, sizes, offsets)
    assert np.array_equal(geometry.row_ids(weights["token_ids"], None)[:, 0], weights["row_ids"])
    assert geometry == base.with_constants(multipliers[None], [sizes.tolist()], offsets[None])
    for bad in (multipliers.astype(float), multipliers[:2], [[1, 2], [3]], 5, np.zeros((2, 3), np.int64)):
        with pytest.raises(ConfigError):
            base.with_constants(bad, sizes, offsets)


def test_encoding_of_a_checkpoint():
    geometry = SMALL_PLE.with_encoding("fp8_global", [200])
    assert (geometry.row_bytes, geometry.table_rows) == (16, (200,))
    with pytest.raises(ConfigError, match="column 3 of layer 1 ends at row 152: expected at most 151"):
        SMALL_PLE.with_encoding("bf16", [151])


# ------------------------------------------------------------ golden rows, through the public call


@pytest.mark.parametrize("name", HASH_CASES)
def test_engram_rows(name):
    geometry, table, golden, cases = engram_case(name)
    for case, description in cases.items():
        tokens, part, expected = (golden[f"{case}/{what}"] for what in ("token_ids", "participates", "row_ids"))
        found = geometry.row_ids(tokens, table, part)
        assert found.dtype == np.int64 and np.array_equal(found, expected), case
        start = 0
        for length in description["chunks"] or []:
            chunk = slice(start, start + length)
            part_of = geometry.row_ids(tokens[chunk], table, part[chunk], tokens[:start], part[:start])
            assert np.array_equal(part_of, expected[chunk]), (case, chunk)
            start += length


@pytest.mark.parametrize("name", PLE_CASES)
def test_ple_rows(name):
    geometry = Geometry.from_config(ple_config(name)[0])
    golden = arrays("ple_hash.npz")
    for case in ("one", "short", "long", "eos"):
        tokens, expected = golden[f"{name}/{case}/token_ids"], golden[f"{name}/{case}/row_ids"]
        assert np.array_equal(geometry.row_ids(tokens, None)[:, -1], expected), case
        start = 0
        for length in golden[f"{name}/{case}/chunks"]:
            part_of = geometry.row_ids(tokens[start:start + length], None, lookback=tokens[max(0, start - 4):start])
            assert np.array_equal(part_of[:, -1], expected[start:start + length]), case
            start += length


def test_the_demos_hash():
    demo, golden = read_json("demo.json"), arrays("demo.npz")
    geometry = Geometry.from_config({
        **read_json("v41_constants.json")["config"], "engram_layer_ids": demo["layer_ids"], "engram_max_ngram_size": 3,
        "engram_vocab_size": demo["engram_vocab_size"], "engram_num_embeddings": [20_000_000, 20_000_000]})
    found = geometry.row_ids(golden["token_ids"], MAP) - geometry.offset_array
    assert np.array_equal(found[:, 0], golden["hash_l1"]) and np.array_equal(found[:, 1], golden["hash_l15"])


def test_dead_keys_and_rows():
    golden = read_json("v41_constants.json")
    keys = V41.dead_keys(MAP)
    rows = keys.repeat(8).reshape(2, 24) % V41.prime_array + V41.offset_array
    assert np.array_equal(rows, golden["dead_token_row_ids"])


def test_after_a_bos_neighbouring_orders_share_x_and_never_a_bundle():
    """BOS compresses to 0, so it adds nothing to x: what tells the orders apart is the group, and the rows differ."""
    tokens = np.array([0, 4000, 5000, 6000])
    keys, rows = V41.keys(tokens, MAP), V41.row_ids(tokens, MAP)
    assert MAP[0] == 0
    for l in range(2):
        assert keys[2, l, 0] == keys[2, l, 1] and keys[3, l, 1] == keys[3, l, 2]
        assert not set(rows[2, l, :8]) & set(rows[2, l, 8:16])
    groups = np.arange(V41.groups).reshape(1, 2, 3) + np.zeros((4, 1, 1), np.int64)
    assert len(set(zip(groups.ravel().tolist(), keys.ravel().tolist()))) == keys.size


# ------------------------------------------------------------ token maps and ids


@pytest.mark.parametrize("table, message", [
    (None, "compresses its vocabulary to 99092 ids: expected a token map .*, found None"),
    (MAP[:100], "compressed ids are 0 .. [0-9]+: expected 0 .. 99091"),
    (MAP + 1, "compressed ids are 1 .. 99092: expected 0 .. 99091"),
    (MAP - 1, "compressed ids are -1 .. 99090: expected 0 .. 99091"),
    (MAP.astype(float), "the token map is float64"),
    (MAP[None], r"the token map is int32 \[1, 129280\]"),
    (np.empty(0, np.int32), r"the token map is int32 \[0\]"),
    ("map", "the token map is <U3"),
])
def test_maps_that_do_not_fit(table, message):
    with pytest.raises(TokenMapError, match=message):
        V41.keys([1, 2], table)


def test_maps_of_other_types_are_converted_and_ple_has_none():
    for table in (MAP.astype(np.int64), MAP.astype(">i4"), MAP[::-1][::-1], MAP.tolist()):
        checked = V41.checked_map(table)
        assert checked.dtype == np.int32 and checked.flags.c_contiguous and checked.flags.writeable
        assert np.array_equal(checked, MAP)
    assert len(SMALL_PLE.checked_map(None)) == 0
    with pytest.raises(TokenMapError, match="does not compress its vocabulary"):
        SMALL_PLE.keys([1], MAP)
    short = dataclasses.replace(SMALL, pad_token_id=16)
    with pytest.raises(TokenMapError, match="the token map has 16 ids: expected more than engram_pad_token_id = 16"):
        short.checked_map(engram_case("small_c")[1])


@pytest.mark.parametrize("tokens, lookback, message", [
    ([5, -1, 7], None, "position 1 holds token id -1: expected 0 .. 129279 .a vocabulary of 129280"),
    ([5, 129280], None, "position 1 holds token id 129280: expected 0 .. 129279"),
    ([5, 2**40, -1], None, "position 1 holds token id 1099511627776:"),
    (np.array([2**63], np.uint64), None, "position 0 holds token id 9223372036854775808:"),
    ([5], [3, -7, 1], r"lookback position -2 \(before the first token\) holds token id -7"),
    ([[5]], None, r"tokens are int64 \[1, 1\]: expected integers of shape \[T\]"),
    ([5.0], None, r"tokens are float64 \[1\]"),
])
def test_ids_that_are_refused(tokens, lookback, message):
    with pytest.raises(TokenError, match=message):
        V41.keys(tokens, MAP, lookback=lookback)


def test_ids_that_are_not_looked_at():
    part = [True, False, True]
    expected = V41.keys([5, 0, 7], MAP, part)
    for placeholder in (-1, -2**31, 129280, 2**31 - 1, 2**40, -2**63):
        assert np.array_equal(V41.keys([5, placeholder, 7], MAP, part), expected)
    before = V41.keys([7], MAP, lookback=[-9, 4, 5, 6])      # older than n - 1
    assert np.array_equal(before, V41.keys([7], MAP, lookback=[4, 5, 6]))
    assert np.array_equal(V41.keys([7], MAP, lookback=[2**40, 5], lookback_participates=[0, 1]),
                          V41.keys([7], MAP, lookback=[0, 5], lookback_participates=[0, 1]))


def test_the_vocabulary_is_the_smaller_of_map_and_config():
    assert V41.vocabulary(MAP) == 129280
    assert V41.vocabulary(MAP[:99]) == 99
    assert SMALL.vocab_size is None and SMALL.vocabulary(np.zeros(16, np.int32)) == 16
    assert SMALL_PLE.vocabulary(None) == SMALL_PLE.vocabulary(np.empty(0, np.int32)) == 97


def test_no_tokens():
    assert V41.row_ids([], MAP).shape == (0, 2, 24)
