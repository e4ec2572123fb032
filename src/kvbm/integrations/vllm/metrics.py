"""Counters of `KvbmConnector` and of `KvbmGuard` for vLLM's log and its Prometheus endpoint.

Those of offloading are in `offload`, those of its files in `tiered`; those of links outside vLLM in ``link/metrics.py``.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["COUNTERS", "GUARD_COUNTERS", "ConnectorStats", "GuardPromMetrics", "GuardStats", "PromMetrics"]

#: Counter → the metric's name, without the suffix ``_total``, and its help text.  The counts of an engine's workers are added up: a
#: request that two workers load counts twice.
COUNTERS = {
    "loaded": ("vllm:kvbm_loaded_requests", "Requests that came from the engine that prefilled, counted by worker."),
    "failed": ("vllm:kvbm_failed_loads", "Requests that did not come, or not right, counted by worker."),
    "sent": ("vllm:kvbm_sent_requests", "Requests that were prefilled here and that another engine has, counted by worker."),
    "unsent": ("vllm:kvbm_unsent_requests", "Requests that were prefilled here and that no other engine got, counted by worker."),
    "pushed": ("vllm:kvbm_pushed_parts", "Parts of prompts, some layers of each, that were sent while they were computed."),
    "bytes_sent": ("vllm:kvbm_sent_bytes", "Bytes of chunks that were sent."),
    "bytes_received": ("vllm:kvbm_received_bytes", "Bytes of chunks that came and were right."),
    "chunks_sent": ("vllm:kvbm_sent_chunks", "Chunks that were sent; those that were sent again count again."),
    "chunks_received": ("vllm:kvbm_received_chunks", "Chunks that came and were right."),
    "chunks_wrong": ("vllm:kvbm_wrong_chunks", "Chunks that failed their check, and were refused."),
    "stalls": ("vllm:kvbm_stalls", "Rounds in which a chunk waited for a slot of the ring."),
    "seconds": ("vllm:kvbm_transfer_seconds", "Seconds of all sendings and arrivals that have ended."),
}  # fmt: skip


#: The same for the guard.
GUARD_COUNTERS = {
    "compared": ("vllm:kvbm_guard_compared_loads", "Loads with the digests of the engine that prefilled, counted by worker."),
    "differing": ("vllm:kvbm_guard_differing_loads", "Loads with other digests, which are not used, counted by worker."),
    "unanswered": (
        "vllm:kvbm_guard_unanswered_loads", "Loads that could not be compared, and are not used, counted by worker."
    ),
    "unguarded": (
        "vllm:kvbm_guard_unguarded_requests",
        "Requests with a load of which nobody has digests: they are computed, or loaded if the settings say so.",
    ),
    "undigested": (
        "vllm:kvbm_guard_undigested_requests", "Requests that were prefilled here and have no digests, counted by worker."
    ),
    "seconds": ("vllm:kvbm_guard_seconds", "Seconds of all comparisons, from the end of the load on."),
}  # fmt: skip


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed
    """Counts since the last call, by the names of `COUNTERS`, without zeros."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> Any:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, Any]:
        return {COUNTERS[name][0].removeprefix("vllm:kvbm_"): value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class GuardStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of the guard since the last call, by the names of `GUARD_COUNTERS`, and what the guarded connector says.

    ``data`` has ``guard``, and for a connector that says something ``guarded``, its object, and ``connector``, its name and module.
    """

    @property
    def _counts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.data.setdefault("guard", {})
        return found

    def to_dict(self) -> dict[str, Any]:
        guarded = self.data.get("guarded")
        return self.data if guarded is None else {**self.data, "guarded": guarded.to_dict()}

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> Any:
        for name, value in other.data.get("guard", {}).items():
            self._counts[name] = self._counts.get(name, 0) + value
        if (theirs := other.data.get("guarded")) is not None:
            own = self.data.get("guarded")
            self.data["guarded"] = theirs if own is None else own.aggregate(theirs)
            self.data["connector"] = other.data["connector"]
        return self

    def reduce(self) -> dict[str, Any]:
        guarded = self.data.get("guarded")
        found = {GUARD_COUNTERS[name][0].removeprefix("vllm:kvbm_"): value for name, value in self._counts.items()}
        return found if guarded is None or guarded.is_empty() else {**found, **guarded.reduce()}

    def is_empty(self) -> bool:
        guarded = self.data.get("guarded")
        return not self._counts and (guarded is None or bool(guarded.is_empty()))


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter per engine and item of a table."""

    table = COUNTERS

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Counter]] = {}
        for name, (title, what) in self.table.items():
            counter = self._counter_cls(name=title, documentation=what, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)


class GuardPromMetrics(PromMetrics):
    """The counters of the guard; and those of the guarded connector, if it has any."""

    table = GUARD_COUNTERS

    def __init__(self, guarded: Any, *given: Any) -> None:
        super().__init__(*given)
        self._guarded = guarded

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data.get("guard", {}), engine_idx)
        if self._guarded is not None and transfer_stats_data.get("guarded"):
            self._guarded.observe(transfer_stats_data["guarded"], engine_idx)
