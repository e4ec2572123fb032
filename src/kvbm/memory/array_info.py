"""Describe arrays of any framework: address, shape, strides, dtype, device.  Their contents are not read."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_char
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BindError, CudaError, DTypeError, KvbmError
from ..layout.naming import SPELLINGS
from ..layout.overlap import meet
from ..layout.resolved import Allocation
from ..layout.shapes import ITEMSIZE, PACKED, numpy_name

#: For dtypes that NumPy does not have, arrays of integers (or raw bytes) of the same width are used.
_PLAIN = {1: ("uint8", "int8", "void8"), 2: ("uint16", "int16", "void16")}
#: Exceptions of an object that implements its protocol only in part.
_MALFORMED = (AttributeError, BufferError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
_SWAPPED = ">" if sys.byteorder == "little" else "<"
_INTEGERS = np.dtype(np.uint64), np.dtype(np.int64)
_TYPESTRS = tuple(dtype.str for dtype in _INTEGERS)


class Array(NamedTuple):
    """The description of an array: address of its first element, elements along each axis, bytes between neighbours.

    `device` is ``"cpu"`` or ``"cuda:N"``, `offset` that in its storage (elements), and `owner` the object that must live while
    the address is used, if it is not the array.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    readonly: bool = False
    offset: int = 0
    owner: Any = None


def describe(array: Any, what: str = "array") -> Array:
    """Describe an array without accessing its memory.  torch is not imported.

    Parameters
    ----------
    array : torch.Tensor, numpy.ndarray, or anything with ``__cuda_array_interface__`` or ``__dlpack__``
        The array; messages call it `what`.

    Raises
    ------
    BindError
        The object is none of these, or implements its protocol only in part.  It has no memory with its plain values (sparse, fake,
        negated, masked, …).  It is on a device that is neither the CPU nor a CUDA GPU.
    DTypeError
        The bytes are not plain elements of its dtype: swapped byte order, structured, or one byte per four-bit element.
    """
    torch = sys.modules.get("torch")
    if isinstance(array, getattr(torch, "Tensor", ())):  # not there while another thread imports torch
        return _tensor(array, what, torch)
    if isinstance(array, np.ndarray):
        return _numpy(array, what)
    try:
        try:
            interface = getattr(array, "__cuda_array_interface__", None)
        except _MALFORMED as error:
            raise BindError(f"{what}: {type(array).__name__} has no memory: {error}") from None
        if interface is not None:
            return _cuda_array(array, interface, what)
        if hasattr(array, "__dlpack__"):
            return _dlpack(array, what)
    except (KvbmError, MemoryError):
        raise
    except Exception as error:  # the object's own code may raise anything
        raise BindError(
            f"{what}: expected an array, got a {type(array).__name__} that cannot be looked at ({type(error).__name__}: {error})"
        ) from error
    raise BindError(
        f"{what}: expected a torch tensor, a NumPy array, or an object with __cuda_array_interface__ or __dlpack__, "
        f"got {type(array).__name__}"
    )


def flat_integers(array: Any, count: int) -> tuple[int, int, Any] | None:
    """Describe writable, contiguous 64-bit integers.  It takes a fifth of the time of `describe`, which matters in every call.

    Nothing is cached: another array may have the same name and address, or the array may have become read-only.

    Returns ``(address, CUDA device ordinal or -1, owner)``.  None if the array is different, or cannot be checked in this way:
    then call `describe`, and raise an error if it is wrong.
    """
    kind = type(array)
    torch: Any = sys.modules.get("torch")
    if kind is np.ndarray:
        if array.shape != (count,) or not count or (array.strides != (8,) and count > 1):
            return None
        if array.dtype not in _INTEGERS or not array.flags.writeable:
            return None
        return addressof(c_char.from_buffer(array)), -1, None  # takes a third of the time of array.ctypes.data
    try:
        if isinstance(array, getattr(torch, "Tensor", ())):
            return _flat_tensor(array, count, torch) if kind is torch.Tensor else None
        if isinstance(array, np.ndarray):
            return None
        interface = array.__cuda_array_interface__
        typestr, (address, readonly) = interface["typestr"], interface["data"]
        shape, strides, descr = interface["shape"], interface.get("strides"), interface.get("descr")
        if typestr not in _TYPESTRS or shape != (count,) or (strides is not None and strides != (8,)) or readonly:
            return None
        if interface.get("mask") is not None or (descr is not None and descr != [("", typestr)]):
            return None
        if not 0 < address < 1 << 64 or {type(address), *map(type, shape), *map(type, strides or ())} != {int}:
            return None
        device = getattr(array, "device", None)
        return address, device if type(device) is int and device >= 0 else _ordinal(array, address, ""), None
    except Exception:  # the object's own code may raise anything; `describe` meets it again
        return None


