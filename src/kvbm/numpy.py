"""kvbm for NumPy arrays on the CPU, including the dtypes of ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _bridge
from .memory.array_checks import Kind
from .memory.array_info import PackedArray, as_packed, empty, numpy_dtype, span
from .pool.pool import Pool

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if kind.dtype:
        return empty(kind.shape, kind.dtype, kind.strides)
    memory = np.empty(span(kind.shape, kind.strides, kind.itemsize), np.uint8)
    made: npt.NDArray[Any] = np.ndarray(kind.shape, like.dtype, memory, strides=kind.strides)
    return made.view(PackedArray) if isinstance(like, PackedArray) else made


_BRIDGE = _bridge.Bridge(
    "numpy", "a numpy.ndarray", lambda array: isinstance(array, np.ndarray), "numpy.ascontiguousarray", _empty
)
convert, convert_ = _BRIDGE.convert, _BRIDGE.convert_


def arrays(pool: Pool) -> list[npt.NDArray[Any]]:
    """A pool's arrays as NumPy arrays on the same memory, with ml_dtypes for bfloat16 and fp8.  Keep the pool open."""
    found = _bridge.views(pool, "numpy", "NumPy has no GPU arrays", on_gpu=False)
    return [numpy_view(array, dtype) for array, dtype in found]


def numpy_view(array: Any, dtype: str) -> npt.NDArray[Any]:
    """An array on the CPU as a NumPy array, with the dtype of the given name."""
    if hasattr(array, "untyped_storage"):  # torch, whose bfloat16 and fp8 NumPy does not know
        import torch

        array = array.detach().view(getattr(torch, f"uint{8 * array.element_size()}")).numpy()
    found: npt.NDArray[Any] = np.asarray(array)
    return as_packed(found.view(numpy_dtype(dtype)), dtype)
