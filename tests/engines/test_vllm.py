"""vLLM on a machine without a GPU, with kvbm and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import result, run


def generate(model: Path, runs: list[list[int]], *, new: int = 8, limit: float = 240, **llm: Any) -> list[list[dict[str, Any]]]:
    """What `programs/generate.py` finds."""
    settings = {"llm": {"model": str(model), **llm}, "runs": runs, "new": new}
    found: list[list[dict[str, Any]]] = result(run("generate", json.dumps(settings), limit=limit))
    return found


def test_stock(models: Callable[[str], Path]) -> None:
    """Without anything of kvbm: nothing survives a reset."""
    first, second = generate(models("llama"), [[200, 100], [200, 100]])
    assert [one["tokens"] for one in first] == [one["tokens"] for one in second]
    assert [one["cached"] for one in second] == [0, 0]
