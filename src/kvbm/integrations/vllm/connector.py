"""`KvbmConnector`: send KV caches from a prefill engine to a decode engine with another tp, block size or layout."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ... import wire
from ...errors import KvbmError, printable
from ...reshard import Endpoint, Link, Span
from ..settings import flag_of
from .caches import Caches
from .casts import cast_of, pool_formats, require_scales
from .holding import Holds
from .identity import model_of
from .log import logger
from .meetings import MOST_PARTS, Door, Links, Visit, Want
from .metrics import COUNTERS, ConnectorStats, PromMetrics
from .reuse import require_reuse
from .scheduling import HOLD_SECONDS, Load, Scheduler, Source, StepMetadata, count_of, host_of, port_of, seconds_of
from .setting_names import require_settings

__all__ = ["KvbmConnector"]

#: Defaults for a request that is sent while it is computed: tokens per part, and the number of groups of layers.
_PUSH_TOKENS, _TURNS = 2048, 4

#: Most engines that are remembered although connecting failed.
_MOST_VISITS = 256


class KvbmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's connector for prefill and decode in separate engines, over kvbm's links.

    The two engines may differ in tensor parallelism, block size and layout.  Arrived blocks are verified by their digests.  If they
    are wrong or missing, the request is recomputed or fails, depending on ``kv_load_failure_policy``.

    Enable it with ``--kv-transfer-config '{"kv_connector": "KvbmConnector", "kv_role": "kv_both", "kv_port": 14600}'``.  Each
    worker listens at ``host`` and ``kv_port`` plus its rank (plus the ranks of earlier data-parallel engines).  Routers use the
    parameters of vLLM's NIXL connector: a request with ``{"do_remote_decode": true}`` is prefilled and held, and its output has
    ``kv_transfer_params`` for the decode engine.  Accept these parameters only from the router: they name the host to connect to.

    ``kv_connector_extra_config``: ``host``, address of this machine for the other engine (``127.0.0.1``); ``hold_seconds`` (120),
    how long blocks are held for the decode engine; ``load_seconds`` (30), time limit of a load; ``model``, a name of the weights,
    the same on both sides (default: a hash of their files); ``secret_file``, a file with a secret that all engines share;
    ``insecure`` (false), listen at a public address without a secret; ``push_layers`` (a quarter of all), layers that are sent at
    a time while a prompt is computed; ``push_tokens`` (2048), tokens per part of a prompt; ``cast`` (none), ``"amax"`` or scales of
    an fp8 cache, the same on both sides: engines with other ``--kv-cache-dtype`` meet, and values change on the way;
    ``without_prefix_caching`` (false), true
    to load caches into an engine that has switched prefix caching off itself; ``chunk_bytes``, ``ring_bytes``, ``max_sms`` as for
    `Endpoint`.

    If the router names a request (``"transfer_id"``), it may call both engines at once: the prompt's KV cache is sent while it is
    computed.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        require_settings(extra, "KvbmConnector")
        require_reuse(vllm_config, extra)
        self._scheduler = Scheduler(vllm_config, kv_cache_config) if role == KVConnectorRole.SCHEDULER else None
        self._worker = _Worker(vllm_config, kv_cache_config) if role == KVConnectorRole.WORKER else None

    # ---- the scheduler ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.allocated(request, blocks, num_external_tokens)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._of_scheduler.manager = kv_cache_manager

    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler.sent(connector_output.finished_sending or ())
        self._of_scheduler.loaded(connector_output.finished_recving or ())

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._of_scheduler.step_metadata(scheduler_output.num_scheduled_tokens)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, block_ids)

    @property
    def _of_scheduler(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    # ---- the worker ------------------------------------------------------------------------------------------------

    @property
    def _of_worker(self) -> _Worker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._of_worker.stop(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._of_worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._of_worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: whole requests are loaded between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Send a computed layer of requests that the decode engine has asked for."""
        self._of_worker.holds.saved(layer_name)

    def wait_for_save(self) -> None:
        """Send layers for which vLLM made no call, such as when a CUDA graph runs the whole step."""
        self._of_worker.holds.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._of_worker.results(finished_req_ids)

    def get_kv_connector_stats(self) -> Any:
        return self._worker.take_stats() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


@dataclass
class _Arriving:
    """The arrivals of a load, and the reason if it failed."""

    source: Source
    arrivals: list[Any]
    failure: str = ""

    def fail(self, why: str) -> None:
        """Fail the load: nothing of it is used."""
        self.failure = self.failure or why
        for arrival in self.arrivals:
            arrival.abort()


