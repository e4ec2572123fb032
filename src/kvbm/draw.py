"""Draws a layout for ``kvbm show``: its allocations, the nesting of its axes, the first runs, and what lies together.

Lines are built as text that reads without colour; colour only repeats what the letters say (K and V, padding, labels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from .facts import Half, address_lines, axis_rows, facts, halves, index_label, meaning, record_runs, runs, size_text
from .resolved import Piece, Resolved

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from .shapes import BlockShape

__all__ = ["show", "table_box"]

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
    """Draw a layout.

    Parameters
    ----------
    console : rich.console.Console
        Its width is used up to 120 columns; without UTF-8 the drawing is ASCII.
    resolved : Resolved
        The layout at a shape and a number of blocks.
    shape_text : str, optional
        What the shape is called, e.g. ``llama-3.1-70b/tp8``.
    """
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
        self.outer = tuple(piece for piece in reversed(resolved.planes[0].pieces(0)) if piece.table)
        self.halves = halves(resolved)

    # ---- the head ---------------------------------------------------------------------------------------------------

    def facts(self, shape_text: str | None) -> None:
        self.line(Text(self.resolved.layout.name, "bold"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style=_DIM)
        grid.add_column(overflow="fold")
        for key, value in facts(self.resolved, shape_text):
            grid.add_row(f"  {key}", Text(value))
        self.console.print(grid, width=self.width)

    # ---- axes and the address ---------------------------------------------------------------------------------------

    def axes(self) -> None:
        self.head("Axes, slowest first")
        rows = axis_rows(self.resolved)
        table = Table(box=None, padding=(0, 2), show_header=True, header_style=_DIM)
        table.add_column("  axis", style=_AXIS)
        table.add_column("what")
        table.add_column("extent", justify="right")
        table.add_column("the next one lies", justify="right")
        if any(row[4] for row in rows):
            table.add_column("", style=_PAD)
        for row in rows:
            table.add_row(f"  {row[0]}", *row[1 : len(table.columns)])
        self.console.print(table, width=self.width)
        for half in self.halves:
            self.address(half)

    def address(self, half: Half) -> None:
        """Print the address form of the language, with this layout's numbers in it."""
        for line in address_lines(half.part, half.o or 0, self.width - 2):
            self.line(Text(f"  {line}"))

    # ---- the table of allocations -----------------------------------------------------------------------------------

    def table(self) -> None:
        """Draw the first allocations, and the last, as boxes beside each other."""
        self.head("Allocations")
        count = self.resolved.table_size
        ends = [
            entry for part in self.resolved.planes for entry in (part.bases[0][1], part.bases[0][1] - 1) if entry > 0
        ]
        inner = max(len(line) for entry in (0, count - 1, *ends) for line in self.cell(entry)[0]) + 2
        fitting = max(1, (self.width - 2) // (inner + 3))
        indices: list[int | None] = list(range(count)) if count <= fitting else []
        if not indices:
            before = max(1, (self.width - 2 - len("  ... ")) // (inner + 3) - 1)
            indices = [*range(before), None, count - 1]
        rows: list[Text] = [Text("  ") for _ in range(5)]
        g = self.glyphs
        for index in indices:
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
        for row in rows:
            row.rstrip()
            self.line(row)

    def cell(self, index: int) -> tuple[tuple[str, str], str]:
        if self.resolved.apart:
            for number, part in enumerate(self.resolved.parts):
                at = {piece: (index - part.bases[0][1]) // piece.table % piece.extent for piece in self.outer}
                if index == part.bases[0][1] + sum(step * piece.table for piece, step in at.items()):
                    label = " ".join([part.plane, *(index_label(piece, at[piece]) for piece in self.outer)])
                    size = part.kinds[0].nbytes
                    return (label, size_text(size)), _PLANES[number % len(_PLANES)]
        return self.plain_cell(index)

    def plain_cell(self, index: int) -> tuple[tuple[str, str], str]:
        at = {str(piece.term): index // piece.table % piece.extent for piece in self.outer}
        half = self.halves[0 if self.resolved.parts else min(at.get("o", 0), len(self.halves) - 1)]
        label = " ".join(index_label(piece, at[str(piece.term)]) for piece in self.outer) or "the pool"
        return (label, size_text(half.nbytes)), {0: _K, 1: _V}.get(at.get("o", -1), "")

    # ---- the nesting ------------------------------------------------------------------------------------------------

    def nest(self, half: Half) -> None:
        """Axes as boxes in boxes: each shows its first member opened up, and the others by their labels."""
        what = " of ".join(filter(None, ("of " + "KV"[half.o] if half.o is not None else "", half.part.plane)))
        count = self.resolved.table_size
        title = "Inside the allocation" if count == 1 else "Inside an allocation (all are alike)"
        if half.part.plane:
            title = f"Inside an array of {' of '.join(filter(None, (half.part.plane, 'KV'[half.o] if half.o is not None else '')))}"
            title += f", {half.part.shape.dtype}"
        elif half.o is not None:
            title = f"Inside an allocation {what}" if count > 1 else f"Inside the allocation, the half {what}"
        self.head(title)
        steps = [step for step in zip(half.pieces, half.held, strict=True) if step[0].extent > 1]
        steps = steps or list(zip(half.pieces[-1:], half.held[-1:], strict=True))
        pieces, held = [piece for piece, _ in steps], [holds for _, holds in steps]
        style = _V if half.o == 1 else _K if half.o == 0 else ""
        if half.part.plane:
            style = self.plane_style(half.part)
        if not pieces:
            self.line(Text(f"  one element of {size_text(half.nbytes)}"))
            return
        lines = self.level(pieces, held, "", half.nbytes, self.width - 2, style, half.o or 0, half.part.shape.itemsize)
        for line in lines:
            self.line(Text("  ").append_text(line))

    def plane_style(self, part: Resolved) -> str:
        return _PLANES[[other.plane for other in self.resolved.parts].index(part.plane) % len(_PLANES)]

    # ---- records ----------------------------------------------------------------------------------------------------

    def nest_records(self) -> None:
        """What planes share as boxes in boxes, and in the innermost a record: a line or a box a plane."""
        count = self.resolved.table_size
        self.head("Inside the allocation" if count == 1 else "Inside an allocation (all are alike)")
        half = self.halves[0]
        steps = list(zip(half.pieces[: half.shared], half.held[: half.shared], strict=True))
        nbytes = steps[0][0].stride * steps[0][0].extent if steps else self.resolved.record
        for line in self.around([step for step in steps if step[0].extent > 1], "", nbytes, self.width - 2):
            self.line(Text("  ").append_text(line))

    def around(self, steps: Sequence[tuple[Piece, int]], label: str, nbytes: int, width: int) -> list[Text]:
        g = self.glyphs
        if not steps:
            title = f"{label} {g.horizontal} the planes" if label else "the planes"
            return self.boxed(title, size_text(nbytes), self.plane_content(width - 4), width)
        piece, holds = steps[0]
        title = f"{label} {g.horizontal} " if label else ""
        title += f"{piece.term} {meaning(piece)} {piece.extent:,} {g.times} {size_text(piece.stride)}"
        content = self.around(steps[1:], index_label(piece, 0), holds, width - 4)
        if piece.stride > holds:
            content.append(self.hatched(piece.stride - holds, "of padding", width - 4))
        return self.boxed(title, size_text(nbytes), [*content, self.others(piece, 0)], width)

    def hatched(self, nbytes: int, what: str, room: int) -> Text:
        line = Text(f"{self.glyphs.hatch * 2} {size_text(nbytes)} {what} ", _PAD)
        return line.append(self.glyphs.hatch * max(0, room - len(line)), _PAD)

    def plane_content(self, room: int) -> list[Text]:
        content: list[Text] = []
        wide = max(len(half.name) for half in self.halves)
        for half in self.halves:
            part, style = half.part, self.plane_style(half.part)
            own = zip(half.pieces[half.shared :], half.held[half.shared :], strict=True)
            steps = [step for step in own if step[0].extent > 1]
            start = Text(f"{half.name:<{wide}} ", style).append(
                f"{part.shape.dtype} from byte {part.bases[0][0]:,} on", _DIM
            )
            if not steps:
                content.append(start.append(f": one of {part.shape.itemsize} B", _DIM))
                continue
            content.append(start)
            pieces, held = [piece for piece, _ in steps], [holds for _, holds in steps]
            if len(steps) == 1:
                content.append(self.bar(pieces[0], room, style, part.shape.itemsize))
            else:
                nbytes = pieces[0].stride * pieces[0].extent
                content += self.level(pieces, held, "", nbytes, room, style, half.o or 0, part.shape.itemsize)
        return content

    def strip_records(self) -> None:
        """Draw the first bytes in a line, one cell a run of a plane."""
        first, more, last = record_runs(self.resolved, 0, 12, 12)
        half = self.halves[0]
        around = [piece for piece in half.pieces[: half.shared] if piece.extent > 1][-1:]
        cells: list[tuple[int, str, str, bool]] = []
        for turn in range(min(around[0].extent, 12) if around else 1):
            base = turn * around[0].stride if around else 0
            end = base
            for run in [*first, *([] if more else last)]:
                if base + run.start > end:
                    cells.append((end, "pad", _PAD, True))
                name = self.resolved.parts[run.plane].plane
                label = f"{index_label(around[0], turn)} {name}" if around else name
                cells.append((base + run.start, label, _PLANES[run.plane % len(_PLANES)], False))
                end = base + run.start + run.nbytes
            if more:
                break
            if end < base + self.resolved.record:
                cells.append((end, "pad", _PAD, True))
        self.head("Its first bytes, in runs of planes", blank=False)
        self.cells_in_a_line(cells)

    def level(
        self,
        pieces: Sequence[Piece],
        held: Sequence[int],
        label: str,
        nbytes: int,
        width: int,
        style: str,
        first: int,
        itemsize: int,
    ) -> list[Text]:
        """One box: `pieces[0]` counted out inside it.  `nbytes` is the room it takes, `first` the K or V to open."""
        g = self.glyphs
        piece, holds = pieces[0], held[0]
        title = f"{label} {g.horizontal} " if label else ""
        title += f"{piece.term} {meaning(piece)} {piece.extent:,} {g.times} {size_text(piece.stride)}"
        content: list[Text] = []
        room = width - 4
        opened = first if piece.term.axes == ("o",) else 0
        if len(pieces) == 1:
            content.append(self.bar(piece, room, style, itemsize))
        elif len(pieces) == 2:
            indices = list(range(piece.extent)) if piece.extent <= 4 else [0, 1, None, piece.extent - 1]
            size = max(len(index_label(piece, i)) for i in indices if i is not None)
            pad = piece.stride - holds
            hatch = f" {g.hatch * 4} {size_text(pad)}" if pad else ""
            for index in indices:
                if index is None:
                    content.append(Text(f"{g.below:>{size}}", _DIM))
                    continue
                own = _style_of(piece, index) or style
                row = Text(f"{index_label(piece, index):>{size}} ", _DIM)
                row.append_text(self.bar(pieces[1], room - size - 1 - len(hatch), own, itemsize)).append(hatch, _PAD)
                content.append(row)
        else:
            own = _style_of(piece, opened) or style
            child = self.level(pieces[1:], held[1:], index_label(piece, opened), holds, room, own, first, itemsize)
            if piece.stride > holds:
                child.append(self.hatched(piece.stride - holds, "of padding", room))
            content += child
            content.append(self.others(piece, opened))
        return self.boxed(title, size_text(nbytes), content, width)

    def others(self, piece: Piece, opened: int) -> Text:
        """The members that are not opened up, by their labels."""
        others = [index_label(piece, i) for i in range(min(piece.extent, 4)) if i != opened]
        if piece.extent > 4:
            others = [index_label(piece, 1), self.glyphs.dots, index_label(piece, piece.extent - 1)]
        return Text("  " + " ".join(others), _style_of(piece, 1) if piece.extent == 2 else _DIM)

    def boxed(self, title: str, right: str, content: Iterable[Text], width: int) -> list[Text]:
        g = self.glyphs
        right = f" {right} "
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
        size = f" {size_text(piece.stride * piece.extent)}" + (f", {gap} B padding after each" if gap else "")
        room = width - len(size) - 2
        last = f"{g.dots} {piece.extent - 1}"
        if piece.term.opaque:
            name = f"{piece.term}: {piece.extent:,} elements, their order is not promised"
            name = name if len(name) <= room else f"{piece.term}: order not promised"
            return Text("[").append(f"{name[:room]:^{room}}", style).append("]").append(size, _DIM)
        text = f"{piece.term}/{piece.divisor}" if piece.divisor > 1 and not piece.term.steps else f"{piece.term}"
        for index in range(piece.extent):
            more = f" {index}"
            whole = sum(len(str(i)) + 1 for i in range(index, piece.extent)) if piece.extent - index < 40 else room
            if len(text) + whole <= room and piece.extent - index < 40:
                text += "".join(f" {i}" for i in range(index, piece.extent))
                break
            if len(text) + len(more) + len(last) + 1 > room:
                text += f" {last}"
                break
            text += more
        return Text("[").append(f"{text[:room]:<{room}}", style).append("]").append(size, _DIM)

    # ---- the first runs ---------------------------------------------------------------------------------------------

    def strip(self, half: Half) -> None:
        """Draw the allocation's first bytes in a line, one cell a run of the innermost axis, padding hatched."""
        pieces = [p for p in half.pieces if p.extent > 1]
        if len(pieces) < 2:
            return
        length = pieces[-1].stride * pieces[-1].extent
        self.head(f"Its first bytes, in runs of {pieces[-1].term}: {size_text(length)} each", blank=False)
        self.cells_in_a_line(self.cells(pieces, half))

    def cells_in_a_line(self, cells: Iterable[tuple[int, str, str, bool]]) -> None:
        """As many cells as fit, each over the byte that it begins at."""
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
        for row in rows:
            row.rstrip()
            self.line(row)

    def cells(self, pieces: Sequence[Piece], half: Half) -> Iterator[tuple[int, str, str, bool]]:
        """(byte, label, style, is padding) of the first runs, in the order of their addresses."""
        outer, itemsize = list(pieces[:-1]), half.part.shape.itemsize
        base = 0
        if half.o is not None:  # K and V may share the allocation: begin where this half does
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

    # ---- what lies together -----------------------------------------------------------------------------------------

    def together(self) -> None:
        """How many contiguous runs it takes to touch a block, a layer, a head, a token."""
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
            del wholes[2]  # the same as the line before
        self.head("What lies together: contiguous runs of one block")
        table = Table(box=None, padding=(0, 2), show_header=True, header_style=_DIM)
        table.add_column("  to touch")
        table.add_column("bytes", justify="right")
        table.add_column("runs", justify="right")
        for name, fixed in wholes:
            nbytes = 0
            for part in self.resolved.planes:
                held = math.prod(part.extents.values()) // part.shape.pack * part.shape.itemsize
                nbytes += held // math.prod(part.extents.get(axis, 1) for axis in fixed)
            table.add_row(f"  {name}", size_text(nbytes), runs(self.resolved, fixed, self.glyphs.times))
        self.console.print(table, width=self.width)

    # ---- lines ------------------------------------------------------------------------------------------------------

    def head(self, text: str, *, blank: bool = True) -> None:
        if blank:
            self.console.print()
        self.console.print(Text(text, "bold underline" if self.console.is_terminal else ""))

    def line(self, text: Text) -> None:
        text.no_wrap = True
        text.overflow = "ellipsis"
        self.console.print(text, soft_wrap=False, crop=True)


def _style_of(piece: Piece, index: int) -> str:
    return ("", _K, _V)[1 + index] if str(piece.term) == "o" and index < 2 else ""


def table_box(console: Console) -> box.Box:
    """Choose the frame that tables of the command line have."""
    return box.ASCII if console.options.ascii_only else box.SIMPLE_HEAD
