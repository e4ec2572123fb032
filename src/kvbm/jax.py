"""kvbm for JAX arrays.  Sources are read in place, results are new arrays; both use DLPack.

JAX arrays cannot be changed, so there is no function that writes into existing arrays.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _bridge
from .errors import BindError
from .layout.layout import Layout
from .layout.resolved import Allocation
from .layout.shapes import BlockShape
from .memory.allocation import Arrays, DeviceArray, DeviceMemory
from .memory.array_checks import Kind
from .memory.array_info import Array, dense, describe, numpy_dtype, of_view
from .planner.cast import Cast

__all__ = ["convert"]


class _Memory(NamedTuple):
    """Memory that becomes a JAX array after it was written."""

    memory: Any  # a NumPy array, or a GPU array of kvbm, with the dtype or integers of its width
    dtype: np.dtype[Any]


def convert(
    arrays: Any, src: str | Path | Layout, dst: str | Path | Layout, shape: str | BlockShape, *, cast: Cast = None
) -> list[Any]:
    """Convert blocks from one layout into new JAX arrays of another.

    Parameters
    ----------
    arrays : sequence of jax.Array
        As for `kvbm.numpy.convert`; each on one device.  They are read in place.
    src, dst, shape, cast
        As for `kvbm.numpy.convert`.

    Returns
    -------
    list of jax.Array
        New arrays on the device of the inputs, with dtypes as those of `kvbm.numpy.convert`.  JAX gives no access to its streams,
        so on a GPU the call waits for the copy.

    Raises
    ------
    BindError, DTypeError, LayoutError, PlanError, SpecError
        As `kvbm.numpy.convert`; also if an array is distributed over several devices, a value is traced by `jax.jit`, or the
        destination has a pitch, as JAX arrays have no strides.

    Examples
    --------
    >>> import jax.numpy as jnp, kvbm.jax
    >>> layers = [jnp.zeros((2, 6, 16, 4, 8)) for _ in range(3)]
    >>> blocks = kvbm.jax.convert(layers, "vllm/flash_attn_nhd", "universal", "nl=3,no=2,nh=4,nt=16,hd=8")
    >>> len(blocks), blocks[0].shape, str(blocks[0].dtype)
    (6, (4, 3, 2, 16, 8), 'float32')
    """
    given = list(arrays) if isinstance(arrays, list | tuple | Arrays) else [arrays]
    stream = next((_stream(array) for array in given if _is_on_gpu(array)), None)
    made = _BRIDGE.convert(given, src, dst, shape, stream=stream, cast=cast)
    if stream is not None:
        stream.sync()
    return [_published(one) for one in made]


def _is_on_gpu(array: Any) -> bool:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return False
    return any(device.platform in ("gpu", "cuda") for device in array.devices())


def _stream(array: Any) -> Any:
    return _stream_of_device(int(array.__dlpack_device__()[1]))


@functools.cache
def _stream_of_device(index: int) -> Any:
    """A stream of this bridge, as JAX gives no access to its own.  The caller's current device does not change."""
    from cuda.bindings import driver
    from cuda.core import Device

    device = Device(index)
    _, before = driver.cuCtxGetCurrent()
    device.set_current()
    try:
        return device.create_stream()
    finally:
        driver.cuCtxSetCurrent(before)


def _look(array: Any, what: str) -> Array:
    if isinstance(array, _Memory):
        return describe(array.memory, what)._replace(dtype=array.dtype.name)
    if isinstance(array, jax.core.Tracer):
        raise BindError(f"{what} is traced by jax.jit, and has no memory; call kvbm.jax.convert outside of jit")
    devices = array.devices()
    if len(devices) != 1:
        raise BindError(f"{what} is spread over {len(devices)} devices; expected one: convert shard.data of its addressable_shards")
    (device,) = devices
    if device.platform == "cpu":
        view = np.asarray(array)  # it waits for the value, as every use on the CPU does
        return describe(view, what)._replace(owner=view)
    if device.platform not in ("gpu", "cuda"):
        raise BindError(f"{what} is on {device}; expected memory of the CPU or of a CUDA GPU: use jax.device_put")
    from cuda.core.utils import StridedMemoryView

    # DLPack makes our stream wait for the work that computes the array; the host does not wait.
    view = StridedMemoryView.from_dlpack(array, stream_ptr=int(_stream(array).handle))
    return of_view(view, array.dtype.name, array.itemsize, view.device_id, readonly=True)


def _empty(kind: Kind, like: Any) -> _Memory:
    dtype = numpy_dtype(kind.dtype or like.dtype.name)
    if kind.strides != dense(kind.shape, dtype.itemsize):
        raise BindError(f"the layout's pitch has strides of {kind.strides} bytes, and JAX's arrays have no strides")
    # NumPy's DLPack has no bfloat16 and no fp8: pass their bits as integers.
    bits = dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
    nbytes = int(np.prod(kind.shape)) * dtype.itemsize
    if _is_on_gpu(like) and nbytes:
        index = int(like.__dlpack_device__()[1])
        return _Memory(
            DeviceArray(
                DeviceMemory(index, nbytes), Allocation("", kind.axes, kind.shape, kind.strides, nbytes, bits.name)
            ),
            dtype,
        )
    raw = np.empty(nbytes + 64, np.uint8)  # JAX uses memory without a copy if it is aligned to 64 bytes
    start = -raw.ctypes.data % 64
    return _Memory(raw[start : start + nbytes].view(bits).reshape(kind.shape), dtype)


def _published(one: _Memory) -> Any:
    memory = one.memory
    if isinstance(memory, DeviceArray):
        from cuda.core.utils import StridedMemoryView

        memory = StridedMemoryView.from_cuda_array_interface(memory, stream_ptr=-1)
    elif memory.dtype != one.dtype:
        # Do not use DLPack and .view() here: JAX 0.10 then aborts the process at exit in one of ten runs.
        return jax.device_put(memory.view(one.dtype), jax.devices("cpu")[0])
    return _as_dtype(jax.dlpack.from_dlpack(memory), one.dtype)


def _as_dtype(array: Any, dtype: np.dtype[Any]) -> Any:
    return array if array.dtype == dtype else array.view(dtype)


_BRIDGE = _bridge.Bridge(
    "jax", "a jax.Array", lambda array: isinstance(array, jax.Array | _Memory), "jax.numpy.array(x, copy=True)", _empty,
    _look,
)  # fmt: skip
