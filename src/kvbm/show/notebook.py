"""Layouts, pools, plans and reshardings in a notebook: their pictures, or as text where matplotlib is not installed."""

from __future__ import annotations

import html as markup
import io
from typing import TYPE_CHECKING

from ..errors import KvbmError
from ..layout import spec
from ..layout.layout import Layout
from ..layout.shapes import load_shape
from ..planner.plan import Plan
from ..pool.pool import Pool
from . import html as gallery
from .figure import draw_layout
from .plan_figure import draw_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .._shown import Shown
    from ..layout.resolved import Resolved

_BLOCKS = 1024


def svg(shown: Shown) -> str | None:
    """The picture of a Layout, Pool, Plan or Resharding as an SVG element; None where it cannot be drawn.

    A layout is drawn at the first shape of `spec.example_shape`, with 1,024 blocks.  Pictures need matplotlib.
    """
    try:
        figure = _figure(shown)
    except KvbmError:
        return None
    return None if figure is None else gallery.svg_element(figure, repr(shown))


def html(shown: Shown) -> str:
    """The picture of `svg` where it can be drawn, else the text of ``kvbm show``, or what ``str`` returns."""
    picture = svg(shown)
    if picture is not None:
        return f'<div style="max-width:800px;background:#fff">{picture}</div>'
    resolved = _resolved(shown)
    return f"<pre>{markup.escape(_drawing(resolved) if resolved is not None else str(shown))}</pre>"


def _figure(shown: Shown) -> Figure | None:
    if isinstance(shown, Plan):
        return draw_plan(shown)
    if isinstance(shown, Layout | Pool):
        resolved = _resolved(shown)
        return None if resolved is None else draw_layout(resolved)
    from ..reshard import Resharding
    from . import reshard_figure as picture

    assert isinstance(shown, Resharding), type(shown)
    return picture.draw(shown)


def _resolved(shown: Shown) -> Resolved | None:
    if isinstance(shown, Pool):
        return shown.resolved
    if isinstance(shown, Layout) and (shape := spec.example_shape(shown)) is not None:
        return shown.resolve(load_shape(shape), _BLOCKS)
    return None


def _drawing(resolved: Resolved) -> str:
    from rich.console import Console

    from . import text as draw

    text = io.StringIO()
    draw.show(Console(file=text, width=100, highlight=False, color_system=None), resolved)
    return text.getvalue()
