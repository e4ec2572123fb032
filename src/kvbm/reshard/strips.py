"""Strips: which coordinates of one axis a rank holds, and which two ranks hold in common.

Heads and layers lie in runs, tokens in turns.  What two ranks have in common is a `Meeting`: loops with a step in the model's
coordinates, in the source's and in the destination's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "ONE_TOKEN",
    "Family",
    "Meeting",
    "Run",
    "Runs",
    "Turns",
    "Unit",
    "count_common",
    "meet",
    "meet_in_unit",
    "share_a_token",
]


class Run(NamedTuple):
    """Coordinates ``first, first + step, …`` of the model, which are ``local, local + 1, …`` on the rank."""

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
    """What a rank holds of an axis of layers or heads: runs of coordinates, ascending.

    Examples
    --------
    >>> print(Runs.of([0, 1, 2, 5, 11, 17]))
    0–2, 5–17 by 6
    """

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, coordinates: Iterable[int], places: Iterable[int] | None = None) -> Runs:
        """The strip of these coordinates of the model, ascending.

        Parameters
        ----------
        coordinates : iterable of int
        places : iterable of int, optional
            The rank's coordinate of each; 0, 1, … if not given.
        """
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
            # A run of two would take the first of the next: 2, 5, 6, 7 is 2 and 5–7.
            if length == 2 and step > 1 and at + 2 < len(given):
                length = step = 1
            runs.append(Run(given[at], step, length, local[at]))
            at += length
        return cls(tuple(runs))

    @property
    def size(self) -> int:
        return sum(run.length for run in self.runs)

    def __iter__(self) -> Iterator[int]:
        """The model's coordinates, by the rank's."""
        for run in self.runs:
            yield from range(run.first, run.last + 1, run.step)

    @property
    def places(self) -> list[int]:
        """The rank's coordinates, in order."""
        return [run.local + i for run in self.runs for i in range(run.length)]

    def share(self, index: int, of: int) -> Runs:
        """One of so many equal shares, which keeps its local coordinates."""
        first, last = (self.size * i // of for i in (index, index + 1))
        return Runs.of(list(self)[first:last], self.places[first:last])

    def without(self, other: Runs) -> Runs:
        """What another strip does not hold; local coordinates stay."""
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
    """What a rank holds of the tokens of a sequence: `every` neighbours, then those of `over - 1` other ranks, and so on.

    Attributes
    ----------
    every : int
        Neighbouring tokens that one rank holds.
    over : int
        Ranks that share the tokens.
    index : int
        Which of them this is.
    """

    every: int = 1
    over: int = 1
    index: int = 0

    @property
    def period(self) -> int:
        """Tokens after which it is the same rank's turn again."""
        return self.every * self.over

    def holds(self, position: Any) -> Any:
        """Whether the rank holds the token at a position, or at each of an array of them."""
        return position // self.every % self.over == self.index

    def slot(self, position: Any) -> Any:
        """How many tokens the rank holds before this one, which it holds."""
        return position // self.period * self.every + position % self.every

    def held(self, stop: int) -> int:
        """How many tokens before this position the rank holds."""
        rest = stop % self.period - self.index * self.every
        return stop // self.period * self.every + min(max(rest, 0), self.every)

    def __str__(self) -> str:
        return "all" if self.over == 1 else f"{self.every} of every {self.period} from {self.index * self.every}"


class Family(NamedTuple):
    """A loop along one axis: its extent, and what it steps in the model's, the source's and the destination's coordinates."""

    extent: int
    step: int
    src: int
    dst: int


class Meeting(NamedTuple):
    """Coordinates of one axis that two ranks hold in common.

    Attributes
    ----------
    first, src, dst : int
        The first of them: the model's coordinate, the source's and the destination's.
    loops : tuple of Family
        Fastest first.
    """

    first: int
    src: int
    dst: int
    loops: tuple[Family, ...]

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
        """All of them: ``"first"`` for the model's, ``"src"``, ``"dst"``."""
        start: int = getattr(self, name)
        step = "step" if name == "first" else name
        for turn in itertools.product(*(range(loop.extent) for loop in reversed(self.loops))):
            yield start + sum(c * getattr(loop, step) for c, loop in zip(reversed(turn), self.loops, strict=True))


    def within(self, some: range) -> Meeting | None:
        """Those of one loop whose coordinate in the model lies in a range of step 1; None: none does."""
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
    """Tokens that lie in one block on both sides, as many as can be; blocks of different sizes are copied in units.

    Attributes
    ----------
    tokens : int
        Positions of the sequence in a unit; units begin at multiples of it.
    meeting : Meeting or None
        Which tokens of a unit both sides hold, as slots inside it; None: none ever.
    src_slots, dst_slots : int
        Slots of a unit on each side: fewer than `tokens` where a unit is spread over ranks.
    """

    tokens: int
    meeting: Meeting | None
    src_slots: int
    dst_slots: int


#: Units where a range of tokens begins or ends inside larger ones.
ONE_TOKEN = Unit(1, Meeting(0, 0, 0, ()), 1, 1)


# ---- runs ----------------------------------------------------------------------------------------------------------


def meet(src: Runs, dst: Runs) -> tuple[Meeting, ...]:
    """The coordinates that both hold: two progressions meet in one (Chinese remainder theorem)."""
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
    """Whether any token is held by both."""
    # x modulo one period in an interval, and modulo the other in another: a question modulo what divides both.
    common = math.gcd(src.period, dst.period)
    if src.every >= common or dst.every >= common:
        return True
    a, b = src.index * src.every % common, dst.index * dst.every % common
    return (b - a) % common < src.every or (a - b) % common < dst.every


def count_common(src: Turns, dst: Turns, stop: int) -> int:
    """How many of the tokens before a position both hold."""
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
    """The largest unit of two ranks, and the tokens of it that both hold.

    Parameters
    ----------
    src, dst : Turns
    sizes : (int, int)
        Slots of a block on each side.
    cuts : two sequences of int
        Where each side's layout splits the tokens of a block.
    shift : int
        How far apart the positions of both sides' first slots are.

    Returns
    -------
    Unit
        A unit is a whole part of a block on both sides; on each side every rank holds the same slots of each, or one rank all
        of one; and layouts split tokens at its borders and at those of its pieces.  One token is always such a unit.
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
    """Largest first."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)}, reverse=True)


def _is_chain(cuts: Iterable[int]) -> bool:
    return all(b % a == 0 for a, b in itertools.pairwise(sorted(set(cuts))))


def _borders(src: Turns, dst: Turns, tokens: int) -> list[int] | None:
    """Positions at which the digits of a unit begin; None where a unit is not the same for all ranks of a side."""
    borders = {1, tokens}
    for side in (src, dst):
        if tokens % side.period == 0:
            borders |= {side.every, side.period}
        elif side.every % tokens:
            return None
    return sorted(borders) if _is_chain(borders) else None


def _fits(side: Turns, tokens: int, borders: Sequence[int], size: int, cuts: Sequence[int]) -> bool:
    """Whether a unit and its digits begin where the slots of a block, and the pieces of its layout, do."""
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
    """The digits of a position below a unit: those that pick a rank are given, the others are loops."""
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
