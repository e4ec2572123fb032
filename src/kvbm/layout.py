"""Layouts: where every element of a KV block lies, as declared, for any sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from .resolved import Resolved, resolve
from .shapes import BlockShape
from .terms import Expression, Order, Pitch, Plane

__all__ = ["Layout"]


@dataclass(frozen=True, eq=False)
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
    def meaning(self) -> str:
        """All that the layout says, a statement a line; equal where two layouts mean the same."""
        lines = [str(order) for order in self.orders]
        lines += [f"pitch {term} {p.expression.key} {'B' if p.in_bytes else ''}" for term, p in self.pitch]
        lines += [f"axis {axis} {expression.key}" for axis, expression in self.extra]
        lines += [f"plane {plane.meaning}" for plane in self.planes]
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits over the meaning: what stored blocks carry."""
        return hashlib.blake2b(self.meaning.encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.meaning == other.meaning if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:  # plans are looked up by their layouts, and a text remembers its hash
        return hash(self.meaning)

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
        return resolve(self, shape, num_blocks)
