"""Mistakes on purpose, which sanitizers must see (test_sanitize.py): in host kernels, and by them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvbm import _core

BYTES = 1 << 20
KERNEL = "rows_o0_i2_w16"


def copy(src: np.ndarray, dst: np.ndarray, ids: list[int]) -> None:
    """Copy blocks of `BYTES` bytes on one thread, in rows of 32 bytes."""
    modes = [(2, 16, 16), (BYTES // 32, 32, 32)]
    run = _core.Copy(KERNEL, [((0, 0, 0, 0), [], modes)], (0, BYTES), (0, BYTES))
    tables = [_core.Table(np.array([side.ctypes.data], np.uint64)) for side in (src, dst)]
    run.run(*tables, _core.Pairs(ids, ids, 2, 2), threads=1)


def read_beyond() -> None:
    copy(np.zeros(2 * BYTES - 1, np.uint8), np.zeros(2 * BYTES, np.uint8), [0, 1])


def write_beyond() -> None:
    copy(np.zeros(2 * BYTES, np.uint8), np.zeros(2 * BYTES - 1, np.uint8), [0, 1])


def race() -> None:
    src, dst = (np.zeros(2 * BYTES, np.uint8) for _ in range(2))
    start = threading.Barrier(2)

    def work(_: int) -> None:
        start.wait()
        copy(src, dst, [0, 1])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(16)))
