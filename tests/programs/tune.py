"""Measuring the strategies (test_autotune.py)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvbm
from kvbm.copy import autotune, cost_model, tables
from kvbm.system import machine
from programs.fake_gpu import count, shape


def seconds(call: Any, *, iters: int, warmup: int) -> SimpleNamespace:
    """As the GPU's clock measures a call: here streams are numbers."""
    start = time.perf_counter()
    call(5).synchronize()
    return SimpleNamespace(median=time.perf_counter() - start)


@contextlib.contextmanager
def clock(device: int) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(time=seconds)


def measure_and_auto() -> None:
    autotune._clock = clock
    steps: list[tuple[int, int]] = []
    made = autotune.measure(0, lambda done, of: steps.append((done, of)), directions=("d2h", "d2d"))
    assert count("registered") == 0 and count("launches") and count("batches")
    assert steps == [(i + 1, len(steps)) for i in range(len(steps))]
    for direction, names in (("d2h", {"direct", "staged", "engine"}), ("d2d", {"direct", "engine"})):
        for run in autotune.RUNS:
            found = [row for row in made.rows if (row.direction, row.run_bytes) == (direction, run)]
            assert {row.strategy for row in found} == names
            assert all(row.run_bytes <= row.block_bytes <= row.total_bytes <= 64 << 20 for row in found)
    layouts = kvbm.load("nhd"), kvbm.load("universal")

    def expect(**costs: tuple[float, float]) -> list[str]:
        cost_model.save(
            cost_model.Table(
                *machine.gpu_and_driver(0),
                "2026-01-31",
                "0",
                tuple(
                    cost_model.Row("d2h", name, shape.nbytes, shape.nbytes, n * shape.nbytes, fixed + n * each)
                    for name, (fixed, each) in costs.items()
                    for n in (1, 10, 40)
                ),
            )
        )
        tables.reload()
        with (
            kvbm.Pool.allocate(layouts[0], shape, 40, "cuda:0") as src,
            kvbm.Pool.allocate(layouts[1], shape, 40, "pinned") as dst,
            kvbm.Transfer(src, dst) as move,
        ):
            ran = [move.copy(range(n), range(n), stream=5).strategy for n in (1, 40)]
            assert "2026-01-31" in move.explain()
            return ran

    assert expect(direct=(1e-5, 2e-5), staged=(1e-4, 1e-5)) == ["direct", "staged"]
    # Its runs are too short for the engine.
    assert expect(direct=(1e-4, 1e-5), engine=(1e-6, 1e-7)) == ["direct", "direct"]
    cost_model.ENGINE_RUN = 0
    assert expect(direct=(1e-4, 1e-5), engine=(1e-6, 1e-7)) == ["engine", "engine"]


def no_memory_to_measure_with() -> None:
    autotune._clock = clock
    ways = {"direct": cost_model.Way(4096), "staged": cost_model.Way(5 << 20)}
    autotune.ensure("d2h", 0)
    found, why = tables.limits("d2h", 0, ways, 5 << 20, 32 << 20)
    assert found == ((3, "direct"), (4, "staged")) and "measuring failed" in why and "CUDA_ERROR_" in why, why
    assert count("registered") == 0 and not list(Path(os.environ["KVBM_CACHE_DIR"]).glob("*"))
