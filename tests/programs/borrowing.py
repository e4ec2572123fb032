"""A process that borrows, writes and gives back without end, until it is told that it was dropped (test_mapped.py)."""

from __future__ import annotations

import ctypes
import sys
import time

from kvbm import PeerLostError, wire
from kvbm.link.ring import Ring
from programs import meeting


def carrier(name: str, port: int | str) -> wire.Mapped:
    return wire.mapped(wire.torch(name, meeting.join(port), drop_seconds=20), drop_seconds=20)


def meet(mine: wire.Mapped, peer: str) -> None:
    """Wait until both processes have connected: a process that is stopped before would let the other one wait for it."""
    mine.note(peer, b"here")
    while not mine.poll():
        time.sleep(0.001)


def main(port: str) -> None:
    mine = carrier("borrower", port)
    ring = Ring("cpu", 4096, 1, 1)
    mine.register(ring.slab)
    print(mine.card().decode(), flush=True)
    peer = mine.connect(input().encode())
    meet(mine, peer)
    is_told = False
    try:
        while True:
            lent = mine.borrow(peer, wire.Slice(0, 1 << 16))
            if lent is None:
                assert not mine.unmapped, mine.unmapped
                continue
            for value in range(1, 200):
                ctypes.memset(lent.address, value, lent.nbytes)
            mine.give_back(peer)
            if not is_told:
                is_told = True
                print("writing", flush=True)
    except PeerLostError:
        mine.close()
        ring.close()


if __name__ == "__main__":
    main(sys.argv[1])
