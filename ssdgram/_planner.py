"""The planner: one long compiled loop that turns batches of tokens into slots, without the GIL.

    requests ─► queues (step, background) ─► plan a slice ─► page reads ─► rings ─► readers
                                                                            done ─► slots ─► layers published ─► waiters woken

Every piece of work is a slice of about 100 us at most, step batches first, so that a decode step waits for one slice of a
prefill and not for the prefill. Idle it spins a moment, then sleeps on a futex. The invariant: this thread alone writes what
_plan_state.py describes; others see a batch through its words (release/acquire) and its slots array once the stage says so.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import (address_of, atomic_add, atomic_cas, atomic_exchange, atomic_load, atomic_load_at, atomic_store,
                               compiled_inner, compiled_lean, fence, futex_wait, futex_wake, now_ns, prefetch, view_i32, view_u8)
from ssdgram._crew import chunk_words, chunks_of_job, crew_helps, cut_chunks, learn, run_job
from ssdgram._kept import PLAN_AT, plan_at, state_at
from ssdgram._pages import expand_bundle, promote, push_pages, settle_page
from ssdgram._plan_state import (ABSENT, AWAITING, BAD_TOKEN, BLOCK, COPIES, C_ACTIVE, C_BUILDING, C_COPIES, C_COPYING, C_COPY_REQUESTED,
                                 C_GIVEN, C_HBM_FREE, C_HBM_HAND, C_IDLE, C_LONG_SLEEP, C_OVERFLOW, C_PAGES, C_PUSH, C_QUEUES,
                                 C_REQUEST_HEAD, C_REQUEST_TAIL, C_STATE, C_TAKEN_NS, C_TICKS, C_WANTED, DEGRADED, DONE, EXPANDING,
                                 FREE_BATCH, K_COUNT, K_FIRST, K_HELD, K_HOT, K_IDLE, K_LEFT, K_STOP, LAYER_FAILED, LAYER_READY,
                                 NOT_SERVED, NOWHERE, NO_COPY, NO_ERROR, PLANNING, PP_BATCH_LINE, PP_DEGRADED_NS, PP_FILL, PP_HOT,
                                 PP_LAYERS, PP_ORDERS, PP_RANK, PP_REQUESTS, PP_RULE, PP_SLOTS, PP_SPIN_NS, PP_VOCABULARY, PP_WORLD,
                                 QUEUED, SERVING, SLICE, SLOT_FAILED, SLOT_READING, SLOT_READY, SLOT_RESERVED, SUBMIT, SUBMITTED, S_BATCHES,
                                 S_BUSY_NS, S_CANCELLED, S_COPIED, S_DEGRADED, S_DROPPED, S_ENGINE_US, S_HBM_HITS, S_HITS, S_JOINS,
                                 S_LONGEST_NS, S_LOOPS, S_MISSES, S_PROMOTED, S_REPEATS, S_SLEEPS, S_STARVED, S_TOKENS, TOO_LARGE,
                                 UNWINDING, WAITING, WANTS_COPY, W_ERROR, W_LAYER, W_SEQUENCE, W_SLEEPERS, W_STAGE, W_STARVED)
from ssdgram._slots import drop_copy, drop_reference, overflow_find, take
from ssdgram._state import (ASLEEP, AWAKE, BACKGROUND, BORROWED, COPIER_WORD, PLANNER_ASLEEP, PLANNER_WORD, P_DONE_CAPACITY, P_READERS,
                            READER_LINES, READER_WORDS, R_DONE_HEAD, R_DONE_TAIL, R_OLDEST_NS, STEP, STOP)
from ssdgram.cache.directory import mix, prefetch_entry, prefetch_tags, probe, set_of
from ssdgram.cache.policy import frequency, standing, touch
from ssdgram.cache.sketch import prefetch_sketch
from ssdgram.kernels.hash import check_tokens, ngram_keys
from ssdgram.queues._handoff import wake_planner, wake_readers

EXPAND_SLICE = 64                                            # bundles whose page reads are made without looking up
SETTLE_SLICE = 256                                           # page records settled without looking up
EXPAND_SCAN = 16384                                          # list entries looked at for them
PUSH_SLICE = 2048
UNWIND_SLICE = 4096
AHEAD = 16                                                   # slots asked for ahead of the one in hand
NAP_NS = 50_000_000                                          # longest sleep while reads are under way: the drive's age is looked at
POLL_NS = 100_000                                            # longest sleep while GPU words are awaited
TICK_NS = 2_000_000                                          # longest sleep in busy times, which last ...
BUSY_NS = 1_000_000_000                                      # ... so long after the last request
BORROW_NS = 200_000                                          # how long a caller plans for himself
BORROWED_NAP_NS = 50_000                                     # between looks whether he has done

HBM_PROBES = 16                                              # slots of the HBM tier looked at for one that may be dropped

BLOCKED, MORE, LAYER_DONE, ALL_DONE = range(4)
UNMARKED, COUNTED = -1, -2                                   # in a slot's ticket word: no batch's
TRY_AGAIN = -(1 << 62)                                       # in BATCH.given: whether or not anything is given back


# ---------------------------------------------------------------- batches: queues, stages, words


@compiled_inner
def set_stage(plan, b, stage):  # type: ignore[no-untyped-def]
    """Publish a batch's stage."""
    atomic_store(plan.words, b * plan.params[PP_BATCH_LINE] + W_STAGE, np.int32(stage))


@compiled_inner
def stage_of(plan, b):  # type: ignore[no-untyped-def]
    """A batch's stage."""
    return plan.words[b * plan.params[PP_BATCH_LINE] + W_STAGE]


