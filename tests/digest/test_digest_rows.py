"""Digests of copies whose rows have odd, prime or few bytes: `digests=`, `Pool.digest`, `verify=True` and trailers are equal.

Expected values come from the definition (`digest_oracle`) with addresses of other oracles.  None of them shares code with kvbm.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from test_chunks import FAMILIES, TP, WAYS, carried
from test_digest import HEADS, LATENTS, expected
from test_sections import Meant, Plain, Planar

import digest_rows
import kvbm
import matrix
import oracle
import plane_oracle
import strategies
from chunking import case, engine, is_sendable
from few import few
from kvbm import BlockShape, DTypeError, LayoutError, Model, PlanError, Pool
from kvbm.digest import cells
from kvbm.layout import spec
from kvbm.planner.loopnest import Mode
from memory import numpy_views
from processes import FakeDriver


def copied(move: Any, src_ids: Any, dst_ids: Any, tokens: Any = None, **rest: Any) -> list[int]:
    out = np.full(len(src_ids), 7, np.uint64)
    move.copy(src_ids, dst_ids, digests=out, tokens=tokens, **rest).synchronize()
    return [int(one) for one in out]


def digested(pool: Any, ids: Any, tokens: Any = None) -> list[int]:
    return [int(one) for one in pool.digest(ids, tokens=tokens)]


def scan(each: int, first: int = 0, step: int = 1) -> None:
    rng, done, fused = random.Random(each), 0, 0
    for one in itertools.islice(digest_rows.cases(each), first, None, step):
        for s, d in digest_rows.sides(Plain, Planar, one, ("cpu", "cpu"), rng):
            fused += digest_rows.check(s, d, rng, copied, digested)
            done += 1
    names = len(HEADS) + len(LATENTS) + len(plane_oracle.TABLE)
    assert done > names * min(each or 60, 60) // step and done > fused > done / 4, (done, fused)


@pytest.mark.slow  # 1.2 s
@pytest.mark.sanitize
def test_some_shapes_of_every_layout() -> None:
    """Onto itself, and onto another layout.  Red: cells of one byte side by side were copied and digested as wider ones."""
    scan(2)


@pytest.mark.full
@pytest.mark.slow  # 5 s: twice the shapes of the test above
def test_many_shapes_of_every_layout() -> None:
    scan(4)


SHAPE = BlockShape(nl=2, no=2, nh=4, nt=16, hd=64, dtype="float16")


def planned(name: str, shape: BlockShape, model: Model | None = None) -> list[Any] | str:
    """The fused launches of a copy onto the same layout, or why there are none."""
    whole = kvbm.load(name).resolve(shape, 3).section
    return cells.fused(whole, whole, cells.keys_of(whole, model), (16, 16), name)


def test_copies_of_whole_cells_are_fused() -> None:
    """All, except for layouts that part cells on both sides; cells of one byte side by side are copied in wide words."""
    alone = {name for name in HEADS if isinstance(planned(name, SHAPE), str)}
    assert alone == {"vllm/aiter_shuffle", "vllm/cpu", "vllm/cpu_amx", "vllm/cpu_vec", "vllm/paged_attn_v0"}
    for name in ("nhd", "hnd", "universal", "operational", "vllm/flash_attn_nhd"):
        reason = planned(name, replace(SHAPE, hd=577, dtype="uint8"))
        assert isinstance(reason, str) and reason.startswith("cells of one byte lie side by side")


def test_there_are_as_many_words_as_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the condition on each part was wrong, the number of words would show it."""
    monkeypatch.setattr(cells, "_require_cells", lambda *_: None)
    assert not isinstance(planned("nhd", SHAPE), str)
    for name in ("vllm/cpu", "vllm/paged_attn_v0"):
        reason = planned(name, SHAPE)
        assert isinstance(reason, str) and reason.endswith(f"words are copied, and there are {SHAPE.nbytes // 16} cells")


def test_keys_beyond_32_bits_are_not_fused() -> None:
    """Also those of the two sides of a tile, and of the run."""
    for name in ("nhd", "hnd", "universal"):
        assert "beyond 32 bits" in str(planned(name, SHAPE, Model(layers=range(2), nl=1 << 23)))
        assert not isinstance(planned(name, SHAPE, Model(layers=range(2), nl=1 << 22)), str)


@pytest.mark.full
@pytest.mark.parametrize("number", range(8))
def test_every_shape_of_every_layout(number: int) -> None:
    scan(0, number, 8)


# ---- on a driver that is not one -----------------------------------------------------------------------------------------


#: Direction, strategy.
WAYS_OF_GPUS = (("d2d", "direct"), ("d2h", "staged"), ("h2d", "staged"))


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "strategy"), WAYS_OF_GPUS)
def test_the_fake_driver(fake_gpu: FakeDriver, direction: str, strategy: str) -> None:
    """The plans and arguments for a GPU: staged copies, and cells that are read in words of their neighbours."""
    fake_gpu("digests.rows", direction, strategy, 1)


