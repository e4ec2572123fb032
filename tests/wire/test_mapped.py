"""`wire.mapped`: loans, their fence, peers that end during a loan, and links on such wires."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm import BindError, KvbmError, PeerLostError, TransferTimeoutError, _core, wire
from kvbm.link.chunks import Bare
from kvbm.link.ring import Ring
from kvbm.wire import _mapped as loans
from kvbm.wire import protocol
from linking import LIMIT, Linked, Wires, ended, memory_files, plain_case, right_cases, until
from processes import FakeDriver

HERE = Path(__file__).resolve().parents[1]
SIZE = 1 << 16

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are of Linux")


class End:
    """A mapped wire in a hub, with a ring as its slab."""

    def __init__(self, name: str, hub: wire.Hub, drop_seconds: float = 0.05) -> None:
        self.ring = Ring("cpu", SIZE // 2, 1, 1)
        self.slab = np.frombuffer(self.ring._pages, np.uint8)
        self.wire = wire.mapped(wire.memory(name, hub), drop_seconds=drop_seconds)
        self.wire.register(self.ring.slab)
        self.peer = ""

    def connect(self, other: End) -> str:
        self.peer = self.wire.connect(other.wire.card())
        return self.peer

    def close(self) -> None:
        self.wire.close()
        self.ring.close()


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple[End, End]]]:
    """Opens a connected lender and borrower."""
    with contextlib.ExitStack() as stack:

        def make(drop_seconds: float = 0.05, connect: bool = True) -> tuple[End, End]:
            hub = wire.Hub()
            found = End("lender", hub, drop_seconds), End("borrower", hub, drop_seconds)
            for end, other in zip(found, reversed(found), strict=True):
                stack.callback(end.close)
                if connect:
                    end.connect(other)
            return found

        yield make


def write(lent: wire.Slab, value: int) -> None:
    ctypes.memset(lent.address, value, lent.nbytes)


def test_what_is_written_to_a_loan_is_the_peers(ends: Callable[..., tuple[End, End]]) -> None:
    lender, borrower = ends()
    lent = borrower.wire.borrow(borrower.peer, wire.Slice(100, 7))
    assert lent is not None and lent.nbytes == 7 and lent.device == "cpu" and not borrower.wire.unmapped
    write(lent, 5)
    assert np.flatnonzero(lender.slab).tolist() == list(range(100, 107)) and (lender.slab[100:107] == 5).all()
    assert not borrower.slab.any()
    borrower.wire.give_back(borrower.peer)
    for outside in (wire.Slice(SIZE - 3, 4), wire.Slice(0, SIZE + 1), wire.Slice(-1, 4), wire.Slice(0, 0)):
        with pytest.raises(BindError, match="slice"):
            borrower.wire.borrow(borrower.peer, outside)
    lender.wire.drop(lender.peer)


def test_what_else_goes_by_the_other_wire(ends: Callable[..., tuple[End, End]]) -> None:
    lender, borrower = ends()
    borrower.slab[:8] = 3
    assert borrower.wire.put(borrower.peer, wire.Slice(0, 8), wire.Slice(16, 8), b"put").query()
    borrower.wire.note(borrower.peer, b"note")
    assert [note for _, note in lender.wire.poll()] == [b"put", b"note"] and (lender.slab[16:24] == 3).all()
    assert borrower.wire.get(borrower.peer, wire.Slice(32, 8), wire.Slice(16, 8)).query()
    assert (borrower.slab[32:40] == 3).all()
    assert borrower.wire.connect(lender.wire.card()) == borrower.peer


def test_nothing_is_lent_to_who_is_not_connected(ends: Callable[..., tuple[End, End]]) -> None:
    """The lender must be able to read the loans before the first one."""
    lender, borrower = ends(connect=False)
    borrower.connect(lender)
    assert borrower.wire.borrow(borrower.peer, wire.Slice(0, 8)) is None
    lender.connect(borrower)
    assert borrower.wire.borrow(borrower.peer, wire.Slice(0, 8)) is not None
    borrower.wire.give_back(borrower.peer)


@pytest.mark.parametrize("how", ["drop", "close"])
def test_a_drop_waits_for_what_is_on_loan(ends: Callable[..., tuple[End, End]], how: str) -> None:
    lender, borrower = ends()
    end: Callable[[], None] = lender.wire.close if how == "close" else lambda: lender.wire.drop(lender.peer)
    for _ in range(3):
        assert borrower.wire.borrow(borrower.peer, wire.Slice(0, 8)) is not None
    for _ in range(3):
        with pytest.raises(TransferTimeoutError, match="still writes"):
            end()
        borrower.wire.give_back(borrower.peer)
    end()
    end()
    for call in (
        lambda: borrower.wire.borrow(borrower.peer, wire.Slice(0, 8)),
        lambda: borrower.wire.note(borrower.peer, b"x"),
        lambda: borrower.wire.put(borrower.peer, wire.Slice(0, 8), wire.Slice(0, 8)),
        lambda: borrower.wire.get(borrower.peer, wire.Slice(0, 8), wire.Slice(0, 8)),
    ):
        with pytest.raises(PeerLostError):
            call()
    with pytest.raises(BindError, match=r"start again|found none of this name"):
        borrower.connect(lender)
    borrower.wire.drop(borrower.peer)


def test_a_drop_waits_for_the_wire_and_the_loans_no_longer_than_its_caller_says(
    ends: Callable[..., tuple[End, End]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: the wrapped wire needs 3 of 5 seconds, and 2 are left for the loans."""
    lender, borrower = ends(drop_seconds=7.0)
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: sleep(max(seconds, 0.25)))
    assert borrower.wire.borrow(borrower.peer, wire.Slice(0, 8)) is not None
    with monkeypatch.context() as patch:
        patch.setattr(loans, "time", clock)
        patch.setattr(protocol, "time", clock)
        patch.setattr(lender.wire, "_wire", SimpleNamespace(drop=lambda peer, seconds: sleep(3.0)))  # noqa: ARG005
        for seconds, last in ((5.0, 5.5), (1.0, 3.5), (0.0, 3.5), (None, 7.5)):
            began = now[0]
            with pytest.raises(TransferTimeoutError, match="still writes"):
                lender.wire.drop(lender.peer, seconds)
            assert now[0] - began <= last
    borrower.wire.give_back(borrower.peer)
    lender.wire.drop(lender.peer)


