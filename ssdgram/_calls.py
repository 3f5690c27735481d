"""The caller's side of the planner, compiled: hand in a batch, hand it back, wait for a layer. Run by any Python thread, GIL-free.

They pass single arrays, not the whole state: taking a tuple of forty arrays apart would cost more than the work.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import (address_of, atomic_add, atomic_exchange, atomic_load, atomic_load_at, atomic_store, compiled_lean, fence,
                               futex_wait, futex_wake, now_ns)
from ssdgram._plan_state import (C_COPY_REQUESTED, C_REQUEST_TAIL, FREE_BATCH, NO_ERROR, RELEASE, SUBMIT, SUBMITTED, W_ERROR,
                                 W_LAYER, W_SEQUENCE, W_SLEEPERS, W_STAGE)
from ssdgram._state import COPIER_WORD, PLANNER_ASLEEP, PLANNER_WORD, STOP

TIMED_OUT, READY, FAILED, REFUSED = range(4)                 # what a wait comes to


@compiled_lean
def push_request(requests, plan_control, control, words, request):  # type: ignore[no-untyped-def]
    """Append to the request ring (the caller holds the store's lock; the ring has room for every batch) and wake the planner."""
    tail = plan_control[C_REQUEST_TAIL]
    requests[tail & (requests.shape[0] - 1)] = request
    atomic_store(plan_control, C_REQUEST_TAIL, tail + 1)
    fence()
    if atomic_load(control, PLANNER_ASLEEP) != 0 and atomic_exchange(control, PLANNER_ASLEEP, np.int64(0)) != 0:
        atomic_add(words, PLANNER_WORD, np.int32(1))
        futex_wake(words, PLANNER_WORD, 1)


@compiled_lean
def free_row(batch_words, line, start):  # type: ignore[no-untyped-def]
    """A batch row that is FREE, looked for from row `start` on; -1: none."""
    rows = batch_words.shape[0] // line
    for k in range(rows):
        row = (start + k) % rows
        if atomic_load(batch_words, row * line + W_STAGE) == FREE_BATCH:
            return row
    return -1


@compiled_lean
def submit(requests, plan_control, control, words, batches, batch_layers, batch_words, line, row, ticket,  # type: ignore[no-untyped-def]
           tokens, flags, flag, slots, held, positions, window, priority):
    """Fill a FREE row and hand it to the planner. tokens and slots int32, flags uint8, held int32: they live until the row is FREE
    again; `flag`: the address of the word that says that the tokens are there, 0: they are."""
    batch = batches[row]
    batch.ticket = ticket
    batch.tokens = address_of(tokens, 0)
    batch.flags = address_of(flags, 0)
    batch.flag = flag
    batch.slots = address_of(slots, 0)
    batch.held = address_of(held, 0)
    batch.flat = tokens.shape[0]
    batch.positions = positions
    batch.window = window
    batch.priority = priority
    batch.released = 0
    layers = batch_layers.shape[0] // batches.shape[0]
    for layer in range(row * layers, (row + 1) * layers):
        batch_layers[layer].word = 0
        batch_layers[layer].expected = 0
    batch.taken_ns = batch.planned_ns = batch.published_ns = batch.busy_ns = 0
    batch.probes = batch.misses = batch.joined = batch.reads = 0
    batch.submitted_ns = now_ns()
    for k in range(W_ERROR, line):
        batch_words[row * line + k] = 0
    atomic_store(batch_words, row * line + W_STAGE, np.int32(SUBMITTED))
    push_request(requests, plan_control, control, words, np.int32(row * 2 + SUBMIT))


@compiled_lean
def hand_back(requests, plan_control, control, words, row):  # type: ignore[no-untyped-def]
    """Release a batch. The words of the gathers that were launched for it stand in its LAYER records by now."""
    push_request(requests, plan_control, control, words, np.int32(row * 2 + RELEASE))


@compiled_lean
def outcome(batch_words, base, layer):  # type: ignore[no-untyped-def]
    """What a layer of the batch has come to, TIMED_OUT: nothing yet."""
    state = atomic_load(batch_words, base + W_LAYER + layer)
    if state != 0:
        return np.int64(state)                               # LAYER_READY = READY, LAYER_FAILED = FAILED
    if atomic_load(batch_words, base + W_ERROR) != NO_ERROR:
        return np.int64(REFUSED)
    return np.int64(TIMED_OUT)


@compiled_lean
def wait_layer(batch_words, base, layer, timeout_ns, spin_ns):  # type: ignore[no-untyped-def]
    """Wait until a layer is ready or failed or the batch refused, at most `timeout_ns`; spin for `spin_ns`, then sleep."""
    begin = now_ns()
    while True:
        sequence = atomic_load(batch_words, base + W_SEQUENCE)
        result = outcome(batch_words, base, layer)
        if result != TIMED_OUT:
            return result
        waited = now_ns() - begin
        if waited >= timeout_ns:
            return np.int64(TIMED_OUT)
        if waited < spin_ns:
            continue
        atomic_add(batch_words, base + W_SLEEPERS, np.int32(1))
        fence()
        futex_wait(batch_words, base + W_SEQUENCE, sequence, timeout_ns - waited)
        atomic_add(batch_words, base + W_SLEEPERS, np.int32(-1))
        if now_ns() - begin < timeout_ns and atomic_load(batch_words, base + W_SEQUENCE) == sequence:
            return outcome(batch_words, base, layer)         # a signal: let Python look at it


@compiled_lean
def hurry(flag, ticket, control, words, spin_ns):  # type: ignore[no-untyped-def]
    """Spin until the tokens that a GPU sends are there (the word at `flag` is the ticket), at most `spin_ns`; then wake the planner.

    The planner looks for such words now and then only, so that it need not spin itself; who waits for the batch anyway looks for it.
    Whether they came.
    """
    begin = now_ns()
    while atomic_load_at(flag) != ticket:
        if now_ns() - begin >= spin_ns:
            return False
    if atomic_load(control, PLANNER_ASLEEP) != 0 and atomic_exchange(control, PLANNER_ASLEEP, np.int64(0)) != 0:
        atomic_add(words, PLANNER_WORD, np.int32(1))
        futex_wake(words, PLANNER_WORD, 1)
    return True


@compiled_lean
def wait_free(batch_words, base, timeout_ns):  # type: ignore[no-untyped-def]
    """Wait until the batch's row is FREE. Whether it is."""
    begin = now_ns()
    while atomic_load(batch_words, base + W_STAGE) != FREE_BATCH:
        sequence = atomic_load(batch_words, base + W_SEQUENCE)
        waited = now_ns() - begin
        if waited >= timeout_ns:
            return False
        atomic_add(batch_words, base + W_SLEEPERS, np.int32(1))
        fence()
        if atomic_load(batch_words, base + W_STAGE) != FREE_BATCH:
            futex_wait(batch_words, base + W_SEQUENCE, sequence, timeout_ns - waited)
        atomic_add(batch_words, base + W_SLEEPERS, np.int32(-1))
    return True


@compiled_lean
def wait_for_copies(plan_control, control, words, launched, timeout_ns):  # type: ignore[no-untyped-def]
    """For the copier: the number of the newest list of copies, once it is above `launched` or STOP or the time is up."""
    word = atomic_load(words, COPIER_WORD)
    requested = atomic_load(plan_control, C_COPY_REQUESTED)
    if requested == launched and atomic_load(control, STOP) == 0:
        futex_wait(words, COPIER_WORD, word, timeout_ns)
        requested = atomic_load(plan_control, C_COPY_REQUESTED)
    return requested
