"""Memory for the digests that kernels compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..digest.run import pinned


class Sums:
    """Memory for digests of kernels, all zeros.  On a GPU it is pinned, and used again when the last reference goes."""

    def __init__(self, count: int, on_gpu: bool) -> None:
        self._piece: npt.NDArray[np.uint64] | None = pinned.take(count) if on_gpu else None
        self.memory = np.zeros(count, np.uint64) if self._piece is None else self._piece[:count]
        #: Set it when all work is enqueued.  Else the memory is not used again: after an error a kernel may write to it.
        self.is_enqueued = False

    @property
    def address(self) -> int:
        return int(self.memory.__array_interface__["data"][0])  # `ctypes.data` makes objects first

    def __del__(self) -> None:
        piece = getattr(self, "_piece", None)
        if piece is not None and self.is_enqueued and pinned is not None:  # None: the interpreter is shutting down
            pinned.give(piece)
