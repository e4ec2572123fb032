"""The protocol between the two ends of a link: short binary notes.  Any note may be lost, doubled or late.

Each note is complete in itself and may be repeated: an `Offer` until it is answered, a `Want` until the chunks have arrived.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Final, NamedTuple, NoReturn, get_args

from .._core import MAIL_NOTE
from ..errors import BindError, printable
from ..wire import NOTE_BYTES
from .secret import NOTE

_MAGIC, _VERSION = b"kn", 2

#: Magic, version, kind, and the number of the sending, which the sender has chosen for this peer.
_HEAD = struct.Struct("<2sBBQ")
_KIND_AT: Final = 3

#: Each kind of note: its number in the head, and the layout of its fields behind the head.
_FORMS: Final = {
    "Offer": (1, struct.Struct("<Q16sHIIQQQ?d?")),
    "Want": (2, struct.Struct("<QQQQQI")),
    "Put": (3, struct.Struct("<QIIIQ")),
    "Done": (4, struct.Struct("<QQ")),
    "Stop": (5, struct.Struct("<Q??")),
    "Stopped": (6, struct.Struct("<Q?")),
    "Ask": (7, struct.Struct("<QQQQQ")),
    "Table": (8, struct.Struct("<QII?")),
    "Ready": (9, struct.Struct("<QQ")),
}


_OFFER: Final = _FORMS["Offer"][1]

#: The same of each kind, with the head.
_WHOLE: Final = {name: (number, struct.Struct(_HEAD.format + form.format[1:])) for name, (number, form) in _FORMS.items()}

#: Places in an offer with a table: the number of the sending, in both; what it is of; its age.
_NUMBER: Final = slice(4, _HEAD.size)
_WHAT: Final = slice(_HEAD.size + 8, _HEAD.size + 26)
_KEY: Final = slice(_WHAT.start, _WHAT.start + 16)
_AGE: Final = slice(_HEAD.size + _OFFER.size - 9, _HEAD.size + _OFFER.size - 1)
_TABLE_NUMBER: Final = slice(_HEAD.size + _OFFER.size + 4, _HEAD.size + _OFFER.size + _HEAD.size)


def offered(note: bytes) -> tuple[int, bytes]:
    """Of a note that may be an offer, before it is read: the number of the sending, and what it is of."""
    return int.from_bytes(note[_NUMBER], "little"), note[_WHAT]


class Grant(NamedTuple):
    """Permission to send one chunk."""

    chunk: int
    #: Slot of the receiver.  The sender puts the chunk there, or the receiver pulls it into this slot.
    slot: int
    #: Number of the grant among those for this offer, from 1 on.  It is never reused.
    serial: int


class Offer(NamedTuple):
    """From the sender: these tokens and layers of a sequence are available."""

    sending: int
    plan: int  # the plan's fingerprint
    key: bytes  # 16 bytes that identify the sequence's name
    group: int  # index of the group; groups are sorted by name
    layers: range
    tokens: range
    origin: int  # origin of the sender's span
    pulls: bool  # True if the receiver pulls the chunks
    #: Seconds since the sending began.  A sending that began before a receive failed belongs to the failed receive.
    age: float = 0.0
    #: True if the receiver may copy these tokens from the sender's pool without an `Ask`: a `Table` and a `Ready` for
    #: arrival 0 follow.
    is_lent: bool = False
    table: Table | None = None  # the table, if it is small: then only the `Ready` follows

    def fields(self) -> tuple[Any, ...]:
        layers, tokens = self.layers, self.tokens
        return (
            self.plan, self.key, self.group, layers.start, layers.stop, tokens.start, tokens.stop, self.origin, self.pulls,
            self.age, self.is_lent,
        )  # fmt: skip

    def tail(self) -> bytes:
        return b"" if self.table is None else write(self.table)

    @property
    def short(self) -> Offer:
        """The same for any wire: without its table, if that is long."""
        is_long = self.table is not None and self.table.entries > MOST_OFFERED
        return self._replace(table=None) if is_long else self

    @classmethod
    def of(cls, sending: int, values: tuple[Any, ...], rest: bytes) -> Offer:
        plan, key, group, first, last, start, stop, origin, pulls, age, is_lent = values
        is_table = rest[_KIND_AT : _KIND_AT + 1] == bytes([_FORMS["Table"][0]])  # no offer in an offer
        _require(not rest or is_table, "an offer with a table")
        table = read(rest) if rest else None
        _require(table is None or table.sending == sending, "an offer with its own table")
        _require(first < last < 1 << 24 and start < stop < 1 << 48 and origin <= start, "an offer")
        _require(0 <= age < 1e12, "an age of an offer")
        return cls(sending, plan, key, group, range(first, last), range(start, stop), origin, pulls, age, is_lent, table)  # type: ignore[arg-type]


def foreseen(offer: Offer, entries: int) -> tuple[bytes, bytes, tuple[int, int]]:
    """How an offer of complete blocks is recognised before it is read, whatever its number, its age and its table.

    Returns the note up to the blocks of the table (of so many entries), the bits of it that must be so, and the two
    places of its number.
    """
    note, mask = _foreseen(offer._replace(key=bytes(16), is_lent=True), entries)
    return note[: _KEY.start] + offer.key + note[_KEY.stop :], mask, (_NUMBER.start, _TABLE_NUMBER.start)


@functools.lru_cache(64)
def _foreseen(offer: Offer, entries: int) -> tuple[bytes, bytes]:
    note = write(offer._replace(table=Table(offer.sending, 0, 0, entries, True, b"")))
    mask = bytearray(b"\xff") * len(note)
    for free in (_NUMBER, _AGE, _TABLE_NUMBER):
        mask[free] = bytes(free.stop - free.start)
    return note, bytes(mask)


class Want(NamedTuple):
    """From the receiver: it wants these tokens of an offer, and grants these chunks.

    A chunk that an earlier note listed and this one does not has arrived.
    """

    sending: int
    arrival: int
    plan: int
    tokens: range
    origin: int  # origin of the receiver's span
    #: Number of the receiver's notes about this sending.  A note that arrives late has a lower number than a newer one.
    turn: int
    grants: tuple[Grant, ...]

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.plan, self.tokens.start, self.tokens.stop, self.origin, self.turn

    def tail(self) -> bytes:
        return b"".join(_GRANT.pack(*grant) for grant in self.grants)

    @classmethod
    def of(cls, sending: int, values: tuple[Any, ...], rest: bytes) -> Want:
        arrival, plan, start, stop, origin, turn = values
        _require(len(rest) % _GRANT.size == 0 and start < stop < 1 << 48 and origin <= start, "a want")
        grants = tuple(Grant(*one) for one in _GRANT.iter_unpack(rest))
        _require(len({grant.serial for grant in grants}) == len(grants), "serials, each once")
        return cls(sending, arrival, plan, range(start, stop), origin, turn, grants)


_GRANT = struct.Struct("<III")

#: Most grants of a note.  With a secret it has its code in addition.
MOST_GRANTS = (NOTE_BYTES - NOTE - _HEAD.size - _FORMS["Want"][1].size) // _GRANT.size


class Put(NamedTuple):
    """From the sender: this chunk is in the granted slot, or, if the receiver pulls chunks, in this slot of the sender.

    It has the chunk's digest: chunks of a link have no trailer.
    """

    sending: int
    arrival: int
    serial: int
    chunk: int
    slot: int
    digest: int


class Done(NamedTuple):
    """From the receiver: all chunks have arrived and are correct.  It has the sum of their digests."""

    sending: int
    arrival: int
    digest: int


class Stop(NamedTuple):
    """From either side: the transfer has failed.

    The receiver sends it when it accepts no more chunks, and the sender when none of its puts is running.
    """

    sending: int
    arrival: int
    is_digest: bool  # True if chunks were wrong on every attempt
    by_sender: bool
    why: str

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.is_digest, self.by_sender

    def tail(self) -> bytes:
        return self.why.encode()[:1000]

    @classmethod
    def of(cls, sending: int, values: tuple[Any, ...], rest: bytes) -> Stop:
        _require(len(rest) <= 1000, "a stop")
        arrival, is_digest, by_sender = values
        return cls(sending, arrival, is_digest, by_sender, printable(rest.decode("utf-8", "replace"), 1000))


class Stopped(NamedTuple):
    """The answer to a stop.  From a sender it means: none of its puts is running, and none will follow."""

    sending: int
    arrival: int
    by_sender: bool


class Ask(NamedTuple):
    """From the receiver: it has opened the sender's pool, and copies these tokens itself.  It wants the table and the digest."""

    sending: int
    arrival: int
    plan: int
    tokens: range
    origin: int

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.plan, self.tokens.start, self.tokens.stop, self.origin

    @classmethod
    def of(cls, sending: int, values: tuple[Any, ...], rest: bytes) -> Ask:
        arrival, plan, start, stop, origin = values
        _require(not rest and start < stop < 1 << 48 and origin <= start, "an ask")
        return cls(sending, arrival, plan, range(start, stop), origin)


