"""Layouts of several planes: where their elements lie, and that every pair of them converts bit for bit.

Two judges that share no code with kvbm: the catalogue's formulas (plane_oracle.TABLE), and for random layouts a plain
reading of their structure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import oracle
import plane_oracle
from kvbm import _core, transfer
from memory import aligned
from plane_oracle import FAMILIES, TABLE, Arena, Held, held
from test_planner import execute, minimal

NAMES = sorted(TABLE)
PAIRS = plane_oracle.pairs()

Shape = tuple[int, int, int, int, int, str]


def shapes(name: str) -> tuple[Shape, ...]:
    return FAMILIES[TABLE[name].family].shapes


def every_shape() -> list[tuple[str, Shape]]:
    return [(name, shape) for name in NAMES for shape in shapes(name)]


def numpy_arrays(arena: Arena, buffer: np.ndarray) -> list[np.ndarray]:
    """The engine's tensors, dense, in the shapes that people know."""
    return [
        np.ndarray(tensor.shape, kvbm.shapes.numpy_name(tensor.dtype), buffer, base)
        for tensor, base in zip(arena.placed.tensors, arena.bases, strict=True)
    ]


# ---- the catalogue's formulas ----------------------------------------------------------------------------------------


def test_every_planar_layout_is_in_the_table() -> None:
    assert set(TABLE) == set(matrix.planar())
    assert {formula.family for formula in TABLE.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "shape"), every_shape())
def test_it_is_what_the_formula_says(name: str, shape: Shape) -> None:
    """Every coordinate of every plane, the tensors to the byte, and what is a plane's and what is not."""
    want = held(name, shape, 3)
    if shape[3] < 64:
        want.check()
    resolved = kvbm.load(name).resolve(kvbm.BlockShape(*shape), 3)
    assert {part.plane for part in resolved.planes} == {plane.name for plane in want.planes}
    assert [a.nbytes for a in resolved.allocations] == [tensor.nbytes for tensor in want.tensors]
    assert resolved.block_bytes == want.block_bytes
    for plane in want.planes:
        (part,) = (part for part in resolved.planes if part.plane == plane.name)
        assert part.shape.dtype == plane.dtype
        assert {a: n for a, n in part.extents.items() if n > 1} == {a: n for a, n in plane.extents.items() if n > 1}
        coords = plane.grid(range(3))
        places = plane.address(range(3))
        for o in range(shape[1]):
            mine = {a: c.take([o], [*coords].index("o")) if a == "o" else c for a, c in coords.items()}
            full = dict(zip(mine, np.broadcast_arrays(*mine.values()), strict=True))
            b, _ = full.pop("b"), full.pop("o", None)
            got = part.address(b, o=o, **full)  # type: ignore[arg-type]
            wanted = (p.take([o], [*coords].index("o")) if "o" in coords else p for p in places)
            for mine_, theirs in zip(got, wanted, strict=True):
                assert np.array_equal(np.broadcast_to(mine_, b.shape), theirs), (plane.name, o)
