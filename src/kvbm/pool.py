"""Pools: a layout bound to memory, with everything checked that could make a copy silently wrong."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .arrays import Array, Borrowed, describe, empty, find_overlap, numpy_dtype
from .contract import ALIKE, GATES, Caller, kinds_of, require_each
from .digest import Model
from .engines import FromEngines
from .errors import BindError, CudaError, CudaUnavailableError, LayoutError
from .layout import Layout
from .lower import Steps
from .memory import (
    READONLY,
    WRITABLE,
    DeviceArray,
    Pins,
    Progress,
    Slab,
    explained,
    find_ranges,
    pinned_arrays,
    unpinned_pages,
)
from .resolved import Resolved
from .selection import Axis, PoolSection
from .shapes import BlockShape

__all__ = ["Pool"]


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
    num_blocks : int, optional
        Blocks, as the arrays tell if it is not given.  Where K and V lie in one array in different orders and a pitch leaves room
        behind the blocks, the array does not tell, and as many are taken as have room.

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

    Before each copy arrays of the caller's are asked whether they are still where they were (a tensor's storage may be replaced
    or resized) and may be written: up to 16 of them, the next ones at the next copy.  After it, autograd is told of tensors
    that were written.

    Examples
    --------
    >>> import numpy as np
    >>> shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=8, dtype="float32")
    >>> Pool(load("universal"), shape, [np.zeros((4, 2, 2, 16, 8), "float32")] * 1).num_blocks
    1
    """

    def __init__(self, layout: Layout, shape: BlockShape, tensors: Any, *, num_blocks: int | None = None) -> None:
        arrays = tuple(tensors) if isinstance(tensors, list | tuple) else (tensors,)
        found = [describe(array, f"{layout.name}: array {index}") for index, array in enumerate(arrays)]
        self._bind(layout, shape, found, arrays, num_blocks, GATES)
        self.require_distinct()

    @classmethod
    def trusted(cls, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: Sequence[Any]) -> Pool:
        """A pool of arrays whose shapes the caller has checked (`kernels` takes chunks of any rank)."""
        pool = cls.__new__(cls)
        pool._bind(layout, shape, found, tuple(arrays))
        return pool

    def _bind(
        self,
        layout: Layout,
        shape: BlockShape,
        found: Sequence[Array],
        arrays: tuple[Any, ...],
        num_blocks: int | None = None,
        gates: Sequence[Callable[[Any], None]] = ALIKE,
    ) -> None:
        if not found:
            raise BindError(f"{layout.name}: expected at least one array, got none")
        self.layout = layout
        self.shape = shape
        self.arrays = arrays
        self.num_blocks = _count_blocks(layout, shape, found) if num_blocks is None else _whole(layout, num_blocks)
        self.resolved: Resolved = layout.resolve(shape, self.num_blocks)
        if len(found) != self.resolved.table_size:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected {self.resolved.table_size} arrays, one an allocation in table "
                f"order, got {len(found)}"
            )
        self.device = found[0].device
        self._readonly_arrays = [array.readonly for array in found]
        self._readonly = any(self._readonly_arrays)
        who = Caller(
            f"{layout.name} ({layout.order_text})", "array", mark="", label=lambda i: self.resolved.allocations[i].label
        )
        require_each(who, found, kinds_of(self.resolved), self.resolved.kind_of_entry, shape, gates)
        self._addresses: npt.NDArray[np.uint64] = np.array([array.address for array in found], np.uint64)
        self._borrow(arrays, found)
        self._spans: npt.NDArray[np.uint64] | None = None
        self._closed = False
        self._owned: tuple[Slab | DeviceArray, ...] = ()
        self._pins: Pins | None = None
        self._ranges: list[tuple[int, int]] | None = None
        self.digesters: dict[Any, Any] = {}  # of sections that were digested

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
        one before, so equally sized ones lie at one step (see `steps`).  A forked child does not have this memory, as it would
        not have that of cudaHostAlloc: to touch it there ends the child.
        """
        num_blocks = _whole(layout, num_blocks)
        found = re.fullmatch(r"(cpu|pinned|cuda)(?::([0-9]+))?", str(device))
        if not found or (found[2] and found[1] != "cuda"):
            raise BindError(f"device: expected 'cpu', 'pinned', 'cuda' or 'cuda:N', got {device!r}")
        resolved = layout.resolve(shape, num_blocks)
        if found[1] == "pinned":
            slab, arrays = pinned_arrays(resolved, progress)
            pool = cls(layout, shape, arrays, num_blocks=num_blocks)
            pool._owned = (slab,)
            pool._borrow((), ())
            return pool
        if found[1] == "cpu":
            arrays = [empty(a.shape, numpy_dtype(a.dtype), a.strides) for a in resolved.allocations]
            pool = cls(layout, shape, arrays, num_blocks=num_blocks)
            pool._borrow((), ())
            # Nothing to give back by name: the arrays go with the last reference.
        else:
            index = int(found[2] or 0)
            owned = tuple(DeviceArray(index, allocation) for allocation in resolved.allocations)
            pool = cls(layout, shape, owned, num_blocks=num_blocks)
            pool._owned = owned
        if progress is not None:
            progress(pool.nbytes, pool.nbytes)
        return pool

    # ---- parts of it -----------------------------------------------------------------------------------------------

    @property
    def whole(self) -> PoolSection:
        """All of the pool, as copies take it."""
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
        """Part of the pool, which a copy takes in its place: some coordinates of its axes, some of its planes.

        Parameters
        ----------
        l, o, h, t, d : int, range or sequence of int, optional
            Layers, K and V (0 and 1), heads, tokens of a block, elements of a head: all if not given.  In the section they count
            from 0 on.  The layout's own axes by their letters.
        planes : str or iterable of str, optional
            Names of planes.

        Raises
        ------
        PlanError
            Coordinates that there are not; an axis in an opaque group, of which the order is not promised; elements that share a
            byte and would be parted; a plane that has one element for all of the axis.

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
        """The pool with ids that count units of a block: unit ``k`` of block ``b`` is ``b * n + k``, with ``n`` of them a block.

        So blocks of different sizes meet: a pool with 16 tokens a block and ``other.units(16)`` of one with 64.

        Parameters
        ----------
        tokens : int
            Tokens of a unit; a divisor of the block's.

        Raises
        ------
        PlanError
            Units that are no whole part of a block, or that the layout's splits would part; a plane that units would share.
        """
        return self.whole.units(tokens)

    def digest(
        self,
        ids: Any = None,
        *,
        tokens: Any = None,
        model: Model | None = None,
        out: Any = None,
        stream: Any = None,
        wait: Any = None,
    ) -> Any:
        """Digests of blocks: a number each that depends on what a block holds, and on no layout.

        Equal contents have equal digests in every layout, block size and partition; digests of parts add up to the whole's, modulo
        2**64.  ``docs/digest.md`` defines them, and says what they find.

        Parameters
        ----------
        ids : int, sequence of int, array or tensor, optional
            Blocks, as copies take them; -1 has the digest 0.  All blocks if not given.
        tokens : int, sequence of int, array or tensor, optional
            The position of each block's first token in its sequence; one int for all of them.  0 if not given; a unit's place in
            its block then counts.
        model : kvbm.Model, optional
            Which layers and heads of a whole model the pool holds; not given: the pool holds the model.
        out : array, optional
            Contiguous uint64 or int64, one a block: of the pool's device, or pinned.  It is filled in the order of the stream.
        stream, wait : optional
            As for `Transfer.copy`; on a GPU alone.

        Returns
        -------
        numpy.ndarray or Done
            The digests, uint64, when they are there.  On a GPU with `out` nobody waits, and their `Done` is returned.

        Raises
        ------
        BindError
            Ids, positions, or an `out` that do not fit.
        PlanError
            A layout without digests: elements that share a byte along an axis that is not the last.

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
        """Whether `close` was called."""
        return self._closed

    def require_open(self) -> None:
        """Raise `BindError` if the pool was closed, or an array has other memory by now: its addresses lead nowhere."""
        if self._closed:
            raise BindError(
                f"{self!r} is closed; expected a pool that is open: make it anew, or copy before it is closed"
            )
        moved = self._borrowed.moved()
        if moved >= 0:
            raise BindError(
                f"{self!r}: array {moved} has other memory than when it was bound: its storage was replaced or resized; make the "
                "pool anew"
            )

    def _borrow(self, arrays: Sequence[Any], found: Sequence[Array]) -> None:
        self._borrowed = Borrowed(arrays, found)
        #: Whether a copy must ask the pool if it may (`require_open`, `readonly`), and tell it that it was `written`.
        self.asked = self._borrowed.asked

    @property
    def readonly(self) -> bool:
        """Whether one of the arrays may not be written."""
        return self._readonly or self._borrowed.locked

    def written(self) -> None:
        """Tell the arrays' framework that a copy into them has been enqueued: autograd, for one, may have saved them."""
        self._borrowed.written()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is bound to memory of this process and cannot be pickled or copied; pass its layout, shape and num_blocks, "
            "and bind a pool there"
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
        self._closed = self.asked = True
        self._ranges = None
        self.digesters.clear()
        owned, self._owned = self._owned, ()
        pins, self._pins = self._pins, None
        if owned:
            self.arrays = ()
        self._borrowed = Borrowed((), ())  # and asked: it is closed
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
            missing = unpinned_pages(self.spans.tolist(), [self._readonly_arrays[i] for i in order], _core.memory_range)
        except CudaUnavailableError as error:
            raise explained(error, what) from None
        pages = [(begin, end, READONLY if fixed else WRITABLE) for begin, end, fixed in missing]
        pins = self._pins or Pins(self)
        self._pins = None  # until all is well: a failure gives back what an earlier call had pinned, too
        pins.add(pages, self.spans[:, 0].tolist(), self.resolved, progress, what)
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

            ours = [one.pins for one in self._owned if isinstance(one, Slab)] + ([self._pins] if self._pins else [])
            known = [where for pins in ours for where in pins.ranges]
            with contextlib.suppress(CudaError):
                self._ranges = find_ranges(self.spans.tolist(), sorted(known), _core.memory_range)
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

            self._ranges = find_ranges(self.spans.tolist(), [], functools.partial(_core.memory_range, pinned=False))
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

    @functools.cached_property
    def steps(self) -> Steps:
        """What is regular about the table.

        An engine's blocks lie side by side in each layer's tensor, and a store's in one range of memory.  A short table fits
        a kernel's parameters, while that of all blocks comes from memory before the first byte does.
        """
        table = self.addresses.astype(np.int64)
        step = _only(np.diff(table))
        if step is not None and (step > 0 or table.size == 1):
            return Steps(None, step)
        if self.resolved.apart or self.resolved.id_steps[0] * self.num_blocks != table.size:  # b is not the slowest
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
        """First and last byte (exclusive) of every array, ``(n, 2)``, sorted."""
        if self._spans is None:
            extents = np.array([kind.extent for kind in self.resolved.kinds], np.uint64)
            ends = self.addresses + extents[self.resolved.kind_of_entry]
            self._spans = np.stack([self.addresses, ends], axis=1)[np.argsort(self.addresses, kind="stable")]
        return self._spans

    def meets(self, begin: int, end: int) -> bool:
        """Whether a byte of ``[begin, end)`` lies in an array, padding included."""
        edges = self._edges
        at = bisect_right(edges, begin)
        return begin < end and (at % 2 == 1 or edges[at] < end)

    @functools.cached_property
    def _edges(self) -> list[int]:
        """Where memory of the arrays begins and ends, in turns and ascending; then the end of all addresses."""
        begins, ends = self.spans[:, 0], np.maximum.accumulate(self.spans[:, 1])
        apart = begins[1:] > ends[:-1]
        edges = np.stack([begins[np.append(True, apart)], ends[np.append(apart, True)]], axis=1)
        return [*edges.ravel().tolist(), 1 << 64]

    def require_distinct(self) -> None:
        """No two arrays share an element's byte.  Where rows are padded, arrays may lie in each other's padding."""
        clash = find_overlap(self.addresses, self.resolved.kinds, self.resolved.kind_of_entry)
        if clash is not None:
            one, other = sorted(clash)
            raise BindError(f"{self.layout.name}: arrays {one} and {other} share memory; expected one allocation each")

    def __repr__(self) -> str:
        return f"Pool({self.layout.name}, {self.shape}, num_blocks={self.num_blocks}, device={self.device})"


