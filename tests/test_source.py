"""Rows over pieces: any range of rows is what one file with all pieces would hold; direct files behave as plain ones."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.errors import CheckpointError
from ssdgram.layout.direct import DirectFile, aligned_buffer
from ssdgram.layout.safetensors import Tensor
from ssdgram.layout.source import SLACK, RowSource, Shards


def pieces_of(folder, counts, row_bytes, seed=0):
    """Pieces of `counts` rows in two files, each after some bytes that belong to nobody; and all rows' bytes."""
    rng = np.random.default_rng(seed)
    content, tensors, files = b"", [], [b"", b""]
    for number, count in enumerate(counts):
        data = rng.bytes(count * row_bytes)
        which = number % 2
        files[which] += rng.bytes(int(rng.integers(0, 6000)))
        tensors.append(Tensor(f"t{number}", "U8", (count, row_bytes), folder / f"{which}", len(files[which]), len(data)))
        files[which] += data
        content += data
    for which in (0, 1):
        (folder / f"{which}").write_bytes(files[which])
    return tensors, content


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 200), min_size=1, max_size=6), row_bytes=st.sampled_from([1, 8, 10, 256, 320]),
       data=st.data(), seed=st.integers(0, 1000))
def test_any_range(counts, row_bytes, data, seed, tmp_path_factory):
    tensors, content = pieces_of(tmp_path_factory.getbasetemp(), counts, row_bytes, seed)
    total = sum(counts)
    with Shards() as shards:
        source = RowSource(tensors, row_bytes, shards)
        assert source.rows == total
        first = data.draw(st.integers(0, total))
        rows = data.draw(st.integers(0, total - first))
        buffer = aligned_buffer(rows * row_bytes + SLACK)
        start = source.read(first, rows, buffer)
        assert buffer[start : start + rows * row_bytes].tobytes() == content[first * row_bytes : (first + rows) * row_bytes]
        if first < total:
            assert source.row(first) == content[first * row_bytes : (first + 1) * row_bytes]


def test_no_scales():
    with Shards() as shards:
        source = RowSource((), 0, shards)
        assert source.read(5, 7, aligned_buffer(0)) == 0 and source.row(5) == b""


def test_files_that_are_gone_or_short(tmp_path):
    tensors, _ = pieces_of(tmp_path, [100, 100], 64)
    with Shards() as shards:
        source = RowSource(tensors, 64, shards)
        os.truncate(tmp_path / "1", 10)
        buffer = aligned_buffer(200 * 64 + SLACK)
        for first, rows in ((100, 100), (50, 100)):          # one piece, and over the border
            with pytest.raises(CheckpointError, match="has 10 bytes, expected at least"):
                source.read(first, rows, buffer)
        with pytest.raises(CheckpointError, match="row 150 cannot be read"):
            source.row(150)
    (tmp_path / "1").unlink()
    with Shards() as shards, pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        RowSource(tensors, 64, shards)


def test_aligned_buffer():
    for size in (0, 1, 4096, 10_000):
        buffer = aligned_buffer(size)
        assert len(buffer) == size and not buffer.any() and buffer.flags.writeable
        assert size == 0 or buffer.ctypes.data % 4096 == 0


def test_a_written_file_reads_back(tmp_path):
    file = DirectFile(tmp_path / "x", writable=True, size=3 * 4096)
    buffer = aligned_buffer(8192)
    buffer[:] = np.random.default_rng(0).integers(0, 256, 8192)
    file.write(buffer, 4096)
    file.sync()
    again = aligned_buffer(3 * 4096)
    file.read(again, 0, 3 * 4096)
    assert again.tobytes() == bytes(4096) + buffer.tobytes() and (tmp_path / "x").stat().st_size == 3 * 4096
    with pytest.raises(EOFError, match="has 12288 bytes, expected at least 16384"):
        file.read(again, 4096, 3 * 4096)
    view = bytearray(100)
    file.read_exactly(memoryview(view), 4090)
    assert bytes(view) == bytes(6) + buffer[:94].tobytes()
    file.close()
    file.close()
    DirectFile(tmp_path / "x", writable=True, size=4096).close()         # a torn file of an earlier run is cut to size
    assert (tmp_path / "x").stat().st_size == 4096


def test_an_odd_end_is_read(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(256)) * 20 + b"end")
    file = DirectFile(tmp_path / "x")
    buffer = aligned_buffer(8192)
    file.read(buffer, 0, 5123)
    assert buffer[:5123].tobytes() == bytes(range(256)) * 20 + b"end"
    file.close()


def test_space_is_reserved_or_refused(tmp_path, monkeypatch):
    DirectFile(tmp_path / "x", writable=True, size=1 << 20).close()
    assert (tmp_path / "x").stat().st_blocks * 512 >= 1 << 20
    before = len(os.listdir("/proc/self/fd"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ssdgram.layout.direct._reserve", full)
    with pytest.raises(OSError, match="No space left"):
        DirectFile(tmp_path / "y", writable=True, size=1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before
