"""vLLM's native offloading with kvbm as the copier: a connector, and its spec.

vLLM decides what is stored and evicted.  kvbm copies, and forgets what its digests show to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec, _all_workers_barrier
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...errors import BindError, DigestError
from ...layout import spec as layouts
from ...planner.cast import Cast
from ...system.machine import host_beside
from ..host_values import HostValues
from ..settings import flag_of
from .block_shapes import host_bytes
from .copier import Copier, HostMemory, shared_memory
from .failures import FailedLoads
from .host_layout import PAGES, row_bytes
from .log import logger
from .pages import Pages, pages_of
from .reuse import require_reuse
from .setting_names import require_settings
from .tiered import LOST, READ, WRITTEN, Settings, TierIndex, TierWorker

__all__ = ["KvbmOffloadingConnector", "KvbmOffloadingManager", "KvbmOffloadingSpec", "KvbmOffloadingWorker"]

#: Counters of stores, of loads, and of loads that failed their check.
STORED = ("vllm:kvbm_offload_stored_blocks", "vllm:kvbm_offload_stored_bytes")
LOADED = ("vllm:kvbm_offload_loaded_blocks", "vllm:kvbm_offload_loaded_bytes")
FAILED = "vllm:kvbm_offload_failed_blocks"


#: vLLM's settings that are numbers, and their least values.
_NUMBERS = {"cpu_bytes_to_use": 1, "blocks_per_chunk": 1, "block_size": 1, "store_threshold": 0, "max_tracker_size": 1}


class _Quantised(NamedTuple):
    """Quantised values, and the bytes of host memory of a rank's block."""

    values: HostValues
    block_bytes: int


#: Set while a `KvbmOffloadingConnector` makes its spec.  vLLM makes it from a config that has no sizes of heads.
_quantised: ContextVar[_Quantised | None] = ContextVar("quantised", default=None)


@dataclass
class Failures:
    """Loads with other bytes than were stored: jobs, blocks of the engine, chunks of host memory."""

    jobs: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    chunks: set[int] = field(default_factory=set)


class KvbmOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not typed
    """Copies blocks in a worker of vLLM.

    If the caller does not use `take_failures` (`reports`), a load that fails its check raises `DigestError`.
    """

    def __init__(self, copier: Copier, reports: bool) -> None:
        self.copier = copier
        self._reports = reports
        self._failures = Failures()
        self._stats = OffloadingConnectorStats()
        self.tier: TierWorker | None = None
        self._reading: dict[int, tuple[Any, Any]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        gpu = src_spec
        self.copier.submit(job_id, gpu.block_ids, dst_spec.block_ids, gpu.group_sizes, gpu.block_indices, is_load=False)
        if self.tier is not None and (tiered := getattr(dst_spec, "tiered", None)):
            self.tier.stores(job_id, tiered)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        if self.tier is not None and (tiered := getattr(src_spec, "tiered", None)):
            self.tier.read(job_id, tiered)
            self._reading[job_id] = src_spec, dst_spec
        else:
            self._load(job_id, src_spec, dst_spec)
        return True

    def _load(self, job_id: int, src_spec: Any, dst_spec: Any) -> None:
        gpu = dst_spec
        self.copier.submit(job_id, gpu.block_ids, src_spec.block_ids, gpu.group_sizes, gpu.block_indices, is_load=True)

    def _load_what_was_read(self, wait: set[int] | None = None) -> None:
        """Continue the jobs that have all their chunks in host memory now."""
        if self.tier is not None and self._reading:
            for job_id in self.tier.has_read(wait):
                self._load(job_id, *self._reading.pop(job_id))

    def get_finished(self) -> list[Any]:
        """Jobs that are done, including loads that failed their check: vLLM expects all jobs here; see `take_failures`."""
        self._load_what_was_read()
        results = self.tier.has_written() if self.tier is not None else []
        for job in self.copier.finished():
            blocks, nbytes = LOADED if job.is_load else STORED
            self._stats.increase_counter(blocks, job.blocks)
            self._stats.increase_counter(nbytes, job.nbytes)
            if job.wrong_blocks:
                self._fail(job)
            result = TransferResult(job.job_id, True, job.nbytes, job.seconds)
            if self.tier is None or job.is_load or not self.tier.write(job.job_id, result):
                results.append(result)
        return results

    def _fail(self, job: Any) -> None:
        self._stats.increase_counter(FAILED, len(job.wrong_blocks))
        if not self._reports:
            raise DigestError(
                f"vLLM offloading: chunks {sorted(job.wrong_chunks)} of host memory have changed since they were stored; expected "
                "equal digests: others wrote to the memory, or it is broken.  vLLM's OffloadingConnector cannot recompute: with "
                'kv_connector "KvbmOffloadingConnector" and kv_connector_module_path "kvbm.integrations.vllm" this is a miss'
            )
        self._failures.jobs.add(job.job_id)
        self._failures.blocks.update(job.wrong_blocks)
        self._failures.chunks.update(job.wrong_chunks)

    def take_failures(self) -> Failures:
        """Failures since the last call."""
        failures = self._failures
        if failures.jobs:
            self._failures = Failures()
        return failures

    def take_stats(self) -> Any:
        """Counters since the last call; None if nothing was copied."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def count(self, name: str, more: int) -> None:
        """Add to a counter."""
        self._stats.increase_counter(name, more)

    def wait(self, job_ids: set[int]) -> None:
        self._load_what_was_read(job_ids)
        self.copier.wait(job_ids)

    def shutdown(self) -> None:
        if self.tier is not None:
            self.copier.wait()
            self.get_finished()
            self.tier.close()
        self.copier.close()


class KvbmOffloadingManager(CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of host memory, which forgets chunks that failed their check.

    With a `tier`, files are behind it.  A chunk that is only in files is a hit, and is read when it is loaded.
    """

    counts: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._distrusted: set[int] = set()
        self.tier: TierIndex | None = None
        self._reading: dict[Any, Any] = {}  # keys that are being read from files → their units

    def distrust(self, chunks: set[int]) -> None:
        """Treat the contents of these chunks as misses from now on."""
        self._distrusted |= chunks
        if self.tier is not None:
            for units in self._reading.values():
                if units.chunk in chunks:
                    self.tier.shun(units)

    def lookup(self, key: Any, req_context: Any) -> Any:
        is_forgotten = self._distrusted and self._forgets(key)
        found = LookupResult.MISS if is_forgotten else super().lookup(key, req_context)
        if self.tier is None or found not in (LookupResult.HIT, LookupResult.MISS):
            return found
        room = self._get_num_free_chunks() + self._num_evictable_cache_chunks
        if found is LookupResult.HIT:
            return found if self.tier.fits(key, req_context, room) else LookupResult.MISS
        if self._policy.get(key) is not None:
            return found
        is_held = self.tier.holds(key, req_context, room)
        return LookupResult.RETRY if is_held is None else LookupResult.HIT if is_held else LookupResult.MISS

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        return CacheHitSource.DISK if key in self._reading else super().get_load_source(key, req_context)

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        keys = list(keys)
        lacking = [key for key in keys if self._policy.get(key) is None]
        if self.tier is None or not lacking:
            return super().prepare_load(keys, req_context)
        held = [key for key in keys if self._policy.get(key) is not None]
        chunks = dict(zip(held, super().prepare_load(held, req_context).block_ids.tolist(), strict=True))
        counts, self.counts = self.counts, None  # do not count this as a first request that waits for a second one
        made = super().prepare_store(lacking, req_context)
        self.counts = counts
        assert made is not None, "lookup has seen that there is room"
        chunks |= zip(lacking, made.store_spec.block_ids.tolist(), strict=True)
        for key in lacking:
            self._reading[key] = self.tier.units(key, req_context, chunks[key])
        return self.tier.spec([chunks[key] for key in keys], [self._reading[key] for key in lacking])

    def complete_load(self, keys: Any, req_context: Any) -> None:
        read = [key for key in keys if self._reading.pop(key, None)]
        if read:
            super().complete_store(read, req_context)
        super().complete_load([key for key in keys if key not in read], req_context)

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        if self._distrusted:
            for key in keys:
                self._forgets(key)
        made = super().prepare_store(keys, req_context)
        if self.tier is not None and made is not None and made.keys_to_store:
            chunks = made.store_spec.block_ids.tolist()
            found = map(self.tier.units, made.keys_to_store, [req_context] * len(chunks), chunks)
            if units := [one for one in found if one is not None]:
                made.store_spec = self.tier.spec(chunks, units)
                for one in units:
                    self.tier.trust(one)
        return made

    def _forgets(self, key: Any) -> bool:
        """True if a key's chunk failed its check.  The chunk is freed if nothing reads it."""
        chunk = self._policy.get(key)
        if chunk is None or chunk.chunk_id not in self._distrusted:
            return False
        if chunk.ref_cnt == 0:
            self._policy.remove(key)
            self._num_evictable_cache_chunks -= 1
            self._free_chunk(chunk)
            self._distrusted.discard(chunk.chunk_id)
            if self.events is not None:
                self.events.append(OffloadingEvent(keys=[key], medium=self.medium, removed=True))
        return True

    def _allocate_chunks(self, keys: Any) -> Any:
        chunks = super()._allocate_chunks(keys)
        if self._distrusted:
            self._distrusted.difference_update(chunk.chunk_id for chunk in chunks)
        return chunks

    def reset_cache(self) -> None:
        super().reset_cache()
        self._distrusted.clear()
        self._reading.clear()
        if self.tier is not None:
            self.tier.end()


class KvbmOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's `CPUOffloadingSpec` with kvbm's copies.

    ``kv_connector_extra_config`` accepts, in addition to vLLM's keys (``cpu_bytes_to_use``, ``blocks_per_chunk``,
    ``eviction_policy``, …):

    host_layout : str
        Layout of the blocks in host memory: a name of the catalogue, or a file.  Default: ``pages``, the engine's bytes.
    host_values : {"fp8", "mxfp8", "nvfp4"}
        Quantise blocks on the way to host memory.  Default: no value changes.  It needs `KvbmOffloadingConnector`.
    verify : bool
        Compare digests on load.  Default: true.
    without_prefix_caching : bool
        True to offload in an engine that has switched prefix caching off itself: see `reuse.require_reuse`.
    folder, folder_bytes, unit_tokens, model_key
        Files as a second tier: see `tiered.Settings`.

    Raises
    ------
    BindError
        This version of vLLM is not supported, the memory is smaller than a chunk, or the order of the pages is unknown.
        With `host_values`: the cache of a group of layers cannot be quantised.
    """

    _manager: Any
    _worker: Any

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        documented = {
            STORED[0]: "Blocks that kvbm copied to host memory.",
            STORED[1]: "Bytes that kvbm copied to host memory.",
            LOADED[0]: "Blocks that kvbm copied from host memory.",
            LOADED[1]: "Bytes that kvbm copied from host memory.",
            WRITTEN: "Bytes that kvbm wrote to files.",
            READ: "Bytes that kvbm read from files into host memory.",
            LOST: "Blocks that kvbm could not write to files, or not read from there: misses.",
            FAILED: "Blocks whose digest after the load was not that of the store: misses.",
        }
        counters = {name: OffloadingCounterMetadata(documentation=text) for name, text in documented.items()}
        return {**super().build_metric_definitions(extra_config), **counters}

    def __init__(self, config: Any) -> None:
        require_settings(config.extra_config, "KvbmOffloadingConnector")
        found = _quantised.get()
        if found is None and config.extra_config.get("host_values") is not None:
            raise BindError(
                'host_values: expected kv_connector "KvbmOffloadingConnector" with kv_connector_module_path '
                '"kvbm.integrations.vllm", which knows the sizes of blocks'
            )
        self.values = None if found is None else found.values
        self.page_bytes = int(config.worker_kv_bytes_per_block)
        if found is not None:
            config = replace(config, worker_kv_bytes_per_block=found.block_bytes)
        super().__init__(config)
        # Other processes read the files, but not the host memory.
        usual = PAGES if self.extra_config.get("folder") is None else "universal"
        name = str(self.extra_config.get("host_layout", usual))
        self.is_declared = self.values is not None or name != PAGES
        if self.values is not None:
            self.host_layout = self.values.layout
        else:
            self.host_layout = layouts.load(name if self.is_declared else "universal")
        self.verify = flag_of(self.extra_config, "verify", True)
        self.tier_settings = Settings.of(self.extra_config)
        if self.tier_settings is not None and not self.is_declared:
            raise BindError(f"host_layout: expected a layout, as folder is set (default: universal), got {PAGES!r}")
        if config.canonical_layout:
            raise BindError("canonical_layout: host_layout replaces it; leave it out")
        if self.kv_bytes_per_chunk and not self.num_chunks:
            raise BindError(
                f"cpu_bytes_to_use: expected at least {self.kv_bytes_per_chunk} bytes, which a chunk of all ranks takes, got "
                f"{self.extra_config['cpu_bytes_to_use']}"
            )

    def _uses_shared_region(self) -> bool:
        return True  # also on the CPU

    def get_manager(self) -> Any:
        if self._manager is None:
            self._manager = KvbmOffloadingManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
                **({"info": self.cpu_info} if hasattr(self, "cpu_info") else {}),  # vLLM 0.33's facts for Prometheus
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        connector = _connector_of(self, get_kv_transfer_group())
        worker = connector.connector_worker
        layers = worker.vllm_config.compilation_config.static_forward_context
        names = [name for group in self.config.groups for name in group.layer_names]
        tensors = getattr(connector, "kv_caches", None) or {name: layers[name].kv_cache for name in names}
        require_reuse(worker.vllm_config, self.extra_config)
        groups = pages_of(
            tensors, kv_caches, self.config, worker.vllm_config, worker.kv_cache_config,
            declared=self.is_declared, values=self.values,
        )  # fmt: skip
        for why in {pages.unknown for group in groups for pages in group if pages.unknown}:
            logger.warning("kvbm copies blocks as bytes: %s", why)
        units = self.num_chunks * self.blocks_per_chunk
        shared = None
        if self.replicated_layout:
            nbytes = HostMemory.shared_bytes(self.host_layout, groups, units)
            shared = shared_memory(self.config.engine_id, nbytes, _all_workers_barrier)
        device = host_beside(str(kv_caches.tensors[0].tensor.device))
        cast: Cast = None
        if self.values is not None:
            cast = "amax"
            self._log_values(self.values, groups, units)
        memory = HostMemory(self.host_layout, groups, units, device, shared, self.verify, cast)
        for stores in memory.stores:
            for store in stores:
                logger.info("kvbm: %d blocks, %s", units, store.out)
        copier = Copier(memory, self.blocks_per_chunk)
        made = KvbmOffloadingWorker(copier, reports=isinstance(connector, KvbmOffloadingConnector))
        if self.tier_settings is not None:
            if not isinstance(connector, KvbmOffloadingConnector):
                raise BindError('folder: expected kv_connector "KvbmOffloadingConnector", which knows the tokens of requests')
            ids = [group.group_id for group in self.config.groups]
            made.tier = TierWorker(
                worker.vllm_config, worker.kv_cache_config, self.tier_settings, copier, ids, made.count, self.values
            )
        return made

    def _log_values(self, values: HostValues, groups: list[list[Pages]], units: int) -> None:
        shapes = [[pages.pool.shape for pages in group] for group in groups]
        held, expected = row_bytes(values.layout, shapes), self.config.worker_kv_bytes_per_block
        if held != expected:  # else host memory would be larger than it may be
            raise BindError(f"host_values: blocks of {held} bytes, and {expected} from vLLM's specs: a defect of kvbm")
        logger.info(
            "kvbm: host_values %s: %s; blocks of %d bytes in host memory (%d in the engine): %d blocks",
            values.name, values.text(shapes[0][0].dtype), held, self.page_bytes, units,
        )  # fmt: skip


def _require_settings(extra: Mapping[str, Any]) -> None:
    """Raise `BindError` for a setting of vLLM of a wrong type: its own errors do not name it, and any text is true for it."""
    found = OffloadingSpecFactory.get_spec_cls(extra)
    if not issubclass(found, KvbmOffloadingSpec):
        raise BindError(
            f"kv_connector_extra_config: spec_name: expected KvbmOffloadingSpec (the default), got {found.__name__}; it needs "
            'kv_connector "OffloadingConnector"'
        )
    for name, least in _NUMBERS.items():
        given = extra.get(name)
        if given is None and name != "cpu_bytes_to_use":
            continue
        number = int(given) if isinstance(given, str) and re.fullmatch("[0-9]{1,18}", given) else given
        if (
            isinstance(number, bool) or not isinstance(number, int | float)
            or not least <= number < 1 << 63 or number != int(number)
        ):  # fmt: skip
            raise BindError(f"kv_connector_extra_config: {name}: expected a number from {least} on, got {given!r:.100}")
    for name in ("offload_prompt_only", "self_describing_kv_events", "canonical_layout"):
        flag_of(extra, name, False)


def _connector_of(spec: Any, group: Any) -> Any:
    """The connector of a spec: the engine's only one, or one of several."""
    found = [group, *getattr(group, "_connectors", ())]
    return next(one for one in found if getattr(getattr(one, "connector_worker", None), "spec", None) is spec)


