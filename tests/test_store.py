"""The way of the data through the public API: whatever is asked for, the rows are those of the checkpoint, bit by bit."""

import sys

import deny_io_uring
import numpy as np
import pytest
from checkpoints import TINY
from made_stores import QUEUES, assert_served, check_planner, packed, run
from vectors import checkpoint_tensors

import ssdgram
from ssdgram.kernels.reference import dequantise

torch = pytest.importorskip("torch")
DEAD = -7                                                    # an id that no vocabulary has: at a dead position nobody looks at it


def values(made, layer, rows):
    """What `rows(layer)` must be for packed rows, as bf16 bits: by the reference's tables."""
    geometry = made.geometry
    scales = made.manifest.global_scales
    scale = None if scales is None else scales[geometry.layer_index(layer)]
    return dequantise(rows[..., :geometry.code_bytes], rows[..., geometry.code_bytes:], geometry.encoding, scale)


def bits(rows):
    """A bf16 tensor as uint16."""
    return rows.view(torch.int16).numpy().view(np.uint16)


# ---------------------------------------------------------------- the golden checkpoint


def test_the_golden_checkpoint(tiny, served):
    """expected.npz: row ids, values (ran: published code), and the checkpoint's own bytes; whole, and in its chunks."""
    golden = np.load(TINY / "expected.npz")
    tensors = checkpoint_tensors(TINY)
    tokens, participates = golden["token_ids"], golden["participates"]
    assert np.array_equal(tiny.row_ids(tokens, participates=participates), golden["row_ids"])
    store = served(tiny, check=False)                        # its rows are random, not made up from their numbers
    history = ssdgram.History(tokens, participates)
    ends = np.cumsum(golden["chunks"])
    pieces = [history.sequence(int(end - size), int(end)) for size, end in zip(golden["chunks"], ends)]
    for request in (ssdgram.Sequence(tokens, participates), pieces):
        with store.prefetch(request) as batch:
            for index, layer in enumerate(store.layers):
                assert np.array_equal(bits(batch.rows(layer)), golden[f"l{layer}/emb_bf16"])
                prefix = f"layers.{layer}.engram.embed."
                whole = np.concatenate([tensors[prefix + "weight"], tensors[prefix + "scale"]], axis=1)
                assert np.array_equal(packed(batch, layer), whole[golden["row_ids"][:, index]])
    for piece, end in zip(pieces, ends):
        with store.prefetch(piece) as batch:
            for layer in store.layers:
                assert np.array_equal(bits(batch.rows(layer)), golden[f"l{layer}/emb_bf16"][end - len(piece):end])


# ---------------------------------------------------------------- what may be asked for


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 500])
def test_random_tokens(engram, served, queue, count):
    store = served(engram, queue=queue)
    assert store.queue == queue
    tokens = engram.tokens(count)
    with store.prefetch(tokens) as batch:
        assert len(batch) == count
        assert_served(engram, store, batch, tokens)


def test_the_real_shape_with_pages_shared_by_rows(wide, served):
    store = served(wide)
    for seed in range(5):
        tokens = wide.tokens(300, seed)
        with store.prefetch(tokens) as batch:
            assert_served(wide, store, batch, tokens)
    assert store.stats().merged_rows > 0


def test_values_are_the_references(engram, served):
    store = served(engram)
    tokens = engram.tokens(200)
    with store.prefetch(tokens) as batch:
        for layer in store.layers:
            rows = batch.rows(layer)
            assert rows.dtype == torch.bfloat16 and rows.shape == (200, 12, 64)
            assert np.array_equal(bits(rows), values(engram, layer, engram.expected(layer, tokens)))


def test_ple(ple, served):
    store = served(ple)
    tokens = ple.tokens(150)
    tokens[[5, 6, 40, 149]] = ple.geometry.eos_token_id
    dead = np.zeros(150, bool)
    dead[[0, 11, 12, 80]] = True
    for context in ({}, {"lookback": ple.tokens(5, 1)}, {"participates": ~dead}):
        with store.prefetch(tokens, **context) as batch:
            assert_served(ple, store, batch, tokens, **context)
            for layer in store.layers:
                assert np.array_equal(bits(batch.rows(layer)), values(ple, layer, ple.expected(layer, tokens, **context)))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 9, 40])
