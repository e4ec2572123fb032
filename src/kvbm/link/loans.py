"""A sender's blocks that a peer copies itself: they are lent until the peer says that it has them, or was dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..reshard.sequence import Ids, Span
from .notes import MOST_BLOCKS, MOST_POSTED, Ask, Offer, Ready, Table

if TYPE_CHECKING:
    from .direct import Lender, Pass
    from .flows import Outflow


def are_complete(order: Mapping[str, Any], stream: Any) -> bool:
    """True if blocks are known to be complete: the peer may copy them while this side digests them.

    `order` has the `stream` and the `wait` of the call that sends them.  No other work is before the digests on
    `stream`.
    """
    if order.get("stream") is not (stream if order else None):
        return False
    if (wait := order.get("wait")) is None:
        return True
    with contextlib.suppress(Exception):  # an event of any kind
        return bool(wait.query())
    return False


def with_table(offer: Offer, table: Ids, *, is_complete: bool) -> Offer:
    """An offer of blocks that are lent at once, with their table unless it is too long for a note."""
    if len(table) > MOST_POSTED:
        return offer._replace(is_lent=True)
    told = Table(offer.sending, 0, 0, len(table), is_complete, table.astype("<i4").tobytes())
    return offer._replace(is_lent=True, table=told)


class Loan:
    """What one peer reads of a sending.

    `note` says what: of `arrival` 0, what the peer will probably ask for.  The loan replaces `past`.  `table` is the
    lender's table of the note's tokens, if it is known.
    """

    def __init__(
        self, flow: Outflow, lender: Lender, note: Ask, past: Loan | None = None, table: Ids | None = None
    ) -> None:
        span, self._flow, self._lender = flow.sending.span, flow, lender
        self._span = span if note.tokens == span.tokens else Span(span.table, note.tokens, span.origin)
        self.arrival, self.tokens, self.origin = note.arrival, note.tokens, note.origin  # arrival 0: before the peer asks
        self._table = (lender.table(self._span) if table is None else table).astype("<i4")
        self.is_digest_sent = False
        self.is_returned = False  # the peer does not read them any more
        self._past = [] if past is None else past.passes
        self._pass: Pass | None = None  # that digests the blocks, after `begin`

    def begin(self) -> None:
        """Send the table, unless the offer has it, and digest the blocks.  Mostly the peer copies them meanwhile."""
        flow = self._flow
        if flow.offer.table is None or self.arrival:
            self._say_table()
        self._pass = self._lender.digest(flow.rank, self._span, self.origin, flow.offer.layers, flow.sending.order)
        self.go_on()

    @property
    def digest(self) -> int:
        """The digest of what is lent.  The blocks must be digested."""
        assert self._pass is not None
        return self._pass.total

    @property
    def passes(self) -> list[Pass]:
        return self._past if self._pass is None else [*self._past, self._pass]

    @property
    def is_digested(self) -> bool:
        """True if no kernel of this side reads the blocks."""
        return all(one.query() for one in self.passes)

    @property
    def is_over(self) -> bool:
        return self.is_returned and self.is_digested

    def say(self) -> None:
        """Send the block table again, and the digest if it is known."""
        self._say_table()
        self.is_digest_sent = False
        self.go_on()

    def _say_table(self) -> None:
        for part in self._tables():
            self._flow.link.say(self._flow.peer, part)

    def _tables(self) -> Iterator[Table]:
        count, flow = len(self._table), self._flow
        is_complete = self.is_digest_sent or are_complete(flow.sending.order, flow.link.endpoint.streams[True])
        for first in range(0, max(count, 1), MOST_BLOCKS):  # also of an empty table
            part = self._table[first : first + MOST_BLOCKS].tobytes()
            yield Table(flow.number, self.arrival, first, count, is_complete, part)

    def go_on(self) -> bool:
        """Send the digest when the blocks are digested.  True if it was sent now."""
        if self.is_digest_sent or self._pass is None or not self.is_digested:
            return False
        self.is_digest_sent = True
        self._flow.link.say(self._flow.peer, Ready(self._flow.number, self.arrival, self.digest))
        return True

    def release(self) -> None:
        """At the end: wait for running kernels."""
        for one in self.passes:
            with contextlib.suppress(Exception):
                one.synchronize()
