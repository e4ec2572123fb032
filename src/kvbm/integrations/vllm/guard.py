"""`KvbmGuard`: any other connector of vLLM, whose loads are compared with what the other engine computed."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ...errors import BindError, printable
from ...link.secret import Secret
from ...reshard import Span
from ..settings import flag_of
from .caches import Caches
from .failures import FailedLoads
from .guarding import Keeper, Kept, Origin, compare, digests_of, failed, new_start
from .identity import differing, inputs_of
from .log import logger
from .metrics import GuardPromMetrics, GuardStats
from .scheduling import count_of, host_of, port_of, seconds_of
from .setting_names import require_settings

__all__ = ["KvbmGuard"]

#: The parameter of a request in which the engine that prefills says where its digests are.
PARAMETER = "kvbm_guard"

#: Threads that compute digests, those of one request on one of them; and threads that wait for the answers of other engines.
#: Engines ask each other, so whoever waits for an answer must not keep others from computing theirs.
_DIGESTING, _WAITING = 2, 32

#: Seconds after which differing digests of a load between two steps are computed again: the connector may have said too early that
#: it has loaded, and no step has used the blocks yet.
_SETTLE = 0.25


class Compared(NamedTuple):
    """The result of a comparison: the name of a counter, what is wrong, empty if nothing is, and the time that it took."""

    what: str
    why: str
    seconds: float


@dataclass
class Take:
    """Tokens of a request that was computed here, whose digests another engine will ask for."""

    key: str
    blocks: tuple[list[int], ...]
    tokens: int
    is_ours: bool  # the blocks are held for the digests alone


@dataclass
class Check:
    """Tokens that the connector loads, and where their digests are."""

    origin: Origin
    blocks: tuple[list[int], ...]
    first: int
    last: int
    is_async: bool


@dataclass
class GuardMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    """The guarded connector's message to the workers, with what the guard digests."""

    inner: Any = None
    takes: dict[str, Take] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)


