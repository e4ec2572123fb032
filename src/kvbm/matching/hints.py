"""What `kvbm.match` advises: how to bind arrays that fit a layout, and what differs if no layout fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..engines.adapters import VLLM_DIMS
from ..errors import DTypeError, SpecError
from ..layout.loops import coalesce
from ..layout.naming import SPELLINGS
from ..layout.resolved import Allocation, Resolved
from ..layout.shapes import ITEMSIZE, BlockShape
from ..memory.array_info import Array, dense

#: How arrays are bound, by the fit of their axes.
HOW = {
    "exact": "as given: kvbm.Pool takes the arrays",
    "parts": "as its parts: kvbm.Pool takes them",
    "vllm": "as a view: {call} takes the arrays",
    "whole": "as a view{shape}",
    "permuted": "as a view: the axes of the arrays have another order than those of the layout, or axes of size 1 differ{shape}",
    "viewed": "as a view: axes of the arrays are joined or split; the sizes fit, and say nothing about the order inside{shape}",
}
Steps = list[tuple[int, int]]

_SIZES = {"nl": "layers", "hd": "elements per head", "nh": "KV heads", "nt": "tokens per block", "no": "of K and V"}


def steps_of(shape: Sequence[int], strides: Sequence[int]) -> Steps:
    """Extent and stride in bytes of each axis that is longer than one, fastest first."""
    loops = ((extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent > 1)
    return sorted(loops, key=lambda loop: loop[::-1])


def steps_between(array: Array, count: int, itemsize: int) -> list[int]:
    """Bytes between neighbours, if `count` arrays like this one are views that fill one allocation."""
    steps = steps_of(array.shape, array.strides)
    if not steps:  # each array is one element
        return [itemsize]
    ends = [extent * stride for extent, stride in steps]
    return [end for end, (_, after) in zip(ends, [*steps[1:], (0, 0)], strict=True) if after in (0, end * count)]


# ---- how arrays are bound ------------------------------------------------------------------------------------------


def vllm_call(names: Sequence[str], resolved: Resolved, array: Array, *, joined: bool) -> str:
    """The call of `Pool.from_vllm` that takes the arrays; empty if it does not take them.

    `array` is one of them.  If they are views of one allocation (`joined`), it is all of that, with the arrays along
    the first axis.
    """
    if resolved.parts or len(resolved.kinds) > 1:
        return ""
    if len(resolved.layout.orders) > 1 and resolved.shape.no == 1:  # from_vllm reads the tensor as K and V
        return ""
    for name in names:
        dims = ["l"] * joined + VLLM_DIMS.get(name, "").split()
        if name in VLLM_DIMS and len(dims) == len(array.shape) and _has_dims(array, dims, resolved):
            shape = ", shape=shape" if resolved.shape.no == 1 and any("*" in dim for dim in dims) else ""
            return f'kvbm.Pool.from_vllm(tensors, "{name}"{shape})'
    return ""


def _has_dims(array: Array, dims: Sequence[str], resolved: Resolved) -> bool:
    """True if the axes of the array have the sizes and strides of these dimensions of the layout."""
    kind = resolved.first
    if kind.axes == ("elements",):  # the array gives only the sizes
        sizes = {**resolved.shape.sizes, "b": resolved.num_blocks}
        wanted = tuple(math.prod(sizes[axis] for axis in dim.split("*")) for dim in dims)
        return array.shape == wanted and array.strides == dense(wanted, kind.itemsize)
    left = {axis: (size, stride) for axis, size, stride in zip(kind.axes, kind.shape, kind.strides, strict=True)}
    for dim, extent, stride in zip(dims, array.shape, array.strides, strict=True):
        parts = [left.pop(axis, (1, 0)) for axis in dim.split("*")]
        (held, step), *outer = reversed(parts)
        for size, at in outer:
            if size > 1 and at != held * step:
                return False
            held *= size
        if extent != held or (held > 1 and stride != step):
            return False
    return all(size == 1 for size, _ in left.values())


# ---- what differs --------------------------------------------------------------------------------------------------


def pitches(array: Array, kind: Allocation) -> dict[str, int] | None:
    """Strides in bytes along the axes of an allocation that need a pitch to fit the array; None if the array does not fit."""
    mine, found, held = coalesce(steps_of(array.shape, array.strides)), dict[str, int](), kind.itemsize
    for axis, extent in reversed(list(zip(kind.axes, kind.shape, strict=True))):
        if extent == 1:
            continue
        if not mine or mine[0][0] % extent:
            return None
        size, stride = mine.pop(0)
        if size > extent:  # an axis of the array that holds several of the layout
            mine.insert(0, (size // extent, stride * extent))
        if stride < held:
            return None
        if stride > held:
            found[axis] = stride
        held = stride * extent
    return None if mine else found


def own_layout(order: str, strides: Mapping[str, int], itemsize: int) -> str:
    """YAML of a layout with these pitches."""
    texts = (f'{axis}: {n // itemsize}' if n % itemsize == 0 else f'{axis}: "{n} B"' for axis, n in strides.items())
    return f'order: "{order}"\npitch: {{{", ".join(texts)}}}'


def near_shapes(arrays: Sequence[Array], shape: BlockShape, fits: Callable[[BlockShape], list[str]], most: int = 3) -> list[str]:
    """Which other size or dtype of the shape would make layouts fit: sentences, at most `most`.

    If none does: which other value together with a layer per array, or with the dtype of the arrays.
    """
    first = [(reason, name, other) for reason, name, other in _others(arrays, shape)]
    again = (
        (f"{reason}, and {more}", f"{name},{also}", both)
        for reason, name, other in first
        if name.startswith(("dtype=", f"nl={len(arrays)}")) and len(arrays) > 1
        for more, also, both in _others(arrays, other)
        if name.partition("=")[0] != also.partition("=")[0]
    )
    for tried in (first, again):
        found = ((reason, name, fits(other)) for reason, name, other in tried)
        texts = (f"{one}; with {name} these fit: {', '.join(fit[:4])}{', …' if fit[4:] else ''}" for one, name, fit in found if fit)
        if made := list(itertools.islice(texts, most)):
            return made
    return []


def _others(arrays: Sequence[Array], shape: BlockShape) -> Iterator[tuple[str, str, BlockShape]]:
    """Shapes with one other value: how each differs, and the value as in ``nl=16``."""
    dtype = SPELLINGS.get(arrays[0].dtype, arrays[0].dtype)
    extents = sorted({extent for one in arrays for extent in one.shape}, reverse=True)
    halves = [extent // 2 for extent in extents if extent % 2 == 0]
    layers = extents if len(arrays) == 1 else [len(arrays), len(arrays) // 2]
    values: list[tuple[str, Sequence[int | str]]] = [("dtype", [dtype] if dtype in ITEMSIZE else []), ("nl", layers)]
    values += [("hd", [*extents, *halves]), ("nh", extents), ("nt", extents), ("no", [1, 2])]
    for name, tried in values:
        now = getattr(shape, name)
        for value in dict.fromkeys(tried):
            if value == now or not value:
                continue
            try:
                other = replace(shape, **{name: value})  # type: ignore[arg-type]
            except (DTypeError, SpecError):
                continue
            if name == "dtype":
                reason = f"the arrays are {value}, the shape is {now}"
            elif name == "nl" and value == len(arrays) > 1:
                reason = f"{value} arrays, the shape has {now} layers"
            else:
                reason = f"the shape has {name}={now} ({_SIZES[name]})"
            if name == "hd" and now < int(value) <= 2 * now:
                reason += f", unless a row holds K of {now} and V of {int(value) - now} side by side: planes of your own"
            yield reason, f"{name}={value}", other
