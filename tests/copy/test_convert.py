"""Conversions: skipped pairs, large batches, threads; on a GPU also the order of streams."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from test_layout import block_shape

import kvbm
import matrix
import oracle
import strategies
from kvbm import _core
from kvbm.layout import spec
from memory import Bound, aligned, placed, views

SHAPE = kvbm.BlockShape(nl=2, no=2, nh=4, nt=16, hd=32, dtype="bfloat16")


def check(src: Bound, dst: Bound, src_ids: Any, dst_ids: Any) -> None:
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids)
    assert np.array_equal(dst.buffer, want), oracle.explain(dst.arena, dst.buffer, want)
    assert src.untouched


def test_minus_one_skips_a_pair() -> None:
    src, dst = Bound("nhd", SHAPE, 4), Bound("universal", SHAPE, 5, dst=True)
    kvbm.convert(src.pool, dst.pool, [3, -1, 2, 1], [0, 1, -1, 4])
    check(src, dst, [3, 1], [0, 4])


def test_only_skips() -> None:
    src, dst = Bound("nhd", SHAPE, 4), Bound("universal", SHAPE, 5, dst=True)
    kvbm.convert(src.pool, dst.pool, [-1, -1], [0, 1])
    assert dst.untouched


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int64), np.empty(0, np.float32)])
def test_empty_batch(empty: Any) -> None:
    src, dst = Bound("nhd", SHAPE, 4), Bound("universal", SHAPE, 5, dst=True)
    assert kvbm.convert(src.pool, dst.pool, empty, empty) is None
    assert dst.untouched


def test_ids_on_one_side() -> None:
    src, dst = Bound("nhd", SHAPE, 4), Bound("universal", SHAPE, 5, dst=True)
    kvbm.convert(src.pool, dst.pool, [3, 1], None)
    check(src, dst, [3, 1], [0, 1])
    src, dst = Bound("nhd", SHAPE, 4), Bound("universal", SHAPE, 5, dst=True)
    kvbm.convert(src.pool, dst.pool, dst_ids=[4, 0, 2])
    check(src, dst, [0, 1, 2], [4, 0, 2])


@pytest.mark.slow
def test_many_small_blocks() -> None:
    """More ids and tables than fit a kernel's parameters."""
    shape = kvbm.BlockShape(nl=3, no=2, nh=1, nt=2, hd=2, dtype="int16")
    src, dst = Bound("nhd", shape, 2000), Bound("hnd", shape, 2100, dst=True)
    rng = np.random.default_rng(7)
    src_ids, dst_ids = rng.permutation(2000), rng.permutation(2100)[:2000]
    kvbm.convert(src.pool, dst.pool, src_ids, dst_ids)
    check(src, dst, src_ids, dst_ids)


@pytest.mark.threads
@pytest.mark.parametrize(
    "pair", [("hf/dynamic_cache", "nhd"), ("nhd", "universal"), ("universal", "vllm/paged_attn_v0")]
)
def test_large_blocks_on_all_cores(pair: tuple[str, str]) -> None:
    """Blocks so large that several threads copy them with non-temporal stores."""
    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=64, hd=128, dtype="bfloat16")
    src, dst = Bound(pair[0], shape, 5), Bound(pair[1], shape, 6, dst=True)
    kvbm.convert(src.pool, dst.pool, [4, 0, 2, 1], [5, 1, 0, 3])
    check(src, dst, [4, 0, 2, 1], [5, 1, 0, 3])


@given(strategies.pair(limit=900))
@strategies.cases(250)
@pytest.mark.slow  # 0.5 s
@pytest.mark.sanitize
def test_random_layouts_on_the_host(drawn: Any) -> None:
    """Layouts without compiled kernels use the general kernels, with any number of modes."""
    sizes, one, other = drawn
    try:
        arenas = [sizes.placed(x.order).layout_bytes(align) for x, align in ((one, 2), (other, 1))]
    except oracle.IllegalError:
        return
    if any(len(arena.placed.id_step()) > 1 for arena in arenas):
        return
    source, before = oracle.source_bytes(arenas[0], 0), oracle.dest_bytes(arenas[1], 0)
    buffers = aligned(source), aligned(before)
    pools = [
        kvbm.Pool(spec.parse(x.yaml), block_shape(sizes), views(arena, buffer, sizes.dtype, "numpy"))
        for x, arena, buffer in zip((one, other), arenas, buffers, strict=True)
    ]
    ids = list(range(sizes.num_blocks))
    if not oracle.copyable(arenas[0].placed, arenas[1].placed):
        with pytest.raises(kvbm.PlanError):
            kvbm.convert(*pools, ids, ids[::-1])
        assert np.array_equal(buffers[1], before)
        return
    kvbm.convert(*pools, ids, ids[::-1])
    want = oracle.expected_bytes(*arenas, source, before, ids, ids[::-1])
    assert np.array_equal(buffers[1], want), oracle.explain(arenas[1], buffers[1], want)


