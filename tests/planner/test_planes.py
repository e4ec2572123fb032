# ruff: noqa: E501  (a refusal is a line of a table)
"""Layouts of several planes: the places of their elements, and conversions of every pair, bit for bit.

Two references share no code with kvbm: the catalogue's formulas (plane_oracle.TABLE), and for random layouts a simple
evaluation of their structure.
"""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import at_slot, execute, has_whole_runs, minimal, run_two_steps, step

import kvbm
import matrix
import oracle
import plane_oracle
import strategies
from coordinates import in_case
from few import few
from kvbm.layout import overlap, spec
from memory import FakeCuda, Strided, aligned
from plane_oracle import FAMILIES, TABLE, Arena, held
from processes import FakeDriver

NAMES = sorted(TABLE)
PAIRS = plane_oracle.pairs()


def that_differ() -> list[tuple[str, str]]:
    """A subset of pairs, with every kernel and every layout on either side; all pairs are tested with `kvbm.convert`."""
    found, seen = [], set()
    for src, dst in sorted(PAIRS, key=lambda pair: pair[0] == pair[1]):
        made = kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.BlockShape(*shapes(src)[0]), num_blocks=(4, 5))
        keys = {("src", src), ("dst", dst), *(("kernel", launch.name) for launch in made.launches())}
        if not keys <= seen:
            found.append((src, dst))
            seen |= keys
    return found


Shape = tuple[int, int, int, int, int, str]


def shapes(name: str) -> tuple[Shape, ...]:
    return FAMILIES[TABLE[name].family].shapes


SOME_PAIRS = that_differ()


def every_shape() -> list[tuple[str, Shape]]:
    return [(name, shape) for name in NAMES for shape in shapes(name)]


def numpy_arrays(arena: Arena, buffer: np.ndarray) -> list[np.ndarray]:
    """The engine's tensors, dense, in their usual shapes."""
    return [
        np.ndarray(tensor.shape, kvbm.layout.shapes.numpy_name(tensor.dtype), buffer, base)
        for tensor, base in zip(arena.placed.tensors, arena.bases, strict=True)
    ]


# ---- the catalogue's formulas ----------------------------------------------------------------------------------------


def test_every_planar_layout_is_in_the_table() -> None:
    assert set(TABLE) == set(matrix.planar())
    assert {formula.family for formula in TABLE.values()} == set(FAMILIES)


@pytest.mark.slow  # every coordinate of every plane at every shape
def test_it_is_what_the_formula_says() -> None:
    """Every coordinate of every plane, the exact bytes of the tensors, and which bytes belong to a plane."""
    for name, shape in every_shape():
        with in_case(name, shape):
            _check_it_is_what_the_formula_says(name, shape)


def _check_it_is_what_the_formula_says(name: str, shape: Shape) -> None:
    want = held(name, shape, 3)
    if shape[3] < 64:
        want.check()
    resolved = kvbm.load(name).resolve(kvbm.BlockShape(*shape), 3)
    assert {part.plane for part in resolved.planes} == {plane.name for plane in want.planes}
    assert [a.nbytes for a in resolved.allocations] == [tensor.nbytes for tensor in want.tensors]
    assert resolved.block_bytes == want.block_bytes
    for plane in want.planes:
        (part,) = (part for part in resolved.planes if part.plane == plane.name)
        assert part.shape.dtype == plane.dtype
        assert {a: n for a, n in part.extents.items() if n > 1} == {a: n for a, n in plane.extents.items() if n > 1}
        coords = plane.grid(range(3))
        places = plane.address(range(3))
        for o in range(shape[1]):
            mine = {a: c.take([o], [*coords].index("o")) if a == "o" else c for a, c in coords.items()}
            full = dict(zip(mine, np.broadcast_arrays(*mine.values()), strict=True))
            b, _ = full.pop("b"), full.pop("o", None)
            got = part.address(b, o=o, **full)  # type: ignore[arg-type]
            wanted = (p.take([o], [*coords].index("o")) if "o" in coords else p for p in places)
            for mine_, theirs in zip(got, wanted, strict=True):
                assert np.array_equal(np.broadcast_to(mine_, b.shape), theirs), (plane.name, o)


def test_the_table_would_notice() -> None:
    """Two layouts with tensors of the same shapes have different addresses, so the comparison can fail."""
    for one, other in PAIRS:
        if one == other:
            continue
        shape = shapes(one)[0]
        a, b = held(one, shape, 2), held(other, shape, 2)
        same = [t.nbytes for t in a.tensors] == [t.nbytes for t in b.tensors]
        places = [[p.address(range(2)) for p in sorted(x.planes, key=lambda p: p.name)] for x in (a, b)]
        assert not same or any(
            not np.array_equal(x[1], y[1]) or not np.array_equal(x[0], y[0]) for x, y in zip(*places, strict=True)
        )


#: Shapes of the arrays that `Pool.allocate` makes, at the first shape of the family and five blocks; the first and the last.
ALLOCATED = {
    "flashinfer/mla_split": [((5, 4, 512), "bfloat16"), ((5, 4, 64), "bfloat16")],
    "record/deepseek_v4_planes": [((2, 4 * 584), "uint8")],
    "record/deepseek_v4_tokens": [((5, 4, 584), "uint8")],
    "record/diff_kv_universal": [((2, 2, 4 * 640), "uint8")],
    "record/dsa_indexer_mxfp4_tokens": [((5, 4, 68), "uint8")],
    "record/dsa_indexer_tokens": [((5, 4, 132), "uint8")],
    "record/mla_fp8_pages": [((5, 4 * 656), "uint8")],
    "record/mla_fp8_planes": [((2, 4 * 656), "uint8")],
    "record/mla_fp8_tensors": [((5, 4, 512), "float8_e4m3fn"), ((5, 4, 64), "bfloat16")],
    "record/mla_joined": [((5, 4, 1152), "uint8")],
    "record/mla_v41_tokens": [((5, 4, 528), "uint8")],
    "record/mxfp8_tensors": [((5, 128, 2, 128), "float8_e4m3fn"), ((5, 128, 2, 4), "float8_e8m0fnu")],
    "record/mxfp8_universal": [((2, 1, 2, 128 * 132), "uint8")],
    "record/nvfp4_mla_planes": [((2, 4 * 352), "uint8")],
    "record/nvfp4_tensors": [((5, 2, 2, 8, 32), "uint8"), ((5, 2, 2, 8, 4), "float8_e4m3fn")],
    "record/nvfp4_universal": [((2, 2, 2, 8 * 36), "uint8")],
    "record/per_token_head_fp8_planes": [((2, 2, 2, 8 * 68), "uint8")],
    "record/per_token_head_int8_planes": [((2, 2, 2, 8 * 68), "uint8")],
    "sglang/mxfp8": [((5, 128, 2, 128), "float8_e4m3fn"), ((5, 2, 32, 4, 4), "float8_e8m0fnu")],
    "vllm/deepseek_v4": [((5, 4 * 584), "uint8")],  # at a pitch of 2880 bytes
    "vllm/diff_kv": [((5, 4, 2, 640), "uint8")],
    "vllm/dsa_indexer": [((5, 4 * 132), "uint8")],
    "vllm/dsa_indexer_mxfp4": [((5, 4 * 68), "uint8")],
    "vllm/fp8_ds_mla": [((5, 4, 656), "uint8")],
    "vllm/mla_v41": [((5, 4 * 528), "uint8")],  # at a pitch of 2560 bytes
    "vllm/nvfp4": [((5, 2, 2 * 8 * 36), "uint8")],
    "vllm/nvfp4_ds_mla": [((5, 4, 352), "uint8")],
    "vllm/nvfp4_sm120": [((5, 2, 2 * 8 * 36), "uint8")],
    "vllm/per_token_head_fp8": [((5, 8, 2, 2, 68), "uint8")],
    "vllm/per_token_head_int8": [((5, 8, 2, 2, 68), "uint8")],
}


@pytest.mark.parametrize("name", NAMES)
def test_allocated_arrays(name: str) -> None:
    pool = kvbm.Pool.allocate(kvbm.load(name), kvbm.BlockShape(*shapes(name)[0]), 5)
    ends = [pool.arrays[0], pool.arrays[-1]] if len(ALLOCATED[name]) == 2 else [pool.arrays[0]]
    got = [(array.shape, array.dtype.name) for array in ends]
    assert got == ALLOCATED[name]
    assert pool.num_blocks == 5


# ---- every pair, on the host -----------------------------------------------------------------------------------------


