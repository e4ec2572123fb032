"""What goes to one peer of one `send`, and what comes from one peer to one `receive`: states, and what each note does to them.

Only the endpoint's thread is in here.  Everything that may be lost is said again by `tick`; everything may come twice.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import BindError, DigestError, KvbmError, TransferError
from ..wire import Op
from .notes import MOST_GRANTS, Done, Grant, Offer, Put, Stop, Stopped, Want

if TYPE_CHECKING:
    from ..arrays import Array
    from .chunk import Chunk
    from .cut import ChunksDone, Cut
    from .handle import Arrival, Sending
    from .link import Link

__all__ = ["Inflow", "Outflow"]

#: Seconds after which a note is said again, at first; doubled up to the last.
AGAIN = (0.1, 1.0)

#: How often a chunk that came wrong is sent again.
TRIES = 2

#: Chunks of one peer that may be under way at a time: the fewest, and the most where they take less than so many bytes.
WINDOW, MOST_WINDOW, WINDOW_BYTES = 4, 32, 2 << 20


class _Repeat:
    """When to say something again."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._wait = AGAIN[0]
        self._at = time.monotonic() + self._wait

    def is_due(self, now: float) -> bool:
        if now < self._at:
            return False
        self._wait = min(2 * self._wait, AGAIN[1])
        self._at = now + self._wait
        return True


class _Packed:
    """A chunk in a slot of the sender, or in one that the receiver lends (-1): being packed, on its way, or there."""

    def __init__(self, grant: Grant, slot: int) -> None:
        self.grant, self.slot = grant, slot
        self.done: ChunksDone
        self.is_on_loan = slot < 0
        self.op: Op | None = None
        self.is_told, self.told_at = False, 0.0


