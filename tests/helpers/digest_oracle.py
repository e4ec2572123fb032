"""Expected digests, from the definition in docs/reference/digest.md and the other oracles' element addresses.

It shares no code with kvbm.  A digest is a sum, so it is kept here as a table with one number per cell.  The digest of a part of a
block is the sum of a part of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MASK = (1 << 64) - 1
WORDS = 0xA55C9364D6777AA3, 0xB78448C894E972E3, 0x1E2754521961FFBB, 0x055CCEA021BDA7A7
CELL, KEYS = 0xA0761D6478BD642F, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

#: Axes of a row's coordinates: those of a model, then a plane's own by name, d.
FIRST = ("l", "o", "h")


def fold(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(32))


def canonical(axis: str) -> tuple[int, str]:
    return FIRST.index(axis) if axis in FIRST else 4 if axis == "d" else 3, axis


def of_cells(cells: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Digests of cells, ``[…, bytes of a cell]``, at keys ``[…]``."""
    padded = np.zeros((*cells.shape[:-1], 16), np.uint8)
    padded[..., : cells.shape[-1]] = cells
    content = np.full(cells.shape[:-1], CELL, np.uint64)
    for number, factor in enumerate(WORDS):
        content += padded[..., 4 * number : 4 * number + 4].copy().view("<u4")[..., 0].astype(np.uint64) * np.uint64(
            factor
        )
    weight = fold(fold(keys * np.uint64(KEYS[0])) * np.uint64(KEYS[1])) | np.uint64(1)
    return weight * fold(content)


class Block:
    """The contents of some tokens.

    Parameters
    ----------
    planes : mapping of str to (axes, array)
        Name → axes (``t``, those of the model and the plane's own) in the array's order, and bytes ``[*axes, bytes of an item]``.
        Axes that the plane does not have are omitted.
    held : mapping of str to (coordinates, int), optional
        Axis → its coordinates in the whole model, and the model's number of them.
    """

    def __init__(
        self,
        planes: Mapping[str, tuple[Sequence[str], np.ndarray]],
        held: Mapping[str, tuple[Sequence[int], int]] | None = None,
    ) -> None:
        self.rows: dict[str, tuple[list[str], np.ndarray]] = {}
        self.lanes, self.places = 0, dict[str, np.ndarray]()
        self.along, self.extents = dict[str, str](), dict[str, int]()  # of rows: the axis, and its items
        for name in sorted(planes):
            axes, data = planes[name]
            order = sorted((a for a in axes if a != "t"), key=canonical)
            if "t" not in axes:
                axes, data = ["t", *axes], data[None]
            data = data.transpose([*(list(axes).index(a) for a in ("t", *order)), data.ndim - 1])
            extents = {a: data.shape[1 + i] for i, a in enumerate(order)}
            coords = {a: np.arange(n) for a, n in extents.items()}
            for axis, (mine, count) in (held or {}).items():
                if axis in extents:
                    extents[axis], coords[axis] = count, np.asarray(mine)
            # The row goes along the last axis of its own that has more than one element.
            while order and order[-1] not in FIRST and extents[order[-1]] == 1:
                data = data.reshape(*data.shape[:-2], -1)
                order.pop()
            if order and order[-1] not in FIRST:
                self.along[name], self.extents[name] = order[-1], data.shape[-2]
                data = data.reshape(*data.shape[:-2], -1)
                order.pop()
            cell = math.gcd(data.shape[-1], 16)
            data = data.reshape(*data.shape[:-1], -1, cell)
            place = np.zeros(data.shape[1:-1], np.uint64)
            count = data.shape[-2]
            place += np.arange(count, dtype=np.uint64)
            for i, axis in reversed(list(enumerate(order))):
                step = coords[axis].astype(np.uint64) * np.uint64(count)
                place += step.reshape([-1 if k == i else 1 for k in range(place.ndim)])
                count *= extents[axis]
            self.rows[name] = order, data
            self.places[name] = place + np.uint64(self.lanes)
            self.lanes += count

    def table(self, name: str, first: int = 0) -> tuple[list[str], np.ndarray]:
        """A plane's axes, and one number per cell, ``[t, *axes, cells of a row]``."""
        order, data = self.rows[name]
        positions = np.arange(first, first + data.shape[0], dtype=np.uint64).reshape(-1, *[1] * self.places[name].ndim)
        return order, of_cells(data, positions * np.uint64(self.lanes) + self.places[name])

    def digest(
        self, first: int = 0, chosen: Mapping[str, Any] | None = None, planes: Sequence[str] | None = None
    ) -> int:
        """The digest of all, or of some coordinates; along d only of whole cells."""
        total = 0
        for name in self.rows if planes is None else planes:
            order, table = self.table(name, first)
            own = {axis: 1 + i for i, axis in enumerate(order)} | {"t": 0}
            for axis, given in (chosen or {}).items():
                coordinates = np.atleast_1d(np.asarray([given] if isinstance(given, int) else list(given)))
                if axis in own:
                    table = table.take(coordinates, axis=own[axis])
                elif axis == self.along.get(name):
                    whole = -(-len(coordinates) * table.shape[-1] // self.extents[name])
                    apart = coordinates.reshape(whole, -1) * table.shape[-1] // self.extents[name]
                    assert (apart == apart[:, :1]).all(), "the test parts a cell"
                    table = table.take(apart[:, 0], axis=-1)
            total += int(table.sum(dtype=np.uint64))
        return total & MASK
