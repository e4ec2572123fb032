"""Layouts as functions from coordinates to addresses, and the algebra that the planner needs.

Three levels, each a frozen value:

* `Term` and `Order`: one line of the language, as declared, without sizes;
* `Layout`: a named order (or one for K and one for V) with its pitches and extra axes;
* `Resolved`: a layout at a block shape and a number of blocks: every term has become a `Piece` with strides.

A layout may hold several *planes*: quantised data, their scales, positions in another precision.  Each is a layout of its
own, with its own dtype and axes; together they fill a record, a page, or neighbouring tensors.

`refine` and `coalesce` are the two operations of the algebra; both are tested against every coordinate.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from .errors import LayoutError
from .shapes import ITEMSIZE, BlockShape

__all__ = [
    "Allocation",
    "Expression",
    "Layout",
    "Mode",
    "Order",
    "Piece",
    "Plane",
    "Resolved",
    "Term",
    "coalesce",
    "refine",
]

#: The axes of the language and what each is called in prose.
AXES: Mapping[str, str] = MappingProxyType(
    {"b": "block", "l": "layer", "o": "K or V", "h": "KV head", "t": "token", "d": "element of the head"}
)


# ---- expressions over sizes: pitches and extra axes ----------------------------------------------------------------


#: What an expression may name: sizes of the axes, and bytes an element.
SIZES = ("nb", "nl", "no", "nh", "nt", "hd", "es")
FUNCTIONS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"round_up": lambda x, to: -(-x // to) * to, "min": min, "max": max}
)
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)


@dataclass(frozen=True, slots=True)
class Expression:
    """Integer arithmetic over sizes, such as ``round_up(nt*584, 576)``.

    Parameters
    ----------
    text : str
        ``+ - * // %``, integers, ``round_up(x, to)``, ``min``, ``max`` and the names ``nb nl no nh nt hd es``.

    Raises
    ------
    LayoutError
        Anything else; `evaluate` where a name has no value or the result is below one.
    """

    text: str

    def __post_init__(self) -> None:
        self.evaluate(dict.fromkeys(SIZES, 720720), minimum=None)

    def evaluate(self, sizes: Mapping[str, int], *, minimum: int | None = 1, exact: bool = False) -> int:
        """Value for these sizes, at least `minimum`; `exact`: ``//`` must leave no rest, as a group of scales must divide."""

        def walk(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int() as value) if not isinstance(value, bool):
                    return value
                case ast.Name(id=name) if name in sizes:
                    return sizes[name]
                case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                    a, b = walk(left), walk(right)
                    if exact and isinstance(op, ast.FloorDiv) and a % b:
                        raise LayoutError(f"expression {self.text!r}: {b} does not divide {a}")
                    return OPERATORS[type(op)](a, b)
                case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                    return FUNCTIONS[name](*map(walk, args))
            raise LayoutError(
                f"expression {self.text!r}: expected integers, {', '.join(sizes)}, + - * // %, round_up(x, to), min, max; "
                f"got {ast.unparse(node)!r}"
            )

        try:
            value = walk(ast.parse(self.text, mode="eval").body)
        except (SyntaxError, TypeError, ZeroDivisionError, RecursionError) as error:
            raise LayoutError(f"expression {self.text!r}: {error}") from None
        if minimum is not None and value < minimum:
            raise LayoutError(f"expression {self.text!r}: expected at least {minimum}, got {value}")
        return value


