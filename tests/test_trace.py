"""Token traces: built, kept, refused when damaged; the order of decode streams and the bundles, against plain Python."""

import io
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors import GOLDEN, read_json

from ssdgram.errors import FormatError, TokenError
from ssdgram.geometry import Geometry
from ssdgram.token_map import token_map
from ssdgram.tools.text import Document
from ssdgram.tools.trace import TokenTrace, build, bundles, interleave

TOKENIZER = GOLDEN / "tiny_v41" / "tokenizer.json"
DOCUMENTS = [Document(f"test/{number}", f"document {number}: the rows of one n-gram are read together. " * (number + 1))
             for number in range(7)]


def trace_of(lengths, seed=0):
    tokens = np.random.default_rng(seed).integers(3, 300, sum(lengths)).astype(np.int32)
    return TokenTrace(tokens, np.cumsum([0, *lengths]).astype(np.int64), {})


def test_a_trace_has_each_document_whole_and_in_order():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    trace = build(TOKENIZER, DOCUMENTS, 1 << 20)
    assert len(trace.starts) == len(DOCUMENTS) + 1 and trace.starts[-1] == len(trace.tokens)
    for number, document in enumerate(DOCUMENTS):
        own = trace.tokens[trace.starts[number]:trace.starts[number + 1]]
        assert own.tolist() == tokenizer.encode(document.text, add_special_tokens=False).ids
    assert trace.about["documents"] == {"test": 7} and trace.about["tokens"] == len(trace.tokens)


def test_the_limit_cuts_the_last_document():
    whole = build(TOKENIZER, DOCUMENTS, 1 << 20)
    cut = build(TOKENIZER, iter(DOCUMENTS), 200)
    assert len(cut.tokens) == 200 and (cut.tokens == whole.tokens[:200]).all() and cut.starts[-1] == 200
    assert cut.about["documents"]["test"] == len(cut.starts) - 1 < 7


def test_the_digest_tells_texts_and_names_apart():
    def digest(documents):
        return build(TOKENIZER, documents, 1 << 20).about["text_sha256"]

    same = digest(DOCUMENTS)
    assert same == digest(list(DOCUMENTS))
    assert same != digest(DOCUMENTS[:-1]) and same != digest(DOCUMENTS[::-1])
    assert same != digest([*DOCUMENTS[:-1], Document("test/other", DOCUMENTS[-1].text)])


def test_no_documents_make_an_empty_trace():
    trace = build(TOKENIZER, [Document("test/empty", "")], 100)
    assert len(trace.tokens) == 0 and trace.starts.tolist() == [0]
    assert [len(array) for array in interleave(trace)] == [0, 0]


def test_a_saved_trace_loads_as_it_was(tmp_path):
    trace = build(TOKENIZER, DOCUMENTS, 1 << 20)
    trace.save(tmp_path / "t.npz")
    loaded = TokenTrace.load(tmp_path / "t.npz")
    assert (loaded.tokens == trace.tokens).all() and (loaded.starts == trace.starts).all() and loaded.about == trace.about
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def packed(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


ABOUT = np.frombuffer(b"{}", np.uint8)
GOOD = {"tokens": np.arange(4, dtype=np.int32), "starts": np.array([0, 4]), "about": ABOUT}


@pytest.mark.parametrize("data", [
    b"", b"PK\x03\x04", b"no zip at all",
    packed(**GOOD)[:-40],
    packed(tokens=GOOD["tokens"], starts=GOOD["starts"]),
    packed(**{**GOOD, "about": np.frombuffer(b"{", np.uint8)}),
    packed(**{**GOOD, "about": np.frombuffer(b"[]", np.uint8)}),
    packed(**{**GOOD, "about": np.frombuffer(b"\xff\xfe", np.uint8)}),
    packed(**{**GOOD, "tokens": np.arange(4)}),
    packed(**{**GOOD, "tokens": np.array([None], object)}),
    packed(**{**GOOD, "starts": np.array([[0, 4]])}),
    packed(**{**GOOD, "starts": np.array([], np.int64)}),
    packed(**{**GOOD, "starts": np.array([1, 4])}),
    packed(**{**GOOD, "starts": np.array([0, 5])}),
    packed(**{**GOOD, "starts": np.array([0, 3, 2, 4])}),
])
def test_what_is_no_trace_is_refused(tmp_path, data):
    (tmp_path / "bad.npz").write_bytes(data)
    with pytest.raises(FormatError, match=r"bad\.npz"):
        TokenTrace.load(tmp_path / "bad.npz")


def test_the_smallest_good_file_is_not_refused(tmp_path):
    (tmp_path / "good.npz").write_bytes(packed(**GOOD))
    assert TokenTrace.load(tmp_path / "good.npz").tokens.tolist() == [0, 1, 2, 3]


def plain_interleave(starts, streams):
    waiting = [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    running, order, steps, step = [[] for _ in range(streams)], [], [], 0
    while any(waiting) or any(running):
        for stream in range(streams):
            while not running[stream] and waiting:
                running[stream] = waiting.pop(0)
            if running[stream]:
                order.append(running[stream].pop(0))
                steps.append(step)
        step += 1
    return order, steps


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5))
def test_streams_take_turns_and_the_next_document_when_one_ends(lengths, streams):
    trace = trace_of(lengths)
    order, steps = interleave(trace, streams)
    assert (order.tolist(), steps.tolist()) == plain_interleave(trace.starts.tolist(), streams)


def test_bundles_are_the_keys_of_each_document_in_the_order_of_decoding():
    geometry, table = Geometry.from_config(read_json("tiny_v41/config.json")), token_map(TOKENIZER)
    trace = build(TOKENIZER, DOCUMENTS, 500)
    pieces = [trace.tokens[start:stop] for start, stop in itertools.pairwise(trace.starts)]
    keys = np.concatenate([geometry.keys(piece, table) for piece in pieces])
    for layers in (1, len(geometry.layers)):
        x, groups = bundles(trace, geometry, table, streams=3, layers=layers)
        order, _ = interleave(trace, 3)
        assert (x.reshape(len(order), layers, geometry.orders) == keys[order, :layers]).all()
        assert groups.tolist() == list(range(layers * geometry.orders)) * len(order) and groups.dtype == np.uint8


def test_a_trace_of_another_tokenizer_is_refused():
    geometry, table = Geometry.from_config(read_json("tiny_v41/config.json")), token_map(TOKENIZER)
    trace = TokenTrace(np.array([1, len(table)], np.int32), np.array([0, 2]), {})
    with pytest.raises(TokenError, match=f"token 1 .* is {len(table)}"):
        bundles(trace, geometry, table)


def test_nothing_in_a_saved_trace_names_a_path(tmp_path):
    trace = build(TOKENIZER, DOCUMENTS, 100)
    assert str(GOLDEN) not in json.dumps(trace.about) and "/" not in json.dumps(trace.about)
