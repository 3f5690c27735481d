"""The demonstration, small: every row is compared, a single wrong bit is seen, and the table says what happened."""

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

from ssdgram import demo
from ssdgram.cli import main
from ssdgram.cli.demo import _short, table_of
from ssdgram.errors import UnavailableError

SMALL = {"vocab_size": 700, "tokens": 512, "chunk": 64, "dram": "64MiB"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return demo.run(tmp_path_factory.mktemp("demo"), **SMALL, say=lambda text: None)


def test_every_row_is_compared_and_right(outcome):
    assert [phase.name for phase in outcome.phases] == ["cold", "mixed", "warm"]
    for phase in outcome.phases:
        assert phase.wrong == 0
        assert phase.tokens == 512 and phase.rows == 512 * 48
        assert phase.useful_bytes == phase.rows * 264
        assert len(phase.wait_ms) == 8 and (phase.wait_ms > 0).all()
    assert outcome.rows == 3 * 512 * 48 and outcome.wrong == 0


def test_cold_reads_mixed_reads_less_warm_reads_nothing(outcome):
    cold, mixed, warm = outcome.phases
    assert cold.reads > mixed.reads > warm.reads == 0
    assert cold.bytes_read == cold.reads * 4096
    assert sum(warm.misses.values()) == 0 and sum(mixed.misses.values()) > 0
    assert set(cold.hits) == {("dram", 2), ("dram", 3), ("dram", 4)} and set(cold.misses) == {2, 3, 4}


def test_one_flipped_bit_is_seen(tmp_path_factory, monkeypatch):
    """The comparison can fail: a row that differs from what the checkpoint holds, and a value that torch would not have."""
    from ssdgram.tools import synth

    honest, calls = synth.expected_rows, []

    def flipped(*arguments):
        rows = honest(*arguments).copy()
        calls.append(1)
        if len(calls) == 3:
            rows[5, 7, 100] ^= 1
        return rows

    monkeypatch.setattr(synth, "expected_rows", flipped)
    outcome = demo.run(tmp_path_factory.mktemp("flipped"), **SMALL, say=lambda text: None)
    assert outcome.wrong == 1


def test_chunks_carry_their_lookback():
    class Trigrams:
        max_ngram = 4

    tokens = np.arange(10, dtype=np.int32)
    chunks = demo._chunks(tokens, 4, Trigrams)
    assert [chunk.tokens.tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [chunk.lookback.tolist() for chunk in chunks] == [[], [1, 2, 3]]


def test_a_missing_package_is_named():
    with pytest.raises(UnavailableError, match="no_such_package_at_all"):
        demo._need("torch", "no_such_package_at_all")


def test_the_table_says_it_all(outcome):
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table_of(outcome))
    text = console.export_text()
    for phase in outcome.phases:
        line = next(line for line in text.splitlines() if phase.name in line)
        assert str(phase.reads) in line and "512" in line and "…" not in line


@pytest.mark.parametrize(("value", "text"), [(0.7894, "0.79"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1234")])
def test_times_take_four_characters(value, text):
    assert _short(value) == text


def test_the_command_removes_what_it_made_and_fails_on_a_wrong_row(tmp_path, monkeypatch, outcome):
    made = []

    def run(folder, **settings):
        made.append(folder)
        (folder / "something").write_text("x")
        phases = [dataclasses.replace(phase, wrong=int(phase.name == "mixed")) for phase in outcome.phases]
        return demo.Outcome(phases, {"queue": "uring"})

    monkeypatch.setattr(demo, "run", run)
    answer = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)])
    assert answer.exit_code == 1 and "1 wrong" in answer.output
    assert made[0].parent == tmp_path and list(tmp_path.iterdir()) == []
    CliRunner().invoke(main, ["demo", "--dir", str(tmp_path), "--keep"])
    assert [path.name for path in tmp_path.iterdir()] == [made[1].name]
