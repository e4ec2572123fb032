"""Scales: which elements of a plane share a scale of another plane.

A plane with ``scales: data`` holds the scales of the plane ``data``: the value of an element is its code times its scale.  The axes
of both planes say which elements form a group, so nothing else is declared:

* an axis of both planes has one scale for each coordinate;
* if each has one axis that the other lacks, the elements of a group are neighbours along the axis of the data, as many as the
  size of this axis divided by the size of the other;
* along every other axis of the data, all coordinates share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import LayoutError
from .terms import Plane

#: Formats of elements that have a scale.
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1fn")

#: Formats of scales.
SCALE_FORMATS = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")


@dataclass(frozen=True)
class Group:
    """The elements that share a scale."""

    axis: str  # axis of the data whose neighbours share a scale; empty if there is none
    scale_axis: str  # axis of the scales that counts the groups along `axis`
    size: int  # neighbours along `axis` that share a scale
    whole: tuple[str, ...]  # axes of the data along which all coordinates share a scale


def group_of(data: str, data_sizes: Mapping[str, int], scale: str, scale_sizes: Mapping[str, int]) -> Group:
    """The group of elements of one scale, from the sizes of the axes of both planes.

    Raises `LayoutError` if the axes of the scales are not part of those of the data, or a group is not a whole number
    of elements.
    """
    ours = {axis: size for axis, size in data_sizes.items() if size > 1}
    theirs = {axis: size for axis, size in scale_sizes.items() if size > 1}
    for axis in ours.keys() & theirs.keys():
        if ours[axis] != theirs[axis]:
            raise LayoutError(f"axis '{axis}': {ours[axis]} in plane '{data}', {theirs[axis]} in its scales '{scale}'")
    only, own = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if not own:
        return Group("", "", 1, tuple(only))
    # An axis of the shape, such as tokens, is never divided: only the elements of a head, or an axis of the layout.
    divided = [axis for axis in only if axis not in "loht"]
    if len(own) > 1 or len(divided) != 1:
        raise LayoutError(
            f"plane '{scale}' has the axes {' '.join(own)}, which plane '{data}' lacks: expected at most one, and one axis of "
            f"'{data}' that it divides, got {' '.join(divided) or 'none'}"
        )
    size, rest = divmod(ours[divided[0]], theirs[own[0]])
    if rest:
        raise LayoutError(
            f"plane '{scale}': {theirs[own[0]]} scales along '{own[0]}' for {ours[divided[0]]} elements along '{divided[0]}' of "
            f"plane '{data}': expected a divisor"
        )
    return Group(divided[0], own[0], size, tuple(axis for axis in only if axis != divided[0]))


def scale_text(dtype: str, data_sizes: Mapping[str, int], group: Group) -> str:
    """What has one scale, for readers: ``one float32 for each token and head (128 elements)``.

    Layers, and K and V, are named only if they share a scale.
    """
    shared = {axis: size for axis, size in data_sizes.items() if axis in group.whole}
    each = [name for axis, name in (("t", "token"), ("h", "head")) if data_sizes.get(axis, 1) > 1 and axis not in shared]
    each += [axis for axis in sorted(data_sizes) if axis not in ("l", "o", "h", "t", group.axis, *shared) and data_sizes[axis] > 1]
    if group.axis:
        each.append(f"{group.size} elements along {group.axis}")
    words = " and ".join(filter(None, (", ".join(each[:-1]), each[-1]))) if each else "layer" if "l" not in shared else "block"
    together = " and ".join(name for axis, name in (("l", "all layers"), ("o", "K and V")) if axis in shared)
    count = f" ({group.size * math.prod(shared.values()):,} elements)" if shared else ""
    return f"one {dtype} for each {words}{f', for {together} together' if together else ''}{count}"


def why_not_scales(plane: Plane, planes: Sequence[Plane]) -> str:
    """Why a plane cannot hold the scales that it declares; empty if it can, or declares none."""
    if not plane.scales:
        return ""
    data = next((other for other in planes if other.name == plane.scales), None)
    if data is None or data is plane:
        return f"expected the name of another plane, got {plane.scales!r:.100}"
    if data.scales:
        return f"plane '{data.name}' holds scales itself"
    if sum(other.scales == data.name for other in planes) > 1:
        return f"expected one plane of scales of '{data.name}', got several"
    if data.dtype not in QUANTISED:
        return f"expected a plane with a dtype of {', '.join(QUANTISED)}, got '{data.name}' of {data.dtype or 'any dtype'}"
    if plane.dtype not in SCALE_FORMATS:
        return f"expected a dtype of {', '.join(SCALE_FORMATS)} for scales, got {plane.dtype or 'none'}"
    return ""
