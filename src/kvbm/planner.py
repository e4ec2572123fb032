"""From two layouts to a copy: common refinement, normal form, class, word, kernel.

Everything here is arithmetic on strides.  No layout is known by name; a pair of layouts is whatever its modes say it is,
so two pairs with one normal form are one kernel, and a layout declared a minute ago is as fast as a shipped one.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import LayoutError, MissingKernelError, PlanError
from .layout import Layout, Mode, Piece, Resolved, coalesce, refine
from .pages import Staged, stage
from .shapes import BlockShape

__all__ = ["MAX_INNER", "MAX_LAUNCHES", "MAX_OUTER", "MAX_PARTS", "Form", "Launch", "Part", "Plan", "plan"]

#: Modes that a kernel can have, and parts of one launch (``KVBM_MAX_OUTER``, ``_INNER`` and ``_PARTS`` of ``cuda/kvbm.h``).
MAX_OUTER, MAX_INNER, MAX_PARTS = 4, 8, 4

#: Launches that a part with more modes than that is cut into, at most.
MAX_LAUNCHES = 4096

#: Bytes of the widest load and store.
WIDEST = 16

#: Kernels index the words of a chunk with 31 bits and step through it with 32; what is larger picks chunks instead.
_CHUNK_LIMIT = 1 << 31
_STRIDE_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """What is compiled into a kernel: its class, numbers of modes and word.  Sizes and strides are arguments.

    Attributes
    ----------
    kind : {"copy", "rows", "tile", "record", "page_in", "page_out"}
        ``copy``: a chunk is one run.  ``rows``: runs move whole, their order changes.  ``tile``: single elements move, so
        source and destination run along different axes and meet in a tile.  ``record``: rows of several parts, the planes of a
        block.  ``page_in``, ``page_out``: the same with the source, or the destination, by way of shared memory.
    outer, inner : int
        Modes that pick a chunk, modes inside it (for tiles: besides the two that span the tile).
    element : int
        Tiles: bytes that stay together.
    word : int
        Bytes of a load and store; 0 for records and pages, where each part has its own.
    few : bool
        Whether the kernel keeps to as few multiprocessors as it is told.
    """

    kind: str
    outer: int
    inner: int
    element: int
    word: int
    few: bool = False

    @property
    def name(self) -> str:
        """Symbol of the kernel; everything that changes the bits is in it."""
        prefix = "few_" if self.few else ""
        if self.kind == "copy":
            return f"{prefix}copy_o{self.outer}_w{self.word}"
        if self.kind == "rows":
            return f"{prefix}rows_o{self.outer}_i{self.inner}_w{self.word}"
        if self.kind in ("record", "page_in", "page_out"):
            return f"{self.kind}_o{self.outer}_i{self.inner}"
        return f"{prefix}tile_o{self.outer}_r{self.inner}_e{self.element}_w{self.word}"

    @property
    def modes(self) -> int:
        """Inner modes that its arguments describe: a tile's two sides besides the others."""
        return self.inner + 2 if self.kind == "tile" else self.inner

    @classmethod
    def parse(cls, name: str) -> tuple[Form, ...]:
        """The forms behind a kernel's name; two where K and V are joined in one launch."""
        forms = []
        for part in name.split("__"):
            plain, few = part.removeprefix("few_"), part.startswith("few_")
            if match := re.fullmatch(r"copy_o(\d+)_w(\d+)", plain):
                forms.append(cls("copy", int(match[1]), 1, 0, int(match[2]), few))
            elif match := re.fullmatch(r"rows_o(\d+)_i(\d+)_w(\d+)", plain):
                forms.append(cls("rows", int(match[1]), int(match[2]), 0, int(match[3]), few))
            elif match := re.fullmatch(r"(record|page_in|page_out)_o(\d+)_i(\d+)", part):
                forms.append(cls(match[1], int(match[2]), int(match[3]), 0, 0))
            elif match := re.fullmatch(r"tile_o(\d+)_r(\d+)_e(\d+)_w(\d+)", plain):
                forms.append(cls("tile", int(match[1]), int(match[2]), int(match[3]), int(match[4]), few))
            else:
                raise PlanError(f"kernel {name!r}: expected names such as rows_o1_i3_w16, got {part!r}")
        return tuple(forms)

    def runs(self, wanted: Form) -> bool:
        """Whether a kernel of this form can do the work of `wanted`, with extents of one for the modes it has too many."""
        kinds = {"copy", "rows"} if self.kind == "rows" else {self.kind}
        same = (self.few, self.element, self.word) == (wanted.few, wanted.element, wanted.word)
        return wanted.kind in kinds and same and self.outer >= wanted.outer and self.inner >= wanted.inner


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
    src_id, dst_id : tuple of int
        ``(table entries, bytes)`` that a block id steps.
    label : str
        What of a block it is: ``K``, ``V``, a plane; empty for all of it.
    half : int, optional
        0 for K and 1 for V, where the two are apart.
    """

    src_offset: int
    dst_offset: int
    src_table_offset: int
    dst_table_offset: int
    outer: tuple[Mode, ...]
    inner: tuple[Mode, ...]
    src_id: tuple[int, int]
    dst_id: tuple[int, int]
    label: str = ""
    half: int | None = None

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
        src_alignment = math.gcd(src_alignment, self.src_id[1])
        dst_alignment = math.gcd(dst_alignment, self.dst_id[1])
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
            return _form("tile", len(self.outer), len(self.inner) - 3, run, word)
        word = min(_power(run), src, dst)
        return _form("copy" if len(self.inner) == 1 else "rows", len(self.outer), len(self.inner), 0, word)

    def by_steps(self, src_step: int | None, dst_step: int | None) -> Part:
        """The part for tables whose entries lie `step` bytes apart (None: they do not): entries become bytes, modes stay."""

        def fold(src: int, dst: int, src_table: int, dst_table: int) -> tuple[int, int, int, int]:
            if src_step is not None:
                src, src_table = src + src_table * src_step, 0
            if dst_step is not None:
                dst, dst_table = dst + dst_table * dst_step, 0
            return src, dst, src_table, dst_table

        start = fold(self.src_offset, self.dst_offset, self.src_table_offset, self.dst_table_offset)
        outer = tuple(Mode(m.extent, *fold(m.src, m.dst, m.src_table, m.dst_table)) for m in self.outer)
        return replace(
            self,
            src_offset=start[0],
            dst_offset=start[1],
            src_table_offset=start[2],
            dst_table_offset=start[3],
            outer=outer,
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
            (self.src_id[1] if src_step is None else src_step, self.dst_id[1] if dst_step is None else dst_step),
            (form.word,),
        )


#: Offsets, outer modes, inner modes, bytes that a block id steps, what is said of words.
Arguments = tuple[tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]], tuple[int, int], tuple[int, ...]]

#: There are few forms and many plans.
_form = functools.lru_cache(maxsize=None)(Form)


def _power(*values: int) -> int:
    """Largest power of two, at most `WIDEST`, that divides all values."""
    common = math.gcd(WIDEST, *values)
    return common & -common


@dataclass(frozen=True)
class Plan:
    """How blocks of one layout become blocks of another.  `print` it: it is a loop nest.

    Attributes
    ----------
    src, dst : Resolved
        Both layouts at the shape and the number of blocks of each side.
    parts : tuple of Part
        One; two where K and V have orders of their own; one or two a plane.
    """

    src: Resolved
    dst: Resolved
    parts: tuple[Part, ...]

    @property
    def shape(self) -> BlockShape:
        return self.src.shape

    @property
    def nbytes(self) -> int:
        """Bytes that one block moves (read once and written once)."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kind(self) -> str:
        """``copy``, ``rows`` or ``tile``; ``tile+rows`` where K and V differ."""
        return "+".join(dict.fromkeys(part.kind for part in self.parts))

    @property
    def title(self) -> str:
        return f"{self.src.layout.name} → {self.dst.layout.name}"

    def forms(self, src_alignment: int = WIDEST, dst_alignment: int = WIDEST) -> tuple[Form, ...]:
        """One kernel form a part, for base addresses that are multiples of these."""
        return tuple(part.form(src_alignment, dst_alignment) for part in self.parts)

    def launches(self, src_alignment: int = WIDEST, dst_alignment: int = WIDEST, *, pages: bool = True) -> list[Launch]:
        """What runs, where every kernel is built that could be: one launch, but for planes that are no rows.

        K and V share a joined kernel, planes a kernel of records: in that, elements that change places are rows of one.
        With `pages`, planes whose rows are no whole words go through shared memory, as on a GPU.
        """
        forms = self.forms(src_alignment, dst_alignment)
        if not self.src.parts:
            return [Launch("__".join(form.name for form in forms), self.parts, forms)] if forms else []
        if not pages:
            return _record_launches(self.parts, forms)
        return _plane_launches(self.parts, forms, src_alignment, dst_alignment)

    def kernels(self, alignment: int = WIDEST) -> list[str]:
        """Names of the kernels, where base addresses are multiples of `alignment` bytes."""
        return [launch.kernel for launch in self.launches(alignment, alignment)]

    def fit(self) -> Plan:
        """The same copy in parts that kernels have the modes for (`Part.fit`)."""
        return replace(self, parts=tuple(piece for part in self.parts for piece in part.fit(part.kind)))

    def staged(self, *, gathers: bool) -> tuple[Plan, Plan]:
        """The same copy in two steps, by way of memory where blocks lie packed in the order of the far side.

        Parameters
        ----------
        gathers : bool
            Whether the destination is the far side: blocks are packed, then moved; else moved, then unpacked.

        Returns
        -------
        tuple of Plan
            First and second step.  The one on the far side keeps runs as long as they are there.
        """
        slot = (self.dst if gathers else self.src).packed()
        return between(self.src, slot, self.title), between(slot, self.dst, self.title)

    def flat(self, src_step: int | None, dst_step: int | None) -> Plan:
        """The plan for pools whose allocations lie `step` bytes apart (None: they do not): their tables become strides."""

        def fold(stride: int, table: int, step: int | None) -> tuple[int, int]:
            return (stride, table) if step is None else (stride + table * step, 0)

        def side(table: int, stride: int, step: int | None) -> tuple[int, int]:
            stride, table = fold(stride, table, step)
            return table, stride

        parts: list[Part] = []
        for part in self.parts:
            modes = []
            for mode in (*part.inner, *part.outer):
                src, src_table = fold(mode.src, mode.src_table, src_step)
                dst, dst_table = fold(mode.dst, mode.dst_table, dst_step)
                modes.append(Mode(mode.extent, src, dst, src_table, dst_table))
            start = [
                fold(part.src_offset, part.src_table_offset, src_step),
                fold(part.dst_offset, part.dst_table_offset, dst_step),
            ]
            ids = side(*part.src_id, src_step), side(*part.dst_id, dst_step)
            parts.append(_shaped(coalesce(modes), start, ids, part.label))
        return Plan(self.src, self.dst, _gathered(parts))

    def __str__(self) -> str:
        lines = [f"{self.title}   {self.shape}"]
        if self._of_planes:
            lines.append(f"{' and '.join(self.kernels())}: the planes of one page, then the next page's")
        for part in self.parts:
            form = part.form(WIDEST, WIDEST)
            name = f"words of {form.element or form.word} B" if self._of_planes else form.name
            lines.append(f"{part.label}{'  ' if part.label else ''}{name}: {_CLASS[part.kind]}")
            lines.extend(_loops(part, form))
        return "\n".join(lines)

    @property
    def _of_planes(self) -> bool:
        """Whether several planes are copied, which have kernels in common."""
        return bool(self.src.parts) and len(self.parts) > 1

    def _kinds_of_planes(self) -> Iterator[tuple[str, str]]:
        for name in self.kernels():
            yield Form.parse(name)[0].kind, name

    def explain(self) -> str:
        """The plan in sentences: what stays together, what moves, which word, which kernel and why."""
        paragraphs = [
            f"{self.src.layout.name} ({self.src.layout.order_text}) becomes "
            f"{self.dst.layout.name} ({self.dst.layout.order_text}): {size_text(self.nbytes)} a block."
        ]
        for part, form in zip(self.parts, self.forms(), strict=True):
            who = f"In {part.label}, every" if part.label else "Every"
            steps = " and ".join(
                f"{side} table picks one of {math.prod(m.extent for m in modes)} allocations a block"
                for side, modes in (
                    ("the source's", [m for m in part.outer if m.src_table]),
                    ("the destination's", [m for m in part.outer if m.dst_table]),
                )
                if modes
            )
            if part.kind == "copy":
                text = f"{who} chunk of {size_text(part.run_bytes)} stays as it is: a plain copy."
            elif part.kind == "rows":
                loops = len(part.inner) - 1
                text = (
                    f"{who} run of {size_text(part.run_bytes)} stays together and "
                    f"{f'{loops} loops reorder' if loops > 1 else 'one loop reorders'} the runs of a "
                    f"chunk of {size_text(part.chunk_bytes)}: neighbouring threads read and write neighbouring words of a run."
                )
            else:
                assert part.spans is not None
                a, b = part.spans
                text = (
                    f"{who} {size_text(part.run_bytes)} move by themselves: the source goes on along an axis of {a.extent}, the "
                    f"destination along one of {b.extent}."
                )
                if not self._of_planes:
                    turned = ", 16-byte words of elements in registers" if form.word > form.element else ""
                    text += f" A tile of both is turned in shared memory{turned}, so that both sides move whole lines."
            if steps:
                text += f" {steps[0].upper()}{steps[1:]}."
            narrow = (
                "" if form.word == WIDEST else f" (16 is ruled out by the run or a stride: {_narrowing(part, form)})"
            )
            if not self._of_planes:
                text += f" With aligned bases words are {form.word} bytes{narrow}; kernel {form.name}."
            paragraphs.append(text + _fitted(part))
        if self._of_planes:
            paragraphs += [f"{_OF_PLANES[kind]}: {name}." for kind, name in self._kinds_of_planes()]
        elif len(self.parts) == 2:
            paragraphs.append("Both halves go in one launch where the joined kernel is built, else in one launch each.")
        return "\n".join(paragraphs)


