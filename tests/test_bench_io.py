"""bench io: what lies at --file is never written to; results go where they are looked for; what is missing is one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import ssdgram
from ssdgram.bench import facts, io
from ssdgram.cli import main
from ssdgram.errors import ConfigError, UnavailableError


def test_a_file_that_is_there_is_only_read_and_a_smaller_one_refused(tmp_path):
    path = tmp_path / "column-00.rows"                       # of a store, say: 4 GiB of noise over it would be the end of it
    path.write_bytes(b"rows" * 100)
    with pytest.raises(ConfigError, match="holds 400 bytes: expected one of at least 401 bytes"):
        io.make_file(path, 401)
    assert not io.make_file(path, 400) and path.read_bytes() == b"rows" * 100
    with pytest.raises(ConfigError, match="is no file"):
        io.make_file(tmp_path, 1)


def test_a_made_file_has_the_size_asked_for_and_half_of_one_does_not_stay(tmp_path, monkeypatch):
    assert io.make_file(tmp_path / "made", 12_345) and (tmp_path / "made").stat().st_size == 12_345

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(io.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        io.make_file(tmp_path / "half", 4096)
    assert not (tmp_path / "half").exists()


def test_without_fio_it_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(io.shutil, "which", lambda name: None)
    answer = CliRunner().invoke(main, ["bench", "io", "--file", str(tmp_path / "file"), "--gib", "0.01", "--memory-gib", "0"])
    assert answer.exit_code == 1 and "fio is not there" in answer.output and not (tmp_path / "file").exists()


def test_nonsense_is_refused_by_the_options_name(tmp_path):
    for option in ("--gib", "--depth", "--rounds", "--seconds"):
        answer = CliRunner().invoke(main, ["bench", "io", "--file", str(tmp_path / "file"), option, "0"])
        assert answer.exit_code == 2 and option in answer.output and not (tmp_path / "file").exists()


def test_the_busy_interpreter_writes_its_result_and_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(io, "with_busy_python", lambda *arguments: [{"ok": True}])
    answer = CliRunner().invoke(main, ["bench", "io", "--file", str(tmp_path / "file"), "--gib", "0.001", "--gil"], catch_exceptions=False)
    assert answer.exit_code == 0 and str(tmp_path / "results" / "io-gil.json") in answer.output and "stays" in answer.output
    assert json.loads((tmp_path / "results" / "io-gil.json").read_text())["busy_python"] == [{"ok": True}]


def test_results_of_an_installed_package_go_to_the_current_folder(tmp_path):
    installed = tmp_path / "site-packages" / "ssdgram"
    installed.parent.mkdir()
    copy = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], ignore=shutil.ignore_patterns('__pycache__', 'results'))"
    subprocess.run([sys.executable, "-c", copy, str(Path(ssdgram.__file__).parent), str(installed)], check=True)
    told = subprocess.run([sys.executable, "-c", "from ssdgram.bench.facts import RESULTS; print(RESULTS)"], cwd=tmp_path, text=True,
                          env={"PYTHONPATH": str(installed.parent), "PATH": ""}, check=True, capture_output=True).stdout.strip()
    assert Path(told) == tmp_path / "bench" / "results"
    assert facts.RESULTS == Path(facts.__file__).resolve().parent / "results"


def test_a_bench_of_the_gpu_says_at_once_that_there_is_none(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="no CUDA device"):
        facts.need_cuda()
    for command in (["gpu_store", "--folder", str(tmp_path / "made")], ["gds", "--dir", str(tmp_path / "made")]):
        answer = CliRunner().invoke(main, ["bench", *command])
        assert answer.exit_code == 1 and "no CUDA device" in answer.output and not (tmp_path / "made").exists()


def test_engines_without_their_files_says_who_brings_them(tmp_path):
    pytest.importorskip("torch")
    answer = CliRunner().invoke(main, ["bench", "engines", "--peer", str(tmp_path)])
    assert answer.exit_code == 1 and "make test-engines" in answer.output and list(tmp_path.iterdir()) == []
