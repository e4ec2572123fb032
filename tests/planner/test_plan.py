"""Plans: executed here by a few lines of NumPy, they move exactly the oracle's bytes, and they are minimal."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from test_layout import SHAPE, block_shape

import kvbm
import matrix
import oracle
import strategies
from coordinates import in_case
from kvbm import _core
from kvbm.compile import prepare
from kvbm.layout import region, spec
from kvbm.planner import cast, kernel_forms
from memory import aligned, placed


def execute(
    plan: Any, src: oracle.Arena, dst: oracle.Arena, source: Any, before: Any, src_ids: Any, dst_ids: Any
) -> Any:
    """Run the loop nests byte by byte; also prove that no destination byte is written twice."""
    result = before.copy()
    written = np.zeros(result.size, dtype=np.int64)
    src_bases, dst_bases = np.array(src.bases), np.array(dst.bases)
    for src_id, dst_id in zip(src_ids, dst_ids, strict=True):
        for part in plan.parts:
            modes = (*part.inner, *part.outer)
            steps = np.ix_(*(np.arange(mode.extent) for mode in modes))

            def total(field: str, modes: Any = modes, steps: Any = steps) -> Any:
                return sum(
                    (step * getattr(mode, field, 0) for step, mode in zip(steps, modes, strict=True)), start=np.int64(0)
                )

            read = src_bases[part.src_table_offset + src_id * part.src_id[0] + total("src_table")]
            read = read + part.src_offset + src_id * part.src_id[1] + total("src")
            write = dst_bases[part.dst_table_offset + dst_id * part.dst_id[0] + total("dst_table")]
            write = write + part.dst_offset + dst_id * part.dst_id[1] + total("dst")
            read, write = np.broadcast_arrays(read, write)
            result[write] = source[read]
            np.add.at(written, write.ravel(), 1)
    assert written.max(initial=0) <= 1
    return result


def at_slot(base: int) -> Any:
    """Packed blocks after a guard, as a side for `execute`."""
    return SimpleNamespace(bases=[base])


def step(arena: oracle.Arena) -> int:
    """Stride of the allocations in bytes."""
    (only,) = set(np.diff(arena.bases).tolist()) or {0}
    return int(only)


def has_whole_runs(far: kvbm.Plan, pool: kvbm.Pool) -> bool:
    """True if a step between packed blocks and a pool has runs as long as a copy to another pool of the same layout."""
    same = kvbm.plan(pool.layout, pool.layout, pool.shape, num_blocks=pool.num_blocks)
    return sorted(part.run_bytes for part in far.parts) == sorted(part.run_bytes for part in same.parts)


def run_two_steps(first: Any, second: Any, src: Any, dst: Any, slot: np.ndarray, src_ids: Any, dst_ids: Any) -> None:
    """Run both steps of a staged plan by the host's kernels, through a slot that begins 64 bytes into `slot`."""
    memory = aligned(slot)
    table = _core.Table(np.array([memory.ctypes.data + 64], np.uint64))
    for copy in prepare.prepare(first, src.pool.alignment, 16):
        copy.run(_core.Table(src.pool.addresses), table, _core.Pairs(src_ids, None, src.pool.num_blocks, len(src_ids)))
    for copy in prepare.prepare(second, 16, dst.pool.alignment):
        copy.run(table, _core.Table(dst.pool.addresses), _core.Pairs(None, dst_ids, len(dst_ids), dst.pool.num_blocks))
    assert np.array_equal(memory[:64], slot[:64]) and np.array_equal(memory[-64:], slot[-64:])


def minimal(plan: Any) -> None:
    """Normal form: no loop of extent one, and no two loops that could be one."""
    for part in plan.parts:
        run = part.inner[0]
        assert (run.src, run.dst) == (1, 1)
        for mode in (*part.inner[1:], *part.outer):
            assert mode.extent > 1
        assert all(mode.src_table == mode.dst_table == 0 for mode in part.inner)
        assert all(mode.src_table or mode.dst_table for mode in part.outer)
        assert [m.dst for m in part.inner] == sorted(m.dst for m in part.inner)
        for a, b in itertools.permutations([m for m in (*part.inner, *part.outer) if m.extent > 1], 2):
            both = [(a.src, b.src), (a.dst, b.dst), (a.src_table, b.src_table), (a.dst_table, b.dst_table)]
            assert any(outer != a.extent * inner for inner, outer in both), (a, b)


