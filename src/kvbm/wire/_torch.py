"""`torch`: a wire on torch.distributed, with gloo for host memory and NCCL for GPU memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, Literal

from .._arguments import quoted, require_a, seconds
from ..errors import BindError, MissingPackageError, PeerLostError, TransferTimeoutError
from .protocol import NOTE_BYTES, Ends, Op, Peer, Slab, Slice, deadline, inside

#: Header of a message: kind, bytes of its note, a slice of the receiver's slab, the number of a get.  The note follows, padded so
#: that all messages have the same size.
_HEAD = struct.Struct("<BxHxxxxQQQ")
_HEAD_BYTES: Final = _HEAD.size + NOTE_BYTES
_NOTE, _PUT, _ASK, _ANSWER = range(4)
#: Time limit of gloo.  It has no value for "never", and a connection that times out is broken.
_FOREVER: Final = timedelta(days=365)
#: Tags of gloo: headers, slices, the empty messages after each of them, the empty receipt of each message, end of a connection,
#: watch for that end, the first message.
_HEADS, _SLICES, _HEAD_TAILS, _SLICE_TAILS, _RECEIPTS, _ABORT, _WATCH, _HELLO = range(8)
#: Most messages that are sent before the receipt of the first has come.
_WINDOW: Final = 2


def torch(
    name: str, store: Any, *, backend: Literal["gloo", "nccl"] = "gloo", meet_seconds: float = 60.0,
    drop_seconds: float = 5.0,
) -> _Torch:  # fmt: skip
    """A wire on torch.distributed.

    Parameters
    ----------
    name : str
        Name of this end.
    store : torch.distributed.Store
        A store that all peers can access, such as a ``TCPStore``.  Two ends use it only until they are connected.  Each connection
        uses a clone of the store (torch 2.8 and newer), so other waits in the store do not delay it.
    backend : str
        Transport of slices: ``"gloo"`` for host memory, ``"nccl"`` for GPU memory.  Notes always use gloo.
    meet_seconds : float
        A peer is lost if it has not connected this many seconds after this side connected to it.
    drop_seconds : float
        Longest time that `Wire.drop` waits for the thread that receives.

    Notes
    -----
    Each pair of ends has a separate process group, so a lost peer does not affect others.  Each peer has a thread that sends and a
    thread that receives.  The latter receives the header of a message, then the slice into the slab, delivers the note, and sends a
    receipt: then the put is done.

    If a connection ends, gloo ends the waits for messages that have not begun, but not those for messages of which a part was sent
    or received.  No part of an empty message is sent alone.  So the threads wait for empty messages only: one follows each header
    and each slice, and one is the receipt.

    If a transfer of NCCL is aborted, the connection to the peer is lost.
    """
    return _Torch(name, store, backend, meet_seconds, drop_seconds)


class _Torch(Ends["_Far"]):
    def __init__(self, name: str, store: Any, backend: str, meet_seconds: float, drop_seconds: float) -> None:
        super().__init__(name)
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            raise MissingPackageError(f"this wire needs torch ({error}): pip install torch") from None
        if not hasattr(distributed.Store, "clone"):
            raise MissingPackageError(f"this wire needs torch 2.8 or newer, found {torch.__version__}: pip install -U torch")
        require_a(distributed.Store, f"{name}: store", store, "a store of torch.distributed")
        for what, given in (("meet_seconds", meet_seconds), ("drop_seconds", drop_seconds)):
            seconds(f"{name}: {what}", given)
        if not isinstance(backend, str) or str.__str__(backend) not in ("gloo", "nccl"):  # type: ignore[redundant-expr]
            raise BindError(f"{name}: backend: expected 'gloo' or 'nccl', got {quoted(backend, 40)}")
        self.transport = f"torch/{backend}"
        self._torch: Any = torch
        self._distributed: Any = distributed
        self._store, self._nccl = store, backend == "nccl"
        self._meet_seconds, self._drop_seconds = meet_seconds, drop_seconds
        self._inbox: deque[tuple[str, bytes]] = deque()
        self.news: Callable[[], object] = int
        self._device: Any = None
        atexit.register(self.close)  # a thread that still waits in gloo at exit would abort the process

    def register(self, slab: Slab) -> None:
        if (slab.device == "cpu") is self._nccl:
            fits = (
                "GPUs; use backend='gloo' for host memory"
                if self._nccl
                else "hosts; use backend='nccl' for GPU memory"
            )
            raise BindError(f"{self.name}: {self.transport} carries memory of {fits}, got {slab.device}")
        super().register(slab)

    def connect(self, card: bytes) -> str:
        peer_card = self._read(card)
        if peer_card.name not in self._peers:
            if self._device is None:  # one thread of gloo serves all peers
                self._device = self._distributed.ProcessGroupGloo.create_default_device()
            far = self._peers[peer_card.name] = _Far(peer_card)
            far.start(self._receive)
        return peer_card.name

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        far = self._check(peer, local, remote, note)
        return self._queue(far, _PUT, note, remote, local)

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        far = self._check(peer, local, remote)
        number = next(far.numbers)
        op = far.gets[number] = _Op(far, local)
        self._queue(far, _ASK, b"", remote, number=number)
        return op

    def note(self, peer: str, note: bytes) -> None:
        self._check_note(note)
        self._queue(self._peer(peer), _NOTE, note)

    def poll(self) -> list[tuple[str, bytes]]:
        if not self._inbox:
            time.sleep(0)  # polling in a loop would keep Python's lock from the threads that receive
        came = [self._inbox.popleft() for _ in range(len(self._inbox))]
        return [note for note in came if not self._peers[note[0]].lost]

    def on_news(self, call: Callable[[], object]) -> None:
        self.news = call

    def drop(self, peer: str, seconds: float | None = None) -> None:
        if peer in self._peers:
            self._end([self._peers[peer]], "it was dropped", seconds)

    def close(self) -> None:
        self.is_closed = True
        atexit.unregister(self.close)
        self._end(list(self._peers.values()), "this side is closed")
        late = deadline(2 * self._meet_seconds + self._drop_seconds)  # also wait for a peer that ended while both connected
        while any(thread.is_alive() for far in self._peers.values() for thread in far.threads) and not late():
            time.sleep(0.001)

    def _end(self, peers: list[_Far], why: str, seconds: float | None = None) -> None:
        seconds = self._drop_seconds if seconds is None else seconds
        end = time.monotonic() + seconds
        for far in peers:
            far.lose(why)
        for far in peers:
            if not far.writing.acquire(timeout=max(end - time.monotonic(), 0.0)):
                raise TransferTimeoutError(
                    f"{self.name}: a receive from {far.card.name} still runs after {seconds} s; it may still write "
                    "to the memory that the peer was granted: do not reuse this memory, and call drop again"
                )
            far.writing.release()

    # ---- the peer's threads ------------------------------------------------------------------------------------------

    def _queue(
        self, far: _Far, kind: int, note: bytes, at: tuple[int, int] = (0, 0), data: Slice | None = None,
        number: int = 0,
    ) -> _Op:  # fmt: skip
        """Queue a message for the thread that sends."""
        op = _Op(far, data)
        head = _HEAD.pack(kind, len(note), *at, number) + note
        far.queue.put((bytearray(head.ljust(_HEAD_BYTES, b"\0")), op))
        if far.lost:  # the thread may have ended already
            far.drain()
        return op

    def _meet(self, far: _Far) -> bool:
        """Wait until the peer has connected, too, and create the group of both.  False if the connection ended before."""
        names = sorted((self.name, far.card.name))
        # A separate store: while one thread waits for a key, other threads of the process cannot use the store, so two processes
        # could wait for each other.
        store = self._distributed.PrefixStore(f"kvbm/{self.transport}/{'/'.join(names)}", self._store.clone())
        store.set(self.name, b"here")
        pause, late = 0.001, deadline(self._meet_seconds)
        while not store.check([far.card.name]):
            if far.lost:
                return False
            if late():
                raise PeerLostError(f"it has not connected to {self.name} within {self._meet_seconds} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        rank = names.index(self.name)
        far.rank = 1 - rank
        options = self._distributed.ProcessGroupGloo._Options()
        options._devices, options._threads = [self._device], 1
        options._timeout = timedelta(seconds=self._meet_seconds / 5)  # gloo tries five times
        end = time.monotonic() + self._meet_seconds
        group = self._distributed.ProcessGroupGloo(store, rank, 2, options)
        with far.ending:  # from here on, ending the connection aborts the waits below
            if far.lost:
                return False
            far.group = group
        # gloo may have connected to a peer that has given up meanwhile, and would wait for it forever.
        hello = [self._torch.zeros(1, dtype=self._torch.uint8) for _ in range(2)]
        for work in group.send([hello[0]], far.rank, _HELLO), group.recv([hello[1]], far.rank, _HELLO):
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        if self._nccl:  # one per direction: the two sides need no common order
            far.carriers = [
                self._distributed.ProcessGroupNCCL(self._distributed.PrefixStore(way, store), rank, 2, _FOREVER)
                for way in ("0→1", "1→0")[:: 1 - 2 * rank]
            ]
            far.start(_Far.watch)
        return not far.lost

    def _receive(self, far: _Far) -> None:
        """The peer's receiving thread, from the connection to its end."""
        try:
            if not self._meet(far):
                return
            far.start(self._send)
            receipts: deque[Any] = deque(maxlen=_WINDOW)  # older ones have arrived, or the peer would not send another message
            head, works = self._await_head(far)
            while not far.lost:
                works[-1].wait(_FOREVER)
                message = bytes(head)
                head, works = self._await_head(far)  # receive the next header while the slice arrives
                self._take(far, message)
                receipts.append(self._empty(far, "send", _RECEIPTS))
        except Exception as error:
            far.lose(f"{type(error).__name__}: {error}")
        finally:
            far.lose("its thread has ended")
            far.drain()
            far.release()
            self.news()

    def _await_head(self, far: _Far) -> tuple[bytearray, list[Any]]:
        """Receive a header; return its memory, and the works to keep until the last one is done."""
        head = bytearray(_HEAD_BYTES)
        work = far.group.recv([self._torch.frombuffer(head, dtype=self._torch.uint8)], far.rank, _HEADS)
        return head, [work, self._empty(far, "recv", _HEAD_TAILS)]

    def _empty(self, far: _Far, way: Literal["send", "recv"], tag: int) -> Any:
        return getattr(far.group, way)([self._torch.empty(0, dtype=self._torch.uint8)], far.rank, tag)

    def _take(self, far: _Far, message: bytes) -> None:
        """Handle one message.  Its fields are checked, as it comes from another process."""
        kind, size, offset, nbytes, number = _HEAD.unpack_from(message)
        note = message[_HEAD.size : _HEAD.size + size]
        if kind == _ASK:
            inside(Slice(offset, nbytes), self.slab.nbytes, f"{far.card.name} reads: a")
            self._queue(far, _ANSWER, b"", data=Slice(offset, nbytes), number=number)
        elif kind in (_PUT, _ANSWER):
            got = far.gets[number] if kind == _ANSWER else None  # removed when it is done, so it fails if the connection breaks
            part = got.data if got is not None else Slice(offset, nbytes)
            assert part is not None
            inside(part, self.slab.nbytes, f"{far.card.name} writes: a")
            with far.writing:
                if far.lost:
                    raise PeerLostError(far.lost)  # no receipt of a slice that is not received
                work = self._carry(far, "recv", part)
                (work if self._nccl else self._empty(far, "recv", _SLICE_TAILS)).wait(_FOREVER)
            if got is not None:
                got.done = True
                far.gets.pop(number, None)
                self.news()
        elif kind != _NOTE:
            raise BindError(f"{far.card.name}: unknown message of kind {kind}; both sides need the same version of kvbm")
        if kind == _NOTE or size:
            self._inbox.append((far.card.name, note))
            self.news()

    def _send(self, far: _Far) -> None:
        """The peer's sending thread.  It sends messages in order, some of them before the receipts of those before have come."""
        going: deque[tuple[_Op, list[Any], list[Any]]] = deque()  # with the works to wait for, and those to keep until then
        try:
            while not far.lost:
                if len(going) == _WINDOW or (going and far.queue.empty()):
                    op, waits, _ = going[0]
                    for work in waits:
                        work.wait(_FOREVER)
                    op.done = True
                    self.news()
                    going.popleft()
                elif (item := far.queue.get()) is not None:
                    message, op = item
                    going.append((op, [], []))  # first, so that it fails if one of these calls fails
                    _, waits, kept = going[-1]
                    waits.append(self._empty(far, "recv", _RECEIPTS))
                    head = self._torch.frombuffer(message, dtype=self._torch.uint8)
                    kept.append(far.group.send([head], far.rank, _HEADS))
                    kept.append(self._empty(far, "send", _HEAD_TAILS))
                    if op.data is not None:
                        (waits if self._nccl else kept).append(self._carry(far, "send", op.data))
                        if not self._nccl:
                            kept.append(self._empty(far, "send", _SLICE_TAILS))
        except Exception as error:
            far.lose(f"{type(error).__name__}: {error}")
        finally:
            for op, _, _ in going:
                op.failed = True
            far.drain()

    def _carry(self, far: _Far, way: Literal["send", "recv"], part: Slice) -> Any:
        """Send or receive a slice of the slab; return the work to wait for."""
        data = _tensor(Slab(self.slab.address + part[0], part[1], self.slab.device))
        if not self._nccl:
            return getattr(far.group, way)([data], far.rank, _SLICES)
        cuda = self._torch.cuda
        with cuda.stream(cuda.Stream(data.device)):
            getattr(far.carriers[way == "recv"], way)([data], far.rank, 0).wait()
            event = cuda.Event()
            event.record()
        return _Recorded(event, far)


