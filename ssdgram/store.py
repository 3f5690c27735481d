"""Store: an open SSDGram store. It serves the rows of any tokens out of a DRAM cache over page reads.

    store = ssdgram.open(out, dram="1GiB")
    with store.prefetch(tokens, lookback=before) as batch:
        rows = batch.rows(layer)

One compiled planner thread and a few compiled reader threads do the work; a call here copies tokens, fills one record and
rings a bell. Any thread may call a Store. It knows the arrays by name only; what happens in them is the planner's business.
Invariant: after `close` (or in a forked child) every call raises, and no thread of the store runs.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import operator
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssdgram import _gds, _numa, _opening, machine, queues
from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._arena import Arena
from ssdgram._budget import PRIVATE, parse_size, sizes
from ssdgram._calls import BAD_ID, NO_ROW, free_row, hand_back, release, ring, submit, wait_free
from ssdgram._compiled import compile_for
from ssdgram._crew import crew_loop, wake_crew
from ssdgram._kept import keep, lay_out
from ssdgram._planner import planner_loop
from ssdgram._warming import Warming
from ssdgram.batch import Batch
from ssdgram.errors import (
    BudgetError,
    ConfigError,
    ForkedStoreError,
    HotSetError,
    SSDGramError,
    StoreBusyError,
    StoreClosedError,
    StoreReplacedError,
    UnavailableError,
)
from ssdgram.hotset import load as load_hotset
from ssdgram.hotset import save as save_hotset
from ssdgram.kernels.gather_cpu import RowFormat, row_format
from ssdgram.kernels.hash import ngram_keys
from ssdgram.layout.files import load_token_map, resolve
from ssdgram.layout.manifest import MANIFEST, Manifest, identity, stamp
from ssdgram.layout.page import PAGE_BYTES
from ssdgram.sequence import Sequence, bad_id, flatten
from ssdgram.stats import WAIT_BUCKETS, Stats, snapshot

if TYPE_CHECKING:
    from ssdgram._cuda import CudaSide
    from ssdgram.frame import Frame
    from ssdgram.staging import Staging
    from ssdgram.tools.trace_record import Recorder

log = logging.getLogger("ssdgram")
PRIORITIES = {"step": s.STEP, "background": s.BACKGROUND}
VARIABLE = "SSDGRAM_TRACE_RECORD"                            # what to record, and where (ssdgram.tools.trace_record)
SCALE_RULES = ("spec", "vllm", "sglang")                     # kernels/dequant.py
PLANNED_HERE = 512                                           # tokens of a step that the caller's thread plans, if the planner sleeps
KEPT_PLAN = 1 << 13                                          # entries of a plan, or tokens, whose memory is kept for the row's next batch
WARM_WINDOW = 512                                            # flat tokens that `warm` plans at a time
ROW_WAIT_S = 5.0                                             # how long `prefetch` waits for a batch that is being released
_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_leaked: list[Any] = []                                      # memory that a drive may still write to
_process = os.getpid()                                       # this one: a forked child writes down its own (_forget_all)
_NO_IDS = np.empty(0, np.int32), np.empty(0, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a store uses the machine. The defaults follow the CPU set and the cgroup; nothing here changes a result."""

    readers: int | None = None                               # reader threads; None: by queue and CPUs
    depth: int | None = None                                 # reads in the drive per reader; None: by queue
    background_depth: int | None = None                      # of those, over all readers, for background reads; None: half
    crew: int | None = None                                  # threads that help to plan large batches; None: by CPUs
    affinity: tuple[int, ...] | None = None                  # CPUs of the store's threads; None: the GPU's NUMA node's, if any
    batches: int = 256                                       # unreleased batches at once
    retries: int = 2                                         # re-reads before the last one by another path
    spin_us: float = 20.0                                    # idle spinning before a thread sleeps
    degraded_after_s: float = 5.0                            # a read of that age makes the store degraded
    degraded_wait_s: float = 0.25                            # how long a wait may take then
    identity_check_s: float = 1.0                            # how often the manifest is looked at

    def __post_init__(self) -> None:
        cpus = os.sched_getaffinity(0)
        for name, least, most in (("readers", 1, 256), ("crew", 0, 63), ("depth", 1, 4096), ("background_depth", 1, 1 << 20),
                                  ("batches", 2, 1 << 16), ("retries", 0, 1000)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and least <= value <= most):
                raise ConfigError(f"Tuning: {name} is {value!r}: expected {least} .. {most}")
        for name in ("spin_us", "degraded_after_s", "degraded_wait_s", "identity_check_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ConfigError(f"Tuning: {name} is {getattr(self, name)!r}: expected 0 .. 1e6")
        if self.affinity is not None and not set(self.affinity) & cpus:
            raise ConfigError(f"Tuning: affinity is {self.affinity!r}: expected some of this process's CPUs, {sorted(cpus)}")


def open(out: str | os.PathLike[str], dram: str | int = "1GiB", hbm: str | int = "0", device: str = "cpu", queue: str = "auto",
         layers: SequenceType[int] | None = None, columns: SequenceType[int] | range | slice | None = None,
         owner: tuple[int, int] | None = None, stripes: SequenceType[str | os.PathLike[str]] | None = None,
         hotset: str | os.PathLike[str] | None = None, *, scale_rule: str = "spec", tuning: Tuning | None = None) -> Store:
    """Open the store that `ssdgram convert` made in folder `out`.

    `dram`, `hbm`: bytes, or "512MiB", "1.5GiB": hard budgets, tables and staging included. `device`: "cpu" or a CUDA device.
    `queue`: "auto", "uring", "threads" or "gds" (GPUDirect Storage: the bundles then lie in `hbm`, and `dram` pays for tables only).
    `layers`: decoder layers to serve; `columns`: ascending column numbers; `owner` = (rank, world): serve only the bundles whose
    hash falls to this rank, zeros elsewhere. `stripes`: where the roots are now.
    `hotset`: a file outside `out`, read now if it is there and of this store, written at close: the cache starts with it.
    `scale_rule`: what scale bytes 0 and 255 are in `rows`: 2^-127 and NaN ("spec"), 0 and infinity ("vllm"), 2^-127 and infinity
    ("sglang"); `packed` hands them out as they are.
    Raises ManifestError, FormatError, IdentityError, BudgetError, ConfigError, UnavailableError.
    """
    store = Store(out, dram=dram, hbm=hbm, device=device, queue=queue, layers=layers, columns=columns, owner=owner, stripes=stripes,
                  hotset=hotset, scale_rule=scale_rule, tuning=tuning or Tuning())
    if VARIABLE in os.environ:                               # set by `ssdgram trace record` alone
        from ssdgram.tools.trace_record import from_environment

        try:
            from_environment(store)
        except BaseException:
            store.close()
            raise
    return store


class Store:
    """An open store; made by `ssdgram.open`. Also a context manager that closes it."""

    _made_by = "open"
    scale_rule = "spec"                                      # what the rows of `open(scale_rule=...)` follow
    numa_node: int | None = None                             # the GPU's, if the machine has several and tells: memory and threads are there

    def __init__(self, out: str | os.PathLike[str], *, dram: str | int, hbm: str | int, device: str, queue: str,
                 layers: SequenceType[int] | None, columns: SequenceType[int] | range | slice | None, owner: tuple[int, int] | None,
                 stripes: SequenceType[str | os.PathLike[str]] | None, hotset: str | os.PathLike[str] | None, tuning: Tuning,
                 scale_rule: str = "spec") -> None:
        self._closed = True                                  # until everything stands
        self._pid = os.getpid()
        self.path, self.tuning, self.device, self.scale_rule = Path(out), tuning, device, scale_rule
        if scale_rule not in SCALE_RULES:
            raise ConfigError(f"scale_rule={scale_rule!r}: expected one of {list(SCALE_RULES)}")
        self._stamp, self._identity = stamp(out), identity(out)
        self.manifest = Manifest.load(out)
        self.geometry = self.manifest.geometry
        self._selection = _opening.Selection.of(self.geometry, layers, columns)
        self.layers, self.columns = self._selection.layers, self._selection.columns
        self._token_map = self.geometry.checked_map(load_token_map(out, self.manifest))
        self._vocabulary = self.geometry.vocabulary(self._token_map)
        self._owner = _checked_owner(owner)
        self.notices: list[str] = []
        self._lock = threading.RLock()                       # a dropped Batch may be released by the collector at any point
        self._tickets = 0
        if hotset is not None and not Path(hotset).name:
            raise ConfigError(f"hotset={hotset!r}: expected the path of a file")
        if hotset is not None and Path(os.path.realpath(hotset)).is_relative_to(os.path.realpath(out)):
            raise ConfigError(f"hotset={os.fspath(hotset)!r} lies in the store's folder {self.path}: expected a file outside of it, so "
                              f"that the store stays what was converted; give another place")
        self._hotset, self.hot_bundles, self.hotset_load_s = hotset, 0, 0.0
        self._cuda: CudaSide | None = None
        self._gds: _gds.Port | None = None
        self._recorder: Recorder | None = None
        self._row_formats: dict[int, RowFormat] = {}
        self._alive: dict[int, Any] = {}                     # row -> tokens and flags that its addresses point into
        self._row_memory: dict[int, tuple[np.ndarray, np.ndarray]] = {}          # row -> slots and held, kept for the next batch
        self._leaving: set[int] = set()                      # rows handed back, or of `warm`: free as soon as the planner is done
        self._large: set[int] = set()                        # of those, the ones whose memory is not kept
        self._wait_counts, self._wait_us_sum, self._served_bytes = [0] * WAIT_BUCKETS, 0.0, 0
        self._per_position = len(self.layers), self.geometry.orders
        self._longest_ngram = self.geometry.max_ngram
        all_paths = resolve(out, self.manifest, stripes)
        self._paths = [all_paths[index * self.geometry.columns + column]
                       for index in self._selection.indices for column in self.columns]
        self._pairs, refused = _opening.open_files(self._paths)
        try:
            if refused:
                self._note(f"no O_DIRECT for {len(refused)} of {len(self._paths)} files (such as {refused[0]}): their reads go through "
                           f"the page cache, which costs memory and copies")
            self._start(parse_size(dram, "dram"), parse_size(hbm, "hbm"), queue)
        except BaseException:
            self._close_files()
            raise

    def _start(self, budget: int, hbm_budget: int, queue_name: str) -> None:
        """Memory, GPU, queue, threads: each given back if what comes after it fails."""
        tuning, device = self.tuning, self._choose_gpu(queue_name, hbm_budget)
        affinity = tuning.affinity or (None if self.numa_node is None else _numa.cpus_of(self.numa_node)) or None
        files = _opening.file_records(self.manifest, self._selection, self._pairs)
        _opening.check_first_pages(self.manifest, files, self._paths)
        chosen, _ = queues.resolve(queue_name)
        readers = tuning.readers or queues.default_readers(chosen)
        depth = tuning.depth or queues.default_depth(chosen)
        stride = _opening.slot_stride(self.geometry, self._selection)
        hbm_slots, slab_slots = hbm_budget // stride, None
        if self._gds is not None:                            # the slab itself lies in GPU memory, so no tier of copies does
            hbm_slots, slab_slots = 0, max(0, hbm_budget - readers * depth * PAGE_BYTES) // stride
        shape = _opening.shape_of(self.geometry, self._selection, len(self._token_map), readers, depth, tuning.batches,
                                  hbm_slots, slab_slots, default_crew(affinity) if tuning.crew is None else tuning.crew)
        self._sizes = sizes(budget, shape)
        self._budget, self._hbm_budget = budget, hbm_budget
        self._line, self._stride = p.batch_line(shape.layers), shape.stride
        self._gather_groups = _opening.gather_groups(self._selection)
        self.capacity = self._sizes.slots - shape.groups     # distinct bundles that one batch may hold
        with contextlib.ExitStack() as undo:
            self._take_memory(budget)
            undo.callback(self._arena.close)
            self._state, self._plan = lay_out(self._arena)
            _opening.fill(self._state, self._plan, manifest=self.manifest, selection=self._selection, files=files,
                          token_map=self._token_map, sizes=self._sizes, shape=shape, owner=self._owner,
                          background_depth=tuning.background_depth or max(1, readers * self._sizes.depth // 2),
                          retries=tuning.retries, spin_ns=int(tuning.spin_us * 1000), degraded_ns=int(tuning.degraded_after_s * 1e9))
            if device is not None:
                from ssdgram import _cuda

                self._cuda = _cuda.CudaSide(self, device, hbm_slots, slab_slots)
                undo.callback(self._cuda.close)
            gds = None if self._gds is None else self._gds.queue_arguments(self)
            self._queue = queues.choose(queue_name, self._state, readers, self._sizes.depth, affinity, gds)
            undo.callback(self._queue.close)
            self.queue = self._queue.name
            self.notices.extend(self._queue.notices)
            self._kept = keep(self._state, self._plan)
            self._address = self._kept.ctypes.data
            compile_for(planner_loop, 0, 0)
            compile_for(crew_loop, 0, 0)
            if self._hotset is not None:
                begun = time.monotonic()
                self.hot_bundles = load_hotset(self, self._hotset)
                self.hotset_load_s = time.monotonic() - begun
            self._queue.start()
            self._start_threads(shape.crew, affinity)
            undo.pop_all()
        self._closed = False
        _open_stores.add(self)
        self._look_again_ns = time.monotonic_ns() + int(tuning.identity_check_s * 1e9)
        try:
            self._read_dead_bundles()
        except BaseException:
            self.close()
            raise
        self._plan.control[p.C_STATE] = p.SERVING
        if device is not None and queue_name == "auto" and machine.nvidia_fs():
            self.notices.append("nvidia-fs is loaded: queue='gds' would read pages into GPU memory, past DRAM (docs/gds.md)")
            log.info("%s: %s", self.path, self.notices[-1])
        if self._gds is not None:
            log.info("queue gds: mode %s, by cuFile's own counters %s", self._gds.mode, self._gds.counters())

    def _choose_gpu(self, queue_name: str, hbm_budget: int) -> Any:
        """The torch device, None: no GPU. Notes its NUMA node, and opens GPUDirect Storage if that was asked for."""
        if queue_name not in queues.NAMES:
            raise ConfigError(f"queue={queue_name!r}: expected one of {list(queues.NAMES)}")
        if queue_name == "gds":
            self._gds = _gds.open_port(self.device)
        if self.device == "cpu":
            if hbm_budget > 0 and self._gds is None:
                raise ConfigError(f"hbm={hbm_budget} bytes with device='cpu': an HBM tier needs a CUDA device")
            return None
        from ssdgram import _cuda

        device = _cuda.checked_device(self.device)
        self.numa_node = _numa.node_of_gpu(_cuda.bus_id(device))
        return device

    def _take_memory(self, budget: int) -> None:
        """The arena, on the GPU's NUMA node before anything touches it. BudgetError if the machine has less."""
        there = min(count for count in (machine.memory()[0], machine.memory_limit(), 1 << 62) if count)
        if self._sizes.total > there:
            raise BudgetError(f"dram is {budget} bytes: this machine (or its cgroup) has {there} bytes of memory; give less")
        try:
            self._arena = Arena(self._sizes.specs, private=PRIVATE)
        except (OSError, OverflowError) as error:
            raise BudgetError(f"dram is {budget} bytes: this machine does not give that much ({error}); give less") from error
        if self.numa_node is not None and not self._arena.prefer_node(self.numa_node):
            self._note(f"the system does not take memory from NUMA node {self.numa_node}, where the GPU is: bind the process there")

    def _start_threads(self, crew: int, affinity: tuple[int, ...] | None) -> None:
        """The planner's thread and its crew's. UnavailableError, and all are stopped, the readers' too, if the system refuses one."""
        self._threads = [threading.Thread(target=_run, args=(planner_loop, self._address, -1, affinity), name="ssdgram-planner",
                                          daemon=True)]
        self._threads += [threading.Thread(target=_run, args=(crew_loop, self._address, 1 + k, affinity), name=f"ssdgram-crew-{k}",
                                           daemon=True) for k in range(crew)]
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except RuntimeError as error:                        # a limit of threads
            self._state.control[s.STOP] = 1
            ring(self._address)
            wake_crew(self._plan.crew_futex)
            for thread in started:
                thread.join()
            self._queue.wake_all()
            self._queue.join()
            raise UnavailableError(f"the planner's threads cannot be started ({error}): raise the limit of threads (ulimit -u, the "
                                   f"cgroup's pids.max), or open with Tuning(crew=0)") from error

    def _read_dead_bundles(self) -> None:
        """Read what a position that takes no part hashes to; the batch is never released, so it is never evicted."""
        dead = self._submit([Sequence(np.zeros(1, np.int32), participates=np.zeros(1, bool))], "step", window=0, ticket=0)
        try:
            dead.wait()
        finally:
            dead._disown()
        self.capacity = len(self._plan.slots) - int(self._plan.batches["need"][dead._row])

    # ------------------------------------------------------------ the public face

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as in the checkpoint: codes, then scales."""
        return self.geometry.row_bytes

    @property
    def dim(self) -> int:
        """Values of a row."""
        return self.geometry.row_dim

    def prefetch(self, tokens: Any, priority: str = "step", *, participates: Any = None, lookback: Any = None,
                 lookback_participates: Any = None) -> Batch:
        """Begin to bring the bundles of the tokens into their slots; returns at once.

        `tokens`: a Sequence, a list of Sequences (concatenated in order), or raw ids [T] (integers; NumPy, torch or a list) with
        the keyword arguments of Sequence. `priority`: "step", or "background" for what is not needed by the next step. The
        tokens are copied. TokenError for a bad id; StoreBusyError if too many batches are unreleased; StoreReplacedError.
        """
        self._check()
        self._expect_step()
        sequences = _sequences(tokens, participates, lookback, lookback_participates)
        if priority not in PRIORITIES:
            raise ConfigError(f"priority is {priority!r}: expected one of {list(PRIORITIES)}")
        self._look_at_manifest()
        return self._submit(sequences, priority, window=0)

    def warm(self, sequences: Any, *, participates: Any = None, lookback: Any = None) -> Warming | None:
        """Fill the cache with what the sequences need, in the background class. Returns at once and holds no slots.

        What it returns tells when that is done, and can stop it; it may be dropped. An attached store returns None.
        """
        self._check()
        chosen = _sequences(sequences, participates, lookback, None)
        self._look_at_manifest()
        window = max(1, min(WARM_WINDOW, self.capacity // max(1, len(self._plan.groups))))
        batch = self._submit(chosen, "background", window=window)
        batch._disown()                                      # the planner frees its row after the last window
        with self._lock:
            self._let_go(batch)
        return Warming(self, batch._row, batch.ticket, sum(map(len, chosen)))

    def record(self, path: str | os.PathLike[str], *, limit: int = 1 << 20, keys: bool = False) -> Recorder:
        """Keep what is asked for from now on in a trace, for at most `limit` tokens; `stop()` of what it returns writes it to `path`.

        So do the limit and `close`. `keys`: anonymous n-gram keys instead of tokens. Costs a copy of the tokens a batch. ConfigError
        if the store is being recorded already.
        """
        from ssdgram.tools.trace_record import attach

        self._check()
        with self._lock:
            if self._recorder is not None and not self._recorder.full:
                raise ConfigError(f"{self.path} is being recorded to {self._recorder.path}: stop that first")
            self._recorder = attach(self, path, limit, keys)
            return self._recorder

    def frame(self, tokens: int) -> Frame:
        """Fixed addresses for gathers in a CUDA graph, for steps of up to `tokens` tokens (see Frame). Needs device="cuda"."""
        from ssdgram.frame import Frame

        self._check()
        return Frame(self, tokens)

    def staging(self, targets: Mapping[int, Any]) -> Staging:
        """The shortest way from a step's tokens to its rows, into fixed tensors (see Staging).

        `targets`: for each layer of the store a contiguous torch bfloat16 [most tokens, columns, dim] on the store's device.
        """
        from ssdgram.staging import Staging

        self._check()
        return Staging(self, targets)

    def stats(self) -> Stats:
        """A snapshot of the counters (see Stats)."""
        self._check()
        return snapshot(self)

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what is under way, wait for the GPU, stop the threads, give the memory back. Idempotent."""
        if not self._end_calls():
            return
        self._unwind(timeout_s)
        self._state.control[s.STOP] = 1
        ring(self._address)
        wake_crew(self._plan.crew_futex)
        self._queue.wake_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self._queue.join(timeout_s)
        if self._queue.stuck or any(thread.is_alive() for thread in self._threads):
            # the drive may yet write there: never to be freed or unmapped
            self._leak("reads are still in the drive", timeout_s)
            return
        self._queue.close()
        self._keep_hotset()
        if self._cuda is not None and not self._cuda.close(timeout_s):
            self._leak("kernels that may read the cache are still under way", timeout_s)
            return
        self._close_files()
        self._arena.close()
        self._alive.clear()

    def _end_calls(self) -> bool:
        """The first part of `close`: from here on every call raises. False: that was so already."""
        if self._inherited():
            self._check()                                    # raises
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        _open_stores.discard(self)
        self._keep_recording()
        return True

    def _leak(self, why: str, timeout_s: float) -> None:
        """Keep all that a drive or a GPU may yet write or read until the process ends: freed memory may be somebody else's."""
        log.error("%s: %s after %g s: their memory is kept until the process ends", self.path, why, timeout_s)
        _leaked.append((self._state, self._plan, self._queue, self._pairs, self._arena, self._cuda, self._kept, self._alive,
                        self._row_memory))
        self._pairs = []

    def _unwind(self, timeout_s: float) -> None:
        """Take back every batch, and wait until the planner has done with them."""
        for row in range(len(self._plan.batches)):
            if self._plan.words[row * self._line + p.W_STAGE] != p.FREE_BATCH:
                self._push_release(row)
        ring(self._address)
        deadline = time.monotonic() + timeout_s
        for row in range(len(self._plan.batches)):
            left = max(0, int((deadline - time.monotonic()) * 1e9))
            wait_free(self._plan.words, row * self._line, left)

    def _regions(self) -> list[tuple[int, int, bool]]:
        """(address, bytes, read-only) of the memory that a GPU is to reach."""
        return [(self._arena.address, self._arena.size, False)]

    def _forget(self) -> None:
        """In a forked child: give up what was inherited."""
        self._close_files()
        self._queue.forget()
        self._arena.forget()

    def _keep_hotset(self) -> None:
        """Write the hot set, if one was asked for: a failure costs the next start its warmth, nothing else."""
        if self._hotset is not None:
            try:
                log.info("%s: %d bundles written to hot set %s", self.path, save_hotset(self, self._hotset), self._hotset)
            except (OSError, HotSetError) as error:
                log.warning("%s: hot set %s was not written: %s", self.path, self._hotset, error)

    def _keep_recording(self) -> None:
        """Write the recording, if one is under way: a failure is logged, and costs the recording."""
        if self._recorder is not None:
            with contextlib.suppress(OSError):
                self._recorder.stop()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._inherited():                            # a child that leaves its parent's `with` has nothing to close
            self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._usable():
            self.close()
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r}{' (closed)' if self._closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Store owns threads and memory and cannot be pickled; open it again from its path")

    # ------------------------------------------------------------ what Batch, stats and metrics use

    def _check(self) -> None:
        if self._pid != _process:
            raise ForkedStoreError(f"{self.path} was opened by process {self._pid}, this is its child {os.getpid()}: open the store in the "
                                   f"process that uses it")
        if self._closed:
            raise StoreClosedError(f"{self.path} was closed")

    def _inherited(self) -> bool:
        """Whether this is a forked child's copy."""
        return self._pid != _process

    def _expect_step(self) -> None:
        """A batch is about to be handed in: what takes its time to be ready for it may begin now."""

    def _usable(self) -> bool:
        """For destructors: a forked child drops what other threads had before any code of ours has run in it, so the system is asked."""
        return not self._closed and os.getpid() == self._pid

    def _layer_index(self, layer: int) -> int:
        if layer not in self.layers:
            raise ConfigError(f"layer {layer} is not served: the layers of this store are {list(self.layers)}")
        return self.layers.index(layer)

    def _look_at_manifest(self) -> None:
        now = time.monotonic_ns()
        if now < self._look_again_ns:
            return
        found = stamp(self.path)
        if not found or found != self._stamp:                # else it need not be read, which would take a step longer than its plan
            if identity(self.path) != self._identity:
                self._look_again_ns = 0                      # at the next call
                raise StoreReplacedError(f"{self.path / MANIFEST} is not the one that this store was opened with (generation "
                                         f"{self.manifest.generation:016x}): close the store and open it again")
            self._stamp = found
        self._look_again_ns = now + int(self.tuning.identity_check_s * 1e9)

    def _submit(self, sequences: list[Sequence], priority: str, window: int, ticket: int | None = None, soon: bool = False) -> Batch:
        """Hand in a batch. `soon`: the caller is about to wait for it, and will look for tokens of a GPU itself."""
        on_device = self._from_device(sequences)
        if on_device and sequences[0].fill is not None:      # it says where it wrote
            tokens, flags, positions = *_NO_IDS, len(sequences[0])
        else:
            tokens, flags, positions = flatten(sequences, self._longest_ngram)
        planned = min(window, positions) if window else positions
        flag, here = 0, not on_device and window == 0 and priority == "step" and positions <= PLANNED_HERE
        with self._lock:
            row = self._free_row(*_NO_IDS) if on_device else self._free_row(tokens, flags)
            if row <= BAD_ID:
                raise bad_id(sequences, self._longest_ngram, BAD_ID - row, self._vocabulary)
            if ticket is None:
                self._tickets += 1
                ticket = self._tickets
            slots, held, device_slots = self._plan_memory(row, planned)
            try:
                if on_device:
                    tokens, flags, flag = self._cuda.tokens_to_host(  # type: ignore[union-attr]
                        sequences, self._longest_ngram, tokens, flags, row, ticket)
                flat = self._alive[row] = tokens, flags
                batch = Batch(self, row, ticket, slots, held, flat)              # before `submit`: Ctrl-C behind it finds an owner
                batch._device_slots, batch._flag = device_slots, flag
                submit(self._address, row, ticket, tokens, flags, flag, slots, held, planned, window, PRIORITIES[priority],
                       not (here or (soon and on_device)))
            except BaseException:
                if on_device:                                # the row is free: the next batch there gets memory that nobody writes to
                    self._cuda.drain()  # type: ignore[union-attr]
                raise
            if here:
                planner_loop(self._address, row)             # under the lock, so that `close` waits for its end
            if self._recorder is not None and not on_device and not window and ticket > 0:
                self._recorder.add(tokens, flags)
        return batch

    def _from_device(self, sequences: list[Sequence]) -> bool:
        """Whether a GPU is to send tokens. The deferred Sequence of a store on the CPU is filled here and now."""
        if len(sequences) == 1:                              # a step: everything here counts
            on_device, fill = sequences[0].device_tokens is not None, sequences[0].fill
        else:
            on_device, fill = any(sequence.device_tokens is not None for sequence in sequences), None
            if any(sequence.fill is not None for sequence in sequences):
                raise ConfigError("a deferred Sequence is a batch of its own: not one of a list")
        if self._cuda is not None:
            return on_device or fill is not None
        if on_device:
            raise ConfigError(f"tokens on a GPU: {self._made_by} with device='cuda' (this store has {self.device!r}), or copy them to the "
                              f"host")
        if fill is not None:
            sequences[0].fill_now()
        return False

    def _plan_here(self, row: int) -> None:
        """Plan a batch whose tokens came from a GPU, if the planner sleeps."""
        with self._lock:
            if not self._closed:
                planner_loop(self._address, row)

    def _wake_planner(self) -> None:
        with self._lock:
            if not self._closed:
                ring(self._address)

    def _plan_memory(self, row: int, positions: int) -> tuple[np.ndarray, np.ndarray, Any]:
        """Memory for the plan of a batch that uses `row` anew: slots int32 [L, T, orders] (and as the GPU sees them), held
        int32 [L, T * orders]. A row that is used for the same shape again keeps its memory: the batch before is out of it."""
        shape = self._per_position[0], positions, self._per_position[1]
        known = self._row_memory.get(row)
        device_slots = None
        if self._cuda is not None:
            slots, device_slots = self._cuda.plan_memory(row, shape)
        elif known is not None and known[0].shape == shape:
            return known[0], known[1], None
        else:
            slots = np.empty(shape, np.int32)
        held = known[1] if known is not None and known[0].shape == shape else np.empty((shape[0], shape[1] * shape[2]), np.int32)
        self._row_memory[row] = slots, held
        return slots, held, device_slots

    def _free_row(self, tokens: np.ndarray, flags: np.ndarray) -> int:
        """A free batch row for those tokens, or what `free_row` says of the first that is bad; the caller holds the lock, once."""
        if self._closed:
            self._check()                                    # raises
        row = free_row(self._address, tokens, flags)
        if row == NO_ROW:
            row = self._wait_for_row()
        self._leaving.discard(row)
        self._large.discard(row)
        return row

    def _wait_for_row(self) -> int:
        """Batches that were released may still be leaving: they are waited for, without the lock, so that other threads go on and
        release theirs."""
        deadline = time.monotonic() + ROW_WAIT_S
        while True:
            ring(self._address)                              # it may be asleep, with releases before it
            released = [row for row in tuple(self._leaving) if self._plan.batches["window"][row] == 0]
            if not released or time.monotonic() > deadline:
                break
            self._lock.release()
            try:
                wait_free(self._plan.words, released[0] * self._line, 10_000_000)
            finally:
                self._lock.acquire()
            self._check()
            row = free_row(self._address, *_NO_IDS)
            if row != NO_ROW:
                return row
        found = enumerate(self._plan.batches["ticket"].tolist())
        tickets = sorted(ticket for row, ticket in found if ticket > 0 and row not in released)
        raise StoreBusyError(f"{len(self._plan.batches)} batches are unreleased, the oldest is {min(tickets, default=0)}: release "
                             f"batches, or open the store with Tuning(batches=...)", tickets)

    def _let_go(self, batch: Batch) -> None:
        """What the batch's row points into is the planner's until the row is free; a small batch's is kept for the next one there."""
        self._leaving.add(batch._row)
        if batch._slots.size > KEPT_PLAN or len(batch._flat[0]) > KEPT_PLAN:
            self._large.add(batch._row)
        if self._large:
            self._sweep()

    def _sweep(self) -> None:
        """Give up what large batches' rows point into, where the planner has done with them."""
        large = tuple(self._large)                           # the collector may release a batch between any two lines
        for row in [row for row in large if self._plan.words[row * self._line + p.W_STAGE] == p.FREE_BATCH]:
            self._large.discard(row)
            self._alive.pop(row, None)
            self._row_memory.pop(row, None)

    def _hand_back(self, batch: Batch) -> None:
        """Release a batch, if it was submitted."""
        if self._inherited():
            self._check()                                    # raises
        with self._lock:
            if self._closed:
                return
            if self._recorder is not None:
                self._record_device_tokens(batch)
            if release(self._address, batch._row, batch.ticket):
                self._let_go(batch)

    def _record_device_tokens(self, batch: Batch) -> None:
        """Tokens of a GPU are on the host by the time that a batch which was waited for is released; of another they may be not."""
        record = self._plan.batches[batch._row]
        if self._recorder is not None and record["flag"] != 0 and record["ticket"] == self._plan.token_words[batch._row] == batch.ticket:
            self._recorder.add(*batch._flat)

    def _push_release(self, row: int) -> None:
        hand_back(self._address, row)

    def _count_wait(self, seconds: float, count: int = 1) -> None:
        us = seconds * 1e6
        with self._lock:
            self._wait_counts[min(WAIT_BUCKETS - 1, int(us).bit_length())] += count
            self._wait_us_sum += us * count

    def _count_served(self, count: int) -> None:
        with self._lock:
            self._served_bytes += count

    def _close_files(self) -> None:
        """Close the page files, once: a descriptor's number may belong to somebody else afterwards."""
        pairs, self._pairs = self._pairs, []
        _opening.close_files(pairs)

    def _keys_of(self, tokens: np.ndarray, flags: np.ndarray) -> np.ndarray:
        """Keys [positions, groups] of flat tokens: for messages, not for serving."""
        out = np.empty((len(tokens), *self._plan.multipliers.shape), np.int64)[:, :, 1:].copy()
        count = ngram_keys(tokens, flags, 0, len(tokens), self._token_map, self._plan.multipliers, self.geometry.rule,
                           self.geometry.fill(self._token_map), out)
        return out[:count].reshape(count, len(self._plan.groups))

    def _row_format(self, index: int) -> RowFormat:
        """How the rows of a served layer become values."""
        if index not in self._row_formats:
            scales = self.manifest.global_scales
            scale = None if scales is None else scales[self._selection.indices[index]]
            self._row_formats[index] = row_format(self.geometry.encoding, self.dim, scale, self.scale_rule)
        return self._row_formats[index]

    def _budgets(self, used_slots: int) -> dict[str, tuple[int, int]]:
        stride = int(self._state.params[s.P_SLOT_STRIDE])
        if self._gds is not None:
            staging = self._hbm_budget - self._sizes.slots * stride
            return {"dram": (self._sizes.total, self._budget), "hbm": (staging + used_slots * stride, self._hbm_budget)}
        fixed = self._sizes.total - self._sizes.slots * stride
        return {"dram": (fixed + used_slots * stride, self._budget)}

    def _note(self, text: str) -> None:
        self.notices.append(text)
        log.warning("%s: %s", self.path, text)


def default_crew(affinity: tuple[int, ...] | None = None) -> int:
    """Threads that help the planner, if nobody says how many: half of the CPUs that this process may use plan, at most eight."""
    cpus = len(set(affinity or ()) & os.sched_getaffinity(0)) or queues.probe.cpu_count()
    return max(0, min(8, cpus // 2) - 1)


def _run(loop: Any, address: int, who: int, affinity: tuple[int, ...] | None) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())         # Ctrl-C belongs to the thread that waits
    if affinity:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), affinity)
    loop(address, who)


def _checked_owner(owner: tuple[int, int] | None) -> tuple[int, int]:
    if owner is None:
        return 0, 1
    try:
        rank, world = (operator.index(number) for number in owner)
    except (TypeError, ValueError):
        rank, world = -1, 0
    if not 0 <= rank < world < 1 << 31:
        raise ConfigError(f"owner={owner}: expected (rank, world) with 0 <= rank < world")
    return rank, world


def _sequences(tokens: Any, participates: Any, lookback: Any, lookback_participates: Any) -> list[Sequence]:
    extras = (participates, lookback, lookback_participates)
    if isinstance(tokens, Sequence):
        chosen = [tokens]
    elif isinstance(tokens, builtins.list | tuple) and tokens and isinstance(tokens[0], Sequence):
        chosen = builtins.list(tokens)
        if not all(isinstance(entry, Sequence) for entry in tokens):
            raise ConfigError("a list of Sequences holds something else too")
    else:
        return [Sequence(tokens, *extras)]
    if any(extra is not None for extra in extras):
        raise ConfigError("participates= and lookback= belong to the Sequence when one is given")
    return chosen


@atexit.register
def _close_all() -> None:
    for store in list(_open_stores):
        with contextlib.suppress(SSDGramError):
            store.close(timeout_s=2.0)


def _forget_all() -> None:
    """In a forked child: give up the parent's descriptors, so that neither ring nor file is held open by us."""
    global _process
    _process = os.getpid()                                   # first: from here on every call says whose the stores are
    for store in list(_open_stores):
        store._forget()
    _open_stores.clear()


os.register_at_fork(after_in_child=_forget_all)
