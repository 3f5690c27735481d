"""Statistics: every counter means what it says, and what is counted twice in two places agrees."""

import dataclasses
import math
import time

import numpy as np
import pytest
from made_stores import QUEUES, QUICK, assert_served, clear_faults, quiet, set_fault, until
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

import ssdgram
from ssdgram import _state as s
from ssdgram.metrics import StoreCollector
from ssdgram.stats import bounds

torch = pytest.importorskip("torch")


def gained(after, before, name):
    a, b = getattr(after, name), getattr(before, name)
    return {key: a[key] - b[key] for key in a} if isinstance(a, dict) else a - b


def by_order(made, tokens, known=()):
    """Distinct bundles of a batch by order, without the dead ones and those of `known` keys."""
    keys, dead = made.geometry.keys(tokens, made.token_map), made.geometry.dead_keys(made.token_map)
    found = {}
    for order in range(keys.shape[2]):
        found[order + 2] = sum(len(set(keys[:, l, order].tolist()) - {int(dead[l, order])}) for l in range(keys.shape[1]))
    return found


@pytest.mark.parametrize("queue", QUEUES)
def test_reads_hits_and_misses(engram, served, queue):
    store = served(engram, queue=queue)
    opened = store.stats()
    assert opened.state == "ready" and opened.queue == queue == store.queue
    assert opened.batches == 0 and opened.oldest_ticket is None and opened.degraded == 0
    tokens = np.concatenate([engram.tokens(50), engram.tokens(50)])
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
    cold = store.stats()
    distinct = by_order(engram, tokens)
    dead_met = {order: int(gained(cold, opened, "hits")["dram", order]) for order in distinct}
    assert gained(cold, opened, "misses") == distinct
    assert all(0 <= count <= 2 for count in dead_met.values())               # at most each layer's dead bundle
    positions = len(tokens) * 2
    for order in distinct:
        found = distinct[order] + dead_met[order] + gained(cold, opened, "joins")[order] + gained(cold, opened, "repeats")[order]
        assert found == positions
    assert gained(cold, opened, "batches") == 1 and gained(cold, opened, "tokens") == 100
    assert gained(cold, opened, "reads") + gained(cold, opened, "merged_rows") == 4 * sum(distinct.values())
    assert cold.bytes_read == 4096 * cold.reads and cold.retries == cold.read_errors == cold.failed_rows == 0
    assert gained(cold, opened, "bytes_served") == 100 * 2 * 12 * 66
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
    warm = store.stats()
    assert gained(warm, cold, "reads") == 0 and sum(gained(warm, cold, "misses").values()) == 0
    assert gained(warm, cold, "hits") == {("dram", order): distinct[order] + dead_met[order] for order in distinct}
    assert 0.4 < warm.hit_rate < 0.6


def test_rows_and_packed_count_the_same_bytes(engram, served):
    store = served(engram, layers=[1], columns=range(5))
    with store.prefetch(engram.tokens(10)) as batch:
        batch.wait()
        assert store.stats().bytes_served == 0
        batch.rows(1)
        assert store.stats().bytes_served == 10 * 5 * 66
        batch.packed(1)
        assert store.stats().bytes_served == 2 * 10 * 5 * 66
        batch.addresses(1)
        assert store.stats().bytes_served == 2 * 10 * 5 * 66


def test_slots_and_budgets(engram, served):
    store = served(engram, dram="3MiB")
    empty = store.stats()
    assert empty.slots == store.capacity + 6 and empty.slots_in_use == 6 and empty.slots_idle == 0
    used, allowed = empty.budgets["dram"]
    assert allowed == 3 << 20 and 0 < used < allowed
    with store.prefetch(engram.tokens(50)) as batch:
        batch.wait()
        during = store.stats()
        assert during.slots_in_use == 6 + engram.distinct((engram.tokens(50), {}))
        assert during.slots_free + during.slots_idle + during.slots_in_use == during.slots
        assert during.budgets["dram"][0] == used + store._stride * (during.slots_in_use - 6)
    assert until(lambda: store.stats().slots_in_use == 6)
    after = store.stats()
    assert after.slots_idle == engram.distinct((engram.tokens(50), {})) and after.budgets["dram"] == during.budgets["dram"]
    for seed in range(40):
        with store.prefetch(engram.tokens(100, seed)) as batch:
            batch.wait()
    full = store.stats()
    assert full.slots_free < 0.1 * full.slots and full.evictions > 0 and full.budgets["dram"][0] <= allowed


