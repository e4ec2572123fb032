"""What there is to say of a layout, in words and numbers: where what lies, and what lies together.

Everything is computed from the pieces of a `Resolved` layout, never by listing allocations: a pool may have millions.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .resolved import Piece, Resolved
from .terms import AXES

__all__ = [
    "Half",
    "RecordRun",
    "address_lines",
    "axis_rows",
    "count_text",
    "facts",
    "halves",
    "index_label",
    "levels",
    "meaning",
    "one_block",
    "pitch_lines",
    "plane_lines",
    "record_runs",
    "runs",
    "shared_levels",
    "size_text",
]


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


def count_text(number: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def meaning(piece: Piece) -> str:
    """What the axes of a piece are called in prose."""
    names = [AXES.get(axis, "own axis") for axis in piece.term.axes]
    if piece.term.opaque:
        return "any order"
    if piece.divisor > 1 and not piece.term.steps:  # they share a byte
        return f"{piece.divisor} elements"
    return " and ".join(name.replace("element of the head", "element") for name in names)


def index_label(piece: Piece, index: int) -> str:
    """One member of an axis: ``t3``, ``K``, ``d/16B=3``."""
    text = str(piece.term)
    if text == "o" and index < 2 and piece.extent <= 2:
        return "KV"[index]
    return f"{text}{index}" if len(text) == 1 else f"{text}={index}"


def address_lines(resolved: Resolved, o: int, width: int) -> list[str]:
    """The address with this layout's numbers, for K or for V (`o`), in lines of at most `width` where that can be."""

    def factor(piece: Piece, step: int) -> str:
        name = _index_name(piece, resolved.sizes)
        return name if step == 1 else f"{name}*{step}"

    steps = [piece for piece in reversed(resolved.pieces(o)) if piece.extent > 1]
    offset, entry = resolved.bases[min(o, len(resolved.orders) - 1)]
    picked = [str(entry)] if entry else []
    index = " + ".join([*picked, *(factor(piece, piece.table) for piece in steps if piece.table)]) or "0"
    of = " of ".join(filter(None, (resolved.plane, "KV"[o] if len(resolved.orders) == 2 else "")))
    prefix = f"address of {of} = " if of else "address = "
    lines = [f"{prefix}table[{index}]"]
    terms = [factor(piece, piece.stride) for piece in steps if not piece.table]
    for term in [*terms, str(offset)] if offset else terms:
        if len(lines[-1]) + len(term) + 3 > width:
            lines.append(" " * (len(prefix) - 2))
        lines[-1] += f" + {term}"
    return lines


def runs(resolved: Resolved, fixed: Sequence[str], times: str = "×") -> str:
    """Contiguous runs of a block with the `fixed` axes held: ``160 × 4 KiB``; K's and V's apart where they differ."""
    if resolved.parts:
        return _runs_of_planes(resolved, fixed, times)
    return _runs_of(resolved, fixed, times, resolved.shape.itemsize)


def _runs_of(resolved: Resolved, fixed: Sequence[str], times: str, itemsize: int) -> str:
    parts = []
    halves = range(len(resolved.orders)) if "o" not in fixed else range(1)
    for o in halves:
        pieces = [p for p in resolved.pieces(o) if p.extent > 1 and "b" not in p.term.axes]
        if any(set(p.term.axes) & set(fixed) and set(p.term.axes) - set(fixed) for p in pieces):
            return "order not promised" if any(p.term.opaque for p in pieces) else "not whole pieces"
        pieces = [p for p in pieces if not set(p.term.axes) & set(fixed)]
        if len(resolved.orders) == 2:
            pieces = [p for p in pieces if p.term.axes != ("o",)]
        run = itemsize
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


def _runs_of_planes(resolved: Resolved, fixed: Sequence[str], times: str) -> str:
    """Records count as runs where planes leave no gap in them and all of a record is touched; else each plane for itself."""
    around = shared_levels(resolved)
    inside = [piece for part in resolved.parts for order in part.orders for piece, _ in _own(part, order, around)]
    held = sum(_plane_bytes(resolved, part) for part in resolved.parts)
    if resolved.record == held and not any(set(piece.term.axes) & set(fixed) for piece in inside if piece.extent > 1):
        part = resolved.parts[0]
        inner = [piece for piece in reversed(part.orders[0]) if not piece.table][:around]
        table = [piece for piece in part.orders[0] if piece.table]
        itself = replace(part.shape, dtype="uint8")
        shared = replace(part, parts=(), orders=((*table, *reversed(inner)),), shape=itself, plane="")
        return _runs_of(shared, fixed, times, resolved.record)
    return ", ".join(f"{part.plane} {runs(part, fixed, times)}" for part in resolved.parts)


