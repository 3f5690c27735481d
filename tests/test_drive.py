"""Drives: rates between what was measured, bursts, bench io's file, and what is no drive."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.bench.facts import RESULTS
from ssdgram.errors import ConfigError
from ssdgram.tools.drive import Drive


def test_a_drive_of_a_rate_and_a_latency():
    drive = Drive.of(100_000, 80)
    assert drive.latency_s == pytest.approx(80e-6) and drive.top == pytest.approx(100_000)
    assert drive.rate(1) == pytest.approx(12_500) and drive.rate(8) == pytest.approx(100_000) and drive.rate(200) == pytest.approx(100_000)
    assert drive.rate(4) == pytest.approx(50_000), "below the knee the latency rules"
    assert drive.seconds(0) == 0 and drive.seconds(1) == pytest.approx(80e-6) and drive.seconds(4) == pytest.approx(80e-6)
    assert drive.seconds(1000) == pytest.approx(0.01) and drive.seconds(10**6) == pytest.approx(10)
    assert Drive.of(1000, 10).top == pytest.approx(1000), "a latency shorter than the rate allows"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 512), st.integers(1, 10**6)), min_size=1, max_size=6, unique_by=lambda point: point[0]),
       st.integers(1, 600))
def test_more_reads_never_take_less(points, depth):
    points = sorted(points)
    drive = Drive(tuple(float(at) for at, _ in points), tuple(np.maximum.accumulate([float(rate) for _, rate in points]).tolist()), depth)
    seconds = drive.seconds(np.arange(0, 2000, 7))
    assert (np.diff(seconds) >= -1e-12).all() and seconds[0] == 0
    assert drive.seconds(10 * depth) == pytest.approx(drive.seconds(depth) + 9 * depth / drive.top)


def test_means_of_counts_lie_between():
    drive = Drive.of(1000, 5000)
    assert drive.seconds(0.5) == pytest.approx(0.5 * drive.seconds(1)) and drive.seconds(50.5) > drive.seconds(50)


def test_several_side_by_side_have_the_latency_of_one():
    drive = Drive((1, 32, 256), (8_000, 45_000, 62_000))
    many = drive.faster(4)
    assert many.top == pytest.approx(4 * drive.top) and many.latency_s == pytest.approx(drive.latency_s)
    assert many.seconds(4 * 256) == pytest.approx(drive.seconds(256)) and many.seconds(4) == pytest.approx(drive.seconds(1))
    assert drive.faster(1) is drive


def test_the_committed_result_of_bench_io_is_a_drive():
    drive = Drive.of_bench(RESULTS / "io.json")
    assert drive.depths[0] == 1 and 1_000 < drive.top < 10_000_000 and 1e-6 < drive.latency_s < 0.1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"drive": 5}', '{"drive": []}', '{"drive": [{"depth": 1}]}',
                                  '{"drive": [{"depth": 0, "uring": {"reads_s": 5}}]}',
                                  '{"drive": [{"depth": 1, "uring": {"reads_s": -5}}]}',
                                  '{"drive": [{"depth": 1, "uring": {"reads_s": "x"}}]}',
                                  '{"drive": [{"depth": 1, "uring": {"reads_s": 1e999}}]}'])
def test_what_is_no_result_of_bench_io_is_refused(tmp_path, text):
    (tmp_path / "io.json").write_text(text)
    with pytest.raises(ConfigError):
        Drive.of_bench(tmp_path / "io.json")


@pytest.mark.parametrize(("depths", "rates"), [((), ()), ((2, 1), (5, 5)), ((1,), (5, 6)), ((1, 1), (5, 6)), ((1,), (0,)),
                                              ((1,), (math.nan,))])
def test_points_that_are_no_drive_are_refused(depths, rates):
    with pytest.raises(ConfigError, match="expected"):
        Drive(depths, rates)


@pytest.mark.parametrize(("rate", "latency"), [(0, 5), (5, 0), (-1, 5)])
def test_a_rate_or_latency_of_nothing_is_refused(rate, latency):
    with pytest.raises(ConfigError, match="more than 0"):
        Drive.of(rate, latency)


def test_it_is_json():
    assert json.loads(json.dumps(Drive.of(1000, 5000).to_json()))["depth"] == 256
