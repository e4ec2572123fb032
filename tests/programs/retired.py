"""What the GPU still uses when its owner lets go of it (test_driver.py)."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import kvbm
from kvbm import _core
from programs.fake_gpu import defer, driver, handle, ids_on_gpu, pool, pump, same, shape

#: How many of each kind of thing the driver has given out and not got back.
live = (ctypes.c_long * 5).in_dll(driver, "live")


def captured(copy: Callable[[], object]) -> ctypes.c_void_p:
    """The graph of a copy on stream 5."""
    driver.fake_begin_capture(handle(5))
    copy()
    return handle(driver.fake_end_capture())


def allocate_twice() -> None:
    for _ in range(2):
        _core.free_device(0, _core.alloc_device(0, 64))


def what_is_dropped_is_not_waited_for() -> None:
    (_, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool("nhd", 9), pool("universal", 9)

    def staged() -> kvbm.Transfer:
        return kvbm.Transfer(s_gpu, d_gpu, "staged", chunk_bytes=2 * shape.nbytes)

    before, sizes = d[0].copy(), []
    for cycle in range(4):
        d[0][...] = before
        defer(1)
        staged().copy(range(9), range(9), stream=5)
        held = live[2]
        move = staged()
        assert np.array_equal(d[0], before), "who makes a transfer waits for the copies of another"
        pump()
        kvbm.convert(s_cpu, d_cpu)
        assert same(d, d_cpu)
        defer(0)
        del move
        allocate_twice()
        assert live[2] == held - 3 + 2, "the slots are not freed, or tables are"
        sizes.append([*live[:2], live[2] - 4 * cycle, *live[3:]])
    assert sizes[1] == sizes[-1], sizes
    table = np.zeros(8192, np.uint64)
    for _ in range(50):
        _core.Table(table, 0)
        assert live[2] <= held + 24


def threads_that_drop_transfers() -> None:
    (_, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool("nhd", 9), pool("universal", 9)
    sys.setswitchinterval(1e-5)
    failed: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for turn in range(25):
                strategy, slot = (("staged", shape.nbytes), ("direct", None))[turn % 2]
                move = kvbm.Transfer(s_gpu, d_gpu, strategy, chunk_bytes=slot)
                move.copy([k, k + 4], [k + 4, k], stream=5 + k)
        except BaseException as error:
            failed.append(error)

    sizes: list[Any] = []
    for _ in range(3):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        allocate_twice()
        sizes.append([live[1], live[2] - 200 * len(sizes), live[3]])
    assert not failed, failed
    kvbm.convert(s_cpu, d_cpu, [0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3])
    assert same(d, d_cpu)
    assert sizes == sizes[:1] * 3, sizes


def a_graph_that_is_destroyed_while_the_driver_allocates(on_gpu: bool) -> None:
    n = 700
    (_, s_gpu, _), (_, d_gpu, _) = pool("nhd", n), pool("universal", n)
    move = kvbm.Transfer(s_gpu, d_gpu, "direct")
    ids, out = (ids_on_gpu(np.array([1, 2])), np.arange(2)) if on_gpu else (np.arange(n), np.arange(n))
    move.copy(ids, out, stream=5)
    graph = captured(lambda: move.copy(ids, out, stream=5))
    gone, kept = handle.in_dll(driver, "fake_gone"), []
    gone.value = graph.value
    defer(1)
    while gone.value:
        kept.append(move.copy(ids, out, stream=6))  # until the driver has to allocate
    pump()


def a_graph_that_outlives_the_process_s_memory() -> None:
    (_, s_gpu, _), (_, d_gpu, _) = pool("nhd", 9), pool("universal", 9)
    move, ids = kvbm.Transfer(s_gpu, d_gpu, "direct"), ids_on_gpu(np.array([1, 2]))
    graph = captured(lambda: [move.copy(ids, [1, 2], stream=5) for _ in range(20)])
    handle.in_dll(driver, "fake_last").value = graph.value
