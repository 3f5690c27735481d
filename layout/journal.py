"""The journal of an unfinished conversion: which columns are done, so that a kill costs at most the columns in work.

    {"format": 1, "generation": "..", "roots": [..]}                       first line: whose conversion this is
    {"file": index, "size": bytes, "sha256": ".."}                         one line a finished column, after its fsync

A line counts only if it is whole and ends with a newline; a torn last line is cut off. The file is removed after the
manifest is published. It knows nothing of what the columns hold.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from ssdgram.errors import ConversionError
from ssdgram.layout.bounded import read_bounded
from ssdgram.layout.format import FORMAT
from ssdgram.layout.manifest import JOURNAL, sync_folder, write_durably
from ssdgram.layout.strict_json import parse_object

MAX_JOURNAL_BYTES = 64 << 20


class Journal:
    """The open journal in folder `out`; `finished`: file index -> (size, SHA-256)."""

    def __init__(self, out: Path, generation: int, roots: tuple[str, ...], finished: dict[int, tuple[int, str]]) -> None:
        self.generation, self.roots, self.finished = generation, roots, finished
        self._path = out / JOURNAL
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, out: Path, generation: int, roots: tuple[str, ...], finished: dict[int, tuple[int, str]]) -> Journal:
        """A new journal, durable before anything else is written."""
        journal = cls(out, generation, roots, dict(finished))
        lines = [_line({"format": FORMAT, "generation": f"{generation:016x}", "roots": list(roots)})]
        lines += [_entry(index, size, digest) for index, (size, digest) in sorted(finished.items())]
        write_durably(journal._path, b"".join(lines))
        return journal

    @classmethod
    def load(cls, out: Path) -> Journal | None:
        """The journal that a killed conversion left, or None. ConversionError if it is none of ours."""
        path = out / JOURNAL
        try:
            lines = read_bounded(path, MAX_JOURNAL_BYTES).split(b"\n")[:-1]      # what follows the last newline was torn off
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConversionError(f"{path}: cannot be read: {error.strerror or error}; remove the folder and convert again") from error
        try:
            head = parse_object(lines[0]) if lines else {}
            generation, roots = head.get("generation"), head.get("roots")
            if head.get("format") != FORMAT or not isinstance(generation, str) or not re.fullmatch("[0-9a-f]{16}", generation):
                raise ValueError(f"first line is {lines[:1]}")
            if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
                raise ValueError(f"roots are {roots!r}")
        except ValueError as error:
            raise ConversionError(f"{path}: not a conversion's journal ({error}); remove the folder and convert again") from error
        finished = {}
        for line in lines[1:]:
            try:
                entry = parse_object(line)
            except ValueError:
                break                                        # damaged from here on: those columns are written again
            if not _is_entry(entry):
                break
            finished[entry["file"]] = (entry["size"], entry["sha256"])
        return cls(out, int(generation, 16), tuple(roots), finished)

    def add(self, index: int, size: int, digest: str) -> None:
        """Column file `index` is whole and durable: say so, durably."""
        with self._lock:
            self.finished[index] = (size, digest)
            with open(self._path, "ab") as file:
                file.write(_entry(index, size, digest))
                file.flush()
                os.fsync(file.fileno())

    def remove(self) -> None:
        """The manifest is published: the journal has served."""
        self._path.unlink(missing_ok=True)
        sync_folder(self._path.parent)


def _is_entry(entry: dict[str, Any]) -> bool:
    return (set(entry) == {"file", "size", "sha256"} and type(entry["file"]) is int and type(entry["size"]) is int
            and type(entry["sha256"]) is str and re.fullmatch("[0-9a-f]{64}", entry["sha256"]) is not None)


def _entry(index: int, size: int, digest: str) -> bytes:
    return _line({"file": index, "size": size, "sha256": digest})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
