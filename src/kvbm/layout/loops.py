"""Loops over addresses: an extent, and the strides of one turn in any number of address spaces.

Two operations on them are all that a layout needs to become an address map, and two address maps to become a plan.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

from ..errors import LayoutError


def coalesce(loops: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """The same nest in as few loops as possible, without loops of extent one.

    A loop is an extent and a stride for each address space; the fastest is first.  Two neighbours are merged if the
    slower one continues where the faster one ends, in every address space: the same addresses are visited in the same
    order.
    """
    made: list[tuple[int, ...]] = []
    ends: list[int] | None = None  # where the loop before ends
    for extent, *strides in loops:
        if extent == 1:
            continue
        if strides == ends:
            size, *strides = made.pop()
            extent *= size
        made.append((extent, *strides))
        ends = list(map(operator.mul, itertools.repeat(extent), strides))
    return made


def loops_of(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The loops over an array from its extents and strides, slowest first."""
    return [(extent, stride) for extent, stride in coalesce(zip(reversed(shape), reversed(strides), strict=True))]


def refine(sides: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, ...]]:
    """The loops over an axis that several sides divide into digits: the longest that no side divides further.

    Each side has digits ``(index // divisor) % extent``, the fastest first: divisor, extent, and a stride for each
    address space.  They follow each other, and all sides go from the first to the last index of the first side.  A loop
    is an extent, and the strides of all sides, one side after the other; the fastest is first.  Raises `LayoutError` if
    the divisors are not a chain in which each divides the next, or a side lacks a digit: there is no common refinement.
    """
    first, last = sides[0][0], sides[0][-1]
    start, end = first[0], last[0] * last[1]
    cuts = {digit[0] for side in sides for digit in side if digit[0] > start}
    for lower, upper in itertools.pairwise(sorted({start, *cuts, end})):
        if upper % lower:
            raise LayoutError(f"{upper} is not a multiple of {lower}")
        loop = [upper // lower]
        for side in sides:
            digit = next((digit for digit in side if digit[0] <= lower < digit[0] * digit[1]), None)
            if digit is None:
                raise LayoutError(f"no digit from {lower} on")
            loop += [stride * (lower // digit[0]) for stride in digit[2:]]
        yield tuple(loop)
