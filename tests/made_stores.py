"""Small stores whose every row follows from its number, and what the planner's arrays must look like when nothing is under way.

`Made` is a converted checkpoint with the model of it: `expected` says what any tokens must bring, from the geometry alone.
`check_planner` is the model of the cache's bookkeeping in plain Python: every slot in exactly one place, every list whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import ssdgram
from ssdgram import _opening, queues
from ssdgram import _plan_state as p
from ssdgram import _state as s
from ssdgram._budget import sizes
from ssdgram._calls import ring
from ssdgram._compiled import atomic_cas, atomic_exchange, compiled
from ssdgram.cache.directory import EMPTY, set_of
from ssdgram.kernels.dequant import value_table
from ssdgram.layout.files import load_token_map
from ssdgram.layout.manifest import Manifest
from ssdgram.store import Tuning
from ssdgram.tools.synth import expected_rows

QUEUES = ("uring", "threads") if queues.probe.io_uring().ok else ("threads",)
RING = Tuning(readers=1, depth=16, degraded_after_s=20.0, crew=0)
THREADED = dataclasses.replace(RING, readers=6, depth=1)     # the same for the queue `threads`, whose readers have one read each
QUICK = RING if "uring" in QUEUES else THREADED              # for the queue `auto`
IMPATIENT = Tuning(readers=1, depth=16, degraded_after_s=0.2, degraded_wait_s=0.1, crew=0)       # for drives that stop answering


def until(condition, timeout_s=10.0):
    """Wait for a condition; whether it came."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def descriptors():
    """What this process holds open of stores: page files and rings (the shared memory goes with the Store object)."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(link for link in found if link.endswith(".rows") or any(kind in link for kind in ("io_uring", "eventfd")))


class Made:
    """A store in folder `out`, made from a synthesised checkpoint with that `seed`."""

    def __init__(self, out: Path, seed: int = 0) -> None:
        self.out, self.seed = out, seed
        self.manifest = Manifest.load(out)
        self.geometry = self.manifest.geometry
        self.token_map = load_token_map(out, self.manifest)
        table = self.geometry.checked_map(self.token_map)
        self.vocabulary = self.geometry.vocabulary(table)

    def copy(self, folder: Path) -> Made:
        """The same store in a folder of its own, to be damaged."""
        shutil.copytree(self.out, folder)
        return Made(folder, self.seed)

    def open(self, dram="8MiB", **options):
        """Open it; a tuning made for tests unless another is given."""
        options.setdefault("tuning", THREADED if options.get("queue") == "threads" else QUICK)
        return ssdgram.open(self.out, dram=dram, **options)

    def dram_for(self, slots, layers=None, columns=None, tuning=None, queue="auto"):
        """The smallest budget that gives at least that many slots (those of the dead bundles included)."""
        tuning = tuning or (THREADED if queue == "threads" else QUICK)
        selection = _opening.Selection.of(self.geometry, layers, columns)
        readers, depth = tuning.readers or queues.default_readers(queue), tuning.depth or queues.default_depth(queue)
        vocabulary = 0 if self.token_map is None else len(self.token_map)
        shape = _opening.shape_of(self.geometry, selection, vocabulary, readers, depth, tuning.batches, crew=tuning.crew or 0)
        low, high = 0, 1 << 30
        while high - low > 1:
            middle = (low + high) // 2
            try:
                enough = sizes(middle, shape).slots >= slots
            except ssdgram.BudgetError:
                enough = False
            low, high = (low, middle) if enough else (middle, high)
        return high

    def tokens(self, count, seed=0):
        """Random raw ids int32 [count]."""
        return np.random.default_rng(seed).integers(0, self.vocabulary, count, np.int32)

    def row_ids(self, tokens, **context):
        """int64 [T, L, columns], for a Sequence's arguments."""
        return self.geometry.row_ids(tokens, self.token_map, **context)

    def scale_of(self, layer):
        """The layer's global scale, None if it has none."""
        scales = self.manifest.global_scales
        return None if scales is None else scales[self.geometry.layers.index(layer)]

    def values(self, layer, tokens):
        """bf16 bits [T, columns, dim] of a PLE table's rows that a fresh run of `tokens` reads, times the table's scale."""
        packed = self.expected(layer, tokens)
        if self.geometry.encoding == "bf16":
            return packed.view(np.uint16)
        return value_table("fp8_global", self.scale_of(layer))[packed]

    def expected(self, layer, tokens, **context):
        """What `packed(layer)` must be for these tokens: uint8 [T, columns, row_bytes]."""
        index = self.geometry.layer_index(layer)
        return expected_rows(self.seed, layer, self.row_ids(tokens, **context)[:, index], self.geometry)

    def bundle_bytes(self, group, x):
        """The bundle of a whole-column store as its slot holds it: codes of all heads, then their scales."""
        geometry = self.geometry
        index, order = divmod(int(group), geometry.orders)
        columns = np.arange(order * geometry.heads, (order + 1) * geometry.heads)
        rows = int(x) % geometry.prime_array[index, columns] + geometry.offset_array[index, columns]
        whole = expected_rows(self.seed, geometry.layers[index], rows, geometry)
        return np.concatenate([whole[:, :geometry.code_bytes].reshape(-1), whole[:, geometry.code_bytes:].reshape(-1)])

    def distinct(self, *sequences):
        """Distinct bundles that a batch of these (tokens, context) needs at once, the dead ones apart."""
        keys = np.concatenate([self.geometry.keys(tokens, self.token_map, **context) for tokens, context in sequences])
        dead = self.geometry.dead_keys(self.token_map)
        return sum(len(set(keys[:, l, o].tolist()) - {int(dead[l, o])})
                   for l in range(keys.shape[1]) for o in range(keys.shape[2]))