def _flat_tensor(tensor: Any, count: int, torch: Any) -> tuple[int, int, Any] | None:
    dtype = tensor.dtype  # both dtypes are neither complex nor quantized
    if dtype is not torch.int64 and dtype is not getattr(torch, "uint64", None):
        return None
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_neg():
        return None
    if tensor.shape != (count,) or (count > 1 and tensor.stride() != (1,)) or not (tensor.is_cuda or tensor.is_cpu):
        return None
    address, storage = tensor.data_ptr(), tensor.untyped_storage()
    if address + 8 * count > storage.data_ptr() + storage.nbytes():
        return None
    return address, tensor.get_device(), storage


def _tensor(tensor: Any, what: str, torch: Any) -> Array:
    device, kind = tensor.device, type(tensor)
    if device.type not in ("cpu", "cuda"):
        raise BindError(f"{what}: expected a CPU or CUDA tensor, got one on {device}")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # fake, masked, distributed, …
        raise BindError(f"{what}: a {kind.__name__} does not hold its values itself; pass the plain tensor that does")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        odd = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else ""
        found = odd or str(tensor.layout).removeprefix("torch.")
        raise BindError(f"{what}: expected a dense tensor, got a {found} one; pass the dense tensors that it consists of")
    if tensor.is_neg() or tensor.is_conj():
        raise BindError(
            f"{what}: a view of the {'negative' if tensor.is_neg() else 'conjugate'} of its memory's values; pass the tensor "
            "of which it is a view"
        )
    shape, size = tuple(tensor.shape), tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    try:
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        room = storage.data_ptr() + storage.nbytes() - address
    except (NotImplementedError, RuntimeError):
        raise BindError(f"{what}: the tensor has no memory; expected a plain tensor outside of torch.func") from None
    extent = span(shape, strides, size)
    if extent > room:
        raise BindError(
            f"{what}: its storage has {max(room, 0)} bytes from its start, and its shape and strides span {extent}: the "
            "storage was resized"
        )
    return Array(
        address, shape, strides, str(tensor.dtype).removeprefix("torch."),
        "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}", False, tensor.storage_offset(), storage,
    )  # fmt: skip


def _numpy(array: npt.NDArray[Any], what: str, owner: Any = None) -> Array:
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise BindError(f"{what}: expected an array without a mask, got a masked array; pass array.data, or array.filled()")
    dtype = _dtype_name(array.dtype, what)
    return Array(array.ctypes.data, array.shape, array.strides, dtype, "cpu", not array.flags.writeable, owner=owner)


