"""transformers' continuous batching: its paged cache as pools, requests that leave it and go on, here or in another one.

`groups_of` makes a `Group` of each attention type of a cache: a pool, and the block tables of requests.  `Batching` is a running
manager: it takes a request out of the schedule (`Batching.detach`) and puts one in (`Batching.reserve`, `Batching.attach`), and
between the two the caller copies blocks; `HandOver` does all of it.  `Host` keeps blocks in host memory, in any declared layout,
with digests.  `offloading` makes it the place to which managers offload when their cache is full: one ``with`` around
``model.generate_batch``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import transformers

from ..errors import BindError
from ..layout import Layout
from ..reshard.local import Local
from ..reshard.messages import plan
from ..reshard.sequence import Span
from .transformers_cache import VERSIONS, Group, Held, Host, away, groups_of, require

try:
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
except ImportError as error:
    raise ImportError(
        f"kvbm.integrations: transformers {transformers.__version__} has another continuous batching, or none ({error}); "
        f"install transformers {VERSIONS[0]} to {VERSIONS[1]}"
    ) from None

__all__ = [
    "VERSIONS",
    "Batching",
    "Group",
    "HandOver",
    "Held",
    "Host",
    "Offloading",
    "Parked",
    "groups_of",
    "offloading",
]


class Parked(NamedTuple):
    """A request in host memory: its state, and its blocks."""

    state: Any
    held: Held


class Batching:
    """A running ``ContinuousBatchingManager``, whose requests leave it and come in.

    Parameters
    ----------
    manager : ContinuousBatchingManager
        Started, of one process (tp 1).

    Attributes
    ----------
    groups : dict of str to Group

    Raises
    ------
    BindError
        A manager that does not run or spreads over several processes; what `groups_of` refuses.

    Notes
    -----
    A request that moves is the engine's own ``RequestState``, a plain object that can be pickled.  Its way is

    1. `detach`, where it was: it is no longer scheduled, its blocks stay;
    2. `reserve`, where it goes on: it gets blocks for what is in the cache, of any size;
    3. the caller copies, by `Host`, `reshard.Local` or a link, from ``groups[name].span(…)`` to the other's;
    4. `release` here, `attach` there.

    Each of these pauses the generation between two steps.  Between them both managers run: the blocks belong to the request.
    ``cancel_request`` does not reach one that is between them: `release` it instead.
    """

    def __init__(self, manager: Any) -> None:
        require("manager", manager)
        self.manager = manager
        if not manager.is_running():
            raise BindError("transformers: expected a manager that runs; call manager.start() first")
        _require_one(manager.distributed_helper)
        with self.paused():
            processor = manager.batch_processor
            require("batch_processor", processor)
            require("scheduler", processor.scheduler)
            self.cache = processor.cache
            self.groups = groups_of(self.cache)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step runs inside, and what the last one wrote is in the cache.  May be nested."""
        with self.manager.pause():
            if self.manager.model.device.type == "cuda":
                torch.cuda.synchronize(self.manager.model.device)
            yield

    def detach(self, request_id: str) -> Any:
        """Take a request out of the schedule, as it is between two steps.  Its blocks stay, until `release`.

        Returns
        -------
        RequestState
            ``position_offset`` tokens of it are in the cache.

        Raises
        ------
        BindError
            It is not being computed: finished, waiting, or unknown.
        """
        with self.paused():
            active = self.manager.batch_processor.scheduler.active_requests
            found = active.pop(request_id, None)
            if found is None:
                raise BindError(
                    f"transformers: request {request_id!r}: expected one that is being computed, got one that is finished, waiting "
                    f"or unknown; active are {list(active)!r:.200}"
                )
            require("request", found)
            state = deepcopy(found)
            found._status = type(found.status).FINISHED  # a step under way drops what it made of it
            known = state.initial_tokens + state.generated_tokens
            if state.status.name == "DECODING":
                # Of a step under way the token is not known yet: it is computed again from the token before.
                state.position_offset = min(state.position_offset, len(known) - 1)
                state.tokens_to_process = [known[state.position_offset]]
            self._rename(request_id, away(request_id))
            return state

    def _rename(self, name: Any, new: Any) -> None:
        """Let the block tables of a request be another's: those of one that is away nobody frees."""
        for group in self.groups.values():
            tables = group.allocator.block_table
            if name in tables:
                tables[new] = tables.pop(name)

    def reserve(self, state: Any, request_id: str | None = None) -> Any:
        """Give a request the blocks that it needs for what is in the cache and the next step.

        Parameters
        ----------
        state : RequestState
            Of `detach`, of this or another manager.
        request_id : str, optional
            Its name from now on: two managers both count from ``req_0``.

        Returns
        -------
        RequestState
            A copy of it, for `attach`.

        Raises
        ------
        BindError
            The name is taken, or there is no room.  Nothing was changed.
        """
        state = deepcopy(state)
        state.request_id = state.request_id if request_id is None else request_id
        with self.paused():
            scheduler = self.manager.batch_processor.scheduler
            taken = state.request_id in scheduler.active_requests or state.request_id in scheduler.waiting_requests
            if taken or any(group.table(state.request_id) for group in self.groups.values()):
                raise BindError(
                    f"transformers: request {state.request_id!r}: the manager has one of this name; pass request_id="
                )
            self.manager.batch_processor.logit_processor.check_kwargs(state.logit_processor_kwargs)
            cache = self.cache
            cache.pool.try_to_free_sectors()
            if not cache.can_store_request_tokens(state, 1):
                evicted = cache.evict_cached_blocks()
                cache.pool.try_to_free_sectors()
                if not evicted or not cache.can_store_request_tokens(state, 1):
                    raise BindError(
                        f"transformers: request {state.request_id!r}: no room for {state.position_offset + 1} tokens; "
                        "wait until others have ended"
                    )
            self._rename(state.request_id, away(state.request_id))
        return state

    def attach(self, state: Any) -> None:
        """Let a request go on whose blocks are filled; its results come from this manager.

        Raises
        ------
        BindError
            It has no blocks: it was released, or attached already; the manager has another one of this name.
        """
        with self.paused():
            scheduler, name = self.manager.batch_processor.scheduler, state.request_id
            if name in scheduler.active_requests or name in scheduler.waiting_requests:
                raise BindError(f"transformers: request {name!r}: the manager has one of this name")
            if not all(away(name) in group.allocator.block_table for group in self.groups.values()):
                raise BindError(
                    f"transformers: request {name!r}: expected one that was detached or reserved, got one without blocks: it was "
                    "released"
                )
            self._rename(away(name), name)
            if self.cache.use_prefix_sharing and state.position_offset:
                tokens = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
                for group in self.groups.values():  # so that requests with the same prefix find it
                    whole = state.position_offset // group.pool.shape.nt
                    group.allocator.mark_complete_blocks(state.request_id, tokens, whole)
            scheduler.active_requests[name] = state

    def release(self, state: Any, *, reusable: bool = True) -> None:
        """Give back the blocks of a request that was detached, or reserved and not attached.

        Whole ones stay for requests with the same prefix as long as there is room, unless they are not `reusable`.
        """
        with self.paused():
            self.cache.free_blocks(away(state.request_id), no_cache=not reusable)

    def spans(self, state: Any) -> dict[str, Span]:
        """By group, the blocks that hold what of the request is in the cache."""
        return {name: group.span(state.request_id, state.position_offset) for name, group in self.groups.items()}

    # ---- to host memory and back

    def offload(self, request_id: str, host: Host) -> Parked:
        """Put a request into host memory; its blocks are free.

        Raises
        ------
        BindError
            As `detach`; no room in the host's memory: the request goes on then.
        """
        with self.paused():
            state = self.detach(request_id)
            try:
                held = host.put(self.groups, {name: group.table(request_id) for name, group in self.groups.items()})
            except BaseException:
                self.attach(state)
                raise
            self.release(state, reusable=False)
        return Parked(state, held)

    def restore(self, parked: Parked, host: Host, request_id: str | None = None) -> bool:
        """Let a request go on that was offloaded, from this manager or another one with the same blocks.

        Returns
        -------
        bool
            Whether its blocks came back as they left.  If not, none of them is used: the request is computed anew from its tokens.

        Raises
        ------
        BindError
            As `reserve`; a manager whose blocks have another shape; the request stays where it is.  It was restored before.
        """
        with self.paused():
            state = self.reserve(parked.state, request_id)
            try:
                right = host.get(parked.held, self.groups, {n: g.table(state.request_id) for n, g in self.groups.items()})
                host.drop(parked.held)
            except BaseException:
                self.release(state, reusable=False)
                raise
            if not right:
                _start_over(state)
            self.attach(state)
        return right


