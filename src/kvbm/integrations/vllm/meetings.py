"""How the workers of two vLLM engines meet: cards, and which request is wanted, as JSON over TCP.

A worker that decodes asks every worker of the engine that prefilled.  That one knows which blocks a request has: nobody tells it
block ids from outside.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...errors import BindError, KvbmError, TransferError, TransferTimeoutError
from ...reshard import Endpoint, Link
from ...reshard.talk import Talk, connect, listen

__all__ = ["Door", "Links", "Visit"]

#: Seconds that a word of the other side may take; one that has more to do says that it is busy.
WORD = 30.0

#: Seconds that a worker who asks may be silent; what poll(2) takes.
_QUIET = 1e6

#: Seconds in which an engine that could not be met is not tried again: requests behind it are not kept waiting.
_AGAIN = 5.0

#: Seconds that a link is kept to an engine that has gone.
_KEPT = 600.0

#: Most ranks of an engine, and most conversations at a time.
_MOST_RANKS = 4096
_MOST_TALKS = 4096


class Links:
    """Links of an endpoint: one to each start of an engine, whichever of the two asked first, for both ways.

    Parameters
    ----------
    endpoint : Endpoint
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._made: dict[frozenset[bytes], tuple[Link, int]] = {}  # by the cards of all ranks; and how many use it

    def meet(self, cards: Iterable[bytes]) -> Link:
        """The link to the ranks of these cards, until `part`; raises what `Endpoint.meet` does."""
        at = frozenset(cards)
        with self._lock:
            link, users = self._made.get(at) or (self.endpoint.meet(at), 0)
            self._made[at] = link, users + 1
            return link

    def part(self, link: Link) -> None:
        """It is not used any more; the last one closes it."""
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
    """An engine that asks: one start of it."""

    name: tuple[str, str]
    world: int
    cards: dict[int, bytes] = field(default_factory=dict)
    link: Link | None = None
    talks: int = 0
    left_at: float = 0.0


