"""Allocate GPU memory and pinned host memory, and register host memory of others.

Host memory is mapped, touched and registered here.  cudaHostAlloc (which cuda.core's memory resources call) is not used: it clears
and locks small pages on one thread, which takes 1.36 s for 4 GiB on an H200's host of 16 cores.  To touch huge pages on all cores
takes 0.08 s, and to register them 0.07 s.  Copies are equally fast.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import resource
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ..errors import CudaError, CudaUnavailableError, NotEnoughMemoryError
from ..layout.resolved import Allocation, Resolved
from ..layout.shapes import PACKED, round_up
from . import numa
from .array_info import array_on, bits_dtype, numpy_dtype

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


# ---- what the machine has ------------------------------------------------------------------------------------------


def available_bytes(root: str | os.PathLike[str] = "/") -> tuple[int, str]:
    """Bytes of host memory that a program can still get, and what limits them.

    The least of: the machine's available memory with its free swap, what each limit of a control group of this process (version
    1 or 2) leaves, and what the limit of the process's addresses leaves.  Pages of files that the kernel can drop do not count
    as used.
    """
    top = Path(root)
    found = [(sys.maxsize, "no known limit")]
    with contextlib.suppress(OSError, ValueError):
        lines = (top / "proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {key: int(rest.split()[0]) << 10 for key, _, rest in (line.partition(":") for line in lines) if rest}
        if "MemAvailable" in sizes:
            found.append((sizes["MemAvailable"] + sizes.get("SwapFree", 0), "of this machine"))
    for limit, used, stat in _limits(top):
        with contextlib.suppress(OSError, ValueError):
            most = int(limit.read_text(encoding="ascii"))  # "max" is no limit
            stats = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
            kept = sum(int(stats.get(key, 0)) for key in ("inactive_file", "active_file"))
            left = most - int(used.read_text(encoding="ascii")) + kept
            found.append((max(left, 0), f"within the limit of its control group ({limit})"))
    limit_of_process = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit_of_process != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            used_pages = int((top / "proc/self/statm").read_text(encoding="ascii").split()[0])
            left = limit_of_process - used_pages * mmap.PAGESIZE
            found.append((max(left, 0), "within the limit of this process (`ulimit -v`)"))
    return min(found, key=lambda one: one[0])


def _limits(top: Path) -> Iterator[tuple[Path, Path, Path]]:
    """The files with limit, use and statistics of each control group that this process is in."""
    groups = [(top / "sys/fs/cgroup", "max", "current"), (top / "sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes")]
    paths = {"/"}
    with contextlib.suppress(OSError):
        for line in (top / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                paths.update(str(one) for one in (Path(path), *Path(path).parents))
    for (base, limit, used), path in itertools.product(groups, sorted(paths)):
        folder = base / path.lstrip("/")
        yield folder / f"memory.{limit}", folder / f"memory.{used}", folder / "memory.stat"


def require_memory(nbytes: int, what: str, advice: str = "use fewer blocks, or a machine with more memory") -> None:
    """Raise `NotEnoughMemoryError` unless the host has this many bytes for `what`.  Call it before anything is allocated."""
    if nbytes <= 1 << 20:  # not worth to ask
        return
    left, where = available_bytes()
    if nbytes > left:
        raise NotEnoughMemoryError(f"{what}: needs {nbytes} bytes of host memory, and {left} are available {where}; {advice}")


def free_on_gpu(device: int) -> tuple[int, int]:
    """Free and all bytes of a GPU's memory."""
    from cuda.bindings import driver
    from cuda.core import Device

    from ..system.machine import cuda

    Device(device).set_current()
    free, total = cuda(driver.cuMemGetInfo(), f"asking for the free memory of cuda:{device}")
    return int(free), int(total)


# ---- arrays on one piece of memory ---------------------------------------------------------------------------------


def _sizes(resolved: Resolved) -> list[int]:
    return [round_up(kind.nbytes, _ALIGNMENT) for kind in resolved.kinds]


def total_bytes(resolved: Resolved) -> int:
    """Bytes of all allocations in one piece of memory, each at a multiple of 256 bytes.  Nothing is allocated to find it."""
    if resolved.has_separate_planes:
        return sum(map(total_bytes, resolved.parts))
    sizes = _sizes(resolved)
    return sum(sizes) * resolved.table_size // len(sizes)  # one kind, or as many of K as of V


def _offsets(resolved: Resolved) -> npt.NDArray[np.int64]:
    """Where each allocation begins in one piece of memory."""
    sizes, count = _sizes(resolved), resolved.table_size
    if len(sizes) == 1:
        return np.arange(count, dtype=np.int64) * sizes[0]
    ends = np.cumsum(np.array(sizes, np.int64)[np.frombuffer(resolved.kind_of_entry, np.uint8)])
    return np.concatenate([np.zeros(1, np.int64), ends[:-1]])


