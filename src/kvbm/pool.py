"""Pools: a layout bound to memory, with everything checked that could make a copy silently wrong."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import BindError, DTypeError
from .layout import Allocation, Layout, Resolved
from .shapes import BlockShape

__all__ = ["Array", "Pool", "as_ids", "describe"]

#: dtypes that NumPy does not have: arrays of integers (or of raw bytes) of the same width stand in for them.
_STAND_INS = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_PLAIN = {1: ("uint8", "int8", "void8"), 2: ("uint16", "int16", "void16")}


class Array(NamedTuple):
    """What kvbm needs to know of an array: address, elements along each axis, bytes between neighbours, dtype, device."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    readonly: bool


def describe(array: Any, what: str = "array") -> Array:
    """Look at an array without touching its memory.

    Parameters
    ----------
    array : torch.Tensor, numpy.ndarray, or anything with ``__cuda_array_interface__`` or ``__dlpack__``
        torch is not imported for it.
    what : str
        What errors call it.

    Raises
    ------
    BindError
        It is none of these, or lies on a device that is neither the CPU nor a CUDA GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        device = array.device
        if device.type not in ("cpu", "cuda"):
            raise BindError(f"{what}: expected a CPU or CUDA tensor, got one on {device}")
        size = array.element_size()
        return Array(
            array.data_ptr(),
            tuple(array.shape),
            tuple(stride * size for stride in array.stride()),
            str(array.dtype).removeprefix("torch."),
            "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
            False,
        )
    if isinstance(array, np.ndarray):
        return _numpy(array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _cuda_array(array, interface)
    if hasattr(array, "__dlpack__"):
        return _dlpack(array, what)
    raise BindError(
        f"{what}: expected a torch tensor, a NumPy array, or an object with __cuda_array_interface__ or __dlpack__, "
        f"got {type(array).__name__}"
    )


def _numpy(array: npt.NDArray[Any]) -> Array:
    return Array(array.ctypes.data, array.shape, array.strides, array.dtype.name, "cpu", not array.flags.writeable)


def _cuda_array(array: Any, interface: dict[str, Any]) -> Array:
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    address, readonly = interface["data"]
    strides = interface.get("strides") or _dense(shape, dtype.itemsize)
    device = getattr(array, "device", None)
    index = getattr(device, "id", device if isinstance(device, int) else None)
    if index is None:
        from . import _core

        index = max(_core.pointer_device(address), 0)
    # Users of the interface that have richer dtypes say so (CuPy with ml_dtypes).
    name = getattr(getattr(array, "dtype", None), "name", None) or dtype.name
    return Array(address, shape, tuple(strides), str(name), f"cuda:{index}", bool(readonly))


def _dlpack(array: Any, what: str) -> Array:
    kind, index = array.__dlpack_device__()
    if int(kind) in (1, 3):  # kDLCPU, kDLCUDAHost
        try:
            return _numpy(np.from_dlpack(array))
        except (BufferError, RuntimeError, TypeError) as error:
            raise BindError(f"{what}: NumPy cannot view this {type(array).__name__} through DLPack: {error}") from None
    if int(kind) != 2:  # kDLCUDA
        raise BindError(f"{what}: expected memory of the CPU or of a CUDA GPU, got DLPack device type {int(kind)}")
    from cuda.core.utils import StridedMemoryView

    try:
        # stream_ptr=-1: no synchronisation here; the copy runs in the order of the stream that the caller names.
        view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
        dtype = view.dtype
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise BindError(
            f"{what}: cuda.core cannot view this {type(array).__name__} through DLPack: {error}; pass its bits as integers of "
            "the same width, or a torch tensor"
        ) from None
    shape = tuple(view.shape)
    strides = tuple(s * dtype.itemsize for s in view.strides) if view.strides else _dense(shape, dtype.itemsize)
    return Array(view.ptr, shape, strides, dtype.name, f"cuda:{index}", bool(view.readonly))


def _dense(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, held = [], itemsize
    for extent in reversed(shape):
        strides.append(held)
        held *= extent
    return tuple(reversed(strides))


def _same_strides(array: Array, strides: Sequence[int]) -> bool:
    """Strides of axes of one element are never stepped."""
    return all(a == b for n, a, b in zip(array.shape, array.strides, strides, strict=True) if n > 1)


def same_dtype(found: str, wanted: str) -> bool:
    """Whether an array of dtype `found` holds elements of dtype `wanted`: equal, or a stand-in of the same width."""
    return found == wanted or found in _PLAIN.get(_STAND_INS.get(wanted, 0), ())


class Pool:
    """A layout bound to memory.

    Parameters
    ----------
    layout : Layout
        Where things lie.  It is declared, never guessed from the arrays.
    shape : BlockShape
        Sizes and dtype of a block.
    tensors : sequence of arrays
        One an allocation, in table order, each shaped as its order says: ``[l] o b t h d`` takes ``nl`` arrays of shape
        ``(no, nb, nt, nh, hd)``.  One array may be given as it is where there is one allocation.

    Attributes
    ----------
    num_blocks : int
        Blocks it holds; block ids are ``0 … num_blocks - 1``.
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    arrays : tuple
        The arrays, kept alive as long as the pool.
    addresses : numpy.ndarray of uint64
        Their addresses, in table order.
    nbytes : int
        Bytes that they span.

    Raises
    ------
    BindError
        Wrong count, rank, shape or strides (the axis that differs is named), arrays that overlap, a mix of devices.
    DTypeError
        Not the dtype of `shape`, or a mix.

    Examples
    --------
    >>> import numpy as np
    >>> shape = BlockShape(nl=2, no=2, nh=4, nt=16, hd=8, dtype="float32")
    >>> Pool(load("universal"), shape, [np.zeros((4, 2, 2, 16, 8), "float32")] * 1).num_blocks
    1
    """

    def __init__(self, layout: Layout, shape: BlockShape, tensors: Any) -> None:
        arrays = tuple(tensors) if isinstance(tensors, list | tuple) else (tensors,)
        found = [describe(array, f"{layout.name}: array {index}") for index, array in enumerate(arrays)]
        self._bind(layout, shape, found, arrays)
        check_arrays(self.resolved, found)
        self.require_distinct()

    @classmethod
    def trusted(cls, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: Sequence[Any]) -> Pool:
        """A pool of arrays whose shapes the caller has checked (`kernels` takes chunks of any rank)."""
        pool = cls.__new__(cls)
        pool._bind(layout, shape, found, tuple(arrays))
        return pool

    def _bind(self, layout: Layout, shape: BlockShape, found: Sequence[Array], arrays: tuple[Any, ...]) -> None:
        if not found:
            raise BindError(f"{layout.name}: expected at least one array, got none")
        self.layout = layout
        self.shape = shape
        self.arrays = arrays
        self.num_blocks = _count_blocks(layout, shape, found)
        self.resolved: Resolved = layout.resolve(shape, self.num_blocks)
        if len(found) != self.resolved.table_size:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected {self.resolved.table_size} arrays, one an allocation in table "
                f"order, got {len(found)}"
            )
        self.device = found[0].device
        self.readonly = any(array.readonly for array in found)
        check_alike(layout.name, shape, found)
        self.addresses: npt.NDArray[np.uint64] = np.array([array.address for array in found], np.uint64)
        self._spans: npt.NDArray[np.uint64] | None = None
        self._table: Any = None

    @classmethod
    def allocate(cls, layout: Layout, shape: BlockShape, num_blocks: int, device: str = "cpu") -> Pool:
        """A pool on memory of its own, not initialised.

        Parameters
        ----------
        layout, shape
            As for `Pool`.
        num_blocks : int
            Blocks that it holds.
        device : str
            ``"cpu"`` (NumPy arrays) or ``"cuda:N"`` (objects with ``__cuda_array_interface__``).

        Raises
        ------
        CudaError, CudaUnavailableError
            The GPU's memory does not suffice; no GPU.
        BindError
            Another device.
        """
        resolved = layout.resolve(shape, num_blocks)
        kind, _, index = device.partition(":")
        if kind not in ("cpu", "cuda") or (kind == "cpu" and index) or (index and not index.isdecimal()):
            raise BindError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}")
        if kind == "cpu":
            return cls(layout, shape, [_empty(allocation, shape) for allocation in resolved.allocations])
        arrays = [DeviceArray(int(index or 0), allocation, _numpy_dtype(shape)) for allocation in resolved.allocations]
        return cls(layout, shape, arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations, padding included."""
        return self.resolved.nbytes

    @property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides every base address."""
        bits = int(np.bitwise_or.reduce(self.addresses)) | 16
        return bits & -bits

    @property
    def spans(self) -> npt.NDArray[np.uint64]:
        """First and last byte (exclusive) of every array, ``(n, 2)``, sorted."""
        if self._spans is None:
            extents = np.array([extent(*kind) for kind in self.resolved.kinds], np.uint64)
            ends = self.addresses + extents[self.resolved.kind_of_entry]
            self._spans = np.stack([self.addresses, ends], axis=1)[np.argsort(self.addresses, kind="stable")]
        return self._spans

    def require_distinct(self) -> None:
        """No two arrays share bytes.  Where rows are padded, arrays may lie in each other's padding, but not on one address."""
        dense = all(_dense(shape, itemsize) == strides for shape, strides, itemsize in self.resolved.kinds)
        ends = self.spans[:-1, 1] if dense else self.spans[:-1, 0] + np.uint64(1)
        clash = np.nonzero(ends > self.spans[1:, 0])[0]
        if clash.size:
            order = np.argsort(self.addresses, kind="stable")
            one, other = sorted(int(i) for i in order[clash[0] : clash[0] + 2])
            raise BindError(f"{self.layout.name}: arrays {one} and {other} share memory; expected one allocation each")

    def table(self) -> Any:
        """The base addresses as the compiled half takes them; on a GPU they are uploaded once."""
        if self._table is None:
            from . import _core

            index = -1 if self.device == "cpu" else int(self.device.partition(":")[2])
            self._table = _core.Table(self.addresses, index)
        return self._table

    def __repr__(self) -> str:
        return f"Pool({self.layout.name}, {self.shape}, num_blocks={self.num_blocks}, device={self.device})"