class Side:
    """A planar pool on a guarded buffer, with its original bytes.

    `where`: ``cpu``; ``pinned`` or ``cuda`` (torch's memory); ``fake`` or ``fake pinned``, on the fake driver.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        blocks: int,
        *,
        dst: bool = False,
        align: int = 0,
        how: str = "steps",
        salt: int = 0,
        where: str = "cpu",
    ):
        self.layout, self.shape, self.is_dst = kvbm.load(name), kvbm.BlockShape(*shape), dst
        self.arena = held(name, shape, blocks).arena(align, how)
        self.before = self.arena.dest(salt) if dst else self.arena.source(salt)
        if where == "cpu":
            self.memory: Any = aligned(self.before)
        elif where.startswith("fake"):
            self.pages = mmap.mmap(-1, self.before.size + mmap.PAGESIZE)
            self.memory = np.frombuffer(self.pages, np.uint8)[: self.before.size]
            self.memory[:] = self.before
        else:
            import torch

            self.memory = torch.from_numpy(self.before).clone()
            self.memory = self.memory.pin_memory() if where == "pinned" else self.memory.to("cuda:0")
            torch.cuda.synchronize()
        make = {"cuda": cuda_arrays, "fake": fake_arrays}.get(where)
        arrays = make(self.arena, self.memory) if make else numpy_arrays(self.arena, np.asarray(self.memory))
        self.pool = kvbm.Pool(self.layout, self.shape, arrays)
        if where == "fake pinned":
            self.pool.pin()

    def refill(self, salt: int = 0) -> None:
        self.before = self.arena.dest(salt) if self.is_dst else self.arena.source(salt)
        if isinstance(self.memory, np.ndarray):
            self.memory[:] = self.before
        else:
            import torch

            self.memory.copy_(torch.from_numpy(self.before))
            torch.cuda.synchronize()

    @property
    def buffer(self) -> np.ndarray:
        return self.memory if isinstance(self.memory, np.ndarray) else self.memory.cpu().numpy()

    @property
    def untouched(self) -> bool:
        return np.array_equal(self.buffer, self.before)

    @property
    def slot(self) -> int:
        """Bytes of a block, packed."""
        return self.pool.resolved.section.packed().accesses[0].block[0]


def cuda_arrays(arena: Arena, buffer: Any) -> list[Any]:
    """Torch tensors with the engine's dtypes, or bare CUDA arrays if torch cannot view such an address."""
    import torch

    made: list[Any] = []
    for tensor, base in zip(arena.placed.tensors, arena.bases, strict=True):
        itemsize = plane_oracle.ITEMS[tensor.dtype][0]
        if base % itemsize:
            typestr = np.dtype(kvbm.layout.shapes.numpy_name(tensor.dtype)).str
            made.append(Strided(buffer.data_ptr() + base, tensor.shape, None, typestr, buffer))
        else:
            kind = torch.uint8 if tensor.dtype == "float4_e2m1fn" else getattr(torch, tensor.dtype)
            made.append(buffer[base : base + tensor.nbytes].view(kind).view(tensor.shape))
    return made


def fake_arrays(arena: Arena, buffer: np.ndarray) -> list[FakeCuda]:
    return [
        FakeCuda(tensor.shape, kvbm.layout.shapes.numpy_name(tensor.dtype), address=buffer.ctypes.data + base)
        for tensor, base in zip(arena.placed.tensors, arena.bases, strict=True)
    ]


def check(src: Side, dst: Side, src_ids: Any, dst_ids: Any, layers: Any = (None, None), what: Any = "") -> None:
    want = plane_oracle.expected(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids, layers)
    assert np.array_equal(dst.buffer, want), f"{what}\n{plane_oracle.explain(dst.arena, dst.buffer, want)}"
    assert src.untouched, f"{what}: the source changed"


ALIGNS = ((0, 0), (1, 0), (4, 2), (2, 8), (8, 1), (16, 48))
WAYS = (("steps", "steps"), ("rows", "scattered"), ("scattered", "rows"))
IDS = (([4, 0, 2], [5, 1, 0]), ([1, -1, 3, 0], [0, 2, -1, 6]), ([2], [3]), (list(range(5)), [6, 5, 4, 3, 2]))


@pytest.mark.parametrize("first", few(range(3), 1))
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_pair(src: str, dst: str, first: int) -> None:
    """Bit for bit: every shape, bases at odd addresses, tables of every kind; guards, padding, other blocks unchanged."""
    for turn, shape in enumerate(shapes(src), first):
        aligns, ways, ids = ALIGNS[turn % 6], WAYS[turn % 3], IDS[turn % 4]
        for salt in (0, 1) if shape[3] < 64 else (0,):  # a byte holds 256 values, and elements agree by chance
            one = Side(src, shape, 5, align=aligns[0], how=ways[0], salt=salt)
            other = Side(dst, shape, 7, dst=True, align=aligns[1], how=ways[1], salt=salt)
            kvbm.convert(one.pool, other.pool, *ids)
            check(one, other, *ids, what=(shape, aligns, ways, ids))


@pytest.mark.parametrize("empty", [[], [-1]])
def test_nothing_to_copy(empty: list[int]) -> None:
    one, other = (Side("vllm/fp8_ds_mla", shapes("vllm/fp8_ds_mla")[0], 3, dst=bool(k)) for k in range(2))
    kvbm.convert(one.pool, other.pool, empty, empty)
    assert other.untouched


@pytest.mark.threads
def test_many_blocks_on_all_cores() -> None:
    """More pairs than fit a kernel's parameters, shared among threads; blocks and ids in random order."""
    rng = np.random.default_rng(3)
    for src, dst in (("vllm/fp8_ds_mla", "record/mla_fp8_planes"), ("record/nvfp4_universal", "vllm/nvfp4")):
        shape = shapes(src)[0]
        one, other = Side(src, shape, 700), Side(dst, shape, 800, dst=True)
        ids = rng.permutation(700), rng.permutation(800)[:700]
        kvbm.convert(one.pool, other.pool, *ids)
        check(one, other, ids[0].tolist(), ids[1].tolist())


@pytest.mark.parametrize(("src", "dst"), SOME_PAIRS)
def test_ranges_of_layers(src: str, dst: str) -> None:
    """Exactly these layers; between pools with equally many layers, and with a pool that holds some of them."""
    base = shapes(src)[0]
    shape, stage = (4, *base[1:]), (2, *base[1:])
    for shapes_, layers in (
        ((shape, shape), (range(1, 3), range(1, 3))),
        ((shape, shape), (range(3, 4), range(3, 4))),
        ((shape, stage), (range(2, 4), range(2))),
        ((stage, shape), (range(1, 2), range(3, 4))),
    ):
        one, other = Side(src, shapes_[0], 4, align=4), Side(dst, shapes_[1], 5, dst=True)
        kvbm.Transfer(one.pool, other.pool).copy([3, 0], [1, 4], layers=layers)
        check(one, other, [3, 0], [1, 4], layers, what=layers)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_plans(src: str, dst: str) -> None:
    """The loop nests, run byte by byte: correct, minimal, no byte written twice, and the stated number of bytes."""
    for shape in shapes(src):
        if shape[3] > 16:
            continue
        one, other = Side(src, shape, 4, align=3), Side(dst, shape, 5, dst=True, align=5)
        made = kvbm.plan(one.layout, other.layout, one.shape, num_blocks=(4, 5))
        want = plane_oracle.expected(one.arena, other.arena, one.before, other.before, [3, 1], [0, 4])
        got = execute(made, one.arena, other.arena, one.before, other.before, [3, 1], [0, 4])
        assert np.array_equal(got, want), plane_oracle.explain(other.arena, got, want)
        minimal(made)
        assert made.nbytes == one.arena.placed.block_bytes == other.arena.placed.block_bytes
        assert str(made) and made.explain()


@pytest.mark.parametrize("name", NAMES)
def test_a_record_that_stays_is_one_run(name: str) -> None:
    """Planes that are adjacent on both sides are one copy per page; separate tensors are one copy each."""
    shape = shapes(name)[0]
    one, other = held(name, shape, 4), held(name, shape, 5)
    made = kvbm.plan(kvbm.load(name), kvbm.load(name), kvbm.BlockShape(*shape), num_blocks=(4, 5))
    assert made.kind == "copy"
    assert len(made.parts) == len({t.shape for t in one.tensors}) == len({t.shape for t in other.tensors})
    if len(made.parts) == 1:
        (part,) = made.parts
        assert part.label == " + ".join(p.name for p in kvbm.load(name).planes)
        assert part.run_bytes == one.block_bytes // (1 if len(one.tensors) == 4 else shape[0])


