"""Pictures of layouts, for `kvbm show --svg` and `kvbm gallery`; `kvbm.show.plan_figure` draws copies.

`kvbm.show.contents` computes the contents, so that tests can check a picture against addresses.  This module only draws them.
It uses matplotlib, which is imported when the first picture is drawn.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MissingPackageError
from ..layout.resolved import Resolved
from ..planner.plan import count_text
from .contents import Cell, Row, Section, sections
from .facts import address_lines, exact_size, one_block, pitch_lines, plane_lines, scale_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- looks ---------------------------------------------------------------------------------------------------------

WIDTH = 8.0  # inches; 800 px at 100 dots per inch
LEFT, RIGHT, EDGE = 1.22, 1.3, 0.16
BAND = WIDTH - LEFT - RIGHT
TALL, GAP = 0.46, 0.24  # height of a row, and of the space between two rows

PAPER, _INK, MUTED, LINE = "#ffffff", "#1b1f24", "#59636e", "#7d8791"
PLAIN, _FAN, _PAD = "#e6eaee", "#f3f5f7", "#ffffff"
#: Colours of fills and lines that colour-blind readers can distinguish (Okabe and Ito).  The fills are light enough for text.
FILLS = ("#a9d0ea", "#f8c793", "#a6dcc6", "#e0bcd4")
HUES = ("#0072b2", "#b85000", "#00805d", "#9a4f86")
#: Colours of planes, which may appear beside K and V: the other two of the above, then yellow and grey.
PLANE_FILLS = ("#a6dcc6", "#e0bcd4", "#f1e59b", "#c4cbd3")
PLANE_HUES = ("#00805d", "#9a4f86", "#7a6a00", "#59636e")

#: Hatch and name of the bytes between members: padding, and bytes of other planes.
_GAPS, _GAP_NAMES = ("/////", "...."), ("padding, never touched", "other planes")

#: Two font families instead of twenty, because SVG repeats the list at every text. Text stays text, and $ is an ordinary character.
_SETTINGS = {
    "font.sans-serif": ["DejaVu Sans", "Verdana"], "font.monospace": ["DejaVu Sans Mono"], "text.color": _INK,
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "kvbm",
    "hatch.linewidth": 0.6, "hatch.color": MUTED,
}  # fmt: skip


@contextmanager
def looks(settings: Mapping[str, Any] | None = None, extra: str = "show") -> Iterator[None]:
    """Context manager: use matplotlib's defaults and our settings.  Your settings have no effect, and are restored at the end.

    Further `settings` override ours.  `extra` is the extra of the package that installs matplotlib, for the error message.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingPackageError(
            f"pictures need matplotlib, which is not installed: pip install 'kvbm-layouts[{extra}]'"
        ) from None
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({**_SETTINGS, **(settings or {})})
        yield


def inches(text: str, size: float, family: str = "sans", weight: str = "normal") -> float:
    """Width of a text in the fonts that come with matplotlib."""
    return size * _width(text, family, weight) / 72