def test_lookback(engram, served, length):
    """None or short: the sequence starts there; longer than n - 1: the last n - 1 count."""
    store = served(engram)
    tokens, before = engram.tokens(70, 1), engram.tokens(length, 2)
    dead_before = np.arange(length) % 3 != 1
    for context in ({"lookback": before}, {"lookback": before, "lookback_participates": dead_before}):
        with store.prefetch(tokens, **context) as batch:
            assert_served(engram, store, batch, tokens, **context)
        assert np.array_equal(engram.row_ids(tokens, lookback=before), engram.row_ids(tokens, lookback=before[-3:]))
    whole = np.concatenate([before, tokens])
    with store.prefetch(tokens, lookback=before) as batch:
        assert np.array_equal(packed(batch, 14), engram.expected(14, whole)[length:])


def test_no_lookback_is_a_start(engram, served):
    store = served(engram)
    tokens = engram.tokens(20)
    with store.prefetch(tokens) as none, store.prefetch(tokens, lookback=[]) as empty, store.prefetch(tokens, lookback=[7, 8]) as some:
        assert np.array_equal(packed(none, 1), packed(empty, 1))
        assert not np.array_equal(packed(none, 1)[0], packed(some, 1)[0])


def test_a_list_of_sequences_is_concatenated_in_order(engram, served):
    store = served(engram)
    random = np.random.default_rng(7)
    parts, want = [], {layer: [] for layer in store.layers}
    for number in range(40):
        count = int(random.integers(0, 12))
        tokens = engram.tokens(count, 100 + number)
        context = {"participates": random.random(count) < 0.8, "lookback": engram.tokens(int(random.integers(0, 6)), 200 + number)}
        tokens[~context["participates"]] = DEAD
        parts.append(ssdgram.Sequence(tokens, **context))
        for layer in store.layers:
            want[layer].append(engram.expected(layer, tokens, **context))
    with store.prefetch(parts) as batch:
        assert len(batch) == sum(map(len, parts))
        for layer in store.layers:
            assert np.array_equal(packed(batch, layer), np.concatenate(want[layer]))
    with store.prefetch(tuple(parts)) as batch:
        assert len(batch) == sum(map(len, parts))


def test_chunks_by_history_are_the_whole(engram, served):
    """Append, rewind, fork and chunk boundaries give the rows of one fresh run of the final sequence."""
    store = served(engram)
    final, wrong = engram.tokens(90, 3), engram.tokens(40, 4)
    parts = np.ones(90, bool)
    parts[20:29] = False
    history = ssdgram.History(final[:50], parts[:50])
    history.append(wrong)
    history.rewind(50)
    branch = history.fork()
    history.append(wrong[:5])
    branch.append(final[50:], parts[50:])
    for layer in store.layers:
        found = []
        for start, stop in ((0, 1), (1, 2), (2, 22), (22, 23), (23, 51), (51, 90)):
            with store.prefetch(branch.sequence(start, stop)) as batch:
                found.append(packed(batch, layer))
        assert np.array_equal(np.concatenate(found), engram.expected(layer, final, participates=parts))


def test_no_tokens(engram, served):
    store = served(engram)
    for request in ([], np.empty(0, np.int64), ssdgram.Sequence([]), [ssdgram.Sequence([]), ssdgram.Sequence([], lookback=[5, 6])]):
        with store.prefetch(request) as batch:
            batch.wait()
            assert len(batch) == 0
            assert batch.rows(1).shape == (0, 12, 64) and batch.packed(14).shape == (0, 12, 66)
            assert batch.addresses(1).shape == (0, 3)


