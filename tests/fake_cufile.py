"""A stand-in for cuda.bindings.cufile and for the GPU: batches over real files into host memory, with faults on demand.

`FakeCufile` has the calls that queue `gds` makes, in the forms of the real bindings (structures by address), and is stricter
than cuFile: what cuFile merely would not like is noted in `complaints`. Bytes land when a read completes, not when it is
submitted, so staging that is used again too early is seen. `HostDevice` runs rounds of checks by the reference.
"""

import contextlib
import ctypes
import mmap
import os
import threading

import numpy as np

from ssdgram import _cufile, _gds
from ssdgram import _state as s
from ssdgram.kernels import reference
from ssdgram.queues.state import aligned

COMPLETE, CANCELED, TIMEOUT, FAILED = 16, 8, 32, 64


def at(address, dtype, count=1):
    """An array over memory at an address."""
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype, count)


class FakeCufile:
    """Attributes to set: `effect(number, offset)` of a read, `refuse_submit`, `refuse_status`, `random`, `events_most`, `hold`."""

    class cuFileError(Exception):
        """As the real one: it carries cuFile's words."""

    descr_dtype = np.dtype({"names": ["type", "handle", "fs_ops"], "offsets": [0, 8, 16], "itemsize": 24, "formats": [
        "<i4", np.dtype({"names": ["fd", "handle"], "formats": ["<i4", "<i8"], "offsets": [0, 0], "itemsize": 8}), "<i8"]})
    io_params_dtype = np.dtype({
        "names": ["mode", "u", "fh", "opcode", "cookie"], "offsets": [0, 8, 40, 48, 56], "itemsize": 64, "formats": [
            "<i4", [("batch", [("dev_ptr_base", "<i8"), ("file_offset", "<i8"), ("dev_ptr_offset", "<i8"), ("size_", "<u8")])],
            "<i8", "<i4", "<i8"]})
    io_events_dtype = np.dtype({"names": ["cookie", "status", "ret"], "formats": ["<i8", "<i4", "<u8"], "offsets": [0, 8, 16],
                                "itemsize": 24})
    stats_level1_dtype = np.dtype([(name, [("ok", "<u8"), ("err", "<u8")]) for name in _cufile.COUNTERS])

    def __init__(self, path="posix", seed=0):
        self.effect = lambda number, offset: None
        self.refuse_submit = lambda number: None             # words of an error, or None
        self.refuse_status = lambda number: None
        self.events_most, self.hold = 1 << 30, False
        self.random = np.random.default_rng(seed)
        self.path, self.max_batch, self.opens = path, 128, 0
        self.complaints, self.sizes, self.reads, self.statuses, self.most_busy = [], [], 0, 0, 0
        self.files, self.buffers, self.batches, self.given = {}, {}, {}, []
        self.lock = threading.Lock()

    # ------------------------------------------------------------ driver, files, buffers

    def driver_open(self):
        self.opens += 1

    def get_version(self):
        return 1200

    def driver_get_properties(self, address):
        record = at(address, _cufile.PROPERTIES)
        record["features"], record["max_batch"] = _cufile.BATCH_SUPPORTED, self.max_batch

    def set_stats_level(self, level):
        assert level >= 1

    def stats_start(self):
        pass

    def get_stats_l1(self, address):
        record = at(address, self.stats_level1_dtype)
        name = next(theirs for theirs, ours in _cufile.COUNTERS.items() if ours == self.path)
        record[name]["ok"] = len(self.sizes)

    def handle_register(self, address):
        descriptor = at(address, self.descr_dtype)[0]
        assert descriptor["type"] == 1
        self.files[1000 + len(self.files)] = int(descriptor["handle"]["fd"])
        self.given.append(int(descriptor["handle"]["fd"]))
        return 999 + len(self.files)

    def handle_deregister(self, handle):
        del self.files[handle]

    def buf_register(self, address, length, flags):
        assert flags == 0 and address % 4096 == 0
        self.buffers[address] = length

    def buf_deregister(self, address):
        del self.buffers[address]

    # ------------------------------------------------------------ batches

    def batch_io_set_up(self, count):
        if not 1 <= count <= self.max_batch:
            raise self.cuFileError("CU_FILE_INVALID_VALUE (5022): batch of that size")
        self.batches[1 + len(self.batches)] = {"room": count, "out": [], "cancelled": False}
        return len(self.batches)

    def batch_io_submit(self, batch, count, address, flags):
        with self.lock:
            words = self.refuse_submit(len(self.sizes))
            self.sizes.append(count)
            if words:
                raise self.cuFileError(words)
            mine = self.batches[batch]
            if mine["out"]:
                self.complaints.append("submitted over a batch with reads under way")
            if not 1 <= count <= mine["room"] or count > 128:
                self.complaints.append(f"{count} reads in a batch of {mine['room']}")
            for read in at(address, self.io_params_dtype, count).copy():
                part = read["u"]["batch"]
                base, offset, size = int(part["dev_ptr_base"]), int(part["dev_ptr_offset"]), int(part["size_"])
                if read["mode"] != 1 or read["opcode"] != 0 or size != 4096 or int(part["file_offset"]) % 4096:
                    self.complaints.append(f"descriptor {read}")
                if self.buffers and not any(start <= base and base + offset + size <= start + length
                                            for start, length in self.buffers.items()):
                    self.complaints.append("a read outside of the registered buffer")
                mine["out"].append((self.files[int(read["fh"])], int(part["file_offset"]), base + offset, int(read["cookie"]),
                                    self.effect(self.reads, int(part["file_offset"]))))
                self.reads += 1
            self.most_busy = max(self.most_busy, sum(bool(other["out"]) for other in self.batches.values()))

    def batch_io_get_status(self, batch, least, count_address, events_address, timeout_address):
        with self.lock:
            count = at(count_address, np.uint32)
            self.statuses += 1
            words = self.refuse_status(self.statuses)
            if words:
                raise self.cuFileError(words)
            mine, room = self.batches[batch], min(int(count[0]), self.events_most)
            events = at(events_address, self.io_events_dtype, int(count[0]))
            ready = [read for read in mine["out"] if mine["cancelled"] or not (self.hold or read[4] == "stall")]
            self.random.shuffle(ready)
            for event, read in zip(events, ready[:room]):
                mine["out"].remove(read)
                event["cookie"] = read[3]
                event["status"], event["ret"] = (CANCELED, 0) if mine["cancelled"] else self.complete(*read)
            count[0] = min(room, len(ready))

    @staticmethod
    def complete(fd, offset, address, cookie, effect):
        """The read's bytes land; (status, result) as cuFile gives them."""
        if effect == "timeout":
            return TIMEOUT, 0                                # nothing lands, now
        if isinstance(effect, tuple) and effect[0] == "error":
            return FAILED, np.uint64(-effect[1] & ((1 << 64) - 1))
        page = mmap.mmap(-1, 4096)                           # aligned, as O_DIRECT wants it
        data = bytearray(page[:os.preadv(fd, [page], offset)])
        if isinstance(effect, tuple) and effect[0] == "short":
            del data[effect[1]:]
        if isinstance(effect, tuple) and effect[0] == "flip":
            data[effect[1]] ^= 1
        at(address, np.uint8, max(1, len(data)))[:len(data)] = np.frombuffer(bytes(data), np.uint8)
        return COMPLETE, len(data)

    def batch_io_cancel(self, batch):
        with self.lock:
            self.batches[batch]["cancelled"] = True

    def batch_io_destroy(self, batch):
        if self.batches[batch]["out"]:
            self.complaints.append("destroyed a batch with reads under way")
        del self.batches[batch]

    @property
    def clean(self):
        """Whether everything that was registered or set up was given back, and nothing was done that cuFile would not like."""
        return not (self.files or self.buffers or self.batches or self.complaints)