#: What a kernel does with the planes that it copies.
_OF_PLANES = {
    "copy": "One plane of a page is a plain copy",
    "rows": "One plane of a page is copied row by row",
    "tile": "One plane of a page is turned in tiles",
    "record": "Planes of one page are copied side by side, row by row, then the next page's",
    "page_in": "On a GPU pages are read as one stream into shared memory, where their planes are taken apart",
    "page_out": "On a GPU pages are put together in shared memory and written as one stream",
}


class Launch(NamedTuple):
    """A kernel and the parts that it copies, each in a form."""

    kernel: str
    parts: tuple[Part, ...]
    forms: tuple[Form, ...]
    staged: tuple[Staged, ...] = ()


def _plane_launches(
    parts: Sequence[Part], forms: Sequence[Form], src_alignment: int, dst_alignment: int
) -> list[Launch]:
    """A page by way of shared memory where that helps, or K or V alone if that can be done; rows of the other planes."""
    page = _page(parts, src_alignment, dst_alignment)
    if page is not None:
        return [page]
    made: list[Launch] = []
    rows: list[tuple[Part, Form]] = []
    for half in dict.fromkeys(part.half for part in parts):
        mine = [(part, form) for part, form in zip(parts, forms, strict=True) if part.half == half]
        page = _page([part for part, _ in mine], src_alignment, dst_alignment)
        if page is not None:
            made.append(page)
        else:
            rows += mine
    return made + (_record_launches(*zip(*rows, strict=True)) if rows else [])


