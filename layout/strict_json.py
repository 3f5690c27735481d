"""JSON as our readers accept it: one object, UTF-8, no key twice, no NaN or Infinity, no nesting that exhausts the stack.

It knows nothing of what the object means; callers turn its ValueError into the error of their file.
"""

from __future__ import annotations

import json
from typing import Any


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; ValueError says what is wrong."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
