"""Buffers with guard bytes, and array views of them: on the host and on a GPU, aligned or not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from oracle import Arena, Placed

_NUMPY = {"bfloat16": "uint16"} | {
    f"float8_{kind}": "uint8" for kind in ("e4m3fn", "e5m2", "e8m0fnu", "e4m3fnuz", "e5m2fnuz")
}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's own dtype, or the unsigned integers of the same width where it has none."""
    return np.dtype(_NUMPY.get(dtype, dtype))


def aligned(data: np.ndarray) -> np.ndarray:
    """The same bytes, with the first one at a multiple of 64."""
    raw = np.empty(data.size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + data.size] = data
    return raw[start : start + data.size]


@contextmanager
def only(arena: Arena, buffer: np.ndarray, ids: Sequence[int]) -> Iterator[None]:
    """Inside the block, only bytes of the blocks `ids` may be accessed.  AddressSanitizer, if present, reports other accesses."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "__asan_poison_memory_region"):
        yield
        return
    closed = np.ones(buffer.size + 2, np.int8)
    closed[[0, -1]] = 0
    at = arena.positions(ids) + 1
    for k in range(arena.placed.itemsize):
        closed[at + k] = 0
    edges = np.nonzero(np.diff(closed))[0].reshape(-1, 2).tolist()
    address, length = ctypes.c_void_p, ctypes.c_size_t
    for begin, end in edges:
        library["__asan_poison_memory_region"](address(buffer.ctypes.data + begin), length(end - begin))
    try:
        yield
    finally:
        library["__asan_unpoison_memory_region"](address(buffer.ctypes.data), length(buffer.size))


class Strided:
    """A view for anything that takes `__cuda_array_interface__`: any alignment, any strides."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, typestr: str, owner: Any):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
            "stream": None,
        }


def numpy_views(arena: Arena, buffer: np.ndarray, dtype: str) -> list[np.ndarray]:
    return [
        np.ndarray(space.shape, numpy_dtype(dtype), buffer, base, space.strides)
        for space, base in zip(arena.placed.spaces, arena.bases, strict=True)
    ]


def torch_views(arena: Arena, buffer: Any, dtype: str) -> list[Any]:
    """Views of a uint8 tensor (CPU or CUDA), or None where torch cannot make one at such an alignment."""
    import torch

    kind, itemsize = getattr(torch, dtype), arena.placed.itemsize
    views = []
    for space, base in zip(arena.placed.spaces, arena.bases, strict=True):
        flat = buffer[base : base + space.nbytes].view(kind)
        views.append(flat.as_strided(space.shape, [s // itemsize for s in space.strides]))
    return views


def interface_views(arena: Arena, buffer: Any, dtype: str) -> list[Strided]:
    """`__cuda_array_interface__` views of a uint8 CUDA tensor."""
    return [
        Strided(buffer.data_ptr() + base, space.shape, space.strides, numpy_dtype(dtype).str, buffer)
        for space, base in zip(arena.placed.spaces, arena.bases, strict=True)
    ]


def views(arena: Arena, buffer: Any, dtype: str, kind: str) -> list[Any]:
    """`kind`: numpy, torch or interface.  torch falls back where it cannot view a misaligned base."""
    align = min((base % arena.placed.itemsize for base in arena.bases), default=0)
    strides = [s for space in arena.placed.spaces[:1] for s in space.strides]
    whole = all(s % arena.placed.itemsize == 0 for s in strides)
    if isinstance(buffer, np.ndarray):
        if kind == "torch" and align == 0 and whole:
            import torch

            return torch_views(arena, torch.from_numpy(buffer), dtype)
        return numpy_views(arena, buffer, dtype)
    if kind == "torch" and align == 0 and whole:
        return torch_views(arena, buffer, dtype)
    return interface_views(arena, buffer, dtype)


def placed(order: Any, shape: Any, num_blocks: int) -> Placed:
    """From a kvbm.BlockShape, whose fields are plain numbers."""
    return Placed(order, dict(shape.sizes), shape.itemsize, num_blocks)


class FakeCuda(Strided):
    """Claims to be a CUDA array and has no memory: for errors that must be raised before any memory is accessed."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str = "float16", *, device: int = 0, address: int = 0, **rest: Any
    ):
        kind = numpy_dtype(dtype)
        if not address:
            FakeCuda.next_address += 1 << 24
            address = FakeCuda.next_address
        self.device = device
        self.address = address
        super().__init__(address, shape, rest.get("strides"), kind.str, None)

    next_address = 1 << 40


class _Dlpack(ctypes.Structure):
    """DLManagedTensor of dlpack.h, flattened; its deleter is null, as NumPy owns the memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class FakeDlpack:
    """Claims through DLPack alone to be on GPU 0; `code` is dlpack.h's (1 uint, 2 float, 4 bfloat)."""

    def __init__(self, array: np.ndarray, code: int):
        self.array = array
        longs = ctypes.c_int64 * array.ndim
        steps = longs(*(stride // array.itemsize for stride in array.strides))
        bits = 8 * array.itemsize
        device = (ctypes.c_int32 * 2)(2, 0)
        self.made = _Dlpack(
            array.ctypes.data, device, array.ndim, code, bits, 1, longs(*array.shape), steps, 0, None, None
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **rest: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.made), b"dltensor", None)


class Bound:
    """A pool over a guarded buffer on the host, with the bytes it had before."""

    def __init__(
        self, name: str, shape: Any, num_blocks: int, *, dst: bool = False, kind: str = "numpy", align: int = 0
    ):
        import kvbm
        import matrix
        import oracle

        self.layout = kvbm.load(name)
        self.arena = placed(matrix.orders()[name], shape, num_blocks).layout_bytes(align)
        fill = oracle.dest_bytes if dst else oracle.source_bytes
        self.before = fill(self.arena, 0)
        self.buffer = aligned(self.before)
        self.arrays = views(self.arena, self.buffer, shape.dtype, kind)
        self.pool = kvbm.Pool(self.layout, shape, self.arrays)

    @property
    def untouched(self) -> bool:
        return np.array_equal(self.buffer, self.before)
