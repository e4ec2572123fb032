"""Requests that a vLLM worker prefills for other engines.  They are held until they are sent, or sent by layers during prefill."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from ...errors import BindError, KvbmError, TransferError, printable
from ...reshard import Link, Span
from .identity import differing
from .meetings import Want

__all__ = ["Hold", "Holds", "Push"]

#: The number of a held request in its name.
_NUMBER = re.compile("[0-9]{1,18}")

#: Seconds that a wanted request may wait until the scheduler's message that it is held.
_HOLD_DELAY = 20.0

#: Most requests that are remembered after they were sent or released, so that late questions are answered at once.  If there are
#: more, the link with most of them loses its oldest.
_MOST_PAST = 4096

#: Most requests that are wanted and not held yet: of one link, and of all.  If there are more, the link with most of them loses
#: its newest.
_SHARE, _MOST_WANTED = 1024, 8192


@dataclass
class Hold:
    """A prefilled request: its blocks per vLLM group, the number of tokens in them, and the seconds for which it is held.

    `number` is its number among the engine's held requests.  `name` is the router's name for a request that other engines may ask
    for before it is prefilled.  `failure` is the reason if a request has blocks and was not prefilled.
    """

    blocks: tuple[list[int], ...]
    tokens: int
    seconds: float
    number: int = 0
    name: str = ""
    failure: str = ""


@dataclass
class Push:
    """A request that a step computes: the router's name, blocks per vLLM group, and number of tokens before and after the step."""

    name: str
    blocks: tuple[list[int], ...]
    before: int
    after: int


@dataclass
class _Part:
    """Some tokens of a group, and the number of the model's layers that were sent for them."""

    key: str
    group: str
    tokens: range
    layers: int = 0


@dataclass
class _Request:
    """A request of this worker, the worker that wants it, and its sendings.  Without a hold it is still being computed."""

    names: tuple[str, ...]
    hold: Hold | None = None
    until: float = 0.0
    wait: Any = None
    link: Link | None = None
    want: Want | None = None
    parts: list[_Part] = field(default_factory=list)
    sendings: list[Any] = field(default_factory=list)
    has_begun: bool = False  # all its sendings have begun
    failure: str = ""

    @property
    def has_ended(self) -> bool:
        return all(sending.has_ended for sending in self.sendings)


class _Past:
    """Requests that were sent, released or never came, by the link that they concern; None: this engine's own."""

    def __init__(self) -> None:
        self._by_link: dict[Link | None, OrderedDict[str, str]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, name: str, link: Link | None, why: str) -> None:
        """Remember a request.  `why` is empty if it was sent over the link."""
        self.discard(name)
        for closed in [one for one in self._by_link if one is not None and one.is_closed and one is not link]:
            self._count -= len(self._by_link.pop(closed))
        self._by_link.setdefault(link, OrderedDict())[name] = why
        self._count += 1
        if self._count > _MOST_PAST:
            most = max(self._by_link, key=lambda one: len(self._by_link[one]))
            self.discard(next(iter(self._by_link[most])), most)

    def discard(self, name: str, *links: Link | None) -> None:
        """Forget a request, if it was not forgotten before."""
        for link in links or tuple(self._by_link):
            names = self._by_link[link]
            self._count -= names.pop(name, None) is not None
            if not names:
                del self._by_link[link]

    def why(self, name: str, link: Link) -> str | None:
        """Why a link does not get a request, empty if it has been sent over it; None if the request is not remembered.

        A refusal to one engine does not apply to another one.
        """
        for one in (link, None):
            if name in (names := self._by_link.get(one, OrderedDict[str, str]())):
                return names[name]
        was_sent = any(names.get(name) == "" for names in self._by_link.values())
        return "it was sent to another engine" if was_sent else None


