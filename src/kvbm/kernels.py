"""Copy lists of CUDA tensors or ranges of raw addresses, each in one launch.

These functions are for callers that have tensors or addresses instead of pools.  Names and shapes are those of Dynamo's KVBM:
stacked blocks, universal and operational tensors.  An engine that copies often binds its memory once with `kvbm.Pool` and calls
`kvbm.convert`.

A function returns when its copies are on the stream: it does not wait for them.  Dynamo's Python bindings waited after each call.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _core
from ._arguments import flag, imported, listed, quoted
from .compile.prepare import prepare
from .copy.executor import current_stream, require_compatible, require_disjoint
from .errors import BindError, DTypeError
from .layout.layout import Layout
from .layout.shapes import ITEMSIZE, BlockShape
from .layout.spec import load, parse
from .memory.array_info import TOLD, Array, dense, describe, written
from .memory.streams import torch_stream
from .planner.plan import plan
from .pool.pool import Pool

__all__ = [
    "MemcpyBatchMode", "block_to_operational", "block_to_universal", "is_memcpy_batch_available", "is_using_stubs",
    "memcpy_batch", "nhd_hnd_transpose", "operational_to_block", "universal_to_block", "vectorized_copy",
]  # fmt: skip


class MemcpyBatchMode(enum.IntEnum):
    """How `memcpy_batch` calls the driver."""

    #: One ``cuMemcpyBatchAsync`` if the driver and the stream allow it, else one ``cuMemcpyAsync`` per copy.
    BATCHED_WITH_FALLBACK = 0
    #: One ``cuMemcpyAsync`` per copy.
    FALLBACK_ONLY = 1
    #: ``cuMemcpyBatchAsync``, or an error.
    BATCH_WITHOUT_FALLBACK = 2


#: Orders inside a chunk.
Inner = Literal["NHD", "HND", "nhd", "hnd"]
#: Backends that copy chunks, with Dynamo's long names.
Backend = Literal[
    "auto", "kernel", "kernel_only", "batch", "memcpy_batch", "cuda_memcpy_batch", "async", "memcpy_async", "cuda_memcpy_async"
]

_BACKENDS = {
    **dict.fromkeys(("auto", "kernel", "kernel_only"), "kernel"),
    **dict.fromkeys(("batch", "memcpy_batch", "cuda_memcpy_batch"), "batch"),
    **dict.fromkeys(("async", "memcpy_async", "cuda_memcpy_async"), "async"),
}


def is_using_stubs() -> bool:
    """True if this build has no CUDA kernels.  The CPU functions work, and a GPU call raises an error."""
    return _core.num_images() == 0


def is_memcpy_batch_available() -> bool:
    """True if the driver can copy many ranges in one call (``cuMemcpyBatchAsync``, CUDA 12.8)."""
    return _core.has_memcpy_batch()


def block_to_universal(
    blocks: Any, universals: Any, layout: Inner = "NHD", *, layers: range | None = None, stream: Any = None
) -> None:
    """Gather stacked blocks into universal tensors.

    Parameters
    ----------
    blocks : sequence of sequences of CUDA tensors
        ``[nb][nl*no]`` chunks, each of shape ``[nt, nh, hd]`` (NHD) or ``[nh, nt, hd]`` (HND).  A flat list if nb = 1.
    universals : CUDA tensor or sequence of CUDA tensors
        nb tensors of shape ``[nh, nl, no, nt, hd]``, one such tensor, or one tensor ``[nb, nh, nl, no, nt, hd]``.
    layout : {"NHD", "HND"}
        Order of axes inside a chunk; upper or lower case.
    layers : range, optional
        The layers of the universal tensors that the blocks hold, as ``range(first, last)``.  Then `blocks` has
        ``[nb][len(layers)*no]`` chunks, and the other layers are neither read nor written.  Default: all nl.
    stream : optional
        As for `kvbm.convert`.

    Raises
    ------
    BindError (a ValueError)
        Tensors have a wrong count, rank or shape, are not contiguous, are not on one CUDA device, or overlap.  The layout is
        unknown, or the layers are not within those of the universal tensors.
    DTypeError (a TypeError)
        A dtype is not supported, or differs between tensors.
    CudaError
        The launch failed.
    CudaUnavailableError
        There is no GPU, no driver, or no CUDA kernel in this build.
    """
    _permute(blocks, universals, layout, layers, stream, to_universal=True)


def universal_to_block(
    universals: Any, blocks: Any, layout: Inner = "NHD", *, layers: range | None = None, stream: Any = None
) -> None:
    """Scatter universal tensors into stacked blocks; the parameters are those of `block_to_universal`."""
    _permute(blocks, universals, layout, layers, stream, to_universal=False)


def nhd_hnd_transpose(src: Any, dst: Any, src_layout: Inner = "NHD", *, stream: Any = None) -> None:
    """Copy chunks into chunks of the other order: NHD into HND, or HND into NHD.

    It is not done in place: no destination may share memory with a source.

    Parameters
    ----------
    src : sequence of sequences of CUDA tensors
        ``[nb][nl*no]`` chunks, each of shape ``[nt, nh, hd]`` (NHD) or ``[nh, nt, hd]`` (HND).  A flat list if nb = 1.
    dst : sequence of sequences of CUDA tensors
        As many chunks in the same order, with the first two axes exchanged.
    src_layout : {"NHD", "HND"}
        Order of axes inside a chunk of the source; upper or lower case.  The destination has the other one.
    stream : optional
        As for `kvbm.convert`.

    Raises
    ------
    BindError, DTypeError, CudaError, CudaUnavailableError
        As `block_to_universal`.

    Examples
    --------
    >>> nhd_hnd_transpose(pages, torch.empty(len(pages), nh, nt, hd, device="cuda").unbind())  # doctest: +SKIP
    """
    name = _stacked(src_layout, "src_layout")
    sides = _look_at_chunks(src, dst) or _look_closely_at_chunks(src, dst, name)
    if sides is not None:
        copies = _prepared_transpose(name, sides.sizes, sides.dtype, sides.alignments, sides.device)
        _launch(sides, copies, stream, to_whole=True)
        _written(sides, dst, are_chunks=True)


def block_to_operational(blocks: Any, operationals: Any, backend: Backend | None = None, *, stream: Any = None) -> None:
    """Gather stacked blocks into operational tensors.  The order inside a chunk does not change.

    Parameters
    ----------
    blocks : sequence of sequences of CUDA tensors
        ``[nb][nl*no]`` chunks of any rank, with ``inner`` elements each.  A flat list if nb = 1.
    operationals : CUDA tensor or sequence of CUDA tensors
        nb tensors of shape ``[nl, no, inner]``, one such tensor, or one tensor ``[nb, nl, no, inner]``.
    backend : {None, "auto", "kernel", "batch", "async"}
        One kernel (default), one ``cuMemcpyBatchAsync``, or one ``cuMemcpyAsync`` per chunk.  Dynamo's long names
        (``memcpy_batch``, ``cuda_memcpy_async``, …) are accepted.  A backend that is not available raises an error.
    stream : optional
        As for `kvbm.convert`.

    Raises
    ------
    BindError, DTypeError, CudaError, CudaUnavailableError
        As `block_to_universal`.
    """
    _copy_chunks(blocks, operationals, backend, stream, to_operational=True)


def operational_to_block(operationals: Any, blocks: Any, backend: Backend | None = None, *, stream: Any = None) -> None:
    """Scatter operational tensors into stacked blocks; the parameters are those of `block_to_operational`."""
    _copy_chunks(blocks, operationals, backend, stream, to_operational=False)


# ---- arguments -----------------------------------------------------------------------------------------------------


def _stacked(layout: str, what: str = "layout") -> str:
    name = layout.lower() if isinstance(layout, str) else ""  # type: ignore[redundant-expr]
    if name not in ("nhd", "hnd"):
        raise BindError(f"{what}: expected 'NHD' or 'HND', got {quoted(layout)}")
    return name


def _require_range(layers: range | None) -> None:
    if layers is not None and (not isinstance(layers, range) or layers.step != 1):  # type: ignore[redundant-expr]
        raise BindError(f"layers: expected range(first, last) or None, got {quoted(layers)}")


def _window(layers: range | None, nl: int) -> range:
    """The layers to copy."""
    if layers is None:
        return range(nl)
    if not 0 <= layers.start < layers.stop <= nl:
        raise BindError(f"layers: expected a range within 0 to {nl}, the layers of universals[0], got {layers}")
    return layers


@functools.cache
def _shipped(name: str) -> Layout:
    return load(name)


@functools.cache
def _chunked() -> tuple[Layout, Layout]:
    """The stacked and the operational layout of chunks with one axis of elements."""
    return parse('order: "[b l o] d"', name="blocks"), parse('order: "[b] l o d"', name="operationals")


def _backend(backend: str | None) -> str:
    name = "auto" if backend is None else backend.strip().lower() if isinstance(backend, str) else ""  # type: ignore[redundant-expr]
    if name not in _BACKENDS:
        raise BindError(f"backend: expected 'auto', 'kernel', 'batch' or 'async', got {quoted(backend)}")
    return _BACKENDS[name]


def _whole(tensors: Any, name: str, rank: int) -> tuple[list[Any], list[Array]]:
    """The whole tensors of a batch and their descriptions: all contiguous, on CUDA, and of one shape with this rank."""
    if not isinstance(tensors, Sequence):
        found = describe(tensors, name)
        tensors = [tensors[i] for i in range(found.shape[0])] if len(found.shape) == rank + 1 else [tensors]
    tensors = _items(tensors, name, "tensors, one per block")
    arrays = [_described(tensor, f"{name}[{index}]") for index, tensor in enumerate(tensors)]
    for index, array in enumerate(arrays):
        if len(array.shape) != rank:
            raise BindError(f"{name}[{index}]: expected {rank} axes, got shape {array.shape}")
        if array.shape != arrays[0].shape:
            raise BindError(f"{name}[{index}]: expected shape {arrays[0].shape} as {name}[0], got {array.shape}")
    return tensors, arrays


def _described(tensor: Any, what: str) -> Array:
    array = describe(tensor, what)
    if array.device == "cpu":
        raise BindError(f"{what}: expected a CUDA tensor, got one on the CPU; use kvbm.Pool and kvbm.convert for the CPU")
    itemsize = ITEMSIZE.get(array.dtype)
    if itemsize is None:
        raise DTypeError(f"{what}: expected one of {', '.join(ITEMSIZE)}, got {array.dtype}")
    if any(n > 1 and a != b for n, a, b in zip(array.shape, array.strides, dense(array.shape, itemsize), strict=True)):
        raise BindError(
            f"{what}: expected a contiguous tensor, got strides of {array.strides} bytes; bind the base tensor of this view with "
            "kvbm.Pool and the layout of its memory. Do not pass a contiguous copy: the result would not be in your tensor"
        )
    return array


def _items(given: Any, name: str, words: str = "lists of tensors, one per block") -> list[Any]:
    """What a sequence holds, read once: it may be an object whose length is not so."""
    return list(given) if type(given) in (list, tuple) else listed(name, given, words)


def _rows(given: Sequence[Any], name: str, *, may_be_flat: bool = True) -> list[Any]:
    """Lists of chunks, one per block, each read once, whatever it is; what is no list stays as it is."""
    rows = _items(given, name)
    if may_be_flat and rows and not isinstance(rows[0], Sequence):
        return [rows]
    return [
        _items(row, f"{name}[{at}]", "a list of tensors") if isinstance(row, Sequence) else row
        for at, row in enumerate(rows)
    ]


def _chunks(
    blocks: Any, batch: int, chunks: int, expected: tuple[int, ...], *, exact: bool, count: str, name: str = "blocks"
) -> tuple[list[Any], list[Array]]:
    """``[nb][nl*no]`` chunks as one list in table order, each of the expected shape (or only with as many elements)."""
    if not isinstance(blocks, Sequence):
        raise BindError(f"{name}: expected {batch} lists of {chunks} tensors, got a {type(blocks).__name__}")
    rows = _rows(blocks, name, may_be_flat=batch == 1)
    if len(rows) != batch:
        raise BindError(f"{name}: expected {batch} lists, one per block, got {len(rows)}")
    flat: list[Any] = []
    for index, block in enumerate(rows):
        if not isinstance(block, list) or len(block) != chunks:
            got = f"{len(block)}" if isinstance(block, list) else f"a {type(block).__name__}"
            raise BindError(f"{name}[{index}]: expected {chunks} tensors ({count}), got {got}")
        flat.extend(block)
    arrays = []
    for index, chunk in enumerate(flat):
        what = f"{name}[{index // chunks}][{index % chunks}]"
        array = _described(chunk, what)
        if array.shape != expected if exact else math.prod(array.shape) != math.prod(expected):
            wanted = f"shape {expected}" if exact else f"{math.prod(expected)} elements"
            raise BindError(f"{what}: expected {wanted}, got shape {array.shape}")
        arrays.append(array)
    return flat, arrays


# ---- copies --------------------------------------------------------------------------------------------------------


class _Sides(NamedTuple):
    """Blocks and whole tensors that fit each other and share no byte, on one GPU; or two lists of chunks, the source first.

    `layers`: the layers of the whole tensors that the blocks hold; None if they hold all.
    """

    blocks: _core.Table
    whole: _core.Table
    sizes: tuple[int, ...]
    dtype: str
    device: int
    alignments: tuple[int, int]
    pools: tuple[Pool, Pool] | None
    layers: range | None = None


def _pair(layout: str) -> tuple[Layout, Layout]:
    return _chunked() if layout == "operational" else (_shipped(layout), _shipped("universal"))


@functools.lru_cache(maxsize=256)
def _block_shape(layout: str, sizes: tuple[int, ...], dtype: str) -> tuple[BlockShape, tuple[int, ...]]:
    """The block that a whole tensor of these sizes holds, and the shape of a chunk."""
    if layout == "operational":
        nl, no, inner = sizes
        return BlockShape(nl, no, 1, 1, inner, dtype), (inner,)
    nh, nl, no, nt, hd = sizes
    return BlockShape(nl, no, nh, nt, hd, dtype), (nt, nh, hd) if layout == "nhd" else (nh, nt, hd)


def _sides(blocks: Any, whole: Any, layout: str, *, to_whole: bool, layers: range | None = None) -> _Sides | None:
    """Both sides, checked; None where the batch is empty."""
    return _look(blocks, whole, layout, to_whole, layers) or _look_closely(blocks, whole, layout, to_whole, layers)


def _look(blocks: Any, whole: Any, layout: str, to_whole: bool, layers: range | None) -> _Sides | None:
    """Check torch's tensors in C.  None if anything is wrong: `_look_closely` then raises the error."""
    rank = 3 if layout == "operational" else 5
    found = _core.whole_tensors(whole, rank)
    if found is None:
        return None
    whole_table, sizes, dtype, device, whole_alignment = found
    shape, chunk = _block_shape(layout, sizes, dtype)
    window = _window(layers, shape.nl)
    exact = layout != "operational"
    chunks = _core.chunk_tensors(blocks, len(whole_table), len(window) * shape.no, chunk, exact, dtype, device)
    if chunks is None:
        return None
    table, alignment = chunks
    sides = [(table, math.prod(chunk) * shape.itemsize), (whole_table, shape.nbytes)]
    if _core.tables_clash(*sides[not to_whole], *sides[to_whole]):
        return None
    return _Sides(table, whole_table, sizes, dtype, device, (alignment, whole_alignment), None, layers)


