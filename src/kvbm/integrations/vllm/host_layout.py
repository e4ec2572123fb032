"""How blocks lie in host memory: the setting ``host_layout``, and rows that hold a block of any group.

Neither vLLM nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import BindError
from ...layout.layout import Layout
from ...layout.resolved import Resolved
from ...layout.shapes import BlockShape, round_up

__all__ = ["PAGES", "offsets", "one_array", "row_bytes", "sizes_of"]

#: Value instead of a layout: host memory holds the engine's pages, byte by byte.
PAGES = "pages"

#: Alignment of the kinds of layers in a row (bytes).
_ALIGN = 256


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where the kinds of layers of a group begin in a row; `sizes` are their bytes per block."""
    found, offset = [], 0
    for size in sizes:
        found.append(offset)
        offset = round_up(offset + size, _ALIGN)
    return found


def sizes_of(layout: Layout, group: Sequence[BlockShape]) -> list[int]:
    """Bytes of a block in host memory of each kind of layers of a group."""
    return [layout.resolve(shape, 1).nbytes for shape in group]


def row_bytes(layout: Layout, groups: Sequence[Sequence[BlockShape]]) -> int:
    """Bytes of a row, which holds a block of any group; each group has the shapes of its kinds of layers."""
    found = [sizes_of(layout, group) for group in groups if group]
    return round_up(max(offsets(sizes)[-1] + sizes[-1] for sizes in found), _ALIGN)


def one_array(layout: Layout, shape: BlockShape) -> Resolved:
    """The layout of a single block, which must be one array: then blocks of several kinds can lie in the same rows of bytes.

    Raises `BindError` if a block consists of several arrays, or an array holds several blocks.
    """
    found = layout.resolve(shape, 1)
    table = layout.orders[0].table
    if not table or table[0].axes != ("b",) or found.table_size != 1:
        raise BindError(
            f"host_layout: {layout.name} ({layout.order_text}): blocks of several kinds, or several ranks, share the host memory: "
            "expected a layout with one array a block, such as universal"
        )
    return found
