"""How the workers of two vLLM engines connect: cards and wanted requests, as JSON over TCP.

A worker of the decode engine asks every worker of the prefill engine.  The prefill engine itself knows the blocks of a request: it
never receives block ids from outside.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import BindError, KvbmError, TransferError, TransferTimeoutError
from ...reshard import Endpoint, Link
from ...reshard.notes import Stopped
from ...reshard.talk import Talk, connect, listen

__all__ = ["Door", "Links", "Visit", "Want"]

#: Time limit in seconds for an answer of the other side.  A side that needs longer answers that it is busy.
WORD = 30.0

#: Seconds for which a worker that asks may be silent; the limit of poll(2).
_QUIET = 1e6

#: Seconds until an engine that could not be reached is tried again, so that other requests do not wait for it.
_AGAIN = 5.0

#: Seconds of silence after which kvbm checks whether an engine still exists.  Its link is kept until it is lost.
_KEPT = 600.0

#: Most ranks of an engine, and most conversations at a time.
_MOST_RANKS = 4096
_MOST_TALKS = 4096

#: Most parts of a request.
_MOST_PARTS = 1 << 16


@dataclass(frozen=True)
class Want:
    """A request that an engine asks for.

    Parameters
    ----------
    name : str
        Name of the request.
    is_given_up : bool
        True if it is not needed and may be released.
    first, last, each : int
        For a request in parts: its first token, the last token plus one, and the most tokens of a part.  A part ends at a multiple
        of `each`.  All 0 if it is sent in one part.
    groups : tuple of str
        Groups of the endpoint that are sent in parts; the others are sent in one part.
    """

    name: str
    is_given_up: bool = False
    first: int = 0
    last: int = 0
    each: int = 0
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, heard: dict[str, Any], peer: str) -> Want:
        """Read a request from an untrusted message.  Raises `BindError` if it is wrong."""
        given = heard.get("want")
        if not isinstance(given, dict) or set(given) - set(cls.__dataclass_fields__):
            raise BindError(f"{peer}: want: expected what is wanted, got {given!r:.100}")
        names = given.get("groups", [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise BindError(f"{peer}: want: groups: expected names, got {names!r:.100}")
        want = cls(**{"name": None, **given, "groups": tuple(names)})
        kinds = (want.name, str), (want.is_given_up, bool), (want.first, int), (want.last, int), (want.each, int)
        if any(type(value) is not kind for value, kind in kinds) or not want.name:
            raise BindError(f"{peer}: want: expected a request's name and numbers, got {given!r:.200}")
        if want.groups and not (0 <= want.first < want.last < 1 << 48 and want.last - want.first <= want.each * _MOST_PARTS):
            raise BindError(f"{peer}: want: expected tokens in at most {_MOST_PARTS} parts, got {given!r:.200}")
        return want

    def parts(self) -> Iterator[tuple[str, range]]:
        """Names of the parts, and their tokens."""
        first = self.first
        while first < self.last:
            behind = min(self.last, (first // self.each + 1) * self.each)
            yield f"{self.name}@{first}", range(first, behind)
            first = behind


class Links:
    """Links of an endpoint: one per start of another engine, for both directions, no matter which side asked first.

    Parameters
    ----------
    endpoint : Endpoint
        The endpoint.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._made: dict[frozenset[bytes], tuple[Link, int]] = {}  # cards of all ranks → link, and its number of users

    def meet(self, cards: Iterable[bytes]) -> Link:
        """The link to the ranks of these cards.  Call `part` after use.  Raises the errors of `Endpoint.meet`."""
        at = frozenset(cards)
        with self._lock:
            link, users = self._made.get(at) or (self.endpoint.meet(at), 0)
            self._made[at] = link, users + 1
            return link

    def is_lost(self, link: Link | None) -> bool:
        """True if a rank of a link is known to have ended.  It also asks the ranks; the next call knows the result.

        A TCP connection that broke while idle does not count: both ends may be alive, and could not connect again.
        """
        if link is None:
            return True

        def ask() -> None:
            for peer in link.peers:
                link.say(peer, Stopped(0, 0, False))  # an empty note: only then does a wire report that a peer is gone

        with contextlib.suppress(KvbmError):
            self.endpoint.submit(ask)
        return link.is_closed or bool(link.lost)

    def part(self, link: Link) -> None:
        """End one use of a link.  The last use closes it."""
        with self._lock:
            at, users = next((at, users) for at, (made, users) in self._made.items() if made is link)
            if users > 1:
                self._made[at] = link, users - 1
                return
            del self._made[at]
        with contextlib.suppress(KvbmError):
            link.close()


@dataclass
class _Guest:
    """One start of an engine that asks."""

    name: tuple[str, str]
    world: int
    cards: dict[int, bytes] = field(default_factory=dict)
    link: Link | None = None
    talks: set[Talk] = field(default_factory=set)
    left_at: float = 0.0


