"""Scales of the caller by layer, and for K and V: bit for bit, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_cast import ALIGNS, E2M1, E4M3, E5M2, IDS, WAYS

import casting
import kvbm
from cast_oracle import PLAIN
from casting import Given, Own, Part, Side, convert_and_check, planar, plane
from coordinates import in_case

#: Layouts of K and V on either side: orders, tables of allocations, K and V in different orders, layers or K and V fastest.
ORDERS: tuple[Any, ...] = (
    "nhd",
    "universal",
    "vllm/flash_attn_nhd",
    "vllm/LBHNC",
    "vllm/paged_attn_v0",
    Own("[b] o h l t d"),
    Own("[l o] b t h d"),
    Own("[b] t h d l o"),
    Own("[b] t d h o l"),
    Own("[l b] t h d o"),
    Own("[l] b o h t d", "[l] b o t h d"),
    Own("[b h] l o d/8 t d%8"),
)

#: Formats of both sides; one is quantised without scales, or none.
CONSTANT = (*itertools.product(PLAIN, (E4M3, E5M2, "int8")), ("bfloat16", "float32"), ("float16", "bfloat16"))


def scales(rng: np.random.Generator, layers: int, kind: int) -> Given:
    """Scales of both, of K and V, by layer, or for one of the two by layer."""

    def numbers(count: int) -> Any:
        found = tuple(float(x) for x in np.exp2(rng.uniform(-9, 4, count)))
        return found[0] if count == 1 else found

    def by_layer() -> Any:
        return tuple(float(x) for x in np.exp2(rng.uniform(-9, 4, layers)))

    return (
        Given(by_layer()),
        Given(by_layer(), by_layer()),
        Given(numbers(1), numbers(1)),
        Given(by_layer(), numbers(1)),
        Given(numbers(1), by_layer()),
    )[kind % 5]


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=[casting.title(one).replace("\n", "") for one in ORDERS])
def test_planes_without_scales(number: int) -> None:
    rng = np.random.default_rng(number)
    for turn, (other, quantises) in enumerate(itertools.product(ORDERS, (True, False))):
        place = turn // 2
        if quantises is ((place + number) % 2 == (place < number)):
            continue  # two orders are cast one way here, and the other way in the other's case
        formats = CONSTANT[(turn + number) % len(CONSTANT)]
        sizes = ((3, 2, 3, 4, 64), (5, 2, 1, 16, 16), (2, 2, 2, 8, 512), (1, 2, 2, 16, 48))[(turn // 2 + number) % 4]
        given = scales(rng, sizes[0], turn + number)
        both: Any = [(other, formats[0]), (ORDERS[number], formats[1])]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src = Side(a, sizes, a_type, 5, align=16 * (turn % 2), how=WAYS[turn % 3], seed=turn)
        dst = Side(b, sizes, b_type, 7, dst=True, align=16 * (turn // 2 % 2), how=WAYS[turn // 3 % 3])
        with in_case(casting.title(a), a_type, casting.title(b), b_type, sizes, given):
            convert_and_check(src, dst, *IDS[turn % 4], given)


@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize("name", ["record/nvfp4_tensors", "vllm/nvfp4", "record/nvfp4_universal"])
def test_scales_of_tensors(name: str, quantises: bool) -> None:
    """Those of NVFP4 are multiplied by the scale of their layer, K or V."""
    rng = np.random.default_rng(len(name))
    for turn, other in enumerate(ORDERS):
        sizes = ((3, 2, 3, 4, 64), (2, 2, 1, 16, 128))[turn % 2]
        if isinstance(other, Own) and other.pitch:
            continue
        given = scales(rng, sizes[0], turn)
        both: Any = [(other, PLAIN[turn % 3]), (name, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        src, dst = Side(a, sizes, a_type, 5, seed=turn), Side(b, sizes, b_type, 7, dst=True, align=ALIGNS[turn % 6])
        with in_case(casting.title(other), sizes, given):
            convert_and_check(src, dst, *IDS[turn % 4], given)


def test_layouts_of_ones_own() -> None:
    """Rare formats, groups over tokens, K and V that differ.  Beside planes with scales of float32, which K and V may share."""
    rng, sizes = np.random.default_rng(8), (2, 2, 2, 4, 32)
    data, many = ("t d", "d", 32), plane("scale", E4M3, "t s", "s", 2)
    layouts = (
        planar("[b] l o h <>", plane("data", E5M2, *data), many),
        planar("[l] b o <>", plane("data", E2M1, "h t d|t h d", "d", 32), plane("scale", E4M3, "h t s|s t h", "s", 2)),
        planar("[b] l o <>", plane("data", "int8", "t h d", "d", 32), plane("scale", E4M3, "h", shared="t")),
        planar("[b] <>", plane("data", E4M3, "d l o h t", "d", 32), plane("scale", E4M3, "t s h o l", "s", 1)),
    )
    for turn, (layout, other, quantises) in enumerate(itertools.product(layouts, ORDERS[:8], (True, False))):
        given = scales(rng, 2, turn)
        both: Any = [(other, PLAIN[turn % 3]), (layout, "bfloat16")]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        with in_case(layout.yaml, casting.title(other), quantises, given):
            convert_and_check(Side(a, sizes, a_type, 3), Side(b, sizes, b_type, 4, dst=True), [2, -1, 0], [1, 2, 3], given)
    plain = planar("[l] b t h o <>", plane("k", "", "d", "d", 32), plane("v", "", "e", "e", 64), scales=())
    own = planar(
        "[b] l h <>", plane("k", E4M3, "o t d", "d", 32), plane("ks", "float32", "t", shared="o"),
        plane("v", "int8", "o t e", "e", 64),
        scales=(("ks", "k"),),
    )  # fmt: skip
    for a, b in ((plain, own), (own, plain)):
        src, dst = Side(a, sizes, "float16", 3), Side(b, sizes, "float16", 4, dst=True)
        convert_and_check(src, dst, [2, 0], [1, 3], Given((0.5, 3.0), 0.25))


def test_a_plane_that_layers_or_halves_share_has_one_scale() -> None:
    """Red: it had that of K, or of the first layer."""
    sizes = (2, 2, 2, 4, 32)
    for around, order, shared, given, says in (
        ("[b] l h <>", "o t d", "o", Given(0.5, 0.25), "K and V"),
        ("[b] h <>", "l o t d", "l", Given((0.5, 0.25)), "all layers"),
        ("[b] h <>", "l o t d", "l", Given((0.5, 0.25), 0.5), "all layers"),
    ):
        less = order.replace(shared, "").strip()
        sides = [
            planar(around, plane("x", dtype, order, "d", 32), plane("y", dtype, less, "d", 32, shared=shared), scales=())
            for dtype in ("", "int8")
        ]
        refused = f"plane 'y' has one element for {says}, and Scale.* different numbers; expected the same"
        for a, b in (sides, sides[::-1]):
            src, dst = Side(a, sizes, "float16", 3), Side(b, sizes, "float16", 4, dst=True)
            with pytest.raises(kvbm.PlanError, match=refused):
                kvbm.convert(src.pool, dst.pool, [2, 0], [1, 3], cast=given.cast)
            convert_and_check(src, dst, [2, 0], [1, 3], Given((0.5, 0.5), 0.5))


def test_latents_have_scales_by_layer() -> None:
    for quantises in (True, False):
        for dtype in ("bfloat16", "float32"):
            both: Any = [("record/mla_joined", dtype), ("record/mla_joined", E4M3)]
            (a, a_type), (b, b_type) = both if quantises else both[::-1]
            sizes = (3, 1, 1, 4, 576)
            convert_and_check(
                Side(a, sizes, a_type, 3), Side(b, sizes, b_type, 3, dst=True), [2, 0], [1, 2], Given((0.5, 0.01, 3.0))
            )


# ---- parts of pools --------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.slow  # half a second
@pytest.mark.parametrize("quantises", [True, False])
def test_sections(quantises: bool) -> None:
    """Scales are those of the section's layers, in its order; the other side may have K and V swapped."""
    rng = np.random.default_rng(5)
    parts = (
        (Part((("l", (2, 0)),)), Part((("l", (1, 2)),))),
        (Part((("l", (0, 1, 3)),)), Part((("l", (3, 2, 0)),))),
        (Part((("o", (1, 0)),)), Part()),
        (Part((("o", (1, 0)), ("l", (3, 1)))), Part((("l", (0, 2)),))),
        (Part((("l", (1, 2)),)), Part((("l", (2, 1)), ("h", (0, 1, 2))))),
        (Part((("l", (1, 3)), ("t", (1, 3, 5, 7)))), Part((("t", (7, 6, 1, 0)), ("l", (2, 0))))),
        (Part(tokens=4), Part(tokens=4)),
        (Part((("l", (3, 0)),), 2), Part((("l", (0, 2)),), 2)),
        (Part((("h", (2,)), ("l", (1,)))), Part((("l", (3,)), ("h", (0,))))),
    )
    pairs = (("nhd", "hnd"), ("universal", "record/nvfp4_tensors"), (ORDERS[10], Own("[b] l o t h d")), ("hnd", ORDERS[10]))
    for turn, ((of_plain, of_quantised), (plain, layout)) in enumerate(itertools.product(parts, pairs)):
        kind = turn % 5  # of the scales: four of five with every part, and all with every pair
        layers = len(dict(of_quantised.chosen).get("l", range(4)))
        given = scales(rng, layers, kind)
        dtype = "bfloat16" if "nvfp4" in casting.title(layout) else (E4M3, "int8")[turn % 2]
        both: Any = [(plain, "bfloat16", of_plain), (layout, dtype, of_quantised)]
        (a, a_type, mine), (b, b_type, its) = both if quantises else both[::-1]
        sizes = (4, 2, 3, 8, 32)
        src, dst = Side(a, sizes, a_type, 4, part=mine), Side(b, sizes, b_type, 4, dst=True, part=its)
        with in_case(mine, its, casting.title(plain), casting.title(layout), given):
            convert_and_check(src, dst, [2, -1, 0], [1, 2, 3], given)


