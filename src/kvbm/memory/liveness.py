"""Whether the arrays of a pool still have their memory: what tells it, and where the frameworks keep that.

A copy reads addresses that were taken when the pool was bound.  The memory behind them can be gone: a tensor's storage is resized
(``untyped_storage().resize_(0)``) or replaced (``set_``, ``.data =``), an array is deleted (JAX).  So all arrays are looked at
before each copy, by `_core.Watch`: for NumPy and torch it compares the fields that say where the memory is and how large.
NumPy's are part of its binary interface.  Torch has no interface that is fast enough (160 tensors: 3 µs by DLPack's, 1.3 µs by
AOTInductor's), so its fields are found here by looking for known values, and used only if they follow every kind of change.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .array_info import TOLD, Array, span

#: As `array_info.TOLD`, if torch can be told without Python.
_TOLD_IN_C = 4096

_UNWATCHED, _NUMPY, _TORCH, _ASKED = range(4)  # as in core/watch.pxi


class Borrowed:
    """The caller's arrays of a pool: checks if they have changed since they were bound, and tells autograd of writes.

    The pool, named in errors, is not kept alive.  `found` describes the arrays, and ``extent(index)`` gives the bytes that the
    pool uses behind the address of one.  If they are `readonly`, no array may be written.
    """

    def __init__(
        self, pool: object, arrays: Sequence[Any] = (), found: Sequence[Array] = (),
        extent: Callable[[int], int] = lambda _: 0, readonly: bool = False,
    ) -> None:  # fmt: skip
        from .. import _core

        self._arrays, self._found, self._extent = list(arrays), list(found), extent
        self._owners = tuple(array.owner for array in found)  # kept alive while the addresses are used
        torch = sys.modules.get("torch")
        tensors = [array for array in arrays if isinstance(array, getattr(torch, "Tensor", ()))]
        fields = torch_fields() if tensors else None
        kinds = bytes(_kind(array, torch, fields) for array in arrays)
        held = {id(one): one for array in arrays for one in _below(array)}
        #: They keep NumPy's memory where it is.
        self._holds = [hold for one in held.values() if (hold := _hold(one)) is not None]
        # Views of one tensor share its version.  Tensors of inference mode have none.
        bases = {id(base): base for base in map(_base, tensors) if not base.is_inference()}
        bump = _bump(fields) if bases and fields is not None else 0
        is_small = len(bases) <= (_TOLD_IN_C if bump else TOLD)
        bumped = [base for base in bases.values() if is_small or base.requires_grad]
        #: Compared before each copy.
        self.watch = _core.Watch(weakref.ref(pool), self._arrays, kinds, fields, bumped, bump, readonly)

    def moved(self) -> int:
        """Index of an array that has other memory than when it was bound, or -1."""
        watch, arrays, found = self.watch, self._arrays, self._found  # as they were before another thread closes the pool
        index = watch.changed()
        while index >= 0:
            if not has_memory(arrays[index], found[index].address, self._extent(index)):
                return index
            watch.note(index)
            index = watch.changed(index + 1)
        return -1

    def close(self) -> None:
        """Let go of the arrays."""
        self.watch.close()
        self._arrays, self._found, self._holds, self._owners = [], [], [], ()


def has_memory(array: Any, address: int, extent: int) -> bool:
    """True if an array starts at this address, and its memory has `extent` bytes from there."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data == address and span(array.shape, array.strides, array.itemsize) >= extent
    if hasattr(array, "untyped_storage"):
        try:
            storage = array.untyped_storage()
            return bool(array.data_ptr() == address and storage.data_ptr() + storage.nbytes() - address >= extent)
        except (NotImplementedError, RuntimeError):  # it has no memory any more
            return False
    return not _is_deleted(array)


def _is_deleted(array: Any) -> bool:
    """True if an array of JAX was deleted or donated, or one of `Pool.allocate` was freed."""
    asked = getattr(array, "is_deleted", None)
    return bool(callable(asked) and asked())


def _kind(array: Any, torch: Any, fields: Any) -> int:
    if isinstance(array, np.ndarray):
        return _NUMPY if numpy_fits() else _ASKED
    if isinstance(array, getattr(torch, "Tensor", ())):
        return _ASKED if fields is None else _TORCH
    return _ASKED if callable(getattr(array, "is_deleted", None)) else _UNWATCHED


def _below(array: Any) -> Iterator[Any]:
    """A NumPy array, the array that it is a view of, and the object that has its memory."""
    while isinstance(array, np.ndarray):
        yield array
        array = array.base
        if array is not None and not isinstance(array, np.ndarray):
            yield array


def _hold(one: Any) -> Any:
    """What refuses that memory is moved or freed, as long as it exists."""
    if isinstance(one, np.ndarray):
        return weakref.ref(one)  # then NumPy does not resize it, also with refcheck=False
    try:  # ``numpy.ndarray(…, buffer=…)`` does not keep the buffer: mmap and shared memory would let themselves be closed
        return memoryview(one)
    except (TypeError, ValueError, BufferError):  # an owner of another kind
        return None


def _base(tensor: Any) -> Any:
    return tensor if tensor._base is None else tensor._base


