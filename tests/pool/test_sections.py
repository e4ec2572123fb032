"""Sections and units: parts of pools, compared with the oracles, which share no code with kvbm.

A section is given to kvbm by its methods, and described here by its coordinates.  Every byte of the destination is compared:
bytes of the section must be the source's; all others, including guards and other units, must be unchanged.
"""

from __future__ import annotations

import math
import mmap
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from test_planes import Side as PlanarSide
from test_planes import shapes

import kvbm
import matrix
import oracle
import plane_oracle
from few import few
from kvbm import BlockShape, PlanError, Pool
from kvbm.layout import spec
from memory import FakeCuda, interface_views, numpy_views, placed
from processes import FakeDriver

AXES = oracle.AXES[1:]


@dataclass(frozen=True)
class Meant:
    """A requested part of a pool: units of `unit` tokens (0: blocks), and coordinates of axes."""

    unit: int = 0
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def of(self, pool: Pool) -> Any:
        part = pool.units(self.unit) if self.unit else pool.whole
        return part.section(**self.chosen) if self.chosen else part


def named(positions: np.ndarray, axes: Sequence[str], meant: Meant, packs: Mapping[str, int]) -> np.ndarray:
    """Byte positions of the part, one row per id, from those of whole blocks, ``(blocks, *axes)``."""
    at = dict(zip(axes, range(1, len(axes) + 1), strict=True))
    if meant.unit and "t" in at:
        split = [*positions.shape]
        split[at["t"] : at["t"] + 1] = [positions.shape[at["t"]] // meant.unit, meant.unit]
        positions = np.moveaxis(positions.reshape(split), at["t"], 1)
        positions = positions.reshape(-1, *positions.shape[2:])
    for axis, coordinates in meant.chosen.items():
        if axis in at:
            given = [coordinates] if isinstance(coordinates, int) else list(coordinates)
            items = [c // packs.get(axis, 1) for c in given[:: packs.get(axis, 1)]]
            positions = positions.take(items, axis=at[axis])
    return positions


class Plain:
    """A pool of a layout with one plane, a name or an order, on guarded memory: of the host, pinned, or "on" a GPU."""

    def __init__(
        self,
        order: str,
        shape: BlockShape,
        blocks: int,
        *,
        dst: bool = False,
        how: str = "steps",
        align: int = 0,
        where: int | str = "cpu",
    ):
        layout = kvbm.load(order) if order in matrix.orders() else spec.parse(f'order: "{order}"')
        self.arena = placed(matrix.orders().get(order, oracle.Order(order)), shape, blocks).layout_bytes(align, how)
        self.before = oracle.noise(self.arena.nbytes, 1 + dst)
        pages = mmap.mmap(-1, self.before.size + mmap.PAGESIZE)
        self.buffer = np.frombuffer(pages, np.uint8)[: self.before.size]
        self.buffer[:] = self.before
        arrays: list[Any] = numpy_views(self.arena, self.buffer, shape.dtype)
        if isinstance(where, int):
            arrays = [
                FakeCuda(a.shape, shape.dtype, address=a.ctypes.data, strides=a.strides, device=where) for a in arrays
            ]
        self.pool = Pool(layout, shape, arrays)
        if where == "pinned":
            self.pool.pin()
        self.opaque = self.arena.placed.order.opaque

    def positions(self, meant: Meant) -> dict[str, tuple[np.ndarray, int]]:
        """Plane → positions of elements, and bytes of each."""
        whole = self.arena.positions(np.arange(self.arena.placed.num_blocks))
        return {"": (named(whole, AXES, meant, {}), self.arena.placed.itemsize)}


class Planar(PlanarSide):
    """A pool of a layout with several planes."""

    opaque = frozenset[str]()

    def positions(self, meant: Meant) -> dict[str, tuple[np.ndarray, int]]:
        found = {}
        for plane in self.arena.placed.planes:
            whole = self.arena.of(plane, range(self.arena.placed.num_blocks))
            packs = {plane.axis: plane_oracle.ITEMS[plane.dtype][1]}
            order = sorted(plane.extents)
            whole = whole.transpose([0, *(1 + list(plane.extents).index(axis) for axis in order)])
            found[plane.name] = named(whole, order, meant, packs), plane.itemsize
        planes = meant.chosen.get("planes", list(found))
        return {name: found[name] for name in ([planes] if isinstance(planes, str) else planes)}


def moved(s: Any, d: Any, ours: Meant, theirs: Meant, src_ids: Sequence[int], dst_ids: Sequence[int]) -> np.ndarray:
    """The expected destination.  Every byte of the part occurs once."""
    kept = [(a, b) for a, b in zip(src_ids, dst_ids, strict=True) if a != -1 and b != -1]
    result, times = d.before.copy(), np.zeros(d.before.size, np.uint8)
    reads, writes = s.positions(ours), d.positions(theirs)
    assert reads.keys() == writes.keys()
    for plane, (read, itemsize) in reads.items():
        write = writes[plane][0]
        read, write = read[[a for a, _ in kept]], write[[b for _, b in kept]]
        if s.opaque or d.opaque:  # a run stays a run
            run = math.prod(read.shape[3:])
            read, write = (np.sort(one.reshape(-1, run), axis=1) for one in (read, write))
        read = read.reshape(write.shape)
        for k in range(itemsize):
            result[write + k] = s.before[read + k]
            np.add.at(times, write + k, 1)
    assert times.max(initial=0) <= 1, "the test names a byte twice"
    return result


def copied(s: Any, d: Any, ours: Meant, theirs: Meant, rng: random.Random) -> None:
    """Copy some ids of both parts, some of them skipped, and compare every byte."""
    here, there = ours.of(s.pool), theirs.of(d.pool)
    n = rng.randint(1, min(here.num_ids, there.num_ids))
    src_ids, dst_ids = rng.sample(range(here.num_ids), n), rng.sample(range(there.num_ids), n)
    if n > 3:
        src_ids[1], dst_ids[2] = -1, -1
    d.buffer[:] = d.before
    kvbm.convert(here, there, src_ids, dst_ids)
    want = moved(s, d, ours, theirs, src_ids, dst_ids)
    assert np.array_equal(d.buffer, want), (s.pool, d.pool, ours, theirs, np.flatnonzero(d.buffer != want)[:8])
    assert np.array_equal(s.buffer, s.before)


# ---- on the host: what is meant ------------------------------------------------------------------------------------


def some(rng: random.Random, size: int) -> Any:
    """Random coordinates of an axis: one, a range, a range with steps, a sorted or unsorted list."""
    first = rng.randrange(size)
    return rng.choice(
        [
            first,
            range(first, rng.randint(first + 1, size)),
            range(first, size, rng.randint(1, size)),
            sorted(rng.sample(range(size), rng.randint(1, size))),
            rng.sample(range(size), rng.randint(1, size)),
        ]
    )


def as_many(rng: random.Random, size: int, given: Any) -> Any:
    """Equally many other coordinates."""
    count = 1 if isinstance(given, int) else len(given)
    step = rng.randint(1, max((size - 1) // max(count - 1, 1), 1))
    first = rng.randrange(size - (count - 1) * step)
    drawn = rng.sample(range(size), count)
    return rng.choice([range(first, first + count * step, step), sorted(drawn), drawn])


def parts(rng: random.Random, sizes: Mapping[str, int], unit: int, share: float) -> tuple[Meant, Meant]:
    """Coordinates of some axes on both sides, of units of `tokens` tokens (0: of blocks)."""
    ours, theirs = {}, {}
    for axis, whole in sizes.items():
        size = unit if axis == "t" and unit else whole
        if rng.random() < share:
            ours[axis] = some(rng, size)
            theirs[axis] = as_many(rng, size, ours[axis])
    return Meant(unit, ours), Meant(unit, theirs)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def cannot(order: oracle.Order, meant: Meant, tokens: int) -> bool:
    """True if an order may have no such part: the axis is opaque, fused or, for units, split or in brackets."""
    pieces = [p for text in filter(None, (order.k, order.v)) for group in oracle.parse_order(text)[:2] for p in group]
    axes = {*meant.chosen, *(["t"] if meant.unit not in (0, tokens) else [])}
    tied = any(axes & set(p.axes) for p in pieces if len(p.axes) > 1)
    split = any("t" in p.axes and p.ops for p in pieces) or "t" in order.bracketed
    return tied or (meant.unit not in (0, tokens) and split)


@pytest.mark.parametrize("name", few(matrix.names(), 23))
def test_a_part_moves_and_nothing_else(name: str) -> None:
    """Units of every divisor, alone and with coordinates of any axes; every byte of the destination is compared."""
    rng = random.Random(name)
    order = matrix.orders()[name]
    shape = BlockShape(nl=2, no=2, nh=4, nt=32, hd=16, dtype=rng.choice(["float16", "float32"]))
    for number, unit in enumerate([0, *divisors(32)] * 2):
        other = rng.choice([other for other in matrix.names() if not matrix.orders()[other].opaque])
        ways = rng.choice(["steps", "rows", "scattered"]), rng.choice(["steps", "rows", "scattered"])
        s, d = Plain(name, shape, 3, how=ways[0]), Plain(other, shape, 2, dst=True, how=ways[1], align=8 * (number % 2))
        ours, theirs = parts(rng, shape.sizes, unit, 0.4 if number % 2 else 0)
        if s.opaque and not cannot(order, ours, 32):
            d = Plain(name, shape, 2, dst=True)
        try:
            copied(s, d, ours, theirs, rng)
        except PlanError:
            if not cannot(order, ours, 32) and not cannot(matrix.orders()[other], theirs, 32):
                raise


@pytest.mark.parametrize(("src", "dst"), few(plane_oracle.pairs(), 41))
def test_parts_of_planes(src: str, dst: str) -> None:
    """Also of some of the planes; parts that would separate elements of one byte, or one common element, are refused."""
    rng = random.Random(src + dst)
    done = 0
    for shape in shapes(src)[:3]:
        for unit in (0, *divisors(shape[3])[:4]):
            s, d = Planar(src, shape, 2), Planar(dst, shape, 3, dst=True)
            planes = rng.sample(s.arena.placed.planes, rng.randint(1, len(s.arena.placed.planes)))
            common = {axis: n for axis, n in planes[0].extents.items() if all(axis in p.extents for p in planes)}
            ours, theirs = parts(rng, common, unit, 0.4)
            names = {"planes": [plane.name for plane in planes]}
            ours, theirs = Meant(unit, {**names, **ours.chosen}), Meant(unit, {**names, **theirs.chosen})
            try:
                copied(s, d, ours, theirs, rng)
                done += 1
            except PlanError as error:
                if not any(words in str(error) for words in ("share a byte", "split at", "digits")):
                    raise
    assert done > 1


def drawn(rng: random.Random, sizes: Mapping[str, int]) -> str:
    """An order with axes split at random, and up to two words in brackets."""
    words = ["b"]
    for axis, size in sizes.items():
        cuts = [n for n in divisors(size)[1:-1] if rng.random() < 0.5]
        cut = rng.choice(cuts) if cuts else 0
        words += [f"{axis}/{cut}", f"{axis}%{cut}"] if cut else [axis]
    rng.shuffle(words)
    brackets = rng.randrange(3)
    return f"[{' '.join(words[:brackets])}] {' '.join(words[brackets:])}" if brackets else " ".join(words)


@pytest.mark.parametrize("number", range(8))
def test_parts_of_any_orders(number: int) -> None:
    """Windows that cut digits of a split axis: as many loop nests as necessary, each byte once."""
    rng = random.Random(number)
    shape = BlockShape(nl=4, no=2, nh=4, nt=16, hd=8, dtype="float16")
    refused = 0
    for _ in range(40):
        s, d = (Plain(drawn(rng, shape.sizes), shape, 2, dst=bool(side)) for side in (0, 1))
        ours, theirs = parts(rng, shape.sizes, rng.choice([0, *divisors(16)]), 0.5)
        try:
            copied(s, d, ours, theirs, rng)
        except PlanError as error:
            if not any(words in str(error) for words in ("picks an allocation", "split at", "digits")):
                raise
            refused += 1
    assert refused < 25


def test_many_loops_are_cut_into_launches() -> None:
    """Three or more loop nests, with more loops than a kernel has."""
    shape = BlockShape(nl=2, no=1, nh=8, nt=64, hd=8, dtype="float32")
    s = Plain("d/2%2 t/8 t/4%2 d%2 d/4 b o l t%4 h", shape, 2)
    d = Plain("l d h/2%2 h/4 b h%2 t o", shape, 2, dst=True)
    copied(s, d, Meant(0, {"t": range(1, 64, 11)}), Meant(0, {"t": [5, 7, 27, 49, 51, 61]}), random.Random(0))


@pytest.mark.parametrize("given", [[1, 0], [1], [0], range(2)])
def test_values_before_keys(given: Any) -> None:
    """K and V with different orders on one side, in any order on the other."""
    shape = BlockShape(nl=2, no=2, nh=2, nt=16, hd=16, dtype="float16")
    for src, dst in (("vllm/paged_attn_v0", "nhd"), ("nhd", "vllm/paged_attn_v0"), ("vllm/paged_attn_v0",) * 2):
        for other in (given, given[::-1]):
            s, d = Plain(src, shape, 3), Plain(dst, shape, 3, dst=True)
            copied(s, d, Meant(0, {"o": given}), Meant(0, {"o": other}), random.Random(1))


def twin(pool: Pool) -> Pool:
    return Pool.allocate(pool.layout, pool.shape, pool.num_blocks)


REFUSED: list[tuple[str, Callable[[Pool], Any], str]] = [
    ("nhd", lambda p: p.units(5), "units of 5 tokens: expected a divisor of 48"),
    ("nhd", lambda p: p.units(0), "units of 0 tokens: expected a divisor of 48"),
    ("nhd", lambda p: p.units(96), "units of 96 tokens: expected a divisor of 48"),
    ("nhd", lambda p: p.units(True), "expected a number of tokens, got True"),
    ("nhd", lambda p: p.section(t=[1, 4, 5]).units(1), "some tokens of a block are selected"),
    ("operational", lambda p: p.units(4), "belongs to the opaque group {t h d}"),
    ("operational", lambda p: p.section(h=0), "belongs to the opaque group {t h d}"),
    ("vllm/aiter_shuffle", lambda p: p.units(12), "is split at 8; expected units that are whole pieces, got 12"),
    ("[b t] l o h d", lambda p: p.units(4), "picks an allocation"),
    ("b l t/8 o t/4%2 h t/2%2 d t%2", lambda p: p.units(2), "3 digits inside a block; expected at most 2"),
    ("nhd", lambda p: p.section(h=range(1, 5)), "axis 'h': expected coordinates from 0 to 3, got range(1, 5)"),
    ("nhd", lambda p: p.section(h=[2, 2]), "expected each coordinate once"),
    ("nhd", lambda p: p.section(l=range(0)), "expected coordinates from 0 to 1, got range(0, 0)"),
    ("nhd", lambda p: p.section(b=0), "expected axes among l o h t d, got 'b'"),
    ("nhd", lambda p: p.section(planes=5), "planes: expected a name, or a list of names, got 5"),
    ("nhd", lambda p: p.section(planes=[]), "planes: expected one or more names"),
    ("nhd", lambda p: p.section(planes="scale"), "has no planes, got 'scale'"),
    ("vllm/nvfp4_sm120", lambda p: p.section(planes="data", d=range(3)), "elements along it share a byte"),
    ("vllm/nvfp4_sm120", lambda p: p.section(**{p.resolved.layout.extra[0][0]: 0}), "plane 'data' is without it"),
    ("vllm/nvfp4_sm120", lambda p: p.section(d=range(16)), "plane 'scale' has one element for all of it"),
    ("nhd", lambda p: kvbm.convert(p.section(h=0), twin(p).section(h=[0, 1])), "the other side has one coordinate"),
    ("nhd", lambda p: kvbm.convert(p.units(4), twin(p).units(8)), "axis 't': 4 in the source, 8 in the destination"),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_meant_is_said(number: int) -> None:
    order, call, words = REFUSED[number]
    layout = spec.parse(f'order: "{order}"') if " " in order else kvbm.load(order)
    dtype = "float16" if not layout.planes else "uint8"
    pool = Pool.allocate(layout, BlockShape(nl=2, no=2, nh=4, nt=48, hd=64, dtype=dtype), 4)
    with pytest.raises(PlanError, match=re.escape(words)):
        call(pool)


SHARES = spec.parse(
    'order: "[l] b o t <data scale>"\nplanes:\n  data: {order: h d, dtype: int8}\n'
    "  scale: {dtype: float32, scales: data, shared: h}\n",
    name="shares",
)


@pytest.mark.parametrize(("axis", "chosen"), [("h", [1, 4, 0]), ("h", [0, 1, 4]), ("d", [*range(15, -1, -1)])])
def test_coordinates_in_pieces_beside_a_plane_without_the_axis(axis: str, chosen: list[int]) -> None:
    """Red: "expected coordinates from 0 to 0", and what to do was not said.  What it says works."""
    shape = BlockShape(nl=1, no=2, nh=5, nt=4, hd=16, dtype="bfloat16")
    few_ = BlockShape(nl=1, no=2, nh=3 if axis == "h" else 5, nt=4, hd=16, dtype="bfloat16")
    src, dst = Pool.allocate(kvbm.load("nhd"), shape, 2), Pool.allocate(SHARES, few_, 2)
    some = src.section(**{axis: chosen})
    with pytest.raises(PlanError, match=rf"{axis}.*of nhd would be copied in pieces, and plane 'scale' of shares has one element"):
        kvbm.convert(some, dst, [0], [0], cast="amax")
    own = Pool.allocate(kvbm.load("nhd"), few_, 2)
    kvbm.convert(some, own)
    kvbm.convert(own, dst, [0], [0], cast="amax")


def test_a_part_of_an_axis_that_the_only_plane_shares() -> None:
    pool = Pool.allocate(SHARES, BlockShape(nl=1, no=2, nh=3, nt=4, hd=16, dtype="bfloat16"), 2)
    with pytest.raises(PlanError, match=r"axis 'h': plane 'scale' has one element for all of it, got range\(1, 2\)"):
        pool.section(planes="scale", h=1)
    assert pool.section(planes="data", h=[1]).num_ids == 2


def test_the_same_units_on_both_sides_of_one_memory() -> None:
    pool = Pool.allocate(kvbm.load("nhd"), BlockShape(nl=1, no=2, nh=1, nt=8, hd=8, dtype="float16"), 4)
    with pytest.raises(kvbm.BindError, match="use equal units"):
        kvbm.convert(pool.units(4).section(t=range(2)), pool.units(2), [0], [5])
    with pytest.raises(kvbm.BindError, match="both read and written"):
        kvbm.convert(pool.units(4), pool.units(4), [0, 1], [2, 0])


# ---- on the fake driver: units and sections by every way -----------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "staged", "engine", "auto"])
@pytest.mark.parametrize("direction", ["d2d", "d2h", "h2d", "p2p"])
def test_every_strategy(fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
    """Few pairs and many, skipped ones, checked ids, and producers to wait for."""
    fake_gpu("sections.every_strategy", direction, strategy, FAKE_DEVICES="2")


@pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
def test_layers_of_a_section(fake_gpu: FakeDriver, strategy: str) -> None:
    fake_gpu("sections.ranges_of_layers", strategy)


@pytest.mark.parametrize(
    ("direction", "strategy"), [("d2d", "direct"), ("d2h", "direct"), ("h2d", "direct"), ("h2d", "staged")]
)
def test_ids_of_units_on_the_gpu(fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
    """Ids out of range are skipped and reported."""
    fake_gpu("sections.ids_on_the_gpu", direction, strategy)


@pytest.mark.parametrize("strategy", ["direct", "staged", "engine"])
@pytest.mark.parametrize("direction", ["d2d", "d2h", "h2d"])
def test_graphs_of_units(fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
    fake_gpu("sections.graphs", direction, strategy)


def test_ids_in_the_parameters(fake_gpu: FakeDriver) -> None:
    fake_gpu("sections.ids_in_the_parameters")


def test_planes_of_units_go_through_pages(fake_gpu: FakeDriver) -> None:
    """The cases above use kernels of pages on either side, and kernels of records."""
    fake_gpu("sections.kernels_of_planes")


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["nhd", "vllm/flash_attn_hnd", "vllm/BLHNC", "vllm/paged_attn_v0", "b t/32 l o h t%32 d"]
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_units_by_kernels_sanitize(name: str, on_gpu: bool) -> None:
    """Few ids and many, units with no digit, one and two, in host memory and on the GPU; one id out of range is reported."""
    import torch

    rng = random.Random(name)
    shape = BlockShape(nl=2, no=2, nh=4, nt=64, hd=16, dtype="float16")
    s, d = Plain(name, shape, 12), Plain("vllm/LBNHC", shape, 13, dst=True)
    for unit, chosen in ((16, {}), (8, {"h": [2, 0]}), (1, {"o": 1})):
        part = Meant(unit, chosen)
        for n in (1, 5, 12 * 64 // unit):
            memory = [torch.from_numpy(end.before).to("cuda:0") for end in (s, d)]
            pools = [
                Pool(end.pool.layout, shape, interface_views(end.arena, tensor, shape.dtype))
                for end, tensor in zip((s, d), memory, strict=True)
            ]
            here, there = (part.of(pool) for pool in pools)
            ids = [rng.sample(range(end.num_ids), n) for end in (here, there)]
            given = [torch.tensor(one, device="cuda:0") for one in ids] if on_gpu else [list(one) for one in ids]
            stream = torch.cuda.current_stream()
            kvbm.Transfer(here, there, "direct").copy(*given, stream=stream).synchronize()
            assert np.array_equal(memory[1].cpu().numpy(), moved(s, d, part, part, *ids)), (name, unit, chosen, n)
            if on_gpu:
                given[0][0] = here.num_ids
                with pytest.raises(kvbm.BindError, match="pair 0"):
                    kvbm.Transfer(here, there, "direct").copy(*given, stream=stream).synchronize()


FOUR = kvbm.BlockShape(nl=1, no=2, nh=2, nt=4, hd=4, dtype="float32")


def test_units_of_chosen_tokens_are_refused() -> None:
    """With one pool on both sides, their ids would not show which tokens of a block are read and written."""
    pool = kvbm.Pool.allocate(kvbm.load("nhd"), FOUR, 2)
    for tokens in (range(2), [1, 0], range(0, 4, 2)):
        with pytest.raises(kvbm.PlanError, match="call units first"):
            pool.section(t=tokens).units(1)
    assert pool.units(2).units(1).section(h=1).num_ids == 8


def test_coordinates_that_are_none() -> None:
    pool = kvbm.Pool.allocate(kvbm.load("nhd"), FOUR, 2)
    for wrong in ([True, False], range(10**30), range(-(10**30), 0)):
        with pytest.raises(kvbm.PlanError, match="axis 'h': expected"):
            pool.section(h=wrong)
    assert pool.section(t=np.array([2, 0])).tokens == pool.section(t=[2, 0]).tokens == 2


@pytest.mark.sanitize
def test_a_section_says_what_of_the_pool_it_is() -> None:
    pool = Pool.allocate(kvbm.load("nhd"), BlockShape(nl=2, no=2, nh=4, nt=16, hd=8), 4)
    made = pool.units(4).section(h=range(2, 4), l=[1, 0]).section(h=1)
    assert repr(made) == "PoolSection(nhd.units(4).section(l=[1, 0], h=range(2, 4)).section(h=1), num_ids=16)"
    assert len(repr(pool.section(d=list(range(8)), t=list(range(16)), l=[0, 1]))) < 200