def test_one_of_k_and_v() -> None:
    """Its scales are a number, or one by layer."""
    for given, quantises in itertools.product((Given((0.5, 3.0, 0.01)), Given(0.25)), (True, False)):
        for mine, its in (((1,), (0,)), ((0,), (1,)), ((1,), (1,))):
            both: Any = [("nhd", "float16", mine), ("hnd", E5M2, its)]
            (a, a_type, x), (b, b_type, y) = both if quantises else both[::-1]
            src = Side(a, (3, 2, 2, 4, 32), a_type, 3, part=Part((("o", x),)))
            dst = Side(b, (3, 2, 2, 4, 32), b_type, 3, dst=True, part=Part((("o", y),)))
            convert_and_check(src, dst, [2, 0], [1, 2], given)


def test_layers() -> None:
    """`layers=` takes the numbers of the quantised side's layers; stages have their own."""
    rng = np.random.default_rng(6)
    for turn, (quantises, kind, layout) in enumerate(
        itertools.product((True, False), range(5), ("hnd", "record/nvfp4_tensors", ORDERS[10]))
    ):
        dtype = "bfloat16" if layout == "record/nvfp4_tensors" else "int8"
        engine: Any = ("nhd", (6, 2, 2, 4, 32), "bfloat16", 3)
        stage: Any = (layout, (4, 2, 2, 4, 32), dtype, 3)
        given = scales(rng, 4, kind)
        for ours, theirs in ((range(1, 3), range(2, 4)), (range(2, 6), range(4)), (range(5, 6), range(1, 2))):
            a, b = (engine, stage) if quantises else (stage, engine)
            src, dst = Side(*a, seed=turn), Side(*b, dst=True)
            layers = (ours, theirs) if quantises else (theirs, ours)
            move = kvbm.Transfer(src.pool, dst.pool, cast=given.cast)
            move.copy([2, 0], [1, 2], layers=layers)
            casting.check(src, dst, casting.expected(src, dst, [2, 0], [1, 2], given, layers), (layers, given, quantises))
    src, dst = Side(*engine[:1], (6, 2, 2, 4, 32), "bfloat16", 3), Side("hnd", (6, 2, 2, 4, 32), "int8", 3, dst=True)
    given, want = scales(rng, 6, 1), dst.before
    move = kvbm.Transfer(src.pool, dst.pool, cast=given.cast)
    for some in (range(2, 5), range(2), range(5, 6)):  # one transfer, range after range
        move.copy([0], [1], layers=some)
        want = casting.expected(src, dst, [0], [1], given, (some, some), before=want)
        casting.check(src, dst, want, some)