class DeviceArray:
    """One allocation of GPU memory as an array; the memory is freed with the last reference to it."""

    def __init__(self, device: int, allocation: Allocation, dtype: np.dtype[Any]) -> None:
        from . import _core

        address = _core.alloc_device(device, allocation.nbytes)
        weakref.finalize(self, _core.free_device, device, address)
        self.device = device
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": allocation.shape,
            "strides": allocation.strides,
            "typestr": dtype.str,
            "data": (address, False),
            "stream": None,
        }


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to behind the last element."""
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize


def _numpy_dtype(shape: BlockShape) -> np.dtype[Any]:
    """NumPy's dtype for the shape's; those that it lacks become unsigned integers of the same width."""
    return np.dtype(shape.dtype if shape.dtype not in _STAND_INS else f"u{shape.itemsize}")


def _empty(allocation: Allocation, shape: BlockShape) -> npt.NDArray[Any]:
    memory = np.empty(allocation.nbytes, np.uint8)
    return np.ndarray(allocation.shape, _numpy_dtype(shape), memory, strides=allocation.strides)


def _count_blocks(layout: Layout, shape: BlockShape, found: Sequence[Array]) -> int:
    """The number of blocks, from the number of arrays or from the extent of the axis ``b``."""
    one = layout.resolve(shape, 1)
    if layout.b_in_table:
        blocks, rest = divmod(len(found), one.table_size)
        if rest or not blocks:
            raise BindError(
                f"{layout.name} ({layout.order_text}): expected a multiple of {one.table_size} arrays "
                f"({one.table_size} a block), got {len(found)}"
            )
        return blocks
    first = one.first
    if len(found[0].shape) != len(first.axes):
        raise BindError(
            f"{layout.name}: array 0: expected {len(first.axes)} axes ({' '.join(first.axes)}), got shape {found[0].shape}"
        )
    rows = found[0].shape
    blocks = rows[first.axes.index("b")] if "b" in first.axes else rows[0] * shape.itemsize // first.nbytes
    if blocks < 1:
        raise BindError(f"{layout.name}: array 0: expected at least one block along 'b', got shape {found[0].shape}")
    return blocks


def check_alike(name: str, shape: BlockShape, found: Sequence[Array]) -> None:
    """All on one device, all of the shape's dtype."""
    first = found[0]
    for index, array in enumerate(found):
        if array.device != first.device:
            raise BindError(
                f"{name}: array {index} is on {array.device}, array 0 on {first.device}; expected one device"
            )
        if array.dtype != first.dtype:
            raise DTypeError(f"{name}: mixed dtypes: array {index} is {array.dtype}, array 0 {first.dtype}")
    if not same_dtype(first.dtype, shape.dtype):
        width = _STAND_INS.get(shape.dtype)
        also = f" (or {', '.join(_PLAIN[width][:2])} as its bits)" if width else ""
        raise DTypeError(f"{name}: array 0: expected dtype {shape.dtype}{also}, got {first.dtype}")


