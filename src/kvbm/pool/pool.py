"""Pools: a layout bound to memory.  Everything that could make a copy silently wrong is checked here."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .._arguments import listed, quoted, whole
from .._shown import Shown
from ..digest.cells import Model
from ..engines.adapters import FromEngines, pool_hint
from ..errors import BindError, CudaError, CudaUnavailableError
from ..layout.layout import Layout
from ..layout.overlap import meet
from ..layout.resolved import Resolved
from ..layout.shapes import LIMIT, BlockShape, as_shape
from ..layout.spec import as_layout
from ..matching.match import names_of_strides
from ..memory.allocation import (
    READONLY,
    WRITABLE,
    Arrays,
    DeviceArray,
    DeviceMemory,
    Pins,
    Progress,
    Slab,
    explained,
    find_ranges,
    host_arrays,
    new_slab,
    pinned_slab,
    require_memory,
    total_bytes,
    unpinned_pages,
)
from ..memory.array_checks import (
    ALIKE,
    GATES,
    Caller,
    formats_of,
    kinds_of,
    numbers_of_blocks,
    one_number,
    require_each,
    wrong_rank,
)
from ..memory.array_info import Array, dense, describe, find_overlap, nest_of
from ..memory.liveness import Borrowed, has_memory
from ..memory.shared import shared_slab
from ..planner.lowering import Steps
from .section import Axis, PoolSection


class Pool(FromEngines, Shown):
    """A layout bound to memory.

    Parameters
    ----------
    layout : Layout, str or Path
        The layout, its name, or the path of its file.  kvbm never guesses the layout from the arrays; `kvbm.match` lists the
        layouts that fit given arrays.
    shape : BlockShape or str
        Sizes and dtype of a block, or a text that `kvbm.load_shape` reads.
    tensors : sequence of arrays
        One array per allocation, in table order.  The layout's order gives each array's shape: ``[l] o b t h d`` takes ``nl``
        arrays of shape ``(no, nb, nt, nh, hd)``.  If there is only one allocation, its array may be passed without a list.
    num_blocks : int, optional
        Number of blocks.  Default: taken from the shapes of the arrays.  Needed if an array does not show it: it has no axis of
        blocks (K and V have their own orders in one array, or planes share its bytes), and a pitch leaves room behind the blocks.

    Attributes
    ----------
    num_blocks : int
        Number of blocks.  Block ids are ``0 … num_blocks - 1``.
    device : str
        ``"cpu"`` or ``"cuda:N"``.  Pinned pools are on the CPU.
    arrays : sequence
        The arrays, in table order.  The pool keeps them alive.  Arrays of `allocate` have the dtype of their elements; each is made
        when you ask for it (``pool.arrays[3]``, slices, loops).  Empty after `close` if the pool owned the memory.

    Raises
    ------
    BindError
        The arrays have a wrong count, rank, shape or stride (the message names the axis), overlap, or lie on several devices.
    DTypeError
        An array does not have the dtype of `shape`.

    Notes
    -----
    A pool is a context manager.  It releases what it owns (memory of `allocate`, registrations of `pin`) at the end of the
    ``with`` statement, in `close`, or with its last reference.  Wait for your copies first.

    Before each copy, kvbm checks that all your arrays still have their memory and are writable: a tensor's storage may have been
    replaced or resized.  This takes about 4 ns per array.  After a copy, autograd is told which tensors were written.  `check` says
    what these checks see.

    Examples
    --------
    >>> import numpy as np
    >>> shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=8, dtype="float32")
    >>> Pool(load("universal"), shape, [np.zeros((4, 2, 2, 16, 8), "float32")] * 1).num_blocks
    1
    """

    def __init__(
        self, layout: Layout | str | Path, shape: BlockShape | str, tensors: Any, *, num_blocks: int | None = None
    ) -> None:
        layout, shape = as_layout(layout), as_shape(shape)
        if type(tensors) in (list, tuple, Arrays):
            arrays = tuple(tensors)
        elif isinstance(tensors, list | tuple):  # of a class of its own
            arrays = tuple(listed(f"{layout.name}: tensors", tensors, "arrays", most=1 << 26))
        else:
            arrays = (tensors,)
        found = [describe(array, f"{layout.name}: array {index}") for index, array in enumerate(arrays)]
        self._bind(layout, shape, found, arrays, num_blocks, GATES)
        self.require_distinct()

    @classmethod
    def trusted(cls, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: Sequence[Any]) -> Pool:
        """A pool of arrays.  The caller has already checked their shapes (`kernels` takes chunks of any rank)."""
        pool = cls.__new__(cls)
        pool._bind(layout, shape, found, tuple(arrays))
        return pool

    def _bind(
        self, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: Sequence[Any],
        num_blocks: int | None = None, gates: Sequence[Callable[[Any], None]] = ALIKE, resolved: Resolved | None = None,
        addresses: npt.NDArray[np.uint64] | None = None,
    ) -> None:  # fmt: skip
        """Bind arrays.  With `addresses` they are kvbm's own and as `resolved` says: `found` then describes the first."""
        if not found:
            raise BindError(f"{layout.name}: expected at least one array, got none")
        self.layout = layout
        self.shape = shape
        self.arrays: Sequence[Any] = arrays
        if resolved is None:
            blocks = _count_blocks(layout, shape, found) if num_blocks is None else _whole(layout, num_blocks)
            resolved = layout.resolve(shape, blocks)
        self.num_blocks = resolved.num_blocks
        self.resolved = resolved
        if addresses is None and len(found) != self.resolved.table_size:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected {self.resolved.table_size} arrays, one per allocation in table "
                f"order, got {len(found)}"
            )
        self.device = found[0].device
        self._readonly_arrays = [array.readonly for array in found]
        self._readonly = any(self._readonly_arrays)
        title, fitting = f"{layout.name} ({layout.order_text})", lambda: names_of_strides(found, shape, layout.name)
        who = Caller(title, "array", mark="", label=self.resolved.label, fitting=fitting)
        #: Plane → the dtype of its arrays, where the shape or the plane says no more than bytes (`array_checks.formats_of`).
        self.formats: dict[str, str] = {}
        if addresses is None:
            require_each(who, found, kinds_of(self.resolved), self.resolved.kind_of_entry, shape, gates)
            self.formats = formats_of(self.resolved, [array.dtype for array in found], title)
            addresses = np.array([array.address for array in found], np.uint64)
            self._borrow(arrays, found)
        else:
            self._borrow((), ())  # nobody else moves their memory
        self._addresses: npt.NDArray[np.uint64] = addresses
        self._slab: tuple[int, int] | None = None  # begin and end of the memory, if it is kvbm's own
        self._spans: npt.NDArray[np.uint64] | None = None
        self._closed = False
        self._owned: tuple[Slab | DeviceMemory, ...] = ()
        self._pins: Pins | None = None
        self._ranges: list[tuple[int, int]] | None = None
        self.digesters: dict[Any, Any] = {}  # one per section that was digested

    @classmethod
    def allocate(
        cls, layout: Layout | str | Path, shape: BlockShape | str, num_blocks: int, device: str = "cpu",
        progress: Progress | None = None,
    ) -> Pool:  # fmt: skip
        """Allocate memory and bind it as a pool.  The memory is not initialised.

        Parameters
        ----------
        layout, shape
            As for `Pool`.
        num_blocks : int
            Number of blocks.
        device : str
            ``"cpu"``: NumPy arrays.  ``"shared"``: NumPy arrays in memory that other processes of this host can open, for direct
            links.  ``"pinned"``: NumPy arrays in pinned host memory, which every GPU can access and the copy
            engines read at full speed.  ``"pinned:N"``: the same, on the NUMA node of GPU N, for which it is fastest; see
            below.  ``"cuda"`` or ``"cuda:N"``: objects with ``__cuda_array_interface__``.
        progress : callable, optional
            Called on this thread as ``progress(done_bytes, total_bytes)``, because pinning takes about one second per 30 GB.
            It is called for every GiB that is touched and every piece that is registered; each counts half.  The last call has
            ``done_bytes == total_bytes``; without pinning it is the only one.  An exception in it ends the allocation.

        Returns
        -------
        Pool
            A pool that owns its memory: see `close`.

        Raises
        ------
        NotEnoughMemoryError
            The machine, or a limit of its control group, does not have the bytes.  They are compared before anything is allocated.
        CudaError
            The GPU does not have them.  Nothing stays allocated.
        CudaUnavailableError
            There is no GPU; ``"pinned"`` needs one, too.
        BindError
            `device` is none of the above.

        Notes
        -----
        The arrays have the dtypes of their elements: bfloat16 and fp8 are dtypes of ml_dtypes.  ``array.view(numpy.uint16)`` has
        the bits.  Elements of four bits share bytes: such an array holds bytes, and an assignment of other values raises
        `DTypeError` (`kvbm.memory.array_info.PackedArray`).  Arrays that planes share are bytes.

        The allocations lie one directly after the other in one piece of memory, each at a multiple of 256 bytes, those of equal
        size at one step (see `steps`).  The piece is freed with the last array on it.  For an allocation the pool keeps nine bytes
        and no Python object: `arrays` makes an array when you ask for it.

        On a machine of several NUMA nodes, pages of pinned memory come from the node of the GPU, as long as it has free ones,
        whichever threads touch them.  ``"pinned"`` is for all GPUs of the process: if they are on different nodes, the pages are
        where they are touched first.  Where the process has a memory policy (``numactl``), that stands.  The log says what was
        done (`docs/howto/offload.md`).

        A forked child does not get pinned memory, as with cudaHostAlloc: a child that accesses it crashes.
        """
        layout, shape = as_layout(layout), as_shape(shape)
        num_blocks = _whole(layout, num_blocks)
        found = re.fullmatch(r"(cpu|shared|pinned|cuda)(?::([0-9]+))?", str(device))
        if not found or (found[2] and found[1] not in ("cuda", "pinned")):
            raise BindError(
                f"device: expected 'cpu', 'shared', 'pinned', 'pinned:N', 'cuda' or 'cuda:N', got {quoted(device)}"
            )
        resolved = layout.resolve(shape, num_blocks)
        if progress is not None and not callable(progress):
            raise BindError(f"progress: expected a function of the bytes done and of all bytes, got {quoted(progress)}")
        what = f"{layout.name}: {num_blocks:,} blocks of {shape}"
        require_memory(10 * resolved.table_size, f"{what}: the table of addresses")
        owned: tuple[Slab | DeviceMemory, ...] = ()
        nbytes, place = total_bytes(resolved), "cpu"
        if found[1] == "pinned":
            slab = pinned_slab(resolved, progress, int(found[2]) if found[2] else None)
            owned, begin, arrays = (slab,), slab.address, host_arrays(resolved, np.asarray(slab))
        elif found[1] in ("cpu", "shared"):
            memory = (new_slab if found[1] == "cpu" else shared_slab)(nbytes, what)
            begin, arrays = memory.ctypes.data, host_arrays(resolved, memory)
            # close() has nothing to release: the memory is freed with the last array on it.
        else:
            index = int(found[2] or 0)
            on_gpu = DeviceMemory(index, nbytes, what)
            owned, begin, place = (on_gpu,), on_gpu.address, f"cuda:{index}"
            arrays = Arrays(resolved, functools.partial(DeviceArray, on_gpu))
        pool = cls.__new__(cls)
        first = Array(begin, resolved.first.shape, resolved.first.strides, resolved.first.dtype, place)
        addresses = arrays.offsets.astype(np.uint64)
        addresses += np.uint64(begin)
        pool._bind(layout, shape, [first], arrays, resolved=resolved, addresses=addresses)
        pool._owned, pool._slab = owned, (begin, begin + nbytes)
        if progress is not None and found[1] != "pinned":
            progress(pool.nbytes, pool.nbytes)
        return pool

    # ---- parts of it -----------------------------------------------------------------------------------------------

    @property
    def whole(self) -> PoolSection:
        """All of the pool, as a section."""
        return PoolSection(self, self.resolved.section, is_whole=True)

    def section(
        self,
        *,
        l: Axis | None = None,  # noqa: E741  (the axis)
        o: Axis | None = None,
        h: Axis | None = None,
        t: Axis | None = None,
        d: Axis | None = None,
        planes: str | Iterable[str] | None = None,
        **others: Axis,
    ) -> PoolSection:
        """Select a part of the pool: some coordinates of its axes, or some of its planes.  Copies and digests accept a section.

        Parameters
        ----------
        l, o, h, t, d : int, range or sequence of int, optional
            Layers, K and V (0 and 1), heads, tokens of a block, elements of a head.  Default: all.  The section numbers the
            selected coordinates from 0.  Axes that the layout declares are selected by their letters.
        planes : str or iterable of str, optional
            Names of planes.  Default: all.

        Raises
        ------
        PlanError
            A coordinate is out of range.  The axis is in an opaque group (its order is unspecified).  The selection would split
            elements that share a byte, or select from an axis for which a plane has a single element.

        Examples
        --------
        >>> import numpy as np
        >>> from kvbm import BlockShape, load
        >>> shape = BlockShape(nl=1, no=2, nh=4, nt=16, hd=8, dtype="float32")
        >>> pool = Pool.allocate(load("nhd"), shape, 8)
        >>> pool.section(h=range(2, 4), o=0).num_ids  # the keys of two heads, of each block
        8
        """
        return self.whole.section(l=l, o=o, h=h, t=t, d=d, planes=planes, **others)

    def units(self, tokens: int) -> PoolSection:
        """The pool with ids of units instead of blocks: a block of ``n`` units has the ids ``b * n … b * n + n - 1``.

        Units connect pools of different block sizes: a pool with 16 tokens per block and ``other.units(16)`` of a pool with 64.

        Parameters
        ----------
        tokens : int
            Tokens per unit; a divisor of the tokens per block.

        Raises
        ------
        PlanError
            `tokens` does not divide the block, a unit cuts a split of the layout, or a plane has one element for several units.
        """
        return self.whole.units(tokens)

    def digest(
        self, ids: Any = None, *, tokens: Any = None, model: Model | None = None, out: Any = None, stream: Any = None,
        wait: Any = None,
    ) -> Any:  # fmt: skip
        """Compute the 64-bit digests of blocks.  A digest depends on the contents of a block, not on its layout.

        Equal contents have equal digests in every layout, block size and partition.  The digests of the parts of a block add up to
        the digest of the block, modulo 2**64.  ``docs/reference/digest.md`` has the definition and the errors that digests detect.

        Parameters
        ----------
        ids : int, sequence of int, array or tensor, optional
            Block ids, as for `Transfer.copy`.  The digest for -1 is 0.  Default: all blocks.
        tokens : int, sequence of int, array or tensor, optional
            Position of each block's first token in its sequence; one int is for all.  Default: 0; for units, their place.
        model : kvbm.Model, optional
            Which layers and heads of a model the pool holds.  Default: the pool holds the whole model.
        out : array, optional
            Contiguous uint64 or int64, one item per block, on the pool's device or pinned.  It is filled in stream order.
        stream, wait : optional
            As for `Transfer.copy`; only on a GPU.

        Returns
        -------
        numpy.ndarray or Done
            The digests as uint64; the call waits for them.  On a GPU with `out`, the call does not wait and returns a `Done`.

        Raises
        ------
        BindError
            Ids, positions or `out` do not fit the pool.
        PlanError
            The layout has no digests: elements share a byte along an axis that is not the last.

        Examples
        --------
        >>> import numpy as np
        >>> from kvbm import BlockShape, load
        >>> shape = BlockShape(nl=1, no=2, nh=4, nt=16, hd=8, dtype="float32")
        >>> pool = Pool.allocate(load("nhd"), shape, 8)
        >>> bool(pool.digest([3]) == pool.units(4).digest([12, 13, 14, 15]).sum())
        True
        """
        return self.whole.digest(ids, tokens=tokens, model=model, out=out, stream=stream, wait=wait)

    # ---- memory that is given back ---------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def require_open(self) -> None:
        """Raise `BindError` if the pool is closed, or if an array's memory has moved since it was bound."""
        if self._closed:
            raise BindError(
                f"{self!r} is closed; expected an open pool: create a new pool, or copy before you close it"
            )
        moved = self._borrowed.moved()
        if moved >= 0:
            raise self._moved(moved)

    def check(self) -> None:
        """Check that the pool is open, and that every array still has the memory that it was bound to.

        Every copy, digest and link does this by itself, in a cheaper way.  It sees: a torch storage that was resized, freed or
        replaced; a NumPy array whose data was replaced; a JAX array that was deleted or donated; memory of `Pool.allocate` that
        was freed by closing its pool; an array that became read-only.  It does not see what only the array's own protocol tells:
        for other objects with ``__cuda_array_interface__`` or ``__dlpack__``, call this method after anything that may have moved
        their memory.  It asks each array for its address again, which takes about 25 µs per array.

        While a pool is open, NumPy refuses to resize its arrays and the arrays that they are views of.  A ``mmap`` or a
        ``SharedMemory`` under them refuses to be closed (`BufferError`): close the pool first.

        Nothing can see memory that was freed behind the back of its framework: by ``cudaFree``, ``munmap``, CuPy's
        ``array.data.mem.free()``, or a resize of a NumPy array that a torch tensor is a view of (``refcheck=False``).  Memory that
        was freed and allocated again at the same address for the same array is accepted.

        Raises
        ------
        BindError
            The pool is closed, or an array has other memory than when it was bound.  The message has its index.

        Examples
        --------
        >>> import numpy as np
        >>> shape = BlockShape(nl=1, no=2, nh=4, nt=16, hd=8, dtype="float32")
        >>> Pool(load("universal"), shape, np.zeros((4, 4, 1, 2, 16, 8), "float32")).check()
        """
        self.require_open()
        for index, array in enumerate(self.arrays if self._slab is None else ()):
            try:
                now = describe(array, f"array {index}")
            except BindError as error:
                raise self._moved(index, f" ({error})") from None
            address = int(self._addresses[index])
            if (now.address, now.device) != (address, self.device) or not has_memory(array, address, self._extent(index)):
                raise self._moved(index)

    def _extent(self, index: int) -> int:
        """Bytes from the first to the last that the pool uses of an array."""
        return self.resolved.kinds[self.resolved.kind_of_entry[index]].extent

    def _moved(self, index: int, why: str = "") -> BindError:
        return BindError(
            f"{self!r}: array {index} has other memory than when it was bound: its storage was freed, replaced or resized{why}; "
            "create a new pool"
        )

    def _borrow(self, arrays: Sequence[Any], found: Sequence[Array]) -> None:
        kinds, which = self.resolved.kinds, self.resolved.kind_of_entry
        self._borrowed = Borrowed(self, arrays, found, lambda index: kinds[which[index]].extent, self._readonly)
        #: What looks at the arrays before each copy; the same object as long as the pool lives.
        self.watch = self._borrowed.watch

    @property
    def readonly(self) -> bool:
        """True if one of the arrays is read-only."""
        return bool(self.watch.locked)

    def require_writable(self) -> None:
        """Raise `BindError` if the pool cannot be the destination of a copy."""
        if self.readonly:
            raise BindError(f"{self!r}: the destination is read-only")

    def written(self) -> None:
        """Tell the framework of the arrays that a copy into them was enqueued: autograd may have saved them."""
        self.watch.written()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is bound to memory of this process and cannot be pickled or copied; pass its layout, shape and num_blocks "
            "instead, and create a pool from them"
        )

    def close(self) -> None:
        """Release what the pool owns.  After this, copies from or to the pool raise an error.

        Calls of other threads that use the memory end first: a copy on the CPU is done then, a copy on a GPU is enqueued.
        GPU memory of `allocate` is freed; the driver waits for running work, and views of the memory become invalid.  Memory of
        ``allocate(device="pinned")`` is unpinned, and unmapped with the last array on it.  Memory that `pin` registered is
        unpinned.  Your own arrays keep their memory.

        Host memory must stay registered while a GPU copies it, so wait for your copies first (``done.synchronize()``).  Drivers
        wait before they unregister it (seen with 580 on an H200), but CUDA does not promise that.  A `Transfer` keeps its pools
        alive, but you can still close them.  A second call only waits in the same way.
        """
        self._closed = True
        self._borrowed.close()  # copies still ask: it raises, as the pool is closed
        self._ranges = None
        self.digesters.clear()
        owned, self._owned = self._owned, ()
        pins, self._pins = self._pins, None
        if owned:
            self.arrays = ()
        with contextlib.ExitStack() as stack:  # releases all of them, even if one fails
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
        """Pin the pool's host memory, so that GPUs can access it and the copy engines run at full speed.  `close` undoes it.

        Use it for your own arrays: NumPy arrays, ``numpy.memmap`` (also read-only, as sources), CPU tensors.  Whole pages are
        registered, each once, even if arrays share it.  Memory that is already pinned (by ``tensor.pin_memory()`` or another
        pool) is not registered again: it must stay pinned while this pool is copied.  A second call does nothing.

        Parameters
        ----------
        progress : callable, optional
            As for `allocate`.  Not called if everything is already pinned.

        Raises
        ------
        BindError
            The pool is on a GPU, or closed.
        CudaError, CudaUnavailableError
            The driver refused, or there is no GPU.  No memory of the pool is registered then.
        """
        self.require_open()
        if self.device != "cpu":
            raise BindError(f"{self!r}: pin() is for host memory, expected a pool on the CPU")
        if self.pinned:
            return
        from .. import _core

        what = f"pinning {self.layout.name}"
        fixed = [False]
        if self._slab is None:
            fixed = [self._readonly_arrays[i] for i in np.argsort(self.addresses, kind="stable")]
        try:
            missing = unpinned_pages(self._regions, fixed, _core.memory_range)
        except CudaUnavailableError as error:
            raise explained(error, what) from None
        pages = [(begin, end, READONLY if fixed else WRITABLE) for begin, end, fixed in missing]
        pins = self._pins or Pins(self)
        self._pins = None  # None until all succeeded: a failure also unpins what an earlier call had pinned
        pins.add(pages, self.spans[:, 0], self.resolved, progress, what)
        self._pins = pins

    @property
    def pinned(self) -> bool:
        """True if the driver reports all of the memory as pinned host memory.

        It may have been pinned by kvbm (`allocate`, `pin`) or by others (``tensor.pin_memory()``).  False on a GPU, after
        `close`, and without a driver.  Only True is cached.
        """
        if self._closed or self.device != "cpu":
            return False
        if self._ranges is None:
            from .. import _core

            ours = [one.pins for one in self._owned if isinstance(one, Slab)] + ([self._pins] if self._pins else [])
            known = [where for pins in ours for where in pins.ranges]
            with contextlib.suppress(CudaError):
                self._ranges = find_ranges(self._regions, sorted(known), _core.memory_range)
        return self._ranges is not None

    @property
    def cuts(self) -> npt.NDArray[np.uint64]:
        """Addresses at which one allocation, or one registration of pinned memory, ends and the next begins; sorted.

        The copy engine refuses a copy of ``[begin, end)`` with ``begin < cut < end``, even without a gap at the cut.  Memory that
        others allocated or pinned has a cut for each of their allocations.  Empty for memory that is not pinned.

        Raises
        ------
        BindError
            The pool is on a GPU, and the driver does not know its memory.
        """
        if self.device != "cpu" and self._ranges is None:
            from .. import _core

            self._ranges = find_ranges(self._regions, [], functools.partial(_core.memory_range, pinned=False))
            if self._ranges is None:
                raise BindError(
                    f"{self.layout.name}: the driver knows no memory of {self.device} at one of the arrays' addresses"
                )
        known = self._ranges if self.device != "cpu" or self.pinned else None
        return np.array(sorted({begin for begin, _ in known or ()})[1:], np.uint64)

    # ---- addresses -------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Base addresses of the arrays, in table order.  Raises `BindError` if the pool is closed."""
        self.require_open()
        return self._addresses

    @functools.cached_property
    def steps(self) -> Steps:
        """The regular steps between the addresses of the table.

        In an engine the blocks of a layer lie side by side in one tensor; in a store all blocks lie in one range of memory.  A
        short table with steps fits into a kernel's parameters.  A table of all blocks must be read from memory first.
        """
        table = self.addresses.astype(np.int64)
        step = _only(np.diff(table))
        if step is not None and (step > 0 or table.size == 1):
            return Steps(None, step)
        if self.resolved.has_separate_planes or self.resolved.id_steps[0] * self.num_blocks != table.size:  # b is not the slowest
            return Steps()
        by_block = table.reshape(self.num_blocks, -1)
        block = _only(np.diff(by_block, axis=0))
        return Steps(block, _only(np.diff(by_block[0])) if block is not None else None)

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
        """First byte and end (exclusive) of every array, shape ``(n, 2)``, sorted."""
        if self._spans is None:
            extents = np.array([kind.extent for kind in self.resolved.kinds], np.uint64)
            ends = self.addresses + extents[self.resolved.kind_of_entry]
            self._spans = np.stack([self.addresses, ends], axis=1)[np.argsort(self.addresses, kind="stable")]
        return self._spans

    @property
    def _regions(self) -> list[tuple[int, int]]:
        """Begin and end of the memory: of all of it if it is kvbm's own, else of each array; sorted."""
        return [self._slab] if self._slab is not None else self.spans.tolist()

    def meets(self, begin: int, end: int) -> bool:
        """True if a byte of ``[begin, end)`` lies in an array, padding included."""
        edges = self._edges
        at = int(np.searchsorted(edges, np.uint64(begin), side="right"))
        return begin < end and (at % 2 == 1 or (at < edges.size and int(edges[at]) < end))

    def holds(self, begin: int, end: int) -> bool:
        """True if a byte of ``[begin, end)`` belongs to an element of an array.  The padding between rows does not."""
        if not self.meets(begin, end):
            return False
        kinds, which = self.resolved.kinds, np.asarray(self.resolved.kind_of_entry)
        starts = self.addresses.astype(np.int64)
        behind = starts + np.array([kind.extent for kind in kinds], np.int64)[which]
        nests = [nest_of(kind) for kind in kinds]
        return any(
            meet(nests[which[i]][0], int(starts[i]), nests[which[i]][1], (), begin, end - begin)
            for i in np.flatnonzero((starts < end) & (behind > begin))
        )

    @functools.cached_property
    def _edges(self) -> npt.NDArray[np.uint64]:
        """Begin and end of each range of the arrays' memory, ascending."""
        begins, ends = self.spans[:, 0], np.maximum.accumulate(self.spans[:, 1])
        has_gap = begins[1:] > ends[:-1]
        edges = np.stack([begins[np.append(True, has_gap)], ends[np.append(has_gap, True)]], axis=1)
        return edges.ravel()

    def require_distinct(self) -> None:
        """Raise `BindError` if two arrays share a byte of an element.  An array may lie in the padding between another's rows."""
        clash = find_overlap(self.addresses, self.resolved.kinds, self.resolved.kind_of_entry)
        if clash is not None:
            one, other = sorted(clash)
            raise BindError(f"{self.layout.name}: arrays {one} and {other} share memory; expected one allocation each")

    def __repr__(self) -> str:
        return f"Pool({self.layout.name}, {self.shape}, num_blocks={self.num_blocks}, device={self.device})"


