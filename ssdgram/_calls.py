"""The caller's side of the planner, compiled: hand in a batch, hand it back, wait for a layer. Run by any Python thread, GIL-free.

They pass the address of what `_kept.keep` wrote down, or single arrays: to take a tuple of forty arrays apart costs more than the
work.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import (SYS_SCHED_YIELD, address_of, atomic_add, atomic_load, atomic_load_at, atomic_store, compiled_inner,
                               compiled_lean, fence, futex_wait, now_ns, syscall, view_i32, view_i64, view_u8)
from ssdgram._kept import PLAN_AT, plan_at, state_at
from ssdgram._plan_state import (C_COPY_REQUESTED, C_LONG_SLEEP, C_QUEUES, C_REQUEST_TAIL, FREE_BATCH, NO_ERROR, PP_BATCH_LINE,
                                 PP_LAYERS, PP_ORDERS, PP_VOCABULARY, RELEASE, SUBMIT, SUBMITTED, W_ERROR, W_LAYER, W_SEQUENCE,
                                 W_SLEEPERS, W_STAGE)
from ssdgram._state import COPIER_WORD, STOP
from ssdgram.kernels.hash import check_tokens
from ssdgram.queues._handoff import wake_planner

TIMED_OUT, READY, FAILED, REFUSED = range(4)                 # what a wait comes to
NO_ROW, BAD_ID = -1, -2                                      # what the look for a batch row comes to, if not to a row
F_SLOTS, F_NUMBERS, F_WORDS, F_USED, F_POSITIONS, F_NUMBER, F_COUNT = range(7)           # what a frame writes down


@compiled_inner
def push_request(plan, request):  # type: ignore[no-untyped-def]
    """Append to the request ring: the caller holds the store's lock, and the ring has room for every batch."""
    tail = plan.control[C_REQUEST_TAIL]
    plan.requests[tail & (plan.requests.shape[0] - 1)] = request
    atomic_store(plan.control, C_REQUEST_TAIL, tail + 1)


@compiled_lean
def ring(kept):  # type: ignore[no-untyped-def]
    """Wake the planner's thread if it sleeps. To be called behind whatever it is to see."""
    wake_planner(state_at(kept))


@compiled_lean
def free_row(kept, tokens, flags):  # type: ignore[no-untyped-def]
    """The first batch row that is FREE; NO_ROW: none. BAD_ID - k: flat token k takes part, and is none of the vocabulary's.

    tokens int32 [N], flags uint8 [N]: those that are on the host, for what a GPU sends is checked when it is there.
    """
    plan = plan_at(kept + PLAN_AT)
    bad = check_tokens(tokens, flags, plan.params[PP_VOCABULARY])
    if bad >= 0:
        return BAD_ID - bad
    for row in range(plan.batches.shape[0]):
        if atomic_load(plan.words, row * plan.params[PP_BATCH_LINE] + W_STAGE) == FREE_BATCH:
            return row
    return NO_ROW


@compiled_lean
def submit(kept, row, ticket, tokens, flags, flag, slots, held, positions, window, priority, wake):  # type: ignore[no-untyped-def]
    """Fill a FREE row and hand it to the planner. tokens int32 [N], flags uint8 [N], slots int32 [L, T, orders], held int32
    [L, T * orders]: they live until the row is FREE again; `flag`: the address of the word that says that the tokens are there,
    0: they are. `wake`: False if the caller is going to plan it here (_planner.plan_here)."""
    plan = plan_at(kept + PLAN_AT)
    batch = plan.batches[row]
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
    layers, line = plan.params[PP_LAYERS], plan.params[PP_BATCH_LINE]
    for layer in range(row * layers, (row + 1) * layers):
        plan.layers[layer].word = 0
        plan.layers[layer].expected = 0
        plan.gpu_words[layer] = 0                            # those of the row's last batch have arrived
    batch.taken_ns = batch.planned_ns = batch.published_ns = batch.busy_ns = 0
    batch.probes = batch.misses = batch.joined = batch.reads = 0
    batch.submitted_ns = now_ns()
    for k in range(W_ERROR, line):
        plan.words[row * line + k] = 0
    atomic_store(plan.words, row * line + W_STAGE, np.int32(SUBMITTED))
    push_request(plan, np.int32(row * 2 + SUBMIT))
    if wake:
        wake_planner(state_at(kept))


@compiled_lean
def hand_back(kept, row):  # type: ignore[no-untyped-def]
    """Release a batch. The words of the gathers that were launched for it stand in its LAYER records by now.

    A wake-up costs more than all the rest of a decode step here, so a planner that looks again soon anyway is left asleep unless
    some batch waits for slots.
    """
    plan = plan_at(kept + PLAN_AT)
    push_request(plan, np.int32(row * 2 + RELEASE))
    fence()
    if plan.control[C_LONG_SLEEP] != 0 or plan.control[C_QUEUES] >= 0 or plan.control[C_QUEUES + 2] >= 0:
        wake_planner(state_at(kept))


