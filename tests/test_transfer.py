"""Transfers without a GPU: ranges of layers, copies in two steps, host pools; and every strategy on a driver that is not one.

The tests of the last part are processes of their own, as those of test_driver.py.  There streams run in any order that
events allow (`fake_seed`): a wait that is missing shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import oracle
import test_driver
from kvbm import _core, kernels, prepare, spec
from memory import Bound, aligned, numpy_views, placed
from test_driver import library  # noqa: F401
from test_planner import execute

SHAPE = kvbm.BlockShape(nl=4, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
NAMES = sorted(matrix.SHIPPED)


def partners(src: str) -> list[str]:
    return [dst for dst in NAMES if not matrix.refused(src, dst)]


def moved(src: Bound, dst: Bound, src_ids: Any, dst_ids: Any, layers: Any = None) -> np.ndarray:
    """The destination after the copy of these layers, (range, range) or None: the oracle's."""
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
    """Those layers and nothing else, between all pairs of layouts: in the plan and by the host's kernels."""
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
    """A stage of a pipeline holds some of the layers that the other side holds: both ranges are said."""
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
    """One transfer, layer by layer as a model runs: the sum is the whole."""
    one, other = Bound("nhd", SHAPE, 4), Bound("vllm/paged_attn_v0", SHAPE, 4, dst=True)
    move = kvbm.Transfer(one.pool, other.pool)
    for layer in range(4):
        move.copy([3, 1], [0, 2], layers=range(layer, layer + 1))
    check(one, other, [3, 1], [0, 2])
    assert move.stats()["bytes"] == 2 * SHAPE.nbytes and move.stats()["copies"] == 4


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        (range(0, 4, 2), r"layers: expected range\(first, last\) or two of them"),
        (range(2, 5), "within 0 to 4 of the source"),
        (range(-1, 2), "within 0 to 4 of the source"),
        (range(2, 2), "within 0 to 4 of the source"),
        ((range(2), range(3, 5)), "within 0 to 4 of the destination"),
        ((range(2), range(3)), "as many in the source as in the destination"),
        ((range(2),), "or two of them"),
        ((range(1), range(1), range(1)), "or two of them"),
        ((0, 1), "or two of them"),
        (2, "or two of them"),
        ("02", "or two of them"),
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


def test_pools_of_other_layers_need_a_range() -> None:
    stage = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
    move = kvbm.Transfer(Bound("nhd", SHAPE, 4).pool, Bound("universal", stage, 4, dst=True).pool)
    with pytest.raises(kvbm.BindError, match=r"hold 4 and 2 layers; say which by layers=\(range of the source"):
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


def at_slot(base: int) -> Any:
    return SimpleNamespace(bases=[base])


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("src", NAMES)
def test_two_steps_are_the_one(src: str, gathers: bool) -> None:
    """Packed into a slot and moved on, or moved into a slot and unpacked: the bytes of the copy in one step.

    Once by the loop nests alone, the far one as the copy engine takes it; once by the kernels, on the host.
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
        want = moved(one, other, src_ids, dst_ids)
        slot = oracle.noise(64 + 3 * block + 64, 5)

        steps = [step(side.arena) for side in (one, other)]
        far = second.flat(None, steps[1]) if gathers else first.flat(steps[0], None)
        nests = (first, far) if gathers else (far, second)
        filled = execute(nests[0], one.arena, at_slot(64), one.before, slot, src_ids, range(3))
        assert np.array_equal(filled[:64], slot[:64]) and np.array_equal(filled[-64:], slot[-64:])
        got = execute(nests[1], at_slot(64), other.arena, filled, other.before, range(3), dst_ids)
        assert np.array_equal(got, want), (src, name)

        memory = aligned(slot)
        table = _core.Table(np.array([memory.ctypes.data + 64], np.uint64))
        for copy in prepare.prepare(first, one.pool.alignment, 16):
            copy.run(_core.Table(one.pool.addresses), table, _core.Pairs(src_ids, None, one.pool.num_blocks, 3))
        for copy in prepare.prepare(second, 16, other.pool.alignment):
            copy.run(table, _core.Table(other.pool.addresses), _core.Pairs(None, dst_ids, 3, other.pool.num_blocks))
        assert np.array_equal(other.buffer, want), oracle.explain(other.arena, other.buffer, want)
        assert np.array_equal(memory[:64], slot[:64]) and np.array_equal(memory[-64:], slot[-64:])


def step(arena: oracle.Arena) -> int:
    steps = set(np.diff(arena.bases).tolist()) or {0}
    assert len(steps) == 1
    return int(steps.pop())


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
    """One base where all lie at a step, else all of them: the steps of a block alone do not shorten it."""
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
    """Allocations at one step are one: on either side, on both, and for a range of layers."""
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
    "list", "tuple", "int8", "int16", "int32", "int64", "torch.int16", "torch.int32", "torch.int64", "strided", "reversed",
    "big endian", "array", "numbers", "memoryview", "deque",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other_kind", KINDS)
def test_ids_of_every_kind(kind: str, other_kind: str) -> None:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 7, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    done = move.copy(ids_as(kind, [5, -1, 3, 0]), ids_as(other_kind, [0, 1, -1, 6]))
    check(src, dst, [5, 0], [0, 6])
    assert done.query() and done.synchronize() is None and done.wait(5) is None
    assert move.stats()["blocks"] == 2


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
    """Lazy views, shrunk storages and tensors without memory are refused; views and clones that share memory are read."""
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


def test_ids_that_are_written_while_they_are_read() -> None:
    """What was checked is what is copied: all of it, or it is refused, while another thread makes ids wrong and right again."""
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


def test_pairs() -> None:
    """How many there are, and how many are kept; one object on both sides."""
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
    assert "cores" in text and "tile_" in text and "2 KiB a block" in text
    assert "512 B a block" in move.explain(4, layers=range(1))
    assert "nhd → vllm/paged_attn_v0" in repr(move) and "h2h" in repr(move)


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


@pytest.mark.parametrize("copy", ["Transfer", "convert", "new"])
@pytest.mark.parametrize("which", [0, 1])
def test_closed_pools_refuse(copy: str, which: int) -> None:
    """A transfer that was made before knows addresses that now lead nowhere."""
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
        ({"strategy": "fast"}, "expected 'auto', 'direct', 'staged' or 'engine', got 'fast'"),
        ({"strategy": "staged"}, "'staged' needs a GPU"),
        ({"strategy": "engine"}, "'engine' needs a GPU"),
        ({"max_sms": 4}, "max_sms: both pools are in host memory"),
        ({"max_sms": 0}, "max_sms: expected a number of multiprocessors"),
        ({"max_sms": True}, "max_sms: expected a number"),
        ({"chunk_bytes": 1 << 20}, "chunk_bytes: only staged copies"),
    ],
)
@pytest.mark.parametrize("nl", [4, 2])
def test_options_that_cannot_be_honoured(options: dict[str, Any], match: str, nl: int) -> None:
    """Whether or not the pools hold the same layers: at once, and not at the first copy."""
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
    """Blocks of their own, ranges of layers that are met for the first time at once; nothing is lost from the counts."""
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

on_the_fake_driver = [
    pytest.mark.skipif(
        kernels.is_using_stubs(), reason="kvbm was built without CUDA kernels: there is nothing to launch"
    ),
    pytest.mark.skipif(test_driver.COMPILER is None, reason="no C compiler for the fake driver"),
]

#: Pools over guarded memory, "on the GPU" or pinned, and the oracle's verdict.
PRELUDE = """
import itertools, mmap, threading
import matrix, oracle
from memory import numpy_views, placed