def part_of(given: Any, what: str) -> PoolSection:
    """A pool or a section, as a section."""
    if isinstance(given, Pool):
        return given.whole
    if isinstance(given, PoolSection):
        return given
    raise BindError(
        f"the {what}: expected a kvbm.Pool or a section of one, got {type(given).__name__}; bind arrays with kvbm.Pool"
    )


def _only(steps: npt.NDArray[np.int64]) -> int | None:
    """The value that all steps have; 0 if there are no steps; None if they differ."""
    if not steps.size:
        return 0
    first = int(steps.flat[0])
    return first if bool((steps == first).all()) else None


def _whole(layout: Layout, num_blocks: Any) -> int:
    """The caller's number of blocks as an int."""
    if (found := whole(num_blocks)) is not None:
        if abs(found) >= LIMIT:
            raise BindError(f"{layout.name}: num_blocks: expected less than 2**62, got {quoted(num_blocks)}")
        return found
    raise BindError(f"{layout.name}: num_blocks: expected an integer, got {quoted(num_blocks)}")


def _count_blocks(layout: Layout, shape: BlockShape, found: Sequence[Array]) -> int:
    """The number of blocks, from the number of arrays or from the extent of the axis ``b``."""
    if blocks := _plain_count(layout, shape, found):
        return blocks
    one = layout.resolve(shape, 1)
    if layout.b_in_table:
        blocks, rest = divmod(len(found), one.table_size)
        if rest or not blocks:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected a multiple of {one.table_size} arrays "
                f"({one.table_size} per block), got {len(found)}{_as_list(found, one)}"
            )
        return blocks
    first = one.first
    if len(found[0].shape) != len(first.axes) and not (first.is_record and first.axes.index("b") < len(found[0].shape)):
        if hint := pool_hint(layout.name, len(found[0].shape)):
            axes = f"{len(first.axes)} axes ({' '.join(first.axes)})"
            raise BindError(f"{layout.name}: array 0: expected {axes}, got shape {found[0].shape}{hint}")
        if 1 < len(found) != one.table_size:
            wanted = f"{one.table_size} array{'s' * (one.table_size > 1)} of {len(first.axes)} axes ({' '.join(first.axes)})"
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected {wanted}, got {len(found)}, the first of shape {found[0].shape}: "
                "use a layout of as many arrays; `kvbm.match` lists those that fit, `kvbm.declare` writes one"
            )
        raise BindError(f"{layout.name}: array 0: {wrong_rank(found[0], kinds_of(one)[0])}")
    rows = found[0].shape
    blocks = rows[first.axes.index("b")] if "b" in first.axes else 0
    if blocks < 1:  # an array in which K and V have orders of their own has no axis of blocks
        nbytes = math.prod(rows) * first.itemsize
        numbers = numbers_of_blocks(layout, shape, nbytes) if nbytes else range(0)
        use = "pass num_blocks= to kvbm.Pool"
        blocks = one_number(f"{layout.name}: array 0", numbers, use) or blocks or nbytes // one.first.nbytes
    if blocks < 1:
        raise BindError(f"{layout.name}: array 0: expected at least one block along 'b', got shape {found[0].shape}")
    return blocks


