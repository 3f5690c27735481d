"""The peer of bench/gpu.py: vLLM 0.33.0's own Engram lookup kernel, run as vLLM runs it, over a table that the bench provides.

The kernel is not part of this repository. Its one file is looked for in .peer/ (ignored, never committed):

    pip download vllm==0.33.0 --no-deps -d .peer
    unzip -d .peer .peer/vllm-0.33.0-*.whl vllm/models/deepseek_v41/common/engram.py

Everything that the file imports from vllm is replaced by stubs: the kernel needs Triton alone. Grid, block and arguments are
those of `ParallelEngramEmbedding.lookup`. Without the file `load` returns None and the bench says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = "vllm/models/deepseek_v41/common/engram.py"
BLOCK_R = 16


class _Anything:
    """Stands for any name of vllm: an attribute of it is another, a call gives its argument back (so it decorates)."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else _Anything()

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Stub(spec.name)
        if spec.name == "vllm.triton_utils":
            module.tl, module.triton = tl, triton             # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def load(folder: Path = ROOT / ".peer") -> Any | None:
    """The module with the kernel, or None when its file is absent."""
    path = folder / FILE
    if not path.exists():
        return None
    before = {name for name in sys.modules if name.split(".")[0] == "vllm"}
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        spec = importlib.util.spec_from_file_location("ssdgram_peer_engram", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            if name not in before:
                del sys.modules[name]
    return module


class Lookup:
    """Row-by-row lookup over a table. codes uint8 [R, 256], scales uint8 [R, 8]: device tensors, or registered host memory.

    `background`: on half of the multiprocessors, as vLLM launches it on a side stream.
    """

    def __init__(self, module: Any, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.kernel = module._engram_lookup_kernel
        self.codes, self.scales = codes.view(torch.float8_e4m3fn), scales
        self.rows = codes.shape[0]
        self.sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def __call__(self, ids: torch.Tensor, out: torch.Tensor, *, columns: int = 24, start: int = 0, background: bool = False) -> None:
        """ids int32 [T, 24] -> out bfloat16 [T, columns, 256], the columns from `start`."""
        count = ids.shape[0] * columns
        self._launch(ids, ids, out, count, ids.stride(), start, columns, 24, False, background)

    def sorted(self, ids: torch.Tensor, out: torch.Tensor, *, background: bool = False) -> None:
        """As `__call__` with the ids in table order: the sort (as vLLM does it) is part of it."""
        order, place = ids.flatten().sort()
        self.presorted(order, place.int(), out, background=background)

    def presorted(self, order: torch.Tensor, place: torch.Tensor, out: torch.Tensor, *, background: bool = False) -> None:
        """The kernel alone on sorted ids int32 [T * 24] and the output rows int32 that they belong to."""
        self._launch(order, place, out, order.shape[0], (24, 1), 0, 24, 24, True, background)

    def _launch(self, ids: torch.Tensor, place: torch.Tensor, out: torch.Tensor, count: int, strides: tuple[int, ...], start: int,
                columns: int, total: int, in_order: bool, background: bool) -> None:
        grid = min(triton.cdiv(count, BLOCK_R), self.sms // 2 if background else self.sms)
        self.kernel[(grid,)](
            self.codes, self.scales, ids, place, out, 0, self.rows, count, strides[0], strides[1], HEAD_START=start,
            LOCAL_HEADS=columns, TOTAL_HEADS=total, DIM=256, QUANT_BLOCK=32, BLOCK_R=BLOCK_R, GRID=grid, SORTED=in_order,
            PACKED=False, OUT_STRIDE=out.stride(0), PEER_ROWS=0)
