"""Batch: its results, given `out`s, waiting, addresses, and what is left when it is released."""

import ctypes
import math
import time

import numpy as np
import pytest
from made_stores import QUEUES, assert_served, clear_faults, packed, set_fault

import ssdgram
from ssdgram._state import FAULT_STALL
from ssdgram.store import Tuning

torch = pytest.importorskip("torch")


@pytest.fixture
def store(engram, served):
    return served(engram)


# ---------------------------------------------------------------- results


def test_results_are_new_tensors(engram, store):
    with store.prefetch(engram.tokens(10)) as batch:
        first, second = batch.packed(1), batch.packed(1)
        assert first.data_ptr() != second.data_ptr()
        first.zero_()
        assert np.array_equal(packed(batch, 1), second.numpy())
        rows = batch.rows(1)
        rows.zero_()
        assert batch.rows(1).any()


def test_results_outlive_release_and_close(engram, served):
    store = served(engram, dram=engram.dram_for(100))
    tokens = engram.tokens(6)
    batch = store.prefetch(tokens)
    results = {layer: (batch.packed(layer), batch.rows(layer)) for layer in store.layers}
    copies = {layer: (p.clone(), r.clone()) for layer, (p, r) in results.items()}
    batch.release()
    for seed in range(1, 20):                                # the slots hold other bundles by now
        with store.prefetch(engram.tokens(6, seed)) as other:
            other.wait()
    store.close()
    for layer, (rows, floats) in results.items():
        assert np.array_equal(rows.numpy(), engram.expected(layer, tokens))
        assert torch.equal(rows, copies[layer][0]) and torch.equal(floats, copies[layer][1])


def test_out_is_filled_and_returned(engram, store):
    tokens = engram.tokens(10)
    with store.prefetch(tokens) as batch:
        out = torch.full((10, 12, 66), 7, dtype=torch.uint8)
        assert batch.packed(14, out=out) is out
        assert np.array_equal(out.numpy(), engram.expected(14, tokens))
        values = torch.full((10, 12, 64), 7, dtype=torch.bfloat16)
        assert batch.rows(14, out=values) is values
        assert torch.equal(values, batch.rows(14))


def test_out_inside_a_larger_tensor(engram, store):
    """A contiguous view is written and nothing beside it."""
    tokens = engram.tokens(10)
    whole = torch.full((30, 12, 66), 9, dtype=torch.uint8)
    with store.prefetch(tokens) as batch:
        batch.packed(1, out=whole[10:20])
    assert np.array_equal(whole[10:20].numpy(), engram.expected(1, tokens))
    assert (whole[:10] == 9).all() and (whole[20:] == 9).all()


@pytest.mark.parametrize("out", [
    lambda: torch.empty((10, 12, 65), dtype=torch.uint8), lambda: torch.empty((9, 12, 66), dtype=torch.uint8),
    lambda: torch.empty((10, 12, 66), dtype=torch.int8), lambda: torch.empty((10, 12, 66), dtype=torch.bfloat16),
    lambda: torch.empty((10, 12, 132), dtype=torch.uint8)[:, :, ::2], lambda: torch.empty((10 * 12 * 66,), dtype=torch.uint8),
    lambda: torch.empty((66, 12, 10), dtype=torch.uint8).permute(2, 1, 0),
    lambda: torch.empty(1, 1, 66, dtype=torch.uint8).expand(10, 12, 66),
    lambda: torch.empty((10, 12, 66), dtype=torch.uint8, device="meta"), lambda: np.empty((10, 12, 66), np.uint8), lambda: 5],
    ids=["dim", "positions", "dtype", "bf16", "strided", "flat", "permuted", "expanded", "meta", "numpy", "number"])
def test_a_wrong_out_is_refused(engram, store, out):
    with store.prefetch(engram.tokens(10)) as batch:
        with pytest.raises(ssdgram.ConfigError, match=r"out .*expected a contiguous torch.uint8 \[10, 12, 66\] on the CPU"):
            batch.packed(1, out=out())
        assert np.array_equal(packed(batch, 1), engram.expected(1, engram.tokens(10)))


def test_out_with_gradients(engram, store):
    """The values go into the memory of a parameter; no gradient is involved."""
    with store.prefetch(engram.tokens(10)) as batch:
        out = torch.nn.Parameter(torch.zeros((10, 12, 64), dtype=torch.bfloat16))
        assert torch.equal(batch.rows(1, out=out), batch.rows(1))


def test_results_are_on_the_cpu_whatever_the_default(engram, store):
    with store.prefetch(engram.tokens(10)) as batch, torch.device("meta"):
        assert batch.packed(1).device.type == batch.rows(1).device.type == batch.addresses(1).device.type == "cpu"


# ---------------------------------------------------------------- addresses


def bytes_at(address, count):
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8).copy()


