"""A trace of real text, and the steps that are cut from it: which positions one lookup asks for, with their true lookbacks.

A step is a decode step (one position of each stream) or a prefill chunk (consecutive positions). A lookup is given the flat tokens
of a step and nothing else; `RowIds` is how those without a store get from there to rows, in their own time.
Invariant: no position is measured twice within a cell, and text that only repeats itself is refused as a trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssdgram.errors import ConfigError, TokenError, UnavailableError
from ssdgram.geometry import Geometry
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS, check_tokens, ngram_keys, rows_of_keys
from ssdgram.sequence import Sequence
from ssdgram.tools.text import SHORTEST, Document, documents, sources
from ssdgram.tools.trace import NO_PART, Trace
from ssdgram.tools.trace_build import build

WINDOW = 16                                                  # tokens in a row that count as a repetition ...
FILLER = 0.4                                                 # ... and the share of them that makes a trace filler
CHARACTERS = 8                                               # a token's, at most: code and prose have three to four
NEAR = ("stdlib", "include", "doc", "man")                   # sources that are quick to look through
Span = tuple[int, int]                                       # positions [start, stop) of the trace


class RowIds:
    """The hash as the CPU's placements run it: flat tokens to the rows of every layer, compiled, into memory of its own.

    `most`: output positions of the largest step.
    """

    def __init__(self, geometry: Geometry, token_map: np.ndarray | None, most: int) -> None:
        self.geometry, self.token_map, layers = geometry, geometry.checked_map(token_map), len(geometry.layers)
        self._keys = np.empty((most, layers, geometry.orders), np.int64)
        self._rows = np.empty((most, layers, geometry.columns), np.int64)
        self._layers = [np.empty((most, geometry.columns), np.int64) for _ in range(layers)]

    def __call__(self, tokens: np.ndarray, flags: np.ndarray) -> list[np.ndarray]:
        """int64 [T, columns] of each layer, valid until the next call."""
        geometry = self.geometry
        count = ngram_keys(tokens, flags, 0, len(tokens), self.token_map, geometry.multiplier_array, geometry.rule,
                           geometry.fill(self.token_map), self._keys)
        rows = self._rows[:count]
        rows_of_keys(self._keys[:count], geometry.prime_array, geometry.offset_array, rows)
        for layer, mine in enumerate(self._layers):
            np.copyto(mine[:count], rows[:, layer])
        return [mine[:count] for mine in self._layers]


@dataclass(frozen=True)
class Step:
    """What one lookup asks for. `ids`: for each layer the rows in its table, int64 [T, columns]: to check and to count with."""

    spans: tuple[Span, ...]
    sequence: Sequence
    ids: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.sequence)


class Text:
    """A trace of documents with the geometry that hashes it. `digest`: its SHA-256."""

    def __init__(self, trace: Trace, geometry: Geometry, token_map: np.ndarray | None, *, force_filler: bool = False) -> None:
        if trace.kind != "tokens" or trace.batches is not None or bool((trace.tokens == NO_PART).any()):
            raise ConfigError("the trace is a recording, or one of keys: steps of any size are cut from documents; build one with "
                              "`ssdgram trace build`")
        self.trace, self.tokens, self.starts, self.about = trace, trace.tokens, trace.starts, trace.about
        self.geometry, self.token_map, self._table = geometry, token_map, geometry.checked_map(token_map)
        bad = check_tokens(trace.tokens, np.full(len(trace.tokens), PARTICIPATES, np.uint8), geometry.vocabulary(self._table))
        if bad >= 0:
            raise TokenError(f"token {bad} of the trace is {trace.tokens[bad]}: expected 0 .. {geometry.vocabulary(self._table) - 1}; the "
                             f"trace was made with another tokenizer")
        self.digest = trace.sha256
        self.repeated = repeated_share(self.tokens)
        self.filler = self.repeated > FILLER
        if self.filler and not force_filler:
            raise ConfigError(f"{self.repeated:.0%} of the trace's positions repeat the {WINDOW} tokens before them word for word: that is "
                              f"filler, not text, and every cache looks good on it; give real text (or --force-filler, which the "
                              f"report then says)")

    def __len__(self) -> int:
        return len(self.tokens)

    def step(self, spans: SequenceType[Span]) -> Step:
        """A step that asks for the positions of the spans, in order, each with the lookback that it has in its document."""
        tokens, flags = [], []
        for start, stop in spans:
            while start < stop:                              # a document's end ends a sequence
                document = int(np.searchsorted(self.starts, start, side="right")) - 1
                end = min(stop, int(self.starts[document + 1]))
                first = max(int(self.starts[document]), start - (self.geometry.max_ngram - 1))
                mine = np.full(end - first, PARTICIPATES, np.uint8)
                mine[start - first:] |= OUTPUT
                mine[0] |= STARTS
                tokens.append(self.tokens[first:end])
                flags.append(mine)
                start = end
        flat_tokens, flat_flags = np.concatenate(tokens).astype(np.int32), np.concatenate(flags)
        ids = RowIds(self.geometry, self.token_map, len(flat_tokens))(flat_tokens, flat_flags)
        return Step(tuple(spans), Sequence.of_flat(flat_tokens, flat_flags), tuple(ids))

    def decode(self, span: Span, streams: int, steps: int) -> list[Step]:
        """At most `steps` steps of `streams` streams that each walk through a part of the span of their own."""
        length = (span[1] - span[0]) // streams
        firsts = [span[0] + stream * length for stream in range(streams)]
        return [self.step([(first + k, first + k + 1) for first in firsts]) for k in range(min(steps, length))]

    def prefill(self, span: Span, tokens: int, chunks: int) -> list[Step]:
        """At most `chunks` consecutive chunks of `tokens` tokens from the span."""
        count = min(chunks, (span[1] - span[0]) // tokens)
        return [self.step([(span[0] + k * tokens, span[0] + (k + 1) * tokens)]) for k in range(count)]

    def scattered(self, positions: np.ndarray, streams: int, steps: int) -> list[Step]:
        """Decode steps of `streams` streams at the given positions, taken in order; as many as there are positions for."""
        count = min(steps, len(positions) // streams)
        return [self.step([(int(p), int(p) + 1) for p in positions[k * streams:(k + 1) * streams]]) for k in range(count)]

    def never_seen(self, span: Span, known: Span | None = None) -> np.ndarray:
        """Positions of the span whose bundles nobody asked for: each brings a 2-gram (and so a 3-gram and a 4-gram) that no other of
        them has, and that does not occur in `known`. Ascending."""
        pairs = self._bigrams()
        places = np.arange(*span)
        _, first = np.unique(pairs[places], return_index=True)
        chosen = places[np.sort(first)]
        return chosen if known is None else chosen[~np.isin(pairs[chosen], pairs[slice(*known)])]

    def _bigrams(self) -> np.ndarray:
        """The key of each position's 2-gram, int64 [N]."""
        flags = np.full(len(self.tokens), PARTICIPATES | OUTPUT, np.uint8)
        flags[self.starts[:-1]] |= STARTS
        keys = np.empty((len(self.tokens), len(self.geometry.layers), self.geometry.orders), np.int64)
        ngram_keys(self.tokens, flags, 0, len(self.tokens), self._table, self.geometry.multiplier_array, self.geometry.rule,
                   self.geometry.fill(self._table), keys)
        return keys[:, 0, 0].copy()