@functools.lru_cache(maxsize=4096)
def _width(text: str, family: str, weight: str) -> float:
    """Width at size 1.  The curves of these fonts have their extreme points as vertices."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path as Outline
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    font = FontProperties(family="DejaVu Sans Mono" if family == "monospace" else "DejaVu Sans", weight=weight)
    path = TextPath((0, 0), text, size=100, prop=font)
    across = path.vertices[path.codes != Outline.CLOSEPOLY, 0]
    return float(across.max() - across.min()) / 100


class Sheet:
    """A picture that grows downwards.  All measures are inches from its upper left corner."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(WIDTH, 1.0), facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, WIDTH)
        self.y = EDGE

    def finish(self) -> Figure:
        height = self.y + EDGE
        self.figure.set_size_inches(WIDTH, height)
        self.axes.set_ylim(height, 0)
        return self.figure

    def text(self, x: float, y: float, text: str, *, size: float = 9.0, room: float = math.inf, **rest: Any) -> None:
        """Text whose middle is at `y`.  If it is wider than `room`, it is made smaller, then cut."""
        family, weight = rest.get("family", "sans"), rest.get("weight", "normal")
        while size > 6.5 and inches(text, size, family, weight) > room:
            size -= 0.5
        if inches(text, size, family, weight) > room:
            cuts = range(1, len(text))
            fit = bisect.bisect_right(cuts, room, key=lambda n: inches(text[:n].rstrip() + "…", size, family, weight))
            text = text[: max(fit, 1)].rstrip() + "…"
        rest = {"color": _INK, "ha": "left", "va": "center_baseline", **rest}
        self.axes.text(x, y, text, size=size, parse_math=False, **rest)

    def box(self, x: float, y: float, width: float, height: float, fill: str, **rest: Any) -> None:
        from matplotlib.patches import Rectangle

        rest = {"edgecolor": LINE, "linewidth": 0.7, "clip_on": False, **rest}
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, **rest))

    def stripes(self, x: float, y: float, width: float, height: float, count: int) -> None:
        """Alternating stripes of K and V: one box in K's colour, and on it one path in V's colour."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        self.box(x, y, width, height, FILLS[0], linewidth=0, edgecolor="none")
        each = width / count
        lefts = [x + turn * each for turn in range(1, count, 2)]
        corners = [
            Outline(
                [(left, y), (left + each, y), (left + each, y + height), (left, y + height), (left, y)], closed=True
            )
            for left in lefts
        ]
        self.axes.add_patch(
            PathPatch(Outline.make_compound_path(*corners), facecolor=FILLS[1], edgecolor="none", clip_on=False)
        )

    def turns(self, x: float, y: float, width: float, height: float, count: int) -> None:
        """Alternating stripes of K and V in their true number.  Of more than 16: the first four, dots, and the last two."""
        if count <= 16:
            self.stripes(x, y, width, height, count)
            return
        each = min(0.07, width / 10)
        self.stripes(x, y, 4 * each, height, 4)
        self.stripes(x + width - 2 * each, y, 2 * each, height, 2)
        middle = x + width / 2 + each
        for turn in (-1, 0, 1):
            self.box(middle + turn * each / 2, y + height / 2, 0.015, 0.015, MUTED, linewidth=0)

    def fan(self, upper: tuple[float, float], lower: tuple[float, float], top: float, bottom: float) -> None:
        """The shaded area between a member and the row that shows its inside."""
        from matplotlib.patches import Polygon

        corners = [(upper[0], top), (upper[1], top), (lower[1], bottom), (lower[0], bottom)]
        self.axes.add_patch(Polygon(corners, facecolor=_FAN, edgecolor="none", zorder=0.5, clip_on=False))
        for x, to in zip(upper, lower, strict=True):
            self.axes.plot(
                [x, to], [top, bottom], color=LINE, linewidth=0.6, linestyle=(0, (3, 2)), zorder=0.6, clip_on=False
            )

    def head(self, title: str, lines: Sequence[str]) -> None:
        self.text(EDGE, self.y + 0.1, title, size=13.5, weight="bold", room=WIDTH - 2 * EDGE)
        self.y += 0.34
        for line in lines:
            for part in textwrap.wrap(line, 112) or [""]:
                self.text(EDGE, self.y + 0.05, part, size=9, color=MUTED, room=WIDTH - 2 * EDGE)
                self.y += 0.18

    def mono(self, lines: Sequence[str], size: float = 8.0) -> None:
        for line in lines:
            # SVG viewers merge consecutive spaces, so aligned text needs no-break spaces.
            kept = re.sub(r"^ +| {2,}", lambda match: "\N{NO-BREAK SPACE}" * len(match[0]), line)
            self.text(EDGE, self.y + 0.06, kept, size=size, family="monospace", room=WIDTH - 2 * EDGE)
            self.y += 0.165

    def gutters(self, term: str, about: str, right: str, below: str) -> None:
        """The two lines of text left and right of the row at `y`."""
        up, down = self.y + TALL / 2 - 0.085, self.y + TALL / 2 + 0.095
        room = LEFT - EDGE - 0.08
        self.text(EDGE, up, term, size=10, weight="bold", room=room)
        self.text(EDGE, down, about, size=7.5, color=MUTED, room=room)
        left = LEFT + BAND + 0.1
        room = RIGHT - 0.1 - 0.08
        self.text(left, up if below else (up + down) / 2, right, size=9, room=room)
        self.text(left, down, below, size=7.5, color=MUTED, room=room)

    def words(self, x: float, y: float, width: float, label: str, number: str, **rest: Any) -> None:
        """The label of a cell above the number of its first byte.  If there is no room, the number is left out, then the label."""
        middle, room = x + width / 2, width - 0.06
        has_number = bool(number) and inches(number, 6.5) <= room
        at = y + (TALL / 2 - 0.07 if has_number else TALL / 2)
        if label and inches(label, 6.5) <= room + 0.03:
            self.text(middle, at, label, size=8.5, room=room + 0.03, ha="center", **rest)
        if has_number:
            self.text(middle, y + TALL / 2 + 0.09, number, size=6.5, color=MUTED, ha="center")

    def skipped(self, x: float, y: float, width: float, count: int) -> None:
        self.text(x + width / 2, y + TALL / 2 - 0.07, "…", size=11, color=MUTED, ha="center")
        more = next((text for text in (f"{count:,} more", f"{count:,}") if inches(text, 6.5) < width - 0.04), "")
        self.text(x + width / 2, y + TALL / 2 + 0.09, more, size=6.5, color=MUTED, ha="center")

    def key(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """Draw the legend of fills and hatches: (fill, hatch, text)."""
        x = EDGE
        for fill, hatch, text in entries:
            self.box(x, self.y + 0.01, 0.2, 0.12, fill, hatch=hatch or None)
            self.text(x + 0.26, self.y + 0.075, text, size=8, color=MUTED)
            x += 0.26 + inches(text, 8) + 0.24
        self.y += 0.24 if entries else 0.0


# ---- a layout ------------------------------------------------------------------------------------------------------


def draw_layout(resolved: Resolved) -> Figure:
    """Draw a layout: its allocations, and the inside of the first one, level by level.

    The figure is 800 px wide.  The label of each patch of a member is ``"TERM LABEL @START +NBYTES"``.  Raises `KvbmError` if
    matplotlib is not installed.
    """
    layout, shape = resolved.layout, resolved.shape
    with looks():
        sheet = Sheet()
        names = [""] if len(layout.orders) == 1 else ["K: ", "V: "]
        lines = [layout.title] if layout.title else []
        lines += [f"{name}{order}" for name, order in zip(names, layout.orders, strict=True)]
        lines += [f"{name}: {text}" for name, text in plane_lines(resolved)]
        lines += [f"{name}: {text}" for name, text in scale_lines(resolved)]
        lines += [f"{name}: {text}" for name, text in pitch_lines(resolved)]
        blocks = count_text(resolved.num_blocks, "block")
        lines.append(f"{str(shape).replace(',', ', ')}; {blocks} of {exact_size(resolved.block_bytes)}")
        sheet.head(layout.name, lines)
        sheet.y += 0.14
        first, *further = sections(resolved)
        table = first.rows[0]
        sheet.y += 0.16 if table.blocks else 0.0
        opened: tuple[float, float] | None = _draw_row(sheet, table, resolved, is_table=True)[0]
        top = sheet.y
        for turn, section in enumerate(further):
            if section.title:
                sheet.y += 0.26
                _draw_title(sheet, section)
            if turn or section.plane is not None:
                opened = None  # a fan from the rows above would cover the rows between, or the text about a plane
            for number, row in enumerate(section.rows):
                sheet.y += 0.12 if section.title and number == 0 else GAP
                if opened is not None:
                    sheet.fan(opened, (LEFT, LEFT + BAND), top, sheet.y)
                places = _draw_row(sheet, row, resolved)
                opened, top = places[row.opened], sheet.y
        sheet.y += 0.2
        sheet.key(_key(resolved, [row for section in (first, *further) for row in section.rows]))
        sheet.text(EDGE, sheet.y + 0.06, f"One block: {one_block(resolved)}.", size=8.5, room=WIDTH - 2 * EDGE)
        sheet.y += 0.22
        for part in resolved.planes:
            for o in range(len(part.orders)):
                sheet.mono(address_lines(part, o, 108))
        return sheet.finish()


def _draw_title(sheet: Sheet, section: Section) -> None:
    plane, half = section.plane, section.half
    colour = PLANE_HUES[plane % len(PLANE_HUES)] if plane is not None else HUES[half or 0]
    sheet.text(EDGE, sheet.y - 0.02, section.title, size=9.5, weight="bold", color=colour)
    left = EDGE + inches(section.title, 9.5, weight="bold") + 0.14
    about = section.about if section.rows else f"{section.about}: one element"
    if about:
        sheet.text(left, sheet.y - 0.02, about, size=8.5, color=MUTED, room=WIDTH - EDGE - left)


def _draw_row(sheet: Sheet, row: Row, resolved: Resolved, *, is_table: bool = False) -> list[tuple[float, float]]:
    """Draw a row at `sheet.y`, then move `sheet.y` to its lower edge; return the left and right edge of each cell."""
    y = sheet.y
    if row.is_record:
        gaps = sum(cell.padding for cell in row.members)
        right, below = exact_size(row.step), f"{row.extent:,} runs of planes" if row.extent > 1 else ""
        below = f"{exact_size(gaps)} of gaps" if gaps and row.extent <= len(row.cells) else below
    elif is_table:
        sizes = sorted({cell.nbytes for cell in row.members})
        right = f"{row.extent:,} × {exact_size(sizes[0])}" if len(sizes) == 1 else f"{row.extent:,}"
        below = f"= {exact_size(resolved.nbytes)}" if row.extent > 1 else ""
    else:
        right = f"{row.extent:,} × {exact_size(row.step)}"
        padding = row.members[0].padding
        what = "between" if row.between else "padding in each"
        below = f"{exact_size(padding)} {what}" if padding else f"= {exact_size(row.extent * row.step)}"
    sheet.gutters(row.term, row.about, right, below)
    gap = 0.1 if is_table and row.extent > 1 else 0.0  # allocations are drawn apart
    dots = 0.66
    count = len(row.members)
    skips = len(row.cells) - count
    room = BAND - dots * skips - gap * (len(row.cells) - 1)
    bytes_shown = sum(cell.nbytes + cell.padding for cell in row.members)
    least = min(0.62, room / count) if row.is_record else room / count  # in a record the rest of the width is shared by size
    x, places = LEFT, []
    for place, cell in enumerate(row.cells):
        wide = dots
        if isinstance(cell, Cell):
            wide = least + (room - least * count) * (cell.nbytes + cell.padding) / bytes_shown
        places.append((x, x + wide))
        if isinstance(cell, int):
            if not is_table:  # a dashed box continues an axis, but not allocations
                sheet.box(x, y, wide, TALL, PAPER, linestyle=(0, (2, 2)))
            sheet.skipped(x, y, wide, cell)
        else:
            _draw_cell(sheet, row, cell, x, wide, is_table=is_table, is_open=place == row.opened)
        x += wide + gap
    for start, end, name in row.blocks:
        x, to = places[start][0], places[end][1]
        sheet.axes.plot([x, x, to, to], [y - 0.05, y - 0.09, y - 0.09, y - 0.05], color=LINE, linewidth=0.8)
        sheet.text((x + to) / 2, y - 0.17, name, size=8, color=MUTED, ha="center", room=to - x + 0.2)
    sheet.y += TALL
    return places


def _draw_cell(sheet: Sheet, row: Row, cell: Cell, x: float, width: float, *, is_table: bool, is_open: bool) -> None:
    y = sheet.y
    pad = max(0.07, width * cell.padding / (cell.nbytes + cell.padding)) if cell.padding else 0.0
    held = width - pad
    fill = PLAIN if cell.half is None else FILLS[cell.half]
    if cell.plane is not None and cell.half is None:
        fill = PLANE_FILLS[cell.plane % len(PLANE_FILLS)]
    sheet.box(x, y, held, TALL, fill, hatch="xx" if row.opaque else None,
              label=f"{row.term} {cell.label} @{cell.start} +{cell.nbytes}")  # fmt: skip
    if pad:
        sheet.box(x + held, y, pad, TALL, _PAD, hatch=_GAPS[row.between], label=f"padding +{cell.padding}")
    if row.turns:
        sheet.turns(x, y + TALL - 0.07, held, 0.07, row.turns)
        sheet.box(x, y, held, TALL, "none")
    if is_table:
        number = f"table[{cell.start:,}]" if row.extent > 1 else ""
    else:
        number = f"{cell.start:,}"
        if inches(number, 6.5) > held - 0.06:
            number = exact_size(cell.start)
    weight = "bold" if is_open and len(row.cells) > 1 else "normal"
    if row.opaque:
        sheet.box(x + held / 2 - 1.95, y + 0.11, 3.9, TALL - 0.22, fill, linewidth=0, edgecolor="none")
        sheet.text(x + held / 2, y + TALL / 2, cell.label, size=8.5, ha="center")
    else:
        sheet.words(x, y - (0.03 if row.turns else 0.0), held, cell.label, number, weight=weight)


def _key(resolved: Resolved, shown: Sequence[Row]) -> list[tuple[str, str, str]]:
    entries = []
    if resolved.shape.no == 2 and any(cell.half is not None for row in shown for cell in row.members):
        entries += [(FILLS[0], "", "K"), (FILLS[1], "", "V")]
    for index, part in enumerate(resolved.parts):
        entries.append((PLANE_FILLS[index % len(PLANE_FILLS)], "", part.plane))
    padded = {row.between for row in shown for cell in row.members if cell.padding}
    entries += [(_PAD, _GAPS[between], _GAP_NAMES[between]) for between in sorted(padded)]
    if any(row.opaque for row in shown):
        entries.append((PLAIN, "xx", "order not promised"))
    if any(row.turns for row in shown):
        entries.append((PLAIN, "", "both; the stripe: how they alternate (dots: more than 16 in turn)"))
    return entries