def _look_closely(blocks: Any, whole: Any, layout: str, to_whole: bool, layers: range | None) -> _Sides | None:
    """Check each tensor of any framework, and raise an error for a wrong one."""
    name, rank = ("operationals", 3) if layout == "operational" else ("universals", 5)
    tensors, arrays = _whole(whole, name, rank)
    if not arrays:
        _require_empty(blocks, name)
        return None
    shape, chunk = _block_shape(layout, arrays[0].shape, arrays[0].dtype)
    window = _window(layers, shape.nl)
    per, exact = len(window) * shape.no, layout != "operational"
    count = "nl*no" if layers is None else "len(layers)*no, only those of the layers"
    flat, chunks = _chunks(blocks, len(arrays), per, chunk, exact=exact, count=count)
    layouts, held = _pair(layout), replace(shape, nl=len(window))
    pools = (Pool.trusted(layouts[0], held, chunks, flat), Pool.trusted(layouts[1], shape, arrays, tensors))
    return _fitting(pools, arrays[0].shape, to_whole=to_whole, layers=layers)


def _fitting(
    pools: tuple[Pool, Pool], sizes: tuple[int, ...], *, to_whole: bool = True, layers: range | None = None
) -> _Sides:
    """Both sides, whose blocks can be copied on their one GPU."""
    src, dst = ends = pools if to_whole else pools[::-1]
    require_compatible(src, dst)
    if src.device != dst.device:
        title = f"{src.layout.name} → {dst.layout.name}"
        raise BindError(f"{title}: the source is on {src.device}, the destination on {dst.device}; expected one device")
    require_disjoint(src, dst)
    dst.require_distinct()
    device = int(src.device.partition(":")[2])
    # These lists exist for one call: the launch passes their addresses, instead of uploading and keeping a table.
    blocks, whole = (_core.Table(pool.addresses, device, upload=False) for pool in pools)
    alignments = pools[0].alignment, pools[1].alignment
    return _Sides(blocks, whole, sizes, pools[0].shape.dtype, device, alignments, ends, layers)


