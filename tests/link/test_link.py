"""Links: every byte against the oracle for random placements; each fault ends in its expected error, and no slot is lost."""

from __future__ import annotations

import base64
import contextlib
import gc
import itertools
import json
import random
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbm
import reshard_oracle
import soaking
from few import in_full
from kvbm import (
    BindError,
    DigestError,
    KvbmError,
    PeerLostError,
    PlanError,
    Pool,
    Span,
    TransferError,
    TransferTimeoutError,
    reshard,
    wire,
)
from kvbm.layout import spec
from kvbm.link import chunks, flows, notes, ring
from kvbm.link import endpoint as endpoints
from kvbm.link import link as links
from kvbm.reshard import packer as pack
from linking import (
    LIMIT,
    Deaf,
    Linked,
    close_all,
    ended,
    gpu_memory,
    held,
    in_bursts,
    plain_case,
    require_nothing_left,
    right_cases,
    sender_of,
    until,
    written,
)
from ports import free_ports
from processes import context
from programs import ranks
from programs.links import BLOCKS, SHAPE, TOKENS, endpoint, meet, on_wire, span
from programs.links import main as far_end

HERE = Path(__file__).resolve().parents[1]
EXAMPLES = HERE.parent / "examples" / "disaggregated"


@pytest.mark.parametrize("first", [pytest.param(n, marks=[pytest.mark.full] * (n >= 30)) for n in range(0, 100, 10)])
def test_every_byte(first: int) -> None:
    """Random placements, layouts, ranges, origins; pushed and pulled, in windows of layers, in any order."""
    assert sum(1 for _ in right_cases(range(first, first + 10))) >= 3


def test_on_a_gpu_that_is_not_one(fake_gpu: Any) -> None:
    """Pools and rings on the fake driver."""
    fake_gpu("reshards.linked", 500, 20)


def test_a_failed_receive_leaves_zeros_on_a_gpu_that_is_not_one(fake_gpu: Any) -> None:
    """The launches that write them are those that unpack."""
    fake_gpu("reshards.zeroed")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1240, 60))
def test_every_byte_on_a_gpu(first: int) -> None:
    """Pools and rings of a GPU; the ends copy from ring to ring through the driver."""
    cases = right_cases(range(first, first + 60), read=lambda buffer: buffer.cpu().numpy(), memory=gpu_memory())
    assert sum(1 for _ in cases) > 30


# ---- one case, on wires with faults ----------------------------------------------------------------------------------

CASE = plain_case()
SENDER = sender_of(CASE)


def on_faulty(scripts: dict[tuple[int, int], list[wire.Fault]], **options: Any) -> Linked:
    """The case, with faults on the wires of each side's ranks."""
    hub = wire.Hub()

    def make(side: int, rank: int) -> Any:
        return wire.faulty(wire.memory(f"{side}/{rank}", hub), scripts.get((side, rank), ()))

    return Linked(CASE, make, chunk_bytes=1 << 12, ring_bytes=1 << 16, **options)


def on_deaf() -> Linked:
    """The case, with receivers that drop offers until `listen`."""
    hub = wire.Hub()

    def make(side: int, rank: int) -> Any:
        below = wire.memory(f"{side}/{rank}", hub)
        return below if side == 0 else Deaf(below)

    return Linked(CASE, make, chunk_bytes=1 << 12, ring_bytes=1 << 16)


def listen(found: Linked) -> None:
    for one in found.wires[1]:
        one.listens = True


def begun(found: Linked, side: int, **options: Any) -> list[Any]:
    """A sending, or an arrival, for each rank."""
    options = {"timeout": 60, **options}
    go = reshard.Link.receive if side else reshard.Link.send
    return [go(link, "one", span, **options) for link, (span,) in zip(found.links[side], found.spans(side), strict=True)]


def again(found: Linked) -> None:
    """A later transfer without faults is right, whatever the earlier ones did, and no slot is lost."""
    found.refill()
    assert ended(found.begin(name="again")) == [None] * (len(found.links[0]) + len(found.links[1]))
    found.check()
    found.require_slots()


@pytest.mark.parametrize("what", ["lose", "double", "delay", "swap"])
@pytest.mark.parametrize(("side", "first"), [(0, 0), (1, 1), in_full((0, 1)), in_full((1, 0))])
def test_notes(what: str, side: int, first: int) -> None:
    """If any note of a rank is lost, doubled, delayed or swapped with the next, the sequence is right."""
    met = 0
    for at in range(first, 12, 2):
        with on_faulty({(side, rank): [wire.Fault(what, at)] for rank in range(8)}) as found:
            assert not any(ended(found.begin(random.Random(at))))
            found.check()
            met += sum(one.counts[what] for one in found.wires[side])
            again(found)
    assert met > 5


class Pushed(random.Random):
    """One window of layers, pushed."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 0.9


PUSHED = Pushed(0)


# ---- the soak in short -----------------------------------------------------------------------------------------------


@pytest.mark.slow  # 0.8 s
@pytest.mark.sanitize
def test_lives_with_faults() -> None:
    """A short `tools/torture.py links`: every accepted byte is right, and no slot is lost."""
    held = soaking.Links(seed=5, rate=0.03)
    counts = held.counts
    while not all(counts[word] for word in (*soaking.NOTES, "corrupt", "late", "kill")) and counts["lives"] < 20:
        held.life(60)
    assert counts["transfers"] == counts["right"] + counts["stated error"] and counts["right"] > 50
    assert counts["lives"] < 20 and counts["bytes compared"] > 1 << 16


def test_a_digest_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "require_digest", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="holds other bytes than it was sent"):
        soaking.Links(seed=5, rate=0.2).life(200)


@pytest.mark.slow  # half a second
def test_a_slot_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    give = ring.Ring.give
    monkeypatch.setattr(soaking, "HELD", 1.0)
    monkeypatch.setattr(ring.Ring, "give", lambda self, slot: None if slot == 3 else give(self, slot))
    with pytest.raises(AssertionError, match="life 0: slots are held"):
        soaking.Links(seed=5).life(20)


def test_many_faults_of_notes() -> None:
    for seed in range(6):
        scripts = {
            (side, rank): wire.random_faults(
                100 * seed + 10 * side + rank, 0.2, ("lose", "double", "delay", "swap"), 500
            )
            for side in (0, 1)
            for rank in range(8)
        }
        with on_faulty(scripts) as found:
            assert not any(ended(found.begin(random.Random(seed))))
            found.check()
            found.require_slots()


@pytest.mark.parametrize("verify", ["after", "before"])
@pytest.mark.parametrize("what", ["bit", "word", "row", "chunk"])
def test_a_wrong_chunk_is_sent_again(what: str, verify: str) -> None:
    for at in range(3):
        with on_faulty({(0, SENDER): [wire.Fault(what, at)]}) as found:
            handles = [link.send("one", span) for link, (span,) in zip(found.links[0], found.spans(0), strict=True)]
            handles += [
                link.receive("one", span, verify=verify)
                for link, (span,) in zip(found.links[1], found.spans(1), strict=True)
            ]
            assert not any(ended(handles))
            found.check()
            wrong = sum(link.stats()["chunks_wrong"] for link in found.links[1])
            assert wrong == found.wires[0][SENDER].counts[what]
            assert wrong or at
            found.require_slots()


class Calls:
    """Host memory as on a GPU: one call packs or unpacks several chunks, and calls are prepared while chunks are on their way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, list[int]] = {"pack": [], "unpack": []}  # chunks of each call
        self.unused = 0  # prepared calls that were not made
        made = ring.Ring.__init__

        def init(it: ring.Ring, *given: Any) -> None:
            made(it, *given)
            it.together = 4

        patch.setattr(ring.Ring, "__init__", init)
        for name, sizes in self.sizes.items():
            patch.setattr(chunks.Bare, name, self._counted(getattr(chunks.Bare, name), sizes))
        prepare = chunks.Bare.__init__

        def counted(bare: chunks.Bare, *given: Any, **named: Any) -> None:
            self.unused += 1
            prepare(bare, *given, **named)

        patch.setattr(chunks.Bare, "__init__", counted)

    def _counted(self, call: Any, sizes: list[int]) -> Any:
        def run(bare: chunks.Bare, *given: Any) -> Any:
            sizes.append(len(bare._jobs))
            self.unused -= 1
            return call(bare, *given)

        return run


