"""Copies between two GPUs whose memory is granted by itself; run by test_transfer_gpu.py, once an allocator.

    peer_grants.py torch|cupy

torch's allocator is PYTORCH_CUDA_ALLOC_CONF's; CuPy's is its MemoryAsyncPool.  Every strategy, both ways, between several layouts,
first without a grant, and for torch then with the one that it makes at its own copies.  Each copy is bit-exact or refused with a
sentence, and at the end both contexts still work.  Prints a line a case: granted, way, strategy, and what happened.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

import kvbm
from kvbm import kernels

SHAPE = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="float16")  # 128 KiB a block
BLOCKS = 300  # several mappings
PAIRS = (("nhd", "universal"), ("vllm/flash_attn_nhd", "vllm/LBHNC"), ("universal", "universal"))


def empty(shape: Any, device: int) -> Any:
    if sys.argv[1] == "torch":
        return torch.zeros(shape, dtype=torch.float16, device=f"cuda:{device}")
    import cupy

    with cupy.cuda.Device(device):
        made = cupy.zeros(shape, cupy.float16)
        cupy.cuda.Device(device).synchronize()
        return made


def to_host(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.view(torch.int16).cpu().numpy()
    with array.device:
        return np.asarray(array.get()).view(np.int16)


def fill(array: Any, values: np.ndarray) -> None:
    if isinstance(array, torch.Tensor):
        array.view(torch.int16).copy_(torch.from_numpy(values))
    else:
        with array.device:
            array.set(values.view(np.float16))


class End:
    """A pool on a GPU, and the same on the host."""

    def __init__(self, name: str, device: int, seed: int):
        layout, random = kvbm.load(name), np.random.default_rng(seed)
        shapes = [allocation.shape for allocation in layout.resolve(SHAPE, BLOCKS).allocations]
        self.bits = [random.integers(-(1 << 15), 1 << 15, shape).astype(np.int16) for shape in shapes]
        self.arrays = [empty(shape, device) for shape in shapes]
        for array, bits in zip(self.arrays, self.bits, strict=True):
            fill(array, bits)
        self.pool = kvbm.Pool(layout, SHAPE, self.arrays)
        self.host = kvbm.Pool(layout, SHAPE, [torch.from_numpy(bits).view(torch.float16) for bits in self.bits])

    @property
    def is_right(self) -> bool:
        return all(np.array_equal(to_host(a), b) for a, b in zip(self.arrays, self.bits, strict=True))


if sys.argv[1] == "cupy":
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
ids = np.random.default_rng(3).permutation(BLOCKS)


def refused(error: kvbm.BindError) -> str:
    assert any(words in str(error) for words in ("not granted", "no peer access", "cannot access")), error
    return f"refused: {error}"


def attempt(granted: bool, way: tuple[int, int], strategy: str, names: tuple[str, str]) -> str:
    s, d = End(names[0], way[0], 1), End(names[1], way[1], 2)
    # The engine takes every run by itself, one call each across GPUs.
    some = ids[:12] if strategy == "engine" else ids
    kvbm.convert(s.host, d.host, some, some[::-1].copy())
    try:
        move = kvbm.Transfer(s.pool, d.pool, strategy)
    except kvbm.BindError as error:
        return refused(error)
    for index in way:
        with torch.cuda.device(index):
            stream = torch.cuda.Stream(index)
            for _ in range(2):
                move.copy(some, some[::-1].copy(), stream=stream).synchronize()
            assert d.is_right and s.is_right, (granted, way, strategy, names, index)
    return f"exact, {move.explain(16).splitlines()[-2]}" if strategy == "auto" else "exact"


def raw(way: tuple[int, int]) -> str:
    s, d = End("universal", way[0], 1), End("universal", way[1], 2)
    block = SHAPE.nbytes
    at = [np.array([int(base) for base in end.pool.addresses], np.uint64) for end in (s, d)]
    stream = torch.cuda.Stream(way[0])
    kernels.memcpy_batch(*at, block, stream=stream, device=way[0])
    stream.synchronize()
    assert all(np.array_equal(to_host(a), b) for a, b in zip(d.arrays, s.bits, strict=True)), way
    try:
        kernels.vectorized_copy(*at, block, stream=stream, device=way[0])
        stream.synchronize()
    except kvbm.BindError as error:
        return refused(error)
    return "exact"


for granted in (False, True) if sys.argv[1] == "torch" else (False,):
    for way in ((0, 1), (1, 0)):
        if granted:  # torch's own copy between the two
            torch.ones(1 << 22, device=f"cuda:{way[0]}").to(f"cuda:{way[1]}")
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        for strategy in ("auto", "staged", "engine", "direct"):
            for names in PAIRS:
                print(int(granted), *way, strategy, *names, attempt(granted, way, strategy, names))
        print(int(granted), *way, "raw", raw(way))
for device in (0, 1):  # both contexts still work
    torch.cuda.synchronize(device)
    assert int(torch.arange(1000, device=f"cuda:{device}").sum()) == 499500
