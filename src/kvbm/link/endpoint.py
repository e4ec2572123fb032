"""Endpoints: one rank of an engine with its pools, its wire and a thread; cards, by which two engines compare themselves."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import itertools
import json
import operator
import os
import queue
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from .. import _core
from .._arguments import flag, listed, quoted, require_a, seconds, whole
from ..errors import (
    AuthenticationError,
    BindError,
    KvbmError,
    MissingKernelError,
    PlanError,
    TransferError,
    TransferTimeoutError,
    printable,
)
from ..layout.layout import Layout
from ..layout.shapes import ITEMSIZE, BlockShape, load_shape
from ..memory.array_checks import require_declared, require_one_format
from ..planner.cast import Cast, Scale, as_cast, difference, of_json, to_json
from ..pool.pool import Pool
from ..reshard.casting import Layouts, formats_of, require_same_elements
from ..reshard.local import cuts_of, require_pool
from ..reshard.messages import Resharding, plan
from ..reshard.messages import gather as in_two_steps
from ..reshard.placement import Placement
from ..system.machine import sleep_exactly
from ..wire import Wire
from ..wire.protocol import require_wire
from .chunk import LEAST
from .direct import Shared, read_layout, read_shared, shared, told
from .link import Link
from .model import differences, named
from .model import read as read_model
from .notes import read
from .ring import MOST_ON_GPU, Ring, sizes_of
from .secret import SIGNATURE, Notes, Secret

#: Version of cards, and of those of endpoints that cast: earlier versions refuse these.
_VERSION, _CASTING = 5, 6

#: Most bytes of a card, and most values in it.
_MOST_CARD, _MOST_VALUES = 80 << 10, 1 << 13

#: The model in a card: all its sizes.
_SIZES = re.compile(r"[a-z0-9_,=]{1,200}", re.ASCII)

#: Seconds that the thread sleeps: while transfers run, and while nothing has happened for many rounds.
_SHORT, _LONG, _ROUNDS = 50e-6, 1e-3, 400

#: Rounds without work before the thread sleeps at all: the next work mostly comes at once.
_AT_ONCE = 20

#: While it spins: microseconds of a round, and rounds of one wait if only notes and ends of copies can bring work.
_SPIN_ROUND, _ROUNDS_AT_ONCE = 20, 10

#: Rounds without work before a thread that keeps a processor busy sleeps although no transfer runs: 1 ms.
_ROUNDS_IDLE = 50

#: Most seconds of sleep during transfers if the wire wakes the thread: repeats and deadlines may be late by this much.
_WOKEN = 10e-3

#: Seconds of sleep while no transfer runs, if the wire must be polled: the first, doubled each time up to the last.  Calls of this
#: side wake the thread, and a peer's offer waits for one anyway; only the end of a connection is answered this much later.
_IDLE = (1e-3, 0.1)

#: Seconds until the thread asks again whether a peer that it drops can no longer write: the first, doubled each time up to the
#: last.  It does not wait for the answer.
_DROPS = (1e-3, 1.0)

#: Seconds within which the thread answers a call of another thread, if that gives no limit.
_ANSWERS = 30.0


class Endpoint:
    """One rank of an engine.  It sends and receives sequences.

    Parameters
    ----------
    engine : str
        Name of the engine; all its ranks use the same.
    placement : Placement or mapping
        The engine's placement.  For several pools per rank (full attention, sliding window, a draft model): a mapping of group to
        (placement, pool).
    rank : int
        This rank.
    pool : Pool, optional
        The rank's pool; only with a single placement.
    wire : Wire
        A wire of this process.  The endpoint registers its ring with it; nothing else may use it.
    model : str or mapping of str to object
        What identifies the model: a text (name, revision, adapter), or fields with names, such as a hash of the weights and the
        configuration.  It must be the same on both sides.  Of fields, the error names those that differ.
    incarnation : str
        A text that identifies this start of the engine, such as a job number.  It must be the same on all ranks of the engine.
    chunk_bytes : int, optional
        Bytes of the largest chunk.  Chunks are smaller if `ring_bytes` has room for one of them in each direction, but not for two.
        Default: 16 MiB; on a GPU with a larger ring a sixteenth of it, up to 64 MiB.
    ring_bytes : int, optional
        Bytes of registered memory on the device of the pools: half to send, half to receive.  Default: 256 MiB; on a GPU of 64
        GiB or more 512 MiB, and of 128 GiB or more 1 GiB.
    slots : int, optional
        Number of slots in each direction.  Default: as many as `ring_bytes` has room for.  With as many slots as peers, any number
        of peers may stop, and the others have a slot each.  With fewer, the others take turns.  Several peers need two.
    max_sms : int, optional
        Multiprocessors that kernels may use.  Default: 16 for direct copies out of another GPU, which fill NVLink and leave the
        others to the model; all for other copies.
    direct : bool
        Let peers on this host copy out of the pools, and copy out of theirs, if the wire is `wire.mapped` and the memory can be
        shared: GPU memory with a CUDA IPC handle, or ``Pool.allocate(…, device="shared")``.  `Link.paths` says what came of it.
    cast : {"amax"} or kvbm.Scale, optional
        Values may change their format on the way, as for `kvbm.reshard.plan`, to an engine that says the same.  Chunks have the
        smaller format: the sender quantises, or the receiver dequantises.  A direct copy casts as it reads.  Digests are of the
        quantised bits.  Default: both engines have the same formats.
    secret_file : path, optional
        A file with a secret that all engines share.  Then only cards that were made with this secret are accepted, and every note
        has a code of it.  The data of chunks have none.

    Raises
    ------
    BindError
        Pools do not fit or lie on several devices, the ring has no room for one chunk in each direction, or others can read the
        file of the secret.

    Examples
    --------
    >>> me = Endpoint("prefill-0", placement, rank, pool, wire=wire.nixl(f"prefill-0/{rank}"))  # doctest: +SKIP
    >>> link = me.meet(cards_of_decode)  # doctest: +SKIP
    >>> link.send("request-17", kvbm.Span(table, range(1000))).synchronize()  # doctest: +SKIP
    """

    def __init__(
        self, engine: str, placement: Placement | Mapping[str, tuple[Placement, Pool]], rank: int,
        pool: Pool | None = None, *, wire: Wire, model: str | Mapping[str, Any] = "", incarnation: str = "",
        chunk_bytes: int | None = None, ring_bytes: int | None = None, slots: int | None = None,
        max_sms: int | None = None, direct: bool = True, cast: Cast = None,
        secret_file: str | os.PathLike[str] | Secret | None = None,
    ) -> None:  # fmt: skip
        require_wire("endpoint: wire", wire)
        if not isinstance(engine, str) or not engine:  # type: ignore[redundant-expr]
            raise BindError(f"endpoint: expected a name, got {quoted(engine)}")
        if isinstance(placement, Placement):
            if not isinstance(pool, Pool):
                raise BindError(f"endpoint {engine}: pool: expected a kvbm.Pool, got {type(pool).__name__}")
            groups: dict[str, tuple[Placement, Pool]] = {"": (placement, pool)}
        else:
            require_a(Mapping, f"endpoint {engine}: placement", placement, "a Placement, or a mapping of groups")
            groups = dict(placement)
        given = {"chunk_bytes": chunk_bytes, "ring_bytes": ring_bytes, "slots": slots, "max_sms": max_sms}
        for name, number in given.items():
            if number is not None and (whole(number) or 0) < 1:
                raise BindError(f"endpoint {engine}: {name}: expected a number from 1 on, got {quoted(number, 40)}")
        chunk_bytes, ring_bytes, slots, max_sms = (whole(number) for number in given.values())  # NumPy's are no JSON
        if not groups:
            raise BindError(f"endpoint {engine}: expected a placement, got none")
        for place, mine in groups.values():
            require_pool(place, rank, mine)
        devices = {mine.device for _, mine in groups.values()}
        worlds = {place.world for place, _ in groups.values()}
        if len(devices) > 1 or len(worlds) > 1:
            raise BindError(
                f"endpoint {engine}: expected pools on one device and placements of one world, got {devices}, {worlds}"
            )
        self.cast = as_cast(cast)
        for _, mine in groups.values() if self.cast is not None else ():
            try:
                told(mine.layout, scales=True)
            except BindError as error:
                raise BindError(f"endpoint {engine}: cast: {mine.layout.name or 'its layout'}: {error}") from None
        self.engine, self.rank, self.groups, self.wire, self.model = engine, operator.index(rank), groups, wire, model
        [self._world], [device] = worlds, devices
        self._model = named(model)
        is_read = secret_file is None or isinstance(secret_file, Secret)
        self.secret: Secret | None = secret_file if is_read else Secret.read(secret_file)  # type: ignore[assignment, arg-type]
        self._nonce = secrets.token_bytes(32)  # its notes have other codes than those of other endpoints
        self._codes: dict[str, tuple[Notes, Notes]] = {}  # peer → notes to it, notes from it
        self.max_sms = max_sms
        #: Whether it sends → stream of the copies of which the caller names none, whichever thread begins them.
        self.streams = {sends: None if device == "cpu" else _core.Stream(int(device.partition(":")[2])) for sends in (False, True)}
        self.incarnation = incarnation
        self._least = LEAST if device == "cpu" else MOST_ON_GPU
        chunk_bytes, ring_bytes = sizes_of(device, chunk_bytes, ring_bytes)
        size = Ring.slot_size(chunk_bytes)
        each = ring_bytes // size // 2 if slots is None else slots
        if slots is None and each == 1 and (smaller := ring_bytes // 4 // 256 * 256):
            each, size = 2, smaller  # for several peers
        self._chunk_bytes = min(chunk_bytes, size)
        self.ring = Ring(device, size, each, each)
        wire.register(self.ring.slab)
        self._is_direct = flag("direct", direct)
        self._shared = self._share() if self._is_direct and hasattr(wire, "open") else {}
        self._card = self._written(wire.card())
        self._links: list[Link] = []
        self._past: dict[str, Counter[str]] = {}  # counters of closed links
        self.siblings: Link | None = None
        self._by_peer: dict[str, Link | None] = {}  # None: the link is closed
        self.dropping: dict[str, Link] = {}
        self._drop_at: dict[str, tuple[float, float]] = {}  # peers that could not be dropped → time of the next attempt, pause
        self._unclaimed: dict[tuple[object, ...], Link] = {}  # links whose callers had given up when they were made
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = _Wake()
        self._is_woken = hasattr(wire, "on_news")  # polling would take Python's lock from threads that work
        #: Threads that wait keep a processor busy for a short time: to be woken takes as long as to copy 20 MB between GPUs.
        self.spins = device != "cpu" and hasattr(wire, "watch")
        if hasattr(wire, "on_news"):
            wire.on_news(self._wake.set)
        self._lock, self._is_over = threading.RLock(), False  # a handler of a signal may call while its thread does
        self._is_closed, self._broken = False, ""
        self._closing, self._is_released = threading.RLock(), False
        self._clock: int | None = None  # clock id of the thread's CPU time, while it runs
        self._used = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvbm {engine}/{rank}", daemon=True)
        self._thread.start()

    # ---- cards -----------------------------------------------------------------------------------------------------

    def card(self) -> bytes:
        """The card of this rank, which ranks of another engine pass to `meet`: JSON, some KB.  It gives access to the ring."""
        return self._card

    def _share(self) -> dict[str, Shared | str]:
        """What the card says of each pool; or why peers cannot open it."""
        found: dict[str, Shared | str] = {}
        for name, (_, pool) in self.groups.items():
            try:
                found[name] = shared(pool, scales=self.cast is not None)
            except KvbmError as error:
                found[name] = str(error)
        return found

    def _written(self, of_wire: bytes) -> bytes:
        groups = {
            name: {
                "placement": place.text(),
                "model": str(place.model),
                "planes": _planes(pool),
                "formats": pool.formats,
                "cuts": cuts_of([pool]),
                **({} if self.cast is None else {"layout": told(pool.layout, scales=True)}),
            }
            for name, (place, pool) in self.groups.items()
        }
        held = {
            "kvbm-link": _VERSION if self.cast is None else _CASTING,
            "engine": self.engine, "incarnation": self.incarnation, "rank": self.rank, "world": self._world,
            "model": self._model, "groups": groups, "sends": self.ring.sends, "takes": self.ring.takes,
            "slot_bytes": self.ring.slot_bytes, "chunk_bytes": self._chunk_bytes, "least": self._least,
            "wire": base64.b64encode(of_wire).decode(), "nonce": self._nonce.hex(),
        }  # fmt: skip
        if self.cast is not None:
            held["cast"] = to_json(self.cast)
        if not self._shared:
            return self._signed(json.dumps(held).encode())
        pools: dict[str, Any] = {name: one if isinstance(one, str) else one._asdict() for name, one in self._shared.items()}
        card = json.dumps(held | {"shared": pools}).encode()
        while _is_too_large(card) and (lent := [name for name, one in pools.items() if not isinstance(one, str)]):
            largest = max(lent, key=lambda name: len(json.dumps(pools[name])))
            self._shared[largest] = pools[largest] = "its arrays are too many for a card"
            card = json.dumps(held | {"shared": pools}).encode()
        return self._signed(card)

    def _signed(self, card: bytes) -> bytes:
        return card if self.secret is None else self.secret.sign(card)

    def join(self, cards: Iterable[bytes], *, timeout: float = _ANSWERS) -> Link:
        """Connect to the ranks of this engine that hold the same as this one.  Call it before `meet(…, gather=True)`.

        Parameters
        ----------
        cards : iterable of bytes
            The cards of all ranks of this engine, including this one.
        timeout : float
            Seconds that it may take.

        Returns
        -------
        Link
            A link to these ranks.  Its `stats` count what the ranks pass on to each other.

        Raises
        ------
        BindError
            As `meet`; also if it was called before.
        TransferTimeoutError
            The endpoint's thread did not answer in time.
        """
        end = time.monotonic() + seconds("timeout", timeout)
        title = f"{self.engine} rank {self.rank}: join"
        found = self._read(cards, title)
        _require_alike(found, title)
        if _Card(self._card, self.secret).wire not in [one.wire for one in found]:
            raise BindError(
                f"{title}: expected the cards of this engine, including this rank's, got those of {printable(found[0].engine)}"
            )
        if self.siblings is not None:
            raise BindError(f"{title}: expected one call, got a second one; use the link that the first call returned")
        among: dict[str, Resharding | KvbmError] = {}
        for name, (place, pool) in self.groups.items():
            where = cuts_of([pool])
            among[name] = in_two_steps(place, place, cuts=(where, where))[1]
        self.siblings = self._connected(("join",), end, found, among, among)
        return self.siblings

    def meet(
        self, cards: Iterable[bytes], *, stripe: bool = False, gather: bool = False, timeout: float = _ANSWERS
    ) -> Link:
        """Connect to the ranks of another engine.  Compares the two engines; plans and proves the copies in both directions.

        Parameters
        ----------
        cards : iterable of bytes
            The cards of all ranks of the other engine, in any order.
        stripe : bool
            As for `plan`.  Both sides must pass the same value.
        gather : bool
            If ranks of the receiving engine hold the same, each receives a share of the layers, and they pass it on to each other.
            So every byte is sent once between the engines.  Both sides must pass the same value; the receiving side calls `join`
            before.
        timeout : float
            Seconds that it may take.

        Returns
        -------
        Link
            The link to the other engine.

        Raises
        ------
        BindError
            A card is not valid or of another version, a rank is missing or given twice, or incarnation, model, planes, groups or
            cast differ.
        PlanError
            The two engines hold different models, there is no cast between their formats, or it would cut a group of elements with
            one scale.
        TransferTimeoutError
            The endpoint's thread did not answer in time.  It may be called again with the same cards.
        """
        end = time.monotonic() + seconds("timeout", timeout)
        stripe, gather = flag("stripe", stripe), flag("gather", gather)
        found = self._read(cards, f"{self.engine}: meet")
        first = found[0]
        title = f"{self.engine} rank {self.rank} ↔ {printable(first.engine)}"
        first.require_cast(self.cast, title)
        first.require_names(self._model, self.groups, title)
        there = {name: first.group(name, place.model) for name, (place, _) in self.groups.items()}
        _require_alike(found, title)
        outgoing: dict[str, Resharding | KvbmError] = {}
        incoming: dict[str, Resharding | KvbmError] = {}
        gathered: set[str] = set()
        for name, (mine, pool) in self.groups.items():
            peer_place, planes, peer_cuts, formats, layout = there[name]
            own_cuts = cuts_of([pool])
            cast = self.cast if planes != _planes(pool) else None
            if planes != _planes(pool) and cast is None:
                raise BindError(
                    f"{title}: planes: {_planes(pool)} here and {printable(planes)} on the other side; expected the same, or cast= "
                    "on both sides, to change values on the way"
                )
            layouts = None if cast is None or layout is None else (pool.layout, layout)
            where = f"{title}: group {name!r}"
            if cast is None and layout is not None:
                require_same_elements(where, (mine, peer_place), (pool.layout, layout))
            if layouts is None:
                require_one_format(f"{where}: {self.engine} as the source", pool.formats, formats)
            else:
                _require_formats(where, layouts, (mine, peer_place), (pool.formats, formats))
            for plans, ends, cuts, given in (
                (outgoing, (mine, peer_place), (own_cuts, peer_cuts), layouts),
                (incoming, (peer_place, mine), (peer_cuts, own_cuts), layouts and layouts[::-1]),
            ):
                try:
                    if gather:
                        made, rest = in_two_steps(*ends, stripe=stripe, cuts=cuts, cast=cast, layouts=given)
                        if plans is incoming and rest.messages:
                            gathered.add(name)
                    else:
                        made = plan(*ends, stripe=stripe, cuts=cuts, cast=cast, layouts=given)
                    plans[name] = made
                    _ = made.cast_parts  # raises an error if there is no such cast
                except (PlanError, MissingKernelError) as error:
                    plans[name] = error
            if isinstance(outgoing[name], KvbmError) and isinstance(incoming[name], KvbmError):
                raise outgoing[name]  # type: ignore[misc]
        return self._connected((stripe, gather), end, found, outgoing, incoming, gathered)

    def require_alike(self, card: bytes) -> None:
        """Raise `BindError` for a card that `meet` would refuse at once: malformed, of another cast or model, or of other groups.

        Raises `AuthenticationError` for a card that was made without this side's secret.
        """
        found, title = _Card(card, self.secret), f"{self.engine} rank {self.rank} ↔ "
        found.require_cast(self.cast, f"{title}{printable(found.engine)}")
        found.require_names(self._model, self.groups, f"{title}{printable(found.engine)}")

    def _read(self, cards: Any, where: str) -> list[_Card]:
        if isinstance(cards, bytes | str) or not isinstance(cards, Iterable):
            raise BindError(f"{where}: expected the cards of all ranks of an engine, got a {type(cards).__name__}")
        found = [_Card(card, self.secret) for card in listed(where, cards, "the cards of all ranks of an engine")]
        if not found:
            raise BindError(f"{where}: expected the cards of all ranks of an engine, got none")
        return found

    def _connected(self, options: tuple[object, ...], end: float, cards: list[_Card], *plans: Any) -> Link:
        """The link to these ranks.  One that was made when its caller had given up is kept for the next call."""
        key = options, *sorted(card.wire for card in cards)

        def connect() -> Link:
            made = self._unclaimed.pop(key, None)
            return self._connect(cards, *plans) if made is None or made.is_closed else made

        return self.call(connect, end - time.monotonic(), lambda made: self._unclaimed.update({key: made}))  # type: ignore[no-any-return]

    def _connect(
        self, cards: list[_Card], outgoing: dict[str, Resharding | KvbmError],
        incoming: dict[str, Resharding | KvbmError], gathered: Iterable[str] = (),
    ) -> Link:  # fmt: skip
        sizes = min(self._chunk_bytes, *(card.chunk_bytes for card in cards)), max(self._least, cards[0].least)
        link = Link(self, printable(cards[0].engine), outgoing, incoming, sizes, gathered)
        needed = {
            rank
            for plans, mine, far in ((outgoing, "src", "dst"), (incoming, "dst", "src"))
            for made in plans.values()
            if isinstance(made, Resharding)
            for message in made.messages
            if getattr(message, mine) == self.rank
            for rank in [getattr(message, far)]
        }
        self.ring.require_room(len(needed))
        for card in cards:
            if card.rank in needed:
                peer = self.wire.connect(card.wire)
                if peer in self._by_peer:
                    raise BindError(
                        f"{link.title}: rank {card.rank} was met already: use that link; after it was closed, both sides need new "
                        "endpoints"
                    )
                link.peers[peer] = card.rank
                link.rings[peer] = (card.sends, card.takes, card.slot_bytes)
                if self.secret is not None:
                    nonces = self._nonce, card.nonce
                    self._codes[peer] = Notes.between(self.secret, *nonces), Notes.between(self.secret, *nonces[::-1])
        self._by_peer.update(dict.fromkeys(link.peers, link))
        self.ring.meet(link.peers)
        for peer, rank in link.peers.items():
            [card] = (one for one in cards if one.rank == rank)
            link.open(peer, {name: card.shared(name) for name in self.groups} if self._is_direct else {})
        self._links.append(link)
        return link

    def closed(self, peer: str, note: bytes) -> bytes:
        """A note as it is sent to a peer: with its code, if there is a secret."""
        return note if self.secret is None else self._codes[peer][0].closed(note)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def submit(self, call: Callable[[], None], *, wakes: bool = True) -> None:
        """Make the endpoint's thread call a function.  `wakes` false: call `wake` after it."""
        with self._lock:
            if self._is_closed or self._broken or self._is_over:
                raise BindError(
                    f"{self.engine} rank {self.rank}: the endpoint is closed{self._broken and f': {self._broken}'}"
                )
            self._commands.put(call)
        if wakes:
            self._wake.set()

    def wake(self) -> None:
        """Wake the thread."""
        self._wake.set()

    def call(
        self, call: Callable[[], Any], seconds: float = _ANSWERS, late: Callable[[Any], object] | None = None
    ) -> Any:
        """Make the endpoint's thread call a function; return its result, or raise its error.

        Raises `TransferTimeoutError` if it does not answer within `seconds`.  A call that has not begun then is not
        made; if it runs, the thread calls `late` with its result.
        """
        found: dict[str, Any] = {}
        ended, lock = threading.Event(), threading.Lock()

        def run() -> None:
            if "is_late" in found:
                return
            try:
                value = call()
            except BaseException as error:
                found["error"] = error
            else:
                with lock:
                    found["value"] = value
                if "is_late" in found and late is not None:
                    late(value)
            finally:
                ended.set()

        self.submit(run)
        end = time.monotonic() + seconds
        while not ended.wait(max(min(0.1, end - time.monotonic()), 0.0)):
            if not self._thread.is_alive():
                raise BindError(f"{self.engine} rank {self.rank}: the endpoint is closed: {self._broken}")
            with lock:
                if time.monotonic() >= end and "value" not in found:
                    found["is_late"] = True
                    raise TransferTimeoutError(
                        f"{self.engine} rank {self.rank}: the endpoint's thread has not answered within {max(seconds, 0.0):g} s"
                    )
        if "error" in found:
            raise found["error"]
        return found["value"]

    def _run(self) -> None:
        quiet, idle = 0, _IDLE[0]  # rounds without work; seconds of the next sleep without transfers
        sleep_exactly()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while not self._is_closed:
                if self._step():
                    quiet = 0
                    continue
                quiet += 1
                is_idle = all(link.is_idle for link in self._links) and not self.dropping
                if not is_idle:
                    idle = _IDLE[0]
                if self.spins and self._by_peer and quiet < (_ROUNDS_IDLE if is_idle else _ROUNDS):
                    quiet += self._spin()
                elif is_idle and (self._is_woken or not self._by_peer):
                    self._wake.wait()  # nothing has a deadline, and all new work wakes the thread
                elif is_idle:
                    self._wake.wait(idle)
                    idle = min(2 * idle, _IDLE[1])
                elif self._is_woken and self.ring.device == "cpu":
                    self._wake.wait(_WOKEN)
                elif quiet < _ROUNDS:
                    time.sleep(_SHORT if quiet > _AT_ONCE else 0)  # 0: only releases Python's lock
                else:
                    self._wake.wait(_LONG)
        except Exception as error:  # if the thread ends, all its links fail
            self._broken = f"{type(error).__name__}: {error}"
        finally:
            self._used, self._clock = time.thread_time(), None
            with self._lock:
                self._is_over = True
            while not self._commands.empty():
                with contextlib.suppress(Exception):
                    self._commands.get_nowait()()
            for link in self._links:
                link.begin_claimed()
                link.release()
                for handle in link.handles:
                    why = self._broken or "the endpoint was closed"
                    handle.fail(TransferError(f"{link.title}: {handle.what} {handle.key!r}: {why}"))
                    handle.settle()
            if self._broken:  # peers must notice that this endpoint is gone
                with contextlib.suppress(Exception):
                    self.wire.close()

    def _spin(self) -> int:
        """Wait for notes, calls and the ends of copies, without Python's lock.  Returns for how many rounds that counts."""
        dones: list[Any] = []
        for link in self._links:
            if (more := link.awaited()) is None:  # something of which the wire does not know: it must be asked
                self.wire.watch(self._wake.latch, _SPIN_ROUND)  # type: ignore[attr-defined]
                self._wake.latch.clear()
                return 0
            dones += more
        is_news = self.wire.watch(self._wake.latch, _ROUNDS_AT_ONCE * _SPIN_ROUND, dones)  # type: ignore[attr-defined]
        self._wake.latch.clear()
        return 0 if is_news else _ROUNDS_AT_ONCE

    @property
    def is_over(self) -> bool:
        """True if the thread only ends the running transfers."""
        return self._is_over

    def _step(self) -> bool:
        busy = False
        notes = self.wire.poll()  # poll first: a call that was submitted before a note arrived runs before the note is handled
        while not self._commands.empty():  # only this thread takes them
            busy = True
            self._commands.get()()
        for peer, data in notes:
            link = self._by_peer.get(peer)
            if link is None:
                continue
            busy = True
            ahead = link.early(peer, data) if self.secret is None else None
            try:
                note = read(self._codes[peer][1].opened(data) if self.secret is not None else data)
            except (BindError, AuthenticationError):
                link.count("notes_wrong")
            else:
                link.heard(peer, note, ahead)
            finally:
                if ahead is not None:
                    ahead.leave()
        now, is_closing = time.monotonic(), False
        for link in self._links:
            busy |= link.tick(now)
            is_closing |= link.is_closed
        if self.dropping or is_closing:
            self._part(now)
        return busy

    def _part(self, now: float) -> None:
        """Drop the peers that are lost.  Forget the links that are closed and have no peer to drop."""
        for peer, link in list(self.dropping.items()):
            at, pause = self._drop_at.get(peer, (now, _DROPS[0]))
            if now < at:
                continue
            try:
                self.wire.drop(peer, 0.0)
            except TransferTimeoutError:  # the peer may still write: only its slots stay reserved
                self._drop_at[peer] = now + pause, min(2 * pause, _DROPS[1])
            else:
                del self.dropping[peer]
                self._drop_at.pop(peer, None)
                link.dropped(peer)
        for link in [one for one in self._links if one.is_closed and one.is_idle]:
            if self.dropping.keys().isdisjoint(link.peers):
                with self._lock:
                    self._links.remove(link)
                    self._past.setdefault(link.engine, Counter()).update(link.stats())
                self._by_peer.update(dict.fromkeys(link.peers))

    def close(self, *, timeout: float = 6.0) -> None:
        """End all links, and release the ring.

        It may be called again.  After an error it must be called again.

        Parameters
        ----------
        timeout : float
            Seconds that transfers and peers that are dropped may take to end.  The thread gets as many again, and the wire takes at
            most its own limit.

        Raises
        ------
        TransferTimeoutError
            The ring was not released, because a peer may still write to it, or the wire still waits for a peer.
        """
        limit = seconds("timeout", timeout)
        with self._closing:
            if self._is_released:
                return
            end = time.monotonic() + limit
            links = [] if self._broken or self._is_closed else list(self._links)
            for link in links:
                with contextlib.suppress(TransferTimeoutError):  # the thread is asked below whether it has ended
                    link.close(timeout=max(0.0, end - time.monotonic()))
            while (
                links
                and not self._broken
                and time.monotonic() < end
                and (self.dropping or any(link.handles for link in self._links))
            ):
                time.sleep(_LONG)
            self._is_closed = True
            self._wake.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(limit)
                if self._thread.is_alive():
                    raise TransferTimeoutError(
                        f"endpoint {self.engine}: its wire waits for a peer that is being dropped; the ring is not released: "
                        "close it again"
                    )
            if not self._is_released:  # by a signal's handler
                self.wire.close()
                self.ring.close()
                self._is_released = True

    @property
    def links(self) -> tuple[Link, ...]:
        """Links to other engines, without closed links that have no running transfers."""
        return tuple(self._links)

    def stats(self) -> dict[str, dict[str, float]]:
        """Engine → the sums of `Link.stats` of all links to it, including closed ones."""
        with self._lock:
            found = {engine: Counter(counts) for engine, counts in self._past.items()}
            for link in self._links:
                found.setdefault(link.engine, Counter()).update(link.stats())
        return {engine: dict(counts) for engine, counts in found.items()}

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that the endpoint's thread has used.  For pools in host memory it also packs and unpacks."""
        if (clock := self._clock) is not None:
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                return time.clock_gettime(clock)
        return self._used

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvbm Endpoint {self.engine} rank {self.rank} of {self._world}, {len(self._links)} links>"


