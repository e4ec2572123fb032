"""Metrics of links: a registry of prometheus_client reports the counts of the links."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm import BindError, KvbmError
from kvbm.link.metrics import _COUNTERS, Links
from linking import Linked, ended, plain_case, until

prometheus = pytest.importorskip("prometheus_client")


@pytest.fixture(scope="module")
def linked() -> Iterator[Linked]:
    with Linked(plain_case()) as found:
        assert not any(ended(found.begin()))
        found.require_slots()
        until(lambda: not any(link.handles for side in found.links for link in side), "no link counts one of them any more")
        yield found


def told(links: Links) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples that Prometheus reads, by name and labels; each occurs once."""
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus.CollectorRegistry()
    registry.register(links)
    text = prometheus.generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}
    assert len(found) == len(samples), "a series is there twice: Prometheus refuses all of it"
    return found


def labels(end: Any, **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"engine": end.engine, "rank": str(end.rank), **more}.items()))


def test_all_that_links_count_is_told(linked: Linked) -> None:
    """All counts of links are exported, under names that end in the unit or in the counted thing."""
    assert set(_COUNTERS) == set(linked.links[0][0].stats())
    names = [name for name, _ in _COUNTERS.values()]
    assert len(set(names)) == len(names) and all(name.startswith("kvbm_link_") for name in names)
    assert [name for name in names if "bytes" in name or "second" in name] == [
        name for name in names if name.endswith(("_bytes", "_seconds"))
    ]


def test_figures_are_those_of_the_links(linked: Linked) -> None:
    found = told(Links(linked.all_ends))
    for side, ends in enumerate(linked.ends):
        for end, link in zip(ends, linked.links[side], strict=True):
            key = labels(end, peer_engine=("decode", "prefill")[side])
            for name, value in link.stats().items():
                assert found[f"{_COUNTERS[name][0]}_total", key] == value, name
            assert found["kvbm_link_transfers", key] == 0
            assert 0 < found["kvbm_endpoint_cpu_seconds_total", labels(end)] <= end.cpu_seconds
    assert sum(value for (name, _), value in found.items() if name == "kvbm_link_sent_bytes_total") > 0


def test_slots_add_up(linked: Linked) -> None:
    end = linked.ends[1][0]
    slot = end.ring.take(sends=False)
    assert slot is not None
    end.ring.quarantined.add(("late", slot))
    try:
        found = told(Links([end]))
    finally:
        end.ring.quarantined.clear()
        end.ring.give(slot)
    for way, total in (("send", end.ring.sends), ("receive", end.ring.takes)):
        states = {
            name: found["kvbm_ring_slots", labels(end, direction=way, state=name)]
            for name in ("free", "used", "quarantined")
        }
        assert sum(states.values()) == total
        assert states["quarantined"] == (way == "receive") and states["used"] == 0


def test_links_of_the_same_labels_are_added_up() -> None:
    """A restarted engine has the same name: one series counts both starts."""
    ring = SimpleNamespace(sends=2, takes=2, free=lambda **_: 2, quarantined=set())
    ends: list[Any] = [
        SimpleNamespace(
            engine="prefill", rank=1, ring=ring, cpu_seconds=0.5, links=[SimpleNamespace(engine="decode", handles=(1,) * n)],
            stats=lambda n=n: {"decode": dict.fromkeys(_COUNTERS, n)},
        ) for n in (3, 4)
    ]  # fmt: skip
    key = labels(ends[0], peer_engine="decode")
    found = told(Links(ends))
    assert {found[f"{name}_total", key] for name, _ in _COUNTERS.values()} == {7.0}
    assert found["kvbm_link_transfers", key] == 7


def test_endpoints_come_and_go(linked: Linked) -> None:
    first, *others = linked.all_ends
    links = Links([first])
    with pytest.raises(BindError, match="already"):
        links.add(first)
    before = told(links)
    links.add(others[0])
    assert len(told(links)) > len(before)
    links.remove(others[0])
    links.remove(others[0])
    assert set(told(links)) == set(before)


def test_a_registry_that_describes_reads_no_endpoint() -> None:
    class Closed:
        @property
        def links(self) -> Any:
            raise AssertionError

    registry = prometheus.CollectorRegistry(auto_describe=True)
    end: Any = Closed()
    registry.register(Links([end]))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Links())


def test_an_endpoint_that_is_closed_keeps_its_figures() -> None:
    with Linked(plain_case()) as found:
        assert not any(ended(found.begin()))
        links = Links(found.all_ends)
        before = told(links)
    after = told(links)
    assert set(after) == set(before)
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(KvbmError, match=r"needs prometheus_client .*pip install 'kvbm-layouts\[metrics\]'"):
        Links()
