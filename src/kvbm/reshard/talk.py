"""What the two ends of `kvbm link` say to each other beside the wire: JSON over TCP, so that each knows what the other does.

Nothing that comes is believed: a message has a limit, is data and no code, and ends the conversation where it is none.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections import deque
from typing import Any

from .. import errors
from ..errors import BindError, KvbmError, PeerLostError, TransferTimeoutError, UnreachableError

__all__ = ["Talk", "connect", "listen"]

#: Bytes of the longest message: two cards of endpoints, and some.
MOST = 4 << 20

_HEAD = struct.Struct(">4sI")
_MAGIC = b"kvb1"

#: Seconds between two words of a side that is at work.
_BUSY = 1.0


class Talk:
    """One conversation.

    Parameters
    ----------
    connection : socket
    timeout : float
        Seconds that anything may take.

    Attributes
    ----------
    peer : str
        Address and port of the other side.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket = connection
        self.timeout = timeout
        host, port = connection.getpeername()[:2]
        self.host, self.peer = host, _text(host, port)
        self._said_at = time.monotonic()
        self._kept: deque[dict[str, Any]] = deque()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def say(self, **message: Any) -> None:
        """Send a message.

        Raises
        ------
        PeerLostError, TransferTimeoutError
            The other side has gone, or takes nothing.
        """
        text = json.dumps(message).encode()
        if len(text) > MOST:
            raise BindError(f"{self.peer}: a message of {len(text)} bytes; expected at most {MOST}")
        self._said_at = time.monotonic()
        try:
            self._socket.settimeout(self.timeout)
            self._socket.sendall(_HEAD.pack(_MAGIC, len(text)) + text)
        except TimeoutError:
            raise TransferTimeoutError(f"{self.peer}: takes nothing since {self.timeout:g} s") from None
        except OSError as error:
            raise self._lost(error) from None

    def busy(self) -> None:
        """Say now and then that this side is at work, so that the other one goes on waiting."""
        if time.monotonic() - self._said_at > _BUSY:
            self.say(busy=True)

    def fail(self, error: BaseException) -> None:
        """Tell the other side, if it is there, why this one gives up."""
        kind = type(error).__name__ if isinstance(error, KvbmError) else "KvbmError"
        why = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        with contextlib.suppress(KvbmError):
            self.say(error=kind, message=why[:4000])

    def hear(self, *names: str) -> dict[str, Any]:
        """Return the next message, which has these names.

        Raises
        ------
        KvbmError
            What the other side gave up for, as the class that it was there.
        PeerLostError, TransferTimeoutError
            The other side has gone, or says nothing.
        BindError
            What came is no message.
        """
        while True:
            found = self._kept.popleft() if self._kept else self._read()
            if "busy" in found:
                continue
            if missing := [name for name in names if name not in found]:
                raise BindError(
                    f"{self.peer}: expected a message with {', '.join(missing)}, got {', '.join(found)!s:.200}"
                )
            return found

    def _read(self) -> dict[str, Any]:
        """The next message, which is no error."""
        magic, size = _HEAD.unpack(self._take(_HEAD.size))
        if magic != _MAGIC:
            raise BindError(
                f"{self.peer}: expected `kvbm link` of this version, got {magic!r}: another program is there"
            )
        if size > MOST:
            raise BindError(f"{self.peer}: a message of {size} bytes; expected at most {MOST}")
        try:
            found = json.loads(self._take(size).decode())
        except (ValueError, RecursionError):
            raise BindError(f"{self.peer}: expected JSON of `kvbm link`") from None
        if not isinstance(found, dict):
            raise BindError(f"{self.peer}: expected an object of JSON, got a {type(found).__name__}")
        if "error" in found:
            known = str(found["error"])
            kind = getattr(errors, known) if known in errors.__all__ else KvbmError
            raise kind(f"{self.peer} says: {found.get('message', '')!s:.4000}")
        return found

    def look(self) -> None:
        """See whether the other side has gone, or given up; what else it has said is kept for `hear`."""
        if self._socket.fileno() < 0:
            raise self._lost("it was closed here")
        asked = select.poll()  # `select` refuses sockets from number 1,024 on
        asked.register(self._socket, select.POLLIN)
        if asked.poll(0):
            self._kept.append(self._read())

    def _take(self, size: int) -> bytes:
        data = bytearray()
        end = time.monotonic() + self.timeout
        while len(data) < size:
            try:
                self._socket.settimeout(max(end - time.monotonic(), 0.001))
                part = self._socket.recv(min(size - len(data), 1 << 16))
            except TimeoutError:
                raise TransferTimeoutError(f"{self.peer}: says nothing since {self.timeout:g} s") from None
            except OSError as error:
                raise self._lost(error) from None
            if not part:
                raise self._lost("it has closed the connection")
            data += part
        return bytes(data)

    def _lost(self, why: object) -> PeerLostError:
        return PeerLostError(f"{self.peer} has gone: {why}", peer=self.peer)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes a thread that waits for it, which closing does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(host: str, port: int, timeout: float) -> Talk:
    """Begin a conversation with `kvbm link serve`.

    Raises
    ------
    UnreachableError
        Nobody is there, or does not answer in time.
    """
    where = _text(host, port)
    try:
        connection = socket.create_connection((host, port), timeout)
    except TimeoutError:
        raise UnreachableError(
            f"{where}: no answer within {timeout:g} s: is the name right, and does a firewall let it through?"
        ) from None
    except OSError as error:
        hint = (
            ": does `kvbm link serve` run there, and listen on this port?"
            if isinstance(error, ConnectionRefusedError)
            else ""
        )
        raise UnreachableError(f"{where}: {error.strerror or error}{hint}") from None
    return Talk(connection, timeout)


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections; port 0 is any that is free.

    Raises
    ------
    UnreachableError
        The address is none of this machine, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UnreachableError(f"cannot listen on {_text(host, port)}: {error.strerror or error}") from None


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
