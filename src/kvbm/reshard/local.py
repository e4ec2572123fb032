"""Run a resharding in one process that has all pools, on its GPUs or in host memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _core
from .._arguments import quoted
from ..copy.executor import current_stream, require_disjoint
from ..copy.transfer import Strategy, Transfer
from ..copy.zeros import block_of_zeros
from ..errors import BindError, PlanError
from ..layout.layout import Layout
from ..memory.array_info import find_overlap
from ..planner.cast import Cast, as_cast
from ..pool.pool import Pool
from ..system.locks import Lock
from .casting import Layouts, meaning_of
from .messages import Message, Resharding, common_shift, require_layers, require_made
from .placement import Placement
from .sequence import NONE, Ids, Rank, Span, pair_up
from .strips import ONE_TOKEN, Meeting

#: One span for all ranks; or per rank a span, or the spans of several sequences.
Spans = Span | Sequence[Span | Sequence[Span]]

#: One stream for all copies, or a mapping from CUDA device to stream.
Streams = Any


class LocalDone:
    """The completion of all copies of one call of `Local`."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = tuple(parts)

    def wait(self, stream: Any) -> None:
        """Make a stream wait for all copies.  The host does not wait."""
        for part in self._parts:
            part.wait(stream)

    def synchronize(self) -> None:
        """Wait on the host until all copies are done.  Raises the error of a failed copy."""
        for part in self._parts:
            part.synchronize()

    def query(self) -> bool:
        """True if all copies are done."""
        return all(part.query() for part in self._parts)

    def __repr__(self) -> str:
        return f"<kvbm LocalDone of {len(self._parts)} copies>"