def test_there_and_back() -> None:
    names = sorted(set(matrix.names()) - {"operational"})
    for name in names:
        src, middle, back = Bound("nhd", SHAPE, 3), Bound(name, SHAPE, 4, dst=True), Bound("nhd", SHAPE, 3, dst=True)
        kvbm.convert(src.pool, middle.pool, [2, 0, 1], [3, 1, 0])
        kvbm.convert(middle.pool, back.pool, [3, 1, 0], [2, 0, 1])
        positions = src.arena.positions([0, 1, 2])
        got, want = (oracle.gather(b.buffer, positions, 2) for b in (back, src))
        assert np.array_equal(got, want), name


@pytest.mark.parametrize("name", ["universal", "vllm/paged_attn_v0"])
def test_threads_share_pools(name: str) -> None:
    """Many Python threads use the same two pools, each with different blocks."""
    blocks, threads = 64, 8
    src, dst = Bound("nhd", SHAPE, blocks), Bound(name, SHAPE, blocks, dst=True)
    start = threading.Barrier(threads)

    def work(k: int) -> None:
        start.wait()
        for i in range(k, blocks, threads):
            kvbm.convert(src.pool, dst.pool, [i], [blocks - 1 - i])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    check(src, dst, list(range(blocks)), list(range(blocks))[::-1])


def test_threads_with_pools_of_their_own() -> None:
    pairs = [pair for pair in matrix.pairs() if not any(map(matrix.latent, pair))][::7]
    start = threading.Barrier(8)

    def work(k: int) -> None:
        start.wait()
        for name_src, name_dst in pairs[k::8]:
            src, dst = Bound(name_src, SHAPE, 3), Bound(name_dst, SHAPE, 4, dst=True)
            kvbm.convert(src.pool, dst.pool, [2, 0, 1], [0, 3, 1])
            check(src, dst, [2, 0, 1], [0, 3, 1])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_the_lock_is_released() -> None:
    """Other Python threads run during a conversion."""
    shape = kvbm.BlockShape(nl=8, no=2, nh=8, nt=64, hd=128, dtype="float32")
    pools = [kvbm.Pool.allocate(kvbm.load(name), shape, 8) for name in ("nhd", "universal")]
    for pool in pools:
        for array in pool.arrays:
            array.fill(1)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks[0]
        for _ in range(3):
            kvbm.convert(*pools)
        during = ticks[0] - before
    finally:
        done.set()
        thread.join()
    assert during > 100


