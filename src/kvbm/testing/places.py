"""Find the places where two pools differ that should hold the same."""

from __future__ import annotations

from typing import Any

from ..copy import diff
from ..copy.executor import part_of
from ..pool.pool import Pool
from ..pool.section import PoolSection

__all__ = ["locate"]


def locate(
    src_pool: Pool | PoolSection,
    dst_pool: Pool | PoolSection,
    src_ids: Any = None,
    dst_ids: Any = None,
    *,
    tokens: Any = None,
    stream: Any = None,
) -> diff.Differences:
    """Find the smallest regions in which blocks differ, in any two layouts.  It compares digests, with a few reads of the blocks.

    It compares whole blocks first.  In those that differ it compares planes, layers, K and V, heads and tokens, each within the
    remaining region.  At last it compares each row of this region, and pieces of up to 16 bytes along the rows.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        Each in host memory or on a GPU, with the same coordinates on both sides, as for a copy.
    src_ids, dst_ids : optional
        Pairs of blocks or units, as for `Transfer.copy`.  Ids on a GPU are copied to the host.
    tokens : int, sequence of int, array or tensor, optional
        The position of each pair's first token in its sequence.  The result then has positions instead of tokens of a block.
    stream : optional
        The stream that wrote the blocks; the call waits for it.  Default: the current streams of the frameworks.  No copy may be
        writing to pools on the CPU.

    Returns
    -------
    Differences
        False if the blocks are equal.  Its text names the places; `Differences.found` has the coordinates, for the first 16 pairs
        and up to 8 regions each.

    Raises
    ------
    PlanError
        There is no copy between the pools, or a layout has no digests.
    BindError
        The ids do not fit.

    Notes
    -----
    A region that is a product of layers, K and V, heads and tokens is found exactly.  Several are found as disjoint products.  If
    there are too many rows to compare one by one (some thousands, tokens not counted), the result says ``within`` a product.
    Places inside an opaque group are not distinguished.

    Examples
    --------
    >>> import numpy as np
    >>> import kvbm
    >>> shape = kvbm.BlockShape(nl=4, no=2, nh=2, nt=16, hd=8, dtype="float32")
    >>> src, dst = (kvbm.Pool.allocate(kvbm.load(name), shape, 4) for name in ("universal", "operational_nhd"))
    >>> for array in src.arrays:
    ...     array[...] = 1.5
    >>> kvbm.convert(src, dst)
    >>> dst.arrays[3][2, 1, 4:8] = 0  # block 3, layer 2, V, four tokens
    >>> print(locate(src, dst))
    pair 3 (block 3 → block 3): layer 2, V, all heads, tokens 4–7
    """
    src, dst = part_of(src_pool, "source"), part_of(dst_pool, "destination")
    return diff.locate(src, dst, src_ids, dst_ids, tokens=tokens, stream=stream)