@compiled_inner
def ring_bell(plan, b):  # type: ignore[no-untyped-def]
    """Something about batch b changed: wake those who wait for it."""
    line = b * plan.params[PP_BATCH_LINE]
    atomic_store(plan.words, line + W_SEQUENCE, np.int32(plan.words[line + W_SEQUENCE] + 1))
    fence()
    if atomic_load(plan.words, line + W_SLEEPERS) > 0:
        futex_wake(plan.words, line + W_SEQUENCE, 1 << 30)


@compiled_inner
def enqueue(plan, b):  # type: ignore[no-untyped-def]
    """Append the batch to the queue of its class."""
    queue = C_QUEUES + 2 * plan.batches[b].priority
    plan.batches[b].queue_next = -1
    if plan.control[queue] < 0:
        plan.control[queue] = b
    else:
        plan.batches[plan.control[queue + 1]].queue_next = b
    plan.control[queue + 1] = b
    set_stage(plan, b, QUEUED)


@compiled_inner
def dequeue(plan, b):  # type: ignore[no-untyped-def]
    """Take the batch out of the queue of its class, wherever it stands in it."""
    queue = C_QUEUES + 2 * plan.batches[b].priority
    following = plan.batches[b].queue_next
    if plan.control[queue] == b:
        plan.control[queue] = following
        return
    before = plan.control[queue]
    while plan.batches[before].queue_next != b:
        before = plan.batches[before].queue_next
    plan.batches[before].queue_next = following
    if following < 0:
        plan.control[queue + 1] = before


@compiled_inner
def in_queue(stage):  # type: ignore[no-untyped-def]
    """Whether a batch of this stage stands in the queue of its class."""
    return stage == QUEUED or stage == PLANNING or stage == EXPANDING


@compiled_inner
def reset_plan(plan, b, cursor):  # type: ignore[no-untyped-def]
    """The batch holds nothing; its plan begins (again) at flat token `cursor`."""
    layers = plan.params[PP_LAYERS]
    plan.batches[b].cursor = cursor
    plan.batches[b].start = cursor
    plan.batches[b].planned = 0
    plan.batches[b].layer = 0
    plan.batches[b].expand = 0
    plan.batches[b].need = 0
    plan.batches[b].chunks = 0
    for layer in range(layers):
        plan.layers[b * layers + layer].held = 0
        plan.layers[b * layers + layer].unready = 0
        plan.layers[b * layers + layer].cursor = 0
        plan.layers[b * layers + layer].failed_slot = -1


@compiled_inner
def take_requests(plan):  # type: ignore[no-untyped-def]
    """New batches into their queues, releases into unwinding. How many."""
    control, mask = plan.control, plan.params[PP_REQUESTS] - 1
    head, tail = control[C_REQUEST_HEAD], atomic_load(control, C_REQUEST_TAIL)
    count = 0
    while head < tail and count < 64:
        request = np.int64(plan.requests[head & mask])
        head += 1
        count += 1
        b = request >> 1
        if (request & 1) == SUBMIT:
            plan.active[control[C_ACTIVE]] = b
            control[C_ACTIVE] += 1
            plan.stats[S_BATCHES] += 1
            reset_plan(plan, b, 0)
            set_stage(plan, b, AWAITING)
            admit_tokens(plan, b)
        else:
            release(plan, b)
    atomic_store(control, C_REQUEST_HEAD, head)
    if count > 0:
        control[C_TAKEN_NS] = now_ns()
    return count


@compiled_inner
def tokens_arrived(plan, b):  # type: ignore[no-untyped-def]
    """Whether the batch's tokens are in its memory (those from a GPU come later)."""
    return plan.batches[b].flag == 0 or atomic_load_at(plan.batches[b].flag) == plan.batches[b].ticket


@compiled_inner
def admit_tokens(plan, b):  # type: ignore[no-untyped-def]
    """Queue an AWAITING batch if its tokens are there and are tokens. Whether it left AWAITING."""
    batch = plan.batches[b]
    if not tokens_arrived(plan, b):
        return False
    if batch.flag != 0:
        bad = check_tokens(view_i32(batch.tokens, batch.flat), view_u8(batch.flags, batch.flat), plan.params[PP_VOCABULARY])
        if bad >= 0:
            batch.bad_token = bad
            atomic_store(plan.words, b * plan.params[PP_BATCH_LINE] + W_ERROR, np.int32(BAD_TOKEN))
            set_stage(plan, b, DONE)
            ring_bell(plan, b)
            return True
    enqueue(plan, b)
    return True


@compiled_inner
def release(plan, b):  # type: ignore[no-untyped-def]
    """Nobody wants the batch any more: leave its queue and unwind. A second release changes nothing."""
    stage = stage_of(plan, b)
    if plan.batches[b].released != 0 or stage == FREE_BATCH or stage == SUBMITTED:       # SUBMITTED: it was the row's last batch's
        return
    plan.batches[b].released = 1
    if stage < DONE:
        plan.stats[S_CANCELLED] += 1
    if in_queue(stage) or (stage == UNWINDING and plan.words[b * plan.params[PP_BATCH_LINE] + W_STARVED] != 0):
        dequeue(plan, b)
    if stage == EXPANDING:
        plan.control[C_PUSH + plan.batches[b].priority] = 1  # what it built must be read: another batch may have joined it
    if stage != UNWINDING:
        unwind_from_start(plan, b)


@compiled_inner
def unwind_from_start(plan, b):  # type: ignore[no-untyped-def]
    """Begin to drop the batch's references."""
    plan.batches[b].layer = 0
    plan.batches[b].expand = 0
    set_stage(plan, b, UNWINDING)


