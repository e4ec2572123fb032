"""Handles of transfers, which `send` and `receive` return."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from .. import _core
from .._arguments import quoted, seconds
from ..errors import BindError, KvbmError, TransferError, TransferTimeoutError
from ..reshard.sequence import Span

if TYPE_CHECKING:
    from .chunks import Cut
    from .direct import Part
    from .flows import Incoming
    from .link import Link
    from .pulls import Ahead

#: Seconds for which `synchronize` keeps a processor busy, where that is worth it: to be woken takes 50 µs.
_SPIN = 2e-3


class Handle:
    """The handle of a transfer, which `send` and `receive` return.  Any thread may wait for it."""

    what = ""

    def __init__(self, link: Link, key: str, span: Span, timeout: float, order: dict[str, Any]) -> None:
        self.link, self.key, self.span, self.order = link, key, span, order
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.timeout = timeout
        self.flows: list[Any] = []
        self.cuts: dict[tuple[range, int, range], Cut] = {}
        self.has_ended = False
        self._running = threading.Lock()  # held until the transfer has ended; an Event takes ten times as many calls
        self._running.acquire()
        self._latch = _core.Latch()  # the same, for who waits without a lock
        self.error: KvbmError | None = None  # why it failed, or fails when nothing is under way
        self.whole: Gathering | None = None  # the Gathering of which this is a part

    def query(self) -> bool:
        """True if the transfer is done.

        Raises
        ------
        TransferError
            The transfer failed; it may be a `PeerLostError`, `TransferTimeoutError` or `DigestError`.
        """
        if self.has_ended and self.error is not None:
            raise self.error.with_traceback(None)
        return self.has_ended

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait on the host until the transfer is done.

        Raises the errors of `query`, and `TransferTimeoutError` after `timeout` seconds.  A wait that times out does not end the
        transfer: its deadline was given to `send` or `receive`.
        """
        if self.link.endpoint.spins and not self.has_ended and (timeout is None or timeout > _SPIN):
            self._latch.wait(round(_SPIN * 1e6))
        if not self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise TransferTimeoutError(
                f"{self.link.title}: {self.what} {self.key!r}: not done after {timeout} s; the transfer continues"
            )
        self._running.release()  # for other threads that wait
        self.query()

    def abort(self) -> None:
        """Give up the transfer.  Waiting threads and the other side get an error."""
        error = TransferError(f"{self.link.title}: {self.what} {self.key!r}: it was aborted here")
        if not self.has_ended:
            with contextlib.suppress(BindError):  # closed meanwhile, which ends it
                self.link.endpoint.submit(lambda: self.fail(error))

    # ---- the endpoint's thread -------------------------------------------------------------------------------------

    def fail(self, error: KvbmError) -> None:
        if self.error is None and not self.has_ended:
            self.error = error
            self.link.count("failed")
            for flow in self.flows:
                flow.fail(error)
            if self.whole is not None:
                self.whole.fail(error)

    @property
    def uses_no_pool(self) -> bool:
        """True if no kernel of this transfer uses a pool."""
        return all(flow.uses_no_pool for flow in self.flows)

    def settle(self) -> None:
        """Wake the waiting threads when the memory of the pool is no longer in use."""
        if not self.has_ended:
            self.link.count("seconds", time.monotonic() - self.began)
            self._end()
            if self.whole is not None:
                self.whole.ended(self)

    def _end(self) -> None:
        self.has_ended = True
        self._latch.set()
        self._running.release()

    @property
    def has_failed(self) -> bool:
        return self.error is not None

    @property
    def why(self) -> str:
        """Why the transfer failed."""
        return str(self.error)

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.has_ended else "under way"
        return f"<kvbm {type(self).__name__} of {self.key!r}: {state}>"


class Sending(Handle):
    """The sending of a sequence, or of some of its layers, to the ranks of the other engine.

    When it is done, everything has arrived and was verified: the blocks may be reused.
    """

    what = "sending"

    def ended(self) -> None:
        if all(flow.is_over for flow in self.flows):
            self.settle()


