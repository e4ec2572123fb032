"""A shared secret: who may talk to an endpoint, and that every message is from them.

Nothing here opens a socket: a `Handshake` takes and returns bytes.  Both sides of a conversation prove that they know the secret
before either of them parses anything.  Every message after that has a code (HMAC-SHA-256).  Nothing is encrypted.

A conversation begins with frames of `FRAME` bytes, each side's hello at once::

    both      hello   b"kvbs", version, role (b"C" connects, b"S" accepts), 2 zero bytes, nonce of 32 bytes
    client    proof   b"kvbp", status (0), 3 zero bytes, HMAC(secret, b"kvbm client proof" + both hellos)
    server    proof   the same with b"kvbm server proof"; status 1: refused, and the connection ends

The hellos are those of client and server, in this order.  Both nonces are new, so a proof is of no use in another conversation.
The roles are part of both frames and labels, so a side's own frames are of no use against it.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import stat
import struct
from typing import Final, NamedTuple, NoReturn

from .._arguments import quoted
from ..errors import AuthenticationError, BindError

#: Bytes of a frame of the handshake, of a message's code, and of what a note has in addition.
FRAME: Final = 40
TAG: Final = 32
NOTE: Final = 8 + TAG

#: Fewest and most bytes of a secret.
_FEWEST, _MOST = 16, 4096

_VERSION: Final = 1
_NONCE: Final = 32
_HELLO = struct.Struct(">4sB1s2x32s")
_PROOF = struct.Struct(">4sB3x32s")
_NUMBER = struct.Struct(">Q")
#: First bytes of a hello, and of a proof.
MAGIC, _PROVES = b"kvbs", b"kvbp"

#: First bytes of a conversation without a secret, and of a card with the code of one.
PLAIN: Final = b"kvb1"
_CARD = b"kvbm card "

#: Bytes that signing adds to a card.
SIGNATURE: Final = len(_CARD) + 64 + 1


class Secret:
    """A shared secret of 16 to 4096 bytes, without white space at its end; else `BindError`.  Messages have its name."""

    __slots__ = ("_data", "name")

    def __init__(self, data: bytes, name: str = "secret") -> None:
        data = data.rstrip()
        if not _FEWEST <= len(data) <= _MOST:
            got = f"{len(data)}" if len(data) <= _MOST else "more"
            raise BindError(
                f"{name}: expected a secret of {_FEWEST} to {_MOST} bytes, without white space at its end, got {got}; "
                "make one: (umask 077; openssl rand -hex 32 > FILE)"
            )
        self._data, self.name = data, name

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Secret:
        """Read a secret from a file that only its owner can read.

        Raises `BindError` if there is no such file, others can read or write it, it belongs to another user, or its
        size is wrong.
        """
        if not isinstance(path, str | os.PathLike):
            raise BindError(f"secret_file: expected the path of a file, got {quoted(path, 100)}")
        name = f"secret_file {os.fspath(path)}"
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            raise BindError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
        try:
            found = os.fstat(file)  # of the file that is read, whatever its name becomes
            if not stat.S_ISREG(found.st_mode):
                raise BindError(f"{name}: expected a file")
            if found.st_uid not in (os.geteuid(), 0):
                raise BindError(f"{name}: expected a file of this user, {os.geteuid()}, or of root; it belongs to {found.st_uid}")
            if found.st_mode & 0o077:
                raise BindError(
                    f"{name}: expected a file that only its owner can read (mode 600), got {stat.S_IMODE(found.st_mode):03o}; "
                    "chmod 600 it, and make a new secret if others could read it"
                )
            with os.fdopen(file, "rb", closefd=False) as opened:
                return cls(opened.read(_MOST + 1), name)
        except OSError as error:
            raise BindError(f"{name}: {error.strerror or error}") from None
        finally:
            os.close(file)

    def code(self, label: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA-256 of a label and parts of fixed sizes (the last one of any size)."""
        return hmac.digest(self._data, b"".join((label, *parts)), "sha256")

    # ---- cards -----------------------------------------------------------------------------------------------------

    def sign(self, card: bytes) -> bytes:
        """A card with its code before it."""
        return _CARD + self.code(b"kvbm card", card).hex().encode() + b"\n" + card

    @staticmethod
    def opened(card: bytes, secret: Secret | None) -> bytes:
        """The card behind its code.  Nothing of it is parsed before its code is compared.

        Raises `AuthenticationError` if only one side has a secret, or the two have different ones.
        """
        is_signed = card.startswith(_CARD)
        if secret is None:
            if is_signed:
                raise AuthenticationError("card: the other side has a secret, and this side none; give both the same secret_file")
            return card
        if not is_signed:
            raise AuthenticationError("card: this side has a secret, and the other side none; give both the same secret_file")
        begin = len(_CARD) + 2 * TAG + 1
        if not hmac.compare_digest(secret.sign(card[begin:])[:begin], card[:begin]):
            raise AuthenticationError("card: it was made with another secret, or was changed; give both sides the same secret_file")
        return card[begin:]

    def __repr__(self) -> str:
        return f"<kvbm Secret, {self.name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: read its file in the other process")


