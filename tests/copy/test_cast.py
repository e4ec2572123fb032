"""Copies that cast, between layouts of all kinds: bit for bit, guards, padding, other blocks and the source included."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cast_oracle
import casting
import kvbm
import oracle
import plane_oracle
import processes
from cast_oracle import PLAIN
from casting import Own, Part, Planar, Side, Sizes, convert_and_check, expected, planar, plane
from coordinates import in_case
from few import few
from kvbm import _core
from kvbm.compile import prepare
from kvbm.copy.executor import Executor
from kvbm.digest import cells
from kvbm.layout import spec
from kvbm.planner import lowering
from kvbm.planner.cast import AMAX
from kvbm.planner.plan import between_layers
from plane_oracle import TABLE

E4M3, E5M2, E2M1, E8M0 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"
#: Formats of elements and of their scales for which kernels are built; None: a scale of the caller.
FORMATS: tuple[tuple[str, str | None], ...] = (
    (E4M3, "float32"),
    (E4M3, E8M0),
    (E5M2, "float32"),
    ("int8", "float32"),
    (E2M1, E4M3),
    (E2M1, E8M0),
    (E4M3, None),
    (E5M2, None),
    ("int8", None),
)

SIZES = (2, 2, 3, 4, 64)
NAMES = sorted(name for name in TABLE if casting.scales_of(name))


# ---- every shipped layout with scales --------------------------------------------------------------------------------


def padded(by: int, order: str = "[b] l o t h d", word: str = "h") -> Any:
    return lambda sizes, dtype: Own(order, pitch=((word, sizes[4] * oracle.ITEMSIZE[dtype] + by),))


#: Plain layouts for K and V of heads: shipped ones, with pitches, with tables by block, with d not the fastest axis.
PLAINS: tuple[Any, ...] = (
    "nhd",
    "hnd",
    "universal",
    "operational_nhd",
    "vllm/flash_attn_nhd",
    "vllm/LBHNC",
    "hf/dynamic_cache",
    padded(16),
    padded(3),
    padded(4, "b l o h t d", "t"),
    Own("[b l o] t h d"),
    Own("[b] o h l t d"),
    Own("[l o] b h d t"),
    Own("[b] l d o t h"),
    Own("d [b] l o t h".replace("d [b]", "[b] d")),
    Own("[l] b t d o h"),
    Own("[b] l o h d/4 t d%4"),
    Own("[b h] l o d/8 t d%8"),
    Own("[l o] b h d/8 t d%8", "[l o] b h d t"),
)

#: Plain layouts for latents: latent and rope.
LATENTS: tuple[Any, ...] = (
    "record/mla_joined",
    "flashinfer/mla_split",
    planar("[l] b <>", plane("latent", "", "c t", "c", 512), plane("rope", "", "t r", "r", 64), scales=()),
    planar(
        "[b] <>",
        plane("latent", "", "l t c/8 c%8|l t c/8 c%8", "c", 512),
        plane("rope", "", "r t l", "r", 64),
        scales=(),
    ),
    planar("[<> b l] t", plane("latent", "", "c", "c", 512), plane("rope", "", "r", "r", 64), scales=()),
)


def sizes_of(name: str) -> tuple[Sizes, ...]:
    """Sizes of a block for a layout of the catalogue: 1, 2, 3 and 16 tokens, 1 and 3 heads, heads of all widths that it takes."""
    family = TABLE[name].family
    wide = {"fp8": 576, "nvfp4_mla": 576, "v41": 512, "dsa": 128, "dsa_mxfp4": 128}.get(family)
    if wide:
        return tuple((nl, 1, 1, nt, wide) for nl, nt in ((2, 3), (1, 16), (3, 1), (1, 2)))
    if name == "sglang/mxfp8":
        return ((1, 2, 1, 128, 128), (2, 1, 1, 128, 128))
    if name == "vllm/nvfp4":
        return ((2, 2, 3, 4, 64), (1, 2, 1, 16, 128), (1, 2, 2, 8, 192))
    if family in ("nvfp4", "mxfp8"):
        least = 16 if family == "nvfp4" else 32
        return (
            (2, 2, 3, 3, 64),
            (1, 2, 1, 16, 128),
            (2, 2, 3, 1, least),
            (1, 2, 1, 2, 96),
            (1, 1 + (family == "nvfp4"), 3, 2, 576),
        )
    return (
        (2, 2, 3, 3, 64),
        (1, 2, 1, 16, 128),
        (1, 1, 3, 1, 16),
        (1, 2, 1, 2, 96),
        (2, 2, 3, 2, 7),
        (1, 1, 1, 1, 576),
        (1, 2, 3, 4, 32),
    )


def plains_of(name: str) -> tuple[Any, ...]:
    return LATENTS if TABLE[name].family in ("fp8", "nvfp4_mla") else PLAINS


IDS = (([4, 0, 2], [5, 1, 0]), ([1, -1, 3, 0], [0, 2, -1, 6]), ([2], [3]), ([0, 1, 2, 3, 4], [6, 5, 4, 3, 2]))
WAYS = ("steps", "rows", "scattered")
#: Bases modulo 64.  Arrays of plain layouts may lie at odd addresses, too: nothing that makes tensors, but views of bytes.
ALIGNS = (0, 1, 4, 2, 16, 8)


def plain_of(given: Any, sizes: Sizes, dtype: str) -> Any:
    """The layout at these sizes; None if they do not fit."""
    made = given(sizes, dtype) if callable(given) else given
    words = made.k if isinstance(made, Own) else ""
    if any(f"d/{n}" in words and sizes[4] % n for n in (4, 8)):
        return None
    return made


def matrix_of(name: str, spread: int = 1) -> Iterator[tuple[Any, ...]]:
    """Cases: (plain layout, its dtype, sizes, quantises, scale of the caller, number)."""
    shapes = sizes_of(name)
    spread *= 3 if name == "sglang/mxfp8" else 1  # its blocks are large
    for number, (given, quantises) in enumerate(itertools.product(plains_of(name), (True, False))):
        if number % spread:
            continue
        first = number // 2 + number % 2 + len(name)
        for turn in range(1 if len(plains_of(name)) > 6 else 3):
            dtype = PLAIN[(first + turn) % 3]
            fit = [(sizes, plain_of(given, sizes, dtype)) for sizes in shapes]
            fit = [(sizes, made) for sizes, made in fit if made is not None]
            sizes, made = fit[(first + turn + number % 2) % len(fit)]
            scale = None
            if name.endswith(("nvfp4_ds_mla", "nvfp4_mla_planes")) or (
                TABLE[name].family == "fp8" and dtype != "bfloat16"
            ):
                scale = (1.0, 0.37)[number // 2 % 2]  # the other planes have no scales
            elif number % 3 == 0 and casting.multiplies(name):
                scale = (0.0271, 2.0**-100, 3e5, 2.0**100)[number // 3 % 4]
            yield made, dtype, sizes, quantises, scale, number + turn


def sides_of(name: str, case: tuple[Any, ...], **where: Any) -> tuple[Side, Side]:
    made, dtype, sizes, quantises, _, number = case
    both = [(made, dtype), (name, "bfloat16")]
    (src, src_type), (dst, dst_type) = both if quantises else both[::-1]
    a = Side(
        src, sizes, src_type, 5, align=ALIGNS[number % 6], how=WAYS[number % 3], seed=number, **where.get("src", {})
    )
    b = Side(
        dst,
        sizes,
        dst_type,
        7,
        dst=True,
        align=ALIGNS[number // 2 % 6],
        how=WAYS[number // 3 % 3],
        **where.get("dst", {}),
    )
    return a, b


@pytest.mark.parametrize("turn", few(range(2), 1))
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_layout(name: str, turn: int) -> None:
    """To and from plain layouts of all kinds, dtypes and sizes, at odd addresses; some pairs are skipped."""
    for case in list(matrix_of(name))[turn::2]:
        with in_case(name, case):
            src, dst = sides_of(name, case)
            ids = IDS[case[5] % 4]
            convert_and_check(src, dst, *ids, case[4])


def test_the_shipped_layouts_declare_their_scales() -> None:
    assert {name: {data: scale for scale, data in kvbm.load(name).scales.items()} for name in TABLE} == {
        name: casting.scales_of(name) for name in TABLE
    }
    assert len(NAMES) == 23


# ---- every kernel ----------------------------------------------------------------------------------------------------


def scaled(dtype: str, scale: str | None, sizes: Sizes, order: str = "t d") -> Any:
    """A layout of heads with groups of 16 or 32 elements; without scales a plain layout in that dtype."""
    if scale is None:
        return Own(f"[b] l o h {order}")
    group = min(sizes[4], 16 if scale == E4M3 else 32)
    s = sizes[4] // group
    return planar("[b] l o h <>", plane("data", dtype, order, "d", sizes[4]), plane("scale", scale, "t s", "s", s))


def kernels(made: Any) -> set[str]:
    return {name for name in made.kernels() if name.startswith("cast_")}


@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_every_code_by_every_kernel(dtype: str, scale: str | None) -> None:
    """All 65,536 codes of 16 bits in groups in order and in random order; all codes and scales of quantised values."""
    sizes = (1, 1, 1, 16, 128)
    used = set()
    for plain, order, given in itertools.product(PLAIN, ("t d", "d t"), (None, 0.0416)):
        if given is not None and (scale != E4M3 if scale else False):
            continue
        given = given if scale or given else 1.0
        theirs = scaled(dtype, scale, sizes)
        for quantises, make in ((True, casting.every(plain)), (True, casting.shuffled), (False, None)):
            if order == "d t" and make is not casting.shuffled and quantises:
                continue
            whole = (
                order == "t d"
                and quantises
                and plain != "float32"
                and (plain == "bfloat16" or make is casting.shuffled)
            )
            blocks = 32 if whole else 5
            both: Any = [(Own(f"[b] l o h {order}"), plain), (theirs, "bfloat16" if scale else dtype)]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            src = Side(a, sizes, a_type, blocks, make=make, seed=blocks)
            dst = Side(b, sizes, b_type, blocks, dst=True)
            with in_case(plain, order, given, quantises):
                convert_and_check(src, dst, range(blocks), range(blocks), given)
            used |= kernels_of(src, dst, given)
    assert len(used) == 8, used  # contiguous: three plain formats in two directions; by elements: two directions


def kernels_of(src: Side, dst: Side, given: float | None) -> set[str]:
    """Names of the kernels of a cast."""
    text = kvbm.Transfer(src.given, dst.given, cast=casting.cast_of(given)).explain(4)
    return {word.strip(",.;:()") for word in text.split() if word.startswith("cast_")}


@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_to_plain(dtype: str) -> None:
    """IEEE arithmetic: every code of 16 bits, subnormals, overflow to inf, one NaN."""
    sizes = (1, 1, 1, 16, 128)
    used = set()
    for other, order, given in itertools.product(PLAIN, ("t d", "d t"), (1.0, 0.37, 3e-9, 2.0**100, 2.0**-100)):
        if other == dtype:
            continue
        for make in (casting.every(dtype), casting.values) if order == "t d" else (casting.values,):
            blocks = 32 if make is not casting.values and given in (1.0, 0.37) else 5
            src = Side(Own("[b] l o h t d"), sizes, dtype, blocks, make=make)
            dst = Side(Own(f"[b] l o h {order}"), sizes, other, blocks, dst=True)
            with in_case(other, order, given):
                convert_and_check(src, dst, range(blocks), range(blocks), given)
        used |= kernels_of(src, dst, given)
    assert len(used) == 3, used


# ---- layouts of one's own --------------------------------------------------------------------------------------------


def owns() -> list[tuple[str, Planar, Sizes]]:
    """Layouts that no engine has: (what is special, layout, sizes)."""
    return [
        (
            "a scale per block",
            planar("[b] <>", plane("data", E4M3, "l o h t d", "d", 32), plane("scale", "float32", "l o h", shared="t")),
            (2, 2, 3, 4, 32),
        ),
        (
            "a scale per block and layer",
            planar("[l] b <>", plane("data", "int8", "o t h d", "d", 24), plane("scale", "float32", "o", shared="h t")),
            (3, 2, 2, 3, 24),
        ),
        (
            "a scale for all of K",
            planar("[l b] <>", plane("data", E5M2, "o t h d", "d", 16), plane("scale", "float32", "o", shared="h t")),
            (3, 2, 3, 2, 16),
        ),
        (
            "one for a whole block",
            planar("b <>", plane("data", E4M3, "l o h t d", "d", 16), plane("scale", "float32", "o", shared="l h t")),
            (2, 1, 3, 2, 16),
        ),
        (
            "groups along d of e5m2",
            planar("[b] l o t <>", plane("data", E5M2, "h d", "d", 64), plane("scale", "float32", "h s", "s", 4)),
            (2, 2, 3, 3, 64),
        ),
        (
            "int8, groups of 32",
            planar("[l o] b t <>", plane("data", "int8", "h d", "d", 96), plane("scale", "float32", "s h", "s", 3)),
            (2, 2, 3, 2, 96),
        ),
        (
            "scales first",
            planar("[b] l o h <>", plane("scale", "float32", "t"), plane("data", E4M3, "t d", "d", 20)),
            (2, 2, 3, 3, 20),
        ),
        (
            "scales first, odd",
            planar("[l] b t h o <>", plane("scale", E8M0, "s", "s", 1), plane("data", E2M1, "d", "d", 6)),
            (2, 2, 3, 3, 6),
        ),
        (
            "packed along d",
            planar("[b] l o h <>", plane("data", E2M1, "t d", "d", 64), plane("scale", E4M3, "t s", "s", 4)),
            (2, 2, 3, 3, 64),
        ),
        (
            "d split and packed",
            planar("[l] b o h <>", plane("data", E2M1, "d/16 t d%16", "d", 64), plane("scale", E8M0, "s t", "s", 2)),
            (2, 2, 1, 3, 64),
        ),
        (
            "groups over tokens and d",
            planar("[l] b o h <>", plane("data", E4M3, "t d", "d", 64), plane("scale", E8M0, "s", "s", 2, shared="t")),
            (2, 2, 3, 4, 64),
        ),
        (
            "groups over heads and d",
            planar(
                "[l] b o <>",
                plane("data", "int8", "t h d", "d", 48),
                plane("scale", "float32", "t s", "s", 3, shared="h"),
            ),
            (2, 2, 3, 2, 48),
        ),
        (
            "K and V differ",
            planar("[b] l o <>", plane("data", E4M3, "h t d|t h d", "d", 32), plane("scale", "float32", "h t|t h")),
            (2, 2, 3, 2, 32),
        ),
        (
            "only scales differ",
            planar("[b] l o <>", plane("data", E2M1, "h t d", "d", 32), plane("scale", E4M3, "h t s|s t h", "s", 2)),
            (2, 2, 3, 2, 32),
        ),
        (
            "arrays apart",
            planar("[<> b l] o", plane("data", E5M2, "h t d", "d", 40), plane("scale", "float32", "t h")),
            (2, 2, 3, 5, 40),
        ),
        (
            "d is the slowest",
            planar("[b] <>", plane("data", E4M3, "d l o h t", "d", 32), plane("scale", E8M0, "t s h o l", "s", 1)),
            (2, 2, 2, 3, 32),
        ),
        (
            "pitches",
            planar(
                "[l] b o h <>",
                plane("data", E4M3, "t d", "d", 32, pitch=(("t", 40),)),
                plane("scale", "float32", "t s", "s", 2, pitch=(("t", 12),)),
                pitch=(("h", 333),),
            ),
            (2, 2, 3, 3, 32),
        ),
        (
            "a group of one",
            planar("[b] l o h <>", plane("data", "int8", "t d", "d", 8), plane("scale", "float32", "t s", "s", 8)),
            (1, 2, 2, 3, 8),
        ),
        (
            "a large group",
            planar("[b] l o h <>", plane("data", E4M3, "t d", "d", 576), plane("scale", "float32", "t")),
            (1, 1, 3, 2, 576),
        ),
        (
            "a group of 4096",
            planar("[b] l o <>", plane("data", "int8", "t h d", "d", 128), plane("scale", "float32", "", shared="h t")),
            (1, 2, 2, 16, 128),
        ),
        (
            "odd tokens of two heads",  # the second item of a thread lies before its first, where heads are slower than tokens
            planar("[b] l o <>", plane("data", "int8", "t h d", "d", 64), plane("scale", "float32", "", shared="h t")),
            (1, 2, 2, 3, 64),
        ),
    ]


OWNS = owns()


def are_apart(plain: Any, layout: Planar) -> bool:
    """Whether a plain layout has the elements of one scale in several allocations: refused."""
    order = plain.k if isinstance(plain, Own) else casting.matrix.orders()[plain].k
    return any(axis in order.partition("]")[0] for axis in shared_axes(layout) if "[" in order)


def shared_axes(layout: Planar) -> tuple[str, ...]:
    """Axes along which all elements share a scale."""
    return next(one for one in layout.drawn.planes if one.name == "scale").shared


def test_groups_in_several_allocations_are_refused() -> None:
    layout, sizes = OWNS[1][1], OWNS[1][2]
    src, dst = Side(Own("[b h] l o t d"), sizes, "bfloat16", 3), Side(layout, sizes, "bfloat16", 3, dst=True)
    for one, other in ((src, dst), (dst, src)):
        with pytest.raises(kvbm.PlanError, match="the elements of one scale lie in several allocations"):
            kvbm.convert(one.pool, other.pool, cast="amax")
    assert src.untouched and dst.untouched


@pytest.mark.parametrize("number", range(len(OWNS)), ids=[what for what, _, _ in OWNS])
def test_own_layouts(number: int) -> None:
    _, layout, sizes = OWNS[number]
    done = 0
    packs = any(one.dtype == E2M1 for one in layout.drawn.planes)
    others = [other for k, other in enumerate(PLAINS) if (k + number) % 3 == 0 or k == 12]
    for turn, (other, quantises) in enumerate(itertools.product(others, (True, False))):
        dtype = PLAIN[(turn + number) % 3]
        made = plain_of(other, sizes, dtype)
        if made is None or (packs and isinstance(made, Own) and "d/" in made.k and sizes[4] % 8):
            continue
        scale = 0.61 if turn % 4 == 1 and casting.multiplies(layout) else None
        if are_apart(made, layout):
            continue
        with in_case(OWNS[number][0], made, dtype, quantises, scale):
            both: Any = [(made, dtype), (layout, "bfloat16")]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            src = Side(a, sizes, a_type, 5, align=ALIGNS[turn % 6], how=WAYS[turn % 3], seed=turn)
            dst = Side(b, sizes, b_type, 7, dst=True, align=ALIGNS[turn // 2 % 6], how=WAYS[turn // 3 % 3])
            try:
                convert_and_check(src, dst, *IDS[turn % 4], scale)
                done += 1
            except kvbm.MissingKernelError as error:  # a whole block in four loops
                assert "4 loops inside a group" in str(error) and len(shared_axes(layout)) == 3 and dst.untouched
    assert done >= 2, done


@pytest.mark.parametrize("given", [None, 0.3])
def test_k_and_v_as_planes_with_scales_of_their_own(given: float | None) -> None:
    """Two planes are cast in one copy, also into two formats; one of them may have no scales if the caller gives one."""
    sizes = (2, 1, 3, 4, 64)
    plain = planar("[l] b t h <>", plane("k", "", "d", "d", 64), plane("v", "", "e", "e", 32), scales=())
    k, v = ("t d", "d", 64), ("t e", "e", 32)
    scales = plane("ks", E4M3, "t s", "s", 4), plane("vs", "float32", "t")
    layouts = [
        planar("[b] l h <>", plane("k", E2M1, *k), plane("v", "int8", *v), *scales, scales=(("ks", "k"), ("vs", "v"))),
        planar("[<> b] l h", plane("k", E2M1, *k), *scales, plane("v", E4M3, *v), scales=(("vs", "v"), ("ks", "k"))),
    ]
    if given:
        layouts.append(
            planar("[b] l h <>", plane("k", E2M1, *k), scales[0], plane("v", E5M2, *v), scales=(("ks", "k"),))
        )
    for layout, dtype in itertools.product(layouts, PLAIN):
        for a, b in ((plain, layout), (layout, plain)):
            with in_case(layout, dtype, given):
                src, dst = Side(a, sizes, dtype, 3), Side(b, sizes, dtype, 4, dst=True)
                convert_and_check(src, dst, [2, -1, 0], [1, 2, 3], given)


def test_a_scale_for_k_and_v_together() -> None:
    """A group over both; refused if they have different orders on the other side, never cut in two."""
    layout = planar("[b] <>", plane("data", E4M3, "l o h t d", "d", 64), plane("scale", "float32", "l h t", shared="o"))
    for other in (Own("[b] o l h t d"), Own("[l b] o h t d"), "universal"):
        for a, b in ((other, layout), (layout, other)):
            src, dst = Side(a, SIZES, "bfloat16", 3), Side(b, SIZES, "bfloat16", 4, dst=True)
            convert_and_check(src, dst, [2, 0], [1, 3])
    for other in ("vllm/paged_attn_v0", Own("[b] l o h t d", "[b] l o t h d"), "nhd"):
        for a, b in ((other, layout), (layout, other)):
            src, dst = Side(a, SIZES, "bfloat16", 3), Side(b, SIZES, "bfloat16", 4, dst=True)
            with pytest.raises(kvbm.PlanError, match=r"K and V share scales and have different orders|in several allocations"):
                kvbm.convert(src.pool, dst.pool, [2, 0], [1, 3], cast="amax")
            assert dst.untouched


def test_packed_along_tokens() -> None:
    """Two tokens share a byte: possible if a group has all tokens, refused if it has one."""
    data = plane("data", E2M1, "d t", "d", 64)
    whole = planar("[b] l o h <>", data, plane("scale", E4M3, "", shared="t"))
    for other in ("nhd", "vllm/LBHNC", Own("[l o] b h d t")):
        for a, b in ((other, whole), (whole, other)):
            src, dst = Side(a, SIZES, "bfloat16", 3), Side(b, SIZES, "bfloat16", 4, dst=True)
            convert_and_check(src, dst, [2, 0], [1, 3])
    one = planar("[b] l o h <>", data, plane("scale", E4M3, "t s", "s", 4))
    for a, b in (("nhd", one), (one, "nhd")):
        src, dst = Side(a, SIZES, "bfloat16", 3), Side(b, SIZES, "bfloat16", 4, dst=True)
        with pytest.raises(kvbm.PlanError, match="that share a byte must be neighbours in one group"):
            kvbm.convert(src.pool, dst.pool, [2, 0], [1, 3], cast="amax")
        assert dst.untouched


def test_one_huge_value_and_zeros_in_groups() -> None:
    """One value decides the scale of its group, at each place; a group of zeros has the scale 1."""

    def make(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal((int(np.prod(shape)) // 64, 64))
        for k in range(64):
            x[k, k] = 3e4 * (-1) ** k
        x[70:80] = 0
        x[75:80, ::2] = -0.0
        return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).reshape(shape)

    sizes = (1, 2, 3, 16, 64)
    for name in ("vllm/per_token_head_fp8", "vllm/per_token_head_int8", "record/nvfp4_tensors", "record/mxfp8_tensors"):
        src, dst = Side("nhd", sizes, "bfloat16", 2, make=make), Side(name, sizes, "bfloat16", 2, dst=True)
        convert_and_check(src, dst, [0, 1], [1, 0], what=name)
        scales = dst.read(dst.after, "scale", dst.elements("scale", [0, 1]))
        one = {"float32": 0x3F800000, E4M3: 0x38, E8M0: 127}[dst.planes["scale"].dtype]
        assert (scales == one).any()


@pytest.mark.parametrize("dtype", [E4M3, "float8_e5m2"])
@pytest.mark.parametrize("depth", [9, 13, 14, 27, 29, 40])
def test_groups_by_the_mantissa_of_their_largest_element(dtype: str, depth: int) -> None:
    """Rows with each mantissa of the largest element: it chooses a table on CPUs with AVX-512.

    The others have all mantissas, and exponents that are less by 9 at most, in one row of eight by `depth`.  Where codes may
    be subnormal no table is used.
    """

    def make(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        del dtype
        codes = np.tile(np.arange(128, dtype=np.uint32), (1024, 1))
        rows = np.arange(1024)[:, None]
        less = rng.integers(1, np.where(rows % 8 < 7, 1 + min(depth, 9), 1 + depth), codes.shape)
        exponents = (60 + rows // 128 * 20 - less).astype(np.uint32)
        codes = rng.permuted(codes | exponents << np.uint32(7), axis=1)
        codes[:, 5] = ((60 + rows // 128 * 20) << 7 | rows % 128)[:, 0]
        codes[1000:1010, 7], codes[1010:1015] = 0, 0
        return (codes | rng.integers(0, 2, codes.shape, np.uint32) << np.uint32(15)).reshape(shape)

    sizes = (1, 2, 4, 128, 128)
    theirs = planar("[b] l o h <>", plane("data", dtype, "t d", "d", 128), plane("scale", "float32", "t"))
    src, dst = Side(Own("[b] l o h t d"), sizes, "bfloat16", 1, make=make, seed=depth), Side(theirs, sizes, "bfloat16", 1, dst=True)
    convert_and_check(src, dst, [0], [0])


# ---- parts of pools --------------------------------------------------------------------------------------------------

PARTS: tuple[tuple[Part, Part], ...] = (
    (Part((("l", (2, 0)),)), Part((("l", (1, 2)),))),
    (Part((("h", (1, 2)),)), Part((("h", (2, 0)),))),
    (Part((("t", (2, 3, 4, 5)),)), Part((("t", (0, 1, 2, 3)),))),
    (Part((("o", (1,)),)), Part((("o", (0,)),))),
    (Part(tokens=4), Part(tokens=4)),
    (Part((("h", (1,)), ("l", (0, 1))), 2), Part((("l", (1, 2)), ("h", (0,))), 2)),
    (Part((("t", (1, 3, 5, 7)), ("h", (0, 2)))), Part((("h", (1, 2)), ("t", (7, 6, 1, 0))))),
)


@pytest.mark.parametrize(
    "name",
    [
        "vllm/per_token_head_fp8",
        "record/per_token_head_int8_planes",
        "record/nvfp4_tensors",
        "vllm/nvfp4",
        "vllm/nvfp4_sm120",
        "record/mxfp8_universal",
        "record/nvfp4_universal",
    ],
)
def test_parts(name: str) -> None:
    """Layers, heads, tokens, K or V, and units: only these elements change, each group with its scale."""
    sizes = (3, 2, 3, 8, 64)
    for number, ((mine, theirs), quantises, plain) in enumerate(
        itertools.product(PARTS, (True, False), ("nhd", "vllm/LBHNC"))
    ):
        tokens = max(mine.tokens, 0)
        if name == "vllm/nvfp4" and (tokens == 2 or any(axis == "t" for axis, _ in mine.chosen)):
            continue  # four tokens are interleaved
        dtype = PLAIN[number % 3]
        both: Any = [(plain, dtype), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        with in_case(mine, theirs, quantises, plain, dtype):
            src = Side(a, sizes, a_type, 3, part=mine, align=ALIGNS[number % 6], seed=number)
            dst = Side(b, sizes, b_type, 4, dst=True, part=theirs, align=ALIGNS[number % 5])
            ids = ([2, -1, 0], [1, 2, 3]) if not tokens else ([5, 0, -1, 2], [0, 7, 1, 6])
            convert_and_check(src, dst, *ids)


def test_blocks_of_different_sizes() -> None:
    """Units of larger blocks to smaller blocks."""
    for quantises in (True, False):
        for name in ("record/nvfp4_tensors", "vllm/per_token_head_int8"):
            both: Any = [("nhd", "bfloat16"), (name, "bfloat16")]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            src = Side(a, (2, 2, 3, 8, 32), a_type, 3, part=Part(tokens=4))
            dst = Side(b, (2, 2, 3, 4, 32), b_type, 7, dst=True)
            convert_and_check(src, dst, [5, 0, 3, 2], [1, 6, 2, 0], what=name)


@pytest.mark.parametrize(
    "name",
    ["vllm/nvfp4", "vllm/fp8_ds_mla", "vllm/per_token_head_int8", "record/mla_v41_tokens", "record/mxfp8_tensors"],
)
def test_layers(name: str) -> None:
    """Ranges of layers, also between pools with different numbers of layers."""
    base = sizes_of(name)[0]
    for number, (plain, quantises) in enumerate(itertools.product(plains_of(name)[:4], (True, False))):
        for one, other, layers in (
            (4, 4, (range(1, 3), range(1, 3))),
            (4, 2, (range(2, 4), range(2))),
            (2, 4, (range(1, 2), range(3, 4))),
        ):
            both: Any = [(plain, "bfloat16"), (name, "bfloat16")]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            with in_case(plain, quantises, layers):
                src = Side(a, (one, *base[1:]), a_type, 4, seed=number)
                dst = Side(b, (other, *base[1:]), b_type, 5, dst=True)
                want = expected(src, dst, [3, 0], [1, 4], None, layers)
                kvbm.Transfer(src.given, dst.given, cast="amax").copy([3, 0], [1, 4], layers=layers)
                casting.check(src, dst, want)


# ---- what it does not depend on --------------------------------------------------------------------------------------


def test_layouts_of_one_content() -> None:
    """The same values in other layouts have the same codes, scales and values."""
    families: dict[str, list[str]] = {}
    for name in NAMES:
        families.setdefault(TABLE[name].family, []).append(name)
    for names in families.values():
        sizes = sizes_of(max(names, key=lambda name: name in ("sglang/mxfp8", "vllm/nvfp4")))[0]
        plains = plains_of(names[0])[:2]
        first = Side(plains[0], sizes, "bfloat16", 3)
        second = Side(plains[1], sizes, "bfloat16", 3, dst=True)
        kvbm.convert(first.pool, second.pool, [0, 1, 2], [2, 0, 1])
        seen, values = set(), set()
        for name, (src, ids) in itertools.product(names, ((first, [0, 1, 2]), (second, [2, 0, 1]))):
            dst = Side(name, sizes, "bfloat16", 3, dst=True)
            kvbm.convert(src.pool, dst.pool, ids, [1, 2, 0], cast=kvbm.Scale(1.0))
            planes = sorted(dst.planes)
            seen.add(b"".join(canonical(dst, one, [1, 2, 0]) for one in planes))
            back = Side(plains[0], sizes, "bfloat16", 3, dst=True)
            kvbm.convert(dst.pool, back.pool, [1, 2, 0], [0, 1, 2], cast=kvbm.Scale(1.0))
            values.add(b"".join(canonical(back, one, [0, 1, 2]) for one in sorted(back.planes)))
        assert len(seen) == len(values) == 1, names


def canonical(side: Side, name: str, ids: Any) -> bytes:
    """The codes of a plane in the order of its axes' names."""
    axes = [*side.planes[name].extents]
    at = side.elements(name, ids)
    found = side.read(side.after, name, at)
    return found.transpose([0, *(1 + axes.index(axis) for axis in sorted(axes))]).tobytes()