def _page(parts: Sequence[Part], src_alignment: int, dst_alignment: int) -> Launch | None:
    staged = stage(parts, src_alignment, dst_alignment) if 0 < len(parts) <= MAX_PARTS else None
    if staged is None or max(len(one.part.inner) for one in staged) >= MAX_INNER:
        return None
    outer, inner = max(len(one.part.outer) for one in staged), max(len(one.part.inner) for one in staged)
    items = tuple(_form("rows", outer, inner, 0, one.item) for one in staged)
    name = _form("page_in" if staged[0].gathers else "page_out", outer, inner, 0, 0).name
    return Launch(name, tuple(one.part for one in staged), items, tuple(staged))


def _record_launches(parts: Sequence[Part], forms: Sequence[Form]) -> list[Launch]:
    made, rows = [], []
    total = sum(part.nbytes for part in parts)
    for part, form in zip(parts, forms, strict=True):
        if form.kind == "tile" and _SMALL_SHARE * part.nbytes > total:
            made.append(Launch(form.name, (part,), (form,)))
        else:
            rows.append(
                (part, form if form.kind != "tile" else _form("rows", form.outer, len(part.inner), 0, form.element))
            )
    for first in range(0, len(rows), MAX_PARTS):
        some = rows[first : first + MAX_PARTS]
        # A launch follows one pair of tables; what a block id steps through these is the same for all planes.
        outer, inner = max(form.outer for _, form in some), max(form.inner for _, form in some)
        alone = len(some) == 1
        name = some[0][1].name if alone else _form("record", outer, inner, 0, 0).name
        made.append(Launch(name, tuple(part for part, _ in some), tuple(form for _, form in some)))
    return made