class Door:
    """The server of a worker: workers of other engines ask it for requests.

    Parameters
    ----------
    links : Links
        Links of this worker's endpoint.
    host, port
        Address to listen at; port 0 is any free port.
    begin : callable
        Sends a request over a link, at once or when it is computed, or releases it.  Raises `KvbmError` if it cannot be sent.  It
        may be called twice for one request.
    word : float
        Time limit in seconds for an answer of the other side, and for the other ranks of its engine.

    Attributes
    ----------
    port : int
        The port.
    """

    def __init__(
        self, links: Links, host: str, port: int, begin: Callable[[Want, Link], None], word: float = WORD
    ) -> None:
        self._links, self._begin, self._word = links, begin, word
        self._met = threading.Condition()
        self._guests: dict[tuple[str, str], _Guest] = {}
        self._talks: set[Talk] = set()
        self._is_closed = False
        self._socket = listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._listen, name="kvbm door", daemon=True)
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
                talk = Talk(connection, self._word)
            except OSError:
                connection.close()
                continue  # the client has gone already
            with self._met:
                is_welcome = not self._is_closed and len(self._talks) < _MOST_TALKS
                if is_welcome:
                    self._talks.add(talk)
            if is_welcome:
                threading.Thread(target=self._serve, args=(talk,), name=f"kvbm door {talk.peer}", daemon=True).start()
            else:
                talk.close()

    def _serve(self, talk: Talk) -> None:
        """Serve one worker of another engine until it disconnects."""
        guest = None
        try:
            guest = self._hear(talk)
            link = self._meet(talk, guest)
            while True:
                talk.timeout = _QUIET  # it is silent until it has a request
                heard = talk.hear("want")
                talk.timeout = self._word
                want = Want.of(heard, talk.peer)
                try:
                    self._begin(want, link)
                except KvbmError as error:
                    talk.say(refused=str(error)[:4000])
                else:
                    talk.say(begun=want.name)
        except KvbmError as error:
            talk.fail(error)
        except Exception as error:  # for any message
            talk.fail(BindError(f"{type(error).__name__}: {error}"))
        finally:
            talk.close()
            with self._met:
                self._talks.discard(talk)
                if guest is not None:
                    guest.talks.discard(talk)
                    guest.left_at = time.monotonic()
                    if not guest.talks and guest.link is None:
                        self._guests.pop(guest.name, None)
                    self._met.notify_all()

    def _hear(self, talk: Talk) -> _Guest:
        """Read the identity and the card of a worker.  Remains of earlier starts of its engine are removed."""
        hello = talk.hear("engine", "start", "rank", "world", "card")
        name, rank, world = (str(hello["engine"]), str(hello["start"])), hello["rank"], hello["world"]
        if type(world) is not int or type(rank) is not int or not 0 <= rank < world <= _MOST_RANKS:
            raise BindError(f"{talk.peer}: expected a rank of a world, got {rank!r:.40} of {world!r:.40}")
        card = base64.b64decode(str(hello["card"]), validate=True)
        now = time.monotonic()
        with self._met:
            for other, one in list(self._guests.items()):
                is_older = other[0] == name[0] and other != name  # the engine was restarted
                is_silent = one.left_at + _KEPT < now and other != name
                if not one.talks and (is_older or (is_silent and self._links.is_lost(one.link))):
                    self._part(other)
            guest = self._guests.setdefault(name, _Guest(name, world))
            if guest.world != world or (guest.link is not None and guest.cards[rank] != card):
                raise BindError(f"{talk.peer}: rank {rank} of {name[0]}: another card than before, at the same start")
            guest.cards[rank] = card
            guest.talks.add(talk)
            self._met.notify_all()
        return guest

    def _part(self, name: tuple[str, str]) -> None:
        link = self._guests.pop(name).link
        if link is not None:
            self._links.part(link)

    def _meet(self, talk: Talk, guest: _Guest) -> Link:
        """Wait until all workers of the engine have sent their cards."""
        talk.say(card=base64.b64encode(self._links.endpoint.card()).decode())
        end = time.monotonic() + self._word
        with self._met:
            while len(guest.cards) < guest.world and not self._is_closed:
                if time.monotonic() > end:
                    raise TransferTimeoutError(f"{talk.peer}: of {guest.world} ranks only {sorted(guest.cards)} have come")
                self._met.wait(min(1.0, self._word))
                talk.busy()
                talk.look()
            if self._is_closed:
                raise BindError(f"{talk.peer}: this engine is shutting down")
            if guest.link is None:
                guest.link = self._links.meet(guest.cards.values())
        talk.say(met=True)
        return guest.link

    def tell(self, link: Link, name: str, why: str) -> None:
        """Tell an engine that a request will not come, after it was accepted."""
        with self._met:
            talks = [talk for guest in self._guests.values() if guest.link is link for talk in guest.talks]
        for talk in talks:
            with contextlib.suppress(KvbmError):  # a peer that has gone does not wait
                talk.say(lost=name, why=why[:4000])

    def close(self) -> None:
        with self._met:
            self._is_closed = True
            talks = list(self._talks)
            self._met.notify_all()
        with contextlib.suppress(OSError):  # wakes `accept`; closing alone does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for talk in talks:
            talk.close()
        self._thread.join(5)


