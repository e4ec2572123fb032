#!/usr/bin/env python3
"""Find the four factors of a cell's words in kvbm-digest-1 (docs/reference/digest.md).

A set of them is the SHA-256 of ``kvbm-digest-1 N``: four big-endian words of 64 bits, the lowest bit of each set.  Two wrong words
of a cell, of differences x and y, are missed where ``x a + y b = 0`` modulo 2**64: a lattice for each of the six pairs of factors.
The best set is that of which the shortest of these vectors, by its larger coordinate, is longest.

usage: digest_constants.py [FIRST [LAST]]
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys

SETS = 20_000
MODULUS = 1 << 64


def factors(number: int) -> list[int]:
    """The set of this number."""
    found = hashlib.sha256(f"kvbm-digest-1 {number}".encode()).digest()
    return [int.from_bytes(found[i : i + 8], "big") | 1 for i in range(0, 32, 8)]


def shortest(a: int, b: int) -> int:
    """Larger coordinate of the shortest (x, y) with ``x a + y b = 0`` modulo 2**64, after Gauss and Lagrange."""
    u, v = (0, MODULUS), (1, -a * pow(b, -1, MODULUS) % MODULUS)
    while True:
        if _norm(u) > _norm(v):
            u, v = v, u
        times = (2 * (u[0] * v[0] + u[1] * v[1]) + _norm(u)) // (2 * _norm(u))
        if times == 0:
            break
        v = v[0] - times * u[0], v[1] - times * u[1]
        if _norm(v) >= _norm(u):
            break
    near = itertools.product(range(-2, 3), repeat=2)  # the shortest by the larger coordinate is near those by length
    return min(max(abs(i * u[0] + j * v[0]), abs(i * u[1] + j * v[1])) for i, j in near if (i, j) != (0, 0))


def _norm(v: tuple[int, int]) -> int:
    return v[0] * v[0] + v[1] * v[1]


def quality(number: int, least: int = 0) -> int:
    """The shortest vector of all six lattices; 0 where it is not above `least`."""
    found = MODULUS
    for a, b in itertools.combinations(factors(number), 2):
        found = min(found, shortest(a, b))
        if found <= least:
            return 0
    return found


def best(numbers: range) -> tuple[int, int]:
    """Quality and number of the best set of a range."""
    found = 0, -1
    for number in numbers:
        here = quality(number, found[0])
        if here:
            found = here, number
    return found


if __name__ == "__main__":
    bounds = [int(one) for one in sys.argv[1:]] or [SETS]
    length, number = best(range(*bounds))
    print(f"N = {number}: 2^{math.log2(length):.2f},", *(f"{one:#018x}" for one in factors(number)))
