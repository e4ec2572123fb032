"""Copies between raw addresses (test_core_copies.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import kvbm
from kvbm import kernels
from kvbm.kernels import MemcpyBatchMode as Mode
from kvbm.kernels import memcpy_batch, vectorized_copy
from programs.fake_gpu import count, defer, driver, pump, random, refused


def named(name: str, memory: np.ndarray) -> None:
    """Say that this is memory of that kind."""
    pair = (ctypes.c_ulonglong * 2).in_dll(driver, name)
    pair[0], pair[1] = memory.ctypes.data, memory.ctypes.data + memory.nbytes


class Arena:
    """`n` pairs of `size` bytes with guard bytes between them."""

    def __init__(self, n: int, size: int, gap: int = 64):
        self.pitch = size + gap
        self.src = random.integers(0, 256, n * self.pitch + 64, np.uint8)
        self.dst = random.integers(0, 256, n * self.pitch + 64, np.uint8)
        self.want = self.dst.copy()
        self.n, self.size = n, size

    def addresses(self, src_skew: Any = 0, dst_skew: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        s = np.arange(self.n) * self.pitch + np.array(src_skew, np.int64)
        d = np.arange(self.n) * self.pitch + np.array(dst_skew, np.int64)
        for a, b in zip(s, d, strict=True):
            self.want[b : b + self.size] = self.src[a : a + self.size]
        return (s + self.src.ctypes.data).astype(np.uint64), (d + self.dst.ctypes.data).astype(np.uint64)

    @property
    def done(self) -> bool:
        return np.array_equal(self.dst, self.want)


def every_alignment(size: int) -> None:
    for forms in (list, lambda a: a, lambda a: memoryview(a), lambda a: a.astype(np.int64)):
        arena = Arena(18 * 18, size)
        src, dst = arena.addresses(np.repeat(np.arange(18), 18), np.tile(np.arange(18), 18))
        before = count("launches")
        vectorized_copy(forms(src), forms(dst), size, stream=5)
        assert count("launches") == before + 1
        assert arena.done
    for skew in (0, 1, 4, 8, 17):  # one at a time, too: all of one alignment
        arena = Arena(3, size)
        vectorized_copy(*arena.addresses(0, np.full(3, skew)), size, stream=5)
        assert arena.done
    assert count("pushes") == count("pops") > 0


def large_pairs_and_many() -> None:
    arena = Arena(1, (64 << 20) + 3)
    vectorized_copy(*arena.addresses([3], [19]), arena.size, stream=5)
    assert arena.done and count("launches") == 1
    n = (1 << 20) + 5  # more than one launch takes
    src = random.integers(0, 256, n, np.uint8)
    dst = np.zeros(n + 1, np.uint8)
    at = np.arange(n, dtype=np.uint64)
    vectorized_copy(at + np.uint64(src.ctypes.data), at + np.uint64(dst.ctypes.data), 1, stream=5)
    assert np.array_equal(src, dst[:-1]) and dst[-1] == 0
    assert count("launches") == 3, count("launches")


def pairs_beyond_the_parameters_go_through_the_ring() -> None:
    few = Arena(253, 24)
    vectorized_copy(*few.addresses(), 24, stream=5)
    inline = count("slots")
    assert few.done
    defer(1)

    def turn(n: int) -> Arena:
        arena = Arena(n, 40)
        src, dst = arena.addresses(random.integers(0, 20, n), random.integers(0, 20, n))
        vectorized_copy(src, dst, 40, stream=5)
        src[:] = dst[:] = 0
        return arena

    arenas = [turn(n) for n in (254, 20_000, 254, 1000)]
    assert not any(arena.done for arena in arenas)
    pump()
    assert all(arena.done for arena in arenas)
    grown = count("slots")
    assert grown > inline
    for n in (20_000, 254, 1000, 254) * 5:
        arena = turn(n)
        pump()
        assert arena.done
    assert count("slots") == grown


def which_device() -> None:
    arena = Arena(500, 32)
    src, dst = arena.addresses()
    named("fake_ordinary", arena.dst)
    for call in (vectorized_copy, memcpy_batch):
        for addresses in ((src, dst), (dst, src)):
            for device in (None, 0):
                with refused(kvbm.BindError, "_ptrs[0]", "no GPU reaches"):
                    call(*addresses, 32, stream=5, device=device)
    assert not arena.done and count("launches") == count("batches") == count("single_copies") == 0
    named("fake_ordinary", np.empty(0, np.uint8))
    named("fake_pinned", arena.dst)
    asked = count("lookups")
    vectorized_copy(src, dst, 32, stream=5)  # GPU to pinned memory
    assert arena.done
    # 500 of the GPU, of which this driver tells no range; and one.
    assert count("lookups") - asked < 1100, count("lookups")
    for device in ("cuda", "cuda:0", 0, np.int64(0)):
        vectorized_copy(src, dst, 32, stream=5, device=device)
    with refused(kvbm.CudaError, "CUDA_ERROR_INVALID_DEVICE"):
        vectorized_copy(src, dst, 32, stream=5, device=3)
    pinned = np.zeros(128, np.uint8)
    named("fake_pinned", pinned)
    at = pinned.ctypes.data
    assert kernels._gpu(np.array([at], np.uint64), np.array([at + 64], np.uint64), None) == (0, 0)
    with refused(kvbm.BindError, "stream"):
        vectorized_copy([at], [at + 64], 8)


def neighbours_become_one_copy() -> None:
    memory = random.integers(0, 256, 20_000, np.uint8)

    def turn(src_steps: Any, dst_steps: Any, sizes: Any, expected: int, **rest: Any) -> None:
        out = np.zeros(20_000, np.uint8)
        want = out.copy()
        src, dst = np.cumsum([0, *src_steps]), np.cumsum([0, *dst_steps])
        each = np.broadcast_to(sizes, src.shape)
        for s, d, n in zip(src, dst, each, strict=True):
            want[d : d + n] = memory[s : s + n]
        before = count("batched_copies") + count("single_copies")
        used = memcpy_batch(src + memory.ctypes.data, dst + out.ctypes.data, sizes, stream=5, **rest)
        assert np.array_equal(out, want)
        assert used == (Mode.FALLBACK_ONLY if rest.get("mode") == 1 else Mode.BATCH_WITHOUT_FALLBACK)
        made = count("batched_copies") + count("single_copies") - before
        assert made == expected, made

    on = [64] * 99
    turn(on, on, 64, 1)
    turn(on, on, 64, 1, mode=1)
    turn(on, on, 64, 100, merge=False)
    turn(on, on, 64, 100, merge=False, mode=1)
    turn([65] * 99, on, 64, 100)  # only one side goes on
    turn(on, [80] * 99, 64, 100)
    turn([64] * 49 + [128] + [64] * 49, on, 64, 2)
    turn([3, 5, 7], [3, 5, 7], [3, 5, 7, 9], 1)
    turn([3, 0, 5, 7], [3, 0, 5, 7], [3, 0, 5, 7, 9], 1)  # a copy of nothing breaks no run
    turn([3, 5, 8], [3, 5, 7], [3, 5, 7, 9], 2)
    turn([0, 64], [0, 64], [0, 64, 64], 1)
    assert count("batch_on_legacy") == 0
    # Backwards: every pair goes on before the last one, none where it ends.  Their order stays, and so do they.
    out = np.zeros(6400, np.uint8)
    src = memory.ctypes.data + 64 * np.arange(100)[::-1]
    memcpy_batch(src, out.ctypes.data + 64 * np.arange(100)[::-1], 64, stream=5)
    assert np.array_equal(out, memory[:6400])


def neighbours_of_two_allocations_are_copied_one_by_one(mode: int, used: int) -> None:
    arena = Arena(40, 64, gap=0)
    assert memcpy_batch(*arena.addresses(), 64, stream=5, mode=mode) == used
    assert arena.done, "not copied"
    assert count("batched_copies") + count("single_copies") == 40


def modes() -> None:
    """Prints what each mode used, or the name of its error, on a stream and on the legacy one."""
    arena = Arena(10, 64)
    src, dst = arena.addresses()

    def ran(mode: Mode, stream: int) -> int | str:
        try:
            return memcpy_batch(src, dst, 64, mode=mode, stream=stream).value
        except kvbm.CudaError as error:
            return error.name

    print(*(ran(mode, stream) for stream in (5, 0) for mode in Mode))
    assert arena.done and count("batch_on_legacy") == 0