# ---- the number of scales --------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.slow  # 1 s
def test_as_many_as_fit_and_no_more() -> None:
    """512 scales go with a launch; a copy of more says how to divide it, and ranges of layers then are bit-exact."""
    rng = np.random.default_rng(9)
    for layers, quantises in itertools.product((256, 257), (True, False)):
        both: Any = [("nhd", "bfloat16"), ("hnd", E4M3)]
        (a, a_type), (b, b_type) = both if quantises else both[::-1]
        sizes, given = (layers, 2, 1, 2, 16), scales(rng, layers, 1)
        src, dst = Side(a, sizes, a_type, 3), Side(b, sizes, b_type, 3, dst=True)
        if layers == 256:
            convert_and_check(src, dst, [2, 0, 1], [1, 2, 0], given)
            continue
        with pytest.raises(kvbm.MissingKernelError, match=r"514 scales of the caller: expected at most 512 in one copy; copy"):
            kvbm.convert(src.pool, dst.pool, [0], [1], cast=given.cast)
        assert dst.untouched
        want = casting.expected(src, dst, [0], [1], Given(given.k[:200], given.v[:200]), (range(200), range(200)))
        want = casting.expected(
            src, dst, [0], [1], Given((1.0,) * 200 + given.k[200:], (1.0,) * 200 + given.v[200:]),
            (range(200, 257), range(200, 257)), before=want,
        )  # fmt: skip
        for some in (slice(200), slice(200, 257)):
            numbers = kvbm.Scale(k=given.k[some], v=given.v[some])
            layer = range(257)[some]
            kvbm.convert(src.pool.section(l=layer), dst.pool.section(l=layer), [0], [1], cast=numbers)
        casting.check(src, dst, want)