def _require_one(helper: Any) -> None:
    """Ranks of one manager would have to find the same block wrong."""
    if helper.tp_size > 1:
        raise BindError(f"transformers: expected a manager of one process, got tp {helper.tp_size}")


def _start_over(state: Any) -> None:
    """The request computes all its tokens again, into the blocks that it has."""
    state.remaining_prefill_tokens = state.initial_tokens + state.generated_tokens
    state.tokens_to_process = []
    state.position_offset = 0
    state._status = type(state.status).PREFILLING


class HandOver:
    """Moves requests from one manager to another one in this process: prefill here, decode there.

    Parameters
    ----------
    src, dst : Batching
        Of one model; their caches may have blocks of other sizes, and lie on other devices.

    Raises
    ------
    BindError, PlanError
        Caches of different models.

    Examples
    --------
    >>> go_on = HandOver(Batching(prefill), Batching(decode))  # doctest: +SKIP
    >>> name = go_on("req_0")  # doctest: +SKIP
    """

    def __init__(self, src: Batching, dst: Batching) -> None:
        if src.groups.keys() != dst.groups.keys():
            raise BindError(
                f"transformers: expected caches of one model, got {list(src.groups)} and {list(dst.groups)}"
            )
        self.src, self.dst = src, dst
        self._copies = {}
        for name, ours in src.groups.items():
            theirs = dst.groups[name]
            if (ours.layers, ours.window) != (theirs.layers, theirs.window):
                raise BindError(
                    f"transformers: {name}: expected layers {ours.layers} and a window of {ours.window}, got {theirs.layers} and "
                    f"{theirs.window}"
                )
            made = plan(ours.placement("source"), theirs.placement("destination"))
            self._copies[name] = Local(made, [ours.pool], [theirs.pool])

    def __call__(self, request_id: str, new_id: str | None = None) -> str:
        """Move a request that is being computed; it goes on under `new_id`, which is returned.

        Raises
        ------
        BindError
            As `Batching.detach` and `Batching.reserve`; of the latter the request goes on where it was.
        """
        with self.src.paused(), self.dst.paused():
            state = self.src.detach(request_id)
            try:
                moved = self.dst.reserve(state, new_id)
                try:
                    spans = self.src.spans(state), self.dst.spans(moved)
                    for name, copy in self._copies.items():
                        copy(spans[0][name], spans[1][name]).synchronize()
                except BaseException:
                    self.dst.release(moved, reusable=False)
                    raise
            except BaseException:
                self.src.attach(state)
                raise
            self.src.release(state)
            self.dst.attach(moved)
            return str(moved.request_id)


