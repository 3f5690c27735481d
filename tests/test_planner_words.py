"""The words that a GPU stores, stored by hand: what the planner waits for before it looks at tokens or gives slots back.

The GPU's own tests (test_store_gpu.py) need a GPU; the rules that the planner keeps need only its words, so they are tested
on any machine. A word is an int64 that the test owns, entered where `CudaSide` and `Frame` enter theirs.
"""

import gc
import time
import weakref

import numpy as np
import pytest
from made_stores import assert_served, packed, quiet, starves, until

import ssdgram
from ssdgram import _plan_state as p

torch = pytest.importorskip("torch")
LONG_ENOUGH_S = 0.03                                         # the planner looks at awaited words every 0.1 ms


def stage(store, row):
    return int(store._plan.words[row * store._line + p.W_STAGE])


def expect(store, batch, layer, words, number=1):
    """Have the planner wait for words[layer] to reach `number` before it gives the batch's slots back."""
    record = store._plan.layers[batch._row * len(store.layers) + layer]
    record["word"], record["expected"] = words[layer:].ctypes.data, number


class Device:
    """The part of a CUDA side that `prefetch` uses: tokens that "arrive" when the test says so."""

    def __init__(self, tokens, garbage):
        self.tokens, self.memory = tokens, np.full(len(tokens), garbage, np.int32)
        self.word, self.ticket = np.zeros(1, np.int64), 0

    def plan_memory(self, row, shape):
        return np.empty(shape, np.int32), None

    def tokens_to_host(self, sequences, n, flat_tokens, flat_flags, row, ticket):
        self.ticket = ticket
        return self.memory, flat_flags, self.word.ctypes.data

    def deliver(self):
        self.memory[:] = self.tokens
        self.word[0] = self.ticket

    def prefetch(self, store):
        """A batch of tokens that are still on the device."""
        sequence = ssdgram.Sequence(np.zeros(len(self.tokens), np.int32))
        sequence.device_tokens = self
        store._cuda = self
        try:
            return store.prefetch(sequence)
        finally:
            store._cuda = None


# ---------------------------------------------------------------- gathers (hazard 1)


def test_slots_stay_until_every_gathers_word_arrived(engram, served):
    """A released batch keeps its slots, though the cache is so small that the next batch needs them."""
    store = served(engram, dram=engram.dram_for(100))
    tokens, words = engram.tokens(10, 1), np.zeros(2, np.int64)
    batch = store.prefetch(tokens)
    batch.wait()
    addresses = [batch.addresses(layer).numpy() for layer in store.layers]
    before = [bundle_bytes(store, address) for address in addresses]
    for layer in range(2):
        expect(store, batch, layer, words, number=3)
    batch.release()
    words[:] = 2, 3                                          # of the first layer's three gathers one is still to come
    late = store.prefetch(engram.tokens(10, 2))
    small = store.prefetch(engram.tokens(1, 3))
    assert until(lambda: starves(store, late))
    with pytest.raises(ssdgram.StoreBusyError):
        late.wait(timeout_s=0.2)
    assert until(lambda: stage(store, batch._row) == p.UNWINDING) and store.stats().oldest_ticket == batch.ticket
    for address, data in zip(addresses, before):
        np.testing.assert_array_equal(bundle_bytes(store, address), data)
    words[0] = 3
    assert_served(engram, store, late, engram.tokens(10, 2))
    late.release()
    assert_served(engram, store, small, engram.tokens(1, 3))
    small.release()
    assert until(lambda: stage(store, batch._row) == p.FREE_BATCH)


def bundle_bytes(store, addresses):
    """Copies of the bundles at those addresses of the slab."""
    slots = (addresses - store._state.slab.ctypes.data) // store._stride
    return store._state.slab.reshape(-1, store._stride)[slots].copy()


def test_batches_end_in_the_order_of_their_words(engram, served):
    """Two streams finish out of order: the later batch's slots go back first, the earlier one's stay."""
    store = served(engram)
    words = np.zeros((2, 2), np.int64)
    batches = [store.prefetch(engram.tokens(5, seed)) for seed in range(2)]
    for batch, word in zip(batches, words):
        batch.wait()
        expect(store, batch, 0, word)
        batch.release()
    words[1, 0] = 1
    assert until(lambda: stage(store, batches[1]._row) == p.FREE_BATCH)
    time.sleep(LONG_ENOUGH_S)
    assert stage(store, batches[0]._row) == p.UNWINDING and store.stats().oldest_ticket == batches[0].ticket
    words[0, 0] = 1
    assert until(lambda: store.stats().oldest_ticket is None)


def test_a_batchs_memory_lives_until_its_row_is_free(engram, served):
    """Planner and GPU have its addresses: dropping the Batch frees nothing that they may still look at."""
    store = served(engram)
    words = np.zeros(2, np.int64)
    batch = store.prefetch(engram.tokens(5))
    batch.wait()
    expect(store, batch, 0, words)
    memory, row = [weakref.ref(array) for array in (batch._slots, batch._held)], batch._row
    batch.release()
    del batch
    gc.collect()
    store.prefetch([1]).release()
    assert until(lambda: stage(store, row) == p.UNWINDING) and all(array() is not None for array in memory)
    words[0] = 1
    assert until(lambda: stage(store, row) == p.FREE_BATCH)
    store.prefetch([1]).release()                            # rows that are free are looked for here
    assert all(array() is None for array in memory)


# ---------------------------------------------------------------- tokens (hazards 1 and 5)


def test_tokens_are_looked_at_when_their_word_arrived(engram, served):
    """What lies there before is another batch's, or nothing's."""
    store = served(engram)
    devices = [Device(engram.tokens(20, seed), garbage) for seed, garbage in enumerate((-5, 7))]     # no token; one, but not ours
    for device in devices:
        with device.prefetch(store) as batch:
            assert until(lambda: stage(store, batch._row) == p.AWAITING)
            time.sleep(LONG_ENOUGH_S)
            assert stage(store, batch._row) == p.AWAITING
            device.deliver()
            assert_served(engram, store, batch, device.tokens)
    assert quiet(store)                                      # the words are looked at until the rows are free


def test_a_batch_cancelled_before_its_tokens_came_keeps_their_memory(engram, served):
    """The GPU is still to write there, and to store the flag, which belongs to the row's next batch otherwise."""
    store = served(engram)
    device = Device(engram.tokens(20), -5)
    batch = device.prefetch(store)
    batch.release()
    assert until(lambda: stage(store, batch._row) == p.UNWINDING)
    time.sleep(LONG_ENOUGH_S)
    assert stage(store, batch._row) == p.UNWINDING
    device.deliver()
    assert until(lambda: stage(store, batch._row) == p.FREE_BATCH)


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1])
def test_a_bad_token_of_the_device_is_refused_before_it_is_hashed(engram, served, bad):
    store = served(engram)
    device = Device(engram.tokens(20), -5)
    device.tokens[11] = bad
    with device.prefetch(store) as batch:
        device.deliver()
        with pytest.raises(ssdgram.TokenError, match=f"token 11 .* is {bad}: expected 0"):
            batch.wait(timeout_s=10)
    assert quiet(store)
    with store.prefetch(engram.tokens(20)) as batch:         # and the store goes on
        assert np.array_equal(packed(batch, 1), engram.expected(1, engram.tokens(20)))
