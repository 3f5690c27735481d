"""Trace files: kept as they were, refused by type when they are none or damaged, whole or not there."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdgram.errors import FormatError
from ssdgram.tools.trace import NO_PART, Trace, checked


def documents(lengths, seed=0):
    tokens = np.random.default_rng(seed).integers(3, 300, sum(lengths)).astype(np.int32)
    return Trace.of_documents(tokens, np.cumsum([0, *lengths]).astype(np.int64), {"made": "up"})


def recording():
    return Trace(np.array([5, 6, 7, NO_PART, 9, 6, 7, 8], np.int32), np.array([0, 3, 5, 8]), {}, np.array([0, 0, 2], np.uint8),
                 batches=np.array([0, 2, 3]))


def keys():
    return Trace(np.empty(0, np.int32), np.array([0, 2, 3]), {}, np.array([0, 3], np.uint8), batches=np.array([0, 1, 2]),
                 keys=np.arange(6).reshape(3, 2))


def same(one, other):
    for name in ("tokens", "starts", "lookback", "batches", "keys"):
        mine, its = getattr(one, name), getattr(other, name)
        assert (mine is None) == (its is None) and (mine is None or (mine.dtype == its.dtype and (mine == its).all())), name
    assert one.about == other.about and one.sha256 == other.sha256 and one.kind == other.kind


@pytest.mark.parametrize("trace", [documents([4, 0, 3]), documents([]), recording(), keys()])
def test_a_saved_trace_loads_as_it_was(tmp_path, trace):
    trace.save(tmp_path / "t.trace")
    same(Trace.load(tmp_path / "t.trace"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t.trace"]


def test_a_trace_is_a_safetensors_file(tmp_path):
    from safetensors.numpy import load_file

    recording().save(tmp_path / "t.trace")
    arrays = load_file(tmp_path / "t.trace")
    assert sorted(arrays) == ["batches", "lookback", "starts", "tokens"] and arrays["tokens"].tolist() == recording().tokens.tolist()


def test_positions_leave_the_context_out():
    assert documents([4, 3]).positions == 7 and recording().positions == 6 and keys().positions == 3


def test_parts():
    part = documents([4, 0, 3, 2]).part(1, 3)
    assert part.starts.tolist() == [0, 0, 3] and part.tokens.tolist() == documents([4, 0, 3, 2]).tokens[4:7].tolist()
    part = recording().part(1, 2)
    assert part.tokens.tolist() == [6, 7, 8] and part.batches.tolist() == [0, 1] and part.lookback.tolist() == [2]
    assert keys().part(0, 1).keys.tolist() == [[0, 1], [2, 3]]
    for trace in (documents([4, 0, 3, 2]).part(1, 3), recording().part(1, 2), keys().part(0, 1)):
        checked(trace, "part")


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "t.trace"
    documents([4]).save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        documents([9]).save(path)
    assert path.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["t.trace"]


# ---------------------------------------------------------------- what is no trace


def altered(**changes):
    """A recording with wrong arrays, its digest right: as somebody would write it who wants it believed."""
    fields = {name: getattr(recording(), name) for name in ("tokens", "starts", "about", "lookback", "batches", "keys")}
    return Trace(**{**fields, **changes})


@pytest.mark.parametrize(("trace", "says"), [
    (altered(starts=np.array([1, 3, 5, 8])), "starts do not run"),
    (altered(starts=np.array([0, 3, 5, 9])), "starts do not run"),
    (altered(starts=np.array([0, 5, 3, 8])), "starts do not run"),
    (altered(starts=np.array([0, -(1 << 63), 3, 8])), "starts do not run"),
    (altered(starts=np.array([], np.int64), lookback=np.array([], np.uint8)), "starts do not run"),
    (altered(starts=np.array([0, 8])), "lookbacks of 1 sequences"),
    (altered(lookback=np.array([0, 0, 4], np.uint8)), "shorter than its lookback"),
    (altered(lookback=np.array([0, 0, 16], np.uint8)), "16 tokens of lookback"),
    (altered(batches=np.array([0, 2])), "batches do not run"),
    (altered(batches=np.array([0, 4])), "batches do not run"),
    (altered(tokens=np.array([5, 6, 7, -2, 9, 6, 7, 8], np.int32)), "token id -2"),
    (altered(tokens=np.empty(0, np.int32), keys=np.full((8, 3), -1)), "negative key"),
    (altered(tokens=np.empty(0, np.int32), keys=np.zeros((8, 0), np.int64)), "keys of 0 orders"),
    (altered(tokens=np.empty(0, np.int32), keys=np.zeros((8, 16), np.int64)), "keys of 16 orders"),
])
def test_arrays_that_do_not_fit_are_refused(tmp_path, trace, says):
    trace.save(tmp_path / "bad.trace")
    with pytest.raises(FormatError, match=rf"bad\.trace: .*{says}"):
        Trace.load(tmp_path / "bad.trace")


def rewritten(path, change):
    """The file with its header changed by `change(header)`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])


