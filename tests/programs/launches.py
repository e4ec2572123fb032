"""Conversions and operators on one GPU (test_driver.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import kvbm
from kvbm import kernels, store
from kvbm.cli import app
from kvbm.store import blocks
from memory import FakeCuda
from programs.fake_gpu import count, defer, driver, handle, pool, pump, random, refused, same, seed, shape


def as_lists(blocks: kvbm.Pool, whole: kvbm.Pool) -> tuple[list[list[Any]], list[FakeCuda]]:
    """The chunks of three blocks of `nhd`, and the operational tensors, as the operators take them."""
    chunks = [list(blocks.arrays[i * 6 : i * 6 + 6]) for i in range(3)]
    return chunks, [FakeCuda((3, 2, 256), "float16", address=a.address) for a in whole.arrays]


def launches_move_what_the_host_moves(src: str, dst: str) -> None:
    (s, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool(src, 9), pool(dst, 7)
    for ids in (([8, 0, 3], [1, 6, 0]), ([4, -1], [2, 3]), ([], [])):
        kvbm.convert(s_cpu, d_cpu, *ids)
        kvbm.convert(s_gpu, d_gpu, *ids, stream=5)
        assert same(d, d_cpu)
    assert same(s, s_cpu)
    assert count("launches") == 2, count("launches")
    assert count("pushes") == count("pops") > 0


def ids_beyond_the_parameters_go_through_a_ring() -> None:
    n = 700  # more ids than fit the kernel's parameters
    (_, s_gpu, s_cpu), (d, d_gpu, d_cpu) = pool("universal", n), pool("vllm/LBHNC", 4 * n)
    src, dst = np.empty(n, np.int64), np.empty(n, np.int64)

    def turn(quarter: int) -> None:  # each writes blocks of its own: none can hide what another did wrong
        src[:], dst[:] = random.permutation(n), quarter * n + random.permutation(n)
        kvbm.convert(s_cpu, d_cpu, src, dst)
        kvbm.convert(s_gpu, d_gpu, src, dst, stream=5)
        src[:] = dst[:] = 0

    kvbm.convert(s_gpu, d_gpu, [0], [0], stream=5)
    kvbm.convert(s_cpu, d_cpu, [0], [0])
    inline = count("slots")
    defer(1)
    for quarter in range(4):
        turn(quarter)
    assert not same(d, d_cpu) and pump() >= 4
    assert same(d, d_cpu)
    grown = count("slots")
    assert grown > inline, "the batch was meant to be too large for the parameters"
    for again in range(20):
        turn(again % 4)
        pump()
    assert same(d, d_cpu) and count("slots") == grown


def lists_of_tensors() -> None:
    nb = 40  # their addresses do not fit the parameters
    (b, b_gpu, b_cpu), (u, u_gpu, u_cpu) = pool("nhd", nb), pool("universal", nb)
    chunks = [list(b_gpu.arrays[i * 6 : i * 6 + 6]) for i in range(nb)]
    kernels.block_to_universal(chunks, list(u_gpu.arrays), "nhd", stream=5)
    kvbm.convert(b_cpu, u_cpu)
    assert same(u, u_cpu) and count("launches") == 1
    u[0][...] ^= 0xFFFF
    u_cpu.arrays[0].view(np.uint16)[...] ^= 0xFFFF
    kernels.universal_to_block(list(u_gpu.arrays), chunks, "NHD", stream=5)
    kvbm.convert(u_cpu, b_cpu)
    assert same(b, b_cpu)


def backends(backend: str | None, counter: str) -> None:
    (_, b_gpu, b_cpu), (o, o_gpu, o_cpu) = pool("nhd", 3), pool("operational_nhd", 3)
    chunks, whole = as_lists(b_gpu, o_gpu)
    kernels.block_to_operational(chunks, whole, backend, stream=5)
    kvbm.convert(b_cpu, o_cpu)
    assert same(o, o_cpu)
    used = [name for name in ("batches", "single_copies", "launches") if count(name)]
    assert used == [counter], used


def what_fails(operator: bool) -> None:
    """Prints the one error that a conversion, or the batch call, ends with; the destination was not touched."""
    (_, s_gpu, _), (d, d_gpu, d_cpu) = pool("nhd", 3), pool("operational_nhd", 3)
    chunks, whole = as_lists(s_gpu, d_gpu)
    try:
        if operator:
            kernels.block_to_operational(chunks, whole, "batch", stream=5)
        else:
            kvbm.convert(s_gpu, d_gpu, stream=5)
    except kvbm.CudaError as error:
        print(type(error).__name__, error.code, error.name, error)
    assert same(d, d_cpu)
    assert count("pushes") == count("pops")


def the_batch_call_and_default_streams(stream: int) -> None:
    (b, b_gpu, b_cpu), (o, o_gpu, o_cpu), (_, u_gpu, u_cpu) = (
        pool("nhd", 3),
        pool("operational_nhd", 3),
        pool("universal", 3),
    )
    chunks, whole = as_lists(b_gpu, o_gpu)
    defer(1)
    for order in range(1, 9):
        seed(order)
        for memory, cpu in ((b, b_cpu), (o, o_cpu)):
            for m, a in zip(memory, cpu.arrays, strict=True):
                m[...] = 0
                a.view(np.uint16)[...] = 0
        kvbm.convert(u_gpu, b_gpu, stream=stream)
        kernels.block_to_operational(chunks, whole, "batch", stream=stream)
        kernels.operational_to_block(whole, chunks, "batch", stream=stream)
        pump()
        kvbm.convert(u_cpu, b_cpu)
        kvbm.convert(b_cpu, o_cpu)
        assert same(b, b_cpu) and same(o, o_cpu), order
    assert count("batches") == 16 and count("batch_on_legacy") == count("single_copies") == 0


def the_batch_call_and_a_capture() -> None:
    (_, b_gpu, b_cpu), (o, o_gpu, o_cpu) = pool("nhd", 3), pool("operational_nhd", 3)
    chunks, whole = as_lists(b_gpu, o_gpu)
    kernels.block_to_operational(chunks, whole, stream=5)
    o[0][...] = o[1][...] = o[2][...] = 0
    for stream in (6, 2):
        driver.fake_begin_capture(handle(stream))
        with refused(kvbm.CudaError, "(900)", "cannot be captured"):
            kernels.block_to_operational(chunks, whole, "batch", stream=stream)
        kernels.block_to_operational(chunks, whole, "async", stream=stream)
        graph = driver.fake_end_capture()
        assert graph and not o[0].any()
        driver.fake_launch_graph(handle(graph), handle(5))
        kvbm.convert(b_cpu, o_cpu)
        assert same(o, o_cpu)
        o[0][...] = 0
    assert count("broken_captures") == 0


def has_memcpy_batch() -> None:
    print(kernels.is_memcpy_batch_available())


def fork_after_cuda() -> None:
    """A child of a process that only imported kvbm may use CUDA; one of a process that used it may not."""
    (_, s_gpu, _), (_, d_gpu, _) = pool("nhd", 3), pool("universal", 3)

    def child() -> int:
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            kvbm.convert(s_gpu, d_gpu, stream=5)
        except kvbm.CudaError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(0)

    print(child())
    kvbm.convert(s_gpu, d_gpu, stream=5)
    print(child())


def files_are_converted_on_the_gpu(path: str) -> None:
    folder = Path(path)
    (_, _, cpu) = pool("vllm/LBHNC", 7)
    with store.create(folder / "in", cpu.layout, shape, 7) as out:
        kvbm.convert(cpu, out)
    blocks._STEP_BYTES = 3 * shape.nbytes
    before = count("launches")
    for device in ("cpu", "cuda:0"):
        to = ["--to", "vllm/paged_attn_v0", "--device", device]
        app.main(["convert", str(folder / "in"), str(folder / device), *to], standalone_mode=False)
    assert count("launches") - before >= 3
    assert (folder / "cpu").read_bytes() == (folder / "cuda:0").read_bytes()


def files_of_a_pool_on_the_gpu(path: str) -> None:
    """Read into one and written from one, some blocks at a time, by way of pinned memory."""
    at = Path(path) / "out"
    (_, _, cpu), (memory, gpu, _) = pool("vllm/LBHNC", 7), pool("nhd", 7)
    blocks._STEP_BYTES = 3 * shape.nbytes
    store.save(at, cpu)
    kvbm.convert(cpu, kvbm.Pool(gpu.layout, shape, [one.view(np.float16) for one in memory]))
    store.save(at, gpu, [6, 0, 3, 4], layout=kvbm.load("universal"), digests=False, force=True, stream=5)
    found = store.load(at, layout=kvbm.load("hnd"), device="cuda:0")
    assert found.device == "cuda:0" and found.num_blocks == 4
    back = kvbm.Pool.allocate(cpu.layout, shape, 4, "pinned")
    kvbm.convert(found, back, stream=5)
    assert np.array_equal(back.digest(), cpu.digest([6, 0, 3, 4]))
