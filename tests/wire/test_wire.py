"""Wires: one suite for the laws of `kvbm.wire.Wire`, run on every available transport; cards; faults."""

from __future__ import annotations

import base64
import contextlib
import ctypes.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import BindError, PeerLostError, TransferTimeoutError, wire
from kvbm.wire import _mapped, _nixl, _nixl_storage, _torch
from kvbm.wire.protocol import CARD_BYTES, Card, _sum
from linking import LIMIT, close_all, until
from processes import FakeDriver, context
from programs import wires

HERE = Path(__file__).resolve().parents[1]
SIZE = 1 << 20
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl"), reason="NIXL is not installed"))
TORCH = pytest.param("torch", marks=pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed"))
MAPPED = pytest.param("mapped", marks=pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed"))
KINDS = ["memory", "faulty", TORCH, NIXL, MAPPED]
#: Those whose ends are processes.
APART = [TORCH, NIXL, MAPPED]


class Far:
    """The far end: in a separate process, or in a thread for wires within one process."""

    def __init__(self, near: wires.End, kind: str, place: Any = None, size: int = SIZE) -> None:
        self.near = near
        self.pipe, theirs = multiprocessing.Pipe()
        arguments = (theirs, kind, "far", size, place)
        self.process: Any
        apart = kind not in ("memory", "faulty")
        if apart:
            self.process = context().Process(target=wires.serve, args=arguments, daemon=True)
        else:
            self.process = threading.Thread(target=wires.serve, args=arguments, daemon=True)
        self.process.start()
        if apart:
            theirs.close()
        self.card = self.answer(5 * LIMIT)  # the first one imports torch and NIXL

    def answer(self, limit: float = LIMIT) -> Any:
        """The far end's answer; this end is polled meanwhile."""
        end = time.monotonic() + limit
        while not self.pipe.poll(0.0002):
            self.near.poll()
            assert time.monotonic() < end, "the far end does not answer"
        what, *rest = self.pipe.recv()
        if what != "ok":
            raise getattr(kvbm, what)(*rest)
        return rest[0]

    def __call__(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.answer()

    def wait(self, count: int) -> list[bytes]:
        """Wait for `count` notes."""
        end, notes = time.monotonic() + LIMIT, []
        while len(notes) < count:
            notes += self("notes")
            assert time.monotonic() < end, f"{len(notes)} of {count} notes came"
        return notes

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT)

    def close(self) -> None:
        self.pipe.close()
        end = time.monotonic() + LIMIT
        while self.process.is_alive():  # its wire says good-bye to this one
            self.near.poll()
            assert time.monotonic() < end, "the far end does not end"
            self.process.join(0.001)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Open = Callable[..., tuple[wires.End, Far]]


@pytest.fixture
def pair(kind: str, place: str) -> Iterator[Open]:
    """Opens ends of a kind, connected on both sides."""
    with contextlib.ExitStack() as stack:

        def make(script: Any = None, connect: bool = True, **seconds: float) -> tuple[wires.End, Far]:
            near = wires.End(kind, "near", SIZE, place, script, **seconds)
            stack.callback(no_threads)  # behind its close
            stack.callback(near.close)
            far = Far(near, kind, place)
            stack.callback(far.close)
            if connect:
                near.connect(far.card)
                far("connect", near.card())
            return near, far

        yield make


def no_threads() -> None:
    """Require that no thread of `wire.torch` is left."""
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("kvbm wire far")], "its threads end")


def done(near: wires.End) -> None:
    until(lambda: near.poll() or near.query(), "the put is done")


def lost(near: wires.End, *, by: Callable[[], Any] | None = None) -> None:
    """Require that a call finds the peer lost, and that each later call does."""

    def one() -> bool:
        try:
            near.poll()
            (by or (lambda: near.send(b"there?")))()
        except PeerLostError as error:
            assert error.peer == near.peer
            return True
        time.sleep(0.001)
        return False

    until(one, "PeerLostError")
    with pytest.raises(PeerLostError):
        near.send(b"there?")
    with pytest.raises(PeerLostError):
        near.start(0, 0, 1)
    near.poll()


# ---- the laws --------------------------------------------------------------------------------------------------------


def test_data_come_before_their_note(pair: Open) -> None:
    near, far = pair()
    random = np.random.default_rng(1)
    for value in range(240):
        nbytes = int(2 ** random.uniform(0, 20))
        offset = int(random.integers(0, SIZE - nbytes + 1))
        near.slab[:nbytes] = value
        near.start(0, offset, nbytes, b"holds %d %d %d" % (offset, nbytes, value))
        until(lambda: near.poll() or near.notes(), "it was looked at")  # before the next one overwrites it
        done(near)
    assert far("counts") == (240, 0) and far("guards")


