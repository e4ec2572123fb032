"""`mapped`: peers on this host write directly to each other's slabs.  Everything else uses another wire."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import mmap
import os
import re
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import _core
from .._arguments import quoted, require_a, seconds
from ..errors import BindError, KvbmError, PeerLostError, TransferTimeoutError
from ..system.machine import device_of
from ..system.memory_files import memory_file, open_memory_file
from ._mail import Lane
from .protocol import CARD_BYTES, NOTE_BYTES, Op, Slab, Slice, Wire, deadline, inside, require_bytes, require_wire

#: A page of loans: the name of the end that owns the page, then one line per mapped peer of this end.
_MAGIC: Final = b"kvbm loans 1\0"
_NAME_BYTES: Final = 256
_PAGE_BYTES: Final = 256 << 10

#: Bytes of a line.  It has the peer's key, the number of slices of the peer's slab that the page's end has borrowed, a flag that is
#: set when this end has dropped the peer, and one more than the number of the file with this end's box of notes, or 0.
_LINE: Final = 64
_LOANS, _DROPPED, _MAIL = 16, 24, 32

#: Polls that leave the other wire out, if there are notes in memory.
_SKIPS: Final = 16

#: Seconds between two looks whether a peer has made its box.
_LOOKS: Final = 1e-3

#: Fields of a card for peers on this host, with the range of a number or the pattern of a text.
_NUMBER: Final = range(1 << 63)
_KINDS: Final[dict[str, range | str]] = {
    "version": range(1, 2), "boot": ".{1,80}", "namespace": ".{1,80}", "pid": range(1 << 31), "start": _NUMBER, "page": _NUMBER,
    "device": r"cpu|cuda:\d{1,4}", "nbytes": range(1, 1 << 63),
}  # fmt: skip
_OF_HOST: Final[dict[str, range | str]] = {"file": _NUMBER}
_OF_GPU: Final[dict[str, range | str]] = {"ipc": "[0-9a-f]{128}", "address": range(1, 1 << 63)}


def mapped(wire: Wire, *, drop_seconds: float = 5.0) -> Mapped:
    """Wrap a wire so that peers on the same host can borrow slices of each other's slabs.

    Chunks are then packed directly into the peer's slot: by CUDA IPC over NVLink between GPUs, and by shared memory between pools
    on the CPU.  Notes use the wrapped wire, and so do chunks for peers on other hosts or without this wire.

    Parameters
    ----------
    wire : Wire
        A wire of any transport between processes.
    drop_seconds : float
        How long `Wire.drop` waits for the peer's loans to end.

    Notes
    -----
    ``docs/reference/wires.md`` says which peers are mapped; `Mapped.unmapped` lists the others, whose chunks are put.

    *Fence.*  A slice is on loan from `borrow` to `give_back`.  Each end has a page that its peers map.  It counts its loans there,
    and marks the peers that it has dropped.  The borrower first raises its count and then reads the lender's mark.  The lender
    first sets its mark and then waits for the borrower's count.  The loans of a process end with the process.

    Examples
    --------
    >>> end = wire.mapped(wire.nixl("prefill-0/3"))  # doctest: +SKIP
    """
    require_wire("wire", wire)
    return Mapped(wire, seconds("drop_seconds", drop_seconds))


class Mapped:
    """A wire with loans.

    Attributes
    ----------
    unmapped : dict of str to str
        Name of each peer that is not mapped → the reason.
    """

    def __init__(self, wire: Wire, drop_seconds: float) -> None:
        self.unmapped: dict[str, str] = {}
        self._wire, self._drop_seconds = wire, drop_seconds
        self._slab: Slab | None = None
        self._why = ""  # why this side lends nothing
        self._page: _Page | None = None
        self._cards: dict[str, bytes] = {}
        self._peers: dict[str, _Peer] = {}
        self._look_at = 0.0  # time of the next look for boxes that peers have made meanwhile
        self._has_mail, self._skips = True, _SKIPS
        if hasattr(wire, "on_news"):
            self.on_news, self._has_mail = wire.on_news, False

    def register(self, slab: Slab) -> None:
        self._wire.register(slab)
        self._slab = slab

    def card(self) -> bytes:
        """The wrapped wire's card, with the fields that a peer on this host needs."""
        fields = json.loads(self._wire.card())
        text = json.dumps({**fields, "mapped": {**self._shared, "sha256": _sum(fields["name"], self._shared)}}).encode()
        if len(text) > CARD_BYTES:
            raise BindError(f"card: {len(text)} bytes, expected at most {CARD_BYTES}")
        return text

    @functools.cached_property
    def _shared(self) -> dict[str, Any]:
        """The card's fields for peers on this host; empty if this side cannot lend its slab."""
        slab = self._slab
        assert slab is not None
        here = _host()
        if not here or (slab.device == "cpu" and slab.file < 0):
            self._why = "it is no endpoint's ring, or this system shares no memory"
            return {}
        try:
            if slab.device == "cpu":
                lent: dict[str, Any] = {"file": slab.file}
            else:
                handle = _core.ipc_handle(device_of(slab.device), slab.address)
                lent = {"ipc": handle.hex(), "address": slab.address}
            self._page = _Page.made(self._name())
        except (OSError, KvbmError) as error:
            self._why = str(error)
            return {}
        return {"version": 1, **here, "device": slab.device, "nbytes": slab.nbytes, "page": self._page.file, **lent}

    def _name(self) -> str:
        return str(json.loads(self._wire.card())["name"])

    def connect(self, card: bytes) -> str:
        peer = self._wire.connect(card)  # the wrapped wire ignores the additional fields
        shared = _read(card)
        if (known := self._peers.get(peer)) is not None and known.lost:
            raise BindError(f"card of {peer}: the peer is lost ({known.lost}); it must start again, with a new card")
        if peer in self._cards:
            if self._cards[peer] != card:
                raise BindError(f"card of {peer}: not the one that it was connected with")
            return peer
        self._cards[peer] = card
        try:
            self._peers[peer] = self._map(peer, shared)
        except (OSError, KvbmError, ValueError) as error:
            self.unmapped[peer] = str(error)
        return peer

    def _map(self, peer: str, shared: dict[str, Any]) -> _Peer:
        """Map a peer's page and slab.  Raises `BindError` with the reason if they cannot be mapped."""
        if not self._shared or self._page is None or self._slab is None:
            raise BindError(f"this side's slab cannot be lent: {self._why}")
        if not shared:
            raise BindError("its slab cannot be lent: its wire is not wire.mapped, or it is no endpoint's ring")
        if any(shared[name] != self._shared[name] for name in ("boot", "namespace")):
            raise BindError("it is on another host, or in another PID namespace")
        if (shared["device"] == "cpu") is not (self._slab.device == "cpu"):
            raise BindError(f"it is on {shared['device']}, and this side on {self._slab.device}")
        with contextlib.ExitStack() as failing:
            process = _Process(shared["pid"], shared["start"])
            failing.callback(process.close)
            page = _Page.opened(shared["pid"], shared["page"], peer)
            failing.callback(page.close)
            slab = _Lent(shared, self._slab.device)
            failing.callback(slab.close)
            if process.is_over():
                raise BindError("its process has ended")
            lane = Lane(self._name(), peer, functools.partial(self._wire.note, peer)) if self._has_mail else None
            if lane is not None:
                failing.callback(lane.close)
            self._page.add(peer, -1 if lane is None else lane.file)  # from now on the peer may borrow: this side can read its loans
            failing.pop_all()
        return _Peer(process, page, slab, _key(self._name()), shared, lane)

    # ---- loans -------------------------------------------------------------------------------------------------------

    def borrow(self, peer: str, remote: Slice) -> Slab | None:
        """Borrow a slice of the peer's slab as memory of this process until `give_back`.  None: use `put` instead.

        Raises `PeerLostError` if the peer has ended the connection.
        """
        known = self._peers.get(peer)
        if known is None:
            return None
        inside(remote, known.slab.nbytes, f"{peer}: remote")
        if not self.hold(peer):
            return None
        return Slab(known.slab.address + remote.offset, remote.nbytes, known.slab.device, known)

    def hold(self, peer: str) -> bool:
        """Begin a loan of a peer's memory: the peer does not reuse it until `give_back`.  False if this side cannot borrow it.

        Raises `PeerLostError` if the peer has ended the connection.
        """
        known = self._peers.get(peer)
        if known is None or self._page is None:
            return False
        self._require(peer)
        if known.loans is None:
            if (at := known.page.find(known.key)) is None:
                return False  # the peer has not connected yet, or cannot read this side's loans
            own, far = self._page.word(self._page.line(peer), _LOANS), known.page.word(at, _DROPPED)
            known.loans = _core.Loans(ctypes.addressof(own), ctypes.addressof(far), (own, far))
        if not known.loans.begin():
            known.lost = "it has ended the connection"
            self._require(peer)
        return True

    def loans(self, peer: str) -> _core.Loans | None:
        """The loans of a peer's memory, after the first `hold`."""
        known = self._peers.get(peer)
        return None if known is None else known.loans

    def expect(self, peer: str, copies: _core.Foreseen) -> None:
        """Begin copies when one of the peer's next notes comes through shared memory.  Any thread may call it."""
        known = self._peers.get(peer)
        if known is not None and known.lane is not None and not known.lost:
            known.lane.expect(copies)

    def open(self, peer: str, handle: str, nbytes: int, address: int) -> Slab:
        """Open memory that a mapped peer shares, to read it.  It stays open until the peer is dropped and its loans have ended.

        `handle` is the number of a memory file of the peer's process, or the digits of a CUDA IPC handle; `address` is
        where the memory begins there.  Raises `BindError` if the peer is not mapped, or the memory cannot be opened.
        """
        self._require(peer)
        if (known := self._peers.get(peer)) is None:
            raise BindError(self.unmapped.get(peer, "it is not connected"))
        assert self._slab is not None
        shared = {**known.shared, "nbytes": nbytes, "address": address, "file": handle, "ipc": handle}
        if not re.fullmatch(r"\d{1,9}" if self._slab.device == "cpu" else "[0-9a-f]{128}", handle, re.ASCII):
            raise BindError(f"card: handle: expected a descriptor or a CUDA IPC handle, got {quoted(handle, 60)}")
        try:
            memory = _Lent(shared, self._slab.device, "pool")
        except (OSError, ValueError) as error:
            raise BindError(f"its memory cannot be opened: {error}") from None
        known.opened.append(memory)
        return Slab(memory.address, nbytes, memory.device, memory)

    def give_back(self, peer: str) -> None:
        """End a loan.  This process no longer writes to the slice."""
        known = self._peers[peer]
        assert known.loans is not None
        if known.lost:
            known.lends_no_more()  # before the count: no copy begins that would be counted too late
        if not known.loans.end() and known.lost:
            known.close_memory()  # the drop did not close it, because a loan was open
            if known.is_closed:
                known.page.close()

    def _require(self, peer: str) -> _Peer | None:
        """A mapped peer, or None.  Raises `PeerLostError` if it is lost."""
        require_a(str, "peer", peer, "a peer's name, as connect() returned it")
        known = self._peers.get(peer)
        if known is not None and known.lost:
            raise PeerLostError(f"{peer} is lost: {known.lost}", peer=peer)
        return known

    def _is_running(self, peer: str, known: _Peer) -> bool:
        """False if a mapped peer has ended, or has dropped this side: a box of notes does not say so.

        Raises `PeerLostError` then, unless the peer has posted notes before that this side has not read: they may be all that it
        waits for.
        """
        at = known.page.find(known.key)
        if known.process.is_over():
            why = "its process has ended"
        elif at is not None and known.page.word(at, _DROPPED).value:
            why = "it has ended the connection"
        else:
            return True
        if known.lane is None or not known.lane.has_note:
            known.lost = why
            self._require(peer)
        return False

    # ---- calls of the wrapped wire -----------------------------------------------------------------------------------

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        known = self._require(peer)
        if note and known is not None and known.lane is not None:
            known.lane.end()
        return self._wire.put(peer, local, remote, note)

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        self._require(peer)
        return self._wire.get(peer, local, remote)

    def note(self, peer: str, note: bytes) -> None:
        known = self._require(peer)
        if known is None or known.lane is None:
            self._wire.note(peer, note)
            return
        require_bytes(note, NOTE_BYTES, f"{peer}: note")
        if self._is_running(peer, known):
            known.open_mail()
            known.lane.note(note)

    def post(self, peer: str, note: bytes) -> bool:
        """Send a note through shared memory.  False: it was not sent.  Any thread may call it."""
        known = self._peers.get(peer)
        lane = None if known is None or known.lost else known.lane
        return lane is not None and lane.post(note)

    def poll(self) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        if self._has_mail and self._skips:  # notes in memory first: the other wire takes many times as long to poll
            for sender, known in self._peers.items():
                self._take(sender, known, found)
            if found:
                self._skips -= 1
                return found
        self._skips = _SKIPS
        for sender, note in self._wire.poll():
            mapped = self._peers.get(sender)
            if mapped is not None and mapped.lane is not None:
                if mapped.lane.heard(note):
                    continue
                self._take(sender, mapped, found)  # what the peer has posted before
            found.append((sender, note))
        if self._has_mail:
            for sender, known in self._peers.items():
                self._take(sender, known, found)
            if (now := time.monotonic()) >= self._look_at:
                self._look_at = now + _LOOKS
                for known in self._peers.values():
                    known.open_mail()
        return [note for note in found if (of := self._peers.get(note[0])) is None or not of.lost]

    def watch(self, latch: _core.Latch, microseconds: int, dones: Sequence[Any] = ()) -> bool:
        """Wait until there is a note in shared memory, the latch is set or a copy is done.  False after some microseconds."""
        lanes = [known.lane for known in self._peers.values() if known.lane is not None and not known.lost]
        mails = [lane.mail for lane in lanes if lane.mail is not None]
        return latch.wait(microseconds, mails, dones)

    def _take(self, peer: str, known: _Peer, found: list[tuple[str, bytes]]) -> None:
        """Add the notes that a peer has posted."""
        if known.lane is None or known.lost:
            return
        try:
            found += [(peer, note) for note in known.lane.take()]
        except BindError as error:
            known.lost = str(error)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self, peer: str, seconds: float | None = None) -> None:
        require_a(str, "peer", peer, "a peer's name, as connect() returned it")
        known = self._peers.get(peer)
        if known is not None and self._page is not None:
            known.lost = known.lost or "it was dropped"
            known.lends_no_more()
            self._page.drop(peer)
        end = time.monotonic() + (self._drop_seconds if seconds is None else seconds)
        self._wire.drop(peer, seconds)
        if known is not None:
            self._await_loans([peer], max(end - time.monotonic(), 0.0))

    def _await_loans(self, peers: list[str], seconds: float) -> None:
        """Wait until these peers have returned their loans or their processes have ended."""
        _core.fence()
        late = deadline(seconds)
        for peer in peers:
            known = self._peers[peer]
            while known.has_loans() and not known.process.is_over():
                if late():
                    raise TransferTimeoutError(
                        f"{peer}: it still writes to what it was lent after {seconds:.3g} s: do not use it for something "
                        "else, and drop again"
                    )
                time.sleep(0.0002)
            if self._page is not None and not self._page.count_of(peer):
                known.close_memory()
            known.close()  # its page and process are no longer read

    def close(self) -> None:
        if self._page is not None:
            for peer, known in self._peers.items():
                known.lost = known.lost or "this side is closed"
                known.lends_no_more()
                self._page.drop(peer)
        self._wire.close()
        self._await_loans(list(self._peers), self._drop_seconds)
        if self._page is not None and any(self._page.count_of(peer) for peer in self._peers):
            raise TransferTimeoutError("this side still writes to what it was lent: close it again once that was given back")
        self._peers = {}
        if self._page is not None:
            self._page.close()
            self._page = None


