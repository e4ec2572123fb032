"""`nixl`: a wire on NIXL, between processes and machines, for memory of the host and of GPUs."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from ..errors import BindError, KvbmError, PeerLostError, TransferError, TransferTimeoutError
from .protocol import Card, Ends, Op, Peer, Slab, Slice, deadline

__all__ = ["Reached", "Transfers", "nixl"]

T = TypeVar("T")

#: Before each note: what it is, and its number among the sender's to this peer.
_HEAD = struct.Struct("<BQ")
_NOTE, _BYE, _GONE = 0, 1, 2
#: Most notes that are kept of senders that this side has not connected to.
_STRANGERS: Final = 4096
#: Slabs that a peer may still write to although their wire is closed: their memory is never used again.
_WRITABLE: list[Slab] = []


class Agent:
    """An agent of NIXL: memory, transfers, and NIXL's exceptions as kvbm's."""

    def __init__(self, name: str, backend: str) -> None:
        try:
            from nixl import _api, _bindings
        except ImportError as error:
            raise KvbmError(f"this wire needs NIXL ({error}): pip install 'kvbm-layouts[nixl]'") from None
        kinds = [getattr(_bindings, kind) for kind in dir(_bindings) if kind.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = tuple(kinds)
        self._gone: tuple[type[Exception], ...] = (_bindings.nixlRemoteDisconnectError,)
        self._name, self._backend = name, backend
        config = _api.nixl_agent_config(enable_prog_thread=False, backends=[backend])
        self.nixl: Any = self.call("agent", _api.nixl_agent, name, config)
        if backend not in self.nixl.backends:
            raise KvbmError(f"{name}: NIXL has no backend {backend} here; it has {sorted(self.nixl.plugin_list)}")

    def call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call NIXL; `PeerLostError` if the peer has gone, `TransferError` for all else that it raises."""
        try:
            return function(*arguments)
        except self._gone as error:
            raise PeerLostError(f"{self._name}: {what}: {error}") from None
        except self._errors as error:
            raise TransferError(f"{self._name}: {what}: {error}") from None

    def register(self, slab: Slab) -> Any:
        """Register memory; returns what `deregister` takes."""
        memory = [(slab.address, slab.nbytes, _device(slab)[1], "")]
        return self.call("register", self.nixl.register_memory, memory, _device(slab)[0])

    def deregister(self, memory: Any) -> None:
        self.call("deregister", self.nixl.deregister_memory, memory)

    def post(self, what: str, local: Any, remote: Any, to: str, note: bytes = b"") -> Any:
        """Start a transfer of one descriptor a side, ``(address, bytes, device)`` behind the kind of memory.

        Returns its handle, or None if it is done already.
        """
        descriptors = [self.nixl.get_xfer_descs([place], kind) for kind, place in (local, remote)]
        handle = self.call(what, self.nixl.initialize_xfer, what, *descriptors, to, note)
        try:
            done = self.is_done(what, self.nixl.transfer, handle)
        except TransferError:
            self.release(handle)
            raise
        if done:
            self.release(handle)
        return None if done else handle

    def check(self, what: str, handle: Any) -> bool:
        """Whether a transfer is done."""
        return self.is_done(what, self.nixl.check_xfer_state, handle)

    def is_done(self, what: str, function: Callable[..., str], handle: Any) -> bool:
        state = self.call(what, function, handle)
        if state not in ("DONE", "PROC"):
            raise TransferError(f"{self._name}: {what}: NIXL's state is {state}")
        return state == "DONE"

    def release(self, handle: Any) -> None:
        """Give a handle back; one that NIXL does not take yet, it takes when its agent ends."""
        with contextlib.suppress(*self._errors):
            handle.release()


def _device(slab: Slab) -> tuple[str, int]:
    """NIXL's names for a slab's kind of memory and its device."""
    kind, _, number = slab.device.partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number))


def place(slab: Slab, part: Slice) -> tuple[str, tuple[int, int, int]]:
    """A descriptor of a slice."""
    kind, device = _device(slab)
    return kind, (slab.address + part[0], part[1], device)


@dataclass
class Reached(Peer):
    """A peer of NIXL, and the transfers with it that are under way."""

    ops: set[_Op] = field(default_factory=set)
    #: No write of it can land any more.
    fenced: bool = False


R = TypeVar("R", bound=Reached)


