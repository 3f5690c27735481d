"""SGLang's weight loaders, as far as the tables are concerned: those that read whole files are refused, unless there is no table.

The default loader maps the files and hands each tensor on; a table whose own loader copies nothing is never read. Invariant: what
passes reads no byte of a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssdgram.engines.vllm.loading import holds_tables
from ssdgram.errors import ConfigError

MAPPED = ("auto", "safetensors", "dummy")


def check_loader(engram: Any) -> None:
    """ConfigError if SGLang would read the tables' files from end to end. Without a published configuration: nothing."""
    try:
        model = engram.get_model()
        folder, load_format = Path(str(model.model_path)), str(getattr(model.load_format, "value", model.load_format))
    except (ValueError, AttributeError):                     # no server: offline use, tests
        return
    if load_format == "dummy" or (folder.is_dir() and not holds_tables(folder)):
        return
    advice = f"or serve a directory without the tables: `ssdgram slim {folder} NEW_DIRECTORY`"
    if load_format not in MAPPED:
        raise ConfigError(f"SGLang's {load_format} loader reads whole files, the tables included: use --load-format auto, {advice}")
    for name, option in (("weight_loader_disable_mmap", "--weight-loader-disable-mmap"),
                         ("weight_loader_prefetch_checkpoints", "--weight-loader-prefetch-checkpoints")):
        if getattr(model, name, False):
            raise ConfigError(f"{option} reads whole files, the tables included: leave it out, {advice}")
