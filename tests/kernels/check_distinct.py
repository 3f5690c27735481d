"""distinct: what gather writes, with each bundle read once; its table across launches, collisions and the wrap of its number."""

import numpy as np
import pytest
import torch
from check_gather import SHAPES, encoded, expected_packed, same_rows
from where import BF16, DEVICE, INTERPRETED, pinned, slab, synchronize

from ssdgram.kernels.distinct import HEADER, LAST, Distinct
from ssdgram.kernels.gather import Bundles, Gather


def slots_of(tokens, orders, count, seed=0):
    """Slots of which many are asked for again, each for one order; of both tiers, and absent ones."""
    generator = np.random.default_rng(seed)
    slots = generator.geometric(0.2, (tokens, orders)).clip(1, count // orders) - 1
    slots = slots * orders + np.arange(orders)
    kind = generator.random((tokens, orders))
    slots = np.where(kind < 0.2, -2 - slots, slots)
    return pinned(torch.from_numpy(np.where(kind > 0.9, -1, slots).astype(np.int32)))


def words():
    return {"counter": torch.zeros(1, dtype=torch.int32, device=DEVICE), "done": pinned(torch.zeros(1, dtype=torch.int64))}


@pytest.mark.parametrize("heads", SHAPES)
def test_rows_and_bytes_are_those_of_the_layout(heads):
    tokens, count = 12, 24
    bundles, said = Bundles(heads), words()
    dram, hbm = slab(count, bundles.stride), slab(count, bundles.stride, DEVICE)
    distinct = Distinct(bundles, 16, DEVICE)
    for k in range(3):
        slots = slots_of(tokens, len(heads), count, seed=k)
        packed = expected_packed(slots, heads, dram, hbm)
        at = {"dram": dram.data_ptr(), "hbm": hbm.data_ptr(), **said}
        rows = torch.full((tokens, bundles.columns, 256), 7.0, dtype=BF16, device=DEVICE)
        distinct(slots, rows, ticket=2 * k + 1, **at)
        bytes_ = torch.full((tokens, bundles.columns, 264), 7, dtype=torch.uint8, device=DEVICE)
        distinct(slots, bytes_, mode="packed", ticket=pinned(torch.tensor([2 * k + 2])), **at)
        synchronize()
        assert same_rows(rows, packed)
        assert (bytes_.cpu().numpy() == packed).all()
        assert said["done"].item() == 2 * k + 2 and said["counter"].item() == 0 and distinct.memory[0].item() == 2 * k + 3


@pytest.mark.parametrize("encoding,dim,code_bytes,scale_bytes", (
    ("bf16", 160, 320, 0), ("fp8_global", 160, 160, 0), ("nvfp4", 160, 80, 10), ("fp8_ue8m0", 96, 96, 3)))
def test_other_encodings(encoding, dim, code_bytes, scale_bytes):
    """The same as by `Gather`."""
    bundles, dram = encoded((4, 3), 6, encoding, dim, code_bytes, scale_bytes)
    slots = pinned(torch.tensor([[0, 5], [3, 2], [0, -1], [3, 5]], dtype=torch.int32))
    for mode in ("packed",) if encoding == "nvfp4" else ("packed", "rows"):
        shape, dtype = ((4, 7, code_bytes + scale_bytes), torch.uint8) if mode == "packed" or encoding == "bf16" else ((4, 7, dim), BF16)
        outs = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2)]
        Gather(bundles)(slots, outs[0], mode=mode, dram=dram.data_ptr())
        Distinct(bundles, 4, DEVICE)(slots, outs[1], mode=mode, dram=dram.data_ptr(), ticket=1, **words())
        assert torch.equal(outs[0].view(torch.uint8), outs[1].view(torch.uint8)) and outs[0].any()


