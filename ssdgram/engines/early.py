"""Early prefetch: the bundles of prompts that an engine has seen and not scheduled yet, in the background class.

    offer(request, tokens)     a prompt came             advance(request, position)    that much of it is scheduled
    drop(request)              it left                    pump()                        once a step: begin what the budget allows

Chunks of waiting prompts are warmed oldest prompt first, at most `budget` tokens at a time, so a long queue neither floods the
drive nor turns the cache over. A warming holds no slots: nothing here can make a step wait for memory. Invariant: a prompt's
chunk is begun at most once, and never for positions that are scheduled or were computed before.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from ssdgram.errors import SSDGramError
from ssdgram.sequence import Sequence

if TYPE_CHECKING:
    from ssdgram._warming import Warming
    from ssdgram.store import Store

log = logging.getLogger("ssdgram")
CHUNK = 512                                                  # tokens of one warming


class _Waiting:
    """A prompt: its ids, which of them take part, the first position that is not begun."""

    __slots__ = ("ids", "part", "position")

    def __init__(self, ids: np.ndarray, part: np.ndarray | None, position: int) -> None:
        self.ids, self.part, self.position = ids, part, position


class EarlyPrefetch:
    """One per process. `budget`: tokens under way at a time; 0 turns it off. `image`, `images_from`: as in Windows."""

    def __init__(self, store: Store, budget: int, *, image: int = -1, images_from: int = 0) -> None:
        self._store, self.budget, self._image, self._images_from = store, budget, image, images_from
        self._waiting: dict[Hashable, _Waiting] = {}         # in the order of arrival
        self._flights: dict[Hashable, list[Warming]] = {}
        self.tokens = 0                                      # begun so far

    def __len__(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    def offer(self, request: Hashable, tokens: Any, position: int = 0) -> None:
        """A prompt: integers; positions below `position` need no rows (they were computed before). Bad ids are left to the step."""
        if self.budget <= 0 or position >= len(tokens):
            return
        ids = np.asarray(tokens, np.int64)
        part = (ids != self._image) & (ids >= 0) & (ids < (self._images_from or self._store._vocabulary))
        part &= ids < self._store._vocabulary
        self._waiting[request] = _Waiting(ids, None if part.all() else part, position)

    def advance(self, request: Hashable, position: int) -> None:
        """Positions below this one are in a step."""
        waiting = self._waiting.get(request)
        if waiting is not None:
            waiting.position = max(waiting.position, position)
            if waiting.position >= len(waiting.ids):
                del self._waiting[request]

    def drop(self, request: Hashable) -> None:
        """The request is gone (finished, cancelled, preempted): what was not read for it is not read."""
        self._waiting.pop(request, None)
        for flight in self._flights.pop(request, ()):
            flight.cancel()

    def requests(self) -> list[Hashable]:
        """Prompts of which something waits."""
        return list(self._waiting)

    def pump(self) -> None:
        """Begin as much as the budget allows. Never blocks, never raises for what a read comes to: the step's own read says so."""
        if not self._waiting:
            return
        room = self.budget - self._under_way()
        for request, waiting in list(self._waiting.items()):
            while room > 0 and waiting.position < len(waiting.ids):
                stop = min(len(waiting.ids), waiting.position + min(CHUNK, room))
                try:
                    flight = self._store.warm(self._chunk(waiting, stop))
                except SSDGramError as error:                # busy, or replaced: the steps will say so where it matters
                    log.debug("early prefetch pauses: %s", error)
                    return
                if flight is not None:
                    self._flights.setdefault(request, []).append(flight)
                self.tokens += stop - waiting.position
                room -= stop - waiting.position
                waiting.position = stop
            if waiting.position >= len(waiting.ids):
                del self._waiting[request]
            if room <= 0:
                return

    def _chunk(self, waiting: _Waiting, stop: int) -> Sequence:
        start = waiting.position
        lookback = max(0, start - (self._store.geometry.max_ngram - 1))
        part = waiting.part
        return Sequence(waiting.ids[start:stop], None if part is None else part[start:stop], waiting.ids[lookback:start],
                        None if part is None else part[lookback:start])

    def _under_way(self) -> int:
        """Tokens of warmings that are not done; those that are, are forgotten."""
        total = 0
        for request in list(self._flights):
            flights = [flight for flight in self._flights[request] if not flight.done]
            total += sum(flight.positions for flight in flights)
            if flights:
                self._flights[request] = flights
            else:
                del self._flights[request]
        return total
