"""Endpoints: one rank of an engine, its pools and its wire; cards, what two engines must have in common, and the thread."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from ..errors import BindError, KvbmError, PlanError, SpecError, TransferError, TransferTimeoutError
from ..machine import sleep_exactly
from ..pool import Pool
from ..shapes import load_shape
from ..wire import Wire
from .chunk import MOST, TRAILER
from .link import Link
from .local import cuts_of, require_pool
from .messages import Resharding, plan
from .messages import gather as in_two_steps
from .notes import read
from .placement import Placement, whole
from .ring import Ring

__all__ = ["Endpoint"]

_VERSION = 1
_MOST_CARD = 1 << 20

#: Seconds that the thread sleeps: while something is under way, and while nothing is, or has not been for so many rounds.
_SHORT, _LONG, _ROUNDS = 50e-6, 1e-3, 400

#: Rounds in which nothing was done before it sleeps at all: what comes next mostly comes at once.
_AT_ONCE = 20

#: Seconds that it sleeps at most where the wire wakes it: what is said again, and deadlines, may be so late.
_TOLD = 10e-3

#: Seconds after which a peer that could not be dropped is dropped again: that keeps the thread for as long as the wire says.
_DROPS = 30.0

#: Seconds that `close` waits for what is under way, and for peers to be dropped.
_CLOSING = 6.0


class Endpoint:
    """A rank of an engine, which sends and receives sequences.

    Parameters
    ----------
    engine : str
        The engine's name; its ranks have one.
    placement : Placement or mapping
        What the ranks hold; or group → (placement, pool) where a rank has several pools (full attention, sliding window, a
        draft model).
    rank : int
    pool : Pool, optional
        The rank's, where there is one placement.
    wire : Wire
        Of this process; the endpoint registers its ring with it and uses it alone.
    model : str
        What tells models of one shape apart: name, revision, adapter. Both sides must say the same.
    incarnation : str
        What tells one start of the engine from another: all its ranks say the same, such as a job's number.
    chunk_bytes : int
        Of the largest chunk.
    ring_bytes : int
        Of registered memory, on the pools' device: half of it for what goes, half for what comes.
    slots : int, optional
        Each way, in place of what `ring_bytes` has room for.
    max_sms : int, optional
        Multiprocessors that kernels may use.

    Raises
    ------
    BindError
        Pools that do not fit, or lie on several devices; a ring without room for a chunk each way.

    Examples
    --------
    >>> me = Endpoint("prefill-0", placement, rank, pool, wire=wire.nixl(f"prefill-0/{rank}"))  # doctest: +SKIP
    >>> link = me.meet(cards_of_decode)  # doctest: +SKIP
    >>> link.send("request-17", kvbm.Span(table, range(1000))).synchronize()  # doctest: +SKIP
    """

    def __init__(
        self,
        engine: str,
        placement: Placement | Mapping[str, tuple[Placement, Pool]],
        rank: int,
        pool: Pool | None = None,
        *,
        wire: Wire,
        model: str = "",
        incarnation: str = "",
        chunk_bytes: int = MOST,
        ring_bytes: int = 256 << 20,
        slots: int | None = None,
        max_sms: int | None = None,
    ) -> None:
        if isinstance(placement, Placement):
            if not isinstance(pool, Pool):
                raise BindError(f"endpoint {engine}: pool: expected a kvbm.Pool, got {type(pool).__name__}")
            groups: dict[str, tuple[Placement, Pool]] = {"": (placement, pool)}
        else:
            groups = dict(placement)
        if slots is not None and (whole(slots) or 0) < 1:
            raise BindError(f"endpoint {engine}: slots: expected a number from 1 on, got {slots!r:.40}")
        if not isinstance(engine, str) or not engine or not groups:  # type: ignore[redundant-expr]
            raise BindError(f"endpoint: expected a name and a placement, got {engine!r:.200}")
        for place, mine in groups.values():
            require_pool(place, rank, mine)
        devices = {mine.device for _, mine in groups.values()}
        worlds = {place.world for place, _ in groups.values()}
        if len(devices) > 1 or len(worlds) > 1:
            raise BindError(
                f"endpoint {engine}: expected pools on one device and placements of one world, got {devices}, {worlds}"
            )
        self.engine, self.rank, self.groups, self.wire, self.model = engine, rank, groups, wire, model
        [self._world], [device] = worlds, devices
        self.max_sms = max_sms
        self.stream: Any = None if device == "cpu" else 2  # the thread's own
        self.incarnation = incarnation
        if (whole(chunk_bytes) or 0) < 1 or (whole(ring_bytes) or 0) < 1:
            raise BindError(
                f"endpoint {engine}: expected numbers of bytes, got {chunk_bytes!r:.40} and {ring_bytes!r:.40}"
            )
        self._chunk_bytes = chunk_bytes
        size = Ring.slot_size(chunk_bytes + TRAILER)
        each = ring_bytes // size // 2 if slots is None else slots
        self.ring = Ring(device, size, each, each)
        wire.register(self.ring.slab)
        self._card = self._written(wire.card())
        self._links: list[Link] = []
        self._past: dict[str, Counter[str]] = {}  # of links that are closed
        self.siblings: Link | None = None
        self._by_peer: dict[str, Link | None] = {}  # None: of a link that is closed
        self.dropping: dict[str, Link] = {}
        self._drop_at: dict[str, float] = {}  # of peers that could not be dropped: when it is tried again
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._is_told = hasattr(wire, "on_news")  # who polls keeps Python's lock from those that work
        if hasattr(wire, "on_news"):
            wire.on_news(self._wake.set)
        self._lock, self._is_over = threading.Lock(), False
        self._is_closed, self._broken = False, ""
        self._closing, self._is_released = threading.Lock(), False
        self._clock: int | None = None  # of the thread's processor time, while it runs
        self._used = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvbm {engine}/{rank}", daemon=True)
        self._thread.start()

    # ---- cards -----------------------------------------------------------------------------------------------------

    def card(self) -> bytes:
        """What the ranks of another engine need to meet this one: JSON, some KB; it gives access to the ring."""
        return self._card

    def _written(self, of_wire: bytes) -> bytes:
        groups = {
            name: {
                "placement": place.text(),
                "model": str(place.model),
                "planes": _planes(pool),
                "cuts": cuts_of([pool]),
            }
            for name, (place, pool) in self.groups.items()
        }
        held = {
            "kvbm-link": _VERSION, "engine": self.engine, "incarnation": self.incarnation, "rank": self.rank, "world": self._world,
            "model": self.model, "groups": groups, "sends": self.ring.sends, "takes": self.ring.takes,
            "slot_bytes": self.ring.slot_bytes, "chunk_bytes": self._chunk_bytes, "wire": base64.b64encode(of_wire).decode(),
        }  # fmt: skip
        return json.dumps(held).encode()

    def join(self, cards: Iterable[bytes]) -> Link:
        """Connect to the ranks of this engine that hold the same as this one, before `meet(…, gather=True)`.

        Parameters
        ----------
        cards : iterable of bytes
            Of all ranks of this engine, this one's among them.

        Returns
        -------
        Link
            Whose `stats` are those of what they pass on to each other.

        Raises
        ------
        BindError
            As `meet`; it was called before.
        """
        title = f"{self.engine} rank {self.rank}: join"
        found = self._read(cards, title)
        _require_alike(found, title)
        if _Card(self._card).wire not in [one.wire for one in found]:
            raise BindError(f"{title}: expected this rank's own card among the others, got those of {found[0].engine}")
        if self.siblings is not None:
            raise BindError(f"{title}: it was called before")
        among: dict[str, Resharding | KvbmError] = {}
        for name, (place, pool) in self.groups.items():
            where = cuts_of([pool])
            among[name] = in_two_steps(place, place, cuts=(where, where))[1]
        self.siblings = self.call(lambda: self._connect(found, among, among))
        return self.siblings

    def meet(self, cards: Iterable[bytes], *, stripe: bool = False, gather: bool = False) -> Link:
        """Connect to the ranks of another engine: compare, plan and prove both ways.

        Parameters
        ----------
        cards : iterable of bytes
            Of all its ranks, in any order.
        stripe : bool
            As for `plan`; both sides alike.
        gather : bool
            Where ranks of the receiving engine hold the same, each gets a share of the layers, and they pass it on to each other:
            what goes between the engines goes once.  Both sides alike; who receives calls `join` before.

        Returns
        -------
        Link

        Raises
        ------
        BindError
            A card that is none, or of another version; ranks that are missing or there twice; incarnations that differ; another
            model; other planes or groups.
        PlanError
            The two engines hold different models.
        """
        found = self._read(cards, f"{self.engine}: meet")
        first = found[0]
        title = f"{self.engine} rank {self.rank} ↔ {first.engine}"
        _require_alike(found, title)
        if first.model != self.model:
            raise BindError(f"{title}: model: {self.model!r} here and {first.model!r} there; expected the same")
        if set(first.groups) != set(self.groups):
            raise BindError(
                f"{title}: groups: {sorted(self.groups)} here and {sorted(first.groups)} there; expected the same"
            )
        outgoing: dict[str, Resharding | KvbmError] = {}
        incoming: dict[str, Resharding | KvbmError] = {}
        gathered: set[str] = set()
        for name, (mine, pool) in self.groups.items():
            theirs, planes, cuts = first.groups[name]
            ours = cuts_of([pool])
            if planes != _planes(pool):
                raise BindError(f"{title}: planes: {_planes(pool)} here and {planes} there; expected the same")
            for plans, ends, where in (
                (outgoing, (mine, theirs), (ours, cuts)),
                (incoming, (theirs, mine), (cuts, ours)),
            ):
                try:
                    if gather:
                        plans[name], rest = in_two_steps(*ends, stripe=stripe, cuts=where)
                        if plans is incoming and rest.messages:
                            gathered.add(name)
                    else:
                        plans[name] = plan(*ends, stripe=stripe, cuts=where)
                except PlanError as error:
                    plans[name] = error
            if isinstance(outgoing[name], KvbmError) and isinstance(incoming[name], KvbmError):
                raise outgoing[name]  # type: ignore[misc]
        return self.call(lambda: self._connect(found, outgoing, incoming, gathered))  # type: ignore[no-any-return]

    @staticmethod
    def _read(cards: Any, where: str) -> list[_Card]:
        if isinstance(cards, bytes | str) or not isinstance(cards, Iterable):
            raise BindError(f"{where}: expected the cards of all ranks of an engine, got a {type(cards).__name__}")
        found = [_Card(card) for card in cards]
        if not found:
            raise BindError(f"{where}: expected the cards of all ranks of an engine, got none")
        return found

    def _connect(
        self,
        cards: list[_Card],
        outgoing: dict[str, Resharding | KvbmError],
        incoming: dict[str, Resharding | KvbmError],
        gathered: Iterable[str] = (),
    ) -> Link:
        most = min(self._chunk_bytes, *(card.chunk_bytes for card in cards))
        link = Link(self, cards[0].engine, outgoing, incoming, most, gathered)
        needed = {
            rank
            for plans, mine, far in ((outgoing, "src", "dst"), (incoming, "dst", "src"))
            for made in plans.values()
            if isinstance(made, Resharding)
            for message in made.messages
            if getattr(message, mine) == self.rank
            for rank in [getattr(message, far)]
        }
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
        self._by_peer.update(dict.fromkeys(link.peers, link))
        self._links.append(link)
        return link

    # ---- the thread ------------------------------------------------------------------------------------------------

    def submit(self, call: Callable[[], None]) -> None:
        """Let the thread call something."""
        with self._lock:
            if self._is_closed or self._broken or self._is_over:
                raise BindError(
                    f"{self.engine} rank {self.rank}: the endpoint is closed{self._broken and f': {self._broken}'}"
                )
            self._commands.put(call)
        self._wake.set()

    def call(self, call: Callable[[], Any]) -> Any:
        """Let the thread call something, and return what it returns, or raise what it raises."""
        found: dict[str, Any] = {}
        ended = threading.Event()

        def run() -> None:
            try:
                found["value"] = call()
            except BaseException as error:
                found["error"] = error
            finally:
                ended.set()

        self.submit(run)
        while not ended.wait(0.1):
            if not self._thread.is_alive():
                raise BindError(f"{self.engine} rank {self.rank}: the endpoint is closed: {self._broken}")
        if "error" in found:
            raise found["error"]
        return found["value"]

    def _run(self) -> None:
        quiet = 0  # rounds in which nothing was done
        sleep_exactly()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while not self._is_closed:
                if self._step():
                    quiet = 0
                    continue
                quiet += 1
                is_idle = all(link.is_idle for link in self._links) and not self.dropping
                if self._is_told and (is_idle or self.ring.device == "cpu"):
                    self._wake.wait(_TOLD)
                elif quiet < _ROUNDS and not is_idle:
                    time.sleep(_SHORT if quiet > _AT_ONCE else 0)  # 0: lets go of Python's lock
                else:
                    self._wake.wait(_LONG)
                self._wake.clear()
        except Exception as error:  # the thread's end is the end of all its links
            self._broken = f"{type(error).__name__}: {error}"
        finally:
            self._used, self._clock = time.thread_time(), None
            with self._lock:
                self._is_over = True
            while not self._commands.empty():
                with contextlib.suppress(Exception):
                    self._commands.get_nowait()()
            for link in self._links:
                link.release()
                for handle in link.handles:
                    why = self._broken or "the endpoint was closed"
                    handle.fail(TransferError(f"{link.title}: {handle.what} {handle.key!r}: {why}"))
                    handle.settle()
            if self._broken:  # peers are to see that it is no more
                with contextlib.suppress(Exception):
                    self.wire.close()

    @property
    def is_over(self) -> bool:
        """Whether the thread does nothing more but end what is under way."""
        return self._is_over

    def _step(self) -> bool:
        busy = False
        notes = self.wire.poll()  # first: a call that came before a note begins before it is heard
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            busy = True
            command()
        for peer, data in notes:
            link = self._by_peer.get(peer)
            if link is None:
                continue
            busy = True
            try:
                note = read(data)
            except BindError:
                link.count("notes_wrong")
            else:
                link.heard(peer, note)
        now = time.monotonic()
        for link in self._links:
            busy |= link.tick(now)
        for peer, link in list(self.dropping.items()):
            if now < self._drop_at.get(peer, now):
                continue
            try:
                self.wire.drop(peer)
            except TransferTimeoutError:  # it may still write: its slots wait, and the others do not
                self._drop_at[peer] = time.monotonic() + _DROPS
            else:
                del self.dropping[peer]
                link.dropped(peer)
            break  # it may have taken a while, in which nothing else went on
        for link in [one for one in self._links if one.is_closed and one.is_idle]:
            if self.dropping.keys().isdisjoint(link.peers):
                with self._lock:
                    self._links.remove(link)
                    self._past.setdefault(link.engine, Counter()).update(link.stats())
                self._by_peer.update(dict.fromkeys(link.peers))
        return busy

    def close(self) -> None:
        """End all links, and release the ring.

        It may be called again, and must be after an error.

        Raises
        ------
        TransferTimeoutError
            A peer may still write to the ring, which is not released; or the wire still waits for one.
        """
        with self._closing:
            if self._is_released:
                return
            end = time.monotonic() + _CLOSING
            links = [] if self._broken or self._is_closed else list(self._links)
            for link in links:
                link.close()
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
                self._thread.join(_CLOSING)
                if self._thread.is_alive():
                    raise TransferTimeoutError(
                        f"endpoint {self.engine}: its wire waits for a peer that is being dropped; the ring is not released: "
                        "close it again"
                    )
            self.wire.close()
            self.ring.close()
            self._is_released = True

    @property
    def links(self) -> tuple[Link, ...]:
        """Links to other engines, without closed ones of which nothing is under way."""
        return tuple(self._links)

    def stats(self) -> dict[str, dict[str, float]]:
        """By engine, what `Link.stats` counts of all links to it, closed ones among them."""
        with self._lock:
            found = {engine: Counter(counts) for engine, counts in self._past.items()}
            for link in self._links:
                found.setdefault(link.engine, Counter()).update(link.stats())
        return {engine: dict(counts) for engine, counts in found.items()}

    @property
    def cpu_seconds(self) -> float:
        """What the endpoint's thread has used of a processor; on hosts it packs and unpacks, too."""
        if (clock := self._clock) is not None:
            with contextlib.suppress(OSError):  # it has ended since
                return time.clock_gettime(clock)
        return self._used

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvbm Endpoint {self.engine} rank {self.rank} of {self._world}, {len(self._links)} links>"


