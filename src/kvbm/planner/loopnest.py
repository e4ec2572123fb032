"""Loop nests in bytes: the parts of a plan, as one kernel copies them.  Kernels are in `kernel_forms`."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import MissingKernelError
from ..layout.loops import coalesce
from .kernel_forms import MAX_INNER, MAX_OUTER, WIDEST, Form, form_of, widest_word

#: Most launches into which a part with more modes is cut.
MAX_LAUNCHES = 4096

#: Kernels index the words of a chunk with 31 bits and their strides with 32.  Larger modes select chunks instead.
_CHUNK_LIMIT = 1 << 31
STRIDE_LIMIT = 1 << 32


class Mode(NamedTuple):
    """One loop of a copy: `extent`, and its strides in bytes and table entries on each side, and in keys of a digest."""

    extent: int
    src: int
    dst: int
    src_table: int = 0
    dst_table: int = 0
    key: int = 0

    def split(self, count: int) -> tuple[Mode, Mode]:
        """The mode as two, the faster with extent `count`, a divisor of the extent."""
        extent, *strides = self
        return self._replace(extent=count), Mode(extent // count, *(stride * count for stride in strides))


#: A loop that goes nowhere: kernels have one for each mode that a part lacks.
STILL = Mode(1, 0, 0)


class Id(NamedTuple):
    """The strides of an id on one side."""

    #: Strides of a block: table entries and bytes.
    entries: int
    nbytes: int
    #: If ids count units of a block: the digits of an id inside a block, fastest first, each as extent and bytes.
    units: tuple[tuple[int, int], ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """Stride of each digit in bytes, the block first."""
        return (self.nbytes, *(nbytes for _, nbytes in self.units))

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the digits inside a block."""
        return tuple(extent for extent, _ in self.units)

    def bytes_of(self, block: int | None) -> tuple[int, ...]:
        """`steps`, with `block` as the bytes per block if the table was shortened to the first block."""
        return self.steps if block is None else (block, *self.steps[1:])