def test_notes_come_in_order_each_once(pair: Open) -> None:
    """Notes of puts and others mixed, and several running puts."""
    near, far = pair()
    sent, ops = [], []
    for number in range(300):
        note = b"%d" % number
        if number % 3 == 0:
            nbytes = SIZE // 8 if number % 2 else 8
            place = wire.Slice(number % 8 * (SIZE // 8), nbytes)
            ops.append(near.wire.put(near.peer, place, place, note))
        else:
            near.send(note)
        sent.append(note)
    until(lambda: near.poll() or all(op.query() for op in ops), "all puts are done")
    assert far.wait(300) == sent
    assert far("notes") == []


def test_notes_come_whole(pair: Open) -> None:
    near, far = pair()
    every = bytes(range(256)) * (wire.NOTE_BYTES // 256)
    notes = [b"", b"\0", b"\xff" * 7, every[: wire.NOTE_BYTES - 1], every]
    for note in notes:
        near.send(note)
    near.start(0, 0, 8)  # no note
    near.send(b"end")
    done(near)
    assert far.wait(6) == [*notes, b"end"]
    for wrong in (every + b"x", "text", None):
        with pytest.raises(BindError, match="note"):
            near.send(wrong)  # type: ignore[arg-type]
        with pytest.raises(BindError, match="note"):
            near.start(0, 0, 8, wrong)  # type: ignore[arg-type]


def test_both_ways(pair: Open) -> None:
    near, far = pair()
    near.slab[:] = 1
    far("fill", 2)
    near.start(0, 0, SIZE // 2, b"mine")
    far("start", SIZE // 2, SIZE // 2, SIZE // 2, b"yours")
    done(near)
    until(lambda: far("query"), "its put is done")
    until(lambda: near.poll() or near.inbox == [b"yours"], "its note")
    assert far.wait(1) == [b"mine"]
    assert (near.slab == np.repeat([1, 2], SIZE // 2)).all()
    assert far("read", 0, SIZE) == near.slab.tobytes()


def test_get(pair: Open) -> None:
    near, far = pair()
    far("fill", 9)
    before = near.slab.copy()
    op = near.wire.get(near.peer, wire.Slice(100, 5000), wire.Slice(SIZE - 5000, 5000))
    until(lambda: near.poll() or op.query(), "the get is done")
    assert (near.slab[100:5100] == 9).all()
    before[100:5100] = 9
    assert (near.slab == before).all() and near.guards()
    assert far("notes") == []


@pytest.mark.parametrize("kind", ["memory", "faulty", TORCH], indirect=True)
def test_who_is_told_need_not_poll(pair: Open) -> None:
    """Each received note and each finished put is announced; NIXL knows nothing without polls."""
    near, far = pair()
    news = threading.Event()
    near.wire.on_news(news.set)  # type: ignore[attr-defined]
    for number in range(20):
        near.fill(number)
        near.start(0, 0, 1000, b"holds 0 1000 %d" % number)
        while not (near.query() and near.inbox):
            assert news.wait(LIMIT)
            news.clear()  # before the look: what comes behind it is told again
            near.poll()
        assert near.notes() == [b"seen"]
    assert far("counts") == (20, 0)


def test_notes_wait_for_the_connection(pair: Open) -> None:
    near, far = pair(connect=False)
    near.connect(far.card)
    near.send(b"first")
    near.send(b"second")
    for _ in range(50):  # they come meanwhile
        near.poll()
        assert far("notes") == []
    far("connect", near.card())
    assert far.wait(2) == [b"first", b"second"]


def test_nothing_lands_after_a_drop(pair: Open) -> None:
    """Neither delayed puts nor new ones; also no notes."""
    near, far = pair([wire.Fault("late", 0)])
    near.slab[:] = 5
    far("fill", 6)
    near.start(0, 0, SIZE, b"late")
    near.send(b"before")
    assert far.wait(1) == [b"before"]
    far("poll_or_not", False)
    near.send(b"on its way")
    far("drop")
    far("poll_or_not", True)
    near.wire.release()  # type: ignore[attr-defined]
    lost(near, by=lambda: near.start(0, 0, SIZE, b"new"))
    assert far("read", 0, SIZE) == bytes([6]) * SIZE
    assert far("notes") == []
    with pytest.raises(PeerLostError):
        far("send", b"x")
    far("drop")  # again
    with pytest.raises(BindError, match="start again"):
        far("connect", near.card())


def test_a_drop_ends_this_side_at_once(pair: Open) -> None:
    near, _far = pair()
    near.drop()
    near.drop()
    near.wire.drop("nobody")
    with pytest.raises(PeerLostError):
        near.send(b"there?")
    lost(near)
    with pytest.raises(BindError, match="start again"):
        near.connect(_far.card)


@contextlib.contextmanager
def two_ends(kind: str, place: str, size: int) -> Iterator[tuple[wires.End, Far]]:
    """Connected ends with large slabs; the far one is killed at the end, in any state."""
    near = wires.End(kind, "near", size, place)
    far = Far(near, kind, place, size)
    try:
        near.connect(far.card)
        far("connect", near.card())
        yield near, far
    finally:
        far.pipe.close()
        far.process.kill()
        far.process.join(LIMIT)
        near.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH])
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "lives"])
def test_a_drop_in_the_middle_of_a_put(kind: str, place: str, killed: bool) -> None:
    """Of a slice that has arrived in part: the drop returns at once, and no more of it arrives."""
    size = 1 << 28
    for _ in range(20):  # until it is caught in the middle
        with two_ends(kind, place, size) as (near, far):
            near.slab[:] = 1
            far("fill", 2)
            far("start", 0, 0, size, b"whole")
            until(lambda near=near: near.slab[0] == 2, "the first bytes are here")  # type: ignore[misc]
            if killed:
                far.kill()
            near.drop()
            part = int(np.count_nonzero(near.slab == 2))
            if part < size:
                time.sleep(0.2)  # what is on its way
                assert np.count_nonzero(near.slab == 2) == part and near.wire.poll() == []
        no_threads()
        if part < size:
            return
    pytest.fail("it was too quick to be in the middle")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waits"])
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_put_to_a_peer_that_stops(kind: str, place: str, killed: bool, begun: bool) -> None:
    """Its threads end with the peer, or with a drop, also if part of the slice was sent: gloo does not end such a send."""
    size = 1 << 28
    for attempt in range(20):  # until it is caught in the middle
        with two_ends(kind, place, size) as (near, far):
            near.start(0, 0, 8, b"one")
            done(near)
            assert far.wait(1) == [b"one"]
            if begun:
                near.start(0, 0, size, b"whole")
                time.sleep(0.01 * (1 + attempt))
            os.kill(far.process.pid, signal.SIGSTOP)
            if not begun:
                near.start(0, 0, size, b"whole")
            time.sleep(0.2)  # what can be sent
            waits = not near.query()
            far.kill() if killed else near.drop()
            if waits:
                no_threads()
                with pytest.raises(PeerLostError):
                    near.query()
                return
    pytest.fail("it was too quick to be in the middle")


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_put_of_a_dropped_peer_arrived_or_failed(place: str) -> None:
    """The slice that the drop meets has no receipt."""
    for pause in np.linspace(0, 0.01, 20):
        to, by = (wires.make("torch", name, place) for name in ("to", "by"))
        there, here = np.zeros(1, np.uint64), np.arange(2, dtype=np.uint64)
        to.register(wire.Slab.of(there))
        by.register(wire.Slab.of(here))
        near, far = to.connect(by.card()), by.connect(to.card())
        last = 0

        def puts(by: wire.Wire = by, here: np.ndarray = here, far: str = far) -> None:
            nonlocal last
            with contextlib.suppress(PeerLostError):
                while True:
                    here[last % 2] = last + 1
                    op = by.put(far, wire.Slice(last % 2 * 8, 8), wire.Slice(0, 8))
                    while not op.query():
                        time.sleep(0)
                    last += 1

        thread = threading.Thread(target=puts)
        thread.start()
        until(lambda there=there: there[0] > 2, "some arrive")  # type: ignore[misc]
        time.sleep(pause)
        to.drop(near)
        thread.join(LIMIT)
        assert not thread.is_alive() and last <= there[0]
        close_all((to, by))


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_put_fails_if_the_connection_ends_first(place: str) -> None:
    to, by = (wires.make("torch", name, place) for name in ("to", "by"))
    for one in (to, by):
        one.register(wire.Slab.of(np.zeros(8, np.uint8)))
    near, far = to.connect(by.card()), by.connect(to.card())
    to.note(near, b"one")
    until(by.poll, "they are connected")
    ended = threading.Event()
    empty = by._empty  # type: ignore[attr-defined]

    def late(*arguments: Any) -> Any:
        if arguments[1:] == ("recv", _torch._RECEIPTS):
            assert ended.wait(LIMIT)
        return empty(*arguments)

    by._empty = late  # type: ignore[attr-defined]
    op = by.put(far, wire.Slice(0, 8), wire.Slice(0, 8))
    to.drop(near)
    until(lambda: by._peers[far].lost, "it is lost")  # type: ignore[attr-defined]
    ended.set()

    def failed() -> bool:
        try:
            assert not op.query()
        except PeerLostError:
            return True
        return False

    until(failed, "PeerLostError")
    close_all((to, by))


def test_no_peer_is_connected_after_close(pair: Open) -> None:
    near, far = pair(connect=False)
    near.close()
    with pytest.raises(BindError, match="this side is closed"):
        near.connect(far.card)


def test_a_closed_peer_is_lost(pair: Open) -> None:
    near, far = pair()
    near.start(0, 0, 8, b"one")
    done(near)
    assert far.wait(1) == [b"one"]
    far("close")
    lost(near)
    near.drop()


def test_a_peer_that_closed_before_it_connected_is_lost(pair: Open) -> None:
    near, far = pair(connect=False, meet_seconds=2)
    near.connect(far.card)
    far("close")
    lost(near)


def test_close(pair: Open) -> None:
    near, far = pair()
    far("fill", 6)
    near.close()
    near.close()
    for call in (lambda: near.send(b"x"), lambda: near.start(0, 0, 8)):
        with pytest.raises(PeerLostError, match="closed"):
            call()
    assert near.wire.poll() == []
    assert far("read", 0, SIZE) == bytes([6]) * SIZE


def test_slices_stay_in_the_slabs(pair: Open) -> None:
    near, far = pair()
    before, theirs = near.slab.copy(), far("read", 0, SIZE)
    for local, remote in [
        ((0, SIZE + 1), (0, SIZE + 1)),
        ((-1, 8), (0, 8)),
        ((0, 8), (-1, 8)),
        ((SIZE - 7, 8), (0, 8)),
        ((0, 8), (SIZE - 7, 8)),
        ((0, 8), (1 << 64, 8)),
        ((0, 8), (0, 9)),
        ((0, 0), (0, 0)),
        ((0, -8), (0, -8)),
        ((8, -8), (8, -8)),
    ]:
        for call in (near.wire.put, near.wire.get):
            with pytest.raises(BindError, match=r"slice|bytes on this side"):
                call(near.peer, wire.Slice(*local), wire.Slice(*remote))
    near.send(b"end")
    assert far.wait(1) == [b"end"]
    assert (near.slab == before).all() and near.guards()
    assert far("read", 0, SIZE) == theirs and far("guards")


@pytest.mark.parametrize("change", [{"nbytes": 2 * SIZE}, {"address": -64}])
def test_a_card_that_promises_more_than_there_is(pair: Open, change: dict[str, int]) -> None:
    """The far side or the transport refuses access that this side believes to be within bounds."""
    near, far = pair(connect=False)
    card = json.loads(far.card)
    (key, by), *_ = change.items()
    card[key] = by if by > 0 else card[key] + by
    card["sha256"] = _sum(card)
    theirs = far("read", 0, SIZE)
    far("connect", near.card())
    try:
        near.connect(json.dumps(card).encode())
    except BindError:
        pass
    else:
        for remote in (0, SIZE - 8, card["nbytes"] - 64) if key == "nbytes" else (0,):
            with contextlib.suppress(BindError, PeerLostError):
                near.start(0, remote, 64, b"x")
                done(near)
    assert far("guards")
    assert far("read", 0, SIZE - 64) == theirs[:-64]


def test_calls_in_the_wrong_order(kind: str, place: str) -> None:
    end = wires.make(kind, "alone", place)
    with pytest.raises(BindError, match="register"):
        end.card()
    slab = wire.Slab.of(np.zeros(64, np.uint8))
    end.register(slab)
    with pytest.raises(BindError, match="already"):
        end.register(slab)
    with pytest.raises(BindError, match="that of this side"):
        end.connect(end.card())
    with pytest.raises(BindError, match="not a peer"):
        end.note("nobody", b"")
    assert end.poll() == []
    end.close()


def test_names_are_new_each_time(kind: str, place: str) -> None:
    ends = [wires.End(kind, "same", 64, place) for _ in range(3)]
    assert len({json.loads(end.card())["name"] for end in ends}) == 3
    assert len({ends[0].connect(end.card()) for end in (*ends[1:], *ends[1:])}) == 2
    for end in reversed(ends):
        end.close()


# ---- processes that end ----------------------------------------------------------------------------------------------


def settle(near: wires.End, ops: list[wire.Op]) -> list[bool]:
    """Wait until all operations have ended; True per operation that is done, False per failed one."""
    ended: dict[int, bool] = {}

    def all_have() -> bool:
        near.poll()
        for number, op in enumerate(ops):
            if number not in ended:
                try:
                    if op.query():
                        ended[number] = True
                except PeerLostError:
                    ended[number] = False
        return len(ended) == len(ops)

    until(all_have, "every put ends")
    return [ended[number] for number in range(len(ops))]


@pytest.mark.parametrize("kind", APART, indirect=True)
@pytest.mark.parametrize("stage", ["card", "connected", "used", "puts", "gets", "its put", "noted"])
def test_a_killed_process_is_lost(pair: Open, stage: str) -> None:
    """At any stage: running operations end, the next call fails, a drop returns, and a new process works."""
    near, far = pair(connect=False, meet_seconds=2 if stage in ("card", "connected") else 20)
    ops: list[wire.Op] = []
    if stage != "card":
        near.connect(far.card)
        far("connect", near.card())
    if stage not in ("card", "connected"):
        near.start(0, 0, 8, b"one")
        done(near)
        assert far.wait(1) == [b"one"]
    if stage in ("puts", "gets"):
        start = near.wire.put if stage == "puts" else near.wire.get
        ops = [start(near.peer, wire.Slice(0, SIZE), wire.Slice(0, SIZE)) for _ in range(30)]
    if stage == "its put":
        for _ in range(30):
            far("start", 0, 0, SIZE, b"half")
    if stage == "noted":
        for number in range(1000):
            near.send(b"%d" % number)
    far.kill()
    settle(near, ops)
    if stage == "card":
        with contextlib.suppress(BindError):
            near.connect(far.card)
    if near.peer:
        lost(near)
    near.drop()
    kept = near.slab.copy()
    near.poll()
    near.notes()
    again, far = pair(connect=False)
    carrier: Any = getattr(near.wire, "_wire", near.wire)
    carrier._meet_seconds = 20  # those who are there meet
    near.connect(far.card)
    far("connect", near.card())
    far.near = near
    near.start(0, 0, SIZE, b"next")
    done(near)
    assert far.wait(1) == [b"next"] and far("read", 0, SIZE) == kept.tobytes() and near.guards()
    assert again.notes() == []


@pytest.mark.parametrize("kind", APART, indirect=True)
def test_a_stopped_process_is_not_waited_for(kind: str, pair: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop returns, or raises an error that it cannot be sure (NIXL); once the process continues, it returns."""
    near, far = pair()
    near.start(0, 0, 8, b"one")
    done(near)
    far.wait(1)
    os.kill(far.process.pid, signal.SIGSTOP)
    try:
        near.send(b"there?")
        with monkeypatch.context() as patch:
            if kind == "nixl":
                patch.setattr(near.wire, "_drop_seconds", 0.5)
            with pytest.raises(TransferTimeoutError) if kind == "nixl" else contextlib.nullcontext():
                near.drop()
        with pytest.raises(PeerLostError):
            near.send(b"there?")
    finally:
        os.kill(far.process.pid, signal.SIGCONT)
    near.drop()


def test_a_drop_that_may_not_wait_does_not(pair: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends this side at once, and says whether the peer can still write.  The same call says later that it cannot."""
    near, far = pair()
    near.start(0, 0, 8, b"one")
    done(near)
    far.wait(1)
    pid = getattr(far.process, "pid", 0)
    if pid:
        os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            for module in (_nixl, _torch, _mapped, _nixl_storage):
                patch.setattr(module, "deadline", lambda seconds: lambda: seconds <= 0 or pytest.fail("it waits"))
            with contextlib.suppress(TransferTimeoutError):
                near.drop(0.0)
        with pytest.raises(PeerLostError):
            near.send(b"there?")
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)

    def is_dropped() -> bool:
        with contextlib.suppress(TransferTimeoutError):
            near.drop(0.0)
            return True
        near.poll()
        return False

    until(is_dropped, "it is dropped")


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART, indirect=True)
def test_silence_is_no_loss(kind: str, pair: Open) -> None:
    """For longer than any of the transport's own limits (gloo's is a fifth of the connection limit: 4 s)."""
    near, far = pair()
    near.start(0, 0, 8, b"one")
    done(near)
    assert far.wait(1) == [b"one"]
    time.sleep(1 if kind == "nixl" else 4.5)
    near.send(b"two")
    assert far.wait(1) == [b"two"]
    far("send", b"three")
    until(lambda: near.poll() or near.notes() == [b"three"], "its note")


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not find_spec("nixl"), reason="NIXL is not installed")
def test_files_as_peers(tmp_path: Path) -> None:
    slab = np.random.default_rng(2).integers(0, 256, 1 << 16, np.uint8)
    content = slab[:4096].tobytes()
    files = wire.nixl_files(tmp_path)
    files.register(wire.Slab.of(slab))
    peer = files.connect(files.file("chunk", 8192))
    assert files.connect(files.file("chunk", 100)) != peer, "the same file, opened again"
    until(files.put(peer, wire.Slice(0, 4096), wire.Slice(1000, 4096)).query, "written")
    assert (tmp_path / "chunk").read_bytes() == bytes(1000) + content + bytes(8192 - 5096)
    until(files.get(peer, wire.Slice(8192, 4096), wire.Slice(1000, 4096)).query, "read")
    assert slab[8192 : 8192 + 4096].tobytes() == content
    before = slab.copy()
    for start in (files.put, files.get):
        with pytest.raises(BindError, match="slice"):
            start(peer, wire.Slice(0, 8), wire.Slice(8185, 8))
    for call in (lambda: files.note(peer, b"x"), lambda: files.put(peer, wire.Slice(0, 8), wire.Slice(0, 8), b"x")):
        with pytest.raises(BindError, match="no notes"):
            call()
    os.truncate(tmp_path / "chunk", 10)
    with pytest.raises(PeerLostError):
        until(files.get(peer, wire.Slice(0, 4096), wire.Slice(1000, 4096)).query, "read")
    with pytest.raises(PeerLostError):
        files.get(peer, wire.Slice(0, 8), wire.Slice(0, 8))
    assert (slab[4096:] == before[4096:]).all() and files.poll() == []
    with pytest.raises(BindError, match="shorter"):
        files.connect(signed(files.file("other", 10), nbytes=11))

    def is_open() -> int:
        links = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        return links.count(tmp_path / "chunk")

    assert is_open() == 2
    files.drop(peer)
    files.drop(peer)
    assert is_open() == 1
    for name in ("../up", "/etc/passwd", "..", ".hidden", "a/b", ""):
        with pytest.raises(BindError, match="card"):
            files.file(name, 8)
    (tmp_path / "link").symlink_to(tmp_path / "chunk")
    for name in ("link", "."):
        with pytest.raises(BindError, match=name):
            files.file(name, 8)
    files.most = 4096
    peer = files.connect(files.file("large", 4097))
    with pytest.raises(BindError, match="at most 4,096 bytes, got 4,097"):
        files.get(peer, wire.Slice(0, 4097), wire.Slice(0, 4097))
    files.close()
    with pytest.raises(BindError, match="this side is closed"):
        files.connect(files.file("chunk", 8192))


@pytest.mark.skipif(not find_spec("nixl_cu12") or not find_spec("moto"), reason="NIXL or moto is not installed")
def test_objects_as_peers() -> None:
    """In a separate process: a process can hold only one variant of NIXL."""
    folders = (str(HERE), str(HERE / "helpers"), str(HERE / "link"), str(HERE / "reshard"))
    path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
    program = [sys.executable, str(HERE / "programs" / "objects.py")]
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_other_variant_says_what_it_lacks() -> None:
    nixl = pytest.importorskip("nixl")
    if nixl._pkg.__name__ != "nixl_cu13" or ctypes.util.find_library("cuobjclient"):
        pytest.skip("its OBJ plugin needs nothing else, or finds it")
    with pytest.raises(kvbm.KvbmError, match=r"cannot start backend OBJ.*libcuobjclient"):
        wire.nixl_objects("bucket", endpoint="http://127.0.0.1:1", access_key="a", secret_key="b", region="us-east-1")


# ---- cards and slabs -------------------------------------------------------------------------------------------------


def signed(card: bytes, **changes: Any) -> bytes:
    """A card with other fields, and the checksum for them."""
    fields = {**json.loads(card), **changes}
    return json.dumps({**fields, "sha256": _sum(fields)}).encode()


GOOD = json.loads(Card("far#0", wire.Slab(4096, 64), b"data").write("memory"))


def broken() -> Iterator[bytes]:
    text = json.dumps(GOOD).encode()
    yield from (text[:n] for n in range(len(text)))
    yield from (
        text + b"x",
        b"\xff" + text,
        b"[" * 60000,
        b"9" * 5000,
        b"NaN",
        b"[]",
        b"null",
        b'"kvbm"',
        b" " * (CARD_BYTES + 1),
    )
    for key, values in {
        "kvbm-wire": [0, 2, True, "1", None, 1.0],
        "transport": ["nixl", None, ["memory"]],
        "name": ["", "a b", "x" * 200, "é", 5, None, "a\n"],
        "address": [0, -1, 1 << 64, (1 << 64) - 1, 1.5, "4096", None, True, 10**400],
        "nbytes": [0, -1, 1 << 64, 1e9, None, False],
        "device": ["", "gpu", "cuda:", "cuda:-1", "cuda:99999", "cpu ", 0, "cuda:٣"],
        "data": ["*", "a", 5, None, "é"],
    }.items():
        yield json.dumps({k: v for k, v in GOOD.items() if k != key}).encode()
        yield from (signed(json.dumps(GOOD).encode(), **{key: value}) for value in values)
    for at in range(len(text)):  # a letter of it is another one
        yield text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]


