"""What a notebook asks of an object before it shows it; `kvbm.notebook` answers, and is imported at the first question."""

from __future__ import annotations

import importlib

__all__ = ["Shown"]


class Shown:
    """Objects that a notebook shows as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str | None:
        found: str | None = importlib.import_module(".notebook", __package__).svg(self)
        return found

    def _repr_html_(self) -> str:
        return str(importlib.import_module(".notebook", __package__).html(self))
