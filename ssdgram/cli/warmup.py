"""`ssdgram warmup`: runs ssdgram.warmup, says what it is doing, and where the compiled code is kept."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import click


@click.command()
def warmup() -> None:
    """Compile everything ahead, for images and first requests. A second run finds it all and takes seconds.

    The code is made for this processor and kept beside the package; where that cannot be written, in the user's cache folder;
    or where SSDGRAM_CACHE_DIR says.
    """
    from rich.console import Console

    from ssdgram._compiled import CACHE_FOLDER
    from ssdgram.warmup import functions, size, warm_up, without_hint

    console, compiled, log = Console(highlight=False), 0, logging.getLogger("ssdgram")
    console.print(f"compiled code is kept in {CACHE_FOLDER}", soft_wrap=True)
    log.addFilter(without_hint)
    try:
        with tempfile.TemporaryDirectory(prefix="ssdgram-warmup-") as folder, console.status("") as status:
            for done in warm_up(Path(folder), lambda name: status.update(f"{name} ...")):
                compiled += done.functions
                what = f"left out: {done.left_out}" if done.left_out else f"{done.seconds:.1f} s, {done.functions} functions compiled"
                console.print(f"  {done.name}: {what}", soft_wrap=True)
    finally:
        log.removeFilter(without_hint)
    console.print(f"{compiled} functions compiled now, {functions()} kept in all (a function once for each set of argument types), "
                  f"{size() / 2**20:.1f} MiB", soft_wrap=True)
