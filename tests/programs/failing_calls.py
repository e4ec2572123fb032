"""Copies in which one call of the driver fails, whichever it is; run by test_driver.py with the fake driver as libcuda.so.1.

Each failure is a child of its own, forked before CUDA is started.  Prints the names of the calls that failed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in (".", "helpers", "copy", "bridges"))  # the tests

import kvbm
import matrix
import oracle
from failing import every_call
from kvbm import kernels
from memory import FakeCuda, numpy_views, placed

driver = ctypes.CDLL("libcuda.so.1")
fail_at = ctypes.c_long.in_dll(driver, "fake_fail_at")

SHAPE = kvbm.BlockShape(nl=1, no=2, nh=1, nt=2, hd=16, dtype="bfloat16")
BLOCKS = 600
MANY, FEW = np.arange(BLOCKS), np.arange(12)  # more than the parameters carry, and less


class End:
    """A pool on a GPU over guarded memory."""

    def __init__(self, name: str, device: int, *, dst: bool = False):
        self.arena = placed(matrix.orders()[name], SHAPE, BLOCKS).layout_bytes(0)
        self.before = (oracle.dest_bytes if dst else oracle.source_bytes)(self.arena, 0)
        self.buffer = self.before.copy()
        views = numpy_views(self.arena, self.buffer, SHAPE.dtype)
        self.arrays = [
            FakeCuda(v.shape, SHAPE.dtype, address=v.ctypes.data, strides=v.strides, device=device) for v in views
        ]
        self.pool = kvbm.Pool(kvbm.load(name), SHAPE, self.arrays)
        self.name, self.device = name, device


S = {device: End("vllm/LBHNC", device) for device in (0, 1)}
D = {device: End("vllm/flash_attn_nhd", device, dst=True) for device in (0, 1)}
for end in (S[0], D[0]):  # whose ends the driver tells: each is asked about once
    driver.fake_memory(
        *(ctypes.c_ulonglong(end.buffer.ctypes.data + offset) for offset in (0, end.buffer.nbytes)), 1, 0, 3
    )
driver.fake_memory(
    *(ctypes.c_ulonglong(D[1].buffer.ctypes.data + offset) for offset in (0, D[1].buffer.nbytes)), 2, 1, 0b10
)


def moved(strategy: str, dst: int, stream: int) -> None:
    ends = [kvbm.Pool(kvbm.load(end.name), SHAPE, end.arrays) for end in (S[0], D[dst])]
    slot = 5 * SHAPE.nbytes if strategy == "staged" else None
    with kvbm.Transfer(*ends, strategy, chunk_bytes=slot) as move:
        ids = MANY if strategy == "direct" else FEW
        move.copy(ids, ids, stream=stream, wait=Producer()).synchronize()
        fail_at.value = 0  # what closing waits for has been waited for


class Producer:
    """A stream, which an event is recorded on."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 7)


def raw(stream: int) -> None:
    at = [np.arange(D[0].buffer.nbytes // 16, dtype=np.uint64) * 16 + end.buffer.ctypes.data for end in (S[0], D[0])]
    kernels.vectorized_copy(at[0][:300], at[1][:300], 16, stream=5)
    kernels.memcpy_batch(at[0][300:600], at[1][300:600], 16, stream=stream, merge=False)


#: The GPU of the destination, and the copy.
COPIES: dict[str, tuple[int, Callable[[], None]]] = {
    "direct": (0, lambda: moved("direct", 0, 5)),
    "staged": (0, lambda: moved("staged", 0, 5)),
    "engine": (0, lambda: moved("engine", 0, 0)),
    "staged to the other GPU": (1, lambda: moved("staged", 1, 0x105)),
    "raw": (0, lambda: raw(0)),
}


def right(copy: str, dst: int) -> bool:
    if copy == "raw":
        return np.array_equal(S[0].buffer[:9600], D[0].buffer[:9600])
    return np.array_equal(D[dst].buffer, WANTED[dst, copy.startswith("direct")])


WANTED = {
    (dst, many): oracle.expected_bytes(
        S[0].arena, D[dst].arena, S[0].before, D[dst].before, *[MANY if many else FEW] * 2
    )
    for dst in (0, 1)
    for many in (False, True)
}


def main(step: int) -> None:
    """Of each copy, every call fails (1), or every second one (2)."""
    met = set[str]()
    for copy, (dst, call) in COPIES.items():

        def again(copy: str = copy, dst: int = dst, call: Callable[[], None] = call) -> None:
            D[dst].buffer[:] = D[dst].before
            call()
            assert right(copy, dst), "wrong bytes"

        met |= set(every_call(copy, call, again, step=lambda: step))
    print(*sorted(met))
