"""How the workers of two vLLM engines meet: cards, and which request is wanted, as JSON over TCP.

A worker that decodes asks every worker of the engine that prefilled.  That one knows which blocks a request has: nobody tells it
block ids from outside.
"""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ...errors import BindError, KvbmError, TransferError
from ...reshard import Endpoint, Link
from ...reshard.talk import Talk, connect, listen

__all__ = ["Door", "Visit"]

#: Seconds that a word of the other side may take; one that has more to do says that it is busy.
WORD = 30.0

#: Most ranks of an engine.
_MOST_RANKS = 4096


class Door:
    """Where workers of other engines ask for requests of this one.

    Parameters
    ----------
    endpoint : Endpoint
        Of this worker.
    host, port
        Where to listen; port 0 is any that is free.
    begin : callable
        Sends a request by a link, or lets go of it; raises `KvbmError` for one that is not there.  It may be called twice for one.

    Attributes
    ----------
    port : int
    """

    def __init__(self, endpoint: Endpoint, host: str, port: int, begin: Callable[[str, Link, bool], None]) -> None:
        self._endpoint, self._begin = endpoint, begin
        self._lock = threading.Lock()
        self._cards: dict[str, dict[int, bytes]] = {}
        self._links: dict[str, Link] = {}
        self._met = threading.Condition(self._lock)
        self._socket = listen(host, port)
        self.port = int(self._socket.getsockname()[1])
        self._is_closed = False
        self._talks: set[Talk] = set()
        threading.Thread(target=self._listen, name="kvbm door", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            try:
                talk = Talk(connection, WORD)
            except OSError:
                continue  # it has gone already
            threading.Thread(target=self._serve, args=(talk,), name=f"kvbm door {talk.peer}", daemon=True).start()

    def _serve(self, talk: Talk) -> None:
        """One worker of another engine, until it goes."""
        with contextlib.suppress(OSError), talk:
            with self._lock:
                self._talks.add(talk)
            try:
                link = self._meet(talk)
                while True:
                    talk.timeout = 1e9  # it asks when it has a request
                    heard = talk.hear("want", "given_up")
                    wanted, talk.timeout = heard["want"], WORD
                    if not isinstance(wanted, str):
                        raise BindError(f"{talk.peer}: want: expected a request's name, got {wanted!r:.100}")
                    try:
                        self._begin(wanted, link, bool(heard["given_up"]))
                    except KvbmError as error:
                        talk.say(refused=str(error)[:4000])
                    else:
                        talk.say(begun=wanted)
            except KvbmError as error:
                talk.fail(error)
            except Exception as error:  # of whatever is said to it
                talk.fail(BindError(f"{type(error).__name__}: {error}"))
            finally:
                with self._lock:
                    self._talks.discard(talk)

    def _meet(self, talk: Talk) -> Link:
        """Wait until all workers of its engine have brought their cards."""
        hello = talk.hear("engine", "start", "rank", "world", "card")
        name, rank, world = f"{hello['engine']}/{hello['start']}", hello["rank"], hello["world"]
        if type(world) is not int or type(rank) is not int or not 0 <= rank < world <= _MOST_RANKS:
            raise BindError(f"{talk.peer}: expected a rank of a world, got {rank!r:.40} of {world!r:.40}")
        talk.say(card=base64.b64encode(self._endpoint.card()).decode())
        card = base64.b64decode(str(hello["card"]), validate=True)
        with self._met:
            cards = self._cards.setdefault(name, {})
            cards[rank] = card
            self._met.notify_all()
            while len(cards) < world and not self._is_closed:
                self._met.wait(1.0)
                talk.busy()
                talk.look()
            if self._is_closed:
                raise BindError(f"{talk.peer}: this engine is shutting down")
            link = self._links.get(name)
            if link is None:
                link = self._links[name] = self._endpoint.meet(cards.values())
        talk.say(met=True)
        return link

    def close(self) -> None:
        self._socket.close()
        with self._met:
            self._is_closed = True
            self._met.notify_all()
            talks = list(self._talks)
        for talk in talks:
            talk.close()


class Visit:
    """The workers of an engine that prefills, as one that decodes sees them.

    Parameters
    ----------
    endpoint : Endpoint
        Of this worker.
    start : str
        What tells this start of the engine from others; all its workers say the same.
    world : int
        Workers of this engine.
    host, port, ports
        Where the other engine's first worker listens, and how many there are: at the ports behind it.

    Raises
    ------
    KvbmError
        One of them is not there, or does not fit.
    """

    def __init__(self, endpoint: Endpoint, start: str, world: int, host: str, port: int, ports: int) -> None:
        self._lock = threading.Lock()
        self._talks: list[Talk] = []
        try:
            cards = []
            for number in range(ports):
                talk = connect(host, port + number, WORD)
                self._talks.append(talk)
                card = base64.b64encode(endpoint.card()).decode()
                talk.say(engine=endpoint.engine, start=start, rank=endpoint.rank, world=world, card=card)
                cards.append(base64.b64decode(str(talk.hear("card")["card"]), validate=True))
            self.link = endpoint.meet(cards)
            for talk in self._talks:
                talk.hear("met")
        except BaseException:
            self.close()
            raise

    def want(self, request: str, is_given_up: bool) -> None:
        """Have a request sent by every worker, or let go; `TransferError` where one does not have it."""
        with self._lock:
            for talk in self._talks:
                talk.say(want=request, given_up=is_given_up)
            refused = [answer["refused"] for answer in [talk.hear() for talk in self._talks] if "refused" in answer]
        if refused:
            raise TransferError(str(refused[0]))

    def close(self) -> None:
        for talk in self._talks:
            talk.close()