#: Planes of less than this part of a block's bytes move by elements where these change places, in the launch of the others.
_SMALL_SHARE = 4


def _fitted(part: Part) -> str:
    """What is done about more modes than a kernel has."""
    text = (
        f" Kernels have at most {MAX_OUTER} modes that pick a chunk and {MAX_INNER} inside, and this copy {len(part.outer)} and "
        f"{len(part.inner)}: "
    )
    try:
        pieces = part.fit(part.kind)
    except MissingKernelError as error:
        return f"{text}{error}."
    if pieces[1:]:
        return f"{text}the shortest are peeled off, which takes {len(pieces)} launches."
    return f"{text}the slowest pick chunks instead." if pieces[0] is not part else ""


_CLASS = {"copy": "plain copy", "rows": "rows in another order", "tile": "transposed tiles"}


def _narrowing(part: Part, form: Form) -> str:
    if form.kind == "tile":
        return f"{form.element}-byte elements in rows that are no multiple of 16 bytes"
    return f"run of {part.run_bytes} B, strides " + ", ".join(
        str(m)
        for m in dict.fromkeys(s for mode in (*part.inner[1:], *part.outer) for s in (mode.src, mode.dst) if s % WIDEST)
    )


def _loops(part: Part, form: Form) -> Iterator[str]:
    """The loop nest, slowest first."""

    def side(table: int, stride: int) -> str:
        return " ".join(filter(None, (f"table+{table}" if table else "", f"+{stride} B" if stride else ""))) or "-"

    yield f"  {'for each':<22}{'times':>10}   {'source':<24}destination"
    yield f"  {'pair of block ids':<22}{'':>10}   {side(*part.src_id):<24}{side(*part.dst_id)}"
    for mode in reversed(part.outer):
        yield f"  {'chunk':<22}{mode.extent:>10}   {side(mode.src_table, mode.src):<24}{side(mode.dst_table, mode.dst)}"
    for mode in reversed(part.inner[1:]):
        yield f"  {'  row':<22}{mode.extent:>10}   {side(0, mode.src):<24}{side(0, mode.dst)}"
    run = part.run_bytes // (form.element or form.word)
    word = form.element or form.word
    yield f"  {f'    word of {word} B':<22}{run:>10}   {side(0, word):<24}{side(0, word)}"
    if any((part.src_offset, part.dst_offset, part.src_table_offset, part.dst_table_offset)):
        start = side(part.src_table_offset, part.src_offset), side(part.dst_table_offset, part.dst_offset)
        yield f"  {'starting at':<22}{'':>10}   {start[0]:<24}{start[1]}"


