"""Transfers without a GPU: ranges of layers, copies in two steps, host pools; and every strategy on a fake driver.

The tests of the last part run functions of programs/transfers.py in separate processes.  Their streams run in any order that
events allow (`fake_seed`), so a missing wait results in wrong bytes.
"""

from __future__ import annotations

import ctypes
import re
import threading
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_plan import at_slot, execute, has_whole_runs, run_two_steps, step

import kvbm
import matrix
import oracle
from few import in_full
from kvbm import _core
from kvbm.compile import prepare
from kvbm.digest import run
from kvbm.layout import spec
from memory import Bound, aligned, numpy_views, placed
from processes import FakeDriver, server

#: Of a warm `Transfer.copy` of six ids: (direction, strategy) → calls of the driver, submissions, calls in Python and in C.
WARM = {
    (direction, strategy): (calls, submissions, 1, 1)
    for strategy, submissions, each in (
        ("direct", 1, {"d2d": 3, "d2h": 3, "h2d": 3}),  # which context is current, the launch, the event
        ("engine", 1, {"d2d": 4, "d2h": 4, "h2d": 4}),  # and whether the stream is captured
        ("staged", 6, {"d2d": 26, "d2h": 26, "h2d": 28}),  # three slots of two blocks
    )
    for direction, calls in each.items()
}

SHAPE = kvbm.BlockShape(nl=4, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
NAMES = sorted(matrix.SHIPPED)


def partners(src: str) -> list[str]:
    return [dst for dst in NAMES if not matrix.refused(src, dst)]


def moved(src: Bound, dst: Bound, src_ids: Any, dst_ids: Any, layers: Any = None) -> np.ndarray:
    """The expected destination after a copy of these layers, (range, range) or None."""
    if layers is None:
        return oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids)
    result = dst.before.copy()
    read, write = (
        side.arena.positions(ids)[:, side_layers.start : side_layers.stop]
        for side, ids, side_layers in zip((src, dst), (src_ids, dst_ids), layers, strict=True)
    )
    if src.arena.placed.order.opaque or dst.arena.placed.order.opaque:
        n = read[0, 0, 0].size
        read, write = np.sort(read.reshape(-1, n), axis=1), np.sort(write.reshape(-1, n), axis=1)
    oracle.scatter(result, write, oracle.gather(src.before, read, src.arena.placed.itemsize))
    return result


def check(src: Bound, dst: Bound, src_ids: Any, dst_ids: Any, layers: Any = None) -> None:
    want = moved(src, dst, src_ids, dst_ids, layers)
    assert np.array_equal(dst.buffer, want), oracle.explain(dst.arena, dst.buffer, want)
    assert src.untouched


# ---- ranges of layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", NAMES)
def test_ranges_of_layers(src: str) -> None:
    """Exactly these layers, between all pairs of layouts: by the plan and by the host's kernels."""
    for number, name in enumerate(partners(src)):
        one, other = Bound(src, SHAPE, 5), Bound(name, SHAPE, 6, dst=True)
        layers = [range(1, 3), range(4), range(3, 4), range(1)][number % 4]
        ids = [4, 0, 2], [5, 1, 0]
        made = kvbm.plan(one.layout, other.layout, SHAPE, num_blocks=(5, 6), layers=layers)
        got = execute(made, one.arena, other.arena, one.before, other.before, *ids)
        assert np.array_equal(got, moved(one, other, *ids, (layers, layers)))
        assert made.nbytes == SHAPE.nbytes // 4 * len(layers)
        kvbm.Transfer(one.pool, other.pool).copy(*ids, layers=layers)
        check(one, other, *ids, (layers, layers))


@pytest.mark.parametrize("src", NAMES)
def test_pools_of_other_layers(src: str) -> None:
    """A stage of a pipeline holds some of the other side's layers: both ranges are given."""
    stage = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    for name in partners(src):
        for shapes, layers in (
            ((SHAPE, stage), (range(2, 4), range(2))),
            ((stage, SHAPE), (range(2), range(2, 4))),
            ((stage, SHAPE), (range(1, 2), range(3, 4))),
        ):
            one, other = Bound(src, shapes[0], 4), Bound(name, shapes[1], 5, dst=True)
            kvbm.Transfer(one.pool, other.pool).copy([3, 0], [1, 4], layers=layers)
            check(one, other, [3, 0], [1, 4], layers)


def test_each_range_is_its_own() -> None:
    """One transfer, layer by layer as a model runs: together the layers are the whole copy."""
    one, other = Bound("nhd", SHAPE, 4), Bound("vllm/paged_attn_v0", SHAPE, 4, dst=True)
    move = kvbm.Transfer(one.pool, other.pool)
    for layer in range(4):
        move.copy([3, 1], [0, 2], layers=range(layer, layer + 1))
    check(one, other, [3, 1], [0, 2])
    assert move.stats()["bytes"] == 2 * SHAPE.nbytes and move.stats()["copies"] == 4


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        (range(0, 4, 2), r"layers: expected range\(first, last\) or a tuple of two of them"),
        (range(2, 5), "within 0 to 4 of the source"),
        (range(-1, 2), "within 0 to 4 of the source"),
        (range(2, 2), "within 0 to 4 of the source"),
        ((range(2), range(3, 5)), "within 0 to 4 of the destination"),
        ((range(2), range(3)), "as many in the source as in the destination"),
        ((range(2),), "or a tuple of two of them"),
        ((range(1), range(1), range(1)), "or a tuple of two of them"),
        ((0, 1), "or a tuple of two of them"),
        (2, "or a tuple of two of them"),
        ("02", "or a tuple of two of them"),
    ],
)
def test_layers_that_are_refused(layers: Any, match: str) -> None:
    one, other = Bound("nhd", SHAPE, 4), Bound("universal", SHAPE, 4, dst=True)
    with pytest.raises(kvbm.BindError, match=match):
        kvbm.Transfer(one.pool, other.pool).copy([0], [0], layers=layers)
    assert other.untouched


def by_layer(pool: kvbm.Pool) -> np.ndarray:
    """Elements as ``b l …``, of the two layouts below."""
    values = np.stack([array.view(np.uint16) for array in pool.arrays])
    if pool.layout.name == "split":  # one array: b l/2 h l%2 t o d
        values = values[0].transpose(0, 1, 3, 2, 4, 5, 6)
        return values.reshape(values.shape[0], -1, *values.shape[3:])
    return values.transpose(0, 2, 1, 3, 4, 5)  # an array a block: h l o t d


