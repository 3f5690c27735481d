"""The generation: 64 bits that name a conversion's source (design section 4).

First 8 bytes (big-endian) of SHA-256 over canonical JSON of {geometry, global scales, [name, dtype, shape] of every source
tensor}, then the bytes of 4096 rows: sample i is row splitmix64(i) % table_rows of layer index i % L, codes then scales. The
same source gives the same generation anywhere; it reads 4096 rows whatever the tables' size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ssdgram.layout.checkpoint import Checkpoint
from ssdgram.layout.source import RowSource

SAMPLES = 4096
_BATCH = 64                                                  # rows that a thread reads before it hands them over
_MASK = (1 << 64) - 1


def splitmix64(index: int) -> int:
    """Output `index` (0, 1, ..) of the splitmix64 generator with seed 0."""
    value = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def generation_of(checkpoint: Checkpoint, sources: Sequence[tuple[RowSource, RowSource]]) -> int:
    """The u64 generation of a checkpoint. `sources`: codes and scales of each layer. CheckpointError if a row cannot be read."""
    head = {
        "geometry": checkpoint.geometry.to_json(),
        "global_scales": checkpoint.global_scales,
        "tensors": [[tensor.name, tensor.dtype, list(tensor.shape)] for table in checkpoint.tables for tensor in table.tensors],
    }
    digest = hashlib.sha256(json.dumps(head, sort_keys=True, separators=(",", ":")).encode())

    def rows(first: int) -> bytes:
        data = bytearray()
        for sample in range(first, min(first + _BATCH, SAMPLES)):
            codes, scales = sources[sample % len(sources)]
            number = splitmix64(sample) % codes.rows
            data += codes.row(number) + scales.row(number)
        return bytes(data)

    with ThreadPoolExecutor(16) as pool:                     # a cold drive answers one at a time in 100 us, 16 at once
        for data in pool.map(rows, range(0, SAMPLES, _BATCH)):
            digest.update(data)
    return int.from_bytes(digest.digest()[:8], "big")
