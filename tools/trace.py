"""Traces of real text: documents as tokens, the order in which decode streams reach them, and the bundles that this asks for.

    documents --build--> TokenTrace (tokens, starts) --interleave--> positions step by step --bundles--> (x, group) in order

A TokenTrace is one .npz file: `tokens` int32 [N], `starts` int64 [D+1] (document d is tokens[starts[d]:starts[d+1]]) and
`about`, a JSON object as bytes: digests of the text and of the tokenizer, how many documents of which source. It does not
know geometry, streams or caches: those are arguments of what is derived. Nothing in it names a machine or a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram._compiled import compiled
from ssdgram.errors import FormatError, TokenError
from ssdgram.geometry import Geometry
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS, check_tokens, ngram_keys
from ssdgram.tools.text import Document

BATCH = 256                                                  # documents tokenised at once


@dataclass(frozen=True)
class TokenTrace:
    """Tokens int32 [N] of D documents, starts int64 [D+1], and what they were made from."""

    tokens: np.ndarray
    starts: np.ndarray
    about: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write the trace to `path` (.npz), by way of a temporary name."""
        about = np.frombuffer(json.dumps(self.about, sort_keys=True).encode(), np.uint8)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            np.savez(file, tokens=self.tokens, starts=self.starts, about=about)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> TokenTrace:
        """Read a trace. FormatError if it is not one."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                tokens, starts, about = arrays["tokens"], arrays["starts"], json.loads(arrays["about"].tobytes())
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise FormatError(f"{path.name} is not a token trace (an .npz of tokens, starts and about): {error}") from error
        if tokens.dtype != np.int32 or tokens.ndim != 1 or starts.dtype != np.int64 or starts.ndim != 1 or len(starts) < 1:
            raise FormatError(f"{path.name}: tokens are {tokens.dtype} {tokens.shape}, starts {starts.dtype} {starts.shape}; "
                              "a token trace has int32 [N] and int64 [D+1]")
        if starts[0] != 0 or starts[-1] != len(tokens) or np.any(np.diff(starts) < 0):
            raise FormatError(f"{path.name}: starts do not run from 0 to {len(tokens)}, never falling: the file is damaged")
        if not isinstance(about, dict):
            raise FormatError(f"{path.name}: `about` is no JSON object: the file is damaged")
        return cls(tokens, starts, about)


def build(tokenizer_path: Path, documents: Iterable[Document], limit: int) -> TokenTrace:
    """Tokenise documents (no special tokens added) until there are `limit` tokens or no more documents.

    The digest of the text is a SHA-256 over name and text of each document that was used, in order.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    digest, used, total = hashlib.sha256(), Counter[str](), 0
    pieces: list[np.ndarray] = []
    waiting: list[Document] = []

    def flush() -> int:
        added = 0
        for document, encoding in zip(waiting, tokenizer.encode_batch_fast([d.text for d in waiting], add_special_tokens=False)):
            if total + added >= limit:
                break
            ids = np.array(encoding.ids, np.int32)[: limit - total - added]
            if len(ids):
                pieces.append(ids)
                added += len(ids)
                used[document.name.split("/")[0]] += 1
                digest.update(document.name.encode() + b"\0" + document.text.encode() + b"\0")
        waiting.clear()
        return added

    for document in documents:
        waiting.append(document)
        if len(waiting) == BATCH:
            total += flush()
            if total >= limit:
                break
    total += flush()
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=starts[1:])
    about = {
        "text_sha256": digest.hexdigest(),
        "tokenizer_sha256": hashlib.sha256(Path(tokenizer_path).read_bytes()).hexdigest(),
        "documents": dict(sorted(used.items())),
        "tokens": int(total),
    }
    return TokenTrace(np.concatenate(pieces) if pieces else np.empty(0, np.int32), starts, about)


@compiled
def _interleave(starts, streams, order, step_of):  # type: ignore[no-untyped-def]
    """Fill `order` (positions in the order of decoding) and `step_of` (the step of each); the number of steps."""
    cursor = np.zeros(streams, np.int64)
    end = np.zeros(streams, np.int64)
    document, count, step = 0, 0, 0
    while count < order.shape[0]:
        for stream in range(streams):
            while cursor[stream] == end[stream] and document < starts.shape[0] - 1:
                cursor[stream], end[stream] = starts[document], starts[document + 1]
                document += 1
            if cursor[stream] < end[stream]:
                order[count] = cursor[stream]
                step_of[count] = step
                cursor[stream] += 1
                count += 1
        step += 1
    return step


def interleave(trace: TokenTrace, streams: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """The order in which `streams` decode streams reach the tokens: (positions int64 [N], step of each int64 [N]).

    Each step takes one token of every stream; a stream whose document ended goes on with the next document that nobody took.
    """
    order, step_of = np.empty(len(trace.tokens), np.int64), np.empty(len(trace.tokens), np.int64)
    _interleave(trace.starts, streams, order, step_of)
    return order, step_of


def bundles(trace: TokenTrace, geometry: Geometry, token_map: np.ndarray | None, streams: int = 64,
            layers: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The bundles asked for in the order of decoding: x int64 and group uint8, each [N x layers x orders].

    Of the first `layers` layers only: what happens to one layer's bundles in a cache happens to all, so one is enough for
    hit rates. `token_map` as in `Geometry.keys`. TokenError if the trace has ids that the geometry does not.
    """
    table = geometry.checked_map(token_map)
    flags = np.full(len(trace.tokens), PARTICIPATES | OUTPUT, np.uint8)
    flags[trace.starts[:-1][np.diff(trace.starts) > 0]] |= STARTS
    bad = check_tokens(trace.tokens, flags, geometry.vocabulary(table))
    if bad >= 0:
        raise TokenError(f"token {bad} of the trace is {trace.tokens[bad]}: expected 0 .. {geometry.vocabulary(table) - 1}; "
                         "the trace was made with another tokenizer")
    keys = np.empty((len(trace.tokens), len(geometry.layers), geometry.orders), np.int64)
    ngram_keys(trace.tokens, flags, 0, len(trace.tokens), table, geometry.multiplier_array, geometry.rule, geometry.fill(table),
               keys)
    order, _ = interleave(trace, streams)
    groups = np.tile(np.arange(layers * geometry.orders, dtype=np.uint8), len(order))
    return keys[order, :layers].reshape(-1), groups