class Arrays(Sequence[Any]):
    """The arrays of a pool that owns its memory: each is made when you ask for it, so a million of them cost nothing.

    It has a length, indices, slices (a tuple), and iterates.  Each array keeps the memory alive.  ``make(kind, offset)`` is the
    array of a kind at a byte of the memory.
    """

    def __init__(self, resolved: Resolved, make: Callable[[Allocation, int], Any]) -> None:
        self._kinds, self._kind_of, self._make = resolved.kinds, resolved.kind_of_entry, make
        sizes = _sizes(resolved)
        self._step = sizes[0] if len(sizes) == 1 else 0
        self._offsets = None if self._step else _offsets(resolved)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The first byte of each array in the memory."""
        if self._offsets is not None:
            return self._offsets
        return np.arange(len(self), dtype=np.int64) * self._step

    def __len__(self) -> int:
        return len(self._kind_of)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        kind = self._kinds[self._kind_of[index]]  # raises IndexError
        at = index + len(self) if index < 0 else index
        return self._make(kind, at * self._step if self._offsets is None else int(self._offsets[at]))

    def __repr__(self) -> str:
        return f"<{len(self):,} arrays of {' and '.join(f'{kind.dtype} {kind.shape}' for kind in self._kinds)}>"


def host_arrays(resolved: Resolved, memory: Any) -> Arrays:
    """A pool's arrays on host memory (a buffer)."""
    return Arrays(resolved, functools.partial(array_on, memory))


def new_slab(nbytes: int, what: str) -> npt.NDArray[np.uint8]:
    """New host memory for a pool, not initialised; aligned to 256 bytes.

    Raises `NotEnoughMemoryError`, with nothing allocated, if the machine does not have it.
    """
    require_memory(nbytes, what)
    try:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:
        raise NotEnoughMemoryError(
            f"{what}: {nbytes} bytes: {error}. Raise the limits of the process (`ulimit -v`), or use fewer blocks"
        ) from None
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]


class DeviceMemory:
    """GPU memory.  `close` or the last reference frees it.

    It comes from cuMemAlloc.  Copies of cuda.core's stream-ordered pools would be as fast, but another GPU can access such memory
    only after a grant per pool and peer.  Memory of cuMemAlloc is accessible to every peer that was enabled for the context.
    """

    def __init__(self, device: int, nbytes: int, what: str = "GPU memory") -> None:
        from .. import _core

        try:
            self.address = _core.alloc_device(device, nbytes)
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            left = ""
            with contextlib.suppress(Exception):  # the driver's error is reported anyway
                left = " and {} of {} are free".format(*free_on_gpu(device))
            raise explained(error, f"{what}: needs {nbytes} bytes of cuda:{device},{left}", "; use fewer blocks") from None
        self.close = weakref.finalize(self, _free_device, device, self.address, os.getpid())
        self.device, self.nbytes = device, nbytes


class DeviceArray:
    """An array on `DeviceMemory`, which it keeps alive.

    `dtype` is that of its elements.  Where NumPy has no such dtype, the ``typestr`` of its interface is one of raw bytes
    (``|V2``), so that no framework takes the bits for integers.  `bits_of` gives the integers.
    """

    def __init__(self, memory: DeviceMemory, allocation: Allocation, offset: int = 0, *, bits: bool = False) -> None:
        self._memory, self._allocation, self._offset = memory, allocation, offset
        plain = bits_dtype(allocation.dtype)
        self.device = memory.device
        is_own = plain.name == allocation.dtype
        self.dtype = plain if bits or is_own else np.dtype("V1") if allocation.dtype in PACKED else numpy_dtype(allocation.dtype)
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": allocation.shape,
            "strides": allocation.strides,
            "typestr": plain.str if bits or is_own else f"|V{plain.itemsize}",
            "data": (memory.address + offset, False),
            "stream": None,
        }

    def is_deleted(self) -> bool:
        """True if the memory was freed."""
        return not self._memory.close.alive

    @property
    def bits(self) -> DeviceArray:
        """The same memory, with integers for elements of a dtype that NumPy lacks."""
        return DeviceArray(self._memory, self._allocation, self._offset, bits=True)


def bits_of(array: Any) -> Any:
    """The array; of kvbm's own GPU arrays their bits, for frameworks that read the dtype from the interface."""
    return array.bits if isinstance(array, DeviceArray) else array