def moves_the_right_bytes(plan: Any, src: oracle.Placed, dst: oracle.Placed) -> None:
    arenas = src.layout_bytes(1), dst.layout_bytes(2)
    source, before = oracle.source_bytes(arenas[0], 0), oracle.dest_bytes(arenas[1], 0)
    n = min(src.num_blocks, dst.num_blocks)
    src_ids, dst_ids = list(range(src.num_blocks))[::-1][:n], list(range(n))
    want = oracle.expected_bytes(*arenas, source, before, src_ids, dst_ids)
    got = execute(plan, *arenas, source, before, src_ids, dst_ids)
    assert np.array_equal(got, want), oracle.explain(arenas[1], got, want)
    assert plan.nbytes == np.prod(list(src.sizes.values())) * src.itemsize


@given(strategies.pair(limit=700))
@strategies.cases(1200)
def test_random_pairs(drawn: Any) -> None:
    sizes, one, other = drawn
    layouts = spec.parse(one.yaml, name="one"), spec.parse(other.yaml, name="other")
    blocks = (sizes.num_blocks, sizes.num_blocks + 1)
    try:
        src, dst = (sizes.placed(x.order, n) for x, n in zip((one, other), blocks, strict=True))
    except oracle.IllegalError:  # a pitch that holds one block fewer
        with pytest.raises(kvbm.LayoutError, match=r"pitch|'b'"):
            kvbm.plan(*layouts, block_shape(sizes), num_blocks=blocks)
        return
    if len(src.id_step()) > 1 or len(dst.id_step()) > 1:
        with pytest.raises((kvbm.LayoutError, kvbm.PlanError), match="'b'"):
            kvbm.plan(*layouts, block_shape(sizes), num_blocks=blocks)
        return
    if not oracle.copyable(src, dst):
        with pytest.raises(kvbm.PlanError, match="operational_nhd"):
            kvbm.plan(*layouts, block_shape(sizes), num_blocks=blocks)
        return
    plan = kvbm.plan(*layouts, block_shape(sizes), num_blocks=blocks)
    minimal(plan)
    moves_the_right_bytes(plan, src, dst)
    assert plan.kernels() and str(plan) and plan.explain()


@pytest.mark.parametrize(
    ("smaller", "larger"), [("{h t} d", "{d h t}"), ("{h d} t", "{d h t}"), ("{h d} {t o}", "{o t d h}")]
)
def test_an_opaque_group_inside_a_larger_one(smaller: str, larger: str) -> None:
    """It is copied with the larger one, whose bytes keep their order; axes of one element change nothing."""
    outside = "" if "o" in larger else "o"
    layouts = [spec.parse(f'order: "[b] {outside} {order}"') for order in (smaller, larger)]
    shape = kvbm.BlockShape(nl=1, no=2, nh=3, nt=2, hd=4)
    for src, dst in (layouts, layouts[::-1]):
        (part,) = kvbm.plan(src, dst, shape).parts
        assert part.kind == "copy" and part.run_bytes == shape.nbytes


def test_opaque_groups_that_cross() -> None:
    src, dst = (spec.parse(f'order: "[b] {order}"') for order in ("{h d} t", "h {d t}"))
    for pair in ((src, dst), (dst, src)):
        with pytest.raises(kvbm.PlanError, match=r"does not promise the order inside \{d t\}"):
            kvbm.plan(*pair, kvbm.BlockShape(nl=1, no=1, nh=3, nt=2, hd=4))