class _Recorded:
    """Work of NCCL with an event after it on its stream."""

    def __init__(self, event: Any, far: _Far) -> None:
        self._event, self._far = event, far

    def wait(self, _: timedelta) -> None:
        while not self._event.query():
            if self._far.lost:
                raise PeerLostError(self._far.lost)
            time.sleep(0.00002)


@dataclass
class _Far(Peer):
    """A peer: its process group, and messages to it."""

    rank: int = 0
    group: Any = None
    #: Groups of NCCL: one to send, one to receive.
    carriers: list[Any] = field(default_factory=list)
    queue: SimpleQueue[tuple[bytearray, _Op] | None] = field(default_factory=SimpleQueue)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    gets: dict[int, _Op] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    #: Held during a receive into the slab.
    writing: Any = field(default_factory=threading.Lock)
    #: Held while the connection is ended.
    ending: Any = field(default_factory=threading.Lock)

    def start(self, function: Callable[[_Far], None]) -> None:
        thread = threading.Thread(target=function, args=(self,), name=f"kvbm wire {self.card.name}", daemon=True)
        self.threads.append(thread)
        thread.start()

    def lose(self, why: str) -> None:
        """End the connection; threads that wait for the peer wake up.  The peer is lost when gloo no longer uses the slab."""
        with self.ending:
            if self.lost:
                return
            for carrier in self.carriers:
                with contextlib.suppress(Exception):
                    carrier.abort()
            if self.group is not None:
                import torch

                # If one receive times out, gloo breaks the connection for all other waits and for the peer.
                with contextlib.suppress(RuntimeError):
                    abort = self.group.recv([torch.zeros(1, dtype=torch.uint8)], self.rank, _ABORT)
                    abort.wait(timedelta(milliseconds=1))
            self.lost = why
            self.queue.put(None)

    def release(self) -> None:
        """Release the group and its connection to the store.  The record of a lost peer is kept, for its name."""
        with self.ending:
            self.group = None

    def drain(self) -> None:
        """Fail the queued messages and the open gets."""
        with contextlib.suppress(Empty):
            while True:
                if (item := self.queue.get_nowait()) is not None:
                    item[1].failed = True
        self.queue.put(None)  # wakes the sending thread
        for op in list(self.gets.values()):
            op.failed = True

    def watch(self) -> None:
        """Notice the end of a peer while NCCL waits for it."""
        import torch

        if (group := self.group) is not None:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1, dtype=torch.uint8)], self.rank, _WATCH).wait(_FOREVER)
        self.lose("its connection has ended")


class _Op:
    """A message that is being sent, or a get."""

    __slots__ = ("data", "done", "failed", "far")

    def __init__(self, far: _Far, data: Slice | None) -> None:
        self.far, self.data = far, data
        self.done = self.failed = False

    def query(self) -> bool:
        if self.failed:
            raise PeerLostError(f"{self.far.card.name} is lost: {self.far.lost}", peer=self.far.card.name)
        return self.done


def _tensor(slab: Slab) -> Any:
    """A slab as a tensor of bytes."""
    import torch

    if slab.device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * slab.nbytes).from_address(slab.address), dtype=torch.uint8)

    class Memory:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (slab.nbytes,), "typestr": "|u1", "data": (slab.address, False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device=slab.device)