def _free_device(device: int, address: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, which owns neither the memory nor the driver
        from .. import _core

        _core.free_device(device, address)


class Pins:
    """Registrations of host memory.  `close` or the end of their owner releases all of them."""

    def __init__(self, owner: object) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.close = weakref.finalize(owner, _unregister, self.ranges, os.getpid())
        # Copies may still run when the process ends; the driver then releases everything in a safe order.
        self.close.atexit = False

    def add(
        self, pages: Iterable[tuple[int, int, int]], starts: npt.NDArray[np.uint64], resolved: Resolved,
        progress: Progress | None, what: str,
    ) -> None:  # fmt: skip
        """Touch and register pages (begin, end, how) in pieces.  If one fails, nothing stays registered.

        Pieces begin at starts of allocations (`starts`, sorted), or of their blocks.
        """
        from .. import _core

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
                raise  # such as an exception of `progress`
            advice = "Raise the limits of the process (`ulimit -l`; in a container also its memory), or pin fewer blocks"
            if pieces[0][2] != NEW:
                advice += "; a file on disk that is mapped to be written may not be pinnable at all, one in /dev/shm is"
            where = f"{what}: bytes {start} to {start + end - begin} of {total}"
            raise explained(error, where, f" Memory that was already pinned has been released. {advice}.") from None


def _unregister(ranges: list[tuple[int, int]], pid: int) -> None:
    """Release all registrations, even if one fails."""
    from .. import _core

    with contextlib.ExitStack() as stack:
        while ranges:
            begin, _ = ranges.pop()
            if os.getpid() == pid:  # not in a forked child: its parent owns the registrations
                stack.callback(_core.host_unregister, begin)


def explained(error: CudaError | MemoryError, what: str, advice: str = "") -> CudaError | MemoryError:
    """The same error, with what failed and what to do in its message."""
    text = f"{what}: {error}{advice}"
    return type(error)(text, code=error.code, name=error.name) if isinstance(error, CudaError) else NotEnoughMemoryError(text)


class Slab:
    """New host memory in huge pages, to be registered.  It is unmapped with the last array on it.

    Arrays refer to it through ``__array_interface__`` and keep it alive.  So after `Pool.close`, an array that is still in use
    has unpinned memory instead of an invalid address.

    The pages shall be on the NUMA node of the GPU `device`, as for `numa.place`; `node` is the one that was set.
    """

    def __init__(self, nbytes: int, device: int | None = None) -> None:
        # Map more than needed, so that it can start at a huge page.  Pages that are not touched cost nothing.
        self._memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # DONTFORK: otherwise a fork would copy every byte of page-locked memory.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # a kernel without this option
                self._memory.madvise(advice)
        self.address = round_up(np.frombuffer(self._memory, np.uint8).ctypes.data, _HUGE_PAGE)
        self.node = numa.place(self.address, round_up(nbytes, mmap.PAGESIZE), device)
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


def pinned_slab(resolved: Resolved, progress: Progress | None, device: int | None = None) -> Slab:
    """A slab for every allocation of a pool, touched and registered; on the NUMA node of `device` (see `Slab`)."""
    from .. import _core

    what = f"pinned memory for {resolved.layout.name}"
    try:
        _core.device_count() if device is None else _core.device_info(device)  # raises an error before memory is touched
    except CudaUnavailableError as error:
        raise explained(error, what, " For memory that only the CPU uses, pass device='cpu'.") from None
    nbytes = round_up(total_bytes(resolved), mmap.PAGESIZE)
    require_memory(nbytes, what, "allocate fewer blocks")
    try:
        slab = Slab(nbytes, device)
    except (OSError, OverflowError) as error:
        raise NotEnoughMemoryError(
            f"{what}: {nbytes} bytes: {error}. Raise the limits of the process (`ulimit -v`), or allocate fewer blocks"
        ) from None
    starts = _offsets(resolved).astype(np.uint64) + np.uint64(slab.address)
    try:
        slab.pins.add([(slab.address, slab.address + nbytes, NEW)], starts, resolved, progress, what)
    except BaseException:
        slab.discard()
        raise
    return slab


def _split(begin: int, end: int, starts: npt.ArrayLike, block: int) -> Iterator[tuple[int, int]]:
    """Cut pages into pieces of at most `PIECE_BYTES`: at the start of an allocation (sorted), else of a block, else anywhere."""
    starts = np.asarray(starts, np.uint64)
    while end - begin > PIECE_BYTES:
        cut = _last_border(begin + PIECE_BYTES, starts, block)
        yield begin, cut
        begin = cut
    yield begin, end


def _last_border(limit: int, starts: npt.NDArray[np.uint64], block: int) -> int:
    page = mmap.PAGESIZE
    worth = limit - PIECE_BYTES // 2  # an earlier cut would make more pieces
    index = int(np.searchsorted(starts, np.uint64(limit), side="right"))
    near = starts[int(np.searchsorted(starts, np.uint64(max(worth, 0)))) : index]
    on_page = near[near % np.uint64(page) == 0]
    if on_page.size:
        return int(on_page[-1])
    if index and block:
        first = int(starts[index - 1])
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
