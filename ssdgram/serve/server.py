"""The server of a store: one process that owns planner, readers and DRAM, and lets other processes of the node use them.

    with Server(out, "/run/ssdgram.sock", dram="64GiB") as server: ...         what `ssdgram serve` runs

One thread answers the socket (attaching, statistics, errors in words); the desk's thread takes what clients ask in shared memory.
A client that ends, however it ends, is put out: its batches go back once their reads have landed. It knows of a client what the
kernel says (its process, its user), and memory whose contents it does not believe.
The invariant: after the server is gone no byte of the slab changes, so what clients still read is what it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import selectors
import signal
import socket
import stat
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ssdgram import _plan_state as p
from ssdgram._arena import Arena, rounded
from ssdgram._calls import READY, outcome
from ssdgram._compiled import compile_for
from ssdgram.batch import Batch
from ssdgram.errors import ConfigError, StoreReplacedError, UnavailableError
from ssdgram.serve import desk as d
from ssdgram.serve import protocol, share
from ssdgram.stats import snapshot
from ssdgram.store import Store, Tuning

log = logging.getLogger("ssdgram")
TICK_S = 0.2
_servers: weakref.WeakSet[Server] = weakref.WeakSet()
HELLO_S = 2.0                                                # a connection that says nothing for so long is closed
MOST_PATH = 100                                              # bytes of a socket's path; the kernel takes 107


class ServedStore(Store):
    """A store whose batches are its clients'. When it is closed nothing is taken back from them: no slot is ever written again."""

    def _unwind(self, timeout_s: float) -> None:
        self._arena.keep_shared()


@dataclasses.dataclass(eq=False)
class _Client:
    """A connection; `index` >= 0 once it is attached."""

    connection: socket.socket
    pid: int
    since: float
    index: int = -1
    memory: Arena | None = None
    pidfd: int = -1


