"""`kvbm.cast_report`: the counts and errors of the oracle, for every format, from what the pools hold."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
from test_cast import E2M1, E4M3, E5M2, FORMATS, LATENTS, NAMES, OWNS, are_apart, matrix_of, sides_of
from test_cast_scales import scales

import cast_oracle
import casting
import kvbm
from cast_oracle import PLAIN, QUANTISED
from casting import Given, Own, Part, Side, planar, plane
from coordinates import in_case
from kvbm import _core
from kvbm.layout import spec


def reported(src: Side, dst: Side, src_ids: Any, dst_ids: Any, scale: Any = None) -> kvbm.CastReport:
    """The report of a cast by the oracle alone, from the source's bytes."""
    kept = [pair for pair in zip(src_ids, dst_ids, strict=True) if -1 not in pair]
    ids = [np.array([pair[k] for pair in kept], np.int64) for k in (0, 1)]
    total, groups, errors = [0, 0, 0, 0], 0, []
    for ours, theirs in casting.matched(src, dst):
        here, there = src.planes[ours], dst.planes[theirs]
        if here.dtype not in PLAIN or there.dtype not in QUANTISED:
            continue
        codes = casting.in_axes(src.read(src.before, ours, src.elements(ours, ids[0])), [*here.extents], [*there.extents])
        axes, scale_dtype, name = [*there.extents], None, dst.scales.get(theirs)
        if name is not None:
            one = dst.planes[name]
            at = dst.elements(name, ids[1])
            own = [axis for axis in one.extents if axis not in axes]
            codes = casting.grouped(codes, axes, one, at.shape[1 + [*one.extents].index(own[0])] if own else 1)
            axes, scale_dtype = [*one.extents], one.dtype
            groups += codes[..., 0].size
        multiplies = scale_dtype in (None, "float8_e4m3fn")
        for some, c in casting.each_scale(scale if multiplies else None, axes, codes.shape, None):
            x = casting.to_float32(codes[some], here.dtype)
            rest: Any = {"constant": c} if name is None else {"global_scale": c}
            found, bits, counts = cast_oracle.quantise(x, there.dtype, scale_dtype, **rest)
            y = cast_oracle.from_code(cast_oracle.dequantise(found, bits, there.dtype, scale_dtype, "float32", **rest))
            with np.errstate(all="ignore"):
                wide = x.astype(np.float64)
                errors.append((np.abs(y - wide) / np.abs(wide))[np.isfinite(wide) & (wide != 0)])
            total = [a + b for a, b in zip(total, (x.size, *counts), strict=True)]
    every = np.concatenate([*errors, np.zeros(0)])
    mean = float(np.mean(every)) if every.size else 0.0
    return kvbm.CastReport(
        total[0], groups, total[1], total[2], total[3], float(np.max(every, initial=0)), pytest.approx(mean, rel=1e-9)
    )


def report(src: Side, dst: Side, src_ids: Any, dst_ids: Any, scale: Any = None, **rest: Any) -> kvbm.CastReport:
    """The report after the copy."""
    kvbm.convert(src.given, dst.given, src_ids, dst_ids, cast=casting.cast_of(scale), **rest)
    before = dst.after.copy()
    found = kvbm.cast_report(src.given, dst.given, src_ids, dst_ids, cast=casting.cast_of(scale), **rest)
    assert np.array_equal(dst.after, before) and src.untouched
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_layout(name: str) -> None:
    """Values with groups of zeros, NaN and infinities."""
    done = 0
    for case in list(matrix_of(name, spread=4))[:4] if name != "sglang/mxfp8" else list(matrix_of(name))[:2]:
        if not case[3]:
            continue
        src, dst = sides_of(name, case)
        with in_case(name, case):
            found = report(src, dst, [4, -1, 2], [5, 1, 0], case[4])
            assert found == reported(src, dst, [4, -1, 2], [5, 1, 0], case[4])
            assert found.elements and found.groups
            done += 1
    assert done


