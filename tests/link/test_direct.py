"""Direct links: copies out of a peer's pool, what is lent to whom, and peers that lie, change their memory, or end."""

from __future__ import annotations

import base64
import concurrent.futures
import gc
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import test_link_mla

import kvbm
import reshard_oracle
from kvbm import BindError, DigestError, Span, TransferError, _core, wire
from kvbm.errors import CudaError, NotEnoughMemoryError, PeerLostError
from kvbm.layout.grammar import parse, write
from kvbm.link import direct, flows, notes, pulls
from kvbm.link.link import Link
from kvbm.memory.shared import file_of, shared_slab
from kvbm.reshard import Endpoint, vllm
from linking import (
    LIMIT,
    Linked,
    Memory,
    Wires,
    digested_first,
    ended,
    gpu_memory,
    memory_files,
    plain_case,
    right_cases,
    until,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are of Linux")


def shared_bytes(data: np.ndarray) -> Any:
    """Memory that peers can open, with these bytes."""
    memory = shared_slab(max(data.size, 1), "test")
    memory[:] = data
    return memory[: data.size]


SHARED: Memory = (shared_bytes, reshard_oracle.host_arrays)


def mapped_wires(faults: float = 0.0, seed: int = 0) -> Wires:
    hub = wire.Hub()

    def make(side: int, rank: int) -> wire.Mapped:
        script = wire.random_faults(seed + 7 * rank + side, faults, ["lose", "double", "delay", "swap"], 1000) if faults else []
        return wire.mapped(wire.faulty(wire.memory(f"{side}/{rank}", hub), script), drop_seconds=LIMIT)

    return make


def linked(case: reshard_oracle.Case | None = None, **options: Any) -> Linked:
    return Linked(case or plain_case(), mapped_wires(), SHARED, **options)


def pulled(found: Linked) -> int:
    return int(sum(link.stats()["pulls"] for link in found.links[1]))


def lend_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer is one that asked for all that was offered before."""
    opened = Link.open

    def open_all(self: Link, peer: str, *rest: Any) -> None:
        opened(self, peer, *rest)
        for number in range(len(self.endpoint.groups)):
            self.asked(peer, number, is_all=True)

    monkeypatch.setattr(Link, "open", open_all)


@pytest.mark.slow
@pytest.mark.threads
@pytest.mark.parametrize(
    ("faults", "is_lent", "first"),
    [  # each twenty of the random cases in one way; with -m full in all three
        pytest.param(faults, is_lent, 20 * turn, id=f"{name}-{20 * turn}", marks=[pytest.mark.full] * (turn % 3 != number))
        for number, (name, faults, is_lent) in enumerate(
            [("whole", 0.0, False), ("faults", 0.02, False), ("faults, lent at once", 0.02, True)]
        )
        for turn in range(4)
    ],
)
def test_every_byte(faults: float, is_lent: bool, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random placements, layouts, planes, ranges, windows of layers, holes in tables, shares that are passed on; lost notes."""
    right = many = 0
    if is_lent:
        lend_at_once(monkeypatch)
    for found in right_cases(range(first, first + 20), lambda seed: mapped_wires(faults, seed), memory=SHARED):
        paths = {path for side in found.links for link in side for path in link.paths.values()}
        assert paths <= {"direct"}, paths
        assert not any(link.stats()["chunks_sent"] for side in found.links for link in side)
        many += pulled(found)
        right += 1
    assert right >= 10 and many > right


@pytest.mark.gpu
@pytest.mark.parametrize("is_lent", [False, True], ids=["asked for", "lent at once"])
def test_every_byte_on_a_gpu(is_lent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of torch in one process: their memory is that of peers, and the copies are those of two processes."""
    right = many = 0
    if is_lent:
        lend_at_once(monkeypatch)
    for found in right_cases(range(40), lambda _: mapped_wires(), lambda tensor: tensor.cpu().numpy(), memory=gpu_memory()):
        assert {path for link in found.links[1] for path in link.paths.values()} <= {"direct"}
        many += pulled(found)
        right += 1
    assert right > 20 and many > right


@pytest.mark.slow  # 7 s: a sender asks eight times
def test_a_reader_that_is_silent_is_dropped_and_its_loan_outlives_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender gives the peer up.  Its blocks are its own again when the peer, which goes on later, has read them."""
    go_on, begin = threading.Event(), pulls.Pull._begin
    monkeypatch.setattr(pulls.Pull, "_begin", lambda self: (go_on.wait(3 * LIMIT), begin(self)))
    with OneEach("shared", "shared") as found:
        found.meet()
        arrival = found.links[1].receive("x", Span([2, 0], range(60)), timeout=3 * LIMIT)
        sending = found.links[0].send("x", Span([5, 3, 8, 1], range(60)), timeout=0.2)
        until(lambda: found.links[0].lost, "the peer is given up")
        assert not sending.has_ended, "its blocks may still be read"
        go_on.set()
        errors = ended([sending, arrival])
        assert all(isinstance(error, TransferError) for error in errors), errors


def test_one_case_is_right() -> None:
    with linked() as found:
        assert not any(ended(found.begin()))
        found.check()
        assert pulled(found) > 0


@pytest.mark.parametrize("verify", ["after", "before"])
def test_memory_that_changes_under_the_reader_is_found(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner has digested its blocks; then they change.  What was written is zero, and both sides get the error."""
    digested_first(monkeypatch)
    with OneEach("shared", "shared") as found:  # one reader: no digest is made while the blocks are turned for another
        found.meet()
        begin, turned = pulls.Pull._begin, []

        def turn(self: pulls.Pull) -> None:
            turned.append(self)
            for array in found.pools[0].arrays:
                array[...] = ~array
            begin(self)
            for array in found.pools[0].arrays:
                array[...] = ~array

        monkeypatch.setattr(pulls.Pull, "_begin", turn)
        here, there = Span([5, 3, 8, 1], range(60)), Span([2, 0], range(60))
        errors = ended([found.links[0].send("x", here), found.links[1].receive("x", there, verify=verify)])
        assert all(isinstance(error, DigestError) for error in errors), errors
        assert "3 times: digest: expected 0x" in str(errors[1])
        assert len(turned) == 3
        blocks = np.stack(found.pools[1].arrays)  # [nh, nl, no, nt, hd] each
        expected = np.full_like(blocks, 0x5555)
        if verify == "after":
            expected[2] = 0
            expected[0, ..., :28, :] = 0
        np.testing.assert_array_equal(blocks, expected)


def test_the_digest_is_of_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: a copy that cannot digest digested the peer's memory, and read it once more to copy it.

    The memory changes as soon as anything was written.  What comes without an error is what the peer digested.
    """
    monkeypatch.setattr(direct, "_PIECE_BYTES", 1 << 30)  # all in one call
    digested_first(monkeypatch)
    layouts = "vllm/paged_attn_v0", "vllm/flash_attn_nhd"
    tokens = range(1, 16_000)
    spans = Span(range(1000), tokens), Span(range(500), tokens, 1)  # not whole blocks: tokens one by one
    with OneEach("shared", "shared", layouts=layouts, num_blocks=1024) as found:
        found.meet()
        near, far = ([np.asarray(array).view("uint8") for array in pool.arrays] for pool in found.pools)
        first, before = [array.copy() for array in near], [array.copy() for array in far]
        is_over = threading.Event()

        def go() -> list[Any]:
            return ended([found.links[1].receive("x", spans[1]), found.links[0].send("x", spans[0])])

        def turn() -> None:
            while not is_over.is_set() and all(map(np.array_equal, [one[0, 0] for one in far], [one[0, 0] for one in before])):
                pass
            for array in near:
                array ^= 255

        assert go() == [None, None]
        right = [array.copy() for array in far]
        for _ in range(50):  # until the memory has changed in time
            for array, other in zip([*near, *far], [*first, *before], strict=True):
                array[...] = other
            is_over.clear()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                turned = pool.submit(turn)
                errors = go()
                is_over.set()
                turned.result()
            assert any(errors) or all(map(np.array_equal, far, right))
            if all(isinstance(error, DigestError) for error in errors):
                return
        raise AssertionError("it was never found")


def test_a_single_wrong_copy_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked() as found:
        go_on, wrong = pulls.Pull._go_on, []

        def once(self: pulls.Pull) -> bool:
            if not wrong and not self._todo and self._pass is not None and self._pass.query():
                wrong.append(self)
                self._pass.total ^= 1
            return go_on(self)

        monkeypatch.setattr(pulls.Pull, "_go_on", once)
        assert not any(ended(found.begin()))
        found.check()
        assert wrong and sum(link.stats()["pulls_wrong"] for link in found.links[1]) == 1


@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "not yet"])
def test_a_copy_waits_for_complete_blocks_and_not_for_their_digest(is_complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may read what is complete.  It says that it has all when the digests are equal."""
    may_end, digest = threading.Event(), direct.Lender.digest

    def slow(self: direct.Lender, *args: Any) -> direct.Pass:
        found = digest(self, *args)
        query = found.query
        found.query = lambda: may_end.is_set() and query()  # type: ignore[method-assign]
        return found

    monkeypatch.setattr(direct.Lender, "digest", slow)
    if not is_complete:
        digested_first(monkeypatch)
    with OneEach("shared", "shared") as found:
        found.meet()
        arrival = found.links[1].receive("x", Span([2, 0], range(60)))
        sending = found.links[0].send("x", Span([5, 3, 8, 1], range(60)))
        far = [np.asarray(array) for array in found.pools[1].arrays]
        if is_complete:
            until(lambda: any(flow._own_digest is not None for flow in found.links[1]._inflows.values()), "it is copied")
            assert any((array != 0x5555).any() for array in far)
        else:
            until(lambda: any(flow._pieces is not None for flow in found.links[1]._inflows.values()), "its table is known")
            time.sleep(0.05)
            assert all((array == 0x5555).all() for array in far)
        assert not arrival.has_ended and not sending.has_ended
        may_end.set()
        assert ended([arrival, sending]) == [None, None]
        found.require_right()


@pytest.mark.gpu
def test_a_copy_waits_for_the_event_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are computed long after `send`, on another stream."""
    import torch

    with Linked(plain_case(), mapped_wires(), gpu_memory()) as found:
        buffers = found.run.buffers[0]
        right, stream, event = [one.clone() for one in buffers], torch.cuda.Stream(), torch.cuda.Event()
        for buffer in buffers:
            buffer.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # 0.1 s
            for buffer, one in zip(buffers, right, strict=True):
                buffer.copy_(one)
            event.record()
        send, waited = Link.send, []

        def send_after(self: Link, *args: Any, **options: Any) -> Any:
            waited.append(not event.query())
            return send(self, *args, **{**options, "wait": event})

        monkeypatch.setattr(Link, "send", send_after)
        monkeypatch.setattr(Link, "offer", send_after)
        assert not any(ended(found.begin()))
        found.check(lambda tensor: tensor.cpu().numpy())
        assert any(waited) and pulled(found) > 0


class Slow:
    """Copies that do not end before they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end, self.begun = threading.Event(), threading.Event()
        query = direct.Pass.query

        def slow(this: direct.Pass) -> bool:
            if getattr(this, "is_slow", False) and not self.may_end.is_set():
                return False
            return query(this)

        enqueue = pulls.Pull._enqueue

        def begin(this: pulls.Pull) -> None:
            this._pass.is_slow = True  # type: ignore[union-attr]
            enqueue(this)
            self.begun.set()

        monkeypatch.setattr(direct.Pass, "query", slow)
        monkeypatch.setattr(pulls.Pull, "_enqueue", begin)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_blocks_are_lent_until_the_reader_has_ended(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives up: the sender's blocks are its own only when no copy reads them any more."""
    slow = Slow(monkeypatch)
    with linked() as found:
        sendings = [link.send("x", span) for link, (span,) in zip(found.links[0], found.spans(0), strict=True)]
        arrivals = [link.receive("x", span) for link, (span,) in zip(found.links[1], found.spans(1), strict=True)]
        assert slow.begun.wait(LIMIT)
        lent = [one for one in sendings if any(flow._loan is not None for flow in one.flows)]
        until(lambda: any(flow._loan and flow._loan.is_digest_sent for one in lent for flow in one.flows), "it is lent")
        for one in sendings if who == "sender" else arrivals:
            one.abort()
        given_up = sendings if who == "sender" else arrivals
        until(lambda: all(one.has_failed or one.has_ended for one in given_up), "they failed")
        reading = [flow for link in found.links[1] for flow in list(link._inflows.values()) if not flow.uses_no_pool]
        owners = [one for one in sendings for own in one.flows if own.number in [flow.offer.sending for flow in reading]]
        assert owners and not any(one.has_ended for one in owners), "its blocks are still read"
        slow.may_end.set()
        errors = ended([*sendings, *arrivals])
        assert any(isinstance(error, TransferError) for error in errors)
        found.require_slots()
        for wires in found.wires:
            for one in wires:
                assert not any(one._page.count_of(peer) for peer in one._peers), "all loans have ended"


def _mapped(below: wire.Wire) -> wire.Mapped:
    return wire.mapped(below, drop_seconds=1)


class OneEach:
    """Two engines of one rank each, with pools of the given kinds."""

    def __init__(
        self,
        *devices: str,
        layouts: tuple[str, str] = ("vllm/flash_attn_nhd", "universal"),
        num_blocks: int = 16,
        wrap: Callable[[Any], Any] = _mapped,
        **options: Any,
    ) -> None:
        model = kvbm.load_shape("llama-3.1-8b,nl=2,hd=16,dtype=uint16")
        self.hub = wire.Hub()
        self.pools = []
        self.ends: list[Endpoint] = []
        kinds = ("prefill", layouts[0], 16), ("decode", layouts[1], 32)
        for (name, layout, nt), device in zip(kinds, devices, strict=True):
            place = vllm(model, nt=nt, name=name)
            pool = kvbm.Pool.allocate(layout, place.shape(0), num_blocks, device)
            for number, array in enumerate(pool.arrays):
                random = np.random.default_rng(number).integers(0, 1 << 16, array.shape)
                array[...] = random if name == "prefill" else 0x5555
            self.pools.append(pool)
            its = wrap(wire.memory(name, self.hub))
            self.ends.append(Endpoint(name, place, 0, pool, wire=its, chunk_bytes=1 << 14, ring_bytes=1 << 18, **options))

    def meet(self, card: bytes = b"") -> Any:
        self.links = [self.ends[0].meet([self.ends[1].card()]), self.ends[1].meet([card or self.ends[0].card()])]
        return self.links[1].paths[0, ""]

    def go(self, tokens: range = range(60), *, first: str = "receive") -> list[Any]:
        """Send 60 tokens, and receive some of them.  The one that is called first has been heard of before the other is called."""
        calls = {
            "receive": lambda: self.links[1].receive("x", Span([2, 0], tokens)),
            "send": lambda: self.links[0].send("x", Span([5, 3, 8, 1], range(60))),
        }
        begun = [calls.pop(first)()]
        if first == "send":
            until(lambda: self.links[1]._offers, "the offer is there")
        return ended([*begun, *(call() for call in calls.values())])

    def require_right(self, tokens: range = range(60)) -> None:
        """The tokens have arrived, and nothing else was written.  Then the blocks are as before."""
        near = np.stack([np.asarray(array) for array in self.pools[0].arrays])  # [nl, no, nb, nt, nh, hd]
        far = np.stack([np.asarray(array) for array in self.pools[1].arrays])  # [nb, nh, nl, no, nt, hd]
        expected = np.full_like(far, 0x5555)
        for token in tokens:
            block, other = [5, 3, 8, 1][token // 16], [2, 0][token // 32]
            expected[other, ..., token % 32, :] = np.moveaxis(near[:, :, block, token % 16], 2, 0)
        np.testing.assert_array_equal(far, expected)
        for array in self.pools[1].arrays:
            array[...] = 0x5555

    def __enter__(self) -> OneEach:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()


@pytest.mark.parametrize(
    ("devices", "options", "path"),
    [
        (("shared", "shared"), {}, "direct"),
        (("shared", "cpu"), {}, "direct"),  # the reader's own memory may be any
        (("cpu", "shared"), {}, "its memory is that of this process alone: expected Pool.allocate(…, device='shared')"),
        (("shared", "shared"), {"direct": False}, "direct=False"),
    ],
    ids=["direct", "into any", "not shared", "not wanted"],
)
def test_a_link_says_its_path(devices: tuple[str, str], options: dict[str, Any], path: str) -> None:
    with OneEach(*devices, **options) as found:
        assert found.meet() == path or path == "direct=False"
        assert found.go() == [None, None]
        assert found.links[1].stats()["pulls"] == (path == "direct")


def test_a_peer_that_asks_for_all_is_lent_the_next_sequence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not ask.  One that wants a part, is late, or takes chunks gets that, and is asked to ask again."""
    asks, wants = [], []
    asked, wanted = flows.Outflow.asked, flows.Outflow.wanted
    monkeypatch.setattr(flows.Outflow, "asked", lambda self, note: (asks.append(note), asked(self, note))[1])
    monkeypatch.setattr(flows.Outflow, "wanted", lambda self, note: (wants.append(note), wanted(self, note))[1])
    with OneEach("shared", "shared") as found:
        found.meet()
        steps = [
            (range(60), "receive", 1), (range(60), "receive", 0),  # as before, so it is lent
            (range(16, 60), "receive", 1), (range(16, 60), "receive", 1),  # a part: the digest of all is of no use
            (range(60), "receive", 1), (range(60), "send", 1), (range(60), "receive", 0),
        ]  # fmt: skip
        for tokens, first, count in steps:
            asks.clear()
            assert found.go(tokens, first=first) == [None, None]
            assert len(asks) == count, (tokens, first)
            found.require_right(tokens)
        assert not wants and found.links[1].stats()["pulls"] == len(steps)
        for name in ("hold", "loans"):  # no loan is left
            monkeypatch.setattr(type(found.ends[1].wire), name, lambda *_: None)
        assert found.go() == [None, None] and wants and found.links[1].stats()["pulls"] == len(steps)
        found.require_right()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_what_is_lent_at_once_may_be_given_up(who: str) -> None:
    """Before the other side is there; and the next attempt is right."""
    with OneEach("shared", "shared") as found:
        found.meet()
        assert found.go() == [None, None]
        found.require_right()
        if who == "sender":
            sending = found.links[0].send("x", Span([5, 3, 8, 1], range(60)))
            until(lambda: found.links[1]._offers, "the offer is there")
            sending.abort()
            assert isinstance(ended([sending])[0], TransferError)
            assert not found.links[1]._offers and not found.links[0]._flows
        else:
            arrival = found.links[1].receive("x", Span([2, 0], range(60)), timeout=0.05)
            assert isinstance(ended([arrival])[0], TransferError)
        assert found.go() == [None, None]
        found.require_right()


def test_a_share_that_failed_is_not_passed_on_as_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: it was lent at once, with its digest, and the word that it had failed came later than the copy."""
    case = test_link_mla.case_of(test_link_mla.SAME, test_link_mla.SAME, gather=True, stripe=True, hd=32)
    with linked(case) as found:
        assert not any(ended(found.begin(name="before")))  # now the ranks are lent the next sequence at once
        found.refill()
        say, near = Link.say, found.ends[1][0].siblings

        def late(self: Link, peer: str, note: notes.Note) -> None:
            if self is near and isinstance(note, notes.Stop) and note.by_sender:
                threading.Timer(0.05, lambda: self.endpoint.submit(lambda: say(self, peer, note))).start()
            else:
                say(self, peer, note)

        monkeypatch.setattr(Link, "say", late)
        arrivals = [link.receive("x", span, timeout=LIMIT) for link, (span,) in zip(found.links[1], found.spans(1), strict=True)]
        found.links[0][1].send("x", found.spans(0)[1][0], timeout=LIMIT)  # rank 0 sends nothing
        until(lambda: arrivals[1]._share.has_ended and arrivals[0]._rest.has_ended, "the shares of the other rank are there")
        arrivals[0].abort()
        assert all(isinstance(error, TransferError) for error in ended(arrivals))


def test_a_sending_ends_that_could_be_lent_to_one_peer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: the second peer was lent it after it had failed, and nobody told that peer."""
    with linked(test_link_mla.case_of(test_link_mla.ONE, test_link_mla.SAME, hd=32)) as found:
        assert not any(ended(found.begin(name="before")))
        digest = direct.Lender.digest

        def fails(self: direct.Lender, peer: int, *args: Any) -> direct.Pass:
            if peer == 0:
                raise CudaError("out of memory")
            return digest(self, peer, *args)

        monkeypatch.setattr(direct.Lender, "digest", fails)
        [error] = ended([found.links[0][0].send("x", found.spans(0)[0][0], timeout=1)])
        assert isinstance(error, CudaError)


@pytest.mark.parametrize("is_ready_lost", [False, True])
def test_a_late_offer_of_a_failed_attempt_begins_nothing(is_ready_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: it was copied at once, and the next attempt found nobody."""
    with OneEach("shared", "shared") as found:
        found.meet()
        assert found.go() == [None, None]
        found.require_right()
        (near, far), say, held = found.links, Link.say, []
        here, there = Span([5, 3, 8, 1], range(60)), Span([2, 0], range(60))
        with monkeypatch.context() as patch:
            patch.setattr(Link, "say", lambda self, peer, note: held.append(note) if self is near else say(self, peer, note))
            sending, arrival = near.send("x", here), far.receive("x", there)
            until(lambda: any(isinstance(note, notes.Ready) for note in held), "it is lent")
            sending.abort()
            arrival.abort()
            assert all(isinstance(error, TransferError) for error in ended([arrival]))
            until(lambda: any(isinstance(note, notes.Stop) for note in held), "the sender has stopped")
            again = far.receive("x", there)
            [peer] = near.peers
            for note in held[: 1 + [isinstance(note, notes.Stop) for note in held].index(True)]:
                if not (is_ready_lost and isinstance(note, notes.Ready)):
                    near.endpoint.submit(lambda note=note: say(near, peer, note))
                    time.sleep(0.01)
        assert ended([again, near.send("x", here)]) == [None, None]
        found.require_right()


def test_notes_are_read_in_little_time() -> None:
    """Red: an offer in an offer in an offer, in a note of any length, ended the endpoint's thread."""
    nested = b""
    for _ in range(3000):
        nested = notes.write(notes.Offer(1, 2, bytes(16), 0, range(1), range(1), 0, False)) + nested
    for length in (4000, len(nested)):
        with pytest.raises(BindError, match="note: expected"):
            notes.read(nested[:length])


def card_with(card: bytes, **changes: Any) -> bytes:
    told = json.loads(card)
    told["shared"][""] |= changes
    return json.dumps(told).encode()


def lies() -> Iterator[tuple[str, dict[str, Any], str]]:
    """What a card says, and the reason for the ring."""
    other = shared_slab(1 << 12, "another")
    file, begin, end = file_of(other.ctypes.data, other.ctypes.data + 1)
    yield "another file", {"pieces": [[str(file), 1 << 30, begin]], "places": [[0, 0], [0, 64]]}, "no memory of kvbm of this size"
    yield "no file", {"pieces": [["0", 1 << 20, begin]], "places": [[0, 0], [0, 64]]}, "no memory of kvbm"
    yield "a small file", {"pieces": [[str(file), end - begin, begin]], "places": [[0, 0], [0, 64]]}, "behind the end of its memory"
    yield "one array", {"places": [[0, 0]]}, "expected 2 arrays"
    yield "another layout", {"layout": "order: b l o t h d"}, "expected 1 arrays"
    yield "a path", {"pieces": [["../1", 1 << 20, begin]], "places": [[0, 0], [0, 64]]}, "expected a descriptor"


def test_an_expected_offer_is_recognised_by_every_byte() -> None:
    offer = notes.Offer(7, 1 << 63, bytes(range(16)), 3, range(2, 5), range(64, 200), 32, False, 1.5, True)
    blocks = np.arange(9, dtype="<i4").tobytes()
    note = notes.foreseen(offer._replace(sending=0, age=0.0, is_lent=False), 9)
    told = notes.write(offer._replace(table=notes.Table(7, 0, 0, 9, True, blocks)))
    assert notes.offered(told) == (7, notes.offered(note[0])[1])
    found = notes.read(told)
    assert isinstance(found, notes.Offer) and found.table is not None and found.table.blocks == blocks
    words, pool = np.zeros(2, np.uint64), kvbm.Pool.allocate("universal", "nl=1,no=1,nh=1,nt=16,hd=8,dtype=uint16", 1)
    address = int(words.ctypes.data)

    def is_it(other: bytes) -> bool:
        """Nothing is copied, but a loan begins."""
        words[0] = 0
        one = _core.Foreseen([], *note, 9, _core.Loans(address, address + 8, words), pool.watch)
        begun = one.begin(other)
        assert one.has_begun is begun and words[0] == begun and one.begin(other) is begun
        assert one.end() == ([] if begun else None) and one.end() is None and not one.begin(other)
        return begun

    assert is_it(told)
    head, number, age = 12, range(4, 12), range(71, 79)
    table = len(told) - len(blocks)
    for at in range(len(told)):
        other = bytearray(told)
        other[at] ^= 2
        assert is_it(bytes(other)) == (at in age or at >= table), at
    both = bytearray(told)
    for at in (*number, *range(80 + 4, 80 + head)):
        both[at] ^= 2
    assert is_it(bytes(both)), "another number, in both places"
    for short in range(len(told)):
        assert not is_it(told[:short])
    assert not is_it(told + bytes(4))
    for kind in (notes.Ready(7, 0, 1), notes.Done(7, 0, 1), offer):
        assert not is_it(notes.write(kind))
    words[1] = 1  # the peer has ended the connection
    assert not is_it(told)
    words[1] = 0
    pool.close()
    assert not is_it(told)


@pytest.mark.parametrize("what", [name for name, *_ in lies()])
def test_a_card_that_lies_is_not_believed(what: str) -> None:
    """The blocks come in chunks then, and the link says why."""
    changes, reason = next((changes, reason) for name, changes, reason in lies() if name == what)
    with OneEach("shared", "shared") as found:
        assert reason in found.meet(card_with(found.ends[0].card(), **changes))
        assert found.go() == [None, None] and found.links[1].stats()["pulls"] == 0


@pytest.mark.parametrize(
    "changes",
    [{"pieces": 3}, {"places": []}, {"places": [[9, 0]]}, {"places": [[0, -1]]}, {"num_blocks": 0}, {"layout": "x" * 9000},
     {"pieces": [["1", -1, 1]]}, {"pieces": [[1, 1, 1]]}, {"num_blocks": True},
     {"layout": "[" * 999}, {"layout": "{a: " * 65},  # a reader of YAML takes long for a few of these
     {"pieces": [["1", 4096, 1]] * 2, "places": [[0, 0], [1, 0]]}, {"pieces": [["1", 4096, n + 1] for n in range(99)]}],
)  # fmt: skip
def test_cards_that_are_none(changes: dict[str, Any]) -> None:
    with OneEach("shared", "shared") as found, pytest.raises(BindError, match="card: expected"):
        found.meet(card_with(found.ends[0].card(), **changes))


def test_a_table_of_blocks_that_do_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read, and nothing is written."""
    lies = [
        ([5, 3, 16, 1], "expected 0 to 15"), ([5, 3], "got a table of 2"), ([5, 3, -1, 1], "has no block"),
        ([1] * 61, "for fewer tokens"),
    ]  # fmt: skip
    for blocks, reason in lies:
        with OneEach("shared", "shared") as found, monkeypatch.context() as patch:
            found.meet()
            patch.setattr(notes.Table, "tail", lambda _, ids=blocks: np.array(ids, "<i4").tobytes())
            patch.setattr(notes.Table, "fields", lambda self, ids=blocks: (self.arrival, 0, len(ids), False))
            errors = found.go()
            assert all(reason in str(error) for error in errors), errors
            assert (np.asarray(found.pools[1].arrays[0]).view(np.uint16) == 0x5555).all()


def test_entries_that_no_token_needs_may_be_any_number() -> None:
    """Red: -2, and what became -2 in 32 bits, was an entry that had not come yet, and the message never ended."""
    with OneEach("shared", "shared") as found:
        found.meet()
        tokens = range(16, 48)
        for first in (-1, -2, 99, (1 << 32) - 5, -(1 << 40)):
            calls = [found.links[1].receive("x", Span([2, 0], tokens)), found.links[0].send("x", Span([first, 3, 8], tokens))]
            assert ended(calls) == [None, None]
            found.require_right(tokens)
        assert found.links[1].stats()["pulls"] == 5


def test_a_pool_that_is_closed_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: it was, if it was closed between `receive` and the copy."""
    begin = pulls.Pull._begin
    with OneEach("shared", "shared") as found:
        found.meet()
        arrays = found.pools[1].arrays
        monkeypatch.setattr(pulls.Pull, "_begin", lambda self: (found.pools[1].close(), begin(self)))
        errors = found.go()
        assert isinstance(errors[0], BindError) and "closed" in str(errors[0])
        assert errors[1] is not None
        assert (np.asarray(arrays[0]).view(np.uint16) == 0x5555).all()


def test_memory_of_a_peer_that_has_gone_is_not_kept() -> None:
    """Red: it stayed mapped as long as the link."""
    gc.collect()
    before = memory_files("pool")
    with OneEach("shared", "cpu") as found:
        found.meet()
        assert found.go() == [None, None]
        assert len(memory_files("pool") - before) == 1
        found.ends.pop(0).close()
        found.links.pop(0)
        found.pools.pop(0)
        [peer] = found.links[0].peers
        found.links[0].lose(peer, PeerLostError(peer))
        assert isinstance(ended([found.links[0].receive("y", Span([2, 0], range(60)))])[0], PeerLostError)
        until(lambda: gc.collect() is not None and not memory_files("pool") - before, "nothing is mapped")


def test_a_limit_of_multiprocessors_is_of_no_matter_on_a_cpu() -> None:
    with OneEach("shared", "shared", max_sms=4) as found:
        assert found.meet() == "direct"
        assert found.go() == [None, None]
        found.require_right()


def test_ranks_of_one_engine_have_chunks_of_one_size() -> None:
    """Else they cut one sequence differently, and whoever reads both puts them together wrong."""
    with linked() as found:
        cards = [end.card() for end in found.ends[0]]
        told = json.loads(cards[1])
        told["chunk_bytes"] //= 2
        with pytest.raises(BindError, match="ranks 0 and 1 differ in chunk_bytes"):
            found.ends[1][0].meet([cards[0], json.dumps(told).encode(), *cards[2:]])


@pytest.mark.parametrize("fails", ["Expected", "Foreseen", "submit"])
def test_memory_of_digests_is_used_again_after_an_error(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: an error of `receive` kept what it had prepared for good: a page of pinned memory a time."""
    made: list[pulls.Sums] = []

    class Noted(pulls.Sums):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    def refuse(*_: Any, **__: Any) -> Any:
        raise BindError("refused")

    with OneEach("shared", "shared") as found, monkeypatch.context() as patch:
        found.meet()
        assert found.go() == [None, None]
        patch.setattr(pulls, "Sums", Noted)
        if fails == "submit":
            patch.setattr(Endpoint, "submit", refuse)
            with pytest.raises(BindError, match="refused"):
                found.links[1].receive("x", Span([2, 0], range(60)))
        else:
            names = {name: getattr(_core, name) for name in ("Expected", "Foreseen", "Loans", "Table")}
            patch.setattr(pulls, "_core", types.SimpleNamespace(**{**names, fails: refuse}))
            found.links[1].receive("x", Span([2, 0], range(60))).abort()
        assert made and all(one.is_enqueued for one in made)


def test_a_closed_pool_is_not_lent() -> None:
    with OneEach("shared", "shared") as found:
        found.meet()
        found.pools[0].close()
        with pytest.raises(BindError, match="closed"):
            found.links[0].send("x", Span([5, 3, 8, 1], range(60)))


def test_nothing_is_left() -> None:
    """Neither files nor mappings of pools, after links, pools and processes of peers have ended."""
    gc.collect()
    before = memory_files("pool")
    for _ in range(3):
        with OneEach("shared", "shared") as found:
            found.meet()
            assert found.go() == [None, None]
        del found
    gc.collect()
    assert memory_files("pool") <= before


@pytest.mark.parametrize("name", kvbm.layouts())
def test_a_layout_that_is_written_is_read_as_the_same(name: str) -> None:
    layout = kvbm.load(name)
    assert parse(write(layout)) == layout


@pytest.mark.slow  # 0.6 s
@pytest.mark.sanitize
def test_memory_of_a_pool_that_is_shared() -> None:
    """All zero, aligned, writable, and copied as any other; the file goes with the last array."""
    shape = kvbm.load_shape("llama-3.1-8b,nl=2")
    before = memory_files("pool")
    pool = kvbm.Pool.allocate("nhd", shape, 3, "shared")
    other = kvbm.Pool.allocate("universal", shape, 3)
    assert pool.device == "cpu" and not pool.pinned and not pool.readonly and pool.alignment == 16
    assert not any(array.view("uint8").any() for array in pool.arrays)
    kvbm.convert(pool, other)
    assert not any(array.view("uint8").any() for array in other.arrays)
    assert len(memory_files("pool") - before) == 1
    last = pool.arrays[0]
    del pool
    gc.collect()
    assert len(memory_files("pool") - before) == 1
    last[...] = 1
    del last
    gc.collect()
    assert not memory_files("pool") - before
    with pytest.raises(NotEnoughMemoryError):
        kvbm.Pool.allocate("universal", shape, 1 << 40, "shared")


def test_a_card_holds_the_pools_of_a_large_model() -> None:
    """160 arrays, each in memory of its own."""
    model = kvbm.load_shape("llama-3.1-70b,nh=1,hd=16,nt=16")
    hub, place = wire.Hub(), vllm(model, name="x")
    arrays = [shared_slab(1024, "layer").view(ml_dtypes.bfloat16).reshape(2, 1, 16, 1, 16) for _ in range(80)]
    pool = kvbm.Pool("vllm/flash_attn_nhd", place.shape(0), arrays)
    its = wire.mapped(wire.memory("x", hub))
    with Endpoint("x", place, 0, pool, wire=its, ring_bytes=1 << 22, chunk_bytes=1 << 20) as end:
        told = json.loads(end.card())["shared"][""]
        assert len(told["pieces"]) == len(told["places"]) == 80 and len(end.card()) < 80 << 10
        assert base64.b64decode(json.loads(end.card())["wire"])


def test_a_card_that_would_be_too_large_lends_less() -> None:
    """Red: peers refused the whole card, and so the link.  The largest group comes in chunks, and the card says why."""
    model = kvbm.load_shape("nl=500,no=2,nh=1,nt=16,hd=16,dtype=bfloat16")
    hub, place = wire.Hub(), vllm(model, name="x")
    groups = {}
    for name in ("one", "other", "third"):
        arrays = [shared_slab(512, "layer").view(ml_dtypes.bfloat16).reshape(1, 16, 1, 16) for _ in range(1000)]
        groups[name] = place, kvbm.Pool("flashinfer/tuple_nhd", place.shape(0), arrays)
    ends = [
        Endpoint(name, groups, 0, wire=wire.mapped(wire.memory(name, hub)), ring_bytes=1 << 22, chunk_bytes=1 << 20)
        for name in "ab"
    ]
    try:
        told = json.loads(ends[0].card())["shared"]
        reasons = [one for one in told.values() if isinstance(one, str)]
        assert 0 < len(reasons) < 3 and set(reasons) == {"its arrays are too many for a card"}
        link = ends[1].meet([ends[0].card()])
        assert sorted(link.paths.values()).count("direct") == 3 - len(reasons)
    finally:
        for end in ends:
            end.close()
