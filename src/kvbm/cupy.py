"""kvbm for CuPy arrays, on their GPU and in the order of CuPy's current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cupy

from . import _bridge, _core
from .memory.allocation import bits_of
from .memory.array_checks import Kind
from .memory.array_info import numpy_dtype, span
from .pool.pool import Pool

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: Any) -> Any:
    dtype = numpy_dtype(kind.dtype) if kind.dtype else like.dtype
    with like.device:
        memory = cupy.cuda.alloc(max(span(kind.shape, kind.strides, kind.itemsize), 1))
        return cupy.ndarray(kind.shape, dtype, memory, strides=kind.strides)


@contextlib.contextmanager
def _fenced(stream: Any, like: Any) -> Iterator[Any]:
    """Make a given stream wait for CuPy's current one, and the current one wait for it afterwards.

    CuPy's memory pool allocates and frees only in the order of the current stream.
    """
    if stream is None:
        yield None
        return
    with like.device:
        current, side = cupy.cuda.get_current_stream(), cupy.cuda.ExternalStream(_core.stream_handle(stream))
        side.wait_event(current.record())
        try:
            yield stream
        finally:
            current.wait_event(side.record())


_BRIDGE = _bridge.Bridge(
    "cupy", "a cupy.ndarray", lambda array: isinstance(array, cupy.ndarray), "cupy.ascontiguousarray", _empty,
    ordered=_fenced,
)  # fmt: skip
convert, convert_ = _BRIDGE.convert, _BRIDGE.convert_


def arrays(pool: Pool) -> list[Any]:
    """A GPU pool's arrays as CuPy arrays on the same memory, with ml_dtypes for bfloat16 and fp8.  Keep the pool open."""
    found = _bridge.views(pool, "cupy", "use kvbm.numpy.arrays", on_gpu=True)
    with cupy.cuda.Device(int(pool.device.partition(":")[2])):
        return [cupy.asarray(bits_of(array)).view(numpy_dtype(dtype)) for array, dtype in found]