class Channel:
    """One direction of a conversation: the codes of its messages, each with the message's number."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def code(self, *parts: bytes) -> bytes:
        """The code of the next message."""
        found = self._of(self._number, *parts)
        self._number += 1
        return found

    def is_next(self, code: bytes, *parts: bytes) -> bool:
        """True if this is the code of the next message."""
        return hmac.compare_digest(self.code(*parts), code)

    def _of(self, number: int, *parts: bytes) -> bytes:
        return hmac.digest(self._key, b"".join((_NUMBER.pack(number), *parts)), "sha256")


class Notes(Channel):
    """One direction of a link's notes.  Notes may be lost, but one is not taken twice, nor after a later one."""

    __slots__ = ()

    @classmethod
    def between(cls, secret: Secret, sender: bytes, receiver: bytes) -> Notes:
        """The direction from one endpoint to another, by the nonces of their cards."""
        return cls(secret.code(b"kvbm notes", sender, receiver))

    def closed(self, note: bytes) -> bytes:
        """A note with its number and code."""
        number = self._number
        return _NUMBER.pack(number) + self.code(note) + note

    def opened(self, data: bytes) -> bytes:
        """The note behind its number and code.

        Raises `AuthenticationError` if it is from somebody else, was changed, or was taken before.
        """
        if len(data) >= NOTE:
            [number] = _NUMBER.unpack_from(data)
            code, note = data[_NUMBER.size : NOTE], data[NOTE:]
            if hmac.compare_digest(self._of(number, note), code) and number >= self._number:
                self._number = number + 1
                return note
        raise AuthenticationError("note: expected the next one of this peer, with its code")


class Session(NamedTuple):
    """The two channels of a conversation after its handshake."""

    outgoing: Channel
    incoming: Channel


class Handshake:
    """One side of the beginning of a conversation, over bytes.

    Send `begins`, this side's hello, at once.  Then receive `wants` bytes, call `take` with them, and send what it
    returns, until `wants` is 0: the other side has proved that it knows the secret.
    """

    def __init__(self, secret: Secret, *, is_server: bool) -> None:
        self._secret, self._is_server = secret, is_server
        self.begins = _HELLO.pack(MAGIC, _VERSION, b"S" if is_server else b"C", secrets.token_bytes(_NONCE))
        self._hellos = b""
        self._frame = b""
        self.wants = len(MAGIC)  # which says whether the other side has a secret at all

    @property
    def last_words(self) -> bytes:
        """A frame for the other side after `take` has raised `AuthenticationError`: a server says that it refuses."""
        return _PROOF.pack(_PROVES, 1, bytes(TAG)) if self._is_server and self._hellos else b""

    def take(self, data: bytes) -> bytes:
        """Take exactly `wants` bytes of the other side; return what to send to it.

        Raises `AuthenticationError` if the other side has no secret, or another one, or sent something else.
        """
        if len(data) != self.wants:
            raise BindError(f"handshake: expected {self.wants} bytes, got {len(data)}")
        self._frame += data
        if len(self._frame) < FRAME:  # the first four bytes of its hello
            if self._frame == PLAIN:
                raise AuthenticationError("this side has a secret, and the other side none; give both the same secret_file")
            if self._frame != MAGIC:
                raise AuthenticationError(f"expected a kvbm with a secret, got {self._frame!r}: another program is there")
            self.wants = FRAME - len(self._frame)
            return b""
        frame, self._frame = self._frame, b""
        return self._proof(frame) if self._hellos else self._hello(frame)

    def _hello(self, hello: bytes) -> bytes:
        _, version, _, nonce = _HELLO.unpack(hello)
        if version != _VERSION:
            raise AuthenticationError(f"expected version {_VERSION} of the handshake, got {version}; both sides need the same kvbm")
        expected = b"C" if self._is_server else b"S"
        if _HELLO.pack(MAGIC, version, expected, nonce) != hello or nonce == self.begins[-_NONCE:]:
            raise AuthenticationError("expected a hello of the other side, got one of this side: it was reflected")
        self._hellos = hello + self.begins if self._is_server else self.begins + hello
        self.wants = FRAME
        return b"" if self._is_server else self._of(b"client")

    def _proof(self, frame: bytes) -> bytes:
        if frame[:5] == _PROVES + b"\x01" and not self._is_server:
            raise AuthenticationError("it refuses this side: the two have different secrets; give both the same secret_file")
        if not hmac.compare_digest(self._of(b"client" if self._is_server else b"server"), frame):
            raise AuthenticationError("it does not know this side's secret; give both the same secret_file")
        self.wants = 0
        return self._of(b"server") if self._is_server else b""

    def _of(self, who: bytes) -> bytes:
        """The proof of a side."""
        return _PROOF.pack(_PROVES, 0, self._secret.code(b"kvbm " + who + b" proof", self._hellos))

    def session(self) -> Session:
        """The channels of this side.  Only when `wants` is 0."""
        if self.wants:
            raise BindError("handshake: expected its end, it has not ended")
        there, back = (Channel(self._secret.code(b"kvbm " + way, self._hellos)) for way in (b"client says", b"server says"))
        return Session(back, there) if self._is_server else Session(there, back)


def open_to_all(address: str) -> str:
    """Why a server without a secret may not listen at an IP address: it is no loopback or private one.  Empty: it may."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_unspecified:
        return "all addresses of this machine"
    return "a public address" if found.is_global else ""
