"""Settings that users give to an engine for kvbm: unknown names are errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import BindError
from ..layout.naming import suggestion

__all__ = ["flag_of", "require_known", "unknown"]


def unknown(given: Mapping[str, Any], known: Iterable[str], places: Mapping[str, str] = MappingProxyType({})) -> str:
    """The end of a message about an unknown setting, with its place or similar names; empty if all settings are known."""
    names = sorted(known)
    for name in given:
        if name not in names:
            if place := places.get(name):
                return f"{name}: got a setting that nobody reads here; it belongs {place}"
            similar = suggestion(str(name), names)
            return f"{name!s:.100}: expected one of {', '.join(names)}, got a setting that nobody reads.{similar}"
    return ""


def require_known(
    given: Mapping[str, Any], known: Iterable[str], where: str, places: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise `BindError` for an unknown setting, such as a misspelt one.  `where` names the settings.

    `places` says where names belong that users write here by mistake.
    """
    if problem := unknown(given, known, places):
        raise BindError(f"{where}: {problem}")


def flag_of(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """A setting of ``kv_connector_extra_config`` that is true or false; `BindError` for anything else."""
    found = given.get(name, default)
    if not isinstance(found, bool):
        raise BindError(f"kv_connector_extra_config: {name}: expected true or false, got {found!r:.100}")
    return found