def test_the_pool_keeps_its_arrays() -> None:
    """Arrays to which only the pool refers are not freed."""
    src = Bound("nhd", SHAPE, 3)
    arena = placed(matrix.orders()["universal"], SHAPE, 3).layout_bytes()
    pool = kvbm.Pool(kvbm.load("universal"), SHAPE, [np.zeros(s.shape, np.uint16) for s in arena.placed.spaces])
    garbage = [np.full(s.shape, 7, np.uint16) for s in arena.placed.spaces]
    kvbm.convert(src.pool, pool)
    del garbage
    want = oracle.coded(arena.placed, range(3), 0)
    got = np.stack([np.asarray(a) for a in pool.arrays])  # b h l o t d
    assert np.array_equal(got.view(np.uint8).reshape(*got.shape, 2).transpose(0, 2, 3, 1, 4, 5, 6), want)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def _device(name: str, shape: Any, blocks: int, dst: bool) -> tuple[Any, Any, Any, Any]:
    """Pool, arena, torch buffer, its bytes."""
    import torch

    arena = placed(matrix.orders()[name], shape, blocks).layout_bytes()
    data = oracle.dest_bytes(arena, 0) if dst else oracle.source_bytes(arena, 0)
    buffer = torch.from_numpy(data).cuda()
    torch.cuda.synchronize()
    return kvbm.Pool(kvbm.load(name), shape, views(arena, buffer, shape.dtype, "torch")), arena, buffer, data


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pair", [("nhd", "universal"), ("universal", "vllm/paged_attn_v0"), ("hf/dynamic_cache", "nhd")]
)
def test_fill_copy_refill_on_one_stream_sanitize(pair: tuple[str, str]) -> None:
    """The source is filled before and overwritten after the copy in stream order: the copy reads the first contents."""
    import torch

    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="bfloat16")
    src, src_arena, src_buffer, source = _device(pair[0], shape, 40, dst=False)
    dst, dst_arena, dst_buffer, before = _device(pair[1], shape, 40, dst=True)
    later = torch.from_numpy(oracle.noise(src_arena.nbytes, 99)).cuda()
    original, stream = src_buffer.clone(), torch.cuda.Stream()
    ids = list(range(40))
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(stream):
            src_buffer.copy_(later)
            torch.cuda._sleep(2_000_000)  # without it a copy on the wrong stream might win the race by luck
            src_buffer.copy_(original)
            kvbm.convert(src, dst, ids, ids[::-1])  # torch's current stream
            src_buffer.copy_(later)
        stream.synchronize()
        want = oracle.expected_bytes(src_arena, dst_arena, source, before, ids, ids[::-1])
        assert np.array_equal(dst_buffer.cpu().numpy(), want)
        dst_buffer.copy_(torch.from_numpy(before))
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_race_without_order_is_seen() -> None:
    """The control for the test above: on an unordered stream the same copy reads wrong bytes."""
    import torch

    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="bfloat16")
    src, src_arena, src_buffer, source = _device("nhd", shape, 40, dst=False)
    dst, dst_arena, dst_buffer, before = _device("universal", shape, 40, dst=True)
    later = torch.from_numpy(oracle.noise(src_arena.nbytes, 99)).cuda()
    original, stream, other = src_buffer.clone(), torch.cuda.Stream(), torch.cuda.Stream()
    kvbm.convert(src, dst, stream=other)  # nothing is loaded for the first time below
    torch.cuda.synchronize()
    dst_buffer.copy_(torch.from_numpy(before))
    with torch.cuda.stream(stream):
        src_buffer.copy_(later)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        src_buffer.copy_(original)
    kvbm.convert(src, dst, stream=other)  # does not wait for `stream`
    torch.cuda.synchronize()
    want = oracle.expected_bytes(src_arena, dst_arena, source, before, range(40), range(40))
    assert not np.array_equal(dst_buffer.cpu().numpy(), want)


@pytest.mark.gpu
def test_ids_may_change_at_once() -> None:
    """Ids are copied before the call returns, for any number of ids."""
    import torch

    shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="float16")
    for blocks in (16, 3000):
        src, src_arena, _, source = _device("universal", shape, blocks, dst=False)
        dst, dst_arena, dst_buffer, before = _device("vllm/LBHNC", shape, blocks, dst=True)
        stream = torch.cuda.Stream()
        rng = np.random.default_rng(blocks)
        src_ids, dst_ids = rng.permutation(blocks).astype(np.int64), rng.permutation(blocks).astype(np.int64)
        kept = src_ids.copy(), dst_ids.copy()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
        kvbm.convert(src, dst, src_ids, dst_ids, stream=stream)
        src_ids[:], dst_ids[:] = 0, 0
        stream.synchronize()
        want = oracle.expected_bytes(src_arena, dst_arena, source, before, *kept)
        assert np.array_equal(dst_buffer.cpu().numpy(), want)


@pytest.mark.gpu
def test_many_batches_in_flight() -> None:
    """More batches than any ring has slots, without waiting."""
    import torch

    shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="float16")
    blocks = 4096
    src, src_arena, _, source = _device("universal", shape, blocks, dst=False)
    dst, dst_arena, dst_buffer, before = _device("vllm/LBHNC", shape, blocks, dst=True)
    stream = torch.cuda.Stream()
    rng = np.random.default_rng(5)
    src_ids, dst_ids = rng.permutation(blocks), rng.permutation(blocks)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
    for part in np.array_split(np.arange(blocks), 64) + np.array_split(np.arange(blocks), 3):
        kvbm.convert(src, dst, src_ids[part].copy(), dst_ids[part].copy(), stream=stream)
    stream.synchronize()
    want = oracle.expected_bytes(src_arena, dst_arena, source, before, src_ids, dst_ids)
    assert np.array_equal(dst_buffer.cpu().numpy(), want)


