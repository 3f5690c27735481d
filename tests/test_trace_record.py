"""Recordings of a running store: what was asked, in its batches; bounded; anonymous when asked; whole or not there."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ssdgram
from ssdgram.errors import ConfigError
from ssdgram.store import VARIABLE
from ssdgram.tools.trace import NO_PART, Trace
from ssdgram.tools.trace_record import sip_hash
from ssdgram.tools.trace_shapes import recorded, recorded_requests, requests


def ask(store, *sequences, priority="step"):
    with store.prefetch(list(sequences), priority) as batch:
        batch.wait()


def some(store):
    """Three batches: two sequences, one of them with lookback and a token that takes no part; one; one more."""
    ask(store, ssdgram.Sequence([5, 6, 7]), ssdgram.Sequence([-3, 9, 10], participates=[False, True, True], lookback=[1, 2, 3, 4, 5]))
    ask(store, ssdgram.Sequence([11], lookback=[9, 10]), priority="background")
    ask(store, ssdgram.Sequence([5, 6, 7]))


def test_a_recording_is_what_was_asked_in_its_batches(engram, served, tmp_path):
    store = served(engram)
    ask(store, ssdgram.Sequence([50, 51]))                   # before it: not in it
    recorder = store.record(tmp_path / "live.trace")
    some(store)
    store.warm(ssdgram.Sequence([60, 61]))                   # nobody waits for it: not in it
    assert recorder.stop() == tmp_path / "live.trace"
    ask(store, ssdgram.Sequence([70]))
    trace = Trace.load(tmp_path / "live.trace")
    assert trace.batches.tolist() == [0, 2, 3, 4] and trace.lookback.tolist() == [0, 3, 2, 0]
    assert trace.tokens.tolist() == [5, 6, 7, 3, 4, 5, NO_PART, 9, 10, 9, 10, 11, 5, 6, 7] and trace.positions == 10
    again = recorded(trace)
    asked = requests(again, engram.geometry, engram.token_map)
    keys = [engram.geometry.keys(tokens, engram.token_map, **context)[:, 0] for tokens, context in (
        ([5, 6, 7], {}), ([0, 9, 10], {"participates": [False, True, True], "lookback": [3, 4, 5]}), ([11], {"lookback": [9, 10]}),
        ([5, 6, 7], {}))]
    assert (asked.x.reshape(-1, 3) == np.concatenate(keys)).all() and asked.bounds.tolist() == [0, 18, 21, 30]


def test_keys_say_what_is_equal_and_nothing_else(engram, served, tmp_path):
    store, found = served(engram), []
    for name in ("a", "b"):
        recorder = store.record(tmp_path / name, keys=True)
        some(store)
        trace = Trace.load(recorder.stop())
        assert trace.kind == "keys" and len(trace.tokens) == 0 and trace.batches.tolist() == [0, 2, 3, 4]
        assert trace.starts.tolist() == [0, 3, 6, 7, 10] and trace.lookback.tolist() == [0, 3, 2, 0]
        found.append(trace.keys)
    assert not np.isin(found[0], found[1]).any(), "another secret each time"
    plain = np.concatenate([engram.geometry.keys([5, 6, 7], engram.token_map)[:, 0],
                            engram.geometry.keys([0, 9, 10], engram.token_map, [False, True, True], [3, 4, 5])[:, 0],
                            engram.geometry.keys([11], engram.token_map, lookback=[9, 10])[:, 0],
                            engram.geometry.keys([5, 6, 7], engram.token_map)[:, 0]])
    for keys in found:
        assert not np.isin(keys, plain).any() and (keys >= 0).all()
        for order in range(3):
            assert len(set(zip(keys[:, order].tolist(), plain[:, order].tolist()))) == len(set(plain[:, order].tolist()))
    assert recorded_requests(trace).bounds.tolist() == [0, 18, 21, 30]


def test_tokens_of_a_gpu_are_recorded_when_their_batch_is_released(engram, served, tmp_path):
    """As the planner sees such a batch: its flag is the address of a word in which the GPU stores the ticket behind the tokens."""
    store = served(engram)
    batch = store.prefetch([5, 6, 7])
    batch.wait()
    recorder = store.record(tmp_path / "live.trace")
    word = store._plan.token_words[batch._row:batch._row + 1]
    word[0] = batch.ticket
    store._plan.batches["flag"][batch._row] = word.ctypes.data
    batch.release()
    assert Trace.load(recorder.stop()).tokens.tolist() == [5, 6, 7]


def test_the_limit_ends_the_recording_and_writes_it(engram, served, tmp_path):
    store = served(engram)
    recorder = store.record(tmp_path / "live.trace", limit=8)
    for first in range(10, 40, 3):
        ask(store, ssdgram.Sequence([first, first + 1, first + 2]))
    assert recorder.full
    trace = Trace.load(recorder.stop())
    assert trace.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    store.record(tmp_path / "next.trace")                    # a full one is in nobody's way
    store.close()
    assert Trace.load(tmp_path / "next.trace").positions == 0


def test_close_writes_the_recording(engram, served, tmp_path):
    store = served(engram)
    store.record(tmp_path / "live.trace")
    some(store)
    store.close()
    assert Trace.load(tmp_path / "live.trace").positions == 10 and sorted(os.listdir(tmp_path)) == ["live.trace"]


def test_a_recording_that_cannot_be_written_costs_itself(engram, served, tmp_path):
    store = served(engram)
    recorder = store.record(tmp_path / "absent" / "live.trace")
    some(store)
    with pytest.raises(OSError, match="absent"):
        recorder.stop()
    store.close()


def test_two_recordings_at_once_are_refused(engram, served, tmp_path):
    store = served(engram)
    store.record(tmp_path / "live.trace")
    with pytest.raises(ConfigError, match=r"being recorded to .*live\.trace"):
        store.record(tmp_path / "other.trace")
    for limit in (0, 1 << 40):
        with pytest.raises(ConfigError, match=r"expected 1 \.\."):
            served(engram).record(tmp_path / "other.trace", limit=limit)


def test_threads_record_whole_batches(engram, served, tmp_path):
    store = served(engram)
    recorder = store.record(tmp_path / "live.trace")

    def work(number):
        for k in range(40):
            ask(store, ssdgram.Sequence([70 * number + 10, 70 * number + k + 11]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = Trace.load(recorder.stop()).tokens.reshape(-1, 2)
    assert sorted(map(tuple, pairs.tolist())) == sorted((70 * n + 10, 70 * n + k + 11) for n in range(4) for k in range(40))


@pytest.fixture
def variable(monkeypatch):
    return lambda text: monkeypatch.setenv(VARIABLE, text)


def test_the_environment_starts_recordings(engram, served, tmp_path, variable):
    variable(f"1000:tokens:{tmp_path / 'live.trace'}")
    for first in (5, 6):
        store = served(engram)
        ask(store, ssdgram.Sequence([first]))
        store.close()
    assert sorted(os.listdir(tmp_path)) == ["live-1.trace", "live.trace"]
    assert [Trace.load(tmp_path / name).tokens.tolist() for name in ("live.trace", "live-1.trace")] == [[5], [6]]


@pytest.mark.parametrize("text", ["x", "x:tokens:/p", "10:words:/p", "10:keys:"])
def test_an_environment_that_says_something_else_is_refused(engram, variable, text):
    variable(text)
    with pytest.raises(ConfigError, match="SSDGRAM_TRACE_RECORD"):
        engram.open()


# ---------------------------------------------------------------- SipHash

ALL = 2**64 - 1


def plain_sip(key, data):
    """SipHash-2-4 of bytes, as its paper defines it."""
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    v = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D, low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]

    def turn(value, by):
        return (value << by | value >> 64 - by) & ALL

    def rounds(count):
        for _ in range(count):
            v[0] = v[0] + v[1] & ALL
            v[1] = turn(v[1], 13) ^ v[0]
            v[0] = turn(v[0], 32)
            v[2] = v[2] + v[3] & ALL
            v[3] = turn(v[3], 16) ^ v[2]
            v[0] = v[0] + v[3] & ALL
            v[3] = turn(v[3], 21) ^ v[0]
            v[2] = v[2] + v[1] & ALL
            v[1] = turn(v[1], 17) ^ v[2]
            v[2] = turn(v[2], 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 255])
    for k in range(0, len(padded), 8):
        word = int.from_bytes(padded[k:k + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 255
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_the_plain_twin_is_siphash():
    assert plain_sip(bytes(range(16)), bytes(range(15))) == 0xA129CA6149BE45E5     # the paper's own vector


@settings(deadline=None)
@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_the_compiled_hash_is_siphash(key, data):
    words = [np.uint64(int.from_bytes(text[k:k + 8], "little")) for text in (key, data) for k in (0, 8)]
    assert int(np.uint64(sip_hash(*words))) & ALL == plain_sip(key, data)
