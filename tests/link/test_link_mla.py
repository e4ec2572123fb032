"""MLA latents between engines: ranks hold the same or share the tokens.  Each byte is sent once and then passed on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import kvbm
from few import few
from kvbm import BindError, DigestError, PeerLostError, Pool, Span, TransferError, TransferTimeoutError, reshard, wire
from kvbm.link import ring
from linking import LIMIT, Linked, close_all, ended, held, until, written
from programs.links import carrier
from reshard_oracle import Case, Engine, Told

NL, HD, TOKENS = 5, 576, range(3, 203)  # as DeepSeek has it: 512 of the latent, 64 of the rotary part

#: Chunks hold a unit of all layers.
ROOM = {"chunk_bytes": 1 << 18, "ring_bytes": 1 << 22}

#: Bytes of the tokens, held once.
ONCE = NL * HD * 2 * len(TOKENS)


def engine(ranks: int, spread: str, nt: int, layout: str) -> Engine:
    """Ranks that hold the same (``same``), or tokens in turns (``dcp``), or whole blocks in turns (``cp``); or both."""
    of = {"same": 1, "dcp": ranks, "cp": ranks, "dcp2": 2}[spread]
    tokens = None if of == 1 else ("tp", 1, of)
    every, layers = nt if spread == "cp" else 1, tuple(range(NL))
    return Engine((("tp", ranks),), ("tp", of, ranks // of), tokens, every, (0, NL), layers, nt, (layout,))


def case_of(
    src: tuple[int, str], dst: tuple[int, str], *, stripe: bool = False, gather: bool = False, hd: int = HD
) -> Case:
    """A sequence from one engine to another, with blocks of 16 and of 64 tokens at random places."""
    sides = engine(*src, 16, "flashinfer/mla"), engine(*dst, 64, "flexkv/BLOCKFIRST_mla")
    rng, told, blocks = random.Random(5), [], []
    for side in sides:
        held = -(-TOKENS.stop // side.nt)
        blocks.append(held + 3)
        tables = tuple(tuple(rng.sample(range(held + 3), held)) for _ in range(side.world))
        told.append(Told(tables, (0,) * side.world))
    return Case(
        7, NL, 1, 1, hd, "bfloat16", *sides, ((TOKENS, *told),), (blocks[0], blocks[1]), None, False, stripe, gather, None, (0, 0)
    )  # fmt: skip


def came(links: list[reshard.Link]) -> list[int]:
    """Received bytes per link."""
    return [int(link.stats()["bytes_received"]) for link in links]


def sent(links: list[reshard.Link]) -> list[int]:
    return [int(one["bytes_sent"]) for one in (link.stats() for link in links)]


SAME, ONE, DCP, CP = (2, "same"), (1, "same"), (2, "dcp"), (2, "cp")


@pytest.mark.parametrize(
    ("src", "dst", "options", "shares", "passed"),
    [
        pytest.param(SAME, ONE, {}, [0, 5], 0, id="replicas to one"),
        pytest.param(SAME, ONE, {"stripe": True}, [3, 2], 0, id="replicas to one, striped"),
        pytest.param(ONE, SAME, {}, [10], 0, id="one to replicas"),
        pytest.param(ONE, SAME, {"gather": True}, [5], 5, id="one to replicas, gathered"),
        pytest.param(SAME, (4, "same"), {"gather": True, "stripe": True}, [3, 2], 15, id="2 to 4 replicas, striped, gathered"),
        pytest.param(ONE, (8, "same"), {"gather": True}, [5], 35, id="more replicas than layers, gathered"),
        pytest.param(DCP, ONE, {}, None, 0, id="tokens in turns to one"),
        pytest.param(ONE, DCP, {"gather": True}, [5], 0, id="one to tokens in turns"),
        pytest.param(CP, ONE, {}, None, 0, id="blocks in turns to one"),
        pytest.param(ONE, CP, {}, [5], 0, id="one to blocks in turns"),
        pytest.param(CP, DCP, {}, None, 0, id="blocks in turns to tokens in turns"),
        pytest.param(DCP, (4, "dcp2"), {"gather": True}, None, 5, id="tokens in turns to replicas of turns, gathered"),
    ],
)  # fmt: skip
def test_what_goes(src: Any, dst: Any, options: Any, shares: list[int] | None, passed: int) -> None:
    """Every byte of every rank, and how often each is sent: by which sender, in which layers; and passed on among receivers."""
    with Linked(case_of(src, dst, **options), **ROOM) as found:
        assert not any(ended(found.begin()))
        found.check()
        found.require_slots()
        if shares is not None:
            wanted = sorted(share * ONCE // NL for share in shares)
            assert sorted(sent(found.links[0])) == wanted
            assert sum(came(found.links[1])) == sum(wanted)
        among = [end.siblings for end in found.ends[1] if end.siblings is not None]
        assert sum(came(among)) == sum(sent(among)) == passed * ONCE // NL


def test_digests_of_what_was_gathered() -> None:
    """Each rank's digest covers all that it holds, whichever rank sent the parts."""
    digests = []
    for case in (case_of(ONE, SAME, gather=True), case_of(ONE, ONE)):
        with Linked(case, **ROOM) as found:
            handles = found.begin()
            assert not any(ended(handles))
            digests += [handle.digest for handle in handles if not isinstance(handle, reshard.Sending)]
    assert len(digests) == 3 and len(set(digests)) == 1 and digests[0]


