"""What a wire is, the laws that each one keeps, and what they share: slabs, slices, cards, checks."""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from ..errors import BindError, PeerLostError

__all__ = [
    "CARD_BYTES",
    "NOTE_BYTES",
    "Card",
    "Ends",
    "Op",
    "Peer",
    "Ready",
    "Slab",
    "Slice",
    "Wire",
    "deadline",
    "inside",
    "move",
]

#: Most bytes of a note.
NOTE_BYTES: Final = 4096
#: Most bytes of a card.
CARD_BYTES: Final = 64 << 10
_VERSION: Final = 1
_NAME = re.compile(r"[\w./:#@+-]{1,128}", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda:\d{1,4}", re.ASCII)


@dataclass(frozen=True)
class Slab:
    """Memory that peers may write and read.

    Attributes
    ----------
    address : int
        Of its first byte.
    nbytes : int
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    owner : object
        What must live as long as the slab.
    file : int
        Descriptor of the memory file that it is from the first byte to the last, for peers on this host; -1: of none.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    owner: Any = field(default=None, repr=False, compare=False)
    file: int = field(default=-1, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.address < self.address + self.nbytes <= 1 << 64 or not _DEVICE.fullmatch(self.device):
            raise BindError(
                f"slab: expected an address, bytes and a device ('cpu', 'cuda:N'), got {self.address!r:.40}, "
                f"{self.nbytes!r:.40} and {self.device!r:.40}"
            )

    @classmethod
    def of(cls, array: Any) -> Slab:
        """The memory of a contiguous, writable array of any framework."""
        from ..arrays import describe
        from ..shapes import ITEMSIZE
        from ..spans import merge_steps

        found = describe(array, "slab")
        size = ITEMSIZE.get(found.dtype, 0)
        count = math.prod(found.shape)
        if found.readonly or merge_steps(found.shape, found.strides) not in ([], [(count, size)]):
            raise BindError(
                f"slab: expected a contiguous, writable array, got {found.dtype} of shape {found.shape} and strides of "
                f"{found.strides} bytes{', read-only' if found.readonly else ''}"
            )
        return cls(found.address, int(count * size), found.device, found.owner if found.owner is not None else array)


class Slice(NamedTuple):
    """Bytes of a slab: of this side's, or of the peer's.

    Attributes
    ----------
    offset, nbytes : int
    """

    offset: int
    nbytes: int


class Op(Protocol):
    """A put or a get that is under way."""

    def query(self) -> bool:
        """Whether it is done: local memory may be used again, and all bytes are readable where they went.

        Raises
        ------
        PeerLostError
            It will never be.  Local memory may be used again; what arrived is not known.
        """


class Wire(Protocol):
    """Puts, gets and notes between this process and its peers.

    Each side registers one slab, sends its card to the other by whatever means there are, and connects.  A wire is used by
    one thread at a time.  No call waits for the peer, but `drop` where it says so.

    **Laws.**  The layer above relies on them; ``tests/test_wire.py`` holds every wire to them.

    1. *Data before note.*  A note that was given with a put is delivered after all bytes of the put are readable.
    2. *Order.*  Notes of one sender come in the order in which they were given, those of puts too, each once.
    3. *Whole.*  A note is 0 to `NOTE_BYTES` bytes, and comes as it was given.
    4. *Fence.*  After ``drop(peer)`` has returned, no write of this peer lands in the slab, and none of its notes is
       delivered.  A wire that cannot be sure in time raises `TransferTimeoutError` instead: then the peer may still write to
       what it was granted, until another ``drop`` returns, or `close`.
    5. *No hang.*  A peer that is lost is a `PeerLostError` of the next call that needs it, and of every one after that, and of
       `Op.query` of what is not done.  `poll` needs no peer.  A peer that is there and silent is not lost: deadlines
       are the caller's.
    6. *Bounds.*  Nothing outside of the registered slabs is written or read.  Both sides check where the transport lets
       them: `BindError`, before a byte moves.
    7. *Names.*  A peer that has started again has another name.  One that was dropped, or was lost, is not connected again.

    Notes of a peer that this side has not connected to yet are kept until it does.

    A wire that knows without being polled when `poll` or an `Op` has something new may also have ``on_news(call)``, and then calls
    that, from whatever thread.
    """

    def register(self, slab: Slab) -> None:
        """Make memory reachable: once, before `card`."""

    def card(self) -> bytes:
        """What a peer needs to connect: JSON of at most `CARD_BYTES`.

        It is to be trusted as far as the way it came: who has it can write to the slab.
        """

    def connect(self, card: bytes) -> str:
        """Take a peer's card and return the peer's name, which no other peer has.

        Raises
        ------
        BindError
            The card is malformed, of another version or transport, of this side itself, or of a peer that was dropped.
        """

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        """Write a slice of this side's slab to one of the peer's, of as many bytes, and then deliver the note if it has any."""

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        """Read a slice of the peer's slab into one of this side's, of as many bytes."""

    def note(self, peer: str, note: bytes) -> None:
        """Deliver a note."""

    def poll(self) -> list[tuple[str, bytes]]:
        """Return the notes that have come since the last call, with their senders.  It drives the transport: call it often."""

    def drop(self, peer: str) -> None:
        """End a connection from this side.  A peer that was dropped already, or is unknown, is none.

        Raises
        ------
        TransferTimeoutError
            See the fourth law.
        """

    def close(self) -> None:
        """End all connections and release the memory.  Nothing is written or read after it; it may be called again."""


class Ready:
    """An `Op` that was done when its call returned."""

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class Card:
    """What a card holds.

    Attributes
    ----------
    name : str
        Of the endpoint, its incarnation included.
    slab : Slab
        Memory of the other process.
    data : bytes
        The transport's own.
    """

    name: str
    slab: Slab
    data: bytes = b""

    def write(self, transport: str) -> bytes:
        """Return it as JSON."""
        fields = {
            "kvbm-wire": _VERSION,
            "transport": transport,
            "name": self.name,
            "address": self.slab.address,
            "nbytes": self.slab.nbytes,
            "device": self.slab.device,
            "data": base64.b64encode(self.data).decode(),
        }
        text = json.dumps({**fields, "sha256": _sum(fields)}).encode()
        if len(text) > CARD_BYTES:
            raise BindError(f"card of {self.name}: {len(text)} bytes, expected at most {CARD_BYTES}")
        return text

    @classmethod
    def read(cls, card: bytes, transport: str) -> Card:
        """Read what came from another process, and believe nothing of it."""
        _require_bytes(card, CARD_BYTES, "card")
        try:
            held = json.loads(card.decode())
        except (ValueError, RecursionError):
            _refuse("JSON", repr(card[:40]))
        if not isinstance(held, dict) or held.get("kvbm-wire") != _VERSION or type(held.get("kvbm-wire")) is not int:
            version = held.get("kvbm-wire") if isinstance(held, dict) else None
            _refuse(f"version {_VERSION}: both sides need the same kvbm", f"{version!r:.40}")
        if held.get("transport") != transport:
            _refuse(f"one of transport {transport!r}: both sides need the same wire", f"{held.get('transport')!r:.40}")
        kinds = {"name": str, "address": int, "nbytes": int, "device": str, "data": str}
        for key, kind in kinds.items():
            if type(held.get(key)) is not kind:
                _refuse(f"{key!r} to be of {kind.__name__}", f"{held.get(key)!r:.40}")
        if not _NAME.fullmatch(held["name"]):
            _refuse("a name of 1 to 128 letters, digits and ./:#@+-_", f"{held['name']!r:.40}")
        if held.get("sha256") != _sum(held):
            _refuse("the sum that its other fields have: it was damaged on its way", f"{held.get('sha256')!r:.80}")
        try:
            data = base64.b64decode(held["data"], validate=True)
        except (binascii.Error, ValueError):
            _refuse("'data' in base64", f"{held['data']!r:.40}")
        try:
            return cls(held["name"], Slab(held["address"], held["nbytes"], held["device"]), data)
        except BindError as error:
            raise BindError(f"card of {held['name']}: {error}") from None


def _sum(fields: dict[str, Any]) -> str:
    """Of what a card holds.  It finds accidents, before a transport takes them for an address; it proves no sender."""
    keys = ("kvbm-wire", "transport", "name", "address", "nbytes", "device", "data")
    return hashlib.sha256(json.dumps([fields[key] for key in keys]).encode()).hexdigest()


def _refuse(expected: str, got: str) -> NoReturn:
    raise BindError(f"card: expected {expected}, got {got}")


@dataclass
class Peer:
    """What a wire knows of a peer.

    Attributes
    ----------
    card : Card
    lost : str
        Why it is no more; empty while it is.
    """

    card: Card
    lost: str = ""


P = TypeVar("P", bound=Peer)


class Ends(Generic[P]):
    """What wires share: a name, a slab, the peers by name, and the checks before a byte moves."""

    transport = ""

    def __init__(self, name: str) -> None:
        self.name = f"{name}#{secrets.token_hex(4)}"
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(self.name):
            raise BindError(f"wire: expected a name of 1 to 119 letters, digits and ./:#@+-_, got {name!r:.140}")
        self._slab: Slab | None = None
        self._peers: dict[str, P] = {}

    @property
    def slab(self) -> Slab:
        """The registered memory."""
        if self._slab is None:
            raise BindError(f"{self.name}: no memory is registered; call register(slab) first, once")
        return self._slab

    def _take_slab(self, slab: Slab) -> None:
        if self._slab is not None:
            raise BindError(f"{self.name}: memory is registered already; expected one slab a wire")
        self._slab = slab

    def _read(self, card: bytes) -> Card:
        """Read the card of a peer that may be connected."""
        self.slab  # noqa: B018 - says what is missing
        held = Card.read(card, self.transport)
        if held.name == self.name:
            raise BindError(f"card: it is that of this side, {self.name}")
        known = self._peers.get(held.name)
        if known is not None and known.lost:
            raise BindError(
                f"card of {held.name}: the peer is lost ({known.lost}); it must start again, with a new card"
            )
        if known is not None and known.card != held:
            raise BindError(f"card of {held.name}: not the one that it was connected with")
        return held

    def _peer(self, peer: str) -> P:
        """A peer that is there."""
        found = self._peers.get(peer)
        if found is None:
            raise BindError(f"{self.name}: {peer!r:.140} is no peer; expected one of {sorted(self._peers)}")
        if found.lost:
            raise PeerLostError(f"{self.name}: {peer} is lost: {found.lost}", peer=peer)
        return found

    def _check(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> P:
        """Refuse a put or get that leaves a slab; return the peer."""
        found = self._peer(peer)
        self._check_note(note)
        if local[1] != remote[1]:
            raise BindError(f"{self.name} → {peer}: {local[1]} bytes here and {remote[1]} there; expected as many")
        inside(local, self.slab.nbytes, f"{self.name}: local")
        inside(remote, found.card.slab.nbytes, f"{peer}: remote")
        return found

    def _check_note(self, note: bytes) -> None:
        _require_bytes(note, NOTE_BYTES, f"{self.name}: note")


def _require_bytes(value: object, most: int, what: str) -> None:
    if not isinstance(value, bytes) or len(value) > most:
        got = f"{len(value)} of them" if isinstance(value, bytes) else f"{type(value)}"
        raise BindError(f"{what}: expected at most {most} bytes, got {got}")


def inside(part: Slice, nbytes: int, what: str) -> None:
    """Refuse a slice that is empty or leaves its slab."""
    if not (0 <= part[0] < part[0] + part[1] <= nbytes):
        raise BindError(f"{what} slice: expected bytes of a slab of {nbytes}, got {part[1]} from {part[0]}")


def move(dst: Slab, dst_offset: int, src: Slab, src_offset: int, nbytes: int) -> None:
    """Copy bytes between slabs of this process; they are there when it returns.  No other thread waits for it."""
    to, at = dst.address + dst_offset, src.address + src_offset
    if dst.device == src.device == "cpu":
        ctypes.memmove(to, at, nbytes)
        return
    import numpy as np

    from .. import _core

    device = int((dst.device if dst.device != "cpu" else src.device).partition(":")[2])
    _core.memcpy_batch(np.array([to], np.uint64), np.array([at], np.uint64), nbytes, 1, device, 0)
    _core.synchronize(device)


def deadline(seconds: float) -> Callable[[], bool]:
    """Return what tells whether so many seconds have passed since."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end
