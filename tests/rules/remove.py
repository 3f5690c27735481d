"""Take the rules out one at a time and see the tests fail: python tests/rules/remove.py [--gpu] [--hazard N] [--only TEXT] [--seen]

The tree is copied to a temporary folder. There the named tests run once with all rules in place and must pass; then, for one
rule after the other, its text is replaced, its tests run, and at least one must fail (or not end in time, or end the process).
A removal that does not even compile proves nothing and is an error, as is one whose text is not found exactly once.
Changed compiled code is compiled anew, about a minute for the planner, and kept in .rules-cache for the next run. `--list`
prints the table. Exit status: 0 if every rule is missed by a test, 1 if not, 2 if the table does not fit the sources.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from table import RULES, RottenRuleError, Rule

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*cache", "*.log", "results", "dist", "build")
TEST_S, RUN_S = 300, 900                                     # one test, and one run of a rule's tests, with what is compiled in it
NO_PROOF = re.compile(r"numba\.core\.errors|SyntaxError|ImportError|NameError|IndentationError")


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to: their ids by result, or the reason why there is no result."""

    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    ended: str = ""
    text: str = ""


def run(folder: Path, tests: Sequence[str], *options: str) -> Outcome:
    """Run tests of the tree in `folder`."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    cache = os.environ.get("SSDGRAM_CACHE_DIR", str(ROOT / ".rules-cache"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", f"--junitxml={report}",
               *options, *[f"tests/{test}" for test in tests]]
    environment = {**os.environ, "PYTHONPATH": str(folder), "SSDGRAM_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        return Outcome(ended=f"no end within {RUN_S} s")
    if done.returncode < 0 or not report.exists():
        return Outcome(ended=f"ended by signal {-done.returncode}" if done.returncode < 0 else "", text=done.stdout + done.stderr)
    return outcome_of(report, done.stdout)


def outcome_of(report: Path, text: str) -> Outcome:
    """The results in a JUnit report."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[kind].append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
    return Outcome(*(tuple(names) for names in found.values()), text=text)


def judge(rule: Rule, folder: Path) -> tuple[bool, str]:
    """Whether the rule's removal is noticed, and by what."""
    path = folder / rule.file
    whole = path.read_text()
    path.write_text(rule.removed_from(folder))
    try:
        outcome = run(folder, rule.tests, "-x")
    finally:
        path.write_text(whole)
    if outcome.ended:
        return True, outcome.ended
    if not outcome.failed:
        return False, "NOTHING: " + ("all were skipped" if not outcome.passed else f"{len(outcome.passed)} passed")
    if NO_PROOF.search(outcome.text):
        return False, "NO PROOF: without the rule the code does not compile"
    return True, outcome.failed[0].partition("::")[2] + (" (no end)" if f"Timeout >{TEST_S}" in outcome.text else "")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the rules that need a GPU, instead of the others")
    parser.add_argument("--only", metavar="TEXT", help="rules whose name or file has this text")
    parser.add_argument("--hazard", metavar="N", type=int, action="append", help="rules of that hazard (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--seen", action="store_true", help="the tests were seen to pass with all rules in place: not run for that again")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the result there too")
    options = parser.parse_args()
    rules = [rule for rule in RULES if rule.gpu == options.gpu and (options.only or "") in f"{rule.name} {rule.file}"
             and (options.hazard is None or rule.hazard in options.hazard)]
    try:
        for rule in RULES:
            rule.removed_from(ROOT)
            if rule.missing_tests(ROOT):
                raise RottenRuleError(f"{rule.name}: no such test: {rule.missing_tests(ROOT)}")
    except RottenRuleError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list or not rules:
        for rule in rules:
            print(f"{rule.hazard}  {rule.name:<62} {rule.file}")
        return 0
    lines = [f"{'':2} {'rule taken out':<62} {'missed by':<72} {'s':>4}"]
    print(lines[0], flush=True)
    with tempfile.TemporaryDirectory(prefix="ssdgram-rules-") as name:
        folder = Path(name, "tree")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT)
        tests = sorted({test for rule in rules for test in rule.tests})
        whole = Outcome() if options.seen else run(folder, tests)
        if not options.seen and (whole.failed or whole.ended or not whole.passed):
            print(f"with all rules in place: {whole.ended or whole.failed or whole.text}", file=sys.stderr)
            return 2
        missed = 0
        for rule in rules:
            begin = time.monotonic()
            noticed, how = judge(rule, folder)
            missed += not noticed
            lines.append(f"{rule.hazard:<2} {rule.name:<62} {how:<72} {time.monotonic() - begin:4.0f}")
            print(lines[-1], flush=True)
    lines.append(f"{len(rules) - missed} of {len(rules)} rules are missed by a test" + (
        "" if options.seen else f"; with all in place {len(whole.passed)} tests passed, {len(whole.skipped)} were skipped"))
    print(lines[-1])
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
