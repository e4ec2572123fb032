"""What `kvbm serve-check` says of copies, beside transfers that are made (test_serve_check.py)."""

from __future__ import annotations

import os
from pathlib import Path

import kvbm
from kvbm.integrations.vllm import models, serving

MODELS = Path(__file__).resolve().parent.parent / "data" / "models"


def strategies(name: str, order: str, tp: int, host_layout: str) -> None:
    """The strategy, launches and pieces are those of a transfer between pools of these sizes."""
    os.environ["KVBM_TUNE"] = "0"
    held = models.read(str(MODELS / f"{name}.json"))
    engine = serving.Engine(held, tp=tp, nt=16, order=order)
    serving._NUM_BLOCKS = blocks = 8
    for _, source, step, dest in serving._pairs(engine, 0, host_layout):
        with (
            kvbm.Pool.allocate(source.layout, source.shape, blocks, "cuda:0") as src,
            kvbm.Pool.allocate(dest.layout, dest.shape, blocks, "pinned") as dst,
        ):
            row = dest.nbytes // dest.num_blocks
            assert dst.steps.whole == row
            for direction, pair, steps in (("d2h", (src, dst), (step, row)), ("h2d", (dst, src), (row, step))):
                made = kvbm.Transfer(*pair)
                for count in (1, 4, 8):
                    ours = (source, dest) if direction == "d2h" else (dest, source)
                    said = serving._way(*ours, steps, direction, count, None)
                    expected = made._mover.route(None).route.choose(count)
                    assert said["strategy"] == expected, (direction, count, said, expected)
                    assert said["gbps"] is said["measured"] is None
                    before = made.stats()
                    made.copy(range(count), range(count), stream=5).synchronize()
                    stats = made.stats()
                    assert stats[expected] - before[expected] == 1
                    assert said["bytes"] == stats["bytes"] - before["bytes"]
                    if expected == "direct":
                        assert said["launches"] == stats["submissions"] - before["submissions"]
                made.close()
