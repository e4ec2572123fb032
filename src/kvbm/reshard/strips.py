"""Strips: the coordinates of one axis that a rank holds, and those that two ranks have in common.

Heads and layers are in runs, tokens in turns.  The common coordinates of two ranks are a `Meeting`: loops with a step in the
coordinates of the model, of the source and of the destination.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Run(NamedTuple):
    """Coordinates ``first, first + step, …`` of the model; on the rank they are ``local, local + 1, …``."""

    first: int
    step: int
    length: int
    local: int

    @property
    def last(self) -> int:
        """The last coordinate of the model."""
        return self.first + self.step * (self.length - 1)


@dataclass(frozen=True)
class Runs:
    """The layers or heads that a rank holds: runs of coordinates, ascending.

    >>> print(Runs.of([0, 1, 2, 5, 11, 17]))
    0–2, 5–17 by 6
    """

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, coordinates: Iterable[int], places: Iterable[int] | None = None) -> Runs:
        """The strip of these ascending coordinates of the model.  `places`: the rank's of each; default: from 0 on."""
        given = list(coordinates)
        local = list(range(len(given)) if places is None else places)
        runs: list[Run] = []
        at = 0
        while at < len(given):
            length = 1
            while at + length < len(given) and local[at + length] == local[at] + length and (
                given[at + length] - given[at] == (given[at + 1] - given[at]) * length
            ):  # fmt: skip
                length += 1
            step = given[at + 1] - given[at] if length > 1 else 1
            # A run of two would take the first coordinate of the next run: 2, 5, 6, 7 is 2 and 5–7.
            if length == 2 and step > 1 and at + 2 < len(given):
                length = step = 1
            runs.append(Run(given[at], step, length, local[at]))
            at += length
        return cls(tuple(runs))

    @property
    def size(self) -> int:
        return sum(run.length for run in self.runs)

    def __iter__(self) -> Iterator[int]:
        """The model's coordinates, in the order of the rank's."""
        for run in self.runs:
            yield from range(run.first, run.last + 1, run.step)

    @property
    def places(self) -> list[int]:
        """The rank's coordinates, in order."""
        return [run.local + i for run in self.runs for i in range(run.length)]

    def share(self, index: int, of: int) -> Runs:
        """One of `of` equal shares.  Local coordinates do not change."""
        first, last = (self.size * i // of for i in (index, index + 1))
        return Runs.of(list(self)[first:last], self.places[first:last])

    def without(self, other: Runs) -> Runs:
        """The coordinates that another strip does not hold.  Local coordinates do not change."""
        gone = set(other)
        kept = [(x, place) for x, place in zip(self, self.places, strict=True) if x not in gone]
        return Runs.of([x for x, _ in kept], [place for _, place in kept])

    def __str__(self) -> str:
        return ", ".join(
            f"{run.first}" + (f"–{run.last}" if run.length > 1 else "") + (f" by {run.step}" if run.step > 1 else "")
            for run in self.runs
        )


@dataclass(frozen=True)
class Turns:
    """The tokens of a sequence that a rank holds: `every` consecutive ones, then those of `over - 1` other ranks, and so on."""

    every: int = 1  # consecutive tokens per turn
    over: int = 1  # number of ranks that share the tokens
    index: int = 0  # index of this rank among them

    @functools.cached_property
    def period(self) -> int:
        """Number of tokens from one turn of a rank to its next."""
        return self.every * self.over

    def holds(self, position: Any) -> Any:
        """True if the rank holds the token at a position; for an array of positions, a mask."""
        return position // self.every % self.over == self.index

    def slot(self, position: Any) -> Any:
        """The slot of a token that the rank holds: the number of its tokens before this one."""
        if self.over == 1:  # all tokens
            return position
        return position // self.period * self.every + position % self.every

    def held(self, stop: int) -> int:
        """Number of tokens before this position that the rank holds."""
        rest = stop % self.period - self.index * self.every
        return stop // self.period * self.every + min(max(rest, 0), self.every)

    def __str__(self) -> str:
        return "all" if self.over == 1 else f"{self.every} of every {self.period} from {self.index * self.every}"


class Family(NamedTuple):
    """A loop along one axis: its extent, and its steps in coordinates of the model, the source and the destination."""

    extent: int
    step: int
    src: int
    dst: int


class Meeting(NamedTuple):
    """Coordinates of one axis that two ranks have in common."""

    #: The first one, in coordinates of the model, the source and the destination.
    first: int
    src: int
    dst: int
    loops: tuple[Family, ...]  # the loops, fastest first

    @property
    def size(self) -> int:
        return math.prod(loop.extent for loop in self.loops)

    def side(self, name: str) -> tuple[tuple[int, int, int], ...]:
        """The coordinates on one side, ``"src"`` or ``"dst"``, as runs of (first, count, step) in the meeting's order."""
        start: int = getattr(self, name)
        if not self.loops:
            return ((start, 1, 1),)
        fastest, *others = self.loops
        steps = [getattr(loop, name) for loop in others]
        turns = itertools.product(*(range(loop.extent) for loop in reversed(others)))
        return tuple(
            (
                start + sum(c * s for c, s in zip(reversed(turn), steps, strict=True)),
                fastest.extent,
                getattr(fastest, name),
            )
            for turn in turns
        )

    def coordinates(self, name: str) -> Iterator[int]:
        """All coordinates of one kind: ``"first"`` (the model's), ``"src"`` or ``"dst"``."""
        start: int = getattr(self, name)
        step = "step" if name == "first" else name
        for turn in itertools.product(*(range(loop.extent) for loop in reversed(self.loops))):
            yield start + sum(c * getattr(loop, step) for c, loop in zip(reversed(turn), self.loops, strict=True))


    def within(self, some: range) -> Meeting | None:
        """The part with model coordinates in a range of step 1, for a meeting of one loop; None if there is none."""
        if not self.loops:
            return self if self.first in some else None
        [(extent, step, src, dst)] = self.loops
        low = max(-(-(some.start - self.first) // step), 0)
        count = min(-(-(some.stop - self.first) // step), extent) - low
        if count < 1:
            return None
        loops = (Family(count, step, src, dst),) if count > 1 else ()
        return Meeting(self.first + low * step, self.src + low * src, self.dst + low * dst, loops)


class Unit(NamedTuple):
    """The largest group of tokens that is inside one block on both sides.  Blocks of different sizes are copied in units."""

    tokens: int  # positions per unit; units begin at multiples of this
    #: The tokens of a unit that both sides hold, as slots inside the unit; None if there are none.
    meeting: Meeting | None
    #: Slots of a unit on each side: fewer than `tokens` if several ranks share a unit.
    src_slots: int
    dst_slots: int


#: The unit of single tokens, for ranges that begin or end inside a larger unit.
ONE_TOKEN = Unit(1, Meeting(0, 0, 0, ()), 1, 1)


# ---- runs ----------------------------------------------------------------------------------------------------------


def meet(src: Runs, dst: Runs) -> tuple[Meeting, ...]:
    """The coordinates that both hold.  Two progressions have one progression in common (Chinese remainder theorem)."""
    found = []
    for a, b in itertools.product(src.runs, dst.runs):
        common = math.gcd(a.step, b.step)
        if (b.first - a.first) % common:
            continue
        step = a.step // common * b.step
        modulus = b.step // common
        turns = (b.first - a.first) // common * pow(a.step // common, -1, modulus) % modulus if modulus > 1 else 0
        first = a.first + a.step * turns
        low = max(a.first, b.first)
        first += -(-max(low - first, 0) // step) * step
        count = (min(a.last, b.last) - first) // step + 1
        if count < 1:
            continue
        loops = (Family(count, step, step // a.step, step // b.step),) if count > 1 else ()
        found.append(
            Meeting(first, a.local + (first - a.first) // a.step, b.local + (first - b.first) // b.step, loops)
        )
    return tuple(found)


# ---- turns ---------------------------------------------------------------------------------------------------------


def share_a_token(src: Turns, dst: Turns) -> bool:
    """True if both hold some token."""
    # x is in an interval modulo one period, and in another modulo the other: compare modulo the common divisor of both.
    common = math.gcd(src.period, dst.period)
    if src.every >= common or dst.every >= common:
        return True
    a, b = src.index * src.every % common, dst.index * dst.every % common
    return (b - a) % common < src.every or (a - b) % common < dst.every


def count_common(src: Turns, dst: Turns, stop: int) -> int:
    """Number of tokens before a position that both hold."""
    long, short = sorted((src, dst), key=lambda turn: -turn.period)
    again = math.lcm(long.period, short.period)
    rounds, rest = divmod(stop, again)
    found = 0
    for start in range(long.index * long.every, again, long.period):
        behind = start + long.every
        found += (short.held(behind) - short.held(start)) * rounds
        found += short.held(max(start, min(behind, rest))) - short.held(start)
    return found


def meet_in_unit(
    src: Turns, dst: Turns, sizes: tuple[int, int], cuts: tuple[Sequence[int], Sequence[int]] = ((), ()), shift: int = 0
) -> Unit:
    """The largest unit of two ranks, and its tokens that both hold.

    A unit divides a block on both sides.  On each side, every rank holds the same slots of each unit, or one rank holds
    all of a unit.  Layouts split tokens only at borders of units and of their pieces (`cuts`).  A single token is
    always a valid unit.  `sizes` are the slots of a block on each side, and `shift` is the distance of the positions of
    both sides' first slots.
    """
    whole = math.gcd(sizes[0] * src.over, sizes[1] * dst.over, shift)
    borders: list[int] | None = None
    for tokens in _divisors(whole):
        borders = _borders(src, dst, tokens)
        if borders is not None and all(
            _fits(side, tokens, borders, size, own)
            for side, size, own in zip((src, dst), sizes, cuts, strict=True)
        ):  # fmt: skip
            break
    assert borders is not None  # one token fits
    sides = (src, dst)
    slots = [tokens // side.over if tokens % side.period == 0 else tokens for side in sides]
    return Unit(tokens, _in_unit(src, dst, tokens, borders), slots[0], slots[1])


def _divisors(number: int) -> list[int]:
    """The divisors of a number, largest first."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)}, reverse=True)


def _is_chain(cuts: Iterable[int]) -> bool:
    return all(b % a == 0 for a, b in itertools.pairwise(sorted(set(cuts))))


def _borders(src: Turns, dst: Turns, tokens: int) -> list[int] | None:
    """Positions at which the digits of a unit begin; None if a unit is not the same for all ranks of a side."""
    borders = {1, tokens}
    for side in (src, dst):
        if tokens % side.period == 0:
            borders |= {side.every, side.period}
        elif side.every % tokens:
            return None
    return sorted(borders) if _is_chain(borders) else None


def _fits(side: Turns, tokens: int, borders: Sequence[int], size: int, cuts: Sequence[int]) -> bool:
    """True if a unit and its digits begin at slots of a block, and at pieces of its layout."""
    if tokens % side.period:
        return _is_chain({*borders, *cuts, size}) and size % tokens == 0
    slots = tokens // side.over
    own = {
        border if border <= side.every else border // side.over
        for border in borders
        if border <= side.every or border % side.period == 0
    }
    return size % slots == 0 and _is_chain({1, *own, slots, *cuts, size})


def _in_unit(src: Turns, dst: Turns, tokens: int, borders: Sequence[int]) -> Meeting | None:
    """The digits of a position inside a unit: those that select a rank are fixed, the others are loops."""
    spread = [side for side in (src, dst) if tokens % side.period == 0 and side.over > 1]
    first, loops = 0, []
    for low, high in itertools.pairwise(borders):
        picked = {
            side.index * side.every // low % (high // low)
            for side in spread
            if side.every <= low and high <= side.period
        }
        if len(picked) > 1:
            return None
        if picked:
            first += picked.pop() * low
        else:
            loops.append((high // low, low))

    def slot(side: Turns, position: int) -> int:
        slots: int = side.slot(position) if tokens % side.period == 0 else position
        return slots

    at = [slot(side, first) for side in (src, dst)]
    families = [
        Family(extent, step, *(slot(side, first + step) - start for side, start in zip((src, dst), at, strict=True)))
        for extent, step in loops
    ]
    return Meeting(first, at[0], at[1], tuple(families))