def levels(resolved: Resolved, part: Resolved, o: int) -> list[tuple[Piece, int]]:
    """What steps inside an allocation, slowest first, and the bytes that one step holds: its stride less its padding.

    Parameters
    ----------
    resolved, part : Resolved
        A layout, and the plane of it that is looked at; the layout itself where it has none.
    o : int
        0 for K (or both), 1 for V.
    """
    inner = [piece for piece in reversed(part.pieces(o)) if not piece.table]
    held = [*(piece.stride * piece.extent for piece in inner[1:]), part.shape.itemsize][: len(inner)]
    if around := shared_levels(resolved):
        held[around - 1] = resolved.record
    return list(zip(inner, held, strict=True))


def shared_levels(resolved: Resolved) -> int:
    """How many of the levels inside an allocation all planes of a record share: the first ones."""
    return sum(not term.planes for term in resolved.layout.orders[0].inner) if resolved.record else 0


def plane_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """Each plane in a line: ``("plane scale", "s, float32, 16 B of a record from byte 512 on")``."""
    lines = []
    for plane, part in zip(resolved.layout.planes, resolved.parts, strict=True):
        order = " / ".join(filter(None, map(str, plane.orders))) or "one element"
        text = f"{order}, {part.shape.dtype}, {size_text(_plane_bytes(resolved, part))}"
        text += (
            f" of {size_text(resolved.record)} from byte {part.bases[0][0]:,} on" if resolved.record else " of a block"
        )
        text += "".join(f", pitch of {term} {pitch}" for term, pitch in plane.pitch)
        lines.append(
            (f"plane {plane.name}", text + (f", one for all {' '.join(plane.shared)}" if plane.shared else ""))
        )
    return lines


def _own(part: Resolved, order: Sequence[Piece], around: int) -> list[tuple[Piece, int]]:
    """A plane's own levels inside a record, slowest first."""
    inner = [piece for piece in reversed(order) if not piece.table][around:]
    return [(piece, part.shape.itemsize) for piece in inner]


def _plane_bytes(resolved: Resolved, part: Resolved) -> int:
    """Bytes of a plane's elements in a record, or in a block where it has arrays of its own."""
    own = _own(part, part.orders[0], shared_levels(resolved))
    if resolved.record:
        return math.prod(piece.extent for piece, _ in own) * part.shape.itemsize
    return math.prod(part.extents.values()) // part.shape.pack * part.shape.itemsize


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Neighbouring bytes of one plane in a record."""

    start: int
    nbytes: int
    plane: int
    gap: int = 0  # bytes to the next run, or to the end of the record


def record_runs(resolved: Resolved, o: int, first: int, last: int) -> tuple[list[RecordRun], int, list[RecordRun]]:
    """The first runs of planes in a record in the order of their addresses, how many are left out, and the last ones.

    Parameters
    ----------
    resolved : Resolved
        A layout whose planes share records.
    o : int
        0 for K (or both), 1 for V.
    first, last : int
        How many runs, where there are more than these together.
    """
    nests = []
    for index, part in enumerate(resolved.parts):
        run = part.shape.itemsize
        loops: list[tuple[int, int]] = []
        own = _own(part, part.pieces(o), shared_levels(resolved))
        for piece in sorted((piece for piece, _ in own if piece.extent > 1), key=lambda piece: piece.stride):
            if not loops and piece.stride == run:
                run *= piece.extent
            else:
                loops.append((piece.extent, piece.stride))
        nests.append((part.bases[0][0], run, loops[::-1], index))
    total = sum(math.prod(extent for extent, _ in loops) for _, _, loops, _ in nests)

    def stepped(
        start: int, run: int, loops: Sequence[tuple[int, int]], index: int, *, back: bool
    ) -> Iterator[RecordRun]:
        steps = [
            [turn * stride for turn in (range(extent)[::-1] if back else range(extent))] for extent, stride in loops
        ]
        for at in itertools.product(*steps):
            yield RecordRun(start + sum(at), run, index)

    def some(count: int, *, back: bool) -> list[RecordRun]:
        merged = heapq.merge(*(stepped(*nest, back=back) for nest in nests), key=lambda run: run.start, reverse=back)
        return list(itertools.islice(merged, count))

    if total <= first + last:
        whole = _with_gaps(some(total, back=False), resolved.record)
        return whole, 0, []
    begin, end = some(first + 1, back=False), some(last, back=True)[::-1]
    return _with_gaps(begin, begin[-1].start)[:first], total - first - last, _with_gaps(end, resolved.record)


def _with_gaps(found: Sequence[RecordRun], end: int) -> list[RecordRun]:
    starts = [*(run.start for run in found[1:]), end]
    return [replace(run, gap=max(0, to - run.start - run.nbytes)) for run, to in zip(found, starts, strict=True)]


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


@dataclass(frozen=True)
class Half:
    """What is drawn once: all allocations where they are alike, K's and V's where their orders differ, a plane's."""

    o: int | None
    pieces: tuple[Piece, ...]  # inside an allocation, slowest first
    held: tuple[int, ...]  # bytes that one step of each piece holds: its stride less its padding
    part: Resolved
    shared: int = 0  # of the pieces, those that all planes of a record share

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.part.plane, "" if self.o is None else "KV"[self.o])))

    @property
    def nbytes(self) -> int:
        return self.pieces[0].stride * self.pieces[0].extent if self.pieces else self.part.shape.itemsize