def test_who_drops_within_a_loan_closes_the_mapping_behind_it(ends: Callable[..., tuple[End, End]]) -> None:
    """The mapping is closed after the loan, also if the wire is closed meanwhile."""
    lender, borrower = ends()
    assert borrower.wire.borrow(borrower.peer, wire.Slice(0, 8)) is not None
    borrower.wire.drop(borrower.peer)
    with pytest.raises(TransferTimeoutError, match="this side still writes"):
        borrower.wire.close()
    assert lender.wire._peers[lender.peer].has_loans()
    number = f" {os.fstat(lender.ring.slab.file).st_ino} "  # of the file

    def mappings() -> int:
        return sum(number in line for line in Path("/proc/self/maps").read_text().splitlines())

    assert mappings() == 2
    borrower.wire.give_back(borrower.peer)
    assert mappings() == 1
    lender.wire.drop(lender.peer)


def test_an_endpoint_is_closed_again() -> None:
    """Every close raises while a peer still writes, from any number of threads."""
    hub = wire.Hub()
    with Linked(plain_case(), wires=lambda side, rank: wire.mapped(wire.memory(f"{side}/{rank}", hub), drop_seconds=0.05)) as found:
        lender, borrower = found.ends[1][0], found.ends[0][0].wire
        (peer,) = (name for name in borrower._peers if name.startswith("1/0#"))
        assert borrower.borrow(peer, wire.Slice(0, 8)) is not None
        with pytest.raises(TransferTimeoutError, match=r"still writes|close it again"):
            lender.close(timeout=0.05)
        until(lambda: not lender._thread.is_alive(), "its thread has ended")
        for _ in range(2):
            with pytest.raises(TransferTimeoutError, match="still writes"):
                lender.close()
        borrower.give_back(peer)
        errors = []

        def close() -> None:
            try:
                lender.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=close, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not errors and not lender.wire._peers


def raced(ends: Callable[..., tuple[End, End]], rounds: int) -> int:
    """Drop while the peer borrows, writes and gives back in a loop; return the number of rounds with a write after the drop."""
    late = 0
    for number in range(rounds):
        lender, borrower = ends(drop_seconds=LIMIT)
        loans = []

        def go(borrower: End = borrower, loans: list[int] = loans) -> None:
            with contextlib.suppress(PeerLostError):
                while lent := borrower.wire.borrow(borrower.peer, wire.Slice(0, SIZE)):
                    write(lent, 1)
                    borrower.wire.give_back(borrower.peer)
                    loans.append(1)
                    time.sleep(0)  # outside of a loan, too, the other thread has its turn

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        while len(loans) < 1 + number % 5 and thread.is_alive():
            time.sleep(0)
        lender.wire.drop(lender.peer)
        lender.slab[:] = 0
        time.sleep(0.0005)
        late += bool(lender.slab.any())
        lender.wire.close()
        borrower.wire._peers[borrower.peer].lost = "the round is over"
        thread.join(LIMIT)
        assert not thread.is_alive()
    return late


