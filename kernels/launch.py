"""Launching Triton kernels without surprises: every variant is compiled and loaded ahead, none on first use.

A kernel that CUDA loads lazily behind a stream that waits for the host blocks the thread that should release it (design 1.6),
and Triton by itself specialises on argument values (1, multiples of 16), so a new batch size can mean a new kernel. A `Launch`
is one variant: constants fixed, no specialisation on values, alignment of the tensors promised by the caller and checked by
the wrappers. `preload` loads all variants that a store uses. It knows nothing of what the kernels do.

Under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported) a Launch calls the interpreted function.
Compiled kernels are kept in TRITON_CACHE_DIR, by default ~/.triton/cache: an image that ships this folder compiles nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bfloat16: "bf16", torch.float32: "fp32"}


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` (>= 1)."""
    return 1 << max(0, number - 1).bit_length()


def aligned(tensor: torch.Tensor, boundary: int = 16) -> bool:
    """Whether the tensor's first byte lies on the boundary (an empty tensor always does)."""
    return tensor.numel() == 0 or tensor.data_ptr() % boundary == 0


def raw_stream(device: int) -> int:
    """The handle of the current stream; as Triton asks for it: `torch.cuda.current_stream` makes an object, for microseconds."""
    return int(torch._C._cuda_getCurrentRawStream(device))


_read_in_place: set[int] = set()                             # addresses of pinned memory that launches were given


def address(tensor: torch.Tensor) -> int:
    """Where the GPU finds the tensor: its own memory, or pinned memory, which it reads in place. ValueError: neither.

    Triton would ask the driver about every pointer of every launch: 3 us each (docs/lab-log.md), most of what a launch took. Here
    host memory is looked at once for each address: who unpins some calls `forget`.
    """
    place = int(tensor.data_ptr())
    if not tensor.is_cuda and place not in _read_in_place:
        if place != 0 and not tensor.is_pinned():
            raise ValueError(f"a {tensor.dtype} {tuple(tensor.shape)} tensor lies in memory that the GPU cannot read: expected one of "
                             f"the GPU's, or in pinned memory")
        if len(_read_in_place) >= 4096:
            _read_in_place.clear()
        _read_in_place.add(place)
    return place


def forget() -> None:
    """Memory was unpinned: look at host memory anew."""
    _read_in_place.clear()


class Launch:
    """One variant of a kernel. `arguments`: one sample per argument, in order: a dtype for a pointer, a number for a number.

    Pointers are taken as 16-byte aligned unless the kernel says do_not_specialize_on_alignment.
    """

    def __init__(self, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], *, warps: int = 4, stages: int = 3,
                 **options: Any) -> None:
        self.kernel, self.arguments, self.constants = kernel, tuple(arguments), constants
        self.options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, **options}
        self._compiled: dict[int, Any] = {}                  # by device
        self._lock = threading.Lock()
        self._interpreted = not isinstance(kernel, JITFunction)
        if not self._interpreted:
            names = kernel.arg_names
            if list(constants) != names[len(arguments):]:
                raise ValueError(f"constants {list(constants)} are not, in order, those of the kernel: {names[len(arguments):]}")
        self._tail = tuple(constants.values())

    def load(self, device: int) -> Any:
        """Compile and load for a CUDA device (which must be current); later launches there do neither."""
        with self._lock:
            found = self._compiled.get(device)
            if found is None:
                found = self.kernel.warmup(*self.arguments, grid=(1,), **self.constants, **self.options)
                found._init_handles()                        # loads the module into the context
                self._compiled[device] = found
        return found

    def __call__(self, grid: int | tuple[int, ...], *arguments: Any) -> None:
        """Launch on the current stream of the current device."""
        size = (grid,) if isinstance(grid, int) else tuple(grid)
        if self._interpreted:
            self.kernel[size](*arguments, **self.constants)
            return
        x, y, z = size + (1,) * (3 - len(size))
        self.at((x, y, z), *[address(word) if isinstance(word, torch.Tensor) else word for word in arguments])

    def at(self, grid: tuple[int, int, int], *words: Any) -> None:
        """As a call, with an address (int) for each tensor; what lies there is the caller's word: nothing is looked at. Not interpreted."""
        device = torch.cuda.current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            compiled = self.load(device)
        compiled.run(*grid, raw_stream(device), compiled.function, compiled.packed_metadata, None, None, None, *words, *self._tail)

    def compile(self, capability: int) -> Any:
        """Compile for a compute capability (90: H100, H200) without a GPU: what Triton made, with `asm`; not for launching."""
        types, attributes = {}, {}
        for index, (parameter, sample) in enumerate(zip(self.kernel.params, self.arguments)):
            if isinstance(sample, torch.dtype):
                types[parameter.name] = "*" + TYPES[sample]
                if not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                types[parameter.name] = parameter.annotation_type
        types |= dict.fromkeys(self.constants, "constexpr")
        source = ASTSource(fn=self.kernel, signature=types, constexprs=dict(self.constants), attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


def preload(device: torch.device | int | None, launches: Iterable[Launch]) -> int:
    """Compile and load every variant in `launches` on `device` (None: the current one); returns how many.

    Call it before the first stream wait, and before a graph is captured.
    """
    index = torch.cuda.current_device() if device is None else torch.device("cuda", device).index if isinstance(device, int) \
        else device.index if device.index is not None else torch.cuda.current_device()
    count = 0
    with torch.cuda.device(index):
        for launch in launches:
            launch.load(index)
            count += 1
        torch.cuda.synchronize()
    return count


def dependents(device: torch.device) -> bool:
    """Whether kernels there may begin before the kernel before them has ended (programmatic dependent launch: Hopper and newer)."""
    return device.type == "cuda" and not interpreted() and torch.cuda.get_device_capability(device) >= (9, 0)


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)
