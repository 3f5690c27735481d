"""The callers' compiled functions that only a GPU's frames use: what they write, byte by byte."""

import numpy as np
import pytest

from ssdgram import _plan_state as p
from ssdgram._calls import frame_is_idle, load_frame


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