@pytest.mark.parametrize("ahead", [False, True], ids=["as they come", "ahead"])
def test_chunks_share_calls(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Every byte; of the four chunks of a call only the wrong one is sent again.  Calls that are prepared have one chunk."""
    calls, made, prepare = Calls(monkeypatch), Counter[bool](), flows.Inflow._prepare

    def asked(flow: flows.Inflow) -> bool:
        made[found := ahead and prepare(flow)] += 1
        return found

    monkeypatch.setattr(flows.Inflow, "_prepare", asked)
    if not ahead:
        monkeypatch.setattr(flows.Outflow, "_prepare", lambda _: False)
    assert sum(1 for _ in right_cases(range(600, 610))) >= 3
    for what, verify in (("bit", "after"), ("chunk", "before"), ("chunk", "after")):
        together = 0
        for at in range(4):
            calls.sizes["unpack"].clear()
            with on_faulty({(0, SENDER): [wire.Fault(what, at)]}) as found:
                handles = in_bursts(found, verify)
                assert not any(ended(handles))
                found.check()
                wrong = sum(link.stats()["chunks_wrong"] for link in found.links[1])
                assert wrong == found.wires[0][SENDER].counts[what]
                found.require_slots()
            together += max(calls.sizes["unpack"]) > 1
        assert (together or ahead) and max(calls.sizes["pack"]) > 1
    assert bool(made[True]) == ahead


def test_what_cannot_be_cut_is_refused_also_after_whole_units_were_sent() -> None:
    """At once, by `send` and `offer`.  Red: the peer got an offer, and whoever waited for the sending an error at its deadline."""
    layout = spec.parse(
        'order: "[b] h l o <data scale>"\n'
        'planes: {data: {order: "t d", dtype: int8}, scale: {dtype: float32, shared: t}}\n',
        name="scaled",
    )
    place = kvbm.Placement("tp1", model=kvbm.BlockShape(nl=2, no=2, nh=2, nt=16, hd=16, dtype="int8"), nt=16)
    hub = wire.Hub()
    pools = [Pool.allocate(layout, place.shape(0), 8) for _ in range(2)]
    ends = [
        reshard.Endpoint(f"e{i}", place, 0, pool, wire=wire.memory(f"e{i}", hub), chunk_bytes=1 << 14, ring_bytes=1 << 18)
        for i, pool in enumerate(pools)
    ]
    try:
        near, far = ends[0].meet([ends[1].card()]), ends[1].meet([ends[0].card()])
        for number in range(2):
            whole = Span([5, 2, 3, 1], range(32 * (1 + number)))
            assert not any(ended([near.send(f"{number}", whole), far.receive(f"{number}", whole)]))
        for go in (near.send, near.offer):
            for stop in (31, 33, 61):
                with pytest.raises(PlanError, match="one element for 16 tokens, which units would share"):
                    go("x", Span([5, 2, 3, 1], range(stop)))
        assert near.stats()["sendings"] == 2 and not far._offers
    finally:
        close_all(ends)


def test_a_sending_that_has_failed_keeps_nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: whoever had its handle kept a prepared call, whose memory is pinned on a GPU."""
    calls = Calls(monkeypatch)
    with Linked(plain_case()) as found:
        assert not any(ended(found.begin(random.Random(1), name="right")))
        unused = calls.unused
        sendings = [link.send("x", span, timeout=0.3) for link, (span,) in zip(found.links[0], found.spans(0), strict=True)]
        assert any(isinstance(error, TransferTimeoutError) for error in ended(sendings))
        assert calls.unused > unused
        until(lambda: not any(flow._ready for sending in sendings for flow in sending.flows), "nothing is kept")


@pytest.mark.parametrize("together", [1, 4])
def test_a_pool_that_is_closed_is_no_wrong_chunk(together: int) -> None:
    """Red: its chunks were sent three times, and then they differed from what was sent."""
    with Linked(plain_case()) as found:
        with held(*found.all_ends):
            for end in found.all_ends:
                end.ring.together = together
            sent = [link.send("one", span) for link, (span,) in zip(found.links[0], found.spans(0), strict=True)]
            came = [link.receive("one", span) for link, (span,) in zip(found.links[1], found.spans(1), strict=True)]
            for pool in found.run.pools[1]:
                pool.close()
        errors = [error for error in (*ended(came), *ended(sent)) if error is not None]
        assert any(isinstance(error, BindError) for error in errors) and all("is closed" in str(error) for error in errors)
        assert not any(isinstance(error, DigestError) for error in errors)
        assert not any(link.stats()["chunks_wrong"] for link in found.links[1])
        found.require_slots()


def test_a_message_is_prepared_as_the_last_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the same slot, while the peer is asked.  For other layers or another slot it is prepared again."""
    calls, rng, used = Calls(monkeypatch), random.Random(9), Counter[bool]()
    bare = flows.Outflow._bare

    def asked(flow: flows.Outflow, arrays: Any) -> Any:
        ready = flow._ready
        found = bare(flow, arrays)
        if ready is not None:
            used[found is ready[3]] += 1
        return found

    monkeypatch.setattr(flows.Outflow, "_bare", asked)
    with Linked(plain_case()) as found:
        for turn in range(20):
            found.refill()
            handles = found.begin(rng, name=f"{turn}/")
            assert not any(ended(handles))
            found.check()
        found.require_slots()
    assert used[True] and used[False] and calls.unused >= used[False]


def test_chunks_share_calls_on_a_gpu(fake_gpu: Any) -> None:
    """On a GPU a wrong chunk of a call is known only when the kernels are done."""
    fake_gpu("reshards.wrong_in_calls")


def test_what_is_wrong_each_time_is_said_on_both_sides() -> None:
    with on_faulty({(0, SENDER): [wire.Fault("bit", at) for at in range(100)]}) as found:
        with held(*found.all_ends):  # an arrival that begins behind a sender's failure waits for the next attempt
            sent, came = begun(found, 0), begun(found, 1)
        errors = ended([*sent, *came])
        assert isinstance(errors[SENDER], DigestError) and "has stopped receiving" in str(errors[SENDER])
        wrong = [error for error in errors[len(sent) :] if isinstance(error, DigestError)]
        assert wrong and all("3 times" in str(error) and "digest" in str(error) for error in wrong)
        found.require_slots()


@pytest.mark.parametrize("side", [0, 1])
def test_a_peer_is_lost(side: int) -> None:
    """At any call: transfers with this peer fail long before the deadline, now and later, and others work."""
    killed = 0
    for at in range(14):
        victim = 0 if side else SENDER
        with on_faulty({(side, victim): [wire.Fault("kill", at)]}) as found:
            with held(*found.all_ends):  # what begins behind a kill waits for its deadline
                handles = found.begin(random.Random(at), timeout=60)
            errors = ended(handles)
            assert all(isinstance(error, TransferError | None) for error in errors), errors
            if found.wires[side][victim].counts["kill"]:
                killed += 1
                assert any(isinstance(error, PeerLostError) for error in errors) or not any(errors), errors
                link, (span,) = found.links[side][victim], found.spans(side)[victim]
                until(lambda link=link: link.endpoint.call(lambda: link.lost), "the link knows that the peer is lost")  # type: ignore[misc]
                [error] = ended([(link.receive if side else link.send)("behind", span, timeout=60)])
                assert isinstance(error, PeerLostError), error
            if not any(errors):
                found.check()
            found.require_slots()
    assert killed > 3


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("pulls", [False, True])
def test_a_lost_peer_is_no_wrong_chunk(side: int, pulls: bool) -> None:
    """If the peer was lost at the call that reads a chunk, the chunk is not verified."""
    killed = 0
    for at in range(5):
        with on_faulty({(side, 0 if side else SENDER): [wire.Fault("kill", at)]}) as found:
            with held(*found.all_ends):
                handles = [
                    (link.offer if pulls else link.send)("one", span, timeout=60)
                    for link, (span,) in zip(found.links[0], found.spans(0), strict=True)
                ]
                handles += begun(found, 1)
            errors = ended(handles)
            killed += any(isinstance(error, PeerLostError) for error in errors)
            assert [link.stats()["chunks_wrong"] for link in found.links[1]] == [0] * len(found.links[1])
            found.require_slots()
    assert killed > 2


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["after", "before"])
def test_a_failed_receive_leaves_zeros_in_its_tokens_and_no_other_byte(
    verify: str,
) -> None:
    """A chunk that is wrong each time, an abort, a deadline, a lost peer, an endpoint that is closed: nothing is left."""
    cleared = dict.fromkeys(("wrong", "abort", "deadline", "kill", "close"), 0)
    for what in cleared:
        for first in (2, 5):
            faults = [wire.Fault("bit" if what == "wrong" else "kill", at) for at in range(first, 200)]
            with on_faulty({}) as found:
                masks = written(found)
            with on_faulty({(0, SENDER): faults} if what in ("wrong", "kill") else {}) as found:
                for buffer in found.run.buffers[1]:
                    buffer[:] = 0x55
                seconds = 0.4 if what == "deadline" else 60
                with held(*found.all_ends):
                    if what in ("wrong", "kill"):
                        begun(found, 0)
                    else:  # one rank sends, and the others never do
                        found.links[0][SENDER].send("one", found.spans(0)[SENDER][0], timeout=60)
                    came = begun(found, 1, timeout=seconds, verify=verify)
                if what in ("abort", "close"):
                    until(lambda came=came: any(one.zero for one in came), "something was written")  # type: ignore[misc]
                if what == "abort":
                    for one in came:
                        one.abort()
                if what == "close":
                    for end in found.ends[1]:
                        end.close()
                errors = ended(came)
                cleared[what] += require_nothing_left(found.run.buffers[1], masks, errors)
    assert all(cleared.values()), cleared


def test_deadlines() -> None:
    """Nobody sends, or nobody receives: each side gets an error, and the next transfer works."""
    with on_faulty({}) as found:
        (span,), (there,) = found.spans(0)[0], found.spans(1)[0]
        handles = [found.links[0][0].send("nobody receives", span, timeout=0.3)]
        handles.append(found.links[1][0].receive("nobody sends", there, timeout=0.3))
        assert all(isinstance(error, TransferTimeoutError) for error in ended(handles))
        again(found)


@pytest.mark.threads
def test_aborted() -> None:
    """By either side, at any time: the other side gets an error, and slots are freed."""
    for at in range(10):
        with on_faulty({}) as found:
            with held(*found.all_ends):
                sent, came = begun(found, 0), begun(found, 1)
            threading.Event().wait(0.002 * at)
            (sent if at % 2 else came)[0].abort()
            errors = ended([*sent, *came])
            assert all(isinstance(error, TransferError | None) for error in errors)
            again(found)


def test_a_receive_that_fails_before_offers_come() -> None:
    """Senders whose offers are lost get the error long before their deadline; the next attempt of the same name works."""
    with on_deaf() as found:
        sent, came = begun(found, 0), begun(found, 1)
        until(lambda: all(one.flows for one in sent), "they are offered")
        for one in came:
            one.abort()
        errors = ended(came)
        assert not any(one.has_failed for one in sent)
        listen(found)
        errors += ended(sent)
        assert all(isinstance(error, TransferError) for error in errors), errors
        assert all("it was aborted here" in str(error) for error in errors), errors
        found.refill()
        assert ended([*begun(found, 0), *begun(found, 1)]) == [None] * len(errors)
        found.check()
        found.require_slots()


def test_a_receive_that_is_asked_for_again_is_not_refused() -> None:
    """A receive is aborted and repeated before the offers arrive: they belong to the second one."""
    with on_deaf() as found:
        sent, first = begun(found, 0), begun(found, 1)
        until(lambda: all(one.flows for one in sent), "they are offered")
        for one in first:
            one.abort()
        assert all(ended(first))
        came = begun(found, 1)
        for end in found.ends[1]:
            end.call(lambda: None)  # they have begun
        listen(found)
        assert ended([*sent, *came]) == [None] * (len(sent) + len(came))
        found.check()
        found.require_slots()


@pytest.mark.parametrize("then", ["is withdrawn", "is made again"])
def test_an_offer_that_was_on_its_way_when_the_receive_failed(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """It resembles an offer for the next attempt, which must not fail because of it."""
    monkeypatch.setattr(links, "_LATE", 1e9)  # however long this test takes
    with on_deaf() as found:
        first, came = begun(found, 0), begun(found, 1)
        until(lambda: all(one.flows for one in first), "they are offered")
        for one in came:
            one.abort()
        assert all(ended(came))
        listen(found)
        assert all(ended(first))
        came = begun(found, 1)
        for flow in (flow for sending in first for flow in sending.flows):
            there = found.links[1][flow.rank]
            [peer] = [peer for peer, rank in there.peers.items() if found.links[0][rank] is flow.link]
            late = flow.offer._replace(sending=flow.number + 1000, age=0.0)
            there.endpoint.call(partial(there.heard, peer, late))
            if then == "is withdrawn":
                there.endpoint.call(partial(there.heard, peer, notes.Stop(late.sending, 0, False, True, "it was given up")))
        assert not any(one.has_ended for one in came), [one.error for one in came]
        sent = begun(found, 0)
        assert ended([*sent, *came]) == [None] * (len(sent) + len(came))
        found.check()
        found.require_slots()


def test_the_next_attempt_is_not_refused() -> None:
    """After a failed receive, the sender begins again before the receiver does."""
    with on_faulty({}) as found:
        errors = ended(begun(found, 1, timeout=0.01))
        assert all(isinstance(error, TransferError) for error in errors)
        sent = begun(found, 0)
        until(lambda: all(one.flows or one.has_ended for one in sent), "they are offered")
        offering = [link for link, one in zip(found.links[0], sent, strict=True) if one.flows]
        until(lambda: all(link.stats()["notes_again"] > 1 for link in offering), "offers are said again")
        came = begun(found, 1)
        assert ended([*sent, *came]) == [None] * (len(sent) + len(came))
        found.check()
        found.require_slots()


def test_a_late_put_meets_no_pool() -> None:
    """A put that arrives after its receiver gave up and dropped the peer changes no block."""
    with on_faulty({(0, SENDER): [wire.Fault("late", 0)]}) as found:
        sent, came = begun(found, 0), begun(found, 1)
        until(lambda: found.wires[0][SENDER].counts["late"], "a put is held back")
        for one in came:
            one.abort()
        errors = ended([*sent, *came])
        assert any(errors)
        until(lambda: any(end.ring.quarantined for end in found.ends[1]), "the slot may still be written")
        before = [buffer.copy() for buffer in found.run.buffers[1]]
        assert found.wires[0][SENDER].release() == 1
        found.require_slots()
        assert all(np.array_equal(a, b) for a, b in zip(before, found.run.buffers[1], strict=True))
        again(found)


def test_a_late_put_into_a_pool_would_meet_it() -> None:
    """Why chunks are received in a ring: the same late put, directly into blocks, changes blocks that were reused."""
    hub = wire.Hub()
    writer, reader = wire.faulty(wire.memory("writer", hub), [wire.Fault("late", 0)]), wire.memory("reader", hub)
    block, blocks = np.full(4096, 7, np.uint8), np.zeros(4 * 4096, np.uint8)
    for end, memory in ((writer, block), (reader, blocks)):
        end.register(wire.Slab.of(memory))
    peer, _ = writer.connect(reader.card()), reader.connect(writer.card())
    writer.put(peer, wire.Slice(0, 4096), wire.Slice(4096, 4096), b"one")
    blocks[4096:8192] = 9  # the reader gave up, and the block is another sequence's
    assert writer.release() == 1
    assert (blocks[4096:8192] == 7).all()


def test_a_closed_link_is_forgotten() -> None:
    """Its resources are free, and its ranks cannot be connected again."""
    with Linked(CASE) as found:
        assert not any(ended(found.begin()))
        end, link = found.ends[1][0], found.links[1].pop(0)
        cards, counted = [one.card() for one in found.ends[0]], link.stats()
        link.close()
        gone = weakref.ref(link)
        del link
        until(
            lambda: gc.collect() >= 0 and gone() is None and "0 links" in repr(end),
            lambda: f"nothing refers to it: {gc.get_referrers(gone())}",
        )
        assert end.stats() == {"prefill": counted} and counted["chunks_received"]
        with pytest.raises(BindError, match="must start again, with a new card"):
            end.meet(cards, stripe=CASE.stripe)


@pytest.mark.parametrize("each", range(1, 10))
def test_a_peer_that_keeps_its_slots_leaves_one_to_others(each: int) -> None:
    """The last free slot goes only to a peer that has none, each way by itself; a third stays for peers that come later."""
    made = ring.Ring("cpu", 256, each, each)
    for sends in (True, False):
        kept = [slot for _ in range(each + 1) if (slot := made.take("stopped", sends=sends)) is not None]
        assert made.free(sends=sends) == each - len(kept) == (max(each // 3, 1) if each > 1 else 0)
        for peer in ("one", "two") if each > 1 else ():
            slots = [slot for _ in range(each) if (slot := made.take(peer, sends=sends)) is not None]
            assert slots
            for slot in slots:
                made.give(slot)
        for slot in kept:
            made.give(slot)
        assert made.free(sends=sends) == each and not made._taken
    with pytest.raises(KeyError):  # given twice, two chunks would share it
        made.give(kept[0])
    made.close()


def test_any_number_of_stopped_peers_leaves_a_slot_to_each_other_peer() -> None:
    """Peers take and give in any order, and some stop and keep what they have: a live one that has no slot gets one, always."""
    for seed in range(300):
        rng = random.Random(seed)
        peers = [f"{number}" for number in range(rng.randint(1, 9))]
        each = len(peers) + rng.choice((0, 1, 3, 8))
        made = ring.Ring("cpu", 256, each, each)
        kept: dict[tuple[str, bool], list[int]] = {(peer, sends): [] for peer in peers for sends in (True, False)}
        made.meet(peers[: len(peers) // 2])
        made.meet(peers)  # again: each counts once
        live = set(peers)
        for _ in range(200):
            peer, sends = rng.choice(peers), rng.random() < 0.5
            mine = kept[peer, sends]
            if peer in live and mine and rng.random() < 0.4:
                made.give(mine.pop(rng.randrange(len(mine))))
            elif (slot := made.take(peer, sends=sends)) is not None:  # also who has stopped may have asked before
                mine.append(slot)
            else:
                assert mine, f"seed {seed}: {peer} has none and gets none: {kept}"
            if rng.random() < 0.02 and len(live) > 1:
                live.discard(rng.choice(peers))
            without = sum(not kept[one, sends] for one in peers)
            assert made.free(sends=sends) >= without
        for peer in peers[1:]:
            made.part(peer)
            made.part(peer)
        for slots in kept.values():
            for slot in slots:
                made.give(slot)
        alone = [slot for _ in range(each) if (slot := made.take(peers[0], sends=True)) is not None]
        assert each - len(alone) == (max(each // 3, 1) if each > 1 else 0)  # for who comes later
        made.close()


def test_peers_take_turns_where_there_are_more_of_them_than_slots() -> None:
    """One peer less than there are slots stops with all that it gets: each of the others gets one, again and again."""
    for each, more in ((2, 1), (2, 5), (3, 1), (4, 3), (7, 20)):
        for sends in (True, False):
            made = ring.Ring("cpu", 256, each, each)
            peers = [f"{number}" for number in range(each + more)]
            made.meet(peers)
            stopped, live = peers[: each - 1], peers[each - 1 :]
            assert all(made.take(peer, sends=sends) is not None for peer in stopped)
            kept: dict[str, list[int]] = {peer: [] for peer in live}
            turns: Counter[str] = Counter()
            for _ in range(5 * len(live)):
                for peer in live:  # as an endpoint's thread does: first take, then give what is done
                    assert not any(made.take(one, sends=sends) for one in stopped)
                    got, kept[peer] = made.take(peer, sends=sends), kept[peer]
                    for slot in kept[peer]:
                        made.give(slot)
                    kept[peer] = [] if got is None else [got]
                    turns[peer] += got is not None
            assert min(turns[peer] for peer in live) > 1, turns
            made.close()


def test_one_slot_is_for_one_peer() -> None:
    """A second peer is refused, with what to pass, until the first is gone and its slots are free."""
    made = ring.Ring("cpu", 256, 1, 2)
    made.require_room(1)
    with pytest.raises(BindError, match=r"2 peers and one slot each way: .* expected 2 or more"):
        made.require_room(2)
    made.meet(["one"])
    slot = made.take("one", sends=True)
    assert slot is not None
    made.require_room(0)
    for _ in range(2):
        with pytest.raises(BindError, match="2 peers"):
            made.require_room(1)
        made.part("one")
    made.give(slot)
    made.require_room(1)
    made.close()
    with Two() as two:
        place, below = reshard.vllm(MODEL, name="decode"), wire.memory("one", two.hub)
        with reshard.Endpoint("decode", place, 0, two.pool, wire=below, chunk_bytes=1 << 14, slots=1) as end:
            for _ in range(2):
                with pytest.raises(BindError, match="2 peers and one slot each way"):
                    end.meet([one.card() for one in two.ranks])
            assert not end.links and not below._peers
        size = 1 << 14
        for ring_bytes, each, most in ((4 * size, 2, size), (4 * size - 1, 2, size - 256), (2 * size, 2, None)):
            below = wire.memory(f"ring of {ring_bytes}".replace(" ", "-"), two.hub)
            with reshard.Endpoint(
                "decode", place, 0, two.pool, wire=below, chunk_bytes=1 << 14, ring_bytes=ring_bytes
            ) as end:
                assert end.ring.sends == end.ring.takes == each and end.ring.slab.nbytes <= ring_bytes
                assert most is None or end._chunk_bytes == most
                assert len(end.meet([one.card() for one in two.ranks]).peers) == 2


class Ending:
    """A wire whose puts to some peers never end, as those to a process that has stopped."""

    def __init__(self, below: Any, stopped: set[str]) -> None:
        self.below, self.stopped = below, stopped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def put(self, peer: str, *given: Any) -> Any:
        return self if peer in self.stopped else self.below.put(peer, *given)

    def query(self) -> bool:
        return False


@pytest.mark.parametrize(("count", "live", "slots"), [(1, 1, 2), (2, 1, 3), (7, 1, 8), (2, 1, 6), (1, 3, 2), (2, 4, 3)])
def test_peers_that_stop_in_the_middle_keep_no_other_from_progress(count: int, live: int, slots: int) -> None:
    """Some peers stop behind their offers and grants: no put from them or to them ever ends.  The others go on."""
    place, layout, hub = reshard.vllm(MODEL, name="e"), kvbm.load("vllm/flash_attn_nhd"), wire.Hub()
    stopped: set[str] = set()
    given: dict[str, Any] = {"chunk_bytes": 1 << 14, "slots": slots}

    def engine(name: str, of: Any) -> reshard.Endpoint:
        pool = Pool.allocate(layout, place.shape(0), 16)
        for array in pool.arrays:
            array[:] = 0
        return reshard.Endpoint(name, place, 0, pool, wire=of, **given)

    with contextlib.ExitStack() as stack:
        me = stack.enter_context(engine("me", Ending(wire.memory("me", hub), stopped)))
        deaf = [Deaf(Ending(wire.memory(f"stopped-{number}", hub), stopped)) for number in range(count)]
        others = [stack.enter_context(engine(f"stopped {number}", one)) for number, one in enumerate(deaf)]
        healthy = [stack.enter_context(engine(f"live {at}", wire.memory(f"live-{at}", hub))) for at in range(live)]
        for one in deaf:
            one.listens = True
        pairs = [(me.meet([one.card()]), one.meet([me.card()])) for one in (*others, *healthy)]
        span, lost = Span(TABLE, ALL), []
        for number, (mine, theirs) in enumerate(pairs[:count]):
            stopped.update(mine.peers, theirs.peers)
            lost += [mine.receive(f"from {number}", span, timeout=60), theirs.send(f"from {number}", span, timeout=60)]
            lost += [mine.send(f"to {number}", span, timeout=60), theirs.receive(f"to {number}", span, timeout=60)]
        peers = [peer for mine, _ in pairs[:count] for peer in mine.peers]
        until(lambda: all(me.ring._taken[peer, sends] for peer in peers for sends in (True, False)), "they have slots")
        for one in deaf:
            one.listens = False
        for number in range(10):
            handles = [
                handle
                for mine, theirs in pairs[count:]
                for one, other, key in ((mine, theirs, f"in {number}"), (theirs, mine, f"out {number}"))
                for handle in (one.receive(key, span, timeout=LIMIT), other.send(key, span, timeout=LIMIT))
            ]
            assert ended(handles) == [None] * len(handles)
        assert not any(one.has_ended for one in lost)


@pytest.mark.parametrize("slots", [1, 2])
def test_few_slots(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of one or two slots per direction: slower, and right."""
    monkeypatch.setattr(ring.Ring, "require_room", lambda *_: None)  # no peer stops here
    with on_faulty({}, slots=slots) as found:
        assert all(end.ring.sends == end.ring.takes == slots for end in found.all_ends)
        for k in range(2):
            found.refill()
            assert not any(ended(found.begin(random.Random(k), name=f"{k}-")))
            found.check()
        assert sum(link.stats()["stalls"] for link in found.links[1]) > 0
        found.require_slots()


@pytest.mark.threads
def test_many_keys_at_once() -> None:
    with on_faulty({}) as found:
        handles = [handle for k in range(20) for handle in found.begin(random.Random(k), name=f"{k}-")]
        assert not any(ended(handles))
        found.check()
        found.require_slots()


def test_the_receiver_has_some_of_it_already() -> None:
    """Only the missing tokens are sent."""
    with on_faulty({}) as found:
        (tokens, *_) = CASE.sequences[0]
        some = range(tokens.start + 3, tokens.stop - 2)
        sent = [link.send("one", span) for link, (span,) in zip(found.links[0], found.spans(0), strict=True)]
        came = [
            link.receive("one", Span(span.table, some, span.origin))
            for link, (span,) in zip(found.links[1], found.spans(1), strict=True)
        ]
        assert not any(ended([*sent, *came]))
        from dataclasses import replace

        want = reshard_oracle.Scene(replace(found.case, sequences=((some, *CASE.sequences[0][1:]),)))
        for got, wanted in zip(found.run.buffers[1], want.after, strict=True):
            assert np.array_equal(got, wanted)


def test_the_thread_breaks() -> None:
    """An internal error of kvbm ends the link with its reason: nobody waits forever."""
    with on_faulty({}) as found:
        (span,) = found.spans(0)[0]
        handle = found.links[0][0].send("one", span, timeout=60)

        def broken() -> None:
            raise ValueError("a mistake")

        found.ends[0][0].submit(broken)
        [error] = ended([handle])
        assert isinstance(error, TransferError) and "a mistake" in str(error)
        with pytest.raises(BindError, match="a mistake"):
            found.links[0][0].send("two", span)


def test_nothing_comes_from_the_dead() -> None:
    """Whoever waits for a peer's first message gets the error that it is closed or broken, long before the deadline."""
    for how in ("closed", "broken"):
        with on_faulty({}) as found:
            end = found.ends[0][SENDER]
            if how == "closed":
                end.close()
            else:
                end.submit(lambda: next(iter(())))
            came = begun(found, 1)
            until(lambda came=came: any(handle.has_ended for handle in came), "one is told")  # type: ignore[misc]
            [error, *_] = [error for error in ended([one for one in came if one.has_ended]) if error]
            assert isinstance(error, PeerLostError), error


class Counted:
    """A memory wire whose calls are counted."""

    def __init__(self, below: Any) -> None:
        self.below, self.calls = below, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.below, name)


