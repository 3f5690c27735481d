"""Finding the tables of a checkpoint: names of all writers, pieces, dtypes, shapes, PLE's buffers and scales."""

import json
import logging

import numpy as np
import pytest
from checkpoints import TINY, small_engram, small_ple, write_index

from ssdgram.errors import CheckpointError, ConfigError
from ssdgram.geometry import Geometry
from ssdgram.layout.checkpoint import open_checkpoint
from ssdgram.layout.safetensors import find_tensors, read_index


def contents(folder):
    """{name: (dtype, shape, bytes)} of all tensors."""
    files = read_index(folder)
    found = {}
    for name, tensor in find_tensors(files, list(files)).items():
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            found[name] = (tensor.dtype, tensor.shape, file.read(tensor.size))
    return found


def rewritten(source, folder, change, files=None):
    """A copy of the checkpoint with the tensors that `change` makes of its own, in one file or as `files` deals them."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = change(contents(source))
    write_index(folder, files(tensors) if files else {"model-00001-of-00001.safetensors": tensors})
    return folder


def renamed(pairs):
    def change(tensors):
        return {next((name.replace(a, b) for a, b in pairs if a in name), name): value for name, value in tensors.items()}

    return change


@pytest.fixture(scope="module")
def ple(tmp_path_factory):
    return small_ple(tmp_path_factory.mktemp("ple") / "ckpt", parts=3)


def test_tiny():
    checkpoint = open_checkpoint(TINY)
    assert checkpoint.geometry == Geometry.from_config(TINY / "config.json")
    assert [(table.layer, [t.name for t in table.tensors]) for table in checkpoint.tables] == [
        (layer, [f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"]) for layer in (1, 3)]
    assert checkpoint.global_scales is None and checkpoint.notices == () and checkpoint.tokenizer.exists()


@pytest.mark.parametrize("pairs", [
    [("layers.", "model.layers.")],
    [("layers.", "language_model.model.layers.")],
    [("embed.weight", "embed_tokens.weight"), ("embed.scale", "embed_tokens.weight_scale_inv")],
    [("embed.weight", "embed_tokens.weight"), ("embed.scale", "embed_tokens.weight_scale")],
], ids=["sglang", "prefix", "vllm inverse", "vllm"])
def test_other_names(pairs, tmp_path):
    folder = rewritten(TINY, tmp_path / "c", renamed(pairs))
    tables = open_checkpoint(folder).tables
    assert [(t.codes[0].dtype, t.codes[0].shape, t.scales[0].shape) for t in tables] == [
        ("F8_E4M3", (660, 64), (660, 2)), ("F8_E4M3", (864, 64), (864, 2))]


def test_every_tensor_in_its_own_shard(tmp_path):
    folder = rewritten(TINY, tmp_path / "c", lambda tensors: tensors,
                       lambda tensors: {f"m{k}.safetensors": {name: value} for k, (name, value) in enumerate(tensors.items())})
    assert {t.file.name for table in open_checkpoint(folder).tables for t in table.tensors} == {
        f"m{k}.safetensors" for k, name in enumerate(contents(TINY)) if ".embed." in name}


def test_byte_scales_may_be_u8(tmp_path):
    folder = rewritten(TINY, tmp_path / "c", lambda tensors: {
        name: ("U8" if dtype == "F8_E8M0" else dtype, shape, data) for name, (dtype, shape, data) in tensors.items()})
    assert open_checkpoint(folder).tables[0].scales[0].dtype == "U8"


def test_other_tensors_are_not_taken_for_tables(tmp_path):
    more = {"mtp.0.engram.embed.weight": ("U8", (1,), b"\0"), "layers.11.engram.embed.weight": ("U8", (1,), b"\0"),
            "layers.1.engram.embed.weights": ("U8", (1,), b"\0")}
    folder = rewritten(TINY, tmp_path / "c", lambda tensors: {**tensors, **more})
    assert open_checkpoint(folder).tables[0].codes[0].shape == (660, 64)


def without(part):
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def with_tensor(part, **fields):
    def change(tensors):
        result = {}
        for name, (dtype, shape, data) in tensors.items():
            if part in name:
                dtype, shape, data = fields.get("dtype", dtype), fields.get("shape", shape), fields.get("data", data)
            result[name] = (dtype, shape, data)
        return result

    return change


def doubled(part, name):
    return lambda tensors: {**tensors, name: next(value for key, value in tensors.items() if part in key)}


ENGRAM_BROKEN = {
    "no table": (without("layers.1.engram.embed.weight"), "no tensor layers.1.engram.embed.weight"),
    "no scales": (without("layers.3.engram.embed.scale"), "no tensor layers.3.engram.embed.scale"),
    "two names": (doubled("layers.1.engram.embed.weight", "model.layers.1.engram.embed.weight"), "could be the table of layer 1"),
    "dtype": (with_tensor("layers.1.engram.embed.weight", dtype="U8"), "expected F8_E4M3 [660, 64]"),
    "fewer rows": (with_tensor("layers.1.engram.embed.weight", shape=(330, 64), data=bytes(330 * 64)),
                   "expected F8_E4M3 [660, 64]"),
    "flat": (with_tensor("layers.3.engram.embed.weight", shape=(864 * 64,)), "expected F8_E4M3 [864, 64]"),
    "scale shape": (with_tensor("layers.3.engram.embed.scale", shape=(2, 864)), "expected F8_E8M0 or U8 [864, 2]"),
    "scale dtype": (with_tensor("layers.3.engram.embed.scale", dtype="I8"), "expected F8_E8M0 or U8 [864, 2]"),
}


@pytest.mark.parametrize("case", ENGRAM_BROKEN)
def test_broken_engram(case, tmp_path):
    change, message = ENGRAM_BROKEN[case]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(rewritten(TINY, tmp_path / "c", change))
    assert message in str(caught.value)


def test_no_folder_and_no_config(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------- PLE


def test_ple_pieces_in_index_order(ple):
    checkpoint = open_checkpoint(ple)
    table = checkpoint.tables[0]
    assert [t.name.split(".")[-2] for t in table.codes] == ["shard_0", "shard_1", "shard_2"]
    assert checkpoint.geometry.encoding == "bf16" and checkpoint.geometry.table_rows == (sum(t.shape[0] for t in table.codes),)
    assert {t.name.rsplit(".", 1)[1] for t in table.others} == {
        "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"}
    assert checkpoint.notices == ()


def test_pieces_beyond_nine_are_in_numeric_order(tmp_path):
    folder = small_ple(tmp_path / "c", parts=12)
    assert [t.name.split(".")[-2] for t in open_checkpoint(folder).tables[0].codes] == [f"shard_{k}" for k in range(12)]


def test_one_piece_without_number(ple, tmp_path):
    def change(tensors):
        pieces = [name for name in tensors if "shard_" in name]
        prefix = pieces[0].split("shard_")[0]
        data = b"".join(tensors[f"{prefix}shard_{k}.weight"][2] for k in range(len(pieces)))
        kept = {name: value for name, value in tensors.items() if name not in pieces}
        return {**kept, prefix + "weight": ("BF16", (len(data) // 64, 32), data)}

    checkpoint = open_checkpoint(rewritten(ple, tmp_path / "c", change))
    assert checkpoint.geometry == open_checkpoint(ple).geometry


def test_buffers_replace_constants_with_a_notice(ple, tmp_path, caplog):
    geometry = open_checkpoint(ple).geometry
    other = [m + 2 for m in geometry.multipliers[0]]
    folder = rewritten(ple, tmp_path / "c", with_tensor("layer_multipliers", data=np.array(other, "<i8").tobytes()))
    with caplog.at_level(logging.WARNING, "ssdgram"):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.geometry.multipliers == (tuple(other),) and checkpoint.geometry.primes == geometry.primes
    assert len(checkpoint.notices) == 1 and "multipliers" in checkpoint.notices[0] and checkpoint.notices[0] in caplog.text


def test_missing_buffers_leave_the_constants(ple, tmp_path):
    checkpoint = open_checkpoint(rewritten(ple, tmp_path / "c", without("ple_embedding.ngram_heads")))
    assert checkpoint.geometry.primes == open_checkpoint(ple).geometry.primes and checkpoint.notices == ()


def int64(*values):
    return np.array(values, "<i8").tobytes()


PLE_BROKEN = {
    "piece missing": (without("shard_1.weight"), "pieces [0, 2] of layer 1"),
    "no pieces": (without("shard_"), "pieces [] of layer 1"),
    "piece dtype": (with_tensor("shard_2.weight", dtype="F16"), "expected BF16 [any, 32]"),
    "unknown dtype": (with_tensor("shard_", dtype="F16"), "expected BF16 or F8_E4M3"),
    "buffer dtype": (with_tensor("layer_multipliers", dtype="F64"), "expected I64"),
    "buffer length": (with_tensor("ngram_heads_offsets", shape=(3,), data=bytes(24)), "do not fit the config"),
    "offset beyond the table": (with_tensor("ngram_heads_offsets", data=int64(0, 211, 434, 10**6)), "do not fit the config"),
    "negative size": (with_tensor("ngram_heads_vocab_sizes", data=int64(-1, 2, 3, 4)), "do not fit the config"),
    "multiplier overflows": (with_tensor("layer_multipliers", data=int64(2**62, 1, 1)), "do not fit the config"),
    "buffer too long": (with_tensor("layer_multipliers", shape=(1 << 18,), data=bytes(1 << 21)), "expected at most 1048576"),
    "buffer twice": (lambda tensors: {**tensors, "x.layers.1.ple.ple_embedding.layer_multipliers": ("I64", (1,), int64(1))},
                     "2 tensors could be"),
    "table too short": (without("shard_2.weight"), "do not fit the config"),
}


@pytest.mark.parametrize("case", PLE_BROKEN)
def test_broken_ple(case, ple, tmp_path):
    change, message = PLE_BROKEN[case]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(rewritten(ple, tmp_path / "c", change))
    assert message in str(caught.value)


def test_ple_with_a_global_scale(tmp_path):
    folder = small_ple(tmp_path / "c", encoding="fp8_global")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.geometry.encoding == "fp8_global" and checkpoint.global_scales == (2.0**-7,)

    bf16 = rewritten(folder, tmp_path / "b", with_tensor("weight_scale", dtype="BF16", data=b"\x00\x3f"))
    assert open_checkpoint(bf16).global_scales == (0.5,)
    for number, (change, message) in enumerate([
            (without("weight_scale"), "needs one finite scale"),
            (with_tensor("weight_scale", data=np.array([np.inf], "<f4").tobytes()), "needs one finite scale"),
            (with_tensor("weight_scale", dtype="F64", data=bytes(8)), "expected one BF16 or F32"),
            (with_tensor("weight_scale", shape=(2,), data=bytes(8)), "expected one BF16 or F32"),
            (lambda t: {**t, "layers.1.ple.ple_embedding.weight_scale": ("F32", (1,), np.array([3], "<f4").tobytes())},
             "needs one finite scale")]):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(rewritten(folder, tmp_path / str(number), change))
        assert message in str(caught.value)


def test_ple_nvfp4(tmp_path):
    folder = small_ple(tmp_path / "c", encoding="nvfp4")
    checkpoint = open_checkpoint(folder)
    table = checkpoint.tables[0]
    assert checkpoint.geometry.row_bytes == 16 + 2 and checkpoint.global_scales == (2.0**-7,)
    assert [t.shape for t in table.codes] == [(t.shape[0], 16) for t in table.scales]
    with pytest.raises(CheckpointError, match="lack their weight_scale"):
        open_checkpoint(rewritten(folder, tmp_path / "d", without("shard_1.weight_scale")))
    with pytest.raises(CheckpointError, match="expected F8_E4M3 or U8"):
        other = with_tensor("shard_1.weight_scale", dtype="BF16", shape=(1, 1), data=b"\0\0")
        open_checkpoint(rewritten(folder, tmp_path / "e", other))


def test_layers_of_different_formats_are_refused(tmp_path):
    folder = small_ple(tmp_path / "c", layers=(1, 2), parts=1)

    def change(tensors):
        return {name: (("F8_E4M3", shape, data[: len(data) // 2]) if "layers.2." in name and "shard_0.weight" in name
                       else (dtype, shape, data)) for name, (dtype, shape, data) in tensors.items()} | {
            "layers.2.ple.ple_embedding.weight_scale": ("F32", (1,), np.array([1], "<f4").tobytes())}

    with pytest.raises(CheckpointError, match="different row formats"):
        open_checkpoint(rewritten(folder, tmp_path / "d", change))


def test_config_of_another_model(tmp_path):
    folder = small_engram(tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_head_dim"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"by config\.json"):
        open_checkpoint(folder)
