"""kvbm for NumPy arrays, those of ml_dtypes included: blocks of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays as _arrays
from .contract import Kind
from .errors import BindError
from .pool import Pool
from .shapes import PACKED, BlockShape

__all__ = ["arrays", "convert", "convert_"]


def _empty(kind: Kind, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    nbytes = kind.itemsize + sum((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True))
    dtype = numpy_dtype(kind.dtype) if kind.dtype else like.dtype
    return np.ndarray(kind.shape, dtype, np.empty(max(nbytes, 0), np.uint8), strides=kind.strides)


_BRIDGE = _arrays.Bridge(
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
    return _arrays.convert(_BRIDGE, arrays, src, dst, shape)


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
    _arrays.convert_(_BRIDGE, arrays, out, src, dst, shape, (src_ids, dst_ids))


def arrays(pool: Pool) -> list[npt.NDArray[Any]]:
    """A pool's arrays as NumPy's on the same memory, bfloat16 and fp8 by ml_dtypes.  Keep the pool open."""
    pool.require_open()
    if pool.device != "cpu":
        raise BindError(f"numpy.arrays: the pool is on {pool.device}; expected one on the CPU: NumPy reaches no GPU")
    kinds = [pool.resolved.kinds[kind].dtype for kind in pool.resolved.kind_of_entry]
    return [numpy_view(array, kind) for array, kind in zip(pool.arrays, kinds, strict=True)]


def numpy_view(array: Any, dtype: str) -> npt.NDArray[Any]:
    """An array of the CPU as NumPy's, of a dtype by its name."""
    if hasattr(array, "untyped_storage"):  # torch, whose bfloat16 and fp8 NumPy does not know
        import torch

        array = array.detach().view(getattr(torch, f"uint{8 * array.element_size()}")).numpy()
    found: npt.NDArray[Any] = np.asarray(array)
    return found.view(numpy_dtype(dtype))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name, with those of ml_dtypes; bytes where elements share one, as those of ml_dtypes do not."""
    import ml_dtypes

    return np.dtype("uint8" if name in PACKED else getattr(ml_dtypes, name, name))