# ---- any pairs, and parts ------------------------------------------------------------------------------------------------


@given(strategies.pair(limit=900, opaque=False))
@strategies.cases(80)
def test_layouts_at_random(drawn: Any) -> None:
    sizes, *both = drawn
    shape = BlockShape(**{f"n{a}" if a != "d" else "hd": n for a, n in sizes.sizes.items()}, dtype=sizes.dtype)
    ends = []
    for number, declared in enumerate(both):
        try:
            arena = sizes.placed(declared.order, 2).layout_bytes(0)
            buffer = oracle.noise(arena.nbytes, 3 + number)
            ends.append(
                (arena, buffer, Pool(spec.parse(declared.yaml), shape, numpy_views(arena, buffer, sizes.dtype)))
            )
        except (oracle.IllegalError, LayoutError):
            reject()
    s: Any = type("Side", (), dict(zip(("arena", "buffer", "pool"), ends[0], strict=True)))
    try:
        with kvbm.Transfer(s.pool, ends[1][2], verify=True) as move:
            assert copied(move, [1, 0], [0, 1], [3, 8]) == expected(s, [1, 0], tokens=[3, 8])
    except PlanError as error:
        assert any(
            words in str(error) for words in ("lie in several arrays", "fused", "common refinement", "share a byte")
        )


@pytest.mark.slow
def test_elements_that_share_a_byte() -> None:
    """Two elements of four bits are digested as one of eight, in every layout that takes them."""
    rng, done = np.random.default_rng(1), 0
    for name, nbytes in itertools.product((*HEADS, *LATENTS), (1, 3, 16, 17)):
        no, nh = (1, 1) if matrix.latent(name) else (2, 2)
        nl = 1 if matrix.scales(name) else 2
        for dtype in ("int4", "float4_e2m1fn"):
            shapes = [BlockShape(nl, no, nh, 4, hd, kind) for hd, kind in ((2 * nbytes, dtype), (nbytes, "uint8"))]
            try:
                half, whole, other = (Pool.allocate(kvbm.load(name), shapes[i], 3) for i in (0, 1, 0))
                for a, b in zip(half.arrays, whole.arrays, strict=True):
                    b[...] = rng.integers(0, 256, b.shape, np.uint8)
                    np.asarray(a).reshape(-1).view(np.uint8)[:] = b.reshape(-1)
                want = digested(half, [2, 0])
            except (LayoutError, DTypeError, PlanError):
                continue
            if "/" not in kvbm.load(name).order_text:  # splits count elements
                assert want == digested(whole, [2, 0]), (name, shapes)
            with kvbm.Transfer(half, other, verify=True) as move:
                assert copied(move, [2, 0], [0, 1]) == want == digested(other, [0, 1]), (name, shapes)
            done += 1
    assert done > 50


def test_a_layout_with_a_pitch() -> None:
    for hd, dtype in itertools.product((1, 3, 16, 33, 65), ("uint8", "bfloat16", "float32")):
        shape = BlockShape(nl=2, no=2, nh=3, nt=8, hd=hd, dtype=dtype)
        s = Plain("nhd", shape, 3)
        try:
            pools = [Pool.allocate(kvbm.load("vllm/tpu"), shape, 3) for _ in range(2)]
        except LayoutError:
            continue
        want = expected(s, [0, 1, 2])
        for src, dst in ((s.pool, pools[0]), pools):
            with kvbm.Transfer(src, dst, verify=True) as move:
                assert copied(move, [0, 1, 2], [0, 1, 2]) == want == digested(dst, [0, 1, 2]), shape


@pytest.mark.slow
def test_layers_units_and_coordinates() -> None:
    """Layers one by one, units of tokens, chosen heads, layers, K or V, and planes."""
    done = 0
    for one in digest_rows.cases(2, seed=1):
        rng = random.Random(str(one))
        for s, d in digest_rows.sides(Plain, Planar, one, ("cpu", "cpu"), rng):
            if s.opaque or d.opaque:
                continue
            nl, no, nh, nt, *_ = one[2]
            with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
                for layer in range(nl) if "l" in s.pool.layout.present and nl > 1 else ():
                    got = copied(move, [2, 0], [1, 3], layers=range(layer, layer + 1))
                    assert got == expected(s, [2, 0], Meant(0, {"l": layer})), (one, layer)
            units = [unit for unit in range(1, nt) if nt % unit == 0]
            chosen = {a: rng.randrange(n) for a, n in (("l", nl), ("o", no), ("h", nh)) if n > 1 and rng.random() < 0.5}
            if nl > 2 and "l" in chosen:
                chosen["l"] = rng.choice(([2, 0], range(0, 3, 2), range(1, 3)))
            if s.pool.layout.planes and rng.random() < 0.5:
                chosen["planes"] = [rng.choice(s.pool.layout.planes).name]
            meant = Meant(rng.choice(units) if units else 0, chosen)
            try:
                here, there = meant.of(s.pool), meant.of(d.pool)
                move = kvbm.Transfer(here, there, verify=True)
                src_ids, dst_ids = rng.sample(range(here.num_ids), 2), rng.sample(range(there.num_ids), 3)
                got = copied(move, [src_ids[0], -1, src_ids[1]], dst_ids, [7, 0, 1 << 40])[::2]
            except PlanError:
                continue
            done += 1
            want, at = expected(s, src_ids, meant, [7, 1 << 40]), [7, 1 << 40]
            assert got == want == digested(here, src_ids, at) == digested(there, dst_ids[::2], at), (one, meant)
    assert done > 150


