"""Layouts of several planes by every strategy (test_planes.py)."""

from __future__ import annotations

import numpy as np
from test_planes import PAIRS, SOME_PAIRS, Side, check, shapes

import kvbm
from programs.fake_gpu import count, defer, half, pump, seed

SIDES = {"d2d": ("fake", "fake"), "d2h": ("fake", "fake pinned"), "h2d": ("fake pinned", "fake")}
WAYS = ("steps", "rows", "scattered")


def every_strategy(direction: str, strategy: str) -> None:
    defer(1)
    for number, (src, dst) in half(SOME_PAIRS, direction, strategy):
        a, b = SIDES[direction]
        # Where a copy of the engine moves one byte, few of them are enough.
        shape = shapes(src)[0 if (src != "sglang/mxfp8" and dst != "sglang/mxfp8") or strategy != "engine" else 2]
        ways = WAYS[number % 3], WAYS[number // 3 % 3]
        s = Side(src, shape, 7, where=a, how=ways[0], align=(0, 2, 4)[number % 3])
        d = Side(dst, shape, 9, where=b, how=ways[1], align=(4, 0, 1)[number % 3], dst=True)
        seed(number % 4)
        chunk = (
            (None, max(s.slot, d.slot), 3 * max(s.slot, d.slot))[number % 3] if strategy in ("staged", "auto") else None
        )
        most = 3 if number % 5 == 4 and strategy != "engine" else None
        with kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=chunk, max_sms=most) as move:
            src_ids, dst_ids = np.array([6, 1, -1, 0, 5]), np.array([3, 8, 1, -1, 0])
            given = src_ids.copy(), dst_ids.copy()
            done = move.copy(*given, stream=5)
            given[0][:] = given[1][:] = 0
            assert d.untouched and not done.query()
            pump()
            assert done.query()
            check(s, d, src_ids, dst_ids, what=(src, dst, ways))
            assert move.stats()["bytes"] == 3 * s.arena.placed.block_bytes, (src, dst, move.stats())
            assert strategy in ("auto", done.strategy)
    assert count("pushes") == count("pops")


def one_launch_moves_all_planes() -> None:
    for src, dst in PAIRS:
        shape = shapes(src)[0]
        s, d = Side(src, shape, 4, where="fake"), Side(dst, shape, 5, where="fake", dst=True)
        before = count("launches")
        kvbm.convert(s.pool, d.pool, [3, 0], [1, 4], stream=5)
        check(s, d, [3, 0], [1, 4])
        assert count("launches") == before + 1, (src, dst, count("launches") - before)


def ranges_of_layers(strategy: str) -> None:
    for number, (src, dst) in enumerate(SOME_PAIRS):
        a, b = list(SIDES.values())[number % 3]
        base = shapes(src)[2 if strategy == "engine" and "mxfp8" in src else 0]
        s = Side(src, (4, *base[1:]), 4, where=a)
        d = Side(dst, (2, *base[1:]), 5, where=b, dst=True)
        layers = range(1, 3), range(2)
        with kvbm.Transfer(s.pool, d.pool, strategy) as move:
            move.copy([3, 0], [1, 4], layers=layers, stream=5).synchronize()
        check(s, d, [3, 0], [1, 4], layers, what=(src, dst))