@given(strategies.pair(limit=500, opaque=False))
def test_there_and_back(drawn: Any) -> None:
    """Src → dst → src, by the plans alone, is the identity."""
    sizes, one, other = drawn
    shape, n = block_shape(sizes), sizes.num_blocks
    layouts = spec.parse(one.yaml), spec.parse(other.yaml)
    src, dst = (sizes.placed(x.order).layout_bytes() for x in (one, other))
    source, ids = oracle.source_bytes(src, 0), list(range(n))
    if len(src.placed.id_step()) > 1 or len(dst.placed.id_step()) > 1:
        return
    there = kvbm.plan(*layouts, shape, num_blocks=n)
    back = kvbm.plan(*layouts[::-1], shape, num_blocks=n)
    middle = execute(there, src, dst, source, oracle.dest_bytes(dst, 0), ids, ids)
    again = execute(back, dst, src, middle, oracle.dest_bytes(src, 0), ids, ids)
    positions = src.positions(ids)
    assert np.array_equal(
        oracle.gather(again, positions, src.placed.itemsize), oracle.gather(source, positions, src.placed.itemsize)
    )


_SPLITS = {"l": 3, "h": 2, "t": 4, "d": 8}


@given(strategies.st.data())
def test_equal_copies_are_equal_plans(data: Any) -> None:
    """Splitting an axis in place changes only the text, so the plan is equal."""
    st = strategies.st
    orders = []
    for _ in range(2):
        words = data.draw(st.permutations(["b", "l", "o", "h", "t", "d"]))
        cut = data.draw(st.integers(0, 3))
        rewritten = [
            f"{w}/{_SPLITS[w]} {w}%{_SPLITS[w]}" if w in _SPLITS and data.draw(st.booleans()) else w for w in words
        ]
        orders.append([(f"[{' '.join(ws[:cut])}] " if cut else "") + " ".join(ws[cut:]) for ws in (words, rewritten)])
    (a, a2), (b, b2) = ([spec.parse(f'order: "{text}"') for text in pair] for pair in orders)
    plain = kvbm.plan(a, b, SHAPE, num_blocks=5)
    split = kvbm.plan(a2, b2, SHAPE, num_blocks=5)
    assert plain.parts == split.parts
    assert plain.kernels() == split.kernels()
    assert hash(plain.parts) == hash(split.parts)


@given(strategies.pair(limit=300, opaque=False))
def test_planned_twice(drawn: Any) -> None:
    sizes, one, other = drawn
    if any(len(sizes.placed(x.order).id_step()) > 1 for x in (one, other)):
        return
    plans = [
        kvbm.plan(spec.parse(one.yaml), spec.parse(other.yaml), block_shape(sizes), num_blocks=sizes.num_blocks)
        for _ in range(2)
    ]
    assert plans[0].parts == plans[1].parts and str(plans[0]) == str(plans[1])


def needed_cuts(placed: oracle.Placed, axis: str, size: int) -> tuple[int, ...]:
    """The places along an axis at which the address leaves its first stride: a copy must split there, declared or not."""
    shape = (1, *(placed.sizes[a] for a in oracle.AXES[1:]))
    nbytes = np.broadcast_to(placed.address([0])[1], shape)
    addresses = np.moveaxis(nbytes, oracle.AXES.index(axis), 0).reshape(size, -1)[:, 0]
    cuts, step = [], 1
    while step < size:
        rest = addresses[::step] - addresses[0]
        odd = np.flatnonzero(rest != np.arange(len(rest)) * rest[1])
        if not odd.size:
            break
        step *= int(odd[0])
        cuts.append(step)
    return tuple(cuts)


@given(strategies.sizes(), strategies.st.data())
def test_refinement(sizes: strategies.Sizes, data: Any) -> None:
    """A common refinement exists exactly if the necessary split points form a divisibility chain."""
    axis = data.draw(strategies.st.sampled_from(["t", "d"]))
    n = sizes.sizes[axis]
    points = [data.draw(strategies.chain(n)) for _ in range(2)]
    words = [
        [axis if not p else f"{axis}/{p[-1]}", *(f"{axis}%{hi}/{lo}" for lo, hi in zip(p, p[1:], strict=False))]
        + ([f"{axis}%{p[0]}"] if p else [])
        for p in points
    ]
    rest = [a for a in ("l", "o", "h", "t", "d") if a != axis]
    texts = [" ".join(["b", *data.draw(strategies.st.permutations(rest + w))]) for w in words]
    layouts = [spec.parse(f'order: "{text}"', name=name) for text, name in zip(texts, ("one", "other"), strict=True)]
    placed = [sizes.placed(oracle.Order(t), 2) for t in texts]
    if strategies.refinable(*(needed_cuts(it, axis, n) for it in placed)):
        plan = kvbm.plan(*layouts, block_shape(sizes), num_blocks=2)
        moves_the_right_bytes(plan, *placed)
    else:
        with pytest.raises((kvbm.PlanError, kvbm.LayoutError), match=rf"'{axis}' have no common refinement") as info:
            kvbm.plan(*layouts, block_shape(sizes), num_blocks=2)
        assert "one" in str(info.value) and "other" in str(info.value)


