"""`ssdgram convert CKPT OUT`: make a store out of a checkpoint's n-gram tables, going on where a killed run stopped."""

from __future__ import annotations

from pathlib import Path

import click

from ssdgram.cli.progress import byte_bar


@click.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--stripe", "stripes", multiple=True, type=click.Path(path_type=Path),
              help="Spread the columns over these folders, one a drive; may be given many times.")
@click.option("--jobs", type=click.IntRange(1), help="Columns in work at once; default: the CPUs of this process.")
def convert(ckpt: Path, out: Path, stripes: tuple[Path, ...], jobs: int | None) -> None:
    """Convert the n-gram tables of the checkpoint in folder CKPT into a store in folder OUT.

    Run the same command again after an interruption: finished columns are kept. On a finished OUT it changes nothing.
    """
    import time

    from ssdgram.layout.convert import convert as run

    start, finished = time.monotonic(), finish_of(out)
    try:
        with byte_bar("converting") as progress:
            manifest = run(ckpt, out, stripes, jobs, progress)
    except KeyboardInterrupt:
        click.echo("interrupted: run the same command again, it goes on behind the finished columns", err=True)
        raise click.exceptions.Exit(130) from None
    seconds = time.monotonic() - start
    kept = finished is not None and finish_of(out) == finished
    click.echo(f"{out}: {len(manifest.files)} columns, {manifest.size / 2**30:.2f} GiB, generation {manifest.generation:016x}, "
               + ("converted before: nothing to do (`ssdgram verify` looks at every page)" if kept else f"{seconds:.1f} s"))


def finish_of(out: Path) -> int | None:
    """When the store in `out` was finished, in ns; None if there is none."""
    try:
        return (out / "manifest.json").stat().st_mtime_ns
    except OSError:
        return None
