"""The golden vectors (tests/golden/README.md says how each was made) as Python objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.geometry import Geometry

GOLDEN = Path(__file__).parent / "golden"
HASH_CASES = ("small_a", "small_b", "small_c", "small_d", "v41_full")
PLE_CASES = ("qwen38_flash_next", "small", "small_layer1_ng4")


def read_json(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as file:
        return dict(file)


def v41_map() -> np.ndarray:
    return arrays("v41_token_map.npz")["token_map"]


def engram_case(name: str) -> tuple[Geometry, np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    """(geometry, token map, arrays, the cases' json) of hash_NAME."""
    description = read_json(f"hash_{name}.json")
    config = description["config"]
    if config == "v41_constants.json":
        return Geometry.from_config(read_json(config)["config"]), v41_map(), arrays(f"hash_{name}.npz"), description["cases"]
    table = np.array(config["token_map"], np.int32)
    return Geometry.from_config(config), table, arrays(f"hash_{name}.npz"), description["cases"]


def ple_config(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config as a model has it, the golden constants): its last PLE layer is the golden one."""
    constants = read_json("ple_constants.json")[name]
    columns = (constants["ngram_size"] - 1) * constants["heads_per_ngram"]
    layers = list(range(2, 3 + constants["ple_dense_layer_id"]))
    return {**constants, "ple_layer_ids": layers, "hidden_size": 16 * columns}, constants


def checkpoint_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every one-byte and bf16 tensor of a safetensors folder: uint8 or uint16 in its shape."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            first, last = (start + offset for offset in entry["data_offsets"])
            dtype = np.uint16 if entry["dtype"] == "BF16" else np.uint8
            if entry["dtype"] in ("BF16", "F8_E4M3", "F8_E8M0"):
                found[name] = np.frombuffer(data[first:last], dtype).reshape(entry["shape"])
    return found
