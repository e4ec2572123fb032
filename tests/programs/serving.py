"""What `kvbm serve-check` says of copies, beside transfers that are made (test_serve_check.py)."""

from __future__ import annotations

import os
from pathlib import Path

import kvbm
from kvbm.copy import cost_model, tables
from kvbm.copy.strategies import STRATEGIES
from kvbm.integrations.host_values import HostValues
from kvbm.integrations.vllm import models, serving

MODELS = Path(__file__).resolve().parent.parent / "data" / "models"
BLOCKS = 8


def table() -> cost_model.Table:
    """Where each strategy is the fastest somewhere: staged copies into host memory, and long runs by the copy engine."""

    def seconds(direction: str, name: str, run: int, total: int) -> float:
        if name == "direct":
            return 7e-6 + total * 3e-11
        if name == "staged":
            return 10e-6 + total * (1.8e-11 if direction == "d2h" else 9e-11)
        return 8e-6 + total / run * 5e-7 + total * 1.7e-11

    rows = [
        cost_model.Row(direction, name, run, 4 << 20, total, seconds(direction, name, run, total))
        for direction in ("d2h", "h2d") for name in STRATEGIES for run in (16 << 10, 256 << 10, 4 << 20)
        for total in (4 << 20, 32 << 20, 256 << 20)
    ]  # fmt: skip
    return cost_model.Table("a GPU", "1", "2026-01-01", "0", tuple(rows))


def strategies(name: str, order: str, tp: int, host_layout: str, is_measured: bool, host_values: str = "") -> None:
    """The strategy, launches and bytes are those of a transfer between pools of these sizes."""
    os.environ["KVBM_TUNE"] = "0"
    measured = table() if is_measured else None
    if measured is not None:
        tables._find = lambda *_: (measured, "")
    serving._table, serving._NUM_BLOCKS = lambda _: measured, BLOCKS
    engine = serving.Engine(models.read(str(MODELS / f"{name}.json")), tp=tp, order=order)
    values = HostValues(host_values, engine.model.rope) if host_values else None
    said = {count: serving._copies(engine, host_layout, count, 0, values) for count in (1, 2, 4, 8)}
    for number, (_, source, _, dest) in enumerate(serving._pairs(engine, 0, host_layout, values)):
        with (
            kvbm.Pool.allocate(source.layout, source.shape, BLOCKS, "cuda:0") as src,
            kvbm.Pool.allocate(dest.layout, dest.shape, BLOCKS, "pinned") as dst,
        ):
            for way, pair in (("store", (src, dst)), ("load", (dst, src))):
                with kvbm.Transfer(*pair, cast="amax" if values else None) as made:
                    for count, copies in said.items():
                        one = copies[2 * number + (way == "load")]
                        assert one["way"] == way and (one["gbps"] is not None) == (is_measured and values is None)
                        before = made.stats()
                        made.copy(range(count), range(count), stream=5).synchronize()
                        stats = {key: value - before[key] for key, value in made.stats().items()}
                        assert stats[one["strategy"]] == 1, (way, count, one, stats)
                        assert stats["bytes"] == one["bytes"]
                        if one["strategy"] == "direct":
                            assert stats["submissions"] == one["launches"]