def nest(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Normal form of a loop nest: fastest in the destination first, with as few modes as possible (`coalesce`).

    Equal copies have equal normal forms, for any layouts.
    """
    return tuple(Mode(*loop) for loop in coalesce(sorted([mode for mode in modes if mode.extent > 1], key=_nesting)))


#: Fastest in the destination first: ``dst_table``, ``dst``, ``src_table``, ``src`` of a mode.
_nesting = operator.itemgetter(4, 2, 3, 1)


@dataclass(frozen=True)
class Part:
    """One loop nest in bytes: the whole copy, its K or V half, or a plane."""

    #: Start of the part: bytes and table entries.
    src_offset: int
    dst_offset: int
    src_table_offset: int
    dst_table_offset: int
    #: Modes that select a chunk, fastest first: modes that step through a table of allocations, or with very large
    #: strides.
    outer: tuple[Mode, ...]
    #: Modes inside a chunk, fastest first.  ``inner[0]`` is the run: contiguous on both sides, and in keys if the part
    #: has them; its extent is in bytes.
    inner: tuple[Mode, ...]
    #: Strides of the ids.
    src_id: Id
    dst_id: Id
    label: str = ""  # name of the part: ``K``, ``V``, a plane; empty for a whole block
    half: int | None = None  # 0 for K and 1 for V, if both are separate
    key: int = 0  # for digests: the start in keys, 16 per cell, as for the strides of its modes

    @classmethod
    def of(
        cls, modes: Iterable[Mode], start: Sequence[tuple[int, int]], ids: tuple[Id, Id], label: str,
        half: int | None = None, key: int = 0,
    ) -> Part:  # fmt: skip
        """The part with these loops, given in any order.  They are coalesced and divided into outer and inner modes.

        `start` is the start of each side (bytes, table entries); `ids` are the strides of ids on each side.
        """
        outer: list[Mode] = []
        inner: list[Mode] = []
        size = 1
        for mode in nest(modes):
            if mode.src_table or mode.dst_table or mode.src >= STRIDE_LIMIT or mode.dst >= STRIDE_LIMIT:
                outer.append(mode)
            else:
                inner.append(mode)
                size *= mode.extent
        if not inner or inner[0].src != 1 or inner[0].dst != 1 or inner[0].key > 1:
            inner.insert(0, Mode(1, 1, 1))
        while size >= _CHUNK_LIMIT and len(inner) > 1:
            outer.insert(0, inner.pop())
            size //= outer[0].extent
        return cls(
            start[0][0], start[1][0], start[0][1], start[1][1], tuple(outer), tuple(inner), *ids, label, half, key
        )

    @property
    def start(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Start of each side: bytes, and table entries."""
        return (self.src_offset, self.src_table_offset), (self.dst_offset, self.dst_table_offset)

    @property
    def run_bytes(self) -> int:
        """Bytes that stay together."""
        return self.inner[0].extent

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk."""
        return math.prod(mode.extent for mode in self.inner)

    @property
    def chunks(self) -> int:
        """Number of chunks per block."""
        return math.prod(mode.extent for mode in self.outer)

    @property
    def nbytes(self) -> int:
        """Bytes per block."""
        return self.chunks * self.chunk_bytes

    @property
    def side_bytes(self) -> tuple[int, int]:
        """Bytes per block of the source and of the destination: equal, unless values are cast."""
        return self.nbytes, self.nbytes

    @property
    def spans(self) -> tuple[Mode, Mode] | None:
        """The modes by which source and destination continue after a run, if they differ: the two sides of a tile."""
        run = self.run_bytes
        if run > WIDEST or run & (run - 1):
            return None
        a = b = None
        for mode in reversed(self.inner[1:]):
            if mode.src == run:
                a = mode
            if mode.dst == run:
                b = mode
        return (a, b) if a and b and a is not b else None

    @property
    def kind(self) -> str:
        """``"copy"``, ``"rows"`` or ``"tile"``, by the modes alone."""
        if len(self.inner) == 1:
            return "copy"
        return "tile" if self.spans else "rows"

    def form(self, src_alignment: int, dst_alignment: int) -> Form:
        """The kernel form for base addresses that are multiples of these.

        The word is the largest power of two up to 16 that divides the run, every other stride and both alignments.
        """
        run, loops = self.run_bytes, (*self.inner[1:], *self.outer)
        src_alignment = math.gcd(src_alignment, *self.src_id.steps)
        dst_alignment = math.gcd(dst_alignment, *self.dst_id.steps)
        src = widest_word(src_alignment, self.src_offset, *[mode.src for mode in loops])
        dst = widest_word(dst_alignment, self.dst_offset, *[mode.dst for mode in loops])
        if (spans := self.spans) and min(src, dst) >= run:
            a, b = spans
            # A 16-byte word of elements of one side becomes a word of the other side: all strides except the contiguous one must be
            # multiples of a word.
            src_word = widest_word(
                src_alignment, self.src_offset, a.extent * run, *[mode.src for mode in loops if mode is not a]
            )
            dst_word = widest_word(
                dst_alignment, self.dst_offset, b.extent * run, *[mode.dst for mode in loops if mode is not b]
            )
            word = WIDEST if min(src_word, dst_word) == WIDEST else run
            return form_of("tile", len(self.outer), len(self.inner) - 3, run, word)
        word = min(widest_word(run), src, dst)
        return form_of("copy" if len(self.inner) == 1 else "rows", len(self.outer), len(self.inner), 0, word)

    def fold(self, src_entry: int | None, dst_entry: int | None) -> Part:
        """The part for tables with equal steps between entries (bytes; None: no equal steps): entries become bytes."""

        def folded(src: int, dst: int, src_table: int, dst_table: int) -> tuple[int, int, int, int]:
            if src_entry is not None:
                src, src_table = src + src_table * src_entry, 0
            if dst_entry is not None:
                dst, dst_table = dst + dst_table * dst_entry, 0
            return src, dst, src_table, dst_table

        start = folded(self.src_offset, self.dst_offset, self.src_table_offset, self.dst_table_offset)
        ids = folded(self.src_id.nbytes, self.dst_id.nbytes, self.src_id.entries, self.dst_id.entries)
        return replace(
            self, src_offset=start[0], dst_offset=start[1], src_table_offset=start[2], dst_table_offset=start[3],
            outer=tuple(Mode(m.extent, *folded(m.src, m.dst, m.src_table, m.dst_table), m.key) for m in self.outer),
            src_id=self.src_id._replace(entries=ids[2], nbytes=ids[0]),
            dst_id=self.dst_id._replace(entries=ids[3], nbytes=ids[1]),
        )  # fmt: skip

    def fit(self, kind: str) -> tuple[Part, ...]:
        """The same copy in parts that have no more modes than a kernel of this kind supports.

        Surplus inner modes become outer modes, the slowest first; the two sides and the element of a tile stay inside.
        If there are still too many, modes are peeled off: each step of such a mode becomes a separate part.  These are
        the shortest modes, as each part is a launch.  Raises `MissingKernelError` if more than `MAX_LAUNCHES` parts
        would be needed.
        """
        spans = (self.spans or ()) if kind == "tile" else ()
        most = MAX_INNER + 1 if spans else MAX_INNER  # the run of a tile is its element, not a mode
        if len(self.inner) <= most and len(self.outer) <= MAX_OUTER:
            return (self,)
        inner, outer = list(self.inner), list(self.outer)
        while len(inner) > most:
            slowest = max(k for k in range(1, len(inner)) if not any(inner[k] is span for span in spans))
            outer.insert(0, inner.pop(slowest))
        peeled: list[Mode] = []
        while len(outer) > MAX_OUTER:
            # The slowest of the shortest modes: the others stay inside a launch.
            peeled.append(outer.pop(max(range(len(outer)), key=lambda k: (-outer[k].extent, k))))
        launches = math.prod(mode.extent for mode in peeled)
        if launches > MAX_LAUNCHES:
            raise MissingKernelError(
                f"a loop nest of {len(self.outer)} modes that pick a chunk and {len(self.inner)} inside: expected at most "
                f"{MAX_OUTER} and {MAX_INNER}, as without the others it would take {launches} launches (at most "
                f"{MAX_LAUNCHES}); convert in two steps, through a layout with an order between both"
            )
        parts = []
        for steps in itertools.product(*(range(mode.extent) for mode in peeled)):
            at = list(zip(steps, peeled, strict=True))
            ahead = Mode(1, *(sum(step * mode[k] for step, mode in at) for k in range(1, len(STILL))))
            made = replace(
                self, outer=tuple(outer), inner=tuple(inner), src_offset=self.src_offset + ahead.src,
                dst_offset=self.dst_offset + ahead.dst, src_table_offset=self.src_table_offset + ahead.src_table,
                dst_table_offset=self.dst_table_offset + ahead.dst_table, key=self.key + ahead.key,
            )  # fmt: skip
            parts.append(made)
        return tuple(parts)

    def arguments(self, form: Form, src_step: int | None = None, dst_step: int | None = None) -> Arguments:
        """Offsets, outer and inner modes as arguments of a kernel of this form, padded with extents of one.

        The steps are the bytes from one block to the next, if the tables were shortened to one block.
        """
        if form.kind == "tile":
            assert self.spans is not None
            a, b = self.spans
            units = form.element
            inner = [Mode(a.extent, a.src, a.dst), Mode(b.extent, b.src, b.dst)]
            inner += [mode for mode in self.inner[1:] if mode is not a and mode is not b]
            count = form.inner + 2
        else:
            units = form.word
            inner = [Mode(self.run_bytes // units, units, units), *self.inner[1:]]
            count = form.inner
        return self._arguments(self._padded(form.outer), inner + [STILL] * (count - len(inner)), (form.word,), src_step, dst_step)

    def _padded(self, count: int) -> list[Mode]:
        """The outer modes, with those of extent one up to this number."""
        return [*self.outer, *[STILL] * (count - len(self.outer))]

    def _arguments(
        self, outer: Sequence[Mode], inner: Sequence[Mode], words: tuple[Any, ...], src_step: int | None, dst_step: int | None
    ) -> Arguments:
        """The arguments of a kernel with these modes and parameters of words."""
        return (
            (self.src_offset, self.dst_offset, self.src_table_offset, self.dst_table_offset),
            [(m.extent, m.src, m.dst, m.src_table, m.dst_table) for m in outer],
            [(m.extent, m.src, m.dst) for m in inner],
            (self.src_id.bytes_of(src_step), self.dst_id.bytes_of(dst_step)),
            words,
        )


#: Offsets, outer modes, inner modes, strides of an id's digits on each side in bytes (the block first), parameters of words.
Arguments = tuple[
    tuple[int, ...],
    list[tuple[int, ...]],
    list[tuple[int, ...]],
    tuple[tuple[int, ...], tuple[int, ...]],
    tuple[float, ...],
]
