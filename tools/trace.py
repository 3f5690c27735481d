"""Traces: what was asked of a store, as token sequences or as anonymous n-gram keys, in one checked file.

    documents ── trace_build ──► Trace ◄── record ── a running store
                                   │
                                   └──► trace_shapes: batches, and the bundles that they ask for ──► stats, replay, plan

A trace is a safetensors file (docs/trace.md has every field): S sequences one behind the other, each with the tokens of
context that came before it, and, in a recording, which sequences were one batch. It knows no geometry and no cache.
Invariant: a Trace that was loaded or made by `checked` is consistent, so that compiled code needs no bounds checks on it.
Nothing in it names a machine or a path.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import CheckpointError, FormatError
from ssdgram.geometry import MAX_NGRAM
from ssdgram.layout.safetensors import read_whole_header
from ssdgram.layout.strict_json import parse_object

FORMAT, VERSION = "ssdgram-trace", 1
NO_PART = -1                                                 # the id of a token that takes no part (an image span)
_ARRAYS: dict[str, tuple[np.dtype[Any], str, int]] = {
    "tokens": (np.dtype("<i4"), "I32", 1), "keys": (np.dtype("<i8"), "I64", 2), "starts": (np.dtype("<i8"), "I64", 1),
    "lookback": (np.dtype("u1"), "U8", 1), "batches": (np.dtype("<i8"), "I64", 1)}


@dataclass(frozen=True)
class Trace:
    """S sequences of N tokens in all, or of N positions' keys; sequence s is [starts[s], starts[s + 1]).

    `tokens` int32 [N], NO_PART where a token takes no part; empty in a trace of keys. `keys` int64 [N, orders], >= 0, or None.
    `starts` int64 [S + 1]. `lookback` uint8 [S]: tokens of context; in a trace of tokens they are the first of the sequence and
    ask for nothing, in one of keys they are not there. `batches` int64 [B + 1]: batch b was sequences
    [batches[b], batches[b + 1]); None where nothing was recorded (documents). `about`: what it was made from, as JSON values.
    """

    tokens: np.ndarray
    starts: np.ndarray
    about: dict[str, Any]
    lookback: np.ndarray
    batches: np.ndarray | None = None
    keys: np.ndarray | None = None

    @classmethod
    def of_documents(cls, tokens: np.ndarray, starts: np.ndarray, about: dict[str, Any]) -> Trace:
        """A trace of whole documents: tokens int32 [N], starts int64 [S + 1]. FormatError if they do not fit."""
        return checked(cls(tokens, starts, about, np.zeros(max(0, len(starts) - 1), np.uint8)), "the trace")

    @property
    def kind(self) -> str:
        """"tokens" or "keys"."""
        return "tokens" if self.keys is None else "keys"

    @property
    def positions(self) -> int:
        """Positions that ask for rows: all but the context."""
        return int(self.starts[-1]) - (int(self.lookback.sum()) if self.keys is None else 0)

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of the arrays: what the trace is, whatever it is called."""
        digest = hashlib.sha256()
        for name, array in _arrays_of(self).items():
            digest.update(f"{name} {array.shape}\n".encode())
            digest.update(array.data)
        return digest.hexdigest()

    def part(self, first: int, stop: int) -> Trace:
        """Sequences [first, stop) as a trace of their own; of a recording, batches [first, stop)."""
        batches = self.batches
        if batches is not None:
            batches = batches[first:stop + 1] - batches[first]
            first, stop = int(self.batches[first]), int(self.batches[stop])  # type: ignore[index]
        begin, end = int(self.starts[first]), int(self.starts[stop])
        return Trace(self.tokens[begin:end] if self.keys is None else self.tokens, self.starts[first:stop + 1] - begin,
                     {**self.about, "part": [first, stop]}, self.lookback[first:stop], batches,
                     None if self.keys is None else self.keys[begin:end])

    def save(self, path: Path) -> None:
        """Write the trace to `path`, by way of a temporary name, so that there is a whole file or none."""
        arrays, end = _arrays_of(self), 0
        header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": str(VERSION), "sha256": self.sha256,
                                                   "about": json.dumps(self.about, sort_keys=True)}}
        for name, array in arrays.items():
            header[name] = {"dtype": _ARRAYS[name][1], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
            end += array.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for array in arrays.values():
                    file.write(array.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a trace. FormatError says what is wrong with a file that is none, or damaged."""
        path = Path(path)
        try:
            tensors, metadata = read_whole_header(path)
        except CheckpointError as error:
            raise FormatError(f"{path.name} is no trace: {error}") from error
        if metadata.get("format") != FORMAT:
            raise FormatError(f"{path.name} is no trace: its format is {metadata.get('format')!r}, expected {FORMAT!r}")
        if metadata.get("version") != str(VERSION):
            raise FormatError(f"{path.name}: version {metadata.get('version')!r} of the trace format; this SSDGram reads {VERSION}")
        try:
            about = parse_object(metadata.get("about", "").encode())
        except ValueError as error:
            raise FormatError(f"{path.name}: `about` is no JSON object ({error}): the file is damaged") from error
        arrays = {}
        with open(path, "rb") as file:
            for name, tensor in tensors.items():
                if name not in _ARRAYS or (tensor.dtype, len(tensor.shape)) != _ARRAYS[name][1:]:
                    raise FormatError(f"{path.name}: {name} is {tensor.dtype} {list(tensor.shape)}, which no trace has")
                arrays[name] = np.empty(tensor.shape, _ARRAYS[name][0])
                file.seek(tensor.offset)
                if file.readinto(arrays[name].reshape(-1).view(np.uint8).data) != tensor.size:
                    raise FormatError(f"{path.name}: {name} ends before its {tensor.size} bytes: the file is truncated")
        if not {"starts", "lookback"} <= set(arrays) or ("tokens" in arrays) == ("keys" in arrays):
            raise FormatError(f"{path.name} has {sorted(arrays)}: a trace has starts, lookback, and either tokens or keys")
        trace = cls(arrays.get("tokens", np.empty(0, np.int32)), arrays["starts"], about, arrays["lookback"], arrays.get("batches"),
                    arrays.get("keys"))
        if trace.sha256 != metadata.get("sha256"):
            raise FormatError(f"{path.name}: sha256 of its arrays is {trace.sha256}, its header says {metadata.get('sha256')!r}: the "
                              f"file is damaged")
        return checked(trace, path.name)


def _arrays_of(trace: Trace) -> dict[str, np.ndarray]:
    """The arrays of a trace's file, in the file's order: the widest first, so that all are aligned."""
    arrays = {"starts": trace.starts, "batches": trace.batches, "keys": trace.keys,
              "tokens": trace.tokens if trace.keys is None else None, "lookback": trace.lookback}
    return {name: np.ascontiguousarray(array, _ARRAYS[name][0]) for name, array in arrays.items() if array is not None}


def checked(trace: Trace, name: str) -> Trace:
    """`trace`, if its arrays fit each other; FormatError naming `name` otherwise."""
    for field, array in _arrays_of(trace).items():
        wanted, _, dimensions = _ARRAYS[field]
        given = getattr(trace, field)
        if given.dtype != wanted or given.ndim != dimensions:
            raise FormatError(f"{name}: {field} are {given.dtype} {list(array.shape)}: expected {wanted} of {dimensions} dimensions")
    starts, lookback, batches, keys = trace.starts, trace.lookback, trace.batches, trace.keys
    count = len(trace.tokens) if keys is None else len(keys)
    if not _ascends(starts, count):
        raise FormatError(f"{name}: starts do not run from 0 to {count}, never falling: the file is damaged")
    if len(lookback) != len(starts) - 1:
        raise FormatError(f"{name}: {len(lookback)} lookbacks of {len(starts) - 1} sequences: the file is damaged")
    if len(lookback) and int(lookback.max()) >= MAX_NGRAM:
        raise FormatError(f"{name}: {int(lookback.max())} tokens of lookback: expected at most {MAX_NGRAM - 1}")
    if batches is not None and not _ascends(batches, len(lookback)):
        raise FormatError(f"{name}: batches do not run from 0 to {len(lookback)}, never falling: the file is damaged")
    if keys is None:
        if np.any(np.diff(starts) < lookback):
            raise FormatError(f"{name}: a sequence that is shorter than its lookback: the file is damaged")
        if count and int(trace.tokens.min()) < NO_PART:
            raise FormatError(f"{name}: token id {int(trace.tokens.min())}: expected {NO_PART} (takes no part) or more")
    else:
        if not 0 < keys.shape[1] < MAX_NGRAM:
            raise FormatError(f"{name}: keys of {keys.shape[1]} orders: expected 1 .. {MAX_NGRAM - 1}")
        if count and int(keys.min()) < 0:
            raise FormatError(f"{name}: a negative key: the file is damaged")
    return trace


def _ascends(bounds: np.ndarray, last: int) -> bool:
    """Whether `bounds` run from 0 to `last` without ever falling."""
    return len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == last and not np.any(bounds[1:] < bounds[:-1])
