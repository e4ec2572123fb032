"""Loop nests in bytes: what one kernel copies, and the form that is compiled for it."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import MissingKernelError, PlanError

__all__ = [
    "MAX_INNER",
    "MAX_LAUNCHES",
    "MAX_OUTER",
    "MAX_PARTS",
    "WIDEST",
    "Arguments",
    "Form",
    "Id",
    "Kernel",
    "Mode",
    "Part",
    "coalesce",
    "form_of",
    "kernel_name",
    "parse_kernel",
]

#: Modes that a kernel can have, and parts of one launch (``KVBM_MAX_OUTER``, ``_INNER`` and ``_PARTS`` of ``cuda/kvbm.h``).
MAX_OUTER, MAX_INNER, MAX_PARTS = 4, 8, 4

#: Launches that a part with more modes than that is cut into, at most.
MAX_LAUNCHES = 4096

#: Bytes of the widest load and store.
WIDEST = 16

#: Kernels index the words of a chunk with 31 bits and step through it with 32; what is larger picks chunks instead.
_CHUNK_LIMIT = 1 << 31
_STRIDE_LIMIT = 1 << 32


class Mode(NamedTuple):
    """One loop of a copy: `extent` steps of so many bytes and table entries on each side, and of so many keys of a digest."""

    extent: int
    src: int
    dst: int
    src_table: int = 0
    dst_table: int = 0
    key: int = 0

    def continues(self, inner: Mode) -> bool:
        """Whether this mode goes on, on both sides and in keys, where `inner` ends, so that the two are one."""
        n = inner.extent
        return (
            self.dst == n * inner.dst
            and self.src == n * inner.src
            and self.dst_table == n * inner.dst_table
            and self.src_table == n * inner.src_table
            and self.key == n * inner.key
        )


class Id(NamedTuple):
    """What an id steps on one side.

    Attributes
    ----------
    entries, nbytes : int
        Of a block: table entries and bytes.
    units : tuple of (int, int)
        Where ids count units of a block: the digits of an id below the block, fastest first, each an extent and its bytes.
    """

    entries: int
    nbytes: int
    units: tuple[tuple[int, int], ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """Bytes that each digit steps, the block first."""
        return (self.nbytes, *(nbytes for _, nbytes in self.units))

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the digits below the block."""
        return tuple(extent for extent, _ in self.units)

    def bytes_of(self, block: int | None) -> tuple[int, ...]:
        """`steps`, with other bytes a block where the table was shortened to the first one's."""
        return self.steps if block is None else (block, *self.steps[1:])


