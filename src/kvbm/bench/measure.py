"""Common parts of all measurements: pools of random bytes, changing ids, and a yardstick."""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import functools
import itertools
import os
import platform
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import CudaError
from ..layout import spec
from ..layout.layout import Layout
from ..layout.shapes import BlockShape, numpy_name
from ..memory.allocation import available_bytes, free_on_gpu
from ..memory.array_info import View as View
from ..pool.pool import Pool
from ..system.clock import CpuClock, GpuClock, Timed
from ..system.machine import cache_bytes as cache_bytes
from ..system.machine import device_of as device_of
from ..system.machine import machine as machine

#: Sets of ids that take turns.
LEAST_SETS, MOST_SETS = 6, 256

#: Bytes of random noise.  Memory is filled from changing offsets of it.
NOISE_BYTES = 64 << 20

#: Largest number of arrays of a pool of small blocks.  More arrays take longer to bind than to measure.
MOST_ARRAYS = 50_000

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


# ---- the machine ---------------------------------------------------------------------------------------------------


def make_clock(place: str) -> GpuClock | CpuClock:
    """The clock for work on ``"cuda:N"``, or on the CPU."""
    device = device_of(place)
    return GpuClock(device) if device >= 0 else CpuClock()


def commit() -> str:
    """The measured version of kvbm: $KVBM_COMMIT, else ``git describe`` of the checkout, else the version.

    The checkout is the one that contains the package, or that of the working directory if it is one of kvbm.
    """
    from .._version import __version__

    if known := os.environ.get("KVBM_COMMIT"):
        return known
    for folder in (Path(__file__).resolve().parent, Path.cwd()):
        root = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        if root is None or not (root / "src" / "kvbm" / "_core.pyx").is_file():
            continue
        with contextlib.suppress(OSError):
            command = ["git", "describe", "--always", "--dirty"]
            run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
            if run.stdout.strip():
                return run.stdout.strip()
    return __version__


def header(place: str, shape: BlockShape | None) -> str:
    """The comment at the beginning of a CSV.  It has no shape if the file has several shapes."""
    name, driver = machine(place)
    parts = [f"kvbm {commit()}", name, f"driver {driver}" if driver else "", f"Python {platform.python_version()}"]
    parts += [str(shape).replace(",", " ") if shape else "", dt.date.today().isoformat()]
    return "# " + ", ".join(filter(None, parts))


def free_bytes(place: str) -> int:
    """Bytes of free memory on ``"cuda:N"``, or on the host."""
    device = device_of(place)
    return (free_on_gpu(device) if device >= 0 else available_bytes())[0]


# ---- memory --------------------------------------------------------------------------------------------------------

_FLAT = spec.parse('order: "b d"', "bench", "flat")