class _Wake:
    """Wakes one thread, also one that will wait later.  An Event takes ten times as many calls."""

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.latch = _core.Latch()  # the same, for a thread that waits without a lock

    def set(self) -> None:
        self.latch.set()
        try:
            self._asleep.release()
        except RuntimeError:  # it is awake, or was woken before
            return

    def wait(self, seconds: float = -1) -> None:
        """Return when it was woken since the last `wait`, or after `seconds`."""
        self._asleep.acquire(timeout=seconds)
        self.latch.clear()


class _Card:
    """A card of another rank.  All of it is checked.  Its groups are read when they are needed: names are compared before."""

    def __init__(self, card: Any, secret: Secret | None) -> None:
        if not isinstance(card, bytes) or len(card) > _MOST_CARD:
            _refuse(f"at most {_MOST_CARD} bytes", repr(card[:40] if isinstance(card, bytes) else card)[:60])
        card = Secret.opened(card, secret)
        if (count := _values(card)) > _MOST_VALUES:
            _refuse(f"at most {_MOST_VALUES} values", f"{count} of them")
        try:
            held = json.loads(card.decode())
        except (ValueError, RecursionError):
            _refuse("JSON", repr(card[:40]))
        version = held.get("kvbm-link") if isinstance(held, dict) else None
        if not isinstance(held, dict) or version not in (_VERSION, _CASTING):
            got = quoted(held, 60) if version is None else f"version {quoted(version, 60)}"
            _refuse(f"version {_VERSION}, or {_CASTING} with a cast: both sides need the same kvbm", got)
        cast = held.get("cast")
        if version == _VERSION and cast is not None:
            _refuse(f"version {_CASTING} for a card with a cast", f"version {_VERSION}")
        try:
            self.cast = of_json(cast) if version == _CASTING else None
        except PlanError:
            _refuse("'cast' of 'amax', a number, or numbers by layer", repr(cast)[:60])
        kinds = {
            "engine": str, "incarnation": str, "rank": int, "world": int, "groups": dict, "sends": int, "takes": int,
            "slot_bytes": int, "chunk_bytes": int, "least": int, "wire": str, "nonce": str,
        }  # fmt: skip
        for key, kind in kinds.items():
            if type(held.get(key)) is not kind:
                _refuse(f"{key!r} to be of {kind.__name__}", repr(held.get(key))[:60])
        self.engine, self.incarnation, self.model = held["engine"], held["incarnation"], read_model(held.get("model"))
        if not re.fullmatch(r"[0-9a-f]{64}", held["nonce"], re.ASCII):
            _refuse("'nonce' of 32 bytes in hexadecimal digits", repr(held["nonce"])[:60])
        self.nonce = bytes.fromhex(held["nonce"])
        self.rank, self.world = held["rank"], held["world"]
        self.sends, self.takes = held["sends"], held["takes"]
        self.slot_bytes, self.chunk_bytes, self.least = held["slot_bytes"], held["chunk_bytes"], held["least"]
        if not 0 <= self.rank < self.world <= 1 << 16:
            _refuse("a rank of a world of at most 65,536", f"{quoted(self.rank, 40)} of {quoted(self.world, 40)}")
        if not (
            0 < self.chunk_bytes <= self.slot_bytes < 1 << 32
            and self.slot_bytes % 16 == 0  # chunks are packed into mapped slots at such addresses
            and 0 < self.sends < 1 << 32
            and 0 < self.takes < 1 << 32
        ):
            _refuse(
                "slots that hold a chunk, of multiples of 16 bytes",
                f"{quoted(self.takes, 40)} of {quoted(self.slot_bytes, 40)} bytes for chunks of {quoted(self.chunk_bytes, 40)}",
            )
        if not 0 < self.least < 1 << 32:
            _refuse("'least' of bytes of a chunk, below 2**32", quoted(self.least, 40))
        try:
            self.wire = base64.b64decode(held["wire"], validate=True)
        except (binascii.Error, ValueError):
            _refuse("'wire' in base64", repr(held["wire"])[:60])
        self._groups: dict[str, Any] = held["groups"]
        self._shared = held.get("shared", {})
        if not isinstance(self._shared, dict):
            _refuse("'shared' to be of dict", repr(self._shared)[:60])
        self.groups_text = json.dumps(self._groups, sort_keys=True)

    def require_names(self, model: Mapping[str, str], groups: Iterable[str], title: str) -> None:
        """Raise `BindError` unless the card is of a model and has groups of these names."""
        if differ := differences(model, self.model):
            raise BindError(f"{title}: model: {differ}; expected the same model on both sides")
        if set(self._groups) != set(groups):
            raise BindError(
                f"{title}: groups: {sorted(groups)!s:.400} here and {quoted(sorted(self._groups), 400)} on the other side; "
                "expected the same"
            )

    def require_cast(self, cast: Scale | None, title: str) -> None:
        """Raise `BindError` unless the card says the same cast."""
        if cast != self.cast:
            place = "" if cast is None or self.cast is None else difference(cast, self.cast)
            where = f", which differ{place}" if place else ""
            raise BindError(
                f"{title}: cast: {_cast_text(cast)} here and {_cast_text(self.cast)} on the other side{where}; expected the same: "
                "values change only if both sides say so"
            )

    def shared(self, name: str) -> Shared | str:
        """How the pool of a group is opened; or why it cannot be."""
        given = self._shared.get(name, "it shares no pool: its wire is not wire.mapped, or direct=False")
        return printable(given, 300) if isinstance(given, str) else read_shared(given)

    def group(
        self, name: str, own: BlockShape
    ) -> tuple[Placement, str, tuple[int, ...], dict[str, str], Layout | None]:
        """Placement, planes, cuts, formats and, for casts, layout of a group.

        Raises `PlanError` for a larger model than this side's own.
        """
        group = self._groups[name]
        texts: list[Any] = (
            [group.get(key) for key in ("placement", "model", "planes")] if isinstance(group, dict) else [None]
        )
        if not all(isinstance(text, str) and len(text) <= _MOST_CARD for text in texts):
            _refuse(f"group {quoted(name, 60)} with placement, model and planes", repr(group)[:60])
        if not _SIZES.fullmatch(texts[1]):  # all sizes: never the name of a file of this machine
            _refuse("all sizes of a model", repr(texts[1])[:200])
        try:
            model = load_shape(texts[1])
        except KvbmError as error:
            raise BindError(f"card of {printable(self.engine)}: {error}") from None
        if model.nl > own.nl or model.nh > own.nh:  # before something is made for each layer and head
            raise PlanError(f"card of {printable(self.engine)}: model {model}: expected that of this side, {own}")
        try:
            place = _placement(texts[0], model, self.engine, self.world)
        except KvbmError as error:
            raise BindError(f"card of {printable(self.engine)}: {error}") from None
        cuts = group.get("cuts")
        if (
            not isinstance(cuts, list)
            or len(cuts) > 64
            or not all(type(cut) is int and 0 < cut < 1 << 24 for cut in cuts)
        ):
            _refuse(f"group {quoted(name, 60)} with cuts, a list of tokens", repr(cuts)[:60])
        formats = group.get("formats", {})
        if (
            not isinstance(formats, dict)
            or len(formats) > 64
            or not all(isinstance(text, str) and text in ITEMSIZE for text in formats.values())
        ):
            _refuse(f"group {quoted(name, 60)} with formats, a dtype for each plane", repr(formats)[:60])
        layout = None if self.cast is None else read_layout(group.get("layout"), printable(self.engine))
        if layout is not None and texts[2] != _planes_of(layout, model.dtype):
            _refuse(f"group {quoted(name, 60)} with the planes of its layout", repr(texts[2])[:200])
        return place, texts[2], tuple(cuts), formats, layout


