"""The policy against plain Python: request by request, and as part of a cache that never loses or doubles a bundle."""

import itertools

import numpy as np
import pytest
from cache_twins import PlainSet, plain_set
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ssdgram.cache import directory as d
from ssdgram.cache import overflow as o
from ssdgram.cache import policy as p
from ssdgram.cache import sketch as s

SETS = 2
KEYS = [(x, group) for x in range(40) for group in range(3)]   # equal x in several groups, 0 among them


class PlainCache:
    """SETS plain sets."""

    def __init__(self, sets=SETS):
        self.sets = [PlainSet() for _ in range(sets)]

    def __getitem__(self, key):
        return self.sets[plain_set(*key, len(self.sets))]


def ask(directory, sketch, key, slot):
    """One request: (hit, slot pushed out or -1)."""
    place = d.set_of(*key, len(directory))
    way = d.probe(directory, place, *key)
    if way >= 0:
        p.touch(directory, sketch, place, way)
        return True, -1
    return False, p.insert(directory, sketch, place, *key, slot)


def look(directory, place):
    """The set as a list of (key, slot, count, age) or None."""
    record = directory[place]
    return [None if record["group"][way] == d.EMPTY else
            ((int(record["x"][way]), int(record["group"][way])), *(int(record[field][way]) for field in ("slot", "count", "age")))
            for way in range(d.WAYS)]


def plain_look(plain):
    return [None if entry is None else (entry.key, entry.slot, entry.count, entry.age) for entry in plain.ways]


@settings(deadline=None)
@given(st.lists(st.sampled_from(KEYS), max_size=400))
def test_every_request_ends_as_in_plain_python(requests):
    directory, sketch, plain = d.allocate(SETS), s.allocate(SETS), PlainCache()
    for slot, key in enumerate(requests):
        way = plain[key].find(key)
        hit, pushed_out = ask(directory, sketch, key, slot)
        assert hit == (way >= 0)
        assert pushed_out == (plain[key].touch(way) or -1 if hit else plain[key].insert(key, slot))
    for place in range(SETS):
        assert look(directory, place) == plain_look(plain.sets[place])


def test_a_long_skewed_run_hits_as_often_as_in_plain_python():
    random = np.random.default_rng(3)
    requests = [(int(x), int(x) % 5) for x in random.zipf(1.2, 12_000) % 5_000]
    directory, sketch, plain, hits = d.allocate(8), s.allocate(8), PlainCache(8), [0, 0]
    for slot, key in enumerate(requests):
        hits[0] += ask(directory, sketch, key, slot)[0]
        way = plain[key].find(key)
        hits[1] += way >= 0
        plain[key].touch(way) if way >= 0 else plain[key].insert(key, slot)
    assert hits[0] == hits[1] > 3_000


def test_a_new_bundle_always_gets_its_entry():
    directory, sketch = d.allocate(1), s.allocate(1)
    for x in range(16):
        for _ in range(20):
            ask(directory, sketch, (x, 0), x)
    for x in range(100, 300):
        hit, _ = ask(directory, sketch, (x, 0), x)
        assert not hit and d.probe(directory, 0, x, 0) >= 0


def test_what_is_asked_for_often_outlives_a_scan():
    directory, sketch = d.allocate(1), s.allocate(1)
    hot = [(x, 0) for x in range(8)]
    for _ in range(4):
        for key in hot:
            ask(directory, sketch, key, 0)
    for x in range(1000, 1020):                              # more than the set holds, each asked for once
        ask(directory, sketch, (x, 0), 0)
    assert all(d.probe(directory, 0, *key) >= 0 for key in hot)


def test_what_was_hot_once_gives_way_in_the_end():
    """Also where a full set of such entries has reached the oldest age that a byte can tell."""
    directory, sketch = d.allocate(1), s.allocate(1)
    for x in range(16):
        for _ in range(15):
            ask(directory, sketch, (x, 0), x)
    for x in range(1000, 1500):
        ask(directory, sketch, (x, 0), x)
    assert all(d.probe(directory, 0, x, 0) == -1 for x in range(16))


def test_a_bundle_that_comes_back_goes_on_counting():
    directory, sketch = d.allocate(1), s.allocate(1)
    for _ in range(3):
        ask(directory, sketch, (5, 0), 0)
    assert p.frequency(directory, sketch, 5, 0) == 3
    assert p.evict(directory, sketch, 0, d.probe(directory, 0, 5, 0)) == 0
    assert p.frequency(directory, sketch, 5, 0) == 3 and p.standing(directory, sketch, 5, 0) == -1
    ask(directory, sketch, (5, 0), 1)
    assert p.frequency(directory, sketch, 5, 0) == 4
    assert p.frequency(directory, sketch, 6, 0) == 0


def test_counts_stop_at_their_end():
    directory, sketch = d.allocate(1), s.allocate(1)
    for _ in range(300):
        ask(directory, sketch, (7, 0), 0)
    assert p.frequency(directory, sketch, 7, 0) == 15


def test_the_oldest_age_is_halved_with_its_count_and_the_worth_never_rises():
    directory, sketch = d.allocate(1), s.allocate(1)
    for _ in range(15):
        ask(directory, sketch, (7, 0), 0)
    worth, seen = [], set()
    for x in range(1, 700):
        ask(directory, sketch, (x * 1000, 0), x)
        for way in range(1, 16):                             # all but the old entry leave: it is never the one to go
            d.remove(directory, 0, way)
        worth.append(p.standing(directory, sketch, 7, 0))
        seen.add((int(directory[0]["count"][0]), int(directory[0]["age"][0])))
    assert {(15, 255), (7, 127), (7, 255), (3, 127), (3, 255), (1, 127), (1, 255)} <= seen
    assert all(after <= before for before, after in itertools.pairwise(worth)) and worth[-1] == p.RANK_ONE // 263