def test_layers_of_a_split_axis() -> None:
    split = spec.parse('order: "b l/2 h l%2 t o d"', name="split")
    plain = kvbm.load("universal")
    for pair in ((split, plain), (plain, split)):
        assert kvbm.plan(*pair, SHAPE).nbytes == SHAPE.nbytes
        # A range of whole digits, or inside one, is a loop; others are some.
        for layers in (range(2), range(2, 4), range(3, 4), range(1, 3), range(1, 4)):
            s, d, whole = (kvbm.Pool.allocate(layout, SHAPE, 3) for layout in (*pair, pair[1]))
            random = np.random.default_rng(7)
            for one in s.arrays:
                one.view(np.uint16)[:] = random.integers(0, 1 << 16, one.shape)
            for one in d.arrays:
                one.view(np.uint16)[:] = 12345
            kvbm.convert(s, whole)
            kvbm.Transfer(s, d).copy([0, 1, 2], [0, 1, 2], layers=layers)
            got, want = (by_layer(pool) for pool in (d, whole))
            assert np.array_equal(got[:, layers], want[:, layers]) and (np.delete(got, layers, 1) == 12345).all()
    # Where the axis is outside of every layout's order there is one layer, and a range of it is all of it.
    one = kvbm.BlockShape(nl=1, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    flat = spec.parse('order: "b h t o d"', name="flat")
    assert kvbm.plan(flat, plain, one, layers=range(1)).nbytes == one.nbytes


def test_sections_of_other_layers() -> None:
    """As pools: a pair of ranges, also with digests.  Red: the transfer could not be made."""
    stage = kvbm.BlockShape(nl=3, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    one, other = Bound("nhd", SHAPE, 2).pool, Bound("universal", stage, 2, dst=True).pool
    move = kvbm.Transfer(one.section(o=0), other.section(o=0), verify=True)
    with pytest.raises(kvbm.BindError, match=rf"hold {SHAPE.nl} and 3 layers; pass layers="):
        move.copy([0], [0])
    digests = np.zeros(2, np.uint64)
    move.copy([0, 1], [1, 0], layers=(range(1, 3), range(2)), digests=digests).synchronize()
    want = other.section(l=range(2), o=0).digest([1, 0], model=None)
    model = kvbm.Model(layers=range(1, 4), nl=4)
    assert digests.tolist() == other.section(l=range(2), o=0).digest([1, 0], model=model).tolist() != want.tolist()
    with pytest.raises(kvbm.BindError, match=rf"hold {SHAPE.nl} and 3 layers; kvbm.convert copies all"):
        kvbm.convert(one.section(o=0), other.section(o=0), [0], [0])


def test_layers_of_a_plane_that_all_share() -> None:
    """Red: LayoutError, which the documentation does not name."""
    text = "planes:\n  data: {order: l o h d, dtype: int8}\n  scale: {order: o h, dtype: float32, scales: data, shared: l}\n"
    shares = spec.parse(f'order: "b t <data scale>"\n{text}', name="shares")
    one, other = kvbm.Pool.allocate("vllm/cross_layer_nhd", SHAPE, 1), kvbm.Pool.allocate(shares, SHAPE, 1)
    move = kvbm.Transfer(one, other, cast="amax")
    with pytest.raises(kvbm.BindError, match=r"layers: shares .*axis 'l': plane 'scale' has one element for all of it"):
        move.copy([0], [0], layers=range(2))
    move.copy([0], [0])


def test_pools_of_other_layers_need_a_range() -> None:
    stage = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    move = kvbm.Transfer(Bound("nhd", SHAPE, 4).pool, Bound("universal", stage, 4, dst=True).pool)
    with pytest.raises(kvbm.BindError, match=r"hold 4 and 2 layers; pass layers=\(range of the source"):
        move.copy([0], [0])
    with pytest.raises(kvbm.BindError, match="within 0 to 2 of the destination"):
        move.copy([0], [0], layers=range(4))
    with pytest.raises(kvbm.BindError, match="hold 4 and 2 layers"):
        move.explain()
    with pytest.raises(kvbm.BindError, match="expected pools of one block shape"):
        kvbm.Transfer(
            Bound("nhd", SHAPE, 4).pool, Bound("nhd", kvbm.BlockShape(4, 2, 2, 4, 32, "bfloat16"), 4, dst=True).pool
        )


# ---- two steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("src", NAMES)
def test_two_steps_are_the_one(src: str, gathers: bool) -> None:
    """Packed into a slot and moved on, or moved into a slot and unpacked: the result is that of a copy in one step.

    Once by the loop nests alone (the far one in the form for the copy engine), once by the kernels on the host.
    """
    src_ids, dst_ids = [4, 0, 2], [5, 1, 0]
    for number, name in enumerate(partners(src)):
        align = (0, 2, 8)[number % 3]
        one, other = Bound(src, SHAPE, 5, align=align), Bound(name, SHAPE, 6, dst=True, align=16 - align)
        made = kvbm.plan(one.layout, other.layout, SHAPE, num_blocks=(5, 6))
        first, second = made.staged(gathers=gathers)
        (first_id,), (second_id,) = {part.dst_id for part in first.parts}, {part.src_id for part in second.parts}
        assert first_id == second_id and first_id[0] == 0
        block = first_id[1]
        assert block % 16 == 0 and SHAPE.nbytes <= block < SHAPE.nbytes + 16
        assert has_whole_runs(*((second, other.pool) if gathers else (first, one.pool)))
        want = moved(one, other, src_ids, dst_ids)
        slot = oracle.noise(64 + 3 * block + 64, 5)

        steps = [step(side.arena) for side in (one, other)]
        far = second.flat(None, steps[1]) if gathers else first.flat(steps[0], None)
        nests = (first, far) if gathers else (far, second)
        filled = execute(nests[0], one.arena, at_slot(64), one.before, slot, src_ids, range(3))
        assert np.array_equal(filled[:64], slot[:64]) and np.array_equal(filled[-64:], slot[-64:])
        got = execute(nests[1], at_slot(64), other.arena, filled, other.before, range(3), dst_ids)
        assert np.array_equal(got, want), (src, name)

        run_two_steps(first, second, one, other, slot, src_ids, dst_ids)
        assert np.array_equal(other.buffer, want), oracle.explain(other.arena, other.buffer, want)


@pytest.mark.parametrize(
    ("name", "how", "length", "block", "entry"),
    [
        ("nhd", "steps", 1, False, True),
        ("nhd", "rows", 8, True, False),  # four layers, K and V: one block's allocations
        ("nhd", "scattered", 40, False, False),
        ("universal", "steps", 1, False, True),
        ("universal", "rows", 1, False, True),
        ("universal", "scattered", 5, False, False),
        ("vllm/LBHNC", "scattered", 1, False, True),  # one allocation
        ("hf/dynamic_cache", "steps", 1, False, True),
        ("hf/dynamic_cache", "scattered", 8, False, False),
    ],
)
def test_tables_are_as_short_as_the_memory_is_regular(
    name: str, how: str, length: int, block: bool, entry: bool
) -> None:
    arena = placed(matrix.orders()[name], SHAPE, 5).layout_bytes(0, how)
    buffer = aligned(oracle.source_bytes(arena, 0))
    pool = kvbm.Pool(kvbm.load(name), SHAPE, numpy_views(arena, buffer, SHAPE.dtype))
    steps = pool.steps
    assert (steps.block is not None, steps.entry is not None) == (block, entry)
    table = steps.shorten(pool.addresses, pool.num_blocks)
    assert np.array_equal(table, pool.addresses[:length])
    # The whole table again, from what is left of it.
    per_block = 8 if name == "nhd" else 1
    for i, address in enumerate(pool.addresses.tolist()):
        number, rest = divmod(i, per_block) if block else (0, i)
        known = int(table[0]) + rest * (steps.entry or 0) if entry else int(table[rest])
        assert known + number * (steps.block or 0) == address
    assert prepare.prepare(kvbm.plan(pool.layout, pool.layout, SHAPE, num_blocks=5), 16, 16, src_steps=steps)


@pytest.mark.parametrize("gap", [0, 64])
def test_tables_in_which_blocks_are_not_the_slowest(gap: int) -> None:
    """One base if all allocations have the same stride, else all bases: an equal stride within a block is not enough."""
    layout = spec.parse('order: "[l b] o h t d"', name="mine")
    size = SHAPE.nbytes // 8  # elements of a layer of a block
    raw = np.arange(4 * (3 * size + gap), dtype=np.uint16).reshape(4, -1)[:, : 3 * size]
    memory = raw.reshape(4, 3, 2, 2, 4, 16)  # l b o h t d
    pool = kvbm.Pool(layout, SHAPE, [block for layer in raw for block in layer.reshape(3, 2, 2, 4, 16)])
    assert pool.steps == (None, None if gap else 2 * size)
    universal = kvbm.Pool.allocate(kvbm.load("universal"), SHAPE, 3)
    kvbm.convert(pool, universal, [2, 0, 1])
    want = memory.transpose(1, 3, 0, 2, 4, 5)[[2, 0, 1]]
    assert all(np.array_equal(got.view(np.uint16), block) for got, block in zip(universal.arrays, want, strict=True))


@pytest.mark.parametrize("src", NAMES)
def test_tables_as_strides(src: str) -> None:
    """Allocations with one stride are one base: on either side, on both, and for a range of layers."""
    ids = [4, 0, 2], [5, 1, 0]
    for number, name in enumerate(partners(src)):
        one, other = Bound(src, SHAPE, 5), Bound(name, SHAPE, 6, dst=True)
        assert one.pool.steps == (None, step(one.arena))
        layers = range(1, 3) if number % 2 else range(4)
        made = kvbm.plan(one.layout, other.layout, SHAPE, num_blocks=(5, 6), layers=layers)
        want = moved(one, other, *ids, (layers, layers))
        for steps in ((step(one.arena), None), (None, step(other.arena)), (step(one.arena), step(other.arena))):
            flat = made.flat(*steps)
            bases = [
                side.arena if one_step is None else at_slot(side.arena.bases[0])
                for side, one_step in zip((one, other), steps, strict=True)
            ]
            for part in flat.parts:
                for mode in part.outer:
                    assert steps[0] is None or mode.src_table == 0
                    assert steps[1] is None or mode.dst_table == 0
            assert np.array_equal(execute(flat, *bases, one.before, other.before, *ids), want)


# ---- pools in host memory ------------------------------------------------------------------------------------------


def ids_as(kind: str, ids: list[int]) -> Any:
    if kind.startswith("torch."):
        torch = pytest.importorskip("torch")
        return torch.tensor(ids, dtype=getattr(torch, kind[6:]))
    if kind == "strided":
        return np.repeat(np.array(ids, np.int64), 3)[::3]
    if kind == "big endian":
        return np.array(ids, ">i8")
    if kind == "reversed":
        return np.array(ids[::-1], np.int32)[::-1]
    if kind == "numbers":
        return [np.int8(ids[0]), *ids[1:]]
    if kind == "array":
        return array("q", ids)
    if kind == "memoryview":
        return memoryview(np.array(ids, np.int16))
    return {"list": list, "tuple": tuple, "deque": deque}.get(kind, lambda given: np.array(given, kind))(ids)


KINDS = [
    "list", "tuple", "int8", "int16", "int32", "int64", "torch.int16", "torch.int32", "torch.int64",
    "strided", "reversed", "big endian", "array", "numbers", "memoryview", "deque",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_every_kind(kind: str) -> None:
    """Each with ids of every kind on the other side."""
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    for number, other_kind in enumerate(KINDS, 1):
        dst.buffer[:] = dst.before
        done = move.copy(ids_as(kind, [5, -1, 3, 0]), ids_as(other_kind, [0, 1, -1, 6]))
        check(src, dst, [5, 0], [0, 6])
        assert done.query() and done.synchronize() is None and done.wait(5) is None
        assert move.stats()["blocks"] == 2 * number


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64"])
def test_ids_without_a_sign(kind: str) -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    kvbm.convert(src.pool, dst.pool, ids_as(kind, [5, 3, 0]), ids_as(kind, [0, 1, 6]))
    check(src, dst, [5, 3, 0], [0, 1, 6])


def test_one_id_none_and_no_ids() -> None:
    for src_ids, dst_ids, expected in (
        (3, 1, ([3], [1])),
        (np.int64(3), np.array(1), ([3], [1])),
        (range(2), range(4, 6), ([0, 1], [4, 5])),
        ([], (), ([], [])),
        (np.empty(0, np.int32), [], ([], [])),
        ([-1], [0], ([], [])),
        (None, [2, 0], ([0, 1], [2, 0])),
        ([2, 0], None, ([2, 0], [0, 1])),
        (np.array([1], np.uint64), [1], ([1], [1])),
        ((ctypes.c_int * 2)(3, 1), (ctypes.c_int64 * 2)(0, 5), ([3, 1], [0, 5])),  # buffers that name no strides
        ((ctypes.c_uint8 * 2)(3, 1), [0, 5], ([3, 1], [0, 5])),
        (memoryview(np.array([3, 1])).cast("B").cast("n"), np.array([0, 5], np.longlong), ([3, 1], [0, 5])),
        (np.array([3, 1], ">i8"), np.array([0, 5], ">i4"), ([3, 1], [0, 5])),
        (np.array([3, 9, 1])[::2], np.array([5, 0], np.int32)[::-1], ([3, 1], [0, 5])),
        (np.frombuffer(b"." + np.array([3, 1]).tobytes(), np.int64, offset=1), [0, 5], ([3, 1], [0, 5])),  # not aligned
    ):
        src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
        kvbm.Transfer(src.pool, dst.pool).copy(src_ids, dst_ids)
        check(src, dst, *expected)
    src, dst = Bound("nhd", SHAPE, 3), Bound("universal", SHAPE, 3, dst=True)
    kvbm.Transfer(src.pool, dst.pool).copy()
    check(src, dst, range(3), range(3))


REFUSED_IDS = [
    ([6], [0], r"src_ids\[0\] is 6: expected 0 to 5"),
    ([0, -2], [0, 1], r"src_ids\[1\] is -2: expected 0 to 5.*or -1 to skip"),
    ([0], [7], r"dst_ids\[0\] is 7: expected 0 to 6"),
    (1 << 40, 0, r"src_ids\[0\] is 1099511627776"),
    (0, -5, r"dst_ids\[0\] is -5"),
    (np.int64(9), 0, r"src_ids\[0\] is 9"),
    (np.array(9), 0, r"src_ids\[0\] is 9"),
    (np.array([0, 9], np.int32), np.array([0, 1], np.int64), r"src_ids\[1\] is 9"),
    (np.array([0, 1], np.int32), np.array([0, 1 << 32], np.int64), r"dst_ids\[1\] is 4294967296"),
    ([0, 1, 2], [3, 4, 3], r"dst_ids\[2\] is 3, as is dst_ids\[0\]"),
    ([0, 1, 2], [3, 4], "as many source as destination ids, got 3 and 2"),
    ([0], None, None),
    (None, None, "source and destination hold 6 and 7 blocks"),
    ([0.0], [0], r"src_ids\[0\]: expected an integer, got float"),
    ([0], np.zeros(1, np.float32), "dst_ids: expected integers, got dtype float32"),
    ([0], np.zeros(1, np.bool_), "dst_ids: expected integers, got dtype bool"),
    (True, 0, "src_ids: expected integers, got bool"),
    (0.5, 0, "src_ids: expected integers, got float"),
    ([0], [True], r"dst_ids\[0\]: expected an integer, got bool"),
    ([0, None], [0, 1], r"src_ids\[1\]: expected an integer, got NoneType"),
    ("0", [0], "src_ids: expected integers, got str"),
    (b"0", [0], "src_ids: expected integers, got bytes"),
    (np.datetime64(0, "s"), range(8), "src_ids: expected integers, got datetime64"),
    (np.timedelta64(0, "s"), range(8), "src_ids: expected integers, got timedelta64"),
    ({0}, [0], "src_ids: expected integers, got set"),
    ({0: 1}, [0], "src_ids: expected integers, got dict"),
    ([[0]], [0], r"src_ids\[0\]: expected an integer, got list"),
    ([[1, 2], [3]], [0, 1], r"src_ids\[0\]: expected an integer, got list"),
    (np.array([[0]]), [0], r"src_ids: expected one axis, got shape \(1, 1\)"),
    (1 << 70, 0, r"src_ids\[0\] is an integer of more than 64 bits: expected 0 to 5"),
    ([0, 10**5000], [0, 1], r"src_ids\[1\] is an integer of more than 64 bits"),
    ([0, -(1 << 63)], [0, 1], r"src_ids\[1\] is -9223372036854775808"),
    (np.array([(1 << 64) - 1], np.uint64), [0], r"src_ids\[0\] is 18446744073709551615"),
    ([0, np.int64(9)], [0, 1], r"src_ids\[1\] is 9"),
    (np.ma.array([0, 1], mask=[False, True]), [0, 1], "src_ids: expected integers, got MaskedArray"),
    ((ctypes.c_int * 1 * 1)(), [0], r"src_ids: expected one axis, got shape \(1, 1\)"),
]


@pytest.mark.parametrize(("src_ids", "dst_ids", "match"), [case for case in REFUSED_IDS if case[2]])
def test_ids_that_are_refused(src_ids: Any, dst_ids: Any, match: str) -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    with pytest.raises(kvbm.BindError, match=match):
        move.copy(src_ids, dst_ids)
    assert dst.untouched and move.stats()["copies"] == 0


def test_tensors_of_ids_whose_memory_does_not_hold_them() -> None:
    """Lazy views, shrunk storages and tensors without memory are refused; views and clones with memory are read."""
    torch = pytest.importorskip("torch")

    def shrunk(ids: Any, nbytes: int) -> Any:
        ids.untyped_storage().resize_(nbytes)
        return ids

    odd = {
        "shrunk": [
            shrunk(torch.tensor([5, 3]), 0),
            shrunk(torch.tensor([5, 3]), 15),
            shrunk(torch.tensor([0, 5, 3], dtype=torch.int32)[1:], 8),
            shrunk(torch.tensor([5, 0, 3])[::2], 16),  # what NumPy would look at
            shrunk(torch.tensor([5, 3], dtype=torch.int16), 2),
            shrunk(torch.tensor(5), 4),
        ],
        "negative": [
            torch._neg_view(torch.tensor([-5, -3])),
            torch._neg_view(torch.tensor([-5, -3], dtype=torch.int32)),
        ],
        "without memory": [
            torch._efficientzerotensor(2, dtype=torch.int64),
            torch.empty(2, dtype=torch.int64, device="meta"),
        ],
        "nested": [
            torch._nested_view_from_buffer(
                torch.arange(2), *[torch.tensor(x) for x in ([[1], [1]], [[1], [1]], [0, 1])]
            )
        ],
        "other": [torch.tensor([5, 3]).to_sparse(), torch.tensor([5.0, 3.0], dtype=torch.bfloat16)],
    }
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    for what, ids in ((what, ids) for what, several in odd.items() for ids in several):
        for pair in ((ids, [0, 1]), ([0, 1], ids)):
            with pytest.raises(kvbm.BindError, match="_ids: expected integers, got "):
                move.copy(*pair)
            assert dst.untouched, what

    def inside(ids: Any) -> Any:
        with pytest.raises(kvbm.BindError, match="src_ids: expected integers, got "):
            move.copy(ids, [0, 1])
        return ids

    torch.vmap(inside)(torch.zeros(2, 2).long())
    assert dst.untouched
    ids = torch.tensor([9, 5, 3])
    move.copy(torch._lazy_clone(ids)[1:], shrunk(torch.tensor([0, 1, 9])[:2], 16))
    check(src, dst, [5, 3], [0, 1])


def test_a_list_that_changes_while_it_is_read() -> None:
    class Evil:
        def __index__(self) -> int:
            ids.clear()
            return 1

    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    ids: list[Any] = [0, Evil(), 2]
    kvbm.Transfer(src.pool, dst.pool).copy(ids, [4, 5, 6])
    check(src, dst, [0, 1, 2], [4, 5, 6])


def test_ids_of_an_array_are_those_that_it_has_when_the_other_ids_are_read() -> None:
    """Reading the other ids may run code, which may give the array other memory: what it had before is not read."""

    class Evil:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            ids.resize(count, refcheck=False)
            return range(3)[index]

    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    count, ids = 1 << 20, np.array([2, 0, 1])
    with pytest.raises(kvbm.BindError, match=f"got {count} and 3"):
        kvbm.Transfer(src.pool, dst.pool).copy(ids, Evil())
    assert dst.untouched
    count, ids = 3, np.array([2, 0, 1, *range(1 << 20)])
    kvbm.Transfer(src.pool, dst.pool).copy(ids, Evil())
    check(src, dst, [2, 0, 1], [0, 1, 2])


def test_an_array_of_numpy_has_the_ids_that_its_buffer_has() -> None:
    """Fields of an array are read in place of its buffer where that is a dense axis of int32 or int64."""
    room = np.frombuffer(bytearray(8 * 40 + 1), np.uint8)
    ids = np.arange(40)[::-1].copy()
    room[1:] = ids.view(np.uint8)
    for dtype in (np.int32, np.int64, np.longlong, np.int16, np.uint32, ">i4", ">i8"):
        one = ids.astype(dtype)
        cases = [one, one[::2], one[::-1], one[3:4], one[:0], one[5:6][::-1], one.reshape(4, 10)[:, 3], np.array(7, dtype)]
        cases += [room[1:].view(np.int64), one[5:6].repeat(3)[::3][:1]]
        for given in cases:
            expected = given.reshape(-1).tolist()
            for each in (given, memoryview(given) if given.dtype.isnative and given.size else given):
                assert _core.Pairs(each, None, 50, 50).ids()[0] == expected, (given, dtype)
    assert _core.Pairs(np.broadcast_to(np.int64(3), (4,)), None, 50, 50).ids()[0] == [3] * 4
    for wrong in (ids.reshape(4, 10), ids.astype(np.float64), ids.astype("M8[s]"), ids.astype(object), ids > 3):
        with pytest.raises(kvbm.BindError, match="src_ids: expected"):
            _core.Pairs(wrong, None, 50, 50)


def test_ids_that_are_written_while_they_are_read() -> None:
    """The checked ids are the copied ones, or the copy is refused, while another thread changes ids between right and wrong."""
    n, shape = 50_000, kvbm.BlockShape(1, 1, 1, 1, 8, "int16")
    src, dst = (kvbm.Pool.allocate(kvbm.load("vllm/BLHNC"), shape, n) for _ in range(2))
    blocks, copied = src.arrays[0], dst.arrays[0]
    blocks[...] = 7
    right = np.arange(n, dtype=np.int64)
    ids, move, over = right.copy(), kvbm.Transfer(src, dst), threading.Event()

    def write() -> None:  # without the interpreter's lock
        while not over.is_set():
            ctypes.memset(ids.ctypes.data + ids.nbytes // 2, 0x7F, ids.nbytes // 2)
            ctypes.memmove(ids.ctypes.data, right.ctypes.data, ids.nbytes)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            copied[...] = 0
            try:
                move.copy(ids, ids)
            except kvbm.BindError:
                assert not copied.any()
            else:
                assert (copied == 7).all()
    finally:
        over.set()
        writer.join()


@pytest.mark.parametrize("same_pool", [False, True])
def test_ids_of_pools_of_any_size(same_pool: bool) -> None:
    """The result does not depend on the number of blocks, and the memory is less than one number per block."""
    rng, seen = np.random.default_rng(5), set()
    virtual = int(Path("/proc/self/statm").read_text().split()[0])
    for turn in range(300):
        count = int(rng.integers(33, 200))
        src, dst = rng.permutation(1000)[:count], rng.permutation(1000)[:count] + (1000 if same_pool and turn % 2 else 0)
        src[rng.integers(0, count, 3)] = -1
        dst[rng.integers(0, count, 2)] = -1
        if turn % 3 == 0:
            dst[rng.integers(0, count, 2)] = dst[rng.integers(0, count)]
        found = []
        for blocks in (2000, (1 << 31) - 1):
            try:
                found.append(str(_core.Pairs(src, dst, 2000, blocks, same_pool).kept))
            except kvbm.BindError as error:
                found.append(str(error))
        assert found[0] == found[1], turn
        seen.add(re.sub(r"[0-9]+", "", found[0]))
    assert len(seen) == 2 + same_pool
    assert int(Path("/proc/self/statm").read_text().split()[0]) - virtual < 1 << 18  # pages of 4 KiB: 1 GiB


def test_pairs() -> None:
    """Number of pairs, and number without skipped ones; also with one object on both sides."""
    for src_ids, dst_ids, count, kept in (
        ([3, -1, 1], [0, 1, -1], 3, 1),
        (None, [4, -1], 2, 1),
        ([-1] * 100, range(100), 100, 0),
        (range(100), [*range(98), -1, -1], 100, 98),
        (None, None, 100, 100),
    ):
        pairs = _core.Pairs(src_ids, dst_ids, 100, 100)
        assert (len(pairs), pairs.kept) == (count, kept)
    same = [5, -1, 3]
    assert _core.Pairs(same, same, 6, 7).kept == 2
    with pytest.raises(kvbm.BindError, match=r"dst_ids\[0\] is 5: expected 0 to 3"):
        _core.Pairs(same, same, 6, 4)
    with pytest.raises(kvbm.BindError, match=r"src_ids\[0\] is 0: the pool has no blocks"):
        _core.Pairs([0], [0], 0, 4)


def test_blocks_of_one_pool() -> None:
    one = Bound("universal", SHAPE, 8)
    move = kvbm.Transfer(one.pool, one.pool)
    with pytest.raises(kvbm.BindError, match="both read and written"):
        move.copy([0, 1], [1, 2])
    assert one.untouched
    move.copy([0, 1], [6, 7])
    assert np.array_equal(
        one.buffer, oracle.expected_bytes(one.arena, one.arena, one.before, one.before, [0, 1], [6, 7])
    )


def test_what_was_done_is_counted() -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("vllm/paged_attn_v0", SHAPE, 6, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    assert set(move.stats()) == {"copies", "blocks", "bytes", "direct", "staged", "engine", "submissions"}
    assert not any(move.stats().values())
    move.copy([0, 1, -1], [0, 1, 2])
    move.copy([2], [2], layers=range(1))
    stats = move.stats()
    assert (stats["copies"], stats["direct"], stats["blocks"]) == (2, 2, 3)
    assert stats["bytes"] == 2 * SHAPE.nbytes + SHAPE.nbytes // 4


def test_explain_says_what_runs() -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("vllm/paged_attn_v0", SHAPE, 6, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    text = move.explain()
    assert text.startswith("nhd → vllm/paged_attn_v0, from host memory to host memory.")
    assert "cores" in text and "tile_" in text and "2 KiB per block" in text
    assert "512 B per block" in move.explain(4, layers=range(1))
    assert "nhd → vllm/paged_attn_v0" in repr(move) and "h2h" in repr(move)


def test_explain_of_the_cpu_has_no_words_of_a_gpu() -> None:
    shape = kvbm.BlockShape(2, 2, 4, 16, 32, "bfloat16")
    for dst in ("vllm/paged_attn_v0", "universal", "sglang/host_page_head"):
        text = kvbm.Transfer(kvbm.Pool.allocate("nhd", shape, 2), kvbm.Pool.allocate(dst, shape, 2)).explain()
        assert "shared memory" not in text and "threads" not in text.partition("becomes")[2], text
        assert dst != "vllm/paged_attn_v0" or "The CPU copies one tile of both after the other" in text


def test_explain_says_how_digests_are_made() -> None:
    """After they were requested: the kernel that computes them, or why a separate one does; and the cost of `verify`."""
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 6, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    assert "igest" not in move.explain()
    move.copy([1], [2], digests=np.zeros(1, np.uint64))
    assert "\nDigests are fused into direct copies (one launch of sum_rows_" in move.explain()
    assert "verify" not in move.explain() and "igest" not in move.explain(layers=range(2))
    text = kvbm.Transfer(src.pool, dst.pool, verify=True).explain()
    assert "verify digests the source before the copy and the destination after it" in text
    assert "2 KiB per block are read once more on either side.\n" in text
    apart = kvbm.Transfer(src.pool.section(l=(0, 1, 3)), dst.pool.section(l=(3, 1, 0)), verify=True).explain()
    why = "over the source before the copy: some coordinates are selected one by one."
    assert "direct copies are taken by a pass of their own (" in apart and why in apart


def test_explain_of_digests_across_a_link() -> None:
    """Digests by a ring's kernels, none by the copy engine, and which side is the far one."""

    class Kernel:
        def __init__(self, name: str) -> None:
            self.kernel = name

    one, other = [Kernel("digest_a")], [Kernel("digest_b"), Kernel("digest_b")]
    made = run.CopyDigests("cells of 16 bytes are copied in words of 2", [Kernel("sum_rows")], (one, other))  # type: ignore[arg-type, list-item]
    direct, staged, engine = made.explain(("direct", "staged", "engine"), of_dst=True)
    assert direct.endswith(
        "by a pass of their own (2 launches of digest_b) over the destination when the copy is done: cells of 16 bytes are copied "
        "in words of 2."
    )
    assert staged == "Digests are fused into staged copies (one launch of sum_rows), but for batches in which pairs are skipped."
    assert engine.endswith("over the destination when the copy is done: the copy engine computes nothing.")
    cost = made.explain_verify("10 MiB", ["destination"])
    assert "(one launch of digest_a and 2 launches of digest_b): 10 MiB per block" in cost
    assert cost.endswith("; the destination is read across the link.")


def test_closed_transfers_refuse() -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 6, dst=True)
    with kvbm.Transfer(src.pool, dst.pool) as move:
        move.copy([1], [1])
    check(src, dst, [1], [1])
    for layers in (None, range(1), range(2, 3)):
        with pytest.raises(kvbm.BindError, match="closed"):
            move.copy([2], [2], layers=layers)
    move.close()
    check(src, dst, [1], [1])


@pytest.mark.parametrize("which", [0, 1])
def test_closed_pools_of_own_memory_refuse(which: int) -> None:
    pools = [kvbm.Pool.allocate(kvbm.load(name), SHAPE, 6) for name in ("nhd", "universal")]
    move = kvbm.Transfer(*pools)
    move.copy([1], [1])
    pools[which].close()
    with pytest.raises(kvbm.BindError, match="closed"):
        move.copy([2], [2])


@pytest.mark.parametrize("copy", ["Transfer", "convert", "new"])
@pytest.mark.parametrize("which", [0, 1])
def test_closed_pools_refuse(copy: str, which: int) -> None:
    """A transfer that was made before has addresses that are no longer valid."""
    sides = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 6, dst=True)
    pools = [side.pool for side in sides]
    move = kvbm.Transfer(*pools)
    move.copy([1], [1])
    kvbm.convert(*pools, [1], [1])
    pools[which].close()
    ways = {
        "Transfer": lambda: move.copy([2], [2]),
        "convert": lambda: kvbm.convert(*pools, [2], [2]),
        "new": lambda: kvbm.Transfer(*pools),
    }
    with pytest.raises(kvbm.BindError, match="closed"):
        ways[copy]()
    check(*sides, [1], [1])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategy": "fast"}, "expected 'auto', 'aside', 'direct', 'staged' or 'engine', got 'fast'"),
        ({"strategy": "staged"}, "'staged' needs a GPU"),
        ({"strategy": "engine"}, "'engine' needs a GPU"),
        ({"max_sms": 4}, "max_sms: both pools are in host memory"),
        ({"max_sms": 0}, "max_sms: expected a number of multiprocessors"),
        ({"max_sms": 1 << 31}, "max_sms: expected a number of multiprocessors"),
        ({"max_sms": True}, "max_sms: expected a number"),
        ({"chunk_bytes": 1 << 20}, "chunk_bytes: only staged copies"),
    ],
)
@pytest.mark.parametrize("nl", [4, 2])
def test_options_that_cannot_be_honoured(options: dict[str, Any], match: str, nl: int) -> None:
    """Refused at once, not at the first copy, whether or not the pools hold the same layers."""
    other = kvbm.BlockShape(nl=nl, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    with pytest.raises(kvbm.BindError, match=match):
        kvbm.Transfer(Bound("nhd", SHAPE, 6).pool, Bound("universal", other, 6, dst=True).pool, **options)


def test_streams_are_for_gpus() -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 6, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    done = move.copy([0], [0])
    for given in ({"stream": 5}, {"wait": done}):
        with pytest.raises(kvbm.BindError, match=f"{next(iter(given))}: the pools are on the CPU"):
            move.copy([1], [1], **given)
    check(src, dst, [0], [0])


def test_threads_share_a_transfer() -> None:
    """Separate blocks, ranges of layers that are all new at the same time; no count is lost."""
    blocks, threads = 64, 8
    src, dst = Bound("nhd", SHAPE, blocks), Bound("vllm/paged_attn_v0", SHAPE, blocks, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    start = threading.Barrier(threads)

    def work(k: int) -> None:
        start.wait()
        for layer in range(4):
            for i in range(k, blocks, threads):
                move.copy([i], [blocks - 1 - i], layers=range(layer, layer + 1))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    check(src, dst, list(range(blocks)), list(range(blocks))[::-1])
    assert move.stats()["blocks"] == 4 * blocks and move.stats()["bytes"] == blocks * SHAPE.nbytes


def test_the_transfer_keeps_its_pools() -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 6, dst=True)
    pools = [kvbm.Pool(side.layout, SHAPE, [array.copy() for array in side.arrays]) for side in (src, dst)]
    move = kvbm.Transfer(*pools)
    addresses = [pool.addresses.copy() for pool in pools]
    del pools
    garbage = [np.full(array.shape, 7, array.dtype) for side in (src, dst) for array in side.arrays]
    assert not set(np.concatenate(addresses).tolist()) & {array.ctypes.data for array in garbage}
    move.copy([1], [1])


# ---- on a driver that is not one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["d2d", "d2h", "h2d"])
def test_every_pair_beside_a_model(fake_gpu: FakeDriver, direction: str) -> None:
    """As each strategy below: `aside` is one of the others then."""
    fake_gpu("transfers.every_pair", direction, "aside")


@pytest.mark.parametrize("direction", ["d2d", "d2h", "h2d"])
@pytest.mark.parametrize("strategy", ["direct", "staged", "engine", "auto", in_full("aside")])
class TestStrategies:
    def test_every_pair(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Bit-exact, other bytes unchanged, skipped pairs skipped, in any order of the streams."""
        fake_gpu("transfers.every_pair", direction, strategy)

    def test_batches(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Nothing, one block, and more than fit the parameters, a slot or a group; ids given on one side or none."""
        fake_gpu("transfers.batches", direction, strategy)

    def test_one_after_the_other_on_one_ring(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Ten batches in flight on three streams, each with separate blocks: no slot is written while it is read."""
        fake_gpu("transfers.one_after_the_other_on_one_ring", direction, strategy)

    def test_ids_on_the_device(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Read when the kernel runs; ids out of range are skipped and reported; the engine's ids must be on the host."""
        fake_gpu("transfers.ids_on_the_device", direction, strategy)

    def test_a_batch_moves_what_its_pairs_say(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Any number of pairs, larger and smaller than either pool, with -1 anywhere; sources may be repeated."""
        fake_gpu("transfers.a_batch_moves_what_its_pairs_say", direction, strategy)

    def test_layers(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Layer by layer into a pool with a stage's layers."""
        fake_gpu("transfers.layers", direction, strategy)

    @pytest.mark.slow
    def test_graphs(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """A capture runs nothing, and no call ends it; replays copy current contents; destroyed graphs free their resources."""
        fake_gpu("transfers.graphs", direction, strategy)

    def test_threads(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        fake_gpu("transfers.threads", direction, strategy)


@pytest.mark.parametrize(
    ("version", "stream", "batched"),
    [("13000", 5, True), ("12080", 5, True), ("12040", 5, False), ("13000", 0, True), ("12040", 0, False)],
)
def test_old_drivers_and_the_legacy_stream(fake_gpu: FakeDriver, version: str, stream: int, batched: bool) -> None:
    """No batched call if the driver has none, or on the legacy stream, which refuses it; CUDA 12.8's has one more argument."""
    fake_gpu("transfers.old_drivers_and_the_legacy_stream", stream, batched, FAKE_VERSION=version)


@pytest.mark.parametrize("strategy", ["direct", "staged", "engine", "auto"])
@pytest.mark.parametrize("to", [1, 0])
@pytest.mark.parametrize("first", [5, 0x105])
class TestTwoGpus:
    def test_streams_of_either(self, fake_gpu: FakeDriver, first: int, to: int, strategy: str) -> None:
        """Kernels, events and copies each run on their own GPU, in the order of the caller's stream of either GPU."""
        fake_gpu("transfers.streams_of_either", to, strategy, first, FAKE_DEVICES="2")


class TestGrants:
    """Two GPUs; the second one's pool is in memory whose access is granted per GPU."""

    @pytest.mark.parametrize(
        ("memory", "where"), [(1, "a stream-ordered pool"), (2, "memory mapped by the virtual memory API")]
    )
    @pytest.mark.parametrize("way", [(0, 1), (1, 0)])
    @pytest.mark.parametrize("peers", [True, False])
    def test_memory_that_is_granted_by_itself(
        self, fake_gpu: FakeDriver, way: tuple[int, int], memory: int, where: str, peers: bool
    ) -> None:
        """Kernels and batched copies access only memory granted to their GPU: direct is refused, other strategies are used."""
        knobs = {"FAKE_DEVICES": "2", "FAKE_PEERS": str(int(peers))}
        out = fake_gpu("transfers.memory_that_is_granted_by_itself", *way, memory, peers, **knobs)
        for line in out.splitlines():
            if line.startswith("3 ") and peers:
                assert "left out" not in line and "cuMemcpyPeerAsync" not in line, line
            elif line.startswith("0 "):
                assert f"array 0 of the destination lies in {where} that is not granted to cuda:{way[0]}" in line, line
                assert ("torch does so at its first own copy" in line) == peers, line
                assert ("use 'staged' or 'engine'" in line) != ("cuMemcpyPeerAsync" in line), line

    def test_a_pool_in_several_mappings(self, fake_gpu: FakeDriver) -> None:
        """Each mapping that an array touches is checked, including its first and last one, and no other."""
        fake_gpu("transfers.a_pool_in_several_mappings", FAKE_DEVICES="2")

    def test_raw_addresses(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.raw_addresses", FAKE_DEVICES="2")


class TestCaptureOnTheOtherGpu:
    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    def test_others_go_on(self, fake_gpu: FakeDriver, strategy: str) -> None:
        """While a stream of the other GPU is captured, uploads and copies of other streams run, and are not captured."""
        fake_gpu("transfers.others_go_on", strategy, FAKE_DEVICES="2")


class TestDefaultStreams:
    @pytest.mark.parametrize("device", [0, 1])
    def test_a_producer_on_a_default_stream(self, fake_gpu: FakeDriver, device: int) -> None:
        """Its handle is the same on all GPUs: the stream of the copy's GPU is meant."""
        out = fake_gpu("transfers.a_producer_on_a_default_stream", device, FAKE_DEVICES="2")
        assert out.split() == ["True", "False"]

    def test_two_gpus_and_a_default_stream(self, fake_gpu: FakeDriver) -> None:
        """Handle 0 exists on both GPUs: it is refused unless the stream's object names the GPU whose kernels run."""
        fake_gpu("transfers.two_gpus_and_a_default_stream", FAKE_DEVICES="2")


class TestOrder:
    @pytest.mark.parametrize("mark", ["done", "stream", "list"])
    @pytest.mark.slow
    def test_wait(self, fake_gpu: FakeDriver, mark: str) -> None:
        """A copy that waits for another one's end is right in any order of the streams; without the wait some order is wrong."""
        out = fake_gpu("transfers.wait", mark)
        assert out.split() == ["True", *["False"] * 9]

    def test_consumers(self, fake_gpu: FakeDriver) -> None:
        """`Done.wait` makes a stream wait; `synchronize` the host."""
        fake_gpu("transfers.consumers")


class TestRest:
    @pytest.mark.parametrize("kind", ["cuda.core 0.4", "cuda.core 1", "CUevent", "cudaEvent_t"])
    def test_wait_for_an_event(self, fake_gpu: FakeDriver, kind: str) -> None:
        """Events of any release of cuda.core, and cuda.bindings' handles, which are not streams."""
        out = fake_gpu("transfers.wait_for_an_event", kind)
        assert out.split() == ["True", "False"]

    def test_wait_is_refused_for_what_is_neither(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.wait_is_refused_for_what_is_neither")

    def test_neighbours_are_merged(self, fake_gpu: FakeDriver) -> None:
        """Blocks that are adjacent on both sides are one copy, in any order of the ids."""
        fake_gpu("transfers.neighbours_are_merged")

    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    @pytest.mark.parametrize("direction", ["d2h", "h2d"])
    def test_registrations_are_not_crossed(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """For pinned memory registered in pieces, the driver refuses a copy from one piece into the next."""
        fake_gpu("transfers.registrations_are_not_crossed", direction, strategy)

    @pytest.mark.slow
    def test_a_few_multiprocessors(self, fake_gpu: FakeDriver) -> None:
        """Never more CTAs than were granted; by default 16 if host memory is involved."""
        fake_gpu("transfers.a_few_multiprocessors")

    def test_each_copy_has_a_word_of_its_own(self, fake_gpu: FakeDriver) -> None:
        """Errors of ids on the GPU are reported for their copy only: others are in flight, dropped, or in a graph."""
        fake_gpu("transfers.each_copy_has_a_word_of_its_own")

    def test_threads_are_each_told(self, fake_gpu: FakeDriver) -> None:
        """The first copies of a transfer with ids on the GPU, by four threads at the same time."""
        fake_gpu("transfers.threads_are_each_told")

    @pytest.mark.parametrize("direction", ["d2h", "h2d"])
    def test_closed_beside_a_copy(self, fake_gpu: FakeDriver, direction: str) -> None:
        """The ring is not freed during a copy that is being enqueued, which succeeds; later copies are refused."""
        fake_gpu("transfers.closed_beside_a_copy", direction, MALLOC_PERTURB_="85")

    def test_closed_pools_beside_copies(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.closed_pools_beside_copies")

    def test_closed_in_a_child(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.closed_in_a_child")

    def test_closed_by_two_threads(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.closed_by_two_threads")

    def test_closed_at_exit(self) -> None:
        server().run("from programs import closed_at_exit\nclosed_at_exit.beside_a_copy()", "programs.closed_at_exit")

    @pytest.mark.slow
    def test_explain_and_auto(self, fake_gpu: FakeDriver) -> None:
        """The strategy in the text is the one that runs."""
        fake_gpu("transfers.explain_and_auto")

    def test_no_kernel_crosses_beside_a_model(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.aside")

    def test_options(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.options")

    def test_one_gpu_pool(self, fake_gpu: FakeDriver) -> None:
        fake_gpu("transfers.one_gpu_pool")

    def test_a_warm_copy_calls_no_more_than_it_must(self, fake_gpu: FakeDriver) -> None:
        """Calls of the driver, submissions, and calls in Python and in C, by strategy: what a time would show as a loss."""
        lines = [line.split() for line in fake_gpu("transfers.warm_copies").splitlines()]
        found = {(way, strategy): tuple(map(int, counts)) for way, strategy, *counts in lines}
        assert found == WARM, "\n".join(map(str, found.items()))

    def test_fork_after_cuda(self, fake_gpu: FakeDriver) -> None:
        """A child gets an error, and ends without changing its parent's resources."""
        out = fake_gpu("transfers.fork_after_cuda")
        assert out.split() == ["7"]
