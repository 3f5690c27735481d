"""What is no file is refused at once, whoever opens it: a FIFO without a writer would be waited for, for ever."""

import errno
import os

import pytest

import ssdgram
from ssdgram.layout.bounded import read_bounded, regular
from ssdgram.layout.files import check_stripe
from ssdgram.layout.journal import Journal
from ssdgram.layout.manifest import JOURNAL, MANIFEST, TOKEN_MAP, identity
from ssdgram.layout.safetensors import INDEX, read_header, read_index


def test_the_bound(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes") as caught:
        read_bounded(tmp_path / "file", 4)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file(tmp_path, kind):
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file"):
        read_bounded(path, 100)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_opened_waits_as_files_do(tmp_path):
    (tmp_path / "file").touch()
    with open(tmp_path / "file", opener=regular) as file:
        assert os.get_blocking(file.fileno())


def test_a_fifo_in_the_place_of_any_file(engram, tmp_path):
    """Each reader of a small file gives its own typed error."""
    copy = engram.copy(tmp_path / "copy")
    os.mkfifo(tmp_path / "hot")
    with copy.open(hotset=tmp_path / "hot") as store:
        assert any("not a regular file" in notice for notice in store.notices)
    for name, error in (("stripe.json", ssdgram.IdentityError), (TOKEN_MAP, ssdgram.FormatError), (MANIFEST, ssdgram.ManifestError)):
        path = copy.out / name
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(error, match="not a regular file"):
            copy.open()
    assert identity(copy.out) == ""
    with pytest.raises(ssdgram.IdentityError):
        check_stripe(copy.out, 0, 0, 1)


def test_a_fifo_in_a_checkpoint(tmp_path):
    for name in ("config.json", INDEX, "model.safetensors", "tokenizer.json", JOURNAL):
        os.mkfifo(tmp_path / name)
    for call, error in ((ssdgram.Geometry.from_config, ssdgram.ConfigError), (read_index, ssdgram.CheckpointError),
                        (Journal.load, ssdgram.ConversionError)):
        with pytest.raises(error, match="not a regular file"):
            call(tmp_path)
    with pytest.raises(ssdgram.CheckpointError, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(ssdgram.TokenMapError, match="not a regular file"):
        ssdgram.token_map(tmp_path / "tokenizer.json")
