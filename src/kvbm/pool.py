"""Pools: a layout bound to memory, with everything checked that could make a copy silently wrong."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .engines import FromEngines
from .errors import BindError, CudaError, CudaUnavailableError, DTypeError
from .layout import Layout
from .resolved import Allocation, Resolved, merge_steps
from .shapes import ITEMSIZE, BlockShape, numpy_name

__all__ = ["Array", "Pool", "describe"]

#: Arrays of integers (or of raw bytes) of the same width stand in for dtypes that NumPy does not have.
_PLAIN = {1: ("uint8", "int8", "void8"), 2: ("uint16", "int16", "void16")}
#: What frameworks call a dtype whose items hold several elements.
_PAIRS = {"float4_e2m1fn_x2": "float4_e2m1fn"}

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
_NEW, _WRITABLE, _READONLY = 0, 1, 2  # `how` of _core.host_touch


class Array(NamedTuple):
    """What kvbm needs to know of an array: address, elements along each axis, bytes between neighbours, dtype, device."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    readonly: bool


def describe(array: Any, what: str = "array") -> Array:
    """Look at an array without touching its memory.

    Parameters
    ----------
    array : torch.Tensor, numpy.ndarray, or anything with ``__cuda_array_interface__`` or ``__dlpack__``
        torch is not imported for it.
    what : str
        What errors call it.

    Raises
    ------
    BindError
        It is none of these, or lies on a device that is neither the CPU nor a CUDA GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        device = array.device
        if device.type not in ("cpu", "cuda"):
            raise BindError(f"{what}: expected a CPU or CUDA tensor, got one on {device}")
        size = array.element_size()
        return Array(
            array.data_ptr(),
            tuple(array.shape),
            tuple(stride * size for stride in array.stride()),
            str(array.dtype).removeprefix("torch."),
            "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
            False,
        )
    if isinstance(array, np.ndarray):
        return _numpy(array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _cuda_array(array, interface)
    if hasattr(array, "__dlpack__"):
        return _dlpack(array, what)
    raise BindError(
        f"{what}: expected a torch tensor, a NumPy array, or an object with __cuda_array_interface__ or __dlpack__, "
        f"got {type(array).__name__}"
    )


def _numpy(array: npt.NDArray[Any]) -> Array:
    return Array(array.ctypes.data, array.shape, array.strides, array.dtype.name, "cpu", not array.flags.writeable)


def _cuda_array(array: Any, interface: dict[str, Any]) -> Array:
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    address, readonly = interface["data"]
    strides = interface.get("strides") or _dense(shape, dtype.itemsize)
    device = getattr(array, "device", None)
    index = getattr(device, "id", device if isinstance(device, int) else None)
    if index is None:
        from . import _core

        index = max(_core.pointer_device(address), 0)
    # Users of the interface that have richer dtypes say so (CuPy with ml_dtypes).
    name = getattr(getattr(array, "dtype", None), "name", None) or dtype.name
    return Array(address, shape, tuple(strides), str(name), f"cuda:{index}", bool(readonly))


def _dlpack(array: Any, what: str) -> Array:
    kind, index = array.__dlpack_device__()
    if int(kind) in (1, 3):  # kDLCPU, kDLCUDAHost
        try:
            return _numpy(np.from_dlpack(array))
        except (BufferError, RuntimeError, TypeError) as error:
            raise BindError(f"{what}: NumPy cannot view this {type(array).__name__} through DLPack: {error}") from None
    if int(kind) != 2:  # kDLCUDA
        raise BindError(f"{what}: expected memory of the CPU or of a CUDA GPU, got DLPack device type {int(kind)}")
    from cuda.core.utils import StridedMemoryView

    try:
        # stream_ptr=-1: no synchronisation here; the copy runs in the order of the stream that the caller names.
        view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
        dtype = view.dtype
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise BindError(
            f"{what}: cuda.core cannot view this {type(array).__name__} through DLPack: {error}; pass its bits as integers of "
            "the same width, or a torch tensor"
        ) from None
    shape = tuple(view.shape)
    strides = tuple(s * dtype.itemsize for s in view.strides) if view.strides else _dense(shape, dtype.itemsize)
    return Array(view.ptr, shape, strides, dtype.name, f"cuda:{index}", bool(view.readonly))


def _dense(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, held = [], itemsize
    for extent in reversed(shape):
        strides.append(held)
        held *= extent
    return tuple(reversed(strides))


def _same_strides(array: Array, strides: Sequence[int]) -> bool:
    """Strides of axes of one element are never stepped."""
    return all(a == b for n, a, b in zip(array.shape, array.strides, strides, strict=True) if n > 1)


def same_dtype(found: str, wanted: str) -> bool:
    """Whether an array of dtype `found` holds elements of dtype `wanted`: equal, or a stand-in of the same width."""
    return _PAIRS.get(found, found) == wanted or found in _stand_ins(wanted)


def _stand_ins(dtype: str) -> tuple[str, ...]:
    return _PLAIN[ITEMSIZE[dtype]] if numpy_name(dtype) != dtype else ()


class Pool(FromEngines):
    """A layout bound to memory.

    Parameters
    ----------
    layout : Layout
        Where things lie.  It is declared, never guessed from the arrays.
    shape : BlockShape
        Sizes and dtype of a block.
    tensors : sequence of arrays
        One an allocation, in table order, each shaped as its order says: ``[l] o b t h d`` takes ``nl`` arrays of shape
        ``(no, nb, nt, nh, hd)``.  One array may be given as it is where there is one allocation.

    Attributes
    ----------
    num_blocks : int
        Blocks it holds; block ids are ``0 … num_blocks - 1``.
    device : str
        ``"cpu"`` or ``"cuda:N"``.  Pinned pools are on the CPU.
    arrays : tuple
        The arrays, kept alive as long as the pool.  Empty after `close` if the memory was the pool's own.
    addresses : numpy.ndarray of uint64
        Their addresses, in table order.
    pinned : bool
        Whether it is host memory that GPUs reach.
    closed : bool
        Whether `close` was called.
    nbytes : int
        Bytes that they span.

    Raises
    ------
    BindError
        Wrong count, rank, shape or strides (the axis that differs is named), arrays that overlap, a mix of devices.
    DTypeError
        Not the dtype of `shape`, or a mix.

    Notes
    -----
    A pool is a context manager: what it owns (memory of `allocate`, registrations of `pin`) is given back at the end of
    the ``with`` statement, by `close`, or with the last reference.  Wait for your copies first.

    Examples
    --------
    >>> import numpy as np
    >>> shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=8, dtype="float32")
    >>> Pool(load("universal"), shape, [np.zeros((4, 2, 2, 16, 8), "float32")] * 1).num_blocks
    1
    """

    def __init__(self, layout: Layout, shape: BlockShape, tensors: Any) -> None:
        arrays = tuple(tensors) if isinstance(tensors, list | tuple) else (tensors,)
        found = [describe(array, f"{layout.name}: array {index}") for index, array in enumerate(arrays)]
        self._bind(layout, shape, found, arrays)
        check_arrays(self.resolved, found)
        self.require_distinct()

    @classmethod
    def trusted(cls, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: Sequence[Any]) -> Pool:
        """A pool of arrays whose shapes the caller has checked (`kernels` takes chunks of any rank)."""
        pool = cls.__new__(cls)
        pool._bind(layout, shape, found, tuple(arrays))
        return pool

    def _bind(self, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: tuple[Any, ...]) -> None:
        if not found:
            raise BindError(f"{layout.name}: expected at least one array, got none")
        self.layout = layout
        self.shape = shape
        self.arrays = arrays
        self.num_blocks = _count_blocks(layout, shape, found)
        self.resolved: Resolved = layout.resolve(shape, self.num_blocks)
        if len(found) != self.resolved.table_size:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected {self.resolved.table_size} arrays, one an allocation in table "
                f"order, got {len(found)}"
            )
        self.device = found[0].device
        self._readonly_arrays = [array.readonly for array in found]
        self.readonly = any(self._readonly_arrays)
        check_alike(self.resolved, found)
        self._addresses: npt.NDArray[np.uint64] = np.array([array.address for array in found], np.uint64)
        self._spans: npt.NDArray[np.uint64] | None = None
        self._step: tuple[int | None] | None = None
        self._closed = False
        self._owned: tuple[_Slab | DeviceArray, ...] = ()
        self._pins: _Pins | None = None
        self._ranges: list[tuple[int, int]] | None = None

    @classmethod
    def allocate(
        cls, layout: Layout, shape: BlockShape, num_blocks: int, device: str = "cpu", progress: Progress | None = None
    ) -> Pool:
        """A pool on memory of its own, not initialised.

        Parameters
        ----------
        layout, shape
            As for `Pool`.
        num_blocks : int
            Blocks that it holds.
        device : str
            ``"cpu"`` (NumPy arrays), ``"pinned"`` (NumPy arrays in host memory that every GPU reaches, and that the copy
            engines run at full speed from), ``"cuda"`` or ``"cuda:N"`` (objects with ``__cuda_array_interface__``).
        progress : callable, optional
            Pinning takes a second for some 30 GB.  Called on this thread as ``progress(done_bytes, total_bytes)`` after
            every GiB that was touched and every piece that was registered, each of which counts half; at the end, and for
            other memory only then, ``done_bytes == total_bytes``.  An exception that it raises ends the allocation.

        Returns
        -------
        Pool
            Which owns the memory: see `close`.

        Raises
        ------
        CudaError, CudaUnavailableError, MemoryError
            The memory does not suffice; no GPU, which ``"pinned"`` needs too.  Nothing is held back.
        BindError
            Another device.

        Notes
        -----
        The allocations of a pinned pool lie in one range of addresses, each at a multiple of 256 bytes and right behind the
        one before, so equally sized ones lie at a constant `step`.  A forked child does not have this memory, as it would
        not have that of cudaHostAlloc: to touch it there ends the child.
        """
        found = re.fullmatch(r"(cpu|pinned|cuda)(?::([0-9]+))?", str(device))
        if not found or (found[2] and found[1] != "cuda"):
            raise BindError(f"device: expected 'cpu', 'pinned', 'cuda' or 'cuda:N', got {device!r}")
        resolved = layout.resolve(shape, num_blocks)
        if found[1] == "pinned":
            slab, arrays = _pinned_arrays(resolved, progress)
            pool = cls(layout, shape, arrays)
            pool._owned = (slab,)
            return pool
        if found[1] == "cpu":
            pool = cls(layout, shape, [_empty(allocation) for allocation in resolved.allocations])
            # Nothing to give back by name: the arrays go with the last reference.
        else:
            index = int(found[2] or 0)
            owned = tuple(DeviceArray(index, allocation) for allocation in resolved.allocations)
            pool = cls(layout, shape, owned)
            pool._owned = owned
        if progress is not None:
            progress(pool.nbytes, pool.nbytes)
        return pool

    # ---- memory that is given back ---------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def require_open(self) -> None:
        """Raise `BindError` if the pool was closed: its addresses lead nowhere."""
        if self._closed:
            raise BindError(
                f"{self!r} is closed; expected a pool that is open: make it anew, or copy before it is closed"
            )

    def close(self) -> None:
        """Give back what the pool owns; it cannot be copied from or to any more.

        Memory of `allocate` on a GPU is freed, for which the driver waits for running work; views of it lead nowhere from
        then on.  Memory of ``allocate(device="pinned")`` is no longer pinned, and is unmapped with the last array on it.
        What `pin` registered is no longer pinned.  The caller's own arrays stay as they are.

        Host memory must not lose its registration under a copy that is running, and the driver does not wait reliably for
        that: wait for your copies first (``done.synchronize()``).  Nothing is waited for here.  A `Transfer` keeps its pools
        alive; what it does not prevent is that you close them.  Closing twice is closing once.
        """
        if self._closed:
            return
        self._closed = True
        self._ranges = None
        owned, self._owned = self._owned, ()
        pins, self._pins = self._pins, None
        if owned:
            self.arrays = ()
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            for one in (*owned, *([pins] if pins else [])):
                stack.callback(one.close)

    def __enter__(self) -> Pool:
        self.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- host memory that GPUs reach -------------------------------------------------------------------------------

    def pin(self, progress: Progress | None = None) -> None:
        """Register the pool's host memory, so that GPUs reach it and the copy engines run at full speed; undone by `close`.

        For arrays of your own: NumPy's, ``numpy.memmap`` (read-only ones too, as sources), CPU tensors.  Registered are
        whole pages, each once however many arrays share it.  Memory that is pinned already (``tensor.pin_memory()``, another
        pool) is left alone: it must stay pinned as long as this pool is copied.  Pinning twice is pinning once.

        Parameters
        ----------
        progress : callable, optional
            As for `allocate`; not called where nothing is left to pin.

        Raises
        ------
        BindError
            A pool on a GPU, or a closed one.
        CudaError, CudaUnavailableError
            The driver refuses; no GPU.  Nothing of the pool is registered then.
        """
        self.require_open()
        if self.device != "cpu":
            raise BindError(f"{self!r}: pin() is for host memory, expected a pool on the CPU")
        if self.pinned:
            return
        from . import _core

        what = f"pinning {self.layout.name}"
        order = np.argsort(self.addresses, kind="stable")
        try:
            missing = _unpinned_pages(
                self.spans.tolist(), [self._readonly_arrays[i] for i in order], _core.memory_range
            )
        except CudaUnavailableError as error:
            raise _explained(error, what) from None
        starts, block = self.spans[:, 0].tolist(), _block_step(self.resolved)
        pieces = [
            _Piece(begin, end, _READONLY if readonly else _WRITABLE)
            for first, last, readonly in missing
            for begin, end in _split(first, last, starts, block)
        ]
        pins = self._pins or _Pins(self)
        self._pins = None  # until all is well: a failure gives back what an earlier call had pinned, too
        pins.add(pieces, progress, what)
        self._pins = pins

    @property
    def pinned(self) -> bool:
        """Whether all of it is host memory that the driver knows as pinned.

        Ours (`allocate`, `pin`) or anybody's, such as ``tensor.pin_memory()``.  False on a GPU, after `close`, and where the
        driver cannot be asked.  Only the answer "yes" is kept.
        """
        if self._closed or self.device != "cpu":
            return False
        if self._ranges is None:
            from . import _core

            ours = [one.pins for one in self._owned if isinstance(one, _Slab)] + ([self._pins] if self._pins else [])
            known = [where for pins in ours for where in pins.ranges]
            with contextlib.suppress(CudaError):
                self._ranges = _find_ranges(self.spans.tolist(), sorted(known), _core.memory_range)
        return self._ranges is not None

    @property
    def cuts(self) -> npt.NDArray[np.uint64]:
        """Addresses where one allocation, or one registration of pinned memory, ends and the next begins; sorted.

        The copy engine refuses a copy of ``[begin, end)`` with ``begin < cut < end``, also where the next one follows without a
        gap.  Memory that others allocated or pinned has one for each of their allocations.  Empty for memory that is not pinned.

        Raises
        ------
        BindError
            The driver does not know the memory of a GPU's pool.
        """
        if self.device != "cpu" and self._ranges is None:
            from . import _core

            self._ranges = _find_ranges(self.spans.tolist(), [], functools.partial(_core.memory_range, pinned=False))
            if self._ranges is None:
                raise BindError(
                    f"{self.layout.name}: the driver knows no memory of {self.device} at one of the arrays' addresses"
                )
        known = self._ranges if self.device != "cpu" or self.pinned else None
        return np.array(sorted({begin for begin, _ in known or ()})[1:], np.uint64)

    # ---- addresses -------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Base addresses of the arrays, in table order.  `BindError` once the pool is closed."""
        self.require_open()
        return self._addresses

    @property
    def step(self) -> int | None:
        """Bytes from each base address to the next where that is the same for all and above 0; 0 where there is one address.

        None where the addresses are irregular.
        """
        if self._step is None:
            steps = np.diff(self.addresses.astype(np.int64))
            regular = not steps.size or (steps[0] > 0 and bool((steps == steps[0]).all()))
            self._step = (int(steps[0]) if steps.size and regular else 0 if regular else None,)
        return self._step[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations, padding included."""
        return self.resolved.nbytes

    @property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides every base address."""
        bits = int(np.bitwise_or.reduce(self.addresses)) | 16
        return bits & -bits

    @property
    def spans(self) -> npt.NDArray[np.uint64]:
        """First and last byte (exclusive) of every array, ``(n, 2)``, sorted."""
        if self._spans is None:
            extents = np.array([kind.extent for kind in self.resolved.kinds], np.uint64)
            ends = self.addresses + extents[self.resolved.kind_of_entry]
            self._spans = np.stack([self.addresses, ends], axis=1)[np.argsort(self.addresses, kind="stable")]
        return self._spans

    def require_distinct(self) -> None:
        """No two arrays share bytes.  Where rows are padded, arrays may lie in each other's padding, but not on one address."""
        dense = all(_dense(kind.shape, kind.itemsize) == kind.strides for kind in self.resolved.kinds)
        ends = self.spans[:-1, 1] if dense else self.spans[:-1, 0] + np.uint64(1)
        clash = np.nonzero(ends > self.spans[1:, 0])[0]
        if clash.size:
            order = np.argsort(self.addresses, kind="stable")
            one, other = sorted(int(i) for i in order[clash[0] : clash[0] + 2])
            raise BindError(f"{self.layout.name}: arrays {one} and {other} share memory; expected one allocation each")

    def __repr__(self) -> str:
        return f"Pool({self.layout.name}, {self.shape}, num_blocks={self.num_blocks}, device={self.device})"


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
            "typestr": _numpy_dtype(allocation.dtype).str,
            "data": (address, False),
            "stream": None,
        }