def size_text(count: int) -> str:
    """Bytes as people say them: ``5 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


# ---- making a plan -------------------------------------------------------------------------------------------------


def plan(
    src: Layout,
    dst: Layout,
    shape: BlockShape | tuple[BlockShape, BlockShape],
    *,
    num_blocks: int | tuple[int, int] = 1024,
    layers: range | tuple[range, range] | None = None,
) -> Plan:
    """Plan the copy of blocks from one layout to another.

    Parameters
    ----------
    src, dst : Layout
        From and to.
    shape : BlockShape or (BlockShape, BlockShape)
        Sizes of a block; of each side, where the pools hold other layers.
    num_blocks : int or (int, int)
        Blocks in each pool (source, destination).  Layouts with an axis slower than ``b`` have strides that depend on it.
    layers : range or (range, range), optional
        The layers to copy, on both sides or on each; all of them if it is not given.

    Returns
    -------
    Plan

    Raises
    ------
    LayoutError
        A layout that is not legal for the shape.
    PlanError
        The two layouts do not hold the same axes, have no common refinement, or need the order of an opaque group.

    Examples
    --------
    >>> from kvbm import BlockShape, load, plan
    >>> plan(load("nhd"), load("universal"), BlockShape(nl=80, no=2, nh=8, nt=16, hd=128)).kind
    'rows'
    """
    blocks = (num_blocks, num_blocks) if isinstance(num_blocks, int) else num_blocks
    shapes = (shape, shape) if isinstance(shape, BlockShape) else shape
    windows = None if layers is None else _windows(f"{src.name} → {dst.name}", shapes, layers)
    # Layouts are equal when they mean the same; names are part of the key so that a plan is titled as it was asked for.
    return _plan_cached(src, dst, src.name, dst.name, shapes, blocks, windows)


def _windows(
    title: str, shapes: tuple[BlockShape, BlockShape], layers: object
) -> tuple[tuple[int, int], tuple[int, int]]:
    """First layer and number of layers on each side."""
    given = (layers, layers) if isinstance(layers, range) else layers if isinstance(layers, tuple) else ()
    sides = [side for side in given if isinstance(side, range) and side.step == 1]
    if len(given) != 2 or len(sides) != 2:
        raise PlanError(f"{title}: layers: expected range(first, last) or two of them, got {layers}")
    for side, shape, where in zip(sides, shapes, ("source", "destination"), strict=True):
        if not 0 <= side.start < side.stop <= shape.nl:
            raise PlanError(f"{title}: layers: expected a range within 0 to {shape.nl} of the {where}, got {side}")
    if len(sides[0]) != len(sides[1]):
        raise PlanError(
            f"{title}: layers: expected as many in the source as in the destination, got {sides[0]} and {sides[1]}"
        )
    return (sides[0].start, len(sides[0])), (sides[1].start, len(sides[1]))


@functools.lru_cache(maxsize=1024)
def _plan_cached(
    src: Layout,
    dst: Layout,
    src_name: str,
    dst_name: str,
    shapes: tuple[BlockShape, BlockShape],
    blocks: tuple[int, int],
    windows: tuple[tuple[int, int], tuple[int, int]] | None,
) -> Plan:
    here, there = src.resolve(shapes[0], blocks[0]), dst.resolve(shapes[1], blocks[1])
    if windows is not None:
        here, there = here.layers(*windows[0]), there.layers(*windows[1])
    return between(here, there, f"{src_name} → {dst_name}")


def between(src: Resolved, dst: Resolved, title: str) -> Plan:
    """Plan the copy between two layouts with sizes; `plan` resolves them first, and remembers what it made."""
    planes = list(_planes(title, src, dst))
    for here, there in planes:
        _require_same_axes(title, here, there)
    apart = any(len(side.orders) == 2 for pair in planes for side in pair)
    halves = range(src.shape.no) if apart else (None,)
    found = [[_part(title, here, there, half) for half in halves] for here, there in planes]
    joined = [_rejoin(parts) for parts in found]
    # Where one plane's K and V differ, all planes keep the two apart: they then have the same loops.
    kept = found if any(len(parts) > 1 for parts in joined) else joined
    return Plan(src, dst, _gathered([part for parts in kept for part in parts]))


def _planes(title: str, src: Resolved, dst: Resolved) -> Iterator[tuple[Resolved, Resolved]]:
    """The planes of both sides that hold the same elements; a layout without planes is one."""
    sources, destinations = ({part.plane: part for part in side.planes} for side in (src, dst))
    for here, there, where in ((sources, destinations, src), (destinations, sources, dst)):
        only = [name for name in here if name not in there]
        if only:
            what = "has no planes" if only == [""] else f"has a plane '{only[0]}'"
            raise PlanError(
                f"{title}: {where.layout.name} {what}, and the other side has "
                f"{', '.join(repr(name) for name in there) if '' not in there else 'none'}; expected the same planes on both sides"
            )
    for name, one in sources.items():
        other = destinations[name]
        if one.shape.dtype != other.shape.dtype:
            raise PlanError(
                f"{title}: plane '{name}': {one.shape.dtype} in the source, {other.shape.dtype} in the destination; a copy "
                "converts no dtype"
            )
        yield one, other


def _require_same_axes(title: str, src: Resolved, dst: Resolved) -> None:
    if src.extents == dst.extents:
        return
    for here, there, where in ((src, dst, "source"), (dst, src, "destination")):
        only = {axis for axis, size in here.sizes.items() if size > 1 and axis not in there.sizes}
        if only:
            raise PlanError(f"{title}: axes {only} only in the {where}")
    for axis in src.sizes.keys() & dst.sizes.keys() - {"b"}:
        if src.sizes[axis] != dst.sizes[axis]:
            raise PlanError(
                f"{title}: axis '{axis}': {src.sizes[axis]} in the source, {dst.sizes[axis]} in the destination"
            )


def _part(title: str, src: Resolved, dst: Resolved, half: int | None) -> Part:
    """The loop nest of all of the block, or of one half of it (0 = K, 1 = V)."""
    here, there = src.half(half), dst.half(half)
    if half:
        for side, found in ((src, here), (dst, there)):
            if not found.has_o and side.shape.no > 1:
                raise PlanError(
                    f"{title}: axis 'o' is fused or split on one side, and K and V have orders of their own on the other"
                )
    if here.plain and there.plain:
        modes = _paired(title, src, here.by_axis, there.by_axis)
    else:
        modes = _paired(title, src, *_as_axes(title, src, dst, here.pieces, there.pieces))
    modes.append(Mode(src.shape.itemsize, 1, 1))
    label = " ".join(filter(None, (src.plane, "KV"[half] if half is not None else "")))
    part = _shaped(coalesce(modes), (here.start, there.start), (src.id_steps, dst.id_steps), label)
    return replace(part, half=half)


def _shaped(
    modes: Sequence[Mode],
    start: Sequence[tuple[int, int]],
    ids: tuple[tuple[int, int], tuple[int, int]],
    label: str,
) -> Part:
    outer: list[Mode] = []
    inner: list[Mode] = []
    size = 1
    for mode in modes:
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
    return Part(start[0][0], start[1][0], start[0][1], start[1][1], tuple(outer), tuple(inner), *ids, label)


def _rejoin(parts: list[Part]) -> list[Part]:
    """K and V as one part where they differ in nothing but where they start."""
    if len(parts) != 2 or (parts[0].outer, parts[0].inner) != (parts[1].outer, parts[1].inner):
        return parts
    k, v = parts
    halves = Mode(
        2,
        v.src_offset - k.src_offset,
        v.dst_offset - k.dst_offset,
        v.src_table_offset - k.src_table_offset,
        v.dst_table_offset - k.dst_table_offset,
    )
    start = [(k.src_offset, k.src_table_offset), (k.dst_offset, k.dst_table_offset)]
    return [_shaped(coalesce([*k.outer, *k.inner, halves]), start, (k.src_id, k.dst_id), k.label[:-1].strip())]


def _gathered(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Planes that go on in each other on both sides as one part, as often as there are such."""
    if len(parts) == 1:
        return tuple(parts)
    done: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.src_table_offset, part.src_offset)):
        while done and (whole := _fused(done[-1], part)):
            done.pop()
            part = whole
        done.append(part)
    return tuple(sorted(done, key=lambda part: -part.nbytes)) if len(done) < len(parts) else tuple(parts)


