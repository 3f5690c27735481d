"""Lanes: what a reader of queue `gds` has in the drive and on the GPU, and the compiled loop that drives both without the GIL.

    lane = one cuFile batch handle, its staging pages in HBM, and one round of checks at a time

    entry   FREE ─take─► READING ─completed─► READ ─in a round of checks─► CHECKING ─all rows right─► FREE, page in the done ring
                            │ short, EIO, …                                     └─ a row wrong ──┐
                            └────────────────────────► the next try, or out of tries ◄───────────┘

`turn` does everything but the calls of cuFile and CUDA; for one of those it returns, saying which (SUBMIT, STATUS, CHECK,
CANCEL), and is entered again with the outcome: Python runs once per batch, never per read. One more lane, the plain one,
has no handle: the last try of a page is a buffered pread into pinned memory, which the same kernel checks. A lane is
filled again only when all its entries are FREE, so no read lands in a page of staging that something else uses; a lane whose
submission or status call failed is lost: what cuFile still does with it is unknown, so its staging is never used again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssdgram._compiled import atomic_add, atomic_load, atomic_store, compiled, fence, futex_wait, now_ns
from ssdgram._state import (BACKGROUND_IN_FLIGHT, FAULT_FLIP, FAULT_RESULT, FAULT_STALL, P_CODE_BYTES, P_DEPTH, P_READERS,
                            P_ROWS_PER_PAGE, P_SCALE_BYTES, P_SLOT_STRIDE, P_SPIN_NS, R_ASLEEP, R_ENTERS, R_IN_FLIGHT, R_OLDEST_NS,
                            R_STATE, READ_CHECK, READ_OK, READ_SHORT, READER_LINES, READER_WORDS, STOP, WORD_LINE)
from ssdgram.layout.format import TRAILER
from ssdgram.queues._calls import PAGE_BYTES
from ssdgram.queues._faults import spoil, stalled
from ssdgram.queues._handoff import (R_ROOM, READER_RETURNED, READER_STUCK, pull_background, pull_step, push_done, wake_planner,
                                     wake_readers, work_waits)
from ssdgram.queues._lean import borrowed, inlined
from ssdgram.queues._tries import STOP_GRACE_NS, again, is_last, plain_read

SUBMIT, STATUS, CHECK, CANCEL, FINISHED = range(5)           # what `turn` returns for
FREE, READING, HELD, READ, CHECKING = range(5)               # states of an entry
BATCH_MOST = 128                                             # entries of a cuFile batch
JOBS = 1024                                                  # rows of a round
POLL_NS = 40_000                                             # between two looks at a lane's completions
GPU_SPIN_NS = 50_000                                         # a round takes less: longer than this is slept through
EIO, ECANCELED, ETIMEDOUT = 5, 125, 110
# cuFile's batch statuses (cufile.h)
WAITING, PENDING, INVALID, CANCELED, COMPLETE, TIMEOUT, FAILED = 1, 2, 4, 8, 16, 32, 64

# words of a cuFile descriptor (CUfileIOParams_t, 64 bytes) and event (CUfileIOEvents_t, 24 bytes) as int64
(D_MODE, D_BASE, D_FILE_OFFSET, D_OFFSET, D_SIZE, D_HANDLE, D_OPCODE, D_COOKIE) = range(8)
E_COOKIE, E_STATUS, E_RESULT = range(3)

# own: a reader's private int64 words. Set once:
(LANES, ENTRIES, STAGING, VISIBLE, PLAIN_HOST, PLAIN_DEVICE, SLAB,
 # what `turn` returns for, and what became of it (LOST, BROKEN: set by Python before it enters again):
 LANE, COUNT, LOST, BROKEN,
 # changing:
 IN_FLIGHT, BACKGROUNDS, HELDS, AGAINS, LANES_LEFT, IDLE_NS, STOP_NS, CANCELLED, TOLD, STRANGE, ROUND_NS, OWN_WORDS) = range(23)

ENTRY = np.dtype([
    ("page", np.int32),
    ("cursor", np.int32),                                    # the next target to be checked, -1: none
    ("state", np.int16),
    ("background", np.int16),
    ("bad", np.int16),                                       # a row's check failed
    ("spare", np.int16),
], align=True)

LANE_RECORD = np.dtype([
    ("used", np.int32),                                      # entries that are not FREE
    ("reading", np.int32),                                   # READING
    ("ready", np.int32),                                     # READ
    ("jobs", np.int32),                                      # rows of the round under way, 0: none
    ("lost", np.int32),
    ("spare", np.int32),
    ("number", np.int64),                                    # of the newest round: the GPU stores it behind that
    ("since_ns", np.int64),                                  # when its oldest page was submitted
    ("polled_ns", np.int64),
], align=True)


class Lanes(NamedTuple):
    """A reader's arrays; N lanes of E entries and the plain one behind them."""

    own: np.ndarray                                          # int64 [OWN_WORDS]
    lanes: np.ndarray                                        # LANE_RECORD [N + 1]
    entries: np.ndarray                                      # ENTRY [(N + 1) * E]
    descriptors: np.ndarray                                  # int64 [N * E * 8]: CUfileIOParams_t
    events: np.ndarray                                       # int64 [E * 3]: CUfileIOEvents_t
    got: np.ndarray                                          # uint32 [2]: [0] room for events, then how many came
    handles: np.ndarray                                      # int64 [files]: cuFile's
    jobs: np.ndarray                                         # int64 [(N + 1) * JOBS * 8] (kernels.deliver), pinned
    results: np.ndarray                                      # int32 [(N + 1) * JOBS], pinned: 0 delivered
    words: np.ndarray                                        # int64 [(N + 1) * 8], pinned: [8 k] the round that lane k's GPU work reached
    job_target: np.ndarray                                   # int32 [(N + 1) * JOBS]
    job_entry: np.ndarray                                    # int32 [(N + 1) * JOBS]
    again: np.ndarray                                        # int32 [depth]: pages that wait for their next try
    again_background: np.ndarray                             # int32 [depth]
    found: np.ndarray                                        # int32 [E]: scratch