#: Most entries of a block table.
MOST_ENTRIES = 1 << 22


class Table(NamedTuple):
    """From the sender, to who asks: a part of its block table."""

    sending: int
    arrival: int  # the number of the `Ask`; 0 without one
    #: The entry of the table with which the part begins, and the number of entries of the table.
    first: int
    entries: int
    is_complete: bool  # True if the blocks are complete: the receiver may copy them before the sender has digested them
    blocks: bytes  # block ids, as little-endian 32-bit integers

    def fields(self) -> tuple[Any, ...]:
        return self.arrival, self.first, self.entries, self.is_complete

    def tail(self) -> bytes:
        return self.blocks

    @classmethod
    def of(cls, sending: int, values: tuple[Any, ...], rest: bytes) -> Table:
        arrival, first, entries, is_complete = values
        _require(len(rest) % 4 == 0 and bool(rest) == bool(entries), "a part of a table")
        _require(first + len(rest) // 4 <= entries <= MOST_ENTRIES, "a part of a table")
        return cls(sending, arrival, first, entries, is_complete, rest)


#: Most blocks of a `Table`.  With a secret it has its code in addition.
MOST_BLOCKS = (NOTE_BYTES - NOTE - _HEAD.size - _FORMS["Table"][1].size) // 4

#: Most blocks of the table of an `Offer`; of one that is posted through shared memory, which takes longer notes than other wires.
MOST_OFFERED = MOST_BLOCKS - (_HEAD.size + _FORMS["Offer"][1].size + 3) // 4
MOST_POSTED = MOST_OFFERED + (MAIL_NOTE - NOTE_BYTES) // 4


class Ready(NamedTuple):
    """From the sender, to who asks: the blocks are complete, and this is the digest of their cells."""

    sending: int
    arrival: int
    digest: int


Note = Offer | Want | Put | Done | Stop | Stopped | Ask | Table | Ready

#: Number of a kind → the kind, and the layout of its fields.
_KINDS: dict[int, tuple[Any, struct.Struct]] = {
    _FORMS[kind.__name__][0]: (kind, _FORMS[kind.__name__][1]) for kind in get_args(Note)
}

#: Kinds that are packed as they are, and what errors call them; those that are not, and those with more behind their fields.
_PLAIN: Final[dict[Any, str]] = {Put: "a put", Done: "a done", Stopped: "an answer to a stop", Ready: "a ready"}
_COMPOSED: Final = (Offer, Want, Stop, Ask, Table)
_WITH_TAIL: Final = (Offer, Want, Stop, Table)


def write(note: Note) -> bytes:
    """Return the note as bytes: at most `NOTE_BYTES`, but for an offer with a longer table."""
    number, layout = _WHOLE[type(note).__name__]
    fields = note.fields() if isinstance(note, _COMPOSED) else note[1:]
    data = layout.pack(_MAGIC, _VERSION, number, note.sending, *fields)
    return data + note.tail() if isinstance(note, _WITH_TAIL) else data


def read(data: bytes) -> Note:
    """Parse a note.  Raises `BindError` if the bytes are not a note, or have another version."""
    if not _HEAD.size <= len(data) <= MAIL_NOTE:
        _refuse("a note")
    magic, version, number, sending = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        _refuse("a note of a kvbm link")
    if version != _VERSION:
        _refuse(f"a note of version {_VERSION}: both sides need the same kvbm")
    if number not in _KINDS:
        _refuse("a note of a known kind")
    kind, layout = _KINDS[number]
    behind = _HEAD.size + layout.size
    if len(data) < behind:
        _refuse("a note, whole")
    values, rest = layout.unpack_from(data, _HEAD.size), data[behind:]
    found: Note
    if kind in _PLAIN:
        _require(not rest, _PLAIN[kind])
        found = kind(sending, *values)
    else:
        found = kind.of(sending, values, rest)
    return found


def _require(is_right: object, expected: str) -> None:
    if not is_right:
        _refuse(expected)


def _refuse(expected: str) -> NoReturn:
    raise BindError(f"note: expected {expected}")
