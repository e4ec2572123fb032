"""Checks of the sizes of test cases."""

from __future__ import annotations

from .._arguments import number
from ..errors import SpecError

#: m and k must be multiples of these: the rows and the groups of a tile of scale factors.
ROWS, GROUPS = 128, 4


def require_sizes(who: str, m: object, k: object, l: object, seed: object) -> None:  # noqa: E741
    """Raise `SpecError` if a size or the seed of a test is not an integer, too small, or not the required multiple.

    `who` is the start of messages.
    """
    for name, value, least, multiple in (("m", m, 1, ROWS), ("k", k, 1, GROUPS), ("l", l, 1, 1), ("seed", seed, 0, 1)):
        if number(f"{who}: {name}", value, least, error=SpecError) % multiple:
            raise SpecError(f"{who}: {name}: expected a multiple of {multiple}, got {value}")
