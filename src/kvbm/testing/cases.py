"""Test cases with sizes and a seed, and three suites of them.  A case holds no data: they are generated from its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from .._arguments import quoted
from ..errors import SpecError
from .sizes import require_sizes


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
        Seed of the data, 0 or larger.
    name : str
        Name of the case.

    Raises
    ------
    SpecError
        A size is not a positive integer or not such a multiple, the seed is negative, or the name is empty.

    Examples
    --------
    >>> TestCase(128, 256, 1, seed=7, name="mine")
    TestCase(m=128, k=256, l=1, seed=7, name='mine')
    >>> TestCase(100, 256, 1, seed=7, name="mine")
    Traceback (most recent call last):
        ...
    kvbm.errors.SpecError: test case 'mine': m: expected a multiple of 128, got 100
    """

    __test__: ClassVar[bool] = False  # pytest collects classes with names that begin with Test

    m: int
    k: int
    l: int  # noqa: E741  (what everybody calls it)
    seed: int
    name: str

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name.strip():
            raise SpecError(f"test case: name: expected a text that is not empty, got {quoted(self.name)}")
        require_sizes(f"test case {self.name!r}", self.m, self.k, self.l, self.seed)

    @property
    def sizes(self) -> str:
        """The sizes as a text: ``128×256×1``."""
        return f"{self.m}×{self.k}×{self.l}"

    def data(self, generate: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Generate the inputs.  Equal calls return equal data in new memory.

        Parameters
        ----------
        generate : callable, optional
            Called as ``generate(m=…, k=…, l=…, seed=…, **options)``.  Default: `kvbm.testing.nvfp4.generate_input`.
        **options
            Passed to `generate`, such as ``device="cuda"``.
        """
        if generate is None:
            from . import nvfp4

            generate = nvfp4.generate_input
        if not callable(generate):
            raise SpecError(f"test case {self.name!r}: generate: expected a function, got {quoted(generate)}")
        return generate(m=self.m, k=self.k, l=self.l, seed=self.seed, **options)

    def __str__(self) -> str:
        return f"{self.name} {self.sizes}"


#: Quick cases, some seconds on a CPU: does the kernel run.
SMOKE_TESTS = (
    TestCase(128, 256, 1, seed=1111, name="tiny_single"),
    TestCase(256, 512, 2, seed=1222, name="small_batch"),
)

#: Cases from the smallest sizes on: is the kernel correct.
CORRECTNESS_TESTS = (
    TestCase(128, 256, 1, seed=2111, name="min_size"),
    TestCase(256, 512, 4, seed=2222, name="medium"),
    TestCase(512, 1024, 8, seed=2333, name="large"),
    TestCase(1024, 2048, 16, seed=2444, name="xlarge"),
)

#: Sizes at which the memory of a GPU is the limit: is the kernel fast.
PERFORMANCE_TESTS = (
    TestCase(512, 2048, 32, seed=3111, name="perf_medium"),
    TestCase(1024, 4096, 64, seed=3222, name="perf_large"),
)

#: Names of the command line → suites.
SUITES = {"smoke": SMOKE_TESTS, "correctness": CORRECTNESS_TESTS, "performance": PERFORMANCE_TESTS}