class _Peer:
    """A peer on this host."""

    def __init__(
        self, process: _Process, page: _Page, slab: _Lent, key: bytes, shared: dict[str, Any], lane: Lane | None
    ) -> None:
        self.process, self.page, self.slab, self.key, self.shared, self.lane = process, page, slab, key, shared, lane
        self.opened: list[_Lent] = []  # further memory of the peer
        self.loans: _core.Loans | None = None
        self.lost = ""
        self.is_closed = False

    def open_mail(self) -> None:
        """Open the peer's box of notes, if it has made one.  If that fails, notes go by the other wire."""
        if self.lane is None or self.lane.mail is not None or self.is_closed or self.lost:
            return
        number = 0 if (at := self.page.find(self.key)) is None else int(self.page.word(at, _MAIL).value)
        if number:
            try:
                self.lane.open(self.shared["pid"], number - 1)
            except (OSError, BindError, ValueError):
                self.lane.close()
                self.lane = None

    def has_loans(self) -> bool:
        """True if the peer has borrowed slices of this end's slab."""
        at = None if self.is_closed else self.page.find(self.key)
        return at is not None and bool(self.page.word(at, _LOANS).value)

    def lends_no_more(self) -> None:
        """Begin no other loan: then who counts none may call `close_memory`."""
        if self.loans is not None:
            self.loans.close()

    def close_memory(self) -> None:
        """Unmap its slab and pools.  No loan may be open, and the peer is lost."""
        self.lends_no_more()
        self.loans = None  # it keeps the page mapped
        for memory in (self.slab, *self.opened):
            memory.close()
        self.opened = []

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.page.close()
            self.process.close()
            if self.lane is not None:
                self.lane.close()


