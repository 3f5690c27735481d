"""A warm decode step's plan on cold cache lines: streams of one token each, every bundle of them resident.

    streams   random tokens with their lookback, as many as the cache holds ─► entries and READY slots, made here without any read
    a step    other streams each time; before it, memory larger than the processor's caches is overwritten

What is timed is the plan alone, as the planner notes it (request taken to last layer published); no row is ever looked at, so the
slots' memory is never touched and a cache of gigabytes costs its tables only. It knows where the planner keeps its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

import ssdgram
from ssdgram._compiled import SYS_SCHED_YIELD, atomic_cas, atomic_exchange, compiled_lean, syscall
from ssdgram._hotset_load import keep_free, place_entries
from ssdgram._kept import PLAN_AT, plan_at, state_at
from ssdgram._state import ASLEEP, BORROWED, PLANNER_ASLEEP
from ssdgram.bench.material import random_tokens
from ssdgram.bench.warm import PATIENT, Result, is_warm, quantiles
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS
from ssdgram.store import Store

OVERWRITTEN = 64 << 20                                       # more than the caches of a core and what they share
FILLED = 0.75                                                # of the slots: fuller sets turn entries away
STREAMS, STEPS = (1, 16, 64, 256), 100


@compiled_lean
def make_resident(kept, entries, good, keep, slots):  # type: ignore[no-untyped-def]
    """Give each (x, group) of `entries` (uint8, 16 bytes each) a READY slot, in `slots`, -1: none; by the planner's leave."""
    state, plan = state_at(kept), plan_at(kept + PLAN_AT)
    while not atomic_cas(state.control, PLANNER_ASLEEP, np.int64(ASLEEP), np.int64(BORROWED)):
        syscall(SYS_SCHED_YIELD, 0, 0, 0, 0, 0, 0)
    place_entries(plan, entries, len(good), len(good), len(entries), 16, good, keep, slots)
    atomic_exchange(state.control, PLANNER_ASLEEP, np.int64(ASLEEP))


def resident_streams(store: Store, random: np.random.Generator) -> np.ndarray:
    """int32 [streams, n]: tokens whose last one's bundles are all in the cache from now on (their rows are not)."""
    groups, n = len(store._plan.groups), store.geometry.max_ngram
    count = int(FILLED * len(store._plan.slots)) // groups
    tokens = random_tokens(random, store._vocabulary, count * n).reshape(count, n)
    flags = np.full((count, n), PARTICIPATES, np.uint8)
    flags[:, 0] |= STARTS
    flags[:, -1] |= OUTPUT
    entries = np.empty((count, groups, 2), np.int64)
    entries[..., 0] = store._keys_of(tokens.ravel(), flags.ravel())
    entries[..., 1] = store._plan.groups["number"]
    slots = np.full(count * groups, -1, np.int32)
    make_resident(store._address, entries.reshape(-1).view(np.uint8), np.ones(count * groups, np.uint8), keep_free(store), slots)
    return tokens[(slots.reshape(count, groups) >= 0).all(1)]


def step(out: Path, *, dram: str = "1GiB", rounds: int = STEPS, streams: Sequence[int] = STREAMS) -> Result:
    """us of a step's plan for each number of streams, `rounds` steps each, in turn."""
    random, overwritten = np.random.default_rng(), np.zeros(OVERWRITTEN, np.uint8)
    samples: dict[int, list[float]] = {count: [] for count in streams}
    with ssdgram.open(out, dram=dram, tuning=PATIENT) as store:
        resident, at = resident_streams(store, random), 0
        if len(resident) < max(streams):
            raise RuntimeError(f"{len(resident)} streams fit into {dram}, {max(streams)} are wanted: give a larger --dram")
        groups = len(store._plan.groups)
        for _ in range(rounds):
            for count in streams:
                chosen = np.take(resident, np.arange(at, at + count), axis=0, mode="wrap")
                at = (at + count) % len(resident)
                sequences = [ssdgram.Sequence(tokens[-1:], lookback=tokens[:-1]) for tokens in chosen]
                overwritten += 1
                with store.prefetch(sequences) as batch:
                    batch.wait()
                    if is_warm(batch.timing):
                        samples[count].append(batch.timing["published_us"])
        cells = {}
        for count, taken in samples.items():
            cells[count] = quantiles(taken)
            click.echo(f"  {count:4d} streams of a token, cold lines: plan p50 {cells[count]['p50']:.1f} us, p99 {cells[count]['p99']:.1f} "
                       f"us ({1e3 * cells[count]['p50'] / (groups * count):.0f} ns a bundle; {cells[count]['count']} steps)")
        tables = store._plan.slots.nbytes + store._plan.directory.nbytes
        return {"resident_bundles": groups * len(resident), "table_bytes": tables, "overwritten": OVERWRITTEN, "plan_us": cells}
