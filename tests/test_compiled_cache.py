"""The folder of compiled code: one process saves at a time, what several saved is all there, and a folder that cannot be written."""

import os
import subprocess
import sys

import pytest

FUNCTION = """
from ssdgram._compiled import compiled, compile_for

@compiled
def twice(x):
    return x + x
"""
CALL = FUNCTION + """
import sys
compile_for(twice, 1j) if sys.argv[1] == "ahead" else None
print(twice({"int": 3, "float": 3.5, "complex": 3j}.get(sys.argv[1], 1j)), len(twice.stats.cache_hits), flush=True)
"""
SAVE = """
import fcntl
from numba.core import caching

def save(self, sig, data):
    with open(_compiled.CACHE_FOLDER / ".saving") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("held", flush=True)
        else:
            print("free", flush=True)

caching.FunctionCache.save_overload = save
from ssdgram import _compiled
""" + FUNCTION + "print(twice(3))\n"


@pytest.fixture
def program(tmp_path):
    """Starts a program in a process of its own, with a folder for compiled code that is empty at first."""
    def start(text, *arguments, folder=tmp_path / "code", **options):
        path = tmp_path / "program.py"
        if not path.exists():
            path.write_text(text)
        return subprocess.Popen([sys.executable, path, *arguments], env={**os.environ, "SSDGRAM_CACHE_DIR": str(folder)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    return start


def test_one_process_saves_at_a_time(program):
    assert program(SAVE).communicate(timeout=120)[0].split() == ["held", "6"]


def test_what_several_processes_save_at_once_is_all_there(program):
    wanted = {"int": "6", "float": "7.0", "complex": "6j"}
    for found in ("0", "1"):                                 # compiled, then loaded: each its own
        started = {name: program(CALL, name) for name in wanted}
        for name, process in started.items():
            out, errors = process.communicate(timeout=120)
            assert out.split() == [wanted[name], found], errors


def test_a_child_forked_meanwhile_does_not_keep_the_lock(program):
    process = program("""
import fcntl, os, time
from ssdgram import _compiled
with _compiled.compile_lock():
    child = os.fork()
    if child == 0:
        time.sleep(600)
with open(_compiled.CACHE_FOLDER / ".lock") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.kill(child, 9)
print("free")
""")
    out, errors = process.communicate(timeout=120)
    assert out.split() == ["free"], errors


@pytest.mark.parametrize("how", ["ahead", "int"])
def test_a_folder_that_cannot_be_written_costs_compiling_and_is_said(program, how):
    out, errors = program(CALL, how, folder="/proc/code").communicate(timeout=120)
    assert out.split() == ["2j" if how == "ahead" else "6", "0"], errors
    assert errors.count("compiled code cannot be kept in /proc/code/ssdgram") == 1 and "Traceback" not in errors
