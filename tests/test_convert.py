"""Conversion: every row where the format says, the same bytes however it is run, and every refusal before anything is written."""

import errno
import fcntl
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import GOLDEN, TINY, TOKENIZER, files_below, small_engram, small_ple

from ssdgram.errors import CheckpointError, ConversionError, IdentityError, ManifestError, NoSpaceError, TokenMapError
from ssdgram.layout import blocks, columns, direct
from ssdgram.layout import verify as verification
from ssdgram.layout.convert import convert
from ssdgram.layout.files import resolve
from ssdgram.layout.manifest import Manifest
from ssdgram.layout.verify import verify
from ssdgram.tools.made_up import expected_rows


def rows_of_store(out, manifest=None):
    """{(layer, column): uint8 [rows, row_bytes]} by the format's arithmetic alone."""
    manifest = manifest or Manifest.load(out)
    found = {}
    for path, file in zip(resolve(out, manifest), manifest.files, strict=True):
        n = (4096 - 32) // (manifest.row_bytes + 4)
        pages = np.fromfile(path, np.uint8).reshape(-1, 4096)
        rows = pages[:, : n * manifest.row_bytes].reshape(-1, manifest.row_bytes)
        found[file.layer, file.column] = rows[: file.rows]
    return found


def assert_holds_made_up_rows(out, seed=0):
    manifest = Manifest.load(out)
    geometry = manifest.geometry
    for (layer, column), rows in rows_of_store(out).items():
        offset = geometry.offsets[geometry.layers.index(layer)][column]
        assert np.array_equal(rows, expected_rows(seed, layer, offset + np.arange(len(rows)), geometry)), (layer, column)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return small_engram(tmp_path_factory.mktemp("ckpt") / "c")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two pages, so that a small column has many."""
    for module in (blocks, columns, verification):
        monkeypatch.setattr(module, "BLOCK_PAGES", 2)
        monkeypatch.setattr(module, "BLOCK_BYTES", 8192)


def test_the_golden_checkpoint_row_by_row(tmp_path):
    manifest = convert(TINY, tmp_path / "out")
    assert manifest == Manifest.load(tmp_path / "out")
    geometry = manifest.geometry
    rows = rows_of_store(tmp_path / "out")
    for index, layer in enumerate(geometry.layers):
        data = (TINY / f"model-0000{index + 2}-of-00003.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        parts = []
        for name, width in ((f"layers.{layer}.engram.embed.weight", 64), (f"layers.{layer}.engram.embed.scale", 2)):
            begin, end = header[name]["data_offsets"]
            parts.append(np.frombuffer(data[8 + length + begin : 8 + length + end], np.uint8).reshape(-1, width))
        table = np.concatenate(parts, axis=1)
        for column in range(geometry.columns):
            start = geometry.offsets[index][column]
            assert np.array_equal(rows[layer, column], table[start : start + geometry.primes[index][column]]), (layer, column)


def test_the_golden_row_ids_lead_to_the_golden_values(tmp_path):
    from ssdgram.kernels.reference import dequantise_rows

    convert(TINY, tmp_path / "out")
    rows = rows_of_store(tmp_path / "out")
    with np.load(GOLDEN / "tiny_v41" / "expected.npz") as expected:
        geometry = Manifest.load(tmp_path / "out").geometry
        for index, layer in enumerate(geometry.layers):
            for column in range(geometry.columns):
                numbers = expected["row_ids"][:, index, column] - geometry.offsets[index][column]
                bits = dequantise_rows(np.ascontiguousarray(rows[layer, column][numbers]), "fp8_ue8m0", 64)
                assert np.array_equal(bits, expected[f"l{layer}/emb_bf16"][:, column].view(np.uint16)), (layer, column)


@pytest.mark.parametrize("options", [
    {}, {"heads": 1, "max_ngram": 2}, {"head_dim": 256, "vocab_size": 500}, {"layers": (0,), "heads": 3, "max_ngram": 5},
    {"head_dim": 32, "vocab_size": 1000}], ids=str)
def test_engram_geometries(options, tmp_path, small_blocks):
    convert(small_engram(tmp_path / "c", seed=5, **options), tmp_path / "out")
    assert_holds_made_up_rows(tmp_path / "out", 5)
    assert verify(tmp_path / "out", tmp_path / "c").ok


@pytest.mark.parametrize("encoding", ["bf16", "fp8_global", "nvfp4"])
@pytest.mark.parametrize("parts", [1, 7, 40])
def test_ple_pieces(encoding, parts, tmp_path, small_blocks):
    """Columns start anywhere in a piece, and blocks lie over the borders of pieces and of files."""
    convert(small_ple(tmp_path / "c", 1009, encoding=encoding, parts=parts), tmp_path / "out")
    assert_holds_made_up_rows(tmp_path / "out")
    assert verify(tmp_path / "out", tmp_path / "c").ok


def test_empty_pieces(tmp_path):
    convert(small_ple(tmp_path / "c", 3, parts=100), tmp_path / "out")
    assert_holds_made_up_rows(tmp_path / "out")


def test_jobs_and_stripes_do_not_change_a_byte(ckpt, tmp_path, small_blocks):
    one = convert(ckpt, tmp_path / "one", jobs=1)
    many = convert(ckpt, tmp_path / "many", jobs=7)
    striped = convert(ckpt, tmp_path / "striped", stripe=[tmp_path / "a", tmp_path / "b"], jobs=3)
    assert one == many
    assert (striped.files, striped.generation, striped.geometry) == (one.files, one.generation, one.geometry)
    assert rows_of_store(tmp_path / "striped").keys() == rows_of_store(tmp_path / "one").keys()
    assert {p.name for p in (tmp_path / "b" / "layer-001").iterdir()} == {"column-01.rows", "column-03.rows"}


def test_digests_are_those_of_the_files(ckpt, tmp_path):
    import hashlib

    manifest = convert(ckpt, tmp_path / "out")
    for path, file in zip(resolve(tmp_path / "out", manifest), manifest.files, strict=True):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def test_generation_follows_the_source(ckpt, tmp_path):
    generation = convert(ckpt, tmp_path / "a").generation
    assert convert(shutil.copytree(ckpt, tmp_path / "copy"), tmp_path / "b").generation == generation
    assert convert(small_engram(tmp_path / "c1", seed=1), tmp_path / "c").generation != generation
    shutil.copytree(ckpt, tmp_path / "renamed")
    for path in (tmp_path / "renamed").glob("model*"):       # spaces at the header's end make room for the prefix
        data = path.read_bytes().replace(b'"layers.', b'"model.layers.')
        if path.suffix == ".safetensors":
            end = data.index(b"}}") + 2
            length = int.from_bytes(data[:8], "little") + data[:end].count(b'"model.layers.') * 6
            data = length.to_bytes(8, "little") + data[8:]
        path.write_bytes(data)
    assert convert(tmp_path / "renamed", tmp_path / "d").generation != generation


def test_progress_is_told(ckpt, tmp_path):
    told = []
    manifest = convert(ckpt, tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (manifest.size, manifest.size) and all(0 <= done <= total for done, total in told)


def test_bad_jobs(ckpt, tmp_path):
    with pytest.raises(ConversionError, match="jobs = 0"):
        convert(ckpt, tmp_path / "out", jobs=0)


# ---------------------------------------------------------------- a second run


def test_a_second_run_writes_nothing(ckpt, tmp_path):
    stripes = [tmp_path / "a", tmp_path / "b"]
    first = convert(ckpt, tmp_path / "out", stripe=stripes)
    before = files_below(tmp_path)
    assert convert(ckpt, tmp_path / "out", stripe=stripes) == first
    assert convert(ckpt, tmp_path / "out") == first          # the stripes are known from the first run
    assert files_below(tmp_path) == before


def test_other_source_or_geometry_or_stripes(ckpt, tmp_path):
    convert(ckpt, tmp_path / "out")
    before = files_below(tmp_path / "out")
    with pytest.raises(ConversionError, match="holds a store of another source"):
        convert(small_engram(tmp_path / "seed", seed=1), tmp_path / "out")
    with pytest.raises(ConversionError, match="holds a store of another geometry"):
        convert(small_engram(tmp_path / "geometry", heads=1), tmp_path / "out")
    with pytest.raises(ConversionError, match="has the stripes"):
        convert(ckpt, tmp_path / "out", stripe=[tmp_path / "a"])
    with pytest.raises(ConversionError, match="name a folder twice"):
        convert(ckpt, tmp_path / "new", stripe=[tmp_path / "a", tmp_path / "x" / ".." / "a"])
    assert files_below(tmp_path / "out") == before and not (tmp_path / "a").exists()


def test_a_file_where_a_folder_is_to_be(ckpt, tmp_path):
    (tmp_path / "file").write_text("mine")
    for arguments in ((tmp_path / "file",), (tmp_path / "out", [tmp_path / "file"])):
        with pytest.raises(ConversionError, match="file is a file: expected a folder"):
            convert(ckpt, *arguments)
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "out").exists()


def test_the_command_says_when_there_was_nothing_to_do(ckpt, tmp_path):
    from click.testing import CliRunner

    from ssdgram.cli import main

    first, second = (CliRunner().invoke(main, ["convert", str(ckpt), str(tmp_path / "out")]) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    assert "nothing to do" not in first.output and "converted before: nothing to do" in second.output


def test_out_that_holds_something_else(ckpt, tmp_path):
    out = tmp_path / "out"
    (out / "layer-001").mkdir(parents=True)
    (out / "layer-001" / "column-00.rows").write_text("precious")
    with pytest.raises(ConversionError, match="belongs to something else"):
        convert(ckpt, out)
    assert (out / "layer-001" / "column-00.rows").read_text() == "precious"
    (out / "manifest.json").write_text("{}")
    with pytest.raises(ConversionError, match="no store of this version"):
        convert(ckpt, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError):
        convert(ckpt, tmp_path / "file")


@pytest.mark.parametrize("text", ["", "\n", "{}\n", "[]\n", '{"format": 2, "generation": "0000000000000000", "roots": []}\n',
                                  '{"format": 1, "generation": "0", "roots": []}\n',
                                  '{"format": 1, "generation": "0000000000000000", "roots": [1]}\n'])
def test_a_journal_that_is_none(text, ckpt, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "conversion.journal").write_text(text)
    with pytest.raises(ConversionError, match="not a conversion's journal"):
        convert(ckpt, tmp_path / "out")


def test_a_missing_file_of_a_finished_store_is_written_again(ckpt, tmp_path):
    out = tmp_path / "out"
    first = convert(ckpt, out)
    before = files_below(out)
    lost, torn = out / first.files[2].path, out / first.files[5].path
    lost.unlink()
    os.truncate(torn, 4096)
    assert convert(ckpt, out) == first and verify(out, ckpt).ok
    after = files_below(out)
    kept = [str(out / file.path) for file in first.files if out / file.path not in (lost, torn)]
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}
    assert not (out / "conversion.journal").exists()


def test_a_journal_that_outlived_the_manifest_is_removed(ckpt, tmp_path):
    """A run was killed between publishing the manifest and removing the journal."""
    first = convert(ckpt, tmp_path / "out")
    journal = tmp_path / "out" / "conversion.journal"
    journal.write_text('{"format": 1}')
    assert convert(ckpt, tmp_path / "out") == first and not journal.exists()


def test_an_unmounted_stripe_is_not_written_again(ckpt, tmp_path):
    stripes = [tmp_path / "a", tmp_path / "b"]
    convert(ckpt, tmp_path / "out", stripe=stripes)
    shutil.move(tmp_path / "b", tmp_path / "gone")
    (tmp_path / "b").mkdir()
    with pytest.raises(IdentityError, match="is stripe 1 mounted"):
        convert(ckpt, tmp_path / "out", stripe=stripes)
    assert list((tmp_path / "b").iterdir()) == []


# ---------------------------------------------------------------- failures on the way


def fail_on_call(monkeypatch, owner, name, number, error):
    """Let call `number` (0, 1, ..) of owner.name and all later ones fail."""
    right, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) > number:
            raise error
        return right(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_a_run_that_failed_at_any_write_goes_on_and_ends_the_same(ckpt, tmp_path, small_blocks):
    whole = convert(ckpt, tmp_path / "whole", jobs=2)
    out = tmp_path / "out"
    kept = 0
    for number in range(100):
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_on_call(patch, direct.DirectFile, "write", number, OSError(errno.EIO, "Input/output error"))
            try:
                manifest = convert(ckpt, out, jobs=2)
                break
            except ConversionError as error:
                assert "Input/output error" in str(error) and "run the same command again" in str(error)
            assert len(calls) >= number
        with pytest.raises(ManifestError, match="conversion not finished"):
            Manifest.load(out)
        finished = len((out / "conversion.journal").read_text().splitlines()) - 1
        assert finished >= kept
        kept = finished
    assert number > 3 and manifest == whole and verify(out, ckpt).ok


@pytest.mark.parametrize("owner, name", [(direct.DirectFile, "sync"), (direct.DirectFile, "read"), (os, "replace")],
                         ids=["fsync", "read", "rename"])
def test_every_call_fails_once(owner, name, ckpt, tmp_path):
    whole = convert(ckpt, tmp_path / "whole")
    for number in range(0, 40, 3):
        out = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            fail_on_call(patch, owner, name, number, OSError(errno.EIO, "Input/output error"))
            try:
                assert convert(ckpt, out, jobs=2) == whole
                return
            except (ConversionError, CheckpointError) as error:
                assert "Input/output error" in str(error)
        assert not (out / "manifest.json").exists()
        assert convert(ckpt, out) == whole
    pytest.fail("more calls than expected")


def test_finished_columns_are_not_rewritten(ckpt, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        fail_on_call(patch, direct.DirectFile, "write", 5, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(NoSpaceError, match="make room and run the same command again"):
            convert(ckpt, out, jobs=1)
    journal = [json.loads(line) for line in (out / "conversion.journal").read_text().splitlines()[1:]]
    manifest_before = files_below(out)
    assert 0 < len(journal) < 8
    manifest = convert(ckpt, out)
    after = files_below(out)
    for entry in journal:
        path = str(out / manifest.files[entry["file"]].path)
        assert after[path] == manifest_before[path]


def test_a_torn_journal_line_is_cut_off(ckpt, tmp_path):
    out = tmp_path / "out"
    whole = convert(ckpt, tmp_path / "whole")
    beyond = b'{"file": 99, "size": 1, "sha256": "' + b"0" * 64 + b'"}\n'
    for torn in (b'{"file": 1, "si', b'{"file": 1}\n', b"\0\0\0\0\n", beyond):
        shutil.rmtree(out, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            fail_on_call(patch, direct.DirectFile, "write", 4, OSError(errno.EIO, "Input/output error"))
            with pytest.raises(ConversionError):
                convert(ckpt, out, jobs=1)
        with open(out / "conversion.journal", "ab") as file:
            file.write(torn)
        assert convert(ckpt, out) == whole


def test_a_journaled_column_that_changed_is_written_again(ckpt, tmp_path, caplog):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        fail_on_call(patch, direct.DirectFile, "write", 6, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(ConversionError):
            convert(ckpt, out, jobs=1)
    first = out / "layer-001" / "column-00.rows"
    first.write_bytes(bytes(first.stat().st_size))
    (out / "layer-001" / "column-01.rows").unlink()
    with caplog.at_level(logging.WARNING, "ssdgram"):
        convert(ckpt, out)
    assert verify(out, ckpt).ok and caplog.text.count("it is written again") == 2


def test_resume_with_other_stripes_or_source(ckpt, tmp_path):
    out, stripes = tmp_path / "out", [tmp_path / "a", tmp_path / "b"]
    with pytest.MonkeyPatch.context() as patch:
        fail_on_call(patch, direct.DirectFile, "write", 4, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(ConversionError):
            convert(ckpt, out, stripe=stripes, jobs=1)
    with pytest.raises(ConversionError, match="has the stripes"):
        convert(ckpt, out, stripe=stripes[::-1])
    with pytest.raises(ConversionError, match="unfinished conversion of another source"):
        convert(small_engram(tmp_path / "other", seed=1), out)
    shutil.move(tmp_path / "a", tmp_path / "unmounted")
    with pytest.raises(IdentityError, match="is stripe 0 mounted"):
        convert(ckpt, out)
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    shutil.move(tmp_path / "unmounted", tmp_path / "a")
    convert(ckpt, out)
    assert verify(out, ckpt).ok


def test_two_converters(ckpt, tmp_path):
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConversionError, match="another conversion is at work there"):
        convert(ckpt, tmp_path / "out")
    os.close(descriptor)
    convert(ckpt, tmp_path / "out")


def test_a_file_system_that_locks_no_folders(ckpt, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    convert(ckpt, tmp_path / "out")
    assert "cannot be locked" in caplog.text


# ---------------------------------------------------------------- space, tokenizer, O_DIRECT


def test_no_space_is_said_with_numbers_before_the_first_byte(ckpt, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(NoSpaceError, match=r"are needed there, 5000 bytes are free") as caught:
        convert(ckpt, tmp_path / "new" / "out")
    assert isinstance(caught.value, OSError) and "the store takes" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_store_is_not_made_in_its_checkpoint_nor_below_what_is_not_mounted(ckpt, tmp_path):
    """What is refused leaves no folder behind."""
    before = sorted(tmp_path.rglob("*")), sorted(Path(ckpt).rglob("*"))
    (tmp_path / "link").symlink_to(ckpt)
    inside = Path(ckpt) / "deep" / "out"
    for out, stripe in ((ckpt, ()), (inside, ()), (tmp_path / "link" / "out", ()), (tmp_path / "o", [inside])):
        with pytest.raises(ConversionError, match="lies in the checkpoint"):
            convert(ckpt, out, stripe)
    (tmp_path / "link").unlink()
    with pytest.raises(ConversionError, match=r"nowhere.*is the drive mounted"):
        convert(ckpt, tmp_path / "deep" / "out", [tmp_path / "deep" / "out" / "s1", tmp_path / "nowhere" / "s2"])
    assert (sorted(tmp_path.rglob("*")), sorted(Path(ckpt).rglob("*"))) == before


def test_room_is_needed_only_for_what_is_left(ckpt, tmp_path, monkeypatch):
    whole = convert(ckpt, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        fail_on_call(patch, direct.DirectFile, "write", 6, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(ConversionError):
            convert(ckpt, tmp_path / "out", jobs=1)
    monkeypatch.setattr("ssdgram.layout.convert.SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, whole.size // 2))
    with pytest.raises(NoSpaceError):
        convert(ckpt, tmp_path / "fresh")
    assert convert(ckpt, tmp_path / "out") == whole


def test_missing_and_wrong_tokenizer(ckpt, tmp_path):
    folder = shutil.copytree(ckpt, tmp_path / "c")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConversionError, match=r"tokenizer\.json is missing: .* put the model's own"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    tokenizer = json.loads(TOKENIZER.read_text())
    tokenizer["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TokenMapError):
        convert(folder, tmp_path / "out")
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    convert(folder, tmp_path / "out")                        # it goes on: nothing was wrong with OUT


def test_a_file_system_that_refuses_o_direct(ckpt, tmp_path, monkeypatch, caplog):
    whole = convert(ckpt, tmp_path / "whole")
    right = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return right(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(direct, "_noticed", set())
    assert convert(ckpt, tmp_path / "out") == whole
    assert caplog.text.count("refuses O_DIRECT") == 1


def test_a_file_system_that_refuses_only_the_transfer(ckpt, tmp_path, monkeypatch, caplog):
    whole = convert(ckpt, tmp_path / "whole")
    read, write = os.preadv, os.pwritev

    def refusing(call):
        def transfer(descriptor, buffers, offset, *flags):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(descriptor, buffers, offset, *flags)
        return transfer

    monkeypatch.setattr(os, "preadv", refusing(read))
    monkeypatch.setattr(os, "pwritev", refusing(write))
    monkeypatch.setattr(direct, "_noticed", set())
    assert convert(ckpt, tmp_path / "out") == whole
    assert caplog.text.count("refuses O_DIRECT") == 1


@pytest.mark.parametrize("most", [4096, 512, 1000])
def test_short_transfers_are_finished(most, ckpt, tmp_path, monkeypatch):
    whole = convert(ckpt, tmp_path / "whole")
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:most]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:most]], offset))
    with pytest.MonkeyPatch.context() as patch:              # 1000 bytes are no direct transfer
        if most % 512:
            right = os.open
            patch.setattr(os, "open", lambda path, flags, *rest, **more: right(path, flags & ~os.O_DIRECT, *rest, **more))
        assert convert(ckpt, tmp_path / "out") == whole


def test_a_source_that_shrinks_under_the_conversion(ckpt, tmp_path, monkeypatch):
    folder = shutil.copytree(ckpt, tmp_path / "c")
    compile_packing = columns.compile_packing

    def shrink():
        compile_packing()
        os.truncate(folder / "model-00003-of-00003.safetensors", 9000)

    monkeypatch.setattr(columns, "compile_packing", shrink)
    with pytest.raises(CheckpointError, match="has 9000 bytes, expected at least"):
        convert(folder, tmp_path / "out")
    with pytest.raises(ManifestError):
        Manifest.load(tmp_path / "out")


def test_memory_does_not_follow_the_tables(tmp_path):
    """A table of 0.4 GiB through a process of its own: its peak stays that of the buffers and of the compiled code."""
    import subprocess
    import sys
    from pathlib import Path

    ckpt = small_engram(tmp_path / "c", 50_000, heads=8, head_dim=256, max_ngram=4)
    code = ("import sys\nfrom ssdgram.layout.convert import convert\nmanifest = convert(sys.argv[1], sys.argv[2], jobs=4)\n"
            "print(manifest.size, open('/proc/self/status').read().split('VmHWM:')[1].split()[0])")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code, str(ckpt), str(tmp_path / "out")], capture_output=True, text=True,
                          check=True, env=environment)
    size, peak = map(int, done.stdout.split())
    assert size > 600 << 20 and peak * 1024 < 300 << 20