@pytest.mark.parametrize(("src", "dst"), SOME_PAIRS)
def test_tables_as_strides(src: str, dst: str) -> None:
    """Allocations with a constant stride: the copy engine's plan uses byte offsets from one base."""
    shape = shapes(src)[0]
    one, other = Side(src, shape, 4), Side(dst, shape, 5, dst=True)
    want = plane_oracle.expected(one.arena, other.arena, one.before, other.before, [3, 1], [0, 4])
    made = kvbm.plan(one.layout, other.layout, one.shape, num_blocks=(4, 5))
    for regular in ((True, True), (True, False), (False, True)):
        sides = []
        for side, flat in zip((one, other), regular, strict=True):
            even = len(set(np.diff(side.arena.bases).tolist())) <= 1
            sides.append(step(side.arena) if flat and even else None)
        got = execute(made.flat(*sides), one.arena, other.arena, one.before, other.before, [3, 1], [0, 4])
        assert np.array_equal(got, want), (sides, plane_oracle.explain(other.arena, got, want))


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(("src", "dst"), SOME_PAIRS)
def test_two_steps_are_the_one(src: str, dst: str, gathers: bool) -> None:
    """Packed into a slot and moved on, or moved into a slot and unpacked: the result is that of a copy in one step.

    Once by the loop nests alone, once by the kernels on the host.  All bytes of a slot are inside the slot.
    """
    src_ids, dst_ids = [4, 0, 2], [5, 1, 0]
    for shape in shapes(src)[:2]:
        one, other = Side(src, shape, 5, align=4), Side(dst, shape, 6, dst=True, align=2)
        made = kvbm.plan(one.layout, other.layout, one.shape, num_blocks=(5, 6))
        first, second = made.staged(gathers=gathers)
        block = first.parts[0].dst_id[1]
        assert {part.dst_id for part in first.parts} == {part.src_id for part in second.parts} == {(0, block, ())}
        assert block % 16 == 0 and block >= made.nbytes
        assert has_whole_runs(*((second, other.pool) if gathers else (first, one.pool)))
        want = plane_oracle.expected(one.arena, other.arena, one.before, other.before, src_ids, dst_ids)
        slot = oracle.noise(64 + 3 * block + 64, 5)

        filled = execute(first, one.arena, at_slot(64), one.before, slot, src_ids, range(3))
        assert np.array_equal(filled[:64], slot[:64]) and np.array_equal(filled[-64:], slot[-64:])
        got = execute(second, at_slot(64), other.arena, filled, other.before, range(3), dst_ids)
        assert np.array_equal(got, want), plane_oracle.explain(other.arena, got, want)

        run_two_steps(first, second, one, other, slot, src_ids, dst_ids)
        assert np.array_equal(other.buffer, want), plane_oracle.explain(other.arena, other.buffer, want)


# ---- on a driver that is not one -------------------------------------------------------------------------------------

STRATEGIES = ("direct", "staged", "engine")
DIRECTIONS = ("d2d", "d2h", "h2d")


class TestOnTheFakeDriver:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
    @pytest.mark.slow
    def test_every_strategy(self, fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
        """Bit-exact in any order of the streams; skipped pairs skipped, ids read before the call returns."""
        fake_gpu("planes.every_strategy", direction, strategy)

    def test_one_launch_moves_all_planes(self, fake_gpu: FakeDriver) -> None:
        """One launch for all planes of a page, to or from records or separate tensors."""
        fake_gpu("planes.one_launch_moves_all_planes")

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.slow
    def test_ranges_of_layers(self, fake_gpu: FakeDriver, strategy: str) -> None:
        fake_gpu("planes.ranges_of_layers", strategy)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def turns(number: int) -> dict[str, Any]:
    aligns, ways = ALIGNS[number % 6], WAYS[number // 2 % 3]
    return {"src": {"align": aligns[0], "how": ways[0]}, "dst": {"align": aligns[1], "how": ways[1]}}


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_gpu_every_pair(src: str, dst: str) -> None:
    """Device to device: every shape, odd base addresses, tables of every kind; compared with the formulas byte for byte."""
    import torch

    stream = torch.cuda.Stream()
    for number, shape in enumerate(shapes(src)):
        for turn in (number, number + 3):
            how, ids = turns(turn), IDS[turn % 4]
            one = Side(src, shape, 5, where="cuda", **how["src"])
            other = Side(dst, shape, 7, where="cuda", dst=True, **how["dst"])
            kvbm.convert(one.pool, other.pool, *ids, stream=stream)
            stream.synchronize()
            check(one, other, *ids, what=(shape, how, ids))


GPU_SIDES = {"d2d": ("cuda", "cuda"), "d2h": ("cuda", "pinned"), "h2d": ("pinned", "cuda")}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpu_transfers(direction: str, strategy: str) -> None:
    """Every pair to, from and on the device, by every strategy; skips, slots of one block and of more, few multiprocessors."""
    import torch

    stream = torch.cuda.Stream()
    for number, (src, dst) in enumerate(PAIRS):
        a, b = GPU_SIDES[direction]
        shape, how = shapes(src)[0], turns(number)
        one = Side(src, shape, 11, where=a, **how["src"])
        other = Side(dst, shape, 13, where=b, dst=True, **how["dst"])
        rng = np.random.default_rng(number)
        ids = rng.permutation(11)[:9], rng.permutation(13)[:9]
        ids[0][number % 9], ids[1][(number + 4) % 9] = -1, -1
        slot = max(one.slot, other.slot)
        chunk = (None, slot, 3 * slot)[number % 3] if strategy in ("staged", "auto") else None
        most = 2 if number % 4 == 3 and strategy != "engine" else None
        with kvbm.Transfer(one.pool, other.pool, strategy, chunk_bytes=chunk, max_sms=most) as move:
            done = move.copy(*ids, stream=stream)
            done.synchronize()
            check(one, other, *map(np.ndarray.tolist, ids), what=(src, dst, chunk))
            assert strategy in ("auto", done.strategy)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpu_layers(direction: str, strategy: str) -> None:
    import torch

    stream = torch.cuda.Stream()
    for src, dst in PAIRS:
        a, b = GPU_SIDES[direction]
        base = shapes(src)[0]
        one = Side(src, (4, *base[1:]), 4, where=a)
        other = Side(dst, (2, *base[1:]), 5, where=b, dst=True)
        layers = range(1, 3), range(2)
        with kvbm.Transfer(one.pool, other.pool, strategy) as move:
            move.copy([3, 0], [1, 4], layers=layers, stream=stream).synchronize()
            check(one, other, [3, 0], [1, 4], layers, what=(src, dst))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpu_graphs(direction: str, strategy: str) -> None:
    """A replay copies the source's current contents; nothing is copied during the capture."""
    import torch

    for src, dst in (
        ("vllm/fp8_ds_mla", "record/mla_fp8_planes"),
        ("record/deepseek_v4_planes", "vllm/deepseek_v4"),
        ("vllm/nvfp4", "record/nvfp4_universal"),
        ("record/mla_fp8_tensors", "vllm/fp8_ds_mla"),
    ):
        a, b = GPU_SIDES[direction]
        shape = shapes(src)[0]
        one, other = Side(src, shape, 30, where=a), Side(dst, shape, 40, where=b, dst=True)
        stream, rng = torch.cuda.Stream(), np.random.default_rng(2)
        ids = rng.permutation(30), rng.permutation(40)[:30]
        given = [side.copy() for side in ids]
        chunk = 7 * max(one.slot, other.slot) if strategy == "staged" else None
        move = kvbm.Transfer(one.pool, other.pool, strategy, chunk_bytes=chunk)
        move.copy([0], [0], stream=stream).synchronize()  # what is loaded lazily is loaded here
        other.refill()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            move.copy(*given)
        given[0][:] = given[1][:] = 0
        torch.cuda.synchronize()
        assert other.untouched, "the capture has copied"
        for salt in (1, 2):
            one.refill(salt), other.refill(salt)
            graph.replay()
            torch.cuda.synchronize()
            check(one, other, ids[0].tolist(), ids[1].tolist(), what=(src, dst, salt))


@pytest.mark.gpu
def test_gpu_ids_on_the_device() -> None:
    """Ids are read when the kernel runs, equally by all parts of a record."""
    import torch

    stream = torch.cuda.Stream()
    for src, dst in PAIRS[::7]:
        shape = shapes(src)[0]
        one, other = Side(src, shape, 9, where="cuda"), Side(dst, shape, 11, where="cuda", dst=True)
        ids = [8, 1, -1, 5], [1, 8, 3, -1]
        held_ = [torch.zeros(4, dtype=torch.int64, device="cuda") for _ in ids]
        real = [torch.tensor(side, device="cuda") for side in ids]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for to, side in zip(held_, real, strict=True):
                to.copy_(side)
        kvbm.Transfer(one.pool, other.pool, "direct").copy(*held_, stream=stream)
        stream.synchronize()
        check(one, other, *ids, what=(src, dst))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("vllm/fp8_ds_mla", "record/mla_fp8_planes"),  # three planes, words of 16 and 4 bytes
        ("record/deepseek_v4_tokens", "vllm/deepseek_v4"),  # scales of eight bytes, pages with padding
        ("vllm/nvfp4", "record/nvfp4_tensors"),  # scales of V one by one; tables
        ("vllm/dsa_indexer", "record/dsa_indexer_tokens"),  # 132 bytes: words of four
        ("record/mxfp8_universal", "sglang/mxfp8"),
        ("vllm/diff_kv", "record/diff_kv_universal"),
        ("vllm/per_token_head_int8", "record/per_token_head_int8_planes"),
    ],
)
def test_gpu_records_sanitize(src: str, dst: str) -> None:
    """Small enough for compute-sanitizer: the kernel of records at even and odd addresses, to and from pinned memory."""
    import torch

    stream, shape = torch.cuda.Stream(), shapes(src)[2]
    for number, (a, b) in enumerate((*GPU_SIDES.values(), ("cuda", "cuda"))):
        odd = 3 if number == 3 else 0
        one = Side(src, shape, 3, where=a, align=odd)
        other = Side(dst, shape, 4, where=b, align=2 * odd, dst=True)
        with kvbm.Transfer(one.pool, other.pool, "direct") as move:
            move.copy([2, -1, 0], [3, 1, 0], stream=stream).synchronize()
            check(one, other, [2, -1, 0], [3, 1, 0], what=(src, dst, number))


