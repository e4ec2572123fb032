"""Digests of the blocks of a pool: the kernels that sum up their cells, and the arrays that receive the digests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..compile.prepare import digest_copies, warm
from ..digest.cells import Keys, alone
from ..errors import BindError
from ..memory.allocation import find_ranges
from ..memory.array_info import describe, flat_integers
from ..memory.streams import framework_of, framework_stream, require_no_stream
from ..system.machine import device_of

if TYPE_CHECKING:
    from .pool import Pool
    from .section import PoolSection

_MOST = (1 << 31) - 1

#: Copies in graphs that write to memory of this module.
_captured: list[_core.Done] = []


class Digester:
    """Digests the blocks or units of one section of a pool.  The pool keeps it.  `keys` are those of the same coordinates."""

    def __init__(self, part: PoolSection, keys: Keys) -> None:
        pool = part.pool
        self.title = f"digest of {pool.layout.name}"
        self.device = device_of(pool.device)
        self.framework = framework_of(pool.arrays[0])
        self.num_ids, self.units = part.num_ids, part.of.units
        self.unit_tokens = pool.shape.nt // self.units
        table = _core.Table(pool.steps.shorten(pool.addresses, pool.num_blocks), self.device, watch=pool.watch)
        launches = alone(part.of, keys, pool.alignment, self.title, turns=self.device >= 0)
        copies = digest_copies(launches, keys.lanes, pool.steps)
        warm(copies, self.device)
        self.route = _core.Route(
            self.device, table, table, self.num_ids, _MOST, direct=(), limits=(), digests=(copies, ())
        )

    def digest(
        self, pool: Pool, ids: Any, tokens: Any, out: Any, stream: Any, wait: Any
    ) -> npt.NDArray[np.uint64] | _core.Done:
        most = self.num_ids if ids is None else _MOST
        try:
            pairs = _core.Pairs(ids, None, self.num_ids, most, False, self.device)
        except BindError as error:  # the message says "src_ids", but a digest has only one side
            raise BindError(str(error).replace("src_ids", "ids")) from None
        if tokens is None and self.units > 1:
            tokens = unit_positions(ids, pairs, self.units, self.unit_tokens)
        positions = None if tokens is None else _core.Positions(tokens, len(pairs), self.device)
        if self.device < 0:
            require_no_stream("the pool is on the CPU, where the call waits for digests", stream=stream, wait=wait)
            found: npt.NDArray[np.uint64] = np.zeros(len(pairs), np.uint64) if out is None else out
            address, _, _ = digest_array(found, len(pairs), -1, () if out is None else (pool,))
            self.route.digest(pairs, positions, address)
            return found
        if stream is None:
            stream = framework_stream(self.framework, self.device)
        if out is not None:
            address, far, keep = digest_array(out, len(pairs), self.device, (pool,))
            return self.route.digest(pairs, positions, address, far, stream, wait, (pool, keep))
        found = np.zeros(len(pairs), np.uint64)
        done = self.route.digest(pairs, positions, found.ctypes.data, True, stream, wait, (pool, found))
        if done.captured:
            _captured.append(done)  # a launch of its graph writes to this memory
            raise BindError(
                f"{self.title}: the stream captures a graph, so digests exist only after a replay; pass an array with out="
            )
        done.synchronize()
        return found


def unit_positions(ids: Any, pairs: _core.Pairs, units: int, tokens: int) -> npt.NDArray[np.int64]:
    """The position in its block of each unit's first token.  `ids` are the caller's ids of the source.

    Raises `BindError` if they are on a GPU: the host does not read them.
    """
    given = ids if isinstance(ids, np.ndarray) else pairs.ids()[0]
    if given is None:
        raise BindError(
            "tokens: the host cannot read ids of units on a GPU, so it does not know their places in blocks; pass tokens=, the "
            "position of each unit's first token"
        )
    numbers = np.atleast_1d(given).astype(np.int64)
    return np.where(numbers < 0, 0, numbers % units) * tokens


def digest_array(array: Any, count: int, device: int, pools: Iterable[Pool]) -> tuple[int, bool, Any]:
    """The memory for digests: its address, True if GPU kernels write to host memory, and the object that keeps it alive.

    Raises `BindError` if the array is not a contiguous, writable array of `count` 64-bit integers, the kernels cannot
    access it, or it is inside one of the pools.
    """
    address, where, owner = flat_integers(array, count) or _described(array, count)
    end = address + 8 * count
    if where != device and (where >= 0 or not _is_pinned(address, end)):
        on, found = ("cpu" if index < 0 else f"cuda:{index}" for index in (device, where))
        raise BindError(f"digests: expected memory on {on}, or pinned host memory, got an array on {found}")
    for pool in pools:
        if pool.holds(address, end):
            raise BindError(f"digests: expected separate memory, got an array in the memory of {pool!r}")
    return address, where != device, (array, owner)


def _described(array: Any, count: int) -> tuple[int, int, Any]:
    """`flat_integers` for any array; raises an error if the array does not fit."""
    info = describe(array, "digests")
    if info.dtype not in ("uint64", "int64") or info.shape != (count,) or (count > 1 and info.strides != (8,)):
        raise BindError(
            f"digests: expected a contiguous array of {count} uint64 or int64, got shape {info.shape} of {info.dtype}"
        )
    if info.readonly:
        raise BindError("digests: expected a writable array, got a read-only one")
    return info.address, device_of(info.device), info.owner


def _is_pinned(begin: int, end: int) -> bool:
    """True if GPUs can access all of this host memory.  They cannot access memory after the end of a registration."""
    behind = _core.memory_range(begin)[1]  # usually the driver is asked once
    return end <= behind or find_ranges([(begin, end)], (), _core.memory_range) is not None