def counted() -> Linked:
    hub = wire.Hub()
    return Linked(CASE, lambda side, rank: Counted(wire.memory(f"{side}/{rank}", hub)), chunk_bytes=1 << 12, slots=4)


def test_who_is_told_polls_seldom() -> None:
    """A waiting thread must not keep Python's lock from others: without events it polls a hundred times per second."""
    with counted() as found:
        begin = time.monotonic()
        for one in found.wires[1]:
            one.calls.clear()
        assert all(isinstance(error, TransferTimeoutError) for error in ended(begun(found, 1, timeout=0.5)))
        polls = [one.calls["poll"] for one in found.wires[1]]
        most = 110 * (time.monotonic() - begin) + 10
        assert all(0 < many < most for many in polls), (polls, most)


class Sleeps(endpoints._Wake):
    """Keeps how long the thread has slept at most; -1: until it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, seconds: float = -1) -> None:
        self.seconds.append(seconds)
        super().wait(seconds)


class Silent:
    """A wire that must be polled, as NIXL's."""

    def __init__(self, below: Any) -> None:
        self.below = below

    def __getattr__(self, name: str) -> Any:
        if name == "on_news":
            raise AttributeError(name)
        return getattr(self.below, name)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_idle_endpoint_wakes_up_seldom_or_never(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never if its wire wakes it, or if it has no peers; else at most 10 times a second.  It still hears what begins."""
    monkeypatch.setattr(endpoints, "_Wake", Sleeps)
    hub = wire.Hub()

    def make(side: int, rank: int) -> Any:
        below = wire.memory(f"{side}/{rank}", hub)
        return below if is_told else Silent(below)

    with Linked(CASE, make, chunk_bytes=1 << 12, ring_bytes=1 << 16) as found:
        for name in ("first", "second"):
            found.refill()
            assert not any(ended(found.begin(name=name)))
            found.check()
            for end in found.all_ends:
                slept = end._wake.seconds  # type: ignore[attr-defined]
                until(lambda slept=slept: slept and slept[-1] == (-1 if is_told else 0.1), "it sleeps long")  # type: ignore[misc]
        alone = Pool.allocate(kvbm.load("nhd"), SHAPE, 4)
        with reshard.Endpoint("alone", reshard.vllm(SHAPE, name="alone"), 0, alone, wire=make(0, 9), chunk_bytes=1 << 12) as end:
            slept = end._wake.seconds  # type: ignore[attr-defined]
            until(lambda: slept[-1:] == [-1], "it sleeps until something happens")
            count = len(slept)
            end.call(int)
            until(lambda: len(slept) > count, "it sleeps again")
            assert len(slept) <= count + 2 and slept[-1] == -1


def test_what_is_on_its_way_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender sends only its offers and one put per chunk, each with its note; nothing is repeated."""
    monkeypatch.setattr(flows, "REPEAT_SECONDS", (30.0, 30.0))
    monkeypatch.setattr(links, "_PROBES", 1e9)
    with counted() as found:
        for side in found.wires:
            for one in side:
                one.calls.clear()
        assert not any(ended(found.begin(PUSHED)))
        for link, one in zip(found.links[0], found.wires[0], strict=True):
            told = link.stats()
            assert one.calls["put"] == told["chunks_sent"] and one.calls["note"] <= len(link.peers), one.calls
        assert sum(one.calls["put"] for one in found.wires[0]) > 8
        found.check()
        found.require_slots()


@pytest.mark.parametrize("most", [1, 4096])
def test_launches_are_kept_by_slot(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """At most a given number of launches is cached; evicted ones are made again."""
    monkeypatch.setattr(pack, "_MOST_LANES", most)
    with counted() as found:
        for name in ("a", "b", "c"):
            found.refill()
            assert not any(ended(found.begin(PUSHED, name=name)))
            found.check()
        kept = [len(packer._routes) for side in found.links for link in side for packer in link._packers.values()]
        assert max(kept) <= most and (most == 1 or max(kept) > 1)


class Undroppable:
    """A wire with peers that do not answer: `drop` waits as long as it may, and then raises `TransferTimeoutError`."""

    def __init__(self, below: Any) -> None:
        self.below, self.go_on, self.drops = below, threading.Event(), []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def drop(self, peer: str, seconds: float | None = None) -> None:
        self.drops.append(peer)
        self.go_on.wait(LIMIT if seconds is None else seconds)
        raise TransferTimeoutError(peer)


def test_who_cannot_be_dropped_holds_up_nobody() -> None:
    """While a peer that does not answer is dropped, again and again, the endpoint does everything else."""
    place = reshard.vllm(MODEL, name="decode")
    with Two() as two, Two() as other:
        below = Undroppable(wire.memory("d/1", two.hub))
        given: dict[str, Any] = {"chunk_bytes": 1 << 14, "ring_bytes": 1 << 18}
        with reshard.Endpoint("decode", place, 0, two.pool, wire=below, **given) as end:
            link = end.meet([one.card() for one in two.ranks])
            assert [one.meet([end.card()]) for one in two.ranks]
            two.ranks[1].close()
            [error] = ended([link.receive("k", Span(TABLE, ALL), timeout=60)])
            assert isinstance(error, PeerLostError)
            until(lambda: below.drops, "it is dropped")
            healthy = reshard.vllm(MODEL, name="healthy")
            with reshard.Endpoint("healthy", healthy, 0, other.pool, wire=wire.memory("h", two.hub), **given) as third:
                mine, theirs = end.meet([third.card()]), third.meet([end.card()])
                for number in range(5):
                    came = mine.receive(f"{number}", Span(TABLE, ALL), timeout=LIMIT / 2)
                    sent = theirs.send(f"{number}", Span(TABLE, ALL), timeout=LIMIT / 2)
                    assert ended([came, sent]) == [None, None]
                assert not below.go_on.is_set()
            until(lambda: len(below.drops) > 3, "it is asked again")
            assert end.dropping.keys() == set(below.drops)
            below.go_on.set()


def test_every_call_ends_with_the_callers_limit() -> None:
    """The endpoint's thread does not answer.  A call that had not begun is not made; a link of one that had is the next call's."""
    with Two() as two:
        end, cards = two.end, [one.card() for one in two.ranks]
        with held(end):
            made: list[int] = []
            with pytest.raises(TransferTimeoutError, match=r"the endpoint.s thread has not answered within 0\.01 s"):
                end.call(lambda: made.append(1), 0.01)
            for call in (
                lambda: end.join([end.card()], timeout=0.01),
                lambda: end.meet(cards, timeout=0.01),
                lambda: end.meet(cards, timeout=0),
            ):
                with pytest.raises(TransferTimeoutError):
                    call()
        link = end.meet(cards)
        assert not made and end.links == (link,) and end.siblings is None
        with held(end), pytest.raises(TransferTimeoutError):
            link.close(timeout=0.01)
        link.close()
    with Two() as two:
        end, cards = two.end, [one.card() for one in two.ranks]
        connect, is_connecting, go_on = end.wire.connect, threading.Event(), threading.Event()

        def slow(card: bytes) -> str:
            is_connecting.set()
            assert go_on.wait(LIMIT)
            return connect(card)

        end.wire.connect = slow  # type: ignore[method-assign]
        with pytest.raises(TransferTimeoutError):
            end.meet(cards, timeout=0.05)
        assert is_connecting.is_set()
        go_on.set()
        link = end.meet(cards)
        assert end.links == (link,) and len(link.peers) == 2


class Endless:
    """A wire whose puts never end."""

    def __init__(self, of: Any) -> None:
        self._of, self.has_put = of, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def put(self, *given: Any) -> Any:
        self._of.put(*given[:3])
        self.has_put.set()
        return self

    def query(self) -> bool:
        return False


def test_slots_of_puts_under_way_are_free_when_the_link_is_closed() -> None:
    """The link is removed only after its puts."""
    hub = wire.Hub()
    with Linked(CASE, wires=lambda side, rank: Endless(wire.memory(f"{side}/{rank}", hub))) as found:
        handles = found.begin(Pushed())
        assert found.wires[0][SENDER].has_put.wait(LIMIT)
        for link in found.links[0]:
            link.close()
        assert any(ended(handles))
        found.require_slots()


class SlowGets:
    """A wire whose gets transfer only when they are released, as an adapter may."""

    def __init__(self, below: Any) -> None:
        self.below, self.ops, self.go_on = below, [], threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def get(self, peer: str, local: wire.Slice, remote: wire.Slice) -> Any:
        self.ops.append(SlowGet(partial(self.below.get, peer, local, remote), local.offset, self.go_on))
        return self.ops[-1]


class SlowGet:
    def __init__(self, read: Any, offset: int, go_on: threading.Event) -> None:
        self.read, self.offset, self.go_on, self.is_done = read, offset, go_on, False

    def query(self) -> bool:
        if not self.is_done and self.go_on.is_set():
            self.read()
            self.is_done = True
        return self.is_done


def test_a_slot_is_not_free_while_a_get_writes_it() -> None:
    """The sender aborts while its chunks are pulled."""
    with Two(tp=1) as two:
        slow = SlowGets(wire.memory("d/1", two.hub))
        place = reshard.vllm(MODEL, name="decode")
        with reshard.Endpoint("decode", place, 0, two.pool, wire=slow, chunk_bytes=1 << 14, ring_bytes=1 << 18) as end:
            mine, other = end.meet([two.ranks[0].card()]), two.ranks[0].meet([end.card()])
            sent = other.offer("k", Span(TABLE, ALL), timeout=60)
            came = mine.receive("k", Span(TABLE, ALL), timeout=60)
            until(lambda: slow.ops, "a get is under way")
            sent.abort()
            assert all(isinstance(error, TransferError) for error in ended([sent, came]))

            def written_and_free() -> tuple[set[int], set[int]]:
                written = {op.offset // end.ring.slot_bytes for op in slow.ops}
                return written, written & set(end.ring._free[1])

            for _ in range(5):
                written, free = end.call(written_and_free)
                assert written and not free and not any(op.is_done for op in slow.ops)
            slow.go_on.set()
            until(lambda: end.ring.free(sends=False) == end.ring.takes, "all slots are free")
            assert all(op.is_done for op in slow.ops)


def test_what_is_fetched_of_an_offer_that_was_withdrawn_is_not_unpacked() -> None:
    """A receive after a failed one waits for the next offer, while a get of the first offer ends much later."""
    with Two(tp=1) as two:
        slow = SlowGets(wire.memory("d/1", two.hub))
        place = reshard.vllm(MODEL, name="decode")
        with reshard.Endpoint("decode", place, 0, two.pool, wire=slow, chunk_bytes=1 << 14, ring_bytes=1 << 20) as end:
            mine, other = end.meet([two.ranks[0].card()]), two.ranks[0].meet([end.card()])
            assert isinstance(*ended([mine.receive("k", Span(TABLE, ALL), timeout=0.0)]), TransferTimeoutError)
            came = mine.receive("k", Span(TABLE, ALL), timeout=60)
            first = other.offer("k", Span(TABLE, ALL), timeout=60)
            until(lambda: slow.ops, "a get is under way")
            first.abort()
            assert isinstance(*ended([first]), TransferError)
            for array in two.pools[0].arrays:
                array[:] = 2
            assert ended([other.send("k", Span(TABLE, ALL), timeout=60), came]) == [None, None]
            assert all((array[:, TABLE] == 2).all() for array in two.pool.arrays)
            for array in two.pool.arrays:
                array[:] = 3  # they are somebody else's
            slow.go_on.set()
            until(lambda: end.ring.free(sends=False) == end.ring.takes, "all slots are free")
            assert all(op.is_done for op in slow.ops) and all((array == 3).all() for array in two.pool.arrays)


# ---- processes -------------------------------------------------------------------------------------------------------

KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(find_spec(kind.split()[-1]) is None, reason=f"{kind.split()[-1]} is not installed"))
    for kind in ("torch", "nixl", "mapped torch", "mapped nixl", "direct torch", "direct nixl")
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["decode", "prefill"])
def test_a_process_is_killed(kind: str, engine: str, tmp_path: Path, place: str) -> None:
    """At any time: the other process gets an error within its deadline, no slot is lost, and a new process works."""
    other = "prefill" if engine == "decode" else "decode"
    for turn, after in enumerate((0.0, 0.05) if engine == "decode" else (0.01, 0.2)):
        folder = tmp_path / str(turn)
        folder.mkdir()
        process = context().Process(target=far_end, args=(engine, kind, str(folder), place), daemon=True)
        with endpoint(other, kind, place) as mine:
            process.start()
            try:
                link = meet(mine, other, engine, folder)
                begin = link.send if other == "prefill" else link.receive
                begin("0", span(other), timeout=30).synchronize(30)
                if other == "decode":
                    require_right(mine)
                elif kind.startswith("mapped"):
                    assert link.stats()["chunks_mapped"] == link.stats()["chunks_sent"] > 0, mine.wire.unmapped
                if kind.startswith("direct"):
                    assert link.stats()["chunks_sent"] == 0 and link.stats()["pulls"] == (other == "decode"), link.paths
                threading.Timer(after, process.kill).start()
                number, error = 1, None
                while error is None:
                    [error] = ended([begin(str(number), span(other), timeout=LIMIT)], 2 * LIMIT)
                    number += 1
                assert isinstance(error, PeerLostError | TransferTimeoutError), error
                ring = mine.ring
                until(
                    lambda ring=ring: not ring.quarantined and ring.free(sends=False) == ring.takes,  # type: ignore[misc]
                    "all slots are free", 3 * LIMIT,
                )  # fmt: skip
            finally:
                process.kill()
                process.join()


def require_right(mine: Any) -> None:
    """Require that the destination has the data that `programs.links` writes to the source."""
    (_, pool) = mine.groups[""]
    for number, array in enumerate(pool.arrays):  # o b h t d
        model = kvbm.load_shape(SHAPE)
        made = np.random.default_rng(number).integers(0, 1 << 16, (2, 4 * BLOCKS, 16, model.nh, model.hd), np.uint16)
        want = made[:, span("prefill").table].reshape(2, -1, model.nh, model.hd)[:, :TOKENS]
        got = np.moveaxis(array[:, span("decode").table], 3, 2).reshape(2, -1, model.nh, model.hd)[:, :TOKENS]
        assert np.array_equal(got, want)


def two_gpus() -> list[str]:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL connects two GPUs")
    return ["--devices", "cuda:0", "cuda:1"]


def torchrun(processes: int, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip


def forked(processes: int, folder: Path, *words: Any, modules: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, without its agent and without imports, which take three seconds a rank.  `modules` are imported once."""
    output = folder / "output"
    output.touch()
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    each = [
        ({**at, "RANK": str(rank), "LOCAL_RANK": str(rank)}, str(output), [*map(str, words)]) for rank in range(processes)
    ]
    parent = context().Process(target=ranks.side_by_side, args=(modules, each, 120.0))
    parent.start()
    parent.join(150)
    parent.kill()
    parent.join()
    return subprocess.CompletedProcess(words, abs(parent.exitcode or 0), output.read_text(), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        ("hosts", "torch"),
        ("hosts", "nixl"),
        pytest.param("one GPU", "nixl", marks=pytest.mark.gpu),  # NCCL wants one for each process
        pytest.param("GPUs", "torch", marks=pytest.mark.gpu),
        pytest.param("GPUs", "nixl", marks=pytest.mark.gpu),
    ],
)
def test_the_example_with_mapped_memory(torch: Any, tmp_path: Path, devices: str, kind: str) -> None:
    """All chunks of all ranks are packed directly into the destination's slots."""
    pytest.importorskip("nixl" if kind == "nixl" else "torch")
    words = ["--tokens", "300", "--mapped", "--wire", kind]
    words += two_gpus() if devices == "GPUs" else ["--devices", "cuda:0", "cuda:0"] if devices == "one GPU" else []
    done = forked(6, tmp_path, EXAMPLES / "run.py", *words)
    assert done.returncode == 0 and done.stdout.count("digest 0x") == 2, done.stdout + done.stderr
    count = 3 if devices == "hosts" else 1  # on a GPU so small a message is not cut
    assert done.stdout.count(f"{count} of {count} chunks packed there") == 4, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["hosts", *(pytest.param(text, marks=pytest.mark.gpu) for text in ("one GPU", "GPUs"))])
def test_the_example_with_direct_copies(torch: Any, tmp_path: Path, devices: str) -> None:
    """All ranks of decode copy out of the caches of prefill's ranks; by NIXL's notes between GPUs of other processes."""
    words = ["--tokens", "300", "--direct"]
    if devices != "hosts":
        pytest.importorskip("nixl")
        words += ["--wire", "nixl", *(two_gpus() if devices == "GPUs" else ["--devices", "cuda:0", "cuda:0"])]
    done = forked(6, tmp_path, EXAMPLES / "run.py", *words)
    assert done.returncode == 0 and done.stdout.count(", direct\n") == 2, done.stdout + done.stderr


PLACES = ["hosts", pytest.param("GPUs", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "under_torchrun"),
    [
        ("hosts", False),
        pytest.param("hosts", True, marks=pytest.mark.full),  # 20 s
        pytest.param("GPUs", True, marks=pytest.mark.gpu),
    ],
)
def test_the_example(torch: Any, tmp_path: Path, devices: str, under_torchrun: bool) -> None:
    """Six processes with gloo, or with NCCL; each checks its received data."""
    words = EXAMPLES / "run.py", "--tokens", "300", *(two_gpus() if devices == "GPUs" else ())
    done = torchrun(6, *words) if under_torchrun else forked(6, tmp_path, *words)
    assert done.returncode == 0 and done.stdout.count("digest 0x") == 2, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", PLACES)
def test_a_model_goes_on_in_another_process(torch: Any, tmp_path: Path, devices: str) -> None:
    """Logits after a transfer are bitwise those of one process; they differ if one transferred element differs."""
    pytest.importorskip("transformers")
    words = [EXAMPLES / "generation.py", "--new", "8", *(two_gpus() if devices == "GPUs" else ())]
    (tmp_path / "right").mkdir()
    llama = ("transformers", "transformers.models.llama.modeling_llama")
    done = forked(3, tmp_path / "right", *words, modules=llama)
    assert done.returncode == 0 and "8 of 8 logits have the same bits" in done.stdout, done.stdout
    assert done.stdout.count("4 layers one by one") == 2
    done = forked(3, tmp_path, *words, "--spoil", modules=llama)
    assert done.returncode and " of 8 logits differ" in done.stdout, done.stdout


# ---- peers that say what they should not -----------------------------------------------------------------------------

MODEL = kvbm.load_shape("llama-3.1-8b,nl=2,hd=16,dtype=float16")


class Two:
    """An engine of some ranks, whose last rank is controlled by the test, and an engine of one rank that receives."""

    def __init__(self, tp: int = 2, model: kvbm.BlockShape = MODEL) -> None:
        self.hub = wire.Hub()
        places = reshard.vllm(model, tp=tp, name="prefill"), reshard.vllm(model, name="decode")
        options: dict[str, Any] = {"chunk_bytes": 1 << 14, "ring_bytes": 1 << 18}
        layout = kvbm.load("vllm/flash_attn_nhd")
        self.pools = [Pool.allocate(layout, places[0].shape(rank), 16) for rank in range(tp)]
        self.pool = Pool.allocate(layout, places[1].shape(0), 16)
        for array in (array for pool in (*self.pools, self.pool) for array in pool.arrays):
            array[:] = 0
        self.ranks = [
            reshard.Endpoint("prefill", places[0], rank, pool, wire=wire.memory(f"p/{rank}", self.hub), **options)
            for rank, pool in enumerate(self.pools)
        ]
        self.end = reshard.Endpoint("decode", places[1], 0, self.pool, wire=wire.memory("d/0", self.hub), **options)

    def by_hand(self) -> reshard.Link:
        """The receiver's link, in which the test acts as the last rank."""
        self.wire = wire.memory("by-hand", self.hub)
        self.wire.register(wire.Slab.of(np.zeros(1 << 20, np.uint8)))
        card = json.loads(self.ranks[-1].card())
        card["wire"] = base64.b64encode(self.wire.card()).decode()
        link = self.end.meet([*(end.card() for end in self.ranks[:-1]), json.dumps(card).encode()])
        self.peer = self.wire.connect(base64.b64decode(json.loads(self.end.card())["wire"]))
        return link

    def say(self, note: notes.Note) -> None:
        self.wire.note(self.peer, notes.write(note))

    def hear(self, kind: type) -> Any:
        def heard() -> list[Any]:
            came = [notes.read(data) for _, data in self.wire.poll()]
            return [note for note in came if isinstance(note, kind)]

        return until(heard, f"a {kind.__name__} comes")[0]

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        close_all([*self.ranks, self.end])


TABLE, ALL = list(range(8)), range(128)


def test_a_failed_receive_writes_nothing_more() -> None:
    """One rank offers too little, another the right data: an error, and no byte of the blocks changes afterwards."""
    with Two() as two:
        links = [end.meet([two.end.card()]) for end in two.ranks]
        mine = two.end.meet([end.card() for end in two.ranks])
        sent = []
        for number, tokens in enumerate((range(64), ALL)):  # the wrong one first
            sent.append(links[number].send("k", Span(TABLE, tokens), timeout=60))
            until(lambda number=number: len(mine._offers) == number + 1, "it is offered")  # type: ignore[misc]
        with held(two.ranks[1]):
            [error] = ended([mine.receive("k", Span(TABLE, ALL), timeout=60)])
            assert isinstance(error, BindError) and "expected tokens" in str(error)
            for array in two.pool.arrays:
                array[:] = 7
        assert all(isinstance(error, TransferError) for error in ended(sent))
        assert all((array == 7).all() for array in two.pool.arrays)
        both = [link.send("k", Span(TABLE, ALL)) for link in links]
        assert not any(ended([*both, mine.receive("k", Span(TABLE, ALL))])), "the next try is poisoned"


def test_offers_that_are_none() -> None:
    """Offers of a rank that sends nothing here, or of other plans, layers, tokens: the receive fails, the endpoint works on."""
    for model, change in (
        (kvbm.load_shape("llama-3.1-8b,nl=2,nh=1,hd=16,dtype=float16"), {}),
        (MODEL, {"plan": 5}),
        (MODEL, {"layers": range(1 << 23)}),
        (MODEL, {"layers": range(1, 3)}),
        (MODEL, {"tokens": range(3, 9), "origin": 3}),
    ):
        with Two(model=model) as two:
            link = two.by_hand()
            identity = 0, links._hashed("k")
            arrival = link.receive("k", Span(TABLE, ALL), timeout=60)
            right = {"plan": link.plans(0)[1], "layers": range(2), "tokens": ALL, "origin": 0, "pulls": False}
            two.say(notes.Offer(1, key=identity[1], group=identity[0], **{**right, **change}))
            [error] = ended([arrival])
            assert isinstance(error, BindError), (change, error)
            assert two.hear(notes.Stop).why in str(error)
            assert two.end.call(lambda: 5) == 5


def test_a_slot_that_there_is_not() -> None:
    with Two() as two:
        link = two.by_hand()
        number, key = 0, links._hashed("k")
        arrival = link.receive("k", Span(TABLE, ALL), timeout=60)
        two.say(notes.Offer(1, link.plans(0)[1], key, number, range(2), ALL, 0, True))
        want = two.hear(notes.Want)
        two.say(notes.Put(1, want.arrival, want.grants[0].serial, want.grants[0].chunk, 4_000_000_000, 0))
        [error] = ended([arrival])
        assert isinstance(error, BindError) and "slot 4000000000" in str(error)


@pytest.mark.slow  # 0.5 s
@pytest.mark.sanitize
def test_no_note_takes_more_than_1_mib() -> None:
    """Every kind of note with the largest and the smallest numbers, alone and mixed, while a transfer runs in each direction."""
    rng = random.Random(2)
    numbers = [0, 1, 2, 3, 255, (1 << 16) - 1, (1 << 24) - 1, (1 << 32) - 1, (1 << 48) - 1, (1 << 63), (1 << 64) - 1]
    kinds = list(notes._KINDS.items())
    with Two() as two:
        link = two.by_hand()
        group, key = 0, links._hashed("k")
        known = 1
        tracemalloc.start()
        try:
            for round_ in range(18 * len(kinds)):
                arrival = link.receive("k", Span(TABLE, ALL), timeout=60)
                first = notes.Offer(1000 + round_, link.plans(0)[1], key, group, range(1), ALL, 0, False)
                two.say(first)  # right, and so the next offer is compared with it
                two.end.call(lambda: None)
                two.end.call(lambda: None)
                number, (kind, layout) = kinds[round_ % len(kinds)]
                told = list(layout.unpack(bytes(layout.size)))
                for at, value in enumerate(told):
                    if isinstance(value, bool):
                        told[at] = rng.random() < 0.5
                    elif isinstance(value, int):
                        told[at] = rng.choice(numbers)
                if kind is notes.Offer:
                    told[1] = key if rng.random() < 0.9 else b"x" * 16
                    told[0], told[2] = link.plans(0)[1], group if rng.random() < 0.9 else (1 << 16) - 1
                    told[3:8] = [0, (1 << 24) - 1, 0, (1 << 48) - 1, 0] if rng.random() < 0.5 else told[3:8]
                data = b""
                while not data:
                    try:
                        data = notes._HEAD.pack(b"kn", 1, number, rng.choice([known, *numbers])) + layout.pack(*told)
                    except struct.error:  # a number that the field does not have
                        told = [value % (1 << 16) if type(value) is int else value for value in told]
                if kind is notes.Want:
                    data += struct.pack("<III", 1, 2, 3) * (notes.MOST_GRANTS if round_ % 2 else 1)
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                two.wire.note(two.peer, data)
                two.end.call(lambda: None)
                two.end.call(lambda: None)
                two.wire.poll()
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < 1 << 20, (kind, told, peak - before)
                arrival.abort()
        finally:
            tracemalloc.stop()
        assert two.end.call(lambda: 5) == 5


def test_any_notes_in_any_order() -> None:
    """Well-formed and meaningless notes: transfers may fail, the endpoint works on, and no slot is lost."""
    rng = random.Random(1)
    with Two() as two:
        link = two.by_hand()
        number, key = 0, links._hashed("k")
        known = [1, 2, 3]
        for _ in range(2000):
            if rng.random() < 0.02:
                link.receive("k", Span(TABLE, ALL), timeout=0.05)
            few, any32 = rng.choice([*known, 0]), rng.choice((0, 1, 2, 1 << 31))
            two.say(
                rng.choice(
                    [
                        notes.Offer(
                            few, link.plans(0)[1], key, number, range(rng.randrange(2), 2), ALL, 0, rng.random() < 0.5
                        ),
                        notes.Want(few, few, 3, range(5), 0, any32, (notes.Grant(any32, any32, any32),)),
                        notes.Put(few, few, any32, any32, any32, few),
                        notes.Done(few, few, few),
                        notes.Stop(few, few, rng.random() < 0.5, rng.random() < 0.5, "why"),
                        notes.Stopped(few, few, rng.random() < 0.5),
                    ]
                )
            )
        assert two.end.call(lambda: 5) == 5
        two.wire.close()

        def are_free() -> bool:
            ended([link.receive("k", Span(TABLE, ALL), timeout=0.05)])
            return two.end.ring.free(sends=False) == two.end.ring.takes

        until(are_free, "all slots are free")


def test_closed_while_threads_send() -> None:
    """Each handle ends, in whatever state it was."""
    for _ in range(4):
        with on_faulty({}) as found:
            (span,), handles = found.spans(0)[SENDER], []
            stop = threading.Event()

            def work(
                link: Any = found.links[0][SENDER], span: Any = span, handles: list[Any] = handles, stop: Any = stop
            ) -> None:
                with contextlib.suppress(BindError):
                    for _ in itertools.takewhile(lambda _: not stop.is_set(), range(300)):
                        handles.append(link.send(str(len(handles)), span, timeout=60))

            threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            until(lambda handles=handles: len(handles) > 3, "some have begun")  # type: ignore[misc]
            found.ends[0][SENDER].close()
            stop.set()
            for thread in threads:
                thread.join(LIMIT)
            assert handles and all(isinstance(error, TransferError) for error in ended(handles))
            for handle in handles[:3]:
                handle.abort()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"key": ""}, "key"), ({"key": 5}, "key"), ({"key": "\ud800"}, "key"), ({"span": None}, "span"),
        ({"timeout": None}, "timeout"), ({"timeout": float("nan")}, "timeout"), ({"group": []}, "group"),
        ({"layers": range(3)}, "layers"), ({"verify": "no"}, "verify"),
    ],
)  # fmt: skip
def test_arguments(given: dict[str, Any], said: str) -> None:
    with Two() as two:
        link = two.end.meet([end.card() for end in two.ranks])
        with pytest.raises(BindError, match=said):
            link.receive(**{"key": "k", "span": Span(TABLE, ALL), **given})
        for cards in (5, b"card", ["card"], [None]):
            with pytest.raises(BindError, match="card"):
                two.end.meet(cards)  # type: ignore[arg-type]
        with pytest.raises(BindError, match="met already"):
            two.end.meet([end.card() for end in two.ranks])
    with pytest.raises(BindError):
        reshard.Endpoint("e", reshard.vllm(MODEL), 0, two.pool, wire=wire.memory("e"), ring_bytes=1 << 60)


