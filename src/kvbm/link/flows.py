"""State machines of transfers: one per peer of a `send` (`Outflow`) or of a `receive` (`Inflow`), driven by notes.

Only the endpoint's thread runs this code.  `tick` repeats every note that may have been lost, so every note may arrive twice.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BindError, DigestError, KvbmError, PeerLostError, TransferError
from ..reshard.sequence import Ids
from ..wire import Op
from .chunks import Bare
from .loans import Loan
from .notes import MOST_GRANTS, Ask, Done, Grant, Offer, Put, Stop, Stopped, Want

if TYPE_CHECKING:
    from ..memory.array_info import Array
    from .chunk import Chunk
    from .chunks import ChunksDone, Cut
    from .handle import Arrival, Sending
    from .link import Link

#: Seconds until a note is repeated: the first, doubled each time up to the last.
REPEAT_SECONDS = (0.1, 1.0)

#: How often a wrong chunk is sent again.
TRIES = 2

#: How often a peer is told to stop, before one that does not answer is given up.
_MOST_STOPS = 8

#: Limits of chunks of one peer in transit: the smallest, and the largest while they have less than so many bytes.
WINDOW, MOST_WINDOW, WINDOW_BYTES = 4, 32, 2 << 20


class Repeat:
    """The times at which a note is repeated."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._wait = REPEAT_SECONDS[0]
        self._at = time.monotonic() + self._wait

    def is_due(self, now: float) -> bool:
        if now < self._at:
            return False
        self._wait = min(2 * self._wait, REPEAT_SECONDS[1])
        self._at = now + self._wait
        return True


class _Packed:
    """A chunk in a slot of the sender, or in a slot that the receiver lends (-1): being packed, in transit, or arrived."""

    def __init__(self, grant: Grant, slot: int) -> None:
        self.grant, self.slot = grant, slot
        self.done: ChunksDone
        self.is_on_loan = slot < 0
        self.op: Op | None = None
        self.is_announced, self.announced_at = False, 0.0


class Start(NamedTuple):
    """What begins the sending to one peer."""

    peer: str
    rank: int  # the peer's rank
    offer: Offer
    table: Ids | None = None  # the block table of what the offer lends