def test_malformed_cards_are_refused() -> None:
    assert Card.read(json.dumps(GOOD).encode(), "memory") == Card("far#0", wire.Slab(4096, 64), b"data")
    for card in broken():
        with pytest.raises(BindError, match="card"):
            Card.read(card, "memory")
    for other in (None, "{}", 5, bytearray(b"{}")):
        with pytest.raises(BindError, match="card"):
            Card.read(other, "memory")  # type: ignore[arg-type]


def test_every_wire_refuses_malformed_cards(kind: str, place: str) -> None:
    end = wires.End(kind, "near", 64, place)
    card = end.card()
    stranger = json.loads(signed(card, name="far#1", data=base64.b64encode(b"garbage" * 9).decode()))
    for wrong in (b"", b"{", signed(card, **{"kvbm-wire": 2}), signed(card, nbytes=-1), card.replace(b"near", b"neat")):
        with pytest.raises(BindError, match="card"):
            end.connect(wrong)
    if kind != "torch":  # where there is nothing to check it against
        with pytest.raises(BindError, match="card"):
            end.connect(json.dumps(stranger).encode())
    end.close()


def test_a_good_card_is_taken_after_damaged_ones(kind: str, place: str) -> None:
    """The transport never gets damaged cards: NIXL would accept some, and after others refuse the peer forever."""
    near, far = (wires.End(kind, name, 64, place) for name in ("near", "far"))
    card = far.card()
    data = base64.b64decode(json.loads(card)["data"])
    cut = (base64.b64encode(data[:end]).decode() for end in range(0, len(data), 7))
    for damaged in ({"data": text} for text in (*cut, "AAAA")):
        with pytest.raises(BindError, match="card"):
            near.connect(json.dumps({**json.loads(card), **damaged}).encode())
    near.connect(card)
    near.send(b"x")
    far.close()
    near.close()


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\nb", "ä"])
def test_names_are_plain(kind: str, place: str, name: str) -> None:
    with pytest.raises(BindError, match="name"):
        wires.make(kind, name, place)


