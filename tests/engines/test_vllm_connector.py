"""`KvbmConnector`'s two halves with vLLM's classes, and no engine: requests that end otherwise than they should."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.request import RequestStatus

import cast_oracle
import kvbm
from kvbm import BindError, KvbmError, Pool, Span, reshard, wire
from kvbm.integrations.vllm import caches, connector, holding
from kvbm.integrations.vllm.connector import _Worker
from kvbm.integrations.vllm.holding import Hold, Push
from kvbm.integrations.vllm.identity import inputs_of
from kvbm.integrations.vllm.meetings import Visit, Want
from kvbm.integrations.vllm.scheduling import Load, Scheduler, Source, StepMetadata

LIMIT = 30.0
MODEL = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype="float32")


def config(name: str, **extra: Any) -> Any:
    given = {"ring_bytes": 1 << 18, "chunk_bytes": 1 << 12, **extra}
    transfer = SimpleNamespace(
        engine_id=name, kv_port=0, kv_connector_extra_config=given, get_from_extra_config=given.get
    )
    parallel = SimpleNamespace(world_size=1, data_parallel_index=0)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, model_config=SimpleNamespace(model="m"))


# ---- the scheduler -------------------------------------------------------------------------------------------------------

PARAMS = {
    "do_remote_prefill": True, "remote_request_id": "r", "remote_host": "h", "remote_port": 7, "remote_workers": 1,
    "remote_num_tokens": 100,
}  # fmt: skip


def request(params: Any = None, tokens: int = 100, computed: int = 0, status: Any = RequestStatus.RUNNING) -> Any:
    """Of the tokens 0, 1, …; parameters for a load have the hash of as many as the other engine holds, if they are right."""
    found = SimpleNamespace(
        request_id="q", kv_transfer_params=params, num_prompt_tokens=tokens, num_computed_tokens=computed, status=status,
        prompt_token_ids=list(range(tokens)),
    )  # fmt: skip
    if params and type(count := params.get("remote_num_tokens")) is int:
        params.setdefault("remote_inputs", inputs_of(found, count))
    return found


#: The router's name of a request, and what stands behind it in the name of both engines.
PUSHED = f"push/x#{inputs_of(request(), 100)}"


def scheduler_of(name: str, *specs: Any, **extra: Any) -> Scheduler:
    """Of an engine with these groups; one of full attention if there are none."""
    groups = [SimpleNamespace(kv_cache_spec=one) for one in specs or (SimpleNamespace(block_size=16),)]
    return Scheduler(
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
    load = scheduler.step_metadata().loads["q"]
    assert (load.first, load.last, load.blocks) == (local, local + count, ([1, 2],) if count else ())
    assert scheduler.matched(one, 0) == (0, False)
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.step_metadata().loads


@pytest.mark.parametrize("name", [name for name in PARAMS if name.startswith("remote")])
@pytest.mark.parametrize("value", [None, [], {}, -1, 1.5, True])
def test_parameters_that_are_nonsense_cost_a_prefill(name: str, value: Any) -> None:
    scheduler, one = scheduler_of("d"), request({**PARAMS, name: value})
    assert scheduler.matched(one, 0) == (0, False)
    scheduler.allocated(one, BLOCKS, 0)
    assert scheduler.finished(one, ([1],)) == (False, None) and not scheduler.step_metadata().loads


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


@pytest.mark.parametrize("value", [None, 7, "", ["h"]])
def test_hosts_that_are_none(value: Any) -> None:
    with pytest.raises(BindError, match="kv_connector_extra_config: host: expected an address of this machine, got"):
        scheduler_of("p", host=value)


def test_who_is_aborted_before_it_has_blocks_lets_the_other_engine_go() -> None:
    scheduler, one = scheduler_of("d"), request(dict(PARAMS), status=RequestStatus.FINISHED_ABORTED)
    scheduler.matched(one, 0)
    assert scheduler.finished(one, ()) == (False, None)
    load = scheduler.step_metadata().loads["q"]
    assert load.source.request == "r" and load.first == load.last == 0


@pytest.mark.parametrize(
    "change", [{"prompt_token_ids": [*range(98), 7, 99]}, {"prompt_token_ids": [0]}, {"lora_request": SimpleNamespace(
        lora_name="a", lora_path="/none")}],
)  # fmt: skip
@pytest.mark.parametrize("number", [99, 100])
def test_another_prompt_than_was_prefilled_is_refused_and_released(
    change: dict[str, Any], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as of two chat templates, or of a router that mixes two requests up: the caches of other tokens were used."""
    prefill, scheduler = scheduler_of("p"), scheduler_of("d")
    held, params = prefill.finished(request({"do_remote_decode": True}, 100, number, RequestStatus.FINISHED_STOPPED), ([1],))
    right, wrong = request(dict(params)), request(dict(params))
    vars(wrong).update(change)
    assert held and scheduler.matched(right, 0) == (99, True)
    scheduler = scheduler_of("d")
    assert scheduler.matched(wrong, 0) == (0, False)
    assert re.search(r"q: it is prefilled here: remote_inputs: [a-z, ]+: expected the hash.*template", caplog.text)
    load = scheduler.step_metadata().loads["q"]
    assert (load.source.request, load.first, load.last) == (params["remote_request_id"], 0, 0)
    scheduler.allocated(wrong, BLOCKS, 0)
    assert scheduler.finished(wrong, ([1],)) == (False, None)
    assert not scheduler.step_metadata().loads and not scheduler._inputs and not prefill._inputs