class Outflow:
    """The part of a `send` for one peer.  `is_said`: the offer was sent, so the peer may read what it lends."""

    def __init__(self, link: Link, sending: Sending, start: Start, *, is_said: bool) -> None:
        self.link, self.sending, self.peer, self.rank = link, sending, start.peer, start.rank
        self.offer, self.number = start.offer if is_said else start.offer.short, start.offer.sending
        self.arrival = 0
        self.is_over = False  # nothing is in transit, and no more notes are sent except answers
        self._stop: Stop | None = None  # sent when nothing is in transit
        self._owes_answer = False  # the receiver stopped, and waits for an answer
        self._is_stop_sent = self._is_lost = False
        self._cut: Cut | None = None
        self._turn = self._last = 0
        self._wanted: deque[Grant] = deque()
        self._packed: dict[int, _Packed] = {}
        self._digests: dict[int, int] = {}
        self._stops = 0
        self._loan: Loan | None = None  # the peer copies out of the pool itself
        self._is_prepared = False
        self._ready: tuple[Cut, tuple[int, int], int, Bare] | None = None  # cut, chunk and address of a packing
        self._repeat = Repeat()
        if not is_said:
            self._say_offer()
        if self.offer.is_lent:  # mostly the peer asks for all of it: so this is done before it asks
            all_of_it = Ask(self.number, 0, self.offer.plan, self.offer.tokens, self.offer.origin)
            self._begin_loan(Loan(self, link.lender(self.offer.group), all_of_it, table=start.table))

    # ---- notes -----------------------------------------------------------------------------------------------------

    def wanted(self, note: Want) -> None:
        if self.is_over or self._stop or self._owes_answer or note.turn <= self._turn:
            if self.is_over:
                self.link.say(self.peer, Stopped(self.number, note.arrival, True))
            return
        if self._loan is not None and not self._loan.arrival and self._loan.is_digested:
            self._loan = None  # lent before the peer asked, and it wants chunks
            self.link.asked(self.peer, self.offer.group, is_all=False)
        if self._loan or (self.arrival and note.arrival != self.arrival):
            return  # from an earlier receive, which has sent a stop; or it will be repeated
        if self._cut is None:
            try:
                self._require(note)
                self.arrival = note.arrival
                group, layers = self.offer.group, self.offer.layers
                self._cut = self.link.cut(self.sending, group, note.tokens, note.origin, layers, sends=True)
            except KvbmError as error:
                self.fail(error)
                return
        self._turn = note.turn
        self._repeat.reset()
        listed = {grant.serial for grant in note.grants}
        for serial in [one for one, packed in self._packed.items() if packed.is_announced and one not in listed]:
            self._forget(serial)
        if len(self._wanted) + len(self._packed) + sum(one > self._last for one in listed) > MOST_GRANTS:
            raise BindError(f"{self.link.title}: {self.peer} wants more than {MOST_GRANTS} chunks at a time")
        for grant in note.grants:
            packed = self._packed.get(grant.serial)
            if packed is not None and packed.is_announced:
                if time.monotonic() > packed.announced_at + REPEAT_SECONDS[0] / 2:  # until then the note may be in transit
                    self._announce(packed)
            elif packed is None and grant.serial > self._last:
                self._wanted.append(grant)
        self._last = max([self._last, *listed])

    def asked(self, note: Ask) -> None:
        """The receiver has opened this side's pool: lend it the blocks."""
        if self.is_over or self._stop or self._owes_answer:
            if self.is_over:
                self.link.say(self.peer, Stopped(self.number, note.arrival, True))
            return
        if self._cut or (self.arrival and note.arrival != self.arrival):
            return
        self._repeat.reset()
        loan, is_all = self._loan, (note.tokens, note.origin) == (self.offer.tokens, self.offer.origin)
        self.link.asked(self.peer, self.offer.group, is_all=is_all)
        if loan is not None and (note.tokens, note.origin) == (loan.tokens, loan.origin):
            self.arrival = loan.arrival = note.arrival
            loan.say()
        elif loan is None or not loan.arrival:
            try:
                self._require(note)
                new = Loan(self, self.link.lender(self.offer.group), note, loan)
            except KvbmError as error:
                self.fail(error)
            else:
                self.arrival = note.arrival
                self._begin_loan(new)

    def _begin_loan(self, loan: Loan) -> None:
        self._loan = loan  # from now on the peer may read the blocks
        try:
            loan.begin()
        except KvbmError as error:
            self.fail(error)

    def _require(self, note: Want | Ask) -> None:
        """Raise `BindError` if the peer has another plan, or wants other tokens."""
        span, link = self.sending.span, self.link
        if note.plan != link.plans(self.offer.group)[0]:
            raise BindError(
                f"{link.title}: {self.peer} has another plan: both sides need the same kvbm, placements and options"
            )
        if not span.tokens.start <= note.tokens.start < note.tokens.stop <= span.tokens.stop:
            raise BindError(f"{link.title}: {self.peer} wants tokens {note.tokens}, expected some of {span.tokens}")

    def stopped(self, note: Stop) -> None:
        """The receiver has stopped."""
        if self.is_over:
            self.link.say(self.peer, Stopped(self.number, note.arrival, True))
            return
        self.arrival = self.arrival or note.arrival
        self._owes_answer = True
        kind = DigestError if note.is_digest else TransferError
        self.sending.fail(kind(f"{self.link.title}: {self.peer} has stopped receiving {self.sending.key!r}: {note.why}"))

    def answered(self) -> None:
        """The receiver has confirmed the stop."""
        if self._stop is not None and not self._packed:
            self._end()

    def finished(self, note: Done) -> None:
        if self.is_over or self.arrival not in (0, note.arrival):  # 0: the receiver never wanted it
            return
        if not all(_is_done(packed.done) for packed in self._packed.values()) or (self._loan and not self._loan.is_digest_sent):
            return  # the note cannot belong to what is still being packed or digested: it is repeated
        for serial in list(self._packed):
            self._forget(serial)
        self._end()
        found = self._loan.digest if self._loan else sum(self._digests.values()) % (1 << 64)
        if found != note.digest:
            self.sending.fail(
                DigestError(
                    f"{self.link.title}: {self.sending.key!r}: digest: {found:#018x} of what was sent to {self.peer}, "
                    f"{note.digest:#018x} of what came there"
                )
            )
        self.sending.ended()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def fail(self, error: KvbmError) -> None:
        """End the flow from this side.  The stop is sent when nothing is in transit."""
        if not self.is_over and self._stop is None:
            self._stop = Stop(self.number, self.arrival, isinstance(error, DigestError), True, str(error))
            self._wanted.clear()
        self.sending.fail(error)

    def lost(self) -> None:
        """The peer was dropped."""
        self._is_lost = True

    def awaited(self) -> list[Any] | None:
        """The ends of the copies that this flow waits for; None if it waits for something else, too."""
        if self._packed or self._wanted:
            return None
        return [] if self._loan is None else [done for one in self._loan.passes for done in one.dones]

    @property
    def uses_no_pool(self) -> bool:
        """True if no kernel of this flow reads the pool, and it is not lent."""
        return all(_is_done(packed.done) for packed in self._packed.values()) and (self._loan is None or self._loan.is_over)

    def _end(self) -> None:
        """Nothing of the peer is under way."""
        self.is_over, self._ready = True, None  # whoever has the handle keeps the flow
        if self._loan is not None:
            self._loan.is_returned = True

    def tick(self, now: float) -> bool:
        """Advance the flow.  True if something was done."""
        if self._is_lost:
            for serial in [one for one, packed in self._packed.items() if _is_done(packed.done)]:
                self._forget(serial)
            if not self._packed and (self._loan is None or self._loan.is_digested):
                self._end()
            return False
        busy = self._pack()
        if self._loan is not None and not self._stop and not self._owes_answer:  # a transfer that failed sends no digest
            busy |= self._loan.go_on()
        for packed in list(self._packed.values()):
            busy |= self._go_on(packed)
        is_digesting = self._loan is not None and not self._loan.is_digested
        if is_digesting:
            return busy
        if (self._stop or self._owes_answer) and not any(one.op or not one.is_announced for one in self._packed.values()):
            for serial in list(self._packed):
                self._forget(serial)
            if self._owes_answer:
                self.link.say(self.peer, Stopped(self.number, self.arrival, True))
                self._end()
            elif self._stop is not None and (not self._is_stop_sent or self._repeat.is_due(now)):
                self._is_stop_sent = True
                self._stops += 1
                self.link.say(self.peer, self._stop)
                if self._stops > _MOST_STOPS:
                    self._give_up()
        elif all(one.is_announced for one in self._packed.values()) and self._repeat.is_due(
            now
        ):  # the answer may have been lost
            self.link.count("notes_again")
            self._say_offer()
        if not (busy or self._is_prepared or self._cut or self._loan or self._stop or self._owes_answer):
            busy = self._prepare()
        return busy

    def _give_up(self) -> None:
        """The peer does not answer.  What is lent to it is free when it was dropped, and its loans have ended."""
        if self._loan is None:
            self._end()
        else:
            why = f"{self.link.title}: {self.peer} does not answer, and may still read the blocks of {self.sending.key!r}"
            self.link.lose(self.peer, PeerLostError(why, peer=self.peer))

    def _say_offer(self) -> None:
        self.link.say(self.peer, self.offer.short._replace(age=time.monotonic() - self.sending.began))

    def _pack(self) -> bool:
        """Pack wanted chunks: first a single one, so that it is sent soon, then more per call."""
        busy = False
        while self._wanted and not self._stop and not self._owes_answer:
            arrays: dict[tuple[int, int], Array] = {}
            taken: list[_Packed] = []
            most = min(self.link.ring.together, 1 + len(self._digests) + len(self._packed))
            while self._wanted and len(taken) < most:
                at = self.rank, self._wanted[0].chunk
                if at in arrays or (slot := self._slot(self._wanted[0])) is None:
                    break
                arrays[at] = slot[1]
                taken.append(_Packed(self._wanted.popleft(), slot[0]))
            if not taken:
                break
            busy = True
            assert self._cut is not None
            try:
                done = self._bare(arrays).pack()
            except Exception as error:
                for packed in taken:
                    self._free(packed)
                if not isinstance(error, KvbmError):
                    raise
                self.fail(error)
                break
            for packed in taken:
                packed.done = done
                self._packed[packed.grant.serial] = packed
            # Packed chunks are sent while the next ones are packed.  If they are not packed yet, `tick` continues with other flows.
            if sum(self._go_on(packed) for packed in taken) < len(taken):
                break
        return busy

    def _slot(self, grant: Grant) -> tuple[int, Array] | None:
        """The slot for a chunk (this side's, or -1) and its memory; None if it must wait, or if the transfer has failed."""
        ring = self.link.ring
        try:
            chunk = self._chunk(grant.chunk)
            array = None if self.offer.pulls else self.link.borrow(self.peer, grant.slot, chunk.nbytes)
        except KvbmError as error:
            self.fail(error)
            return None
        if array is not None:
            return -1, array
        slot = ring.take(self.peer, sends=True)
        if slot is None:
            self.link.count("stalls")
            return None
        return slot, ring.array(slot, chunk.nbytes)

    def _bare(self, arrays: dict[tuple[int, int], Array]) -> Bare:
        """Prepare to pack chunks into these slots, if it was not done before."""
        assert self._cut is not None
        [first, *others], ready, self._ready = arrays.values(), self._ready, None
        self.link.packed_at.setdefault(self.peer, first.address)
        if ready is not None and not others and ready[:3] == (self._cut, next(iter(arrays)), first.address):
            return ready[3]
        return Bare(self._cut, arrays, **self.sending.order)

    def _prepare(self) -> bool:
        """Prepare to pack the first chunk while the peer is asked: it mostly wants all of it, in the slot that it had before."""
        address, self._is_prepared = self.link.packed_at.pop(self.peer, 0), True
        if not address or self.link.ring.together == 1:
            return False
        offer, at = self.offer, (self.rank, 0)
        with contextlib.suppress(KvbmError):  # it is raised when the peer wants it
            cut = self.link.cut(self.sending, offer.group, offer.tokens, offer.origin, offer.layers, sends=True)
            if some := cut.chunks.get(self.rank):
                slots = {at: self.link.ring.array_at(address, some[0].nbytes)}
                self._ready = cut, at, address, Bare(cut, slots, **self.sending.order)
        return True

    def _chunk(self, number: int) -> Chunk:
        assert self._cut is not None
        held = self._cut.chunks.get(self.rank, ())
        if not 0 <= number < len(held):
            raise BindError(f"{self.link.title}: {self.peer} wants chunk {number} of {len(held)}")
        return held[number]

    def _go_on(self, packed: _Packed) -> bool:
        ring, link = self.link.ring, self.link
        if packed.op is not None:
            if not packed.op.query():
                return False
            packed.op, packed.is_announced, packed.announced_at = None, True, time.monotonic()
            ring.give(packed.slot)
            packed.slot = -1
            return True
        if packed.is_announced:
            return False
        try:
            if not packed.done.query():
                return False
        except KvbmError as error:
            self.fail(error)
        self._give_back(packed)
        if self._stop or self._owes_answer:
            packed.is_announced = True
            return True
        chunk = self._chunk(packed.grant.chunk)
        self._digests[packed.grant.chunk] = packed.done.digests[self.rank, packed.grant.chunk]
        if self.offer.pulls or packed.slot < 0:
            packed.is_announced = True
            self._announce(packed)
        else:
            packed.op = link.put(self.peer, ring.slice(packed.slot, chunk.nbytes), packed.grant.slot, self._put(packed))
            if packed.op is None:
                return False  # the peer is lost
        link.count("chunks_sent")
        link.count("bytes_sent", chunk.nbytes)
        return True

    def _announce(self, packed: _Packed) -> None:
        packed.announced_at = time.monotonic()
        self.link.say(self.peer, self._put(packed))

    def _put(self, packed: _Packed) -> Put:
        chunk, slot, serial = packed.grant
        slot = packed.slot if self.offer.pulls else slot
        return Put(self.number, self.arrival, serial, chunk, slot, self._digests[chunk])

    def _forget(self, serial: int) -> None:
        self._free(self._packed.pop(serial))

    def _free(self, packed: _Packed) -> None:
        self._give_back(packed)
        if packed.slot >= 0:
            self.link.ring.give(packed.slot)

    def _give_back(self, packed: _Packed) -> None:
        """End the loan of the receiver's memory: it is no longer written."""
        if packed.is_on_loan:
            packed.is_on_loan = False
            self.link.give_back(self.peer)

    def release(self) -> None:
        """At the end: wait for running kernels, and end all loans."""
        for packed in self._packed.values():
            with contextlib.suppress(Exception):
                packed.done.synchronize()
            self._give_back(packed)
        if self._loan is not None:
            self._loan.release()


