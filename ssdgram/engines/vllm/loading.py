"""vLLM's weight loaders, as far as the tables are concerned: which of them read whole files, and whether that matters.

With the default (lazy) loader a table is mapped and, with a loader of its own that copies nothing, never read. Others read every
file from end to end: 94.6 GiB a table for nothing, so they are refused, unless the checkpoint is one that `ssdgram slim` wrote, whose
files hold no table. It knows configurations only and opens index files at most.
Invariant: what passes reads no byte of a table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ssdgram.errors import ConfigError

LAZY_FORMATS = ("auto", "hf", "safetensors", "dummy")        # load formats whose files are mapped, or not opened at all
TABLES = (".engram.embed.weight", ".engram.embed.scale")     # how tables are called: DeepSeek's, and Qwen4Exp's
PLE_TABLE = re.compile(r"\.ngram_embedding\.(shard_\d+\.)?weight$")
NETWORK = ("nfs", "nfs4", "lustre")                          # file systems on which vLLM reads ahead by itself


def holds_tables(folder: Path) -> bool:
    """Whether the checkpoint's index names an n-gram table (without a readable index: yes)."""
    try:
        names = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return any(str(name).endswith(TABLES) or PLE_TABLE.search(str(name)) for name in names)


def check_loader(config: Any) -> None:
    """ConfigError if vLLM would read the tables' files from end to end."""
    load, folder = config.load_config, Path(str(config.model_config.model))
    extra = load.model_loader_extra_config if isinstance(load.model_loader_extra_config, dict) else {}
    if str(load.load_format) == "dummy":
        return
    if folder.is_dir() and not holds_tables(folder):
        strict = extra.get("enable_weights_track", getattr(config.model_config, "quantization", None) is None)
        if strict:
            raise ConfigError(f"{folder} holds no tables, and vLLM would miss them: it checks that every weight was loaded; give "
                              f"--model-loader-extra-config '{{\"enable_weights_track\": false}}'")
        return
    advice = f"or serve a directory without the tables: `ssdgram slim {folder} NEW_DIRECTORY`"
    if str(load.load_format) not in LAZY_FORMATS or extra.get("enable_multithread_load"):
        name = load.load_format if str(load.load_format) not in LAZY_FORMATS else "multi-threaded"
        raise ConfigError(f"vLLM's {name} loader reads whole files, the tables' {_size(folder)} included: use the default load "
                          f"format, {advice}")
    strategy = load.safetensors_load_strategy
    if strategy not in (None, "lazy"):
        raise ConfigError(f"safetensors_load_strategy={strategy} reads whole files, the tables' {_size(folder)} included: use lazy, "
                          f"{advice}")
    if strategy is None and folder.is_dir() and file_system(folder) in NETWORK:
        raise ConfigError(f"{folder} lies on a network file system, where vLLM may read ahead whole files: give "
                          f"--safetensors-load-strategy=lazy, {advice}")


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Type of the file system that holds the folder, "" if it cannot be told."""
    best, found = "", ""
    try:
        real = str(folder.resolve())
        for line in mounts.read_text().splitlines():
            _, point, kind, *_ = line.split()
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, found = point, kind
    except (OSError, ValueError):
        return ""
    return found


def _size(folder: Path) -> str:
    try:
        return f"{sum(path.stat().st_size for path in folder.glob('*.safetensors')) >> 30} GiB of safetensors"
    except OSError:
        return "files"