def test_a_request_that_the_router_named_is_found_by_its_prompt_only() -> None:
    one, other = running(), running()
    other.prompt_token_ids[3] = 77
    names = []
    for each in (one, other):
        scheduler = of_prefill()
        scheduler.allocated(each, BLOCKS, 0)
        names += [push.name for push in scheduler.step_metadata({"q": 64}).pushes.values()]
    assert names[0] == PUSHED != names[1]


def test_without_a_hash_of_the_prompt_it_is_prefilled_here() -> None:
    one = request(dict(PARAMS))
    del one.kv_transfer_params["remote_inputs"]
    assert scheduler_of("d").matched(one, 0) == (0, False)


def test_who_was_prefilled_by_the_same_engine_is_in_its_prefix_cache(worker: Any) -> None:
    """A router with one engine for both: nothing is moved, and nothing is held any more."""
    scheduler, prefill = scheduler_of("p"), worker("p")
    held, params = scheduler.finished(request({"do_remote_decode": True}, 100, 100, RequestStatus.FINISHED_STOPPED), ([1],))
    prefill.begin(scheduler.step_metadata())
    one = request(params)
    assert held and scheduler.matched(one, 96) == (0, False) and not prefill.results(set()).finished_sending
    scheduler.allocated(one, BLOCKS, 0)
    metadata = scheduler.step_metadata()
    assert metadata.unheld == ["q"] and not metadata.loads
    prefill.begin(metadata)
    assert until(prefill, "finished_sending").finished_sending == {"q"}


@pytest.mark.parametrize("name", [*({"remote_request_id": name} for name in ("r", "a/1", "a/1/")), {"transfer_id": "x"}])
def test_names_that_are_none_of_this_engine_itself_cost_a_prefill(name: dict[str, Any]) -> None:
    """With its id, so that nothing is moved: they ended the engine."""
    scheduler = scheduler_of("p")
    params = {key: value for key, value in PARAMS.items() if key != "remote_request_id"}
    one = request({**params, "remote_engine_id": "p", **name})
    assert scheduler.matched(one, 0) == (0, False)
    scheduler.allocated(one, BLOCKS, 0)
    metadata = scheduler.step_metadata()
    assert not metadata.unheld and not metadata.loads


def test_who_asks_a_second_time_is_prefilled_here() -> None:
    """Such as the second of n sequences: the other engine sends once, and would be waited for in vain."""
    scheduler = scheduler_of("d")
    for one, count in ((request(dict(PARAMS)), 99), (request(dict(PARAMS)), 0)):
        assert scheduler.matched(one, 0) == (count, count > 0)
        scheduler.allocated(one, BLOCKS, count)
        assert len(scheduler.step_metadata().loads) == (count > 0)
    again = request(dict(PARAMS), status=RequestStatus.FINISHED_ABORTED)
    assert scheduler.finished(again, ()) == (False, None) and not scheduler.step_metadata().loads
    other = request({**PARAMS, "remote_port": 8})
    assert scheduler.matched(other, 0) == (99, True)


def test_states_are_refused() -> None:
    """Before anything is bound, and with the way out."""
    attention = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.float32)
    state = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))
    compressed = SimpleNamespace(num_kv_heads=1, tokens_per_state=4)
    for held, why in ((state, "MambaSpec: a state per sequence"), (compressed, "several tokens share a state")):
        made = [SimpleNamespace(kv_cache_spec=one, layer_names=[f"l.{at}"]) for at, one in enumerate((attention, held))]
        with pytest.raises(BindError, match=rf"group 1, layer 'l\.1': .*{why}: .*in one engine, where KvbmOffloadingConnector"):
            caches.Caches(None, SimpleNamespace(kv_cache_groups=made), {})


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
    scheduler.step_metadata()
    before = [block.block_id for block in tables[1]]
    gone = prompt // 64 * 4 if kind == "chunk" else max(0, prompt - 63) // 16  # as vLLM does before it says that it has ended
    pool.free_blocks(tables[1][:gone][::-1])
    tables[1][:gone] = [pool.null_block] * gone
    held, _ = scheduler.finished(one, tuple([block.block_id for block in table] for table in tables))
    assert held
    hold = scheduler.step_metadata().holds["q"]
    assert hold.blocks[0] == [block.block_id for block in tables[0]]
    assert hold.blocks[1] == [0] * first + before[first:]
    others = pool.get_new_blocks(pool.get_num_free_blocks())  # nobody else gets what is held
    assert not {block.block_id for block in others} & (set(hold.blocks[0]) | set(before[first:]))
    pool.free_blocks(others)
    scheduler.sent(["q", "another"])
    for table in tables:
        pool.free_blocks([block for block in table if not block.is_null])
    assert pool.get_num_free_blocks() == free and not scheduler.step_metadata().holds
    assert not scheduler._seen and not scheduler._kept and not scheduler._prefills


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_what_was_not_prefilled_is_not_held(status: Any) -> None:
    scheduler = scheduler_of("p")
    assert scheduler.finished(request({"do_remote_decode": True}, 100, 50, status), ([1],)) == (False, None)
    assert not scheduler.step_metadata().holds