def _require_empty(blocks: Any, name: str) -> None:
    is_list = isinstance(blocks, Sequence)
    rows = _items(blocks, "blocks") if is_list else []
    if rows or not is_list:
        got = len(rows) if is_list else f"a {type(blocks).__name__}"
        raise BindError(f"blocks: expected 0 lists, as {name} is empty, got {got}")


def _look_at_chunks(src: Any, dst: Any) -> _Sides | None:
    """Check torch's tensors in C, as `_look`."""
    if type(src) not in (list, tuple) or not src:
        return None
    rows = type(src[0]) in (list, tuple)
    first = src[0] if rows else src
    found = _core.whole_tensors(first[:1], 3)
    if found is None:
        return None
    _, sizes, dtype, device, _ = found
    batch, per = len(src) if rows else 1, len(first)
    ours = _core.chunk_tensors(src, batch, per, sizes, True, dtype, device)
    theirs = _core.chunk_tensors(dst, batch, per, (sizes[1], sizes[0], sizes[2]), True, dtype, device)
    if ours is None or theirs is None:
        return None
    nbytes = math.prod(sizes) * ITEMSIZE[dtype]
    if nbytes == 0 or _core.tables_clash(ours[0], nbytes, theirs[0], nbytes):
        return None
    return _Sides(ours[0], theirs[0], sizes, dtype, device, (ours[1], theirs[1]), None)