# ---- where the fields are --------------------------------------------------------------------------------------------


@functools.cache
def numpy_fits() -> bool:
    """True if the fields of a NumPy array are where `_core` reads them."""
    array = np.zeros((3, 5), np.uint8)
    for writeable in (True, False):
        array.flags.writeable = writeable
        raw = ctypes.string_at(id(array), np.ndarray.__basicsize__)[object.__basicsize__ :]
        data, nd, dimensions, strides, _, dtype, flags = struct.unpack_from("@PiPPPPi", raw)
        if (data, nd, dtype, flags) != (array.ctypes.data, array.ndim, id(array.dtype), array.flags.num):
            return False
        sizes = [struct.unpack(f"@{nd}n", ctypes.string_at(at, nd * 8)) for at in (dimensions, strides)]
        if sizes != [array.shape, array.strides] or bool(flags & 0x400) != writeable:
            return False
    return True


_Fields = tuple[int, int, int, int, int]
_known: list[_Fields] = []


def torch_fields() -> _Fields | None:
    """Where torch keeps the address of a tensor's memory and its size (`TorchFields` of `_core`); None if it is not found."""
    if not _known:
        try:
            found = _find_fields(sys.modules["torch"])
        except Exception:  # another torch, or a mode in which tensors are not plain: then tensors are asked in Python
            found = None
        if found is None:
            return None
        from .. import _core

        _core.know_torch(found)
        _known.append(found)
    return _known[0]


def _words(address: int, nbytes: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(ctypes.string_at(address, nbytes // 8 * 8), np.uint64)


def _find_fields(torch: Any) -> _Fields | None:
    usable = ctypes.CDLL(None).malloc_usable_size
    usable.argtypes, usable.restype = [ctypes.c_void_p], ctypes.c_size_t

    def place(where: Sequence[tuple[int, int]], values: Sequence[int]) -> int:
        """The bytes up to the word that has these values in these objects (address, bytes)."""
        alike = [_words(*one)[: min(nbytes for _, nbytes in where) // 8] == value
                 for one, value in zip(where, values, strict=True)]  # fmt: skip
        return int(np.flatnonzero(np.logical_and.reduce(alike))[0]) * 8

    sizes, starts = (1031, 4099, 2053), (137, 611, 353)
    whole = [torch.frombuffer(bytearray(size), dtype=torch.uint8) for size in sizes]
    views = [one[start : start + 64] for one, start in zip(whole, starts, strict=True)]
    if any(type(one) is not torch.Tensor for one in views):
        return None
    storages = [view.untyped_storage() for view in views]
    objects = [(id(view), torch.Tensor.__basicsize__) for view in views]
    tensors = [(view._cdata, usable(view._cdata)) for view in views]
    behind = [(storage._cdata, usable(storage._cdata)) for storage in storages]
    found = (
        place(objects, [at for at, _ in tensors]), place(tensors, [at for at, _ in behind]), place(tensors, starts),
        place(behind, [storage.data_ptr() for storage in storages]), place(behind, sizes),
    )  # fmt: skip
    # They must follow whatever moves memory.
    changes: list[Callable[[Any], object]] = [
        id,  # none
        lambda one: one.untyped_storage().resize_(4096 + 64),
        lambda one: one.untyped_storage().resize_(0),
        lambda one: one.set_(whole[1][5:9]),
        lambda one: setattr(one, "data", whole[2][7:31]),
        lambda one: one.set_(torch.zeros(40, dtype=torch.uint8)),
        lambda one: one.resize_(5000),
    ]
    probe = torch.zeros(64, dtype=torch.uint8)
    for change in changes:
        change(probe)
        if _read(probe, found) != _expected(probe):
            return None
    return found


def _expected(tensor: Any) -> tuple[int, ...]:
    storage = tensor.untyped_storage()
    return tensor._cdata, storage._cdata, tensor.storage_offset(), storage.data_ptr(), storage.nbytes()


def _read(tensor: Any, fields: _Fields) -> tuple[int, ...]:
    def word(at: int) -> int:
        return int.from_bytes(ctypes.string_at(at, 8), sys.byteorder)

    inside = word(id(tensor) + fields[0])
    storage = word(inside + fields[1])
    return inside, storage, word(inside + fields[2]), word(storage + fields[3]), word(storage + fields[4])


_bumps: list[int] = []


def _bump(fields: _Fields) -> int:
    """Address of torch's function that increases a tensor's version: 3 ns, and by Python 17; 0 if it is not found."""
    if not _bumps:
        torch = sys.modules["torch"]
        probe = torch.zeros(1)
        if probe.is_inference():
            return 0
        _bumps.append(0)
        try:
            library = ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so"))
            function = library._ZN5torch8autograd4impl12bump_versionERKN2at6TensorE
            function.argtypes, function.restype = [ctypes.c_void_p], None
            before = probe._version
            function(id(probe) + fields[0])
            if probe._version == before + 1:
                _bumps[0] = ctypes.cast(function, ctypes.c_void_p).value or 0
        except (AttributeError, OSError):  # another torch
            pass
    return _bumps[0]
