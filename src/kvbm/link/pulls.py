"""The flow of a direct transfer: this side copies out of the peer's pool, and compares its digest with the peer's."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import BindError, DigestError, KvbmError
from .direct import Part, Pass, Piece, Reader
from .flows import TRIES, Incoming
from .notes import Ask, Offer, Ready, Stop, Table, foreseen, offered
from .sums import Sums

if TYPE_CHECKING:
    from .handle import Arrival
    from .link import Link


class Ahead:
    """Copies of a peer's blocks that begin with the expected offer, before anything else is done with it.

    They are prepared when this side calls `receive`: mostly a peer offers all of that at once.
    """

    def __init__(
        self, arrival: Arrival, peer: str, rank: int, offer: Offer, reader: Reader, parts: list[Part], entries: int,
        loans: _core.Loans,
    ) -> None:  # fmt: skip
        self.arrival, self.peer, self.rank, self.parts, self._reader = arrival, peer, rank, parts, reader
        self._group, self._origin = offer.group, offer.origin
        self._is_taken = False
        self._left: Pass | None = None  # copies of which nobody waits for the end but `has_ended`
        note = foreseen(offer, entries)
        self.what = offered(note[0])[1]  # by which the offer is recognised
        packer = reader.packer
        self._on_gpu = packer.device >= 0
        self._sums = [Sums(len(part.own), self._on_gpu) for part in parts]
        try:
            copies = [
                _core.Expected(
                    part.launches.copies, part.own, part.at, part.entries, part.rests, part.each, reader.far.num_blocks,
                    sums.address, self._on_gpu, (packer, reader, sums),
                )
                for part, sums in zip(parts, self._sums, strict=True)
            ]  # fmt: skip
            self.copies = _core.Foreseen(copies, *note, entries, loans, packer.pool.watch, arrival.order.get("stream"))
        except BaseException:
            self._unused()
            raise

    def _unused(self) -> None:
        """The copies have not begun, and will not."""
        for one in self._sums:
            one.is_enqueued = True  # nothing writes to its memory

    def begin(self, note: bytes) -> bool:
        """Enqueue the copies with a note, unless that is done.  False if they wait for another, or cannot be enqueued."""
        try:
            if not self.copies.has_begun:
                self._reader.packer.require_usable()  # the pool may be closed since `receive`
            return self.copies.begin(note)
        except KvbmError:  # it is raised when the offer was read
            self.leave()
            return False

    def take(self) -> Pass | None:
        """Let nothing begin any more.  Returns the copies under way, once: the caller then has their loan."""
        dones = self.copies.end()
        if dones is None:
            if not self._is_taken:
                self._unused()
            return None
        self._is_taken = True
        arrival = self.arrival
        if arrival.zero is None:  # something is written
            arrival.zero = functools.partial(arrival.link.zero, arrival, self._group, self._origin)
        found = Pass()
        for done, sums in zip(dones, self._sums, strict=True):
            found.add(done if self._on_gpu else None, sums)
            sums.is_enqueued = not self.copies.has_failed  # else not all were enqueued
        return found

    def leave(self) -> None:
        """Let nothing begin any more.  Copies under way end by themselves: they may stand behind the caller's work on a GPU."""
        copies = self.take()
        if copies is not None:
            self._left = copies
            if not self.has_ended():
                self.arrival.link.left.append(self)

    def has_ended(self) -> bool:
        """True if nothing is under way of which only this object knows.  Ends the loan then."""
        if self._left is not None:
            with contextlib.suppress(KvbmError):
                if not self._left.query():
                    return False
            self._left = None
            self.arrival.link.give_back(self.peer)
        return True

    @property
    def dones(self) -> list[_core.Done]:
        """What `has_ended` asks for."""
        return [] if self._left is None else self._left.dones

    def release(self) -> None:
        """Wait for copies under way."""
        if self._left is not None:
            with contextlib.suppress(Exception):
                self._left.synchronize()
        self.has_ended()


