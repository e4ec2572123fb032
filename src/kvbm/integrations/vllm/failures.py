"""Requests of vLLM's scheduler whose load failed: they give their blocks back at once, and nobody waits behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

__all__ = ["FailedLoads"]


class FailedLoads:
    """Requests of which nothing was loaded, until they have blocks again.

    vLLM keeps requests that hold blocks in a queue of their own, which comes first.  It frees the blocks of a failed load only when
    the request is at the head of that queue, and leaves the request there, without blocks.  If it then needs blocks that requests
    behind it hold, which have arrived or failed, nothing is ever scheduled again.  It also keeps blocks in reserve for a request
    whose load failed, which no other load may use, not even one of the same request.

    So a failed request gives its blocks back when all workers have ended its load.  Asked for its tokens the first time, the answer
    is that they are not known yet: vLLM then moves it to the queue of requests without blocks.  Later it is computed, and not
    loaded again.  As long as such a request waits, no other load begins: others are computed, or wait behind it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, bool] = {}  # request → True if it was asked for its tokens

    def ended(self, requests: Iterable[Any], manager: Any) -> None:
        """Loads of these requests of vLLM have ended on all workers.

        A request that vLLM has reset to no computed tokens has failed.  Its blocks are freed.
        """
        for request in requests:
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request.num_computed_tokens == 0:
                manager.free(request)  # vLLM frees them again, and finds none
                self._waiting[request.request_id] = False

    def answer(self, request: Any) -> tuple[int | None, bool] | None:
        """The answer to ``get_num_new_matched_tokens`` for a failed request; None for others."""
        asked = self._waiting.get(request.request_id)
        if asked is None:
            return None
        self._waiting[request.request_id] = True
        return (0, False) if asked else (None, False)

    def defer(self, found: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """The answer for another request: a load waits until no failed request does."""
        return (None, False) if self._waiting and found[1] else found

    def forget(self, request_id: str) -> None:
        """The request has blocks, or has ended."""
        self._waiting.pop(request_id, None)
