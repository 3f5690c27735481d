"""Queue `gds`: pages go from the drive to GPU memory by cuFile batches; a kernel checks their rows and copies them to their slots.

    turn (compiled, no GIL) ─► SUBMIT  cuFileBatchIOSubmit       ─► turn
                            ─► STATUS  cuFileBatchIOGetStatus    ─► turn       one call of Python per batch, none per read
                            ─► CHECK   a round of kernels.deliver ─► turn

The slab lives in HBM, slots stay offsets: planner, gather and all else are as with the other queues. Chosen like this because
then no byte passes the CPU and nothing but the slab's base address changes; bundles of both tiers at once would need a second
free list. What is in flight is `_lanes`'s; cuFile and CUDA are handed in (by `_gds.Port`), so the suite
runs the same code over a fake of both. A lane that cuFile fails over is lost, its pages are read again; without lanes left
the reader goes on with preads into pinned memory, which the kernel checks as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ssdgram._compiled import compile_for
from ssdgram._cufile import CALL_TIMEOUT_S, CallTimedOut, in_time
from ssdgram._state import FILE, P_DEPTH, State, reader_line
from ssdgram.errors import UnavailableError
from ssdgram.queues import _lanes as lanes_of
from ssdgram.queues._calls import PAGE_BYTES
from ssdgram.queues._handoff import R_ROOM
from ssdgram.queues._lanes import BATCH_MOST, CANCEL, CHECK, JOBS, STATUS, SUBMIT, Lanes, turn
from ssdgram.queues._readers import Readers
from ssdgram.queues.state import new_state

log = logging.getLogger("ssdgram")

MOST_LANES = 16
PR_SET_TIMERSLACK = 29
_kept: list[Any] = []                                        # memory that a drive may still write to


class Rounds(Protocol):
    """Memory of a reader's rounds of checks, which CPU and GPU both see, and their launch."""

    jobs: np.ndarray                                         # int64 [lanes * JOBS * 8]
    results: np.ndarray                                      # int32 [lanes * JOBS]
    words: np.ndarray                                        # int64 [lanes * 8]

    def launch(self, lane: int, count: int, number: int) -> None:
        """Start `kernels.deliver` on the first `count` jobs of a lane, then the store of `number` into its word. RuntimeError."""


class Device(Protocol):
    """The GPU as the queue needs it."""

    visible: bool                                            # whether the CPU may touch `allocate`d memory (a fake's)
    slab: int                                                # address of slot 0
    device: Any                                              # the torch.device

    def allocate(self, size: int) -> int:
        """Address of `size` bytes of device memory, page aligned, kept until `close`."""

    def rounds(self, lanes: int, jobs: int) -> Rounds:
        """Memory for the rounds of that many lanes."""

    def host_address(self, address: int) -> int:
        """The device's address of host memory of the store's arena."""

    def host_buffer(self, size: int) -> tuple[np.ndarray, int]:
        """uint8 [size] of page-aligned host memory that the device reads, and its address there."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Make device and stream current in this thread."""

    def close(self) -> None:
        """Free what was allocated."""


