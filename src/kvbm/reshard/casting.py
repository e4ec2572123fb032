"""Casts of a resharding: which planes change their format, and along which axes of the model a scale spans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._arguments import quoted
from ..errors import BindError, LayoutError, PlanError
from ..layout.layout import Layout
from ..layout.shapes import BlockShape
from ..layout.spec import as_layout
from ..planner.cast import Scale, layers_of, paired, scaled_side
from .placement import Placement

#: The layouts of the source's and of the destination's pools.
Layouts = tuple[Layout, Layout]


class PlaneCast(NamedTuple):
    """How the values of one plane change on their way."""

    #: Plane and dtype on each side.
    planes: tuple[str, str]
    formats: tuple[str, str]
    #: The side that has the scales: 0 the source, 1 the destination.  None: no scales are stored.
    scaled: int | None
    scale: str  # the plane of scales on that side; empty if there is none
    spans: tuple[str, ...]  # axes among l, h and t along which all of a block's coordinates share a scale


def as_layouts(given: Any) -> Layouts | None:
    """Two layouts as users give them, or None.

    Raises `PlanError` if it is something else, and `SpecError` if there is no layout of that name.
    """
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise PlanError(f"layouts: expected those of the source and of the destination, got {quoted(given)}")
    for one in given:
        if not isinstance(one, Layout | str | Path):
            raise PlanError(f"layouts: expected two of kvbm.Layout, or their names, got {quoted(one)}")
    return as_layout(given[0]), as_layout(given[1])


def meaning_of(layout: Layout) -> str:
    """All that a layout says, and which planes are scales: layouts that differ only in that are equal."""
    return f"{layout.meaning}\nscales {sorted(layout.scales.items())}"


def formats_of(layout: Layout, dtype: str) -> dict[str, str]:
    """The dtype of each plane of a layout, for a model of `dtype`.  A layout without planes has one plane without a name."""
    return {plane.name: plane.dtype or dtype for plane in layout.planes} or {"": dtype}


def require_scales(title: str, model: BlockShape, cast: Scale | None) -> None:
    """Raise `PlanError` if the scales of the caller are not those of all layers of the model, or of K and V that it lacks."""
    if cast is None:
        return
    if (count := layers_of(cast)) not in (None, model.nl):
        raise PlanError(f"{title}: {cast}: expected one number for each of the {model.nl} layers of the model, got {count}")
    if cast.k is not None and model.no != 2:
        raise PlanError(
            f"{title}: {cast}: the model has no K and V of their own; expected Scale(x), where x is a number, or one for each layer"
        )


def casts_of(title: str, places: tuple[Placement, Placement], layouts: Layouts, cast: Scale) -> tuple[PlaneCast, ...]:
    """The planes whose values change between two engines.

    Raises `PlanError` if there is no cast between two formats, it needs scales that neither side has, or a plane has no
    counterpart.
    """
    formats = [formats_of(layout, place.model.dtype) for layout, place in zip(layouts, places, strict=True)]
    scales: list[Mapping[str, str]] = [{data: scale for scale, data in layout.scales.items()} for layout in layouts]
    found = []
    for planes in paired(formats, scales):
        ours, theirs = (side[plane] for side, plane in zip(formats, planes, strict=True))
        if ours != theirs:
            own = scales[0].get(planes[0]), scales[1].get(planes[1])
            scaled = scaled_side(title, planes[0] or planes[1], (ours, theirs), own, cast)
            name = (own[scaled] or "") if scaled is not None else ""
            spans = _spans(layouts[scaled], name, planes[scaled]) if scaled is not None else ()
            found.append(PlaneCast(planes, (ours, theirs), scaled, name, spans))
    done = [
        {name for one in found for name in (one.planes[side], scales[side].get(one.planes[side], ""))} for side in (0, 1)
    ]
    copied = [{name: dtype for name, dtype in side.items() if name not in of} for side, of in zip(formats, done, strict=True)]
    if copied[0] != copied[1]:
        texts = [", ".join(f"{name!r} of {dtype}" for name, dtype in side.items()) or "none" for side in copied]
        raise PlanError(
            f"{title}: besides what is cast, {places[0].name} has the planes {texts[0]} and {places[1].name} {texts[1]}; expected "
            "the same planes on both sides, apart from scales (`scales:` of a plane in the layout file)"
        )
    return tuple(found)


def require_same_elements(title: str, places: tuple[Placement, Placement], layouts: Layouts) -> None:
    """Check that planes of equal names and formats hold as much of each token: their scales may be those of other groups.

    Raises `BindError` if a plane has more elements on one side, or one for all tokens, heads or layers there.
    """
    here, there = (_elements(place, layout) for place, layout in zip(places, layouts, strict=True))
    for plane in sorted(here.keys() & there.keys()):
        if here[plane] != there[plane]:
            texts = [f"{count}{f', one for all of {axes}' if axes else ''}" for axes, count in (here[plane], there[plane])]
            raise BindError(
                f"{title}: plane {plane!r}: elements of a token and head: {texts[0]} in {places[0].name} and {texts[1]} in "
                f"{places[1].name}; expected the same, such as scales of equal groups: two quantised formats are not cast into "
                "each other"
            )


def _elements(place: Placement, layout: Layout) -> dict[str, tuple[str, int]]:
    """Of each plane: the axes along which all have one element, and how many elements the others' coordinates have."""
    rank = next(rank for rank in range(place.world) if place.strips(rank).l.size)
    counts = {"l": place.model.nl, "h": place.model.nh, "t": place.nt, "o": place.model.no}
    shared = {plane.name: "".join(axis for axis in plane.shared if counts.get(axis, 1) > 1) for plane in layout.planes}
    try:
        accesses = layout.resolve(place.shape(rank), 1).section.accesses
    except LayoutError as error:
        raise BindError(f"{place.name}: {error}") from None
    return {
        access.plane: (shared.get(access.plane, ""), math.prod(size for axis, size in access.sizes if axis not in counts))
        for access in accesses
    }


def _spans(layout: Layout, scale: str, data: str) -> tuple[str, ...]:
    shared = {plane.name: set(plane.shared) for plane in layout.planes}
    return tuple(axis for axis in "lht" if axis in shared[scale] - shared[data])
