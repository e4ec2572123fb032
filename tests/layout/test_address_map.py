"""Address maps: each operation is compared with the oracle's addresses, at every coordinate."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from test_layout import block_shape

import kvbm
import oracle
import strategies
from kvbm.errors import LayoutError
from kvbm.layout import spec
from kvbm.layout.address_map import Access, Step, normal
from strategies import st

INNER = oracle.AXES[1:]


def table(access: Access, sizes: dict[str, int], block: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Entry and byte of every coordinate, by `Access.address`."""
    grid = dict(zip(INNER, np.ix_(*(np.arange(sizes[axis]) for axis in INNER)), strict=True))
    entry, nbytes = access.address(block, grid)
    shape = tuple(sizes[axis] for axis in INNER)
    return np.broadcast_to(entry, shape), np.broadcast_to(nbytes, shape)


def maps(
    drawn: tuple[strategies.Sizes, strategies.Declared],
) -> tuple[Any, list[tuple[Access, np.ndarray, np.ndarray]]] | None:
    """The shape's sizes, and each map with the expected entries and bytes at the coordinates where it is defined."""
    sizes, declared = drawn
    want = sizes.placed(declared.order)
    if len(want.id_step()) > 1:
        return None
    entry, nbytes = (each[0] for each in want.address([0]))
    resolved = spec.parse(declared.yaml).resolve(block_shape(sizes), sizes.num_blocks)
    return sizes.sizes, [(access, entry, nbytes) for access in resolved.accesses]


def meant(access: Access, values: np.ndarray) -> np.ndarray:
    """The coordinates for which K's map, or V's, is defined."""
    return values if access.half is None else values.take([access.half], INNER.index("o"))


def check(access: Access, sizes: dict[str, int], entry: np.ndarray, nbytes: np.ndarray) -> None:
    for got, want in zip(table(access, sizes), (entry, nbytes), strict=True):
        assert np.array_equal(meant(access, got), meant(access, want))
    assert normal(access.steps) == access.steps, "a map is in normal form"
    assert access.nbytes == np.prod(list(sizes.values())) * access.itemsize


@given(strategies.one(limit=700))
@pytest.mark.slow  # 0.7 s
def test_a_map_is_the_oracles(drawn: Any) -> None:
    if (found := maps(drawn)) is None:
        return
    sizes, every = found
    for access, entry, nbytes in every:
        check(access, sizes, entry, nbytes)


@given(strategies.pair(limit=500, opaque=False))
def test_equal_maps_are_equal_objects(drawn: Any) -> None:
    """Maps with equal addresses are equal objects, and all others are not, whatever their declarations are."""
    sizes, one, other = drawn
    found = []
    for declared in (one, other):
        every = maps((sizes, declared))
        if every is None or len(every[1]) > 1:
            return
        found.append(every[1][0])
    (a, *where), (b, *there) = found
    same = all(np.array_equal(x, y) for x, y in zip(where, there, strict=True))
    assert (dataclasses.replace(a, block=(0, 0)) == dataclasses.replace(b, block=(0, 0))) is same


