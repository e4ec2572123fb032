"""Sections: what of a pool a copy means, as address maps; and the slots that hold it packed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .access import Access, Step
from .errors import LayoutError
from .shapes import BlockShape, round_up

if TYPE_CHECKING:
    from .layout import Layout

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """What of a pool a copy means: all blocks' elements, a window of them, or slots that hold them packed.

    Attributes
    ----------
    layout : Layout
    shape : BlockShape
        Of the whole pool.
    num_blocks : int
    accesses : tuple of Access
        As in `Resolved`.
    record : bool
        Whether planes fill records together.
    """

    layout: Layout
    shape: BlockShape
    num_blocks: int
    accesses: tuple[Access, ...]
    record: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes that the elements of a block hold, padding not counted."""
        return sum(access.nbytes for access in self.accesses if not access.half)

    def window(self, axis: str, first: int, count: int) -> Section:
        """The same memory, of which a range of one axis is meant.

        Raises
        ------
        LayoutError
            The axis is split or fused with others, so that the range is no loop.
        """
        made = []
        for access in self.accesses:
            try:
                one, *others = access.window(axis, first, count)
            except LayoutError as error:
                raise LayoutError(f"{self.layout.name} ({self.layout.order_text}): {error}") from None
            if others:
                raise LayoutError(
                    f"{self.layout.name} ({self.layout.order_text}): axis '{axis}' is split, and {count} from {first} on are "
                    f"{len(others) + 1} boxes; expected a range of whole pieces"
                )
            made.append(one)
        return replace(self, accesses=tuple(made))

    def packed(self) -> Section:
        """The elements of a block in this layout's order without gaps, one block after the other in one allocation.

        Records stay as they are inside, gaps included: what fills a page on one side is then one run.
        """
        if not self.layout.planes:
            step = round_up(self.block_bytes, 16)
            return replace(self, accesses=tuple(_pack(access, access.itemsize, 0, step) for access in self.accesses))
        start, placed = 0, []
        # A window may begin far behind the record: whole words of that are left out.
        before = min(access.at[0] for access in self.accesses) // 16 * 16
        for plane, group in itertools.groupby(self.accesses, key=lambda access: access.plane):
            own = list(group)
            # A record's planes keep their places in it, so they start together; those of their own arrays follow each other.
            held = max(map(_page, self.accesses if self.record else own)) - (before if self.record else 0)
            placed += [(access, held, access.at[0] - before if self.record else start) for access in own]
            size = held * math.prod(s.extent for s in own[0].steps if not _is_inside_page(s, own[0]))
            if not self.record:
                start += size
            elif plane == self.accesses[-1].plane:
                start = size
        step = round_up(start, 16)
        return replace(self, accesses=tuple(_pack(access, held, at, step) for access, held, at in placed))


def _pack(access: Access, held: int, at: int, block: int) -> Access:
    """The map with its steps dense in the order in which they nest; those inside a page of planes stay."""
    steps = []
    for step in sorted(access.steps, key=lambda step: (step.entries > 0, step.entries, step.nbytes)):
        if access.plane and _is_inside_page(step, access):
            steps.append(step._replace(entries=0))
        else:
            steps.append(step._replace(nbytes=held, entries=0))
            held *= step.extent
    return access.place(at, block, steps)


def _is_inside_page(step: Step, access: Access) -> bool:
    """Whether a step stays within a block's own bytes of one allocation."""
    return not step.entries and (bool(access.block[1]) or step.nbytes < access.block[0])


def _page(access: Access) -> int:
    """Bytes from the start of a block's page to behind what it holds there."""
    inside = sum((s.extent - 1) * s.nbytes for s in access.steps if _is_inside_page(s, access))
    return access.at[0] + inside + access.itemsize
