"""Draws a layout for ``kvbm show``: its allocations, the nesting of its axes, the first runs, and what lies together.

Everything is computed from the pieces of a `Resolved` layout, never by listing allocations: a pool may have millions.
Lines are built as text that reads without colour; colour only repeats what the letters say (K and V, padding, labels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from .layout import AXES, Piece, Resolved

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console

    from .shapes import BlockShape

__all__ = ["address_lines", "index_label", "meaning", "runs", "show", "size_text"]

_MAX_WIDTH = 120
_K, _V, _DIM, _AXIS, _PAD = "cyan", "magenta", "dim", "bold", "yellow"


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


def size_text(nbytes: int) -> str:
    """Bytes as people say them, exact: ``4 KiB``, ``1.5 GiB``, ``9,345 B``.

    Examples
    --------
    >>> size_text(4096), size_text(9345), size_text(3 << 29)
    ('4 KiB', '9,345 B', '1.5 GiB')
    """
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes * 8 % scale == 0:
            return f"{nbytes / scale:,g} {unit}" if nbytes < 1_000_000 * scale else f"{nbytes // scale:,} {unit}"
    return f"{nbytes:,} B"


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
    for half in drawing.halves:
        drawing.nest(half)
        drawing.strip(half)
    drawing.together()


@dataclass(frozen=True)
class _Half:
    """What is drawn once: all allocations where they are alike, or K's and V's where their orders differ."""

    o: int | None
    pieces: tuple[Piece, ...]  # inside an allocation, slowest first

    @property
    def name(self) -> str:
        return "" if self.o is None else "KV"[self.o]

    @property
    def nbytes(self) -> int:
        return self.pieces[0].stride * self.pieces[0].extent if self.pieces else 0


class _Drawing:
    def __init__(self, console: Console, resolved: Resolved) -> None:
        self.console = console
        self.resolved = resolved
        self.shape: BlockShape = resolved.shape
        self.glyphs = _ASCII if console.options.ascii_only else _UNICODE
        self.width = max(40, min(console.width, _MAX_WIDTH))
        self.outer = tuple(piece for piece in reversed(resolved.pieces(0)) if piece.table)
        self.halves = [
            _Half(
                o if len(resolved.orders) == 2 else None,
                tuple(piece for piece in reversed(resolved.pieces(o)) if not piece.table),
            )
            for o in range(len(resolved.orders))
        ]

    # ---- the head ---------------------------------------------------------------------------------------------------

    def facts(self, shape_text: str | None) -> None:
        layout, shape, resolved = self.resolved.layout, self.shape, self.resolved
        self.line(Text(layout.name, "bold"))
        sizes = f"nl {shape.nl}, no {shape.no}, nh {shape.nh}, nt {shape.nt}, hd {shape.hd}, {shape.dtype}"
        facts = [("title", layout.title)] if layout.title else []
        names = ("order",) if len(layout.orders) == 1 else ("order of K", "order of V")
        facts += [(name, str(order)) for name, order in zip(names, layout.orders, strict=True)]
        for term, pitch in layout.pitch:
            facts.append((f"pitch of {term}", pitch.expression.text + (" B" if pitch.in_bytes else " elements")))
        facts += [(f"axis {axis}", f"{text} = {resolved.sizes[axis]:,}") for axis, text in layout.axes.items()]
        facts.append(("fingerprint", layout.fingerprint))
        if layout.used_by:
            facts.append(("used by", ", ".join(layout.used_by)))
        facts.append(("shape", f"{shape_text}: {sizes}" if shape_text and "=" not in shape_text else sizes))
        facts.append(("one block", f"{size_text(shape.nbytes)}{self.padding_text()}"))
        facts.append(("pool", f"{_count(resolved.num_blocks, 'block')} in {self.allocations_text()}"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style=_DIM)
        grid.add_column(overflow="fold")
        for key, value in facts:
            grid.add_row(f"  {key}", Text(value))
        self.console.print(grid, width=self.width)

    def padding_text(self) -> str:
        used = self.resolved.num_blocks * self.shape.nbytes
        padding = self.total() - used
        return f", and {padding * 100 / self.total():.1f} % of the pool is padding" if padding else ""

    def allocations_text(self) -> str:
        count = self.resolved.table_size
        sizes = sorted({size_text(half.nbytes) for half in self.halves})
        each = f" of {' or '.join(sizes)}" if count > 1 else ""
        return f"{_count(count, 'allocation')}{each}, {size_text(self.total())}"

    def total(self) -> int:
        count = self.resolved.table_size
        if len(self.halves) == 2 and any(piece.term.axes == ("o",) for piece in self.outer):
            return sum(half.nbytes for half in self.halves) * count // 2
        return self.halves[0].nbytes * count

    # ---- axes and the address ---------------------------------------------------------------------------------------

    def axes(self) -> None:
        self.head("Axes, slowest first")
        rows: list[tuple[str, str, str, str, str]] = []
        for piece in self.outer:
            step = f"{_count(piece.table, 'allocation')} on"
            rows.append((str(piece.term), meaning(piece), f"{piece.extent:,}", step, ""))
        for half in self.halves:
            held = self.held(half.pieces)
            for piece, holds in zip(half.pieces, held, strict=True):
                text = f"{half.name}  {piece.term}" if half.name else str(piece.term)
                step = f"{piece.stride:,} B on"
                padded = piece.stride != holds and piece.extent > 1
                padding = f"{size_text(piece.stride - holds)} padding" if padded else ""
                rows.append((text, meaning(piece), f"{piece.extent:,}", step, padding))
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

    def address(self, half: _Half) -> None:
        """Print the address form of the language, with this layout's numbers in it."""
        for line in address_lines(self.resolved, half.o or 0, self.width - 2):
            self.line(Text(f"  {line}"))

    def held(self, pieces: Sequence[Piece]) -> list[int]:
        """Bytes that one step of each piece holds: its stride less its padding."""
        inner = [piece.stride * piece.extent for piece in pieces[1:]]
        return [*inner, self.shape.itemsize][: len(pieces)]

    # ---- the table of allocations -----------------------------------------------------------------------------------

    def table(self) -> None:
        """Draw the first allocations, and the last, as boxes beside each other."""
        self.head("Allocations")
        count = self.resolved.table_size
        last = self.cell(count - 1)
        inner = max(len(line) for line in (*last[0], *self.cell(0)[0])) + 2
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
        at = {str(piece.term): index // piece.table % piece.extent for piece in self.outer}
        half = self.halves[min(at.get("o", 0), len(self.halves) - 1)]
        label = " ".join(index_label(piece, at[str(piece.term)]) for piece in self.outer) or "the pool"
        return (label, size_text(half.nbytes)), {0: _K, 1: _V}.get(at.get("o", -1), "")

    # ---- the nesting ------------------------------------------------------------------------------------------------

    def nest(self, half: _Half) -> None:
        """Axes as boxes in boxes: each shows its first member opened up, and the others by their labels."""
        what = "of K" if half.o == 0 else "of V" if half.o == 1 else "alike"
        count = self.resolved.table_size
        title = "Inside the allocation" if count == 1 else "Inside an allocation (all are alike)"
        if half.o is not None:
            title = f"Inside an allocation {what}" if count > 1 else f"Inside the allocation, the half {what}"
        self.head(title)
        pieces = [p for p in half.pieces if p.extent > 1] or list(half.pieces[-1:])
        style = _V if half.o == 1 else _K if half.o == 0 else ""
        for line in self.level(pieces, self.held(pieces), "", half.nbytes, self.width - 2, style, half.o or 0):
            self.line(Text("  ").append_text(line))

    def level(
        self, pieces: Sequence[Piece], held: Sequence[int], label: str, nbytes: int, width: int, style: str, first: int
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
            content.append(self.bar(piece, room, style))
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
                row.append_text(self.bar(pieces[1], room - size - 1 - len(hatch), own)).append(hatch, _PAD)
                content.append(row)
        else:
            own = _style_of(piece, opened) or style
            child = self.level(pieces[1:], held[1:], index_label(piece, opened), holds, room, own, first)
            if piece.stride > holds:
                text = f" {size_text(piece.stride - holds)} of padding "
                line = Text(f"{g.hatch * 2}{text}", _PAD)
                line.append(g.hatch * max(0, room - len(line)), _PAD)
                child.append(line)
            content += child
            others = [index_label(piece, i) for i in range(min(piece.extent, 4)) if i != opened]
            if piece.extent > 4:
                others = [index_label(piece, 1), g.dots, index_label(piece, piece.extent - 1)]
            content.append(Text("  " + " ".join(others), _style_of(piece, 1) if piece.extent == 2 else _DIM))
        return self.boxed(title, size_text(nbytes), content, width)

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

    def bar(self, piece: Piece, width: int, style: str) -> Text:
        """Draw the innermost axis, element by element: ``[d 0 1 2 … 127] 256 B``."""
        g = self.glyphs
        gap = piece.stride - self.shape.itemsize
        size = f" {size_text(piece.stride * piece.extent)}" + (f", {gap} B padding after each" if gap else "")
        room = width - len(size) - 2
        last = f"{g.dots} {piece.extent - 1}"
        if piece.term.opaque:
            name = f"{piece.term}: {piece.extent:,} elements, their order is not promised"
            name = name if len(name) <= room else f"{piece.term}: order not promised"
            return Text("[").append(f"{name[:room]:^{room}}", style).append("]").append(size, _DIM)
        text = f"{piece.term}"
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

    def strip(self, half: _Half) -> None:
        """Draw the allocation's first bytes in a line, one cell a run of the innermost axis, padding hatched."""
        pieces = [p for p in half.pieces if p.extent > 1]
        if len(pieces) < 2:
            return
        g = self.glyphs
        shown: list[tuple[int, str, str, bool]] = []
        used = 2
        for start, label, style, is_padding in self.cells(pieces, half):
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
        length = pieces[-1].stride * pieces[-1].extent
        self.head(f"Its first bytes, in runs of {pieces[-1].term}: {size_text(length)} each", blank=False)
        for row in rows:
            row.rstrip()
            self.line(row)

    def cells(self, pieces: Sequence[Piece], half: _Half) -> Iterator[tuple[int, str, str, bool]]:
        """(byte, label, style, is padding) of the first runs, in the order of their addresses."""
        outer, itemsize = list(pieces[:-1]), self.shape.itemsize
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
            nbytes = self.shape.nbytes // math.prod(self.shape.sizes[axis] for axis in fixed)
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


def address_lines(resolved: Resolved, o: int, width: int) -> list[str]:
    """The address with this layout's numbers, for K or for V (`o`), in lines of at most `width` where that can be."""

    def factor(piece: Piece, step: int) -> str:
        name = _index_name(piece, resolved.sizes)
        return name if step == 1 else f"{name}*{step}"

    steps = [piece for piece in reversed(resolved.pieces(o)) if piece.extent > 1]
    index = " + ".join(factor(piece, piece.table) for piece in steps if piece.table) or "0"
    prefix = f"address of {'KV'[o]} = " if len(resolved.orders) == 2 else "address = "
    lines = [f"{prefix}table[{index}]"]
    for term in (factor(piece, piece.stride) for piece in steps if not piece.table):
        if len(lines[-1]) + len(term) + 3 > width:
            lines.append(" " * (len(prefix) - 2))
        lines[-1] += f" + {term}"
    return lines


def runs(resolved: Resolved, fixed: Sequence[str], times: str = "×") -> str:
    """Contiguous runs of a block with the `fixed` axes held: ``160 × 4 KiB``; K's and V's apart where they differ."""
    parts = []
    halves = range(len(resolved.orders)) if "o" not in fixed else range(1)
    for o in halves:
        pieces = [p for p in resolved.pieces(o) if p.extent > 1 and "b" not in p.term.axes]
        if any(set(p.term.axes) & set(fixed) and set(p.term.axes) - set(fixed) for p in pieces):
            return "order not promised" if any(p.term.opaque for p in pieces) else "not whole pieces"
        pieces = [p for p in pieces if not set(p.term.axes) & set(fixed)]
        if len(resolved.orders) == 2:
            pieces = [p for p in pieces if p.term.axes != ("o",)]
        run = resolved.shape.itemsize
        inside = sorted((p for p in pieces if not p.table), key=lambda p: p.stride)
        count = math.prod(p.extent for p in pieces if p.table)
        for piece in inside:
            if piece.stride == run and count >= 1:
                run *= piece.extent
            else:
                count *= piece.extent
        parts.append((count, run))
    if len(set(parts)) == 1 and len(parts) == 2:
        parts = [(parts[0][0] * 2, parts[0][1])]
    named = zip("KV", parts, strict=False) if len(parts) == 2 else [("", parts[0])]
    return ", ".join(f"{name} {count:,} {times} {size_text(run)}".lstrip() for name, (count, run) in named)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def meaning(piece: Piece) -> str:
    """What the axes of a piece are called in prose."""
    names = [AXES.get(axis, "own axis") for axis in piece.term.axes]
    if piece.term.opaque:
        return "any order"
    return " and ".join(name.replace("element of the head", "element") for name in names)


def index_label(piece: Piece, index: int) -> str:
    """One member of an axis: ``t3``, ``K``, ``d/16B=3``."""
    text = str(piece.term)
    if text == "o" and index < 2 and piece.extent <= 2:
        return "KV"[index]
    return f"{text}{index}" if len(text) == 1 else f"{text}={index}"


def _style_of(piece: Piece, index: int) -> str:
    return ("", _K, _V)[1 + index] if str(piece.term) == "o" and index < 2 else ""


def _index_name(piece: Piece, sizes: Mapping[str, int]) -> str:
    """Write the index of a piece as arithmetic on axes: ``t``, ``(d/8)``, ``(d%8)``, ``(d/4%2)``."""
    axes = piece.term.axes
    if piece.term.opaque:
        return "?(" + ",".join(axes) + ")"
    name = axes[0] if len(axes) == 1 else "(" + " ".join(axes) + ")"
    if axes == ("b",):
        name = "id"
    total = math.prod(sizes[axis] for axis in axes)
    if piece.divisor == 1:
        return name if piece.extent == total else f"({name}%{piece.extent})"
    if piece.divisor * piece.extent == total:
        return f"({name}/{piece.divisor})"
    return f"({name}/{piece.divisor}%{piece.extent})"


def table_box(console: Console) -> box.Box:
    """Choose the frame that tables of the command line have."""
    return box.ASCII if console.options.ascii_only else box.SIMPLE_HEAD
