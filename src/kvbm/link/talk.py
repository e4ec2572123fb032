"""Conversations between processes beside a wire: JSON messages over TCP.

The other side is not trusted, and no call here waits longer than its caller allows.  The other
waits of a link are listed in ``link/__init__.py``.  A message is data and never code.  Its size and its number of values are
limited, and a malformed message ends the conversation.

With a secret, both sides first prove that they know it (`Talk.shake`).  Then each message has a code behind it, which is compared
before the message is parsed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NoReturn

from .. import errors
from ..errors import (
    AuthenticationError,
    BindError,
    KvbmError,
    PeerLostError,
    TransferTimeoutError,
    UnreachableError,
    escaping,
    printable,
)
from .secret import MAGIC, PLAIN, TAG, Handshake, Secret, Session, open_to_all

_log = escaping(logging.getLogger(__name__))

#: Most bytes and values of a message.  The largest ones have a card.  What a message of this size can make Python allocate is
#: below 1 MiB.
MOST, _MOST_VALUES = 112 << 10, 4096

_HEAD = struct.Struct(">4sI")

#: First bytes of a message with a code behind it.
_CODED = b"kvb2"

#: Most bytes that are received at a time.
_PART = 1 << 16

#: Most messages that are kept for `Talk.hear`; later ones stay in the socket.
_MOST_MESSAGES = 64

#: Seconds between two messages of a side that is busy, and how many more such messages it may send.
_BUSY, _MOST_BUSY = 1.0, 60

#: Longest pause in seconds before a message that comes in small pieces is looked at again.
_PAUSE = 0.05

#: Seconds in which a thread has sent a message if the other side reads.
_LOCK_SECONDS = 0.02

#: Most characters of another side's text in a message or an error.
_MOST_TEXT = 2000

#: Seconds within which a client that connects must identify itself.
HELLO = 10.0

#: Most conversations of a reception: in all, with one host, and with strangers of one host.
_MOST_TALKS, _SHARE, _STRANGERS = 4096, 512, 64

#: Seconds between two lines of the log about refusals of one host, most hosts within this time, and most characters of a line.
_LOGGED, _MOST_HOSTS, _MOST_LINE = 60.0, 256, 400


class Talk:
    """One conversation.  Only one thread may receive; any thread may send.

    `timeout` limits, in seconds, each sending, and how long the other side may be silent while something is expected of
    it.
    """

    is_known = False  # the other side has said who it is: see `Reception`

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket = connection
        self.timeout = timeout
        host, port = connection.getpeername()[:2]
        self.here = str(connection.getsockname()[0])  # this side's address
        self.secret: Secret | None = None  # what the other side has proved to know
        self.host, self.peer = host, _text(host, port)
        self._sent_at = self._began = self._received_at = time.monotonic()
        self._busy = 0
        self._data, self._data_at = bytearray(), 0.0  # received, no whole message yet; and when it began
        self._messages: deque[dict[str, Any]] = deque()
        self._sending = threading.Lock()  # so that messages of several threads are not mixed
        self._session: Session | None = None
        self._is_refused = False
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def shake(self, secret: Secret, *, is_server: bool) -> None:
        """Begin the conversation with a proof of both sides that they know a secret, before anything else is said or heard.

        Raises `AuthenticationError` if the other side has no secret, or another one, and `PeerLostError` or
        `TransferTimeoutError` if it is gone, or has not proved it within `timeout` seconds.
        """
        side, end = Handshake(secret, is_server=is_server), time.monotonic() + self.timeout
        self._is_refused = True  # until it has proved it
        self._send(side.begins, end - time.monotonic())
        try:
            while side.wants:
                if len(self._data) >= side.wants:
                    part = bytes(self._data[: side.wants])
                    del self._data[: len(part)]
                    self._send(side.take(part), max(end - time.monotonic(), 0.0))
                elif not self._wait_for(select.POLLIN, end):
                    raise TransferTimeoutError(f"{self.peer}: no proof of its secret within {self.timeout:g} s")
                else:
                    self._receive()
        except AuthenticationError as error:
            with contextlib.suppress(KvbmError):
                self._send(side.last_words, 0.0)
            raise AuthenticationError(f"{self.peer}: secret: {error}") from None
        self._received_at = self._data_at = time.monotonic()
        self._session, self._is_refused, self.secret = side.session(), False, secret

    # ---- sending ---------------------------------------------------------------------------------------------------

    def say(self, **message: Any) -> None:
        """Send a message.

        Raises `PeerLostError` if the other side is gone, and `TransferTimeoutError` if it does not receive in time.
        """
        self._send(self._framed(message), self.timeout)

    def tell(self, **message: Any) -> None:
        """Send a message without waiting.  If the other side does not receive, the conversation ends: errors as for `say`."""
        self._send(self._framed(message), 0.0)

    def _framed(self, message: dict[str, Any]) -> bytes:
        """The bytes of a message.  `_unframed` is the inverse."""
        text = json.dumps(message).encode()
        if len(text) > MOST:
            raise BindError(f"{self.peer}: a message of {len(text)} bytes; expected at most {MOST}")
        return _HEAD.pack(PLAIN if self._session is None else _CODED, len(text)) + text

    def _send(self, data: bytes, seconds: float) -> None:
        end = time.monotonic() + seconds
        if not self._sending.acquire(timeout=max(seconds, _LOCK_SECONDS)):
            self._give_up(seconds)
        try:
            if self._session is not None:
                data += self._session.outgoing.code(data)
            self._sent_at, left = time.monotonic(), memoryview(data)
            while left:
                with contextlib.suppress(BlockingIOError):
                    left = left[self._socket.send(left) :]
                    continue
                if not self._wait_for(select.POLLOUT, end):
                    self._give_up(seconds)
        except OSError as error:
            if isinstance(error, KvbmError):
                raise
            raise self._lost(error) from None
        finally:
            self._sending.release()

    def _give_up(self, seconds: float) -> NoReturn:
        self.close()  # a part of a message may have been sent: nothing can follow it
        raise TransferTimeoutError(f"{self.peer}: did not read a message within {seconds:g} s")

    def busy(self) -> None:
        """Tell the other side from time to time that this side is busy: it waits longer for this than for a silent side."""
        if time.monotonic() - self._sent_at > _BUSY:
            self.say(busy=True)

    def fail(self, error: BaseException) -> None:
        """Tell the other side, if it still receives, why this side gives up."""
        kind = type(error).__name__ if isinstance(error, KvbmError) else "KvbmError"
        why = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        if self._is_refused:
            return  # it has been told so, and gets no message
        with contextlib.suppress(KvbmError):
            self.tell(error=kind, message=why[:_MOST_TEXT])

    # ---- receiving -------------------------------------------------------------------------------------------------

    def hear(self, *names: str, within: float | None = None) -> dict[str, Any]:
        """Wait for the next message and return it.  It must have these names.

        It waits at most `within` seconds (default: `timeout`), however often the other side says that it is busy.
        Raises an error of the other side's class if that gave up; `PeerLostError` or `TransferTimeoutError` if it is
        gone, was silent for `timeout` seconds, or has sent nothing but that it is busy; `BindError` if the received
        data are not such a message.
        """
        self.wait(within)
        found = self._messages.popleft()
        if missing := [name for name in names if name not in found]:
            raise BindError(
                f"{self.peer}: expected a message with {', '.join(missing)}, got {printable(', '.join(found))}"
            )
        return found

    def wait(self, within: float | None = None, silent: float | None = None) -> None:
        """Wait until a message is there, which `hear` returns.

        Raises the errors of `hear`.  The other side may be silent for `silent` seconds (default: `timeout`).
        """
        silent = self.timeout if silent is None else silent
        within, pause, began = self.timeout if within is None else within, 0.0, time.monotonic()
        while not self._messages:
            self.look()
            if self._messages:
                return
            now, heard = time.monotonic(), max(began, self._received_at)
            left = min(began + within, heard + silent) - now
            if left <= 0:
                short = f"no complete message within {min(within, silent) if heard == began else within:g} s"
                raise TransferTimeoutError(f"{self.peer}: {short}{', only that it is busy' if heard > began else ''}")
            if self._data:  # the rest of a message mostly comes at once; who sends it in pieces is not looked at for each
                time.sleep(min(pause, left))
                pause = min(2 * pause + 0.001, _PAUSE)
            self._wait_for(select.POLLIN, now + left)

    def look(self) -> None:
        """Raise an error if the other side is gone or has given up.  Other messages are kept for `hear`.  It does not wait.

        Raises the errors of `hear`, and `TransferTimeoutError` if the rest of a message has not come within `timeout`
        seconds.
        """
        if len(self._messages) >= _MOST_MESSAGES:
            return
        found = self._unframed()
        if found is None:
            self._receive()
            found = self._unframed()
        if found is not None:
            self._messages.append(found)
        elif self._data and time.monotonic() > self._data_at + self.timeout:
            raise TransferTimeoutError(f"{self.peer}: no complete message within {self.timeout:g} s")

    def news(self) -> dict[str, Any] | None:
        """The next message if it is there; it does not wait.  Raises the errors of `look`."""
        if not self._messages:
            self.look()
        return self._messages.popleft() if self._messages else None

    def _receive(self) -> None:
        """Take the bytes that are there, at most `_PART` of them."""
        if self._socket.fileno() < 0:
            raise self._lost("it was closed here")
        try:
            part = self._socket.recv(_PART)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(error) from None
        if not part:
            raise self._lost("it has closed the connection")
        if not self._data:
            self._data_at = time.monotonic()
        self._data += part

    def _unframed(self) -> dict[str, Any] | None:
        """The next whole message of the received bytes; None if there is none.  An error of the other side is raised."""
        while len(self._data) >= _HEAD.size:
            magic, size = _HEAD.unpack_from(self._data)
            if magic == MAGIC and self._session is None:
                raise AuthenticationError(
                    f"{self.peer}: secret: the other side has one, and this side none; give both the same secret_file"
                )
            if magic != (PLAIN if self._session is None else _CODED):
                raise BindError(
                    f"{self.peer}: expected `kvbm link` of this version, got {magic!r}: another program is there"
                )
            if size > MOST:
                raise BindError(f"{self.peer}: a message of {size} bytes; expected at most {MOST}")
            whole = _HEAD.size + size
            behind = whole + (0 if self._session is None else TAG)
            if len(self._data) < behind:
                return None
            head, text, code = (bytes(self._data[a:b]) for a, b in ((0, _HEAD.size), (_HEAD.size, whole), (whole, behind)))
            del self._data[:behind]
            if self._session is not None and not self._session.incoming.is_next(code, head, text):
                self.close()  # what follows is not the next message
                raise AuthenticationError(
                    f"{self.peer}: secret: expected the next message with its code; it was changed, repeated, or said elsewhere"
                )
            self._received_at = self._data_at = time.monotonic()
            found = self._parsed(text)
            if "error" in found:
                known = str(found["error"])
                kind = getattr(errors, known) if known in errors.__all__ else KvbmError
                raise kind(f"{self.peer} says: {printable(str(found.get('message', '')), _MOST_TEXT)}")
            if "busy" not in found:
                return found
            self._busy += 1
            if self._busy > _MOST_BUSY + 2 * (self._received_at - self._began) / _BUSY:
                raise BindError(f"{self.peer}: said {self._busy} times that it is busy; expected once in {_BUSY:g} s")
        return None

    def _parsed(self, text: bytes) -> dict[str, Any]:
        """The content of a message.  Nothing else reads what another side sends."""
        if (count := sum(map(text.count, (b",", b":", b"[", b"{")))) > _MOST_VALUES:
            raise BindError(f"{self.peer}: expected JSON of `kvbm link` with at most {_MOST_VALUES} values, got {count}")
        try:
            found = json.loads(text.decode("ascii"), parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise BindError(f"{self.peer}: expected JSON of `kvbm link`") from None
        if not isinstance(found, dict):
            raise BindError(f"{self.peer}: expected an object of JSON, got a {type(found).__name__}")
        return found

    # ---- the connection --------------------------------------------------------------------------------------------

    def _wait_for(self, event: int, end: float) -> bool:
        """Wait until the socket can be read or written; False at the end of the time."""
        asked = select.poll()  # `select` accepts no socket above 1023
        try:
            asked.register(self._socket, event)
        except ValueError:
            raise self._lost("it was closed here") from None
        return bool(asked.poll(min(max(end - time.monotonic(), 0.0), 1e6) * 1e3))

    def _lost(self, why: object) -> PeerLostError:
        return PeerLostError(f"{self.peer} has gone: {why}", peer=self.peer)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes a thread that waits for the socket; close alone does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Refusals:
    """Logs refused clients with the reason: one line per host and minute, with the number of refusals since the last line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._hosts: dict[str, tuple[float, int]] = {}  # host → when it was in the log, and its refusals since then

    def tell(self, talk: Talk, why: str) -> None:
        now = time.monotonic()
        with self._lock:
            at, count = self._hosts.get(talk.host, (now - _LOGGED, 0))
            if talk.host not in self._hosts and len(self._hosts) >= _MOST_HOSTS:
                self._hosts = {host: held for host, held in self._hosts.items() if held[0] > now - _LOGGED}
                if len(self._hosts) >= _MOST_HOSTS:
                    return
            is_told = at <= now - _LOGGED
            self._hosts[talk.host] = (now, 0) if is_told else (at, count + 1)
        if is_told:
            more = f" ({count} more times since its last line here)" if count else ""
            _log.warning("%s: refused %s: %s%s", self._name, printable(talk.peer), printable(why, _MOST_LINE), more)


