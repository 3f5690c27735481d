"""Inspection: numbers of stores and checkpoints, one row read and decoded, and the full-size checkpoint in no time."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import GOLDEN, TINY, small_ple
from click.testing import CliRunner

from ssdgram.cli.convert import convert as convert_command
from ssdgram.cli.inspect import inspect as inspect_command
from ssdgram.cli.verify import verify as verify_command
from ssdgram.errors import ConfigError, FormatError, ManifestError, RowCheckError
from ssdgram.layout.convert import convert
from ssdgram.layout.inspect import decoded, describe, read_row
from ssdgram.tools.synth import synthesize


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "out"
    convert(TINY, folder)
    return folder


def test_rows_of_the_golden_store(store):
    info = describe(store)
    geometry = info.geometry
    with np.load(GOLDEN / "tiny_v41" / "expected.npz") as expected:
        for token in range(20):
            for index, layer in enumerate(geometry.layers):
                for column in range(geometry.columns):
                    row = int(expected["row_ids"][token, index, column]) - geometry.offsets[index][column]
                    values = decoded(info, layer, read_row(info, layer, column, row))
                    bits = expected[f"l{layer}/emb_bf16"][token, column].view(np.uint16)
                    assert np.array_equal(values.view(np.uint32) >> 16, bits.astype(np.uint32))


def test_row_that_is_not_there(store):
    info = describe(store)
    with pytest.raises(ConfigError, match="layer 2"):
        read_row(info, 2, 0, 0)
    for column, row in ((-1, 0), (6, 0), (0, -1), (0, 101)):
        with pytest.raises(ValueError, match=r"expected 0 \.\. "):
            read_row(info, 1, column, row)


def test_damaged_row(store, tmp_path):
    import shutil

    out = shutil.copytree(store, tmp_path / "out")
    path = out / "layer-001/column-00.rows"
    data = bytearray(path.read_bytes())
    data[66 * 7 + 3] ^= 4
    path.write_bytes(data)
    info = describe(out)
    assert len(read_row(info, 1, 0, 6)) == 66
    with pytest.raises(RowCheckError, match="page 0, row 7: a row whose checksum is wrong") as caught:
        read_row(info, 1, 0, 7)
    assert (caught.value.layer, caught.value.page, caught.value.rows, caught.value.file) == (1, 0, (7,), str(path))
    os.truncate(path, 100)
    with pytest.raises(RowCheckError, match="100 of 4096 bytes"):
        read_row(info, 1, 0, 7)
    path.unlink()
    with pytest.raises(FormatError, match="No such file"):
        read_row(info, 1, 0, 7)


def test_neither_store_nor_checkpoint(tmp_path):
    with pytest.raises(ManifestError, match="neither a store"):
        describe(tmp_path)
    (tmp_path / "conversion.journal").write_text("")
    with pytest.raises(ManifestError, match="conversion not finished"):
        describe(tmp_path)


def run(command, *arguments):
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_command_on_a_store(store):
    text = run(inspect_command, store, "--layer", 3, "--column", 5, "--row", 2)
    for words in ("generation", "6 a layer: orders 2 .. 4, 2 heads each", "1524 in all", "331 ids, compressed to 258",
                  "row 2        of layer 3, column 5 (4-gram, head 1)", "  scales", "stripe 0"):
        assert words in text, words
    result = CliRunner().invoke(inspect_command, [str(store), "--row", "100000"])
    assert result.exit_code == 2 and "expected 0 .. 100" in result.output


def test_command_on_checkpoints(tmp_path):
    text = run(inspect_command, TINY)
    assert "layers.1.engram.embed.weight F8_E4M3 [660, 64]" in text and "as a store" in text
    text = run(inspect_command, small_ple(tmp_path / "c", encoding="fp8_global", parts=3))
    assert "and 2 pieces more" in text and "fp8_global" in text


def test_commands_from_checkpoint_to_verified_store(tmp_path):
    ckpt, out = small_ple(tmp_path / "c", encoding="fp8_global"), tmp_path / "out"
    text = run(convert_command, ckpt, out, "--stripe", tmp_path / "a", "--stripe", tmp_path / "b", "--jobs", 2)
    assert "4 columns" in text
    assert "all right" in run(verify_command, out, "--against", ckpt)
    text = run(inspect_command, out)
    assert "global scale 0.0078125" in text and f"stripe 1     {tmp_path / 'b'}: 2 files" in text
    path = tmp_path / "a/layer-001/column-02.rows"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    result = CliRunner().invoke(verify_command, [str(out)])
    assert result.exit_code == 1 and "NOT right" in result.output and "column-02.rows" in result.output


# ---------------------------------------------------------------- the full-size checkpoint


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    """The real geometry: 203 GB apparent, a few KiB on the disk."""
    return synthesize(tmp_path_factory.mktemp("full") / "ckpt", 16_000_000, hidden_size=5120, sparse=True)


def measured(*arguments):
    """Exit status, output, processor seconds and peak RSS (bytes) of a command in a process of its own. It waits for nobody, so
    that these are its seconds on an idle machine."""
    code = "import resource\nfrom ssdgram.cli import main\ntry:\n    main()\nfinally:\n" \
           "    spent = resource.getrusage(resource.RUSAGE_SELF)\n" \
           "    print('RSS', open('/proc/self/status').read().split('VmHWM:')[1].split()[0], spent.ru_utime + spent.ru_stime)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment)
    peak, seconds = done.stdout.split("RSS")[1].split()
    return done.returncode, done.stdout + done.stderr, float(seconds), int(peak) * 1024


def test_full_size_is_inspected_within_two_seconds(full_size):
    status, text, seconds, peak = measured("inspect", full_size)
    assert status == 0 and "384006168, 384016682" in text and "as a store   209721540608 bytes (195.32 GiB)" in text
    assert "202758032400 bytes (188.83 GiB)" in text
    assert seconds < 2 and peak < 200 << 20


def test_full_size_is_refused_for_want_of_space_within_two_seconds(full_size, tmp_path):
    import shutil

    if shutil.disk_usage(tmp_path).free > 209 * 10**9:
        pytest.skip("this file system has room for the whole store")
    status, text, seconds, peak = measured("convert", full_size, tmp_path / "out")
    assert status == 1 and "NoSpaceError" in text and "209738317824 bytes (195.3 GiB) are needed there" in text
    assert "are free" in text and not (tmp_path / "out").exists()
    assert seconds < 2 and peak < 200 << 20
