"""Digests by a GPU's kernels: the tests of test_digest.py, on memory that kernels can access."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from test_digest import ALIGNS, HEADS, LATENTS, WAYS, expected, sizes_of
from test_planes import Side as PlanarSide
from test_planes import shapes
from test_sections import Meant, moved
from test_sections import Planar as PlanarOnHost

import digest_rows
import kvbm
import matrix
import oracle
import plane_oracle
from kvbm import BindError, BlockShape, DigestError, LayoutError, Pool
from kvbm.layout import spec
from memory import interface_views, numpy_views, placed

pytestmark = pytest.mark.gpu

SHAPE = BlockShape(nl=3, no=2, nh=4, nt=16, hd=32, dtype="float16")
PAIRS = [
    ("nhd", "universal"),
    ("universal", "vllm/LBHNC"),
    ("vllm/flash_attn_nhd", "hf/dynamic_cache"),
    ("vllm/paged_attn_v0", "nhd"),
    ("nhd", "vllm/paged_attn_v0"),
    ("operational", "operational_hnd"),
    ("b d l o h t", "nhd"),
]
SIDES = {"d2d": ("cuda", "cuda"), "d2h": ("cuda", "pinned"), "h2d": ("pinned", "cuda")}
STRATEGIES = ("direct", "staged", "engine")


class Plain:
    """A pool on guarded GPU memory or pinned memory; the oracle reads its contents at the time of the call."""

    def __init__(
        self,
        order: str,
        shape: BlockShape,
        blocks: int,
        where: str,
        *,
        dst: bool = False,
        how: str = "steps",
        align: int = 0,
    ):
        import torch

        layout = kvbm.load(order) if order in matrix.orders() else spec.parse(f'order: "{order}"')
        self.arena = placed(matrix.orders().get(order, oracle.Order(order)), shape, blocks).layout_bytes(align, how)
        self.before = oracle.noise(self.arena.nbytes, 1 + dst)
        self.memory = torch.from_numpy(self.before).clone()
        if where == "pinned":
            self.memory = self.memory.pin_memory()
            arrays: list[Any] = numpy_views(self.arena, self.memory.numpy(), shape.dtype)
        else:
            self.memory = self.memory.to("cuda:0")
            arrays = interface_views(self.arena, self.memory, shape.dtype)
        self.pool = Pool(layout, shape, arrays)
        self.opaque = self.arena.placed.order.opaque

    @property
    def buffer(self) -> np.ndarray:
        import torch

        torch.cuda.synchronize()
        return self.memory.cpu().numpy()

    def positions(self, meant: Meant) -> dict[str, tuple[np.ndarray, int]]:
        from test_sections import Plain as OnHost

        return OnHost.positions(self, meant)  # type: ignore[arg-type]


class Planar(PlanarOnHost):
    """The same with several planes."""

    def __init__(self, name: str, shape: Any, blocks: int, where: str, **rest: Any):
        PlanarSide.__init__(self, name, shape, blocks, where=where, **rest)


def stream() -> Any:
    import torch

    return torch.cuda.current_stream()


def out_of(n: int, kind: str) -> Any:
    """Memory for digests: on the device, in both types, or pinned."""
    import torch

    if kind == "pinned":
        return torch.full((n,), 7, dtype=torch.int64).pin_memory()
    return torch.full((n,), 7, dtype=torch.int64, device="cuda:0").view(getattr(torch, kind))


def read(out: Any) -> list[int]:
    import torch

    torch.cuda.synchronize()
    return [int(one) for one in out.view(torch.int64).cpu().numpy().view(np.uint64)]


# ---- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HEADS, *LATENTS])
def test_every_layout(name: str) -> None:
    """The digests of the oracle, with every width of elements, and bases at odd addresses."""
    for number, shape in enumerate(sizes_of(name)):
        if shape.nbytes > 200000:
            continue
        try:
            side = Plain(name, shape, 3, "cuda", align=ALIGNS[number % 7], how=WAYS[number % 3])
            side.arena.placed.check()
        except (oracle.IllegalError, LayoutError):
            continue
        want = expected(side, [2, 0, 1])
        assert side.pool.digest([2, 0, -1, 1], stream=stream()).tolist() == [*want[:2], 0, want[2]], shape


@pytest.mark.parametrize("name", sorted(plane_oracle.TABLE))
def test_every_layout_of_planes(name: str) -> None:
    for number, shape in enumerate(shapes(name)):
        side = Planar(name, shape, 3, "cuda", align=ALIGNS[number % 7], how=WAYS[number % 3])
        assert side.pool.digest([2, 0, -1], stream=stream()).tolist() == [*expected(side, [2, 0]), 0], shape


@pytest.mark.parametrize("n", [1, 5, 64, 1500])
def test_batches(n: int) -> None:
    """The largest number of pairs, with few and many chunks each; ids and positions on the device, in both widths."""
    import torch

    rng = np.random.default_rng(n)
    for name in ("nhd", "universal", "b d l o h t"):
        side = Plain(name, SHAPE, 9, "cuda")
        ids, tokens = rng.integers(-1, 9, n), rng.integers(0, 1 << 30, n)
        of_each = {
            (int(i), int(t)): expected(side, [int(i)], tokens=[int(t)])[0]
            for i, t in zip(ids[:40], tokens[:40], strict=True)
        }
        want = [of_each.get((int(i), int(t))) for i, t in zip(ids, tokens, strict=True)]
        for wide in (torch.int32, torch.int64):
            for kind in ("int64", "uint64", "pinned"):
                out = out_of(n, kind)
                given = [torch.from_numpy(x).to("cuda:0", wide) for x in (ids, tokens)]
                side.pool.digest(given[0], tokens=given[1], out=out, stream=stream()).synchronize()
                assert all(w is None or g == w for g, w in zip(read(out), want, strict=True))
        assert side.pool.digest(ids.tolist(), tokens=tokens, stream=stream()).tolist() == read(out)


def test_it_is_a_sum() -> None:
    side = Plain("vllm/LBHNC", SHAPE, 6, "cuda")
    want = side.pool.digest(stream=stream())
    for axis, parts in {
        "l": (0, [2, 1]),
        "o": (1, 0),
        "h": ([3, 0], range(1, 3)),
        "t": (range(5), range(5, 16)),
    }.items():
        found = [side.pool.section(**{axis: part}).digest(stream=stream()) for part in parts]
        assert np.array_equal(found[0] + found[1], want), axis
    for unit in (1, 4, 8, 16):
        assert np.array_equal(side.pool.units(unit).digest(stream=stream()).reshape(6, -1).sum(1), want), unit


def test_what_is_refused() -> None:
    import torch

    side = Plain("nhd", SHAPE, 3, "cuda")
    for out, match in (
        (np.zeros(3, np.uint64), "expected memory on cuda:0"),
        (torch.zeros(3, dtype=torch.int32, device="cuda:0"), "uint64 or int64"),
        (torch.zeros(6, dtype=torch.int64, device="cuda:0")[::2], "contiguous"),
        (torch.zeros(2, dtype=torch.int64, device="cuda:0"), "array of 3"),
    ):
        with pytest.raises(BindError, match=match):
            side.pool.digest([0, 1, 2], out=out, stream=stream())


# ---- transfers -------------------------------------------------------------------------------------------------------


def transferred(s: Any, d: Any, strategy: str, n: int, rng: random.Random, verify: bool, kind: str) -> None:
    slot = 3 * max(end.pool.resolved.section.packed().accesses[0].block[0] for end in (s, d))
    with kvbm.Transfer(
        s.pool, d.pool, strategy, chunk_bytes=slot if strategy == "staged" else None, verify=verify
    ) as move:
        src_ids, dst_ids = (rng.sample(range(end.pool.num_blocks), n) for end in (s, d))
        if n > 2:
            src_ids[1] = -1
        tokens = [rng.randrange(1 << 30) for _ in range(n)]
        out = out_of(n, kind)
        move.copy(src_ids, dst_ids, stream=stream(), digests=out, tokens=tokens).synchronize()
        want = expected(s, src_ids, tokens=tokens)
        assert read(out) == want, (s.pool, d.pool, strategy)
        assert np.array_equal(d.buffer, moved(s, d, Meant(), Meant(), src_ids, dst_ids))


@pytest.mark.parametrize("direction", SIDES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(direction: str, strategy: str) -> None:
    rng = random.Random(1)
    for number, (src, dst) in enumerate(PAIRS):
        s = Plain(src, SHAPE, 9, SIDES[direction][0], how=WAYS[number % 3], align=(0, 4, 16)[number % 3])
        d = Plain(dst, SHAPE, 11, SIDES[direction][1], dst=True)
        for n in (1, 4 if strategy == "engine" else 9):
            d.memory.copy_(d.memory.new_tensor(d.before))
            transferred(s, d, strategy, n, rng, bool(number % 2), ("int64", "uint64", "pinned")[number % 3])


@pytest.mark.parametrize("direction", SIDES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planes(direction: str, strategy: str) -> None:
    rng = random.Random(2)
    for number, (src, dst) in enumerate(plane_oracle.pairs()[::3]):
        s = Planar(src, shapes(src)[0], 5, SIDES[direction][0], align=16 * (number % 2))
        d = Planar(dst, shapes(dst)[0], 6, SIDES[direction][1], dst=True)
        transferred(s, d, strategy, 4, rng, bool(number % 2), "int64")


@pytest.mark.parametrize(("direction", "strategy"), [("d2d", "direct"), ("d2h", "staged"), ("h2d", "staged"), ("h2d", "direct")])
def test_rows_of_odd_and_few_bytes_in_every_layout(direction: str, strategy: str) -> None:
    """Onto itself and onto another layout: digests of copies, fused and not, verified, and of pools on their own."""
    rng, done = random.Random(direction + strategy), 0

    def copied(move: Any, src_ids: Any, dst_ids: Any, tokens: Any) -> list[int]:
        out = out_of(len(src_ids), rng.choice(("int64", "uint64", "pinned")))
        move.copy(src_ids, dst_ids, stream=stream(), digests=out, tokens=tokens).synchronize()
        return read(out)

    def digested(pool: Any, ids: Any, tokens: Any) -> list[int]:
        where = {} if pool.device == "cpu" else {"stream": stream()}
        return [int(one) for one in pool.digest(ids, tokens=tokens, **where)]

    for one in digest_rows.cases(5 if direction == "d2d" else 2, seed=3):
        for s, d in digest_rows.sides(Plain, Planar, one, SIDES[direction], rng):
            digest_rows.check(s, d, rng, copied, digested, strategy=strategy)
            done += 1
    assert done > 150


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_graphs(src: str, dst: str) -> None:
    """A captured copy with digests and verification: each replay uses the current contents and ids."""
    import torch

    s, d = Plain(src, SHAPE, 9, "cuda"), Plain(dst, SHAPE, 11, "cuda", dst=True)
    src_ids, dst_ids, tokens = (torch.zeros(7, dtype=torch.int64, device="cuda:0") for _ in range(3))
    out = out_of(7, "int64")
    side = torch.cuda.Stream()
    with kvbm.Transfer(s.pool, d.pool, "direct", verify=True) as move:
        move.copy([0], [0], stream=side, digests=out[:1]).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            done = move.copy(src_ids, dst_ids, stream=side, digests=out, tokens=tokens)
        for turn in range(3):
            rng = np.random.default_rng(turn)
            s.memory.copy_(torch.from_numpy(oracle.noise(s.arena.nbytes, 50 + turn)))
            given = [rng.permutation(9)[:7], rng.permutation(11)[:7], rng.integers(0, 1 << 30, 7)]
            for tensor, values in zip((src_ids, dst_ids, tokens), given, strict=True):
                tensor.copy_(torch.from_numpy(values))
            graph.replay()
            torch.cuda.synchronize()
            done.synchronize()
            assert read(out) == expected(s, given[0].tolist(), tokens=given[2].tolist()), turn
            if not s.opaque:
                assert read(out) == expected(d, given[1].tolist(), tokens=given[2].tolist()), turn
        del graph


def test_what_differs_is_told() -> None:
    """Right copies report nothing; a digest that differs from the source's is reported with its pair."""
    import torch

    s, d = Plain("nhd", SHAPE, 9, "cuda"), Plain("universal", SHAPE, 9, "cuda", dst=True)
    with kvbm.Transfer(s.pool, d.pool, "direct", verify=True) as move:
        for _ in range(20):
            move.copy(range(9), range(9), stream=stream()).synchronize()
        done = move.copy(range(9), range(9), stream=stream())
        torch.cuda.synchronize()
        done.proof._memory[9 + 4] ^= np.uint64(1)
        with pytest.raises(DigestError, match="1 of 9 pairs differ, the first is pair 4"):
            done.synchronize()


@pytest.mark.parametrize("name", ["nhd", "vllm/paged_attn_v0", "b d l o h t"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_digest_sanitize(name: str, on_gpu: bool) -> None:
    """Small, for compute-sanitizer: cells of every word, sums of few and many warps, fused and separate."""
    import torch

    for hd, dtype in ((32, "float16"), (16, "float16"), (64, "float32")):
        shape = BlockShape(nl=2, no=2, nh=2, nt=8, hd=hd, dtype=dtype)
        for align in (0, 4):
            s, d = Plain(name, shape, 5, "cuda", align=align), Plain("universal", shape, 5, "cuda", dst=True)
            out = out_of(3, "int64")
            ids: list[Any] = [[4, -1, 2], [0, 1, 3]]
            given = [torch.tensor(one, device="cuda:0") for one in ids] if on_gpu else ids
            with kvbm.Transfer(s.pool, d.pool, "direct", verify=True) as move:
                move.copy(*given, stream=stream(), digests=out, tokens=5).synchronize()
            assert read(out) == expected(s, ids[0], tokens=[5] * 3)
            assert np.array_equal(d.buffer, moved(s, d, Meant(), Meant(), *ids))
