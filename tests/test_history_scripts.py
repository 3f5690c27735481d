"""Ten thousand random scripts of what engines do to requests; the keys of every position are those of a fresh run of the final text.

A script runs a few requests through chunked prefill, decode, drafts that are rejected, forks, preemption and resumption (with a
prefix that is still cached), image spans, and a move to another process. Steps take their chunks of all requests at once, as one
ragged Sequence or as a list; what a step found for a position stands until that position is computed again.
"""

import numpy as np
import pytest

from ssdgram import History, Sequence
from ssdgram.kernels.hash import ngram_keys
from ssdgram.sequence import flatten

SCRIPTS, DEPTH = 10_000, 3


class Hash:
    """The compiled hash of a geometry over Sequences: keys [T, L, orders]."""

    def __init__(self, made):
        geometry = made.geometry
        self.map = geometry.checked_map(made.token_map)
        self.multipliers, self.rule, self.fill, self.n = (geometry.multiplier_array, geometry.rule, geometry.fill(self.map),
                                                          geometry.max_ngram)
        self.shape = (len(geometry.layers), geometry.orders)

    def __call__(self, sequences):
        tokens, flags, positions = flatten(sequences, self.n)
        out = np.empty((positions, *self.shape), np.int64)
        assert ngram_keys(tokens, flags, 0, len(tokens), self.map, self.multipliers, self.rule, self.fill, out) == positions
        return out


class Request:
    """A request: its history, and the key that was computed last for each position."""

    def __init__(self, history, keys=None):
        self.history, self.keys = history, [] if keys is None else keys

    @property
    def waiting(self):
        return len(self.history) - len(self.keys)


def step(hash_of, chunks, ragged):
    """Compute chunks {request: tokens} of one step."""
    stops = {request: len(request.keys) + count for request, count in chunks.items()}
    if ragged:
        tokens, windows, valid, part, window_part = [], [], [], [], []
        for request, stop in stops.items():
            start = len(request.keys)
            tokens.append(request.history._tokens[start:stop])
            part.append(request.history._flags[start:stop])
            before, flags = request.history.lookback(start, DEPTH + 1)
            gap = DEPTH - len(before)
            windows.append([0] * gap + before.tolist())
            valid.append([False] * gap + [True] * len(before))
            window_part.append([False] * gap + flags.tolist())
        sequences = [Sequence.ragged(np.concatenate(tokens), list(chunks.values()), windows, valid, participates=np.concatenate(part),
                                     windows_participate=window_part)]
    else:
        sequences = [request.history.sequence(len(request.keys), stop) for request, stop in stops.items()]
    found, begin = hash_of(sequences), 0
    for request, count in chunks.items():
        request.keys += list(found[begin:begin + count])
        begin += count


def text(generator, vocabulary):
    """A few tokens, some of them an image span."""
    count = int(generator.integers(1, 9))
    return generator.integers(0, vocabulary, count), generator.random(count) < 0.85


def play(generator, hash_of, vocabulary):
    """One script; the requests at its end."""
    requests = [Request(History(*text(generator, vocabulary))) for _ in range(int(generator.integers(1, 4)))]
    for _ in range(int(generator.integers(3, 9))):
        request = requests[int(generator.integers(len(requests)))]
        action = generator.integers(7)
        if action == 0:                                      # more of a prompt
            request.history.append(*text(generator, vocabulary))
        elif action == 1 and request.waiting == 0:           # drafts: verified in a step, some rejected, others in their place
            length = len(request.history)
            request.history.append(generator.integers(0, vocabulary, 4))
            step(hash_of, {request: 4}, ragged=True)
            accepted = length + int(generator.integers(0, 4))
            request.history.rewind(accepted)
            del request.keys[accepted:]
            request.history.append(generator.integers(0, vocabulary, 1))
        elif action == 2:                                    # a beam goes its own way
            length = int(generator.integers(0, len(request.history) + 1))
            requests.append(Request(request.history.fork(length), request.keys[:min(length, len(request.keys))]))
            requests[-1].history.append(*text(generator, vocabulary))
        elif action == 3:                                    # preempted; on return a part is still in the prefix cache
            del request.keys[int(generator.integers(0, len(request.keys) + 1)):]
        elif action == 4:                                    # on to a process that has the token ids only
            request.history = History.import_bytes(request.history.export_bytes())
        else:                                                # a step of several requests
            chunks = {other: int(generator.integers(0, other.waiting + 1)) for other in requests if other.waiting}
            if chunks:
                step(hash_of, chunks, ragged=action == 5)
    rest = {request: request.waiting for request in requests if request.waiting}
    if rest:
        step(hash_of, rest, ragged=bool(generator.integers(2)))
    return requests


@pytest.mark.parametrize("part", range(4))
def test_every_position_has_the_key_of_a_fresh_run(engram, part):
    hash_of = Hash(engram)
    for script in range(part * SCRIPTS // 4, (part + 1) * SCRIPTS // 4):
        for request in play(np.random.default_rng(script), hash_of, engram.vocabulary):
            fresh = hash_of([Sequence(request.history.tokens, request.history.participates)])
            np.testing.assert_array_equal(np.array(request.keys).reshape(fresh.shape), fresh, err_msg=f"script {script}")


def test_the_same_holds_where_a_segment_ends_at_eos(ple):
    """PLE's rule: tokens behind an EOS do not see what is before it."""
    hash_of = Hash(ple)
    for script in range(300):
        generator = np.random.default_rng(10**6 + script)
        for request in play(generator, hash_of, ple.vocabulary):
            fresh = hash_of([Sequence(request.history.tokens, request.history.participates)])
            np.testing.assert_array_equal(np.array(request.keys).reshape(fresh.shape), fresh, err_msg=f"script {script}")
