"""`KvbmGuard`: connectors that load wrong, in part, early, late or never; and vLLM's NIXL connector between two engines."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PromCounter
from test_vllm_disaggregated import PLAIN, STOCK, are_right, disaggregated
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

import kvbm
from kvbm import BindError, Pool, Span, reshard
from kvbm.integrations.vllm import guard
from kvbm.integrations.vllm.guard import (
    PARAMETER,
    Check,
    GuardMetadata,
    KvbmGuard,
    Take,
    _require_count,
    _Scheduler,
    _transfer_of,
    _Worker,
)
from kvbm.integrations.vllm.guarding import Origin
from kvbm.integrations.vllm.metrics import GUARD_COUNTERS, ConnectorStats
from ports import free_ports

Models = Callable[[str], Path]
MODEL = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float32")
TOKENS, LIMIT = 30, 60.0


def config(**extra: Any) -> Any:
    given = {"guarded": {"kv_connector": "Other"}, "check_seconds": 5.0, **extra}
    transfer = SimpleNamespace(engine_id="e", kv_connector_extra_config=given, get_from_extra_config=given.get)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(world_size=1, data_parallel_index=0))


# ---- workers -------------------------------------------------------------------------------------------------------------


class Caches:
    """Two groups, in place of those of vLLM: one whose blocks come in order, and one behind a window."""

    rank = 0
    whole = frozenset({"0.0"})

    def __init__(self, nt: int) -> None:
        shape = replace(MODEL, nt=nt)
        pools = [Pool.allocate("nhd" if nt == 4 else "hnd", shape, 20) for _ in range(2)]
        for array in (array for pool in pools for array in pool.arrays):
            array[...] = 0  # the memory may be that of an earlier test
        self.groups = {f"{at}.0": (reshard.vllm(shape, name="e"), pool) for at, pool in enumerate(pools)}
        self.nt = nt
        self.blocks = tuple([*range(1, 2 + (TOKENS - 1) // nt)] for _ in pools)
        for at in range(8 // nt):
            self.blocks[1][at] = 0

    def spans(self, blocks: Any, last: int, first: int = 0) -> dict[str, Span]:
        found = {}
        for at, table in enumerate(blocks):
            begin = next((place for place, block in enumerate(table) if block), len(table)) * self.nt
            ids = np.array(table, np.int64)
            ids[ids == 0] = -1
            found[f"{at}.0"] = Span(ids, range(min(max(begin, first), last), last))
        return found


class Inner:
    """Another connector, whose results the test says."""

    def __init__(self) -> None:
        self.results = KVConnectorTransferResults()


class Side:
    """A worker of an engine with the guard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nt: int, **extra: Any) -> None:
        self.caches = Caches(nt)
        monkeypatch.setattr(guard, "Caches", lambda *_: self.caches)
        self.worker = _Worker(config(port=free_ports(1), **extra), Inner(), None)
        self.worker.register({})
        self.port = self.worker._keeper.port  # type: ignore[union-attr]

    def put(self, first: int = 0, last: int = TOKENS, wrong: int = -1) -> None:
        """Write these tokens of the prompt; one is another one."""
        rng = np.random.default_rng(3)
        values = rng.standard_normal((2, TOKENS, 2, 2, 2, 8)).astype("f4")  # group, token, head, layer, K or V, element
        for at, (_, pool) in enumerate(self.caches.groups.values()):
            plain = Pool.allocate("universal", pool.shape, 20)  # [b] h l o t d
            kvbm.convert(pool, plain, range(20), range(20))
            for token in range(first, last):
                block = self.caches.blocks[at][token // self.caches.nt]
                if block:
                    held = np.asarray(plain.arrays[block]).reshape(2, 2, 2, self.caches.nt, 8)
                    held[:, :, :, token % self.caches.nt] = values[at, token] + (token == wrong)
            kvbm.convert(plain, pool, range(20), range(20))

    def loads(self, origin: Origin, first: int = 0, last: int = TOKENS, *, is_async: bool = True) -> None:
        self.worker.begin(GuardMetadata(checks={"q": Check(origin, self.caches.blocks, first, last, is_async)}))

    def came(self, failed: bool = False, limit: float = LIMIT) -> bool:
        """Whether the load has failed; the connector has said that it has loaded it."""
        said = KVConnectorTransferResults(finished_recving={"q"}, failed_recving={"q"} if failed else set())
        end = time.monotonic() + limit
        while time.monotonic() < end:
            found = self.worker.results(said)
            if found.finished_recving:
                assert found.finished_recving == {"q"} and not found.failed_recving - {"q"}
                return bool(found.failed_recving)
            said = KVConnectorTransferResults()
            threading.Event().wait(0.005)
        raise TimeoutError


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def one(nt: int, **extra: Any) -> Side:
        made.append(Side(monkeypatch, nt, **extra))
        return made[-1]

    yield one
    for each in made:
        each.worker.close()


@pytest.fixture
def both(side: Callable[..., Side]) -> tuple[Side, Side, Origin]:
    """One that has computed the prompt, in blocks of 4, and one that loads it, in blocks of 8."""
    prefill, decode = side(4), side(8)
    prefill.put()
    prefill.worker.begin(GuardMetadata(takes={"r": Take("k", prefill.caches.blocks, TOKENS, False)}))
    return prefill, decode, Origin("k", "127.0.0.1", prefill.port, 1, TOKENS, "")


Both = tuple[Side, Side, Origin]


def counted(side: Side) -> dict[str, float]:
    return {name: count for name, count in side.worker.counts.items() if name != "seconds"}


def test_a_right_load_is_used(both: Both) -> None:
    _, decode, origin = both
    decode.put()
    decode.loads(origin)
    assert not decode.came() and counted(decode) == {"compared": 1}


@pytest.mark.parametrize("what", ["another value", "in part", "not at all", "of another prompt's end"])
def test_a_wrong_load_has_failed(both: Both, what: str, caplog: pytest.LogCaptureFixture) -> None:
    _, decode, origin = both
    if what != "not at all":
        wrong = {"another value": 17, "of another prompt's end": 29}.get(what, -1)
        decode.put(last=20 if what == "in part" else TOKENS, wrong=wrong)
    decode.loads(origin)
    assert decode.came() and counted(decode) == {"differing": 1}
    assert "request q: what Other has loaded is not used: " in caplog.text and "digests of blocks differ" in caplog.text


def test_only_the_loaded_tokens_count(both: Both) -> None:
    """The first blocks are from the prefix cache; the last token is computed here."""
    _, decode, origin = both
    decode.put(8, 29)
    decode.loads(origin, 8, 29)
    assert not decode.came()


def test_who_says_it_too_early_is_given_time(both: Both) -> None:
    _, decode, origin = both
    decode.put(last=20)
    decode.loads(origin)
    timer = threading.Timer(0.1, decode.put)
    timer.start()
    assert not decode.came()
    timer.join()


def test_who_never_says_it_is_waited_for(both: Both) -> None:
    """As without the guard: nothing is compared, and nothing is said."""
    _, decode, origin = both
    decode.loads(origin)
    assert not decode.worker.results(KVConnectorTransferResults()).finished_recving and not decode.worker._comparing


def test_what_has_failed_already_is_passed_on(both: Both) -> None:
    _, decode, origin = both
    decode.loads(origin)
    assert decode.came(failed=True) and not decode.worker.counts


@pytest.mark.parametrize("what", ["another key", "nobody there"])
def test_without_an_answer_a_load_has_failed(both: Both, what: str, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode, origin = both
    decode.put()
    if what == "nobody there":
        prefill.worker._keeper.close()  # type: ignore[union-attr]
    decode.loads(replace(origin, key="none") if what == "another key" else origin)
    assert decode.came() and "it cannot be compared" in caplog.text and counted(decode) == {"unanswered": 1}


@pytest.fixture
def dead() -> Iterator[Origin]:
    """An engine that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        yield Origin("k", "127.0.0.1", there.getsockname()[1], 1, TOKENS, "")


def test_who_waits_for_a_dead_engine_stops_nobody_else(side: Callable[..., Side], dead: Origin) -> None:
    """Neither what was computed here, which others ask for, nor loads from engines that live."""
    prefill, decode = side(4), side(8)
    prefill.put()
    decode.put()
    decode.worker.begin(GuardMetadata(checks={
        f"lost {at}": Check(dead, decode.caches.blocks, 0, TOKENS, is_async=True) for at in range(8)
    }))  # fmt: skip
    decode.worker.results(KVConnectorTransferResults(finished_recving={f"lost {at}" for at in range(8)}))
    begin = time.monotonic()
    for one in (prefill, decode):
        one.worker.begin(GuardMetadata(takes={"r": Take("k", one.caches.blocks, TOKENS, True)}))
    decode.loads(Origin("k", "127.0.0.1", prefill.port, 1, TOKENS, ""))
    assert not decode.came()
    decode.loads(Origin("k", "127.0.0.1", decode.port, 1, TOKENS, ""))  # as a third engine would ask
    assert not decode.came() and time.monotonic() - begin < 4.0  # the others have 5 s


def test_loads_of_a_step_wait_together(side: Callable[..., Side], dead: Origin) -> None:
    decode = side(8, check_seconds=1.0)
    decode.put()
    checks = {f"lost {at}": Check(dead, decode.caches.blocks, 0, TOKENS, is_async=False) for at in range(6)}
    decode.worker.begin(GuardMetadata(checks=checks))
    begin = time.monotonic()
    decode.worker.results(KVConnectorTransferResults())
    assert time.monotonic() - begin < 4.0 and decode.worker.take_wrong_blocks() == {1, 2, 3, 4}


@pytest.mark.parametrize("wrong", [-1, 17])
def test_loads_during_a_step_are_compared_at_its_end(both: Both, wrong: int) -> None:
    _, decode, origin = both
    decode.put(wrong=wrong)
    decode.loads(origin, 8, is_async=False)
    decode.worker.results(KVConnectorTransferResults())
    assert decode.worker.take_wrong_blocks() == (set() if wrong < 0 else {2, 3, 4}) and not decode.worker.take_wrong_blocks()


def test_what_comes_behind_a_step_does_not_make_it_right(both: Both) -> None:
    """Red: a load during a step was given time, as one before it is, but the step had used other bytes."""
    _, decode, origin = both
    decode.put(last=20)
    decode.loads(origin, is_async=False)
    timer = threading.Timer(0.1, decode.put)
    timer.start()
    decode.worker.results(KVConnectorTransferResults())
    timer.join()
    assert decode.worker.take_wrong_blocks()


@pytest.mark.parametrize("is_ours", [True, False])
def test_blocks_are_held_until_they_are_digested(side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    prefill, go = side(4), threading.Event()
    put = prefill.worker._keeper.put  # type: ignore[union-attr]
    monkeypatch.setattr(prefill.worker._keeper, "put", lambda *given: (go.wait(LIMIT), put(*given)))
    prefill.worker.begin(GuardMetadata(takes={"r": Take("k", prefill.caches.blocks, TOKENS, is_ours)}))
    sent = KVConnectorTransferResults(finished_sending=set() if is_ours else {"r"})
    assert not prefill.worker.results(sent).finished_sending
    go.set()
    end = time.monotonic() + LIMIT
    while not (found := prefill.worker.results(KVConnectorTransferResults()).finished_sending):
        assert time.monotonic() < end
    assert found == {"r"} and not prefill.worker.results(KVConnectorTransferResults()).finished_sending


def test_what_cannot_be_digested_is_said(both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode, origin = both
    prefill.worker._takes["r"][1].result(LIMIT)  # that of the fixture
    monkeypatch.setattr(prefill.worker, "_digests", lambda *_: 1 / 0)
    prefill.worker.begin(GuardMetadata(takes={"s": Take("l", prefill.caches.blocks, TOKENS, False)}))
    decode.put()
    decode.loads(replace(origin, key="l"))
    assert decode.came() and "it has no digests: ZeroDivisionError" in caplog.text
    prefill.worker.results(KVConnectorTransferResults())
    assert counted(prefill) == {"undigested": 1} and counted(decode) == {"unanswered": 1}


# ---- the scheduler -------------------------------------------------------------------------------------------------------


class Matching:
    """Another connector in the scheduler."""

    def __init__(self, found: Any = (30, True), said: Any = (True, {"do_remote_prefill": True, "a": 1})) -> None:
        self.found, self.said, self.allocated, self.outputs = found, said, list[int](), list[Any]()

    def get_num_new_matched_tokens(self, *_: Any) -> Any:
        return self.found

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:  # noqa: ARG002
        self.allocated.append(external)

    def request_finished(self, *_: Any) -> Any:
        return self.said

    def update_connector_output(self, output: Any) -> None:
        self.outputs.append(output)


BLOCKS = SimpleNamespace(get_block_ids=lambda: ([1, 2],))


def scheduler_of(inner: Any, groups: int = 1, **extra: Any) -> _Scheduler:
    return _Scheduler(config(host="h", port=7, **extra), inner, SimpleNamespace(kv_cache_groups=[None] * groups))


def request(params: Any = None, tokens: int = 30, computed: int = 0, status: Any = RequestStatus.RUNNING) -> Any:
    return SimpleNamespace(
        request_id="q", kv_transfer_params=params, num_prompt_tokens=tokens, num_computed_tokens=computed, status=status,
        prompt_token_ids=list(range(tokens)),
    )  # fmt: skip


def params() -> dict[str, Any]:
    """What the engine that prefilled says."""
    held, found = scheduler_of(Matching()).finished(request(computed=31), ([1, 2],))
    assert held and found is not None
    return found


def test_what_is_said_of_a_request_that_was_computed() -> None:
    scheduler = scheduler_of(Matching())
    held, found = scheduler.finished(request(computed=31), ([1, 2],))
    take = scheduler.step_metadata("inner").takes["q"]
    assert held and found and found["a"] == 1 and (take.blocks, take.tokens, take.is_ours) == (([1, 2],), 30, False)
    said = found[PARAMETER]
    assert (said["key"], said["host"], said["port"], said["workers"], said["tokens"]) == (take.key, "h", 7, 1, 30)
    assert not scheduler.step_metadata("inner").takes
    assert scheduler_of(Matching(said=(False, None))).finished(request(computed=31), ([1],)) == (False, None)
    assert scheduler_of(Matching(said=(False, {"b": 1}))).finished(request(computed=31), ([1],)) == (False, {"b": 1})


def test_blocks_that_the_connector_does_not_hold_are_held() -> None:
    """And it is not told of them."""
    inner = Matching(said=(False, {"do_remote_prefill": True}))
    scheduler = scheduler_of(inner)
    assert scheduler.finished(request(computed=30), ([1, 2],))[0]
    assert scheduler.step_metadata(None).takes["q"].is_ours
    scheduler.ended(KVConnectorOutput(finished_sending={"q", "s"}))
    assert inner.outputs[0].finished_sending == {"s"}


def test_a_load_is_noted() -> None:
    inner = Matching((22, True))
    scheduler, one = scheduler_of(inner), request({**params()})
    assert scheduler.matched(one, 8) == (22, True)
    scheduler.allocated(one, BLOCKS, 22)
    check = scheduler.step_metadata(None).checks["q"]
    assert (check.first, check.last, check.blocks, check.is_async) == (8, 30, ([1, 2],), True) and inner.allocated == [22]
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.step_metadata(None).checks


@pytest.mark.parametrize("what", ["nothing", "another prompt", "more tokens", "in a step, of several groups"])
@pytest.mark.parametrize("unguarded", ["compute", "load"])
def test_loads_that_cannot_be_compared(what: str, unguarded: str, caplog: pytest.LogCaptureFixture) -> None:
    inner = Matching((31 if what == "more tokens" else 30, not what.startswith("in a step")))
    scheduler, one = scheduler_of(inner, 2, unguarded=unguarded), request({**params()}, 40)
    if what == "nothing":
        del one.kv_transfer_params[PARAMETER]
    if what == "another prompt":
        one.prompt_token_ids[3] = 77
    for _ in range(2):
        assert scheduler.matched(one, 0) == ((0, False) if unguarded == "compute" else inner.found)
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.step_metadata(None).checks and inner.allocated == [0]
    says = {"nothing": "the router must pass all", "another prompt": "tokens: the other engine prefilled another prompt",
            "more tokens": "digests are there to 30"}  # fmt: skip
    assert caplog.text.count(says.get(what, "several groups")) == 1 and scheduler.counts == {"unguarded": 1}


def test_a_failed_load_is_computed_and_not_loaded_again() -> None:
    freed: list[Any] = []
    scheduler, one = scheduler_of(Matching()), request({**params()})
    scheduler.manager = SimpleNamespace(free=freed.append)
    assert scheduler.matched(one, 0) == (30, True)
    scheduler.allocated(one, BLOCKS, 30)
    one.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler.ended(KVConnectorOutput(finished_recving={"q"}))
    assert freed == [one] and [scheduler.matched(one, 0) for _ in range(2)] == [(None, False), (0, False)]


def test_who_is_aborted_while_it_is_loaded_has_no_digests() -> None:
    scheduler, one = scheduler_of(Matching()), request({**params()}, computed=30)
    scheduler.matched(one, 0)
    scheduler.allocated(one, BLOCKS, 30)
    assert PARAMETER not in (scheduler.finished(one, ([1, 2],))[1] or {}) and not scheduler._loading


@pytest.mark.parametrize("guarded", [None, "NixlConnector", {}, {"kv_connector": "KvbmGuard"}, {"kv_connector": "A", "nothing": 1}])
def test_what_is_guarded_must_be_said(guarded: Any) -> None:
    with pytest.raises(BindError, match="kv_connector_extra_config: guarded: "):
        _transfer_of({"guarded": guarded})


@pytest.mark.parametrize(
    ("count", "workers", "is_right"), [(None, 2, True), (2, 2, True), (1, 1, True), (1, 2, False), (4, 2, False)]
)
def test_all_workers_say_that_a_request_has_ended(count: int | None, workers: int, is_right: bool) -> None:
    """Else vLLM frees its blocks after the first one, and others digest what is computed into them."""
    with nullcontext() if is_right else pytest.raises(BindError, match=f"all {workers} workers say .* got one of which {count} do"):
        _require_count(SimpleNamespace(get_finished_count=lambda: count), workers)


def test_all_of_the_interface_is_passed_on() -> None:
    """Also what newer versions have: nothing of vLLM's base class answers in place of the guarded connector."""
    own = {name for name in dir(KVConnectorBase_V1) if not name.startswith("_")} - {"role"}
    assert own <= set(vars(KvbmGuard)), own - set(vars(KvbmGuard))
    made: Any = KvbmGuard.__new__(KvbmGuard)
    made._inner = SimpleNamespace(has_pending_push_work=lambda: "passed", requires_kv_delivery="so", else_where=3)
    assert (made.has_pending_push_work(), made.requires_kv_delivery, made.else_where) == ("passed", "so", 3)


# ---- metrics -------------------------------------------------------------------------------------------------------------


INNER = {"kv_connector": "KvbmConnector", "kv_connector_module_path": "kvbm.integrations.vllm"}


def counting(loaded: int) -> Any:
    """Another connector with counts of its own."""
    return SimpleNamespace(get_kv_connector_stats=lambda: ConnectorStats({"loaded": loaded}) if loaded else None)


def stats_of(inner: Any, worker: Any = None, scheduler: Any = None) -> Any:
    made: Any = KvbmGuard.__new__(KvbmGuard)
    made._inner, made._worker, made._scheduler, made._named = inner, worker, scheduler, list(INNER.values())
    return made.get_kv_connector_stats()


def test_counts_of_both_come_to_prometheus(both: Both) -> None:
    """As vLLM passes them on: of each worker and of the scheduler, added up, as texts to another process, to counters an engine."""
    _, decode, origin = both
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (PromCounter, Gauge, Histogram)}
    transfer = KVTransferConfig(
        kv_connector="KvbmGuard", kv_connector_module_path="kvbm.integrations.vllm", kv_role="kv_both",
        kv_connector_extra_config={"guarded": INNER},
    )  # fmt: skip
    made = KvbmGuard.build_prom_metrics(SimpleNamespace(kv_transfer_config=transfer), types, ["engine"], {0: ["0"], 1: ["1"]})
    decode.put()
    decode.loads(origin)
    assert not decode.came()
    scheduler = scheduler_of(Matching())
    scheduler.matched(request({}), 0)
    stats = stats_of(counting(1), decode.worker).aggregate(stats_of(counting(2), SimpleNamespace(counts={"compared": 2.0})))
    stats = stats.aggregate(stats_of(counting(0), None, scheduler))
    assert stats_of(counting(0), decode.worker) is stats_of(counting(0), None, scheduler) is None
    sent = json.loads(json.dumps(stats.to_dict()))
    more = KvbmGuard.build_kv_connector_stats()
    assert more.is_empty() and not stats.is_empty()
    again = more.aggregate(KvbmGuard.build_kv_connector_stats(sent))
    said = again.reduce()
    assert said["guard_compared_loads"] == 3 and said["guard_unguarded_requests"] == 1 and said["loaded_requests"] == 3
    made.observe(again.to_dict(), 1)
    made.observe({}, 0)
    text = generate_latest(registry).decode()
    assert 'vllm:kvbm_guard_compared_loads_total{engine="1"} 3.0' in text
    assert 'vllm:kvbm_loaded_requests_total{engine="1"} 3.0' in text
    assert all(f"{title}_total{{" in text for title, _ in GUARD_COUNTERS.values())


# ---- two engines ---------------------------------------------------------------------------------------------------------

GUARD = {
    "kv_connector": "KvbmGuard", "kv_connector_module_path": "kvbm.integrations.vllm", "kv_load_failure_policy": "recompute",
}  # fmt: skip


@pytest.mark.parametrize("blocks", [(32, 32), (32, 64)])
def test_nixl(blocks: tuple[int, int], models: Models, tmp_path: Path) -> None:
    """At blocks of one size all is loaded.  At other ones loads fail, and tokens are right.

    Without the guard tokens are wrong there: `test_stock_vllm_is_wrong_where_block_sizes_differ`.  On a GPU, vLLM 0.33 loads the
    right blocks at both.
    """
    is_right = blocks[0] == blocks[1] or torch.cuda.is_available()
    port = free_ports(2)
    found = disaggregated(
        models("llama"), tmp_path, GUARD, PLAIN, blocks, guarded=STOCK, port=port, decode_extra={"port": port + 1}
    )
    assert are_right(found) == [True] * 3
    assert [one["cached"] for one in found] == ([step["length"] for step in PLAIN] if is_right else [0] * 3)
    assert found[0]["log"].count("what NixlConnector has loaded is not used") == (0 if is_right else 3)