def test_evicting_an_empty_way_does_nothing():
    directory, sketch = d.allocate(1), s.allocate(1)
    assert p.evict(directory, sketch, 0, 3) == -1 and p.rank(directory, sketch, 0, 3) == -1
    assert not sketch["ghost"].any()


@pytest.mark.parametrize(("more", "less"), [
    ((2, 0), (1, 0)),                                        # (count, age)
    ((1, 0), (1, 1)),
    ((1, 0), (2, 9)),                                        # 1/8 against 2/17
    ((2, 7), (1, 0)),                                        # 2/15 against 1/8
    ((15, 111), (1, 0)),
    ((1, 0), (15, 113)),
    ((15, 254), (15, 255)),
])
def test_rank_is_requests_per_time(more, less):
    directory, sketch = d.allocate(1), s.allocate(1)
    for way, (count, age) in enumerate((more, less)):
        d.write(directory, 0, way, way, 0, way, count)
        directory[0]["age"][way] = age
    assert p.rank(directory, sketch, 0, 0) > p.rank(directory, sketch, 0, 1) > 0
    assert p.standing(directory, sketch, 1, 0) == p.rank(directory, sketch, 0, 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 255)), min_size=16, max_size=16))
def test_insert_pushes_out_the_lowest_rank(states):
    directory, sketch = d.allocate(1), s.allocate(1)
    for way, (count, age) in enumerate(states):
        d.write(directory, 0, way, way, 0, way, count)
        directory[0]["age"][way] = age
    ranks = [p.rank(directory, sketch, 0, way) for way in range(16)]
    assert ranks[p.insert(directory, sketch, 0, 99, 0, 99)] == min(ranks)


class Cache(RuleBasedStateMachine):
    """Directory, sketch and overflow as the planner drives them: slots from a free list, references, reclaims, failed reads."""

    def __init__(self):
        super().__init__()
        self.directory, self.sketch = d.allocate(SETS), s.allocate(SETS)
        self.overflow = np.zeros(o.cells(64), o.CELL)
        o.init(self.overflow)
        self.free, self.live, self.references = [], {}, {}

    @initialize(slots=st.integers(4, 48))
    def open(self, slots):
        self.slots = slots
        self.free = list(range(slots))

    def found(self, key):
        """(place, slot): "directory", "overflow" or "nowhere"."""
        place = d.set_of(*key, SETS)
        way = d.probe(self.directory, place, *key)
        if way >= 0:
            assert o.find(self.overflow, *key) == -1
            return "directory", int(self.directory[place]["slot"][way])
        slot = o.find(self.overflow, *key)
        return ("overflow", slot) if slot >= 0 else ("nowhere", -1)

    def pushed_out(self, slot):
        key = next(key for key, other in self.live.items() if other == slot)
        if self.references.get(key, 0):
            assert o.insert(self.overflow, *key, slot)
        else:
            del self.live[key]
            self.free.append(slot)

    def reclaim(self):
        """Evict the lowest rank that nobody refers to; whether there was one."""
        chosen = None
        for place in range(SETS):
            for way, entry in enumerate(look(self.directory, place)):
                if entry is not None and not self.references.get(entry[0], 0):
                    rank = p.rank(self.directory, self.sketch, place, way)
                    if chosen is None or rank < chosen[0]:
                        chosen = rank, place, way
        if chosen is not None:
            self.pushed_out(p.evict(self.directory, self.sketch, *chosen[1:]))
        return chosen is not None

    @rule(key=st.sampled_from(KEYS))
    def request(self, key):
        where, slot = self.found(key)
        place = d.set_of(*key, SETS)
        if where == "directory":
            p.touch(self.directory, self.sketch, place, d.probe(self.directory, place, *key))
        if where == "nowhere":
            if not self.free and not self.reclaim():
                return
            slot = self.free.pop()
            self.live[key] = slot
            out = p.insert(self.directory, self.sketch, place, *key, slot)
            self.references[key] = self.references.get(key, 0) + 1
            if out >= 0:
                self.pushed_out(out)
            return
        assert self.live[key] == slot
        self.references[key] = self.references.get(key, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.references)))
        self.references[key] -= 1
        if self.references[key] == 0:
            del self.references[key]
            if o.find(self.overflow, *key) >= 0:
                self.free.append(o.remove(self.overflow, *key))
                del self.live[key]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data):
        """A read failed: the bundle leaves the directory at once."""
        key = data.draw(st.sampled_from(sorted(self.live)))
        place = d.set_of(*key, SETS)
        way = d.probe(self.directory, place, *key)
        if way >= 0 and key not in self.references:
            d.remove(self.directory, place, way)
            self.free.append(self.live.pop(key))

    @invariant()
    def every_live_bundle_is_in_exactly_one_place(self):
        for key in KEYS:
            where, slot = self.found(key)
            assert (where == "nowhere") == (key not in self.live) and slot == self.live.get(key, -1)
        assert d.entries(self.directory) + o.size(self.overflow) == len(self.live)

    @invariant()
    def every_slot_is_free_or_has_one_bundle(self):
        assert sorted([*self.free, *self.live.values()]) == list(range(getattr(self, "slots", 0)))


Cache.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=60)
TestCache = Cache.TestCase
