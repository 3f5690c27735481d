"""bench engines_tp2: two ranks on one server, on the CPU over gloo; what is counted, and that nothing waits for ever."""

import multiprocessing
import time

import pytest
import tp2_on_cpu
from checkpoints import small_engram

import ssdgram
from ssdgram.bench import engines_tp2

pytestmark = pytest.mark.slow

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp2")
    ssdgram.convert(small_engram(folder / "checkpoint", vocab_size=3000, heads=4, max_ngram=4), folder / "store")
    return folder / "checkpoint", folder / "store"


def test_two_ranks_give_the_bits_read_once_and_hold_one_budget(made, monkeypatch):
    monkeypatch.setattr(engines_tp2, "DRAM", "32MiB")
    found = engines_tp2.identity(*made, steps=12, timeout_s=120, work=tp2_on_cpu.rows_work)
    assert found["not_as_wanted"] == {"outputs": 0, "bytes_read": 0, "held": 0} and found["wrong"] == 0
    one, two = found["one_rank"], found["two_ranks"]
    assert len(two["ranks"]) == 2 and two["bytes_read"] == one["bytes_read"] > 0
    assert 0 < two["held"] <= two["budget"] and [rank["columns_of_the_stock_table"] for rank in two["ranks"]] == [6, 6]
    assert multiprocessing.active_children() == []


def test_a_wrong_output_of_one_rank_counts(made):
    found = engines_tp2.identity(*made, steps=1, timeout_s=60, work=tp2_on_cpu.wrong_work)
    assert found["not_as_wanted"]["outputs"] == 1 and found["wrong"] >= 1


@pytest.mark.parametrize(("work", "message", "timeout_s"), [
    (tp2_on_cpu.failing_work, "rank 1 failed:(?s:.*)the second rank has had enough", 200),
    (tp2_on_cpu.dying_work, "rank 1 has ended", 200),
    (tp2_on_cpu.sleeping_work, r"rank \[0, 1\] did not end in time", 3),
])
def test_ranks_that_fail_die_or_hang_end_the_run(made, work, message, timeout_s):
    """Ranks that fail or die end it long before the time that it has; their other rank would sleep for ten minutes."""
    begun = time.monotonic()
    with pytest.raises(engines_tp2.RankError, match=message):
        engines_tp2.measure(work, *made, world=2, steps=1, timeout_s=timeout_s)
    assert time.monotonic() - begun < 180 and multiprocessing.active_children() == []
