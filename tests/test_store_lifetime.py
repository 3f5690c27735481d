"""From open to close: drops, releases, interrupts, threads, pickling; nothing stays behind and nothing hangs."""

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from made_stores import QUEUES, assert_served, check_planner, clear_faults, packed, quiet, reading, run, set_fault, until

import ssdgram
from ssdgram._state import FAULT_STALL
from ssdgram.store import KEPT_PLAN, Tuning

torch = pytest.importorskip("torch")


@pytest.fixture
def store(engram, served):
    return served(engram)


# ---------------------------------------------------------------- a batch's end


def test_release_is_idempotent(engram, store):
    batch = store.prefetch(engram.tokens(20))
    batch.wait()
    for _ in range(3):
        batch.release()
    assert quiet(store)
    other = store.prefetch(engram.tokens(20, 1))             # has the row of the one before: further releases are not its
    assert other._row == batch._row
    batch.release()
    with other:
        assert_served(engram, store, other, engram.tokens(20, 1))


def test_a_released_batch_serves_no_more(engram, store):
    with store.prefetch(engram.tokens(4)) as batch:
        batch.wait()
    for call in (batch.wait, batch.rows, batch.packed, batch.addresses):
        with pytest.raises(ssdgram.BatchReleasedError, match="batch 1 was released: its slots may hold other bundles by now"):
            call(1)
    with pytest.raises(ssdgram.BatchReleasedError):
        _ = batch.timing
    with batch:                                              # entering it again changes nothing
        pass


def test_a_with_block_releases_after_an_error(engram, store):
    with contextlib.suppress(KeyError), store.prefetch(engram.tokens(4)) as batch:
        raise KeyError
    assert quiet(store)
    with pytest.raises(ssdgram.BatchReleasedError):
        batch.wait()


def test_a_dropped_batch_warns_and_releases_itself(engram, store):
    before = store.stats().slots_in_use
    batch = store.prefetch(engram.tokens(30))
    batch.wait()
    assert store.stats().slots_in_use > before
    with pytest.warns(ResourceWarning, match=r"<Batch 1: 30 positions, \w+> was dropped without release"):
        del batch
        gc.collect()
    assert until(lambda: store.stats().slots_in_use == before)
    assert quiet(store)


