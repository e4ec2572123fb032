"""What ``kvbm check`` says of a layout beyond its text: where it is legal, and which layouts could be taken for it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import LayoutError, SpecError
from ..layout import spec
from ..layout.axes import AXES
from ..layout.layout import Layout
from ..layout.shapes import BlockShape, load_shape, shape_names

__all__ = ["chosen", "legality", "mistaken"]


def mistaken(
    mine: Sequence[Layout], known: Sequence[Layout], wanted: Sequence[tuple[str, BlockShape]]
) -> dict[str, list[str]]:
    """Notes by fingerprint: which layouts take the same arrays and mean something else, and at which shapes."""
    from ..layout import identity

    names: dict[BlockShape, str] = {}  # some presets have equal sizes: once is enough
    for name, shape in wanted or [(name, load_shape(name)) for name in shape_names()]:
        names.setdefault(shape, name)
    for layout in mine if not wanted else ():
        if not any(_is_legal(layout, shape) for shape in names) and (example := spec.example_shape(layout)):
            names.setdefault(load_shape(example), example)
    layouts = list({layout.fingerprint: layout for layout in reversed([*known, *mine])}.values())[::-1]
    taken_for: dict[str, dict[str, list[str]]] = {layout.fingerprint: {} for layout in mine}
    for shape, shape_name in names.items():
        for group in identity.ambiguous(layouts, shape):
            for meaning in group:
                others = [other.name for those in group if those is not meaning for other in those]
                for layout in meaning:
                    for other in others if layout.fingerprint in taken_for else ():
                        taken_for[layout.fingerprint].setdefault(other, []).append(shape_name)
        for one, blocks, other_layout, other_blocks in identity.confusable(layouts, shape, of=mine):
            less = math.gcd(blocks, other_blocks)
            text = f"{other_layout.name} (as {other_blocks // less} blocks in place of {blocks // less})"
            taken_for[one.fingerprint].setdefault(text, []).append(shape_name)
    notes: dict[str, list[str]] = {}
    for fingerprint, others_of in taken_for.items():
        where: dict[tuple[str, ...], list[str]] = {}
        for other, places in others_of.items():
            where.setdefault(tuple(places), []).append(other)
        notes[fingerprint] = [
            f"same arrays as {', '.join(sorted(others))} at {_some(places, len(names))}: nothing can notice a mix-up; name the "
            "layout explicitly"
            for places, others in where.items()
        ] or [f"no other shipped layout takes its arrays at {_some(list(names.values()), len(names))}"]
    return notes


def _some(names: Sequence[str], total: int) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return "any shipped shape" if len(names) == total else f"{', '.join(names[:4])} and {len(names) - 4} more shapes"


def chosen(given: Iterable[str]) -> Iterator[str | Path]:
    """Names and files as they are; of folders the layouts in them.

    A folder of the name of a shipped layout is meant only as a path, such as ``./nhd``.  One without layouts is a `SpecError`.
    """
    for text in given:
        path = Path(text)
        if path.is_dir() and spec.load_shipped(text) is None:
            files = [file for file in sorted(path.rglob("*.yaml")) if file.relative_to(path).parts[0] != "shapes"]
            if not files:
                raise SpecError(f"{path}: expected .yaml files of layouts in this folder, got none; pass a file or a name")
            yield from files
        else:
            yield text


def legality(layout: Layout, wanted: Sequence[tuple[str, BlockShape]]) -> Iterator[str]:
    """Yield notes: on the wanted shapes, else on the shipped ones that fit.

    Raises where the layout is illegal for a wanted shape; without any, where it is for every shipped one that fits.
    """
    for text, shape in wanted:
        layout.resolve(shape, 1024)
        yield f"one-to-one at {text}"
    if wanted:
        return
    absent = [axis for axis in AXES if axis not in layout.present]
    shipped = [(name, load_shape(name)) for name in shape_names()]
    fitting = [(name, shape) for name, shape in shipped if all(shape.sizes.get(axis) == 1 for axis in absent)]
    example = spec.example_shape(layout)
    if example is not None and not any(_is_legal(layout, shape) for _, shape in fitting):
        # Shipped shapes are of models; scales by themselves have other sizes.
        yield f"one-to-one at {load_shape(example)}, which is no shipped shape"
        return
    if not fitting:
        sizes = ", ".join("hd=1" if axis == "d" else f"n{axis}=1" for axis in absent)
        yield f"no shipped shape fits, as the order has no {', '.join(absent)} ({sizes}): add them, or give a shape with --shape"
        return
    reasons: dict[str, list[str]] = {}
    failed: LayoutError | None = None
    for name, shape in fitting:
        try:
            layout.resolve(shape, 1024)
        except LayoutError as error:
            failed = failed or error
            reasons.setdefault(re.sub(r" \(at [^()]*\)$", "", str(error)), []).append(name)
    legal = len(fitting) - sum(map(len, reasons.values()))
    if failed is not None and legal == 0:
        raise failed
    without = [axis for axis in absent if any(shape.sizes.get(axis, 1) > 1 for _, shape in shipped)]
    only = (
        f" with {' and '.join(f'n{axis}=1' for axis in without)}, as the order has no {', '.join(without)}"
        if without
        else ""
    )
    yield f"one-to-one at {legal} of {len(fitting)} shipped shapes{only}"
    for reason, names in reasons.items():
        yield f"not at {_some(names, len(shipped))}: {reason}"


def _is_legal(layout: Layout, shape: BlockShape) -> bool:
    try:
        layout.resolve(shape, 1024)
    except LayoutError:
        return False
    return True
