"""The definition of digests in NumPy, to test kernels and layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import number, quoted, whole
from ..errors import BindError

_U = np.uint64
_OF_WORD = tuple(map(_U, (0xA55C9364D6777AA3, 0xB78448C894E972E3, 0x1E2754521961FFBB, 0x055CCEA021BDA7A7)))
_OF_CELL, _OF_KEY = _U(0xA0761D6478BD642F), (_U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB))


def digest(
    planes: Mapping[str, npt.NDArray[np.uint8]] | npt.NDArray[np.uint8],
    first: int = 0,
    model: Mapping[str, tuple[int, ...]] | None = None,
) -> int:
    """Digest (kvbm-digest-1) of consecutive tokens, over all that a model stores for them.

    ``docs/reference/digest.md`` defines it.

    Parameters
    ----------
    planes : array, or mapping of str to array
        Bytes of shape ``[tokens, …, bytes of a row]``, axes in the order of the model: layers, K and V, heads, further axes.  One
        array, or a mapping from planes to arrays.
    first : int
        Position of the first token.
    model : mapping of str to tuple of int, optional
        Plane → extents in the whole model of the axes between tokens and row, if the arrays hold only the beginning of each axis.

    Returns
    -------
    int
        The digest, 64 bits.
    """
    named = {"": planes} if isinstance(planes, np.ndarray) else planes
    if not isinstance(named, Mapping) or not named or not all(_is_plane(one) for one in named.items()):  # type: ignore[redundant-expr]
        raise BindError(
            "planes: expected an array of bytes [tokens, …, bytes of a row], or a mapping from names to such arrays, got "
            f"{quoted(planes)}"
        )
    first = number("first", first, 0, 1 << 48)
    if model is not None and not (isinstance(model, Mapping) and all(_is_extents(*one, named) for one in model.items())):  # type: ignore[redundant-expr]
        raise BindError(f"model: expected a mapping from planes to extents that hold the arrays, got {quoted(model)}")
    shapes = {name: (model or {}).get(name, held.shape[1:-1]) for name, held in named.items()}
    cells = {name: math.gcd(held.shape[-1], 16) for name, held in named.items()}
    lanes = {name: math.prod(shapes[name]) * (held.shape[-1] // cells[name]) for name, held in named.items()}
    total, before, each = _U(0), 0, sum(lanes.values())
    with np.errstate(over="ignore"):
        for name in sorted(named):
            held, cell = named[name], cells[name]
            padded = np.zeros((*held.shape[:-1], held.shape[-1] // cell, 16), np.uint8)
            padded[..., :cell] = held.reshape(*held.shape[:-1], -1, cell)
            words = padded.view("<u4").astype(_U)
            place = np.arange(lanes[name], dtype=_U).reshape(*shapes[name], -1)[tuple(map(slice, held.shape[1:-1]))]
            positions = np.arange(first, first + held.shape[0], dtype=_U).reshape(-1, *[1] * place.ndim)
            key = positions * _U(each) + _U(before) + place
            weight = _fold(_fold(key * _OF_KEY[0]) * _OF_KEY[1]) | _U(1)
            total += (weight * _fold(_OF_CELL + (words * np.array(_OF_WORD)).sum(-1, dtype=_U))).sum(dtype=_U)
            before += lanes[name]
    return int(total)


def _is_plane(one: tuple[Any, Any]) -> bool:
    name, held = one
    return (
        isinstance(name, str) and isinstance(held, np.ndarray) and held.dtype == np.uint8 and held.ndim > 1 and held.size > 0
    )


def _is_extents(name: Any, extents: Any, named: Mapping[str, npt.NDArray[np.uint8]]) -> bool:
    if not isinstance(name, str) or name not in named or not isinstance(extents, tuple | list):
        return False
    held = named[name].shape[1:-1]
    return len(extents) == len(held) and all(
        whole(n) is not None and least <= n < 1 << 31 for n, least in zip(extents, held, strict=True)
    ) and math.prod(map(int, extents)) < 1 << 31


def _fold(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return x ^ (x >> _U(32))
