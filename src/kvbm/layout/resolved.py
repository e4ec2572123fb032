"""Layouts at a block shape and a number of blocks: strides of every term, arrays, and address maps."""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .._arguments import number, quoted
from ..errors import LayoutError
from .address_map import Access, Index, Step, declared
from .axes import AXES
from .loops import loops_of
from .overlap import meet, reach
from .region import Section
from .scales import group_of
from .shapes import ITEMSIZE, LIMIT, BlockShape
from .terms import Expression, Order, Pitch, Plane, Term

if TYPE_CHECKING:
    from .layout import Layout

#: Most kinds of allocations of a layout: tables say the kind of each entry in one byte.
_MOST_KINDS = 256

# ---- from terms to strides -----------------------------------------------------------------------------------------


def resolve(layout: Layout, shape: BlockShape, num_blocks: int) -> Resolved:
    """Implements `Layout.resolve`."""
    if type(num_blocks) is not int or num_blocks < 1:
        num_blocks = number(f"{layout.name}: num_blocks", num_blocks, 1, LIMIT, error=LayoutError)
    if num_blocks > LIMIT:
        raise LayoutError(f"{layout.name}: num_blocks: expected at most 2**62, got {quoted(num_blocks)}")
    sizes = {"b": num_blocks, **shape.sizes}
    names = {f"n{axis}": size for axis, size in sizes.items()} | {"hd": shape.hd, "es": shape.itemsize}
    for axis, expression in layout.extra:
        try:
            sizes[axis] = expression.evaluate(names, exact=True)
        except LayoutError as error:
            raise LayoutError(f"{expression.where or layout.where}: axis '{axis}': {error} (at {shape})") from None
    if shape.no > 2 and any(len(orders) == 2 for orders in (layout.orders, *(plane.orders for plane in layout.planes))):
        raise LayoutError(f"{layout.name}: K and V have orders of their own, so no must be 1 or 2, got {shape.no}")
    if layout.planes:
        return _resolve_planes(layout, shape, num_blocks, sizes, names)
    resolved = []
    for order in layout.orders[: shape.no]:
        try:
            resolved.append(_resolve_order(order, dict(layout.pitch), sizes, names, shape))
        except LayoutError as error:
            raise LayoutError(f"{_where(error) or order.where or layout.name}: {error} (at {shape})") from None
    if len(resolved) == 2 and not any(term.axes == ("o",) for term in layout.orders[0].table):
        _require_agreement_outside_o(layout, resolved)
    steps = [next((p.table, p.stride) for p in pieces if p.term.axes == ("b",)) for pieces in resolved]
    if len(set(steps)) > 1:
        raise LayoutError(
            f"{layout.orders[1].where or layout.name}: axis 'b': a block id steps {steps[0][1]} bytes in K and {steps[1][1]} in V, "
            "expected the same in both: give 'b' the same place in both orders"
        )
    return Resolved(layout, shape, num_blocks, MappingProxyType(sizes), tuple(resolved))


def legal(layout: Layout, shape: BlockShape, num_blocks: int) -> Resolved | None:
    """The layout at these sizes; None if it is not one-to-one there."""
    try:
        return layout.resolve(shape, num_blocks)
    except LayoutError:
        return None