def shape_of(depth: int, batch_most: int = BATCH_MOST) -> tuple[int, int]:
    """(lanes, entries of each) for that many reads in flight: several lanes, at most 128 entries (cuFile's limit) in each."""
    lanes = max(min(2, depth), min(MOST_LANES, depth // BATCH_MOST))
    return lanes, max(1, min(depth // lanes, BATCH_MOST, batch_most))


class GdsQueue(Readers):
    """cuFile batches over `state`'s readers. Raises UnavailableError, with cuFile's own words, if it cannot."""

    name = "gds"

    def __init__(self, state: State, reason: str, affinity: Sequence[int] | None = None, *, cufile: Any, device: Device,
                 batch_most: int = BATCH_MOST) -> None:
        super().__init__(state, reason, affinity)
        self.cufile, self.device = cufile, device
        self._descriptors: list[int] = []
        self._files: list[int] = []
        self._buffer = 0
        self._batches: list[list[int]] = []
        self._lanes: list[Lanes] = []
        self._rounds: list[Rounds] = []
        self._closed = False
        check_layout(cufile)
        self.lanes, self.entries = shape_of(int(state.params[P_DEPTH]), batch_most)
        self._size = self.lanes * self.entries * PAGE_BYTES  # of a reader's staging
        self._staging = device.allocate(self.readers * self._size)
        try:
            in_time(self._set_up, "cuFile's set-up", device.entered)
            in_time(self._try_out, "a first batch of one read", device.entered)
        except CallTimedOut:
            self._keep()
            raise
        except UnavailableError:
            self.close()
            raise
        except (cufile.cuFileError, RuntimeError, OSError) as error:
            self.close()
            raise UnavailableError(f"queue 'gds': cuFile answered: {error}; open with queue='auto', see `ssdgram doctor`") from error
        self.compile()

    # ------------------------------------------------------------ set-up

    def _set_up(self) -> bool:
        """Register files and staging, make batch handles and arrays. What it has to do without becomes a notice."""
        cufile, state, notices = self.cufile, self.state, list[str]()
        for record in state.files:
            descriptor = np.zeros(1, cufile.descr_dtype)
            self._descriptors.append(os.dup(int(record["fd"])))              # cuFile's own, for as long as it knows the file
            descriptor["type"], descriptor["handle"]["fd"] = 1, self._descriptors[-1]         # CU_FILE_HANDLE_TYPE_OPAQUE_FD
            self._files.append(int(cufile.handle_register(descriptor.ctypes.data)))
        try:
            cufile.buf_register(self._staging, self.readers * self._size, 0)
            self._buffer = self._staging
        except cufile.cuFileError as error:
            notices.append(f"staging in GPU memory is not registered with cuFile ({error}): reads pass its bounce buffers")
        for _ in range(self.readers):
            batches: list[int] = []
            self._batches.append(batches)
            for _ in range(self.lanes):
                batches.append(int(cufile.batch_io_set_up(self.entries)))
        for reader in range(self.readers):
            self._rounds.append(self.device.rounds(self.lanes + 1, JOBS))
            self._lanes.append(self._arrays(reader, self._rounds[reader]))
        self.notices = tuple(notices)
        return True

    def _arrays(self, reader: int, rounds: Rounds) -> Lanes:
        """The private arrays of one reader."""
        state, depth = self.state, int(self.state.params[P_DEPTH])
        entries = (self.lanes + 1) * self.entries
        own = np.zeros(lanes_of.OWN_WORDS, np.int64)
        plain = state.staging.ctypes.data + reader * depth * PAGE_BYTES
        for word, value in ((lanes_of.LANES, self.lanes), (lanes_of.ENTRIES, self.entries),
                            (lanes_of.STAGING, self._staging + reader * self._size), (lanes_of.VISIBLE, int(self.device.visible)),
                            (lanes_of.PLAIN_HOST, plain), (lanes_of.PLAIN_DEVICE, self.device.host_address(plain)),
                            (lanes_of.SLAB, self.device.slab), (lanes_of.LANES_LEFT, self.lanes)):
            own[word] = value
        state.control[reader_line(reader) + R_ROOM] = min(depth, self.entries)
        return Lanes(own=own, lanes=np.zeros(self.lanes + 1, lanes_of.LANE_RECORD), entries=np.zeros(entries, lanes_of.ENTRY),
                     descriptors=np.zeros(self.lanes * self.entries * 8, np.int64), events=np.zeros(self.entries * 3, np.int64),
                     got=np.zeros(2, np.uint32), handles=np.array(self._files, np.int64), jobs=rounds.jobs, results=rounds.results,
                     words=rounds.words, job_target=np.zeros((self.lanes + 1) * JOBS, np.int32),
                     job_entry=np.zeros((self.lanes + 1) * JOBS, np.int32), again=np.zeros(depth, np.int32),
                     again_background=np.zeros(depth, np.int32), found=np.zeros(max(1, self.entries), np.int32))

    def _try_out(self) -> bool:
        """Read the first page of the first file by a batch of one: what cuFile cannot do it says here, not when it matters."""
        lanes, own = self._lanes[0], self._lanes[0].own
        words = lanes.descriptors
        words[:8] = (1, own[lanes_of.STAGING], 0, 0, PAGE_BYTES, self._files[0], 0, 1)
        self.cufile.batch_io_submit(self._batches[0][0], 1, words.ctypes.data, 0)
        limit, events = np.array([0, 100_000_000], np.int64), lanes.events
        for _ in range(int(CALL_TIMEOUT_S * 10) - 5):
            lanes.got[0] = 1
            self.cufile.batch_io_get_status(self._batches[0][0], 1, lanes.got.ctypes.data, events.ctypes.data, limit.ctypes.data)
            status = int(events[lanes_of.E_STATUS]) & 0xFFFFFFFF
            if lanes.got[0] == 1 and status not in (lanes_of.WAITING, lanes_of.PENDING):
                break
        else:
            raise CallTimedOut("queue 'gds': the first read by a cuFile batch does not complete; open with queue='auto'")
        if status != lanes_of.COMPLETE:
            raise UnavailableError(f"queue 'gds': the first read by a cuFile batch came to status {status}, result "
                                   f"{int(events[lanes_of.E_RESULT])}; open with queue='auto', see `ssdgram doctor`")
        words[:8] = 0
        return True

    def compile(self) -> None:
        """Load the loop from the cache of compiled code, or compile it."""
        compile_for(turn, self.state, 0, self._lanes[0], 0)

    # ------------------------------------------------------------ the readers' threads

    def prepare(self, reader: int) -> None:
        """Have this thread's naps of 40 us end in time, not 50 us later as Linux lets them by default."""
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)

    def serve(self, reader: int) -> None:
        """Make the calls that the compiled loop returns for, until STOP."""
        lanes, batches, rounds = self._lanes[reader], self._batches[reader], self._rounds[reader]
        own, cufile, action, left = lanes.own, self.cufile, SUBMIT, self.lanes
        size = self.entries * 64
        descriptors, events, got = lanes.descriptors.ctypes.data, lanes.events.ctypes.data, lanes.got.ctypes.data
        at_once = np.zeros(2, np.int64)
        limit = at_once.ctypes.data
        with self.device.entered():
            while True:
                action = int(turn(self.state, reader, lanes, action))
                lane = int(own[lanes_of.LANE])
                if own[lanes_of.LANES_LEFT] != left:
                    left = int(own[lanes_of.LANES_LEFT])
                    log.warning("queue gds: reader %d gave a batch handle up, its pages are read another way; %d of %d are left", reader,
                                left, self.lanes)
                try:
                    if action == SUBMIT:
                        cufile.batch_io_submit(batches[lane], int(own[lanes_of.COUNT]), descriptors + lane * size, 0)
                    elif action == STATUS:
                        cufile.batch_io_get_status(batches[lane], 0, got, events, limit)
                    elif action == CHECK:
                        rounds.launch(lane, int(own[lanes_of.COUNT]), int(lanes.lanes[lane]["number"]))
                    elif action == CANCEL:
                        if lanes.lanes[lane]["reading"] > 0:
                            cufile.batch_io_cancel(batches[lane])
                    else:
                        return                               # FINISHED
                except cufile.cuFileError as error:
                    if action != CANCEL:
                        own[lanes_of.LOST] = 1
                        log.warning("queue gds: cuFile failed over batch handle %d of reader %d: %s", lane, reader, error)
                except RuntimeError as error:
                    if action != CHECK:
                        raise
                    own[lanes_of.BROKEN] = 1
                    log.error("queue gds: the GPU takes no more work (%s): every read fails from now on; close the store", error)

    # ------------------------------------------------------------ the end

    @property
    def _unsafe(self) -> bool:
        """Whether cuFile may still write to the staging: a call under way, reads in the drive, or a lane that was lost."""
        return self.stuck or any((lanes.lanes["lost"] != 0).any() or (lanes.lanes["reading"] != 0).any() for lanes in self._lanes)

    def close(self) -> None:
        """Free batch handles, registrations and staging. Does nothing while a reader still runs. Idempotent."""
        if self._closed or any(thread.is_alive() for thread in self._threads):
            return
        self._closed = True
        if self._unsafe:
            self._keep()
            return
        with contextlib.suppress(CallTimedOut):
            in_time(self._tear_down, "cuFile's tear-down", self.device.entered)
            self.device.close()
            return
        self._keep()

    def _tear_down(self) -> bool:
        for batch in [batch for batches in self._batches for batch in batches]:
            self.cufile.batch_io_destroy(batch)
        for file in self._files:
            self.cufile.handle_deregister(file)
        if self._buffer:
            with contextlib.suppress(self.cufile.cuFileError):
                self.cufile.buf_deregister(self._buffer)
        self.forget()
        return True

    def forget(self) -> None:
        """Close the descriptors that cuFile was given: it knows them no more, or this is a forked child."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _keep(self) -> None:
        """Leave everything as it is until the process ends."""
        self._closed = True
        _kept.append((self.device, self._lanes, self._rounds))
        log.error("queue gds: reads may still be under way in cuFile: their GPU memory is kept until the process ends")


def compile_ahead() -> None:
    """Make the compiled loop of the readers, without cuFile and GPU (for `ssdgram warmup`)."""
    state, none = new_state(np.zeros(1, FILE), depth=1), np.zeros(0, np.int32)
    words = np.zeros(1, np.int64)
    compile_for(turn, state, 0, Lanes(
        own=words, lanes=np.zeros(1, lanes_of.LANE_RECORD), entries=np.zeros(1, lanes_of.ENTRY), descriptors=words, events=words,
        got=np.zeros(2, np.uint32), handles=words, jobs=words, results=none, words=words, job_target=none, job_entry=none, again=none,
        again_background=none, found=none), 0)


def check_layout(cufile: Any) -> None:
    """UnavailableError unless cuFile's descriptors and events lie in memory as the compiled loop writes and reads them."""
    params, events = cufile.io_params_dtype, cufile.io_events_dtype
    found = [params.itemsize, *(params.fields[name][1] for name in ("mode", "u", "fh", "opcode", "cookie")), events.itemsize,
             *(events.fields[name][1] for name in ("cookie", "status", "ret")), cufile.descr_dtype.itemsize]
    if found != [64, 0, 8, 40, 48, 56, 24, 0, 8, 16, 24]:
        raise UnavailableError(f"queue 'gds': cuda.bindings.cufile lays its structs out in a way that is not known here ({found}); "
                               f"open with queue='auto'")