class Reception:
    """A port where others begin conversations.  Each has its own thread, and none waits for another.

    `welcome` is called with each conversation, on its thread; the conversation ends when it returns, and its errors are
    sent to the other side.  Refusals are in the log of ``kvbm.link.talk``, one line per host and minute.  `is_insecure`
    lets it listen at any address, even without a secret.

    A client is a stranger until `welcome` sets `Talk.is_known`; with a secret, it must first prove that it knows it.  A
    stranger may be silent for `HELLO` seconds, or `timeout` if that is less.  If a host has too many strangers, the
    oldest one is disconnected; if it has too many conversations, the new one.
    """

    def __init__(
        self, host: str, port: int, welcome: Callable[[Talk], None], *, timeout: float, name: str,
        secret: Secret | None = None, is_insecure: bool = False,
    ) -> None:  # fmt: skip
        self._welcome, self._seconds, self._name, self._secret = welcome, min(timeout, HELLO), name, secret
        self._lock, self._refusals = threading.Lock(), Refusals(name)
        self._talks: dict[Talk, None] = {}  # in the order in which they came
        self._is_closed = False
        self._socket = listen(host, port, is_open=is_insecure or secret is not None)
        self.address = self._socket.getsockname()[:2]
        self.port = int(self.address[1])
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # such as too many open files: it may pass
                continue
            try:
                talk = Talk(connection, self._seconds)
            except OSError:
                connection.close()
                continue  # the client has gone already
            if self._admit(talk):
                threading.Thread(
                    target=self._serve, args=(talk,), name=f"{self._name} {talk.peer}", daemon=True
                ).start()
            else:
                talk.close()

    def _admit(self, talk: Talk) -> bool:
        """Add a conversation, and end another one if a share is full.  False if there is no room."""
        with self._lock:
            hosts = Counter(one.host for one in self._talks)
            strangers = [one for one in self._talks if not one.is_known]
            same = [one for one in strangers if one.host == talk.host]
            is_full = len(self._talks) >= _MOST_TALKS or hosts[talk.host] >= _SHARE
            sent_away = same[:1] if len(same) >= _STRANGERS or hosts[talk.host] >= _SHARE else strangers[: int(is_full)]
            is_welcome = not self._is_closed and (not is_full or bool(sent_away))
            for one in sent_away if is_welcome else ():
                del self._talks[one]
                one.close()
            if is_welcome:
                self._talks[talk] = None
        for one in sent_away if is_welcome else () if self._is_closed else [talk]:
            self._refusals.tell(one, "there are too many conversations that have not said who they are, or too many in all")
        return is_welcome

    def _serve(self, talk: Talk) -> None:
        try:
            if self._secret is not None:
                talk.shake(self._secret, is_server=True)
            self._welcome(talk)
        except PeerLostError:
            pass  # it has gone, or was sent away
        except KvbmError as error:
            self._refuse(talk, error)
        except Exception as error:  # for any message
            self._refuse(talk, BindError(f"{type(error).__name__}: {error}"))
        finally:
            talk.close()
            with self._lock:
                self._talks.pop(talk, None)

    def _refuse(self, talk: Talk, error: KvbmError) -> None:
        talk.fail(error)
        if not self._is_closed:
            self._refusals.tell(talk, str(error).removeprefix(f"{talk.peer}: "))

    def close(self) -> None:
        """End all conversations; the port is free afterwards."""
        with self._lock:
            self._is_closed = True
            talks = list(self._talks)
        with contextlib.suppress(OSError):  # wakes `accept`; closing alone does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for talk in talks:
            talk.close()
        self._thread.join(5)