def test_slabs_are_contiguous_and_writable() -> None:
    array = np.zeros((4, 8), np.float32)
    assert wire.Slab.of(array) == wire.Slab(array.ctypes.data, 128) and wire.Slab.of(array).owner is array
    frozen = array.copy()
    frozen.flags.writeable = False
    for wrong in (array[:, ::2], array.T, frozen):
        with pytest.raises(BindError, match="slab"):
            wire.Slab.of(wrong)
    for numbers in ((0, 8, "cpu"), (8, 0, "cpu"), (1 << 63, 1 << 63 | 1, "cpu"), (8, 8, "gpu")):
        with pytest.raises(BindError, match="slab"):
            wire.Slab(*numbers)


def test_errors() -> None:
    """Each can be caught as Python's own class, and as the class of a failed transfer."""
    for error, own in {
        PeerLostError: ConnectionError,
        TransferTimeoutError: TimeoutError,
        kvbm.DigestError: ValueError,
    }.items():
        assert issubclass(error, own) and issubclass(error, kvbm.TransferError) and issubclass(error, RuntimeError)
    lost = PeerLostError("text", peer="p#1")
    assert (str(lost), lost.peer) == ("text", "p#1") and str(PeerLostError("text")) == "text"
    found = vars(kvbm.errors).values()
    codes = [error.exit_code for error in found if isinstance(error, type) and issubclass(error, kvbm.KvbmError)]
    assert len(codes) == len(set(codes))


