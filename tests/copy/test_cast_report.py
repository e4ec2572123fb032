"""`kvbm.cast_report`: the counts and errors of the oracle, for every format, from what the pools hold."""

from __future__ import annotations

import itertools
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
