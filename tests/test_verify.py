"""Verification: every kind of damage is found, named with file, page and rows, and nothing else is."""

import errno
import os
import random
import shutil

import pytest
from checkpoints import TINY, files_below, small_engram, small_ple

from ssdgram.errors import ConversionError, IdentityError, ManifestError
from ssdgram.layout import verify as verification
from ssdgram.layout.convert import convert
from ssdgram.layout.manifest import Manifest
from ssdgram.layout.verify import MAX_LISTED, verify


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    convert(small_engram(folder / "ckpt", 1009), folder / "out")
    return folder


@pytest.fixture
def store(made, tmp_path):
    return shutil.copytree(made / "out", tmp_path / "out")


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_right_store(made):
    manifest = Manifest.load(made / "out")
    before = files_below(made)
    told = []
    report = verify(made / "out", progress=lambda done, total: told.append((done, total)))
    assert report.ok and report.failed == () and report.pages == sum(f.pages for f in manifest.files) and report.rows == 0
    report = verify(made / "out", made / "ckpt", jobs=3)
    assert report.ok and report.rows == sum(f.rows for f in manifest.files)
    assert told[-1] == (manifest.size, manifest.size) and files_below(made) == before


def test_the_golden_store(tmp_path):
    convert(TINY, tmp_path / "out")
    assert verify(tmp_path / "out", TINY).ok


def test_a_flipped_bit_in_a_row(store, made):
    path = store / "layer-001/column-02.rows"
    flip(path, 3 * 4096 + 5 * 66 + 10)
    for against in (None, made / "ckpt"):
        report = verify(store, against)
        failure = report.failed[0]
        assert not report.ok and len(report.failed) == (1 if against is None else 2)
        assert (failure.file, failure.layer, failure.column, failure.page, failure.rows) == (str(path), 1, 2, 3, (3 * 58 + 5,))
        assert "checksum" in failure.what and str(path) in str(failure) and "page 3" in str(failure)
    assert report.failed[1].what == "rows differ from the source" and report.failed[1].rows == (3 * 58 + 5,)


