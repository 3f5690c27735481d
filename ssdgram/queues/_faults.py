"""The deterministic fault injector of the queues: reads that fail, come back short, flipped, or not at all.

A reader shows every read that it completed to `spoil`, which with `state.faults` all zero is one load. FAULT_AFTER counts
down with each read of the chosen file, below zero too; the reads numbered 0 .. FAULT_TIMES - 1 after it are spoiled (all,
if FAULT_TIMES is negative). Who sets it stores FAULT_TIMES last. It knows nothing of retries: those reads count as well.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, atomic_add, atomic_load, compiled, copy_bytes, load_u8
from ssdgram._state import (FAULT_AFTER, FAULT_FILE, FAULT_FLIP, FAULT_RESULT, FAULT_STALL, FAULT_TIMES, P_CODE_BYTES,
                            P_SCALE_BYTES)
from ssdgram.queues._lean import inlined


@inlined
@compiled
def spoil(state, index, result, page):  # type: ignore[no-untyped-def]
    """What the read of page record `index` into address `page` is to have returned instead of `result`.

    FAULT_STALL: the caller holds the read, as if not completed, until `stalled` is no longer true.
    """
    faults = state.faults
    times = atomic_load(faults, FAULT_TIMES)
    if times == 0:
        return result
    if faults[FAULT_FILE] >= 0 and faults[FAULT_FILE] != state.pages[index].file:
        return result
    turn = -atomic_add(faults, FAULT_AFTER, -1)
    if turn < 0 or (times > 0 and turn >= times):
        return result
    if faults[FAULT_RESULT] != FAULT_FLIP:
        return faults[FAULT_RESULT]
    flip(state, index, page)
    return result


@inlined
@compiled
def flip(state, index, page):  # type: ignore[no-untyped-def]
    """Flip the lowest bit of the first byte of the first wanted row (of the page, if no row is wanted)."""
    target = state.pages[index].target
    if target >= 0:
        page += np.int64(state.targets[target].place) * (state.params[P_CODE_BYTES] + state.params[P_SCALE_BYTES])
    byte = np.empty(1, np.uint8)
    byte[0] = load_u8(page) ^ np.uint8(1)
    copy_bytes(page, address_of(byte, 0), 1)


@inlined
@compiled
def stalled(state):  # type: ignore[no-untyped-def]
    """Whether reads that came back as FAULT_STALL are still to be held."""
    return state.faults[FAULT_RESULT] == FAULT_STALL and atomic_load(state.faults, FAULT_TIMES) != 0