@pytest.mark.slow  # each drawn layout at every box
@given(strategies.one(limit=500), st.data())
@strategies.cases(400)
def test_window_and_fix(drawn: Any, data: Any) -> None:
    """The boxes of a window, one after the other, cover exactly the requested coordinates."""
    if (found := maps(drawn)) is None:
        return
    sizes, every = found
    axis = data.draw(st.sampled_from(INNER))
    step = data.draw(st.integers(1, 3))
    first = data.draw(st.integers(0, sizes[axis] - 1))
    count = data.draw(st.integers(1, (sizes[axis] - 1 - first) // step + 1))
    place = INNER.index(axis)
    for access, entry, nbytes in every:
        if access.half is not None and axis == "o":
            first, count, step = access.half, 1, 1
        wanted = range(first, first + count * step, step)
        if count < sizes[axis] and any(len(s.axes) > 1 or s.opaque for s in access.steps if axis in s.axes):
            with pytest.raises(LayoutError, match="has no separate steps"):
                access.window(axis, first, count, step)
            continue
        boxes = access.window(axis, first, count, step)
        done = 0
        for box in boxes:
            held = dict(box.sizes).get(axis, 1)
            mine = [wanted[k] for k in range(done, done + held)]
            done += held
            inner = dataclasses.replace(box, half=None) if axis == "o" else box
            check(inner, {**sizes, axis: held}, entry.take(mine, place), nbytes.take(mine, place))
        assert done == count
        whole = sum(1 for s in access.steps if axis in s.axes) < 2
        assert len(boxes) == 1 or not whole, "an axis that is not split is one box"
        if count == 1:
            assert access.fix(axis, first) == boxes[0]
    for bad in ((-1, 1, 1), (0, sizes[axis] + 1, 1), (0, 0, 1), (0, 1, 0), (sizes[axis], 1, 1)):
        with pytest.raises(LayoutError, match=f"axis '{axis}': expected coordinates"):
            every[0][0].window(axis, *bad)


def test_boxes_are_as_few_as_digits_allow() -> None:
    """An axis of 4 x 8 whose digits are apart: a ragged range is a head, whole rows, and a tail."""
    steps = (Step(("h",), 1, 8, 2, 0), Step(("h",), 8, 4, 1000, 0))
    access = Access("", None, "float16", 2, 1, (("h", 32),), (), (0, 0), (0, 0), steps)
    assert [dict(box.sizes).get("h", 1) for box in access.window("h", 5, 22)] == [3, 16, 3]
    assert [dict(box.sizes).get("h", 1) for box in access.window("h", 8, 16)] == [16]
    assert [dict(box.sizes).get("h", 1) for box in access.window("h", 1, 8, 4)] == [8], "a step that divides the digit"
    assert [dict(box.sizes).get("h", 1) for box in access.window("h", 3, 3, 8)] == [3], "a step of whole rows"


@given(strategies.one(limit=500))
def test_packed(drawn: Any) -> None:
    """Slots hold every element once, without gaps, in the order of the addresses."""
    sizes, declared = drawn
    if (found := maps(drawn)) is None:
        return
    section = spec.parse(declared.yaml).resolve(block_shape(sizes), sizes.num_blocks).section
    places = []
    for access, (_, entry, nbytes) in zip(section.packed().accesses, found[1], strict=True):
        slots, place = table(access, found[0])
        assert not slots.any()
        places.append(meant(access, place))
        before = np.lexsort((meant(access, nbytes).ravel(), meant(access, entry).ravel()))
        assert (np.diff(meant(access, place).ravel()[before]) > 0).all()
        assert access.block[0] % 16 == 0 and access.block[0] - section.block_bytes in range(16)
    every = np.sort(np.concatenate([place.ravel() for place in places]))
    assert np.array_equal(every, np.arange(len(every)) * section.accesses[0].itemsize)


@given(strategies.one(limit=500), st.permutations("hot"))
def test_fuse_is_the_same_map(drawn: Any, axes: list[str]) -> None:
    if (found := maps(drawn)) is None:
        return
    sizes, every = found
    group = tuple(axis for axis in axes if sizes[axis] > 1)[:2]
    for access, entry, nbytes in every:
        try:
            fused = access.fuse(group)
        except LayoutError:
            assert any(len(step.axes) > 1 for step in access.steps)
            continue
        check(fused, sizes, entry, nbytes)


# ---- elements that share a byte ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("b t (l d)", "b t (d l)"),
        ("b t l d", "b t d l"),
        ("b t (l d)", "b t d l"),
        ("b l t d", "b t {d l}"),
    ],
)
def test_bytes_that_hold_other_pairs_are_not_copied(src: str, dst: str) -> None:
    """An axis inside a byte has no step, but pairs along different axes are different bytes: the plan is refused."""
    shape = kvbm.BlockShape(nl=2, no=1, nh=1, nt=4, hd=2, dtype="int4")
    with pytest.raises(kvbm.PlanError, match=r"share a byte|does not promise the order"):
        kvbm.plan(spec.parse(f'order: "{src}"'), spec.parse(f'order: "{dst}"'), shape)


def test_halves_whose_bytes_hold_other_pairs() -> None:
    shape = kvbm.BlockShape(nl=2, no=2, nh=1, nt=4, hd=2, dtype="int4")
    apart = spec.parse('order: {k: "b o t d (l h)", v: "b o t d (h l)"}')
    with pytest.raises(kvbm.PlanError, match="share a byte"):
        kvbm.plan(apart, spec.parse('order: "b t d l h o"'), shape)