@pytest.mark.parametrize("name", ["slots", "chunk_bytes", "ring_bytes", "max_sms"])
def test_a_number_of_an_endpoint_that_is_none_is_named(name: str) -> None:
    """Before anything is allocated."""
    place = reshard.vllm(MODEL)
    pool = Pool.allocate(kvbm.load("vllm/flash_attn_nhd"), place.shape(0), 2)
    for value in ("3", 0, -1, 2.5, True):
        with pytest.raises(BindError, match=f"endpoint e: {name}: expected a number from 1 on, got {value!r}"):
            reshard.Endpoint("e", place, 0, pool, wire=wire.memory("e"), **{name: value})


def test_numbers_of_an_endpoint_may_be_numpys() -> None:
    """Red: TypeError, as they are no JSON, or an overflow of their few bits."""
    place = reshard.vllm(MODEL)
    pool = Pool.allocate(kvbm.load("vllm/flash_attn_nhd"), place.shape(0), 2)
    given: dict[str, Any] = {"chunk_bytes": np.uint16(1 << 14), "ring_bytes": np.int64(1 << 18), "slots": np.int8(3)}
    with reshard.Endpoint("e", place, np.int64(0), pool, wire=wire.memory("e"), **given) as end:
        card = json.loads(end.card())
        assert [card[name] for name in ("rank", "chunk_bytes", "slot_bytes", "sends", "takes")] == [0, 1 << 14, 1 << 14, 3, 3]


