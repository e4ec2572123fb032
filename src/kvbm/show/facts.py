"""Facts about a layout in words and numbers: sizes, addresses, padding, and contiguous runs.

Everything is computed from the pieces of a `Resolved` layout.  Allocations are never enumerated: a pool may have millions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import printable
from ..layout.axes import AXES
from ..layout.resolved import Piece, Resolved
from ..layout.scales import group_of, scale_text
from ..planner.plan import count_text


def exact_size(nbytes: int) -> str:
    """A number of bytes as text, exact: ``4 KiB``, ``1.5 GiB``, ``9,345 B``.

    Examples
    --------
    >>> exact_size(4096), exact_size(9345), exact_size(3 << 29)
    ('4 KiB', '9,345 B', '1.5 GiB')
    """
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes * 8 % scale == 0:
            return f"{nbytes / scale:,g} {unit}" if nbytes < 1_000_000 * scale else f"{nbytes // scale:,} {unit}"
    return f"{nbytes:,} B"


def meaning(piece: Piece) -> str:
    """The names of a piece's axes in prose."""
    names = [AXES.get(axis, "own axis") for axis in piece.term.axes]
    if piece.term.opaque:
        return "any order"
    if piece.divisor > 1 and not piece.term.steps:  # the elements share a byte
        return f"{piece.divisor} elements"
    return " and ".join(name.replace("element of the head", "element") for name in names)


def index_label(piece: Piece, index: int) -> str:
    """Label of one member of an axis: ``t3``, ``K``, ``d/16B=3``."""
    text = str(piece.term)
    if text == "o" and index < 2 and piece.extent <= 2:
        return "KV"[index]
    return f"{text}{index}" if len(text) == 1 else f"{text}={index}"


def picked(extent: int, first: int, most: int) -> list[int | None]:
    """Indices of the members to show: all if there are at most `most`, else the first ones, None for the gap, and the last."""
    return list(range(extent)) if extent <= most else [*range(first), None, extent - 1]


def address_lines(resolved: Resolved, o: int, width: int) -> list[str]:
    """The address formula with this layout's numbers, for K or V (`o`), in lines of at most `width` columns if possible."""

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


# ---- the table of allocations --------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One allocation: its indices along the axes of the table, slowest first, and its bytes."""

    plane: int | None  # None if planes do not have their own arrays
    o: int | None
    at: tuple[tuple[Piece, int], ...]
    nbytes: int

    def label(self, resolved: Resolved, least: int) -> str:
        """The label, such as ``l3 K``, of the axes with at least `least` members."""
        name = [resolved.parts[self.plane].plane] if self.plane is not None else []
        return " ".join([*name, *(index_label(piece, index) for piece, index in self.at if piece.extent >= least)])


def entry(resolved: Resolved, number: int) -> Entry:
    """The allocation at this index of the table."""
    for plane, part in enumerate(resolved.planes):
        first = part.bases[0][1]
        table = [piece for piece in reversed(part.pieces()) if piece.table]
        at = tuple((piece, (number - first) // piece.table % piece.extent) for piece in table)
        if not resolved.has_separate_planes or number == first + sum(piece.table * index for piece, index in at):
            o = next((index for piece, index in at if piece.term.axes == ("o",)), None)
            kinds = part.kinds if resolved.has_separate_planes else resolved.kinds
            return Entry(plane if resolved.has_separate_planes else None, o, at, kinds[min(o or 0, len(kinds) - 1)].nbytes)
    raise IndexError(f"expected an entry of {resolved.table_size}, got {number}")


# ---- what lies inside an allocation --------------------------------------------------------------------------------


class Level(NamedTuple):
    """A piece inside an allocation, and the bytes that one member holds: its stride without padding."""

    piece: Piece
    holds: int


@dataclass(frozen=True)
class Half:
    """The unit that is drawn once: all allocations if they are alike, K or V (`o`) if their orders differ, or a plane (`part`).

    Levels are slowest first: those around the record that planes share, and those inside it.  Without a record all are `own`.
    """

    part: Resolved
    o: int | None
    shared: tuple[Level, ...]
    own: tuple[Level, ...]

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.part.plane, "" if self.o is None else "KV"[self.o])))

    @property
    def nbytes(self) -> int:
        """Bytes of an allocation."""
        piece = (*self.shared, *self.own)[0].piece if self.shared or self.own else None
        return piece.stride * piece.extent if piece else self.part.shape.itemsize

    @property
    def held(self) -> int:
        """Bytes of the elements of its own levels."""
        return math.prod(piece.extent for piece, _ in self.own) * self.part.shape.itemsize

    @property
    def start(self) -> int:
        """Its first byte in an allocation, or in a record."""
        return self.part.bases[min(self.o or 0, len(self.part.bases) - 1)][0]

    @property
    def end(self) -> int:
        """The offset of its last element."""
        return self.start + sum((piece.extent - 1) * piece.stride for piece, _ in self.own)


