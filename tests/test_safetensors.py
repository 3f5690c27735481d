"""Safetensors headers and indices: one literal file per way to be broken, and files that other writers make."""

import json

import numpy as np
import pytest
from checkpoints import safetensors_bytes, write_index
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.errors import CheckpointError
from ssdgram.layout.safetensors import find_tensors, read_header, read_index

ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}

BROKEN = {
    "empty file": (b"", "0 bytes, too short"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "7 bytes, too short"),
    "length beyond the bound": (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "header of 9223372036854775807 bytes, more than"),
    "length of all ones": (b"\xff" * 8 + b"{}", "more than the 100000000 allowed"),
    "length beyond the file": (b"\3\0\0\0\0\0\0\0{}", "header of 3 bytes in a file of 10"),
    "no brace": (safetensors_bytes(" {}"), "does not start with"),
    "empty header": (b"\0" * 8, "does not start with"),
    "no JSON": (safetensors_bytes("{'a'}"), "not strict JSON"),
    "no UTF-8": (safetensors_bytes(b'{"\xff":1}'), "not strict JSON"),
    "two values": (safetensors_bytes("{}{}"), "not strict JSON"),
    "deep nesting": (safetensors_bytes('{"a":' + "[" * 200_000), "not strict JSON"),
    "key twice": (safetensors_bytes('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'), "'a' occurs twice"),
    "NaN": (safetensors_bytes('{"a":NaN}'), "NaN is no JSON number"),
    "huge integer": (safetensors_bytes('{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + "9" * 5000 + "]}}"),
                     "not strict JSON"),
    "metadata no object": (safetensors_bytes({"__metadata__": []}), "__metadata__"),
    "metadata no strings": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "tensor no object": (safetensors_bytes({"a": 1}), "'a': expected exactly dtype"),
    "field missing": (safetensors_bytes({"a": {"dtype": "U8", "shape": [0]}}), "'a': expected exactly dtype"),
    "field too many": (safetensors_bytes({"a": {**ONE, "x": 1}}, bytes(4)), "'a': expected exactly dtype"),
    "unknown dtype": (safetensors_bytes({"a": {**ONE, "dtype": "U7"}}, bytes(4)), "unknown dtype 'U7'"),
    "dtype no string": (safetensors_bytes({"a": {**ONE, "dtype": []}}, bytes(4)), "unknown dtype"),
    "shape no list": (safetensors_bytes({"a": {**ONE, "shape": 4}}, bytes(4)), "shape is not a list"),
    "negative side": (safetensors_bytes({"a": {**ONE, "shape": [-4]}}, bytes(4)), "shape is not a list"),
    "boolean side": (safetensors_bytes({"a": {**ONE, "shape": [True, 4]}}, bytes(4)), "shape is not a list"),
    "float side": (safetensors_bytes({"a": {**ONE, "shape": [4.0]}}, bytes(4)), "shape is not a list"),
    "side of 2^63": (safetensors_bytes({"a": {**ONE, "shape": [1 << 63]}}, bytes(4)), "shape is not a list"),
    "product overflows": (safetensors_bytes({"a": {**ONE, "shape": [1 << 32, 1 << 32, 4]}}, bytes(4)), "larger than any file"),
    "overflow, then zero": (safetensors_bytes({"a": {**ONE, "shape": [1 << 62, 4, 0, 4]}}, bytes(4)), "larger than any file"),
    "one offset": (safetensors_bytes({"a": {**ONE, "data_offsets": [4]}}, bytes(4)), "data_offsets are not two"),
    "offsets reversed": (safetensors_bytes({"a": {**ONE, "data_offsets": [4, 0]}}, bytes(4)), "do not lie in"),
    "negative offset": (safetensors_bytes({"a": {**ONE, "data_offsets": [-4, 0]}}, bytes(4)), "data_offsets are not two"),
    "beyond the file": (safetensors_bytes({"a": ONE}, bytes(3)), "do not lie in the file's 3 bytes"),
    "size too small": (safetensors_bytes({"a": {**ONE, "shape": [3]}}, bytes(4)), "takes 3 bytes, data_offsets hold 4"),
    "half a byte": (safetensors_bytes({"a": {**ONE, "dtype": "F4", "shape": [7]}}, bytes(4)), "takes 3.5 bytes"),
    "overlap": (safetensors_bytes({"a": ONE, "b": {**ONE, "data_offsets": [3, 7]}}, bytes(7)), "'b' overlaps 'a'"),
    "same bytes": (safetensors_bytes({"a": ONE, "b": ONE}, bytes(4)), "overlaps"),
    "hole": (safetensors_bytes({"a": ONE, "b": {**ONE, "data_offsets": [5, 9]}}, bytes(9)), "1 bytes before tensor 'b'"),
    "hole at the start": (safetensors_bytes({"a": {**ONE, "data_offsets": [1, 5]}}, bytes(5)), "1 bytes before tensor 'a'"),
    "bytes at the end": (safetensors_bytes({"a": ONE}, bytes(5)), "end at byte"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(case, tmp_path):
    data, message = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        read_header(path)
    assert message in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_right_files(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {"__metadata__": {"format": "pt"}, "b": {"dtype": "F8_E8M0", "shape": [2, 3], "data_offsets": [8, 14]},
              "a": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
              "e": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [8, 8]}}
    path.write_bytes(safetensors_bytes(json.dumps(header) + "   ", bytes(14)))
    tensors = read_header(path)
    start = 8 + len(json.dumps(header)) + 3
    assert [(t.name, t.dtype, t.shape, t.offset - start, t.size) for t in tensors.values()] == [
        ("a", "I64", (), 0, 8), ("e", "BF16", (0, 5), 8, 0), ("b", "F8_E8M0", (2, 3), 8, 6)]
    path.write_bytes(safetensors_bytes("{}"))
    assert read_header(path) == {}


def test_files_of_the_reference_writer(tmp_path):
    numpy_writer = pytest.importorskip("safetensors.numpy")
    arrays = {"w": np.arange(24, dtype=np.uint8).reshape(4, 6), "v": np.arange(5, dtype=np.int64),
              "f": np.ones((2, 2), np.float32)}
    numpy_writer.save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    tensors = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, array in arrays.items():
        tensor = tensors[name]
        assert tensor.shape == array.shape and data[tensor.offset : tensor.offset + tensor.size] == array.tobytes()


def test_every_truncation_is_refused(tmp_path):
    data = safetensors_bytes({"__metadata__": {"format": "pt"}, "a": ONE}, bytes(4))
    path = tmp_path / "x.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


@settings(max_examples=300, deadline=None)
@given(data=st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda text: safetensors_bytes(b"{" + text))),
       flips=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 7)), max_size=3), keep=st.booleans())