class Door:
    """Where workers of other engines ask for requests of this one.

    Parameters
    ----------
    links : Links
        Of this worker's endpoint.
    host, port
        Where to listen; port 0 is any that is free.
    begin : callable
        Sends a request by a link, or lets go of it; raises `KvbmError` for one that is not there.  It may be called twice for one.
    word : float
        Seconds that a word of the other side may take, and the other ranks of its engine.

    Attributes
    ----------
    port : int
    """

    def __init__(
        self, links: Links, host: str, port: int, begin: Callable[[str, Link, bool], None], word: float = WORD
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
                time.sleep(0.1)  # such as no more files: it may have passed
                continue
            try:
                talk = Talk(connection, self._word)
            except OSError:
                connection.close()
                continue  # it has gone already
            with self._met:
                is_welcome = not self._is_closed and len(self._talks) < _MOST_TALKS
                if is_welcome:
                    self._talks.add(talk)
            if is_welcome:
                threading.Thread(target=self._serve, args=(talk,), name=f"kvbm door {talk.peer}", daemon=True).start()
            else:
                talk.close()

    def _serve(self, talk: Talk) -> None:
        """One worker of another engine, until it goes."""
        guest = None
        try:
            guest = self._hear(talk)
            link = self._meet(talk, guest)
            while True:
                talk.timeout = _QUIET  # it asks when it has a request
                heard = talk.hear("want", "given_up")
                wanted, talk.timeout = heard["want"], self._word
                if not isinstance(wanted, str) or type(heard["given_up"]) is not bool:
                    raise BindError(f"{talk.peer}: want: expected a request's name, got {wanted!r:.100}")
                try:
                    self._begin(wanted, link, heard["given_up"])
                except KvbmError as error:
                    talk.say(refused=str(error)[:4000])
                else:
                    talk.say(begun=wanted)
        except KvbmError as error:
            talk.fail(error)
        except Exception as error:  # of whatever is said to it
            talk.fail(BindError(f"{type(error).__name__}: {error}"))
        finally:
            talk.close()
            with self._met:
                self._talks.discard(talk)
                if guest is not None:
                    guest.talks -= 1
                    guest.left_at = time.monotonic()
                    if not guest.talks and guest.link is None:
                        self._guests.pop(guest.name, None)
                    self._met.notify_all()

    def _hear(self, talk: Talk) -> _Guest:
        """Who it is, with its card; what is left of others is cleared away."""
        hello = talk.hear("engine", "start", "rank", "world", "card")
        name, rank, world = (str(hello["engine"]), str(hello["start"])), hello["rank"], hello["world"]
        if type(world) is not int or type(rank) is not int or not 0 <= rank < world <= _MOST_RANKS:
            raise BindError(f"{talk.peer}: expected a rank of a world, got {rank!r:.40} of {world!r:.40}")
        card = base64.b64decode(str(hello["card"]), validate=True)
        now = time.monotonic()
        with self._met:
            for other, one in list(self._guests.items()):
                is_older = other[0] == name[0] and other != name  # it was started again
                if not one.talks and (is_older or one.left_at + _KEPT < now):
                    self._part(other)
            guest = self._guests.setdefault(name, _Guest(name, world))
            if guest.world != world or (guest.link is not None and guest.cards[rank] != card):
                raise BindError(f"{talk.peer}: rank {rank} of {name[0]}: another card than before, at the same start")
            guest.cards[rank] = card
            guest.talks += 1
            self._met.notify_all()
        return guest

    def _part(self, name: tuple[str, str]) -> None:
        link = self._guests.pop(name).link
        if link is not None:
            self._links.part(link)

    def _meet(self, talk: Talk, guest: _Guest) -> Link:
        """Wait until all workers of its engine have brought their cards."""
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

    def close(self) -> None:
        with self._met:
            self._is_closed = True
            talks = list(self._talks)
            self._met.notify_all()
        with contextlib.suppress(OSError):  # wakes `accept`, which closing does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for talk in talks:
            talk.close()
        self._thread.join(5)


class Visit:
    """The workers of an engine that prefills, as one that decodes sees them; they are met when they are first asked.

    Parameters
    ----------
    links : Links
        Of this worker's endpoint.
    start : str
        What tells this start of the engine from others; all its workers say the same.
    world : int
        Workers of this engine.
    host, port, ports
        Where the other engine's first worker listens, and how many there are: at the ports behind it.
    word : float
        Seconds that a word of the other side may take.
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
        self._failed_at, self._why = -_AGAIN, ""
        self._is_closed = False

    @property
    def is_met(self) -> bool:
        return self._link is not None

    def link(self) -> Link:
        """The link to them, which are met first where that is to be done.

        Raises
        ------
        KvbmError
            One of them is not there, or does not fit.
        """
        with self._lock:
            return self._meet()

    def _meet(self) -> Link:
        with contextlib.suppress(KvbmError):
            for talk in self._talks:
                talk.look()  # one that has gone has closed it
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
            if self._link is None or cards != self._cards:  # an engine that was started again has other cards
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

    def want(self, request: str, is_given_up: bool) -> None:
        """Have a request sent by every worker, or let go.

        Raises
        ------
        TransferError
            One does not have it, or has gone; the next call meets them anew.
        """
        with self._lock:
            self._meet()
            try:
                for talk in self._talks:
                    talk.say(want=request, given_up=is_given_up)
                answers = [talk.hear() for talk in self._talks]
            except BaseException:
                self._part()
                raise
        if refused := [answer["refused"] for answer in answers if "refused" in answer]:
            raise TransferError(str(refused[0]))

    def _part(self) -> None:
        for talk in self._talks:
            talk.close()
        self._talks = []

    def close(self) -> None:
        """End the conversations: who waits for an answer is told."""
        self._is_closed = True
        for talk in list(self._talks):
            talk.close()
