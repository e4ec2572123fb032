"""Digests: the definition, for every layout and every part of one; transfers that compute and verify digests.

Expected values come from `digest_oracle`, with addresses of `oracle` and `plane_oracle`.  None of them shares code with kvbm.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from test_planes import shapes
from test_sections import Meant, Plain, Planar, cannot, divisors, drawn, moved, some

import digest_oracle
import kvbm
import matrix
import oracle
import plane_oracle
import strategies
from digest_oracle import MASK, Block
from few import few
from kvbm import BindError, BlockShape, DigestError, LayoutError, Model, PlanError, Pool
from kvbm.layout import spec
from kvbm.testing.digests import digest as defined
from memory import FakeCuda, numpy_views
from processes import FakeDriver

ROOT = Path(__file__).resolve().parents[2]
HEADS = matrix.names()
LATENTS = [name for name in matrix.further() if matrix.latent(name)]


# ---- what the oracles say ------------------------------------------------------------------------------------------


def contents(side: Any, block: int, packs: dict[str, int] | None = None) -> dict[str, tuple[list[str], np.ndarray]]:
    """Plane → axes, and the bytes of a block's items, ``[*axes, bytes of an item]``."""
    if isinstance(side, Planar):
        found = {}
        for plane in side.arena.placed.planes:
            positions = side.arena.of(plane, [block])[0]
            found[plane.name] = list(plane.extents), oracle.gather(side.buffer, positions, plane.itemsize)
        return found
    positions = side.arena.positions([block])[0]
    opaque = side.arena.placed.order.opaque
    if opaque:  # the bytes of the group as they lie there, in the order of the model's axes
        kept = [i for i, axis in enumerate("lohtd") if axis not in opaque]
        group = [i for i, axis in enumerate("lohtd") if axis in opaque]
        flat = positions.transpose(kept + group)
        shape = flat.shape
        flat = np.sort(flat.reshape(*shape[: len(kept)], -1), axis=-1).reshape(shape)
        positions = flat.transpose(np.argsort(kept + group))
    return {"": (list("lohtd"), oracle.gather(side.buffer, positions, side.arena.placed.itemsize))}


