"""Transfers by every strategy, on one GPU and on two (test_transfer.py).  Streams run in any order that events allow."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver as bindings
from cuda.bindings import runtime

import kvbm
import matrix
import oracle
from kvbm import _core
from kvbm.kernels import MemcpyBatchMode as Mode
from kvbm.kernels import memcpy_batch, vectorized_copy
from memory import FakeCuda, numpy_views, placed
from programs.fake_gpu import count, defer, driver, half, handle, ids_on_gpu, pump, random, refused, seed

SHAPE = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=16, dtype="bfloat16")
SMALL = kvbm.BlockShape(nl=2, no=2, nh=1, nt=2, hd=16, dtype="int16")
NAMES = [
    "nhd",
    "universal",
    "vllm/LBHNC",
    "vllm/flash_attn_nhd",
    "vllm/paged_attn_v0",
    "hf/dynamic_cache",
    "vllm/BLHNC",
    "operational_hnd",
]


class On:
    """A stream by its protocol."""

    def __init__(self, handle: int):
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class End:
    """A pool over guarded memory, "on the GPU" (`where` is its number) or pinned, and the bytes it had before."""

    def __init__(
        self,
        name: str,
        blocks: int,
        where: int | str,
        dst: bool = False,
        shape: kvbm.BlockShape = SHAPE,
        align: int = 0,
        pin: bool = True,
    ):
        how = ("steps", "rows", "scattered")[(blocks + len(name) + dst) % 3]
        self.arena = placed(matrix.orders()[name], shape, blocks).layout_bytes(align, how)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        self.pages = mmap.mmap(-1, self.before.size + 4096)
        self.buffer = np.frombuffer(self.pages, np.uint8)[: self.before.size]
        self.buffer[:] = self.before
        views = numpy_views(self.arena, self.buffer, shape.dtype)
        if where != "pinned":
            views = [
                FakeCuda(v.shape, shape.dtype, address=v.ctypes.data, strides=v.strides, device=where) for v in views
            ]
        self.pool = kvbm.Pool(kvbm.load(name), shape, views)
        if where == "pinned" and pin:
            self.pool.pin()

    def refill(self, salt: int) -> None:
        self.before = (oracle.source_bytes if salt else oracle.dest_bytes)(self.arena, salt)
        self.buffer[:] = self.before


def transfer(s: End, d: End, strategy: str) -> kvbm.Transfer:
    """Staged in groups of two blocks."""
    return kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=2 * SHAPE.nbytes if strategy == "staged" else None)


def moved(s: End, d: End, src_ids: Any, dst_ids: Any) -> np.ndarray:
    return oracle.expected_bytes(s.arena, d.arena, s.before, d.before, src_ids, dst_ids)


def right(s: End, d: End, src_ids: Any, dst_ids: Any) -> bool:
    return np.array_equal(d.buffer, moved(s, d, src_ids, dst_ids)) and np.array_equal(s.buffer, s.before)


def check(s: End, d: End, src_ids: Any, dst_ids: Any, what: Any = "") -> None:
    assert right(s, d, src_ids, dst_ids), (what, oracle.explain(d.arena, d.buffer, moved(s, d, src_ids, dst_ids)))


SIDES = {"d2d": (0, 0), "d2h": (0, "pinned"), "h2d": ("pinned", 0)}


def ends(direction: str, src: str, dst: str, src_blocks: int, dst_blocks: int, **rest: Any) -> tuple[End, End]:
    a, b = SIDES[direction]
    return End(src, src_blocks, a, **rest), End(dst, dst_blocks, b, dst=True, **rest)


def batch(n: int, src_blocks: int, dst_blocks: int) -> tuple[np.ndarray, ...]:
    """Ids, and the pairs of them that are copied."""
    src, dst = random.choice(src_blocks, n, replace=False), random.choice(dst_blocks, n, replace=False)
    kept = np.ones(n, bool)
    if n > 4:
        kept[random.choice(n, n // 4, replace=False)] = False
    skipped = np.flatnonzero(~kept)
    src[skipped[::2]], dst[skipped[1::2]] = -1, -1
    return src, dst, src[kept].copy(), dst[kept].copy()


POOL, MAPPING, PAGE = 1, 2, 2 << 20


def grant(begin: int, end: int, kind: int, device: int, granted: int) -> None:
    """Say what lies there, and which GPUs (bits) may touch it."""
    driver.fake_memory(ctypes.c_ulonglong(begin), ctypes.c_ulonglong(end), kind, device, granted)


def span(end: End) -> tuple[int, int]:
    return end.buffer.ctypes.data, end.buffer.ctypes.data + end.buffer.nbytes


def why(call: Callable[[], Any]) -> str:
    try:
        call()
    except kvbm.BindError as error:
        return str(error)
    raise AssertionError("not refused")


def every_pair(direction: str, strategy: str) -> None:
    staged = strategy in ("staged", "auto")
    defer(1)
    for number, (src, dst) in half(itertools.product(NAMES, NAMES), direction, strategy):
        if number % 3 and src != "universal" and dst != "vllm/paged_attn_v0":
            continue
        for chunk in (None, 1, 3) if staged else (None,):
            s, d = ends(direction, src, dst, 11, 13, align=2 * (number % 2))
            slot = chunk and chunk * SHAPE.nbytes
            seed(number % 4)
            with kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=slot) as move:
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
                assert strategy in ("auto", "aside") or stats[strategy] == 1
                assert done.strategy in ("direct", "staged", "engine") and stats[done.strategy] == 1
    assert count("pushes") == count("pops") and count("batch_on_legacy") == 0


def batches(direction: str, strategy: str) -> None:
    slot = {"staged": 20 * SMALL.nbytes}.get(strategy)
    defer(1)
    pairs = ("nhd", "universal"), ("vllm/LBHNC", "vllm/flash_attn_nhd"), ("universal", "hf/dynamic_cache")
    for turn, (src, dst) in half(pairs, direction, strategy):
        for n in (0, 1, 7, 700):
            s, d = ends(direction, src, dst, n + 20, n + 30, shape=SMALL)
            seed(turn)
            move = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=slot)
            src_ids, dst_ids, src_kept, dst_kept = batch(n, n + 20, n + 30)
            done = move.copy(src_ids.tolist() if n < 100 else src_ids, dst_ids, stream=5)
            src_ids[:] = dst_ids[:] = 0
            done.synchronize()
            check(s, d, src_kept, dst_kept, (src, dst, n))
            if strategy == "staged" and n == 700:
                assert move.stats()["submissions"] >= 2 * len(src_kept) / 20
            pump()
        for given in (([6, 0, 3], None), (None, [6, 0, 3]), (None, None)):
            s, d = ends(direction, src, dst, 9, 9, shape=SMALL)
            move = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=slot)
            move.copy(*given, stream=5).synchronize()
            n = 3 if given != (None, None) else 9
            check(s, d, *(range(n) if ids is None else ids for ids in given))
            pump()


def one_after_the_other_on_one_ring(direction: str, strategy: str) -> None:
    defer(1)
    for start in range(6):
        s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 40, 40)
        slot = 2 * SHAPE.nbytes if strategy in ("staged", "auto") else None
        move = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=slot)
        seed(start)
        order, to = random.permutation(40), random.permutation(40)
        for turn in range(10):
            move.copy(order[4 * turn : 4 * turn + 4], to[4 * turn : 4 * turn + 4], stream=5 + turn % 3)
        pump()
        check(s, d, order, to)


def old_drivers_and_the_legacy_stream(stream: int, batched: bool) -> None:
    for direction, strategy in itertools.product(SIDES, ("direct", "staged", "auto", "engine")):
        s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 9, 9)
        before = count("batches"), count("single_copies")
        kvbm.Transfer(s.pool, d.pool, strategy).copy([8, 1, 0, 5], [1, 8, 3, 0], stream=stream).synchronize()
        check(s, d, [8, 1, 0, 5], [1, 8, 3, 0], (direction, strategy))
        if strategy == "engine":
            used = count("batches") > before[0], count("single_copies") > before[1]
            assert used == (batched, not batched), (direction, used)
    assert count("batch_on_legacy") == 0


def ids_on_the_device(direction: str, strategy: str) -> None:
    def on_gpu(ids: list[int], kind: Any = np.int64) -> tuple[np.ndarray, FakeCuda]:
        array = np.array(ids, kind)
        return array, ids_on_gpu(array)

    def is_refused(src_ids: Any, dst_ids: Any, *words: str) -> None:
        before = d.buffer.copy()
        with refused(kvbm.BindError, *words):
            move.copy(src_ids, dst_ids, stream=5)
        pump()
        assert np.array_equal(d.buffer, before)

    defer(1)
    gathers = direction != "h2d"
    for kind in (np.int32, np.int64):
        s, d = ends(direction, "nhd", "universal", 9, 11)
        move = kvbm.Transfer(s.pool, d.pool, strategy)
        (src, src_gpu), (dst, dst_gpu) = on_gpu([0] * 4, kind), on_gpu([0] * 4, kind)
        if strategy in ("direct", "auto"):
            calls = (
                (src_gpu, dst_gpu),
                ([8, 1, 0, 5], dst_gpu),
                (src_gpu, [1, 8, 3, 0]),
                (src_gpu, None),
                (None, dst_gpu),
            )
        elif strategy in ("staged", "aside") and not gathers:
            calls = ([8, 1, 0, 5], dst_gpu), (None, dst_gpu), ([8, -1, 0, 5], dst_gpu)
            is_refused(src_gpu, dst_gpu, "staged", "src_ids lie on the GPU")
            is_refused(src_gpu, [0, 1, 2, 3], "staged", "src_ids lie on the GPU")
        else:
            calls = ()
            sentence = f"{'staged' if strategy == 'aside' else strategy}: block ids lie on the GPU"
            for ids in ((src_gpu, dst_gpu), ([8, 1, 0, 5], dst_gpu), (src_gpu, [1, 8, 3, 0])):
                is_refused(*ids, sentence, "strategy='direct'")
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
            with refused(kvbm.BindError, "ids on the device: pair"):
                done.synchronize()
            done.synchronize()
        if calls:
            wide = on_gpu([0] * 4, np.int64 if kind is np.int32 else np.int32)[1]
            if strategy != "staged":
                is_refused(src_gpu, wide, "one width")
            is_refused([0, 1, 2], dst_gpu, "as many source as destination ids")
            is_refused([0, 1, 2, 9], dst_gpu, "src_ids[3] is 9")
            is_refused([0, 1, 2, 3], FakeCuda((4,), "float32"), "int32 or int64")
            is_refused([0, 1, 2, 3], FakeCuda((4,), "int64", device=1), "cuda:1")
            is_refused([0, 1, 2, 3], FakeCuda((4,), "int64", strides=(16,)), "contiguous")


def a_batch_moves_what_its_pairs_say(direction: str, strategy: str) -> None:
    defer(1)
    slot = 3 * SMALL.nbytes if strategy == "staged" else None
    device_ids = strategy in ("direct", "auto") or (strategy, direction) == ("staged", "h2d")

    for row, blocks in enumerate(((2, 500), (500, 2), (2, 2), (70, 500), (3, 40))):
        both = [ends(direction, *names, *blocks, shape=SMALL) for names in (("universal", "nhd"), ("nhd", "universal"))]
        for column, n in enumerate((1, 2, 5, 20, 64, 65, 500)):
            # Each number of pairs with each share that is skipped; ids on the device with half of them.
            turn = row + column
            skipped = (0, 0.5, 0.97)[turn % 3]
            seed(turn % 5)
            s, d = both[turn % 2]
            d.refill(0)
            with kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=slot) as move:
                src = random.integers(0, blocks[0], n)
                dst = np.full(n, -1)
                order = random.permutation(n)[: blocks[1]]
                dst[order] = random.permutation(blocks[1])[: len(order)]
                src[random.random(n) < skipped] = -1
                kept = (src >= 0) & (dst >= 0)
                kind = (np.int32, np.int64)[turn % 2]
                given, to = src.astype(kind), dst.astype(kind)
                on_device = device_ids and row % 2 == 0
                done = move.copy(given, ids_on_gpu(to) if on_device else to, stream=5)
                pump()
                check(s, d, src[kept], dst[kept], (blocks, n, skipped, on_device, done.strategy))
                done.synchronize()
                assert on_device or move.stats()["blocks"] == kept.sum()


def layers(direction: str, strategy: str) -> None:
    stage = replace(SHAPE, nl=2)
    for _, (src, dst) in half(itertools.product(NAMES[:5], NAMES[:5]), direction, strategy):
        a, b = SIDES[direction]
        s, d = End(src, 6, a), End(dst, 7, b, dst=True, shape=stage)
        move = kvbm.Transfer(s.pool, d.pool, strategy)
        for layer in range(2):
            move.copy([5, 0, 3], [6, 1, 2], layers=(range(layer + 1, layer + 2), range(layer, layer + 1)), stream=5)
        pump()
        want = d.before.copy()
        oracle.scatter(
            want, d.arena.positions([6, 1, 2]), oracle.gather(s.before, s.arena.positions([5, 0, 3])[:, 1:3], 2)
        )
        assert np.array_equal(d.buffer, want), (src, dst)


def graphs(direction: str, strategy: str) -> None:
    def capture(*ids: Any) -> Any:
        driver.fake_begin_capture(handle(6))
        move.copy(*ids, stream=6)
        graph = driver.fake_end_capture()
        assert graph, "a stream of the capture was left behind"
        pump()
        assert np.array_equal(d.buffer, d.before)
        return handle(graph)

    slot = 3 * SMALL.nbytes if strategy == "staged" else None
    for n in (2, 20, 800):
        s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 2 * n, 2 * n, shape=SMALL)
        move = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=slot)
        move.copy([0], [0], stream=5)
        pump()
        d.refill(0)
        order, to = random.permutation(2 * n), random.permutation(2 * n)
        defer(1)
        graphs = [capture(order[:n].copy(), to[:n].copy()), capture(order[n:].copy(), to[n:].copy())]
        for turn in range(4):
            s.refill(1 + turn)
            d.refill(0)
            seed(turn)
            for graph in graphs:
                driver.fake_launch_graph(graph, handle(5 + turn % 2))  # side by side, or one after the other
            if turn == 3:  # beside a copy that is none of a graph's
                move.copy(order, to, stream=9)
            pump()
            check(s, d, order, to, (n, turn))
        slots, held = count("slots"), count("allocated_bytes")
        for again in range(5 if n < 800 else 2):
            for graph in graphs:
                driver.fake_destroy_graph(graph)
            d.refill(0)
            graphs = [capture(order[:n].copy(), to[:n].copy()), capture(order[n:].copy(), to[n:].copy())]
            assert (count("slots"), count("allocated_bytes")) == (slots, held), again
        for turn in range(1, 5 if n < 800 else 3):  # what two graphs took again is each one's own
            s.refill(1 + turn)
            d.refill(0)
            seed(turn)
            for i, graph in enumerate(graphs):
                driver.fake_launch_graph(graph, handle(5 + i))
            pump()
            check(s, d, order, to, (n, "again"))
        defer(0)
    assert count("broken_captures") == 0


def threads(direction: str, strategy: str) -> None:
    s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 64, 64)
    move = kvbm.Transfer(s.pool, d.pool, strategy)
    start = threading.Barrier(8)

    def work(k: int) -> None:
        start.wait()
        for i in range(k, 64, 8):
            move.copy([i], [63 - i], stream=5 + k).synchronize()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    check(s, d, range(64), range(64)[::-1])
    assert move.stats()["blocks"] == move.stats()["copies"] == 64
    assert count("pushes") == count("pops")


def streams_of_either(to: int, strategy: str, first: int) -> None:
    defer(1)
    for start, second in itertools.product(range(4), (6, 0x106)):
        s, m = End("nhd", 12, 1 - to), End("universal", 12, to, dst=True)
        d = End("vllm/LBHNC", 12, 1 - to, dst=True)
        there, back = transfer(s, m, strategy), transfer(m, d, strategy)
        seed(start)
        done = there.copy(range(12), range(12), stream=first)
        back.copy(range(12), range(12), stream=second, wait=done)
        pump()
        m.before = moved(s, m, range(12), range(12))
        check(s, m, range(12), range(12))
        check(m, d, range(12), range(12))
    assert count("pushes") == count("pops")


def memory_that_is_granted_by_itself(src_device: int, dst_device: int, memory: int, peers: bool) -> None:
    """Prints what is refused, and what `auto` says of its ways: first with all grants, then without."""
    for granted in (0b11, 0):
        for strategy in ("direct", "staged", "engine", "auto"):
            for layouts in (("nhd", "universal"), ("universal", "vllm/LBHNC"), ("nhd", "nhd")):
                s, d = End(layouts[0], 9, src_device), End(layouts[1], 11, dst_device, dst=True)
                for end, device in ((s, src_device), (d, dst_device)):
                    grant(*span(end), memory, device, granted | 1 << device)
                if strategy == "direct" and (not granted or not peers):
                    print(granted, why(lambda: transfer(s, d, "direct")))  # noqa: B023
                    continue
                move = transfer(s, d, strategy)
                before = count("peer_copies")
                for stream in (5, 0x105):
                    d.refill(0)
                    move.copy(range(9), range(2, 11), stream=stream).synchronize()
                    check(s, d, range(9), range(2, 11), (granted, strategy, layouts))
                assert (count("peer_copies") > before) == (not granted), (granted, strategy)
                if strategy == "auto":
                    print(granted, move._executor.explain(None, None).replace("\n", " "))
    assert count("illegal") == 0 and count("pushes") == count("pops")


def a_pool_in_several_mappings() -> None:
    base = 1 << 44  # nothing is there
    for i in range(6):
        grant(base + i * PAGE, base + (i + 1) * PAGE, MAPPING, 1, 0b11)

    def found(*spans: tuple[int, int]) -> tuple[int, str] | None:
        return _core.find_ungranted(0, np.array(spans, np.uint64).reshape(-1, 2))

    whole = (base, base + 6 * PAGE)
    assert found(whole) is None and found() is None
    for hole in range(6):
        first, last = base + hole * PAGE, base + (hole + 1) * PAGE
        grant(first, last, MAPPING, 1, 0b10)
        assert found(whole)[0] == 0
        assert found((base, first)) is None or hole == 0
        assert found((last, base + 6 * PAGE)) is None
        assert found((base, first + 1))[0] == 0 and found((last - 1, base + 6 * PAGE))[0] == 0
        if hole:
            spans = (base, first), (first - 8, first), (first - 8, first + 8)
            assert found(*spans) == (2, "memory mapped by the virtual memory API")
        grant(first, last, MAPPING, 1, 0b11)
    assert _core.find_ungranted(1, np.array([whole], np.uint64)) is None


def raw_addresses() -> None:
    one, other = (random.integers(0, 256, 64 * 40, np.uint8) for _ in range(2))
    a, b = ([int(x) for x in m.ctypes.data + 64 * np.arange(40)] for m in (one, other))
    said = "_ptrs[0] lies in memory mapped by the virtual memory API that is not granted to cuda:0"
    for granted in (0b11, 0b10):
        grant(b[0], b[-1] + 64, MAPPING, 1, granted)
        for src, dst, written in ((a, b, other), (b, a, one)):
            written[:] = 0
            if granted == 0b11:
                vectorized_copy(src, dst, 64, stream=5, device=0)
            else:
                with refused(kvbm.BindError, said):
                    vectorized_copy(src, dst, 64, stream=5, device=0)
                assert not written.any()
                with refused(kvbm.CudaError, "KVBM_NOT_GRANTED"):
                    memcpy_batch(src, dst, 64, stream=5, device=0, mode=Mode.BATCH_WITHOUT_FALLBACK)
                assert memcpy_batch(src, dst, 64, stream=5, device=0) == Mode.FALLBACK_ONLY
            assert np.array_equal(one, other)
            one[:] = random.integers(0, 256, one.size, np.uint8)
            other[:] = random.integers(0, 256, one.size, np.uint8)
    memcpy_batch(b[:20], b[20:], 64, stream=0x105, device=1)  # its own
    assert np.array_equal(other[:1280], other[1280:])
    assert count("illegal") == 0


def others_go_on(strategy: str) -> None:
    s, d = End("nhd", 12, 0), End("universal", 12, 1, dst=True)
    other, far = End("nhd", 12, 0), End("universal", 12, 1, dst=True)
    move, beside = transfer(s, d, strategy), transfer(other, far, strategy)
    for one in (move, beside):
        one.copy([0], [0], stream=0x105).synchronize()
    d.refill(0)
    far.refill(0)
    held, tables = [], []
    for _ in range(3):
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
        d.refill(0)
        far.refill(0)
        driver.fake_launch_graph(handle(graph), handle(0x105))
        pump()
        check(s, d, range(12), range(12), "replayed")
        driver.fake_destroy_graph(handle(graph))
        d.refill(0)
        held.append(count("allocated_bytes"))
    assert held[1] - held[0] == held[2] - held[1] == 64, held
    assert count("broken_captures") == 0


def a_producer_on_a_default_stream(device: int) -> None:
    defer(1)

    def chain(start: int, wait: Any) -> Any:
        s, m, d = (End(name, 6, device, dst=i > 0) for i, name in enumerate(("nhd", "universal", "vllm/LBHNC")))
        first, second = kvbm.Transfer(s.pool, m.pool), kvbm.Transfer(m.pool, d.pool, "staged")
        pump()
        seed(start)
        first.copy(range(6), range(6), stream=0)
        second.copy(range(6), range(6), stream=(262 if device else 6), wait=wait)
        pump()
        m.before = moved(s, m, range(6), range(6))
        return right(m, d, range(6), range(6))

    print(*(all(chain(start, wait) for start in range(1, 40)) for wait in (On(0), None)))


def two_gpus_and_a_default_stream() -> None:
    class Default:  # as torch's
        def __init__(self, index):
            self.device_index = index

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0)

    s, d = End("nhd", 6, 0), End("universal", 6, 1, dst=True)
    move = kvbm.Transfer(s.pool, d.pool, "direct")
    for stream in (0, Default(1)):
        with refused(kvbm.BindError, "default stream"):
            move.copy(range(6), range(6), stream=stream)
    assert count("launches") == 0
    move.copy(range(6), range(6), stream=Default(0))
    pump()
    check(s, d, range(6), range(6))


def wait(mark: str) -> None:
    defer(1)

    def chain(start: int, wait: Any, strategies: tuple[str, str]) -> Any:
        s, m, d = End("nhd", 6, 0), End("universal", 6, "pinned", dst=True), End("vllm/LBHNC", 6, 0, dst=True)
        out, back = transfer(s, m, strategies[0]), transfer(m, d, strategies[1])
        pump()
        seed(start)
        done = out.copy(range(6), range(6), stream=5)
        ways = {"done": done, "stream": On(5), "list": [On(9), done, On(5)]}
        back.copy(range(6), range(6), stream=7, wait=ways[mark] if wait else None)
        pump()
        m.before = moved(s, m, range(6), range(6))
        return right(m, d, range(6), range(6))

    every = list(itertools.product(("direct", "staged", "engine"), repeat=2))
    print(
        all(chain(start, True, one) for one in every for start in range(1, 12)),
        *(all(chain(start, False, one) for start in range(1, 30)) for one in every),
    )


def consumers() -> None:
    defer(1)
    wrong = 0
    for start in range(1, 30):
        for waits in (True, False):
            s, m, d = End("nhd", 6, 0), End("universal", 6, 0, dst=True), End("vllm/LBHNC", 6, 0, dst=True)
            out, back = transfer(s, m, "staged"), transfer(m, d, "direct")
            pump()
            seed(start)
            done = out.copy(range(6), range(6), stream=5)
            if waits:
                done.wait(On(7))
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


def wait_for_an_event(kind: str) -> None:
    driver.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
    made = ctypes.c_void_p()
    driver.cuEventCreate(ctypes.byref(made), 2)
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    class Event:  # what both releases have, and a name of each
        def __init__(self, handle):
            self.handle, self.is_done = handle, False

    if kind == "cuda.core 1":
        Event.is_timing_enabled = False
    if kind == "cuda.core 0.4":
        Event.is_timing_disabled = True
    Event.__module__ = "cuda.core.experimental._event"
    event = {"CUevent": bindings.CUevent, "cudaEvent_t": runtime.cudaEvent_t}.get(
        kind, lambda h: Event(bindings.CUevent(h))
    )
    defer(1)

    def chain(start: int, waits: bool) -> Any:
        s, m, d = End("nhd", 6, 0), End("universal", 6, 0, dst=True), End("vllm/LBHNC", 6, 0, dst=True)
        pump()
        seed(start)
        transfer(s, m, "direct").copy(range(6), range(6), stream=5)
        driver.cuEventRecord(made, ctypes.c_void_p(5))
        transfer(m, d, "direct").copy(range(6), range(6), stream=7, wait=event(made.value) if waits else None)
        pump()
        m.before = moved(s, m, range(6), range(6))
        return right(m, d, range(6), range(6))

    print(all(chain(start, True) for start in range(1, 20)), all(chain(start, False) for start in range(1, 20)))
    s, d = ends("d2d", "nhd", "universal", 6, 6)
    for wrong in ([event(0)], event(0)):
        with refused(kvbm.BindError, "not been recorded"):
            kvbm.Transfer(s.pool, d.pool).copy([0], [0], stream=5, wait=wrong)
    for stream in (bindings.CUevent(made.value), runtime.cudaEvent_t(made.value)):
        with refused(TypeError, "stream: expected"):
            kvbm.Transfer(s.pool, d.pool).copy([0], [0], stream=stream)


def wait_is_refused_for_what_is_neither() -> None:
    s, d = ends("d2d", "nhd", "universal", 6, 6)
    move = kvbm.Transfer(s.pool, d.pool)
    for wait, words in (
        (6, "int, which could be either"),
        (True, "int, which could be either"),
        ("5", "stream"),
        (object(), "stream"),
        ([On(5)] * 17, "at most 16"),
    ):
        with refused((TypeError, kvbm.BindError), words):
            move.copy([0], [0], stream=5, wait=wait)
    assert np.array_equal(d.buffer, d.before) and move.stats()["copies"] == 0
    with refused(kvbm.BindError, "pass stream="):
        move.copy([0], [0])


def neighbours_are_merged() -> None:
    def copies(src_ids: Any, dst_ids: Any, name: str = "vllm/BLHNC") -> Any:
        s, d = ends("d2h", name, name, 20, 20)
        before = count("single_copies") + count("batched_copies")
        kvbm.Transfer(s.pool, d.pool, "engine").copy(src_ids, dst_ids, stream=5)
        check(s, d, *zip(*((i, j) for i, j in zip(src_ids, dst_ids, strict=True) if -1 not in (i, j)), strict=True))
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


def registrations_are_not_crossed(direction: str, strategy: str) -> None:
    where = SIDES[direction]
    for far in ("vllm/BLHNC", "vllm/LBHNC", "vllm/flash_attn_nhd"):
        for near in ("vllm/BLHNC", "nhd"):
            names = (near, far) if direction == "d2h" else (far, near)
            s, d = (
                End(name, 64, side, dst=bool(i), pin=False)
                for i, (name, side) in enumerate(zip(names, where, strict=True))
            )
            host = d if direction == "d2h" else s
            begin, pages = host.buffer.ctypes.data, -(-host.buffer.size // 4096)
            edges = sorted({0, pages, *(pages * k // 5 for k in range(1, 5))})
            for a, b in itertools.pairwise(edges):
                _core.host_register(begin + 4096 * a, 4096 * (b - a))
            assert host.pool.pinned and host.pool.cuts.tolist() == [begin + 4096 * a for a in edges[1:-1]]
            move = kvbm.Transfer(
                s.pool, d.pool, strategy, chunk_bytes=16 * SHAPE.nbytes if strategy == "staged" else None
            )
            move.copy(range(60), range(2, 62), stream=5).synchronize()
            check(s, d, range(60), range(2, 62))
            for a in edges[:-1]:
                _core.host_unregister(begin + 4096 * a)


def a_few_multiprocessors() -> None:
    def most(direction: str, strategy: str, **given: int) -> Any:
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
            assert most(direction, strategy) == (16 if strategy == "direct" and direction != "d2d" else 0), (
                direction,
                strategy,
            )


def each_copy_has_a_word_of_its_own() -> None:
    def on_gpu(*ids: int) -> FakeCuda:
        return ids_on_gpu(np.array(ids))

    right, wrong = on_gpu(1, 2), on_gpu(1, 999)

    def is_told(done: Any) -> Any:
        try:
            done.synchronize()
        except kvbm.BindError as error:
            return "pair 1 of an earlier copy" in str(error)
        return False

    defer(1)
    s, d = ends("d2d", "nhd", "universal", 6, 6)
    move = kvbm.Transfer(s.pool, d.pool, "direct")

    def copy(ids: FakeCuda, stream: int = 5) -> Any:
        return move.copy(ids, on_gpu(3, 4), stream=stream)

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
    held, done = ids.owner, copy(ids)
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


def threads_are_each_told() -> None:
    sys.setswitchinterval(1e-6)
    ids = np.array([1, 999, 2])
    on_gpu = ids_on_gpu(ids)

    def is_told(move: kvbm.Transfer, start: threading.Barrier, k: int) -> bool:
        start.wait()
        try:
            move.copy(on_gpu, [3, 4, 5], stream=5 + k).synchronize()
        except kvbm.BindError:
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        for _ in range(100):
            s, d = ends("d2d", "nhd", "universal", 3, 6, shape=SMALL)
            work = partial(is_told, kvbm.Transfer(s.pool, d.pool), threading.Barrier(4))
            assert all(pool.map(work, range(4)))


def closed_beside_a_copy(direction: str) -> None:
    s, d = ends(direction, "nhd", "universal", 64, 64, shape=SMALL)
    move = kvbm.Transfer(s.pool, d.pool, "staged", chunk_bytes=2 * SMALL.nbytes)
    route = move._executor.route(None).route

    class Closes(On):
        def __cuda_stream__(self) -> tuple[int, int]:
            move.close()
            return super().__cuda_stream__()

    defer(1)
    move.copy(range(64), range(64), stream=5, wait=Closes(6)).synchronize()
    check(s, d, range(64), range(64))
    for copy in (lambda: move.copy([0], [0], stream=5), lambda: route.copy([0], [0], 5)):
        with refused(kvbm.BindError, "the transfer is closed"):
            copy()
    kvbm.Transfer(s.pool, d.pool, "staged", chunk_bytes=2 * SMALL.nbytes)  # frees it


def closed_pools_beside_copies() -> None:
    """A pool's own memory stays until the calls that use it have ended, and no later one begins."""
    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="uint16")
    ids = np.arange(1000)
    for which in (0, 1, 0, 1, 0, 1):
        pools = [kvbm.Pool.allocate(name, shape, ids.size, device="pinned") for name in ("nhd", "universal")]
        for array in pools[0].arrays:
            array[...] = 7
        move, seen = kvbm.Transfer(*pools), pools[1 - which].arrays
        del array

        def copy(move: kvbm.Transfer = move) -> int:
            for done in range(100):
                try:
                    move.copy(ids, ids)
                except kvbm.BindError as error:
                    assert "closed" in str(error)
                    return done
            raise AssertionError("not closed")

        with ThreadPoolExecutor(1) as threads:
            copied = threads.submit(copy)
            while not pools[1].arrays[0].any():
                pass
            pools[which].close()  # nothing else refers to its memory
            assert copied.result() >= 1 and all((each == 7).all() for each in seen)

    class Closes(On):
        pool: kvbm.Pool

        def __cuda_stream__(self) -> tuple[int, int]:
            self.pool.close()
            return super().__cuda_stream__()

    for where, which in itertools.product(("cuda:0", "pinned"), range(2)):
        digests = kvbm.Pool.allocate("nhd", SMALL, 1, device="pinned").arrays[0].ravel()[:4].view(np.uint64)
        for more in ({}, {"digests": digests}):
            pools = [kvbm.Pool.allocate("nhd", SMALL, 4, device=each) for each in ("cuda:0", where)]
            move, wait = kvbm.Transfer(*pools), Closes(6)
            wait.pool = pools[which]
            with refused(kvbm.BindError, "closed"):
                move.copy([1], [1], stream=5, wait=wait, **more)
            assert move.stats()["copies"] == 0


