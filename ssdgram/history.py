"""History: the tokens of one request by absolute position, and which of them took part.

What an engine keeps per request so that any chunk of it hashes as in a fresh run of the whole: append what comes, rewind
what a speculative step took back, fork for a beam, export for another process. It does not know n, the vocabulary or the
store. Invariant: `sequence(a, b)` depends on the tokens at positions below b alone, not on how they got there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ssdgram.errors import FormatError, TokenError
from ssdgram.geometry import MAX_NGRAM, MAX_TOKEN_IDS
from ssdgram.kernels.hash import PARTICIPATES
from ssdgram.sequence import Sequence, on_host

_MAGIC = b"SSDGHIS1"                                         # then the count (u64), the ids (int32), the participation (u8)


class History:
    """Token ids and participation by position. One thread at a time; compares by content; pickles."""

    __slots__ = ("_flags", "_length", "_tokens")

    def __init__(self, tokens: Any = None, participates: Any = None) -> None:
        self._tokens = np.empty(64, np.int32)
        self._flags = np.empty(64, bool)
        self._length = 0
        if tokens is not None:
            self.append(tokens, participates)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return bool(np.array_equal(self.tokens, other.tokens) and np.array_equal(self.participates, other.participates))

    __hash__ = None  # type: ignore[assignment]              # it changes

    def __repr__(self) -> str:
        return f"History({self._length} tokens)"

    @property
    def tokens(self) -> np.ndarray:
        """The ids, int32 [len]; those of positions that take no part are kept for the caller only (clipped to int32)."""
        return self._tokens[:self._length].copy()

    @property
    def participates(self) -> np.ndarray:
        """Which positions take part, bool [len]."""
        return self._flags[:self._length].copy()

    def append(self, tokens: Any, participates: Any = None) -> int:
        """Add tokens (integers [T], with `participates` bool [T] as for Sequence) at the end; returns the first one's position.

        TokenError, and no change, for an id that takes part and is negative or no 32-bit id.
        """
        chunk = Sequence(on_host(tokens), participates)
        flags = (chunk.flat_flags & PARTICIPATES).astype(bool)
        bad = np.flatnonzero(flags & ((chunk.flat_tokens < 0) | (chunk.flat_tokens == MAX_TOKEN_IDS)))
        start = self._length
        if len(bad):
            raise TokenError(f"position {start + int(bad[0])} holds token id {chunk.token_at(int(bad[0]))}: expected 0 .. "
                             f"{MAX_TOKEN_IDS - 1}, or participates=False there")
        end = start + len(chunk)
        if end > len(self._tokens):
            self._tokens, self._flags = (np.concatenate([array[:start], np.empty(2 * end - start, array.dtype)])
                                         for array in (self._tokens, self._flags))
        self._tokens[start:end], self._flags[start:end] = chunk.flat_tokens, flags
        self._length = end
        return start

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self._length = self._position(length, "length")

    def fork(self, length: int | None = None) -> History:
        """An independent copy, of the first `length` tokens if that is given."""
        return self._first(self._length if length is None else self._position(length, "length"))

    def lookback(self, position: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, participation bool) of the last n - 1 tokens before `position`, oldest first; fewer near the start."""
        stop = self._position(position, "position")
        start = max(0, stop - (n - 1))
        return self._tokens[start:stop].copy(), self._flags[start:stop].copy()

    def sequence(self, start: int, stop: int | None = None) -> Sequence:
        """The Sequence of positions [start, stop) (to the end if None), with its lookback."""
        stop = self._length if stop is None else self._position(stop, "stop")
        if start > stop:
            raise TokenError(f"start is {start}: expected at most stop = {stop}")
        before, before_flags = self.lookback(start, MAX_NGRAM)
        return Sequence(self._tokens[start:stop], self._flags[start:stop], before, before_flags)

    def export_bytes(self) -> bytes:
        """The whole history as bytes, for `import_bytes` in this or another process."""
        count = np.array([self._length], "<u8").tobytes()
        return _MAGIC + count + self.tokens.astype("<i4").tobytes() + self.participates.astype(np.uint8).tobytes()

    @classmethod
    def import_bytes(cls, data: bytes) -> History:
        """The history that `export_bytes` wrote; FormatError if it is something else."""
        head = len(_MAGIC) + 8
        count, rest = divmod(len(data) - head, 5)
        if data[:len(_MAGIC)] != _MAGIC or rest or count < 0 or int.from_bytes(data[len(_MAGIC):head], "little") != count:
            raise FormatError(f"{len(data)} bytes are no exported History: expected {_MAGIC!r}, a count, 5 bytes per token")
        flags = np.frombuffer(data, np.uint8, count, head + 4 * count)
        if count and flags.max() > 1:
            raise FormatError(f"an exported History with a participation byte of {int(flags.max())}: expected 0 or 1")
        return cls(np.frombuffer(data, "<i4", count, head), flags)

    def __reduce__(self) -> tuple[Any, ...]:
        return History.import_bytes, (self.export_bytes(),)

    def _first(self, length: int) -> History:
        copy = History()
        copy._tokens, copy._flags, copy._length = self._tokens[:length].copy(), self._flags[:length].copy(), length
        return copy

    def _position(self, value: int, name: str) -> int:
        if not 0 <= value <= self._length:
            raise TokenError(f"{name} is {value}: expected 0 .. {self._length}, the history's length")
        return int(value)