def expected(
    side: Any,
    ids: Sequence[int],
    meant: Meant = Meant(),  # noqa: B008  (immutable)
    tokens: Sequence[int] | None = None,
    held: Mapping[str, tuple[Sequence[int], int]] | None = None,
) -> list[int]:
    """Digests of blocks, or of units, of a part of a pool; 0 if the id is -1."""
    nt = side.pool.shape.nt
    unit, result = meant.unit or nt, []
    chosen = {axis: of for axis, of in meant.chosen.items() if axis != "planes"}
    planes = meant.chosen.get("planes")
    for number, one in enumerate(ids):
        if one == -1:
            result.append(0)
            continue
        block, k = divmod(one, nt // unit)
        parts = {}
        for name, (axes, data) in contents(side, block).items():
            if "t" in axes:
                data = data.take(range(k * unit, (k + 1) * unit), axis=axes.index("t"))
            parts[name] = axes, data
        first = k * unit if tokens is None else tokens[number]
        result.append(Block(parts, held).digest(first, chosen, [planes] if isinstance(planes, str) else planes))
    return result


def as_defined(side: Any, block: int, first: int = 0) -> int:
    """The same from `kvbm.testing`, which takes rows."""
    planes = {}
    for name, (order, data) in Block(contents(side, block)).rows.items():
        planes[name] = np.ascontiguousarray(data).reshape(*data.shape[: 1 + len(order)], -1)
    return defined(planes, first)


def require(error: Exception, pattern: str) -> None:
    assert re.search(pattern, str(error)), error


def digests(side: Any, *ids: Any, **rest: Any) -> list[int]:
    return [int(one) for one in side.pool.digest(*ids, **rest)]


# ---- layouts -------------------------------------------------------------------------------------------------------

ALIGNS = (0, 1, 2, 4, 8, 16, 12)
WAYS = ("steps", "rows", "scattered")


def sizes_of(name: str) -> Iterator[BlockShape]:
    """Shapes that the layout supports, with every width of elements in turn."""
    for number, sizes in enumerate(matrix.SHAPES):
        dtype = ("float16", "float32", "uint8", "float64")[(number + len(name)) % 4]
        nl, no, nh, nt, hd = sizes
        if matrix.latent(name):
            no = nh = 1
        yield BlockShape(nl=1 if matrix.scales(name) else nl, no=no, nh=nh, nt=nt, hd=hd, dtype=dtype)


@pytest.mark.parametrize("name", [*HEADS, *LATENTS])
def test_every_layout(name: str) -> None:
    """Many shapes, also of one element; bases at odd addresses, tables of every kind."""
    done = 0
    for number, shape in enumerate(sizes_of(name)):
        if math.prod(shape.sizes.values()) > 40000:
            continue
        try:
            side = Plain(name, shape, 3, align=ALIGNS[number % 7], how=WAYS[number % 3])
            side.arena.placed.check()
        except (oracle.IllegalError, LayoutError):
            continue
        want = expected(side, [2, 0, 1, 0])
        assert digests(side, [2, 0, -1, 1, 0]) == [*want[:2], 0, *want[2:]], shape
        assert as_defined(side, 2) == want[0]
        assert len(set(want)) == 3
        done += 1
    assert done > 2


@pytest.mark.parametrize("name", sorted(plane_oracle.TABLE))
def test_every_layout_of_planes(name: str) -> None:
    for number, shape in enumerate(shapes(name)):
        side = Planar(name, shape, 3, align=ALIGNS[number % 7], how=WAYS[number % 3])
        want = expected(side, [2, 0, 1])
        assert digests(side, [2, 0, -1, 1]) == [*want[:2], 0, want[2]], shape
        assert as_defined(side, 1, 7) == expected(side, [1], tokens=[7])[0] == digests(side, 1, tokens=7)[0]


def test_a_layout_with_a_pitch() -> None:
    shape = BlockShape(nl=2, no=2, nh=3, nt=8, hd=16, dtype="bfloat16")
    one = Plain("nhd", shape, 3)
    other = Pool.allocate(kvbm.load("vllm/tpu"), shape, 3)
    kvbm.convert(one.pool, other)
    assert other.digest().tolist() == expected(one, range(3))


def test_rows_of_every_length() -> None:
    """Cells of 1, 2, 4, 8 and 16 bytes, rows of one cell and of several; by elements too, if the layout has no rows."""
    for hd, dtype in itertools.product(
        (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48), ("uint8", "int16", "float32")
    ):
        shape = BlockShape(nl=2, no=1, nh=2, nt=3, hd=hd, dtype=dtype)
        for order in ("b l o h t d", "d b t l o h", "b l o d h t"):
            side = Plain(order, shape, 2, align=hd % 4)
            assert digests(side) == expected(side, range(2)), (order, hd, dtype)


def shares(dtype: str) -> Any:
    return BlockShape(nl=2, no=2, nh=2, nt=4, hd=24, dtype=dtype)


@pytest.mark.parametrize("dtype", plane_oracle.oracle.PAIRED)
def test_elements_that_share_a_byte(dtype: str) -> None:
    """Rows of bytes: the digest is that of as many uint8."""
    rng = np.random.default_rng(1)
    half = BlockShape(nl=2, no=2, nh=2, nt=4, hd=12, dtype="uint8")
    for name in ("nhd", "universal", "vllm/LBHNC", "operational"):
        try:
            pool = Pool.allocate(kvbm.load(name), shares(dtype), 3)
        except (LayoutError, kvbm.DTypeError):
            continue
        other = Pool.allocate(kvbm.load(name), half, 3)
        for a, b in zip(pool.arrays, other.arrays, strict=True):
            b[...] = rng.integers(0, 256, b.shape, np.uint8)
            np.asarray(a).reshape(-1).view(np.uint8)[:] = b.reshape(-1)
        assert pool.digest().tolist() == other.digest().tolist()


def test_elements_that_share_a_byte_along_another_axis() -> None:
    layout = spec.parse('order: "b l o h d t"')
    with pytest.raises(PlanError, match=r"share a byte along 't', and a digest's cells lie along 'd'"):
        Pool.allocate(layout, shares("int4"), 2).digest()


def test_any_order() -> None:
    """Axes split at random, in brackets, of every width: any legal layout."""
    rng = random.Random(5)
    for number in range(60):
        shape = BlockShape(
            nl=3, no=2, nh=4, nt=8, hd=rng.choice((6, 8, 16)), dtype=rng.choice(("uint8", "float16", "float32"))
        )
        side = Plain(drawn(rng, shape.sizes), shape, 2, align=ALIGNS[number % 7], how=WAYS[number % 3])
        try:
            assert digests(side) == expected(side, range(2)), side.pool
        except PlanError as error:
            require(error, "lie in several arrays|no common refinement")


@pytest.mark.parametrize(
    ("order", "hd"),
    [("b d%3 d/3 l o h t", 12), ("b d%6 d/6 l o h t", 24), ("b l o h t d/6 d%6", 12), ("b l d/6 o h t d%6", 12)],
)
def test_rows_that_are_split_beside_cells(order: str, hd: int) -> None:
    """A mode that crosses a cell is refused, unless the cells are still whole: then the digest is right."""
    side = Plain(order, BlockShape(nl=2, no=2, nh=2, nt=2, hd=hd, dtype="float32"), 2)
    try:
        assert digests(side) == expected(side, range(2))
    except PlanError as error:
        require(error, "no common refinement")
    else:
        assert order.endswith("d/6 d%6")


@given(strategies.one())
def test_layouts_at_random(case: Any) -> None:
    sizes, declared = case
    shape = BlockShape(**{f"n{a}" if a != "d" else "hd": n for a, n in sizes.sizes.items()}, dtype=sizes.dtype)
    try:
        arena = sizes.placed(declared.order, 2).layout_bytes(0)
        buffer = oracle.noise(arena.nbytes, 3)
        pool = Pool(spec.parse(declared.yaml), shape, numpy_views(arena, buffer, sizes.dtype))
    except (oracle.IllegalError, LayoutError):
        reject()

    class Side:
        pass

    side: Any = Side()
    side.arena, side.buffer, side.pool = arena, buffer, pool
    try:
        got = digests(side)
    except PlanError as error:
        require(error, "lie in several arrays|fused|common refinement")
        return
    assert got == expected(side, range(2))


# ---- parts ---------------------------------------------------------------------------------------------------------


def of_part(side: Any, meant: Meant, rng: random.Random, model: Model | None = None, held: Any = None) -> None:
    part = meant.of(side.pool)
    ids = [rng.randrange(part.num_ids) for _ in range(min(part.num_ids, 5))]
    ids.insert(1, -1)
    tokens = [rng.randrange(1 << 40) for _ in ids]
    assert part.digest(ids, model=model).tolist() == expected(side, ids, meant, held=held), (side.pool, meant)
    assert part.digest(ids, tokens=tokens, model=model).tolist() == expected(side, ids, meant, tokens, held), (
        side.pool,
        meant,
    )


def chosen(rng: random.Random, sizes: Mapping[str, int], unit: int, share: float) -> Meant:
    """Coordinates of some axes of units of so many tokens (0: of blocks); rows stay whole."""
    sizes = {axis: unit if axis == "t" and unit else n for axis, n in sizes.items()}
    return Meant(unit, {axis: some(rng, n) for axis, n in sizes.items() if rng.random() < share})


@pytest.mark.parametrize("name", few(HEADS, 15))
def test_parts(name: str) -> None:
    """Units of every divisor, alone and with coordinates of any axes but d."""
    rng = random.Random(name)
    order = matrix.orders()[name]
    shape = BlockShape(nl=2, no=2, nh=4, nt=32, hd=16, dtype=rng.choice(["float16", "float32"]))
    for number, unit in enumerate([0, *divisors(32)] * 2):
        side = Plain(name, shape, 3, how=WAYS[number % 3], align=ALIGNS[number % 7])
        meant = chosen(rng, {axis: n for axis, n in shape.sizes.items() if axis != "d"}, unit, 0.4 if number % 2 else 0)
        try:
            of_part(side, meant, rng)
        except PlanError:
            if not cannot(order, meant, 32):
                raise


@pytest.mark.parametrize("name", sorted(plane_oracle.TABLE))
def test_parts_of_planes(name: str) -> None:
    rng = random.Random(name)
    done = 0
    for shape in shapes(name)[:4]:
        for unit in (0, *divisors(shape[3])[:4]):
            side = Planar(name, shape, 3, align=ALIGNS[rng.randrange(7)])
            planes = rng.sample(side.arena.placed.planes, rng.randint(1, len(side.arena.placed.planes)))
            common = {a: n for a, n in planes[0].extents.items() if all(a in p.extents for p in planes) and a in "loht"}
            meant = chosen(rng, common, unit, 0.4)
            try:
                of_part(side, Meant(unit, {"planes": [plane.name for plane in planes], **meant.chosen}), rng)
                done += 1
            except PlanError as error:
                if not any(words in str(error) for words in ("share a byte", "split at", "digits")):
                    raise
    assert done > 2


def test_parts_of_rows() -> None:
    """Whole cells of a row have digests; parts of cells have none."""
    rng = random.Random(2)
    for dtype, hd, given_, right in (
        ("float16", 32, range(8, 24), True),
        ("float16", 32, range(8), True),
        ("float16", 32, [8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31], True),
        ("float32", 6, [0, 1, 4, 5], True),
        ("float32", 5, [3, 0], True),
        ("uint8", 7, 5, True),
        ("float16", 32, range(4), False),
        ("float16", 32, range(4, 12), False),
        ("float16", 32, range(4, 20), False),
        ("float16", 32, range(0, 32, 2), False),
        ("float16", 32, 3, False),
        ("float16", 32, [0, 9], False),
        ("float32", 6, range(1, 3), False),
        ("float32", 6, 5, False),
    ):
        shape = BlockShape(nl=2, no=2, nh=2, nt=4, hd=hd, dtype=dtype)
        for name in ("nhd", "universal", "b d l o h t"):
            side, meant = Plain(name, shape, 3), Meant(0, {"d": given_})
            if right:
                of_part(side, meant, rng)
            else:
                with pytest.raises(PlanError, match=r"axis 'd'.*whole cells"):
                    meant.of(side.pool).digest()


@pytest.mark.parametrize("what", ["h", "t", "d"])
def test_parts_of_a_group_without_an_order(what: str) -> None:
    shape = BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="float16")
    pool = Pool.allocate(kvbm.load("operational"), shape, 2)
    with pytest.raises(PlanError, match=r"opaque group \{t h d\}"):
        pool.section(**{what: range(1)}).digest()
    of_part(Plain("operational", shape, 2), Meant(0, {"l": 1, "o": 0}), random.Random(1))