def packed(batch, layer, **options):
    """`batch.packed(layer)` as NumPy."""
    return batch.packed(layer, **options).numpy()


def assert_served(made, store, batch, tokens, **context):
    """Every served layer of the batch is what the model says, bit by bit."""
    for layer in store.layers:
        want = made.expected(layer, tokens, **context)[:, list(store.columns)]
        np.testing.assert_array_equal(packed(batch, layer), want)


def run(script, *arguments, command=()):
    """Run a script in a process of its own, with this folder on its path; `command` goes before the interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run([*command, sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=240,
                          env=environment)


# ---------------------------------------------------------------- faults


def set_fault(store, result, *, after=0, times=-1, file=-1):
    """Have the queue's reads come back as `result` (ssdgram._state, faults)."""
    if store.stats().pending_pages == 0:                     # the readers' count may still be that of the batch before: see `reading`
        assert until(lambda: store.stats().queue_depth == 0)
    faults = store._state.faults
    faults[s.FAULT_TIMES] = 0
    faults[[s.FAULT_AFTER, s.FAULT_RESULT, s.FAULT_FILE]] = after, result, file
    faults[s.FAULT_TIMES] = times


def clear_faults(store):
    """Reads are as they are again."""
    store._state.faults[s.FAULT_TIMES] = 0


def reading(store):
    """Whether reads are in the drive."""
    stats = store.stats()
    return stats.pending_pages > 0 and stats.queue_depth > 0


def starves(store, batch):
    """Whether the planner has taken the batch, and it or one before it has found no slots: a wait that ends says so then."""
    plan = store._plan
    active = plan.active[:int(plan.control[p.C_ACTIVE])].tolist()
    taken = batch._row in active and plan.words[batch._base + p.W_STAGE] in (p.QUEUED, p.PLANNING, p.UNWINDING)
    return taken and any(plan.words[row * store._line + p.W_STARVED] for row in active)


@compiled
def _borrow(control):
    return atomic_cas(control, s.PLANNER_ASLEEP, np.int64(s.ASLEEP), np.int64(s.BORROWED))


@compiled
def _give_back(control):
    atomic_exchange(control, s.PLANNER_ASLEEP, np.int64(s.ASLEEP))


@contextlib.contextmanager
def nobody_plans(store):
    """The planner's memory borrowed, as a caller who plans himself borrows it: what is handed in meanwhile is planned afterwards."""
    assert until(lambda: _borrow(store._state.control))
    try:
        yield
    finally:
        _give_back(store._state.control)
        ring(store._address)


def file_number(store, layer, column):
    """Number of a served column's file in the store's arrays."""
    return store.layers.index(layer) * len(store.columns) + store.columns.index(column)


# ---------------------------------------------------------------- bookkeeping


def quiet(store, timeout_s=10.0):
    """Wait until nothing is under way: no request, no page record in use, no batch but the dead bundles'. Whether it came."""
    plan, state = store._plan, store._state

    def settled():
        control = plan.control
        return (control[p.C_REQUEST_HEAD] == control[p.C_REQUEST_TAIL] and control[p.C_ACTIVE] == 1
                and control[p.C_PAGES + 1] == len(state.pages))

    return until(settled, timeout_s)


def walk(first, following, most):
    """The members of a chain, at most one more than it may have."""
    found = []
    while first >= 0 and len(found) <= most:
        found.append(int(first))
        first = following[first]
    return found


