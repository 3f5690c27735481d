"""manifest.json: what is written is read back equal, and nothing else is believed."""

import copy
import json
import os
import pickle
import time

import pytest
from checkpoints import small_engram, small_ple
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.errors import ManifestError
from ssdgram.layout import manifest as module
from ssdgram.layout.convert import convert
from ssdgram.layout.manifest import Manifest, identity, stamp, write_durably


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    convert(small_engram(folder / "ckpt"), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled")
    return convert(small_ple(folder / "ckpt", encoding="fp8_global"), folder / "out", stripe=(folder / "a", folder / "b"))


def test_round_trip(store, scaled):
    manifest = Manifest.load(store)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert Manifest.from_json(json.loads(json.dumps(scaled.to_json()))) == scaled
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert scaled.global_scales == (2.0**-7,) and scaled.stripes == 2 and scaled.token_map is None


def test_fields(store):
    manifest = Manifest.load(store)
    geometry = manifest.geometry
    assert len(manifest.files) == len(geometry.layers) * geometry.columns
    assert [(f.layer, f.column) for f in manifest.files[:5]] == [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0)]
    assert manifest.files[5].path == "layer-003/column-01.rows"
    assert (manifest.row_bytes, manifest.rows_per_page, manifest.stripes, manifest.roots) == (66, 58, 1, ())
    assert manifest.size == sum((store / f.path).stat().st_size for f in manifest.files)
    assert manifest.token_map.compressed_size == geometry.compressed_vocab_size
    assert [t.name for t in manifest.source] == [
        f"layers.{layer}.engram.embed.{part}" for layer in (1, 3) for part in ("weight", "scale")]


def put(value, path, new):
    """A copy of a JSON value with the entry at `path` replaced, or removed if `new` is `...`."""
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


