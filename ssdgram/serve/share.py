"""A client's share of the server's memory: what every word of it means, and the client's side of it, compiled.

    client ──requests (one ring a client, one producer)──► server's desk ──► planner
           ◄─seats: which batch row a request got, and when it is over──┘       │
           ◄─batch words and plans, mapped read-only ───────────────────────────┘

Four memory files are passed at attach: the store's own block (slab, batch words; read-only), the plans (read-only), the bell
(everybody's), and the share (this client's alone; the server believes nothing in it). A client has `rows` seats, each good
for one batch at a time. Steps make no call to the socket. The invariant: a request is complete in memory before the tail
that announces it is stored, so a client may die at any instruction without leaving half of one.
"""

from __future__ import annotations

import zlib

import numpy as np

from ssdgram import _plan_state as p
from ssdgram._arena import Spec
from ssdgram._calls import all_ready, give_way
from ssdgram._compiled import (address_of, atomic_add, atomic_exchange, atomic_load, atomic_store, compiled_lean, fence, futex_wait,
                               futex_wake, now_ns)
from ssdgram._plan_state import C_QUEUES, FREE_BATCH, W_STAGE

# board: int64 words, a line for each writer
B_TAIL = 0                                                   # requests announced, ever growing; the client's
B_STATE = 8                                                  # SERVING, ...; the server's
BOARD_WORDS = 16
SERVING, STOPPED, REPLACED = 1, 2, 3                         # it serves; was stopped; the files were replaced. 0: the share was taken back

# requests: int64 [RING, REQUEST_WORDS]
(Q_KIND, Q_ROW, Q_TICKET, Q_FLAT, Q_POSITIONS, Q_WINDOW, Q_PRIORITY, Q_DEVICE) = range(8)
REQUEST_WORDS = 8
TAKE_SEAT, LEAVE_SEAT = 1, 2                                 # prefetch, release
# device: 1 if the tokens come from a GPU, and are there when the seat's token word has become the ticket

# seats: int64, a line each, written by the server
SEAT_LINE = 8
SEAT_TICKET, SEAT_BATCH, SEAT_DONE = range(3)                # newest ticket that got a batch row; that row; newest ticket that is over
# seat_words: int32, a line each; the futex that the server rings when it has written the seat
SEAT_WORDS = 16
SEAT_BELL, SEAT_SLEEPERS = range(2)

FRAMES = 512                                                 # lines of GPU words for frames, beside those of the seats

# bell: int32 words in a page that all clients share
BELL, BELL_ASLEEP = 0, 16                                    # futex word; how the desk sleeps on it:
AWAKE, DOZING, ASLEEP = 0, 1, 2                              # dozing: it looks again soon, whether or not somebody rings
BELL_SPECS: tuple[Spec, ...] = (("bell", np.int32, (32,)),)


def ring_of(rows: int) -> int:
    """Length of the request ring: a seat has a request, its release and a repeated release in it, at the most."""
    return 1 << (4 * rows - 1).bit_length()


def share_specs(rows: int, layers: int, flat: int, about: int) -> tuple[Spec, ...]:
    """The arrays of a share: `rows` seats for batches of up to `flat` tokens, and `about` bytes of text that describe the store."""
    return (
        ("board", np.int64, (BOARD_WORDS,)),
        ("requests", np.int64, (ring_of(rows) * REQUEST_WORDS,)),
        ("seats", np.int64, (rows * SEAT_LINE,)),
        ("seat_words", np.int32, (rows * SEAT_WORDS,)),
        ("expected", np.int64, (rows * layers * 2,)),        # of a release: (index of a GPU word, what it must have reached), 0: none
        ("about", np.uint8, (about,)),
        ("gpu_words", np.int64, ((rows + FRAMES) * layers,)),    # the GPU counts gathers here ...
        ("token_words", np.int64, (rows,)),                  # ... and stores the ticket here, behind its tokens
        ("tokens", np.int32, (rows, flat)),
        ("flags", np.uint8, (rows, flat)),
    )


GPU_ARRAYS = ("gpu_words", "token_words", "tokens")          # one after the other: what a client's GPU writes