def halves(resolved: Resolved) -> list[Half]:
    """The halves of every plane, or of the layout without planes: K and V if their orders differ, else one for both."""
    around = sum(not term.planes for term in resolved.layout.orders[0].inner) if resolved.record else 0
    found = []
    for part in resolved.planes:
        for o in range(len(part.orders)):
            inner = [piece for piece in reversed(part.pieces(o)) if not piece.table]
            held = [*(piece.stride * piece.extent for piece in inner[1:]), part.shape.itemsize][: len(inner)]
            if around:
                held[around - 1] = resolved.record
            levels = tuple(map(Level, inner, held))
            found.append(Half(part, o if len(part.orders) == 2 else None, levels[:around], levels[around:]))
    return found


def several(levels: Sequence[Level]) -> list[Level]:
    """The levels with more than one member."""
    return [level for level in levels if level.piece.extent > 1]


def runs(resolved: Resolved, fixed: Sequence[str], times: str = "×") -> str:
    """Contiguous runs of a block with the `fixed` axes held: ``160 × 4 KiB``; separately for K and V if they differ.

    A record is one run if its planes leave no gap and none of them has a fixed axis.  Otherwise each plane is counted separately.
    """
    every = halves(resolved)
    inside = {axis for half in every for piece, _ in several(half.own) for axis in piece.term.axes}
    if resolved.record == sum(half.held for half in every if not half.o) and not inside & set(fixed):
        around = [
            *(piece for piece, _ in every[0].shared),
            *(piece for piece in every[0].part.orders[0] if piece.table),
        ]
        return _runs([around], fixed, times, resolved.record)
    found = ((part.plane, _runs(part.orders, fixed, times, part.shape.itemsize)) for part in resolved.planes)
    return ", ".join(f"{plane} {text}".lstrip() for plane, text in found)


def _runs(orders: Sequence[Sequence[Piece]], fixed: Sequence[str], times: str, itemsize: int) -> str:
    """The runs for the pieces of K and of V, or for pieces that place both."""
    found: list[tuple[int, int]] = []
    held = set(fixed)
    outside: list[Piece] = []  # what K and V have in common, if one allocation holds both: the axes from ``o`` on
    for order in orders:
        pieces = [piece for piece in order if piece.extent > 1 and "b" not in piece.term.axes]
        if len(orders) == 2:
            at = next((at for at, piece in enumerate(pieces) if piece.term.axes == ("o",)), len(pieces))
            is_shared = at < len(pieces) and not pieces[at].table and "o" not in held
            table = [piece for piece in pieces if piece.table]
            outside = [*pieces[at:], *table] if is_shared else []
            pieces = pieces[len(table) : at] if is_shared else [piece for piece in pieces if piece.term.axes != ("o",)]
        if any(held & set(piece.term.axes) and set(piece.term.axes) - held for piece in [*pieces, *outside]):
            return "order not promised" if any(piece.term.opaque for piece in pieces) else "not whole pieces"
        found.append(_joined(pieces, held, 1, itemsize))
    if outside:
        whole = found[0] == found[1] and found[0][0] == 1  # all of K is one run, and all of V: they may continue each other
        shared = outside if whole else outside[1:]
        found = [_joined(shared, held, *one, is_whole=whole) for one in found]
        if whole:
            found = found[:1]
    elif len(found) == 2 and "o" in held and found[0] == found[1]:
        found = found[:1]
    if len(found) == 2 and found[0] == found[1]:
        found = [(2 * found[0][0], found[0][1])]
    names = "KV" if len(found) == 2 else ("",)
    return ", ".join(
        f"{name} {count:,} {times} {exact_size(run)}".lstrip() for name, (count, run) in zip(names, found, strict=True)
    )


def _joined(pieces: Sequence[Piece], held: Set[str], count: int, run: int, *, is_whole: bool = True) -> tuple[int, int]:
    """Number and bytes of the runs after these pieces.  Unless the runs are `is_whole`, pieces repeat and do not join them."""
    free = (piece for piece in pieces if not held & set(piece.term.axes))
    for piece in sorted(free, key=lambda piece: (piece.table > 0, piece.stride)):
        if is_whole and count == 1 and piece.stride == run and not piece.table:
            run *= piece.extent
        else:
            count *= piece.extent
    return count, run


