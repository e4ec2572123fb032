"""The paged cache of transformers' continuous batching as pools over the engine's memory, and host memory for its blocks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import transformers

from ...errors import BindError
from ...layout import spec
from ...layout.layout import Layout
from ...layout.shapes import BlockShape
from ...pool.pool import Pool
from ...reshard.placement import Placement
from ...reshard.sequence import Span
from ...system.machine import host_beside
from ..host_store import HostStore
from ..versions import require_version

__all__ = ["VERSIONS", "Group", "Held", "Host", "away", "groups_of", "require"]

#: The first version of transformers that was tested, and the first newer one that was not.  Others are accepted with a warning, if
#: their classes have the attributes below and their cache has the declared layout.
VERSIONS = ("5.19", "5.25")

LAYOUT = "hf/paged_attention"

#: Object of the engine → its attributes that are used.
USED = {
    "cache": "cache_tensor cache_allocators pool can_store_request_tokens evict_cached_blocks free_blocks use_prefix_sharing",
    "allocator": "layer_indices tokens_per_page num_key_value_heads head_dim cache_dtype block_table block_physical_stride "
    "mark_complete_blocks _kv_token_views",
    "manager": "batch_processor pause is_running model distributed_helper",
    "batch_processor": "cache scheduler logit_processor",
    "scheduler": "active_requests waiting_requests",
    "request": "request_id status position_offset initial_tokens generated_tokens tokens_to_process remaining_prefill_tokens "
    "_status logit_processor_kwargs",
    "offloading_manager": "offload_requests free_all_waiting_cpu_caches restore_scheduled_requests free_request_cpu_cache "
    "_offload_to_cpu reset",
}


def require(what: str, found: Any) -> None:
    """Raise `BindError` if an attribute that is used is missing in the engine's object."""
    missing = [name for name in USED[what].split() if not hasattr(found, name)]
    if missing:
        name = found.__name__ if isinstance(found, type) else type(found).__name__
        raise BindError(
            f"transformers {transformers.__version__}: {what} ({name}): expected {', '.join(missing)}, got none; "
            f"install transformers {VERSIONS[0]} or newer, before {VERSIONS[1]}"
        )


def away(request_id: str) -> tuple[str, str]:
    """The name of a detached request in block tables.  The engine's own calls do not find it."""
    return "kvbm", request_id


# ---- the cache -----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """The layers of one attention type, their pool, and the blocks of requests."""

    name: str  # ``"full_attention"`` or ``"sliding_attention"``
    #: A pool over the whole tensor of the cache, with the block ids of the block tables.  The pools of several groups share the
    #: tensor, but a block belongs to one group at a time.
    pool: Pool
    layers: tuple[int, ...]  # the layers' numbers in the model, in the pool's order
    window: int | None  # for sliding layers: the token at position ``p`` is in slot ``p % window`` of the table
    allocator: Any

    def table(self, request_id: str) -> list[int]:
        """A copy of a request's block ids, in order, also for a request that is not scheduled."""
        tables = self.allocator.block_table
        return list(tables.get(request_id) or tables.get(away(request_id), ()))

    def span(self, request_id: str, tokens: int) -> Span:
        """The span of a request with `tokens` tokens, for `reshard.Local` and links.

        For sliding layers, positions are slots of the window.  These are the same tokens in two caches with any block sizes.
        """
        kept = tokens if self.window is None else min(tokens, self.window)
        return Span(self.table(request_id), range(kept))

    def placement(self, name: str = "transformers") -> Placement:
        """The group as one rank, for `reshard.plan`."""
        return Placement("tp1", model=self.pool.shape, name=f"{name} {self.name}")


def groups_of(cache: Any) -> dict[str, Group]:
    """The pools of a ``PagedAttentionCache``, by attention type.

    Raises `BindError` if a class lacks an attribute that is used, an attention type is unknown, or the engine's views show that
    the cache does not have the layout ``hf/paged_attention``.
    """
    require_version("transformers", transformers.__version__, *VERSIONS)
    require("cache", cache)
    return {name: _group(name, cache, allocator) for name, allocator in cache.cache_allocators.items()}


def _group(name: str, cache: Any, allocator: Any) -> Group:
    what = f"transformers {transformers.__version__}: {name}"
    require("allocator", allocator)
    if name not in ("full_attention", "sliding_attention"):
        raise BindError(f"{what}: expected full_attention or sliding_attention; the layout of others is unknown")
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
                wanted = base + pool.resolved.address(block, l=at, o=o, t=token)[1]
                written = view.data_ptr() + (block * rows + token) * view.stride(0) * view.element_size()
                if wanted != written or tuple(view.shape[1:]) != (shape.nh, shape.hd) or not view[0].is_contiguous():
                    raise BindError(
                        f"{what}: layer {layer}, {'KV'[o]}, block {block}, token {token}: {LAYOUT} has it at byte {wanted - base}, "
                        f"the engine writes it at {written - base}, in rows of {tuple(view.shape[1:])}; install transformers "
                        f"{VERSIONS[0]} to {VERSIONS[1]}"
                    )
    window = int(allocator.sliding_window) if name == "sliding_attention" else None
    return Group(name, pool, layers, window, allocator)