# ---- layouts that nobody has written ---------------------------------------------------------------------------------

PLANE_NAMES = ("a", "b", "scale")


@st.composite
def kinds(draw: Any) -> tuple[dict[str, int], list[plane_oracle.DrawnPlane]]:
    """Sizes, and planes without an order: the common facts of the two sides of a pair."""
    sizes = {
        a: draw(st.sampled_from(n))
        for a, n in zip("lohtd", ((1, 2, 3), (1, 2), (1, 2, 3), (1, 2, 4, 6), (2, 4, 6, 8)), strict=True)
    }
    planes = []
    for name, axis in zip(PLANE_NAMES[: draw(st.integers(2, 3))], draw(st.permutations(("d", "s", "r"))), strict=False):
        dtype = draw(st.sampled_from(("float8_e4m3fn", "bfloat16", "float32", "int8", "float4_e2m1fn", "int64")))
        own = axis if dtype.startswith("float4") or draw(st.integers(0, 3)) else ""
        elements = {"d": sizes["d"], "": 1}.get(own, draw(st.sampled_from((1, 2, 3, 4, 8))))
        shared = tuple(a for a in "lht" if draw(st.integers(0, 11)) == 0)
        planes.append(plane_oracle.DrawnPlane(name, dtype, own, elements, shared, ()))
    return sizes, planes


def _split(draw: Any, words: list[str], sizes: dict[str, int]) -> list[str]:
    """Some axes split into two pieces."""
    made = []
    for word in words:
        by = [n for n in (2, 3, 4) if sizes[word] % n == 0]
        if by and draw(st.integers(0, 4)) == 0:
            n = by[0]  # the same on both sides: that there is no common refinement is test_planner's
            made += [f"{word}/{n}", f"{word}%{n}"]
        else:
            made.append(word)
    return made


@st.composite
def drawn(draw: Any, sizes: dict[str, int], planes: list[plane_oracle.DrawnPlane]) -> plane_oracle.Drawn:
    hidden = {a for p in planes for a in p.shared}
    outer = ["b", *(a for a in "loht" if a not in hidden and draw(st.booleans()))]
    outer = list(draw(st.permutations(outer)))
    cut = draw(st.integers(0, len(outer)))
    table, inner = outer[:cut], outer[cut:]
    term = "<" + " ".join(p.name for p in planes) + ">"
    apart = draw(st.booleans())
    if apart:
        table.insert(draw(st.integers(0, len(table))), term)
    else:
        inner.append(term)
    made = []
    for plane in planes:
        mine = [a for a in "loht" if a not in outer and a not in plane.shared] + ([plane.axis] if plane.axis else [])
        extents = {**sizes, plane.axis: plane.elements}
        orders = []
        for _ in range(2 if "o" in outer and draw(st.integers(0, 2)) == 0 else 1):
            order = list(draw(st.permutations(_split(draw, mine, extents))))
            if plane.dtype.startswith("float4") and draw(st.integers(0, 7)):  # what packs stands at the end
                order.sort(key=lambda word, axis=plane.axis: (word[0] == axis, word[1:2] == "%"))
            orders.append(tuple(order))
        orders = orders[:1] if orders[0] == orders[-1] else orders
        offset = (
            draw(st.integers(0, 40)) * draw(st.sampled_from((1, 4)))
            if not apart and not draw(st.integers(0, 4))
            else None
        )
        pitch = ()
        if orders[0] and len(orders) == 1 and draw(st.integers(0, 4)) == 0:
            pitch = ((draw(st.sampled_from(orders[0])), draw(st.sampled_from((4, 8, 16, 48, 96)))),)
        made.append(dataclasses.replace(plane, orders=tuple(orders), offset=offset, pitch=pitch))
    around = [word for word in inner if not word.startswith("<")]
    pitch = (
        ((draw(st.sampled_from(around)), draw(st.sampled_from((64, 256, 1000)))),)
        if around and not draw(st.integers(0, 4))
        else ()
    )
    if apart and any(p.offset for p in made):
        raise AssertionError
    return plane_oracle.Drawn(tuple(table), tuple(inner), tuple(made), pitch if not apart else ())


@st.composite
def one_drawn(draw: Any) -> tuple[dict[str, int], plane_oracle.Drawn]:
    sizes, planes = draw(kinds())
    return sizes, draw(drawn(sizes, planes))


@st.composite
def two_drawn(draw: Any) -> tuple[dict[str, int], plane_oracle.Drawn, plane_oracle.Drawn]:
    sizes, planes = draw(kinds())
    return sizes, draw(drawn(sizes, planes)), draw(drawn(sizes, planes))


def block_shape(sizes: dict[str, int]) -> kvbm.BlockShape:
    return kvbm.BlockShape(nl=sizes["l"], no=sizes["o"], nh=sizes["h"], nt=sizes["t"], hd=sizes["d"], dtype="uint8")


@given(one_drawn())
@strategies.cases(600)
def test_random_layouts_lie_where_their_structure_says(given_: Any) -> None:
    """Every byte of every element; refused exactly if planes share a byte (counted one by one) or sizes do not fit."""
    sizes, layout = given_
    declared = spec.parse(layout.yaml, name="drawn")
    try:
        want = layout.held(sizes, 2)
    except oracle.IllegalError as error:
        if "different axes" not in str(error):
            with pytest.raises(kvbm.LayoutError, match="overlap" if "overlaps" in str(error) else None):
                declared.resolve(block_shape(sizes), 2)
        return
    want.check()
    resolved = declared.resolve(block_shape(sizes), 2)
    assert [a.nbytes for a in resolved.allocations] == [tensor.nbytes for tensor in want.tensors]
    assert resolved.block_bytes == want.block_bytes
    for plane in want.planes:
        (part,) = (part for part in resolved.planes if part.plane == plane.name)
        entry, offset = plane.address(range(2))
        coords = dict(zip(plane.extents, np.meshgrid(*plane.items().values(), indexing="ij"), strict=True))
        for block in range(2):
            for at in np.ndindex(entry.shape[1:]):
                there = {axis: int(values[at]) for axis, values in coords.items()}
                assert part.address(block, **there) == (entry[(block, *at)], offset[(block, *at)]), (plane.name, there)


@given(two_drawn(), st.sampled_from(((1, 4), (0, 0), (16, 0))))
@strategies.cases(500)
def test_random_pairs_convert(given_: Any, aligns: tuple[int, int]) -> None:
    """Bit for bit by the host's kernels, by the loop nests, and by simulated launches; or an error with the reason."""
    sizes, one, other = given_
    try:
        arenas = [x.held(sizes, n).arena(align) for x, n, align in zip((one, other), (3, 4), aligns, strict=True)]
    except oracle.IllegalError:
        return
    source, before = arenas[0].source(), arenas[1].dest()
    buffers = aligned(source), aligned(before)
    shape = block_shape(sizes)
    pools = [
        bound(spec.parse(x.yaml, name=n), shape, a, b)
        for x, n, a, b in zip((one, other), "ab", arenas, buffers, strict=True)
    ]
    packed = [[p.axis for p in arena.placed.planes] for arena in arenas]
    ids = [2, -1, 0], [1, 2, 3]
    if packed[0] != packed[1]:
        with pytest.raises(kvbm.PlanError, match=r"share a byte on one side only|elements along it share a byte"):
            kvbm.convert(*pools, *ids)
        assert np.array_equal(buffers[1], before)
        return
    made = kvbm.plan(pools[0].layout, pools[1].layout, shape, num_blocks=(3, 4))
    want = plane_oracle.expected(*arenas, source, before, *ids)
    got = execute(made, *arenas, source, before, [2, 0], [1, 3])
    assert np.array_equal(got, want), plane_oracle.explain(arenas[1], got, want)
    minimal(made)
    alignments = pools[0].alignment, pools[1].alignment
    got, _ = by_launches(made, *arenas, source, before, ([2, 0], [1, 3]), alignments)
    assert np.array_equal(got, want), plane_oracle.explain(arenas[1], got, want)
    kvbm.convert(*pools, *ids)
    assert np.array_equal(buffers[1], want), plane_oracle.explain(arenas[1], buffers[1], want)


def bound(layout: kvbm.Layout, shape: kvbm.BlockShape, arena: Arena, buffer: np.ndarray, blocks: int = 0) -> kvbm.Pool:
    """A pool on the arena, in the shapes that the layout requires."""
    resolved = layout.resolve(shape, arena.placed.num_blocks)
    return kvbm.Pool(
        layout,
        shape,
        [
            np.ndarray(a.shape, kvbm.layout.shapes.numpy_name(a.dtype), buffer, base, a.strides)
            for a, base in zip(resolved.allocations, arena.bases, strict=True)
        ],
    )


# ---- elements of four bits in plain layouts --------------------------------------------------------------------------