def repeated_share(tokens: np.ndarray) -> float:
    """Share of the positions whose last WINDOW tokens occurred before, word for word; 0 for traces too short to tell."""
    if len(tokens) < 4 * WINDOW:
        return 0.0
    value = np.zeros(len(tokens) - WINDOW + 1, np.uint64)
    for k in range(WINDOW):                                  # a polynomial hash modulo 2^64
        value = value * np.uint64(0x9E3779B97F4A7C15) + tokens[k:len(tokens) - WINDOW + 1 + k].astype(np.uint64) + np.uint64(1)
    return 1.0 - len(np.unique(value)) / len(value)


def real_text(tokenizer: Path, limit: int) -> Trace:
    """`limit` tokens of code and prose that this machine has on disk, a document of each in turn: the standard library and the
    system's documentation, everything else only if that is not enough (installed packages take long to look through)."""
    trace = build(tokenizer, _enough(_in_turn(NEAR), limit), limit)
    if len(trace.tokens) < limit:
        trace = build(tokenizer, _in_turn(None), limit)
    if len(trace.tokens) < limit:
        raise UnavailableError(f"this machine has {len(trace.tokens)} tokens of text, {limit} are wanted: give a trace (--trace)")
    return trace


def _enough(found: Iterator[Document], limit: int) -> Iterator[Document]:
    """As many documents as `limit` tokens can need: the rest is not tokenised in vain."""
    left = CHARACTERS * limit
    while left > 0 and (document := next(found, None)) is not None:
        left -= len(document.text)
        yield document


def _in_turn(wanted: tuple[str, ...] | None) -> Iterator[Document]:
    if wanted is None:
        kinds = [documents("code"), documents("prose")]
    else:
        kinds = [iter_ for kind in ("code", "prose") for name, iter_ in sources(kind).items() if name in wanted]
    for turn in itertools.zip_longest(*kinds):
        yield from (document for document in turn if document is not None and len(document.text) >= SHORTEST)


def cut(trace: Trace, limit: int) -> Trace:
    """The first `limit` tokens of a trace."""
    if len(trace.tokens) <= limit:
        return trace
    starts = np.append(trace.starts[trace.starts < limit], limit)
    about: dict[str, Any] = {**trace.about, "tokens": limit, "cut_from": len(trace.tokens)}
    return Trace.of_documents(trace.tokens[:limit].copy(), starts, about)
