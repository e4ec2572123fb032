"""Notes through shared memory: their order, their limits, boxes that lie, and links whose notes take this way."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from test_direct import SHARED, lend_at_once, pulled

from kvbm import BindError, PeerLostError, _core, wire
from kvbm.link.link import Link
from kvbm.link.ring import Ring
from kvbm.wire import _mail
from linking import Linked, ended, memory_files, plain_case, right_cases
from programs.wires import Polled

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are of Linux")

SLOTS = 32


class End:
    """A mapped wire with boxes of notes, over a wire of a hub."""

    def __init__(self, name: str, hub: wire.Hub) -> None:
        self.ring = Ring("cpu", 1 << 15, 1, 1)
        self.other = wire.memory(name, hub)
        self.wire = wire.mapped(Polled(self.other), drop_seconds=0.05)
        self.wire.register(self.ring.slab)
        self.peer = ""

    @property
    def lane(self) -> Any:
        return self.wire._peers[self.peer].lane

    def notes(self) -> list[bytes]:
        return [note for _, note in self.wire.poll()]

    def close(self) -> None:
        self.wire.close()
        self.ring.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    hub = wire.Hub()
    with contextlib.ExitStack() as stack:
        found = End("near", hub), End("far", hub)
        for end, other in zip(found, reversed(found), strict=True):
            stack.callback(end.close)
            end.peer = end.wire.connect(other.wire.card())
        yield found


def meet(ends: tuple[End, End]) -> None:
    """Both read the other's box."""
    for _ in range(2):
        for end in ends:
            end.wire._look_at = 0.0
            end.wire.poll()
    assert all(end.lane.mail.is_read for end in ends)


def test_notes_take_the_box_as_soon_as_both_read(ends: tuple[End, End]) -> None:
    near, far = ends
    near.wire.note(near.peer, b"by the other wire")
    assert len(near.other._inbox) == 0 and len(far.other._inbox) == 1
    meet(ends)
    assert not near.wire.post(near.peer, b"before the first note")
    near.wire.note(near.peer, b"1")
    assert near.wire.post(near.peer, b"2")
    near.wire.note(near.peer, b"")
    near.wire.note(near.peer, bytes(4096))
    assert {note for _, note in far.other._inbox} == {_mail.MARKER}
    assert far.notes() == [b"1", b"2", b"", bytes(4096)]
    with pytest.raises(BindError, match="at most 4096 bytes"):
        near.wire.note(near.peer, bytes(4097))
    far.wire.note(far.peer, b"back")
    assert near.notes() == [b"back"]


def test_notes_wait_for_a_slot_and_keep_their_order(ends: tuple[End, End]) -> None:
    near, far = ends
    meet(ends)
    many = [b"%d" % number for number in range(3 * SLOTS)]
    for note in many:
        near.wire.note(near.peer, note)
    assert not near.wire.post(near.peer, b"it would come before those that wait")
    got: list[bytes] = []
    for _ in range(20):
        got += far.notes()
        near.wire.poll()
    assert got == many


def test_a_put_with_a_note_and_notes_keep_their_order(ends: tuple[End, End]) -> None:
    """Law 2: notes before the put come before its note, and later ones after it."""
    near, far = ends
    meet(ends)
    many = [b"%d" % number for number in range(SLOTS + 3)]
    for note in many:
        near.wire.note(near.peer, note)
    near.wire.put(near.peer, wire.Slice(0, 8), wire.Slice(8, 8), b"put")
    for note in (b"a", b"b"):
        near.wire.note(near.peer, note)
    assert not near.wire.post(near.peer, b"c")
    assert far.notes() == [*many, b"put", b"a", b"b"]


