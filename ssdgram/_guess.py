"""From keys to slots by guess, with every cache line asked for well before it is looked at.

    key FAR positions ahead ─► its set asked for (2 lines) ─► NEAR ahead: fingerprints compared, the record of the guess asked for
                                                               (1 line, which is written anyway) ─► its turn: `holds`, is it the bundle's?

A hit is known by its slot's own record, so the directory's x are looked at only where the guess was wrong or there was none. A line
comes from memory in the time of some ten bundles' work, and a core waits for few at once: so they are asked for one by one, between
work. Run by planner and crew. It changes nothing but scratch. The invariant: an entry of the directory and its slot's record name
the same bundle, so a record that `holds` the key is what a probe would have found.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, compiled_inner, prefetch
from ssdgram._plan_state import ABSENT, IN_DIRECTORY, NOT_SERVED, PP_RANK, PP_WORLD
from ssdgram.cache.directory import WAYS, guess, mix, prefetch_tags, set_of_mixed
from ssdgram.cache.sketch import prefetch_sketch
from ssdgram.queues._lean import inlined

BLOCK = 4                                                    # positions


@compiled_inner
def ask_for_sets(plan, begin, end):  # type: ignore[no-untyped-def]
    """Ask for the sets of keys [begin, end), the first of which is of group 0. found: their mixed hashes; entries: set * WAYS."""
    groups, sets, g = plan.groups.shape[0], plan.directory.shape[0], 0
    for k in range(begin, end):
        h = mix(plan.keys[k], plan.groups[g].number)
        s = set_of_mixed(h, sets)
        prefetch_tags(plan.directory, s)
        plan.found[k] = np.int64(h)
        plan.entries[k] = s * WAYS
        g = g + 1 if g + 1 < groups else 0


@compiled_inner
def guess_slots(plan, begin, end):  # type: ignore[no-untyped-def]
    """found: the slot that each key may have, its record asked for, or ABSENT or NOT_SERVED; entries: set * WAYS + way."""
    groups, world, rank, g = plan.groups.shape[0], plan.params[PP_WORLD], plan.params[PP_RANK], 0
    for k in range(begin, end):
        h, s = np.uint64(plan.found[k]), plan.entries[k] // WAYS
        slot = np.int64(NOT_SERVED)
        if plan.groups[g].heads > 0 and (world == 1 or np.int64(h % np.uint64(world)) == rank):
            way = guess(plan.directory, s, h)
            if way >= 0:
                slot = np.int64(plan.directory[s].slot[way])     # -1 = ABSENT for a way that is empty
                prefetch(address_of(plan.slots, max(slot, 0)))
                plan.entries[k] += way
            else:
                slot = np.int64(ABSENT)
                prefetch_sketch(plan.sketch, s)
        plan.found[k] = slot
        g = g + 1 if g + 1 < groups else 0


@compiled_inner
def look_ahead(plan, first, stop):  # type: ignore[no-untyped-def]
    """What `look_on` takes for granted when it begins with key `first`; all end before key `stop`."""
    size = BLOCK * plan.groups.shape[0]
    ask_for_sets(plan, first, min(first + 2 * size, stop))
    guess_slots(plan, first, min(first + size, stop))


@compiled_inner
def look_on(plan, first, stop):  # type: ignore[no-untyped-def]
    """It is the turn of the block that begins with key `first`: look after the two blocks behind it."""
    size = BLOCK * plan.groups.shape[0]
    ask_for_sets(plan, first + 2 * size, min(first + 3 * size, stop))
    guess_slots(plan, first + size, min(first + 2 * size, stop))


@inlined
@compiled_inner
def holds(plan, slot, x, group):  # type: ignore[no-untyped-def]
    """Whether a slot (>= 0) is that of the bundle (x, group) and has its entry: not after this very block pushed it out."""
    slots = plan.slots
    return slots[slot].x == x and slots[slot].group == group and slots[slot].where == IN_DIRECTORY
