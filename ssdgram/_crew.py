"""The planner's crew: threads that look up the bundles of a large batch side by side.

    planner   cuts the next positions into chunks, opens the job ─► takes chunks itself ─► waits for the last ─► what is left
    crew      sleeps ─► takes chunks until none is left ─► spins a moment for the next job ─► sleeps

A chunk's bundles that are READY in the directory are counted into the batch here, with atomics, because two chunks may meet
the same bundle; all else (absent, being read, pushed out) is left to the planner, which stands still meanwhile. So the crew
changes nothing but a slot's ticket and refs, an entry's count and age, and its own chunk's words, lists and results. Whoever
took a chunk holds the job open, so nothing that it reads changes under it. The planner needs no crew: it takes what nobody takes.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import (SYS_SCHED_YIELD, address_of, atomic_add, atomic_add_at, atomic_cas, atomic_exchange_at, atomic_load,
                               atomic_store, compiled_inner, compiled_lean, fence, futex_wait, futex_wake, now_ns, pause, syscall,
                               view_i32, view_u8)
from ssdgram._guess import BLOCK, holds, look_ahead, look_on
from ssdgram._kept import PLAN_AT, plan_at, state_at
from ssdgram._plan_state import (ABSENT, CHUNKS, CREW_BATCH, CREW_DONE, CREW_NEXT, CREW_SLEEPERS, C_CHUNKS, C_FREE, C_IDLE,
                                 K_COUNT, K_FIRST, K_HELD, K_HOT, K_IDLE, K_LEFT, K_START, K_STOP, PP_CREW, PP_FILL, PP_HOT,
                                 PP_LAYERS, PP_ORDERS, PP_RULE, SLICE, SLOT, SLOT_READY)
from ssdgram._state import STOP
from ssdgram.cache.directory import WAYS
from ssdgram.cache.policy import touch
from ssdgram.kernels.hash import OUTPUT, ngram_keys

LEAST_TOKENS = 6 * SLICE                                     # smaller rests are planned before the crew is awake
MOST_LEFT = 512                                              # keys that a job may leave to the planner: about 80 us
IDLE_SHARE = 2                                               # sets that may have to be searched for each idle bundle
ALONE = 16                                                   # slices that the planner goes on alone when the crew does not help
LINGER_NS = 60_000                                           # spinning for the next job of the batch
PATIENT_NS = 20_000                                          # spinning for a chunk's end before the core is offered to others
TICKET, REFS = (int(SLOT.fields[name][1]) for name in ("ticket", "refs"))    # type: ignore[index]


@compiled_inner
def chunk_words(plan):  # type: ignore[no-untyped-def]
    """int64 words of a chunk (= `chunk_line`)."""
    return (K_HELD + plan.params[PP_LAYERS] + 3 * plan.params[PP_ORDERS] + 7) // 8 * 8


@compiled_inner
def cut_chunks(plan, b, stop, most):  # type: ignore[no-untyped-def]
    """Cut the batch's next flat positions, up to `stop`, into at most `most` chunks of at most SLICE. How many."""
    batch, chunks, line = plan.batches[b], plan.chunks, chunk_words(plan)
    flags = view_u8(batch.flags, batch.flat)
    position, first, count = batch.cursor, batch.planned, 0
    while position < stop and count < most:
        chunk = count * line
        chunks[chunk + K_START] = position
        chunks[chunk + K_FIRST] = first
        position = min(position + SLICE, stop)
        chunks[chunk + K_STOP] = position
        for flat in range(chunks[chunk + K_START], position):
            first += (flags[flat] & OUTPUT) != 0
        count += 1
    return count


