"""launch: one variant per set of constants whatever the arguments' values; preloading; direct launches equal Triton's own."""

import pytest
import torch
from where import DEVICE, INTERPRETED, pinned, slab

from ssdgram.kernels.gather import Bundles, Gather, gather_kernel, mark_launch
from ssdgram.kernels.launch import Launch, address, aligned, next_power_of_two, preload


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 8, 9, 160, 256)] == [1, 2, 4, 8, 16, 256, 256]


def test_aligned():
    base = torch.zeros(64, dtype=torch.uint8)
    start = -base.data_ptr() % 16
    assert aligned(base[start:])
    assert not aligned(base[start + 1:])
    assert aligned(base[:0])


def test_memory_that_the_gpu_cannot_read_is_refused():
    with pytest.raises(ValueError, match="cannot read"):
        address(torch.zeros(3))
    assert address(torch.zeros(0)) == 0
    if not INTERPRETED:
        with pytest.raises(ValueError, match="cannot read"):
            mark_launch(1)(1, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 3)
        for tensor in (torch.zeros(3, device=DEVICE), pinned(torch.zeros(3))[1:]):
            assert address(tensor) == tensor.data_ptr()


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
def test_constants_must_be_those_of_the_kernel():
    with pytest.raises(ValueError, match="constants"):
        Launch(gather_kernel, [torch.int32], {"BLOCK": 8})


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
def test_preloaded_kernels_run_behind_a_stream_that_waits():
    """What hung the first time (design 1.6): here all is loaded before the wait, and 1, 16, 17 tokens need no other variant."""
    from cuda.bindings import driver

    bundles = Bundles((8, 8, 8))
    gather = Gather(bundles)
    dram = slab(20, bundles.stride)
    sizes = (1, 16, 17, 100)
    variants = gather.launches("packed", tickets=(1,))
    assert preload(None, [*variants, mark_launch(1)]) == len(variants) + 1
    word = pinned(torch.zeros(1, dtype=torch.int32))
    outs = {tokens: torch.empty(tokens, 24, 264, dtype=torch.uint8, device=DEVICE) for tokens in sizes}
    slots = {tokens: torch.randint(0, 20, (tokens, 3), dtype=torch.int32).to(DEVICE) for tokens in sizes}
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    done = pinned(torch.zeros(1, dtype=torch.int64))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (error,) = driver.cuStreamWaitValue32(stream.cuda_stream, word.data_ptr(), 1, 0)
        assert error == driver.CUresult.CUDA_SUCCESS
        for tokens in sizes:
            gather(slots[tokens], outs[tokens], mode="packed", dram=dram.data_ptr(), counter=counter, done=done, ticket=tokens)
    assert done.item() == 0
    word[0] = 1
    stream.synchronize()
    assert done.item() == 100
    for tokens in sizes:
        assert torch.equal(outs[tokens].cpu()[:, :8, :256].flatten(1), dram[slots[tokens][:, 0].cpu().long()][:, :2048])