def test_what_is_held_is_the_prompt() -> None:
    """Not what an engine that runs ahead has counted already."""
    scheduler = scheduler_of("p", host="here")
    done = request({"do_remote_decode": True}, 100, 103, RequestStatus.FINISHED_STOPPED)
    held, params = scheduler.finished(done, ([1, 2],))
    metadata = scheduler.step_metadata()
    assert held and Source.of(params) == Source(f"{metadata.start}/1/q", "here", 0, 1, 100)
    assert metadata.holds["q"].tokens == 100 and not scheduler.step_metadata().holds


# ---- workers -------------------------------------------------------------------------------------------------------------


class Caches:
    """In place of those of vLLM."""

    rank = 0
    whole = frozenset({"0"})

    def __init__(self, seed: int, dtype: str) -> None:
        self.layers = {f"layer.{number}": number for number in range(MODEL.nl)}
        place = reshard.vllm(dataclasses.replace(MODEL, dtype=dtype), name="e")
        self.pool = Pool.allocate(kvbm.load("vllm/flash_attn_nhd"), place.shape(0), 8)
        for array in self.pool.arrays:
            array[:] = np.random.default_rng(seed).random(array.shape).astype(array.dtype)
        self.groups = {"0": (place, self.pool)}

    def spans(self, blocks: Any, last: int, first: int = 0, begins: Any = None) -> dict[str, Span]:  # noqa: ARG002
        return {"0": Span(blocks[0], range(first, last))}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Worker]]:
    hub, made = wire.Hub(), []
    monkeypatch.setattr(connector.wire, "nixl", lambda name: wire.memory(name, hub))

    def one(name: str, dtype: str = "float32", **extra: Any) -> _Worker:
        found = _Worker(config(name, load_seconds=LIMIT, **extra), None)
        monkeypatch.setattr(connector, "Caches", lambda *_: Caches(len(made), dtype))
        made.append(found)
        found.register({})
        return found

    yield one
    for found in made:
        found.close()
        for visit in found._visits.values():
            visit._waiter.shutdown(wait=True)  # who waits has been metadata
    for thread in threading.enumerate():  # they end when their connections do, which nobody waits for
        if thread.name.startswith(("kvbm door", "kvbm load")):
            thread.join(LIMIT)
            assert not thread.is_alive(), thread.name


def source(prefill: _Worker, name: str = "r", start: str = "1", number: int = 0) -> Source:
    assert prefill._door is not None
    return Source(f"{start}/{number}/{name}", "127.0.0.1", prefill._door.port, 1, 32)


def load(prefill: _Worker, name: str = "r", first: int = 0, last: int = 31, number: int = 0) -> Load:
    return Load(source(prefill, name, number=number), (list(range(8))[::-1],), first, last)


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
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    came = until(decode, "finished_recving")
    assert came.finished_recving == {"q"} and not came.failed_recving
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    mine, theirs = (one._caches.pool.arrays[0].swapaxes(0, 1) for one in (prefill, decode))  # b o t h d
    assert np.array_equal(mine[:7], theirs[::-1][:7]) and np.array_equal(mine[7, :, :3], theirs[0, :, :3])
    assert not decode.results(set()).finished_recving and not prefill.results(set()).finished_sending


FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("dtypes", [("float32", FP8), (FP8, "float32")])
def test_engines_with_other_formats_meet_if_both_say_cast(worker: Any, dtypes: tuple[str, str]) -> None:
    prefill, decode = (worker(name, dtype, cast={"k": [0.5, 0.25], "v": 0.125}) for name, dtype in zip("pd", dtypes, strict=True))
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    came = until(decode, "finished_recving")
    assert came.finished_recving == {"q"} and not came.failed_recving
    arrays = zip((0.5, 0.25), prefill._caches.pool.arrays, decode._caches.pool.arrays, strict=True)
    for (of_k, mine, theirs), (half, scale) in ((one, of) for one in arrays for of in ((0, one[0]), (1, 0.125))):
        ours, got = mine[half][:7], theirs[half][::-1][:7]  # b t h d
        if dtypes[0] == FP8:
            want = cast_oracle.dequantise(ours.view("uint8"), None, FP8, None, "float32", constant=scale)
            assert np.array_equal(got.view("uint32"), want), (of_k, half)
        else:
            want, _, _ = cast_oracle.quantise(ours, FP8, None, constant=scale)
            assert np.array_equal(got.view("uint8"), want), (of_k, half)


