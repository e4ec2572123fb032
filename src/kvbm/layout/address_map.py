"""Address maps: coordinates of the elements of a block → addresses.

A layout at given sizes is one or more of these maps.  Planning, identity, test data and benchmarks all use them for addresses of
elements.  A map is affine in digits of the coordinates.  It is stored in a normal form, so that equal maps are equal objects.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from ..errors import LayoutError
from .loops import coalesce

#: A coordinate: an int, or an array of them.
Index: TypeAlias = Any


class Step(NamedTuple):
    """A digit ``(coordinate // divisor) % extent``, and the bytes and table entries that it steps."""

    #: One axis.  Several axes are fused row-major, the first slowest, and the coordinate is their common index.  This
    #: is so only if a split of that index does not coincide with its axes, or if `opaque`.
    axes: tuple[str, ...]
    #: The digit of the coordinate.
    divisor: int
    extent: int
    #: Steps of the digit: bytes inside an allocation, entries of the table of allocations.
    nbytes: int
    entries: int
    opaque: bool = False  # True if the order inside these axes is unspecified

    def __str__(self) -> str:
        names = " ".join(self.axes)
        return "{" + names + "}" if self.opaque else f"({names})" if len(self.axes) > 1 else names


@dataclass(frozen=True, slots=True)
class Access:
    """The addresses of elements of a block: of all elements, of one plane, or of only K or only V."""

    plane: str  # name of the plane; empty if there is only one
    half: int | None  # 0 or 1 if the map is valid only for K or only for V
    dtype: str
    #: `pack` elements have `itemsize` bytes together.
    itemsize: int
    pack: int
    sizes: tuple[tuple[str, int], ...]  # axes with more than one element, and their extents; without ``b``
    packed: tuple[str, ...]  # the axis along which elements share a byte, if `pack` is more than one
    at: tuple[int, int]  # start: bytes, and table entries
    block: tuple[int, int]  # steps of a block id: bytes, and table entries
    #: Sorted by axes and divisor.  Contiguous digits are merged, and no digit has an extent of one.
    steps: tuple[Step, ...]
    #: If ids count units of a block: the digits of an id inside a block, fastest first, each as extent and bytes.
    #: Empty if ids count blocks.
    units: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(step.extent for step in self.steps) * self.itemsize

    def digits(self, axis: str) -> tuple[Step, ...]:
        """The steps of one axis, fastest digit first.

        Raises `LayoutError` if the axis is fused with others, or belongs to an opaque group.
        """
        own = tuple(step for step in self.steps if axis in step.axes)
        for step in own:
            if step.opaque or len(step.axes) > 1:
                what = "the opaque group" if step.opaque else "the split of"
                raise LayoutError(f"axis '{axis}' has no separate steps: it belongs to {what} {step}")
        return own

    def address(self, block: Index, coordinates: Mapping[str, Index]) -> tuple[Index, Index]:
        """Table entry and byte of an element, or of many, for arrays of coordinates that broadcast.

        `block` is the id of the block or unit.  Coordinates that are not given are 0; they are not checked.  Inside an
        opaque group the declared order is used.
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
        """The part of the map with one fixed coordinate: only K, one head, one layer.

        Raises `LayoutError` if the axis has no separate steps, the index is out of range, or elements along the axis
        share a byte.
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
        """Maps of the `count` coordinates ``first, first + step, …`` of an axis, numbered from 0.

        It is one map; or, if the axis is split and the window cuts its digits, one per box of whole digits, in the
        order of the coordinates.  Raises the errors of `fix`.
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
            # The window must contain whole bytes.
            if len(self.packed) > 1 or step > 1 or first % self.pack or count % self.pack:
                raise LayoutError(
                    f"axis '{axis}': {self.pack} elements along it share a byte, so {count} from {first} on would split bytes"
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
        """The map of units of a block.  A unit has `count` neighbours along an axis, and ids count units.

        Unit ``k`` of a block of ``n`` units has the id ``block * n + k``.  Inside a unit the axis has `count`
        coordinates.  Raises `LayoutError` if `count` does not divide the axis, a unit would not be whole digits, or
        would pick an allocation; or as `fix`.
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
                    f"axis '{axis}': {low} elements along it share a byte, and units of {count} would split it"
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
            self, sizes=tuple(sorted([*sizes, (axis, count)]) if count > 1 else sizes), steps=normal([*rest, *inside]),
            units=(*units, *self.units),
        )  # fmt: skip

    # ---- other forms of a map ----

    def place(self, at: int, block: int, steps: Iterable[Step]) -> Access:
        """The map of the same elements in one separate allocation, with block ids and the given `steps`."""
        return replace(self, at=(at, 0), block=(block, 0), steps=normal(steps), units=())

    def gather(self, group: frozenset[str]) -> Access | None:
        """The map with a group of axes as one opaque axis; None if the group is not dense."""
        inside = [step for step in self.steps if group & set(step.axes)]
        nbytes = self.itemsize
        for step in sorted(inside, key=lambda step: step.nbytes):
            if step.entries or step.nbytes != nbytes or not set(step.axes) <= group:
                return None
            nbytes *= step.extent
        if self.pack > 1 and not set(self.packed) <= group:
            return None  # a byte holds elements along another axis
        axes = tuple(sorted(group))
        size = math.prod(extent for axis, extent in self.sizes if axis in group)
        if size == 1:
            return self
        rest = [step for step in self.steps if not group & set(step.axes)]
        whole = Step(axes, self.pack, size // self.pack, self.itemsize, 0, opaque=True)
        packed = axes if self.pack > 1 else ()
        return replace(self, packed=packed, steps=normal([*rest, whole] if size > self.pack else rest))

    def fuse(self, axes: tuple[str, ...]) -> Access:
        """The map with several axes fused row-major, the first slowest.  Each must have separate steps.

        Raises `LayoutError` if an axis is already fused with others, or elements share a byte along an axis that is not
        the fastest.
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
    plane: str, half: int | None, unit: tuple[str, int, int], sizes: Mapping[str, int], at: tuple[int, int],
    block: tuple[int, int], steps: Sequence[Step], packed: tuple[str, ...],
) -> Access:  # fmt: skip
    """The map of a declared order in normal form.

    Axes of size one are dropped, fused axes are separated if their splits allow it, and contiguous digits are merged.  `unit` is
    ``(dtype, itemsize, pack)``; `steps` use the axes of the terms; `packed` has the axes of the term with elements that share a
    byte.
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
            split_steps = _unfuse(axes, mine, several, low)
            if split_steps is not None:
                kept = [step for step in kept if step.axes != axes] + split_steps
                if axes == packed:
                    packed = axes[-1:]
    return Access(plane, half, *unit, result, packed, at, block, normal(kept))


def normal(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps in normal form: sorted, contiguous digits merged, extents of one dropped."""
    made = []
    for (axes, opaque), group in itertools.groupby(sorted(steps), key=_axes):
        for extent, divisor, nbytes, entries in coalesce(map(_loop, group)):
            made.append(Step(axes, divisor, extent, nbytes, entries, opaque))
    return tuple(made)


#: The axes of a step, and whether they are opaque; the loop of a step, with its divisor as the first stride.
_axes, _loop = operator.itemgetter(0, 5), operator.itemgetter(2, 1, 3, 4)


def _unfuse(axes: tuple[str, ...], steps: Sequence[Step], sizes: Mapping[str, int], start: int) -> list[Step] | None:
    """Steps of fused axes as steps of single axes; None if a split does not coincide with the axes.

    Digits below `start` are elements that share a byte: they must be on the fastest axis.
    """
    bounds, inside = {}, 1
    for axis in reversed(axes):
        bounds[axis] = inside
        inside *= sizes[axis]
    if sizes[axes[-1]] % start:
        return None
    split_steps = []
    for step in steps:
        low, high = step.divisor, step.divisor * step.extent
        cuts = sorted({low, high, *(bound for bound in bounds.values() if low < bound < high)})
        for lower, upper in itertools.pairwise(cuts):
            axis = next(axis for axis in axes if bounds[axis] <= lower)
            bound = bounds[axis]
            if upper % lower or lower % bound or upper > bound * sizes[axis]:
                return None
            n = lower // low
            split_steps.append(Step((axis,), lower // bound, upper // lower, step.nbytes * n, step.entries * n))
    return split_steps


#: Start of a box (bytes, entries), and its digits.
_Box = tuple[tuple[int, int], tuple[Step, ...]]


def _boxes(digits: Sequence[Step], first: int, count: int, step: int) -> Iterator[_Box]:
    """Cut the coordinates ``first + k * step`` of a split axis into boxes of whole digits.

    Each box begins at a coordinate, and continues while each of its digits moves with a fixed stride.
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
    size = 1  # number of coordinates of the digits so far
    for digit in digits:
        stride = step * size  # stride of the next digit, in coordinates
        if stride % digit.divisor:
            # The coordinates of a step are inside a smaller digit, which must be complete before this digit moves.
            break
        turn = stride // digit.divisor  # change of this digit per step
        if turn >= digit.extent:
            if turn % digit.extent:
                break
            continue  # the digit returns to its value
        place = at // digit.divisor % digit.extent
        room = -(-(digit.extent - place) // turn)  # before it carries
        extent = min(room, most // size)
        if extent > 1:
            made.append(Step(digit.axes, size, extent, digit.nbytes * turn, digit.entries * turn))
            size *= extent
        if extent < room or place >= turn or digit.extent % turn:
            break  # incomplete, or it carries in the middle: the next digit has no fixed stride
    return tuple(made), size
