"""Packing: what one rank sends to all its peers, or gets from them, in slots whose order depends on no layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..arrays import Array, describe
from ..errors import BindError, LayoutError, PlanError
from ..lower import Steps
from ..mover import current_stream
from ..planner import between, joined
from ..pool import Pool
from ..prepare import prepare
from ..section import Section
from ..shapes import ITEMSIZE
from ..spans import merge_steps
from .local import require_made, require_pool
from .messages import Message, Resharding
from .placement import whole
from .sequence import Ids, Rank, Span, pair_up
from .strips import ONE_TOKEN, Turns

__all__ = ["Packer"]

#: What divides the address of a slot.
_ALIGNMENT = 16


class _Way(NamedTuple):
    """A launch, or some: messages whose units, or single tokens, are the same ones of the rank.

    Attributes
    ----------
    messages : tuple of Message
    copies : tuple of Copy
    num_ids : int
        Ids of the rank's pool are below it.
    nbytes : tuple of int
        Of a unit, or a token, in each message's slot.
    """

    messages: tuple[Message, ...]
    copies: tuple[_core.Copy, ...]
    num_ids: int
    nbytes: tuple[int, ...]


class Packer:
    """Packs what a rank sends into a slot for each peer, by one launch for all; or unpacks what it gets.

    A slot holds whole units one after the other, then single tokens: of each its planes by name, and in each
    ``l o h t d``, dense, multiples of 16 bytes.  It does not depend on either side's layout.

    Parameters
    ----------
    made : Resharding
    rank : int
    pool : Pool
        The rank's, of the shape that its placement says.
    side : {"src", "dst"}
        Whether the rank sends, and slots are written; or gets, and slots are read.
    max_sms : int, optional
        Multiprocessors that kernels may use; all if not given.

    Attributes
    ----------
    peers : tuple of int
        Ranks of the other side that there is a message to, or from.

    Raises
    ------
    BindError
        A pool that does not fit the placement.
    PlanError
        A layout that promises no order of what a message would cut.
    """

    def __init__(
        self, made: Resharding, rank: int, pool: Pool, *, side: str = "src", max_sms: int | None = None
    ) -> None:
        if side not in ("src", "dst"):
            raise BindError(f"side: expected 'src' or 'dst', got {side!r}")
        require_made(made)
        if max_sms is not None and ((count := whole(max_sms)) is None or count < 1):
            raise BindError(f"max_sms: expected a number from 1 on, got {max_sms!r:.200}")
        self._sends = side == "src"
        place = made.src if self._sends else made.dst
        require_pool(place, rank, pool)
        self._pool, self._max_sms = pool, max_sms or 0
        self._device = -1 if pool.device == "cpu" else int(pool.device.partition(":")[2])
        self._table = _core.Table(pool.steps.shorten(pool.addresses, pool.num_blocks), self._device)
        self._made, self._rank = made, rank
        mine = self._messages(made)
        self.peers = tuple(map(self._peer, mine))
        self._ranks = {
            (m.src, m.dst): (
                Rank(f"{made.src.name} rank {m.src}", made.sends[m.src].t, made.src.nt, pool.num_blocks),
                Rank(f"{made.dst.name} rank {m.dst}", made.takes[m.dst].t, made.dst.nt, pool.num_blocks),
            )
            for m in mine
        }
        self._units = {0: self._ways(mine, single=False)}
        self._tokens = self._ways(mine, single=True)

    def sizes(self, span: Span, origin: int = 0) -> dict[int, int]:
        """Bytes of each peer's slot for a sequence; `origin` is that of the peers' spans.  `BindError` as for a call."""
        return self._sizes(self._listed(span, origin))

    def _sizes(self, work: Sequence[tuple[_Way, Ids]]) -> dict[int, int]:
        found = dict.fromkeys(self.peers, 0)
        for way, ids in work:
            for message, nbytes in zip(way.messages, way.nbytes, strict=True):
                found[self._peer(message)] += len(ids) * nbytes
        return found

    def __call__(self, span: Span, slots: Mapping[int, Any], *, origin: int = 0, stream: Any = None) -> None:
        """Pack a sequence's tokens into slots, or unpack them from there.

        Parameters
        ----------
        span : Span
            Of the rank.  Tokens without a block of it are left out: their bytes in slots stay as they are.
        slots : mapping
            Peer → array of bytes, contiguous, at a multiple of 16, on the pool's GPU or in pinned memory.
        origin : int
            That of the peers' spans.
        stream : optional
            As for `convert`.

        Raises
        ------
        BindError
            A span that does not fit; slots that are missing, too small, or lie elsewhere.  Nothing has been copied.
        """
        self._pool.require_open()
        if not self._sends and self._pool.readonly:
            raise BindError(f"{self._pool!r}: read-only")
        work = self._listed(span, origin)
        sizes = self._sizes(work)
        if not isinstance(slots, Mapping):
            raise BindError(f"slots: expected a mapping from rank to array, got a {type(slots).__name__}")
        found = {peer: self._slot(peer, slots, size) for peer, size in sizes.items() if size}
        handle = 0
        if self._device >= 0:
            handle = current_stream(self._pool) if stream is None else _core.stream_handle(stream)
        elif stream is not None:
            raise BindError(
                "stream: the pool is on the CPU, where the copy is done when the call returns; leave stream out"
            )
        filled = dict.fromkeys(self.peers, 0)
        for way, ids in work:
            addresses = []
            for message, nbytes in zip(way.messages, way.nbytes, strict=True):
                peer = self._peer(message)
                addresses.append(found[peer].address + filled[peer])
                filled[peer] += len(ids) * nbytes
            table = _core.Table(np.array(addresses, np.uint64), self._device, False)
            for copy in way.copies:
                if self._sends:
                    pairs = _core.Pairs(ids, None, way.num_ids, len(ids), False, self._device)
                    self._run(copy, self._table, table, pairs, handle)
                else:
                    pairs = _core.Pairs(None, ids, len(ids), way.num_ids, False, self._device)
                    self._run(copy, table, self._table, pairs, handle)
        if not self._sends:
            self._pool.written()

    # ---- planning --------------------------------------------------------------------------------------------------

    def _messages(self, made: Resharding) -> list[Message]:
        return [m for m in made.messages if (m.src if self._sends else m.dst) == self._rank]

    def _fitting(self, shift: int) -> tuple[_Way, ...]:
        """Ways in units that divide the distance of the positions at which both sides' tables begin: the same on both sides."""
        made = self._made
        places = (made.src, made.sends), (made.dst, made.takes)
        most = math.gcd(*(place.nt * strips.t.over for place, ranks in places for strips in ranks))
        shift = math.gcd(shift, most) % most
        if shift not in self._units:
            self._units[shift] = self._ways(self._messages(made.refit(made.cuts, shift)), single=False)
        return self._units[shift]

    def _peer(self, message: Message) -> int:
        return message.dst if self._sends else message.src

    def _ends(self, message: Message) -> tuple[Rank, Rank]:
        """The rank itself, and its peer."""
        src, dst = self._ranks[message.src, message.dst]
        return (src, dst) if self._sends else (dst, src)

    def _ways(self, messages: Sequence[Message], *, single: bool) -> tuple[_Way, ...]:
        """Messages that take the same ids of the rank together."""

        def key(message: Message) -> tuple[int, Turns | None]:
            far = self._ends(message)[1].turns
            if single:
                return 1, far
            return message.t.tokens, far if message.t.tokens % far.period else None

        groups: dict[Any, list[Message]] = {}
        for message in messages:
            groups.setdefault(key(message), []).append(message)
        return tuple(self._way(group, single) for group in groups.values())

    def _way(self, messages: Sequence[Message], single: bool) -> _Way:
        plans, sizes, num_ids = [], [], 0
        for entry, message in enumerate(messages):
            unit = ONE_TOKEN if single else message.t
            name = "src" if self._sends else "dst"
            assert unit.meeting is not None
            part = self._pool.units(unit.src_slots if self._sends else unit.dst_slots).section(
                l=[x for meeting in message.l for x in meeting.coordinates(name)],
                h=[x for meeting in message.h for x in meeting.coordinates(name)],
                t=list(unit.meeting.coordinates(name)),
            )
            slot = self._wire(part.of).behind(entry)
            ends = (part.of, slot) if self._sends else (slot, part.of)
            plans.append(between(*ends, f"{self._pool.layout.name} {'→' if self._sends else '←'} slot"))
            sizes.append(slot.accesses[0].block[0])
            num_ids = part.num_ids
        alignments, steps = (self._pool.alignment, _ALIGNMENT), (self._pool.steps, Steps())
        src, dst = (0, 1) if self._sends else (1, 0)
        copies = prepare(
            joined(plans),
            alignments[src],
            alignments[dst],
            few=self._max_sms > 0,
            device=self._device,
            src_steps=steps[src],
            dst_steps=steps[dst],
        )
        return _Way(tuple(messages), tuple(copies), num_ids, tuple(sizes))

    def _wire(self, section: Section) -> Section:
        try:
            return section.wire()
        except LayoutError as error:
            raise PlanError(f"{section.layout.name} ({section.layout.order_text}): {error}") from None

    # ---- a sequence ------------------------------------------------------------------------------------------------

    def _listed(self, span: Span, origin: int) -> list[tuple[_Way, Ids]]:
        """Of every launch the rank's ids: of units first, then of single tokens."""
        if not isinstance(span, Span):
            raise BindError(f"span: expected a kvbm.Span, got {span!r:.200}")
        Span([], span.tokens, origin)  # refuses what is no origin of the peers' spans
        for ends in list(self._ranks.values())[:1]:  # the rank itself is the same for all
            self._require_span(ends[0 if self._sends else 1], span)
        found = []
        units = self._fitting(span.origin - origin)
        fitted = {(m.src, m.dst): m for way in units for m in way.messages}
        for way, place in itertools.chain(((w, 0) for w in units), ((w, 2) for w in self._tokens)):
            message = fitted[way.messages[0].src, way.messages[0].dst]
            far = self._ends(message)[1]
            blocks = -(-far.extent(Span([], span.tokens, origin))[1] // far.nt)
            spans = [span, Span(np.zeros(blocks, np.int64), span.tokens, origin)]
            pairs = pair_up(message.t, *self._ranks[message.src, message.dst], *(spans if self._sends else spans[::-1]))
            ids = pairs[place + (0 if self._sends else 1)]
            if ids.size:
                found.append((way, ids))
        return found

    def _require_span(self, rank: Rank, span: Span) -> None:
        """A table that is long enough, of blocks that there are, none of them to be written twice."""
        blocks = rank.touched(span)[:, 0] // rank.nt
        if not self._sends and np.unique(blocks).size != blocks.size:
            raise BindError(f"{rank.name}: a block stands in the table twice, and would be written twice")

    def _slot(self, peer: int, slots: Mapping[int, Any], size: int) -> Array:
        where = f"slot of rank {peer}"
        if peer not in slots:
            raise BindError(f"{where}: missing; expected one for each of the ranks {sorted(set(self.peers))}")
        found = describe(slots[peer], where)
        nbytes = math.prod(found.shape)
        if ITEMSIZE.get(found.dtype) != 1 or merge_steps(found.shape, found.strides) not in ([], [(nbytes, 1)]):
            raise BindError(
                f"{where}: expected contiguous bytes, got {found.dtype} of shape {found.shape} and strides of {found.strides} bytes"
            )
        if nbytes < size:
            raise BindError(f"{where}: expected at least {size} bytes, got {nbytes}")
        if found.address % _ALIGNMENT:
            raise BindError(f"{where}: expected an address at a multiple of {_ALIGNMENT}, got {found.address:#x}")
        if self._sends and found.readonly:
            raise BindError(f"{where}: read-only")
        if found.device not in (self._pool.device, "cpu") or (self._device < 0 and found.device != "cpu"):
            raise BindError(f"{where}: expected memory of {self._pool.device}, or pinned, got {found.device}")
        if self._device >= 0 and found.device == "cpu":
            _core.find_device(np.array([found.address], np.uint64), where)  # refuses what is not pinned
        return found

    def _run(self, copy: _core.Copy, src: _core.Table, dst: _core.Table, pairs: _core.Pairs, stream: int) -> None:
        if self._device >= 0:
            copy.launch(src, dst, pairs, self._device, stream, self._max_sms)
        else:
            copy.run(src, dst, pairs)
