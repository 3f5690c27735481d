"""The table of slots without entry against a dict."""

import numpy as np
import pytest
from cache_twins import plain_mix
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.cache import overflow as o


def table(entries):
    made = np.zeros(o.cells(entries), o.CELL)
    o.init(made)
    return made


def crowd(cells, home, count):
    """Keys that all have the same home in a table of `cells` cells."""
    return [(x, 1) for x in range(100_000) if plain_mix(x, 1) & cells - 1 == home][:count]


@pytest.mark.parametrize(("entries", "cells"), [(0, 2), (1, 2), (2, 4), (3, 8), (4, 8), (5, 16), (1000, 2048)])
def test_the_table_is_a_power_of_two_and_at_most_half_full(entries, cells):
    assert o.cells(entries) == cells


CROWDED = crowd(16, 14, 6) + crowd(16, 15, 5) + crowd(16, 0, 5) + [(0, 0), (0, 1), (0, 254), (2**63 - 1, 7)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "remove", "find"]), st.sampled_from(CROWDED), st.integers(0, 2**31 - 1)),
                max_size=120))
def test_it_does_what_a_dict_does(taken):
    overflow, model = table(8), {}
    for action, (x, group), slot in taken:
        if action == "insert" and (len(model) < 8 or (x, group) in model):
            assert o.insert(overflow, x, group, slot)
            model[x, group] = slot
        elif action == "remove":
            assert o.remove(overflow, x, group) == model.pop((x, group), -1)
        for key in CROWDED:
            assert o.find(overflow, *key) == model.get(key, -1)
        assert o.size(overflow) == len(model)


def test_removal_closes_the_gap_over_the_end_of_the_table():
    overflow = table(8)
    keys = crowd(16, 15, 4)                                  # cells 15, 0, 1, 2
    for slot, key in enumerate(keys):
        o.insert(overflow, *key, slot)
    assert o.remove(overflow, *keys[0]) == 0
    assert [o.find(overflow, *key) for key in keys] == [-1, 1, 2, 3]
    assert [int(group) for group in overflow["group"][[15, 0, 1, 2]]] == [1, 1, 1, o.EMPTY]


def test_removal_leaves_what_is_at_home():
    overflow = table(8)
    before, home = crowd(16, 3, 2), crowd(16, 5, 1)[0]       # cells 3, 4 and 5
    for slot, key in enumerate([*before, home]):
        o.insert(overflow, *key, slot)
    o.remove(overflow, *before[0])
    assert o.find(overflow, *home) == 2 and overflow["x"][5] == home[0]


def test_equal_x_of_two_groups_are_two_entries():
    """Even where both are at home in one cell."""
    meeting = next(x for x in range(1000) if plain_mix(x, 0) % 8 == plain_mix(x, 1) % 8)
    for x in (0, meeting):
        overflow = table(4)
        o.insert(overflow, x, 0, 10)
        assert o.find(overflow, x, 1) == -1
        o.insert(overflow, x, 1, 11)
        assert (o.find(overflow, x, 0), o.find(overflow, x, 1), o.size(overflow)) == (10, 11, 2)
        assert (o.remove(overflow, x, 0), o.find(overflow, x, 1)) == (10, 11)


def test_a_full_table_refuses_and_still_answers():
    overflow = table(2)
    keys = [(x, 3) for x in range(5)]
    assert [bool(o.insert(overflow, *key, slot)) for slot, key in enumerate(keys)] == [True] * 4 + [False]
    assert [o.find(overflow, *key) for key in keys] == [0, 1, 2, 3, -1]
    assert o.remove(overflow, *keys[4]) == -1 and o.remove(overflow, *keys[0]) == 0
    assert o.insert(overflow, *keys[4], 4) and o.find(overflow, *keys[4]) == 4