def connect(
    host: str, port: int, timeout: float, secret: Secret | None = None, server: str = "`kvbm link serve`"
) -> Talk:
    """Begin a conversation with `kvbm link serve`, or with a worker of an engine.  Messages name the `server`.

    Raises `UnreachableError` if nothing listens at the address, or there is no answer in time, and
    `AuthenticationError` if the other side does not have the secret.
    """
    end = time.monotonic() + timeout
    talk = _connected(host, port, timeout, server)
    if secret is None:
        return talk
    try:
        talk.timeout = max(end - time.monotonic(), 0.0)
        talk.shake(secret, is_server=False)
    except BaseException:
        talk.close()
        raise
    talk.timeout = timeout
    return talk


def _connected(host: str, port: int, timeout: float, server: str) -> Talk:
    where, end = _text(printable(host), port), time.monotonic() + timeout
    late = f"{where}: no answer within {timeout:g} s: is the name right, and does a firewall let it through?"
    try:
        addresses = _addresses(host, port, timeout)
        for number, address in enumerate(addresses):
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                return Talk(socket.create_connection(address, left), timeout)
            except OSError:
                if number + 1 == len(addresses):
                    raise
        raise TimeoutError
    except TimeoutError:
        raise UnreachableError(late) from None
    except OSError as error:
        hint = (
            f": does {server} run there, and listen on this port?"
            if isinstance(error, ConnectionRefusedError)
            else ""
        )
        raise UnreachableError(f"{where}: {error.strerror or error}{hint}") from None