# ---------------------------------------------------------------- planning


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
def look_up_block(plan, first, count):  # type: ignore[no-untyped-def]
    """Ask for the sets of `count` positions' keys, then probe them: slot, ABSENT or NOT_SERVED into `found`."""
    groups = plan.groups.shape[0]
    sets, world, rank = plan.directory.shape[0], plan.params[PP_WORLD], plan.params[PP_RANK]
    k = 0
    for _ in range(count):
        for g in range(groups):
            plan.sets[k] = set_of(plan.keys[first * groups + k], plan.groups[g].number, sets)
            prefetch_tags(plan.directory, plan.sets[k])
            k += 1
    k = 0
    for _ in range(count):
        for g in range(groups):
            prefetch_entry(plan.directory, plan.sets[k], plan.keys[first * groups + k], plan.groups[g].number)
            k += 1
    k = 0
    for _ in range(count):
        for g in range(groups):
            x, group = plan.keys[first * groups + k], plan.groups[g].number
            if plan.groups[g].heads > 0 and (world == 1 or np.int64(mix(x, group) % np.uint64(world)) == rank):
                slot = find_slot(plan, plan.sets[k], x, group)
                if slot >= 0:
                    prefetch(address_of(plan.slots, slot))
                else:
                    prefetch_sketch(plan.sketch, x, group)
                plan.found[k] = slot
            else:
                plan.found[k] = NOT_SERVED
            k += 1


@compiled_inner
def slot_for(plan, b, slot, set_index, x, group, order):  # type: ignore[no-untyped-def]
    """The slot that the look-up found (-1: none), or a new one for a bundle that is absent; -1: none to be had."""
    slots = plan.slots
    if slot >= 0 and (slots[slot].x != x or slots[slot].group != group or slots[slot].where == NOWHERE):
        slot = np.int64(-1)                                  # pushed out by this very block
    if slot < 0:
        slot = find_slot(plan, set_index, x, group)          # a neighbour in this block may have brought it
    if slot >= 0:
        return slot
    slot = take(plan.control, plan.stats, plan.directory, plan.sketch, slots, plan.hbm, plan.overflow, set_index, x, group,
                plan.batches[b].priority)
    if slot >= 0:
        plan.batches[b].misses += 1
        plan.stats[S_MISSES + order] += 1
    return slot


@compiled_inner
def consider_copy(plan, slot, order):  # type: ignore[no-untyped-def]
    """A hit of a store with an HBM tier: count it there, or note the bundle as wanted there if it is hot enough."""
    control, slots = plan.control, plan.slots
    if slots[slot].hbm >= 0:
        plan.stats[S_HBM_HITS + order] += 1
    elif slots[slot].hbm == NO_COPY and control[C_WANTED] < COPIES and control[C_COPYING] == 0:
        if frequency(plan.directory, plan.sketch, slots[slot].x, slots[slot].group) >= plan.params[PP_HOT]:
            want_copy(plan, slot)


@compiled_inner
def want_copy(plan, slot):  # type: ignore[no-untyped-def]
    """Note a bundle that a batch holds as wanted in HBM. There is room in the list, and it has no copy."""
    plan.slots[slot].hbm = WANTS_COPY
    plan.slots[slot].refs += 1                               # until the copy is made or given up
    plan.wants[plan.control[C_WANTED]] = slot
    plan.control[C_WANTED] += 1


@compiled_inner
def hold(plan, state, b, slot, layer, order, held):  # type: ignore[no-untyped-def]
    """Count the batch among the users of the slot, once, and list the slot. Joining a read of the other class may speed it up."""
    slots, batches = plan.slots, plan.batches
    if slots[slot].ticket == batches[b].ticket:
        plan.stats[S_REPEATS + order] += 1
        return
    slots[slot].ticket = batches[b].ticket
    if slots[slot].refs == 0 and slots[slot].status == SLOT_READY:
        plan.control[C_IDLE] -= 1
    slots[slot].refs += 1
    line = b * plan.params[PP_LAYERS] + layer
    held[layer * batches[b].positions * plan.params[PP_ORDERS] + plan.layers[line].held] = slot
    plan.layers[line].held += 1
    batches[b].need += 1
    status = slots[slot].status
    if status == SLOT_READY:
        plan.stats[S_HITS + order] += 1
        if plan.hbm.shape[0] > 0:
            consider_copy(plan, slot, order)
        return
    plan.layers[line].unready += 1
    if slots[slot].refs > 1:                                 # another batch has it, read or about to be
        batches[b].joined += 1
        plan.stats[S_JOINS + order] += 1
        if status == SLOT_READING and batches[b].priority == STEP and slots[slot].priority == BACKGROUND:
            promote(plan, state, slot)


@compiled_inner
def settle_block(plan, state, b, first, block, out, held):  # type: ignore[no-untyped-def]
    """Give each of the looked-up keys its slot, in `out`, and count the batch among its users. False: no slot to be had."""
    groups, k = plan.groups.shape[0], 0
    for t in range(plan.batches[b].planned + first, plan.batches[b].planned + first + block):
        for g in range(groups):
            if not settle_key(plan, state, b, t, g, plan.keys[first * groups + k], np.int64(plan.found[k]), plan.sets[k], out, held):
                return False
            k += 1
    return True


