"""Delivery on the GPU: rows that the CPU never saw are checked, and copied to their bundles only if they are right.

    jobs int64 [n, 8], pinned:  0 address of the row's codes        1 of its scales         2 of its expected CRC (u32, 4-aligned)
                                3 layer | column << 32              4 row number of the column
                                5 address that the codes go to      6 that the scales go to 7 unused

The twin of `ssdgram._deliver`, for pages that a drive wrote to GPU memory (queue "gds") and for hot sets that go there. It knows
neither pages nor slots: whoever makes the jobs does. Sources may lie in HBM or in registered host memory. Invariant (design 3,
rule 2): no byte of a row whose check (CRC-32C over generation, layer, column, row number and the row) fails is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdgram.kernels.check import PREFIX, bit_constants, crc_of, prefix_bytes, signed
from ssdgram.kernels.launch import Launch, next_power_of_two

JOB_WORDS = 8                                                # one cache line a job
(CODES_FROM, SCALES_FROM, CHECK_AT, PLACE, ROW, CODES_TO, SCALES_TO) = range(7)
ROWS = 8                                                     # per program


@triton.jit(do_not_specialize=["generation", "zeros", "count"], do_not_specialize_on_alignment=["jobs", "results"])
def deliver_kernel(jobs, constants, results, generation: tl.int64, zeros: tl.int32, count: tl.int32,  # type: ignore[no-untyped-def]
                   CODE_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, BYTES_P2: tl.constexpr, ROWS: tl.constexpr):
    """ROWS jobs per program; see the module's text."""
    LENGTH: tl.constexpr = 24 + CODE_BYTES + SCALE_BYTES
    job = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = job < count
    words = jobs + job.to(tl.int64) * 8
    codes_from = tl.load(words, mask=used, other=0)
    scales_from = tl.load(words + 1, mask=used, other=0)
    check_at = tl.load(words + 2, mask=used, other=0)
    place = tl.load(words + 3, mask=used, other=0)
    row = tl.load(words + 4, mask=used, other=0)
    codes_to = tl.load(words + 5, mask=used, other=0)
    scales_to = tl.load(words + 6, mask=used, other=0)
    byte = tl.arange(0, BYTES_P2)
    code = (byte - 24).to(tl.int64)
    scale = code - CODE_BYTES
    body = (byte >= 24) & (byte < LENGTH)
    source = tl.where((scale >= 0)[None, :], scales_from[:, None] + scale[None, :], codes_from[:, None] + code[None, :])
    loaded = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=used[:, None] & body[None, :], other=0)
    value = tl.where((byte < 24)[None, :], prefix_bytes(generation, place, row, byte), loaded.to(tl.int32))
    crc = crc_of(value, byte, constants, LENGTH) ^ zeros
    expected = tl.load(check_at.to(tl.pointer_type(tl.int32)), mask=used, other=0)
    good = used & (crc == expected)
    target = tl.where((scale >= 0)[None, :], scales_to[:, None] + scale[None, :], codes_to[:, None] + code[None, :])
    tl.store(target.to(tl.pointer_type(tl.uint8)), loaded, mask=good[:, None] & body[None, :])
    tl.store(results + job, tl.where(good, 0, 1), mask=used)


class Deliver:
    """Launches deliveries of rows of one layout of one store."""

    def __init__(self, code_bytes: int, scale_bytes: int, *, generation: int, device: torch.device | str = "cuda") -> None:
        constants, zeros = bit_constants(PREFIX + code_bytes + scale_bytes)
        self.constants = torch.from_numpy(constants.view("int32").copy()).to(device)
        self.generation, self.zeros = signed(generation, 64), signed(zeros, 32)
        self.launch = Launch(deliver_kernel, [torch.int64, torch.int32, torch.int32, 1, 1, 1], {
            "CODE_BYTES": code_bytes, "SCALE_BYTES": scale_bytes,
            "BYTES_P2": next_power_of_two(PREFIX + code_bytes + scale_bytes), "ROWS": ROWS}, warps=4)

    def __call__(self, jobs: torch.Tensor, results: torch.Tensor, count: int) -> None:
        """The first `count` jobs (int64 [n, 8]) on the current stream; results int32 [n] (pinned or device): 0 delivered, 1 wrong.

        A kernel later in the stream, or one launched after a word behind this one was seen, finds the rows in their bundles.
        """
        if jobs.dtype != torch.int64 or jobs.shape[1:] != (JOB_WORDS,) or not jobs.is_contiguous() or len(jobs) < count:
            raise ValueError(f"jobs must be contiguous int64 [{count} or more, {JOB_WORDS}]; found {jobs.dtype} {tuple(jobs.shape)}")
        if results.dtype != torch.int32 or results.dim() != 1 or not results.is_contiguous() or len(results) < count:
            raise ValueError(f"results must be contiguous int32 [{count} or more]; found {results.dtype} {tuple(results.shape)}")
        if count > 0:
            self.launch(-(-count // ROWS), jobs, self.constants, results, self.generation, self.zeros, count)