def test_equal_scales_are_one() -> None:
    """Numbers that do not differ cost nothing: neither loops nor a table."""
    shape = kvbm.load_shape("nl=4,no=2,nh=2,nt=4,hd=64,dtype=bfloat16"), kvbm.load_shape("nl=4,no=2,nh=2,nt=4,hd=64,dtype=int8")

    def of(*given: Any, **by: Any) -> Any:
        return kvbm.plan("universal", "universal", shape, cast=kvbm.Scale(*given, **by)).casts[0]

    assert of([0.5] * 4) == of(k=0.5, v=[0.5] * 4) == of(0.5)
    assert of(k=[0.5] * 4, v=0.25) == of(k=0.5, v=0.25) and of(k=0.5, v=0.25).given == (0.5, 0.25)
    assert of(k=[1, 2, 3, 4], v=[1, 2, 3, 4]) == of([1, 2, 3, 4]) and of([1, 2, 3, 4]).given == (1, 2, 3, 4)
    assert of(k=[1, 2, 3, 4], v=1).given == (1, 1, 2, 1, 3, 1, 4, 1)


def test_explain_says_which() -> None:
    src, dst = Side("nhd", (3, 2, 2, 4, 64), "bfloat16", 2), Side("hnd", (3, 2, 2, 4, 64), E4M3, 2, dst=True)
    text = kvbm.Transfer(src.pool, dst.pool, cast=kvbm.Scale(k=[0.5, 0.25, 2], v=1)).explain(1)
    assert "with 6 scales of the caller, 0.25 to 2;" in text and "cast_bf16_e4m3_" in text
    dst = Side("record/nvfp4_tensors", (3, 2, 2, 4, 64), "bfloat16", 2, dst=True)
    text = kvbm.Transfer(src.pool, dst.pool, cast=kvbm.Scale([0.5, 0.25, 2])).explain(1)
    assert "relative to 3 scales of the tensor, 0.25 to 2" in text