def test_parts_of_fused_axes() -> None:
    """Parts of a fused axis that can be separated are digested; others are refused."""
    shape = BlockShape(nl=2, no=2, nh=4, nt=6, hd=8, dtype="float16")
    side = Plain("b l o (h t)/8 d (h t)%8", shape, 2)
    try:
        assert digests(side) == expected(side, range(2))
    except PlanError as error:
        require(error, "refinement|fused")
    with pytest.raises(PlanError, match=r"fused|axis 'h'"):
        side.pool.section(h=1).digest()


def test_a_model_of_ranks() -> None:
    """Layers of stages and heads of ranks, also replicated ones; sections of a rank."""
    rng = random.Random(3)
    whole = BlockShape(nl=6, no=2, nh=4, nt=8, hd=24, dtype="float16")
    for name, other in (("nhd", "universal"), ("universal", "vllm/BLHNC"), ("vllm/paged_attn_v0", "nhd")):
        whole = BlockShape(nl=6, no=2, nh=4, nt=8, hd=24 if "paged" not in name else 32, dtype="float16")
        all_of_it = Plain(name, whole, 2)
        want = digests(all_of_it, tokens=64)
        total = [0, 0]
        for layers, heads in itertools.product((range(2), (5, 3), range(2, 5, 2)), (range(1), (3, 1), range(2, 3))):
            held = {"l": (list(layers), 6), "h": (list(heads), 4)}
            rank = BlockShape(nl=len(layers), no=2, nh=len(heads), nt=8, hd=whole.hd, dtype="float16")
            side = Plain(other, rank, 2)
            kvbm.convert(all_of_it.pool.section(l=layers, h=heads), side.pool)
            model = Model(layers=layers, nl=6, heads=heads, nh=4)
            got = digests(side, tokens=64, model=model)
            assert got == expected(side, range(2), tokens=[64, 64], held=held)
            total = [(a + b) & MASK for a, b in zip(total, got, strict=True)]
            of_part(side, Meant(4, {"o": 1, "h": 0, "l": [1, 0]}), rng, model, held)
        assert total == want


def test_a_model_of_planes() -> None:
    name = "record/mla_fp8_planes"
    whole = Planar(name, (4, 1, 1, 4, 576, "bfloat16"), 2)
    want = digests(whole)
    total = [0, 0]
    for layers in (range(3), (3,)):
        shape = BlockShape(nl=len(layers), no=1, nh=1, nt=4, hd=576, dtype="bfloat16")
        stage = Pool.allocate(kvbm.load(name), shape, 2)
        kvbm.Transfer(whole.pool, stage).copy(layers=(range(layers[0], layers[-1] + 1), range(len(layers))))
        total = [
            (a + int(b)) & MASK for a, b in zip(total, stage.digest(model=Model(layers=layers, nl=4)), strict=True)
        ]
    assert total == want


@pytest.mark.parametrize("axis", ["l", "h"])
@pytest.mark.parametrize("names_it", [True, False])
@pytest.mark.parametrize("planes", [False, True])
def test_a_model_of_pools_with_one_coordinate(axis: str, names_it: bool, planes: bool) -> None:
    """Pools with one layer or head each: their order may leave the axis out, as its size is 1, but not the definition."""
    own = f"{axis} t d" if names_it else "t d"
    text = f'order: "b {own}"'
    if planes:
        scale = f"{axis} t" if names_it else "t"
        text = 'order: "b <data scale>"\n'
        text += f"planes: {{data: {{order: {own}, dtype: uint8}}, scale: {{order: {scale}, dtype: float32}}}}"
    rng, size = random.Random(f"{axis}{names_it}{planes}"), 3
    total, parts, whole = 0, dict[str, list[Any]](), dict[str, tuple[list[str], np.ndarray]]()
    for at in (1, 2, 0):
        shape = BlockShape(nl=1, no=1, nh=1, nt=4, hd=16, dtype="float16")
        side = Pool.allocate(spec.parse(text), shape, 1)
        raw = memory(side)
        raw[:] = np.frombuffer(rng.randbytes(raw.size), np.uint8)
        data, scale = (raw[:64].reshape(1, 4, 16, 1), raw[64:].reshape(1, 4, 4)) if planes else (raw.reshape(1, 4, 16, 2), None)
        mine = {"data" if planes else "": ([axis, "t", "d"], data)} | ({"scale": ([axis, "t"], scale)} if planes else {})
        model = Model(layers=[at], nl=size) if axis == "l" else Model(heads=[at], nh=size)
        got = int(side.digest(tokens=8, model=model)[0])
        assert got == Block(mine, {axis: ([at], size)}).digest(8)
        total += got
        for name, (axes, one) in mine.items():
            parts.setdefault(name, [None] * size)[at] = one
            whole[name] = axes, one
    assert total & MASK == Block({name: (axes, np.concatenate(parts[name])) for name, (axes, _) in whole.items()}).digest(8)


SHARED = """
order: "b <data scale>"
planes: {data: {order: %s, dtype: uint8}, scale: {order: %s, dtype: float32, shared: %s}}
"""


@pytest.mark.parametrize("axis", ["l", "h"])
@pytest.mark.parametrize("own", ["t d", "{} t d"])
def test_a_part_of_an_axis_that_a_plane_shares(axis: str, own: str) -> None:
    """One value for all layers is part of no layer.  Without its plane there is a digest, which is the definition's."""
    side = Pool.allocate(spec.parse(SHARED % (own.format(axis), "t", axis)), "nl=1,no=1,nh=1,nt=4,hd=16,dtype=float16", 1)
    raw = memory(side)
    raw[:] = np.arange(raw.size)
    for at in (0, 1):
        model = Model(layers=[at], nl=2) if axis == "l" else Model(heads=[at], nh=2)
        with pytest.raises(PlanError, match=rf"axis '{axis}': plane 'scale' of .*; expected a pool with all 2"):
            side.digest(model=model)
        planes = {"data": ([axis, "t", "d"], raw[:64].reshape(1, 4, 16, 1)), "scale": (["t"], raw[64:].reshape(4, 4))}
        want = Block(planes, {axis: ([at], 2)}).digest(0, planes=["data"])
        assert side.section(planes="data").digest(model=model).tolist() == [want]
    sizes = "nl=2,nh=1" if axis == "l" else "nl=1,nh=2"
    everything = Pool.allocate(spec.parse(SHARED % (f"{axis} t d", "t", axis)), f"{sizes},no=1,nt=4,hd=16,dtype=float16", 1)
    model = Model(layers=[0, 1], nl=2) if axis == "l" else Model(heads=[0, 1], nh=2)
    assert everything.digest(model=model).tolist() == everything.digest().tolist()


def memory(pool: Pool) -> np.ndarray:
    """The bytes of a pool of one dense array."""
    [array] = pool.arrays
    return array.reshape(-1).view(np.uint8)