def test_oldest_ticket_and_ages(engram, served):
    store = served(engram)
    first, second = store.prefetch([1, 2]), store.prefetch([3, 4])
    first.wait()
    second.wait()
    time.sleep(0.05)
    stats = store.stats()
    assert stats.oldest_ticket == 1 and 0.05 <= stats.oldest_ticket_age_s < 10
    first.release()
    assert until(lambda: store.stats().oldest_ticket == 2)
    second.release()
    assert until(lambda: store.stats().oldest_ticket is None) and store.stats().oldest_ticket_age_s == 0


def test_what_is_in_the_drive(engram, served):
    store = served(engram)
    assert quiet(store) and until(lambda: store.stats().queue_depth == 0) and store.stats().oldest_read_age_s == 0
    set_fault(store, s.FAULT_STALL)
    with store.prefetch(engram.tokens(50)) as batch:
        assert until(lambda: store.stats().queue_depth == QUICK.readers * QUICK.depth)
        assert until(lambda: store.stats().pending_pages > 900)              # all that there are records for, or all of them
        time.sleep(0.05)
        assert store.stats().oldest_read_age_s > 0.05
        clear_faults(store)
        batch.wait()
        assert until(lambda: store.stats().queue_depth == 0 and store.stats().pending_pages == 0)


def test_failures_and_retries(engram, served):
    store = served(engram)
    before = store.stats()
    set_fault(store, -5, file=0)
    with store.prefetch([7]) as batch, pytest.raises(ssdgram.ReadError):
        batch.wait(1)
    after = store.stats()
    assert (gained(after, before, "retries"), gained(after, before, "read_errors"), gained(after, before, "failed_rows")) == (3, 1, 1)


def test_histograms(engram, served):
    store = served(engram)
    assert until(lambda: sum(store.stats().engine_us_buckets.values()) == 1)     # the dead bundles' batch may be counted after `open`
    before = store.stats()
    for seed in range(20):
        with store.prefetch(engram.tokens(5, seed)) as batch:
            batch.wait()
    assert quiet(store)                                      # the engine's own time is counted after the caller was woken
    after = store.stats()
    for name, count in (("wait_us_buckets", 40), ("engine_us_buckets", 20)):
        assert sum(gained(after, before, name).values()) == count
        limits = list(getattr(after, name))
        assert limits == sorted(limits) and limits[0] == 1.0 and limits[-1] == math.inf and len(limits) == 32
    assert 0 < gained(after, before, "wait_us_sum") < 60e6
    assert after.planner_busy_s > before.planner_busy_s and after.longest_slice_us > 0


def test_bounds():
    """Bucket k holds what is below 2**k us: a wait of 5 us is in the bucket of 8."""
    assert bounds(np.arange(4)) == {1.0: 0, 2.0: 1, 4.0: 2, math.inf: 3}
    assert int(5.0).bit_length() == 3 and list(bounds(np.zeros(32, int)))[3] == 8.0


def test_a_snapshot_does_not_change(engram, served):
    store = served(engram)
    stats = store.stats()
    copy = dataclasses.replace(stats)
    with store.prefetch(engram.tokens(10)) as batch:
        batch.wait()
    assert stats == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.reads = 0


def test_hit_rate_before_anything(engram, served):
    stats = dataclasses.replace(served(engram).stats(), hits={}, joins={}, misses={})
    assert math.isnan(stats.hit_rate)
    assert dataclasses.replace(stats, hits={("dram", 2): 3}, misses={2: 1}).hit_rate == 0.75


def test_the_endpoint_shows_a_stores_statistics(engram, served):
    store = served(engram)
    with store.prefetch(engram.tokens(10)) as batch:
        batch.wait()
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        text = generate_latest(registry).decode()
        stats = store.stats()
    assert f"ssdgram_reads_total {float(stats.reads)}" in text
    assert f'ssdgram_misses_total{{order="3"}} {float(stats.misses[3])}' in text
    assert 'ssdgram_state{state="ready"} 1.0' in text and "ssdgram_oldest_ticket 1.0" in text
    assert 'ssdgram_budget_bytes{tier="dram"} 8.388608e+06' in text


def test_notices_of_a_store_without_direct_io(engram, served, monkeypatch):
    """A file system that refuses O_DIRECT: said in a notice, and the rows are the same."""
    import os

    from ssdgram import _opening

    real = os.open

    def refusing(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(_opening.os, "open", refusing)
    store = served(engram, tuning=QUICK)
    monkeypatch.undo()
    assert any("no O_DIRECT for 24 of 24 files" in notice for notice in store.stats().notices)
    with store.prefetch(engram.tokens(50)) as batch:
        assert_served(engram, store, batch, engram.tokens(50))
