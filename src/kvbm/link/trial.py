"""A trial between two machines: one sends sequences of coded data to the other over a link.

For comparison it also measures the bare wire and a memcpy.  `serve` is the receiving side.  `Sender` is the side that sends and
measures.  They exchange cards and commands over a `Talk`.  All measured data go over a wire.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from .. import wire
from .._arguments import quoted
from .._version import __version__
from ..errors import (
    BindError,
    DigestError,
    KvbmError,
    MissingPackageError,
    TransferTimeoutError,
    UnreachableError,
    printable,
)
from ..layout.shapes import BlockShape, load_shape
from ..reshard.presets import vllm
from ..reshard.sequence import Span
from ..wire import Slab, Slice
from ..wire.protocol import move
from .coded import SPARE, STAGE, Coded
from .coded import Side as Side
from .endpoint import Endpoint
from .handle import Handle
from .link import Link
from .ring import Ring
from .secret import Secret
from .talk import Talk

#: Version of the protocol between the two sides.
VERSION = 1

#: Most layers of a model, and its largest other size.
_MOST_LAYERS, _MOST_SIZE = 1024, 1 << 20

#: Bytes that a slow machine fills or compares per second.
_PACE = 50e6

#: Number of note round trips before the first sequence.
_NOTES = 200


@dataclass(frozen=True)
class Terms:
    """The parameters of a trial.  The sender chooses them, and both sides use them."""

    wire: str
    shape: str
    tokens: int
    chunk_bytes: int
    ring_bytes: int
    timeout: float

    @classmethod
    def read(cls, message: dict[str, Any]) -> Terms:
        """Read the parameters from a message of the peer.  All of them are checked."""
        kinds = {"wire": str, "shape": str, "tokens": int, "chunk_bytes": int, "ring_bytes": int, "timeout": float}
        for name, kind in kinds.items():
            if type(message.get(name)) is not kind:
                raise BindError(f"{name}: expected {kind.__name__}, got {quoted(message.get(name), 60)}")
        found = cls(**{name: message[name] for name in kinds})
        if found.wire not in ("torch", "nixl"):
            raise BindError(f"wire: expected torch or nixl, got {quoted(found.wire, 60)}")
        if not re.fullmatch(r"[\w,=]{1,200}", found.shape, re.ASCII):  # never the path of a file on this machine
            raise BindError(f"shape: expected all sizes, got {quoted(found.shape, 60)}")
        sizes = found.tokens, found.chunk_bytes, found.ring_bytes
        if not all(0 < size < 1 << 40 for size in sizes) or not 0 < found.timeout <= 3600:
            raise BindError(
                f"expected numbers from 1 to 2**40 and a timeout of at most an hour, got {quoted(sizes)}, "
                f"{quoted(found.timeout, 40)}"
            )
        model = found.model
        if model.nl > _MOST_LAYERS or max(model.no, model.nh, model.nt, model.hd) > _MOST_SIZE:
            raise BindError(
                f"shape: expected at most {_MOST_LAYERS:,} layers, and other sizes of at most {_MOST_SIZE:,}, got {found.shape!r}"
            )
        return found

    @property
    def model(self) -> BlockShape:
        return load_shape(self.shape)

    @property
    def token_bytes(self) -> int:
        """Bytes of the model's cache per token."""
        return replace(self.model, nt=1).nbytes

    def memory(self, nt: int) -> int:
        """Bytes that a side with blocks of `nt` tokens allocates.

        They are the pool, what it is filled from and compared with, the ring, and two slices for the bare wire.
        """
        blocks = -(-self.tokens // nt)
        block = nt * self.token_bytes
        slot = Ring.slot_size(self.chunk_bytes)
        ring = self.ring_bytes // slot // 2 * 2 * slot
        pool = (blocks + SPARE) * block + min(STAGE, blocks) * block + 4 * block + 8 * 2 * (blocks + SPARE) * nt
        return pool + ring + 2 * Ring.slot_size(self.tokens * self.token_bytes)

    @property
    def patience(self) -> float:
        """Seconds within which a side must have allocated, filled or compared its memory, if it says meanwhile that it is busy."""
        return self.timeout + (4 * self.tokens * self.token_bytes + self.ring_bytes) / _PACE


class End:
    """One side of a trial: the coded pool, its endpoint, and a bare wire beside it.

    `store` connects wires of torch.  `busy` is called from time to time during long work.
    """

    def __init__(self, side: Side, terms: Terms, store: Any, busy: Callable[[], None], secret: Secret | None = None) -> None:
        self.side, self.terms = side, terms
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            place = vllm(terms.model, nt=side.nt, name=side.engine)
            self.coded = Coded(side, place.shape(0), terms.tokens, busy)
            self._stack.callback(self.coded.close)
            made = _wire(side.engine, side.device, terms, store)
            self._stack.callback(made.close)
            self.endpoint = Endpoint(
                side.engine, place, 0, self.coded.pool, wire=made, chunk_bytes=terms.chunk_bytes,
                ring_bytes=terms.ring_bytes, secret_file=secret,
            )  # fmt: skip
            self._stack.callback(self.endpoint.close)
            self.size = Ring.slot_size(terms.tokens * terms.token_bytes)
            self.raw_ring = Ring(side.device, self.size, 1, 1)
            self.raw = _wire(f"{side.engine}.raw", side.device, terms, store)
            self._stack.callback(self._close_raw)
            self._touch(busy)
            self.raw.register(self.raw_ring.slab)
            failing.pop_all()
        self.peer = ""

    def _touch(self, busy: Callable[[], None]) -> None:
        """Write all of the bare wire's memory: before the first write, all pages are the same physical page."""
        block = self.coded.code(0)
        for offset in range(0, self.raw_ring.slab.nbytes, block.nbytes):
            nbytes = min(block.nbytes, self.raw_ring.slab.nbytes - offset)
            move(self.raw_ring.slab, offset, Slab(int(block.ctypes.data), block.nbytes), 0, nbytes)
            busy()

    def cards(self) -> dict[str, str]:
        return {"card": self.endpoint.card().decode(), "raw": self.raw.card().decode()}

    def meet(self, message: dict[str, Any]) -> Link:
        """Connect to the side that sent these cards."""
        for name in ("card", "raw"):
            if not isinstance(message[name], str):
                raise BindError(f"{name}: expected a card, got {quoted(message[name], 60)}")
        self.peer = self.raw.connect(message["raw"].encode())
        return self.endpoint.meet([message["card"].encode()], timeout=self.terms.timeout)

    def copy(self, nbytes: int) -> float:
        """Seconds of a memcpy on this side."""
        slab = self.raw_ring.slab
        begin = time.perf_counter()
        move(slab, self.size, slab, 0, nbytes)
        return time.perf_counter() - begin

    def until_note(self, talk: Talk, op: wire.Op | None = None) -> None:
        """Poll the bare wire until a note that is not empty has arrived, and the put, if given, is done."""
        came, begin = False, time.monotonic()
        end, looks = begin + self.terms.timeout, begin + 0.1
        while not came or not (op is None or op.query()):
            came = any(note for _, note in self.raw.poll()) or came
            now = time.monotonic()
            if now > end:
                raise TransferTimeoutError(f"{talk.peer}: no answer on the bare wire within {self.terms.timeout:g} s")
            if now > looks:
                looks = now + 0.1
                talk.look()
                self.raw.note(self.peer, b"")  # raises an error if the peer is lost
            if now > begin + 2e-4:  # poll without a pause at first, so that a fast answer is not delayed
                time.sleep(0)  # let other threads take Python's lock

    def until_done(self, talk: Talk, handle: Handle) -> None:
        """Wait for a transfer.  Raises an error if the other side gives up meanwhile."""
        while True:
            with contextlib.suppress(TransferTimeoutError):
                handle.synchronize(0.1)
            if handle.has_ended:
                handle.synchronize()
                return
            self.raw.poll()  # answers the peer if it drops this side
            talk.look()

    def _close_raw(self) -> None:
        self.raw.close()
        self.raw_ring.close()  # not reached if `close` raises: then a peer may still write to it

    def close(self) -> None:
        try:
            self._stack.close()
        except KvbmError:
            _unclosed.append(self)
            raise

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            if kind is not None:  # the first error is reported, not those of closing
                stack.enter_context(contextlib.suppress(KvbmError))
            self.close()


#: Ends that could not be closed because a peer may still write to them: their memory is kept.
_unclosed: list[End] = []


def _wire(name: str, device: str, terms: Terms, store: Any) -> wire.Wire:
    if terms.wire == "nixl":
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # its other messages on stderr are also raised as exceptions
        return wire.nixl(name)
    backend: Any = "gloo" if device == "cpu" else "nccl"
    return wire.torch(name, store, backend=backend, meet_seconds=min(terms.timeout, 60.0))


def _store(host: str, port: int | None, timeout: float) -> Any:
    """The store by which wires of torch connect: without a port a new store on a free port, with a port a client of that store."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its messages on stderr are also raised as exceptions
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise MissingPackageError(f"--wire torch needs torch ({error}): pip install torch") from None
    given = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
    try:
        if port is not None:
            with socket.create_connection((host, port), timeout):  # fails at once; torch would retry until its deadline
                return TCPStore(host, port, is_master=False, **given)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            number = server.getsockname()[1]
            return TCPStore(host, number, is_master=True, master_listen_fd=server.detach(), **given)
    except (RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise UnreachableError(f"{host}, port {port or 'any'}: the store by which wires of torch meet: {why}") from None


def _hello(**more: Any) -> dict[str, Any]:
    return {"kvbm-link-trial": VERSION, "kvbm": __version__, **more}


def _require_version(message: dict[str, Any], where: str) -> None:
    found, there = message.get("kvbm-link-trial"), printable(str(message.get("kvbm")), 40)
    if type(found) is not int or found != VERSION:
        raise BindError(
            f"{where}: expected version {VERSION} of `kvbm link`, got {quoted(found, 40)} (kvbm {there} there, "
            f"{__version__} here); both sides need the same kvbm"
        )


# ---- the side that receives ------------------------------------------------------------------------------------------


class Memory:
    """The memory that senders may make this side allocate, all together."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._used = nbytes, 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lent(self, terms: Terms, nbytes: int) -> Iterator[None]:
        """Lend memory to a trial.  Raises `BindError` if there is not enough."""
        with self._lock:
            if self._used + nbytes > self._nbytes:
                others = f", of which other senders use {self._used:,}: try again later" if self._used else ""
                raise BindError(
                    f"{nbytes:,} bytes were asked for; this side gives {self._nbytes:,} (kvbm link serve --memory){others}"
                )
            self._used += nbytes
        try:
            yield
        finally:
            gc.collect()  # what has ended may be held by cycles: its memory is free before others may have it
            if not any(end.terms is terms for end in _unclosed):  # else a peer may still write to it
                with self._lock:
                    self._used -= nbytes


@dataclass
class Served:
    """The record of one trial on the receiving side."""

    #: Address, wire, device and block shape of the sender.
    peer: str
    wire: str = ""
    device: str = ""
    shape: str = ""
    #: Number of sequences, and bytes received.
    sequences: int = 0
    nbytes: int = 0
    stats: dict[str, float] | None = None  # as from `Link.stats`
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error or None}

    def __str__(self) -> str:
        end = "failed" if self.error else "all right"
        return (
            f"{self.peer}: {self.wire or 'no'} wire: {self.sequences:,} sequences, {self.nbytes / 1e6:,.1f} MB, {end}"
        )


