"""The planner: sizes are the store's, reads and stalls against plain Python, recommendations, the plan against a served store."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_miniature import settled, text_like

from ssdgram.errors import BudgetError, ConfigError
from ssdgram.tools import plan as planning
from ssdgram.tools.drive import Drive
from ssdgram.tools.miniature import Misses
from ssdgram.tools.model import model_of
from ssdgram.tools.plan import Load, Planner, Prices, budgets_up_to, reads_of, stalls_of, store_sizes, table_bytes
from ssdgram.tools.trace_replay import Pace, replay
from ssdgram.tools.trace_shapes import Requests, decode, prefill, requests

PRICES = Prices(3.0, 0.004, 0.0001)


@pytest.fixture(scope="module")
def model():
    return model_of()


def load_of(count=30_000, batch=192, warm=0.5, pace=None, ahead=0, seed=0, name="made up"):
    random = np.random.default_rng(seed)
    x = (random.zipf(1.15, count) % (1 << 20)).astype(np.int64)
    bounds = np.append(np.arange(0, count, batch), count)
    asked = Requests(x, np.tile(np.arange(3, dtype=np.uint8), count // 3), bounds, 3)
    return Load(name, asked, np.diff(bounds) // 3, pace or Pace(0.02, (0.0005, 0.007)), ahead, int(warm * (len(bounds) - 1)))


# ---------------------------------------------------------------- sizes and money


def test_sizes_are_those_of_a_store(engram, served):
    from made_stores import QUICK

    store = served(engram, dram="3MiB")
    size = store_sizes(engram.geometry, len(engram.token_map), 3 << 20, tuning=QUICK)
    assert (size.slots, size.sets) == (store._sizes.slots, store._sizes.sets)


def test_budgets_are_powers_of_two_up_to_the_most(model):
    geometry, table = model
    budgets = budgets_up_to(geometry, len(table), 3 << 30)
    assert budgets[-2:] == [2 << 30, 3 << 30] and budgets == sorted(set(budgets)) and len(budgets) <= 13
    for budget in budgets:
        store_sizes(geometry, len(table), budget)
    with pytest.raises(BudgetError, match="at least"):
        budgets_up_to(geometry, len(table), 1 << 16)


def test_the_real_tables_have_their_size(model):
    assert table_bytes(model[0]) / 2**30 == pytest.approx(188.8, abs=0.1)


@pytest.mark.parametrize("prices", [(-1, 0, 0), (0, math.nan, 0), (0, 0, math.inf)])
def test_prices_that_are_none_are_refused(prices):
    with pytest.raises(ConfigError, match="0 or more"):
        Prices(*prices)


# ---------------------------------------------------------------- misses, reads, stalls


def test_reads_are_the_rows_of_the_missing_bundles(engram):
    geometry = engram.geometry
    reads = reads_of(Misses(np.array([[1.0, 0, 0], [2, 3, 4], [0, 0, 0]]), 0, np.zeros(3)), geometry)
    assert reads.tolist() == [geometry.heads, 9 * geometry.heads, 0]


def test_the_noise_of_a_sample_is_taken_out_of_the_spread(model):
    random, rate = np.random.default_rng(1), 0.1
    true = random.poisson(100, (4000, 3)).astype(float)
    seen = random.binomial(true.astype(int), rate) / rate
    noisy = Misses(seen, 0, rate * seen.sum(axis=1) * (1 - rate) / rate**2)
    found, wanted = reads_of(noisy, model[0]), reads_of(Misses(true, 0, np.zeros(4000)), model[0])
    assert found.mean() == pytest.approx(wanted.mean(), rel=0.02) and found.std() == pytest.approx(wanted.std(), rel=0.25)


def plain_stalls(reads, load, drive):
    """Event by event: when each batch begins, when the drive takes and finishes its burst, what each layer waits."""
    begun, free, stalls = [], 0.0, []
    for b, count in enumerate(reads):
        begun.append(0.0 if b == 0 else begun[-1] + load.pace.step_s + stalls[-1])
        start = max(begun[max(0, b - load.ahead)], free)
        layers = len(load.pace.slack_s)
        free = start + layers * count / drive.top
        stalled = 0.0
        for layer, slack in enumerate(load.pace.slack_s):
            there = start + float(drive.seconds((layer + 1) * count)) + 1e-6 * planning.PLAN_US * load.positions[b]
            stalled += max(0.0, there - (begun[-1] + slack + stalled))
        stalls.append(stalled)
    return stalls


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.integers(0, 4), st.floats(0, 0.01), st.floats(0, 0.05))
def test_stalls_are_those_of_the_events(reads, ahead, first, second):
    pace = Pace(0.05, (first, max(first, second)))
    nothing = Requests(np.empty(0, np.int64), np.empty(0, np.uint8), np.zeros(1, np.int64), 3)
    load = Load("x", nothing, np.full(len(reads), 64), pace, ahead, 0)
    drive = Drive((1, 32, 256), (8_000, 45_000, 62_000))
    assert stalls_of(np.array(reads, float), load.positions, load, drive) == pytest.approx(plain_stalls(reads, load, drive))


def test_an_idle_drive_stalls_nobody():
    load = load_of(ahead=1)
    drive = Drive.of(10**9, 1)
    assert not stalls_of(np.full(len(load.positions), 10.0), load.positions, load, drive)[1:].any()


# ---------------------------------------------------------------- plans


def test_a_plan_of_the_real_model_hangs_together(model):
    geometry, table = model
    made = Planner(geometry, len(table), load_of(300_000), Drive.of(62_000, 137), PRICES).plan(budgets_up_to(geometry, len(table), 1 << 28))
    rates = [row.hit_rate for row in made.rows if not row.too_small]
    assert all(b >= a - 0.005 for a, b in itertools.pairwise(rates)) and rates[-1] > rates[0]
    stalls = [row.stall_s for row in made.rows if not row.too_small]
    assert all(b <= a * 1.05 + 1e-9 for a, b in itertools.pairwise(stalls))
    for row in made.rows:
        hourly = 3.0 + 0.004 * row.dram / 2**30 + 0.0001 * table_bytes(geometry) / 2**30
        assert row.tokens_dollar == pytest.approx(3600 * row.tokens_s / hourly)
        assert row.tokens_s == pytest.approx(64 / (0.02 + row.stall_s), rel=0.02)
        assert min(row.hit_rates) <= row.hit_rate <= max(row.hit_rates)
    assert made.whole_in_dram == pytest.approx(3600 * 64 / 0.02 / (3.0 + 0.004 * table_bytes(geometry) / 2**30), rel=0.02)
    assert made.recommended in made.rows


def test_the_smallest_budget_that_does_is_recommended(model):
    geometry, table = model
    fast = Planner(geometry, len(table), load_of(60_000), Drive.of(5_000_000, 50), PRICES).plan([1 << 25, 1 << 26, 1 << 27])
    assert fast.recommended.dram == 1 << 25 and fast.needs_reads_s is None and fast.limit.startswith("the model") and fast.window == 0


def test_what_limits_is_named(model):
    geometry, table = model
    slow = Planner(geometry, len(table), load_of(60_000), Drive.of(20_000, 100), PRICES).plan([1 << 27, 1 << 28])
    assert "reads a second" in slow.limit and slow.needs_reads_s > 20_000
    enough = Planner(geometry, len(table), load_of(60_000), Drive.of(20_000, 100).faster(slow.needs_reads_s / 20_000), PRICES)
    assert enough.row(slow.recommended.dram).stall_s <= 0.01 * 0.02 * 1.001
    late = Planner(geometry, len(table), load_of(60_000), Drive.of(10**6, 3_000), PRICES).plan([1 << 28])
    assert "latency" in late.limit and late.needs_reads_s is None
    dear = Prices(0.0001, 100.0, 0.0)
    random = np.random.default_rng(2)
    loop = Requests(np.tile(random.integers(0, 1 << 60, 30_000), 4), np.tile(np.arange(3, dtype=np.uint8), 40_000),
                    np.arange(0, 120_001, 192), 3)
    load = Load("loop", loop, np.full(625, 64), Pace(0.02, (0.0005, 0.007)), 0, 312)
    money = Planner(geometry, len(table), load, Drive.of(20_000, 100), dear).plan([1 << 25, 1 << 26, 1 << 27], 0.0)
    assert money.recommended.dram == 1 << 25 and money.limit.startswith("the DRAM budget")


def test_prefetching_ahead_hides_what_the_drive_can_keep_up_with(model):
    geometry, table = model
    pace = Pace(0.1, (0.0025, 0.035))
    made = Planner(geometry, len(table), load_of(60_000, pace=pace), Drive.of(62_000, 137), PRICES).plan([1 << 28])
    assert made.recommended.stall_s > 0.001 and made.window is not None and made.window >= 1


def test_a_sample_plans_nearly_the_same(model, monkeypatch):
    geometry, table = model
    load = load_of(300_000)
    whole = Planner(geometry, len(table), load, Drive.of(62_000, 137), PRICES).row(1 << 27)
    monkeypatch.setattr(planning, "SIMULATED", 60_000)
    small = Planner(geometry, len(table), load, Drive.of(62_000, 137), PRICES)
    row = small.row(1 << 27)
    assert small.taken.rate == pytest.approx(0.2) and abs(row.hit_rate - whole.hit_rate) < 0.02
    assert row.stall_s == pytest.approx(whole.stall_s, rel=0.1)


def test_a_budget_that_a_batch_does_not_fit_is_said_and_not_recommended(model):
    geometry, table = model
    made = Planner(geometry, len(table), load_of(30_000, batch=6000), Drive.of(10**7, 10), PRICES).plan([1 << 22, 1 << 27])
    assert made.rows[0].too_small and not made.rows[1].too_small and made.recommended is made.rows[1]


def test_a_trace_that_is_too_short_is_said(model):
    geometry, table = model
    planner = Planner(geometry, len(table), load_of(3_000), Drive.of(62_000, 137), PRICES)
    assert planner.row(1 << 28).beyond
    with pytest.raises(ConfigError, match="expected a longer trace"):
        Planner(geometry, len(table), load_of(192, warm=1.0), Drive.of(62_000, 137), PRICES)


def test_another_models_keys_are_refused(model):
    geometry, table = model
    one = Requests(np.arange(4), np.zeros(4, np.uint8), np.arange(5), 1)
    load = Load("keys", one, np.ones(4, np.int64), Pace(0.02, (0.0, 0.0)), 0, 1)
    with pytest.raises(ConfigError, match="another model"):
        Planner(geometry, len(table), load, Drive.of(62_000, 137), PRICES)


@pytest.mark.parametrize("shape", [decode, prefill])
def test_the_plan_of_one_half_is_what_a_store_does_with_the_other(engram, served, monkeypatch, shape):
    """Text drawn from one source, planned with one half, served from the other: what is left is how the halves differ."""
    from made_stores import QUICK

    size, dram = (24, "4MiB") if shape is decode else (300, "4MiB")
    trace = text_like(16_000, engram.vocabulary, seed=5)
    halves = [shape(trace.part(first, first + 11), size, engram.geometry.orders) for first in (0, 11)]
    warm = len(halves[0]) // 2
    asked = requests(halves[0], engram.geometry, engram.token_map)
    load = Load("half", asked, halves[0].positions(), Pace(0.02, (0.0, 0.0)), 0, warm)
    monkeypatch.setattr(planning, "Tuning", lambda: QUICK)   # the tuning of the test's store: another one has other sizes
    row = Planner(engram.geometry, len(engram.token_map), load, Drive.of(62_000, 137), PRICES).row(4 << 20)
    store = served(engram, dram=dram)
    replay(store, halves[1].part(0, warm))
    settled(store)
    done = replay(store, halves[1].part(warm, len(halves[1])))
    assert row.bundles == store._sizes.slots
    for order in range(3):
        assert abs(row.hit_rates[order] - done.hit_rate(order + 2)) < 0.05
    assert abs(row.hit_rate - done.hit_rate()) < 0.03


