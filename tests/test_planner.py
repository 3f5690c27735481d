"""The planner as its callers see it: slots under pressure, queues of batches, joins, promotion, and what is left when all is over.

Every store here is checked at its end (conftest.served): each slot in one place, lists whole, bundles right byte by byte.
"""

import contextlib
import dataclasses
import os
import threading
import time

import numpy as np
import pytest
from made_stores import QUEUES, QUICK, assert_served, check_planner, clear_faults, packed, quiet, reading, set_fault, starves, until

import ssdgram
from ssdgram import _plan_state as p
from ssdgram._slots import RECLAIM_SETS
from ssdgram._state import FAULT_STALL
from ssdgram.store import Tuning

BATCHES = int(os.environ.get("SSDGRAM_CANCELLATIONS", "800")) * 3 // 2      # seven of ten are cancelled


def sized(made, bundles, seed, start=1):
    """As many random tokens as need at most that many distinct bundles (which grow with every token)."""
    count, too_many = max(start, bundles // made.geometry.groups - 8), 4 * bundles
    while too_many - count > 1:
        middle = (count + too_many) // 2
        count, too_many = (middle, too_many) if made.distinct((made.tokens(middle, seed), {})) <= bundles else (count, middle)
    return made.tokens(count, seed)


# ---------------------------------------------------------------- batches that find no slot


def test_a_plan_begun_again_holds_what_it_met_before(engram, served):
    """A batch that starved and plans anew counts itself again into the bundles that were in the cache: nobody takes them away."""
    store = served(engram, dram=engram.dram_for(150))
    known, holder_tokens = sized(engram, 50, 1), sized(engram, 45, 2)
    rest = sized(engram, store.capacity - 55, 3)
    tokens = np.concatenate([known, rest])
    assert store.capacity - 45 < engram.distinct((tokens, {})) <= store.capacity
    with store.prefetch(known) as batch:
        batch.wait()
    holder = store.prefetch(holder_tokens)
    holder.wait()
    batch = store.prefetch(tokens)
    assert until(lambda: store.stats().starved > 0)
    holder.release()
    assert_served(engram, store, batch, tokens)
    assert batch.timing["bundles"] == engram.distinct((tokens, {}))
    for seed in range(10, 15):                               # and they stay while others come and go beside it
        with store.prefetch(engram.tokens(1, seed)) as small, contextlib.suppress(TimeoutError):     # no slots, or a slow drive
            small.wait(timeout_s=0.05)
    assert_served(engram, store, batch, tokens)
    batch.release()


def test_large_batches_behind_each_other(engram, served):
    """Each needs nearly all slots, and its references take several slices to drop: whoever waits holds nothing, none starves."""
    store = served(engram, dram=engram.dram_for(7000))
    holder = store.prefetch(engram.tokens(60, 0))
    holder.wait()
    texts = [sized(engram, store.capacity - 10, seed, 1) for seed in (1, 2, 3)]
    for priority in ("step", "background"):
        batches = [store.prefetch(text, priority=priority) for text in texts]
        assert until(lambda: store.stats().starved > 0)
        time.sleep(0.05)
        holder.release()
        for text, batch in zip(texts, batches):
            with batch:
                batch.wait(timeout_s=20)
                assert np.array_equal(packed(batch, 14), engram.expected(14, text))
        holder = store.prefetch(engram.tokens(60, 0))
        holder.wait()
    holder.release()


def test_a_search_for_slots_is_gone_on_with(engram, served):
    """A dozen idle bundles among hundreds of sets: a few sets are looked at at a time, and each key is counted once all the same."""
    store = served(engram, dram=engram.dram_for(9000))
    assert len(store._plan.directory) > 4 * RECLAIM_SETS
    groups, names, rounds = engram.geometry.groups, ("hits", "misses", "repeats", "joins"), 30
    with contextlib.ExitStack() as held:
        held.enter_context(store.prefetch(sized(engram, store.capacity - 30, 1))).wait()
        active = 2                                           # with the dead bundles' batch
        while store.stats().slots_free >= 2 * groups:
            held.enter_context(store.prefetch(engram.tokens(1, 50 + active))).wait()
            active += 1
        with store.prefetch(engram.tokens(1, 2)) as batch:   # these stay idle, those that follow push each other out
            batch.wait()
        assert until(lambda: store._plan.control[p.C_ACTIVE] == active)
        before, reclaims = store.stats(), int(store._plan.stats[p.S_RECLAIMS])
        for seed in range(rounds):
            tokens = engram.tokens(1, 100 + seed)
            with store.prefetch(tokens) as batch:
                assert_served(engram, store, batch, tokens)
            assert until(lambda: store._plan.control[p.C_ACTIVE] == active)
        after = store.stats()
        assert sum(sum(getattr(after, name).values()) - sum(getattr(before, name).values()) for name in names) == rounds * groups
        assert store._plan.stats[p.S_RECLAIMS] > reclaims + 2 * rounds and after.starved == 0


def test_a_step_takes_the_slots_of_half_a_background_plan(engram, served):
    """A background batch in the middle of its plan gives back what it has; planned to its end, it was there first."""
    store = served(engram, dram=engram.dram_for(4000))
    gave_back = 0
    for seed in range(60):
        if gave_back == 2:
            break
        large, small = sized(engram, store.capacity - 10, 10 + seed), engram.tokens(100, 40 + seed)
        background, step = store.prefetch(large, priority="background"), store.prefetch(small)
        try:
            with contextlib.suppress(ssdgram.ReadTimeoutError):              # it has its slots, the drive is slow
                step.wait(timeout_s=0.5)
            gave_back += 1
            assert_served(engram, store, step, small)
            step.release()
        except ssdgram.StoreBusyError as error:
            assert error.tickets == (background.ticket,)
        background.wait(timeout_s=20)
        assert np.array_equal(packed(background, 1), engram.expected(1, large))
        background.release()
        if not step._released:
            assert_served(engram, store, step, small)
            step.release()
    assert gave_back > 0


def test_a_release_at_any_moment_is_seen(engram, served):
    """Whoever starves just as another gives back is served at once, and not at the next release."""
    store = served(engram, dram=engram.dram_for(150), tuning=dataclasses.replace(QUICK, spin_us=200.0))
    first, second = sized(engram, 80, 1), sized(engram, 80, 2)
    random = np.random.default_rng(0)
    for _ in range(400):
        holder = store.prefetch(first)
        holder.wait()
        late = store.prefetch(second)
        end = time.perf_counter() + random.random() * 500e-6
        while time.perf_counter() < end:
            pass
        holder.release()
        late.wait()
        late.release()
    assert store.stats().starved > 20


def test_a_starved_batch_can_be_cancelled(engram, served):
    store = served(engram, dram=engram.dram_for(150))
    holder = store.prefetch(sized(engram, 80, 1))
    holder.wait()
    for seed in range(200):
        first, second = store.prefetch(sized(engram, 100, 2)), store.prefetch(engram.tokens(2, seed), priority="background")
        if seed % 3:
            assert until(lambda word=first._base + p.W_STARVED: store._plan.words[word] != 0)
        first.release()
        with second:
            second.wait()
    holder.release()


def test_a_wait_that_ends_before_the_plan_began(engram, served):
    """The records of a batch's row are those of the batch before until the planner takes it: no word of them in the message."""
    store = served(engram)
    for turn in range(400):
        with store.prefetch(engram.tokens(1 + turn % 60, turn)) as batch, contextlib.suppress(ssdgram.ReadTimeoutError):
            batch.wait(timeout_s=0)


def test_no_tokens_behind_a_batch_that_waits_for_slots(engram, served):
    store = served(engram, dram=engram.dram_for(150))
    holder = store.prefetch(sized(engram, 80, 1))
    holder.wait()
    with store.prefetch(sized(engram, 100, 2)), store.prefetch([]) as empty:
        assert until(lambda: starves(store, empty))
        with pytest.raises(ssdgram.StoreBusyError):
            empty.wait(timeout_s=0.1)
        holder.release()
        empty.wait(timeout_s=10)


def test_too_large_beside_others(engram, served):
    """The verdict needs the store to be empty of others: until then it is a batch that waits; its need is named either way."""
    store = served(engram, dram=engram.dram_for(150))
    holder = store.prefetch(engram.tokens(3, 1))
    holder.wait()
    tokens = engram.tokens(200, 2)
    with store.prefetch(tokens) as batch:
        assert until(lambda: starves(store, batch))
        with pytest.raises(ssdgram.BatchTooLargeError) as caught:
            batch.wait(timeout_s=0.2)
        assert (caught.value.need, caught.value.have) == (engram.distinct((tokens, {})), store.capacity)
        holder.release()
        with pytest.raises(ssdgram.BatchTooLargeError) as caught:
            batch.wait(timeout_s=10)
        assert (caught.value.need, caught.value.have) == (engram.distinct((tokens, {})), store.capacity)


# ---------------------------------------------------------------- joins and promotion


def stalled_reads(store):
    """Hold every read from now on; the readers' hands are full afterwards."""
    set_fault(store, FAULT_STALL)


@pytest.mark.parametrize("queue", QUEUES)
def test_a_later_batch_joins_the_reads_of_an_earlier_one(engram, served, queue):
    store = served(engram, queue=queue)
    tokens = engram.tokens(40)
    stalled_reads(store)
    before = store.stats()
    first = store.prefetch(tokens)
    assert until(lambda: reading(store))
    second = store.prefetch(tokens)
    assert until(lambda: sum(store.stats().joins.values()) == engram.distinct((tokens, {})))
    first.release()                                          # drops its interest, not the reads
    clear_faults(store)
    with second:
        assert_served(engram, store, second, tokens)
        assert second.timing["misses"] == 0 and second.timing["reads"] == 0
    after = store.stats()
    assert sum(after.misses.values()) - sum(before.misses.values()) == engram.distinct((tokens, {}))
    assert after.reads - before.reads <= 4 * engram.distinct((tokens, {}))
    assert after.cancelled == 1


def test_bundles_of_a_plan_that_another_reserved_are_joined(engram, served):
    """A step meets bundles that a background plan has reserved and not yet begun to read."""
    store = served(engram, dram="16MiB")
    for seed in range(4):
        text = engram.tokens(700, seed)
        background = store.prefetch(text, priority="background")
        step = store.prefetch(text[:100])
        with step, background:
            assert np.array_equal(packed(step, 14), engram.expected(14, text[:100]))
            assert np.array_equal(packed(background, 14), engram.expected(14, text))


@pytest.mark.parametrize("queue", QUEUES)
def test_a_step_promotes_the_background_reads_that_it_waits_for(engram, served, queue):
    """Thousands of background reads are queued; a step that needs some of them does not wait for the others."""
    store = served(engram, queue=queue, dram="16MiB")
    text = engram.tokens(1500)
    stalled_reads(store)
    background = store.prefetch(text, priority="background")
    assert until(lambda: reading(store) and store.stats().pending_pages > 500)
    step = store.prefetch(text[25:30], lookback=text[:25])   # the first bundles are in the ring, most wait for page records
    assert until(lambda: store.stats().promoted_reads > 0)
    clear_faults(store)
    with step, background:
        step.wait()
        background.wait()
        published = store._plan.layers["published_ns"].reshape(-1, len(store.layers))
        assert published[step._row].max() < published[background._row, 1], "the step came last"
        assert_served(engram, store, step, text[25:30], lookback=text[:25])
        assert np.array_equal(packed(background, 1), engram.expected(1, text))


def test_a_step_is_served_during_a_large_background_prefetch(engram, served):
    """Step batches come and go while a background batch of many thousand reads is under way."""
    store = served(engram, dram="24MiB", tuning=dataclasses.replace(QUICK, depth=32))
    text = engram.tokens(4000)
    background = store.prefetch(text, priority="background")
    served_before, worst = 0, 0.0
    while store._plan.words[background._base + p.W_STAGE] != p.DONE and served_before < 300:
        begin = time.monotonic()
        tokens = engram.tokens(5, 100 + served_before)
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
        worst = max(worst, time.monotonic() - begin)
        served_before += 1
    assert served_before >= 5, "the background batch was over at once"
    with background:
        assert np.array_equal(packed(background, 14), engram.expected(14, text))


@pytest.mark.parametrize("queue", QUEUES)
def test_page_records_are_kept_for_steps(engram, served, queue):
    """A background batch that has more reads to make than there are records leaves a quarter of them to steps."""
    store = served(engram, queue=queue, dram="16MiB")
    stalled_reads(store)
    records = len(store._state.pages)
    background = store.prefetch(engram.tokens(1500), priority="background")
    assert until(lambda: reading(store) and store.stats().pending_pages > records // 2)
    assert not until(lambda: store.stats().pending_pages > records * 3 // 4, 0.2)
    step = store.prefetch(engram.tokens(5, 1))
    assert until(lambda: store._plan.words[step._base + p.W_STAGE] == p.WAITING)
    assert store.stats().pending_pages > records // 2 + 4 * 20
    clear_faults(store)
    with step, background:
        assert_served(engram, store, step, engram.tokens(5, 1))
        assert np.array_equal(packed(background, 14), engram.expected(14, engram.tokens(1500)))


def test_warm_fills_the_cache_and_holds_no_slots(engram, served):
    store = served(engram, dram=engram.dram_for(3000))
    text = engram.tokens(300)
    store.warm(text)
    assert quiet(store)
    assert store.stats().slots_in_use == 6                   # the dead bundles
    misses = sum(store.stats().misses.values())
    with store.prefetch(text) as batch:
        assert_served(engram, store, batch, text)
    assert sum(store.stats().misses.values()) - misses < 0.1 * engram.distinct((text, {}))
    store.warm([ssdgram.Sequence(text[:50]), ssdgram.Sequence(text[50:], lookback=text[:50])])
    store.warm(text[3:], lookback=text[:3])
    assert quiet(store)


def test_warm_with_more_than_the_cache_holds(engram, served):
    """Window by window: never too large, never in a step's way."""
    store = served(engram, dram=engram.dram_for(100))
    for seed in range(5):
        store.warm(engram.tokens(700, seed))
        tokens = engram.tokens(10, 50 + seed)
        with store.prefetch(tokens) as batch:
            batch.wait(timeout_s=10)
            assert_served(engram, store, batch, tokens)
    assert quiet(store, 30)
    assert store.stats().tokens >= 5 * 700


def test_warm_warns_of_nothing_and_leaves_nothing(engram, served, recwarn):
    store = served(engram)
    for seed in range(600):                                  # more than there are batch rows
        store.warm(engram.tokens(3, seed))
        if seed % 50 == 0:
            assert quiet(store)
    assert quiet(store) and not recwarn.list
    assert len(store._alive) <= 256


# ---------------------------------------------------------------- cancelling


@pytest.mark.parametrize("queue", QUEUES)
def test_cancelled_at_random(engram, served, queue):
    """A thousand batches, most of them released at some moment before use: no slot is lost, nobody else's bytes change."""
    store = served(engram, dram=engram.dram_for(1600), queue=queue)
    random = np.random.default_rng(3)
    texts = [engram.tokens(int(random.integers(1, 30)), seed) for seed in range(60)]
    flying = []
    for _ in range(BATCHES):
        text = texts[random.integers(60)]
        priority = "background" if random.random() < 0.3 else "step"
        batch = store.prefetch(text, priority=priority)
        choice = random.random()
        if choice < 0.5:
            batch.release()
        elif choice < 0.7:
            with batch, contextlib.suppress(TimeoutError):
                batch.wait(timeout_s=random.random() * 1e-3)
        else:
            flying.append((text, batch))
        if len(flying) > 5:
            text, batch = flying.pop(int(random.integers(len(flying))))
            with batch:
                if random.random() < 0.5:
                    layer = int(random.choice(store.layers))
                    assert np.array_equal(packed(batch, layer), engram.expected(layer, text))
    for text, batch in flying:
        with batch:
            assert_served(engram, store, batch, text)
    check_planner(store, engram)
    stats = store.stats()
    assert stats.slots_free + stats.slots_idle + stats.slots_in_use == stats.slots and stats.slots_in_use == 6
    assert stats.cancelled > 0.15 * BATCHES


def test_cancelled_while_its_reads_are_in_the_drive(engram, served):
    """Its reads land before their buffers are reused: they fill the cache, and the next batch is a hit."""
    store = served(engram)
    tokens = engram.tokens(10)
    stalled_reads(store)
    batch = store.prefetch(tokens)
    assert until(lambda: reading(store))
    batch.release()
    assert until(lambda: store.stats().oldest_ticket is None)
    assert store.stats().slots_in_use > 6                    # the reads keep their slots
    clear_faults(store)
    assert until(lambda: store.stats().slots_in_use == 6)
    reads = store.stats().reads
    with store.prefetch(tokens) as batch:
        assert_served(engram, store, batch, tokens)
    assert store.stats().reads == reads


def test_a_release_that_comes_too_late_does_not_meet_the_next_batch(engram, served):
    """A warming that ends by itself as it is cancelled leaves a release in the ring, and its row may be submitted anew behind it."""
    store = served(engram, dram="16MiB")
    warming = store.warm(engram.tokens(8000))                # slices to work on: the ring is looked at now and then
    for seed in range(300):
        row = int(np.flatnonzero(store._plan.words[p.W_STAGE::store._line] == p.FREE_BATCH)[0])
        with store._lock:
            store._push_release(row)
            batch = store.prefetch(engram.tokens(3, seed))
        with batch:
            batch.wait(timeout_s=10)
    warming.cancel()
    assert quiet(store, 30)


# ---------------------------------------------------------------- a long random life


class Life:
    """Random prefetches, waits, results, releases and warmings against the plain model, from one thread."""

    def __init__(self, made, store, seed):
        self.made, self.store = made, store
        self.random = np.random.default_rng(seed)
        self.flying = []

    def request(self):
        """Sequences (as arguments of the model), some with dead positions and lookbacks, often of few different tokens."""
        random, requests = self.random, []
        for _ in range(int(random.integers(1, 4))):
            count = int(random.integers(0, 14))
            pool = 4 if random.random() < 0.4 else self.made.vocabulary
            context = {"lookback": random.integers(0, pool, int(random.integers(0, 5))), "participates": random.random(count) < 0.9}
            requests.append((random.integers(0, pool, count), context))
        return requests

    def step(self):
        """One random move."""
        random, store = self.random, self.store
        move = random.random()
        if move < 0.45 or not self.flying:
            requests = self.request()
            sequences = [ssdgram.Sequence(tokens, **context) for tokens, context in requests]
            priority = "background" if random.random() < 0.25 else "step"
            self.flying.append((requests, store.prefetch(sequences, priority=priority)))
        elif move < 0.5:
            store.warm([ssdgram.Sequence(tokens, **context) for tokens, context in self.request()])
        elif move < 0.8:
            self.check(*self.flying[int(random.integers(len(self.flying)))])
        else:
            requests, batch = self.flying.pop(int(random.integers(len(self.flying))))
            if random.random() < 0.5:
                self.check(requests, batch)
            batch.release()
        while len(self.flying) > 6:
            self.flying.pop(0)[1].release()

    def check(self, requests, batch):
        layer = int(self.random.choice(self.store.layers))
        try:
            while True:
                try:
                    batch.wait(layer, timeout_s=0.02)
                    break
                except ssdgram.ReadTimeoutError:             # a slow disk
                    pass
        except (ssdgram.StoreBusyError, ssdgram.BatchTooLargeError):         # our own batches hold the slots, or too few are there
            return
        found = packed(batch, layer)
        want = np.concatenate([self.made.expected(layer, tokens, **context) for tokens, context in requests])
        np.testing.assert_array_equal(found, want)

    def end(self):
        for requests, batch in self.flying:
            self.check(requests, batch)
            batch.release()
        self.flying.clear()


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("slots", [100, 400, 3000])
@pytest.mark.parametrize("store_name", ["engram", "wide"])
def test_a_long_random_life(request, served, queue, slots, store_name):
    made = request.getfixturevalue(store_name)
    store = served(made, dram=made.dram_for(max(slots, 100), queue=queue), queue=queue)
    life = Life(made, store, seed=slots)
    for turn in range(400):
        life.step()
        if turn % 200 == 199:
            life.end()
            check_planner(store, made)
    life.end()
    check_planner(store, made)


def test_a_long_random_life_of_three_threads(engram, served):
    """One store, three threads, each with batches of its own."""
    store = served(engram, dram=engram.dram_for(700))
    failures = []

    def live(seed):
        life = Life(engram, store, seed)
        try:
            for _ in range(400):
                life.step()
            life.end()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# ---------------------------------------------------------------- the drive's health


@pytest.mark.parametrize("queue", QUEUES)
def test_a_drive_that_stops_answering_is_noticed_however_the_planner_sleeps(engram, served, queue):
    """The planner may be asleep before a reader has the read in the drive; it must look at its age all the same."""
    store = served(engram, queue=queue, tuning=Tuning(readers=1, depth=16, spin_us=0.0, degraded_after_s=0.05, degraded_wait_s=0.05))
    for seed in range(15):
        set_fault(store, FAULT_STALL)
        batch = store.prefetch(engram.tokens(1, seed))
        assert until(lambda: store.stats().state == "degraded"), f"not noticed, try {seed}"
        clear_faults(store)
        assert until(lambda: store.stats().state == "ready")
        assert until(batch.ready)                            # (a wait gives up at once if a read takes 50 ms meanwhile)
        with batch:
            assert_served(engram, store, batch, engram.tokens(1, seed))
    assert store.stats().degraded >= 15


def test_the_checker_sees_a_lost_slot(engram, served):
    """check_planner can fail."""
    store = served(engram, check=False)
    with store.prefetch(engram.tokens(20)) as batch:
        batch.wait()
    check_planner(store, engram)
    slots, control = store._plan.slots, store._plan.control
    slot = int(np.flatnonzero((slots["status"] == p.SLOT_READY) & (slots["refs"] == 0))[0])
    for breaking, mending in (
            (lambda: slots["refs"].__setitem__(slot, 1), lambda: slots["refs"].__setitem__(slot, 0)),
            (lambda: control.__setitem__(p.C_IDLE, control[p.C_IDLE] - 1), lambda: control.__setitem__(p.C_IDLE, control[p.C_IDLE] + 1)),
            (lambda: slots["x"].__setitem__(slot, slots["x"][slot] + 1), lambda: slots["x"].__setitem__(slot, slots["x"][slot] - 1)),
            (lambda: store._state.slab.__setitem__(slot * store._stride, store._state.slab[slot * store._stride] ^ 1),
             lambda: store._state.slab.__setitem__(slot * store._stride, store._state.slab[slot * store._stride] ^ 1))):
        breaking()
        with pytest.raises(AssertionError):
            check_planner(store, engram)
        mending()
    check_planner(store, engram)


def test_tunings(engram, served):
    """Depth one, many readers, no spinning, much spinning: the same rows."""
    tokens = engram.tokens(200)
    for changes in ({"readers": 1, "depth": 1}, {"readers": 3, "depth": 2, "background_depth": 1}, {"readers": 4, "spin_us": 500.0},
                    {"readers": 2, "spin_us": 0.0, "retries": 0}, {"depth": 64, "batches": 2}):
        tuning = dataclasses.replace(QUICK, **changes)
        for queue in QUEUES:
            store = served(engram, tuning=tuning, queue=queue)
            for priority in ("background", "step"):
                with store.prefetch(tokens, priority=priority) as batch:
                    assert_served(engram, store, batch, tokens)
            store.close()
