"""Pack what a rank sends to its peers, or unpack what it receives, in an order that is independent of layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._arguments import quoted, whole
from ..compile.prepare import digest_copies, prepare, warm
from ..digest.cells import Keys, alone, fused, keys_of
from ..digest.run import fused_copies, pinned
from ..errors import BindError, LayoutError, PlanError
from ..layout.loops import loops_of
from ..layout.region import Section
from ..layout.shapes import ITEMSIZE
from ..memory.array_info import Array, describe
from ..memory.streams import require_no_stream
from ..planner.cast import Scale
from ..planner.lowering import Steps
from ..planner.plan import Plan, between
from ..pool.pool import Pool
from ..pool.section import PoolSection
from ..system.machine import device_of
from .casting import meaning_of
from .local import require_pool
from .messages import Message, Resharding, common_shift, require_layers, require_made
from .sequence import NONE, Ids, Parts, Rank, Span, split
from .strips import ONE_TOKEN, Turns

#: Alignment of a slot's address, and of the bytes of a unit in it.
_ALIGNMENT = 16

#: The id of a chunk's unit is its distance from a multiple of this, in steps of `_ALIGNMENT`, so that it fits into 32 bits.
_REACH = 1 << 34

#: Limit of the ids of `Packer.cells`; a slot is smaller than `_REACH`, too.
NUM_CELLS = 2 * _REACH // _ALIGNMENT - 1

#: Size of the cache of launches with digests, by message, range of layers and distance of origins.
_MOST_LANES = 4096

#: Size of the caches of what all sequences of some tokens have in common.
_MOST_TOKENS = 32


class Lane(NamedTuple):
    """Launches of one message's units, or single tokens, with digests."""

    copies: tuple[_core.Copy, ...]  # copies between the pool and slots at any address: see `Packer.cells`
    is_fused: bool  # True if the copies also compute digests
    digests: tuple[_core.Copy, ...]  # launches that only digest slots
    num_ids: int  # number of ids of the rank's pool
    nbytes: int  # bytes of a unit or token in the slot
    first: int  # position in a unit of the first token that is sent


class Listed(NamedTuple):
    """A message's positions of units and of single tokens of a sequence, and the rank's ids of both.

    An id is -1 if the rank has no block; `has_all` tells of both whether all have one.
    """

    at: Parts
    ids: tuple[Ids, Ids]
    has_all: tuple[bool, bool]


class _Ids(NamedTuple):
    """Where a rank's ids of units, or of single tokens, are in the table of any sequence of some tokens."""

    #: Of each id: its entry of the table, and which of the ids of that block it is.
    entries: Ids
    rests: Ids
    each: int  # ids of a block

    def of(self, table: Ids) -> tuple[Ids, bool]:
        """The ids, -1 if there is no block; and whether all have one."""
        found: Ids = table[self.entries]
        if self.each > 1:
            found = found * self.each + self.rests
        if not found.size or found.min() >= 0:
            return found, True
        return np.maximum(found, -1), False


@functools.lru_cache(maxsize=1024)
def _launches(
    ends: tuple[Section, Section],
    keys: Keys,
    title: str,
    alignments: tuple[int, int],
    steps: tuple[Steps, Steps],
    slot: int,
    cast: Scale | None,
    is_limited: bool,
    device: int,
    *_scales: str,
) -> tuple[tuple[_core.Copy, ...], bool, tuple[_core.Copy, ...]]:
    """The launches of a lane that copy, whether they also digest, and those that only digest the slot, which is one of both ends.

    Cached, as links to several engines with the same placement have the same ones.  Equal layouts may differ in their scales.
    """
    made = fused(*ends, keys, alignments, title, sm_limited=is_limited) if cast is None else ""
    copies = fused_copies(made, keys.lanes, *steps, sm_limited=is_limited)
    is_fused = not isinstance(copies, str)
    if isinstance(copies, str):
        plan, (here, there) = between(*ends, title, cast=cast), steps
        copies = prepare(plan, *alignments, sm_limited=is_limited, device=device, src_steps=here, dst_steps=there)
    return tuple(copies), is_fused, tuple(digest_copies(alone(ends[slot], keys, _ALIGNMENT, title), keys.lanes))


