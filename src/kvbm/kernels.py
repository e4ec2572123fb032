"""Stacked blocks, universal and operational tensors: lists of CUDA tensors in, one launch out.

The thin face for callers that hold tensors rather than pools; the names and shapes are those of Dynamo's KVBM.  An
engine that copies again and again binds its memory once with `kvbm.Pool` and calls `kvbm.convert`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

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
    stacked = _stacked(layout)
    whole = _tensors(universals, "universals", 5)
    if whole:
        _permute(stacked, blocks, whole, stream, to_universal=True)


def universal_to_block(universals: Any, blocks: Any, layout: str = "NHD", *, stream: Any = None) -> None:
    """Scatter universal tensors into stacked blocks; the parameters are those of `block_to_universal`."""
    stacked = _stacked(layout)
    whole = _tensors(universals, "universals", 5)
    if whole:
        _permute(stacked, blocks, whole, stream, to_universal=False)


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
    chosen = _backend(backend)
    whole = _tensors(operationals, "operationals", 3)
    if whole:
        _copy_chunks(blocks, whole, chosen, stream, to_operational=True)


def operational_to_block(operationals: Any, blocks: Any, backend: str | None = None, *, stream: Any = None) -> None:
    """Scatter operational tensors into stacked blocks; the parameters are those of `block_to_operational`."""
    chosen = _backend(backend)
    whole = _tensors(operationals, "operationals", 3)
    if whole:
        _copy_chunks(blocks, whole, chosen, stream, to_operational=False)


# ---- arguments -----------------------------------------------------------------------------------------------------


def _stacked(layout: str) -> Layout:
    name = layout.lower() if isinstance(layout, str) else layout
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
    name = "auto" if backend is None else backend.strip().lower() if isinstance(backend, str) else backend
    if name not in _BACKENDS:
        raise BindError(f"backend: expected 'auto', 'kernel', 'batch' or 'async', got {backend!r}")
    return _BACKENDS[name]


def _tensors(tensors: Any, name: str, rank: int) -> list[tuple[Any, Array]]:
    """The whole tensors of a batch, described; all of one shape of this rank, contiguous and on CUDA."""
    if not isinstance(tensors, Sequence):
        found = describe(tensors, name)
        if len(found.shape) == rank + 1:
            tensors = [tensors[i] for i in range(found.shape[0])]
        else:
            tensors = [tensors]
    described = [(tensor, _described(tensor, f"{name}[{index}]")) for index, tensor in enumerate(tensors)]
    for index, (_, array) in enumerate(described):
        if len(array.shape) != rank:
            raise BindError(f"{name}[{index}]: expected {rank} axes, got shape {array.shape}")
        if array.shape != described[0][1].shape:
            raise BindError(f"{name}[{index}]: expected shape {described[0][1].shape} as {name}[0], got {array.shape}")
    return described


def _described(tensor: Any, what: str) -> Array:
    array = describe(tensor, what)
    if array.device == "cpu":
        raise BindError(f"{what}: expected a CUDA tensor, got one on the CPU; use kvbm.Pool and kvbm.convert for the CPU")
    held = ITEMSIZE.get(array.dtype)
    if held is None:
        raise DTypeError(f"{what}: expected one of {', '.join(ITEMSIZE)}, got {array.dtype}")
    for extent, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if extent > 1 and stride != held:
            raise BindError(f"{what}: expected a contiguous tensor, got strides of {array.strides} bytes; call .contiguous()")
        held *= extent
    return array


def _chunks(blocks: Any, batch: int, chunks: int) -> list[Any]:
    """``[nb][nl*no]`` chunks as one list in table order."""
    if not isinstance(blocks, Sequence):
        raise BindError(f"blocks: expected {batch} lists of {chunks} tensors, got a {type(blocks).__name__}")
    if batch == 1 and len(blocks) == chunks and not (blocks and isinstance(blocks[0], Sequence)):
        blocks = [blocks]
    if len(blocks) != batch:
        raise BindError(f"blocks: expected {batch} lists, one a block, got {len(blocks)}")
    flat: list[Any] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, Sequence) or len(block) != chunks:
            got = f"{len(block)}" if isinstance(block, Sequence) else f"a {type(block).__name__}"
            raise BindError(f"blocks[{index}]: expected {chunks} tensors (nl*no), got {got}")
        flat.extend(block)
    return flat


def _require_elements(arrays: Sequence[Array], chunks: int, expected: tuple[int, ...], exact: bool) -> None:
    count = int(np.prod(expected))
    for index, array in enumerate(arrays):
        if array.shape != expected if exact else int(np.prod(array.shape)) != count:
            what = f"shape {expected}" if exact else f"{count} elements"
            raise BindError(f"blocks[{index // chunks}][{index % chunks}]: expected {what}, got shape {array.shape}")


# ---- copies --------------------------------------------------------------------------------------------------------


def _pools(
    stacked: Layout, whole: Layout, shape: BlockShape, chunks: list[Any], arrays: list[Array], tensors: list[tuple[Any, Array]]
) -> tuple[Pool, Pool]:
    both = (
        Pool.trusted(stacked, shape, arrays, chunks),
        Pool.trusted(whole, shape, [array for _, array in tensors], [tensor for tensor, _ in tensors]),
    )
    require_compatible(*both)
    return both


def _permute(stacked: Layout, blocks: Any, tensors: list[tuple[Any, Array]], stream: Any, *, to_universal: bool) -> None:
    nh, nl, no, nt, hd = tensors[0][1].shape
    shape = BlockShape(nl, no, nh, nt, hd, tensors[0][1].dtype)
    chunks = _chunks(blocks, len(tensors), nl * no)
    arrays = [_described(chunk, f"blocks[{i // (nl * no)}][{i % (nl * no)}]") for i, chunk in enumerate(chunks)]
    _require_elements(arrays, nl * no, (nt, nh, hd) if stacked.name == "nhd" else (nh, nt, hd), exact=True)
    pools = _pools(stacked, _shipped("universal"), shape, chunks, arrays, tensors)
    _launch(*(pools if to_universal else pools[::-1]), stream)


def _copy_chunks(blocks: Any, tensors: list[tuple[Any, Array]], backend: str, stream: Any, *, to_operational: bool) -> None:
    nl, no, inner = tensors[0][1].shape
    shape = BlockShape(nl, no, 1, 1, inner, tensors[0][1].dtype)
    chunks = _chunks(blocks, len(tensors), nl * no)
    arrays = [_described(chunk, f"blocks[{i // (nl * no)}][{i % (nl * no)}]") for i, chunk in enumerate(chunks)]
    _require_elements(arrays, nl * no, (inner,), exact=False)
    pools = _pools(*_chunked(), shape, chunks, arrays, tensors)
    if backend == "kernel":
        _launch(*(pools if to_operational else pools[::-1]), stream)
        return
    require_disjoint(*pools)
    size = inner * shape.itemsize
    steps = np.arange(nl * no, dtype=np.uint64) * np.uint64(size)
    inside = (pools[1].addresses[:, None] + steps[None, :]).reshape(-1)
    src, dst = (pools[0].addresses, inside) if to_operational else (inside, pools[0].addresses)
    handle = _core.stream_handle(stream) if stream is not None else current_stream(pools[0])
    _core.memcpy_batch(dst, src, size, 2 if backend == "batch" else 1, int(pools[0].device.partition(":")[2]), handle)


def _launch(src: Pool, dst: Pool, stream: Any) -> None:
    require_disjoint(src, dst)
    made = plan(src.layout, dst.layout, src.shape, num_blocks=(src.num_blocks, dst.num_blocks))
    # These lists live for one call: their addresses travel with the launch instead of being uploaded and kept.
    tables = (_core.Table(pool.addresses, upload=False) for pool in (src, dst))
    run(prepare(made, src.alignment, dst.alignment), *tables, None, None, src.num_blocks, src, stream)
