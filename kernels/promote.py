"""Promotion: hot bundles are copied from DRAM slots to HBM slots by a kernel, off the critical path (design 2, HBM tier).

Whole bundles, byte for byte, one program each. It knows neither slots nor frequency: an address is an address. Invariant: the
word gets the ticket when every copy is complete and visible to all later kernels, so the planner may publish the HBM slots then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssdgram.kernels.gather import store_done
from ssdgram.kernels.launch import Launch, next_power_of_two


@triton.jit(do_not_specialize=["ticket"], do_not_specialize_on_alignment=["sources", "targets", "ticket_word", "done", "counter"])
def promote_kernel(sources, targets, counter, done, ticket_word, ticket: tl.int64, BYTES: tl.constexpr,  # type: ignore[no-untyped-def]
                   BYTES_P2: tl.constexpr, TICKET: tl.constexpr):
    """Bundle program_id(0); see `Promote`."""
    bundle = tl.program_id(0)
    lane = tl.arange(0, BYTES_P2)
    source = tl.multiple_of(tl.load(sources + bundle).to(tl.pointer_type(tl.uint8)), 64)
    target = tl.multiple_of(tl.load(targets + bundle).to(tl.pointer_type(tl.uint8)), 64)
    tl.store(target + lane, tl.load(source + lane, mask=lane < BYTES), mask=lane < BYTES)
    if TICKET > 0:
        tl.debug_barrier()                                   # all warps have stored; the atomic publishes that
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == tl.num_programs(0) - 1:
            tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
            store_done(done, ticket_word, ticket, TICKET)


class Promote:
    """Copies of bundles of `bundle_bytes` each (a multiple of 16 is fastest)."""

    def __init__(self, bundle_bytes: int) -> None:
        self.bundle_bytes = bundle_bytes
        self._launches: dict[int, Launch] = {}

    def __call__(self, sources: torch.Tensor, targets: torch.Tensor, *, counter: torch.Tensor | None = None,
                 done: torch.Tensor | None = None, ticket: int = 0) -> None:
        """On the current stream. sources, targets int64 [B]: 64-byte aligned addresses as the device sees them, in device or
        pinned memory; no two targets alike. done, counter, ticket: as in `Gather`; no word is stored for B = 0."""
        count = sources.shape[0]
        if (sources.dtype != torch.int64 or targets.dtype != torch.int64 or sources.shape != targets.shape or sources.dim() != 1
                or not (sources.is_contiguous() and targets.is_contiguous())):
            raise ValueError(f"sources and targets must be contiguous int64 [B]; found {sources.dtype} {tuple(sources.shape)} "
                             f"and {targets.dtype} {tuple(targets.shape)}")
        if (done is None) != (counter is None):
            raise ValueError("the word `done` (int64) needs a `counter` (int32 on the device), and a counter a word")
        if count:
            self.launch(0 if done is None else 1)(count, sources, targets, sources if counter is None else counter,
                                                  sources if done is None else done, sources, ticket)

    def launch(self, ticket: int = 1) -> Launch:
        """The compiled variant; ticket 0: without a word."""
        if ticket not in self._launches:
            words = [torch.int64, torch.int64, torch.int32, torch.int64, torch.int64, 1]
            self._launches[ticket] = Launch(promote_kernel, words, {
                "BYTES": self.bundle_bytes, "BYTES_P2": next_power_of_two(self.bundle_bytes), "TICKET": ticket}, warps=4)
        return self._launches[ticket]
