"""Loading a checkpoint beside the plug-in: the mapped tables are handed to their loader and no page of them is read."""

import ctypes
import json
import mmap
import types

import pytest
from checkpoints import TOKENIZER

import ssdgram
from ssdgram.engines.slim import slim
from ssdgram.engines.vllm.loading import check_loader, file_system, holds_tables
from ssdgram.engines.vllm.plugin import _load_nothing
from ssdgram.layout.safetensors import read_header

safetensors = pytest.importorskip("safetensors")


def resident(path, start, size):
    """Bytes of [start, start + size) of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        first, last = start // mmap.PAGESIZE + 1, (start + size) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * (last - first))()
        address = ctypes.c_void_p(ctypes.addressof(view) + first * mmap.PAGESIZE)
        assert libc.mincore(address, ctypes.c_size_t((last - first) * mmap.PAGESIZE), vector) == 0
        del view
        return sum(byte & 1 for byte in vector) * mmap.PAGESIZE


def test_the_lazy_loader_reads_no_byte_of_a_table(tmp_path):
    """As vLLM's and SGLang's default iterators do: safe_open, get_tensor for each name, the parameter's own loader."""
    ssdgram.synthesize(tmp_path / "ckpt", vocab_size=400_000, layers=(1,), seed=0, tokenizer=TOKENIZER, sparse=True)
    tables = 0
    for path in sorted((tmp_path / "ckpt").glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                _load_nothing(types.SimpleNamespace(), file.get_tensor(name))
        for name, tensor in read_header(path).items():
            if name.endswith((".embed.weight", ".embed.scale")):
                tables += tensor.size
                assert resident(path, tensor.offset, tensor.size) <= 32 << 20, name         # what the header's read-ahead brought
    assert tables > 2000 << 20


def config(folder, **changes):
    parts = {"load_format": "auto", "safetensors_load_strategy": None, "model_loader_extra_config": {}, "quantization": "fp8", **changes}
    return types.SimpleNamespace(load_config=types.SimpleNamespace(**{name: parts[name] for name in (
        "load_format", "safetensors_load_strategy", "model_loader_extra_config")}),
        model_config=types.SimpleNamespace(model=str(folder), quantization=parts["quantization"]))


@pytest.fixture
def slimmed(tmp_path):
    ssdgram.synthesize(tmp_path / "ckpt", vocab_size=101, layers=(1,), tokenizer=TOKENIZER, heads=2, head_dim=64, max_ngram=3,
                       hidden_size=32)
    slim(tmp_path / "ckpt", tmp_path / "slim")
    return tmp_path / "slim"


def test_a_slim_checkpoint_is_served_by_any_loader(slimmed):
    for changes in ({"load_format": "fastsafetensors"}, {"safetensors_load_strategy": "eager"}, {"load_format": "runai_streamer"}):
        check_loader(config(slimmed, **changes))


def test_a_loader_that_misses_the_tables_of_a_slim_checkpoint_is_told_so(slimmed):
    for changes in ({"model_loader_extra_config": {"enable_weights_track": True}}, {"quantization": None}):
        with pytest.raises(ssdgram.ConfigError, match="enable_weights_track"):
            check_loader(config(slimmed, **changes))
    check_loader(config(slimmed, quantization=None, model_loader_extra_config={"enable_weights_track": False}))


def test_network_file_systems_need_the_lazy_strategy_by_name(slimmed, monkeypatch):
    from ssdgram.engines.vllm import loading

    monkeypatch.setattr(loading, "file_system", lambda folder: "nfs4")
    with pytest.raises(ssdgram.ConfigError, match="--safetensors-load-strategy=lazy"):
        check_loader(config(slimmed.parent / "ckpt"))
    check_loader(config(slimmed.parent / "ckpt", safetensors_load_strategy="lazy"))


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nnone {tmp_path}x tmpfs rw 0 0\n")
    assert file_system(tmp_path / "a/b", mounts) == "nfs4"
    assert file_system(tmp_path.parent, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "nothing") == ""


def test_an_index_that_cannot_be_read_counts_as_one_with_tables(tmp_path):
    assert holds_tables(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": "x"}}))
    assert not holds_tables(tmp_path)


@pytest.mark.parametrize(("name", "found"), [
    ("layers.1.engram.embed.weight", True), ("layers.1.engram.embed.scale", True),
    ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_12.weight", True),
    ("model.layers.1.ple.ple_embedding.ngram_embedding.weight", True),
    ("model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale", False), ("model.layers.1.ple.key_proj.weight", False),
])
def test_tables_are_known_by_their_names(tmp_path, name, found):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "x"}}))
    assert holds_tables(tmp_path) == found