class _Process:
    """Another process, or this one."""

    def __init__(self, pid: int, start: int) -> None:
        self._file = -1 if _is_own(pid) else os.pidfd_open(pid)
        if _started(pid) != start:  # checked after opening: the pid may have been reused for another process
            self.close()
            raise BindError("its process has ended")
        self._ended = select.poll()  # `select` accepts no descriptor above 1023
        if self._file >= 0:
            self._ended.register(self._file, select.POLLIN)

    def is_over(self) -> bool:
        return self._file >= 0 and bool(self._ended.poll(0))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Page:
    """The page of loans of one end.  This end writes it, and its peers read it."""

    def __init__(self, file: int, name: str) -> None:
        self.file, self._name = file, name
        self._memory = mmap.mmap(file, _PAGE_BYTES)
        self._at: dict[bytes, int] = {}

    @classmethod
    def made(cls, name: str) -> _Page:
        made = cls(memory_file("loans", _PAGE_BYTES), name)
        made._memory[: len(_MAGIC) + len(name)] = _MAGIC + name.encode()
        return made

    @classmethod
    def opened(cls, pid: int, number: int, name: str) -> _Page:
        file = open_memory_file(pid, number, "loans", _PAGE_BYTES)
        try:
            found = cls(file, name)
        finally:
            os.close(file)
        found.file = -1
        if found._memory[:_NAME_BYTES].rstrip(b"\0") != _MAGIC + name.encode():
            found.close()
            raise BindError("its page of loans is another end's")
        return found

    def add(self, peer: str, mail: int) -> None:
        """Add a line for a peer.  `mail`: the file of this end's box of notes for it; -1: none."""
        key = _key(peer)
        at = _NAME_BYTES + _LINE * len(self._at)
        if at + _LINE > _PAGE_BYTES:
            raise BindError(f"more than {len(self._at)} peers: no room in the page of loans")
        self._at[key] = at
        self.word(at, _MAIL).value = mail + 1
        _core.fence()
        self._memory[at : at + len(key)] = key

    def find(self, key: bytes) -> int | None:
        """Offset of a peer's line in another end's page; None if it has no such line."""
        known = self._at.get(key)
        if known is None:
            for at in range(_NAME_BYTES, _PAGE_BYTES, _LINE):
                found = self._memory[at : at + len(key)]
                if found == key:
                    known = self._at[key] = at
                    break
                if not any(found):
                    break
        return known

    def line(self, peer: str) -> int:
        """Offset of the line of a peer in this end's page."""
        return self._at[_key(peer)]

    def word(self, line: int, what: int) -> Any:
        """The number at `_LOANS`, `_DROPPED` or `_MAIL` of a line, in its memory."""
        return ctypes.c_uint64.from_buffer(self._memory, line + what)

    def count_of(self, peer: str) -> int:
        """Number of this end's loans from a peer."""
        return int(self.word(self.line(peer), _LOANS).value)

    def drop(self, peer: str) -> None:
        self.word(self.line(peer), _DROPPED).value = 1

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        with contextlib.suppress(BufferError):
            self._memory.close()


