"""gather: rows, packed bytes and MXFP8 operands from bundles of any tier and any column subset; the done word."""

import numpy as np
import pytest
import torch
from where import BF16, DEVICE, INTERPRETED, golden, pinned, put, slab, synchronize, to_bits

from ssdgram.kernels.gather import Bundles, Gather, Tile, mark_done

TABLE = golden("dequant.npz")["table_bf16_by_scale_then_code"]
SHAPES = ((8, 8, 8), (8, 4), (4, 8), (3,), (2, 1), (0, 3, 0), (8,))


def expected_packed(slots, heads, dram, hbm, code_bytes=256, scale_bytes=8):
    """uint8 [T, columns, row bytes], row by row, by the layout's definition."""
    rows = []
    for token in slots.tolist():
        for slot, count in zip(token, heads):
            for head in range(count):
                if slot == -1:
                    rows.append(np.zeros(code_bytes + scale_bytes, np.uint8))
                    continue
                bundle = (dram if slot >= 0 else hbm)[slot if slot >= 0 else -2 - slot].cpu().numpy()
                scales = count * code_bytes + head * scale_bytes
                codes = bundle[head * code_bytes:(head + 1) * code_bytes]
                rows.append(np.concatenate([codes, bundle[scales:scales + scale_bytes]]))
    return np.stack(rows).reshape(len(slots), sum(heads), -1)


def expected_bits(packed):
    """bf16 bits of fp8_ue8m0 rows by the golden table."""
    codes, scales = packed[..., :256], packed[..., 256:]
    return TABLE[np.repeat(scales, 32, -1), codes]


def same_rows(found, packed):
    """Rows equal the golden table's; NaNs as NaNs (the interpreter reads NaN codes as numbers: not looked at there)."""
    wanted, bits = expected_bits(packed), to_bits(found)
    nan = (wanted & 0x7FFF) > 0x7F80
    if INTERPRETED:
        code_nan = (packed[..., :256] & 0x7F) == 0x7F
        assert ((bits & 0x7FFF) > 0x7F80)[nan & ~code_nan].all()
    else:
        assert (((bits & 0x7FFF) > 0x7F80) == nan).all()
    return (bits == wanted)[~nan].all()


