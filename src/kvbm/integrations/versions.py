"""Which versions of an engine an integration was tested with."""

from __future__ import annotations

import re

from ..errors import BindError

__all__ = ["require_version"]


def require_version(engine: str, found: str, first: str, end: str) -> None:
    """Raise `BindError` unless ``first <= found < end``; what is behind the numbers, such as ``.post1``, does not count."""
    number, low, high = (_numbers(version) for version in (found, first, end))
    if not low <= number < high:
        raise BindError(
            f"kvbm.integrations.{engine.lower()}: expected {engine} {first} or newer, before {end}, got {found}; install one of "
            "these, or a kvbm-layouts that knows yours"
        )


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
