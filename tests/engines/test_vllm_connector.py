"""`KvbmConnector`'s two halves with vLLM's classes, and no engine: requests that end otherwise than they should."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

import kvbm
from kvbm import BindError, Pool, Span, reshard, wire
from kvbm.integrations.vllm import connector
from kvbm.integrations.vllm.connector import Hold, Load, Source, Told, _Scheduler, _Worker

LIMIT = 30.0
MODEL = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float32")


def config(name: str, **extra: Any) -> Any:
    given = {"ring_bytes": 1 << 18, "chunk_bytes": 1 << 12, **extra}
    transfer = SimpleNamespace(engine_id=name, kv_port=0, get_from_extra_config=given.get)
    parallel = SimpleNamespace(world_size=1, data_parallel_index=0)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, model_config=SimpleNamespace(model="m"))


# ---- the scheduler -------------------------------------------------------------------------------------------------------

PARAMS = {
    "do_remote_prefill": True, "remote_request_id": "r", "remote_host": "h", "remote_port": 7, "remote_workers": 1,
    "remote_num_tokens": 100,
}  # fmt: skip


def request(params: Any = None, tokens: int = 100, computed: int = 0, status: Any = RequestStatus.RUNNING) -> Any:
    return SimpleNamespace(
        request_id="q", kv_transfer_params=params, num_prompt_tokens=tokens, num_computed_tokens=computed, status=status
    )


def scheduler_of(name: str, *specs: Any, **extra: Any) -> _Scheduler:
    """Of an engine with these groups; one of full attention if there are none."""
    groups = [SimpleNamespace(kv_cache_spec=one) for one in specs or (SimpleNamespace(block_size=16),)]
    return _Scheduler(
        config(name, **extra), SimpleNamespace(kv_cache_groups=groups, transfer_group_ids=tuple(range(len(groups))))
    )


BLOCKS = SimpleNamespace(get_block_ids=lambda: ([1, 2],))


@pytest.mark.parametrize(
    ("params", "local", "count"),
    [({}, 0, 99), ({}, 64, 35), ({}, 99, 0), ({"remote_num_tokens": 50}, 0, 50), ({"remote_num_tokens": 50}, 64, 0)],
)
def test_what_is_to_come(params: dict[str, Any], local: int, count: int) -> None:
    """Never the prompt's last token; once for a request."""
    scheduler, one = scheduler_of("d"), request({**PARAMS, **params})
    assert scheduler.matched(one, local) == (count, count > 0)
    scheduler.allocated(one, BLOCKS, count)
    load = scheduler.told().loads["q"]
    assert (load.first, load.last, load.blocks) == (local, local + count, ([1, 2],) if count else ())
    assert scheduler.matched(one, 0) == (0, False)
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.told().loads


@pytest.mark.parametrize("name", [name for name in PARAMS if name.startswith("remote")])
@pytest.mark.parametrize("value", [None, [], {}, -1, 1.5, True])
def test_parameters_that_are_nonsense_cost_a_prefill(name: str, value: Any) -> None:
    scheduler, one = scheduler_of("d"), request({**PARAMS, name: value})
    assert scheduler.matched(one, 0) == (0, False)
    scheduler.allocated(one, BLOCKS, 0)
    assert scheduler.finished(one, ([1],)) == (False, None) and not scheduler.told().loads


@pytest.mark.parametrize("name", ["remote_request_id", "remote_host"])
def test_names_that_are_too_long_cost_a_prefill(name: str) -> None:
    """They would stand in each message."""
    with pytest.raises(BindError, match=f"{name}: expected at most 1000 characters, got 100000"):
        Source.of({**PARAMS, name: "x" * 100_000})


@pytest.mark.parametrize("value", ["1m", None, 0, -1, float("nan"), float("inf"), True])
def test_seconds_that_are_none(value: Any) -> None:
    for name in ("hold_seconds", "load_seconds"):
        with pytest.raises(BindError, match=f"{name}: expected a number of seconds above 0, got {value!r}"):
            (scheduler_of("p", **{name: value}), _Worker(config("p", **{name: value}), None))


def test_who_is_aborted_before_it_has_blocks_lets_the_other_engine_go() -> None:
    scheduler, one = scheduler_of("d"), request(dict(PARAMS), status=RequestStatus.FINISHED_ABORTED)
    scheduler.matched(one, 0)
    assert scheduler.finished(one, ()) == (False, None)
    load = scheduler.told().loads["q"]
    assert load.source.request == "r" and load.first == load.last == 0


