"""Trace statistics against plain Python: reuse, duplicates, shared prefixes and what they leave."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import GOLDEN, read_json

from ssdgram.geometry import Geometry
from ssdgram.token_map import token_map
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_shapes import decode
from ssdgram.tools.trace_stats import duplicates, shared_prefixes, statistics


@pytest.fixture(scope="module")
def model():
    return Geometry.from_config(read_json("tiny_v41/config.json")), token_map(GOLDEN / "tiny_v41" / "tokenizer.json")


def documents(*lists):
    tokens = np.concatenate([np.array(one, np.int32) for one in lists]) if lists else np.empty(0, np.int32)
    return Trace.of_documents(tokens.astype(np.int32), np.cumsum([0, *map(len, lists)]).astype(np.int64), {})


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(3, 4), max_size=9), max_size=8), st.integers(1, 3))
def test_shared_prefixes_are_those_of_an_unbounded_cache_of_blocks(lists, block):
    seen, wanted = set(), []
    for one in lists:
        covered, known = 0, True
        for end in range(block, len(one) + 1, block):
            known = known and tuple(one[:end]) in seen
            covered = end if known else covered
        seen |= {tuple(one[:end]) for end in range(block, len(one) + 1, block)}
        wanted.append(covered)
    assert shared_prefixes(documents(*lists), block).tolist() == wanted


def test_a_sequence_that_goes_on_shares_no_prefix():
    trace = Trace(np.array([5, 6, 5, 6, 5, 6], np.int32), np.array([0, 2, 4, 6]), {}, np.array([0, 0, 1], np.uint8),
                  batches=np.array([0, 3]))
    assert shared_prefixes(trace, 1).tolist() == [0, 2, 0]


def test_keys_tell_prefixes_as_tokens_do():
    keys = np.array([[1, 2], [3, 4], [1, 2], [3, 4], [1, 2], [9, 9]])
    trace = Trace(np.empty(0, np.int32), np.array([0, 2, 4, 6]), {}, np.zeros(3, np.uint8), keys=keys)
    assert shared_prefixes(trace, 1).tolist() == [0, 2, 1]


def test_reuse_and_duplicates_are_counted(model):
    geometry, table = model
    random = np.random.default_rng(1)
    trace = documents(*(random.integers(3, 12, 60) for _ in range(6)))
    figures = statistics(trace, geometry, table, bundle_bytes=100)
    keys = np.concatenate([geometry.keys(trace.tokens[a:b], table)[:, 0] for a, b in zip(trace.starts, trace.starts[1:])])
    for order in range(geometry.orders):
        distinct = len(set(keys[:, order].tolist()))
        of = figures["orders"][order + 2]
        assert of == {"requests": 360, "distinct": distinct, "again": pytest.approx(1 - distinct / 360, abs=1e-4)}
    steps = decode(trace, 16, geometry.orders)
    assert figures["duplicates"]["decode 16"] == duplicates(steps, geometry, table)
    assert figures["duplicates"]["decode 1"] == {2: 0.0, 3: 0.0, 4: 0.0}
    shares = [row["bytes"] for row in figures["working_set"]]
    assert shares == sorted(shares) and shares[0] == 100 * figures["working_set"][0]["bundles"]
    assert json.loads(json.dumps(figures))["positions"] == 360


def test_reuse_that_only_shared_prefixes_had_is_told_apart(model):
    geometry, table = model
    random = np.random.default_rng(2)
    prompt = random.integers(3, 300, 32)
    own = [random.integers(3, 300, 20) for _ in range(8)]
    prefix = statistics(documents(*([*prompt, *rest] for rest in own)), geometry, table)["prefix"]
    assert prefix["covered"] == pytest.approx(7 * 32 / (8 * 52), abs=1e-4) and prefix["sequences"] == 7
    last = prefix["row_cache"][-1]
    assert last["all"] > 0.4 and last["behind_prefix_cache"] < 0.1 and last["reuse_gone"] > 0.8
    apart = statistics(documents(*own), geometry, table)["prefix"]
    assert apart["covered"] == 0 and all(row["reuse_gone"] == 0 for row in apart["row_cache"])


def test_a_trace_of_keys_has_statistics_without_a_model():
    keys = np.array([[1, 2], [3, 4], [1, 2], [5, 6]])
    trace = Trace(np.empty(0, np.int32), np.array([0, 2, 4]), {}, np.zeros(2, np.uint8), batches=np.array([0, 2]), keys=keys)
    figures = statistics(trace, None, None)
    assert figures["orders"][2] == {"requests": 4, "distinct": 3, "again": 0.25} and figures["duplicates"]["recorded"] == {2: 0.25, 3: 0.25}
    assert "bytes" not in figures["working_set"][0]


def test_an_empty_trace_has_statistics(model):
    figures = statistics(documents(), *model)
    assert figures["positions"] == 0 and figures["prefix"]["covered"] == 0.0
