"""kvbm for Numba's device arrays, on their GPU and in the order of Numba's default stream or of a given stream.

Numba has no bfloat16 and no fp8: arrays of uint16 and uint8 hold their bits.  On the CPU Numba uses NumPy arrays: use
`kvbm.numpy`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from numba import cuda

from . import _bridge
from .memory.allocation import bits_of
from .memory.array_checks import Kind
from .memory.array_info import bits_dtype
from .pool.pool import Pool

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: Any) -> Any:
    return cuda.device_array(kind.shape, bits_dtype(kind.dtype) if kind.dtype else like.dtype, kind.strides)


def _stream(stream: Any, _: Any) -> AbstractContextManager[Any]:
    """The given stream, else Numba's default stream."""
    if stream is None or hasattr(type(stream), "__cuda_stream__") or isinstance(stream, int):
        return nullcontext(0 if stream is None else stream)
    handle = getattr(stream, "handle", stream)  # Numba before numba-cuda 0.21
    return nullcontext(int(getattr(handle, "value", handle) or 0))


_BRIDGE = _bridge.Bridge(
    "numba", "a numba.cuda device array", lambda array: cuda.is_cuda_array(array) and hasattr(array, "copy_to_host"),
    "numba.cuda.to_device(numpy.ascontiguousarray(x.copy_to_host()))", _empty, ordered=_stream,
)  # fmt: skip
convert, convert_ = _BRIDGE.convert, _BRIDGE.convert_


def arrays(pool: Pool) -> list[Any]:
    """A GPU pool's arrays as Numba arrays on the same memory; bfloat16 and fp8 as unsigned integers.  Keep the pool open."""
    found = _bridge.views(pool, "numba", "on the CPU Numba uses NumPy arrays", on_gpu=True)
    return [cuda.as_cuda_array(bits_of(array)) for array, _ in found]
