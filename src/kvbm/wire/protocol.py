"""The interface and the laws of wires, and what all wires share: slabs, slices, cards, checks."""

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

from .._arguments import quoted, require_a, require_like, whole
from ..errors import BindError, PeerLostError

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
        Address of the first byte.
    nbytes : int
        Number of bytes.
    device : str
        ``"cpu"`` or ``"cuda:N"``.
    owner : object
        An object that the slab keeps alive, such as the array.
    file : int
        Descriptor of a memory file that is exactly this memory, for peers on this host; -1 if there is none.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    owner: Any = field(default=None, repr=False, compare=False)
    file: int = field(default=-1, repr=False, compare=False)

    def __post_init__(self) -> None:
        address, nbytes = whole(self.address) or 0, whole(self.nbytes) or 0
        is_device = isinstance(self.device, str) and _DEVICE.fullmatch(self.device)  # type: ignore[redundant-expr]
        if not 0 < address < address + nbytes <= 1 << 64 or not is_device or whole(self.file) is None:
            raise BindError(
                f"slab: expected an address, bytes and a device ('cpu', 'cuda:N'), got {quoted(self.address, 40)}, "
                f"{quoted(self.nbytes, 40)} and {quoted(self.device, 40)}"
            )

    @classmethod
    def of(cls, array: Any) -> Slab:
        """The memory of a contiguous, writable array of any framework."""
        from ..layout.loops import loops_of
        from ..layout.shapes import ITEMSIZE
        from ..memory.array_info import describe

        found = describe(array, "slab")
        size = ITEMSIZE.get(found.dtype, 0)
        count = math.prod(found.shape)
        if found.readonly or loops_of(found.shape, found.strides) not in ([], [(count, size)]):
            raise BindError(
                f"slab: expected a contiguous, writable array, got {found.dtype} of shape {found.shape} and strides of "
                f"{found.strides} bytes{', read-only' if found.readonly else ''}"
            )
        return cls(found.address, int(count * size), found.device, found.owner if found.owner is not None else array)


class Slice(NamedTuple):
    """A range of bytes of this side's slab, or of the peer's.

    Attributes
    ----------
    offset, nbytes : int
        First byte, and number of bytes.
    """

    offset: int
    nbytes: int


class Op(Protocol):
    """A put or a get that was started."""

    def query(self) -> bool:
        """True if it is done: the local memory may be reused, and all bytes are readable at the destination.

        Raises
        ------
        PeerLostError
            The peer is lost.  The local memory may be reused; it is unknown which bytes arrived.
        """


class Wire(Protocol):
    """Puts, gets and notes between this process and its peers.

    Each side registers one slab, sends its card to the other side (kvbm does not do this), and connects.  Only one thread at a
    time may use a wire.  No call waits for a peer, whether it is connected, silent or stopped, except `drop` and `close`: `drop` no
    longer than its caller says, and `close` no longer than the wire's own limits, which do not grow with the number of peers.
    `connect` may reach the peer later, by a thread of the wire or in `poll`; a peer that it does not reach is lost.

    **Laws.**  The code above wires relies on them; ``tests/wire/test_wire.py`` tests them for every wire.

    1. *Data before note.*  The note of a put is delivered after all bytes of the put are readable.
    2. *Order.*  Notes of one sender are delivered once and in the order in which they were sent, including those of puts.
    3. *Whole.*  A note has 0 to `NOTE_BYTES` bytes, and is delivered unchanged.
    4. *Fence.*  After ``drop(peer)`` has returned, no write of this peer reaches the slab, and none of its notes is
       delivered.  If a wire cannot guarantee this in time, it raises `TransferTimeoutError`: then the peer may still write to
       the memory that it was granted, until another ``drop`` or `close` returns.
    5. *No hang.*  If a peer is lost, every call that needs it raises `PeerLostError`, and so does `Op.query` of an operation that
       is not done.  `poll` needs no peer.  A silent peer is not lost: the caller must set deadlines.
    6. *Bounds.*  Nothing outside the registered slabs is written or read.  Both sides check this if the transport allows it, and
       raise `BindError` before a byte is sent.
    7. *Names.*  A peer that was restarted has another name.  A peer that was dropped or lost cannot be connected again.

    Notes of a peer to which this side has not connected yet are kept until it connects.

    A wire that is informed of new notes and finished operations without polling may have ``on_news(call)``.  It then calls
    ``call()`` for news, from any thread.  A wire whose notes come through memory may have ``watch``, ``post`` and ``expect``: see
    `Mapped`.
    """

    def register(self, slab: Slab) -> None:
        """Register the memory that peers may access.  Call it once, before `card`."""

    def card(self) -> bytes:
        """The card that a peer needs to connect: JSON of at most `CARD_BYTES` bytes.

        Send it only over a trusted channel: whoever has the card can write to the slab.
        """

    def connect(self, card: bytes) -> str:
        """Connect to the peer of a card, and return the peer's unique name.  It does not wait for the peer.

        Raises
        ------
        BindError
            The card is malformed, has another version or transport, is this side's own, or belongs to a peer that was dropped.
        """

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        """Write a slice of this side's slab to a slice of the peer's of the same size, then deliver the note if it is not empty."""

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        """Read a slice of the peer's slab into a slice of this side's of the same size."""

    def note(self, peer: str, note: bytes) -> None:
        """Send a note to a peer."""

    def poll(self) -> list[tuple[str, bytes]]:
        """Return the notes that arrived since the last call, with their senders.  It also drives the transport: call it often."""

    def drop(self, peer: str, seconds: float | None = None) -> None:
        """End a connection from this side.  For an unknown peer, or one that was dropped before, it does nothing.

        Parameters
        ----------
        peer : str
        seconds : float, optional
            How long to wait until the peer can no longer write; 0: not at all.  Default: the wire's own limit.

        Raises
        ------
        TransferTimeoutError
            See the fourth law.  From the first call on this side sends nothing to the peer, and delivers none of its notes.
        """

    def close(self) -> None:
        """End all connections and release the memory.  Nothing is written or read afterwards.  It may be called again."""