class _Worker:
    """A worker's endpoint, and its running transfers."""

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._transfer = config.kv_transfer_config
        self._extra: Callable[..., Any] = self._transfer.get_from_extra_config
        self._seconds = seconds_of(self._transfer, "load_seconds", 30.0)
        self._hold_seconds = seconds_of(self._transfer, "hold_seconds", HOLD_SECONDS)
        self._push_tokens = count_of(self._transfer, "push_tokens", _PUSH_TOKENS)
        self._push_layers = count_of(self._transfer, "push_layers", 0)
        self._cast = cast_of(self._transfer.kv_connector_extra_config)
        self._is_insecure = flag_of(self._transfer.kv_connector_extra_config, "insecure", False)
        self._lock = threading.RLock()
        self._arrivals: dict[str, _Arriving] = {}
        self._lost: dict[str, str] = {}  # requests that the prefill engine refused, and why
        self._requesting: dict[str, bool] = {}  # loads without arrivals yet → True if given up
        self._visits: dict[tuple[str, int, int], Visit] = {}
        self._ended: KVConnectorTransferResults = KVConnectorTransferResults()
        self._start = ""
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()  # last reported counters of these and of the links
        self._endpoint: Endpoint | None = None
        self._links: Links | None = None
        self._door: Door | None = None

    def register(self, kv_caches: dict[str, Any]) -> None:
        self._caches = Caches(self._config, self._kv_cache_config, kv_caches)
        rank = self._caches.rank
        given = {name: self._extra(name, None) for name in ("chunk_bytes", "ring_bytes", "max_sms")}
        options = {name: value for name, value in given.items() if value is not None}
        scale = self._cast
        if scale is not None:
            require_scales(self._config, self._caches.layers, scale)
        self._endpoint = Endpoint(
            str(self._transfer.engine_id), self._caches.groups, rank,
            wire=wire.mapped(wire.nixl(f"{self._transfer.engine_id}/{rank}/{secrets.token_hex(4)}")),  # a new name after a restart
            model=model_of(self._config, self._extra("model", None), casts=scale is not None), cast=scale,
            secret_file=self._extra("secret_file", None), **options,
        )  # fmt: skip
        if scale is not None:
            formats = sorted({text for _, pool in self._caches.groups.values() for text in pool_formats(pool)})
            logger.warning("kvbm: cast %s: KV caches of %s are cast to and from those of other engines", scale, ", ".join(formats))
        self._links = Links(self._endpoint)
        count = max(place.model.nl for place, _ in self._caches.groups.values())
        each = self._push_layers or -(-count // _TURNS)
        if getattr(self._config.parallel_config, "use_ubatching", False):
            each = count  # a layer is computed in several parts
        self.holds = Holds(
            self._caches.spans, whole=self._caches.whole, layers=self._caches.layers, count=count,
            each=0 if each >= count else each, seconds=self._seconds, wait_seconds=self._hold_seconds, queued=self._queued,
            tell=self._tell,
        )  # fmt: skip
        host, port = host_of(self._transfer), port_of(self._config, self._transfer.kv_port) + rank
        self._door = Door(self._links, host, port, self.holds.asked, is_insecure=self._is_insecure)
        if self._endpoint.secret is None:
            logger.warning("kvbm: no secret_file: whoever reaches %s:%d can ask for the KV caches of prompts", host, port)

    def _tell(self, link: Link, name: str, why: str) -> None:
        if self._door is not None:  # else the server is being started, and no request has arrived
            self._door.tell(link, name, why)

    def stop(self, metadata: KVConnectorMetadata) -> None:
        """Before a step: stop reading blocks that the step uses for other requests."""
        assert isinstance(metadata, StepMetadata)
        if metadata.stopped:
            self.holds.stop(metadata.stopped)

    def begin_step(self, metadata: KVConnectorMetadata) -> None:
        """Before a step: note what it computes."""
        assert isinstance(metadata, StepMetadata)
        self.holds.begin_step(metadata.pushes)

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Before or during a step: begin to hold and to load requests."""
        assert isinstance(metadata, StepMetadata)
        self._start = metadata.start
        self.holds.take_step(metadata.start, metadata.holds, metadata.unheld, metadata.lost)
        if not metadata.loads:
            return
        wait = self._queued()
        with self._lock:
            self._requesting.update(dict.fromkeys(metadata.loads, False))
        end = time.monotonic() + self._seconds
        for request, load in metadata.loads.items():
            with self._lock:  # so that the visit is not forgotten meanwhile
                try:
                    visit = self._visit(load.source)
                    visit.submit(self._load, request, load, visit, wait, end)
                except KvbmError as error:
                    self._failed(request, load, _Arriving(load.source, []), error)

    def _queued(self) -> Any:
        """An event after the GPU's queued work on the blocks; None if there is none."""
        assert self._endpoint is not None
        if self._endpoint.ring.device == "cpu":
            return None
        event = sys.modules["torch"].cuda.Event()
        event.record()
        return None if event.query() else event  # what waits for nothing begins earlier

    # ---- decode ----------------------------------------------------------------------------------------------------

    def _visit(self, source: Source) -> Visit:
        assert self._links is not None
        world = self._config.parallel_config.world_size
        with self._lock:
            at = source.host, source.port, source.workers
            if at not in self._visits:
                if len(self._visits) >= _MOST_VISITS:  # most of them could not be reached
                    for key, visit in list(self._visits.items()):
                        if not visit.is_met:
                            self._visits.pop(key).leave()
                self._visits[at] = Visit(self._links, self._start, world, *at)
            return self._visits[at]

    def _load(self, request: str, load: Load, visit: Visit, wait: Any, end: float) -> None:
        """Ask for a request, on the thread of its engine.  Everything has come at `end`, or the load has failed."""
        source, arriving = load.source, _Arriving(load.source, [])
        try:
            want = Want(source.request, is_given_up=True)
            if load.first < load.last:
                link = visit.link(end)
                until, want = end, Want(source.request)
                if source.is_early:  # it must be computed first
                    groups = tuple(sorted(self._caches.whole))
                    each = max(self._push_tokens, -(-(load.last - load.first) // (MOST_PARTS - 1)))
                    want = Want(source.request, False, load.first, load.last, each, groups)
                    until += self._hold_seconds
                seconds = max(until - time.monotonic(), 0.0)
                for group, span in self._caches.spans(load.blocks, load.last, load.first, load.begins).items():
                    parts = want.parts() if group in want.groups else [(source.request, span.tokens)]
                    for key, tokens in parts:
                        part = Span(span.table, tokens)
                        arriving.arrivals.append(link.receive(key, part, group=group, wait=wait, timeout=seconds))
            self._begun(request, load, arriving)  # all may have come before this thread has its turn and reads the answer
            if not arriving.failure:
                visit.want(want, end)
            if arriving.failure and not source.is_early:  # it was given up meanwhile, perhaps before anything could be refused
                visit.want(Want(source.request, is_given_up=True), end)
        except Exception as error:
            self._failed(request, load, arriving, error)

    def _begun(self, request: str, load: Load, arriving: _Arriving) -> None:
        """All of a load is received, or it has failed.  May be called again."""
        with self._lock:
            if request not in self._requesting:
                return
            if self._requesting.pop(request):
                self._give_up(arriving)
            if load.first < load.last:  # else vLLM has all blocks and does not wait
                self._arrivals[request] = arriving

    def _failed(self, request: str, load: Load, arriving: _Arriving, why: Exception) -> None:
        """A load could not be asked for, or was refused."""
        with self._lock:
            is_known = request in self._requesting or self._arrivals.get(request) is arriving
            if not is_known and load.first < load.last:
                return  # all has come, or vLLM was told of the failure
            where = printable(f"{load.source.request} of {load.source.host}:{load.source.port}")
            logger.warning("request %s: %s was not loaded: %s", printable(request), where, why)
            arriving.fail(str(why) or type(why).__name__)
        self._begun(request, load, arriving)

    def _give_up(self, arriving: _Arriving, why: str = "it was given up") -> None:
        """Give up a load, and tell the prefill engine if it still computes.  The caller holds `_lock`."""
        if not arriving.failure and arriving.source.is_early:
            want, visit = Want(arriving.source.request, is_given_up=True), self._visit(arriving.source)
            visit.submit(self._send_want, visit, want, time.monotonic() + self._seconds)
        arriving.fail(why)

    def _send_want(self, visit: Visit, want: Want, end: float) -> None:
        with contextlib.suppress(KvbmError):
            visit.want(want, end)

    # ---- results for the scheduler ---------------------------------------------------------------------------------

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """Transfers that ended since the last call.  Requests that vLLM has given up are not waited for."""
        with self._lock:
            self._requesting.update(dict.fromkeys(finished & self._requesting.keys(), True))
            if self._arrivals:
                for visit in self._visits.values():
                    self._lost.update(visit.lost())
            for request, arriving in list(self._arrivals.items()):
                failed = next((arrival.why for arrival in arriving.arrivals if arrival.has_failed), "")
                if failed := failed or self._lost.pop(arriving.source.request, ""):
                    if not arriving.failure and request not in finished:
                        logger.warning("request %s: it was not loaded: %s", printable(request), failed)
                    self._give_up(arriving, failed)  # do not wait for the rest
                elif request in finished:
                    self._give_up(arriving)
                if not all(arrival.has_ended for arrival in arriving.arrivals):
                    continue  # something may still write its blocks
                self._ended.finished_recving.add(request)
                self._counts["failed" if arriving.failure else "loaded"] += 1
                if arriving.failure:
                    self._ended.failed_recving.add(request)
                del self._arrivals[request]
            if not self._requesting:  # no load waits for the other ones
                self._lost.clear()
            self._ended.finished_sending |= self.holds.ended()
            over, self._ended = self._ended, KVConnectorTransferResults()
        return over

    def take_stats(self) -> ConnectorStats | None:
        """Counters since the last call; None if nothing was counted."""
        if self._endpoint is None:
            return None
        with self._lock:
            now = self._counts + self.holds.counts
        for found in self._endpoint.stats().values():
            for name in COUNTERS.keys() & found.keys() - {"failed"}:
                now[name] += found[name]
        new, self._reported = now - self._reported, now
        return ConnectorStats(dict(new)) if new else None

    def close(self) -> None:
        """End all transfers, threads and sockets."""
        if self._door is not None:
            self._door.close()
        with self._lock:
            visits = list(self._visits.values())
        for visit in visits:
            visit.close()
        if self._endpoint is not None:
            with contextlib.suppress(KvbmError):
                self._endpoint.close()
