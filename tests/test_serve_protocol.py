"""Hello, welcome, questions: what is malformed, cut, oversized, of another version or another user is refused, by both sides."""

import array
import os
import socket
import struct
import threading

import numpy as np
import pytest
from made_stores import assert_served, until
from served_stores import serving

import ssdgram
from ssdgram import errors
from ssdgram._arena import Arena, Mapped
from ssdgram.serve import protocol, share

LAYOUT = share.layout_digest()
HELLO = protocol.hello(LAYOUT)


@pytest.fixture(scope="module")
def server(engram, tmp_path_factory):
    with serving(engram, tmp_path_factory.mktemp("p"), check=False) as server:
        yield server


def dial(server):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(20)
    connection.connect(str(server.path))
    return connection


def still_serves(server, made):
    with ssdgram.attach(server.path) as store, store.prefetch(made.tokens(10)) as batch:
        assert_served(made, store, batch, made.tokens(10))
    assert until(lambda: server.attached == 0)


# ---------------------------------------------------------------- hello, as the server sees it


@pytest.mark.parametrize(("data", "says"), [
    (b"x", "no hello"),
    (HELLO[:-1], "no hello"),
    (HELLO[:4], "no hello"),
    (b"SSDGRAX\0" + HELLO[8:], "no hello"),
    (b"SSDGRAM\0" + struct.pack("<IIII", 2, LAYOUT, 0, 0), "version 2, this server 1"),
    (b"SSDGRAM\0" + struct.pack("<IIII", 1, LAYOUT ^ 1, 0, 0), "install the same SSDGram"),
    (b"SSDGRAM\0" + struct.pack("<IIII", 1, LAYOUT, 1, 0), "reserved"),
    (b"SSDGRAM\0" + struct.pack("<IIII", 1, LAYOUT, 0, 1 << 31), "reserved"),
])
def test_bad_hellos_are_refused_in_words(server, engram, data, says):
    with dial(server) as connection:
        connection.send(data)
        with pytest.raises(ssdgram.UnavailableError, match=says):
            protocol.read_welcome(connection.recv(1 << 12), LAYOUT)
        assert connection.recv(1) == b""
    still_serves(server, engram)


@pytest.mark.parametrize("data", [HELLO + b"\0", bytes(1 << 16), b"S" * 5000])
def test_oversized_hellos_end_the_connection(server, engram, data):
    with dial(server) as connection:
        connection.send(data)
        assert connection.recv(1 << 12) == b""
    still_serves(server, engram)


def test_a_connection_that_says_nothing_is_closed(server, engram):
    with dial(server) as connection:
        assert connection.recv(1) == b""
    dial(server).close()
    still_serves(server, engram)


def test_descriptors_that_nobody_asked_for_are_not_kept(server, engram):
    before = set(os.listdir("/proc/self/fd"))
    reader, writer = os.pipe()
    with dial(server) as connection:
        socket.send_fds(connection, [HELLO], [writer] * 3)
        connection.recv(1)
    os.close(writer)
    assert os.read(reader, 1) == b"", "the server kept one open"
    os.close(reader)
    assert until(lambda: set(os.listdir("/proc/self/fd")) <= before)
    still_serves(server, engram)


def test_another_user_is_refused(server, engram, monkeypatch):
    real = protocol.peer
    monkeypatch.setattr(protocol, "peer", lambda connection: (real(connection)[0], os.geteuid() + 4711))
    with dial(server) as connection, pytest.raises(ssdgram.UnavailableError, match=r"user \d+ may not attach"):
        protocol.read_welcome(connection.recv(1 << 12), LAYOUT)
    with pytest.raises(ssdgram.UnavailableError, match="only the same user's, or root's"):
        ssdgram.attach(server.path)
    monkeypatch.undo()
    still_serves(server, engram)


def test_the_kernel_names_the_peer(server):
    with dial(server) as connection:
        assert protocol.peer(connection) == (os.getpid(), os.geteuid())
    assert protocol.may_speak(os.geteuid()) and protocol.may_speak(0) and not protocol.may_speak(os.geteuid() + 1)


# ---------------------------------------------------------------- questions