def _look_closely_at_chunks(src: Any, dst: Any, name: str) -> _Sides | None:
    """Check each tensor of any framework, as `_look_closely`; None where there is no chunk."""
    if not isinstance(src, Sequence):
        raise BindError(f"src: expected a list of lists of tensors, one per block, got a {type(src).__name__}")
    rows = _rows(src, "src")
    batch, per = len(rows), len(rows[0]) if rows else 0
    expected: tuple[int, ...] = ()
    if per:
        expected = _described(rows[0][0], "src[0][0]").shape
        if len(expected) != 3:
            axes = "[nt, nh, hd]" if name == "nhd" else "[nh, nt, hd]"
            raise BindError(f"src[0][0]: expected 3 axes, {axes}, got shape {expected}")
    ours, arrays = _chunks(rows, batch, per, expected, exact=True, count="as in src[0]", name="src")
    turned = (expected[1], expected[0], expected[2]) if per else ()
    theirs, others = _chunks(dst, batch, per, turned, exact=True, count="as in src[0]", name="dst")
    if not arrays:
        return None
    shape = _chunk_shape(name, expected, arrays[0].dtype)
    layouts = _turned(name)
    # Each chunk is a block of one layer.
    pools = Pool.trusted(layouts[0], shape, arrays, ours), Pool.trusted(layouts[1], shape, others, theirs)
    return _fitting(pools, expected)


