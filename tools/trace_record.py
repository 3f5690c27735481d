"""A recorder of what a running store is asked for: bounded in memory and file, a copy of two small arrays a batch.

    recorder = store.record("live.trace", limit=1_000_000)      ... or `ssdgram trace record -o live.trace COMMAND`
    recorder.stop()                                             the file is there, whole, when this returns

Batches are kept in the store's own flat form and become a trace when the recording ends: at the limit, at `stop`, or when the store
is closed. With keys=True tokens never reach the file: each n-gram becomes a number that a secret, forgotten at the end, makes of it
(SipHash-2-4, Aumasson and Bernstein 2012). Equal n-grams keep equal numbers, so how often which of them occur stays visible.
The caller holds the store's lock in `add`. Requests of `Store.warm` are not recorded: nobody waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ssdgram._compiled import compiled_lean
from ssdgram.errors import ConfigError
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS, ngram_keys
from ssdgram.store import VARIABLE
from ssdgram.tools.trace import NO_PART, Trace, checked

if TYPE_CHECKING:
    from ssdgram.store import Store

log = logging.getLogger("ssdgram")
LIMIT = 1 << 20                                              # tokens, context included: 5 bytes each here, 4 in the file
MOST = 1 << 31                                               # tokens of one recording


class Recorder:
    """Made by `Store.record`. `full`: whether the limit was reached."""

    def __init__(self, path: Path, limit: int, keyed: Callable[[np.ndarray, np.ndarray], np.ndarray] | None) -> None:
        if not 1 <= limit <= MOST:
            raise ConfigError(f"a recording of {limit} tokens: expected 1 .. {MOST}")
        self.path, self.full = path, False
        self._keyed = keyed
        self._tokens, self._flags = np.empty(limit, np.int32), np.empty(limit, np.uint8)    # touched only as far as they are filled
        self._ends = [0]
        self._saving: threading.Thread | None = None
        self._failure: OSError | None = None
        self._lock = threading.Lock()

    def add(self, tokens: np.ndarray, flags: np.ndarray) -> None:
        """One batch in flat form. The one that does not fit ends the recording, and a thread of its own writes it."""
        if self.full:
            return
        end = self._ends[-1]
        stop = end + len(tokens)
        if stop > len(self._tokens):
            self.full = True
            self._save_soon()
            return
        self._tokens[end:stop], self._flags[end:stop] = tokens, flags
        self._ends.append(stop)

    def stop(self) -> Path:
        """End the recording; the trace's path once it is written. Idempotent. OSError if it cannot be written."""
        self.full = True
        self._save_soon().join()
        if self._failure is not None:
            raise self._failure
        return self.path

    def _save_soon(self) -> threading.Thread:
        with self._lock:
            if self._saving is None:
                self._saving = threading.Thread(target=self._save, name="ssdgram-record")
                self._saving.start()
            return self._saving

    def _save(self) -> None:
        try:
            self._trace().save(self.path)
        except OSError as error:
            self._failure = error
            log.warning("recording %s was not written: %s", self.path, error)

    def _trace(self) -> Trace:
        ends = np.array(self._ends, np.int64)
        tokens, flags = self._tokens[:ends[-1]], self._flags[:ends[-1]]
        about = {"recorded": "keys" if self._keyed else "tokens", "batches": len(ends) - 1}
        begins = np.flatnonzero(flags & STARTS != 0)
        starts = np.append(begins, ends[-1])
        lookback = np.zeros(len(begins), np.uint8)
        if len(begins):
            context = np.concatenate([[0], np.cumsum(flags & OUTPUT == 0)])
            lookback[:] = context[starts[1:]] - context[starts[:-1]]
        batches = np.searchsorted(starts, ends)
        if self._keyed is None:
            ids = np.where(flags & PARTICIPATES != 0, np.maximum(tokens, 0), np.int32(NO_PART)).astype(np.int32)
            return checked(Trace(ids, starts, about, lookback, batches), "the recording")
        output = np.concatenate([[0], np.cumsum(flags & OUTPUT != 0)])
        return checked(Trace(np.empty(0, np.int32), output[starts], about, lookback, batches, self._keyed(tokens, flags)), "the recording")