@compiled_inner
def settle_key(plan, state, b, t, g, x, found, set_index, out, held):  # type: ignore[no-untyped-def]
    """Give key x of position t and group g its slot. False: no slot to be had."""
    group, slot = plan.groups[g], np.int64(-1)
    if found != NOT_SERVED:
        slot = slot_for(plan, b, found, set_index, x, group.number, group.order)
        if slot < 0:
            return False
        hold(plan, state, b, slot, group.layer, group.order, held)
        if plan.slots[slot].hbm >= 0 and plan.hbm[plan.slots[slot].hbm].ready != 0:
            slot = -2 - np.int64(plan.slots[slot].hbm)
    out[(group.layer * plan.batches[b].positions + t) * plan.params[PP_ORDERS] + group.order] = slot
    return True


@compiled_inner
def end_of_window(plan, b):  # type: ignore[no-untyped-def]
    """Flat token at which the batch's plan ends, or its present window."""
    batch = plan.batches[b]
    return min(batch.flat, batch.start + batch.window) if batch.window > 0 else batch.flat


@compiled_inner
def plan_job(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan the next chunks of the batch with the crew. False: no slot was to be had, the batch must give back what it holds."""
    count = cut_chunks(plan, b, end_of_window(plan, b), chunks_of_job(plan, b))
    run_job(plan, b, count)
    left = 0
    for k in range(count):
        left += take_over(plan, b, k)
    learn(plan, b, count, left)
    for k in range(count):
        if plan.chunks[k * chunk_words(plan) + K_LEFT] > 0 and not settle_rest(plan, state, b, k):
            return False
    return True


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
    """Give slots to the keys of chunk k that the crew left. False: no slot to be had."""
    batch, groups, words = plan.batches[b], plan.groups.shape[0], k * chunk_words(plan)
    room = plan.params[PP_LAYERS] * batch.positions * plan.params[PP_ORDERS]
    out, held = view_i32(batch.slots, room), view_i32(batch.held, room)
    base, sets = k * SLICE * groups, plan.directory.shape[0]
    for j in range(plan.chunks[words + K_COUNT] * groups):
        if plan.found[base + j] == ABSENT:
            x, g = plan.keys[base + j], j % groups
            set_index = set_of(x, plan.groups[g].number, sets)
            if not settle_key(plan, state, b, plan.chunks[words + K_FIRST] + j // groups, g, x, np.int64(ABSENT), set_index, out, held):
                return False
    return True


@compiled_inner
def plan_slice(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan the next SLICE flat tokens of the batch. False: no slot was to be had, the batch must give back what it holds."""
    batch, groups, orders = plan.batches[b], plan.groups.shape[0], plan.params[PP_ORDERS]
    tokens, flags = view_i32(batch.tokens, batch.flat), view_u8(batch.flags, batch.flat)
    layers = plan.params[PP_LAYERS]
    out = view_i32(batch.slots, layers * batch.positions * orders)
    held = view_i32(batch.held, layers * batch.positions * orders)
    stop = min(batch.cursor + SLICE, end_of_window(plan, b))
    count = ngram_keys(tokens, flags, batch.cursor, stop, plan.token_map, plan.multipliers, plan.params[PP_RULE],
                       plan.params[PP_FILL], plan.keys[: SLICE * groups].reshape(SLICE, layers, orders))
    for first in range(0, count, BLOCK):
        block = min(BLOCK, count - first)
        look_up_block(plan, first, block)
        if not settle_block(plan, state, b, first, block, out, held):
            return False
        batch.probes += block * groups
    batch.cursor = stop
    batch.planned += count
    plan.stats[S_TOKENS] += count
    return True


@compiled_inner
def expand_slice(plan, state, b):  # type: ignore[no-untyped-def]
    """Make the page reads of the next bundles of one layer that the batch holds and nobody reads yet: BLOCKED (no free
    records), MORE, LAYER_DONE or ALL_DONE."""
    batch, layers = plan.batches[b], plan.params[PP_LAYERS]
    room = batch.positions * plan.params[PP_ORDERS]           # of each layer's list of distinct slots
    held = view_i32(batch.held, layers * room)
    mine = plan.layers[b * layers + batch.layer]
    stop = min(mine.held, batch.expand + EXPAND_SCAN) if mine.unready > 0 else batch.expand
    made = 0
    while batch.expand < stop and made < EXPAND_SLICE:
        slot = held[batch.layer * room + batch.expand]
        if plan.slots[slot].status == SLOT_RESERVED:
            pages = expand_bundle(plan, state, slot, batch.ticket, batch.priority)
            if pages < 0:
                return BLOCKED
            batch.reads += pages
            made += 1
        batch.expand += 1
    if batch.expand < mine.held and mine.unready > 0:
        return MORE
    batch.layer += 1
    batch.expand = 0
    return ALL_DONE if batch.layer == layers else LAYER_DONE


@compiled_inner
def starve(plan, b):  # type: ignore[no-untyped-def]
    """No slot was to be had. The batch is too large, or gives all back and tries again later; it keeps its place in the queue."""
    line = b * plan.params[PP_BATCH_LINE]
    plan.stats[S_STARVED] += 1
    if has_every_slot(plan, b):
        dequeue(plan, b)
        atomic_store(plan.words, line + W_ERROR, np.int32(TOO_LARGE))
        ring_bell(plan, b)
    else:
        atomic_store(plan.words, line + W_STARVED, np.int32(1))
        plan.batches[b].given = plan.control[C_GIVEN]
    unwind_from_start(plan, b)
    other = plan.control[C_QUEUES + 2]
    if plan.batches[b].priority == STEP and other >= 0 and stage_of(plan, other) == PLANNING:
        atomic_store(plan.words, other * plan.params[PP_BATCH_LINE] + W_STARVED, np.int32(1))
        plan.batches[other].given = TRY_AGAIN                # half a plan holds slots and cannot go on before this one
        unwind_from_start(plan, other)


@compiled_inner
def mark_held(plan, b, mark):  # type: ignore[no-untyped-def]
    """Write `mark` into the ticket word of the slots that the batch holds. How many had another there."""
    batch, layers = plan.batches[b], plan.params[PP_LAYERS]
    room = batch.positions * plan.params[PP_ORDERS]
    held = view_i32(batch.held, layers * room)
    count = 0
    for layer in range(layers):
        for k in range(plan.layers[b * layers + layer].held):
            slot = np.int64(held[layer * room + k])
            count += plan.slots[slot].ticket != mark
            plan.slots[slot].ticket = mark
    return count


@compiled_inner
def has_every_slot(plan, b):  # type: ignore[no-untyped-def]
    """Whether the batch and the dead bundles' (row 0) hold all slots between them. The marks are lost: the batch is to unwind.

    `need` alone does not tell: it counts a bundle twice if another batch met it in between.
    """
    if plan.batches[b].need < plan.params[PP_SLOTS] - plan.groups.shape[0]:
        return False
    mark_held(plan, 0, np.int64(UNMARKED))
    mark_held(plan, b, np.int64(UNMARKED))
    return mark_held(plan, 0, np.int64(COUNTED)) + mark_held(plan, b, np.int64(COUNTED)) == plan.params[PP_SLOTS]


@compiled_inner
def must_wait_for_slots(plan, b):  # type: ignore[no-untyped-def]
    """Whether the batch starved and nothing was given back since."""
    return plan.words[b * plan.params[PP_BATCH_LINE] + W_STARVED] != 0 and plan.batches[b].given == plan.control[C_GIVEN]


@compiled_inner
def advance_head(plan, state, b):  # type: ignore[no-untyped-def]
    """One slice of work on the batch at the head of its queue. Whether there was any to do."""
    if stage_of(plan, b) == UNWINDING:
        return False                                         # it starved, and others wait until it gave all back
    if stage_of(plan, b) == QUEUED:
        if must_wait_for_slots(plan, b):
            return False
        if plan.batches[b].taken_ns == 0:
            plan.batches[b].taken_ns = now_ns()
        atomic_store(plan.words, b * plan.params[PP_BATCH_LINE] + W_STARVED, np.int32(0))
        set_stage(plan, b, PLANNING)
    if stage_of(plan, b) == PLANNING:
        if not (plan_job(plan, state, b) if crew_helps(plan, b, end_of_window(plan, b)) else plan_slice(plan, state, b)):
            starve(plan, b)
        elif window_is_planned(plan, b):
            plan.batches[b].planned_ns = now_ns()
            set_stage(plan, b, EXPANDING)
            if nothing_to_read(plan, b):
                finish_expanding(plan, b)
        return True
    push = C_PUSH + plan.batches[b].priority
    if plan.control[push] != 0:
        return False                                         # first the records of the layer before
    outcome = expand_slice(plan, state, b)
    if outcome != MORE:
        plan.control[push] = 1
    if outcome == ALL_DONE:
        finish_expanding(plan, b)
    return outcome != BLOCKED


@compiled_inner
def window_is_planned(plan, b):  # type: ignore[no-untyped-def]
    """Whether the plan reached the end of the batch, or of its present window."""
    return plan.batches[b].cursor >= end_of_window(plan, b)


@compiled_inner
def nothing_to_read(plan, b):  # type: ignore[no-untyped-def]
    """Whether every bundle of the batch was ready when it was planned."""
    layers = plan.params[PP_LAYERS]
    for layer in range(layers):
        if plan.layers[b * layers + layer].unready > 0:
            return False
    return True


@compiled_inner
def finish_expanding(plan, b):  # type: ignore[no-untyped-def]
    """All page reads are made: leave the queue, wait for the rows."""
    dequeue(plan, b)
    set_stage(plan, b, WAITING)
    publish_layers(plan, b)


# ---------------------------------------------------------------- completion


@compiled_inner
def publish_layers(plan, b):  # type: ignore[no-untyped-def]
    """Move each layer's cursor over the slots that are ready; publish the layers whose cursor is at its end."""
    batch, layers, line = plan.batches[b], plan.params[PP_LAYERS], b * plan.params[PP_BATCH_LINE]
    room = batch.positions * plan.params[PP_ORDERS]           # of each layer's list of distinct slots
    held = view_i32(batch.held, layers * room)
    complete = True
    for layer in range(layers):
        if plan.words[line + W_LAYER + layer] != 0:
            continue
        mine = plan.layers[b * layers + layer]
        if mine.unready == 0:
            mine.cursor = mine.held
        while mine.cursor < mine.held:
            status = plan.slots[held[layer * room + mine.cursor]].status
            if status == SLOT_FAILED and mine.failed_slot < 0:
                mine.failed_slot = held[layer * room + mine.cursor]
            if status != SLOT_READY and status != SLOT_FAILED:
                break
            mine.cursor += 1
        if mine.cursor < mine.held:
            complete = False
            continue
        mine.published_ns = now_ns()
        atomic_store(plan.words, line + W_LAYER + layer, np.int32(LAYER_READY if mine.failed_slot < 0 else LAYER_FAILED))
        ring_bell(plan, b)
    if complete:
        finish_batch(plan, b)


@compiled_inner
def finish_batch(plan, b):  # type: ignore[no-untyped-def]
    """Every layer is published. A windowed batch gives its slots back at once and goes on with its next window."""
    batch = plan.batches[b]
    batch.published_ns = now_ns()
    us = (batch.published_ns - batch.taken_ns) // 1000
    bucket = 0
    while us > 0 and bucket < 31:
        us >>= 1
        bucket += 1
    plan.stats[S_ENGINE_US + bucket] += 1
    set_stage(plan, b, DONE)
    ring_bell(plan, b)
    if batch.window > 0:
        unwind_from_start(plan, b)


@compiled_inner
def unwind_slice(plan, b):  # type: ignore[no-untyped-def]
    """Drop the next references of the batch; after the last it waits for GPU words, goes on with a window, or queues again."""
    batch, layers = plan.batches[b], plan.params[PP_LAYERS]
    room = batch.positions * plan.params[PP_ORDERS]           # of each layer's list of distinct slots
    held = view_i32(batch.held, layers * room)
    if batch.released != 0 and not words_arrived(plan, b):
        return False                                         # the GPU may still read these slots
    budget = UNWIND_SLICE
    while batch.layer < layers:
        mine = plan.layers[b * layers + batch.layer]
        stop = min(mine.held, batch.expand + budget)
        budget -= stop - batch.expand
        given = plan.control[C_GIVEN]
        for k in range(batch.expand, stop):
            slot = np.int64(held[batch.layer * room + k])
            prefetch(address_of(plan.slots, np.int64(held[batch.layer * room + min(k + AHEAD, mine.held - 1)])))
            if plan.slots[slot].ticket == batch.ticket:
                plan.slots[slot].ticket = UNMARKED           # a plan begun again has to count itself in again
            drop_reference(plan.control, plan.directory, plan.slots, plan.hbm, plan.overflow, slot)
        batch.given += plan.control[C_GIVEN] - given         # its own slots are no news to it
        batch.expand = stop
        if stop < mine.held:
            return True
        batch.layer += 1
        batch.expand = 0
    after_unwinding(plan, b)
    return True


@compiled_inner
def after_unwinding(plan, b):  # type: ignore[no-untyped-def]
    """The batch holds nothing: free it, or let it plan (its next window, or from the start if it had starved)."""
    batch, layers, line = plan.batches[b], plan.params[PP_LAYERS], b * plan.params[PP_BATCH_LINE]
    windowed_end = batch.window > 0 and batch.cursor >= batch.flat and plan.words[line + W_STARVED] == 0
    if batch.released != 0 or windowed_end:
        free_batch(plan, b)
        return
    if plan.words[line + W_ERROR] != NO_ERROR:
        reset_plan(plan, b, 0)
        set_stage(plan, b, DONE)                             # until it is released
        return
    starved = plan.words[line + W_STARVED] != 0
    if not starved:
        batch.start = batch.cursor
    for layer in range(layers):
        atomic_store(plan.words, line + W_LAYER + layer, np.int32(0))
    reset_plan(plan, b, batch.start)
    if starved:
        set_stage(plan, b, QUEUED)                           # it never left the queue: first come, first served
    else:
        enqueue(plan, b)


@compiled_inner
def words_arrived(plan, b):  # type: ignore[no-untyped-def]
    """Whether the GPU is done with everything that it does for the batch: its tokens, and the gathers that read its slots."""
    layers = plan.params[PP_LAYERS]
    if not tokens_arrived(plan, b):
        return False
    for layer in range(layers):
        mine = plan.layers[b * layers + layer]
        if mine.word != 0 and atomic_load_at(mine.word) < mine.expected:
            return False
    return True


@compiled_inner
def free_batch(plan, b):  # type: ignore[no-untyped-def]
    """Take the batch out of the active list; its row may be used again."""
    control = plan.control
    k = 0
    while plan.active[k] != b:
        k += 1
    control[C_ACTIVE] -= 1
    for j in range(k, control[C_ACTIVE]):
        plan.active[j] = plan.active[j + 1]
    set_stage(plan, b, FREE_BATCH)
    ring_bell(plan, b)


@compiled_inner
def settle_reads(plan, state, most):  # type: ignore[no-untyped-def]
    """Settle up to `most` page records that readers are done with, a share from each reader. How many."""
    capacity, count = state.params[P_DONE_CAPACITY], 0
    for reader in range(state.params[P_READERS]):
        line = READER_LINES + reader * READER_WORDS
        head = state.control[line + R_DONE_HEAD]
        stop = min(atomic_load(state.control, line + R_DONE_TAIL), head + most // state.params[P_READERS] + 1)
        while head < stop:
            settle_page(plan, state, np.int64(state.done_ring[reader * capacity + (head & (capacity - 1))]))
            head += 1
            count += 1
        atomic_store(state.control, line + R_DONE_HEAD, head)
    return count


@compiled_inner
def step_is_due(plan):  # type: ignore[no-untyped-def]
    """Whether a step batch is to be planned next, and does not wait for slots."""
    step = plan.control[C_QUEUES]
    if step < 0:
        return False
    stage = stage_of(plan, step)
    return stage == PLANNING or (stage == QUEUED and not must_wait_for_slots(plan, step))


@compiled_inner
def tend_batches(plan, settled):  # type: ignore[no-untyped-def]
    """Publish what became ready, unwind what is to be unwound. (slices of work done, batches that wait for the GPU)."""
    work, waiting_for_gpu, k = 0, 0, 0
    while k < plan.control[C_ACTIVE]:
        b = np.int64(plan.active[k])
        stage = stage_of(plan, b)
        if stage == WAITING and settled > 0:
            publish_layers(plan, b)
        elif stage == AWAITING:
            if admit_tokens(plan, b):
                work += 1
            else:
                waiting_for_gpu += 1
        elif stage == UNWINDING:
            if step_is_due(plan):
                work += 1                                    # its references can wait: a step that finds no slot is due no more
            elif unwind_slice(plan, b):
                work += 1
            else:
                waiting_for_gpu += 1
        if k < plan.control[C_ACTIVE] and plan.active[k] == b:
            k += 1
    return work, waiting_for_gpu


# ---------------------------------------------------------------- the HBM tier


@compiled_inner
def hbm_slot_for(plan, slot):  # type: ignore[no-untyped-def]
    """A slot of the HBM tier for a hot bundle: a free one, or that of a bundle that is less hot and that no batch uses; -1."""
    control, hbm, slots = plan.control, plan.hbm, plan.slots
    if control[C_HBM_FREE] < 0:
        worth = standing(plan.directory, plan.sketch, slots[slot].x, slots[slot].group)
        for _ in range(HBM_PROBES):
            control[C_HBM_HAND] = control[C_HBM_HAND] + 1 if control[C_HBM_HAND] + 1 < hbm.shape[0] else 0
            owner = hbm[control[C_HBM_HAND]].owner
            if slots[owner].refs == 0 and standing(plan.directory, plan.sketch, slots[owner].x, slots[owner].group) < worth:
                drop_copy(control, slots, hbm, owner)
                plan.stats[S_DROPPED] += 1
                break
    copy = control[C_HBM_FREE]
    if copy >= 0:
        control[C_HBM_FREE] = hbm[copy].next
    return copy


@compiled_inner
def request_copies(plan):  # type: ignore[no-untyped-def]
    """Turn the wanted bundles into a list of copies and hand it to the copier. How many."""
    control, slots, hbm = plan.control, plan.slots, plan.hbm
    count = 0
    for k in range(control[C_WANTED]):
        slot = np.int64(plan.wants[k])
        copy = hbm_slot_for(plan, slot)
        if copy < 0:
            slots[slot].hbm = NO_COPY
            drop_reference(control, plan.directory, slots, hbm, plan.overflow, slot)
            continue
        hbm[copy].owner = slot
        hbm[copy].ready = 0
        slots[slot].hbm = copy
        plan.copies[2 * count] = slot
        plan.copies[2 * count + 1] = copy
        count += 1
    control[C_WANTED] = 0
    control[C_COPIES] = count
    if count > 0:
        control[C_COPYING] = 1
        atomic_store(plan.control, C_COPY_REQUESTED, control[C_COPY_REQUESTED] + 1)
    return count


@compiled_inner
def finish_copies(plan):  # type: ignore[no-untyped-def]
    """The GPU made the copies: publish them."""
    control, slots, hbm = plan.control, plan.slots, plan.hbm
    for k in range(control[C_COPIES]):
        hbm[plan.copies[2 * k + 1]].ready = 1
        drop_reference(control, plan.directory, slots, hbm, plan.overflow, np.int64(plan.copies[2 * k]))
    plan.stats[S_COPIED] += control[C_COPIES]
    control[C_COPIES] = control[C_COPYING] = 0


@compiled_inner
def tend_hbm(plan, state):  # type: ignore[no-untyped-def]
    """Publish copies that are made, ask for those that are wanted. (slices of work, 1 if the GPU is awaited)."""
    control = plan.control
    if control[C_COPYING] != 0:
        if atomic_load(plan.copy_word, 0) < control[C_COPY_REQUESTED]:
            return 0, 1
        finish_copies(plan)
        return 1, 0
    step = control[C_QUEUES]
    if control[C_WANTED] > 0 and (step < 0 or plan.words[step * plan.params[PP_BATCH_LINE] + W_STARVED] != 0):
        if request_copies(plan) > 0:
            atomic_add(state.words, COPIER_WORD, np.int32(1))
            futex_wake(state.words, COPIER_WORD, 1)
        return 1, 0
    return 0, 0


# ---------------------------------------------------------------- the drive's health, sleeping, the loop


@compiled_inner
def oldest_read_ns(state):  # type: ignore[no-untyped-def]
    """When the oldest read in any drive was submitted, 0: none is under way."""
    oldest = np.int64(0)
    for reader in range(state.params[P_READERS]):
        submitted = atomic_load(state.control, READER_LINES + reader * READER_WORDS + R_OLDEST_NS)
        if submitted > 0 and (oldest == 0 or submitted < oldest):
            oldest = submitted
    return oldest


@compiled_inner
def look_at_drive(plan, state, now):  # type: ignore[no-untyped-def]
    """DEGRADED while a read is under way for longer than it may be; SERVING again when that is over. Whether any is."""
    oldest = oldest_read_ns(state)
    late = oldest > 0 and now - oldest > plan.params[PP_DEGRADED_NS]
    if late and plan.control[C_STATE] != DEGRADED:
        plan.stats[S_DEGRADED] += 1
        atomic_store(plan.control, C_STATE, np.int64(DEGRADED))
        for k in range(plan.control[C_ACTIVE]):
            ring_bell(plan, np.int64(plan.active[k]))
    elif not late and plan.control[C_STATE] == DEGRADED:
        atomic_store(plan.control, C_STATE, np.int64(SERVING))
    return oldest > 0


@compiled_inner
def nothing_arrived(plan, state):  # type: ignore[no-untyped-def]
    """Whether request ring and done rings are empty."""
    if atomic_load(plan.control, C_REQUEST_TAIL) != plan.control[C_REQUEST_HEAD]:
        return False
    for reader in range(state.params[P_READERS]):
        line = READER_LINES + reader * READER_WORDS
        if atomic_load(state.control, line + R_DONE_TAIL) != state.control[line + R_DONE_HEAD]:
            return False
    return True


@compiled_inner
def sleep(plan, state, longest_ns):  # type: ignore[no-untyped-def]
    """Sleep until somebody rings, or for `longest_ns` (< 0: no limit). A caller may plan meanwhile (`plan_here`)."""
    word = state.words[PLANNER_WORD]
    plan.control[C_LONG_SLEEP] = longest_ns < 0 or longest_ns > TICK_NS
    atomic_exchange(state.control, PLANNER_ASLEEP, np.int64(ASLEEP))
    fence()
    if nothing_arrived(plan, state) and atomic_load(state.control, STOP) == 0:
        plan.stats[S_SLEEPS] += 1
        futex_wait(state.words, PLANNER_WORD, word, longest_ns)
    while atomic_load(state.control, PLANNER_ASLEEP) != AWAKE and not atomic_cas(
            state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(AWAKE)):
        futex_wait(state.words, PLANNER_WORD, atomic_load(state.words, PLANNER_WORD), np.int64(BORROWED_NAP_NS))


@compiled_inner
def work_on_heads(plan, state):  # type: ignore[no-untyped-def]
    """A slice on the step queue's head, or, when there is none, on the background queue's. Slices of work done.

    Behind a step batch that waits for slots, a background batch may finish what it began but not begin.
    """
    step, background = plan.control[C_QUEUES], plan.control[C_QUEUES + 2]
    work = 0
    if step >= 0:
        work += advance_head(plan, state, step)
    if background >= 0 and (step < 0 or (work == 0 and stage_of(plan, background) == EXPANDING)):
        work += advance_head(plan, state, background)
    return work


@compiled_inner
def push_built_pages(plan, state):  # type: ignore[no-untyped-def]
    """Hand records to the readers once their layer is complete (until then more rows may join them). Slices of work done."""
    control, work = plan.control, 0
    for priority in range(2):
        if control[C_PUSH + priority] != 0:
            if push_pages(plan, state, priority, PUSH_SLICE) > 0:
                work += 1
                wake_readers(state)
            if control[C_BUILDING + priority] == 0:
                control[C_PUSH + priority] = 0
    return work


@compiled_inner
def turn(plan, state):  # type: ignore[no-untyped-def]
    """Look at everything once and do a slice of each. (slices of work done, things that the GPU is awaited for)."""
    begin = now_ns()
    work = take_requests(plan)
    settled = settle_reads(plan, state, SETTLE_SLICE)
    tended, waiting_for_gpu = tend_batches(plan, settled)
    promoted = plan.stats[S_PROMOTED]
    work += settled + tended + work_on_heads(plan, state) + push_built_pages(plan, state)
    if plan.stats[S_PROMOTED] != promoted:
        wake_readers(state)                                  # records came into the step ring by another way than a push
    if plan.hbm.shape[0] > 0:
        copied, awaited = tend_hbm(plan, state)
        work += copied
        waiting_for_gpu += awaited
    plan.stats[S_LOOPS] += 1
    if work > 0:
        now = now_ns()
        plan.stats[S_BUSY_NS] += now - begin
        plan.stats[S_LONGEST_NS] = max(plan.stats[S_LONGEST_NS], now - begin)
        plan.control[C_TICKS] += 1
        if plan.control[C_TICKS] & 1023 == 0:
            look_at_drive(plan, state, now)
    return work, waiting_for_gpu


@compiled_inner
def longest_sleep(plan, state, now, waiting_for_gpu):  # type: ignore[no-untyped-def]
    """How long the planner may sleep although nobody rings; -1: for ever."""
    if waiting_for_gpu > 0:
        return POLL_NS
    if now - plan.control[C_TAKEN_NS] < BUSY_NS:
        return TICK_NS                                       # what callers left undone, so as not to wake anybody, is done then
    reading = plan.control[C_PAGES + 1] < state.pages.shape[0]   # in a ring, or in a drive whose age is to be watched
    return NAP_NS if reading else -1


@compiled_inner
def plan_here(plan, state, b):  # type: ignore[no-untyped-def]
    """Plan batch b, just submitted (or its tokens just there), on the caller's thread while the planner's sleeps: waking it takes
    longer than a step's plan.

    The planner's memory belongs to whoever changed PLANNER_ASLEEP from ASLEEP to BORROWED until he changes it back. Returns
    when the batch is planned, has to wait for something, or has had its time; the planner's thread goes on from there.
    """
    fence()
    if not atomic_cas(state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(BORROWED)):
        return                                               # it is awake, and sees the request
    begin, work = now_ns(), 1
    while work > 0 and now_ns() - begin < BORROW_NS and (plan.control[C_REQUEST_HEAD] != plan.control[C_REQUEST_TAIL]
                                                         or in_queue(stage_of(plan, b)) or stage_of(plan, b) == AWAITING):
        work, _ = turn(plan, state)
    undone = plan.control[C_LONG_SLEEP] != 0 or in_queue(stage_of(plan, b))
    atomic_exchange(state.control, PLANNER_ASLEEP, np.int64(ASLEEP))
    fence()
    if undone or not nothing_arrived(plan, state):
        wake_planner(state)


@compiled_lean
def planner_loop(kept, b):  # type: ignore[no-untyped-def]
    """The whole life of the planner's thread (b < 0), until STOP; or a caller's look after the batch that he submitted (b >= 0).

    One function for both, because they compile to the same code.
    """
    state, plan = state_at(kept), plan_at(kept + PLAN_AT)
    if b >= 0:
        plan_here(plan, state, b)
        return
    last_work = now_ns()
    while atomic_load(state.control, STOP) == 0:
        work, waiting_for_gpu = turn(plan, state)
        now = now_ns()
        if work > 0:
            last_work = now
        elif now - last_work > plan.params[PP_SPIN_NS]:
            look_at_drive(plan, state, now)
            sleep(plan, state, longest_sleep(plan, state, now, waiting_for_gpu))