def serve(
    talk: Talk, side: Side, host: str, *, only: str | None, memory: Memory, served: Served, timeout: float = 60.0
) -> None:
    """Receive sequences from one sender until it ends the trial, and fill in what was `served`.

    `host` is the address to listen on, `only` the only allowed wire, `memory` what senders may make this side allocate,
    and `timeout` the most seconds that the sender may be waited for at a time.
    """
    served.peer = talk.peer
    message = talk.hear("kvbm-link-trial")
    _require_version(message, talk.peer)
    terms = Terms.read(message)
    device = message.get("device")
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda:\d{1,4}", device, re.ASCII):
        raise BindError(f"device: expected cpu or cuda:N, got {quoted(device, 60)}")
    served.wire, served.device, served.shape = terms.wire, device, terms.shape
    if only not in (None, terms.wire):
        raise BindError(f"wire: {terms.wire} was asked for, and this side serves {only} alone: send with --wire {only}")
    if terms.wire == "torch" and (device == "cpu") is not (side.device == "cpu"):
        raise BindError(
            f"wire: torch carries host to host, or GPU to GPU; the sender has {device} and this side {side.device}: use --wire nixl"
        )
    if terms.timeout > timeout:
        raise BindError(
            f"a timeout of {terms.timeout:g} s was asked for; this side waits {timeout:g} s (kvbm link serve --timeout)"
        )
    talk.timeout = terms.timeout
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory.lent(terms, terms.memory(side.nt)))
        talk.say(busy=True)
        store = _store(host, None, terms.timeout) if terms.wire == "torch" else None
        end = stack.enter_context(End(side, terms, store, talk.busy, talk.secret))
        try:
            talk.say(**_hello(port=store.port if store is not None else 0, side=side.as_json(), **end.cards()))
            link = end.meet(talk.hear("card", "raw", within=terms.patience))
            talk.say(met=True)
            try:
                _serve(talk, end, link, served)
            finally:
                served.stats = link.stats()
        except BaseException as error:
            talk.fail(error)  # before closing: this side's wires wait until the other side closes its own
            raise


