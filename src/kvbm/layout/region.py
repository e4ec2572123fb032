"""Sections: the part of a pool that is copied, as address maps; and slots that hold this part packed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .._arguments import quoted, whole
from ..errors import LayoutError
from .address_map import Access, Step
from .loops import coalesce, refine
from .shapes import BlockShape, round_up

if TYPE_CHECKING:
    from .layout import Layout

#: Most digits of an id inside a block that kernels support (``KVBM_UNIT_DIGITS`` of ``cuda/kvbm.h``).
MAX_UNIT_DIGITS = 2

#: Coordinates of an axis: a range, or a list.
Coordinates = range | tuple[int, ...]


@dataclass(frozen=True)
class Section:
    """The part of a pool that is copied: whole blocks, some coordinates of an axis, units of a block, or packed slots."""

    layout: Layout
    shape: BlockShape  # shape of the whole pool's blocks
    num_blocks: int
    accesses: tuple[Access, ...]  # address maps, as in `Resolved`
    record: bool = False  # True if planes share records
    units: int = 1  # number of units per block; ids count units
    #: Axes with selected coordinates that are not one loop.  The `accesses` include all coordinates of these axes.
    chosen: tuple[tuple[str, Coordinates], ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of the elements of a block or unit, without padding."""
        total = 0
        for access in self.accesses:
            if not access.half:
                part = access.nbytes
                for axis, coordinates in self.chosen:
                    part = part // self.size(axis) * len(coordinates)
                total += part
        return total

    @property
    def num_ids(self) -> int:
        """Number of ids; they are ``0 … num_ids - 1``."""
        return self.num_blocks * self.units

    def size(self, axis: str) -> int:
        """Number of coordinates of an axis, without selection."""
        return max(dict(access.sizes).get(axis, 1) for access in self.accesses)

    def count(self, axis: str) -> int:
        """Number of selected coordinates of an axis."""
        return len(dict(self.chosen).get(axis, range(self.size(axis))))

    def of_planes(self, names: Sequence[str]) -> Section:
        """Some of the planes.  Raises `LayoutError` if there is no such plane, or `names` is empty."""
        if not names:
            raise LayoutError(f"{self.layout.name}: planes: expected one or more names")
        known = list(dict.fromkeys(access.plane for access in self.accesses))
        for name in names:
            if name not in known or not name:
                has = f"has the planes {', '.join(known)}" if known != [""] else "has no planes"
                raise LayoutError(f"{self.layout.name} {has}, got {name!r}")
        return replace(self, accesses=tuple(access for access in self.accesses if access.plane in names))

    def select(self, axis: str, coordinates: Coordinates) -> Section:
        """Select coordinates of one axis.  In the result they are numbered from 0.

        Raises `LayoutError` if a coordinate is out of range, the axis is in an opaque group or fused with others, the
        selection would split a byte, or a plane has one element for all coordinates of the axis.
        """
        where = f"{self.layout.name} ({self.layout.order_text})"
        chosen = dict(self.chosen)
        given: Coordinates = chosen.pop(axis, range(self.size(axis)))
        if not len(coordinates) or min(coordinates) < 0 or max(coordinates) >= len(given):
            names = {access.plane for access in self.accesses}
            if all(axis in plane.shared for plane in self.layout.planes if plane.name in names) and names != {""}:
                raise LayoutError(
                    f"{where}: axis '{axis}': plane '{self.accesses[0].plane}' has one element for all of it, got "
                    f"{_coordinates_text(coordinates)}; leave the axis out"
                )
            raise LayoutError(
                f"{where}: axis '{axis}': expected coordinates from 0 to {len(given) - 1}, got {_coordinates_text(coordinates)}"
            )
        coordinates = tuple(given[i] for i in coordinates)
        first, count, step = next(_runs(coordinates))
        if count == len(coordinates):
            coordinates = range(first, first + count * step, step)
        if coordinates == range(self.size(axis)):
            return replace(self, chosen=tuple(sorted(chosen.items())))
        accesses = _of_half(self.accesses, axis, coordinates)
        try:
            for access in accesses:
                if axis not in dict(access.sizes) and self.size(axis) > 1:
                    has = "is without it" if axis in self.layout.axes else "has one element for all of it"
                    raise LayoutError(
                        f"axis '{axis}': plane '{access.plane}' {has}; expected all of the axis, or a "
                        "section without that plane"
                    )
            alone = [
                box
                for first, count, step in _runs(coordinates)
                for access in accesses
                for box in access.window(axis, first, count, step)
            ]
        except LayoutError as error:
            raise LayoutError(f"{where}: {error}") from None
        if len(alone) == len(accesses):
            return replace(self, accesses=tuple(alone), chosen=tuple(sorted(chosen.items())))
        return replace(self, accesses=tuple(accesses), chosen=tuple(sorted([*chosen.items(), (axis, coordinates)])))

    def cut(self, tokens: int) -> Section:
        """The same memory with ids of units of `tokens` tokens: unit ``k`` of a block of ``n`` units is ``block * n + k``.

        Raises `LayoutError` if `tokens` does not divide a block, a unit cuts a split of the layout, units of a block
        share a plane, or tokens have been selected before.
        """
        where = f"{self.layout.name} ({self.layout.order_text}): units of {quoted(tokens)} tokens"
        size = self.size("t")
        if type(tokens) is not int:
            tokens = whole(tokens) or 0
        if tokens == size:
            return self
        if tokens < 1 or size % tokens:
            raise LayoutError(f"{where}: expected a divisor of {size}")
        if "t" in dict(self.chosen) or size * self.units != self.shape.nt:
            raise LayoutError(
                f"{where}: some tokens of a block are selected; call units first, then select tokens of a unit"
            )
        for access in self.accesses:
            if "t" not in dict(access.sizes):
                raise LayoutError(
                    f"{where}: plane '{access.plane}' has one element for {size} tokens, which units would share"
                )
        try:
            made = [access.cut("t", tokens) for access in self.accesses]
            accesses = _in_common_digits(made)
        except LayoutError as error:
            raise LayoutError(f"{where}: {error}") from None
        return replace(self, accesses=accesses, units=self.units * (size // tokens))

    def box(self, windows: Iterable[tuple[str, tuple[int, int, int]]]) -> Section:
        """A part with one loop along each axis, for `pieces`."""
        accesses: Sequence[Access] = self.accesses
        for axis, (first, count, step) in windows:
            mine = _of_half(accesses, axis, range(first, first + count))
            accesses = [access.window(axis, first, count, step)[0] for access in mine]
        return replace(self, accesses=tuple(accesses), chosen=())

    def packed(self) -> Section:
        """The elements of a block in this layout's order without gaps, with blocks one after the other in one allocation.

        Records are kept, including their gaps: the contents of a page on one side are then one run.
        """
        if self.chosen:
            return self._dense()
        if not self.layout.planes:
            step = round_up(self.block_bytes, 16)
            made = [_pack(access, access.itemsize, 0, step) for access in self.accesses]
            return replace(self, accesses=tuple(made), units=1)
        start, placed = 0, []
        # A window may begin far after the record's start: drop whole words of that distance.
        before = min(access.at[0] for access in self.accesses) // 16 * 16
        for plane, group in itertools.groupby(self.accesses, key=lambda access: access.plane):
            own = list(group)
            # Planes of a record keep their places, so all start together; planes with separate arrays follow each other.
            held = max(map(_page, self.accesses if self.record else own)) - (before if self.record else 0)
            placed += [(access, held, access.at[0] - before if self.record else start) for access in own]
            size = held * math.prod(s.extent for s in own[0].steps if not _is_inside_page(s, own[0]))
            if not self.record:
                start += size
            elif plane == self.accesses[-1].plane:
                start = size
        step = round_up(start, 16)
        return replace(self, accesses=tuple(_pack(access, held, at, step) for access, held, at in placed), units=1)

    def wire(self) -> Section:
        """The same elements without gaps, in an order that does not depend on the layout: planes by name, each ``l o h t … d``.

        So two sides with different layouts write and read the same bytes.  Raises `LayoutError` if there is an opaque
        group, or elements share a byte along an axis that is not the last.
        """
        start, made = 0, []
        for name in sorted({access.plane for access in self.accesses}):
            access = next(access for access in self.accesses if access.plane == name)
            sizes = dict(access.sizes) | {axis: self.count(axis) for axis, _ in self.chosen}
            order = [axis for axis in sorted(sizes, key=canonical) if sizes[axis] > 1]
            held, steps = access.itemsize, []
            for axis in reversed(order):
                low = access.pack if axis in access.packed else 1
                if low > 1 and axis != order[-1]:
                    raise LayoutError(
                        f"axis '{axis}': elements along it share a byte, and the last axis of a wire is '{order[-1]}'"
                    )
                access.digits(axis)
                steps.append(Step((axis,), low, sizes[axis] // low, held, 0))
                held *= sizes[axis] // low
            whole = tuple((axis, sizes[axis]) for axis in sorted(order))
            made.append((replace(access, half=None, sizes=whole), steps, start))
            start += round_up(held, 16)
        accesses = tuple(access.place(at, start, steps) for access, steps, at in made)
        return replace(self, accesses=accesses, units=1, chosen=(), record=False)

    def _dense(self) -> Section:
        """The selected coordinates without gaps: plane after plane, each in the order of its steps."""
        chosen = {axis: len(coordinates) for axis, coordinates in self.chosen}
        start, made = 0, []
        for _, group in itertools.groupby(self.accesses, key=lambda access: access.plane):
            for access in list(group):
                steps = [step for step in access.steps if not chosen.keys() & set(step.axes)]
                for axis, count in chosen.items():
                    slowest = access.digits(axis)[-1]
                    low = access.pack if axis in access.packed else 1
                    steps.append(slowest._replace(divisor=low, extent=count // low))
                sizes = tuple(sorted({**dict(access.sizes), **chosen}.items()))
                whole = replace(access, sizes=tuple(item for item in sizes if item[1] > 1))
                made.append((whole, steps, start))
            start += math.prod(step.extent for step in steps) * access.itemsize
        block = round_up(start, 16)
        accesses = []
        for access, steps, at in made:
            held, placed = access.itemsize, []
            # If K and V have different orders: V after K.
            for step in sorted(
                steps, key=lambda s: (access.half is not None and s.axes == ("o",), s.entries > 0, s.entries, s.nbytes)
            ):
                placed.append(step._replace(nbytes=held, entries=0))
                held *= step.extent
            accesses.append(access.place(at, block, placed))
        return replace(self, accesses=tuple(accesses), units=1, chosen=(), record=False)


def pieces(src: Section, dst: Section) -> Iterator[tuple[Section, Section, dict[str, range]]]:
    """Divide two sections into pairs of parts with one loop along each axis on both sides.

    Yields a part of each side, and where it is along the divided axes: the same positions in both sections.  Raises
    `LayoutError` if the two sides select different numbers of coordinates, or would cut a plane that has one element
    for all of them.
    """
    axes = sorted({axis for side in (src, dst) for axis, _ in side.chosen})
    if not axes:
        yield src, dst, {}
        return
    cuts = [list(_axis_pieces(src, dst, axis)) for axis in axes]
    for combination in itertools.product(*cuts):
        windows = list(zip(axes, combination, strict=True))
        yield (
            src.box((axis, ours) for axis, (ours, _, _) in windows),
            dst.box((axis, theirs) for axis, (_, theirs, _) in windows),
            {axis: positions for axis, (_, _, positions) in windows},
        )


#: First coordinate, number of them, step.
_Window = tuple[int, int, int]


def _axis_pieces(src: Section, dst: Section, axis: str) -> Iterator[tuple[_Window, _Window, range]]:
    """Windows of one axis, as few as possible, that are one loop on both sides, and their positions in both sections."""
    sides = [(side, dict(side.chosen).get(axis, range(side.size(axis)))) for side in (src, dst)]
    sizes = [len(coordinates) for _, coordinates in sides]
    if sizes[0] != sizes[1]:
        raise LayoutError(f"axis '{axis}': {sizes[0]} in the source, {sizes[1]} in the destination")
    for (side, _), (other, cut) in zip(sides, reversed(sides), strict=True):
        for access in side.accesses:
            if axis not in dict(access.sizes) and sizes[0] > 1:
                raise LayoutError(
                    f"axis '{axis}': {_coordinates_text(cut)} of {other.layout.name} would be copied in pieces, and plane "
                    f"'{access.plane}' of {side.layout.name} has one element for all of it, which no piece may cut; expected "
                    f"coordinates that are one loop: copy {other.layout.name} to a pool that holds only these, and go on from there"
                )
    done = 0
    while done < sizes[0]:
        runs = [next(_runs(coordinates[done:])) for _, coordinates in sides]
        count = min(run[1] for run in runs)
        while True:
            most = min(
                dict(access.window(axis, first, count, step)[0].sizes).get(axis, 1)
                for (side, _), (first, _, step) in zip(sides, runs, strict=True)
                for access in side.accesses
            )
            if most == count:
                break
            count = most
        ours, theirs = ((first, count, step) for first, _, step in runs)
        yield ours, theirs, range(done, done + count)
        done += count


def _runs(coordinates: Coordinates) -> Iterator[_Window]:
    """Coordinates as windows of equal steps, in order."""
    if isinstance(coordinates, range) and coordinates.step > 0:
        yield coordinates.start, len(coordinates), coordinates.step
        return
    at = 0
    while at < len(coordinates):
        step = coordinates[at + 1] - coordinates[at] if at + 1 < len(coordinates) else 1
        count = 1
        while (
            step > 0 and at + count < len(coordinates) and coordinates[at + count] - coordinates[at + count - 1] == step
        ):
            count += 1
        yield coordinates[at], count, step if count > 1 else 1
        at += count


def canonical(axis: str) -> tuple[int, str]:
    """Sort key of an axis on a wire: l o h t, then the layout's extra axes, then d."""
    return ("l", "o", "h", "t").index(axis) if axis in "loht" else 5 if axis == "d" else 4, axis


def _of_half(accesses: Sequence[Access], axis: str, coordinates: Coordinates) -> list[Access]:
    """Only the maps of K or of V, if these have separate maps and only one of them is selected."""
    if axis != "o" or len(coordinates) > 1:
        return list(accesses)
    return [replace(access, half=None) for access in accesses if access.half in (None, coordinates[0])]


def _coordinates_text(coordinates: Coordinates) -> str:
    return str(coordinates) if isinstance(coordinates, range) else f"{quoted(list(coordinates))}"


def _in_common_digits(accesses: Sequence[Access]) -> tuple[Access, ...]:
    """The maps with common digits of a unit: one kernel copies all planes of a block, and splits an id only once."""
    digits = refine([list(_digits(access.units)) for access in accesses])
    extents, *strides = zip(*coalesce(digits), strict=True)
    accesses = [
        replace(access, units=tuple(zip(extents, own, strict=True))) for access, own in zip(accesses, strides, strict=True)
    ]
    # If the slowest digit continues in the block, ids simply count smaller blocks.
    while all(access.units and access.block == (access.units[-1][0] * access.units[-1][1], 0) for access in accesses):
        accesses = [replace(access, block=(access.units[-1][1], 0), units=access.units[:-1]) for access in accesses]
    if len(accesses[0].units) > MAX_UNIT_DIGITS:
        raise LayoutError(
            f"an id has {len(accesses[0].units)} digits inside a block; expected at most {MAX_UNIT_DIGITS}: use larger units"
        )
    return tuple(accesses)


def _digits(units: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The digits of a unit as divisor, extent and bytes."""
    divisor = 1
    for extent, nbytes in units:
        yield divisor, extent, nbytes
        divisor *= extent


def _pack(access: Access, held: int, at: int, block: int) -> Access:
    """The map with dense steps in the same order; steps inside a page of planes do not change."""
    steps = []
    for step in sorted(access.steps, key=lambda step: (step.entries > 0, step.entries, step.nbytes)):
        if access.plane and _is_inside_page(step, access):
            steps.append(step._replace(entries=0))
        else:
            steps.append(step._replace(nbytes=held, entries=0))
            held *= step.extent
    return access.place(at, block, steps)


def _is_inside_page(step: Step, access: Access) -> bool:
    """True if a step stays inside a block's bytes of one allocation."""
    return not step.entries and (bool(access.block[1]) or step.nbytes < access.block[0])


def _page(access: Access) -> int:
    """Bytes from the start of a block's page to the end of its contents."""
    inside = sum((s.extent - 1) * s.nbytes for s in access.steps if _is_inside_page(s, access))
    return access.at[0] + inside + access.itemsize
