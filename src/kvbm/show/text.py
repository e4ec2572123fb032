"""Draws a layout for ``kvbm show``: its allocations, the nesting of its axes, the first runs, and the contiguous runs of a block.

The text is complete without colour: colour only repeats what the letters say (K and V, padding, labels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..layout.resolved import Piece, Resolved
from .contents import record_runs
from .facts import (
    Half,
    Level,
    address_lines,
    axis_rows,
    entry,
    exact_size,
    facts,
    halves,
    index_label,
    meaning,
    picked,
    runs,
    several,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from ..layout.shapes import BlockShape

_MAX_WIDTH = 120
_K, _V, _DIM, _AXIS, _PAD = "cyan", "magenta", "dim", "bold", "yellow"
_PLANES = ("green", "blue", "red", "bright_black")


@dataclass(frozen=True)
class _Glyphs:
    corners: str  # top left, top right, bottom left, bottom right
    horizontal: str
    vertical: str
    tees: str  # top, bottom
    times: str
    dots: str
    below: str
    hatch: str


_UNICODE = _Glyphs("╭╮╰╯", "─", "│", "┬┴", "×", "…", "⋮", "╱")
_ASCII = _Glyphs("++++", "-", "|", "++", "x", "...", ":", "/")


def show(console: Console, resolved: Resolved, shape_text: str | None = None) -> None:
    """Draw a layout, in at most 120 columns of a console.  Without UTF-8 the drawing is ASCII."""
    drawing = _Drawing(console, resolved)
    drawing.facts(shape_text)
    drawing.axes()
    drawing.table()
    if resolved.record:
        drawing.nest_records()
        drawing.strip_records()
    for half in drawing.halves if not resolved.record else ():
        drawing.nest(half)
        drawing.strip(half)
    drawing.together()


class _Drawing:
    def __init__(self, console: Console, resolved: Resolved) -> None:
        self.console = console
        self.resolved = resolved
        self.shape: BlockShape = resolved.shape
        self.glyphs = _ASCII if console.options.ascii_only else _UNICODE
        self.width = max(40, min(console.width, _MAX_WIDTH))
        self.halves = halves(resolved)

    # ---- the head ---------------------------------------------------------------------------------------------------

    def facts(self, shape_text: str | None) -> None:
        self.line(Text(self.resolved.layout.name, "bold"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style=_DIM)
        grid.add_column(overflow="fold")
        for key, value in facts(self.resolved, shape_text):
            grid.add_row(f"  {key}", Text(value))
        print_whole(self.console, grid)

    # ---- axes and the address ---------------------------------------------------------------------------------------

    def axes(self) -> None:
        self.head("Axes, slowest first")
        rows = axis_rows(self.resolved)
        table = Table(box=None, padding=(0, 2), show_header=True, header_style=_DIM)
        table.add_column("  axis", style=_AXIS, no_wrap=True)
        table.add_column("what")
        table.add_column("extent", justify="right", no_wrap=True)
        table.add_column("stride", justify="right", no_wrap=True)
        if any(row[4] for row in rows):
            table.add_column("", style=_PAD, no_wrap=True)
        for row in rows:
            table.add_row(f"  {row[0]}", *row[1 : len(table.columns)])
        print_whole(self.console, table)
        for half in self.halves:
            for line in address_lines(half.part, half.o or 0, self.width - 2):
                self.line(Text(f"  {line}"))

    # ---- the table of allocations -----------------------------------------------------------------------------------

    def table(self) -> None:
        """Draw the first allocations and the last as boxes beside each other."""
        self.head("Allocations")
        count = self.resolved.table_size
        ends = [
            start for part in self.resolved.planes for start in (part.bases[0][1], part.bases[0][1] - 1) if start > 0
        ]
        inner = max(len(line) for number in (0, count - 1, *ends) for line in self.cell(number)[0]) + 2
        fitting = max(1, (self.width - 2) // (inner + 3))
        before = max(1, (self.width - 2 - len("  ... ")) // (inner + 3) - 1)
        rows: list[Text] = [Text("  ") for _ in range(5)]
        g = self.glyphs
        for index in picked(count, before, fitting):
            if index is None:
                for row, text in zip(rows, (" ", " ", g.dots, " ", " "), strict=True):
                    row.append(f" {text:^3} ")
                continue
            lines, style = self.cell(index)
            bar = g.horizontal * inner
            rows[0].append(f"{g.corners[0]}{bar}{g.corners[1]} ")
            for row, line in zip(rows[1:3], lines, strict=True):
                row.append(g.vertical).append(f"{line:^{inner}}", style).append(f"{g.vertical} ")
            rows[3].append(f"{g.corners[2]}{bar}{g.corners[3]} ")
            rows[4].append(f"{f'{index:,}':^{inner + 2}} ", _DIM)
        self.lines(rows, "")

    def cell(self, number: int) -> tuple[tuple[str, str], str]:
        """The two lines of text in a box, and their style."""
        found = entry(self.resolved, number)
        style = {0: _K, 1: _V}.get(-1 if found.o is None else found.o, "")
        if found.plane is not None:
            style = _PLANES[found.plane % len(_PLANES)]
        return (found.label(self.resolved, 1) or "the pool", exact_size(found.nbytes)), style

    # ---- the nesting ------------------------------------------------------------------------------------------------

    def nest(self, half: Half) -> None:
        """Draw the axes as nested boxes.  Each shows the inside of its first member, and the labels of the others."""
        is_one = self.resolved.table_size == 1
        if half.part.plane:
            title = f"Inside an array of {' of '.join(half.name.split())}, {half.part.shape.dtype}"
        elif half.o is not None:
            title = f"Inside the allocation, the half of {half.name}" if is_one else f"Inside an allocation of {half.name}"
        else:
            title = "Inside the allocation" if is_one else "Inside an allocation (all are alike)"
        self.head(title)
        if levels := several(half.own) or half.own[-1:]:
            self.lines(self.boxes(levels, "", half.nbytes, self.width - 2, half, self.style(half)))
        else:
            self.line(Text(f"  one element of {exact_size(half.nbytes)}"))

    def nest_records(self) -> None:
        """Draw the axes that planes share as nested boxes.  The innermost shows a record: one line or box per plane."""
        is_one = self.resolved.table_size == 1
        self.head("Inside the allocation" if is_one else "Inside an allocation (all are alike)")
        half = self.halves[0]
        self.lines(
            self.boxes(several(half.shared), "", half.nbytes if half.shared else self.resolved.record, self.width - 2)
        )

    def style(self, half: Half) -> str:
        if half.part.plane:
            return _PLANES[[other.plane for other in self.resolved.parts].index(half.part.plane) % len(_PLANES)]
        return "" if half.o is None else (_K, _V)[half.o]

    def boxes(
        self, levels: Sequence[Level], label: str, nbytes: int, width: int, half: Half | None = None, style: str = ""
    ) -> list[Text]:
        """One box with the members of the first level inside.  Of K and V, the one of `half` is opened.

        Without `half`, the innermost box shows the planes.  `label` is that of the opened member of the level outside, and the
        box is `width` columns wide.
        """
        room = width - 4
        if not levels:
            return self.boxed(label, "the planes", nbytes, self.plane_content(room), width)
        piece, holds = levels[0]
        if half is not None and len(levels) == 1:
            content = [self.bar(piece, room, style, half.part.shape.itemsize)]
        elif half is not None and len(levels) == 2:
            content = list(self.rows(levels, room, half, style))
        else:
            opened = half.o or 0 if half is not None and piece.term.axes == ("o",) else 0
            own = _style_of(piece, opened) or style
            content = self.boxes(levels[1:], index_label(piece, opened), holds, room, half, own)
            if piece.stride > holds:
                content.append(self.hatched(piece.stride - holds, "of padding", room))
            content.append(self.others(piece, opened))
        title = f"{piece.term} {meaning(piece)} {piece.extent:,} {self.glyphs.times} {exact_size(piece.stride)}"
        return self.boxed(label, title, nbytes, content, width)

    def rows(self, levels: Sequence[Level], room: int, half: Half, style: str) -> Iterator[Text]:
        """The two innermost levels, one line per member."""
        (piece, holds), (inner, _) = levels
        indices = picked(piece.extent, 2, 4)
        size = max(len(index_label(piece, i)) for i in indices if i is not None)
        pad = piece.stride - holds
        hatch = f" {self.glyphs.hatch * 4} {exact_size(pad)}" if pad else ""
        for index in indices:
            if index is None:
                yield Text(f"{self.glyphs.below:>{size}}", _DIM)
                continue
            bar = self.bar(
                inner, room - size - 1 - len(hatch), _style_of(piece, index) or style, half.part.shape.itemsize
            )
            yield Text(f"{index_label(piece, index):>{size}} ", _DIM).append_text(bar).append(hatch, _PAD)

    def hatched(self, nbytes: int, what: str, room: int) -> Text:
        line = Text(f"{self.glyphs.hatch * 2} {exact_size(nbytes)} {what} ", _PAD)
        return line.append(self.glyphs.hatch * max(0, room - len(line)), _PAD)

    def plane_content(self, room: int) -> list[Text]:
        content: list[Text] = []
        wide = max(len(half.name) for half in self.halves)
        for half in self.halves:
            style, itemsize = self.style(half), half.part.shape.itemsize
            content.append(Text(f"{half.name:<{wide}} ", style))
            content[-1].append(f"{half.part.shape.dtype} from byte {half.start:,} on", _DIM)
            levels = several(half.own)
            if not levels:
                content[-1].append(f": one of {itemsize} B", _DIM)
            elif len(levels) == 1:
                content.append(self.bar(levels[0].piece, room, style, itemsize))
            else:
                nbytes = levels[0].piece.stride * levels[0].piece.extent
                content += self.boxes(levels, "", nbytes, room, half, style)
        return content

    def strip_records(self) -> None:
        """Draw the first bytes in a line, one cell per run of a plane."""
        first, more, _ = record_runs(self.resolved, 12, 12)
        around = [piece for piece, _ in several(self.halves[0].shared)][-1:]
        cells: list[tuple[int, str, str, bool]] = []
        for turn in range(min(around[0].extent, 12) if around and not more else 1):
            base = turn * around[0].stride if around else 0
            if first[0].start:
                cells.append((base, "pad", _PAD, True))
            for run in first:
                label = f"{index_label(around[0], turn)} {run.label}" if around else run.label
                cells.append((base + run.start, label, _PLANES[(run.plane or 0) % len(_PLANES)], False))
                if run.padding:
                    cells.append((base + run.start + run.nbytes, "pad", _PAD, True))
        self.head("Its first bytes, in runs of planes", blank=False)
        self.cells_in_a_line(cells)

    def others(self, piece: Piece, opened: int) -> Text:
        """The labels of the members that are not opened."""
        others = [index_label(piece, i) for i in range(min(piece.extent, 4)) if i != opened]
        if piece.extent > 4:
            others = [index_label(piece, 1), self.glyphs.dots, index_label(piece, piece.extent - 1)]
        return Text("  " + " ".join(others), _style_of(piece, 1) if piece.extent == 2 else _DIM)

    def boxed(self, label: str, title: str, nbytes: int, content: Iterable[Text], width: int) -> list[Text]:
        g = self.glyphs
        right = f" {exact_size(nbytes)} "
        title = f"{label} {g.horizontal} {title}" if label else title
        title = f" {title[: max(0, width - 6)]} "
        if len(title) + len(right) + 5 > width:
            right = ""
        fill = width - 3 - len(title) - len(right) - (1 if right else 0)
        top = Text(g.corners[0] + g.horizontal).append(title, _AXIS).append(g.horizontal * max(0, fill))
        top.append(right, _DIM).append((g.horizontal if right else "") + g.corners[1])
        lines = [top]
        for line in content:
            line.truncate(width - 4, pad=True)
            lines.append(Text(f"{g.vertical} ").append_text(line).append(f" {g.vertical}"))
        lines.append(Text(g.corners[2] + g.horizontal * (width - 2) + g.corners[3]))
        return lines

    def bar(self, piece: Piece, width: int, style: str, itemsize: int) -> Text:
        """Draw the innermost axis, element by element: ``[d 0 1 2 … 127] 256 B``."""
        g = self.glyphs
        gap = piece.stride - itemsize
        size = f" {exact_size(piece.stride * piece.extent)}" + (f", {gap} B padding after each" if gap else "")
        room = max(0, width - len(size) - 2)
        last = f"{g.dots} {piece.extent - 1}"
        if piece.term.opaque:
            name = f"{piece.term}: {piece.extent:,} elements, their order is not promised"
            name = name if len(name) <= room else f"{piece.term}: order not promised"
            return Text("[").append(f"{name[:room]:^{room}}", style).append("]").append(size, _DIM)
        text = f"{piece.term}/{piece.divisor}" if piece.divisor > 1 and not piece.term.steps else f"{piece.term}"
        numbers = [f" {index}" for index in range(min(piece.extent, _MAX_WIDTH))]
        if piece.extent > len(numbers) or len(text) + sum(map(len, numbers)) > room:
            whole, numbers = numbers, [f" {last}"]
            for number in whole:
                if len(text) + len(number) + len(last) + 1 > room:
                    break
                text += number
        text += "".join(numbers)
        return Text("[").append(f"{text[:room]:<{room}}", style).append("]").append(size, _DIM)

    # ---- the first runs ---------------------------------------------------------------------------------------------

    def strip(self, half: Half) -> None:
        """Draw the first bytes of the allocation in a line: one cell per run of the innermost axis; padding is hatched."""
        pieces = [piece for piece, _ in several(half.own)]
        if len(pieces) < 2:
            return
        length = pieces[-1].stride * pieces[-1].extent
        self.head(f"Its first bytes, in runs of {pieces[-1].term}: {exact_size(length)} each", blank=False)
        self.cells_in_a_line(self.cells(pieces, half))

    def cells_in_a_line(self, cells: Iterable[tuple[int, str, str, bool]]) -> None:
        """Draw as many cells as fit, each above the number of its first byte."""
        g = self.glyphs
        shown: list[tuple[int, str, str, bool]] = []
        used = 2
        for start, label, style, is_padding in cells:
            wide = max(len(label), len(f"{start:,}")) + 2
            if used + wide + 1 + len(" bytes") > self.width:
                break
            used += wide + 1
            shown.append((start, label, style, is_padding))
        rows = [Text("  "), Text("  "), Text("  "), Text("  ")]
        for number, (start, label, style, is_padding) in enumerate(shown):
            wide = max(len(label), len(f"{start:,}")) + 2
            joint = (g.corners[0], g.corners[2]) if number == 0 else (g.tees[0], g.tees[1])
            rows[0].append(joint[0] + g.horizontal * wide)
            rows[1].append(g.vertical).append(g.hatch * wide if is_padding else f"{label:^{wide}}", style)
            rows[2].append(joint[1] + g.horizontal * wide)
            rows[3].append(f"{start:<{wide + 1},}", _DIM)
        rows[0].append(g.tees[0] + g.horizontal)
        rows[1].append(f"{g.vertical} {g.dots}")
        rows[2].append(g.tees[1] + g.horizontal)
        rows[3].append("bytes", _DIM)
        self.lines(rows, "")

    def cells(self, pieces: Sequence[Piece], half: Half) -> Iterator[tuple[int, str, str, bool]]:
        """(byte, label, style, is padding) of the first runs, in the order of their addresses."""
        outer, itemsize = list(pieces[:-1]), half.part.shape.itemsize
        base = 0
        if half.o is not None:  # K and V may share the allocation: begin at the start of this half
            base = sum(half.o * piece.stride for piece in outer if piece.term.axes == ("o",))
            outer = [piece for piece in outer if piece.term.axes != ("o",)]
        run = pieces[-1].stride * (pieces[-1].extent - 1) + itemsize
        limit = min(math.prod(p.extent for p in outer), 24)
        varying = [p for n, p in enumerate(outer) if math.prod(q.extent for q in outer[n + 1 :]) < limit]
        end = base
        for number in range(limit):
            rest, start, at = number, base, {}
            for piece in reversed(outer):
                rest, index = divmod(rest, piece.extent)
                start += index * piece.stride
                at[str(piece.term)] = index
            if start > end:
                yield end, "pad", _PAD, True
            label = " ".join(index_label(piece, at[str(piece.term)]) for piece in varying)
            o = at.get("o", half.o)
            yield start, label, {0: _K, 1: _V}.get(o, "") if o is not None else "", False
            end = start + run

    # ---- contiguous runs of a block ---------------------------------------------------------------------------------

    def together(self) -> None:
        """Print the number of contiguous runs of a block, a layer, a head, a token."""
        has_v = self.shape.no == 2
        wholes = [
            ("a whole block", ()),
            ("one layer of it, K and V" if has_v else "one layer of it", ("l",)),
            ("one layer's K", ("l", "o")),
            ("one KV head of all layers", ("h",)),
            ("one token of all layers", ("t",)),
            ("one token of one layer, K" if has_v else "one token of one layer", ("l", "o", "t")),
        ]
        if not has_v:
            del wholes[2]  # it equals the line before
        self.head("What lies together: contiguous runs of one block")
        table = Table(box=None, padding=(0, 2), show_header=True, header_style=_DIM)
        table.add_column("  to touch", no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("runs", justify="right")
        for name, fixed in wholes:
            nbytes = sum(
                part.block_bytes // math.prod(part.extents.get(axis, 1) for axis in fixed)
                for part in self.resolved.planes
            )
            table.add_row(f"  {name}", exact_size(nbytes), runs(self.resolved, fixed, self.glyphs.times))
        print_whole(self.console, table)

    # ---- lines ------------------------------------------------------------------------------------------------------

    def head(self, text: str, *, blank: bool = True) -> None:
        if blank:
            self.console.print()
        self.console.print(Text(text, "bold underline" if self.console.is_terminal else ""))

    def lines(self, texts: Iterable[Text], margin: str = "  ") -> None:
        for text in texts:
            text.rstrip()
            self.line(Text(margin).append_text(text))

    def line(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)


def _style_of(piece: Piece, index: int) -> str:
    return ("", _K, _V)[1 + index] if str(piece.term) == "o" and index < 2 else ""


def table_box(console: Console) -> box.Box:
    """The frame of tables on the command line."""
    return box.ASCII if console.options.ascii_only else box.SIMPLE_HEAD


def print_whole(console: Console, table: Table) -> None:
    """Print a table with at most one column that wraps.  No cell is cut, even if the table is wider than the console."""
    wide = console.options.update(width=10_000)
    for column in table.columns:
        if column.no_wrap:
            cells = [Measurement.get(console, wide, cell).maximum for cell in (column.header, *column.cells)]
            column.min_width = max(cells)
    needed = Measurement.get(console, wide, table).minimum
    before, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = before