def _fused(one: Part, other: Part) -> Part | None:
    """Two parts as one, where the second's runs begin where the first's end and all else is the same."""
    run = one.run_bytes
    if (
        (one.outer, one.inner[1:], one.src_id, one.dst_id) != (other.outer, other.inner[1:], other.src_id, other.dst_id)
        or (one.src_table_offset, one.dst_table_offset) != (other.src_table_offset, other.dst_table_offset)
        or one.half != other.half
        or (one.src_offset + run, one.dst_offset + run) != (other.src_offset, other.dst_offset)
    ):
        return None
    modes = [Mode(run + other.run_bytes, 1, 1), *one.inner[1:], *one.outer]
    start = [(one.src_offset, one.src_table_offset), (one.dst_offset, one.dst_table_offset)]
    whole = _shaped(coalesce(modes), start, (one.src_id, one.dst_id), f"{one.label} + {other.label}")
    return replace(whole, half=one.half)


@dataclass(frozen=True, slots=True)
class _Span:
    """A range of one axis on one side: ``(index // divisor) % extent`` steps so much."""

    axes: tuple[str, ...]
    divisor: int
    extent: int
    stride: int
    table: int


#: What `_paired` reads of a side: the spans of each axis or fused group, sorted by name.
_ByAxis = Mapping[tuple[str, ...], Sequence["Piece | _Span"]]


