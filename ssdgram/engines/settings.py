"""The plug-ins' settings: the SSDGRAM_* variables of the environment, read once, checked, nothing else imported.

It imports the standard library only, so an entry point may use it in a process that never touches a table. Invariant:
without SSDGRAM_STORE there are no settings, and the plug-in does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SPLITS = ("none", "columns", "owner")
VARIABLES = {
    "SSDGRAM_STORE": "the store's folder, or the socket of `ssdgram serve`; unset: the plug-in does nothing",
    "SSDGRAM_DRAM": "DRAM budget of each rank, for example 8GiB (the default)",
    "SSDGRAM_HBM": "GPU memory budget of each rank, for example 2GiB (default 0)",
    "SSDGRAM_QUEUE": "auto (default), uring, threads or gds",
    "SSDGRAM_STRIPES": "where a striped store's roots are now, with : between them",
    "SSDGRAM_SPLIT": "what each rank of a tensor-parallel group holds: none (default: all of it), columns or owner (a part)",
    "SSDGRAM_HOTSET": "file that the cache is filled from at start and kept in at the end; rank k > 0 uses FILE.k",
    "SSDGRAM_EARLY": "tokens of waiting prompts whose bundles are fetched at a time (default 2048; 0: none)",
    "SSDGRAM_METRICS": "port of a Prometheus endpoint on 127.0.0.1; rank k listens on port + k (default: none)",
    "SSDGRAM_TIMEOUT": "seconds that a step may wait for its rows (default 30)",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the variables say; sizes stay as they were written."""

    store: str
    dram: str = "8GiB"
    hbm: str = "0"
    queue: str = "auto"
    stripes: tuple[str, ...] = ()
    split: str = "none"
    hotset: str | None = None
    early: int = 2048
    metrics: int | None = None
    timeout_s: float = 30.0


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings, None if SSDGRAM_STORE is unset or empty. ValueError naming the variable that is wrong or unknown."""
    store = environment.get("SSDGRAM_STORE", "")
    if not store:
        return None
    ours = ("SSDGRAM_CACHE_DIR", "SSDGRAM_BENCH", "SSDGRAM_TRACE", "SSDGRAM_TEST")         # of the package, not of the plug-ins
    unknown = sorted(name for name in environment if name.startswith("SSDGRAM_") and name not in VARIABLES
                     and not name.startswith(ours))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such setting; the plug-in knows {', '.join(VARIABLES)}")

    def number(name: str, default: float, kind: type = int) -> float:
        text = environment.get(name, "")
        try:
            value = kind(text) if text else default
        except ValueError:
            value = -1
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={text!r}: expected a number from 0 on")
        return value

    split = environment.get("SSDGRAM_SPLIT") or "none"
    if split not in SPLITS:
        raise ValueError(f"SSDGRAM_SPLIT={split!r}: expected one of {', '.join(SPLITS)}")
    port = number("SSDGRAM_METRICS", 0)
    return Settings(store=store, dram=environment.get("SSDGRAM_DRAM") or "8GiB", hbm=environment.get("SSDGRAM_HBM") or "0",
                    queue=environment.get("SSDGRAM_QUEUE") or "auto",
                    stripes=tuple(part for part in environment.get("SSDGRAM_STRIPES", "").split(":") if part), split=split,
                    hotset=environment.get("SSDGRAM_HOTSET") or None, early=int(number("SSDGRAM_EARLY", 2048)),
                    metrics=int(port) or None, timeout_s=number("SSDGRAM_TIMEOUT", 30.0, float))
