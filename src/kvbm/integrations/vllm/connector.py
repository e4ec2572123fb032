"""`KvbmConnector`: prefill here and decode there, between vLLM engines of different tp, block sizes and layouts."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections import Counter, OrderedDict
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
from ...errors import BindError, KvbmError, TransferError
from ...reshard import Endpoint, Link
from .caches import Caches
from .meetings import Door, Links, Visit
from .metrics import COUNTERS, ConnectorStats, PromMetrics

__all__ = ["KvbmConnector"]

logger = init_logger("vllm.kvbm")

#: Blocks of a request that has been prefilled are held so long, if nobody asks for them.
HOLD_SECONDS = 120.0

#: A request that is asked for, and of which the worker has not been told yet, is waited for so long.
_TOLD = 20.0

#: Requests that were sent, or let go of: a late question is answered at once.
_MOST_GONE = 4096

#: Tokens of a block of the engine that decodes, at most, where it has a sliding window: its first block is loaded as a whole.
_MOST_TOKENS = 128

#: Characters of a request's name, or a host's: it stands in messages.
_MOST_NAME = 1000

#: Engines that are remembered, though they could not be met.
_MOST_VISITS = 256

#: Seconds that nobody waits; what the endpoint's clock takes.
_FOREVER = 1e9

#: Loads that begin at a time: each may wait for an engine that does not answer.
_LOADS = 16


@dataclass
class Hold:
    """A request that was prefilled here: its blocks by group, how many of its tokens they hold, and for how many seconds."""

    blocks: tuple[list[int], ...]
    tokens: int
    seconds: float


@dataclass
class Source:
    """Where a request was prefilled, as its parameters say: untrusted."""

    request: str
    host: str
    port: int
    workers: int
    tokens: int

    @classmethod
    def of(cls, params: dict[str, Any]) -> Source:
        """Raises `BindError` for what is missing, or of another kind."""
        names = ("remote_request_id", "remote_host", "remote_port", "remote_workers", "remote_num_tokens")
        found = tuple(params.get(name) for name in names)
        for name, kind, value in zip(names, (str, str, int, int, int), found, strict=True):
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise BindError(f"kv_transfer_params: {name}: expected {kind.__name__}, got {value!r:.100}")
            if isinstance(value, str) and len(value) > _MOST_NAME:
                raise BindError(f"kv_transfer_params: {name}: expected at most {_MOST_NAME} characters, got {len(value)}")
        return cls(*found)  # type: ignore[arg-type]


@dataclass
class Load:
    """A request that was prefilled elsewhere: blocks of this side by group, and which of its tokens are to come.

    No tokens: this side does not need it, and the other one lets go of it.
    """

    source: Source
    blocks: tuple[list[int], ...] = ()
    first: int = 0
    last: int = 0


@dataclass
class Told(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers before a step: what is held, and no more, and what is to be loaded."""

    start: str
    unheld: list[str] = field(default_factory=list)
    holds: dict[str, Hold] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)


class KvbmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's connector for prefill and decode in engines of their own, over links of kvbm.

    The two engines may differ in tensor parallelism, block size and layout.  What arrives is proven by its digest; where it is not
    right, or does not come, the request is recomputed or fails, as ``kv_load_failure_policy`` says.

    Switched on by ``--kv-transfer-config '{"kv_connector": "KvbmConnector", "kv_role": "kv_both", "kv_port": 14600}'``.  Each
    worker listens at ``host`` and ``kv_port`` plus its rank (and behind those of data-parallel engines before it).  Routers use
    the parameters of vLLM's NIXL connector: a request with ``{"do_remote_decode": true}`` is prefilled and held, and its output has
    ``kv_transfer_params`` for the engine that decodes.  They come from the router alone: who may send them names the host that is
    asked.

    ``kv_connector_extra_config``: ``host``, the address of this machine for the other engine (``127.0.0.1``); ``hold_seconds``
    (120) that blocks are held for an engine that asks; ``load_seconds`` (30) that a load may take; ``model``, what both call the
    model (its path); ``chunk_bytes``, ``ring_bytes``, ``max_sms`` as for `Endpoint`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler = _Scheduler(vllm_config, kv_cache_config) if role == KVConnectorRole.SCHEDULER else None
        self._worker = _Worker(vllm_config, kv_cache_config) if role == KVConnectorRole.WORKER else None

    # ---- the scheduler ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.allocated(request, blocks, num_external_tokens)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._of_scheduler.manager = kv_cache_manager

    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler.sent(connector_output.finished_sending or ())

    def build_connector_meta(self, scheduler_output: Any) -> Told:  # noqa: ARG002
        return self._of_scheduler.told()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, block_ids)

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


