"""transformers' continuous batching: its paged cache as pools, requests that leave it and go on, here or in another one.

`groups_of` makes a `Group` of each attention type of a cache: a pool, and the block tables of requests.  `Batching` is a running
manager: it takes a request out of the schedule (`Batching.detach`) and puts one in (`Batching.reserve`, `Batching.attach`), and
between the two the caller copies blocks.  `Host` keeps blocks in host memory, in any declared layout, with digests.  `offloading`
makes it the place to which managers offload when their cache is full: one ``with`` around ``model.generate_batch``.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import transformers

from .. import spec
from ..errors import BindError
from ..layout import Layout
from ..pool import Pool
from ..reshard.local import Local
from ..reshard.messages import plan
from ..reshard.placement import Placement
from ..reshard.sequence import Span
from ..shapes import BlockShape
from ..transfer import Transfer

__all__ = ["VERSIONS", "Batching", "Group", "HandOver", "Held", "Host", "Offloading", "Parked", "groups_of", "offloading"]

#: First and last version of transformers that was tested.  Another one is taken, with a warning, if its classes have what is used
#: here, and its cache lies as it is declared.
VERSIONS = "5.19", "5.23"

LAYOUT = "hf/paged_attention"

#: What is used of the engine's objects, by what they are.
USED = {
    "cache": "cache_tensor cache_allocators pool can_store_request_tokens evict_cached_blocks free_blocks use_prefix_sharing "
    "count_new_complete_blocks",
    "allocator": "index layer_type layer_indices tokens_per_page bytes_per_block num_key_value_heads head_dim cache_dtype "
    "block_table mark_complete_blocks use_block_sharing _kv_token_views block_physical_stride",
    "manager": "batch_processor pause is_running model distributed_helper",
    "batch_processor": "cache scheduler logit_processor offloading_manager",
    "scheduler": "active_requests waiting_requests",
    "request": "request_id position_offset initial_tokens generated_tokens tokens_to_process remaining_prefill_tokens _status",
    "offloading_manager": "offload_requests restore_scheduled_requests free_request_cpu_cache _offload_to_cpu reset",
}


def _require(what: str, found: Any) -> None:
    """The engine's object has all that is used of it."""
    missing = [name for name in USED[what].split() if not hasattr(found, name)]
    if missing:
        raise BindError(
            f"transformers {transformers.__version__}: {what} ({type(found).__name__}): expected {', '.join(missing)}, got none; "
            f"install transformers {VERSIONS[0]} to {VERSIONS[1]}"
        )


def _require_version() -> None:
    """Say so where a version runs that was never tested."""
    found = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    first, last = (tuple(map(int, version.split("."))) for version in VERSIONS)
    if not first <= found <= last:
        warnings.warn(
            f"transformers {transformers.__version__}: kvbm was tested with {VERSIONS[0]} to {VERSIONS[1]}; its classes and where its "
            "cache lies are checked as far as they can be",
            stacklevel=3,
        )


