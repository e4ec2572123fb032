"""Memory that other processes of this host can open, and arrays on memory that they have opened."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BindError, NotEnoughMemoryError
from ..layout.resolved import Resolved
from ..layout.shapes import round_up
from ..system.locks import Lock
from ..system.memory_files import memory_file
from .allocation import DeviceArray, require_memory
from .array_info import array_on

#: (begin, end, descriptor) of each memory file that `shared_slab` has mapped.
_files: list[tuple[int, int, int]] = []
_lock = Lock()


def shared_slab(nbytes: int, what: str) -> npt.NDArray[np.uint8]:
    """New host memory in a memory file, all zero.  It is freed with the last array on it.

    Raises `NotEnoughMemoryError`, with nothing allocated, if the machine does not have it, and `BindError` without memory
    files.
    """
    if not hasattr(os, "memfd_create"):
        raise BindError(f"{what}: device 'shared': this system has no memory files; use 'cpu'")
    require_memory(nbytes, what)
    size = round_up(max(nbytes, 1), mmap.PAGESIZE)
    try:
        file = memory_file("pool", size)
        try:
            pages = mmap.mmap(file, size)
        except BaseException:
            os.close(file)
            raise
    except (OSError, OverflowError, ValueError) as error:
        raise NotEnoughMemoryError(f"{what}: {nbytes} bytes of shared memory: {error}; use fewer blocks") from None
    memory = np.frombuffer(pages, np.uint8)
    begin = int(memory.ctypes.data)
    entry = begin, begin + size, file
    with _lock:
        insort(_files, entry)
    weakref.finalize(pages, _forget, entry).atexit = False
    return memory[:nbytes]


def _forget(entry: tuple[int, int, int]) -> None:
    with _lock:
        _files.remove(entry)
    os.close(entry[2])


def file_of(begin: int, end: int) -> tuple[int, int, int]:
    """The memory file that holds some bytes: its descriptor, and where it is mapped; `BindError` if they are in none."""
    with _lock:
        at = bisect_right(_files, (begin, 1 << 64, 0)) - 1
        first, behind, file = _files[at] if at >= 0 else (0, 0, -1)
    if not first <= begin < end <= behind:
        raise BindError("its memory is that of this process alone: expected Pool.allocate(…, device='shared')")
    return file, first, behind


class _OnGpu:
    """Memory of a GPU that this process has opened, as `DeviceArray` wants it."""

    def __init__(self, memory: Any) -> None:
        self._memory, self.address, self.close = memory, memory.address, self
        self.device = int(memory.device.partition(":")[2])

    @property
    def alive(self) -> bool:
        return bool(self._memory.owner.is_open)


def opened_arrays(resolved: Resolved, places: Sequence[tuple[Any, int]]) -> list[Any]:
    """The arrays of a pool on memory that this process has opened: for each its memory (a `Slab`), and its first byte there."""
    arrays = []
    for (memory, first), which in zip(places, resolved.kind_of_entry, strict=True):
        kind = resolved.kinds[which]
        if memory.device == "cpu":
            arrays.append(array_on(memory.owner.buffer, kind, first))
        else:
            arrays.append(DeviceArray(_OnGpu(memory), kind, first))  # type: ignore[arg-type]
    return arrays