def coalesce(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Normal form of a loop nest: fastest in the destination first, and as few modes as can be.

    Extents of one are dropped; neighbours are merged exactly when both sides continue (and both tables).  Equal copies
    have equal normal forms, whatever layouts they came from.
    """
    merged: list[Mode] = []
    for mode in sorted([mode for mode in modes if mode.extent > 1], key=_nesting):
        if merged and mode.continues(merged[-1]):
            inner = merged[-1]
            merged[-1] = inner._replace(extent=inner.extent * mode.extent)
        else:
            merged.append(mode)
    return tuple(merged)


#: Fastest in the destination first: ``dst_table``, ``dst``, ``src_table``, ``src`` of a mode.
_nesting = operator.itemgetter(4, 2, 3, 1)


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """What is compiled into a kernel: its class, numbers of modes and word.  Sizes and strides are arguments.

    Attributes
    ----------
    kind : {"copy", "rows", "tile", "record", "page_in", "page_out", "digest"}
        ``copy``: a chunk is one run.  ``rows``: runs move whole, their order changes.  ``tile``: single elements move, so
        source and destination run along different axes and meet in a tile.  ``record``: rows of several parts, the planes of a
        block.  ``page_in``, ``page_out``: the same with the source, or the destination, by way of shared memory.  ``digest``:
        cells are read and summed up.
    outer, inner : int
        Modes that pick a chunk, modes inside it (for tiles: besides the two that span the tile).
    element : int
        Tiles, and digests of cells that are turned: bytes that stay together.
    word : int
        Bytes of a load and store; 0 for records and pages, where each part has its own.
    few : bool
        Whether the kernel keeps to as few multiprocessors as it is told.
    sums : bool
        Whether the words, which are cells then, are digested as they pass.
    """

    kind: str
    outer: int
    inner: int
    element: int
    word: int
    few: bool = False
    sums: bool = False

    @property
    def name(self) -> str:
        """Its part of a kernel's name; everything that changes the bits is in it."""
        prefix = "few_" if self.few else "sum_" if self.sums else ""
        if self.kind == "copy":
            return f"{prefix}copy_o{self.outer}_w{self.word}"
        if self.kind == "rows":
            return f"{prefix}rows_o{self.outer}_i{self.inner}_w{self.word}"
        if self.kind == "digest":
            turned = f"_e{self.element}" if self.element else ""
            return f"digest_o{self.outer}_i{self.inner}{turned}_w{self.word}"
        if self.of_planes:
            return f"{prefix}{self.kind}_o{self.outer}_i{self.inner}"
        return f"{prefix}tile_o{self.outer}_r{self.inner}_e{self.element}_w{self.word}"

    @property
    def of_planes(self) -> bool:
        """Whether it takes any number of parts, each with its own word."""
        return self.kind in ("record", "page_in", "page_out")

    @property
    def modes(self) -> int:
        """Inner modes that its arguments describe: a tile's two sides besides the others."""
        return self.inner + 2 if self.kind == "tile" else self.inner

    def runs(self, wanted: Form) -> bool:
        """Whether a kernel of this form can do the work of `wanted`, with extents of one for the modes it has too many."""
        kinds = {"copy", "rows"} if self.kind == "rows" else {self.kind}
        same = (self.few, self.sums, self.element, self.word) == (wanted.few, wanted.sums, wanted.element, wanted.word)
        return wanted.kind in kinds and same and self.outer >= wanted.outer and self.inner >= wanted.inner


#: What is compiled into one kernel: a form, or one for K and one for V where these share a launch.
Kernel = tuple[Form, ...]


def kernel_name(kernel: Kernel) -> str:
    """The symbol of a kernel, and its name between Python and C."""
    return "__".join(form.name for form in kernel)


def parse_kernel(name: str) -> Kernel:
    """The kernel behind a name.

    Raises
    ------
    PlanError
        No kernel is called so.
    """
    forms = []
    for part in name.split("__"):
        match = _NAME.fullmatch(part)
        if match is None:
            raise PlanError(f"kernel {name!r}: expected names such as rows_o1_i3_w16, got {part!r}")
        prefix, kind, outer, inner, element, word = match.groups()
        sizes = int(outer), int(inner or 1), int(element or 0), int(word or 0)
        forms.append(Form(kind, *sizes, prefix == "few_", prefix == "sum_"))
        if forms[-1].name != part:
            raise PlanError(f"kernel {name!r}: expected {forms[-1].name!r}, got {part!r}")
    return tuple(forms)


_NAME = re.compile(
    r"(few_|sum_)?(copy|rows|tile|record|page_in|page_out|digest)_o(\d+)(?:_[ir](\d+))?(?:_e(\d+))?(?:_w(\d+))?"
)


@dataclass(frozen=True)
class Part:
    """One loop nest in bytes: the whole copy, its K or its V half, or a plane of it.

    Attributes
    ----------
    src_offset, dst_offset, src_table_offset, dst_table_offset : int
        Where the part starts: bytes and table entries.
    outer : tuple of Mode
        Modes that pick a chunk, fastest first: those that step through a table of allocations, or very far.
    inner : tuple of Mode
        Modes inside a chunk, fastest first.  ``inner[0]`` is the run: contiguous on both sides, its extent in bytes.
    src_id, dst_id : Id
        What an id steps.
    label : str
        What of a block it is: ``K``, ``V``, a plane; empty for all of it.
    half : int, optional
        0 for K and 1 for V, where the two are apart.
    key : int
        Where it starts among keys, where it is digested: as those of its modes, 16 a cell.
    """

    src_offset: int
    dst_offset: int
    src_table_offset: int
    dst_table_offset: int
    outer: tuple[Mode, ...]
    inner: tuple[Mode, ...]
    src_id: Id
    dst_id: Id
    label: str = ""
    half: int | None = None
    key: int = 0

    @classmethod
    def of(
        cls,
        modes: Iterable[Mode],
        start: Sequence[tuple[int, int]],
        ids: tuple[Id, Id],
        label: str,
        half: int | None = None,
        key: int = 0,
    ) -> Part:
        """The part with these loops, in any order: coalesced, and those that pick chunks apart from those inside one.

        `start` is where each side begins (bytes, table entries); `ids` what an id steps on each.
        """
        outer: list[Mode] = []
        inner: list[Mode] = []
        size = 1
        for mode in coalesce(modes):
            if mode.src_table or mode.dst_table or mode.src >= _STRIDE_LIMIT or mode.dst >= _STRIDE_LIMIT:
                outer.append(mode)
            else:
                inner.append(mode)
                size *= mode.extent
        if not inner or inner[0].src != 1 or inner[0].dst != 1:
            inner.insert(0, Mode(1, 1, 1))
        while size >= _CHUNK_LIMIT and len(inner) > 1:
            outer.insert(0, inner.pop())
            size //= outer[0].extent
        return cls(
            start[0][0], start[1][0], start[0][1], start[1][1], tuple(outer), tuple(inner), *ids, label, half, key
        )

    @property
    def start(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where each side begins: bytes, and table entries."""
        return (self.src_offset, self.src_table_offset), (self.dst_offset, self.dst_table_offset)

    @property
    def run_bytes(self) -> int:
        """Bytes that stay together."""
        return self.inner[0].extent

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one chunk moves."""
        return math.prod(mode.extent for mode in self.inner)

    @property
    def chunks(self) -> int:
        """Chunks a block."""
        return math.prod(mode.extent for mode in self.outer)

    @property
    def nbytes(self) -> int:
        """Bytes that one block moves."""
        return self.chunks * self.chunk_bytes

    @property
    def spans(self) -> tuple[Mode, Mode] | None:
        """The modes along which source and destination go on after a run, where these differ: a tile's two sides."""
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
        src = _power(src_alignment, self.src_offset, *[mode.src for mode in loops])
        dst = _power(dst_alignment, self.dst_offset, *[mode.dst for mode in loops])
        if (spans := self.spans) and min(src, dst) >= run:
            a, b = spans
            # A 16-byte word of elements along one side becomes one along the other: whole words on both sides, and no
            # stride but the contiguous one may break them.
            src_word = _power(
                src_alignment, self.src_offset, a.extent * run, *[mode.src for mode in loops if mode is not a]
            )
            dst_word = _power(
                dst_alignment, self.dst_offset, b.extent * run, *[mode.dst for mode in loops if mode is not b]
            )
            word = WIDEST if min(src_word, dst_word) == WIDEST else run
            return form_of("tile", len(self.outer), len(self.inner) - 3, run, word)
        word = min(_power(run), src, dst)
        return form_of("copy" if len(self.inner) == 1 else "rows", len(self.outer), len(self.inner), 0, word)

    def fold(self, src_entry: int | None, dst_entry: int | None) -> Part:
        """The part for tables whose entries lie so many bytes apart (None: they do not): entries become bytes, modes stay."""

        def folded(src: int, dst: int, src_table: int, dst_table: int) -> tuple[int, int, int, int]:
            if src_entry is not None:
                src, src_table = src + src_table * src_entry, 0
            if dst_entry is not None:
                dst, dst_table = dst + dst_table * dst_entry, 0
            return src, dst, src_table, dst_table

        start = folded(self.src_offset, self.dst_offset, self.src_table_offset, self.dst_table_offset)
        ids = folded(self.src_id.nbytes, self.dst_id.nbytes, self.src_id.entries, self.dst_id.entries)
        return replace(
            self,
            src_offset=start[0],
            dst_offset=start[1],
            src_table_offset=start[2],
            dst_table_offset=start[3],
            outer=tuple(Mode(m.extent, *folded(m.src, m.dst, m.src_table, m.dst_table), m.key) for m in self.outer),
            src_id=self.src_id._replace(entries=ids[2], nbytes=ids[0]),
            dst_id=self.dst_id._replace(entries=ids[3], nbytes=ids[1]),
        )

    def fit(self, kind: str) -> tuple[Part, ...]:
        """The same copy in parts that have no more modes than a kernel: this one alone if it has not.

        Surplus modes inside a chunk come to pick chunks, the slowest first.  What is still too much is peeled off: a mode's
        every step is then a part of its own.  It is the shortest modes that are, as each part is a launch.

        Parameters
        ----------
        kind : {"copy", "rows", "tile"}
            Of the kernel.  A tile's two sides and its element stay in the chunk.

        Raises
        ------
        MissingKernelError
            More than `MAX_LAUNCHES` parts.
        """
        spans = (self.spans or ()) if kind == "tile" else ()
        most = MAX_INNER + 1 if spans else MAX_INNER  # the run of a tile is its element, and no mode
        if len(self.inner) <= most and len(self.outer) <= MAX_OUTER:
            return (self,)
        inner, outer = list(self.inner), list(self.outer)
        while len(inner) > most:
            slowest = max(k for k in range(1, len(inner)) if not any(inner[k] is span for span in spans))
            outer.insert(0, inner.pop(slowest))
        peeled: list[Mode] = []
        while len(outer) > MAX_OUTER:
            # The slowest of the shortest: the others go on within a launch.
            peeled.append(outer.pop(max(range(len(outer)), key=lambda k: (-outer[k].extent, k))))
        launches = math.prod(mode.extent for mode in peeled)
        if launches > MAX_LAUNCHES:
            raise MissingKernelError(
                f"a loop nest of {len(self.outer)} modes that pick a chunk and {len(self.inner)} inside: kernels have at most "
                f"{MAX_OUTER} and {MAX_INNER}, and to peel off the others would take {launches} launches (at most "
                f"{MAX_LAUNCHES}); convert by way of a layout whose order is nearer to both"
            )
        parts = []
        for steps in itertools.product(*(range(mode.extent) for mode in peeled)):
            at = list(zip(steps, peeled, strict=True))
            parts.append(
                replace(
                    self,
                    src_offset=self.src_offset + sum(step * mode.src for step, mode in at),
                    dst_offset=self.dst_offset + sum(step * mode.dst for step, mode in at),
                    src_table_offset=self.src_table_offset + sum(step * mode.src_table for step, mode in at),
                    dst_table_offset=self.dst_table_offset + sum(step * mode.dst_table for step, mode in at),
                    key=self.key + sum(step * mode.key for step, mode in at),
                    outer=tuple(outer),
                    inner=tuple(inner),
                )
            )
        return tuple(parts)

    def arguments(self, form: Form, src_step: int | None = None, dst_step: int | None = None) -> Arguments:
        """Offsets, outer and inner modes as the kernel of this form takes them, padded with extents of one.

        The steps are bytes that a block id steps, where the tables were shortened to those of one block.
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
        still = Mode(1, 0, 0)
        outer = [*self.outer, *[still] * (form.outer - len(self.outer))]
        inner += [still] * (count - len(inner))
        offsets = (self.src_offset, self.dst_offset, self.src_table_offset, self.dst_table_offset)
        return (
            offsets,
            [(m.extent, m.src, m.dst, m.src_table, m.dst_table) for m in outer],
            [(m.extent, m.src, m.dst) for m in inner],
            (self.src_id.bytes_of(src_step), self.dst_id.bytes_of(dst_step)),
            (form.word,),
        )


#: Offsets, outer modes, inner modes, bytes that the digits of an id step on each side (the block first), what is said of words.
Arguments = tuple[
    tuple[int, ...],
    list[tuple[int, ...]],
    list[tuple[int, ...]],
    tuple[tuple[int, ...], tuple[int, ...]],
    tuple[int, ...],
]

#: There are few forms and many plans.
form_of = functools.lru_cache(maxsize=None)(Form)


def _power(*values: int) -> int:
    """Largest power of two, at most `WIDEST`, that divides all values."""
    common = math.gcd(WIDEST, *values)
    return common & -common
