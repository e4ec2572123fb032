"""Sizes that a test case may have."""

from __future__ import annotations

from ..errors import SpecError

__all__ = ["GROUPS", "ROWS", "require_sizes"]

#: What m and k are multiples of: the rows and the groups of a tile of scale factors.
ROWS, GROUPS = 128, 4


def require_sizes(who: str, m: object, k: object, l: object, seed: object) -> None:  # noqa: E741
    """Refuse what are no sizes and seed of a test; `who` asks.

    Raises
    ------
    SpecError
        A size below 1 or not a multiple of what it must be, a seed below 0, no integer.
    """
    for name, value, least, multiple in (("m", m, 1, ROWS), ("k", k, 1, GROUPS), ("l", l, 1, 1), ("seed", seed, 0, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{who}: {name}: expected an integer, got {value!r}")
        if value < least:
            raise SpecError(f"{who}: {name}: expected at least {least}, got {value}")
        if value % multiple:
            raise SpecError(f"{who}: {name}: expected a multiple of {multiple}, got {value}")