@pytest.mark.parametrize(
    ("casts", "says"),
    [
        ((1.0, None), r"cast: none here and Scale\(1.0\) on the other side|cast: Scale\(1.0\) here and none on the other side"),
        ((None, "amax"), "cast: .* expected the same: values change only if both sides say so"),
        ((1.0, 2.0), r"cast: Scale\(1.0\) here and Scale\(2.0\) on|cast: Scale\(2.0\) here and Scale\(1.0\) on"),
        ((None, None), "planes: float32 here and float8_e4m3fn on|planes: float8_e4m3fn here and float32 on"),
        (("amax", "amax"), "no plane of scales takes part"),
    ],
)
def test_engines_that_do_not_say_the_same_cast_refuse_each_other(
    worker: Any, casts: tuple[Any, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = [
        worker(name, dtype, **({} if cast is None else {"cast": cast}))
        for name, dtype, cast in zip("pd", ("float32", FP8), casts, strict=True)
    ]
    before = [array.copy() for array in made[1]._caches.pool.arrays]
    made[0].begin(StepMetadata("1", holds={"r": hold()}))
    with caplog.at_level("WARNING", "vllm.kvbm"):
        made[1].begin(StepMetadata("2", loads={"q": load(made[0])}))
        assert until(made[1], "finished_recving").failed_recving == {"q"}
    assert re.search(says, caplog.text), caplog.text
    assert all(map(np.array_equal, [a.view("uint8") for a in before], [a.view("uint8") for a in made[1]._caches.pool.arrays]))


def test_what_nobody_asks_for_is_let_go(worker: Any) -> None:
    """And who asks later is metadata at once."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold(0.0)}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"q"}


def test_what_is_not_needed_is_let_go(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"q": Load(source(prefill))}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    assert not decode.results(set()).finished_recving  # vLLM does not wait for it


def test_a_second_engine_is_refused(worker: Any) -> None:
    prefill, first, second = worker("p"), worker("d1"), worker("d2")
    prefill.begin(StepMetadata("1", holds={"r": hold(), "s": hold()}))
    first.begin(StepMetadata("2", loads={"q": load(prefill)}))
    assert not until(first, "finished_recving").failed_recving
    until(prefill, "finished_sending")
    second.begin(StepMetadata("3", loads={"q": load(prefill), "q2": load(prefill, "s")}))
    ended: set[str] = set()
    failed: set[str] = set()
    while len(ended) < 2:
        found = until(second, "finished_recving")
        ended, failed = ended | found.finished_recving, failed | found.failed_recving
    assert failed == {"q"}


def test_a_name_may_come_again(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    for _ in range(2):
        prefill.begin(StepMetadata("1", holds={"r": hold()}))
        decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
        assert not until(decode, "finished_recving").failed_recving
        until(prefill, "finished_sending")


def test_each_prefills_for_the_other(worker: Any) -> None:
    """One link for both ways, whoever asked first."""
    first, second = worker("a"), worker("b")
    for number, (prefill, decode) in enumerate([(first, second), (second, first), (first, second)]):
        prefill.begin(StepMetadata("1", holds={f"r{number}": hold()}))
        decode.begin(StepMetadata("1", loads={"q": load(prefill, f"r{number}")}))
        assert not until(decode, "finished_recving").failed_recving
        until(prefill, "finished_sending")


def test_what_was_held_before_a_restart_is_refused_at_once(worker: Any) -> None:
    """Who waited for it would keep all others waiting."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("2", holds={"r": hold()}))
    stale = Load(source(prefill), (list(range(8)),), 0, 31)
    fresh = Load(source(prefill, start="2"), stale.blocks, 0, 31)
    started = time.monotonic()
    decode.begin(StepMetadata("3", loads={"before": stale, "after": fresh}))
    ended: set[str] = set()
    failed: set[str] = set()
    while len(ended) < 2:
        found = until(decode, "finished_recving")
        ended, failed = ended | found.finished_recving, failed | found.failed_recving
    assert failed == {"before"} and time.monotonic() - started < LIMIT / 2


def test_what_is_not_held_fails(worker: Any) -> None:
    """At once where later ones are held already; nobody waits for it, and those behind it come."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill, "another"), "q2": load(prefill)}))
    failed, ended = set(), set()
    while ended != {"q", "q2"}:
        found = until(decode, "finished_recving")
        ended, failed = ended | found.finished_recving, failed | found.failed_recving
    assert failed == {"q"}


def test_what_is_to_come_is_waited_for_and_keeps_nobody_waiting(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that decodes may be faster than what tells the workers; of a name that does not come it is metadata."""
    monkeypatch.setattr(holding, "_HOLD_DELAY", LIMIT)
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"later": load(prefill, "s", number=1), "never": load(prefill, "t", number=2)}))
    end = time.monotonic() + LIMIT
    while len(prefill.holds._wanted) < 2:
        assert time.monotonic() < end
    decode.begin(StepMetadata("2", loads={"now": load(prefill)}))
    found = until(decode, "finished_recving")
    assert found.finished_recving == {"now"} and not found.failed_recving
    until(prefill, "finished_sending")
    prefill.begin(StepMetadata("1", holds={"s": Hold((list(range(8)),), 32, 1e3, 1)}))
    found = until(decode, "finished_recving")
    assert found.finished_recving == {"later"} and not found.failed_recving
    monkeypatch.setattr(holding.time, "monotonic", lambda now=time.monotonic: now() + LIMIT)
    prefill.results(set())
    monkeypatch.undo()
    assert until(decode, "finished_recving").failed_recving == {"never"} and not prefill.holds._wanted


