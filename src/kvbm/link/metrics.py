"""Metrics of links for ``prometheus_client``: the counters of `Link.stats`, slots of rings, and running transfers.

>>> from prometheus_client import REGISTRY, start_http_server  # doctest: +SKIP
>>> REGISTRY.register(metrics.Links([endpoint]))  # doctest: +SKIP
>>> start_http_server(9400)  # doctest: +SKIP
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import BindError, MissingPackageError

if TYPE_CHECKING:
    from .endpoint import Endpoint

__all__ = ["Links"]

#: Key of `Link.stats` → the metric's name, without the suffix ``_total``, and its help text.
_COUNTERS = {
    "bytes_sent": ("kvbm_link_sent_bytes", "Bytes of chunks that were sent, trailers included.  Not those that peers copied."),
    "bytes_received": ("kvbm_link_received_bytes", "Bytes that came and were right: of chunks, and of direct copies."),
    "chunks_sent": ("kvbm_link_sent_chunks", "Chunks that were sent; those that were sent again count again."),
    "chunks_received": ("kvbm_link_received_chunks", "Chunks that came and were right."),
    "chunks_wrong": ("kvbm_link_wrong_chunks", "Chunks that came wrong, and were refused."),
    "notes_again": ("kvbm_link_repeated_notes", "Notes that were said again, as no answer came."),
    "notes_wrong": ("kvbm_link_wrong_notes", "Notes that were none, or said what cannot be."),
    "chunks_mapped": ("kvbm_link_mapped_chunks", "Chunks that were packed straight into memory of a peer on this host."),
    "pulls": ("kvbm_link_pulls", "Messages that were copied straight out of the pool of a peer on this host."),
    "pulls_wrong": ("kvbm_link_wrong_pulls", "Such copies whose digest was not the peer's; they were made again."),
    "stalls": ("kvbm_link_stalls", "Rounds in which a chunk waited for a slot of the ring."),
    "sendings": ("kvbm_link_sendings", "Calls of send and offer."),
    "arrivals": ("kvbm_link_arrivals", "Calls of receive and fetch."),
    "failed": ("kvbm_link_failed_transfers", "Sendings and arrivals that failed."),
    "seconds": ("kvbm_link_transfer_seconds", "Seconds of all sendings and arrivals that have ended."),
}


class Links:
    """A collector of endpoints' metrics, for a registry of ``prometheus_client``.

    Counters of links have the labels ``engine``, ``rank`` and ``peer_engine``.  Metrics of rings and threads have the labels
    ``engine`` and ``rank``.  The counts of links with the same labels are added up, including closed links, so counters never
    decrease.

    Parameters
    ----------
    endpoints : iterable of Endpoint
        The endpoints to report.  Links that are created later are reported, too.

    Raises
    ------
    MissingPackageError
        ``prometheus_client`` is not installed.
    """

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise MissingPackageError(
                f"kvbm.reshard.metrics needs prometheus_client ({error}): pip install 'kvbm-layouts[metrics]'"
            ) from None
        self._core: Any = core
        self._lock = threading.Lock()
        self._endpoints: list[Endpoint] = []
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        """Add an endpoint.

        Raises
        ------
        BindError
            The endpoint has already been added.
        """
        with self._lock:
            if any(one is endpoint for one in self._endpoints):
                raise BindError(f"{endpoint!r} is told of already: its figures would count twice")
            self._endpoints.append(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Remove an endpoint.  Does nothing if it was not added."""
        with self._lock:
            self._endpoints = [one for one in self._endpoints if one is not endpoint]

    def describe(self) -> Iterable[Any]:
        """The metrics without samples.  A registry calls it on registration, so that it need not read the endpoints."""
        return self._families(())

    def collect(self) -> Iterable[Any]:
        """The current values of all metrics, in the form of ``prometheus_client``."""
        with self._lock:
            endpoints = tuple(self._endpoints)
        return self._families(endpoints)

    def _families(self, endpoints: Iterable[Endpoint]) -> Iterator[Any]:
        counts: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _COUNTERS}
        under_way: Counter[tuple[str, ...]] = Counter()
        slots: Counter[tuple[str, ...]] = Counter()
        used: Counter[tuple[str, ...]] = Counter()
        for endpoint in endpoints:
            mine = endpoint.engine, str(endpoint.rank)
            for engine, found in endpoint.stats().items():
                for name, value in found.items():
                    counts[name][*mine, engine] += value  # type: ignore[assignment]
                under_way[*mine, engine] += 0
            for link in endpoint.links:
                under_way[*mine, link.engine] += len(link.handles)
            ring = endpoint.ring
            for way, all_of_them in (("send", ring.sends), ("receive", ring.takes)):
                free, kept = ring.free(sends=way == "send"), 0 if way == "send" else len(ring.quarantined)
                slots[*mine, way, "free"] += free
                slots[*mine, way, "quarantined"] += kept
                slots[*mine, way, "used"] += max(all_of_them - free - kept, 0)
            used[mine] += endpoint.cpu_seconds  # type: ignore[assignment]
        of_engine, of_link = ("engine", "rank"), ("engine", "rank", "peer_engine")
        counter, gauge = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        for name, (title, what) in _COUNTERS.items():
            yield _filled(counter(title, what, labels=of_link), counts[name])
        yield _filled(
            gauge("kvbm_link_transfers", "Sendings and arrivals that are under way.", labels=of_link), under_way
        )
        what = "Slots of the ring; a lost peer may still write to quarantined ones."
        yield _filled(gauge("kvbm_ring_slots", what, labels=(*of_engine, "direction", "state")), slots)
        what = "Processor time of the endpoint's thread; on hosts it packs and unpacks chunks, too."
        yield _filled(counter("kvbm_endpoint_cpu_seconds", what, labels=of_engine), used)


def _filled(family: Any, values: Counter[tuple[str, ...]]) -> Any:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