class _Scheduler:
    """What goes where; no memory is touched here.

    vLLM lets go of blocks that the token behind a prompt does not see, and then says that the request has ended.  The engine that
    decodes computes the prompt's last token, which sees more; and it loads its first block as a whole.  So these blocks are
    remembered with each step, and kept.
    """

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self.manager: Any = None  # vLLM's, of blocks
        self._windows: list[tuple[int, int, int, int]] = []  # groups, tokens of a block, those of a window, or of a chunk
        for index in kv_cache_config.transfer_group_ids:
            held = kv_cache_config.kv_cache_groups[index].kv_cache_spec
            held = getattr(held, "first_spec", held)
            window, chunk = (getattr(held, name, None) or 0 for name in ("sliding_window", "attention_chunk_size"))
            if window or chunk:
                self._windows.append((index, int(held.block_size), window, chunk))
        self._prefills: dict[str, int] = {}  # requests, and tokens of their prompts
        self._seen: dict[str, list[tuple[int, int, list[Any]]]] = {}  # their blocks: group, place of the first, blocks
        self._kept: dict[str, list[Any]] = {}
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        self._host, self._port = _host(transfer), _port(config)
        self._workers = parallel.world_size
        self._hold_seconds = _seconds(transfer, "hold_seconds", HOLD_SECONDS)
        self._engine = transfer.engine_id
        self._told = Told(start=secrets.token_hex(8))
        self._local: dict[str, int] = {}
        self._asked: OrderedDict[tuple[str, int, str], None] = OrderedDict()

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens that come from elsewhere, beyond those that are here.

        The prompt's last token is computed here, for what comes behind it.
        """
        source = self._source(request)
        if source is None:
            return 0, False
        count = min(source.tokens, request.num_prompt_tokens - 1) - computed
        self._local[request.request_id] = computed
        return (count, True) if count > 0 else (0, False)

    def _source(self, request: Any) -> Source | None:
        """Where it was prefilled, while it has not been asked for."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return None
        try:
            source = Source.of(params)
            if params.get("remote_engine_id") == self._engine:  # what is in the prefix cache is used, and nothing is moved
                self._told.unheld.append(source.request.partition("/")[2])
                raise BindError(f"remote_engine_id: {self._engine!r} is this engine itself")
            if (source.host, source.port, source.request) in self._asked:  # such as n > 1, or a router that tries again
                raise BindError(f"remote_request_id: {source.request!r:.100} was loaded already; it is sent once")
        except BindError as error:
            params["do_remote_prefill"] = False
            logger.warning("request %s: it is prefilled here: %s", request.request_id, error)
            return None
        return source

    def _ask(self, request: Any, load: Load) -> None:
        """The workers ask for it, once."""
        request.kv_transfer_params["do_remote_prefill"] = False
        self._told.loads[request.request_id] = load
        self._asked[load.source.host, load.source.port, load.source.request] = None
        if len(self._asked) > _MOST_GONE:
            self._asked.popitem(last=False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks are there for what is to come."""
        if self._windows and (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._prefills[request.request_id] = request.num_prompt_tokens
        source = self._source(request)
        if source is None:
            return
        first = self._local.pop(request.request_id, 0)
        tables = blocks.get_block_ids() if external else ()
        self._ask(request, Load(source, tables, first, first + external))

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are held for another engine; what that one has to know."""
        self._local.pop(request.request_id, None)
        self._prefills.pop(request.request_id, None)
        seen = self._seen.pop(request.request_id, [])
        source = self._source(request)
        if source is not None:  # aborted before it had blocks: the other engine need not hold it
            self._ask(request, Load(source))
        params = request.kv_transfer_params or {}
        ended = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or request.status not in ended or not any(blocks):
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if seen:
            blocks = self._keep(request.request_id, blocks, seen)
        self._told.holds[request.request_id] = Hold(blocks, tokens, self._hold_seconds)
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine,
            "remote_request_id": f"{self._told.start}/{request.request_id}", "remote_host": self._host, "remote_port": self._port,
            "remote_workers": self._workers, "remote_num_tokens": tokens,
        }  # fmt: skip

    def _keep(
        self, request: str, blocks: tuple[list[int], ...], seen: list[tuple[int, int, list[Any]]]
    ) -> tuple[list[int], ...]:
        """The tables with blocks that vLLM has let go of just now: nobody else has had them yet."""
        tables, kept = [list(table) for table in blocks], []
        for group, first, behind in seen:
            for at, block in zip(range(first, len(tables[group])), behind, strict=False):
                if tables[group][at] == 0 and not block.is_null:
                    tables[group][at] = block.block_id
                    kept.append(block)
        self.manager.block_pool.touch(kept)
        self._kept[request] = kept
        return tuple(tables)

    def sent(self, requests: Iterable[str]) -> None:
        """They are held no more."""
        for request in requests:
            if kept := self._kept.pop(request, None):
                self.manager.block_pool.free_blocks(reversed(kept))

    def told(self) -> Told:
        for request, tokens in self._prefills.items():
            blocks = self.manager.get_blocks(request).blocks
            self._seen[request] = []
            for group, nt, window, chunk in self._windows:
                least = max(tokens - window if window else 0, (tokens - 1) // chunk * chunk if chunk else 0)
                first = max(0, least - _MOST_TOKENS + 1) // nt
                self._seen[request].append((group, first, list(blocks[group][first:])))
        told, self._told = self._told, Told(self._told.start)
        return told


@dataclass
class _Held:
    """A request that is held; once it was asked for, the link that it goes by, and what goes: None before it has begun."""

    hold: Hold
    until: float
    wait: Any
    link: Link | None = None
    sendings: list[Any] | None = None
    failure: str = ""


class _Worker:
    """A worker's endpoint, and what is on its way."""

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._transfer = config.kv_transfer_config
        self._extra: Callable[..., Any] = self._transfer.get_from_extra_config
        self._seconds = _seconds(self._transfer, "load_seconds", 30.0)
        self._known = threading.Condition()
        self._held: dict[str, _Held] = {}
        self._gone: OrderedDict[str, tuple[Link | None, str]] = OrderedDict()  # to whom, or why not
        self._arrivals: dict[str, tuple[list[Any], bool]] = {}  # and whether it has failed
        self._asking: dict[str, bool] = {}  # loads of which there are no arrivals yet, and whether they were given up
        self._visits: dict[tuple[str, int, int], Visit] = {}
        self._over: KVConnectorTransferResults = KVConnectorTransferResults()
        self._loading = ThreadPoolExecutor(_LOADS, "kvbm load")
        self._start = ""
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()  # of them, and of the links
        self._endpoint: Endpoint | None = None
        self._links: Links | None = None
        self._door: Door | None = None

    def register(self, kv_caches: dict[str, Any]) -> None:
        self._caches = Caches(self._config, self._kv_cache_config, kv_caches)
        rank = self._caches.rank
        given = {name: self._extra(name, None) for name in ("chunk_bytes", "ring_bytes", "max_sms")}
        options = {name: value for name, value in given.items() if value is not None}
        self._endpoint = Endpoint(
            str(self._transfer.engine_id), self._caches.groups, rank,
            wire=wire.nixl(f"{self._transfer.engine_id}/{rank}/{secrets.token_hex(4)}"),  # another one when it is started again
            model=str(self._extra("model", self._config.model_config.model)), **options,
        )  # fmt: skip
        self._links = Links(self._endpoint)
        self._door = Door(self._links, _host(self._transfer), _port(self._config) + rank, self._send)

    def begin(self, told: KVConnectorMetadata) -> None:
        """Before a step, or beside it: what is held, and what is to be loaded."""
        assert isinstance(told, Told)
        self._start = told.start
        with self._known:
            for held in (self._held[request] for request in told.unheld if request in self._held):
                held.until = 0.0
        if not told.holds and not told.loads:
            return
        wait = self._queued()
        with self._known:
            for request, hold in told.holds.items():
                self._gone.pop(request, None)
                self._held[request] = _Held(hold, time.monotonic() + hold.seconds, wait)
            self._asking.update(dict.fromkeys(told.loads, False))
            self._known.notify_all()
        for request, load in told.loads.items():
            self._loading.submit(self._load, request, load, wait)

    def _queued(self) -> Any:
        """What the GPU has still to do with the blocks; None on hosts."""
        assert self._endpoint is not None
        if self._endpoint.ring.device == "cpu":
            return None
        event = sys.modules["torch"].cuda.Event()
        event.record()
        return event

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def _send(self, wanted: str, link: Link, is_given_up: bool) -> None:
        """Send a request that is held here, once; or let go of it."""
        start, _, request = wanted.partition("/")
        if start != self._start:
            raise TransferError(f"request {request}: it was held before this engine was started again")
        with self._known:
            if not self._known.wait_for(lambda: request in self._held or request in self._gone, _TOLD):
                raise TransferError(f"request {request}: not held here")
            if request in self._gone:
                to, why = self._gone[request]
            else:
                held = self._held[request]
                to, why = held.link, held.failure
                held.link = held.link or link
            if why or (to is not None and to is not link):
                raise TransferError(f"request {request}: {why or 'it was sent to another engine'}")
            if to is link:
                return  # which another worker of its engine has asked for
        sendings: list[Any] = []
        try:
            if not is_given_up:
                for group, span in self._caches.spans(held.hold.blocks, held.hold.tokens).items():
                    sendings.append(link.send(wanted, span, group=group, wait=held.wait, timeout=self._seconds))
        except Exception as error:
            held.failure = str(error) or type(error).__name__
            for sending in sendings:
                sending.abort()
            raise
        finally:
            held.sendings = sendings

    # ---- decode ----------------------------------------------------------------------------------------------------

    def _visit(self, source: Source) -> Visit:
        assert self._links is not None
        world = self._config.parallel_config.world_size
        with self._known:
            at = source.host, source.port, source.workers
            if at not in self._visits:
                if len(self._visits) >= _MOST_VISITS:  # of which most were of no use
                    self._visits = {key: visit for key, visit in self._visits.items() if visit.is_met}
                self._visits[at] = Visit(self._links, self._start, world, *at)
            return self._visits[at]

    def _load(self, request: str, load: Load, wait: Any) -> None:
        arrivals: list[Any] = []
        has_failed = False
        source = load.source
        try:
            visit = self._visit(source)
            if load.first < load.last:
                link = visit.link()
                for group, span in self._caches.spans(load.blocks, load.last, load.first).items():
                    arrivals.append(link.receive(source.request, span, group=group, wait=wait, timeout=self._seconds))
            visit.want(source.request, not arrivals)
        except Exception as error:
            has_failed = True
            where = f"{source.request} of {source.host}:{source.port}"
            logger.warning("request %s: %s was not loaded: %s", request, where, error)
            for arrival in arrivals:
                arrival.abort()
        with self._known:
            if self._asking.pop(request):
                for arrival in arrivals:
                    arrival.abort()
            if load.first < load.last:  # else vLLM has all of it, and waits for nothing
                self._arrivals[request] = arrivals, has_failed

    # ---- what the scheduler is told --------------------------------------------------------------------------------

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """What has ended since; of requests that vLLM has given up nothing is waited for."""
        with self._known:
            self._asking.update(dict.fromkeys(finished & self._asking.keys(), True))
            for request, (arrivals, has_failed) in list(self._arrivals.items()):
                if request in finished:
                    for arrival in arrivals:
                        arrival.abort()
                if not all(arrival.has_ended for arrival in arrivals):
                    continue  # something may still write its blocks
                failures = [arrival.why for arrival in arrivals if arrival.has_failed]
                self._over.finished_recving.add(request)
                self._counts["failed" if has_failed or failures else "loaded"] += 1
                if has_failed or failures:
                    self._over.failed_recving.add(request)
                if failures and not has_failed and request not in finished:
                    logger.warning("request %s: it was not loaded: %s", request, failures[0])
                del self._arrivals[request]
            now = time.monotonic()
            for request, held in list(self._held.items()):
                if held.link is None:
                    if now < held.until:
                        continue
                    held.failure = f"it was held for {held.hold.seconds:g} s, and nobody asked for it"
                elif held.sendings is None or not all(sending.has_ended for sending in held.sendings):
                    continue
                self._over.finished_sending.add(request)
                has_gone = held.sendings and not any(sending.has_failed for sending in held.sendings)
                self._counts["sent" if has_gone else "unsent"] += 1
                self._gone[request] = held.link, held.failure
                del self._held[request]
            while len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)
            over, self._over = self._over, KVConnectorTransferResults()
        return over

    def take_stats(self) -> ConnectorStats | None:
        """What was counted since the last call; None if nothing was."""
        if self._endpoint is None:
            return None
        with self._known:
            now = self._counts.copy()
        for found in self._endpoint.stats().values():
            for name in COUNTERS.keys() & found.keys() - {"failed"}:
                now[name] += found[name]
        new, self._told = now - self._told, now
        return ConnectorStats(dict(new)) if new else None

    def close(self) -> None:
        """End what is under way; threads and sockets are left to nobody."""
        if self._door is not None:
            self._door.close()
        with self._known:
            visits = list(self._visits.values())
        for visit in visits:
            visit.close()
        self._loading.shutdown(wait=False, cancel_futures=True)
        if self._endpoint is not None:
            with contextlib.suppress(KvbmError):
                self._endpoint.close()


def _host(transfer: Any) -> str:
    return str(transfer.get_from_extra_config("host", "127.0.0.1"))


def _seconds(transfer: Any, name: str, usual: float) -> float:
    given = transfer.get_from_extra_config(name, usual)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < _FOREVER:
        raise BindError(f"kv_connector_extra_config: {name}: expected a number of seconds above 0, got {given!r:.100}")
    return float(given)


def _port(config: Any) -> int:
    """Where the first worker of this engine listens: engines of one data-parallel group stand behind each other."""
    parallel = config.parallel_config
    return int(config.kv_transfer_config.kv_port) + int(parallel.data_parallel_index) * int(parallel.world_size)
