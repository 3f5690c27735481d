"""Looking up: a batch's next tokens to keys, keys to slots; a bundle that nobody has gets a slot, still empty.

    tokens ─► keys ─► slots guessed (_guess.py) ─► READY, and the bundle's: a hit ──────┐
                                               └─► else probed for, or a slot taken ──┴─► counted once a batch ─► plan

Many tokens are looked up by the crew side by side (_crew.py); what it leaves is settled here. Knows nothing of pages: it may only
hurry reads that are queued already. The invariant: each distinct slot of a plan is in the batch's `held` list once and counted
once in its `refs`, so that unwinding gives back what was taken; a slice left half done (LOOK_ON) goes on behind the keys that are
settled. Part of the planner's compiled loop.
"""

from __future__ import annotations

import numpy as np

from ssdgram._batches import end_of_window
from ssdgram._compiled import compiled_inner, view_i32, view_u8
from ssdgram._crew import chunk_words, chunks_of_job, cut_chunks, learn, run_job
from ssdgram._guess import BLOCK, holds, look_ahead, look_on
from ssdgram._hbm_tier import consider_copy, want_copy
from ssdgram._pages import promote
from ssdgram._plan_state import (ABSENT, COPIES, C_COPYING, C_IDLE, C_OVERFLOW, C_WANTED, K_COUNT, K_FIRST, K_HELD, K_HOT, K_IDLE,
                                 K_LEFT, K_STOP, NOT_SERVED, NO_COPY, PP_FILL, PP_LAYERS, PP_ORDERS, PP_RULE, SLICE,
                                 SLOT_READING, SLOT_READY, S_HBM_HITS, S_HITS, S_JOINS, S_MISSES, S_REPEATS, S_TOKENS)
from ssdgram._slots import LOOK_ON, NO_SLOT, overflow_find, take
from ssdgram._state import BACKGROUND, STEP
from ssdgram.cache.directory import WAYS, probe, set_of
from ssdgram.cache.policy import touch
from ssdgram.kernels.hash import OUTPUT, ngram_keys
from ssdgram.queues._lean import inlined

PLANNED = 0                                                  # beside NO_SLOT and LOOK_ON
MOST_FLAT = 16 * SLICE                                       # flat tokens of a slice


@compiled_inner
def find_slot(plan, set_index, x, group):  # type: ignore[no-untyped-def]
    """Slot of the bundle, or -1; a hit in the directory is made known to the policy."""
    way = probe(plan.directory, set_index, x, group)
    if way >= 0:
        touch(plan.directory, plan.sketch, set_index, way)
        return np.int64(plan.directory[set_index].slot[way])
    if plan.control[C_OVERFLOW] > 0:
        return np.int64(overflow_find(plan.overflow, x, group))
    return np.int64(-1)


@compiled_inner
def slot_for(plan, b, set_index, x, group, order):  # type: ignore[no-untyped-def]
    """The bundle's slot wherever it is found, or a new one for a bundle that is absent; or NO_SLOT, LOOK_ON."""
    slot = find_slot(plan, set_index, x, group)
    if slot >= 0:
        return slot
    slot = take(plan.control, plan.stats, plan.directory, plan.sketch, plan.slots, plan.hbm, plan.overflow, set_index, x, group,
                plan.batches[b].priority)
    if slot >= 0:
        plan.batches[b].misses += 1
        plan.stats[S_MISSES + order] += 1
    return slot


@inlined
@compiled_inner
def count_in(plan, b, slot, layer, order, held):  # type: ignore[no-untyped-def]
    """Count the batch among the users of the slot, and list the slot, unless that was done. Whether it was not."""
    slots, batches = plan.slots, plan.batches
    if slots[slot].ticket == batches[b].ticket:
        plan.stats[S_REPEATS + order] += 1
        return False
    slots[slot].ticket = batches[b].ticket
    if slots[slot].refs == 0 and slots[slot].status == SLOT_READY:
        plan.control[C_IDLE] -= 1
    slots[slot].refs += 1
    line = b * plan.params[PP_LAYERS] + layer
    held[layer * batches[b].positions * plan.params[PP_ORDERS] + plan.layers[line].held] = slot
    plan.layers[line].held += 1
    batches[b].need += 1
    return True