KINDS = [
    "torch",
    pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_by_transports(kind: str, place: str) -> None:
    """Each rank connects to those of the other engine and to those of its own."""
    if kind == "torch":
        pytest.importorskip("torch")

    def make(side: int, rank: int) -> Any:
        return carrier(kind, f"{side}/{rank}", place)

    with Linked(case_of(SAME, SAME, gather=True, stripe=True), make, **ROOM) as found:
        for name in ("first", "second"):
            assert not any(ended(found.begin(name=name)))
            found.check()
            found.refill()
        found.require_slots()


# ---- faults ----------------------------------------------------------------------------------------------------------

GATHERED = case_of(SAME, SAME, gather=True, stripe=True, hd=32)


def on_faulty(scripts: dict[tuple[int, int], list[wire.Fault]], **options: Any) -> Linked:
    hub = wire.Hub()

    def make(side: int, rank: int) -> Any:
        return wire.faulty(wire.memory(f"{side}/{rank}", hub), scripts.get((side, rank), ()))

    return Linked(GATHERED, make, **{"chunk_bytes": 1 << 15, "ring_bytes": 1 << 19, **options})


def again(found: Linked) -> None:
    found.refill()
    assert not any(ended(found.begin(name="again")))
    found.check()
    found.require_slots()


def require_whole(found: Linked, handles: list[Any]) -> None:
    """A rank whose arrival is done holds all of it, even if other ranks failed."""
    for one in handles:
        if not isinstance(one, reshard.Sending) and not one.has_failed:
            rank = one.link.endpoint.rank
            assert np.array_equal(found.run.buffers[1][rank], found.run.scene.after[rank])


@pytest.mark.parametrize("first", few(range(2), 1))
@pytest.mark.parametrize("what", ["lose", "double", "delay", "swap", "bit", "chunk"])
def test_faults(what: str, first: int) -> None:
    """Faults of notes and chunks on any rank: the sequence is right."""
    met = 0
    for at in range(6):
        side = (at + first) % 2
        with on_faulty({(side, rank): [wire.Fault(what, at)] for rank in range(2)}) as found:
            assert not any(ended(found.begin(random.Random(at))))
            found.check()
            found.require_slots()
            met += sum(one.counts[what] for one in found.wires[side])
    assert met >= 3


@pytest.mark.parametrize("side", [0, 1])
def test_a_rank_is_lost(side: int) -> None:
    """At any call: waiting ranks get an error well before the deadline, and no slot is lost."""
    met = 0
    for at in range(12):
        with on_faulty({(side, 0): [wire.Fault("kill", at)]}) as found:
            with held(*found.all_ends):  # what begins behind a kill waits for its deadline
                handles = found.begin(random.Random(at), timeout=60)
            errors = ended(handles)
            if found.wires[side][0].counts["kill"] and any(errors):
                met += 1
                assert any(isinstance(error, PeerLostError) for error in errors), errors
                assert all(isinstance(error, TransferError | None) for error in errors), errors
            require_whole(found, handles)
            found.require_slots()
    assert met > 1


def test_what_is_wrong_each_time_ends_all_ranks() -> None:
    """Rank 0 passes on wrong chunks: both ranks get an error, although rank 0 holds all data."""
    with on_faulty({(1, 0): [wire.Fault("bit", at) for at in range(100)]}) as found:
        with held(*found.all_ends):  # an arrival that begins behind a sender's failure waits for the next attempt
            handles = found.begin(timeout=60)
        errors = [
            error for one, error in zip(handles, ended(handles), strict=True) if not isinstance(one, reshard.Sending)
        ]
        assert len(errors) == 2 and all(isinstance(error, DigestError) for error in errors), errors
        found.require_slots()


class Pushed(random.Random):
    """Chooses that nothing is pulled."""

    def random(self) -> float:
        return 0.9


class Seen:
    """The lock that a receive holds until it has ended.  It keeps what its blocks hold then."""

    def __init__(self, lock: Any, buffer: Any) -> None:
        self.lock, self.buffer, self.held = lock, buffer, None

    def acquire(self, timeout: float = -1) -> bool:
        return bool(self.lock.acquire(timeout=timeout))

    def release(self) -> None:
        self.held = np.array(self.buffer) if self.held is None else self.held
        self.lock.release()


@pytest.mark.parametrize("what", ["share", "passed on", "abort", "kill", "close"])
def test_a_failed_receive_leaves_zeros_before_it_is_told(what: str) -> None:
    """Of the share, and of what other ranks have passed on, nothing is left.  No other byte has changed."""
    cleared = failed = 0
    with on_faulty({}) as found:
        masks = written(found)
    for first in (0, 1, 2, 3):
        faults = [wire.Fault("bit" if what != "kill" else "kill", at) for at in range(first, 200)]
        where = {"share": (0, 0), "passed on": (1, 0), "kill": (0, 0)}.get(what)
        with on_faulty({where: faults} if where else {}) as found:
            for buffer in found.run.buffers[1]:
                buffer[:] = 0x55
            with held(*found.all_ends):
                handles = found.begin(Pushed(first), timeout=60)
                came = {one.link.endpoint.rank: one for one in handles if not isinstance(one, reshard.Sending)}
                seen = [Seen(came[rank]._running, buffer) for rank, buffer in enumerate(found.run.buffers[1])]
                for rank, one in came.items():
                    one._running = seen[rank]
            if what in ("abort", "close"):
                parts = [part for one in came.values() for part in one._parts[:2]]
                until(lambda parts=parts: any(one.zero or one.has_ended for one in parts), "something was written")  # type: ignore[misc]
                came[0].abort() if what == "abort" else found.ends[1][0].close()
            ended(handles)
            errors = [came[rank].error for rank in range(len(seen))]
            failed += sum(error is not None for error in errors)
            for one, mask, error in zip(seen, masks, errors, strict=True):
                assert (one.held[~mask] == 0x55).all()
                if error is not None:
                    assert np.isin(one.held[mask], (0, 0x55)).all(), error  # a part that was not begun is as it was
                    cleared += not (one.held[mask] == 0x55).all()
    assert failed > 1 and cleared > 0


@pytest.mark.threads
@pytest.mark.parametrize("which", ["receiver", "sender"])
def test_aborted(which: str) -> None:
    """By one rank, at any time: ranks that wait for it get an error, and the next transfer works."""
    for at in range(8):
        with on_faulty({}) as found:
            with held(*found.all_ends):
                handles = found.begin(timeout=60)
            threading.Event().wait(0.002 * at)
            next(one for one in handles if isinstance(one, reshard.Sending) == (which == "sender")).abort()
            errors = ended(handles)
            assert all(isinstance(error, TransferError | None) for error in errors), errors
            require_whole(found, handles)
            again(found)


@pytest.mark.parametrize("how", ["aborted", "broken"])
def test_a_rank_gives_up_before_anything_comes(how: str) -> None:
    """The receives of both ranks end at once."""
    with on_faulty({}) as found:
        arrivals = [
            link.receive("0", span, timeout=60) for link, [span] in zip(found.links[1], found.spans(1), strict=True)
        ]
        if how == "aborted":
            arrivals[0].abort()
        else:
            found.ends[1][0].submit(lambda: next(iter(())))
        for one, error in zip(arrivals, ended(arrivals), strict=True):
            assert isinstance(error, TransferError) and not isinstance(error, TransferTimeoutError), (one, error)


def test_one_rank_does_not_receive() -> None:
    with on_faulty({}) as found:
        [span], *_ = found.spans(1)
        sendings = [
            link.send("0", some, timeout=60) for link, [some] in zip(found.links[0], found.spans(0), strict=True)
        ]
        [error] = ended([found.links[1][0].receive("0", span, timeout=0.5)])
        assert isinstance(error, TransferTimeoutError), error
        for one in sendings:
            one.abort()
        ended(sendings)
        again(found)


@pytest.mark.threads
def test_one_slot_and_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has one slot and receives keys in another order; a rank that waits for another must not hold its slot."""
    monkeypatch.setattr(ring.Ring, "require_room", lambda *_: None)
    with on_faulty({}, slots=1) as found:
        handles = [one for k in range(12) for one in found.begin(random.Random(k), name=f"{k}-")]
        for k, (rank, link) in enumerate(2 * [*enumerate(found.links[1])]):
            handles.append(link.receive(f"late{k // 2 if rank else 1 - k // 2}", found.spans(1)[rank][0]))
        for k in range(2):
            handles += [
                link.send(f"late{k}", some) for link, [some] in zip(found.links[0], found.spans(0), strict=True)
            ]
        assert not any(ended(handles))
        found.check()
        found.require_slots()


def test_closed_while_it_gathers() -> None:
    """Whichever rank closes, and whenever: each handle ends."""
    for at in range(6):
        with on_faulty({}) as found:
            with held(*found.all_ends):
                handles = [one for k in range(4) for one in found.begin(random.Random(k), name=f"{k}-", timeout=60)]
            threading.Event().wait(0.003 * at)
            found.ends[1][at % 2].close()
            assert all(isinstance(error, TransferError | None) for error in ended(handles))


# ---- what must be so -------------------------------------------------------------------------------------------------

MODEL = kvbm.load_shape("deepseek-v3,nl=3")


@pytest.fixture
def make() -> Iterator[Callable[[str, int], list[reshard.Endpoint]]]:
    """Engines of some ranks; the engine's name determines its pools' contents."""
    hub, made = wire.Hub(), []

    def engine(name: str, tp: int) -> list[reshard.Endpoint]:
        place = reshard.vllm(MODEL, tp=tp, nt=16, name=name)
        for rank in range(tp):
            pool = Pool.allocate(kvbm.load("flashinfer/mla"), place.shape(rank), 16)
            for array in pool.arrays:
                held = array.view(np.uint8)
                held[:] = np.random.default_rng([*name.encode()]).integers(0, 255, held.shape, np.uint8)
            made.append(reshard.Endpoint(name, place, rank, pool, wire=wire.memory(f"{name}/{rank}", hub), **ROOM))
        return made[-tp:]

    yield engine
    close_all(made)


def test_two_engines_that_prefill(make: Any) -> None:
    """Two prefill engines send the same key at the same time: passed-on data are not mixed."""
    sources, decode = [*make("one", 1), *make("two", 1)], make("decode", 2)
    cards, handles = [end.card() for end in decode], []
    for end in decode:
        end.join(cards)
    links = [source.meet(cards, gather=True) for source in sources]
    for end, order in zip(decode, ((0, 1), (1, 0)), strict=True):  # so that rank 0 awaits the other one first
        for number in order:
            link = end.meet([sources[number].card()], gather=True)
            handles.append(link.receive("k", Span([4 * number + k for k in range(3)], range(48))))
    for number in (1, 0):
        handles.append(links[number].send("k", Span([0, 1, 2], range(48))))
        handles[-1].synchronize(LIMIT)
    assert not any(ended(handles))
    for number, source in enumerate(sources):
        for end in decode:
            pools = source.groups[""][1], end.groups[""][1]
            assert not kvbm.testing.locate(*pools, range(3), range(4 * number, 4 * number + 3))


def test_and_back(make: Any) -> None:
    """From ranks that hold the same to one rank, and back to all of them, over the same links."""
    prefill, [decode] = make("prefill", 2), make("decode", 1)
    cards = [end.card() for end in prefill]
    for end in prefill:
        end.join(cards)
    links = [end.meet([decode.card()], stripe=True, gather=True) for end in prefill]
    back = decode.meet(cards, stripe=True, gather=True)
    here, there, again = (Span([first, first + 1, first + 2], range(41)) for first in (0, 5, 9))
    assert not any(ended([back.receive("k", there), *(link.send("k", here) for link in links)]))
    assert not any(ended([back.send("k", there), *(link.receive("k", again) for link in links)]))
    source = prefill[0].groups[""][1]
    for end, first in ((decode, 5), (prefill[0], 9), (prefill[1], 9)):
        assert not kvbm.testing.locate(source, end.groups[""][1], range(2), range(first, first + 2))
    once = back.stats()["bytes_sent"]
    assert sum(came(links)) == once == 41 * MODEL.nl * MODEL.hd * 2


def test_refused(make: Any) -> None:
    """No join, a join with other cards, or two joins; a token without a block."""
    [source], decode = make("prefill", 1), make("decode", 2)
    cards = [end.card() for end in decode]
    source.meet(cards, gather=True)
    link = decode[0].meet([source.card()], gather=True)
    with pytest.raises(BindError, match="call join first"):
        link.receive("k", Span([0], range(16)))
    with pytest.raises(BindError, match="missing"):
        decode[0].join(cards[:1])
    with pytest.raises(BindError, match="including this rank"):
        decode[0].join([source.card()])
    for wrong in (5, b"card", []):
        with pytest.raises(BindError, match="join: expected the cards"):
            decode[0].join(wrong)
    decode[0].join(cards)
    with pytest.raises(BindError, match="got a second one"):
        decode[0].join(cards)
    with pytest.raises(BindError, match="without a block"):
        link.receive("k", Span([0, -1], range(32)))


def test_only_one_side_gathers(make: Any) -> None:
    [source], decode = make("prefill", 1), make("decode", 2)
    cards = [end.card() for end in decode]
    for end in decode:
        end.join(cards)
    there, link = source.meet(cards), decode[0].meet([source.card()], gather=True)
    some = Span([0], range(16))
    errors = ended([there.send("k", some, timeout=60), link.receive("k", some, timeout=60)])
    assert all(errors) and any("another plan" in str(error) for error in errors)
