"""`ssdgram trace` from end to end: build, stats, record of another process, replay; mistakes in one line."""

import json
import sys

import pytest
from click.testing import CliRunner
from vectors import GOLDEN

import ssdgram.cli as cli
from ssdgram.tools.trace import Trace

TOKENIZER = str(GOLDEN / "tiny_v41" / "tokenizer.json")


def run(*arguments):
    return CliRunner().invoke(cli.main, ["trace", *map(str, arguments)])


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(4):
        words = "the rows of one n-gram " * 20 * (number + 1)
        (tmp_path / "text" / f"{number}.txt").write_text(f"a file of text, number {number}: {words}")
    return tmp_path / "text"


@pytest.fixture
def built(text, tmp_path):
    answer = run("build", text, "--tokenizer", TOKENIZER, "-o", tmp_path / "text.trace")
    assert answer.exit_code == 0, answer.output
    return tmp_path / "text.trace"


def test_build_says_what_it_made(text, tmp_path):
    answer = run("build", text, text / "0.txt", "--tokenizer", TOKENIZER, "--tokens", 100, "-o", tmp_path / "t.trace")
    assert answer.exit_code == 0 and "100 tokens" in answer.output and "sha256" in answer.output
    assert Trace.load(tmp_path / "t.trace").positions == 100


def test_build_without_text_is_one_line(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    answer = run("build", tmp_path, "--tokenizer", TOKENIZER, "-o", tmp_path / "t.trace")
    assert answer.exit_code == 1 and "no text in" in answer.output and not (tmp_path / "t.trace").exists()


def test_stats_prints_tables_and_json(built):
    config = GOLDEN / "tiny_v41" / "config.json"
    answer = run("stats", built, "--config", config)
    assert answer.exit_code == 0, answer.output
    for word in ("Reuse", "Working set", "Duplicates", "decode 64", "prefill 2048", "prefix cache"):
        assert word in answer.output
    answer = run("stats", built, "--config", config, "--json", "--block", 4)
    assert json.loads(answer.output)["prefix"]["block"] == 4


def test_replay_prints_and_is_json(engram, built):
    answer = run("replay", built, engram.out, "--dram", "8MiB", "--decode", 4, "--step-ms", 1, "--batches", 20)
    assert answer.exit_code == 0, answer.output
    assert "decode of 4 streams" in answer.output and "hit rate" in answer.output and "stall of a batch" in answer.output
    answer = run("replay", built, engram.out, "--dram", "8MiB", "--prefill", 50, "--warm", 0, "--ahead", 1, "--json")
    figures = json.loads(answer.output)
    assert figures["positions"] == Trace.load(built).positions and figures["shape"] == "prefill in chunks of 50"


PROGRAM = """
import sys
import ssdgram
with ssdgram.open(sys.argv[1], dram="8MiB") as store, store.prefetch([5, 6, 7]) as batch:
    batch.wait()
sys.exit(int(sys.argv[2]))
"""


def test_record_runs_a_command_and_keeps_what_it_asked(engram, tmp_path):
    out = tmp_path / "live.trace"
    answer = run("record", "-o", out, "--", sys.executable, "-c", PROGRAM, engram.out, 0)
    assert answer.exit_code == 0, answer.output
    assert Trace.load(out).tokens.tolist() == [5, 6, 7]
    answer = run("replay", out, engram.out, "--dram", "8MiB", "--warm", 0)
    assert "as recorded" in answer.output and "3 tokens" in answer.output
    answer = run("record", "-o", tmp_path / "keys.trace", "--keys", sys.executable, "-c", PROGRAM, engram.out, 3)
    assert answer.exit_code == 3, "the command's own status"
    assert run("stats", tmp_path / "keys.trace").exit_code == 0
    answer = run("replay", tmp_path / "keys.trace", engram.out)
    assert answer.exit_code == 1 and "not replayed" in answer.output


def test_a_second_run_reports_its_own_file_and_an_unwritten_one_is_a_failure(tmp_path):
    out = tmp_path / "a b.trace"
    writes = "import os, pathlib; _, _, path = os.environ['SSDGRAM_TRACE_RECORD'].split(':'); pathlib.Path(path{}).write_bytes({})"
    answer = run("record", "-o", out, "--", sys.executable, "-c", writes.format("", "b'first'"))
    assert answer.exit_code == 0 and f"{out}: 5 bytes; next: ssdgram trace stats '{out}'" in answer.output
    answer = run("record", "-o", out, "--", sys.executable, "-c", writes.format(".replace('b.', 'b-1.')", "b'the second'"))
    assert answer.exit_code == 0 and "a b-1.trace: 10 bytes" in answer.output and ": 5 bytes" not in answer.output
    answer = run("record", "-o", out, "--", sys.executable, "-c", writes.format(".replace('b.', 'b-2.')", "b''"))
    assert answer.exit_code == 1 and "a b-2.trace: not written" in answer.output and not (tmp_path / "a b-2.trace").exists()


def test_a_recording_that_has_no_place_is_refused_before_the_command_runs(tmp_path):
    answer = run("record", "-o", tmp_path / "none" / "t.trace", "--", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert answer.exit_code == 1 and "may write to" in answer.output and not (tmp_path / "ran").exists()


def test_more_streams_than_documents_are_told(built, engram):
    answer = run("replay", built, engram.out, "--dram", "8MiB", "--decode", 64, "--batches", 5)
    assert answer.exit_code == 0 and "of 64 streams are in use" in answer.output
    assert "streams are in use" not in run("replay", built, engram.out, "--dram", "8MiB", "--decode", 1, "--batches", 5).output


def test_record_of_a_command_without_a_store_says_so(tmp_path):
    answer = run("record", "-o", tmp_path / "t.trace", "--", sys.executable, "-c", "pass")
    assert answer.exit_code == 1 and "nothing was recorded: the command opened no store" in answer.output
    assert run("record", "-o", tmp_path / "t.trace", "no-such-program-here").exit_code == 2


def test_mistakes_are_one_line(built, engram, tmp_path):
    (tmp_path / "bad.trace").write_bytes(b"no trace")
    for arguments, words in ((["stats", tmp_path / "bad.trace"], "is no trace"),
                             (["stats", built, "--store", engram.out, "--tokenizer", TOKENIZER], "a store brings its own"),
                             (["replay", built, tmp_path], "manifest.json"),
                             (["build", __file__, "-o", tmp_path / "t.trace", "--tokenizer", tmp_path / "bad.trace"], "is no tokenizer"),
                             (["build", __file__, "-o", tmp_path / "nowhere" / "t.trace"], "choose another -o")):
        answer = run(*arguments)
        assert answer.exit_code == 1 and words in answer.output and answer.output.count("\n") == 1, answer.output
    assert run("replay", built, engram.out, "--decode", 4, "--prefill", 4).exit_code == 2
    assert run("replay", built, engram.out, "--slack-ms", 1).exit_code == 2
