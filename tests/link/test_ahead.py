"""Copies that begin with an offer: their loans, what is written, and offers that lie, fail or come for another receive."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_direct import OneEach

from kvbm import KvbmError, Pool, Span, wire
from kvbm.errors import BindError, TransferError
from kvbm.link import direct, endpoint, notes, pulls
from kvbm.link.handle import Arrival
from kvbm.link.link import Link
from kvbm.reshard import Endpoint
from linking import LIMIT, ended, until
from programs.wires import Polled

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are of Linux")

HERE, THERE = Span([5, 3, 8, 1], range(60)), Span([2, 0], range(60))


def boxed(below: Any) -> wire.Mapped:
    """A wire whose notes come through memory, and are seen without a lock of Python's."""
    return wire.mapped(Polled(below), drop_seconds=1)


@contextlib.contextmanager
def lent_at_once(monkeypatch: pytest.MonkeyPatch, *, is_boxed: bool) -> Iterator[OneEach]:
    """Two ends whose next message is lent at once; `begun` has what begins with an offer."""
    begin, begun = pulls.Ahead.begin, []
    monkeypatch.setattr(pulls.Ahead, "begin", lambda self, *rest: (begun.append(self), begin(self, *rest))[1])
    with OneEach("shared", "shared", **({"wrap": boxed} if is_boxed else {})) as made:
        made.meet()
        for end in made.ends:
            end.spins = is_boxed
        for _ in range(1 + is_boxed):  # then all notes come through memory
            begun.clear()
            assert made.go() == [None, None] and len(begun) <= is_boxed
            made.require_right()
        lanes = [known.lane for end in made.ends for known in end.wire._peers.values()]  # type: ignore[attr-defined]
        assert all(lane.takes if is_boxed else lane is None for lane in lanes)
        begun.clear()
        made.begun = begun  # type: ignore[attr-defined]
        yield made


