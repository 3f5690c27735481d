"""What a client writes into its share is believed by nobody: bad numbers put the client out, and harm neither server nor others."""

import types

import numpy as np
import pytest
from made_stores import assert_served, nobody_plans, until
from served_stores import serving

import ssdgram
from ssdgram import _plan_state as p
from ssdgram._compiled import compiled_lean
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS
from ssdgram.serve import desk, share

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def server(engram, tmp_path_factory):
    with serving(engram, tmp_path_factory.mktemp("d")) as server:
        yield server


@pytest.fixture
def good(engram, server):
    """Another client, in the middle of things; what it has is right at the end, whatever happened."""
    with ssdgram.attach(server.path) as store:
        batch = store.prefetch(engram.tokens(50, 77))
        yield store
        with batch:
            assert_served(engram, store, batch, engram.tokens(50, 77))
        with store.prefetch(engram.tokens(20, 78)) as batch:
            assert_served(engram, store, batch, engram.tokens(20, 78))


def push(store, kind=share.TAKE_SEAT, row=0, ticket=1, flat=4, positions=4, window=0, priority=0, device=0):
    share.push(store._board, store._requests, store._bell, store._plan.control, kind, row, ticket, flat, positions, window, priority,
               device)


def put_out(server, store):
    """The client is told, and gets its typed error from then on."""
    assert until(lambda: store._board[share.B_STATE] not in (share.SERVING, share.REPLACED))
    for call in (lambda: store.prefetch([1]), store.stats, lambda: store.warm([1])):
        with pytest.raises(ssdgram.ServerDiedError, match="put this process out"):
            call()
    assert until(lambda: server.attached == 1)
    store.close()


BIG = (1 << 62, (1 << 63) - 1, -1, -(1 << 63))


@pytest.mark.parametrize("changes", [
    {"kind": 0}, {"kind": 3}, {"kind": -1}, {"row": 8}, {"row": -1}, {"row": 1 << 40}, {"ticket": 0}, {"ticket": -1}, {"flat": -1},
    {"flat": 2048 * 4 + 1}, {"flat": 1 << 40}, {"positions": 5}, {"positions": -1}, {"flat": 2049, "positions": 2049}, {"window": -1},
    {"priority": 2}, {"priority": -1}, {"positions": 3}, {"kind": share.LEAVE_SEAT, "row": 8}, {"kind": share.LEAVE_SEAT, "row": -1},
    *({name: value} for name in ("kind", "row", "flat", "positions", "priority") for value in BIG), {"window": -(1 << 63)},
])
def test_numbers_that_cannot_be(engram, server, good, changes):
    store = ssdgram.attach(server.path)
    store._tokens[0, :4] = 1
    store._flags[0, :4] = PARTICIPATES | OUTPUT
    refused = int(server._desk.control[desk.D_REFUSED])
    push(store, **changes)
    put_out(server, store)
    assert server._desk.control[desk.D_REFUSED] == refused + 1


def test_a_window_of_any_length(engram, server, good):
    with ssdgram.attach(server.path) as store:
        store._tokens[0, :4] = 1
        store._flags[0, :4] = PARTICIPATES | OUTPUT
        push(store, window=(1 << 63) - 1)
        store._last[0] = 1
        assert until(lambda: store._seats[share.SEAT_DONE] == 1)
    assert until(lambda: server.attached == 1)


def test_a_seat_that_is_taken(engram, server, good):
    store = ssdgram.attach(server.path)
    store._flags[0, :4] = PARTICIPATES | OUTPUT
    push(store)
    push(store, ticket=2)
    put_out(server, store)


@pytest.mark.parametrize("tail", [-1, -(1 << 63), 1000, (1 << 63) - 1])
def test_a_tail_that_cannot_be(engram, server, good, tail):
    store = ssdgram.attach(server.path)
    store._board[share.B_TAIL] = tail
    share.ring(store._bell)
    put_out(server, store)


@pytest.mark.parametrize("index", [-1, (8 + share.FRAMES) * 2, 1 << 60])
def test_a_gpu_word_that_there_is_not(engram, server, good, index):
    store = ssdgram.attach(server.path)
    batch = store.prefetch(engram.tokens(5))
    batch.wait()
    store._expected[:2] = index, 1
    batch.release()
    put_out(server, store)


