"""Sequences: every way to pass tokens gives the same flat arrays; wrong ones are refused; flattening cuts and marks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ssdgram.errors import TokenError
from ssdgram.geometry import MAX_NGRAM
from ssdgram.kernels.hash import OUTPUT, PARTICIPATES, STARTS
from ssdgram.sequence import Sequence, bad_id, check_ids, flatten, on_host

P, S, O = PARTICIPATES, STARTS, OUTPUT


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8", ">u2"])
def test_every_integer_type(dtype):
    sequence = Sequence(np.array([5, 6, 7], dtype), np.array([1, 0, 1], dtype), np.array([3, 4], dtype), np.array([0, 1], bool))
    assert sequence.flat_tokens.dtype == np.int32 and sequence.flat_tokens.tolist() == [3, 4, 5, 6, 7]
    assert sequence.flat_flags.dtype == np.uint8 and sequence.flat_flags.tolist() == [S, P, P | O, O, P | O]
    assert len(sequence) == 3 and sequence.lookback_length == 2
    assert repr(sequence) == "Sequence(3 tokens, 2 of lookback)"


def test_lists_tuples_and_nothing():
    assert Sequence([1, 2]).flat_flags.tolist() == [P | O | S, P | O]
    assert Sequence((1, 2), lookback=()).flat_tokens.tolist() == [1, 2]
    for empty in ([], np.empty(0, np.int64), ()):
        assert len(Sequence(empty, empty, empty, empty)) == 0
    assert len(Sequence([], lookback=[4]).flat_tokens) == 1


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_torch_tensors(dtype):
    torch = pytest.importorskip("torch")
    tokens = torch.arange(6).to(getattr(torch, dtype))[::2]
    sequence = Sequence(tokens, torch.tensor([True, False, True]), torch.tensor([9]), torch.tensor([True]))
    assert sequence.flat_tokens.tolist() == [9, 0, 2, 4]
    assert sequence.flat_flags.tolist() == [S | P, P | O, O, P | O]
    assert sequence.device_tokens is None
    assert on_host(tokens).tolist() == [0, 2, 4]
    for bad in (tokens.float(), tokens.bool(), tokens[:, None]):
        with pytest.raises(TokenError):
            Sequence(bad)


def test_device_tokens_are_kept_and_not_read():
    """A stand-in for a CUDA tensor, by name: it has no values, so reading them would fail."""
    kind = type("Tensor", (), {"__module__": "torch", "is_cuda": True, "ndim": 1, "dtype": type("dtype", (), {
        "is_floating_point": False, "is_complex": False, "__str__": lambda self: "torch.int64"})(), "__len__": lambda self: 4})
    tokens = kind()
    sequence = Sequence(tokens, [True] * 4, [7])
    assert sequence.device_tokens is tokens and len(sequence) == 4
    assert sequence.flat_tokens.tolist() == [7, 0, 0, 0, 0]


def test_no_torch_is_imported():
    code = "import sys; from ssdgram.sequence import Sequence; Sequence([1, 2], [True, False]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_callers_arrays_are_copied():
    tokens, part = np.array([1, 2], np.int32), np.array([True, True])
    sequence = Sequence(tokens, part, tokens, part)
    tokens[:], part[:] = 0, False
    assert sequence.flat_tokens.tolist() == [1, 2, 1, 2] and sequence.flat_flags.tolist() == [S | P, P, P | O, P | O]


@pytest.mark.parametrize("arguments, message", [
    (([1.5],), r"tokens are float64 \[1\]: expected integers of shape \[T\]"),
    (([[1], [2]],), r"tokens are int64 \[2, 1\]"),
    (([[1], [2, 3]],), "a list is not rectangular"),
    ((5,), r"tokens are int64 \[\]"),
    (([True],), r"tokens are bool \[1\]"),
    (("abc",), "tokens are <U3"),
    (([2**70],), "tokens are object"),
    ((np.empty(0),), r"tokens are float64 \[0\]"),
    (([1, 2], [True]), r"participates is bool \[1\]: expected bool of shape \[2\], one per token"),
    (([1], [0.5]), r"participates is float64 \[1\]"),
    (([1], None, [2, 3], [True]), r"lookback_participates is bool \[1\]: expected bool of shape \[2\]"),
    (([1], None, None, [True]), r"lookback_participates is bool \[1\]: expected bool of shape \[0\]"),
    (([1], None, [0.5]), r"lookback are float64 \[1\]"),
])
def test_refused(arguments, message):
    with pytest.raises(TokenError, match=message):
        Sequence(*arguments)


def test_a_long_lookback_is_cut_to_what_can_count():
    whole = np.arange(100)
    sequence = Sequence([5], None, whole, whole % 2)
    assert sequence.lookback_length == MAX_NGRAM - 1
    assert sequence.flat_tokens.tolist() == [*range(100 - 15, 100), 5]
    assert sequence.flat_flags[:3].tolist() == [S | P, 0, P]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_flatten(n):
    sequences = [Sequence([1, 2], lookback=[7, 8, 9]), Sequence([]), Sequence([], lookback=[6]),
                 Sequence([3], [False], [5], [False]), Sequence([4])]
    tokens, flags, count = flatten(sequences, n)
    before = [7, 8, 9][-(n - 1):]
    assert tokens.dtype == np.int32 and flags.dtype == np.uint8 and count == 4
    assert tokens.tolist() == [*before, 1, 2, 6, 5, 3, 4]
    assert flags.tolist() == [P | S, *[P] * (len(before) - 1), P | O, P | O, P | S, S, O, P | O | S]
    assert sequences[0].flat_flags.tolist() == [P | S, P, P, P | O, P | O]     # unchanged
    assert [len(array) for array in flatten([], n)[:2]] == [0, 0]


def test_flatten_one_copies_nothing_unless_it_cuts():
    sequence = Sequence([1], lookback=[4, 5, 6])
    assert flatten([sequence], 4)[0] is sequence.flat_tokens
    tokens, flags, _ = flatten([sequence], 3)
    assert tokens.tolist() == [5, 6, 1] and flags.tolist() == [P | S, P, P | O]


def test_bad_ids_are_named():
    sequences = [Sequence([1, 2], lookback=[9, 9, 9, -1]), Sequence([]), Sequence([3, 2**33, 5], [0, 1, 1], [1, 2, 3])]
    for n, wrong in ((2, 3), (4, 3)):
        tokens, flags, _ = flatten(sequences, n)
        with pytest.raises(TokenError, match=r"lookback position -1 \(before the first token\) of sequence 0 holds token id -1: "
                           r"expected 0 \.\. 9 \(a vocabulary of 10\); mark placeholders"):
            check_ids(sequences, n, tokens, flags, 10)
        tokens[n - 2] = wrong
        with pytest.raises(TokenError, match="position 1 of sequence 2 holds token id 8589934592: expected 0"):
            check_ids(sequences, n, tokens, flags, 10)
        tokens[-2] = 4
        check_ids(sequences, n, tokens, flags, 10)
    assert "position 1 holds token id -3" in str(bad_id([Sequence([0, 0])], 4, 1, 10, token=-3))


def test_ids_beyond_32_bits_stay_bad_and_keep_their_value():
    for value in (2**31 - 1, 2**31, 2**32 + 3, 2**63, -2**31 - 1, -2**63):
        array = np.array([0, value], np.int64 if value < 0 else np.uint64)
        sequence = Sequence(array, lookback=array)
        assert [sequence.token_at(k) for k in range(4)] == [0, value, 0, value]
        assert sequence.flat_tokens[1] == sequence.flat_tokens[3] == (2**31 - 1 if value > 0 else -2**31)


def test_the_flat_form_goes_in_as_it_came_out():
    parts = [Sequence([5, 6], lookback=[1, 2, 3]), Sequence([7], participates=[False]), Sequence([8, 9])]
    tokens, flags, count = flatten(parts, 4)
    whole = Sequence.of_flat(tokens, flags)
    again = flatten([whole], 4)
    assert (again[0] == tokens).all() and (again[1] == flags).all() and again[2] == count == len(whole)
    tokens[0] = 99
    assert whole.flat_tokens[0] == 1, "it is a copy"


@pytest.mark.parametrize(("tokens", "flags"), [
    (np.zeros(3, np.int64), np.zeros(3, np.uint8)), (np.zeros(3, np.int32), np.zeros(3, bool)),
    (np.zeros(3, np.int32), np.zeros(2, np.uint8)), (np.zeros((3, 1), np.int32), np.zeros((3, 1), np.uint8))])
def test_a_flat_form_of_other_types_is_refused(tokens, flags):
    with pytest.raises(TokenError, match="the flat form is"):
        Sequence.of_flat(tokens, flags)


def test_a_deferred_sequences_arrays_are_made_when_they_are_asked_for():
    """A GPU's kernels write elsewhere, so that a step makes none."""
    made = Sequence.deferred(3, 5, lambda *_: None)
    with pytest.raises(AttributeError):
        Sequence.flat_tokens.__get__(made)                   # past the making
    assert len(made) == 3 and repr(made) == "Sequence(3 tokens, 0 of lookback)"
    tokens, flags, count = flatten([made], 4)
    assert tokens.tolist() == [0] * 5 == flags.tolist() and count == 3 and tokens is made.flat_tokens and flags is made.flat_flags
    with pytest.raises(AttributeError, match="no such_thing"):
        _ = made.such_thing