@compiled_lean
def release(kept, row, ticket):  # type: ignore[no-untyped-def]
    """`hand_back`, if the row is that batch's: one that was never submitted, or was handed back, may be another's by now. Whether it is."""
    if plan_at(kept + PLAN_AT).batches[row].ticket != ticket:
        return False
    hand_back(kept, row)
    return True


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
def all_ready(batch_words, base, layers):  # type: ignore[no-untyped-def]
    """Whether every layer of the batch is READY."""
    for layer in range(layers):
        if atomic_load(batch_words, base + W_LAYER + layer) != READY:
            return False
    return True


@compiled_lean
def frame_is_idle(words, used, number):  # type: ignore[no-untyped-def]
    """Whether the gathers of a frame's last launch have stored its number: words int64 [L], used uint8 [L]."""
    for layer in range(len(words)):
        if used[layer] != 0 and atomic_load(words, layer) != number:
            return False
    return True


@compiled_lean
def load_frame(batch_layers, row, slots, frame_slots, numbers, words, used, number):  # type: ignore[no-untyped-def]
    """Put a batch's slots, int32 [L, T, orders], into a frame's, [L, most, orders], -1 beyond; have the planner wait for the number
    in the frame's words before it gives them back."""
    layers, positions, orders = slots.shape
    for layer in range(layers):
        for t in range(positions):
            for order in range(orders):
                frame_slots[layer, t, order] = slots[layer, t, order]
        for t in range(positions, frame_slots.shape[1]):
            for order in range(orders):
                frame_slots[layer, t, order] = -1
        numbers[layer] = number
        if used[layer] != 0:
            batch_layers[row * layers + layer].word = address_of(words, layer)
            batch_layers[row * layers + layer].expected = number


@compiled_inner
def give_way():  # type: ignore[no-untyped-def]
    """Between two looks of a spin: whoever is waited for may be waiting for this very CPU, where the wake-up put it."""
    syscall(SYS_SCHED_YIELD, 0, 0, 0, 0, 0, 0)


@compiled_lean
def load_ready(kept, row, frame):  # type: ignore[no-untyped-def]
    """Load a batch into a frame if it fits and neither is waited for: all layers are READY, the last launch has ended. Whether it was.

    frame: int64, what `Frame` wrote down: the addresses of its slots, numbers, words and used, its positions, its last number.
    """
    plan = plan_at(kept + PLAN_AT)
    layers, orders, positions = plan.params[PP_LAYERS], plan.params[PP_ORDERS], plan.batches[row].positions
    words, used = view_i64(frame[F_WORDS], layers), view_u8(frame[F_USED], layers)
    if positions > frame[F_POSITIONS]:
        return False
    if not all_ready(plan.words, row * plan.params[PP_BATCH_LINE], layers) or not frame_is_idle(words, used, frame[F_NUMBER]):
        return False
    frame[F_NUMBER] += 1
    load_frame(plan.layers, row, view_i32(plan.batches[row].slots, layers * positions * orders).reshape(layers, positions, orders),
               view_i32(frame[F_SLOTS], layers * frame[F_POSITIONS] * orders).reshape(layers, frame[F_POSITIONS], orders),
               view_i64(frame[F_NUMBERS], layers), words, used, frame[F_NUMBER])
    return True


@compiled_lean
def wait_layer(batch_words, base, layer, timeout_ns, spin_ns, counted):  # type: ignore[no-untyped-def]
    """Wait until a layer is ready or failed or the batch refused, at most `timeout_ns`; spin for `spin_ns`, then sleep. `counted`: a
    sleeper is counted here already, once and for all (over words of a server's, which are mapped read-only)."""
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
            give_way()
            continue
        if not counted:
            atomic_add(batch_words, base + W_SLEEPERS, np.int32(1))
            fence()
        futex_wait(batch_words, base + W_SEQUENCE, sequence, timeout_ns - waited)
        if not counted:
            atomic_add(batch_words, base + W_SLEEPERS, np.int32(-1))
        if now_ns() - begin < timeout_ns and atomic_load(batch_words, base + W_SEQUENCE) == sequence:
            return outcome(batch_words, base, layer)         # a signal: let Python look at it


@compiled_lean
def hurry(flag, ticket, spin_ns):  # type: ignore[no-untyped-def]
    """Spin until the tokens that a GPU sends are there (the word at `flag` is the ticket), at most `spin_ns`.

    The planner looks for such words now and then only, so that it need not spin itself; who waits for the batch anyway looks for it.
    Whether they came.
    """
    begin = now_ns()
    while atomic_load_at(flag) != ticket:
        if now_ns() - begin >= spin_ns:
            return False
        give_way()
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
