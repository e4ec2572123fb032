"""Where two pools differ, that should hold the same."""

from __future__ import annotations

from typing import Any

from .. import locating
from ..mover import part_of
from ..pool import Pool
from ..selection import PoolSection

__all__ = ["locate"]


def locate(
    src_pool: Pool | PoolSection,
    dst_pool: Pool | PoolSection,
    src_ids: Any = None,
    dst_ids: Any = None,
    *,
    tokens: Any = None,
    stream: Any = None,
) -> locating.Differences:
    """Find the smallest regions in which blocks differ, whatever the layouts: from digests, in a few reads of what differs.

    First of whole blocks; of those that differ, of each plane, layer, K and V, head and token, each in what is left; at last of
    each row of the product of these, and of pieces of up to 16 bytes along the rows.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        In host memory or on a GPU each, with the same coordinates on both sides, as for a copy.
    src_ids, dst_ids : optional
        Pairs of blocks, or units, as for `Transfer.copy`; those of a GPU are read by the host.
    tokens : int, sequence of int, array or tensor, optional
        The position of each pair's first token in its sequence: tokens are then told as positions.
    stream : optional
        Where the blocks were written, and is waited for; not given: what frameworks have enqueued on their current streams.  Of
        two pools on the CPU nothing may be writing.

    Returns
    -------
    Differences
        False where the blocks are equal.  Its text says where they are not; `Differences.found` has coordinates, for the first 16
        pairs and up to 8 regions each.

    Raises
    ------
    PlanError
        Pools between which there is no copy; a layout without digests.
    BindError
        Ids that do not fit.

    Notes
    -----
    One region that is a product of layers, K and V, heads and tokens is found exactly, and so are several, as disjoint products.
    Where rows are too many to be asked one by one (some thousands beside the tokens) the region is said to be ``within`` a product.
    What a layout promises no order of is not told apart.

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
    return locating.locate(src, dst, src_ids, dst_ids, tokens=tokens, stream=stream)