@pytest.mark.gpu
def test_minus_one_skips_on_a_gpu_sanitize() -> None:
    import torch

    src, src_arena, _, source = _device("nhd", SHAPE, 4, dst=False)
    dst, dst_arena, dst_buffer, before = _device("vllm/paged_attn_v0", SHAPE, 5, dst=True)
    kvbm.convert(src, dst, [3, -1, 2, 1], [0, 1, -1, 4])
    torch.cuda.synchronize()
    want = oracle.expected_bytes(src_arena, dst_arena, source, before, [3, 1], [0, 4])
    assert np.array_equal(dst_buffer.cpu().numpy(), want)


@pytest.mark.gpu
def test_threads_on_streams_of_their_own() -> None:
    import torch

    blocks, threads = 64, 8
    src, src_arena, _, source = _device("nhd", SHAPE, blocks, dst=False)
    dst, dst_arena, dst_buffer, before = _device("universal", SHAPE, blocks, dst=True)
    start = threading.Barrier(threads)

    def work(k: int) -> None:
        stream = torch.cuda.Stream()
        start.wait()
        with torch.cuda.stream(stream):
            for i in range(k, blocks, threads):
                kvbm.convert(src, dst, [i], [blocks - 1 - i])
        stream.synchronize()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    want = oracle.expected_bytes(src_arena, dst_arena, source, before, range(blocks), range(blocks)[::-1])
    assert np.array_equal(dst_buffer.cpu().numpy(), want)


@pytest.mark.gpu
def test_refusals_on_a_gpu_leave_the_destination() -> None:
    import torch

    src, _, _, _ = _device("nhd", SHAPE, 4, dst=False)
    dst, _, dst_buffer, before = _device("universal", SHAPE, 5, dst=True)
    host = Bound("universal", SHAPE, 5, dst=True)
    for src_ids, dst_ids, match in (([4], [0], "4"), ([0, 1], [2, 2], "2"), ([0], [5], "5"), ([0, 1], [0], "2.*1")):
        with pytest.raises(kvbm.BindError, match=match):
            kvbm.convert(src, dst, src_ids, dst_ids)
    with pytest.raises(kvbm.BindError, match="destination is in host memory that GPUs cannot access"):
        kvbm.convert(src, host.pool)
    with pytest.raises(TypeError, match="stream"):
        kvbm.convert(src, dst, [0], [0], stream="default")
    torch.cuda.synchronize()
    assert np.array_equal(dst_buffer.cpu().numpy(), before) and host.untouched


@pytest.mark.gpu
def test_allocate_on_a_gpu() -> None:
    """Memory that kvbm owns: CUDA array interface, freed with the pool."""
    import torch

    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=128, dtype="bfloat16")
    pool = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), shape, 512, "cuda:0")
    address = int(pool.addresses[0])
    begin, end = _core.memory_range(address, pinned=False)
    assert pool.device == "cuda:0" and begin == address and end - begin >= pool.nbytes
    src, src_arena, _, source = _device("nhd", shape, 8, dst=False)
    back, back_arena, back_buffer, before = _device("nhd", shape, 8, dst=True)
    stream = torch.cuda.Stream()
    kvbm.convert(src, pool, range(8), range(500, 508), stream=stream)
    kvbm.convert(pool, back, range(500, 508), range(8), stream=stream)
    stream.synchronize()
    want = oracle.expected_bytes(src_arena, back_arena, source, before, range(8), range(8))
    assert np.array_equal(back_buffer.cpu().numpy(), want)
    memory, close = weakref.ref(pool._owned[0]), pool._owned[0].close
    del pool
    assert memory() is None, [repr(one)[:200] for one in gc.get_referrers(memory())]
    assert not close.alive  # cuMemFree was called for it; its address may be another allocation's by now
    assert _core.memory_range(address, pinned=False) != (begin, end)
