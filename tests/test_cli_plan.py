"""`ssdgram plan`: tables, JSON, recordings of keys, facts from bench io, mistakes in one line."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from test_miniature import text_like

import ssdgram.cli as cli
from ssdgram.bench.facts import RESULTS
from ssdgram.tools.trace import Trace


def run(*arguments):
    return CliRunner().invoke(cli.main, ["plan", *map(str, arguments)])


@pytest.fixture(scope="module")
def trace(tmp_path_factory, engram):
    path = tmp_path_factory.mktemp("plan") / "text.trace"
    text_like(12_000, engram.vocabulary).save(path)
    return path


def test_the_table_names_its_facts(engram, trace):
    answer = run(trace, "--store", engram.out, "--dram", "16MiB", "--decode", 8, "--prefill", 200, "--drive", RESULTS / "io.json",
                 "--hbm", "1MiB")
    assert answer.exit_code == 0, answer.output
    for words in ("decode, 8 streams", "prefill, chunks of 200", "choose --dram", "limited by", "LRU", "reads/s at best"):
        assert words in answer.output, words
    assert "assumed" not in answer.output and "off PCIe" in answer.output
    assert all(len(line) <= 81 for line in answer.output.splitlines() if line.startswith(" ") and "iB" in line[:9])


def test_streams_that_the_trace_cannot_fill_are_told(engram, trace):
    few = run(trace, "--store", engram.out, "--dram", "8MiB", "--decode", 4000)
    assert few.exit_code == 0 and "of 4000 streams are in use" in few.output
    assert "streams are in use" not in run(trace, "--store", engram.out, "--dram", "8MiB", "--decode", 1).output


def test_json_has_all_of_it(engram, trace):
    figures = json.loads(run(trace, "--store", engram.out, "--dram", "8MiB", "--decode", 4, "--json").output)
    assert figures["drive_assumed"] and figures["trace"] == Trace.load(trace).sha256
    made = figures["plans"][0]
    assert made["rows"] and made["recommended_dram"] in [row["dram"] for row in made["rows"]] and len(made["slack_ms"]) == 2
    assert all(0 <= row["hit_rate"] <= 1 and len(row["hit_rates"]) == 3 for row in made["rows"])


def test_recordings_are_planned_as_they_were(engram, trace, tmp_path):
    random = np.random.default_rng(0)
    keys = random.integers(0, 400, (3000, 3)) << 20
    Trace(np.empty(0, np.int32), np.arange(0, 3001, 10), {}, np.zeros(300, np.uint8), np.arange(0, 301, 3), keys).save(tmp_path / "k.trace")
    answer = run(tmp_path / "k.trace", "--store", engram.out, "--dram", "8MiB", "--reads-s", 60000)
    assert answer.exit_code == 0 and "as recorded" in answer.output
    answer = run(tmp_path / "k.trace", "--store", engram.out, "--decode", 4)
    assert answer.exit_code == 1 and "a recording" in answer.output


def test_mistakes_are_one_line(engram, trace, tmp_path):
    (tmp_path / "io.json").write_text("{}")
    for arguments, words in (([trace, "--store", engram.out, "--drive", tmp_path / "io.json"], "no result of `ssdgram bench io`"),
                             ([trace, "--store", engram.out, "--dram", "1KiB"], "need at least"),
                             ([trace, "--store", engram.out, "--dram", "many"], "expected bytes"),
                             ([tmp_path / "io.json"], "is no trace")):
        answer = run(*arguments)
        assert answer.exit_code == 1 and words in answer.output and answer.output.count("\n") == 1, answer.output
    assert run(trace, "--store", engram.out, "--slack", 0.1).exit_code == 2
    assert run(trace, "--store", engram.out, "--reads-s", 5, "--drive", RESULTS / "io.json").exit_code == 2


def test_check_compares_with_a_store(engram, trace):
    answer = run(trace, "--check", engram.out, "--dram", "16MiB", "--decode", 4, "--step-ms", 0.5, "--json")
    assert "[\n" in answer.output, answer.output
    rows = json.loads(answer.output[answer.output.index("[\n"):])
    assert [row["cell"] for row in rows] == ["decode 4"] * len(rows) and answer.exit_code == (0 if all(row["ok"] for row in rows) else 1)
    for row in rows:
        assert abs(row["hit_rate"]["predicted_for_this_text"] - row["hit_rate"]["measured"]) < 0.02
        assert row["reads_a_batch"]["measured"] >= 0 and row["drive"]["reads_s"][-1] > 0
