"""kvbm for NumPy arrays, those of ml_dtypes included: blocks of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import bridge
from .arrays import empty, numpy_dtype
from .contract import Kind
from .pool import Pool
from .shapes import BlockShape

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return empty(kind.shape, numpy_dtype(kind.dtype, rich=True) if kind.dtype else like.dtype, kind.strides)


_BRIDGE = bridge.Bridge(
    "numpy", "a numpy.ndarray", lambda array: isinstance(array, np.ndarray), "numpy.ascontiguousarray", _empty
)


def convert(arrays: Any, src: str = "nhd", dst: str = "universal", shape: str | BlockShape = "") -> list[Any]:
    """Convert blocks from one layout into new arrays of another.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        One an allocation of the source's layout, in table order, each shaped as its order says.  dtypes of ml_dtypes
        (bfloat16, float8_e4m3fn, float8_e5m2) are taken as they are.
    src, dst : str
        Layouts, by name or by the path of a YAML file.
    shape : str or BlockShape
        As `kvbm.load_shape` reads it.  Sizes without a dtype take the arrays'.

    Returns
    -------
    list of numpy.ndarray
        One an allocation of the destination's layout, of the inputs' dtype, or of its plane's where a layout has several.

    Raises
    ------
    BindError, DTypeError
        Arrays that do not fit: the sentence names the input and the remedy.
    LayoutError, PlanError, SpecError
        There is no copy between the two layouts, or no such layout or shape.

    Examples
    --------
    >>> import numpy as np, kvbm.numpy
    >>> layers = [np.zeros((2, 6, 16, 4, 8), "float32") for _ in range(3)]  # [l] o b t h d
    >>> blocks = kvbm.numpy.convert(layers, "vllm/flash_attn_nhd", "universal", "nl=3,no=2,nh=4,nt=16,hd=8")
    >>> len(blocks), blocks[0].shape  # [b] h l o t d
    (6, (4, 3, 2, 16, 8))
    """
    return _BRIDGE.convert(arrays, src, dst, shape)


def convert_(
    arrays: Any,
    out: Any,
    src: str = "nhd",
    dst: str = "universal",
    shape: str | BlockShape = "",
    src_ids: Any = None,
    dst_ids: Any = None,
) -> None:
    """Convert blocks into arrays that are there already; ids are those of `kvbm.convert`.

    Raises
    ------
    BindError, DTypeError, LayoutError, PlanError, SpecError
        As `convert`; a destination that is read-only.  Nothing was written.
    """
    _BRIDGE.convert_(arrays, out, src, dst, shape, src_ids, dst_ids)


def arrays(pool: Pool) -> list[npt.NDArray[Any]]:
    """A pool's arrays as NumPy's on the same memory, bfloat16 and fp8 by ml_dtypes.  Keep the pool open."""
    found = bridge.views(pool, "numpy", "NumPy reaches no GPU", on_gpu=False)
    return [numpy_view(array, dtype) for array, dtype in found]


def numpy_view(array: Any, dtype: str) -> npt.NDArray[Any]:
    """An array of the CPU as NumPy's, of a dtype by its name."""
    if hasattr(array, "untyped_storage"):  # torch, whose bfloat16 and fp8 NumPy does not know
        import torch

        array = array.detach().view(getattr(torch, f"uint{8 * array.element_size()}")).numpy()
    found: npt.NDArray[Any] = np.asarray(array)
    return found.view(numpy_dtype(dtype, rich=True))