def _only(steps: npt.NDArray[np.int64]) -> int | None:
    """The one value of all steps, 0 where there is none; None if they differ."""
    if not steps.size:
        return 0
    first = int(steps.flat[0])
    return first if bool((steps == first).all()) else None


def _whole(layout: Layout, num_blocks: Any) -> int:
    """A number of blocks that the caller gives, as an int."""
    try:
        if not isinstance(num_blocks, bool):
            return operator.index(num_blocks)
    except TypeError:
        pass
    raise BindError(f"{layout.name}: num_blocks: expected an integer, got {num_blocks!r:.200}")


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
    # Where K and V lie in it in different orders no axis says how many.
    named = "b" in first.axes
    blocks = rows[first.axes.index("b")] if named else _most_blocks(layout, shape, rows[0] * first.itemsize)
    if blocks < 1:
        raise BindError(f"{layout.name}: array 0: expected at least one block along 'b', got shape {found[0].shape}")
    return blocks


def _most_blocks(layout: Layout, shape: BlockShape, nbytes: int) -> int:
    """The largest number of blocks for which an array has so many bytes, or fewer; 0 if there is none."""

    def fits(blocks: int) -> bool:
        try:
            return layout.resolve(shape, blocks).first.nbytes <= nbytes
        except LayoutError:  # a pitch that holds fewer
            return False

    above = 1
    while fits(above):
        above *= 2
    return bisect_left(range(1, above), True, key=lambda blocks: not fits(blocks))
