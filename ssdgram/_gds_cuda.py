"""What queue `gds` needs of CUDA: staging that cuFile can write to, and rounds of row checks on a stream of their own.

    staging   by cudaMalloc: cuFile registers such memory, torch's allocator may hand out other
    round     pinned jobs ─► kernels.deliver ─► pinned results, then a word behind them

It knows addresses, not pages. Invariant: a round's word is stored by a kernel that begins after the round's own has ended, so
whoever sees the word sees the results, and a gather launched later finds the rows.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np
import torch

from ssdgram import _state as s
from ssdgram._cuda import cuda_runtime, device_address
from ssdgram._state import State
from ssdgram.errors import UnavailableError
from ssdgram.kernels.deliver import JOB_WORDS, Deliver
from ssdgram.kernels.gather import mark_done, mark_launch
from ssdgram.kernels.launch import preload

ALIGNMENT = 1 << 16                                          # of staging: the GPU's own pages
PAGE = 4096


@contextlib.contextmanager
def bound(device: torch.device) -> Iterator[None]:
    """The device's context is current in this thread, for callers of CUDA's driver such as cuFile too."""
    runtime = cuda_runtime()
    with torch.cuda.device(device):
        if runtime.cudaSetDevice(device.index) != 0 or runtime.cudaFree(None) != 0:
            raise UnavailableError(f"CUDA does not make {device} current in a new thread")
        yield


class CudaRounds:
    """Pinned jobs, results and words of a reader's lanes; `launch` runs on the stream that the reader's thread made current."""

    def __init__(self, deliver: Deliver, lanes: int, jobs: int) -> None:
        self._deliver = deliver
        jobs_at = torch.zeros((lanes, jobs, JOB_WORDS), dtype=torch.int64, pin_memory=True)
        results = torch.zeros((lanes, jobs), dtype=torch.int32, pin_memory=True)
        words = torch.zeros((lanes, 8), dtype=torch.int64, pin_memory=True)
        self.jobs, self.results, self.words = (memory.numpy().reshape(-1) for memory in (jobs_at, results, words))
        self._lanes = [(jobs_at[lane], results[lane], words[lane, :1]) for lane in range(lanes)]

    def launch(self, lane: int, count: int, number: int) -> None:
        """See `queues.gds.Rounds`."""
        jobs, results, word = self._lanes[lane]
        self._deliver(jobs, results, count)
        mark_done(word, number)                              # a kernel of its own: the first one's stores are done where it begins


class CudaDevice:
    """The GPU under queue `gds` (queues.gds.Device). `slab`: address of slot 0 in its memory."""

    visible = False

    def __init__(self, device: torch.device, slab: int, state: State, pinned: bool = True) -> None:
        self.device, self.slab, self._pinned = device, slab, pinned
        self._allocated: list[int] = []
        with torch.cuda.device(device):
            self._runtime = cuda_runtime()
            self._deliver = Deliver(int(state.params[s.P_CODE_BYTES]), int(state.params[s.P_SCALE_BYTES]),
                                    generation=int(state.params[s.P_GENERATION]), device=device)
            preload(device, [self._deliver.launch, mark_launch(1)])

    def allocate(self, size: int) -> int:
        """Device memory by cudaMalloc, page aligned."""
        pointer = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            error = self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size + ALIGNMENT))
        if error != 0 or pointer.value is None:
            raise UnavailableError(f"CUDA gives no {size} bytes of staging for queue 'gds' (error {error}): lower hbm=")
        self._allocated.append(pointer.value)
        return -(-pointer.value // ALIGNMENT) * ALIGNMENT

    def rounds(self, lanes: int, jobs: int) -> CudaRounds:
        """Memory for the rounds of that many lanes."""
        return CudaRounds(self._deliver, lanes, jobs)

    def host_address(self, address: int) -> int:
        """The device's address of the arena's memory."""
        return device_address(address) if self._pinned else address

    def host_buffer(self, size: int) -> tuple[np.ndarray, int]:
        """Pinned memory, page aligned, at one address for both."""
        whole = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True)
        start = -whole.data_ptr() % PAGE
        return whole[start:start + size].numpy(), whole.data_ptr() + start

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Device and a stream of high priority are current in this thread."""
        with bound(self.device), torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1)):
            yield

    def close(self) -> None:
        """Free the staging. Idempotent."""
        with torch.cuda.device(self.device):
            while self._allocated:
                self._runtime.cudaFree(ctypes.c_void_p(self._allocated.pop()))
