"""transformers' continuous batching: bind its paged cache as pools, and move requests to host memory or to another manager.

`groups_of` returns a `Group` per attention type of a cache: a pool, and the block tables of requests.  `Batching` wraps a running
manager: it removes a request from the schedule (`Batching.detach`) and adds one (`Batching.reserve`, `Batching.attach`); between
these calls the caller copies blocks.  `HandOver` does all of this.  `Host` keeps blocks in host memory, in any declared layout,
with digests.  `offloading` makes managers offload to it when their cache is full: one ``with`` around ``model.generate_batch``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import transformers

from ...errors import BindError, MissingPackageError
from ...layout.layout import Layout
from ...link.model import differences, named
from ...reshard.local import Local
from ...reshard.messages import plan
from ...reshard.sequence import Span
from ...store.keys import relevant
from .cache import VERSIONS, Group, Held, Host, away, groups_of, require

try:
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
except ImportError as error:
    raise MissingPackageError(
        f"kvbm.integrations: transformers {transformers.__version__} has no supported continuous batching ({error}); "
        f"install transformers {VERSIONS[0]} or newer, before {VERSIONS[1]}"
    ) from None

__all__ = [
    "VERSIONS", "Batching", "Group", "HandOver", "Held", "Host", "Offloading", "Parked", "groups_of", "offloading"
]


class Parked(NamedTuple):
    """A request in host memory: its state, its blocks, and the model that computed them."""

    state: Any
    held: Held
    model: Any


class Batching:
    """A running ``ContinuousBatchingManager`` of one process (tp 1).  Requests can be moved out of it and into it.

    `groups` are those of the cache, by attention type.  Raises `BindError` if the manager does not run, or uses several
    processes; also as `groups_of`.

    Notes
    -----
    The state of a request is the engine's ``RequestState``, a plain object that can be pickled.  To move a request:

    1. call `detach` on the source: the request is no longer scheduled, but keeps its blocks;
    2. call `reserve` on the destination: the request gets blocks for its tokens in the cache; block sizes may differ;
    3. copy with `Host`, `reshard.Local` or a link, from ``groups[name].span(…)`` of the source to that of the destination;
    4. call `release` on the source and `attach` on the destination.

    Each call pauses the generation between two steps.  Between the calls both managers run, and the request keeps its blocks.
    ``cancel_request`` does not find a request between these calls: `release` it instead.
    """

    def __init__(self, manager: Any) -> None:
        require("manager", manager)
        self.manager = manager
        if not manager.is_running():
            raise BindError("transformers: expected a running manager; call manager.start() first")
        _require_one(manager.distributed_helper)
        with self.paused():
            processor = manager.batch_processor
            require("batch_processor", processor)
            require("scheduler", processor.scheduler)
            self.cache = processor.cache
            self.groups = groups_of(self.cache)
        self._same: Any = weakref.WeakSet()  # models with the weights of this one

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the generation: no step runs inside, and the last step has written the cache.  It may be nested."""
        with self.manager.pause():
            if self.manager.model.device.type == "cuda":
                torch.cuda.synchronize(self.manager.model.device)
            yield

    def detach(self, request_id: str) -> Any:
        """Remove a request from the schedule, between two steps, and return its state.  It keeps its blocks until `release`.

        ``position_offset`` of its tokens are in the cache.  Raises `BindError` if the request is not being computed: it is
        finished, waiting, or unknown.
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
            found._status = type(found.status).FINISHED  # a running step drops its result for this request
            known = state.initial_tokens + state.generated_tokens
            if state.status.name == "DECODING":
                # The token of a running step is not known yet: it is computed again from the token before.
                state.position_offset = min(state.position_offset, len(known) - 1)
                state.tokens_to_process = [known[state.position_offset]]
            self._rename(request_id, away(request_id))
            return state

    def _rename(self, name: Any, new: Any) -> None:
        """Rename a request in the block tables, so that the engine does not free the blocks of a detached request."""
        for group in self.groups.values():
            tables = group.allocator.block_table
            if name in tables:
                tables[new] = tables.pop(name)

    def reserve(self, state: Any, request_id: str | None = None) -> Any:
        """Reserve the blocks that a request needs for its tokens in the cache and for the next step.

        Returns a copy of its state, for `attach`.  The state may be of another manager.  Then it needs a new name,
        `request_id`, because all managers count from ``req_0``. Raises `BindError`, and changes nothing, if the name is used
        already, or there is no room.
        """
        state = deepcopy(state)
        state.request_id = state.request_id if request_id is None else request_id
        with self.paused():
            scheduler = self.manager.batch_processor.scheduler
            taken = state.request_id in scheduler.active_requests or state.request_id in scheduler.waiting_requests
            if taken or any(group.table(state.request_id) for group in self.groups.values()):
                raise BindError(
                    f"transformers: request {state.request_id!r}: the manager has one of this name; pass another as "
                    "request_id=, or to a HandOver as new_id="
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
        """Continue a request after its blocks were filled.  Its results come from this manager.

        Raises `BindError`: the request has no blocks (it was released or attached before), or the manager has another request
        of this name.
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
                for group in self.groups.values():  # so that requests with the same prefix find the blocks
                    whole = state.position_offset // group.pool.shape.nt
                    group.allocator.mark_complete_blocks(state.request_id, tokens, whole)
            scheduler.active_requests[name] = state

    def release(self, state: Any, *, reusable: bool = True) -> None:
        """Release the blocks of a request that was detached, or reserved and not attached.

        With `reusable`, complete blocks stay in the cache for requests with the same prefix while there is room.
        """
        with self.paused():
            self.cache.free_blocks(away(state.request_id), no_cache=not reusable)

    def spans(self, state: Any) -> dict[str, Span]:
        """Group → the request's tokens in the cache, and their blocks."""
        return {name: group.span(state.request_id, state.position_offset) for name, group in self.groups.items()}

    # ---- to host memory and back

    def offload(self, request_id: str, host: Host) -> Parked:
        """Move a request to host memory, and free its blocks.

        Raises `BindError`: as `detach`; also if host memory has no room: the request then continues.
        """
        with self.paused():
            state = self.detach(request_id)
            try:
                held = host.put(self.groups, {name: group.table(request_id) for name, group in self.groups.items()})
            except BaseException:
                self.attach(state)
                raise
            self.release(state, reusable=False)
        return Parked(state, held, self.manager.model)

    def restore(self, parked: Parked, host: Host, request_id: str | None = None) -> bool:
        """Continue a request that was offloaded by this manager, or by another one of the same model with the same block shape.

        True if its blocks are unchanged.  If not, none of them is used: the request is recomputed from its tokens.

        Raises
        ------
        BindError
            As `reserve`; also if the manager has another model, which the message names, or blocks of another shape (the request
            stays in host memory), or if the request was restored before.
        """
        if parked.model not in self._same:  # all weights are compared, once
            _require_same(parked.model, self.manager.model)
            self._same.add(parked.model)
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
    """Raise `BindError` for several processes: their ranks would have to agree on which blocks are wrong."""
    if helper.tp_size > 1:
        raise BindError(f"transformers: expected a manager of one process, got tp {helper.tp_size}")


