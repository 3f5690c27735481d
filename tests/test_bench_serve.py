"""bench serve in miniature: every measurement runs, counts what it says it counts, and writes its facts. No times are judged."""

import json
import mmap
import threading

import numpy as np
import pytest
from click.testing import CliRunner

from ssdgram.bench import cold, facts, footprint, mapped, material, serve, step, warm
from ssdgram.cli import main
from ssdgram.errors import NoSpaceError
from ssdgram.tools.text import Document
from ssdgram.tools.trace_build import build

DRAM = "32MiB"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return material.make(material.Material(tmp_path_factory.mktemp("serve"), 1_000))


@pytest.fixture(scope="module")
def tokens(made):
    words = ["for", "each", "row", "of", "the", "table", "in", "turn", "a", "reader", "says", "where", "it", "lies", "and"]
    random = np.random.default_rng(0)
    return build(made.tokenizer, [Document("test/words", " ".join(random.choice(words, 1_500)))], 1_024).tokens


def test_plan_measures_warm_batches_of_each_kind(made, tokens):
    result = warm.plan(made.out, tokens, positions=128, each=2, rounds=2, dram=DRAM)
    assert len(result["kinds"]) == 4
    for figure in result["kinds"].values():
        assert figure["us"] >= figure["least_us"] > 0 and figure["cpu_us"] > 0 and 0 < figure["batches"] <= 4
    assert result["kinds"]["random"]["bundles"] == pytest.approx(6, abs=0.1)
    assert result["kinds"]["random, four times over"]["bundles"] == pytest.approx(1.5, abs=0.1)


def test_step_plans_resident_streams_that_were_never_read(made):
    result = step.step(made.out, streams=(1, 8), rounds=3, dram=DRAM)
    assert {count: cell["count"] for count, cell in result["plan_us"].items()} == {1: 3, 8: 3}
    assert all(0 < cell["p50"] <= cell["p99"] for cell in result["plan_us"].values())
    assert result["resident_bundles"] > 6 * 1000


def test_step_refuses_a_cache_that_cannot_keep_its_streams(made):
    with pytest.raises(RuntimeError, match="streams fit into 7MiB, 1000000 are wanted"):
        step.step(made.out, streams=(1_000_000,), rounds=1, dram="7MiB")


def test_plan_refuses_a_cache_that_cannot_keep_its_batches(made, tokens):
    with pytest.raises(RuntimeError, match="no batch was warm: 7MiB is too little"):
        warm.plan(made.out, tokens, positions=128, each=3, rounds=1, dram="7MiB")


def test_gil_compares_the_same_work_alone_and_beside(made, tokens):
    before = set(threading.enumerate())
    result = warm.gil(made.out, tokens[:256], cold_tokens=64, steps=6, rounds=1, period_s=0, dram=DRAM)
    assert set(threading.enumerate()) <= before              # the computing thread is gone
    assert result["reads_s"]["alone"] > 0 and result["reads_s"]["beside"] > 0
    for side in ("alone", "beside"):
        assert 0 < result["engine_us"][side]["p50"] <= result["caller_us"][side]["p50"]
        assert result["engine_us"][side]["count"] + result["steps_left_out"] >= 6


def test_priority_counts_steps_during_the_background_prefetch(made, tokens):
    result = warm.priority(made.out, tokens[:256], background=1024, steps=5, rounds=2, pause_s=0, dram=DRAM)
    assert result["undisturbed_us"]["count"] == 10 and result["during_us"]["count"] > 0
    assert result["limit_us"] == 2 * result["undisturbed_us"]["p99"] + result["one_read_us"]["p50"]


def test_cold_compares_equal_rows(made, tokens):
    result = cold.cold(made, tokens, positions=128, rounds=1, dram=DRAM)
    assert result["rows"] == 128 * 48 and set(result["seconds"]) == {"ssdgram", "map", "map, MADV_RANDOM"}
    assert 0 < result["reads"] <= result["rows"]


def test_cold_refuses_rows_that_differ(made, tokens, monkeypatch):
    gather = mapped.MappedTables.gather
    monkeypatch.setattr(mapped.MappedTables, "gather", lambda self, ids: gather(self, np.roll(ids, 1, axis=0)))
    with pytest.raises(RuntimeError, match="not those of the map"):
        cold.cold(made, tokens, positions=128, rounds=1, dram=DRAM)


def test_growth_ends_with_a_full_cache(made):
    result = cold.rss(made.out, dram=DRAM, batches=20, longest=256)
    marks = result["marks"]
    assert marks["imported"] < marks["opened"] < marks["filled"] and result["evictions"] > 0
    assert result["slots_free"] <= result["slots"] // 32
    assert result["growth_since"]["imported"] > 0.8          # the slab was really touched


def test_opening_is_measured_in_a_fresh_process_without_torch(made):
    result = cold.opening({"small": made.out}, rounds=1, dram=DRAM)
    assert result["stores"]["small"]["torch"] is False
    assert result["stores"]["small"]["open_s"] > 0 and result["stores"]["small"]["bytes"] > 1 << 20


def test_a_failing_child_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="ManifestError"):
        footprint.ask("opening", tmp_path, DRAM)


def test_residency_sees_what_was_read_and_what_was_dropped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    assert mapped.resident([path]) == 64 * mmap.PAGESIZE
    mapped.drop([path])
    left = mapped.resident([path])
    if left:
        pytest.skip("this file system keeps what it is asked to drop (one in memory does)")
    with open(path, "rb") as file:
        file.read(1)
    assert 0 < mapped.resident([path]) <= 64 * mmap.PAGESIZE


def test_making_refuses_without_room(tmp_path):
    with pytest.raises(NoSpaceError, match=r"take \d+\.\d GiB"):
        material.make(material.Material(tmp_path, 10**11))
    assert list(tmp_path.iterdir()) == []


def test_the_command_saves_facts_and_removes_what_it_made(tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(facts, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(serve, "text", lambda folder, kind, tokenizer, limit: build(
        tokenizer, [Document(f"test/{kind}", "a word and another " * 4_000)], 10_000))
    answer = CliRunner().invoke(main, ["bench", "serve", "cold", "--folder", str(tmp_path / "made"), "--rows", "1000",
                                       "--small-rows", "1000", "--dram", DRAM, "--rounds", "1"], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    saved = json.loads((tmp_path / "results" / "serve-cold.json").read_text())
    assert {"facts", "load", "text", "seconds", "ratio", "ok"} <= set(saved)
    assert str(tmp_path) not in json.dumps(saved) and saved["text"]["prose"]["text_sha256"]
    assert not (tmp_path / "made").exists()