@compiled_inner
def hold_ready(plan, b, k, count, out, held):  # type: ignore[no-untyped-def]
    """Count the batch among the users of those guessed slots that are their bundles' and READY, list them, and write them down as the
    plan; leave the others."""
    groups, orders, layers = plan.groups.shape[0], plan.params[PP_ORDERS], plan.params[PP_LAYERS]
    positions, ticket = plan.batches[b].positions, plan.batches[b].ticket
    words = k * chunk_words(plan)
    hits, repeats, in_hbm = words + K_HELD + layers, words + K_HELD + layers + orders, words + K_HELD + layers + 2 * orders
    base, stop = k * SLICE * groups, (k * SLICE + count) * groups
    look_ahead(plan, base, stop)
    t, g = plan.chunks[words + K_FIRST] - 1, groups - 1
    for j in range(base, stop):
        t, g = (t, g + 1) if g + 1 < groups else (t + 1, 0)
        if (j - base) % (BLOCK * groups) == 0:
            look_on(plan, j, stop)
        x, slot, group = plan.keys[j], plan.found[j], plan.groups[g]
        at = (group.layer * positions + t) * orders + group.order
        if slot >= 0 and not (holds(plan, slot, x, group.number) and plan.slots[slot].status == SLOT_READY):
            plan.found[j] = slot = ABSENT                    # the planner's business, if only because it is being read
        plan.chunks[words + K_LEFT] += slot == ABSENT
        if slot < 0:
            out[at] = -1
            continue
        set_index, way = plan.entries[j] // WAYS, plan.entries[j] % WAYS
        touch(plan.directory, plan.sketch, set_index, way)
        if plan.hbm.shape[0] > 0 and plan.directory[set_index].count[way] >= plan.params[PP_HOT]:
            plan.chunks[words + K_HOT] = slot                # the last one stands for the others: promotion is not urgent
        record = address_of(plan.slots, slot)
        if atomic_exchange_at(record + TICKET, ticket) == ticket:
            plan.chunks[repeats + group.order] += 1
        else:
            plan.chunks[words + K_IDLE] += atomic_add_at(record + REFS, np.int32(1)) == 0
            segment = (group.layer * positions + plan.chunks[words + K_FIRST]) * orders
            held[segment + plan.chunks[words + K_HELD + group.layer]] = slot
            plan.chunks[words + K_HELD + group.layer] += 1
            plan.chunks[hits + group.order] += 1
            plan.chunks[in_hbm + group.order] += plan.slots[slot].hbm >= 0
        copy = plan.slots[slot].hbm
        out[at] = -2 - copy if copy >= 0 and plan.hbm[copy].ready != 0 else slot


@compiled_inner
def plan_chunk(plan, b, k):  # type: ignore[no-untyped-def]
    """Do what can be done for chunk k of batch b without the planner."""
    batch, groups, line = plan.batches[b], plan.groups.shape[0], chunk_words(plan)
    layers, orders = plan.params[PP_LAYERS], plan.params[PP_ORDERS]
    tokens, flags = view_i32(batch.tokens, batch.flat), view_u8(batch.flags, batch.flat)
    out = view_i32(batch.slots, layers * batch.positions * orders)
    held = view_i32(batch.held, layers * batch.positions * orders)
    keys = plan.keys[k * SLICE * groups : (k + 1) * SLICE * groups].reshape(SLICE, layers, orders)
    for word in range(K_COUNT, line):
        plan.chunks[k * line + word] = 0
    plan.chunks[k * line + K_HOT] = -1
    count = ngram_keys(tokens, flags, plan.chunks[k * line + K_START], plan.chunks[k * line + K_STOP], plan.token_map, plan.multipliers,
                       plan.params[PP_RULE], plan.params[PP_FILL], keys)
    plan.chunks[k * line + K_COUNT] = count
    hold_ready(plan, b, k, count, out, held)


@compiled_inner
def crew_helps(plan, b, stop):  # type: ignore[no-untyped-def]
    """Whether the batch's next positions, up to `stop`, are worth a job: there are many, no slice is left half done, slots for what
    the crew leaves are quickly found, and the last jobs left little."""
    batch = plan.batches[b]
    if plan.params[PP_CREW] == 0 or stop - batch.cursor < LEAST_TOKENS or batch.settled > 0:
        return False
    if plan.control[C_FREE + 1] < MOST_LEFT and plan.control[C_IDLE] * IDLE_SHARE < plan.directory.shape[0]:
        return False
    if batch.chunks < 0:
        batch.chunks += 1
        return False
    return True


