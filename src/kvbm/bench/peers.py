"""Copies without kvbm: PyTorch, CuPy and NumPy, and your own function.

Your own peer is a function of two pools.  Name it on the command line: ``--peer module:function``.  It is called once per pair
of pools and returns the copy to measure.  It may raise `NotApplicable` for pairs that it does not support.  The result is
checked bitwise before it is measured, and each set of ids is used once before the clock starts.  A runnable example,
``mypeer.py``, for pools whose blocks have their own allocations:

>>> import numpy as np
>>> from kvbm.bench.peers import NotApplicable
>>> def block_by_block(src, dst):
...     if src.device != "cpu" or dst.device != "cpu" or src.layout != dst.layout or not src.layout.b_in_table:
...         raise NotApplicable("it copies whole blocks of one layout on the host")
...     each = len(src.arrays) // src.num_blocks  # allocations per block
...
...     def copy(src_ids, dst_ids, stream):  # stream: a cuda.core stream, None on the host
...         for i, j in zip(src_ids.tolist(), dst_ids.tolist()):
...             for k in range(each):
...                 np.copyto(dst.arrays[j * each + k], src.arrays[i * each + k])
...
...     return copy

Run it with ``kvbm bench --direction h2h --pair universal:universal --peer mypeer:block_by_block``.  Arrays of GPU pools have
``__cuda_array_interface__``: ``torch.as_tensor(array, device="cuda:0")`` and ``cupy.asarray(array)`` accept them.  Enqueue your
work on the given stream: ``torch.cuda.ExternalStream(int(stream.handle))``, or ``cupy.cuda.ExternalStream`` of the same handle.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import imported
from ..errors import KvbmError, LayoutError, PlanError
from ..memory.array_info import span
from ..planner.loopnest import Part
from ..planner.plan import plan
from ..pool.pool import Pool
from .measure import View, device_of

#: ``copy(src_ids, dst_ids, stream)``: the ids are int32 NumPy arrays; the stream is None on the host.
Copy = Callable[[Any, Any, Any], object]

#: ``peer(src, dst)`` returns the copy between two pools.
Peer = Callable[[Pool, Pool], Copy]


class NotApplicable(KvbmError):  # noqa: N818  (it is a refusal rather than an error: the pair is left out)
    """The backend does not support this pair.  The message gives the reason; the pair is left out."""

    exit_code = 1


class PeerError(KvbmError):
    """A peer cannot be loaded, or fails."""

    exit_code = 1


# ---- two pools as tensors of the same axes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Strided:
    """One half of a copy: both pools as strided tensors, block first, with the same axes in the same order.

    `shape` has the elements along each axis except the block's; all else is in bytes: between neighbours along each of these
    axes, and from block to block.  Addresses are those of block 0.
    """

    shape: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    src_block: int
    dst_block: int
    src_address: int
    dst_address: int


def strided(src: Pool, dst: Pool) -> tuple[Strided, ...]:
    """Both pools as strided tensors: one pair, or one for K and one for V if their orders differ.

    Raises `NotApplicable` if a layout has pitches or planes, splits have no common refinement, or strides cannot describe the
    allocations.
    """
    for pool in (src, dst):
        if pool.layout.pitch or pool.layout.planes:
            raise NotApplicable(f"{pool.layout.name} has {'pitches' if pool.layout.pitch else 'planes'}")
    try:
        made = plan(src.layout, dst.layout, src.shape, num_blocks=(src.num_blocks, dst.num_blocks))
    except (LayoutError, PlanError) as error:
        raise NotApplicable(str(error)) from None
    return tuple(_strided(part, src, dst) for part in made.parts)


def _strided(part: Part, src: Pool, dst: Pool) -> Strided:
    """The loops of a part in the order of the destination.  Steps between allocations become strides."""
    loops = [*part.inner[1:], *part.outer]
    (src_at, src_entry), (dst_at, dst_entry) = part.start
    from_, src_block, src_address = folded(
        src, src_entry, src_at, part.src_id[:2], [(m.extent, m.src_table, m.src) for m in loops]
    )
    to, dst_block, dst_address = folded(
        dst, dst_entry, dst_at, part.dst_id[:2], [(m.extent, m.dst_table, m.dst) for m in loops]
    )
    itemsize = src.shape.itemsize
    atoms = [(itemsize, itemsize, part.run_bytes // itemsize), *zip(to, from_, (m.extent for m in loops), strict=True)]
    merged: list[tuple[int, int, int]] = []
    for there, here, extent in sorted((atom for atom in atoms if atom[2] > 1), reverse=True):
        if merged and merged[-1][:2] == (there * extent, here * extent):
            merged[-1] = (there, here, extent * merged[-1][2])
        else:
            merged.append((there, here, extent))
    merged = merged or [(itemsize, itemsize, 1)]
    return Strided(
        tuple(extent for _, _, extent in merged),
        tuple(here for _, here, _ in merged),
        tuple(there for there, _, _ in merged),
        src_block, dst_block, src_address, dst_address,
    )  # fmt: skip


def folded(
    pool: Pool, entry: int, at: int, block: tuple[int, int], loops: Sequence[tuple[int, int, int]]
) -> tuple[list[int], int, int]:
    """The stride in bytes of each loop (extent, table entries, bytes) and of a block id, and the address of the first element."""
    bases = pool.addresses.astype(np.int64)

    def step(extent: int, entries: int) -> int:
        return int(bases[entry + entries] - bases[entry]) if entries and extent > 1 else 0

    steps = [
        (extent, entries, step(extent, entries))
        for extent, entries in [(pool.num_blocks, block[0]), *(x[:2] for x in loops)]
    ]
    reached, expected = np.array([entry]), bases[entry : entry + 1]
    for extent, entries, nbytes in steps:
        if entries:
            turns = np.arange(extent)
            reached = (reached[:, None] + turns * entries).reshape(-1)
            expected = (expected[:, None] + turns * nbytes).reshape(-1)
    if not np.array_equal(bases[reached], expected) or any(nbytes < 0 for *_, nbytes in steps):
        raise NotApplicable(f"{pool.layout.name}: its allocations do not lie at regular distances")
    strides = [nbytes + own for (*_, nbytes), (*_, own) in zip(steps[1:], loops, strict=True)]
    return strides, block[1] + steps[0][2], int(bases[entry]) + at


def _views(src: Pool, dst: Pool, view: Callable[[Pool, int, tuple[int, ...], tuple[int, ...]], Any]) -> list[tuple[Any, Any]]:
    """Both sides of each half as arrays, block first: ``view(pool, address, shape, strides)``."""
    return [
        (
            view(src, half.src_address, (src.num_blocks, *half.shape), (half.src_block, *half.src)),
            view(dst, half.dst_address, (dst.num_blocks, *half.shape), (half.dst_block, *half.dst)),
        )
        for half in strided(src, dst)
    ]


def _once(make: Callable[[npt.NDArray[np.int32]], Any]) -> Callable[[npt.NDArray[np.int32]], Any]:
    """Ids as `make` returns them.  Each set is made once and not in every call, because an engine has its ids on the GPU."""
    known: dict[int, tuple[Any, Any]] = {}

    def ids(numbers: npt.NDArray[np.int32]) -> Any:
        found = known.get(id(numbers))
        if found is None:
            found = known[id(numbers)] = (numbers, make(numbers))
        return found[1]

    return ids


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
    """Index, permute, copy.  The axes of `src` are in memory order; `dst` has the block axis first."""
    dst[dst_ids] = src[(slice(None),) * block + (src_ids,)].permute(order)


def _move_each(src: Any, dst: Any, order: tuple[int, ...], _block: int, src_ids: Any, dst_ids: Any) -> None:
    """The same copy, block by block."""
    blocks = src.permute(order)  # the block axis first, as in `dst`
    for i, j in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        dst[j].copy_(blocks[i])


def torch_eager(src: Pool, dst: Pool) -> Copy:
    """PyTorch: index, ``permute``, indexed assignment.  This is faster than ``index_select`` and ``index_copy_``.

    On the host, indexing copies element by element.  There blocks are copied one after the other, which is faster.
    """
    return _torch(src, dst, _move if device_of(src.device) >= 0 else _move_each)


def torch_compile(src: Pool, dst: Pool) -> Copy:
    """The same with ``torch.compile``, which may generate a single kernel."""
    torch = _import("torch")
    _require_one_device(src, dst, host=True, gpu=True)
    strided(src, dst)
    torch.compiler.reset()  # otherwise earlier pairs count against its limit of recompilations
    return _torch(src, dst, torch.compile(_move))


def _torch(src: Pool, dst: Pool, move: Callable[..., None]) -> Copy:
    torch = _import("torch")
    device = _require_one_device(src, dst, host=True, gpu=True)
    if device >= 0 and not torch.cuda.is_available():
        raise NotApplicable("this torch cannot use the GPU")
    itemsize = src.shape.itemsize
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]

    def tensor(_: Pool, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """The bytes as a tensor of integers.  The pool keeps the memory alive."""
        nbytes = span(shape, strides, itemsize)
        if device >= 0:
            view = View(device, address, (nbytes // itemsize,), (itemsize,), f"<i{itemsize}" if itemsize > 1 else "|i1")
            flat = torch.as_tensor(view, device=f"cuda:{device}")
        else:
            flat = torch.from_numpy(host_array(address, nbytes, itemsize))
        return torch.as_strided(flat.view(kind), shape, tuple(s // itemsize for s in strides))

    halves = []
    for here, there in _views(src, dst, tensor):
        memory = sorted(range(here.dim()), key=lambda axis: -here.stride(axis))
        order = tuple(memory.index(axis) for axis in range(here.dim()))
        halves.append((here.permute(memory), there, order, memory.index(0)))
    where = f"cuda:{device}" if device >= 0 else "cpu"
    ids = _once(lambda numbers: torch.from_numpy(numbers.astype(np.int64)).to(where))

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

    def array(pool: Pool, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        memory = cupy.cuda.UnownedMemory(address, span(shape, strides, itemsize), pool, device)
        return cupy.ndarray(shape, f"i{itemsize}", cupy.cuda.MemoryPointer(memory, 0), strides)

    def on_gpu(numbers: npt.NDArray[np.int32]) -> Any:
        made = cupy.asarray(numbers, np.int64)
        cupy.cuda.get_current_stream().synchronize()
        return made

    with cupy.cuda.Device(device):
        halves = _views(src, dst, array)
    ids = _once(on_gpu)

    def copy(src_ids: Any, dst_ids: Any, stream: Any) -> None:
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(_core.stream_handle(stream), device):
            here, there = ids(src_ids), ids(dst_ids)
            for src_view, dst_view in halves:
                dst_view[there] = src_view[here]

    return copy


def numpy_take(src: Pool, dst: Pool) -> Copy:
    """NumPy: one indexed assignment on transposed views, on one core."""
    _require_one_device(src, dst, host=True, gpu=False)
    itemsize = src.shape.itemsize

    def array(_: Pool, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        flat = host_array(address, span(shape, strides, itemsize), itemsize)
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    halves = _views(src, dst, array)

    def copy(src_ids: Any, dst_ids: Any, _stream: Any) -> None:
        for src_view, dst_view in halves:
            dst_view[dst_ids] = src_view[src_ids]

    return copy


def host_array(address: int, nbytes: int, itemsize: int) -> npt.NDArray[Any]:
    """Host memory as integers.  The pool keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(f"i{itemsize}")


