"""Text to traces: each document whole and in order, the limit, the digest."""

import json

from vectors import GOLDEN

from ssdgram.tools.text import Document
from ssdgram.tools.trace_build import build

TOKENIZER = GOLDEN / "tiny_v41" / "tokenizer.json"
DOCUMENTS = [Document(f"test/{number}", f"document {number}: the rows of one n-gram are read together. " * (number + 1))
             for number in range(7)]


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


def test_nothing_in_a_trace_names_a_path():
    trace = build(TOKENIZER, DOCUMENTS, 100)
    assert str(GOLDEN) not in json.dumps(trace.about) and "/" not in json.dumps(trace.about)
