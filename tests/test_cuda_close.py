"""The end of a store's CUDA side, without a GPU: it waits for the device, but not for ever, and frees nothing that may yet be read."""

import threading

import pytest

import ssdgram
from ssdgram import _opening

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


class Pinned:
    released = False

    def release(self):
        self.released = True


@pytest.fixture
def side():
    from ssdgram._cuda import CudaSide

    made = object.__new__(CudaSide)
    made.device, made._copier, made._registrations = "cuda:0", None, [Pinned()]
    made.hbm = made.counters = made.slab_memory = "memory"
    return made


def test_a_gpu_that_does_not_end_keeps_its_memory(side, monkeypatch):
    done, pinned = threading.Event(), side._registrations[0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.wait(30))
    assert side.close(0.05) is False
    assert not pinned.released and side.hbm == side.counters == side.slab_memory == "memory"
    done.set()
    assert side.close(10) is True
    assert pinned.released and side.hbm is side.slab_memory is None


def test_a_copier_that_does_not_end_keeps_its_memory(side, monkeypatch):
    done, pinned = threading.Event(), side._registrations[0]
    side._copier = threading.Thread(target=done.wait, args=(30,), daemon=True)
    side._copier.start()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("the copier may launch something yet"))
    assert side.close(0.05) is False and not pinned.released
    done.set()
    side._copier.join()


def test_a_lost_context_does_not_keep_a_store_from_closing(side, monkeypatch, caplog):
    def fail(device):
        raise RuntimeError("an illegal memory access")

    pinned = side._registrations[0]
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert side.close(10) is True and pinned.released
    assert "its last work failed: an illegal memory access" in caplog.text


def test_a_store_whose_gpu_does_not_end_leaks_its_memory(engram, caplog):
    """`close` says so and comes back; neither slab nor plans are unmapped."""
    class Busy:
        def close(self, timeout_s):
            return False

    store = engram.open(dram="8MiB")
    with store.prefetch(engram.tokens(10)) as batch:
        batch.wait()
    store._cuda = Busy()
    leaked = len(ssdgram.store._leaked)
    store.close(0.5)
    assert "kernels that may read the cache are still under way after 0.5 s" in caplog.text
    assert len(ssdgram.store._leaked) == leaked + 1 and store._arena in ssdgram.store._leaked[-1]
    assert store._state.slab[:64].shape == (64,)             # still mapped
    _opening.close_files(ssdgram.store._leaked.pop()[3])


@pytest.mark.parametrize("version,refused", (("3.5.1", True), ("3.6.0", False), ("3.10.0+git", False)))
def test_a_triton_that_cannot_compile_the_gathers_is_refused(monkeypatch, version, refused):
    import triton

    from ssdgram._cuda import checked_device

    monkeypatch.setattr(triton, "__version__", version)
    for name, answer in (("is_available", True), ("current_device", 0), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    if refused:
        with pytest.raises(ssdgram.UnavailableError, match=r"triton 3\.5\.1 is installed.*expected 3\.6"):
            checked_device("cuda")
    else:
        assert checked_device("cuda") == torch.device("cuda", 0)
