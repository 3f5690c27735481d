"""bench plan: halves that share no token and differ in nothing else, cells, what counts as kept."""

import numpy as np
import pytest

from ssdgram.bench.plan import Cell, cells_of, halves
from ssdgram.errors import ConfigError
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_replay import Pace


def numbered(*lengths):
    """Documents in which no token occurs twice."""
    return Trace.of_documents(np.arange(sum(lengths), dtype=np.int32), np.cumsum([0, *lengths]).astype(np.int64), {})


def test_halves_share_no_token_and_take_one_of_each_two_neighbours():
    one, other = halves([numbered(100, 7, 50), numbered(30)], 10)
    assert len(one.lookback) == len(other.lookback) == (10 + 1 + 5 + 3) // 2
    assert max(np.diff(one.starts)) <= 10
    for a, b in zip(one.starts[:-1], other.starts[:-1]):
        assert abs(int(one.tokens[a]) - int(other.tokens[b])) <= 40
    assert (halves([numbered(100)], 10)[0].tokens == halves([numbered(100)], 10)[0].tokens).all()
    assert not (halves([numbered(100)], 10, seed=1)[0].tokens == halves([numbered(100)], 10)[0].tokens).all()


def test_no_token_is_in_both_halves():
    one, other = halves([numbered(1000, 333)], 16)
    assert not set(one.tokens.tolist()) & set(other.tokens.tolist())


def test_recordings_are_cut_in_the_middle():
    recording = Trace(np.arange(8, dtype=np.int32), np.arange(0, 9, 2), {}, np.zeros(4, np.uint8), batches=np.array([0, 1, 2, 3, 4]))
    one, other = halves([recording], 16)
    assert one.tokens.tolist() == [0, 1, 2, 3] and other.tokens.tolist() == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="several recordings"):
        halves([recording, recording], 16)


def test_cells_warm_and_measure_the_same_number_of_tokens():
    decode, prefill = cells_of((1, 14), (64,), (2048,), 20_480, 20.0, 16_000.0, 1)
    assert decode.warm == decode.measured == 320 and decode.ahead == 0
    assert decode.pace.step_s == 0.02 and decode.pace.slack_s == pytest.approx((0.0005, 0.007))
    assert prefill.warm == prefill.measured == 10 and prefill.ahead == 1 and prefill.pace.step_s == pytest.approx(0.128)
    assert (decode.name, prefill.name) == ("decode 64", "prefill 2048")


def test_a_trace_that_is_too_short_for_a_cell_is_refused():
    cell = Cell("prefill", 16, Pace(0.1, (0.0,)), 0, 5, 5)
    assert len(cell.batches(numbered(160), 3)) == 10
    with pytest.raises(ConfigError, match=r"5 \+ 5 are wanted"):
        cell.batches(numbered(159), 3)
