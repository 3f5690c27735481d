"""Real text that machines have on disk anyway, as documents: what traces are built from when nobody brings their own.

Two kinds: `code` (the Python standard library, installed Python packages with their C headers, the system's C headers, Perl
modules) and `prose` (the documentation of packages and of the system, manual pages without their markup, docstrings). Nothing
is downloaded. Documents have names relative to their source, never paths of this machine; the order is a hash of the name,
so that the same files give the same documents in the same order anywhere. Files of the same bytes count once.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST = 1 << 17                                            # bytes of one document: generated giants do not fill a trace
SHORTEST = 400

_CODE = (".py", ".pyi", ".h", ".hpp", ".hh", ".cuh", ".c", ".cpp", ".pm", ".pl")
_PROSE = (".rst", ".md", ".txt", ".pod")
_DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.*?)"""', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Document:
    """A text and where it is from: "source/relative name"."""

    name: str
    text: str


def _roots() -> dict[str, Path]:
    paths = sysconfig.get_paths()
    return {
        "stdlib": Path(paths["stdlib"]),
        "packages": Path(paths["purelib"]),
        "include": Path("/usr/include"),
        "gcc": Path("/usr/lib/gcc"),
        "perl": Path("/usr/share/perl"),
        "doc": Path("/usr/share/doc"),
        "man": Path("/usr/share/man"),
    }


def _files(source: str, root: Path, suffixes: tuple[str, ...] | None) -> Iterator[tuple[str, Path]]:
    """(name, path) of the regular files below `root`, links not followed, in the order of a hash of the name."""
    found = []
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/")):  # below the standard library: a source of its own
            continue
        if (suffixes is None or path.suffix.lower() in suffixes) and not path.is_symlink() and path.is_file():
            found.append((f"{source}/{name}", path))
    return iter(sorted(found, key=lambda item: hashlib.sha256(os.fsencode(item[0])).digest()))


def _read(path: Path) -> str:
    """The file's text, at most LONGEST bytes of it; "" if it is not UTF-8 text or cannot be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(LONGEST)
    except (OSError, EOFError, zlib.error):
        return ""
    if b"\0" in data:
        return ""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode() if error.start > len(data) - 4 else ""


def _manual(path: Path) -> str:
    """A manual page as plain text: roff requests and font changes taken out."""
    lines = []
    for line in _read(path).splitlines():
        if line.startswith((".B ", ".I ", ".BR ", ".IR ", ".SH ", ".SS ", ".RB ", ".RI ", ".TP ")):
            line = line.split(" ", 1)[1]
        elif line.startswith((".", "'")):
            continue
        lines.append(re.sub(r"\\(f[A-Z0-9]|f\(..|&|[|^])", "", line).replace("\\-", "-"))
    return "\n".join(lines)


def _docstrings(path: Path) -> str:
    """The docstrings of a Python file: triple-quoted texts that start a line (no parser: 50 times faster)."""
    texts = (re.sub(r"\n[ \t]+", "\n", match.group(1)).strip() for match in _DOCSTRING.finditer(_read(path)))
    return "\n\n".join(text for text in texts if len(text) > 40)


def _documents(source: str, root: Path, suffixes: tuple[str, ...] | None, read: Callable[[Path], str]) -> Iterator[Document]:
    for name, path in _files(source, root, suffixes):
        yield Document(name, read(path))


def sources(kind: str) -> dict[str, Iterator[Document]]:
    """The documents of each source of a kind ("code" or "prose") that this machine has; unread until asked for."""
    roots = {name: path for name, path in _roots().items() if path.is_dir()}
    parts: list[tuple[str, str, tuple[str, ...] | None, Callable[[Path], str]]]
    if kind == "code":
        parts = [(name, name, _CODE, _read) for name in ("stdlib", "packages", "include", "gcc", "perl")]
    elif kind == "prose":
        parts = [("doc", "doc", None, _read), ("man", "man", (".gz",), _manual), ("readme", "packages", _PROSE, _read),
                 ("docstrings", "packages", (".py",), _docstrings), ("stdlib-docstrings", "stdlib", (".py",), _docstrings)]
    else:
        raise ValueError(f"kind is {kind!r}; there are 'code' and 'prose'")
    return {name: _documents(name, roots[root], suffixes, read) for name, root, suffixes, read in parts if root in roots}


def documents(kind: str) -> Iterator[Document]:
    """Documents of a kind, one from each source in turn until all are spent, without doubles and scraps."""
    seen = set()
    turns = list(sources(kind).values())
    while turns:
        for turn in list(turns):
            document = next(turn, None)
            if document is None:
                turns.remove(turn)
                continue
            digest = hashlib.sha256(document.text.encode()).digest()
            if len(document.text) >= SHORTEST and digest not in seen:
                seen.add(digest)
                yield document


def from_paths(paths: Iterable[Path]) -> Iterator[Document]:
    """The given files, and the text files below the given folders, as documents named relative to what was given."""
    for root in paths:
        if root.is_file():
            yield Document(root.name, _read(root))
        else:
            for name, path in _files(root.name, root, None):
                text = _read(path)
                if text:
                    yield Document(name, text)
