"""Finds the element of a block at an address: the inverse of an address map, for pictures and tables of plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..layout.axes import AXES

if TYPE_CHECKING:
    from ..layout.address_map import Access
    from ..layout.region import Section
    from ..planner.loopnest import Mode, Part

Element = Mapping[str, int]


def element_at(section: Section, entry: int, nbytes: int) -> dict[str, int] | None:
    """Coordinates of the element that begins at this table index and byte of block 0.  Coordinates that are 0 are left out.

    None if no element begins there, or if it is in an opaque group, whose order is unspecified.

    Examples
    --------
    >>> import kvbm
    >>> section = kvbm.load("nhd").resolve("nl=2,no=2,nh=4,nt=8,hd=16,dtype=float16", 3).section  # [b l o] t h d
    >>> element_at(section, 3, 2 * (5 * 64 + 2 * 16))
    {'l': 1, 'o': 1, 't': 5, 'h': 2}
    """
    found = (_reverse(access, entry, nbytes) for access in section.accesses)
    return next((element for element in found if element is not None), None)


def _reverse(access: Access, entry: int, nbytes: int) -> dict[str, int] | None:
    """Divide by the largest step first, and check the result with the forward map."""
    rest, entries = nbytes - access.at[0], entry - access.at[1]
    digits: dict[tuple[str, ...], int] = {}
    for step in sorted(access.steps, key=lambda step: (-step.entries, -step.nbytes)):
        digit = entries // step.entries if step.entries else rest // step.nbytes
        digit = min(max(digit, 0), step.extent - 1)
        entries, rest = entries - digit * step.entries, rest - digit * step.nbytes
        if digit and step.opaque:
            return None
        digits[step.axes] = digits.get(step.axes, 0) + digit * step.divisor
    sizes, found = dict(access.sizes), dict[str, int]()
    for axes, index in digits.items():
        for axis in reversed(axes):
            index, found[axis] = divmod(index, sizes.get(axis, 1))
    if access.address(0, found) != (entry, nbytes):
        return None
    if access.half is not None and found.setdefault("o", access.half) != access.half:
        return None  # the order of K does not apply to V
    return {axis: index for axis, index in found.items() if index}


def changing(elements: Iterable[Element | None]) -> list[str]:
    """The axes along which the elements differ, in the order of `AXES`; the layout's own axes are last."""
    known = [one for one in elements if one is not None]
    axes = [*AXES, *(axis for one in known for axis in one if axis not in AXES)]
    return [axis for axis in dict.fromkeys(axes) if len({one.get(axis, 0) for one in known}) > 1]


def names_of(element: Element | None, axes: Sequence[str]) -> list[str]:
    """An element's coordinates along some axes, such as ``["l3", "K", "t0"]``; empty if the element is unknown."""
    if element is None:
        return []
    return ["KV"[element.get(axis, 0)] if axis == "o" else f"{axis}{element.get(axis, 0)}" for axis in axes]


def loop_axes(part: Part, mode: Mode, source: Section) -> list[str]:
    """The axes of a loop of a part, from the addresses of the source; empty if an order is unspecified."""
    turns = {0, 1, mode.extent - 1, *(math.gcd(mode.extent, 1 << bit) for bit in range(1, 12))}
    elements = [
        element_at(source, part.src_table_offset + turn * mode.src_table, part.src_offset + turn * mode.src)
        for turn in turns
        if turn < mode.extent
    ]
    return [] if None in elements else changing(elements)
