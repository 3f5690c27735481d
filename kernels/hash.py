"""The n-gram hash (spec A5, A6, B3): flat token arrays in, keys x out.

Works on the flat form that `ssdgram.sequence.flatten` makes: tokens of any number of sequences one behind the other, each
with its lookback before it, one flag byte per token. Two rules: ENGRAM_RULE blocks slots at the start of a sequence and at
tokens that take no part; PLE_RULE ends a segment at EOS as well. It knows neither primes nor caches (`rows_of_keys` apart).
Invariant: the id of a token that takes no part is never looked at; all others were checked (`check_tokens`) before.

    shift s of position p is blocked  <=>  p - s lies before the sequence (or segment), or any of t[p] .. t[p-s] takes no part
    x_s = x_(s-1) ^ (blocked ? fill : map[t[p-s]]) * multiplier[s];      order m (m-gram) uses x_(m-1)

For PLE the published sources leave open what a position that takes no part hashes to. Here it is what Engram's rule gives:
its own key is that of EOS in every slot, and for the tokens behind it it is the end of a segment.
"""

from __future__ import annotations

from ssdgram._compiled import address_of, compiled_lean, prefetch

PARTICIPATES, STARTS, OUTPUT = 1, 2, 4                       # flag bits of a flat token
ENGRAM_RULE, PLE_RULE = 0, 1
AHEAD = 32                                                   # flat tokens between asking for an entry of the map and using it


@compiled_lean
def check_tokens(tokens, flags, vocab_size):  # type: ignore[no-untyped-def]
    """Flat index of the first token that takes part and whose id is not in 0 .. vocab_size - 1; -1 if there is none.

    tokens int32 [N], flags uint8 [N].
    """
    for index in range(len(tokens)):
        if flags[index] & PARTICIPATES and (tokens[index] < 0 or tokens[index] >= vocab_size):
            return index
    return -1


@compiled_lean
def plain_sequence(ids, tokens, flags):  # type: ignore[no-untyped-def]
    """Copy ids (any integers [N]) to tokens int32 [N], with the flags uint8 [N] of a sequence that begins there and takes part
    throughout. Whether all ids fit."""
    fits = True
    for index in range(len(ids)):
        tokens[index] = ids[index]
        fits &= tokens[index] == ids[index]
        flags[index] = PARTICIPATES | OUTPUT
    if len(ids) > 0:
        flags[0] |= STARTS
    return fits


@compiled_lean
def ask_for_map(tokens, flags, start, stop, token_map):  # type: ignore[no-untyped-def]
    """Ask for what the map says of the flat tokens [start, stop) without waiting: it is larger than a core's caches."""
    for index in range(start, stop):
        if flags[index] & PARTICIPATES:
            prefetch(address_of(token_map, tokens[index]))


@compiled_lean
def ngram_keys(tokens, flags, start, stop, token_map, multipliers, rule, fill, out):  # type: ignore[no-untyped-def]
    """Keys of the OUTPUT positions among flat positions [start, stop), one behind the other in `out`; returns their count.

    tokens int32 [N] and flags uint8 [N]: looked at before `start` too, as far as n - 1 shifts reach. token_map int32 [V],
    or empty for the identity. multipliers int64 [L, n]. fill: the (compressed) id of a blocked slot.
    out int64 [>= their count, L, n - 1]. Nothing is allocated.
    """
    layers, shifts = multipliers.shape
    mapped = len(token_map) > 0
    count = 0
    if mapped:
        ask_for_map(tokens, flags, max(0, start - shifts + 1), min(start + AHEAD, stop), token_map)
    for position in range(start, stop):
        if mapped and position + AHEAD < stop:
            ask_for_map(tokens, flags, position + AHEAD, position + AHEAD + 1, token_map)
        if not flags[position] & OUTPUT:
            continue
        blocked = not flags[position] & PARTICIPATES
        own = fill
        if not blocked:
            own = token_map[tokens[position]] if mapped else tokens[position]
        for layer in range(layers):
            out[count, layer, 0] = own * multipliers[layer, 0]
        before = position
        for shift in range(1, shifts):
            value = fill
            if not blocked:
                blocked = flags[before] & STARTS or before == 0
                before -= 1
                if not blocked:
                    blocked = not flags[before] & PARTICIPATES or (rule == PLE_RULE and tokens[before] == fill)
                    if not blocked:
                        value = token_map[tokens[before]] if mapped else tokens[before]
            for layer in range(layers):
                if shift > 1:
                    out[count, layer, shift - 1] = out[count, layer, shift - 2] ^ (value * multipliers[layer, shift])
                else:
                    out[count, layer, 0] ^= value * multipliers[layer, 1]
        count += 1
    return count


@compiled_lean
def rows_of_keys(keys, primes, offsets, out):  # type: ignore[no-untyped-def]
    """Rows of every column: out[t, l, c] = keys[t, l, c // heads] % primes[l, c] + offsets[l, c].

    keys int64 [T, L, orders], primes and offsets int64 [L, columns], out int64 [T, L, columns].
    """
    count, layers, orders = keys.shape
    heads = primes.shape[1] // orders
    for position in range(count):
        for layer in range(layers):
            for order in range(orders):
                key = keys[position, layer, order]
                for column in range(order * heads, (order + 1) * heads):
                    out[position, layer, column] = key % primes[layer, column] + offsets[layer, column]