class Local:
    """Runs a resharding in one process that has all pools: on its GPUs, or in host memory.

    Parameters
    ----------
    made : Resharding
        The plan.
    src_pools, dst_pools : sequence of Pool
        One pool per rank, with the shape that the placement gives.  None for a rank that holds none of the layers.  Pools of the
        destination must not share memory.
    strategy, max_sms, chunk_bytes
        As for `Transfer`.
    cast : {"amax"} or kvbm.Scale, optional
        Values change their format on the way, as for `plan`.  Default: that of the plan.

    Raises
    ------
    BindError
        A pool does not fit its placement.
    DTypeError
        The formats of both sides differ, and there is no `cast`.
    PlanError
        The layouts cannot be copied in these messages: a message would cut an opaque group, or units of a block would share a
        plane.
    CoverageError
        A message would have a part of the elements that share a scale; the message says which sizes fit.

    Examples
    --------
    >>> copy = Local(made, prefill_pools, decode_pools)  # doctest: +SKIP
    >>> done = copy(Span([5, 9, 2], range(0, 40)), Span([7], range(0, 40)), stream=stream)  # doctest: +SKIP
    """

    def __init__(
        self, made: Resharding, src_pools: Sequence[Pool | None], dst_pools: Sequence[Pool | None], *,
        strategy: Strategy = "auto", max_sms: int | None = None, chunk_bytes: int | None = None, cast: Cast = None,
    ) -> None:  # fmt: skip
        require_made(made)
        if (scale := as_cast(cast)) is not None and scale != made.cast:
            if made.cast is not None:
                raise BindError(f"{made.title}: cast: expected {made.cast} as in the plan, or none, got {scale}")
            made = replace(made, cast=scale)
        _require_pools(made.src, src_pools, "source")
        _require_pools(made.dst, dst_pools, "destination")
        self._pools = tuple(src_pools), tuple(dst_pools)
        _require_own_memory(made, dst_pools)
        self._options: dict[str, Any] = {"strategy": strategy, "max_sms": max_sms, "chunk_bytes": chunk_bytes}
        layouts = None if made.cast is None else _one_layout_each(made, (src_pools, dst_pools))
        self.made = made.refit((cuts_of(src_pools), cuts_of(dst_pools)), layouts=layouts)
        kinds = dict.fromkeys((made.sends[m.src].t, made.takes[m.dst].t) for m in made.messages)
        of_kind = {kind: index for index, kind in enumerate(kinds)}
        self._kinds = [of_kind[made.sends[m.src].t, made.takes[m.dst].t] for m in made.messages]
        self._lock = Lock()
        self._transfers: dict[tuple[Message, range | None, bool], Transfer] = {}
        self._tails: dict[tuple[int, tuple[int, ...]], tuple[Transfer, _Ends]] = {}
        self._zeros: dict[int, Pool] = {}
        self._fitted = {0: self.made}
        self._both = _read_and_written(self.made, src_pools, dst_pools)
        self._ranks = tuple(
            [
                Rank(f"{place.name} rank {i}", strips[i].t, place.nt, 0 if pool is None else pool.num_blocks)
                for i, pool in enumerate(pools)
            ]
            for place, strips, pools in ((made.src, made.sends, src_pools), (made.dst, made.takes, dst_pools))
        )
        for message in self.made.messages:
            self._transfer(message, None)

    def __call__(
        self, src_spans: Spans, dst_spans: Spans, *, layers: range | None = None, stream: Streams = None,
        wait: Any = None, clear_tail: bool = False,
    ) -> LocalDone:  # fmt: skip
        """Copy tokens of one or several sequences, from all source ranks to all destination ranks.

        Parameters
        ----------
        src_spans, dst_spans : Span or sequence
            One span, if all ranks have the same block table.  Else one item per rank: a span, or the spans of several sequences.
        layers : range, optional
            Layers of the model.  Default: all.
        stream : optional
            As for `Transfer.copy`.  For several GPUs: a mapping from CUDA device to stream; a message runs on the stream of its
            source's GPU.  Default: the current streams of the frameworks.
        wait : optional
            As for `Transfer.copy`, for every message.
        clear_tail : bool
            Write zeros after the last token, to the end of its block.  A block id is one block on every rank: if ranks share the
            tokens, the block is cleared on each of them, also where it holds none of the tokens.

        Returns
        -------
        LocalDone
            It has ``wait(stream)``, ``synchronize()`` and ``query()``.

        Raises
        ------
        BindError
            A table is too short, a block does not exist or is written twice, or the two sides have different tokens.  Nothing was
            copied.
        """
        # Everything is checked before anything is copied.
        for side in (0, 1):
            for rank, pool in zip(self._ranks[side], self._pools[side], strict=True):
                if pool is not None:
                    pool.require_open()
                    if side and pool.readonly:
                        raise BindError(f"{self.made.title}: {rank.name}: the pool is read-only")
        src, dst = (self._by_rank(side, spans) for side, spans in enumerate((src_spans, dst_spans)))
        if len({len(spans) for spans in (*src, *dst)}) > 1:
            raise BindError(
                f"{self.made.title}: expected as many sequences for every rank, got {', '.join(str(len(s)) for s in (*src, *dst))}"
            )
        require_layers(layers, self.made.src.model.nl)
        self._require_disjoint(src, dst, clear_tail)
        work = [*self._listed(src, dst, layers)]
        if clear_tail:
            work += self._cleared(dst, layers)
        streams = [self._stream_of(transfer, ends, stream, wait) for transfer, ends, *_ in work]
        return LocalDone(
            [transfer.copy(*ids, stream=one, wait=wait) for (transfer, _, *ids), one in zip(work, streams, strict=True)]
        )

    def explain(self) -> str:
        """Say what is sent, and how each message is copied."""
        lines = [str(self.made)]
        for message in self.made.messages:
            lines += ["", f"Rank {message.src} to rank {message.dst}:", self._transfer(message, None).explain()]
        return "\n".join(lines)

    def stats(self) -> dict[str, int]:
        """Counters of what was enqueued so far, as `Transfer.stats`, for all messages together."""
        total: dict[str, int] = {}
        for transfer in (*list(self._transfers.values()), *(one for one, _ in list(self._tails.values()))):
            for name, count in transfer.stats().items():
                total[name] = total.get(name, 0) + count
        return total

    # ---- what is copied --------------------------------------------------------------------------------------------

    def _by_rank(self, side: int, spans: Spans) -> list[list[Span]]:
        ranks, what = self._ranks[side], ("source", "destination")[side]
        expected = f"expected one kvbm.Span for all ranks, or {len(ranks)}, one per rank, or as many lists of them"
        try:
            given = [spans] * len(ranks) if isinstance(spans, Span) else list(spans)
            found = [[one] if isinstance(one, Span) else list(one) for one in given]
        except TypeError:
            raise BindError(f"{self.made.title}: {what}: {expected}, got {quoted(spans)}") from None
        if len(found) != len(ranks):
            raise BindError(f"{self.made.title}: {what}: {expected}, got {len(found)}")
        for one in (span for row in found for span in row):
            if not isinstance(one, Span):
                raise BindError(f"{self.made.title}: {what}: expected kvbm.Span, got {type(one).__name__}")
        return found

    def _require_disjoint(self, src: list[list[Span]], dst: list[list[Span]], tail: bool) -> None:
        """Check that tables are long enough, and that no slot is written twice or both read and written."""
        slots: tuple[list[Ids], list[Ids]] = [], []
        for side, given in enumerate((src, dst)):
            known: dict[Any, Ids] = {}  # ranks of one kind with the same tables use the same slots
            for rank, pool, spans in zip(self._ranks[side], self._pools[side], given, strict=True):
                key = pool is None, rank.num_blocks, rank.turns.index, *map(id, spans)
                if key not in known:
                    known[key] = self._touched(rank, spans if pool is not None else [], side == 1, tail)
                slots[side].append(known[key])
        for i, j in self._both:
            read, written = slots[0][i], slots[1][j]
            # Ranges that are written are disjoint: only the first one that ends after a start can overlap a range that is read.
            written = written[np.argsort(written[:, 0])]
            at = np.searchsorted(written[:, 1], read[:, 0], side="right")
            if (
                written.size
                and (hit := (at < len(written)) & (written[np.minimum(at, len(written) - 1), 0] < read[:, 1])).any()
            ):
                slot = int(max(read[hit][0, 0], written[at[hit][0], 0]))
                raise BindError(
                    f"{self.made.title}: block {slot // self._ranks[1][j].nt} of {self._ranks[1][j].name}, whose pool is that of "
                    f"{self._ranks[0][i].name}, would be both read and written"
                )

    @staticmethod
    def _touched(rank: Rank, spans: list[Span], written: bool, tail: bool) -> Ids:
        """Ranges of slots of a rank's pool that spans use.  `BindError` if a slot would be written twice."""
        found = [rank.touched(span, tail=tail and written) for span in spans]
        slots = found[0] if len(found) == 1 else np.concatenate(found) if found else np.zeros((0, 2), np.int64)
        if written and (slot := _slot_in_two(slots)) is not None:
            twice = sum(bool(((one[:, 0] <= slot) & (slot < one[:, 1])).any()) for one in found) > 1
            where = "two sequences have it in their tables" if twice else "the table contains it twice"
            raise BindError(f"{rank.name}: block {slot // rank.nt} would be written twice: {where}")
        return slots

    def _listed(self, src: list[list[Span]], dst: list[list[Span]], layers: range | None) -> Iterator[_Work]:
        """For every message: a transfer, and the ids that it copies."""
        chosen = [(i, m) for i, m in enumerate(self.made.messages) if layers is None or m.of_layers(layers) is not None]
        shifts = {
            a.origin - b.origin for _, m in chosen for a, b in zip(src[m.src], dst[m.dst], strict=True) if len(a.tokens)
        }
        made = self._fitting(math.gcd(*shifts))
        listed: dict[
            Any, list[tuple[Ids, Ids, bool]]
        ] = {}  # messages of one kind with the same tables have the same pairs
        for i, _ in chosen:
            message = made.messages[i]
            spans = src[message.src], dst[message.dst]
            key = self._kinds[i], *map(id, itertools.chain(*spans))
            if key not in listed:
                listed[key] = self._pairs(message, *spans)
            ends = self._pool(0, message.src), self._pool(1, message.dst)
            for src_ids, dst_ids, single in listed[key]:
                yield self._transfer(message, layers, single), ends, src_ids, dst_ids

    def _pairs(self, message: Message, src: list[Span], dst: list[Span]) -> list[tuple[Ids, Ids, bool]]:
        """Pairs of units and pairs of single tokens of several sequences, without empty ones."""
        ranks = self._ranks[0][message.src], self._ranks[1][message.dst]
        pairs = [pair_up(message.t, *ranks, *spans) for spans in zip(src, dst, strict=True)]
        found = []
        for single in (False, True):
            ids = [[each[2 * single + side] for each in pairs] for side in (0, 1)]
            src_ids, dst_ids = (one[0] if len(one) == 1 else np.concatenate(one) if one else NONE for one in ids)
            if src_ids.size and (np.minimum(src_ids, dst_ids) >= 0).any():
                found.append((src_ids, dst_ids, single))
        return found

    def _pool(self, side: int, rank: int) -> Pool:
        """The pool of a rank that has one."""
        pool = self._pools[side][rank]
        assert pool is not None
        return pool

    def _fitting(self, shift: int) -> Resharding:
        """The messages, in units that divide `shift`, the distance of the positions at which both sides' tables begin."""
        shift = common_shift(self.made, shift)
        if shift not in self._fitted:
            self._fitted[shift] = self.made.refit(self.made.cuts, shift)
        return self._fitted[shift]

    def _transfer(self, message: Message, layers: range | None, single: bool = False) -> Transfer:
        if single:
            message = message._replace(t=ONE_TOKEN)
        key = message, layers, single
        found = self._transfers.get(key)
        if found is None:
            with self._lock:
                found = self._transfers.get(key)
                if found is None:
                    found = self._transfers[key] = self._made(message, layers)
        return found

    def _made(self, message: Message, layers: range | None) -> Transfer:
        some = message if layers is None else message.of_layers(layers)
        assert some is not None
        ends = []
        for side in (0, 1):
            pool = self._pool(side, (message.src, message.dst)[side])
            slots, chosen = some.part(side)
            where = f"{self._ranks[side][(message.src, message.dst)[side]].name} ({pool.layout.name})"
            try:
                ends.append(pool.units(slots).section(l=chosen["l"], h=chosen["h"], t=chosen["t"]))
            except PlanError as error:
                raise PlanError(f"{where}: {error}" + (_WHOLE_BLOCKS if slots == 1 < pool.shape.nt else "")) from None
        return Transfer(ends[0], ends[1], cast=self.made.cast_of(some), **self._options)

    def _cleared(self, dst: list[list[Span]], layers: range | None) -> Iterator[_Work]:
        """For every destination rank: a transfer from a block of zeros, and the slots behind its tokens (`Rank.tail`)."""
        for index, (rank, spans) in enumerate(zip(self._ranks[1], dst, strict=True)):
            takes = self.made.takes[index].l
            own = [at for layer, at in zip(takes, takes.places, strict=True) if layers is None or layer in layers]
            ids = [rank.ids(span, slots, 1) for span in spans if own and (slots := rank.tail(span)).size]
            if any((some >= 0).any() for some in ids):
                found = np.concatenate(ids)
                yield *self._tail(index, own), np.zeros(found.size, np.int64), found

    def _tail(self, index: int, layers: list[int]) -> tuple[Transfer, _Ends]:
        key = index, tuple(layers)
        with self._lock:
            if key not in self._tails:
                zeros, pool = self._zeros_of(index), self._pool(1, index)
                src_tail, dst_tail = (part.units(1).section(l=layers) for part in (zeros, pool))
                self._tails[key] = Transfer(src_tail, dst_tail), (zeros, pool)
            return self._tails[key]

    def _zeros_of(self, index: int) -> Pool:
        """A block of zeros for a destination rank, on the device of its messages' source, so that both run in order."""
        if index not in self._zeros:
            pool = self._pool(1, index)
            source = self._pool(0, next(m.src for m in self.made.messages if m.dst == index))
            where = "cpu" if source.device == pool.device == "cpu" else "pinned"
            zeros = block_of_zeros(pool, where)
            if source.device != "cpu":
                on_gpu = Pool.allocate(pool.layout, pool.shape, 1, source.device)
                Transfer(zeros, on_gpu).copy([0], [0], stream=_OWN_STREAM).synchronize()
                zeros = on_gpu
            self._zeros[index] = zeros
        return self._zeros[index]

    def _stream_of(self, transfer: Transfer, ends: _Ends, stream: Streams, wait: Any) -> Any:
        """The stream of a copy, checked against its device."""
        if isinstance(stream, Mapping) and transfer.device >= 0:
            if transfer.device not in stream:
                raise BindError(f"stream: expected one for cuda:{transfer.device}, got streams for {list(stream)}")
            stream = stream[transfer.device]
        elif transfer.device < 0:
            stream = None if isinstance(stream, Mapping) else stream
            if stream is not None or wait is not None:
                raise BindError(
                    f"{self.made.title}: stream, wait: pools are on the CPU, where the call waits for its copies; "
                    "leave them out"
                )
        elif stream is None:
            current_stream(next(pool for pool in ends if pool.device == f"cuda:{transfer.device}"))
        if stream is not None:
            found = _core.stream_device(stream)
            if found >= 0 and f"cuda:{found}" not in (pool.device for pool in ends):
                raise BindError(
                    f"stream: expected one of cuda:{transfer.device}, got one of cuda:{found}; pass a mapping from CUDA device to "
                    "stream if several GPUs take part"
                )
        return stream