def _as_axes(
    title: str, src: Resolved, dst: Resolved, src_pieces: Sequence[Piece], dst_pieces: Sequence[Piece]
) -> tuple[_ByAxis, _ByAxis]:
    """Both sides in the same axes: opaque groups become one axis, and a group that only one side fuses falls apart."""
    one, other = _opaque_as_axes(title, src, dst, src_pieces, dst_pieces)
    for axes in {span.axes for span in (*one, *other) if len(span.axes) > 1}:
        if not all(any(span.axes == axes for span in spans) for spans in (one, other)):
            one, other = _unfuse(title, src, axes, one), _unfuse(title, src, axes, other)
    sides: list[dict[tuple[str, ...], list[_Span]]] = []
    for spans in (one, other):
        by_axis: dict[tuple[str, ...], list[_Span]] = {}
        for span in sorted(spans, key=lambda span: span.axes):
            by_axis.setdefault(span.axes, []).append(span)
        sides.append(by_axis)
    return sides[0], sides[1]


def _opaque_as_axes(
    title: str, src: Resolved, dst: Resolved, src_pieces: Sequence[Piece], dst_pieces: Sequence[Piece]
) -> tuple[list[_Span], list[_Span]]:
    """Each opaque group becomes one axis on both sides, or it is an error."""
    sides = []
    groups = sorted({frozenset(p.term.axes) for p in (*src_pieces, *dst_pieces) if p.term.opaque}, key=sorted)
    for side, pieces in ((src, src_pieces), (dst, dst_pieces)):
        spans = [_Span(p.term.axes, p.divisor, p.extent, p.stride, p.table) for p in pieces if not p.term.opaque]
        for group in groups:
            axes = tuple(sorted(group))
            size = math.prod(side.sizes[axis] for axis in axes) // side.shape.pack
            inside = [piece for piece in pieces if group & set(piece.term.axes)]
            if not _is_dense(inside, group, size, side.shape.itemsize):
                opaque = dst if side is src else src
                text = next(
                    str(p.term) for p in (*src_pieces, *dst_pieces) if frozenset(p.term.axes) == group and p.term.opaque
                )
                raise PlanError(
                    f"{title}: {opaque.layout.name} does not promise the order inside {text}, and {side.layout.name} "
                    f"({side.layout.order_text}) needs it; use a layout with a promised order, such as operational_nhd or "
                    "operational_hnd"
                )
            spans = [span for span in spans if not group & set(span.axes)]
            spans.append(_Span(axes, side.shape.pack, size, side.shape.itemsize, 0))
        sides.append(spans)
    return sides[0], sides[1]


