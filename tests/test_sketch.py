"""The sketch of the past against a list."""

import numpy as np
from cache_twins import PlainSketch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.cache import sketch as s


def hashes(count, seed=0):
    return [np.uint64(h) for h in np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)]


steps = st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 15) | st.just(1))


@settings(deadline=None)
@given(st.lists(steps, max_size=150))
def test_it_remembers_and_recalls_as_a_list_would(taken):
    known = hashes(61)
    sketch, plain = s.allocate(2), PlainSketch()
    for remembers, number, count in taken:
        h = known[number]
        if remembers:
            s.remember(sketch, 1, h, count)
            plain.remember(int(h), count)
        else:
            assert s.recall(sketch, 1, h) == plain.recall(int(h))
        words = sketch[1]["ghost"]
        assert [(int(word) >> 4, int(word) & 15) for word in words if word] == plain.ghosts
        assert not words[len(plain.ghosts):].any()           # no word behind an empty one
    assert all(s.count_of(sketch, 1, h) == plain.count_of(int(h)) for h in known)
    assert not sketch[0]["ghost"].any()


def test_a_block_is_a_cache_line():
    assert s.BLOCK_BYTES == 64 and s.allocate(3).ctypes.data % 64 == 0


def test_the_last_two_dozen_are_remembered_and_those_asked_for_often_longer():
    sketch, known = s.allocate(1), hashes(200)
    s.remember(sketch, 0, known[0], 9)
    for h in known[1:9]:
        s.remember(sketch, 0, h, 2)
    for h in known[9:120]:
        s.remember(sketch, 0, h, 1)
    assert s.count_of(sketch, 0, known[8]) == 2              # behind it came 111 that were asked for once
    assert all(s.count_of(sketch, 0, h) == 1 for h in known[96:120])
    assert s.count_of(sketch, 0, known[60]) == 0


def test_what_was_recalled_is_forgotten():
    sketch, known = s.allocate(1), hashes(2)
    s.remember(sketch, 0, known[0], 5)
    assert (s.recall(sketch, 0, known[0]), s.recall(sketch, 0, known[0]), s.recall(sketch, 0, known[1])) == (5, 0, 0)


def test_fingerprint_zero_is_a_fingerprint():
    sketch, zero = s.allocate(1), np.uint64(0)
    assert s.count_of(sketch, 0, zero) == 0
    s.remember(sketch, 0, zero, 3)
    assert s.recall(sketch, 0, zero) == 3


def test_false_memories_are_below_one_per_cent():
    sketch, known = s.allocate(1), hashes(20_000, seed=1)
    for h in known[:100]:
        s.remember(sketch, 0, h, 1)
    assert np.mean([s.count_of(sketch, 0, h) > 0 for h in known[100:]]) < 0.01


def test_init_forgets():
    sketch = s.allocate(4)
    for h in hashes(50):
        s.remember(sketch, 3, h, 1)
    s.init(sketch)
    assert not sketch["ghost"].any()
