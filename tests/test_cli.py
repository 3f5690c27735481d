"""The command line as such: names, help without imports, errors as one line, benchmarks found by their sources."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ssdgram
import ssdgram.cli as cli
from ssdgram.errors import ManifestError


def run(*arguments, **settings):
    return CliRunner().invoke(cli.main, list(arguments), **settings)


@pytest.fixture
def command(monkeypatch):
    """Registers a function as the command `probe`."""

    def register(function):
        monkeypatch.setattr(sys.modules[__name__], "probe_target", function, raising=False)
        monkeypatch.setattr(cli, "COMMANDS", {"probe": (f"{__name__}:probe_target", "A probe.")})

    return register


def test_help_names_every_command_and_imports_none():
    program = ("import sys\nfrom ssdgram.cli import main\n"
               "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
               "print([m for m in ('torch', 'numba', 'numpy', 'tokenizers', 'rich') if m in sys.modules])")
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60).stdout
    for name in cli.COMMANDS:
        assert f"\n  {name} " in output
    assert output.rstrip().endswith("[]"), output


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_a_help_page(name):
    answer = run(name, "--help")
    assert answer.exit_code == 0, answer.output
    assert "Usage:" in answer.output


def test_module_and_version():
    output = subprocess.check_output([sys.executable, "-m", "ssdgram", "--version"], text=True, timeout=60)
    assert output == f"ssdgram, version {ssdgram.__version__}\n"


def test_an_unknown_command_is_named():
    answer = run("no-such-thing")
    assert answer.exit_code == 2 and "no-such-thing" in answer.output


def test_an_error_is_one_line(command):
    @click.command()
    def probe():
        raise ManifestError("manifest.json is missing:\n  run convert first")

    command(probe)
    answer = run("probe")
    assert answer.exit_code == 1
    assert answer.output == "Error: ManifestError: manifest.json is missing: run convert first\n"


def test_an_operating_system_error_is_one_line(command, tmp_path):
    @click.command()
    def probe():
        (tmp_path / "absent").read_bytes()

    command(probe)
    answer = run("probe")
    assert answer.exit_code == 1 and answer.output.count("\n") == 1 and "absent" in answer.output


def test_a_missing_package_is_named(command):
    @click.command()
    def probe():
        import no_such_package_at_all  # noqa: F401

    command(probe)
    answer = run("probe")
    assert answer.exit_code == 1 and "no_such_package_at_all" in answer.output and "extra" in answer.output


def test_debug_shows_the_traceback(command):
    @click.command()
    def probe():
        raise ManifestError("broken")

    command(probe)
    answer = run("--debug", "probe")
    assert isinstance(answer.exception, ManifestError)


def test_a_bug_is_never_hidden(command):
    @click.command()
    def probe():
        raise KeyError("ours")

    command(probe)
    assert isinstance(run("probe").exception, KeyError)


def test_a_plain_main_gets_its_arguments_and_its_status_counts(command):
    seen = []

    def probe(arguments):
        seen.append(arguments)
        return 3 if "--fail" in arguments else 0

    command(probe)
    assert run("probe", "--help", "-x", "1", "y").exit_code == 0
    assert run("probe", "--fail").exit_code == 3
    assert seen == [["--help", "-x", "1", "y"], ["--fail"]]


def test_benchmarks_are_found_by_their_sources(tmp_path, monkeypatch):
    import ssdgram.bench as bench

    (tmp_path / "depth.py").write_text('"""Reads against depth.\n\nMore."""\nimport no_such_package\ndef main(argv): pass\n')
    (tmp_path / "shared.py").write_text('"""No entry point."""\n')
    (tmp_path / "_hidden.py").write_text("def main(argv): pass\n")
    monkeypatch.setattr(bench, "__path__", [str(tmp_path)])
    cli._benchmarks.cache_clear()
    try:
        assert cli._benchmarks() == {"depth": ("ssdgram.bench.depth:main", "Reads against depth.")}
        answer = run("bench", "--help")
        assert answer.exit_code == 0 and "depth" in answer.output and "Reads against depth." in answer.output
    finally:
        cli._benchmarks.cache_clear()


@pytest.mark.parametrize("option", ["--clients", "--batches", "--batch-tokens", "--readers"])
def test_a_server_refuses_numbers_by_the_options_name(option, tmp_path):
    answer = run("serve", str(tmp_path), "--socket", str(tmp_path / "s"), option, "0")
    assert answer.exit_code == 2 and f"'{option}'" in answer.output


def test_a_benchmark_run_as_a_module_says_one_line_too(tmp_path):
    """`python -m ssdgram.bench.NAME` and `ssdgram bench NAME`, without room; of the folders made for it nothing is left."""
    options = ["--folder", str(tmp_path / "new" / "place"), "--rows", str(10 ** 12), "--no-save"]
    answers = [subprocess.run([sys.executable, "-m", *module, *options], capture_output=True, text=True, timeout=200)
               for module in (["ssdgram.bench.serve_ranks"], ["ssdgram", "bench", "serve_ranks"])]
    assert [answer.returncode for answer in answers] == [1, 1]
    assert answers[0].stderr == answers[1].stderr and answers[0].stderr.startswith("Error: NoSpaceError: ")
    assert len(answers[0].stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_every_benchmark_leaves_by_the_same_entry():
    import ssdgram.bench as bench

    for place, _ in cli._benchmarks().values():
        source = Path(bench.__path__[0], *place.partition(":")[0].split(".")[2:]).with_suffix(".py").read_text()
        assert "__main__" not in source or source.endswith("    run_module(main)\n"), place


def test_only_expected_errors_are_one_line(capsys):
    def refuse():
        raise ssdgram.ConfigError("found, expected, what to do")

    with pytest.raises(SystemExit) as ended:
        cli.run_module(refuse)
    assert ended.value.code == 1 and capsys.readouterr().err == "Error: ConfigError: found, expected, what to do\n"
    with pytest.raises(ZeroDivisionError):
        cli.run_module(lambda: 1 // 0)


def test_folders_that_were_there_stay(tmp_path):
    from ssdgram.layout.writing import missing, remove_empty

    assert missing(tmp_path) == []
    made = missing(tmp_path / "a" / "b")
    assert made == [tmp_path / "a" / "b", tmp_path / "a"]
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "mine").touch()
    remove_empty(made)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]


@pytest.mark.parametrize("arguments", (("demo", "--tokens", "0"), ("demo", "--chunk", "-1"), ("demo", "--vocab-size", "0"),
                                       ("synth", "x", "--seed", "-1"), ("synth", "x", "--encoding", "nvfp4"),
                                       ("synth", "x", "--parts", "4")), ids=" ".join)
def test_options_that_cannot_be_or_do_not_apply_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = run(*arguments)
    assert answer.exit_code == 2 and arguments[-2] in answer.output and not list(tmp_path.iterdir())
