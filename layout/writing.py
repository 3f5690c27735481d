"""Places to write to, and what becomes of the operating system's refusal: one error of this package, in words, whatever call met it.

It knows the reasons (no room, a limit of file sizes, no permission) and what to do about each; not what is written. Invariant: no
OSError of the operating system leaves `writing` as it is, and what says more already passes unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ssdgram.errors import ConfigError, ConversionError, NoSpaceError, SSDGramError


def check_place(folder: Path) -> None:
    """ConversionError if something that is no folder has the name of a folder that is to be written to."""
    if folder.exists() and not folder.is_dir():
        raise ConversionError(f"{folder} is a file: expected a folder, or a name that is free; give another")


def check_writable(folder: Path, option: str) -> None:
    """ConfigError naming the option, unless this user can make files in the folder: said before there is anything to write."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} is no folder that this user may write to: choose another {option}")


def missing(folder: Path) -> list[Path]:
    """`folder` and the folders above it that are not there yet, the innermost first: for `remove_empty`, when all is done."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove those of the folders that are there and empty, the innermost first."""
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):                   # not made, or not empty
            folder.rmdir()


@contextlib.contextmanager
def writing(out: str | os.PathLike[str], left: str) -> Iterator[None]:
    """NoSpaceError or ConversionError instead of any OSError within. `out`: what was to be made, named where the error names no
    file, or two; `left`: what is there after the failure, for example "finished columns stay"."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SSDGramError):
            raise
        where = out if error.filename is None or error.filename2 is not None else error.filename
        text = f"{where}: {error.strerror or error}; {left}: "
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{text}make room and run the same command again") from error
        if error.errno == errno.EFBIG:
            raise ConversionError(f"{text}lift the limit of file sizes (`ulimit -f`, or the file system's) and run the same command "
                                  f"again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConversionError(f"{text}choose a folder that this user may write to, or get the permission, and run the same "
                                  f"command again") from error
        if error.errno == errno.ENOENT:
            raise ConversionError(f"{text}is the drive mounted? Make the folder above it, or give another, and run the same command "
                                  f"again") from error
        raise ConversionError(f"{text}run the same command again when the cause is removed") from error
