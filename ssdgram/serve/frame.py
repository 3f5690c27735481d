"""A Frame of an attached store: as Frame, but its gathers count in the share, where the server sees them.

The server gives a loaded batch's slots back only after the replay has stored the frame's number. A frame's line of words is its
own for as long as the store is attached, because a launch may come late. It knows nothing of sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ssdgram.frame import Frame

if TYPE_CHECKING:
    from ssdgram.batch import Batch
    from ssdgram.serve.client import AttachedStore


class AttachedFrame(Frame):
    """Made by `AttachedStore.frame`."""

    def __init__(self, store: AttachedStore, tokens: int) -> None:
        super().__init__(store, tokens)
        self._words_array = store._frame_words()
        self._words = torch.from_numpy(self._words_array)

    def load_now(self, batch: Batch) -> bool:
        """Never: what tells whether a batch is ready is the server's."""
        return False
