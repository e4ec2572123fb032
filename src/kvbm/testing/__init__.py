"""The tools that test kvbm's kernels, for your own kernels.

Examples
--------
>>> from kvbm.testing import SMOKE_TESTS
>>> print(SMOKE_TESTS[0])
tiny_single 128×256×1

Modules are imported when they are first used.  torch is imported only for data of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..copy.diff import locate
    from .cases import CORRECTNESS_TESTS, PERFORMANCE_TESTS, SMOKE_TESTS, TestCase
    from .compare import allclose_with_error, make_match_reference
    from .digests import digest
    from .layouts import LayoutCase, layout_cases
    from .timing import Benchmark, BenchmarkRecord, benchmark_kernel, write_csv

#: Public name → the module that defines it.
_HOME = {
    **dict.fromkeys(("CORRECTNESS_TESTS", "PERFORMANCE_TESTS", "SMOKE_TESTS", "TestCase"), "cases"),
    **dict.fromkeys(("allclose_with_error", "make_match_reference"), "compare"),
    "digest": "digests",
    **dict.fromkeys(("LayoutCase", "layout_cases"), "layouts"),
    "locate": ".copy.diff",
    **dict.fromkeys(("Benchmark", "BenchmarkRecord", "benchmark_kernel", "write_csv"), "timing"),
}

__all__ = [
    "CORRECTNESS_TESTS", "PERFORMANCE_TESTS", "SMOKE_TESTS", "Benchmark", "BenchmarkRecord", "LayoutCase", "TestCase",
    "allclose_with_error", "benchmark_kernel", "digest", "layout_cases", "locate", "make_match_reference", "write_csv",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