# ---- the cache -----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """The layers of one attention type, their pool, and the blocks of requests.

    Attributes
    ----------
    name : str
        ``"full_attention"`` or ``"sliding_attention"``.
    pool : Pool
        Over the whole tensor of the cache: its block ids are those of the block tables.  The pools of several groups share the
        tensor; a block of one is a block of the other at no time.
    layers : tuple of int
        The layers' numbers in the model, in the pool's order.
    window : int or None
        Of sliding layers: the token at position ``p`` is in slot ``p % window`` of the table.
    """

    name: str
    pool: Pool
    layers: tuple[int, ...]
    window: int | None
    allocator: Any

    def table(self, request_id: str) -> list[int]:
        """The block ids of a request, in order; a copy."""
        return list(self.allocator.block_table.get(request_id, ()))

    def span(self, request_id: str, tokens: int) -> Span:
        """The blocks of a request that has so many tokens, as `reshard.Local` and links take them.

        Of sliding layers positions are slots of the window: those of two caches mean the same tokens, whatever the sizes of blocks.
        """
        kept = tokens if self.window is None else min(tokens, self.window)
        return Span(self.table(request_id), range(kept))

    def placement(self, name: str = "transformers") -> Placement:
        """The group as one rank, for `reshard.plan`."""
        return Placement("tp1", model=self.pool.shape, name=f"{name} {self.name}")


def groups_of(cache: Any) -> dict[str, Group]:
    """The pools of a ``PagedAttentionCache``, by attention type.

    Parameters
    ----------
    cache : PagedAttentionCache
        ``manager.batch_processor.cache``.

    Raises
    ------
    BindError
        A class that lacks what is used here; an attention type that is not known; a cache that lies otherwise than
        ``hf/paged_attention`` says, which the views into which the engine writes tell.
    """
    _require_version()
    _require("cache", cache)
    return {name: _group(name, cache, allocator) for name, allocator in cache.cache_allocators.items()}


def _group(name: str, cache: Any, allocator: Any) -> Group:
    what = f"transformers {transformers.__version__}: {name}"
    _require("allocator", allocator)
    if name not in ("full_attention", "sliding_attention"):
        raise BindError(f"{what}: expected full_attention or sliding_attention; the cache of others is not known")
    layers, nt = tuple(map(int, allocator.layer_indices)), int(allocator.tokens_per_page)
    dtype = str(allocator.cache_dtype).removeprefix("torch.")
    shape = BlockShape(len(layers), 2, int(allocator.num_key_value_heads), nt, int(allocator.head_dim), dtype)
    tensor = cache.cache_tensor.view(allocator.cache_dtype)
    try:
        tensor = tensor.view(-1, shape.nl, 2, nt, shape.nh, shape.hd)
    except RuntimeError as error:
        raise BindError(f"{what}: expected a tensor of whole blocks of {shape}: {error}") from None
    pool = Pool(spec.load(LAYOUT), shape, [tensor])
    base, _ = pool.spans[0].tolist()
    for at, layer in enumerate(layers):
        for o, view in enumerate(allocator._kv_token_views[layer]):
            # Row r of the view is token r % nt of block r / (2 nl nt), as the engine indexes it.
            rows = int(allocator.block_physical_stride)
            for block, token in ((0, 0), (0, nt - 1), (pool.num_blocks - 1, 0)):
                ours = base + pool.resolved.address(block, l=at, o=o, t=token)[1]
                theirs = view.data_ptr() + (block * rows + token) * view.stride(0) * view.element_size()
                if ours != theirs or tuple(view.shape[1:]) != (shape.nh, shape.hd) or not view[0].is_contiguous():
                    raise BindError(
                        f"{what}: layer {layer}, {'KV'[o]}, block {block}, token {token}: {LAYOUT} has it at byte {ours - base}, the "
                        f"engine writes it at {theirs - base}, in rows of {tuple(view.shape[1:])}; install transformers "
                        f"{VERSIONS[0]} to {VERSIONS[1]}"
                    )
    window = int(allocator.sliding_window) if name == "sliding_attention" else None
    return Group(name, pool, layers, window, allocator)


# ---- requests ------------------------------------------------------------------------------------------------------------


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
    """

    def __init__(self, manager: Any) -> None:
        _require("manager", manager)
        self.manager = manager
        if not manager.is_running():
            raise BindError("transformers: expected a manager that runs; call manager.start() first")
        if manager.distributed_helper.tp_size > 1:
            raise BindError(f"transformers: expected a manager of one process, got tp {manager.distributed_helper.tp_size}")
        with self.paused():
            processor = manager.batch_processor
            _require("batch_processor", processor)
            _require("scheduler", processor.scheduler)
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
            _require("request", found)
            state = deepcopy(found)
            found._status = type(found.status).FINISHED  # a step under way drops what it made of it
            known = state.initial_tokens + state.generated_tokens
            if state.status.name == "DECODING":
                # Of a step under way the token is not known yet: it is computed again from the token before.
                state.position_offset = min(state.position_offset, len(known) - 1)
                state.tokens_to_process = [known[state.position_offset]]
            return state

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
                raise BindError(f"transformers: request {state.request_id!r}: the manager has one of this name; pass request_id=")
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
        return state

    def attach(self, state: Any) -> None:
        """Let a request go on whose blocks are filled; its results come from this manager."""
        with self.paused():
            if self.cache.use_prefix_sharing and state.position_offset:
                tokens = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
                for group in self.groups.values():  # so that requests with the same prefix find it
                    whole = state.position_offset // group.pool.shape.nt
                    group.allocator.mark_complete_blocks(state.request_id, tokens, whole)
            self.manager.batch_processor.scheduler.active_requests[state.request_id] = state

    def release(self, state: Any, *, reusable: bool = True) -> None:
        """Give back the blocks of a request that was detached, or reserved and not attached.

        Whole ones stay for requests with the same prefix as long as there is room, unless they are not `reusable`.
        """
        with self.paused():
            self.cache.free_blocks(state.request_id, no_cache=not reusable)

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
            As `reserve`; the request stays where it is.
        """
        with self.paused():
            state = self.reserve(parked.state, request_id)
            right = host.get(parked.held, self.groups, {n: g.table(state.request_id) for n, g in self.groups.items()})
            host.drop(parked.held)
            if not right:
                _start_over(state)
            self.attach(state)
        return right


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
            raise BindError(f"transformers: expected caches of one model, got {list(src.groups)} and {list(dst.groups)}")
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


# ---- host memory ---------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Where blocks are in host memory, and their digests; by group."""

    ids: dict[str, list[int]]
    digests: dict[str, Any]