@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_every_code(dtype: str, scale: str | None) -> None:
    """All codes of 16 bits: everything is counted that can be."""
    sizes = (1, 2, 2, 16, 64)
    layout: Any = "hnd"
    if scale:
        layout = planar("[b] l o h <>", plane("data", dtype, "t d", "d", 64), plane("scale", scale, "t s", "s", 2))
    for plain, given in itertools.product(PLAIN, (0.37, 3e-5) if scale is None else (0.01, None) if scale == E4M3 else (None,)):
        src = Side("nhd", sizes, plain, 16, make=casting.shuffled)
        dst = Side(layout, sizes, "bfloat16" if scale else dtype, 16, dst=True)
        with in_case(plain, given):
            found = report(src, dst, range(16), range(15, -1, -1), given)
            assert found == reported(src, dst, range(16), range(15, -1, -1), given)
            assert found.elements == 65536 and found.nan and found.saturated


def test_what_is_counted() -> None:
    """By hand: one group of zeros with a NaN, one that saturates, one without errors, and infinities."""
    rows = np.zeros((4, 4), np.float32)
    rows[0] = 0, -0.0, np.nan, 0
    rows[1] = 448, 1, 465 * 2, 0.5
    rows[2] = np.inf, -np.inf, np.nan, 1
    rows[3] = 480, -464, 1.0625, -0.0

    def make(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(rows.view(np.uint32), shape)

    shape = (1, 1, 1, 4, 4)
    src, dst = Side("nhd", shape, "float32", 2, make=make), Side("hnd", shape, E4M3, 2, dst=True)
    assert report(src, dst, [1], [0], 1.0) == kvbm.CastReport(
        16, 0, 0, 4, 2, (930 - 448) / 930, pytest.approx(((930 - 448) / 930 + 32 / 480 + 16 / 464 + 0.0625 / 1.0625) / 8)
    )
    own = planar("[b] l o h <>", plane("data", E4M3, "t d", "d", 4), plane("scale", "float32", "t"))
    found = report(src, Side(own, shape, "bfloat16", 2, dst=True), [1], [0])
    assert (found.elements, found.groups, found.groups_of_zeros, found.saturated, found.nan) == (16, 4, 1, 2, 2)


@pytest.mark.parametrize(("dtype", "limit", "at"), [(E4M3, 464, 0), (E5M2, 61440, 1), ("int8", 127.5, 1), (E2M1, 7, 1)])
def test_where_elements_saturate(dtype: str, limit: float, at: int) -> None:
    """At the limit, just below and just above; with a constant, and with a scale that is 1 (the largest of the group is finite)."""
    edge = np.float32(limit)
    row = np.array([edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf)), -edge], np.float32)

    def make(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(row.view(np.uint32), shape)

    shape = (1, 1, 1, 1, 4)
    layout = planar("[b] l o h <>", plane("data", dtype, "t d", "d", 4), plane("scale", "float8_e8m0fnu", "t"))
    for own, given in (("hnd", 1.0), (layout, None)):
        if own == "hnd" and dtype == E2M1:
            continue
        src = Side("nhd", shape, "float32", 1, make=make)
        dst = Side(own, shape, dtype if own == "hnd" else "bfloat16", 1, dst=True)
        assert report(src, dst, [0], [0], given).saturated == 1 + 2 * at


@pytest.mark.parametrize("number", range(len(OWNS)), ids=[what for what, _, _ in OWNS])
def test_own_layouts(number: int) -> None:
    """Groups over tokens, heads, layers, K and V; elements in any order."""
    _, layout, sizes = OWNS[number]
    for other in ("nhd", "universal", Own("[b] o h l t d"), "vllm/paged_attn_v0"):
        if are_apart(other, layout) or (other == "vllm/paged_attn_v0" and sizes[4] % 8):
            continue
        src, dst = Side(other, sizes, "bfloat16", 3, seed=number), Side(layout, sizes, "bfloat16", 3, dst=True)
        try:
            found = report(src, dst, [2, 0], [1, 2])
        except (kvbm.MissingKernelError, kvbm.PlanError):
            assert dst.untouched
            continue
        assert found == reported(src, dst, [2, 0], [1, 2])


@pytest.mark.slow  # 0.6 s
@pytest.mark.sanitize
def test_scales_of_the_caller() -> None:
    """By layer, for K and V, in sections, of tensors; planes that are only copied are not counted."""
    rng, sizes = np.random.default_rng(0), (4, 2, 3, 8, 32)
    chosen: Any = ((("l", (3, 0)),), (("l", (1, 2)), ("h", (2, 0))), (("t", (1, 3, 5, 7)),))
    parts = (Part(), *map(Part, chosen), Part(tokens=4))
    for turn, (part, (layout, dtype), kind) in enumerate(
        itertools.product(parts, (("hnd", E5M2), ("vllm/paged_attn_v0", "int8"), ("record/nvfp4_tensors", "bfloat16")), range(5))
    ):
        if part.chosen and "h" not in dict(part.chosen) and layout == "vllm/paged_attn_v0":
            continue
        given = scales(rng, len(dict(part.chosen).get("l", range(4))), kind)
        src = Side("nhd", sizes, PLAIN[turn % 3], 3, part=part)
        dst = Side(layout, sizes, dtype, 3, dst=True, part=part)
        with in_case(part, layout, given):
            assert report(src, dst, [2, -1, 0], [1, 2, 0], given) == reported(src, dst, [2, -1, 0], [1, 2, 0], given)
    for plain in LATENTS[:2]:
        src = Side(plain, (2, 1, 1, 4, 576), "bfloat16", 3)
        dst = Side("vllm/fp8_ds_mla", (2, 1, 1, 4, 576), "bfloat16", 3, dst=True)
        found = report(src, dst, [2, 0], [1, 2])
        assert found == reported(src, dst, [2, 0], [1, 2]) and found.elements == 2 * 2 * 4 * 512


def test_batches_and_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some blocks at a time, and all that ids can be; no pair is no element."""
    src = Side("nhd", (2, 2, 2, 4, 32), "bfloat16", 7)
    dst = Side("record/nvfp4_tensors", (2, 2, 2, 4, 32), "bfloat16", 7, dst=True)
    want = reported(src, dst, range(7), range(7))
    assert report(src, dst, None, None) == want
    for most in (1, 3 * 4 * 1024 * 2, 1 << 30):
        monkeypatch.setattr("kvbm.copy.cast_report._BATCH_BYTES", most)
        for ids in (None, range(7), list(range(7)), np.arange(7)):
            assert kvbm.cast_report(src.pool, dst.pool, ids, ids, cast="amax") == want
    assert kvbm.cast_report(src.pool, dst.pool, [-1], [2], cast="amax") == kvbm.CastReport()
    assert kvbm.cast_report(src.pool, dst.pool, [], [], cast="amax") == kvbm.CastReport()
    for ids in ([7], [-2], [0.5]):
        with pytest.raises(kvbm.BindError):
            kvbm.cast_report(src.pool, dst.pool, ids, [0], cast="amax")
    with pytest.raises(kvbm.BindError):
        kvbm.cast_report(src.pool, dst.pool, [0, 1], [2, 2], cast="amax")


def halves(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """bfloat16 from 0.5 to 1."""
    return rng.integers(0x3F00, 0x3F80, shape)


def test_a_destination_that_is_not_this_cast_is_seen() -> None:
    """Blocks that were written since, or swapped, have errors far above those of the format."""
    src = Side("nhd", (2, 2, 2, 4, 32), "bfloat16", 3, make=halves)
    dst = Side("record/mxfp8_universal", (2, 2, 2, 4, 32), "bfloat16", 3, dst=True)
    assert report(src, dst, [0, 1, 2], [0, 1, 2]).largest_error <= 1 / 8
    assert kvbm.cast_report(src.pool, dst.pool, [0], [1], cast="amax").largest_error > 0.3
    zeros = Side("nhd", (2, 2, 2, 4, 32), "bfloat16", 3, make=lambda *given: np.zeros(given[2], np.uint32))
    found = kvbm.cast_report(zeros.pool, dst.pool, [0], [0], cast="amax")
    assert found.largest_error == found.mean_error == np.inf and found.groups_of_zeros == found.groups == 32
    dst.put(np.full_like(dst.before, 0xFF))
    assert kvbm.cast_report(src.pool, dst.pool, [0], [0], cast="amax").largest_error == np.inf


def test_what_is_refused() -> None:
    shape = (2, 2, 2, 4, 32)
    sides = {name: Side(name, shape, "bfloat16", 3).pool for name in ("nhd", "hnd", "record/nvfp4_tensors")}
    for src, dst, cast, words in (
        ("record/nvfp4_tensors", "nhd", "amax", f"expected a cast to one of {E4M3}, .* got {E2M1} to bfloat16; .*report the"),
        ("nhd", "hnd", "amax", "expected a cast to one of .*, got no cast"),
        ("nhd", "hnd", None, "expected a cast to one of .*, got no cast"),
        ("nhd", "record/nvfp4_tensors", "max", "cast: expected 'amax' or a kvbm.Scale, got 'max'"),
        ("nhd", "record/nvfp4_tensors", kvbm.Scale([1, 2, 3]), "for each of the 2 layers of the destination, got 3"),
    ):
        with pytest.raises(kvbm.PlanError, match=words):
            kvbm.cast_report(sides[src], sides[dst], [0], [0], cast=cast)
    with pytest.raises(kvbm.PlanError, match="float32"):
        kvbm.cast_report(sides["nhd"], Side("hnd", shape, "float32", 3).pool, [0], [0], cast=kvbm.Scale(1.0))
    with pytest.raises(kvbm.BindError, match=r"expected a kvbm.Pool or a section of one, got"):
        kvbm.cast_report(sides["nhd"], [], cast="amax")
    sides["hnd"].close()
    with pytest.raises(kvbm.BindError):
        kvbm.cast_report(sides["hnd"], sides["record/nvfp4_tensors"], cast="amax")


def test_codes_without_the_plane_of_their_scales() -> None:
    """Red: a section without the scales ended in a StopIteration."""
    shape = (2, 2, 2, 4, 32)
    src, dst = Side("nhd", shape, "bfloat16", 3, seed=4), Side("record/per_token_head_fp8_planes", shape, "bfloat16", 3, dst=True)
    codes, cast = dst.pool.section(planes="data"), kvbm.Scale(0.5)
    kvbm.convert(src.pool, codes, cast=cast)
    found = kvbm.cast_report(src.pool, codes, cast=cast)
    plain = Side("universal", shape, E4M3, 3, dst=True)
    kvbm.convert(src.pool, plain.pool, cast=cast)
    assert found == kvbm.cast_report(src.pool, plain.pool, cast=cast) and found.groups == 0 < found.elements


def test_planes_of_several_formats() -> None:
    plain = planar("[l] b t h o <>", plane("k", "", "d", "d", 32), plane("v", "", "e", "e", 64), scales=())
    own = planar(
        "[b] l h <>", plane("k", E4M3, "o t d", "d", 32), plane("ks", "float32", "t", shared="o"),
        plane("v", "int8", "o t e", "e", 64), scales=(("ks", "k"),),
    )  # fmt: skip
    src, dst = Side(plain, (2, 2, 2, 4, 32), "float16", 3), Side(own, (2, 2, 2, 4, 32), "float16", 4, dst=True)
    given = Given((0.5, 3.0), 0.25)
    assert report(src, dst, [2, 0], [1, 3], given) == reported(src, dst, [2, 0], [1, 3], given)


def tiny(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros, subnormals and the smallest normal numbers, by rows."""
    bits = {"float32": 23, "bfloat16": 7, "float16": 10}[dtype]
    found = rng.integers(0, 3 << bits, shape) | rng.integers(0, 2, shape) << casting.width(dtype) - 1
    found[rng.random(shape) < 0.3] = 0
    found[..., rng.random(shape[:-1]) < 0.3, :] &= (1 << bits) - 1
    return found


@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_a_thread_that_flushes_subnormals(torch: Any, dtype: str, scale: str | None) -> None:
    """Its report is that of any other thread, and its mode is as before.  Red: subnormals were zeros, and e8m0's 2**-127, too."""
    sizes = (1, 2, 2, 4, 64)
    layout: Any = "hnd"
    if scale:
        layout = planar("[b] l o h <>", plane("data", dtype, "t d", "d", 64), plane("scale", scale, "t s", "s", 4))
    for plain in PLAIN:
        given = 2.0**-100 if scale is None or scale == E4M3 else None
        src = Side("nhd", sizes, plain, 3, make=tiny)
        dst = Side(layout, sizes, "bfloat16" if scale else dtype, 3, dst=True)
        want = report(src, dst, [0, 2], [1, 2], given)
        with in_case(plain):
            assert want == reported(src, dst, [0, 2], [1, 2], given)
            if not torch.set_flush_denormal(True):
                pytest.skip("this CPU does not flush subnormals")
            try:
                found = kvbm.cast_report(src.pool, dst.pool, [0, 2], [1, 2], cast=casting.cast_of(given))
                assert torch.tensor([1e-39]).mul(0.5).item() == 0, "the mode was changed"
            finally:
                torch.set_flush_denormal(False)
            assert found == want


def test_default_arithmetic_is_that_of_its_thread_and_is_restored(torch: Any) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    small, quotients = np.full(100, 2.0**-126, np.float32), []

    def divide() -> None:
        quotients.append(float((small / np.float32(2)).max()))

    try:
        divide()
        with contextlib.suppress(ZeroDivisionError), _core.DefaultArithmetic():
            divide()
            with _core.DefaultArithmetic():
                divide()
            divide()
            raise ZeroDivisionError
        divide()
    finally:
        torch.set_flush_denormal(False)
    divide()
    assert quotients == [0, 2.0**-127, 2.0**-127, 2.0**-127, 0, 2.0**-127]


# ---- whatever a copy can cast ----------------------------------------------------------------------------------------

EXTENTS = {"l": 2, "o": 2, "h": 6, "t": 4, "d": 16}


def digits(rng: random.Random, axes: str, sizes: dict[str, int], last: str = "") -> str:
    """An order of axes, some of them in two pieces.  The axis `last` stays at the end, or its two neighbours do."""
    found = []
    for axis in axes:
        part = rng.choice([k for k in (2, 4, 8) if sizes[axis] > k and not sizes[axis] % k] or [0])
        found += [f"{axis}/{part}", f"{axis}%{part}"] if part and rng.random() < 0.6 else [axis]
    rng.shuffle(found)
    if last and rng.random() < 0.3:
        found.insert(rng.randrange(len(found) + 1), f"{last}/2")
        last += "%2"
    return " ".join([*found, *([last] if last else [])])


def quantised(orders: Any, scale_orders: Any, formats: tuple[str, str], shared: str, pieces: int) -> str:
    """A layout file.  Two orders are those of K and V."""

    def order(given: Any) -> str:
        text = given[0] if len(given) == 1 else f"{{k: {given[0]}, v: {given[1]}}}"
        return f"order: {text}, " if text else ""

    return (
        f'order: "[<data scale>] b{" o" if len(orders) > 1 else ""}"\n'
        + (f"axes: {{s: {pieces}}}\n" if pieces else "")
        + f"planes:\n  data: {{{order(orders)}dtype: {formats[0]}}}\n  scale: {{{order(scale_orders)}dtype: {formats[1]}, "
        + f"scales: data{f', shared: {shared}' if shared else ''}}}\n"
    )


def any_pools(rng: random.Random) -> list[list[kvbm.Pool]]:
    """Pools of values and of codes in any order, and such pools with the same values and groups in plain orders."""
    plain, dtype, pieces = rng.choice(PLAIN), rng.choice(QUANTISED), rng.choice([0, 2, 4, 8])
    sizes = {**EXTENTS, "s": pieces}
    formats = dtype, "float8_e8m0fnu" if dtype == E2M1 else rng.choice(["float32", "bfloat16", "float8_e8m0fnu"])
    shared = " ".join(axis for axis in "loht" if rng.random() < 0.35)
    halves = 2 if rng.random() < 0.3 and "o" not in shared else 1
    own = "".join(axis for axis in "loht" if axis not in shared) + ("s" if pieces else "")
    elements, scale_axes = ("lohtd", own) if halves == 1 else ("lhtd", own.replace("o", ""))
    data = [
        digits(rng, elements[:-1], sizes, "d") if dtype == E2M1 else digits(rng, elements, sizes) for _ in range(halves)
    ]
    mine = digits(rng, "lohtd", sizes).split()
    mine.insert(rng.choice([0, rng.randrange(len(mine) + 1)]), "b")
    texts = [
        [f'order: "{" ".join(mine)}"\n', quantised(data, [digits(rng, scale_axes, sizes) for _ in data], formats, shared, pieces)],
        ['order: "b l o h t d"\n', quantised(["l o h t d"], [" ".join(own)], formats, shared, pieces)],
    ]
    shape = kvbm.BlockShape(nl=2, no=2, nh=6, nt=4, hd=16, dtype=plain)
    pools = [[kvbm.Pool.allocate(spec.parse(text, name="own"), shape, 3) for text in pair] for pair in texts]
    bits = casting.values(np.random.default_rng(rng.randrange(1 << 30)), plain, pools[1][0].arrays[0].shape)
    pools[1][0].arrays[0].view(f"u{casting.width(plain) // 8}")[...] = bits
    kvbm.convert(pools[1][0], pools[0][0])
    return pools


def test_a_group_of_three_loops() -> None:
    """The elements of one scale are in another order on each side.  Red: "a cast of 4 loops inside a group"."""
    codes = (
        'order: "[o <data scale>] b"\nplanes:\n  data: {order: t l h d/5 d%5, dtype: int8}\n'
        "  scale: {dtype: float8_e8m0fnu, scales: data, shared: t l h}\n"
    )
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=8, hd=20, dtype="bfloat16")
    src = kvbm.Pool.allocate(spec.parse('order: "t b h d o l"\n', name="plain"), shape, 5)
    dst = kvbm.Pool.allocate(spec.parse(codes, name="codes"), shape, 2)
    src.arrays[0].view("u2")[...] = halves(np.random.default_rng(1), "bfloat16", src.arrays[0].shape)
    kvbm.convert(src, dst, [4], [1], cast="amax")
    found = kvbm.cast_report(src, dst, [4], [1], cast="amax")
    assert (found.elements, found.groups, found.groups_of_zeros) == (1920, 2, 0) and 0 < found.largest_error <= 1 / 127