# ---- host memory ---------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Ids of blocks in host memory, by group.  `number` distinguishes them from earlier ones with these ids."""

    ids: dict[str, list[int]]
    number: int


class Host:
    """Host memory for blocks of requests, in a declared layout.

    Parameters
    ----------
    groups : mapping of str to Group
        The groups of a cache.  Other caches with the same block shapes may use it, too.
    num_blocks : int
        Number of blocks per group.
    layout : str or Layout
        Layout of the blocks in host memory.
    check : bool
        Digest blocks when they are stored, and compare the digests when they are loaded.

    Attributes
    ----------
    pools : dict of str to Pool
        The pools; pinned if the cache is on a GPU.
    stats : dict of str to int
        Blocks that were ``stored``, ``loaded`` and found ``wrong``.
    """

    def __init__(
        self, groups: Mapping[str, Group], num_blocks: int, layout: str | Layout = "universal", *, check: bool = True
    ) -> None:
        chosen = spec.load(layout) if isinstance(layout, str) else layout
        self.pools = {
            name: Pool.allocate(chosen, group.pool.shape, num_blocks, host_beside(group.pool.device))
            for name, group in groups.items()
        }
        self.check = check
        self.stats = {"stored": 0, "loaded": 0, "wrong": 0}
        self._digests = {name: np.zeros(num_blocks, np.uint64) for name in groups}
        self._known = {name: np.zeros(num_blocks, np.bool_) for name in groups}
        self._free = {name: list(range(num_blocks))[::-1] for name in groups}
        self._numbers, self._live = itertools.count(), set[int]()

    def room(self, tables: Mapping[str, Any]) -> bool:
        """True if there is room for the blocks of these tables."""
        return all(len(table) <= len(self._free[name]) for name, table in tables.items())

    def put(self, groups: Mapping[str, Group], tables: Mapping[str, list[int]], stream: Any = None) -> Held:
        """Copy blocks to host memory, in the order of a CUDA stream, if one is given.  They are there when the call returns.

        Raises `BindError` if there is no room.
        """
        if not self.room(tables):
            raise BindError(
                f"transformers: expected room in host memory for { {n: len(t) for n, t in tables.items()} } blocks, got "
                f"{ {n: len(f) for n, f in self._free.items()} }"
            )
        ids = {name: [self._free[name].pop() for _ in table] for name, table in tables.items()}
        held = Held(ids, next(self._numbers))
        self._live.add(held.number)
        try:
            for name, table in tables.items():
                with self._store(name, groups) as store:
                    copying = store.store(table, ids[name], stream)
                    copying.synchronize()
                    store.stored(copying)
                self.stats["stored"] += len(table)
        except BaseException:
            self.drop(held)
            raise
        return held

    def get(self, held: Held, groups: Mapping[str, Group], tables: Mapping[str, list[int]], stream: Any = None) -> bool:
        """Copy blocks back, into the first blocks of the tables.  True if they are unchanged.

        If not, all these blocks are zero, in all groups: the request is computed again.  On the CPU blocks are compared before they
        are copied.

        Raises `BindError`: the blocks were dropped, or have another shape.
        """
        self._require(held)
        for name in held.ids:  # before anything is compared or copied
            expected, got = self.pools[name].shape, groups[name].pool.shape if name in groups else None
            if expected != got:
                raise BindError(f"transformers: {name}: expected pools of one block shape, got {expected} and {got or 'no group'}")
        with contextlib.ExitStack() as stack:
            stores = {name: stack.enter_context(self._store(name, groups)) for name in held.ids}
            wrong = 0
            for name, ids in held.ids.items():
                [copying] = stores[name].load(ids, tables[name][: len(ids)], stream=stream)
                copying.synchronize()
                wrong += int(stores[name].wrong(copying).sum())
                self.stats["loaded"] += len(ids)
            self.stats["wrong"] += wrong
            if wrong:
                for name, ids in held.ids.items():
                    stores[name].zeros(tables[name][: len(ids)], stream)
        return not wrong

    def drop(self, held: Held) -> None:
        """Free the blocks.  `BindError` if they were dropped before."""
        self._require(held)
        self._live.remove(held.number)
        for name, ids in held.ids.items():
            self._free[name] += ids[::-1]

    def _require(self, held: Held) -> None:
        if held.number not in self._live:
            raise BindError(
                f"transformers: host memory: expected blocks that are held, got { {n: len(i) for n, i in held.ids.items()} } that "
                "were dropped: a request that was offloaded is restored once"
            )

    def _store(self, name: str, groups: Mapping[str, Group]) -> contextlib.closing[HostStore]:
        """The copies of a group, for one call: if they were kept, they would keep the engine's cache alive."""
        marks = self._digests[name], self._known[name]
        return contextlib.closing(
            HostStore(groups[name].pool, self.pools[name], verify=self.check, digests=marks[0], known=marks[1])
        )