MODELS: list[tuple[dict[str, Any], str]] = [
    ({"layers": range(2)}, "axis 'l': expected its coordinates and how many the model has"),
    ({"nh": 4}, "axis 'h': expected its coordinates and how many the model has"),
    ({"layers": range(3), "nl": 6}, "axis 'l': expected a model with the pool's 2 coordinates, got 3"),
    ({"heads": (0, 4), "nh": 4}, "axis 'h': expected coordinates from 0 to 3"),
    ({"heads": (0, -1), "nh": 4}, "axis 'h': expected coordinates from 0 to 3"),
    ({"heads": range(2), "nh": 4, "layers": (0, 1)}, "axis 'l': expected its coordinates and how many"),
    ({"heads": (1, 1), "nh": 4}, "axis 'h'.*once"),
    ({"layers": 2, "nl": 4}, "Model: layers: expected a range, or a list of integers, got 2"),
    ({"layers": (0, 0.5), "nl": 4}, "Model: layers: expected a range, or a list of integers"),
    ({"layers": "ab", "nl": 4}, "Model: layers: expected a range, or a list of integers, got 'ab'"),
    ({"heads": range(2), "nh": "4"}, "Model: nh: expected an integer, got '4'"),
    ({"heads": range(2), "nh": 0}, "axis 'h': expected a model of 1 to"),
    ({"heads": range(2), "nh": 1 << 70}, "axis 'h': expected a model of 1 to"),
    ({"heads": range(1 << 40), "nh": 1 << 41}, "axis 'h': expected a model with the pool's 2 coordinates"),
    ({"heads": [], "nh": 4}, "axis 'h': expected coordinates from 0 to 3"),
]