class _Lent:
    """A peer's slab, or its pool's memory, as memory of this process.  That of a pool is read-only on the CPU."""

    def __init__(self, shared: dict[str, Any], device: str, what: str = "ring") -> None:
        self.nbytes, self.device, self.is_open = shared["nbytes"], device, True  # pools on a GPU ask whether it is open
        self._close: Callable[[], object] = int
        if device == "cpu":
            file = open_memory_file(shared["pid"], shared["file"], what, self.nbytes)
            try:
                pages = mmap.mmap(file, self.nbytes, access=mmap.ACCESS_WRITE if what == "ring" else mmap.ACCESS_READ)
            finally:
                os.close(file)
            self.buffer = np.frombuffer(pages, np.uint8)
            self.address = int(self.buffer.ctypes.data)
            return
        own, far = device_of(device), device_of(shared["device"])
        if _is_own(shared["pid"]):  # CUDA refuses to open an IPC handle in the process that made it
            if own != far and not _core.enable_peer(own, far):
                raise BindError(f"{device} does not reach {shared['device']}")
            self.address = shared["address"]
            return
        self.address = _core.ipc_open(own, bytes.fromhex(shared["ipc"]))
        self._close = functools.partial(_core.ipc_close, own, self.address)

    def close(self) -> None:
        self.buffer, self.is_open = None, False  # type: ignore[assignment]
        close, self._close = self._close, int
        with contextlib.suppress(KvbmError):
            close()


