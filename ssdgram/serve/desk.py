"""The desk: a compiled loop in the server that takes clients' requests out of shared memory and hands them to the planner.

    seat    EMPTY ─request─► (AWAITING tokens of a GPU) ─► SEATED: has a batch row ─release─► LEAVING: GPU words awaited ─► EMPTY

It is the only one that submits to the planner of a served store, and plans steps itself while that sleeps. Nothing in a share
is believed: a request is read once, each number is checked, tokens and flags are copied before they are looked at, and what the
planner walks (tokens, lists of slots) lies in the server's own memory. A client whose request cannot be is BROKEN, and is put
out by the server.
The same step of several ranks is planned once: a request whose tokens are those of a batch that is still held, and that has not
failed, joins that batch; its row goes back to the planner when the last of them left.
The invariant: a batch row is handed back exactly once, after every GPU word that its users named has arrived or they are gone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssdgram._calls import give_way, hand_back, submit
from ssdgram._compiled import (address_of, atomic_add, atomic_cas, atomic_exchange, atomic_load, atomic_store, compiled_inner,
                               compiled_lean, copy_bytes, fence, futex_wait, futex_wake, now_ns, view_i32, view_i64, view_u8)
from ssdgram._plan_state import FREE_BATCH, LAYER_FAILED, NO_ERROR, W_ERROR, W_LAYER, W_STAGE
from ssdgram._planner import planner_loop
from ssdgram._state import STEP
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS
from ssdgram.serve.share import (ASLEEP, AWAKE, BELL, BELL_ASLEEP, BOARD_WORDS, B_TAIL, DOZING, FRAMES, LEAVE_SEAT, Q_DEVICE, Q_FLAT,
                                 Q_KIND, Q_POSITIONS, Q_PRIORITY, Q_ROW, Q_TICKET, Q_WINDOW, REQUEST_WORDS, SEAT_BATCH, SEAT_BELL,
                                 SEAT_DONE, SEAT_LINE, SEAT_SLEEPERS, SEAT_TICKET, SEAT_WORDS, TAKE_SEAT)

POLL_NS = 100_000                                            # longest sleep while GPU words are awaited
DOZE_NS = 2_000_000                                          # longest sleep in busy times, which last ...
BUSY_NS = 1_000_000_000                                      # ... so long after the last request: releases are seen then, unrung
LINGER_NS = 200_000                                          # longest spin: a request is about to come
NAP_NS = 200_000_000                                         # longest sleep at all: a bell that a client spoilt costs that much
PLANNED_HERE = 512                                           # tokens of a step that the desk plans itself, if the planner sleeps
TAKE = 64                                                    # requests of one client taken without looking at the others

ABSENT, LIVE, BROKEN, LEAVING_NOW, DRAINING, GONE = range(6)     # a client; the server's thread sets LIVE and LEAVING_NOW
EMPTY, AWAITING, SEATED, LEAVING = range(4)                      # a seat

CLIENT = np.dtype([                                          # addresses in the server's mapping of the share
    ("board", np.int64), ("requests", np.int64), ("seats", np.int64), ("seat_words", np.int64), ("expected", np.int64),
    ("gpu_words", np.int64), ("token_words", np.int64), ("tokens", np.int64), ("flags", np.int64),
    ("head", np.int64),                                      # requests taken
], align=True)

SEAT = np.dtype([                                            # one per client and row
    ("ticket", np.int64), ("flat", np.int64), ("positions", np.int64), ("window", np.int64), ("priority", np.int64),
    ("batch", np.int32),                                     # batch row, its own or one that it joined; -1: none
    ("stage", np.int32),
], align=True)

BATCH_ROW = np.dtype([                                       # one per batch row of the planner
    ("digest", np.uint64), ("flat", np.int64), ("positions", np.int64), ("priority", np.int64),
    ("users", np.int32),                                     # seats that hold it
    ("held_back", np.int32),                                 # 1: handed back for a client that is gone
], align=True)

# control: int64
D_STOP, D_TICKETS, D_LIVE, D_PENDING, D_DRAINING, D_JOINED, D_REFUSED, D_TAKEN, D_COUNT = (8 * k for k in range(9))
# live: batch rows that seats hold; pending: seats that wait for words of a GPU; draining: clients that are leaving
# params: int64
DP_ROWS, DP_LAYERS, DP_ORDERS, DP_FLAT, DP_POSITIONS, DP_PLAN, DP_LINE, DP_SPIN_NS, DP_RING, DP_STORE, DP_COUNT = range(11)
# store: address of the served store's arrays (_kept.keep)


class Desk(NamedTuple):
    """C clients of `rows` seats each; seat s of client c has the batch row first + c * rows + s (first = 1: row 0 is the store's)."""

    control: np.ndarray                                      # int64 [D_COUNT]
    params: np.ndarray                                       # int64 [DP_COUNT]
    states: np.ndarray                                       # int32 [C * 16]: a line each
    clients: np.ndarray                                      # CLIENT [C]
    seats: np.ndarray                                        # SEAT [C * rows]
    awaited: np.ndarray                                      # int64 [C * rows * L * 2]: what a LEAVING seat waits for, as `expected`
    batch_rows: np.ndarray                                   # BATCH_ROW [B]
    live: np.ndarray                                         # int32 [B]
    pending: np.ndarray                                      # int32 [C * rows]
    arrived: np.ndarray                                      # int64 [B]: the ticket: the planner finds its tokens there, and checks them
    tokens: np.ndarray                                       # int32 [B * flat], the server's copy
    flags: np.ndarray                                        # uint8 [B * flat]
    held: np.ndarray                                         # int32 [B * plan]
    plans: np.ndarray                                        # int32 [B * plan], which clients read
    bell: np.ndarray                                         # int32
    batch_words: np.ndarray                                  # the planner's, see _plan_state


@compiled_inner
def own_row(desk, seat):  # type: ignore[no-untyped-def]
    """The batch row that belongs to the seat."""
    return seat + 1


@compiled_inner
def stage_of_row(desk, b):  # type: ignore[no-untyped-def]
    """The planner's stage of a batch row."""
    return atomic_load(desk.batch_words, b * desk.params[DP_LINE] + W_STAGE)


@compiled_inner
def ring_seat(desk, c, row):  # type: ignore[no-untyped-def]
    """The seat was written: wake who waits for it."""
    words = view_i32(desk.clients[c].seat_words, desk.params[DP_ROWS] * SEAT_WORDS)
    atomic_add(words, row * SEAT_WORDS + SEAT_BELL, np.int32(1))
    fence()
    if atomic_load(words, row * SEAT_WORDS + SEAT_SLEEPERS) != 0:
        futex_wake(words, row * SEAT_WORDS + SEAT_BELL, 1 << 30)


@compiled_inner
def write_seat(desk, c, row, word, value):  # type: ignore[no-untyped-def]
    """Write a word of the seat, as the client reads it."""
    atomic_store(view_i64(desk.clients[c].seats, desk.params[DP_ROWS] * SEAT_LINE), row * SEAT_LINE + word, np.int64(value))


# ---------------------------------------------------------------- taking a seat


@compiled_inner
def take_seat(desk, c, row, ticket, flat, positions, window, priority, device):  # type: ignore[no-untyped-def]
    """A prefetch. False: it cannot be what a working client asks."""
    params = desk.params
    if row < 0 or row >= params[DP_ROWS] or ticket <= 0 or flat < 0 or flat > params[DP_FLAT]:
        return False
    if positions < 0 or positions > flat or positions > params[DP_POSITIONS] or window < 0 or priority < 0 or priority > 1:
        return False
    s = c * params[DP_ROWS] + row
    seat = desk.seats[s]
    if seat.stage != EMPTY or desk.batch_rows[own_row(desk, s)].users != 0 or stage_of_row(desk, own_row(desk, s)) != FREE_BATCH:
        return False
    seat.ticket, seat.flat, seat.positions, seat.window, seat.priority = ticket, flat, positions, window, priority
    seat.batch = -1
    if device != 0 and not tokens_there(desk, c, row, ticket):
        seat.stage = AWAITING
        wait_for_gpu(desk, s)
        return True
    return seat_batch(desk, c, row)


@compiled_inner
def wait_for_gpu(desk, s):  # type: ignore[no-untyped-def]
    """The seat's words are looked at again and again."""
    desk.pending[desk.control[D_PENDING]] = s
    desk.control[D_PENDING] += 1


@compiled_inner
def tokens_there(desk, c, row, ticket):  # type: ignore[no-untyped-def]
    """Whether a GPU stored the ticket behind the tokens."""
    return atomic_load(view_i64(desk.clients[c].token_words, desk.params[DP_ROWS]), row) == ticket


@compiled_inner
def seat_batch(desk, c, row):  # type: ignore[no-untyped-def]
    """The seat's tokens are there: copy and check them, join a batch that has the same, or submit them. False: they cannot be."""
    params = desk.params
    s = c * params[DP_ROWS] + row
    seat, b = desk.seats[s], own_row(desk, s)
    flat = seat.flat
    copy_bytes(address_of(desk.tokens, b * params[DP_FLAT]), desk.clients[c].tokens + 4 * row * params[DP_FLAT], 4 * flat)
    copy_bytes(address_of(desk.flags, b * params[DP_FLAT]), desk.clients[c].flags + row * params[DP_FLAT], flat)
    tokens = view_i32(address_of(desk.tokens, b * params[DP_FLAT]), flat)
    flags = view_u8(address_of(desk.flags, b * params[DP_FLAT]), flat)
    digest, outputs = digest_of(tokens, flags)
    if outputs != seat.positions:
        return False
    if seat.window == 0:
        other = same_batch(desk, s, digest)
        if other >= 0:
            desk.control[D_JOINED] += 1
            desk.batch_rows[other].users += 1
            give_row(desk, c, row, other)
            return True
    desk.control[D_TICKETS] += 1
    ticket = desk.control[D_TICKETS]
    desk.arrived[b] = ticket
    planned = min(seat.window, seat.positions) if seat.window > 0 else seat.positions
    here = seat.window == 0 and seat.priority == STEP and planned <= PLANNED_HERE
    room = params[DP_LAYERS] * params[DP_ORDERS] * planned
    submit(params[DP_STORE], np.int64(b), ticket, tokens, flags, address_of(desk.arrived, b),
           view_i32(address_of(desk.plans, b * params[DP_PLAN]), room), view_i32(address_of(desk.held, b * params[DP_PLAN]), room),
           planned, seat.window, seat.priority, not here)
    if here:
        planner_loop(params[DP_STORE], np.int64(b))          # on this thread, if the planner sleeps: waking it takes longer
    if seat.window > 0:                                      # the planner frees the row after the last window, with no release
        seat.stage = EMPTY
        write_seat(desk, c, row, SEAT_DONE, seat.ticket)
        ring_seat(desk, c, row)
        return True
    record = desk.batch_rows[b]
    record.digest, record.flat, record.positions, record.priority = digest, flat, seat.positions, seat.priority
    record.users = 1
    desk.live[desk.control[D_LIVE]] = b
    desk.control[D_LIVE] += 1
    give_row(desk, c, row, b)
    return True


@compiled_inner
def digest_of(tokens, flags):  # type: ignore[no-untyped-def]
    """A digest of tokens and flags, and how many are OUTPUT. The flags' unknown bits are cleared and the first token starts."""
    digest, outputs = np.uint64(0x9E3779B97F4A7C15), 0
    for k in range(tokens.shape[0]):
        flag = flags[k] & np.uint8(PARTICIPATES | STARTS | OUTPUT)
        if k == 0:
            flag |= np.uint8(STARTS)
        flags[k] = flag
        outputs += (flag & np.uint8(OUTPUT)) != 0
        digest = (digest ^ (np.uint64(np.uint32(tokens[k])) | np.uint64(flag) << np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        digest ^= digest >> np.uint64(29)
    return digest, outputs


@compiled_inner
def same_batch(desk, s, digest):  # type: ignore[no-untyped-def]
    """The batch row that serves what the seat asks for, tokens compared one by one; -1: none."""
    seat, own = desk.seats[s], own_row(desk, s)
    for k in range(desk.control[D_LIVE]):
        b = np.int64(desk.live[k])
        record = desk.batch_rows[b]
        if (record.digest == digest and record.flat == seat.flat and record.positions == seat.positions
                and record.priority == seat.priority and healthy(desk, b) and same_tokens(desk, own, b, seat.flat)):
            return b
    return np.int64(-1)


@compiled_inner
def healthy(desk, b):  # type: ignore[no-untyped-def]
    """Whether nothing of the batch failed: one that joined a failed one would fail with it, where a read of its own may succeed."""
    base = b * desk.params[DP_LINE]
    if atomic_load(desk.batch_words, base + W_ERROR) != NO_ERROR:
        return False
    for layer in range(desk.params[DP_LAYERS]):
        if atomic_load(desk.batch_words, base + W_LAYER + layer) == LAYER_FAILED:
            return False
    return True


@compiled_inner
def same_tokens(desk, a, b, flat):  # type: ignore[no-untyped-def]
    """Whether batch rows a and b have the same tokens and flags."""
    first, second = a * desk.params[DP_FLAT], b * desk.params[DP_FLAT]
    for k in range(flat):
        if desk.tokens[first + k] != desk.tokens[second + k] or desk.flags[first + k] != desk.flags[second + k]:
            return False
    return True


@compiled_inner
def give_row(desk, c, row, b):  # type: ignore[no-untyped-def]
    """The seat has a batch row; tell the client."""
    seat = desk.seats[c * desk.params[DP_ROWS] + row]
    seat.batch = b
    seat.stage = SEATED
    write_seat(desk, c, row, SEAT_BATCH, b)
    write_seat(desk, c, row, SEAT_TICKET, seat.ticket)
    ring_seat(desk, c, row)


# ---------------------------------------------------------------- leaving it


@compiled_inner
def leave_seat(desk, c, row, ticket):  # type: ignore[no-untyped-def]
    """A release. One of a batch that is over changes nothing. False: it names a GPU word that there is not."""
    params = desk.params
    if row < 0 or row >= params[DP_ROWS]:
        return False
    s, layers = c * params[DP_ROWS] + row, params[DP_LAYERS]
    seat = desk.seats[s]
    if seat.ticket != ticket or seat.stage == EMPTY or seat.stage == LEAVING:
        return True
    expected = view_i64(desk.clients[c].expected, params[DP_ROWS] * layers * 2)
    for layer in range(layers):
        index = atomic_load(expected, (row * layers + layer) * 2)
        number = atomic_load(expected, (row * layers + layer) * 2 + 1)
        if number > 0 and (index < 0 or index >= (params[DP_ROWS] + FRAMES) * layers):
            return False
        desk.awaited[(s * layers + layer) * 2] = index
        desk.awaited[(s * layers + layer) * 2 + 1] = number
    if seat.stage == SEATED:
        seat.stage = LEAVING
        if gpu_is_done(desk, c, row):
            end_seat(desk, c, row)
        else:
            wait_for_gpu(desk, s)
    else:
        seat.stage = LEAVING                                 # still pending: the GPU has yet to write its tokens
    return True


@compiled_inner
def gpu_is_done(desk, c, row):  # type: ignore[no-untyped-def]
    """Whether the GPU is done with what the seat had: its tokens are written, its slots read."""
    params = desk.params
    s, layers = c * params[DP_ROWS] + row, params[DP_LAYERS]
    if desk.seats[s].batch < 0:
        return tokens_there(desk, c, row, desk.seats[s].ticket)
    words = view_i64(desk.clients[c].gpu_words, (params[DP_ROWS] + FRAMES) * layers)
    for layer in range(layers):
        number = desk.awaited[(s * layers + layer) * 2 + 1]
        if number > 0 and atomic_load(words, desk.awaited[(s * layers + layer) * 2]) < number:
            return False
    return True


@compiled_inner
def end_seat(desk, c, row):  # type: ignore[no-untyped-def]
    """The seat is EMPTY; the last user of a batch row hands it back."""
    seat = desk.seats[c * desk.params[DP_ROWS] + row]
    b = np.int64(seat.batch)
    if b >= 0:
        desk.batch_rows[b].users -= 1
        if desk.batch_rows[b].users == 0:
            k = 0
            while desk.live[k] != b:
                k += 1
            desk.control[D_LIVE] -= 1
            desk.live[k] = desk.live[desk.control[D_LIVE]]
            hand_back(desk.params[DP_STORE], b)
    seat.stage = EMPTY
    seat.batch = -1
    write_seat(desk, c, row, SEAT_DONE, seat.ticket)
    ring_seat(desk, c, row)


@compiled_inner
def tend_pending(desk):  # type: ignore[no-untyped-def]
    """Look at the words that seats wait for. How many seats went on."""
    work, k = 0, 0
    while k < desk.control[D_PENDING]:
        s = np.int64(desk.pending[k])
        c, row = s // desk.params[DP_ROWS], s % desk.params[DP_ROWS]
        stage, over = desk.seats[s].stage, True
        if stage == AWAITING:
            over = tokens_there(desk, c, row, desk.seats[s].ticket)
            if over and not seat_batch(desk, c, row):
                desk.seats[s].stage = EMPTY
                refuse(desk, c)
        elif stage == LEAVING:
            over = gpu_is_done(desk, c, row)
            if over:
                end_seat(desk, c, row)
        if over:
            work += 1
            desk.control[D_PENDING] -= 1
            desk.pending[k] = desk.pending[desk.control[D_PENDING]]
        else:
            k += 1
    return work


# ---------------------------------------------------------------- clients


@compiled_inner
def refuse(desk, c):  # type: ignore[no-untyped-def]
    """The client asked for what cannot be: nothing more of it is taken, the server puts it out, if it is not about to already."""
    desk.control[D_REFUSED] += 1
    atomic_cas(desk.states, 16 * c, np.int32(LIVE), np.int32(BROKEN))


@compiled_inner
def take_requests(desk, c):  # type: ignore[no-untyped-def]
    """The client's next requests. How many."""
    client, mask = desk.clients[c], desk.params[DP_RING] - 1
    tail = atomic_load(view_i64(client.board, BOARD_WORDS), B_TAIL)
    if tail < client.head or tail - client.head > mask + 1:
        refuse(desk, c)
        return 1
    count = 0
    while client.head < tail and count < TAKE:
        e = view_i64(client.requests + 8 * REQUEST_WORDS * (client.head & mask), REQUEST_WORDS)
        kind, row, ticket = atomic_load(e, Q_KIND), atomic_load(e, Q_ROW), atomic_load(e, Q_TICKET)
        if kind == TAKE_SEAT:
            fine = take_seat(desk, c, row, ticket, atomic_load(e, Q_FLAT), atomic_load(e, Q_POSITIONS), atomic_load(e, Q_WINDOW),
                             atomic_load(e, Q_PRIORITY), atomic_load(e, Q_DEVICE))
        else:
            fine = kind == LEAVE_SEAT and leave_seat(desk, c, row, ticket)
        client.head += 1
        count += 1
        if not fine:
            refuse(desk, c)
            break
    desk.control[D_TAKEN] += count
    return count


@compiled_inner
def put_out(desk, c):  # type: ignore[no-untyped-def]
    """The client's process is gone, and so is its GPU context: its words count as arrived. All that it holds is handed back."""
    rows = desk.params[DP_ROWS]
    for row in range(rows):
        s = c * rows + row
        b = own_row(desk, s)
        if desk.seats[s].stage != EMPTY:
            end_seat(desk, c, row)
        elif desk.batch_rows[b].users == 0 and stage_of_row(desk, b) != FREE_BATCH:      # of `warm`, or on its way already
            hand_back(desk.params[DP_STORE], np.int64(b))
    desk.control[D_DRAINING] += 1
    atomic_store(desk.states, 16 * c, np.int32(DRAINING))


@compiled_inner
def drained(desk, c):  # type: ignore[no-untyped-def]
    """Whether the planner has done with every row of the client (others may have joined some): then its place is GONE."""
    rows = desk.params[DP_ROWS]
    for row in range(rows):
        b = own_row(desk, c * rows + row)
        if desk.batch_rows[b].users != 0 or stage_of_row(desk, b) != FREE_BATCH:
            return False
    desk.control[D_DRAINING] -= 1
    atomic_store(desk.states, 16 * c, np.int32(GONE))
    return True


@compiled_inner
def nothing_asked(desk):  # type: ignore[no-untyped-def]
    """Whether no client has a request that was not taken, and none is to be put out."""
    for c in range(desk.clients.shape[0]):
        state = atomic_load(desk.states, 16 * c)
        if state == LEAVING_NOW:
            return False
        if state == LIVE and atomic_load(view_i64(desk.clients[c].board, BOARD_WORDS), B_TAIL) != desk.clients[c].head:
            return False
    return True


@compiled_inner
def sleep(desk, longest_ns):  # type: ignore[no-untyped-def]
    """Sleep until a client rings, or for `longest_ns`. Whether one rang."""
    word = atomic_load(desk.bell, BELL)
    atomic_exchange(desk.bell, BELL_ASLEEP, np.int32(DOZING if longest_ns <= DOZE_NS else ASLEEP))
    fence()
    if nothing_asked(desk) and atomic_load(desk.control, D_STOP) == 0:
        futex_wait(desk.bell, BELL, word, longest_ns)
    atomic_store(desk.bell, BELL_ASLEEP, np.int32(AWAKE))
    return atomic_load(desk.bell, BELL) != word


@compiled_lean
def set_state(states, c, state):  # type: ignore[no-untyped-def]
    """For the server's thread: change a client's state, behind all that was written for it."""
    atomic_store(states, 16 * c, np.int32(state))


@compiled_lean
def desk_loop(desk):  # type: ignore[no-untyped-def]
    """Run until D_STOP. This is the whole life of the desk's thread."""
    stays_up = last_asked = idle_since = now = now_ns()
    while atomic_load(desk.control, D_STOP) == 0:
        before, taken, work = now, desk.control[D_TAKEN], tend_pending(desk)
        for c in range(desk.clients.shape[0]):
            state = atomic_load(desk.states, 16 * c)
            if state == LIVE:
                work += take_requests(desk, c)
            elif state == LEAVING_NOW:
                put_out(desk, c)
                work += 1
            elif state == DRAINING and drained(desk, c):
                work += 1
        now = now_ns()
        if desk.control[D_TAKEN] != taken:
            last_asked = now
        if work > 0:                                         # who was asked again this soon will be once more
            stays_up = now + (LINGER_NS if before - idle_since < LINGER_NS else desk.params[DP_SPIN_NS])
            idle_since = now
        elif now > stays_up:
            longest = DOZE_NS if now - last_asked < BUSY_NS else NAP_NS
            if desk.control[D_PENDING] + desk.control[D_DRAINING] > 0:
                longest = POLL_NS
            if sleep(desk, longest):
                stays_up = now_ns() + LINGER_NS              # clients ring before they ask
        else:
            give_way()