def _stream_of(sides: _Sides, stream: Any) -> int:
    if stream is not None:
        return _core.stream_handle(stream)
    return torch_stream(sides.device) if sides.pools is None else current_stream(sides.pools[0])


def _written(sides: _Sides, dst: Any, *, are_chunks: bool) -> None:
    """Tell autograd, as `Pool.written` does.  Not for many chunks: that would take as long as checking them."""
    if sides.pools is not None:
        sides.pools[1].written()
    elif not are_chunks:
        written(dst if isinstance(dst, Sequence) else [dst])
    elif len(sides.blocks) <= TOLD:
        written(list(itertools.chain.from_iterable(dst) if isinstance(dst[0], Sequence) else dst))


@functools.lru_cache(maxsize=1024)  # a loop over the layers of a model has one for each
def _prepared(
    layout: str, sizes: tuple[int, ...], dtype: str, batch: int, alignments: tuple[int, int], device: int,
    to_whole: bool, layers: range | None,
) -> tuple[_core.Copy, ...]:  # fmt: skip
    """The launches between blocks and whole tensors."""
    shape, _ = _block_shape(layout, sizes, dtype)
    src, dst = _pair(layout) if to_whole else _pair(layout)[::-1]
    shapes, windows = (shape, shape), None
    if layers is not None:
        held, given = replace(shape, nl=len(layers)), range(len(layers))
        shapes, windows = ((held, shape), (given, layers)) if to_whole else ((shape, held), (layers, given))
    made = plan(src, dst, shapes, num_blocks=(batch, batch), layers=windows)
    return tuple(prepare(made, *(alignments if to_whole else alignments[::-1]), device=device))