def test_releases_that_mean_nothing(engram, server, good):
    with ssdgram.attach(server.path) as store:
        for ticket in (0, 1, 99, -5):
            push(store, share.LEAVE_SEAT, 3, ticket)
        with store.prefetch(engram.tokens(5)) as batch:
            push(store, share.LEAVE_SEAT, 0, batch.ticket + 1)
            assert_served(engram, store, batch, engram.tokens(5))
        batch.release()
        push(store, share.LEAVE_SEAT, 0, batch.ticket)
        with store.prefetch(engram.tokens(6)) as batch:
            assert_served(engram, store, batch, engram.tokens(6))
    assert until(lambda: server.attached == 1)


def test_tokens_that_were_never_checked(engram, server, good):
    """Ids beyond the vocabulary that a broken client hands over: its batch is refused, nothing is looked up with them."""
    store = ssdgram.attach(server.path)
    for token in (-1, engram.vocabulary, 2**31 - 1, -(2**31)):
        tokens, flags = np.array([1, token, 3], np.int32), np.full(3, PARTICIPATES | OUTPUT, np.uint8)
        with store._lock:
            row = store._free_seat()
            store._tokens[row, :3], store._flags[row, :3] = tokens, flags
            store._push(row, 3, 3, "step", 0)
            store._unreleased.add(row)
        batch = ssdgram.serve.client.AttachedBatch(store, row, store._tickets, 3, (tokens, flags))
        with batch, pytest.raises(ssdgram.TokenError, match="a vocabulary of"):
            batch.wait()
    store.close()
    assert until(lambda: server.attached == 1)


def test_flags_and_tokens_that_change_meanwhile(engram, server, good):
    """Any flags: their unknown bits mean nothing, the first token starts. What is written after the push is not looked at."""
    with ssdgram.attach(server.path) as store:
        tokens = engram.tokens(6)
        with store._lock:
            row = store._free_seat()
            store._tokens[row, :6], store._flags[row, :6] = tokens, 0xF8 | PARTICIPATES | OUTPUT
            store._push(row, 6, 6, "step", 0)
            store._unreleased.add(row)
        assert until(lambda: store._seats[row * share.SEAT_LINE + share.SEAT_TICKET] == store._tickets)
        store._tokens[row] = 2**31 - 1
        store._flags[row] = STARTS
        with ssdgram.serve.client.AttachedBatch(store, row, store._tickets, 6, (tokens, tokens)) as batch:
            assert_served(engram, store, batch, tokens)
    assert until(lambda: server.attached == 1)


def test_a_seats_words_start_from_nothing(engram, server, good, monkeypatch):
    """What a client's GPU stored behind the gathers of the seat's last batch is not taken for this one's. Its GPU is a stand-in."""
    with ssdgram.attach(server.path) as store:
        store._plan.gpu_words[:] = 7
        with monkeypatch.context() as patched:
            patched.setattr(store, "_cuda", types.SimpleNamespace(
                plan_memory=lambda row, shape: (None, torch.zeros(shape, dtype=torch.int32))))
            batch = store.prefetch(engram.tokens(4, 5))
        words = store._plan.gpu_words.reshape(-1, len(store.layers))
        assert (words[batch._row] == 0).all() and (np.delete(words, batch._row, 0) == 7).all()
        with batch:
            assert_served(engram, store, batch, engram.tokens(4, 5))


def test_tokens_that_change_while_they_are_planned(engram, server, good):
    """A client that scribbles over tokens it has handed over gets the rows of what it handed over, whenever they are planned."""
    with ssdgram.attach(server.path) as store:
        tokens = engram.tokens(800, 8)
        with nobody_plans(server.store):
            batch = store.prefetch(tokens)
            assert share.wait_seated(store._seats, store._seat_words, batch._row, batch.ticket, 10**10, 10**10) > 0  # it was taken
            store._tokens[batch._row, :800] = 1
        with batch:
            assert_served(engram, store, batch, tokens)
    assert until(lambda: server.attached == 1)


def test_everything_a_client_may_write_overwritten(engram, server, good):
    """Random words all over the share and the bell, again and again: the client is put out, the others are not."""
    generator = np.random.default_rng(5)
    for _ in range(20):
        assert until(lambda: server.attached <= 2)           # those before it are put out a moment later
        store = ssdgram.attach(server.path)
        for seed in range(4):
            store.prefetch(engram.tokens(9, seed))._disown()
        memory = store._share.memory
        for _ in range(5):
            place = generator.integers(0, min(len(memory), 1 << 16), 2000)
            memory[place] = generator.integers(0, 256, 2000, np.uint8)
            store._bell[:] = generator.integers(-100, 100, len(store._bell))
        store._connection.close()
        store._closed = True
        ssdgram.store._open_stores.discard(store)
    assert until(lambda: server.attached == 1)