class Transfers(Ends[R]):
    """Ends of NIXL: one agent, its registered slab, and transfers of one descriptor a side."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name)
        self._agent = Agent(self.name, backend)
        self._memory: Any = None

    def register(self, slab: Slab) -> None:
        self._take_slab(slab)
        self._memory = self._agent.register(slab)

    def _start(
        self, what: str, far: R, local: Slice, remote: tuple[str, tuple[int, int, int]], to: str, note: bytes = b""
    ) -> Op:
        handle = self._guarded(far, self._agent.post, what, place(self.slab, local), remote, to, note)
        op = _Op(self, far, what, handle)
        if handle is not None:
            far.ops.add(op)
        return op

    def _guarded(self, far: Reached, function: Callable[..., T], *arguments: Any) -> T:
        """Call the agent; whatever fails on the way to a peer loses it."""
        try:
            return function(*arguments)
        except TransferError as error:
            far.fenced = far.fenced or isinstance(error, PeerLostError)
            far.lost = far.lost or str(error)
            raise PeerLostError(str(error), peer=far.card.name) from None

    def _settled(self, far: R) -> bool:
        """Whether no transfer with a peer is under way."""
        for op in list(far.ops):
            op.settle()
        return not far.ops


class _Op:
    """A transfer under way."""

    __slots__ = ("_failed", "_far", "_handle", "_what", "_wire")

    def __init__(self, wire: Transfers[Any], far: Reached, what: str, handle: Any) -> None:
        self._wire, self._far, self._what, self._handle = wire, far, what, handle
        self._failed = False

    def query(self) -> bool:
        if self._handle is not None:
            self.settle()
        if self._failed:
            raise PeerLostError(f"{self._far.card.name} is lost: {self._far.lost}", peer=self._far.card.name)
        return self._handle is None

    def settle(self) -> None:
        """Look whether it is over, one way or the other."""
        agent = self._wire._agent
        try:
            if not self._wire._guarded(self._far, agent.check, self._what, self._handle):
                return
        except PeerLostError:
            self._failed = True
        agent.release(self._handle)
        self._handle = None
        self._far.ops.discard(self)


@dataclass
class _Far(Reached):
    """A peer: how many notes it was sent, how many of its notes were taken, and those that wait for an earlier one."""

    sent: int = 0
    taken: int = 0
    early: dict[int, bytes] = field(default_factory=dict)
    #: It has asked this side to stop; it was told that this side has ended the connection.
    asked: bool = False
    told: bool = False


def nixl(name: str, *, backend: str = "UCX", drop_seconds: float = 5.0) -> _Nixl:
    """A wire on NIXL.

    Parameters
    ----------
    name : str
    backend : str
        One of NIXL's for memory: ``UCX``, ``LIBFABRIC``.
    drop_seconds : float
        How long `Wire.drop` and `Wire.close` wait for peers that do not answer.

    Notes
    -----
    *Fence.*  Neither removing a remote agent nor deregistering memory stops a peer that lives: over TCP and between
    processes of a host its puts still land.  So ``drop`` asks the peer's wire, which ends its transfers and answers when it
    polls.  A peer that is there and does not poll makes ``drop`` a `TransferTimeoutError`.
    A peer whose connection NIXL reports as broken counts as ended.

    *Order.*  NIXL delivers a put's note with the put and other notes at once; the wire numbers and orders them.

    *Progress.*  NIXL's own thread is not used: it keeps a core busy, for each agent.  `Wire.poll` and `Op.query` do its work, on
    both sides.

    *Time.*  Where no adapter carries the bytes, a put copies them before it returns.
    """
    return _Nixl(name, backend, drop_seconds)


class _Nixl(Transfers[_Far]):
    transport = "nixl"

    def __init__(self, name: str, backend: str, drop_seconds: float) -> None:
        super().__init__(name, backend)
        self._drop_seconds = drop_seconds
        self._strangers: list[tuple[str, bytes]] = []
        self._ready: list[tuple[str, bytes]] = []
        self._closed = False
        self._unsure = ""  # why a peer may still write, although this side is closed
        #: Peers that were dropped, and when: some ask again, because an answer was lost.
        self._leaving: list[tuple[float, str]] = []

    def card(self) -> bytes:
        metadata = self._agent.call("card", self._agent.nixl.get_agent_metadata)
        return Card(self.name, self.slab, metadata).write(self.transport)

    def connect(self, card: bytes) -> str:
        held = self._read(card)
        if held.name in self._peers:
            return held.name
        self._forget()
        try:
            name = self._agent.call("connect", self._agent.nixl.add_remote_agent, held.data)
        except (TransferError, ValueError) as error:
            # NIXL may have kept half of them, and then refuses the right ones: a card's sum keeps damaged ones away from it.
            raise BindError(f"card of {held.name}: NIXL does not take its data: {error}") from None
        name = name.decode() if isinstance(name, bytes) else name
        if name != held.name:
            if name not in self._peers:
                self._agent.nixl.remove_remote_agent(name)
            raise BindError(f"card of {held.name}: its data are of another agent, {name!r:.140}")
        self._peers[name] = _Far(held)
        kept, self._strangers = self._strangers, []
        for sender, note in kept:
            self._take(sender, note)
        return name

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        far = self._check(peer, local, remote, note)
        there = place(far.card.slab, remote)
        return self._start("WRITE", far, local, there, peer, self._numbered(far, note) if note else b"")

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        far = self._check(peer, local, remote)
        return self._start("READ", far, local, place(far.card.slab, remote), peer)

    def note(self, peer: str, note: bytes) -> None:
        self._check_note(note)
        far = self._peer(peer)
        self._send(far, self._numbered(far, note))

    def poll(self) -> list[tuple[str, bytes]]:
        if not self._closed:
            self._progress()
        ready, self._ready = self._ready, []
        return [note for note in ready if not self._peers[note[0]].lost]

    def drop(self, peer: str) -> None:
        if peer in self._peers:
            self._fence({peer: self._peers[peer]}, "it was dropped")

    def close(self) -> None:
        if self._unsure:
            raise TransferTimeoutError(self._unsure)
        if self._closed:
            return
        try:
            self._fence(self._peers, "this side is closed")
        except TransferTimeoutError as error:
            _WRITABLE.append(self.slab)
            self._unsure = str(error)
            raise
        finally:
            self._closed = True
            if self._memory is not None:
                self._agent.deregister(self._memory)
            del self._agent.nixl

    # ---- notes -------------------------------------------------------------------------------------------------------

    def _send(self, far: _Far, note: bytes) -> None:
        self._guarded(far, self._agent.call, "note", self._agent.nixl.send_notif, far.card.name, note)

    def _numbered(self, far: _Far, note: bytes) -> bytes:
        far.sent += 1
        return _HEAD.pack(_NOTE, far.sent - 1) + note

    def _progress(self) -> None:
        """Take what came, send what is due, and answer peers that ended the connection."""
        came = self._agent.call("poll", self._agent.nixl.get_new_notifs)
        for sender, notes in came.items():
            for note in notes:
                self._take(sender, note)
        for far in self._peers.values():
            self._settled(far)  # NIXL sends the note of a put when it is looked at
            if far.asked:
                self._answer(far)

    def _take(self, sender: str, message: bytes) -> None:
        """One message of a peer: a note that is the next in line goes up, with those that waited for it."""
        far = self._peers.get(sender)
        if len(message) < _HEAD.size:
            return  # no wire of kvbm sends it
        if far is None:
            if len(self._strangers) < _STRANGERS:
                self._strangers.append((sender, message))
            return
        kind, number = _HEAD.unpack_from(message)
        if kind == _BYE:  # it writes no more, and asks for the same
            far.fenced = far.asked = True
            far.lost = far.lost or "it has ended the connection"
        elif kind == _GONE:
            far.fenced = True
        elif kind == _NOTE and number >= far.taken:
            far.early[number] = message[_HEAD.size :]
            while far.taken in far.early:
                self._ready.append((sender, far.early.pop(far.taken)))
                far.taken += 1

    # ---- the fence ---------------------------------------------------------------------------------------------------

    def _answer(self, far: _Far) -> None:
        """Tell a peer that asked that nothing more is written to it, once that is so."""
        if self._settled(far):
            far.asked = False
            with contextlib.suppress(PeerLostError):
                self._send(far, _HEAD.pack(_GONE, 0))

    def _fence(self, peers: dict[str, _Far], why: str) -> None:
        """End connections from this side: return when no write of these peers can land."""
        for far in peers.values():
            far.lost = far.lost or why
        open_ = dict(peers)
        late, turns = deadline(self._drop_seconds), 0
        while True:
            for name, far in list(open_.items()):
                if self._settled(far):
                    # Again and again: so the end of a process is noticed.
                    if not far.told or (not far.fenced and turns % 64 == 0):
                        far.told = True
                        with contextlib.suppress(PeerLostError):
                            self._send(far, _HEAD.pack(_BYE, 0))
                    if far.fenced:
                        del open_[name]
                        self._leaving.append((time.monotonic(), name))
            if not open_:
                return
            if late():
                raise TransferTimeoutError(
                    f"{self.name}: no answer of {', '.join(open_)} within {self._drop_seconds} s; they may still write to what "
                    "they were granted: do not use it for something else, and drop again"
                )
            turns += 1
            time.sleep(0.0001 if turns < 100 else 0.002)
            self._progress()

    def _forget(self) -> None:
        """Remove peers that were dropped so long ago that they have their answer."""
        while self._leaving and self._leaving[0][0] + self._drop_seconds < time.monotonic():
            _, name = self._leaving.pop(0)
            with contextlib.suppress(TransferError):
                self._agent.call("drop", self._agent.nixl.remove_remote_agent, name)