@pytest.mark.slow  # 2.5 s
def test_what_convert_can_do_the_report_can() -> None:
    """Any orders, pieces of axes, groups and coordinates: the report is that of plain orders."""
    done = 0
    for seed in range(100):
        rng = random.Random(seed)
        pools: list[list[Any]] = list(any_pools(rng))
        ids: tuple[Any, Any] = ([2, -1, 0], [0, 2, 1])
        if rng.random() < 0.5:
            some = {axis: rng.sample(range(EXTENTS[axis]), rng.randint(1, EXTENTS[axis])) for axis in "lht"}
            free = some.keys() - shared_of(pools[0][1])
            pools = [[pool.section(**{axis: some[axis] for axis in free}) for pool in pair] for pair in pools]
        found = []
        with in_case(seed, *(pool for pair in pools for pool in pair)):
            for src, dst in pools:
                with contextlib.suppress(kvbm.MissingKernelError):
                    kvbm.convert(src, dst, *ids, cast="amax")
                    found.append((src, dst))
            found = [kvbm.cast_report(src, dst, *ids, cast="amax") for src, dst in found]
            if len(found) == 2:
                mean = pytest.approx(found[1].mean_error, rel=1e-9)
                assert dataclasses.replace(found[1], mean_error=mean) == found[0]
                assert found[0].elements and found[0].groups
                done += 1
    assert done > 30


def shared_of(pool: kvbm.Pool) -> set[str]:
    """Axes along which all elements of a pool share a scale."""
    return set(EXTENTS) - {axis for access in pool.whole.of.accesses if access.plane == "scale" for axis, _ in access.sizes}
