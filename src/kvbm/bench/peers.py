"""What one would write without kvbm: PyTorch, CuPy and NumPy, and your own function.

A peer of your own is a function of two pools, named on the command line as ``--peer module:function``.  It is called once a pair
of pools and returns the copy that is measured; it may raise `NotApplicable` for pairs that it does not take.  The result is
checked bitwise before it is measured, and each set of ids is seen once before the clock starts.  A runnable example,
``mypeer.py``, for pools whose blocks are one allocation each:

>>> import numpy as np
>>> from kvbm.bench.peers import NotApplicable
>>> def block_by_block(src, dst):
...     if src.device != "cpu" or dst.device != "cpu" or src.layout != dst.layout or not src.layout.b_in_table:
...         raise NotApplicable("it copies whole blocks of one layout on the host")
...     each = len(src.arrays) // src.num_blocks  # allocations a block
...
...     def copy(src_ids, dst_ids, stream):  # stream: a cuda.core stream, None on the host
...         for i, j in zip(src_ids.tolist(), dst_ids.tolist()):
...             for k in range(each):
...                 np.copyto(dst.arrays[j * each + k], src.arrays[i * each + k])
...
...     return copy

Run it with ``kvbm bench --direction h2h --pair universal:universal --peer mypeer:block_by_block``.  Arrays of GPU pools have
``__cuda_array_interface__``: ``torch.as_tensor(array, device="cuda:0")`` and ``cupy.asarray(array)`` take them.  Order your work
on the stream that you are given: ``torch.cuda.ExternalStream(int(stream.handle))`` or ``cupy.cuda.ExternalStream`` of the same.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..access import refine
from ..errors import KvbmError, LayoutError
from ..pool import Pool
from .measure import View, device_of, entry_offsets

__all__ = [
    "BUILT_IN",
    "Copy",
    "NotApplicable",
    "Peer",
    "PeerError",
    "Strided",
    "installed",
    "load",
    "release",
    "strided",
]

#: ``copy(src_ids, dst_ids, stream)``: the ids are int32 NumPy arrays, the stream is None on the host.
Copy = Callable[[Any, Any, Any], object]

#: ``peer(src, dst)`` returns the copy between two pools.
Peer = Callable[[Pool, Pool], Copy]


class NotApplicable(KvbmError):  # noqa: N818  (it is a refusal rather than an error: the pair is left out)
    """What was asked for cannot be had for this pair, and why; the pair is left out."""

    exit_code = 1


class PeerError(KvbmError):
    """A peer that cannot be loaded, or that fails."""

    exit_code = 1


# ---- two pools as tensors of the same axes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Strided:
    """One half of a copy: both pools as strided tensors, block first, with the same axes in the same order.

    Attributes
    ----------
    shape : tuple of int
        Elements along each axis but the block's.
    src, dst : tuple of int
        Bytes between neighbours along each of these axes.
    src_block, dst_block : int
        Bytes from block to block.
    src_address, dst_address : int
        Where block 0 starts.
    """

    shape: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    src_block: int
    dst_block: int
    src_address: int
    dst_address: int


#: Axis, divisor → (extent, bytes between neighbours).
_Axes = dict[tuple[str, int], tuple[int, int]]


def strided(src: Pool, dst: Pool) -> tuple[Strided, ...]:
    """Both pools as strided tensors: one pair, or one for K and one for V where their orders differ.

    Raises
    ------
    NotApplicable
        Pitches, fused axes, splits without a common refinement, or allocations that no strides describe.
    """
    halves = max(len(pool.resolved.orders) for pool in (src, dst))
    opaque = tuple(
        dict.fromkeys(
            axis
            for pool in (src, dst)
            for order in pool.layout.orders
            for term in order.terms
            if term.opaque
            for axis in term.axes
        )
    )
    found = []
    for o in range(halves):
        sides = [_side(pool, o if halves > 1 else None, opaque) for pool in (src, dst)]
        found.append(_aligned(sides[0], sides[1], src.shape.itemsize))
    return tuple(found)


def _side(pool: Pool, o: int | None, opaque: Sequence[str]) -> tuple[_Axes, int, int]:
    """Axes of one pool (of its half `o`), bytes from block to block, and the address of the first element."""
    name = pool.layout.name
    if pool.layout.pitch:
        raise NotApplicable(f"{name} has pitches")
    steps = _table_steps(pool)
    axes: _Axes = {}
    address, block, chunk = int(pool.addresses[0]), 0, []
    for piece in pool.resolved.pieces(o or 0):
        stride = steps[piece.table] if piece.table else piece.stride
        if piece.term.opaque or (opaque and set(piece.term.axes) <= set(opaque)):
            chunk.append((stride, piece.extent))
        elif len(piece.term.axes) > 1:
            raise NotApplicable(f"{name} has fused axes: '{piece.term}'")
        elif piece.term.axes == ("b",):
            block = stride
        elif piece.term.axes == ("o",) and o is not None:
            address += o * stride
        else:
            axes[piece.term.axes[0], piece.divisor] = piece.extent, stride
    if chunk:
        held = pool.shape.itemsize
        for stride, extent in sorted(chunk):
            if extent > 1 and stride != held:
                raise NotApplicable(f"{name} does not keep the chunk of {{{' '.join(opaque)}}} together")
            held *= extent
        axes["{}", 1] = held // pool.shape.itemsize, pool.shape.itemsize
    return axes, block, address


def _table_steps(pool: Pool) -> dict[int, int]:
    """Bytes from allocation to allocation along each axis in brackets, by its step in the table."""
    table = [piece for piece in pool.resolved.orders[0] if piece.table]
    bases = pool.addresses.astype(np.int64)
    if len(pool.resolved.orders) > 1 and table and len({a.nbytes for a in pool.resolved.allocations}) > 1:
        raise NotApplicable(f"{pool.layout.name}: K and V have allocations of different sizes")
    steps = {p.table: int(bases[p.table] - bases[0]) if p.extent > 1 else 0 for p in table}
    expected = bases[0] + entry_offsets(table, [steps[p.table] for p in table]) if table else bases
    if not np.array_equal(expected, bases) or any(step < 0 for step in steps.values()):
        raise NotApplicable(f"{pool.layout.name}: its allocations do not lie at regular distances")
    return steps


def _aligned(src: tuple[_Axes, int, int], dst: tuple[_Axes, int, int], itemsize: int) -> Strided:
    """Split both sides at the union of their splits; order and merge axes as the destination has them."""
    atoms: list[tuple[int, int, int]] = []  # destination stride, source stride, extent
    cuts: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for axes, _, _ in (src, dst):
        for (axis, divisor), (extent, _) in axes.items():
            cuts.setdefault(axis, set()).update((divisor, divisor * extent))
            sizes[axis] = max(sizes.get(axis, 1), divisor * extent)
    for axis, size in sizes.items():
        try:
            pieces = list(refine(cuts[axis], size))
        except LayoutError as error:
            raise NotApplicable(f"axis '{axis}': the splits have no common refinement: {error}") from None
        for divisor, extent in pieces:
            if extent > 1:
                strides = [_stride_at(axes, axis, divisor) for axes, _, _ in (dst, src)]
                atoms.append((strides[0], strides[1], extent))
    merged: list[tuple[int, int, int]] = []
    for to, from_, extent in sorted(atoms, reverse=True):
        if merged and merged[-1][:2] == (to * extent, from_ * extent):
            merged[-1] = (to, from_, extent * merged[-1][2])
        else:
            merged.append((to, from_, extent))
    merged = merged or [(itemsize, itemsize, 1)]
    return Strided(
        tuple(extent for _, _, extent in merged),
        tuple(from_ for _, from_, _ in merged),
        tuple(to for to, _, _ in merged),
        src[1], dst[1], src[2], dst[2],
    )  # fmt: skip


def _stride_at(axes: _Axes, axis: str, divisor: int) -> int:
    """Bytes that a step of so many elements along an axis takes."""
    for (name, start), (extent, stride) in axes.items():
        if name == axis and start <= divisor < start * extent:
            return divisor // start * stride
    raise NotApplicable(f"axis '{axis}' is only on one side")


def _order_in_memory(strides: Sequence[int]) -> list[int]:
    """Axes, slowest first."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _span(block: int, blocks: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    return (blocks - 1) * block + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize


def _require_one_device(src: Pool, dst: Pool, *, host: bool, gpu: bool) -> int:
    if src.device != dst.device:
        raise NotApplicable("it copies within one memory")
    device = device_of(src.device)
    if device < 0 and not host:
        raise NotApplicable("it copies on a GPU")
    if device >= 0 and not gpu:
        raise NotApplicable("it copies on the host")
    return device


# ---- PyTorch -------------------------------------------------------------------------------------------------------


def _move(src: Any, dst: Any, order: tuple[int, ...], block: int, src_ids: Any, dst_ids: Any) -> None:
    """Index, permute, copy.  `src` stands as it lies in memory, `dst` block first."""
    dst[dst_ids] = src[(slice(None),) * block + (src_ids,)].permute(order)


def _move_each(src: Any, dst: Any, order: tuple[int, ...], _block: int, src_ids: Any, dst_ids: Any) -> None:
    """The same, block by block."""
    theirs = src.permute(order)  # block first, as it is in `dst`
    for i, j in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        dst[j].copy_(theirs[i])


def torch_eager(src: Pool, dst: Pool) -> Copy:
    """PyTorch: index, ``permute``, indexed assignment, which is faster than ``index_select`` and ``index_copy_``.

    On the host indexing goes element by element, so there blocks are copied one after the other, which is faster again.
    """
    return _torch(src, dst, _move if device_of(src.device) >= 0 else _move_each)