class _PlacedError(LayoutError):
    """An error about an expression, which has a line of its own."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


def _where(error: LayoutError) -> str:
    """File and line of the expression that an error is about; empty if it is about none."""
    return error.where if isinstance(error, _PlacedError) else ""


def _evaluated(expression: Expression, names: Mapping[str, int], what: str, minimum: int = 1) -> int:
    """The value of an expression.  Its errors begin with `what`, and know its line."""
    try:
        return expression.evaluate(names, minimum=minimum)
    except LayoutError as error:
        raise _PlacedError(expression.where, f"{what}: {error}") from None


def _resolve_order(
    order: Order, pitch: Mapping[str, Pitch], sizes: Mapping[str, int], names: Mapping[str, int], shape: BlockShape
) -> tuple[Piece, ...]:
    itemsize, pack = shape.itemsize, shape.pack
    # Most orders name every axis of the shape once and split none: then there is nothing to check.
    if not order.whole or sizes.keys() != order.whole:
        _require_cover(order, sizes, itemsize, pack)
    pieces, _ = _inner_pieces(order.inner, pitch, sizes, names, itemsize, pack, itemsize)
    return tuple(_table_pieces(order.table, sizes, itemsize, pack) + pieces)


def _table_pieces(terms: Sequence[Term], sizes: Mapping[str, int], itemsize: int, pack: int) -> list[Piece]:
    """The axes that select allocations, fastest first."""
    pieces = []
    entries = 1
    for term in reversed(terms):
        divisor, extent = (1, len(term.axes)) if term.planes else term.cut(sizes, itemsize, pack)
        pieces.append(Piece(term, divisor, extent, stride=0, table=entries))
        entries *= extent
    return pieces


def _inner_pieces(
    terms: Sequence[Term], pitch: Mapping[str, Pitch], sizes: Mapping[str, int], names: Mapping[str, int],
    itemsize: int, pack: int, held: int,
) -> tuple[list[Piece], int]:  # fmt: skip
    """The axes inside an allocation, fastest first, and the bytes of all of them.  Each innermost item has `held` bytes."""
    pieces = []
    packed = pack
    for term in reversed(terms):
        divisor, extent = term.cut(sizes, itemsize, pack)
        packs = packed > 1 and extent > 1
        if packed > 1 and term.axes == ("b",):
            raise LayoutError(
                f"'b': {packed} elements share a byte, so blocks would share bytes: expected another axis to be fastest"
            )
        if packs:
            if extent % packed:
                raise LayoutError(f"'{term}': {packed} elements share a byte: expected a multiple of {packed}, got {extent}")
            if divisor > 1:
                raise LayoutError(
                    f"'{term}': {packed} elements share a byte, and those side by side here are {divisor} apart: expected "
                    "neighbours along an axis, such as a remainder, to be fastest"
                )
            divisor, extent, packed = divisor * packed, extent // packed, 1
        stride = held
        if pitch and (declared := pitch.get(str(term))):
            stride = count = _evaluated(declared.expression, names, f"pitch of '{term}'")
            if not declared.in_bytes:  # elements; where neighbours share a byte, it is the step of the bytes
                stride, rest = divmod(count * itemsize, 1 if packs else pack)
                if rest:
                    raise _PlacedError(
                        declared.expression.where,
                        f"pitch of '{term}': {pack} elements share a byte: expected a multiple of {pack} elements, got {count}",
                    )
            if stride < held:
                unit = "" if declared.in_bytes else f" ({count} elements; with B at the end a pitch counts bytes)"
                raise _PlacedError(
                    declared.expression.where,
                    f"pitch of '{term}': neighbours overlap: expected at least {held} bytes, got {stride}{unit}",
                )
        pieces.append(Piece(term, divisor, extent, stride=stride, table=0, packs=packs))
        held = stride * extent
    if packed > 1:
        raise LayoutError(f"{packed} elements share a byte; expected an axis of {packed} or more outside brackets")
    return pieces, held


def _require_cover(order: Order, sizes: Mapping[str, int], itemsize: int, pack: int) -> None:
    """Raise `LayoutError` unless every axis appears in one fused group, and the pieces of each group cover it exactly once."""
    groups: dict[tuple[str, ...], list[Term]] = {}
    for term in order.terms:
        if not term.planes:
            groups.setdefault(term.axes, []).append(term)
    home: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for axis in group:
            if axis not in sizes:
                raise LayoutError(f"axis '{axis}': the shape does not have it")
            if axis in home:
                raise LayoutError(f"axis '{axis}' appears in '{groups[home[axis]][0]}' and in '{groups[group][0]}'")
            home[axis] = group
    for axis, size in sizes.items():
        if axis not in home and (size > 1 or axis == "b"):
            raise LayoutError(
                f"axis '{axis}' ({AXES.get(axis, 'extra')}): expected once, as its size is {size}, got none: add it to the order"
            )
    for group, terms in groups.items():
        covered, total, others, below = 1, terms[0].extent(sizes), list[str](), 1
        unit = itemsize if all(step[2] for term in terms for step in term.steps) else 0
        for divisor, extent, text in sorted((*term.cut(sizes, itemsize, pack), str(term)) for term in terms):
            # A piece of extent one may have the same divisor as its neighbour: it takes no step.
            if extent > 1 and divisor != covered:
                # One below it is missing, or it begins inside the one below.
                wanted = _piece(group, (covered, divisor if divisor > covered else divisor * extent), total, unit, pack)
                got = "none: add it" if divisor > covered else f"'{text}'"
                if divisor > covered and others and not divisor % below:
                    # Probably the piece below has the wrong size; else one is missing between the two.
                    meant = _piece(group, (below, divisor), total, unit, pack)
                    wanted, got = meant, f"'{others.pop()}'; or add {wanted} between them"
                beside = text if divisor > covered else " ".join(others)
                raise LayoutError(
                    f"axis '{' '.join(group)}' of {total}: expected {wanted} beside '{beside}', got {got}"
                )
            below, covered = covered, covered * extent
            others.append(text)
        if covered != total:
            wanted = _piece(group, (covered, total), total, unit, pack)
            raise LayoutError(
                f"axis '{' '.join(group)}' of {total}: expected {wanted} beside '{' '.join(others)}', got none: add it"
            )


def _piece(group: Sequence[str], cut: tuple[int, int], total: int, unit: int, pack: int) -> str:
    """The quoted text of the piece of an axis between two cuts.  With `unit` (bytes per item), its sizes are in bytes."""
    low, high = cut
    if high <= low or high % low or total % high:
        return "other pieces that cover the axis once"

    def size(count: int) -> str:
        nbytes, rest = divmod(count * unit, pack)
        return f"{nbytes}B" if unit and not rest else str(count)

    head = group[0] if len(group) == 1 else f"({' '.join(group)})"
    return f"'{head}{f'/{size(low)}' if low > 1 else ''}{f'%{size(high // low)}' if high < total else ''}'"


def _require_agreement_outside_o(layout: Layout, orders: Sequence[tuple[Piece, ...]]) -> None:
    """If one allocation holds K and V, all axes slower than 'o' must be the same in both, so that V starts where K ends."""

    def outside(pieces: tuple[Piece, ...]) -> list[tuple[str, int, int, int, int]]:
        at = [piece.term.axes for piece in pieces].index(("o",))
        return [(str(p.term), p.divisor, p.extent, p.stride, p.table) for p in pieces[at:]] + [
            (str(p.term), p.divisor, p.extent, 0, p.table) for p in pieces if p.table
        ]

    if outside(orders[0]) != outside(orders[1]):
        raise LayoutError(
            f"{layout.name}: K and V share an allocation, so their orders must agree up to and including 'o'"
        )


# ---- planes --------------------------------------------------------------------------------------------------------


def _resolve_planes(
    layout: Layout, shape: BlockShape, num_blocks: int, sizes: Mapping[str, int], names: Mapping[str, int]
) -> Resolved:
    """Resolve each plane as a separate layout, and check that planes of a record do not overlap."""
    outer = layout.orders[0]
    is_separate = any(term.planes for term in outer.table)
    found: list[_Found] = []
    end = 0
    for plane in layout.planes:
        try:
            one = _find_plane(layout, plane, shape, sizes, names, 0 if is_separate else end)
        except LayoutError as error:
            raise LayoutError(
                f"{_where(error) or plane.orders[0].where or layout.name}: plane '{plane.name}': {error} (at {shape})"
            ) from None
        found.append(one)
        # A plane with a declared offset may lie in the gaps of another plane: it needs no room after its last byte.
        own = max(reach(_boxes(pieces), one.shape.itemsize) for pieces in one.orders) if plane.offset else one.held
        end = max(end, one.offset + own)
    try:
        if not is_separate:
            _require_disjoint(found)
        sizes_of = {one.plane.name: one.sizes for one in found}
        for scale, scaled in layout.scales.items():
            group_of(scaled, sizes_of[scaled], scale, sizes_of[scale])
        planes = [
            _place_plane(layout, index, one, names, one.held if is_separate else end) for index, one in enumerate(found)
        ]
    except LayoutError as error:
        raise LayoutError(f"{_where(error) or layout.where}: {error} (at {shape})") from None
    parts = tuple(
        Resolved(
            layout, one.shape, num_blocks, one.sizes, orders, ((one.offset, entry), (one.offset, entry)),
            plane=one.plane.name,
        )
        for one, (orders, entry) in zip(found, planes, strict=True)
    )  # fmt: skip
    resolved = Resolved(
        layout, shape, num_blocks, MappingProxyType(dict(sizes)), (), parts=parts, record=0 if is_separate else end
    )
    if is_separate and 2 * len(parts) > _MOST_KINDS and len(resolved.kinds) > _MOST_KINDS:
        raise LayoutError(
            f"{layout.where}: planes with arrays of their own: expected at most {_MOST_KINDS} kinds of arrays, got "
            f"{len(resolved.kinds)} of {len(parts)} planes; put <…> at the end of the order, "
            f"so that planes share arrays (at {shape})"
        )
    return resolved


class _Found(NamedTuple):
    """A plane inside its record."""

    plane: Plane
    shape: BlockShape
    sizes: Mapping[str, int]
    orders: list[list[Piece]]
    offset: int
    held: int


def _find_plane(
    layout: Layout, plane: Plane, shape: BlockShape, sizes: Mapping[str, int], names: Mapping[str, int], end: int
) -> _Found:
    outer = layout.orders[0]
    own = replace(shape, dtype=plane.dtype) if plane.dtype else shape
    names = {**names, "es": own.itemsize}
    here = {
        axis for order in plane.orders for term in (*outer.terms, *order.terms) if not term.planes for axis in term.axes
    }
    for axis in plane.shared:
        if axis in here:
            raise LayoutError(f"axis '{axis}' is shared by all elements, so it cannot stand in the order")
    # Each plane has its own elements; all planes share blocks, layers, heads and tokens.
    mine = {a: n for a, n in sizes.items() if a in here or (a in AXES and a != "d" and a not in plane.shared)}
    orders, held = [], []
    for order in plane.orders[: shape.no]:
        _require_cover(Order(outer.table, (*outer.inner, *order.inner)), mine, own.itemsize, own.pack)
        pieces, size = _inner_pieces(order.inner, dict(plane.pitch), mine, names, own.itemsize, own.pack, own.itemsize)
        orders.append(pieces)
        held.append(size)
    if len(set(held)) > 1:
        raise LayoutError(f"K holds {held[0]} bytes and V {held[1]}: expected the same, as both fill one record")
    offset = _evaluated(plane.offset, names, "offset", minimum=0) if plane.offset else end
    return _Found(plane, own, MappingProxyType(mine), orders, offset, held[0])


def _place_plane(
    layout: Layout, index: int, found: _Found, names: Mapping[str, int], record: int
) -> tuple[tuple[tuple[Piece, ...], ...], int]:
    """The plane's pieces, including those that all planes share, and its first table entry."""
    outer, shape = layout.orders[0], found.shape
    table = _table_pieces(outer.table, found.sizes, shape.itemsize, shape.pack)
    entry = sum(index * piece.table for piece in table if piece.term.planes)
    table = [piece for piece in table if not piece.term.planes]
    shared = [term for term in outer.inner if not term.planes]
    around, _ = _inner_pieces(shared, dict(layout.pitch), found.sizes, names, shape.itemsize, 1, record)
    return tuple(tuple(table + own + around) for own in found.orders), entry