class Arrival(Handle):
    """The arrival of a sequence from the ranks of the other engine.

    Do not read its blocks before it is done: they may be incomplete.  When it is done, all chunks of all ranks have
    arrived and were verified.  If it failed after something was written, its tokens are zero when it has ended: nothing
    of it is left.

    `digest` is kvbm-digest-1 of what arrived, after it is done; of a cast, of the quantised bits.
    """

    what = "receiving"

    def __init__(
        self, link: Link, key: str, span: Span, timeout: float, order: dict[str, Any], *, verify: str,
        identity: tuple[int, bytes], layers: range,
    ) -> None:  # fmt: skip
        super().__init__(link, key, span, timeout, order)
        self.number = secrets.randbits(64) or 1
        self.verify, self.identity, self.layers = verify, identity, layers
        self.digest = 0
        self.failed_at = 0.0
        self.missing: dict[int, frozenset[int]] = {}  # rank of the other engine → layers that have not arrived
        self.zero: Callable[[], None] | None = None  # writes zeros into the tokens; set when something is written
        #: Rank, origin and layers of a probable offer → what is copied of it, prepared while it is on its way.
        self.parts: dict[tuple[int, int, range], list[Part]] = {}
        self.ahead: list[Ahead] = []  # copies that begin with such offers

    def fail(self, error: KvbmError) -> None:
        if not self.has_failed:
            self.failed_at = time.monotonic()
        self.expect_no_more()
        super().fail(error)

    def expect_no_more(self, rank: int | None = None) -> None:
        """Begin no copies with an offer any more, of one rank or of all."""
        for one in self.ahead:
            if rank in (None, one.rank):
                one.leave()

    @property
    def uses_no_pool(self) -> bool:
        return super().uses_no_pool and all(one.has_ended() for one in self.ahead)

    def settle(self) -> None:
        self.expect_no_more()
        for one in self.ahead:  # mostly it stands before what has ended, on the same stream
            one.release()
        if self.has_failed and self.whole is None:
            self.clear()
        super().settle()

    def _end(self) -> None:
        self.ahead, self.parts = [], {}  # they keep the peer's memory mapped
        super()._end()

    def clear(self) -> None:
        """Write zeros over what was written.  No kernel may use the pool.  If it is not possible, the error says so."""
        zero, self.zero = self.zero, None
        if zero is not None:
            try:
                zero()
            except Exception as error:  # for any error: the thread goes on with other transfers
                combined = copy(self.error)
                assert combined is not None
                combined.args = (f"{self.why}; its blocks still hold a part of it, as writing zeros there failed: {error}",)
                self.error = combined

    @property
    def is_awaited(self) -> bool:
        return not self.has_failed and not self.has_ended

    def ended(self, flow: Incoming) -> None:
        self.missing[flow.rank] -= set(flow.offer.layers)
        self.digest = (self.digest + flow.digest) % (1 << 64)
        if not any(self.missing.values()):
            self.settle()


class Gathering(Handle):
    """The arrival of a sequence in two parts: a share from the other engine, the rest from equal ranks of this engine.

    It is done when this rank has the whole sequence and has passed on its share, by the sending that `begin` begins.
    If one rank fails, the ranks that wait for it fail, too.
    """

    what = "receiving"

    def __init__(self, share: Arrival, rest: Arrival, passing: Sending, begin: Callable[[], None]) -> None:
        super().__init__(share.link, share.key, share.span, share.timeout, share.order)
        self._share, self._rest, self._passing, self._begin = share, rest, passing, begin
        for part in self._parts:
            part.whole = self

    @property
    def _parts(self) -> tuple[Arrival, Arrival, Sending]:
        return self._share, self._rest, self._passing

    @property
    def digest(self) -> int:
        """kvbm-digest-1 of what arrived, after it is done."""
        return (self._share.digest + self._rest.digest) % (1 << 64)

    # ---- the endpoint's thread -------------------------------------------------------------------------------------

    def fail(self, error: KvbmError) -> None:
        if self.error is None and not self.has_ended:
            self.error = error
            for part in self._parts:
                part.fail(error)

    def ended(self, part: Handle) -> None:
        """Called when a part has ended: pass the share on, or tell the other ranks that it will not come."""
        if part is self._share:
            if self.link.endpoint.is_over:
                self._passing.settle()
            else:
                self._begin()
                if self.error is not None:
                    for flow in self._passing.flows:
                        flow.fail(self.error)
        if not self.has_ended and all(one.has_ended for one in self._parts):
            if self.error is not None:  # also a part that had arrived: the sequence as a whole did not
                self._share.clear()
                self._rest.clear()
            self._end()


def require_call(key: Any, span: Any, timeout: Any) -> None:
    """Check the arguments `key`, `span` and `timeout`."""
    try:
        is_name = isinstance(key, str) and key != "" and bool(key.encode())
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise BindError(f"key: expected the sequence's name, got {quoted(key)}")
    if not isinstance(span, Span):
        raise BindError(f"span: expected a kvbm.Span, got {quoted(span)}")
    seconds("timeout", timeout)
