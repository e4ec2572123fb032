"""What `python -m benchmarks link` does with a GPU's memory, on a driver that is not one (test_bench_link.py)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import benching
from benchmarks import ways


def both_sides(folder: str) -> None:
    """The sum of what is sent is that of each block and of no others; what came is zeroed."""
    import cuda.core  # kvbm knows its streams where it is imported

    cuda.core.Device = lambda _: SimpleNamespace(set_current=lambda: None)  # it needs more of a driver
    for sends in (True, False):
        side, beside = (ways.Side(ways.Setting(benching.MODEL, 256, folder, sends, place)) for place in ("cuda:0", "cpu"))
        way = type("Way", (ways.Way,), {"copies": True})(side)
        assert side.device == 0 and side.pool.device == "cuda:0"
        assert side.sum_of(way, 128) == beside.sum_of(way, 128) != side.sum_of(way, 256) == beside.sum_of(way, 256)
        before = side.sum_of(way, 256)
        side.forget(way, 256)
        assert side.sum_of(way, 256) != before
        beside.forget(way, 256)
        assert side.sum_of(way, 256) == beside.sum_of(way, 256)
        raw = type("Way", (ways.Way,), {})(side)
        before = side.sum_of(raw, 256)
        assert before == beside.sum_of(raw, 256) != side.sum_of(raw, 128)
        side.forget(raw, 128)
        assert side.sum_of(raw, 128) != beside.sum_of(raw, 128)
        assert not np.asarray(ways.read(0, *side._bytes_of(128))).any()