def test_parts_are_the_whole() -> None:
    """Layer by layer, head by head, token by token, or at once."""
    sizes = (2, 2, 3, 4, 64)
    for name in ("record/nvfp4_universal", "vllm/per_token_head_fp8"):
        for quantises in (True, False):
            both: Any = [("hnd", "float16"), (name, "bfloat16")]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            src, whole, cut = (
                Side(a, sizes, a_type, 2),
                Side(b, sizes, b_type, 2, dst=True),
                Side(b, sizes, b_type, 2, dst=True),
            )
            convert_and_check(src, whole, [0, 1], [1, 0])
            for l, o, h, t in itertools.product(range(2), range(2), range(3), (range(1), range(1, 4))):  # noqa: E741
                some = {"l": l, "o": o, "h": h, "t": t}
                kvbm.convert(src.pool.section(**some), cut.pool.section(**some), [0, 1], [1, 0], cast="amax")
            assert np.array_equal(whole.after, cut.after), name


@pytest.mark.threads
def test_numbers_of_threads() -> None:
    """Each launch by one thread, by three, and by more than there are cores."""
    sizes = (2, 2, 3, 16, 64)
    for name, quantises in itertools.product(("vllm/nvfp4", "vllm/per_token_head_int8"), (True, False)):
        both: Any = [("nhd", "bfloat16"), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = Side(a, sizes, a_type, 30), Side(b, sizes, b_type, 30, dst=True)
        ids = np.arange(30), np.arange(30)[::-1].copy()
        want = expected(src, dst, *ids)
        section = (src.pool.whole.of, dst.pool.whole.of)
        made = between_layers(*section, "cast", None, AMAX)
        for threads in (1, 3, 7):
            dst.put(dst.before)
            for copy in prepare.prepare(made, src.pool.alignment, dst.pool.alignment):
                tables = _core.Table(src.pool.addresses), _core.Table(dst.pool.addresses)
                copy.run(*tables, _core.Pairs(*ids, 30, 30), threads)
            casting.check(src, dst, want, threads)


def test_flushed_subnormals(torch: Any) -> None:
    """A program that flushes subnormals to zero gets the same bits, and its mode is as before."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    try:
        tiny = torch.tensor([1e-39]).mul(0.5)
        assert tiny.item() == 0, "the test does not flush anything"
        sides = []
        for name, plain in (
            ("vllm/per_token_head_fp8", "float32"),
            ("record/nvfp4_tensors", "bfloat16"),
            ("record/mxfp8_tensors", "float16"),
        ):
            for quantises in (True, False):
                both: Any = [("nhd", plain), (name, "bfloat16")]
                (a, a_type), (b, b_type) = both if quantises else both[::-1]
                src, dst = Side(a, (2, 2, 3, 3, 64), a_type, 3), Side(b, (2, 2, 3, 3, 64), b_type, 3, dst=True)
                kvbm.convert(src.pool, dst.pool, cast="amax")
                sides.append((src, dst))
        assert torch.tensor([1e-39]).mul(0.5).item() == 0, "the mode was changed"
    finally:
        torch.set_flush_denormal(False)
    for src, dst in sides:
        casting.check(src, dst, expected(src, dst, range(3), range(3)), src.meant)


@pytest.mark.threads
def test_two_threads_with_one_transfer() -> None:
    sizes = (2, 2, 3, 8, 64)
    for name, quantises in itertools.product(("record/nvfp4_tensors", "vllm/per_token_head_int8"), (True, False)):
        both: Any = [("nhd", "bfloat16"), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = Side(a, sizes, a_type, 20), Side(b, sizes, b_type, 20, dst=True)
        want = expected(src, dst, range(20), range(20))
        move = kvbm.Transfer(src.pool, dst.pool, cast="amax")
        start, errors = threading.Barrier(2), []

        def copy(mine: list[int], start: Any = start, move: Any = move, errors: Any = errors) -> None:
            try:
                start.wait()
                for _ in range(10):
                    move.copy(mine, mine)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=copy, args=(list(range(k, 20, 2)),)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        casting.check(src, dst, want, name)


@pytest.mark.slow  # 0.8 s
@pytest.mark.sanitize
def test_scales_that_change_with_each_call_do_not_pile_up() -> None:
    """A scale computed from each batch is a new one each time: what `convert` keeps for a pair of pools stays bounded."""
    src, dst = Side("nhd", (1, 2, 1, 2, 16), "bfloat16", 2), Side("hnd", (1, 2, 1, 2, 16), "int8", 2, dst=True)

    def convert(count: int, first: float) -> int:
        for k in range(count):
            kvbm.convert(src.pool, dst.pool, [0], [0], cast=kvbm.Scale(first + k / 1000))
        gc.collect()
        return sum(type(one) is Executor for one in gc.get_objects())

    before = convert(1, 1.0)
    more = convert(300, 2.0) - before
    assert more < 40, f"{more} executors stay for 300 scales"


# ---- planes that are only copied -------------------------------------------------------------------------------------


def test_the_same_formats_are_a_copy() -> None:
    """With a cast that has nothing to cast, no bit changes: NaN payloads, scales, codes."""
    for src_name, dst_name, sizes, dtype in (
        ("nhd", "hnd", (2, 2, 3, 3, 16), "bfloat16"),
        ("nhd", "universal", (2, 2, 3, 3, 16), "float32"),
        ("vllm/nvfp4", "record/nvfp4_tensors", (2, 2, 3, 4, 64), "bfloat16"),
        ("vllm/fp8_ds_mla", "record/mla_fp8_planes", (2, 1, 1, 3, 576), "bfloat16"),
        ("vllm/per_token_head_int8", "record/per_token_head_int8_planes", (2, 2, 3, 3, 20), "float16"),
    ):
        for scale in (None, 1.0, 0.37):
            src = Side(src_name, sizes, dtype, 3, make=casting.shuffled if dtype != "float32" else None)
            dst = Side(dst_name, sizes, dtype, 4, dst=True)
            convert_and_check(src, dst, [2, -1, 0], [0, 1, 3], scale, what=scale)


def any_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 1 << casting.width(dtype), shape)


def test_planes_beside_are_copied_with_their_payloads() -> None:
    """The rope part in bfloat16 keeps every bit while the latent is cast; in another format it needs a scale of the caller."""
    for plain, quantises in itertools.product(LATENTS, (True, False)):
        both: Any = [(plain, "bfloat16"), ("vllm/fp8_ds_mla", "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        sizes = (1, 1, 1, 16, 576)
        src, dst = Side(a, sizes, a_type, 4, make=any_bits), Side(b, sizes, b_type, 4, dst=True)
        convert_and_check(src, dst, range(4), [3, 1, 0, 2])
        codes = src.read(src.after, "rope", src.elements("rope", [0]))
        assert ((codes & 0x7FFF) > 0x7F80).any(), "no NaN was copied"


# ---- digests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["vllm/per_token_head_fp8", "record/nvfp4_tensors", "vllm/fp8_ds_mla", "vllm/nvfp4", "record/mxfp8_universal"],
)
def test_digests_are_those_of_the_quantised_blocks(name: str) -> None:
    sizes = sizes_of(name)[0]
    for plain, quantises in itertools.product(plains_of(name)[:3], (True, False)):
        both: Any = [(plain, "bfloat16"), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = Side(a, sizes, a_type, 4), Side(b, sizes, b_type, 5, dst=True)
        want = expected(src, dst, [3, -1, 0], [1, 0, 4])
        found = np.ones(3, np.uint64)
        kvbm.Transfer(src.pool, dst.pool, cast="amax").copy([3, -1, 0], [1, 0, 4], digests=found)
        casting.check(src, dst, want)
        side, ids = (dst, [1, -1, 4]) if quantises else (src, [3, -1, 0])
        assert found.tolist() == side.pool.digest(ids).tolist(), (plain, quantises)
        assert found[1] == 0 and found[0] != 0


@pytest.mark.sanitize
@pytest.mark.slow  # 1 s
def test_digests_in_the_pass_of_the_cast_on_the_cpu(fake_driver: processes.FakeDriver) -> None:
    """All formats, forms of cells, and layouts with random orders; a digest of the result is another pass."""
    fake_driver("casts.fused_digests", None, "cpu")
    fake_driver("casts.random_digests", 0, 60, "cpu")


def test_digests_with_a_scale_of_the_caller() -> None:
    for src_type, dst_type in (("bfloat16", E4M3), (E5M2, "float32"), ("float32", "int8")):
        src, dst = Side("nhd", (2, 2, 3, 3, 16), src_type, 4), Side("hnd", (2, 2, 3, 3, 16), dst_type, 4, dst=True)
        found = np.ones(2, np.uint64)
        kvbm.Transfer(src.pool, dst.pool, cast=kvbm.Scale(0.5)).copy([3, 0], [1, 2], digests=found, tokens=[16, 32])
        casting.check(src, dst, expected(src, dst, [3, 0], [1, 2], 0.5))
        quantised, ids = (src, [3, 0]) if dst_type in PLAIN else (dst, [1, 2])
        assert found.tolist() == quantised.pool.digest(ids, tokens=[16, 32]).tolist()


def test_digests_of_layers_and_parts() -> None:
    src, dst = (
        Side("nhd", (3, 2, 3, 4, 32), "float16", 3),
        Side("record/nvfp4_tensors", (2, 2, 3, 4, 32), "bfloat16", 3, dst=True),
    )
    found = np.ones(2, np.uint64)
    layers = range(1, 3), range(2)
    for one, other in ((src, dst), (dst, src)):
        mine = layers if one is src else layers[::-1]
        kvbm.Transfer(one.pool, other.pool, cast="amax").copy([2, 0], [1, 2], layers=mine, digests=found)
        ids = [1, 2] if one is src else [2, 0]
        assert found.tolist() == dst.pool.section(l=range(2)).digest(ids).tolist()


def test_digests_of_planes_without_scales() -> None:
    """The quantised side is where a plane is quantised, whatever the shape's dtype says and whether scales are declared."""
    sizes = (2, 2, 3, 4, 64)
    one, more = ("t d", "d", 64), ("t s", "s", 64)
    quantised = planar("[b] l o h <>", plane("a", E4M3, *one), plane("b", "int8", *more), scales=())
    plain = planar("[b] l o h <>", plane("a", "bfloat16", *one), plane("b", "float32", *more), scales=())
    for src_type, dst_type in itertools.product(("bfloat16", "uint8", "int8"), repeat=2):
        for a, b in ((plain, quantised), (quantised, plain)):
            with in_case(src_type, dst_type, "quantises" if b is quantised else "dequantises"):
                src, dst = Side(a, sizes, src_type, 3), Side(b, sizes, dst_type, 3, dst=True)
                found = np.ones(1, np.uint64)
                kvbm.Transfer(src.pool, dst.pool, cast=kvbm.Scale(0.5)).copy([2], [1], digests=found)
                casting.check(src, dst, expected(src, dst, [2], [1], 0.5))
                want = dst.pool.digest([1]) if b is quantised else src.pool.digest([2])
                assert found.tolist() == want.tolist()


def test_digests_of_a_plain_layout_with_planes() -> None:
    sizes = (2, 2, 3, 4, 64)
    data, more = ("t d", "d", 64), ("more", "bfloat16", "t")
    plain = planar("[b] l o h <>", plane("data", "bfloat16", *data), plane(*more), scales=())
    layout = planar("[b] l o h <>", plane("data", E4M3, *data), plane("scale", "float32", "t"), plane(*more))
    for dtype in ("bfloat16", "uint8", "float16"):  # no plane has the shape's dtype
        for a, b in ((plain, layout), (layout, plain)):
            with in_case(dtype, "quantises" if b is layout else "dequantises"):
                src, dst = Side(a, sizes, dtype, 3), Side(b, sizes, dtype, 3, dst=True)
                found = np.ones(1, np.uint64)
                kvbm.Transfer(src.pool, dst.pool, cast="amax").copy([2], [1], digests=found)
                casting.check(src, dst, expected(src, dst, [2], [1]))
                want = dst.pool.digest([1]) if b is layout else src.pool.digest([2])
                assert found.tolist() == want.tolist()


@pytest.mark.parametrize("quantises", [True, False])
def test_digests_of_parts(quantises: bool) -> None:
    """Those of the quantised side's part.  Units have the positions of the source's units, as in any copy."""
    for mine, theirs in PARTS:
        both: Any = [("nhd", "bfloat16"), ("record/nvfp4_tensors", "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = (
            Side(a, (3, 2, 3, 8, 32), a_type, 3, part=mine),
            Side(b, (3, 2, 3, 8, 32), b_type, 3, dst=True, part=theirs),
        )
        found = np.ones(2, np.uint64)
        kvbm.Transfer(src.given, dst.given, cast="amax").copy([2, 0], [1, 2], digests=found)
        side, ids = (dst, [1, 2]) if quantises else (src, [2, 0])
        places = [unit % (8 // mine.tokens) * mine.tokens for unit in (2, 0)] if mine.tokens else 0
        assert found.tolist() == side.given.digest(ids, tokens=places).tolist(), (mine, theirs)


def test_what_is_not_digested_in_the_same_pass_is_said() -> None:
    """It is digested in a pass of its own."""

    def fused(src: Side, dst: Side, **model: Any) -> Any:
        keys = cells.keys_of(dst.pool.whole.of, kvbm.Model(**model) if model else None)
        return cells.fused(src.pool.whole.of, dst.pool.whole.of, keys, (256, 256), "a to b", AMAX)

    sizes = (2, 1, 1, 4, 32)
    for order in ("[b] l o h t d", "[t l b] o h d"):
        src = Side(Own(order), sizes, "bfloat16", 3)
        dst = Side(planar("[b] l o h <>", *_scaled("data", "d")), sizes, "bfloat16", 3, dst=True)
        assert not isinstance(fused(src, dst), str)
        # Tokens are 3 * 2**29 keys apart, or 3 * 2**31, and kernels have steps of 32 bits.
        assert not isinstance(fused(src, dst, layers=range(2), nl=1 << 29), str), order
        assert "keys of a cast go beyond 32 bits" in fused(src, dst, layers=range(2), nl=(1 << 31) - 1), order

    a, b = plane("a", "bfloat16", "t d", "d", 32), plane("b", "bfloat16", "t c", "c", 32)
    src = Side(planar("[b] l o h <>", a, *_scaled("b", "c"), scales=(("of_b", "b"),)), sizes, "bfloat16", 3)
    dst = Side(planar("[b] l o h <>", b, *_scaled("a", "d"), scales=(("of_a", "a"),)), sizes, "bfloat16", 3, dst=True)
    assert "planes are cast in both directions, and digests are those of one side" in fused(src, dst)
    found = np.ones(2, np.uint64)
    kvbm.Transfer(src.pool, dst.pool, cast="amax").copy([2, 0], [1, 2], digests=found)
    casting.check(src, dst, expected(src, dst, [2, 0], [1, 2]))
    assert found.tolist() == dst.pool.digest([1, 2]).tolist()


def _scaled(name: str, axis: str) -> list[Any]:
    """A plane of e4m3 and that of its scales, one for each token."""
    return [plane(name, E4M3, f"t {axis}", axis, 32), plane("scale" if name == "data" else f"of_{name}", "float32", "t")]


def test_kernels_that_take_a_limit_of_multiprocessors_are_built_in() -> None:
    sizes = (2, 1, 1, 4, 32)
    src = Side("nhd", sizes, "bfloat16", 3)
    dst = Side("vllm/per_token_head_fp8", sizes, "bfloat16", 3, dst=True)
    made = between_layers(src.pool.whole.of, dst.pool.whole.of, "a to b", None, AMAX)
    launches = lowering.lower(made.launches(256, 256, pages=False), prepare._kernels_on(-1), sm_limited=True)
    assert [launch.kernel[0].sm_limited for launch in launches] == [True]
    assert prepare.kernel_notes(launches, -1) == []


# ---- random layouts --------------------------------------------------------------------------------------------------


def random_planar(
    rng: np.random.Generator, sizes: dict[str, int], dtype: str, scale: str, count: int, shared: str
) -> Planar | None:
    """A layout of these planes in any order: records or arrays apart, splits, pitches, K and V in different orders."""

    def shuffle(words: list[str]) -> list[str]:
        return [str(word) for word in rng.permutation(np.array(words, object))]

    outer = shuffle(["b", *(axis for axis in "loht" if axis not in shared and rng.integers(2))])
    cut = int(rng.integers(0, len(outer) + 1))
    table, inner = outer[:cut], outer[cut:]
    apart = bool(rng.integers(2))
    names = shuffle(["data", "scale"])
    term = "<" + " ".join(names) + ">"
    if apart:
        table.insert(int(rng.integers(0, len(table) + 1)), term)
    else:
        inner.append(term)
    own = "s" if count > 1 or rng.integers(2) else ""
    made = []
    for name in names:
        kind, axis, hidden = (dtype, "d", "") if name == "data" else (scale, own, shared)
        elements = sizes["d"] if name == "data" else count if own else 1
        words = [a for a in "loht" if a not in outer and a not in hidden] + ([axis] if axis else [])
        orders = []
        for _ in range(2 if "o" in outer and sizes["o"] == 2 and rng.integers(3) == 0 else 1):
            order = []
            for word in words:
                size = elements if word == axis else sizes[word]
                by = [n for n in (2, 4, 8) if size % n == 0 and n < size]
                split = by and rng.integers(5) == 0
                order += [f"{word}/{by[-1]}", f"{word}%{by[-1]}"] if split else [word]
            order = shuffle(order)
            if kind == E2M1:
                order.sort(key=lambda word: (word[0] == "d", word[1:2] == "%"))
            orders.append(tuple(order))
        orders = orders[:1] if orders[0] == orders[-1] else orders
        pitch = ()
        if len(orders) == 1 and len(orders[0]) > 1 and rng.integers(5) == 0:
            pitch = ((orders[0][-2], int(rng.choice((48, 100, 640)))),)
        made.append(plane_oracle.DrawnPlane(name, kind, axis, elements, tuple(hidden), tuple(orders), None, pitch))
    around = [word for word in inner if not word.startswith("<")]
    pitch = (
        ((str(rng.choice(around)), int(rng.choice((4096, 10000, 65537)))),)
        if around and not apart and rng.integers(5) == 0
        else ()
    )
    return Planar(plane_oracle.Drawn(tuple(table), tuple(inner), tuple(made), pitch))


def random_plain(rng: np.random.Generator, sizes: dict[str, int]) -> Own:
    """A plain layout in any order, with tables, splits and orders of V."""
    words = [str(word) for word in rng.permutation(list("blohtd"))]
    cut = int(rng.integers(0, 4))
    table, inner = words[:cut], words[cut:]
    if "d" in table:
        table.remove("d")
        inner.append("d")

    def order() -> str:
        found = []
        for word in inner:
            by = [n for n in (2, 4, 8, 16) if word != "b" and sizes[word] % n == 0 and n < sizes[word]]
            found += [f"{word}/{by[-1]}", f"{word}%{by[-1]}"] if by and rng.integers(6) == 0 else [word]
        rest = [word for word in found if word[0] == "b"] if rng.integers(2) else []
        found = [word for word in found if word not in rest]
        if rng.integers(3):
            found = [str(word) for word in rng.permutation(found)]
        return (f"[{' '.join(table)}] " if table else "") + " ".join([*rest, *found])

    first = order()
    return Own(first)


def random_case(seed: int) -> tuple[Any, ...] | None:
    """(layout, plain layout, plain dtype, sizes, scale), or None if nothing legal was drawn."""
    rng = np.random.default_rng(seed)
    dtype, scale = [pair for pair in FORMATS if pair[1]][int(rng.integers(6))]
    d = int(rng.choice((16, 32, 64, 96, 128, 8, 40)))
    sizes = {"l": int(rng.choice((1, 2, 3))), "o": int(rng.choice((1, 2))), "h": int(rng.choice((1, 2, 3))),
             "t": int(rng.choice((1, 2, 3, 4, 16))), "d": d}  # fmt: skip
    least = 2 if dtype == E2M1 else 1
    count = int(rng.choice([n for n in (1, 2, 3, 4, 6, 8) if d % n == 0 and d // n >= least]))
    shared = "".join(axis for axis in "lht" if rng.integers(8) == 0)
    layout = random_planar(rng, sizes, dtype, str(scale), count, shared)
    plain = random_plain(rng, sizes)
    given = float(rng.choice((0.01, 1.0, 50.0))) if rng.integers(3) == 0 and casting.multiplies(layout) else None
    return layout, plain, PLAIN[int(rng.integers(3))], tuple(sizes.values()), given, bool(rng.integers(2))


def run_random(seed: int) -> str:
    """Convert one random case; "" if it is bit-exact, else why it is not possible."""
    layout, plain, dtype, sizes, given, quantises = random_case(seed)
    rng = np.random.default_rng(seed + 1)
    how, align = [str(rng.choice(WAYS)) for _ in range(2)], [int(rng.choice(ALIGNS)) for _ in range(2)]
    try:
        for blocks in (4, 5):
            layout.drawn.held(dict(zip("lohtd", sizes, strict=True)), blocks)
        oracle.Placed(oracle.Order(plain.k, plain.v), dict(zip("lohtd", sizes, strict=True)), 2, 3).check()
    except oracle.IllegalError as error:
        return f"illegal: {error}"
    both: Any = [(plain, dtype), (layout, "bfloat16")]
    (a, a_type), (b, b_type) = both if quantises else both[::-1]
    src = Side(a, sizes, a_type, 4, align=align[0], how=how[0], seed=seed)
    dst = Side(b, sizes, b_type, 5, dst=True, align=align[1], how=how[1])
    ids = [3, 0, -1, 2], [1, 4, 0, 2]
    try:
        kvbm.convert(src.pool, dst.pool, *ids, cast=casting.cast_of(given))
    except kvbm.errors.MissingKernelError as error:
        assert dst.untouched
        return f"loops: {error}"
    except kvbm.PlanError as error:
        assert dst.untouched
        return f"plan: {error}"
    casting.check(src, dst, expected(src, dst, *ids, given), (seed, how, align, dtype, quantises, given))
    return ""


#: Reasons of the planner.
REFUSED = ("have no common refinement", "share a byte", "lie in several allocations")


def test_random_layouts() -> None:
    """Random layouts of planes against random plain ones; few are refused, and only for reasons that the planner states."""
    why: dict[str, int] = {}
    for seed in range(100):
        with in_case(seed):
            found = run_random(seed)
            key = found.split(":")[0]
            assert key in ("", "illegal", "loops") or any(reason in found for reason in REFUSED), found
            why[key] = why.get(key, 0) + 1
    assert why[""] > 60, why


# ---- errors ----------------------------------------------------------------------------------------------------------

LATENT = (2, 1, 1, 3, 576)


def pool_of(name: Any, dtype: str = "bfloat16", sizes: Sizes = SIZES) -> Any:
    return Side(name, sizes, dtype, 3, dst=True)


#: What is wrong: (source, destination, cast, the error, words of its message).
WRONG: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "no scales": (
        ("nhd",),
        ("hnd", E4M3),
        "amax",
        kvbm.PlanError,
        r"nhd → hnd: bfloat16 to float8_e4m3fn: no plane of scales takes part; expected a layout .*cast=Scale\(1.0\)",
    ),
    "no scales in the source": (
        ("nhd", "int8"),
        ("hnd",),
        "amax",
        kvbm.PlanError,
        "int8 to bfloat16: no plane of scales takes part; expected",
    ),
    "plain formats": (
        ("nhd",),
        ("hnd", "float32"),
        "amax",
        kvbm.PlanError,
        r"bfloat16 to float32: no plane of scales takes part; expected .*Scale",
    ),
    "a plane beside": (
        ("record/mla_joined", "float32", LATENT),
        ("vllm/fp8_ds_mla", "bfloat16", LATENT),
        "amax",
        kvbm.PlanError,
        "plane 'rope': float32 to bfloat16: no plane of scales takes part; expected",
    ),
    "both quantised": (
        ("vllm/per_token_head_fp8",),
        ("record/nvfp4_tensors",),
        "amax",
        kvbm.PlanError,
        "plane 'data': float8_e4m3fn to float4_e2m1fn: both are quantised; cast to bfloat16, float16 or float32 first",
    ),
    "both quantised, a scale": (
        ("nhd", E4M3),
        ("hnd", "int8"),
        kvbm.Scale(1.0),
        kvbm.PlanError,
        "float8_e4m3fn to int8: both are quantised; cast to",
    ),
    "opaque": (
        ("operational",),
        ("vllm/per_token_head_fp8",),
        "amax",
        kvbm.PlanError,
        "operational → .*without a promised order.*use a layout in which",
    ),
    "opaque destination": (
        ("vllm/per_token_head_fp8",),
        ("operational",),
        "amax",
        kvbm.PlanError,
        "without a promised order.*use a layout",
    ),
    "opaque to another format": (
        ("operational",),
        ("operational", "float32"),
        kvbm.Scale(1.0),
        kvbm.PlanError,
        "without a promised order",
    ),
    "bytes": (
        ("nhd", "uint8"),
        ("hnd",),
        kvbm.Scale(1.0),
        kvbm.PlanError,
        "uint8 to bfloat16: expected one of bfloat16, float16, float32, .* got uint8",
    ),
    "float64": (
        ("nhd", "float64"),
        ("hnd", E4M3),
        kvbm.Scale(1.0),
        kvbm.PlanError,
        "float64 to float8_e4m3fn: expected one of .* got float64",
    ),
    "tokens": (
        ("nhd", "bfloat16", (2, 2, 3, 8, 64)),
        ("vllm/per_token_head_fp8",),
        "amax",
        kvbm.BindError,
        "expected pools of one block shape, got .*units",
    ),
    "no cast": (
        ("nhd",),
        ("hnd", E4M3),
        None,
        kvbm.DTypeError,
        r"holds bfloat16, the destination float8_e4m3fn; a copy converts no dtype, unless .*cast=",
    ),
    "planes that one side lacks": (
        ("nhd", "bfloat16", LATENT[:1] + LATENT[1:]),
        ("vllm/fp8_ds_mla", "bfloat16", LATENT),
        "amax",
        kvbm.PlanError,
        "nhd has no planes, and the other side has 'latent', 'scale', 'rope'; expected the same planes",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_cast_is_said(what: str) -> None:
    src, dst, cast, kind, words = WRONG[what]
    one, other = pool_of(*src), pool_of(*dst)
    for call in (kvbm.convert, kvbm.Transfer):
        with pytest.raises(kind, match=words) as info:
            call(one.pool, other.pool, cast=cast)
        assert isinstance(info.value, kvbm.errors.KvbmError)
    assert other.untouched


@pytest.mark.parametrize(
    "given", [0, 0.0, -1.0, float("nan"), float("inf"), "x", None, True, 2.0**-101, 2.0**101, 10**400, [], 1j]
)
def test_a_scale_is_a_number_in_a_range(given: Any) -> None:
    with pytest.raises(kvbm.PlanError, match=r"Scale: expected a number from 2\*\*-100 to 2\*\*100, got "):
        kvbm.Scale(given)


@pytest.mark.parametrize(
    "given", [1, 3, 0.1, 2.0**-100, 2.0**100, np.float64(0.5), np.float32(0.5), np.int64(2)], ids=repr
)
def test_numbers_are_scales(given: Any) -> None:
    """Numbers of NumPy, too: `amax / 448` of an array is one.  The value is rounded to float32."""
    assert kvbm.Scale(given).value == float(np.float32(given))
    src, dst = Side("nhd", (1, 2, 1, 3, 16), "bfloat16", 2), Side("hnd", (1, 2, 1, 3, 16), "int8", 2, dst=True)
    convert_and_check(src, dst, [0, 1], [1, 0], given)


@pytest.mark.parametrize("given", ["max", "AMAX", "", 1.0, 1, True, False, b"amax", kvbm.Scale, ["amax"]], ids=repr)
def test_casts_that_are_none(given: Any) -> None:
    src, dst = pool_of("nhd"), pool_of("vllm/per_token_head_fp8")
    for call in (kvbm.convert, kvbm.Transfer):
        with pytest.raises(kvbm.PlanError, match=r"cast: expected 'amax' or a kvbm.Scale, got"):
            call(src.pool, dst.pool, cast=given)
    assert dst.untouched


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verify": True}, r"verify: .*cast changes them; take digests="),
        ({"strategy": "engine"}, "strategy: 'engine'"),
        ({"max_sms": 4}, "max_sms: "),
    ],
)
def test_options_without_a_meaning(given: Any, words: str) -> None:
    with pytest.raises(kvbm.BindError, match=words):
        kvbm.Transfer(pool_of("nhd").pool, pool_of("vllm/per_token_head_fp8").pool, cast="amax", **given)


def test_a_group_is_not_cut() -> None:
    """Neither by a section of its elements nor by one of its scales, nor by units of the tokens that share one."""
    plain, nvfp4 = pool_of("nhd"), pool_of("record/nvfp4_tensors")
    for some in ({"d": range(8)}, {"d": range(32)}, {"d": range(32), "s": range(2)}, {"s": 0}):
        with pytest.raises(kvbm.PlanError, match=r"axis '[ds]': .*expected all of the axis"):
            nvfp4.pool.section(**some)
    joined, mla = pool_of("record/mla_joined", "bfloat16", LATENT), pool_of("vllm/fp8_ds_mla", "bfloat16", LATENT)
    for some in ({"c": range(64)}, {"c": range(128)}, {"c": range(64), "s": 0}):
        with pytest.raises(kvbm.PlanError, match=r"axis '[cs]': .*expected all of the axis"):
            mla.pool.section(planes=["latent", "scale"], **some)
    with pytest.raises(kvbm.PlanError):
        kvbm.convert(
            joined.pool.section(planes="latent", c=range(64)), mla.pool.section(planes=["latent", "scale"]), cast="amax"
        )
    with pytest.raises(kvbm.PlanError, match="no plane of scales takes part"):
        kvbm.convert(joined.pool.section(planes="latent"), mla.pool.section(planes="latent"), cast="amax")
    shared = pool_of(OWNS[0][1], "bfloat16", OWNS[0][2])
    for cut in (
        lambda: shared.pool.units(2),
        lambda: shared.pool.section(t=range(2)),
        lambda: shared.pool.section(t=0),
    ):
        with pytest.raises(kvbm.PlanError, match=r"\bt\b|tokens|one element"):
            cut()
    assert plain.untouched and nvfp4.untouched and mla.untouched and shared.untouched


def arrays_of(layout: Any, shape: Any, kinds: dict[str, Any]) -> list[np.ndarray]:
    """Arrays of a pool, in other dtypes where `kinds` has them."""
    resolved = layout.resolve(shape, 3)
    return [
        np.zeros(one.shape, kinds.get(one.dtype) or kvbm.layout.shapes.numpy_name(one.dtype))
        for one in resolved.allocations
    ]


def test_formats_that_contradict() -> None:
    """An array whose own dtype is another format than what is declared; bytes say nothing and are taken."""
    import ml_dtypes

    plain = pool_of("nhd")
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=64, dtype="int8")
    for kind, scale in ((ml_dtypes.float8_e5m2, 1.0), (ml_dtypes.float8_e4m3fn, 1.0)):
        pool = kvbm.Pool(kvbm.load("nhd"), shape, arrays_of(kvbm.load("nhd"), shape, {"int8": kind}))
        for one, other in ((plain.pool, pool), (pool, plain.pool)):
            with pytest.raises(
                kvbm.DTypeError,
                match=r"cast: the (source|destination) is declared as int8, and its arrays are float8_.*; bind",
            ):
                kvbm.convert(one, other, [0], [0], cast=kvbm.Scale(scale))
    layout, shape = kvbm.load("record/nvfp4_tensors"), kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=64, dtype="bfloat16")
    for wrong in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu):
        with pytest.raises(kvbm.DTypeError, match="expected float8_e4m3fn, as the layout's planes say, got float8_"):
            kvbm.convert(
                plain.pool, kvbm.Pool(layout, shape, arrays_of(layout, shape, {E4M3: wrong})), [0], [0], cast="amax"
            )
    kvbm.convert(
        plain.pool, kvbm.Pool(layout, shape, arrays_of(layout, shape, {E4M3: np.uint8})), [0], [0], cast="amax"
    )


FILE = """order: "[l] b t h o <data scale>"
axes: {s: hd//32}
planes:
  data: {order: d, dtype: float8_e4m3fn}
  scale: {order: s, dtype: float32, scales: data}
"""
MORE = "  more: {order: s, dtype: float32, scales: data}\n"

#: What is wrong in a file: (text, instead, line, words).
FILES = {
    "unknown": (
        "scales: data",
        "scales: dta",
        5,
        "plane 'scale': scales: expected the name of another plane, got 'dta'",
    ),
    "itself": (
        "scales: data",
        "scales: scale",
        5,
        "plane 'scale': scales: expected the name of another plane, got 'scale'",
    ),
    "each other": (
        "float8_e4m3fn",
        "float8_e4m3fn, scales: scale",
        4,
        "plane 'data': scales: plane 'scale' holds scales itself",
    ),
    "data in bfloat16": (
        "float8_e4m3fn",
        "bfloat16",
        5,
        "scales: expected a plane with a dtype of float8_e4m3fn, .* got 'data' of bfloat16",
    ),
    "data in the shape's dtype": (
        ", dtype: float8_e4m3fn",
        "",
        5,
        "expected a plane with a dtype of .* got 'data' of any dtype",
    ),
    "scales in int32": (
        "dtype: float32",
        "dtype: int32",
        5,
        "expected a dtype of float32, bfloat16, .* for scales, got int32",
    ),
    "scales in the shape's dtype": (", dtype: float32", "", 5, "expected a dtype of float32, .* for scales, got none"),
    "a list": ("scales: data", "scales: [data]", 5, "scales of plane 'scale': expected a text, got a list"),
    "a number": ("scales: data", "scales: 7", 5, "expected the name of another plane, got '7'"),
    "nothing": ("scales: data", "scales:", 5, "scales"),
    "two": (
        "scales: data}\n",
        "scales: data}\n" + MORE,
        5,
        "plane 'scale': scales: expected one plane of scales of 'data', got several",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_files_with_wrong_scales(what: str) -> None:
    text, instead, line, words = FILES[what]
    given = FILE.replace(text, instead)
    if what == "two":
        given = given.replace("<data scale>", "<data scale more>")
    with pytest.raises(kvbm.SpecError, match=rf"x\.yaml:{line}: .*{words}|<string>:{line}: .*{words}"):
        spec.parse(given, name="x.yaml")


@pytest.mark.parametrize(("text", "instead", "words"), [
    ("hd//32", "5", r"plane 'scale': 5 scales along 's' for 64 elements along 'd' of plane 'data': expected a divisor"),
    ("order: s,", "order: s q,", r"has the axes q s, which plane 'data' lacks: expected at most one"),
    ("order: d, dtype: float8_e4m3fn", "dtype: float8_e4m3fn", r"has the axes s, which plane 'data' lacks"),
])  # fmt: skip
def test_scales_that_do_not_fit_their_data(text: str, instead: str, words: str) -> None:
    given = FILE.replace(text, instead).replace("axes: {", "axes: {q: 2, " if " q" in instead else "axes: {")
    with pytest.raises(kvbm.LayoutError, match=words):
        spec.parse(given, name="x.yaml").resolve(kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=64, dtype="bfloat16"), 3)


def test_formats_without_a_kernel_of_their_own() -> None:
    """The kernels for any formats cast them, also where elements are contiguous."""
    for dtype, scale in (("int8", "bfloat16"), (E4M3, "float16"), (E5M2, E8M0), (E2M1, "float32"), (E5M2, E4M3), ("int8", E8M0)):
        layout = planar("[b] l o h <>", plane("data", dtype, "t d", "d", 64), plane("scale", scale, "t s", "s", 2))
        for plain in PLAIN:
            with in_case(dtype, scale, plain):
                src, dst = Side("nhd", SIZES, plain, 3), pool_of(layout)
                convert_and_check(src, dst, [0, 1], [1, 2])
                assert len(kernels_of(src, dst, None)) == 1 and "plain_any" in str(kernels_of(src, dst, None))
                convert_and_check(Side(layout, SIZES, "bfloat16", 3), Side("hnd", SIZES, plain, 3, dst=True), [0, 1], [1, 2])


def test_layouts_that_differ_only_in_what_they_declare_of_scales() -> None:
    """They are equal, and neither is taken for the other."""
    planes = plane("data", E4M3, "t d", "d", 64), plane("scale", "float32", "t s", "s", 2)
    without, with_scales = planar("[b] l o h <>", *planes, scales=()), planar("[b] l o h <>", *planes)
    src = Side("nhd", SIZES, "bfloat16", 3)
    for _ in range(2):
        dst = pool_of(without)
        with pytest.raises(kvbm.PlanError, match="expected the same planes"):
            kvbm.convert(src.pool, dst.pool, cast="amax")
        dst = pool_of(with_scales)
        convert_and_check(src, dst, [0, 1], [1, 2])


def test_same_planes_with_and_without_declared_scales_are_a_copy() -> None:
    """Nothing changes its format, so nothing is cast."""
    planes = plane("data", E4M3, "t d", "d", 64), plane("scale", "float32", "t s", "s", 2)
    without, with_scales = planar("[b] l o h <>", *planes, scales=()), planar("[b] l o h <>", *planes)
    for a, b in ((without, with_scales), (with_scales, without)):
        src, dst = Side(a, SIZES, "bfloat16", 3), Side(b, SIZES, "bfloat16", 3, dst=True)
        kvbm.convert(src.pool, dst.pool, [0, 1], [1, 0], cast="amax")
        for name in ("data", "scale"):
            assert np.array_equal(
                *(side.read(side.after, name, side.elements(name, ids)) for side, ids in ((src, [0, 1]), (dst, [1, 0])))
            )


# ---- the references ---------------------------------------------------------------------------------------------------


def test_the_oracle_of_groups_is_what_the_page_says() -> None:
    """The example of the page, through a whole copy; and a mutated result is seen."""
    bits = (np.array([7, -2.5, 0.1005859375, -(2.0**-17)], np.float32).view(np.uint32) >> 16).astype(np.uint32)

    def make(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.resize(bits, shape)

    layout = planar("[b] l o h <>", plane("data", E4M3, "t d", "d", 4), plane("scale", "float32", "t"))
    src, dst = (
        Side("nhd", (1, 1, 1, 2, 4), "bfloat16", 2, make=make),
        Side(layout, (1, 1, 1, 2, 4), "bfloat16", 2, dst=True),
    )
    want = expected(src, dst, [0], [1])
    assert dst.read(want, "data", dst.elements("data", [1])).reshape(-1).tolist() == [0x7E, 0xF2, 0x4D, 0x80] * 2
    assert dst.read(want, "scale", dst.elements("scale", [1])).view(np.uint32).reshape(-1).tolist() == [0x3C800000] * 2
    kvbm.convert(src.pool, dst.pool, [0], [1], cast="amax")
    casting.check(src, dst, want)
    for at in (0, int(dst.elements("data", [1]).max()), int(dst.elements("scale", [1]).min()), want.size - 1):
        dst.memory[at] ^= 1
        with pytest.raises(AssertionError, match=f"byte {at}: got"):
            casting.check(src, dst, want)
        dst.memory[at] ^= 1
    src.memory[0] ^= 1
    with pytest.raises(AssertionError, match="the source changed"):
        casting.check(src, dst, want)


@pytest.mark.parametrize("change", ["value", "scale", "address", "group"])
def test_a_wrong_reference_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the references matters: one bit of a code or scale, a place, or which elements form a group."""
    if change in ("value", "scale"):
        real = cast_oracle.quantise

        def wrong(*given: Any, **rest: Any) -> Any:
            codes, bits, counts = real(*given, **rest)
            (codes if change == "value" else bits).reshape(-1)[-1] ^= 1
            return codes, bits, counts

        monkeypatch.setattr(cast_oracle, "quantise", wrong)
    elif change == "group":
        real_group = casting.grouped
        monkeypatch.setattr(casting, "grouped", lambda *given: np.roll(real_group(*given), 1, axis=0))
    else:
        real_at = Side.elements
        monkeypatch.setattr(
            Side,
            "elements",
            lambda self, name, ids, *rest, **more: real_at(self, name, ids, *rest, **more) + (name == "scale"),
        )
    for name in ("record/nvfp4_tensors", "vllm/per_token_head_int8"):
        src, dst = Side("nhd", SIZES, "bfloat16", 3), Side(name, SIZES, "bfloat16", 3, dst=True)
        with pytest.raises(AssertionError):
            convert_and_check(src, dst, [0, 2], [2, 0])


def test_chunks_are_below_4_gib() -> None:
    """Kernels add the offsets inside a chunk with 32 bits: the planner moves loops out of chunks that are larger."""
    largest = 0
    names = "record/mxfp8_tensors", "vllm/per_token_head_fp8"
    for nh, plain, name in itertools.product((512, 4096), ("hnd", "universal", "nhd"), names):
        made = kvbm.plan(plain, name, f"nl=8,no=2,nh={nh},nt=16384,hd=512,dtype=float32", cast="amax")
        for part in made.casts:
            for nest in filter(None, (part, part.scales)):
                for side in (1, 2):
                    span = sum((mode.extent - 1) * mode[side] for mode in nest.inner)
                    assert span < 1 << 32, (plain, name, nh)
                    largest = max(largest, span)
            assert part.elements == 8 * 2 * nh * 16384 * 512 // len(made.casts), (plain, name, nh)
    assert largest > 1 << 31  # some are nearly as large
