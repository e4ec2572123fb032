"""Pools that are closed while Python exits."""

from __future__ import annotations

import signal
import sys
import threading
import types

import numpy as np

import kvbm


def beside_a_copy() -> None:
    """When Python exits, a pool is closed although a thread copies that does not get Python's lock any more."""
    shape = kvbm.BlockShape(nl=4, no=2, nh=8, nt=16, hd=64, dtype="uint16")
    ids = np.arange(1000)
    pools = [kvbm.Pool.allocate(name, shape, ids.size) for name in ("nhd", "universal")]
    pools[0].arrays[0][...] = 7
    move = kvbm.Transfer(*pools)

    class Closes:
        def __del__(self) -> None:
            for pool in pools:
                pool.close()

    def copy() -> None:
        while True:
            move.copy(ids, ids)

    holder = types.ModuleType("holder")
    holder.closes, sys.modules["holder"] = Closes(), holder  # type: ignore[attr-defined]
    threading.Thread(target=copy, daemon=True).start()
    while not pools[1].arrays[0].any():
        pass
    signal.alarm(20)
