"""Large batches planned by several threads: the same rows, the same counts and the same bookkeeping as by one.

Every store here is checked at its end (conftest.served): each slot in one place, lists whole, bundles right byte by byte.
"""

import dataclasses
import threading

import numpy as np
import pytest
from made_stores import QUICK, assert_served, clear_faults, quiet, reading, set_fault, until

import ssdgram
from ssdgram import _plan_state as p
from ssdgram._state import FAULT_STALL
from ssdgram.store import default_crew

CREW = dataclasses.replace(QUICK, crew=3)


def jobs(store):
    """Jobs that the crew was given so far."""
    return int(store._plan.crew[p.CREW_NEXT]) >> 32


def warmed(store, tokens):
    """Have the tokens' bundles in the cache."""
    with store.prefetch(tokens) as batch:
        batch.wait()
    assert quiet(store)


def test_a_warm_batch_is_planned_by_the_crew(engram, served):
    store = served(engram, dram=engram.dram_for(60_000, tuning=CREW), tuning=CREW)
    tokens = engram.tokens(1500, 1)
    warmed(store, tokens)
    before, stats = jobs(store), store.stats()
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
        timing = batch.timing
    assert jobs(store) > before and store.stats().reads == stats.reads
    assert timing["bundles"] == engram.distinct((tokens, {})) + _dead_met(engram, tokens)
    assert timing["probes"] == 1500 * engram.geometry.groups and timing["misses"] == 0


def test_the_next_batchs_first_job_is_as_large_as_the_last_ones_allowed(engram, served):
    """Grown by warm batches, by class; small again after texts that are not there."""
    store = served(engram, dram=engram.dram_for(60_000, tuning=CREW), tuning=CREW)
    tokens = engram.tokens(1500, 1)
    warmed(store, tokens)
    with store.prefetch(tokens) as batch:
        batch.wait()
    step, background = store._plan.control[p.C_CHUNKS:p.C_CHUNKS + 2]
    assert step >= 4 and background <= 2
    with store.prefetch(engram.tokens(1500, 77)) as batch:
        assert_served(engram, store, batch, engram.tokens(1500, 77))
    assert store._plan.control[p.C_CHUNKS] < step


def _dead_met(made, tokens):
    """Dead bundles among those of the tokens."""
    keys, dead = made.geometry.keys(tokens, made.token_map), made.geometry.dead_keys(made.token_map)
    return int((keys == dead).any(axis=0).sum())


def test_counts_are_those_of_one_planner(engram, served):
    """Hits, repeats and misses of texts that overlap, with repeats inside chunks and between them."""
    counts = []
    texts = [np.concatenate([engram.tokens(700, seed), engram.tokens(900, seed + 1), engram.tokens(700, seed)]) for seed in (1, 2, 3, 1)]
    for tuning in (QUICK, CREW):
        store = served(engram, dram=engram.dram_for(60_000, tuning=tuning), tuning=tuning)
        for text in texts:
            with store.prefetch(text) as batch:
                assert_served(engram, store, batch, text)
            assert quiet(store)
        stats = store.stats()
        counts.append((stats.hits, stats.misses, stats.repeats, stats.tokens))
        worked = jobs(store)
    assert counts[0] == counts[1] and worked > 0


@pytest.mark.parametrize("slots", [4000, 9000])
def test_mixed_batches_under_pressure(engram, served, slots):
    """Two thirds known, one third new, in a cache that is too small for all: what the crew leaves is settled by the planner."""
    store = served(engram, dram=engram.dram_for(slots, tuning=CREW), tuning=CREW)
    texts = [engram.tokens(420, seed) for seed in range(4)]
    for number in range(8):
        text = np.concatenate([texts[number % 4], engram.tokens(200, 100 + number)])
        with store.prefetch(text) as batch:
            assert_served(engram, store, batch, text)
    assert jobs(store) > 0