def test_digests() -> None:
    src, dst = Side("nhd", (3, 2, 2, 4, 64), "bfloat16", 4), Side("hnd", (3, 2, 2, 4, 64), E4M3, 4, dst=True)
    given, found = Given((0.5, 0.25, 2.0), 0.125), np.ones(2, np.uint64)
    kvbm.Transfer(src.pool, dst.pool, cast=given.cast).copy([3, 0], [1, 2], digests=found)
    casting.check(src, dst, casting.expected(src, dst, [3, 0], [1, 2], given))
    assert found.tolist() == dst.pool.digest([1, 2]).tolist()


# ---- the class, and what is refused ----------------------------------------------------------------------------------


def test_numbers_of_any_kind(torch: Any) -> None:
    want = kvbm.Scale(k=(0.5, 0.1), v=(2.0, 1.0))
    for made in (list, tuple, np.array, np.float32, torch.tensor, lambda some: torch.tensor(some, dtype=torch.float64)):
        found = kvbm.Scale(k=made([0.5, 0.1]), v=made([2, 1]))
        assert found == want and hash(found) == hash(want), made
    assert want.k == (0.5, float(np.float32(0.1))) and want != kvbm.Scale(k=(0.5, 0.1), v=(2.0, 2.0))
    assert kvbm.Scale(k=np.float32(0.5), v=torch.tensor(2.0)) == kvbm.Scale(k=0.5, v=2)
    assert kvbm.Scale([0.5, 0.25]).value == (0.5, 0.25) and kvbm.Scale(np.float64(0.25)).value == 0.25
    for one in (kvbm.Scale(0.5), kvbm.Scale([0.5, 0.25]), want, kvbm.Scale(k=1, v=2)):
        assert eval(repr(one), {"Scale": kvbm.Scale}) == one


NUMBER = r"expected a number from 2\*\*-100 to 2\*\*100, got "


@pytest.mark.parametrize("given", [
    ({"k": 1.0}, "expected k and v, or none of them, got only k"),
    ({"v": [1.0]}, "expected k and v, or none of them, got only v"),
    ({"k": [1.0, 2.0], "v": [1.0]}, "expected k and v for as many layers, got 2 and 1"),
    ({"value": 0.5, "k": 1.0, "v": 1.0}, "expected k and v, or one value for both, got k, v and 0.5"),
    ({"value": [0.5], "k": 1.0, "v": 1.0}, r"expected k and v, or one value for both, got k, v and \(0.5,\)"),
    ({"k": 0.0, "v": 1.0}, f"Scale: k: {NUMBER}0.0"),
    ({"k": 1.0, "v": float("nan")}, f"Scale: v: {NUMBER}nan"),
    ({"k": [1.0, -1.0], "v": 1.0}, f"Scale: k: layer 1: {NUMBER}-1.0"),
    ({"k": 1.0, "v": [float("inf")]}, f"Scale: v: layer 0: {NUMBER}inf"),
    ({"k": [], "v": 1.0}, rf"Scale: k: {NUMBER}\[\]"),
    ({"k": "12", "v": 1.0}, f"Scale: k: {NUMBER}'12'"),
    ({"k": b"12", "v": 1.0}, f"Scale: k: {NUMBER}b'12'"),
    ({"k": {0: 1.0}, "v": 1.0}, f"Scale: k: {NUMBER}"),
    ({"k": {1.0, 2.0}, "v": 1.0}, f"Scale: k: {NUMBER}"),
    ({"k": [True], "v": 1.0}, f"Scale: k: layer 0: {NUMBER}True"),
    ({"k": [None], "v": 1.0}, f"Scale: k: layer 0: {NUMBER}None"),
    ({"k": np.ones((2, 2)), "v": 1.0}, rf"Scale: k: layer 0: {NUMBER}\[1.0, 1.0\]"),
    ({"k": np.array([True]), "v": 1.0}, f"Scale: k: layer 0: {NUMBER}True"),
    ({"value": [1.0, 0.0]}, f"Scale: layer 1: {NUMBER}0.0"),
    ({"value": [[1.0]]}, rf"Scale: layer 0: {NUMBER}\[1.0\]"),
    ({"value": [2.0**101]}, f"Scale: layer 0: {NUMBER}"),
    # Red: these were used for NVFP4, while files, peers and compiled code were told "amax".
    ({"value": 0.5, "is_given": False}, "is_given is False: expected no numbers, got 0.5"),
    ({"k": 1.0, "v": 1.0, "is_given": False}, "is_given is False: expected no numbers, got 1.0"),
    ({"value": 1.0, "is_given": 1}, "Scale: is_given: expected True or False, got 1"),
])  # fmt: skip
def test_what_is_no_scale(given: Any) -> None:
    with pytest.raises(kvbm.PlanError, match=given[1]):
        kvbm.Scale(**given[0])