def _serve(talk: Talk, end: End, link: Link, served: Served) -> None:
    while True:
        message = talk.hear("do")
        what = message["do"]
        if what == "end":
            talk.say(end=True)
            return
        count = message.get("count")
        if type(count) is not int or not 0 < count <= (_NOTES if what == "echo" else end.terms.tokens):
            raise BindError(f"{talk.peer}: count: expected a number from 1 on, got {quoted(count, 40)}")
        if what == "echo":
            talk.say(ready=True)
            for _ in range(count):
                end.until_note(talk)
                end.raw.note(end.peer, b"here")
        elif what == "receive":
            _receive(talk, end, link, count, bool(message.get("check")), served)
        else:
            raise BindError(f"{talk.peer}: do: expected receive, echo or end, got {quoted(what, 40)}")


def _receive(talk: Talk, end: End, link: Link, tokens: int, check: bool, served: Served) -> None:
    if check:
        end.coded.spoil()
    before, used = link.stats(), end.endpoint.cpu_seconds
    span = Span(end.coded.table[: -(-tokens // end.side.nt)], range(tokens))
    arrival = link.receive(f"trial {served.sequences}", span, timeout=end.terms.timeout)
    served.sequences += 1
    talk.say(ready=True)
    end.until_done(talk, arrival)
    used, after = end.endpoint.cpu_seconds - used, link.stats()
    served.nbytes += int(after["bytes_received"] - before["bytes_received"])
    talk.say(
        digest=f"{arrival.digest:016x}", wrong=end.coded.wrong(tokens) if check else "", cpu=used,
        stats={name: after[name] - before[name] for name in after},
    )  # fmt: skip


# ---- the side that sends ---------------------------------------------------------------------------------------------


_DIGEST = re.compile("[0-9a-f]{16}")


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e18


def _side(message: Any, peer: str) -> dict[str, Any]:
    """What the other side says of itself (`Side.as_json`), as it may be printed."""
    names = "host", "device", "layout", "tokens_per_block"
    given = [message.get(name) for name in names] if isinstance(message, dict) else [None]
    if not all(isinstance(one, str) for one in given[:3]) or not _is_count(given[-1]):
        raise BindError(f"{peer}: side: expected {', '.join(names)}, got {quoted(message)}")
    return dict(zip(names, (printable(one) if isinstance(one, str) else one for one in given), strict=True))


@dataclass(frozen=True)
class Row:
    """The measurements for sequences of one size.  Times are medians."""

    #: Tokens, bytes and chunks per sequence.  The bytes do not include padding and trailers.
    tokens: int
    nbytes: int
    chunks: int
    #: Time from `Link.send` until the receiver has confirmed that all data are complete and correct.
    median_ms: float
    min_ms: float
    max_ms: float
    bandwidth_gbps: float  # `nbytes` divided by `median_ms`; 1 GB is 10^9 bytes
    #: Processor time of the endpoint's thread per chunk.  On the CPU this includes packing and unpacking.
    send_host_us: float
    receive_host_us: float
    #: The wire alone: a put of one contiguous slice of as many bytes and a note back.  The ratio is its time divided by
    #: `median_ms`.
    raw_ms: float
    raw_gbps: float
    raw_ratio: float
    #: A memcpy of as many bytes on the sender.  The ratio is its time divided by `median_ms`.
    memcpy_ms: float
    memcpy_gbps: float
    memcpy_ratio: float
    #: Totals of all sequences on both sides: chunks that were requested again, notes that were repeated, and waits for
    #: slots.
    chunks_wrong: int
    notes_again: int
    stalls: int


class Sender:
    """The side that sends and measures."""

    def __init__(self, talk: Talk, side: Side, terms: Terms) -> None:
        self.talk, self.terms = talk, terms
        talk.say(**_hello(device=side.device, **asdict(terms)))
        message = talk.hear("kvbm-link-trial", "port", "side", "card", "raw", within=terms.patience)
        _require_version(message, talk.peer)
        if type(message["port"]) is not int or not 0 <= message["port"] < 1 << 16:
            raise BindError(f"{talk.peer}: port: expected a port, got {quoted(message['port'], 60)}")
        self.far = _side(message["side"], talk.peer)  # host, device, layout and tokens_per_block of the other side
        store = _store(talk.host, message["port"], terms.timeout) if terms.wire == "torch" else None
        self.end = End(side, terms, store, talk.busy, talk.secret)
        try:
            self.end.coded.fill()
            talk.say(**self.end.cards())
            talk.hear("met", within=terms.patience)  # the other side connects first, so that its refusal is known here
            self.link = self.end.meet(message)
        except BaseException as error:
            talk.fail(error)  # before closing, as in `serve`
            self.end.__exit__(type(error))
            raise

    def notes(self) -> list[float]:
        """Round-trip times of notes on the bare wire, in seconds, without the first few."""
        talk, end, seconds = self.talk, self.end, []
        talk.say(do="echo", count=_NOTES)
        talk.hear("ready")
        for _ in range(_NOTES):
            begin = time.perf_counter()
            end.raw.note(end.peer, b"there")
            end.until_note(talk)
            seconds.append(time.perf_counter() - begin)
        return seconds[_NOTES // 10 :]

    def measure(self, tokens: int, repeat: int, progress: Callable[[], None]) -> Row:
        """Send `repeat` + 1 sequences of `tokens` tokens.

        The first one is not timed.  The first and the last one are compared element by element.
        """
        nbytes = tokens * self.terms.token_bytes
        times: dict[str, list[float]] = {"link": [], "raw": [], "memcpy": []}
        used = [0.0, 0.0]
        total: dict[str, float] = {}
        digest, chunks = "", 0
        for number in range(repeat + 1):
            seconds, cpu, stats, found = self._send(tokens, check=number in (0, repeat))
            if digest and found != digest:
                raise DigestError(f"{tokens} tokens: digest {found} of what came, and {digest} the time before")
            digest = found
            total = {name: total.get(name, 0) + stats[name] for name in stats}
            for name, one in (("raw", self._put), ("memcpy", self.end.copy)):
                took = one(nbytes)
                if number:
                    times[name].append(took)
            if number:
                times["link"].append(seconds)
                chunks = int(stats["chunks_sent"])
                used = [a + b / max(chunks, 1) / repeat for a, b in zip(used, cpu, strict=True)]
            progress()
        median = {name: statistics.median(each) for name, each in times.items()}
        return Row(
            tokens, nbytes, chunks, median["link"] * 1e3, min(times["link"]) * 1e3, max(times["link"]) * 1e3,
            nbytes / median["link"] / 1e9, used[0] * 1e6, used[1] * 1e6,
            median["raw"] * 1e3, nbytes / median["raw"] / 1e9, median["raw"] / median["link"],
            median["memcpy"] * 1e3, nbytes / median["memcpy"] / 1e9, median["memcpy"] / median["link"],
            int(total["chunks_wrong"]), int(total["notes_again"]), int(total["stalls"]),
        )  # fmt: skip

    def _send(self, tokens: int, *, check: bool) -> tuple[float, tuple[float, float], dict[str, float], str]:
        """Send one sequence; return seconds, processor time of both sides, counts of both sides, and the digest."""
        talk, end, link = self.talk, self.end, self.link
        talk.say(do="receive", count=tokens, check=check)
        talk.hear("ready", within=self.terms.patience)
        before, cpu = link.stats(), end.endpoint.cpu_seconds
        span = Span(end.coded.table[: -(-tokens // end.side.nt)], range(tokens))
        begin = time.perf_counter()
        end.until_done(talk, link.send(f"trial {int(before['sendings'])}", span, timeout=self.terms.timeout))
        seconds = time.perf_counter() - begin
        cpu, after = end.endpoint.cpu_seconds - cpu, link.stats()
        message = talk.hear("digest", "wrong", "cpu", "stats", within=self.terms.patience)
        there = message["stats"]
        if not isinstance(there, dict) or not all(_is_count(there.get(name)) for name in after):
            raise BindError(f"{talk.peer}: stats: expected numbers, got {quoted(there, 60)}")
        if not _is_count(message["cpu"]) or not isinstance(message["digest"], str) or not _DIGEST.fullmatch(message["digest"]):
            raise BindError(
                f"{talk.peer}: expected a digest and seconds, got {quoted(message['digest'], 60)}, {quoted(message['cpu'], 60)}"
            )
        if message["wrong"]:
            wrong = printable(str(message["wrong"]), 400)
            raise DigestError(f"{tokens} tokens: {talk.peer} found what its digest did not: {wrong}")
        stats = {name: after[name] - before[name] + there[name] for name in after}
        return seconds, (cpu, float(message["cpu"])), stats, str(message["digest"])

    def _put(self, nbytes: int) -> float:
        """Seconds of a put on the bare wire until its answering note has arrived."""
        talk, end = self.talk, self.end
        talk.say(do="echo", count=1)
        talk.hear("ready")
        begin = time.perf_counter()
        op = end.raw.put(end.peer, Slice(0, nbytes), Slice(end.size, nbytes), b"there")
        end.until_note(talk, op)
        return time.perf_counter() - begin

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.talk.fail(error)  # before closing: this side's wires wait until the other side closes its own
            self.end.__exit__(kind)
            return
        with self.end:  # end the trial first: otherwise the other side reports a lost peer
            self.talk.say(do="end")
            self.talk.hear("end")
