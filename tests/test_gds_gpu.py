"""Queue gds and the hot set's way into GPU memory on a real GPU with the real cuFile, in whatever mode it has. Skipped without.

A machine where cuFile opens nothing skips the store tests with cuFile's own words; the kernel and the rounds are tested all the same.
"""

import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ssdgram  # noqa: E402
from ssdgram import _cufile, _hotset_gds  # noqa: E402
from ssdgram import _state as s  # noqa: E402
from ssdgram.queues.state import new_state  # noqa: E402
from ssdgram.tools.synth import expected_rows  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gds")
    tokenizer = __file__.rpartition("/")[0] + "/golden/tiny_tokenizer.json"
    ssdgram.synthesize(folder / "ckpt", vocab_size=3000, layers=(1, 3), seed=5, tokenizer=tokenizer)
    ssdgram.convert(folder / "ckpt", folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def works(tmp_path_factory):
    """What a process of its own found cuFile to do here; skips where it does nothing."""
    found = _cufile.probe_in_child(tmp_path_factory.mktemp("probe"))
    if "error" in found:
        pytest.skip(f"cuFile: {found['error']}")
    return found


def wanted(store, tokens, layer):
    ids = store.geometry.row_ids(tokens, store._token_map)[:, store.geometry.layers.index(layer)]
    return expected_rows(5, layer, ids, store.geometry)


def serve(store, tokens):
    with store.prefetch(tokens) as batch:
        for layer in store.layers:
            assert np.array_equal(batch.packed(layer).cpu().numpy(), wanted(store, tokens, layer))


def test_the_probe_names_the_mode(works):
    assert works["statuses"] == [s.READ_OK] * 4
    assert works["mode"] in ("gds", "p2p", "compatibility", "unknown"), works
    assert works["properties"]["max_batch"] >= 1


def test_rows_are_exact_while_the_slab_evicts(built, works):
    generator = np.random.default_rng(1)
    with ssdgram.open(built, dram="64MiB", hbm="8MiB", device="cuda", queue="gds") as store:
        for _ in range(80):
            serve(store, generator.integers(0, store._vocabulary, int(generator.integers(1, 300))))
        stats = store.stats()
        assert stats.queue == "gds" and stats.retries == 0 and stats.evictions > 0
        assert stats.gds_mode in ("gds", "p2p", "compatibility", "unknown")


def test_two_streams_and_a_frame_gather_the_same_rows(built, works):
    generator = np.random.default_rng(2)
    with ssdgram.open(built, dram="64MiB", hbm="8MiB", device="cuda", queue="gds") as store:
        streams = [torch.cuda.Stream() for _ in range(2)]
        for number in range(40):
            tokens = generator.integers(0, store._vocabulary, 100)
            with torch.cuda.stream(streams[number % 2]), store.prefetch(tokens) as batch:
                for layer in store.layers:
                    assert np.array_equal(batch.packed(layer).cpu().numpy(), wanted(store, tokens, layer))
        frame = store.frame(50)
        outs = [frame.packed(layer) for layer in store.layers]
        torch.cuda.synchronize()
        tokens = generator.integers(0, store._vocabulary, 50)
        assert [tuple(out.shape) for out in outs] == [(50, len(store.columns), store.row_bytes)] * len(store.layers)
        serve(store, tokens)


def test_a_corrupt_page_is_caught_and_named(built, works, tmp_path):
    out = tmp_path / "store"
    shutil.copytree(built, out)
    tokens = np.arange(20, 26)
    with ssdgram.open(out, dram="64MiB", hbm="8MiB", device="cuda", queue="gds") as store:
        row = int(store.geometry.row_ids(tokens, store._token_map)[2, 0, 0] - store.geometry.offset_array[0, 0])
        page, place = divmod(row, store.manifest.rows_per_page)
        path = store._paths[0]
        data = bytearray(path.read_bytes())
        data[page * 4096 + place * store.row_bytes + 7] ^= 1
        path.write_bytes(data)
        with store.prefetch(tokens) as batch, pytest.raises(ssdgram.RowCheckError, match=f"page {page}, rows \\[{row}\\].*wrong checksum"):
            batch.wait(store.layers[0])


@pytest.mark.parametrize("kvikio", [True, False])
def test_a_hot_set_goes_to_gpu_memory_and_is_checked_there(built, works, tmp_path, monkeypatch, kvikio):
    if kvikio:
        pytest.importorskip("kvikio")
    else:
        monkeypatch.setattr(_hotset_gds, "KvikioSource", refuse)
    path, tokens = tmp_path / "hot", np.random.default_rng(3).integers(0, 250, 400)
    with ssdgram.open(built, dram="64MiB", hbm="16MiB", device="cuda", queue="gds", hotset=path) as store:
        serve(store, tokens)
    with ssdgram.open(built, dram="64MiB", hbm="16MiB", device="cuda", queue="gds", hotset=path) as store:
        assert store.hot_bundles > 500
        before = store.stats().reads
        serve(store, tokens)
        assert store.stats().reads == before
    data = bytearray(path.read_bytes())
    data[4096 + 200] ^= 1
    path.write_bytes(data)
    with ssdgram.open(built, dram="64MiB", hbm="16MiB", device="cuda", queue="gds", hotset=path) as store:
        assert any("1 entries" in notice for notice in store.notices)
        serve(store, tokens)


def refuse(*arguments):
    raise ImportError("not in this test")


def test_rounds_of_checks_without_cufile(built):
    """The CUDA side alone: rows out of pinned memory into the slab, a wrong one left out, the word behind the results."""
    from ssdgram._gds_cuda import CudaDevice
    from ssdgram.layout.page import pack_pages

    codes, scales = (np.random.default_rng(4).integers(0, 256, (15, width), np.uint8) for width in (256, 8))
    page = np.zeros(4096, np.uint8)
    pack_pages(codes.ctypes.data, scales.ctypes.data, 256, 8, page, 0, 1, 15, 77, 3, 5)
    state = new_state(np.zeros(1, s.FILE), generation=77)
    slab = torch.zeros((15, 320), dtype=torch.uint8, device="cuda")
    device = CudaDevice(slab.device, slab.data_ptr(), state, pinned=False)
    buffer, address = device.host_buffer(4096)
    buffer[:] = page
    buffer[264 * 4] ^= 1
    with device.entered():
        rounds = device.rounds(1, 16)
        for place in range(15):
            at, target = address + 264 * place, slab.data_ptr() + 320 * place
            rounds.jobs[8 * place:8 * place + 7] = (at, at + 256, address + 4064 - 60 + 4 * place, 3 | 5 << 32, place, target, target + 256)
        rounds.launch(0, 15, 1)
        torch.cuda.synchronize()
    assert rounds.words[0] == 1
    assert np.flatnonzero(rounds.results[:15]).tolist() == [4]
    found = slab.cpu().numpy()
    right = np.arange(15) != 4
    assert np.array_equal(found[right, :256], codes[right]) and np.array_equal(found[right, 256:264], scales[right])
    assert not found[4].any() and not found[:, 264:].any()
    staging = device.allocate(1 << 20)
    assert staging % 4096 == 0
    device.close()
