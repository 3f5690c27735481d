"""The callers' compiled functions: rows of batches, and what only a GPU's frames use, byte by byte."""

import numpy as np
import pytest
from made_stores import quiet

from ssdgram import _plan_state as p
from ssdgram._calls import BAD_ID, F_COUNT, F_POSITIONS, NO_ROW, frame_is_idle, free_row, load_frame, load_ready, release
from ssdgram.store import Tuning


def test_a_row_is_found_for_tokens_that_are_some(engram, served):
    """Bad ids are told before anything else: also while no row is free; what takes no part is not looked at."""
    store = served(engram, tuning=Tuning(readers=1, depth=16, batches=3, crew=0))
    tokens, flags = engram.tokens(4), np.full(4, 5, np.uint8)
    assert free_row(store._address, tokens, flags) == 1      # the first is the dead bundles'
    with store.prefetch([1]) as one, store.prefetch([2]) as two:
        assert {one._row, two._row} == {1, 2} and free_row(store._address, tokens, flags) == NO_ROW
        tokens[2] = engram.vocabulary
        assert free_row(store._address, tokens, flags) == BAD_ID - 2
        flags[2] = 4
        assert free_row(store._address, tokens, flags) == NO_ROW


def test_a_row_is_handed_back_by_its_own_batch_alone(engram, served):
    store = served(engram)
    batch = store.prefetch(engram.tokens(5))
    assert not release(store._address, batch._row, batch.ticket + 1) and not release(store._address, batch._row, 0)
    assert store.stats().oldest_ticket == batch.ticket
    assert release(store._address, batch._row, batch.ticket)
    batch._disown()
    assert quiet(store)


def test_a_rows_words_start_from_nothing(engram, served):
    """What the GPU stored behind the gathers of the row's last batch is not taken for this one's."""
    store = served(engram)
    store._plan.gpu_words[:] = 7
    with store.prefetch(engram.tokens(5)) as batch:
        layers = len(store.layers)
        words = store._plan.gpu_words.reshape(-1, layers)
        assert (words[batch._row] == 0).all() and (np.delete(words, batch._row, 0) == 7).all()


@pytest.mark.parametrize("positions", [0, 1, 5, 8])
def test_a_frame_takes_a_batchs_slots(positions):
    layers, most, orders, row = 2, 8, 3, 4
    slots = np.random.default_rng(positions).integers(-9, 1000, (layers, positions, orders)).astype(np.int32)
    frame, numbers = np.full((layers, most, orders), 77, np.int32), np.zeros(layers, np.int64)
    words, used, records = np.zeros(layers, np.int64), np.array([1, 0], np.uint8), np.zeros(8 * layers, p.LAYER)
    load_frame(records, row, slots, frame, numbers, words, used, 12)
    np.testing.assert_array_equal(frame[:, :positions], slots)
    assert (frame[:, positions:] == -1).all() and numbers.tolist() == [12, 12]
    assert records["word"].tolist() == [words.ctypes.data if k == row * layers else 0 for k in range(8 * layers)]
    assert records["expected"].tolist() == [12 if k == row * layers else 0 for k in range(8 * layers)]


def test_a_frame_is_idle_when_the_layers_that_it_gathers_have_its_number():
    words = np.array([5, 4], np.int64)
    assert frame_is_idle(words, np.array([1, 0], np.uint8), 5)
    assert not frame_is_idle(words, np.array([1, 1], np.uint8), 5)
    assert frame_is_idle(words, np.array([0, 0], np.uint8), 9)


def test_a_ready_batch_is_loaded_in_one_step(engram, served):
    """As by load_frame; not before all its layers are there, nor before the frame's last launch has ended."""
    store, tokens, most = served(engram), engram.tokens(5), 8
    layers, orders = len(store.layers), store.geometry.orders
    slots, numbers, words, used = np.full((layers, most, orders), 77, np.int32), *np.zeros((2, layers), np.int64), np.ones(layers, np.uint8)
    about = np.zeros(F_COUNT, np.int64)
    about[:] = slots.ctypes.data, numbers.ctypes.data, words.ctypes.data, used.ctypes.data, most, 0
    with store.prefetch(tokens) as batch:
        batch.wait()
        plan_words, line = store._plan.words, batch._base + p.W_LAYER
        plan_words[line + layers - 1] = 0                    # as if the last layer were still read
        assert not load_ready(store._address, batch._row, about) and about[-1] == 0
        plan_words[line + layers - 1] = p.LAYER_READY
        words[0] = -1                                        # as if the first layer's last gather still ran
        assert not load_ready(store._address, batch._row, about) and (slots == 77).all()
        words[0] = 0
        about[F_POSITIONS] = 4
        assert not load_ready(store._address, batch._row, about) and (slots == 77).all()
        about[F_POSITIONS] = most
        assert load_ready(store._address, batch._row, about)
        np.testing.assert_array_equal(slots[:, :5], batch._slots)
        records = store._plan.layers[batch._row * layers:(batch._row + 1) * layers]
        assert (slots[:, 5:] == -1).all() and numbers.tolist() == [1] * layers == records["expected"].tolist() and about[-1] == 1
        assert records["word"].tolist() == [words.ctypes.data + 8 * k for k in range(layers)]
        words[:] = 1                                         # the GPU has gathered, or the slots would never be given back
