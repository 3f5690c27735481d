"""The HBM tier's rules without a GPU: the test is the copier and the GPU, and looks at what the plans name."""

import dataclasses

import numpy as np
import pytest
from made_stores import until

from ssdgram import _opening
from ssdgram import _plan_state as p

COPIES = 64                                                  # slots of the tier


@pytest.fixture
def tiered(engram, served, monkeypatch):
    """A store on the CPU whose planner has a tier of COPIES slots. Nobody makes its copies."""
    real = _opening.shape_of
    monkeypatch.setattr(_opening, "shape_of", lambda *arguments: dataclasses.replace(real(*arguments), hbm_slots=COPIES))
    return served(engram)


def planned(store, tokens):
    """The plan of a step: slots int32 [layers, tokens, orders]; -2 - k stands for slot k of the tier."""
    with store.prefetch(tokens) as batch:
        batch.wait()
        return batch._slots.copy()


def asked(store):
    """(slots, slots of the tier) of the copies that are asked for, or were last."""
    pairs = store._plan.copies.reshape(-1, 2)[:int(store._plan.control[p.C_COPIES])]
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def test_a_copy_is_named_by_plans_once_the_gpu_has_made_it(engram, tiered):
    store, tokens = tiered, engram.tokens(6)
    control = store._plan.control
    assert until(lambda: planned(store, tokens) is not None and control[p.C_COPYING] == 1)
    slots, copies = asked(store)
    assert len(slots) > 0 and len(set(copies.tolist())) == len(copies) and (store._plan.slots["hbm"][slots] == copies).all()
    for _ in range(20):                                      # a long time, in which the GPU has not said so
        assert (planned(store, tokens) >= 0).all()
    assert control[p.C_COPYING] == 1 and store._plan.stats[p.S_COPIED] == 0
    before = planned(store, tokens)
    store._plan.copy_word[0] = control[p.C_COPY_REQUESTED]   # the GPU, behind the copies
    assert until(lambda: (planned(store, tokens) < 0).any())
    found, where = planned(store, tokens), dict(zip(slots.tolist(), copies.tolist(), strict=True))
    named = np.isin(before, slots)
    assert (found[named] == [-2 - where[slot] for slot in before[named].tolist()]).all()
    assert store._plan.stats[p.S_COPIED] >= len(slots)
