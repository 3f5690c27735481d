"""Small checkpoints for tests: hand-made safetensors files, and synthesised ones of a few geometries."""

import json
from pathlib import Path

from ssdgram.tools.synth import synthesize

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny_v41"
TOKENIZER = GOLDEN / "tiny_tokenizer.json"


def safetensors_bytes(header, data=b""):
    """A safetensors file: `header` as an object, text or bytes."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_tensors(path, tensors):
    """Write {name: (dtype, shape, bytes)} as a safetensors file, in that order."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    path.write_bytes(safetensors_bytes(header, data))


def write_index(folder, files):
    """Write the index of {file name: {name: ...}}, and the files."""
    for name, tensors in files.items():
        write_tensors(folder / name, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}))


def small_engram(folder, vocab_size=101, seed=0, **options):
    """A checkpoint of a few hundred rows a column."""
    options = {"heads": 2, "head_dim": 64, "max_ngram": 3, "hidden_size": 32, **options}
    return synthesize(folder, vocab_size, options.pop("layers", (1, 3)), seed, TOKENIZER, **options)


def small_ple(folder, vocab_size=211, seed=0, **options):
    """A PLE checkpoint in pieces."""
    options = {"heads": 2, "head_dim": 32, "hidden_size": 32, "token_vocab_size": 97, "eos_token_id": 1, **options}
    return synthesize(folder, vocab_size, options.pop("layers", (1,)), seed, family="ple", **options)


def files_below(*folders):
    """{path: (size, mtime_ns, inode)} of every file and folder below."""
    found = {}
    for folder in folders:
        for path in [Path(folder), *sorted(Path(folder).rglob("*"))]:
            status = path.stat()
            found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found
