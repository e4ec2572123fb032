"""Pictures of copies, for `kvbm plan --svg`: chunks and runs of both sides, with the names of their layers, heads and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..layout.axes import AXES
from ..layout.region import Section
from ..planner.kernel_forms import Form
from ..planner.loopnest import STILL, Mode, Part
from ..planner.plan import Plan
from .elements import changing, element_at, loop_axes, names_of
from .facts import exact_size, picked
from .figure import BAND, EDGE, FILLS, GAP, HUES, LEFT, MUTED, PAPER, PLAIN, TALL, WIDTH, Sheet, inches, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Fill of the pieces of chunk 0, whose runs are drawn, among the pieces of other chunks.
FILL_OWN = "#c4cbd3"

def draw_plan(plan: Plan) -> Figure:
    """Draw a copy: the chunks of each side, the runs of the first chunk, and the destination of each run.

    Two loops of a chunk are drawn: the one that steps to the next run of the source, and the one that steps to the next run of
    the destination.  Chunks and runs have the names of their first elements.  The colours of runs show their destinations.  If
    chunks interleave in memory, their pieces are drawn in address order.

    The figure is 800 px wide.  The label of the patch of a run is ``"source N @START"`` or ``"destination N @START"``.

    Raises `KvbmError` if matplotlib is not installed, and `PlanError` if values are cast: runs of both sides have other sizes.
    """
    if plan.casts:
        raise PlanError(f"{plan.title}: a plan of a cast has no picture; print it, or its explain()")
    with looks():
        sheet = Sheet()
        sides = [plan.src.layout.order_text, plan.dst.layout.order_text]
        lines = [
            *([f"{sides[0]}   →", sides[1]] if plan.src.layout.planes else [f"{sides[0]}   →   {sides[1]}"]),
            f"{str(plan.shape).replace(',', ', ')}; {exact_size(plan.nbytes)} per block",
            f"kernel {', '.join(plan.kernels())}",
        ]
        sheet.head(plan.title, lines)
        # A launch may run less than a part, or run its loops in another order.  It is found by the part's label.
        chosen = {one.label: form for run in plan.launches() for one, form in run.work}
        for part, itself in zip(plan.parts, plan.forms(), strict=True):
            form = chosen.get(part.label, itself)
            sheet.y += 0.16
            if part.label:
                name = f"{part.label}: {form.kind}, {exact_size(part.nbytes)} per block"
                sheet.text(EDGE, sheet.y + 0.02, name, size=10, weight="bold")
                sheet.y += 0.2
            _Drawing(sheet, plan, part, form).draw()
        sheet.y += 0.18
        axes = [axis for axis in AXES if axis not in "bo" and plan.src.size(axis) > 1]
        legend = ", ".join(f"{axis}: {AXES[axis]}" for axis in axes)
        notes = [
            f"Chunks and runs are named by their first element ({legend}). Colours: where a run goes." if legend else "",
            "Small numbers: bytes from the start of the block, and of runs from the start of the chunk.",
        ]
        for note in filter(None, notes):
            sheet.text(EDGE, sheet.y + 0.06, note, size=8, color=MUTED, room=WIDTH - 2 * EDGE)
            sheet.y += 0.17
        sheet.y += 0.07
        _draw_nest(sheet, plan)
        return sheet.finish()


def _draw_nest(sheet: Sheet, plan: Plan) -> None:
    """The plan's text, with the axes of each loop beside it."""
    modes = ((part, mode) for part in plan.parts for mode in (*reversed(part.outer), *reversed(part.inner[1:])))
    for line in str(plan).splitlines()[1:]:
        if line.lstrip().startswith(("chunk ", "row ")):
            axes = loop_axes(*next(modes), plan.src)
            legend = ", ".join(f"{axis}: {AXES.get(axis, 'own axis')}" for axis in axes)
            sheet.text(LEFT + BAND - 0.55, sheet.y + 0.06, legend, size=7.8, color=MUTED, room=WIDTH - LEFT - BAND + 0.55 - EDGE)
        sheet.mono([line], 7.8)


@dataclass(frozen=True, slots=True)
class _Loops:
    """The two drawn loops of a chunk: `fast` steps to the source's next run, `slow` to the next row of runs."""

    fast: Mode
    slow: Mode

    @classmethod
    def of(cls, part: Part) -> _Loops:
        loops = list(part.inner[1:])
        if not loops:
            return cls(STILL, STILL)
        fast = min(loops, key=lambda mode: mode.src)
        others = [mode for mode in loops if mode is not fast]
        slow = min(others, key=lambda mode: mode.dst) if others else STILL
        return cls(fast, slow)

    def number(self, i: int, j: int) -> int:
        return j * self.fast.extent + i


