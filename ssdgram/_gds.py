"""cuFile opened for a store: what its queue takes, and what its statistics say. Torch and CUDA are imported by what needs them.

Invariant: no cuFile driver is opened before CUDA has answered, nor without a time-out. It knows neither pages nor slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ssdgram import _cufile
from ssdgram.errors import ConfigError

if TYPE_CHECKING:
    from ssdgram.store import Store


class Port:
    """cuFile, opened for a store: what its queue takes, and what its statistics say."""

    def __init__(self, cufile: Any) -> None:
        self.cufile = cufile
        self.properties = _cufile.properties(cufile)
        self._before = _cufile.counters(cufile)

    @property
    def batch_most(self) -> int:
        """Entries that the driver takes in a batch."""
        return min(128, self.properties.get("max_batch") or 128)

    def counters(self) -> dict[str, int]:
        """Batch submissions since this store was opened, by cuFile's own count; other stores of the process count as well."""
        return {name: count - self._before.get(name, 0) for name, count in _cufile.counters(self.cufile).items()}

    @property
    def mode(self) -> str:
        """The path that cuFile's counters prove: "gds", "p2p", "compatibility", "unknown"."""
        return _cufile.mode({}, self.counters())

    def queue_arguments(self, store: Store) -> dict[str, Any]:
        """What GdsQueue takes beside the state of a store whose CUDA side stands."""
        from ssdgram._gds_cuda import CudaDevice

        side = store._cuda
        if side is None:
            raise ConfigError("queue='gds' without a CUDA device")
        return {"cufile": self.cufile, "batch_most": self.batch_most, "device": CudaDevice(side.device, side.slab, store._state)}


def open_port(device_name: str) -> Port:
    """cuFile for a store on that device: ConfigError for the CPU, UnavailableError with what to do without GPU, bindings or driver."""
    if device_name == "cpu":
        raise ConfigError("queue='gds' with device='cpu': its pages land in GPU memory; open with device='cuda', or with queue='auto'")
    import torch

    from ssdgram._cuda import checked_device
    from ssdgram._gds_cuda import bound

    device = checked_device(device_name)
    cufile = _cufile.load()
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)                           # CUDA has answered: only now may the cuFile driver be opened
    _cufile.in_time(lambda: _cufile.open_driver(cufile), "opening the cuFile driver", lambda: bound(device))
    return Port(cufile)
