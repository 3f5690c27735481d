"""`ssdgram doctor`: the findings of ssdgram.doctor, a line or three each, or as JSON for scripts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from ssdgram.doctor import MISSING, NOTE, OK, SLOW, examine

_MARKS = {OK: "[green]ok[/]", SLOW: "[yellow]slow[/]", MISSING: "[red]missing[/]", NOTE: "[dim]note[/]"}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--engine", type=click.Choice(["vllm", "sglang"]), help="Say whether the plug-in would be active in this engine, here.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--strict", is_flag=True, help="Exit with status 1 if anything is slow or missing.")
def doctor(folder: Path | None, engine: str | None, as_json: bool, strict: bool) -> None:
    """What this machine lacks for full speed, and what to do about it.

    FOLDER is where a store is, or shall be (default: the current folder): its file system and drive are looked at. With --engine,
    only the plug-in for that engine is looked at: run it with the variables (SSDGRAM_STORE, ...) that the server will have.
    """
    if engine is None:
        findings = examine(folder)
    else:
        from ssdgram.engines.diagnosis import examine_engine

        findings = examine_engine(engine)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table.grid(padding=(0, 2))                    # three narrow columns: a terminal of 80 columns, or a pipe, is enough
        for finding in findings:
            said = escape(finding.found)
            if finding.verdict != OK:
                wanted = finding.wanted if finding.wanted.startswith("for ") else f"wanted: {finding.wanted}"
                said += f"\n[dim]{escape(wanted)}[/]" + (f"\n[bold]to do:[/] {escape(finding.advice)}" if finding.advice else "")
            table.add_row(_MARKS[finding.verdict], escape(finding.subject), said)
        Console(highlight=False).print(table)
    if strict and any(finding.verdict in (SLOW, MISSING) for finding in findings):
        raise click.exceptions.Exit(1)
