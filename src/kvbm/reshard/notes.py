"""What the two ends of a link say to each other: short binary notes, of which any may be lost, doubled or late.

Each is whole by itself and may be said again: an `Offer` until it is answered, a `Want` until the chunks are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import BindError
from ..wire import NOTE_BYTES

__all__ = ["Done", "Grant", "Note", "Offer", "Put", "Stop", "Stopped", "Want", "read", "write"]

_MAGIC, _VERSION = b"kn", 1

#: Magic, version, kind, and the number that the sender gave to what it sends to this peer.
_HEAD = struct.Struct("<2sBBQ")


class Grant(NamedTuple):
    """A chunk that may come.

    Attributes
    ----------
    chunk : int
    slot : int
        Of the receiver, where the sender writes it; pulled ones are fetched into it.
    serial : int
        From 1 on, of what the receiver grants of this offer; never the same again.
    """

    chunk: int
    slot: int
    serial: int


@dataclass(frozen=True)
class Offer:
    """Sender: there are these tokens and layers of a sequence.

    Attributes
    ----------
    sending : int
    plan : int
        The plan's fingerprint.
    key : bytes
        16 bytes that stand for the sequence's name.
    group : int
        Which of the groups, in the order of their names.
    layers, tokens : range
    origin : int
        Of the sender's span.
    pulls : bool
        Whether the receiver fetches chunks.
    age : float
        Seconds since the sending began: those that are older than a receive's failure belong to it.
    """

    sending: int
    plan: int
    key: bytes
    group: int
    layers: range
    tokens: range
    origin: int
    pulls: bool
    age: float = 0.0

    KIND: ClassVar[int] = 1
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<Q16sHIIQQQ?d")

    def fields(self) -> tuple[Any, ...]:
        layers, tokens = self.layers, self.tokens
        return (
            self.plan, self.key, self.group, layers.start, layers.stop, tokens.start, tokens.stop, self.origin, self.pulls,
            self.age,
        )  # fmt: skip

    @classmethod
    def of(cls, sending: int, told: tuple[Any, ...], rest: bytes) -> Offer:
        plan, key, group, first, last, start, stop, origin, pulls, age = told
        _require(not rest and first < last < 1 << 24 and start < stop < 1 << 48 and origin <= start, "an offer")
        _require(0 <= age < 1e12, "an age of an offer")
        return cls(sending, plan, key, group, range(first, last), range(start, stop), origin, pulls, age)


@dataclass(frozen=True)
class Want:
    """Receiver: of an offer these tokens are wanted, and these chunks may come; what it named before and does not now has come.

    Attributes
    ----------
    sending, arrival, plan : int
    tokens : range
    origin : int
        Of the receiver's span.
    turn : int
        Counts what the receiver says of this sending: what comes late is of a lower one.
    grants : tuple of Grant
    """

    sending: int
    arrival: int
    plan: int
    tokens: range
    origin: int
    turn: int
    grants: tuple[Grant, ...]

    KIND: ClassVar[int] = 2
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<QQQQQI")

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.plan, self.tokens.start, self.tokens.stop, self.origin, self.turn

    def tail(self) -> bytes:
        return b"".join(_GRANT.pack(*grant) for grant in self.grants)

    @classmethod
    def of(cls, sending: int, told: tuple[Any, ...], rest: bytes) -> Want:
        arrival, plan, start, stop, origin, turn = told
        _require(len(rest) % _GRANT.size == 0 and start < stop < 1 << 48 and origin <= start, "a want")
        grants = tuple(Grant(*one) for one in _GRANT.iter_unpack(rest))
        _require(len({grant.serial for grant in grants}) == len(grants), "serials, each once")
        return cls(sending, arrival, plan, range(start, stop), origin, turn, grants)


_GRANT = struct.Struct("<III")

#: Grants that a note has room for.
MOST_GRANTS = (NOTE_BYTES - _HEAD.size - Want.LAYOUT.size) // _GRANT.size


@dataclass(frozen=True)
class Put:
    """Sender: this chunk lies in the slot that was granted, or, where it is pulled, in this slot of the sender."""

    sending: int
    arrival: int
    serial: int
    chunk: int
    slot: int

    KIND: ClassVar[int] = 3
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<QIII")

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.serial, self.chunk, self.slot

    @classmethod
    def of(cls, sending: int, told: tuple[Any, ...], rest: bytes) -> Put:
        _require(not rest, "a put")
        return cls(sending, *told)


@dataclass(frozen=True)
class Done:
    """Receiver: all chunks are there and right, and this is the sum of their digests."""

    sending: int
    arrival: int
    digest: int

    KIND: ClassVar[int] = 4
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<QQ")

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.digest

    @classmethod
    def of(cls, sending: int, told: tuple[Any, ...], rest: bytes) -> Done:
        _require(not rest, "a done")
        return cls(sending, *told)


@dataclass(frozen=True)
class Stop:
    """Either: it comes to nothing.  The receiver says so once it takes no more; the sender once none of its puts is under way.

    Attributes
    ----------
    sending, arrival : int
    is_digest : bool
        Whether chunks were wrong each time.
    by_sender : bool
    why : str
    """

    sending: int
    arrival: int
    is_digest: bool
    by_sender: bool
    why: str

    KIND: ClassVar[int] = 5
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<Q??")

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.is_digest, self.by_sender

    def tail(self) -> bytes:
        return self.why.encode()[:1000]

    @classmethod
    def of(cls, sending: int, told: tuple[Any, ...], rest: bytes) -> Stop:
        _require(len(rest) <= 1000, "a stop")
        arrival, is_digest, by_sender = told
        return cls(sending, arrival, is_digest, by_sender, rest.decode("utf-8", "replace"))


@dataclass(frozen=True)
class Stopped:
    """The answer to a stop.  Of a sender: none of its puts is under way, and none comes."""

    sending: int
    arrival: int
    by_sender: bool

    KIND: ClassVar[int] = 6
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<Q?")

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.by_sender

    @classmethod
    def of(cls, sending: int, told: tuple[Any, ...], rest: bytes) -> Stopped:
        _require(not rest, "an answer to a stop")
        return cls(sending, *told)


Note = Offer | Want | Put | Done | Stop | Stopped

_KINDS: dict[int, Any] = {kind.KIND: kind for kind in (Offer, Want, Put, Done, Stop, Stopped)}


def write(note: Note) -> bytes:
    """Return the note as bytes, at most `NOTE_BYTES`."""
    tail = note.tail() if isinstance(note, Want | Stop) else b""
    return _HEAD.pack(_MAGIC, _VERSION, note.KIND, note.sending) + note.LAYOUT.pack(*note.fields()) + tail


def read(data: bytes) -> Note:
    """Return the note that these bytes are.

    Raises
    ------
    BindError
        They are none, or one of another version.
    """
    _require(len(data) >= _HEAD.size, "a note")
    magic, version, number, sending = _HEAD.unpack_from(data)
    _require(magic == _MAGIC, "a note of a kvbm link")
    _require(version == _VERSION, f"a note of version {_VERSION}: both sides need the same kvbm")
    _require(number in _KINDS, "a note of a known kind")
    kind = _KINDS[number]
    _require(len(data) >= _HEAD.size + kind.LAYOUT.size, "a note, whole")
    told = kind.LAYOUT.unpack_from(data, _HEAD.size)
    found: Note = kind.of(sending, told, data[_HEAD.size + kind.LAYOUT.size :])
    return found


def _require(is_right: object, expected: str) -> None:
    if not is_right:
        raise BindError(f"note: expected {expected}")
