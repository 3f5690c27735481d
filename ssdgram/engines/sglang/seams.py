"""The table of what the SGLang plug-in relies on, for SGLang 0.5.23. Standard library only; checked by ssdgram.engines.seams."""

from __future__ import annotations

from ssdgram.engines.seams import Engine, Seam

_ENGRAM = "srt/layers/engram.py"

SGLANG = Engine("sglang", "sglang", "0.5.23", (
    Seam(_ENGRAM, "EngramEmbedding", "(self, num_embeddings, dim, layer_id, column_bounds)"),
))