def _turned(name: str) -> tuple[Layout, Layout]:
    return _shipped(name), _shipped("hnd" if name == "nhd" else "nhd")


def _chunk_shape(name: str, sizes: tuple[int, ...], dtype: str) -> BlockShape:
    """A block that is one chunk."""
    nt, nh = sizes[:2] if name == "nhd" else sizes[1::-1]
    return BlockShape(1, 1, nh, nt, sizes[2], dtype)


@functools.lru_cache(maxsize=256)
def _prepared_transpose(
    name: str, sizes: tuple[int, ...], dtype: str, alignments: tuple[int, int], device: int
) -> tuple[_core.Copy, ...]:
    """The launches between chunks, each of which is a block."""
    made = plan(*_turned(name), _chunk_shape(name, sizes, dtype))
    return tuple(prepare(made, *alignments, device=device))


def _launch(sides: _Sides, copies: tuple[_core.Copy, ...], stream: Any, to_whole: bool) -> None:
    handle, batch = _stream_of(sides, stream), len(sides.whole)
    pairs = _core.Pairs(None, None, batch, batch)
    src, dst = (sides.blocks, sides.whole) if to_whole else (sides.whole, sides.blocks)
    for copy in copies:
        copy.launch(src, dst, pairs, sides.device, handle)


def _launch_whole(sides: _Sides, layout: str, stream: Any, to_whole: bool) -> None:
    known = len(sides.whole), sides.alignments, sides.device, to_whole, sides.layers
    _launch(sides, _prepared(layout, sides.sizes, sides.dtype, *known), stream, to_whole)


def _permute(
    blocks: Any, universals: Any, layout: str, layers: range | None, stream: Any, *, to_universal: bool
) -> None:
    name = _stacked(layout)
    _require_range(layers)
    sides = _sides(blocks, universals, name, to_whole=to_universal, layers=layers)
    if sides is not None:
        _launch_whole(sides, name, stream, to_universal)
        _written(sides, universals if to_universal else blocks, are_chunks=not to_universal)


def _copy_chunks(blocks: Any, operationals: Any, backend: str | None, stream: Any, *, to_operational: bool) -> None:
    how = _backend(backend)
    sides = _sides(blocks, operationals, "operational", to_whole=to_operational)
    if sides is None:
        return
    if how == "kernel":
        _launch_whole(sides, "operational", stream, to_operational)
    else:
        handle = _stream_of(sides, stream)
        size = sides.sizes[2] * ITEMSIZE[sides.dtype]
        pieces = []
        for table in (sides.blocks, sides.whole) if to_operational else (sides.whole, sides.blocks):
            pieces.append(np.empty(len(sides.blocks), np.uint64))
            _core.spread(table, pieces[-1], size)
        mode, merge = (2, True) if how == "batch" else (1, False)
        _core.memcpy_batch(pieces[1], pieces[0], size, mode, sides.device, handle, merge)
    _written(sides, operationals if to_operational else blocks, are_chunks=not to_operational)


# ---- raw addresses -------------------------------------------------------------------------------------------------


