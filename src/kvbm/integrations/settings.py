"""Settings that users give to an engine for kvbm: unknown names are errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import BindError
from ..layout.naming import suggestion

__all__ = ["require_known", "unknown"]


def unknown(given: Mapping[str, Any], known: Iterable[str]) -> str:
    """The end of a message about a setting that nobody reads, with similar names; empty if there is none."""
    names = sorted(known)
    for name in given:
        if name not in names:
            similar = suggestion(str(name), names)
            return f"{name!s:.100}: expected one of {', '.join(names)}, got a setting that nobody reads.{similar}"
    return ""


def require_known(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise `BindError` for a setting that nobody reads, such as a misspelt one.

    Parameters
    ----------
    given : mapping
        The settings.
    known : iterable of str
        The names of all settings.
    where : str
        The name of the settings, for the message.
    """
    if problem := unknown(given, known):
        raise BindError(f"{where}: {problem}")