class _Expected:
    """An expected chunk: granted, being fetched, or being unpacked."""

    def __init__(self, grant: Grant, slot: int) -> None:
        self.grant, self.slot = grant, slot
        self.op: Op | None = None
        self.ready: Bare | None = None  # its unpacking
        self.done: ChunksDone | None = None
        self.has_arrived = False
        self.digest = 0  # of what was sent
        self.is_alone = False  # True: unpacked in a separate call, so that other chunks do not fail with it


class Incoming(abc.ABC):
    """The part of a `receive` from one peer, for one offer."""

    def __init__(self, link: Link, arrival: Arrival, peer: str, rank: int, offer: Offer, began: float) -> None:
        self.link, self.arrival, self.peer, self.rank, self.offer = link, arrival, peer, rank, offer
        self.began = began  # at the latest, as the delay of the note is unknown
        self.is_done = False
        self.is_over = False  # nothing is in transit, and no slot or loan is held
        self.digests: dict[int, int] = {}  # of what has arrived
        self._is_ending = False
        self._stopping: Stop | None = None
        self._repeat = Repeat()

    def fail(self, error: KvbmError) -> None:
        """Stop receiving: tell the sender.  Slots that it may still write stay reserved until it answers."""
        if self.is_over or self._stopping is not None:
            return
        if self.is_done:
            self.is_over = True
            return
        is_digest, why = isinstance(error, DigestError), str(error)
        self._stopping = Stop(self.offer.sending, self.arrival.number, is_digest, False, why)
        self._repeat.reset()
        self._say_stop()

    def lost(self) -> None:
        """The peer was dropped and can no longer write."""
        self._is_ending = True

    def answered(self) -> None:
        """The sender has confirmed the stop.  None of its puts is running."""
        if self._stopping is not None:
            self._end()
        elif not self.is_done:  # the sender does not know this request
            is_left = self.link.leaves(self)
            self._end()
            if not is_left:
                self.arrival.fail(TransferError(f"{self.link.title}: {self.peer} has ended {self.arrival.key!r}"))

    def stopped(self, note: Stop) -> None:
        """The sender has given up.  None of its puts is running."""
        self._answer(note)
        if self.is_over:
            return
        is_left = self.link.leaves(self)
        self._end()
        kind = DigestError if note.is_digest else TransferError
        if not is_left:
            self.arrival.fail(kind(f"{self.link.title}: {self.peer} has stopped sending {self.arrival.key!r}: {note.why}"))

    @property
    def digest(self) -> int:
        """The digest of what has arrived; of a cast, of the quantised bits."""
        return sum(self.digests.values()) % (1 << 64)

    @property
    def answer(self) -> Done | None:
        """The answer to the sender after the flow has ended."""
        total = sum(self.digests.values()) % (1 << 64)
        return Done(self.offer.sending, self.arrival.number, total) if self.is_done else None

    def _answer(self, note: Stop) -> None:
        self.link.say(self.peer, Stopped(note.sending, note.arrival, False))

    def _say_stop(self) -> None:
        assert self._stopping is not None
        self.link.say(self.peer, self._stopping)

    def _say_done(self) -> None:
        if (answer := self.answer) is not None:
            self.link.say(self.peer, answer)

    def _finish(self) -> None:
        self.is_done = self.is_over = True
        self._say_done()
        self.arrival.ended(self)

    @abc.abstractmethod
    def offered(self) -> None:
        """The offer was repeated: a note was lost."""

    def awaited(self) -> list[Any] | None:
        """The ends of the copies that this flow waits for; None if it waits for something else, too."""
        return None

    @property
    @abc.abstractmethod
    def is_untouched(self) -> bool:
        """True if nothing was written, or is being written."""

    @property
    @abc.abstractmethod
    def uses_no_pool(self) -> bool:
        """True if no kernel of this flow uses a pool."""

    @abc.abstractmethod
    def tick(self, now: float) -> bool:
        """Advance the flow.  True if something was done."""

    @abc.abstractmethod
    def release(self) -> None:
        """At the end: wait for running kernels."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Nothing of the sender is under way: free what is held, at once or when what this side does with it has ended."""


