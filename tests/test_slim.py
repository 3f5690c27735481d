"""`ssdgram slim`: everything but the tables, byte for byte; links; refusals; whole or not at all."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

import pytest
from checkpoints import files_below, small_engram, small_ple
from click.testing import CliRunner

import ssdgram
from ssdgram.cli import main
from ssdgram.engines.slim import slim
from ssdgram.engines.vllm.loading import holds_tables
from ssdgram.layout.safetensors import INDEX, read_header

safetensors = pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")


@pytest.fixture
def checkpoint(tmp_path):
    small_engram(tmp_path / "ckpt")
    (tmp_path / "ckpt/inference").mkdir()
    (tmp_path / "ckpt/inference/model.py").write_text("# text\n")
    return tmp_path / "ckpt"


def small_tensors(folder):
    """{name: bytes} of all tensors but the tables'."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in read_header(path).items():
            if not name.endswith(("engram.embed.weight", "engram.embed.scale")) and "ngram_embedding" not in name:
                found[name] = (tensor.dtype, tensor.shape, path.read_bytes()[tensor.offset:tensor.offset + tensor.size])
    return found


def test_all_but_the_tables_is_there_byte_for_byte(checkpoint, tmp_path):
    before = files_below(checkpoint)
    done = slim(checkpoint, tmp_path / "slim")
    out = tmp_path / "slim"
    names = {name for path in out.glob("*.safetensors") for name in read_header(path)}
    assert not any("engram.embed" in name for name in names)
    assert small_tensors(out) == small_tensors(checkpoint)
    index, old = json.loads((out / INDEX).read_bytes()), json.loads((checkpoint / INDEX).read_bytes())
    assert set(index["weight_map"]) == names
    assert index["metadata"]["total_size"] == old["metadata"]["total_size"] - done.bytes_left_out
    assert holds_tables(checkpoint) and not holds_tables(out)
    assert [os.path.relpath(path, out) for path in files_below(out)] == [os.path.relpath(path, checkpoint)
                                                                         for path in files_below(checkpoint)]
    assert (out / "config.json").samefile(checkpoint / "config.json") and (out / "inference/model.py").read_text() == "# text\n"
    assert {path: facts[:2] for path, facts in files_below(checkpoint).items()} == {path: facts[:2] for path, facts in before.items()}
    assert len(done.written) == 2 and not done.dropped and not list(tmp_path.glob(".slim*"))


def test_the_formats_own_reader_reads_what_is_written_and_the_metadata_stays(checkpoint, tmp_path):
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": {"format": "pt"}, **json.loads(data[8:8 + length])}).encode()
    shard.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length:])
    slim(checkpoint, tmp_path / "slim")
    for name in {path.name for path in (tmp_path / "slim").glob("*.safetensors")}:
        with safetensors.safe_open(tmp_path / "slim" / name, framework="pt") as new, \
                safetensors.safe_open(checkpoint / name, framework="pt") as old:
            assert new.metadata() == old.metadata()
            for tensor in new.keys():  # noqa: SIM118
                assert torch.equal(new.get_tensor(tensor).view(torch.uint8), old.get_tensor(tensor).view(torch.uint8))


def test_a_store_is_made_from_the_checkpoint_and_not_from_the_slim_one(checkpoint, tmp_path):
    slim(checkpoint, tmp_path / "slim")
    with pytest.raises(ssdgram.CheckpointError, match="no tensor layers"):
        ssdgram.convert(tmp_path / "slim", tmp_path / "out")


def test_links_through_a_hubs_cache_reach_the_blobs(checkpoint, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.move(checkpoint, blobs)
    snapshot.mkdir()
    for path in blobs.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path)
    slim(snapshot, tmp_path / "slim")
    assert (tmp_path / "slim/config.json").samefile(blobs / "config.json")


def test_where_hard_links_cannot_be_symbolic_ones_are_made(checkpoint, tmp_path, monkeypatch):
    import errno

    def refuse(*_):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    slim(checkpoint, tmp_path / "slim")
    assert (tmp_path / "slim/config.json").is_symlink() and (tmp_path / "slim/config.json").samefile(checkpoint / "config.json")


def test_a_ple_table_goes_and_its_scale_stays(tmp_path):
    small_ple(tmp_path / "ckpt", encoding="fp8_global")
    slim(tmp_path / "ckpt", tmp_path / "slim")
    names = [name for path in (tmp_path / "slim").glob("*.safetensors") for name in read_header(path)]
    assert not holds_tables(tmp_path / "slim") and any(name.endswith("weight_scale") for name in names)
    assert small_tensors(tmp_path / "slim") == small_tensors(tmp_path / "ckpt")


def test_shards_that_hold_nothing_else_go(tmp_path):
    small_ple(tmp_path / "ckpt")
    done = slim(tmp_path / "ckpt", tmp_path / "slim")
    assert small_tensors(tmp_path / "slim") == small_tensors(tmp_path / "ckpt")
    assert all(not (tmp_path / "slim" / name).exists() for name in done.dropped)


def test_a_place_that_exists_or_lies_inside_is_refused(checkpoint, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ssdgram.ConfigError, match="exists"):
        slim(checkpoint, tmp_path / "there")
    with pytest.raises(ssdgram.ConfigError, match="lies in the checkpoint's folder"):
        slim(checkpoint, checkpoint / "slim")


def test_a_shard_that_disagrees_with_the_index_is_refused_and_leaves_nothing(checkpoint, tmp_path):
    index = json.loads((checkpoint / INDEX).read_bytes())
    name = next(name for name in index["weight_map"] if name.endswith("wkv.weight"))
    del index["weight_map"][name]
    (checkpoint / INDEX).write_text(json.dumps(index))
    with pytest.raises(ssdgram.CheckpointError, match="in the file and not in the index"):
        slim(checkpoint, tmp_path / "slim")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_the_command_says_what_it_did(checkpoint, tmp_path):
    answer = CliRunner().invoke(main, ["slim", str(checkpoint), str(tmp_path / "slim")])
    assert answer.exit_code == 0, answer.output
    assert "2 shards written without" in answer.output and "files linked" in answer.output


def test_without_room_the_command_says_one_line_and_leaves_nothing(checkpoint, tmp_path):
    line = shlex.join([sys.executable, "-m", "ssdgram", "slim", str(checkpoint), str(tmp_path / "slim")])
    answer = subprocess.run(["bash", "-c", f"ulimit -f 1; exec {line}"], capture_output=True, text=True, timeout=200)
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith(f"Error: ConversionError: {tmp_path / 'slim'}: File too large; nothing is left of it: lift the limit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize(("number", "kind", "text"), [(errno.ENOSPC, ssdgram.NoSpaceError, "make room"),
                                                      (errno.EROFS, ssdgram.ConversionError, "choose a folder")])
def test_a_place_that_cannot_be_written_is_named(checkpoint, tmp_path, monkeypatch, number, kind, text):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), "a name that nobody gave")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(kind, match=rf"slim: {os.strerror(number)}; nothing is left of it: {text}"):
        slim(checkpoint, tmp_path / "slim")


def test_a_full_drive_at_a_link_names_what_was_to_be_made(checkpoint, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(ssdgram.NoSpaceError, match=r"slim: No space left"):
        slim(checkpoint, tmp_path / "slim")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]