@inlined
@compiled_inner
def where_rows_lie(plan, slot):  # type: ignore[no-untyped-def]
    """What stands in the plan for a slot: itself, or its copy in HBM if that was made."""
    copy = np.int64(plan.slots[slot].hbm)
    if copy >= 0 and plan.hbm[plan.slots[slot].hbm].ready != 0:
        return -2 - copy
    return np.int64(slot)


@inlined
@compiled_inner
def hold_ready(plan, b, slot, layer, order, held):  # type: ignore[no-untyped-def]
    """Hold a READY slot: a hit."""
    if count_in(plan, b, slot, layer, order, held):
        plan.stats[S_HITS + order] += 1
        if plan.hbm.shape[0] > 0:
            consider_copy(plan, slot, order)


@compiled_inner
def hold(plan, state, b, slot, layer, order, held):  # type: ignore[no-untyped-def]
    """Hold a slot whatever its state. Joining a read of the other class may speed it up."""
    slots, status = plan.slots, plan.slots[slot].status
    if status == SLOT_READY:
        hold_ready(plan, b, slot, layer, order, held)
    elif count_in(plan, b, slot, layer, order, held):
        plan.layers[b * plan.params[PP_LAYERS] + layer].unready += 1
        if slots[slot].refs > 1:                             # another batch has it, read or about to be
            plan.batches[b].joined += 1
            plan.stats[S_JOINS + order] += 1
            if status == SLOT_READING and plan.batches[b].priority == STEP and slots[slot].priority == BACKGROUND:
                promote(plan, state, slot)


@compiled_inner
def settle_key(plan, state, b, t, g, x, served, set_index, out, held):  # type: ignore[no-untyped-def]
    """Give key x of position t and group g its slot. PLANNED, NO_SLOT or LOOK_ON."""
    group, rows = plan.groups[g], np.int64(-1)
    if served:
        slot = slot_for(plan, b, set_index, x, group.number, group.order)
        if slot < 0:
            return slot
        hold(plan, state, b, slot, group.layer, group.order, held)
        rows = where_rows_lie(plan, slot)
    out[(group.layer * plan.batches[b].positions + t) * plan.params[PP_ORDERS] + group.order] = rows
    return PLANNED


