"""The setting ``host_layout``: how blocks lie in host memory.  Neither vLLM nor torch is imported."""

from __future__ import annotations

from ...errors import BindError
from ...layout.layout import Layout
from ...layout.resolved import Resolved
from ...layout.shapes import BlockShape

__all__ = ["PAGES", "one_array"]

#: Value instead of a layout: host memory holds the engine's pages, byte by byte.
PAGES = "pages"


def one_array(layout: Layout, shape: BlockShape) -> Resolved:
    """The layout of a single block, which must be one array: then blocks of several kinds can lie in the same rows of bytes.

    Raises
    ------
    BindError
        A block consists of several arrays, or an array holds several blocks.
    """
    found = layout.resolve(shape, 1)
    table = layout.orders[0].table
    if layout.planes or not table or table[0].axes != ("b",) or found.table_size != 1:
        raise BindError(
            f"host_layout: {layout.name} ({layout.order_text}): blocks of several kinds, or several ranks, share the host memory: "
            "expected a layout with one array a block, such as universal"
        )
    return found