# ---- when the cache is full ----------------------------------------------------------------------------------------------


class Offloading(OffloadingManager):  # type: ignore[misc]
    """The engine's ``OffloadingManager``, with a `Host` for what does not fit; when to offload whom it decides as ever.

    Where the engine's own keeps bytes as they lie, in pinned memory, these are in a declared layout, with digests.
    Blocks that come back wrong are not used: their request computes all its tokens again.  `offloading` puts it to use.
    """

    def __init__(self, cache: Any, scheduler: Any, num_blocks: int, stream: Any = None, **options: Any) -> None:
        require("offloading_manager", OffloadingManager)
        self.cache, self.scheduler = cache, scheduler
        self.groups = groups_of(cache)
        self.host = Host(self.groups, num_blocks, **options)
        self._stream = stream
        self._held: dict[str, Held] = {}

    def _offload_to_cpu(self, victims: list[Any], victim_block_tables: dict[str, dict[str, list[int]]]) -> set[str]:
        """Store the blocks of requests that have lost them, as many as have room: of which they were."""
        for state in victims:
            tables = victim_block_tables[state.request_id]
            if any(tables.values()) and self.host.room(tables):
                self._held[state.request_id] = self.host.put(self.groups, tables, self._stream)
                state.is_cpu_offloaded = True
        return {state.request_id for state in victims if state.is_cpu_offloaded}

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Fill the blocks that stored requests were given anew for the next step."""
        for future in requests_in_batch:
            state = future.state
            if not state.is_cpu_offloaded:
                continue
            held = self._held.pop(state.request_id)
            tables = {name: group.table(state.request_id) for name, group in self.groups.items()}
            right = self.host.get(held, self.groups, tables, self._stream)
            self.host.drop(held)
            state.is_cpu_offloaded = False
            if not right:  # as many tokens as were planned, but from the first one on
                _start_over(state)
                tokens, count = state.remaining_prefill_tokens, future.query_length
                state.tokens_to_process, state.remaining_prefill_tokens = tokens[:count], tokens[count:]
                future.has_new_token = not tokens[count:]
                if future.has_new_token:
                    state._status = type(state.status).DECODING
            future.complete_blocks = {
                name: (state.position_offset + future.query_length) // group.pool.shape.nt
                for name, group in self.groups.items()
                if self.cache.use_prefix_sharing
            }

    def free_request_cpu_cache(self, state: Any) -> None:
        held = self._held.pop(state.request_id, None)
        if held is not None:
            self.host.drop(held)
            state.is_cpu_offloaded = False

    def reset(self) -> None:
        self.free_all_waiting_cpu_caches()
        for held in self._held.values():
            self.host.drop(held)
        self._held.clear()


@contextlib.contextmanager
def offloading(
    num_blocks: int, layout: str | Layout = "universal", *, check: bool = True
) -> Iterator[list[Offloading]]:
    """Inside, each manager that begins to compute offloads by kvbm: those of ``model.generate_batch`` and its like.

    It is so for all threads.  A manager of your own has begun when its ``batch_processor`` is there.

    Parameters
    ----------
    num_blocks, layout, check
        As for `Host`; for each manager.

    Yields
    ------
    list of Offloading
        Those that were made; their ``host.stats`` say what was moved.

    Examples
    --------
    >>> with offloading(1024) as made:  # doctest: +SKIP
    ...     model.generate_batch(prompts, generation_config=config)
    """
    made: list[Offloading] = []

    def make(
        cache: Any, scheduler: Any, *, compute_stream: Any = None, distributed_helper: Any = None, **_: Any
    ) -> Offloading:
        _require_one(distributed_helper)
        made.append(Offloading(cache, scheduler, num_blocks, compute_stream, layout=layout, check=check))
        return made[-1]

    theirs = continuous_api.OffloadingManager
    continuous_api.OffloadingManager = make
    try:
        yield made
    finally:
        continuous_api.OffloadingManager = theirs
