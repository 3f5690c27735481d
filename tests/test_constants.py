"""Primes and multipliers: against the golden constants, and primality against trial division."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from vectors import HASH_CASES, PLE_CASES, engram_case, ple_config, read_json

from ssdgram.constants import (
    KNOWN_MULTIPLIERS,
    consecutive_primes,
    deal_primes,
    engram_multipliers,
    is_prime,
    ple_multipliers,
    running_sums,
)
from ssdgram.errors import ConfigError
from ssdgram.geometry import Geometry


def test_primality_of_small_numbers_is_that_of_a_sieve():
    sieve = np.ones(20_000, bool)
    sieve[:2] = False
    for p in range(2, 142):
        sieve[p * p::p] = False
    assert [n for n in range(-3, 20_000) if is_prime(n)] == np.flatnonzero(sieve).tolist()
    assert is_prime(61)                                      # a public implementation calls it composite


@pytest.mark.parametrize("number, prime", [
    (2_147_483_647, True), (3_215_031_751, False), (3_474_749_660_383, False), (341_550_071_728_321, False),
    (3_825_123_056_546_413_051, False), (2**61 - 1, True), (2**63 - 25, True), (2**63 - 1, False), (4_294_967_291**2, False),
])
def test_primality_of_large_numbers(number, prime):
    """Strong pseudoprimes to the first bases among them."""
    assert is_prime(number) is prime


def test_the_primes_from_a_start_include_it():
    assert list(itertools.islice(consecutive_primes(59), 3)) == [59, 61, 67]
    assert list(itertools.islice(consecutive_primes(1), 4)) == [2, 3, 5, 7]


def test_v41_constants():
    golden = read_json("v41_constants.json")
    geometry = Geometry.from_config(golden["config"])
    assert np.array_equal(geometry.prime_array.reshape(2, 3, 8), golden["primes"])
    assert np.array_equal(geometry.offset_array, golden["offsets"])
    assert np.array_equal(geometry.multiplier_array, golden["multipliers"])
    assert list(geometry.rows_per_layer) == golden["rows_per_layer"]


@pytest.mark.parametrize("name", HASH_CASES[:-1])
def test_small_engram_constants(name):
    geometry, _, _, _ = engram_case(name)
    golden = read_json(f"hash_{name}.json")["config"]
    assert np.array_equal(geometry.prime_array.ravel(), np.ravel(golden["primes"]))
    assert np.array_equal(geometry.offset_array, golden["offsets"])
    assert np.array_equal(geometry.multiplier_array, golden["multipliers"])


@pytest.mark.parametrize("name", PLE_CASES)
def test_ple_constants(name):
    config, golden = ple_config(name)
    geometry = Geometry.from_config(config)
    assert list(geometry.multipliers[-1]) == golden["layer_multipliers"]
    assert list(geometry.primes[-1]) == golden["ngram_heads_vocab_sizes"]
    assert list(geometry.offsets[-1]) == golden["ngram_heads_offsets"]
    assert geometry.rows_per_layer[-1] == golden["total_rows"]
    assert geometry.table_rows[-1] == golden["padded_rows"]
    assert ple_multipliers(config["vocab_size"], config["seed"], config["ple_dense_layer_id"], config["ngram_size"]) == \
        geometry.multipliers[-1]


def test_the_table_of_known_multipliers_is_what_numpy_draws():
    for (size, layer), known in KNOWN_MULTIPLIERS.items():
        bound = (2**63 - 1) // size // 2
        for n in range(2, 5):
            draws = np.random.default_rng(10007 * layer).integers(0, bound, size=n, dtype=np.int64)
            assert engram_multipliers(size, layer, n) == known[:n] == tuple(2 * draws + 1)


def test_layer_0_and_other_sizes_fall_back_to_numpy():
    assert engram_multipliers(23, 0, 3) == (255431939799501613, 108188836158461991, 16431045866282523)
    demo = read_json("demo.json")                            # layer 15 of a model with V4.1's vocabulary
    assert list(engram_multipliers(demo["compressed_vocab"], 15, 3)) == demo["multipliers"]["15"]
    assert engram_multipliers(99092, 1, 5)[:2] == KNOWN_MULTIPLIERS[99092, 1][:2]   # longer than the table: drawn


def test_primes_are_dealt_once_even_from_different_starts():
    dealt = deal_primes([10, 12], 2, 2, "sizes")
    assert dealt == ((11, 13, 17, 19), (23, 29, 31, 37))
    assert running_sums(dealt) == ((0, 11, 24, 41), (0, 23, 52, 83))


def test_primes_whose_sum_overflows():
    with pytest.raises(ConfigError, match="sizes is 4611686018427387904: 2 columns of that size overflow"):
        deal_primes([2**62], 1, 2, "sizes")
    with pytest.raises(ConfigError, match=r"sizes is 4611686018427387903: the sum of the 2 primes overflows"):
        deal_primes([2**62 - 1], 1, 2, "sizes")