def closed_in_a_child() -> None:
    """A child that is forked during a copy of another thread does not wait for that when it closes the pools."""
    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="uint16")
    ids = np.arange(1000)
    pools = [kvbm.Pool.allocate(name, shape, ids.size) for name in ("nhd", "universal")]
    pools[0].arrays[0][...] = 7
    move, ended = kvbm.Transfer(*pools), threading.Event()

    def copy() -> None:
        while not ended.is_set():
            move.copy(ids, ids)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(copy)
        while not pools[1].arrays[0].any():
            pass
        try:
            for _ in range(5):
                child = os.fork()
                if not child:
                    for pool in pools:
                        pool.close()
                    os._exit(0)
                assert wait_for(child) == 0
        finally:
            ended.set()


def closed_by_two_threads() -> None:
    """Each of two threads that close a pool waits for the copies."""
    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="uint16")
    ids = np.arange(1000)
    for _ in range(3):
        pools = [kvbm.Pool.allocate(name, shape, ids.size) for name in ("nhd", "universal")]
        for array in pools[0].arrays:
            array[...] = 7
        move, seen = kvbm.Transfer(*pools), pools[1].arrays[0]
        with ThreadPoolExecutor(2) as threads:
            copied = threads.submit(move.copy, ids, ids)
            while not seen.any():
                pass
            closed = threads.submit(pools[1].close)
            while not pools[1].closed:
                pass
            pools[1].close()
            assert (seen == 7).all()
            copied.result()
            closed.result()


