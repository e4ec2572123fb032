"""Stacked blocks, universal and operational tensors: lists of CUDA tensors in, one launch out.

The thin face for callers that hold tensors rather than pools; the names and shapes are those of Dynamo's KVBM.  An
engine that copies again and again binds its memory once with `kvbm.Pool` and calls `kvbm.convert`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from .errors import BindError, DTypeError
from .layout import Layout
from .planner import plan
from .pool import Array, Pool, describe
from .shapes import ITEMSIZE, BlockShape
from .spec import load, parse
from .transfer import current_stream, prepare, require_compatible, require_disjoint, run

__all__ = [
    "block_to_operational",
    "block_to_universal",
    "is_memcpy_batch_available",
    "is_using_stubs",
    "operational_to_block",
    "universal_to_block",
]

_BACKENDS = {
    "auto": "kernel",
    "kernel": "kernel",
    "kernel_only": "kernel",
    "batch": "batch",
    "memcpy_batch": "batch",
    "cuda_memcpy_batch": "batch",
    "async": "async",
    "memcpy_async": "async",
    "cuda_memcpy_async": "async",
}


def is_using_stubs() -> bool:
    """Whether this build has no CUDA kernels: everything works on the CPU, and a GPU call says so."""
    return _core.num_images() == 0


def is_memcpy_batch_available() -> bool:
    """Whether the driver can copy many pieces in one call (``cuMemcpyBatchAsync``, CUDA 12.8)."""
    return _core.has_memcpy_batch()


def block_to_universal(blocks: Any, universals: Any, layout: str = "NHD", *, stream: Any = None) -> None:
    """Gather stacked blocks into universal tensors.

    Parameters
    ----------
    blocks : sequence of sequences of CUDA tensors
        ``[nb][nl*no]`` chunks, each ``[nt, nh, hd]`` (NHD) or ``[nh, nt, hd]`` (HND); a flat list where nb = 1.
    universals : CUDA tensor or sequence of CUDA tensors
        nb tensors ``[nh, nl, no, nt, hd]``; one such tensor, or one ``[nb, nh, nl, no, nt, hd]``.
    layout : {"NHD", "HND"}
        Order inside a chunk, in any case.
    stream : optional
        As for `kvbm.convert`.

    Raises
    ------
    BindError (a ValueError)
        Wrong count, rank or shape, not contiguous, not on one CUDA device, unknown layout, memory that overlaps.
    DTypeError (a TypeError)
        Unsupported or mixed dtypes.
    CudaError, CudaUnavailableError
        The launch failed; no GPU, no driver or no CUDA kernels in this build.
    """
    _permute(blocks, universals, layout, stream, to_universal=True)


def universal_to_block(universals: Any, blocks: Any, layout: str = "NHD", *, stream: Any = None) -> None:
    """Scatter universal tensors into stacked blocks; the parameters are those of `block_to_universal`."""
    _permute(blocks, universals, layout, stream, to_universal=False)


def block_to_operational(blocks: Any, operationals: Any, backend: str | None = None, *, stream: Any = None) -> None:
    """Gather stacked blocks into operational tensors, whose inner order is that of the chunks.

    Parameters
    ----------
    blocks : sequence of sequences of CUDA tensors
        ``[nb][nl*no]`` chunks of any rank with ``inner`` elements each; a flat list where nb = 1.
    operationals : CUDA tensor or sequence of CUDA tensors
        nb tensors ``[nl, no, inner]``; one such tensor, or one ``[nb, nl, no, inner]``.
    backend : {None, "auto", "kernel", "batch", "async"}
        One kernel (the default), one ``cuMemcpyBatchAsync``, or one ``cuMemcpyAsync`` a chunk; also by their long names
        (``memcpy_batch``, ``cuda_memcpy_async``, …).  A backend that cannot be had is an error.
    stream : optional
        As for `kvbm.convert`.

    Raises
    ------
    BindError, DTypeError, CudaError, CudaUnavailableError
        As `block_to_universal`.
    """
    _copy_chunks(blocks, operationals, backend, stream, to_operational=True)


def operational_to_block(operationals: Any, blocks: Any, backend: str | None = None, *, stream: Any = None) -> None:
    """Scatter operational tensors into stacked blocks; the parameters are those of `block_to_operational`."""
    _copy_chunks(blocks, operationals, backend, stream, to_operational=False)


# ---- arguments -----------------------------------------------------------------------------------------------------


def _stacked(layout: str) -> Layout:
    name = str(layout).lower()
    if name not in ("nhd", "hnd"):
        raise BindError(f"layout: expected 'NHD' or 'HND', got {layout!r}")
    return _shipped(name)


@functools.cache
def _shipped(name: str) -> Layout:
    return load(name)


@functools.cache
def _chunked() -> tuple[Layout, Layout]:
    """Stacked and operational, where a chunk is nothing but its elements."""
    return parse('order: "[b l o] d"', name="blocks"), parse('order: "[b] l o d"', name="operationals")


def _backend(backend: str | None) -> str:
    name = "auto" if backend is None else str(backend).strip().lower()
    if name not in _BACKENDS:
        raise BindError(f"backend: expected 'auto', 'kernel', 'batch' or 'async', got {backend!r}")
    return _BACKENDS[name]


def _whole(tensors: Any, name: str, rank: int) -> tuple[list[Any], list[Array]]:
    """The whole tensors of a batch and what they are: all of one shape of this rank, contiguous and on CUDA."""
    if not isinstance(tensors, Sequence):
        found = describe(tensors, name)
        tensors = [tensors[i] for i in range(found.shape[0])] if len(found.shape) == rank + 1 else [tensors]
    arrays = [_described(tensor, f"{name}[{index}]") for index, tensor in enumerate(tensors)]
    for index, array in enumerate(arrays):
        if len(array.shape) != rank:
            raise BindError(f"{name}[{index}]: expected {rank} axes, got shape {array.shape}")
        if array.shape != arrays[0].shape:
            raise BindError(f"{name}[{index}]: expected shape {arrays[0].shape} as {name}[0], got {array.shape}")
    return list(tensors), arrays


def _described(tensor: Any, what: str) -> Array:
    array = describe(tensor, what)
    if array.device == "cpu":
        raise BindError(
            f"{what}: expected a CUDA tensor, got one on the CPU; use kvbm.Pool and kvbm.convert for the CPU"
        )
    held = ITEMSIZE.get(array.dtype)
    if held is None:
        raise DTypeError(f"{what}: expected one of {', '.join(ITEMSIZE)}, got {array.dtype}")
    for extent, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if extent > 1 and stride != held:
            raise BindError(
                f"{what}: expected a contiguous tensor, got strides of {array.strides} bytes; call .contiguous()"
            )
        held *= extent
    return array


def _chunks(
    blocks: Any, batch: int, chunks: int, expected: tuple[int, ...], *, exact: bool
) -> tuple[list[Any], list[Array]]:
    """``[nb][nl*no]`` chunks as one list in table order, each of the expected shape (or only of as many elements)."""
    if not isinstance(blocks, Sequence):
        raise BindError(f"blocks: expected {batch} lists of {chunks} tensors, got a {type(blocks).__name__}")
    if batch == 1 and len(blocks) == chunks and not isinstance(blocks[0], Sequence):
        blocks = [blocks]
    if len(blocks) != batch:
        raise BindError(f"blocks: expected {batch} lists, one a block, got {len(blocks)}")
    flat: list[Any] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, Sequence) or len(block) != chunks:
            got = f"{len(block)}" if isinstance(block, Sequence) else f"a {type(block).__name__}"
            raise BindError(f"blocks[{index}]: expected {chunks} tensors (nl*no), got {got}")
        flat.extend(block)
    arrays = []
    for index, chunk in enumerate(flat):
        what = f"blocks[{index // chunks}][{index % chunks}]"
        array = _described(chunk, what)
        if array.shape != expected if exact else math.prod(array.shape) != math.prod(expected):
            wanted = f"shape {expected}" if exact else f"{math.prod(expected)} elements"
            raise BindError(f"{what}: expected {wanted}, got shape {array.shape}")
        arrays.append(array)
    return flat, arrays


# ---- copies --------------------------------------------------------------------------------------------------------


def _permute(blocks: Any, universals: Any, layout: str, stream: Any, *, to_universal: bool) -> None:
    stacked = _stacked(layout)
    tensors, arrays = _whole(universals, "universals", 5)
    if not arrays:
        _require_empty(blocks, "universals")
        return
    nh, nl, no, nt, hd = arrays[0].shape
    shape = BlockShape(nl, no, nh, nt, hd, arrays[0].dtype)
    chunk = (nt, nh, hd) if stacked.name == "nhd" else (nh, nt, hd)
    flat, chunks = _chunks(blocks, len(arrays), nl * no, chunk, exact=True)
    pools = (Pool.trusted(stacked, shape, chunks, flat), Pool.trusted(_shipped("universal"), shape, arrays, tensors))
    _launch(*_checked(pools if to_universal else pools[::-1]), stream)


def _copy_chunks(blocks: Any, operationals: Any, backend: str | None, stream: Any, *, to_operational: bool) -> None:
    how = _backend(backend)
    tensors, arrays = _whole(operationals, "operationals", 3)
    if not arrays:
        _require_empty(blocks, "operationals")
        return
    nl, no, inner = arrays[0].shape
    shape = BlockShape(nl, no, 1, 1, inner, arrays[0].dtype)
    flat, chunks = _chunks(blocks, len(arrays), nl * no, (inner,), exact=False)
    stacked, whole = _chunked()
    pools = (Pool.trusted(stacked, shape, chunks, flat), Pool.trusted(whole, shape, arrays, tensors))
    src, dst = _checked(pools if to_operational else pools[::-1])
    if how == "kernel":
        _launch(src, dst, stream)
        return
    handle = _core.stream_handle(stream) if stream is not None else current_stream(src)
    size = inner * shape.itemsize
    mode = 2 if how == "batch" else 1
    _core.memcpy_batch(_pieces(dst, size), _pieces(src, size), size, mode, int(src.device.partition(":")[2]), handle)


def _require_empty(blocks: Any, name: str) -> None:
    if not isinstance(blocks, Sequence) or len(blocks):
        got = len(blocks) if isinstance(blocks, Sequence) else f"a {type(blocks).__name__}"
        raise BindError(f"blocks: expected 0 lists, as {name} is empty, got {got}")


def _checked(pools: tuple[Pool, Pool]) -> tuple[Pool, Pool]:
    """Source and destination that fit each other and share no byte."""
    src, dst = pools
    require_compatible(src, dst)
    require_disjoint(src, dst)
    dst.require_distinct()
    return src, dst


def _pieces(pool: Pool, size: int) -> npt.NDArray[np.uint64]:
    """Addresses of all chunks of `size` bytes, in table order."""
    inside = np.arange(pool.resolved.first.nbytes // size, dtype=np.uint64) * np.uint64(size)
    return (pool.addresses[:, None] + inside).reshape(-1)


def _launch(src: Pool, dst: Pool, stream: Any) -> None:
    made = plan(src.layout, dst.layout, src.shape, num_blocks=(src.num_blocks, dst.num_blocks))
    # These lists live for one call: their addresses travel with the launch instead of being uploaded and kept.
    src_table, dst_table = (_core.Table(pool.addresses, upload=False) for pool in (src, dst))
    run(prepare(made, src.alignment, dst.alignment), src_table, dst_table, None, None, src.num_blocks, src, stream)
