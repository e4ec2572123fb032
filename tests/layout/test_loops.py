"""Loops: coalescing and refinement keep every address, compared with an enumeration of all turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import LayoutError
from kvbm.layout.loops import coalesce, loops_of, refine

Loops = list[tuple[int, ...]]


def visited(loops: Sequence[Sequence[int]], spaces: int) -> Iterator[tuple[int, ...]]:
    """The addresses that a nest visits in each address space, in order; the first loop is the fastest."""
    for turns in itertools.product(*(range(extent) for extent, *_ in reversed(loops))):
        pairs = list(zip(reversed(turns), loops, strict=True))
        yield tuple(sum(turn * loop[1 + space] for turn, loop in pairs) for space in range(spaces))


@st.composite
def nests(draw: st.DrawFn) -> tuple[int, Loops]:
    """A number of address spaces, and loops in them.  Most loops continue the one before in most spaces."""
    spaces = draw(st.integers(1, 5))
    loops: Loops = []
    for _ in range(draw(st.integers(0, 5))):
        ends = [loops[-1][0] * stride for stride in loops[-1][1:]] if loops else [1] * spaces
        strides = [draw(st.sampled_from([end, end, end, end, end + 1, 2 * end, 0, -1])) for end in ends]
        loops.append((draw(st.integers(1, 4)), *strides))
    return spaces, loops


@pytest.mark.quick
@given(nests())
def test_coalesced_loops_visit_the_same_addresses_in_the_same_order(drawn: tuple[int, Loops]) -> None:
    spaces, loops = drawn
    made = coalesce(loops)
    assert list(visited(made, spaces)) == list(visited(loops, spaces))
    assert all(extent > 1 for extent, *_ in made)
    for inner, outer in itertools.pairwise(made):
        assert outer[1:] != tuple(inner[0] * stride for stride in inner[1:]), "these could be one loop"
    assert coalesce(made) == made


@pytest.mark.quick
def test_an_array_is_loops() -> None:
    assert loops_of((4, 1, 3, 2), (48, 7, 16, 8)) == [(24, 8)]
    assert loops_of((4, 3, 2), (64, 16, 8)) == [(6, 8), (4, 64)]
    assert loops_of((), ()) == loops_of((1,), (5,)) == [] and loops_of((3,), (-1,)) == [(3, -1)]


def digits(extents: Sequence[int], strides: Sequence[Sequence[int]], start: int) -> list[tuple[int, ...]]:
    """Digits as `refine` takes them, from extents (fastest first) and strides."""
    divisors = itertools.accumulate([start, *extents[:-1]], lambda a, b: a * b)
    return [(divisor, extent, *own) for divisor, extent, own in zip(divisors, extents, strides, strict=True)]


def place(side: Sequence[Sequence[int]], index: int) -> list[int]:
    """The address of an index in each space of a side."""
    spaces = len(side[0]) - 2
    return [sum(index // digit[0] % digit[1] * digit[2 + space] for digit in side) for space in range(spaces)]


@st.composite
def divided(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, ...]]]]:
    """The first divisor, and sides that divide one axis; each with one or two address spaces."""
    primes = draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=4))
    start, sides = draw(st.sampled_from([1, 2])), []
    for _ in range(draw(st.integers(1, 4))):
        order = primes if draw(st.booleans()) else draw(st.permutations(primes))
        cuts = sorted(draw(st.sets(st.integers(1, len(primes)))) | {len(primes)})
        extents = [math.prod(order[a:b]) for a, b in itertools.pairwise([0, *cuts])]
        spaces = draw(st.integers(1, 2))
        strides = [[draw(st.integers(0, 50)) for _ in range(spaces)] for _ in extents]
        sides.append(digits(extents, strides, start))
    return start, sides


@pytest.mark.quick
@given(divided())
def test_refined_loops_keep_the_addresses_of_every_side(drawn: tuple[int, list[list[tuple[int, ...]]]]) -> None:
    start, sides = drawn
    size = math.prod(digit[1] for digit in sides[0])
    cuts = sorted({digit[0] for side in sides for digit in side} | {start * size})
    if any(high % low for low, high in itertools.pairwise(cuts)):
        with pytest.raises(LayoutError, match="is not a multiple of"):
            list(refine(sides))
        return
    loops = list(refine(sides))
    assert len(loops) == len(cuts) - 1, "as few loops as there are cuts"
    spaces = sum(len(side[0]) - 2 for side in sides)
    expected = [tuple(itertools.chain(*(place(side, start * index) for side in sides))) for index in range(size)]
    assert list(visited(loops, spaces)) == expected


@pytest.mark.quick
def test_a_side_without_digits_has_no_refinement() -> None:
    with pytest.raises(LayoutError, match="no digit from 2 on"):
        list(refine([[(1, 2, 1), (2, 2, 2)], [(1, 2, 1)]]))
