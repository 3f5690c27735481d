"""A Warming: what `Store.warm` began, to ask after and to stop. It holds no slots and needs no release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdgram import _plan_state as p

if TYPE_CHECKING:
    from ssdgram.store import Store


class Warming:
    """Returned by `Store.warm`; may be dropped at any time. `positions`: how many tokens it is about."""

    __slots__ = ("_row", "_store", "positions", "ticket")

    def __init__(self, store: Store, row: int, ticket: int, positions: int) -> None:
        self._store, self._row, self.ticket, self.positions = store, row, ticket, positions

    @property
    def done(self) -> bool:
        """Whether all of it is in the cache (or was given up); never blocks. A closed store's is."""
        store = self._store
        if not store._usable() or int(store._plan.batches["ticket"][self._row]) != self.ticket:
            return True
        return bool(store._plan.words[self._row * store._line + p.W_STAGE] == p.FREE_BATCH)

    def cancel(self) -> None:
        """What is not planned yet is not read. Idempotent."""
        with self._store._lock:                              # a row is used anew under this lock only
            if not self.done:
                self._store._push_release(self._row)