def test_twelve_has_no_common_refinement() -> None:
    a, b = (spec.parse(f'order: "b l o h t/{n} d t%{n}"', name=f"by{n}") for n in (3, 2))
    shape = kvbm.BlockShape(nl=1, no=2, nh=2, nt=12, hd=4)
    with pytest.raises(
        (kvbm.PlanError, kvbm.LayoutError), match=r"\(4,3\) and \(6,2\) of 't' have no common refinement"
    ):
        kvbm.plan(a, b, shape)


@pytest.mark.parametrize("src", sorted({src for src, _ in matrix.pairs()}))
def test_shipped_pairs(src: str) -> None:
    for dst in (dst for one, dst in matrix.pairs() if one == src):
        with in_case(src, dst):
            _shipped_pair(src, dst)


def _shipped_pair(src: str, dst: str) -> None:
    shapes = (SHAPE, kvbm.BlockShape(nl=2, no=1, nh=1, nt=3, hd=16, dtype="int8"))
    shapes += (kvbm.BlockShape(nl=1, no=1, nh=1, nt=256, hd=16, dtype="float8_e4m3fn"),)  # block scales
    legal = [s for s in shapes if all(matrix.legal(n, tuple(s.sizes.values()), s.itemsize) for n in (src, dst))]
    assert legal
    for shape in legal:
        plan = kvbm.plan(kvbm.load(src), kvbm.load(dst), shape, num_blocks=(3, 2))
        minimal(plan)
        orders = matrix.orders()
        moves_the_right_bytes(plan, placed(orders[src], shape, 3), placed(orders[dst], shape, 2))
        assert src in str(plan) and dst in str(plan)


def test_plans_are_made_once() -> None:
    """Equal requests get the same object, for any of a layout's names."""
    shape = kvbm.load_shape("llama-3.1-70b")
    one, other = kvbm.load("nhd"), kvbm.load("universal")
    made = kvbm.plan(one, other, shape)
    assert kvbm.plan(kvbm.load("nhd"), kvbm.load("universal"), kvbm.load_shape("llama-3.1-70b")) is made
    assert kvbm.plan(one, other, shape, num_blocks=5) is not made
    assert kvbm.plan(other, one, shape) is not made


@pytest.mark.parametrize(
    ("src", "dst", "kind"),
    [
        ("nhd", "nhd", "copy"),
        ("operational", "operational", "copy"),
        ("nhd", "operational", "copy"),
        ("operational_hnd", "hnd", "copy"),
        ("nhd", "universal", "rows"),
        ("hnd", "universal", "rows"),
        ("nhd", "hnd", "rows"),
        ("vllm/LBHNC", "universal", "rows"),
        ("hf/dynamic_cache", "nhd", "rows"),
    ],
)
def test_kinds(src: str, dst: str, kind: str) -> None:
    assert kvbm.plan(kvbm.load(src), kvbm.load(dst), SHAPE).kind == kind


def test_transpose_is_tiles() -> None:
    plan = kvbm.plan(kvbm.load("nhd"), kvbm.load("vllm/paged_attn_v0"), SHAPE)
    assert len(plan.parts) == 2  # K moves 16-byte words, V single elements
    assert "tile" in plan.kind
    assert plan.parts[1].inner[0].extent == SHAPE.itemsize


def test_one_launch_moves_k_and_v_where_they_agree() -> None:
    """paged_attn_v0 to itself: both halves are the same plain copy."""
    name = "vllm/paged_attn_v0"
    plan = kvbm.plan(kvbm.load(name), kvbm.load(name), SHAPE)
    assert plan.kind == "copy"