def plane_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """One line per plane: ``("plane scale", "s, float32, 16 B of a record from byte 512 on")``."""
    lines = []
    first = (half for half in halves(resolved) if not half.o)
    for plane, half in zip(resolved.layout.planes, first, strict=False):
        order = " / ".join(filter(None, map(str, plane.orders))) or "one element"
        where = f" of {exact_size(resolved.record)} from byte {half.start:,} on"
        nbytes = exact_size(half.held) + where if resolved.record else f"{exact_size(half.part.block_bytes)} of a block"
        pitch = "".join(f", pitch of {term} {pitch}" for term, pitch in plane.pitch)
        shared = f", one for all {' '.join(plane.shared)}" if plane.shared else ""
        lines.append((f"plane {plane.name}", f"{order}, {half.part.shape.dtype}, {nbytes}{pitch}{shared}"))
    return lines


def scale_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """One line per plane of scales: ``("scales of data", "one float32 for each token and head (128 elements)")``."""
    planes = {access.plane: access for access in resolved.section.accesses}
    lines = []
    for scale, data in resolved.layout.scales.items():
        sizes, own = dict(planes[data].sizes), planes[scale]
        text = scale_text(own.dtype, sizes, group_of(data, sizes, scale, dict(own.sizes)))
        lines.append((f"scales of {data}", text))
    return lines


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


def facts(resolved: Resolved, shape_text: str | None = None) -> list[tuple[str, str]]:
    """Names and values: the declaration of a layout, and the sizes of its blocks and its pool."""
    layout, shape = resolved.layout, resolved.shape
    sizes = f"nl {shape.nl}, no {shape.no}, nh {shape.nh}, nt {shape.nt}, hd {shape.hd}, {shape.dtype}"
    found = [("title", printable(layout.title))] if layout.title else []
    names = ("order",) if len(layout.orders) == 1 else ("order of K", "order of V")
    found += [(name, str(order)) for name, order in zip(names, layout.orders, strict=True)]
    found += [*plane_lines(resolved), *scale_lines(resolved), *pitch_lines(resolved)]
    found += [(f"axis {axis}", f"{text} = {resolved.sizes[axis]:,}") for axis, text in layout.axes.items()]
    found.append(("fingerprint", layout.fingerprint))
    if layout.used_by:
        found.append(("used by", ", ".join(map(printable, layout.used_by))))
    found.append(("shape", f"{shape_text}: {sizes}" if shape_text and "=" not in shape_text else sizes))
    total, count = resolved.nbytes, resolved.table_size
    padding = total - resolved.num_blocks * resolved.block_bytes
    padded = f", and {padding * 100 / total:.1f} % of the pool is padding" if padding else ""
    found.append(("one block", f"{exact_size(resolved.block_bytes)}{padded}"))
    each = f" of {' or '.join(dict.fromkeys(exact_size(half.nbytes) for half in halves(resolved)))}" if count > 1 else ""
    pool = f"{count_text(count, 'allocation')}{each}, {exact_size(total)}"
    found.append(("pool", f"{count_text(resolved.num_blocks, 'block')} in {pool}"))
    return found


def pitch_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """One line per declared pitch: ``("pitch of t", "640 B")``."""
    return [
        (f"pitch of {term}", pitch.expression.text + (" B" if pitch.in_bytes else " elements"))
        for term, pitch in resolved.layout.pitch
    ]


def axis_rows(resolved: Resolved) -> list[tuple[str, str, str, str, str]]:
    """Every axis, slowest first: its name, its meaning, its extent, the distance to the next member, and the bytes between."""
    found = []
    for piece in reversed(resolved.planes[0].pieces(0)):
        if piece.table:
            step = count_text(piece.table, "allocation")
            found.append((str(piece.term), meaning(piece), f"{piece.extent:,}", step, ""))
    every = halves(resolved)
    gaps = [("", "padding", level) for level in every[0].shared]
    between = "between" if resolved.record else "padding"
    gaps += [(f"{half.name}  " if half.name else "", between, level) for half in every for level in half.own]
    for name, what, (piece, holds) in gaps:
        is_padded = piece.stride != holds and piece.extent > 1
        padding = f"{exact_size(piece.stride - holds)} {what}" if is_padded else ""
        found.append((f"{name}{piece.term}", meaning(piece), f"{piece.extent:,}", f"{piece.stride:,} B", padding))
    return found


def one_block(resolved: Resolved) -> str:
    """The runs of a block: ``160 runs of 32 KiB, each contiguous``."""
    text = re.sub(r"\b1 runs", "1 run", runs(resolved, (), "runs of"))
    return f"{text}, contiguous" if text.startswith("1 run ") else f"{text}, each contiguous"
