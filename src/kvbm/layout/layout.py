"""Layouts: the declared position of every element of a KV block, for any sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

from .._arguments import quoted
from .._shown import Shown
from ..errors import SpecError
from .resolved import Resolved, resolve
from .shapes import BlockShape, as_shape
from .terms import Expression, Order, Pitch, Plane


@dataclass(frozen=True, eq=False)
class Layout(Shown):
    """The position of every element of a KV block.  Layouts with the same meaning are equal, even with different names.

    Parameters
    ----------
    orders : tuple of Order
        One order, or one for K and one for V.
    pitch : tuple of (str, Pitch)
        Text of a term → distance between neighbours; sorted.
    extra : tuple of (str, Expression)
        Axes beyond `AXES` and their sizes; sorted.
    planes : tuple of Plane
        Not empty if a block holds several kinds of elements.  Then there is one order: of the axes that the planes share, with a
        term for the planes.
    name, title, file, used_by, read_from
        For readers; they do not change the meaning.
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

    def __post_init__(self) -> None:
        given: object = self.orders
        if not (isinstance(given, tuple) and all(isinstance(order, Order) for order in given)):
            raise SpecError(
                f"Layout: expected a tuple of Order, got {quoted(self.orders, 80)}; for a name or a YAML file call kvbm.load"
            )

    def __str__(self) -> str:
        return f"{self.name}: {self.order_text}"

    def __repr__(self) -> str:
        return f"Layout({f'{self.name}: ' if self.name else ''}{self.order_text})"

    @cached_property
    def order_text(self) -> str:
        """The declared order, e.g. ``[b l o] t h d``, ``k: … v: …``, or ``[l] b t <data scale>`` with its planes."""
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
    def meaning(self) -> str:
        """All that the layout says, one statement per line.  Layouts with the same meaning have the same text."""
        lines = [str(order) for order in self.orders]
        lines += [f"pitch {term} {p.expression.key} {'B' if p.in_bytes else ''}" for term, p in self.pitch]
        lines += [f"axis {axis} {expression.key}" for axis, expression in self.extra]
        lines += [f"plane {plane.meaning}" for plane in self.planes]
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the meaning, sixteen hex digits.  Stored blocks carry it."""
        return hashlib.blake2b(self.meaning.encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.meaning == other.meaning if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:  # plans are looked up by their layouts, and a text remembers its hash
        return hash(self.meaning)

    @cached_property
    def present(self) -> frozenset[str]:
        """Axes that may be longer than one: those of the orders, of the planes, and those that the planes share."""
        orders = [*self.orders, *(order for plane in self.planes for order in plane.orders)]
        found = {axis for order in orders for term in order.terms if not term.planes for axis in term.axes}
        own = {"d"}.union(*(plane.shared for plane in self.planes)) if self.planes else set()
        return frozenset(found | own)

    @property
    def uses_shape_dtype(self) -> bool:
        """True if some elements have the dtype of the shape.  False if every plane has its own: then that dtype means nothing."""
        return not self.planes or any(plane.dtype is None for plane in self.planes)

    def same_blocks(self, one: BlockShape, other: BlockShape) -> bool:
        """True if two shapes give the same blocks: they are equal, or differ in a dtype that no plane uses."""
        return one == other or (not self.uses_shape_dtype and replace(one, dtype=other.dtype) == other)

    @cached_property
    def scales(self) -> dict[str, str]:
        """Name of each plane of scales → name of the plane that it scales."""
        return {plane.name: plane.scales for plane in self.planes if plane.scales}

    @property
    def where(self) -> str:
        """File and line of the order; without a file, the name."""
        return self.orders[0].where or self.name

    @property
    def b_in_table(self) -> bool:
        """True if each block has its own allocations."""
        return any("b" in term.axes and not term.planes for term in self.orders[0].table)

    def resolve(self, shape: BlockShape | str, num_blocks: int) -> Resolved:
        """The layout at given sizes: arrays, strides, addresses.

        Parameters
        ----------
        shape : BlockShape or str
            Sizes of a block, or a text that `kvbm.load_shape` reads.
        num_blocks : int
            Number of blocks.

        Raises
        ------
        LayoutError
            The layout is not one-to-one at these sizes: a split does not divide or cover its axis, an axis is missing or
            repeated, or a pitch is smaller than its contents.
        """
        return resolve(self, as_shape(shape), num_blocks)