def test_what_has_come_is_told_before_the_answer_is_read(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: vLLM heard of it when the thread that reads answers had its turn."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    told, answer = threading.Event(), Visit._answer

    def late(self: Visit, *given: Any) -> Any:
        assert told.wait(LIMIT)
        return answer(self, *given)

    monkeypatch.setattr(Visit, "_answer", late)
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    found = until(decode, "finished_recving")
    assert found.finished_recving == {"q"} and not found.failed_recving
    told.set()
    until(prefill, "finished_sending")


@pytest.mark.parametrize("when", ["before it is asked for", "before the answer"])
def test_who_is_given_up_while_it_is_asked_for_is_released(when: str, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    cls, name = (_Worker, "_begun") if when.endswith("for") else (Visit, "_answer")
    usual, ended = getattr(cls, name), []

    def late(self: Any, *given: Any) -> Any:
        if not ended:
            ended.append(decode.results({"q"}))
        return usual(self, *given)

    monkeypatch.setattr(cls, name, late)
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    until(prefill, "finished_sending")
    found = ended[0] if ended[0].finished_recving else until(decode, "finished_recving")
    assert found.finished_recving == {"q"}


@pytest.mark.parametrize("name", ["r", "", "/", "1", "1/", "1/x/r"])
def test_names_that_are_none_are_refused_alone(worker: Any, name: str) -> None:
    """The next request is asked for in the same conversation."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode._start = "2"
    visit = decode._visit(source(prefill))
    assert visit.link()
    with pytest.raises(KvbmError, match=r"not held here|held before|expected a request's name"):
        visit.want(Want(name))
    talks = list(visit._talks)
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    assert not until(decode, "finished_recving").failed_recving
    assert name == "" or visit._talks == talks


def test_an_engine_that_does_not_answer_delays_no_other(worker: Any) -> None:
    """Loads of other engines end while many loads wait for it, and those fail at `load_seconds`."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = Source("1/0/r", "127.0.0.1", silent.getsockname()[1], 1, 32)
        blocks = (list(range(8))[::-1],)
        decode.begin(StepMetadata("2", loads={f"s{number}": Load(there, blocks, 0, 31) for number in range(40)}))
        decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
        found = until(decode, "finished_recving")
        assert found.finished_recving == {"q"} and not found.failed_recving and len(decode._requesting) == 40
        decode._seconds = 0.2
        there = dataclasses.replace(there, host="localhost")  # another visit
        decode.begin(StepMetadata("2", loads={f"t{number}": Load(there, blocks, 0, 31) for number in range(3)}))
        failed: set[str] = set()
        while len(failed) < 3:
            failed |= until(decode, "finished_recving").failed_recving
        assert failed == {"t0", "t1", "t2"} and len(decode._requesting) == 40


def test_more_than_is_held_fails_on_both_sides(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": Hold((list(range(8)),), 16, 1e3)}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert until(prefill, "finished_sending").finished_sending == {"r"}


def test_a_request_that_is_aborted_while_it_is_loaded_ends(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given back once nothing writes them any more."""
    prefill, decode = worker("p"), worker("d")
    monkeypatch.setattr(prefill.holds, "_spans", lambda *_: {})  # it sends nothing
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    until(prefill, "finished_sending")
    assert not decode.results(set()).finished_recving
    assert until(decode, "finished_recving", frozenset({"q"})).failed_recving == {"q"}


def test_a_request_that_is_aborted_while_it_is_asked_for_ends(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though vLLM says so once, and before anything was on its way."""
    prefill, decode = worker("p"), worker("d")
    asked, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(connector.Visit, "want", lambda *_: (asked.set(), goes_on.wait(LIMIT)))  # and nothing is sent
    prefill.begin(StepMetadata("1"))
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
    assert asked.wait(LIMIT) and not decode.results({"q"}).finished_recving
    goes_on.set()
    started = time.monotonic()
    assert until(decode, "finished_recving").finished_recving == {"q"} and time.monotonic() - started < LIMIT / 2
    assert not decode._requesting and not decode._arrivals


def test_the_engine_that_prefills_ends(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    one = load(prefill)
    prefill.close()
    decode.begin(StepMetadata("2", loads={"q": one}))
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
    prefill.begin(StepMetadata("1", holds={"r": hold(), "s": hold(0.01)}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill)}))
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
        assert again is None or set(again.data) <= {"seconds"}  # they were metadata
    assert (sums[0]["sent"], sums[0]["unsent"], sums[1]["loaded"]) == (1, 1, 1)
    assert sums[0]["bytes_sent"] == sums[1]["bytes_received"] > 0 and sums[0]["chunks_sent"] == sums[1]["chunks_received"]
    assert "failed" not in sums[1] and "chunks_wrong" not in sums[1]
    text = generate_latest(registry).decode()
    assert 'vllm:kvbm_sent_requests_total{engine="0",model_name="m"} 1.0' in text
    assert f'vllm:kvbm_received_bytes_total{{engine="1",model_name="m"}} {float(sums[1]["bytes_received"])}' in text
    assert all(f"{title}_total{{" in text for title, _ in COUNTERS.values())


def test_a_load_that_fails_is_counted(worker: Any) -> None:
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1", holds={"r": hold()}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill, "another")}))
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert decode.take_stats().data["failed"] == 1


def test_the_dashboard_shows_what_vllm_exports() -> None:
    """Its names that are vLLM's own, and those of the offload worker, with vLLM's own definitions."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import get_connector_metric_definitions

    from kvbm.integrations.vllm.metrics import COUNTERS, GUARD_COUNTERS
    from kvbm.integrations.vllm.offload import KvbmOffloadingSpec

    board = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "grafana.json"
    shown = set(re.findall(r"vllm:kv\w+(?=\{)", board.read_text(encoding="utf-8")))
    own = {*get_connector_metric_definitions(), *KvbmOffloadingSpec.build_metric_definitions({})}
    assert len(shown) == 30
    counted = {title for title, _ in (*COUNTERS.values(), *GUARD_COUNTERS.values())}
    assert {name.removesuffix("_total") for name in shown} <= own | counted


# ---- sent while it is computed -------------------------------------------------------------------------------------------

TABLE = list(range(8))


def early(prefill: _Worker, name: str = "x", last: int = 31) -> Load:
    assert prefill._door is not None
    where = Source(f"push/{name}", "127.0.0.1", prefill._door.port, 1, 1 << 40, is_early=True)
    return Load(where, (TABLE[::-1],), 0, last)


def push(before: int, after: int, name: str = "x") -> StepMetadata:
    return StepMetadata("1", pushes={"r": Push(f"push/{name}", (TABLE,), before, after)})


def sooner(condition: Callable[[], Any]) -> None:
    """Wait for it."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def came(decode: _Worker) -> int:
    return int(sum(found["bytes_received"] for found in decode._endpoint.stats().values()))  # type: ignore[union-attr]


def both(worker: Any, **extra: Any) -> tuple[_Worker, _Worker]:
    """The second one has asked the first one for a request that is not there yet, in parts of 16 tokens."""
    prefill, decode = worker("p", push_layers=1, **extra), worker("d", push_tokens=16)
    decode.begin(StepMetadata("2", loads={"q": early(prefill)}))
    sooner(lambda: prefill.holds._wanted)
    return prefill, decode


def test_layers_go_while_they_are_computed(worker: Any) -> None:
    """In two steps; of the second one vLLM does not say which layers are computed."""
    prefill, decode = both(worker)
    pool = prefill._caches.pool.arrays
    begun = []
    prefill.begin_step(push(0, 16))
    for number in range(MODEL.nl):
        assert came(decode) == sum(begun)
        pool[number][:] += number + 1  # what is computed: nobody has read it before
        prefill.holds.saved(f"layer.{number}")
        sooner(lambda: came(decode) > sum(begun))
        begun.append(came(decode) - sum(begun))
    prefill.holds.end_step()
    prefill.begin_step(push(16, 32))
    pool[0][:, 4:] += 7
    prefill.holds.end_step()
    found = until(decode, "finished_recving")
    assert found.finished_recving == {"q"} and not found.failed_recving
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    for number in range(MODEL.nl):
        mine, theirs = (one._caches.pool.arrays[number].swapaxes(0, 1) for one in (prefill, decode))  # b o t h d
        assert np.array_equal(mine[:7], theirs[::-1][:7]) and np.array_equal(mine[7, :, :3], theirs[0, :, :3])
    assert prefill.holds.counts == {"sent": 1, "pushed": 3} and not prefill.holds._requests and not prefill.holds._names


def test_who_asks_late_gets_what_has_been_computed(worker: Any) -> None:
    prefill, decode = worker("p", push_layers=1), worker("d", push_tokens=16)
    prefill.begin_step(push(0, 16))
    prefill.holds.saved("layer.0")
    prefill.holds.end_step()
    decode.begin(StepMetadata("2", loads={"q": early(prefill)}))
    sooner(lambda: prefill.holds._requests["r"].link)
    prefill.begin_step(push(16, 32))
    sooner(lambda: came(decode))
    prefill.holds.end_step()
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    assert not until(decode, "finished_recving").failed_recving
    assert np.array_equal(prefill._caches.pool.arrays[1][:, :7], decode._caches.pool.arrays[1][:, ::-1][:, :7])


@pytest.mark.parametrize("extra", [{"push_layers": 2}, {"push_layers": 99}])
def test_without_layers_it_goes_behind_the_step(worker: Any, extra: dict[str, int]) -> None:
    prefill, decode = worker("p", **extra), worker("d", push_tokens=16)
    decode.begin(StepMetadata("2", loads={"q": early(prefill)}))
    sooner(lambda: prefill.holds._wanted)
    prefill.begin_step(push(0, 32))
    for number in range(MODEL.nl):
        prefill.holds.saved(f"layer.{number}")
    assert not prefill.holds._requests["r"].sendings
    prefill.holds.end_step()
    assert len(prefill.holds._requests["r"].sendings) == 2
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    assert not until(decode, "finished_recving").failed_recving


def test_what_is_aborted_while_it_is_computed_fails_at_once(worker: Any) -> None:
    """And its blocks are free once nobody reads them."""
    prefill, decode = both(worker)
    prefill.begin_step(push(0, 16))
    prefill.holds.end_step()
    sendings = prefill.holds._requests["r"].sendings
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 0, 1e3, 1, "push/x", "it was aborted")}))
    assert until(prefill, "finished_sending").finished_sending == {"r"} and all(one.has_ended for one in sendings)
    assert until(decode, "finished_recving").failed_recving == {"q"}
    decode.begin(StepMetadata("2", loads={"again": early(prefill)}))
    assert until(decode, "finished_recving").failed_recving == {"again"}