def test_a_dropped_batch_is_released_even_if_warnings_are_errors(engram, store):
    batch = store.prefetch(engram.tokens(30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            del batch
            gc.collect()
        finally:
            sys.unraisablehook = hook
    assert quiet(store)


def test_a_released_batch_is_dropped_in_silence(engram, store, recwarn):
    for _ in range(5):
        with store.prefetch(engram.tokens(3)) as batch:
            batch.wait()
        del batch
    gc.collect()
    assert not recwarn.list


def test_batches_that_the_collector_drops_inside_prefetch(engram, store, monkeypatch):
    """A Batch in a cycle is finalised whenever the collector runs, also while this very thread is inside the store's lock."""
    from ssdgram import store as module

    free_row, collected = module.free_row, []

    def collecting(*arguments):
        collected.append(gc.collect())
        return free_row(*arguments)

    monkeypatch.setattr(module, "free_row", collecting)
    gc.disable()
    try:
        for seed in range(5):
            cycle = [store.prefetch(engram.tokens(5, seed))]
            cycle.append(cycle)
            del cycle
            with pytest.warns(ResourceWarning, match="was dropped without release"):
                store.prefetch(engram.tokens(5)).release()
    finally:
        gc.enable()
    assert len(collected) == 10 and quiet(store)


def test_an_interrupted_prefetch_leaves_no_claim(engram, store, monkeypatch):
    """Ctrl-C behind the hand-over, before the caller has the Batch: it is released like any that is dropped."""
    from ssdgram import store as module

    submit = module.submit

    def interrupted(*arguments):
        submit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "submit", interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(KeyboardInterrupt):
            store.prefetch(engram.tokens(30))
        gc.collect()
    monkeypatch.undo()
    assert quiet(store)

    monkeypatch.setattr(module, "submit", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as caught:         # and before it: the Batch that was never handed over ...
        store.prefetch(engram.tokens(30))
    monkeypatch.undo()
    with store.prefetch(engram.tokens(30)) as batch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        batch.wait()
        del caught
        gc.collect()                                         # ... does not release the one that has its row now
        assert not until(lambda: store.stats().oldest_ticket is None, 0.2)
        assert_served(engram, store, batch, engram.tokens(30))


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("call", ["wait", "rows"])
def test_ctrl_c_during_a_wait(engram, served, queue, call):
    """SIGINT while the drive does not answer: KeyboardInterrupt at once; the batch is as it was."""
    store = served(engram, queue=queue)
    set_fault(store, FAULT_STALL)
    batch = store.prefetch(engram.tokens(4))
    assert until(lambda: reading(store))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)      # what a shell's background job has ignored
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(batch, call)(1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - begin < 20
    timer.join()
    clear_faults(store)
    with batch:
        assert_served(engram, store, batch, engram.tokens(4))


def test_another_signal_does_not_end_a_wait(engram, store):
    """A handler runs, and the wait goes on to its time-out."""
    calls = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: calls.append(time.monotonic()))

    def send():
        for count in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda sent=count: len(calls) > sent)      # (two that are pending at once are one)

    try:
        set_fault(store, FAULT_STALL)
        with store.prefetch(engram.tokens(4)) as batch:
            sender = threading.Timer(0.05, send)
            sender.start()
            begin = time.monotonic()
            with pytest.raises(ssdgram.ReadTimeoutError):
                batch.wait(timeout_s=0.6)
            assert time.monotonic() - begin >= 0.6 and calls and calls[0] > begin
            sender.join()
            assert len(calls) == 3
            clear_faults(store)
            batch.wait()
    finally:
        signal.signal(signal.SIGUSR1, previous)


# ---------------------------------------------------------------- a store's end


def test_close_twice_and_calls_after(engram, served):
    store = served(engram)
    batch = store.prefetch(engram.tokens(10))
    batch.wait()
    store.close()
    store.close()
    assert repr(store) == f"<Store {str(engram.out)!r} (closed)>"
    for call in (lambda: store.prefetch([1]), lambda: store.warm([1]), store.stats, batch.wait, lambda: batch.rows(1),
                 lambda: batch.packed(1), lambda: batch.addresses(14), lambda: batch.timing):
        with pytest.raises(ssdgram.StoreClosedError, match="was closed"):
            call()
    batch.release()                                          # nothing to do, nothing to say
    batch.release()
    assert store.layers == (1, 14) and store.dim == 64 and len(batch) == 10


def test_close_in_every_state_of_a_batch(engram, served):
    """Queued, planning, reading, waiting for slots, too large, done, released: all are cancelled, close returns soon."""
    for case in range(8):
        store = served(engram, dram=engram.dram_for(300))
        batches = [store.prefetch(engram.tokens(5, seed), priority=("step", "background")[seed % 2]) for seed in range(case)]
        if case % 2:
            batches[0].wait()
            set_fault(store, FAULT_STALL)
        batches += [store.prefetch(engram.tokens(40, 30)), store.prefetch(engram.tokens(40, 31)), store.prefetch(engram.tokens(400, 32))]
        store.warm(engram.tokens(500, 33))
        batches[-1].release()
        clear_faults(store)
        begin = time.monotonic()
        store.close()
        assert time.monotonic() - begin < 60
        for batch in batches[:-1]:
            with pytest.raises(ssdgram.StoreClosedError):
                batch.wait()


def test_a_with_block_closes(engram):
    with engram.open() as store, store.prefetch([1, 2, 3]) as batch:
        batch.wait()
    with pytest.raises(ssdgram.StoreClosedError):
        store.stats()
    with pytest.raises(KeyError), engram.open() as store:
        raise KeyError
    with pytest.raises(ssdgram.StoreClosedError):
        store.stats()


def test_a_dropped_store_warns_and_closes(engram):
    threads = set(threading.enumerate())
    store = engram.open()
    with pytest.warns(ResourceWarning, match="was dropped without close"):
        del store                                            # by reference count alone: no cycle keeps it
    assert set(threading.enumerate()) <= threads


def test_a_closed_store_is_dropped_in_silence(engram, recwarn):
    store = engram.open()
    store.close()
    del store
    gc.collect()
    assert not [warning for warning in recwarn.list if issubclass(warning.category, ResourceWarning)]


def test_memory_goes_back_at_close(engram):
    """Though the Store object, a Batch and an array of addresses are still there."""
    def resident():
        with open("/proc/self/statm") as file:
            fields = [int(word) for word in file.read().split()]
        return fields[1] * 4096

    store = engram.open(dram="64MiB")
    batches = [store.prefetch(engram.tokens(3000, seed)) for seed in range(3)]
    for batch in batches:
        batch.wait()
    addresses = batches[0].addresses(1)
    before = resident()
    store.close()
    assert before - resident() > 15 << 20
    assert len(addresses) == 3000


def test_many_stores_one_after_the_other_and_at_once(engram, wide, served):
    stores = [served(made, dram="3MiB") for made in (engram, wide, engram, engram)]
    for store, made in zip(stores, (engram, wide, engram, engram)):
        with store.prefetch(made.tokens(30)) as batch:
            assert_served(made, store, batch, made.tokens(30))
    for _ in range(20):
        with engram.open(dram="3MiB") as store, store.prefetch([1, 2, 3]) as batch:
            assert_served(engram, store, batch, [1, 2, 3])


@pytest.mark.parametrize("queue", QUEUES)
def test_close_while_the_drive_does_not_answer(engram, served, queue, caplog):
    """Bounded; the memory that the drive may yet write to is kept, and that is said."""
    store = served(engram, queue=queue, check=False)
    batch = store.prefetch(engram.tokens(5))
    batch.wait()
    set_fault(store, FAULT_STALL)
    late = store.prefetch(engram.tokens(5, 1))
    assert until(lambda: reading(store))
    begin = time.monotonic()
    with caplog.at_level(logging.ERROR, "ssdgram"):
        store.close()
    assert 1 < time.monotonic() - begin < 60
    assert "reads are still in the drive" in caplog.text
    for call in (batch.wait, late.wait, store.stats):
        with pytest.raises(ssdgram.StoreClosedError):
            call()
    from ssdgram import store as module

    state = module._leaked[-1][0]
    assert state is store._state
    leaked = module._leaked.pop()                            # for the other tests: this drive will write no more
    for pair in leaked[3]:
        for descriptor in pair:
            os.close(descriptor)
    leaked[2].close()


def test_close_wakes_those_who_wait(engram, served):
    store = served(engram, check=False)
    set_fault(store, FAULT_STALL)
    batch = store.prefetch(engram.tokens(5))
    caught = []

    def wait():
        try:
            batch.wait()
        except ssdgram.SSDGramError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    threading.Timer(0.2, clear_faults, (store,)).start()
    store.close()
    waiter.join(5)
    assert not waiter.is_alive() and isinstance(caught[0], ssdgram.StoreClosedError)


def test_a_result_gathered_during_close_is_right_or_refused(engram):
    """Another thread closes the store at any moment of a gather."""
    tokens = engram.tokens(400)
    want = {layer: engram.expected(layer, tokens) for layer in (1, 14)}
    outcomes = set()
    for turn in range(15):
        store = engram.open(dram="8MiB")
        batch = store.prefetch(tokens)
        batch.wait()
        closer = threading.Timer(0.0005 * turn, store.close)
        closer.start()
        with contextlib.suppress(ssdgram.StoreClosedError):
            while True:
                for layer in (1, 14):
                    assert np.array_equal(packed(batch, layer), want[layer])
                    outcomes.add("right")
        outcomes.add("refused")
        closer.join()
    assert outcomes == {"right", "refused"}


SCRIPT = """
import sys, threading, time
from pathlib import Path
from made_stores import Made, set_fault
from ssdgram._state import FAULT_STALL
made = Made(Path(sys.argv[1]))
store = made.open(queue=sys.argv[2])
batch = store.prefetch(made.tokens(50))
if sys.argv[3] == "stalled":
    set_fault(store, FAULT_STALL)
    late = store.prefetch(made.tokens(50, 1))
    time.sleep(0.1)
print("done", flush=True)
"""


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("how", ["open", "stalled"])
def test_a_process_that_just_ends(engram, queue, how):
    """Without close, with batches in flight, even with a drive that does not answer: it ends, soon and cleanly."""
    begin = time.monotonic()
    result = run(SCRIPT, str(engram.out), queue, how)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n" and "Traceback" not in result.stderr
    assert time.monotonic() - begin < 40


# ---------------------------------------------------------------- threads


def test_threads_share_a_store(engram, served):
    """Any thread may call a Store; batches made by one may be used and released by another."""
    store = served(engram, dram=engram.dram_for(3000))
    failures, handed = [], []

    def serve(number):
        try:
            for turn in range(60):
                tokens = engram.tokens(15, (number + turn) % 13)
                batch = store.prefetch(tokens)
                if turn % 5 == 0:
                    handed.append((tokens, batch))
                    continue
                with batch:
                    assert_served(engram, store, batch, tokens)
                store.stats()
                if turn % 20 == 0:
                    store.warm(engram.tokens(30, turn))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for tokens, batch in handed:
        with batch:
            assert_served(engram, store, batch, tokens)
    check_planner(store, engram)
    stats = store.stats()
    assert sum(stats.wait_us_buckets.values()) > 4 * 60
    assert stats.bytes_served == 4 * 60 * 15 * 2 * 12 * 66


def test_a_waiting_thread_does_not_hold_up_others(engram, served):
    """The GIL is free during a wait, and a stalled batch does not keep another's hits."""
    store = served(engram)
    with store.prefetch(engram.tokens(10)) as batch:
        batch.wait()
    set_fault(store, FAULT_STALL)
    stuck = store.prefetch(engram.tokens(10, 1))
    waiter = threading.Thread(target=stuck.wait)
    waiter.start()
    for _ in range(20):
        with store.prefetch(engram.tokens(10)) as batch:
            assert_served(engram, store, batch, engram.tokens(10))
    assert waiter.is_alive() and not stuck.ready()
    clear_faults(store)
    waiter.join()
    with stuck:
        assert_served(engram, store, stuck, engram.tokens(10, 1))


# ---------------------------------------------------------------- pickling


def test_stores_and_batches_refuse_pickling(engram, store):
    import copy

    with store.prefetch([1, 2]) as batch:
        for thing, words in ((store, "owns threads and memory"), (batch, "a claim on its store's memory")):
            for act in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=f"{words} and cannot be pickled"):
                    act(thing)