def test_random_notes_and_puts_keep_their_order() -> None:
    for seed in range(30):
        rng, hub = random.Random(seed), wire.Hub()
        found = End("near", hub), End("far", hub)
        with contextlib.ExitStack() as stack:
            for end in found:
                stack.callback(end.close)
            sent: list[list[bytes]] = [[], []]
            came: list[list[bytes]] = [[], []]
            order = [0, 1]
            rng.shuffle(order)
            for side in order:  # the first one may send before the other has connected
                found[side].peer = found[side].wire.connect(found[1 - side].wire.card())
                for _ in range(rng.randrange(3)):
                    sent[side].append(b"%d" % len(sent[side]))
                    found[side].wire.note(found[side].peer, sent[side][-1])
            puts = rng.random() < 0.5
            for _ in range(rng.randrange(300)):
                side = rng.randrange(2)
                end, what = found[side], rng.random()
                if what < 0.3:
                    end.wire._look_at = 0.0
                    came[side] += end.notes()
                    continue
                note = b"%d" % len(sent[side])
                if what < 0.31 and puts:
                    end.wire.put(end.peer, wire.Slice(0, 8), wire.Slice(8, 8), note)
                elif what < 0.5:
                    if not end.wire.post(end.peer, note):
                        continue
                else:
                    end.wire.note(end.peer, note)
                sent[side].append(note)
            for _ in range(40):
                for side, end in enumerate(found):
                    came[side] += end.notes()
            assert came == sent[::-1], seed


@pytest.mark.slow  # half a second
def test_threads_post_and_note_while_another_takes(ends: tuple[End, End]) -> None:
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"begin")
    counts = [0, 0]

    def post(which: int) -> None:
        while counts[which] < 2000:
            if near.wire.post(near.peer, b"%d %d" % (which, counts[which]) + bytes(which * 1000)):
                counts[which] += 1

    threads = [threading.Thread(target=post, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    got: list[bytes] = []
    end = time.monotonic() + 60
    while len(got) < 4001 and time.monotonic() < end:
        got += far.notes()
    for thread in threads:
        thread.join()
    for which in range(2):
        got_of = [note.rstrip(b"\0") for note in got if note.startswith(b"%d " % which)]
        assert got_of == [b"%d %d" % (which, n) for n in range(2000)]
        assert all(len(note) > which * 1000 for note in got if note.startswith(b"%d " % which))


@pytest.mark.parametrize("what", ["posted", "bytes"])
def test_a_box_that_lies_loses_its_peer_only(ends: tuple[End, End], what: str) -> None:
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"1")
    assert far.notes() == [b"1"]
    near.wire.note(near.peer, b"2")
    box = np.frombuffer(near.lane._own, np.uint8)
    word = (0, 1 << 40) if what == "posted" else (_core.MAIL_BYTES - (SLOTS - 1) * ((_core.MAIL_BYTES - 192) // SLOTS), 1 << 30)
    ctypes.memmove(box.ctypes.data + word[0], word[1].to_bytes(8, "little"), 8)
    assert far.notes() == []
    with pytest.raises(PeerLostError, match="no end of kvbm writes"):
        far.wire.note(far.peer, b"x")
    with pytest.raises(PeerLostError):
        far.wire.hold(far.peer)


def test_a_peer_that_dropped_this_side_is_lost(ends: tuple[End, End]) -> None:
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"1")
    near.wire.drop(near.peer, 0.0)
    near.wire.drop(near.peer, 0.0)
    with pytest.raises(PeerLostError, match="has ended the connection"):
        far.wire.note(far.peer, b"2")
    far.wire.post(far.peer, b"3")
    assert near.notes() == []


def test_what_a_peer_posted_before_it_ended_comes_first(ends: tuple[End, End]) -> None:
    """Red: a side that had just something to say never read that the peer had all, and was done."""
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"1")
    assert far.notes() == [b"1"]
    near.wire.note(near.peer, b"all has arrived")
    near.wire.drop(near.peer, 0.0)
    far.wire.note(far.peer, b"still there?")
    assert far.notes() == [b"all has arrived"]
    with pytest.raises(PeerLostError, match="has ended the connection"):
        far.wire.note(far.peer, b"still there?")


def test_a_marker_may_be_lost(ends: tuple[End, End]) -> None:
    """Red: then nothing of that side was read any more.  Any other note of a link may be lost."""
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"1")
    far.other._inbox.clear()
    assert far.notes() == []
    near.wire.note(near.peer, b"2")
    assert far.notes() == [b"1", b"2"]
    near.wire.note(near.peer, b"3")
    assert not far.other._inbox and far.notes() == [b"3"]


