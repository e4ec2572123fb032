"""kvbm for CuPy arrays: on their GPU, in the order of CuPy's current stream."""

from __future__ import annotations

from typing import Any

import cupy

from . import arrays as _arrays
from .contract import Kind
from .errors import BindError
from .numpy import numpy_dtype
from .pool import Pool
from .shapes import BlockShape

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: Any) -> Any:
    nbytes = kind.itemsize + sum((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True))
    dtype = numpy_dtype(kind.dtype) if kind.dtype else like.dtype
    with like.device:
        return cupy.ndarray(kind.shape, dtype, cupy.cuda.alloc(max(nbytes, 1)), strides=kind.strides)


_BRIDGE = _arrays.Bridge(
    "cupy", "a cupy.ndarray", lambda array: isinstance(array, cupy.ndarray), "cupy.ascontiguousarray", _empty
)


def convert(
    arrays: Any, src: str = "nhd", dst: str = "universal", shape: str | BlockShape = "", *, stream: Any = None
) -> list[Any]:
    """Convert blocks from one layout into new CuPy arrays of another, on CuPy's current stream or the one named.

    The parameters and errors are those of `kvbm.numpy.convert`.

    Examples
    --------
    >>> blocks = kvbm.cupy.convert(layers, "vllm/flash_attn_nhd", "universal", "llama-3.1-8b")  # doctest: +SKIP
    """
    return _arrays.convert(_BRIDGE, arrays, src, dst, shape, stream)


def convert_(
    arrays: Any,
    out: Any,
    src: str = "nhd",
    dst: str = "universal",
    shape: str | BlockShape = "",
    src_ids: Any = None,
    dst_ids: Any = None,
    *,
    stream: Any = None,
) -> None:
    """Convert blocks into CuPy arrays that are there already; ids are those of `kvbm.convert`, on the GPU too."""
    _arrays.convert_(_BRIDGE, arrays, out, src, dst, shape, (src_ids, dst_ids), stream)


def arrays(pool: Pool) -> list[Any]:
    """A GPU pool's arrays as CuPy's on the same memory, bfloat16 and fp8 by ml_dtypes.  Keep the pool open."""
    pool.require_open()
    if pool.device == "cpu":
        raise BindError("cupy.arrays: the pool is on cpu; expected one on a GPU: use kvbm.numpy.arrays")
    kinds = [numpy_dtype(pool.resolved.kinds[kind].dtype) for kind in pool.resolved.kind_of_entry]
    with cupy.cuda.Device(int(pool.device.partition(":")[2])):
        return [cupy.asarray(array).view(kind) for array, kind in zip(pool.arrays, kinds, strict=True)]