@pytest.mark.parametrize(("given_", "match"), MODELS)
def test_models_that_are_refused(given_: dict[str, Any], match: str) -> None:
    pool = Pool.allocate(kvbm.load("nhd"), BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float32"), 2)
    with pytest.raises(PlanError, match=match):
        pool.digest(model=Model(**given_))


def test_a_model_of_lists() -> None:
    pool = Plain("nhd", BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float32"), 2).pool
    want = pool.digest(model=Model(layers=(1, 3), nl=4)).tolist()
    for given_ in ([1, 3], np.array([1, 3]), range(1, 4, 2)):
        assert pool.digest(model=Model(layers=given_, nl=4)).tolist() == want
    one = Pool.allocate(kvbm.load("nhd"), BlockShape(nl=1, no=2, nh=2, nt=4, hd=8, dtype="float32"), 2)
    with pytest.raises(PlanError, match="axis 'l': expected coordinates from 0 to 0"):
        one.digest(model=Model(layers=(5,), nl=1))
    for wrong in (5, {}, "model"):
        with pytest.raises(PlanError, match=r"model: expected a kvbm\.Model, got"):
            pool.digest(model=wrong)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r"model: expected a kvbm\.Model, got"):
            kvbm.Transfer(pool, one, model=wrong).copy([], [], layers=(range(1), range(1)), digests=np.zeros(0, np.uint64))  # type: ignore[arg-type]


def test_it_is_a_sum() -> None:
    """Over every axis, planes, units, block sizes and positions: the parts' digests add up to the whole's."""
    shape = BlockShape(nl=3, no=2, nh=4, nt=32, hd=16, dtype="float32")
    pool = Plain("vllm/LBHNC", shape, 3).pool
    want = pool.digest()
    with np.errstate(over="ignore"):
        for axis, parts_ in {
            "l": (0, [2, 1]),
            "o": (1, 0),
            "h": ([3, 0], range(1, 3)),
            "t": (range(7), range(7, 32)),
        }.items():
            assert np.array_equal(sum(pool.section(**{axis: part}).digest() for part in parts_), want), axis
        assert np.array_equal(pool.section(d=range(8)).digest() + pool.section(d=range(8, 16)).digest(), want)
        for unit in divisors(32):
            assert np.array_equal(pool.units(unit).digest().reshape(3, -1).sum(1), want), unit
        other = Pool.allocate(kvbm.load("universal"), BlockShape(nl=3, no=2, nh=4, nt=8, hd=16, dtype="float32"), 12)
        kvbm.convert(pool.units(8), other)
        tokens = np.arange(12) * 8 + 1000
        assert np.array_equal(other.digest(tokens=tokens).reshape(3, 4).sum(1), pool.digest(tokens=[1000, 1032, 1064]))
        planes = Planar("vllm/fp8_ds_mla", shapes("vllm/fp8_ds_mla")[0], 2).pool
        some_ = [planes.section(planes=name).digest() for name in ("rope", ["latent", "scale"])]
        assert np.array_equal(some_[0] + some_[1], planes.digest())


# ---- ids, positions, results ---------------------------------------------------------------------------------------

SMALL = BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float16")


def test_ids_of_every_kind() -> None:
    import torch

    side = Plain("nhd", SMALL, 5)
    want = expected(side, range(5))
    for ids in (
        [3, 0, 3, -1],
        (3, 0, 3, -1),
        np.array([3, 0, 3, -1]),
        np.array([3, 0, 3, -1], np.int32),
        torch.tensor([3, 0, 3, -1]),
    ):
        got = side.pool.digest(ids)
        assert got.dtype == np.uint64 and got.tolist() == [want[3], want[0], want[3], 0]
    assert side.pool.digest(4).tolist() == [want[4]] and side.pool.digest().tolist() == want
    for none in ([], np.array([], np.int64), np.array([], np.int32)):
        assert side.pool.digest(none).shape == (0,)
    many = np.random.default_rng(1).integers(0, 5, 3000)
    assert side.pool.digest(many).tolist() == [want[i] for i in many]
    for bad in ([5], [-2], [0, 99]):
        with pytest.raises(BindError, match="ids"):
            side.pool.digest(bad)
    with pytest.raises((BindError, TypeError)):
        side.pool.digest([0.5])

    class Number:
        def __index__(self) -> int:
            return 3

    assert side.pool.units(2).digest([Number(), 3]).tolist() == expected(side, [3, 3], Meant(2))


def test_positions_of_every_kind() -> None:
    import torch

    side = Plain("universal", SMALL, 4)
    for tokens in (
        [9, 0, 1 << 40],
        np.array([9, 0, 77]),
        np.array([9, 0, 77], np.int32),
        torch.tensor([9, 5, 4]),
        (1, 2, 3),
    ):
        assert digests(side, [2, 1, 2], tokens=tokens) == expected(side, [2, 1, 2], tokens=[int(t) for t in tokens])
    for one in (0, 5, np.int64(5), 1 << 45):
        assert digests(side, [2, 1], tokens=one) == expected(side, [2, 1], tokens=[int(one)] * 2)
    units = side.pool.units(2)
    assert units.digest([7, 0, -1]).tolist() == expected(side, [7, 0, -1], Meant(2))
    assert units.digest(5).tolist() == expected(side, [5], Meant(2))
    assert units.digest([7, 0], tokens=3).tolist() == expected(side, [7, 0], Meant(2), [3, 3])
    for bad, match in (
        ([1, 2], "tokens: expected 3"),
        ([0, -1, 0], r"tokens\[1\] is -1"),
        (-5, r"tokens\[0\] is -5"),
        (1 << 63, "expected a position below 2"),
    ):
        with pytest.raises(BindError, match=match):
            side.pool.digest([2, 1, 2], tokens=bad)
    with pytest.raises((BindError, TypeError)):
        side.pool.digest([2], tokens=[0.5])


def test_results_of_every_kind() -> None:
    import torch

    side = Plain("nhd", SMALL, 5)
    want = np.array(expected(side, [3, -1, 0]), np.uint64)
    for out in (
        np.full(3, 7, np.uint64),
        np.full(3, 7, np.int64),
        torch.full((3,), 7),
        torch.full((3,), 7).to(torch.uint64),
    ):
        assert side.pool.digest([3, -1, 0], out=out) is out
        got = np.asarray(out)
        assert np.array_equal(got.view(np.uint64), want)
    one = np.zeros(8, np.uint64)[3:4]
    side.pool.digest([3], out=one)
    assert one[0] == want[0]
    side.pool.digest([], out=np.zeros(0, np.uint64))


WRONG: list[tuple[Any, str]] = [
    (np.zeros(2, np.uint64), "expected a contiguous array of 3"),
    (np.zeros((3, 1), np.uint64), "expected a contiguous array of 3"),
    (np.zeros(6, np.uint64)[::2], "expected a contiguous array of 3"),
    (np.zeros(3, np.uint32), "uint64 or int64"),
    (np.zeros(3, np.float64), "uint64 or int64"),
]


@pytest.mark.parametrize(("out", "match"), WRONG)
def test_results_that_are_refused(out: Any, match: str) -> None:
    side = Plain("nhd", SMALL, 5)
    with pytest.raises(BindError, match=match):
        side.pool.digest([3, -1, 0], out=out)
    with pytest.raises(BindError, match=match):
        kvbm.Transfer(side.pool, Plain("nhd", SMALL, 5).pool).copy([0, 1, 2], digests=out)
    readonly = np.zeros(3, np.uint64)
    readonly.flags.writeable = False
    with pytest.raises(BindError, match="writable array"):
        side.pool.digest([3, -1, 0], out=readonly)
    apart = np.frombuffer(bytearray(25), np.uint8)[1:].view(np.uint64)
    with pytest.raises(BindError, match="multiple of 8"):
        side.pool.digest([3, -1, 0], out=apart)
    for name in ("stream", "wait"):
        with pytest.raises(BindError, match=f"{name}: the pool is on the CPU"):
            side.pool.digest([0], **{name: 5})


@pytest.mark.parametrize(
    "wrong",
    [5, [0, 5], [-2], [1.5], ["a"], "ab", b"ab", True, [True], 1 << 70, [1 << 70], np.zeros((2, 2), int), np.zeros(2), range(9),
     np.array(7), object(), {}, {0}, np.uint64([1 << 63]), np.zeros(2, "M8[s]"), np.ma.masked_array([1]), FakeCuda((2,), "int64")],
    ids=lambda given: type(given).__name__ if " at 0x" in repr(given) else repr(given),
)  # fmt: skip
def test_ids_that_are_refused(wrong: Any) -> None:
    """Errors call them ids: a digest has no source and no destination."""
    pool = Plain("nhd", SMALL, 5).pool
    for part, most in ((pool, 4), (pool.whole, 4), (pool.section(l=0), 4), (pool.units(SMALL.nt), 4)):
        with pytest.raises(BindError, match=r"^ids(\[\d+\] is|(\[\d+\])?: expected)") as refused:
            part.digest(wrong)
        assert "src" not in str(refused.value) and "dst" not in str(refused.value)
        if isinstance(wrong, int) and wrong == 5:
            assert f"expected 0 to {most}" in str(refused.value)


def changed(how: str, torch: Any) -> tuple[Any, Any]:
    """Memory for three digests, and a function that makes the same object unsuitable."""
    array = np.zeros(3, np.uint64)
    tensor = torch.zeros(3, dtype=torch.int64)
    match how:
        case "locked":
            return array, lambda: array.setflags(write=False)
        case "shape":
            return array, lambda: setattr(array, "shape", (1, 3))
        case "dtype":
            return array, lambda: setattr(array, "dtype", np.float64)
        case "resize":
            return array, lambda: array.resize(2, refcheck=False)
        case "state":
            return array, lambda: array.__setstate__((1, (3,), np.dtype("f8"), False, bytes(24)))
        case "set_":
            return tensor, lambda: tensor.set_(torch.zeros(2, dtype=torch.int64))
        case "resize_":
            return tensor, lambda: tensor.resize_(4)
        case "data":
            return tensor, lambda: setattr(tensor, "data", torch.zeros(6, dtype=torch.int64)[::2])
        case "storage":
            return tensor, lambda: tensor.untyped_storage().resize_(16)
    raise AssertionError(how)


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@pytest.mark.parametrize("how", ["locked", "shape", "dtype", "resize", "state", "set_", "resize_", "data", "storage"])
def test_results_that_change_between_two_calls(how: str, torch: Any) -> None:
    """The same object or address may be another array on the next call: nothing about it is cached."""
    src, dst = Plain("nhd", SMALL, 5), Plain("universal", SMALL, 5, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    for call in (
        lambda out: move.copy([3, -1, 0], [0, 1, 2], digests=out),
        lambda out: src.pool.digest([3, -1, 0], out=out),
    ):
        out, change = changed(how, torch)
        call(out)
        change()
        with pytest.raises(BindError, match="digests: "):
            call(out)


def test_results_that_move_between_two_calls(torch: Any) -> None:
    """If the object has other memory of the same kind, the new memory is written."""
    src, dst = Plain("nhd", SMALL, 5), Plain("universal", SMALL, 5, dst=True)
    move, want = kvbm.Transfer(src.pool, dst.pool), expected(src, [3, 0])
    tensor, first = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    tensor.set_(first)
    for _ in range(3):
        move.copy([3, 0], [0, 1], digests=tensor)
        assert (first.numpy().view(np.uint64) == want).all()
        first = torch.zeros(2, dtype=torch.int64)
        tensor.set_(first)
    for _ in range(20):  # names of arrays that are gone are used again
        out = np.zeros(2, np.uint64)
        move.copy([3, 0], [0, 1], digests=out)
        assert out.tolist() == want
        del out


def test_results_in_a_pool() -> None:
    """Results inside a pool would be digested or overwritten by the copy."""
    shape = BlockShape(nl=1, no=2, nh=2, nt=4, hd=8, dtype="uint64")
    src, dst = (Pool.allocate(kvbm.load("universal"), shape, 4) for _ in range(2))
    before = [pool.arrays[0].tobytes() for pool in (src, dst)]
    for pool in (src, dst):
        inside = pool.arrays[0].reshape(-1)
        for out in (inside[:4], inside[-4:]):
            with pytest.raises(BindError, match="digests: expected separate memory"):
                pool.digest(out=out)
            with pytest.raises(BindError, match="digests: expected separate memory"):
                kvbm.Transfer(src, dst).copy(digests=out)
    assert before == [pool.arrays[0].tobytes() for pool in (src, dst)]
    src.digest([], out=src.arrays[0].reshape(-1)[:0])


def test_a_pool_that_is_closed() -> None:
    pool = Pool.allocate(kvbm.load("nhd"), SMALL, 2)
    pool.digest()
    pool.close()
    with pytest.raises(BindError, match="closed"):
        pool.digest()


# ---- transfers, on the host ----------------------------------------------------------------------------------------


def transferred(s: Any, d: Any, rng: random.Random, verify: bool) -> None:
    n = rng.randint(1, min(s.pool.num_blocks, d.pool.num_blocks))
    src_ids, dst_ids = rng.sample(range(s.pool.num_blocks), n), rng.sample(range(d.pool.num_blocks), n)
    if n > 2:
        src_ids[1], dst_ids[2] = -1, -1
    tokens = [rng.randrange(1 << 40) for _ in src_ids] if rng.random() < 0.5 else None
    out = np.full(n, 7, np.uint64)
    kvbm.Transfer(s.pool, d.pool, verify=verify).copy(src_ids, dst_ids, digests=out, tokens=tokens).synchronize()
    assert np.array_equal(d.buffer, moved(s, d, Meant(), Meant(), src_ids, dst_ids)), (s.pool, d.pool)
    kept = [k for k in range(n) if src_ids[k] != -1 != dst_ids[k]]
    at = None if tokens is None else [tokens[k] for k in kept]
    want = expected(s, [src_ids[k] for k in kept], tokens=at)
    assert [int(out[k]) for k in kept] == want and not any(out[k] for k in range(n) if k not in kept), (s.pool, d.pool)
    if d.opaque == s.opaque:
        assert expected(d, [dst_ids[k] for k in kept], tokens=at) == want, (s.pool, d.pool)


@pytest.mark.parametrize("name", few(HEADS, 15))
def test_copies_digest(name: str) -> None:
    """To and from other layouts, fused or not: digests of the source, and afterwards of the destination."""
    rng = random.Random(name)
    for number in range(6):
        other = rng.choice(HEADS)
        hd, dtype = rng.choice(((16, "float16"), (32, "uint8"), (16, "float32"), (64, "float16")))
        shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=hd, dtype=dtype)
        for pair in ((name, other), (other, name)):
            s = Plain(pair[0], shape, 5, how=WAYS[number % 3], align=ALIGNS[rng.randrange(7)])
            d = Plain(pair[1], shape, 6, dst=True, align=ALIGNS[rng.randrange(7)])
            try:
                kvbm.plan(s.pool.layout, d.pool.layout, shape)
            except PlanError:
                continue
            transferred(s, d, rng, bool(number % 2))


@pytest.mark.parametrize(
    "other",
    [
        "nhd",
        "operational_nhd",
        "vllm/aiter_shuffle",
        "universal",
        "vllm/paged_attn_v0",
        "vllm/ascend_nz",
        "operational",
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_groups_without_an_order(other: str, back: bool) -> None:
    """They are copied as they are, and digested as the source's contents on both sides."""
    shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=16, dtype="float16")
    names = ("operational", other)[:: -1 if back else 1]
    s, d = Plain(names[0], shape, 5), Plain(names[1], shape, 6, dst=True)
    try:
        kvbm.plan(s.pool.layout, d.pool.layout, shape)
    except PlanError:
        return
    transferred(s, d, random.Random(1), verify=True)


@pytest.mark.parametrize(("src", "dst"), few(plane_oracle.pairs(), 28))
def test_copies_of_planes_digest(src: str, dst: str) -> None:
    rng = random.Random(src + dst)
    for number, shape in enumerate(shapes(src)):
        s = Planar(src, shape, 4, align=ALIGNS[number % 7])
        d = Planar(dst, shape, 5, dst=True, align=ALIGNS[number * 3 % 7])
        transferred(s, d, rng, bool(number % 2))


def test_fused_is_the_rule_for_rows() -> None:
    """Copies of rows of whole cells between layouts compute digests in the same kernel."""
    shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=64, dtype="float16")
    for src, dst in (
        ("nhd", "universal"),
        ("universal", "nhd"),
        ("nhd", "vllm/LBHNC"),
        ("vllm/LBNHC", "hnd"),
        ("nhd", "nhd"),
    ):
        made = kvbm.Transfer(Plain(src, shape, 2).pool, Plain(dst, shape, 2, dst=True).pool)
        assert not isinstance(made._executor.digested(None).digests.direct, str), (src, dst)


@pytest.mark.parametrize(
    ("src", "dst", "hd", "dtype"),
    [
        ("nhd", "b l o h d t", 32, "float64"),
        ("nhd", "b h/2 o d%4 l t h%2 d/4", 32, "uint8"),
        ("vllm/ascend_nz", "nhd", 12, "float32"),
    ],
)
def test_what_no_kernel_fuses_is_digested_beside_the_copy(src: str, dst: str, hd: int, dtype: str) -> None:
    shape = BlockShape(nl=3, no=2, nh=4, nt=16, hd=hd, dtype=dtype)
    s, d = Plain(src, shape, 3), Plain(dst, shape, 3, dst=True)
    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        out = np.zeros(2, np.uint64)
        move.copy([2, 0], [1, 2], digests=out).synchronize()
        assert out.tolist() == expected(s, [2, 0])
        assert "by a pass of their own" in move.explain()


def test_layers_of_a_copy() -> None:
    shape = BlockShape(nl=4, no=2, nh=2, nt=8, hd=16, dtype="float16")
    stage = BlockShape(nl=2, no=2, nh=2, nt=8, hd=16, dtype="float16")
    s, d = Plain("nhd", shape, 3), Plain("universal", stage, 3, dst=True)
    out = np.zeros(2, np.uint64)
    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        move.copy([2, 0], [0, 1], layers=(range(1, 3), range(2)), digests=out).synchronize()
        assert out.tolist() == expected(s, [2, 0], Meant(0, {"l": range(1, 3)}))
        assert out.tolist() == expected(d, [0, 1], held={"l": ([1, 2], 4)})
    whole = Plain("universal", shape, 3, dst=True)
    with kvbm.Transfer(d.pool, whole.pool, model=Model(layers=range(1, 3), nl=4)) as move:
        move.copy([0, 1], [2, 1], layers=(range(2), range(1, 3)), digests=out)
        assert out.tolist() == expected(s, [2, 0], Meant(0, {"l": range(1, 3)}))


def test_positions_want_digests() -> None:
    s, d = Plain("nhd", SMALL, 3), Plain("universal", SMALL, 3, dst=True)
    with pytest.raises(BindError, match="tokens: only digests use positions"):
        kvbm.Transfer(s.pool, d.pool).copy([0], [0], tokens=[0])
    with pytest.raises(BindError, match="tokens: expected 2"):
        kvbm.Transfer(s.pool, d.pool, verify=True).copy([0, 1], [0, 1], tokens=[0])


def test_one_pool() -> None:
    s = Plain("nhd", SMALL, 6)
    out = np.zeros(2, np.uint64)
    want = expected(s, [0, 1])
    kvbm.Transfer(s.pool, s.pool, verify=True).copy([0, 1], [4, 5], digests=out).synchronize()
    assert out.tolist() == want == expected(s, [4, 5])


@pytest.mark.slow  # 0.7 s
@pytest.mark.sanitize
def test_memory_of_a_copy_that_failed_is_not_used_again() -> None:
    """Work that was enqueued before the failure may write it later: it must not be another copy's digests."""
    from kvbm.digest.run import Proof

    class Pinned:
        given = 0

        def give(self, _memory: np.ndarray) -> None:
            self.given += 1

    pairs, pinned = kvbm._core.Pairs([4], [0], 8, 8), Pinned()
    for fails in (True, False):
        proof = Proof("a → b", 1, -1, [], pairs, lambda _: "")
        proof._pinned = pinned
        with contextlib.suppress(RuntimeError), proof:
            if fails:
                raise RuntimeError
        del proof
        gc.collect()
        assert pinned.given == (0 if fails else 1)


@pytest.mark.slow  # 0.4 s
@pytest.mark.sanitize
def test_the_error_of_a_proof() -> None:
    from kvbm.digest.run import Proof

    untold: list[DigestError] = []
    pairs = kvbm._core.Pairs([4, 5, 6], [0, 1, 2], 8, 8)
    proof = Proof("a → b", 3, -1, untold, pairs, lambda wrong: f"looked into {wrong}")
    memory = proof._memory
    memory[:] = [1, 2, 3, 1, 9, 3]
    with pytest.raises(
        DigestError,
        match=r"a → b: 1 of 3 pairs differ, the first is pair 1 \(5 → 1\): the source's digest is 0x0+2.*\nlooked into \(1,\)",
    ) as info:
        proof()
    assert info.value.pairs == (1,)
    del info, proof
    gc.collect()
    assert not untold, "it was asked for"
    for is_enqueued in (False, True):
        other = Proof("a → b", 3, -1, untold, pairs, lambda _: "")
        other._memory[:] = [1, 2, 3, 1, 2, 4]
        if is_enqueued:
            done = kvbm._core.finished()
            other.watch(done)
            del other
            assert not untold, "who has the Done may still ask"
            del done
        else:
            del other
        assert [error.pairs for error in untold] == [(2,)] * is_enqueued


def test_an_error_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiter for the copy gets the error; the next copy reports only its own."""
    from kvbm.digest.run import Proof

    s, d = Plain("nhd", SMALL, 3), Plain("universal", SMALL, 3, dst=True)
    watch = Proof.watch

    def spoil(proof: Any, done: Any) -> None:
        proof._memory[0] ^= np.uint64(1)
        watch(proof, done)

    with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
        with monkeypatch.context() as patch:
            patch.setattr(Proof, "watch", spoil)
            wrong = move.copy([0, 1], [1, 2])
        with pytest.raises(DigestError, match="1 of 2 pairs differ, the first is pair 0"):
            wrong.synchronize()
        move.copy([0, 1], [1, 2]).synchronize()
        with pytest.raises(DigestError, match="1 of 2 pairs differ, the first is pair 0"):
            wrong.synchronize()


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint8"])
@pytest.mark.parametrize("other", ["b l o h d t", "b d l o h t", "b l t o d h"])
def test_elements_of_every_width_that_change_places(other: str, dtype: str) -> None:
    """If no copying kernel can compute the digest, a separate one reads one side."""
    rng = random.Random(other + dtype)
    shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=16, dtype=dtype)
    for pair in (("nhd", other), (other, "nhd")):
        s, d = (Plain(order, shape, 4, dst=bool(side)) for side, order in enumerate(pair))
        transferred(s, d, rng, verify=True)


@pytest.mark.parametrize(
    ("given", "is_whole"), [([0, 1, 7, 4, 6, 2, 5, 3], False), ([8, *range(7), 7], False), (range(4, 12), True)]
)
def test_a_destination_that_parts_cells(given: Any, is_whole: bool) -> None:
    """A cell whose elements are apart in the destination has no digest there; a part of it is not used as one."""
    shape = BlockShape(nl=1, no=2, nh=2, nt=2, hd=16, dtype="float16")
    s, d = Plain("nhd", shape, 2), Plain("hnd", shape, 2, dst=True)
    n = 8
    src, dst = s.pool.section(d=range(n)), d.pool.section(d=list(given)[:n])
    move = kvbm.Transfer(src, dst, verify=True)
    if is_whole:
        move.copy([0], [1]).synchronize()
    else:
        with pytest.raises(PlanError, match="parts rows at other elements than a digest's cells"):
            move.copy([0], [1])
    kvbm.Transfer(src, dst).copy([0], [1]).synchronize()
    chosen = Meant(0, {"d": list(given)[:n]})
    assert np.array_equal(d.buffer, moved(s, d, Meant(0, {"d": range(n)}), chosen, [0], [1]))


# ---- transfers, on a driver that is not one --------------------------------------------------------------------------

DIRECTIONS = ("d2d", "d2h", "h2d")
STRATEGIES = ("direct", "staged", "engine", "auto")


class TestOnTheFakeDriver:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_every_strategy(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """The copy's bytes and its digests, in any order of the streams."""
        fake_gpu("digests.every_strategy", direction, strategy)

    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    def test_two_gpus(self, fake_gpu: FakeDriver, strategy: str) -> None:
        fake_gpu("digests.every_strategy", "p2p", strategy, FAKE_DEVICES="2")

    def test_pools(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.pools")

    @pytest.mark.usefixtures("torch")
    @pytest.mark.parametrize("knob", ["0", "1"])
    def test_pinned_to_the_end(self, fake_gpu: FakeDriver, knob: str) -> None:
        fake_gpu("digests.pinned_to_the_end", FAKE_NO_RANGES=knob)

    def test_elements_are_turned(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.turned")

    def test_all_planes(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.all_planes")

    @pytest.mark.parametrize(("direction", "strategy"), [("d2d", "direct"), ("d2h", "direct"), ("h2d", "staged")])
    def test_ids_on_the_gpu(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        fake_gpu("digests.ids_on_the_gpu", direction, strategy)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    def test_graphs(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        fake_gpu("digests.graphs", direction, strategy)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    def test_verified(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        fake_gpu("digests.verified", direction, strategy)

    def test_beyond_reach(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.beyond_reach", FAKE_DEVICES="2", FAKE_PEERS="0")

    def test_explain_and_digests_prepare_nothing_again(self, fake_gpu: FakeDriver) -> None:
        """Red: both looked the kernels of a prepared transfer up again, and digests made its launches again."""
        fake_gpu("digests.prepared_once", FAKE_DEVICES="2")

    def test_nothing_grows(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.nothing_grows")

    def test_captured_copies_stand_in_no_line(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.captured_copies_stand_in_no_line")

    def test_told_once(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.told_once")

    def test_told_when_dropped(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.told_when_dropped")

    def test_memory_that_is_still_written(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.memory_that_is_still_written")

    def test_a_captured_digest_wants_memory(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.a_captured_digest_wants_memory")

    def test_memory_that_digests_share(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("digests.memory_that_digests_share")

    @pytest.mark.slow
    @pytest.mark.parametrize("copy", ["direct", "staged", "engine", "pool"])
    def test_a_call_that_fails(self, fake_gpu: FakeDriver, copy: str) -> None:
        met = set(fake_gpu("digests.failing", copy).split())
        assert {"cuLaunchKernel", "cuMemAlloc_v2", "cuEventRecord"} <= met, met


# ---- the document, and how its numbers were found --------------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "reference" / "digest.md").read_text(encoding="utf-8")


def tool(name: str) -> Any:
    found = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def constants() -> dict[str, list[int]]:
    """The document's constants, by name."""
    [text] = re.findall(r"```text\n(fold.*?)```", DOCUMENT, re.DOTALL)
    return {
        name: [int(one, 16) for one in re.findall("0x[0-9a-f]{16}", body)]
        for name, body in re.findall(r"^(weight|content)\(\w\) +=(.*?)(?=^\w|\Z)", text, re.DOTALL | re.MULTILINE)
    }


def by_hand(key: int, cell: bytes) -> tuple[int, int, int]:
    """Weight, content and digest of a cell, computed step by step as in the document."""

    def fold(x: int) -> int:
        return x ^ x >> 32

    (first, second), (start, *factors) = constants()["weight"], constants()["content"]
    cell += bytes(16 - len(cell))
    content = start
    for i in range(4):
        content = (content + int.from_bytes(cell[4 * i : 4 * i + 4], "little") * factors[i]) % 2**64
    weight = fold(fold(key * first % 2**64) * second % 2**64) | 1
    return weight, fold(content), weight * fold(content) % 2**64


class TestDocument:
    vectors = json.loads(re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)[0])

    def test_cells(self) -> None:
        for one in self.vectors["cells"]:
            found = by_hand(one["key"], bytes.fromhex(one["bytes"]))
            assert [f"{x:#018x}" for x in found] == [one["weight"], one["content"], one["digest"]]

    @pytest.mark.parametrize("number", range(5))
    def test_blocks(self, number: int) -> None:
        """Computed from the document alone, by kvbm, and by the tests' oracle."""
        one = self.vectors["blocks"][number]
        planes, lanes = one["planes"], 0
        for plane in planes.values():
            lanes += math.prod(plane["model"].values()) * (plane["row"] // math.gcd(plane["row"], 16))
        assert lanes == one["lanes"]
        total = before = 0
        arrays, tables = {}, {}
        for name in sorted(planes):
            plane = planes[name]
            cell = math.gcd(plane["row"], 16)
            coordinates = list(itertools.product(range(plane["tokens"]), *plane["held"].values()))
            data = bytes((i * plane["factor"] + 1) % 251 for i in range(len(coordinates) * plane["row"]))
            for number_, (t, *where) in enumerate(coordinates):
                place = 0
                for size, c in zip(plane["model"].values(), where, strict=True):
                    place = place * size + c
                for k in range(plane["row"] // cell):
                    key = (one["first"] + t) * lanes + before + place * (plane["row"] // cell) + k
                    at = number_ * plane["row"] + k * cell
                    total += by_hand(key, data[at : at + cell])[2]
            before += math.prod(plane["model"].values()) * (plane["row"] // cell)
            shape = plane["tokens"], *map(len, plane["held"].values()), plane["row"]
            arrays[name] = np.frombuffer(data, np.uint8).reshape(shape)
            tables[name] = ["t", *plane["held"], "d"], arrays[name][..., None]
        assert f"{total % 2**64:#018x}" == one["digest"]
        held = {a: (c, plane["model"][a]) for plane in planes.values() for a, c in plane["held"].items()}
        assert Block(tables, held).digest(one["first"]) == total % 2**64
        if all(c == list(range(plane["model"][a])) for plane in planes.values() for a, c in plane["held"].items()):
            assert defined(arrays, one["first"]) == total % 2**64

    def test_the_constants_are_the_search_s(self) -> None:
        """Only near the best set, as the whole search takes half a minute."""
        search = tool("digest_constants")
        assert search.best(range(4370, 4377)) == (search.quality(4373), 4373)
        assert round(math.log2(search.quality(4373)), 2) == 31.74
        assert search.factors(4373) == constants()["content"][1:]
        assert all(search.quality(n) < search.quality(4373) for n in range(500))

    def test_a_shortest_vector(self) -> None:
        """Compared with trying all of them, modulo a smaller power."""
        search = tool("digest_constants")
        search.MODULUS = 1 << 10
        for a, b in ((3, 5), (511, 77), (1023, 1), (33, 31), (7, 7)):
            reach = range(-40, 41)
            near = [
                max(abs(x), abs(y)) for x in reach for y in reach if (x, y) != (0, 0) and (x * a + y * b) % 1024 == 0
            ]
            euclid = search.shortest(a, b)
            assert min(near) == euclid, (a, b)

    def test_injected_errors(self) -> None:
        """All kinds are errors, and are found; a sum without weights, or of words, would miss some."""
        errors = tool("digest_errors")
        assert len(errors.KINDS) == 12
        rng = np.random.default_rng(2)
        for name in errors.KINDS:
            assert errors.inject(name, 600, rng) == 0
        counts = re.findall(r"^(.+?) +([\d,]+) injected +(\d+) missed$", DOCUMENT, re.MULTILINE)
        assert [name for name, *_ in counts] == [*errors.KINDS, "all"]
        assert all(missed == "0" for *_, missed in counts) and int(counts[-1][1].replace(",", "")) >= 10**6
        errors.weight = lambda key: np.ones_like(key)
        assert errors.inject("two tokens exchanged", 100, rng) == 100

    def test_a_block_of_the_tool_is_one_of_the_definition(self) -> None:
        errors = tool("digest_errors")
        data = errors.block(np.random.default_rng(1))
        total = (errors.weight(np.arange(len(data), dtype=np.uint64)) * errors.content(data)).sum(dtype=np.uint64)
        assert int(total) == defined(data.view(np.uint8).reshape(*errors.SIZES[:-1], -1))


# ---- the host's kernels ------------------------------------------------------------------------------------------------

WAYS_ON_HOST = """
#include "digest.cpp"
extern "C" int run(int which, const kvbm_cells* cells, uint64_t* out) {
  Way chosen = which ? nullptr : plain;
#ifdef __x86_64__
  if (which == 1 && __builtin_cpu_supports("avx2")) chosen = avx2::digest;
  if (which == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) chosen = avx512::digest;
#endif
  if (!chosen) return 0;
  *out = chosen(*cells);
  kvbm::fence_streaming_stores(true);
  return 1;
}
"""


class Cells(ctypes.Structure):
    """kvbm_cells."""

    _fields_ = [
        ("src", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("count", "rows")),
        *((name, ctypes.c_int64) for name in ("src_row", "dst_row")),
        *((name, ctypes.c_uint64) for name in ("key", "key_step", "key_row")),
        ("streaming", ctypes.c_int),
    ]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_every_width_of_the_host(tmp_path: Path) -> None:
    """AVX-512, AVX2 and neither: rows of any number of cells, at odd addresses, of any keys; with and without a copy."""
    (tmp_path / "ways.cpp").write_text(WAYS_ON_HOST)
    library = tmp_path / "ways.so"
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{Path(__file__).parents[2] / 'cuda'}",
        "-o",
        library,
        tmp_path / "ways.cpp",
    ]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_int, ctypes.POINTER(Cells), ctypes.c_void_p]
    rows, src_row, dst_row, room = 2, 16 * 72, 16 * 76, 16 * 160
    memory, spare = oracle.noise(room, 1), np.zeros(room + 64, np.uint8)
    memory[200:300] = 255
    to = spare[-spare.ctypes.data % 64 :]
    ran = set()
    for count in range(71):
        for offset, key, step, apart in (
            (0, 0, 1, count),
            (1 + count % 15, count, 0, 3),
            (4, (1 << 32) - 3, 9, 1),
            (8, (1 << 64) - 5, 1 << 31, 1 << 40),
        ):
            held = [memory[offset + row * src_row :][: 16 * count].reshape(-1, 16) for row in range(rows)]
            keys = [
                np.arange(count, dtype=np.uint64) * np.uint64(step) + np.uint64((key + row * apart) & MASK)
                for row in range(rows)
            ]
            want = sum(int(d) for pair in zip(held, keys, strict=True) for d in digest_oracle.of_cells(*pair)) & MASK
            for which, (at, streaming) in itertools.product(range(3), ((None, 0), (offset, 0), (0, 1), (16, 1))):
                out, case = np.zeros(1, np.uint64), (which, count, offset, key, step, at, streaming)
                to[:] = 0
                where = None if at is None else to.ctypes.data + at
                cells = Cells(
                    memory.ctypes.data + offset, where, count, rows, src_row, dst_row, key, step, apart, streaming
                )
                if run(which, cells, out.ctypes.data):
                    ran.add(which)
                    assert int(out[0]) == want, case
                    written = np.zeros(len(to), np.uint8)
                    for row in range(rows if at is not None else 0):
                        written[(at or 0) + row * dst_row :][: 16 * count] = held[row].reshape(-1)
                    assert np.array_equal(to, written), case
    assert 0 in ran
