"""The planner's own arrays: batches, slots, and the life of each.

    batch   FREE ─submit─► QUEUED ─► PLANNING ─► EXPANDING ─► WAITING ─► DONE ─► UNWINDING ─► FREE
                             ▲           │ no slot left           (all rows of all layers in their slots)
                             └─UNWINDING─┘ it holds nothing while it waits for others to release
            AWAITING comes before QUEUED for tokens that a GPU still has to deliver, SUBMITTED before both: in the request ring;
            release (or cancel) leads from any of them to UNWINDING: first the words are awaited that the GPU stores behind
            what it still does (deliver tokens, gather from the slots), then the batch's interest in its slots is dropped,
            one by one

    slot    FREE ─take─► RESERVED ─page reads made─► READING ─last row placed─► READY ─evicted, refs 0─► FREE
                                                        └─ a row could not be read ─► FAILED ─refs 0─► FREE

A slot's `refs` counts the batches that use it, and one for its reads while they are under way. A bundle that has a slot is
found in exactly one place: the directory, or (pushed out of it while still referenced) the overflow table; a FAILED one in
neither. A hot bundle may have a copy in a slot of the HBM tier as well; that copy lives no longer than the bundle, and is
dropped only while no batch uses the bundle. Only the planner's thread writes any of this, except where it says otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# batch stages (batch_words)
(FREE_BATCH, QUEUED, PLANNING, EXPANDING, WAITING, DONE, UNWINDING, AWAITING, SUBMITTED) = range(9)
# why a batch cannot be served (batch_words)
NO_ERROR, TOO_LARGE, BAD_TOKEN = 0, 1, 2
# layer states (batch_words)
LAYER_PENDING, LAYER_READY, LAYER_FAILED = 0, 1, 2

# batch_words: int32, `batch_line(layers)` words a batch, written by the planner and read by any thread
W_SEQUENCE, W_SLEEPERS, W_STAGE, W_ERROR, W_STARVED, W_LAYER = 0, 1, 2, 3, 4, 5      # sequence: futex word


def batch_line(layers: int) -> int:
    """int32 words of a batch in `batch_words`: whole cache lines."""
    return -(-(W_LAYER + layers) // 16) * 16


# slot states
SLOT_FREE, SLOT_RESERVED, SLOT_READING, SLOT_READY, SLOT_FAILED = range(5)
NOWHERE, IN_DIRECTORY, IN_OVERFLOW = 0, 1, 2

SLOT = np.dtype([                                            # 32 bytes: two to a cache line, none on two
    ("x", np.int64),                                         # of a FREE one: the next in the free list
    ("ticket", np.int64),                                    # the last batch that counted itself into refs
    ("refs", np.int32),
    ("hbm", np.int32),                                       # its copy in the HBM tier, NO_COPY, or WANTS_COPY
    ("pending", np.int16),                                   # rows still to be placed
    ("status", np.uint8),
    ("group", np.uint8),
    ("where", np.uint8),
    ("priority", np.uint8),                                  # class of its page reads
    ("failed", np.uint8),                                    # 1: a page could not be read, its FAILURE says which
    ("spare", np.uint8),
], align=True)

FAILURE = np.dtype([                                         # one per slot, apart: written and read when a read failed
    ("status", np.int32),                                    # of the page that could not be read
    ("file", np.int32),
], align=True)

NO_COPY, WANTS_COPY = -1, -2

HBM_SLOT = np.dtype([                                        # one slot of the HBM tier
    ("owner", np.int32),                                     # slot whose bundle it holds a copy of, -1: free
    ("ready", np.int32),                                     # 0: the copy is under way
    ("next", np.int32),                                      # in the free list
    ("spare", np.int32),
], align=True)

BATCH = np.dtype([
    ("ticket", np.int64),
    ("tokens", np.int64),                                    # address of int32 [flat]
    ("flags", np.int64),                                     # address of uint8 [flat]
    ("slots", np.int64),                                     # address of int32 [layers, positions, orders]: the plan's result
    ("held", np.int64),                                      # address of int32 [layers, positions * orders]: distinct slots
    ("flag", np.int64),                                      # address of an int64 that becomes the ticket when the tokens are
                                                             # there; 0: they are
    ("flat", np.int64),
    ("positions", np.int64),
    ("window", np.int64),                                    # > 0: plan so many flat tokens at a time and hold nothing after
    ("cursor", np.int64),                                    # flat tokens planned
    ("start", np.int64),                                     # flat token where this window began
    ("planned", np.int64),                                   # positions planned (of this window)
    ("submitted_ns", np.int64),
    ("taken_ns", np.int64),                                  # first slice of the plan
    ("planned_ns", np.int64),
    ("published_ns", np.int64),                              # last layer complete
    ("busy_ns", np.int64),                                   # planner's work on it
    ("need", np.int64),                                      # distinct bundles found so far
    ("probes", np.int64),
    ("misses", np.int64),
    ("joined", np.int64),                                    # bundles that another batch was already reading
    ("reads", np.int64),                                     # pages asked for
    ("given", np.int64),                                     # C_GIVEN when it starved, and what it gave back itself since
    ("priority", np.int32),
    ("released", np.int32),
    ("layer", np.int32),                                     # of the unwinding or expanding cursor
    ("expand", np.int32),
    ("bad_token", np.int32),                                 # flat index, if the tokens came from a GPU and one is no token
    ("queue_next", np.int32),
    ("chunks", np.int32),                                    # of its next job for the crew; < 0: slices to go alone before
    ("settled", np.int32),                                   # keys of the present slice that have their slots, if that was left half done
], align=True)

LAYER = np.dtype([                                           # one per batch and layer
    ("held", np.int32),                                      # length of its list of distinct slots
    ("unready", np.int32),                                   # of those not READY when they were planned
    ("cursor", np.int32),                                    # all before it are READY or FAILED
    ("failed_slot", np.int32),
    ("published_ns", np.int64),
    ("word", np.int64),                                      # address of the int64 that the GPU stores behind its last gather; 0: none
    ("expected", np.int64),                                  # what that word must have reached
], align=True)

GROUP = np.dtype([                                           # one per served layer and order
    ("number", np.uint8),                                    # group number (design section 2): layer index in the store x orders + order
    ("heads", np.int32),                                     # rows in its bundles here; 0: not served
    ("file", np.int32),                                      # first of its files, which follow each other
    ("order", np.int32),
    ("layer", np.int32),                                     # index among the served layers
], align=True)

# plan_control: int64, one line for each writer
C_REQUEST_HEAD, C_REQUEST_TAIL, C_STATE, C_FREE, C_HAND, C_QUEUES, C_PAGES, C_MISC, C_BEAT = (8 * k for k in range(9))
C_TAKEN_NS, C_LONG_SLEEP = C_BEAT, C_BEAT + 1                # when the last request was taken; 1: asleep until somebody rings
C_CHUNKS = C_BEAT + 2                                        # two words, by class: chunks that a batch's first job for the crew has
# C_FREE: free list [first, count]; C_HAND: reclaim sweep; C_QUEUES: [step first, last, background first, last];
# C_PAGES: [free page, free pages, free target, free targets, background pages]; C_MISC: see below
C_IDLE, C_OVERFLOW, C_ACTIVE, C_TICKS, C_BUILDING, C_BUILDING_BACKGROUND, C_ISSUED, C_ISSUED_BACKGROUND = (C_MISC + k for k in range(8))
(C_PUSH, C_PUSH_BACKGROUND, C_GIVEN, C_HBM_FREE, C_HBM_HAND, C_WANTED, C_COPIES, C_COPYING) = (9 * 8 + k for k in range(8))
C_COPY_REQUESTED = 10 * 8                                    # copy batches asked for: the copier (any thread) launches the newest
C_COUNT = 11 * 8
# idle: READY bundles in the directory that no batch uses; building, issued: length of `building` and how much of it was
# pushed, by class; push: 1 while it is being pushed; given: counts slots whose last user left; wanted: bundles in `wants`;
# copies: entries of `copies`; copying: 1 while the GPU makes them

# plan_params: int64, constant after open
(PP_LAYERS, PP_ORDERS, PP_GROUPS, PP_SLOTS, PP_SETS, PP_BATCHES, PP_PAGES, PP_TARGETS, PP_BUCKETS, PP_RULE, PP_FILL, PP_RANK,
 PP_WORLD, PP_REQUESTS, PP_SPIN_NS, PP_DEGRADED_NS, PP_STEP_PAGES, PP_BATCH_LINE, PP_VOCABULARY, PP_HOT, PP_CREW, PP_COUNT) = range(22)

# store states (plan_control[C_STATE])
LOADING, WARMING, SERVING, DEGRADED = range(4)
STATE_NAMES = ("loading", "warming", "ready", "degraded")

# statistics: int64, written by the planner alone
ORDERS_MAX = 16
(S_HITS, S_JOINS, S_MISSES, S_REPEATS, S_HBM_HITS) = (ORDERS_MAX * k for k in range(5))
# [order]: found ready; found in reading; read; met before in its batch; of the ready ones, those with a copy in HBM
(S_BATCHES, S_TOKENS, S_READS, S_MERGED, S_EVICTIONS, S_RECLAIMS, S_STARVED, S_CANCELLED, S_FAILED_ROWS, S_LOOPS, S_SLEEPS,
 S_BUSY_NS, S_PROMOTED, S_DEGRADED, S_LONGEST_NS, S_COPIED, S_DROPPED, S_SCALARS_END) = range(5 * ORDERS_MAX, 5 * ORDERS_MAX + 18)
S_ENGINE_US = S_SCALARS_END                                  # histogram of request taken to last row published, power-of-two buckets of us
S_COUNT = S_ENGINE_US + 32

COPIES = 256                                                 # bundles that are copied to HBM in one go
SLICE = 64                                                   # positions planned without looking up: 64 x 6 probes are about 50 us

# the crew (see _crew.py): int64 words, one line for each writer
CREW_NEXT, CREW_DONE, CREW_SLEEPERS, CREW_BATCH, CREW_WORDS = 0, 8, 16, 24, 32
# next: job number << 32 | chunks << 16 | first chunk that nobody took; done: chunks that are planned; batch: whose they are
CHUNKS = 16                                                  # SLICEs planned side by side, at the most
(K_START, K_STOP, K_FIRST, K_COUNT, K_LEFT, K_IDLE, K_HOT, K_HELD) = range(8)
# of a chunk: flat positions [start, stop); number of its first output position, how many it has; keys left to the planner;
# slots that were idle; one hot slot without an HBM copy, -1; then: distinct slots [layer], hits [order], repeats, HBM hits
ABSENT, NOT_SERVED = -1, -2


def chunk_line(layers: int, orders: int) -> int:
    """int64 words of a chunk in `chunks`: whole cache lines."""
    return -(-(K_HELD + layers + 3 * orders) // 8) * 8


SUBMIT, RELEASE = 0, 1                                       # requests: batch * 2 + kind


class Plan(NamedTuple):
    """B batches, L layers served, G = L x orders groups, S slots."""

    control: np.ndarray                                      # int64 [C_COUNT]
    params: np.ndarray                                       # int64 [PP_COUNT]
    stats: np.ndarray                                        # int64 [S_COUNT]
    requests: np.ndarray                                     # int32 [PP_REQUESTS], a power of two
    batches: np.ndarray                                      # BATCH [B]
    layers: np.ndarray                                       # LAYER [B * L]
    words: np.ndarray                                        # int32 [B * batch_line(L)]
    active: np.ndarray                                       # int32 [B]: batches that are not FREE, in order of tickets
    gpu_words: np.ndarray                                    # int64 [B * L]: the GPU counts a batch's gathers here; pinned
    token_words: np.ndarray                                  # int64 [B]: the GPU stores a batch's ticket behind its tokens; pinned
    hbm: np.ndarray                                          # HBM_SLOT [H], [0] without an HBM tier
    wants: np.ndarray                                        # int32 [COPIES]: slots whose bundles are hot
    copies: np.ndarray                                       # int32 [2 * COPIES]: (slot, HBM slot) pairs for the copier; pinned
    copy_word: np.ndarray                                    # int64 [8]: [0] is stored by the GPU behind each batch of copies; pinned
    slots: np.ndarray                                        # SLOT [S]
    failures: np.ndarray                                     # FAILURE [S]
    directory: np.ndarray                                    # SET [sets]
    sketch: np.ndarray                                       # BLOCK [sets]
    overflow: np.ndarray                                     # CELL
    buckets: np.ndarray                                      # int32 [PP_BUCKETS]: page records by (file, page), chained
    building: np.ndarray                                     # int32 [2 * P]: page records made and not yet pushed, by class
    groups: np.ndarray                                       # GROUP [G]
    group_index: np.ndarray                                  # int32 [256]: group number -> index in groups, -1
    multipliers: np.ndarray                                  # int64 [L, orders + 1]
    token_map: np.ndarray                                    # int32 [V], or [0]
    keys: np.ndarray                                         # int64 [chunks * SLICE * G]: keys of each chunk
    found: np.ndarray                                        # int64 [chunks * SLICE * G]: a chunk's slots; ABSENT, NOT_SERVED
    entries: np.ndarray                                      # int64 [chunks * SLICE * G]: set * WAYS + way of each
    crew: np.ndarray                                         # int64 [CREW_WORDS]
    crew_futex: np.ndarray                                   # int32 [16]: [0] changes with every job
    chunks: np.ndarray                                       # int64 [chunks * chunk_line(L, orders)]