SHAPE = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=16, dtype="bfloat16")
SMALL = kvbm.BlockShape(nl=2, no=2, nh=1, nt=2, hd=16, dtype="int16")
NAMES = ["nhd", "universal", "vllm/LBHNC", "vllm/flash_attn_nhd", "vllm/paged_attn_v0", "hf/dynamic_cache",
         "vllm/BLHNC", "operational_hnd"]
def seed(n): ctypes.c_uint.in_dll(driver, "fake_seed").value = n
def pump(n=-1): return driver.fake_pump(n)

class On:  # a stream by its protocol
    def __init__(self, handle): self.handle = handle
    def __cuda_stream__(self): return (0, self.handle)

class End:
    def __init__(self, name, blocks, where, dst=False, shape=SHAPE, align=0, pin=True):
        how = ("steps", "rows", "scattered")[(blocks + len(name) + dst) % 3]
        self.arena = placed(matrix.orders()[name], shape, blocks).layout_bytes(align, how)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        self.pages = mmap.mmap(-1, self.before.size + 4096)
        self.buffer = np.frombuffer(self.pages, np.uint8)[:self.before.size]
        self.buffer[:] = self.before
        views = numpy_views(self.arena, self.buffer, shape.dtype)
        if where != "pinned":
            views = [FakeCuda(v.shape, shape.dtype, address=v.ctypes.data, strides=v.strides, device=where) for v in views]
        self.pool = kvbm.Pool(kvbm.load(name), shape, views)
        if where == "pinned" and pin: self.pool.pin()

    def refill(self, salt):
        self.before = (oracle.source_bytes if salt else oracle.dest_bytes)(self.arena, salt)
        self.buffer[:] = self.before

def transfer(s, d, strategy):  # staged in groups of two blocks
    return kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=2 * SHAPE.nbytes if strategy == "staged" else None)

def moved(s, d, src_ids, dst_ids): return oracle.expected_bytes(s.arena, d.arena, s.before, d.before, src_ids, dst_ids)

def right(s, d, src_ids, dst_ids):
    return np.array_equal(d.buffer, moved(s, d, src_ids, dst_ids)) and np.array_equal(s.buffer, s.before)

def check(s, d, src_ids, dst_ids, what=""):
    assert right(s, d, src_ids, dst_ids), (what, oracle.explain(d.arena, d.buffer, moved(s, d, src_ids, dst_ids)))

SIDES = {"d2d": (0, 0), "d2h": (0, "pinned"), "h2d": ("pinned", 0)}
def ends(direction, src, dst, src_blocks, dst_blocks, **rest):
    a, b = SIDES[direction]
    return End(src, src_blocks, a, **rest), End(dst, dst_blocks, b, dst=True, **rest)