def _is_dense(pieces: Iterable[Piece], group: frozenset[str], size: int, itemsize: int) -> bool:
    """Whether these pieces hold the group and nothing else, contiguously."""
    held = itemsize
    for piece in sorted((p for p in pieces if p.extent > 1), key=lambda p: p.stride):
        if piece.table or piece.stride != held or not set(piece.term.axes) <= group:
            return False
        held *= piece.extent
    return held == size * itemsize


def _paired(title: str, side: Resolved, src: _ByAxis, dst: _ByAxis) -> list[Mode]:
    """Common refinement: one mode for each piece that is whole on both sides."""
    modes: list[Mode] = []
    for axes, ours in src.items():
        theirs = dst.get(axes)
        if theirs is None:
            continue  # an axis of size one may be left out of a layout
        # A packed axis starts at 2, also where nothing is left to step of it.
        start, other = (
            min((s.divisor for s in spans if s.extent > 1 or s.divisor > 1), default=1) for spans in (ours, theirs)
        )
        if start != other and side.shape.pack > 1:
            raise PlanError(
                f"{title}: axis '{' '.join(axes)}': {side.shape.pack} elements of {side.shape.dtype} share a byte on one side "
                "only, so that a copy would have to take bytes apart"
            )
        if len(ours) == len(theirs) == 1:
            s, d = ours[0], theirs[0]
            modes.append(Mode(s.extent, s.stride, d.stride, s.table, d.table))
            continue
        cuts = [span.divisor for spans in (ours, theirs) for span in spans]
        try:
            pieces = list(
                refine(cuts, math.prod(side.sizes[axis] for axis in axes), start if side.shape.pack > 1 else 1)
            )
        except LayoutError:
            splits = " and ".join(
                "(" + ",".join(str(s.extent) for s in sorted(spans, key=lambda s: -s.divisor)) + ")"
                for spans in (ours, theirs)
            )
            raise PlanError(f"{title}: splits {splits} of '{' '.join(axes)}' have no common refinement") from None
        for divisor, extent in pieces:
            if extent > 1:
                s, d = (
                    next(x for x in spans if x.divisor <= divisor < x.divisor * x.extent) for spans in (ours, theirs)
                )
                si, di = divisor // s.divisor, divisor // d.divisor
                modes.append(Mode(extent, s.stride * si, d.stride * di, s.table * si, d.table * di))
    return modes


def _unfuse(title: str, side: Resolved, axes: tuple[str, ...], spans: list[_Span]) -> list[_Span]:
    """Cut the spans of a fused group at the boundaries of its axes, so that each belongs to one axis."""
    bounds = {}
    inside = 1
    for axis in reversed(axes):
        bounds[axis] = inside
        inside *= side.sizes[axis]
    apart = [span for span in spans if span.axes != axes]
    for span in (span for span in spans if span.axes == axes):
        low, high = span.divisor, span.divisor * span.extent
        cuts = sorted({low, high, *(bound for bound in bounds.values() if low < bound < high)})
        for lower, upper in zip(cuts, cuts[1:], strict=False):
            axis = next(axis for axis in axes if bounds[axis] <= lower)
            if upper % lower or lower % bounds[axis] or upper > bounds[axis] * side.sizes[axis]:
                raise PlanError(
                    f"{title}: the split of '({' '.join(axes)})' at {lower} does not fall on its axes; no common refinement"
                )
            step = lower // span.divisor
            apart.append(_Span((axis,), lower // bounds[axis], upper // lower, span.stride * step, span.table * step))
    return apart