def _values(card: bytes) -> int:
    """At least as many values as JSON of these bytes has."""
    return sum(map(card.count, (b",", b":", b"[", b"{")))


def _is_too_large(card: bytes) -> bool:
    """True if peers would refuse a card, also after it was signed."""
    return len(card) > _MOST_CARD - SIGNATURE or _values(card) > _MOST_VALUES


def _require_alike(cards: list[_Card], title: str) -> None:
    """Raise `BindError` unless the cards are of one engine, one per rank."""
    first = cards[0]
    for one in cards:
        for name in ("engine", "incarnation", "world", "model", "cast", "groups_text", "chunk_bytes", "least"):
            if getattr(one, name) != getattr(first, name):
                raise BindError(
                    f"{title}: cards of ranks {first.rank} and {one.rank} differ in {name}: {quoted(getattr(first, name))} and "
                    f"{quoted(getattr(one, name))}"
                )
    counts = Counter(one.rank for one in cards)
    if len(cards) != first.world or len(counts) != first.world:
        missing = list(itertools.islice((rank for rank in range(first.world) if rank not in counts), 20))
        twice = sorted(rank for rank, count in counts.items() if count > 1)
        raise BindError(
            f"{title}: expected one card of each of {first.world} ranks; missing {missing!s:.200}, twice {twice!s:.200}"
        )