def _as_list(found: Sequence[Array], one: Resolved) -> str:
    """The end of a message: what makes a list of the only array, if it holds all of the arrays."""
    [first, *others], kind = found, one.first
    items, rest = divmod(math.prod(first.shape), math.prod(kind.shape) * one.table_size)
    is_dense = first.strides == dense(first.shape, kind.itemsize) and kind.strides == dense(kind.shape, kind.itemsize)
    if others or rest or not items or not is_dense:
        return ""
    sizes = ", ".join(map(str, (-1, *kind.shape)))
    return f"; if the array holds all of them in this order, pass list(array.reshape({sizes}))"


def _plain_count(layout: Layout, shape: BlockShape, found: Sequence[Array]) -> int:
    """The number of blocks as the terms of the order alone show it; 0 if that takes the layout at a size, or an error is due."""
    order = layout.orders[0]
    if layout.b_in_table:
        arrays, sizes = 1, {**shape.sizes, "b": 1}
        for term in order.table:
            if term.steps or not (term.planes or sizes.keys() >= set(term.axes)):
                return 0
            arrays *= len(term.axes) if term.planes else term.extent(sizes)
        blocks, rest = divmod(len(found), arrays)
        return 0 if rest else blocks
    terms = [term for term in order.inner if not term.planes]
    is_record = bool(layout.planes) and not any(term.planes for term in order.table)
    if not is_record:
        own = layout.planes[0].orders if layout.planes else layout.orders
        if len(own[: shape.no]) > 1 and not any(term.axes == ("o",) for term in order.table):
            return 0  # K and V have orders of their own in one array
        terms += own[0].inner if layout.planes else ()
    axes, rows = [str(term) for term in terms], found[0].shape
    at = axes.index("b") if "b" in axes else len(rows)
    return rows[at] if at < len(rows) and (is_record or len(rows) == len(axes)) else 0
