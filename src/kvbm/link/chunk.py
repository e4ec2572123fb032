"""Wire format 1: how a message is cut into chunks, and the trailer of each.  ``docs/reference/wire.md`` is the specification.

Both sides compute it before a byte is sent, from the plan, the tokens, the layers, and the size of the largest chunk.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .._arguments import quoted, whole
from ..errors import BindError, DigestError
from ..layout.shapes import ITEMSIZE, round_up
from ..reshard.messages import Message, Resharding, require_layers, require_made
from ..reshard.sequence import Parts, Rank, Span, split
from ..reshard.strips import ONE_TOKEN, Unit

VERSION = 1

#: Bytes of a trailer.
TRAILER = 64

#: Default bytes of the largest chunk, without its trailer.
MOST = 16 << 20

#: A message is cut into about four chunks, so that one is packed while another is sent, but not into smaller ones than this, by
#: default.
LEAST, _PARTS = 1 << 20, 4

#: Most tokens of a sequence without a table: each needs some bytes of memory here.
_MOST_TOKENS = 1 << 28

_MAGIC = b"KVBM"
_LAYOUT = struct.Struct("<Q4sHHQQQHHIIIII")
_LIMIT = 1 << 32


class Trailer(NamedTuple):
    """The last 64 bytes of a chunk, little endian, in this order.

    Attributes
    ----------
    digest : int
        kvbm-digest-1 of the chunk's contents, at the model's coordinates (64 bits).
    magic : bytes
        ``KVBM``.
    version, reserved : int
        1 and 0 (16 bits each).
    plan, key, epoch : int
        The plan's fingerprint, the sequence's `key_of`, and the number of the attempt to send (64 bits each).
    source, destination : int
        Ranks (16 bits each).
    mark : int
        `mark_of` the tokens, origins, layers and sizes of chunks (32 bits).
    chunk, chunks : int
        Number of this chunk in the message, from 0, and the number of chunks (32 bits each).
    units, nbytes : int
        Whole units in the chunk, and bytes before the trailer (32 bits each).
    """

    digest: int
    magic: bytes
    version: int
    reserved: int
    plan: int
    key: int
    epoch: int
    source: int
    destination: int
    mark: int
    chunk: int
    chunks: int
    units: int
    nbytes: int

    @classmethod
    def read(cls, data: Any, where: object = "a chunk") -> Trailer:
        """Read a trailer from 64 bytes.

        Raises
        ------
        BindError
            `data` does not have 64 bytes, or is not a trailer of this version.
        """
        try:
            held = memoryview(data)
        except (TypeError, ValueError, BufferError):
            raise BindError(f"{where}: trailer: expected {TRAILER} bytes, got {quoted(data)}") from None
        if held.nbytes != TRAILER:
            raise BindError(f"{where}: trailer: expected {TRAILER} bytes, got {held.nbytes}")
        found = cls(*_LAYOUT.unpack(held.tobytes()))
        if found[1:4] == (_MAGIC, VERSION, 0):
            return found
        for name, expected in (("magic", _MAGIC), ("version", VERSION), ("reserved", 0)):
            if (got := getattr(found, name)) != expected:
                raise BindError(
                    f"{where}: {name}: expected {expected!r}, got {got!r}; it is not a chunk of wire format {VERSION}"
                )
        return found

    @classmethod
    def of(cls, chunk: Chunk, *, plan: int, key: int, epoch: int, mark: int, digest: int = 0) -> Trailer:
        """The trailer of a chunk."""
        return cls(
            digest, _MAGIC, VERSION, 0, plan, key, epoch, chunk.message.src, chunk.message.dst, mark, chunk.number, chunk.of,
            len(chunk.units), chunk.nbytes,
        )  # fmt: skip

    def write(self) -> bytes:
        """The 64 bytes of the trailer; `BindError` if a number does not fit its field."""
        try:
            return _LAYOUT.pack(*self)
        except (struct.error, TypeError) as error:
            raise BindError(f"trailer: expected numbers that fit their fields, got {quoted(self, 400)} ({error})") from None

    def require(self, expected: Trailer, where: object = "a chunk") -> None:
        """Raise `BindError` for the first field that is not as expected.  The digest is not compared."""
        given: Any = expected
        if not isinstance(given, Trailer):
            raise BindError(f"{where}: expected a kvbm.reshard.Trailer to compare with, got {quoted(expected)}")
        if self[1:] == expected[1:]:
            return
        for name in self._fields[1:]:
            if (got := getattr(self, name)) != (known := getattr(expected, name)):
                raise BindError(f"{where}: {name}: expected {_field_text(name, known)}, got {_field_text(name, got)}")

    def require_digest(self, found: int, where: object = "a chunk", *, written: bool = False) -> None:
        """Raise `DigestError` if the chunk that arrived has another digest than the one that was sent."""
        require_digest(self.digest, found, where, written=written)


def require_digest(sent: int, found: int, where: object, *, written: bool) -> None:
    """Raise `DigestError` if a chunk that arrived has another digest than the one that was sent."""
    if found != sent:
        raise DigestError(
            f"{where}: digest: expected {sent:#018x}, got {found:#018x}; "
            + ("its blocks were written: do not use them" if written else "none of it was written")
        )


def _field_text(name: str, value: Any) -> str:
    return f"{value:#018x}" if name in ("plan", "key", "epoch") else repr(value)


class Chunk(NamedTuple):
    """A part of a message that is sent as one: whole units, then single tokens, then the trailer.

    Attributes
    ----------
    message : Message
        The message, limited to the layers that are sent.
    number, of : int
        Number of the chunk in the message, and the number of chunks.
    units, tokens : range
        The message's units and single tokens in this chunk.
    nbytes : int
        Bytes without the trailer; a multiple of 16.
    """

    message: Message
    number: int
    of: int
    units: range
    tokens: range
    nbytes: int

    @property
    def size(self) -> int:
        """Bytes including the trailer."""
        return self.nbytes + TRAILER

    def __str__(self) -> str:
        held = [f"units {_span(self.units)}"] if self.units else []
        held += [f"single tokens {_span(self.tokens)}"] if self.tokens else []
        layers = [x for meeting in self.message.l for x in meeting.coordinates("first")]
        held.append(f"layers {_span(range(layers[0], layers[-1] + 1))}")
        return f"chunk {self.number} of {self.of} from rank {self.message.src} to rank {self.message.dst} ({', '.join(held)})"


def _span(some: range) -> str:
    return f"{some[0]}" if len(some) == 1 else f"{some[0]}–{some[-1]}"


@lru_cache(1024)
def key_of(name: str | bytes) -> int:
    """The number that stands for a sequence's name in a trailer: the first 8 bytes of its SHA-256, little endian.

    Raises
    ------
    BindError
        The text cannot be encoded as UTF-8 (half a surrogate pair).
    """
    try:
        data = name.encode() if isinstance(name, str) else name
    except UnicodeEncodeError as error:
        raise BindError(f"key: expected text that UTF-8 has, got {quoted(name)} ({error.reason})") from None
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def mark_of(tokens: range, origins: tuple[int, int], layers: range, most: int, least: int = LEAST) -> int:
    """A hash of how a sequence was cut: the first 4 bytes, little endian, of the SHA-256 of seven or eight 64-bit integers.

    The integers are the first token and the last plus one, the origins of source and destination, the first layer and the last
    plus one, the bytes of the largest chunk, and `least` if it is not `LEAST`.
    """
    sizes = (most,) if least == LEAST else (most, least)
    some = tokens.start, max(tokens.start, tokens.stop), *origins, layers.start, layers.stop, *sizes
    data = struct.pack(f"<{len(some)}Q", *some)
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "little")


def chunks(
    made: Resharding, message: Message, tokens: range, *, origins: tuple[int, int] = (0, 0),
    layers: range | None = None, most: int = MOST, least: int = LEAST,
) -> tuple[Chunk, ...]:  # fmt: skip
    """The chunks of a message, for a cache with one plane and no cast.  For others use a `Packer`.

    Parameters
    ----------
    made : Resharding
        The resharding.
    message : Message
        One of its messages.
    tokens : range
        Positions of the sequence.
    origins : (int, int)
        The positions at which the block tables of the source's and of the destination's span begin.
    layers : range, optional
        Layers of the model.  Default: all.
    most : int
        Bytes of the largest chunk, without its trailer.
    least : int
        A message of at most so many bytes is one chunk, unless `most` is smaller.

    Returns
    -------
    tuple of Chunk
        The chunks; empty if the message has none of these tokens and layers.

    Raises
    ------
    BindError
        A unit is larger than `most`, tokens, origins or layers are out of range, or the plan has a cast.
    """
    require_made(made)
    if made.cast is not None:
        raise BindError(f"{made.title}: the layouts say what chunks hold after a cast: make them with a Packer and Cut")
    given: Any = message
    if not isinstance(given, Message) or given not in made.messages:
        raise BindError(f"message: expected one of the {len(made.messages)} of {made.title}, got {quoted(message)}")
    require_layers(layers, made.src.model.nl)
    limit, least = limit_of(most), limit_of(least, "least")
    both: Any = origins
    if not isinstance(both, Sequence) or len(both) != 2:
        raise BindError(f"origins: expected the source's and the destination's, got {quoted(origins)}")
    turns = made.sends[message.src].t, made.takes[message.dst].t
    src_origin, dst_origin = (Span([], tokens, origin).origin for origin in origins)
    if len(tokens) > _MOST_TOKENS:
        raise BindError(f"tokens: expected at most {_MOST_TOKENS:,} of a sequence, got {quoted(tokens)}")
    Rank(f"{made.src.name} rank {message.src}", turns[0], made.src.nt, 0).require_origin(src_origin)
    Rank(f"{made.dst.name} rank {message.dst}", turns[1], made.dst.nt, 0).require_origin(dst_origin)
    shift = src_origin - dst_origin
    messages = made.refit(made.cuts, shift).messages if shift else made.messages
    message = messages[made.messages.index(message)]
    some = message if layers is None else message.of_layers(layers)
    if some is None:
        return ()
    model = made.src.model

    def nbytes(unit: Unit) -> int:
        held = unit.meeting.size if unit.meeting else 0
        return round_up(some.layers * some.heads * model.no * model.hd * held * ITEMSIZE[model.dtype] // model.pack, 16)

    parts = split(message.t, *turns, tokens, src_origin)
    return cut(some, parts, (nbytes(message.t), nbytes(ONE_TOKEN)), limit, least)


def limit_of(given: Any, name: str = "most") -> int:
    """Bytes of a chunk; `BindError` if it is not a number that fits into a trailer."""
    limit = whole(given)
    if limit is None or not 0 < limit < _LIMIT:
        raise BindError(f"{name}: expected bytes of a chunk, below 2**32, got {quoted(given)}")
    return limit


def cut(message: Message, parts: Parts, sizes: Sequence[int], most: int, least: int = LEAST) -> tuple[Chunk, ...]:
    """Cut a message into chunks with equal numbers of whole units.  Single tokens are in the last chunk, or in one after it.

    `sizes` are the bytes of a unit and of a single token; `most` and `least` as for `chunks`.  Raises `BindError` if a
    unit is larger than `most`.
    """
    limit = limit_of(most)
    counts = parts.units.size, parts.tokens.size
    for count, size, what in zip(counts, sizes, ("unit", "single token"), strict=True):
        if count and size > limit:
            raise BindError(
                f"rank {message.src} → rank {message.dst}: a {what} takes {size} bytes, and a chunk at most {limit}: expected "
                f"most={size} (chunk_bytes= of an Endpoint) or more; or send fewer layers at a time"
            )
    total = sum(count * size for count, size in zip(counts, sizes, strict=True))
    wanted = min(limit, max(least, total // _PARTS))
    found: list[tuple[range, range]] = []
    each = max(wanted // max(sizes[0], 1), 1)
    found += [(range(at, min(at + each, counts[0])), range(0)) for at in range(0, counts[0], each)]
    at = 0
    if found and counts[1] and len(found[-1][0]) * sizes[0] + counts[1] * sizes[1] <= limit:
        found[-1], at = (found[-1][0], range(counts[1])), counts[1]
    each = max(limit // max(sizes[1], 1), 1)
    found += [(range(0), range(first, min(first + each, counts[1]))) for first in range(at, counts[1], each)]
    return tuple(
        Chunk(message, number, len(found), units, tokens, len(units) * sizes[0] + len(tokens) * sizes[1])
        for number, (units, tokens) in enumerate(found)
    )
