"""A forked child has nothing of its parent's store, is told so by every call, and does the parent no harm."""

import contextlib
import gc
import mmap
import os
import signal
import threading
import time
import traceback

import numpy as np
import pytest
from made_stores import QUEUES, assert_served

import ssdgram
from ssdgram._arena import Arena
from ssdgram.queues._flight import EVENT_FD

torch = pytest.importorskip("torch")


def in_child(act):
    """Run `act` in a forked child; what it raised, or the signal that ended it, as text ("" if all went well)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        try:
            os.close(reader)
            signal.alarm(20)
            act()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
            status = 1
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(child, 0)
    return text or ("" if status == 0 else f"wait status {status}")


@pytest.fixture(params=QUEUES)
def store(engram, served, request):
    return served(engram, queue=request.param)


def test_every_call_in_the_child_raises(engram, store):
    batch, released = store.prefetch(engram.tokens(20)), store.prefetch(engram.tokens(20))
    batch.wait()
    released.release()

    def act():
        for call in (lambda: store.prefetch([1]), lambda: store.prefetch(ssdgram.Sequence([1])), lambda: store.warm([1]), store.stats,
                     store.close, batch.wait, lambda: batch.wait(1), lambda: batch.rows(1), lambda: batch.packed(14),
                     lambda: batch.addresses(1), lambda: batch.timing, batch.release, released.release, released.wait):
            with pytest.raises(ssdgram.ForkedStoreError, match="open the store in the process that uses it"):
                call()
        assert len(batch) == 20 and repr(batch) and repr(store) and store.layers == (1, 14)

    assert in_child(act) == ""
    with batch:                                              # the parent goes on
        assert_served(engram, store, batch, engram.tokens(20))
    for seed in range(1, 20):
        with store.prefetch(engram.tokens(20, seed)) as batch:
            assert_served(engram, store, batch, engram.tokens(20, seed))


@pytest.mark.parametrize("kept", ["batch", "store"])
def test_what_other_threads_kept_is_dropped_in_the_child_before_any_hook_has_run(engram, kept):
    """Python clears their thread-locals as it forks: the destructors must not touch memory that the child has not."""
    local, ready, over = threading.local(), threading.Event(), threading.Event()

    def keep():
        store = engram.open()
        local.batch = store.prefetch(engram.tokens(20))
        local.batch.wait()
        if kept == "store":
            local.batch.release()
            local.batch, local.store = None, store
        del store
        ready.set()
        over.wait(60)
        if kept == "batch":
            assert_served(engram, local.batch._store, local.batch, engram.tokens(20))
            local.batch.release()
            local.store = local.batch._store
        local.store.close()
        over.clear()                                         # all of it went well

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert ready.wait(60)
        assert in_child(lambda: None) == ""
    finally:
        over.set()
        thread.join()
    assert not over.is_set()


def test_calls_on_a_closed_store(engram):
    store = engram.open()
    store.close()

    def act():
        with pytest.raises(ssdgram.ForkedStoreError):
            store.stats()

    assert in_child(act) == ""


def test_the_child_leaves_with_blocks_in_silence(engram, store):
    def act():
        with engram_store, batch:
            pass

    engram_store, batch = store, store.prefetch(engram.tokens(5))
    assert in_child(act) == ""
    with batch:
        assert_served(engram, store, batch, engram.tokens(5))


def test_nothing_is_inherited(engram, store):
    """Neither page files nor rings nor the shared memory: no descriptor, no mapping."""
    address, size, memory = store._arena.address, store._arena.size, os.fstat(store._arena.fd)
    numbers = [number for pair in store._pairs for number in pair]
    if store.queue == "uring":
        numbers += [store._queue._rings[0].fd, int(store._queue._own[0][EVENT_FD])]
    stats = {number: os.fstat(number) for number in numbers}

    def act():
        for number, stat in stats.items():
            with contextlib.suppress(OSError):
                assert not os.path.samestat(os.fstat(number), stat), number
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):               # the descriptor of the listing itself
                assert not os.path.samestat(os.fstat(number), memory), f"the shared memory is descriptor {number}"
        with open("/proc/self/maps") as maps:
            for line in maps:
                first, last = (int(word, 16) for word in line.split()[0].split("-"))
                assert last <= address or first >= address + size, line

    assert in_child(act) == ""


def test_the_child_drops_the_memory_and_keeps_its_own():
    """Where the parent's memory was, the child may have mapped its own: dropping the parent's must not unmap that."""
    holder = [Arena([("slab", np.uint8, (40 << 20,)), ("slots", np.uint8, (20 << 20,))], private={"slots"}) for _ in range(2)]
    holder[1].close()                                        # its views are gone as well, its mapping is not

    def act():
        blocks = [mmap.mmap(-1, 1 << 20) for _ in range(200)]
        for number, block in enumerate(blocks):
            block[:8] = number.to_bytes(8, "little")
        holder.clear()
        gc.collect()
        for number, block in enumerate(blocks):
            assert int.from_bytes(block[:8], "little") == number

    assert in_child(act) == ""
    holder[0].close()


def test_the_child_opens_a_store_of_its_own(engram, store):
    """Compiled code works in the child; the parent's store is served beside it."""
    batch = store.prefetch(engram.tokens(20))

    def act():
        with engram.open(queue=store.queue) as own:
            for seed in range(5):
                with own.prefetch(engram.tokens(30, seed)) as mine:
                    assert_served(engram, own, mine, engram.tokens(30, seed))

    assert in_child(act) == ""
    with batch:
        assert_served(engram, store, batch, engram.tokens(20))


def test_children_forked_while_the_store_works(engram, store):
    """Forks at any moment, children that exit at once or collect first: the parent's rows stay right."""
    children = []
    for seed in range(25):
        batch = store.prefetch(engram.tokens(60, seed))
        child = os.fork()
        if child == 0:
            try:
                if seed % 2:
                    gc.collect()
            finally:
                os._exit(0)
        children.append(child)
        with batch:
            assert_served(engram, store, batch, engram.tokens(60, seed))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_ends_like_a_script(engram, store):
    """sys.exit with its handlers at exit: nothing of the parent's is closed or waited for."""
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        import atexit

        try:
            atexit._run_exitfuncs()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - begin < 10
    with store.prefetch(engram.tokens(20)) as batch:
        assert_served(engram, store, batch, engram.tokens(20))


def test_multiprocessing_by_fork(engram, store):
    import multiprocessing

    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(_double, range(10)) == [2 * k for k in range(10)]
    with store.prefetch(engram.tokens(20)) as batch:
        assert_served(engram, store, batch, engram.tokens(20))


def _double(value):
    gc.collect()
    return 2 * value


def test_a_grandchild_is_told_too(engram, store):
    def act():
        text = in_child(store.stats)
        assert "ForkedStoreError" in text, text
        with pytest.raises(ssdgram.ForkedStoreError):
            store.stats()

    assert in_child(act) == ""