class Packer:
    """The launches that pack what a rank sends into slots, or unpack what it receives; `Cut` makes them.

    A slot holds whole units one after the other, then single tokens.  Each has its planes by name, and each plane is ``l o h t d``,
    dense, padded to 16 bytes.  The contents do not depend on the layout of either side.  Of a plan with a cast, slots have the
    format of the side with fewer bytes: the other side casts when it packs or unpacks, and digests are of what is in the slots.

    Parameters
    ----------
    made : Resharding
        The plan.
    rank : int
        The rank.
    pool : Pool
        The rank's pool, with the shape of its placement.
    side : {"src", "dst"}
        ``"src"``: the rank sends, and slots are written.  ``"dst"``: the rank receives, and slots are read.
    max_sms : int, optional
        Multiprocessors that kernels may use.  Default: all.

    Attributes
    ----------
    peers : tuple of int
        Ranks of the other side with which the rank exchanges messages.
    side : int
        0: the rank sends; 1: it receives.
    casts : bool
        True if this rank casts between its pool and slots.

    Raises
    ------
    BindError
        The pool does not fit the placement, or the plan has a cast and not this pool's layout.
    PlanError
        A message would cut an opaque group of the layout, or there is no cast between the formats.
    """

    def __init__(
        self, made: Resharding, rank: int, pool: Pool, *, side: str = "src", max_sms: int | None = None
    ) -> None:
        given: Any = side
        if not isinstance(given, str) or given not in ("src", "dst"):
            raise BindError(f"side: expected 'src' or 'dst', got {quoted(side)}")
        require_made(made)
        if max_sms is not None and ((count := whole(max_sms)) is None or not 0 < count < 1 << 31):
            raise BindError(f"max_sms: expected a number from 1 on, got {quoted(max_sms)}")
        self.sends = side == "src"
        place = made.src if self.sends else made.dst
        require_pool(place, rank, pool)
        self.pool, self.max_sms = pool, 0 if pool.device == "cpu" else max_sms or 0
        self.device = device_of(pool.device)
        self.table = _core.Table(pool.steps.shorten(pool.addresses, pool.num_blocks), self.device, watch=pool.watch)
        self.made, self.rank, self.side = made, rank, 0 if self.sends else 1
        self.casts = self._require_cast(made)
        mine = self._messages(made)
        self.peers = tuple(map(self.peer, mine))
        self._ranks = {
            (m.src, m.dst): (
                Rank(f"{made.src.name} rank {m.src}", made.sends[m.src].t, made.src.nt, pool.num_blocks),
                Rank(f"{made.dst.name} rank {m.dst}", made.takes[m.dst].t, made.dst.nt, pool.num_blocks),
            )
            for m in mine
        }
        self._alignments, self._steps = self.in_order(pool.alignment, _ALIGNMENT), self.in_order(pool.steps, Steps())
        self._title = f"{pool.layout.name} {'→' if self.sends else '←'} slot"
        self._fitting = {0: mine}
        for message in mine:
            parts = self._parts(message, single=False)  # raises an error if the message would cut an opaque group
            if self.casts:
                self._between(parts, message)
        self._layers: dict[range, dict[int, frozenset[int]]] = {}
        self._lanes: dict[tuple[Message, bool], Lane] = {}
        self._routes: dict[tuple[int, int, bool], tuple[_core.Route, Lane]] = {}
        self._fits: Span | None = None  # the last span that was checked
        #: Tokens and origin → the entries of a table that have them, from the first to behind the last.
        self._entries: dict[tuple[range, int], tuple[int, int]] = {}
        self._listed: tuple[Span | None, int, list[tuple[Message, Listed]]] = (None, 0, [])  # the last span that was listed
        #: Tokens, the span's and the peers' origin → messages of one kind, and what is listed of them but for the table.
        self._places: dict[tuple[range, int, int], list[tuple[list[Message], Parts, tuple[_Ids, _Ids]]]] = {}
        self._model = place.part(rank)

    @functools.cached_property
    def fingerprint(self) -> int:
        """The plan's fingerprint in trailers of chunks."""
        return int(self.made.fingerprint, 16)

    def zero(self, span: Span, *, origin: int = 0, layers: range, stream: Any = None) -> None:
        """Write zeros where messages with these tokens and layers would be unpacked, and wait until they are there.

        Tokens without a block are skipped.  `origin` is that of the peers' spans.  Raises `BindError` if the span does
        not fit, or the pool is closed, and `CudaError` if a call of the driver failed.
        """
        self.require_usable()
        work = []
        for message, listed in self.listed(span, origin):
            if (some := message.of_layers(layers)) is not None:
                for single, ids in enumerate(listed.ids):
                    if (ids >= 0).any():
                        work.append((self.lane(some, single=bool(single)), ids[ids >= 0]))
        if not work:
            return
        on_gpu = self.device >= 0
        size, count = 2 + max(lane.nbytes for lane, _ in work) // 8, max(ids.size for _, ids in work)
        memory = pinned.take(size + count) if on_gpu else np.zeros(size + count, np.uint64)
        memory[:size] = 0
        address, digests = int(memory.ctypes.data), int(memory.ctypes.data) + 8 * size
        for lane, ids in work:  # the launches that unpack chunks; every unit is read from the same zeros
            base, cell = self.cells(-(-address // _ALIGNMENT) * _ALIGNMENT, lane.nbytes, 1)
            places = np.zeros(ids.size, np.int64)
            ends = self.in_order(ids, places + cell[0])
            pairs = _core.Pairs(*ends, *self.in_order(lane.num_ids, NUM_CELLS), False, self.device)
            positions = _core.Positions(places, ids.size, self.device)
            route = self.route(lane, base, copies=True)
            route.copy_digested(pairs, positions, digests, on_gpu, (0, 0), stream, None, (self, memory)).synchronize()
        if on_gpu:
            pinned.give(memory)

    # ---- planning --------------------------------------------------------------------------------------------------

    def _require_cast(self, made: Resharding) -> bool:
        """True if this rank casts.  `BindError` if the plan does not say what is cast."""
        if made.cast is None:
            return False
        if made.layouts is None:
            raise BindError(f"{made.title}: cast: expected a plan with the layouts of both sides, made with layouts=")
        if meaning_of(self.pool.layout) != meaning_of(made.layouts[self.side]):
            raise BindError(
                f"{made.title}: cast: expected a pool of the plan's layout {made.layouts[self.side].order_text}, got "
                f"{self.pool.layout.order_text}"
            )
        return bool(made.casts) and made.coded != self.side

    def _between(self, parts: tuple[Section, Section], message: Message) -> Plan:
        """The copy between a section of the pool and one of a slot."""
        ends = self.in_order(*parts)
        return between(ends[0], ends[1], self._title, cast=self.made.cast_of(message) if self.casts else None)

    def _messages(self, made: Resharding) -> tuple[Message, ...]:
        return tuple(m for m in made.messages if (m.src if self.sends else m.dst) == self.rank)

    def in_order(self, mine: Any, far: Any) -> tuple[Any, Any]:
        """Return (this rank's, the other side's) values in the order (source, destination)."""
        return (mine, far) if self.sends else (far, mine)

    def fitting(self, shift: int) -> tuple[Message, ...]:
        """The rank's messages, with units that divide `shift`, the distance of the origins; both sides use the same units."""
        shift = shift and common_shift(self.made, shift)
        if shift not in self._fitting:
            self._fitting[shift] = self._messages(self.made.refit(self.made.cuts, shift))
        return self._fitting[shift]

    def layers(self, chosen: range) -> dict[int, frozenset[int]]:
        """Peer → those of some layers that the rank exchanges with it; cached."""
        chosen = require_layers(chosen, self.made.src.model.nl)
        found = self._layers.get(chosen)
        if found is None:
            found = dict.fromkeys(self.peers, frozenset[int]())
            for message in self._fitting[0]:
                held = {x for meeting in message.l for x in meeting.coordinates("first")}
                found[self.peer(message)] |= held & set(chosen)
            self._layers[chosen] = found
        return found

    def peer(self, message: Message) -> int:
        return message.dst if self.sends else message.src

    def ends(self, message: Message) -> tuple[Rank, Rank]:
        """The packer's rank, and its peer."""
        mine, far = self.in_order(*self._ranks[message.src, message.dst])
        return mine, far

    def part(self, message: Message, single: bool) -> PoolSection:
        """A message's section of the pool's units or tokens."""
        tokens, chosen = message.part(0 if self.sends else 1, single=single)
        return self.pool.units(tokens).section(l=chosen["l"], h=chosen["h"], t=chosen["t"])

    def _parts(self, message: Message, single: bool) -> tuple[Section, Section]:
        """A message's section of the pool's units or tokens, and the section of the packed slot."""
        part = self.part(message, single).of
        return part, self._wire(self.made.section(message, 1 - self.side, single=single) if self.casts else part)

    def lane(self, message: Message, *, single: bool) -> Lane:
        """The launches that copy and digest one message's units, or its single tokens; cached."""
        found = self._lanes.get((message, single))
        if found is None:
            if len(self._lanes) >= _MOST_LANES:
                self._lanes.clear()
            found = self._lanes.setdefault((message, single), self._lane(message, single))
        return found

    @staticmethod
    def cells(address: int, nbytes: int, count: int) -> tuple[int, Ids]:
        """A base address (equal for nearby slots), and the ids of `count` units from an address on: distances from the base."""
        base = address // _REACH * _REACH
        return base, np.arange(count, dtype=np.int64) * (nbytes // _ALIGNMENT) + (address - base) // _ALIGNMENT

    def route(self, lane: Lane, base: int, *, copies: bool) -> _core.Route:
        """The route of a lane's copies between the pool and `cells`, or of its digests; cached."""
        at = id(lane), base, copies
        found = self._routes.get(at)
        if found is None:
            if len(self._routes) >= _MOST_LANES:
                self._routes.clear()
            slot = _core.Table(np.array([base], np.uint64), self.device, False)
            if copies:
                made = _core.Route(
                    self.device, *self.in_order(self.table, slot), *self.in_order(lane.num_ids, NUM_CELLS), direct=lane.copies,
                    sum_direct=lane.copies if lane.is_fused else (), digests=self.in_order((), lane.digests),
                    digests_dst=self.sends, max_sms=self.max_sms,
                )  # fmt: skip
            else:
                made = _core.Route(
                    self.device, slot, slot, NUM_CELLS, NUM_CELLS, direct=(), limits=(), digests=(lane.digests, ())
                )
            found = self._routes[at] = (made, lane)  # keeps the lane alive, as its id() is the key
        return found[0]

    def _lane(self, message: Message, single: bool) -> Lane:
        part, slot = self._parts(message, single)
        first, keys = self.keys(message, single, 1 - self.side if self.casts else self.side)
        nbytes = slot.accesses[0].block[0]
        slot = replace(slot, accesses=tuple(replace(access, block=(_ALIGNMENT, 0)) for access in slot.accesses))
        cast = self.made.cast_of(message) if self.casts else None
        copies, is_fused, digests = _launches(
            self.in_order(part, slot), keys, self._title, self._alignments, self._steps, int(self.sends), cast, self.max_sms > 0,
            self.device, repr(part.layout.scales), repr(slot.layout.scales),
        )  # fmt: skip
        warm([*copies, *digests], self.device)
        return Lane(copies, is_fused, digests, part.num_ids, nbytes, first)

    def keys(self, message: Message, single: bool, side: int | None = None) -> tuple[int, Keys]:
        """The keys of a unit's cells, at the model's coordinates, and the position in a unit from which they count.

        `side`: in whose format the cells are; default: in this rank's.
        """
        side = self.side if side is None else side
        unit, name = ONE_TOKEN if single else message.t, ("src", "dst")[side]
        assert unit.meeting is not None
        section, layout, model = self.pool.resolved.section, self.pool.layout, self._model
        if side != self.side:
            assert self.made.layouts is not None
            place, rank = (self.made.src, self.made.dst)[side], (message.src, message.dst)[side]
            layout = self.made.layouts[side]
            section = layout.resolve(place.shape(rank), 1).section
            model = place.part(rank)
        choices: list[tuple[str, tuple[int, ...]]] = [
            (axis, tuple(x for meeting in meetings for x in meeting.coordinates(name)))
            for axis, meetings in (("l", message.l), ("h", message.h))
            if axis in layout.present
        ]
        first, *others = unit.meeting.coordinates("first")
        choices.append(("t", (0, *(position - first for position in others))))
        if others:  # a rank's slots count only its own tokens, keys count all tokens of a unit
            accesses = [
                replace(access, sizes=tuple((axis, unit.tokens if axis == "t" else n) for axis, n in access.sizes))
                for access in section.accesses
            ]
            section = replace(section, accesses=tuple(accesses))
        return first, keys_of(section, model, choices)

    def _wire(self, section: Section) -> Section:
        try:
            return section.wire()
        except LayoutError as error:
            raise PlanError(f"{section.layout.name} ({section.layout.order_text}): {error}") from None

    # ---- a sequence ------------------------------------------------------------------------------------------------

    def listed(self, span: Span, origin: int) -> list[tuple[Message, Listed]]:
        """The units and tokens of a sequence for every message.  `origin` is the origin of the peers' spans.

        Sequences of the same tokens and origins have the messages in the same order.

        Raises `BindError` if the span does not fit, or if a token that is sent has no block.
        """
        origin = self.require_spans(span, origin)
        last, at_origin, found = self._listed
        if last is span and at_origin == origin:  # spans are immutable
            return found
        found = []  # not the one that another caller may still read
        for messages, at, places in self._places_of(span, origin):
            units, has_units = places[0].of(span.table)
            tokens, has_tokens = places[1].of(span.table) if at.tokens.size else (NONE, True)
            if self.sends and not (has_units and has_tokens):
                raise BindError(
                    f"{self.ends(messages[0])[0].name}: table: an entry without a block among the tokens {span.tokens}: expected "
                    "blocks for all that is sent; send the tokens that have them"
                )
            one = Listed(at, (units, tokens), (has_units, has_tokens))
            found += [(message, one) for message in messages]
        self._listed = span, origin, found
        return found

    def _places_of(self, span: Span, origin: int) -> list[tuple[list[Message], Parts, tuple[_Ids, _Ids]]]:
        """What is listed of any sequence of these tokens, but for the table; cached."""
        key = span.tokens, span.origin, origin
        found = self._places.get(key)
        if found is None:
            kinds: dict[tuple[int, Turns], tuple[list[Message], Parts, tuple[_Ids, _Ids]]] = {}
            for message in self.fitting(span.origin - origin):
                mine, far = self.ends(message)
                kind = message.t.tokens, far.turns
                if kind not in kinds:  # peers of one kind have the same tokens
                    at = split(message.t, *self.in_order(mine.turns, far.turns), span.tokens, span.origin)
                    slots = message.t.src_slots if self.sends else message.t.dst_slots
                    kinds[kind] = [], at, (_ids(mine, span, at.units, slots), _ids(mine, span, at.tokens, 1))
                kinds[kind][0].append(message)
            if len(self._places) >= _MOST_TOKENS:
                self._places.clear()
            found = self._places[key] = list(kinds.values())
        return found

    def require_spans(self, span: Span, origin: int) -> int:
        """Check a span.  Returns the peers' origin as an int, as a NumPy integer could overflow."""
        if not isinstance(span, Span):
            raise BindError(f"span: expected a kvbm.Span, got {quoted(span)}")
        far = span.origin if origin is span.origin else Span([], span.tokens, origin).origin  # checks the origin
        if span is not self._fits:  # spans are immutable: check each once
            for ends in list(self._ranks.values())[:1]:  # this rank is the same in all
                self._require_span(ends[0 if self.sends else 1], span)
            self._fits = span
        return far

    def entries(self, span: Span) -> tuple[int, int]:
        """The entries of the table of a span that hold its tokens: the first, and behind the last one.

        Raises `BindError` if no turn of this rank begins at the span's origin.
        """
        found = self._entries.get((span.tokens, span.origin))
        if found is None:
            rank = next(iter(self._ranks.values()))[self.side]  # this rank is the same in all
            rank.require_origin(span.origin)
            first, behind = rank.extent(span) if len(span.tokens) else (0, 0)
            if len(self._entries) >= _MOST_TOKENS:
                self._entries.clear()
            found = (first // rank.nt, -(-behind // rank.nt)) if behind > first else (0, 0)
            self._entries[span.tokens, span.origin] = found
        return found

    def _require_span(self, rank: Rank, span: Span) -> None:
        """Check that the table is long enough, that its blocks exist, and that none is written twice."""
        first, behind = self.entries(span)
        blocks = span.table[first:behind]
        if behind > len(span.table) or not _core.blocks_fit(blocks, rank.num_blocks, not self.sends):
            rank.blocks(span)  # raises an error, unless a block is there twice
            raise BindError(f"{rank.name}: the table contains a block twice, so it would be written twice")

    def slot(self, given: Any, size: int, where: object, *, exact: bool = False) -> Array:
        found = given if isinstance(given, Array) else describe(given, str(where))
        nbytes = math.prod(found.shape)
        if ITEMSIZE.get(found.dtype) != 1 or loops_of(found.shape, found.strides) not in ([], [(nbytes, 1)]):
            raise BindError(
                f"{where}: expected contiguous bytes, got {found.dtype} of shape {found.shape} and strides of {found.strides} bytes"
            )
        if nbytes < size or (exact and nbytes > size):
            raise BindError(f"{where}: expected {'' if exact else 'at least '}{size} bytes, got {nbytes}")
        if found.address % _ALIGNMENT:
            raise BindError(f"{where}: expected an address at a multiple of {_ALIGNMENT}, got {found.address:#x}")
        if self.sends and found.readonly:
            raise BindError(f"{where}: read-only")
        if found.device not in (self.pool.device, "cpu") or (self.device < 0 and found.device != "cpu"):
            raise BindError(f"{where}: expected memory of {self.pool.device}, or pinned, got {found.device}")
        if self.device >= 0 and found.device == "cpu":
            _core.find_device(np.array([found.address], np.uint64), str(where))  # raises an error if it is not pinned
        return found

    def require_disjoint(self, slots: Iterable[tuple[object, int, int]]) -> None:
        """Check that no slot ``(name in messages, address, bytes)`` overlaps the pool, and that written slots do not overlap."""
        behind = 0
        before: object = ""
        for where, address, nbytes in sorted(slots, key=lambda slot: slot[1]):
            if self.pool.holds(address, address + nbytes):
                raise BindError(f"{where}: expected separate memory; it overlaps the {self.pool!r}")
            if self.sends and address < behind:
                raise BindError(f"{where}: expected separate memory; it overlaps {before}")
            behind, before = address + nbytes, where

    def require_usable(self) -> None:
        self.pool.require_open()
        if not self.sends and self.pool.readonly:
            raise BindError(f"{self.pool!r}: read-only")

    def require_no_stream(self, stream: Any, wait: Any = None) -> None:
        if self.device < 0:
            require_no_stream("the pool is on the CPU, where the call waits for the copy", stream=stream, wait=wait)


def _ids(rank: Rank, span: Span, starts: Ids, of: int) -> _Ids:
    """Where the ids of parts of `of` slots each are that begin at some positions."""
    entries, rests = np.divmod(rank.slots(span, starts), rank.nt)
    return _Ids(entries, rests // of, rank.nt // of)