def check_arrays(resolved: Resolved, found: Sequence[Array]) -> None:
    """Shape and strides of each array against the layout."""
    layout, itemsize = resolved.layout, resolved.shape.itemsize
    kinds, kind_of = resolved.kinds, resolved.kind_of_entry
    for index, array in enumerate(found):
        shape, strides, _ = kinds[kind_of[index]]
        if array.shape == shape and _same_strides(array, strides):
            continue
        expected = resolved.allocations[index]
        where = f"{layout.name} ({layout.order_text}): array {index}" + (
            f" ({expected.label})" if expected.label else ""
        )
        if len(array.shape) != len(shape):
            raise BindError(
                f"{where}: expected {len(shape)} axes ({' '.join(expected.axes)}) of {shape}, got shape {array.shape}"
            )
        for axis, want, got in zip(expected.axes, shape, array.shape, strict=True):
            if want != got:
                raise BindError(
                    f"{where}: axis '{axis}': expected {want}, got {got} (shape {array.shape}, expected {shape})"
                )
        if _dense(shape, itemsize) == strides:
            raise BindError(
                f"{where}: expected a contiguous array, got strides of {array.strides} bytes; call .contiguous()"
            )
        raise BindError(f"{where}: expected strides of {strides} bytes, got {array.strides}")


def as_ids(ids: Any, what: str) -> npt.NDArray[np.int64] | None:
    """Block ids as a contiguous int64 array.

    Parameters
    ----------
    ids : None, int, sequence of int, NumPy array, or CPU tensor
        None means all blocks in order.
    what : str
        What errors call them.
    """
    if ids is None:
        return None
    if getattr(getattr(ids, "device", None), "type", "cpu") == "cuda" or hasattr(ids, "__cuda_array_interface__"):
        raise BindError(f"{what}: expected ids in host memory, got a {type(ids).__name__} on a GPU; pass {what}.cpu()")
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max):
        raise BindError(f"{what}: expected integers, got dtype {array.dtype}")
    if array.ndim > 1:
        raise BindError(f"{what}: expected one axis, got shape {array.shape}")
    return np.ascontiguousarray(np.atleast_1d(array), np.int64)