def test_addresses_lead_to_whole_bundles(engram, store):
    """codes of all heads, then their scales; the same bundle has one address."""
    tokens = np.tile(engram.tokens(10), 2)
    keys = engram.geometry.keys(tokens, engram.token_map)
    with store.prefetch(tokens) as batch:
        for index, layer in enumerate(store.layers):
            addresses = batch.addresses(layer)
            assert addresses.dtype == torch.int64 and addresses.shape == (20, 3) and (addresses % 64 == 0).all()
            for t in range(20):
                for order in range(3):
                    bundle = engram.bundle_bytes(3 * index + order, keys[t, index, order])
                    assert np.array_equal(bytes_at(int(addresses[t, order]), 4 * 66), bundle)
            assert len(set(addresses[3:10].reshape(-1).tolist()) - set(addresses[13:].reshape(-1).tolist())) == 0


def test_addresses_stay_until_release(engram, served):
    """Whatever else is read meanwhile, in a cache of hardly more than this batch."""
    store = served(engram, dram=engram.dram_for(engram.distinct((engram.tokens(20), {})) + 90))
    with store.prefetch(engram.tokens(20)) as batch:
        before = {layer: batch.addresses(layer) for layer in store.layers}
        for seed in range(1, 60):
            with store.prefetch(engram.tokens(8, seed)) as other:
                assert_served(engram, store, other, engram.tokens(8, seed))
        assert store.stats().evictions > 1000
        for layer, addresses in before.items():
            assert torch.equal(addresses, batch.addresses(layer))
        assert_served(engram, store, batch, engram.tokens(20))


# ---------------------------------------------------------------- waiting


def test_wait_for_one_layer_then_all(engram, store):
    with store.prefetch(engram.tokens(100)) as batch:
        batch.wait(14)
        batch.wait(1)
        batch.wait()
        batch.wait(None, 0)
        assert_served(engram, store, batch, engram.tokens(100))


@pytest.mark.parametrize("queue", QUEUES)
def test_wait_does_not_wait_for_other_layers(engram, served, queue):
    """A drive that holds back one layer's file holds back that layer alone."""
    store = served(engram, queue=queue, tuning=Tuning(readers=1 if queue == "uring" else 8))
    set_fault(store, FAULT_STALL, file=store.layers.index(14) * 12 + 2)
    with store.prefetch(engram.tokens(3)) as batch:
        batch.wait(1, timeout_s=20)
        assert np.array_equal(packed(batch, 1), engram.expected(1, engram.tokens(3)))
        with pytest.raises(ssdgram.ReadTimeoutError):
            batch.wait(14, timeout_s=0.2)
        clear_faults(store)
        assert_served(engram, store, batch, engram.tokens(3))


def test_a_wait_of_no_time_is_a_look(engram, store):
    set_fault(store, FAULT_STALL)
    with store.prefetch(engram.tokens(5)) as batch:
        for timeout_s in (0, 0.0, -1, 1e-9):
            begin = time.monotonic()
            with pytest.raises(ssdgram.ReadTimeoutError):
                batch.wait(timeout_s=timeout_s)
            assert time.monotonic() - begin < 20             # not the 30 s of a wait
        clear_faults(store)
        batch.wait(timeout_s=math.inf)
        batch.wait(timeout_s=0)


def test_unknown_layers(engram, store):
    with store.prefetch(engram.tokens(5)) as batch:
        for call in (batch.wait, batch.rows, batch.packed, batch.addresses):
            with pytest.raises(ssdgram.ConfigError, match=r"layer 0 is not served: the layers of this store are \[1, 14\]"):
                call(0)


# ---------------------------------------------------------------- the rest


def test_what_a_batch_says_of_itself(engram, store):
    batch = store.prefetch(engram.tokens(9))
    assert len(batch) == 9 and batch.ticket == 1
    assert repr(batch) == "<Batch 1: 9 positions, open>"
    batch.wait()
    timing = batch.timing
    assert timing["bundles"] - timing["misses"] <= 6 and timing["misses"] == engram.distinct((engram.tokens(9), {}))
    assert timing["probes"] == 9 * 6 and 0 < timing["reads"] <= 4 * timing["misses"] and timing["joined"] == 0
    assert 0 <= timing["planned_us"] <= timing["published_us"] < 60e6 and timing["queued_us"] >= 0
    batch.release()
    assert repr(batch) == "<Batch 1: 9 positions, released>" and len(batch) == 9
    with store.prefetch(engram.tokens(9)) as again:
        assert again.ticket == 2


def test_batches_take_no_new_attributes(engram, store):
    with store.prefetch(engram.tokens(2)) as batch, pytest.raises(AttributeError):
        batch.anything = 1


def test_a_time_out_that_is_no_number(engram, store):
    """It would never come."""
    with store.prefetch(engram.tokens(3, 77), priority="background") as batch:
        set_fault(store, FAULT_STALL)
        late = store.prefetch(engram.tokens(3, 78))
        try:
            with pytest.raises(ssdgram.ConfigError, match="timeout_s is nan"):
                late.wait(timeout_s=float("nan"))
        finally:
            clear_faults(store)
        late.wait()
        batch.wait()
        late.release()
