"""The far end of a wire, in a process or a thread of its own: it polls, and does what it is told."""

from __future__ import annotations

import contextlib
import importlib
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvbm import KvbmError, wire
from kvbm.link.ring import Ring
from programs import meeting

for package in ("nixl._api", "torch.distributed"):  # here, so that processes that come from one that has them are quick
    with contextlib.suppress(ImportError):
        importlib.import_module(package)

#: Bytes of noise around each slab.
GUARD = 4096


class Polled:
    """A wire that tells nobody of news: `wire.mapped` then has boxes of notes."""

    def __init__(self, wrapped: Any) -> None:
        for name in ("register", "card", "connect", "put", "get", "note", "poll", "drop", "close"):
            setattr(self, name, getattr(wrapped, name))


def make(kind: str, name: str, place: Any = None, meet_seconds: float = 20, drop_seconds: float = 20) -> wire.Wire:
    """A wire; `place` is the port of the store where its peers find it, for those that need one."""
    if kind == "faulty":
        return wire.faulty(wire.memory(name))
    if kind == "mapped":
        return wire.mapped(Polled(make("torch", name, place, meet_seconds, drop_seconds)), drop_seconds=drop_seconds)
    if kind == "nixl":
        return wire.nixl(name, drop_seconds=drop_seconds)
    if kind == "torch":
        return wire.torch(name, meeting.join(place), meet_seconds=meet_seconds, drop_seconds=drop_seconds)
    return wire.memory(name)


class End:
    """A wire with a slab, between guards."""

    def __init__(
        self, kind: str, name: str, nbytes: int, place: Any = None, script: Any = None, **seconds: float
    ) -> None:
        self.memory = np.random.default_rng(7).integers(0, 256, nbytes + 2 * GUARD, np.uint8)
        self.before = self.memory.copy()
        self.slab = self.memory[GUARD:-GUARD]
        self.wire = make(kind, name, place, **seconds)
        if script is not None:
            self.wire = wire.faulty(self.wire, script)
        if kind == "mapped":  # a memory file is a slab from its beginning to its end
            self.ring = Ring("cpu", nbytes // 2, 1, 1)
            self.slab = np.frombuffer(self.ring._pages, np.uint8)
            self.slab[:] = self.before[GUARD:-GUARD]
        self.wire.register(self.ring.slab if kind == "mapped" else wire.Slab.of(self.slab))
        self.peer = ""
        self.inbox: list[bytes] = []
        self.wrong = self.checked = 0
        self.polls = True

    def card(self) -> bytes:
        return self.wire.card()

    def connect(self, card: bytes) -> str:
        self.peer = self.wire.connect(card)
        return self.peer

    def poll(self) -> None:
        """Take what came; a note of three numbers says what the slab holds from where on, and is answered."""
        for sender, note in self.wire.poll() if self.polls else ():
            assert sender == self.peer
            if note.startswith(b"holds "):
                offset, nbytes, value = map(int, note.split()[1:])
                self.checked += 1
                self.wrong += not (self.slab[offset : offset + nbytes] == value).all()
                self.wire.note(sender, b"seen")
            self.inbox.append(note)

    def notes(self) -> list[bytes]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def counts(self) -> tuple[int, int]:
        return self.checked, self.wrong

    def fill(self, value: int) -> None:
        self.slab[:] = value

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.slab[offset : offset + nbytes].tobytes()

    def guards(self) -> bool:
        """Whether the noise around the slab is as it was."""
        return bool((self.memory == self.before)[[*range(GUARD), *range(-GUARD, 0)]].all())

    def send(self, note: bytes) -> None:
        self.wire.note(self.peer, note)

    def start(self, offset: int, remote: int, nbytes: int, note: bytes = b"") -> None:
        self.op = self.wire.put(self.peer, wire.Slice(offset, nbytes), wire.Slice(remote, nbytes), note)

    def query(self) -> bool:
        return self.op.query()

    def drop(self, seconds: float | None = None) -> None:
        self.wire.drop(self.peer, seconds)

    def poll_or_not(self, polls: bool) -> None:
        self.polls = polls

    def close(self) -> None:
        self.wire.close()


def serve(pipe: Connection, *end: Any) -> None:
    """Make an end and do what comes through the pipe, until it is closed."""
    far = End(*end)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(("ok", far.card()))
        while True:
            far.poll()
            if pipe.poll(0.0005):
                name, *arguments = pipe.recv()
                try:
                    pipe.send(("ok", getattr(far, name)(*arguments)))
                except KvbmError as error:
                    pipe.send((type(error).__name__, str(error)))
    far.close()
