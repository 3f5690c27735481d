"""Where a store's files are, and what is refused: other places, other kinds, other sizes, other roots, other token maps."""

import json
import os
import shutil

import numpy as np
import pytest
from checkpoints import small_engram

from ssdgram.errors import FormatError, IdentityError
from ssdgram.layout.convert import convert
from ssdgram.layout.files import load_token_map, resolve, roots_of, write_token_map
from ssdgram.layout.manifest import Manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    checkpoint = small_engram(folder / "ckpt")
    convert(checkpoint, folder / "plain")
    convert(checkpoint, folder / "striped", stripe=(folder / "s0", folder / "s1", folder / "s2"))
    return folder


@pytest.fixture
def store(made, tmp_path):
    shutil.copytree(made / "plain", tmp_path / "out")
    return tmp_path / "out"


def test_one_root(store):
    manifest = Manifest.load(store)
    assert resolve(store, manifest) == [store / f.path for f in manifest.files]
    assert json.loads((store / "stripe.json").read_text()) == {
        "format": 1, "generation": f"{manifest.generation:016x}", "stripe": 0, "stripes": 1}


def test_columns_are_dealt_over_the_roots(made):
    manifest = Manifest.load(made / "striped")
    assert manifest.roots == tuple(str(made / f"s{k}") for k in range(3))
    assert resolve(made / "striped", manifest) == [made / f"s{f.column % 3}" / f.path for f in manifest.files]
    assert sorted(p.name for p in (made / "striped").iterdir()) == ["manifest.json", "token_map.npy"]


def test_moved_roots(made, tmp_path):
    manifest = Manifest.load(made / "striped")
    moved = [shutil.copytree(made / f"s{k}", tmp_path / f"m{k}") for k in range(3)]
    assert roots_of(made / "striped", manifest, moved) == moved
    with pytest.raises(IdentityError, match="3 roots, 2 were given"):
        resolve(made / "striped", manifest, moved[:2])
    with pytest.raises(IdentityError, match="out of order or belong to another store"):
        resolve(made / "striped", manifest, [moved[1], moved[0], moved[2]])
    (moved[2] / "stripe.json").unlink()
    with pytest.raises(IdentityError, match="is stripe 2 mounted"):
        resolve(made / "striped", manifest, moved)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', '{"stripe": 0, "stripe": 0}', "\xff",
                                  '{"format": 1, "generation": "0000000000000000", "stripe": 0, "stripes": 1}'])
def test_broken_stripe_json(text, store):
    (store / "stripe.json").write_text(text, encoding="latin-1")
    with pytest.raises(IdentityError, match=r"stripe\.json"):
        resolve(store, Manifest.load(store))


def test_missing_file(store):
    (store / "layer-001/column-02.rows").unlink()
    with pytest.raises(FormatError, match=r"column-02\.rows: No such file"):
        resolve(store, Manifest.load(store))


@pytest.mark.parametrize("change", [-1, -4096, 1, 4096])
def test_other_size(change, store):
    path = store / "layer-003/column-00.rows"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(FormatError, match=r"column-00\.rows: expected 8192 bytes, found"):
        resolve(store, Manifest.load(store))


def test_links_are_not_followed(store, tmp_path):
    manifest = Manifest.load(store)
    path = store / "layer-001/column-00.rows"
    elsewhere = tmp_path / "elsewhere.rows"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(FormatError, match="out of its place"):
        resolve(store, manifest)
    path.unlink()
    path.symlink_to("column-01.rows")                        # another column of the same store
    with pytest.raises(FormatError, match="out of its place"):
        resolve(store, manifest)
    path.unlink()
    elsewhere.rename(path)
    (store / "layer-001").rename(tmp_path / "layer-001")
    (store / "layer-001").symlink_to(tmp_path / "layer-001")
    with pytest.raises(FormatError, match="out of its place"):
        resolve(store, manifest)


def test_a_root_may_be_reached_by_a_link(made, tmp_path):
    (tmp_path / "link").symlink_to(made / "plain")
    assert len(resolve(tmp_path / "link", Manifest.load(tmp_path / "link"))) == 8


def test_other_kinds_of_file(store):
    path = store / "layer-001/column-00.rows"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        resolve(store, Manifest.load(store))
    path.unlink()
    path.mkdir()
    with pytest.raises(FormatError, match="not a regular file"):
        resolve(store, Manifest.load(store))


# ---------------------------------------------------------------- token map


def test_token_map(store):
    manifest = Manifest.load(store)
    table = load_token_map(store, manifest)
    assert table.dtype == np.int32 and len(table) == manifest.token_map.size and not table.flags.writeable
    assert np.array_equal(table, np.load(store / "token_map.npy"))


def npy(array):
    import io

    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def huge_shape(data):
    return data.replace(b"(", b"(9", 1)


TAMPERED = {
    "empty": lambda data, table: b"",
    "no npy": lambda data, table: b"x" * len(data),
    "truncated": lambda data, table: data[:-4],
    "longer": lambda data, table: data + b"\0\0\0\0",
    "much longer": lambda data, table: data + bytes(1 << 16),
    "huge shape": lambda data, table: huge_shape(data),
    "other dtype": lambda data, table: npy(table.astype(np.int64)),
    "other order": lambda data, table: npy(table.astype(">i4")),
    "two dimensions": lambda data, table: npy(table.reshape(1, -1)),
    "fewer": lambda data, table: npy(table[:-1]),
    "pickle": lambda data, table: npy(np.array([object()], dtype=object)),
    "one id changed": lambda data, table: npy(np.where(np.arange(len(table)) == 7, table[8], table).astype("<i4")),
    "version 2": lambda data, table: data[:6] + b"\2" + data[7:],
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_token_map(case, store):
    path = store / "token_map.npy"
    path.write_bytes(TAMPERED[case](path.read_bytes(), np.load(path)))
    with pytest.raises(FormatError, match=r"token_map\.npy"):
        load_token_map(store, Manifest.load(store))


def test_missing_token_map(store):
    (store / "token_map.npy").unlink()
    with pytest.raises(FormatError, match="the store is not whole"):
        load_token_map(store, Manifest.load(store))


def test_token_map_is_written_as_numpy_reads_it(tmp_path):
    write_token_map(tmp_path, np.array([3, 1, 2], np.int64))
    assert np.load(tmp_path / "token_map.npy").tolist() == [3, 1, 2]
    assert np.load(tmp_path / "token_map.npy").dtype == np.dtype("<i4")
