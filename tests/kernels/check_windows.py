"""The kernel that packs a step's windows: equal to its twin on the host, for any chunks, windows by slot, images, and types."""

import dataclasses

import numpy as np
import pytest
import torch
from where import DEVICE, pinned

from ssdgram.engines.windows import Windows, pack_on_host
from ssdgram.engines.windows_gpu import pack
from ssdgram.sequence import Mark


def compare(windows):
    """Tokens and flags of the kernel and of NumPy."""
    total = windows.count + windows.requests * windows.before.shape[1]
    wanted = np.full(total, 99, np.int32), np.full(total, 99, np.uint8)
    pack_on_host(windows, *wanted)
    moved = {name: value.to(DEVICE) for name, value in dataclasses.asdict(windows).items() if isinstance(value, torch.Tensor)}
    tokens, flags = pinned(torch.full((total,), 7, dtype=torch.int32)), pinned(torch.full((total,), 7, dtype=torch.uint8))
    counter, done = torch.zeros(1, dtype=torch.int32, device=DEVICE), pinned(torch.zeros(2, dtype=torch.int64))
    for mark in (None, Mark(counter, done[:1], (1 << 40) + 5)):
        tokens.fill_(7)
        flags.fill_(7)
        pack(dataclasses.replace(windows, **moved), tokens, flags, mark)
        if DEVICE != "cpu" and mark is not None:
            while int(done[0]) == 0:                         # the ticket says that the rest is there: nothing else is waited for
                pass
        elif DEVICE != "cpu":
            torch.cuda.synchronize()
        np.testing.assert_array_equal(flags.numpy(), wanted[1])
        np.testing.assert_array_equal(tokens.numpy(), wanted[0])
    assert done.tolist() == [(1 << 40) + 5, 0] and counter.item() == 0


@pytest.mark.parametrize("seed", range(6))
def test_ragged_chunks_with_windows_newest_first(seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, (3, 2, 40, 200, 9, 2)[seed], (5, 64, 7, 3, 1, 300)[seed])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    count = int(starts[-1])
    tokens, positions = generator.integers(0, 50, count + 5), np.zeros(count + 5, np.int64)
    for start, length in zip(starts, lengths):
        positions[start:start + length] = generator.integers(0, 6) + np.arange(length)
    compare(Windows(tokens=torch.tensor(tokens, dtype=torch.int32), positions=torch.tensor(positions),
                    starts=torch.tensor(starts, dtype=torch.int32), before=torch.tensor(generator.integers(-1, 50, (len(lengths), 3)),
                    dtype=torch.int32), count=count, requests=len(lengths), image=7))


@pytest.mark.parametrize("block", (1, 4))
def test_equal_blocks_with_windows_by_slot_oldest_first(block):
    generator = np.random.default_rng(block)
    requests = 70
    compare(Windows(tokens=torch.tensor(generator.choice([3, 7, 5, 1_000_000_007, 9], requests * block)), block=block,
                    positions=torch.tensor(np.repeat(generator.integers(0, 6, requests), block) + np.tile(np.arange(block), requests)),
                    before=torch.tensor(generator.integers(0, 12, (100, 3)), dtype=torch.int32), rows=torch.tensor(
                        generator.permutation(100)[:requests]), count=requests * block, requests=requests, newest_first=False, image=7,
                    images_from=1_000_000))


def test_a_step_without_tokens_launches_nothing():
    windows = Windows(tokens=torch.zeros(1, dtype=torch.int32), positions=torch.zeros(1), before=torch.zeros(1, 3), count=0, requests=0)
    assert windows.fill(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.uint8), Mark(None, None, 1)) is False
