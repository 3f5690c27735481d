"""Text to a trace: documents through a tokenizer, one sequence each.

It knows nothing of geometry and streams. Invariant: the same documents, tokenizer and limit give the same trace, and the digest of
the text in `about` is that of exactly the documents that are in it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ssdgram.errors import TokenMapError
from ssdgram.tools.text import Document
from ssdgram.tools.trace import Trace

BATCH = 256                                                  # documents tokenised at once


def build(tokenizer_path: Path, documents: Iterable[Document], limit: int) -> Trace:
    """Tokenise documents (no special tokens added) until there are `limit` tokens or no more documents.

    The digest of the text is a SHA-256 over name and text of each document that was used, in order.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:                               # tokenizers raises plain Exceptions
        raise TokenMapError(f"{tokenizer_path} is no tokenizer: {error}; give the model's tokenizer.json") from error
    digest, used, total = hashlib.sha256(), Counter[str](), 0
    pieces: list[np.ndarray] = []
    waiting: list[Document] = []

    def flush() -> int:
        added = 0
        for document, encoding in zip(waiting, tokenizer.encode_batch_fast([d.text for d in waiting], add_special_tokens=False)):
            if total + added >= limit:
                break
            ids = np.array(encoding.ids, np.int32)[: limit - total - added]
            if len(ids):
                pieces.append(ids)
                added += len(ids)
                used[document.name.split("/")[0]] += 1
                digest.update(document.name.encode() + b"\0" + document.text.encode() + b"\0")
        waiting.clear()
        return added

    for document in documents:
        waiting.append(document)
        if len(waiting) == BATCH:
            total += flush()
            if total >= limit:
                break
    total += flush()
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=starts[1:])
    about = {
        "text_sha256": digest.hexdigest(),
        "tokenizer_sha256": hashlib.sha256(Path(tokenizer_path).read_bytes()).hexdigest(),
        "documents": dict(sorted(used.items())),
        "tokens": int(total),
    }
    return Trace.of_documents(np.concatenate(pieces) if pieces else np.empty(0, np.int32), starts, about)
