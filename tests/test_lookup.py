"""Slices of the look-up: as many positions as may be planned at a time, whatever lies between them."""

import numpy as np

from ssdgram import _lookup
from ssdgram._compiled import compiled
from ssdgram._plan_state import SLICE
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES


@compiled
def end_of_slice(flags, start, stop):  # type: ignore[no-untyped-def]
    return _lookup.end_of_slice(flags, start, stop)


def test_a_slice_has_so_many_positions():
    flags = np.full(1000, PARTICIPATES | OUTPUT, np.uint8)
    assert end_of_slice(flags, 0, 1000) == SLICE and end_of_slice(flags, 7, 1000) == 7 + SLICE
    assert end_of_slice(flags, 7, 20) == 20 and end_of_slice(flags, 999, 1000) == 1000


def test_streams_of_one_token_are_not_cut_by_their_lookback():
    flags = np.tile(np.array([PARTICIPATES, PARTICIPATES, PARTICIPATES, PARTICIPATES | OUTPUT], np.uint8), 100)
    assert end_of_slice(flags, 0, 400) == 4 * SLICE and end_of_slice(flags, 4 * SLICE, 400) == 400


def test_tokens_without_any_position_end_too():
    flags = np.full(100_000, PARTICIPATES, np.uint8)
    assert end_of_slice(flags, 0, 100_000) == _lookup.MOST_FLAT