#: The per-thread default stream.  It must contain no work of the caller.
_OWN_STREAM = 2

#: The pools of a copy.
_Ends = tuple[Pool, Pool]

#: A transfer, its pools, and the ids of both sides.
_Work = tuple[Transfer, _Ends, Ids, Ids]

_WHOLE_BLOCKS = "; a range that begins or ends inside a unit is copied token by token there: expected ranges of whole units"


def cuts_of(pools: Sequence[Pool | None]) -> tuple[int, ...]:
    """The tokens at which the layouts of the pools split a block."""
    found = set()
    for pool in filter(None, pools):
        for access in pool.resolved.section.accesses:
            found |= {step.divisor for step in access.steps if step.axes == ("t",) and not step.opaque}
    return tuple(sorted(found - {1}))


def require_pool(place: Placement, rank: int, pool: Any) -> None:
    """Raise `BindError` unless `pool` fits the rank of a placement."""
    if not isinstance(pool, Pool):
        raise BindError(f"{place.name}: rank {rank}: expected a kvbm.Pool, got {type(pool).__name__}")
    if not pool.layout.same_blocks(pool.shape, place.shape(rank)):
        raise BindError(f"{place.name}: rank {rank}: expected a pool of {place.shape(rank)}, got {pool.shape}")


def _require_pools(place: Placement, pools: Any, what: str) -> None:
    if not isinstance(pools, Sequence) or len(pools) != place.world:
        got = len(pools) if isinstance(pools, Sequence) else type(pools).__name__
        raise BindError(
            f"{place.name}: expected {place.world} {what} pools, one per rank of {place.mesh_text}, got {got}"
        )
    for rank, pool in enumerate(pools):
        if not place.strips(rank).l.size:
            if pool is not None:
                raise BindError(
                    f"{place.name}: rank {rank}: expected None, as it holds none of the layers {place.layers}, got {pool!r}"
                )
            continue
        require_pool(place, rank, pool)


