"""Replays: the counts of the store's own statistics, stalls and paces, errors that leave nothing held."""

import numpy as np
import pytest

from ssdgram.errors import ConfigError, TokenError
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_replay import Pace, joined, replay
from ssdgram.tools.trace_shapes import decode, prefill


def documents(made, count=600, seed=0):
    tokens = np.random.default_rng(seed).integers(3, made.vocabulary, count).astype(np.int32)
    return Trace.of_documents(tokens, np.array([0, count // 3, count]), {})


def test_counts_are_those_of_the_statistics(engram, served):
    store = served(engram)
    replay(store, prefill(documents(engram, seed=1), 100))
    before = store.stats()
    batches = prefill(documents(engram, seed=2), 100)
    done = replay(store, batches)
    again = replay(store, batches)
    after = store.stats()
    assert sum(done.misses.values()) + sum(again.misses.values()) == sum(after.misses.values()) - sum(before.misses.values())
    assert done.reads.sum() == after.reads - before.reads and done.positions.tolist() == [100] * 6
    assert done.hit_rate() < 0.5 and again.hit_rate() == 1.0 and again.hit_rate(2) == 1.0 and not again.reads.any()
    distinct = sum(engram.distinct((batch_tokens(batches, number), {})) for number in range(6))
    assert abs(sum(again.hits.values()) - distinct) < 40     # n-grams over the pieces' ends are counted apart here


def batch_tokens(batches, number):
    sequence = batches.sequence(number)
    return sequence.flat_tokens[sequence.flat_flags & 4 != 0]


def test_a_pace_is_kept_and_a_stall_is_what_is_waited(engram, served):
    store = served(engram)
    steps = decode(documents(engram), 32).part(0, 5)
    replay(store, steps)
    done = replay(store, steps, Pace(0.02, (0.002, 0.01)))
    assert done.elapsed_s >= 5 * 0.02 + done.stall_s.sum() and (done.lookup_s > 0).all()
    assert done.stall_s.min() < 0.02                         # all is there


def test_batches_ahead_are_served_in_order(engram, served):
    store = served(engram)
    batches = decode(documents(engram), 16)
    done = replay(store, batches, ahead=3)
    assert len(done.reads) == len(batches) and done.reads.sum() == store.stats().reads - served_at_open(store)


def served_at_open(store):
    return sum(int(heads) for heads in store._plan.groups["heads"])     # the dead bundles


def test_a_summary_is_json_and_nothing_is_nothing(engram, served):
    store = served(engram)
    done = replay(store, decode(documents(engram), 16).part(0, 0)).summary()
    assert done["batches"] == 0 and done["positions"] == 0
    done = replay(store, decode(documents(engram), 16).part(0, 3)).summary()
    assert done["lookup"]["max_ms"] >= done["lookup"]["p50_ms"] > 0 and done["hit_rate_by_order"].keys() == {2, 3, 4}


def test_replays_can_be_joined(engram, served):
    store = served(engram)
    batches = decode(documents(engram), 16)
    parts = [replay(store, batches.part(0, 5)), replay(store, batches.part(5, 12))]
    whole = joined(parts)
    assert len(whole.reads) == 12 and whole.reads.sum() == parts[0].reads.sum() + parts[1].reads.sum()
    assert whole.misses == {order: parts[0].misses[order] + parts[1].misses[order] for order in (2, 3, 4)}
    assert whole.elapsed_s == parts[0].elapsed_s + parts[1].elapsed_s and whole.summary()["batches"] == 12


def test_an_error_leaves_nothing_held(engram, served):
    store = served(engram)
    trace = Trace.of_documents(np.array([5, 6, 7, 10**6, 8], np.int32), np.array([0, 5]), {})
    with pytest.raises(TokenError, match="1000000"):
        replay(store, decode(trace, 1), ahead=2)


@pytest.mark.parametrize(("step", "slack"), [(-1, ()), (1, (2,)), (1, (0.5, 0.1)), (1, (-0.1,))])
def test_a_pace_that_cannot_be_is_refused(step, slack):
    with pytest.raises(ConfigError, match="within the step"):
        Pace(step, slack)


def test_a_pace_of_another_model_is_refused(engram, served):
    store = served(engram)
    steps = decode(documents(engram), 16)
    with pytest.raises(ConfigError, match="serves 2 layers"):
        replay(store, steps, Pace(1, (0.5,)))
    with pytest.raises(ConfigError, match="0 or more"):
        replay(store, steps, ahead=-1)
