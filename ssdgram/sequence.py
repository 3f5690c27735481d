"""Sequences of tokens, and their flat form that the compiled code works on.

A Sequence is what one request asks for: T token ids, which of them take part, and the tokens before them. It copies what it
is given, once, so later changes by the caller do not matter. It does not know the vocabulary: `check_ids` does the checking.
Invariant: ids at positions that take no part are never looked at; what does not fit an int32 is clipped, which keeps a
bad id bad (no vocabulary has 2^31 - 1 ids), and its true value is kept for the message.

    flat_tokens   [ lookback, oldest first, at most MAX_NGRAM - 1 ][ tokens                  ]   int32
    flat_flags    STARTS at index 0; PARTICIPATES where it does    [ OUTPUT on each of these ]   uint8

The chunks of many requests at once, as a serving engine's step has them, are one `Sequence.ragged`: the same arrays with a
lookback and a STARTS per request, built by a few NumPy calls whatever the number of requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ssdgram.errors import TokenError
from ssdgram.geometry import MAX_NGRAM
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS, check_tokens, plain_sequence

_LOW, _HIGH = -2**31, 2**31 - 1
_NONE = np.empty(0, np.int32)
_INT32, _UINT8 = np.dtype(np.int32), np.dtype(np.uint8)      # NumPy takes longer to find them by its types' names
_USUAL = (np.dtype(np.int64), _INT32)


class Mark(NamedTuple):
    """How a kernel says that tokens have arrived: `ticket` into `done`, behind all that it wrote, as the host sees it.

    counter: torch int32 [1] on the device, zero and to be left zero, for the kernel's own use. done: int64 [1], pinned.
    """

    counter: Any
    done: Any
    ticket: int


Fill = Callable[[Any, Any, "Mark | None"], "bool | None"]


class Sequence:
    """T tokens of one request (or a chunk of them), for `Store.prefetch` and `flatten`.

    `tokens`: integers [T], raw ids, NumPy, torch or a list. `participates`: bool [T], False where a token takes no part (an
    image span); None: all do. `lookback`: raw ids before the tokens, oldest first; None or shorter than n - 1: the sequence
    starts there; longer: the last n - 1 count. `lookback_participates`: bool, as long as `lookback`. TokenError for wrong
    types and lengths. A CUDA tensor of tokens is kept as `device_tokens` and not waited for.
    """

    _flat_length: int                                        # of a deferred one
    __slots__ = ("_flat_length", "_length", "_ragged", "_wide", "device_tokens", "fill", "flat_flags", "flat_tokens", "lookback_length")

    def __init__(self, tokens: Any, participates: Any = None, lookback: Any = None, lookback_participates: Any = None) -> None:
        self.fill: Fill | None = None
        self._ragged: tuple[np.ndarray, int] | None = None   # (lengths of the requests, width of their windows)
        if participates is lookback is lookback_participates is None and _is_plain(tokens):
            length = len(tokens)                             # the usual case, in few steps
            self.device_tokens, self._length, self.lookback_length = None, length, 0
            self.flat_tokens, self.flat_flags = np.empty(length, _INT32), np.empty(length, _UINT8)
            fits = plain_sequence(tokens, self.flat_tokens, self.flat_flags)
            self._wide = {} if fits else _clip_into(self.flat_tokens, tokens, 0)
            return
        self.device_tokens = tokens if _is_torch(tokens) and tokens.is_cuda else None
        own = _integers(tokens, "tokens") if self.device_tokens is None else np.zeros(_vector_length(tokens), np.int32)
        own_part = _booleans(participates, len(own), "participates")
        before = _NONE if lookback is None else _integers(lookback, "lookback")
        before_part = _booleans(lookback_participates, len(before), "lookback_participates")
        kept = min(len(before), MAX_NGRAM - 1)
        cut = len(before) - kept
        self._length, self.lookback_length = len(own), kept
        self.flat_tokens = np.empty(kept + len(own), np.int32)
        self.flat_flags = np.full(kept + len(own), PARTICIPATES | OUTPUT, np.uint8)
        self._wide = _clip_into(self.flat_tokens, own, kept)
        if own_part is not None:
            self.flat_flags[kept:] = own_part.view(np.uint8) * PARTICIPATES | OUTPUT
        if kept:
            self._wide.update(_clip_into(self.flat_tokens, before[cut:], 0))
            self.flat_flags[:kept] = PARTICIPATES
            if before_part is not None:
                self.flat_flags[:kept] = before_part[cut:].view(np.uint8) * PARTICIPATES
        self.flat_flags[:1] |= STARTS

    @classmethod
    def of_flat(cls, flat_tokens: np.ndarray, flat_flags: np.ndarray) -> Sequence:
        """Any number of sequences as one, given in the flat form: int32 [N] and uint8 [N], STARTS where each begins.

        No work per token but a copy: for what already has its tokens in that form. Errors name flat positions.
        """
        if flat_tokens.dtype != np.int32 or flat_flags.dtype != np.uint8 or flat_tokens.shape != flat_flags.shape or flat_tokens.ndim != 1:
            raise TokenError(f"the flat form is {flat_tokens.dtype} {list(flat_tokens.shape)}, {flat_flags.dtype} "
                             f"{list(flat_flags.shape)}: expected int32 [N] and uint8 [N]")
        made = cls.__new__(cls)
        made.device_tokens, made.fill, made._ragged, made.lookback_length, made._wide = None, None, None, 0, {}
        made.flat_tokens, made.flat_flags = flat_tokens.copy(), flat_flags.copy()
        made._length = int(np.count_nonzero(made.flat_flags & OUTPUT))
        return made

    @classmethod
    def ragged(cls, tokens: Any, lengths: Any, windows: Any = None, valid: Any = None, *, participates: Any = None,
               windows_participate: Any = None) -> Sequence:
        """The chunks of R requests, one behind the other, as one Sequence of T positions.

        `tokens`: integers [T]; `lengths`: integers [R], their sum T. `windows`: integers [R, w], the raw ids before each chunk,
        oldest first, w up to MAX_NGRAM - 1; None: none. `valid`: bool [R, w], False where nothing is before the chunk (a
        request's start); None: all are. `participates` bool [T], `windows_participate` bool [R, w] as for a Sequence.
        TokenError for wrong types and shapes.
        """
        ids, counts = _integers(tokens, "tokens"), _integers(lengths, "lengths").astype(np.int64)
        if counts.min(initial=0) < 0 or counts.sum() != len(ids):
            raise TokenError(f"lengths are {len(counts)} numbers from {counts.min(initial=0)} on, {counts.sum()} in all: expected "
                             f"numbers from 0 on whose sum is the {len(ids)} tokens")
        before = _matrix(np.empty((len(counts), 0), np.int32) if windows is None else windows, len(counts), "windows", "iu")
        width = before.shape[1]
        there = np.ones(before.shape, bool)
        for given, name in ((valid, "valid"), (windows_participate, "windows_participate")):
            if given is not None:
                flags = _matrix(given, len(counts), name, "biu")
                if flags.shape != before.shape:
                    raise TokenError(f"{name} is {list(flags.shape)}: expected the windows' shape, {list(before.shape)}")
                there &= flags.astype(bool)
        part = _booleans(participates, len(ids), "participates")
        ends = np.cumsum(counts + width)
        starts = ends - counts - width
        self = cls.deferred(len(ids), len(ids) + before.size)
        own = np.ones(len(self.flat_tokens), bool)
        own[(starts[:, None] + np.arange(width)).reshape(-1)] = False
        flat = np.empty(len(own), np.int64)
        flat[own], flat[~own] = ids, np.where(there, before, 0).reshape(-1)
        self._wide = _clip_into(self.flat_tokens, flat, 0)
        self.flat_flags[own] = PARTICIPATES | OUTPUT if part is None else part.view(np.uint8) * PARTICIPATES | OUTPUT
        self.flat_flags[~own] = there.reshape(-1).view(np.uint8) * PARTICIPATES
        self.flat_flags[starts[counts + width > 0]] |= STARTS
        self._ragged = counts, width
        return self

    @classmethod
    def deferred(cls, length: int, flat_length: int, fill: Fill | None = None) -> Sequence:
        """A Sequence of `length` positions whose flat arrays `fill(flat_tokens, flat_flags, mark)` writes when it is submitted.

        For engines: `fill` gets torch tensors of `flat_length` entries, int32 and uint8, in pinned memory if the store is on a
        GPU; what it launches on the current stream writes them, exactly `length` of them with OUTPUT. If it stores the mark's
        ticket behind that by itself (see Mark) it returns True, and a launch is saved. The tokens are checked when they have
        arrived: a bad id is raised by the batch's `wait`.
        """
        made = cls.__new__(cls)
        made.device_tokens, made._ragged, made.lookback_length, made._wide = None, None, 0, {}
        made._length, made._flat_length, made.fill = length, flat_length, fill
        return made

    def __getattr__(self, name: str) -> np.ndarray:
        """The flat arrays of a deferred Sequence, made when they are first asked for: a GPU's kernels write elsewhere."""
        if name not in ("flat_tokens", "flat_flags"):
            raise AttributeError(f"a Sequence has no {name}")
        self.flat_tokens, self.flat_flags = np.zeros(self._flat_length, _INT32), np.zeros(self._flat_length, _UINT8)
        return self.flat_tokens if name == "flat_tokens" else self.flat_flags

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Sequence({len(self)} tokens, {self.lookback_length} of lookback)"

    def fill_now(self) -> None:
        """Have `fill` write the flat arrays where they are, in ordinary memory."""
        import torch

        if self.fill is not None:
            self.fill(torch.from_numpy(self.flat_tokens), torch.from_numpy(self.flat_flags), None)

    def place_of(self, flat_index: int) -> tuple[int, int | None]:
        """(position, request) of a flat index: negative positions lie before the first token; None: there is one request."""
        if self._ragged is None:
            return flat_index - self.lookback_length, None
        lengths, width = self._ragged
        ends = np.cumsum(lengths + width)
        request = int(np.searchsorted(ends, flat_index, side="right"))
        return int(flat_index - (ends[request] - lengths[request])), request

    def token_at(self, flat_index: int) -> int:
        """The id that was given for a flat position, before any clipping."""
        return self._wide.get(flat_index, int(self.flat_tokens[flat_index]))


def flatten(sequences: list[Sequence], n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(flat_tokens int32 [N], flat_flags uint8 [N], T) of sequences one behind the other, lookbacks cut to the last n - 1.

    The arrays may be a sequence's own: they are not to be written. Tokens still on a device count as zeros here.
    """
    if len(sequences) == 1 and sequences[0].lookback_length < n:
        only = sequences[0]
        return only.flat_tokens, only.flat_flags, len(only)
    cuts = [max(0, sequence.lookback_length - (n - 1)) for sequence in sequences]
    flat_tokens = np.concatenate([np.empty(0, np.int32), *[s.flat_tokens[cut:] for s, cut in zip(sequences, cuts)]])
    flat_flags = np.concatenate([np.empty(0, np.uint8), *[s.flat_flags[cut:] for s, cut in zip(sequences, cuts)]])
    lengths = [len(sequence.flat_tokens) - cut for sequence, cut in zip(sequences, cuts)]
    starts = np.cumsum([0, *lengths])[:-1]
    flat_flags[starts[np.array(lengths, np.int64) > 0]] |= STARTS
    return flat_tokens, flat_flags, sum(len(sequence) for sequence in sequences)


def cuts(count: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces of `count` positions: of those sizes, the last one again and again."""
    start = 0
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if start >= count:
            return
        yield start, min(start + size, count)
        start += size


def pieces(sequence: Sequence, n: int, sizes: tuple[int, ...]) -> Iterator[Sequence]:
    """The sequence cut into parts of those many output positions (see `cuts`), each with what it looks back at; their rows are, one part
    behind the other, those of the whole. Tokens that are not on the host are not cut. A part is cut when it is asked for."""
    count = len(sequence)
    if sequence.fill is not None or sequence.device_tokens is not None or count <= sizes[0]:
        yield sequence
        return
    tokens, flags, _ = flatten([sequence], n)
    outputs, begin = np.flatnonzero(flags & OUTPUT), 0
    for start, stop in cuts(count, sizes):
        end = len(tokens) if stop == count else int(outputs[stop - 1]) + 1   # the last takes what looks at nothing
        first = max(0, begin - (n - 1))
        part = Sequence.of_flat(tokens[first:end], flags[first:end])
        part.flat_flags[:begin - first] &= ~np.uint8(OUTPUT)
        part._length = stop - start
        yield part
        begin = end


def check_ids(sequences: list[Sequence], n: int, flat_tokens: np.ndarray, flat_flags: np.ndarray, vocab_size: int) -> None:
    """TokenError naming the first id that takes part and is not in 0 .. vocab_size - 1; the arrays are `flatten`'s."""
    index = check_tokens(flat_tokens, flat_flags, vocab_size)
    if index >= 0:
        raise bad_id(sequences, n, index, vocab_size)


def bad_id(sequences: list[Sequence], n: int, index: int, vocab_size: int, token: int | None = None) -> TokenError:
    """The error for flat position `index` of `flatten(sequences, n)`; `token`: its id, where only the caller knows it."""
    cuts = [max(0, sequence.lookback_length - (n - 1)) for sequence in sequences]
    ends = np.cumsum([len(sequence.flat_tokens) - cut for sequence, cut in zip(sequences, cuts)])
    number = int(np.searchsorted(ends, index, side="right"))
    sequence, cut = sequences[number], cuts[number]
    index -= int(ends[number]) - (len(sequence.flat_tokens) - cut)
    position, request = sequence.place_of(index + cut)
    found = sequence.token_at(index + cut) if token is None else token
    place = f"position {position}" if position >= 0 else f"lookback position {position} (before the first token)"
    if request is not None:
        place += f" of request {request}"
    if len(sequences) > 1:
        place += f" of sequence {number}"
    advice = "mark placeholders with participates=False" if found < 0 else "is this the model's tokenizer?"
    return TokenError(f"{place} holds token id {found}: expected 0 .. {vocab_size - 1} (a vocabulary of {vocab_size}); {advice}")


def _is_plain(tokens: Any) -> bool:
    """Whether `tokens` is a NumPy vector of the usual integers."""
    return type(tokens) is np.ndarray and tokens.ndim == 1 and tokens.dtype in _USUAL


def on_host(tokens: Any) -> Any:
    """`tokens`, copied to the host if they are a tensor on a device."""
    return tokens.cpu() if _is_torch(tokens) else tokens


def _is_torch(value: Any) -> bool:
    """Whether `value` is a torch tensor, found out without importing torch."""
    kind = type(value)
    return kind is not np.ndarray and any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def _vector_length(tensor: Any) -> int:
    if tensor.ndim != 1 or tensor.dtype.is_floating_point or tensor.dtype.is_complex or "bool" in str(tensor.dtype):
        raise TokenError(f"tokens are {tensor.dtype} {list(tensor.shape)}: expected integers of shape [T]")
    return len(tensor)


def _array(value: Any) -> np.ndarray:
    if _is_torch(value):
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise TokenError(f"a list is not rectangular ({error}): expected integers of shape [T]") from error


def _integers(value: Any, name: str) -> np.ndarray:
    """`value` as an integer array [T]; TokenError if it is something else."""
    array = _array(value)
    if array.shape == (0,) and isinstance(value, (list, tuple)):   # NumPy makes floats of an empty list
        return _NONE
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenError(f"{name} are {array.dtype} {list(array.shape)}: expected integers of shape [T]")
    return array


def _matrix(value: Any, rows: int, name: str, kinds: str) -> np.ndarray:
    """`value` as an array [rows, at most MAX_NGRAM - 1] of one of the `kinds`; TokenError if it is something else."""
    array = _array(value)
    if array.ndim != 2 or len(array) != rows or array.shape[1] >= MAX_NGRAM or (array.dtype.kind not in kinds and array.size):
        raise TokenError(f"{name} is {array.dtype} {list(array.shape)}: expected [{rows}, 0 .. {MAX_NGRAM - 1}], a row per request")
    return array


def _booleans(value: Any, length: int, name: str) -> np.ndarray | None:
    """`value` as a bool array [length], None if it is None; TokenError if it is something else."""
    if value is None:
        return None
    array = _array(value)
    if array.shape != (length,) or (array.dtype.kind not in "biu" and length > 0):
        raise TokenError(f"{name} is {array.dtype} {list(array.shape)}: expected bool of shape [{length}], one per token")
    return array.astype(bool)


def _clip_into(out: np.ndarray, ids: np.ndarray, offset: int) -> dict[int, int]:
    """Copy `ids` to the int32 array `out` from `offset` on; those that do not fit are clipped, and returned as {index: id}."""
    part = out[offset:offset + len(ids)]
    part[:] = ids                                            # wraps what does not fit ...
    if ids.dtype.itemsize < 4 or ids.dtype == np.int32 or (part == ids).all():
        return {}
    wide = np.flatnonzero(part != ids)
    for index in wide:                                       # ... which only bad ids and placeholders' hashes do
        part[index] = min(max(int(ids[index]), _LOW), _HIGH)
    return {offset + int(index): int(ids[index]) for index in wide}