def slots_of(tokens, orders, count, seed=0):
    """Random slots of both tiers, and absent ones."""
    generator = np.random.default_rng(seed)
    slots = generator.integers(0, count, (tokens, orders)).astype(np.int32)
    kind = generator.random((tokens, orders))
    slots = np.where(kind < 0.4, -2 - slots, slots)
    return torch.from_numpy(np.where(kind > 0.9, np.int32(-1), slots).astype(np.int32))


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("tile", (Tile(8, 4), Tile(16, 4, 2), Tile(32, 8)))
def test_all_outputs_from_a_mix_of_tiers(heads, tile):
    tokens, count = 5, 20
    bundles = Bundles(heads)
    dram, hbm = slab(count, bundles.stride), slab(count, bundles.stride, DEVICE)
    slots = slots_of(tokens, len(heads), count)
    packed = expected_packed(slots, heads, dram, hbm)
    gather = Gather(bundles)
    bases = {"dram": dram.data_ptr(), "hbm": hbm.data_ptr(), "tile": tile}
    rows = torch.full((tokens, bundles.columns, 256), 7.0, dtype=BF16, device=DEVICE)
    gather(pinned(slots), rows, **bases)
    bytes_ = torch.full((tokens, bundles.columns, 264), 7, dtype=torch.uint8, device=DEVICE)
    gather(put(slots), bytes_, mode="packed", **bases)
    codes = torch.full((tokens, bundles.columns * 256), 7, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((tokens, bundles.columns * 8), 7, dtype=torch.uint8, device=DEVICE)
    gather(put(slots), codes, mode="mxfp8", scales=scales, **bases)
    assert same_rows(rows, packed)
    assert (bytes_.cpu().numpy() == packed).all()
    assert (codes.cpu().numpy() == packed[..., :256].reshape(tokens, -1)).all()
    assert (scales.cpu().numpy() == packed[..., 256:].reshape(tokens, -1)).all()


def test_addresses_give_what_slots_give():
    bundles = Bundles((8, 8, 8))
    dram, hbm = slab(9, bundles.stride), slab(9, bundles.stride, DEVICE)
    slots = slots_of(6, 3, 9, seed=1)
    wide = slots.to(torch.int64)
    addresses = torch.where(wide >= 0, dram.data_ptr() + wide * bundles.stride, hbm.data_ptr() + (-2 - wide) * bundles.stride)
    addresses = torch.where(wide == -1, 0, addresses)
    out = torch.empty(2, 6, 24, 264, dtype=torch.uint8, device=DEVICE)
    gather = Gather(bundles)
    gather(put(slots), out[0], mode="packed", dram=dram.data_ptr(), hbm=hbm.data_ptr())
    gather(pinned(addresses), out[1], mode="packed")
    assert torch.equal(out[0], out[1])
    assert (out[0].cpu().numpy() == expected_packed(slots, (8, 8, 8), dram, hbm)).all()


def test_every_pair_of_scale_and_code():
    """All 65536 pairs of spec A7, one scale byte a row."""
    bundles = Bundles((8,))
    count = 256 // 8
    dram = slab(count, bundles.stride)
    dram[:, :2048] = torch.arange(256, dtype=torch.uint8).repeat(8)
    dram[:, 2048:2112] = torch.arange(256, dtype=torch.uint8).view(count, 8).repeat_interleave(8, -1)
    slots = torch.arange(count, dtype=torch.int32).view(count, 1)
    rows = torch.empty(count, 8, 256, dtype=BF16, device=DEVICE)
    Gather(bundles)(put(slots), rows, dram=dram.data_ptr())
    assert same_rows(rows, expected_packed(slots, (8,), dram, None))


def encoded(heads, count, encoding, dim, code_bytes, scale_bytes):
    """(bundles, slab) of another encoding."""
    stride = -(-max(heads) * (code_bytes + scale_bytes) // 64) * 64
    dram = slab(count, stride)
    dram &= 0x3F                                             # no NaN
    return Bundles(heads, dim, code_bytes, scale_bytes, stride, encoding, 0.3751), dram


@pytest.mark.parametrize("encoding,dim,code_bytes,scale_bytes", (
    ("bf16", 160, 320, 0), ("fp8_global", 160, 160, 0), ("nvfp4", 160, 80, 10), ("fp8_ue8m0", 64, 64, 2),
    ("fp8_ue8m0", 96, 96, 3)))
def test_other_encodings(encoding, dim, code_bytes, scale_bytes):
    heads, count = (4, 4), 6
    bundles, dram = encoded(heads, count, encoding, dim, code_bytes, scale_bytes)
    slots = torch.tensor([[0, 5], [3, 2], [4, -1]], dtype=torch.int32)
    packed = expected_packed(slots, heads, dram, None, code_bytes, scale_bytes)
    out = torch.empty(3, 8, code_bytes + scale_bytes, dtype=torch.uint8, device=DEVICE)
    gather = Gather(bundles)
    gather(put(slots), out, mode="packed", dram=dram.data_ptr())
    assert (out.cpu().numpy() == packed).all()
    rows = torch.empty(3, 8, dim, dtype=torch.bfloat16 if encoding == "bf16" else BF16, device=DEVICE)
    if encoding == "nvfp4":
        with pytest.raises(ValueError, match="packed"):
            gather(put(slots), rows, dram=dram.data_ptr())
        return
    gather(put(slots), rows, dram=dram.data_ptr())
    if encoding == "bf16":
        assert (to_bits(rows) == packed.view(np.uint16)).all()
    elif encoding == "fp8_global":
        values = torch.from_numpy(packed).view(torch.float8_e4m3fn).float() * 0.375
        assert (to_bits(rows) == to_bits(values)).all()      # 0.375 is the bf16 next to 0.3751
    else:
        assert (to_bits(rows) == TABLE[np.repeat(packed[..., dim:], 32, -1), packed[..., :dim]]).all()


@pytest.mark.parametrize("programs", (0, 1, 3))
@pytest.mark.parametrize("tokens", (0, 1, 4))
def test_done_word_gets_the_ticket_once_and_the_counter_is_left_zero(programs, tokens):
    bundles = Bundles((8, 8, 8))
    dram = slab(4, bundles.stride)
    gather, tile = Gather(bundles), Tile(8, 4, programs)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    done, word = pinned(torch.zeros(1, dtype=torch.int64)), pinned(torch.tensor([1 << 40], dtype=torch.int64))
    slots = put(torch.randint(0, 4, (tokens, 3), dtype=torch.int32))
    out = torch.empty(tokens, 24, 264, dtype=torch.uint8, device=DEVICE)
    for ticket, wanted in ((5, 5), (-(1 << 50), -(1 << 50)), (word, 1 << 40), (1, 1)):
        gather(slots, out, mode="packed", dram=dram.data_ptr(), counter=counter, done=done, ticket=ticket, tile=tile)
        synchronize()
        assert done.item() == wanted
        assert counter.item() == 0


def test_mark_done():
    done, word = pinned(torch.zeros(1, dtype=torch.int64)), pinned(torch.tensor([77], dtype=torch.int64))
    mark_done(done, 3)
    synchronize()
    assert done.item() == 3
    mark_done(done, word)
    synchronize()
    assert done.item() == 77


def test_what_does_not_fit_is_refused():
    gather = Gather(Bundles((8, 8, 8)))
    slots = put(torch.zeros(2, 3, dtype=torch.int32))
    rows = torch.empty(2, 24, 256, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match=r"\[T, 3\]"):
        gather(slots[:, :2].contiguous(), rows)
    with pytest.raises(ValueError, match="16-byte aligned"):
        gather(slots, torch.empty(2, 24, 255, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(ValueError, match="aligned"):
        gather(slots, torch.empty(2 * 24 * 256 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(2, 24, 256))
    with pytest.raises(ValueError, match="counter"):
        gather(slots, rows, done=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="stride"):
        Bundles((8,), stride=2048)
    with pytest.raises(ValueError, match="heads"):
        Bundles(())


@pytest.mark.skipif(INTERPRETED, reason="a million rows: GPU only")
@pytest.mark.parametrize("tokens", (1, 17, 300, 14000))
def test_many_random_rows_of_both_tiers(tokens):
    bundles = Bundles((8, 8, 8))
    dram, hbm = slab(3000, bundles.stride), slab(1000, bundles.stride, DEVICE)
    slots = torch.randint(0, 3000, (tokens, 3), dtype=torch.int32)
    slots = torch.where(torch.rand(tokens, 3) < 0.3, -2 - slots % 1000, slots).to(torch.int32)
    every = torch.cat([dram.to(DEVICE), hbm])
    bundle = every[torch.where(slots >= 0, slots, 3000 + (-2 - slots)).to(DEVICE).long()]
    codes = bundle[..., :2048].reshape(tokens, 24, 256)
    scales = bundle[..., 2048:2112].reshape(tokens, 24, 8)
    table = torch.from_numpy(TABLE.view(np.int16)).to(DEVICE)
    wanted = table[scales.repeat_interleave(32, -1).long(), codes.long()].view(torch.bfloat16)
    for tile in (None, Tile(8, 1), Tile(32, 8), Tile(16, 4, 264)):
        rows = torch.full((tokens, 24, 256), 7.0, dtype=torch.bfloat16, device=DEVICE)
        Gather(bundles)(pinned(slots), rows, dram=dram.data_ptr(), hbm=hbm.data_ptr(), tile=tile)
        nan = wanted.isnan()
        assert torch.equal(rows.isnan(), nan)
        assert torch.equal(rows.view(torch.int16)[~nan], wanted.view(torch.int16)[~nan])


@pytest.mark.skipif(INTERPRETED, reason="graphs: GPU only")
def test_a_captured_gather_takes_new_slots_and_a_new_ticket():
    bundles = Bundles((8, 8, 8))
    dram = slab(50, bundles.stride)
    gather = Gather(bundles)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    done, word = pinned(torch.zeros(1, dtype=torch.int64)), pinned(torch.zeros(1, dtype=torch.int64))
    slots = pinned(torch.zeros(8, 3, dtype=torch.int32))
    out = torch.empty(8, 24, 264, dtype=torch.uint8, device=DEVICE)

    def launch():
        gather(slots, out, mode="packed", dram=dram.data_ptr(), counter=counter, done=done, ticket=word)

    launch()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for ticket in range(1, 6):
        slots.copy_(torch.randint(0, 50, (8, 3), dtype=torch.int32))
        word[0] = ticket
        graph.replay()
        synchronize()
        assert done.item() == ticket
        assert (out.cpu().numpy() == expected_packed(slots, (8, 8, 8), dram, None)).all()
