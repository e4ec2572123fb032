"""`python -m benchmarks cast`: rows, and the check before them.  Small sizes; no time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benching
from benching import ON_CPU, run
from benchmarks import cast, race
from kvbm.bench.check import WrongCopyError

pytestmark = pytest.mark.usefixtures("small_caches")


def test_every_layout_is_measured_in_both_directions() -> None:
    rows = benching.ran(cast.cast, *ON_CPU, "--what", "within", "--shape", "nl=2,no=2,nh=2,nt=16,hd=64,dtype=bfloat16")
    assert tuple(rows[0]) == race.COLUMNS
    cases = [f"{src} → {dst}" for name in cast.LAYOUTS for src, dst in ((cast.PLAIN, name), (name, cast.PLAIN))]
    assert [row["case"] for row in rows] == cases
    assert [row["by"] for row in rows] == ["quantise", "dequantise"] * len(cast.LAYOUTS)
    assert {row["beside"] for row in rows} == {"memcpy"} and {row["n"] for row in rows} == {"8"}


@pytest.mark.slow  # 0.6 s
def test_quick_runs_and_the_table(tmp_path: Path) -> None:
    out = tmp_path / "cast.csv"
    found = run(cast.cast, *ON_CPU, "--quick", "--out", str(out))
    assert found.exit_code == 0, (found.output, found.exception)
    assert "across: left out: it needs a GPU" in found.stderr and "quantise" in found.stdout
    assert "reload of 256 tokens, nvfp4" in found.stdout
    assert out.read_text("utf-8").startswith("# kvbm abc1234")


def test_blocks_that_are_quantised_wrongly_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = cast._fill
    monkeypatch.setattr(cast, "_fill", lambda *given: fill(*given) ^ np.uint64(1))
    found: Any = run(cast.cast, *ON_CPU, "--quick", "--what", "within")
    assert isinstance(found.exception, WrongCopyError) and "8 of 8 blocks" in str(found.exception)
