"""Promotion: hot bundles from the pinned DRAM slab into slots of the HBM tier, off the critical path (design 2, HBM tier).

    pairs int32 [2 * n], pinned:  slot, HBM slot, slot, HBM slot, ...         (written by the planner, read in place)

One program copies one bundle, byte for byte, 16 bytes a thread; the last one to finish stores the number of the batch of copies
into the pinned word that the planner polls. It knows nothing of hotness. Invariant: the word is stored after every byte was
written and is visible to all later kernels, so the planner may publish the HBM slots then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdgram.kernels.launch import Launch, next_power_of_two


@triton.jit(do_not_specialize=["pairs_count", "number", "dram", "hbm"], do_not_specialize_on_alignment=["pairs", "counter", "done"])
def promote_kernel(pairs, counter, done, dram: tl.int64, hbm: tl.int64, number: tl.int64, pairs_count: tl.int32,  # type: ignore[no-untyped-def]
                   STRIDE: tl.constexpr, WORDS_P2: tl.constexpr):
    """Bundle program_id(0) of the list; see the module's text."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    lane = tl.arange(0, WORDS_P2)
    wanted = lane < STRIDE // 4
    from_at = tl.multiple_of((dram + source * STRIDE).to(tl.pointer_type(tl.int32)), 64)
    to_at = tl.multiple_of((hbm + target * STRIDE).to(tl.pointer_type(tl.int32)), 64)
    tl.store(to_at + lane, tl.load(from_at + lane, mask=wanted, other=0), mask=wanted)
    tl.debug_barrier()                                       # all warps have stored; the atomic publishes that
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
        tl.store(done, number, cache_modifier=".wt")


class Promote:
    """Launches the copies for one slot stride (bytes). `counter`: an int32 device word that is zero, for this object alone."""

    def __init__(self, stride: int) -> None:
        words = [torch.int32, torch.int32, torch.int64, 1 << 40, 1 << 40, 1, 1]
        self.launch = Launch(promote_kernel, words, {"STRIDE": stride, "WORDS_P2": next_power_of_two(stride // 4)}, warps=4)

    def __call__(self, pairs: torch.Tensor, count: int, counter: torch.Tensor, done: torch.Tensor, dram: int, hbm: int,
                 number: int) -> None:
        """Copy the first `count` (1 or more) pairs on the current stream; `done` (int64, pinned) gets `number` after the last
        byte. dram, hbm: base addresses as the device sees them, 64-byte aligned."""
        self.launch(count, pairs, counter, done, dram, hbm, number, count)