class Parked(NamedTuple):
    """A request in host memory: its state, and its blocks."""

    state: Any
    held: Held


class Host:
    """Host memory for blocks of requests, in a declared layout.

    Parameters
    ----------
    groups : mapping of str to Group
        Those of a cache; others with blocks of the same shape may use it, too.
    num_blocks : int
        Blocks of each group.
    layout : str or Layout
        How they lie in host memory.
    check : bool
        Whether blocks are digested as they leave and compared as they come back.

    Attributes
    ----------
    pools : dict of str to Pool
        Pinned where the cache is on a GPU.
    stats : dict of str to int
        Blocks that were ``stored``, ``loaded`` and found ``wrong``.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        num_blocks: int,
        layout: str | Layout = "universal",
        *,
        check: bool = True,
    ) -> None:
        chosen = spec.load(layout) if isinstance(layout, str) else layout
        self.pools = {
            name: Pool.allocate(chosen, group.pool.shape, num_blocks, "cpu" if group.pool.device == "cpu" else "pinned")
            for name, group in groups.items()
        }
        self.check = check
        self.stats = {"stored": 0, "loaded": 0, "wrong": 0}
        self._free = {name: list(range(num_blocks))[::-1] for name in groups}
        self._transfers: dict[tuple[Pool, Pool], Transfer] = {}

    def room(self, tables: Mapping[str, Any]) -> bool:
        """Whether so many blocks have room."""
        return all(len(table) <= len(self._free[name]) for name, table in tables.items())

    def put(self, groups: Mapping[str, Group], tables: Mapping[str, list[int]], stream: Any = None) -> Held:
        """Copy blocks to host memory.  They are there when the call returns.

        Raises
        ------
        BindError
            No room.
        """
        if not self.room(tables):
            raise BindError(
                f"transformers: expected room in host memory for { {n: len(t) for n, t in tables.items()} } blocks, got "
                f"{ {n: len(f) for n, f in self._free.items()} }"
            )
        held = Held({name: [self._free[name].pop() for _ in table] for name, table in tables.items()}, {})
        for name, table in tables.items():
            held.digests[name] = self._copy(groups[name].pool, self.pools[name], table, held.ids[name], stream)
            self.stats["stored"] += len(table)
        return held

    def get(
        self, held: Held, groups: Mapping[str, Group], tables: Mapping[str, list[int]], stream: Any = None
    ) -> bool:
        """Copy blocks back, into the first ones of tables; whether they are what was put."""
        right = True
        for name, ids in held.ids.items():
            found = self._copy(self.pools[name], groups[name].pool, ids, tables[name][: len(ids)], stream)
            wrong = sum(map(int.__ne__, found, held.digests[name])) if self.check else 0
            self.stats["loaded"] += len(ids)
            self.stats["wrong"] += wrong
            right = right and not wrong
        return right

    def drop(self, held: Held) -> None:
        """The blocks are free for others."""
        for name, ids in held.ids.items():
            self._free[name] += ids[::-1]

    def _copy(self, src: Pool, dst: Pool, src_ids: list[int], dst_ids: list[int], stream: Any) -> list[int]:
        """Copy blocks of a sequence, wait, and return their digests, if they are wanted."""
        if not src_ids:
            return []
        transfer = self._transfers.get((src, dst))
        if transfer is None:
            transfer = self._transfers[src, dst] = Transfer(src, dst)
        if not self.check:
            transfer.copy(src_ids, dst_ids, stream=stream).synchronize()
            return []
        device = "cpu" if transfer.device < 0 else f"cuda:{transfer.device}"
        found = torch.empty(len(src_ids), dtype=torch.int64, device=device)
        tokens = range(0, len(src_ids) * src.shape.nt, src.shape.nt)
        done = transfer.copy(src_ids, dst_ids, digests=found, tokens=list(tokens), stream=stream)
        done.synchronize()
        return [int(one) for one in found.tolist()]
