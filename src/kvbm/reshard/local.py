"""All pools at hand: a resharding carried out in one process, on its GPUs or on the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import BindError, PlanError
from ..locks import Lock
from ..pool import Pool
from ..transfer import Transfer
from .messages import Message, Resharding
from .placement import Placement
from .sequence import Ids, Rank, Span, pair_up
from .strips import Meeting, Unit

__all__ = ["Local", "LocalDone", "Spans"]

#: A span that holds for every rank; or for each rank a span, or the spans of several sequences.
Spans = Span | Sequence[Span | Sequence[Span]]

#: One stream for all, or by CUDA device.
Streams = Any


class LocalDone:
    """The end of one call of `Local`: of all its copies."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = tuple(parts)

    def wait(self, stream: Any) -> None:
        """Let a stream wait for all copies; the host does not wait."""
        for part in self._parts:
            part.wait(stream)

    def synchronize(self) -> None:
        """Wait on the host until all copies are done; raises what one of them met."""
        for part in self._parts:
            part.synchronize()

    def query(self) -> bool:
        """Whether all copies are done."""
        return all(part.query() for part in self._parts)

    def __repr__(self) -> str:
        return f"<kvbm LocalDone of {len(self._parts)} copies>"


class Local:
    """Carries out a resharding where all pools are at hand: on GPUs of one process, or in host memory.

    Parameters
    ----------
    made : Resharding
    src_pools, dst_pools : sequence of Pool
        By rank; each of the shape that its placement says.
    strategy, max_sms, chunk_bytes
        As for `Transfer`.

    Raises
    ------
    BindError
        Pools that do not fit their placement.
    PlanError
        Layouts between which the messages cannot be copied: an opaque group that a message would cut, planes that units of a
        block would share.

    Examples
    --------
    >>> copy = Local(made, prefill_pools, decode_pools)  # doctest: +SKIP
    >>> done = copy(Span([5, 9, 2], range(0, 40)), Span([7], range(0, 40)), stream=stream)  # doctest: +SKIP
    """

    def __init__(
        self,
        made: Resharding,
        src_pools: Sequence[Pool],
        dst_pools: Sequence[Pool],
        *,
        strategy: str = "auto",
        max_sms: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        _require_pools(made.src, src_pools, "source")
        _require_pools(made.dst, dst_pools, "destination")
        self._pools = tuple(src_pools), tuple(dst_pools)
        self._options: dict[str, Any] = {"strategy": strategy, "max_sms": max_sms, "chunk_bytes": chunk_bytes}
        self.made = made.refit((_cuts(src_pools), _cuts(dst_pools)))
        kinds = dict.fromkeys((made.sends[m.src].t, made.takes[m.dst].t) for m in made.messages)
        of_kind = {kind: index for index, kind in enumerate(kinds)}
        self._kinds = [of_kind[made.sends[m.src].t, made.takes[m.dst].t] for m in made.messages]
        self._lock = Lock()
        self._transfers: dict[tuple[Message, range | None, bool], Transfer] = {}
        self._tails: dict[int, Transfer] = {}
        self._ranks = tuple(
            [Rank(f"{place.name} rank {i}", strips[i].t, place.nt, pool.num_blocks) for i, pool in enumerate(pools)]
            for place, strips, pools in (
                (made.src, made.sends, src_pools),
                (made.dst, made.takes, dst_pools),
            )
        )
        for message in self.made.messages:
            self._transfer(message, None)

    def __call__(
        self,
        src_spans: Spans,
        dst_spans: Spans,
        *,
        layers: range | None = None,
        stream: Streams = None,
        wait: Any = None,
        clear_tail: bool = False,
    ) -> LocalDone:
        """Copy tokens of one or several sequences, from all source ranks to all destination ranks.

        Parameters
        ----------
        src_spans, dst_spans : Span or sequence
            One span for all ranks, where they have one block table; else by rank a span, or the spans of several sequences.
        layers : range, optional
            Of the model; all if not given.
        stream : optional
            As for `Transfer.copy`; a mapping from CUDA device to stream where several GPUs take part.  A message is ordered by
            the stream of its source's GPU.  Not given: the frameworks' current streams.
        wait : optional
            As for `Transfer.copy`, for every message.
        clear_tail : bool
            Write zeros behind the last token, to the end of its block.

        Returns
        -------
        LocalDone

        Raises
        ------
        BindError
            Spans that do not fit: tables too short, blocks that there are not, or twice, other tokens on both sides.  Nothing
            has been copied.
        """
        src, dst = (self._by_rank(side, spans) for side, spans in enumerate((src_spans, dst_spans)))
        if len({len(spans) for spans in (*src, *dst)}) > 1:
            raise BindError(
                f"{self.made.title}: expected as many sequences for every rank, got {', '.join(str(len(s)) for s in (*src, *dst))}"
            )
        if layers is not None and (layers.step != 1 or not 0 <= layers.start < layers.stop <= self.made.src.model.nl):
            raise BindError(
                f"layers: expected a range within 0 to {self.made.src.model.nl} of the model, got {layers!r}"
            )
        for side, given in enumerate((src, dst)):
            for rank, spans in zip(self._ranks[side], given, strict=True):
                for span in spans:
                    rank.require(span, written=side == 1)
        # All of it is checked before any of it is copied.
        work = [*self._listed(src, dst, layers)]
        if clear_tail:
            work += self._cleared(dst)
        return LocalDone(
            [transfer.copy(*ids, stream=_stream_of(transfer, stream), wait=wait) for transfer, *ids in work]
        )

    def explain(self) -> str:
        """What is sent, and how each message is copied."""
        lines = [str(self.made)]
        for message in self.made.messages:
            lines += ["", f"Rank {message.src} to rank {message.dst}:", self._transfer(message, None).explain()]
        return "\n".join(lines)

    def stats(self) -> dict[str, int]:
        """What has been enqueued so far: as `Transfer.stats`, of all messages."""
        total: dict[str, int] = {}
        for transfer in (*list(self._transfers.values()), *list(self._tails.values())):
            for name, count in transfer.stats().items():
                total[name] = total.get(name, 0) + count
        return total

    # ---- what is copied --------------------------------------------------------------------------------------------

    def _by_rank(self, side: int, spans: Spans) -> list[list[Span]]:
        ranks, what = self._ranks[side], ("source", "destination")[side]
        given = [spans] * len(ranks) if isinstance(spans, Span) else list(spans)
        if len(given) != len(ranks):
            raise BindError(
                f"{self.made.title}: {what}: expected one kvbm.Span for all ranks, or {len(ranks)}, one a rank, got {len(given)}"
            )
        found = [[one] if isinstance(one, Span) else list(one) for one in given]
        for one in (span for row in found for span in row):
            if not isinstance(one, Span):
                raise BindError(f"{self.made.title}: {what}: expected kvbm.Span, got {type(one).__name__}")
        return found

    def _listed(self, src: list[list[Span]], dst: list[list[Span]], layers: range | None) -> Iterator[_Work]:
        """Of every message: a transfer, and the ids that it copies."""
        shifts = [abs(a.origin - b.origin) for a, b in zip(src[0], dst[0], strict=True)]
        made = self._fitting(math.gcd(*shifts) if any(shifts) else 0)
        listed: dict[Any, list[tuple[Ids, Ids, bool]]] = {}  # messages of one kind have the same pairs in the same tables
        for kind, message in zip(self._kinds, made.messages, strict=True):
            if layers is not None and not _layers_of(message, layers)[0]:
                continue
            spans = src[message.src], dst[message.dst]
            key = kind, *map(id, itertools.chain(*spans))
            if key not in listed:
                listed[key] = self._pairs(message, *spans)
            for src_ids, dst_ids, single in listed[key]:
                self._require_once(message, src_ids, dst_ids)
                yield self._transfer(message, layers, single), src_ids, dst_ids

    def _pairs(self, message: Message, src: list[Span], dst: list[Span]) -> list[tuple[Ids, Ids, bool]]:
        """Pairs of units, and pairs of single tokens, of several sequences; without those that are empty."""
        ranks = self._ranks[0][message.src], self._ranks[1][message.dst]
        pairs = [pair_up(message.t, *ranks, *spans) for spans in zip(src, dst, strict=True)]
        found = []
        for single in (False, True):
            ids = [[each[2 * single + side] for each in pairs] for side in (0, 1)]
            src_ids, dst_ids = (one[0] if len(one) == 1 else np.concatenate(one) if one else _NONE for one in ids)
            if src_ids.size and (np.minimum(src_ids, dst_ids) >= 0).any():
                found.append((src_ids, dst_ids, single))
        return found

    def _require_once(self, message: Message, src_ids: Ids, dst_ids: Ids) -> None:
        """What copies would refuse, before any of them has begun."""
        kept = (src_ids >= 0) & (dst_ids >= 0)
        src_ids, dst_ids = src_ids[kept], dst_ids[kept]
        if np.unique(dst_ids).size != dst_ids.size:
            raise BindError(
                f"{self._ranks[1][message.dst].name}: two sequences have one block in their tables, which would be written twice"
            )
        if self._pools[0][message.src] is self._pools[1][message.dst] and np.intersect1d(src_ids, dst_ids).size:
            raise BindError(
                f"{self.made.title}: rank {message.dst}: a block of its pool would be both read and written"
            )

    def _fitting(self, shift: int) -> Resharding:
        """The messages in units that divide the distance of the positions at which both sides' tables begin."""
        return self.made if shift == 0 else self.made.refit(self.made.cuts, shift)

    def _transfer(self, message: Message, layers: range | None, single: bool = False) -> Transfer:
        if single:
            message = message._replace(t=_ONE_TOKEN)
        key = message, layers, single
        found = self._transfers.get(key)
        if found is None:
            with self._lock:
                found = self._transfers.get(key)
                if found is None:
                    found = self._transfers[key] = self._made(message, layers)
        return found

    def _made(self, message: Message, layers: range | None) -> Transfer:
        own = _layers_of(message, layers)
        assert message.t.meeting is not None
        ends = []
        for side, (name, slots) in enumerate((("src", message.t.src_slots), ("dst", message.t.dst_slots))):
            pool = self._pools[side][(message.src, message.dst)[side]]
            heads = [x for meeting in message.h for x in meeting.coordinates(name)]
            tokens = list(message.t.meeting.coordinates(name))
            where = f"{self._ranks[side][(message.src, message.dst)[side]].name} ({pool.layout.name})"
            try:
                part = pool.units(slots)
                ends.append(part.section(l=own[side], h=heads, t=tokens))
            except PlanError as error:
                raise PlanError(f"{where}: {error}" + (_WHOLE_BLOCKS if slots == 1 < pool.shape.nt else "")) from None
        return Transfer(ends[0], ends[1], **self._options)

    def _cleared(self, dst: list[list[Span]]) -> Iterator[_Work]:
        """Of every destination rank: a transfer from a block of zeros, and the slots behind the last tokens."""
        for index, (rank, spans) in enumerate(zip(self._ranks[1], dst, strict=True)):
            slots = []
            for span in spans:
                held = rank.held(span)
                rest = np.arange(held, -(-held // rank.nt) * rank.nt, dtype=np.int64)
                slots.append(rank.ids(span, rest, 1) if rest.size else rest)
            ids = np.concatenate(slots) if slots else np.zeros(0, np.int64)
            if (ids >= 0).any():
                yield self._tail(index), np.zeros(ids.size, np.int64), ids

    def _tail(self, index: int) -> Transfer:
        with self._lock:
            if index not in self._tails:
                pool = self._pools[1][index]
                zeros = Pool.allocate(
                    pool.layout, pool.shape, 1, "cpu" if pool.device == "cpu" and not pool.pinned else "pinned"
                )
                for array in zeros.arrays:
                    array.view(np.uint8)[...] = 0
                self._tails[index] = Transfer(zeros.units(1), pool.units(1))
            return self._tails[index]


#: A transfer, and the ids of both sides.
_Work = tuple[Transfer, Ids, Ids]

_NONE: Ids = np.zeros(0, np.int64)

_ONE_TOKEN = Unit(1, Meeting(0, 0, 0, ()), 1, 1)

_WHOLE_BLOCKS = "; tokens go one by one where a range begins or ends inside a unit: expected ranges of whole ones"


def _layers_of(message: Message, layers: range | None) -> tuple[list[int], list[int]]:
    """The message's layers on each side, those among `layers` of the model."""
    found = [
        triple
        for meeting in message.l
        for triple in zip(*(meeting.coordinates(name) for name in ("first", "src", "dst")), strict=True)
        if layers is None or triple[0] in layers
    ]
    return [src for _, src, _ in found], [dst for *_, dst in found]


def _stream_of(transfer: Transfer, stream: Streams) -> Any:
    if not isinstance(stream, Mapping):
        return stream
    if transfer.device not in stream:
        raise BindError(f"stream: expected one for cuda:{transfer.device}, got streams for {list(stream)}")
    return stream[transfer.device]


def _cuts(pools: Sequence[Pool]) -> tuple[int, ...]:
    """Where the layouts of pools split the tokens of a block."""
    found = set()
    for pool in pools:
        for access in pool.resolved.section.accesses:
            found |= {step.divisor for step in access.steps if step.axes == ("t",) and not step.opaque}
    return tuple(sorted(found - {1}))


def _require_pools(place: Placement, pools: Sequence[Pool], what: str) -> None:
    if len(pools) != place.world:
        raise BindError(
            f"{place.name}: expected {place.world} {what} pools, one a rank of {place.mesh_text}, got {len(pools)}"
        )
    for rank, pool in enumerate(pools):
        if not isinstance(pool, Pool):
            raise BindError(f"{place.name}: rank {rank}: expected a kvbm.Pool, got {type(pool).__name__}")
        if pool.shape != place.shape(rank):
            raise BindError(f"{place.name}: rank {rank}: expected a pool of {place.shape(rank)}, got {pool.shape}")