# ---- faults ----------------------------------------------------------------------------------------------------------


def two(script: list[wire.Fault], end: str = "near") -> tuple[wires.End, wires.End]:
    """Ends of memory in this thread, one of them with faults."""
    near, far = (wires.End("memory", name, 4096, None, script if name == end else None) for name in ("near", "far"))
    near.connect(far.card())
    far.connect(near.card())
    return near, far


@pytest.mark.parametrize(
    ("fault", "polls"),
    [
        (wire.Fault("lose", 1), [[0, 2, 3]]),
        (wire.Fault("double", 1), [[0, 1, 1, 2, 3]]),
        (wire.Fault("swap", 1), [[0, 2, 1, 3]]),
        (wire.Fault("swap", 3), [[0, 1, 2], [], [4, 3]]),
        (wire.Fault("delay", 1, after=2), [[0, 2, 3], [], [4, 1]]),
        (wire.Fault("lose", 9), [[0, 1, 2, 3], [], [4]]),
    ],
    ids=str,
)
def test_faults_of_notes(fault: wire.Fault, polls: list[list[int]]) -> None:
    near, far = two([fault], "far")
    for number in range(4):
        near.send(b"%d" % number)
    for turn, expected in enumerate(polls):
        if turn == 2:
            near.send(b"4")
        assert [int(note) for _, note in far.wire.poll()] == expected
    assert far.wire.counts == ({fault.what: 1} if fault.at < 4 else {})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("what", "changed", "bits"), [("bit", 1, 1), ("word", 8, 64), ("row", 256, 2048), ("chunk", 1000, 8000)]
)
def test_faults_of_puts(what: str, changed: int, bits: int) -> None:
    """A given number of bytes arrives changed, always the same ones, and this side's bytes are restored."""
    found = []
    for _ in range(2):
        near, far = two([wire.Fault(what, 1)])
        kept = near.slab.copy()
        for offset in (0, 1000, 2000):
            near.start(offset, offset, 1000, b"note")
            done(near)
        assert (near.slab == kept).all() and near.guards() and far.guards()
        differ = near.slab[:3000] ^ far.slab[:3000]
        assert np.count_nonzero(differ) == changed == np.count_nonzero(differ[1000:2000])
        assert int(np.bitwise_count(differ).sum()) == bits
        found.append(differ)
        assert near.wire.counts == {what: 1}  # type: ignore[attr-defined]
    assert (found[0] == found[1]).all()