@pytest.mark.slow  # each drawn layout in every dtype
@given(st.data())
@strategies.cases(300)
def test_four_bits_move_or_are_refused(data: Any) -> None:
    """Any two orders of small four-bit blocks: each element arrives, or the plan is refused."""
    sizes = {axis: data.draw(st.sampled_from([1, 2, 4])) for axis in "lhtd"}
    shape = kvbm.BlockShape(nl=sizes["l"], no=1, nh=sizes["h"], nt=sizes["t"], hd=sizes["d"], dtype="int4")
    made = []
    for _ in range(2):
        axes = data.draw(st.permutations("lhtd"))
        cut = data.draw(st.integers(0, 3))
        fused = f"({' '.join(axes[cut : cut + 2])})" if cut < 3 else axes[3]
        made.append(spec.parse(f'order: "b {" ".join(axes[:cut])} {fused} {" ".join(axes[cut + 2 :])}"'))
    try:
        pools = [kvbm.Pool.allocate(layout, shape, 3) for layout in made]
        kvbm.plan(*made, shape, num_blocks=3)
    except (kvbm.LayoutError, kvbm.PlanError):
        return
    raw = [pool.arrays[0].view(np.uint8).reshape(3, -1) for pool in pools]
    raw[0][:] = np.random.default_rng(1).integers(0, 256, raw[0].shape, np.uint8)
    raw[1][:] = 0
    kvbm.convert(*pools)
    values = []
    for pool, layout, memory in zip(pools, made, raw, strict=True):
        order = [axis for term in layout.orders[0].inner for axis in term.axes if axis != "b"]
        nibbles = np.stack([memory & 15, memory >> 4], axis=-1).reshape(3, *(sizes[axis] for axis in order))
        values.append(nibbles.transpose(0, *(1 + order.index(axis) for axis in "lhtd")))
        assert pool.num_blocks == 3
    assert np.array_equal(*values)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_addresses_out_of_range() -> None:
    resolved = kvbm.load("nhd").resolve(kvbm.BlockShape(nl=2, no=2, nh=4, nt=8, hd=32), 3)
    for block, coordinates, text in (
        (99, {}, "axis 'b': expected 0 to 2, got 99"),
        (0, {"t": 99}, "axis 't': expected 0 to 7, got 99"),
        (-1, {}, "axis 'b': expected 0 to 2, got -1"),
        (0, {"x": 0}, "axis 'x': expected one of b l o h t d"),
        (0, {"t": np.array([0, 8])}, "axis 't': expected 0 to 7, got 8"),
    ):
        with pytest.raises(LayoutError, match=text):
            resolved.address(block, **coordinates)


def test_an_axis_of_one_may_be_fused() -> None:
    layout = spec.parse('order: "b l o h (x t) d"\naxes: {x: "1"}')
    shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=8)
    assert kvbm.plan(layout, kvbm.load("universal"), shape).nbytes == shape.nbytes
    assert kvbm.plan(kvbm.load("universal"), layout, shape).nbytes == shape.nbytes


def test_blanks_in_expressions_mean_nothing() -> None:
    """Equal layouts have the same fingerprint, and layouts with the same fingerprint are equal."""
    pairs = [
        ('order: "b l o h t d"\npitch: {t: "hd*8"}', 'order: "b l o h t d"\npitch: {t: "hd * 8"}'),
        ('order: "b l o h t d x"\naxes: {x: "nt//2"}', 'order: "b l o h t d x"\naxes: {x: "nt // 2"}'),
    ]
    for texts in pairs:
        one, other = map(spec.parse, texts)
        assert one == other and hash(one) == hash(other) and one.fingerprint == other.fingerprint
    different = spec.parse('order: "b l o h t d"\npitch: {t: "hd*9"}')
    assert different != spec.parse(pairs[0][0]) and different.fingerprint != spec.parse(pairs[0][0]).fingerprint


def test_arrays_of_planes_of_two_orders() -> None:
    """`o` in the brackets before the planes: V's arrays have V's shape."""
    layout = spec.parse(
        'order: "[o <data scale>] b"\naxes: {g: "hd//4"}\n'
        "planes:\n  data: {order: {k: t d, v: d t}, dtype: uint8}\n  scale: {order: t g, dtype: float32}\n"
    )
    resolved = layout.resolve(kvbm.BlockShape(1, 2, 1, 4, 8, "uint8"), 3)
    assert [a.axes for a in resolved.allocations] == [("b", "t", "d"), ("b", "t", "g"), ("b", "d", "t"), ("b", "t", "g")]