def _one_layout_each(made: Resharding, pools: tuple[Sequence[Pool | None], Sequence[Pool | None]]) -> Layouts:
    """The layout of each side's pools; `BindError` if a side has several: then a cast would not be the same on all ranks."""
    found: list[Layout] = []
    for place, some in zip((made.src, made.dst), pools, strict=True):
        by_meaning = {meaning_of(pool.layout): pool.layout for pool in some if pool is not None}
        if len(by_meaning) > 1:
            names = ", ".join(layout.name for layout in by_meaning.values())
            raise BindError(f"{made.title}: cast: expected one layout for all ranks of {place.name}, got {names}")
        found.extend(by_meaning.values())
    return found[0], found[1]


def _require_own_memory(made: Resharding, pools: Sequence[Pool | None]) -> None:
    """Raise `BindError` if two ranks of the destination share memory."""
    held = [(rank, pool) for rank, pool in enumerate(pools) if pool is not None]
    kinds = [kind for _, pool in held for kind in pool.resolved.kinds]
    offsets = np.cumsum([0, *(len(pool.resolved.kinds) for _, pool in held)])
    kind_of = [np.asarray(pool.resolved.kind_of_entry) + at for (_, pool), at in zip(held, offsets, strict=False)]
    clash = find_overlap(np.concatenate([pool.addresses for _, pool in held]), kinds, np.concatenate(kind_of).tolist())
    if clash is not None:
        ends = np.cumsum([pool.addresses.size for _, pool in held])
        one, other = (held[int(np.searchsorted(ends, at, side="right"))][0] for at in sorted(clash))
        raise BindError(
            f"{made.title}: ranks {one} and {other} of {made.dst.name} share memory; expected a separate pool for every rank"
        )