class Server:
    """An open server; also a context manager that closes it. `options`: those of `ssdgram.open` but device and hbm.

    `clients`: at most so many at once; `rows`: batches that each may have at once; `positions`: most tokens of a batch.
    Raises what `open` raises, and UnavailableError if another server has the socket, or something else is at its path.
    """

    def __init__(self, out: str | os.PathLike[str], path: str | os.PathLike[str], *, clients: int = 16, rows: int = 64,
                 positions: int = 1 << 16, tuning: Tuning | None = None, **options: Any) -> None:
        for name, value, most in (("clients", clients, 1024), ("rows", rows, 1024), ("positions", positions, 1 << 22)):
            if not 1 <= value <= most:
                raise ConfigError(f"{name}={value}: expected 1 .. {most}")
        if 1 + clients * rows > 1 << 16:
            raise ConfigError(f"{clients} clients of {rows} batches each: expected at most {(1 << 16) - 1} batches in all")
        self.path = Path(path)
        self._layout = share.layout_digest()
        _check_place(self.path)                              # before the lock, which leaves a file
        self._lock_file = _lock(self.path)
        self._closed = False
        try:
            self._listener = _listen(self.path)
        except BaseException:
            _unlock(self.path, self._lock_file)
            raise
        try:
            self.store = ServedStore(out, device="cpu", tuning=dataclasses.replace(tuning or Tuning(), batches=1 + clients * rows),
                                     **{"dram": "1GiB", "hbm": "0", "queue": "auto", "layers": None, "columns": None, "owner": None,
                                        "stripes": None, "hotset": None, **options})
            try:
                self._start(clients, rows, positions)
            except BaseException:
                self.store.close()
                raise
        except BaseException:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):     # it may have its name already
                os.unlink(_new(self.path))
            _unlock(self.path, self._lock_file)
            raise

    def _start(self, clients: int, rows: int, positions: int) -> None:
        store = self.store
        layers, orders, flat = len(store.layers), store.geometry.orders, rounded(positions * store.geometry.max_ngram)
        batch_rows, plan = 1 + clients * rows, share.plan_words(layers, orders, positions)
        store._plan.words[p.W_SLEEPERS + store._line::store._line] = 1       # clients cannot count themselves: they only read
        self._plans = Arena([("plans", np.int32, (batch_rows * plan,))], "ssdgram-plans")
        self._bell = Arena(share.BELL_SPECS, "ssdgram-bell")
        self._own = Arena([("arrived", np.int64, (batch_rows,)), ("tokens", np.int32, (batch_rows * flat,)),
                           ("flags", np.uint8, (batch_rows * flat,)), ("held", np.int32, (batch_rows * plan,))], "ssdgram-desk")
        params = np.zeros(d.DP_COUNT, np.int64)
        for word, value in ((d.DP_ROWS, rows), (d.DP_LAYERS, layers), (d.DP_ORDERS, orders), (d.DP_FLAT, flat),
                            (d.DP_POSITIONS, positions), (d.DP_PLAN, plan), (d.DP_LINE, store._line),
                            (d.DP_SPIN_NS, int(store.tuning.spin_us * 1000)), (d.DP_RING, share.ring_of(rows)),
                            (d.DP_STORE, store._address)):
            params[word] = value
        self._desk = d.Desk(
            control=np.zeros(d.D_COUNT, np.int64), params=params, states=np.zeros(16 * clients, np.int32),
            clients=np.zeros(clients, d.CLIENT), seats=np.zeros(clients * rows, d.SEAT),
            awaited=np.zeros(clients * rows * layers * 2, np.int64), batch_rows=np.zeros(batch_rows, d.BATCH_ROW),
            live=np.zeros(batch_rows, np.int32), pending=np.zeros(clients * rows, np.int32), arrived=self._own["arrived"],
            tokens=self._own["tokens"], flags=self._own["flags"], held=self._own["held"], plans=self._plans["plans"],
            bell=self._bell["bell"], batch_words=store._plan.words)
        compile_for(d.desk_loop, self._desk)
        self._places: list[_Client | None] = [None] * clients
        self._waiting: list[_Client] = []                    # said no hello yet
        self._about = json.dumps({
            "path": str(store.path), "geometry": store.geometry.to_json(), "layers": store.layers, "columns": store.columns,
            "vocabulary": store._vocabulary, "global_scales": store.manifest.global_scales, "capacity": store.capacity,
            "generation": store.manifest.generation, "queue": store.queue, "notices": store.notices,
            "degraded_wait_s": store.tuning.degraded_wait_s}).encode()
        self._replaced = False
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stop, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._threads = [threading.Thread(target=_run_desk, args=(self._desk,), name="ssdgram-desk", daemon=True),
                         threading.Thread(target=self._run, name="ssdgram-serve", daemon=True)]
        for thread in self._threads:
            thread.start()
        _servers.add(self)
        os.rename(_new(self.path), self.path)                # from here on clients find it
        self._inode = os.lstat(self.path).st_ino

    @property
    def attached(self) -> int:
        """Clients attached now."""
        return sum(client is not None for client in self._places)

    @property
    def joined(self) -> int:
        """Batches that a client asked for and that another's plan answered."""
        return int(self._desk.control[d.D_JOINED])

    # ------------------------------------------------------------ the socket's thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        looked = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(TICK_S if self._all_rest() else 0.005):
                key.data()
            self._tend()
            if time.monotonic() - looked > self.store.tuning.identity_check_s:
                looked = time.monotonic()
                self._look_at_manifest()

    def _all_rest(self) -> bool:
        """Whether no client is on its way out."""
        return not (self._desk.states[::16] > d.LIVE).any()

    def _tend(self) -> None:
        """Put out whom the desk refused, forget who is gone, close connections that stay silent."""
        for index, client in enumerate(self._places):
            state = int(self._desk.states[16 * index])
            if client is not None and state == d.BROKEN:
                log.warning("%s: process %d asked for what cannot be: it is put out", self.path, client.pid)
                self._put_out(client)
            elif client is not None and state == d.GONE:
                assert client.memory is not None
                client.memory.close()
                self._places[index] = None
                self._desk.states[16 * index] = d.ABSENT
        for client in [client for client in self._waiting if time.monotonic() - client.since > HELLO_S]:
            self._drop(client)

    def _look_at_manifest(self) -> None:
        try:
            self.store._look_at_manifest()
            replaced = False
        except (StoreReplacedError, OSError):
            replaced = True
        if replaced != self._replaced:
            self._replaced = replaced
            self._tell(share.REPLACED if replaced else share.SERVING)

    def _tell(self, state: int) -> None:
        """Write the state into every client's board."""
        for client in self._places:
            if client is not None and client.memory is not None:
                client.memory["board"][share.B_STATE] = state

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:                             # it went away again, or no descriptors are left
            log.warning("%s: a client could not be accepted: %s", self.path, error)
            time.sleep(0.01)
            return
        connection.setblocking(False)
        pid, uid = protocol.peer(connection)
        client = _Client(connection, pid, time.monotonic())
        if not protocol.may_speak(uid):
            self._refuse(client, f"user {uid} may not attach: the server runs as user {os.geteuid()}")
            return
        self._waiting.append(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hello(client))

    def _hello(self, client: _Client) -> None:
        try:
            data, _ = protocol.receive(client.connection, protocol.HELLO.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        fault = protocol.hello_fault(data, self._layout)
        free = [index for index, place in enumerate(self._places) if place is None]
        if not fault and not free:
            fault = f"{len(self._places)} clients are attached already: start the server with more --clients"
        if fault:
            self._refuse(client, fault)
            return
        try:
            self._attach(client, free[0])
        except OSError as error:
            log.warning("%s: process %d could not be attached: %s", self.path, client.pid, error)
            if client.index < 0:
                self._drop(client)
            else:
                self._put_out(client)

    def _refuse(self, client: _Client, text: str) -> None:
        log.warning("%s: process %d was refused: %s", self.path, client.pid, text)
        with contextlib.suppress(OSError):
            client.connection.send(protocol.refusal(self._layout, text))
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Close a connection that is not attached."""
        if client in self._waiting:
            self._waiting.remove(client)
            self._selector.unregister(client.connection)
        client.connection.close()

    def _attach(self, client: _Client, index: int) -> None:
        """Make the client's share, tell the desk, send the welcome."""
        desk, store, params = self._desk, self.store, self._desk.params
        rows, layers, flat = (int(params[word]) for word in (d.DP_ROWS, d.DP_LAYERS, d.DP_FLAT))
        memory = Arena(share.share_specs(rows, layers, flat, len(self._about)), "ssdgram-share")
        memory["about"][:] = np.frombuffer(self._about, np.uint8)
        memory["board"][share.B_STATE] = share.REPLACED if self._replaced else share.SERVING
        desk.clients[index] = 0
        for name in ("board", "requests", "seats", "seat_words", "expected", "gpu_words", "token_words", "tokens", "flags"):
            desk.clients[name][index] = memory[name].ctypes.data
        desk.seats[index * rows:(index + 1) * rows] = 0
        client.index, client.memory = index, memory
        self._places[index] = client
        self._waiting.remove(client)
        self._selector.modify(client.connection, selectors.EVENT_READ, lambda: self._question(client))
        d.set_state(desk.states, index, d.LIVE)
        if client.pid > 0:                                   # a child that inherited the socket would hide the client's end
            with contextlib.suppress(OSError):
                client.pidfd = os.pidfd_open(client.pid)
                self._selector.register(client.pidfd, selectors.EVENT_READ, lambda: self._put_out(client))
        arena = store._arena
        numbers = protocol.Welcome(
            rows=rows, first=1 + index * rows, layers=layers, orders=int(params[d.DP_ORDERS]), positions=int(params[d.DP_POSITIONS]),
            flat=flat, about=len(self._about), batch_rows=len(desk.batch_rows), line=store._line, store_bytes=arena.size,
            words_at=arena.offsets["batch_words"], control_at=arena.offsets["plan_control"], slab_at=arena.offsets["slab"],
            slots=len(store._plan.slots), stride=store._stride, pid=os.getpid())
        readable = [arena.read_only(), self._plans.read_only()]
        try:
            socket.send_fds(client.connection, [protocol.welcome(self._layout, numbers)], [*readable, self._bell.fd, memory.fd])
        finally:
            protocol.close_all(readable)
        log.info("%s: process %d is attached (%d of %d)", self.path, client.pid, self.attached, len(self._places))

    def _question(self, client: _Client) -> None:
        if client.connection.fileno() < 0:                   # put out by another event of the same look
            return
        data = b""
        try:
            data, _ = protocol.receive(client.connection, protocol.QUESTION.size)
            if len(data) not in (0, protocol.QUESTION.size):
                raise ConnectionError(f"a question of {len(data)} bytes, expected {protocol.QUESTION.size}")
            if data:
                kind, number, row, layer, waited = protocol.QUESTION.unpack(data)
                client.connection.send(protocol.answer(kind, number, self._answer(client, kind, row, layer, waited)))
                return
        except BlockingIOError:                              # nothing there; or it does not read its answers
            if not data:
                return
        except ConnectionError as error:
            log.warning("%s: process %d: %s", self.path, client.pid, error)
        self._put_out(client)

    def _put_out(self, client: _Client) -> None:
        """The client ended, or is to: its place is free when the planner has done with its rows."""
        if client.connection.fileno() < 0:
            return
        self._selector.unregister(client.connection)
        client.connection.close()
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
            os.close(client.pidfd)
        if client.memory is not None:
            client.memory["board"][share.B_STATE] = share.STOPPED
        d.set_state(self._desk.states, client.index, d.LEAVING_NOW)
        share.ring(self._desk.bell)
        log.info("%s: process %d has left", self.path, client.pid)

    # ------------------------------------------------------------ answers

    def _answer(self, client: _Client, kind: int, row: int, layer: int, waited: float) -> Any:
        """The body of an answer; None: there is nothing to say. ConnectionError for a question that there is not."""
        if kind == protocol.ASK_STATS:
            return protocol.stats_to_json(snapshot(self.store))
        rows = int(self._desk.params[d.DP_ROWS])
        if kind not in (protocol.ASK_ERROR, protocol.ASK_TIMING) or not (0 <= row < rows and 0 <= layer < len(self.store.layers)):
            raise ConnectionError(f"question {kind} about seat {row}, layer {layer}: there is no such")
        seat = self._desk.seats[client.index * rows + row]
        if seat["stage"] != d.SEATED:
            return None
        batch = self._stand_in(int(seat["batch"]))
        try:
            if kind == protocol.ASK_TIMING:
                return batch.timing
            result = int(outcome(self.store._plan.words, batch._base, layer))
            return None if result == READY else protocol.error_to_json(batch._error(layer, result, waited))
        finally:
            batch._disown()                                  # it was never its to release

    def _stand_in(self, row: int) -> Batch:
        """An object that knows of a client's batch what the planner does; it is asked, never released."""
        desk, store = self._desk, self.store
        flat, plan = int(desk.params[d.DP_FLAT]), int(desk.params[d.DP_PLAN])
        record = desk.batch_rows[row]
        shape = (len(store.layers), int(record["positions"]), store.geometry.orders)
        size = shape[0] * shape[1] * shape[2]
        tokens, flags = (array[row * flat:row * flat + int(record["flat"])] for array in (desk.tokens, desk.flags))
        slots, held = (array[row * plan:row * plan + size] for array in (desk.plans, desk.held))
        return Batch(store, row, int(store._plan.batches["ticket"][row]), slots.reshape(shape), held.reshape(shape[0], -1),
                     (tokens, flags))

    # ------------------------------------------------------------ the end

    def close(self, timeout_s: float = 10.0) -> None:
        """Tell every client, stop, leave the slab's contents to those who still read it, remove the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _servers.discard(self)
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        os.eventfd_write(self._stop, 1)
        self._threads[1].join(timeout_s)
        self._tell(share.STOPPED)                            # before a byte changes: who reads now looks at it afterwards
        self._desk.control[d.D_STOP] = 1
        self._desk.bell[share.BELL] += 1
        share.ring(self._desk.bell)
        self._threads[0].join(timeout_s)
        for client in [*self._waiting, *(client for client in self._places if client is not None)]:
            client.connection.close()
            if client.pidfd >= 0 and client.memory is not None:
                with contextlib.suppress(KeyError, OSError):
                    self._selector.unregister(client.pidfd)
                    os.close(client.pidfd)
        self._selector.close()
        self._listener.close()
        os.close(self._stop)
        self.store.close(timeout_s)
        for arena in (self._plans, self._bell, *(client.memory for client in self._places if client is not None and client.memory)):
            arena.keep_shared()
            arena.close()
        self._own.close()
        os.close(self._lock_file)

    def _forget(self) -> None:
        """In a forked child: give up every descriptor, so that clients see the parent's end when it comes."""
        places = [client for client in self._places if client is not None]
        self._selector.close()
        for connection in (self._listener, *(client.connection for client in [*self._waiting, *places])):
            connection.close()
        for number in (self._stop, self._lock_file, *(client.pidfd for client in places if client.pidfd >= 0)):
            with contextlib.suppress(OSError):
                os.close(number)
        for arena in (self._plans, self._bell, self._own, *(client.memory for client in places if client.memory is not None)):
            arena.forget()
        self._closed = True

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _run_desk(desk: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    d.desk_loop(desk)


def _check_place(path: Path) -> None:
    """UnavailableError if there is something else than a socket."""
    try:
        kind = os.lstat(path).st_mode
    except OSError:                                          # free; or out of reach, as the lock's file says then
        return
    if not stat.S_ISSOCK(kind):
        raise UnavailableError(f"{path} is there and is no socket: choose another --socket")


def _lock(path: Path) -> int:
    """Hold PATH.lock: who holds it may replace the socket. The kernel lets it go when the process ends, however it ends."""
    if len(os.fsencode(path)) > MOST_PATH:
        raise ConfigError(f"{path}: a socket's path has at most {MOST_PATH} bytes")
    try:
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UnavailableError(f"{path}.lock: {error.strerror}: choose a folder that this user may write to") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.lstat(f"{path}.lock")):
            raise FileNotFoundError(errno.ENOENT, "the lock was another's, who has removed it")
    except OSError as error:
        os.close(file)
        raise UnavailableError(f"{path}: another server is running there; stop it, or choose another --socket") from error
    return file


def _unlock(path: Path, file: int) -> None:
    """Of a server that could not start nothing is left: remove the lock's file while it is held (`_lock` looks whether it still has
    its name), unless somebody keeps something in it."""
    with contextlib.suppress(OSError):
        if os.fstat(file).st_size == 0:
            os.unlink(f"{path}.lock")
    os.close(file)


def _new(path: Path) -> Path:
    """Where the socket is made, before it is moved to its place."""
    return path.with_name(path.name + ".new")


def _listen(path: Path) -> socket.socket:
    """A listening socket, mode 0600, beside the path. The caller holds the lock: whatever socket is at the path is a dead server's."""
    _check_place(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_new(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), 0o600)                  # before bind: there is no moment in which others may connect
        listener.bind(str(_new(path)))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise UnavailableError(f"{path}: the socket cannot be made ({error.strerror})") from error
    return listener


def _forget_all() -> None:
    for server in list(_servers):
        server._forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_all)