def _dtype_name(dtype: np.dtype[Any], what: str, fields: bool = False, *, swapped: bool = False) -> str:
    """The name of a dtype.  Raises `DTypeError` unless the bytes are plain elements of it."""
    if fields or dtype.fields is not None or dtype.subdtype is not None:
        raise DTypeError(f"{what}: expected elements of one dtype, got the structured {dtype}; pass a field of it")
    if swapped or not dtype.isnative:
        raise DTypeError(
            f"{what}: expected the byte order of this machine, got {dtype.name} in the other one ({dtype.str}); pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if (name := dtype.name) in PACKED:  # NumPy makes the name anew each time
        raise DTypeError(
            f"{what}: {name} of ml_dtypes has one byte per element, and a block has {PACKED[name]} elements per byte; "
            "pack them, and pass uint8"
        )
    return name


def _cuda_array(array: Any, interface: Any, what: str) -> Array:
    try:
        typestr, (address, readonly) = interface["typestr"], interface["data"]
        dtype, address = np.dtype(typestr), operator.index(address or 0)
        shape: tuple[int, ...] = tuple(map(operator.index, interface["shape"]))
        strides = interface.get("strides")
        strides = dense(shape, dtype.itemsize) if strides is None else tuple(map(operator.index, strides))
        fields = any(field[0] for field in interface.get("descr") or ())
        mask = interface.get("mask")
        if len(strides) != len(shape) or min(shape, default=0) < 0 or not 0 <= address < 1 << 64:
            raise ValueError(f"shape {shape}, strides {strides}, address {address}")
    except _MALFORMED as error:
        raise BindError(
            f"{what}: the __cuda_array_interface__ of {type(array).__name__} is malformed ({type(error).__name__}: {error}); "
            "expected 'shape', 'typestr' and 'data' as Numba defines them"
        ) from None
    if mask is not None:
        raise BindError(f"{what}: expected an array without a mask, got a masked array; pass the array of its values")
    if not address and 0 not in shape:
        raise BindError(f"{what}: {type(array).__name__} has no memory: its address is 0")
    name = _dtype_name(dtype, what, fields, swapped=str(typestr)[:1] == _SWAPPED and dtype.itemsize > 1)
    # Objects with dtypes beyond NumPy's have them in `dtype` (CuPy with ml_dtypes).
    own = str(getattr(getattr(array, "dtype", None), "name", ""))
    if ITEMSIZE.get(own) == dtype.itemsize and own not in PACKED and numpy_name(own) != own:
        name = own
    return Array(address, shape, strides, name, f"cuda:{_ordinal(array, address, what)}", bool(readonly))


def _ordinal(array: Any, address: int, what: str) -> int:
    """CUDA's number of the array's device."""
    device = getattr(array, "device", None)
    # JAX counts the devices of all processes by `id`, those of this one by `local_hardware_id`.
    for index in (getattr(device, "local_hardware_id", None), getattr(device, "id", None), device):
        if isinstance(index, int) and index >= 0:
            return index
    from .. import _core

    try:
        return max(_core.pointer_device(address), 0)
    except CudaError as error:
        raise type(error)(f"{what}: {error}", code=error.code, name=error.name) from None


def _dlpack(array: Any, what: str) -> Array:
    name = type(array).__name__
    try:
        kind, index = map(operator.index, array.__dlpack_device__())
    except _MALFORMED as error:
        raise BindError(
            f"{what}: the __dlpack_device__ of {name} is malformed ({type(error).__name__}: {error}); expected (type, number)"
        ) from None
    if kind in (1, 3):  # kDLCPU, kDLCUDAHost
        try:
            on_host = np.from_dlpack(array)
        except _MALFORMED as error:
            raise BindError(f"{what}: NumPy cannot view this {name} through DLPack: {error}") from None
        return _numpy(on_host, what, on_host)
    if kind != 2:  # kDLCUDA
        raise BindError(f"{what}: expected memory of the CPU or of a CUDA GPU, got DLPack device type {kind}")
    from cuda.core.utils import StridedMemoryView

    try:
        # stream_ptr=-1: no synchronisation here; the copy runs in the order of the caller's stream.
        view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
        dtype = view.dtype
    except _MALFORMED as error:
        raise BindError(
            f"{what}: cuda.core cannot view this {name} through DLPack: {error}; pass its bits as integers of the same width, or "
            "a torch tensor"
        ) from None
    return of_view(view, _dtype_name(dtype, what), dtype.itemsize, index)


def of_view(view: Any, dtype: str, itemsize: int, index: int, readonly: bool = False) -> Array:
    """The description of a ``StridedMemoryView``.  The view is kept alive, as it may own the memory."""
    shape = tuple(view.shape)
    strides = tuple(s * itemsize for s in view.strides) if view.strides else dense(shape, itemsize)
    return Array(view.ptr, shape, strides, dtype, f"cuda:{index}", readonly or bool(view.readonly), owner=view)


#: Up to this many tensors, autograd is told of all that a copy writes; beyond, only of those that had gradients when bound.
TOLD = 256


def written(tensors: Sequence[Any]) -> None:
    """Tell autograd, as operators that write do: a graph that saved one of these tensors must not use it."""
    sys.modules["torch"].autograd.graph.increment_version(tensors)


def other_order(axes: Sequence[str], strides: Sequence[int], copier: str = "") -> str:
    """A hint for an array with another order of axes, or larger strides, than its layout.

    `copier` names the call that makes a contiguous copy, for an array that is only read.  For an output a copy is never right.
    """
    lie = [axis for axis, _ in sorted(zip(axes, strides, strict=True), key=lambda one: -one[1])]
    if lie == list(axes):
        found = "its strides are larger than those of the layout: use a layout with that pitch"
    else:
        found = f"its axes are in the order {' '.join(lie)}: use a layout with that order"
    if copier:
        return f"{found}. An input is only read, so a copy by {copier} works, too"
    return f"{found}. Do not pass a contiguous copy: the result would not be in your array"


class View:
    """An array on a GPU, in memory that another object owns.  Without a `device`, CUDA is asked whose the address is."""

    def __init__(
        self, device: int | None, address: int, shape: Sequence[int], strides: Sequence[int], typestr: str
    ) -> None:
        self.device = device
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3, "shape": tuple(shape), "strides": tuple(strides), "typestr": typestr, "data": (address, False),
            "stream": None,
        }  # fmt: skip