def batch(n, src_blocks, dst_blocks, skips=True):
    "Ids, and the pairs of them that are copied."
    src, dst = random.choice(src_blocks, n, replace=False), random.choice(dst_blocks, n, replace=False)
    kept = np.ones(n, bool)
    if skips and n > 4: kept[random.choice(n, n // 4, replace=False)] = False
    skipped = np.flatnonzero(~kept)
    src[skipped[::2]], dst[skipped[1::2]] = -1, -1
    return src, dst, src[kept].copy(), dst[kept].copy()
"""


def run(folder: Path, code: str, **knobs: str) -> str:
    return test_driver.run(folder, PRELUDE + code, "matrix", **knobs)


@pytest.mark.parametrize("direction", ["d2d", "d2h", "h2d"])
@pytest.mark.parametrize("strategy", ["direct", "staged", "engine", "auto"])
class TestStrategies:
    pytestmark = on_the_fake_driver

    def test_every_pair(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Bit-exact, nothing else touched, skipped pairs skipped, whatever order the streams run in."""
        run(
            library,
            f"""
staged = {strategy!r} in ("staged", "auto")
defer(1)
for number, (src, dst) in enumerate(itertools.product(NAMES, NAMES)):
    if number % 3 and src != "universal" and dst != "vllm/paged_attn_v0": continue
    for chunk in ((None, 1, 3) if staged else (None,)):
        s, d = ends({direction!r}, src, dst, 11, 13, align=2 * (number % 2))
        slot = chunk and chunk * SHAPE.nbytes
        seed(number % 4)
        with kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=slot) as move:
            src_ids, dst_ids, src_kept, dst_kept = batch([7, 11, 1, 5][number % 4], 11, 13)
            kind = [np.int32, np.int64][number // 2 % 2]
            src_ids, dst_ids = src_ids.astype(kind), dst_ids.astype(kind)
            done = move.copy(src_ids, dst_ids, stream=5)
            src_ids[:] = dst_ids[:] = 0
            assert not done.query() or len(src_kept) == 0
            assert np.array_equal(d.buffer, d.before)
            pump()
            assert done.query()
            check(s, d, src_kept, dst_kept, (src, dst, chunk))
            stats = move.stats()
            assert stats["copies"] == 1 and stats["blocks"] == len(src_kept)
            assert {strategy!r} == "auto" or stats[{strategy!r}] == 1
            assert done.strategy in ("direct", "staged", "engine") and stats[done.strategy] == 1
assert count("pushes") == count("pops") and count("batch_on_legacy") == 0
""",
        )

    def test_batches(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Nothing, one block, and more than the parameters, a slot or one group hold; ids given on one side or none."""
        run(
            library,
            f"""
slot = {{"staged": 20 * SMALL.nbytes}}.get({strategy!r})
defer(1)
for turn, (src, dst) in enumerate((("nhd", "universal"), ("vllm/LBHNC", "vllm/flash_attn_nhd"), ("universal", "hf/dynamic_cache"))):
    for n in (0, 1, 7, 700):
        s, d = ends({direction!r}, src, dst, n + 20, n + 30, shape=SMALL)
        seed(turn)
        move = kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=slot)
        src_ids, dst_ids, src_kept, dst_kept = batch(n, n + 20, n + 30)
        done = move.copy(src_ids.tolist() if n < 100 else src_ids, dst_ids, stream=5)
        src_ids[:] = dst_ids[:] = 0
        done.synchronize()
        check(s, d, src_kept, dst_kept, (src, dst, n))
        if {strategy!r} == "staged" and n == 700: assert move.stats()["submissions"] >= 2 * len(src_kept) / 20
        pump()
    for given in (([6, 0, 3], None), (None, [6, 0, 3]), (None, None)):
        s, d = ends({direction!r}, src, dst, 9, 9, shape=SMALL)
        move = kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=slot)
        move.copy(*given, stream=5).synchronize()
        n = 3 if given != (None, None) else 9
        check(s, d, *(range(n) if ids is None else ids for ids in given))
        pump()
""",
        )

    def test_one_after_the_other_on_one_ring(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Ten batches in flight on three streams, each with blocks of its own: no slot is written while it is read."""
        run(
            library,
            f"""
defer(1)
for start in range(6):
    s, d = ends({direction!r}, "nhd", "vllm/flash_attn_nhd", 40, 40)
    slot = 2 * SHAPE.nbytes if {strategy!r} in ("staged", "auto") else None
    move = kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=slot)
    seed(start)
    order, to = random.permutation(40), random.permutation(40)
    for turn in range(10):
        move.copy(order[4 * turn:4 * turn + 4], to[4 * turn:4 * turn + 4], stream=5 + turn % 3)
    pump()
    check(s, d, order, to)
""",
        )

    def test_old_drivers_and_the_legacy_stream(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """No batched call where there is none; beside the legacy stream, which refuses it; CUDA 12.8's has one argument more."""
        for version, stream, batched in (
            ("13000", 5, True),
            ("12080", 5, True),
            ("12040", 5, False),
            ("13000", 0, True),
            ("12040", 0, False),
        ):
            run(
                library,
                f"""
s, d = ends({direction!r}, "nhd", "vllm/flash_attn_nhd", 9, 9)
move = kvbm.Transfer(s.pool, d.pool, {strategy!r})
move.copy([8, 1, 0, 5], [1, 8, 3, 0], stream={stream}).synchronize()
check(s, d, [8, 1, 0, 5], [1, 8, 3, 0])
assert count("batch_on_legacy") == 0
used = {strategy!r} == "engine"
assert not used or (count("batches") > 0) == {batched}, count("batches")
assert not used or (count("single_copies") == 0) == {batched}, count("single_copies")
""",
                FAKE_VERSION=version,
            )

    def test_ids_on_the_device(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Read when the kernel runs; what is out of range is skipped and reported; the engine's ids must be on the host."""
        run(
            library,
            f"""
def on_gpu(ids, kind=np.int64):
    array = np.array(ids, kind)
    on_gpu.keep.append(array)
    return array, FakeCuda(array.shape, array.dtype.name, address=array.ctypes.data)
on_gpu.keep = []
def refused(call, *words):
    before = d.buffer.copy()
    try: call()
    except kvbm.BindError as error: assert all(word in str(error) for word in words), error
    else: raise AssertionError("not refused")
    pump()
    assert np.array_equal(d.buffer, before)

defer(1)
gathers = {direction!r} != "h2d"
for kind in (np.int32, np.int64):
    s, d = ends({direction!r}, "nhd", "universal", 9, 11)
    move = kvbm.Transfer(s.pool, d.pool, {strategy!r})
    (src, src_gpu), (dst, dst_gpu) = on_gpu([0] * 4, kind), on_gpu([0] * 4, kind)
    if {strategy!r} in ("direct", "auto"):
        calls = (src_gpu, dst_gpu), ([8, 1, 0, 5], dst_gpu), (src_gpu, [1, 8, 3, 0]), (src_gpu, None), (None, dst_gpu)
    elif {strategy!r} == "staged" and not gathers:
        calls = ([8, 1, 0, 5], dst_gpu), (None, dst_gpu), ([8, -1, 0, 5], dst_gpu)
        refused(lambda: move.copy(src_gpu, dst_gpu, stream=5), "staged", "src_ids lie on the GPU")
        refused(lambda: move.copy(src_gpu, [0, 1, 2, 3], stream=5), "staged", "src_ids lie on the GPU")
    else:
        calls = ()
        sentence = "engine: block ids lie on the GPU" if {strategy!r} == "engine" else "staged: block ids lie on the GPU"
        for ids in ((src_gpu, dst_gpu), ([8, 1, 0, 5], dst_gpu), (src_gpu, [1, 8, 3, 0])):
            refused(lambda: move.copy(*ids, stream=5), sentence, "strategy='direct'")
    for ids in calls:
        d.refill(0)
        src[:], dst[:] = 7, 7  # what is there when the copy is enqueued does not count
        done = move.copy(*ids, stream=5)
        src[:], dst[:] = [8, 1, -1, 5], [1, 8, 3, -1]
        pump()
        one = src if ids[0] is src_gpu else np.array(range(4) if ids[0] is None else ids[0])
        other = dst if ids[1] is dst_gpu else np.array(range(4) if ids[1] is None else ids[1])
        kept = (one >= 0) & (other >= 0)
        check(s, d, one[kept], other[kept], ids)
        done.synchronize()
        # Out of range: skipped, said once, and the next copy is none the worse.
        d.refill(0)
        done = move.copy(*ids, stream=5)
        src[:], dst[:] = [8, 1, 9, 5], [1, 8, 3, 11]
        pump()
        one = src if ids[0] is src_gpu else one
        other = dst if ids[1] is dst_gpu else other
        kept = (one >= 0) & (other >= 0) & (one < 9) & (other < 11)
        check(s, d, one[kept], other[kept], ids)
        try: done.synchronize()
        except kvbm.BindError as error:
            assert "ids on the device: pair" in str(error), error
        else: raise AssertionError("not reported")
        done.synchronize()
    if calls:
        wide = on_gpu([0] * 4, np.int64 if kind is np.int32 else np.int32)[1]
        if {strategy!r} != "staged": refused(lambda: move.copy(src_gpu, wide, stream=5), "one width")
        refused(lambda: move.copy([0, 1, 2], dst_gpu, stream=5), "as many source as destination ids")
        refused(lambda: move.copy([0, 1, 2, 9], dst_gpu, stream=5), "src_ids[3] is 9")
        refused(lambda: move.copy([0, 1, 2, 3], FakeCuda((4,), "float32"), stream=5), "int32 or int64")
        refused(lambda: move.copy([0, 1, 2, 3], FakeCuda((4,), "int64", device=1), stream=5), "cuda:1")
        refused(lambda: move.copy([0, 1, 2, 3], FakeCuda((4,), "int64", strides=(16,)), stream=5), "contiguous")
""",
        )

    def test_a_batch_moves_what_its_pairs_say(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Any number of pairs, larger and smaller than either pool, with -1 anywhere; sources may be named again."""
        run(
            library,
            f"""
defer(1)
slot = 3 * SMALL.nbytes if {strategy!r} == "staged" else None
device_ids = {strategy!r} in ("direct", "auto") or ({strategy!r}, {direction!r}) == ("staged", "h2d")
def on_gpu(ids):
    on_gpu.keep.append(ids)
    return FakeCuda(ids.shape, ids.dtype.name, address=ids.ctypes.data)
on_gpu.keep = []
turn = 0
for blocks in ((2, 500), (500, 2), (2, 2), (70, 500), (3, 40)):
    for n in (1, 2, 5, 20, 64, 65, 500):
        for skipped in (0, 0.5, 0.97):
            turn += 1
            seed(turn % 5)
            s, d = ends({direction!r}, *(("universal", "nhd"), ("nhd", "universal"))[turn % 2], *blocks, shape=SMALL)
            with kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=slot) as move:
                src = random.integers(0, blocks[0], n)
                dst = np.full(n, -1); order = random.permutation(n)[:blocks[1]]
                dst[order] = random.permutation(blocks[1])[:len(order)]
                src[random.random(n) < skipped] = -1
                kept = (src >= 0) & (dst >= 0)
                kind = (np.int32, np.int64)[turn % 2]
                given, to = src.astype(kind), dst.astype(kind)
                on_device = device_ids and turn % 3 == 0
                done = move.copy(given, on_gpu(to) if on_device else to, stream=5)
                pump()
                check(s, d, src[kept], dst[kept], (blocks, n, skipped, on_device, done.strategy))
                done.synchronize()
                assert on_device or move.stats()["blocks"] == kept.sum()
""",
        )

    def test_layers(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Layer by layer into a pool that holds a stage's layers."""
        run(
            library,
            f"""
import dataclasses
stage = dataclasses.replace(SHAPE, nl=2)
for src, dst in itertools.product(NAMES[:5], NAMES[:5]):
    a, b = SIDES[{direction!r}]
    s, d = End(src, 6, a), End(dst, 7, b, dst=True, shape=stage)
    move = kvbm.Transfer(s.pool, d.pool, {strategy!r})
    for layer in range(2):
        move.copy([5, 0, 3], [6, 1, 2], layers=(range(layer + 1, layer + 2), range(layer, layer + 1)), stream=5)
    pump()
    want = d.before.copy()
    oracle.scatter(want, d.arena.positions([6, 1, 2]), oracle.gather(s.before, s.arena.positions([5, 0, 3])[:, 1:3], 2))
    assert np.array_equal(d.buffer, want), (src, dst)
""",
        )

    @pytest.mark.slow
    def test_graphs(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Nothing runs in a capture and no call breaks it; replays move what is there; destroyed graphs give back what they had."""
        run(
            library,
            f"""
for name in ("fake_end_capture", "fake_launch_graph", "fake_destroy_graph", "fake_begin_capture"):
    getattr(driver, name).restype = ctypes.c_void_p
handle = ctypes.c_void_p
def capture(*ids):
    driver.fake_begin_capture(handle(6))
    move.copy(*ids, stream=6)
    graph = driver.fake_end_capture()
    assert graph, "a stream of the capture was left behind"
    pump()
    assert np.array_equal(d.buffer, d.before)
    return handle(graph)

slot = 3 * SMALL.nbytes if {strategy!r} == "staged" else None
for n in (2, 20, 800):
    s, d = ends({direction!r}, "nhd", "vllm/flash_attn_nhd", 2 * n, 2 * n, shape=SMALL)
    move = kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=slot)
    move.copy([0], [0], stream=5)
    pump()
    d.refill(0)
    order, to = random.permutation(2 * n), random.permutation(2 * n)
    defer(1)
    graphs = [capture(order[:n].copy(), to[:n].copy()), capture(order[n:].copy(), to[n:].copy())]
    for turn in range(4):
        s.refill(1 + turn); d.refill(0)
        seed(turn)
        for graph in graphs: driver.fake_launch_graph(graph, handle(5 + turn % 2))  # side by side, or one after the other
        if turn == 3:  # beside a copy that is none of a graph's
            move.copy(order, to, stream=9)
        pump()
        check(s, d, order, to, (n, turn))
    slots, held = count("slots"), count("allocated_bytes")
    for again in range(20):
        for graph in graphs: driver.fake_destroy_graph(graph)
        d.refill(0)
        graphs = [capture(order[:n].copy(), to[:n].copy()), capture(order[n:].copy(), to[n:].copy())]
        assert (count("slots"), count("allocated_bytes")) == (slots, held), again
    for turn in range(1, 9):  # what two graphs took again is each one's own
        s.refill(1 + turn); d.refill(0)
        seed(turn)
        for i, graph in enumerate(graphs): driver.fake_launch_graph(graph, handle(5 + i))
        pump()
        check(s, d, order, to, (n, "again"))
    defer(0)
assert count("broken_captures") == 0
""",
        )

    def test_threads(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        run(
            library,
            f"""
s, d = ends({direction!r}, "nhd", "vllm/flash_attn_nhd", 64, 64)
move = kvbm.Transfer(s.pool, d.pool, {strategy!r})
start, failed = threading.Barrier(8), []
def work(k):
    try:
        start.wait()
        for i in range(k, 64, 8): move.copy([i], [63 - i], stream=5 + k).synchronize()
    except BaseException as error: failed.append(error)
threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert not failed, failed
check(s, d, range(64), range(64)[::-1])
assert move.stats()["blocks"] == move.stats()["copies"] == 64
assert count("pushes") == count("pops")
""",
        )


@pytest.mark.parametrize("strategy", ["direct", "staged", "engine", "auto"])
@pytest.mark.parametrize("to", [1, 0])
@pytest.mark.parametrize("first", [5, 0x105])
class TestTwoGpus:
    pytestmark = on_the_fake_driver

    def test_streams_of_either(self, library: Path, first: int, to: int, strategy: str) -> None:  # noqa: F811
        """Kernels, events and copies each on the GPU that they are of, and ordered by the caller's stream of either."""
        run(
            library,
            f"""
defer(1)
for start, second in itertools.product(range(4), (6, 0x106)):
    s, m, d = End("nhd", 12, {1 - to}), End("universal", 12, {to}, dst=True), End("vllm/LBHNC", 12, {1 - to}, dst=True)
    there, back = transfer(s, m, {strategy!r}), transfer(m, d, {strategy!r})
    seed(start)
    done = there.copy(range(12), range(12), stream={first})
    back.copy(range(12), range(12), stream=second, wait=done)
    pump()
    m.before = moved(s, m, range(12), range(12))
    check(s, m, range(12), range(12))
    check(m, d, range(12), range(12))
assert count("pushes") == count("pops")
""",
            FAKE_DEVICES="2",
        )


#: Two GPUs, of which the second's pool lies in memory that is granted by itself.
GRANTS = """
POOL, MAPPING, PAGE = 1, 2, 2 << 20
def name(begin, end, kind, device, granted):
    driver.fake_memory(ctypes.c_ulonglong(begin), ctypes.c_ulonglong(end), kind, device, granted)
def span(end): return end.buffer.ctypes.data, end.buffer.ctypes.data + end.buffer.nbytes
def why(call):
    try: call()
    except kvbm.BindError as error: return str(error)
    raise AssertionError("not refused")
"""


class TestGrants:
    pytestmark = on_the_fake_driver

    @pytest.mark.parametrize("kind", ["POOL", "MAPPING"])
    @pytest.mark.parametrize("way", [(0, 1), (1, 0)])
    @pytest.mark.parametrize("peers", ["1", "0"])
    def test_memory_that_is_granted_by_itself(
        self,
        library: Path,  # noqa: F811
        way: tuple[int, int],
        kind: str,
        peers: str,
    ) -> None:
        """No kernel and no batched copy touches what is not granted to its GPU: direct is refused, the rest goes another way."""
        out = run(
            library,
            GRANTS
            + f"""
for granted in (0b11, 0):
    for strategy in ("direct", "staged", "engine", "auto"):
        for layouts in (("nhd", "universal"), ("universal", "vllm/LBHNC"), ("nhd", "nhd")):
            s, d = End(layouts[0], 9, {way[0]}), End(layouts[1], 11, {way[1]}, dst=True)
            for end, device in ((s, {way[0]}), (d, {way[1]})): name(*span(end), {kind}, device, granted | 1 << device)
            if strategy == "direct" and (not granted or not {peers}):
                print(granted, why(lambda: transfer(s, d, strategy)))
                continue
            move = transfer(s, d, strategy)
            before = count("peer_copies")
            for stream in (5, 0x105):
                d.refill(0)
                move.copy(range(9), range(2, 11), stream=stream).synchronize()
                check(s, d, range(9), range(2, 11), (granted, strategy, layouts))
            assert (count("peer_copies") > before) == (not granted), (granted, strategy)
            if strategy == "auto": print(granted, move._mover.explain(None, None).replace(chr(10), " "))
assert count("illegal") == 0 and count("pushes") == count("pops")
""",
            FAKE_DEVICES="2",
            FAKE_PEERS=peers,
        )
        where = "a stream-ordered pool" if kind == "POOL" else "memory mapped by the virtual memory API"
        for line in out.splitlines():
            if line.startswith("3 ") and peers == "1":
                assert "left out" not in line and "cuMemcpyPeerAsync" not in line, line
            elif line.startswith("0 "):
                assert f"array 0 of the destination lies in {where} that is not granted to cuda:{way[0]}" in line, line
                assert ("torch does so at its first own copy" in line) == (peers == "1"), line
                assert ("use 'staged' or 'engine'" in line) != ("cuMemcpyPeerAsync" in line), line

    def test_a_pool_in_several_mappings(self, library: Path) -> None:  # noqa: F811
        """Each mapping that an array touches is asked about, its first and its last among them, and no other."""
        run(
            library,
            GRANTS
            + """
from kvbm import _core
base = 1 << 44  # nothing is there
for i in range(6): name(base + i * PAGE, base + (i + 1) * PAGE, MAPPING, 1, 0b11)
def found(*spans): return _core.find_ungranted(0, np.array(spans, np.uint64).reshape(-1, 2))
whole = (base, base + 6 * PAGE)
assert found(whole) is None and found() is None
for hole in range(6):
    name(base + hole * PAGE, base + (hole + 1) * PAGE, MAPPING, 1, 0b10)
    assert found(whole)[0] == 0
    first, last = base + hole * PAGE, base + (hole + 1) * PAGE
    assert found((base, first)) is None or hole == 0
    assert found((last, base + 6 * PAGE)) is None
    assert found((base, first + 1))[0] == 0 and found((last - 1, base + 6 * PAGE))[0] == 0
    spans = (base, first), (first - 8, first), (first - 8, first + 8)
    if hole: assert found(*spans) == (2, "memory mapped by the virtual memory API")
    name(base + hole * PAGE, base + (hole + 1) * PAGE, MAPPING, 1, 0b11)
assert _core.find_ungranted(1, np.array([whole], np.uint64)) is None
""",
            FAKE_DEVICES="2",
        )

    def test_raw_addresses(self, library: Path) -> None:  # noqa: F811
        run(
            library,
            GRANTS
            + """
from kvbm.kernels import MemcpyBatchMode as Mode, memcpy_batch, vectorized_copy
one, other = (random.integers(0, 256, 64 * 40, np.uint8) for _ in range(2))
a, b = ([int(x) for x in m.ctypes.data + 64 * np.arange(40)] for m in (one, other))
def place(granted): name(b[0], b[-1] + 64, MAPPING, 1, granted)
for granted in (0b11, 0b10):
    place(granted)
    for src, dst, read, written in ((a, b, one, other), (b, a, other, one)):
        written[:] = 0
        if granted == 0b11:
            vectorized_copy(src, dst, 64, stream=5, device=0)
        else:
            assert "_ptrs[0] lies in memory mapped by the virtual memory API that is not granted to cuda:0" in why(
                lambda: vectorized_copy(src, dst, 64, stream=5, device=0))
            assert not written.any()
            try: memcpy_batch(src, dst, 64, stream=5, device=0, mode=Mode.BATCH_WITHOUT_FALLBACK)
            except kvbm.CudaError as error: assert error.name == "KVBM_NOT_GRANTED"
            else: raise AssertionError
            assert memcpy_batch(src, dst, 64, stream=5, device=0) == Mode.FALLBACK_ONLY
        assert np.array_equal(one, other)
        one[:] = random.integers(0, 256, one.size, np.uint8); other[:] = random.integers(0, 256, one.size, np.uint8)
place(0b10)
memcpy_batch(b[:20], b[20:], 64, stream=0x105, device=1)  # its own
assert np.array_equal(other[:1280], other[1280:])
assert count("illegal") == 0
""",
            FAKE_DEVICES="2",
        )


class TestCaptureOnTheOtherGpu:
    pytestmark = on_the_fake_driver

    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    def test_others_go_on(self, library: Path, strategy: str) -> None:  # noqa: F811
        """A stream of the other GPU is captured: uploads and copies of other streams meanwhile are done, and not captured."""
        run(
            library,
            f"""
from kvbm import _core
for call in ("fake_end_capture",): getattr(driver, call).restype = ctypes.c_void_p
handle = ctypes.c_void_p
s, d = End("nhd", 12, 0), End("universal", 12, 1, dst=True)
other, far = End("nhd", 12, 0), End("universal", 12, 1, dst=True)
move, beside = transfer(s, d, {strategy!r}), transfer(other, far, {strategy!r})
for one in (move, beside): one.copy([0], [0], stream=0x105).synchronize()
d.refill(0); far.refill(0)
held, tables = [], []
for turn in range(3):
    driver.fake_begin_capture(handle(0x106))
    move.copy(range(6), range(6), stream=0x106)
    tables.append(_core.Table(np.arange(8, dtype=np.uint64), 0))  # is uploaded
    beside.copy(range(12), range(12), stream=0x105).synchronize()
    check(other, far, range(12), range(12), "beside")
    move.copy(range(6, 12), range(6, 12), stream=0x107).synchronize()
    check(s, d, range(6, 12), range(6, 12), "the same transfer")
    move.copy(range(6, 12), range(6, 12), stream=0x106)
    graph = driver.fake_end_capture()
    assert graph, "a stream of the capture was left behind"
    d.refill(0); far.refill(0)
    driver.fake_launch_graph(handle(graph), handle(0x105))
    pump()
    check(s, d, range(12), range(12), "replayed")
    driver.fake_destroy_graph(handle(graph))
    d.refill(0)
    held.append(count("allocated_bytes"))
assert held[1] - held[0] == held[2] - held[1] == 64, held
assert count("broken_captures") == 0
""",
            FAKE_DEVICES="2",
        )


class TestDefaultStreams:
    pytestmark = on_the_fake_driver

    @pytest.mark.parametrize("device", [0, 1])
    def test_a_producer_on_a_default_stream(self, library: Path, device: int) -> None:  # noqa: F811
        """Its handle is the same on all GPUs: that of the copy's is meant."""
        out = run(
            library,
            f"""
defer(1)
def chain(start, wait):
    s, m, d = (End(name, 6, {device}, dst=i > 0) for i, name in enumerate(("nhd", "universal", "vllm/LBHNC")))
    first, second = kvbm.Transfer(s.pool, m.pool), kvbm.Transfer(m.pool, d.pool, "staged")
    pump(); seed(start)
    first.copy(range(6), range(6), stream=0)
    second.copy(range(6), range(6), stream={0x106 if device else 6}, wait=wait)
    pump()
    m.before = moved(s, m, range(6), range(6))
    return right(m, d, range(6), range(6))
print(*(all(chain(start, wait) for start in range(1, 40)) for wait in (On(0), None)))
""",
            FAKE_DEVICES="2",
        )
        assert out.split() == ["True", "False"]

    def test_two_gpus_and_a_default_stream(self, library: Path) -> None:  # noqa: F811
        """Handle 0 is either GPU's: refused, unless the stream's object says that it is the one whose kernels run."""
        run(
            library,
            """
class Default:  # as torch's
    def __init__(self, index): self.device_index = index
    def __cuda_stream__(self): return (0, 0)
s, d = End("nhd", 6, 0), End("universal", 6, 1, dst=True)
move = kvbm.Transfer(s.pool, d.pool, "direct")
for stream in (0, Default(1)):
    try:
        move.copy(range(6), range(6), stream=stream)
    except kvbm.BindError as error:
        assert "default stream" in str(error), error
    else:
        raise AssertionError(stream)
assert count("launches") == 0
move.copy(range(6), range(6), stream=Default(0))
pump()
check(s, d, range(6), range(6))
""",
            FAKE_DEVICES="2",
        )


class TestOrder:
    pytestmark = on_the_fake_driver

    @pytest.mark.parametrize("mark", ["done", "stream", "list"])
    @pytest.mark.slow
    def test_wait(self, library: Path, mark: str) -> None:  # noqa: F811
        """A copy that waits for another's end is right in any order of the streams; without it some order is wrong."""
        out = run(
            library,
            f"""
defer(1)
def chain(start, wait, strategies):
    s, m, d = End("nhd", 6, 0), End("universal", 6, "pinned", dst=True), End("vllm/LBHNC", 6, 0, dst=True)
    out, back = transfer(s, m, strategies[0]), transfer(m, d, strategies[1])
    pump(); seed(start)
    done = out.copy(range(6), range(6), stream=5)
    ways = {{"done": done, "stream": On(5), "list": [On(9), done, On(5)]}}
    back.copy(range(6), range(6), stream=7, wait=ways[{mark!r}] if wait else None)
    pump()
    m.before = moved(s, m, range(6), range(6))
    return right(m, d, range(6), range(6))
every = list(itertools.product(("direct", "staged", "engine"), repeat=2))
print(all(chain(start, True, one) for one in every for start in range(1, 12)),
      *(all(chain(start, False, one) for start in range(1, 30)) for one in every))
""",
        )
        assert out.split() == ["True", *["False"] * 9]

    def test_consumers(self, library: Path) -> None:  # noqa: F811
        """`Done.wait` holds a stream back; `synchronize` the host."""
        run(
            library,
            """
defer(1)
wrong = 0
for start in range(1, 30):
    for waits in (True, False):
        s, m, d = End("nhd", 6, 0), End("universal", 6, 0, dst=True), End("vllm/LBHNC", 6, 0, dst=True)
        out, back = transfer(s, m, "staged"), transfer(m, d, "direct")
        pump(); seed(start)
        done = out.copy(range(6), range(6), stream=5)
        if waits: done.wait(On(7))
        back.copy(range(6), range(6), stream=7)
        pump()
        m.before = moved(s, m, range(6), range(6))
        ok = right(m, d, range(6), range(6))
        assert ok or not waits
        wrong += not ok
assert wrong
s, d = End("nhd", 6, 0), End("universal", 6, "pinned", dst=True)
done = transfer(s, d, "staged").copy(range(6), range(6), stream=5)
assert not done.query()
done.synchronize()
assert done.query()
check(s, d, range(6), range(6))
""",
        )


class TestRest:
    pytestmark = on_the_fake_driver

    @pytest.mark.parametrize("kind", ["cuda.core 0.4", "cuda.core 1", "CUevent", "cudaEvent_t"])
    def test_wait_for_an_event(self, library: Path, kind: str) -> None:  # noqa: F811
        """cuda.core's of any release, and cuda.bindings' handles, which are no streams."""
        out = run(
            library,
            f"""
from cuda.bindings import driver as bindings, runtime
driver.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
made = ctypes.c_void_p()
driver.cuEventCreate(ctypes.byref(made), 2)
driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
class Event:  # what both releases have, and a name of each
    def __init__(self, handle): self.handle, self.is_done = handle, False
if {kind!r} == "cuda.core 1": Event.is_timing_enabled = False
if {kind!r} == "cuda.core 0.4": Event.is_timing_disabled = True
Event.__module__ = "cuda.core.experimental._event"
event = {{"CUevent": bindings.CUevent, "cudaEvent_t": runtime.cudaEvent_t}}.get({kind!r}, lambda h: Event(bindings.CUevent(h)))
defer(1)
def chain(start, waits):
    s, m, d = End("nhd", 6, 0), End("universal", 6, 0, dst=True), End("vllm/LBHNC", 6, 0, dst=True)
    pump(); seed(start)
    transfer(s, m, "direct").copy(range(6), range(6), stream=5)
    driver.cuEventRecord(made, ctypes.c_void_p(5))
    transfer(m, d, "direct").copy(range(6), range(6), stream=7, wait=event(made.value) if waits else None)
    pump()
    m.before = moved(s, m, range(6), range(6))
    return right(m, d, range(6), range(6))
print(all(chain(start, True) for start in range(1, 20)), all(chain(start, False) for start in range(1, 20)))
s, d = ends("d2d", "nhd", "universal", 6, 6)
for wrong in ([event(0)], event(0)):
    try: kvbm.Transfer(s.pool, d.pool).copy([0], [0], stream=5, wait=wrong)
    except kvbm.BindError as error: assert "not been recorded" in str(error), error
    else: raise AssertionError
for stream in (bindings.CUevent(made.value), runtime.cudaEvent_t(made.value)):
    try: kvbm.Transfer(s.pool, d.pool).copy([0], [0], stream=stream)
    except TypeError as error: assert "stream: expected" in str(error), error
    else: raise AssertionError
""",
        )
        assert out.split() == ["True", "False"]

    def test_wait_is_refused_for_what_is_neither(self, library: Path) -> None:  # noqa: F811
        run(
            library,
            """
s, d = ends("d2d", "nhd", "universal", 6, 6)
move = kvbm.Transfer(s.pool, d.pool)
for wait, words in ((6, "int, which could be either"), (True, "int, which could be either"), ("5", "stream"), (object(), "stream"),
                    ([On(5)] * 17, "at most 16")):
    try: move.copy([0], [0], stream=5, wait=wait)
    except (TypeError, kvbm.BindError) as error: assert words in str(error), error
    else: raise AssertionError(wait)
assert np.array_equal(d.buffer, d.before) and move.stats()["copies"] == 0
try: move.copy([0], [0])
except kvbm.BindError as error: assert "pass stream=" in str(error)
else: raise AssertionError
""",
        )

    def test_neighbours_are_merged(self, library: Path) -> None:  # noqa: F811
        """Blocks that follow each other on both sides are one copy, in whatever order they are named."""
        run(
            library,
            """
def copies(src_ids, dst_ids, name="vllm/BLHNC"):
    s, d = ends("d2h", name, name, 20, 20)
    before = count("single_copies") + count("batched_copies")
    kvbm.Transfer(s.pool, d.pool, "engine").copy(src_ids, dst_ids, stream=5)
    check(s, d, *zip(*((i, j) for i, j in zip(src_ids, dst_ids) if -1 not in (i, j))))
    return count("single_copies") + count("batched_copies") - before
assert copies(range(20), range(20)) == 1
assert copies([5, 3, 4], [12, 10, 11]) == 1
assert copies([5, 3, 4], [11, 10, 12]) == 3
assert copies([1, 2, 3, 9, 10], [1, 2, 3, 11, 12]) == 2
assert copies([1, 2, -1, 3], [1, 2, 7, 3]) == 1
assert copies([1, -1, 3], [1, 2, 3]) == 2
# K and V of each layer in an array of its own: one range an array.
assert copies([4, 5, 6], [0, 1, 2], "vllm/flash_attn_nhd") == SHAPE.nl * SHAPE.no
# A batch of many small copies is one call, and very many are a few.
s, d = ends("d2h", "universal", "vllm/flash_attn_nhd", 400, 400, shape=SMALL)
before = count("batches")
kvbm.Transfer(s.pool, d.pool, "engine").copy(range(400), random.permutation(400), stream=5)
calls, copies = count("batches") - before, count("batched_copies")
assert copies > 1000 and calls == -(-copies // 4096), (calls, copies)
""",
        )

    @pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
    @pytest.mark.parametrize("direction", ["d2h", "h2d"])
    def test_registrations_are_not_crossed(self, library: Path, direction: str, strategy: str) -> None:  # noqa: F811
        """Pinned memory that was registered in pieces: the driver refuses a copy from one into the next."""
        run(
            library,
            f"""
from kvbm import _core
where = SIDES[{direction!r}]
for far in ("vllm/BLHNC", "vllm/LBHNC", "vllm/flash_attn_nhd"):
    for near in ("vllm/BLHNC", "nhd"):
        names = (near, far) if {direction!r} == "d2h" else (far, near)
        s, d = (End(name, 64, side, dst=bool(i), pin=False) for i, (name, side) in enumerate(zip(names, where)))
        host = d if {direction!r} == "d2h" else s
        begin, pages = host.buffer.ctypes.data, -(-host.buffer.size // 4096)
        edges = sorted({{0, pages, *(pages * k // 5 for k in range(1, 5))}})
        for a, b in zip(edges, edges[1:]): _core.host_register(begin + 4096 * a, 4096 * (b - a))
        assert host.pool.pinned and host.pool.cuts.tolist() == [begin + 4096 * a for a in edges[1:-1]]
        move = kvbm.Transfer(s.pool, d.pool, {strategy!r}, chunk_bytes=16 * SHAPE.nbytes if {strategy!r} == "staged" else None)
        move.copy(range(60), range(2, 62), stream=5).synchronize()
        check(s, d, range(60), range(2, 62))
        for a in edges[:-1]: _core.host_unregister(begin + 4096 * a)
""",
        )

    @pytest.mark.slow
    def test_a_few_multiprocessors(self, library: Path) -> None:  # noqa: F811
        """Never more CTAs than were granted; 16 where host memory is involved and nothing was said."""
        run(
            library,
            """
def most(direction, strategy, **given):
    ctypes.c_long.in_dll(driver, "few_ctas").value = 0
    for src, dst in (("nhd", "universal"), ("universal", "vllm/paged_attn_v0"), ("vllm/BLHNC", "vllm/BLHNC")):
        s, d = ends(direction, src, dst, 60, 60)
        kvbm.Transfer(s.pool, d.pool, strategy, **given).copy(range(60), range(60), stream=5)
        check(s, d, range(60), range(60))
    return count("few_ctas")
for direction in ("d2h", "h2d", "d2d"):
    for strategy in ("direct", "staged"):
        assert most(direction, strategy, max_sms=1) == 1
        assert most(direction, strategy, max_sms=8) == 8
        # Where no kernel touches host memory, all of the GPU is soonest done.
        assert most(direction, strategy) == (16 if strategy == "direct" and direction != "d2d" else 0), (direction, strategy)
""",
        )

    def test_each_copy_has_a_word_of_its_own(self, library: Path) -> None:  # noqa: F811
        """What one copy's kernels note about ids on the GPU is that copy's: of others in flight, dropped, or in a graph."""
        run(
            library,
            """
for name in ("fake_end_capture", "fake_launch_graph", "fake_destroy_graph", "fake_begin_capture"):
    getattr(driver, name).restype = ctypes.c_void_p
handle = ctypes.c_void_p
def on_gpu(*ids):
    array = np.array(ids)
    on_gpu.keep.append(array)
    return FakeCuda(array.shape, "int64", address=array.ctypes.data)
on_gpu.keep = []
right, wrong = on_gpu(1, 2), on_gpu(1, 999)
def is_told(done):
    try: done.synchronize()
    except kvbm.BindError as error: return "pair 1 of an earlier copy" in str(error)
    return False
defer(1)
s, d = ends("d2d", "nhd", "universal", 6, 6)
move = kvbm.Transfer(s.pool, d.pool, "direct")
def copy(ids, stream=5): return move.copy(ids, on_gpu(3, 4), stream=stream)
for first, second in itertools.product((right, wrong), repeat=2):
    dones = [copy(first), copy(second, 6)]
    assert [is_told(done) for done in dones[::-1]] == [second is wrong, first is wrong]
    assert [is_told(done) for done in dones] == [False, False]
for _ in range(20):  # a word that is given back in flight is nobody else's yet
    copy(wrong, 5)
    done = copy(right, 6)
    pump()
    assert not is_told(done)
memory = count("slots")
for _ in range(2000):
    copy(right)
    pump()
assert count("slots") == memory
# A graph's word is its own as long as it lives, and each replay may be asked about.
driver.fake_begin_capture(handle(5))
ids = on_gpu(1, 2)
held, done = on_gpu.keep[-1], copy(ids)
graph = handle(driver.fake_end_capture())
other = copy(right, 6)
for bad in (False, True, False, True):
    held[1] = 999 if bad else 2
    driver.fake_launch_graph(graph, handle(5))
    pump()
    assert is_told(done) == bad and not is_told(other)
del done
for _ in range(600):
    held[1] = 999
    other = copy(right, 6)
    driver.fake_launch_graph(graph, handle(5))
    pump()
    assert not is_told(other)
driver.fake_destroy_graph(graph)
assert count("slots") == memory
""",
        )

    def test_threads_are_each_told(self, library: Path) -> None:  # noqa: F811
        """The first copies of a transfer with ids on the GPU, by four threads at once."""
        run(
            library,
            """
sys.setswitchinterval(1e-6)
ids = np.array([1, 999, 2])
on_gpu = FakeCuda(ids.shape, "int64", address=ids.ctypes.data)
told = []
for _ in range(100):
    s, d = ends("d2d", "nhd", "universal", 3, 6, shape=SMALL)
    move, start = kvbm.Transfer(s.pool, d.pool), threading.Barrier(4)
    def work(k):
        start.wait()
        try: move.copy(on_gpu, [3, 4, 5], stream=5 + k).synchronize()
        except kvbm.BindError: told.append(k)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
assert len(told) == 400, len(told)
""",
        )

    @pytest.mark.parametrize("direction", ["d2h", "h2d"])
    def test_closed_beside_a_copy(self, library: Path, direction: str) -> None:  # noqa: F811
        """The ring is not freed under a copy that is being enqueued, which goes through; later ones are refused."""
        run(
            library,
            f"""
s, d = ends({direction!r}, "nhd", "universal", 64, 64, shape=SMALL)
move = kvbm.Transfer(s.pool, d.pool, "staged", chunk_bytes=2 * SMALL.nbytes)
route = move._mover.route(None).route
class Closes(On):
    def __cuda_stream__(self):
        move.close()
        return super().__cuda_stream__()
defer(1)
move.copy(range(64), range(64), stream=5, wait=Closes(6)).synchronize()
check(s, d, range(64), range(64))
for copy in (lambda: move.copy([0], [0], stream=5), lambda: route.copy([0], [0], 5)):
    try: copy()
    except kvbm.BindError as error: assert "the transfer is closed" in str(error), error
    else: raise AssertionError
kvbm.Transfer(s.pool, d.pool, "staged", chunk_bytes=2 * SMALL.nbytes)  # frees it
""",
            MALLOC_PERTURB_="85",
        )

    @pytest.mark.slow
    def test_explain_and_auto(self, library: Path) -> None:  # noqa: F811
        """What is said is what runs."""
        run(
            library,
            """
import dataclasses
large = dataclasses.replace(SHAPE, nl=16, nh=8, hd=512)
for direction in SIDES:
    names = ("universal", "nhd") if direction == "h2d" else ("nhd", "universal")  # whole blocks on the host's side
    s, d = ends(direction, *names, 20, 20, shape=large)
    with kvbm.Transfer(s.pool, d.pool) as move:
        text = move.explain()
        for n in (1, 4, 16):
            done = move.copy(range(n), range(n), stream=5)
            line = next(line for line in text.splitlines() if line.startswith(f"{n} block"))
            assert line.endswith(f": {done.strategy}."), (line, done.strategy)
            assert line in move.explain(n)
        check(s, d, range(16), range(16))
        assert "Why: " in text and "direct is one launch of" in text
        assert ("staged goes through 3 slots" in text) == (direction != "d2d")
for strategy in ("direct", "staged", "engine"):
    s, d = ends("d2h", "nhd", "universal", 9, 9)
    assert f"1 block (" in kvbm.Transfer(s.pool, d.pool, strategy).explain(1)
    assert kvbm.Transfer(s.pool, d.pool, strategy).explain(1).split("\\n")[1].endswith(f"{strategy}.")
""",
        )

    def test_options(self, library: Path) -> None:  # noqa: F811
        run(
            library,
            """
s, d = ends("d2h", "nhd", "universal", 9, 9)
def refused(words, *pools, **given):
    try: kvbm.Transfer(*(pools or (s.pool, d.pool)), **given)
    except kvbm.BindError as error: assert words in str(error), error
    else: raise AssertionError(given)
refused("expected 'auto', 'direct', 'staged' or 'engine'", strategy="fastest")
refused("at least one block", strategy="staged", chunk_bytes=SHAPE.nbytes - 1)
refused("at least one block", chunk_bytes=16)
refused("only staged copies", strategy="direct", chunk_bytes=1 << 20)
refused("only staged copies", strategy="engine", chunk_bytes=1 << 20)
refused("expected a number of bytes", strategy="staged", chunk_bytes=True)
refused("uses no multiprocessor", strategy="engine", max_sms=4)
refused("from 1 on", max_sms=0)
plain = End("universal", 9, "pinned", dst=True, pin=False)
refused("host memory that GPUs do not reach", s.pool, plain.pool)
refused("host memory that GPUs do not reach", plain.pool, s.pool)
plain.pool.pin()
kvbm.Transfer(s.pool, plain.pool)
""",
        )

    def test_one_gpu_pool(self, library: Path) -> None:  # noqa: F811
        run(
            library,
            """
one = End("universal", 12, 0)
for strategy in ("direct", "staged", "engine"):
    one.buffer[:] = one.before
    move = kvbm.Transfer(one.pool, one.pool, strategy)
    try: move.copy([0, 1], [1, 2], stream=5)
    except kvbm.BindError as error: assert "both read and written" in str(error)
    else: raise AssertionError
    move.copy([0, 1, 2], [9, 10, 11], stream=5)
    want = oracle.expected_bytes(one.arena, one.arena, one.before, one.before, [0, 1, 2], [9, 10, 11])
    assert np.array_equal(one.buffer, want)
""",
        )

    def test_fork_after_cuda(self, library: Path) -> None:  # noqa: F811
        """A child is told, and ends without touching what is its parent's."""
        out = run(
            library,
            """
s, d = ends("d2h", "nhd", "universal", 9, 9)
move = kvbm.Transfer(s.pool, d.pool, "staged")
done = move.copy([0], [0], stream=5)
pid = os.fork()
if not pid:
    try: move.copy([1], [1], stream=5)
    except kvbm.CudaError as error: code = 7 if "fork" in str(error) else 8
    else: code = 0
    del move, done, s, d
    os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        )
        assert out.split() == ["7"]