def plan_words(layers: int, orders: int, positions: int) -> int:
    """int32 words of a batch row's plan, whole pages of them: slots [layers, T, orders], packed for the T of the batch."""
    return -(-layers * orders * positions // 1024) * 1024


def layout_digest() -> int:
    """A number that changes when the meaning of shared memory does: both sides must be of one build."""
    facts = (share_specs(3, 2, 5, 7), BELL_SPECS, AWAKE, DOZING, ASLEEP, p.W_SEQUENCE, p.W_ERROR, p.W_STAGE, p.W_LAYER, p.FREE_BATCH,
             p.C_STATE, p.C_QUEUES, p.STATE_NAMES, plan_words(2, 3, 700), FRAMES)
    return zlib.crc32(repr(facts).encode())


# ---------------------------------------------------------------- the client's calls


@compiled_lean
def push(board, requests, bell, plan_control, kind, row, ticket, flat, positions, window, priority, device):  # type: ignore[no-untyped-def]
    """Announce a request (the caller holds the store's lock) and wake the desk if it sleeps.

    As in-process (_calls.hand_back), nobody is woken for a release that is soon seen anyway, unless some batch waits for slots.
    """
    tail = board[B_TAIL]
    entry = (tail & (requests.shape[0] // REQUEST_WORDS - 1)) * REQUEST_WORDS
    requests[entry + Q_KIND] = kind
    requests[entry + Q_ROW] = row
    requests[entry + Q_TICKET] = ticket
    requests[entry + Q_FLAT] = flat
    requests[entry + Q_POSITIONS] = positions
    requests[entry + Q_WINDOW] = window
    requests[entry + Q_PRIORITY] = priority
    requests[entry + Q_DEVICE] = device
    atomic_store(board, B_TAIL, tail + 1)
    fence()
    if kind == TAKE_SEAT and atomic_load(bell, BELL_ASLEEP) == AWAKE:
        give_way()                                           # it may be waiting for this CPU
    elif (kind == TAKE_SEAT or atomic_load(bell, BELL_ASLEEP) != DOZING or atomic_load(plan_control, C_QUEUES) >= 0
            or atomic_load(plan_control, C_QUEUES + 2) >= 0):
        ring(bell)


@compiled_lean
def ring(bell):  # type: ignore[no-untyped-def]
    """Wake the desk if it sleeps. What is to be seen was stored before."""
    fence()
    if atomic_load(bell, BELL_ASLEEP) != AWAKE and atomic_exchange(bell, BELL_ASLEEP, np.int32(AWAKE)) != AWAKE:
        atomic_add(bell, BELL, np.int32(1))
        futex_wake(bell, BELL, 1)


@compiled_lean
def name_words(layers, first, count, expected, gpu_words):  # type: ignore[no-untyped-def]
    """For a release: write down which of the share's GPU words the seat's LAYER records [first, first + count) name, and what they
    must have reached."""
    for k in range(first, first + count):
        used = layers[k].word != 0
        expected[2 * k] = (layers[k].word - address_of(gpu_words, 0)) // 8 if used else 0
        expected[2 * k + 1] = layers[k].expected if used else 0


@compiled_lean
def free_seat(seats, batch_words, line, first, last):  # type: ignore[no-untyped-def]
    """A seat whose last ticket (`last`, int64 [rows]) is over and whose own batch row is FREE; -1: none."""
    for row in range(last.shape[0]):
        if (atomic_load(seats, row * SEAT_LINE + SEAT_DONE) == last[row]
                and atomic_load(batch_words, (first + row) * line + W_STAGE) == FREE_BATCH):
            return row
    return -1


@compiled_lean
def ready_row(seats, row, ticket, batch_words, line, layers, spin_ns):  # type: ignore[no-untyped-def]
    """The batch row that the seat's ticket got, once every layer of it is READY; -1 if that is not so within `spin_ns`."""
    begin = now_ns()
    while True:
        if atomic_load(seats, row * SEAT_LINE + SEAT_TICKET) == ticket:
            batch = seats[row * SEAT_LINE + SEAT_BATCH]
            if all_ready(batch_words, batch * line, layers):
                return batch
        if now_ns() - begin >= spin_ns:
            return np.int64(-1)
        give_way()


@compiled_lean
def wait_seated(seats, seat_words, row, ticket, timeout_ns, spin_ns):  # type: ignore[no-untyped-def]
    """The batch row that the seat's ticket got, -1 if it has none within `timeout_ns`."""
    begin = now_ns()
    word = row * SEAT_WORDS
    while True:
        sequence = atomic_load(seat_words, word + SEAT_BELL)
        if atomic_load(seats, row * SEAT_LINE + SEAT_TICKET) == ticket:
            return seats[row * SEAT_LINE + SEAT_BATCH]
        waited = now_ns() - begin
        if waited >= timeout_ns:
            return np.int64(-1)
        if waited < spin_ns:
            give_way()
            continue
        atomic_add(seat_words, word + SEAT_SLEEPERS, np.int32(1))
        fence()
        futex_wait(seat_words, word + SEAT_BELL, sequence, timeout_ns - waited)
        atomic_add(seat_words, word + SEAT_SLEEPERS, np.int32(-1))
        if now_ns() - begin < timeout_ns and atomic_load(seat_words, word + SEAT_BELL) == sequence:
            return np.int64(-1)                              # a signal: let Python look at it
