"""promote: bundles arrive byte for byte, nothing beside them is touched, and the word says when."""

import pytest
import torch
from where import DEVICE, pinned, slab, synchronize

from ssdgram.kernels.promote import Promote


@pytest.mark.parametrize("bundle_bytes,stride", ((2112, 2112), (792, 832), (100, 128)))
@pytest.mark.parametrize("count", (1, 7))
def test_whole_bundles_and_nothing_else(bundle_bytes, stride, count):
    dram, hbm = slab(9, stride), slab(9, stride, DEVICE)
    before, from_, to = hbm.clone(), torch.randperm(9)[:count], torch.randperm(9)[:count]
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    done = pinned(torch.zeros(1, dtype=torch.int64))
    promote = Promote(bundle_bytes)
    promote(pinned(dram.data_ptr() + from_ * stride), pinned(hbm.data_ptr() + to * stride), counter=counter, done=done, ticket=9)
    synchronize()
    assert done.item() == 9
    assert counter.item() == 0
    before[to.to(DEVICE), :bundle_bytes] = dram[from_][:, :bundle_bytes].to(DEVICE)
    assert torch.equal(hbm, before)


def test_what_does_not_fit_is_refused():
    promote = Promote(2112)
    none = torch.zeros(0, dtype=torch.int64)
    promote(none, none)
    with pytest.raises(ValueError, match="int64"):
        promote(none, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="counter"):
        promote(none, none, done=none)