@compiled_inner
def settle_slice(plan, state, b, count, out, held):  # type: ignore[no-untyped-def]
    """Give the keys of the slice's `count` positions their slots, in `out`, and count the batch among their users. PLANNED, NO_SLOT
    or LOOK_ON."""
    groups, positions, orders = plan.groups.shape[0], plan.batches[b].positions, plan.params[PP_ORDERS]
    first, stop = plan.batches[b].settled // groups, count * groups
    begun = plan.batches[b].settled - first * groups
    look_ahead(plan, first * groups, stop)
    for position in range(first, count):
        t = plan.batches[b].planned + position
        if (position - first) % BLOCK == 0:
            look_on(plan, position * groups, stop)
        for g in range(groups):
            k = position * groups + g
            if g < begun:
                continue
            x, slot, group = plan.keys[k], plan.found[k], plan.groups[g]
            if slot >= 0 and plan.slots[slot].status == SLOT_READY and holds(plan, slot, x, group.number):
                touch(plan.directory, plan.sketch, plan.entries[k] // WAYS, plan.entries[k] % WAYS)
                hold_ready(plan, b, slot, group.layer, group.order, held)
                out[(group.layer * positions + t) * orders + group.order] = where_rows_lie(plan, slot)
            else:
                outcome = settle_key(plan, state, b, t, g, x, slot != NOT_SERVED, plan.entries[k] // WAYS, out, held)
                if outcome != PLANNED:
                    plan.batches[b].settled = k
                    return outcome
        begun = 0
    return PLANNED


@compiled_inner
def end_of_slice(flags, start, stop):  # type: ignore[no-untyped-def]
    """Flat token, at most `stop`, behind SLICE positions: the tokens between, which are looked back at, cost next to nothing."""
    count, end = 0, min(stop, start + MOST_FLAT)
    for flat in range(start, end):
        count += (flags[flat] & OUTPUT) != 0
        if count == SLICE:
            return flat + 1
    return end


@compiled_inner
def plan_slice(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan the next SLICE positions of the batch. PLANNED; NO_SLOT: the batch must give back what it holds; LOOK_ON: the slice is
    half done, to be gone on with."""
    batch, groups, orders = plan.batches[b], plan.groups.shape[0], plan.params[PP_ORDERS]
    tokens, flags = view_i32(batch.tokens, batch.flat), view_u8(batch.flags, batch.flat)
    layers = plan.params[PP_LAYERS]
    out = view_i32(batch.slots, layers * batch.positions * orders)
    held = view_i32(batch.held, layers * batch.positions * orders)
    stop = end_of_slice(flags, batch.cursor, end_of_window(plan, b))
    count = ngram_keys(tokens, flags, batch.cursor, stop, plan.token_map, plan.multipliers, plan.params[PP_RULE],
                       plan.params[PP_FILL], plan.keys[: SLICE * groups].reshape(SLICE, layers, orders))
    outcome = settle_slice(plan, state, b, count, out, held)
    if outcome != PLANNED:
        return outcome
    batch.probes += count * groups
    batch.cursor = stop
    batch.planned += count
    batch.settled = 0
    plan.stats[S_TOKENS] += count
    return PLANNED


@compiled_inner
def plan_job(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan the next chunks of the batch with the crew. PLANNED, or NO_SLOT: the batch must give back what it holds."""
    count = cut_chunks(plan, b, end_of_window(plan, b), chunks_of_job(plan, b))
    run_job(plan, b, count)
    left = 0
    for k in range(count):
        left += take_over(plan, b, k)
    learn(plan, b, count, left)
    for k in range(count):
        if plan.chunks[k * chunk_words(plan) + K_LEFT] > 0 and settle_rest(plan, state, b, k) != PLANNED:
            return NO_SLOT
    return PLANNED


@compiled_inner
def take_over(plan, b, k):  # type: ignore[no-untyped-def]
    """Add chunk k to the batch: its lists of slots behind those of the chunks before, its counts. How many keys it left."""
    batch, layers, orders, words = plan.batches[b], plan.params[PP_LAYERS], plan.params[PP_ORDERS], k * chunk_words(plan)
    chunks, counts = plan.chunks, words + K_HELD + layers
    held = view_i32(batch.held, layers * batch.positions * orders)
    for layer in range(layers):
        mine = plan.layers[b * layers + layer]
        start = (layer * batch.positions + chunks[words + K_FIRST]) * orders
        end = layer * batch.positions * orders + mine.held
        for i in range(chunks[words + K_HELD + layer]):
            held[end + i] = held[start + i]
        mine.held += chunks[words + K_HELD + layer]
        batch.need += chunks[words + K_HELD + layer]
    for order in range(orders):
        plan.stats[S_HITS + order] += chunks[counts + order]
        plan.stats[S_REPEATS + order] += chunks[counts + orders + order]
        plan.stats[S_HBM_HITS + order] += chunks[counts + 2 * orders + order]
    plan.control[C_IDLE] -= chunks[words + K_IDLE]
    hot = chunks[words + K_HOT]
    if hot >= 0 and plan.slots[hot].hbm == NO_COPY and plan.control[C_WANTED] < COPIES and plan.control[C_COPYING] == 0:
        want_copy(plan, hot)
    batch.cursor = chunks[words + K_STOP]
    batch.planned += chunks[words + K_COUNT]
    batch.probes += chunks[words + K_COUNT] * plan.groups.shape[0]
    plan.stats[S_TOKENS] += chunks[words + K_COUNT]
    return chunks[words + K_LEFT]


@compiled_inner
def settle_rest(plan, state, b, k):  # type: ignore[no-untyped-def]
    """Give slots to the keys of chunk k that the crew left. PLANNED or NO_SLOT: `crew_helps` saw to it that none is far to find."""
    batch, groups, words = plan.batches[b], plan.groups.shape[0], k * chunk_words(plan)
    room = plan.params[PP_LAYERS] * batch.positions * plan.params[PP_ORDERS]
    out, held = view_i32(batch.slots, room), view_i32(batch.held, room)
    base, sets = k * SLICE * groups, plan.directory.shape[0]
    for j in range(plan.chunks[words + K_COUNT] * groups):
        if plan.found[base + j] == ABSENT:
            x, g = plan.keys[base + j], j % groups
            set_index, t = set_of(x, plan.groups[g].number, sets), plan.chunks[words + K_FIRST] + j // groups
            outcome = LOOK_ON
            while outcome == LOOK_ON:
                outcome = settle_key(plan, state, b, t, g, x, True, set_index, out, held)
            if outcome != PLANNED:
                return NO_SLOT
    return PLANNED