# ---- what is declared ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """One factor of an order: axes fused row-major, then quotients and remainders read left to right.

    Parameters
    ----------
    axes : tuple of str
        Letters; more than one are fused, the first slowest.
    steps : tuple of (str, int, bool)
        ``("/" or "%", size, size is in bytes)``.
    opaque : bool
        The axes are contiguous and their order is not promised.
    planes : bool
        The names are planes, one after the other.
    """

    axes: tuple[str, ...]
    steps: tuple[tuple[str, int, bool], ...] = ()
    opaque: bool = False
    planes: bool = False

    def __str__(self) -> str:
        if self.planes:
            return "<" + " ".join(self.axes) + ">"
        if self.opaque:
            return "{" + " ".join(self.axes) + "}"
        head = self.axes[0] if len(self.axes) == 1 else "(" + " ".join(self.axes) + ")"
        return head + "".join(f"{op}{size}{'B' if in_bytes else ''}" for op, size, in_bytes in self.steps)

    def extent(self, sizes: Mapping[str, int]) -> int:
        """Size of the fused axes before any split."""
        return sizes[self.axes[0]] if len(self.axes) == 1 else math.prod(sizes[axis] for axis in self.axes)

    def cut(self, sizes: Mapping[str, int], itemsize: int, pack: int = 1) -> tuple[int, int]:
        """The term as ``(index // divisor) % extent``, in elements: `pack` of them are `itemsize` bytes.

        Raises
        ------
        LayoutError
            A split that does not divide what it splits.
        """
        divisor, extent = 1, self.extent(sizes)
        for op, size, in_bytes in self.steps:
            count, rest = divmod(size * pack, itemsize) if in_bytes else (size, 0)
            if rest or count < 1:
                raise LayoutError(f"'{self}': {size} bytes are not a whole number of {itemsize}-byte elements")
            if extent % count:
                what = f"{size} B = {count} elements" if in_bytes else str(count)
                raise LayoutError(f"'{self}': the split {what} does not divide {extent}")
            if op == "/":
                divisor, extent = divisor * count, extent // count
            else:
                extent = count
        return divisor, extent


@dataclass(frozen=True)
class Order:
    """One line of the language: axes in brackets pick an allocation, the others lie inside it, slowest first."""

    table: tuple[Term, ...]
    inner: tuple[Term, ...]
    where: str = field(default="", compare=False)

    def __str__(self) -> str:
        brackets = ["[" + " ".join(map(str, self.table)) + "]"] if self.table else []
        return " ".join([*brackets, *map(str, self.inner)])

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return self.table + self.inner

    @cached_property
    def whole(self) -> frozenset[str]:
        """The axes, if none of them is split and none is there twice; else nothing."""
        axes = [axis for term in self.terms for axis in term.axes]
        once = len(set(axes)) == len(axes) and not any(term.steps for term in self.terms)
        return frozenset(axes) if once else frozenset()


@dataclass(frozen=True, slots=True)
class Pitch:
    """Distance between neighbours along a term, in bytes or in elements."""

    expression: Expression
    in_bytes: bool

    def __str__(self) -> str:
        return self.expression.text.replace(" ", "") + ("B" if self.in_bytes else "")


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of elements of a block, where it holds several: quantised data, scales, positions.

    Parameters
    ----------
    name : str
        What the layouts of a conversion must agree on.
    orders : tuple of Order
        Its own terms, inside what all planes share: one order, or one for K and one for V.
    dtype : str, optional
        The shape's where it is not given.
    offset : Expression, optional
        Bytes from the start of the record (what the planes share) to the plane; behind the plane before if not given.
    pitch : tuple of (str, Pitch)
        As for `Layout`, of its own terms; sorted.
    shared : tuple of str
        Axes of the shape along which it has one value for all: a scale for all tokens of a block.
    """

    name: str
    orders: tuple[Order, ...]
    dtype: str | None = None
    offset: Expression | None = None
    pitch: tuple[tuple[str, Pitch], ...] = ()
    shared: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = " / ".join(map(str, self.orders))
        at = f"at {self.offset.text} B" if self.offset else ""
        return " ".join(filter(None, (f"{self.name}:", text, self.dtype, at)))

    @property
    def meaning(self) -> str:
        """All of it in a line; equal where two planes mean the same."""
        pitch = " ".join(f"{term}={p}" for term, p in self.pitch)
        shared = " ".join(self.shared)
        return f"{self} pitch {pitch} shared {shared}"


@dataclass(frozen=True)
class Layout:
    """Where every element of a KV block lies.  Two layouts are equal when they mean the same, whatever they are called.

    Parameters
    ----------
    orders : tuple of Order
        One, or one for K and one for V.
    pitch : tuple of (str, Pitch)
        Term text → distance between neighbours; sorted.
    extra : tuple of (str, Expression)
        Axes beyond `AXES` and their sizes; sorted.
    planes : tuple of Plane
        Where a block holds several kinds of elements; then there is one order, of what they share, with a term for them.
    name, title, file, used_by, read_from
        For people; they do not change what the layout means.
    """

    orders: tuple[Order, ...]
    pitch: tuple[tuple[str, Pitch], ...] = ()
    extra: tuple[tuple[str, Expression], ...] = ()
    planes: tuple[Plane, ...] = ()
    name: str = field(default="", compare=False)
    title: str = field(default="", compare=False)
    file: str = field(default="", compare=False)
    used_by: tuple[str, ...] = field(default=(), compare=False)
    read_from: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.order_text}"

    @property
    def order_text(self) -> str:
        """The declared order, e.g. ``[b l o] t h d``, or ``k: … v: …``, or ``[l] b t <data scale>`` and its planes."""
        if self.planes:
            return f"{self.orders[0]}, {', '.join(map(str, self.planes))}"
        if len(self.orders) == 1:
            return str(self.orders[0])
        return f"k: {self.orders[0]} v: {self.orders[1]}"

    @property
    def axes(self) -> dict[str, str]:
        """Extra axes and the expressions of their sizes."""
        return {axis: expression.text for axis, expression in self.extra}

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits over the meaning: what stored blocks carry."""
        meaning = [str(order) for order in self.orders]
        meaning += [
            f"pitch {term} {p.expression.text.replace(' ', '')} {'B' if p.in_bytes else ''}" for term, p in self.pitch
        ]
        meaning += [f"axis {axis} {expression.text.replace(' ', '')}" for axis, expression in self.extra]
        meaning += [f"plane {plane.meaning}" for plane in self.planes]
        return hashlib.blake2b("\n".join(meaning).encode(), digest_size=8).hexdigest()

    def __hash__(self) -> int:  # plans are looked up by their layouts, and a text remembers its hash
        return hash(self.fingerprint)

    @cached_property
    def present(self) -> frozenset[str]:
        """Axes that the shape may have more than one of: those of its orders, of its planes, and those that these share."""
        orders = [*self.orders, *(order for plane in self.planes for order in plane.orders)]
        found = {axis for order in orders for term in order.terms if not term.planes for axis in term.axes}
        own = {"d"}.union(*(plane.shared for plane in self.planes)) if self.planes else set()
        return frozenset(found | own)

    @property
    def where(self) -> str:
        """File and line of the order, or the name."""
        return self.orders[0].where or self.name

    @property
    def b_in_table(self) -> bool:
        """Whether each block has allocations of its own."""
        return any("b" in term.axes and not term.planes for term in self.orders[0].table)

    def resolve(self, shape: BlockShape, num_blocks: int) -> Resolved:
        """The layout at these sizes.

        Raises
        ------
        LayoutError
            It is not a one-to-one map there: a split that does not divide or cover, an axis that is missing or
            repeated, a pitch smaller than what it holds.
        """
        if num_blocks < 1:
            raise LayoutError(f"{self.name}: expected at least one block, got {num_blocks}")
        sizes = {"b": num_blocks, **shape.sizes}
        names = {f"n{axis}": size for axis, size in sizes.items()} | {"hd": shape.hd, "es": shape.itemsize}
        for axis, expression in self.extra:
            try:
                sizes[axis] = expression.evaluate(names, exact=True)
            except LayoutError as error:
                raise LayoutError(f"{self.where}: axis '{axis}': {error} (at {shape})") from None
        if self.planes:
            return _resolve_planes(self, shape, num_blocks, sizes, names)
        if len(self.orders) == 2 and shape.no > 2:
            raise LayoutError(f"{self.name}: K and V have orders of their own, so no must be 1 or 2, got {shape.no}")
        resolved = []
        for order in self.orders[: shape.no]:
            try:
                resolved.append(_resolve_order(order, dict(self.pitch), sizes, names, shape))
            except LayoutError as error:
                raise LayoutError(f"{order.where or self.name}: {error} (at {shape})") from None
        if len(resolved) == 2 and not any(term.axes == ("o",) for term in self.orders[0].table):
            _require_agreement_outside_o(self, resolved)
        steps = [next((p.table, p.stride) for p in pieces if p.term.axes == ("b",)) for pieces in resolved]
        if len(set(steps)) > 1:
            raise LayoutError(
                f"{self.orders[1].where or self.name}: axis 'b': a block id steps {steps[0][1]} bytes in K and {steps[1][1]} in V, "
                "expected the same in both: give 'b' the same place in both orders"
            )
        return Resolved(self, shape, num_blocks, MappingProxyType(sizes), tuple(resolved))


def _resolve_order(
    order: Order, pitch: Mapping[str, Pitch], sizes: Mapping[str, int], names: Mapping[str, int], shape: BlockShape
) -> tuple[Piece, ...]:
    itemsize, pack = shape.itemsize, shape.pack
    # Most orders name every axis of the shape once and split none: then there is nothing to look for.
    if not order.whole or sizes.keys() != order.whole:
        _require_cover(order, sizes, itemsize, pack)
    pieces, _ = _inner_pieces(order.inner, pitch, sizes, names, itemsize, pack, itemsize)
    return tuple(_table_pieces(order.table, sizes, itemsize, pack) + pieces)


def _table_pieces(terms: Sequence[Term], sizes: Mapping[str, int], itemsize: int, pack: int) -> list[Piece]:
    """The axes that pick allocations, fastest first."""
    pieces = []
    entries = 1
    for term in reversed(terms):
        divisor, extent = (1, len(term.axes)) if term.planes else term.cut(sizes, itemsize, pack)
        pieces.append(Piece(term, divisor, extent, stride=0, table=entries))
        entries *= extent
    return pieces


def _inner_pieces(
    terms: Sequence[Term],
    pitch: Mapping[str, Pitch],
    sizes: Mapping[str, int],
    names: Mapping[str, int],
    itemsize: int,
    pack: int,
    held: int,
) -> tuple[list[Piece], int]:
    """The axes inside an allocation, fastest first, around `held` bytes; and the bytes that they hold together."""
    pieces = []
    packed = pack
    for term in reversed(terms):
        divisor, extent = term.cut(sizes, itemsize, pack)
        if packed > 1 and extent > 1:
            if extent % packed:
                raise LayoutError(f"'{term}': {packed} elements share a byte, and {extent} are no multiple of that")
            if divisor > 1:
                raise LayoutError(
                    f"'{term}': {packed} elements share a byte, and those side by side here are {divisor} apart: expected "
                    "neighbours along an axis, such as a remainder, to be fastest"
                )
            divisor, extent, packed = divisor * packed, extent // packed, 1
        stride = held
        if pitch and (declared := pitch.get(str(term))):
            stride = declared.expression.evaluate(names) * (1 if declared.in_bytes else itemsize)
            if stride < held:
                raise LayoutError(
                    f"pitch of '{term}': neighbours overlap: expected at least {held} bytes, got {stride}"
                )
        pieces.append(Piece(term, divisor, extent, stride=stride, table=0))
        held = stride * extent
    if packed > 1:
        raise LayoutError(f"{packed} elements share a byte; expected an axis of {packed} or more outside brackets")
    return pieces, held


def _require_cover(order: Order, sizes: Mapping[str, int], itemsize: int, pack: int) -> None:
    """Every axis appears, in one fused group, and the pieces of each group cover it exactly once."""
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
                f"axis '{axis}' ({AXES.get(axis, 'extra')}): expected once, as its size is {size}, got none"
            )
    for group, terms in groups.items():
        expected, total = 1, terms[0].extent(sizes)
        for divisor, extent, text in sorted((*term.cut(sizes, itemsize, pack), str(term)) for term in terms):
            # A piece of extent one may share its divisor with its neighbour: it holds nothing.
            if extent > 1 and divisor != expected:
                raise LayoutError(
                    f"axis '{' '.join(group)}' of {total}: its pieces do not cover it once: "
                    f"'{text}' starts at {divisor}, expected {expected}"
                )
            expected *= extent
        if expected != total:
            raise LayoutError(f"axis '{' '.join(group)}': its pieces cover {expected} of {total}")


def _require_agreement_outside_o(layout: Layout, orders: Sequence[tuple[Piece, ...]]) -> None:
    """With K and V in one allocation, V must start where K ends: everything slower than 'o' is the same in both."""

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
    """Every plane as a layout of its own, and the records that they fill together checked."""
    outer = layout.orders[0]
    apart = any(term.planes for term in outer.table)
    found: list[_Found] = []
    end = 0
    for plane in layout.planes:
        try:
            one = _find_plane(layout, plane, shape, sizes, names, 0 if apart else end)
        except LayoutError as error:
            raise LayoutError(
                f"{plane.orders[0].where or layout.name}: plane '{plane.name}': {error} (at {shape})"
            ) from None
        found.append(one)
        # What is placed by hand may lie in the gaps of another plane, where nothing needs room behind its last byte.
        own = max(_reach(_boxes(pieces), one.shape.itemsize) for pieces in one.orders) if plane.offset else one.held
        end = max(end, one.offset + own)
    try:
        if not apart:
            _require_apart(found)
        planes = [
            _place_plane(layout, index, one, names, one.held if apart else end) for index, one in enumerate(found)
        ]
    except LayoutError as error:
        raise LayoutError(f"{layout.where}: {error} (at {shape})") from None
    parts = tuple(
        Resolved(
            layout,
            one.shape,
            num_blocks,
            one.sizes,
            orders,
            ((one.offset, entry), (one.offset, entry)),
            plane=one.plane.name,
        )
        for one, (orders, entry) in zip(found, planes, strict=True)
    )
    return Resolved(
        layout, shape, num_blocks, MappingProxyType(dict(sizes)), (), parts=parts, record=0 if apart else end
    )


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
    # The elements of a plane are its own; blocks, layers, heads and tokens are everybody's.
    mine = {a: n for a, n in sizes.items() if a in here or (a in AXES and a != "d" and a not in plane.shared)}
    orders, held = [], []
    for order in plane.orders[: shape.no]:
        _require_cover(Order(outer.table, (*outer.inner, *order.inner)), mine, own.itemsize, own.pack)
        pieces, size = _inner_pieces(order.inner, dict(plane.pitch), mine, names, own.itemsize, own.pack, own.itemsize)
        orders.append(pieces)
        held.append(size)
    if len(set(held)) > 1:
        raise LayoutError(f"K holds {held[0]} bytes and V {held[1]}: expected the same, as both fill one record")
    offset = plane.offset.evaluate(names, minimum=0) if plane.offset else end
    return _Found(plane, own, MappingProxyType(mine), orders, offset, held[0])


def _place_plane(
    layout: Layout, index: int, found: _Found, names: Mapping[str, int], record: int
) -> tuple[tuple[tuple[Piece, ...], ...], int]:
    """Its pieces, those that all planes share included, and its first entry of the table."""
    outer, shape = layout.orders[0], found.shape
    table = _table_pieces(outer.table, found.sizes, shape.itemsize, shape.pack)
    entry = sum(index * piece.table for piece in table if piece.term.planes)
    table = [piece for piece in table if not piece.term.planes]
    shared = [term for term in outer.inner if not term.planes]
    around, _ = _inner_pieces(shared, dict(layout.pitch), found.sizes, names, shape.itemsize, 1, record)
    return tuple(tuple(table + own + around) for own in found.orders), entry


def _require_apart(found: Sequence[_Found]) -> None:
    """No two planes of a record share a byte."""
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            for a, b in itertools.product(one.orders[:], other.orders[:]):
                if meet(_boxes(a), one.offset, one.shape.itemsize, _boxes(b), other.offset, other.shape.itemsize):
                    raise LayoutError(
                        f"planes '{one.plane.name}' (bytes {one.offset} to {one.offset + one.held} of a record) and "
                        f"'{other.plane.name}' ({other.offset} to {other.offset + other.held}) overlap"
                    )


def _boxes(pieces: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    """Extents and strides, slowest first, without steps that stay."""
    return tuple((piece.extent, piece.stride) for piece in reversed(pieces) if piece.extent > 1)


def meet(
    a: Sequence[tuple[int, int]], a_start: int, a_size: int, b: Sequence[tuple[int, int]], b_start: int, b_size: int
) -> bool:
    """Whether two nests of steps (extents and strides, slowest first) share a byte: exact, and quick where both step alike."""
    if a_start >= b_start + _reach(b, b_size) or b_start >= a_start + _reach(a, a_size):
        return False
    if not a and not b:
        return True
    if b and (not a or _reach(b, b_size) > _reach(a, a_size)):
        a, a_start, a_size, b, b_start, b_size = b, b_start, b_size, a, a_start, a_size
    (extent, stride), *inner = a
    # Where both go on in step, what matters is how many turns one is ahead of the other.
    rest, behind = (b[1:], extent - 1) if b and a[0] == b[0] else (b, 0)
    first = max(-behind, (b_start - a_start - _reach(inner, a_size)) // stride)
    last = min(extent - 1, (b_start + _reach(rest, b_size) - a_start) // stride)
    return any(meet(inner, a_start + turn * stride, a_size, rest, b_start, b_size) for turn in range(first, last + 1))


def _reach(steps: Sequence[tuple[int, int]], size: int) -> int:
    """Bytes from the first to behind the last."""
    return size + sum((extent - 1) * stride for extent, stride in steps)


# ---- what is resolved ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A term with sizes: ``(index // divisor) % extent`` steps `stride` bytes and `table` table entries."""

    term: Term
    divisor: int
    extent: int
    stride: int
    table: int