def test_any_bytes_give_tensors_inside_the_file_or_the_error(data, flips, keep, tmp_path_factory):
    if keep:                                                 # a right file with a few bits flipped
        data = bytearray(safetensors_bytes({"a": ONE, "b": {**ONE, "data_offsets": [4, 8]}}, bytes(8)))
        for place, bit in flips:
            data[place % len(data)] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert 8 <= tensor.offset and tensor.offset + tensor.size <= len(data)


# ---------------------------------------------------------------- the index

BROKEN_INDEX = {
    "no JSON": ("{", "not strict JSON"),
    "no object": ("[]", "expected an object"),
    "no map": ("{}", "weight_map is missing"),
    "empty map": ('{"weight_map": {}}', "weight_map is missing"),
    "map no object": ('{"weight_map": []}', "weight_map is missing"),
    "key twice": ('{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs twice"),
    "file no string": ('{"weight_map": {"a": 1}}', "not the name of a file"),
    "parent folder": ('{"weight_map": {"a": "../x.safetensors"}}', "not the name of a file"),
    "absolute": ('{"weight_map": {"a": "/x.safetensors"}}', "not the name of a file"),
    "inner folder": ('{"weight_map": {"a": "b/x.safetensors"}}', "not the name of a file"),
    "dots": ('{"weight_map": {"a": ".."}}', "not the name of a file"),
    "empty name": ('{"weight_map": {"a": ""}}', "not the name of a file"),
    "NUL": ('{"weight_map": {"a": "x\\u0000y"}}', "not the name of a file"),
}


@pytest.mark.parametrize("case", BROKEN_INDEX)
def test_broken_index(case, tmp_path):
    text, message = BROKEN_INDEX[case]
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json") as caught:
        read_index(tmp_path)
    assert message in str(caught.value)


def test_index_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("ssdgram.layout.safetensors.MAX_INDEX_BYTES", 20)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    with pytest.raises(CheckpointError, match="more than 20 bytes"):
        read_index(tmp_path)


def test_tensors_over_shards(tmp_path):
    write_index(tmp_path, {"m1.safetensors": {"a": ("U8", [2], b"\1\2"), "b": ("U8", [1], b"\3")},
                           "m2.safetensors": {"c": ("U8", [1, 2], b"\4\5")}})
    files = read_index(tmp_path)
    found = find_tensors(files, ["c", "b"])
    assert list(found) == ["c", "b"] and found["c"].file.name == "m2.safetensors" and found["b"].size == 1
    with pytest.raises(CheckpointError, match="'d' is not in the checkpoint's index"):
        find_tensors(files, ["d"])
    files["d"] = tmp_path / "m1.safetensors"
    with pytest.raises(CheckpointError, match=r"m1\.safetensors: tensor 'd' is not in it"):
        find_tensors(files, ["d"])


def test_one_file_without_index(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        read_index(tmp_path)
    write_index(tmp_path, {"model.safetensors": {"a": ("U8", [2], b"\1\2")}})
    (tmp_path / "model.safetensors.index.json").unlink()
    assert read_index(tmp_path) == {"a": tmp_path / "model.safetensors"}
