"""Attached stores do what opened ones do, several at once, out of one cache and by one set of reads."""

import os
import pickle
import shutil
import stat
import threading

import numpy as np
import pytest
from made_stores import QUEUES, QUICK, THREADED, assert_served, clear_faults, packed, reading, set_fault, until
from served_stores import TUNING, sequences, serving

import ssdgram
from ssdgram import _state as s
from ssdgram.serve import client
from ssdgram.serve.server import Server

torch = pytest.importorskip("torch")


@pytest.fixture
def server(engram, tmp_path):
    with serving(engram, tmp_path) as server:
        yield server


@pytest.fixture
def attach(server):
    """attach() attaches; what is still attached at the end is closed."""
    attached = []

    def attach_it(**options):
        attached.append(ssdgram.attach(server.path, **options))
        return attached[-1]

    yield attach_it
    for store in attached:
        store.close()


# ---------------------------------------------------------------- rows


def test_rows_of_two_clients_at_once(engram, server, attach):
    first, second = attach(), attach()
    for seed in range(20):
        a, b = engram.tokens(50, seed), engram.tokens(70, 1000 + seed)
        with first.prefetch(a) as one, second.prefetch(b) as two:
            assert_served(engram, second, two, b)
            assert_served(engram, first, one, a)


@pytest.mark.parametrize("queue", QUEUES)
def test_every_result_is_that_of_an_opened_store(engram, tmp_path, served, queue):
    own = served(engram)
    with serving(engram, tmp_path, queue=queue, tuning=THREADED if queue == "threads" else QUICK) as server, \
            ssdgram.attach(server.path) as store:
        assert (store.layers, store.columns, store.dim, store.row_bytes) == (own.layers, own.columns, own.dim, own.row_bytes)
        assert isinstance(store, ssdgram.Store) and store.queue == queue and "Store" in repr(store)
        for seed in range(8):
            given, wanted = sequences(engram, seed)
            with store.prefetch(given) as batch, own.prefetch(given) as mine:
                assert len(batch) == len(mine)
                batch.wait()
                for layer in store.layers:
                    np.testing.assert_array_equal(packed(batch, layer), wanted[layer])
                    assert torch.equal(batch.rows(layer).view(torch.int16), mine.rows(layer).view(torch.int16))
                    assert batch.addresses(layer).shape == mine.addresses(layer).shape
                assert batch.timing["bundles"] == mine.timing["bundles"]


def test_some_layers_only(engram, tmp_path):
    with serving(engram, tmp_path, check=False, layers=[14]) as server, ssdgram.attach(server.path) as store:
        assert store.layers == (14,)
        with store.prefetch(engram.tokens(30)) as batch:
            assert_served(engram, store, batch, engram.tokens(30))
            with pytest.raises(ssdgram.ConfigError, match="layer 1 is not served"):
                batch.wait(1)


def test_other_encodings(ple, tmp_path):
    with serving(ple, tmp_path) as server, ssdgram.attach(server.path) as store, store.prefetch(ple.tokens(40)) as batch:
        assert_served(ple, store, batch, ple.tokens(40))


def test_threads_of_one_client(engram, server, attach):
    store, wrong = attach(), []

    def serve(number):
        for seed in range(number, number + 40, 4):
            tokens = engram.tokens(30, seed)
            with store.prefetch(tokens) as batch:
                if not np.array_equal(packed(batch, 14), engram.expected(14, tokens)):
                    wrong.append(seed)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------- one cache, one read, one plan


