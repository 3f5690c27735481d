"""deliver: right rows reach their bundles byte for byte, of wrong ones nothing does, and the results say which is which."""

import struct

import numpy as np
import pytest
import torch
from check_check import GENERATION, crc32c
from where import DEVICE, pinned, slab, synchronize

from ssdgram.kernels import reference
from ssdgram.kernels.check import signed
from ssdgram.kernels.deliver import JOB_WORDS, ROWS, Deliver


def case(count, code_bytes, scale_bytes, seed=0):
    """Rows in pages (codes, scales, then the CRCs), jobs that scatter them over bundles, and what the bundles must become."""
    generator = np.random.default_rng(seed)
    row_bytes = code_bytes + scale_bytes
    page = -(-count * row_bytes // 4) * 4 + 4 * count
    pages = slab(1, page, DEVICE)
    bundles = slab(count, -(-row_bytes // 64) * 64, DEVICE)
    raw = pages.cpu().numpy()[0]
    order = generator.permutation(count)
    jobs = np.zeros((count, JOB_WORDS), np.int64)
    for k in range(count):
        layer, column, row = (int(generator.integers(0, limit)) for limit in (1 << 31, 24, 1 << 40))
        at = k * row_bytes
        check = crc32c(struct.pack("<QIIQ", GENERATION, layer, column, row) + raw[at:at + row_bytes].tobytes())
        raw[page - 4 * count + 4 * k:][:4] = np.frombuffer(struct.pack("<I", check), np.uint8)
        base, target = pages.data_ptr(), bundles[order[k]].data_ptr()
        jobs[k, :7] = (base + at, base + at + code_bytes, base + page - 4 * count + 4 * k, layer | column << 32, row,
                       target, target + code_bytes)
    pages.copy_(torch.from_numpy(raw)[None])
    wanted = bundles.cpu().numpy().copy()
    for k in range(count):
        wanted[order[k], :row_bytes] = raw[k * row_bytes:(k + 1) * row_bytes]
    return pages, bundles, jobs, order, wanted


def run(jobs, code_bytes, scale_bytes, generation=GENERATION):
    results = pinned(torch.full((len(jobs),), -1, dtype=torch.int32))
    Deliver(code_bytes, scale_bytes, generation=generation, device=DEVICE)(pinned(torch.from_numpy(jobs)), results, len(jobs))
    synchronize()
    return results.tolist()


@pytest.mark.parametrize("code_bytes,scale_bytes", ((256, 8), (64, 2), (80, 10), (320, 0)))
@pytest.mark.parametrize("count", (1, 2 * ROWS + 3))
def test_right_rows_are_delivered(count, code_bytes, scale_bytes):
    pages, bundles, jobs, _, wanted = case(count, code_bytes, scale_bytes)
    assert run(jobs, code_bytes, scale_bytes) == [0] * count, pages.shape
    assert np.array_equal(bundles.cpu().numpy(), wanted)


def test_no_byte_of_a_wrong_row_is_stored():
    pages, bundles, jobs, order, wanted = case(20, 256, 8)
    before = bundles.cpu().numpy().copy()
    pages[0, 3 * 264 + 255] ^= 1                             # last code of row 3
    pages[0, 7 * 264 + 256] ^= 0x80                          # first scale of row 7
    jobs[11, 4] ^= 1 << 39                                   # another row's place
    jobs[12, 3] ^= 1 << 32                                   # another column
    jobs[13, 3] ^= 1                                         # another layer
    wrong = [3, 7, 11, 12, 13]
    assert np.flatnonzero(run(jobs, 256, 8)).tolist() == wrong
    wanted[order[wrong]] = before[order[wrong]]
    assert np.array_equal(bundles.cpu().numpy(), wanted)
    assert run(jobs, 256, 8, generation=GENERATION ^ 1) == [1] * 20
    assert np.array_equal(bundles.cpu().numpy(), wanted)


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference reads host memory")
def test_the_reference_does_the_same():
    pages, bundles, jobs, _, _ = case(20, 256, 8)
    pages[0, 5 * 264] ^= 4
    mine = run(jobs, 256, 8)
    once = bundles.numpy().copy()
    bundles.zero_()
    results = np.full(20, -1, np.int32)
    reference.deliver(jobs, 20, signed(GENERATION, 64), 256, 8, results)
    assert results.tolist() == mine
    again = bundles.numpy().copy()
    done = np.flatnonzero(again.any(1))
    assert np.array_equal(again[done, :264], once[done, :264]) and len(done) == 19


def test_what_does_not_fit():
    deliver = Deliver(256, 8, generation=1, device=DEVICE)
    with pytest.raises(ValueError, match="jobs must be"):
        deliver(torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="results must be"):
        deliver(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 2)