# ---- cards and notes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kvbm-link": 1}, "version 5"),
        ({"rank": 1}, "missing"),
        ({"world": 1 << 20}, "world"),
        ({"rank": True}, "'rank' to be of int"),
        ({"model": "other"}, "model"),
        ({"wire": "!"}, "base64"),
        ({"slot_bytes": 16}, "slots that hold a chunk"),
        ({"slot_bytes": (16 << 20) + 8}, "of multiples of 16 bytes"),  # red: the first bytes of a chunk came before its slot
        ({"least": 0}, "'least' of bytes"),
        ({"least": 1 << 32}, "'least' of bytes"),
        ({"least": None}, "'least' to be of int"),
        ({"least": 1 << 21}, "differ in least"),
        ({"groups": {}}, "groups"),
        ({"groups": {"": {"placement": "mesh: [", "model": "nl=1", "planes": ""}}}, "card of decode"),
    ],
)
def test_cards(change: dict[str, Any], said: str) -> None:
    with on_faulty({}) as found:
        cards = [end.card() for end in found.ends[1]]
        wrong = json.dumps({**json.loads(cards[0]), **change}).encode()
        with pytest.raises(BindError, match=said):
            found.ends[0][0].meet([wrong, *cards[1:]])
        for text in (b"", b"[]", b"{", cards[0][:-9], b"\xff", b"[" * 100_000):
            with pytest.raises(BindError, match="card"):
                found.ends[0][0].meet([text, *cards[1:]])
        with pytest.raises(BindError, match="twice"):
            found.ends[0][0].meet([*cards, cards[0]])
        with pytest.raises(BindError, match="missing"):
            found.ends[0][0].meet(cards[1:])