def _free_device(device: int, address: int, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child, to which neither the memory nor the driver belongs
        from . import _core

        _core.free_device(device, address)


# ---- host memory that GPUs reach -----------------------------------------------------------------------------------
#
# It is mapped, touched and registered here, and comes neither from cudaHostAlloc nor from cuda.core's memory resources, which
# end in it.  That clears and locks small pages on one thread: 4 GiB take 1.36 s on an H200's host of 16 cores.  Huge pages that
# all cores touch take 0.08 s, and to register them 0.07 s; the copies are as fast.


class _Piece(NamedTuple):
    """Whole pages that become one registration."""

    begin: int
    end: int
    how: int


class _Pins:
    """Registrations of host memory, given back together: by `close`, or with their owner."""

    def __init__(self, owner: object) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.close = weakref.finalize(owner, _unregister, self.ranges, os.getpid())
        # Copies may still run when the process ends; the driver then takes everything back in an order that it knows is safe.
        self.close.atexit = False

    def add(self, pieces: Sequence[_Piece], progress: Progress | None, what: str) -> None:
        """Touch and register piece by piece, or leave nothing registered."""
        from . import _core

        total = sum(piece.end - piece.begin for piece in pieces)
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
                _core.host_register(begin, end - begin, how == _READONLY)
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
            if pieces[0].how != _NEW:
                advice += "; a file on disk that is mapped to be written may not be pinnable at all, one in /dev/shm is"
            where = f"{what}: bytes {start} to {start + end - begin} of {total}"
            raise _explained(error, where, f" What had been pinned is released again. {advice}.") from None


def _unregister(ranges: list[tuple[int, int]], pid: int) -> None:
    """Give back registrations, all of them even if one fails."""
    from . import _core

    with contextlib.ExitStack() as stack:
        while ranges:
            begin, _ = ranges.pop()
            if os.getpid() == pid:  # not a forked child: the registrations are its parent's
                stack.callback(_core.host_unregister, begin)


def _explained(error: CudaError | MemoryError, what: str, advice: str = "") -> CudaError | MemoryError:
    """The same error, saying what for and what to do."""
    text = f"{what}: {error}{advice}"
    return type(error)(text, code=error.code, name=error.name) if isinstance(error, CudaError) else MemoryError(text)


class _Slab:
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
        self.address = _round_up(np.frombuffer(self._memory, np.uint8).ctypes.data, _HUGE_PAGE)
        self.pins = _Pins(self)
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


def _pinned_arrays(resolved: Resolved, progress: Progress | None) -> tuple[_Slab, list[npt.NDArray[Any]]]:
    """Every allocation of a pool in one slab, touched and registered."""
    from . import _core

    what = f"pinned memory for {resolved.layout.name}"
    try:
        _core.device_count()  # before anything is touched
    except CudaUnavailableError as error:
        raise _explained(error, what, " Memory for the CPU alone is device='cpu'.") from None
    ends = list(itertools.accumulate(_round_up(a.nbytes, _ALIGNMENT) for a in resolved.allocations))
    offsets = [0, *ends[:-1]]
    nbytes = _round_up(ends[-1], mmap.PAGESIZE)
    try:
        slab = _Slab(nbytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{what}: {nbytes} bytes: {error}. Raise the limits that the process runs under (`ulimit -v`), or ask for fewer blocks"
        ) from None
    starts = [slab.address + offset for offset in offsets]
    pieces = _split(slab.address, slab.address + nbytes, starts, _block_step(resolved))
    try:
        slab.pins.add([_Piece(begin, end, _NEW) for begin, end in pieces], progress, what)
    except BaseException:
        slab.discard()
        raise
    memory = np.asarray(slab)
    return slab, [
        np.ndarray(a.shape, _numpy_dtype(a.dtype), memory, offset, a.strides)
        for a, offset in zip(resolved.allocations, offsets, strict=True)
    ]


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def _block_step(resolved: Resolved) -> int:
    """Bytes from block to block inside an allocation, or 0 where each has allocations of its own."""
    return resolved.id_steps[1]


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


def _find_ranges(
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


def _unpinned_pages(
    spans: Sequence[tuple[int, int]], readonly: Sequence[bool], ask: Callable[[int], tuple[int, int]]
) -> list[tuple[int, int, bool]]:
    """Pages of these spans (sorted) that are not pinned: begin, end, and whether they may only be read."""
    page = mmap.PAGESIZE
    wanted: list[tuple[int, int, bool]] = []
    pinned: list[tuple[int, int]] = []
    for (first, last), fixed in zip(spans, readonly, strict=True):
        begin, end = first // page * page, _round_up(last, page)
        ranges = [ask(first), ask(last - 1)]
        if all(b - a == 1 for a, b in ranges):
            pinned.append((begin, end))
        pinned += [(a // page * page, _round_up(b, page)) for a, b in ranges if b]
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


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype for one of ours; those that it lacks become unsigned integers of the same width."""
    return np.dtype(numpy_name(dtype))


def _empty(allocation: Allocation) -> npt.NDArray[Any]:
    memory = np.empty(allocation.nbytes, np.uint8)
    return np.ndarray(allocation.shape, _numpy_dtype(allocation.dtype), memory, strides=allocation.strides)


def _count_blocks(layout: Layout, shape: BlockShape, found: Sequence[Array]) -> int:
    """The number of blocks, from the number of arrays or from the extent of the axis ``b``."""
    one = layout.resolve(shape, 1)
    if layout.b_in_table:
        blocks, rest = divmod(len(found), one.table_size)
        if rest or not blocks:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected a multiple of {one.table_size} arrays "
                f"({one.table_size} a block), got {len(found)}"
            )
        return blocks
    first = one.first
    if len(found[0].shape) != len(first.axes) and not (first.is_record and first.axes.index("b") < len(found[0].shape)):
        raise BindError(
            f"{layout.name}: array 0: expected {len(first.axes)} axes ({' '.join(first.axes)}), got shape {found[0].shape}"
        )
    rows = found[0].shape
    blocks = rows[first.axes.index("b")] if "b" in first.axes else rows[0] * first.itemsize // first.nbytes
    if blocks < 1:
        raise BindError(f"{layout.name}: array 0: expected at least one block along 'b', got shape {found[0].shape}")
    return blocks


def check_alike(resolved: Resolved, found: Sequence[Array]) -> None:
    """All on one device, each of the dtype that the layout and the shape say."""
    name, first = resolved.layout.name, found[0]
    kinds, kind_of = resolved.kinds, resolved.kind_of_entry
    alike = not resolved.parts  # then one dtype serves all
    for index, array in enumerate(found):
        if array.device != first.device:
            raise BindError(
                f"{name}: array {index} is on {array.device}, array 0 on {first.device}; expected one device"
            )
        if alike and array.dtype != first.dtype:
            raise DTypeError(f"{name}: mixed dtypes: array {index} is {array.dtype}, array 0 {first.dtype}")
    for index, array in enumerate(found[:1] if alike else found):
        kind = kinds[kind_of[index]]
        if kind.is_record:
            if ITEMSIZE.get(_PAIRS.get(array.dtype, array.dtype)) != 1 and array.dtype not in _PLAIN[1]:
                raise DTypeError(
                    f"{name}: array {index}: its planes share it, so expected bytes (uint8, or another dtype of one byte), got "
                    f"{array.dtype}; pass .view(torch.uint8)"
                )
        elif not same_dtype(array.dtype, kind.dtype):
            bits = _stand_ins(kind.dtype)[:2]
            also = f" (or {', '.join(bits)} as its bits)" if bits else ""
            raise DTypeError(f"{name}: array {index}: expected dtype {kind.dtype}{also}, got {array.dtype}")


def check_arrays(resolved: Resolved, found: Sequence[Array]) -> None:
    """Shape and strides of each array against the layout."""
    layout = resolved.layout
    kinds, kind_of = resolved.kinds, resolved.kind_of_entry
    for index, array in enumerate(found):
        kind = kinds[kind_of[index]]
        shape, strides = kind.shape, kind.strides
        if array.shape == shape and _same_strides(array, strides):
            continue
        if kind.is_record and _same_bytes(array, kind):
            continue
        expected = resolved.allocations[index]
        where = f"{layout.name} ({layout.order_text}): array {index}" + (
            f" ({expected.label})" if expected.label else ""
        )
        if kind.is_record:
            padded = f", or dense, {kind.nbytes} bytes with the padding" if kind.nbytes != math.prod(shape) else ""
            raise BindError(
                f"{where}: expected bytes of shape {shape} ({' '.join(expected.axes)}) and strides {strides}, or another shape of "
                f"the same bytes{padded}; got shape {array.shape} and strides of {array.strides} bytes"
            )
        if len(array.shape) != len(shape):
            raise BindError(
                f"{where}: expected {len(shape)} axes ({' '.join(expected.axes)}) of {shape}, got shape {array.shape}"
            )
        for axis, want, got in zip(expected.axes, shape, array.shape, strict=True):
            if want != got:
                raise BindError(
                    f"{where}: axis '{axis}': expected {want}, got {got} (shape {array.shape}, expected {shape})"
                )
        if _dense(shape, kind.itemsize) == strides:
            raise BindError(
                f"{where}: expected a contiguous array, got strides of {array.strides} bytes; call .contiguous()"
            )
        raise BindError(f"{where}: expected strides of {strides} bytes, got {array.strides}")


def _same_bytes(array: Array, kind: Allocation) -> bool:
    """Whether an array of bytes, of whatever shape, is the records of an allocation in their order, with or without padding."""
    return merge_steps(array.shape, array.strides) in (kind.runs, [(kind.nbytes, 1)])
