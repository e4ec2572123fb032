"""`python -m benchmarks auto`: every point of its table, and the definition of a good choice."""

from __future__ import annotations

import csv
import itertools
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import auto
from kvbm.bench import copies
from kvbm.bench.table import Record
from kvbm.errors import CudaUnavailableError
from kvbm.layout.shapes import load_shape


def record(backend: str, ms: float, kernel: str = "", **rest: Any) -> Record:
    found: dict[str, Any] = {
        "tokens_per_block": 16, "num_blocks": 4, "pattern": "nhd:universal", "direction": "d2h", "backend": backend,
        "total_bytes": 1 << 20, "inner_bytes": 1, "copy_size": 1, "num_copies": 1, "median_ms": ms, "bandwidth_gbps": 1.0,
        "min_ms": ms, "max_ms": ms, "memcpy_ms": 0.9, "ratio": round(0.9 / ms, 3), "timing": "events", "kernel": kernel,
        "shape": "nl=1", "gpu": "", "driver": "", "commit": "",
    }  # fmt: skip
    return Record(**{**found, **rest})


def test_a_row_holds_every_strategys_share_and_how_good_the_choice_is() -> None:
    held = [
        record("memcpy", 0.9, pattern="contiguous"),
        *(record(name, ms) for name, ms in (("direct", 1.0), ("staged", 1.25))),
        record("auto", 1.3, "staged"),
        record("auto", 2.0, "direct few_rows", num_blocks=8),
        *(record(name, ms, num_blocks=8) for name, ms in (("direct", 1.0), ("staged", 1.25), ("engine", 9.0))),
        record("direct", 1.0, num_blocks=16),  # whose auto was left out
        record("auto", 1.0, "engine", direction="h2d", pattern="vllm/LBHNC:nhd"),
        record("staged", 1.0, direction="h2d", pattern="vllm/LBHNC:nhd"),
    ]
    first, second, third = auto.points(held)
    assert {**first, "shape": ""} == {
        "shape": "", "direction": "d2h", "host": "universal", "num_blocks": 4, "total_bytes": 1 << 20, "memcpy_ms": 0.9,
        "direct": 0.9, "staged": 0.72, "engine": "", "auto": 0.692, "chosen": "staged", "of_best": 0.8,
    }  # fmt: skip
    # What was chosen was measured twice, and once it was the best: noise is no bad choice.
    assert (second["chosen"], second["of_best"], second["auto"]) == ("direct", 1.0, 0.45)
    assert (third["host"], third["of_best"]) == ("vllm/LBHNC", 1.0)
    assert {*first, "gpu", "driver", "commit"} == set(auto.COLUMNS)


def test_every_point_that_is_asked_for_can_be_planned() -> None:
    shapes = [load_shape(name) for name in auto.SHAPES]
    made = list(auto.sweeps(shapes, auto.HOST_LAYOUTS, (1, 256), "cuda:0", 3, print))
    assert len(made) == 2 * len(shapes)
    for sweep in made:
        sweep.plans()
        (direction,) = sweep.directions
        gpu = {(pair.src if direction == "d2h" else pair.dst).name for pair in sweep.pairs}
        assert gpu == {auto.GPU_LAYOUT} and len(sweep.pairs) == len(auto.HOST_LAYOUTS)
        assert sweep.backends == {direction: copies.STRATEGIES}


def test_without_a_gpu_it_is_refused() -> None:
    result = CliRunner().invoke(auto.auto, ["--device", "cpu"])
    assert isinstance(result.exception, CudaUnavailableError)


@pytest.mark.gpu
def test_on_a_gpu_every_point_has_a_choice_that_was_measured(tmp_path: Any) -> None:
    """A few points.  The quality of a choice is not tested, as other work may run at the same time."""
    out = tmp_path / "auto.csv"
    arguments = ["--shape", "llama-3.1-70b/tp4", "--num-blocks", "1,64", "--device", "cuda:0", "--out", str(out)]
    result = CliRunner().invoke(auto.auto, arguments)
    assert result.exit_code == 0, result.output
    lines = [line for line in out.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    points = [(row["direction"], row["host"], int(row["num_blocks"])) for row in rows]
    assert sorted(points) == sorted(itertools.product(("d2h", "h2d"), auto.HOST_LAYOUTS, (1, 64)))
    for row in rows:
        assert float(row[row["chosen"]]) > 0 and 0 < float(row["of_best"]) <= 1, row
