"""warmup: every kind of store is served once, a second run compiles nothing, and the command says where the code is."""

import os
import subprocess
import sys

import numba
import pytest
from click.testing import CliRunner
from numba.core import event

from ssdgram import warmup
from ssdgram._compiled import CACHE_FOLDER
from ssdgram.cli import main
from ssdgram.errors import UnavailableError
from ssdgram.geometry import ENCODINGS


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return list(warmup.warm_up(tmp_path_factory.mktemp("first")))


def test_every_encoding_is_served(first):
    assert [done.name for done in first] == [step.name for step in warmup.steps()]
    assert [done.name for done in first[:len(warmup.KINDS)]] == list(warmup.KINDS)
    assert all(done.left_out == "" for done in first)
    kinds = {wanted.get("encoding", "fp8_ue8m0") for wanted in warmup.KINDS.values()}
    assert kinds == set(ENCODINGS)


def test_a_second_run_compiles_nothing(first, tmp_path):
    assert [done.functions for done in warmup.warm_up(tmp_path)] == [0] * len(first)


def test_what_is_compiled_is_counted():
    """Other processes fill the same folder meanwhile, so the files there are not what counts."""
    function = numba.njit(lambda x: x + 1)
    function.py_func.__module__ = "ssdgram.made_up"
    with event.install_listener("numba:compile", warmup.Compilations()) as compilations:
        assert function(1) == 2 and function(2) == 3
        assert numba.njit(lambda x: x + 2)(1) == 3           # not ours
    assert compilations.count == 1


def test_what_a_new_process_opens_is_all_there(first, tmp_path):
    """Open, prefetch, rows in a process of its own compile nothing: warm-up left nothing out."""
    program = f"""
import pathlib
from numba.core import event
from ssdgram import warmup
with event.install_listener("numba:compile", warmup.Compilations()) as compilations:
    warmup._serve_once(warmup.KINDS["PLE, bf16"], pathlib.Path({str(tmp_path)!r}))
print(compilations.count)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280)
    assert answer.stdout == "0\n", answer.stderr


def test_a_step_that_this_machine_has_no_use_for_is_left_out(tmp_path, monkeypatch):
    def no_gpu(folder):
        raise UnavailableError("no GPU")

    begun = []
    monkeypatch.setattr(warmup, "KINDS", {})
    monkeypatch.setattr(warmup, "_registered", [])
    warmup.register(warmup.Step("GPU kernels", no_gpu))
    warmup.register(warmup.Step("something", lambda folder: (folder / "file").touch()))
    outcome = [(done.name, done.left_out) for done in warmup.warm_up(tmp_path, begun.append)]
    assert outcome == [("GPU kernels", "no GPU"), ("something", "")]
    assert begun == ["GPU kernels", "something"]


def test_the_command_says_where_the_code_is(monkeypatch):
    monkeypatch.setattr(warmup, "KINDS", {})
    answer = CliRunner().invoke(main, ["warmup"])
    assert answer.exit_code == 0
    assert str(CACHE_FOLDER) in answer.output and f"{warmup.functions()} kept in all" in answer.output


def test_the_numbers_add_up_and_no_line_says_that_warmup_would_do_it_ahead(tmp_path):
    """In an empty folder: a function that calls another, one of them for two sets of argument types; each compilation takes "long"."""
    source = tmp_path / "of_the_test.py"
    source.write_text("""
import numpy as np
from ssdgram import _compiled, warmup
from ssdgram.cli import main

@_compiled.compiled_inner
def inner(values):
    return values[0]

@_compiled.compiled
def outer(values):
    return inner(values) + 1

def compile_them(folder):
    for dtype in (np.int64, np.float64):
        _compiled.compile_for(outer, np.ones(1, dtype))

for function in (inner, outer):
    function.py_func.__module__ = "ssdgram.of_the_test"
_compiled.COMPILE_NOTICE_S = 0.0
warmup.KINDS.clear()
warmup._registered[:] = [warmup.Step("made up", compile_them)]
main(["warmup"])
""")
    answer = subprocess.run([sys.executable, str(source)], capture_output=True, text=True, timeout=200,
                            env={**os.environ, "SSDGRAM_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)})
    assert answer.returncode == 0, answer.stderr
    assert ", 4 functions compiled\n" in answer.stdout
    assert "\n4 functions compiled now, 4 kept in all (a function once for each set of argument types)" in answer.stdout
    assert "compiling outer, once for this installation and processor (about a minute)" in answer.stderr
    assert "ahead" not in answer.stdout + answer.stderr


def test_the_folder_can_be_chosen(tmp_path):
    environment = {**os.environ, "SSDGRAM_CACHE_DIR": str(tmp_path)}
    program = "from ssdgram._compiled import CACHE_FOLDER; print(CACHE_FOLDER.parent)"
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).strip() == str(tmp_path)
