"""The hash constants of a model: primes dealt to the columns (spec A3, B2), and multipliers (A4, B2).

It knows counts and sizes only. Invariant: `is_prime` is right for every integer below 3.3e24 (Miller-Rabin over the first
13 primes, Sorenson and Webster 2015), small numbers and the witnesses themselves included.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ssdgram.errors import ConfigError
from ssdgram.fields import show

Ints = tuple[int, ...]
INT64_MAX = 2**63 - 1

# NumPy does not promise its generators' streams for ever: the constants of the released model, by (compressed size, layer)
KNOWN_MULTIPLIERS = {
    (99092, 1): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (99092, 14): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def is_prime(number: int) -> bool:
    """Whether `number` (any integer below 3.3e24) is prime."""
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime                           # a witness is no witness against itself
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def consecutive_primes(start: int) -> Iterator[int]:
    """The primes >= `start`, in order."""
    number = max(start, 2)
    if number == 2:
        yield 2
    number |= 1
    while True:
        if is_prime(number):
            yield number
        number += 2


def deal_primes(starts: list[int], layers: int, heads: int, name: str) -> tuple[Ints, ...]:
    """[L][columns]: primes from each order's start on, none twice, in (layer, order, head) order (spec A3, B2)."""
    if sum(starts) * heads > INT64_MAX:
        raise ConfigError(f"{name} is {show(starts[0])}: {len(starts) * heads} columns of that size overflow 63-bit row ids")
    used: set[int] = set()
    search = {start: consecutive_primes(start) for start in starts}
    dealt = []
    for _ in range(layers):
        sizes: list[int] = []
        for start in starts:
            for _ in range(heads):
                prime = next(prime for prime in search[start] if prime not in used)
                used.add(prime)
                sizes.append(prime)
        if sum(sizes) > INT64_MAX:
            raise ConfigError(f"{name} is {show(starts[0])}: the sum of the {len(sizes)} primes overflows 63-bit row ids")
        dealt.append(tuple(sizes))
    return tuple(dealt)


def running_sums(primes: tuple[Ints, ...]) -> tuple[Ints, ...]:
    """[L][columns]: first row of each column's bucket; every layer starts at 0."""
    return tuple(tuple(sum(sizes[:c]) for c in range(len(sizes))) for sizes in primes)


def engram_multipliers(compressed_size: int, layer: int, n: int) -> Ints:
    """The n odd multipliers of decoder layer `layer` (spec A4)."""
    known = KNOWN_MULTIPLIERS.get((compressed_size, layer))
    if known is not None and n <= len(known):                # a shorter draw of the same seed is a prefix of a longer one
        return known[:n]
    bound = max(1, INT64_MAX // compressed_size // 2)
    draws = np.random.Generator(np.random.PCG64(10007 * layer)).integers(0, bound, size=n, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def ple_multipliers(vocab_size: int, seed: int, dense_layer: int, n: int) -> Ints:
    """The n odd multipliers of PLE layer number `dense_layer` (0, 1, ..) (spec B2)."""
    half = max(1, INT64_MAX // vocab_size // 2)
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    result = []
    for i in range(n):
        value = (seed + 10007 * dense_layer + golden * (i + 2)) & mask   # + golden * (i + 1), then splitmix64's own step
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        result.append(2 * ((value ^ (value >> 31)) % half) + 1)
    return tuple(result)
