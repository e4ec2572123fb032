"""The ring of an endpoint: registered memory cut into slots, in which chunks are packed, and arrive."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from ..arrays import Array
from ..errors import BindError
from ..shapes import round_up
from ..wire import Slab, Slice
from ..wire.loans import memory_file

__all__ = ["Ring"]

#: Chunks of a call on a GPU, where the call itself takes a large part of a chunk's time.  On a host a call returns when all is
#: done, and the first chunk would travel too late.
TOGETHER = 4


class Ring:
    """Slots of one size: some for chunks that go, the others for chunks that come.  One thread uses it.

    Parameters
    ----------
    device : str
        ``"cpu"`` or ``"cuda:N"``: where the pools are.
    slot_bytes : int
        Of a slot; the largest chunk and its trailer.
    sends, takes : int
        Slots for what goes, and for what comes.

    Attributes
    ----------
    slab : Slab
        What a wire registers.
    quarantined : set of (str, int)
        Peer and slot: the peer may still write to it.
    together : int
        Slots that one call packs or unpacks at most.
    """

    def __init__(self, device: str, slot_bytes: int, sends: int, takes: int) -> None:
        if min(sends, takes) < 1:
            raise BindError(f"ring: expected room for a slot each way, got {sends} and {takes} of {slot_bytes} bytes")
        self.device, self.slot_bytes = device, slot_bytes
        self.together = 1 if device == "cpu" else TOGETHER
        self.sends, self.takes = sends, takes
        nbytes = (sends + takes) * slot_bytes
        self._free_device: Any = None
        self._close_file: Callable[[], object] | None = None
        file = -1
        if device == "cpu":
            try:
                file = memory_file("ring", nbytes) if hasattr(os, "memfd_create") else -1
                self._close_file = weakref.finalize(self, os.close, file) if file >= 0 else None
                self._pages = mmap.mmap(file, nbytes)
            except (OSError, OverflowError, ValueError) as error:
                raise BindError(
                    f"ring: {nbytes} bytes wanted: {error}; expected fewer slots, or smaller ones"
                ) from None
            address = int(np.frombuffer(self._pages, np.uint8).ctypes.data)
        else:
            number = int(device.partition(":")[2])
            address = _core.alloc_device(number, nbytes)
            self._free_device = (number, address)
        self.slab = Slab(address, nbytes, device, self, file)
        self._free = deque(range(sends)), deque(range(sends, sends + takes))
        self.quarantined: set[tuple[str, int]] = set()

    @staticmethod
    def slot_size(chunk_bytes: int) -> int:
        """Bytes of a slot for chunks of so many bytes, the trailer included: whole lines of memory."""
        return round_up(chunk_bytes, 256)

    def take(self, *, sends: bool) -> int | None:
        """A free slot; None where there is none."""
        free = self._free[not sends]
        return free.popleft() if free else None

    def give(self, slot: int) -> None:
        """A slot that nobody writes any more is free."""
        self._free[slot >= self.sends].appendleft(slot)

    def free(self, *, sends: bool) -> int:
        return len(self._free[not sends])

    def slice(self, slot: int, nbytes: int) -> Slice:
        return Slice(slot * self.slot_bytes, nbytes)

    def array(self, slot: int, nbytes: int) -> Array:
        """A slot's first bytes, as what packs and unpacks takes them."""
        return Array(self.slab.address + slot * self.slot_bytes, (nbytes,), (1,), "uint8", self.device, owner=self)

    def close(self) -> None:
        if self._free_device is not None:
            _core.free_device(*self._free_device)
            self._free_device = None
        if self._close_file is not None:
            self._close_file()
