"""The README keeps its word: its Python runs, its commands exist, its links lead somewhere, the two commands come first."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import ssdgram.cli as cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code_lines(text):
    """Lines of indented and fenced blocks, and commands within a line."""
    inside = False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside or line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`((?:ssdgram|make) [^`]+)`", line)


def commands(program):
    """Arguments of the calls of `program` in the README and the docs."""
    for path in [ROOT / "README.md", *DOCS]:
        for line in code_lines(path.read_text()):
            line = re.sub(r"^(RUN |python -m )", "", line.split("#")[0].strip())
            for part in line.split("&&"):
                if part.split()[:1] == [program]:
                    yield path.name, shlex.split(part)[1:]


def test_the_first_screen_names_the_two_commands():
    screen = README.splitlines()[:24]
    for command in ("make demo", "make test"):
        assert any(line.strip().startswith(command) for line in screen), command


def test_make_targets_exist():
    used = {(name, words[0]) for name, words in commands("make") if words}
    assert {target for _, target in used} >= {"demo", "test"}
    for name, target in used:
        assert target in MAKE_TARGETS, f"{name} names `make {target}`"


@pytest.mark.parametrize(("name", "words"), list(commands("ssdgram")))
def test_commands_and_their_options_exist(name, words):
    context = click.Context(cli.main)
    command = cli.main
    for number, word in enumerate(words):
        if not isinstance(command, click.Group):
            break
        if word.startswith("-") or not word.islower():       # an option, or a stand-in such as COMMAND
            continue
        command = command.get_command(context, word)
        assert command is not None, f"{name} names `ssdgram {' '.join(words[:number + 1])}`"
    known = {option for parameter in [*command.params, *cli.main.params] for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known, f"{name}: ssdgram {' '.join(words)}"


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", *DOCS]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_python_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10, "style rule 10: ten lines that run"
        answer = subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", block], cwd=tmp_path, capture_output=True,
                                env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, timeout=280)
        assert answer.returncode == 0, answer.stderr
        assert int(answer.stdout) > 0


def test_the_figures_on_the_first_screen_are_those_of_the_committed_run():
    text = " ".join(README[README.index("**Measured**"):].partition("\n\n")[0].split())
    run = json.loads((ROOT / "bench/results/gpu-gather.json").read_text())
    assert run["facts"]["gpu"].removeprefix("NVIDIA ") in text and "python -m ssdgram.bench.gpu --sections gather" in text
    ours = run["gather"]["us"]["whole dram"]
    ways = [us for way, us in run["gather"]["peer"]["us"].items() if re.fullmatch(r"pinned, \w+ pages( sorted)?", way)]
    assert len(ways) == 4
    theirs = [min(us) for us in zip(*ways, strict=True)]
    for figures in (f"256 tokens from an 8 GiB cache in DRAM takes {ours[3]:.0f} us", f"table takes {theirs[3]:.0f} us at its best",
                    f"1024 tokens: {ours[4]:.0f} and {theirs[4]:.0f} us", f"8192: {ours[5] / 1e3:.2f} and {theirs[5] / 1e3:.2f} ms"):
        assert figures in text, figures


def test_the_format_page_names_every_field():
    from ssdgram.geometry import Geometry
    from ssdgram.layout import manifest

    page = (ROOT / "docs/format.md").read_text()
    for name in (*manifest.FIELDS, *(field.name for field in dataclasses.fields(Geometry))):
        assert name in page, f"docs/format.md does not name {name}"
    for file in (manifest.MANIFEST, manifest.JOURNAL, manifest.TOKEN_MAP, "stripe.json"):
        assert file in page


def test_troubleshooting_names_every_error():
    from ssdgram import errors

    table = (ROOT / "docs/troubleshooting.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+Error)`", table))
    leaves = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.SSDGramError)
              and name not in ("SSDGramError", "StoreError")}
    assert named == leaves