def test_bundles_that_are_being_read_are_left_to_the_planner(engram, served):
    """They are in the directory like the others, but no layer is ready before they are. (Nothing else is new in the batch.)"""
    store = served(engram, dram=engram.dram_for(60_000, tuning=CREW), tuning=CREW)
    known, new = engram.tokens(1000, 1), engram.tokens(60, 2)
    warmed(store, known)
    set_fault(store, FAULT_STALL)
    first = store.prefetch(new)
    assert until(lambda: reading(store))
    before = jobs(store)
    batch = store.prefetch([ssdgram.Sequence(tokens) for tokens in (known, new, known)])
    assert until(lambda: store._plan.words[batch._base + p.W_STAGE] == p.WAITING)
    assert jobs(store) > before
    assert not any(store._plan.words[batch._base + p.W_LAYER + layer] for layer in range(len(store.layers)))
    clear_faults(store)
    with first, batch:
        for layer in store.layers:
            want = np.concatenate([engram.expected(layer, tokens) for tokens in (known, new, known)])
            np.testing.assert_array_equal(batch.packed(layer).numpy(), want)


def test_lookback_and_sequences_meet_chunk_borders(engram, served):
    """Positions that give no output (lookbacks) lie between chunks, and ids take their lookback over a chunk's border."""
    store = served(engram, dram=engram.dram_for(60_000, tuning=CREW), tuning=CREW)
    generator = np.random.default_rng(3)
    pieces = [(engram.tokens(int(generator.integers(1, 90)), seed), engram.tokens(int(generator.integers(0, 5)), 500 + seed))
              for seed in range(40)]
    sequences = [ssdgram.Sequence(tokens, lookback=before) for tokens, before in pieces]
    for _ in range(2):
        with store.prefetch(sequences) as batch:
            for layer in store.layers:
                want = np.concatenate([engram.expected(layer, tokens, lookback=before) for tokens, before in pieces])
                np.testing.assert_array_equal(batch.packed(layer).numpy(), want)
        assert quiet(store)
    assert jobs(store) > 0


def test_an_owner_serves_its_part(engram, served):
    """Bundles of other ranks are no business of the crew's either."""
    tokens = engram.tokens(1200, 5)
    rows = []
    for rank in range(2):
        store = served(engram, dram=engram.dram_for(12_000, tuning=CREW), tuning=CREW, owner=(rank, 2))
        warmed(store, tokens)
        with store.prefetch(tokens) as batch:
            rows.append(batch.packed(1).numpy().copy())
        assert jobs(store) > 0
    assert not ((rows[0] != 0) & (rows[1] != 0)).any()
    np.testing.assert_array_equal(rows[0] | rows[1], engram.expected(1, tokens))


def test_a_step_waits_for_one_job_only(engram, served):
    """Steps come while large batches are planned; all get their rows, whoever plans them."""
    store = served(engram, dram=engram.dram_for(60_000, tuning=CREW), tuning=CREW)
    large, small = engram.tokens(2000, 7), engram.tokens(40, 8)
    warmed(store, large)
    warmed(store, small)
    wrong = []

    def prefill():
        for _ in range(6):
            with store.prefetch(large, priority="background") as batch:
                batch.wait()
                wrong.append(int((batch.packed(1).numpy() != engram.expected(1, large)).sum()))

    thread = threading.Thread(target=prefill)
    thread.start()
    while thread.is_alive():
        with store.prefetch(small) as batch:
            assert_served(engram, store, batch, small)
    thread.join()
    assert wrong == [0] * 6


def test_how_many_help():
    assert default_crew((0,)) == 0 and 0 <= default_crew() <= 7


def test_cancelled_while_the_crew_plans(engram, served):
    store = served(engram, dram=engram.dram_for(60_000, tuning=CREW), tuning=CREW)
    tokens = engram.tokens(1500, 9)
    warmed(store, tokens)
    for _ in range(50):
        store.prefetch(tokens).release()
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)


def test_a_batch_that_finds_no_slot_gives_all_back(engram, served):
    """A job's slots go back too when the rest of the batch finds none."""
    store = served(engram, dram=engram.dram_for(3000, tuning=CREW), tuning=CREW)
    tokens = engram.tokens(400, 10)
    warmed(store, tokens)
    with pytest.raises(ssdgram.BatchTooLargeError), store.prefetch(np.concatenate([tokens, engram.tokens(400, 11)])) as batch:
        batch.wait()
    holder = store.prefetch(engram.tokens(100, 12))
    holder.wait()
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
    holder.release()
