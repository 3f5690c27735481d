"""Sections of bench/gpu.py that need no peer: projection, gate, launch cost, and what a matmul notices of gathers beside it.

Each has its baseline in the same run: reading the weights once and cuBLAS on bf16 weights; copying the gate's bytes (and a
kernel with its traffic but no arithmetic); the matmul alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ssdgram.bench.gpu_timing import GIB, LAUNCHES, HostMemory, best, graph_us, host_us
from ssdgram.kernels import gate as gates
from ssdgram.kernels import project as projects
from ssdgram.kernels.gather import SLOTS, Bundles, Gather, tile_for
from ssdgram.kernels.launch import Launch

WHOLE = Bundles((8, 8, 8))
LINES = ("project", "dram + project", "hbm + project", "fused hbm", "cuBLAS bf16", "dram + cuBLAS")
N, K, STREAMS, WIDTH = 25600, 6144, 4, 5120                  # V4.1-Flash


@triton.jit(do_not_specialize=["count"])
def read_kernel(source, out, count: tl.int32, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of int32 words [count]: what reading them once takes."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(source + place, mask=place < count, other=0)))


@triton.jit
def stream_kernel(x, kv, out, XS: tl.constexpr, KVS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gate's traffic without its arithmetic: x [T, XS] and kv [T, KVS] in, out [T, XS]; BLOCK divides all."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    rest = tl.zeros([BLOCK], tl.bfloat16)
    for offset in tl.static_range(XS, KVS, BLOCK):
        rest += tl.load(kv + token * KVS + offset + lane)
    for offset in tl.static_range(0, XS, BLOCK):
        value = tl.load(x + token * XS + offset + lane) + tl.load(kv + token * KVS + offset + lane) + rest
        tl.store(out + token * XS + offset + lane, value)


def variants() -> list[Launch]:
    """Every variant of projection and gate that is tried, and the gathers before a projection."""
    gather = Gather(WHOLE)
    projection = projects.Projection(*(torch.empty(size, dtype=torch.uint8, device="cuda") for size in ((N, K), (N // 32, K // 32))))
    weight = torch.empty(STREAMS, WIDTH, dtype=torch.bfloat16)
    return ([gather.launch(mode, SLOTS, dtype, 0, tile_for(tokens), True) for tokens in (1, 64)
             for mode, dtype in (("mxfp8", torch.uint8), ("rows", torch.bfloat16))]
            + [projection.launch(cut) for cut in projects.CUT_CHOICES]
            + [gates.Gate(weight, weight).launch(cut, True) for cut in gates.CUT_CHOICES])


# ---------------------------------------------------------------- projection


class ProjectionBench:
    """Four weights in turn (629 MB, so that none stays in L2), operands of T tokens, bundles in both tiers."""

    SETS = 4

    def __init__(self, dram: torch.Tensor, hbm: torch.Tensor) -> None:
        self.tiers = {"dram": dram, "hbm": hbm}
        self.gather = Gather(WHOLE)
        self.projections = []
        for _ in range(self.SETS):
            weight = torch.empty(N, K, dtype=torch.uint8, device="cuda").random_(0, 256)
            weight[(weight & 0x7F) == 0x7F] = 0
            scales = torch.empty(N // 32, K // 32, dtype=torch.uint8, device="cuda").random_(110, 120)
            self.projections.append(projects.Projection(weight, scales))
        self.dense = [p.weight.view(torch.float8_e4m3fn).to(torch.bfloat16).T for p in self.projections]

    def read_times(self) -> dict[str, float]:
        """us of reading one weight, by block and warps."""
        words = [p.weight.view(torch.int32).flatten() for p in self.projections]
        sums = torch.empty(1 << 16, dtype=torch.int32, device="cuda")

        def measure(block: int, warps: int) -> float:
            grid = (triton.cdiv(words[0].numel(), block),)
            return graph_us(lambda number: read_kernel[grid](words[number % self.SETS], sums, words[0].numel(), BLOCK=block,
                                                             num_warps=warps))

        return {f"{block} words, {warps} warps": measure(block, warps) for block in (4096, 8192, 16384) for warps in (4, 8)}

    def prepare(self, tokens: int) -> None:
        self.tokens = tokens
        self.codes = torch.empty(tokens, K, dtype=torch.uint8, device="cuda").random_(0, 127)
        self.scales = torch.empty(tokens, K // 32, dtype=torch.uint8, device="cuda").random_(115, 125)
        self.rows = torch.randn(tokens, 24, 256, device="cuda").to(torch.bfloat16)
        self.out = torch.empty(tokens, N, dtype=torch.bfloat16, device="cuda")
        self.slots = torch.empty(LAUNCHES, tokens, 3, dtype=torch.int32, device="cuda")

    def project(self, cut: projects.Cut, number: int) -> None:
        projection = self.projections[number % self.SETS]
        if cut.kind == "codes":
            projection.codes(self.codes, self.scales, self.out, cut=cut)
        else:
            projection.rows(self.rows, self.out, cut=cut)

    def project_time(self, cut: projects.Cut) -> float:
        return graph_us(lambda number: self.project(cut, number))

    def cublas_time(self) -> float:
        flat = self.rows.view(self.tokens, K)
        return graph_us(lambda number: torch.mm(flat, self.dense[number % self.SETS], out=self.out))

    def gathered_cublas_time(self) -> float:
        """Gather from DRAM, then cuBLAS: what `both_time` does, by the peer's product."""
        flat, memory = self.rows.view(self.tokens, K), self.tiers["dram"]

        def launch(number: int) -> None:
            self.gather(self.slots[number], self.rows, dram=memory.data_ptr())
            torch.mm(flat, self.dense[number % self.SETS], out=self.out)

        return graph_us(launch, lambda: self.slots.random_(0, memory.numel() // WHOLE.stride))

    def both_time(self, cut: projects.Cut, tier: str) -> float:
        """Gather, then projection."""
        memory = self.tiers[tier]

        def launch(number: int) -> None:
            if cut.kind == "codes":
                self.gather(self.slots[number], self.codes, mode="mxfp8", scales=self.scales, dram=memory.data_ptr(), overlap=True)
            else:
                self.gather(self.slots[number], self.rows, dram=memory.data_ptr(), overlap=True)
            self.project(cut, number)

        return graph_us(launch, lambda: self.slots.random_(0, memory.numel() // WHOLE.stride))

    def fused_time(self, cut: projects.Cut) -> float:
        """The projection that reads bundles in HBM itself."""
        memory = self.tiers["hbm"]
        addresses = torch.empty(LAUNCHES, self.tokens, 3, dtype=torch.int64, device="cuda")
        return graph_us(
            lambda number: self.projections[number % self.SETS].bundles(addresses[number], self.out, WHOLE, cut=cut),
            lambda: addresses.random_(0, memory.numel() // WHOLE.stride).mul_(WHOLE.stride).add_(memory.data_ptr()))


def project_section(tune: bool) -> dict[str, Any]:
    """Projection of 1 to 64 tokens, alone and behind its gather, over the time of reading the weights."""
    slab = HostMemory(2 * GIB, huge=True)
    bench = ProjectionBench(slab.tensor, torch.empty(GIB, dtype=torch.uint8, device="cuda").random_(0, 127))
    read_times = bench.read_times()
    read = min(read_times.values())
    print(f"\nreading {N * K / 1e6:.0f} MB of weights once: {read:.1f} us ({N * K / read / 1e6:.2f} TB/s)\n"
          f"{'us (over that read)':22}" + "".join(f"{name:>20}" for name in LINES), flush=True)
    results: dict[str, Any] = {"read_us": read, "read_times": read_times, "us": {}, "cuts": {}, "tuning": {}}
    for tokens in (1, 4, 16, 32, 64):
        bench.prepare(tokens)
        cut = next(choice for limit, choice in projects.CUTS if tokens <= limit)
        if tune:
            fitting = [choice for choice in projects.CUT_CHOICES if tokens <= choice.block_t <= max(16, tokens)]
            cut, results["tuning"][str(tokens)] = best(fitting, bench.project_time)
        times = {"project": bench.project_time(cut), "dram + project": bench.both_time(cut, "dram"),
                 "hbm + project": bench.both_time(cut, "hbm"),
                 "fused hbm": bench.fused_time(cut) if cut.kind == "codes" and 8 % cut.blocks == 0 else None,
                 "cuBLAS bf16": bench.cublas_time(), "dram + cuBLAS": bench.gathered_cublas_time()}
        results["us"][tokens], results["cuts"][tokens] = times, str(cut)
        print(f"{'T ' + str(tokens):22}" + "".join(f"{'-':>20}" if value is None else f"{value:12.1f} ({value / read:4.2f})"
                                                   + " " for value in times.values()) + f"  {cut}", flush=True)
    slab.close()
    for name, times in results["tuning"].items():
        print(f"T {name}: " + "; ".join(f"{choice} {value}" for choice, value in list(times.items())[:5]))
    return results


# ---------------------------------------------------------------- gate


def gate_times(gate: gates.Gate, tokens: int, tune: bool) -> dict[str, Any]:
    """us of the gate and of its baselines for T tokens."""
    size = tokens * (3 * STREAMS + 1) * WIDTH * 2            # x, keys and value in, streams out
    sets = max(1, min(LAUNCHES, 6 * GIB // size))
    x = torch.randn(sets, tokens, STREAMS, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(sets, tokens, (STREAMS + 1) * WIDTH, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    alive = torch.ones(tokens, dtype=torch.uint8, device="cuda")

    def measure(cut: gates.Cut | None) -> float:
        return graph_us(lambda i: gate(x[i % sets], kv[i % sets], out[i % sets], alive, cut=cut))

    cut = next(choice for limit, choice in gates.CUTS if tokens <= limit)
    tried: dict[str, float] = {}
    if tune:
        cut, tried = best(gates.CUT_CHOICES, measure)
    stream = graph_us(lambda i: stream_kernel[(tokens,)](x[i % sets], kv[i % sets], out[i % sets], XS=STREAMS * WIDTH,
                                                         KVS=(STREAMS + 1) * WIDTH, BLOCK=1024, num_warps=4))
    own = measure(cut)
    source = torch.empty(sets, size // 2, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    copy = graph_us(lambda i: target[i % sets].copy_(source[i % sets]))
    return {"gate": own, "copy": copy, "stream": stream, "ratio": own / copy, "cut": str(cut), "tuning": tried}


def gate_section(tune: bool, sizes: Sequence[int]) -> dict[str, Any]:
    """The gate against copying the same number of bytes (half read, half written)."""
    q, k = (torch.randn(STREAMS, WIDTH, device="cuda").to(torch.bfloat16) for _ in range(2))
    gate = gates.Gate(q, k)
    print(f"\n{'gate':10}{'us':>10}{'copy':>10}{'stream':>10}{'us/copy':>10}")
    results: dict[str, Any] = {}
    for tokens in sizes:
        found = results[str(tokens)] = gate_times(gate, tokens, tune)
        figures = f"{found['gate']:10.1f}{found['copy']:10.1f}{found['stream']:10.1f}{found['ratio']:10.2f}"
        print(f"T {tokens:<8}{figures}   {found['cut']}; "
              + "; ".join(f"{cut} {value}" for cut, value in list(found["tuning"].items())[1:4]), flush=True)
        torch.cuda.empty_cache()
    return results


# ---------------------------------------------------------------- beside a matmul


def beside_section() -> dict[str, Any]:
    """How much a loop of bf16 matrix products slows down beside gathers of T = 256 from DRAM, on another stream."""
    slab = HostMemory(2 * GIB, huge=True)
    gather, base = Gather(WHOLE), slab.tensor.data_ptr()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    slots = torch.empty(64, 256, 3, dtype=torch.int32, device="cuda").random_(0, slab.size // WHOLE.stride)
    out = torch.empty(256, 24, 256, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    products = 250

    def loop(pause_s: float | None) -> tuple[float, int]:
        """(ms per product, gathers meanwhile); pause_s None: no gathers, 0: back to back."""
        torch.cuda.synchronize()
        start.record()
        for _ in range(products):
            torch.mm(a, b, out=product)
        stop.record()
        gathers, begun = 0, time.perf_counter()
        with torch.cuda.stream(side):
            while pause_s is not None and not stop.query():
                if time.perf_counter() < begun + gathers * pause_s:
                    continue
                gather(slots[gathers % 64], out, dram=base)
                gathers += 1
                if pause_s == 0 and gathers % 16 == 0:
                    side.synchronize()                       # back to back, and never far ahead
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / products, gathers

    gather(slots[0], out, dram=base)
    loop(None)
    pauses = {"alone": None, "every 10 ms": 0.01, "back to back": 0.0}
    times: dict[str, list[float]] = {name: [] for name in pauses}
    counts: dict[str, int] = {}
    for _ in range(4):
        for name, pause in pauses.items():
            value, counts[name] = loop(pause)
            times[name].append(value)
    slab.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    slower = {name: value / medians["alone"] - 1 for name, value in medians.items() if name != "alone"}
    print(f"\nbf16 8192^3 product alone {medians['alone']:.4f} ms; slower by "
          + ", ".join(f"{value:.2%} beside gathers {name} ({counts[name]})" for name, value in slower.items()), flush=True)
    return {"ms_per_product": medians, "all_ms": times, "gathers": counts, "products": products, "slower": slower}


# ---------------------------------------------------------------- launch cost


def launch_section() -> dict[str, Any]:
    """Host us of launching a gather of T = 64: the wrapper, the compiled variant, Triton's own way; and launch to result."""
    gather = Gather(WHOLE)
    hbm = torch.empty(1 << 26, dtype=torch.uint8, device="cuda").random_(0, 127)
    slots = torch.empty(64, 3, dtype=torch.int32, device="cuda").random_(0, hbm.numel() // WHOLE.stride)
    out = torch.empty(64, 24, 256, dtype=torch.bfloat16, device="cuda")
    tile = tile_for(64)
    launch = gather.launch("rows", SLOTS, torch.bfloat16, 0, tile)
    arguments = (slots, out, out, out, out, out, hbm.data_ptr(), 0, 0, 64, 1.0)
    grid = 64 * 24 // tile.rows

    def launch_and_wait() -> None:
        gather(slots, out, dram=hbm.data_ptr())
        torch.cuda.synchronize()

    results: dict[str, Any] = {
        "Gather(...)": host_us(lambda: gather(slots, out, dram=hbm.data_ptr())),
        "Launch(...)": host_us(lambda: launch(grid, *arguments)),
        "kernel[grid](...)": host_us(lambda: launch.kernel[(grid,)](*arguments, **launch.constants, **launch.options)),
        "launch and wait, idle stream": host_us(launch_and_wait),
    }
    print("\nhost, us: " + ", ".join(f"{name} {value:.1f}" for name, value in results.items()), flush=True)
    return results
