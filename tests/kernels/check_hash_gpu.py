"""hash_gpu: keys and row ids against the golden vectors and a plain-Python restatement, lookback, DEAD tokens, bad ids."""

import json

import numpy as np
import pytest
import torch
from where import DEVICE, GOLDEN, golden, put

from ssdgram.kernels.hash_gpu import NO_FAULT, OUTPUT, PARTICIPATES, STARTS, Hash


def constants(name):
    """(multipliers, primes, offsets, token map, fill, cases) of a golden hash file."""
    if name == "v41_full":
        found = json.loads((GOLDEN / "v41_constants.json").read_text())
        table = golden("v41_token_map.npz")["token_map"]
        fill = found["pad_compressed_id"]
    else:
        found = json.loads((GOLDEN / f"hash_{name}.json").read_text())["config"]
        table = np.array(found["token_map"], np.int32)
        fill = int(table[found["engram_pad_token_id"] if "engram_pad_token_id" in found else found["pad_token_id"]])
    layers = len(found["multipliers"])
    primes = np.array(found["primes"], np.int64).reshape(layers, -1)
    offsets = np.array(found["offsets"], np.int64).reshape(layers, -1)
    return np.array(found["multipliers"], np.int64), primes, offsets, table, fill


def run(hasher, tokens, flags):
    count = int(((flags & OUTPUT) != 0).sum())
    keys = torch.full((count, hasher.layers, hasher.shifts - 1), -1, dtype=torch.int64, device=DEVICE)
    rows = torch.full((count, hasher.layers, hasher.columns), -1, dtype=torch.int64, device=DEVICE)
    fault = torch.full((1,), NO_FAULT, dtype=torch.int32, device=DEVICE)
    hasher(put(tokens), put(flags), keys=keys, rows=rows, fault=fault)
    return keys.cpu().numpy(), rows.cpu().numpy(), fault.item()


def plain_keys(tokens, flags, multipliers, table, fill, ple=False):
    """int64 [T, L, n - 1], token by token, in Python's integers."""
    out = []
    for p in range(len(tokens)):
        if not flags[p] & OUTPUT:
            continue
        values, blocked, place = [], False, p
        for shift in range(multipliers.shape[1]):
            if shift > 0:
                blocked = blocked or place == 0 or bool(flags[place] & STARTS)
                place -= 1
            if not blocked and (not flags[place] & PARTICIPATES or (ple and shift > 0 and tokens[place] == fill)):
                blocked = True
            values.append(fill if blocked else int(table[tokens[place]]))
        for row in multipliers.tolist():
            x, keys = values[0] * row[0], []
            for value, multiplier in zip(values[1:], row[1:]):
                x ^= value * multiplier
                keys.append(x)
            out.append(keys)
    return np.array(out, np.int64).reshape(-1, *np.array(multipliers).shape[:1], multipliers.shape[1] - 1)


@pytest.mark.parametrize("name", ("small_a", "small_b", "small_c", "small_d", "v41_full"))
def test_golden_row_ids(name):
    multipliers, primes, offsets, table, fill = constants(name)
    hasher = Hash(multipliers, primes, offsets, token_map=table, fill=fill, vocabulary=len(table), device=DEVICE)
    data = golden(f"hash_{name}.npz")
    cases = sorted({key.split("/")[0] for key in data})
    for case in cases:
        tokens, part = data[f"{case}/token_ids"].astype(np.int32), data[f"{case}/participates"]
        flags = (part * PARTICIPATES + OUTPUT).astype(np.uint8)
        flags[:1] |= STARTS
        keys, rows, fault = run(hasher, tokens, flags)
        assert (rows == data[f"{case}/row_ids"]).all()
        assert (keys == plain_keys(tokens, flags, multipliers, table, fill)).all()
        assert fault == NO_FAULT


@pytest.mark.parametrize("ple", (False, True))
def test_sequences_with_lookback_against_plain_python(ple):
    generator = np.random.default_rng(3)
    multipliers, primes, offsets, table, fill = constants("small_a")
    if ple:
        table, fill = np.arange(table.max() + 1, dtype=np.int32), 5       # the multipliers' bound is that of these ids
    tokens = generator.integers(0, len(table), 200).astype(np.int32)
    tokens[generator.random(200) < 0.1] = fill
    flags = (generator.random(200) < 0.85).astype(np.uint8) * PARTICIPATES
    flags |= (generator.random(200) < 0.1).astype(np.uint8) * STARTS
    flags |= (generator.random(200) < 0.8).astype(np.uint8) * OUTPUT
    tokens[(flags & PARTICIPATES) == 0] = -7                 # never looked at
    hasher = Hash(multipliers, primes, offsets, token_map=None if ple else table, fill=fill, vocabulary=len(table),
                  rule="ple" if ple else "engram", device=DEVICE)
    keys, rows, fault = run(hasher, tokens, flags)
    wanted = plain_keys(tokens, flags, multipliers, table, fill, ple)
    assert fault == NO_FAULT
    assert (keys == wanted).all()
    assert (rows == np.repeat(wanted, primes.shape[1] // wanted.shape[2], -1) % primes + offsets).all()


def test_the_first_bad_id_is_reported():
    multipliers, primes, offsets, table, fill = constants("small_a")
    hasher = Hash(multipliers, primes, offsets, token_map=table, fill=fill, vocabulary=len(table), device=DEVICE)
    flags = np.full(150, PARTICIPATES | OUTPUT, np.uint8)
    for bad in (-1, len(table), 1 << 30, -(1 << 31)):
        tokens = np.zeros(150, np.int32)
        tokens[[140, 71]] = bad
        assert run(hasher, tokens, flags)[2] == 71
        tokens[:] = 0
        assert run(hasher, tokens, flags)[2] == NO_FAULT


def test_nothing_to_hash_and_what_does_not_fit():
    multipliers, primes, offsets, table, fill = constants("small_a")
    hasher = Hash(multipliers, primes, offsets, token_map=table, fill=fill, vocabulary=len(table), device=DEVICE)
    run(hasher, np.zeros(0, np.int32), np.zeros(0, np.uint8))
    with pytest.raises(ValueError, match="int32"):
        hasher(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="vocabulary"):
        Hash(multipliers, primes, offsets, token_map=table, fill=fill, vocabulary=len(table) + 1, device=DEVICE)
    with pytest.raises(ValueError, match="rule"):
        Hash(multipliers, primes, offsets, fill=fill, vocabulary=10, rule="other", device=DEVICE)