def halves(order: str, sizes: dict[str, int], num_blocks: int, dtype: str) -> plane_oracle.Held:
    """A plain layout as one plane without a name: its items are pairs of elements along the fastest axis."""
    table, inner = order.split("]") if "]" in order else ("", order)
    words = tuple(inner.replace("{", "").replace("}", "").split())
    plane = plane_oracle.DrawnPlane(
        "", dtype, "d", sizes["d"], (), (words[words.index("b") + 1 :] if "b" in words else words,)
    )
    rest = words[: words.index("b") + 1] if "b" in words else ()
    return plane_oracle.Drawn(tuple(table.strip("[ ").split()), rest, (plane,)).held(sizes, num_blocks)


FOUR = {"l": 2, "o": 2, "h": 3, "t": 4, "d": 64}
#: Layouts of the catalogue, and one with a split, with pairs along d.
PACKED_ALONG_D = {
    "nhd": "[b l o] t h d",
    "hnd": "[b l o] h t d",
    "universal": "[b] h l o t d",
    "operational": "[b] l o {t h d}",
    "operational_nhd": "[b] l o t h d",
    "vllm/flash_attn_nhd": "[l] o b t h d",
    "vllm/LBHNC": "l b h t o d",
    "sglang/host_page_first": "o b t l h d",
    "split": "[l o] b h d/16 t d%16",
}
#: Of those, what holds the elements of a chunk in one run in the order that `operational` is read in.
RUNS = ("nhd", "operational", "operational_nhd", "vllm/flash_attn_nhd")


@pytest.mark.parametrize("dtype", oracle.PAIRED)
@pytest.mark.parametrize("src", PACKED_ALONG_D)
def test_four_bits(src: str, dtype: str) -> None:
    """Bit for bit to every other layout, in bytes of two elements: half the bytes of eight bits; the same errors."""
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=64, dtype=dtype)
    for dst in PACKED_ALONG_D:
        orders = [PACKED_ALONG_D[name] for name in (src, dst)]
        layouts = [spec.parse(f'order: "{order}"', name=name) for order, name in zip(orders, (src, dst), strict=True)]
        assert all(x == kvbm.load(x.name) for x in layouts if x.name != "split")
        arenas = [
            halves(order, FOUR, blocks, dtype).arena(blocks) for order, blocks in zip(orders, (4, 5), strict=True)
        ]
        source, before = arenas[0].source(), arenas[1].dest()
        buffers = aligned(source), aligned(before)
        pools = [bound(x, shape, a, b) for x, a, b in zip(layouts, arenas, buffers, strict=True)]
        ids = [3, 0, -1], [1, 4, 0]
        if "operational" in (src, dst):
            if {"hnd", "split"} & {src, dst}:
                continue  # one run, which the oracle reads in another order: see below
            if not {src, dst} <= set(RUNS):
                with pytest.raises(kvbm.PlanError, match="operational_nhd"):
                    kvbm.convert(*pools, *ids)
                assert np.array_equal(buffers[1], before)
                continue
        made = kvbm.plan(*layouts, shape, num_blocks=(4, 5))
        assert made.nbytes == shape.nbytes == 2 * 2 * 3 * 4 * 64 // 2
        kvbm.convert(*pools, *ids)
        want = plane_oracle.expected(*arenas, source, before, *ids)
        assert np.array_equal(buffers[1], want), (src, dst, plane_oracle.explain(arenas[1], buffers[1], want))
        assert np.array_equal(buffers[0], source)


def test_four_bits_of_an_opaque_group_stay_as_they_are() -> None:
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=6, dtype="int4")
    pools = [kvbm.Pool.allocate(kvbm.load(name), shape, 2) for name in ("hnd", "operational", "hnd")]
    for pool, seed in zip(pools, range(3), strict=True):
        for index, array in enumerate(pool.arrays):
            array[...] = oracle.noise(array.nbytes, 100 * seed + index).reshape(array.shape)
    kvbm.convert(pools[0], pools[1])
    flat = np.concatenate([array.ravel() for array in pools[0].arrays])
    assert np.array_equal(flat, np.concatenate([array.ravel() for array in pools[1].arrays]))
    kvbm.convert(pools[1], pools[2])
    assert np.array_equal(flat, np.concatenate([array.ravel() for array in pools[2].arrays]))


@pytest.mark.parametrize("dtype", oracle.PAIRED)
def test_splits_in_bytes_count_two_elements_a_byte(dtype: str) -> None:
    """16 B are 32 elements: the x of paged attention."""
    shape = kvbm.BlockShape(nl=1, no=1, nh=2, nt=3, hd=64, dtype=dtype)
    resolved = spec.parse('order: "[l o] b h d/16B t d%16B"').resolve(shape, 2)
    assert resolved.first.shape == (2, 2, 2, 3, 16)
    assert resolved.address(1, h=1, t=2, d=33) == (0, 192 + 96 + 48 + 32 + 0)
    assert resolved.address(1, h=1, t=2, d=34) == (0, 192 + 96 + 48 + 32 + 1)
    other = kvbm.Pool.allocate(spec.parse('order: "[l o] b h d/32 t d%32"'), shape, 2)
    assert other.resolved.first.shape == (2, 2, 2, 3, 16)
    with pytest.raises(kvbm.LayoutError, match=r"<string>:1: 'd/16B': the split 16 B = 32 elements does not divide 48"):
        spec.parse('order: "[l o] b h d/16B t d%16B"').resolve(dataclasses.replace(shape, hd=48), 2)


@pytest.mark.parametrize(
    ("order", "sizes", "match"),
    [
        ("[b] l o h t d", {"hd": 5}, "'d': 2 elements share a byte: expected a multiple of 2, got 5"),
        ("[b] l o h d t", {"nt": 3}, "'t': 2 elements share a byte: expected a multiple of 2, got 3"),
        ("[b] l o h t d%4 d/4", {}, "'d/4': 2 elements share a byte, and those side by side here are 4 apart"),
        ("[b] l o h t d/3 d%3", {"hd": 6}, "'d%3': 2 elements share a byte: expected a multiple of 2, got 3"),
        ("[b l o h t d]", {}, "2 elements share a byte; expected an axis of 2 or more outside brackets"),
        (
            "[d] b l o h t",
            {"nt": 1, "nh": 1, "no": 1, "nl": 1},
            "'b': 2 elements share a byte, so blocks would share bytes",
        ),
        ("[h] t d b", {"nl": 1, "no": 1}, "'b': 2 elements share a byte, so blocks would share bytes"),
    ],
)
def test_four_bits_that_do_not_pack(order: str, sizes: dict[str, int], match: str) -> None:
    shape = dataclasses.replace(kvbm.BlockShape(nl=2, no=2, nh=2, nt=2, hd=8, dtype="int4"), **sizes)
    with pytest.raises(kvbm.LayoutError, match=rf"^<string>:1: {match}"):
        spec.parse(f'order: "{order}"').resolve(shape, 1)


@pytest.mark.parametrize(("nt", "hd"), [(4, 8), (2, 2), (2, 8), (4, 2)])
@pytest.mark.parametrize(
    ("one", "other"),
    [("[b] l o h t d", "[b] l o h d t"), ("[b] l o t h d", "[b] l o t d h"), ("[b] {h t d} l o", "[b] h t d o l")],
)
def test_two_axes_that_share_bytes(one: str, other: str, nt: int, hd: int) -> None:
    """A byte of two tokens must never become one of two elements of a head, at any size; refused in both directions."""
    shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=nt, hd=hd, dtype="float4_e2m1fn")
    for order in ((one, other), (other, one)):
        pools = [kvbm.Pool.allocate(spec.parse(f'order: "{text}"', name=text), shape, 2) for text in order]
        before = [np.full_like(array, 7) for array in pools[1].arrays]
        for array, full in zip(pools[1].arrays, before, strict=True):
            array[...] = full
        with pytest.raises(kvbm.PlanError, match=r"share a byte on one side only|does not promise the order inside"):
            kvbm.convert(*pools)
        assert all(np.array_equal(a, b) for a, b in zip(pools[1].arrays, before, strict=True))


def test_a_range_of_layers_that_share_bytes() -> None:
    shape = kvbm.BlockShape(nl=4, no=1, nh=2, nt=2, hd=2, dtype="int4")
    layout = spec.parse('order: "[b] o h t d l"', name="layers_last")
    with pytest.raises(kvbm.LayoutError, match="axis 'l': 2 elements along it share a byte"):
        kvbm.plan(layout, layout, shape, num_blocks=2, layers=range(1, 2))


# ---- by way of shared memory -----------------------------------------------------------------------------------------