def attach(store: Store, path: str | os.PathLike[str], limit: int, keys: bool) -> Recorder:
    """A recorder for a store: what `Store.record` returns."""
    return Recorder(Path(path), limit, _keyed_by(store) if keys else None)


def from_environment(store: Store) -> None:
    """Record a store that was just opened if `ssdgram trace record` started this process: there is no other way into it.

    A second store, or a file that is there already, gets the next free name: live.trace, live-1.trace, ...
    """
    wanted = os.environ.get(VARIABLE)                        # "LIMIT:tokens:PATH" or "LIMIT:keys:PATH"
    if not wanted:
        return
    limit, _, rest = wanted.partition(":")
    kind, _, path = rest.partition(":")
    if not limit.isdigit() or kind not in ("tokens", "keys") or not path:
        raise ConfigError(f"{VARIABLE} is {wanted!r}: expected LIMIT:tokens:PATH or LIMIT:keys:PATH")
    store.record(_claimed(Path(path)), limit=int(limit), keys=kind == "keys")


def _claimed(path: Path) -> Path:
    """`path`, or the next free name like it; an empty file holds the place until the recording replaces it."""
    for number in range(1 << 16):
        candidate = path if number == 0 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(candidate, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return candidate
    raise ConfigError(f"{path}: 65536 recordings of that name are there: remove some")


# ---------------------------------------------------------------- anonymous keys


def _keyed_by(store: Store) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Flat tokens and flags to int64 [positions, orders]: the keys of the store's first layer under a secret of this recording."""
    geometry, table, plan = store.geometry, store._token_map, store._plan
    secret = np.frombuffer(secrets.token_bytes(16), np.uint64)

    def keyed(tokens: np.ndarray, flags: np.ndarray) -> np.ndarray:
        keys = np.empty((len(tokens), 1, geometry.orders), np.int64)
        count = ngram_keys(tokens, flags, 0, len(tokens), table, np.ascontiguousarray(plan.multipliers[:1]), geometry.rule,
                           geometry.fill(table), keys)
        flat = keys[:count, 0].copy()
        _hide(flat, secret[0], secret[1])
        return flat

    return keyed


@compiled_lean
def sip_round(a, b, c, d):  # type: ignore[no-untyped-def]
    """One SipRound on four uint64."""
    a += b
    b = (b << np.uint64(13) | b >> np.uint64(51)) ^ a
    a = a << np.uint64(32) | a >> np.uint64(32)
    c += d
    d = (d << np.uint64(16) | d >> np.uint64(48)) ^ c
    a += d
    d = (d << np.uint64(21) | d >> np.uint64(43)) ^ a
    c += b
    b = (b << np.uint64(17) | b >> np.uint64(47)) ^ c
    c = c << np.uint64(32) | c >> np.uint64(32)
    return a, b, c, d


@compiled_lean
def sip_hash(low, high, first, second):  # type: ignore[no-untyped-def]
    """SipHash-2-4 of the 16 bytes (first, second) under the key (low, high), all uint64."""
    a, b = low ^ np.uint64(0x736F6D6570736575), high ^ np.uint64(0x646F72616E646F6D)
    c, d = low ^ np.uint64(0x6C7967656E657261), high ^ np.uint64(0x7465646279746573)
    for word in (first, second, np.uint64(16 << 56)):
        d ^= word
        for _ in range(2):
            a, b, c, d = sip_round(a, b, c, d)
        a ^= word
    c ^= np.uint64(0xFF)
    for _ in range(4):
        a, b, c, d = sip_round(a, b, c, d)
    return a ^ b ^ c ^ d


@compiled_lean
def _hide(keys, low, high):  # type: ignore[no-untyped-def]
    """Replace the keys int64 [N, orders] by their hashes, 63 bits; the order counts."""
    for i in range(keys.shape[0]):
        for order in range(keys.shape[1]):
            keys[i, order] = np.int64(sip_hash(low, high, np.uint64(keys[i, order]), np.uint64(order)) >> np.uint64(1))
