"""Death at any moment: of a client between prefetch and use, of the server, of a request that nobody wants any more.

Each death is a kill -9 of a real process, ten times over. The cancellations are 600 here, 10,000 by `make test-counts`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from made_stores import assert_served, clear_faults, packed, set_fault, until
from served_stores import TUNING, check_desk, forked, kill, killable_server, said, serving

import ssdgram
from ssdgram import _state as s
from ssdgram.serve import desk

torch = pytest.importorskip("torch")
DEATHS = 10
CANCELLATIONS = int(os.environ.get("SSDGRAM_CANCELLATIONS", "600"))


def dying_client(path, made, act):
    """A process that attaches, does act(store), says so, and waits to be killed."""

    def live(writer):
        store = ssdgram.attach(path)
        held = act(store)
        os.write(writer, b"h")
        while held is not None:
            signal.pause()

    return forked(live)


def test_a_client_dies_between_prefetch_and_use(engram, tmp_path):
    """Its batches read, waiting to be read, joined by another, or being read as it dies; its place is free again each time."""
    with serving(engram, tmp_path, rows=4) as server, ssdgram.attach(server.path) as store:
        idle = store.stats().slots_in_use
        for death in range(DEATHS):
            mine = store.prefetch(engram.tokens(30, death))

            def act(other, death=death):
                held = [other.prefetch(engram.tokens(30, death)), other.prefetch(engram.tokens(40, 100 + death)),
                        other.prefetch(engram.tokens(10, 200 + death), "background")]
                if death % 2:
                    held[1].wait()
                other.warm(engram.tokens(100, 300 + death))
                return held

            if death % 3 == 2:
                set_fault(server.store, s.FAULT_STALL)       # it dies with reads in the drive
                act_held, death_held = act, death

                def act(other, act=act_held, death=death_held):
                    return act(other, death - death % 2)

            child, reader = dying_client(server.path, engram, act)
            said(reader)
            assert server.attached == 2
            kill(child)
            reader.close()
            assert until(lambda: server._places.count(None) == 2 or server.attached <= 2)
            clear_faults(server.store)
            with mine:
                assert_served(engram, store, mine, engram.tokens(30, death))
            assert until(lambda: server.attached == 1), "its place is not free"
            assert until(lambda: store.stats().slots_in_use == idle), "slots leaked"
            with store.prefetch(engram.tokens(40, 100 + death)) as batch:
                assert_served(engram, store, batch, engram.tokens(40, 100 + death))


def test_a_client_dies_while_it_asks(engram, tmp_path):
    """Killed at a random moment of a loop of steps: half-written requests, releases under way."""
    with serving(engram, tmp_path) as server, ssdgram.attach(server.path) as store:
        for death in range(DEATHS):
            def act(writer, death=death):
                other = ssdgram.attach(server.path)
                os.write(writer, b"h")
                for seed in range(10_000):
                    batch = other.prefetch(engram.tokens(20, 7 * death + seed % 50))
                    if seed % 3:
                        batch.wait()
                    batch.release()

            child, reader = forked(act)
            said(reader)
            end = time.monotonic() + 0.01 * death
            while time.monotonic() < end:
                with store.prefetch(engram.tokens(20, death)) as batch:
                    assert_served(engram, store, batch, engram.tokens(20, death))
            kill(child)
            reader.close()
            assert until(lambda: server.attached == 1)


def test_a_client_whose_child_lives_on(engram, tmp_path):
    """The kernel keeps the socket open for a child that inherited it; the server notices the end all the same."""
    with serving(engram, tmp_path) as server:
        def live(writer):
            store = ssdgram.attach(server.path)
            batch = store.prefetch(engram.tokens(10))
            batch.wait()
            store._forget = lambda: None                     # as a child that Python did not fork
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.write(writer, b"h")
            signal.pause()

        child, reader = forked(live)
        said(reader)
        assert server.attached == 1
        kill(child)
        assert until(lambda: server.attached == 0)           # and not after the 20 s of the child
        reader.close()


def test_a_forked_child_of_a_client(engram, tmp_path):
    with serving(engram, tmp_path) as server, ssdgram.attach(server.path) as store:
        batch = store.prefetch(engram.tokens(20))
        batch.wait()

        files = [mapped._file for mapped in store._mapped]
        files += [os.fstat(number) for number in (server._own.fd, server._listener.fileno(), server._lock_file,
                                                  store._connection.fileno())]
        stop = server._stop, os.readlink(f"/proc/self/fd/{server._stop}")    # an eventfd: all of a system are one file

        def act(writer):
            for call in (lambda: store.prefetch([1]), store.stats, store.close, batch.wait, lambda: batch.rows(1), batch.release,
                         lambda: store.warm([1]), lambda: batch.timing):
                with pytest.raises(ssdgram.ForkedStoreError):
                    call()
            with store, batch:
                pass
            for number in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):           # the descriptor of the listing itself
                    found, link = os.fstat(number), os.readlink(f"/proc/self/fd/{number}")
                    assert not any(os.path.samestat(found, file) for file in files) and (number, link) != stop, link
            with ssdgram.attach(server.path) as own, own.prefetch(engram.tokens(20, 1)) as mine:
                assert_served(engram, own, mine, engram.tokens(20, 1))
            os.write(writer, b"k")

        child, reader = forked(act)
        said(reader)
        os.waitpid(child, 0)
        reader.close()
        with batch:
            assert_served(engram, store, batch, engram.tokens(20))


def test_the_server_dies(engram, tmp_path):
    """Every client has a typed error within a second, whatever it was doing; a restart serves again, at the same socket."""
    path = tmp_path / "s"
    for death in range(DEATHS):
        child, reader = killable_server(engram, path)
        assert path.exists()
        stores = [ssdgram.attach(path) for _ in range(2)]
        done = stores[0].prefetch(engram.tokens(20, death))
        done.wait()
        found = []

        def wait(store=stores[1], found=found):
            try:
                for seed in range(1_000_000):
                    with store.prefetch(engram.tokens(20, seed % 97)) as batch:
                        batch.wait()
            except ssdgram.ServerDiedError as error:
                found.append((time.monotonic(), error))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.005 * death)
        kill(child)
        begin = time.monotonic()
        reader.close()
        thread.join(10)
        assert found and found[0][0] - begin < 1.0           # of its death
        assert "attach again" in str(found[0][1]) and isinstance(found[0][1], ConnectionError)
        time.sleep(0.01)
        begin = time.monotonic()
        for call, *arguments in ((stores[0].prefetch, [1]), (stores[0].stats,), (stores[0].warm, [1]), (done.wait,), (done.packed, 1)):
            with pytest.raises(ssdgram.ServerDiedError):
                call(*arguments)
        done.release()
        for store in stores:
            store.close()
            with pytest.raises(ssdgram.StoreClosedError):
                store.stats()
        assert time.monotonic() - begin < 1.0
    with serving(engram, tmp_path) as server, ssdgram.attach(path) as store:
        with store.prefetch(engram.tokens(20)) as batch:
            assert_served(engram, store, batch, engram.tokens(20))
        assert server.path == path


def test_the_server_dies_under_a_wait_that_nothing_would_end(engram, tmp_path):
    """Reads that never come, a server that is stopped rather than dead: errors with a type, in the time that was given."""
    path = tmp_path / "s"
    child, reader = killable_server(engram, path)
    store = ssdgram.attach(path)
    os.kill(child, signal.SIGSTOP)
    batch = store.prefetch(engram.tokens(20))
    with pytest.raises(ssdgram.ReadTimeoutError):
        batch.wait(timeout_s=0.1)
    died = []
    killer = threading.Timer(0.2, lambda: (kill(child), died.append(time.monotonic())))
    killer.start()
    with pytest.raises(ssdgram.ServerDiedError):
        batch.wait(timeout_s=30)
    heard = time.monotonic()
    killer.join()
    assert heard - died[0] < 1.0
    batch.release()
    store.close()
    reader.close()
    assert until(lambda: not os.path.exists(f"/proc/{child}"))


def test_the_server_is_stopped(engram, tmp_path):
    """A server that closes in good order: waits end at once, and what was ready stays what it was."""
    with serving(engram, tmp_path, check=False) as server:
        store = ssdgram.attach(server.path)
        set_fault(server.store, s.FAULT_STALL, after=400)
        ready, waiting = store.prefetch(engram.tokens(3)), store.prefetch(engram.tokens(60, 1))
        ready.wait()
        slots, slab = ready._slots.copy(), store._state.slab
        before = [slab[slot * store._stride:(slot + 1) * store._stride].copy() for slot in slots.reshape(-1)]
        assert until(lambda: server.store.stats().queue_depth > 0)
        clear_faults(server.store)
    for call in (waiting.wait, ready.wait, lambda: ready.rows(1), lambda: store.prefetch([1])):
        with pytest.raises(ssdgram.ServerDiedError, match="was stopped"):
            call()
    np.testing.assert_array_equal(ready._slots, slots)
    for slot, content in zip(slots.reshape(-1), before):
        np.testing.assert_array_equal(slab[slot * store._stride:(slot + 1) * store._stride], content)
    store.close()


@pytest.mark.timeout(600)
def test_cancellations_at_random(engram, tmp_path):
    """Batches dropped at any moment between prefetch and use, beside others whose every byte is checked: nothing leaks.

    The texts have six times as many bundles as the cache has slots, so slots change hands all the time.
    """
    generator = np.random.default_rng(11)
    texts = [engram.tokens(32, seed) for seed in range(40)]
    wanted = [{layer: engram.expected(layer, text) for layer in engram.geometry.layers} for text in texts]

    def check(batch, number):
        for layer in batch._store.layers:
            np.testing.assert_array_equal(packed(batch, layer), wanted[number][layer][:len(batch)])

    with serving(engram, tmp_path, dram=engram.dram_for(1200, tuning=TUNING)) as server:
        stores = [ssdgram.attach(server.path) for _ in range(2)]
        idle, held, cancelled = stores[0].stats().slots_in_use, [], 0
        while cancelled < CANCELLATIONS:
            number, length = int(generator.integers(0, len(texts))), int(generator.integers(1, 17))
            batch = stores[int(generator.integers(0, 2))].prefetch(texts[number][:length], ("step", "background")[cancelled % 4 == 3])
            moment = int(generator.integers(0, 5))
            if moment == 4:
                held.append((batch, number))
            else:
                if moment == 1:
                    time.sleep(float(generator.random()) * 1e-4)
                elif moment == 2:
                    batch.wait(1)
                elif moment == 3:
                    np.testing.assert_array_equal(packed(batch, 1), wanted[number][1][:length])
                batch.release()
                cancelled += 1
            if len(held) > 5:
                batch, number = held.pop(int(generator.integers(0, len(held))))
                check(batch, number)
                batch.release()
        for batch, number in held:
            check(batch, number)
            batch.release()
        assert stores[0].stats().cancelled > CANCELLATIONS // 20
        assert until(lambda: stores[0].stats().slots_in_use == idle)
        assert until(lambda: (server._desk.seats["stage"] == desk.EMPTY).all())
        check_desk(server)
        for store in stores:
            store.close()


@pytest.mark.slow
def test_the_command(engram, tmp_path):
    """`ssdgram serve` in a process of its own: says when it is ready, serves, ends at SIGTERM and leaves no socket."""
    path = tmp_path / "s"
    command = [sys.executable, "-m", "ssdgram", "serve", str(engram.out), "--socket", str(path), "--dram", "8MiB", "--metrics-port", "0",
               "--hotset", str(tmp_path / "hot")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert "metrics at http" in lines[0] and f"at {path}" in lines[1]
        with ssdgram.attach(path) as store:
            with store.prefetch(engram.tokens(30)) as batch:
                assert_served(engram, store, batch, engram.tokens(30))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            with pytest.raises(ssdgram.ServerDiedError, match="was stopped"):
                store.prefetch([1])
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    assert not path.exists() and (tmp_path / "hot").stat().st_size > 4096
