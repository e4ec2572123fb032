"""What a program on the fake driver starts with: fake CUDA arrays over NumPy memory, and the driver's counters.

`test_driver.run` puts this text before a program; data/fake_driver.c is the process's libcuda.so.1.
"""

from __future__ import annotations

import ctypes
import os  # noqa: F401  (for the programs)
import sys  # noqa: F401
from typing import Any

import numpy as np

import kvbm
from kvbm import kernels, transfer  # noqa: F401
from memory import FakeCuda

driver = ctypes.CDLL("libcuda.so.1")
shape = kvbm.BlockShape(nl=3, no=2, nh=2, nt=8, hd=16, dtype="float16")
random = np.random.default_rng(5)


def count(name: str) -> int:
    """One of the driver's counters."""
    return ctypes.c_long.in_dll(driver, name).value


def defer(on: int) -> None:
    """Whether streams run only when someone waits for them."""
    ctypes.c_int.in_dll(driver, "deferred").value = on


def pool(name: str, blocks: int) -> tuple[list[Any], kvbm.Pool, kvbm.Pool]:
    """Random memory, a pool over it "on the GPU", and a pool over a copy of it on the CPU."""
    layout = kvbm.load(name)
    memory = [random.integers(0, 2**16, a.shape, np.uint16) for a in layout.resolve(shape, blocks).allocations]
    on_gpu = [FakeCuda(m.shape, "float16", address=m.ctypes.data) for m in memory]
    for fake, m in zip(on_gpu, memory, strict=True):
        fake.memory = m  # lives as long as the pool
    on_cpu = [m.copy().view(np.float16) for m in memory]
    return memory, kvbm.Pool(layout, shape, on_gpu), kvbm.Pool(layout, shape, on_cpu)


def same(memory: list[Any], cpu: kvbm.Pool) -> bool:
    """Whether both hold the same bytes."""
    return all(np.array_equal(m, a.view(np.uint16)) for m, a in zip(memory, cpu.arrays, strict=True))