class Half(NamedTuple):
    """The part of a block that one copy moves: all of it, or K or V where the two have orders of their own.

    Attributes
    ----------
    start : tuple of int
        Bytes and table entries at which it starts.
    has_o : bool
        Whether the axis ``o`` stands alone, so that a half is at one place.
    pieces : list of Piece
        What steps through it, fastest first; neither ``b`` nor, for a half, ``o``.
    by_axis : dict
        The same by axis or fused group, sorted by name.
    plain : bool
        Whether every piece belongs to one axis: nothing fused, nothing opaque.
    """

    start: tuple[int, int]
    has_o: bool
    pieces: list[Piece]
    by_axis: dict[tuple[str, ...], list[Piece]]
    plain: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """One array of a pool.

    Attributes
    ----------
    label : str
        Which one, e.g. ``"l=3 o=1"``; empty where there is only one.
    axes : tuple of str
        Terms, slowest first; at the end ``"elements"`` where K and V lie in one array in different orders, and ``"bytes"``
        where planes do.
    shape, strides : tuple of int
        Items along each axis; bytes between neighbours.
    nbytes : int
        Extent in bytes, padding included.
    dtype : str
        Of an item; ``"uint8"`` where planes share the array.
    """

    label: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes an item."""
        return ITEMSIZE[self.dtype]

    @property
    def extent(self) -> int:
        """Bytes from the first to behind the last item."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    @property
    def is_record(self) -> bool:
        """Whether several planes share it, so that its elements are of no one dtype."""
        return self.axes[-1:] == ("bytes",)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Extents and strides, fastest first, with axes that continue each other as one: what the shape of bytes does not say."""
        return merge_steps(self.shape, self.strides)


@dataclass(frozen=True)
class Resolved:
    """A layout at a shape and a number of blocks.

    Attributes
    ----------
    sizes : mapping of str to int
        Extent of every axis.
    orders : tuple of tuple of Piece
        The pieces of K (or of both) and of V, fastest first; none where there are planes.
    bases : tuple of (int, int)
        Bytes and table entries at which K (or both) and V start: not zero for a range of layers, or a plane.
    parts : tuple of Resolved
        One a plane, each with its own shape (of its dtype) and sizes, where the layout has planes.
    record : int
        Bytes that planes fill together, gaps between them included; 0 where each has arrays of its own.
    plane : str
        Of which plane this is; empty for a whole layout.
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

    @property
    def planes(self) -> tuple[Resolved, ...]:
        """One a kind of elements: its planes, or itself."""
        return self.parts or (self,)

    def pieces(self, o: int = 0) -> tuple[Piece, ...]:
        """Pieces of the order that `o` (0 = K, 1 = V) follows, fastest first."""
        return self.orders[min(o, len(self.orders) - 1)]

    @cached_property
    def extents(self) -> dict[str, int]:
        """Extent of every axis of a block: all but ``b``."""
        return {axis: size for axis, size in self.sizes.items() if axis != "b"}

    def half(self, o: int | None) -> Half:
        """What of a block `o` (0 = K, 1 = V, None = both) is; worked out once."""
        found = self._halves.get(o)
        if found is None:
            found = self._halves[o] = self._half(o)
        return found

    @cached_property
    def _halves(self) -> dict[int | None, Half]:
        return {}

    def _half(self, o: int | None) -> Half:
        pieces = self.pieces(o or 0)
        offset, entry = self.bases[min(o or 0, len(self.orders) - 1)]
        lone = [piece for piece in pieces if piece.term.axes == ("o",)] if o is not None else []
        for piece in lone:  # more than one where it is split
            turn = (o or 0) // piece.divisor % piece.extent
            offset, entry = offset + turn * piece.stride, entry + turn * piece.table
        skip = (("b",),) if o is None else (("b",), ("o",))
        kept = [piece for piece in pieces if piece.term.axes not in skip]
        by_axis: dict[tuple[str, ...], list[Piece]] = {}
        for piece in sorted(kept, key=lambda piece: piece.term.axes):
            by_axis.setdefault(piece.term.axes, []).append(piece)
        return Half((offset, entry), bool(lone), kept, by_axis, all(len(axes) == 1 for axes in by_axis))

    @cached_property
    def id_steps(self) -> tuple[int, int]:
        """Table entries and bytes that a block id steps; of the first plane where these lie in arrays of their own."""
        piece = next(piece for piece in self.planes[0].orders[0] if piece.term.axes == ("b",))
        return (piece.table, piece.stride)

    @property
    def table_size(self) -> int:
        """Number of allocations."""
        picked = math.prod(piece.extent for piece in self.planes[0].orders[0] if piece.table)
        return picked * (len(self.parts) if self.apart else 1)

    @property
    def apart(self) -> bool:
        """Whether each plane has arrays of its own."""
        return bool(self.parts) and not self.record

    @property
    def block_bytes(self) -> int:
        """Bytes that the elements of a block hold, padding not counted."""
        return sum(math.prod(part.extents.values()) // part.shape.pack * part.shape.itemsize for part in self.planes)

    @cached_property
    def kinds(self) -> tuple[Allocation, ...]:
        """Each kind of allocation, without label: one; K's and V's; one a plane, or what all planes share."""
        if self.apart:
            return tuple(kind for part in self.parts for kind in part.kinds)
        if self.parts:
            return (self._record,)
        made = []
        for pieces in self.orders:
            inner = [piece for piece in reversed(pieces) if not piece.table]
            nbytes = inner[0].stride * inner[0].extent if inner else self.shape.itemsize
            axes, shape, strides = (
                tuple(str(piece.term) for piece in inner),
                tuple(piece.extent for piece in inner),
                tuple(piece.stride for piece in inner),
            )
            made.append(Allocation("", axes, shape, strides, nbytes, self.shape.dtype))
        if len(made) == 2 and self._o_of_entry is None:
            # K and V lie in one allocation in different orders: no shape says that, so it is a row of elements.
            size, itemsize = made[0].nbytes, self.shape.itemsize
            return (Allocation("", ("elements",), (size // itemsize,), (itemsize,), size, self.shape.dtype),)
        return tuple(made)

    @property
    def _record(self) -> Allocation:
        """What planes share: the axes around a record, and its bytes."""
        around = sum(not term.planes for term in self.layout.orders[0].inner)
        outer = [piece for piece in reversed(self.parts[0].orders[0]) if not piece.table][:around]
        held = self.record
        nbytes = outer[0].stride * outer[0].extent if outer else held
        return Allocation(
            "",
            (*(str(piece.term) for piece in outer), "bytes"),
            (*(piece.extent for piece in outer), held),
            (*(piece.stride for piece in outer), 1),
            nbytes,
            "uint8",
        )

    @property
    def _o_of_entry(self) -> Piece | None:
        return next((piece for piece in self.orders[0] if piece.table and piece.term.axes == ("o",)), None)

    @property
    def first(self) -> Allocation:
        """The first allocation, without its label."""
        return self.kinds[0]

    @cached_property
    def kind_of_entry(self) -> Sequence[int]:
        """Which of `kinds` each table entry is."""
        if self.parts:
            kinds, before = [0] * self.table_size, 0
            for part in self.parts if self.apart else ():
                for entry, kind in enumerate(part.kind_of_entry):
                    kinds[self._entry_of_plane(part, entry)] = before + kind
                before += len(part.kinds)
            return kinds
        o = self._o_of_entry
        if len(self.kinds) == 1 or o is None:
            return [0] * self.table_size
        return [entry // o.table % o.extent for entry in range(self._entries)]

    @property
    def _entries(self) -> int:
        """Table entries that this layout, or plane of one, has for itself."""
        return math.prod(piece.extent for piece in self.orders[0] if piece.table)

    def _entry_of_plane(self, part: Resolved, index: int) -> int:
        """Entry of the whole table for entry `index` of those that a plane has for itself."""
        entry = part.bases[0][1]
        for piece in part.orders[0]:
            if piece.table:
                entry += index % piece.extent * piece.table
                index //= piece.extent
        return entry

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every array of the pool, in table order."""
        made: list[Allocation] = []
        labels = self._labels
        for label, kind in zip(labels, self.kind_of_entry, strict=True):
            made.append(replace(self.kinds[kind], label=label))
        return tuple(made)

    @property
    def _labels(self) -> list[str]:
        """What each table entry is called: ``l=3 o=1``, ``scale l=3``."""
        labels = [""] * self.table_size
        for part in self.planes if self.apart else self.planes[:1]:
            table = [piece for piece in reversed(part.orders[0]) if piece.table]
            for index in range(part._entries):
                entry = self._entry_of_plane(part, index)
                name = [part.plane] if self.apart else []
                at = entry - part.bases[0][1]
                labels[entry] = " ".join([*name, *(f"{p.term}={at // p.table % p.extent}" for p in table)])
        return labels

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations, padding included."""
        return sum(self.kinds[kind].nbytes for kind in self.kind_of_entry)

    def address(self, block: int, /, **coords: int) -> tuple[int, int]:
        """Where one element lies.

        Parameters
        ----------
        block : int
            Block id.
        **coords : int
            ``l o h t d`` and extra axes; 0 where not given.  Inside an opaque group the declared order is assumed.

        Returns
        -------
        tuple of int
            Index of the allocation, byte offset inside it.
        """
        if self.parts:
            raise LayoutError(f"{self.layout.name}: expected a plane, as it has {len(self.parts)}: ask one of `planes`")
        at = {"b": block, **coords}
        offset, entry = self.bases[min(at.get("o", 0), len(self.orders) - 1)]
        for piece in self.pieces(at.get("o", 0)):
            index = 0
            for axis in piece.term.axes:
                index = index * self.sizes[axis] + at.get(axis, 0)
            step = index // piece.divisor % piece.extent
            entry += step * piece.table
            offset += step * piece.stride
        return entry, offset

    def layers(self, first: int, count: int) -> Resolved:
        """The same memory, of which layers `first` to ``first + count - 1`` are meant; for plans, not for binding.

        Raises
        ------
        LayoutError
            The axis ``l`` is split or fused with others, so that a range of it is no loop.
        """
        if self.parts:
            sizes = MappingProxyType({**self.sizes, "l": count})
            return replace(self, sizes=sizes, parts=tuple(part.layers(first, count) for part in self.parts))
        orders, bases = [], []
        for order, (offset, entry) in zip(self.orders, self.bases, strict=False):
            mine = [piece for piece in order if "l" in piece.term.axes]
            if any(p.term.axes != ("l",) or p.term.opaque or p.divisor > 1 for p in mine) or len(mine) > 1:
                raise LayoutError(
                    f"{self.layout.name} ({self.layout.order_text}): axis 'l' is split or shares a group, so a range of layers has "
                    "no place of its own"
                )
            orders.append(tuple(replace(p, extent=count) if p in mine else p for p in order))
            stride, table = (mine[0].stride, mine[0].table) if mine else (0, 0)
            bases.append((offset + first * stride, entry + first * table))
        sizes = MappingProxyType({**self.sizes, "l": count})
        return replace(self, sizes=sizes, orders=tuple(orders), bases=tuple(bases))

    def packed(self) -> Resolved:
        """The elements of a block in this layout's order without gaps, one block after the other in one allocation.

        Records stay as they are inside, gaps included: what fills a page on one side is then one run.
        """
        if self.parts:
            return self._packed_records()
        nbytes = self.block_bytes
        orders = []
        for order in self.orders:
            held = self.shape.itemsize
            pieces = []
            for piece in sorted(order, key=_by_nesting):
                if piece.term.axes == ("b",):
                    pieces.append(replace(piece, stride=round_up(nbytes, 16), table=0))
                else:
                    pieces.append(replace(piece, stride=held, table=0))
                    held *= piece.extent
            orders.append(tuple(pieces))
        return replace(self, orders=tuple(orders), bases=((0, 0), (0, 0)))

    def _packed_records(self) -> Resolved:
        start, placed = 0, []
        for index, part in enumerate(self.parts):
            mates = (part,) if self.apart else self.parts
            held = max(_page(mate) for mate in mates)
            # A record's planes keep their places in it, so they start together; those of their own arrays follow each other.
            base = start if self.apart else 0
            offset = part.bases[0][0] if not self.apart else 0
            orders = []
            for order in part.orders:
                block = next(piece for piece in order if piece.term.axes == ("b",))
                size, pieces = held, []
                for piece in sorted(order, key=_by_nesting):
                    if piece is block:
                        continue
                    if _inside_page(piece, block):
                        pieces.append(replace(piece, table=0))
                    else:
                        pieces.append(replace(piece, stride=size, table=0))
                        size *= piece.extent
                orders.append((block, pieces))
            if self.apart or index == len(self.parts) - 1:
                start += size
            placed.append((part, base + offset, orders))
        step = round_up(start, 16)
        return replace(
            self,
            parts=tuple(
                replace(
                    part,
                    orders=tuple((*pieces, replace(block, stride=step, table=0)) for block, pieces in orders),
                    bases=((at, 0), (at, 0)),
                )
                for part, at, orders in placed
            ),
        )


def _by_nesting(piece: Piece) -> tuple[bool, int, int]:
    """Fastest first: inside an allocation by stride, then by table entries."""
    return (piece.table > 0, piece.table, piece.stride)


def _inside_page(piece: Piece, block: Piece) -> bool:
    """Whether a piece steps within a block's own bytes of one allocation."""
    return not piece.table and (bool(block.table) or piece.stride < block.stride)


def _page(part: Resolved) -> int:
    """Bytes from the start of a block's page to behind what it holds there."""
    ends = []
    for order, (offset, _) in zip(part.orders, part.bases, strict=False):
        block = next(piece for piece in order if piece.term.axes == ("b",))
        inside = [piece for piece in order if piece is not block and _inside_page(piece, block)]
        ends.append(offset + sum((p.extent - 1) * p.stride for p in inside) + part.shape.itemsize)
    return max(ends)


def merge_steps(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Extents and strides, fastest first, with axes that continue each other as one and none of extent one."""
    runs: list[tuple[int, int]] = []
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    return runs


def round_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to


# ---- the algebra ---------------------------------------------------------------------------------------------------


class Mode(NamedTuple):
    """One loop of a copy: `extent` steps of so many bytes and table entries on each side."""

    extent: int
    src: int
    dst: int
    src_table: int = 0
    dst_table: int = 0

    def continues(self, inner: Mode) -> bool:
        """Whether this mode goes on, on both sides, where `inner` ends, so that the two are one."""
        n = inner.extent
        return (
            self.dst == n * inner.dst
            and self.src == n * inner.src
            and self.dst_table == n * inner.dst_table
            and self.src_table == n * inner.src_table
        )


def refine(cuts: Iterable[int], size: int, start: int = 1) -> Iterator[tuple[int, int]]:
    """Split an axis at every cut, fastest piece first.

    Parameters
    ----------
    cuts : iterable of int
        Divisors at which either side splits.
    size : int
        Extent of the axis.
    start : int
        Elements that always stay together.

    Yields
    ------
    tuple of int
        ``(divisor, extent)``: the pieces cover the axis exactly, and each cut is a boundary.

    Raises
    ------
    LayoutError
        The cuts are no chain in which each divides the next, so there is no common refinement.
    """
    chain = sorted({start, *(cut for cut in cuts if cut > start), size})
    for lower, upper in zip(chain, chain[1:], strict=False):
        if upper % lower:
            raise LayoutError(f"{upper} is no multiple of {lower}")
        yield lower, upper // lower


def coalesce(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    """Normal form of a loop nest: fastest in the destination first, and as few modes as can be.

    Extents of one are dropped; neighbours are merged exactly when both sides continue (and both tables).  Equal copies
    have equal normal forms, whatever layouts they came from.
    """
    merged: list[Mode] = []
    for mode in sorted([mode for mode in modes if mode.extent > 1], key=_nesting):
        if merged and mode.continues(merged[-1]):
            inner = merged[-1]
            merged[-1] = Mode(inner.extent * mode.extent, inner.src, inner.dst, inner.src_table, inner.dst_table)
        else:
            merged.append(mode)
    return tuple(merged)


#: Fastest in the destination first: ``dst_table``, ``dst``, ``src_table``, ``src`` of a mode.
_nesting = operator.itemgetter(4, 2, 3, 1)