# ---------------------------------------------------------------- ends of a page


@inlined
@compiled
def give_back(state, reader, own, index, background, status):  # type: ignore[no-untyped-def]
    """The reader is done with page record `index`."""
    own[IN_FLIGHT] -= 1
    if background != 0:
        own[BACKGROUNDS] -= 1
        atomic_add(state.control, BACKGROUND_IN_FLIGHT, -1)
    push_done(state, reader, index, status)
    own[TOLD] += 1


@inlined
@compiled
def conclude(state, reader, lanes, lane, entry, status):  # type: ignore[no-untyped-def]
    """A try of an entry's page came to `status`: give the page back, or queue its next try. The entry is FREE."""
    own, record = lanes.own, lanes.entries[entry]
    index, background = np.int64(record.page), np.int64(record.background)
    record.state = FREE
    lanes.lanes[lane].used -= 1
    if status != READ_OK and own[STOP_NS] == 0 and own[BROKEN] == 0 and again(state, reader, index):
        lanes.again[own[AGAINS]] = index
        lanes.again_background[own[AGAINS]] = background
        own[AGAINS] += 1
        return
    give_back(state, reader, own, index, background, status)


@inlined
@compiled
def judge(state, reader, lanes, lane, entry, result):  # type: ignore[no-untyped-def]
    """A read returned `result`: bytes, or minus errno. A whole page's rows are checked next."""
    record = lanes.entries[entry]
    if result != PAGE_BYTES:
        conclude(state, reader, lanes, lane, entry, np.int64(READ_SHORT) if result >= 0 else -result)
        return
    record.cursor = state.pages[record.page].target
    record.bad = 0
    if record.cursor < 0:
        conclude(state, reader, lanes, lane, entry, np.int64(READ_OK))
        return
    record.state = READ
    lanes.lanes[lane].ready += 1


@inlined
@compiled
def land(state, reader, lanes, lane, entry, result, page, visible):  # type: ignore[no-untyped-def]
    """As `judge`, after the fault injector. page: address of the bytes, which the CPU may touch only if `visible`."""
    if visible != 0 or state.faults[FAULT_RESULT] != FAULT_FLIP:
        result = spoil(state, np.int64(lanes.entries[entry].page), result, page)
    if result == FAULT_STALL:
        lanes.entries[entry].state = HELD
        lanes.own[HELDS] += 1
        return
    judge(state, reader, lanes, lane, entry, result)