@pytest.mark.parametrize(("change", "says"), [
    (lambda h: h["__metadata__"].update(format="other"), "its format is 'other'"),
    (lambda h: h.pop("__metadata__"), "its format is None"),
    (lambda h: h["__metadata__"].update(version="2"), "version '2'"),
    (lambda h: h["__metadata__"].update(sha256="0"), "its header says '0'"),
    (lambda h: h["__metadata__"].update(about="[]"), "`about` is no JSON object"),
    (lambda h: h["__metadata__"].update(about="{"), "`about` is no JSON object"),
    (lambda h: h["tokens"].update(dtype="F32"), "tokens is F32"),
    (lambda h: h["tokens"].update(shape=[2, 4]), "tokens is I32"),
    (lambda h: h["tokens"].update(shape=[1 << 62]), "is no trace"),
    (lambda h: h.update(extra=h.pop("tokens")), "extra is I32"),
    (lambda h: h.update(keys=h.pop("batches")), "keys is I64"),
])
def test_headers_that_lie_are_refused(tmp_path, change, says):
    path = tmp_path / "bad.trace"
    recording().save(path)
    rewritten(path, change)
    with pytest.raises(FormatError, match=rf"bad\.trace.*{says}"):
        Trace.load(path)


def test_a_trace_without_what_it_needs_is_refused(tmp_path):
    from safetensors.numpy import save_file

    meta = {"format": "ssdgram-trace", "version": "1", "sha256": "", "about": "{}"}
    save_file({"starts": np.array([0])}, tmp_path / "bad.trace", metadata=meta)
    with pytest.raises(FormatError, match="either tokens or keys"):
        Trace.load(tmp_path / "bad.trace")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\xff" * 64, b"\x08" + bytes(7) + b"{\"a\": 1}"])
def test_what_is_no_trace_at_all_is_refused(tmp_path, data):
    (tmp_path / "bad.trace").write_bytes(data)
    with pytest.raises(FormatError, match=r"bad\.trace is no trace"):
        Trace.load(tmp_path / "bad.trace")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"absent\.trace"):
        Trace.load(tmp_path / "absent.trace")


@settings(deadline=None)
@given(st.data())
def test_no_change_of_one_byte_goes_unseen_or_crashes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "t.trace"
    trace = recording()
    trace.save(path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = Trace.load(path)
    except FormatError:
        return
    assert loaded.sha256 == trace.sha256                     # a change of `about` or of white space at most


def test_of_documents_checks_what_it_is_given():
    with pytest.raises(FormatError, match="the trace: tokens are int64"):
        Trace.of_documents(np.arange(4), np.array([0, 4]), {})
    with pytest.raises(FormatError, match="starts do not run"):
        Trace.of_documents(np.arange(4, dtype=np.int32), np.array([0, 5]), {})