def end_of(model: Any, name: str = "e") -> reshard.Endpoint:
    pool = Pool.allocate(kvbm.load("nhd"), reshard.vllm(MODEL).shape(0), 2)
    return reshard.Endpoint(name, reshard.vllm(MODEL), 0, pool, wire=wire.memory(name), model=model, ring_bytes=1 << 26)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("a", "b", "model: 'a' here and 'b' on the other side"),
        ({"weights": "1", "dtype": "f"}, {"weights": "2", "dtype": "f"}, "model: weights: '1' here and '2' on the other side;"),
        ({"rope": {"theta": 10000.0}}, {"rope": {"theta": 5e5}}, "rope.theta: '10000' here and '500000'"),
        ({"window": None}, {"window": 64}, "window: 'null' here and '64'"),
        ({"a": 1}, {"a": 1, "b": []}, "b: nothing here and '\\[\\]'"),
        ({"a": 1}, "a", "a: '1' here and nothing"),
        ({"a": "x" * 5000}, {"a": "x" * 4999 + "y"}, "a: 'xxx.*sha256:"),
        ({f"\u20ac\"{n}" * 50: "\u20ac" * n for n in range(300)}, {f"\u20ac\"{n}" * 50: "" for n in range(300)}, "more"),
        ({f"f{n}": n for n in range(2000)}, {f"f{n}": n % 1999 for n in range(2000)}, "others: 'sha256:"),
        ({f"f{n}": 0 for n in range(9)}, {f"f{n}": 1 for n in range(9)}, "5 more"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_models_that_differ_are_refused_by_field(ours: Any, theirs: Any, said: str) -> None:
    """A card has them, and stays small."""
    with end_of(ours, "one") as one, end_of(theirs, "other") as other:
        with pytest.raises(BindError, match=said):
            one.meet([other.card()])
        with pytest.raises(BindError, match="expected the same model"):
            other.meet([one.card()])
        assert len(one.card()) < 60_000 and len(other.card()) < 60_000


def test_models_that_are_the_same_meet() -> None:
    """Numbers that are equal are the same, and the order of fields does not count."""
    for ours, theirs in (("a", "a"), ({"a": 1e4, "b": {"c": [1.0]}}, {"b": {"c": (1,)}, "a": 10000}), ("a", {"model": "a"})):
        with end_of(ours, "one") as one, end_of(theirs, "other") as other:
            one.meet([other.card()])


@pytest.mark.parametrize(
    "held",
    [None, 5, ["a"], {"a": 1}, {"a": "x" * 97}, {"x" * 97: "a"}, {str(n): "" for n in range(193)}],
    ids=lambda held: str(held)[:12],
)
def test_models_in_cards_that_are_none(held: Any) -> None:
    with end_of("a", "one") as one, end_of("a", "other") as other, pytest.raises(BindError, match="card: 'model': expected"):
        one.meet([json.dumps({**json.loads(other.card()), "model": held}).encode()])
    for wrong in (5, None, b"a", {5.5: 1}):
        with pytest.raises(BindError, match="model: expected"):
            end_of(wrong)


NOTES = [
    notes.Offer(1, 2, b"k" * 16, 0, range(3, 5), range(7, 9), 6, True, 0.25),
    notes.Want(1, 2, 3, range(4, 6), 4, 9, tuple(notes.Grant(k, k, k) for k in range(5))),
    notes.Put(1, 2, 3, 4, 5, 1 << 63),
    notes.Done(1, 2, 3),
    notes.Stop(1, 2, True, False, "why"),
    notes.Stopped(1, 2, True),
    notes.Ask(1, 2, 3, range(4, 6), 4),
    notes.Table(1, 2, 3, 9, True, b"abcdefgh"),
    notes.Table(1, 2, 0, 0, False, b""),
    notes.Ready(1, 2, 3),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_notes_are_read_as_written(note: notes.Note) -> None:
    data = notes.write(note)
    assert notes.read(data) == note and len(data) <= wire.NOTE_BYTES
    for end in range(len(data)):
        if not isinstance(note, notes.Want | notes.Stop | notes.Table):
            with pytest.raises(BindError, match="note"):
                notes.read(data[:end])


@pytest.mark.slow  # half a second
@given(st.sampled_from(NOTES), st.integers(0, 200), st.binary(max_size=40))
def test_any_bytes_are_a_note_or_refused(note: notes.Note, at: int, some: bytes) -> None:
    data = notes.write(note)
    for bytes_ in (some, data[:at] + some + data[at + len(some) :], data + some):
        try:
            notes.read(bytes_)
        except BindError as error:
            assert str(error).startswith("note: expected")


def test_an_endpoint_whose_wire_drops_a_peer_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close raises until the drop has ended, and its ring is kept until then."""
    with on_faulty({}) as found:
        end = found.ends[1][0]
        drop, release, is_dropping, go_on, released = end.wire.drop, end.ring.close, threading.Event(), threading.Event(), []

        def slow(peer: str, seconds: float | None) -> None:
            is_dropping.set()
            assert go_on.wait(LIMIT)
            drop(peer, seconds)

        monkeypatch.setattr(end.wire, "drop", slow)
        monkeypatch.setattr(end.ring, "close", lambda: (released.append(end._thread.is_alive()), release()))
        with pytest.raises(TransferTimeoutError, match="close it again"):
            end.close(timeout=0.2)
        assert is_dropping.is_set() and not released
        go_on.set()
        until(lambda: not end._thread.is_alive(), "its thread has ended")
        end.close()
        assert released == [False]


def test_a_receive_that_was_called_before_notes_came_hears_them() -> None:
    """The notes belong to this receive, although its thread has not begun it yet."""
    with on_faulty({}) as found:
        ends = [list(zip(found.links[side], found.spans(side), strict=True)) for side in (0, 1)]
        go_on = threading.Event()
        for link, _ in ends[1]:
            poll, is_asked = link.endpoint.wire.poll, threading.Event()

            def late(poll: Any = poll, is_asked: threading.Event = is_asked) -> Any:
                is_asked.set()
                assert go_on.wait(LIMIT)
                return poll()

            link.endpoint.wire.poll = late  # type: ignore[method-assign]
            link.endpoint.submit(int)  # it sleeps
            assert is_asked.wait(LIMIT)
        came = [link.receive("one", span, timeout=60) for link, (span,) in ends[1]]
        sent = [link.send("one", span, timeout=60) for link, (span,) in ends[0]]
        until(lambda: all(one.flows for one in sent), "they are offered")
        for one in sent:
            one.abort()
        until(lambda: all(one.has_failed for one in sent), "they are given up")
        go_on.set()
        assert all(isinstance(error, TransferError) for error in ended([*sent, *came]))
        assert not any(isinstance(error, TransferTimeoutError) for error in ended(came))


def test_incarnations() -> None:
    """Cards of two starts of an engine are not mixed; a new start connects again, and transfers with the old one fail."""
    hub = wire.Hub()
    near = on_wire("prefill", wire.memory("near", hub))
    place = reshard.vllm(kvbm.load_shape(SHAPE), tp=2, nt=64, name="decode")
    pool = Pool.allocate(kvbm.load("vllm/flash_attn_hnd"), place.shape(0), 2)
    starts = ("monday", "tuesday")
    mixed = [
        reshard.Endpoint("decode", place, rank, pool, wire=wire.memory(start, hub), incarnation=start, ring_bytes=1 << 26)
        for rank, start in enumerate(starts)
    ]
    with pytest.raises(BindError, match="incarnation"):
        near.meet(end.card() for end in mixed)
    for end in mixed:
        end.close()
    first = on_wire("decode", wire.memory("first", hub), incarnation=starts[0])
    link, _ = near.meet([first.card()]), first.meet([near.card()])
    waiting = link.send("one", span("prefill"), timeout=60)
    first.close()
    [error] = ended([waiting])
    assert isinstance(error, PeerLostError)
    with on_wire("decode", wire.memory("second", hub), incarnation=starts[1]) as second:
        link, back = near.meet([second.card()]), second.meet([near.card()])
        assert ended([link.send("one", span("prefill")), back.receive("one", span("decode"))]) == [None, None]
    near.close()


HOSTILE = "\x1b[31m\nred\u202e\x9b"


def with_texts(held: Any) -> Any:
    """Copies of a JSON value, in each of which one text, one key or one number is hostile."""
    if isinstance(held, dict):
        for key, value in held.items():
            yield {**{one: of for one, of in held.items() if one != key}, HOSTILE: value}
            yield from ({**held, key: one} for one in with_texts(value))
    elif isinstance(held, list):
        yield [HOSTILE]
        yield from ([*held[:at], one, *held[at + 1 :]] for at, value in enumerate(held) for one in with_texts(value))
    else:
        yield HOSTILE
        yield {HOSTILE: HOSTILE}
        if isinstance(held, str) and held[:1] == "{":
            yield from (json.dumps(one) for one in with_texts(json.loads(held)))


def test_no_text_of_a_card_comes_raw_into_an_error() -> None:
    refused = 0
    with Two(tp=1) as two:
        card, of_wire = json.loads(two.end.card()), json.loads(two.end.wire.card())
        inner = [dict(card, wire=base64.b64encode(json.dumps(one).encode()).decode()) for one in with_texts(of_wire)]
        for changed in (*with_texts(card), *inner):
            try:
                link = two.ranks[0].meet([json.dumps(changed).encode()])
            except KvbmError as error:
                assert str(error).isprintable(), (changed, str(error))
                refused += 1
            else:
                assert link.title.isprintable() and link.engine.isprintable()
                break_up(link)
    assert refused > 60


def break_up(link: Any) -> None:
    """Forget a link and its peers, as if they had never met."""
    def forget() -> None:
        for peer in link.peers:
            link.endpoint._by_peer.pop(peer)
        link.endpoint._links.remove(link)

    link.endpoint.call(forget)


def test_no_card_takes_more_than_1_mib() -> None:
    """Every number of a card, with values that it should not have: refused before something is made of it."""
    numbers = [0, 1, -1, 1 << 16, 1 << 20, (1 << 24) - 1, 1 << 31, 1 << 48, 10**9 - 1, 1 << 64, 10**400]
    changes: list[tuple[str, dict[str, Any]]] = []
    with Two(tp=1) as two:
        card = json.loads(two.end.card())
        place = json.loads(card["groups"][""]["placement"])
        changes += [("", {key: number}) for key, value in card.items() if isinstance(value, int) for number in numbers]
        changes += [("placement", {"nt": number}) for number in [*numbers, 1048573]]
        changes += [("placement", {"mesh": mesh}) for mesh in ("tp65536", "a256 b256", "x" * 1000, "tp2")]
        changes += [("placement", {"shard": {"t": share}}) for share in ("tp by 1", "tp%1 by 999999999", "tp by nt", 7)]
        changes += [("placement", {"layers": [str(layer) for layer in range(5000)]})]
        changes += [("group", {"cuts": [(1 << 24) - 1 - at for at in range(64)]}), ("group", {"planes": "x" * 70_000})]
        changes += [("group", {"model": f"nl={n},no=2,nh={n},nt=4,hd=8"}) for n in (65536, 10**17)]
        for where, change in changes:
            group = dict(card["groups"][""], placement=json.dumps({**place, **(change if where == "placement" else {})}))
            group |= change if where == "group" else {}
            text = json.dumps({**card, "groups": {"": group}, **(change if not where else {})}).encode()
            tracemalloc.start()
            with contextlib.suppress(kvbm.KvbmError):
                two.ranks[0].meet([text])
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 1 << 20, (change, peak)