# ---- available peers -----------------------------------------------------------------------------------------------

#: Name in the CSV → required package, peer, and measured directions.
BUILT_IN: dict[str, tuple[str, Peer, tuple[str, ...]]] = {
    "torch": ("torch", torch_eager, ("d2d", "h2h")),
    "torch_compile": ("torch", torch_compile, ("d2d",)),
    "cupy": ("cupy", cupy_take, ("d2d",)),
    "numpy": ("numpy", numpy_take, ("h2h",)),
}


def installed(direction: str) -> Iterator[tuple[str, Peer]]:
    """The built-in peers for a direction whose library is installed."""
    for name, (module, peer, directions) in BUILT_IN.items():
        if direction in directions and _is_installed(module):
            yield name, peer


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def load(text: str) -> Peer:
    """The function named ``module:function``.  Modules in the working directory are found, too.

    Raises `PeerError`: there is no such module or function, or the module does not import.
    """
    if not all(text.partition(":")[::2]):
        raise PeerError(f"peer {text!r}: expected module:function")
    here = os.getcwd()  # noqa: PTH109  (sys.path holds texts)
    if here not in sys.path:
        sys.path.append(here)
    try:
        found: Any = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise PeerError(f"peer {text!r}: {error}; modules are looked for in {here} and where Python looks") from error
    if not callable(found):
        raise PeerError(f"peer {text!r}: expected a function of two pools, got a {type(found).__name__}")
    peer: Peer = found
    return peer


def release() -> None:
    """Make PyTorch and CuPy release the GPU memory in their caches."""
    torch, cupy = imported("torch"), imported("cupy")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotApplicable(f"{name} does not import: {error}") from None