@inlined
@compiled
def release_held(state, reader, lanes):  # type: ignore[no-untyped-def]
    """Judge the reads that the fault injector no longer holds."""
    own = lanes.own
    for entry in range((own[LANES] + 1) * own[ENTRIES]):
        if lanes.entries[entry].state == HELD:
            own[HELDS] -= 1
            judge(state, reader, lanes, entry // own[ENTRIES], entry, np.int64(PAGE_BYTES))


# ---------------------------------------------------------------- completions of cuFile


@inlined
@compiled
def errno_of(status, result):  # type: ignore[no-untyped-def]
    """Bytes read, or minus errno, of a completion; what is no errno counts as EIO."""
    if status == COMPLETE and result >= 0:
        return result
    if status == CANCELED:
        return np.int64(-ECANCELED)
    if status == TIMEOUT:
        return np.int64(-ETIMEDOUT)
    return result if -4096 < result < 0 else np.int64(-EIO)


@inlined
@compiled
def reap(state, reader, lanes, lane, count):  # type: ignore[no-untyped-def]
    """Take in `count` events of a lane. Events that belong to no read of it are counted and passed over.

    A read that timed out may yet be under way, for all that cuFile says of it: its lane is lost.
    """
    own = lanes.own
    size, lost = own[ENTRIES], False
    for k in range(count):
        cookie, status = lanes.events[3 * k + E_COOKIE], lanes.events[3 * k + E_STATUS] & 0xFFFFFFFF
        entry = cookie - 1
        if entry < lane * size or entry >= (lane + 1) * size or lanes.entries[entry].state != READING:
            own[STRANGE] += 1
            continue
        if status == WAITING or status == PENDING:
            continue
        lost = lost or status == TIMEOUT
        lanes.lanes[lane].reading -= 1
        land(state, reader, lanes, lane, entry, errno_of(status, lanes.events[3 * k + E_RESULT]), own[STAGING] + entry * PAGE_BYTES,
             own[VISIBLE])
    if lost:
        lose_lane(state, reader, lanes, lane)


@inlined
@compiled
def lose_lane(state, reader, lanes, lane):  # type: ignore[no-untyped-def]
    """cuFile failed over this lane: its pages are read another way, its staging is left to whatever cuFile does with it."""
    own, record = lanes.own, lanes.lanes[lane]
    if record.lost == 0:
        record.lost = 1
        own[LANES_LEFT] -= 1
    for entry in range(lane * own[ENTRIES], (lane + 1) * own[ENTRIES]):
        if lanes.entries[entry].state == READING:
            record.reading -= 1
            conclude(state, reader, lanes, lane, entry, np.int64(EIO))


# ---------------------------------------------------------------- rounds of checks


@inlined
@compiled
def make_jobs(state, lanes, lane):  # type: ignore[no-untyped-def]
    """Write the next round of a lane, unless one is under way: as many rows of its READ entries as a round takes. How many."""
    own, params, targets, record = lanes.own, state.params, state.targets, lanes.lanes[lane]
    if record.ready == 0 or record.jobs != 0:
        return 0
    size, code_bytes, scale_bytes = own[ENTRIES], params[P_CODE_BYTES], params[P_SCALE_BYTES]
    row_bytes, per_page = code_bytes + scale_bytes, params[P_ROWS_PER_PAGE]
    staging = own[PLAIN_DEVICE] if lane == own[LANES] else own[STAGING] + lane * size * PAGE_BYTES
    count = np.int64(0)
    for k in range(size):
        entry = lanes.entries[lane * size + k]
        if entry.state != READ:
            continue
        if count == JOBS:
            break
        file = state.files[state.pages[entry.page].file]
        page, first = staging + k * PAGE_BYTES, state.pages[entry.page].number * per_page
        checks = page + TRAILER - 4 * per_page
        target = np.int64(entry.cursor)
        while target >= 0 and count < JOBS:
            place = np.int64(targets[target].place)
            bundle = own[SLAB] + targets[target].slot * params[P_SLOT_STRIDE]
            at = (lane * JOBS + count) * 8
            lanes.jobs[at] = page + place * row_bytes
            lanes.jobs[at + 1] = page + place * row_bytes + code_bytes
            lanes.jobs[at + 2] = checks + 4 * place
            lanes.jobs[at + 3] = np.int64(file.layer) | np.int64(file.column) << 32
            lanes.jobs[at + 4] = first + place
            lanes.jobs[at + 5] = bundle + file.position * code_bytes
            lanes.jobs[at + 6] = bundle + file.heads * code_bytes + file.position * scale_bytes
            lanes.results[lane * JOBS + count] = -1          # a row that the kernel says nothing of is wrong
            lanes.job_target[lane * JOBS + count] = target
            lanes.job_entry[lane * JOBS + count] = lane * size + k
            count += 1
            target = np.int64(targets[target].next)
        entry.cursor = target
        entry.state = CHECKING
        record.ready -= 1
    record.jobs = count
    record.number += 1
    return count


@inlined
@compiled
def finish_round(state, reader, lanes, lane):  # type: ignore[no-untyped-def]
    """If the GPU has stored the number of the lane's round: take its results in. Whether it had."""
    own, record = lanes.own, lanes.lanes[lane]
    if record.jobs == 0 or (own[BROKEN] == 0 and atomic_load(lanes.words, lane * 8) < record.number):
        return False
    for k in range(lane * JOBS, lane * JOBS + record.jobs):
        bad = lanes.results[k] != 0
        state.targets[lanes.job_target[k]].bad = bad
        if bad:
            lanes.entries[lanes.job_entry[k]].bad = 1
    record.jobs = 0
    for entry in range(lane * own[ENTRIES], (lane + 1) * own[ENTRIES]):
        mine = lanes.entries[entry]
        if mine.state != CHECKING:
            continue
        if own[BROKEN] != 0:
            conclude(state, reader, lanes, lane, entry, np.int64(EIO))
        elif mine.cursor >= 0:
            mine.state = READ
            record.ready += 1
        else:
            conclude(state, reader, lanes, lane, entry, np.int64(READ_OK) if mine.bad == 0 else np.int64(READ_CHECK))
    return True


# ---------------------------------------------------------------- new reads


@inlined
@compiled
def free_lane(own, lanes):  # type: ignore[no-untyped-def]
    """(a lane that can be filled or -1, how many there are)."""
    first, count = -1, 0
    for lane in range(own[LANES]):
        if lanes[lane].used == 0 and lanes[lane].lost == 0:
            first = lane if first < 0 else first
            count += 1
    return first, count


@inlined
@compiled
def step_room(state, lanes):  # type: ignore[no-untyped-def]
    """Pages that could be taken now."""
    own = lanes.own
    left = state.params[P_DEPTH] - own[IN_FLIGHT]
    if own[LANES_LEFT] == 0:
        return min(left, own[ENTRIES] - np.int64(lanes.lanes[own[LANES]].used))
    return min(left, own[ENTRIES]) if free_lane(own, lanes.lanes)[0] >= 0 else np.int64(0)


@inlined
@compiled
def background_room(state, lanes):  # type: ignore[no-untyped-def]
    """Of those, pages that may be background: the last free lane is kept for steps, and a quarter of the depth."""
    own, depth = lanes.own, state.params[P_DEPTH]
    most = max(1, depth - depth // 4) - own[BACKGROUNDS]
    if own[LANES_LEFT] > 1 and free_lane(own, lanes.lanes)[1] < 2:
        return np.int64(0)
    return max(0, min(step_room(state, lanes), most))


@inlined
@compiled
def take_again(state, lanes, last, most):  # type: ignore[no-untyped-def]
    """Move up to `most` pages that wait for another try to the front of `again`, those whose next is (not) the last. How many."""
    own, again_list, kinds = lanes.own, lanes.again, lanes.again_background
    count = 0
    for k in range(own[AGAINS]):
        if count < most and is_last(state, np.int64(again_list[k])) == last:
            page, kind = again_list[k], kinds[k]
            again_list[k], kinds[k] = again_list[count], kinds[count]
            again_list[count], kinds[count] = page, kind
            count += 1
    return count


@inlined
@compiled
def drop_again(lanes, count):  # type: ignore[no-untyped-def]
    """The first `count` pages of `again` were taken."""
    own = lanes.own
    own[AGAINS] -= count
    for k in range(own[AGAINS]):
        lanes.again[k] = lanes.again[k + count]
        lanes.again_background[k] = lanes.again_background[k + count]


@inlined
@compiled
def occupy(lanes, lane, entry, index, background):  # type: ignore[no-untyped-def]
    """Page record `index` into a FREE entry."""
    record = lanes.entries[entry]
    record.page, record.cursor, record.background, record.bad, record.state = index, -1, background, 0, READING
    lanes.lanes[lane].used += 1


@inlined
@compiled
def begin(state, own, index, background, time_ns):  # type: ignore[no-untyped-def]
    """A page that was pulled off a ring."""
    state.pages[index].tries = 0
    state.pages[index].submit_ns = time_ns
    own[IN_FLIGHT] += 1
    own[BACKGROUNDS] += background


@inlined
@compiled
def describe(state, lanes, lane, entry):  # type: ignore[no-untyped-def]
    """Write the cuFile descriptor of an entry's read."""
    own, page = lanes.own, state.pages[lanes.entries[entry].page]
    at = entry * 8
    lanes.descriptors[at + D_MODE] = 1                       # CUFILE_BATCH
    lanes.descriptors[at + D_BASE] = own[STAGING]
    lanes.descriptors[at + D_FILE_OFFSET] = page.number * PAGE_BYTES
    lanes.descriptors[at + D_OFFSET] = entry * PAGE_BYTES
    lanes.descriptors[at + D_SIZE] = PAGE_BYTES
    lanes.descriptors[at + D_HANDLE] = lanes.handles[page.file]
    lanes.descriptors[at + D_OPCODE] = 0                     # CUFILE_READ
    lanes.descriptors[at + D_COOKIE] = entry + 1
    lanes.lanes[lane].since_ns = min(lanes.lanes[lane].since_ns, page.submit_ns)


@inlined
@compiled
def fill_lane(state, lanes):  # type: ignore[no-untyped-def]
    """Fill a free lane: with pages that are tried again, then steps, then background ones. (lane, entries); none: (-1, 0)."""
    own = lanes.own
    lane, _ = free_lane(own, lanes.lanes)
    if lane < 0:
        return lane, 0
    size, now = own[ENTRIES], now_ns()
    first = lane * size
    room, left = background_room(state, lanes), state.params[P_DEPTH] - own[IN_FLIGHT]
    count = take_again(state, lanes, False, size)
    for k in range(count):
        occupy(lanes, lane, first + k, np.int64(lanes.again[k]), np.int64(lanes.again_background[k]))
    drop_again(lanes, count)
    left = min(left, size - count)
    steps = pull_step(state, left, lanes.found) if left > 0 else 0
    pulled = steps
    if steps < left:
        pulled += pull_background(state, min(left - steps, room), lanes.found[steps:])
    for k in range(pulled):
        background = 0 if k < steps else 1
        begin(state, own, np.int64(lanes.found[k]), background, now)
        occupy(lanes, lane, first + count + k, np.int64(lanes.found[k]), background)
    count += pulled
    lanes.lanes[lane].since_ns, lanes.lanes[lane].polled_ns = now, now
    for k in range(count):
        describe(state, lanes, lane, first + k)
    lanes.lanes[lane].reading = count
    return lane, count


@inlined
@compiled
def read_plain(state, reader, lanes):  # type: ignore[no-untyped-def]
    """One read by pread: the last try of a page, or any, once all lanes are lost. Whether there was one to make."""
    own, plain = lanes.own, lanes.own[LANES]
    size = own[ENTRIES]
    if lanes.lanes[plain].used == size or (own[LANES_LEFT] > 0 and own[AGAINS] == 0):
        return False
    count = take_again(state, lanes, True, 1)
    if count == 0 and own[LANES_LEFT] == 0:
        count = min(1, own[AGAINS])
    if count == 0 and own[LANES_LEFT] == 0 and own[IN_FLIGHT] < state.params[P_DEPTH]:
        background = 0
        if pull_step(state, 1, lanes.found) == 0:
            background = 1
            if pull_background(state, min(1, background_room(state, lanes)), lanes.found) == 0:
                return False
        begin(state, own, np.int64(lanes.found[0]), background, now_ns())
        lanes.again[own[AGAINS]], lanes.again_background[own[AGAINS]] = lanes.found[0], background
        own[AGAINS] += 1
        count = 1
    if count == 0:
        return False
    entry = plain * size
    while lanes.entries[entry].state != FREE:
        entry += 1
    index, background = np.int64(lanes.again[0]), np.int64(lanes.again_background[0])
    drop_again(lanes, 1)
    occupy(lanes, plain, entry, index, background)
    lanes.lanes[plain].since_ns = state.pages[index].submit_ns
    publish(state, reader, lanes)
    page = own[PLAIN_HOST] + (entry - plain * size) * PAGE_BYTES
    land(state, reader, lanes, plain, entry, plain_read(state, index, page), page, 1)
    return True


# ---------------------------------------------------------------- the loop


@inlined
@compiled
def publish(state, reader, lanes):  # type: ignore[no-untyped-def]
    """Show others what this reader has in the drive."""
    control, own = state.control, lanes.own
    line = READER_LINES + reader * READER_WORDS
    oldest = np.int64(0)
    for lane in range(own[LANES] + 1):
        if lanes.lanes[lane].used > 0 and (oldest == 0 or lanes.lanes[lane].since_ns < oldest):
            oldest = lanes.lanes[lane].since_ns
    for k in range(own[AGAINS]):
        submitted = state.pages[lanes.again[k]].submit_ns
        oldest = submitted if oldest == 0 else min(oldest, submitted)
    atomic_store(control, line + R_OLDEST_NS, oldest)
    atomic_store(control, line + R_IN_FLIGHT, own[IN_FLIGHT])
    atomic_store(control, line + R_ROOM, step_room(state, lanes))


@inlined
@compiled
def give_up(state, reader, lanes):  # type: ignore[no-untyped-def]
    """No try will be made any more (STOP, or a GPU that takes no work): pages that wait for one, or whose rows do, go back."""
    own = lanes.own
    status = np.int64(EIO) if own[BROKEN] != 0 else np.int64(ECANCELED)
    for k in range(own[AGAINS]):
        give_back(state, reader, own, np.int64(lanes.again[k]), np.int64(lanes.again_background[k]), status)
    own[AGAINS] = 0
    if own[BROKEN] == 0:
        return
    for entry in range((own[LANES] + 1) * own[ENTRIES]):
        if lanes.entries[entry].state == READ:
            lanes.lanes[entry // own[ENTRIES]].ready -= 1
            conclude(state, reader, lanes, entry // own[ENTRIES], entry, status)
    while own[STOP_NS] == 0:
        background = pull_step(state, 1, lanes.found) == 0
        if background and pull_background(state, 1, lanes.found) == 0:
            return
        begin(state, own, np.int64(lanes.found[0]), 1 if background else 0, now_ns())
        give_back(state, reader, own, np.int64(lanes.found[0]), 1 if background else 0, status)


@inlined
@compiled
def due_lane(lanes, now):  # type: ignore[no-untyped-def]
    """(the lane whose completions were looked at longest ago or -1: none is due, whether any reads)."""
    own, due, reading = lanes.own, -1, False
    for lane in range(own[LANES]):
        record = lanes.lanes[lane]
        if record.reading > 0 and record.lost == 0:
            reading = True
            if now - record.polled_ns >= POLL_NS and (due < 0 or record.polled_ns < lanes.lanes[due].polled_ns):
                due = lane
    return due, reading


@inlined
@compiled
def nap(state, reader, lanes, timeout_ns):  # type: ignore[no-untyped-def]
    """Sleep until a push or for `timeout_ns` (< 0: for ever), announced as asleep if there is room."""
    control, words = state.control, state.words
    asleep = READER_LINES + reader * READER_WORDS + R_ASLEEP
    word = (1 + reader) * WORD_LINE
    seen = atomic_load(words, word)
    steps, background = step_room(state, lanes), background_room(state, lanes)
    if lanes.own[BROKEN] != 0:
        steps = background = np.int64(1)
    announced = steps > 0 and lanes.own[STOP_NS] == 0
    if announced:
        atomic_store(control, asleep, 1)
        fence()
    if not announced or (not work_waits(state, steps, background) and atomic_load(control, STOP) == 0):
        futex_wait(words, word, seen, timeout_ns)
    if announced:
        atomic_store(control, asleep, 0)


@inlined
@compiled
def rest(state, reader, lanes, now, reading):  # type: ignore[no-untyped-def]
    """There is nothing to do: look again soon while the GPU works, sleep a little while the drive does, else until a push."""
    own = lanes.own
    rounds = False
    for lane in range(own[LANES] + 1):
        rounds = rounds or lanes.lanes[lane].jobs > 0
    if not rounds:
        own[ROUND_NS] = 0
    elif own[ROUND_NS] == 0:
        own[ROUND_NS] = now
    if rounds and now - own[ROUND_NS] < GPU_SPIN_NS:
        return
    if rounds or reading:
        nap(state, reader, lanes, POLL_NS)
    elif own[HELDS] > 0 or own[STOP_NS] > 0 or own[IN_FLIGHT] > 0:
        nap(state, reader, lanes, 2_000_000)
    elif own[IDLE_NS] == 0:
        own[IDLE_NS] = now
    elif now - own[IDLE_NS] >= state.params[P_SPIN_NS]:
        nap(state, reader, lanes, -1)
        own[IDLE_NS] = 0


@inlined
@compiled
def progress(state, reader, lanes):  # type: ignore[no-untyped-def]
    """Take in what the GPU finished and the fault injector let go, read plainly what has to be. Whether there was anything."""
    own = lanes.own
    done = False
    for lane in range(own[LANES] + 1):
        if finish_round(state, reader, lanes, lane):
            own[ROUND_NS] = 0
            done = True
    if own[HELDS] > 0 and not stalled(state):
        release_held(state, reader, lanes)
        done = True
    if own[STOP_NS] > 0 or own[BROKEN] != 0:
        give_up(state, reader, lanes)
    elif read_plain(state, reader, lanes):
        done = True
    if own[TOLD] > 0:
        own[TOLD] = 0
        wake_planner(state)
        done = True
    return done


@compiled
def turn(state, reader, lanes, outcome):  # type: ignore[no-untyped-def]
    """Serve pages until a call is to be made: SUBMIT, STATUS, CHECK, CANCEL (own[LANE], own[COUNT]), or FINISHED after STOP.

    outcome: the call before, STATUS with got[0] events in `events`; SUBMIT, CHECK, CANCEL, FINISHED: nothing to take in.
    """
    state, lanes = borrowed(state), borrowed(lanes)
    control, own = state.control, lanes.own
    line = READER_LINES + reader * READER_WORDS
    if own[LOST] != 0:
        own[LOST] = 0
        lose_lane(state, reader, lanes, own[LANE])
    elif outcome == STATUS:
        reap(state, reader, lanes, own[LANE], np.int64(min(np.int64(lanes.got[0]), own[ENTRIES])))
    while True:
        now = now_ns()
        if atomic_load(control, STOP) != 0 and own[STOP_NS] == 0:
            own[STOP_NS] = now
        done = progress(state, reader, lanes)
        if own[BROKEN] == 0:
            for lane in range(own[LANES] + 1):
                count = make_jobs(state, lanes, lane)
                if count > 0:
                    own[LANE], own[COUNT] = lane, count
                    return CHECK
        if own[STOP_NS] == 0 and own[BROKEN] == 0:
            lane, count = fill_lane(state, lanes)
            if count > 0:
                publish(state, reader, lanes)
                atomic_store(control, line + R_ENTERS, control[line + R_ENTERS] + 1)
                own[LANE], own[COUNT], own[IDLE_NS] = lane, count, 0
                if state.params[P_READERS] > 1:
                    wake_readers(state)                      # those whom the planner left to us
                return SUBMIT
        publish(state, reader, lanes)
        if own[STOP_NS] > 0 and (own[IN_FLIGHT] == 0 or now - own[STOP_NS] > STOP_GRACE_NS):
            atomic_store(control, line + R_STATE, READER_RETURNED if own[IN_FLIGHT] == 0 else READER_STUCK)
            return FINISHED
        due, reading = due_lane(lanes, now)
        if own[STOP_NS] > 0 and now - own[STOP_NS] > STOP_GRACE_NS // 2 and own[CANCELLED] < own[LANES]:
            own[LANE] = own[CANCELLED]
            own[CANCELLED] += 1
            return CANCEL
        if due >= 0:
            lanes.lanes[due].polled_ns = now
            lanes.got[0] = own[ENTRIES]
            own[LANE] = due
            return STATUS
        if not done:
            rest(state, reader, lanes, now, reading)