def _end(mode: Mode, is_source: bool) -> tuple[int, int]:
    """The step of a mode on one side: bytes and table entries."""
    return (mode.src, mode.src_table) if is_source else (mode.dst, mode.dst_table)


class _Drawing:
    """A part of a plan on a sheet."""

    def __init__(self, sheet: Sheet, plan: Plan, part: Part, form: Form) -> None:
        self.sheet, self.plan, self.part, self.form = sheet, plan, part, form
        self.loops = _Loops.of(part)

    def section(self, is_source: bool) -> Section:
        return self.plan.src if is_source else self.plan.dst

    def element(self, is_source: bool, entry: int, nbytes: int) -> dict[str, int] | None:
        """The element that begins at an address relative to the part's start."""
        (offset, first) = self.part.start[not is_source]
        return element_at(self.section(is_source), first + entry, offset + nbytes)

    def draw(self) -> None:
        sheet, part, loops, word = self.sheet, self.part, self.loops, self.form.word
        self.chunks("source")
        sheet.y += GAP
        top = sheet.y
        here = self.runs("source")
        sheet.y += 0.95
        there = self.runs("destination")
        for pair, (x, colour) in here.items():
            to, _ = there[pair]
            sheet.axes.annotate(
                "", (to, sheet.y - TALL), (x, top + TALL),
                arrowprops={"arrowstyle": "-|>,head_width=0.16,head_length=0.35", "color": HUES[colour], "linewidth": 1.0,
                            "shrinkA": 1, "shrinkB": 1},
            )  # fmt: skip
        if self.form.kind == "tile":
            _draw_tile(sheet, part, loops, word, top + TALL)
        rest = [mode for mode in part.inner[1:] if mode not in (loops.fast, loops.slow)]
        for turn, text in enumerate(["the same for", *map(self.members, reversed(rest))] if rest else ()):
            sheet.text(EDGE, top + TALL + 0.34 + 0.14 * turn, text, size=7.5, color=MUTED, room=LEFT - EDGE - 0.05)
        sheet.y += GAP
        self.chunks("destination")

    def members(self, mode: Mode) -> str:
        """The members of a loop: ``h0 to h7``, ``K and V``."""
        axes = loop_axes(self.part, mode, self.plan.src)
        if axes == ["o"]:
            return "K and V"
        start, last = (
            self.element(True, turn * mode.src_table, turn * mode.src) for turn in (0, mode.extent - 1)
        )  # fmt: skip
        ends = [" ".join(names_of(element, axes)) for element in (start, last)]
        return f"{ends[0]} to {ends[1]}" if axes else f"{mode.extent:,} more"

    # ---- chunks -----------------------------------------------------------------------------------------------------

    def chunks(self, side: str) -> None:
        """The first chunks of a block and the last, each with its start.  The first one opens towards its runs.

        If another chunk lies between the runs of a chunk, chunks are drawn in pieces.
        """
        is_source = side == "source"
        if pieces := self.interleaved(is_source):
            self.pieces(side, pieces)
            return
        sheet, part, count = self.sheet, self.part, self.part.chunks
        sheet.gutters(
            side, "chunks of a block", f"{count:,} × {exact_size(part.chunk_bytes)}", f"= {exact_size(part.nbytes)}"
        )
        indices = picked(count, 3, 4)
        steps = [_steps(part.outer, index, is_source) for index in indices]
        width = self.cells(side, "chunk", indices, steps, {0})
        full, first = (LEFT, LEFT + BAND), (LEFT, LEFT + width)
        if is_source:
            sheet.fan(first, full, sheet.y, sheet.y + GAP)
        else:
            sheet.fan(full, first, sheet.y - TALL - GAP, sheet.y - TALL)

    def interleaved(self, is_source: bool) -> list[Mode]:
        """Loops over pieces of chunks, fastest first.  Empty unless an outer loop has a smaller step than a loop inside a chunk."""
        inside = [mode for mode in self.part.outer if not _end(mode, is_source)[1]]
        if not inside:
            return []
        least = min(_end(mode, is_source)[0] for mode in inside)
        if not any(_end(mode, is_source)[0] > least for mode in self.part.inner[1:]):
            return []
        loops = [mode for mode in (*self.part.outer, *self.part.inner[1:]) if sum(_end(mode, is_source)) >= least]
        loops += [mode for mode in self.part.outer if mode not in loops]
        return sorted(loops, key=lambda mode: (_end(mode, is_source)[1] > 0, _end(mode, is_source)))

    def pieces(self, side: str, loops: Sequence[Mode]) -> None:
        """Draw pieces of chunks in address order; those of chunk 0 are filled."""
        is_source, part = side == "source", self.part
        count = math.prod(mode.extent for mode in loops)
        turn = loops[0].extent
        first = picked(turn, 2, 3)
        again = [turn, *([turn + 1] if turn > 2 else [])] if turn < count else []
        indices = list(first)
        indices += again
        if indices[-1] is not None and indices[-1] < count - 1:
            indices += [None, count - 1] if indices[-1] < count - 2 else [count - 1]
        steps = [_steps(loops, index, is_source) for index in indices]
        own = set()
        for index in indices:
            rest = index or 0
            digits = []
            for mode in loops:
                rest, digit = divmod(rest, mode.extent)
                digits.append(digit if mode in part.outer else 0)
            if index is not None and not any(digits):
                own.add(index)
        size = exact_size(part.nbytes // count)
        self.sheet.gutters(side, "chunks interleave", f"{count:,} × {size}", "dark: chunk 0")
        self.cells(side, "piece", indices, steps, own)

    def cells(
        self, side: str, what: str, indices: Sequence[int | None], steps: Sequence[tuple[int, int]], own: set[int]
    ) -> float:
        """Draw a row of chunks or pieces; return the width of one."""
        sheet, part, is_source = self.sheet, self.part, side == "source"
        first = part.start[not is_source]
        places = [(entry, offset) for index, (entry, offset) in zip(indices, steps, strict=True) if index is not None]
        elements = [self.element(is_source, *place) for place in places]
        axes = changing(elements) if None not in elements else []
        tabled = first[1] or any(_end(mode, is_source)[1] for mode in part.outer)
        dots = 0.66 if what == "chunk" else 0.5
        shown = [index for index in indices if index is not None]
        width = (BAND - dots * (len(indices) - len(shown))) / len(shown)
        x, y, before = LEFT, sheet.y, -1
        for place, index in enumerate(indices):
            if index is None:
                after = next(other for other in indices[place:] if other is not None)
                sheet.box(x, y, dots, TALL, PAPER, linestyle=(0, (2, 2)))
                sheet.skipped(x, y, dots, after - before - 1)
                x += dots
                continue
            before = index
            entry, offset = first[1] + steps[place][0], first[0] + steps[place][1]
            where = " ".join(filter(None, (f"table+{entry:,}" if tabled else "", f"+{offset:,} B" if offset else "")))
            names = names_of(self.element(is_source, *steps[place]), axes)
            is_own, label = index in own, "chunk" if what == "chunk" or index == 0 else "piece"
            fill = FILL_OWN if is_own and what == "piece" else PLAIN
            sheet.box(x, y, width, TALL, fill, label=f"{side} {label} {index} @{entry},{offset}")
            name = " ".join(names) or (f"chunk {index:,}" if what == "chunk" else f"{index:,}")
            sheet.words(x, y, width, name, where or "+0 B", weight="bold" if is_own else "normal")
            x += width
        sheet.y += TALL
        return width

    # ---- runs -------------------------------------------------------------------------------------------------------

    def runs(self, side: str) -> dict[tuple[int, int], tuple[float, int]]:
        """Draw the runs of the first chunk in address order of a side; return the middle and the colour of each."""
        sheet, part, loops, word = self.sheet, self.part, self.loops, self.form.word
        is_source = side == "source"

        def stride(mode: Mode) -> int:
            return _end(mode, is_source)[0]

        # On each side the loop with the smaller step is the inner one.  This gives the address order.
        first, second = sorted((loops.fast, loops.slow), key=lambda mode: (mode.extent == 1, stride(mode)))
        by_dst = sorted((loops.fast, loops.slow), key=lambda mode: (mode.extent == 1, mode.dst))
        goes = by_dst[1] if by_dst[1].extent > 1 else by_dst[0]  # the colour shows the row of the destination
        groups, members = picked(second.extent, 2, 4), picked(first.extent, 2, 4)
        colour_of = {index: turn for turn, index in enumerate(i for i in picked(goes.extent, 2, 4) if i is not None)}
        total = loops.fast.extent * loops.slow.extent
        below = f"{part.run_bytes // word:,} words of {word} B" if part.run_bytes >= word else f"{word} B words"
        about = "runs of chunk 0" if part.kind != "tile" else "elements"
        sheet.gutters(
            side, about, f"{total:,} × {exact_size(part.run_bytes)}", below if part.run_bytes != word else "one word each"
        )
        offsets = {
            (i, j): i * stride(first) + j * stride(second)
            for j in groups for i in members if i is not None and j is not None
        }  # fmt: skip
        elements = {pair: self.element(is_source, 0, offset) for pair, offset in offsets.items()}
        axes = changing(elements.values()) if None not in elements.values() else []
        dots, far = 0.24, 0.1
        cells = sum(j is not None for j in groups) * sum(i is not None for i in members)
        holes = sum(j is not None for j in groups) * sum(i is None for i in members) + sum(j is None for j in groups)
        is_apart = second.extent > 1 and stride(second) != first.extent * max(stride(first), 1)
        between = far if is_apart else 0.0
        width = (BAND - dots * holes - between * (len(groups) - 1)) / cells
        x, y = LEFT, sheet.y
        found: dict[tuple[int, int], tuple[float, int]] = {}
        for j in groups:
            if j is None:
                sheet.text(x + dots / 2, y + TALL / 2, "…", size=11, color=MUTED, ha="center")
                x += dots + between
                continue
            for i in members:
                if i is None:
                    sheet.box(x, y, dots, TALL, PAPER, linestyle=(0, (2, 2)))
                    sheet.text(x + dots / 2, y + TALL / 2, "…", size=9, color=MUTED, ha="center")
                    x += dots
                    continue
                fast, slow = (i, j) if first is loops.fast else (j, i)
                offset, number = offsets[i, j], loops.number(fast, slow)
                colour = colour_of.get(fast if goes is loops.fast else slow, 0)
                sheet.box(x, y, width, TALL, FILLS[colour], label=f"{side} {number} @{offset}")
                names = names_of(elements[i, j], axes) or ([f"{number:,}"] if not axes else [])
                self.name(x, y - 0.03, width, names, _short(offset, width - 0.06))
                _tick(sheet, x, y, width, part.run_bytes // word)
                found[fast, slow] = (x + width / 2, colour)
                x += width
            x += between
        sheet.y += TALL
        return found

    def name(self, x: float, y: float, width: float, names: Sequence[str], offset: str) -> None:
        """Names of a run above its offset.  If they are too long for one line, two lines without the offset."""
        text, room = " ".join(names), width - 0.03
        if len(names) < 2 or inches(text, 6.5) <= room:
            self.sheet.words(x, y, width, text, offset)
            return
        half = (len(names) + 1) // 2
        for line, part in enumerate((names[:half], names[half:])):
            at = y + TALL / 2 + (0.075 if line else -0.075)
            self.sheet.text(x + width / 2, at, " ".join(part), size=7.5, room=room, ha="center")


def _steps(loops: Sequence[Mode], index: int | None, is_source: bool) -> tuple[int, int]:
    """Table entries and bytes of a member of a loop nest, fastest loop first."""
    entry, offset, rest = 0, 0, index or 0
    for mode in loops:
        rest, step = divmod(rest, mode.extent)
        nbytes, entries = _end(mode, is_source)
        offset, entry = offset + step * nbytes, entry + step * entries
    return entry, offset


def _short(offset: int, room: float) -> str:
    text = f"+{offset:,}"
    return text if inches(text, 6.5) <= room else f"+{exact_size(offset)}"


def _tick(sheet: Sheet, x: float, y: float, width: float, words: int) -> None:
    """Mark the words of a run along its lower edge: all words, or the first few if there are more than 32."""
    each = width / words if 1 < words <= 32 else 0.06
    for tick in range(1, min(words, 32) if words <= 32 else 4):
        at = x + tick * each
        sheet.axes.plot([at, at], [y + TALL - 0.06, y + TALL], color=MUTED, linewidth=0.5)


def _draw_tile(sheet: Sheet, part: Part, loops: _Loops, word: int, top: float) -> None:
    if part.spans is None:
        return
    a, b = part.spans
    left, y, each = LEFT + BAND + 0.1, top + 0.13, 0.1
    for i in range(4):
        for j in range(4):
            sheet.box(left + i * each, y + j * each, each, each, FILLS[i if a is loops.fast else j], linewidth=0.4)
    sheet.text(left + 0.5, y + 0.1, f"{a.extent:,} × {b.extent:,}", size=8, room=0.65)
    sheet.text(left + 0.5, y + 0.27, f"of {part.run_bytes} B", size=8, room=0.65)
    sheet.text(left, y + 0.54, "turned in tiles", size=7.5, color=MUTED)
    if word > part.run_bytes:
        sheet.text(left, y + 0.69, f"a word is {word // part.run_bytes} of them", size=7.5, color=MUTED, room=1.12)
