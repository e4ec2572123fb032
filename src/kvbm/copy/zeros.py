"""Write zeros into blocks whose load failed, so that nothing of the load is left in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._arguments import quoted, wholes
from ..errors import BindError
from ..pool.pool import Pool
from .transfer import Transfer


def block_of_zeros(like: Pool, device: str) -> Pool:
    """A pool of one block of zeros in host memory, with the layout and shape of another."""
    zeros = Pool.allocate(like.layout, like.shape, 1, device)
    for array in zeros.arrays:
        array.view(f"u{array.dtype.itemsize}")[...] = 0  # its bits: not every format has a zero
    return zeros


class Zeros:
    """Writes zeros into blocks of a pool.  It needs memory for one block, from the first call on.

    A masked slot of a partly filled block is multiplied by 0, and 0 × NaN is NaN: a wrong block must not stay in an
    engine's cache, even if nobody is to read its tokens.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made: tuple[Pool, Transfer] | None = None

    def __call__(self, ids: Iterable[int], stream: Any = None) -> None:
        """Write zeros into whole blocks, and wait until they are there.  Repeated ids and -1 are allowed.

        On a GPU, `stream` must come after what writes the blocks.  Raises `BindError` if the ids are no list of
        integers, a block does not exist, or the pool is closed or read-only, and `CudaError` if a call of the driver
        failed.
        """
        found = wholes(ids, 1 << 31)
        if found is None:
            raise BindError(f"ids: expected a list of block ids, got {quoted(ids)}")
        blocks = sorted({one for one in found if one != -1})
        if not blocks:
            return
        if self._made is None:
            zeros = block_of_zeros(self._pool, "cpu" if self._pool.device == "cpu" else "pinned")
            self._made = zeros, Transfer(zeros, self._pool)
        options = {} if stream is None else {"stream": stream}
        self._made[1].copy([0] * len(blocks), blocks, **options).synchronize()

    def close(self) -> None:
        """Free the memory."""
        made, self._made = self._made, None
        if made is not None:
            made[1].close()
            made[0].close()