class PackedArray(np.ndarray[Any, Any]):
    """Bytes of which each holds two elements of four bits (``float4_e2m1fn``, ``int4``, ``uint4``).

    An assignment takes bytes: arrays of ``uint8`` or ``int8``, or a Python int.  Other values, and arithmetic, raise `DTypeError`:
    NumPy would compute with each byte, and not with its elements.  Comparisons and operators on bits give plain arrays.
    ``numpy.asarray`` and ``view(numpy.ndarray)`` give the plain bytes.

    Examples
    --------
    >>> array = np.zeros(2, np.uint8).view(PackedArray)
    >>> array[:] = np.array([0x21, 0x43], np.uint8)
    >>> array[:] = 0.5
    Traceback (most recent call last):
    kvbm.errors.DTypeError: an array of bytes with two elements each: expected bytes (uint8, int8 or an int), got float64; ...
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, self._bytes(value))

    def fill(self, value: Any) -> None:
        """Set every byte."""
        super().fill(self._bytes(value))

    def put(self, indices: Any, values: Any, mode: Any = "raise") -> None:
        """Set bytes by their flat indices."""
        super().put(indices, self._bytes(values), mode)

    @property
    def flat(self) -> Any:
        """As `numpy.ndarray.flat`; an assignment takes bytes, too."""
        return _Flat(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        self.flat[:] = value

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # These may write without a cast rule.
        if func in (np.putmask, np.place) and len(args) == 3 and isinstance(args[0], PackedArray):
            args = (*args[:2], args[0]._bytes(args[2]))
        elif func is np.copyto and len(args) > 1 and isinstance(args[0], PackedArray):
            args = (args[0], args[0]._bytes(args[1]), *args[2:])
        return super().__array_function__(func, types, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        of_pairs = [isinstance(one, PackedArray) and one.dtype == np.uint8 for one in (*inputs, *out)]
        is_a_question = all(one.endswith("->?") for one in ufunc.types if "O" not in one) and not any(of_pairs[len(inputs) :])
        if any(of_pairs) and not is_a_question and ufunc not in _OF_BITS:
            raise DTypeError(
                f"an array of bytes with two elements each: numpy.{ufunc.__name__} would compute with bytes, not with elements; "
                "for that, take .view(numpy.ndarray)"
            )
        plain = [one.view(np.ndarray) if isinstance(one, PackedArray) else one for one in (*inputs, *out)]
        given = {"out": tuple(plain[len(inputs) :])} if out else {}
        result = getattr(ufunc, method)(*plain[: len(inputs)], **given, **kwargs)
        return out[0] if len(out) == 1 else result

    def _bytes(self, value: Any) -> Any:
        if self.dtype != np.uint8 or type(value) is int:
            return value
        found = np.asarray(value)
        if found.dtype not in (np.uint8, np.int8):
            raise DTypeError(
                f"an array of bytes with two elements each: expected bytes (uint8, int8 or an int), got {found.dtype.name}; pack "
                "two elements into a byte, the first in its low half: for values of ml_dtypes, "
                "bits = values.view(numpy.uint8) & 15; bits[..., ::2] | bits[..., 1::2] << 4"
            )
        return found


#: What packs elements into bytes, and takes them out.
_OF_BITS = frozenset([np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert, np.left_shift, np.right_shift])


class _Flat:
    """A `numpy.flatiter` of a `PackedArray`: NumPy's own would store any value as a byte."""

    def __init__(self, array: PackedArray) -> None:
        self._array, self._flat = array, array.view(np.ndarray).flat

    def __setitem__(self, key: Any, value: Any) -> None:
        self._flat[key] = self._array._bytes(value)

    def __getitem__(self, key: Any) -> Any:
        return self._flat[key]

    def __iter__(self) -> Iterator[Any]:
        return self._flat

    def __next__(self) -> Any:
        return next(self._flat)

    def _as_numpy(name: str) -> Any:  # type: ignore[misc]  # noqa: N805
        return lambda self, other: getattr(self._flat, name)(other)

    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = map(_as_numpy, ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"))
    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._flat)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self._flat, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat, name)