def test_a_killed_peer_is_lost_from_the_call_on() -> None:
    near, far = two([wire.Fault("kill", 2)])
    near.send(b"0")
    near.start(0, 0, 8)
    far.send(b"never seen")
    for call in (lambda: near.send(b"2"), near.query, lambda: near.start(0, 0, 8)):
        with pytest.raises(PeerLostError):
            call()
    assert near.wire.poll() == [] and [note for _, note in far.wire.poll()] == [b"0"]


def test_late_puts_come_when_they_are_released() -> None:
    near, far = two([wire.Fault("late", 0)])
    near.slab[:] = 3
    near.start(0, 0, 8, b"late")
    assert not near.query() and far.wire.poll() == []
    assert near.wire.release() == 1 and near.query()  # type: ignore[attr-defined]
    assert [note for _, note in far.wire.poll()] == [b"late"] and (far.slab[:8] == 3).all()


def test_random_faults_are_those_of_their_seed() -> None:
    one, two, other = (wire.random_faults(seed, 0.01, most=10_000) for seed in (1, 1, 2))
    assert one == two != other and 120 < len(one) < 280
    assert {fault.what for fault in wire.random_faults(1, 0.5, ["lose", "kill"], 20)} == {"lose", "kill"}
    for wrong in (("burn", 0), ("lose", -1), ("delay", 0, 0)):
        with pytest.raises(BindError, match="fault"):
            wire.Fault(*wrong)


