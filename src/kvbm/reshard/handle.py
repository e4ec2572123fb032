"""The ends of transfers: what `send` and `receive` return."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import BindError, KvbmError, TransferError, TransferTimeoutError
from .sequence import Span

if TYPE_CHECKING:
    from .cut import Cut
    from .flows import Inflow
    from .link import Link

__all__ = ["Arrival", "Gathering", "Handle", "Sending", "require_call"]


class Handle:
    """What `send` and `receive` return: the end of a transfer, for whoever waits for it on another thread."""

    what = ""

    def __init__(self, link: Link, key: str, span: Span, timeout: float, order: dict[str, Any]) -> None:
        self.link, self.key, self.span, self.order = link, key, span, order
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.timeout = timeout
        self.flows: list[Any] = []
        self.cuts: dict[tuple[range, int, range], Cut] = {}
        self._ended = threading.Event()
        self._error: KvbmError | None = None
        self.whole: Gathering | None = None  # which this is a part of

    def query(self) -> bool:
        """Whether it is done.

        Raises
        ------
        TransferError
            It failed: `PeerLostError`, `TransferTimeoutError`, `DigestError` among them.
        """
        if self._ended.is_set() and self._error is not None:
            raise self._error.with_traceback(None)
        return self._ended.is_set()

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait on the host until it is done; raises as `query`, and `TransferTimeoutError` where that takes longer.

        The transfer's own deadline is that of the call that began it: a wait that is given up does not end it.
        """
        if not self._ended.wait(timeout):
            raise TransferTimeoutError(
                f"{self.link.title}: {self.what} {self.key!r}: not done after {timeout} s; it goes on"
            )
        self.query()

    def abort(self) -> None:
        """Give it up; whoever waits is told, and the other side."""
        error = TransferError(f"{self.link.title}: {self.what} {self.key!r}: it was aborted here")
        if not self.has_ended:
            with contextlib.suppress(BindError):  # closed meanwhile, which ends it
                self.link.endpoint.submit(lambda: self.fail(error))

    # ---- the endpoint's thread -------------------------------------------------------------------------------------

    def fail(self, error: KvbmError) -> None:
        if self._error is None and not self._ended.is_set():
            self._error = error
            self.link.count("failed")
            for flow in self.flows:
                flow.fail(error)
            if self.whole is not None:
                self.whole.fail(error)

    def settle(self) -> None:
        """Tell whoever waits, once memory of the pool is not in use any more."""
        if not self._ended.is_set():
            self.link.count("seconds", time.monotonic() - self.began)
            self._ended.set()
            if self.whole is not None:
                self.whole.ended(self)

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def why(self) -> str:
        """Why it has failed."""
        return str(self._error)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self._ended.is_set() else "under way"
        return f"<kvbm {type(self).__name__} of {self.key!r}: {state}>"


class Sending(Handle):
    """A sequence, or some layers of it, that goes to the ranks of the other engine.

    When it is done, all of it has arrived and was found right: its blocks may be used for something else.
    """

    what = "sending"

    def ended(self) -> None:
        if all(flow.is_over for flow in self.flows):
            self.settle()


class Arrival(Handle):
    """A sequence that comes from the ranks of the other engine.

    Before it is done nobody may read its blocks: some may hold a part.  When it is done, all chunks of all ranks are there and
    right.

    Attributes
    ----------
    digest : int
        kvbm-digest-1 of what came, once it is done.
    """

    what = "receiving"

    def __init__(
        self,
        link: Link,
        key: str,
        span: Span,
        timeout: float,
        order: dict[str, Any],
        *,
        verify: str,
        identity: tuple[int, bytes],
        layers: range,
    ) -> None:
        super().__init__(link, key, span, timeout, order)
        self.number = secrets.randbits(64) or 1
        self.verify, self.identity, self.layers = verify, identity, layers
        self.digest = 0
        self.failed_at = 0.0
        self.missing: dict[int, set[int]] = {}  # rank of the other engine → layers that are still to come

    def fail(self, error: KvbmError) -> None:
        if not self.has_failed:
            self.failed_at = time.monotonic()
        super().fail(error)

    @property
    def is_awaited(self) -> bool:
        return not self.has_failed and not self.has_ended

    def ended(self, flow: Inflow) -> None:
        self.missing[flow.rank] -= set(flow.offer.layers)
        self.digest = (self.digest + sum(flow.digests.values())) % (1 << 64)
        if not any(self.missing.values()):
            self.settle()


class Gathering(Handle):
    """A sequence of which a share comes from the other engine, and the rest from ranks of this one that hold the same.

    It is done when this rank has all of it, and has passed its share on.  Where one rank fails, those that wait for it do.

    Parameters
    ----------
    share, rest : Arrival
    passing : Sending
        Of the share to the other ranks: not begun.
    begin : callable
        Begins it.
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
        """kvbm-digest-1 of what came, once it is done."""
        return (self._share.digest + self._rest.digest) % (1 << 64)

    # ---- the endpoint's thread -------------------------------------------------------------------------------------

    def fail(self, error: KvbmError) -> None:
        if self._error is None and not self._ended.is_set():
            self._error = error
            for part in self._parts:
                part.fail(error)

    def ended(self, part: Handle) -> None:
        """A part of it has: what is to be passed on is there, or will not come, of which the other ranks are told."""
        if part is self._share:
            if self.link.endpoint.is_over:
                self._passing.settle()
            else:
                self._begin()
                if self._error is not None:
                    for flow in self._passing.flows:
                        flow.fail(self._error)
        if all(one.has_ended for one in self._parts):
            self._ended.set()


def require_call(key: Any, span: Any, timeout: Any) -> None:
    """Refuse what is no key, no span or no number of seconds."""
    try:
        is_name = isinstance(key, str) and key != "" and bool(key.encode())
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise BindError(f"key: expected the sequence's name, got {key!r:.200}")
    if not isinstance(span, Span):
        raise BindError(f"span: expected a kvbm.Span, got {span!r:.200}")
    if not isinstance(timeout, int | float) or not 0 <= timeout < 1e9:
        raise BindError(f"timeout: expected seconds, got {timeout!r:.200}")