@dataclass
class _Metadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """vLLM's metadata from workers to the scheduler, with the loads and chunks that failed their check."""

    failed_jobs: set[int] = field(default_factory=set)
    failed_chunks: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> Any:
        both = super().aggregate(other)
        failed = self.failed_jobs | other.failed_jobs, self.failed_chunks | other.failed_chunks
        return _Metadata(both.completed_jobs, both.transfer_stats, *failed)


class KvbmOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's `OffloadingConnector` with `KvbmOffloadingSpec`.  It recovers from loads that fail their check.

    Changed blocks are reported to the scheduler as load errors: it recomputes them, and forgets the chunks.  If layers form several
    groups, it recomputes the request.  For an offloaded cache this is a miss: ``kv_load_failure_policy`` is always ``"recompute"``.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = _completed(vllm_config)
        _require_settings(transfer.kv_connector_extra_config)
        require_reuse(vllm_config, transfer.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:  # read after the connector was created
            transfer.kv_load_failure_policy = "recompute"
        values = HostValues.of(transfer.kv_connector_extra_config, _rope(vllm_config.model_config))
        made = _quantised.set(None if values is None else _Quantised(values, host_bytes(kv_cache_config, values)))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _quantised.reset(made)
        self._by_request = len(kv_cache_config.kv_cache_groups) > 1
        self._failures = Failures()
        self._failed = FailedLoads()
        settings = Settings.of(transfer.kv_connector_extra_config)
        if settings is not None and role == KVConnectorRole.SCHEDULER:
            chunks = {group.group_idx: group.tokens_per_chunk for group in self.scheduler.config.kv_group_configs}
            self.scheduler.manager.tier = TierIndex(vllm_config, kv_cache_config, settings, chunks, values)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if (tier := self.scheduler.manager.tier) is not None:
            tier.begin(request, self.scheduler._req_status[request.request_id].req_context)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        answer = self._failed.answer(request)
        if answer is None:
            return self._failed.defer(found)
        if found[0] is None:
            return found
        if found[0]:
            self.scheduler._req_status[request.request_id].update_num_hit_chunks(num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._failed.forget(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._failed.forget(request.request_id)
        return super().request_finished(request, block_ids)  # type: ignore[no-any-return]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._failed.forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        requests = dict(self.connector_worker._load_jobs) if self._by_request else {}
        results = super().get_transfer_results(finished_req_ids)
        self._failures = self.connector_worker.worker.take_failures()
        if self._by_request and self._failures.jobs:
            results.failed_recving |= {requests[job] for job in self._failures.jobs}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._by_request else self._failures.blocks

    def build_connector_worker_meta(self) -> Any:
        found = super().build_connector_worker_meta()
        if found is None:
            return None
        return _Metadata(found.completed_jobs, found.transfer_stats, self._failures.jobs, self._failures.chunks)

    def get_kv_connector_stats(self) -> Any:
        if self.connector_worker is not None:
            return self.connector_worker.worker.take_stats()
        return super().get_kv_connector_stats()

    def update_connector_output(self, connector_output: Any) -> None:
        found = connector_output.kv_connector_worker_meta
        if isinstance(found, _Metadata) and found.failed_jobs:
            logger.warning("kvbm: %d chunks of host memory failed their check", len(found.failed_chunks))
            self.scheduler.manager.distrust(found.failed_chunks)
            for job in found.failed_jobs & self.scheduler._jobs.keys():
                for group in self.scheduler._req_status[self.scheduler._jobs[job].req_id].group_states:
                    group.next_stored_chunk_idx = 0  # recomputed chunks are stored again
        states = self.scheduler._req_status
        ended = [states[name].req for name in connector_output.finished_recving or () if name in states]
        super().update_connector_output(connector_output)
        self._failed.ended(ended, self._kv_cache_manager)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **options: Any) -> Any:
        _completed(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **options)


def _rope(model: Any) -> int:
    """Elements of a latent (MLA) that hold positions; 0 for K and V."""
    if not getattr(model, "use_mla", False):
        return 0
    return int(getattr(model.hf_text_config, "qk_rope_head_dim", None) or 0)


def _completed(vllm_config: Any) -> Any:
    """The configuration of the transfer, with the name of the spec."""
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if extra.setdefault("spec_name", "KvbmOffloadingSpec") == "KvbmOffloadingSpec":
        extra.setdefault("spec_module_path", "kvbm.integrations.vllm")
    return transfer
