"""promote: slots arrive byte for byte, nothing beside them is touched, and the word says when."""

import pytest
import torch
from where import DEVICE, pinned, slab, synchronize

from ssdgram.kernels.promote import Promote


@pytest.mark.parametrize("stride", (2112, 832, 64))
@pytest.mark.parametrize("count", (1, 7))
def test_whole_slots_and_nothing_else(stride, count):
    dram, hbm = slab(9, stride), slab(9, stride, DEVICE)
    before, source, target = hbm.clone(), torch.randperm(9)[:7], torch.randperm(9)[:7]
    pairs = pinned(torch.stack((source, target), 1).flatten().to(torch.int32))
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    done = pinned(torch.zeros(1, dtype=torch.int64))
    promote = Promote(stride)
    for number in (9, 10):                                   # the counter is left zero: the next list needs no reset
        promote(pairs, count, counter, done, dram.data_ptr(), hbm.data_ptr(), number)
        synchronize()
        assert done.item() == number
        assert counter.item() == 0
    before[target[:count].to(DEVICE)] = dram[source[:count]].to(DEVICE)
    assert torch.equal(hbm, before)
