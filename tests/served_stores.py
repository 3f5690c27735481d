"""Servers for the tests of ssdgram.serve: started in this process, or in a forked one that may be killed; checked as they close."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import traceback

import numpy as np
from made_stores import QUICK, check_planner, until

import ssdgram
from ssdgram.serve import desk
from ssdgram.serve.server import Server

DEFAULTS = {"dram": "8MiB", "clients": 4, "rows": 8, "positions": 2048}
TUNING = dataclasses.replace(QUICK, batches=33)              # what such a server opens its store with


@contextlib.contextmanager
def serving(made, folder, check=True, **options):
    """A server of this process; at the end all clients are gone and the planner's books are as they must be."""
    with Server(made.out, folder / "s", **{"tuning": QUICK, **DEFAULTS, **options}) as server:
        yield server
        if check:
            assert until(lambda: server.attached == 0), "a client that has left still has its place"
            check_desk(server)
            check_planner(server.store, made)


def check_desk(server):
    """Nobody is attached: no seat, no batch row, no word is waited for."""
    rows = server._desk
    assert (rows.seats["stage"] == desk.EMPTY).all() and (rows.batch_rows["users"] == 0).all()
    assert rows.control[desk.D_LIVE] == rows.control[desk.D_PENDING] == rows.control[desk.D_DRAINING] == 0


def forked(act):
    """Run act(writer) in a forked child that ends with it; (pid, reader). What it raises goes to the pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, os.fdopen(reader, "rb")
    try:
        os.close(reader)
        signal.alarm(60)
        act(writer)
    except BaseException:
        os.write(writer, b"!" + traceback.format_exc().encode()[-4000:])
    finally:
        os._exit(0)


def kill(child):
    """kill -9, and wait until the process is no more."""
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def said(reader):
    """The next byte that a forked child wrote; its traceback, if it failed, as an assertion."""
    byte = reader.read(1)
    assert byte not in (b"!", b""), (byte + reader.read()).decode()
    return byte


def killable_server(made, path, **options):
    """A server in a process of its own, ready; (pid, reader)."""

    def act(writer):
        with Server(made.out, path, **{"tuning": QUICK, **DEFAULTS, **options}):
            os.write(writer, b"r")
            while True:
                signal.pause()

    child, reader = forked(act)
    said(reader)
    return child, reader


def sequences(made, seed, count=3):
    """A few sequences with lookbacks and positions that take no part, and what must be served for them, by layer."""
    generator = np.random.default_rng(seed)
    made_of, wanted = [], {layer: [] for layer in made.geometry.layers}
    for _ in range(count):
        length = int(generator.integers(0, 40))
        context = {"participates": generator.random(length) < 0.9, "lookback": made.tokens(int(generator.integers(0, 5)), seed + 1)}
        tokens = generator.integers(0, made.vocabulary, length, np.int32)
        made_of.append(ssdgram.Sequence(tokens, **context))
        for layer in wanted:
            wanted[layer].append(made.expected(layer, tokens, **context))
    return made_of, {layer: np.concatenate(parts) for layer, parts in wanted.items()}