class Inflow(Incoming):
    """Chunks that come into slots of this side."""

    def __init__(
        self, link: Link, arrival: Arrival, peer: str, rank: int, offer: Offer, began: float, cut: Cut
    ) -> None:
        super().__init__(link, arrival, peer, rank, offer, began)
        self._cut = cut
        self._chunks = cut.chunks.get(rank, ())
        self._todo = deque(range(len(self._chunks)))
        self._expected: dict[int, _Expected] = {}
        self._tries: Counter[int] = Counter()
        self._turn = 0
        self._serials = itertools.count(1)
        if not self._chunks:
            self._finish()

    # ---- notes -----------------------------------------------------------------------------------------------------

    def offered(self) -> None:
        if self.is_done:
            self._say_done()
        elif self._stopping is None and self._turn:
            self._say_wants()

    def put(self, note: Put) -> None:
        if self.is_done:
            self._say_done()
            return
        expected = self._expected.get(note.serial)
        if expected is None or expected.has_arrived or note.arrival != self.arrival.number or note.chunk != expected.grant.chunk:
            return
        if self.offer.pulls:
            size = self._chunks[note.chunk].nbytes
            expected.op = self.link.get(self.peer, self.link.ring.slice(expected.slot, size), note.slot)
            if expected.op is None:
                return  # the peer is lost: nothing was read
        expected.has_arrived, expected.digest = True, note.digest
        self._repeat.reset()

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def is_untouched(self) -> bool:
        return not self.digests and not self.is_done and all(expected.done is None for expected in self._expected.values())

    @property
    def uses_no_pool(self) -> bool:
        return all(expected.done is None or _is_done(expected.done) for expected in self._expected.values())

    def tick(self, now: float) -> bool:
        if self._is_ending:
            self._end()
            return False
        news = self._stopping is None and not self.is_done and self._grant()
        if news:  # before unpacking, so that more chunks are sent meanwhile
            self._say_wants()
        busy = news
        if self._stopping is None and self.link.ring.together > 1:
            self._unpack_some()
        for serial, expected in list(self._expected.items()):
            busy |= self._go_on(serial, expected)
        if self._stopping is not None:
            self._quarantine()
            if self._repeat.is_due(now):
                self.link.count("notes_again")
                self.link.say(self.peer, self._stopping)
            return busy
        if not self.is_done and not news and self._repeat.is_due(now):
            self.link.count("notes_again")
            self._say_wants()
        return busy or self._prepare()

    def release(self) -> None:
        for expected in self._expected.values():
            if expected.done is not None:
                with contextlib.suppress(Exception):
                    expected.done.synchronize()

    def _grant(self) -> bool:
        news = False
        ring = self.link.ring
        window = min(max(WINDOW, 2 * self.link.ring.together, WINDOW_BYTES // ring.slot_bytes), MOST_WINDOW)
        away = sum(not one.has_arrived for one in self._expected.values())
        if away > window - window // 4:  # several per note
            return False
        while self._todo and away < window and len(self._expected) < min(2 * window, MOST_GRANTS):
            slot = ring.take(self.peer, sends=False)
            if slot is None:
                self.link.count("stalls")
                break
            grant = Grant(self._todo.popleft(), slot - ring.sends, next(self._serials))
            self._expected[grant.serial] = _Expected(grant, slot)
            away, news = away + 1, True
        return news

    def _say_wants(self) -> None:
        self._turn += 1
        arrival = self.arrival
        grants = tuple(one.grant for one in self._expected.values() if not one.has_arrived or one.op is not None)
        plan = self.link.plans(self.offer.group)[1]
        self.link.say(
            self.peer,
            Want(
                self.offer.sending, arrival.number, plan, arrival.span.tokens, arrival.span.origin, self._turn, grants
            ),
        )
        self._repeat.reset()

    def _go_on(self, serial: int, expected: _Expected) -> bool:
        if not expected.has_arrived:
            return False
        if expected.op is not None:
            if not expected.op.query():
                return False
            expected.op = None
        try:
            if expected.done is None:
                if self._stopping is not None:
                    self._free(serial)
                    return True
                expected.is_alone = True
                expected.done = self._unpack([expected])
            if not expected.done.query():
                return False
        except DigestError as error:
            if expected.is_alone:
                self._wrong(serial, expected, error)
            else:  # unpack each separately to find the wrong one
                expected.is_alone, expected.done = True, None
            return True
        self.digests[expected.grant.chunk] = expected.done.digests[self.rank, expected.grant.chunk]
        self.link.count("chunks_received")
        self.link.count("bytes_received", self._chunks[expected.grant.chunk].nbytes)
        self._free(serial)
        if len(self.digests) == len(self._chunks) and self._stopping is None:
            self._finish()
        return True

    def _prepare(self) -> bool:
        """Prepare to unpack chunks while they are on their way to a GPU.  True if something was done."""
        if self.link.ring.together > 1:
            for expected in itertools.islice(self._expected.values(), self.link.ring.together):
                if expected.ready is None and not expected.has_arrived:
                    with contextlib.suppress(KvbmError):  # it is raised when the chunk has arrived
                        expected.ready = self._bare([expected])
                        return True
        return False

    def _bare(self, some: Sequence[_Expected]) -> Bare:
        array, chunks = self.link.ring.array, self._chunks
        slots = {(self.rank, one.grant.chunk): array(one.slot, chunks[one.grant.chunk].nbytes) for one in some}
        return Bare(self._cut, slots, verify=self.arrival.verify, **self.arrival.order)

    def _unpack(self, some: Sequence[_Expected]) -> ChunksDone:
        arrival, [first, *others] = self.arrival, some
        if arrival.zero is None:  # from now on something is written
            arrival.zero = functools.partial(self.link.zero, arrival, self.offer.group, self.offer.origin)
        ready = None if others else first.ready
        first.ready = None
        return (ready or self._bare(some)).unpack({(self.rank, one.grant.chunk): one.digest for one in some})

    def _unpack_some(self) -> None:
        """Unpack the arrived chunks in one call; if one is wrong, each in a separate call."""
        ready = [
            one for one in self._expected.values() if one.has_arrived and not (one.op or one.done or one.is_alone or one.ready)
        ]
        some = ready[: self.link.ring.together]
        if len(some) < 2:
            return
        try:
            done = self._unpack(some)
        except DigestError:
            done = None
        for expected in some:
            expected.done, expected.is_alone = done, done is None

    def _wrong(self, serial: int, expected: _Expected, error: KvbmError) -> None:
        number = expected.grant.chunk
        self._free(serial)
        self._tries[number] += 1
        self.link.count("chunks_wrong")
        if self._stopping is not None:
            return
        if self._tries[number] > TRIES:
            wrong = DigestError(
                f"{self.link.title}: {self.arrival.key!r} of {self.peer}: {self._tries[number]} times: {error}"
            )
            self.arrival.fail(wrong)
        else:
            self._todo.appendleft(number)

    def _quarantine(self) -> None:
        """Keep the slots reserved that the sender may still write."""
        for expected in self._expected.values():
            if not expected.has_arrived and not self.offer.pulls:
                self.link.ring.quarantined.add((self.peer, expected.slot))

    def _free(self, serial: int) -> None:
        expected = self._expected.pop(serial)
        self.link.ring.quarantined.discard((self.peer, expected.slot))
        self.link.ring.give(expected.slot)

    def _end(self) -> None:
        self._is_ending = True  # nothing more is granted, or unpacked
        for serial, expected in list(self._expected.items()):
            if expected.op is not None and not _is_done(expected.op):
                continue  # a get still writes it
            if expected.done is not None and not _is_done(expected.done):
                continue  # a kernel still reads its slot; `tick` frees it
            self._free(serial)
        self.is_over = not self._expected


def _is_done(done: ChunksDone | Op) -> bool:
    try:
        return done.query()
    except KvbmError:
        return True
