"""Token compression: the map from raw token ids to the compressed ids that DeepSeek-V4.1's Engram hashes (spec A2).

Reads a byte-level tokenizer.json with the standard library alone, so converting needs no tokenizer package. It does not
know a model's config: whether the map has the size that the model was trained with is `Geometry.checked_map`'s to say.
Invariant: the map has one entry per raw id, and compressed ids are dealt out in order of first use, from 0.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import types
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import TokenMapError
from ssdgram.fields import read_object, show

MAX_TOKENIZER_BYTES = 256 << 20
MAX_IDS = 1 << 24

_SENTINEL = "\ue000"                                         # stands for a single space while both ends are stripped
_REPLACEMENT = "\ufffd"
_BLANKS = re.compile("[ \t\r\n]+")
_WHITE_SPACE = ("\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
                "\u2028\u2029\u202f\u205f\u3000")            # Unicode White_Space; str.strip() would take U+001C..U+001F too


def token_map(tokenizer_json_path: str | os.PathLike[str]) -> np.ndarray:
    """The compressed id of every raw id: int32 [V], added tokens included (spec A2).

    The path is a tokenizer.json (or its folder). TokenMapError if it cannot be read or is no byte-level tokenizer.
    """
    ids: dict[str, int] = {}
    spellings = _spellings(Path(tokenizer_json_path))
    return np.fromiter((ids.setdefault(_key(spelling), len(ids)) for spelling in spellings), np.int32, len(spellings))


def compressed_size(compressed_ids: np.ndarray) -> int:
    """Number of distinct compressed ids of a map that `token_map` made."""
    return int(compressed_ids.max()) + 1


def map_digest(compressed_ids: np.ndarray) -> str:
    """SHA-256 of the map as little-endian int32, in hexadecimal: the form in which it is published."""
    return hashlib.sha256(compressed_ids.astype("<i4").tobytes()).hexdigest()


# ---------------------------------------------------------------- from a spelling to the key that tokens share


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(0x100 + k): byte for k, byte in enumerate(other)}


_BYTE_OF = _byte_alphabet()
_LATIN = {ord(char): byte for char, byte in _BYTE_OF.items()}  # for str.translate: to the Latin-1 character of that number
_SURROGATE = re.compile("[\ud800-\udfff]")
_OUTSIDE = re.compile("[^" + re.escape("".join(_BYTE_OF)) + "]")


def _decode(spelling: str) -> str:
    """The text of a token alone. A spelling with a character outside the alphabet (an added token's) is its own text."""
    if _OUTSIDE.search(spelling):
        return spelling
    return spelling.translate(_LATIN).encode("latin-1").decode("utf-8", "replace")


def _key(spelling: str) -> str:
    """What tokens with the same compressed id have in common (spec A2, steps 1 to 3)."""
    text = _decode(spelling)
    if _REPLACEMENT in text:                                 # part of a character: the token stands for itself
        return spelling
    return _normalise(text) or text


def _normalise(text: str) -> str:
    """Spec A2, steps 3a to 3h."""
    if text.isascii():                                       # has no marks and decomposes to itself
        folded = text.lower()
    else:
        decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        folded = "".join(char.lower() for char in decomposed if unicodedata.category(char)[0] != "M")
    folded = _BLANKS.sub(" ", folded)
    if folded == " ":
        folded = _SENTINEL
    return folded.strip(_WHITE_SPACE).replace(_SENTINEL, " ")


# ---------------------------------------------------------------- reading tokenizer.json


def _spellings(path: Path) -> list[str]:
    """The raw vocabulary string of every id, 0 to the last."""
    if path.is_dir():
        path = path / "tokenizer.json"
    root = read_object(path, MAX_TOKENIZER_BYTES, TokenMapError, "a tokenizer.json")
    model, decoder, added = root.get("model"), root.get("decoder"), root.get("added_tokens", [])
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise TokenMapError(f"{path}: the decoder is {show(decoder)}: expected type ByteLevel, the only one known here")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        raise TokenMapError(f"{path}: model.vocab is {show(vocabulary)}: expected an object of token ids by spelling")
    if not isinstance(added, list):
        raise TokenMapError(f"{path}: added_tokens is {show(added)}: expected a list")
    spelling_of: dict[int, str] = {}
    for spelling, index in [*vocabulary.items(), *(_added_token(path, entry) for entry in added)]:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < MAX_IDS:
            raise TokenMapError(f"{path}: token {show(spelling)} has id {show(index)}: expected 0 .. {MAX_IDS - 1}")
        if spelling_of.setdefault(index, spelling) != spelling:
            raise TokenMapError(f"{path}: id {index} is {show(spelling_of[index])} and {show(spelling)}: expected one token")
    missing = next((index for index in range(len(spelling_of)) if index not in spelling_of), None)
    if missing is not None or not spelling_of:
        raise TokenMapError(f"{path}: {len(spelling_of)} ids, and id {missing or 0} has no token: expected ids without a gap")
    if _SURROGATE.search("".join(spelling_of.values())):
        raise TokenMapError(f"{path}: a token's spelling has half of a surrogate pair: expected Unicode text")
    return [spelling_of[index] for index in range(len(spelling_of))]


def _added_token(path: Path, entry: Any) -> tuple[str, Any]:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str):
        raise TokenMapError(f"{path}: added token {show(entry)}: expected an object with content and id")
    return content, entry.get("id")


class _Callable(types.ModuleType):
    """A module that can be called: `ssdgram.token_map` is the function, until an import of this module takes the name."""

    def __call__(self, tokenizer_json_path: str | os.PathLike[str]) -> np.ndarray:
        return token_map(tokenizer_json_path)


sys.modules[__name__].__class__ = _Callable
