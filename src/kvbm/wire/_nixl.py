"""`nixl`: a wire on NIXL, between processes and machines, for host memory and GPU memory."""

from __future__ import annotations

import contextlib
import importlib
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from .._arguments import quoted, require_a
from ..errors import (
    BindError,
    KvbmError,
    MissingPackageError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
    printable,
)
from .protocol import Card, Ends, Op, Peer, Slab, Slice, deadline

T = TypeVar("T")

#: Header of a note: its kind, and its number among the sender's notes to this peer.
_HEAD = struct.Struct("<BQ")
_NOTE, _BYE, _GONE = 0, 1, 2
#: Most notes that are kept from senders to which this side has not connected.
_STRANGERS: Final = 4096
#: Slabs of closed wires to which a peer may still write: their memory is never reused.
_WRITABLE: list[Slab] = []
#: Backend → what else it needs than the wheel.
_NEEDS: Final = {
    "OBJ": "; that of nixl_cu13 needs libcuobjclient.so.1 of CUDA 13.1, that of nixl_cu12 does not: import nixl_cu12 first",
}


def _variant() -> str:
    """NIXL's package: a variant that the program has imported already, as one process holds only one, or NIXL's own choice."""
    return next((name for name in ("nixl", "nixl_cu13", "nixl_cu12") if name in sys.modules), "nixl")