def attached(server):
    connection = dial(server)
    connection.send(HELLO)
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 12, 8)
    assert protocol.read_welcome(data, LAYOUT).rows == 8 and len(descriptors) == 4
    protocol.close_all(descriptors)
    return connection


@pytest.mark.parametrize("data", [
    b"?", protocol.QUESTION.pack(1, 1, 0, 0, 0.0)[:-1], protocol.QUESTION.pack(1, 1, 0, 0, 0.0) + b"\0", bytes(9000),
    protocol.QUESTION.pack(9, 1, 0, 0, 0.0), protocol.QUESTION.pack(2, 1, 8, 0, 0.0), protocol.QUESTION.pack(2, 1, -1, 0, 0.0),
    protocol.QUESTION.pack(2, 1, 1 << 62, 0, 0.0), protocol.QUESTION.pack(3, 1, 0, 2, 0.0), protocol.QUESTION.pack(3, 1, 0, -1, 0.0),
])
def test_bad_questions_end_the_connection(server, engram, data):
    with attached(server) as connection:
        connection.send(data)
        assert connection.recv(1 << 16) == b""
    still_serves(server, engram)


def test_questions_about_seats_that_are_empty(server, engram):
    with attached(server) as connection:
        for kind in (protocol.ASK_ERROR, protocol.ASK_TIMING):
            connection.send(protocol.QUESTION.pack(kind, 77, 7, 1, float("nan")))
            assert protocol.read_answer(connection.recv(1 << 16), kind, 77) is None
    still_serves(server, engram)


def test_a_client_that_reads_no_answers_is_put_out(server, engram):
    with attached(server) as connection:
        connection.setblocking(False)
        question = protocol.QUESTION.pack(protocol.ASK_STATS, 1, 0, 0, 0.0)

        def ended():
            try:
                connection.send(question)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        assert until(ended)
    still_serves(server, engram)


# ---------------------------------------------------------------- welcome, as the client sees it