class Outflow:
    """What goes to one peer of one `send`.

    Attributes
    ----------
    sending : Sending
    number : int
        The sender's, of what goes to this peer.
    is_over : bool
        Nothing of it is under way, and nothing more will be said of it, but in answer.
    """

    def __init__(self, link: Link, sending: Sending, peer: str, rank: int, number: int, offer: Offer) -> None:
        self.link, self.sending, self.peer, self.rank, self.number = link, sending, peer, rank, number
        self.offer = offer
        self.arrival = 0
        self.is_over = False
        self._stop: Stop | None = None  # what is said once nothing is under way
        self._answers = False  # the receiver stopped, and waits for an answer
        self._is_told = self._is_lost = False
        self._cut: Cut | None = None
        self._turn = self._last = 0
        self._wanted: deque[Grant] = deque()
        self._packed: dict[int, _Packed] = {}
        self._digests: dict[int, int] = {}
        self._stops = 0
        self._again = _Repeat()
        self._say_offer()

    # ---- notes -----------------------------------------------------------------------------------------------------

    def wanted(self, note: Want) -> None:
        if self.is_over or self._stop or self._answers or note.turn <= self._turn:
            if self.is_over:
                self.link.say(self.peer, Stopped(self.number, note.arrival, True))
            return
        if self.arrival and note.arrival != self.arrival:
            return  # of an earlier receive, of which a stop is on its way
        if self._cut is None:
            try:
                self._begin(note)
            except KvbmError as error:
                self.fail(error)
                return
        self._turn = note.turn
        self._again.reset()
        listed = {grant.serial for grant in note.grants}
        for serial in [one for one, packed in self._packed.items() if packed.is_told and one not in listed]:
            self._forget(serial)
        for grant in note.grants:
            packed = self._packed.get(grant.serial)
            if packed is not None and packed.is_told:
                if time.monotonic() > packed.told_at + AGAIN[0] / 2:  # before that it is on its way
                    self._tell(packed)
            elif packed is None and grant.serial > self._last:
                self._wanted.append(grant)
        self._last = max([self._last, *listed])

    def _begin(self, note: Want) -> None:
        span, link = self.sending.span, self.link
        if note.plan != link.plans(self.offer.group)[0]:
            raise BindError(
                f"{link.title}: {self.peer} has another plan: both sides need the same kvbm, placements and options"
            )
        if not span.tokens.start <= note.tokens.start < note.tokens.stop <= span.tokens.stop:
            raise BindError(f"{link.title}: {self.peer} wants tokens {note.tokens}, of {span.tokens} that there are")
        self.arrival = note.arrival
        self._cut = link.cut(self.sending, self.offer.group, note.tokens, note.origin, self.offer.layers, sends=True)

    def stopped(self, note: Stop) -> None:
        """The receiver takes no more."""
        if self.is_over:
            self.link.say(self.peer, Stopped(self.number, note.arrival, True))
            return
        self.arrival = self.arrival or note.arrival
        self._answers = True
        kind = DigestError if note.is_digest else TransferError
        self.sending.fail(kind(f"{self.link.title}: {self.peer} takes no more of {self.sending.key!r}: {note.why}"))

    def answered(self) -> None:
        """The receiver knows that it comes to nothing."""
        if self._stop is not None and not self._packed:
            self.is_over = True

    def finished(self, note: Done) -> None:
        if self.is_over or self.arrival not in (0, note.arrival):  # 0: nothing of it was wanted
            return
        if not self.uses_no_pool:  # of what has not been sent: it is asked for again
            return
        self.is_over = True
        for serial in list(self._packed):
            self._forget(serial)
        found = sum(self._digests.values()) % (1 << 64)
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
        """End it from this side: the receiver is told when nothing is under way."""
        if not self.is_over and self._stop is None:
            self._stop = Stop(self.number, self.arrival, isinstance(error, DigestError), True, str(error))
            self._wanted.clear()
        self.sending.fail(error)

    def lost(self) -> None:
        """The peer was dropped."""
        self._is_lost = True

    @property
    def uses_no_pool(self) -> bool:
        """Whether no kernel of it reads the pool."""
        return all(_is_done(packed.done) for packed in self._packed.values())

    def tick(self, now: float) -> bool:
        """Go on; whether something was done."""
        if self._is_lost:
            for serial in [one for one, packed in self._packed.items() if _is_done(packed.done)]:
                self._forget(serial)
            self.is_over = not self._packed
            return False
        busy = self._pack()
        for serial, packed in list(self._packed.items()):
            busy |= self._go_on(serial, packed)
        if (self._stop or self._answers) and not any(one.op or not one.is_told for one in self._packed.values()):
            for serial in list(self._packed):
                self._forget(serial)
            if self._answers:
                self.link.say(self.peer, Stopped(self.number, self.arrival, True))
                self.is_over = True
            elif self._stop is not None and (not self._is_told or self._again.is_due(now)):
                self._is_told = True
                self._stops += 1
                self.link.say(self.peer, self._stop)
                self.is_over = self._stops > 8  # a peer that is there would have answered
        elif all(one.is_told for one in self._packed.values()) and self._again.is_due(
            now
        ):  # what was answered may be lost
            self.link.count("notes_again")
            self._say_offer()
        return busy

    def _say_offer(self) -> None:
        self.link.say(self.peer, replace(self.offer, age=time.monotonic() - self.sending.began))

    def _pack(self) -> bool:
        busy = False
        while self._wanted and not self._stop and not self._answers:
            arrays: dict[tuple[int, int], Array] = {}
            taken: list[_Packed] = []
            while self._wanted and len(taken) < self.link.ring.together:
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
                done = self._cut.pack(arrays, key=self.sending.key, epoch=self.arrival, **self.sending.order)
            except Exception as error:
                for packed in taken:
                    self._give_back(packed)
                    if packed.slot >= 0:
                        self.link.ring.give(packed.slot)
                if not isinstance(error, KvbmError):
                    raise
                self.fail(error)
                break
            for packed in taken:
                packed.done = done
                self._packed[packed.grant.serial] = packed
            for packed in taken:
                self._go_on(packed.grant.serial, packed)  # where it is packed already it travels while the next one is packed
        return busy

    def _slot(self, grant: Grant) -> tuple[int, Array] | None:
        """Where a chunk is packed: a slot of this side, or -1, and its memory; None where it must wait, or all of it has failed."""
        ring = self.link.ring
        try:
            chunk = self._chunk(grant.chunk)
            array = None if self.offer.pulls else self.link.borrow(self.peer, grant.slot, chunk.size)
        except KvbmError as error:
            self.fail(error)
            return None
        if array is not None:
            return -1, array
        slot = ring.take(sends=True)
        if slot is None:
            self.link.count("stalls")
            return None
        return slot, ring.array(slot, chunk.size)

    def _chunk(self, number: int) -> Chunk:
        assert self._cut is not None
        held = self._cut.chunks.get(self.rank, ())
        if not 0 <= number < len(held):
            raise BindError(f"{self.link.title}: {self.peer} wants chunk {number} of {len(held)}")
        return held[number]

    def _go_on(self, serial: int, packed: _Packed) -> bool:
        ring, link = self.link.ring, self.link
        if packed.op is not None:
            if not packed.op.query():
                return False
            packed.op, packed.is_told, packed.told_at = None, True, time.monotonic()
            ring.give(packed.slot)
            packed.slot = -1
            return True
        if packed.is_told:
            return False
        try:
            if not packed.done.query():
                return False
        except KvbmError as error:
            self.fail(error)
        self._give_back(packed)
        if self._stop or self._answers:
            packed.is_told = True
            return True
        chunk = self._chunk(packed.grant.chunk)
        self._digests[packed.grant.chunk] = packed.done.digests[self.rank, packed.grant.chunk]
        if self.offer.pulls or packed.slot < 0:
            packed.is_told = True
            self._tell(packed)
        else:
            note = Put(self.number, self.arrival, serial, packed.grant.chunk, packed.grant.slot)
            packed.op = link.put(self.peer, ring.slice(packed.slot, chunk.size), packed.grant.slot, note)
            if packed.op is None:
                return False  # the peer is lost
        link.count("chunks_sent")
        link.count("bytes_sent", chunk.size)
        return True

    def _tell(self, packed: _Packed) -> None:
        packed.told_at = time.monotonic()
        slot = packed.slot if self.offer.pulls else packed.grant.slot
        self.link.say(self.peer, Put(self.number, self.arrival, packed.grant.serial, packed.grant.chunk, slot))

    def _forget(self, serial: int) -> None:
        packed = self._packed.pop(serial)
        self._give_back(packed)
        if packed.slot >= 0:
            self.link.ring.give(packed.slot)

    def _give_back(self, packed: _Packed) -> None:
        """What was packed into the receiver's memory is not written any more."""
        if packed.is_on_loan:
            packed.is_on_loan = False
            self.link.give_back(self.peer)

    def release(self) -> None:
        """At the end: wait for what is being packed, and give back all loans."""
        for packed in self._packed.values():
            with contextlib.suppress(Exception):
                packed.done.synchronize()
            self._give_back(packed)