def array_on(memory: Any, kind: Allocation, offset: int = 0) -> npt.NDArray[Any]:
    """An allocation as a NumPy array on a buffer, with the dtype of its elements (see `numpy_dtype`)."""
    array: npt.NDArray[Any] = np.ndarray(kind.shape, numpy_dtype(kind.dtype), memory, offset, kind.strides)
    return as_packed(array, kind.dtype)


def as_packed(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The array; for a dtype whose elements share bytes, as a `PackedArray`."""
    return array.view(PackedArray) if dtype in PACKED else array


def empty(shape: Sequence[int], dtype: str, strides: Sequence[int]) -> npt.NDArray[Any]:
    """A new NumPy array of a dtype (its name) with these strides (bytes), not initialised."""
    itemsize = ITEMSIZE[dtype]
    return array_on(
        np.empty(span(shape, strides, itemsize), np.uint8), Allocation("", (), tuple(shape), tuple(strides), 0, dtype)
    )


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first item to the end of the last; 0 for an empty array."""
    return math.prod(shape) and itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def dense(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis of a contiguous array."""
    strides, held = [], itemsize
    for extent in reversed(shape):
        strides.append(held)
        held *= extent
    return tuple(reversed(strides))


def same_dtype(found: str, wanted: str) -> bool:
    """True if an array of dtype `found` can hold elements of dtype `wanted`: equal, or integers of the same width."""
    return SPELLINGS.get(found, found) == wanted or found in stand_ins(wanted)


def stand_ins(dtype: str) -> tuple[str, ...]:
    """Dtypes of the same width that can hold the bits of a dtype that NumPy does not have."""
    return _PLAIN[ITEMSIZE[dtype]] if numpy_name(dtype) != dtype else ()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name; for a dtype that NumPy lacks, that of ml_dtypes.

    For elements that share a byte it is uint8, as those of ml_dtypes have one byte each: see `PackedArray`.
    """
    if name in PACKED or numpy_name(name) == name:
        return bits_dtype(name)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def bits_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the bits of a dtype: unsigned integers of its width if NumPy lacks it.  For those that only move bits."""
    return np.dtype(numpy_name(name))


def find_overlap(
    addresses: npt.NDArray[np.uint64], kinds: Sequence[Allocation], kind_of: Sequence[int], side_of: Sequence[int] = ()
) -> tuple[int, int] | None:
    """Find two arrays that share a byte of an element; None if there are none.

    An array may lie in the padding of another one, as the rows of several views of one tensor do.  `kind_of` has the index in
    `kinds` of each array.  If `side_of` has a side for each kind, only arrays of different sides are compared.
    """
    order = np.argsort(addresses, kind="stable")
    starts, which = addresses.astype(np.int64)[order], np.asarray(kind_of).astype(np.int64)[order]
    ends = starts + np.array([kind.extent for kind in kinds], np.int64)[which]
    nests = [nest_of(kind) for kind in kinds]
    behind = np.searchsorted(starts, ends)  # the first one that starts after this one has ended
    known: set[tuple[int, int, int]] = set()  # two kinds, and a distance at which they do not overlap
    for i in np.flatnonzero(behind > np.arange(1, starts.size + 1)):
        later = slice(i + 1, behind[i])
        mine = int(which[i])
        pairs = np.unique(np.stack([which[later], starts[later] - starts[i]]), axis=1)
        for other, distance in pairs.T.tolist():
            if side_of and side_of[mine] == side_of[other]:
                continue
            key = (mine, other, distance)
            if key not in known and meet(nests[mine][0], 0, nests[mine][1], nests[other][0], distance, nests[other][1]):
                j = next(j for j in range(i + 1, behind[i]) if (which[j], starts[j] - starts[i]) == (other, distance))
                return int(order[i]), int(order[j])
            known.add(key)
    return None


def nest_of(kind: Allocation) -> tuple[tuple[tuple[int, int], ...], int]:
    """Extents and steps of an array, slowest first, and the bytes of its contiguous runs."""
    runs, nbytes = list(kind.runs), kind.itemsize
    if runs and runs[0][1] == nbytes:
        nbytes *= runs.pop(0)[0]
    return tuple(reversed(runs)), nbytes