def _read_and_written(
    made: Resharding, src_pools: Sequence[Pool | None], dst_pools: Sequence[Pool | None]
) -> list[tuple[int, int]]:
    """Pairs of a source rank and a destination rank that share memory: a call could read what it writes."""
    found = []
    for (i, src), (j, dst) in itertools.product(enumerate(src_pools), enumerate(dst_pools)):
        if src is None or dst is None or not require_disjoint(src, dst):
            continue
        reads, writes = [m for m in made.messages if m.src == i], [m for m in made.messages if m.dst == j]
        # Passing on a share (`gather`) reads and writes different layers of the same blocks.
        if any(m.dst == j for m in reads) or any(
            _places(a.l, "src") & _places(b.l, "dst") and _places(a.h, "src") & _places(b.h, "dst")
            for a, b in itertools.product(reads, writes)
        ):
            found.append((i, j))
    return found


def _places(meetings: Sequence[Meeting], side: str) -> set[int]:
    return {place for meeting in meetings for place in meeting.coordinates(side)}


def _slot_in_two(slots: Ids) -> int | None:
    """A slot that two of these ranges contain; None if there is none."""
    ordered = slots[np.argsort(slots[:, 0], kind="stable")]
    twice = ordered[1:, 0][ordered[1:, 0] < ordered[:-1, 1]]
    return int(twice[0]) if twice.size else None
