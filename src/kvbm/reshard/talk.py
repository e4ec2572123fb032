"""The control connection between the two ends of `kvbm link`: JSON over TCP, beside the wire.

Messages are not trusted: their size is limited, they are data and never code, and a malformed message ends the conversation.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

from .. import errors
from ..errors import BindError, KvbmError, PeerLostError, TransferTimeoutError, UnreachableError

__all__ = ["Talk", "connect", "listen"]

#: Most bytes of a message.  The largest ones have two cards.
MOST = 4 << 20

_HEAD = struct.Struct(">4sI")
_MAGIC = b"kvb1"

#: Seconds between two messages of a side that is busy.
_BUSY = 1.0


class Talk:
    """One conversation.

    Parameters
    ----------
    connection : socket
    timeout : float
        Seconds that each send or receive may take.

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
        self._saying = threading.Lock()  # so that messages of several threads are not mixed
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def say(self, **message: Any) -> None:
        """Send a message.

        Raises
        ------
        PeerLostError, TransferTimeoutError
            The other side is gone, or does not receive in time.
        """
        text = json.dumps(message).encode()
        if len(text) > MOST:
            raise BindError(f"{self.peer}: a message of {len(text)} bytes; expected at most {MOST}")
        self._said_at = time.monotonic()
        try:
            with self._saying:
                self._socket.settimeout(self.timeout)
                self._socket.sendall(_HEAD.pack(_MAGIC, len(text)) + text)
        except TimeoutError:
            raise TransferTimeoutError(f"{self.peer}: did not read a message within {self.timeout:g} s") from None
        except OSError as error:
            raise self._lost(error) from None

    def busy(self) -> None:
        """Tell the other side from time to time that this side is busy, so that the other side's wait does not time out."""
        if time.monotonic() - self._said_at > _BUSY:
            self.say(busy=True)

    def fail(self, error: BaseException) -> None:
        """Tell the other side, if it is still connected, why this side gives up."""
        kind = type(error).__name__ if isinstance(error, KvbmError) else "KvbmError"
        why = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        with contextlib.suppress(KvbmError):
            self.say(error=kind, message=why[:4000])

    def hear(self, *names: str) -> dict[str, Any]:
        """Wait for the next message and return it.  It must have these names.

        Raises
        ------
        KvbmError
            The other side gave up.  The error has the class of its error there.
        PeerLostError, TransferTimeoutError
            The other side is gone, or sends nothing in time.
        BindError
            The received data are not a message with these names.
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
        """The next message.  If it is an error of the other side, this error is raised."""
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
        """Raise an error if the other side is gone or has given up.  Other messages are kept for `hear`."""
        if self._socket.fileno() < 0:
            raise self._lost("it was closed here")
        asked = select.poll()  # `select` accepts no socket above 1023
        asked.register(self._socket, select.POLLIN)
        if asked.poll(0):
            self._kept.append(self._read())

    def has_news(self) -> bool:
        """True if a message has arrived that `hear` has not returned."""
        self.look()
        return bool(self._kept)

    def _take(self, size: int) -> bytes:
        data = bytearray()
        end = time.monotonic() + self.timeout
        while len(data) < size:
            try:
                self._socket.settimeout(max(end - time.monotonic(), 0.0))
                part = self._socket.recv(min(size - len(data), 1 << 16))
            except (TimeoutError, BlockingIOError):
                raise TransferTimeoutError(f"{self.peer}: no complete message within {self.timeout:g} s") from None
            except OSError as error:
                raise self._lost(error) from None
            if not part:
                raise self._lost("it has closed the connection")
            data += part
        return bytes(data)

    def _lost(self, why: object) -> PeerLostError:
        return PeerLostError(f"{self.peer} has gone: {why}", peer=self.peer)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes a thread that waits in recv; close alone does not
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
        Nothing listens at the address, or there is no answer in time.
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
    """A socket that listens for connections.  Port 0 selects a free port.

    Raises
    ------
    UnreachableError
        The address does not belong to this machine, or the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UnreachableError(f"cannot listen on {_text(host, port)}: {error.strerror or error}") from None


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
