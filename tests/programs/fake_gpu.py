"""What programs on the fake driver share: fake CUDA arrays over NumPy memory, and the driver's counters and knobs.

The functions of the modules beside this one are run by the fixtures `fake_driver` and `fake_gpu` (conftest.py), each in a
process of its own, whose libcuda.so.1 is data/fake_driver.c.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import kvbm
from failing import LIVE
from memory import FakeCuda

driver = ctypes.CDLL("libcuda.so.1")
handle = ctypes.c_void_p
DIRECTIONS = ("d2d", "d2h", "h2d", "p2p")
STRATEGIES = ("direct", "staged", "engine", "auto", "aside")
driver.fake_end_capture.restype = handle
shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=16, dtype="float16")
random = np.random.default_rng(5)


def count(name: str) -> int:
    """One of the driver's counters."""
    return ctypes.c_long.in_dll(driver, name).value


def alive(what: str) -> int:
    """How much of something there is, of `failing.LIVE`."""
    return (ctypes.c_long * len(LIVE)).in_dll(driver, "live")[LIVE.index(what)]


def defer(on: int) -> None:
    """Whether streams run only when someone waits for them."""
    ctypes.c_int.in_dll(driver, "deferred").value = on


def seed(n: int) -> None:
    """The order in which streams run."""
    ctypes.c_uint.in_dll(driver, "fake_seed").value = n


def pump(n: int = -1) -> int:
    """Run what was deferred, or `n` pieces of it; how many ran."""
    return int(driver.fake_pump(n))


def half(cases: Iterable[Any], direction: str, strategy: str) -> Iterator[tuple[int, Any]]:
    """Every second case with its number: each meets each direction and each strategy.  All of them in `make full`."""
    turn = DIRECTIONS.index(direction) + STRATEGIES.index(strategy)
    for number, case in enumerate(cases):
        if os.environ.get("KVBM_HYPOTHESIS") == "full" or (number + turn) % 2 == 0:
            yield number, case


@contextmanager
def refused(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    """The body raises `kind`, and the message has these words."""
    try:
        yield
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"not refused: {words}")
    missing = [word for word in words if word not in message]
    assert not missing, (missing, message)


def pool(
    name: str, blocks: int, shape: kvbm.BlockShape = shape, apart: bool = False
) -> tuple[list[np.ndarray], kvbm.Pool, kvbm.Pool]:
    """Random memory, a pool over it "on the GPU", and a pool over a copy of it on the CPU; `apart`: at no common step."""
    layout = kvbm.load(name)
    memory = [random.integers(0, 2**16, a.shape, np.uint16) for a in layout.resolve(shape, blocks).allocations]
    if apart:
        gaps = [256 * (i * i + 1) for i in range(len(memory))]
        room, at = np.zeros(sum(gaps) + sum(m.size for m in memory), np.uint16), 0
        for i, (gap, one) in enumerate(zip(gaps, memory, strict=True)):
            memory[i] = room[at : at + one.size].reshape(one.shape)
            memory[i][...] = one
            at += one.size + gap
    on_gpu: list[Any] = [FakeCuda(m.shape, "float16", address=m.ctypes.data) for m in memory]
    for fake, m in zip(on_gpu, memory, strict=True):
        fake.memory = m  # lives as long as the pool
    on_cpu = [m.copy().view(np.float16) for m in memory]
    return memory, kvbm.Pool(layout, shape, on_gpu), kvbm.Pool(layout, shape, on_cpu)


def ids_on_gpu(ids: np.ndarray) -> FakeCuda:
    """The same ids "on the GPU": what is written into `ids` is there, too."""
    fake = FakeCuda(ids.shape, ids.dtype.name, address=ids.ctypes.data)
    fake.owner = ids
    return fake


def same(memory: list[np.ndarray], cpu: kvbm.Pool) -> bool:
    """Whether both hold the same bytes."""
    return all(np.array_equal(m, a.view(np.uint16)) for m, a in zip(memory, cpu.arrays, strict=True))
