"""Reshardings on one GPU, and between it and pinned memory (test_reshard_local.py).  Streams run when they are waited for."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

import plane_oracle
import reshard_oracle
from memory import FakeCuda
from programs.fake_gpu import count, defer, pump, seed
from test_planes import fake_arrays


def on_pages(data: np.ndarray) -> np.ndarray:
    found = np.frombuffer(mmap.mmap(-1, data.size + mmap.PAGESIZE), np.uint8)[: data.size]
    found[:] = data
    return found


def arrays(arena: Any, buffer: np.ndarray, dtype: str) -> list[Any]:
    if isinstance(arena, plane_oracle.Arena):
        return fake_arrays(arena, buffer)
    views = reshard_oracle.host_arrays(arena, buffer, dtype)
    kind = "uint8" if views[0].dtype == np.uint8 else dtype
    return [FakeCuda(v.shape, kind, address=v.ctypes.data, strides=v.strides) for v in views]


def every_byte(first: int, cases: int, kind: str) -> None:
    """From device memory into device memory, or from and into pinned memory by turns."""
    defer(1)
    for number in range(cases):
        case = reshard_oracle.random_case(first + number)
        pinned = {0: "", 1: ""}
        if kind == "pinned" and not case.gather:
            pinned[number % 2] = "pinned"
        run = reshard_oracle.Run(case, on_pages, arrays, pinned=tuple(bool(pinned[side]) for side in (0, 1)))
        seed(number % 4)
        for done in run.call(stream=5):
            pump()
            assert done.query()
        run.check(np.asarray)
    assert count("pushes") == count("pops")
