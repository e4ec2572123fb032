"""The contents of a picture of a layout: labels, bytes and padding of every member, from the pieces of a `Resolved` layout.

A picture has one row per level, slowest first.  Each row shows the inside of one member of the row above, usually the first.
A row with many members shows the first three, an ellipsis and the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..layout.resolved import Piece, Resolved
from .facts import Half, Level, entry, halves, index_label, meaning, picked, plane_lines, several

#: A row with more than eight members (a table: more than five) shows the first three and the last.
_FIRST, _MOST, _MOST_ENTRIES = 3, 8, 5
#: Number of runs that are shown at the beginning and at the end of a record.
_RUNS = (5, 2)


@dataclass(frozen=True, slots=True)
class Cell:
    """One member of a level, labelled ``t3``, ``K`` or ``d 0–7``.

    It starts at a byte in its allocation; an allocation has its index in the table.  `padding` are unused bytes before the next
    member.  `half` is 0 for K, 1 for V, None for both or neither, and `plane` the number of the plane, None for all or without
    planes.
    """

    label: str
    start: int
    nbytes: int
    padding: int = 0
    half: int | None = None
    plane: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One level of a layout: the table of allocations, or an axis inside an allocation."""

    term: str  # as declared
    about: str  # in prose
    extent: int  # number of members
    step: int  # bytes from one member to the next; for allocations: bytes of the first shown
    cells: tuple[Cell | int, ...]  # a number stands for that many members that are not shown
    opened: int = 0  # index in `cells` of the member that the next row shows
    turns: int = 0  # number of alternating runs of K and V inside a member; 0 if they do not alternate there
    opaque: bool = False  # the order of the elements is unspecified: one cell stands for all
    #: If a block has several allocations: first and last index in `cells` of each block shown, and its name.
    blocks: tuple[tuple[int, int, str], ...] = ()
    is_record: bool = False  # the members are runs of planes, of different sizes
    between: bool = False  # other planes lie between the members, so not all of that space is padding

    @property
    def members(self) -> list[Cell]:
        """The cells, without the numbers for members that are not shown."""
        return [cell for cell in self.cells if isinstance(cell, Cell)]


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that are drawn below one title: the table, the levels inside an allocation, those of K, of V, or of a plane.

    Slowest first; each row shows the inside of the opened member of the row before.  Title, such as ``Inside: scale of V``, and
    description are empty if there is only one section of levels.  `half` is 0 for K, 1 for V; `plane` is a number.
    """

    rows: tuple[Row, ...]
    title: str = ""
    about: str = ""
    half: int | None = None
    plane: int | None = None


def sections(resolved: Resolved) -> list[Section]:
    """The sections of a picture: the table of allocations first, then the inside of an allocation, one for each order.

    With planes: the table, the shared levels if the planes share records, then one section per plane and order.
    """
    made = [Section((_table_row(resolved),))]
    every = halves(resolved)
    first = every[0]
    half = 0 if _is_o_in_table(first) else None
    if resolved.record:
        cascade = _cascade(several(first.shared), 0, half if resolved.shape.no == 2 else None, 0)
        made.append(Section((*cascade, _record_row(resolved))))
    plane_texts = dict(plane_lines(resolved))
    names = [part.plane for part in resolved.parts]
    for each in every:
        o = each.o or 0
        # The half that the rows above open is K's, unless V has an order of its own.
        base = each.start + sum(o * piece.stride for piece, _ in each.shared if piece.term.axes == ("o",))
        if not resolved.parts:
            title = "" if each.o is None else f"Inside: {each.name}"
            # The first entry of the table that contains this order.
            made.append(Section(_cascade(several(each.own), base, None if half is None else o, o), title, half=each.o))
            continue
        others = (other for other in every if resolved.record and other.part is not each.part)
        is_between = any(each.start < other.end and other.start < each.end for other in others)
        plane = names.index(each.part.plane)
        rows = _cascade(several(each.own), base, None, o, plane, is_between)
        title = f"Inside: {' of '.join(each.name.split())}"
        about = plane_texts[f"plane {each.part.plane}"].partition(", ")[2]
        made.append(Section(rows, title, about, each.o, plane))
    return made


def _is_o_in_table(half: Half) -> bool:
    return any(piece.table and piece.term.axes == ("o",) for piece in half.part.pieces())


def _cascade(
    steps: Sequence[Level], base: int, half: int | None, o: int, plane: int | None = None, is_between: bool = False
) -> tuple[Row, ...]:
    """One row per level.  Each row starts at the opened member of the row before: the first member; for V (`o` = 1), V.

    Once K and V are distinguished, the rows below keep their colours; a plane has its own colour.
    """
    cascade = []
    for number, (piece, holds) in enumerate(steps):
        term, is_o, opened = str(piece.term), piece.term.axes == ("o",), 0
        padding, turns = piece.stride - holds, 0
        if piece.term.opaque:
            label = f"{piece.extent:,} elements in an order that is not promised"
            cells: tuple[Cell | int, ...] = (Cell(label, base, piece.stride * piece.extent, 0, half, plane),)
        else:
            cells = tuple(
                piece.extent - _FIRST - 1
                if i is None
                else Cell(_member(piece, i), base + i * piece.stride, holds, padding, i if is_o else half, plane)
                for i in picked(piece.extent, _FIRST, _MOST)
            )
            turns = 0 if is_o or half is not None else _turns([piece for piece, _ in steps[number + 1 :]])
        if is_o:
            opened, base = o, base + o * piece.stride
            half = o if plane is None else None
        cascade.append(
            Row(
                term,
                meaning(piece),
                piece.extent,
                piece.stride,
                cells,
                opened,
                turns,
                piece.term.opaque,
                between=is_between,
            )
        )
    return tuple(cascade)


def record_runs(resolved: Resolved, first: int, last: int) -> tuple[list[Cell], int, list[Cell]]:
    """The first runs of planes in a record, the number of runs that are left out, and the last runs, in address order.

    Of a record with at most `first` + `last` runs none is left out.  If V has its own order, the order of K is shown.
    """
    found, total = [], 0
    for plane, half in enumerate(half for half in halves(resolved) if not half.o):
        run = half.part.shape.itemsize
        loops: list[Piece] = []
        for piece, _ in sorted(several(half.own), key=lambda level: level.piece.stride):
            if not loops and piece.stride == run:
                run *= piece.extent
            else:
                loops.append(piece)
        count = math.prod(piece.extent for piece in loops)
        total += count
        # The first runs of the record are among the first runs of their planes; the same holds for the last runs.
        for number in {*range(min(first + last, count)), *range(max(0, count - last), count)}:
            start, rest = half.start, number
            for piece in loops:
                rest, index = divmod(rest, piece.extent)
                start += index * piece.stride
            found.append(Cell(half.part.plane, start, run, plane=plane))
    found.sort(key=lambda cell: cell.start)
    ends = [*(cell.start for cell in found[1:]), resolved.record]
    found = [
        replace(cell, padding=max(0, end - cell.start - cell.nbytes)) for cell, end in zip(found, ends, strict=True)
    ]
    more = total - first - last
    return (found[:first], more, found[-last:]) if more > 0 else (found, 0, [])


def _record_row(resolved: Resolved) -> Row:
    """The runs of all planes in the first record."""
    first, more, last = record_runs(resolved, *_RUNS)
    cells: list[Cell | int] = [*first, *([more] if more else []), *last]
    count = len(first) + more + len(last)
    return Row("record", f"{len(resolved.parts)} planes", count, resolved.record, tuple(cells), is_record=True)


def _with_gaps(indices: Sequence[int], cells: Sequence[Cell]) -> tuple[Cell | int, ...]:
    """The cells of these indices, and between them the numbers of members that are left out."""
    made: list[Cell | int] = [cells[0]]
    for before, index, cell in zip(indices, indices[1:], cells[1:], strict=False):
        made += [index - before - 1, cell] if index > before + 1 else [cell]
    return tuple(made)


def _table_row(resolved: Resolved) -> Row:
    """The first allocations and the last.  If a block has several: those of two blocks.  If planes have their own: some of each."""
    count, first = resolved.table_size, resolved.planes[0].pieces()
    table = [piece for piece in reversed(first) if piece.table]
    each = next((piece.table for piece in table if piece.term.axes == ("b",)), 0)  # allocations per block
    has_brackets = not resolved.has_separate_planes and 1 < each < count == each * resolved.num_blocks > 5
    if resolved.has_separate_planes:
        numbers = sorted(number for part in resolved.parts for number in _ends_of_plane(resolved, part))
        term, about = (
            " ".join("<…>" if term.planes else str(term) for term in resolved.layout.orders[0].table),
            "arrays of planes",
        )
    else:
        shown = [0, 1, each - 1, each, count - 1] if has_brackets else picked(count, _FIRST, _MOST_ENTRIES)
        numbers = sorted({number for number in shown if number is not None})
        term, about = " ".join(str(piece.term) for piece in table), "one allocation" if count == 1 else "allocations"
    cells = []
    for number in numbers:
        found = entry(resolved, number)
        half = found.o if resolved.shape.no == 2 and found.plane is None else None
        label = found.label(resolved, 2) or "all of it"
        cells.append(Cell(label, number, found.nbytes, half=half, plane=found.plane))
    shown_cells = _with_gaps(numbers, cells)
    blocks = []
    for block in range(2 if has_brackets else 0):
        mine = [
            place for place, cell in enumerate(shown_cells) if isinstance(cell, Cell) and cell.start // each == block
        ]
        blocks.append((mine[0], mine[-1], f"block {block}"))
    inner = [piece for piece in reversed(first) if not piece.table and piece.extent > 1]
    turns = 0 if resolved.has_separate_planes or cells[0].half is not None else _turns(inner)
    term = f"[{term}]" if term else "pool"
    return Row(term, about, count, cells[0].nbytes, shown_cells, turns=turns, blocks=tuple(blocks))


def _ends_of_plane(resolved: Resolved, part: Resolved) -> set[int]:
    """Table indices of the first arrays and of the last array of a plane."""
    table = [piece for piece in part.pieces() if piece.table and piece.extent > 1]
    second = table[0].table if table and len(resolved.parts) < 3 else 0
    return {part.bases[0][1] + at for at in (0, second, sum((piece.extent - 1) * piece.table for piece in table))}


def _turns(pieces: Sequence[Piece]) -> int:
    """Number of alternating runs of K and V in the range of these pieces, slowest first."""
    turns = 1
    for piece in pieces:
        turns *= piece.extent
        if piece.term.axes == ("o",) and piece.extent == 2:
            return turns
    return 0


def _member(piece: Piece, index: int) -> str:
    """Label of a member: ``t3``, ``K``; for a quotient the range that it holds, ``d 0–7``."""
    name = " ".join(piece.term.axes)
    if piece.divisor > 1:
        first = index * piece.divisor
        return f"{name} {first}–{first + piece.divisor - 1}"
    if len(piece.term.axes) > 1:
        return f"{name} {index}"
    return index_label(piece, index) if not piece.term.steps else f"{name}{index}"
