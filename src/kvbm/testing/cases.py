"""Test cases by their sizes, and three suites of them.  A case holds no data: those are made from its seed, on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import SpecError
from .sizes import require_sizes

__all__ = ["CORRECTNESS_TESTS", "PERFORMANCE_TESTS", "SMOKE_TESTS", "SUITES", "TestCase"]


@dataclass(frozen=True)
class TestCase:
    """Sizes and seed of one test of a batched matrix kernel.

    Parameters
    ----------
    m : int
        Rows; a multiple of 128.
    k : int
        Elements of a row; a multiple of 4.
    l : int
        Matrices of the batch.
    seed : int
        What the data are made from, 0 or larger.
    name : str

    Raises
    ------
    SpecError
        A size that is none, or no such multiple; a seed below zero; no name.

    Examples
    --------
    >>> TestCase(128, 256, 1, seed=7, name="mine")
    TestCase(m=128, k=256, l=1, seed=7, name='mine')
    >>> TestCase(100, 256, 1, seed=7, name="mine")
    Traceback (most recent call last):
        ...
    kvbm.errors.SpecError: test case 'mine': m: expected a multiple of 128, got 100
    """

    __test__: ClassVar[bool] = False  # its name begins as those that pytest collects

    m: int
    k: int
    l: int  # noqa: E741  (what everybody calls it)
    seed: int
    name: str

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name.strip():
            raise SpecError(f"test case: name: expected a text that is not empty, got {self.name!r}")
        require_sizes(f"test case {self.name!r}", self.m, self.k, self.l, self.seed)

    @property
    def sizes(self) -> str:
        """As text: ``128×256×1``."""
        return f"{self.m}×{self.k}×{self.l}"

    def data(self, generate: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Make the inputs; nothing is kept, so equal calls give equal data in memory of their own.

        Parameters
        ----------
        generate : callable, optional
            ``generate(m=…, k=…, l=…, seed=…, **options)``; `kvbm.testing.nvfp4.generate_input` if not given.
        **options
            Passed on, such as ``device="cuda"``.
        """
        if generate is None:
            from . import nvfp4

            generate = nvfp4.generate_input
        return generate(m=self.m, k=self.k, l=self.l, seed=self.seed, **options)

    def __str__(self) -> str:
        return f"{self.name} {self.sizes}"


#: Seconds on a CPU: does it run at all.
SMOKE_TESTS = (
    TestCase(128, 256, 1, seed=1111, name="tiny_single"),
    TestCase(256, 512, 2, seed=1222, name="small_batch"),
)

#: From the smallest sizes on: is it right.
CORRECTNESS_TESTS = (
    TestCase(128, 256, 1, seed=2111, name="min_size"),
    TestCase(256, 512, 4, seed=2222, name="medium"),
    TestCase(512, 1024, 8, seed=2333, name="large"),
    TestCase(1024, 2048, 16, seed=2444, name="xlarge"),
)

#: Sizes at which a GPU's memory is what limits it: is it fast.
PERFORMANCE_TESTS = (
    TestCase(512, 2048, 32, seed=3111, name="perf_medium"),
    TestCase(1024, 4096, 64, seed=3222, name="perf_large"),
)

#: By the names that the command line knows.
SUITES = {"smoke": SMOKE_TESTS, "correctness": CORRECTNESS_TESTS, "performance": PERFORMANCE_TESTS}
