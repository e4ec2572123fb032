"""The address map: where one stream of elements of a block lies.

A layout at given sizes is one or more of these maps, and everything that asks where an element lies reads them: planning,
identity, test data, benchmarks.  A map is affine in digits of the coordinates, and it is kept in a normal form, so that equal
maps are equal objects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from .errors import LayoutError

__all__ = ["Access", "Index", "Step", "declared", "normal", "refine"]

#: A coordinate: an int, or an array of them.
Index: TypeAlias = Any


class Step(NamedTuple):
    """``(coordinate // divisor) % extent`` moves so many bytes and table entries.

    Attributes
    ----------
    axes : tuple of str
        One axis.  More than one are fused row-major, the first slowest, and their common index is the coordinate: only where a
        split of that index does not fall on its axes, or where `opaque`.
    divisor, extent : int
        Which digit of the coordinate.
    nbytes, entries : int
        What the digit steps: bytes inside an allocation, entries of the table of allocations.
    opaque : bool
        The order inside these axes is not promised.
    """

    axes: tuple[str, ...]
    divisor: int
    extent: int
    nbytes: int
    entries: int
    opaque: bool = False

    def __str__(self) -> str:
        names = " ".join(self.axes)
        return "{" + names + "}" if self.opaque else f"({names})" if len(self.axes) > 1 else names

    def continues(self, inner: Step) -> bool:
        """Whether this digit goes on where `inner` ends, so that the two are one."""
        n = inner.extent
        return (
            self.divisor == inner.divisor * n
            and self.nbytes == inner.nbytes * n
            and self.entries == inner.entries * n
            and self.axes == inner.axes
        )


@dataclass(frozen=True, slots=True)
class Access:
    """Where the elements of a block lie: all of them, those of one plane, or those that the order of K or of V places.

    Attributes
    ----------
    plane : str
        Which plane; empty where there is only one.
    half : int, optional
        0 or 1 where this is the order of K or V alone, whose map means nothing for the other.
    dtype : str
    itemsize, pack : int
        `pack` elements are `itemsize` bytes.
    sizes : tuple of (str, int)
        Extents of the axes that have more than one element, by name; without ``b``.
    packed : tuple of str
        Along which axis the elements of one byte lie side by side, where `pack` is more than one.
    at : tuple of int
        Where it starts: bytes, and table entries.
    block : tuple of int
        What a block id steps: bytes, and table entries.
    steps : tuple of Step
        Sorted by axes and divisor; digits that continue each other are one, and none has an extent of one.
    units : tuple of (int, int)
        Where ids count units, of which several fill a block: the digits of an id below the block, fastest first, each an extent
        and what it steps in bytes.  Empty: ids are blocks.
    """

    plane: str
    half: int | None
    dtype: str
    itemsize: int
    pack: int
    sizes: tuple[tuple[str, int], ...]
    packed: tuple[str, ...]
    at: tuple[int, int]
    block: tuple[int, int]
    steps: tuple[Step, ...]
    units: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the elements hold."""
        return math.prod(step.extent for step in self.steps) * self.itemsize

    def digits(self, axis: str) -> tuple[Step, ...]:
        """The steps of one axis, fastest digit first.

        Raises
        ------
        LayoutError
            The axis is fused with others, or belongs to an opaque group.
        """
        own = tuple(step for step in self.steps if axis in step.axes)
        for step in own:
            if step.opaque or len(step.axes) > 1:
                what = "the opaque group" if step.opaque else "the split of"
                raise LayoutError(f"axis '{axis}' has no steps of its own: it belongs to {what} {step}")
        return own

    def address(self, block: Index, coordinates: Mapping[str, Index]) -> tuple[Index, Index]:
        """Table entry and byte of elements: of one, or of arrays of coordinates that broadcast.

        Parameters
        ----------
        block
            Block id, or a unit's.
        coordinates
            Axis → coordinate; 0 where not given.  Nothing is checked.  Inside an opaque group the declared order is assumed.
        """
        sizes = dict(self.sizes)
        nbytes = self.at[0]
        for extent, step_bytes in self.units:
            nbytes = nbytes + block % extent * step_bytes
            block = block // extent
        nbytes = nbytes + block * self.block[0]
        entry = self.at[1] + block * self.block[1]
        for step in self.steps:
            index = 0
            for axis in step.axes:
                index = index * sizes.get(axis, 1) + coordinates.get(axis, 0)
            index = index // step.divisor % step.extent
            nbytes = nbytes + index * step.nbytes
            entry = entry + index * step.entries
        return entry, nbytes

    # ---- parts of a map ----

    def fix(self, axis: str, index: int) -> Access:
        """The part of the map with one coordinate given: K alone, one head, one layer.

        Raises
        ------
        LayoutError
            The axis has no steps of its own, the index is out of range, or elements along it share a byte.
        """
        own = [step for step in self.steps if axis in step.axes]
        if len(own) == 1 and own[0].axes == (axis,) and not own[0].opaque and axis not in self.packed:
            step = own[0]
            if 0 <= index < step.extent:  # most axes are not split
                return Access(
                    self.plane, self.half, self.dtype, self.itemsize, self.pack,
                    tuple([item for item in self.sizes if item[0] != axis]),
                    self.packed,
                    (self.at[0] + index * step.nbytes, self.at[1] + index * step.entries),
                    self.block,
                    tuple([other for other in self.steps if other is not step]),
                    self.units,
                )  # fmt: skip
        return self._restrict(axis, index, 1, 1)[0]

    def window(self, axis: str, first: int, count: int, step: int = 1) -> tuple[Access, ...]:
        """The coordinates ``first, first + step, …`` of an axis, `count` of them, as 0 to ``count - 1`` of maps of their own.

        Returns
        -------
        tuple of Access
            One.  Where the axis is split and the window cuts its digits, one a box of whole digits, in the order of the
            coordinates.

        Raises
        ------
        LayoutError
            As for `fix`.
        """
        return self._restrict(axis, first, count, step)

    def _restrict(self, axis: str, first: int, count: int, step: int) -> tuple[Access, ...]:
        size = dict(self.sizes).get(axis, 1)
        if count < 1 or step < 1 or first < 0 or first + (count - 1) * step >= size:
            raise LayoutError(
                f"axis '{axis}': expected coordinates from 0 to {size - 1}, got {count} from {first} on"
                + (f" in steps of {step}" if step > 1 else "")
            )
        if count == size:
            return (self,)
        digits = self.digits(axis)
        if axis in self.packed:
            # Bytes are the digits then: the window must hold whole ones.
            if len(self.packed) > 1 or step > 1 or first % self.pack or count % self.pack:
                raise LayoutError(
                    f"axis '{axis}': {self.pack} elements along it share a byte, so {count} from {first} on would take bytes apart"
                )
            digits = tuple(digit._replace(divisor=digit.divisor // self.pack) for digit in digits)
            boxes = list(_boxes(digits, first // self.pack, count // self.pack, 1))
            scale = self.pack
        else:
            boxes, scale = list(_boxes(digits, first, count, step)), 1
        rest = [digit for digit in self.steps if axis not in digit.axes]
        sizes = [item for item in self.sizes if item[0] != axis]
        made = []
        for (nbytes, entries), steps in boxes:
            extent = math.prod(s.extent for s in steps) * scale
            own = normal(s._replace(divisor=s.divisor * scale) for s in steps)
            made.append(
                Access(
                    self.plane, self.half, self.dtype, self.itemsize, self.pack,
                    tuple(sorted([*sizes, (axis, extent)]) if extent > 1 else sizes),
                    self.packed,
                    (self.at[0] + nbytes, self.at[1] + entries),
                    self.block,
                    tuple(sorted([*rest, *own]) if own else rest),
                    self.units,
                )
            )  # fmt: skip
        return tuple(made)

    def cut(self, axis: str, count: int) -> Access:
        """The map of units of a block: `count` neighbours along an axis each, of which ids count all.

        Unit ``k`` of a block with ``n`` of them has the id ``block * n + k``; inside it the axis has `count` coordinates.

        Raises
        ------
        LayoutError
            `count` does not divide the axis, a unit would not be whole digits, or would pick an allocation; or as for `fix`.
        """
        size = dict(self.sizes).get(axis, 1)
        if count == size:
            return self
        if count < 1 or size % count:
            raise LayoutError(f"axis '{axis}': units of {count}: expected a divisor of {size}")
        low = 1
        if axis in self.packed:
            low = self.pack
            if len(self.packed) > 1 or count % low:
                raise LayoutError(
                    f"axis '{axis}': {low} elements along it share a byte, and units of {count} would part them"
                )
        inside, units = [], []
        for digit in self.digits(axis):
            end = digit.divisor * digit.extent
            if end <= count:
                inside.append(digit)
                continue
            start = max(digit.divisor, count)
            if start % digit.divisor or end % start or digit.entries:
                what = "picks an allocation" if digit.entries else f"is split at {digit.divisor}"
                raise LayoutError(f"axis '{axis}' {what}; expected units that are whole pieces, got {count}")
            if start > digit.divisor:
                inside.append(digit._replace(extent=start // digit.divisor))
            units.append((end // start, digit.nbytes * (start // digit.divisor)))
        rest = [step for step in self.steps if axis not in step.axes]
        sizes = [item for item in self.sizes if item[0] != axis]
        return replace(
            self,
            sizes=tuple(sorted([*sizes, (axis, count)]) if count > 1 else sizes),
            steps=normal([*rest, *inside]),
            units=(*units, *self.units),
        )

    # ---- other forms of a map ----

    def fold(self, entry_bytes: int) -> Access:
        """The map for a table whose entries lie `entry_bytes` apart: entries become bytes."""

        def folded(nbytes: int, entries: int) -> tuple[int, int]:
            return nbytes + entries * entry_bytes, 0

        steps = [step._replace(nbytes=folded(step.nbytes, step.entries)[0], entries=0) for step in self.steps]
        return replace(self, at=folded(*self.at), block=folded(*self.block), steps=normal(steps))

    def place(self, at: int, block: int, steps: Iterable[Step]) -> Access:
        """The map with the same elements in one allocation of its own, whose ids are blocks: `steps` with other bytes."""
        return replace(self, at=(at, 0), block=(block, 0), steps=normal(steps), units=())

    def gather(self, group: frozenset[str]) -> Access | None:
        """The map with a group of axes as one opaque axis; None where they are not dense by themselves."""
        inside = [step for step in self.steps if group & set(step.axes)]
        nbytes = self.itemsize
        for step in sorted(inside, key=lambda step: step.nbytes):
            if step.entries or step.nbytes != nbytes or not set(step.axes) <= group:
                return None
            nbytes *= step.extent
        if self.pack > 1 and not set(self.packed) <= group:
            return None  # the byte at hand holds elements along another axis
        axes = tuple(sorted(group))
        size = math.prod(extent for axis, extent in self.sizes if axis in group)
        if size == 1:
            return self
        rest = [step for step in self.steps if not group & set(step.axes)]
        whole = Step(axes, self.pack, size // self.pack, self.itemsize, 0, opaque=True)
        packed = axes if self.pack > 1 else ()
        return replace(self, packed=packed, steps=normal([*rest, whole] if size > self.pack else rest))

    def fuse(self, axes: tuple[str, ...]) -> Access:
        """The map with axes fused row-major, the first slowest, that have steps of their own.

        Raises
        ------
        LayoutError
            One of them is fused otherwise, or elements share a byte along one that is not the fastest.
        """
        sizes, divisor, own = dict(self.sizes), 1, []
        if self.packed and self.packed != axes[-1:] and set(self.packed) & set(axes):
            raise LayoutError(
                f"'({' '.join(axes)})': {self.pack} elements share a byte along '{' '.join(self.packed)}'"
            )
        for axis in axes:
            self.digits(axis)
        for axis in reversed(axes):
            own += [
                step._replace(axes=axes, divisor=step.divisor * divisor) for step in self.steps if step.axes == (axis,)
            ]
            divisor *= sizes.get(axis, 1)
        rest = [step for step in self.steps if step.axes[0] not in axes]
        packed = axes if self.packed and self.packed[0] in axes else self.packed
        return replace(self, packed=packed, steps=normal([*rest, *own]))


def declared(
    plane: str,
    half: int | None,
    unit: tuple[str, int, int],
    sizes: Mapping[str, int],
    at: tuple[int, int],
    block: tuple[int, int],
    steps: Sequence[Step],
    packed: tuple[str, ...],
) -> Access:
    """The map of a declared order in normal form.

    Axes of size one are left out, fused axes fall apart where their splits allow it, and digits that continue each other are
    one.  `unit` is ``(dtype, itemsize, pack)``; `steps` are in the axes of the terms, `packed` the axes of the term whose elements
    share a byte.
    """
    several = {axis: size for axis, size in sizes.items() if size > 1 and axis != "b"}
    kept = []
    plain = True
    for step in steps:
        axes = step.axes
        if step.opaque or len(axes) > 1 or axes[0] not in several:
            plain = False
            axes = tuple(axis for axis in axes if axis in several)
            if not axes:
                continue
            step = step._replace(axes=axes)
        if step.extent > 1:
            kept.append(step)
    pack = unit[2]
    packed = tuple(axis for axis in packed if axis in several) if pack > 1 else ()
    result = tuple(sorted(several.items()))
    if not plain:
        opaque = {axis for step in kept if step.opaque for axis in step.axes}
        groups = {step.axes for step in kept if len(step.axes) > 1 and not step.opaque}
        if len(packed) > 1 and not opaque & set(packed):
            groups.add(packed)
        for axes in groups:
            mine = normal(step for step in kept if step.axes == axes)
            low = pack if axes == packed else 1
            apart = _unfuse(axes, mine, several, low)
            if apart is not None:
                kept = [step for step in kept if step.axes != axes] + apart
                if axes == packed:
                    packed = axes[-1:]
    return Access(plane, half, *unit, result, packed, at, block, normal(kept))


def normal(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps in normal form: sorted, digits that continue each other as one, none of extent one."""
    merged: list[Step] = []
    for step in sorted(steps):
        if step.extent == 1:
            continue
        if merged and step.continues(merged[-1]):
            merged[-1] = merged[-1]._replace(extent=merged[-1].extent * step.extent)
        else:
            merged.append(step)
    return tuple(merged)


def _unfuse(axes: tuple[str, ...], steps: Sequence[Step], sizes: Mapping[str, int], start: int) -> list[Step] | None:
    """Steps of fused axes as steps of one axis each; None where a split does not fall on the axes.

    The digits below `start` are elements that share a byte: they must lie along the fastest axis.
    """
    bounds, inside = {}, 1
    for axis in reversed(axes):
        bounds[axis] = inside
        inside *= sizes[axis]
    if sizes[axes[-1]] % start:
        return None
    apart = []
    for step in steps:
        low, high = step.divisor, step.divisor * step.extent
        cuts = sorted({low, high, *(bound for bound in bounds.values() if low < bound < high)})
        for lower, upper in itertools.pairwise(cuts):
            axis = next(axis for axis in axes if bounds[axis] <= lower)
            bound = bounds[axis]
            if upper % lower or lower % bound or upper > bound * sizes[axis]:
                return None
            n = lower // low
            apart.append(Step((axis,), lower // bound, upper // lower, step.nbytes * n, step.entries * n))
    return apart


#: Where a box starts (bytes, entries), and its digits.
_Box = tuple[tuple[int, int], tuple[Step, ...]]


def _boxes(digits: Sequence[Step], first: int, count: int, step: int) -> Iterator[_Box]:
    """Cut the coordinates ``first + k * step`` of a split axis into boxes of whole digits.

    Each box begins at a coordinate and goes on for as long as its digits move by a fixed stride each.
    """
    done = 0
    while done < count:
        at = first + done * step
        nbytes = sum(at // d.divisor % d.extent * d.nbytes for d in digits)
        entries = sum(at // d.divisor % d.extent * d.entries for d in digits)
        steps, size = _longest(digits, at, count - done, step)
        yield (nbytes, entries), steps
        done += size


def _longest(digits: Sequence[Step], at: int, most: int, step: int) -> tuple[tuple[Step, ...], int]:
    """Digits of the longest box of at most `most` coordinates that begins at `at`, and its number of coordinates."""
    made: list[Step] = []
    size = 1  # coordinates that the digits so far hold
    for digit in digits:
        stride = step * size  # of the next digit, in coordinates
        if stride % digit.divisor:
            # The coordinates of a step lie inside a digit of their own: whole ones before this digit moves.
            break
        turn = stride // digit.divisor  # steps of this digit at a time
        if turn >= digit.extent:
            if turn % digit.extent:
                break
            continue  # it comes back to where it was
        place = at // digit.divisor % digit.extent
        room = -(-(digit.extent - place) // turn)  # before it carries
        extent = min(room, most // size)
        if extent > 1:
            made.append(Step(digit.axes, size, extent, digit.nbytes * turn, digit.entries * turn))
            size *= extent
        if extent < room or place >= turn or digit.extent % turn:
            break  # cut short, or it carries in the middle: the next digit would not move in step
    return tuple(made), size


def refine(cuts: Iterable[int], size: int, start: int = 1) -> Iterator[tuple[int, int]]:
    """Split an axis at every cut, fastest piece first.

    Parameters
    ----------
    cuts : iterable of int
        Divisors at which either side splits.
    size : int
        Extent of the axis.
    start : int
        Elements that always stay together.

    Yields
    ------
    tuple of int
        ``(divisor, extent)``: the pieces cover the axis exactly, and each cut is a boundary.

    Raises
    ------
    LayoutError
        The cuts are no chain in which each divides the next, so there is no common refinement.
    """
    chain = sorted({start, *(cut for cut in cuts if cut > start), size})
    for lower, upper in itertools.pairwise(chain):
        if upper % lower:
            raise LayoutError(f"{upper} is no multiple of {lower}")
        yield lower, upper // lower