class _Card:
    """A card of another rank, of which nothing is believed before it was looked at."""

    def __init__(self, card: Any) -> None:
        if not isinstance(card, bytes) or len(card) > _MOST_CARD:
            _refuse(f"at most {_MOST_CARD} bytes", repr(card)[:60])
        try:
            held = json.loads(card.decode())
        except (ValueError, RecursionError):
            _refuse("JSON", repr(card[:40]))
        if not isinstance(held, dict) or held.get("kvbm-link") != _VERSION:
            _refuse(f"version {_VERSION}: both sides need the same kvbm", repr(held)[:60])
        kinds = {
            "engine": str, "incarnation": str, "rank": int, "world": int, "model": str, "groups": dict, "sends": int, "takes": int,
            "slot_bytes": int, "chunk_bytes": int, "wire": str,
        }  # fmt: skip
        for key, kind in kinds.items():
            if type(held.get(key)) is not kind:
                _refuse(f"{key!r} to be of {kind.__name__}", repr(held.get(key))[:60])
        self.engine, self.incarnation, self.model = held["engine"], held["incarnation"], held["model"]
        self.rank, self.world = held["rank"], held["world"]
        self.sends, self.takes = held["sends"], held["takes"]
        self.slot_bytes, self.chunk_bytes = held["slot_bytes"], held["chunk_bytes"]
        if not 0 <= self.rank < self.world <= 1 << 16:
            _refuse("a rank of a world of at most 65,536", f"{self.rank} of {self.world}")
        if not (
            0 < self.chunk_bytes <= self.slot_bytes - TRAILER and 0 < self.sends < 1 << 32 and 0 < self.takes < 1 << 32
        ):
            _refuse(
                "slots that hold a chunk", f"{self.takes} of {self.slot_bytes} bytes for chunks of {self.chunk_bytes}"
            )
        try:
            self.wire = base64.b64decode(held["wire"], validate=True)
        except (binascii.Error, ValueError):
            _refuse("'wire' in base64", repr(held["wire"])[:60])
        self.groups: dict[str, tuple[Placement, str, tuple[int, ...]]] = {}
        for name, group in held["groups"].items():
            texts: list[Any] = (
                [group.get(key) for key in ("placement", "model", "planes")] if isinstance(group, dict) else [None]
            )
            if not all(isinstance(text, str) and len(text) < 1 << 19 for text in texts):
                _refuse(f"group {name!r:.60} with placement, model and planes", repr(group)[:60])
            try:
                place = _placement(texts[0], texts[1], self.engine)
            except (SpecError, KvbmError) as error:
                raise BindError(f"card of {self.engine}: {error}") from None
            if place.world != self.world:
                _refuse(f"a placement of {self.world} ranks", str(place.world))
            cuts = group.get("cuts")
            if (
                not isinstance(cuts, list)
                or len(cuts) > 64
                or not all(type(cut) is int and 0 < cut < 1 << 24 for cut in cuts)
            ):
                _refuse(f"group {name!r:.60} with cuts, a list of tokens", repr(cuts)[:60])
            self.groups[name] = (place, texts[2], tuple(cuts))
        self.groups_text = json.dumps(held["groups"], sort_keys=True)


