"""SGLang's part of bench/engines.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def identity(checkpoint: Path, store_path: Path, steps: int) -> dict[str, Any]:
    """Not there yet."""
    raise NotImplementedError