@functools.lru_cache(64)
def _placement(text: str, model: BlockShape, engine: str, world: int) -> Placement:
    """The placement in a card, as `Placement.text` wrote it.  All cards of an engine contain the same."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        _refuse("a placement in JSON", repr(text[:40]))
    layers = held.get("layers") if isinstance(held, dict) else None
    if (
        not isinstance(held, dict)
        or not {"mesh", "nt", "shard"} <= set(held) <= {"mesh", "nt", "shard", "layers"}
        or type(held["mesh"]) is not str
        or not (layers is None or (isinstance(layers, list) and all(isinstance(layer, str) for layer in layers)))
        or not all(re.fullmatch("[0-9]{1,9}", layer, re.ASCII) for layer in layers or ())
    ):
        _refuse("a placement with mesh, nt, shard and layers", repr(held)[:200])
    name = printable(engine)
    found = Placement(held["mesh"], model=model, name=name)  # without shares, which cost time for each rank
    if found.world != world:
        _refuse(f"a placement of {world} ranks", str(found.world))
    return Placement(
        held["mesh"], shard=held["shard"], model=model, nt=held["nt"], layers=layers and [int(layer) for layer in layers], name=name
    )


def _refuse(expected: str, got: str) -> NoReturn:
    raise BindError(f"card: expected {expected}, got {got}")


def _planes(pool: Pool) -> str:
    """The planes that a pool holds, independent of its layout."""
    return _planes_of(pool.layout, pool.shape.dtype)


def _planes_of(layout: Layout, dtype: str) -> str:
    return ", ".join(sorted({f"{plane.name} {plane.dtype or dtype}" for plane in layout.planes})) or dtype


def _cast_text(cast: Scale | None) -> str:
    return "none" if cast is None else str(cast)


def _require_formats(
    title: str, layouts: Layouts, places: tuple[Placement, Placement], formats: tuple[Mapping[str, str], Mapping[str, str]]
) -> None:
    """Raise `DTypeError` if the arrays of a side have other formats than its layout says, or copied planes differ in them."""
    declared = [formats_of(layout, place.model.dtype) for layout, place in zip(layouts, places, strict=True)]
    copied = {plane for plane in declared[0].keys() & declared[1].keys() if declared[0][plane] == declared[1][plane]}
    require_one_format(title, *formats, copied)
    for side, own, some in zip(("pool here", "pool on the other side"), declared, formats, strict=True):
        require_declared(title, side, some, {plane: dtype for plane, dtype in own.items() if plane not in copied})