def test_who_was_prefilled_by_the_same_engine_is_in_its_prefix_cache(worker: Any) -> None:
    """A router with one engine for both: nothing is moved, and nothing is held any more."""
    scheduler, prefill = scheduler_of("p"), worker("p")
    held, params = scheduler.finished(request({"do_remote_decode": True}, 100, 100, RequestStatus.FINISHED_STOPPED), ([1],))
    prefill.begin(scheduler.told())
    one = request(params)
    assert held and scheduler.matched(one, 96) == (0, False) and not prefill.results(set()).finished_sending
    scheduler.allocated(one, BLOCKS, 0)
    told = scheduler.told()
    assert told.unheld == ["q"] and not told.loads
    prefill.begin(told)
    assert until(prefill, "finished_sending").finished_sending == {"q"}


def test_who_asks_a_second_time_is_prefilled_here() -> None:
    """Such as the second of n sequences: the other engine sends once, and would be waited for in vain."""
    scheduler = scheduler_of("d")
    for one, count in ((request(dict(PARAMS)), 99), (request(dict(PARAMS)), 0)):
        assert scheduler.matched(one, 0) == (count, count > 0)
        scheduler.allocated(one, BLOCKS, count)
        assert len(scheduler.told().loads) == (count > 0)
    again = request(dict(PARAMS), status=RequestStatus.FINISHED_ABORTED)
    assert scheduler.finished(again, ()) == (False, None) and not scheduler.told().loads
    other = request({**PARAMS, "remote_port": 8})
    assert scheduler.matched(other, 0) == (99, True)


@pytest.mark.parametrize(
    ("kind", "prompt", "first"), [("window", 319, 8), ("window", 300, 6), ("chunk", 320, 8), ("window", 40, 0)]
)
def test_what_the_last_token_of_a_prompt_sees_is_held(kind: str, prompt: int, first: int) -> None:
    """And a block of the other engine as a whole; until it was sent, then the blocks are free."""
    name = {"window": "sliding_window", "chunk": "attention_chunk_size"}[kind]
    spec = SimpleNamespace(block_size=16, **{name: 64})
    full = SimpleNamespace(block_size=16)
    scheduler, pool = scheduler_of("p", full, spec), BlockPool(64, True, 16)
    free = pool.get_num_free_blocks()
    tables = tuple(pool.get_new_blocks(-(-prompt // 16)) for _ in range(2))
    scheduler.manager = SimpleNamespace(block_pool=pool, get_blocks=lambda _: SimpleNamespace(blocks=tables))
    one = request({"do_remote_decode": True}, prompt, prompt, RequestStatus.FINISHED_STOPPED)
    scheduler.allocated(one, BLOCKS, 0)
    scheduler.told()
    before = [block.block_id for block in tables[1]]
    gone = prompt // 64 * 4 if kind == "chunk" else max(0, prompt - 63) // 16  # as vLLM does before it says that it has ended
    pool.free_blocks(tables[1][:gone][::-1])
    tables[1][:gone] = [pool.null_block] * gone
    held, _ = scheduler.finished(one, tuple([block.block_id for block in table] for table in tables))
    assert held
    hold = scheduler.told().holds["q"]
    assert hold.blocks[0] == [block.block_id for block in tables[0]]
    assert hold.blocks[1] == [0] * first + before[first:]
    others = pool.get_new_blocks(pool.get_num_free_blocks())  # nobody else gets what is held
    assert not {block.block_id for block in others} & (set(hold.blocks[0]) | set(before[first:]))
    pool.free_blocks(others)
    scheduler.sent(["q", "another"])
    for table in tables:
        pool.free_blocks([block for block in table if not block.is_null])
    assert pool.get_num_free_blocks() == free and not scheduler.told().holds
    assert not scheduler._seen and not scheduler._kept and not scheduler._prefills


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_what_was_not_prefilled_is_not_held(status: Any) -> None:
    scheduler = scheduler_of("p")
    assert scheduler.finished(request({"do_remote_decode": True}, 100, 50, status), ([1],)) == (False, None)
    assert not scheduler.told().holds


def test_what_is_held_is_the_prompt() -> None:
    """Not what an engine that runs ahead has counted already."""
    scheduler = scheduler_of("p", host="here")
    done = request({"do_remote_decode": True}, 100, 103, RequestStatus.FINISHED_STOPPED)
    held, params = scheduler.finished(done, ([1, 2],))
    told = scheduler.told()
    assert held and Source.of(params) == Source(f"{told.start}/q", "here", 0, 1, 100)
    assert told.holds["q"].tokens == 100 and not scheduler.told().holds


# ---- workers -------------------------------------------------------------------------------------------------------------


class Caches:
    """In place of those of vLLM."""

    rank = 0

    def __init__(self, seed: int) -> None:
        place = reshard.vllm(MODEL, name="e")
        self.pool = Pool.allocate(kvbm.load("vllm/flash_attn_nhd"), place.shape(0), 8)
        for array in self.pool.arrays:
            array[:] = np.random.default_rng(seed).random(array.shape)
        self.groups = {"0": (place, self.pool)}

    def spans(self, blocks: Any, last: int, first: int = 0) -> dict[str, Span]:
        return {"0": Span(blocks[0], range(first, last))}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Worker]]:
    hub, made = wire.Hub(), []
    monkeypatch.setattr(connector.wire, "nixl", lambda name: wire.memory(name, hub))
    monkeypatch.setattr(connector, "_TOLD", 0.2)

    def one(name: str, **extra: Any) -> _Worker:
        found = _Worker(config(name, load_seconds=LIMIT, **extra), None)
        monkeypatch.setattr(connector, "Caches", lambda *_: Caches(len(made)))
        made.append(found)
        found.register({})
        return found

    yield one
    for found in made:
        found.close()
        found._loading.shutdown(wait=True)  # who waits has been told
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("kvbm door", "kvbm load"))]


