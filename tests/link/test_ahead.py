"""Copies that begin with an offer: their loans, what is written, and offers that lie, fail or come for another receive."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_direct import OneEach

from kvbm import KvbmError, Span
from kvbm.errors import BindError, TransferError
from kvbm.link import notes, pulls
from kvbm.link.link import Link
from linking import ended, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are of Linux")

HERE, THERE = Span([5, 3, 8, 1], range(60)), Span([2, 0], range(60))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneEach]:
    """Two ends whose next message is lent at once; `found.begun` has what begins with an offer."""
    begin, begun = pulls.Ahead.begin, []
    monkeypatch.setattr(pulls.Ahead, "begin", lambda self, *rest: (begun.append(self), begin(self, *rest))[1])
    with OneEach("shared", "shared") as made:
        made.meet()
        assert made.go() == [None, None] and not begun
        made.require_right()
        made.begun = begun  # type: ignore[attr-defined]
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
    until(lambda: found.links[1].stats()["notes_wrong"], "it is refused")
    assert found.begun and loans(found) == [0, 0] and not arrival.has_ended  # type: ignore[attr-defined]
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
