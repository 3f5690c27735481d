"""Primes for the hash columns (spec A3, B2): an exact primality test for 64-bit numbers and the search that uses it.

It knows nothing of models. Invariant: `is_prime` is right for every integer below 3.3e24 (Miller-Rabin over the first 13
primes, Sorenson and Webster 2015), small numbers and the witnesses themselves included.
"""

from __future__ import annotations

from collections.abc import Iterator

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
