"""The ring of an endpoint: registered memory, divided into slots for packed chunks that are sent or received."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .. import _core
from ..errors import BindError, KvbmError
from ..layout.shapes import round_up
from ..memory.array_info import Array
from ..system.machine import device_of
from ..system.memory_files import memory_file
from ..wire import Slab, Slice
from .chunk import MOST

#: Chunks per call on a GPU, where the call itself takes a large part of a chunk's time.  On the CPU a call returns when all its
#: chunks are done, which would delay the first chunk.
TOGETHER = 4

#: Slots of a ring, half to send and half to receive, if the caller does not give its size.
_SLOTS = 16

#: Bytes of the largest chunk on a GPU with so much memory; smaller messages are not cut there.  It is what a GPU copies while the
#: host handles one more chunk, and a slot is free again only some 0.5 ms after it was granted.
MOST_ON_GPU, _LARGE_GPU = 64 << 20, 128 << 30


def sizes_of(device: str, chunk_bytes: int | None = None, ring_bytes: int | None = None) -> tuple[int, int]:
    """Bytes of the largest chunk, and of the ring, if some of them are not given.  ``docs/howto/connect.md`` has the defaults."""
    most, memory = MOST, 0
    if device != "cpu":
        with contextlib.suppress(KvbmError):  # of a GPU that is not there: whoever allocates on it says so
            memory = _core.device_info(device_of(device))["memory"]
    while most < MOST_ON_GPU and memory * MOST_ON_GPU >= _LARGE_GPU * 2 * most:
        most *= 2
    if ring_bytes is None:
        ring_bytes = _SLOTS * most
    return chunk_bytes or min(most, max(MOST, ring_bytes // _SLOTS)), ring_bytes


class Ring:
    """Slots of one size: some for sent chunks, the others for received chunks.  Only one thread may use a ring."""

    def __init__(self, device: str, slot_bytes: int, sends: int, takes: int) -> None:
        if min(sends, takes) < 1:
            raise BindError(f"ring: expected room for a slot each way, got {sends} and {takes} of {slot_bytes} bytes")
        self.device, self.slot_bytes = device, slot_bytes
        self.together = 1 if device == "cpu" else TOGETHER  # slots that one call packs or unpacks, at most
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
            number = device_of(device)
            address = _core.alloc_device(number, nbytes)
            self._free_device = (number, address)
        self.slab = Slab(address, nbytes, device, self, file)  # which a wire registers
        self._free = deque(range(sends)), deque(range(sends, sends + takes))
        self._peer_of: dict[int, str] = {}  # taken slots
        self._taken: Counter[tuple[str, bool]] = Counter()  # by peer and way
        self._peers: set[str] = set()
        self._with: Counter[bool] = Counter()  # connected peers that have a slot, by way
        self.quarantined: set[tuple[str, int]] = set()  # peers and slots to which they may still write

    @staticmethod
    def slot_size(chunk_bytes: int) -> int:
        """Bytes of a slot for chunks of `chunk_bytes` bytes: a multiple of 256."""
        return round_up(chunk_bytes, 256)

    def meet(self, peers: Iterable[str]) -> None:
        """Keep a slot each way free for each of these peers, from now on until `part`."""
        for peer in set(peers) - self._peers:
            self._peers.add(peer)
            self._with.update(sends for sends in (False, True) if (peer, sends) in self._taken)

    def part(self, peer: str) -> None:
        """A peer is lost: no slot is kept free for it.  Those that it has stay taken."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._with.subtract(sends for sends in (False, True) if (peer, sends) in self._taken)

    def require_room(self, more: int) -> None:
        """Raise `BindError` for another peer of a ring with a single slot each way: a peer that stops would keep it."""
        peers = len(self._peers | {peer for peer, _ in self._taken}) + more
        if more and peers > 1 and min(self.sends, self.takes) < 2:
            raise BindError(
                f"ring: {peers} peers and one slot each way: a peer that stops would keep the others waiting; expected 2 or more"
            )

    def take(self, peer: str = "", *, sends: bool) -> int | None:
        """Take a free slot for chunks of a peer; None if the peer must wait.

        A peer without a slot gets any free one.  A peer that has slots gets one more only if a free one is left for each connected
        peer without any, and for a peer that connects later, and if it has less than twice as many as are free beyond those of the
        connected peers.  So with as many slots as peers, each of them has or gets one, however many of the others have stopped and
        keep theirs.  With fewer, from two on, some may stop, and the other peers take turns.
        """
        free, has = self._free[not sends], self._taken.get((peer, sends), 0)
        without = len(self._peers) - self._with[sends]
        if not free or (has and (len(free) <= max(without, 1) or has >= 2 * (len(free) - without))):
            return None
        slot = free.popleft()
        self._peer_of[slot] = peer
        self._taken[peer, sends] += 1
        self._with[sends] += not has and peer in self._peers
        return slot

    def give(self, slot: int) -> None:
        """Free a slot.  No peer may write to it any more."""
        key = peer, sends = self._peer_of.pop(slot), slot < self.sends
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
            self._with[sends] -= peer in self._peers
        self._free[slot >= self.sends].appendleft(slot)

    def free(self, *, sends: bool) -> int:
        return len(self._free[not sends])

    def slice(self, slot: int, nbytes: int) -> Slice:
        return Slice(slot * self.slot_bytes, nbytes)

    def array(self, slot: int, nbytes: int) -> Array:
        """The first bytes of a slot as an array, for packing and unpacking."""
        return self.array_at(self.slab.address + slot * self.slot_bytes, nbytes)

    def array_at(self, address: int, nbytes: int) -> Array:
        """Bytes of a slot of this ring or of a peer's."""
        return Array(address, (nbytes,), (1,), "uint8", self.device, owner=self)

    def close(self) -> None:
        if self._free_device is not None:
            _core.free_device(*self._free_device)
            self._free_device = None
        if self._close_file is not None:
            self._close_file()