def check_planner(store, made=None):
    """Every invariant of the planner's arrays at rest; with `made`, the bytes of every bundle in the cache as well."""
    assert quiet(store), "the store does not come to rest"
    plan, state, control = store._plan, store._state, store._plan.control
    slots = plan.slots
    dead = np.unique(np.concatenate([store._row_memory[0][1][l, :int(plan.layers["held"][l])] for l in range(len(store.layers))]))

    free = walk(control[p.C_FREE], slots["x"], len(slots))
    assert len(free) == len(set(free)) == control[p.C_FREE + 1]
    assert set(free) == set(np.flatnonzero(slots["status"] == p.SLOT_FREE).tolist())
    live = np.setdiff1d(np.arange(len(slots)), free)
    assert (slots["status"][live] == p.SLOT_READY).all()
    assert (slots["where"][free] == p.NOWHERE).all()
    expected_refs = np.isin(np.arange(len(slots)), dead).astype(int)
    np.testing.assert_array_equal(slots["refs"][live], expected_refs[live])
    assert control[p.C_IDLE] == len(live) - len(dead) - int((slots["where"][np.setdiff1d(live, dead)] != p.IN_DIRECTORY).sum())

    entries = {}
    places = np.nonzero(plan.directory["group"] != EMPTY)
    for number, x, group, slot in zip(places[0].tolist(), *(plan.directory[name][places].tolist() for name in ("x", "group", "slot"))):
        assert set_of(x, np.uint8(group), len(plan.directory)) == number
        assert (x, group) not in entries
        entries[x, group] = slot
    empty = plan.directory["group"] == EMPTY
    assert (plan.directory["count"][empty] == 0).all() and (plan.directory["slot"][empty] == -1).all()
    overflow = {(int(cell["x"]), int(cell["group"])): int(cell["slot"]) for cell in plan.overflow if cell["group"] != EMPTY}
    assert len(overflow) == control[p.C_OVERFLOW]
    assert not set(overflow) & set(entries)
    found = {**entries, **overflow}
    assert sorted(found.values()) == live.tolist(), "a live slot that nobody finds, or one found twice"
    for (x, group), slot in found.items():
        assert (slots["x"][slot], slots["group"][slot]) == (x, group)
        assert slots["where"][slot] == (p.IN_OVERFLOW if (x, group) in overflow else p.IN_DIRECTORY)
    assert set(overflow.values()) <= set(dead.tolist()), "an entry of the overflow table that no batch uses"

    first_page, pages, first_target, targets, background = control[p.C_PAGES:p.C_PAGES + 5].tolist()
    assert pages == len(set(walk(first_page, state.pages["next"], pages))) == len(state.pages)
    assert targets == len(set(walk(first_target, state.targets["next"], targets))) == len(state.targets)
    assert background == 0 and (plan.buckets == -1).all()
    assert control[p.C_BUILDING] == control[p.C_BUILDING_BACKGROUND] == 0
    assert until(lambda: state.control[s.BACKGROUND_IN_FLIGHT] == 0 and store.stats().queue_depth == 0)

    stages = plan.words.reshape(len(plan.batches), -1)[:, p.W_STAGE]
    assert np.flatnonzero(stages != p.FREE_BATCH).tolist() == [0] == plan.active[:1].tolist()
    assert control[p.C_QUEUES] == control[p.C_QUEUES + 2] == -1

    stats = store.stats()
    assert stats.slots == len(slots) and stats.slots_free == len(free)
    assert stats.slots_idle == control[p.C_IDLE] and stats.slots_in_use == len(dead)
    assert stats.oldest_ticket is None and stats.pending_pages == 0

    if made is not None and store.columns == tuple(range(made.geometry.columns)) and store.layers == made.geometry.layers:
        check_bundles(made, store, found)


def check_bundles(made, store, found):
    """The bytes of every bundle in the cache, {(x, group): slot}."""
    geometry = made.geometry
    heads, codes, scales = geometry.heads, geometry.code_bytes, geometry.scale_bytes
    for group in range(geometry.groups):
        index, order = divmod(group, geometry.orders)
        here = [(x, slot) for (x, g), slot in found.items() if g == group]
        x, slots = np.array(here, np.int64).reshape(-1, 2).T
        columns = np.arange(order * heads, (order + 1) * heads)
        rows = x[:, None] % geometry.prime_array[index, columns] + geometry.offset_array[index, columns]
        want = expected_rows(made.seed, geometry.layers[index], rows, geometry)
        have = store._state.slab.reshape(-1, store._stride)[slots, :heads * (codes + scales)]
        np.testing.assert_array_equal(have[:, :heads * codes].reshape(len(slots), heads, codes), want[:, :, :codes])
        np.testing.assert_array_equal(have[:, heads * codes:].reshape(len(slots), heads, scales), want[:, :, codes:])
