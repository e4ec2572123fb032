"""`torch`: a wire on torch.distributed, by gloo between hosts and by NCCL between GPUs."""

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

from ..errors import BindError, KvbmError, PeerLostError, TransferTimeoutError
from .protocol import NOTE_BYTES, Card, Ends, Op, Peer, Slab, Slice, deadline, inside

__all__ = ["torch"]

#: Each message: what it is, bytes of its note, a slice of the receiver's slab, the number of a get; then the note, and
#: bytes of no meaning up to the same size for all.
_HEAD = struct.Struct("<BxHxxxxQQQ")
_HEAD_BYTES: Final = _HEAD.size + NOTE_BYTES
_NOTE, _PUT, _ASK, _ANSWER = range(4)
#: How long gloo waits: not at all is no choice, and what it gives up on is broken.
_FOREVER: Final = timedelta(days=365)
#: Tags of gloo: heads, slices, what ends a connection, what notices its end, what comes behind each slice, and what comes first.
_HEADS, _SLICES, _ABORT, _WATCH, _TAILS, _HELLO = range(6)


def torch(
    name: str,
    store: Any,
    *,
    backend: Literal["gloo", "nccl"] = "gloo",
    meet_seconds: float = 60.0,
    drop_seconds: float = 5.0,
) -> _Torch:
    """A wire on torch.distributed.

    Parameters
    ----------
    name : str
    store : torch.distributed.Store
        One that all peers reach, such as a ``TCPStore``: here two ends meet.  It is not asked any more once they have met.
        Each meeting uses a clone of its own (torch 2.8 and newer), so whatever else waits in the store holds up none.
    backend : str
        What carries slices: ``"gloo"`` those in host memory, ``"nccl"`` those on GPUs.  Notes go by gloo.
    meet_seconds : float
        A peer that has not connected to this side so long after this side to it is lost.
    drop_seconds : float
        How long `Wire.drop` waits for its own thread.

    Notes
    -----
    Two ends have a process group of their own, so that the end of one is nobody else's.  Per peer a thread sends and a thread
    receives: it takes the head of a message, then posts the receive into the slab, and only then hands on the note.

    *Op.*  A put is done when its bytes have left.  *No hang.*  The end of a process closes its connections: that is noticed at
    once.  The silent end of a machine is not, until TCP gives up.

    A transfer of NCCL that is aborted costs the connection to the peer.
    """
    return _Torch(name, store, backend, meet_seconds, drop_seconds)


