"""Sections and units by every strategy, on one GPU and on two (test_sections.py).  Streams run in any order that events allow."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from test_planes import shapes
from test_sections import Meant, Plain, Planar, moved

import kvbm
from kvbm import BlockShape
from programs.fake_gpu import count, defer, driver, half, handle, ids_on_gpu, pump, refused, seed

SIDES = {"d2d": (0, 0), "d2h": (0, "pinned"), "h2d": ("pinned", 0), "p2p": (0, 1)}

#: A block of it has two digits below it where units are smaller than 32 tokens.
SPLIT = "b t/32 l o h t%32 d"

#: Layout and tokens per block of each side, tokens of a unit, and what of it is meant on each side.
CASES: list[tuple[tuple[str, int], tuple[str, int], int, dict[str, Any], dict[str, Any]]] = [
    (("vllm/flash_attn_nhd", 16), ("vllm/flash_attn_hnd", 64), 16, {}, {}),
    (("vllm/flash_attn_hnd", 64), ("nhd", 16), 16, {"h": range(1, 3)}, {"h": range(2, 4)}),
    ((SPLIT, 64), ("nhd", 16), 16, {}, {}),
    (("vllm/BLHNC", 32), (SPLIT, 64), 8, {"o": 1}, {"o": 0}),
    ((SPLIT, 64), (SPLIT, 128), 4, {"t": [3, 0]}, {"t": range(1, 4, 2)}),
    (("nhd", 48), ("universal", 32), 16, {"h": [3, 0, 1]}, {"h": [0, 2, 1]}),
    (("vllm/paged_attn_v0", 16), ("nhd", 24), 8, {"d": range(4, 8)}, {"d": range(4)}),
    (("universal", 32), ("vllm/paged_attn_v0", 48), 16, {}, {}),
    (("vllm/flash_attn_nhd", 4), ("vllm/BHLNC", 6), 1, {"o": [1, 0]}, {}),
]

#: Of several planes: the pair of layouts, and tokens of a unit.
PLANAR = [
    ("vllm/fp8_ds_mla", "record/mla_fp8_tensors", 2),
    ("record/mla_fp8_pages", "record/mla_fp8_planes", 1),
    ("vllm/dsa_indexer_mxfp4", "record/dsa_indexer_mxfp4_tokens", 2),
    ("vllm/nvfp4_sm120", "record/nvfp4_universal", 2),
    ("flashinfer/mla_split", "record/mla_joined", 1),
    ("vllm/deepseek_v4", "record/deepseek_v4_tokens", 2),
    ("record/deepseek_v4_tokens", "record/deepseek_v4_planes", 2),
]


def ends(direction: str) -> Iterator[tuple[Any, Any, Meant, Meant]]:
    here, there = SIDES[direction]
    for number, ((src, nt), (dst, other_nt), unit, ours, theirs) in enumerate(CASES):
        sizes = [BlockShape(nl=3, no=2, nh=4, nt=tokens, hd=8, dtype="float16") for tokens in (nt, other_nt)]
        blocks = [max(480 if unit == 1 else 96, 2 * tokens) // tokens for tokens in (nt, other_nt)]
        ways = ("steps", "rows", "scattered")
        s = Plain(src, sizes[0], blocks[0], how=ways[number % 3], where=here)
        d = Plain(dst, sizes[1], blocks[1], dst=True, how=ways[number // 2 % 3], where=there)
        yield s, d, Meant(unit, ours), Meant(unit, theirs)
    for number, (src, dst, unit) in enumerate(PLANAR if "p2p" not in direction else ()):
        a, b = ("fake" if place == 0 else "fake pinned" for place in (here, there))
        shape = next(shape for shape in shapes(src) if shape[3] > unit and shape[3] % unit == 0)
        s = Planar(src, shape, 9, where=a, how=("rows", "steps")[number % 2])
        d = Planar(dst, shape, 7, where=b, dst=True)
        part = Meant(unit, {"planes": [p.name for p in s.arena.placed.planes][number == 1 :]})
        yield s, d, part, part


def batches(rng: random.Random, src: int, dst: int) -> Iterator[tuple[list[int], list[int]]]:
    """A few pairs, whose addresses the launch gathers; many; some of them skipped."""
    for n in (1, 3, min(src, dst)):
        ids = rng.sample(range(src), n), rng.sample(range(dst), n)
        yield ids
        if n > 3:
            ids[0][1] = ids[1][n - 2] = -1
            yield ids


def check(s: Any, d: Any, ours: Meant, theirs: Meant, src_ids: Any, dst_ids: Any, what: Any = "") -> None:
    want = moved(s, d, ours, theirs, src_ids, dst_ids)
    wrong = np.flatnonzero(d.buffer != want)
    assert not wrong.size, (s.pool, d.pool, ours, theirs, what, wrong.size, wrong[:8])
    assert np.array_equal(s.buffer, s.before)
    d.buffer[:] = d.before


def every_strategy(direction: str, strategy: str) -> None:
    rng = random.Random(1)
    defer(1)
    for number, (s, d, ours, theirs) in half(ends(direction), direction, strategy):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        slot = max(part.of.packed().accesses[0].block[0] for part in (here, there))
        for chunk in (None, 3 * slot) if strategy == "staged" else (None,):
            with kvbm.Transfer(here, there, strategy, chunk_bytes=chunk) as move:
                for turn, (src_ids, dst_ids) in enumerate(batches(rng, here.num_ids, there.num_ids)):
                    seed(number + turn)
                    done = move.copy(np.array(src_ids), np.array(dst_ids, np.int32), stream=5)
                    pump()
                    assert done.query() and strategy in ("auto", done.strategy)
                    check(s, d, ours, theirs, src_ids, dst_ids, (chunk, turn))
                n = min(here.num_ids, there.num_ids)
                order = rng.sample(range(max(here.num_ids, there.num_ids)), n)
                counted = {"src_ids": order} if here.num_ids > n else {"dst_ids": order}
                move.copy(**counted, stream=5)  # the other side's: 0, 1, 2, …
                pump()
                lists = counted.get("src_ids", range(n)), counted.get("dst_ids", range(n))
                check(s, d, ours, theirs, *lists, "counted")
                # A producer and a consumer, on streams of their own.
                first = move.copy(lists[0][: n // 2], lists[1][: n // 2], stream=6)
                move.copy(lists[0][n // 2 :], lists[1][n // 2 :], stream=7, wait=first).synchronize()
                check(s, d, ours, theirs, *lists, "waited")
    assert count("illegal") == 0 and count("pushes") == count("pops")


def ranges_of_layers(strategy: str) -> None:
    """Layers of a section, which count from its own first."""
    for direction in ("d2d", "d2h", "h2d"):
        for s, d, ours, theirs in list(ends(direction))[: len(CASES)]:
            parts = [Meant(m.unit, {**m.chosen, "l": range(1, 3)}) for m in (ours, theirs)]
            here, there = parts[0].of(s.pool), parts[1].of(d.pool)
            src_ids, dst_ids = [2, 0, 1], [1, 2, 0]
            with kvbm.Transfer(here, there, strategy) as move:
                for layer in range(2):
                    move.copy(src_ids, dst_ids, layers=range(layer, layer + 1), stream=5)
                pump()
                check(s, d, *parts, src_ids, dst_ids)


def ids_on_the_gpu(direction: str, strategy: str) -> None:
    """Of units, in both widths; what is out of range is skipped and noted, also where its block would be there."""
    rng = random.Random(2)
    near_src, near_dst = (place == 0 for place in SIDES[direction])
    for number, (s, d, ours, theirs) in enumerate(ends(direction)):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        with kvbm.Transfer(here, there, strategy) as move:
            for wide in (np.int32, np.int64):
                n = min(here.num_ids, there.num_ids, 40)
                src_ids = np.array(rng.sample(range(here.num_ids), n), wide)
                dst_ids = np.array(rng.sample(range(there.num_ids), n), wide)
                src_ids[2] = -1
                bad = number % 2 == 0
                on = (strategy == "direct" or near_src, strategy == "direct" or near_dst)
                if bad:
                    (src_ids if on[0] else dst_ids)[3] = (here if on[0] else there).num_ids
                given = [ids_on_gpu(ids) if gpu else ids for ids, gpu in zip((src_ids, dst_ids), on, strict=True)]
                done = move.copy(*given, stream=5)
                pump()
                if bad:
                    with refused(kvbm.BindError, "pair 3"):
                        done.synchronize()
                    src_ids[3] = -1
                else:
                    done.synchronize()
                check(s, d, ours, theirs, src_ids.tolist(), dst_ids.tolist(), wide)


def graphs(direction: str, strategy: str) -> None:
    """A captured copy of units, replayed on other bytes; with ids on the GPU, of other units."""
    rng = random.Random(3)
    for _, (s, d, ours, theirs) in half(ends(direction), direction, strategy):
        here, there = ours.of(s.pool), theirs.of(d.pool)
        n = min(here.num_ids, there.num_ids) - 1
        with kvbm.Transfer(here, there, strategy) as move:
            for on_gpu in (False, True)[: 1 + (strategy == "direct")]:
                src_ids, dst_ids = (np.array(rng.sample(range(part.num_ids), n)) for part in (here, there))
                defer(1)
                driver.fake_begin_capture(handle(6))
                made = [ids_on_gpu(ids) if on_gpu else ids for ids in (src_ids, dst_ids)]
                done = move.copy(*made, stream=6)
                graph = driver.fake_end_capture()
                assert graph, "a stream of the capture was left behind"
                for turn in range(3):
                    if on_gpu:
                        src_ids[:], dst_ids[:] = (rng.sample(range(part.num_ids), n) for part in (here, there))
                    s.before[:] = s.buffer[:] = np.roll(s.buffer, 1 + turn)
                    seed(turn)
                    driver.fake_launch_graph(handle(graph), handle(5))
                    pump()
                    check(s, d, ours, theirs, src_ids.tolist(), dst_ids.tolist(), turn)
                driver.fake_destroy_graph(handle(graph))
                del done
                defer(0)
    assert count("broken_captures") == 0


def ids_in_the_parameters() -> None:
    """How many ids travel with a launch and need no upload: units cost room where they are, and blocks none."""
    shape = BlockShape(nl=1, no=2, nh=2, nt=2, hd=8, dtype="float16")
    paged = next(shape for shape in shapes("record/mla_fp8_pages") if shape[3] > 1)
    pairs: list[tuple[Any, Any]] = [
        (Plain("vllm/flash_attn_hnd", shape, 999, where=0), Plain("vllm/BLHNC", shape, 999, where=0)),
        tuple(Planar(f"record/mla_fp8_{name}", paged, 999, where="fake") for name in ("pages", "tensors")),
    ]
    seen = []
    for over in (0, 1):
        for s, d in pairs:
            for src, dst in ((s.pool, d.pool), (s.pool.units(1), d.pool.units(1))):
                with kvbm.Transfer(src, dst, "direct") as move:
                    [_] = move._executor.routes[None].copies
                    parts = len(move._executor.routes[None].plan.parts)
                    room = 4016 - 576 * parts - (48 + 32 * parts if src is not s.pool else 0)
                    n = room // 2 // 16 * 4 + over  # two lists of 4 bytes an id, each in whole words of 16
                    seen.append((parts, n))
                    before = count("uploads")
                    move.copy([*range(n - 1, 0, -1), -1], range(n), stream=5)
                    assert count("uploads") - before == over, (parts, src, n, over)
    assert seen[:4] == [(1, 428), (1, 420), (3, 284), (3, 268)], seen


def kernels_of_planes() -> None:
    names = set()
    for s, d, ours, theirs in list(ends("d2d"))[len(CASES) :]:
        with kvbm.Transfer(ours.of(s.pool), theirs.of(d.pool), "direct") as move:
            names |= {re.sub(r"_o\d.*", "", copy.kernel) for copy in move._executor.routes[None].copies}
    assert {"record", "page_in", "page_out"} <= names, names