def test_two_ranks_read_what_one_reads(engram, tmp_path):
    """The same steps on two ranks: the drive is read as often as for one, in whatever order the ranks come."""
    steps = [engram.tokens(48, seed // 2) for seed in range(24)]
    reads = []
    for ranks in (1, 2):
        with serving(engram, tmp_path) as server:
            stores = [ssdgram.attach(server.path) for _ in range(ranks)]
            for number, tokens in enumerate(steps):
                batches = [store.prefetch(tokens) for store in (stores if number % 2 else stores[::-1])]
                for store, batch in zip(stores if number % 2 else stores[::-1], batches):
                    assert_served(engram, store, batch, tokens)
                    batch.release()
            stats = stores[0].stats()
            reads.append((stats.reads, stats.bytes_read))
            assert stats.budgets["dram"][1] == 8 << 20
            for store in stores:
                store.close()
    assert reads[0] == reads[1]


def test_a_step_of_several_ranks_is_planned_once(engram, server, attach):
    ranks = [attach() for _ in range(4)]
    for seed in range(10):
        tokens = engram.tokens(40, seed)
        batches = [rank.prefetch(tokens) for rank in ranks]
        for rank, batch in zip(ranks, batches):
            assert_served(engram, rank, batch, tokens)
        for batch in batches[seed % 4:] + batches[:seed % 4]:        # whoever leaves first
            batch.release()
    assert server.joined == 30
    assert ranks[0].stats().batches == 10


def test_batches_differ_by_a_flag_a_token_or_their_class(engram, server, attach):
    first, second = attach(), attach()
    tokens = engram.tokens(30)
    other = tokens.copy()
    other[17] = (other[17] + 1) % engram.vocabulary
    mask = np.ones(30, bool)
    mask[4] = False
    with first.prefetch(tokens) as batch:
        for given, options, context in ((other, {}, {}), (tokens, {"participates": mask}, {"participates": mask}),
                                        (tokens, {"lookback": [5]}, {"lookback": np.array([5])}), (tokens[:29], {}, {})):
            with second.prefetch(given, **options) as another:
                assert_served(engram, second, another, given, **context)
        with second.prefetch(tokens, "background") as another:
            assert_served(engram, second, another, tokens)
        assert_served(engram, first, batch, tokens)
    assert server.joined == 0


def test_memory_of_one_budget(engram, tmp_path):
    """Clients map the cache, they do not copy it: the memory of three is that of one, but for what they wrote into their shares."""
    with serving(engram, tmp_path, dram="64MiB") as server:
        stores = [ssdgram.attach(server.path) for _ in range(3)]
        tokens = engram.tokens(400)
        for store in stores:
            with store.prefetch(tokens) as batch:
                assert_served(engram, store, batch, tokens)
        cache = os.fstat(server.store._arena.fd)
        assert all(os.path.samestat(cache, store._block._file) for store in stores)
        assert cache.st_blocks * 512 < stores[0].stats().budgets["dram"][1] == 64 << 20
        for client in server._places[:3]:
            assert os.fstat(client.memory.fd).st_blocks * 512 < 1 << 18
        for store in stores:
            store.close()


def test_warm(engram, tmp_path):
    """More than a batch takes, in pieces that look back at each other."""
    with serving(engram, tmp_path, dram="32MiB", positions=128) as server, ssdgram.attach(server.path) as store:
        tokens = engram.tokens(300, 3)
        store.warm(ssdgram.Sequence(tokens, lookback=engram.tokens(3)))
        assert until(lambda: store.stats().tokens > 300 and store.stats().pending_pages == 0)
        reads = store.stats().reads
        with store.prefetch(tokens[100:200], lookback=tokens[90:100]) as batch, \
                store.prefetch(tokens[:2], lookback=engram.tokens(3)) as first:
            assert_served(engram, store, batch, tokens[100:200], lookback=tokens[90:100])
            assert_served(engram, store, first, tokens[:2], lookback=engram.tokens(3))
        assert store.stats().reads == reads


def test_statistics(engram, server, attach):
    first, second = attach(), attach()
    for store in (first, second):
        with store.prefetch(engram.tokens(60)) as batch:
            batch.wait()
            batch.packed(1)
    here, there = first.stats(), second.stats()
    assert here.reads == there.reads == server.store.stats().reads > 0
    assert here.hits == server.store.stats().hits and sum(here.misses.values()) > 0
    assert here.bytes_served == 60 * len(first.columns) * first.row_bytes
    assert sum(here.wait_us_buckets.values()) == 2 and here.wait_us_sum > 0
    assert set(here.engine_us_buckets) == set(server.store.stats().engine_us_buckets)


def test_recording(engram, server, attach, tmp_path):
    store = attach()
    recorder = store.record(tmp_path / "live.trace", limit=100)
    with store.prefetch(engram.tokens(20)) as batch:
        batch.wait()
    recorder.stop()
    assert (tmp_path / "live.trace").stat().st_size > 80
    with pytest.raises(ssdgram.ConfigError, match="only tokens"):
        store.record(tmp_path / "keys.trace", keys=True)


# ---------------------------------------------------------------- the contract's other side


def test_bad_calls(engram, server, attach):
    store = attach()
    with pytest.raises(ssdgram.TokenError, match="position 1 holds token id -1"):
        store.prefetch([1, -1])
    with pytest.raises(ssdgram.TokenError):
        store.warm([engram.vocabulary])
    with pytest.raises(ssdgram.ConfigError, match="priority"):
        store.prefetch([1], "urgent")
    with pytest.raises(ssdgram.ConfigError, match="the server takes 2048"):
        store.prefetch(engram.tokens(2049))
    with pytest.raises(ssdgram.ConfigError, match="device='cuda'"):
        store.frame(4)
    with pytest.raises(ssdgram.ConfigError, match="hbm"):
        ssdgram.attach(server.path, hbm="1GiB")
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(store)
    with store.prefetch([]) as batch:
        assert packed(batch, 1).shape[0] == 0


def test_calls_after_the_end(engram, server, attach):
    store = attach()
    batch, released = store.prefetch([1, 2]), store.prefetch([3])
    released.release()
    released.release()
    with pytest.raises(ssdgram.BatchReleasedError):
        released.wait()
    store.close()
    store.close()
    for call in (lambda: store.prefetch([1]), lambda: store.warm([1]), store.stats, batch.wait, lambda: batch.rows(1)):
        with pytest.raises(ssdgram.StoreClosedError):
            call()
    batch.release()


def test_too_many_batches(engram, server, attach):
    store, other = attach(), attach()
    batches = [store.prefetch(engram.tokens(3, seed)) for seed in range(8)]
    with pytest.raises(ssdgram.StoreBusyError, match="more --batches") as caught:
        store.prefetch([1])
    assert caught.value.tickets == tuple(range(1, 9))
    with other.prefetch([1, 2]) as batch:                    # another client has its own
        assert_served(engram, other, batch, np.array([1, 2]))
    batches.pop().release()
    for seed in range(200):
        with store.prefetch(engram.tokens(3, seed)) as batch:
            batch.wait()
    for batch in batches:
        batch.release()


def test_a_dropped_batch_releases_itself(engram, server, attach):
    store = attach()
    for seed in range(20):
        with pytest.warns(ResourceWarning, match="without release"):
            store.prefetch(engram.tokens(4, seed))


def test_errors_of_the_server_arrive_typed(engram, tmp_path):
    with serving(engram, tmp_path, dram=engram.dram_for(150, tuning=TUNING)) as server, ssdgram.attach(server.path) as store:
        with store.prefetch(engram.tokens(400)) as batch, pytest.raises(ssdgram.BatchTooLargeError) as caught:
            batch.wait()
        assert caught.value.need > caught.value.have == store.capacity
        with store.prefetch(engram.tokens(15, 1)) as holds:
            holds.wait()
            starved = server.store.stats().starved
            with store.prefetch(engram.tokens(15, 2)) as batch:
                assert until(lambda: server.store.stats().starved > starved)
                with pytest.raises(ssdgram.StoreBusyError) as busy:
                    batch.wait(timeout_s=0.2)
            assert busy.value.tickets
        set_fault(server.store, -5)                          # EIO
        with store.prefetch(engram.tokens(5, 3)) as batch, pytest.raises(ssdgram.ReadError) as failed:
            batch.wait(1)
        assert failed.value.layer == 1 and failed.value.errno == 5 and failed.value.file.endswith(".rows") and failed.value.rows
        assert 0 <= failed.value.positions[0] < 5
        set_fault(server.store, s.FAULT_STALL)
        with store.prefetch(engram.tokens(5, 4)) as batch:
            with pytest.raises(ssdgram.ReadTimeoutError) as late:
                batch.wait(14, timeout_s=0.1)
            assert late.value.layer == 14 and late.value.outstanding > 0
            clear_faults(server.store)
            assert_served(engram, store, batch, engram.tokens(5, 4))


def test_what_failed_is_told_by_a_server_that_is_slow_to_answer(engram, server, attach, monkeypatch):
    """It is a failed read, not one that is late: the server's words are worth waiting for."""
    store = attach()
    monkeypatch.setattr(client, "WHY_S", 0.0)
    set_fault(server.store, -5)
    with store.prefetch(engram.tokens(5, 3)) as batch, pytest.raises(ssdgram.ReadError) as failed:
        batch.wait(1)
    clear_faults(server.store)
    assert type(failed.value) is ssdgram.ReadError and failed.value.errno == 5


def test_who_joins_a_failed_batch_reads_anew(engram, server, attach):
    first, second = attach(), attach()
    set_fault(server.store, -5)
    with first.prefetch(engram.tokens(6, 9)) as failed:
        for layer in first.layers:
            with pytest.raises(ssdgram.ReadError):
                failed.wait(layer)
        clear_faults(server.store)
        with second.prefetch(engram.tokens(6, 9)) as batch:
            assert_served(engram, second, batch, engram.tokens(6, 9))
    assert server.joined == 0


def test_a_cancelled_batch_leaves_its_joiner_alone(engram, server, attach):
    first, second = attach(), attach()
    set_fault(server.store, s.FAULT_STALL)
    begun = first.prefetch(engram.tokens(30, 5))
    joined = second.prefetch(engram.tokens(30, 5))
    assert until(lambda: reading(server.store) and server.joined == 1)
    begun.release()
    clear_faults(server.store)
    with joined:
        assert_served(engram, second, joined, engram.tokens(30, 5))


def test_replaced_files_are_noticed(engram, other, tmp_path):
    made = engram.copy(tmp_path / "copy")
    with serving(made, tmp_path, check=False, tuning=ssdgram.store.Tuning(readers=1, depth=16, identity_check_s=0.05)) as server, \
            ssdgram.attach(server.path) as store:
        batch = store.prefetch([1, 2, 3])
        batch.wait()
        shutil.copy(other.out / "manifest.json", made.out / "new")
        os.replace(made.out / "new", made.out / "manifest.json")

        def refused():
            try:
                store.prefetch([1]).release()
            except ssdgram.StoreReplacedError:
                return True
            return False

        assert until(refused)
        with pytest.raises(ssdgram.StoreReplacedError, match="restart the server"):
            store.warm([1])
        with batch:
            assert_served(engram, store, batch, np.array([1, 2, 3]))


# ---------------------------------------------------------------- the socket's place


def test_the_socket(engram, tmp_path):
    path = tmp_path / "s"
    with serving(engram, tmp_path) as server:
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        with pytest.raises(ssdgram.UnavailableError, match="another server"):
            Server(engram.out, path)
        assert server.attached == 0
        ssdgram.attach(path).close()
    assert not path.exists()
    with pytest.raises(ssdgram.UnavailableError, match="ssdgram serve"):
        ssdgram.attach(path)
    path.write_text("a file")
    with pytest.raises(ssdgram.UnavailableError, match="is no socket"):
        Server(engram.out, path)
    assert path.read_text() == "a file"


def test_a_server_that_cannot_start_leaves_nothing(engram, tmp_path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ssdgram.UnavailableError, match="is no socket"):
        Server(engram.out, tmp_path / "file")
    with pytest.raises(ssdgram.ManifestError):
        Server(tmp_path / "no store", tmp_path / "s")
    with pytest.raises(ssdgram.ConfigError, match="lies in the store's folder"):
        Server(engram.out, tmp_path / "s", hotset=engram.out / "hot")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "s.lock").write_text("somebody's")
    with pytest.raises(ssdgram.ManifestError):
        Server(tmp_path / "no store", tmp_path / "s")
    assert (tmp_path / "s.lock").read_text() == "somebody's"


def test_bad_servers(engram, tmp_path):
    with pytest.raises(ssdgram.ConfigError, match="clients=0"):
        Server(engram.out, tmp_path / "s", clients=0)
    with pytest.raises(ssdgram.ConfigError, match="batches in all"):
        Server(engram.out, tmp_path / "s", clients=1024, rows=1024)
    with pytest.raises(ssdgram.ConfigError, match="at most"):
        Server(engram.out, tmp_path / ("s" * 200))
    with pytest.raises(ssdgram.UnavailableError, match="choose a folder"):
        Server(engram.out, tmp_path / "none" / "s")
    with pytest.raises(ssdgram.ManifestError):
        Server(tmp_path, tmp_path / "s")
    with pytest.raises(ssdgram.BudgetError):
        Server(engram.out, tmp_path / "s", dram="100KiB")
    with serving(engram, tmp_path):                          # what failed left nothing in the way
        pass


def test_more_clients_than_places(engram, server, attach):
    stores = [attach() for _ in range(4)]
    with pytest.raises(ssdgram.UnavailableError, match="4 clients are attached already"):
        attach()
    stores[2].close()
    assert until(lambda: server.attached == 3)
    with attach().prefetch([1]) as batch:
        batch.wait()
