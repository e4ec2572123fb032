"""`faulty`: a wire with scripted faults, for tests of code that uses wires.  Every run has the same faults."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .._arguments import is_real, listed, number, quoted, require_a, require_text
from ..errors import BindError, PeerLostError
from .protocol import Op, Slab, Slice, Wire, require_wire

#: Faults of received notes, of puts, and of any call.
NOTES: Final = ("lose", "double", "delay", "swap")
PUTS: Final = ("bit", "word", "row", "chunk", "late")
CALLS: Final = ("kill",)
#: Number of bytes that a fault of a put changes.  ``chunk`` changes all of them.
_BYTES: Final = {"bit": 1, "word": 8, "row": 256, "chunk": 1 << 62}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes
    ----------
    what : str
        Kind of fault.  For received notes, before `Wire.poll` returns them: ``lose``, ``double``, ``delay`` (by `after` polls),
        ``swap`` (with the next note).  For puts: with ``bit``, ``word``, ``row``, ``chunk`` so many bytes arrive changed; ``late``
        delays the put and its note until `Faulty.release`, even if one side has dropped the other by then.  For calls that name a
        peer: with ``kill`` the peer is lost from this call on.
    at : int
        Index of the affected note, put or call, counted from 0.
    after : int
        Number of polls for ``delay``.
    """

    what: str
    at: int
    after: int = 3

    def __post_init__(self) -> None:
        require_text("fault: what", self.what, (*NOTES, *PUTS, *CALLS))
        for name, least in (("at", 0), ("after", 1)):
            object.__setattr__(self, name, number(f"fault: {name}", getattr(self, name), least))


def random_faults(
    seed: int, rate: float, kinds: Iterable[str] = (*NOTES, *PUTS[:4]), most: int = 100_000
) -> list[Fault]:
    """Return a script in which each note, put and call has a fault of these kinds with a probability of `rate`."""
    chance = random.Random(number("seed", seed, -(1 << 64), 1 << 64))
    if not is_real(rate) or not 0 <= rate <= 1:
        raise BindError(f"rate: expected a probability, got {quoted(rate)}")
    wanted, most = listed("kinds", kinds, "kinds of faults"), number("most", most, 0, 1 << 24)
    for kind in wanted:
        require_text("kinds", kind, (*NOTES, *PUTS, *CALLS))
    return [
        Fault(chance.choice(some), at)
        for some in filter(None, ([k for k in group if k in wanted] for group in (NOTES, PUTS, CALLS)))
        for at in range(most)
        if chance.random() < rate
    ]


def faulty(wire: Wire, script: Iterable[Fault] = ()) -> Faulty:
    """Wrap a wire of any transport, and inject the faults of the script."""
    return Faulty(wire, script)


