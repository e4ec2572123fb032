"""Which versions of an engine an integration was tested with, and what is done with others."""

from __future__ import annotations

import logging
import re

from ..errors import BindError, escaping
from .taken import lacking

__all__ = ["require_version"]

logger = escaping(logging.getLogger(__name__))

_WARNED: set[tuple[str, str, str]] = set()


def require_version(engine: str, found: str, first: str, end: str, part: str = "") -> None:
    """Raise `BindError` for a version of an engine that was not tested, and lacks something that kvbm takes.

    Tested are ``first <= found < end``.  What is behind the numbers, such as ``.post1``, does not count.  Another version is
    compared with `taken.TAKEN`: with `part`, what is loaded, if it takes other names than the rest.  If it has all of that, one
    warning is logged, and it is used.
    """
    number, low, high = (_numbers(version) for version in (found, first, end))
    if low <= number < high or (engine, found, part) in _WARNED:
        return
    where = f"kvbm.integrations.{engine.lower()}"
    if missing := list(lacking(f"{engine} {part}".strip())):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BindError(
            f"{where}: expected {engine} {first} or newer, before {end}, got {found}, which lacks {missing[0]}{more}; install one "
            "of these, or a kvbm-layouts that knows yours"
        )
    _WARNED.add((engine, found, part))
    logger.warning(
        "%s: %s %s was not tested, only %s or newer, before %s. It has all names that kvbm takes, so it is used; what they do may "
        "differ", where, engine, found, first, end,
    )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