def _require_alike(cards: list[_Card], title: str) -> None:
    """They are of one engine, a card of each of its ranks."""
    first = cards[0]
    for one in cards:
        for name in ("engine", "incarnation", "world", "model", "groups_text"):
            if getattr(one, name) != getattr(first, name):
                raise BindError(
                    f"{title}: cards of ranks {first.rank} and {one.rank} differ in {name}: {getattr(first, name)!r:.200} and "
                    f"{getattr(one, name)!r:.200}"
                )
    ranks = sorted(one.rank for one in cards)
    if ranks != list(range(first.world)):
        missing, twice = (
            sorted(set(range(first.world)) - set(ranks)),
            sorted({one for one in ranks if ranks.count(one) > 1}),
        )
        raise BindError(
            f"{title}: expected a card of each of {first.world} ranks; missing {missing}, twice {twice}"
        )


@functools.lru_cache(64)
def _placement(text: str, model: str, engine: str) -> Placement:
    """What a card says; all cards of an engine say the same."""
    return Placement.parse(text, load_shape(model), file=f"card of {engine}", name=engine)


def _refuse(expected: str, got: str) -> NoReturn:
    raise BindError(f"card: expected {expected}, got {got}")


def _planes(pool: Pool) -> str:
    """What a pool holds, in whatever layout."""
    return ", ".join(sorted({f"{plane.name} {plane.dtype}" for plane in pool.layout.planes})) or pool.shape.dtype