def test_memory_of_gpus(fake_driver: FakeDriver) -> None:
    """Between GPUs, and between a GPU and the host, by the driver."""
    assert fake_driver("wire_gpus.copies", FAKE_DEVICES="2") == "0 1\n0 cpu\ncpu 1\n"


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_ends_by_nccl_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NCCL's transport of slices: notes, and the end of one side is noticed by the other."""
    from torch import distributed

    aborted: list[object] = []

    class Carrier:
        def __init__(self, *_: object) -> None: ...

        def abort(self) -> None:
            aborted.append(self)

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Carrier, raising=False)
    store = distributed.HashStore()
    one, two = (wire.torch(name, store, backend="nccl") for name in ("one", "two"))
    for number, end in enumerate((one, two)):
        end.register(wire.Slab(4096 + number, 4096, "cuda:0"))
    there, here = one.connect(two.card()), two.connect(one.card())
    one.note(there, b"to two")
    two.note(here, b"to one")
    assert until(one.poll, "a note") == [(there, b"to one")] and until(two.poll, "a note") == [(here, b"to two")]
    two.close()

    def is_lost() -> bool:
        try:
            one.note(there, b"there?")
        except PeerLostError:
            return True
        time.sleep(0.001)
        return False

    until(is_lost, "PeerLostError")
    one.close()
    assert len(aborted) == 4  # two each way and side


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_ends_meet_while_others_wait_in_the_store() -> None:
    """A TCPStore client does one thing at a time: threads that wait in it could block two processes against each other."""
    from torch import distributed

    main = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [main, distributed.TCPStore("127.0.0.1", main.port, is_master=False, wait_for_workers=False)]
    waiting = [threading.Thread(target=store.wait, args=(["go on"],), daemon=True) for store in stores]
    for thread in waiting:
        thread.start()
    ends = [wire.torch(f"end{number}", store, meet_seconds=LIMIT) for number, store in enumerate(stores)]
    slabs = [np.full(64, number, np.uint8) for number in range(2)]
    for end, slab in zip(ends, slabs, strict=True):
        end.register(wire.Slab.of(slab))
    there, _ = ends[0].connect(ends[1].card()), ends[1].connect(ends[0].card())
    ends[0].put(there, wire.Slice(0, 64), wire.Slice(0, 64), b"all of it")
    assert until(ends[1].poll, "a note")[0][1] == b"all of it" and not slabs[1].any()
    assert all(thread.is_alive() for thread in waiting)
    main.clone().set("go on", b"")
    for thread in waiting:
        thread.join(LIMIT)
    close_all(ends)


