"""Sequences: the blocks of a rank that hold given tokens, and the pairs of units that a message copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments import quoted, require_a, whole
from ..errors import BindError
from .strips import Turns, Unit

Ids = npt.NDArray[np.int64]

#: No ids.
NONE: Ids = np.zeros(0, np.int64)

#: Positions of a sequence are below this limit, so that slots and block ids fit into 64 bits.
_MOST = 1 << 48


@dataclass(frozen=True, init=False, eq=False)
class Span:
    """Tokens of a sequence, and the blocks of one rank that hold them.

    Parameters
    ----------
    table : sequence of int
        The rank's block ids for the sequence, in order.  -1 means no block: its tokens are not copied.
    tokens : range
        Positions to copy.
    origin : int
        The position of the first slot of ``table[0]``.  It is not 0 if a sliding window dropped the first blocks, or if the
        sequence is cut in two.

    Raises
    ------
    BindError
        `table` is not a list of ids, `tokens` is not a range, or `tokens` begins before `origin`.
    """

    table: Ids
    tokens: range
    origin: int

    def __init__(self, table: Any, tokens: range, origin: int = 0) -> None:
        given: Any = tokens
        try:
            ids = np.zeros((1, 1)) if hasattr(type(table), "filled") else np.array(table)  # which would drop a mask
        except Exception:  # the object's own code may raise anything, such as a tensor that requires a gradient
            ids = np.zeros((1, 1))
        if ids.size == 0:
            ids = ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or _has_bools(table, ids):
            raise BindError(f"table: expected a list of block ids, got {quoted(table)}")
        if not isinstance(given, range) or tokens.step != 1 or not 0 <= tokens.start < _MOST or tokens.stop > _MOST:
            raise BindError(f"tokens: expected range(first, last + 1) below 2**48, got {quoted(tokens)}")
        if (first := whole(origin)) is None or not 0 <= first <= tokens.start:
            raise BindError(
                f"origin: expected a position from 0 to the first token's, {tokens.start}, got {quoted(origin)}"
            )
        if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
            raise BindError(f"table: expected a list of block ids, got {quoted(table)}")
        ids = ids.astype(np.int64)
        ids.flags.writeable = False
        for name, value in (("table", ids), ("tokens", tokens), ("origin", first)):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:  # an unpickled array would be writable
        return Span, (self.table, self.tokens, self.origin)

    def __repr__(self) -> str:
        return (
            f"Span({len(self.table)} blocks, {self.tokens}" + (f", origin={self.origin}" if self.origin else "") + ")"
        )


def _has_bools(table: Any, ids: Any) -> bool:
    """Whether a list has a bool, which NumPy takes for 0 or 1 beside integers."""
    return type(table) in (list, tuple) and any(isinstance(table[i], bool | np.bool_) for i in np.flatnonzero(ids >> 1 == 0))


class Rank(NamedTuple):
    """A rank, as needed to list pairs.

    Attributes
    ----------
    name : str
        Name for messages.
    turns : Turns
        The tokens that the rank holds.
    nt, num_blocks : int
        Slots per block, and blocks of the rank's pool.
    """

    name: str
    turns: Turns
    nt: int
    num_blocks: int

    def slots(self, span: Span, positions: Any) -> Any:
        """Slots of positions that the rank holds, counted from the table's first slot."""
        return self.turns.slot(positions) - self.turns.slot(span.origin)

    def extent(self, span: Span) -> tuple[int, int]:
        """The first slot of the table that holds a token of the range, and the slot after the last one."""
        first, behind = (
            self.turns.held(position) - self.turns.held(span.origin)
            for position in (span.tokens.start, max(span.tokens.start, span.tokens.stop))
        )
        return first, behind

    def tail(self, span: Span) -> Ids:
        """Slots after the rank's last token, to the end of the sequence's last block.

        A block id means one block on every rank that shares the tokens.  So this is the block of the last token on any of them,
        also if this rank has no token in it.  A rank whose table ends before it has no such block.
        """
        _, behind = self.extent(span)
        return np.arange(behind, max(behind, self._end(span)), dtype=np.int64)

    def _end(self, span: Span) -> int:
        """The slot behind the block of the last token on any rank, or behind the table if that is earlier."""
        if not len(span.tokens):
            return 0
        most = replace(self.turns, index=0)  # the rank whose turn is the first holds the most
        return min(self._whole(most.held(span.tokens.stop) - most.held(span.origin)), len(span.table) * self.nt)

    def _whole(self, slots: int) -> int:
        return -(-slots // self.nt) * self.nt

    def ids(self, span: Span, slots: Ids, of: int) -> Ids:
        """Ids of parts of `of` slots each that begin at `slots`; -1 if there is no block."""
        if not slots.size:
            return NONE
        blocks = span.table[slots // self.nt]
        found: Ids = np.where(blocks < 0, -1, blocks * (self.nt // of) + slots % self.nt // of)
        return found

    def units(self, span: Span, starts: Ids, tokens: int, of: int) -> Ids:
        """Ids of the units of `tokens` tokens and `of` slots each that begin at the positions `starts`; -1 if there is no block."""
        if not starts.size:
            return NONE
        if int(starts[-1]) - int(starts[0]) == tokens * (
            starts.size - 1
        ):  # consecutive positions have consecutive slots
            return self._run(span, self.slots(span, int(starts[0])), starts.size, of)
        return self.ids(span, self.slots(span, starts), of)

    def _run(self, span: Span, first: int, count: int, of: int) -> Ids:
        """Ids of `count` consecutive parts of `of` slots each in the table; negative if there is no block."""
        first //= of
        each = self.nt // of
        begin = first // each
        blocks = span.table[begin : -(-(first + count) // each)]
        if each > 1:
            blocks = np.add.outer(blocks * each, np.arange(each)).reshape(-1)[first % each :][:count]
        found: Ids = np.maximum(blocks, -1)
        return found

    def require_origin(self, origin: int) -> None:
        """Raise `BindError` unless a turn begins at the table's origin."""
        if self.turns.over > 1 and origin % self.turns.period:
            raise BindError(f"{self.name}: origin {origin}: expected a multiple of {self.turns.period}, a whole turn")

    def blocks(self, span: Span, *, tail: bool = False) -> tuple[Ids, int, int]:
        """The entries of the table that hold the range's tokens, or, with `tail`, slots after the last one; -1: no block.

        Returns also the first slot of the table that they hold a token in, and the slot behind the last one.  Raises
        `BindError` if the table is too short or names blocks that the pool does not have, or no turn begins at the
        table's origin.
        """
        self.require_origin(span.origin)
        if not len(span.tokens):
            return NONE, 0, 0
        first, behind = self.extent(span)
        if len(span.table) * self.nt < behind:
            raise BindError(
                f"{self.name}: tokens {span.tokens.start} to {span.tokens.stop - 1} need {self._whole(behind) // self.nt} blocks "
                f"of {self.nt}, got a table of {len(span.table)}; if it begins later, pass origin= to Span"
            )
        behind = max(behind, self._end(span)) if tail else behind
        if behind == first:
            return NONE, first, behind
        entry = first // self.nt
        blocks = span.table[entry : self._whole(behind) // self.nt]
        if blocks.min() < -1 or blocks.max() >= self.num_blocks:
            wrong = np.flatnonzero((blocks < -1) | (blocks >= self.num_blocks))
            raise BindError(
                f"{self.name}: table[{entry + wrong[0]}] is {blocks[wrong[0]]}: expected 0 to {self.num_blocks - 1}, or -1 for no "
                "block"
            )
        return blocks, first, behind

    def touched(self, span: Span, *, tail: bool = False) -> Ids:
        """Slots of the pool that hold the range's tokens, as ``(first, last + 1)`` per block.  `tail` adds the slots after them.

        Raises `BindError` as `blocks`.
        """
        blocks, first, behind = self.blocks(span, tail=tail)
        if not len(blocks):
            return np.zeros((0, 2), np.int64)
        found = np.empty((len(blocks), 2), np.int64)
        found[:, 0] = blocks * self.nt
        found[:, 1] = found[:, 0] + self.nt
        found[0, 0] += first % self.nt
        found[-1, 1] -= self._whole(behind) - behind
        return found if blocks.min() >= 0 else found[blocks >= 0]


class Pairs(NamedTuple):
    """The ids that a message copies: of units, and of single tokens if the range begins or ends inside a unit."""

    src_units: Ids
    dst_units: Ids
    src_tokens: Ids
    dst_tokens: Ids


def pair_up(unit: Unit, src: Rank, dst: Rank, src_span: Span, dst_span: Span) -> Pairs:
    """The pairs of one message and one sequence.

    Parameters
    ----------
    unit : Unit
        The unit.  It divides the distance of both origins.
    src, dst : Rank
        The two ranks.
    src_span, dst_span : Span
        The same tokens on both sides.

    Raises
    ------
    BindError
        The two spans have different tokens.
    """
    require_a(Unit, "unit", unit, "the unit of a message (Message.t)")
    for name, rank, span in (("src", src, src_span), ("dst", dst, dst_span)):
        require_a(Rank, name, rank, "a kvbm.reshard.Rank")
        require_a(Span, f"{name}_span", span, "a kvbm.Span")
    tokens = src_span.tokens
    if tokens != dst_span.tokens:
        raise BindError(
            f"{src.name} → {dst.name}: tokens: {tokens} in the source, {dst_span.tokens} in the destination"
        )
    starts, edges = split(unit, src.turns, dst.turns, tokens, src_span.origin)
    sides = (src, src_span, unit.src_slots), (dst, dst_span, unit.dst_slots)
    units = [rank.units(span, starts, unit.tokens, slots) for rank, span, slots in sides]
    if not edges.size:
        return Pairs(units[0], units[1], NONE, NONE)
    ones = [rank.ids(span, rank.slots(span, edges), 1) for rank, span, _ in sides]
    return Pairs(units[0], units[1], ones[0], ones[1])


class Parts(NamedTuple):
    """The positions of a sequence that a message copies: the first token of each unit, and single tokens; ascending."""

    units: Ids
    tokens: Ids


def split(unit: Unit, src: Turns, dst: Turns, tokens: range, origin: int) -> Parts:
    """The whole units of a range of tokens that both ranks hold, and the single tokens at its ends that fill no unit.

    `origin` is the position at which the block table of either side begins: the unit divides the distance of the two.
    """
    base = origin % unit.tokens
    first = base + -(-(tokens.start - base) // unit.tokens) * unit.tokens
    behind = base + (tokens.stop - base) // unit.tokens * unit.tokens
    starts = np.arange(first, behind, unit.tokens, dtype=np.int64)
    for turns in (src, dst):
        if unit.tokens % turns.period:  # one rank holds all of a unit
            starts = starts[turns.holds(starts)]
    if (first, behind) == (tokens.start, tokens.stop):
        return Parts(starts, NONE)
    if behind < first:
        edges = np.arange(tokens.start, tokens.stop, dtype=np.int64)
    else:
        edges = np.concatenate([np.arange(tokens.start, first), np.arange(behind, tokens.stop)]).astype(np.int64)
    return Parts(starts, edges[src.holds(edges) & dst.holds(edges)])

