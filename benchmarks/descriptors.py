"""Offloading as in vLLM 0.32: one driver call for a list of descriptors, one per page and layer, or one per fragment of a page.

It follows ``v1/kv_offload/cpu/gpu_worker.py`` and ``offloading/canonical_mapping.py`` of vLLM 0.32.0.  Here the lists are made
before the measurement; vLLM makes them for each job.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from kvbm import _core
from kvbm.bench.measure import Numbers
from kvbm.errors import CudaUnavailableError
from kvbm.layout.shapes import BlockShape
from kvbm.system.machine import cuda

__all__ = ["Batch", "Pages", "Swap"]


class Pages(NamedTuple):
    """The pieces of a block that vLLM copies, in bytes from the start of the block.

    Attributes
    ----------
    engine, host : array of int64, ``(layers, pieces of a page)``
        Start of each piece in the engine's memory, and in a row of host memory.
    nbytes : int
        Bytes per piece.
    engine_step, row : int
        Bytes from block to block in the engine's memory, and from row to row in host memory.
    """

    engine: Numbers
    host: Numbers
    nbytes: int
    engine_step: int
    row: int

    @classmethod
    def of(cls, order: str, shape: BlockShape, blocks: int) -> Pages:
        """One page per layer; if the layers of a block are contiguous, the whole block as one piece."""
        if order.startswith("B"):
            return cls(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), *[shape.nbytes] * 3)
        page, layers = shape.nbytes // shape.nl, np.arange(shape.nl)[:, None]
        return cls(layers * blocks * page, layers * page, page, page, shape.nbytes)

    @classmethod
    def canonical(cls, order: str, shape: BlockShape, blocks: int, tp: int) -> Pages | None:
        """``canonical_layout``: pages with the heads of all ranks; rank 0 has a part of each token.

        None if it is the same as `of`, or if vLLM refuses it.
        """
        if order != "LBNHC" or tp == 1:
            return None
        whole = cls.of(order, shape, blocks)
        token = whole.nbytes // shape.nt
        tokens = np.arange(shape.nt) * token
        return cls(whole.engine + tokens, (whole.host + tokens) * tp, token, whole.engine_step, tp * whole.row)

    def ranges(self, ids: Any, rows: Any) -> tuple[Numbers, Numbers]:
        """Starts of the pieces of blocks `ids` of the engine and of `rows` of host memory, layer by layer as in vLLM."""
        sides = []
        for starts, step, numbers in ((self.engine, self.engine_step, ids), (self.host, self.row, rows)):
            sides.append((starts[:, None] + np.asarray(numbers, np.int64)[:, None] * step).reshape(-1))
        return sides[0], sides[1]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("src", _Location), ("dst", _Location), ("flags", ctypes.c_uint))


#: Access order of a source: in stream order, or at any time, which host memory allows.
_STREAM, _ANY = 1, 3


class Batch:
    """A list of ranges, copied by one call of ``cuMemcpyBatchAsync``; on the host by one ``memmove`` per range.

    Parameters
    ----------
    dst, src : array of int64
        Addresses.
    nbytes : int
        Bytes per range.
    device : int
        CUDA device ordinal; -1 on the host.
    reads_host : bool
        True if the sources are in host memory: the driver may read them at any time.

    Raises
    ------
    CudaUnavailableError
        The driver does not have this call.
    """

    def __init__(self, dst: Numbers, src: Numbers, nbytes: int, device: int, *, reads_host: bool) -> None:
        self._dst, self._src = (np.ascontiguousarray(side, np.uint64) for side in (dst, src))
        self._sizes = np.full(len(self._dst), nbytes, np.uint64)
        self._nbytes, self._device = nbytes, device
        self._attributes = _Attributes(order=_ANY if reads_host else _STREAM)
        self._first, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call: Any = None
        self._has_failed = False
        if device >= 0:
            self._call, self._has_failed = _entry()

    def __len__(self) -> int:
        return len(self._dst)

    def __call__(self, stream: Any) -> None:
        """Enqueue the copies; on the host, copy."""
        if self._call is None:
            for dst, src in zip(self._dst.tolist(), self._src.tolist(), strict=True):
                ctypes.memmove(dst, src, self._nbytes)
            return
        given: list[Any] = [ctypes.c_void_p(side.ctypes.data) for side in (self._dst, self._src, self._sizes)]
        given += [
            ctypes.c_size_t(len(self)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
        ]
        given += [ctypes.byref(self._failed)] if self._has_failed else []
        status = self._call(*given, ctypes.c_void_p(_core.stream_handle(stream)))
        from cuda.bindings import driver

        cuda((driver.CUresult(status),), f"cuMemcpyBatchAsync of {len(self):,} ranges")


class Swap(Batch):
    """The same list for the Triton kernel with which vLLM loads pages below 28 KiB."""

    def __init__(self, dst: Numbers, src: Numbers, nbytes: int, device: int, *, reads_host: bool) -> None:
        import torch

        from .swap import swap

        super().__init__(dst, src, nbytes, device, reads_host=reads_host)
        lists = (self._dst, self._src, self._sizes)
        self._swap = swap
        self._dst_list, self._src_list, self._sizes_list = (
            torch.from_numpy(each.view(np.int64)).pin_memory() for each in lists
        )

    def __call__(self, stream: Any) -> None:
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(_core.stream_handle(stream), device=self._device)):
            self._swap(self._src_list, self._dst_list, self._sizes_list, self._nbytes)


def _entry() -> tuple[Any, bool]:
    """The driver's function, and True if it is the older version, which also returns the index of a refused range."""
    find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    for version in (13000, 12080):
        address, how = ctypes.c_void_p(), ctypes.c_int()
        status = find(b"cuMemcpyBatchAsync", ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(how))
        if status == 0 and address.value:
            return ctypes.CFUNCTYPE(ctypes.c_int)(address.value), version < 13000
    raise CudaUnavailableError(
        "vLLM's copies: expected a driver with cuMemcpyBatchAsync, one of CUDA 12.8 or newer, got an older one"
    )