def halves(resolved: Resolved) -> list[Half]:
    """Of every plane, or of the layout itself, K and V where their orders differ, else both in one."""
    found = []
    for part in resolved.planes:
        for o in range(len(part.orders)):
            pieces, held = zip(*levels(resolved, part, o), strict=True) if levels(resolved, part, o) else ((), ())
            found.append(Half(o if len(part.orders) == 2 else None, pieces, held, part, shared_levels(resolved)))
    return found


def facts(resolved: Resolved, shape_text: str | None = None) -> list[tuple[str, str]]:
    """Names and values: what a layout is called and how it is declared, and what its blocks and its pool take.

    Parameters
    ----------
    resolved : Resolved
    shape_text : str, optional
        What the shape is called, e.g. ``llama-3.1-70b/tp8``.
    """
    layout, shape = resolved.layout, resolved.shape
    sizes = f"nl {shape.nl}, no {shape.no}, nh {shape.nh}, nt {shape.nt}, hd {shape.hd}, {shape.dtype}"
    found = [("title", layout.title)] if layout.title else []
    names = ("order",) if len(layout.orders) == 1 else ("order of K", "order of V")
    found += [(name, str(order)) for name, order in zip(names, layout.orders, strict=True)]
    found += [*plane_lines(resolved), *pitch_lines(resolved)]
    found += [(f"axis {axis}", f"{text} = {resolved.sizes[axis]:,}") for axis, text in layout.axes.items()]
    found.append(("fingerprint", layout.fingerprint))
    if layout.used_by:
        found.append(("used by", ", ".join(layout.used_by)))
    found.append(("shape", f"{shape_text}: {sizes}" if shape_text and "=" not in shape_text else sizes))
    total, count = resolved.nbytes, resolved.table_size
    padding = total - resolved.num_blocks * resolved.block_bytes
    padded = f", and {padding * 100 / total:.1f} % of the pool is padding" if padding else ""
    found.append(("one block", f"{size_text(resolved.block_bytes)}{padded}"))
    each = f" of {' or '.join(dict.fromkeys(size_text(half.nbytes) for half in halves(resolved)))}" if count > 1 else ""
    pool = f"{count_text(count, 'allocation')}{each}, {size_text(total)}"
    found.append(("pool", f"{count_text(resolved.num_blocks, 'block')} in {pool}"))
    return found


def pitch_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """Each declared pitch in a line: ``("pitch of t", "640 B")``."""
    return [
        (f"pitch of {term}", pitch.expression.text + (" B" if pitch.in_bytes else " elements"))
        for term, pitch in resolved.layout.pitch
    ]


def axis_rows(resolved: Resolved) -> list[tuple[str, str, str, str, str]]:
    """Every axis, slowest first: its name, what it is, its extent, where the next one lies, and what is between."""
    found = []
    for piece in reversed(resolved.planes[0].pieces(0)):
        if piece.table:
            step = f"{count_text(piece.table, 'allocation')} on"
            found.append((str(piece.term), meaning(piece), f"{piece.extent:,}", step, ""))
    for number, half in enumerate(halves(resolved)):
        for place, (piece, holds) in enumerate(zip(half.pieces, half.held, strict=True)):
            is_shared = place < half.shared
            if is_shared and number:
                continue
            name = f"{half.name}  {piece.term}" if half.name and not is_shared else str(piece.term)
            padded = piece.stride != holds and piece.extent > 1
            between = "between" if resolved.record and not is_shared else "padding"
            padding = f"{size_text(piece.stride - holds)} {between}" if padded else ""
            found.append((name, meaning(piece), f"{piece.extent:,}", f"{piece.stride:,} B on", padding))
    return found


def one_block(resolved: Resolved) -> str:
    """The runs of a block: ``160 runs of 32 KiB, each contiguous``."""
    text = re.sub(r"\b1 runs", "1 run", runs(resolved, (), "runs of"))
    return f"{text}, contiguous" if text.startswith("1 run ") else f"{text}, each contiguous"