TAMPERED = {
    "format 2": (("format",), 2, "format 2, this version reads format 1"),
    "format true": (("format",), True, "format True"),
    "no format": (("format",), ..., "format None"),
    "no generation": (("generation",), ..., "missing fields ['generation']"),
    "unknown field": (("extra",), 1, "unknown fields ['extra']"),
    "generation short": (("generation",), "12", "generation: expected 16 hexadecimal digits"),
    "generation number": (("generation",), 12, "generation: expected 16"),
    "generation upper case": (("generation",), "A" * 16, "generation: expected 16"),
    "geometry list": (("geometry",), [], "geometry: expected dict"),
    "geometry field": (("geometry", "heads"), ..., "heads"),
    "geometry heads": (("geometry", "heads"), 3, "expected"),
    "geometry rows": (("geometry", "row_dim"), 1 << 16, "do not fit into a page"),
    "row_bytes": (("row_bytes",), 264, "row_bytes: expected 66, found 264"),
    "row_bytes float": (("row_bytes",), 66.0, "row_bytes: expected 66"),
    "rows_per_page": (("rows_per_page",), 59, "rows_per_page: expected 58"),
    "digest": (("digest_algorithm",), "md5", "digest_algorithm: expected 'sha256'"),
    "roots no list": (("roots",), "x", "roots: expected list"),
    "roots relative": (("roots",), ["x"], "no absolute, normalised path"),
    "roots climbing": (("roots",), ["/x/../y"], "no absolute, normalised path"),
    "roots NUL": (("roots",), ["/x\0"], "no absolute, normalised path"),
    "roots twice": (("roots",), ["/x", "/x"], "the same folder twice"),
    "roots many": (("roots",), [f"/x{k}" for k in range(1025)], "at most 1024"),
    "files short": (("files", 7), ..., "files: expected 8 (layers x columns), found 7"),
    "files no list": (("files",), {}, "files: expected list"),
    "path outside": (("files", 0, "path"), "../column-00.rows", "files[0].path: expected 'layer-001/column-00.rows'"),
    "path absolute": (("files", 0, "path"), "/etc/passwd", "files[0].path: expected"),
    "path of another": (("files", 0, "path"), "layer-001/column-01.rows", "files[0].path: expected"),
    "layer": (("files", 3, "layer"), 2, "files[3].layer: expected 1, found 2"),
    "column": (("files", 3, "column"), 2, "files[3].column: expected 3"),
    "rows": (("files", 0, "rows"), 100, "files[0].rows: expected 101"),
    "pages": (("files", 0, "pages"), 3, "files[0].pages: expected 2"),
    "size": (("files", 0, "size"), 4096, "files[0].size: expected 8192"),
    "size negative": (("files", 0, "size"), -8192, "files[0].size: expected 8192"),
    "sha256": (("files", 0, "sha256"), "0" * 63, "files[0].sha256: expected 64"),
    "file field": (("files", 0, "x"), 1, "files[0]: missing fields [], unknown fields ['x']"),
    "no token map": (("token_map",), None, "token_map: missing"),
    "token map size": (("token_map", "size"), 1 << 31, "token_map.size"),
    "token map size 0": (("token_map", "size"), 0, "token_map.size"),
    "token map compressed": (("token_map", "compressed_size"), 5, "token_map.compressed_size: expected"),
    "scales string": (("global_scales",), "x", "global_scales: expected list"),
    "scales short": (("global_scales",), [1.0], "global_scales: expected 2 finite numbers"),
    "scales integers": (("global_scales",), [1, 1], "global_scales[]: expected float"),
    "source": (("source",), None, "source: expected dict"),
    "source name": (("source", "name"), 1, "source.name: expected str"),
    "source field": (("source", "x"), 1, "source: missing fields [], unknown fields ['x']"),
    "source tensor": (("source", "tensors", 0, "shape"), [1.5], "source.tensors[0].shape[]: expected int"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampered(case, store, tmp_path):
    path, new, message = TAMPERED[case]
    value = put(json.loads((store / "manifest.json").read_text()), path, new)
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(ManifestError, match=r"manifest\.json: ") as caught:
        Manifest.load(tmp_path)
    assert message in str(caught.value)


def test_scales_that_are_no_numbers(scaled, tmp_path):
    text = json.dumps(scaled.to_json())
    for number in ("NaN", "Infinity", "1e999"):
        (tmp_path / "manifest.json").write_text(text.replace("0.0078125", number))
        with pytest.raises(ManifestError):
            Manifest.load(tmp_path)


def test_token_map_of_a_model_that_does_not_compress(scaled):
    value = put(scaled.to_json(), ("token_map",), {"size": 1, "compressed_size": 1, "sha256": "0" * 64})
    with pytest.raises(ManifestError, match="token_map: present"):
        Manifest.from_json(value)


def test_every_truncation_is_refused(store, tmp_path):
    text = (store / "manifest.json").read_bytes()
    for length in [*range(0, len(text) - 2, 37), len(text) - 2]:
        (tmp_path / "manifest.json").write_bytes(text[:length])
        with pytest.raises(ManifestError):
            Manifest.load(tmp_path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_harmless(data, store, tmp_path_factory):
    """What passes is the store's geometry and files: only digests, names, generation, roots and the like may differ."""
    text = bytearray((store / "manifest.json").read_bytes())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= 1 << data.draw(st.integers(0, 7))
    folder = tmp_path_factory.getbasetemp() / "flipped"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(text)
    right = Manifest.load(store)
    try:
        found = Manifest.load(folder)
    except ManifestError:
        return
    assert [(f.path, f.rows, f.size) for f in found.files] == [(f.path, f.rows, f.size) for f in right.files]
    assert (found.geometry.primes, found.row_bytes) == (right.geometry.primes, right.row_bytes)


def test_missing_and_unfinished(tmp_path):
    with pytest.raises(ManifestError, match="not a store"):
        Manifest.load(tmp_path)
    with pytest.raises(ManifestError, match="not a store"):
        Manifest.load(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ManifestError, match=r"is a checkpoint, not a store; make one with `ssdgram convert .* OUT`"):
        Manifest.load(tmp_path)
    (tmp_path / "conversion.journal").write_text("")
    with pytest.raises(ManifestError, match="conversion not finished; run `ssdgram convert` again"):
        Manifest.load(tmp_path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.load(tmp_path)


def test_what_is_no_json_says_what_to_do(tmp_path):
    (tmp_path / "manifest.json").write_text("garbage")
    with pytest.raises(ManifestError, match="damaged or none of ours: copy it again, or remove"):
        Manifest.load(tmp_path)


def test_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("ssdgram.layout.manifest.MAX_MANIFEST_BYTES", 10)
    (tmp_path / "manifest.json").write_text("{" + " " * 20 + "}")
    with pytest.raises(ManifestError, match="more than 10 bytes"):
        Manifest.load(tmp_path)


def test_publishing_is_atomic(store, tmp_path, monkeypatch):
    manifest = Manifest.load(store)
    manifest.publish(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == (store / "manifest.json").read_bytes()
    assert os.listdir(tmp_path) == ["manifest.json"]

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        write_durably(tmp_path / "manifest.json", b"half")
    assert Manifest.load(tmp_path) == manifest


def test_identity_follows_the_contents(store, tmp_path):
    assert identity(tmp_path) == ""
    manifest = Manifest.load(store)
    manifest.publish(tmp_path)
    assert identity(tmp_path) == identity(store) != ""
    (tmp_path / "manifest.json").write_bytes((store / "manifest.json").read_bytes() + b" ")
    assert identity(tmp_path) != identity(store)


def test_a_stamp_tells_files_apart_that_had_time_to_settle(store, tmp_path, monkeypatch):
    """Written anew with the same bytes, in place, or away: another stamp. Of a file that has just changed it tells nothing."""
    path, text = tmp_path / "manifest.json", (store / "manifest.json").read_bytes()
    assert stamp(tmp_path) == ()
    path.write_bytes(text)
    assert stamp(tmp_path) == ()
    monkeypatch.setattr(module, "SETTLED_NS", -1)
    first = stamp(tmp_path)
    assert first == stamp(tmp_path) != ()
    write_durably(path, text)
    second = stamp(tmp_path)
    time.sleep(0.02)                                         # the clock that files are stamped by ticks every 1 to 10 ms
    path.write_bytes(text)
    assert len({first, second, stamp(tmp_path)}) == 3
    path.unlink()
    assert stamp(tmp_path) == ()