class Memory:
    """A range of bytes on ``"cpu"``, ``"pinned"`` or ``"cuda:N"``; `device` is -1 on the host.  `close` releases it."""

    def __init__(self, nbytes: int, place: str) -> None:
        self._pool = Pool.allocate(_FLAT, BlockShape(1, 1, 1, 1, nbytes, "uint8"), 1, place)
        self.place, self.nbytes = place, nbytes
        self.address = int(self._pool.addresses[0])
        self.device = device_of(place)

    @property
    def array(self) -> Bytes:
        """The whole memory as an array; only on the host."""
        assert self.device < 0
        array: Bytes = self._pool.arrays[0].reshape(-1)
        return array

    def fill(self, seed: int) -> None:
        """Fill the memory with random bytes, and wait."""
        noise, random = _noise(seed), np.random.default_rng(seed + 1)
        pieces = []
        at = 0
        while at < self.nbytes:
            start = int(random.integers(noise.size // 2))  # so that the pieces differ
            size = min(noise.size - start, self.nbytes - at)
            pieces.append((at, start, size))
            at += size

        def put(piece: tuple[int, int, int]) -> None:
            at, start, size = piece
            write(self.device, np.array([self.address + at]), np.array([size]), noise[start:])

        if self.device >= 0:
            for piece in pieces:
                put(piece)
            return
        # The memory is new: the first access to its pages takes longer than the writes, so several threads do it.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            list(workers.map(put, pieces))

    def close(self) -> None:
        self._pool.close()


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> Bytes:
    return np.frombuffer(np.random.default_rng(seed).bytes(NOISE_BYTES), np.uint8)


def read(device: int, starts: Numbers, sizes: Numbers) -> Bytes:
    """The bytes of these ranges, one after the other.  Nothing may write there at the same time."""
    found = np.empty(int(sizes.sum()), np.uint8)
    _move(device, starts, sizes, found, is_read=True)
    return found


def write(device: int, starts: Numbers, sizes: Numbers, data: Bytes) -> None:
    """Write bytes into these ranges, one after the other, and wait."""
    _move(device, starts, sizes, data, is_read=False)


def _move(device: int, starts: Numbers, sizes: Numbers, host: Bytes, *, is_read: bool) -> None:
    here = host.ctypes.data + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    if device >= 0:
        near, far = here.astype(np.uint64), starts.astype(np.uint64)
        ends = (near, far) if is_read else (far, near)
        _core.memcpy_batch(ends[0], ends[1], np.ascontiguousarray(sizes, np.uint64), 1, device, 0)
        _core.synchronize(device, 0)
        return
    for near, far, size in zip(here.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(*((near, far) if is_read else (far, near)), size)


def is_stacked(layout: Layout) -> bool:
    """True if every chunk is a separate array, as in `nhd` and `hnd`."""
    return len(layout.orders) == 1 and {axis for term in layout.orders[0].table for axis in term.axes} == {
        "b",
        "l",
        "o",
    }


@contextlib.contextmanager
def random_pool(layout: Layout, shape: BlockShape, num_blocks: int, place: str, *, seed: int = 1) -> Iterator[Pool]:
    """A pool with random bytes, in memory as an engine or a store has it.  The memory is released at the end.

    It is in one range of memory on ``"cpu"``, ``"pinned"`` or ``"cuda:N"``.  Stacked chunks are placed as in an engine: ``[no,
    blocks, chunk]``, one layer after the other.  Other layouts have one allocation after the other, each at a multiple of 256
    bytes.  Raises `CudaError` or MemoryError if there is not enough.
    """
    resolved = layout.resolve(shape, num_blocks)
    allocations = resolved.allocations
    if is_stacked(layout):
        layer, o, block = np.ogrid[: shape.nl, : shape.no, :num_blocks]
        entries, _ = resolved.address(block, l=layer, o=o)
        # The place of an entry in memory: its position among the entries in the order of the engine's array.
        offsets = np.argsort(entries, axis=None) * allocations[0].nbytes
        total = allocations[0].nbytes * len(allocations)
    else:
        sizes = np.array([-(-each.nbytes // 256) * 256 for each in allocations], np.int64)
        offsets, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    memory = Memory(total, place)
    try:
        memory.fill(seed)
        arrays: list[Any] = []
        for each, offset in zip(allocations, offsets.tolist(), strict=True):
            dtype = _dtype_of(each.dtype)
            if memory.device >= 0:
                arrays.append(View(memory.device, memory.address + offset, each.shape, each.strides, dtype.str))
            else:
                arrays.append(np.ndarray(each.shape, dtype, memory.array, offset, each.strides))
        pool = Pool(layout, shape, arrays)
        try:
            yield pool
        finally:
            pool.close()
    finally:
        memory.close()


def _dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype.  For dtypes that NumPy does not have: signed integers of the same width, which torch supports best."""
    found = np.dtype(numpy_name(name))
    return found if found.name == name else np.dtype(f"i{found.itemsize}")


def block_bytes(layout: Layout, shape: BlockShape) -> int:
    """Bytes of a block's elements; of all planes, if the layout has planes."""
    return layout.resolve(shape, 1).block_bytes


def held_blocks(layout: Layout, shape: BlockShape, largest: int, place: str) -> int:
    """Number of blocks of a pool so that consecutive batches of `largest` use other blocks, and the pool exceeds the cache."""
    # Source and destination together: four times the cache.
    beyond = -(-2 * cache_bytes(place) // block_bytes(layout, shape))
    table = layout.resolve(shape, 1).table_size if layout.b_in_table else 1
    return max(2 * largest, min(beyond, max(MOST_ARRAYS // table, 1)))


def _disjoint_neighbours(
    random: np.random.Generator, blocks: int, batch: int, count: int
) -> list[npt.NDArray[np.int32]]:
    """Random sets of ids.  With enough blocks, no set has an id of the set before, whose blocks may still be in a cache."""
    sets: list[npt.NDArray[np.int32]] = []
    for _ in range(count):
        order = random.permutation(blocks)
        if sets and blocks >= 2 * batch:
            order = order[~np.isin(order, sets[-1])]
        sets.append(order[:batch].astype(np.int32))
    return sets


class Ids:
    """Sets of random block ids that take turns.

    At least `least` of them: `for_cache` returns the number that keeps the caches cold.

    Examples
    --------
    >>> ids = Ids(8, 8, 4)
    >>> src_ids, dst_ids = next(ids)
    >>> len(ids.sets), len(src_ids), src_ids.dtype
    (6, 4, dtype('int32'))
    """

    def __init__(self, src_blocks: int, dst_blocks: int, batch: int, least: int = LEAST_SETS) -> None:
        random = np.random.default_rng(11)
        count = min(max(least, LEAST_SETS), MOST_SETS)
        sides = [_disjoint_neighbours(random, n, batch, count) for n in (src_blocks, dst_blocks)]
        self.sets = list(zip(*sides, strict=True))
        self._turns = itertools.cycle(self.sets)

    @staticmethod
    def for_cache(nbytes: int, place: str) -> int:
        """Number of sets so that batches of `nbytes` together have four times the size of the cache."""
        return -(-2 * cache_bytes(place) // nbytes)

    def __iter__(self) -> Ids:
        return self

    def __next__(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        src, dst = next(self._turns)
        return src, dst


# ---- the yardstick -------------------------------------------------------------------------------------------------


class Yardstick:
    """One contiguous copy from place to place, with alternating buffers that together are larger than the cache.

    It has room for `largest` bytes.  On the CPU it is NumPy's copy with one thread per core, or torch's if torch is installed
    and faster.
    """

    def __init__(self, src: str, dst: str, largest: int, clock: GpuClock | CpuClock) -> None:
        self.clock = clock
        cache = cache_bytes(src if device_of(src) >= 0 else dst)
        each = self.needs(largest, cache)
        self._src = Memory(each, src)
        try:
            self._dst = Memory(each, dst)
        except BaseException:
            self._src.close()
            raise
        self._src.fill(101)
        self._dst.fill(102)

    @staticmethod
    def needs(largest: int, cache: int) -> int:
        """Bytes per side: room for two of the largest copy, and with both sides four times the cache."""
        return max(2 * (-(-largest // 256) * 256), 2 * cache)

    def time(self, nbytes: int, *, iters: int, warmup: int = 3, replay: bool = False) -> Timed:
        """Seconds of a copy of `nbytes`."""
        count = min(MOST_SETS, self._src.nbytes // nbytes)
        places = [self._src.nbytes // count // 256 * 256 * turn for turn in range(count)]
        if isinstance(self.clock, CpuClock):
            return self._on_host(nbytes, itertools.cycle(places), iters, warmup)
        handle = _core.stream_handle(self.clock.stream)

        def copy(at: int) -> None:
            dst, src = (np.array([memory.address + at], np.uint64) for memory in (self._dst, self._src))
            _core.memcpy_batch(dst, src, nbytes, 1, self.clock.device, handle)

        if replay:
            calls = [lambda _, at=at: copy(at) for at in places]
            return self.clock.replay(calls, iters=iters, warmup=warmup)
        turns = itertools.cycle(places)
        return self.clock.time(lambda _: copy(next(turns)), iters=iters, warmup=warmup)

    def _on_host(self, nbytes: int, turns: Iterator[int], iters: int, warmup: int) -> Timed:
        assert isinstance(self.clock, CpuClock)
        src, dst = self._src.array, self._dst.array
        cores = len(os.sched_getaffinity(0))
        edges = np.linspace(0, nbytes, cores + 1, dtype=int).tolist()
        found = []
        with ThreadPoolExecutor(cores) as workers:

            def pieces(_: Any) -> None:
                at = next(turns)
                parts = [slice(at + begin, at + end) for begin, end in itertools.pairwise(edges)]
                list(workers.map(lambda part: np.copyto(dst[part], src[part]), parts))

            found.append(self.clock.time(pieces, iters=iters, warmup=warmup))
        with contextlib.suppress(ImportError):
            import torch

            src_tensor, dst_tensor = torch.from_numpy(src), torch.from_numpy(dst)

            def whole(_: Any) -> None:
                at = next(turns)
                dst_tensor[at : at + nbytes].copy_(src_tensor[at : at + nbytes])

            found.append(self.clock.time(whole, iters=iters, warmup=warmup))
        return min(found)

    def close(self) -> None:
        """Release the buffers.  No copy may be running."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._src.close)
            stack.callback(self._dst.close)

    def __enter__(self) -> Yardstick:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error means that there was not enough memory."""
    return isinstance(error, MemoryError) or (isinstance(error, CudaError) and error.name == "CUDA_ERROR_OUT_OF_MEMORY")
