"""`KvbmConnector`: prefill here and decode there, between vLLM engines of different tp, block sizes and layouts."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ... import wire
from ...errors import KvbmError, TransferError
from ...reshard import Endpoint, Link, Span
from .caches import Caches
from .meetings import Door, Visit

__all__ = ["KvbmConnector"]

logger = init_logger("vllm.kvbm")

#: Blocks of a request that has been prefilled are held so long, if nobody asks for them.
HOLD_SECONDS = 120.0

#: A request that is asked for, and of which the worker has not been told yet, is waited for so long.
_TOLD = 20.0

#: Requests that were sent, so that a late question is no error.
_MOST_SENT = 4096


@dataclass
class Hold:
    """A request that was prefilled here: its blocks by group, and how many of its tokens they hold."""

    blocks: tuple[list[int], ...]
    tokens: int
    until: float


@dataclass
class Load:
    """A request that was prefilled elsewhere: blocks of this side by group, and which of its tokens are to come."""

    request: str
    blocks: tuple[list[int], ...]
    first: int
    last: int
    host: str
    port: int
    workers: int


@dataclass
class Told(KVConnectorMetadata):
    """What the scheduler tells the workers before a step."""

    start: str
    holds: dict[str, Hold] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)


class KvbmConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector for prefill and decode in engines of their own, over links of kvbm.

    The two engines may differ in tensor parallelism, block size and layout.  What arrives is proven by its digest; where it is not
    right, or does not come, the request is recomputed or fails, as ``kv_load_failure_policy`` says.

    Switched on by ``--kv-transfer-config '{"kv_connector": "KvbmConnector", "kv_role": "kv_both", "kv_port": 14600}'``.  Each
    worker listens at ``host`` and ``kv_port`` plus its rank.  Routers use the parameters of vLLM's NIXL connector: a request with
    ``{"do_remote_decode": true}`` is prefilled and held, and its output has ``kv_transfer_params`` for the engine that decodes.

    ``kv_connector_extra_config``: ``host``, the address of this machine for the other engine (``127.0.0.1``), ``hold_seconds`` (120), ``load_seconds`` (30), ``chunk_bytes``, ``ring_bytes``, ``max_sms`` as
    for `Endpoint`, ``wire`` (``"nixl"``).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler = _Scheduler(vllm_config) if role == KVConnectorRole.SCHEDULER else None
        self._worker = _Worker(vllm_config, kv_cache_config) if role == KVConnectorRole.WORKER else None

    # ---- the scheduler ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Told:  # noqa: ARG002
        return self._of_scheduler.told()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler.held -= set(connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        """The engine goes on stepping while requests are held: their blocks are freed by a step."""
        return bool(self._of_scheduler.held)

    @property
    def _of_scheduler(self) -> _Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    # ---- the worker ------------------------------------------------------------------------------------------------

    @property
    def _of_worker(self) -> _Worker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._of_worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole requests are loaded between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Requests are sent when they have been prefilled."""

    def wait_for_save(self) -> None:
        """Nothing is saved within a step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        return self._of_worker.results()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


class _Scheduler:
    """What goes where; no memory is touched here."""

    def __init__(self, config: Any) -> None:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        self._host, self._port = _host(transfer), transfer.kv_port
        self._workers = parallel.world_size
        self._hold_seconds = float(transfer.get_from_extra_config("hold_seconds", HOLD_SECONDS))
        self._engine = transfer.engine_id
        self._told = Told(start=secrets.token_hex(8))
        self._local: dict[str, int] = {}
        self.held: set[str] = set()

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens that come from elsewhere, beyond those that are here."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = min(int(params["remote_num_tokens"]), request.num_prompt_tokens) - computed
        self._local[request.request_id] = computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks are there for what is to come."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once
        first = self._local.pop(request.request_id, 0)
        self._told.loads[request.request_id] = Load(
            params["remote_request_id"], blocks.get_block_ids(), first, first + external, params["remote_host"],
            params["remote_port"], params["remote_workers"],
        )  # fmt: skip

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are held for another engine; what that one has to know."""
        self._local.pop(request.request_id, None)
        params = request.kv_transfer_params or {}
        ended = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or request.status not in ended or not any(blocks):
            return False, None
        tokens = request.num_computed_tokens
        self._told.holds[request.request_id] = Hold(blocks, tokens, time.time() + self._hold_seconds)
        self.held.add(request.request_id)
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine,
            "remote_request_id": request.request_id, "remote_host": self._host, "remote_port": self._port,
            "remote_workers": self._workers, "remote_num_tokens": tokens,
        }  # fmt: skip

    def told(self) -> Told:
        told, self._told = self._told, Told(self._told.start)
        return told


