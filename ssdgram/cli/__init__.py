"""The command line: one lazy click group, one module a command.

A command's module is imported when that command runs, so `ssdgram --help` and `ssdgram inspect` never load torch, and a
missing extra is felt only by the command that needs it. This module knows the commands' names and how errors leave the
process: one line on stderr and exit status 1; the traceback only with --debug.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import ssdgram
from ssdgram.errors import SSDGramError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "convert": ("ssdgram.cli.convert:convert", "Convert a checkpoint's n-gram tables into a store."),
    "verify": ("ssdgram.cli.verify:verify", "Check every page of a store; every row against its checkpoint."),
    "inspect": ("ssdgram.cli.inspect:inspect", "Print a store's geometry, sizes, stripes and a decoded row."),
    "slim": ("ssdgram.cli.slim:slim", "Make a checkpoint without its tables, for engines that use a store."),
    "synth": ("ssdgram.cli.synth:synth", "Write a checkpoint in the real layout with made-up rows."),
    "serve": ("ssdgram.cli.serve:serve", "Own a store for all processes of this machine: ranks and replicas attach to it."),
    "demo": ("ssdgram.cli.demo:demo", "Make a small store, serve real text from it, check every bit, print a table."),
    "doctor": ("ssdgram.cli.doctor:doctor", "What this machine lacks for full speed, and what to do about it."),
    "warmup": ("ssdgram.cli.warmup:warmup", "Compile everything ahead, for images and first requests."),
    "plan": ("ssdgram.cli.plan:plan", "Hit rates, stalls and budgets for a trace on a machine; checked on a store."),
    "trace": ("ssdgram.cli.trace:trace", "Make, record, look at and replay traces of what is asked of a store."),
    "bench": ("ssdgram.cli:bench", "Benchmarks: each prints its table and the baselines beside it."),
}


class FailedCommand(click.ClickException):
    """An expected error on its way out: one line, exit status 1."""

    def __init__(self, error: BaseException) -> None:
        text = " ".join(str(error).split()) or "no message"
        if isinstance(error, ModuleNotFoundError):
            text += ": install it, or the extra of ssdgram that brings it (README, Install)"
        super().__init__(f"{type(error).__name__}: {text}")


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """FailedCommand instead of the errors that are expected: the package's, the operating system's, a package that is not there."""
    try:
        yield
    except BrokenPipeError:                                  # `ssdgram inspect | head`: click ends quietly
        raise
    except (SSDGramError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "ssdgram":
            raise
        raise FailedCommand(error) from error


def run_module(command: Callable[[], Any]) -> None:
    """What `python -m ssdgram.bench.NAME` runs: the module's `main`, whose errors leave as those of `ssdgram bench NAME` do."""
    try:
        with in_one_line():
            command()
    except FailedCommand as failure:
        failure.show()
        sys.exit(failure.exit_code)


class LazyGroup(click.Group):
    """A group whose commands are "module:attribute" targets, imported on use; help texts need no import."""

    def targets(self) -> Mapping[str, tuple[str, str]]:
        """Command name -> ("module:attribute", one line of help)."""
        return COMMANDS

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.targets())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.targets():
            return None
        place, text = self.targets()[name]
        module, _, attribute = place.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        return target if isinstance(target, click.Command) else from_function(name, text, target)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        lines = [(name, text) for name, (_, text) in self.targets().items()]
        if lines:
            with formatter.section("Commands"):
                formatter.write_dl(lines)


class RootGroup(LazyGroup):
    """The outermost group: turns the package's errors, and the operating system's, into one line."""

    def invoke(self, context: click.Context) -> Any:
        with contextlib.nullcontext() if context.params.get("debug") else in_one_line():
            return super().invoke(context)


class BenchGroup(LazyGroup):
    """One command for each module of ssdgram.bench that has a function or command `main`; of a package, its __main__."""

    def targets(self) -> Mapping[str, tuple[str, str]]:
        return _benchmarks()


@functools.cache
def _benchmarks() -> dict[str, tuple[str, str]]:
    """Names, targets and first lines of the benchmarks, from their sources: nothing is imported for a help page."""
    package = importlib.import_module("ssdgram.bench")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        place = f"{module.name}.__main__" if module.ispkg else module.name
        source = Path(package.__path__[0], f"{place.replace('.', '/')}.py")
        if module.name.startswith("_") or not source.is_file():
            continue
        tree = ast.parse(source.read_bytes())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in names:
            text = (ast.get_docstring(tree) or "").partition("\n")[0]
            found[module.name] = (f"ssdgram.bench.{place}:main", text)
    return found


def from_function(name: str, text: str, function: Callable[[list[str]], Any]) -> click.Command:
    """A command that hands its arguments, --help included, to a plain `main(argv)`."""

    def callback(arguments: tuple[str, ...]) -> None:
        status = function(list(arguments))
        if isinstance(status, int) and status != 0:
            raise click.exceptions.Exit(status)

    return click.Command(name, callback=callback, help=text, add_help_option=False,
                         params=[click.Argument(["arguments"], nargs=-1)],
                         context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})


@click.group(cls=RootGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ssdgram.__version__, prog_name="ssdgram")
@click.option("--debug", is_flag=True, help="Show tracebacks, and log everything.")
@click.option("-v", "--verbose", is_flag=True, help="Log what is chosen and why.")
def main(debug: bool, verbose: bool) -> None:
    """Serve the n-gram tables of large language models from NVMe drives."""
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ssdgram").setLevel(level)


@click.group(cls=BenchGroup)
def bench() -> None:
    """Benchmarks: each prints its own table, with the baseline it is measured against."""