class Agent:
    """An agent of NIXL: memory, transfers, and NIXL's exceptions converted to kvbm's."""

    def __init__(self, name: str, backend: str, parameters: Mapping[str, str] | None = None) -> None:
        require_a(str, f"{name}: backend", backend, "the name of a backend of NIXL, such as 'UCX'")
        for key, value in (parameters or {}).items():
            require_a(str, f"{name}: {key}", value, "a text")
        try:
            _api, _bindings = (importlib.import_module(f"{_variant()}.{part}") for part in ("_api", "_bindings"))
        except ImportError as error:
            raise MissingPackageError(f"this wire needs NIXL ({error}): pip install 'kvbm-layouts[nixl]'") from None
        kinds = [getattr(_bindings, kind) for kind in dir(_bindings) if kind.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = tuple(kinds)
        self._disconnected: tuple[type[Exception], ...] = (_bindings.nixlRemoteDisconnectError,)
        self._name, self._backend = name, backend
        config = _api.nixl_agent_config(enable_prog_thread=False, backends=[] if parameters else [backend])
        self.nixl: Any = self.call("agent", _api.nixl_agent, name, config)
        why = ""
        if parameters:
            try:
                self.call("backend", self.nixl.create_backend, backend, dict(parameters))
            except TransferError as error:
                why = f" ({error})"
        if backend not in self.nixl.backends:
            others = ", ".join(sorted({*self.nixl.plugin_list} - {backend}))
            raise KvbmError(
                f"{name}: {_api.__package__} cannot start backend {printable(backend, 60)} here{why}{_NEEDS.get(backend, '')}; "
                f"others are {others}"
            )

    def call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call NIXL.  Raises `PeerLostError` if the peer is gone, and `TransferError` for its other errors."""
        try:
            return function(*arguments)
        except self._disconnected as error:
            raise PeerLostError(f"{self._name}: {what}: {error}") from None
        except self._errors as error:
            raise TransferError(f"{self._name}: {what}: {error}") from None

    def register(self, slab: Slab) -> Any:
        """Register memory; return the argument for `deregister`."""
        memory = [(slab.address, slab.nbytes, _device(slab)[1], "")]
        return self.call("register", self.nixl.register_memory, memory, _device(slab)[0])

    def deregister(self, memory: Any) -> None:
        self.call("deregister", self.nixl.deregister_memory, memory)

    def post(self, what: str, local: Any, remote: Any, to: str, note: bytes = b"") -> Any:
        """Start a transfer; return its handle, or None if it is already done.

        Each side has one descriptor: the kind of memory, then ``(address, bytes, device)``.
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
        """True if a transfer is done."""
        return self.is_done(what, self.nixl.check_xfer_state, handle)

    def is_done(self, what: str, function: Callable[..., str], handle: Any) -> bool:
        state = self.call(what, function, handle)
        if state not in ("DONE", "PROC"):
            raise TransferError(f"{self._name}: {what}: expected NIXL's state DONE or PROC, got {state}")
        return state == "DONE"

    def release(self, handle: Any) -> None:
        """Release a handle.  If NIXL refuses, it releases the handle when its agent ends."""
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
    """A peer of NIXL, and its running transfers."""

    ops: set[_Op] = field(default_factory=set)
    #: True if the peer can no longer write.
    fenced: bool = False


R = TypeVar("R", bound=Reached)


class Transfers(Ends[R]):
    """Ends of NIXL: one agent, its registered slab, and transfers with one descriptor per side."""

    def __init__(self, name: str, backend: str, parameters: Mapping[str, str] | None = None) -> None:
        super().__init__(name)
        self._agent = Agent(self.name, backend, parameters)
        self._memory: Any = None

    def register(self, slab: Slab) -> None:
        super().register(slab)
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
        """Call the agent.  If a call for a peer fails, the peer is lost."""
        try:
            return function(*arguments)
        except TransferError as error:
            far.fenced = far.fenced or isinstance(error, PeerLostError)
            why = str(error) + self._why(far.card.name)
            far.lost = far.lost or why
            raise PeerLostError(f"{far.card.name} is lost: {why}", peer=far.card.name) from None

    def _why(self, peer: str) -> str:  # noqa: ARG002
        """What NIXL's error about a peer does not say."""
        return ""

    def _settled(self, far: R) -> bool:
        """True if no transfer with a peer is running."""
        for op in list(far.ops):
            op.settle()
        return not far.ops


class _Op:
    """A running transfer."""

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
        """Check whether the transfer has ended, with or without success."""
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
    """A peer: numbers of notes sent and delivered, and received notes that wait for an earlier one."""

    sent: int = 0
    delivered: int = 0
    early: dict[int, bytes] = field(default_factory=dict)
    #: The peer has asked this side to end the connection; this side has sent its end to the peer.
    wants_end: bool = False
    is_bye_sent: bool = False


def nixl(name: str, *, backend: str = "UCX", drop_seconds: float = 5.0) -> _Nixl:
    """A wire on NIXL.

    Parameters
    ----------
    name : str
        Name of this end.
    backend : str
        A memory backend of NIXL: ``UCX``, ``LIBFABRIC``.
    drop_seconds : float
        How long `Wire.drop` and `Wire.close` wait for peers that do not answer.

    Notes
    -----
    *Fence.*  Removing a remote agent or deregistering memory does not stop a running peer: over TCP and between processes of a host
    its puts still arrive.  So ``drop`` asks the peer's wire, which ends its transfers and answers when it polls.  If the peer runs
    but does not poll, ``drop`` raises `TransferTimeoutError`.  If NIXL reports a connection as broken, its peer counts as ended.

    *Progress.*  NIXL's own thread is not used, as it keeps one core busy per agent.  `Wire.poll` and `Op.query` do its work, on
    both sides.
    """
    return _Nixl(name, backend, drop_seconds)


class _Nixl(Transfers[_Far]):
    transport = "nixl"

    def __init__(self, name: str, backend: str, drop_seconds: float) -> None:
        super().__init__(name, backend)
        self._drop_seconds = drop_seconds
        self._strangers: list[tuple[str, bytes]] = []
        self._ready: list[tuple[str, bytes]] = []
        self._unsure = ""  # why a peer may still write after this side was closed
        #: Dropped peers → time.  They may ask again, if an answer was lost.
        self._leaving: list[tuple[float, str]] = []

    def card(self) -> bytes:
        metadata = self._agent.call("card", self._agent.nixl.get_agent_metadata)
        return Card(self.name, self.slab, metadata).write(self.transport)

    def connect(self, card: bytes) -> str:
        peer_card = self._read(card)
        if peer_card.name in self._peers:
            return peer_card.name
        self._forget()
        try:
            name = self._agent.call("connect", self._agent.nixl.add_remote_agent, peer_card.data)
        except (TransferError, ValueError) as error:
            # NIXL may have stored a part of the data, and then refuses the right data.  The checksum of cards prevents this.
            raise BindError(f"card of {peer_card.name}: NIXL refuses its data: {error}") from None
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer_card.name:
            if name not in self._peers:
                self._agent.nixl.remove_remote_agent(name)
            raise BindError(f"card of {peer_card.name}: expected data of this agent, got those of {quoted(name, 140)}")
        self._peers[name] = _Far(peer_card)
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
        if not self.is_closed:
            self._progress()
        ready, self._ready = self._ready, []
        return [note for note in ready if not self._peers[note[0]].lost]

    def drop(self, peer: str, seconds: float | None = None) -> None:
        if peer in self._peers:
            self._fence({peer: self._peers[peer]}, "it was dropped", seconds)

    def close(self) -> None:
        if self._unsure:
            raise TransferTimeoutError(self._unsure)
        if self.is_closed:
            return
        try:
            self._fence(self._peers, "this side is closed")
        except TransferTimeoutError as error:
            _WRITABLE.append(self.slab)
            self._unsure = str(error)
            raise
        finally:
            self.is_closed = True
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
        """Handle received messages, send queued ones, and answer peers that ended the connection."""
        came = self._agent.call("poll", self._agent.nixl.get_new_notifs)
        for sender, notes in came.items():
            for note in notes:
                self._take(sender, note)
        for far in self._peers.values():
            self._settled(far)  # NIXL sends the note of a put when its state is queried
            if far.wants_end:
                self._answer(far)

    def _take(self, sender: str, message: bytes) -> None:
        """Handle one message of a peer.  The next note in order is delivered, with the later ones that waited for it."""
        far = self._peers.get(sender)
        if len(message) < _HEAD.size:
            return  # not from a wire of kvbm
        if far is None:
            if len(self._strangers) < _STRANGERS:
                self._strangers.append((sender, message))
            return
        kind, number = _HEAD.unpack_from(message)
        if kind == _BYE:  # the peer no longer writes, and asks this side to stop, too
            far.fenced = far.wants_end = True
            far.lost = far.lost or "it has ended the connection"
        elif kind == _GONE:
            far.fenced = True
        elif kind == _NOTE and number >= far.delivered:
            far.early[number] = message[_HEAD.size :]
            while far.delivered in far.early:
                self._ready.append((sender, far.early.pop(far.delivered)))
                far.delivered += 1

    # ---- the fence ---------------------------------------------------------------------------------------------------

    def _answer(self, far: _Far) -> None:
        """Answer a peer that asked this side to stop, as soon as no write to it is running."""
        if self._settled(far):
            far.wants_end = False
            with contextlib.suppress(PeerLostError):
                self._send(far, _HEAD.pack(_GONE, 0))

    def _fence(self, peers: dict[str, _Far], why: str, seconds: float | None = None) -> None:
        """End connections from this side.  Returns when these peers can no longer write."""
        seconds = self._drop_seconds if seconds is None else seconds
        for far in peers.values():
            far.lost = far.lost or why
        open_ = dict(peers)
        late, turns = deadline(seconds), 0
        while True:
            for name, far in list(open_.items()):
                if self._settled(far):
                    # Repeated, so that the end of a process is noticed.
                    if not far.is_bye_sent or (not far.fenced and turns % 64 == 0):
                        far.is_bye_sent = True
                        with contextlib.suppress(PeerLostError):
                            self._send(far, _HEAD.pack(_BYE, 0))
                    if far.fenced:
                        del open_[name]
                        self._leaving.append((time.monotonic(), name))
            if not open_:
                return
            if late():
                raise TransferTimeoutError(
                    f"{self.name}: no answer of {', '.join(open_)} within {seconds} s; they may still write to the "
                    "memory that they were granted: do not reuse it, and call drop again"
                )
            turns += 1
            time.sleep(0.0001 if turns < 100 else 0.002)
            self._progress()

    def _forget(self) -> None:
        """Remove peers that were dropped so long ago that they must have received the answer."""
        while self._leaving and self._leaving[0][0] + self._drop_seconds < time.monotonic():
            _, name = self._leaving.pop(0)
            with contextlib.suppress(TransferError):
                self._agent.call("drop", self._agent.nixl.remove_remote_agent, name)