@pytest.mark.parametrize("convert", [
    list, tuple, np.int64, np.uint16, lambda t: t.astype(np.int32)[::-1][::-1], lambda t: torch.from_numpy(t),
    lambda t: torch.from_numpy(t.astype(np.int64)), lambda t: np.repeat(t, 2)[::2]],
    ids=["list", "tuple", "int64", "uint16", "int32", "tensor", "tensor of int64", "every second"])
def test_kinds_of_tokens(engram, served, convert):
    store = served(engram)
    tokens = engram.tokens(30)
    given = convert(tokens.tolist()) if convert in (list, tuple) else convert(tokens)
    with store.prefetch(given) as batch:
        assert_served(engram, store, batch, tokens)


def test_tokens_are_copied(engram, served):
    store = served(engram)
    for _ in range(20):
        tokens, lookback = engram.tokens(400), engram.tokens(3, 1)
        kept, kept_lookback = tokens.copy(), lookback.copy()
        batch = store.prefetch(tokens, lookback=lookback)
        tokens[:], lookback[:] = 3, 3
        with batch:
            assert_served(engram, store, batch, kept, lookback=kept_lookback)


# ---------------------------------------------------------------- positions that take no part


def test_dead_positions_return_the_dead_bundles_rows(engram, served):
    """Placeholder ids there are not looked at; the rows are those of dead_keys, and neighbours do not see over them."""
    store = served(engram)
    tokens = engram.tokens(60)
    dead = np.zeros(60, bool)
    dead[[0, 9, 10, 11, 30, 59]] = True
    placeholders = tokens.copy()
    placeholders[dead] = [-1, -(2**31), 2**31 - 1, engram.vocabulary, -200, 10**6]
    for given in (tokens, placeholders, placeholders.astype(np.int64) * np.where(dead, 2**20, 1)):
        with store.prefetch(given, participates=~dead) as batch:
            assert_served(engram, store, batch, tokens, participates=~dead)
            keys = engram.geometry.dead_keys(engram.token_map)
            for index, layer in enumerate(store.layers):
                rows = packed(batch, layer)[dead].reshape(6, 3, 4, 66)
                for order in range(3):
                    bundle = engram.bundle_bytes(3 * index + order, keys[index, order])
                    assert np.array_equal(rows[0, order][:, :64].reshape(-1), bundle[:4 * 64])
                    assert np.array_equal(rows[0, order][:, 64:].reshape(-1), bundle[4 * 64:])
                assert (rows == rows[0]).all() and rows.any()


def test_dead_positions_never_read(engram, served):
    """The dead bundles were read at open and stay, whatever comes: a whole batch of them costs no read."""
    store = served(engram, dram=engram.dram_for(80))
    for seed in range(30):
        with store.prefetch(engram.tokens(8, seed)) as batch:
            batch.wait()
    assert store.stats().evictions > 100
    reads = store.stats().reads
    with store.prefetch(np.full(300, -1), participates=np.zeros(300, bool)) as batch:
        assert_served(engram, store, batch, np.zeros(300, int), participates=np.zeros(300, bool))
    assert store.stats().reads == reads


def test_equal_keys_of_neighbouring_orders_never_meet(engram, served):
    """After a BOS (compressed id 0) the x of orders 2 and 3, then 3 and 4, are equal; their rows are not."""
    store = served(engram)
    bos = int(np.flatnonzero(engram.token_map == 0)[0])
    for tokens in ([bos, 50, 60, 70], [50, bos, 60, 70, 80], [bos, bos, bos, 61]):
        keys = engram.geometry.keys(tokens, engram.token_map)
        assert (keys[:, :, 0] == keys[:, :, 1]).any() or (keys[:, :, 1] == keys[:, :, 2]).any()
        for _ in range(2):                                   # read, then hit
            with store.prefetch(tokens) as batch:
                assert_served(engram, store, batch, tokens)


def test_key_zero_is_a_key(engram, served):
    """Nothing but BOS, its lookback too: x is 0 in every order."""
    store = served(engram)
    bos = int(np.flatnonzero(engram.token_map == 0)[0])
    assert (engram.geometry.keys([bos], engram.token_map, lookback=[bos] * 3) == 0).all()
    for _ in range(2):
        with store.prefetch([bos] * 5, lookback=[bos] * 3) as batch:
            assert_served(engram, store, batch, [bos] * 5, lookback=[bos] * 3)
    assert sum(store.stats().misses.values()) == 12          # six dead bundles at open, six of key 0