def by_launches(
    made: kvbm.Plan, src: Any, dst: Any, source: np.ndarray, before: np.ndarray, ids: Any, alignments: tuple[int, int]
) -> tuple[np.ndarray, int]:
    """The result of a plan's launches on a GPU, and the number of launches through shared memory.

    Shared memory exists neither on the host nor in the fake driver.  It is required here that streams begin at whole words, items
    are not split, only written shared memory is read, and only written bytes are streamed out.
    """
    result, staged = before.copy(), 0
    for launch in made.launches(*alignments):
        if not launch.staged:
            result = execute(
                dataclasses.replace(made, parts=tuple(part for part, _ in launch.work)), src, dst, source, result, *ids
            )
            continue
        staged += 1
        gathers = launch.staged[0].gathers
        side, memory, bases = (0, source, src.bases) if gathers else (1, result, dst.bases)
        far, far_bases = (result, dst.bases) if gathers else (source, src.bases)
        loops = [(*one.part.outer, one.pieces) for one in launch.staged]
        assert len({tuple(mode.extent for mode in outer) for outer in loops}) == 1
        assert [one.part for one in launch.staged] == [part for part, _ in launch.work]
        for pair in zip(*ids, strict=True):
            for turn in np.ndindex(*(mode.extent for mode in loops[0])):
                shared = np.zeros(sum(one.held for one in launch.staged), np.uint8)
                there = np.zeros(shared.size, bool)
                starts = [[start(one, k, pair[k], turn) for k in (0, 1)] for one in launch.staged]
                streams = [
                    (bases[at[side][0]] + at[side][1], one.place, one.held)
                    for one, at in zip(launch.staged, starts, strict=True)
                    if one.held
                ]
                assert all(at % 16 == place % 16 == size % 16 == 0 for at, place, size in streams)
                for at, place, size in streams if gathers else ():
                    shared[place : place + size], there[place : place + size] = memory[at : at + size], True
                for one, at in zip(launch.staged, starts, strict=True):
                    inside, outside = items(one, side)
                    inside, outside = inside + one.place, outside + far_bases[at[1 - side][0]] + at[1 - side][1]
                    assert not (outside % one.item).any() and not (inside % one.word).any()
                    for k, place in enumerate(bytes_of_item(one)):
                        if gathers:
                            assert there[inside + place].all(), "what no stream has brought"
                            far[outside + k] = shared[inside + place]
                        else:
                            assert not there[inside + place].any()
                            shared[inside + place], there[inside + place] = far[outside + k], True
                for at, place, size in () if gathers else streams:
                    assert there[place : place + size].all(), "what no item has brought"
                    memory[at : at + size] = shared[place : place + size]
    return result, staged