@compiled_lean
def refused(rows, client):
    """`desk.refuse`, which compiled code alone calls."""
    desk.refuse(rows, client)


@pytest.mark.parametrize(("state", "after"), [(desk.LIVE, desk.BROKEN), (desk.LEAVING_NOW, desk.LEAVING_NOW),
                                              (desk.DRAINING, desk.DRAINING)])
def test_a_client_that_is_on_its_way_out_goes_on(server, state, after):
    """Its socket may end while the desk looks at its requests: the desk's word is not to undo the server's."""
    states, control = np.zeros_like(server._desk.states), np.zeros_like(server._desk.control)
    states[16] = state
    refused(server._desk._replace(states=states, control=control), 1)
    assert states[16] == after and control[desk.D_REFUSED] == 1


def test_gpu_words_are_awaited(engram, server, good):
    """A word that has not arrived keeps the batch's slots, and its seat, until it does."""
    with ssdgram.attach(server.path) as store:
        batch = store.prefetch(engram.tokens(10, 5))
        batch.wait()
        in_use = store.stats().slots_in_use
        store._expected[:4] = 0, 3, 1, 2
        batch.release()
        seat = server._desk.seats[batch._row + server._desk.params[desk.DP_ROWS] * store_index(server, store)]
        assert until(lambda: seat["stage"] == desk.LEAVING)
        store._arrays["gpu_words"][0] = 3
        assert not until(lambda: seat["stage"] != desk.LEAVING, 0.1)
        assert store.stats().slots_in_use == in_use
        store._arrays["gpu_words"][1] = 2
        assert until(lambda: seat["stage"] == desk.EMPTY)
        assert until(lambda: store.stats().slots_in_use < in_use)
        store._expected[:4] = 0
    assert until(lambda: server.attached == 1)


def test_the_words_that_a_release_names():
    """LAYER records hold addresses; what goes into the share are the words' numbers."""
    layers, words, expected = np.zeros(6, p.LAYER), np.zeros(20, np.int64), np.full(12, 99, np.int64)
    layers["word"][2:4] = words.ctypes.data + 8 * 5, 0
    layers["expected"][2:4] = 7, 8
    share.name_words(layers, 2, 2, expected, words)
    assert expected.tolist() == [99] * 4 + [5, 7, 0, 0] + [99] * 4


def store_index(server, store):
    """The place of an attached store among the server's clients."""
    return (store._first - 1) // store._rows


def test_tokens_that_a_gpu_brings_are_awaited(engram, server, good):
    with ssdgram.attach(server.path) as store:
        tokens = engram.tokens(7, 6)
        with store._lock:
            row = store._free_seat()
            store._flags[row, :7] = PARTICIPATES | OUTPUT
            store._tickets += 1
            store._last[row] = store._tickets
            push(store, row=row, ticket=store._tickets, flat=7, positions=7, device=1)
            store._unreleased.add(row)
        batch = ssdgram.serve.client.AttachedBatch(store, row, store._tickets, 7, (tokens, tokens))
        batch._flag = store._plan.token_words.ctypes.data + 8 * row
        with pytest.raises(ssdgram.ReadTimeoutError, match="has not taken the batch"):
            batch.wait(timeout_s=0.1)
        store._tokens[row, :7] = tokens
        store._arrays["token_words"][row] = store._tickets
        with batch:
            assert_served(engram, store, batch, tokens)
        with store._lock:                                    # released before the tokens came: the seat waits for them
            row = store._free_seat()
            store._tickets += 1
            store._last[row] = store._tickets
            push(store, row=row, ticket=store._tickets, flat=7, positions=7, device=1)
            push(store, share.LEAVE_SEAT, row, store._tickets)
        assert not until(lambda: store._seats[row * share.SEAT_LINE + share.SEAT_DONE] == store._tickets, 0.1)
        store._arrays["token_words"][row] = store._tickets
        assert until(lambda: store._seats[row * share.SEAT_LINE + share.SEAT_DONE] == store._tickets)
    assert until(lambda: server.attached == 1)
