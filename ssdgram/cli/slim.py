"""`ssdgram slim CKPT DIR`: a checkpoint without its n-gram tables, for engines that get the rows from a store."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
def slim(checkpoint: Path, directory: Path) -> None:
    """Make DIRECTORY: the checkpoint in folder CHECKPOINT without its n-gram tables.

    The shards that hold tables are written anew with their small tensors alone, and the index without the tables; every other
    file is linked, so this takes seconds and little space. Serve it with SSDGRAM_STORE set, by any weight loader.
    """
    from ssdgram.engines.slim import slim as run

    done = run(checkpoint, directory)
    click.echo(f"{directory}: {len(done.written)} shards written without {done.bytes_left_out / 2**30:.2f} GiB of tables"
               + (f", {len(done.dropped)} left out whole" if done.dropped else "") + f", {done.linked} files linked")
