"""The ring of an endpoint: registered memory, divided into slots for packed chunks that are sent or received."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import Counter, deque
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

#: Slots each way from which on the last free one is kept for peers that have none.
_SHARED = 4

#: Chunks per call on a GPU, where the call itself takes a large part of a chunk's time.  On the CPU a call returns when all its
#: chunks are done, which would delay the first chunk.
TOGETHER = 4


class Ring:
    """Slots of one size: some for sent chunks, the others for received chunks.  Only one thread may use a ring.

    Parameters
    ----------
    device : str
        Device of the pools: ``"cpu"`` or ``"cuda:N"``.
    slot_bytes : int
        Bytes of a slot: the largest chunk and its trailer.
    sends, takes : int
        Number of slots for sent chunks, and for received chunks.

    Attributes
    ----------
    slab : Slab
        The memory, which a wire registers.
    quarantined : set of (str, int)
        Pairs of a peer and a slot to which it may still write.
    together : int
        Most slots that one call packs or unpacks.
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
        self._peer_of: dict[int, str] = {}  # taken slots
        self._taken: Counter[tuple[str, bool]] = Counter()  # by peer and way
        self.quarantined: set[tuple[str, int]] = set()

    @staticmethod
    def slot_size(chunk_bytes: int) -> int:
        """Bytes of a slot for chunks of `chunk_bytes` bytes, including the trailer: a multiple of 256."""
        return round_up(chunk_bytes, 256)

    def take(self, peer: str = "", *, sends: bool) -> int | None:
        """Take a free slot for chunks of a peer; None if the peer must wait.

        The last free slot is only for a peer that has none, so a peer that has stopped and keeps its slots stops no other.
        """
        free = self._free[not sends]
        is_last = len(free) == 1 and (self.sends if sends else self.takes) >= _SHARED
        if not free or (is_last and self._taken[peer, sends]):
            return None
        slot = free.popleft()
        self._peer_of[slot] = peer
        self._taken[peer, sends] += 1
        return slot

    def give(self, slot: int) -> None:
        """Free a slot.  No peer may write to it any more."""
        key = self._peer_of.pop(slot), slot < self.sends
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        self._free[slot >= self.sends].appendleft(slot)

    def free(self, *, sends: bool) -> int:
        return len(self._free[not sends])

    def slice(self, slot: int, nbytes: int) -> Slice:
        return Slice(slot * self.slot_bytes, nbytes)

    def array(self, slot: int, nbytes: int) -> Array:
        """The first bytes of a slot as an array, for packing and unpacking."""
        return Array(self.slab.address + slot * self.slot_bytes, (nbytes,), (1,), "uint8", self.device, owner=self)

    def close(self) -> None:
        if self._free_device is not None:
            _core.free_device(*self._free_device)
            self._free_device = None
        if self._close_file is not None:
            self._close_file()