def test_a_peer_that_posts_as_fast_as_it_is_read_delays_no_other(ends: tuple[End, End]) -> None:
    """Red: `poll` did not return, and took memory."""
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"1")
    assert far.notes() == [b"1"]
    mail, posted = far.lane.mail, itertools.count()

    class Flood:
        def take(self) -> bytes | None:
            if next(posted) < 10_000:
                near.wire.post(near.peer, b"more")
            return mail.take()

    far.lane.mail = Flood()
    try:
        assert 0 < len(far.notes()) <= SLOTS
    finally:
        far.lane.mail = mail


def test_a_box_of_another_peer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: a box was closed, the next one had its descriptor, and the first peer posted where nobody read."""
    hub = wire.Hub()
    one, two, three = (End(name, hub) for name in ("one", "two", "three"))
    with contextlib.ExitStack() as stack:
        for end in (one, two, three):
            stack.callback(end.close)
        two.peer = one.wire.connect(two.wire.card())
        assert two.wire.connect(one.wire.card())
        first = one.wire._peers[two.peer].lane.file
        with monkeypatch.context() as patch:  # no descriptor is left, for a moment
            patch.setattr(_mail, "open_memory_file", mock.Mock(side_effect=OSError(24, "too many open files")))
            one.notes()
        assert one.wire._peers[two.peer].lane is None
        os.dup2(one.ring.slab.file, first)  # so that it is free for the next box
        stack.callback(os.close, first)
        three.peer = one.wire.connect(three.wire.card())
        [name] = {three.wire.connect(one.wire.card())}
        os.dup2(one.wire._peers[three.peer].lane.file, first)
        for _ in range(3):
            for end in (one, two, three):
                end.wire._look_at = 0.0
                end.notes()
        for number in range(3):
            two.wire.note(name, b"%d" % number)
            one.wire.note(three.peer, b"to three")
            assert one.notes() == [b"%d" % number] and two.notes() == [] and three.notes() == [b"to three"]


def test_a_child_posts_nothing_in_the_name_of_its_parent(ends: tuple[End, End]) -> None:
    """Red: its note came, and took the place of the parent's next one."""
    near, far = ends
    meet(ends)
    near.wire.note(near.peer, b"1")
    assert far.notes() == [b"1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other tests may have left threads; JAX warns, too
        pid = os.fork()
    if not pid:
        os._exit(near.wire.post(near.peer, b"of the child"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert near.wire.post(near.peer, b"2")
    assert far.notes() == [b"2"]


def test_a_watch_ends_with_a_note_a_latch_or_its_time(ends: tuple[End, End]) -> None:
    near, far = ends
    meet(ends)
    latch = _core.Latch()
    far.wire.note(far.peer, b"1")
    near.notes()
    begun = time.monotonic()
    assert not near.wire.watch(latch, 20_000) and time.monotonic() - begun >= 0.02
    far.wire.note(far.peer, b"2")
    assert near.wire.watch(latch, 10_000_000)
    near.notes()
    threading.Timer(0.05, latch.set).start()
    assert near.wire.watch(latch, 60_000_000)
    assert near.wire.watch(latch, 60_000_000), "it stays set"
    latch.clear()
    assert not near.wire.watch(latch, 1000)
    assert near.wire.watch(latch, 60_000_000, [_core.finished()])


@pytest.mark.threads
def test_a_box_stays_mapped_while_a_thread_waits_for_its_notes() -> None:
    """Red: the thread read memory that was unmapped."""

    class Pages(list[mmap.mmap]):
        """What keeps both boxes mapped."""

    pages = Pages(mmap.mmap(-1, _core.MAIL_BYTES) for _ in range(2))
    mail = _core.Mail(*(ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in pages), pages)
    kept, latch, found = weakref.ref(pages), _core.Latch(), []
    del pages
    thread = threading.Thread(target=lambda: found.append(latch.wait(60_000_000, [mail])))
    thread.start()
    time.sleep(0.02)
    mail.close()
    assert kept() is not None
    time.sleep(0.01)
    latch.set()
    thread.join()
    assert found == [True] and kept() is None
    latch.clear()
    assert not latch.wait(0, [mail]), "nobody waits for a closed one"


def test_boxes_that_are_none() -> None:
    page = mmap.mmap(-1, 1 << 20)
    address = np.frombuffer(page, np.uint8).ctypes.data
    for own, far in ((0, address), (address, 0), (address + 8, address)):
        with pytest.raises(TypeError, match="multiples of 64"):
            _core.Mail(own, far, page)
    mail = _core.Mail(address, address, page)
    mail.close()
    assert mail.take() is None and not mail.post(b"x") and not mail.is_read


def test_nothing_is_left() -> None:
    before = memory_files("mail")
    hub = wire.Hub()
    found = End("near", hub), End("far", hub)
    for end, other in zip(found, reversed(found), strict=True):
        end.peer = end.wire.connect(other.wire.card())
    meet(found)
    assert len(memory_files("mail") - before) == 2
    for end in found:
        end.close()
    assert not memory_files("mail") - before


# ---- links -----------------------------------------------------------------------------------------------------------


def polled_wires() -> Any:
    hub = wire.Hub()
    return lambda side, rank: wire.mapped(Polled(wire.memory(f"{side}/{rank}", hub)), drop_seconds=20)


@pytest.mark.threads
@pytest.mark.parametrize("spins", [False, True], ids=["sleeps", "spins"])
def test_every_byte(spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)
    right = many = 0
    for found in right_cases(range(40, 52), lambda _: polled_wires(), memory=SHARED):
        for end in found.all_ends:
            end.spins = spins
        many += pulled(found)
        right += 1
    assert right > 5 and many > right


def test_offers_are_posted_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: whoever sends waited for the endpoint's thread to be woken."""
    posted: list[bool] = []
    post = Link._post

    def counted(self: Link, start: Any) -> bool:
        posted.append(post(self, start))
        return posted[-1]

    monkeypatch.setattr(Link, "_post", counted)
    with Linked(plain_case(), polled_wires(), SHARED) as found:
        for turn in range(4):
            assert not any(ended(_sent(found, str(turn))))
            found.check()
            found.refill()
    assert any(posted[len(posted) // 2 :])


def test_a_peer_may_answer_before_the_caller_has_told_that_its_offer_was_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: the endpoint's thread answered that there is no such sending, so the receive failed, and the sending hung."""
    posted: list[bool] = []
    post = Link._post

    def slow(self: Link, start: Any) -> bool:
        posted.append(post(self, start))
        time.sleep(0.02)  # the thread of another one may run here
        return posted[-1]

    monkeypatch.setattr(Link, "_post", slow)
    with Linked(plain_case(), polled_wires(), direct=False) as found:
        for turn in range(3):
            assert not any(ended(_sent(found, str(turn))))
            found.check()
            found.refill()
        found.require_slots()
    assert any(posted)


def _sent(found: Linked, key: str) -> list[Any]:
    arrivals = [link.receive(key, span) for link, (span,) in zip(found.links[1], found.spans(1), strict=True)]
    return [*arrivals, *(link.send(key, span) for link, (span,) in zip(found.links[0], found.spans(0), strict=True))]
