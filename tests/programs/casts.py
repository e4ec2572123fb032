"""Copies that cast, by the kernels' device code on the fake driver (test_cast.py)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from test_cast import (
    ALIGNS,
    FORMATS,
    IDS,
    NAMES,
    OWNS,
    PARTS,
    PLAINS,
    WAYS,
    are_apart,
    matrix_of,
    plain_of,
    random_case,
    scaled,
    sides_of,
)
from test_cast_scales import scales as scales_of

import casting
import kvbm
import oracle
from cast_oracle import PLAIN
from casting import Given, Own, Part, Side, planar, plane
from programs.fake_gpu import defer, ids_on_gpu, pump, seed

SIDES = {"d2d": ("fake", "fake"), "d2h": ("fake", "fake pinned"), "h2d": ("fake pinned", "fake")}


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


def _copy(src: Side, dst: Side, ids: Any, strategy: str, scale: casting.Scales, what: Any) -> None:
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
        others = [one for one in PLAINS for _ in range(2)] if number == len(OWNS) - 1 else PLAINS[number % 4 :: 4]  # both ways
        for turn, other in enumerate(others):
            made = plain_of(other, sizes, "bfloat16")
            if made is None or are_apart(made, layout):
                continue
            both: Any = [(made, "bfloat16"), (layout, "bfloat16")]
            (a, a_type), (b, b_type) = both if turn % 2 else both[::-1]
            src = Side(a, sizes, a_type, 5, align=ALIGNS[turn % 6], how=WAYS[turn % 3], seed=turn, where=here)
            dst = Side(b, sizes, b_type, 7, dst=True, align=ALIGNS[(number + turn // 2) % 6], how=WAYS[number % 3], where=there)
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


def parts(direction: str, strategy: str) -> None:
    """Layers, heads, tokens, K or V, and units; and ranges of layers."""
    here, there = SIDES[direction]
    sizes = (3, 2, 3, 8, 32)
    for number, (name, (mine, theirs)) in enumerate(
        itertools.product(("vllm/per_token_head_int8", "record/nvfp4_tensors"), PARTS)
    ):
        a, b = (name, "nhd") if number % 2 else ("nhd", name)
        src = Side(a, sizes, "bfloat16", 3, part=mine, where=here, align=ALIGNS[number % 6])
        dst = Side(b, sizes, "bfloat16", 4, dst=True, part=theirs, where=there, align=ALIGNS[number % 5])
        ids = ([2, -1, 0], [1, 2, 3]) if not mine.tokens else ([5, 0, -1, 2], [0, 7, 1, 6])
        kvbm.Transfer(src.given, dst.given, strategy, cast="amax").copy(*ids, stream=5).synchronize()
        casting.check(src, dst, casting.expected(src, dst, *ids), (name, mine, theirs))
        src, dst = (
            Side(a, sizes, "bfloat16", 3, where=here),
            Side(b, (2, *sizes[1:]), "bfloat16", 4, dst=True, where=there),
        )
        layers = range(1, 3), range(2)
        kvbm.Transfer(src.given, dst.given, strategy, cast="amax").copy(
            [2, 0], [1, 3], stream=5, layers=layers
        ).synchronize()
        casting.check(src, dst, casting.expected(src, dst, [2, 0], [1, 3], None, layers), (name, layers))


def scales(direction: str, strategy: str) -> None:
    """Scales by layer, and for K and V: of constant and of NVFP4 casts, with ids in the kernel's parameters and outside."""
    here, there = SIDES[direction]
    rng = np.random.default_rng(4)
    forms = "nhd", "vllm/flash_attn_nhd", "universal", "vllm/paged_attn_v0", Own("[b] t d h o l"), Own("[b] t h d l o")
    for number, (plain, quantised, quantises) in enumerate(
        itertools.product(forms, ("hnd", forms[4], "record/nvfp4_tensors"), (True, False))
    ):
        layers, blocks, dtype = ((3, 6, "int8"), (3, 150, "float8_e4m3fn"), (200, 3, "float8_e5m2"))[number % 3]
        if quantised == "record/nvfp4_tensors":
            layers, dtype = min(layers, 20), "bfloat16"
        sizes, given = (layers, 2, 1, 2, 32), scales_of(rng, layers, number // 2)
        both: Any = [(plain, PLAIN[number % 3]), (quantised, dtype)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, sizes, a_type, blocks, seed=number, where=here)
        dst = Side(b, sizes, b_type, blocks, dst=True, where=there)
        seed(number % 4)
        _copy(src, dst, (rng.permutation(blocks), rng.permutation(blocks)), strategy, given, (a, b, sizes, given))


def scales_of_parts(direction: str, strategy: str) -> None:
    """Scales of some layers, with K and V swapped on the plain side; and of ranges of layers."""
    here, there = SIDES[direction]
    plain_part: Any = Part((("l", (3, 0)), ("o", (1, 0))))
    for number, (quantised, quantises, kind) in enumerate(
        itertools.product(("hnd", "record/nvfp4_tensors"), (True, False), range(5))
    ):
        rng = np.random.default_rng(number)
        given, sizes = scales_of(rng, 2, kind), (4, 2, 2, 4, 32)
        dtype = "int8" if quantised == "hnd" else "bfloat16"
        both: Any = [("nhd", "float16", plain_part), (quantised, dtype, Part((("l", (1, 2)),)))]
        (a, a_type, mine), (b, b_type, its) = both if quantises else both[::-1]
        src = Side(a, sizes, a_type, 4, part=mine, where=here)
        dst = Side(b, sizes, b_type, 4, dst=True, part=its, where=there)
        kvbm.Transfer(src.given, dst.given, strategy, cast=given.cast).copy([2, -1, 0], [1, 2, 3], stream=5).synchronize()
        casting.check(src, dst, casting.expected(src, dst, [2, -1, 0], [1, 2, 3], given), (a, b, given))
        given, layers = scales_of(rng, 4, kind), (range(1, 3), range(2, 4))
        src, dst = Side(a, sizes, a_type, 4, where=here), Side(b, sizes, b_type, 4, dst=True, where=there)
        move = kvbm.Transfer(src.pool, dst.pool, strategy, cast=given.cast)
        move.copy([2, 0], [1, 3], stream=5, layers=layers).synchronize()
        casting.check(src, dst, casting.expected(src, dst, [2, 0], [1, 3], given, layers), (a, b, layers, given))


def scales_of_turns() -> None:
    """A batch in which a thread takes several groups, of several layers."""
    sizes, given = (4, 2, 1, 4, 136), Given((0.5, 3.0, 0.01, 7.0), (1.0, 0.25, 20.0, 0.1))
    src = Side(Own("[b] t h l o d"), sizes, "bfloat16", 800, where="fake")
    dst = Side(Own("[b] t h l o d"), sizes, "int8", 800, dst=True, where="fake")
    _copy(src, dst, (range(800), range(799, -1, -1)), "direct", given, sizes)


def reports(direction: str) -> None:
    """Reports of pools on GPUs and in pinned memory."""
    from test_cast_report import reported

    here, there = SIDES[direction]
    for plain, name, dtype, given in (
        ("nhd", "vllm/nvfp4", "bfloat16", Given((0.5, 0.1), 0.25)),
        ("universal", "hnd", "int8", Given((0.5, 0.1))),
        ("vllm/LBHNC", "record/mxfp8_tensors", "bfloat16", None),
    ):
        sizes, ids = (2, 2, 2, 4, 64), ([3, -1, 0], [1, 2, 4])
        src, dst = Side(plain, sizes, "float16", 4, where=here), Side(name, sizes, dtype, 5, dst=True, where=there)
        cast = casting.cast_of(given)
        kvbm.convert(src.pool, dst.pool, *ids, stream=5, cast=cast)
        assert kvbm.cast_report(src.pool, dst.pool, *ids, cast=cast, stream=5) == reported(src, dst, *ids, given), name
        assert kvbm.cast_report(src.pool, dst.pool, *map(np.array, ids), cast=cast, stream=5).elements == 2 * 2048


def codes(every: int) -> None:
    """All kernels: codes of 16 bits in random order, all quantised codes and scales."""
    for number, ((dtype, scale), plain, order, quantises) in enumerate(
        itertools.product(FORMATS, PLAIN, ("t d", "d t"), (True, False))
    ):
        if number % every:
            continue
        sizes, given = (1, 1, 1, 16, 128), None if scale else 0.37
        both: Any = [(Own(f"[b] l o h {order}"), plain), (scaled(dtype, scale, sizes), "bfloat16" if scale else dtype)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, sizes, a_type, 8, make=casting.shuffled, seed=number, where="fake")
        dst = Side(b, sizes, b_type, 8, dst=True, where="fake")
        kvbm.convert(src.pool, dst.pool, range(8), range(7, -1, -1), stream=5, cast=casting.cast_of(given))
        pump()
        casting.check(
            src,
            dst,
            casting.expected(src, dst, range(8), range(7, -1, -1), given),
            (dtype, scale, plain, order, quantises),
        )
    for src_type, dst_type in itertools.permutations(PLAIN, 2):
        for order in ("t d", "d t"):
            src = Side(Own("[b] l o h t d"), sizes, src_type, 8, where="fake")
            dst = Side(Own(f"[b] l o h {order}"), sizes, dst_type, 8, dst=True, where="fake")
            kvbm.convert(src.pool, dst.pool, range(8), range(8), stream=5, cast=kvbm.Scale(0.37))
            pump()
            casting.check(src, dst, casting.expected(src, dst, range(8), range(8), 0.37), (src_type, dst_type, order))


def few() -> None:
    """Groups of fewer, as many and more items than a warp, of one and of three loops; odd numbers of them; pairs are skipped."""
    groups = (8, ""), (16, ""), (24, ""), (256, ""), (576, ""), (72, "h"), (40, "h t")
    orders = "h t d", "h t d", "h t d", "h t d", "h t d", "t d h", "d t h"
    for (width, hidden), order in zip(groups, orders, strict=True):
        own = " ".join(axis for axis in "ht" if axis not in hidden)
        layout = planar(
            "[b] l o <>",
            plane("data", "float8_e4m3fn", "h t d", "d", width),
            plane("scale", "float32", own, shared=hidden),
        )
        for tokens in (4, 5):  # with 5, records are not aligned to items of 8
            _there_and_back(layout, order, (2, 2, 3, tokens, width))
    for dtype, scale, group, width in (
        ("float4_e2m1fn", "float8_e4m3fn", 16, 96), ("float4_e2m1fn", "float8_e4m3fn", 16, 48), ("int8", "float32", 32, 96)
    ):  # fmt: skip
        layout = planar(
            "[b] l o <>",
            plane("data", dtype, "h t d", "d", width),
            plane("scale", scale, "h t s", "s", width // group),
        )
        for tokens in (4, 5):
            _there_and_back(layout, "t h d", (2, 2, 3, tokens, width))


def _there_and_back(layout: Any, order: str, sizes: tuple[int, ...]) -> None:
    for quantises in (True, False):
        both: Any = [(Own(f"[b] l o {order}"), "bfloat16"), (layout, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, sizes, a_type, 4, seed=sizes[4], where="fake")
        dst = Side(b, sizes, b_type, 4, dst=True, where="fake")
        ids = np.array([3, -1, 0]), np.array([0, 1, 2])
        kvbm.Transfer(src.pool, dst.pool, cast="amax").copy(*map(ids_on_gpu, ids), stream=5).synchronize()
        casting.check(src, dst, casting.expected(src, dst, *ids), (sizes, order, quantises))


def random(first: int, count: int) -> None:
    """Random layouts of test_cast.py."""
    done = 0
    for number in range(first, first + count):
        layout, plain, dtype, sizes, given, quantises = random_case(number)
        here, there = list(SIDES.values())[number % 3]
        both: Any = [(plain, dtype), (layout, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        try:
            src = Side(
                a, sizes, a_type, 4, align=ALIGNS[number % 6], how=WAYS[number // 6 % 3], seed=number, where=here
            )
            dst = Side(
                b, sizes, b_type, 5, dst=True, align=ALIGNS[number // 18 % 6], how=WAYS[number // 36 % 3], where=there
            )
            move = kvbm.Transfer(src.pool, dst.pool, ("direct", "staged")[number // 3 % 2], cast=casting.cast_of(given))
        except (oracle.IllegalError, kvbm.PlanError, kvbm.MissingKernelError):
            continue
        ids = [3, 0, -1, 2], [1, 4, 0, 2]
        seed(number % 4)
        move.copy(*ids, stream=5).synchronize()
        casting.check(src, dst, casting.expected(src, dst, *ids, given), number)
        done += 1
    assert done > count / 2


def _digested(move: kvbm.Transfer, ids: tuple[list[int], list[int]], tokens: list[int], where: str) -> list[int]:
    """The digests of a copy.  The second of its three pairs is skipped."""
    found = np.ones(3, np.uint64)
    if where == "cpu":
        move.copy(*ids, digests=found, tokens=tokens)
    else:
        move.copy(*map(ids_on_gpu, map(np.array, ids)), stream=5, digests=ids_on_gpu(found), tokens=tokens).synchronize()
    return found.tolist()


#: Formats of values and scales to which casts from float32 digest in their pass.
OF_FLOAT32 = {
    ("float8_e4m3fn", "float32"), ("int8", "float32"), ("float8_e4m3fn", "float8_e8m0fnu"), ("float4_e2m1fn", "float8_e4m3fn"),
}  # fmt: skip


def fused_digests(most: int | None, where: str = "fake", numbers: range = range(1000)) -> None:
    """Digests in the pass of the cast, on all multiprocessors or on `most`: of all formats and forms of cells, or of these numbers.

    On all of a GPU's, where no thread takes several turns, half of the widths of each format.
    """
    for number, (layout, order, sizes, scale) in enumerate(casting.digested()):
        if number not in numbers or (where == "fake" and most is None and number // 2 % 2):
            continue
        for quantises in (True, False):
            small = "bfloat16" if isinstance(layout, casting.Planar) else "float8_e4m3fn"
            plain = ("bfloat16", "float16", "float32")[number % 3]
            both: Any = [(Own(order), plain), (layout, small)]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            src = Side(a, sizes, a_type, 4, seed=number, where=where)
            dst = Side(b, sizes, b_type, 4, dst=True, where=where)
            ids = ([3, -1, 0], [1, 2, 3])
            move = kvbm.Transfer(src.pool, dst.pool, max_sms=most, cast=casting.cast_of(scale))
            found = _digested(move, ids, [4, 8, 0], where)
            casting.check(src, dst, casting.expected(src, dst, *ids, scale), (sizes, order, quantises))
            side, mine = (dst, ids[1]) if quantises else (src, ids[0])
            on_host = Side(side.meant, sizes, side.dtype, 4)
            on_host.put(side.after)
            wanted = on_host.pool.digest(mine, tokens=[4, 8, 0])
            wanted[1] = 0
            assert found == wanted.tolist(), (layout, sizes, quantises)
            is_fused = "Digests are fused into direct copies (one launch of sum_cast_" in move.explain(3)
            has_small_scales = isinstance(layout, casting.Planar) and "dtype: float32" not in str(layout)
            formats = tuple(one.dtype for one in layout.drawn.planes) if isinstance(layout, casting.Planar) else ()
            has_no_kernel = plain == "float32" and (not quantises or formats not in OF_FLOAT32)
            assert is_fused is not (has_no_kernel or (where == "cpu" and has_small_scales)), (sizes, move.explain(3))


def random_digests(first: int, count: int, where: str = "fake") -> None:
    """Rows of elements in layouts with random orders: axes, groups, planes apart or in records, K and V, odd sizes."""
    fused = 0
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        dtype, scale = FORMATS[int(rng.integers(6))]
        sizes = tuple(int(rng.choice((1, 2, 3, 5, 8))) for _ in "loht")
        sizes = (sizes[0], min(sizes[1], 2), *sizes[2:])
        width, group = int(rng.choice((32, 64, 96, 128, 256, 272))), int(rng.choice((16, 32, 512)))
        groups = width // group if width % group == 0 else 1
        outer, *orders = (" ".join(rng.permutation(list(axes))) for axes in ("bl", "oht", "oht", "lohtb"))
        own = ("s", groups) if groups > 1 else ("", 1)
        scales = f"{orders[1]} s".strip() if groups > 1 else orders[1]
        bracket = "[b] l" if rng.integers(2) else outer
        layout = planar(f"{bracket} <>", plane("data", dtype, f"{orders[0]} d", "d", width), plane("scale", scale, scales, *own))
        rows = f"d/{group} {orders[2]} d%{group}" if groups > 1 and rng.integers(2) else f"{orders[2]} d"
        both: Any = [(Own(rows), PLAIN[int(rng.integers(2))]), (layout, "bfloat16")]
        quantises = bool(rng.integers(2))
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, (*sizes, width), a_type, 4, seed=number, where=where)
        dst = Side(b, (*sizes, width), b_type, 4, dst=True, where=where)
        ids, tokens = ([3, -1, 0], [1, 2, 3]), [7, 0, 1 << 40]
        if where == "fake":
            seed(number % 4)
        most = 1 if rng.integers(2) and where == "fake" else None
        move = kvbm.Transfer(src.pool, dst.pool, max_sms=most, cast="amax")
        found = _digested(move, ids, tokens, where)
        casting.check(src, dst, casting.expected(src, dst, *ids), number)
        side, mine = (dst, ids[1]) if quantises else (src, ids[0])
        on_host = Side(side.meant, side.sizes, side.dtype, 4)
        on_host.put(side.after)
        wanted = on_host.pool.digest(mine, tokens=tokens)
        wanted[1] = 0
        assert found == wanted.tolist(), (number, layout, move.explain(3))
        fused += "Digests are fused" in move.explain(3)
    assert fused > count / (9 if where == "cpu" else 3), fused


def digests(direction: str, strategy: str) -> None:
    """Of the quantised blocks: with and without skipped pairs, in slots of two blocks."""
    here, there = SIDES[direction]
    for a, b in (("nhd", "vllm/per_token_head_fp8"), ("record/nvfp4_tensors", "nhd"), ("vllm/nvfp4", "hnd")):
        sizes = (1, 2, 2, 4, 64)
        src, dst = Side(a, sizes, "bfloat16", 9, where=here), Side(b, sizes, "bfloat16", 9, dst=True, where=there)
        for ids in (([3, -1, 0, 7], [1, 2, 8, 4]), ([3, 5, 0, 7], [1, 2, 8, 4])):
            slot = max(side.pool.resolved.section.packed().accesses[0].block[0] for side in (src, dst))
            found = np.ones(4, np.uint64)
            fake = ids_on_gpu(found)
            chunk = 2 * slot if strategy == "staged" else None
            move = kvbm.Transfer(src.pool, dst.pool, strategy, chunk_bytes=chunk, cast="amax")
            dst.put(dst.before)
            move.copy(*ids, stream=5, digests=fake, tokens=[4, 8, 0, 12]).synchronize()
            casting.check(src, dst, casting.expected(src, dst, *ids), (a, b))
            side, mine = (dst, ids[1]) if a == "nhd" else (src, ids[0])
            on_host = Side(side.meant, sizes, "bfloat16", 9)
            on_host.put(side.after)
            wanted = on_host.pool.digest(mine, tokens=[4, 8, 0, 12])
            wanted[[-1 in pair for pair in zip(*ids, strict=True)]] = 0
            assert found.tolist() == wanted.tolist(), (a, b)