class Holds:
    """The requests that a prefill worker sends to other engines.

    Another engine asks for a request by name, and receives it over the same link.  A held request is sent at once.  A request
    that is not held yet is sent when it is.  A request in parts is sent while it is computed: each part when its tokens are
    computed, some layers at a time.  Blocks are read until all sendings that have begun have ended; only then may they be
    reused.

    `spans` and `whole` are those of `Caches`, and `layers` are vLLM's names of this worker's layers → their numbers in the
    model, which has `count` layers.  `each` of them are sent at a time; 0: all layers after the step.  `seconds` is the time
    limit of a sending, and `wait_seconds` how long a request that the router has named is waited for.  `queued` returns the
    device's pending work on the blocks, in the form that `Link.send` accepts.  `tell` tells the engine at the other end of a
    link that a request will not come.
    """

    def __init__(
        self, spans: Callable[..., dict[str, Span]], *, whole: Iterable[str], layers: Mapping[str, int], count: int,
        each: int, seconds: float, wait_seconds: float, queued: Callable[[], Any],
        tell: Callable[[Link, str, str], None],
    ) -> None:  # fmt: skip
        self._spans, self._whole, self._count, self._seconds = spans, frozenset(whole), count, seconds
        self._wait_seconds, self._queued, self._tell = wait_seconds, queued, tell
        bounds = [*range(each, count, each), count] if each else [count]
        first = 0
        self._stages: list[tuple[int, frozenset[str]]] = []  # the last layer plus one of each group of layers, and their names
        for behind in bounds:
            if names := frozenset(name for name, number in layers.items() if first <= number < behind):
                self._stages.append((behind, names))
            first = behind
        if not each:
            self._stages = []
        self._lock = Lock()
        self._requests: dict[str, _Request] = {}  # vLLM's name → request
        self._names: dict[str, str] = {}  # the name by which it is wanted → vLLM's name
        self._wanted: OrderedDict[str, tuple[Want, Link, float]] = OrderedDict()  # not held yet
        self._waits: Counter[Link] = Counter()  # the number of these of each link
        self._named: dict[str, set[str]] = {}  # names of the router, without inputs → these names of what is held or wanted
        self._past = _Past()
        self._refusals: deque[tuple[Link, str, str]] = deque()
        self._start, self._latest = "", -1
        self._step: list[tuple[Push, _Request]] = []
        self._left: deque[tuple[int, set[str]]] = deque()
        self.counts: Counter[str] = Counter()

    # ---- requests of other engines ---------------------------------------------------------------------------------

    def asked(self, want: Want, link: Link) -> None:
        """Send a request, or release it.  May be called twice for the same request.

        Raises `TransferError` if the request will not come, as it is not held here and will not be, or was sent to another
        engine; and `BindError` if it is wanted in parts that are no groups here.
        """
        if not self._whole.issuperset(want.groups):
            raise BindError(f"want: groups: expected some of {sorted(self._whole)}, got {want.groups!r:.200}")
        try:
            self._asked(want, link)
        finally:
            self._send_refusals()

    def _asked(self, want: Want, link: Link) -> None:
        with self._lock:
            record = self._requests.get(self._names.get(want.name, ""))
            if record is None:
                self._await(want, link)
                return
            if why := record.failure or ("" if record.link in (None, link) else "it was sent to another engine"):
                raise TransferError(f"request {printable(want.name)}: {why}")
            is_first = record.link is None  # else another worker of the same engine has asked before
            if is_first or want.is_given_up:
                self._join(record, want, link)
            if want.is_given_up:
                for sending in record.sendings:
                    sending.abort()
            if not is_first or record.hold is None:
                return  # already asked for, or sent while it is computed
        self._finish(record)
        if record.failure:
            raise TransferError(f"request {printable(want.name)}: {record.failure}")

    def _await(self, want: Want, link: Link) -> None:
        """Remember a wanted request that is not held yet."""
        name = printable(want.name)
        if (why := self._past.why(want.name, link)) is not None:
            if why:
                raise TransferError(f"request {name}: {why}")
            return
        (start, number), seconds = (*want.name.split("/"), "")[:2], self._wait_seconds
        if start != "push":
            if start != self._start:
                raise TransferError(f"request {name}: it was held before this engine was started again")
            if not _NUMBER.fullmatch(number) or int(number) <= self._latest:
                raise TransferError(f"request {name}: not held here")
            seconds = _HOLD_DELAY
        if want.name in self._wanted:
            if self._wanted[want.name][1] is not link:
                raise TransferError(f"request {name}: it was sent to another engine")
            if not want.is_given_up:
                return
        else:
            if self._waits[link] >= _SHARE or not self._has_room(link):
                raise TransferError(f"request {name}: {self._waits[link]} others are waited for")
            if start == "push":
                self._require_inputs(want.name)
                self._named.setdefault(_plain(want.name), set()).add(want.name)
            self._waits[link] += 1
        self._wanted[want.name] = want, link, time.monotonic() + seconds

    def _require_inputs(self, name: str) -> None:
        """Raise `TransferError` if a request of this name is held, and has another adapter or other pictures."""
        for other in self._named.get(_plain(name), ()):
            if other in self._names:
                raise TransferError(f"request {printable(name)}: {_other_inputs(other, name)}")

    def _unname(self, name: str) -> None:
        if name not in self._names and name not in self._wanted and (names := self._named.get(_plain(name))):
            names.discard(name)
            if not names:
                del self._named[_plain(name)]

    def _has_room(self, link: Link) -> bool:
        """True if one more request can be waited for: else the link with most of them loses one, if it is another link."""
        if len(self._wanted) < _MOST_WANTED:
            return True
        most, count = self._waits.most_common(1)[0]
        if count <= self._waits[link] + 1:
            return False
        name = next(name for name, (_, one, _) in reversed(self._wanted.items()) if one is most)
        self._take_wanted(name)
        self._refusals.append((most, name, f"{count} others are waited for"))
        return True

    def _take_wanted(self, name: str) -> tuple[Want, Link] | None:
        """A wanted request that is waited for no longer, and the link that wants it."""
        if (waiting := self._wanted.pop(name, None)) is None:
            return None
        want, link, _ = waiting
        self._unname(name)
        self._waits[link] -= 1
        if not self._waits[link]:
            del self._waits[link]
        return want, link

    def _join(self, record: _Request, want: Want, link: Link) -> None:
        record.link, record.want = link, want
        parts = () if want.is_given_up else want.parts()
        record.parts = [_Part(key, group, tokens) for key, tokens in parts for group in want.groups]

    # ---- the worker: before, during and after a step ---------------------------------------------------------------

    def begin_step(self, pushes: Mapping[str, Push]) -> None:
        """Begin a step that computes these requests.  Other engines may ask for them during the step."""
        self._step = []
        if not pushes:
            return
        with self._lock:
            for request, push in pushes.items():
                if request not in self._requests:
                    self._add(request, _Request((push.name,)))
                self._step.append((push, self._requests[request]))
        self._send_refusals()
        self._left = deque((behind, set(names)) for behind, names in self._stages)
        self._push(0)

    def saved(self, layer: str) -> None:
        """A layer of the step is computed, or its computation is enqueued."""
        if not self._step or not self._left:
            return
        behind, names = self._left[0]
        names.discard(layer)
        if not names:
            self._left.popleft()
            self._push(behind)

    def end_step(self) -> None:
        """All layers of the step are computed or enqueued, including those for which `saved` was not called."""
        if self._step:
            self._push(self._count)
            self._step = []

    def _push(self, behind: int) -> None:
        """Send the layers below `behind` of parts that end in this step, and all layers of parts that ended before."""
        wait: Any = self
        for push, record in self._step:
            if record.link is None or record.failure:
                continue
            if failed := next((sending.why for sending in record.sendings if sending.has_failed), ""):
                self._fail(record, failed)
                continue
            try:
                for part in record.parts:
                    upto = self._count if part.tokens.stop <= push.before else behind
                    if part.tokens.stop > push.after or part.layers >= upto or part.group not in self._whole:
                        continue
                    wait = self._queued() if wait is self else wait
                    self._send_part(record, part, push.blocks, upto, wait)
                    self.counts["pushed"] += 1
            except Exception as error:
                self._fail(record, _text(error))

    def _send_part(self, record: _Request, part: _Part, blocks: tuple[list[int], ...], behind: int, wait: Any) -> None:
        assert record.link is not None
        span = self._spans(blocks, part.tokens.stop, part.tokens.start)[part.group]
        layers = range(part.layers, behind)
        record.sendings.append(
            record.link.send(part.key, span, layers=layers, group=part.group, wait=wait, timeout=self._seconds)
        )
        part.layers = behind

    def _finish(self, record: _Request) -> None:
        """Send the rest of a held request."""
        try:
            if not record.failure:
                self._send_rest(record)
        except Exception as error:
            self._fail(record, _text(error))
        finally:
            record.has_begun = True

    def _send_rest(self, record: _Request) -> None:
        hold, want, link = record.hold, record.want, record.link
        assert hold is not None
        assert want is not None
        assert link is not None
        if want.is_given_up:
            return
        if want.last > hold.tokens:
            raise TransferError(f"request {printable(want.name)}: {want.last} tokens are asked for, {hold.tokens} were prefilled")
        for part in record.parts:
            if part.layers < self._count:
                self._send_part(record, part, hold.blocks, self._count, record.wait)
        for group, span in self._spans(hold.blocks, hold.tokens).items():
            if group not in want.groups:
                record.sendings.append(link.send(want.name, span, group=group, wait=record.wait, timeout=self._seconds))

    def _fail(self, record: _Request, why: str) -> None:
        """Abort the sendings of a request, and tell the engine that wants it."""
        record.failure = record.failure or why
        for sending in record.sendings:
            sending.abort()
        if record.link is not None and record.want is not None:
            self._tell(record.link, record.want.name, why)

    def _add(self, request: str, record: _Request) -> None:
        """Add a request.  If another engine already wants it, connect the two."""
        self._requests[request] = record
        for name in record.names:
            self._past.discard(name)
            self._names[name] = request
            if name.startswith("push/"):
                names = self._named.setdefault(_plain(name), set())
                names.add(name)
                for other in names - self._names.keys():  # wanted with another adapter, or with other pictures
                    if waiting := self._take_wanted(other):
                        self._refusals.append((waiting[1], other, _other_inputs(name, other)))
            if waiting := self._take_wanted(name):
                want, link = waiting
                if record.link is None:
                    self._join(record, want, link)
                else:
                    self._refusals.append((link, name, "it was sent to another engine"))

    def _send_refusals(self) -> None:
        """Send the refusals that were found while the lock was held.  No message is sent under the lock."""
        with contextlib.suppress(IndexError):
            while True:
                self._tell(*self._refusals.popleft())

    # ---- messages of the scheduler ---------------------------------------------------------------------------------

    def take_step(self, start: str, holds: Mapping[str, Hold], unheld: Iterable[str], lost: Mapping[str, str]) -> None:
        """Take new holds, requests that are no longer held, and names of requests that will not come with the reasons."""
        self._start = start
        with self._lock:
            for record in (self._requests[request] for request in unheld if request in self._requests):
                record.until = 0.0
        wait = self._queued() if holds else None
        for request, hold in holds.items():
            with self._lock:
                self._latest = max(self._latest, hold.number)
                names = (f"{start}/{hold.number}/{request}", *([hold.name] if hold.name else []))
                record = self._requests.get(request) or _Request(names)
                record.hold, record.until, record.wait = hold, time.monotonic() + hold.seconds, wait
                record.names = names
                self._add(request, record)
                is_wanted = record.link is not None
            self._send_refusals()
            if hold.failure:
                self._fail(record, hold.failure)
            if is_wanted:
                self._finish(record)
        for name, why in lost.items():
            self._lose(name, why)

    def _lose(self, name: str, why: str) -> None:
        """Remember that a request will not come, as this engine says, and tell who wants it."""
        with self._lock:
            request = self._names.get(name)
            if request is not None and self._requests[request].hold is None:
                self._forget(request, why)
            else:
                self._past.add(name, None, why)
            waiting = self._take_wanted(name)
        if waiting is not None:
            self._tell(waiting[1], name, why)

    def _forget(self, request: str, why: str) -> None:
        record = self._requests.pop(request)
        for name in record.names:
            self._names.pop(name, None)
            self._unname(name)
            self._past.add(name, record.link, why)

    def stop(self, requests: Iterable[str]) -> None:
        """Stop reading the blocks of these requests before a step reuses them.  When it returns, nothing reads them."""
        stopped = [self._requests[request] for request in requests if request in self._requests]
        for record in stopped:
            self._fail(record, "the engine that prefills took its blocks for another request")
        for record in stopped:
            for sending in record.sendings:
                try:
                    sending.synchronize(self._seconds)
                except KvbmError:
                    if not sending.has_ended:
                        raise

    def ended(self) -> set[str]:
        """Requests whose blocks are no longer needed, since the last call."""
        now, over = time.monotonic(), set()
        with self._lock:
            for request, record in list(self._requests.items()):
                if record.hold is None:
                    continue
                if record.link is None and not record.failure:
                    if now < record.until:
                        continue
                    record.failure = f"it was held for {record.hold.seconds:g} s, and nobody asked for it"
                elif not record.has_ended or (record.link is not None and not record.has_begun):
                    continue
                over.add(request)
                has_gone = record.sendings and not record.failure and not any(one.has_failed for one in record.sendings)
                self.counts["sent" if has_gone else "unsent"] += 1
                self._forget(request, record.failure)
            late = [(name, link) for name, (_, link, until) in self._wanted.items() if until < now]
            why = "nothing of this name was prefilled here in time"
            for name, link in late:
                self._take_wanted(name)
                self._past.add(name, link, why)
        for name, link in late:
            self._tell(link, name, why)
        return over


def _plain(name: str) -> str:
    """The name of the router in a name that two engines know (`push_name`)."""
    return name.partition("#")[0]


def _other_inputs(known: str, wanted: str) -> str:
    differ = differing(known.partition("#")[2], wanted.partition("#")[2])
    return f"{differ}: that of the request here is another; expected the same on both engines"


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
