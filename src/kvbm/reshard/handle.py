"""The ends of transfers: what `send` and `receive` return."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from ..errors import BindError, KvbmError, TransferError, TransferTimeoutError
from .sequence import Span

if TYPE_CHECKING:
    from .cut import Cut
    from .flows import Inflow
    from .link import Link

__all__ = ["Arrival", "Handle", "Sending"]


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

    def settle(self) -> None:
        """Tell whoever waits, once memory of the pool is not in use any more."""
        if not self._ended.is_set():
            self.link.count("seconds", time.monotonic() - self.began)
            self._ended.set()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

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
        self.missing: dict[int, set[int]] = {}  # rank of the other engine → layers that are still to come

    @property
    def is_awaited(self) -> bool:
        return not self.has_failed and not self.has_ended

    def ended(self, flow: Inflow) -> None:
        self.missing[flow.rank] -= set(flow.offer.layers)
        self.digest = (self.digest + sum(flow.digests.values())) % (1 << 64)
        if not any(self.missing.values()):
            self.settle()