class Visit:
    """The client of a decode worker: connections to all workers of a prefill engine.  It connects on first use.

    Parameters
    ----------
    links : Links
        Links of this worker's endpoint.
    start : str
        A text that identifies this start of the engine; the same on all its workers.
    world : int
        Number of workers of this engine.
    host, port, ports
        Address of the other engine's first worker, and the number of its workers, which listen at consecutive ports.
    word : float
        Time limit in seconds for an answer of the other side.
    """

    def __init__(
        self, links: Links, start: str, world: int, host: str, port: int, ports: int, word: float = WORD
    ) -> None:
        if not 0 < ports <= _MOST_RANKS:
            raise BindError(f"{host}:{port}: expected a number of workers up to {_MOST_RANKS}, got {ports}")
        self._links, self._start, self._world, self._word = links, start, world, word
        self._host, self._port, self._ports = host, port, ports
        self._lock = threading.Lock()
        self._talks: list[Talk] = []
        self._cards: list[bytes] = []
        self._link: Link | None = None
        self._lost: dict[str, str] = {}
        self._failed_at, self._why = -_AGAIN, ""
        self._is_closed = False

    @property
    def is_met(self) -> bool:
        return self._link is not None

    def link(self) -> Link:
        """The link to the workers.  Connects first if needed.

        Raises
        ------
        KvbmError
            A worker cannot be reached, or does not fit.
        """
        with self._lock:
            return self._meet()

    def _meet(self) -> Link:
        with contextlib.suppress(KvbmError):
            for talk in self._talks:
                talk.look()  # a worker that has gone has closed the connection
            if self._link is not None and self._talks:
                return self._link
        self._part()
        if time.monotonic() < self._failed_at + _AGAIN:
            raise TransferError(f"{self._why}; it is tried again after {_AGAIN:g} s")
        try:
            cards = []
            for number in range(self._ports):
                talk = connect(self._host, self._port + number, self._word)
                self._talks.append(talk)
                if self._is_closed:
                    raise BindError("this engine is shutting down")
                here = self._links.endpoint
                card = base64.b64encode(here.card()).decode()
                talk.say(engine=here.engine, start=self._start, rank=here.rank, world=self._world, card=card)
                cards.append(base64.b64decode(str(talk.hear("card")["card"]), validate=True))
            if self._link is None or cards != self._cards:  # a restarted engine has other cards
                if self._link is not None:
                    link, self._link = self._link, None
                    self._links.part(link)
                self._link, self._cards = self._links.meet(cards), cards
            for talk in self._talks:
                talk.hear("met")
            return self._link
        except BaseException as error:
            self._failed_at, self._why = time.monotonic(), str(error)
            self._part()
            raise

    def want(self, want: Want) -> None:
        """Ask every worker to send a request when it is computed, or to release it.

        Raises
        ------
        TransferError
            A worker does not have the request and will not get it, or is gone.  The next call connects again.
        """
        with self._lock:
            self._meet()
            try:
                for talk in self._talks:
                    talk.say(want=asdict(want))
                answers = [self._answer(talk) for talk in self._talks]
            except BaseException:
                self._part()
                raise
        if refused := [answer["refused"] for answer in answers if "refused" in answer]:
            raise TransferError(str(refused[0]))

    def _answer(self, talk: Talk) -> dict[str, Any]:
        while "lost" in (heard := talk.hear()):
            self._hear_of(heard)
        return heard

    def _hear_of(self, heard: dict[str, Any]) -> None:
        self._lost[str(heard["lost"])] = str(heard.get("why", ""))

    def lost(self) -> dict[str, str]:
        """Accepted requests that will not come, and why, since the last call.  It does not wait."""
        if not self._lock.acquire(blocking=False):
            return {}
        try:
            for talk in self._talks:
                with contextlib.suppress(KvbmError):  # the next request connects again
                    while talk.has_news():
                        self._hear_of(talk.hear("lost"))
            found, self._lost = self._lost, {}
            return found
        finally:
            self._lock.release()

    def _part(self) -> None:
        for talk in self._talks:
            talk.close()
        self._talks = []

    def close(self) -> None:
        """Close the connections.  Threads that wait for an answer get an error."""
        self._is_closed = True
        for talk in list(self._talks):
            talk.close()
