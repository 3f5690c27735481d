"""The directory's layout, hash, compare and probe, against plain Python."""

import numpy as np
from cache_twins import plain_mix, plain_set
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram._compiled import address_of, compiled
from ssdgram.cache import directory as d

keys = st.tuples(st.integers(0, 2**63 - 1) | st.integers(0, 3), st.integers(0, 254))
relaxed = settings(deadline=None)                           # the first call compiles


@compiled
def bytes_that_match(array, value, kept):  # type: ignore[no-untyped-def]
    return d.match_16_bytes(address_of(array, 0), np.uint8(value), np.uint8(kept))


@compiled
def words_that_match(array, value, kept):  # type: ignore[no-untyped-def]
    return d.match_32_words(address_of(array, 0), np.uint16(value), np.uint16(kept))


def test_a_set_is_four_cache_lines_as_drawn():
    assert d.SET.itemsize == d.SET_BYTES == 256
    offsets = {name: d.SET.fields[name][1] for name in d.SET.names}
    assert offsets == {"fingerprint": 0, "group": 16, "count": 32, "age": 48, "slot": 64, "x": 128}
    assert d.allocate(3).ctypes.data % 64 == 0


def test_sets_for_never_promises_more_than_it_was_given():
    assert [d.sets_for(entries) for entries in (1, 16, 31, 32, 4096)] == [1, 1, 1, 2, 256]


@relaxed
@given(keys, st.integers(1, 2**31 - 1))
def test_mix_and_set_are_those_of_plain_python(key, sets):
    x, group = key
    assert int(d.mix(x, group)) == plain_mix(x, group)
    assert d.set_of(x, group, sets) == plain_set(x, group, sets) < sets


@relaxed
@given(st.integers(0, 2**63 - 1), st.sets(st.integers(0, 254), min_size=2))
def test_groups_of_one_x_mix_differently(x, groups):
    assert len({int(d.mix(x, group)) for group in groups}) == len(groups)


def test_sets_fill_evenly_for_small_and_regular_x():
    for step in (1, 1 << 20, 76632096046245):
        load = np.bincount([d.set_of(k * step % 2**63, k % 3, 100) for k in range(20_000)], minlength=100)
        assert load.sum() == 20_000 and 130 < load.min() and load.max() < 270   # 200 expected, sigma 14


@relaxed
@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(0, 255))
def test_sixteen_bytes_compare_at_once(values, value):
    lanes = d.on_lines(16, np.dtype(np.uint8))
    lanes[:] = values
    assert bytes_that_match(lanes, value, 255) == sum(1 << k for k, other in enumerate(values) if other == value)


@relaxed
@given(st.lists(st.integers(0, 65535), min_size=32, max_size=32), st.integers(0, 31))
def test_thirty_two_words_compare_in_the_bits_that_count(values, chosen):
    lanes = d.on_lines(32, np.dtype(np.uint16))
    lanes[:] = values
    value = values[chosen] & 0xFFF0
    assert words_that_match(lanes, value, 0xFFF0) == sum(1 << k for k, other in enumerate(values) if other & 0xFFF0 == value)


@relaxed
@given(st.lists(keys, unique=True, min_size=1, max_size=16))
def test_what_was_written_is_found_until_it_is_removed(chosen):
    directory = d.allocate(1)
    for way, (x, group) in enumerate(chosen):
        assert d.probe(directory, 0, x, group) == -1
        d.write(directory, 0, way, x, group, way + 100, 1)
    for way, (x, group) in enumerate(chosen):
        assert d.probe(directory, 0, x, group) == way and directory[0]["slot"][way] == way + 100
    assert d.entries(directory) == len(chosen)
    for way, (x, group) in enumerate(chosen):
        d.remove(directory, 0, way)
        assert d.probe(directory, 0, x, group) == -1 and directory[0]["slot"][way] == -1
    assert d.entries(directory) == 0


def test_equal_x_of_two_orders_never_meet():
    """After a BOS (compressed id 0) the x of neighbouring orders are equal and their rows are not."""
    directory = d.allocate(1)
    for x in (0, 5, 2**63 - 1):
        d.write(directory, 0, 0, x, 0, 7, 1)
        assert d.probe(directory, 0, x, 1) == -1
        d.write(directory, 0, 1, x, 1, 8, 1)
        assert (d.probe(directory, 0, x, 0), d.probe(directory, 0, x, 1), d.probe(directory, 0, x, 2)) == (0, 1, -1)
        d.remove(directory, 0, 0)
        d.remove(directory, 0, 1)


def test_equal_x_stay_apart_even_where_their_fingerprints_agree():
    x, other = next((x, g) for x in range(10_000) for g in range(1, 255) if (plain_mix(x, 0) ^ plain_mix(x, g)) & 0xFF == 0)
    directory = d.allocate(1)
    d.write(directory, 0, 3, x, other, 9, 1)
    assert d.probe(directory, 0, x, 0) == -1
    d.write(directory, 0, 12, x, 0, 10, 1)
    assert (d.probe(directory, 0, x, 0), d.probe(directory, 0, x, other)) == (12, 3)


def test_agreeing_fingerprints_do_not_hide_the_right_way():
    same = [x for x in range(40_000) if plain_mix(x, 2) & 0xFF == 77][:16]
    directory = d.allocate(1)
    for way, x in enumerate(same):
        d.write(directory, 0, way, x, 2, way, 1)
    assert [d.probe(directory, 0, x, 2) for x in same] == list(range(16))
    assert [d.guess(directory, 0, np.uint64(d.mix(x, 2))) for x in same] == 16 * [0]
    assert d.guess(directory, 0, np.uint64(next(h for h in (d.mix(x, 2) for x in range(300)) if int(h) & 0xFF != 77))) == -1
    d.remove(directory, 0, 4)
    assert d.probe(directory, 0, same[4], 2) == -1 and d.probe(directory, 0, same[5], 2) == 5


def test_init_empties_every_set():
    directory = d.allocate(3)
    for s in range(3):
        d.write(directory, s, s, s, 0, s, 1)
    d.init(directory)
    assert d.entries(directory) == 0 and (directory["group"] == d.EMPTY).all() and (directory["count"] == 0).all()
