"""Links: send and receive sequences between the ranks of two engines, in chunks that are verified by digests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from .. import _core
from .._arguments import quoted, seconds
from ..errors import BindError, KvbmError, PeerLostError, TransferError, TransferTimeoutError, escaping
from ..memory.array_info import Array
from ..reshard.messages import Resharding, require_layers
from ..reshard.packer import Packer
from ..reshard.sequence import Span
from ..wire import Op, Slice
from .chunks import Cut
from .direct import Lender, Reader, Shared, opened
from .flows import Incoming, Inflow, Outflow, Start
from .handle import Arrival, Gathering, Handle, Sending, require_call
from .loans import are_complete, with_table
from .notes import MOST_POSTED, Ask, Done, Note, Offer, Put, Ready, Stop, Stopped, Table, Want, offered, write
from .pulls import Ahead, Pull

if TYPE_CHECKING:
    from .endpoint import Endpoint

_log = escaping(logging.getLogger(__name__))

T = TypeVar("T")

#: Number of an offer → who posts it: True the caller of `send`, False the endpoint's thread, None the caller, soon.  The first
#: of the two to set the entry posts it.
_Claims: TypeAlias = dict[int, bool | None]

#: Seconds between two probes of a peer from which something is expected.
_PROBES = 0.5

#: Longest seconds of a note on its way: an offer that arrives so soon after a failed receive may belong to the failed attempt.
_LATE = 30.0

#: Limits per link: offers that no receive has matched, and ended flows that are remembered with their answers.
_MOST = 4096


class _Course(NamedTuple):
    """What transfers of some layers of a group, in one direction, have in common."""

    packer: Packer
    group: int  # index of the group
    layers: range
    peers: dict[int, str]  # the ranks with which the packer's rank exchanges messages → their names on the wire
    sends_to: tuple[int, ...]  # the ranks to which it sends these layers
    period: int  # tokens after which units, and the ranks that hold tokens, are the same again

    def start(self, span: Span) -> tuple[int, range, int, int, int]:
        """What chunks of a span have in common with those of other sequences: they begin, and end, alike."""
        tokens = span.tokens
        return self.group, self.layers, tokens.start, span.origin, tokens.stop % self.period


class Link:
    """The connection of an endpoint to another engine.  `Endpoint.meet` creates it.

    Attributes
    ----------
    endpoint : Endpoint
        The endpoint on this side.
    engine : str
        Name of the other engine.
    outgoing, incoming : dict of str to Resharding
        Group → its proven plan, to send and to receive.
    """

    def __init__(
        self, endpoint: Endpoint, engine: str, outgoing: Mapping[str, Resharding | KvbmError],
        incoming: Mapping[str, Resharding | KvbmError], sizes: tuple[int, int], gathered: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.endpoint, self.engine = endpoint, engine
        self.title = f"{endpoint.engine} rank {endpoint.rank} ↔ {engine}"
        self.ring = endpoint.ring
        self._plans = {True: dict(outgoing), False: dict(incoming)}
        self._packers: dict[tuple[str, bool], Packer] = {}
        self._courses: dict[tuple[str, bool, range], _Course] = {}
        self._fingerprints: dict[int, tuple[int, int]] = {}
        (self._most, self._least), self._gathered = sizes, frozenset(gathered)
        self.peers: dict[str, int] = {}  # the wire's name of a peer → rank
        self.rings: dict[str, tuple[int, int, int]] = {}  # peer → first slot's offset, slots, bytes per slot
        self.lost: dict[str, PeerLostError] = {}  # peers that are lost, and why
        self._losing: dict[str, PeerLostError] = {}  # found since the last `tick`
        self._flows: dict[tuple[str, int], Outflow] = {}
        self._inflows: dict[tuple[str, int], Incoming] = {}
        self._readers: dict[tuple[str, int], Reader] = {}  # peer and group → how its pool is read
        self._lenders: dict[int, Lender] = {}
        #: Peers and groups that read this side's pool; True if the last of them asked for all that was offered.
        self._pool_readers: dict[tuple[str, int], bool] = {}
        #: `_Course.start` of what was sent in chunks: more of them have no other units, nor single tokens of other peers.
        self._sent_from: set[tuple[int, range, int, int, int]] = set()
        self.packed_at: dict[str, int] = {}  # peer → the address at which the first chunk for it was packed
        self._paths: dict[tuple[int, str], str] = {}  # rank and group → "direct", or why not
        #: Inflows that have ended, and the answer for each.
        self._ended: OrderedDict[tuple[str, int], Done | Stop | None] = OrderedDict()
        self._offers: OrderedDict[tuple[str, int], tuple[Offer, float]] = OrderedDict()  # and its latest possible start
        #: Failed receives: (group, key) → time, numbers, and reason.
        self._failed: OrderedDict[tuple[int, bytes], tuple[float, int, str]] = OrderedDict()
        self._handles: list[Handle] = []
        self._counts: Counter[str] = Counter()
        self._numbers = itertools.count(secrets.randbits(32) + 1)
        self._ahead: dict[tuple[str, bytes], list[Ahead]] = {}  # peer and what is offered → what begins with such offers
        self.left: list[Ahead] = []  # copies under way that no transfer waits for
        self._claimed: list[tuple[Sending, Sequence[Start], _Claims]] = []  # what begins when the caller has said its offers
        self._early: list[tuple[str, Note]] = []  # answers of peers to offers of these
        self._probe_at = 0.0  # time of the next check of silent peers
        self.is_closed = False

    # ---- public methods --------------------------------------------------------------------------------------------

    def send(
        self, key: str, span: Span, *, layers: range | None = None, group: str = "", wait: Any = None,
        stream: Any = None, timeout: float = 30.0,
    ) -> Sending:  # fmt: skip
        """Push tokens of a sequence to the ranks of the other engine that hold them.

        Parameters
        ----------
        key : str
            Name of the sequence, the same on both sides.
        span : Span
            Tokens and blocks of this rank.
        layers : range, optional
            Layers of the model.  To send layers as they are computed, call it once per range.  Default: all.
        group : str, optional
            Group of the endpoint's pool.
        wait, stream : optional
            As for `Transfer.copy`: the event after which the blocks are complete.  A stream that a graph captures is refused.
        timeout : float
            Seconds after which the transfer fails.

        Returns
        -------
        Sending

        Raises
        ------
        BindError
            The span does not fit, or there is no such group.
        CoverageError
            The other engine's ranks do not hold the same part of the model.
        """
        sending, starts = self._sending(key, span, layers, group, wait, stream, timeout, pulls=False)
        claims: _Claims = {}
        self.endpoint.submit(lambda: self._begin_sending(sending, starts, claims), wakes=False)
        try:
            for start in starts:
                number = start.offer.sending
                if claims.setdefault(number, None) is None:
                    try:
                        claims[number] = self._post(start)
                    finally:
                        claims[number] = claims[number] or False
        finally:
            self.endpoint.wake()
        if any(claims.values()):  # the thread needs it next
            with contextlib.suppress(KvbmError):  # the thread finds the same error, and the sending fails
                self._list(sending, self._course(group, layers, sends=True))
        return sending

    def offer(self, key: str, span: Span, **options: Any) -> Sending:
        """As `send`, but the other side fetches: chunks are packed when the peer wants them, and the peer reads them from here."""
        sending, starts = self._sending(key, span, pulls=True, **{**_SEND, **options})
        self.endpoint.submit(lambda: self._begin_sending(sending, starts))
        return sending

    def receive(
        self, key: str, span: Span, *, layers: range | None = None, group: str = "", verify: str = "after",
        wait: Any = None, stream: Any = None, timeout: float = 30.0,
    ) -> Arrival | Gathering:  # fmt: skip
        """Receive tokens of a sequence from the ranks that hold them, whether they call `send` or `offer`.

        Parameters
        ----------
        key, group, layers, wait, stream, timeout
            As for `send`.  `layers` are all layers that are received, in any number of sendings.
        span : Span
            Tokens and blocks of this rank.  Only these tokens are received; the sender may send more.
        verify : {"after", "before"}
            As for `Cut.unpack`.

        Returns
        -------
        Arrival or Gathering
            The handle of the transfer.  A Gathering if ranks of this engine hold the same and the link has `gather`: then all of
            these ranks must call `receive` for the same tokens, with blocks for every token.
        """
        arrival = self._arriving(key, span, layers, group, verify, wait, stream, timeout)
        if group not in self._gathered:
            with _given_up(arrival):
                self.endpoint.submit(lambda: self._begin_arrival(arrival), wakes=False)
            for ahead in arrival.ahead:  # their copies begin here if the offers have come
                self.endpoint.wire.expect(ahead.peer, ahead.copies)  # type: ignore[attr-defined]
            self.endpoint.wake()
            return arrival
        if (near := self.endpoint.siblings) is None:
            raise BindError(f"{self.title}: gather: call join first, with the cards of all ranks of {self.endpoint.engine}")
        name = f"{self.engine}: {key}"
        rest = near._arriving(name, span, layers, group, verify, wait, stream, timeout)
        with _given_up(rest):
            passing, starts = near._sending(name, span, layers, group, None, stream, timeout, pulls=False)
            gathering = Gathering(arrival, rest, passing, lambda: near._begin_sending(passing, starts))

            def begin_both() -> None:
                near._begin_arrival(rest)
                self._begin_arrival(arrival)

            self.endpoint.submit(begin_both)
        return gathering

    def _arriving(
        self, key: str, span: Span, layers: range | None, group: str, verify: str, wait: Any, stream: Any,
        timeout: float,
    ) -> Arrival:  # fmt: skip
        require_call(key, span, timeout)
        course = self._course(group, layers, sends=False)
        packer, some = course.packer, course.layers
        packer.require_usable()
        packer.require_spans(span, span.origin)
        if verify not in ("after", "before"):
            raise BindError(f"verify: expected 'after' or 'before', got {quoted(verify)}")
        identity, order = (course.group, _hashed(key)), self._order(packer, wait, stream)
        arrival = Arrival(self, key, span, timeout, order, verify=verify, identity=identity, layers=some)
        readers = self._direct(course, self._readers)
        # Prepare while the offer is on its way: mostly it is of everything that is expected, from the same origin.
        if readers is not None:
            packer.listed(span, span.origin)
        try:
            if readers is None:
                self.cut(arrival, course.group, span.tokens, span.origin, some, sends=False)
            else:
                for rank, reader in readers.items():
                    arrival.parts[rank, span.origin, some] = reader.parts(span, span.origin, some)
                is_plain = verify == "after" and wait is None and group not in self._gathered and self.endpoint.secret is None
                if is_plain and identity not in self._failed:
                    self._foresee(arrival, course, readers)
        except KvbmError:  # it is raised when the offer arrives
            arrival.expect_no_more()
            arrival.ahead = []
        arrival.missing = packer.layers(some).copy()
        return arrival

    def _foresee(self, arrival: Arrival, course: _Course, readers: Mapping[int, Reader]) -> None:
        """Prepare what begins with the offers of all that is received, if they are of complete blocks."""
        (group, key), span, some = arrival.identity, arrival.span, course.layers
        for rank, reader in readers.items():
            peer = course.peers[rank]
            loans = self.endpoint.wire.loans(peer)  # type: ignore[attr-defined]
            parts = arrival.parts[rank, span.origin, some]
            entries = reader.foreseen(parts, span, some)
            if loans is not None and entries is not None and entries <= MOST_POSTED:
                offer = Offer(0, course.packer.fingerprint, key, group, some, span.tokens, span.origin, False)
                arrival.ahead.append(Ahead(arrival, peer, rank, offer, reader, parts, entries, loans))

    fetch = receive

    def stats(self) -> dict[str, float]:
        """Counters: chunks and bytes in each direction, repeated and wrong notes, waits for slots, failures, seconds."""
        names = (
            "bytes_sent", "bytes_received", "chunks_sent", "chunks_received", "chunks_wrong", "notes_again", "notes_wrong",
            "chunks_mapped", "pulls", "pulls_wrong", "stalls", "sendings", "arrivals", "failed", "seconds",
        )  # fmt: skip
        return {name: self._counts[name] for name in names}

    @property
    def paths(self) -> dict[tuple[int, str], str]:
        """How each rank's blocks of each group come here: ``"direct"``, or why they come in chunks."""
        return dict(self._paths)

    def close(self, *, timeout: float = 30.0) -> None:
        """End the running transfers and the connections.

        Raises `TransferTimeoutError` if the endpoint's thread has not done so within `timeout` seconds; then call it again.
        """
        self.endpoint.call(self._close, seconds("timeout", timeout))

    def leave(self) -> None:
        """As `close`, without waiting for the endpoint's thread."""
        self.endpoint.submit(self._close)

    # ---- beginning -------------------------------------------------------------------------------------------------

    def _sending(
        self, key: str, span: Span, layers: Any, group: str, wait: Any, stream: Any, timeout: float, *, pulls: bool
    ) -> tuple[Sending, list[Start]]:
        """A sending, and what it begins with at each peer."""
        require_call(key, span, timeout)
        course = self._course(group, layers, sends=True)
        packer = course.packer
        packer.require_usable()
        packer.require_spans(span, span.origin)
        sending = Sending(self, key, span, timeout, self._order(packer, wait, stream))
        if not self._is_known(course, span):  # else after the offer was sent, as nothing is wrong with it
            self._list(sending, course)
        return sending, self._starts(sending, course, _hashed(key), pulls=pulls)

    def _is_known(self, course: _Course, span: Span) -> bool:
        """True if `_list` raises no error: there are blocks for all tokens and, for chunks, their kinds were sent before."""
        if len(span.table) and span.table.min() < 0:
            return False
        return course.start(span) in self._sent_from or self._direct(course, self._pool_readers) is not None

    def _list(self, sending: Sending, course: _Course) -> None:
        """List the units or chunks of a sending, which the thread asks for next.  An error is raised if it cannot be sent."""
        span = sending.span
        if self._direct(course, self._pool_readers) is not None:
            course.packer.listed(span, span.origin)
            return
        made = self.cut(sending, course.group, span.tokens, span.origin, course.layers, sends=True)
        if len(self._sent_from) < _MOST and made.chunks and all(some and some[0].units for some in made.chunks.values()):
            self._sent_from.add(course.start(span))

    def _starts(self, sending: Sending, course: _Course, key: bytes, *, pulls: bool) -> list[Start]:
        packer, number, some, peers, sends_to, _ = course
        span, found = sending.span, list[Start]()
        for rank in sends_to if len(span.tokens) else ():
            peer, table = peers[rank], None
            offer = Offer(next(self._numbers), packer.fingerprint, key, number, some, span.tokens, span.origin, pulls)
            if not pulls and self._pool_readers.get((peer, number), False):
                try:
                    table = self.lender(number).table(span)
                    offer = with_table(offer, table, is_complete=are_complete(sending.order, self.endpoint.streams[True]))
                except KvbmError:
                    table = None  # it is raised when the peer asks
            found.append(Start(peer, rank, offer, table))
        return found

    def _post(self, start: Start) -> bool:
        """Send an offer from the caller's thread, if the wire can: to wake the endpoint's takes 50 µs.  False: it was not sent."""
        post = getattr(self.endpoint.wire, "post", None)
        if post is None or self.endpoint.secret is not None or self.is_closed or start.peer in self.lost:
            return False
        return bool(post(start.peer, write(start.offer)))

    def _course(self, group: str, layers: Any, *, sends: bool) -> _Course:
        packer = self._packer(group, sends=sends)
        some = require_layers(layers, packer.made.src.model.nl)
        found = self._courses.get((group, sends, some))
        if found is None:
            peers = {rank: peer for peer, rank in self.peers.items()}
            sends_to = [one.dst for one in packer.made.messages if one.src == self.endpoint.rank and one.of_layers(some)]
            number = sorted(self.endpoint.groups).index(group)
            known = {rank: peers[rank] for rank in packer.peers}
            period = math.lcm(
                *(n for one in packer.fitting(0) for n in (one.t.tokens, *(end.turns.period for end in packer.ends(one))))
            )
            found = self._courses[group, sends, some] = _Course(
                packer, number, some, known, tuple(sends_to if sends else ()), period
            )
        return found

    def _direct(self, course: _Course, known: Mapping[tuple[str, int], T]) -> dict[int, T] | None:
        """Rank → its value in `known`, of all peers of a packer.  None if one is not there, so that chunks must be prepared."""
        found = {rank: known.get((peer, course.group)) for rank, peer in course.peers.items()}
        return None if None in found.values() else found  # type: ignore[return-value]

    def _is_late(self, handle: Sending | Arrival) -> bool:
        """True if the link was closed meanwhile.  The transfer has then failed."""
        if self.is_closed:
            handle.fail(TransferError(f"{self.title}: {handle.what} {handle.key!r}: the link was closed"))
            handle.settle()
        return self.is_closed

    def _begin_sending(self, sending: Sending, starts: Sequence[Start], claims: _Claims | None = None) -> None:
        """Begin to send, as soon as the caller has said what it has claimed: nothing else may come before an offer."""
        known = {} if claims is None else claims
        said = {start.offer.sending for start in starts if known.setdefault(start.offer.sending, False) is not False}
        if None in known.values() and not self.endpoint.is_over:
            self._claimed.append((sending, starts, known))
            return
        dropping = self.endpoint.dropping
        if not any(start.offer.sending in said and start.peer in dropping for start in starts) and self._is_late(sending):
            return
        self._handles.append(sending)
        self.count("sendings")
        for start in starts:
            is_said, lost = start.offer.sending in said, self.lost.get(start.peer)
            if lost is not None:
                sending.fail(lost)
                if not is_said or start.peer not in dropping:
                    continue  # it reads nothing
            if sending.has_failed and not is_said:
                start = start._replace(offer=start.offer._replace(is_lent=False, table=None))
            flow = Outflow(self, sending, start, is_said=is_said)
            sending.flows.append(flow)
            self._flows[start.peer, start.offer.sending] = flow
            if (error := sending.error) is not None:  # before, or at another peer: this peer gets the error, and no loan
                flow.fail(error)
        if not sending.flows and not sending.has_failed:
            sending.settle()

    def _begin_arrival(self, arrival: Arrival) -> None:
        if self._is_late(arrival):
            return
        self._handles.append(arrival)
        self.count("arrivals")
        for ahead in arrival.ahead:
            self._ahead.setdefault((ahead.peer, ahead.what), []).append(ahead)
        ranks = {rank for rank, missing in arrival.missing.items() if missing}
        for peer, rank in self.peers.items():
            if peer in self.lost and rank in ranks:
                arrival.fail(self.lost[peer])
                return
        if not ranks or not len(arrival.span.tokens):
            arrival.settle()
            return
        for (peer, number), (offer, began) in list(self._offers.items()):
            if (offer.group, offer.key) == arrival.identity:
                self._offers.pop((peer, number), None)
                if arrival.has_failed:
                    self._refuse(peer, offer, arrival.number, "another rank's offer does not fit")
                else:
                    self._match(peer, offer, began, arrival)

    def early(self, peer: str, note: bytes) -> Ahead | None:
        """What begins with an offer that is expected, or has begun with it, before it is read.  None if a note is no such offer."""
        number, what = offered(note)
        if (some := self._ahead.get((peer, what))) is None:
            return None
        for ahead in sorted(some, key=lambda one: not one.copies.has_begun) if len(some) > 1 else some:
            if (ahead.copies.has_begun or self._is_next(ahead, number)) and ahead.begin(note):
                some.remove(ahead)
                if not some:
                    del self._ahead[peer, what]
                return ahead
        return None

    def _is_next(self, ahead: Ahead, number: int) -> bool:
        """True if an offer of this number would be the first of its arrival."""
        arrival, at = ahead.arrival, (ahead.peer, number)
        return (
            at not in self._inflows
            and at not in self._ended
            and arrival.is_awaited
            and arrival.identity not in self._failed
            and not any(flow.rank == ahead.rank for flow in arrival.flows)
        )

    def _match(self, peer: str, offer: Offer, began: float, arrival: Arrival, ahead: Ahead | None = None) -> None:
        """Match an offer with the arrival that waits for it."""
        rank = self.peers[peer]
        if ahead is None or ahead.arrival is not arrival:  # what has begun with another offer must not write beside it
            arrival.expect_no_more(rank)
        missing = arrival.missing.get(rank, frozenset())
        for flow in [one for one in arrival.flows if one.rank == rank]:
            if _overlap(flow.offer.layers, offer.layers) and self.leaves(flow):
                flow.fail(TransferError(f"{self.title}: {arrival.key!r}: {peer} has started the transfer again"))
        held = {flow.offer.layers for flow in arrival.flows if flow.rank == rank}
        try:
            if rank not in arrival.missing:
                raise BindError(f"{self.title}: {arrival.key!r}: {peer} offers it, but sends nothing to this rank in the plan")
            if offer.plan != self.plans(offer.group)[1]:
                raise BindError(
                    f"{self.title}: {peer} has another plan: both sides need the same kvbm, placements and options"
                )
            tokens = arrival.span.tokens
            if not offer.tokens.start <= tokens.start < tokens.stop <= offer.tokens.stop:
                raise BindError(
                    f"{self.title}: {arrival.key!r}: expected tokens {tokens}, {peer} offers {offer.tokens}"
                )
            known = arrival.layers
            if not known.start <= offer.layers.start < offer.layers.stop <= known.stop or any(
                _overlap(one, offer.layers) for one in held
            ):
                raise BindError(
                    f"{self.title}: {arrival.key!r}: {peer} offers layers {offer.layers}; expected some of {sorted(missing)}, once"
                )
            if self._may_be_late(arrival, began):  # who sends it again is asked
                offer = offer._replace(is_lent=False, table=None)
            flow = self._incoming(arrival, peer, rank, offer, began, ahead)
        except KvbmError as error:
            arrival.fail(error)
            self._refuse(peer, offer, arrival.number, str(error))
            return
        arrival.flows.append(flow)
        self._inflows[peer, offer.sending] = flow

    def _incoming(
        self, arrival: Arrival, peer: str, rank: int, offer: Offer, began: float, ahead: Ahead | None
    ) -> Incoming:
        """The flow of an offer: a copy out of the peer's pool if this side has opened it, else chunks."""
        reader = self._readers.get((peer, offer.group))
        if reader is not None and ahead is not None and ahead.arrival is arrival and offer.is_lent:
            return Pull(self, arrival, peer, rank, offer, began, reader, ahead)
        if reader is not None and self.hold(peer):
            try:
                return Pull(self, arrival, peer, rank, offer, began, reader)
            except BaseException:
                self.give_back(peer)
                raise
        cut = self.cut(arrival, offer.group, arrival.span.tokens, offer.origin, offer.layers, sends=False)
        return Inflow(self, arrival, peer, rank, offer, began, cut)

    def _refuse(self, peer: str, offer: Offer, arrival: int, why: str) -> None:
        """Refuse an offer.  If the peer repeats the offer, the answer is repeated."""
        stop = self._ended[peer, offer.sending] = Stop(offer.sending, arrival, False, False, why)
        self.say(peer, stop)

    # ---- the endpoint's thread -------------------------------------------------------------------------------------

    def heard(self, peer: str, note: Note, ahead: Ahead | None = None) -> None:
        """Handle a note of a peer; `ahead`: what was begun with it.  A wrong note ends only the transfer that it belongs to."""
        try:
            self._heard(peer, note, ahead)
        except KvbmError as error:
            self.count("notes_wrong")
            at = peer, note.sending
            for flow in (self._flows.get(at), self._inflows.get(at)):
                if flow is not None:
                    _handle_of(flow).fail(error)

    def _heard(self, peer: str, note: Note, ahead: Ahead | None) -> None:
        at = peer, note.sending
        if self._claimed and self._is_early(peer, note):
            self._early.append((peer, note))
        elif isinstance(note, Offer):
            self._offered(peer, note, ahead)
        elif isinstance(note, Want):
            flow = self._flows.get(at)
            self.say(peer, Stopped(note.sending, note.arrival, True)) if flow is None else flow.wanted(note)
        elif isinstance(note, Ask):
            if (flow := self._flows.get(at)) is None:
                self.say(peer, Stopped(note.sending, note.arrival, True))
            else:
                flow.asked(note)
        elif isinstance(note, Put | Table | Ready):
            if (inflow := self._inflows.get(at)) is not None:
                _pass_on(inflow, note)
            elif (answer := self._ended.get(at)) is not None:
                self.say(peer, answer)
        elif isinstance(note, Done):
            if (flow := self._flows.get(at)) is not None:
                flow.finished(note)
        elif isinstance(note, Stop):
            self._stopped(peer, note)
        elif note.by_sender:
            if (inflow := self._inflows.get(at)) is not None:
                inflow.answered()
        elif (flow := self._flows.get(at)) is not None:
            flow.answered()

    def _is_early(self, peer: str, note: Note) -> bool:
        """True if a note answers an offer of which the caller of `send` has not told yet that it was said."""
        if isinstance(note, Offer | Put | Table | Ready) or (isinstance(note, Stop | Stopped) and note.by_sender):
            return False  # not of a receiver
        return any((one.peer, one.offer.sending) == (peer, note.sending) for _, starts, _ in self._claimed for one in starts)

    def _stopped(self, peer: str, note: Stop) -> None:
        at = peer, note.sending
        if note.by_sender:
            inflow = self._inflows.get(at)
            self._offers.pop(at, None)
            if inflow is None:
                self._ended.setdefault(at, None)  # so that an offer that arrives later is ignored
                self.say(peer, Stopped(note.sending, note.arrival, False))
            else:
                inflow.stopped(note)
        else:
            flow = self._flows.get(at)
            self.say(peer, Stopped(note.sending, note.arrival, True)) if flow is None else flow.stopped(note)

    def _offered(self, peer: str, offer: Offer, ahead: Ahead | None) -> None:
        at = peer, offer.sending
        if (known := self._inflows.get(at)) is not None:
            known.offered()
            return
        if at in self._ended:  # the note is late, or the answer was lost
            if (answer := self._ended[at]) is not None:
                self.say(peer, answer)
            return
        began = time.monotonic() - offer.age
        for arrival in self._handles:
            if isinstance(arrival, Arrival) and arrival.is_awaited and (offer.group, offer.key) == arrival.identity:
                self._match(peer, offer, began, arrival, ahead)
                return
        failed_at, number, why = self._failed.get((offer.group, offer.key), (0.0, 0, ""))
        if began < failed_at:  # a later offer belongs to the next attempt
            self._offers.pop(at, None)
            self._refuse(peer, offer, number, why)
            return
        # What follows an offer that is lent will be gone: the peer is asked.
        self._offers[peer, offer.sending] = offer._replace(is_lent=False, table=None), began
        while len(self._offers) > _MOST:
            self._offers.popitem(last=False)  # the peer repeats it

    def leaves(self, flow: Incoming) -> bool:
        """Drop an offer that may belong to a failed attempt, if no chunk of it has come.  The arrival waits for the next offer."""
        if flow in flow.arrival.flows and flow.is_untouched and self._may_be_late(flow.arrival, flow.began):
            flow.arrival.flows.remove(flow)
        return flow not in flow.arrival.flows

    def _may_be_late(self, arrival: Arrival, began: float) -> bool:
        """True if an offer that began then may belong to a failed attempt."""
        failed_at, _, _ = self._failed.get(arrival.identity, (-_LATE, 0, ""))
        return began < failed_at + _LATE

    def tick(self, now: float) -> bool:
        """Advance all transfers.  True if something was done."""
        busy, is_tidy = self.begin_claimed(), True
        for flow in self._all_flows():
            if not flow.is_over:
                try:
                    busy |= flow.tick(now)
                except PeerLostError as error:
                    self._losing.setdefault(flow.peer, error)
                except KvbmError as error:  # the peer sent something wrong
                    _handle_of(flow).fail(error)
            is_tidy &= not flow.is_over
        if now >= self._probe_at:
            self._probe_at = now + _PROBES
            self._probe()
        if self._losing:
            for peer, lost in list(self._losing.items()):
                self._lose(peer, lost)
            self._losing.clear()
        for handle in self._handles:
            if now > handle.deadline and not handle.has_ended and not handle.has_failed:
                handle.fail(
                    TransferTimeoutError(
                        f"{self.title}: {handle.what} {handle.key!r}: not done after {handle.timeout} s"
                    )
                )
            is_tidy &= not handle.has_ended and not handle.has_failed
        if not is_tidy:
            self._tidy()
        if self.left:
            self.left = [one for one in self.left if not one.has_ended()]
        return busy

    def begin_claimed(self) -> bool:
        """Begin the sendings whose callers have said their offers meanwhile.  True if there were some."""
        if not self._claimed:
            return False
        waiting, self._claimed = self._claimed, []
        for one in waiting:
            self._begin_sending(*one)
        early, self._early = self._early, []
        for peer, note in early:
            self.heard(peer, note)
        return len(self._claimed) < len(waiting)

    def _tidy(self) -> None:
        """End the transfers that have failed and use no pool any more.  Forget what has ended."""
        for handle in self._handles:
            if handle.has_failed and isinstance(handle, Arrival):
                self._failed[handle.identity] = handle.failed_at, handle.number, handle.why
                self._failed.move_to_end(handle.identity)
            if handle.has_failed and handle.uses_no_pool:
                handle.settle()
        self._handles = [handle for handle in self._handles if not handle.has_ended]
        self._ahead = {at: left for at, some in self._ahead.items() if (left := [one for one in some if one.arrival.is_awaited])}
        for over in [at for at, flow in self._flows.items() if flow.is_over and flow.sending.has_ended]:
            self._flows.pop(over)
        for at in [at for at, inflow in self._inflows.items() if inflow.is_over]:
            self._ended[at] = self._inflows.pop(at).answer
        for kept in (self._ended, self._failed):
            while len(kept) > _MOST:
                kept.popitem(last=False)

    def _probe(self) -> None:
        """Send an empty note to peers from which something is expected: only then does a wire report that a peer is gone."""
        arrivals = [one for one in self._handles if isinstance(one, Arrival) and one.is_awaited]
        silent = {rank for one in arrivals for rank, layers in one.missing.items() if layers}
        for peer, rank in self.peers.items():
            if rank in silent:
                self.say(peer, Stopped(0, 0, False))

    def _all_flows(self) -> list[Outflow | Incoming]:
        return [*self._flows.values(), *self._inflows.values()]

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The running transfers."""
        return tuple(self._handles)

    def awaited(self) -> list[Any] | None:
        """The ends of the copies that its transfers wait for; None if they wait for something else, too, that makes no note."""
        found: list[Any] = []
        for flow in self._all_flows():
            dones = [] if flow.is_over else flow.awaited()
            if dones is None:
                return None
            found += dones
        return found + [done for one in self.left for done in one.dones]

    @property
    def is_idle(self) -> bool:
        """True if no transfer runs and no slot or loan is held."""
        return not self._handles and not self.left and not self._claimed and all(flow.is_over for flow in self._all_flows())

    def _lose(self, peer: str, error: PeerLostError) -> None:
        """Handle the loss of a peer: its transfers fail.  Its slots become free when it can no longer write to them."""
        if peer in self.lost:
            return
        self.lost[peer] = error
        self.ring.part(peer)
        for flow in self._all_flows():
            if flow.peer == peer and not flow.is_over:
                _handle_of(flow).fail(error)
        for handle in self._handles:
            if isinstance(handle, Arrival) and handle.missing.get(self.peers[peer]):
                handle.fail(error)
        self.endpoint.dropping[peer] = self

    def release(self) -> None:
        """Wait until no kernel uses a pool or memory that peers lent.  Called at the end."""
        for one in (*self._all_flows(), *self.left):
            one.release()

    def dropped(self, peer: str) -> None:
        """Called when a lost peer can no longer write."""
        for flow in self._all_flows():
            if flow.peer == peer:
                flow.lost()
        for at in [one for one in self._readers if one[0] == peer]:  # its memory is unmapped when no flow reads it
            del self._readers[at]

    def _close(self) -> None:
        self.is_closed, why = True, "it was closed"
        for handle in list(self._handles):
            handle.fail(TransferError(f"{self.title}: {handle.what} {handle.key!r}: {why}"))
        for peer in self.peers:
            self._lose(peer, PeerLostError(f"{self.title}: {peer}: {why}", peer=peer))

    def open(self, peer: str, shared: Mapping[str, Shared | str]) -> None:
        """Open a peer's pools, if possible, so that its blocks are copied directly.

        `shared`: group → what the peer's card says of its pool, or why it cannot be opened.
        """
        rank = self.peers[peer]
        lend = getattr(self.endpoint.wire, "open", None)
        for number, group in enumerate(sorted(self.endpoint.groups)):
            made, path = self._plans[False].get(group), shared.get(group, "it shares no pool")
            if not isinstance(made, Resharding) or all((m.src, m.dst) != (rank, self.endpoint.rank) for m in made.messages):
                continue
            if lend is None:
                path = "this side's wire is not wire.mapped"
            elif isinstance(path, Shared):
                try:
                    name = f"{self.engine} rank {rank}"
                    far = opened(path, made.src.shape(rank), name, functools.partial(lend, peer))
                    self._readers[peer, number] = Reader(self._packer(group, sends=False), rank, far, path.gpu)
                    path = "direct"
                except KvbmError as error:
                    path = str(error)
            self._paths[rank, group] = path
            _log.info("kvbm: %s: rank %d, group %r: %s", self.title, rank, group, path if path == "direct" else f"chunks: {path}")

    def asked(self, peer: str, group: int, *, is_all: bool) -> None:
        """Remember that a peer reads this side's pool, and whether it asked for all that was offered."""
        self._pool_readers[peer, group] = is_all

    def lender(self, group: int) -> Lender:
        """What digests the blocks of a group that peers read."""
        found = self._lenders.get(group)
        if found is None:
            found = self._lenders[group] = Lender(self._packer(sorted(self.endpoint.groups)[group], sends=True))
        return found

    def lose(self, peer: str, error: PeerLostError) -> None:
        """Give up a peer, at the end of this round."""
        self._losing.setdefault(peer, error)

    # ---- methods for flows -----------------------------------------------------------------------------------------

    def say(self, peer: str, note: Note) -> None:
        self._guarded(peer, lambda: self.endpoint.wire.note(peer, self.endpoint.closed(peer, write(note))))

    def put(self, peer: str, local: Slice, slot: int, note: Put) -> Op | None:
        """Write to a slot that the peer has granted.  None if the peer is lost."""
        wire, closed = self.endpoint.wire, self.endpoint.closed
        return self._guarded(
            peer, lambda: wire.put(peer, local, self._remote(peer, slot, local), closed(peer, write(note)))
        )

    def hold(self, peer: str) -> bool:
        """Begin a loan of a peer's memory.  False if that is not possible, or the peer is lost."""
        return bool(self._guarded(peer, lambda: self.endpoint.wire.hold(peer)))  # type: ignore[attr-defined]

    def borrow(self, peer: str, slot: int, nbytes: int) -> Array | None:
        """A slot that the peer has granted, mapped into this process until `give_back`.  None: use `put` instead."""
        borrow = getattr(self.endpoint.wire, "borrow", None)
        if borrow is None:
            return None
        remote = self._remote(peer, slot, Slice(0, nbytes))
        lent = self._guarded(peer, lambda: borrow(peer, remote))
        if lent is None:
            return None
        self.count("chunks_mapped")
        return Array(lent.address, (nbytes,), (1,), "uint8", self.ring.device, owner=lent)

    def give_back(self, peer: str) -> None:
        """End a loan.  No kernel may write to it any more."""
        self.endpoint.wire.give_back(peer)  # type: ignore[attr-defined]

    def get(self, peer: str, local: Slice, slot: int) -> Op | None:
        """Read a slot that the peer has packed.  None if the peer is lost."""
        return self._guarded(
            peer, lambda: self.endpoint.wire.get(peer, local, self._remote(peer, slot, local, sends=True))
        )

    def _remote(self, peer: str, slot: int, local: Slice, *, sends: bool = False) -> Slice:
        sending, taking, size = self.rings[peer]
        if not 0 <= slot < (sending if sends else taking) or local.nbytes > size:
            raise BindError(f"{self.title}: {peer}: slot {slot} of {local.nbytes} bytes: it has {taking} slots of {size} bytes")
        return Slice((slot if sends else sending + slot) * size, local.nbytes)

    def _guarded(self, peer: str, call: Callable[[], T]) -> T | None:
        if peer in self.lost or peer in self._losing:
            return None
        try:
            return call()
        except PeerLostError as error:  # `tick` handles it
            self._losing.setdefault(peer, error)
            return None

    def count(self, name: str, many: float = 1) -> None:
        self._counts[name] += many  # type: ignore[assignment]

    def plans(self, group: int) -> tuple[int, int]:
        """Fingerprints of the plans to send and to receive; 0 if there is no plan."""
        found = self._fingerprints.get(group)
        if found is None:
            name = sorted(self.endpoint.groups)[group]
            made = [self._plans[sends][name] for sends in (True, False)]
            out, into = (int(one.fingerprint, 16) if isinstance(one, Resharding) else 0 for one in made)
            found = self._fingerprints[group] = out, into
        return found

    def cut(self, handle: Handle, group: int, tokens: range, origin: int, layers: range, *, sends: bool) -> Cut:
        """The chunks of some tokens and layers of a transfer.  They are cached: peers mostly want the same."""
        at = tokens, origin, layers
        found = handle.cuts.get(at)
        if found is None:
            packer = self._packer(sorted(self.endpoint.groups)[group], sends=sends)
            own = handle.span
            span = own if tokens == own.tokens else Span(own.table, tokens, own.origin)
            sizes = {"most": self._most, "least": self._least}
            found = handle.cuts[at] = Cut(packer, span, origin=origin, layers=layers, **sizes)
        return found

    def zero(self, arrival: Arrival, group: int, origin: int) -> None:
        """Write zeros into the tokens of an arrival, in all its layers, and wait until they are there."""
        packer = self._packers[sorted(self.endpoint.groups)[group], False]
        # Its chunks were unpacked, so the host has seen that its stream's work on the blocks is done.
        stream = None if packer.device < 0 else self.endpoint.streams[False]
        packer.zero(arrival.span, origin=origin, layers=arrival.layers, stream=stream)

    def _packer(self, group: str, *, sends: bool) -> Packer:
        given: Any = group
        if not isinstance(given, str) or given not in self.endpoint.groups:
            raise BindError(f"{self.title}: group {group!r}: expected one of {sorted(self.endpoint.groups)}")
        if self.is_closed:
            raise BindError(f"{self.title}: the link is closed")
        made = self._plans[sends][group]
        if isinstance(made, KvbmError):
            raise made.with_traceback(None)
        found = self._packers.get((group, sends))
        if found is None:
            pool = self.endpoint.groups[group][1]
            found = self._packers[group, sends] = Packer(
                made, self.endpoint.rank, pool, side="src" if sends else "dst", max_sms=self.endpoint.max_sms
            )
        return found

    def _order(self, packer: Packer, wait: Any, stream: Any) -> dict[str, Any]:
        if packer.device < 0:
            packer.require_no_stream(stream, wait)
            return {}
        if stream is not None and _core.is_captured(stream, packer.device):
            raise BindError(
                f"{self.title}: stream: a CUDA graph captures it, and a link copies once; pass another stream, or leave it out"
            )
        return {"wait": wait, "stream": self.endpoint.streams[packer.sends] if stream is None else stream}

    def __repr__(self) -> str:
        return f"<kvbm Link {self.title}, {len(self.peers)} peers>"


#: Arguments of `send` that `offer` also accepts.
_SEND: dict[str, Any] = {"layers": None, "group": "", "wait": None, "stream": None, "timeout": 30.0}


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()[:16]


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _pass_on(flow: Incoming, note: Put | Table | Ready) -> None:
    """Pass a note to a flow, if it is of its kind."""
    if isinstance(flow, Pull):
        if isinstance(note, Table):
            flow.table(note)
        elif isinstance(note, Ready):
            flow.ready(note)
    elif isinstance(flow, Inflow) and isinstance(note, Put):
        flow.put(note)


def _handle_of(flow: Outflow | Incoming) -> Handle:
    return flow.sending if isinstance(flow, Outflow) else flow.arrival


@contextlib.contextmanager
def _given_up(arrival: Arrival) -> Iterator[None]:
    """After an error nobody has the handle: what it has prepared is given back."""
    try:
        yield
    except KvbmError:
        arrival.expect_no_more()
        raise
