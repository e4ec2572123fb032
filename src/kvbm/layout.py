"""Layouts as functions from coordinates to addresses, and the algebra that the planner needs.

Three levels, each a frozen value:

* `Term` and `Order`: one line of the language, as declared, without sizes;
* `Layout`: a named order (or one for K and one for V) with its pitches and extra axes;
* `Resolved`: a layout at a block shape and a number of blocks: every term has become a `Piece` with strides.

`refine` and `coalesce` are the two operations of the algebra; both are tested against every coordinate.
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from .errors import LayoutError
from .shapes import BlockShape

__all__ = [
    "Allocation",
    "Expression",
    "Layout",
    "Mode",
    "Order",
    "Piece",
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

    def evaluate(self, sizes: Mapping[str, int], *, minimum: int | None = 1) -> int:
        """Value for these sizes, at least `minimum`."""

        def walk(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int() as value) if not isinstance(value, bool):
                    return value
                case ast.Name(id=name) if name in sizes:
                    return sizes[name]
                case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                    return OPERATORS[type(op)](walk(left), walk(right))
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
    """

    axes: tuple[str, ...]
    steps: tuple[tuple[str, int, bool], ...] = ()
    opaque: bool = False

    def __str__(self) -> str:
        if self.opaque:
            return "{" + " ".join(self.axes) + "}"
        head = self.axes[0] if len(self.axes) == 1 else "(" + " ".join(self.axes) + ")"
        return head + "".join(f"{op}{size}{'B' if in_bytes else ''}" for op, size, in_bytes in self.steps)

    def extent(self, sizes: Mapping[str, int]) -> int:
        """Size of the fused axes before any split."""
        return sizes[self.axes[0]] if len(self.axes) == 1 else math.prod(sizes[axis] for axis in self.axes)

    def cut(self, sizes: Mapping[str, int], itemsize: int) -> tuple[int, int]:
        """The term as ``(index // divisor) % extent``.

        Raises
        ------
        LayoutError
            A split that does not divide what it splits.
        """
        divisor, extent = 1, self.extent(sizes)
        for op, size, in_bytes in self.steps:
            count, rest = divmod(size, itemsize) if in_bytes else (size, 0)
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
    name, title, file, used_by, read_from
        For people; they do not change what the layout means.
    """

    orders: tuple[Order, ...]
    pitch: tuple[tuple[str, Pitch], ...] = ()
    extra: tuple[tuple[str, Expression], ...] = ()
    name: str = field(default="", compare=False)
    title: str = field(default="", compare=False)
    file: str = field(default="", compare=False)
    used_by: tuple[str, ...] = field(default=(), compare=False)
    read_from: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.order_text}"

    @property
    def order_text(self) -> str:
        """The declared order, e.g. ``[b l o] t h d``, or ``k: … v: …``."""
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
        return hashlib.blake2b("\n".join(meaning).encode(), digest_size=8).hexdigest()

    def __hash__(self) -> int:  # plans are looked up by their layouts, and a text remembers its hash
        return hash(self.fingerprint)

    @property
    def b_in_table(self) -> bool:
        """Whether each block has allocations of its own."""
        return any("b" in term.axes for term in self.orders[0].table)

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
            sizes[axis] = expression.evaluate(names)
        if len(self.orders) == 2 and shape.no > 2:
            raise LayoutError(f"{self.name}: K and V have orders of their own, so no must be 1 or 2, got {shape.no}")
        resolved = []
        for order in self.orders[: shape.no]:
            try:
                resolved.append(_resolve_order(order, dict(self.pitch), sizes, names, shape.itemsize))
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
    order: Order, pitch: Mapping[str, Pitch], sizes: Mapping[str, int], names: Mapping[str, int], itemsize: int
) -> tuple[Piece, ...]:
    # Most orders name every axis of the shape once and split none: then there is nothing to look for.
    if not order.whole or sizes.keys() != order.whole:
        _require_cover(order, sizes, itemsize)
    pieces: list[Piece] = []
    entries = 1
    for term in reversed(order.table):
        divisor, extent = term.cut(sizes, itemsize)
        pieces.append(Piece(term, divisor, extent, stride=0, table=entries))
        entries *= extent
    held = itemsize
    for term in reversed(order.inner):
        divisor, extent = term.cut(sizes, itemsize)
        stride = held
        if pitch and (declared := pitch.get(str(term))):
            stride = declared.expression.evaluate(names) * (1 if declared.in_bytes else itemsize)
            if stride < held:
                raise LayoutError(
                    f"pitch of '{term}': neighbours overlap: expected at least {held} bytes, got {stride}"
                )
        pieces.append(Piece(term, divisor, extent, stride=stride, table=0))
        held = stride * extent
    return tuple(pieces)


def _require_cover(order: Order, sizes: Mapping[str, int], itemsize: int) -> None:
    """Every axis appears, in one fused group, and the pieces of each group cover it exactly once."""
    groups: dict[tuple[str, ...], list[Term]] = {}
    for term in order.terms:
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
        for divisor, extent, text in sorted((*term.cut(sizes, itemsize), str(term)) for term in terms):
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
        Terms, slowest first; ``("elements",)`` where K and V lie in one array in different orders.
    shape, strides : tuple of int
        Elements along each axis; bytes between neighbours.
    nbytes : int
        Extent in bytes, padding included.
    """

    label: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Resolved:
    """A layout at a shape and a number of blocks.

    Attributes
    ----------
    sizes : mapping of str to int
        Extent of every axis.
    orders : tuple of tuple of Piece
        The pieces of K (or of both) and of V, fastest first.
    bases : tuple of (int, int)
        Bytes and table entries at which K (or both) and V start: not zero for a range of layers.
    """

    layout: Layout
    shape: BlockShape
    num_blocks: int
    sizes: Mapping[str, int]
    orders: tuple[tuple[Piece, ...], ...]
    bases: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))

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
        lone = next((piece for piece in pieces if piece.term.axes == ("o",)), None) if o is not None else None
        if o and lone:
            offset, entry = offset + o * lone.stride, entry + o * lone.table
        skip = (("b",),) if o is None else (("b",), ("o",))
        kept = [piece for piece in pieces if piece.term.axes not in skip]
        by_axis: dict[tuple[str, ...], list[Piece]] = {}
        for piece in sorted(kept, key=lambda piece: piece.term.axes):
            by_axis.setdefault(piece.term.axes, []).append(piece)
        return Half((offset, entry), lone is not None, kept, by_axis, all(len(axes) == 1 for axes in by_axis))

    @cached_property
    def id_steps(self) -> tuple[int, int]:
        """Table entries and bytes that a block id steps."""
        piece = next(piece for piece in self.orders[0] if piece.term.axes == ("b",))
        return (piece.table, piece.stride)

    @property
    def table_size(self) -> int:
        """Number of allocations."""
        return math.prod(piece.extent for piece in self.orders[0] if piece.table)

    @cached_property
    def _inside(self) -> tuple[Allocation, ...]:
        """The one kind of allocation, or K's and V's."""
        made = []
        for pieces in self.orders:
            inner = [piece for piece in reversed(pieces) if not piece.table]
            nbytes = inner[0].stride * inner[0].extent if inner else self.shape.itemsize
            axes, shape, strides = (
                tuple(str(piece.term) for piece in inner),
                tuple(piece.extent for piece in inner),
                tuple(piece.stride for piece in inner),
            )
            made.append(Allocation("", axes, shape, strides, nbytes))
        if len(made) == 2 and self._o_of_entry is None:
            # K and V lie in one allocation in different orders: no shape says that, so it is a row of elements.
            size, itemsize = made[0].nbytes, self.shape.itemsize
            return (Allocation("", ("elements",), (size // itemsize,), (itemsize,), size),)
        return tuple(made)

    @property
    def _o_of_entry(self) -> Piece | None:
        return next((piece for piece in self.orders[0] if piece.table and piece.term.axes == ("o",)), None)

    @property
    def first(self) -> Allocation:
        """The first allocation, without its label."""
        return self._inside[0]

    @cached_property
    def kinds(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, strides in bytes and element size of each kind of allocation: one, or K's and V's."""
        return tuple((a.shape, a.strides, self.shape.itemsize) for a in self._inside)

    @cached_property
    def kind_of_entry(self) -> Sequence[int]:
        """Which of `kinds` each table entry is."""
        o = self._o_of_entry
        if len(self._inside) == 1 or o is None:
            return [0] * self.table_size
        return [entry // o.table % o.extent for entry in range(self.table_size)]

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every array of the pool, in table order."""
        table = [piece for piece in reversed(self.orders[0]) if piece.table]
        made = []
        for entry, kind in enumerate(self.kind_of_entry):
            inside = self._inside[kind]
            label = " ".join(f"{piece.term}={entry // piece.table % piece.extent}" for piece in table)
            made.append(Allocation(label, inside.axes, inside.shape, inside.strides, inside.nbytes))
        return tuple(made)

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations, padding included."""
        return sum(inside.nbytes for inside in self._inside) * self.table_size // len(self._inside)

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
        orders, bases = [], []
        for order, (offset, entry) in zip(self.orders, self.bases, strict=False):
            mine = [piece for piece in order if "l" in piece.term.axes]
            if any(piece.term.axes != ("l",) or piece.term.opaque for piece in mine) or len(mine) > 1:
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
        """The elements of a block in this layout's order without gaps, one block after the other in one allocation."""
        nbytes = math.prod(size for axis, size in self.sizes.items() if axis != "b") * self.shape.itemsize
        orders = []
        for order in self.orders:
            held = self.shape.itemsize
            pieces = []
            for piece in sorted(order, key=lambda p: (p.table > 0, p.table, p.stride)):
                if piece.term.axes == ("b",):
                    pieces.append(replace(piece, stride=round_up(nbytes, 16), table=0))
                else:
                    pieces.append(replace(piece, stride=held, table=0))
                    held *= piece.extent
            orders.append(tuple(pieces))
        return replace(self, orders=tuple(orders), bases=((0, 0), (0, 0)))


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


def refine(cuts: Iterable[int], size: int) -> Iterator[tuple[int, int]]:
    """Split an axis at every cut, fastest piece first.

    Parameters
    ----------
    cuts : iterable of int
        Divisors at which either side splits.
    size : int
        Extent of the axis.

    Yields
    ------
    tuple of int
        ``(divisor, extent)``: the pieces cover the axis exactly, and each cut is a boundary.

    Raises
    ------
    LayoutError
        The cuts are no chain in which each divides the next, so there is no common refinement.
    """
    chain = sorted({1, *cuts, size})
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