class _Worker:
    """A worker's endpoint, and what is on its way."""

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._transfer = config.kv_transfer_config
        self._extra: Callable[..., Any] = self._transfer.get_from_extra_config
        self._seconds = float(self._extra("load_seconds", 30.0))
        self._lock = threading.Lock()
        self._known = threading.Condition(self._lock)
        self._holds: dict[str, Hold] = {}
        self._sendings: dict[str, list[Any]] = {}
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._arrivals: dict[str, tuple[list[Any], bool]] = {}  # and whether it has failed
        self._visits: dict[tuple[str, int], Visit] = {}
        self._visiting = threading.Lock()
        self._over: KVConnectorTransferResults = KVConnectorTransferResults()
        self._loading = ThreadPoolExecutor(4, "kvbm load")
        self._start = ""

    def register(self, kv_caches: dict[str, Any]) -> None:
        parallel, model = self._config.parallel_config, self._config.model_config
        self._caches = Caches(self._config, self._kv_cache_config, kv_caches)
        options = {name: value for name in ("chunk_bytes", "ring_bytes", "max_sms") if (value := self._extra(name, None))}
        name = f"{self._transfer.engine_id}/{parallel.rank}"
        kind = self._extra("wire", "nixl")
        if kind != "nixl":
            raise KvbmError(f"KvbmConnector: wire: expected 'nixl', got {kind!r:.40}")
        self._endpoint = Endpoint(
            str(self._transfer.engine_id), self._caches.groups, parallel.rank, wire=wire.nixl(name),
            model=str(self._extra("model", model.model)), **options,
        )  # fmt: skip
        self._door = Door(self._endpoint, _host(self._transfer), self._transfer.kv_port + parallel.rank, self._send)

    def begin(self, told: KVConnectorMetadata) -> None:
        """Before a step: what is held, and what is to be loaded."""
        assert isinstance(told, Told)
        self._start = told.start
        if told.holds:
            with self._known:
                self._holds.update(told.holds)
                self._known.notify_all()
        for request, load in told.loads.items():
            self._loading.submit(self._load, request, load)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def _send(self, request: str, link: Link, is_given_up: bool) -> None:
        """Send a request that is held here, once; or let go of it."""
        with self._known:
            if not self._known.wait_for(lambda: request in self._holds or request in self._sent, _TOLD):
                raise TransferError(f"request {request}: not held here; it was given up, or held for too long")
            if request in self._sent or request in self._sendings:
                return
            hold = self._holds[request]
            self._sendings[request] = sendings = []
            if is_given_up:
                return
            for group, (table, first) in self._caches.tables(hold.blocks, hold.tokens).items():
                span = Span(table, range(first, hold.tokens))
                sendings.append(link.send(request, span, group=group, timeout=self._seconds))

    # ---- decode ----------------------------------------------------------------------------------------------------

    def _visit(self, load: Load) -> Visit:
        with self._visiting:
            at = load.host, load.port
            if at not in self._visits:
                world = self._config.parallel_config.world_size
                self._visits[at] = Visit(self._endpoint, self._start, world, load.host, load.port, load.workers)
            return self._visits[at]

    def _load(self, request: str, load: Load) -> None:
        arrivals: list[Any] = []
        has_failed = False
        try:
            visit = self._visit(load)
            if load.first < load.last:
                for group, (table, first) in self._caches.tables(load.blocks, load.last, load.first).items():
                    span = Span(table, range(first, load.last))
                    arrivals.append(visit.link.receive(load.request, span, group=group, timeout=self._seconds))
            visit.want(load.request, not arrivals)
        except Exception as error:
            has_failed = True
            logger.warning("request %s: %s of %s:%d: %s", request, load.request, load.host, load.port, error)
            for arrival in arrivals:
                arrival.abort()
            if not isinstance(error, TransferError):
                self._forget(load)
        if load.first < load.last:  # else vLLM has all of it, and waits for nothing
            with self._lock:
                self._arrivals[request] = arrivals, has_failed

    def _forget(self, load: Load) -> None:
        """The next load of this engine meets it anew."""
        with self._visiting:
            visit = self._visits.pop((load.host, load.port), None)
        if visit is not None:
            visit.close()

    # ---- what the scheduler is told --------------------------------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        with self._lock:
            for request, (arrivals, has_failed) in list(self._arrivals.items()):
                if all(arrival.has_ended for arrival in arrivals):  # nothing writes its blocks any more
                    self._over.finished_recving.add(request)
                    if has_failed or any(arrival.has_failed for arrival in arrivals):
                        self._over.failed_recving.add(request)
                    del self._arrivals[request]
            for request, hold in list(self._holds.items()):
                sendings = self._sendings.get(request)
                if sendings is None and time.time() < hold.until:
                    continue
                if all(sending.has_ended for sending in sendings or ()):
                    self._over.finished_sending.add(request)
                    self._holds.pop(request)
                    if self._sendings.pop(request, None) is not None:
                        self._sent[request] = None
            while len(self._sent) > _MOST_SENT:
                self._sent.popitem(last=False)
            over, self._over = self._over, KVConnectorTransferResults()
        return over

    def close(self) -> None:
        self._loading.shutdown(wait=False, cancel_futures=True)
        for closing in self._closing():
            with contextlib.suppress(KvbmError):
                closing()

    def _closing(self) -> Iterable[Callable[[], Any]]:
        if hasattr(self, "_door"):
            yield self._door.close
            yield from [visit.close for visit in self._visits.values()]
            yield self._endpoint.close


def _host(transfer: Any) -> str:
    return str(transfer.get_from_extra_config("host", "127.0.0.1"))
