"""Memory of kvbm's own, on GPUs and pinned on the host, and the registration of memory that others own.

Host memory is mapped, touched and registered here, and comes neither from cudaHostAlloc nor from cuda.core's memory resources,
which end in it.  That clears and locks small pages on one thread: 4 GiB take 1.36 s on an H200's host of 16 cores.  Huge pages
that all cores touch take 0.08 s, and to register them 0.07 s; the copies are as fast.
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

#: What `progress` is: it takes the bytes that are done and all of them.
Progress = Callable[[int, int], object]

#: Most bytes of one registration.  The copy engine refuses a copy that crosses from one into the next, so there are as few
#: as can be, and their borders lie between allocations or blocks where they can.
PIECE_BYTES = 64 << 30
#: Bytes that are touched between two calls of `progress`, and between two looks at a pending Ctrl-C.
STEP_BYTES = 1 << 30
#: Where an allocation may start: what cuMemAlloc promises too, and more than any word or tile of a kernel asks for.
_ALIGNMENT = 256
_HUGE_PAGE = 2 << 20
NEW, WRITABLE, READONLY = 0, 1, 2  # `how` of _core.host_touch


class DeviceArray:
    """One allocation of GPU memory as an array; the memory is freed by `close`, or with the last reference to the array.

    It comes from cuMemAlloc.  Memory of cuda.core's pools (stream-ordered) would be as fast to copy, but another GPU reaches
    it only after a grant a pool and a peer, while cuMemAlloc's is there for every peer that the context has been opened to.
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


def _free_device(device: int, address: int, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child, to which neither the memory nor the driver belongs
        from . import _core

        _core.free_device(device, address)


class Pins:
    """Registrations of host memory, given back together: by `close`, or with their owner."""

    def __init__(self, owner: object) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.close = weakref.finalize(owner, _unregister, self.ranges, os.getpid())
        # Copies may still run when the process ends; the driver then takes everything back in an order that it knows is safe.
        self.close.atexit = False

    def add(
        self,
        pages: Iterable[tuple[int, int, int]],
        starts: Sequence[int],
        resolved: Resolved,
        progress: Progress | None,
        what: str,
    ) -> None:
        """Touch and register pages (begin, end, how) piece by piece, or leave nothing registered.

        Pieces are cut where allocations start (`starts`, sorted), or their blocks.
        """
        from . import _core

        block = resolved.id_steps[1]  # bytes; 0 where each block has allocations of its own
        pieces = [(*cut, how) for begin, end, how in pages for cut in _split(begin, end, starts, block)]
        total = sum(end - begin for begin, end, _ in pieces)
        threads = len(os.sched_getaffinity(0))
        done = start = 0  # bytes, twice: once touched and once registered

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
            with contextlib.suppress(CudaError):  # what went wrong first is what matters
                self.close()
            if not isinstance(error, CudaError | MemoryError):
                raise
            advice = (
                "Raise the limits of the process (`ulimit -l`; in a container also its memory), or pin fewer blocks"
            )
            if pieces[0][2] != NEW:
                advice += "; a file on disk that is mapped to be written may not be pinnable at all, one in /dev/shm is"
            where = f"{what}: bytes {start} to {start + end - begin} of {total}"
            raise explained(error, where, f" What had been pinned is released again. {advice}.") from None


def _unregister(ranges: list[tuple[int, int]], pid: int) -> None:
    """Give back registrations, all of them even if one fails."""
    from . import _core

    with contextlib.ExitStack() as stack:
        while ranges:
            begin, _ = ranges.pop()
            if os.getpid() == pid:  # not a forked child: the registrations are its parent's
                stack.callback(_core.host_unregister, begin)


def explained(error: CudaError | MemoryError, what: str, advice: str = "") -> CudaError | MemoryError:
    """The same error, saying what for and what to do."""
    text = f"{what}: {error}{advice}"
    return type(error)(text, code=error.code, name=error.name) if isinstance(error, CudaError) else MemoryError(text)


class Slab:
    """Fresh host memory in huge pages, to be registered; it is unmapped when the last array on it is gone.

    Arrays are made from it through ``__array_interface__``, and so keep it: whoever holds one when the pool is closed has
    memory that is no longer pinned, and not an address that leads nowhere.
    """

    def __init__(self, nbytes: int) -> None:
        # More than is asked for, so that it can start with a huge page; pages that are not touched cost nothing.
        self._memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # DONTFORK: the kernel would copy page-locked memory at a fork, every byte of it.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without it
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
        """No longer pinned."""
        self.pins.close()

    def discard(self) -> None:
        """Unmap now what no array has been made of: the traceback of an error would keep it."""
        self._memory.close()


def pinned_arrays(resolved: Resolved, progress: Progress | None) -> tuple[Slab, list[npt.NDArray[Any]]]:
    """Every allocation of a pool in one slab, touched and registered."""
    from . import _core

    what = f"pinned memory for {resolved.layout.name}"
    try:
        _core.device_count()  # before anything is touched
    except CudaUnavailableError as error:
        raise explained(error, what, " Memory for the CPU alone is device='cpu'.") from None
    ends = list(itertools.accumulate(round_up(a.nbytes, _ALIGNMENT) for a in resolved.allocations))
    offsets = [0, *ends[:-1]]
    nbytes = round_up(ends[-1], mmap.PAGESIZE)
    try:
        slab = Slab(nbytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{what}: {nbytes} bytes: {error}. Raise the limits that the process runs under (`ulimit -v`), or ask for fewer blocks"
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
    """Cut pages into pieces of at most `PIECE_BYTES`: where an allocation starts (sorted), else a block, else anywhere."""
    while end - begin > PIECE_BYTES:
        cut = _last_border(begin + PIECE_BYTES, starts, block)
        yield begin, cut
        begin = cut
    yield begin, end


def _last_border(limit: int, starts: Sequence[int], block: int) -> int:
    page = mmap.PAGESIZE
    worth = limit - PIECE_BYTES // 2  # a cut before it would make more pieces
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
    """The allocations or registrations that hold these spans (sorted), or None where one lies in none.

    `known` are our own; `ask` is the driver, and answers for one byte where it knows no more.
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
            if end - begin == 1:  # no more is known than that this byte is pinned: see that the last one is too
                if not ask(last - 1)[1]:
                    return None
                break
            at = end
    return found


def unpinned_pages(
    spans: Sequence[tuple[int, int]], readonly: Sequence[bool], ask: Callable[[int], tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """Pages of these spans (sorted) that are not pinned: begin, end, and whether they may only be read."""
    page = mmap.PAGESIZE
    wanted: list[tuple[int, int, bool]] = []
    pinned: list[tuple[int, int]] = []
    for (first, last), fixed in zip(spans, readonly, strict=True):
        begin, end = first // page * page, round_up(last, page)
        ranges = [ask(first), ask(last - 1)]
        if all(b - a == 1 for a, b in ranges):
            pinned.append((begin, end))
        pinned += [(a // page * page, round_up(b, page)) for a, b in ranges if b]
        # One page can be in two arrays; then it can be written if one of them can.  Pages of different mappings are not joined.
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
