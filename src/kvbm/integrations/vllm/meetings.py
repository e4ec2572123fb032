"""How the workers of two vLLM engines connect: cards and wanted requests, as JSON over TCP.

A worker of the decode engine asks every worker of the prefill engine.  The prefill engine itself knows the blocks of a request: it
never receives block ids from outside.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import BindError, KvbmError, TransferError, TransferTimeoutError, printable
from ...link.notes import Stopped
from ...link.talk import Reception, Talk, connect
from ...reshard import Endpoint, Link

__all__ = ["MOST_PARTS", "Door", "Links", "Visit", "Want"]

#: Time limit in seconds of a door for an answer of the other side, and for the other ranks of its engine.
WORD = 30.0

#: Seconds for which a worker that asks may be silent.
_QUIET = 1e6

#: Seconds until an engine that could not be reached is tried again, so that other requests do not wait for it.
_RETRY_SECONDS = 5.0

#: Seconds of silence after which kvbm checks whether an engine still exists.  Its link is kept until it is lost.
_SILENT_SECONDS = 600.0

#: Most ranks of an engine.
_MOST_RANKS = 4096

#: Most parts of a request, and most groups and characters of a name.
MOST_PARTS, _MOST_GROUPS, _MOST_NAME = 1024, 64, 2000

#: Most messages of a worker about lost requests that are read at a time.
_MOST_LOST = 64

#: Most characters of a reason.
_MOST_TEXT = 1000

#: What listens at the ports of another engine, for messages.
_SERVER = "a vLLM engine with KvbmConnector (ports from its kv_port on)"


@dataclass(frozen=True)
class Want:
    """A request that an engine asks for; `is_given_up` if it is not needed and may be released.

    Some groups of the endpoint are sent in parts: tokens `first` to `last` (exclusive), at most `each` in a part, which ends at
    a multiple of `each`.  All are 0 if it is sent in one part.
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
        if (
            not isinstance(names, list) or not all(isinstance(one, str) for one in names)
            or not len(set(names)) == len(names) <= _MOST_GROUPS
        ):  # fmt: skip
            raise BindError(f"{peer}: want: groups: expected at most {_MOST_GROUPS} names, each once, got {names!r:.100}")
        want = cls(**{"name": None, **given, "groups": tuple(names)})
        kinds = (want.name, str), (want.is_given_up, bool), (want.first, int), (want.last, int), (want.each, int)
        if any(type(value) is not kind for value, kind in kinds) or not 0 < len(want.name) <= _MOST_NAME:
            raise BindError(f"{peer}: want: expected a request's name and numbers, got {given!r:.200}")
        if not (want.groups or want.first == want.last == want.each == 0):
            raise BindError(f"{peer}: want: expected tokens only for a request in parts, got {given!r:.200}")
        if want.groups and not (
            0 <= want.first < want.last < 1 << 48 and want.last - want.first <= want.each * (MOST_PARTS - 1) < 1 << 60
        ):
            raise BindError(f"{peer}: want: expected tokens in at most {MOST_PARTS} parts, got {given!r:.200}")
        return want

    def parts(self) -> Iterator[tuple[str, range]]:
        """Names of the parts, and their tokens."""
        first = self.first
        while first < self.last:
            behind = min(self.last, (first // self.each + 1) * self.each)
            yield f"{self.name}@{first}", range(first, behind)
            first = behind


@dataclass
class _LinkUse:
    """A link that is made or used, and the number of its users.  Only those who want this link wait for its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    link: Link | None = None
    error: KvbmError | None = None


class Links:
    """Links of an endpoint: one per start of another engine, for both directions, no matter which side asked first."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._made: dict[frozenset[bytes], _LinkUse] = {}  # by the cards of all ranks

    def meet(self, cards: Iterable[bytes], end: float) -> Link:
        """The link to the ranks of these cards.  Call `part` after use.  `end` is the time (`time.monotonic`) at which the caller gives up.

        Raises the errors of `Endpoint.meet`.
        """  # noqa: E501
        at = frozenset(cards)
        with self._lock:
            made = self._made.setdefault(at, _LinkUse())
            made.users += 1
        try:
            with held_until(made.lock, end, self.endpoint.engine):  # others read cards and make links meanwhile
                if made.error is not None:
                    raise made.error.with_traceback(None)
                if made.link is None:
                    try:
                        made.link = self.endpoint.meet(at, timeout=end - time.monotonic())
                    except TransferTimeoutError:
                        raise  # the next caller may have more time
                    except KvbmError as error:
                        made.error = error
                        raise
                return made.link
        except BaseException:
            self._leave(at, made)
            raise

    def _leave(self, at: frozenset[bytes], made: _LinkUse) -> bool:
        """End one use of a link.  True if it was the last one."""
        with self._lock:
            made.users -= 1
            if (made.users == 0 or made.error is not None) and self._made.get(at) is made:
                del self._made[at]
            return made.users == 0

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
            at, made = next((at, made) for at, made in self._made.items() if made.link is link)
        if self._leave(at, made):
            with contextlib.suppress(KvbmError):
                link.leave()


@dataclass
class _Client:
    """One start of an engine that asks."""

    name: tuple[str, str]
    world: int
    cards: dict[int, bytes] = field(default_factory=dict)
    link: Link | None = None
    talks: set[Talk] = field(default_factory=set)
    left_at: float = 0.0
    making: threading.Lock = field(default_factory=threading.Lock)


class Door:
    """The server of a worker: workers of other engines ask it for requests.  Port 0 is any free one; `port` says which.

    `begin` sends a request over a link, at once or when it is computed, or releases it.  It raises `KvbmError` if it cannot be
    sent, and may be called twice for one request.  `word` is the time limit in seconds for an answer of the other side, and for
    the other ranks of its engine.  With `is_insecure` it listens at any address, even if the endpoint has no secret.

    Each conversation has its own thread.  While a lock is held that others need, nothing of another side is read, computed or
    waited for.
    """

    def __init__(
        self, links: Links, host: str, port: int, begin: Callable[[Want, Link], None], word: float = WORD, *,
        is_insecure: bool = False,
    ) -> None:  # fmt: skip
        self._links, self._begin, self._word = links, begin, word
        self._met = threading.Condition()
        self._clients: dict[tuple[str, str], _Client] = {}
        self._is_closed = False
        secret = links.endpoint.secret
        self._reception = Reception(
            host, port, self._serve, timeout=word, name="kvbm door", secret=secret, is_insecure=is_insecure
        )
        self.port = self._reception.port

    def _serve(self, talk: Talk) -> None:
        """Serve one worker of another engine until it disconnects."""
        client = self._hear(talk)
        try:
            talk.is_known, talk.timeout = True, self._word
            link = self._meet(talk, client)
            while True:
                talk.wait(_QUIET, _QUIET)  # it is silent until it has a request
                want = Want.of(talk.hear("want"), talk.peer)
                try:
                    self._begin(want, link)
                except KvbmError as error:
                    talk.say(refused=printable(str(error), _MOST_TEXT))
                else:
                    talk.say(begun=want.name)
        finally:
            with self._met:
                client.talks.discard(talk)
                client.left_at = time.monotonic()
                if not client.talks and client.link is None and self._clients.get(client.name) is client:
                    del self._clients[client.name]
                self._met.notify_all()

    def _hear(self, talk: Talk) -> _Client:
        """Read the identity and the card of a worker.  Remains of earlier starts of its engine are removed."""
        hello = talk.hear("engine", "start", "rank", "world", "card")
        engine, start, rank, world = (hello[key] for key in ("engine", "start", "rank", "world"))
        if not all(isinstance(text, str) and len(text) <= _MOST_NAME for text in (engine, start)):
            raise BindError(f"{talk.peer}: expected names of an engine and its start, got {engine!r:.40}, {start!r:.40}")
        name = engine, start
        if type(world) is not int or type(rank) is not int or not 0 <= rank < world <= _MOST_RANKS:
            raise BindError(f"{talk.peer}: expected a rank of a world, got {rank!r:.40} of {world!r:.40}")
        card = _card(hello, talk.peer)
        self._links.endpoint.require_alike(card)
        self._forget(name)
        with self._met:
            client = self._clients.setdefault(name, _Client(name, world))
            if client.world != world or client.cards.get(rank, card) != card:
                raise BindError(f"{talk.peer}: rank {rank} of {printable(engine)}: another card than before, at the same start")
            client.cards[rank] = card
            client.talks.add(talk)
            self._met.notify_all()
        return client

    def _forget(self, name: tuple[str, str]) -> None:
        """Forget earlier starts of this engine, and engines that are gone."""
        now, older, silent = time.monotonic(), [], []
        with self._met:
            for other, one in self._clients.items():
                if one.talks or other == name:
                    continue
                if other[0] == name[0]:  # the engine was restarted
                    older.append(one)
                elif one.left_at + _SILENT_SECONDS < now:
                    silent.append(one)
        for client in [*older, *(one for one in silent if self._links.is_lost(one.link))]:
            self._part(client)

    def _part(self, client: _Client) -> None:
        with self._met:
            if client.talks or self._clients.get(client.name) is not client:
                return  # it has come back, or another thread was here
            del self._clients[client.name]
        if client.link is not None:
            self._links.part(client.link)

    def _meet(self, talk: Talk, client: _Client) -> Link:
        """Wait until all workers of the engine have sent their cards."""
        talk.say(card=base64.b64encode(self._links.endpoint.card()).decode())
        end = time.monotonic() + self._word
        while True:
            with self._met:
                left = end - time.monotonic()
                if not self._is_closed and len(client.cards) < client.world and left > 0:
                    self._met.wait(min(1.0, left))
                if self._is_closed:
                    raise BindError(f"{talk.peer}: this engine is shutting down")
                if len(client.cards) == client.world:
                    break
                ranks = sorted(client.cards)
            if left <= 0:
                raise TransferTimeoutError(
                    f"{talk.peer}: of {client.world} ranks only {str(ranks)[:200]} have come within {self._word:g} s"
                )
            talk.busy()
            talk.look()
        end = time.monotonic() + self._word
        with held_until(client.making, end, talk.peer):  # only workers of this engine wait
            if client.link is None:
                client.link = self._links.meet(client.cards.values(), end)
        talk.say(met=True)
        return client.link

    def tell(self, link: Link, name: str, why: str) -> None:
        """Tell an engine that a request will not come, after it was accepted.  It does not wait."""
        with self._met:
            talks = [talk for client in self._clients.values() if client.link is link for talk in client.talks]
        for talk in talks:
            with contextlib.suppress(KvbmError):  # a peer that has gone does not wait
                talk.tell(lost=name, why=printable(why, _MOST_TEXT))

    def close(self) -> None:
        with self._met:
            self._is_closed = True
            self._met.notify_all()
        self._reception.close()


class Visit:
    """The client of a decode worker: connections to all workers of a prefill engine.  It connects on first use.

    `start` identifies this start of the engine, which has `world` workers; it is the same on all of them.  The other engine's
    workers listen at `ports` consecutive ports of `host`, from `port` on.  `word` are the seconds that a call may take if it is
    not given its end.

    Calls for one engine are made one after the other by its own thread (`submit`), so an engine that does not answer delays no
    other.  Each call has an end.
    """

    def __init__(
        self, links: Links, start: str, world: int, host: str, port: int, ports: int, word: float = WORD
    ) -> None:
        self._where = f"{printable(host)}:{port}"
        if not 0 < ports <= _MOST_RANKS or not 0 < port < port + ports <= 1 << 16:
            raise BindError(f"{self._where}: expected a port, and a number of workers up to {_MOST_RANKS}, got {ports}")
        self._links, self._start, self._world, self._word = links, start, world, word
        self._host, self._port, self._ports = host, port, ports
        self._lock = threading.Lock()
        self._waiter = ThreadPoolExecutor(1, f"kvbm load {self._where}")
        self._talks: list[Talk] = []
        self._cards: list[bytes] = []
        self._link: Link | None = None
        self._lost: dict[str, str] = {}
        self._failed_at, self._why = -_RETRY_SECONDS, ""
        self._is_closed = False

    @property
    def is_met(self) -> bool:
        return self._link is not None

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make the engine's thread call a function, after those that were submitted before."""
        with contextlib.suppress(RuntimeError):  # this engine is shutting down
            self._waiter.submit(call, *arguments)

    def link(self, end: float | None = None) -> Link:
        """The link to the workers.

        Connects first if needed.  `end` is the time (`time.monotonic`) at which the caller gives up.  Raises `KvbmError` if a
        worker cannot be reached, or does not fit.
        """
        end = self._end(end)
        with held_until(self._lock, end, self._where):
            return self._meet(end)

    def _end(self, end: float | None) -> float:
        return time.monotonic() + self._word if end is None else end

    def _left(self, end: float) -> float:
        if (left := end - time.monotonic()) <= 0:
            raise TransferTimeoutError(f"{self._where}: no answer in time")
        return left

    def _meet(self, end: float) -> Link:
        with contextlib.suppress(KvbmError):
            for talk in self._talks:
                talk.look()  # a worker that has gone has closed the connection
            if self._link is not None and self._talks:
                return self._link
        self._part()
        if time.monotonic() < self._failed_at + _RETRY_SECONDS:
            raise TransferError(f"{self._why}; it is tried again after {_RETRY_SECONDS:g} s")
        try:
            cards = []
            for number in range(self._ports):
                talk = connect(self._host, self._port + number, self._left(end), self._links.endpoint.secret, _SERVER)
                self._talks.append(talk)
                if self._is_closed:
                    raise BindError("this engine is shutting down")
                here = self._links.endpoint
                card = base64.b64encode(here.card()).decode()
                talk.timeout = self._left(end)
                talk.say(engine=here.engine, start=self._start, rank=here.rank, world=self._world, card=card)
                cards.append(_card(talk.hear("card", within=self._left(end)), talk.peer))
            if self._link is None or cards != self._cards:  # a restarted engine has other cards
                if self._link is not None:
                    link, self._link = self._link, None
                    self._links.part(link)
                self._link, self._cards = self._links.meet(cards, end), cards
            for talk in self._talks:
                talk.hear("met", within=self._left(end))
            return self._link
        except BaseException as error:
            self._failed_at, self._why = time.monotonic(), str(error)
            self._part()
            raise

    def want(self, want: Want, end: float | None = None) -> None:
        """Ask every worker to send a request when it is computed, or to release it.  `end` as for `link`.

        Raises `TransferError` if a worker does not have the request and will not get it, or is gone.  The next call connects
        again.
        """
        end = self._end(end)
        with held_until(self._lock, end, self._where):
            self._meet(end)
            try:
                for talk in self._talks:
                    talk.timeout = self._left(end)
                    talk.say(want=asdict(want))
                answers = [self._answer(talk, end) for talk in self._talks]
            except BaseException:
                self._part()
                raise
        if refused := [answer["refused"] for answer in answers if "refused" in answer]:
            raise TransferError(printable(str(refused[0]), _MOST_TEXT))

    def _answer(self, talk: Talk, end: float) -> dict[str, Any]:
        while True:
            heard = talk.hear(within=self._left(end))
            if "lost" not in heard:
                return heard
            self._note_lost(heard)

    def _note_lost(self, heard: dict[str, Any]) -> None:
        if len(self._lost) < _MOST_LOST * self._ports:
            self._lost[str(heard["lost"])] = printable(str(heard.get("why", "")), _MOST_TEXT)

    def lost(self) -> dict[str, str]:
        """Accepted requests that will not come, and why, since the last call.  It does not wait."""
        if not self._lock.acquire(blocking=False):
            return {}
        try:
            for talk in self._talks:
                with contextlib.suppress(KvbmError):  # the next request connects again
                    for _ in range(_MOST_LOST):
                        if (heard := talk.news()) is None:
                            break
                        if "lost" in heard:
                            self._note_lost(heard)
            found, self._lost = self._lost, {}
            return found
        finally:
            self._lock.release()

    def _part(self) -> None:
        for talk in self._talks:
            talk.close()
        self._talks = []

    def leave(self) -> None:
        """End the engine's thread after what was submitted."""
        self._waiter.shutdown(wait=False)

    def close(self) -> None:
        """Close the connections.  Threads that wait for an answer get an error."""
        self._is_closed = True
        self._waiter.shutdown(wait=False, cancel_futures=True)
        for talk in list(self._talks):
            talk.close()


@contextlib.contextmanager
def held_until(lock: threading.Lock, end: float, what: str) -> Iterator[None]:
    """Hold a lock.  Raises `TransferTimeoutError` if it is not free at `end`."""
    if not lock.acquire(timeout=max(end - time.monotonic(), 0.0)):
        raise TransferTimeoutError(f"{what}: no answer in time: another call for it has not ended")
    try:
        yield
    finally:
        lock.release()


def _card(heard: dict[str, Any], peer: str) -> bytes:
    """The card in a message."""
    try:
        return base64.b64decode(heard["card"], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise BindError(f"{peer}: expected a card in base64, got {heard['card']!r:.40}") from None
