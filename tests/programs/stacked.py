"""`kvbm.kernels` on the fake driver: lists of chunks in the other order, and ranges of layers (test_kernels.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import kvbm
import stacks
from kvbm import kernels
from memory import aligned
from programs.fake_gpu import count, driver, handle, refused

DTYPES = ("uint8", "bfloat16", "float32", "float64", "float8_e4m3fn")


def run(stack: stacks.Stacks, call: Callable[..., None], *rest: Any, **options: Any) -> None:
    buffers = [aligned(data) for data in stack.data]
    before = count("launches")
    lists = [stack.lists(side, buffer, stacks.fake_views) for side, buffer in enumerate(buffers)]
    call(*lists, *rest, stream=5, **options)
    assert count("launches") == before + 1
    stack.check(*buffers)


def transposes() -> None:
    """Both directions, all widths, tensors at any multiple of their items, and one block as a flat list."""
    for (at, sizes), (number, dtype) in itertools.product(enumerate(stacks.SIZES), enumerate(DTYPES)):
        shape = kvbm.BlockShape(*sizes, dtype)
        align = shape.itemsize * ((at + number) % 3), shape.itemsize * (number % 2)
        for src, dst in (("nhd", "hnd"), ("hnd", "nhd")):
            stack = stacks.Stacks(src, dst, shape, (1, 2, 5)[at % 3], align)
            run(stack, kernels.nhd_hnd_transpose, src.upper() if number % 2 else src)
    flat = stacks.Stacks("nhd", "hnd", shape, 1)
    run(flat, lambda s, d, **rest: kernels.nhd_hnd_transpose(s[0], d[0], **rest))
    run(flat, lambda s, d, **rest: kernels.nhd_hnd_transpose(tuple(s[0]), [tuple(d[0])], **rest))


def transposes_of_many() -> None:
    """Their addresses do not fit the parameters of a launch."""
    run(stacks.Stacks("nhd", "hnd", kvbm.BlockShape(40, 2, 2, 4, 8, "float16"), 9), kernels.nhd_hnd_transpose)


def layers() -> None:
    """Some layers of universal tensors, both ways, both orders of chunks."""
    for (at, sizes), (number, dtype) in itertools.product(enumerate(stacks.SIZES), enumerate(DTYPES)):
        shape, some = kvbm.BlockShape(*sizes, dtype), stacks.LAYERS[at]
        align = shape.itemsize * (number % 2), shape.itemsize * ((at + number) % 3)
        for name, nb in itertools.product(stacks.CHUNKS, (1, 3)):
            up = stacks.Stacks(name, "universal", shape, nb, align, some)
            run(up, kernels.block_to_universal, name, layers=some)
            down = stacks.Stacks("universal", name, shape, nb, align, some)
            run(down, kernels.universal_to_block, name, layers=some)


def layer_by_layer() -> None:
    """One call per layer moves what one call for all does, and no prepared copy is used for another layer."""
    shape = kvbm.BlockShape(6, 2, 3, 4, 8, "float16")
    whole = stacks.Stacks("nhd", "universal", shape, 2)
    buffers = [aligned(data) for data in whole.data]
    blocks, universals = (whole.lists(side, buffer, stacks.fake_views) for side, buffer in enumerate(buffers))
    for layer in np.random.default_rng(3).permutation(6).tolist():
        some = [row[layer * 2 : layer * 2 + 2] for row in blocks]
        kernels.block_to_universal(some, universals, layers=range(layer, layer + 1), stream=5)
    whole.check(*buffers)
    assert kernels._prepared.cache_info().currsize == 6


def captured() -> None:
    """A graph repeats both copies."""
    shape = kvbm.BlockShape(3, 2, 2, 4, 8, "float16")
    for stack, call, rest in (
        (stacks.Stacks("nhd", "hnd", shape, 2), kernels.nhd_hnd_transpose, {}),
        (
            stacks.Stacks("hnd", "universal", shape, 2, layers=range(1, 3)),
            kernels.block_to_universal,
            {"layout": "HND", "layers": range(1, 3)},
        ),
    ):
        buffers = [aligned(data) for data in stack.data]
        lists = [stack.lists(side, buffer, stacks.fake_views) for side, buffer in enumerate(buffers)]
        driver.fake_begin_capture(handle(6))
        call(*lists, stream=6, **rest)
        graph = driver.fake_end_capture()
        assert graph and np.array_equal(buffers[1], stack.data[1]), "a captured copy runs only in its graph"
        driver.fake_launch_graph(handle(graph), handle(5))
        stack.check(*buffers)


def nothing_waits() -> None:
    """The functions return before their copies are done."""
    from programs.fake_gpu import defer, pump

    shape = kvbm.BlockShape(3, 2, 2, 4, 8, "float16")
    stack = stacks.Stacks("nhd", "hnd", shape, 2)
    buffers = [aligned(data) for data in stack.data]
    lists = [stack.lists(side, buffer, stacks.fake_views) for side, buffer in enumerate(buffers)]
    kernels.nhd_hnd_transpose(*lists, stream=5)
    buffers[1][...] = stack.data[1]
    defer(1)
    kernels.nhd_hnd_transpose(*lists, stream=5)
    assert np.array_equal(buffers[1], stack.data[1])
    assert pump() >= 1
    stack.check(*buffers)


def what_fails() -> None:
    """A launch that the driver refuses leaves the destination as it was."""
    stack = stacks.Stacks("nhd", "hnd", kvbm.BlockShape(3, 2, 2, 4, 8, "float16"), 2)
    buffers = [aligned(data) for data in stack.data]
    lists = [stack.lists(side, buffer, stacks.fake_views) for side, buffer in enumerate(buffers)]
    with refused(kvbm.CudaError, "CUDA_ERROR_INVALID_VALUE"):
        kernels.nhd_hnd_transpose(*lists, stream=5)
    assert np.array_equal(buffers[1], stack.data[1])