def vectorized_copy(src_ptrs: Any, dst_ptrs: Any, size: int, *, stream: Any = None, device: Any = None) -> None:
    """Copy the same number of bytes from each source address to its destination, by one kernel.

    Parameters
    ----------
    src_ptrs, dst_ptrs : sequence of int, NumPy array or memoryview
        Addresses in GPU memory or pinned host memory; both lists have the same length.  They need not be aligned.  If both sides
        of a pair have the same misalignment, the kernel still copies words of 16 bytes.
    size : int
        Bytes of every pair; 0 copies nothing.
    stream : optional
        The stream of the copy, as for `kvbm.convert`.  Default: torch's current stream.
    device : int, str or torch.device, optional
        The GPU that runs the kernel.  Default: the GPU of the first address in GPU memory, else GPU 0.

    Raises
    ------
    BindError (a ValueError)
        The lists differ in length, the size is negative, an address is 0 or in memory that no GPU can access, or bytes are
        written twice or both read and written.  Nothing was copied.
    CudaError
        The launch failed.
    CudaUnavailableError
        There is no GPU, no driver, or no CUDA kernel in this build.

    Examples
    --------
    >>> vectorized_copy([a.data_ptr() for a in pinned], [b.data_ptr() for b in on_gpu], 4096)  # doctest: +SKIP
    """
    src, dst, nbytes = _addresses(src_ptrs, "src_ptrs"), _addresses(dst_ptrs, "dst_ptrs"), _size(size)
    _core.check_pairs(src, dst, nbytes)
    if nbytes == 0 or len(src) == 0:
        return
    index, gpus = _gpu(src, dst, device)
    if (found := _ungranted(src, dst, nbytes, index, gpus)) is not None:
        raise BindError(
            f"{found}: grant it (cuMemSetAccess or cuMemPoolSetAccess; torch does so at its first own copy between the GPUs), or "
            "use memcpy_batch, which needs no grant"
        )
    for other in range(gpus.bit_length()):
        if gpus >> other & 1 and other != index and not _core.enable_peer(index, other):
            raise BindError(
                f"some addresses lie on cuda:{other}, which a kernel on cuda:{index} cannot access: expected addresses of one GPU, "
                "or of GPUs with peer access; memcpy_batch copies between any two"
            )
    _core.copy_pairs(src, dst, nbytes, index, _raw_stream(stream, index))


def memcpy_batch(
    src_ptrs: Any,
    dst_ptrs: Any,
    size_or_sizes: Any,
    *,
    mode: MemcpyBatchMode = MemcpyBatchMode.BATCHED_WITH_FALLBACK,
    stream: Any = None,
    device: Any = None,
    merge: bool = True,
) -> MemcpyBatchMode:
    """Copy ranges of bytes by the copy engines, without multiprocessors.

    Parameters
    ----------
    src_ptrs, dst_ptrs
        As for `vectorized_copy`.
    size_or_sizes : int, or sequence of int
        Bytes of all ranges, or one number per range.  Ranges of 0 bytes are skipped.
    mode : MemcpyBatchMode
        What to do if a batched copy is not possible: the driver has none, the stream captures a graph, or some memory belongs to
        another GPU and is not granted to the GPU that copies.
    stream, device : optional
        As for `vectorized_copy`.
    merge : bool
        Join a range with the one before it in the list if both sides are contiguous.  Sort the ranges for this.

    Returns
    -------
    MemcpyBatchMode
        The mode that ran: ``BATCH_WITHOUT_FALLBACK`` or ``FALLBACK_ONLY``.

    Raises
    ------
    BindError, CudaError, CudaUnavailableError
        As `vectorized_copy`; also for `BATCH_WITHOUT_FALLBACK` if a batched copy is not possible.

    Examples
    --------
    >>> memcpy_batch([0x7F0000000000], [0x7E0000000000], [4096], stream=stream)  # doctest: +SKIP
    <MemcpyBatchMode.BATCH_WITHOUT_FALLBACK: 2>
    """
    try:
        wanted = MemcpyBatchMode(mode)
    except ValueError:
        raise BindError(f"mode: expected a MemcpyBatchMode, got {quoted(mode)}") from None
    src, dst = _addresses(src_ptrs, "src_ptrs"), _addresses(dst_ptrs, "dst_ptrs")
    is_one = isinstance(size_or_sizes, int | np.integer)
    sizes: Any = _size(size_or_sizes) if is_one else _addresses(size_or_sizes, "sizes")
    _core.check_pairs(src, dst, sizes)
    if len(src) == 0 or not np.any(sizes):
        ran = MemcpyBatchMode.FALLBACK_ONLY
        return wanted if wanted == MemcpyBatchMode.BATCH_WITHOUT_FALLBACK else ran
    if not is_one and not np.all(sizes):  # an empty range may start anywhere
        kept = sizes != 0
        src, dst, sizes = src[kept], dst[kept], sizes[kept]
    index, gpus = _gpu(src, dst, device)
    by_peer = _ungranted(src, dst, sizes, index, gpus) is not None
    return MemcpyBatchMode(
        _core.memcpy_batch(dst, src, sizes, int(wanted), index, _raw_stream(stream, index), flag("merge", merge), by_peer)
    )