def _require_disjoint(found: Sequence[_Found]) -> None:
    """Raise `LayoutError` if two planes of a record share a byte."""
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            for a, b in itertools.product(one.orders[:], other.orders[:]):
                if meet(_boxes(a), one.offset, one.shape.itemsize, _boxes(b), other.offset, other.shape.itemsize):
                    raise LayoutError(
                        f"planes '{one.plane.name}' (bytes {one.offset} to {one.offset + one.held} of a record) and "
                        f"'{other.plane.name}' ({other.offset} to {other.offset + other.held}) overlap: expected offsets "
                        "and pitches that keep them apart, or another shape"
                    )


def _boxes(pieces: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    """Extents and strides, slowest first, without extents of one."""
    return tuple((piece.extent, piece.stride) for piece in reversed(pieces) if piece.extent > 1)


# ---- what is resolved ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A declared term with sizes: ``(index // divisor) % extent`` steps `stride` bytes and `table` table entries.

    Pieces follow the declaration; they give shapes of arrays and pictures.  Addresses of elements come from `Access`.
    """

    term: Term
    divisor: int
    extent: int
    stride: int
    table: int
    packs: bool = False  # True if elements that share a byte are neighbours along this piece


@dataclass(frozen=True, slots=True)
class Allocation:
    """One array of a pool."""

    #: Its coordinates, e.g. ``"l=3 o=1"``; empty if there is only one array.
    label: str
    #: Terms, slowest first.  The last is ``"elements"`` if one array holds K and V in different orders, and ``"bytes"``
    #: if it holds several planes.
    axes: tuple[str, ...]
    #: Items along each axis; bytes between neighbours.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int  # extent in bytes, padding included
    dtype: str  # dtype of an item; ``"uint8"`` if planes share the array

    @property
    def itemsize(self) -> int:
        """Bytes per item."""
        return ITEMSIZE[self.dtype]

    @property
    def extent(self) -> int:
        """Bytes from the first item to the end of the last item."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    @property
    def is_record(self) -> bool:
        """True if several planes share the array.  Its elements then have several dtypes."""
        return self.axes[-1:] == ("bytes",)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Extents and strides (bytes), fastest first.  Axes that are contiguous with each other are merged."""
        return loops_of(self.shape, self.strides)


def _around(pieces: Sequence[Piece], held: int, dtype: str, *own: tuple[str, int, int]) -> Allocation:
    """The array of some pieces, slowest first, around `held` bytes, which may have an axis of their `own`."""
    items = [*((str(piece.term), piece.extent, piece.stride) for piece in pieces), *own]
    axes, shape, strides = tuple(one for one, _, _ in items), tuple(n for _, n, _ in items), tuple(n for *_, n in items)
    nbytes = pieces[0].stride * pieces[0].extent if pieces else held
    return Allocation("", axes, shape, strides, nbytes, dtype)


@dataclass(frozen=True)
class Resolved:
    """A layout at a shape and a number of blocks.

    Attributes
    ----------
    sizes : mapping of str to int
        Extent of every axis.
    orders : tuple of tuple of Piece
        The pieces of K (or of both) and of V, fastest first.  Empty if the layout has planes.
    bases : tuple of (int, int)
        Bytes and table entries at which K (or both) and V start.  Not zero for a range of layers, or for a plane.
    parts : tuple of Resolved
        If the layout has planes: one per plane, with the shape (and dtype) and sizes of the plane.
    record : int
        Bytes of a record of all planes, gaps included; 0 if each plane has its own arrays.
    plane : str
        Name of the plane; empty for a whole layout.
    """

    layout: Layout
    shape: BlockShape
    num_blocks: int
    sizes: Mapping[str, int]
    orders: tuple[tuple[Piece, ...], ...]
    bases: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))
    parts: tuple[Resolved, ...] = ()
    record: int = 0
    plane: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """A view of a mapping cannot be pickled; what is computed from the fields is not kept."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"sizes": dict(self.sizes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, sizes=MappingProxyType(state["sizes"]))

    @property
    def planes(self) -> tuple[Resolved, ...]:
        """The planes; without planes, the layout itself."""
        return self.parts or (self,)

    def pieces(self, o: int = 0) -> tuple[Piece, ...]:
        """Pieces of the order of K (`o` = 0) or V (`o` = 1), fastest first."""
        if type(o) is not int:
            o = int(o) if isinstance(o, bool) else number(f"{self.layout.name}: o", o, 0, 1, LayoutError)
        if o not in (0, 1):
            raise LayoutError(f"{self.layout.name}: o: expected 0 (K) or 1 (V), got {quoted(o)}")
        return self.orders[min(o, len(self.orders) - 1)]

    @cached_property
    def extents(self) -> dict[str, int]:
        """Extent of every axis except ``b``."""
        return {axis: size for axis, size in self.sizes.items() if axis != "b"}

    @cached_property
    def id_steps(self) -> tuple[int, int]:
        """Table entries and bytes from one block id to the next.  If planes have separate arrays: those of the first plane."""
        piece = next(piece for piece in self.planes[0].orders[0] if piece.term.axes == ("b",))
        return (piece.table, piece.stride)

    @cached_property
    def table_size(self) -> int:
        """Number of allocations."""
        picked = math.prod(piece.extent for piece in self.planes[0].orders[0] if piece.table)
        return picked * (len(self.parts) if self.has_separate_planes else 1)

    @property
    def has_separate_planes(self) -> bool:
        """True if each plane has its own arrays."""
        return bool(self.parts) and not self.record

    @property
    def block_bytes(self) -> int:
        """Bytes of the elements of a block, without padding."""
        return self.section.block_bytes

    @cached_property
    def kinds(self) -> tuple[Allocation, ...]:
        """The kinds of allocations, without labels: one; K's and V's; one per plane; or one record that all planes share."""
        if self.has_separate_planes:
            return tuple(kind for part in self.parts for kind in part.kinds)
        if self.parts:
            return (self._record,)
        made = []
        for pieces in self.orders:
            inner = [piece for piece in reversed(pieces) if not piece.table]
            made.append(_around(inner, self.shape.itemsize, self.shape.dtype))
        if len(made) == 2 and self._o_of_entry is None:
            # One allocation holds K and V in different orders: no shape describes that, so it is a row of elements.
            size, itemsize = made[0].nbytes, self.shape.itemsize
            return (Allocation("", ("elements",), (size // itemsize,), (itemsize,), size, self.shape.dtype),)
        return tuple(made)

    @property
    def _record(self) -> Allocation:
        """The array that planes share: the axes around a record, and its bytes."""
        around = sum(not term.planes for term in self.layout.orders[0].inner)
        outer = [piece for piece in reversed(self.parts[0].orders[0]) if not piece.table][:around]
        return _around(outer, self.record, "uint8", ("bytes", self.record, 1))

    @property
    def _o_of_entry(self) -> Piece | None:
        return next((piece for piece in self.orders[0] if piece.table and piece.term.axes == ("o",)), None)

    @property
    def first(self) -> Allocation:
        """The first allocation, without its label."""
        return self.kinds[0]

    @cached_property
    def kind_of_entry(self) -> array[int]:
        """For each table entry, its index in `kinds`: one byte each, as a table may have millions."""
        if self.has_separate_planes:
            return array("B", self._kinds_of_planes)
        o = self._o_of_entry if not self.parts else None
        if len(self.kinds) == 1 or o is None:
            return array("B", bytes(self.table_size))
        inside = math.prod(piece.extent for piece in self.orders[0] if 0 < piece.table < o.table)
        turn = b"".join(bytes([kind]) * inside for kind in range(o.extent))
        return array("B", turn * (self._entries // len(turn)))

    @property
    def _kinds_of_planes(self) -> bytes:
        """`kind_of_entry` if each plane has its own arrays: those of the planes, in turns of as many entries as one plane has."""
        entries = self.parts[0]._entries
        inside = self.parts[1].bases[0][1] - self.parts[0].bases[0][1] if len(self.parts) > 1 else entries
        before, own = 0, []
        for part in self.parts:
            own.append(bytes(before + kind for kind in part.kind_of_entry))
            before += len(part.kinds)
        return b"".join(kinds[at : at + inside] for at in range(0, entries, inside) for kinds in own)

    @property
    def _entries(self) -> int:
        """Number of table entries of this layout or plane."""
        return math.prod(piece.extent for piece in self.orders[0] if piece.table)

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every array of the pool, in table order."""
        return tuple(replace(self.kinds[kind], label=self.label(i)) for i, kind in enumerate(self.kind_of_entry))

    def label(self, entry: int) -> str:
        """The label of a table entry: ``l=3 o=1``, ``scale l=3``; empty if there is only one."""
        entry = number(f"{self.layout.name}: entry", entry, 0, self.table_size - 1, LayoutError)
        part, name = self.planes[0], []
        if self.has_separate_planes:
            step = self.parts[1].bases[0][1] - self.parts[0].bases[0][1] if len(self.parts) > 1 else self.table_size
            part = self.parts[entry // step % len(self.parts)]
            name = [part.plane]
        at = entry - part.bases[0][1]
        table = [piece for piece in reversed(part.orders[0]) if piece.table]
        return " ".join([*name, *(f"{p.term}={at // p.table % p.extent}" for p in table)])

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations, padding included."""
        if self.has_separate_planes:
            return sum(part.nbytes for part in self.parts)
        return self.table_size * sum(kind.nbytes for kind in self.kinds) // len(self.kinds)  # K and V: half of the entries each

    def address(self, block: Index, /, **coordinates: Index) -> tuple[Index, Index]:
        """The position of one element, or of many.

        A coordinate that is not given is 0: ``address(5)`` is the first element of block 5, and ``address(5, h=3)`` is element 0 of
        token 0 of head 3, of K of layer 0.

        Parameters
        ----------
        block : int or array of int
            Block id.
        **coordinates : int or array of int
            Coordinates of ``l o h t d`` and of extra axes.  Default: 0.  Arrays broadcast.  Inside an opaque group the declared
            order is used.

        Returns
        -------
        tuple
            Index of the allocation, and byte offset inside it.

        Raises
        ------
        LayoutError
            The layout has no such axis, or a coordinate is out of range.  The layout has several planes: call it on one of
            `planes`.

        Examples
        --------
        >>> from kvbm import load
        >>> resolved = load("vllm/LBHNC").resolve("llama-3.1-8b", 4)
        >>> resolved.address(1), resolved.address(1, h=3, d=1)
        ((0, 65536), (0, 90114))
        """
        name = self.layout.name
        if self.parts:
            raise LayoutError(f"{name}: expected one plane, got a layout with {len(self.parts)} planes: use one of `planes`")
        for axis, index in (("b", block), *coordinates.items()):
            size = self.sizes.get(axis)
            if size is None:
                raise LayoutError(f"{name}: axis '{axis}': expected one of {' '.join(self.sizes)}")
            try:
                low, high = (index.min(), index.max()) if hasattr(index, "min") else (operator.index(index),) * 2
                _ = low < 0, high >= size
            except Exception:  # an empty array, a list, or the object's own code
                raise LayoutError(
                    f"{name}: axis '{axis}': expected an int or a NumPy array of ints, got {quoted(index)}"
                ) from None
            if low < 0 or high >= size:
                raise LayoutError(f"{name}: axis '{axis}': expected 0 to {size - 1}, got {low if low < 0 else high}")
        if len(self.accesses) == 1:
            return self.accesses[0].address(block, coordinates)
        which = coordinates.get("o", 0)
        if hasattr(which, "min"):
            raise LayoutError(f"{name}: K and V have different orders: expected one value of o per call, got several")
        return self.accesses[which].address(block, coordinates)

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """The address maps: one, or two if K and V have different orders; with planes, those of each plane in turn."""
        if self.parts:
            return tuple(access for part in self.parts for access in part.accesses)
        made = []
        for o, order in enumerate(self.orders):
            steps, block = [], (0, 0)
            packed: tuple[str, ...] = ()
            for piece in order:
                term = piece.term
                if term.axes == ("b",):
                    block = (piece.stride, piece.table)
                    continue
                if piece.packs:
                    packed = term.axes
                steps.append(Step(term.axes, piece.divisor, piece.extent, piece.stride, piece.table, term.opaque))
            half = o if len(self.orders) == 2 else None
            unit = (self.shape.dtype, self.shape.itemsize, self.shape.pack)
            made.append(declared(self.plane, half, unit, self.sizes, self.bases[o], block, steps, packed))
        return tuple(made)

    @cached_property
    def section(self) -> Section:
        """The whole layout as a section, for a plan."""
        return Section(self.layout, self.shape, self.num_blocks, self.accesses, record=bool(self.record))