class HostRounds:
    """Rounds by the reference, at once, or (while `device.hold`) when `device.release` is called."""

    def __init__(self, device, lanes, jobs):
        self.device, self.most = device, jobs
        self.jobs, self.results = aligned(lanes * jobs * 8, np.int64), aligned(lanes * jobs, np.int32)
        self.words = aligned(lanes * 8, np.int64)

    def launch(self, lane, count, number):
        if self.device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.device.launches.append(count)
        if self.device.hold:
            self.device.held.append((self, lane, count, number))
        else:
            self.run(lane, count, number)

    def run(self, lane, count, number):
        jobs = self.jobs.reshape(-1, self.most, 8)[lane]
        reference.deliver(jobs, count, self.device.generation, self.device.code_bytes, self.device.scale_bytes,
                          self.results.reshape(-1, self.most)[lane])
        self.words[8 * lane] = number


class HostDevice:
    """Host memory in the place of a GPU's."""

    visible, device = True, "cpu"

    def __init__(self, state, slab=None):
        self.slab = state.slab.ctypes.data if slab is None else slab
        self.generation, self.code_bytes, self.scale_bytes = (
            int(state.params[word]) for word in (s.P_GENERATION, s.P_CODE_BYTES, s.P_SCALE_BYTES))
        self.hold, self.broken, self.closed, self.held, self.launches, self.memory = False, False, False, [], [], []

    def allocate(self, size):
        self.memory.append(aligned(size, np.uint8))
        return self.memory[-1].ctypes.data

    def rounds(self, lanes, jobs):
        return HostRounds(self, lanes, jobs)

    def host_address(self, address):
        return address

    def host_buffer(self, size):
        buffer = aligned(size, np.uint8)
        return buffer, buffer.ctypes.data

    @contextlib.contextmanager
    def entered(self):
        yield

    def release(self):
        """Run the rounds that were held."""
        self.hold = False
        while self.held:
            rounds, *rest = self.held.pop(0)
            rounds.run(*rest)

    def close(self):
        self.closed = True


class FakePort(_gds.Port):
    """What `_gds.open_port` gives a store in the tests: device="cpu", its slab in host memory beside the arena."""

    def queue_arguments(self, store):
        slots = len(store._plan.slots)
        self.memory = aligned(slots * store._stride, np.uint8)
        store._state = store._state._replace(slab=self.memory)
        self.host = HostDevice(store._state)
        return {"cufile": self.cufile, "device": self.host, "batch_most": self.batch_most}
