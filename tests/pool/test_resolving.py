"""How often a layout is resolved, and how many Python functions a copy calls."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

import kvbm
from kvbm import BlockShape, Pool, Transfer, convert, load
from kvbm.compile import prepare
from kvbm.layout import layout as layouts
from kvbm.layout.spec import example_shape
from kvbm.planner import plan as planner

BLOCKS = 4
SHAPE = BlockShape(nl=4, no=2, nh=4, nt=16, hd=64, dtype="float16")


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layouts that were resolved, in order."""
    seen: list[str] = []
    resolve = layouts.resolve

    def counted(layout: kvbm.Layout, shape: BlockShape, num_blocks: int) -> object:
        seen.append(layout.name)
        return resolve(layout, shape, num_blocks)

    monkeypatch.setattr(layouts, "resolve", counted)
    return seen


def arrays(name: str, shape: BlockShape) -> list[np.ndarray]:
    return list(Pool.allocate(name, shape, BLOCKS).arrays)


def calls(function: Callable[[], object]) -> int:
    """The Python functions that a call runs."""
    seen: list[str] = []
    sys.setprofile(lambda _, event, __: seen.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen.count("call") - 1


@pytest.mark.quick
def test_a_layout_is_resolved_once_per_pool(resolved: list[str]) -> None:
    """Red: six times for two pools and one convert."""
    given = arrays("nhd", SHAPE), arrays("universal", SHAPE)
    resolved.clear()
    src, dst = (Pool(name, SHAPE, some) for name, some in zip(("nhd", "universal"), given, strict=True))
    convert(src, dst, [0, 1], [2, 3])
    Transfer(src, dst).copy([0], [1], layers=range(1, 3))
    kvbm.plan(src, dst)
    assert resolved == ["nhd", "universal"]
    resolved.clear()
    convert(Pool.allocate("nhd", SHAPE, BLOCKS), Pool.allocate("universal", SHAPE, BLOCKS))
    assert resolved == ["nhd", "universal"]


#: K and V have orders of their own in one array: only its size shows the number of blocks.
COUNTED_AT_SIZES = {"vllm/cpu", "vllm/cpu_amx", "vllm/cpu_vec"}


@pytest.mark.quick
def test_the_number_of_blocks_is_that_of_the_arrays(resolved: list[str]) -> None:
    """For every shipped layout; most show it by the terms of their order alone."""
    more = set()
    for name in kvbm.layouts():
        text = example_shape(load(name))
        if text is None:
            continue
        shape = kvbm.load_shape(text)
        given = arrays(name, shape)
        resolved.clear()
        assert Pool(name, shape, given).num_blocks == BLOCKS, name
        if len(resolved) > 1:
            more.add(name)
    assert more == COUNTED_AT_SIZES


@pytest.mark.quick
def test_what_a_copy_calls() -> None:
    """Red: 2,011 calls of Python functions for the first convert, of which 1,500 read names of kernels that it did not need."""
    src, dst = (Pool.allocate(name, SHAPE, BLOCKS) for name in ("nhd", "universal"))
    move = Transfer(src, dst)  # imports
    prepare._kernels_on.cache_clear()
    planner._cached.cache_clear()
    first = calls(lambda: convert(src, dst, [0, 1], [2, 3]))
    warm = calls(lambda: convert(src, dst, [0, 1], [2, 3]))
    move.copy([0], [1])
    assert first <= 700 and warm <= 16 and calls(lambda: move.copy([0, 1], [2, 3])) <= 3, (first, warm)