class _Coming:
    """A chunk that may come: granted, fetched, or being unpacked."""

    def __init__(self, grant: Grant, slot: int) -> None:
        self.grant, self.slot = grant, slot
        self.op: Op | None = None
        self.done: ChunksDone | None = None
        self.is_here = False
        self.is_alone = False  # it shares no call with others, which would fail with it


class Inflow:
    """What comes from one peer to one `receive`: one offer of it.

    Attributes
    ----------
    began : float
        When its sending began, at the latest: the note's way is not known.
    is_over : bool
        Nothing of it is under way, and no slot waits for it.
    """

    def __init__(
        self, link: Link, arrival: Arrival, peer: str, rank: int, offer: Offer, began: float, cut: Cut
    ) -> None:
        self.link, self.arrival, self.peer, self.rank, self.offer, self.began = link, arrival, peer, rank, offer, began
        self.is_over = self.is_done = False
        self._cut = cut
        self._chunks = cut.chunks.get(rank, ())
        self._todo = deque(range(len(self._chunks)))
        self._coming: dict[int, _Coming] = {}
        self._tries: Counter[int] = Counter()
        self.digests: dict[int, int] = {}
        self._turn, self._is_lost = 0, False
        self._serials = itertools.count(1)
        self._stopping: Stop | None = None
        self._again = _Repeat()
        if not self._chunks:
            self._finish()

    # ---- notes -----------------------------------------------------------------------------------------------------

    def offered(self) -> None:
        """The offer came again: what was answered was lost."""
        if self.is_done:
            self._say_done()
        elif self._stopping is None and self._turn:
            self._say_wants()

    def put(self, note: Put) -> None:
        if self.is_done:
            self._say_done()
            return
        coming = self._coming.get(note.serial)
        if coming is None or coming.is_here or note.arrival != self.arrival.number or note.chunk != coming.grant.chunk:
            return
        if self.offer.pulls:
            size = self._chunks[note.chunk].size
            coming.op = self.link.get(self.peer, self.link.ring.slice(coming.slot, size), note.slot)
            if coming.op is None:
                return  # the peer is lost: nothing was read
        coming.is_here = True
        self._again.reset()

    def stopped(self, note: Stop) -> None:
        """The sender gives up; none of its puts is under way."""
        self.link.say(self.peer, Stopped(note.sending, note.arrival, False))
        if self.is_over:
            return
        is_left = self.link.leaves(self)
        self._end()
        kind = DigestError if note.is_digest else TransferError
        if not is_left:
            self.arrival.fail(kind(f"{self.link.title}: {self.peer} sends no more of {self.arrival.key!r}: {note.why}"))

    def answered(self) -> None:
        """The sender has stopped: none of its puts is under way."""
        if self._stopping is not None:
            self._end()
        elif not self.is_done:  # it knows nothing of what is wanted
            is_left = self.link.leaves(self)
            self._end()
            if not is_left:
                self.arrival.fail(TransferError(f"{self.link.title}: {self.peer} has ended {self.arrival.key!r}"))

    # ---- steps -----------------------------------------------------------------------------------------------------

    def fail(self, error: KvbmError) -> None:
        """Take no more: the sender is told, and slots that it may still write wait for its answer."""
        if self.is_over or self._stopping is not None:
            return
        if self.is_done:
            self.is_over = True
            return
        self._stopping = Stop(
            self.offer.sending, self.arrival.number, isinstance(error, DigestError), False, str(error)
        )
        self._again.reset()
        self.link.say(self.peer, self._stopping)

    def lost(self) -> None:
        """The peer was dropped: nothing of it lands any more."""
        self._is_lost = True

    @property
    def is_untouched(self) -> bool:
        """Whether no chunk of it has been unpacked, or is being."""
        return not self.digests and not self.is_done and all(coming.done is None for coming in self._coming.values())

    @property
    def uses_no_pool(self) -> bool:
        """Whether no kernel of it writes the pool."""
        return all(coming.done is None or _is_done(coming.done) for coming in self._coming.values())

    def tick(self, now: float) -> bool:
        """Go on; whether something was done."""
        if self._is_lost:
            self._end()
            return False
        news = self._stopping is None and not self.is_done and self._grant()
        if news:  # before what came is unpacked, so that more travels meanwhile
            self._say_wants()
        busy = news
        if self._stopping is None and self.link.ring.together > 1:
            self._unpack_some()
        for serial, coming in list(self._coming.items()):
            busy |= self._go_on(serial, coming)
        if self._stopping is not None:
            self._quarantine()
            if self._again.is_due(now):
                self.link.count("notes_again")
                self.link.say(self.peer, self._stopping)
            return busy
        if not self.is_done and not news and self._again.is_due(now):
            self.link.count("notes_again")
            self._say_wants()
        return busy

    def release(self) -> None:
        """At the end: wait for what is being unpacked."""
        for coming in self._coming.values():
            if coming.done is not None:
                with contextlib.suppress(Exception):
                    coming.done.synchronize()

    def _grant(self) -> bool:
        news = False
        ring = self.link.ring
        window = min(max(WINDOW, 2 * self.link.ring.together, WINDOW_BYTES // ring.slot_bytes), MOST_WINDOW)
        away = sum(not one.is_here for one in self._coming.values())
        if away > window // 2:  # some at a time: a note each time
            return False
        while self._todo and away < window and len(self._coming) < min(2 * window, MOST_GRANTS):
            slot = ring.take(sends=False)
            if slot is None:
                self.link.count("stalls")
                break
            grant = Grant(self._todo.popleft(), slot - ring.sends, next(self._serials))
            self._coming[grant.serial] = _Coming(grant, slot)
            away, news = away + 1, True
        return news

    def _say_wants(self) -> None:
        self._turn += 1
        arrival = self.arrival
        grants = tuple(one.grant for one in self._coming.values() if not one.is_here or one.op is not None)
        plan = self.link.plans(self.offer.group)[1]
        self.link.say(
            self.peer,
            Want(
                self.offer.sending, arrival.number, plan, arrival.span.tokens, arrival.span.origin, self._turn, grants
            ),
        )
        self._again.reset()

    def _go_on(self, serial: int, coming: _Coming) -> bool:
        if not coming.is_here:
            return False
        if coming.op is not None:
            if not coming.op.query():
                return False
            coming.op = None
        try:
            if coming.done is None:
                if self._stopping is not None:
                    self._free(serial)
                    return True
                coming.is_alone = True
                coming.done = self._unpack([coming])
            if not coming.done.query():
                return False
        except (DigestError, BindError) as error:
            if coming.is_alone:
                self._wrong(serial, coming, error)
            else:  # which of them it is shows when each is unpacked by itself
                coming.is_alone, coming.done = True, None
            return True
        self.digests[coming.grant.chunk] = coming.done.digests[self.rank, coming.grant.chunk]
        self.link.count("chunks_received")
        self.link.count("bytes_received", self._chunks[coming.grant.chunk].size)
        self._free(serial)
        if len(self.digests) == len(self._chunks) and self._stopping is None:
            self._finish()
        return True

    def _unpack(self, some: Sequence[_Coming]) -> ChunksDone:
        arrival, array, sizes = self.arrival, self.link.ring.array, self._chunks
        slots = {(self.rank, one.grant.chunk): array(one.slot, sizes[one.grant.chunk].size) for one in some}
        return self._cut.unpack(slots, key=arrival.key, epoch=arrival.number, verify=arrival.verify, **arrival.order)

    def _unpack_some(self) -> None:
        """Unpack chunks that are there by one call; if one of them is wrong, each by itself."""
        ready = [one for one in self._coming.values() if one.is_here and not (one.op or one.done or one.is_alone)]
        some = ready[: self.link.ring.together]
        if len(some) < 2:
            return
        try:
            done = self._unpack(some)
        except (DigestError, BindError):
            done = None
        for coming in some:
            coming.done, coming.is_alone = done, done is None

    def _wrong(self, serial: int, coming: _Coming, error: KvbmError) -> None:
        number = coming.grant.chunk
        self._free(serial)
        self._tries[number] += 1
        self.link.count("chunks_wrong")
        if self._stopping is not None:
            return
        if self._tries[number] > TRIES:
            told = DigestError(
                f"{self.link.title}: {self.arrival.key!r} of {self.peer}: {self._tries[number]} times: {error}"
            )
            self.arrival.fail(told)
        else:
            self._todo.appendleft(number)

    def _finish(self) -> None:
        self.is_done = self.is_over = True
        self._say_done()
        self.arrival.ended(self)

    @property
    def answer(self) -> Done | None:
        """What there is to say of it when it is over."""
        total = sum(self.digests.values()) % (1 << 64)
        return Done(self.offer.sending, self.arrival.number, total) if self.is_done else None

    def _say_done(self) -> None:
        if (answer := self.answer) is not None:
            self.link.say(self.peer, answer)

    def _quarantine(self) -> None:
        """Slots that the sender was granted, and may still write."""
        for coming in self._coming.values():
            if not coming.is_here and not self.offer.pulls:
                self.link.ring.quarantined.add((self.peer, coming.slot))

    def _free(self, serial: int) -> None:
        coming = self._coming.pop(serial)
        self.link.ring.quarantined.discard((self.peer, coming.slot))
        self.link.ring.give(coming.slot)

    def _end(self) -> None:
        """Nothing of the sender is under way: all slots are free."""
        for serial, coming in list(self._coming.items()):
            if coming.op is not None and not _is_done(coming.op):
                continue  # a get still writes it
            if coming.done is not None and not _is_done(coming.done):
                continue  # its slot is still read; `tick` frees it
            self._free(serial)
        self.is_over = not self._coming


def _is_done(done: ChunksDone | Op) -> bool:
    try:
        return done.query()
    except KvbmError:
        return True