def _ungranted(
    src: npt.NDArray[np.uint64], dst: npt.NDArray[np.uint64], sizes: Any, index: int, gpus: int
) -> str | None:
    """Memory of another GPU that is not granted to the GPU that copies, as a text; None if there is none."""
    if gpus & ~(1 << index) == 0:
        return None
    for addresses, what in ((src, "src_ptrs"), (dst, "dst_ptrs")):
        order = np.argsort(addresses, kind="stable")
        found = _core.find_ungranted(index, np.stack([addresses, addresses + np.uint64(sizes)], axis=1)[order])
        if found is not None:
            return f"{what}[{order[found[0]]}] lies in {found[1]} that is not granted to cuda:{index}"
    return None


def _addresses(values: Any, what: str) -> npt.NDArray[np.uint64]:
    """Addresses or sizes as a contiguous uint64 array."""
    if getattr(getattr(values, "device", None), "type", "cpu") == "cuda" or hasattr(values, "__cuda_array_interface__"):
        raise BindError(f"{what}: expected numbers in host memory, got a {type(values).__name__} on a GPU")
    try:
        array = np.asarray(values)
    except Exception:  # a list of lists, a tensor with a gradient, or the object's own code
        raise BindError(f"{what}: expected a list of numbers, got {quoted(values)}") from None
    if array.size > 1 << 30:
        raise BindError(f"{what}: expected at most 2**30 numbers, got {array.size}")
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.ndim != 1:
        raise BindError(f"{what}: expected one axis, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise BindError(f"{what}: expected integers, got dtype {array.dtype}")
    if array.dtype.kind == "i" and array.min() < 0:
        raise BindError(f"{what}[{int(array.argmin())}]: expected no negative number, got {array.min()}")
    return np.ascontiguousarray(array, np.uint64)


def _size(size: Any) -> int:
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or not 0 <= size < 1 << 63:
        raise BindError(f"size: expected a number of bytes, got {quoted(size)}")
    return int(size)


def _gpu(src: npt.NDArray[np.uint64], dst: npt.NDArray[np.uint64], device: Any) -> tuple[int, int]:
    """The GPU that copies, and a bit for each GPU that an address belongs to."""
    wanted = None if device is None else _ordinal(device)
    first, gpus = _core.find_device(src, "src_ptrs")
    second, more = _core.find_device(dst, "dst_ptrs")
    return (wanted if wanted is not None else max(first if first >= 0 else second, 0)), gpus | more


def _ordinal(device: Any) -> int:
    kind, _, index = (f"cuda:{device}" if isinstance(device, int | np.integer) else str(device)).partition(":")
    if kind != "cuda" or isinstance(device, bool) or not ((index.isascii() and index.isdecimal() and len(index) < 5) or not index):
        raise BindError(f"device: expected 'cuda', 'cuda:N' or N, got {quoted(device)}")
    return int(index or 0)


def _raw_stream(stream: Any, device: int) -> int:
    if stream is not None:
        return _core.stream_handle(stream)
    if (torch := imported("torch")) is not None and torch.version.cuda:
        return torch_stream(device)
    raise BindError("stream: addresses have no current stream; pass stream= (an object with __cuda_stream__, or a handle)")
