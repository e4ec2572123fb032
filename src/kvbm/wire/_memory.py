"""`memory`: a wire between endpoints of one process.  It is the reference implementation of the laws of `Wire`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .._arguments import require_a
from ..errors import BindError, PeerLostError
from .protocol import Ends, Peer, Ready, Slice, move


class Hub:
    """The registry in which endpoints of one process find each other."""

    def __init__(self) -> None:
        self.ends: dict[str, _Memory] = {}


_HUB = Hub()


def memory(name: str, hub: Hub | None = None) -> _Memory:
    """A wire inside one process, between threads or within one thread, for memory of the CPU and of the process's GPUs.

    Parameters
    ----------
    name : str
        Name of this end.
    hub : Hub, optional
        Only ends of the same hub can connect.  Default: one hub for the whole process.

    Examples
    --------
    >>> import numpy as np
    >>> from kvbm import wire
    >>> here, there = wire.memory("here"), wire.memory("there")
    >>> slabs = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    >>> here.register(wire.Slab.of(slabs[0])), there.register(wire.Slab.of(slabs[1]))
    (None, None)
    >>> peer, _ = here.connect(there.card()), there.connect(here.card())
    >>> here.put(peer, wire.Slice(4, 4), wire.Slice(0, 4), b"four bytes").query()
    True
    >>> there.poll()[0][1], slabs[1].tolist()
    (b'four bytes', [4, 5, 6, 7, 0, 0, 0, 0])
    """
    return _Memory(name, _HUB if hub is None else hub)


class _Memory(Ends[Peer]):
    """An endpoint.  Its lock is held while its slab or inbox changes, so `drop` waits for a write of the peer."""

    transport = "memory"

    def __init__(self, name: str, hub: Hub) -> None:
        super().__init__(name)
        require_a(Hub, "hub", hub, "a kvbm.wire.Hub")
        self._hub = hub
        self._lock = threading.Lock()
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._news: Callable[[], object] = int
        hub.ends[self.name] = self

    def connect(self, card: bytes) -> str:
        peer_card = self._read(card)
        there = self._hub.ends.get(peer_card.name)
        if there is None or there.slab != peer_card.slab:
            raise BindError(f"card of {peer_card.name}: expected an end of this hub, found none of this name")
        with self._lock:
            self._peers.setdefault(peer_card.name, Peer(peer_card))
        return peer_card.name

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Ready:
        self._check(peer, local, remote, note)
        there = self._open(peer)
        with there._lock:
            there._admit(self.name)
            move(there.slab, remote[0], self.slab, local[0], local[1])
            if note:
                there._inbox.append((self.name, note))
        if note:
            there._news()
        return Ready()

    def get(self, peer: str, local: Slice, remote: Slice) -> Ready:
        self._check(peer, local, remote)
        there = self._open(peer)
        with there._lock:
            there._admit(self.name)
            move(self.slab, local[0], there.slab, remote[0], local[1])
        return Ready()

    def note(self, peer: str, note: bytes) -> None:
        self._check_note(note)
        self._peer(peer)
        there = self._open(peer)
        with there._lock:
            there._admit(self.name)
            there._inbox.append((self.name, note))
        there._news()

    def on_news(self, call: Callable[[], object]) -> None:
        self._news = call

    def poll(self) -> list[tuple[str, bytes]]:
        with self._lock:
            came = [note for note in self._inbox if note[0] in self._peers]
            self._inbox = deque(note for note in self._inbox if note[0] not in self._peers)
        return [note for note in came if not self._peers[note[0]].lost]

    def drop(self, peer: str, seconds: float | None = None) -> None:  # noqa: ARG002
        require_a(str, "peer", peer, "a peer's name, as connect() returned it")
        with self._lock:
            if peer in self._peers:
                self._peers[peer].lost = self._peers[peer].lost or "it was dropped"

    def close(self) -> None:
        self.is_closed = True
        with self._lock:
            self._hub.ends.pop(self.name, None)
            for peer in self._peers.values():
                peer.lost = peer.lost or "this side is closed"

    def _open(self, peer: str) -> _Memory:
        """The other end; raises an error if it is lost."""
        there = self._hub.ends.get(peer)
        if there is None:
            self._peers[peer].lost = "it is closed"
            self._peer(peer)
        assert there is not None
        return there

    def _admit(self, sender: str) -> None:
        """Raise an error for a sender that was dropped.  Its operation is not done."""
        known = self._peers.get(sender)
        if known is not None and known.lost:
            why = f"{self.name} has ended the connection: {known.lost}"
            if (its := self._hub.ends.get(sender)) is not None:
                its._peers[self.name].lost = why
            raise PeerLostError(f"{sender}: {self.name} is lost: {why}", peer=self.name)
        if self.name not in self._hub.ends:
            raise PeerLostError(f"{sender}: {self.name} is lost: it is closed", peer=self.name)