def test_scales_that_do_not_fit_the_pools() -> None:
    shape = (3, 2, 2, 4, 64)
    engine, cache = ("nhd", shape, "bfloat16", 3), ("hnd", shape, E4M3, 3)
    latent, fp8 = (("record/mla_joined", (3, 1, 1, 4, 576), dtype, 3) for dtype in ("bfloat16", E4M3))
    own = ("vllm/per_token_head_fp8", shape, "bfloat16", 3)
    shared = (planar("[b] <>", plane("data", E5M2, "o h t d l", "d", 64), plane("scale", E4M3, "o h t", shared="l")), shape, "", 3)
    both = (planar("[b] l h <>", plane("data", "int8", "t d o", "d", 64), plane("scale", E4M3, "t", shared="o")), shape, "", 3)
    opposite = [
        (planar("[b] l o h <>", plane("a", x, "t d", "d", 64), plane("b", y, "t s", "s", 64), scales=()), shape, "", 3)
        for x, y in ((E4M3, "bfloat16"), ("bfloat16", E4M3))
    ]  # fmt: skip
    swapped, values = {"o": [1, 0]}, kvbm.Scale(k=1.5, v=2.0)
    for a, b, part, cast, words in (
        (engine, cache, ({}, {}), kvbm.Scale([1, 2]), r"Scale\(\(1.0, 2.0\)\): expected one number for each of the 3 l"),
        (cache, engine, ({}, {}), kvbm.Scale(k=[1] * 4, v=2), "expected one number for each of the 3 layers of the source, got 4"),
        (engine, cache, ({"l": [0, 2]}, {"l": [0, 1]}), kvbm.Scale([1, 2, 3]), "each of the 2 layers of the destination, got 3"),
        (latent, fp8, ({}, {}), values, r"the destination has no K and V of their own; expected Scale\(x\), where x is a"),
        (engine, cache, ({"o": [0]}, {"o": [1]}), values, "the destination has only one of K and V; expected Scale"),
        (cache, engine, ({"o": [1]}, {"o": [1]}), values, "the source has only one of K and V; expected Scale"),
        (engine, cache, ({}, swapped), values, "the destination has V before K; expected Scale"),
        (cache, engine, (swapped, {}), values, "the source has V before K; expected Scale"),
        (engine, own, ({}, {}), values, r"every plane that is cast has scales of its own, .* pass cast='amax'"),
        (engine, own, ({}, {}), kvbm.Scale([1, 1, 2]), r"every plane that is cast has scales of its own, .* pass cast='amax'"),
        (engine, shared, ({}, {}), kvbm.Scale([1, 2, 3]), "of one scale have several scales of the caller, by layer or for"),
        (both, engine, ({}, {}), values, "of one scale have several scales of the caller, by layer or for"),
        (opposite[0], opposite[1], ({}, {}), values, "cast in both directions; expected one number for all layers, and"),
    ):  # fmt: skip
        a, b = ((one[0], one[1], one[2] or "bfloat16", one[3]) for one in (a, b))
        src, dst = Side(*a), Side(*b, dst=True)
        with in_case(a, b, part, cast):
            ends = [side.pool.section(**some) if some else side.pool for side, some in zip((src, dst), part, strict=True)]
            for call in (kvbm.convert, kvbm.Transfer):
                with pytest.raises(kvbm.PlanError, match=words):
                    call(*ends, cast=cast)
            assert dst.untouched
    src, dst = Side("nhd", (6, *shape[1:]), "bfloat16", 3), Side(*cache, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool, cast=kvbm.Scale([1, 2]))
    with pytest.raises(kvbm.PlanError, match="for each of the 3 layers of the destination, got 2"):
        move.copy([0], [1], layers=(range(2), range(2)))
    assert dst.untouched
    # Red: an IndexError, as the source has more layers than there are scales.
    ends = src.pool.section(l=range(3)), dst.pool.section(l=range(2))
    with pytest.raises(kvbm.PlanError, match="the source has the sizes d=64 h=2 l=3 o=2 t=4, the destination d=64 h=2 l=2 o=2"):
        kvbm.plan(*ends, cast=kvbm.Scale([1, 2]))
    for call in (kvbm.convert, lambda *ends, cast: kvbm.Transfer(*ends, cast=cast).copy([0], [1])):
        with pytest.raises(kvbm.BindError, match=r"the pools hold 3 and 2 layers; .* layers="):
            call(*ends, cast=kvbm.Scale([1, 2]))
    with pytest.raises(kvbm.PlanError, match="for each of the 2 layers of the destination, got 3"):
        kvbm.Transfer(*ends, cast=kvbm.Scale([1, 2, 4])).copy([0], [1], layers=(range(2), range(2)))
    assert dst.untouched


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_layers_of_sections_have_the_scales_of_the_quantised_side(first: int, second: int) -> None:
    """Each by its place in the section, as if it were copied alone with its own number."""
    src = Side("nhd", (6, 2, 2, 4, 64), "bfloat16", 3)
    both, alone = (Side("hnd", (3, 2, 2, 4, 64), E4M3, 3, dst=True) for _ in range(2))
    for side in (both, alone):
        side.put(side.before)
    numbers, layers = [1.0, 4.0], (range(first, 3), range(second, 2))
    layers = tuple(one[: min(map(len, layers))] for one in layers)
    move = kvbm.Transfer(src.pool.section(l=range(3)), both.pool.section(l=range(2)), cast=kvbm.Scale(numbers))
    move.copy([0, 2], [1, 0], layers=layers)
    for of, to in zip(*layers, strict=True):
        one = kvbm.Scale(numbers[to])
        kvbm.convert(src.pool.section(l=[of]), alone.pool.section(l=[to]), [0, 2], [1, 0], cast=one)
    assert all(np.array_equal(a.view("u1"), b.view("u1")) for a, b in zip(both.pool.arrays, alone.pool.arrays, strict=True))
    assert not both.untouched


def test_a_scale_of_one_kind_is_not_taken_for_another() -> None:
    """`convert` keeps plans by their scales."""
    src, dst = Side("nhd", (2, 2, 1, 2, 32), "bfloat16", 2), Side("hnd", (2, 2, 1, 2, 32), "int8", 2, dst=True)
    for given in (Given((0.5, 0.25)), Given((0.25, 0.5)), Given(0.5, 0.25), Given(0.25, 0.5), Given((0.5, 0.25), 0.5), Given(0.5)):
        dst.put(dst.before)
        convert_and_check(src, dst, [0, 1], [1, 0], given)


def test_shared_groups_with_equal_scales() -> None:
    """Groups over K and V, or over layers, may have a scale of the caller that is the same in a group."""
    layout = planar("[b] l h <>", plane("data", "int8", "o t d", "d", 64), plane("scale", E4M3, "t", shared="o"))
    src, dst = Side(Own("[b] l h o t d"), (3, 2, 2, 4, 64), "bfloat16", 3), Side(layout, (3, 2, 2, 4, 64), "bfloat16", 3, dst=True)
    convert_and_check(src, dst, [0, 2], [1, 0], Given((0.5, 2.0, 0.01)))
