"""Values from files, read with a type and a range each: configs and manifests hold whatever someone wrote into them.

It knows nothing of models. Invariant: what it returns has the type and range that was asked for (a bool is no integer), and
its messages are short however long the value is.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdgram.errors import ConfigError, TokenMapError
from ssdgram.layout.bounded import read_bounded

MAX_ENTRIES = 4096                                           # of any list of integers


def read_object(path: Path, most: int, error: type[ConfigError | TokenMapError], expected: str) -> dict[str, Any]:
    """The JSON object in a file of at most that many bytes; `error`, which says what was expected, if it is something else."""
    try:
        value = json.loads(read_bounded(path, most))
    except OSError as reason:
        raise error(f"{path} cannot be read ({reason.strerror}): expected {expected}") from reason
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not JSON ({reason}): expected {expected}") from reason
    if not isinstance(value, dict):
        raise error(f"{path} holds {show(value)}: expected an object")
    return value


class Fields:
    """A config's fields by name. An absent field and a null are the same."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{name} is missing: expected an integer of {low} .. {high}")
            return default
        return integer(name, value, low, high)

    def optional(self, name: str, low: int, high: int) -> int | None:
        return None if self._values.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, low: int, high: int, length: int | None = None) -> list[int]:
        value = self._values.get(name)
        if not isinstance(value, (list, tuple)) or not value or len(value) > MAX_ENTRIES:
            raise ConfigError(f"{name} is {show(value)}: expected a list of integers of {low} .. {high}")
        if length is not None and len(value) != length:
            raise ConfigError(f"{name} has {len(value)} entries: expected {length}")
        return [integer(f"{name}[{k}]", entry, low, high) for k, entry in enumerate(value)]


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` if it is an integer of low .. high; ConfigError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {show(value)}: expected an integer of {low} .. {high}")
    return value


def vector(name: str, value: Any, length: int | None, low: int, high: int) -> None:
    """ConfigError unless `value` is a non-empty tuple of integers of low .. high, `length` of them if that is given."""
    if not isinstance(value, tuple) or not value or length not in (None, len(value)):
        raise ConfigError(f"{name} is {show(value)}: expected {length or 'a list of'} integers of {low} .. {high}")
    for k, entry in enumerate(value):
        integer(f"{name}[{k}]", entry, low, high)


def show(value: Any) -> str:
    """A short repr: a config may hold anything of any length."""
    try:
        return reprlib.repr(value)
    except ValueError:                                       # Python refuses to print integers of thousands of digits
        return f"{type(value).__name__} with an integer of thousands of digits"