def test_geometry_manifest_and_history_pickle(engram):
    history = ssdgram.History([1, 2, 3], [True, False, True])
    for thing in (engram.geometry, engram.manifest, history):
        assert pickle.loads(pickle.dumps(thing)) == thing


def test_readers_and_planner_take_no_signals(engram, store):
    """Ctrl-C is for the thread that waits."""
    blocked = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ssdgram-"):
            with open(f"/proc/self/task/{thread.native_id}/status") as file:
                blocked[thread.name] = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
    assert len(blocked) >= 2 and all(mask & (1 << (signal.SIGINT - 1)) for mask in blocked.values())


def test_affinity(engram, served):
    cpu = min(os.sched_getaffinity(0))
    store = served(engram, tuning=Tuning(readers=1, depth=16, affinity=(cpu,)))
    assert until(lambda: all(os.sched_getaffinity(thread.native_id) == {cpu} for thread in threading.enumerate()
                             if thread.name.startswith("ssdgram-")))
    assert os.sched_getaffinity(0) != {cpu} or len(os.sched_getaffinity(0)) == 1
    with store.prefetch([1, 2, 3]) as batch:
        assert_served(engram, store, batch, [1, 2, 3])


def test_no_address_of_a_freed_batch_is_written(engram, store, monkeypatch):
    """The plan of a released batch is the planner's until its row is free; then its memory goes, if it is much."""
    from ssdgram import store as module

    monkeypatch.setattr(module, "KEPT_PLAN", 100)
    for seed in range(300):
        batch = store.prefetch(engram.tokens(200, seed % 5))
        batch.release()
        del batch
    assert quiet(store)
    with store.prefetch([1]) as batch:
        batch.wait()
    assert set(store._alive) == set(store._row_memory) == {0, batch._row} and not store._large


def test_a_batch_that_the_collector_releases_during_a_sweep(engram, served):
    """It may run between any two lines, and its batch be a large one: whoever sweeps goes on."""
    store = served(engram)
    words, late = store._plan.words, [SimpleNamespace(_row=5, _slots=np.zeros(KEPT_PLAN + 1), _flat=((), ()))]

    class Words:
        def __getitem__(self, index):
            while late:
                store._let_go(late.pop())
            return words[index]

    store._large, store._plan = {3, 4}, store._plan._replace(words=Words())
    try:
        store._sweep()
    finally:
        store._plan = store._plan._replace(words=words)
    assert not late and not store._large and 5 in store._leaving