@pytest.fixture(params=[False, True], ids=["by a wire", "through memory"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneEach]:
    with lent_at_once(monkeypatch, is_boxed=request.param) as made:
        yield made


@pytest.fixture
def near_far(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneEach]:
    """Ends whose notes come through memory."""
    with lent_at_once(monkeypatch, is_boxed=True) as made:
        yield made


def loans(found: OneEach) -> list[int]:
    return [end.wire._page.count_of(peer) for end in found.ends for peer in end.wire._peers]  # type: ignore[attr-defined]


def offer_of(found: OneEach, key: str, **changes: Any) -> notes.Offer:
    """An offer of these blocks, as the sender writes it."""
    near = found.links[0]
    _, [start] = near._sending(key, HERE, None, "", None, None, 1.0, pulls=False)
    return start.offer._replace(**changes)


def say(found: OneEach, data: bytes) -> None:
    near = found.links[0]
    [peer] = near.peers
    near.endpoint.call(lambda: near.endpoint.wire.note(peer, data))


def test_a_copy_begins_with_the_offer(found: OneEach) -> None:
    for _ in range(3):
        assert found.go() == [None, None]
        found.require_right()
    assert len(found.begun) == 3 and loans(found) == [0, 0]  # type: ignore[attr-defined]


def test_a_loan_ends_if_the_offer_ends_the_thread(found: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: nobody gave it back, so that neither the owner nor this side could close its end."""

    def fails(self: Link, peer: str, note: notes.Note, ahead: Any = None) -> None:
        raise RuntimeError("no memory")

    arrival = found.links[1].receive("x", THERE)
    with monkeypatch.context() as patch:
        patch.setattr(Link, "heard", fails)
        say(found, notes.write(offer_of(found, "x")))
        [error] = ended([arrival])
    assert isinstance(error, TransferError) and "no memory" in str(error)
    assert found.begun and not any(loans(found))  # type: ignore[attr-defined]


def blocks(found: OneEach) -> Any:
    return np.stack([np.asarray(array) for array in found.pools[1].arrays])


def require_nothing_left(found: OneEach) -> None:
    """A receive has failed: its tokens are zero or as before, the others are as before."""
    mask = np.zeros_like(blocks(found), bool)
    mask[2] = mask[0, ..., :28, :] = True
    far = blocks(found)
    assert (far[~mask] == 0x5555).all() and ((far[mask] == 0).all() or (far[mask] == 0x5555).all())
    for array in found.pools[1].arrays:
        array[...] = 0x5555


@pytest.mark.parametrize("age", [float("nan"), float("inf"), -1.0, 1e300])
def test_an_offer_that_is_refused_after_its_copy_has_begun(found: OneEach, age: float) -> None:
    arrival = found.links[1].receive("x", THERE)
    say(found, notes.write(offer_of(found, "x", age=age)))
    until(lambda: found.links[1].stats()["notes_wrong"] and loans(found) == [0, 0], "it is refused")
    assert found.begun and not arrival.has_ended  # type: ignore[attr-defined]
    assert ended([found.links[0].send("x", HERE), arrival]) == [None, None]
    found.require_right()


@pytest.mark.parametrize("ids", [[5, 3, 16, 1], [5, 3, -1, 1], [5, 3, 8, -5], [1 << 30] * 4, [-(1 << 31)] * 4])
def test_a_table_of_blocks_that_do_not_exist(found: OneEach, ids: list[int]) -> None:
    arrival = found.links[1].receive("x", THERE)
    offer = offer_of(found, "x")
    assert offer.table is not None
    say(found, notes.write(offer._replace(table=offer.table._replace(blocks=np.array(ids, "<i4").tobytes()))))
    [error] = ended([arrival])
    assert isinstance(error, BindError) and "expected 0 to 15" in str(error) and "hold a part" not in str(error)
    assert found.begun and loans(found) == [0, 0]  # type: ignore[attr-defined]
    require_nothing_left(found)


def test_offers_with_any_bit_changed(found: OneEach) -> None:
    """No one ends the thread, keeps a loan, writes elsewhere, or is taken for the right one."""
    far, begun = found.links[1], 0
    for number, bit in enumerate(range(0, 8 * len(notes.write(offer_of(found, "x0"))), 3)):
        key = f"x{number}"
        arrival = far.receive(key, THERE)
        data = bytearray(notes.write(offer_of(found, key)))
        data[bit // 8] ^= 1 << bit % 8
        say(found, bytes(data))
        far.endpoint.call(lambda: None)
        arrival.abort()
        [error] = ended([arrival])
        assert isinstance(error, KvbmError)
        require_nothing_left(found)
        begun += len(found.begun)  # type: ignore[attr-defined]
        found.begun.clear()  # type: ignore[attr-defined]
    assert begun > 50
    until(lambda: loans(found) == [0, 0], "all loans have ended")
    assert found.go() == [None, None]
    found.require_right()


@pytest.mark.parametrize("same", [True, False])
def test_two_offers_of_one_message_at_once(found: OneEach, same: bool) -> None:
    """Only the first is copied.  The same one is asked for; another one fails the arrival, as what it wrote may be of either."""
    arrival = found.links[1].receive("x", THERE)
    first = offer_of(found, "x")
    second = first if same else offer_of(found, "x")
    near = found.links[0]
    [peer] = near.peers
    near.endpoint.call(lambda: [near.endpoint.wire.note(peer, notes.write(one)) for one in (first, second)])
    until(lambda: arrival.has_ended or same, "it fails")
    time.sleep(0.02)
    assert len(found.begun) == 1 and arrival.has_ended is not same  # type: ignore[attr-defined]
    arrival.abort()
    assert isinstance(ended([arrival])[0], KvbmError)
    until(lambda: loans(found) == [0, 0], "all loans have ended")
    require_nothing_left(found)


def test_two_receives_of_one_key(found: OneEach) -> None:
    """The offer is of the first of them, also if only the second has foreseen it."""
    far = found.links[1]
    arrivals = [far.receive("x", THERE, verify=verify) for verify in ("before", "after")]
    assert ended([found.links[0].send("x", HERE), arrivals[0]]) == [None, None]
    found.require_right()
    assert not arrivals[1].has_ended
    assert ended([found.links[0].send("x", HERE), arrivals[1]]) == [None, None]
    found.require_right()
    assert loans(found) == [0, 0]


def test_a_pool_that_is_closed_is_not_written(found: OneEach) -> None:
    """Red: the error said that its blocks held a part of the message."""
    arrays = found.pools[1].arrays
    arrival = found.links[1].receive("x", THERE)
    found.pools[1].close()
    found.links[0].send("x", HERE)
    [error] = ended([arrival])
    assert "closed" in str(error) and "hold a part" not in str(error)
    assert all((np.asarray(array) == 0x5555).all() for array in arrays)
    until(lambda: loans(found) == [0, 0], "all loans have ended")


# ---- without a lock of Python's ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def paused(end: Endpoint) -> Iterator[None]:
    """The endpoint's thread does nothing: it has taken no note that comes meanwhile."""
    go_on, has_paused = threading.Event(), threading.Event()
    try:
        end.submit(lambda: (has_paused.set(), go_on.wait(LIMIT)))  # type: ignore[arg-type, return-value]
        assert has_paused.wait(LIMIT)
        yield
    finally:
        go_on.set()


def is_written(found: OneEach) -> bool:
    return bool((blocks(found) != 0x5555).any())


def test_a_copy_begins_on_the_thread_that_receives(near_far: OneEach) -> None:
    """The offer is there: nobody waits for the endpoint's thread.  Red: it was begun by that."""
    near, far = near_far.links
    with paused(near_far.ends[1]):
        sending = near.send("x", HERE)
        arrival = far.receive("x", THERE)
        assert is_written(near_far) and sum(loans(near_far)) == 1
        assert not arrival.has_ended and not sending.has_ended
    assert ended([sending, arrival]) == [None, None]
    near_far.require_right()
    assert loans(near_far) == [0, 0]


def test_a_copy_begins_on_the_thread_that_waits(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun when Python sees the note."""
    begin, seen = pulls.Ahead.begin, []
    monkeypatch.setattr(pulls.Ahead, "begin", lambda self, note: (seen.append(self.copies.has_begun), begin(self, note))[1])
    for number in range(5):
        arrival = near_far.links[1].receive(f"x{number}", THERE)
        time.sleep(0.001)
        assert ended([near_far.links[0].send(f"x{number}", HERE), arrival]) == [None, None]
        near_far.require_right()
    assert seen == [True] * 5


@pytest.mark.parametrize("when", ["before the offer", "after it has begun"])
def test_an_abort(near_far: OneEach, when: str) -> None:
    """Nothing of the message is left, and nothing is lent."""
    near, far = near_far.links
    with paused(near_far.ends[1]):
        if when == "before the offer":
            arrival = far.receive("x", THERE)
            arrival.abort()
            sending = near.send("x", HERE)
        else:
            sending = near.send("x", HERE)
            arrival = far.receive("x", THERE)
            assert is_written(near_far)
            arrival.abort()
    errors = ended([arrival])
    sending.abort()  # else it waits for the next receive
    errors += ended([sending])
    assert all(isinstance(error, TransferError) for error in errors), errors
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")
    require_nothing_left(near_far)
    assert near_far.go() == [None, None]
    near_far.require_right()


def test_an_arrival_that_fails_while_its_copy_begins(near_far: OneEach) -> None:
    """Its time is over before the offer is read."""
    near, far = near_far.links
    with paused(near_far.ends[1]):
        sending = near.send("x", HERE)
        arrival = far.receive("x", THERE, timeout=0.01)
        assert is_written(near_far)
        time.sleep(0.02)
    errors = ended([arrival])
    sending.abort()
    ended([sending])
    assert all(error is None or isinstance(error, TransferError) for error in errors)
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")
    if errors[0] is None:
        near_far.require_right()
    else:
        require_nothing_left(near_far)


@pytest.mark.parametrize("what", ["another offer", "the same again"])
def test_two_offers_in_the_box(near_far: OneEach, what: str) -> None:
    """Copies begin once.  Another offer of the same fails the arrival, as what it wrote may be of either."""
    _, far = near_far.links
    with paused(near_far.ends[1]):
        first = offer_of(near_far, "x")
        say(near_far, notes.write(first))
        say(near_far, notes.write(first if what == "the same again" else offer_of(near_far, "x")))
        arrivals = [far.receive("x", THERE), far.receive("x", Span([7, 9], range(60)))]
        assert sum(loans(near_far)) == 1
        assert (np.asarray(near_far.pools[1].arrays[7]) == 0x5555).all(), "the second has not begun with the first's note"
    for one in arrivals:
        one.abort()
    assert all(isinstance(error, KvbmError) for error in ended(arrivals))
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")


def test_an_offer_behind_another_note_waits_for_it(near_far: OneEach) -> None:
    """Red: a copy that began out of turn wrote beside that of the note before."""
    _, far = near_far.links
    with paused(near_far.ends[1]):
        say(near_far, notes.write(offer_of(near_far, "x", tokens=range(61))))
        say(near_far, notes.write(offer_of(near_far, "x")))
        arrival = far.receive("x", THERE)
        assert not is_written(near_far) and loans(near_far) == [0, 0]
    time.sleep(0.02)
    arrival.abort()
    assert isinstance(ended([arrival])[0], KvbmError)
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")
    require_nothing_left(near_far)


def test_a_copy_that_has_begun_ends_before_another_flow_writes(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note that it began with is lost; the offer is made again, with another number."""
    near, far = near_far.links
    begin, running = pulls.Pull._begin, []
    monkeypatch.setattr(
        pulls.Pull, "_begin", lambda self: (running.append([one.copies.has_begun for one in self.arrival.ahead]), begin(self))[1]
    )
    with paused(near_far.ends[1]):
        say(near_far, notes.write(offer_of(near_far, "x")))
        arrival = far.receive("x", THERE)
        assert is_written(near_far)
        [known] = near_far.ends[1].wire._peers.values()  # type: ignore[attr-defined]
        assert len(known.lane.take()) == 1
    assert not arrival.has_ended and sum(loans(near_far)) == 1
    assert ended([near.send("x", HERE), arrival]) == [None, None]
    near_far.require_right()
    assert running == [[False]]
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")


def test_a_link_that_is_closed_while_a_copy_is_expected(near_far: OneEach) -> None:
    """Its loan ends, so that the owner can end the connection, too."""
    with paused(near_far.ends[1]):
        sending = near_far.links[0].send("x", HERE)
        arrivals = [near_far.links[1].receive(key, THERE) for key in ("x", "y")]
        assert is_written(near_far)
        near_far.links[1].leave()
    assert all(isinstance(error, KvbmError) for error in ended(arrivals))
    sending.abort()
    assert all(isinstance(error, KvbmError) for error in ended([sending]))
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")
    require_nothing_left(near_far)


def test_a_child_begins_nothing(near_far: OneEach) -> None:
    """Red: it raised the number of its parent's loans, and the peer waited for ever."""
    near, far = near_far.links
    with paused(near_far.ends[1]):
        sending = near.send("x", HERE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the threads that a fork leaves out
            pid = os.fork()
        if not pid:
            far.receive("x", THERE)
            os._exit(is_written(near_far))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert loans(near_far) == [0, 0]
        arrival = far.receive("x", THERE)
        assert is_written(near_far)
    assert ended([sending, arrival]) == [None, None]
    near_far.require_right()


@pytest.mark.parametrize("is_posted", [True, False])
def test_a_long_table_comes_with_the_offer(is_posted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a note that only shared memory has room for; else it comes in parts.  Red: it always did."""
    monkeypatch.setattr(direct, "_PIECE_BYTES", 1 << 30)
    offers, begin, seen = [], pulls.Ahead.begin, []
    read = notes.read
    monkeypatch.setattr(endpoint, "read", lambda data: (offers.append(read(data)), offers[-1])[1])
    monkeypatch.setattr(pulls.Ahead, "begin", lambda self, note: (seen.append(begin(self, note)), seen[-1])[1])
    with OneEach("shared", "shared", wrap=boxed, num_blocks=1100) as made:
        made.meet()
        for end in made.ends:
            end.spins = True
        near, far = made.links
        tokens = range(16 * (notes.MOST_OFFERED + 50))
        rng = np.random.default_rng(3)
        for turn in range(4):
            if not is_posted:
                monkeypatch.setattr(Link, "_post", lambda *_: False)
            spans = [Span(rng.permutation(1100)[: -(-len(tokens) // each)], tokens) for each in (16, 32)]
            arrival, sending = far.receive(f"{turn}", spans[1]), near.send(f"{turn}", spans[0])
            assert ended([arrival, sending]) == [None, None]
            near_blocks = np.stack([np.asarray(array) for array in made.pools[0].arrays])[:, :, spans[0].table]
            far_blocks = blocks(made)[spans[1].table]  # [nb, nh, nl, no, nt, hd]
            right = np.moveaxis(near_blocks.reshape(2, 2, -1, 8, 16)[:, :, : len(tokens)], 3, 0)
            got = np.concatenate(list(far_blocks), axis=-2)[..., : len(tokens), :]
            np.testing.assert_array_equal(got, right)
        assert loans(made) == [0, 0]
        found = [one for one in offers if isinstance(one, notes.Offer)]
        tables = [one.table.entries for one in found if one.table is not None]
        assert any(seen) is is_posted and tables == [len(tokens) // 16] * len(tables) and bool(tables) is is_posted


def test_memory_that_moves_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage of a tensor is freed after `receive`.  Red: the copy wrote to it."""
    torch = pytest.importorskip("torch")
    with OneEach("shared", "shared", wrap=boxed) as first:
        layout, shape = first.pools[1].layout, first.pools[1].shape
        tensors = [torch.zeros(np.asarray(array).shape, dtype=torch.uint16) for array in first.pools[1].arrays]
        mine = Pool(layout, shape, tensors)
        place = first.ends[1].groups[""][0]
        hub_wire = boxed(wire.memory("moves", first.hub))
        with Endpoint("decode", place, 0, mine, wire=hub_wire, chunk_bytes=1 << 14, ring_bytes=1 << 18) as end:
            near, far = first.ends[0].meet([end.card()]), end.meet([first.ends[0].card()])
            for one in (first.ends[0], end):
                one.spins = True
            for turn in range(3):
                assert ended([far.receive(f"{turn}", THERE), near.send(f"{turn}", HERE)]) == [None, None]
            arrival = far.receive("y", THERE)
            time.sleep(0.001)
            for tensor in tensors:
                tensor.untyped_storage().resize_(0)
            sending = near.send("y", HERE)
            errors = ended([arrival, sending])
            assert "other memory" in str(errors[0]), errors


class Lossy:
    """A mapped wire that loses, doubles and delays notes, also those that came through memory."""

    def __init__(self, below: Any, rate: float, seed: int) -> None:
        self.below, self.rate, self.rng = wire.mapped(Polled(below), drop_seconds=1), rate, random.Random(seed)
        self.late: list[tuple[float, tuple[str, bytes]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def poll(self) -> list[tuple[str, bytes]]:
        now, ready = time.monotonic(), []
        for note in self.below.poll():
            kind = self.rng.random() / self.rate if self.rate else 9.0
            if kind < 1:
                continue
            if kind < 3:  # late, or twice
                self.late.append((now + self.rng.random() * 0.2, note))
            if not kind < 2:
                ready.append(note)
        ready += [note for at, note in self.late if at <= now]
        self.late = [one for one in self.late if one[0] > now]
        return ready


class Message:
    """A message between blocks that nothing else uses; or a reader that comes too early, too late, or never."""

    def __init__(self, found: OneEach, rng: random.Random, key: str, free: tuple[set[int], set[int]]) -> None:
        self.found, self.free = found, free
        self.count = rng.randrange(1, 100)
        self.blocks = [rng.sample(sorted(free[side]), -(-self.count // each)) for side, each in ((0, 16), (1, 32))]
        for own, taken in zip(free, self.blocks, strict=True):
            own.difference_update(taken)
        self.scribble(0)
        near = np.stack([np.asarray(array) for array in found.pools[0].arrays])[:, :, self.blocks[0]]
        self.right = np.moveaxis(near.reshape(*near.shape[:2], -1, *near.shape[4:]), 3, 0)[..., : self.count, :]
        tokens, limits = range(self.count), [rng.choice([0.001, 0.02, 1.0, 1.0, 1.0]) for _ in range(2)]
        calls = [
            lambda: found.links[0].send(key, Span(self.blocks[0], tokens), timeout=limits[0]),
            lambda: found.links[1].receive(key, Span(self.blocks[1], tokens), timeout=limits[1]),
        ]
        self.handles: list[Any] = [None, None]
        for side in rng.sample((0, 1), 2):
            self.handles[side] = calls[side]()
            if rng.random() < 0.05:
                self.handles[side].abort()
        self.open = {0, 1}

    def scribble(self, side: int) -> None:
        """New contents for blocks of the sender, which are its own now; of the receiver, those that show what was written."""
        for block in self.blocks[side]:
            if side == 0:
                for array in self.found.pools[0].arrays:
                    array[:, block] = np.random.default_rng().integers(1, 1 << 16, array[:, block].shape)
            else:
                self.found.pools[1].arrays[block][...] = 0x5555

    def settle(self) -> str:
        """Check and free what has ended.  Returns what came of the receive, or nothing."""
        outcome = ""
        for side in [side for side in self.open if self.handles[side].has_ended]:
            if side == 1:
                far = np.concatenate([np.asarray(self.found.pools[1].arrays[block]) for block in self.blocks[1]], axis=-2)
                written, rest = far[..., : self.count, :], far[..., self.count :, :]
                assert (rest == 0x5555).all(), "what is behind the tokens"
                if self.handles[1].error is None:
                    np.testing.assert_array_equal(written, self.right)
                    outcome = "right"
                else:
                    assert (written == 0).all() or (written == 0x5555).all(), self.handles[1].error
                    outcome = "failed"
            self.scribble(side)
            self.free[side].update(self.blocks[side])
            self.open.discard(side)
        return outcome


@pytest.mark.threads
@pytest.mark.parametrize(("rate", "spins"), [(0.0, True), (0.04, False)], ids=["whole, spins", "lossy"])
def test_random_messages_are_right_or_leave_nothing(rate: float, spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts and aborts on either side, keys that are used again; blocks change as soon as they are a side's own again."""
    begin, begun = pulls.Ahead.begin, []
    monkeypatch.setattr(pulls.Ahead, "begin", lambda self, *rest: (begun.append(begin(self, *rest)), begun[-1])[1])
    rng, seeds = random.Random(rate), iter(range(2))
    with OneEach("shared", "shared", num_blocks=32, wrap=lambda below: Lossy(below, rate, next(seeds))) as found:
        found.meet()
        for array in found.pools[1].arrays:
            array[...] = 0x5555
        for end in found.ends:
            end.spins = spins
        free = set(range(32)), set(range(32))
        running: dict[str, Message] = {}
        outcomes: list[str] = []
        last = time.monotonic()
        while (left := 50 - len(outcomes) - len(running)) > 0 or running:
            key = f"{rng.randrange(8)}"
            if left > 0 and key not in running and min(map(len, free)) >= 7 and len(running) < 4:
                running[key] = Message(found, rng, key, free)
            for key, message in list(running.items()):
                if outcome := message.settle():
                    outcomes.append(outcome)
                    last = time.monotonic()
                if not message.open:
                    del running[key]
            assert time.monotonic() < last + LIMIT, running
            time.sleep(0.0002)
        until(lambda: loans(found) == [0, 0], "all loans have ended")
        assert not any(link._ahead or link.handles for link in found.links)
    assert outcomes.count("right") > 10 and any(begun), outcomes


def test_a_copy_that_is_dropped_holds_up_no_other_transfer(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it stands behind the caller's work.  Its blocks and its loan are free when it has ended.

    Red: the endpoint's thread waited for it.
    """
    near, far = near_far.links
    query, is_busy = direct.Pass.query, threading.Event()
    monkeypatch.setattr(direct.Pass, "query", lambda self: query(self) and (self is not late[0] or not is_busy.is_set()))
    monkeypatch.setattr(direct.Pass, "synchronize", lambda self: until(lambda: self.query(), "it is done"))
    late: list[Any] = [None]
    take = pulls.Ahead.take

    def taken(self: pulls.Ahead) -> Any:
        found = take(self)
        if found is not None and late[0] is None:
            late[0] = found
        return found

    monkeypatch.setattr(pulls.Ahead, "take", taken)
    is_busy.set()
    with paused(near_far.ends[1]):
        say(near_far, notes.write(offer_of(near_far, "x")))
        arrival = far.receive("x", THERE)
        assert is_written(near_far)
        arrival.abort()
    try:
        until(lambda: arrival.has_failed, "it has failed")
        assert ended([far.receive("y", Span([7, 9], range(60))), near.send("y", HERE)]) == [None, None]
        assert late[0] is not None and not arrival.has_ended and sum(loans(near_far)) == 1
        assert far.awaited() == [] and not far.is_idle
    finally:
        is_busy.clear()
    assert isinstance(ended([arrival])[0], KvbmError)
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")


def test_receives_of_one_key_begin_with_their_own_offers(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: the second began, was not found, and was copied again."""
    near, far = near_far.links
    leave, dropped = pulls.Ahead.leave, []
    monkeypatch.setattr(pulls.Ahead, "leave", lambda self: (dropped.append(self.copies.has_begun), leave(self))[1])
    for number in range(4):
        with paused(near_far.ends[1]):
            arrivals = [far.receive("x", Span([2 * k, 2 * k + 1], range(60))) for k in range(3)]
        for arrival in arrivals:
            assert ended([near.send("x", HERE), arrival]) == [None, None], number
    assert not any(dropped)


@pytest.mark.parametrize("what", ["calls", "transfers", "closes"])
def test_a_handler_of_a_signal_may_come_while_a_send_posts(what: str, near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: the endpoint's thread waited for who posts, and that for the thread; or did nothing else; or forgot the sending."""
    near, far = near_far.links
    post, called, other = Link._post, [], Span([7, 9], range(60))

    def interrupted(self: Link, start: Any) -> bool:
        if not called:
            called.append(0)
            time.sleep(0.03)  # the thread has begun with the sending
            if what == "calls":
                self.endpoint.call(lambda: called.append(1), 5)
            elif what == "transfers":
                assert ended([near.send("z", HERE), far.receive("z", other)]) == [None, None]
            else:
                near.leave()
        return post(self, start)

    monkeypatch.setattr(Link, "_post", interrupted)
    arrival = far.receive("x", THERE, timeout=3)
    found = ended([near.send("x", HERE, timeout=3), arrival])
    assert called and (found == [None, None] or what == "closes")
    if what == "calls":
        near_far.require_right()
    until(lambda: loans(near_far) == [0, 0], "all loans have ended")


@pytest.mark.slow  # a second
def test_an_endpoint_that_closes_while_a_send_posts_fails_it(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: the endpoint's thread broke, and the sending never ended."""
    near, _ = near_far.links
    post, threads = Link._post, []

    def slow(self: Link, start: Any) -> bool:
        threads.append(threading.Thread(target=self.endpoint.close))
        threads[0].start()
        time.sleep(1)
        return post(self, start)

    monkeypatch.setattr(Link, "_post", slow)
    [error] = ended([near.send("x", HERE, timeout=2)])
    assert isinstance(error, TransferError) and not near.endpoint._broken
    threads[0].join()


def test_zeros_are_written_when_the_dropped_copy_has_ended(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: before, where the link was closed meanwhile; the copy may be on another stream."""
    _, far = near_far.links
    seen: list[str] = []
    clear, begin = Arrival.clear, Link._begin_arrival
    monkeypatch.setattr(pulls.Ahead, "release", lambda _: seen.append("waited"))
    monkeypatch.setattr(Arrival, "clear", lambda self: (seen.append("zeros"), clear(self))[1])

    def late(self: Link, arrival: Any) -> None:
        until(lambda: is_written(near_far), "it has begun")
        self.is_closed = True
        begin(self, arrival)
        self.is_closed = False

    monkeypatch.setattr(Link, "_begin_arrival", late)
    with paused(near_far.ends[1]):
        say(near_far, notes.write(offer_of(near_far, "x")))
        arrival = far.receive("x", THERE)
    assert isinstance(ended([arrival])[0], TransferError)
    assert seen == ["waited", "zeros"]
    require_nothing_left(near_far)


def test_memory_of_digests_is_lost_if_copies_could_not_be_enqueued(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may still write it.  Red: the second `leave` gave it back."""
    _, far = near_far.links

    class Failed:
        """`Foreseen` of which a launch failed."""

        has_failed = True

        def __init__(self, copies: Any) -> None:
            self._copies = copies

        def __getattr__(self, name: str) -> Any:
            return getattr(self._copies, name)

    with paused(near_far.ends[1]):
        say(near_far, notes.write(offer_of(near_far, "x")))
        arrival = far.receive("x", THERE)
        [one] = arrival.ahead
        one.copies = Failed(one.copies)
        for _ in range(2):
            one.leave()
            assert not any(sums.is_enqueued for sums in one._sums)
    arrival.abort()
    assert isinstance(ended([arrival])[0], KvbmError)


def test_nothing_is_said_of_a_sending_before_its_offer(near_far: OneEach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: the thread's stop came first, the sending ended, and then the offer let the peer read its blocks."""
    near, far = near_far.links
    post = Link._post
    monkeypatch.setattr(Link, "_post", lambda self, start: (time.sleep(0.1), post(self, start))[1])
    arrival = far.receive("x", THERE, timeout=LIMIT / 2)
    sending = near.send("x", HERE, timeout=0.03)
    errors = ended([sending, arrival])
    assert "not done after 0.03 s" in str(errors[0]) and "has stopped sending" in str(errors[1])
    assert loans(near_far) == [0, 0]