def _read(card: bytes) -> dict[str, Any]:
    """Read the fields for peers on the same host from a card that the wrapped wire has accepted; empty if it has none."""
    whole = json.loads(card)
    fields = whole.get("mapped", {})
    if not isinstance(fields, dict):
        raise BindError(f"card: 'mapped': expected an object, got {quoted(fields, 60)}")
    if "mapped" in whole and fields.pop("sha256", None) != _sum(whole["name"], fields):
        raise BindError("card: 'mapped': expected the sum that its fields have: it was damaged on its way")
    if not fields:
        return {}
    kinds = _KINDS | (_OF_HOST if fields.get("device") == "cpu" else _OF_GPU)
    for name, expected in kinds.items():
        value = fields.get(name)
        if isinstance(expected, str):
            is_right = isinstance(value, str) and bool(re.fullmatch(expected, value, re.ASCII))
        else:
            is_right = type(value) is int and value in expected
        if not is_right:
            raise BindError(f"card: {name!r}: expected {expected}, got {quoted(value, 60)}")
    return {name: fields[name] for name in kinds}


def _sum(name: str, fields: dict[str, Any]) -> str:
    """Checksum of these fields.  It detects damage before a field is used as an address; it does not authenticate the sender."""
    return hashlib.sha256(json.dumps([name, fields], sort_keys=True).encode()).hexdigest()


def _host() -> dict[str, Any]:
    """The host, the PID namespace and the process; empty on systems without pidfd or memfd."""
    with contextlib.suppress(OSError, AttributeError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        os.close(os.pidfd_open(os.getpid()))  # fails on old kernels
        os.memfd_create  # noqa: B018
        pid = os.getpid()
        return {"boot": boot, "namespace": str(Path("/proc/self/ns/pid").readlink()), "pid": pid, "start": _started(pid)}
    return {}


def _started(pid: int) -> int:
    """Start time of a process in clock ticks; -1 if the process does not exist."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return -1


def _is_own(pid: int) -> bool:
    return pid == os.getpid()


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:16]