# ---------------------------------------------------------------- parts of a store


@pytest.mark.parametrize("layers", [[1], [14], [14, 1]])
def test_layers(engram, served, layers):
    store = served(engram, layers=layers)
    assert store.layers == tuple(sorted(layers))
    with store.prefetch(engram.tokens(100)) as batch:
        assert_served(engram, store, batch, engram.tokens(100))
    reads = sum(store.stats().misses.values())
    assert reads == (engram.distinct((engram.tokens(100), {})) // 2 + 3) * len(layers)


@pytest.mark.parametrize("columns", [[0], [11], range(6), range(6, 12), slice(None, None, 3), [0, 5, 6, 7, 11], range(4, 8)])
def test_columns(engram, served, columns):
    store = served(engram, columns=columns)
    kept = list(range(12)[columns] if isinstance(columns, slice) else columns)
    tokens = engram.tokens(120)
    with store.prefetch(tokens) as batch:
        for layer in store.layers:
            rows = engram.expected(layer, tokens)[:, kept]
            assert np.array_equal(packed(batch, layer), rows)
            assert np.array_equal(bits(batch.rows(layer)), values(engram, layer, rows))


def test_columns_of_all_ranks_are_the_whole(wide, served):
    """As vLLM splits them at TP 8: 3 | 3 | 2+1 | ... columns, side by side."""
    tokens = wide.tokens(50)
    parts = []
    for rank in range(8):
        store = served(wide, columns=range(3 * rank, 3 * rank + 3), dram="4MiB", layers=[14])
        with store.prefetch(tokens) as batch:
            parts.append(packed(batch, 14))
    assert np.array_equal(np.concatenate(parts, axis=1), wide.expected(14, tokens))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_owners_sum_to_the_whole(engram, served, world):
    tokens = engram.tokens(80)
    dead = np.zeros(80, bool)
    dead[[3, 4, 50]] = True
    total, values_total = dict.fromkeys((1, 14), 0), dict.fromkeys((1, 14), 0)
    shares = []
    for rank in range(world):
        store = served(engram, owner=(rank, world))
        with store.prefetch(tokens, participates=~dead) as batch:
            for layer in store.layers:
                part = packed(batch, layer).reshape(80, 3, 4, 66)
                served_here = (batch.addresses(layer) != 0).numpy()
                shares.append(served_here)
                assert (part[~served_here] == 0).all()
                total[layer] = total[layer] + part.astype(int)
                values_total[layer] = values_total[layer] + batch.rows(layer).double()
    assert (np.sum([share.sum() for share in shares]) == 80 * 3 * 2)         # each bundle served by exactly one rank
    for layer in (1, 14):
        rows = engram.expected(layer, tokens, participates=~dead)
        assert np.array_equal(total[layer].reshape(80, 12, 66), rows)
        whole = torch.from_numpy(values(engram, layer, rows).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(values_total[layer], whole.double())


def test_owners_share_is_fair(engram, served):
    stores = [served(engram, owner=(rank, 4)) for rank in range(4)]
    tokens = engram.tokens(1000)
    shares = []
    for store in stores:
        with store.prefetch(tokens) as batch:
            batch.wait()
            shares.append(batch.timing["bundles"])
    assert sum(shares) >= engram.distinct((tokens, {}))
    assert max(shares) < 1.3 * min(shares)


def test_owner_with_columns_and_layers(engram, served):
    tokens = engram.tokens(60)
    total = 0
    for rank in range(2):
        store = served(engram, owner=(rank, 2), columns=range(2, 7), layers=[14])
        with store.prefetch(tokens) as batch:
            total = total + packed(batch, 14).astype(int)
    assert np.array_equal(total, engram.expected(14, tokens)[:, 2:7])


def test_stripes(striped, served, tmp_path):
    tokens = striped.tokens(100)
    store = served(striped)
    with store.prefetch(tokens) as batch:
        assert_served(striped, store, batch, tokens)
    moved = []
    for number, root in enumerate(striped.manifest.roots):   # found again where they are now
        moved.append(tmp_path / f"moved-{number}")
        moved[-1].symlink_to(root)
    store = served(striped, stripes=moved)
    with store.prefetch(tokens) as batch:
        assert_served(striped, store, batch, tokens)


# ---------------------------------------------------------------- under pressure


def test_a_hot_set_leaves_the_bookkeeping_whole(engram, served, tmp_path):
    """Bundles that came out of a file are bundles like others: found, evicted, the dead ones among them."""
    text = engram.tokens(60)
    for turn in range(3):
        store = served(engram, dram=engram.dram_for(300), hotset=tmp_path / "hot")
        assert (store.hot_bundles > 100) == (turn > 0)
        check_planner(store, engram)
        for seed in range(8):
            with store.prefetch(np.concatenate([engram.tokens(20, seed), text[:20]])) as batch:
                assert_served(engram, store, batch, np.concatenate([engram.tokens(20, seed), text[:20]]))
        check_planner(store, engram)
        store.close()


@pytest.mark.parametrize("queue", QUEUES)
def test_eviction(engram, served, queue):
    """A cache of a few hundred bundles, thirty times as many asked for, some again and again."""
    store = served(engram, dram=engram.dram_for(300, queue=queue), queue=queue)
    often = engram.tokens(20, 999)
    for seed in range(60):
        tokens = np.concatenate([engram.tokens(25, seed), often])
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
    stats = store.stats()
    assert stats.evictions > 3000 and sum(stats.hits.values()) > 3000


def test_many_batches_in_flight_share_the_cache(engram, served):
    store = served(engram, dram=engram.dram_for(2500))
    texts = [engram.tokens(12, seed) for seed in range(20)]
    random = np.random.default_rng(5)
    flying = []
    for _ in range(300):
        tokens = texts[random.integers(20)] if random.random() < 0.6 else engram.tokens(12, int(random.integers(10**6)))
        flying.append((tokens, store.prefetch(tokens, priority="background" if random.random() < 0.3 else "step")))
        if len(flying) > 12:
            tokens, batch = flying.pop(int(random.integers(len(flying))))
            with batch:
                assert_served(engram, store, batch, tokens)
    for tokens, batch in flying:
        with batch:
            assert_served(engram, store, batch, tokens)
    assert sum(store.stats().joins.values()) > 0


def test_the_largest_batch_that_fits(engram, served):
    """As many distinct bundles as there are slots: every one of them is in use."""
    store = served(engram, dram=engram.dram_for(1000))
    tokens = engram.tokens(1, 0)
    while engram.distinct((engram.tokens(len(tokens) + 1, 0), {})) <= store.capacity:
        tokens = engram.tokens(len(tokens) + 1, 0)
    for _ in range(2):
        with store.prefetch(tokens) as batch:
            assert_served(engram, store, batch, tokens)
        with store.prefetch(engram.tokens(len(tokens), 1)) as batch:
            assert_served(engram, store, batch, engram.tokens(len(tokens), 1))


# ---------------------------------------------------------------- without io_uring

SMOKE = """
import sys
from pathlib import Path
import ssdgram
from made_stores import Made, assert_served, check_planner
made = Made(Path(sys.argv[1]))
store = made.open()
assert store.queue == "threads", store.queue
for seed in range(5):
    with store.prefetch(made.tokens(200, seed)) as batch:
        assert_served(made, store, batch, made.tokens(200, seed))
check_planner(store, made)
store.close()
try:
    made.open(queue="uring")
except ssdgram.UnavailableError as error:
    assert "seccomp" in str(error), error
else:
    raise SystemExit("uring was not refused")
print("served by", store.queue)
"""


def test_io_uring_refused(engram):
    result = run(SMOKE, str(engram.out), command=(sys.executable, deny_io_uring.__file__))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "served by threads\n"