@pytest.mark.sanitize
@pytest.mark.slow  # half a second
def test_nothing_lands_behind_a_drop(ends: Callable[..., tuple[End, End]]) -> None:
    assert raced(ends, 150) == 0


def test_the_race_is_seen(ends: Callable[..., tuple[End, End]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test detects a borrower that does not check whether it was dropped."""
    made, never = _core.Loans, np.zeros(1, np.uint64)
    monkeypatch.setattr(_core, "Loans", lambda count, _, keep: made(count, int(never.ctypes.data), (never, keep)))
    assert raced(ends, 20) > 0


# ---- what is not mapped ----------------------------------------------------------------------------------------------


def changed(card: bytes, **fields: Any) -> bytes:
    """A card with other fields, and the checksum for them."""
    held = json.loads(card)
    held["mapped"].pop("sha256", None)
    held["mapped"].update(fields)
    held["mapped"]["sha256"] = loans._sum(held["name"], held["mapped"])
    return json.dumps(held).encode()


@contextlib.contextmanager
def other_file(name: str | None, nbytes: int) -> Iterator[int]:
    """A descriptor of this process that is not a ring's."""
    file = os.memfd_create(name) if name else os.open(HERE / "conftest.py", os.O_RDONLY)
    try:
        if name:
            os.ftruncate(file, nbytes)
        yield file
    finally:
        os.close(file)


def test_who_cannot_be_mapped_says_why(ends: Callable[..., tuple[End, End]]) -> None:
    """The reason is given, and the peer is still reached."""
    with (
        other_file(None, 0) as script,
        other_file("secret", SIZE) as secret,
        other_file("kvbm ring", SIZE) as shrinkable,
        other_file("kvbm ring", 2 * SIZE) as large,
    ):
        cases: list[tuple[dict[str, Any], str]] = [
            ({"boot": "another"}, "another host"),
            ({"namespace": "pid:[1]"}, "another PID namespace"),
            ({"start": 1}, "has ended"),
            ({"pid": 1 << 22, "start": 1}, "No such process|has ended"),
            ({"device": "cuda:0", "ipc": "00" * 64, "address": 1}, "it is on cuda:0, and this side on cpu"),
            ({"file": script}, "no memory of kvbm"),
            ({"file": secret}, "no memory of kvbm"),
            ({"page": secret}, "no memory of kvbm"),
            ({"file": large}, "of this size"),
            ({"file": shrinkable}, "of this size"),
            ({"file": 1 << 20}, "No such file"),
        ]
        for fields, why in cases:
            lender, borrower = ends(connect=False)
            lender.connect(borrower)
            peer = borrower.wire.connect(changed(lender.wire.card(), **fields))
            assert borrower.wire.borrow(peer, wire.Slice(0, 8)) is None
            with pytest.raises(AssertionError, match=why):
                raise AssertionError(borrower.wire.unmapped[peer])
            borrower.wire.note(peer, b"there")
            assert [note for _, note in lender.wire.poll()] == [b"there"]
            borrower.wire.drop(peer)
    one, two = ends(connect=False)
    peer = two.wire.connect(changed(one.wire.card(), page=json.loads(two.wire.card())["mapped"]["page"]))
    assert two.wire.unmapped[peer] == "its page of loans is another end's"


def test_peers_without_this_wire() -> None:
    """Both directions connect."""
    hub = wire.Hub()
    end, plain = End("mapped", hub), wire.memory("plain", hub)
    plain.register(wire.Slab.of(np.zeros(64, np.uint8)))
    to_plain, to_end = end.wire.connect(plain.card()), plain.connect(end.wire.card())
    assert "its wire is not wire.mapped" in end.wire.unmapped[to_plain]
    end.wire.note(to_plain, b"a")
    plain.note(to_end, b"b")
    assert plain.poll() == [(to_end, b"a")] and end.wire.poll() == [(to_plain, b"b")]
    end.close()


def test_memory_of_others_is_not_lent() -> None:
    hub = wire.Hub()
    ring, array = End("ring", hub), wire.mapped(wire.memory("array", hub))
    array.register(wire.Slab.of(np.zeros(64, np.uint8)))
    peers = array.connect(ring.wire.card()), ring.wire.connect(array.card())
    assert "this side's slab" in array.unmapped[peers[0]] and "its slab cannot be lent" in ring.wire.unmapped[peers[1]]
    assert array.borrow(peers[0], wire.Slice(0, 8)) is None and ring.wire.borrow(peers[1], wire.Slice(0, 8)) is None
    array.close()
    ring.close()


def test_cards_that_are_none(ends: Callable[..., tuple[End, End]]) -> None:
    lender, borrower = ends(connect=False)
    card = lender.wire.card()
    for wrong, said in (
        (b"", "JSON"),
        (b"x" * (1 << 17), "bytes"),
        ("text", "bytes"),
        (b"[]", "version"),
        (card.replace(b'"pid": ', b'"pid": 1'), "damaged"),
        (json.dumps({**json.loads(card), "mapped": 5}).encode(), "object"),
        (changed(card, version=2), "version"),
        (changed(card, pid=-1), "pid"),
        (changed(card, pid=1 << 31), "pid"),
        (changed(card, nbytes=1 << 70), "nbytes"),
        (changed(card, nbytes=0), "nbytes"),
        (changed(card, device="tpu:0"), "device"),
        (changed(card, device="cuda:0", ipc="zz", address=1), "ipc"),
        (changed(card, device="cuda:0", ipc="ab" * 64, address=0), "address"),
        (changed(card, start=True), "start"),
        (changed(card, extra=1, boot=None), "boot"),
    ):
        with pytest.raises(BindError, match=said):
            borrower.wire.connect(wrong)
    borrower.wire.connect(card)
    with pytest.raises(BindError, match="not the one"):
        borrower.wire.connect(changed(card, start=2))


FIELDS = ("boot", "namespace", "pid", "start", "device", "nbytes", "page", "file", "ipc", "address")
VALUES = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.integers(0, 64), st.text(max_size=130), st.booleans(), st.just([]),
    st.sampled_from(["cpu", "cuda:0", "ab" * 64]),
)  # fmt: skip


def connect_damaged(fields: dict[str, Any]) -> None:
    """Connect with a card that has other fields.

    It is mapped exactly if its page is the lender's, its file a ring of this size, by any descriptor, and all else is the same.
    """
    hub, opened, open_file = wire.Hub(), {}, loans.open_memory_file

    def record(pid: int, number: int, what: str, nbytes: int) -> int:
        file = open_file(pid, number, what, nbytes)
        assert Path(f"/proc/self/fd/{file}").readlink().name == f"memfd:kvbm {what} (deleted)"
        opened[what] = os.fstat(file)
        return file

    lender, borrower = End("lender", hub), End("borrower", hub)
    try:
        card = lender.wire.card()
        shared = json.loads(card)["mapped"]
        files = {what: os.fstat(shared[name]) for what, name in (("ring", "file"), ("loans", "page"))}
        with contextlib.suppress(BindError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(loans, "open_memory_file", record)
            peer = borrower.wire.connect(changed(card, **fields))
            is_right = (
                opened.keys() == files.keys()
                and opened["ring"].st_size == SIZE
                and os.path.samestat(opened["loans"], files["loans"])
                and all(shared[name] == fields[name] for name in fields.keys() & shared.keys() - {"file", "page"})
            )
            assert (peer not in borrower.wire.unmapped) is is_right
            if is_right and os.path.samestat(opened["ring"], files["ring"]):
                ctypes.memset(borrower.wire._peers[peer].slab.address, 7, SIZE)
                assert (lender.slab == 7).all() and not borrower.slab.any()
            assert is_right or fields.keys() & shared.keys()
    finally:
        borrower.close()
        lender.close()


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
@pytest.mark.slow  # 0.7 s
@pytest.mark.sanitize
def test_damaged_cards_are_refused_or_not_mapped(fields: dict[str, Any]) -> None:
    """For any fields of a card, only rings are mapped, and only `BindError` is raised."""
    connect_damaged(fields)


def test_a_card_may_name_any_descriptor_of_the_same_file() -> None:
    """Copies of descriptors name the same files.  A page of loans is never mapped as a slab, nor a slab as a page."""
    hub = wire.Hub()
    lender, borrower, third = End("lender", hub), End("borrower", hub), End("third", hub)
    shared = json.loads(lender.wire.card())["mapped"]
    copies = {name: os.dup(shared[name]) for name in ("file", "page")}
    try:
        peer = borrower.wire.connect(changed(lender.wire.card(), **copies))
        assert not borrower.wire.unmapped
        ctypes.memset(borrower.wire._peers[peer].slab.address, 7, SIZE)
        assert (lender.slab == 7).all() and not borrower.slab.any()
        for swapped in ({"file": shared["page"], "nbytes": loans._PAGE_BYTES}, {"page": shared["file"]}):
            peer = third.wire.connect(changed(lender.wire.card(), **swapped))
            assert "no memory of kvbm" in third.wire.unmapped[peer]
            third.close()
            third = End("third", hub)
    finally:
        for number in copies.values():
            os.close(number)
        for end in (third, borrower, lender):
            end.close()
    for number in range(65):
        connect_damaged({"file": number})
        connect_damaged({"page": number})


@pytest.mark.slow  # 1.1 s
@pytest.mark.sanitize
def test_nothing_is_left() -> None:
    """No files and mappings are left when both sides are closed."""

    def once() -> None:
        hub = wire.Hub()
        lender, borrower = End("lender", hub), End("borrower", hub)
        lender.connect(borrower)
        borrower.connect(lender)
        assert borrower.wire.borrow(borrower.peer, wire.Slice(0, 8))
        borrower.wire.give_back(borrower.peer)
        lender.close()
        borrower.close()

    before = memory_files()
    for _ in range(5):
        once()
    gc.collect()
    assert not memory_files() - before


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(place: str) -> Iterator[Callable[..., tuple[wire.Mapped, Any, subprocess.Popen[str], str]]]:
    """Starts `programs.borrowing`, which writes to this side's slab forever."""
    pytest.importorskip("torch")
    from programs import borrowing

    with contextlib.ExitStack() as stack:

        def start() -> tuple[wire.Mapped, Any, subprocess.Popen[str], str]:
            ring = Ring("cpu", SIZE, 1, 1)
            stack.callback(ring.close)
            mine = borrowing.carrier("lender", place)
            mine.register(ring.slab)
            path = os.pathsep.join(filter(None, (str(HERE), str(HERE / "helpers"), os.environ.get("PYTHONPATH"))))
            command = [sys.executable, "-m", "programs.borrowing", place]
            variables = {**os.environ, "PYTHONPATH": path}
            other = stack.enter_context(
                subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(other.kill)
            assert other.stdin and other.stdout
            card = other.stdout.readline()
            other.stdin.write(mine.card().decode() + "\n")
            other.stdin.flush()
            peer = mine.connect(card.encode())
            borrowing.meet(mine, peer)
            assert other.stdout.readline() == "writing\n"
            return mine, np.frombuffer(ring._pages, np.uint8), other, peer

        yield start


def test_the_end_of_a_process_is_seen_among_many_files() -> None:
    """The process's descriptor may have any number."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2048:
        pytest.skip("no more than 2047 open files")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        found = loans._Process(other.pid, loans._started(other.pid))
        first = found._file
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
            found._file = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 1024)
            assert not found.is_over()
            other.kill()
            other.wait(LIMIT)
            assert found.is_over()
        finally:
            found.close()
            os.close(first)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lives", "killed", "stopped"])
def test_a_process_that_writes_is_dropped(process: Callable[..., Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, or after it was killed within a loan; a process that is stopped within a loan must end first."""
    mine, slab, other, peer = process()
    until(slab.any, "it writes")
    if how == "killed":
        other.kill()
    if how == "stopped":

        def is_caught() -> bool:
            """True if the process is within a loan, where it is most of the time."""
            os.kill(other.pid, signal.SIGCONT)
            time.sleep(0.001)
            os.kill(other.pid, signal.SIGSTOP)
            until(lambda: stopped(other), "it has stopped")
            return bool(mine._peers[peer].has_loans())

        until(is_caught, "it is caught")
        with monkeypatch.context() as patch:
            patch.setattr(mine, "_drop_seconds", 0.2)
            with pytest.raises(TransferTimeoutError, match="still writes"):
                mine.drop(peer)
        os.kill(other.pid, signal.SIGCONT)
    mine.drop(peer)
    slab[:] = 0
    time.sleep(0.2)
    assert not slab.any(), "it wrote behind the drop"
    mine.close()
    if how != "killed":
        assert other.wait(3 * LIMIT) == 0  # its own drop may take 20 s


def stopped(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "first"),
    [  # twenty of the random cases in each way; with -m full all
        pytest.param(faults, 20 * turn, id=f"{name}-{20 * turn}", marks=[pytest.mark.full] * (turn != number))
        for number, (name, faults) in enumerate((("whole", 0.0), ("faults", 0.02)))
        for turn in range(4)
    ],
)
def test_every_byte(first: int, faults: float) -> None:
    """Random placements, layouts, ranges, all by loans; also if notes are lost, doubled, late."""

    def wires(seed: int) -> Wires:
        hub = wire.Hub()

        def make(side: int, rank: int) -> wire.Mapped:
            script = wire.random_faults(seed + 7 * rank + side, faults, ["lose", "double", "delay", "swap"], 1000) if faults else []
            return wire.mapped(wire.faulty(wire.memory(f"{side}/{rank}", hub), script), drop_seconds=LIMIT)

        return make

    right = chunks = 0
    for found in right_cases(range(first, first + 20), wires):
        stats = [link.stats() for side in found.links for link in side]
        assert all(one["chunks_mapped"] in (0, one["chunks_sent"]) for one in stats), "all, or none of a pull"
        chunks += int(sum(one["chunks_mapped"] for one in stats))
        right += 1
    assert right >= 5 and chunks >= right


def test_peers_that_were_dropped_hold_nothing() -> None:
    """None of their pages is mapped, and no descriptor of their processes is open."""
    hub = wire.Hub()
    near, before = End("near", hub), memory_files("loans")
    pages = []
    for number in range(3):
        far = End(f"far{number}", hub)
        near.connect(far)
        far.connect(near)
        near.wire.drop(near.peer)
        far.close()
        pages.append(len(memory_files("loans") - before))
    assert pages[0] == pages[-1], pages
    near.close()


class Failing:
    """Packing that stays unfinished until it fails."""

    def __init__(self, error: Exception) -> None:
        self.error, self.is_asked = error, False

    def query(self) -> bool:
        if self.is_asked:
            raise self.error
        self.is_asked = True
        return False

    synchronize = query


@pytest.mark.parametrize("where", ["as it begins", "under way"])
@pytest.mark.parametrize("error", [KvbmError("the device broke"), RuntimeError("a mistake")], ids=["kvbm", "other"])
def test_who_fails_to_pack_has_nothing_on_loan(monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
    """After a failed packing no loan is left, and both sides get the error long before the deadline."""
    begun = threading.Event()

    def pack(*_: Any, **__: Any) -> Failing:
        assert begun.wait(LIMIT)  # what begins after a peer has failed waits for the next attempt
        if where == "as it begins":
            raise error
        return Failing(error)

    monkeypatch.setattr(Bare, "pack", pack)
    hub = wire.Hub()
    with Linked(plain_case(), wires=lambda side, rank: wire.mapped(wire.memory(f"{side}/{rank}", hub), drop_seconds=0.05)) as found:
        ends = [list(zip(found.links[side], found.spans(side), strict=True)) for side in (0, 1)]
        sent = [link.send("one", span, timeout=60) for link, (span,) in ends[0]]
        came = [link.receive("one", span, timeout=60) for link, (span,) in ends[1]]
        until(lambda: all(link.handles for side in found.links for link in side), "all have begun")
        begun.set()
        assert all(ended([*sent, *came]))
        borrowers = [peer for end in found.ends[1] for peer in end.wire._peers.values()]
        until(lambda: not any(peer.has_loans() for peer in borrowers), "no loan is left")


def test_on_a_gpu_that_is_not_one(fake_gpu: FakeDriver) -> None:
    """Rings of the fake driver, opened by CUDA IPC handles; all mappings are closed at the end."""
    fake_gpu("reshards.mapped", 500, 20)


def test_out_of_a_gpu_that_is_not_one(fake_gpu: FakeDriver) -> None:
    fake_gpu("reshards.out_of_another_gpu", 500, 20)


def test_handles_that_fail(fake_gpu: FakeDriver) -> None:
    fake_gpu("reshards.handles_that_fail")


def test_captured_streams(fake_gpu: FakeDriver) -> None:
    fake_gpu("reshards.captured_streams")


@pytest.mark.parametrize("what", ["close", "end", "has_begun", "take", "expect", "close the mail"])
def test_threads_let_pythons_lock_go_while_they_wait_for_a_launch(what: str, fake_gpu: FakeDriver) -> None:
    fake_gpu("reshards.launches_that_wait_for_python", what)
