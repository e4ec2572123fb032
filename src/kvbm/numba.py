"""kvbm for Numba's device arrays: on their GPU, in the order of Numba's default stream unless one is named.

Numba has no bfloat16 and no fp8: arrays of uint16 and uint8 hold their bits.  On the CPU Numba works on NumPy's arrays, so
`kvbm.numpy` is for those.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from . import arrays as _arrays
from .contract import Kind
from .errors import BindError
from .pool import Pool
from .shapes import BlockShape, numpy_name

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: Any) -> Any:
    return cuda.device_array(kind.shape, numpy_name(kind.dtype) if kind.dtype else like.dtype, kind.strides)


_BRIDGE = _arrays.Bridge(
    "numba",
    "a numba.cuda device array",
    lambda array: cuda.is_cuda_array(array) and hasattr(array, "copy_to_host"),
    "numba.cuda.to_device(numpy.ascontiguousarray(x.copy_to_host()))",
    _empty,
)


def _stream(stream: Any) -> Any:
    """The stream that is named, else the default one, where Numba's own work goes."""
    if stream is None:
        return 0
    if hasattr(type(stream), "__cuda_stream__") or isinstance(stream, int):
        return stream
    handle = getattr(stream, "handle", stream)  # Numba before numba-cuda 0.21
    return int(getattr(handle, "value", handle) or 0)


def convert(
    arrays: Any, src: str = "nhd", dst: str = "universal", shape: str | BlockShape = "", *, stream: Any = None
) -> list[Any]:
    """Convert blocks from one layout into new device arrays of another.

    The parameters and errors are those of `kvbm.numpy.convert`.

    Examples
    --------
    >>> blocks = kvbm.numba.convert(layers, "vllm/flash_attn_nhd", "universal", "llama-3.1-8b")  # doctest: +SKIP
    """
    return _arrays.convert(_BRIDGE, arrays, src, dst, shape, _stream(stream))


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
    """Convert blocks into device arrays that are there already; ids are those of `kvbm.convert`, on the GPU too."""
    _arrays.convert_(_BRIDGE, arrays, out, src, dst, shape, (src_ids, dst_ids), _stream(stream))


def arrays(pool: Pool) -> list[Any]:
    """A GPU pool's arrays as Numba's on the same memory; bfloat16 and fp8 as unsigned integers.  Keep the pool open."""
    pool.require_open()
    if pool.device == "cpu":
        raise BindError("numba.arrays: the pool is on cpu; expected one on a GPU: Numba takes NumPy's arrays there")
    return [cuda.as_cuda_array(array) for array in pool.arrays]
