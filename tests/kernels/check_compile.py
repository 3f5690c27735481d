"""Every kernel compiles for an H200 on any machine, and moves bundles 16 bytes a thread. Not interpreted."""

import json
import re

import pytest
import torch
from where import GOLDEN, INTERPRETED, golden

from ssdgram.bench.warmness.device import GpuRowIds
from ssdgram.engines.windows import Windows
from ssdgram.engines.windows_gpu import launch_for
from ssdgram.geometry import Geometry
from ssdgram.kernels.check import Check
from ssdgram.kernels.deliver import Deliver
from ssdgram.kernels.distinct import Distinct
from ssdgram.kernels.gate import CUTS as GATE_CUTS
from ssdgram.kernels.gate import Gate
from ssdgram.kernels.gather import ADDRESSES, SLOTS, TILES, Bundles, Gather, mark_launch
from ssdgram.kernels.hash_gpu import Hash
from ssdgram.kernels.project import CUTS, Projection
from ssdgram.kernels.promote import Promote

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiling is what this is about")
WHOLE = Bundles((8, 8, 8))


def compiled(launch):
    return launch.compile(90).asm["ptx"]


@pytest.mark.parametrize("mode,kind,dtype", (
    ("rows", SLOTS, torch.bfloat16), ("packed", SLOTS, torch.uint8), ("mxfp8", ADDRESSES, torch.uint8)))
def test_gather_reads_whole_vectors(mode, kind, dtype):
    ptx = compiled(Gather(WHOLE).launch(mode, kind, dtype, 1, TILES[0][1]))
    assert re.search(r"ld\.global[.\w:]*\.v4\.b32", ptx)
    assert ".ftz" not in ptx                                 # 2^-127 is subnormal
    assert len(re.findall(r"ld\.global[.\w:]*\.b8 ", ptx)) <= 8             # scale bytes only


@pytest.mark.parametrize("heads", ((8, 4), (3,), (2, 1)))
def test_gather_of_column_subsets(heads):
    compiled(Gather(Bundles(heads)).launch("rows", ADDRESSES, torch.bfloat16, 2, TILES[-1][1]))


@pytest.mark.parametrize("mode", ("rows", "packed"))
def test_distinct_bundles_are_claimed_by_one_thread_for_all(mode):
    """Between reading a cell and the branch on it is a barrier: warps that saw different things would part."""
    ptx = compiled(Distinct(WHOLE, 2048, "cpu").launch(mode, 1))
    assert re.search(r"ld\.global[.\w:]*\.v4\.b32", ptx) and ".ftz" not in ptx
    read, claimed = ptx.index("ld.global.gpu.relaxed.b64"), ptx.index("atom.global.relaxed.gpu.cas.b64")
    assert re.search(r"bar\.sync.*@%p\d+ bra", ptx[read:claimed], re.DOTALL)
    assert ptx.count("ld.global.gpu.acquire.b64") == 2 and "atom.global.gpu.release.exch.b64" in ptx
    assert re.search(r"ld\.global\.cg\.", ptx)             # what another program wrote is not looked for in L1


@pytest.mark.parametrize("cut,plain", [(cut, plain) for _, cut in CUTS for plain in (True, False) if plain or cut.kind == "rows"], ids=str)
def test_projection_uses_the_tensor_cores_and_pipelines_its_loads(cut, plain):
    projection = Projection(torch.zeros(25600, 6144, dtype=torch.uint8), torch.full((800, 192), 127 if plain else 135, dtype=torch.uint8))
    assert projection.plain == plain
    ptx = compiled(projection.launch(cut))
    assert "cp.async.cg.shared.global" in ptx
    assert cut.kind == "codes" or ("prmt.b32 low" in ptx) == plain
    assert re.search(r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3" if cut.kind == "codes" else r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", ptx)
    if cut.kind == "codes":                                  # from shared memory as they came, also those out of bundles
        fused = compiled(projection.launch(cut, WHOLE))
        assert len(re.findall(r"cp\.async\.cg\.shared", fused)) == len(re.findall(r"cp\.async\.cg\.shared", ptx))
    projection = Projection(projection.weight, projection.scales)
    projection._early = True                                 # as on a GPU
    ptx = compiled(projection.launch(cut))
    before, after = ptx.index("cp.async.bulk.prefetch.L2"), ptx.index("ld.global")
    assert before < ptx.index("griddepcontrol.wait") < min(after, ptx.index("cp.async.cg.shared.global"))


def test_a_gather_lets_its_dependents_begin():
    launch = Gather(WHOLE).launch("mxfp8", SLOTS, torch.uint8, 0, TILES[0][1], True)
    assert "griddepcontrol.launch_dependents" in compiled(launch)


def test_the_peers_hash_to_int32():
    hasher = GpuRowIds(Geometry.from_config(json.loads((GOLDEN / "v41_constants.json").read_text())["config"]),
                       golden("v41_token_map.npz")["token_map"], 64, torch.device("cpu"))
    assert re.search(r"st\.global[.\w:]*\.b32", compiled(hasher._launch))


def test_the_others():
    weight = torch.zeros(4, 5120, dtype=torch.bfloat16)
    for _, cut in GATE_CUTS:
        compiled(Gate(weight, weight).launch(cut, True))
    compiled(mark_launch(1))
    compiled(mark_launch(2))
    assert re.search(r"st\.global[.\w:]*\.v4\.b32", compiled(Promote(2112).launch))
    compiled(Check(8, 256, 8, generation=1, layer=1, device="cpu").launch())
    compiled(Deliver(256, 8, generation=1, device="cpu").launch)
    constants = torch.ones(2, 24)
    hasher = Hash(torch.ones(2, 4), constants, constants, token_map=range(9), fill=2, vocabulary=9, device="cpu")
    compiled(hasher.launch(True, True))


@pytest.mark.parametrize("kind", ("vllm", "sglang"))
def test_windows_of_both_engines(kind):
    i32, i64 = (torch.zeros(4, dtype=dtype) for dtype in (torch.int32, torch.int64))
    before = torch.zeros(4, 3, dtype=torch.int32)
    if kind == "vllm":
        windows = Windows(tokens=i32, positions=i64, before=before, starts=i32, count=4, requests=4)
    else:
        windows = Windows(tokens=i64, positions=i64, before=before, rows=i64, count=4, requests=4, newest_first=False)
    for marks in (False, True):
        compiled(launch_for(windows, marks))


@pytest.mark.parametrize("rule", ("vllm", "sglang"))
def test_gather_with_the_scale_rules_of_the_engines(rule):
    compiled(Gather(Bundles((8, 8, 8), scale_rule=rule)).launch("rows", SLOTS, torch.bfloat16, 1, TILES[0][1]))
