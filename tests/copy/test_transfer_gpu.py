"""Transfers on real GPUs: every strategy in every direction, their order on streams, graphs, threads, and two GPUs.

They test what the fake driver (test_transfer.py) cannot: kernels on pinned memory, real races, real graphs.  Tests whose
name ends in `alone` read the GPU's free memory and are skipped while other test processes use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import kvbm
import matrix
import oracle
from memory import interface_views, numpy_views, placed, torch_views

pytestmark = pytest.mark.gpu

SHAPE = kvbm.BlockShape(nl=3, no=2, nh=2, nt=16, hd=64, dtype="bfloat16")
TINY = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")
NAMES = [
    "nhd", "universal", "vllm/LBHNC", "vllm/flash_attn_nhd", "vllm/paged_attn_v0", "hf/dynamic_cache",
    "operational_hnd", "vllm/BLNHC",
]  # fmt: skip
SIDES = {"d2d": ("cuda:0", "cuda:0"), "d2h": ("cuda:0", "pinned"), "h2d": ("pinned", "cuda:0")}
DIRECTIONS = sorted(SIDES)
STRATEGIES = ["direct", "staged", "engine"]
SLEEP = 60_000_000  # cycles: some 30 ms, in which every copy of these tests is long done


@contextlib.contextmanager
def held(stream: Any) -> Iterator[None]:
    """Work on the stream does not begin until the block ends, or 20 s have passed."""
    import torch

    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    (status,) = driver.cuStreamWaitValue32(stream.cuda_stream, gate.data_ptr(), 1, 0)
    assert not status, status
    late = threading.Timer(20, gate.fill_, (1,))
    late.start()
    try:
        yield
    finally:
        late.cancel()
        gate.fill_(1)
        torch.cuda.synchronize()


class End:
    """A pool on a guarded buffer on a GPU or in pinned memory, with its original bytes."""

    def __init__(
        self, name: str, blocks: int, where: str, *, dst: bool = False, shape: kvbm.BlockShape = SHAPE, align: int = 0
    ):
        import torch

        self.is_dst = dst
        how = ("steps", "rows", "scattered")[(blocks + len(name) + dst) % 3]
        self.arena = placed(matrix.orders()[name], shape, blocks).layout_bytes(align, how)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        if where == "pinned":
            self.buffer = torch.empty(self.before.size, dtype=torch.uint8).pin_memory()
            self.buffer.copy_(torch.from_numpy(self.before))
            arrays: list[Any] = numpy_views(self.arena, self.buffer.numpy(), shape.dtype)
        else:
            self.buffer = torch.from_numpy(self.before).to(where)
            torch_can = align % shape.itemsize == 0
            arrays = (torch_views if torch_can else interface_views)(self.arena, self.buffer, shape.dtype)
            torch.cuda.synchronize(where)
        self.pool = kvbm.Pool(kvbm.load(name), shape, arrays)

    def refill(self, salt: int = 0) -> None:
        import torch

        self.before = (oracle.dest_bytes if self.is_dst else oracle.source_bytes)(self.arena, salt)
        self.buffer.copy_(torch.from_numpy(self.before))
        torch.cuda.synchronize()

    @property
    def bytes(self) -> np.ndarray:
        return self.buffer.cpu().numpy()


def ends(direction: str, src: str, dst: str, src_blocks: int, dst_blocks: int, **rest: Any) -> tuple[End, End]:
    a, b = SIDES[direction]
    return End(src, src_blocks, a, **rest), End(dst, dst_blocks, b, dst=True, **rest)


def wanted(src: End, dst: End, src_ids: Any, dst_ids: Any) -> np.ndarray:
    return oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, src_ids, dst_ids)


def check(src: End, dst: End, src_ids: Any, dst_ids: Any, what: Any = "") -> None:
    import torch

    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    want, got = wanted(src, dst, src_ids, dst_ids), dst.bytes
    assert np.array_equal(got, want), f"{what}\n{oracle.explain(dst.arena, got, want)}"
    assert np.array_equal(src.bytes, src.before), f"{what}: the source was written"


def batch(rng: np.random.Generator, n: int, src_blocks: int, dst_blocks: int) -> tuple[np.ndarray, ...]:
    """Ids with every fifth pair skipped, and the pairs that are copied."""
    src, dst = rng.permutation(src_blocks)[:n], rng.permutation(dst_blocks)[:n]
    kept = np.arange(n) % 5 != 4
    src[np.arange(n) % 10 == 4], dst[np.arange(n) % 10 == 9] = -1, -1
    return src, dst, src[kept].copy(), dst[kept].copy()


def stream_of(index: int = 0) -> Any:
    import torch

    return torch.cuda.Stream(index)


# ---- the matrix ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto", "aside"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_matrix(direction: str, strategy: str, dtype: str) -> None:
    """Bit-exact, guards and other blocks unchanged, skipped pairs skipped; alignments, chunks and batches vary."""
    rng = np.random.default_rng(len(strategy) + 10 * DIRECTIONS.index(direction))
    stream = stream_of()
    # Where single elements move, the engine's copies are as many as they are.
    shape = dataclasses.replace(TINY if strategy == "engine" else SHAPE, dtype=dtype)
    turns = itertools.cycle(range(60))
    for number, (src, dst) in enumerate(itertools.product(NAMES, NAMES)):
        if (number + len(dtype)) % 2:
            continue
        turn = next(turns)
        n = (1, 4, 7, 33)[turn % 4]
        s, d = ends(direction, src, dst, n + 3, n + 5, shape=shape, align=(0, 0, 2, 8, 1)[turn % 5])
        chunk = (None, shape.nbytes, 3 * shape.nbytes + 64)[turn % 3] if strategy in ("staged", "auto") else None
        with kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=chunk) as move:
            src_ids, dst_ids, src_kept, dst_kept = batch(rng, n, n + 3, n + 5)
            done = move.copy(src_ids.astype(np.int32), dst_ids.astype(np.int32), stream=stream)
            done.synchronize()
            assert done.query()
            check(s, d, src_kept, dst_kept, (src, dst, n, chunk))
            assert strategy in ("auto", "aside", done.strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ids_may_change_at_once(direction: str, strategy: str) -> None:
    """For any number of ids; also none, one block, and lists; also on the legacy default stream."""
    import torch

    rng = np.random.default_rng(3)
    chunk = 8 * TINY.nbytes if strategy == "staged" else None
    # The driver's queue is only so long: where a block is many copies, few blocks fill it, and then any call waits.
    for n in (0, 1, {"direct": 2500, "staged": 20, "engine": 2}[strategy]):
        for stream in (stream_of(), torch.cuda.default_stream()):
            s, d = ends(direction, "universal", "vllm/flash_attn_nhd", n + 3, n + 5, shape=TINY)
            move = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=chunk)
            move.copy([0], [0], stream=stream).synchronize()  # nothing is loaded below
            d.refill()
            src_ids, dst_ids, src_kept, dst_kept = batch(rng, n, n + 3, n + 5)
            done = None  # it kept the pools of the turn before, and giving back pinned memory waits for the GPU
            gc.collect()
            with held(stream):
                done = move.copy(src_ids, dst_ids.tolist() if n == 1 else dst_ids, stream=stream)
                assert n == 0 or not done.query(), "the call waited for the stream"
                src_ids[:] = dst_ids[:] = 0
            check(s, d, src_kept, dst_kept, n)


@pytest.mark.parametrize("max_sms", [1, 8, 132])
@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_few_multiprocessors(direction: str, strategy: str, max_sms: int) -> None:
    for src, dst in (
        ("nhd", "universal"),
        ("universal", "vllm/paged_attn_v0"),
        ("vllm/paged_attn_v0", "hf/dynamic_cache"),
    ):
        s, d = ends(direction, src, dst, 40, 44)
        ids = list(range(40)), [(7 * i + 1) % 44 for i in range(40)]
        kvbm.Transfer(s.pool, d.pool, strategy, max_sms=max_sms).copy(*ids, stream=stream_of())
        check(s, d, *ids, (src, dst))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layers_of_a_stage(direction: str, strategy: str) -> None:
    """Layer by layer, from a pool of all layers to that of a stage which holds the last two; then in one call."""
    stage = dataclasses.replace(SHAPE, nl=2)
    a, b = SIDES[direction]
    for src, dst in itertools.product(("nhd", "universal", "vllm/paged_attn_v0"), ("nhd", "universal", "vllm/LBHNC")):
        for ranges in (((1, 2), (2, 3)), ((1, 3),)):
            s, d = End(src, 6, a), End(dst, 7, b, dst=True, shape=stage)
            move, stream = kvbm.Transfer(s.pool, d.pool, strategy), stream_of()
            for first, last in ranges:
                layers = range(first, last), range(first - 1, last - 1)
                done = move.copy([5, 0, 3], [6, 1, 2], layers=layers, stream=stream)
            done.synchronize()
            want = d.before.copy()
            read = s.arena.positions([5, 0, 3])[:, 1:3]
            oracle.scatter(want, d.arena.positions([6, 1, 2]), oracle.gather(s.before, read, 2))
            got = d.bytes
            assert np.array_equal(got, want), (src, dst, ranges, oracle.explain(d.arena, got, want))


def test_pools_of_its_own() -> None:
    """Allocated pinned memory and GPU memory, in both directions: one slab, many allocations, without torch."""
    names = "nhd", "universal"
    shape = dataclasses.replace(SHAPE, dtype="uint16")
    host = [kvbm.Pool.allocate(kvbm.load(name), shape, 20, "pinned") for name in names]
    gpu = kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), shape, 20, "cuda:0")
    rng = np.random.default_rng(1)
    for pool in host:
        for array in pool.arrays:
            array[...] = rng.integers(0, 1 << 16, array.shape, np.uint16)
    stream = stream_of()
    for strategy in STRATEGIES:
        with kvbm.Transfer(host[0], gpu, strategy) as there, kvbm.Transfer(gpu, host[1], strategy) as back:
            done = there.copy(range(20), range(20)[::-1], stream=stream)
            back.copy(range(20)[::-1], range(20), stream=stream, wait=done).synchronize()
        got, want = (np.stack([np.asarray(a) for a in pool.arrays]) for pool in reversed(host))
        want = want.reshape(20, shape.nl, 2, shape.nt, shape.nh, shape.hd).transpose(0, 4, 1, 2, 3, 5)
        assert np.array_equal(got, want), strategy
        for array in host[1].arrays:
            array.fill(0)
    for pool in (gpu, *host):
        pool.close()


def test_what_is_explained_runs() -> None:
    for direction in DIRECTIONS:
        s, d = ends(direction, "nhd", "universal", 300, 300)
        move, stream = kvbm.Transfer(s.pool, d.pool), stream_of()
        text = move.explain()
        for n in (1, 4, 16, 64, 256):
            done = move.copy(range(n), range(n), stream=stream)
            line = next(line for line in text.splitlines() if line.startswith(f"{n} block"))
            assert line.endswith(f": {done.strategy}."), line
        check(s, d, range(256), range(256))
        assert move.stats()["blocks"] == 1 + 4 + 16 + 64 + 256


def test_the_current_stream_is_torchs() -> None:
    """By default the order is that of torch's current stream of the pool's GPU."""
    import torch

    for direction in DIRECTIONS:
        s, d = ends(direction, "nhd", "universal", 8, 8)
        move, stream = kvbm.Transfer(s.pool, d.pool), stream_of()
        original = torch.from_numpy(s.before).cuda()
        move.copy()
        s.buffer.copy_(torch.from_numpy(oracle.noise(s.arena.nbytes, 9)))
        d.refill()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP // 4)
            s.buffer.copy_(original, non_blocking=True)
            move.copy()
        check(s, d, range(8), range(8), direction)


@pytest.mark.parametrize("ids_on", ["host", "device"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto", "aside"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_pairs_than_blocks(direction: str, strategy: str, ids_on: str) -> None:
    """Sources may be repeated: batches larger than the pool, with skipped pairs, ids in the parameters and uploaded ids."""
    import torch

    small = kvbm.BlockShape(nl=4, no=2, nh=1, nt=4, hd=32, dtype="bfloat16")
    if (
        ids_on == "device"
        and strategy != "direct"
        and strategy != "auto"
        and (strategy, direction) != ("staged", "h2d")
    ):
        pytest.skip("refused: the copy engine needs these ids on the host")
    s, d = ends(direction, "universal", "nhd", 2, 500, shape=small)
    for n in (64, 65, 500):
        for skipped in (0, 7):
            d.refill(n)
            src, dst = np.arange(n) % 2, np.arange(n)
            if skipped:
                src[::skipped] = dst[3::skipped] = -1
            given: Any = dst if ids_on == "host" else torch.from_numpy(dst).cuda()
            torch.cuda.synchronize()
            kvbm.Transfer(s.pool, d.pool, strategy).copy(src, given, stream=stream_of()).synchronize()
            kept = (src >= 0) & (dst >= 0)
            check(s, d, src[kept], dst[kept], (n, skipped))


# ---- ids on the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto", "aside"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ids_on_the_device(direction: str, strategy: str, kind: str) -> None:
    """Read when the kernel runs, not when the copy is enqueued; refused if the copy engine would need them."""
    import torch

    s, d = ends(direction, "nhd", "universal", 9, 11)
    move, stream = kvbm.Transfer(s.pool, d.pool, strategy), stream_of()
    src, dst = (torch.zeros(4, dtype=getattr(torch, kind), device="cuda") for _ in range(2))
    real = [torch.tensor(ids, dtype=src.dtype, device="cuda") for ids in ([8, 1, -1, 5], [1, 8, 3, -1])]
    wrong = [torch.tensor(ids, dtype=src.dtype, device="cuda") for ids in ([8, 1, 9, 5], [1, 8, 3, 11])]
    if strategy in ("direct", "auto"):
        calls: tuple[Any, ...] = ((src, dst), ([8, 1, 0, 5], dst), (src, [1, 8, 3, 0]), (src, None), (None, dst))
    elif strategy in ("staged", "aside") and direction == "h2d":
        calls = (([8, 1, 0, 5], dst), (None, dst), ([8, -1, 0, 5], dst))
        refused: tuple[Any, ...] = ((src, dst), (src, [0, 1, 2, 3]))
        sentence = "staged: src_ids lie on the GPU"
    else:
        calls, refused = (), ((src, dst), ([8, 1, 0, 5], dst), (src, [1, 8, 3, 0]))
        sentence = f"{'staged' if strategy == 'aside' else strategy}: block ids lie on the GPU"
    if strategy not in ("direct", "auto"):
        for ids in refused:
            with pytest.raises(kvbm.BindError, match=f"{sentence}.*strategy='direct'"):
                move.copy(*ids, stream=stream)
        torch.cuda.synchronize()
        assert np.array_equal(d.bytes, d.before)
    for ids in calls:
        for given in (real, wrong):
            d.refill()
            src.fill_(7), dst.fill_(7)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                src.copy_(given[0]), dst.copy_(given[1])
            done = move.copy(*ids, stream=stream)
            torch.cuda.synchronize()
            one, other = (
                held.cpu().numpy() if i is tensor else np.array(range(4) if i is None else i)
                for i, tensor, held in ((ids[0], src, given[0]), (ids[1], dst, given[1]))
            )
            kept = (one >= 0) & (other >= 0) & (one < 9) & (other < 11)
            check(s, d, one[kept], other[kept], (given is wrong, ids))
            if given is wrong:
                with pytest.raises(kvbm.BindError, match=r"ids on the device: pair [23] of an earlier copy"):
                    done.synchronize()
            done.synchronize()


def test_device_ids_that_are_refused() -> None:
    import torch

    s, d = ends("d2d", "nhd", "universal", 9, 11)
    move, stream = kvbm.Transfer(s.pool, d.pool), stream_of()
    ids, shrunk = (torch.zeros(8, dtype=torch.int64, device="cuda") for _ in range(2))
    shrunk.untyped_storage().resize_(56)
    for given, match in (
        ((ids[::2], [0, 1, 2, 3]), "contiguous"),
        ((ids.float(), [0] * 8), "int32 or int64"),
        ((ids.view(2, 4), [0] * 8), "one axis"),
        ((ids, ids.int()), "one width"),
        ((ids, [0, 1]), "as many source as destination ids, got 8 and 2"),
        ((ids[:2], [3, 3]), r"dst_ids\[1\] is 3, as is dst_ids\[0\]"),
        ((ids[:2], [3, 11]), r"dst_ids\[1\] is 11"),
        ((torch._neg_view(ids), [0] * 8), "src_ids: expected integers, got a tensor that cannot be read"),
        ((shrunk, [0] * 8), "src_ids: expected integers, got a tensor that cannot be read"),
    ):
        with pytest.raises(kvbm.BindError, match=match):
            move.copy(*given, stream=stream)
    torch.cuda.synchronize()
    assert np.array_equal(d.bytes, d.before)


# ---- order ---------------------------------------------------------------------------------------------------------


def core_event(stream: Any) -> Any:
    core = pytest.importorskip("cuda.core")
    core.Device(0).set_current()
    return core.Stream.from_handle(stream.cuda_stream).record()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_producers(direction: str, strategy: str) -> None:
    """The source is written late, on another stream: a copy without a wait is wrong, and each way to wait is right."""
    import torch

    s, d = ends(direction, "nhd", "universal", 16, 16)
    move, writer, stream = kvbm.Transfer(s.pool, d.pool, strategy), stream_of(), stream_of()
    original = torch.from_numpy(s.before).cuda()
    stale = torch.from_numpy(oracle.noise(s.arena.nbytes, 9)).cuda()
    move.copy([0], [0], stream=stream).synchronize()

    def event() -> Any:
        recorded = torch.cuda.Event()
        recorded.record(writer)
        return recorded

    ways: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "another stream": stream_of,
        "event": event,
        "stream": lambda: writer,
        "list": lambda: [stream_of(), event(), writer],
        "cuda.core": lambda: core_event(writer),
    }
    for name, way in ways.items():
        s.buffer.copy_(stale)
        d.refill()
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(SLEEP)
            s.buffer.copy_(original, non_blocking=True)
        move.copy(range(16), range(16), stream=stream, wait=way())
        torch.cuda.synchronize()
        right = np.array_equal(d.bytes, wanted(s, d, range(16), range(16)))
        assert right == (name not in ("nothing", "another stream")), name


@pytest.mark.parametrize("strategies", list(itertools.product(STRATEGIES, STRATEGIES)))
def test_one_copy_waits_for_another(strategies: tuple[str, str]) -> None:
    """To the host on one stream and back on another: right with ``wait=done``, wrong without."""
    import torch

    s, m, d = (
        End("nhd", 16, "cuda:0"),
        End("universal", 16, "pinned", dst=True),
        End("hf/dynamic_cache", 16, "cuda:0", dst=True),
    )
    out, back = kvbm.Transfer(s.pool, m.pool, strategies[0]), kvbm.Transfer(m.pool, d.pool, strategies[1])
    first, second = stream_of(), stream_of()
    back.copy(stream=second, wait=out.copy(stream=first)).synchronize()
    # The engine is given every run by itself, which beside other tests takes the processor a while.
    pause = 8 * SLEEP if strategies[0] == "engine" else SLEEP
    for waits in (False, True):
        m.refill(), d.refill()
        with torch.cuda.stream(first):
            torch.cuda._sleep(pause)
        done = out.copy(stream=first)
        assert not done.query()
        back.copy(stream=second, wait=done if waits else None)
        torch.cuda.synchronize()
        assert done.query()
        middle = wanted(s, m, range(16), range(16))
        assert np.array_equal(m.bytes, middle)
        want = oracle.expected_bytes(m.arena, d.arena, middle, d.before, range(16), range(16))
        assert np.array_equal(d.bytes, want) == waits


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_consumers(direction: str, strategy: str) -> None:
    """A reader on another stream reads stale bytes, unless that stream waits for the copy."""
    import torch

    s, d = ends(direction, "nhd", "universal", 16, 16)
    move, reader, stream = kvbm.Transfer(s.pool, d.pool, strategy), stream_of(), stream_of()
    ids = range(1 if strategy == "engine" else 16)  # a full queue of the driver's would make the call wait
    move.copy([0], [0], stream=stream).synchronize()
    seen = torch.empty(d.arena.nbytes, dtype=torch.uint8, device="cuda")
    for waits in (False, True):
        d.refill()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
        done = move.copy(ids, ids, stream=stream)
        if waits:
            done.wait(reader)
        with torch.cuda.stream(reader):
            seen.copy_(d.buffer, non_blocking=True)
        torch.cuda.synchronize()
        assert np.array_equal(seen.cpu().numpy(), wanted(s, d, ids, ids)) == waits
        check(s, d, ids, ids)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_slots_are_not_overwritten(direction: str) -> None:
    """Many staged batches in flight on several streams through a ring of three blocks; one stream is delayed."""
    import torch

    for start in range(3):
        s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 240, 240)
        move = kvbm.Transfer(s.pool, d.pool, "staged", chunk_bytes=SHAPE.nbytes)
        rng = np.random.default_rng(start)
        order, to = rng.permutation(240), rng.permutation(240)
        streams = [stream_of() for _ in range(4)]
        with torch.cuda.stream(streams[start]):
            torch.cuda._sleep(SLEEP // 8)
        for turn in range(40):
            part = slice(6 * turn, 6 * turn + 6)
            move.copy(order[part], to[part], stream=streams[turn % 4])
        check(s, d, order, to)


# ---- graphs --------------------------------------------------------------------------------------------------------


def torch_graph(work: Callable[[Any], Any]) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(torch.cuda.current_stream())
    return graph.replay, graph


def core_graph(work: Callable[[Any], Any]) -> Any:
    """A graph builder of cuda.core, 0.4 or later."""
    core = pytest.importorskip("cuda.core")
    if not hasattr(core.Device, "create_graph_builder"):
        core = pytest.importorskip("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    builder = (
        stream.create_graph_builder() if hasattr(stream, "create_graph_builder") else device.create_graph_builder()
    )
    builder.begin_building()
    work(builder if hasattr(type(builder), "__cuda_stream__") else builder.stream)
    graph = builder.end_building().complete()
    return lambda: graph.launch(stream), (graph, builder, stream)


@pytest.mark.parametrize("capture", [torch_graph, core_graph])
@pytest.mark.parametrize(
    ("direction", "strategy"),
    [*itertools.product(DIRECTIONS, ["direct", "engine"]), ("d2h", "staged"), ("h2d", "staged"), ("d2d", "staged")],
)
def test_graphs(direction: str, strategy: str, capture: Any) -> None:
    """A replay copies current contents; two graphs of one transfer run at the same time as a copy that is in none."""
    import torch

    for n in (2, 40):
        s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 3 * n, 3 * n)
        chunk = 5 * SHAPE.nbytes if strategy == "staged" else None
        move, stream = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=chunk), stream_of()
        move.copy([0], [0], stream=stream).synchronize()
        d.refill()
        order, to = np.random.default_rng(n).permutation(3 * n), np.random.default_rng(n + 1).permutation(3 * n)
        parts = [slice(0, n), slice(n, 2 * n), slice(2 * n, 3 * n)]
        graphs = []
        for part in parts[:2]:
            ids = order[part].copy(), to[part].copy()
            graphs.append(capture(lambda inside, move=move, ids=ids: move.copy(*ids, stream=inside)))
            ids[0][:], ids[1][:] = 0, 0
        torch.cuda.synchronize()
        assert np.array_equal(d.bytes, d.before), "the capture has copied"
        for salt in (1, 2, 3):
            s.refill(salt), d.refill()
            for replay, _ in graphs:
                replay()
            move.copy(order[parts[2]], to[parts[2]], stream=stream)
            check(s, d, order, to, (n, salt))
        del graphs


@pytest.mark.parametrize(("direction", "strategy"), [*((d, "direct") for d in DIRECTIONS), ("h2d", "staged")])
def test_graphs_with_other_ids(direction: str, strategy: str) -> None:
    """Ids on the device are read at every replay: the same graph copies and skips other blocks."""
    import torch

    s, d = ends(direction, "nhd", "universal", 30, 30)
    move, stream = kvbm.Transfer(s.pool, d.pool, strategy), stream_of()
    src = torch.zeros(8, dtype=torch.int64, device="cuda")
    dst = torch.arange(8, dtype=torch.int64, device="cuda")
    host = [9, 1, 8, 2, 7, 3, 6, 4]
    ids = (host, dst) if strategy == "staged" else (src, dst)
    torch.cuda.synchronize()  # they are filled on another stream
    move.copy(*ids, stream=stream).synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move.copy(*ids)
    rng = np.random.default_rng(8)
    for salt in range(4):
        s.refill(salt), d.refill()
        new = rng.permutation(30)[:8], rng.permutation(30)[:8]
        new[0][salt], new[1][salt + 1] = -1, -1
        src.copy_(torch.from_numpy(new[0])), dst.copy_(torch.from_numpy(new[1]))
        graph.replay()
        one = np.array(host) if strategy == "staged" else new[0]
        kept = (one >= 0) & (new[1] >= 0)
        check(s, d, one[kept], new[1][kept], salt)


def free_memory() -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def alone() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("looks at the GPU's free memory: run it without -n (tools/gpu_check.sh does)")


@pytest.mark.parametrize("capture", [torch_graph, core_graph])
def test_rings_of_destroyed_graphs_are_used_again_alone(capture: Any) -> None:
    """20 captures in a row need the memory of one: with a ring per graph it would be 20 times 24 MB."""
    import torch

    alone()
    shape = dataclasses.replace(SHAPE, nl=16, nh=8, hd=128)  # 1 MiB a block
    s, d = ends("d2h", "nhd", "universal", 32, 32, shape=shape)
    move = kvbm.Transfer(s.pool, d.pool, "staged", chunk_bytes=8 * shape.nbytes)

    def once() -> None:
        replay, held = capture(lambda inside: move.copy(range(32), range(32), stream=inside))
        replay()
        torch.cuda.synchronize()
        del replay, held
        gc.collect()

    for _ in range(3):
        once()
    before = free_memory()
    for _ in range(20):
        once()
    assert before - free_memory() < 48 << 20
    check(s, d, range(32), range(32))


# ---- threads, forks, endurance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto", "aside"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_threads(direction: str, strategy: str) -> None:
    """Eight threads with separate streams share one transfer."""
    import torch

    blocks, threads = 256, 8
    s, d = ends(direction, "nhd", "universal", blocks, blocks)
    chunk = 3 * SHAPE.nbytes if strategy == "staged" else None
    move, start = kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=chunk), threading.Barrier(threads)

    def work(k: int) -> None:
        torch.cuda.set_device(0)
        stream = stream_of()
        start.wait()
        mine = np.arange(k, blocks, threads)
        for part in np.array_split(mine, 8):
            move.copy(part, blocks - 1 - part, stream=stream)
        stream.synchronize()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    check(s, d, range(blocks), range(blocks)[::-1])
    assert move.stats()["blocks"] == blocks and move.stats()["copies"] == 64


def test_threads_are_each_told_of_wrong_ids() -> None:
    """The first copies of a transfer with ids on the GPU, by four threads at the same time."""
    import torch

    s, d = ends("d2d", "nhd", "universal", 3, 6)
    ids, told = torch.tensor([1, 999, 2], device="cuda"), []
    to = [torch.tensor([3, 4, 5], device="cuda") for _ in range(4)]
    streams = [stream_of() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(400):
        move, start = kvbm.Transfer(s.pool, d.pool), threading.Barrier(4)

        def work(k: int, move: Any = move, start: Any = start) -> None:
            start.wait()
            try:
                move.copy(ids, to[k], stream=streams[k]).synchronize()
            except kvbm.BindError:
                told.append(k)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    assert len(told) == 1600


def test_a_forked_child_is_told() -> None:
    program = Path(__file__).resolve().parents[1] / "programs" / "fork.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["right"], done.stderr


def resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def test_soak_alone() -> None:
    """20,000 copies by every strategy use no more memory than the first 2,000."""
    alone()
    rng = np.random.default_rng(2)
    stream = stream_of()
    moves = []
    for direction, strategy in itertools.product(DIRECTIONS, STRATEGIES):
        s, d = ends(direction, "nhd", "universal", 600, 600, shape=TINY)
        moves.append(
            (
                s,
                d,
                kvbm.Transfer(s.pool, d.pool, strategy, chunk_bytes=40 * TINY.nbytes if strategy == "staged" else None),
            )
        )
    ids = [[(rng.permutation(600)[:n], rng.permutation(600)[:n]) for n in (1, 8, 500)] for _ in range(4)]

    def copies(count: int) -> None:
        for turn in range(count):
            moves[turn % len(moves)][2].copy(*ids[turn % 4][0 if turn % 50 else turn // 50 % 3], stream=stream)
            if turn % 200 == 199:
                stream.synchronize()
        stream.synchronize()

    copies(2_000)
    before = free_memory(), resident()
    copies(20_000)
    after = free_memory(), resident()
    assert before[0] - after[0] < 4 << 20 and after[1] - before[1] < 8 << 20, (before, after)
    for s, d, move in moves:
        d.refill()
        move.copy(range(600), range(600), stream=stream)
        check(s, d, range(600), range(600))


# ---- two GPUs ------------------------------------------------------------------------------------------------------


def two_gpus() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")


def current_context() -> int:
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value or 0


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto", "aside"])
@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_from_gpu_to_gpu(way: tuple[int, int], strategy: str) -> None:
    """In the order of a stream of either GPU: the source is written late on it, and the destination read on it."""
    import torch

    two_gpus()
    for src, dst in (("nhd", "universal"), ("universal", "vllm/paged_attn_v0"), ("vllm/LBHNC", "nhd")):
        s, d = End(src, 24, f"cuda:{way[0]}"), End(dst, 26, f"cuda:{way[1]}", dst=True)
        if strategy == "direct" and not torch.cuda.can_device_access_peer(*way):
            with pytest.raises(kvbm.BindError, match="no peer access"):
                kvbm.Transfer(s.pool, d.pool, strategy)
            return
        move = kvbm.Transfer(s.pool, d.pool, strategy)
        ids = np.arange(24)[::-1].copy(), np.arange(2, 26)
        for index in (0, 1):
            stream = stream_of(index)
            with torch.cuda.device(index):
                original = torch.from_numpy(s.before).to(f"cuda:{way[0]}")
                move.copy([0], [0], stream=stream).synchronize()
                d.refill()
                s.buffer.copy_(torch.from_numpy(oracle.noise(s.arena.nbytes, 9)))
                seen = torch.empty(d.arena.nbytes, dtype=torch.uint8, device=f"cuda:{index}")
                torch.cuda.synchronize(0), torch.cuda.synchronize(1)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP // 2)
                    s.buffer.copy_(original, non_blocking=True)
                    # torch ties a copy between GPUs to the current streams of both; say so for the one that is not ours.
                    tie = torch.cuda.Event()
                    tie.record(torch.cuda.current_stream(way[0]))
                    done = move.copy(*ids, stream=stream, wait=tie)
                    seen.copy_(d.buffer, non_blocking=True)
            check(s, d, *ids, (src, dst, index))
            if index == way[1]:
                assert np.array_equal(seen.cpu().numpy(), wanted(s, d, *ids))
            assert done.query()


@pytest.mark.parametrize("memory", ["expandable_segments:True", "backend:cudaMallocAsync", "backend:native", "cupy"])
def test_memory_that_is_granted_by_itself(memory: str) -> None:
    """Mappings and stream-ordered pools are not opened with the peer's context: exact or refused; no context is lost."""
    two_gpus()
    if memory == "cupy":
        pytest.importorskip("cupy")
    env = {
        key: value for key, value in os.environ.items() if key not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    }
    program = [sys.executable, str(Path(__file__).parents[1] / "programs" / "peer_grants.py")]
    done = subprocess.run(
        [*program, "cupy" if memory == "cupy" else "torch"],
        env=env if memory == "cupy" else {**env, "PYTORCH_CUDA_ALLOC_CONF": memory},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    import torch

    for line in done.stdout.splitlines():
        granted, one, other, strategy, *_ = line.split()
        if strategy not in ("direct", "raw"):
            assert "exact" in line, line
        elif torch.cuda.can_device_access_peer(int(one), int(other)) and (granted == "1" or memory == "backend:native"):
            assert line.endswith("exact"), line


def test_batches_beside_the_legacy_stream() -> None:
    """After its earlier work and before its later work, by every way to the batched call, which refuses that stream."""
    import torch

    from kvbm import kernels

    legacy, source = (
        torch.cuda.default_stream(),
        torch.randint(-100, 100, (8, 2, 40 * 64), dtype=torch.int16, device="cuda"),
    )
    whole = [torch.zeros(6, 2, 40 * 64, dtype=torch.int16, device="cuda") for _ in range(5)]
    chunks = [[torch.zeros(40, 64, dtype=torch.int16, device="cuda") for _ in range(12)] for _ in range(5)]
    flat = [chunk for block in chunks for chunk in block]
    modes = kernels.MemcpyBatchMode
    can = kernels.is_memcpy_batch_available()

    def by_raw(mode: Any) -> None:
        addresses = [[t.data_ptr() for t in flat], [w.data_ptr() + 5120 * i for w in whole for i in range(12)]]
        ran = kernels.memcpy_batch(*addresses, 5120, stream=0, mode=mode)
        assert ran == (modes.BATCH_WITHOUT_FALLBACK if can else modes.FALLBACK_ONLY)

    ways: dict[str, Callable[[], None]] = {"raw": lambda: by_raw(modes.BATCHED_WITH_FALLBACK)}
    if can:
        ways["batch"] = lambda: kernels.block_to_operational(chunks, whole, "batch")
        ways["raw batch"] = lambda: by_raw(modes.BATCH_WITHOUT_FALLBACK)
    for name, way in ways.items():
        for turn in range(3):
            torch.cuda.synchronize()
            with torch.cuda.stream(legacy):
                torch.cuda._sleep(SLEEP)
                for i, chunk in enumerate(flat):
                    chunk.copy_(source.view(-1)[i * 512 : i * 512 + 2560].view(40, 64) + turn)
                way()
                seen = [w.clone() for w in whole]
                for chunk in flat:
                    chunk.zero_()
            torch.cuda.synchronize()
            want = torch.stack([source.view(-1)[i * 512 : i * 512 + 2560] + turn for i in range(60)])
            assert torch.equal(torch.stack(seen).view(60, 2560), want), (name, turn)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_engine_and_the_legacy_stream(direction: str) -> None:
    import torch

    s, d = ends(direction, "nhd", "vllm/flash_attn_nhd", 16, 16)
    move = kvbm.Transfer(s.pool, d.pool, "engine")
    original = torch.from_numpy(s.before).cuda()
    for _ in range(3):
        d.refill()
        s.buffer.copy_(torch.from_numpy(oracle.noise(s.arena.nbytes, 9)))
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        s.buffer.copy_(original, non_blocking=True)
        move.copy(range(16), range(16), stream=0)
        torch.cuda.default_stream().synchronize()
        check(s, d, range(16), range(16))


def test_two_gpus_in_one_process() -> None:
    """Each GPU's copies run on it, whichever is current; the current device and context do not change."""
    import torch

    two_gpus()
    for index, current in itertools.product((1, 0), (0, 1)):
        torch.cuda.set_device(current)
        torch.zeros(1, device="cuda")
        s, h = End("nhd", 12, f"cuda:{index}"), End("universal", 12, "pinned", dst=True)
        before = torch.cuda.current_device(), current_context()
        for strategy in STRATEGIES:
            move, stream = kvbm.Transfer(s.pool, h.pool, strategy), torch.cuda.Stream(index)
            done = move.copy(range(12), range(12), stream=stream)
            assert (torch.cuda.current_device(), current_context()) == before
            done.synchronize()
            assert (torch.cuda.current_device(), current_context()) == before
            check(s, h, range(12), range(12), (index, current, strategy))
            h.refill()
            move.copy(range(12), range(12)).synchronize()  # torch's current stream of the pool's GPU
            check(s, h, range(12), range(12), (index, current, strategy))
            del move, done
            assert (torch.cuda.current_device(), current_context()) == before
            h.refill()
    torch.cuda.set_device(0)


def test_a_producer_on_the_default_stream_of_the_second_gpu() -> None:
    """The legacy default stream has one handle for all GPUs: the copy's GPU is meant."""
    import torch

    two_gpus()
    with torch.cuda.device(1):
        s, d = End("nhd", 16, "cuda:1"), End("universal", 16, "pinned", dst=True)
        move, stream = kvbm.Transfer(s.pool, d.pool, "direct"), torch.cuda.Stream(1)
        original = torch.from_numpy(s.before).to("cuda:1")
        move.copy([0], [0], stream=stream).synchronize()
        d.refill()
        s.buffer.copy_(torch.from_numpy(oracle.noise(s.arena.nbytes, 9)))
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        s.buffer.copy_(original, non_blocking=True)
        move.copy(range(16), range(16), stream=stream, wait=torch.cuda.current_stream())
        check(s, d, range(16), range(16))


# ---- for compute-sanitizer: -k sanitize ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "few", "staged", "few staged"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_transfers_sanitize(direction: str, strategy: str) -> None:
    """Small, with separate allocations, so that accesses outside are reported."""
    small = kvbm.BlockShape(nl=2, no=2, nh=3, nt=5, hd=16, dtype="bfloat16")
    for src, dst in (("nhd", "universal"), ("universal", "vllm/paged_attn_v0"), ("hf/dynamic_cache", "nhd")):
        for align in (0, 2):
            s, d = ends(direction, src, dst, 5, 6, shape=small, align=align)
            few = 2 if "few" in strategy else None
            chunk = 2 * small.nbytes + 64 if "staged" in strategy else None
            move = kvbm.Transfer(s.pool, d.pool, "staged" if chunk else "direct", max_sms=few, chunk_bytes=chunk)
            move.copy([4, 0, -1, 2, 1], [0, 5, 1, 2, 3], stream=stream_of()).synchronize()
            check(s, d, [4, 0, 2, 1], [0, 5, 2, 3], (src, dst, align))


def test_device_ids_sanitize() -> None:
    import torch

    s, d = ends("d2d", "nhd", "universal", 5, 6, shape=TINY)
    ids = [torch.tensor(given, device="cuda") for given in ([4, 0, -1, 5], [0, 5, 1, 2])]
    done = kvbm.Transfer(s.pool, d.pool).copy(*ids, stream=stream_of())
    with pytest.raises(kvbm.BindError, match="pair 3"):
        done.synchronize()
    check(s, d, [4, 0], [0, 5])