class Ready:
    """An `Op` that was done when the put or get returned."""

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class Card:
    """The contents of a card."""

    name: str  # name of the endpoint, including its incarnation
    slab: Slab  # memory of the other process
    data: bytes = b""  # data of the transport

    def write(self, transport: str) -> bytes:
        """The card as JSON."""
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
        """Read a card from another process.  All of it is checked."""
        require_bytes(card, CARD_BYTES, "card")
        try:
            held = json.loads(card.decode())
        except (ValueError, RecursionError):
            _refuse("JSON", repr(card[:40]))
        if not isinstance(held, dict) or held.get("kvbm-wire") != _VERSION or type(held.get("kvbm-wire")) is not int:
            version = held.get("kvbm-wire") if isinstance(held, dict) else None
            _refuse(f"version {_VERSION}: both sides need the same kvbm", f"{quoted(version, 40)}")
        if held.get("transport") != transport:
            _refuse(f"one of transport {transport!r}: both sides need the same wire", f"{quoted(held.get('transport'), 40)}")
        kinds = {"name": str, "address": int, "nbytes": int, "device": str, "data": str}
        for key, kind in kinds.items():
            if type(held.get(key)) is not kind:
                _refuse(f"{key!r} to be of {kind.__name__}", f"{quoted(held.get(key), 40)}")
        if not _NAME.fullmatch(held["name"]):
            _refuse("a name of 1 to 128 letters, digits and ./:#@+-_", f"{quoted(held['name'], 40)}")
        if held.get("sha256") != _sum(held):
            _refuse("the checksum of its other fields: the card was damaged on its way", f"{quoted(held.get('sha256'), 80)}")
        try:
            data = base64.b64decode(held["data"], validate=True)
        except (binascii.Error, ValueError):
            _refuse("'data' in base64", f"{quoted(held['data'], 40)}")
        try:
            return cls(held["name"], Slab(held["address"], held["nbytes"], held["device"]), data)
        except BindError as error:
            raise BindError(f"card of {held['name']}: {error}") from None


def _sum(fields: dict[str, Any]) -> str:
    """The checksum of a card.  It detects damage before a transport uses the card's address; it does not authenticate."""
    keys = ("kvbm-wire", "transport", "name", "address", "nbytes", "device", "data")
    return hashlib.sha256(json.dumps([fields[key] for key in keys]).encode()).hexdigest()


def _refuse(expected: str, got: str) -> NoReturn:
    raise BindError(f"card: expected {expected}, got {got}")


@dataclass
class Peer:
    """A wire's record of a peer."""

    card: Card
    lost: str = ""  # why the peer is lost; empty while it is connected


