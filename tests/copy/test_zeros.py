"""kvbm.copy.zeros: blocks whose load failed are zeros, whatever their layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import BindError, Pool
from kvbm.copy.zeros import Zeros
from kvbm.layout.grammar import parse

SHAPE = kvbm.load_shape("nl=1,no=1,nh=1,nt=4,hd=4,dtype=float16")

LAYOUTS = {
    "side by side": 'order: "b l o t h d"\n',
    "a pitch on the last axis": 'order: "b l o t h d"\npitch: {d: "2"}\n',
}


def made(name: str) -> Pool:
    return Pool.allocate(parse(LAYOUTS[name], "x.yaml"), SHAPE, 3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_of_these_blocks_alone(name: str) -> None:
    """Red: NumPy's ValueError where the elements of a row do not lie side by side."""
    pool = made(name)
    for array in pool.arrays:
        array.view(np.uint16)[...] = 0x1234
    Zeros(pool)([1, -1, 1])
    for array in pool.arrays:
        found = array.view(np.uint16)
        assert (found[1] == 0).all() and (found[[0, 2]] == 0x1234).all()


@pytest.mark.parametrize("ids", [[1.9], ["2"], [True], [None], 5, np.ma.array([1, 2], mask=[False, True]), "1", [[1]]])
def test_ids_that_are_none(ids: Any) -> None:
    """Red: 1.9 and True were block 1, "2" was block 2, a mask was left out, and others ended with errors of Python and NumPy."""
    pool = made("side by side")
    before = pool.digest()
    with pytest.raises(BindError, match="ids: expected a list of block ids, got"):
        Zeros(pool)(ids)
    assert (pool.digest() == before).all()


@pytest.mark.parametrize("ids", [[3], [-2], [1 << 70]])
def test_blocks_that_do_not_exist(ids: list[int]) -> None:
    with pytest.raises(BindError, match=r"dst_ids\[0\]"):
        Zeros(made("side by side"))(ids)
