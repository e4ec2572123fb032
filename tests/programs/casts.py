"""Copies that cast, by the kernels' device code on the fake driver (test_cast.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from test_cast import ALIGNS, IDS, NAMES, OWNS, PLAINS, WAYS, are_apart, matrix_of, plain_of, run_random, sides_of

import casting
import kvbm
import oracle
from casting import Side
from programs.fake_gpu import defer, ids_on_gpu, pump, seed

SIDES = {"d2d": ("fake", "fake"), "d2h": ("fake", "fake pinned"), "h2d": ("fake pinned", "fake")}


def names() -> list[str]:
    """Kernels of these programs that are in the library: those that cast, and what moves their copied planes and digests them."""
    from kvbm import _core

    return [name for name in _core.kernel_names() if name.startswith("cast_")]


def shipped(direction: str, strategy: str, spread: int) -> None:
    """Every shipped layout with scales, to and from plain ones."""
    here, there = SIDES[direction]
    for turn, name in enumerate(NAMES):
        for case in list(matrix_of(name))[turn % spread :: spread]:
            if name == "sglang/mxfp8" and turn % 2:
                continue
            seed(turn % 4)
            src, dst = sides_of(name, case, src={"where": here}, dst={"where": there})
            _copy(src, dst, IDS[case[5] % 4], strategy, case[4], (name, case))


def _copy(src: Side, dst: Side, ids: Any, strategy: str, scale: float | None, what: Any) -> None:
    ids = [np.array(side) for side in ids]
    want = casting.expected(src, dst, *ids, scale)
    given = [side.copy() for side in ids]
    defer(1)
    with kvbm.Transfer(src.pool, dst.pool, strategy, cast=casting.cast_of(scale)) as move:
        done = move.copy(*given, stream=5)
        for one in given:
            one[:] = 0
        assert dst.untouched
        pump()
        assert done.query()
        casting.check(src, dst, want, what)
        assert strategy in ("auto", "aside", done.strategy), done.strategy
    defer(0)


def owns(direction: str, strategy: str) -> None:
    """Layouts of one's own: groups of every form."""
    here, there = SIDES[direction]
    for number, (what, layout, sizes) in enumerate(OWNS):
        if what == "a group of 4096":
            continue
        for turn, other in enumerate(PLAINS[number % 4 :: 4]):
            made = plain_of(other, sizes, "bfloat16")
            if made is None or are_apart(made, layout):
                continue
            both: Any = [(made, "bfloat16"), (layout, "bfloat16")]
            (a, a_type), (b, b_type) = both if turn % 2 else both[::-1]
            src = Side(a, sizes, a_type, 5, align=ALIGNS[turn % 6], how=WAYS[turn % 3], seed=turn, where=here)
            dst = Side(b, sizes, b_type, 7, dst=True, align=ALIGNS[number % 6], how=WAYS[number % 3], where=there)
            try:
                _copy(src, dst, IDS[turn % 4], strategy, None, (what, made))
            except kvbm.MissingKernelError as error:
                assert "4 loops inside a group" in str(error)


def ids_on_the_gpu(direction: str, strategy: str) -> None:
    here, there = SIDES[direction]
    for a, b in (("nhd", "vllm/per_token_head_fp8"), ("record/nvfp4_tensors", "nhd")):
        sizes = (1, 2, 2, 4, 32)
        src, dst = Side(a, sizes, "bfloat16", 9, where=here), Side(b, sizes, "bfloat16", 9, dst=True, where=there)
        ids = np.array([3, -1, 0, 7]), np.array([1, 2, 8, -1])
        kvbm.Transfer(src.pool, dst.pool, strategy, cast="amax").copy(*map(ids_on_gpu, ids), stream=5).synchronize()
        casting.check(src, dst, casting.expected(src, dst, *ids), (a, b))


def digests(direction: str, strategy: str) -> None:
    here, there = SIDES[direction]
    for a, b in (("nhd", "vllm/per_token_head_fp8"), ("record/nvfp4_tensors", "nhd"), ("vllm/nvfp4", "hnd")):
        sizes = (1, 2, 2, 4, 64)
        src, dst = Side(a, sizes, "bfloat16", 9, where=here), Side(b, sizes, "bfloat16", 9, dst=True, where=there)
        found = np.ones(4, np.uint64)
        ids = [3, -1, 0, 7], [1, 2, 8, 4]
        fake = ids_on_gpu(found)
        kvbm.Transfer(src.pool, dst.pool, strategy, cast="amax").copy(*ids, stream=5, digests=fake).synchronize()
        casting.check(src, dst, casting.expected(src, dst, *ids), (a, b))
        side, mine = (dst, ids[1]) if a == "nhd" else (src, ids[0])
        on_host = Side(side.meant, sizes, "bfloat16", 9)
        on_host.put(side.after)
        wanted = on_host.pool.digest(mine)
        wanted[1] = 0
        assert found.tolist() == wanted.tolist(), (a, b)