def test_any_flipped_bit_is_found(store):
    draw = random.Random(5)
    path = store / "layer-003/column-01.rows"
    data = path.read_bytes()
    for _ in range(40):
        place, bit = draw.randrange(len(data)), draw.randrange(8)
        flip(path, place, bit)
        report = verify(store)
        assert [(f.file, f.page) for f in report.failed] == [(str(path), place // 4096)], (place, bit)
        path.write_bytes(data)


def test_truncated_longer_missing(store):
    manifest = Manifest.load(store)
    paths = [store / f.path for f in manifest.files]
    os.truncate(paths[0], paths[0].stat().st_size - 4096)
    os.truncate(paths[1], paths[1].stat().st_size - 100)
    os.truncate(paths[2], paths[2].stat().st_size + 4096)
    paths[3].unlink()
    os.truncate(paths[4], 0)
    report = verify(store)
    assert [f.file for f in report.failed] == [str(path) for path in paths[:5]]
    assert all(str(f).count(f.file) == 1 for f in report.failed)
    assert all("expected" in f.what for f in report.failed[:3]) and "No such file" in report.failed[3].what
    assert report.pages == sum(f.pages for f in manifest.files) - 2 - manifest.files[3].pages - manifest.files[4].pages


def test_a_file_that_may_not_be_read_is_no_other_conversions(store, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(verification, "DirectFile", refused)
    report = verify(store)
    assert len(report.failed) == len(Manifest.load(store).files) and report.pages == 0
    assert all(failure.what.startswith("cannot be opened: Permission denied; run this as a user") for failure in report.failed)


def test_a_fifo_in_the_place_of_a_file_does_not_hang(store):
    path = store / "layer-001/column-00.rows"
    path.unlink()
    os.mkfifo(path)
    assert [f.what for f in verify(store).failed] == ["not a regular file"]


def test_swapped_columns(store):
    """Column files of equal length in each other's place."""
    one, other = store / "layer-001/column-00.rows", store / "layer-003/column-00.rows"
    size = one.stat().st_size
    assert size == other.stat().st_size
    one.rename(store / "x")
    other.rename(one)
    (store / "x").rename(other)
    report = verify(store)
    pages = size // 4096
    assert len(report.failed) == 2 * pages and {f.what for f in report.failed} == {"a page of another layer"}
    assert report.failed[0].rows == tuple(range(58))         # not one row of it passes for the right one


def test_a_page_in_another_place(store):
    path = store / "layer-001/column-03.rows"
    data = path.read_bytes()
    path.write_bytes(data[4096:8192] + data[:4096] + data[8192:])
    assert [(f.page, f.what) for f in verify(store).failed] == [(0, "a page of another place (page number)"),
                                                                (1, "a page of another place (page number)")]


def test_a_column_of_another_conversion_of_the_same_geometry(store, tmp_path):
    convert(small_engram(tmp_path / "c", 1009, seed=1), tmp_path / "other")
    shutil.copy(tmp_path / "other/layer-001/column-00.rows", store / "layer-001/column-00.rows")
    report = verify(store)
    assert {f.what for f in report.failed} == {"a page of another conversion (generation)"} and len(report.failed) == 18


def test_a_file_whose_digest_alone_is_wrong(store):
    """Rows outside the generation's sample: pages right by themselves, another source all the same."""
    manifest = (store / "manifest.json").read_text()
    digest = Manifest.load(store).files[2].sha256
    (store / "manifest.json").write_text(manifest.replace(digest, "0" * 64))
    report = verify(store)
    assert [f.page for f in report.failed] == [None] and "SHA-256" in report.failed[0].what


def test_failures_are_listed_up_to_a_bound(tmp_path):
    convert(small_engram(tmp_path / "c", 20_011, heads=1, max_ngram=2, layers=(1,)), tmp_path / "out")
    path = tmp_path / "out/layer-001/column-00.rows"
    pages = path.stat().st_size // 4096
    path.write_bytes(bytes(path.stat().st_size))
    report = verify(tmp_path / "out")
    assert len(report.failed) == MAX_LISTED and len(report.failed) + report.unlisted == pages > MAX_LISTED


def test_against_another_source(store, made, tmp_path):
    other = small_engram(tmp_path / "c", 1009, seed=1)
    report = verify(store, other)
    assert "converted from another source" in report.failed[0].what
    assert {f.what for f in report.failed[1:]} == {"rows differ from the source"}
    with pytest.raises(ConversionError, match="another geometry"):
        verify(store, small_ple(tmp_path / "p"))


def test_against_a_source_with_one_changed_row(store, made, tmp_path):
    folder = shutil.copytree(made / "ckpt", tmp_path / "c")
    flip(folder / "model-00002-of-00003.safetensors", 8 + 700 + 64 * 2000)
    report = verify(store, folder)
    rows = [f for f in report.failed if f.page is not None]
    assert len(rows) == 1 and rows[0].layer == 1 and len(rows[0].rows) == 1


def test_token_map(store):
    flip(store / "token_map.npy", 200)
    report = verify(store)
    assert len(report.failed) == 1 and "token_map.npy" in report.failed[0].what


def test_stripes(made, tmp_path):
    convert(made / "ckpt", tmp_path / "out", stripe=[tmp_path / "a", tmp_path / "b"])
    shutil.move(tmp_path / "a", tmp_path / "moved")
    with pytest.raises(IdentityError, match="is stripe 0 mounted"):
        verify(tmp_path / "out")
    assert verify(tmp_path / "out", stripes=[tmp_path / "moved", tmp_path / "b"]).ok
    with pytest.raises(IdentityError, match="out of order"):
        verify(tmp_path / "out", stripes=[tmp_path / "b", tmp_path / "moved"])


def test_no_store(tmp_path):
    with pytest.raises(ManifestError):
        verify(tmp_path)


def test_an_unreadable_block_is_a_failure(store, monkeypatch):
    from ssdgram.layout import direct

    right = direct.DirectFile.read

    def read(self, buffer, offset, need):
        if self.path.name == "column-01.rows" and "layer-001" in str(self.path):
            raise OSError(5, "Input/output error")
        return right(self, buffer, offset, need)

    monkeypatch.setattr(direct.DirectFile, "read", read)
    report = verify(store)
    assert len(report.failed) == 1 and "Input/output error" in report.failed[0].what and report.failed[0].column == 1
