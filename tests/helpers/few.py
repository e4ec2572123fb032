"""Of many cases a few, spread over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items: the first, the last, and some between them; one is the middle one."""
    last = len(items) - 1
    steps = {last // 2} if count == 1 else {last * i // (count - 1) for i in range(count)}
    return [items[i] for i in sorted(steps)]


def few(cases: Iterable[Any], count: int) -> list[Any]:
    """Parameters: all cases, of which `make test` runs at most `count`."""
    cases = list(cases)
    run = set(spread(range(len(cases)), count))
    return [case if number in run else in_full(case) for number, case in enumerate(cases)]


def in_full(case: Any) -> Any:
    """A parameter that only `make full` runs; a tuple is several ones."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