def test_a_bundle_is_taken_from_who_claimed_it():
    """A cell that carries this launch's number is believed; one of another launch, or of another slot, is not."""
    bundles = Bundles((8,))
    dram, distinct = slab(4, bundles.stride), Distinct(bundles, 8, DEVICE)
    out = torch.zeros(4, 8, 264, dtype=torch.uint8, device=DEVICE)
    for number, of, slot in ((1, 1, 2), (9, 8, 2), (9, 9, 1)):
        key, taken = (of << 32) | slot, (of, slot) == (number, 2)
        distinct.memory[0] = number
        distinct.memory[HEADER::2], distinct.memory[HEADER + 1::2] = key, (of << 32) | 24            # the rows of position 3
        out[:3], out[3] = 0, 5
        distinct(pinned(torch.full((2, 1), 2, dtype=torch.int32)), out[:2], mode="packed", dram=dram.data_ptr(), ticket=1, **words())
        wanted = np.full((2, 8, 264), 5) if taken else expected_packed(torch.full((2, 1), 2), (8,), dram, None)
        assert (out[:2].cpu().numpy() == wanted).all(), (number, key)


def test_the_table_is_emptied_when_its_number_is_used_up():
    bundles, said = Bundles((8, 8, 8)), words()
    dram, distinct = slab(30, bundles.stride), Distinct(bundles, 8, DEVICE)
    distinct.memory[0] = LAST - 1
    for k, number in enumerate((LAST, 1, 2, 3)):
        slots = slots_of(8, 3, 30, seed=k).clamp_(min=-1)
        out = torch.zeros(8, 24, 264, dtype=torch.uint8, device=DEVICE)
        distinct(slots, out, mode="packed", dram=dram.data_ptr(), ticket=k + 1, **said)
        assert (out.cpu().numpy() == expected_packed(slots, (8, 8, 8), dram, None)).all()
        assert distinct.memory[0].item() == number
        if number == 1:
            assert not distinct.memory[HEADER:].any()


def test_slots_that_share_a_cell_are_read():
    """More bundles than cells: whoever comes second reads its own."""
    bundles, said = Bundles((8,)), words()
    count = 700
    dram, distinct = slab(count, bundles.stride), Distinct(bundles, 1, DEVICE)
    distinct.tokens = 4096                                   # a table that is far too small
    generator = np.random.default_rng(1)
    tokens = 60 if INTERPRETED else 4096
    for k in range(2 if INTERPRETED else 40):
        slots = pinned(torch.from_numpy(generator.integers(0, count, (tokens, 1)).astype(np.int32)))
        out = torch.zeros(tokens, 8, 264, dtype=torch.uint8, device=DEVICE)
        distinct(slots, out, mode="packed", dram=dram.data_ptr(), ticket=k + 1, **said)
        wanted = torch.zeros_like(out)
        Gather(bundles)(slots, wanted, mode="packed", dram=dram.data_ptr())
        assert torch.equal(out, wanted)


def test_what_cannot_be_is_refused():
    bundles, said = Bundles((8, 8, 8)), words()
    distinct = Distinct(bundles, 4, DEVICE)
    out = torch.zeros(5, 24, 264, dtype=torch.uint8, device=DEVICE)
    slots = torch.zeros(5, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="at most 4"):
        distinct(slots, out, mode="packed", ticket=1, **said)
    with pytest.raises(ValueError, match="at most 4"):
        distinct.at(5, 0, 0, mode="packed", dram=0, hbm=0, counter=0, done=0, ticket=1)
    with pytest.raises(ValueError, match="slots must be"):
        distinct(slots[:3].to(torch.int64), out[:3], mode="packed", ticket=1, **said)
    with pytest.raises(ValueError, match="out must be"):
        distinct(slots[:3], out[:4], mode="packed", ticket=1, **said)
    with pytest.raises(ValueError, match="packed bytes only"):
        Distinct(Bundles((8,), 160, 80, 10, 768, "nvfp4"), 4, DEVICE).launch("rows", 1)
    with pytest.raises(ValueError, match="too many"):
        Distinct(bundles, 1 << 28, DEVICE)