def require_wire(what: str, given: Any) -> None:
    """Raise `BindError` unless the object has the methods of a `Wire`."""
    methods = ("register", "card", "connect", "put", "get", "note", "poll", "drop", "close")
    require_like(what, given, methods, "a wire, such as kvbm.wire.nixl(name)", methods=True)


P = TypeVar("P", bound=Peer)


class Ends(Generic[P]):
    """The common part of wires: a name, a slab, the peers by name, and checks of arguments."""

    transport = ""

    def __init__(self, name: str) -> None:
        require_a(str, "wire: name", name, "a name")
        self.name = f"{name}#{secrets.token_hex(4)}"
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(self.name):
            raise BindError(f"wire: expected a name of 1 to 119 letters, digits and ./:#@+-_, got {quoted(name, 140)}")
        self.is_closed = False
        self._slab: Slab | None = None
        self._peers: dict[str, P] = {}

    @property
    def slab(self) -> Slab:
        """The registered memory."""
        if self._slab is None:
            raise BindError(f"{self.name}: no memory is registered; call register(slab) first, once")
        return self._slab

    def register(self, slab: Slab) -> None:
        if self._slab is not None:
            raise BindError(f"{self.name}: memory is registered already; expected one slab per wire")
        self._slab = slab

    def card(self) -> bytes:
        return Card(self.name, self.slab).write(self.transport)

    def _read(self, card: bytes) -> Card:
        """Read the card of a peer, and check that it may be connected."""
        self.slab  # noqa: B018 - says what is missing
        if self.is_closed:
            raise BindError(f"{self.name}: this side is closed; expected a call before close, or a new wire")
        held = Card.read(card, self.transport)
        if held.name == self.name:
            raise BindError(f"card: expected the card of a peer, got that of this side, {self.name}")
        known = self._peers.get(held.name)
        if known is not None and known.lost:
            raise BindError(
                f"card of {held.name}: the peer is lost ({known.lost}); it must start again, with a new card"
            )
        if known is not None and known.card != held:
            raise BindError(f"card of {held.name}: expected the card that it was connected with, got another one")
        return held

    def _peer(self, peer: str) -> P:
        """A connected peer; raises an error if it is lost or unknown."""
        found = self._peers.get(peer)
        if found is None:
            raise BindError(f"{self.name}: {quoted(peer, 140)} is not a peer; expected one of {sorted(self._peers)}")
        if found.lost:
            raise PeerLostError(f"{self.name}: {peer} is lost: {found.lost}", peer=peer)
        return found

    def _check(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> P:
        """Check that a put or get stays inside both slabs; return the peer."""
        found = self._peer(peer)
        self._check_note(note)
        if local[1] != remote[1]:
            raise BindError(f"{self.name} → {peer}: {local[1]} bytes on this side and {remote[1]} on the other; expected the same")
        inside(local, self.slab.nbytes, f"{self.name}: local")
        inside(remote, found.card.slab.nbytes, f"{peer}: remote")
        return found

    def _check_note(self, note: bytes) -> None:
        require_bytes(note, NOTE_BYTES, f"{self.name}: note")


def require_bytes(value: object, most: int, what: str) -> None:
    """Raise `BindError` unless a value is bytes, and not too many."""
    if not isinstance(value, bytes) or len(value) > most:
        got = f"{len(value)} of them" if isinstance(value, bytes) else f"{type(value)}"
        raise BindError(f"{what}: expected at most {most} bytes, got {got}")


def inside(part: Slice, nbytes: int, what: str) -> None:
    """Raise `BindError` for a slice that is empty or leaves its slab."""
    if not (0 <= part[0] < part[0] + part[1] <= nbytes):
        raise BindError(f"{what} slice: expected bytes of a slab of {nbytes}, got {part[1]} from {part[0]}")


def move(dst: Slab, dst_offset: int, src: Slab, src_offset: int, nbytes: int) -> None:
    """Copy bytes between slabs of this process and wait for the copy.  It does not block other threads."""
    to, at = dst.address + dst_offset, src.address + src_offset
    if dst.device == src.device == "cpu":
        ctypes.memmove(to, at, nbytes)
        return
    import numpy as np

    from .. import _core
    from ..system.machine import device_of

    device = device_of(dst.device if dst.device != "cpu" else src.device)
    _core.memcpy_batch(np.array([to], np.uint64), np.array([at], np.uint64), nbytes, 1, device, 0)
    _core.synchronize(device)


def deadline(seconds: float) -> Callable[[], bool]:
    """Return a function that is True after `seconds` seconds."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end