class Faulty:
    """A wire with faults.

    Attributes
    ----------
    counts : Counter
        Faults that have happened, by kind.
    """

    def __init__(self, wire: Wire, script: Iterable[Fault]) -> None:
        require_wire("wire", wire)
        script = listed("script", script, "faults", most=1 << 25)
        for fault in script:
            require_a(Fault, "script", fault, "faults")
        self.counts: Counter[str] = Counter()
        self._wire = wire
        self._script = {(self._class(fault.what), fault.at): fault for fault in script}
        self._met: Counter[str] = Counter()
        self._slab: Slab | None = None
        self._killed: set[str] = set()
        self._late: list[_Late] = []
        self._polls = 0
        #: Delayed notes, each with the number of the poll that delivers it.
        self._delayed: list[tuple[int, tuple[str, bytes]]] = []
        self._swapped: list[tuple[str, bytes]] = []
        if hasattr(wire, "on_news"):
            self.on_news = wire.on_news

    def register(self, slab: Slab) -> None:
        self._wire.register(slab)
        self._slab = slab

    def card(self) -> bytes:
        return self._wire.card()

    def connect(self, card: bytes) -> str:
        return self._wire.connect(card)

    def put(self, peer: str, local: Slice, remote: Slice, note: bytes = b"") -> Op:
        self._call(peer)
        fault = self._next("put")
        if fault is None:
            return _Op(self, peer, self._wire.put(peer, local, remote, note))
        if fault.what == "late":
            self._late.append(_Late(self._wire, peer, local, remote, note))
            return _Op(self, peer, self._late[-1])
        if self._slab is None or self._slab.device != "cpu":
            raise BindError(f"{fault}: only bytes of a slab on the CPU are changed")
        original = self._change(self._slab.address + local[0], local[1], fault)
        try:
            op = self._wire.put(peer, local, remote, note)
        except BaseException:
            original.restore()
            raise
        return _Op(self, peer, op, original)

    def get(self, peer: str, local: Slice, remote: Slice) -> Op:
        self._call(peer)
        return _Op(self, peer, self._wire.get(peer, local, remote))

    def note(self, peer: str, note: bytes) -> None:
        self._call(peer)
        self._wire.note(peer, note)

    def poll(self) -> list[tuple[str, bytes]]:
        self._polls += 1
        ready: list[tuple[str, bytes]] = []
        for note in self._wire.poll():
            fault = self._next("note")
            what = fault.what if fault else ""
            if what == "swap":
                self._swapped.append(note)
                continue
            if fault and what == "delay":
                self._delayed.append((self._polls + fault.after, note))
            elif what != "lose":
                ready += [note] * (2 if what == "double" else 1)
            ready += self._swapped
            self._swapped.clear()
        ready += [note for when, note in self._delayed if when <= self._polls]
        self._delayed = [(when, note) for when, note in self._delayed if when > self._polls]
        return [note for note in ready if note[0] not in self._killed]

    def drop(self, peer: str, seconds: float | None = None) -> None:
        self._wire.drop(peer, seconds)
        self._delayed = [(when, note) for when, note in self._delayed if note[0] != peer]
        self._swapped = [note for note in self._swapped if note[0] != peer]

    def close(self) -> None:
        self._wire.close()

    def release(self) -> int:
        """Send the delayed puts.  Returns the number of puts that the wrapped wire accepted: it refuses those to lost peers."""
        late, self._late, sent = self._late, [], 0
        for put in late:
            try:
                put.send()
                sent += 1
            except PeerLostError:
                pass
        return sent

    @staticmethod
    def _class(what: str) -> str:
        return "note" if what in NOTES else "put" if what in PUTS else "call"

    def _next(self, kind: str) -> Fault | None:
        """Count a note, put or call, and return its fault."""
        fault = self._script.get((kind, self._met[kind]))
        self._met[kind] += 1
        if fault is not None:
            self.counts[fault.what] += 1
        return fault

    def _call(self, peer: str) -> None:
        if self._next("call") is not None:
            self._killed.add(peer)
        self._require(peer)

    def _require(self, peer: str) -> None:
        require_a(str, "peer", peer, "a peer's name, as connect() returned it")
        if peer in self._killed:
            raise PeerLostError(f"{peer} is lost: killed by a fault", peer=peer)

    def _change(self, address: int, nbytes: int, fault: Fault) -> _Original:
        """Change bytes of this side's slab.  They are restored when the put is done."""
        count = min(_BYTES[fault.what], nbytes)
        chance = random.Random(f"{fault.what} {fault.at}")
        start = address + chance.randrange(nbytes - count + 1)
        original = _Original(start, ctypes.string_at(start, count))
        mask = 1 << chance.randrange(8) if fault.what == "bit" else 0xFF
        ctypes.memmove(start, bytes(byte ^ mask for byte in original.was), count)
        return original


@dataclass
class _Original:
    """The original bytes that a fault has changed."""

    address: int
    was: bytes

    def restore(self) -> None:
        ctypes.memmove(self.address, self.was, len(self.was))


class _Op:
    """An operation of the wrapped wire.  When it ends, the bytes that a fault changed are restored."""

    def __init__(self, faulty: Faulty, peer: str, op: Op, original: _Original | None = None) -> None:
        self._faulty, self._peer, self._op, self._original = faulty, peer, op, original

    def query(self) -> bool:
        try:
            self._faulty._require(self._peer)
            done = self._op.query()
        except PeerLostError:
            self._restore()
            raise
        if done:
            self._restore()
        return done

    def _restore(self) -> None:
        if self._original is not None:
            self._original.restore()
            self._original = None


class _Late:
    """A delayed put."""

    def __init__(self, wire: Wire, *put: object) -> None:
        self._wire, self._put = wire, put
        self._op: Op | None = None

    def send(self) -> None:
        self._op = self._wire.put(*self._put)  # type: ignore[arg-type]

    def query(self) -> bool:
        return self._op is not None and self._op.query()