def torch_compile(src: Pool, dst: Pool) -> Copy:
    """The same under ``torch.compile``, which may make one kernel of it."""
    torch = _import("torch")
    _require_one_device(src, dst, host=True, gpu=True)
    strided(src, dst)
    torch.compiler.reset()  # or the pairs before this one would count against its limit of recompilations
    return _torch(src, dst, torch.compile(_move))


def _torch(src: Pool, dst: Pool, move: Callable[..., None]) -> Copy:
    torch = _import("torch")
    device = _require_one_device(src, dst, host=True, gpu=True)
    if device >= 0 and not torch.cuda.is_available():
        raise NotApplicable("this torch cannot use the GPU")
    itemsize = src.shape.itemsize
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]

    def tensor(address: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """Those bytes as a tensor of integers; the pool keeps the memory."""
        nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
        if device >= 0:
            view = View(device, address, (nbytes // itemsize,), (itemsize,), f"<i{itemsize}" if itemsize > 1 else "|i1")
            flat = torch.as_tensor(view, device=f"cuda:{device}")
        else:
            flat = torch.from_numpy(_host(address, nbytes, itemsize))
        return torch.as_strided(flat.view(kind), tuple(shape), tuple(s // itemsize for s in strides))

    halves = []
    for half in strided(src, dst):
        shape, strides = (src.num_blocks, *half.shape), (half.src_block, *half.src)
        memory = _order_in_memory(strides)
        theirs = tensor(half.src_address, [shape[i] for i in memory], [strides[i] for i in memory])
        ours = tensor(half.dst_address, (dst.num_blocks, *half.shape), (half.dst_block, *half.dst))
        order = tuple(memory.index(axis) for axis in range(len(shape)))
        halves.append((theirs, ours, order, memory.index(0)))
    known: dict[int, tuple[Any, Any]] = {}

    def ids(numbers: npt.NDArray[np.int32]) -> Any:
        """An engine has its ids on the GPU: they are taken there once, not in every call."""
        found = known.get(id(numbers))
        if found is None:
            where = f"cuda:{device}" if device >= 0 else "cpu"
            found = known[id(numbers)] = (numbers, torch.from_numpy(numbers.astype(np.int64)).to(where))
        return found[1]

    def copy(src_ids: Any, dst_ids: Any, stream: Any) -> None:
        here, there = ids(src_ids), ids(dst_ids)
        if stream is None:
            for half in halves:
                move(*half, here, there)
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(_core.stream_handle(stream), device=device)):
            for half in halves:
                move(*half, here, there)

    return copy


# ---- CuPy and NumPy ------------------------------------------------------------------------------------------------


def cupy_take(src: Pool, dst: Pool) -> Copy:
    """CuPy: one indexed assignment, ``dst[dst_ids] = src[src_ids]`` on transposed views."""
    cupy = _import("cupy")
    device = _require_one_device(src, dst, host=False, gpu=True)
    itemsize = src.shape.itemsize

    def array(pool: Pool, address: int, block: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
        nbytes = _span(block, pool.num_blocks, shape, strides, itemsize)
        memory = cupy.cuda.UnownedMemory(address, nbytes, pool, device)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((pool.num_blocks, *shape), f"i{itemsize}", pointer, (block, *strides))

    with cupy.cuda.Device(device):
        halves = [
            (
                array(src, half.src_address, half.src_block, half.shape, half.src),
                array(dst, half.dst_address, half.dst_block, half.shape, half.dst),
            )
            for half in strided(src, dst)
        ]
    known: dict[int, tuple[Any, Any]] = {}

    def ids(numbers: npt.NDArray[np.int32]) -> Any:
        found = known.get(id(numbers))
        if found is None:
            found = known[id(numbers)] = (numbers, cupy.asarray(numbers, np.int64))
            cupy.cuda.get_current_stream().synchronize()
        return found[1]

    def copy(src_ids: Any, dst_ids: Any, stream: Any) -> None:
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(_core.stream_handle(stream), device):
            here, there = ids(src_ids), ids(dst_ids)
            for theirs, ours in halves:
                ours[there] = theirs[here]

    return copy


def numpy_take(src: Pool, dst: Pool) -> Copy:
    """NumPy: one indexed assignment on transposed views, on one core."""
    _require_one_device(src, dst, host=True, gpu=False)
    itemsize = src.shape.itemsize

    def array(pool: Pool, address: int, block: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
        flat = _host(address, _span(block, pool.num_blocks, shape, strides, itemsize), itemsize)
        whole = flat.view(f"i{itemsize}")
        return np.lib.stride_tricks.as_strided(whole, (pool.num_blocks, *shape), (block, *strides))

    halves = [
        (
            array(src, half.src_address, half.src_block, half.shape, half.src),
            array(dst, half.dst_address, half.dst_block, half.shape, half.dst),
        )
        for half in strided(src, dst)
    ]

    def copy(src_ids: Any, dst_ids: Any, _stream: Any) -> None:
        for theirs, ours in halves:
            ours[dst_ids] = theirs[src_ids]

    return copy


def _host(address: int, nbytes: int, itemsize: int) -> npt.NDArray[Any]:
    """Host memory that the pool keeps, as integers."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(f"i{itemsize}")


# ---- which there are -----------------------------------------------------------------------------------------------

#: Name in the CSV → what it needs installed, the peer, and the directions that it is measured in.
BUILT_IN: dict[str, tuple[str, Peer, tuple[str, ...]]] = {
    "torch": ("torch", torch_eager, ("d2d", "h2h")),
    "torch_compile": ("torch", torch_compile, ("d2d",)),
    "cupy": ("cupy", cupy_take, ("d2d",)),
    "numpy": ("numpy", numpy_take, ("h2h",)),
}


def installed(direction: str) -> Iterator[tuple[str, Peer]]:
    """The built-in peers for a direction whose library is there."""
    for name, (module, peer, directions) in BUILT_IN.items():
        if direction in directions and _is_installed(module):
            yield name, peer


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def load(text: str) -> Peer:
    """The function behind ``module:function``; modules in the working directory are found, too.

    Raises
    ------
    PeerError
        There is no such module or function, or the module does not import.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise PeerError(f"peer {text!r}: expected module:function")
    here = os.getcwd()  # noqa: PTH109  (sys.path holds texts)
    if here not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PeerError(f"peer {text!r}: {error}; modules are looked for in {here} and where Python looks") from error
    if not callable(found):
        raise PeerError(f"peer {text!r}: expected a function of two pools, got a {type(found).__name__}")
    peer: Peer = found
    return peer


def release() -> None:
    """Have PyTorch and CuPy give back the GPU memory that they keep for later."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotApplicable(f"{name} does not import: {error}") from None