class _Torch(Ends["_Far"]):
    def __init__(self, name: str, store: Any, backend: str, meet_seconds: float, drop_seconds: float) -> None:
        super().__init__(name)
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            raise KvbmError(f"this wire needs torch ({error}): pip install torch") from None
        if not hasattr(distributed.Store, "clone"):
            raise KvbmError(f"this wire needs torch 2.8 or newer, found {torch.__version__}: pip install -U torch")
        if backend not in ("gloo", "nccl"):
            raise BindError(f"{name}: backend: expected 'gloo' or 'nccl', got {backend!r:.40}")
        self.transport = f"torch/{backend}"
        self._torch: Any = torch
        self._distributed: Any = distributed
        self._store, self._nccl = store, backend == "nccl"
        self._meet_seconds, self._drop_seconds = meet_seconds, drop_seconds
        self._inbox: deque[tuple[str, bytes]] = deque()
        self.news: Callable[[], object] = int
        self._device: Any = None
        atexit.register(self.close)  # a thread that waits in gloo when Python ends would abort the process

    def register(self, slab: Slab) -> None:
        if (slab.device == "cpu") is self._nccl:
            fits = (
                "GPUs; backend='gloo' carries that of hosts"
                if self._nccl
                else "hosts; backend='nccl' carries that of GPUs"
            )
            raise BindError(f"{self.name}: {self.transport} carries memory of {fits}, got {slab.device}")
        self._take_slab(slab)

    def card(self) -> bytes:
        return Card(self.name, self.slab).write(self.transport)

    def connect(self, card: bytes) -> str:
        held = self._read(card)
        if held.name not in self._peers:
            if self._device is None:  # one thread of gloo serves all peers
                self._device = self._distributed.ProcessGroupGloo.create_default_device()
            far = self._peers[held.name] = _Far(held)
            far.start(self._receive)
        return held.name

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
            time.sleep(0)  # who polls in a loop would keep Python's lock from the threads that receive
        came = [self._inbox.popleft() for _ in range(len(self._inbox))]
        return [note for note in came if not self._peers[note[0]].lost]

    def on_news(self, call: Callable[[], object]) -> None:
        self.news = call

    def drop(self, peer: str) -> None:
        if peer in self._peers:
            self._end([self._peers[peer]], "it was dropped")

    def close(self) -> None:
        atexit.unregister(self.close)
        self._end(list(self._peers.values()), "this side is closed")
        late = deadline(2 * self._meet_seconds + self._drop_seconds)  # a peer that ended while the two met is waited for
        while any(thread.is_alive() for far in self._peers.values() for thread in far.threads) and not late():
            time.sleep(0.001)

    def _end(self, peers: list[_Far], why: str) -> None:
        for far in peers:
            far.lose(why)
        for far in peers:
            if not far.writing.acquire(timeout=self._drop_seconds):
                raise TransferTimeoutError(
                    f"{self.name}: a receive from {far.card.name} goes on after {self._drop_seconds} s; it may still write to "
                    "what the peer was granted: do not use it for something else, and drop again"
                )
            far.writing.release()

    # ---- the peer's threads ------------------------------------------------------------------------------------------

    def _queue(
        self,
        far: _Far,
        kind: int,
        note: bytes,
        at: tuple[int, int] = (0, 0),
        data: Slice | None = None,
        number: int = 0,
    ) -> _Op:
        """Hand a message to the thread that sends."""
        op = _Op(far, data)
        head = _HEAD.pack(kind, len(note), *at, number) + note
        far.queue.put((bytearray(head.ljust(_HEAD_BYTES, b"\0")), op))
        if far.lost:  # its thread may have ended before
            far.drain()
        return op

    def _meet(self, far: _Far) -> bool:
        """Wait for the peer to connect, too, and make the group of the two; whether that was before the end."""
        names = sorted((self.name, far.card.name))
        # A store of its own: one that waits for a key of one peer keeps the other threads of this process from it, and two
        # processes whose threads wait crosswise would wait for each other.
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
        with far.ending:  # who ends it from now on aborts what waits below
            if far.lost:
                return False
            far.group = group
        # gloo is connected to a peer that has given up meanwhile, too, and waits for it without end.
        hello = [self._torch.zeros(1, dtype=self._torch.uint8) for _ in range(2)]
        for work in group.send([hello[0]], far.rank, _HELLO), group.recv([hello[1]], far.rank, _HELLO):
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        if self._nccl:  # one for each direction: the two sides need no common order
            far.carriers = [
                self._distributed.ProcessGroupNCCL(self._distributed.PrefixStore(way, store), rank, 2, _FOREVER)
                for way in ("0→1", "1→0")[:: 1 - 2 * rank]
            ]
            far.start(_Far.watch)
        return not far.lost

    def _receive(self, far: _Far) -> None:
        """Run as the peer's thread: from the meeting to the end."""
        try:
            if not self._meet(far):
                return
            far.start(self._send)
            heads = itertools.cycle([bytearray(_HEAD_BYTES), bytearray(_HEAD_BYTES)])
            head, work = self._await_head(far, next(heads))
            while not far.lost:
                work.wait(_FOREVER)
                message = bytes(head)
                head, work = self._await_head(far, next(heads))  # so it is on its way while the slice is
                self._take(far, message)
        except Exception as error:
            far.lose(f"{type(error).__name__}: {error}")
        finally:
            far.lose("its thread has ended")
            far.drain()
            far.release()
            self.news()

    def _await_head(self, far: _Far, head: bytearray) -> tuple[bytearray, Any]:
        return head, far.group.recv([self._torch.frombuffer(head, dtype=self._torch.uint8)], far.rank, _HEADS)

    def _take(self, far: _Far, message: bytes) -> None:
        """One message: what it names is checked, since it comes from another process."""
        kind, size, offset, nbytes, number = _HEAD.unpack_from(message)
        note = message[_HEAD.size : _HEAD.size + size]
        if kind == _ASK:
            inside(Slice(offset, nbytes), self.slab.nbytes, f"{far.card.name} reads: a")
            self._queue(far, _ANSWER, b"", data=Slice(offset, nbytes), number=number)
        elif kind in (_PUT, _ANSWER):
            got = far.gets[number] if kind == _ANSWER else None  # it stays there until it is done: what breaks off fails
            part = got.data if got is not None else Slice(offset, nbytes)
            assert part is not None
            inside(part, self.slab.nbytes, f"{far.card.name} writes: a")
            with far.writing:
                if far.lost:
                    return
                work = self._carry(far, "recv", part)
                if not self._nccl:
                    # A receive of which a part is here is never ended by gloo, whatever becomes of the peer; one that has
                    # not begun is. So what is waited for is a message of no bytes behind the slice.
                    far.group.recv([self._torch.empty(0, dtype=self._torch.uint8)], far.rank, _TAILS).wait(_FOREVER)
                work.wait(_FOREVER)
            if got is not None:
                got.done = True
                far.gets.pop(number, None)
                self.news()
        elif kind != _NOTE:
            raise BindError(f"{far.card.name}: a message of kind {kind}; both sides need the same kvbm")
        if kind == _NOTE or size:
            self._inbox.append((far.card.name, note))
            self.news()

    def _send(self, far: _Far) -> None:
        """Run as the peer's other thread: one message after the other, two of them under way."""
        going: deque[tuple[_Op, list[Any]]] = deque()
        try:
            while not far.lost:
                if len(going) > 1 or (going and far.queue.empty()):
                    op, works = going[0]
                    for work in works:
                        work.wait(_FOREVER)
                    op.done = True
                    self.news()
                    going.popleft()
                elif (item := far.queue.get()) is not None:
                    message, op = item
                    going.append((op, []))
                    head = self._torch.frombuffer(message, dtype=self._torch.uint8)
                    going[-1][1].append(far.group.send([head], far.rank, _HEADS))
                    if op.data is not None:
                        going[-1][1].append(self._carry(far, "send", op.data))
                        if not self._nccl:
                            tail = self._torch.empty(0, dtype=self._torch.uint8)
                            going[-1][1].append(far.group.send([tail], far.rank, _TAILS))
        except Exception as error:
            far.lose(f"{type(error).__name__}: {error}")
        finally:
            for op, _ in going:
                op.failed = True
            far.drain()

    def _carry(self, far: _Far, way: Literal["send", "recv"], part: Slice) -> Any:
        """Send or receive a slice of the slab; returns what to wait for."""
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
    """Work of NCCL: what comes behind it on its stream."""

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
    #: Groups of NCCL: that by which this side sends, and that by which it receives.
    carriers: list[Any] = field(default_factory=list)
    queue: SimpleQueue[tuple[bytearray, _Op] | None] = field(default_factory=SimpleQueue)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    gets: dict[int, _Op] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    #: Held while something is received into the slab.
    writing: Any = field(default_factory=threading.Lock)
    #: Held while the connection is ended.
    ending: Any = field(default_factory=threading.Lock)

    def start(self, function: Callable[[_Far], None]) -> None:
        thread = threading.Thread(target=function, args=(self,), name=f"kvbm wire {self.card.name}", daemon=True)
        self.threads.append(thread)
        thread.start()

    def lose(self, why: str) -> None:
        """End the connection; threads that wait for the peer wake up."""
        with self.ending:
            if self.lost:
                return
            self.lost = why
            self.queue.put(None)
            for carrier in self.carriers:
                with contextlib.suppress(Exception):
                    carrier.abort()
            if self.group is not None:
                import torch

                # gloo breaks a connection on which one receive has timed out, for all that wait on it and for the peer.
                with contextlib.suppress(RuntimeError):
                    abort = self.group.recv([torch.zeros(1, dtype=torch.uint8)], self.rank, _ABORT)
                    abort.wait(timedelta(milliseconds=1))

    def release(self) -> None:
        """Let go of the group, and with it of its connection to the store: a peer that is lost is kept, by name."""
        with self.ending:
            self.group = None

    def drain(self) -> None:
        """What is queued or asked for will never be done."""
        with contextlib.suppress(Empty):
            while True:
                if (item := self.queue.get_nowait()) is not None:
                    item[1].failed = True
        self.queue.put(None)  # the thread that sends may wait for it
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
    """A message that is under way, or a get."""

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
            "shape": (slab.nbytes,),
            "typestr": "|u1",
            "data": (slab.address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=slab.device)