@pytest.mark.parametrize("asks_first", [True, False])
def test_another_adapter_fails_at_once(worker: Any, asks_first: bool) -> None:
    prefill, decode = worker("p", push_layers=1), worker("d", push_tokens=16)
    asks = StepMetadata("2", loads={"q": early(prefill, "x#adapter=1")})
    if asks_first:
        decode.begin(asks)
        sooner(lambda: prefill.holds._wanted)
    prefill.begin_step(push(0, 16, "x#adapter=2"))
    prefill.holds.end_step()
    if not asks_first:
        decode.begin(asks)
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert not prefill.holds._wanted and prefill.holds._requests["r"].link is None


def test_inputs_of_another_request_cost_a_prefill() -> None:
    scheduler, one = scheduler_of("d"), request({**PARAMS, "remote_inputs": "adapter=1,image=2"})
    assert scheduler.matched(one, 0) == (0, False) and not one.kv_transfer_params["do_remote_prefill"]


def test_what_was_never_computed_fails_at_once(worker: Any) -> None:
    prefill, decode = both(worker)
    prefill.begin(StepMetadata("1", lost={"push/x": "it was aborted"}))
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert not prefill.results(set()).finished_sending and not prefill.holds._wanted


def test_blocks_that_are_taken_away_are_read_no_more(worker: Any) -> None:
    """A request that is preempted: nothing of it goes afterwards, though it is computed again and held."""
    prefill, decode = both(worker)
    prefill.begin_step(push(0, 16))
    prefill.holds.saved("layer.0")
    prefill.holds.end_step()
    sendings = list(prefill.holds._requests["r"].sendings)
    prefill.stop(StepMetadata("1", stopped=["r", "another"]))
    assert sendings and all(one.has_ended for one in sendings)
    assert until(decode, "finished_recving").failed_recving == {"q"}
    prefill.begin_step(push(0, 32))
    prefill.holds.end_step()
    assert prefill.holds._requests["r"].sendings == sendings
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}