@pytest.fixture
def impostor(tmp_path):
    """impostor(data, descriptors=()) answers one hello at a socket with that; the path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "i"))
    listener.listen(4)
    threads = []

    def start(data, descriptors=()):
        def act():
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                if data is not None:
                    socket.send_fds(connection, [data], list(descriptors))

        threads.append(threading.Thread(target=act))
        threads[-1].start()
        return tmp_path / "i"

    yield start
    for thread in threads:
        thread.join()
    listener.close()


GOOD = {"rows": 8, "first": 1, "layers": 2, "orders": 3, "positions": 64, "flat": 256, "about": 100, "batch_rows": 33, "line": 16,
        "store_bytes": 1 << 20, "words_at": 0, "control_at": 8192, "slab_at": 16384, "slots": 100, "stride": 320, "pid": 1}


def greeting(**changes):
    return protocol.welcome(LAYOUT, protocol.Welcome(**{**GOOD, **changes}))


@pytest.mark.parametrize("data", [
    None, b"no", greeting()[:-1], greeting() + b"\0", b"X" + greeting()[1:], bytes(10_000),
    protocol.WELCOME.pack(b"SSDGRAM\0", 2, LAYOUT, 0, 0, *[0] * 16), protocol.WELCOME.pack(b"SSDGRAM\0", 1, LAYOUT, 1, 9, *[0] * 16),
    greeting(rows=0), greeting(rows=-1), greeting(rows=1 << 40), greeting(first=0), greeting(first=30), greeting(layers=0),
    greeting(orders=1 << 50), greeting(positions=1 << 60), greeting(flat=63), greeting(about=-5), greeting(batch_rows=8),
    greeting(line=1 << 30), greeting(words_at=-4096), greeting(words_at=1 << 20), greeting(slab_at=100), greeting(slab_at=(1 << 20) - 4096),
    greeting(slots=1 << 40), greeting(stride=0), greeting(store_bytes=-1), greeting(control_at=1 << 62),
    greeting(),                                              # right numbers, and none of the descriptors
])
def test_bad_welcomes(impostor, data):
    before = len(os.listdir("/proc/self/fd"))
    path = impostor(data)
    with pytest.raises(ssdgram.UnavailableError):
        ssdgram.attach(path, timeout_s=5)
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize("which", ["pipe", "short", "unsealed", "nonsense", "too many"])
def test_bad_descriptors(impostor, which):
    numbers = protocol.Welcome(**GOOD)
    specs = share.share_specs(8, 2, 256, 100)
    arenas = [Arena([("store", np.uint8, (numbers.store_bytes,))]), Arena([("plans", np.int32, (33 * share.plan_words(2, 3, 64),))]),
              Arena(share.BELL_SPECS), Arena(specs)]
    descriptors = [arena.fd for arena in arenas]
    spare = []
    if which == "pipe":
        spare = list(os.pipe())
        descriptors[0] = spare[0]
    elif which == "short":
        arenas.append(Arena([("store", np.uint8, (4096,))]))
        descriptors[0] = arenas[-1].fd
    elif which == "unsealed":
        spare = [os.memfd_create("loose")]
        os.ftruncate(spare[0], numbers.store_bytes)
        descriptors[0] = spare[0]
    elif which == "too many":
        descriptors.append(descriptors[0])
    path = impostor(greeting(), descriptors)                 # "nonsense": the text that describes the store is zeros
    with pytest.raises(ssdgram.UnavailableError):
        ssdgram.attach(path, timeout_s=5)
    for number in spare:
        os.close(number)
    for arena in arenas:
        arena.close()


def test_no_answer_at_all(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "i"))
        listener.listen(1)
        with pytest.raises(ssdgram.UnavailableError, match="no answer within"):
            ssdgram.attach(tmp_path / "i", timeout_s=0.1)


def test_mapped_memory_is_what_was_sealed():
    arena = Arena([("a", np.int64, (1000,))])
    reader = arena.read_only()
    with pytest.raises(PermissionError):
        Mapped(reader, arena.size, writable=True)
    for change in (lambda: os.ftruncate(arena.fd, 0), lambda: os.ftruncate(arena.fd, arena.size * 2)):
        with pytest.raises(PermissionError):
            change()
    mapped = Mapped(reader, arena.size, writable=False)
    os.close(reader)
    arena["a"][7] = 42
    view = mapped.cut([("a", np.int64, (1000,))])["a"]
    del mapped
    assert view[7] == 42, "a view keeps the mapping"
    arena.close()


# ---------------------------------------------------------------- errors and statistics in words


@pytest.mark.parametrize("error", [
    errors.BatchTooLargeError(7, 5), errors.StoreBusyError("busy", [3, 4]),
    errors.ReadTimeoutError("late", layer=3, outstanding=7, age_s=0.5),
    errors.ReadError("bad", layer=1, file="f.rows", page=3, rows=[1, 2], positions=[0]), errors.TokenError("token"),
    errors.RowCheckError("check", layer=14, file="f.rows", page=0, rows=[9], positions=[]),
])
def test_errors_go_over_the_socket_whole(error):
    if type(error) is errors.ReadError:
        error.errno = 5
    there = protocol.error_from_json(protocol.read_answer(protocol.answer(2, 1, protocol.error_to_json(error)), 2, 1))
    assert type(there) is type(error) and str(there) == str(error)
    assert vars(there) == vars(error)
    assert getattr(there, "errno", None) == getattr(error, "errno", None)


def test_an_error_that_this_side_does_not_know():
    for kind in ("NoSuchError", "Exception", "array", "Sequence"):
        error = protocol.error_from_json({"error": kind, "text": "words"})
        assert type(error) is ssdgram.StoreError and str(error) == "words"


@pytest.mark.parametrize("data", [b"", b"\0" * 16, protocol.answer(1, 5, {})[:-1], protocol.answer(1, 6, {}), protocol.answer(2, 5, {})])
def test_bad_answers(data):
    with pytest.raises(ConnectionError):
        protocol.read_answer(data, 1, 5)


def test_receive_cuts_nothing():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        other.send(b"12345")
        assert protocol.receive(one, 5) == (b"12345", [])
        other.send(b"123456")
        with pytest.raises(ConnectionError, match="more than 5 bytes"):
            protocol.receive(one, 5)
        other.sendmsg([b"12345"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
        with pytest.raises(ConnectionError, match="1 descriptors"):
            protocol.receive(one, 5)