@pytest.mark.slow
@pytest.mark.parametrize("number", few(range(2), 1))
def test_trailers(number: int) -> None:
    """Of chunks between ranks, as in docs/reference/wire.md: units, single tokens, some heads and layers of a model."""
    names = sorted(
        {"nhd", "universal", *(name for name in HEADS[3 + number :: 15] if not matrix.orders()[name].opaque)}
    )
    shapes = (
        (3, 2, 4, 33, "uint8"),
        (3, 2, 2, 1, "uint8"),
        (3, 1, 2, 17, "float16"),
        (3, 2, 2, 577, "uint8"),
        (3, 2, 4, 5, "float32"),
    )
    done = 0
    for at, (src, dst) in enumerate(itertools.product(names, names)):
        ours, theirs = WAYS[(at + number) % len(WAYS)]
        shape = shapes[(at // 3 + number) % len(shapes)]
        tokens = (range(64), range(5, 83), range(17, 31), range(3, 4))[at % 4]
        try:
            sides = [engine(mesh, nt, name, **more) for name, (mesh, nt, more) in ((src, ours), (dst, theirs))]
            one = case(*sides, (*shape[:2], 4, *shape[3:]), tokens, (None, range(1, 2))[at % 2])
            if not is_sendable(one):
                continue
            carried(one, f"{src}{dst}")
        except (LayoutError, oracle.IllegalError):
            continue
        done += 1
    assert done > 5


@pytest.mark.slow
def test_trailers_of_planes() -> None:
    for family in FAMILIES:
        names = [name for name, formula in plane_oracle.TABLE.items() if formula.family == family]
        shapes = [
            one
            for one in digest_rows.of_planes(family)
            if (one[3] in (4, 8, 16) and one[4] < 200) or family[:3] != "pth"
        ]
        for number, (src, dst) in enumerate(itertools.product(names, names)):
            _, no, nh, _, hd, dtype = shapes[number * 7 % len(shapes)]
            if not all(digest_rows.is_legal(name, (1, no, nh, 4, hd, dtype)) for name in (src, dst)):
                continue
            sides = (
                engine(TP(1), 4, src, bounds=(0, 2), group=(0, 1)),
                engine(TP(2), 8, dst, bounds=(0, 2), group=(0, 1)),
            )
            carried(case(*sides, (2, no, nh, hd, dtype), range(number % 3, 11)), f"{src}{dst}{hd}")


def test_the_condition_is_that_cells_are_whole() -> None:
    """`_cell_bytes` names a size if and only if the loops, which visit no byte twice, visit whole cells of that size."""
    rng, seen = random.Random(1), dict[int, int]()
    for _ in range(4000):
        cell = rng.choice((1, 2, 4, 8, 16))
        at, modes = 1, []
        while at < cell:  # any loops inside a cell
            extent = rng.choice([2**k for k in range(1, 5) if at * 2**k <= cell])
            modes.append(Mode(extent, 0, 0, key=at))
            at *= extent
        at = 16
        for _ in range(rng.randrange(3)):
            extent = rng.randint(1, 5)
            modes.append(Mode(extent, 0, 0, key=at))
            at *= extent
        for _ in range(rng.randrange(2)):  # anything else
            k = rng.randrange(len(modes)) if modes else -1
            wrong = Mode(rng.randint(1, 33), 0, 0, key=rng.choice((1, 2, 3, 4, 8, 12, 16, 17, 24, 32)))
            modes = [wrong if i == k else mode for i, mode in enumerate(modes)] or [wrong]
        if cell == 16 and rng.random() < 0.5:  # a run through cells
            modes = [Mode(16 * rng.randint(1, 3), 0, 0, key=1)]
        keys = [sum(steps) for steps in itertools.product(*[[i * m.key for i in range(m.extent)] for m in modes])]
        if len(set(keys)) < len(keys):
            continue
        groups: dict[int, set[int]] = {}
        for key in keys:
            groups.setdefault(key // 16, set()).add(key % 16)
        held = len(groups[0])
        whole = all(found == set(range(held)) for found in groups.values())
        rng.shuffle(modes)
        got = cells._cell_bytes(modes)
        assert got in (0, held) and (whole or not got), modes
        if whole and held in (1, 2, 4, 8, 16):
            seen[got] = seen.get(got, 0) + 1
    assert set(seen) >= {1, 2, 4, 8, 16} and seen.get(0, 0) < 0.05 * sum(seen.values()), seen