def test_who_decodes_gives_up(worker: Any) -> None:
    """It is not sent on; its own blocks are given back at once."""
    prefill, decode = both(worker)
    prefill.begin_step(push(0, 16))
    prefill.holds.end_step()
    assert until(decode, "finished_recving", frozenset({"q"})).failed_recving == {"q"}
    held = prefill.holds._requests["r"]
    sooner(lambda: held.want.is_given_up)
    prefill.begin_step(push(16, 32))
    prefill.holds.end_step()
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    assert until(prefill, "finished_sending").finished_sending == {"r"}
    assert all(one.key == "push/x@0" for one in held.sendings)


def test_a_shorter_prompt_than_is_asked_for_fails(worker: Any) -> None:
    prefill, decode = both(worker)
    prefill.begin_step(push(0, 24))
    prefill.holds.end_step()
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 24, 1e3, 1, "push/x")}))
    assert until(decode, "finished_recving").failed_recving == {"q"}
    assert until(prefill, "finished_sending").finished_sending == {"r"}


def test_a_second_engine_that_asks_for_what_is_computed_is_refused(worker: Any) -> None:
    prefill, decode = both(worker)
    other = worker("e", push_tokens=16)
    other.begin(StepMetadata("2", loads={"q": early(prefill)}))
    assert until(other, "finished_recving").failed_recving == {"q"}
    prefill.begin_step(push(0, 32))
    prefill.holds.end_step()
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    assert not until(decode, "finished_recving").failed_recving


def test_who_asks_in_the_usual_way_gets_what_the_router_named(worker: Any) -> None:
    prefill, decode = worker("p", push_layers=1), worker("d")
    prefill.begin_step(push(0, 32))
    prefill.holds.end_step()
    prefill.begin(StepMetadata("1", holds={"r": Hold((TABLE,), 32, 1e3, 1, "push/x")}))
    decode.begin(StepMetadata("2", loads={"q": load(prefill, number=1)}))
    assert not until(decode, "finished_recving").failed_recving
    assert prefill.holds.counts["pushed"] == 0


