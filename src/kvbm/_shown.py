"""Objects that a notebook shows as a picture.  `kvbm` says what draws them, so that no object imports its picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """Objects that a notebook shows as a picture.

    `view` returns what draws: ``svg(shown)`` is an SVG element, or None where it cannot be drawn; ``html(shown)`` is HTML.
    """

    __slots__ = ()
    view: ClassVar[Callable[[], Any]]

    def _repr_svg_(self) -> str | None:
        found: str | None = type(self).view().svg(self)
        return found

    def _repr_html_(self) -> str:
        return str(type(self).view().html(self))
