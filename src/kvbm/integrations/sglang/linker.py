"""A linker for SGLang's unified cache: it copies pages between the device and host memory in a declared layout."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from ...errors import BindError, escaping
from ...layout import spec as layouts
from ...planner.cast import Cast
from ...pool.pool import Pool
from ..host_values import HostValues, latent_and_rope
from ..settings import require_known
from .host import HostPages, PagesCopying

__all__ = ["KvbmLinker", "LayerGate"]

logger = escaping(logging.getLogger(__name__))

#: Number of parts of the layers, which are loaded one after the other.
_PARTS = 8

#: Most requests for which the checked pages are remembered.
_REQUESTS = 1024


class _Kind(NamedTuple):
    """Pages of some layers: those with full attention, or those with a sliding window."""

    pages: HostPages
    layers: tuple[int, ...]  # their indices among all layers of the rank

    def part(self, layers: range) -> range:
        """The indices in `self.layers` of those that are in a range of the rank's layers."""
        return range(bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop))


class _Batch(NamedTuple):
    """A load that has begun: copies per kind, and on a GPU an event per part."""

    loads: dict[PoolName, PagesCopying]
    events: list[Any]
    landed: bool


class LayerGate:
    """Called by SGLang's pools before they return a layer: it makes the stream wait, not the host.

    `parts` are loaded together.
    """

    def __init__(self, parts: Sequence[range]) -> None:
        self._part_of = [index for index, layers in enumerate(parts) for _ in layers]
        self.batches: dict[int, _Batch] = {}
        self.consumer_index = -1

    def set_consumer(self, index: int) -> None:
        """Set the batch that runs next; -1 if it loads nothing."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Make the current stream wait until a layer is loaded."""
        batch = self.batches.get(self.consumer_index)
        if batch is not None and batch.events:
            torch.cuda.current_stream().wait_event(batch.events[self._part_of[threshold]])


class KvbmLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is not typed
    """Host memory in a declared layout behind SGLang's radix cache.

    Settings in ``linker_extra_config``:

    host_bytes : int
        Bytes of host memory per rank.
    host_layout : str
        Layout of the pages in host memory: a name of the catalogue, or a file.  Default: ``universal``.
    host_values : {"fp8", "mxfp8", "nvfp4"}
        Quantise pages on the way to host memory.  Default: no value changes.
    check_at_lookup : bool
        Verify the digests of pages in host memory at every lookup.  Default: True.

    Raises
    ------
    BindError
        The version of SGLang is not supported, a setting or a cache is not known, or the memory is smaller than a page.

    Notes
    -----
    The digest of each page is computed when it is stored and when it is loaded.  A page that is wrong at a lookup is a miss.  If a
    page is found to be wrong only when it is loaded, the requests of its batch end with SGLang's error 503, as the engine can no
    longer recompute them.  Wrong pages are removed.  All calls come from the scheduler's thread.
    """

    def __init__(
        self,
        server_args: Any,  # noqa: ARG002  (SGLang passes it)
        params: Any,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        settings = _Settings.of(extra_config or {})
        self.page_size = params.page_size
        self.check_at_lookup = settings.check_at_lookup
        caches = _caches(params, components)
        values = HostValues.of(extra_config or {}, _rope(caches[PoolName.KV][0]), "linker_extra_config")
        layout = layouts.load(settings.host_layout) if values is None else values.layout
        cast: Cast = None if values is None else "amax"
        bound = {name: (_bound(cache, self.page_size, values), layers) for name, (cache, layers) in caches.items()}
        page_bytes = sum(layout.resolve(pool.shape, 1).nbytes for pool, _ in bound.values())
        num_pages = settings.host_bytes // page_bytes
        if num_pages < 1:
            raise BindError(f"host_bytes: expected at least {page_bytes} bytes, a page, got {settings.host_bytes}")
        self.kinds = {
            name: _Kind(HostPages(pool, layout, num_pages, cast), layers) for name, (pool, layers) in bound.items()
        }
        self.pools = {name: kind.pages for name, kind in self.kinds.items()}
        num_layers = 1 + max(kind.layers[-1] for kind in self.kinds.values())
        each = -(-num_layers // _PARTS)
        self._parts = [range(first, min(first + each, num_layers)) for first in range(0, num_layers, each)]
        self.layer_done_counter = LayerGate(self._parts)
        device = next(iter(self.pools.values())).engine.device
        self._device = None if device == "cpu" else torch.device(device)
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device else [None, None]
        self.forward_stream = forward_stream if self._device else None
        self._checked: OrderedDict[str, set[str]] = OrderedDict()
        self._queued: dict[str, list[Any]] = {}
        self._batches = 0
        self._offloads: deque[list[tuple[HostPages, PagesCopying]] | None] = deque()
        for name, kind in self.kinds.items():
            logger.info("kvbm: %d pages of %s in host memory, %s", num_pages, name, kind.pages.host)
        if values is not None:
            dtype = self.pools[PoolName.KV].engine.shape.dtype
            logger.info("kvbm: host_values %s: %s; pages of %d bytes", values.name, values.text(dtype), page_bytes)

    # ---- to the device -------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """The numbers of first pages that can be loaded.  The pages stay in host memory until the next batch begins."""
        wanted = {transfer.name: transfer for transfer in transfers}
        keys = list(wanted[PoolName.KV].keys)
        if self.check_at_lookup:
            self._check(rid, keys)
        full = self.pools[PoolName.KV]
        there = next((at for at, key in enumerate(keys) if key not in full), len(keys))
        ends: list[int] = list(range(1, there + 1))
        for name in wanted.keys() - {PoolName.KV}:  # these need only the last pages
            window = max(1, len(wanted[name].keys))
            ends = [end for end in ends if all(key in self.pools[name] for key in keys[max(0, end - window) : end])]
        if ends:
            full.protect(keys[: ends[-1]])
            for name in wanted.keys() - {PoolName.KV}:
                self.pools[name].protect(keys[: ends[-1]])
        return ends

    def _check(self, rid: str, keys: list[str]) -> None:
        checked = self._checked.setdefault(rid, set())
        self._checked.move_to_end(rid)
        if len(self._checked) > _REQUESTS:
            self._checked.popitem(last=False)
        for pages in self.pools.values():
            before = pages.wrong
            pages.check([key for key in keys if key not in checked])
            if pages.wrong > before:
                logger.error("kvbm: %d pages in host memory are not what was stored: a miss", pages.wrong - before)
        checked.update(keys)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load for the next batch."""
        if not any(transfer.keys for transfer in transfers):
            return False
        if rid in self._queued:
            raise BindError(f"SGLang: request {rid} has a load that waits; expected one a batch")
        self._queued[rid] = transfers
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Begin the queued loads.  Pages that other lookups found may be evicted again."""
        queued, self._queued = self._queued, {}
        self._let_go()
        if not queued:
            return -1
        wanted: dict[PoolName, tuple[list[str], list[int]]] = {}
        for rid, transfers in queued.items():
            self._checked.pop(rid, None)
            for transfer in transfers:
                keys, ids = wanted.setdefault(transfer.name, ([], []))
                keys += transfer.keys
                ids += self._ids(transfer.device_indices)
        index, self._batches = self._batches, self._batches + 1
        self.layer_done_counter.batches[index] = self._begin(wanted)
        return index

    def _let_go(self) -> None:
        """Pages may be evicted again, except those of batches that run and of loads that wait."""
        for name, pages in self.pools.items():
            pages.unprotect()
            for batch in self.layer_done_counter.batches.values():
                if name in batch.loads:
                    pages.protect(batch.loads[name].keys)
        for transfers in self._queued.values():  # loads that have not begun
            for transfer in transfers:
                self.pools[transfer.name].protect(transfer.keys)

    def _begin(self, wanted: Mapping[PoolName, tuple[list[str], list[int]]]) -> _Batch:
        gone = [key for name, (keys, _) in wanted.items() for key in keys if key not in self.pools[name]]
        if gone:
            logger.error("kvbm: %d pages are gone that a lookup found", len(gone))
            return _Batch({}, [], False)
        stream = self._after_engine(0)
        begun = {}
        for name, (keys, ids) in wanted.items():
            kind = self.kinds[name]
            kind.pages.protect(keys)
            begun[name] = iter(kind.pages.load(keys, ids, map(kind.part, self._parts), stream))
        batch = _Batch({}, [], True)
        for _ in self._parts:
            for name, steps in begun.items():
                batch.loads[name] = next(steps)
            if stream is not None:
                batch.events.append(stream.record_event())
        return batch

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for a batch.  True if all its pages have their digests."""
        batch = self.layer_done_counter.batches.pop(counter_index, None)
        if batch is None:
            return True
        right = [self.pools[name].loaded(loading, self._streams[0]) for name, loading in batch.loads.items()]
        self._let_go()
        if not all(right):
            logger.error("kvbm: pages that were loaded are not what was stored: SGLang ends their requests")
        return batch.landed and all(right)

    # ---- to the host ---------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:  # noqa: ARG002
        """Begin to copy a node's pages that are not in host memory: all of them, or none if there is no space."""
        if not any(transfer.keys for transfer in transfers):
            return False
        wanted = []
        for transfer in transfers:
            pages = self.pools[transfer.name]
            new = set(pages.missing(transfer.keys))
            pairs = [
                pair for pair in zip(transfer.keys, self._ids(transfer.device_indices), strict=True) if pair[0] in new
            ]
            wanted.append((pages, dict(pairs)))
        if not all(pages.room(len(ids)) for pages, ids in wanted):
            self._offloads.append(None)
            return True  # the same on each rank; `pop_completed_offload` reports that nothing was stored
        stream = self._after_engine(1)
        self._offloads.append(
            [(pages, pages.store(list(ids), list(ids.values()), stream)) for pages, ids in wanted if ids]
        )
        return True

    def num_completed_offloads(self) -> int:
        count = 0
        for begun in self._offloads:
            if begun and not all(storing.copying.is_done() for _, storing in begun):
                break
            count += 1
        return count

    def pop_completed_offload(self) -> bool:
        """Finish the oldest offload.  True if its pages were stored; lookups find them from now on."""
        begun = self._offloads.popleft()
        for pages, storing in begun or ():
            storing.copying.synchronize()  # returns at once, and raises errors of the GPU
            pages.stored(storing)
        return begun is not None

    # ---- both ----------------------------------------------------------------------------------------------------------

    def _ids(self, indices: torch.Tensor) -> list[int]:
        """The page ids of token slots."""
        slots = indices.detach().to("cpu", torch.int64).reshape(-1)
        count, rest = divmod(len(slots), self.page_size)
        rows = slots[: count * self.page_size].view(count, self.page_size)
        if rest or (rows != rows[:, :1] + torch.arange(self.page_size)).any() or (rows[:, 0] % self.page_size).any():
            raise BindError(
                f"SGLang: expected the slots of whole pages of {self.page_size} tokens, each in order, got {slots.tolist()!s:.200}"
            )
        ids: list[int] = (rows[:, 0] // self.page_size).tolist()
        return ids

    def _after_engine(self, index: int) -> Any:
        """A stream for copies, which waits for enqueued work of the scheduler and the forward pass; None on the CPU."""
        stream = self._streams[index]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            if self.forward_stream is not None:
                stream.wait_stream(self.forward_stream)
        return stream

    def reset(self) -> None:
        """Wait for all copies, and remove all pages from host memory."""
        self._queued.clear()
        self._checked.clear()
        while self._offloads:
            self.pop_completed_offload()
        for index in list(self.layer_done_counter.batches):
            self.finish_layer_wise_loading(index)
        self.layer_done_counter.set_consumer(-1)
        for pages in self.pools.values():
            pages.clear()

    def close(self) -> None:
        """Wait for all copies, and free the memory."""
        self.reset()
        for pages in self.pools.values():
            pages.close()


# ---- what SGLang has -----------------------------------------------------------------------------------------------------


class _Settings(NamedTuple):
    host_bytes: int
    host_layout: str
    host_values: str | None
    check_at_lookup: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Settings:
        require_known(given, cls._fields, "linker_extra_config")
        usual = {"host_layout": "universal", "host_values": None, "check_at_lookup": True}
        found = {"host_bytes": None, **usual, **given}
        for name, kind in (("host_bytes", int), ("host_layout", str), ("check_at_lookup", bool)):
            value = found.pop(name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise BindError(f"linker_extra_config: {name}: expected {kind.__name__}, got {value!r:.100}")
        return cls(**{**usual, **given})


def _caches(params: Any, components: set[Any]) -> dict[PoolName, tuple[Any, tuple[int, ...]]]:
    """SGLang's token pools, with the rank's layers in each."""
    cache = params.token_to_kv_pool_allocator.get_kvcache()
    what = f"SGLang: {type(cache).__name__} with {sorted(component.name for component in components)}"
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise BindError(f"{what}: a draft model's cache beside it: it is not known; expected none")
    if type(cache) in (MHATokenToKVPool, MLATokenToKVPool) and components == {ComponentType.FULL}:
        return {PoolName.KV: (cache, tuple(range(cache.layer_num)))}
    if type(cache) is SWAKVPool and components == {ComponentType.FULL, ComponentType.SWA}:
        parts: dict[PoolName, tuple[Any, tuple[int, ...]]] = {}
        for name, pool, sliding in ((PoolName.KV, cache.full_kv_pool, False), (PoolName.SWA, cache.swa_kv_pool, True)):
            if type(pool) is not MHATokenToKVPool:
                raise BindError(f"{what}: {name}: expected a MHATokenToKVPool, got {type(pool).__name__}")
            places = {
                at: layer - cache.start_layer for layer, (at, of) in cache.layers_mapping.items() if of == sliding
            }
            layers = tuple(places[at] for at in range(len(places)))
            if list(layers) != sorted(layers):
                raise BindError(f"{what}: {name}: expected layers in order, got {layers}")
            parts[name] = (pool, layers)
        return parts
    raise BindError(
        f"{what}: expected MHATokenToKVPool or MLATokenToKVPool with FULL, or SWAKVPool of MHATokenToKVPool with FULL and SWA; "
        "other caches are not known"
    )


def _rope(cache: Any) -> int:
    """Elements of a latent (MLA) that hold positions; 0 for K and V."""
    return int(cache.qk_rope_head_dim) if type(cache) is MLATokenToKVPool else 0


def _bound(cache: Any, page_size: int, values: HostValues | None) -> Pool:
    if cache.page_size != page_size or getattr(cache, "layer_shard_enabled", False):
        raise BindError(
            f"SGLang: {type(cache).__name__}: expected pages of {page_size} tokens and all layers of the rank, got pages of "
            f"{cache.page_size} tokens{' and layers spread over ranks' if cache.page_size == page_size else ''}"
        )
    pool = Pool.from_sglang(cache)
    if values is None:
        return pool
    values.require(pool.shape, type(cache).__name__)
    if not values.rope:
        return pool
    if pool.shape.hd != cache.kv_lora_rank + values.rope:
        raise BindError(
            f"host_values {values.name}: {type(cache).__name__}: expected latents of {cache.kv_lora_rank} and {values.rope} "
            f"elements, got {pool.shape.hd}; leave host_values out"
        )
    return Pool(latent_and_rope(values.rope), pool.shape, [array.view(torch.uint8) for array in pool.arrays])