@pytest.mark.slow  # half a second
@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_peer_that_gives_up_while_the_two_meet() -> None:
    """Gloo also connects to a peer whose group has failed; both sides get an error, and queued operations end."""
    from torch import distributed

    has_failed = threading.Event()

    class Gloo(distributed.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            if threading.current_thread().name == far_thread:
                options._timeout = timedelta(milliseconds=1)
                try:
                    super().__init__(store, rank, size, options)
                finally:
                    has_failed.set()
            assert has_failed.wait(LIMIT)
            super().__init__(store, rank, size, options)

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [wire.torch(name, store, meet_seconds=1) for name in ("first", "second")]  # the first one connects to the other
    for end in ends:
        end._distributed = types.SimpleNamespace(  # type: ignore[attr-defined]
            ProcessGroupGloo=Gloo, PrefixStore=distributed.PrefixStore
        )
        end.register(wire.Slab.of(np.zeros(64, np.uint8)))
    far_thread = f"kvbm wire {ends[0].name}"  # type: ignore[attr-defined]
    ops = []
    for one, other in (ends, ends[::-1]):
        peer = one.connect(other.card())
        ops.append(one.put(peer, wire.Slice(0, 64), wire.Slice(0, 64)))

    def is_over(op: wire.Op) -> bool:
        try:
            return op.query()
        except PeerLostError:
            return True

    for op in ops:
        until(lambda op=op: is_over(op), "the put ends")  # type: ignore[misc]
        with pytest.raises(PeerLostError):
            op.query()
    close_all(ends)


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_get_whose_answer_breaks_off_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer's header has arrived, but not the announced slice."""
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [wire.torch(name, store, meet_seconds=5 * LIMIT) for name in ("one", "two")]
    for end in ends:
        end.register(wire.Slab.of(np.zeros(64, np.uint8)))
    peer, _ = ends[0].connect(ends[1].card()), ends[1].connect(ends[0].card())

    def broken(*_: Any) -> None:
        raise RuntimeError("the connection broke")

    monkeypatch.setattr(ends[0], "_carry", broken)
    op = ends[0].get(peer, wire.Slice(0, 8), wire.Slice(0, 8))
    with pytest.raises(PeerLostError, match="the connection broke"):
        until(op.query, "the get ends")
    close_all(ends)


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_drop_while_the_two_meet() -> None:
    """The peer has stopped after connecting: nobody waits for its messages."""
    from torch import distributed

    is_made, go_on = [threading.Event(), threading.Event()], threading.Event()

    class Gloo(distributed.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, options)
            is_made[rank].set()
            assert (go_on if rank == 0 else is_over).wait(LIMIT)

    is_over = threading.Event()
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [wire.torch(name, store, meet_seconds=5 * LIMIT) for name in ("first", "second")]
    for end in ends:
        end._distributed = types.SimpleNamespace(  # type: ignore[attr-defined]
            ProcessGroupGloo=Gloo, PrefixStore=distributed.PrefixStore
        )
        end._device = distributed.ProcessGroupGloo.create_default_device()  # type: ignore[attr-defined]
        end.register(wire.Slab.of(np.zeros(64, np.uint8)))
    peer, _ = ends[0].connect(ends[1].card()), ends[1].connect(ends[0].card())
    assert all(made.wait(LIMIT) for made in is_made)
    ends[0].drop(peer)
    go_on.set()
    start = time.monotonic()
    ends[0].close()
    assert time.monotonic() < start + LIMIT
    is_over.set()
    ends[1].close()


def test_an_end_of_many_torch_peers_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: each of the receives ends 2 seconds after the one before, and 5 are given for all."""
    now = [100.0]

    def acquire(timeout: float) -> bool:
        now[0] += min(timeout, 2.0)
        return timeout >= 2.0

    def end(peers: int, seconds: float) -> None:
        lock = types.SimpleNamespace(acquire=acquire, release=int)
        card = types.SimpleNamespace(name="far")
        far: Any = types.SimpleNamespace(lose=lambda _: None, writing=lock, card=card)
        near: Any = types.SimpleNamespace(name="near", _drop_seconds=1e6)
        _torch._Torch._end(near, [far] * peers, "it was dropped", seconds)

    monkeypatch.setattr(_torch, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    end(2, 5.0)
    assert now[0] == 104.0
    with pytest.raises(TransferTimeoutError, match=r"still runs after 5\.0 s"):
        end(50, 5.0)
    assert now[0] == 109.0


@pytest.mark.skipif(not find_spec("nixl"), reason="NIXL is not installed")
@pytest.mark.slow  # 0.5 s
@pytest.mark.sanitize
def test_a_close_that_a_peer_does_not_answer_fails_each_time() -> None:
    """The memory to which the peer may still write is not freed by a second close."""
    ends = [wire.nixl(name, drop_seconds=0.1) for name in ("near", "far")]
    for end in ends:
        end.register(wire.Slab.of(np.zeros(4096, np.uint8)))
    ends[0].connect(ends[1].card())
    ends[1].connect(ends[0].card())
    for _ in range(3):
        with pytest.raises(TransferTimeoutError):
            ends[0].close()


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_torch_whose_stores_cannot_be_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    store = distributed.HashStore()
    monkeypatch.setattr(distributed, "Store", object)
    with pytest.raises(kvbm.KvbmError, match=r"needs torch 2\.8 or newer, found 2"):
        wire.torch("one", store)


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_a_peer_that_is_lost_holds_no_connection() -> None:
    from torch import distributed

    main = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = wire.torch("one", main)
    one.register(wire.Slab.of(slab := np.zeros(64, np.uint8)))

    def sockets() -> set[str]:
        links = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
        return {link for link in links if link.startswith("socket:")}

    before, counts = sockets(), []
    for number in range(4):
        two = wire.torch(f"two{number}", main)
        two.register(wire.Slab.of(slab))
        there, here = one.connect(two.card()), two.connect(one.card())
        two.note(here, b"here")
        until(one.poll, "a note")
        two.close()
        one.drop(there)
        names = {f"kvbm wire {name}" for name in (there, here)}
        until(lambda names=names: names.isdisjoint(thread.name for thread in threading.enumerate()), "their threads have ended")  # type: ignore[misc]
        counts.append(len(sockets() - before))
    until(lambda: len(sockets() - before) <= counts[0], f"as few connections as at first: {counts}")
    one.close()


# ---- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.slow  # 0.8 s
def test_threads_of_one_process() -> None:
    """64 ends, each with a thread, write to one, which drops half of them: no write arrives after its drop."""
    hub = wire.Hub()
    sink = wire.memory("sink", hub)
    memory = np.zeros(64 * 64, np.uint8)
    sink.register(wire.Slab.of(memory))
    stop = threading.Event()
    puts = [0] * 64

    def write(number: int) -> None:
        end = wire.memory(f"source{number}", hub)
        mine = np.full(64, number + 1, np.uint8)
        end.register(wire.Slab.of(mine))
        names[number] = sink.connect(end.card())
        peer = end.connect(sink.card())
        with contextlib.suppress(PeerLostError):
            while not stop.is_set():
                end.put(peer, wire.Slice(0, 64), wire.Slice(64 * number, 64), b"%d" % number)
                puts[number] += 1

    names = [""] * 64
    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(64)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(puts), "each has written")
        for number in range(0, 64, 2):
            sink.drop(names[number])
            memory[64 * number : 64 * number + 64] = 0
        here = sum(puts)
        until(lambda: sum(puts) > here + 1000, "the others go on")
    finally:
        stop.set()
    for thread in threads:
        thread.join(LIMIT)
    rows = memory.reshape(64, 64)
    assert not rows[::2].any() and (rows[1::2] == np.arange(2, 66, 2)[:, None]).all()
    came = {int(note) for _, note in sink.poll()}
    assert came == set(range(1, 64, 2))