def test_a_step_without_such_requests_costs_nothing(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = worker("p", push_layers=1)
    monkeypatch.setattr(prefill.holds, "_push", None)
    prefill.begin_step(StepMetadata("1"))
    prefill.holds.saved("layer.0")
    prefill.holds.end_step()


NAMED = {"do_remote_decode": True, "transfer_id": "x"}


def running(params: Any = None, tokens: int = 100, name: str = "q") -> Any:
    one = request(params or dict(NAMED), tokens)
    one.request_id, one.num_preemptions = name, 0
    return one


def of_prefill() -> Scheduler:
    scheduler = scheduler_of("p")
    scheduler.manager = SimpleNamespace(get_block_ids=lambda _: ([1, 2],))
    return scheduler


def test_what_a_step_computes_is_told() -> None:
    """Of the prompt, not behind it; of one request a name."""
    scheduler, one, second = of_prefill(), running(), running(name="q2")
    for each in (one, second):
        scheduler.allocated(each, BLOCKS, 0)
    metadata = scheduler.step_metadata({"q": 64, "q2": 64, "another": 5})
    assert metadata.pushes == {"q": Push(PUSHED, ([1, 2],), 0, 64)} and not metadata.stopped
    one.num_computed_tokens = 64
    assert scheduler.step_metadata({"q": 99}).pushes == {"q": Push(PUSHED, ([1, 2],), 64, 100)}
    assert not scheduler.step_metadata({"another": 5}).pushes
    one.num_computed_tokens = 100
    assert not scheduler.step_metadata({"q": 1}).pushes
    one.status = RequestStatus.FINISHED_STOPPED
    held, params = scheduler.finished(one, ([1, 2],))
    hold = scheduler.step_metadata().holds["q"]
    assert held and hold.name == PUSHED and params["remote_request_id"] == f"{scheduler._metadata.start}/{hold.number}/q"
    assert not scheduler._pushes.get("q")


def test_a_preemption_is_told_once() -> None:
    scheduler, one = of_prefill(), running()
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.step_metadata({"q": 64}).stopped
    one.num_preemptions = 1
    metadata = scheduler.step_metadata({"q": 64})
    assert metadata.stopped == ["q"] and not metadata.pushes
    metadata = scheduler.step_metadata({"q": 64})
    assert not metadata.stopped and not metadata.pushes


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_preempted_and_aborted_between_two_steps_is_stopped(is_told: bool) -> None:
    """Such as where the prefix cache is reset: its blocks are free, and may be read still."""
    scheduler, one = of_prefill(), running()
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.step_metadata({"q": 64}).stopped
    one.num_preemptions, one.status = 1, RequestStatus.FINISHED_ABORTED
    if is_told:
        assert scheduler.step_metadata().stopped == ["q"]
    assert scheduler.finished(one, ([],)) == (False, None)
    metadata = scheduler.step_metadata()
    assert metadata.stopped == ([] if is_told else ["q"]) and set(metadata.lost) == {PUSHED}


def test_what_is_lost_for_nobody_is_not_remembered(worker: Any) -> None:
    """Such as what both engines gave up; while another request is waited for, as in an engine that is never idle."""
    prefill, decode = worker("p"), worker("d")
    prefill.begin(StepMetadata("1"))
    early = Source("push/x", "127.0.0.1", prefill._door.port, 1, 32, is_early=True)
    decode.begin(StepMetadata("2", loads={"q": Load(early, (list(range(8)),), 0, 31)}))
    end = time.monotonic() + LIMIT
    while "push/x" not in prefill.holds._wanted or decode._requesting:
        assert time.monotonic() < end
    _, link, _ = prefill.holds._wanted["push/x"]
    for number in range(3):
        prefill._tell(link, f"push/y{number}", "it was aborted")
    [visit] = decode._visits.values()
    hear_of, visit._note_lost = visit._note_lost, lambda metadata: (hear_of(metadata), names.append(metadata["lost"]))
    names: list[str] = []
    while len(names) < 3:
        assert time.monotonic() < end and not decode.results(set()).finished_recving
    assert not decode._lost and decode._arrivals


def test_what_is_aborted_is_held_until_nobody_reads_it() -> None:
    """And what has no blocks is metadata to be lost."""
    scheduler, one = of_prefill(), running()
    scheduler.allocated(one, BLOCKS, 0)
    one.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(one, ([1, 2],)) == (True, None)
    hold = scheduler.step_metadata().holds["q"]
    assert (hold.name, hold.tokens, hold.failure) == (PUSHED, 0, "it was not prefilled: FINISHED_ABORTED")
    assert scheduler.finished(one, ()) == (False, None)
    assert set(scheduler.step_metadata().lost) == {PUSHED}


def test_a_request_of_the_routers_name_is_all_of_the_prompt() -> None:
    scheduler = scheduler_of("d")
    known = {key: PARAMS[key] for key in ("do_remote_prefill", "remote_host", "remote_port", "remote_workers")}
    one = request({**known, "transfer_id": "x"})
    assert scheduler.matched(one, 0) == (99, True)
    scheduler.allocated(one, BLOCKS, 99)
    found = scheduler.step_metadata().loads["q"].source
    assert (found.request, found.is_early) == (PUSHED, True)


@pytest.mark.parametrize("value", ["", 7, None, "x" * 5000])
def test_names_that_are_none(value: Any) -> None:
    scheduler, one = of_prefill(), running({**NAMED, "transfer_id": value})
    scheduler.allocated(one, BLOCKS, 0)
    assert not scheduler.step_metadata({"q": 64}).pushes
    other = request({"do_remote_prefill": True, "remote_host": "h", "remote_port": 7, "remote_workers": 1, "transfer_id": value})
    assert scheduler_of("d").matched(other, 0) == (0, False)


@pytest.mark.parametrize(
    ("params", "begin"),
    [
        ({"remote_first_tokens": [0, 128]}, None),  # all of the first block
        ({"remote_first_tokens": [0, 160]}, 160),
        ({"remote_first_tokens": [0, 224]}, 172),  # less than is seen: its load fails
        ({"remote_first_tokens": [0]}, None),
        ({}, None),
    ],
)
def test_the_first_block_of_a_window_may_lack_tokens(params: Any, begin: int | None) -> None:
    """The token behind the prompt does not see them; a shorter sequence would: the block is not found in the prefix cache."""
    window = SimpleNamespace(block_size=64, sliding_window=128)
    scheduler = scheduler_of("d", SimpleNamespace(block_size=64), window)
    managers = [SimpleNamespace(num_cached_block={"q": 0}) for _ in range(2)]
    scheduler.manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    one = request({**PARAMS, "remote_num_tokens": 300, **params}, 300)
    scheduler.matched(one, 0)
    tables = ([1, 2, 3, 4, 5], [0, 0, 6, 7, 8])
    scheduler.allocated(one, SimpleNamespace(get_block_ids=lambda: tables), 299)
    assert scheduler.step_metadata().loads["q"].begins == ({} if begin is None else {1: begin})
    assert [one.num_cached_block["q"] for one in managers] == [0, 0 if begin is None else 3]


@pytest.mark.parametrize("value", [7, "0", [-1], [1.5], [None], {}])
def test_first_tokens_that_are_none_cost_a_prefill(value: Any) -> None:
    assert scheduler_of("d").matched(request({**PARAMS, "remote_first_tokens": value}), 0) == (0, False)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "many"])
def test_counts_that_are_none(value: Any) -> None:
    for name in ("push_layers", "push_tokens"):
        with pytest.raises(BindError, match=f"{name}: expected a number from 1 on"):
            _Worker(config("p", **{name: value}), None)
