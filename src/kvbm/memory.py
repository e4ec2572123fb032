"""Allocate GPU memory and pinned host memory, and register host memory of others.

Host memory is mapped, touched and registered here.  cudaHostAlloc (which cuda.core's memory resources call) is not used: it clears
and locks small pages on one thread, which takes 1.36 s for 4 GiB on an H200's host of 16 cores.  To touch huge pages on all cores
takes 0.08 s, and to register them 0.07 s.  Copies are equally fast.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import numpy_dtype
from .errors import CudaError, CudaUnavailableError
from .resolved import Allocation, Resolved
from .shapes import round_up

__all__ = ["DeviceArray", "Pins", "Progress", "Slab", "explained", "find_ranges", "pinned_arrays", "unpinned_pages"]

#: Type of `progress`: a function of the bytes done and of all bytes.
Progress = Callable[[int, int], object]

#: Most bytes of one registration.  The copy engine refuses a copy that crosses from one registration into the next.  So there are
#: as few as possible, and they end between allocations or blocks if possible.
PIECE_BYTES = 64 << 30
#: Bytes that are touched between two calls of `progress`, and between two checks for Ctrl-C.
STEP_BYTES = 1 << 30
#: Alignment of allocations (bytes).  cuMemAlloc guarantees the same, and kernels need less.
_ALIGNMENT = 256
_HUGE_PAGE = 2 << 20
NEW, WRITABLE, READONLY = 0, 1, 2  # `how` of _core.host_touch


class DeviceArray:
    """One allocation of GPU memory as an array.  `close` or the last reference frees the memory.

    It comes from cuMemAlloc.  Copies of cuda.core's stream-ordered pools would be as fast, but another GPU can access such memory
    only after a grant per pool and peer.  Memory of cuMemAlloc is accessible to every peer that was enabled for the context.
    """

    def __init__(self, device: int, allocation: Allocation) -> None:
        from . import _core

        address = _core.alloc_device(device, allocation.nbytes)
        self.close = weakref.finalize(self, _free_device, device, address, os.getpid())
        self.device = device
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": allocation.shape,
            "strides": allocation.strides,
            "typestr": numpy_dtype(allocation.dtype).str,
            "data": (address, False),
            "stream": None,
        }

    def is_deleted(self) -> bool:
        """True if the memory was freed."""
        return not self.close.alive


def _free_device(device: int, address: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, which owns neither the memory nor the driver
        from . import _core

        _core.free_device(device, address)


class Pins:
    """Registrations of host memory.  `close` or the end of their owner releases all of them."""

    def __init__(self, owner: object) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.close = weakref.finalize(owner, _unregister, self.ranges, os.getpid())
        # Copies may still run when the process ends; the driver then releases everything in a safe order.
        self.close.atexit = False

    def add(
        self,
        pages: Iterable[tuple[int, int, int]],
        starts: Sequence[int],
        resolved: Resolved,
        progress: Progress | None,
        what: str,
    ) -> None:
        """Touch and register pages (begin, end, how) in pieces.  If one fails, nothing stays registered.

        Pieces begin at starts of allocations (`starts`, sorted), or of their blocks.
        """
        from . import _core

        block = resolved.id_steps[1]  # bytes; 0 if each block has its own allocations
        pieces = [(*cut, how) for begin, end, how in pages for cut in _split(begin, end, starts, block)]
        total = sum(end - begin for begin, end, _ in pieces)
        threads = len(os.sched_getaffinity(0))
        done = start = 0  # each byte counts twice: when it is touched, and when it is registered

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done // 2, total)

        try:
            for begin, end, how in pieces:
                start = done // 2
                for at in range(begin, end, STEP_BYTES):
                    size = min(STEP_BYTES, end - at)
                    _core.host_touch(at, size, how, threads)
                    advance(size)
                _core.host_register(begin, end - begin, how == READONLY)
                self.ranges.append((begin, end))
                advance(end - begin)
        except BaseException as error:
            with contextlib.suppress(CudaError):  # report the first error
                self.close()
            if not isinstance(error, CudaError | MemoryError):
                raise
            advice = (
                "Raise the limits of the process (`ulimit -l`; in a container also its memory), or pin fewer blocks"
            )
            if pieces[0][2] != NEW:
                advice += "; a file on disk that is mapped to be written may not be pinnable at all, one in /dev/shm is"
            where = f"{what}: bytes {start} to {start + end - begin} of {total}"
            raise explained(error, where, f" Memory that was already pinned has been released. {advice}.") from None


def _unregister(ranges: list[tuple[int, int]], pid: int) -> None:
    """Release all registrations, even if one fails."""
    from . import _core

    with contextlib.ExitStack() as stack:
        while ranges:
            begin, _ = ranges.pop()
            if os.getpid() == pid:  # not in a forked child: its parent owns the registrations
                stack.callback(_core.host_unregister, begin)


def explained(error: CudaError | MemoryError, what: str, advice: str = "") -> CudaError | MemoryError:
    """The same error, with what failed and what to do in its message."""
    text = f"{what}: {error}{advice}"
    return type(error)(text, code=error.code, name=error.name) if isinstance(error, CudaError) else MemoryError(text)


class Slab:
    """New host memory in huge pages, to be registered.  It is unmapped with the last array on it.

    Arrays refer to it through ``__array_interface__`` and keep it alive.  So after `Pool.close`, an array that is still in use has
    unpinned memory instead of an invalid address.
    """

    def __init__(self, nbytes: int) -> None:
        # Map more than needed, so that it can start at a huge page.  Pages that are not touched cost nothing.
        self._memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # DONTFORK: otherwise a fork would copy every byte of page-locked memory.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without this option
                self._memory.madvise(advice)
        self.address = round_up(np.frombuffer(self._memory, np.uint8).ctypes.data, _HUGE_PAGE)
        self.pins = Pins(self)
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def close(self) -> None:
        """Unpin the memory."""
        self.pins.close()

    def discard(self) -> None:
        """Unmap the memory now, before any array uses it: the traceback of an error would keep it alive."""
        self._memory.close()


def pinned_arrays(resolved: Resolved, progress: Progress | None) -> tuple[Slab, list[npt.NDArray[Any]]]:
    """Every allocation of a pool in one slab, touched and registered."""
    from . import _core

    what = f"pinned memory for {resolved.layout.name}"
    try:
        _core.device_count()  # raises an error before memory is touched
    except CudaUnavailableError as error:
        raise explained(error, what, " For memory that only the CPU uses, pass device='cpu'.") from None
    ends = list(itertools.accumulate(round_up(a.nbytes, _ALIGNMENT) for a in resolved.allocations))
    offsets = [0, *ends[:-1]]
    nbytes = round_up(ends[-1], mmap.PAGESIZE)
    try:
        slab = Slab(nbytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{what}: {nbytes} bytes: {error}. Raise the limits of the process (`ulimit -v`), or allocate fewer blocks"
        ) from None
    starts = [slab.address + offset for offset in offsets]
    try:
        slab.pins.add([(slab.address, slab.address + nbytes, NEW)], starts, resolved, progress, what)
    except BaseException:
        slab.discard()
        raise
    memory = np.asarray(slab)
    return slab, [
        np.ndarray(a.shape, numpy_dtype(a.dtype), memory, offset, a.strides)
        for a, offset in zip(resolved.allocations, offsets, strict=True)
    ]


def _split(begin: int, end: int, starts: Sequence[int], block: int) -> Iterator[tuple[int, int]]:
    """Cut pages into pieces of at most `PIECE_BYTES`: at the start of an allocation (sorted), else of a block, else anywhere."""
    while end - begin > PIECE_BYTES:
        cut = _last_border(begin + PIECE_BYTES, starts, block)
        yield begin, cut
        begin = cut
    yield begin, end


def _last_border(limit: int, starts: Sequence[int], block: int) -> int:
    page = mmap.PAGESIZE
    worth = limit - PIECE_BYTES // 2  # an earlier cut would make more pieces
    index = bisect_right(starts, limit)
    for start in itertools.takewhile(lambda start: start >= worth, reversed(starts[:index])):
        if start % page == 0:
            return start
    if index and block:
        first = starts[index - 1]
        last = first + (limit - first) // block * block
        for border in range(last, max(first, worth, last - page * block), -block):
            if border % page == 0:
                return border
    return limit


def find_ranges(
    spans: Iterable[tuple[int, int]], known: Sequence[tuple[int, int]], ask: Callable[[int], tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """The allocations or registrations that hold these spans (sorted); None if a span is in none of them.

    `known` are kvbm's own.  `ask` asks the driver; it may know only that a single byte is pinned.
    """
    found: list[tuple[int, int]] = []
    begin = end = 0
    for first, last in spans:
        at = first
        while at < last:
            if not begin <= at < end:
                near = bisect_right(known, (at, sys.maxsize)) - 1
                begin, end = known[near] if near >= 0 and at < known[near][1] else ask(at)
                if not begin <= at < end:
                    return None
                found.append((begin, end))
            if end - begin == 1:  # only this byte is known to be pinned: check the last byte, too
                if not ask(last - 1)[1]:
                    return None
                break
            at = end
    return found


def unpinned_pages(
    spans: Sequence[tuple[int, int]], readonly: Sequence[bool], ask: Callable[[int], tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """Pages of these spans (sorted) that are not pinned: begin, end, and True if they are read-only."""
    page = mmap.PAGESIZE
    wanted: list[tuple[int, int, bool]] = []
    pinned: list[tuple[int, int]] = []
    for (first, last), fixed in zip(spans, readonly, strict=True):
        begin, end = first // page * page, round_up(last, page)
        ranges = [ask(first), ask(last - 1)]
        if all(b - a == 1 for a, b in ranges):
            pinned.append((begin, end))
        pinned += [(a // page * page, round_up(b, page)) for a, b in ranges if b]
        # A page may be in two arrays; it is writable if one of them is.  Pages of different mappings are not joined.
        if wanted and (begin < wanted[-1][1] or (begin == wanted[-1][1] and fixed == wanted[-1][2])):
            before = wanted.pop()
            begin, end, fixed = before[0], max(before[1], end), before[2] and fixed
        wanted.append((begin, end, fixed))
    pinned.sort()
    missing, i = [], 0
    for begin, end, fixed in wanted:
        at = begin
        while i < len(pinned) and pinned[i][0] < end:
            if pinned[i][0] > at:
                missing.append((at, pinned[i][0], fixed))
            at = max(at, pinned[i][1])
            if pinned[i][1] > end:
                break
            i += 1
        if at < end:
            missing.append((at, end, fixed))
    return missing