def _addresses(host: str, port: int, timeout: float) -> list[tuple[str, int]]:
    """The addresses of a name, each once.  The system's resolver has no time limit, so a thread asks it."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError, OverflowError) as error:
            found.append(error if isinstance(error, OSError) else OSError(f"no name of a machine: {error}"))

    thread = threading.Thread(target=ask, name=f"kvbm name {printable(host)}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        raise TimeoutError
    if isinstance(found[0], OSError):
        raise found[0]
    return list(dict.fromkeys((str(address[0]), port) for *_, address in found[0]))


def listen(host: str, port: int, *, is_open: bool = False) -> socket.socket:
    """A socket that listens for connections.  Port 0 selects a free port.

    Raises `BindError`, unless `is_open`, if others than this machine and its private network can reach the address, and
    `UnreachableError` if it does not belong to this machine, or the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not is_open and (why := open_to_all(str(address[0]))):
            raise BindError(
                f"cannot listen on {_text(host, port)} without a secret: it is {why}; expected 127.0.0.1 or a private address of "
                "this machine, or a secret_file (or insecure, which lets everybody in)"
            )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UnreachableError(f"cannot listen on {_text(host, port)}: {error.strerror or error}") from None


def _no_number(text: str) -> NoReturn:
    """NaN and Infinity are no JSON."""
    raise ValueError(text)


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
