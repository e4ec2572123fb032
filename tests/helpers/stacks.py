"""Lists of tensors as `kvbm.kernels` takes them, in guarded buffers, and the expected bytes from the oracle.

Nothing here asks kvbm for a layout or a plan: the orders stand here as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import oracle
from memory import FakeCuda, numpy_dtype, placed

#: What the sides hold, by the name of a list: chunks in two orders, universal and operational tensors.
ORDERS = {
    "nhd": oracle.Order("[b l o] t h d"),
    "hnd": oracle.Order("[b l o] h t d"),
    "universal": oracle.Order("[b] h l o t d"),
    "operational": oracle.Order("[b] l o {t h d}"),
}
CHUNKS = ("nhd", "hnd")

#: nl, no, nh, nt, hd; and for each the layers of a copy of some.
SIZES = [(1, 1, 1, 1, 1), (2, 2, 3, 5, 5), (3, 2, 8, 16, 64), (2, 1, 1, 16, 128), (4, 2, 4, 8, 24), (5, 2, 2, 3, 7)]
LAYERS = [range(1), range(1, 2), range(3), range(2), range(1, 3), range(2, 5)]


class Stacks:
    """A source and a destination, each a list of chunks or of whole tensors, as bytes.

    Parameters
    ----------
    src, dst : str
        Names of `ORDERS`.
    shape : kvbm.BlockShape
    nb : int
        Blocks.
    align : (int, int)
        Misalignment of the tensors of both sides (bytes).
    layers : range, optional
        The chunks hold these layers of the whole tensors.

    Attributes
    ----------
    data : (numpy.ndarray, numpy.ndarray)
        The bytes of both sides before the copy.
    want : numpy.ndarray
        The destination's bytes after it, guards and untouched bytes included.
    """

    def __init__(
        self,
        src: str,
        dst: str,
        shape: Any,
        nb: int,
        align: tuple[int, int] = (0, 0),
        layers: range | None = None,
    ):
        self.names, self.shape, self.nb = (src, dst), shape, nb
        held = shape if layers is None else replace(shape, nl=len(layers))
        self.shapes = [held if name in CHUNKS else shape for name in self.names]
        self.arenas = [
            placed(ORDERS[name], sizes, nb).layout_bytes(one)
            for name, sizes, one in zip(self.names, self.shapes, align, strict=True)
        ]
        self.data = oracle.source_bytes(self.arenas[0], 0), oracle.dest_bytes(self.arenas[1], 0)
        if layers is None:
            self.want = oracle.expected_bytes(*self.arenas, *self.data, range(nb), range(nb))
            return
        read, write = (
            arena.positions(range(nb))[:, slice(None) if name in CHUNKS else slice(layers.start, layers.stop)]
            for name, arena in zip(self.names, self.arenas, strict=True)
        )
        self.want = self.data[1].copy()
        oracle.scatter(self.want, write, oracle.gather(self.data[0], read, shape.itemsize))

    def lists(self, side: int, buffer: Any, views: Callable[..., Sequence[Any]]) -> list[Any]:
        """The arguments of a call: ``[nb][nl*no]`` chunks, or nb whole tensors, which lie in the buffer."""
        flat = list(views(self.arenas[side], buffer, self.shape.dtype))
        if self.names[side] not in CHUNKS:
            return flat
        per = len(flat) // self.nb
        return [flat[i * per : (i + 1) * per] for i in range(self.nb)]

    def check(self, source: np.ndarray, got: np.ndarray) -> None:
        """The destination has the expected bytes, and the source those that it had."""
        assert np.array_equal(got, self.want), oracle.explain(self.arenas[1], got, self.want)
        assert np.array_equal(source, self.data[0]), "the source changed"


def fake_views(arena: oracle.Arena, buffer: np.ndarray, dtype: str) -> list[FakeCuda]:
    """Arrays over NumPy memory that say they are on GPU 0."""
    return [
        FakeCuda(space.shape, numpy_dtype(dtype).name, address=buffer.ctypes.data + base, strides=space.strides)
        for space, base in zip(arena.placed.spaces, arena.bases, strict=True)
    ]
