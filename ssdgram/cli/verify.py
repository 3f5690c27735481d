"""`ssdgram verify OUT`: check every page of a store, and every row against its checkpoint if that is given."""

from __future__ import annotations

from pathlib import Path

import click

from ssdgram.cli.progress import byte_bar


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="Compare every row with this checkpoint folder.")
@click.option("--stripe", "stripes", multiple=True, type=click.Path(path_type=Path),
              help="Where the stripes are now, in their order, if they moved.")
@click.option("--jobs", type=click.IntRange(1), help="Files in work at once; default: the CPUs of this process.")
def verify(out: Path, against: Path | None, stripes: tuple[Path, ...], jobs: int | None) -> None:
    """Check every page of the store in folder OUT. Exit status 1 if anything is wrong."""
    from ssdgram.layout.verify import verify as run

    with byte_bar("verifying") as progress:
        report = run(out, against, stripes=stripes or None, jobs=jobs, progress=progress)
    for failure in report.failed:
        click.echo(f"{failure}", err=True)
    if report.unlisted:
        click.echo(f"... and {report.unlisted} more", err=True)
    compared = f", {report.rows} rows equal to the source's" if against is not None and report.ok else ""
    click.echo(f"{out}: {report.pages} pages checked{compared}: {'all right' if report.ok else 'NOT right'}")
    if any(failure.layer is not None for failure in report.failed):
        click.echo("copy the files named above again, or remove them and run `ssdgram convert` with the same checkpoint: it writes what is "
                   "missing", err=True)
    if not report.ok:
        raise click.exceptions.Exit(1)