class Pull(Incoming):
    """Copies from a peer's pool, which is on loan from the beginning to the end of the flow.  `ahead` has begun already."""

    def __init__(
        self, link: Link, arrival: Arrival, peer: str, rank: int, offer: Offer, began: float, reader: Reader,
        ahead: Ahead | None = None,
    ) -> None:  # fmt: skip
        super().__init__(link, arrival, peer, rank, offer, began)
        self._reader = reader
        self._offered_table = offer.table
        self._table: Any = None
        self._has_entry: Any = None  # entries of the table that have come
        self._is_complete = False  # the peer's blocks may be read
        self._peer_digest: int | None = None  # the peer's digest of them
        self._own_digest: int | None = None  # the digest of what was read, until the peer's has come
        self._cast_digest = 0  # the digest of what was written, if that was quantised
        self._parts: list[Part] | None = None  # what is to copy
        self._pieces: list[Piece] | None = None  # the same, after the table is known
        self._todo: deque[Piece] = deque()
        self._pass: Pass | None = None  # what is under way
        self._copies = arrival.verify != "before"  # False: the peer's blocks are only digested, before anything is written
        self._is_begun = self._is_stop_sent = self._is_returned = False
        self._tries = 0
        self._unanswered: Stop | None = None
        #: Numbers of arrivals whose notes are for this flow; 0: for all that is offered, if it is lent.
        self._numbers = {arrival.number}
        if ahead is not None:
            self._pass, self._parts = ahead.take(), ahead.parts
            self._is_begun = self._is_complete = True
        if offer.is_lent and (arrival.span.tokens, arrival.span.origin) == (offer.tokens, offer.origin):
            self._numbers.add(0)
        else:
            self._ask()

    # ---- notes -----------------------------------------------------------------------------------------------------

    def offered(self) -> None:
        if self.is_done:
            self._say_done()
        elif self._stopping is None and self._pass is None:
            self._ask()

    def table(self, note: Table) -> None:
        if note.arrival not in self._numbers:
            return
        self._is_complete |= note.is_complete
        if self._pieces is not None:
            return
        if note.entries > self.arrival.span.tokens.stop - self.offer.origin:  # a block holds a token or more
            raise BindError(f"{self.link.title}: {self.peer} tells of a table of {note.entries} blocks for fewer tokens")
        if self._table is None:
            self._table, self._has_entry = np.full(note.entries, -1, np.int64), np.zeros(note.entries, bool)
        if len(self._table) != note.entries:
            raise BindError(f"{self.link.title}: {self.peer} tells of a table of {note.entries} blocks, and of {len(self._table)}")
        part = np.frombuffer(note.blocks, "<i4")
        self._table[note.first : note.first + len(part)] = part
        self._has_entry[note.first : note.first + len(part)] = True
        self._repeat.reset()

    def ready(self, note: Ready) -> None:
        if self.is_done:
            self._say_done()
        elif note.arrival in self._numbers and self._peer_digest is None:
            self._peer_digest, self._is_complete = note.digest, True
            self._repeat.reset()

    def stopped(self, note: Stop) -> None:
        if not self.is_over:
            self._unanswered = note  # the answer says that this side reads no more
        super().stopped(note)

    def _answer(self, note: Stop) -> None:
        if self.is_over:
            super()._answer(note)

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def digest(self) -> int:
        return self._cast_digest if self._reader.quantises else super().digest

    @property
    def is_untouched(self) -> bool:
        return not self._is_begun

    @property
    def uses_no_pool(self) -> bool:
        try:
            return self._pass is None or self._pass.query()
        except KvbmError:
            return True

    def tick(self, now: float) -> bool:
        if self._is_ending:
            self._end()
            return False
        if self._stopping is not None:
            if self.uses_no_pool and (not self._is_stop_sent or self._repeat.is_due(now)):
                self._say_stop()
            return False
        if self.is_done:
            return False
        if self._pass is not None:
            return self._go_on()
        if self._own_digest is not None and self._peer_digest is not None:
            self._compare(self._own_digest, self._peer_digest)
            return True
        self._list()
        if self._is_complete and self._pieces is not None and self._own_digest is None:
            self._begin()
            return True
        if self._repeat.is_due(now):
            self.link.count("notes_again")
            self._ask()
        return False

    def release(self) -> None:
        if self._pass is not None:
            with contextlib.suppress(Exception):
                self._pass.synchronize()
        self._give_back()

    def awaited(self) -> list[Any] | None:
        return [] if self._pass is None else self._pass.dones

    def _list(self) -> None:
        """List what is to copy, if the table is known."""
        if self._offered_table is not None:
            self.table(self._offered_table)
            self._offered_table = None
        if self._pieces is None and self._table is not None and self._has_entry.all():
            if self._parts is None:
                arrival, offer = self.arrival, self.offer
                found = arrival.parts.get((self.rank, offer.origin, offer.layers))
                self._parts = self._reader.parts(arrival.span, offer.origin, offer.layers) if found is None else found
            self._pieces = self._reader.pieces(self._parts, self._table)

    def _ask(self) -> None:
        arrival, plan = self.arrival, self.link.plans(self.offer.group)[1]
        self.link.say(
            self.peer, Ask(self.offer.sending, arrival.number, plan, arrival.span.tokens, arrival.span.origin)
        )
        self._repeat.reset()

    def _begin(self) -> None:
        self._list()
        assert self._pieces is not None
        self._is_begun = True
        self._todo, self._pass = deque(self._pieces), Pass()
        self._enqueue()

    def _enqueue(self) -> None:
        """Enqueue what is to do: on the CPU one piece, as the call copies it."""
        arrival = self.arrival
        assert self._pass is not None
        self._reader.packer.require_usable()
        if self._copies and arrival.zero is None:  # from now on something is written
            arrival.zero = functools.partial(self.link.zero, arrival, self.offer.group, self.offer.origin)
        while self._todo:
            self._reader.begin(self._todo.popleft(), self._pass, arrival.order, copies=self._copies)
            if self.link.ring.device == "cpu":
                break

    def _go_on(self) -> bool:
        if self._todo:
            self._enqueue()
            return True
        assert self._pass is not None
        if not self._pass.query():
            return False
        self._own_digest, self._cast_digest, self._pass = self._pass.total, self._pass.cast, None
        if self._copies:
            self._reader.packer.pool.written()
        if self._peer_digest is not None:
            self._compare(self._own_digest, self._peer_digest)
        return True

    def _compare(self, found: int, expected: int) -> None:
        self._own_digest = None
        if found != expected:
            self._wrong(found)
        elif not self._copies:
            self._copies = True
            self._begin()
        else:
            self.digests[0] = found
            self.link.count("pulls")
            self.link.count("bytes_received", sum(part.nbytes for part in self._parts or ()))
            self._give_back()
            self._finish()

    def _wrong(self, found: int) -> None:
        self._tries += 1
        self.link.count("pulls_wrong")
        if self._tries <= TRIES:
            self._begin()
            return
        done = "its blocks were written: do not use them" if self._copies else "none of it was written"
        where = f"{self.link.title}: {self.arrival.key!r} of {self.peer}: {self._tries} times"
        self.arrival.fail(DigestError(f"{where}: digest: expected {self._peer_digest:#018x}, got {found:#018x}; {done}"))

    def _say_stop(self) -> None:
        if self.uses_no_pool:  # until then this side still reads
            self._give_back()
            self._is_stop_sent = True
            super()._say_stop()

    def _give_back(self) -> None:
        if not self._is_returned:
            self._is_returned = True
            self.link.give_back(self.peer)

    def _end(self) -> None:
        """Nothing more is copied.  The peer is answered when what is under way has ended."""
        self._is_ending = True
        if not self.uses_no_pool:
            return
        self._give_back()
        self.is_over = True
        if self._unanswered is not None:
            super()._answer(self._unanswered)