def source(prefill: _Worker, name: str = "r", start: str = "1") -> Source:
    assert prefill._door is not None
    return Source(f"{start}/{name}", "127.0.0.1", prefill._door.port, 1, 32)


def load(prefill: _Worker, name: str = "r", first: int = 0, last: int = 31) -> Load:
    return Load(source(prefill, name), (list(range(8))[::-1],), first, last)


def hold(seconds: float = 1e3) -> Hold:
    return Hold((list(range(8)),), 32, seconds)


def until(one: _Worker, name: str, finished: frozenset[str] = frozenset()) -> Any:
    """The results with which something has ended."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = one.results(set(finished))
        if getattr(found, name):
            return found
        threading.Event().wait(0.001)
    raise AssertionError(name)


def test_what_was_held_comes(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1", holds={"r": hold()}))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    came = until(decode, "finished_recving")
    assert came.finished_recving == {"q"} and not came.failed_recving
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    mine, theirs = (one._caches.pool.arrays[0].swapaxes(0, 1) for one in (prefill, decode))  # b o t h d
    assert np.array_equal(mine[:7], theirs[::-1][:7]) and np.array_equal(mine[7, :, :3], theirs[0, :, :3])
    assert not decode.results(set()).finished_recving and not prefill.results(set()).finished_sending


def test_what_nobody_asks_for_is_let_go(worker: Any) -> None:
    """And who asks later is told at once."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1", holds={"r": hold(0.0)}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    decode.begin(Told("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"q"}


def test_what_is_not_needed_is_let_go(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1", holds={"r": hold()}))
    decode.begin(Told("2", loads={"q": Load(source(prefill))}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    assert not decode.results(set()).finished_recving  # vLLM does not wait for it


def test_a_second_engine_is_refused(worker: Any) -> None:
    prefill, first, second = worker("p"), worker("d1"), worker("d2")
    prefill.begin(Told("1", holds={"r": hold(), "s": hold()}))
    first.begin(Told("2", loads={"q": load(prefill)}))
    assert not until(first, "finished_recving").failed_recving
    until(prefill, "finished_sending")
    second.begin(Told("3", loads={"q": load(prefill), "q2": load(prefill, "s")}))
    ended: set[str] = set()
    failed: set[str] = set()
    while len(ended) < 2:
        found = until(second, "finished_recving")
        ended, failed = ended | found.finished_recving, failed | found.failed_recving
    assert failed == {"q"}


def test_a_name_may_come_again(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    for _ in range(2):
        prefill.begin(Told("1", holds={"r": hold()}))
        decode.begin(Told("2", loads={"q": load(prefill)}))
        assert not until(decode, "finished_recving").failed_recving
        until(prefill, "finished_sending")


def test_each_prefills_for_the_other(worker: Any) -> None:
    """One link for both ways, whoever asked first."""
    first, second = worker("a"), worker("b")
    for number, (prefill, decode) in enumerate([(first, second), (second, first), (first, second)]):
        prefill.begin(Told("1", holds={f"r{number}": hold()}))
        decode.begin(Told("1", loads={"q": load(prefill, f"r{number}")}))
        assert not until(decode, "finished_recving").failed_recving
        until(prefill, "finished_sending")


def test_what_was_held_before_a_restart_is_refused_at_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for it would keep all others waiting."""
    monkeypatch.setattr(connector, "_TOLD", LIMIT)
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("2", holds={"r": hold()}))
    stale = Load(source(prefill), (list(range(8)),), 0, 31)
    fresh = Load(source(prefill, start="2"), stale.blocks, 0, 31)
    started = time.monotonic()
    decode.begin(Told("3", loads={"before": stale, "after": fresh}))
    ended: set[str] = set()
    failed: set[str] = set()
    while len(ended) < 2:
        found = until(decode, "finished_recving")
        ended, failed = ended | found.finished_recving, failed | found.failed_recving
    assert failed == {"before"} and time.monotonic() - started < LIMIT / 2


def test_what_is_not_held_fails(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1"))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"q"}


def test_more_than_is_held_fails_on_both_sides(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1", holds={"r": Hold((list(range(8)),), 16, 1e3)}))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert until(prefill, "finished_sending").finished_sending == {"r"}


def test_a_request_that_is_aborted_while_it_is_loaded_ends(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given back once nothing writes them any more."""
    prefill, decode = worker("p"), worker("d")
    monkeypatch.setattr(prefill._caches, "spans", lambda *_: {})  # it sends nothing
    prefill.begin(Told("1", holds={"r": hold()}))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    until(prefill, "finished_sending")
    assert not decode.results(set()).finished_recving
    assert until(decode, "finished_recving", frozenset({"q"})).failed_recving == {"q"}


def test_a_request_that_is_aborted_while_it_is_asked_for_ends(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though vLLM says so once, and before anything was on its way."""
    prefill, decode = worker("p"), worker("d")
    asked, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(connector.Visit, "want", lambda *_: (asked.set(), goes_on.wait(LIMIT)))  # and nothing is sent
    prefill.begin(Told("1"))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    assert asked.wait(LIMIT) and not decode.results({"q"}).finished_recving
    goes_on.set()
    started = time.monotonic()
    assert until(decode, "finished_recving").finished_recving == {"q"} and time.monotonic() - started < LIMIT / 2
    assert not decode._asking and not decode._arrivals


def test_the_engine_that_prefills_ends(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1", holds={"r": hold()}))
    one = load(prefill)
    prefill.close()
    decode.begin(Told("2", loads={"q": one}))
    assert until(decode, "finished_recving").failed_recving == {"q"}


# ---- metrics -------------------------------------------------------------------------------------------------------------


def test_what_is_counted_comes_to_prometheus(worker: Any) -> None:
    """As vLLM passes it on: of each worker since the last step, added up, as a dict to another process, to counters an engine."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from kvbm.integrations.vllm.metrics import COUNTERS

    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    made = connector.KvbmConnector.build_prom_metrics(
        config("p"), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    prefill, decode = worker("p"), worker("d")
    assert prefill.take_stats() is None
    prefill.begin(Told("1", holds={"r": hold(), "s": hold(0.01)}))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").finished_recving == {"q"}
    ended: set[str] = set()
    while ended != {"r", "s"}:
        ended |= until(prefill, "finished_sending").finished_sending
    sums = {}
    for engine, one in enumerate((prefill, decode)):
        taken = one.take_stats()
        more = connector.KvbmConnector.build_kv_connector_stats({})
        assert more.is_empty()
        stats = more.aggregate(connector.KvbmConnector.build_kv_connector_stats(dict(taken.data)))
        assert set(stats.reduce()) == {COUNTERS[name][0].removeprefix("vllm:kvbm_") for name in stats.data}
        made.observe(stats.to_dict(), engine)
        sums[engine] = stats.data
        again = one.take_stats()
        assert again is None or set(again.data) <= {"seconds"}  # they were told
    assert (sums[0]["sent"], sums[0]["unsent"], sums[1]["loaded"]) == (1, 1, 1)
    assert sums[0]["bytes_sent"] == sums[1]["bytes_received"] > 0 and sums[0]["chunks_sent"] == sums[1]["chunks_received"]
    assert "failed" not in sums[1] and "chunks_wrong" not in sums[1]
    text = generate_latest(registry).decode()
    assert 'vllm:kvbm_sent_requests_total{engine="0",model_name="m"} 1.0' in text
    assert f'vllm:kvbm_received_bytes_total{{engine="1",model_name="m"}} {float(sums[1]["bytes_received"])}' in text
    assert all(f"{title}_total{{" in text for title, _ in COUNTERS.values())


def test_a_load_that_fails_is_counted(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(Told("1"))
    decode.begin(Told("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert decode.take_stats().data["failed"] == 1


def test_the_dashboard_shows_what_vllm_exports() -> None:
    """Its names that are vLLM's own, and those of the offload worker, with vLLM's own definitions."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import get_connector_metric_definitions

    from kvbm.integrations.vllm.metrics import COUNTERS
    from kvbm.integrations.vllm.offload import KvbmOffloadingSpec

    board = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "grafana.json"
    shown = set(re.findall(r"vllm:kv\w+(?=\{)", board.read_text(encoding="utf-8")))
    own = {*get_connector_metric_definitions(), *KvbmOffloadingSpec.build_metric_definitions({})}
    assert len(shown) == 23
    assert {name.removesuffix("_total") for name in shown} <= own | {title for title, _ in COUNTERS.values()}