def bytes_of_item(one: Any) -> list[int]:
    """Bytes of an item in shared memory: in words of 16, 4 or 1, with stride `apart`, as in the compiled kernel."""
    whole = one.word == one.item and (one.word == 16 if one.gathers else one.word >= 4)
    word = one.item if whole else 4 if one.word >= 4 and one.item >= 4 else 1
    return [k // word * (word if whole else one.distance) + k % word for k in range(one.item)]


def start(one: Any, side: int, block: int, turn: tuple[int, ...]) -> tuple[int, int]:
    """Table entry and byte offset of a piece's beginning."""
    part = one.part
    entry, offset = (part.dst_table_offset, part.dst_offset) if side else (part.src_table_offset, part.src_offset)
    step = part.dst_id if side else part.src_id
    entry, offset = entry + block * step[0], offset + block * step[1]
    for n, mode in zip(turn, (*part.outer, one.pieces), strict=True):
        entry += n * (mode.dst_table if side else mode.src_table)
        offset += n * (mode.dst if side else mode.src)
    return entry, offset


def items(one: Any, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of a part's items on the staged side and on the other."""
    run = one.part.inner[0]
    assert run.extent % one.item == 0 and (run.src, run.dst) == (1, 1)
    steps = np.ix_(np.arange(0, run.extent, one.item), *(np.arange(m.extent) for m in one.part.inner[1:]))
    both = []
    for k in (side, 1 - side):
        strides = [1, *(m.dst if k else m.src for m in one.part.inner[1:])]
        total: Any = sum((s * n for s, n in zip(steps, strides, strict=True)), start=np.int64(0))
        both.append(np.asarray(total).ravel())
    return both[0], both[1]


@pytest.mark.parametrize("first", few(range(2), 1))
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_shared_memory(src: str, dst: str, first: int) -> None:
    """Simulated launches, piece by piece of a page: bases of every alignment, any number of tokens."""
    for number, shape in enumerate(shapes(src), first):
        for aligns in (((0, 0), (4, 16)), ((16, 4), (2, 0)))[number % 2]:
            one, other = Side(src, shape, 3, align=aligns[0]), Side(dst, shape, 4, align=aligns[1], dst=True)
            made = kvbm.plan(one.layout, other.layout, one.shape, num_blocks=(3, 4))
            ids = [2, 0], [1, 3]
            alignments = one.pool.alignment, other.pool.alignment
            got, _ = by_launches(made, one.arena, other.arena, one.before, other.before, ids, alignments)
            want = plane_oracle.expected(one.arena, other.arena, one.before, other.before, *ids)
            assert np.array_equal(got, want), (shape, aligns, plane_oracle.explain(other.arena, got, want))
            if shape[3] > 16:
                break


@pytest.mark.parametrize(
    ("src", "dst", "launches"),
    [
        ("vllm/dsa_indexer", "record/dsa_indexer_tokens", "page_out_o1_i2"),  # rows of 132 bytes
        ("record/dsa_indexer_mxfp4_tokens", "vllm/dsa_indexer_mxfp4", "page_in_o1_i2"),
        ("record/nvfp4_mla_planes", "vllm/nvfp4_ds_mla", "page_in_o1_i3"),  # scales one by one
        ("vllm/nvfp4", "vllm/nvfp4_sm120", "page_out_o1_i3"),  # V's scales one by one
        ("vllm/per_token_head_fp8", "record/per_token_head_fp8_planes", "page_in_o1_i4"),
        ("vllm/fp8_ds_mla", "vllm/fp8_ds_mla", "copy_o1_w16"),
        ("record/mxfp8_universal", "record/mxfp8_universal", "copy_o0_w16"),
    ],
)
def test_what_goes_by_shared_memory(src: str, dst: str, launches: str) -> None:
    """Rows that are not whole words on one side; whole words are copied directly."""
    shape = shapes(src)[0]
    made = kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.BlockShape(*shape), num_blocks=(4, 5))
    assert " ".join(launch.name for launch in made.launches()) == launches


def test_a_page_of_which_no_piece_fits() -> None:
    """The slowest loop of packed blocks is over layers, and a layer of 64 tokens does not fit into shared memory."""
    shape = (4, 1, 1, 64, 576, "bfloat16")
    one, other = Side("record/mla_fp8_planes", shape, 3), Side("vllm/fp8_ds_mla", shape, 3, dst=True)
    made = kvbm.plan(one.layout, other.layout, one.shape, num_blocks=3)
    first, second = made.staged(gathers=True)
    block = first.parts[0].dst_id[1]
    slot = oracle.noise(64 + 2 * block, 5)
    filled, staged = by_launches(first, one.arena, at_slot(64), one.before, slot, ([2, 0], [0, 1]), (16, 16))
    got = execute(second, at_slot(64), other.arena, filled, other.before, [0, 1], [1, 2])
    assert not staged
    assert np.array_equal(got, plane_oracle.expected(one.arena, other.arena, one.before, other.before, [2, 0], [1, 2]))


def test_planes_that_step_differently() -> None:
    """Two planes are adjacent in the first piece of a page, and not in the second: no stream may join them."""
    planes = [
        plane_oracle.DrawnPlane("a", "int8", "d", 8192, (), (("t", "d"),), None, (("t", 16384),)),
        plane_oracle.DrawnPlane("b", "int8", "s", 128, (), (("t", "s"),), 8192, (("t", 32768),)),
    ]
    spread = plane_oracle.Drawn((), ("b", "l", "o", "h", "<a b>"), tuple(planes))
    together = plane_oracle.Drawn(
        (), ("b", "l", "o", "h", "t", "<b a>"),
        (dataclasses.replace(planes[1], orders=(("s",),), offset=None, pitch=()),
         dataclasses.replace(planes[0], orders=(("d",),), offset=132, pitch=())),
    )  # fmt: skip
    sizes = {"l": 1, "o": 1, "h": 1, "t": 2, "d": 8192}
    shape = kvbm.BlockShape(nl=1, no=1, nh=1, nt=2, hd=8192, dtype="int8")
    for one, other in ((spread, together), (together, spread), (spread, spread)):
        arenas = [x.held(sizes, 3).arena() for x in (one, other)]
        layouts = [spec.parse(x.yaml) for x in (one, other)]
        made = kvbm.plan(*layouts, shape, num_blocks=3)
        source, before = arenas[0].source(), arenas[1].dest()
        got, _ = by_launches(made, *arenas, source, before, ([2, 0], [0, 1]), (16, 16))
        want = plane_oracle.expected(*arenas, source, before, [2, 0], [0, 1])
        assert np.array_equal(got, want), plane_oracle.explain(arenas[1], got, want)


# ---- what is refused -------------------------------------------------------------------------------------------------

GOOD = """\
order: "[l] b t <data scale>"
axes: {s: hd//32}
planes:
  data: {order: h d, dtype: float8_e4m3fn}
  scale: {order: h s, dtype: float32}
"""


def test_the_good_one_is_good() -> None:
    spec.parse(GOOD).resolve(kvbm.BlockShape(nl=2, no=1, nh=2, nt=4, hd=64), 2)


def with_(*changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


#: (line, what replaces what, the sentence): refused when the file is read.
UNREADABLE = {
    "in the middle": (1, [("t <data scale>", "<data scale> t")], "expected '<data scale>' inside the brackets or at the end of the order"),
    "twice": (1, [('b t <data scale>"', 'b <data scale> t <data scale>"')], "expected a single term <…>, in one order for K and V"),
    "in two orders": (
        1,
        [('"[l] b t <data scale>"', '{k: "[l] b o t <data scale>", v: "[l] b o <data scale> t"}')],
        "expected a single term <…>, in one order for K and V; a plane may have its own orders k and v",
    ),
    "nowhere": (1, [(" <data scale>", "")], "expected a term such as <data scale> for the places of the planes, because the key 'planes' exists"),
    "of one": (1, [("<data scale>", "<data>")], "expected two planes or more between <>, got 1"),
    "of none": (1, [("<data scale>", "<>")], "expected two planes or more between <>, got 0"),
    "not closed": (1, [("<data scale>", "<data scale")], "order '[l] b t <data scale': '<' is not closed: expected '>'"),
    "one name twice": (1, [("<data scale>", "<data data>")], "expected different lower-case names of planes, such as data and scale, got 'data'"),
    "no name": (1, [("<data scale>", "<Data scale>")], "expected different lower-case names of planes, such as data and scale, got 'Data'"),
    "not declared": (5, [("  scale: {", "  scales: {")], "unknown key 'scales': expected one of data, scale"),
    "one missing": (4, [("  scale: {order: h s, dtype: float32}\n", "")], "planes: 'scale' missing: the order names it, so declare it here"),
    "declared twice": (6, [("float32}\n", "float32}\n  scale: {order: h s}\n")], "key 'scale' is there twice"),
    "no planes": (1, [("planes:\n  data: {order: h d, dtype: float8_e4m3fn}\n  scale: {order: h s, dtype: float32}\n", "")], "key 'planes' missing: the order has the planes data, scale: declare them under 'planes:'"),
    "a term inside": (4, [("order: h d", 'order: "h d <a c>"')], "expected no <…> in the order of a plane"),
    "brackets inside": (4, [("order: h d", 'order: "[h] d"')], "plane 'data': order '[h] d': expected no brackets in a plane: put them into the layout's order"),
    "dtype": (5, [("float32", "fp32")], "dtype of plane 'scale': expected a name such as bfloat16 or float32, got 'fp32'. Did you mean float32?"),
    "key": (5, [("dtype: float32", "type: float32")], "unknown key 'type': expected one of order, dtype, offset, pitch, shared"),
    "no mapping": (4, [("{order: h d, dtype: float8_e4m3fn}", "h d")], "plane 'data': expected a mapping, got 'h d'"),
    "offset beside tensors": (
        5,
        [("[l] b t <data scale>", "[l <data scale>] b t"), ("dtype: float32", "dtype: float32, offset: 64")],
        "plane 'scale': expected no offset, because each plane has its own arrays: remove the key",
    ),
    "offset that is none": (5, [("dtype: float32", "dtype: float32, offset: nt*x")], "offset of plane 'scale': expression 'nt*x'"),
    "pitch in elements": (2, [("\naxes", "\npitch: {t: 700}\naxes")], "pitch of 't': expected bytes such as '656 B', got 700 elements: planes may have elements of different sizes"),
    "pitch of planes": (2, [("\naxes", '\npitch: {"<data scale>": 700 B}\naxes')], "pitch: expected one of b, t (the terms outside brackets), got '<data scale>'"),
    "pitch of another's": (4, [("dtype: float8_e4m3fn", "pitch: {t: 64 B}")], "pitch: expected one of d, h (the terms outside brackets), got 't'"),
    "shared, but no axis": (5, [("dtype: float32", "shared: x")], "plane 'scale': shared: expected some of the axes l o h t, got 'x'"),
    "shared blocks": (5, [("dtype: float32", "shared: b")], "plane 'scale': shared: expected some of the axes l o h t, got 'b'"),
    "an axis of nobody": (5, [("order: h s", "order: h z")], "axis 'z': expected one of b l o h t d s; declare others under 'axes:'"),
    "an axis of all": (5, [("order: h s", "order: t h s")], "axis 't': expected once, or in different pieces of one split"),
    "blocks inside": (5, [("order: h s", "order: h b s")], "axis 'b'"),
    "K and V without o": (
        5,
        [("order: h s", 'order: {k: "h o s", v: "h s o"}')],
        "k and v differ: expected the axis 'o' alone and unsplit in the order that all planes share",
    ),
    "K without V": (5, [("order: h s", 'order: {k: "h s"}')], "order: 'v' missing: expected both k and v"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_files_that_are_refused(case: str) -> None:
    line, changes, sentence = UNREADABLE[case]
    with pytest.raises(kvbm.SpecError) as info:
        spec.parse(with_(*changes), file="mine/quant.yaml")
    assert str(info.value).startswith(f"mine/quant.yaml:{line}: ") and sentence in str(info.value), str(info.value)


LEGAL = {"nl": 2, "no": 1, "nh": 2, "nt": 4, "hd": 64}
#: (line, what replaces what, sizes, the sentence): refused when sizes are known.
UNFIT = {
    "overlap": (1, [("dtype: float32", "dtype: float32, offset: 100")], {}, "planes 'data' (bytes 0 to 128 of a record) and 'scale' (100 to 116) overlap"),
    "overlap by one byte": (1, [("dtype: float32", "dtype: float32, offset: 127")], {}, "overlap"),
    "overlap in a gap that is too small": (
        1,
        [("dtype: float8_e4m3fn", "dtype: float8_e4m3fn, pitch: {h: 70 B}"), ("order: h s, dtype: float32", "order: h s, dtype: float32, offset: 64, pitch: {h: 70 B}")],
        {},
        "overlap",
    ),
    "leave the page": (2, [("\naxes", '\npitch: {t: "143 B"}\naxes')], {}, "pitch of 't': neighbours overlap: expected at least 144 bytes, got 143"),
    "leave a page of blocks": (2, [("\naxes", '\npitch: {b: "nt*144 - 1 B"}\naxes')], {}, "pitch of 'b': neighbours overlap: expected at least 576 bytes, got 575"),
    "overlap themselves": (4, [("dtype: float8_e4m3fn", "dtype: float8_e4m3fn, pitch: {h: 63 B}")], {}, "plane 'data': pitch of 'h': neighbours overlap: expected at least 64 bytes, got 63"),
    "a group of scales": (2, [("s: hd//32", "s: hd//128")], {}, "axis 's': expression 'hd//128': 128 does not divide 64"),
    "a group of scales that does not divide": (2, [], {"hd": 48}, "axis 's': expression 'hd//32': 32 does not divide 48"),
    "rows not padded": (5, [("order: h s", "order: h t/128 s/4 t%32 t%128/32 s%4"), ("b t <", "b <"), ("order: h d", "order: t h d")], {"nt": 64, "hd": 128}, "plane 'scale': 't/128': the split 128 does not divide 64"),
    "groups not padded": (5, [("order: h s", "order: h t/128 s/4 t%32 t%128/32 s%4"), ("b t <", "b <"), ("order: h d", "order: t h d")], {"nt": 128, "hd": 64}, "plane 'scale': 's/4': the split 4 does not divide 2"),
    "an axis left out": (5, [("order: h s", "order: s")], {}, "plane 'scale': axis 'h' (KV head): expected once, as its size is 2, got none"),
    "heads left out": (4, [("order: h d", "order: d"), ("order: h s", "order: s")], {}, "plane 'data': axis 'h' (KV head): expected once, as its size is 2, got none"),
    "K and V left out": (4, [], {"no": 2}, "plane 'data': axis 'o' (K or V): expected once, as its size is 2, got none"),
    "shared, and there": (5, [("dtype: float32", "dtype: float32, shared: t")], {}, "plane 'scale': axis 't' is shared by all elements, so it cannot stand in the order"),
    "odd fours": (4, [("float8_e4m3fn", "int4"), ("hd//32", "hd//11")], {"hd": 33}, "plane 'data': 'd': 2 elements share a byte: expected a multiple of 2, got 33"),
    "fours apart": (4, [("float8_e4m3fn", "int4"), ("h d", "d h")], {"nh": 3}, "plane 'data': 'h': 2 elements share a byte: expected a multiple of 2, got 3"),
    "negative offset": (5, [("dtype: float32", "dtype: float32, offset: nt - 8")], {}, "expected at least 0, got -4"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_sizes_that_are_refused(case: str) -> None:
    line, changes, sizes, sentence = UNFIT[case]
    layout = spec.parse(with_(*changes), file="mine/quant.yaml")
    with pytest.raises(kvbm.LayoutError) as info:
        layout.resolve(kvbm.BlockShape(**{**LEGAL, **sizes}), 2)
    assert str(info.value).startswith(f"mine/quant.yaml:{line}: ") and sentence in str(info.value), str(info.value)
    assert "nl=2" in str(info.value), "at which sizes"


@pytest.mark.parametrize("offset", [0, 4, 64, 100, 124, 127])
def test_planes_may_lie_in_gaps(offset: int) -> None:
    """Adjacent planes in one pitch do not overlap: the smallest sufficient pitch is accepted, one byte less is not."""
    text = with_(
        ("dtype: float8_e4m3fn", f"dtype: float8_e4m3fn, offset: {offset}, pitch: {{h: 72 B}}"),
        ("dtype: float32", f"dtype: float32, offset: {offset + 64}, pitch: {{h: 72 B}}"),
    )
    assert spec.parse(text).resolve(kvbm.BlockShape(**LEGAL), 2).record == offset + 144
    with pytest.raises(kvbm.LayoutError, match="overlap"):
        spec.parse(text.replace("72 B", "71 B")).resolve(kvbm.BlockShape(**LEGAL), 2)


def test_pairs_that_are_refused() -> None:
    shape = kvbm.BlockShape(**LEGAL)
    one = spec.parse(GOOD, name="one")
    cases = {
        with_(("<data scale>", "<data scales>"), ("  scale:", "  scales:")): ("and the other side has 'data', 'scale"),
        with_(("<data scale>", "<data scale more>"), ("float32}\n", "float32}\n  more: {order: h s, dtype: int8}\n")): (
            "other has a plane 'more'"
        ),
        'order: "[l] b t h d"': "one has a plane 'data', and the other side has none; expected the same planes on both sides",
        with_(("float32", "int32")): (
            "plane 'scale': float32 in the source, int32 in the destination; a copy converts no dtype"
        ),
        with_(("hd//32", "hd//16")): "axis 's': 2 in the source, 4 in the destination",
        with_(("h s", "h"), ("axes: {s: hd//32}\n", "")): "axes {'s'} only in the source",
    }
    for text, sentence in cases.items():
        other = spec.parse(text, name="other")
        for layouts in ((one, other), (other, one)):
            title = f"{layouts[0].name} → {layouts[1].name}"
            with pytest.raises(kvbm.PlanError) as info:
                kvbm.plan(*layouts, shape, num_blocks=2)
            assert str(info.value).startswith(title), str(info.value)
            if layouts[0] is one or not ("the source" in sentence or "one has" in sentence):
                assert sentence in str(info.value), str(info.value)
    with pytest.raises(kvbm.PlanError, match="expected the same planes on both sides"):
        kvbm.convert(*(kvbm.Pool.allocate(x, shape, 2) for x in (one, spec.parse('order: "[l] b t h d"', name="flat"))))


# ---- arrays of a pool ------------------------------------------------------------------------------------------------


def record_pool(*arrays: Any, name: str = "vllm/deepseek_v4") -> kvbm.Pool:
    return kvbm.Pool(kvbm.load(name), kvbm.BlockShape(nl=1, no=1, nh=1, nt=4, hd=512), list(arrays))


PAGE = 5 * 576  # of four tokens: 4 * 584 rounded up


@pytest.mark.parametrize("dtype", ["uint8", "int8", "V1", "bool"])
@pytest.mark.slow  # 0.9 s
@pytest.mark.sanitize
def test_arrays_of_records_that_are_taken(dtype: str) -> None:
    """Dense with the padding, dense without it at the page's stride, and other shapes of the same bytes."""
    dense = np.zeros(3 * PAGE, dtype)
    short = dense.reshape(3, PAGE)[:, : 4 * 584]
    for array in (
        dense.reshape(3, PAGE),
        short,
        np.lib.stride_tricks.as_strided(dense, (3, 4, 584), (PAGE, 584, 1)),
        np.lib.stride_tricks.as_strided(dense, (3, 1, 4, 2, 292), (PAGE, 1, 584, 292, 1)),
        dense.reshape(3, 5, 576),
    ):
        pool = record_pool(array)
        assert pool.num_blocks == 3 and pool.nbytes == 3 * PAGE


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((3, PAGE - 1), np.uint8),
        lambda: np.zeros((3, PAGE + 1), np.uint8),
        lambda: np.zeros((3, 4, 584), np.uint8),  # pages without the padding
        lambda: np.zeros((3, 4, 576), np.uint8),
        lambda: np.zeros(3 * PAGE, np.uint8),  # which blocks?
        lambda: np.zeros((4, PAGE), np.uint8)[::2],
        lambda: np.zeros((3, 2 * PAGE), np.uint8)[:, :PAGE],
        lambda: np.zeros((3, PAGE), np.uint8)[::-1],
        lambda: np.zeros((PAGE, 3), np.uint8).T,
        lambda: np.lib.stride_tricks.as_strided(np.zeros(3 * PAGE, np.uint8), (3, 4, 584), (PAGE, 576, 1)),
        lambda: np.zeros((3, 2 * PAGE), np.uint8)[:, ::2],
    ],
)
def test_arrays_of_records_that_are_refused(make: Any) -> None:
    with pytest.raises(
        kvbm.BindError,
        match=r"vllm/deepseek_v4.*array 0: expected (bytes of shape|2 axes|at least)|expected strides above 0|array 0 .*expected bytes of shape",
    ):
        record_pool(make())


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float16", "int64"])
def test_dtypes_of_records_that_are_refused(dtype: str) -> None:
    with pytest.raises(
        kvbm.DTypeError, match=rf"array 0 .*: its planes share it, so expected bytes .*got {dtype}; pass .view"
    ):
        record_pool(np.zeros((3, PAGE // np.dtype(dtype).itemsize), dtype))


def test_arrays_of_planes_of_their_own() -> None:
    """Each plane's arrays have its dtype and shape; only dtypes of the same width may replace it."""
    shape, layout = kvbm.BlockShape(nl=2, no=1, nh=1, nt=4, hd=576), kvbm.load("record/mla_fp8_tensors")

    def arrays(**other: Any) -> list[np.ndarray]:
        kinds: dict[str, Any] = {"latent": (512, "uint8"), "scale": (4, "float32"), "rope": (64, "uint16"), **other}
        return [np.zeros((3, 4, n), dtype) for n, dtype in kinds.values() for _ in range(2)]

    assert kvbm.Pool(layout, shape, arrays()).num_blocks == 3
    assert kvbm.Pool(layout, shape, arrays(latent=(512, "int8"))).num_blocks == 3
    for other, match in (
        ({"scale": (4, "int32")}, r"array 2 \(scale l=0\): expected float32, .* got int32"),
        (
            {"latent": (512, "float16")},
            r"array 0 .*: expected float8_e4m3fn, .* got float16; .* uint8 or int8 may hold the bits",
        ),
        (
            {"rope": (64, "float32")},
            r"array 4 .*: expected bfloat16, .* got float32; .* uint16 or int16 may hold the bits",
        ),
        ({"scale": (8, "float32")}, r"array 2 \(scale l=0\): axis 's': expected 4, got 8"),
        ({"rope": (32, "uint16")}, r"array 4 \(rope l=0\): axis 'r': expected 64, got 32"),
    ):
        with pytest.raises((kvbm.BindError, kvbm.DTypeError), match=match):
            kvbm.Pool(layout, shape, arrays(**other))
    mixed = arrays()
    mixed[3] = np.zeros((2, 4, 4), np.float32)
    with pytest.raises(kvbm.BindError, match=r"array 3 \(scale l=1\): axis 'b': expected 3, got 2"):
        kvbm.Pool(layout, shape, mixed)
    for count in (5, 7):
        with pytest.raises(kvbm.BindError, match=f"expected 6 arrays, one per allocation in table order, got {count}"):
            kvbm.Pool(layout, shape, (arrays() + arrays())[:count])
    shared = arrays()
    shared[1] = shared[0]
    with pytest.raises(kvbm.BindError, match="arrays 0 and 1 share memory"):
        kvbm.Pool(layout, shape, shared)


@st.composite
def nests(draw: Any) -> tuple[Any, Any]:
    """Two nests of steps, slowest first, without overlaps inside each; the outer steps are often equal."""

    def grown(inner: list[tuple[int, int]], held: int) -> list[tuple[int, int]]:
        found = list(inner)
        for _ in range(draw(st.integers(0, 2))):
            stride = held + draw(st.sampled_from((0, 0, 1, 5, 16)))
            extent = draw(st.integers(2, 4))
            found.insert(0, (extent, stride))
            held = stride * (extent - 1) + held
        return found

    sizes = [draw(st.sampled_from((1, 2, 4))) for _ in range(2)]
    sides = [grown([], size) for size in sizes]
    if draw(st.booleans()):
        stride = max(overlap.reach(side, size) for side, size in zip(sides, sizes, strict=True)) + draw(
            st.integers(0, 30)
        )
        sides = [[(extent, stride), *side] for side in sides for extent in [draw(st.just(3))]]
    starts = [draw(st.integers(0, 90)) for _ in range(2)]
    return (sides[0], starts[0], sizes[0]), (sides[1], starts[1], sizes[1])


@given(nests())
@strategies.cases(3000)
@pytest.mark.slow
def test_whether_nests_meet(given_: Any) -> None:
    """Compared with the sets of bytes."""

    def bytes_of(steps: list[tuple[int, int]], start_: int, size: int) -> set[int]:
        found = set(range(start_, start_ + size))
        for extent, stride in steps:
            found = {at + turn * stride for at in found for turn in range(extent)}
        return found

    a, b = given_
    meet = bool(bytes_of(*a) & bytes_of(*b))
    assert overlap.meet(*a, *b) is meet
    assert overlap.meet(*b, *a) is meet
