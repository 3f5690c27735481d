"""From a trace to the batches of a serving engine, and from batches to the bundles that they ask for.

    decode(trace, streams)     a batch is one step: the next token of each of `streams` streams
    prefill(trace, tokens)     a batch is a chunk: the next `tokens` tokens, document after document
    recorded(trace)            the batches that a store was asked for

A batch is in the flat form of ssdgram.sequence, so it goes into a store, and through the n-gram hash, as it is. Requests are the
bundles of one layer, in the order in which the planner meets them: what happens to one layer's bundles in a cache happens to
all. It knows no cache. Invariant: `bounds` runs from 0 to the end, never falling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ssdgram._compiled import compiled, compiled_lean
from ssdgram.errors import ConfigError, TokenError
from ssdgram.geometry import Geometry
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS, check_tokens, ngram_keys
from ssdgram.sequence import Sequence
from ssdgram.tools.trace import NO_PART, Trace

SLICE = 1 << 16                                              # flat tokens hashed at a time: keys of all layers, of which one is kept


@dataclass(frozen=True)
class Batches:
    """B batches: flat tokens int32 [F] and flags uint8 [F] (see ssdgram.sequence), batch b at [bounds[b], bounds[b + 1])."""

    tokens: np.ndarray
    flags: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sequence(self, batch: int) -> Sequence:
        """A batch for `Store.prefetch`: all its sequences as one, without any work per token."""
        begin, end = self.bounds[batch:batch + 2]
        return Sequence.of_flat(self.tokens[begin:end], self.flags[begin:end])

    def part(self, first: int, stop: int) -> Batches:
        """Batches [first, stop)."""
        begin, end = self.bounds[first], self.bounds[stop]
        return Batches(self.tokens[begin:end], self.flags[begin:end], self.bounds[first:stop + 1] - begin)

    def while_full(self, positions: int) -> Batches:
        """The batches up to the last that has `positions` positions: not the end of a trace, where streams run out of documents. All
        of them, if none has."""
        full = np.flatnonzero(self.positions() >= positions)
        return self.part(0, int(full[-1]) + 1) if len(full) else self

    def positions(self) -> np.ndarray:
        """Positions of each batch that ask for rows: int64 [B]."""
        counted = np.concatenate([[0], np.cumsum(self.flags & OUTPUT != 0)])
        return np.diff(counted[self.bounds])

    def shortfall(self, wanted: int) -> str:
        """A sentence for who asked for `wanted` streams, if less than nine tenths of them are in use on the mean; else ""."""
        positions = self.positions()
        used = float(positions.mean()) if len(positions) else 0.0
        if used >= 0.9 * wanted:
            return ""
        return (f"only {used:.1f} of {wanted} streams are in use on the mean, as the trace has too few or too unequal documents: "
                "take a longer trace, or fewer streams (--decode)")

    def __iter__(self) -> Iterator[Sequence]:
        return (self.sequence(batch) for batch in range(len(self)))


@dataclass(frozen=True)
class Requests:
    """Bundles asked for: x int64 [M] and group uint8 [M] (the order index), batch b at [bounds[b], bounds[b + 1])."""

    x: np.ndarray
    groups: np.ndarray
    bounds: np.ndarray
    orders: int


# ---------------------------------------------------------------- documents to batches


@compiled
def _interleave(starts, streams, order, bounds):  # type: ignore[no-untyped-def]
    """Fill `order` (tokens in the order of decoding) and `bounds` (of each step); the number of steps."""
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
                cursor[stream] += 1
                count += 1
        step += 1
        bounds[step] = count
    return step


@compiled_lean
def _lay_out(tokens, firsts, stops, origins, lookback, out, flags, ends):  # type: ignore[no-untyped-def]
    """Pieces [firsts[p], stops[p]) of documents that begin at origins[p], each behind its context, in flat form. ends[p + 1]:
    where piece p ends there."""
    count = 0
    for piece in range(len(firsts)):
        begin = max(origins[piece], firsts[piece] - lookback)
        for index in range(begin, stops[piece]):
            part = tokens[index] != NO_PART
            out[count] = tokens[index] if part else 0
            flags[count] = PARTICIPATES * part + OUTPUT * (index >= firsts[piece]) + STARTS * (index == begin)
            count += 1
        ends[piece + 1] = count
    return count


def _flat(tokens: np.ndarray, firsts: np.ndarray, stops: np.ndarray, origins: np.ndarray, lookback: int,
          bounds: np.ndarray) -> Batches:
    """Batches of pieces; `bounds` in pieces."""
    room = int((stops - np.maximum(origins, firsts - lookback)).sum())
    out, flags, ends = np.empty(room, np.int32), np.empty(room, np.uint8), np.zeros(len(firsts) + 1, np.int64)
    _lay_out(tokens, firsts, stops, origins, lookback, out, flags, ends)
    return Batches(out, flags, ends[bounds])


def _checked(trace: Trace, least: int, name: str) -> None:
    if trace.kind != "tokens" or trace.batches is not None:
        what = "of keys" if trace.kind == "keys" else "a recording"
        raise ConfigError(f"the trace is {what}: its batches are what they were; expected a trace of documents to make others from")
    if least < 1:
        raise ConfigError(f"{name} is {least}: expected 1 or more")


def decode(trace: Trace, streams: int, lookback: int = 3) -> Batches:
    """Steps of `streams` decode streams; a stream whose document ended goes on with the next document that nobody took.

    `lookback`: tokens of context given with each token, n - 1. ConfigError for a trace that is no trace of documents.
    """
    _checked(trace, streams, "streams")
    order, bounds = np.empty(len(trace.tokens), np.int64), np.zeros(len(trace.tokens) + 1, np.int64)
    steps = _interleave(trace.starts, streams, order, bounds)
    origins = trace.starts[np.searchsorted(trace.starts, order, side="right") - 1]
    return _flat(trace.tokens, order, order + 1, origins, lookback, bounds[:steps + 1])


def prefill(trace: Trace, tokens: int, lookback: int = 3) -> Batches:
    """Chunks of `tokens` tokens, document after document, as a scheduler packs prompts; the last may be shorter."""
    _checked(trace, tokens, "tokens")
    count = len(trace.tokens)
    edges = np.unique(np.concatenate([trace.starts, np.arange(0, count + tokens, tokens).clip(max=count)]))
    origins = trace.starts[np.searchsorted(trace.starts, edges[:-1], side="right") - 1]
    bounds = np.searchsorted(edges, np.arange(0, count + tokens, tokens).clip(max=count))
    if len(bounds) > 1 and bounds[-1] == bounds[-2]:
        bounds = bounds[:-1]
    return _flat(trace.tokens, edges[:-1], edges[1:], origins, lookback, bounds)


def recorded(trace: Trace) -> Batches:
    """The batches of a recording of tokens; ConfigError if it is something else."""
    if trace.kind != "tokens" or trace.batches is None:
        raise ConfigError(f"the trace is {'of keys' if trace.kind == 'keys' else 'of documents'}: expected a recording of tokens")
    flags = np.full(len(trace.tokens), PARTICIPATES | OUTPUT, np.uint8)
    flags[trace.tokens == NO_PART] &= ~np.uint8(PARTICIPATES)
    place = np.arange(len(flags)) - np.repeat(trace.starts[:-1], np.diff(trace.starts))
    flags[place < np.repeat(trace.lookback, np.diff(trace.starts))] &= ~np.uint8(OUTPUT)
    flags[place == 0] |= STARTS
    return Batches(np.maximum(trace.tokens, 0), flags, trace.starts[trace.batches])


# ---------------------------------------------------------------- batches to bundles


def requests(batches: Batches, geometry: Geometry, token_map: np.ndarray | None) -> Requests:
    """The bundles of the geometry's first layer that batches ask for. TokenError if they have ids that the geometry has not."""
    table = geometry.checked_map(token_map)
    bad = int(check_tokens(batches.tokens, batches.flags, geometry.vocabulary(table)))
    if bad >= 0:
        raise TokenError(f"token {bad} of the trace is {batches.tokens[bad]}: expected 0 .. {geometry.vocabulary(table) - 1}; "
                         "the trace was made with another tokenizer")
    counted = np.concatenate([[0], np.cumsum(batches.flags & OUTPUT != 0)])
    keys = np.empty((int(counted[-1]), geometry.orders), np.int64)
    scratch = np.empty((SLICE, 1, geometry.orders), np.int64)
    for start in range(0, len(batches.tokens), SLICE):
        stop = min(start + SLICE, len(batches.tokens))
        ngram_keys(batches.tokens, batches.flags, start, stop, table, geometry.multiplier_array[:1], geometry.rule,
                   geometry.fill(table), scratch)
        keys[counted[start]:counted[stop]] = scratch[:counted[stop] - counted[start], 0]
    return _requests_of(keys, counted[batches.bounds])


def recorded_requests(trace: Trace) -> Requests:
    """The bundles that a trace of keys names, in its batches (one batch a sequence, if it has none)."""
    if trace.keys is None:
        raise ConfigError("the trace is one of tokens: make batches of it, and requests of them")
    return _requests_of(trace.keys, trace.starts if trace.batches is None else trace.starts[trace.batches])


def _requests_of(keys: np.ndarray, bounds: np.ndarray) -> Requests:
    orders = keys.shape[1]
    return Requests(keys.reshape(-1), np.tile(np.arange(orders, dtype=np.uint8), len(keys)), bounds * orders, orders)