def wait_for(child: int) -> int:
    """The exit status of a child that ends at once."""
    for _ in range(1000):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def calls_of(call: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions in Python, and of functions and plain methods in C, that one call makes."""
    seen: list[str] = []
    sys.setprofile(lambda _, event, __: seen.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen.count("call") - 1, seen.count("c_call") - 1  # without the call itself, and that of setprofile


def warm_copies() -> None:
    """What a warm `Transfer.copy` calls: Python, C, and the driver."""
    ids = [np.arange(6), np.arange(6)[::-1].copy()]
    for direction in SIDES:
        s, d = ends(direction, "vllm/LBHNC", "universal", 20, 20)
        for strategy in ("direct", "staged", "engine"):
            move = transfer(s, d, strategy)
            found = []
            for given in (ids, [one.tolist() for one in ids]):
                copy = partial(move.copy, *given, stream=5)
                for _ in range(8):
                    copy().synchronize()
                before, submitted = count("driver_calls"), move.stats()["submissions"]
                done = copy()
                found.append((count("driver_calls") - before, move.stats()["submissions"] - submitted))
                done.synchronize()
                del done  # it keeps the transfer
                found.append(calls_of(lambda copy=copy: copy()))
            print(direction, strategy, *found[0], *found[1])
            assert found[:2] == found[2:], (direction, strategy, found)


def aside() -> None:
    """The table decides, but for the direct kernel, which `auto` takes for these batches; alone on the host it is refused."""
    for direction in ("d2h", "h2d"):
        for names, expected in ((("nhd", "universal"), {"staged"}), (("universal", "universal"), {"staged", "engine"})):
            s, d = ends(direction, *names, 20, 20)
            taken = {}
            for strategy in ("auto", "aside"):
                with kvbm.Transfer(s.pool, d.pool, strategy) as move:
                    taken[strategy] = set()
                    for count_ in (1, 3, 20):
                        d.refill(0)
                        taken[strategy].add(move.copy(range(count_), range(count_), stream=5).strategy)
                        pump()
                        check(s, d, range(count_), range(count_))
            assert taken["aside"] <= expected, (direction, names, taken)
            assert "direct" in taken["auto"], (direction, names, taken)
    with refused(kvbm.BindError, "'aside' needs a GPU"):
        host = kvbm.Pool.allocate("nhd", SHAPE, 3)
        kvbm.Transfer(host, kvbm.Pool.allocate("universal", SHAPE, 3), "aside")


def explain_and_auto() -> None:
    large = replace(SHAPE, nl=16, nh=8, hd=256)
    for direction in SIDES:
        names = ("universal", "nhd") if direction == "h2d" else ("nhd", "universal")  # whole blocks on the host's side
        s, d = ends(direction, *names, 16, 16, shape=large)
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
            assert "igest" not in text
        with kvbm.Transfer(s.pool, d.pool, verify=True) as move:
            text = move.explain()
            kernel = "sum_rows_o1_i3_w16" if direction == "d2d" else "few_rows_o4_i8_w16"
            assert f"\nDigests are fused into direct copies (one launch of {kernel})." in text
            assert ("\nDigests are fused into staged copies (" in text) == (direction != "d2d")
            far = {"d2d": "either side.", "d2h": "the destination is read", "h2d": "the source is read"}[direction]
            assert far in next(line for line in text.split("\n") if line.startswith("verify "))
    for strategy in ("direct", "staged", "engine"):
        s, d = ends("d2h", "nhd", "universal", 9, 9)
        assert "1 block (" in kvbm.Transfer(s.pool, d.pool, strategy).explain(1)
        assert kvbm.Transfer(s.pool, d.pool, strategy).explain(1).split("\n")[1].endswith(f"{strategy}.")


def options() -> None:
    s, d = ends("d2h", "nhd", "universal", 9, 9)

    def is_refused(words: str, *pools: kvbm.Pool, **given: Any) -> None:
        with refused(kvbm.BindError, words):
            kvbm.Transfer(*(pools or (s.pool, d.pool)), **given)

    is_refused("expected 'auto', 'aside', 'direct', 'staged' or 'engine'", strategy="fastest")
    is_refused("at least one block", strategy="staged", chunk_bytes=SHAPE.nbytes - 1)
    is_refused("at least one block", chunk_bytes=16)
    is_refused("only staged copies", strategy="direct", chunk_bytes=1 << 20)
    is_refused("only staged copies", strategy="engine", chunk_bytes=1 << 20)
    is_refused("expected a number of bytes", strategy="staged", chunk_bytes=True)
    is_refused("uses no multiprocessor", strategy="engine", max_sms=4)
    is_refused("from 1 on", max_sms=0)
    plain = End("universal", 9, "pinned", dst=True, pin=False)
    is_refused("host memory that GPUs cannot access", s.pool, plain.pool)
    is_refused("host memory that GPUs cannot access", plain.pool, s.pool)
    plain.pool.pin()
    kvbm.Transfer(s.pool, plain.pool)


def one_gpu_pool() -> None:
    one = End("universal", 12, 0)
    for strategy in ("direct", "staged", "engine"):
        one.buffer[:] = one.before
        move = kvbm.Transfer(one.pool, one.pool, strategy)
        with refused(kvbm.BindError, "both read and written"):
            move.copy([0, 1], [1, 2], stream=5)
        move.copy([0, 1, 2], [9, 10, 11], stream=5)
        want = oracle.expected_bytes(one.arena, one.arena, one.before, one.before, [0, 1, 2], [9, 10, 11])
        assert np.array_equal(one.buffer, want)


def fork_after_cuda() -> None:
    s, d = ends("d2h", "nhd", "universal", 9, 9)
    move = kvbm.Transfer(s.pool, d.pool, "staged")
    done = move.copy([0], [0], stream=5)
    pid = os.fork()
    if not pid:
        try:
            move.copy([1], [1], stream=5)
        except kvbm.CudaError as error:
            code = 7 if "fork" in str(error) else 8
        else:
            code = 0
        del move, done, s, d
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