@compiled_inner
def chunks_of_job(plan, b):  # type: ignore[no-untyped-def]
    """How many chunks the batch's next job may have."""
    return min(min(max(2, np.int64(plan.batches[b].chunks)), CHUNKS), 2 * (1 + plan.params[PP_CREW]))


@compiled_inner
def learn(plan, b, count, left):  # type: ignore[no-untyped-def]
    """A job of `count` chunks left so many keys to the planner: the next one is as large as keeps that below MOST_LEFT. So is the
    first one of the class's next batch, which is likely to be like this one."""
    most = 2 * count if left == 0 else min(2 * count, count * MOST_LEFT // left)
    plan.batches[b].chunks = most if most >= 2 else -ALONE
    first = C_CHUNKS + plan.batches[b].priority
    plan.control[first] = max(plan.control[first], most) if left == 0 else most      # a batch's last job may be a small one


@compiled_inner
def take_chunks(plan):  # type: ignore[no-untyped-def]
    """Take and plan chunks of the open job until none is left. How many."""
    taken = 0
    while True:
        word = atomic_load(plan.crew, CREW_NEXT)
        if (word & 0xFFFF) >= (word >> 16) & 0xFFFF:
            return taken
        if atomic_cas(plan.crew, CREW_NEXT, word, word + 1):
            plan_chunk(plan, plan.crew[CREW_BATCH], word & 0xFFFF)
            atomic_add(plan.crew, CREW_DONE, np.int64(1))
            taken += 1


@compiled_inner
def run_job(plan, b, count):  # type: ignore[no-untyped-def]
    """Have chunks 0 .. count - 1 of batch b planned, by the crew and this thread; returns when all of them are."""
    job = (atomic_load(plan.crew, CREW_NEXT) >> 32) + 1
    plan.crew[CREW_BATCH] = b
    plan.crew[CREW_DONE] = 0
    atomic_store(plan.crew_futex, 0, np.int32(job & 0x7FFFFFFF))
    atomic_store(plan.crew, CREW_NEXT, np.int64(job << 32 | count << 16))
    fence()
    if atomic_load(plan.crew, CREW_SLEEPERS) > 0:
        futex_wake(plan.crew_futex, 0, count - 1)
    take_chunks(plan)
    begin = now_ns()
    while atomic_load(plan.crew, CREW_DONE) < count:
        if now_ns() - begin > PATIENT_NS:
            syscall(SYS_SCHED_YIELD, 0, 0, 0, 0, 0, 0)           # who took the last chunk may be waiting for this core
        else:
            pause()


@compiled_lean
def crew_loop(kept, who):  # type: ignore[no-untyped-def]
    """The life of one of the crew (`who`: 1, 2, …, all alike), until STOP."""
    state, plan = state_at(kept), plan_at(kept + PLAN_AT)
    last = now_ns()
    while atomic_load(state.control, STOP) == 0:
        word = plan.crew_futex[0]
        if take_chunks(plan) > 0:
            last = now_ns()
            continue
        if now_ns() - last < LINGER_NS:
            pause()
            continue
        atomic_add(plan.crew, CREW_SLEEPERS, np.int64(1))
        fence()
        left = atomic_load(plan.crew, CREW_NEXT)
        if (left & 0xFFFF) >= (left >> 16) & 0xFFFF and atomic_load(state.control, STOP) == 0:
            futex_wait(plan.crew_futex, 0, word, -1)
        atomic_add(plan.crew, CREW_SLEEPERS, np.int64(-1))
        last = now_ns()


@compiled_lean
def wake_crew(crew_futex):  # type: ignore[no-untyped-def]
    """Wake all, so that they see STOP."""
    atomic_add(crew_futex, 0, np.int32(1))
    futex_wake(crew_futex, 0, 1 << 30)