def test_different_orders_one_normal_form() -> None:
    """NHD and its one-head twin: with nh = 1, t h d and h t d are the same order, and the plan is a copy."""
    one_head = kvbm.BlockShape(nl=3, no=2, nh=1, nt=8, hd=32)
    assert kvbm.plan(kvbm.load("nhd"), kvbm.load("hnd"), one_head).kind == "copy"


def test_o_split_in_two_pieces() -> None:
    """A piece of extent one must not be mistaken for the axis."""
    order, paged = oracle.Order("b o/2 l h o%2 t d"), matrix.SHIPPED["vllm/paged_attn_v0"]
    layout = spec.parse(f'order: "{order.k}"')
    for a, b, orders in (
        (layout, kvbm.load("vllm/paged_attn_v0"), (order, paged)),
        (kvbm.load("vllm/paged_attn_v0"), layout, (paged, order)),
    ):
        try:
            plan = kvbm.plan(a, b, SHAPE, num_blocks=2)
        except kvbm.PlanError:  # K and V meet an 'o' in two pieces: refused, or right
            continue
        moves_the_right_bytes(plan, *(placed(o, SHAPE, 2) for o in orders))


@pytest.mark.parametrize(
    ("k", "v"),
    [("[l o] b h t d", "[l o] h b d t"), ("[l] t h o b d", "[l] t h o d b"), ("[l] o b h t d", "[l] o h b t d")],
)
def test_k_and_v_that_block_ids_step_differently(k: str, v: str) -> None:
    """A launch has one block stride, so a block id must step equally far in K and V: otherwise an error."""
    layout = spec.parse(f'order:\n  k: "{k}"\n  v: "{v}"')
    for pair in ((layout, kvbm.load("nhd")), (kvbm.load("nhd"), layout)):
        with pytest.raises((kvbm.LayoutError, kvbm.PlanError), match="'b'"):
            kvbm.plan(*pair, SHAPE, num_blocks=4)


def test_axes_only_on_one_side() -> None:
    grouped = spec.parse('axes: {g: "2"}\norder: "b g l o h t d"', name="grouped")
    with pytest.raises(kvbm.PlanError, match=r"grouped → nhd.*'g'.*only in the source"):
        kvbm.plan(grouped, kvbm.load("nhd"), SHAPE)
    with pytest.raises(kvbm.PlanError, match=r"nhd → grouped.*'g'.*only in the destination"):
        kvbm.plan(kvbm.load("nhd"), grouped, SHAPE)


def test_numbers_of_blocks() -> None:
    """hf/dynamic_cache has h outside b: its stride depends on the number of blocks of the same side."""
    hf, nhd = kvbm.load("hf/dynamic_cache"), kvbm.load("nhd")
    few, many = (kvbm.plan(hf, nhd, SHAPE, num_blocks=(n, 7)) for n in (2, 9))
    assert few.parts != many.parts
    assert kvbm.plan(hf, nhd, SHAPE, num_blocks=9).parts == kvbm.plan(hf, nhd, SHAPE, num_blocks=(9, 9)).parts


def test_text() -> None:
    plan = kvbm.plan(kvbm.load("nhd"), kvbm.load("universal"), kvbm.load_shape("llama-3.1-70b"))
    text, prose = str(plan), plan.explain()
    for mode in (m for part in plan.parts for m in (*part.inner[1:], *part.outer)):
        assert str(mode.extent) in text
    assert plan.kernels()[0] in text
    assert "nhd" in prose and "universal" in prose and len(prose.split()) > 20
    assert plan.kernels(alignment=16) != plan.kernels(alignment=1)


def test_what_fits_a_kernel_is_what_was_compiled() -> None:
    limits = kernel_forms.MAX_OUTER, kernel_forms.MAX_INNER, kernel_forms.MAX_PARTS, region.MAX_UNIT_DIGITS, cast.MAX_SCALES
    assert limits == (
        _core.MAX_OUTER,
        _core.MAX_INNER,
        _core.MAX_PARTS,
        _core.MAX_UNIT_DIGITS,
        _core.MAX_SCALES,
    )