class KvbmGuard(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Another connector of vLLM; what it loads is compared with what the engine that prefilled has computed.

    ``kv_connector_extra_config``: ``guarded``, the other connector's ``--kv-transfer-config`` (without ``engine_id``);
    ``host`` (``127.0.0.1``), address of this machine for the other engine; ``port`` (14700), where a worker listens, plus its rank;
    ``check_seconds`` (10), time limit of the other engine's digests; ``secret_file``, a file with a secret that all engines share;
    ``insecure`` (false), listen at a public address without a secret; ``unguarded`` (``"compute"``), what is done with a load whose
    digests nobody has: ``"compute"`` it here, or ``"load"`` it all the same.

    Both engines need the guard.  ``kv_load_failure_policy`` says what is done with a load that is wrong.

    Notes
    -----
    The engine that prefills keeps a digest of each token and head.  They do not depend on layout, block size and tensor
    parallelism.  Where the request is loaded, its digests are computed from the blocks, after the connector has said that it has
    loaded them, and before vLLM uses them.  What the connector loads during a step is compared at the end of the step, which waits.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_settings(vllm_config.kv_transfer_config.kv_connector_extra_config, "KvbmGuard")
        inner = _inner_config(vllm_config)
        self._inner = KVConnectorFactory.create_connector(inner, role, kv_cache_config)
        _require_count(self._inner, int(vllm_config.parallel_config.world_size))
        self._named = [inner.kv_transfer_config.kv_connector, inner.kv_transfer_config.kv_connector_module_path]
        self._scheduler = _Scheduler(vllm_config, self._inner, kv_cache_config) if role == KVConnectorRole.SCHEDULER else None
        self._worker = _Worker(vllm_config, self._inner, kv_cache_config) if role == KVConnectorRole.WORKER else None

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    # ---- the class, of which vLLM asks before there is a connector -------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any:
        inner = _inner_config(vllm_config)
        return KVConnectorFactory.get_connector_class(inner.kv_transfer_config).get_required_kvcache_layout(inner)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        transfer = _transfer_of(extra_config)
        found = KVConnectorFactory.get_connector_class(transfer)
        return bool(found.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Of vLLM 0.33 and newer."""
        transfer = _transfer_of(kv_transfer_config.kv_connector_extra_config)
        return bool(KVConnectorFactory.get_connector_class(transfer).supports_sleep_mode(transfer))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> GuardStats:
        """Also in a process that has only what `GuardStats.to_dict` said: the class of the guarded connector makes its part."""
        found = GuardStats({**(data or {}), "guard": dict((data or {}).get("guard", {}))})
        if isinstance(said := found.data.get("guarded"), dict):
            name, module = found.data["connector"]
            transfer = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")
            found.data["guarded"] = KVConnectorFactory.get_connector_class(transfer).build_kv_connector_stats(said)
        return found

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> GuardPromMetrics:
        inner, given = _inner_config(vllm_config), (metric_types, labelnames, per_engine_labelvalues)
        found = KVConnectorFactory.get_connector_class(inner.kv_transfer_config).build_prom_metrics(inner, *given)
        return GuardPromMetrics(found, vllm_config, *given)

    def get_kv_connector_stats(self) -> GuardStats | None:
        """Counts since the last call, of this side of the guard and of the guarded connector; None if nothing was counted."""
        side = self._scheduler or self._worker
        assert side is not None
        counts, side.counts = side.counts, defaultdict(float)
        data: dict[str, Any] = {"guard": dict(counts)} if counts else {}
        if (said := self._inner.get_kv_connector_stats()) is not None:
            data |= {"guarded": said, "connector": self._named}
        return GuardStats(data) if data else None

    # ---- the scheduler ---------------------------------------------------------------------------------------------------

    @property
    def _of_scheduler(self) -> _Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._of_scheduler.manager = kv_cache_manager
        self._inner.bind_kv_cache_manager(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> GuardMetadata:
        return self._of_scheduler.step_metadata(self._inner.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler.ended(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.finished(request, block_ids)

    # ---- the worker ------------------------------------------------------------------------------------------------------

    @property
    def _of_worker(self) -> _Worker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker.register(kv_caches)
        self._inner.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._inner.bind_connector_metadata(connector_metadata.inner)
        self._of_worker.begin(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._inner.clear_connector_metadata()

    def has_connector_metadata(self) -> bool:
        return bool(super().has_connector_metadata())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._inner.handle_preemptions(kv_connector_metadata.inner)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._of_worker.results(self._inner.get_transfer_results(finished_req_ids))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._inner.get_block_ids_with_load_errors()) | self._of_worker.take_wrong_blocks()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._inner.shutdown()


def _forward(name: str) -> Any:
    def call(self: KvbmGuard, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **options)

    return call


def _attribute(name: str) -> Any:
    def get(self: KvbmGuard) -> Any:
        return getattr(self._inner, name)

    return get


# All else of vLLM's base class, loads and saves of layers among them, is the guarded connector's, also in versions with more of it.
for _name in dir(KVConnectorBase_V1):
    if not _name.startswith("_") and _name not in vars(KvbmGuard) and _name != "role":
        _found = vars(KVConnectorBase_V1).get(_name)
        if isinstance(_found, property):
            setattr(KvbmGuard, _name, property(_attribute(_name)))
        elif callable(_found):
            setattr(KvbmGuard, _name, _forward(_name))
KvbmGuard.__abstractmethods__ = frozenset()


def _transfer_of(extra: Any, **usual: Any) -> Any:
    """The configuration of the guarded connector."""
    given = extra.get("guarded")
    if not isinstance(given, dict) or not isinstance(given.get("kv_connector"), str) or given["kv_connector"] == "KvbmGuard":
        raise BindError(
            'kv_connector_extra_config: guarded: expected the configuration of another connector, such as {"kv_connector": '
            f'"NixlConnector"}}, got {given!r:.200}'
        )
    try:
        return KVTransferConfig(**{**usual, **given})
    except (TypeError, ValueError) as error:
        raise BindError(f"kv_connector_extra_config: guarded: {error}") from None


def _inner_config(vllm_config: Any) -> Any:
    """The configuration of vLLM as the guarded connector sees it."""
    transfer = vllm_config.kv_transfer_config
    usual = {name: getattr(transfer, name) for name in ("engine_id", "kv_role", "kv_buffer_device", "kv_load_failure_policy")}
    made = copy.copy(vllm_config)
    made.kv_transfer_config = _transfer_of(transfer.kv_connector_extra_config, **usual)
    return made


def _require_count(inner: Any, workers: int) -> None:
    """Each worker must say that a request has ended: blocks are given back when all have said it, and digested until then."""
    if (count := inner.get_finished_count()) not in (None, workers):
        raise BindError(
            f"kv_connector_extra_config: guarded: {type(inner).__name__}: expected one of whose requests all {workers} workers say "
            f"that they have ended, got one of which {count} do: blocks would be reused while others digest them"
        )


def _port_of(config: Any) -> int:
    return port_of(config, count_of(config.kv_transfer_config, "port", 14700))


class _Scheduler:
    """Notes what the connector loads, and what other engines will load.  It accesses no memory of caches."""

    def __init__(self, config: Any, inner: Any, kv_cache_config: Any) -> None:
        transfer = config.kv_transfer_config
        self._inner = inner
        self.manager: Any = None
        self._host, self._port, self._workers = host_of(transfer), _port_of(config), int(config.parallel_config.world_size)
        self._groups = len(kv_cache_config.kv_cache_groups)
        unguarded = transfer.get_from_extra_config("unguarded", "compute")
        if unguarded not in ("compute", "load"):
            raise BindError(f'kv_connector_extra_config: unguarded: expected "compute" or "load", got {unguarded!r:.100}')
        self._must = unguarded == "compute"
        self._start, self._number = new_start(), 0
        self._metadata = GuardMetadata()
        self._origins: dict[str, tuple[Origin, int, bool]] = {}
        self._loading: dict[str, Any] = {}
        self._ours: set[str] = set()  # requests whose blocks the guard alone holds
        self._failed = FailedLoads()
        self._refused: set[str] = set()
        self.counts: defaultdict[str, float] = defaultdict(float)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """What the connector would load, unless nothing can be compared with it."""
        answer = self._failed.answer(request)
        if answer is not None:
            return answer
        found: tuple[int | None, bool] = self._inner.get_num_new_matched_tokens(request, computed)
        self._origins.pop(request.request_id, None)
        if not found[0]:
            return found
        try:
            origin = Origin.of((request.kv_transfer_params or {}).get(PARAMETER))
            if computed + found[0] > origin.tokens:
                raise BindError(
                    f"the connector would load tokens to {computed + found[0]}, and digests are there to {origin.tokens}"
                )
            if (inputs := inputs_of(request, origin.tokens)) != origin.inputs:
                raise BindError(
                    f"{differing(inputs, origin.inputs)}: the other engine prefilled another prompt; do both have the same chat "
                    "template?"
                )
            if not found[1] and self._groups > 1:
                raise BindError("the connector loads during a step, and layers form several groups: vLLM cannot compute it again")
        except BindError as error:
            if request.request_id not in self._refused:
                self._refused.add(request.request_id)
                self.counts["unguarded"] += 1
                done = "it is computed here" if self._must else "it is loaded, and not compared"
                logger.warning("request %s: %s: %s", printable(str(request.request_id)), done, str(error))
            return (0, False) if self._must else self._failed.defer(found)
        self._origins[request.request_id] = origin, computed, found[1]
        return self._failed.defer(found)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Called when vLLM has allocated blocks for the tokens to load."""
        self._failed.forget(request.request_id)
        noted = self._origins.pop(request.request_id, None)
        if noted is not None and external:
            origin, first, is_async = noted
            tables = tuple(list(table) for table in blocks.get_block_ids())
            self._metadata.checks[request.request_id] = Check(origin, tables, first, first + external, is_async)
            if is_async:
                self._loading[request.request_id] = request
        self._inner.update_state_after_alloc(request, blocks, external)

    def step_metadata(self, inner: Any) -> GuardMetadata:
        """The message for a step."""
        metadata, self._metadata = self._metadata, GuardMetadata()
        metadata.inner = inner
        return metadata

    def ended(self, output: Any) -> None:
        """Transfers have ended on all workers."""
        failing = [self._loading.pop(name) for name in output.finished_recving or () if name in self._loading]
        ours = self._ours & set(output.finished_sending or ())
        self._ours -= ours
        self._inner.update_connector_output(
            replace(output, finished_sending=set(output.finished_sending) - ours) if ours else output
        )
        self._failed.ended(failing, self.manager)

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """As the connector; its parameters for the other engine have the place of the digests."""
        name = request.request_id
        self._failed.forget(name)
        self._origins.pop(name, None)
        self._refused.discard(name)
        if isinstance(self._inner, SupportsHMA):
            found = self._inner.request_finished_all_groups(request, blocks)
        else:
            found = self._inner.request_finished(request, blocks[0])
        is_held, params = found
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        is_loaded = self._loading.pop(name, None) is None
        if not (params or {}).get("do_remote_prefill") or not tokens or not any(blocks) or not is_loaded:
            return is_held, params
        self._number += 1
        key = f"{self._start}/{self._number}"
        self._metadata.takes[name] = Take(key, tuple(list(table) for table in blocks), tokens, not is_held)
        if not is_held:
            self._ours.add(name)
        said = {
            "key": key, "host": self._host, "port": self._port, "workers": self._workers, "tokens": tokens,
            "inputs": inputs_of(request, tokens),
        }  # fmt: skip
        return True, {**params, PARAMETER: said}


class _Worker:
    """Computes digests and compares them, on threads beside the worker's."""

    def __init__(self, config: Any, inner: Any, kv_cache_config: Any) -> None:
        self._config, self._inner, self._kv_cache_config = config, inner, kv_cache_config
        transfer = config.kv_transfer_config
        self._seconds = seconds_of(transfer, "check_seconds", 10.0)
        file = transfer.get_from_extra_config("secret_file", None)
        self._secret = None if file is None else Secret.read(file)
        self._caches: Caches | None = None
        self._keeper: Keeper | None = None
        self._threads = ThreadPoolExecutor(_DIGESTING, "kvbm guard")
        self._waiting = ThreadPoolExecutor(_WAITING, "kvbm guard compares")
        self._local = threading.local()
        self._takes: dict[str, tuple[Take, Future[None]]] = {}
        self._sent: set[str] = set()  # the connector has sent them
        self._checks: dict[str, Check] = {}
        self._comparing: dict[str, Future[Compared]] = {}
        self._wrong_blocks: set[int] = set()
        self._undigested: list[str] = []  # appended by threads
        self.counts: defaultdict[str, float] = defaultdict(float)

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Bind the caches, and listen."""
        self._caches = Caches(self._config, self._kv_cache_config, kv_caches)
        for _, pool in self._caches.groups.values():
            pool.section(h=0).units(1).keys()  # raises PlanError for layouts whose tokens have no digests
        transfer = self._config.kv_transfer_config
        host, port = host_of(transfer), _port_of(self._config) + self._caches.rank
        is_insecure = flag_of(transfer.kv_connector_extra_config, "insecure", False)
        self._keeper = Keeper(host, port, self._seconds, self._secret, is_insecure=is_insecure)
        if self._secret is None:
            logger.warning("kvbm guard: no secret_file: whoever reaches %s:%d can ask for digests of prompts", host, port)

    def begin(self, metadata: GuardMetadata) -> None:
        """Before a step: begin to digest what was computed, and note what is loaded."""
        for name, take in metadata.takes.items():
            self._takes[name] = take, self._threads.submit(self._take, take, self._queued())
        self._checks.update(metadata.checks)

    def _queued(self) -> Any:
        """An event after the GPU's queued work on the blocks; None on the CPU."""
        assert self._caches is not None
        if all(pool.device == "cpu" for _, pool in self._caches.groups.values()):
            return None
        event = sys.modules["torch"].cuda.Event()
        event.record()
        return event

    def _take(self, take: Take, queued: Any) -> None:
        assert self._keeper is not None
        assert self._caches is not None
        try:
            found: Any = {
                name: self._digests(name, span, queued) for name, span in self._caches.spans(take.blocks, take.tokens).items()
            }
        except Exception as error:  # whatever it is, others must not wait for it
            logger.warning("kvbm guard: a request that was computed here has no digests: %s", failed(error))
            self._undigested.append(take.key)
            found = f"it has no digests: {failed(error)}"
        self._keeper.put(take.key, found)

    def _digests(self, name: str, span: Span, queued: Any) -> Kept:
        assert self._caches is not None
        place, pool = self._caches.groups[name]
        return digests_of(place, self._caches.rank, pool, span, self._stream(pool.device), queued)

    def _stream(self, device: str) -> Any:
        """The calling thread's stream, of the lowest priority."""
        if device == "cpu":
            return None
        if not hasattr(self._local, "stream"):
            self._local.stream = sys.modules["torch"].cuda.Stream(device, priority=0)
        return self._local.stream

    def _compare(self, check: Check, queued: Any) -> Compared:
        """Compare a load with the digests of the engine that computed it."""
        assert self._caches is not None
        caches, begin = self._caches, time.monotonic()
        try:
            spans = caches.spans(check.blocks, check.last, check.first)

            def digested() -> dict[str, tuple[Kept, int]]:
                return {
                    name: (self._digests(name, span, queued), caches.groups[name][1].shape.nt)
                    for name, span in spans.items()
                }

            def own() -> dict[str, tuple[Kept, int]]:
                return self._threads.submit(digested).result()

            why = compare(own, check.origin, self._seconds, self._secret, _SETTLE if check.is_async else 0.0, caches.whole)
            what = "differing" if why else "compared"
        except Exception as error:  # no answer is as bad as a wrong one
            what, why = "unanswered", f"it cannot be compared: {failed(error)}"
        return Compared(what, why, time.monotonic() - begin)

    def results(self, found: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """The connector's results, without those that are not digested or not compared yet."""
        self._sent |= found.finished_sending & self._takes.keys()
        found.finished_sending -= self._takes.keys()
        for name, (take, future) in list(self._takes.items()):
            if future.done() and (take.is_ours or name in self._sent):
                del self._takes[name]
                self._sent.discard(name)
                found.finished_sending.add(name)
        during = [(name, self._checks.pop(name)) for name in [*self._checks] if not self._checks[name].is_async]
        waited = [self._waiting.submit(self._compare, check, self._queued()) for _, check in during]
        for (name, check), compared in zip(during, waited, strict=True):  # the step has used it: vLLM must know at its end
            if self._is_wrong(name, compared.result()):
                self._wrong_blocks |= self._blocks_of(check)
        for name in list(found.finished_recving):
            check_of = self._checks.pop(name, None)
            if check_of is not None and name not in found.failed_recving:
                found.finished_recving.discard(name)
                self._comparing[name] = self._waiting.submit(self._compare, check_of, self._queued())
        for name, comparing in list(self._comparing.items()):
            if comparing.done():
                del self._comparing[name]
                found.finished_recving.add(name)
                if self._is_wrong(name, comparing.result()):
                    found.failed_recving.add(name)
        while self._undigested:
            self._undigested.pop()
            self.counts["undigested"] += 1
        return found

    def _is_wrong(self, name: str, compared: Compared) -> bool:
        """Count a comparison, and say in the log what is wrong."""
        self.counts[compared.what] += 1
        self.counts["seconds"] += compared.seconds
        if compared.why:
            kind = self._config.kv_transfer_config.kv_connector_extra_config["guarded"]["kv_connector"]
            logger.warning("request %s: what %s has loaded is not used: %s", printable(name), printable(str(kind)), compared.why)
        return bool(compared.why)

    def _blocks_of(self, check: Check) -> set[int]:
        assert self._caches is not None
        found: set[int] = set()
        for name, span in self._caches.spans(check.blocks, check.last, check.first).items():
            nt = self._caches.groups[name][1].shape.nt
            table = np.asarray(span.table)[span.tokens.start // nt : -(-span.tokens.stop // nt)]
            found |= {int(block) for block in table if block >= 0}
        return found

    def take_wrong_blocks(self) -> set[int]:
        """Blocks of loads during this step that are wrong."""
        found, self._wrong_blocks = self._wrong_blocks, set()
        return found

    def close(self) -> None:
        """End threads and the port."""
        if self._keeper is not None:
            self._keeper.close()
        self._waiting.shutdown(wait=True, cancel_futures=True)
        self._threads.shutdown(wait=True, cancel_futures=True)