def _start_over(state: Any) -> None:
    """Make a request recompute all its tokens, into its present blocks."""
    state.remaining_prefill_tokens = state.initial_tokens + state.generated_tokens
    state.tokens_to_process = []
    state.position_offset = 0
    state._status = type(state.status).PREFILLING


def _require_same(src: Any, dst: Any) -> None:
    """Raise `BindError` unless two models compute the same K and V.  Of two copies, all weights are compared, once."""
    if src is dst:
        return
    configs = (named({"config": relevant(model.config.to_dict())}) for model in (src, dst))
    if differ := differences(*configs):
        raise BindError(f"transformers: model: {differ}; expected the same model in both managers")
    src_params, dst_params = (dict(model.named_parameters()) for model in (src, dst))
    for name in src_params.keys() | dst_params.keys():
        one, other = src_params.get(name), dst_params.get(name)
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other.to(one.device)):
            raise BindError(f"transformers: model: weights: {name} differs; expected the same model in both managers")


class HandOver:
    """Moves requests from one manager to another in this process, such as from prefill to decode.

    Parameters
    ----------
    src, dst : Batching
        Two managers of one model.  Their caches may have different block sizes, and may be on different devices.

    Raises
    ------
    BindError, PlanError
        The caches are of different models: other layers, another configuration, or other weights.  The message names what differs.

    Examples
    --------
    >>> go_on = HandOver(Batching(prefill), Batching(decode))  # doctest: +SKIP
    >>> name = go_on("req_0")  # doctest: +SKIP
    """

    def __init__(self, src: Batching, dst: Batching) -> None:
        if src.groups.keys() != dst.groups.keys():
            raise BindError(f"transformers: expected caches of one model, got {list(src.groups)} and {list(dst.groups)}")
        _require_same(src.manager.model, dst.manager.model)
        self.src, self.dst = src, dst
        self._copies = {}
        for name, source in src.groups.items():
            destination = dst.groups[name]
            if (source.layers, source.window) != (destination.layers, destination.window):
                raise BindError(
                    f"transformers: {name}: expected layers {source.layers} and a window of {source.window}, got "
                    f"{destination.layers} and {destination.window}"
                )
            made = plan(source.placement("source"), destination.placement("destination"))
            self._copies[name] = Local(made, [source.pool], [destination.pool])

    def __call__(self, request_id: str, new_id: str | None = None) -> str:
        """Move a request that is being computed.  It continues under `new_id`, which is returned.

        Raises `BindError`: as `Batching.detach` and `Batching.reserve`.  If `reserve` fails, the request continues in the
        source.
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
    """The engine's ``OffloadingManager`` with a `Host` as memory.  The engine still decides which requests are offloaded, and when.

    The engine's own manager keeps unchanged bytes in pinned memory; here blocks have a declared layout and digests.  Blocks that
    have changed are not used: their request is recomputed.  `offloading` installs this class.
    """

    def __init__(self, cache: Any, scheduler: Any, num_blocks: int, stream: Any = None, **options: Any) -> None:
        require("offloading_manager", OffloadingManager)
        self.cache, self.scheduler = cache, scheduler
        self.groups = groups_of(cache)
        self.host = Host(self.groups, num_blocks, **options)
        self._stream = stream
        self._held: dict[str, Held] = {}

    def _offload_to_cpu(self, victims: list[Any], victim_block_tables: dict[str, dict[str, list[int]]]) -> set[str]:
        """Store the blocks of victims, as many as there is room for.  Returns the names of the stored requests."""
        for state in victims:
            tables = victim_block_tables[state.request_id]
            if any(tables.values()) and self.host.room(tables):
                self._held[state.request_id] = self.host.put(self.groups, tables, self._stream)
                state.is_cpu_offloaded = True
        return {state.request_id for state in victims if state.is_cpu_offloaded}

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Fill the new blocks of stored requests for the next step."""
        for future in requests_in_batch:
            state = future.state
            if not state.is_cpu_offloaded:
                continue
            held = self._held.pop(state.request_id)
            tables = {name: group.table(state.request_id) for name, group in self.groups.items()}
            right = self.host.get(held, self.groups, tables, self._stream)
            self.host.drop(held)
            state.is_cpu_offloaded = False
            if not right:  # compute as many tokens as planned, but from the first one on
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
) -> Iterator[list[dict[str, int]]]:
    """A context: managers that start inside it offload with kvbm, such as that of ``model.generate_batch``.

    It applies to all threads.  Your own manager has started when it has a ``batch_processor``.

    Parameters
    ----------
    num_blocks, layout, check
        As for `Host`, for each manager.

    Yields
    ------
    list of dict
        One item per manager: the ``stats`` of its `Host`.  Managers and their caches are not kept alive.

    Examples
    --------
    >>> with offloading(1024) as made:  # doctest: +SKIP
    ...     model.generate_batch(prompts, generation_config=config)
    """
    made: list[dict[str, int]] = []

    def make(
        cache: Any, scheduler: Any, *, compute_stream: Any = None, distributed_helper: Any = None, **_: Any
    ) -> Offloading:
        _require_one(distributed_helper)
        found = Offloading(cache, scheduler, num_blocks, compute_stream, layout=layout, check=check)
        made.append(found.host.stats)
        return found

    original = continuous_api.OffloadingManager
    continuous_api.OffloadingManager = make
    try:
        yield made
    finally:
        continuous_api.OffloadingManager = original
