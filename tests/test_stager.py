"""The step under way: steps that are cancelled between prefetch and use, ten thousand at random; early prefetch within its budget."""

import numpy as np
import pytest
import torch
from made_stores import quiet, until

import ssdgram
from ssdgram.engines.early import EarlyPrefetch
from ssdgram.engines.stager import Stager
from ssdgram.sequence import Sequence


def buffers(store, tokens):
    return {layer: torch.zeros(tokens, len(store.columns), store.dim, dtype=torch.bfloat16) for layer in store.layers}


@pytest.mark.parametrize("slots", ["tight", "roomy"])
def test_steps_cancelled_at_random_leak_nothing_and_disturb_nobody(engram, served, slots):
    """5,000 steps each, of which most are given up before, between or behind their layers; the others' rows are exact."""
    most = 6
    need = most * engram.geometry.groups + engram.geometry.groups
    store = served(engram, dram=engram.dram_for(need + 1) if slots == "tight" else "8MiB")
    stager, generator = Stager(store, buffers(store, most)), np.random.default_rng(7)
    texts = [engram.tokens(most, seed=seed) for seed in range(200)]
    wanted = {}
    used = 0
    for _ in range(5000):
        number, count = int(generator.integers(len(texts))), int(generator.integers(1, most + 1))
        stager.begin(Sequence(texts[number][:count]))
        fate = generator.random()
        if fate < 0.6:
            stager.end() if fate < 0.3 else None             # given up, or replaced by the next step
            continue
        for layer in store.layers[:1] if fate < 0.8 else store.layers:
            assert stager.fill(layer) and not stager.fill(layer)
            if (number, layer) not in wanted:
                with store.prefetch(texts[number]) as batch:
                    wanted[number, layer] = batch.rows(layer).view(torch.int16)
            assert torch.equal(stager.targets[layer][:count].view(torch.int16), wanted[number, layer][:count])
        used += not stager.active
    stager.end()
    assert used > 800 and quiet(store)
    assert store.stats().slots_in_use == len(store.layers) * store.geometry.orders


def test_a_step_larger_than_the_buffers_is_refused(engram, served):
    store = served(engram)
    stager = Stager(store, buffers(store, 4))
    with pytest.raises(ssdgram.BatchTooLargeError):
        stager.begin(Sequence(engram.tokens(5)))
    assert not stager.active and not stager.fill(store.layers[0])


def test_buffers_of_another_shape_are_refused(engram, served):
    store = served(engram)
    wrong = {layer: torch.zeros(4, 3, store.dim, dtype=torch.bfloat16) for layer in store.layers}
    with pytest.raises(ssdgram.ConfigError, match="expected rows of"):
        Stager(store, wrong)


def test_counts_tell_steps_apart(engram, served):
    store = served(engram)
    stager = Stager(store, buffers(store, 8))
    stager.stage(Sequence(engram.tokens(5)), drafts=2)
    stager.begin(None)
    stager.begin(Sequence(engram.tokens(3)))
    stager.end()
    counts = stager.counts
    assert (counts.steps, counts.idle_steps, counts.graph_steps, counts.tokens, counts.drafts, counts.abandoned) == (2, 1, 1, 8, 2, 1)


def test_graphs_are_captured_anew_for_other_buffers_only(engram, served, monkeypatch):
    store, made = served(engram), []
    staging = store.staging
    monkeypatch.setattr(store, "staging", lambda targets: made.append(dict(targets)) or staging(targets))
    stager, first, second = Stager(store, {}, most_tokens=8), buffers(store, 8), buffers(store, 8)
    views = {layer: target[:8] for layer, target in first.items()}           # other objects, the same memory
    shorter = {layer: target[:7] for layer, target in first.items()}
    for targets, count in ((first, 1), (dict(first), 1), (views, 1), (second, 2), (second, 2), (shorter, 3), (first, 4)):
        stager.stage(Sequence(engram.tokens(5)), targets=targets)
        assert len(made) == count and all(made[-1][layer].data_ptr() == target.data_ptr() for layer, target in targets.items())
    assert torch.equal(first[1], views[1]) and torch.equal(first[1].view(torch.int16), second[1].view(torch.int16))
    codes = {layer: torch.zeros(8, len(store.columns), store.row_bytes, dtype=torch.uint8) for layer in store.layers}
    stager.stage(Sequence(engram.tokens(5)), targets=codes)
    assert len(made) == 4 and not stager.active
    with store.prefetch(engram.tokens(5)) as batch:
        assert all(torch.equal(batch.packed(layer), target[:5]) for layer, target in codes.items())


def test_early_prefetch_keeps_its_budget_and_its_order(engram, served):
    store = served(engram)
    early = EarlyPrefetch(store, 100)
    for name in "abc":
        early.offer(name, engram.tokens(80, seed=ord(name)))
    early.pump()
    assert early.tokens == 100 and early.requests() == ["b", "c"]         # all of the first, a part of the second
    assert until(lambda: early._under_way() == 0)
    early.pump()
    assert early.tokens == 200 and early.requests() == ["c"]
    early.drop("c")
    assert until(lambda: early._under_way() == 0)
    early.pump()
    assert early.tokens == 200 and len(early) == 0


def test_what_is_scheduled_or_computed_is_not_fetched_early(engram, served):
    store = served(engram)
    early = EarlyPrefetch(store, 1000, image=3)
    early.offer("cached", engram.tokens(50), position=50)
    assert len(early) == 0
    early.offer("a", [3, 3, *engram.tokens(40).tolist(), -1, 10**9], position=4)        # images, placeholders: they take no part
    early.advance("a", 30)
    early.pump()
    assert early.tokens == 14
    early.offer("b", engram.tokens(10))
    early.advance("b", 10)
    early.advance("nobody", 5)
    assert len(early) == 0


def test_a_budget_of_nothing_turns_it_off(engram, served):
    early = EarlyPrefetch(served(engram), 0)
    early.offer("a", engram.tokens(50))
    early.pump()
    assert (len(early), early.tokens) == (0, 0)
    early.drop("a")
