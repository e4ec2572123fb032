"""Pictures of layouts and of copies, for `kvbm show --svg`, `kvbm plan --svg` and `kvbm gallery`.

What is shown is worked out in `kvbm.cells`, and here only drawn, so that a picture can be checked against addresses.
matplotlib draws; it is imported when the first picture is made.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cells import Cell, Row, Section, sections
from .errors import KvbmError
from .facts import address_lines, exact_size, one_block, picked, pitch_lines, plane_lines
from .nest import Form, Mode, Part
from .planner import Plan
from .resolved import Resolved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Sheet", "draw_layout", "draw_plan", "inches", "looks"]

# ---- looks ---------------------------------------------------------------------------------------------------------

WIDTH = 8.0  # inches; 800 px at 100 dots an inch
_LEFT, _RIGHT, EDGE = 1.22, 1.3, 0.16
_BAND = WIDTH - _LEFT - _RIGHT
_TALL, _GAP = 0.46, 0.24  # of a row, and of what is between two

PAPER, _INK, MUTED, LINE = "#ffffff", "#1b1f24", "#59636e", "#7d8791"
PLAIN, _FAN, _PAD = "#e6eaee", "#f3f5f7", "#ffffff"
#: Fills and lines: hues that stay apart for the colour-blind (Okabe and Ito), light enough for text on them.
FILLS = ("#a9d0ea", "#f8c793", "#a6dcc6", "#e0bcd4")
HUES = ("#0072b2", "#b85000", "#00805d", "#9a4f86")
#: Of planes, which may stand beside K and V: the other two hues, then a yellow and a grey.
PLANE_FILLS = ("#a6dcc6", "#e0bcd4", "#f1e59b", "#c4cbd3")
PLANE_HUES = ("#00805d", "#9a4f86", "#7a6a00", "#59636e")

#: What lies between members: hatch and name of bytes of nobody, and of those of other planes.
_GAPS, _GAP_NAMES = ("/////", "...."), ("padding, never touched", "other planes")

#: Two families instead of twenty: SVG repeats them at every word. Text stays text, and a $ in a title is a $.
_SETTINGS = {
    "font.sans-serif": ["DejaVu Sans", "Verdana"], "font.monospace": ["DejaVu Sans Mono"], "text.color": _INK,
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "kvbm",
    "hatch.linewidth": 0.6, "hatch.color": MUTED,
}  # fmt: skip


@contextmanager
def looks(settings: Mapping[str, Any] | None = None, extra: str = "show") -> Iterator[None]:
    """The defaults of matplotlib and ours over them, for as long as it takes: no setting of the caller's gets in, none is lost.

    Parameters
    ----------
    settings : mapping, optional
        Further ones of matplotlib's, over ours.
    extra : str
        With what matplotlib would be installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise KvbmError(
            f"pictures need matplotlib, which is not installed: pip install 'kvbm-layouts[{extra}]'"
        ) from None
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({**_SETTINGS, **(settings or {})})
        yield


@functools.lru_cache(maxsize=4096)
def inches(text: str, size: float, family: str = "sans", weight: str = "normal") -> float:
    """Width of a text in the fonts that come with matplotlib."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="DejaVu Sans Mono" if family == "monospace" else "DejaVu Sans", weight=weight)
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) / 72 if text.strip() else 0.0


class Sheet:
    """A picture that grows downwards; all measures are inches from its upper left corner."""

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
        """Text whose middle is at `y`; made smaller, then cut, where it is wider than `room`."""
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
        """K and V in turn: one box of K's colour, and over it one path of V's."""
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

    def fan(self, upper: tuple[float, float], lower: tuple[float, float], top: float, bottom: float) -> None:
        """The light between a member and the row that shows its inside."""
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
            # SVG viewers fold spaces: what is aligned must be made of spaces that do not fold.
            kept = re.sub(r"^ +| {2,}", lambda match: "\N{NO-BREAK SPACE}" * len(match[0]), line)
            self.text(EDGE, self.y + 0.06, kept, size=size, family="monospace", room=WIDTH - 2 * EDGE)
            self.y += 0.165

    def gutters(self, term: str, about: str, right: str, below: str) -> None:
        """The two lines left and right of the row that stands at `y`."""
        up, down = self.y + _TALL / 2 - 0.085, self.y + _TALL / 2 + 0.095
        room = _LEFT - EDGE - 0.08
        self.text(EDGE, up, term, size=10, weight="bold", room=room)
        self.text(EDGE, down, about, size=7.5, color=MUTED, room=room)
        left = _LEFT + _BAND + 0.1
        room = _RIGHT - 0.1 - 0.08
        self.text(left, up if below else (up + down) / 2, right, size=9, room=room)
        self.text(left, down, below, size=7.5, color=MUTED, room=room)

    def words(self, x: float, y: float, width: float, label: str, number: str, **rest: Any) -> None:
        """Label of a cell over its first byte; what does not fit is left out, the label last."""
        middle, room = x + width / 2, width - 0.06
        has_number = bool(number) and inches(number, 6.5) <= room
        at = y + (_TALL / 2 - 0.07 if has_number else _TALL / 2)
        if label and inches(label, 6.5) <= room + 0.03:
            self.text(middle, at, label, size=8.5, room=room + 0.03, ha="center", **rest)
        if has_number:
            self.text(middle, y + _TALL / 2 + 0.09, number, size=6.5, color=MUTED, ha="center")

    def skipped(self, x: float, y: float, width: float, count: int) -> None:
        self.text(x + width / 2, y + _TALL / 2 - 0.07, "…", size=11, color=MUTED, ha="center")
        more = next((text for text in (f"{count:,} more", f"{count:,}") if inches(text, 6.5) < width - 0.04), "")
        self.text(x + width / 2, y + _TALL / 2 + 0.09, more, size=6.5, color=MUTED, ha="center")

    def key(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """What fills and hatches mean: (fill, hatch, text)."""
        x = EDGE
        for fill, hatch, text in entries:
            self.box(x, self.y + 0.01, 0.2, 0.12, fill, hatch=hatch or None)
            self.text(x + 0.26, self.y + 0.075, text, size=8, color=MUTED)
            x += 0.26 + inches(text, 8) + 0.24
        self.y += 0.24 if entries else 0.0


# ---- a layout ------------------------------------------------------------------------------------------------------


def draw_layout(resolved: Resolved) -> Figure:
    """Draw a layout: its allocations, and level by level what lies inside the first.

    Parameters
    ----------
    resolved : Resolved
        The layout at a shape and a number of blocks.

    Returns
    -------
    matplotlib.figure.Figure
        800 px wide.  The label of each patch of a member is ``"TERM LABEL @START +NBYTES"``.

    Raises
    ------
    KvbmError
        matplotlib is not installed.
    """
    layout, shape = resolved.layout, resolved.shape
    with looks():
        sheet = Sheet()
        names = [""] if len(layout.orders) == 1 else ["K: ", "V: "]
        lines = [layout.title] if layout.title else []
        lines += [f"{name}{order}" for name, order in zip(names, layout.orders, strict=True)]
        lines += [f"{name}: {text}" for name, text in plane_lines(resolved)]
        lines += [f"{name}: {text}" for name, text in pitch_lines(resolved)]
        blocks = f"{resolved.num_blocks:,} block{'' if resolved.num_blocks == 1 else 's'}"
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
                opened = None  # a fan from the rows above would lie over those between, or over what is said of a plane
            for number, row in enumerate(section.rows):
                sheet.y += 0.12 if section.title and number == 0 else _GAP
                if opened is not None:
                    sheet.fan(opened, (_LEFT, _LEFT + _BAND), top, sheet.y)
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
    """Draw a row at `sheet.y`, which moves to its lower edge; return where each cell is."""
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
    gap = 0.1 if is_table and row.extent > 1 else 0.0  # allocations are apart
    dots = 0.66
    count = len(row.members)
    skips = len(row.cells) - count
    room = _BAND - dots * skips - gap * (len(row.cells) - 1)
    bytes_shown = sum(cell.nbytes + cell.padding for cell in row.members)
    least = min(0.62, room / count) if row.is_record else room / count  # in a record the rest goes by size
    x, places = _LEFT, []
    for place, cell in enumerate(row.cells):
        wide = dots
        if isinstance(cell, Cell):
            wide = least + (room - least * count) * (cell.nbytes + cell.padding) / bytes_shown
        places.append((x, x + wide))
        if isinstance(cell, int):
            if not is_table:  # the axis goes on; allocations do not
                sheet.box(x, y, wide, _TALL, PAPER, linestyle=(0, (2, 2)))
            sheet.skipped(x, y, wide, cell)
        else:
            _draw_cell(sheet, row, cell, x, wide, is_table=is_table, is_open=place == row.opened)
        x += wide + gap
    for start, end, name in row.blocks:
        x, to = places[start][0], places[end][1]
        sheet.axes.plot([x, x, to, to], [y - 0.05, y - 0.09, y - 0.09, y - 0.05], color=LINE, linewidth=0.8)
        sheet.text((x + to) / 2, y - 0.17, name, size=8, color=MUTED, ha="center", room=to - x + 0.2)
    sheet.y += _TALL
    return places


def _draw_cell(sheet: Sheet, row: Row, cell: Cell, x: float, width: float, *, is_table: bool, is_open: bool) -> None:
    y = sheet.y
    pad = max(0.07, width * cell.padding / (cell.nbytes + cell.padding)) if cell.padding else 0.0
    held = width - pad
    fill = PLAIN if cell.half is None else FILLS[cell.half]
    if cell.plane is not None and cell.half is None:
        fill = PLANE_FILLS[cell.plane % len(PLANE_FILLS)]
    sheet.box(x, y, held, _TALL, fill, hatch="xx" if row.opaque else None,
              label=f"{row.term} {cell.label} @{cell.start} +{cell.nbytes}")  # fmt: skip
    if pad:
        sheet.box(x + held, y, pad, _TALL, _PAD, hatch=_GAPS[row.between], label=f"padding +{cell.padding}")
    if row.turns:
        # True stripes up to 16; above that there are more than can be seen, and 16 say so.
        sheet.stripes(x, y + _TALL - 0.07, held, 0.07, min(row.turns, 16))
        sheet.box(x, y, held, _TALL, "none")
    if is_table:
        number = f"table[{cell.start:,}]" if row.extent > 1 else ""
    else:
        number = f"{cell.start:,}"
        if inches(number, 6.5) > held - 0.06:
            number = exact_size(cell.start)
    weight = "bold" if is_open and len(row.cells) > 1 else "normal"
    if row.opaque:
        sheet.box(x + held / 2 - 1.95, y + 0.11, 3.9, _TALL - 0.22, fill, linewidth=0, edgecolor="none")
        sheet.text(x + held / 2, y + _TALL / 2, cell.label, size=8.5, ha="center")
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
        entries.append((PLAIN, "", "both; the stripe: how they alternate (16 stand for more)"))
    return entries


# ---- a copy --------------------------------------------------------------------------------------------------------


def draw_plan(plan: Plan) -> Figure:
    """Draw a copy: the chunks of each side, the runs of the first chunk, and which run goes where.

    Of the loops of a chunk the two are drawn that matter: the one along which the source goes on after a run, and the one along
    which the destination does.  Runs are numbered as they lie in the source; their colours say where they go.

    Parameters
    ----------
    plan : Plan
        As `kvbm.plan` makes it.

    Returns
    -------
    matplotlib.figure.Figure
        800 px wide.  The label of the patch of a run is ``"source N @START"`` or ``"destination N @START"``.

    Raises
    ------
    KvbmError
        matplotlib is not installed.
    """
    with looks():
        sheet = Sheet()
        sides = [plan.src.layout.order_text, plan.dst.layout.order_text]
        lines = [
            *([f"{sides[0]}   →", sides[1]] if plan.src.layout.planes else [f"{sides[0]}   →   {sides[1]}"]),
            f"{str(plan.shape).replace(',', ', ')}; {exact_size(plan.nbytes)} a block",
            f"kernel {', '.join(plan.kernels())}",
        ]
        sheet.head(plan.title, lines)
        # What runs may be less than a part, or its loops in another order; what it copies has the same name.
        chosen = {one.label: form for run in plan.launches() for one, form in run.work}
        for part, itself in zip(plan.parts, plan.forms(), strict=True):
            form = chosen.get(part.label, itself)
            sheet.y += 0.16
            if part.label:
                name = f"{part.label}: {form.kind}, {exact_size(part.nbytes)} a block"
                sheet.text(EDGE, sheet.y + 0.02, name, size=10, weight="bold")
                sheet.y += 0.2
            _draw_part(sheet, part, form)
        sheet.y += 0.18
        note = "Runs are numbered as in the source, and coloured by where they go. Small numbers: bytes from the chunk's start."
        sheet.text(EDGE, sheet.y + 0.06, note, size=8, color=MUTED, room=WIDTH - 2 * EDGE)
        sheet.y += 0.24
        sheet.mono(str(plan).splitlines()[1:], 7.8)
        return sheet.finish()


@dataclass(frozen=True, slots=True)
class _Loops:
    """The two loops of a chunk that are drawn: `fast` steps to the source's next run, `slow` to the next row of them."""

    fast: Mode
    slow: Mode

    @classmethod
    def of(cls, part: Part) -> _Loops:
        loops, still = list(part.inner[1:]), Mode(1, 0, 0)
        if not loops:
            return cls(still, still)
        fast = min(loops, key=lambda mode: mode.src)
        others = [mode for mode in loops if mode is not fast]
        slow = min(others, key=lambda mode: mode.dst) if others else still
        return cls(fast, slow)

    def number(self, i: int, j: int) -> int:
        return j * self.fast.extent + i


def _end(mode: Mode, is_source: bool) -> tuple[int, int]:
    """What a mode steps on a side: bytes and table entries."""
    return (mode.src, mode.src_table) if is_source else (mode.dst, mode.dst_table)


def _draw_part(sheet: Sheet, part: Part, form: Form) -> None:
    loops, word = _Loops.of(part), form.word
    _draw_chunks(sheet, part, "source")
    sheet.y += _GAP
    top = sheet.y
    here = _draw_runs(sheet, part, loops, word, "source")
    sheet.y += 0.95
    there = _draw_runs(sheet, part, loops, word, "destination")
    for pair, (x, colour) in here.items():
        to, _ = there[pair]
        sheet.axes.annotate(
            "", (to, sheet.y - _TALL), (x, top + _TALL),
            arrowprops={"arrowstyle": "-|>,head_width=0.16,head_length=0.35", "color": HUES[colour], "linewidth": 1.0,
                        "shrinkA": 1, "shrinkB": 1},
        )  # fmt: skip
    if form.kind == "tile":
        _draw_tile(sheet, part, loops, word, top + _TALL)
    rest = [mode for mode in part.inner[1:] if mode not in (loops.fast, loops.slow)]
    if rest:
        times = " × ".join(f"{mode.extent:,}" for mode in reversed(rest))
        sheet.text(EDGE, top + _TALL + 0.48, f"and so {times}\ntimes a chunk", size=7.5, color=MUTED)
    sheet.y += _GAP
    _draw_chunks(sheet, part, "destination")


def _draw_chunks(sheet: Sheet, part: Part, side: str) -> None:
    """The first chunks of a block, and the last, with where each begins; the first one opens towards the runs."""
    is_source = side == "source"
    count = part.chunks
    sheet.gutters(
        side, "chunks of a block", f"{count:,} × {exact_size(part.chunk_bytes)}", f"= {exact_size(part.nbytes)}"
    )
    indices = picked(count, 3, 4)
    dots = 0.66
    shown = [index for index in indices if index is not None]
    width = (_BAND - dots * (len(indices) - len(shown))) / len(shown)
    x, y = _LEFT, sheet.y
    for index in indices:
        if index is None:
            sheet.box(x, y, dots, _TALL, PAPER, linestyle=(0, (2, 2)))
            sheet.skipped(x, y, dots, count - len(shown))
            x += dots
            continue
        offset, entry = part.start[not is_source]
        rest = index
        for mode in part.outer:
            rest, step = divmod(rest, mode.extent)
            nbytes, entries = _end(mode, is_source)
            offset, entry = offset + step * nbytes, entry + step * entries
        tabled = entry or any(_end(mode, is_source)[1] for mode in part.outer)
        where = " ".join(filter(None, (f"table+{entry:,}" if tabled else "", f"+{offset:,} B" if offset else "")))
        sheet.box(x, y, width, _TALL, PLAIN, label=f"{side} chunk {index} @{entry},{offset}")
        sheet.words(x, y, width, f"chunk {index:,}", where or "+0 B", weight="bold" if index == 0 else "normal")
        x += width
    sheet.y += _TALL
    full, first = (_LEFT, _LEFT + _BAND), (_LEFT, _LEFT + width)
    if is_source:
        sheet.fan(first, full, sheet.y, sheet.y + _GAP)
    else:
        sheet.fan(full, first, y - _GAP, y)


def _draw_runs(
    sheet: Sheet, part: Part, loops: _Loops, word: int, side: str
) -> dict[tuple[int, int], tuple[float, int]]:
    """Runs of the first chunk in the order of a side's addresses; return the middle and the colour of each."""
    is_source = side == "source"

    def stride(mode: Mode) -> int:
        return _end(mode, is_source)[0]

    # On each side the loop with the smaller step is the inner one: that is the order of the addresses.
    first, second = sorted((loops.fast, loops.slow), key=lambda mode: (mode.extent == 1, stride(mode)))
    by_dst = sorted((loops.fast, loops.slow), key=lambda mode: (mode.extent == 1, mode.dst))
    goes = by_dst[1] if by_dst[1].extent > 1 else by_dst[0]  # the colour: which row of the destination
    groups, members = picked(second.extent, 2, 4), picked(first.extent, 2, 4)
    colour_of = {index: turn for turn, index in enumerate(i for i in picked(goes.extent, 2, 4) if i is not None)}
    total = loops.fast.extent * loops.slow.extent
    below = f"{part.run_bytes // word:,} words of {word} B" if part.run_bytes >= word else f"{word} B words"
    about = "runs of chunk 0" if part.kind != "tile" else "elements"
    sheet.gutters(
        side, about, f"{total:,} × {exact_size(part.run_bytes)}", below if part.run_bytes != word else "one word each"
    )
    dots, far = 0.24, 0.1
    cells = sum(j is not None for j in groups) * sum(i is not None for i in members)
    holes = sum(j is not None for j in groups) * sum(i is None for i in members) + sum(j is None for j in groups)
    is_apart = second.extent > 1 and stride(second) != first.extent * max(stride(first), 1)
    between = far if is_apart else 0.0
    width = (_BAND - dots * holes - between * (len(groups) - 1)) / cells
    x, y = _LEFT, sheet.y
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for j in groups:
        if j is None:
            sheet.text(x + dots / 2, y + _TALL / 2, "…", size=11, color=MUTED, ha="center")
            x += dots + between
            continue
        for i in members:
            if i is None:
                sheet.box(x, y, dots, _TALL, PAPER, linestyle=(0, (2, 2)))
                sheet.text(x + dots / 2, y + _TALL / 2, "…", size=9, color=MUTED, ha="center")
                x += dots
                continue
            fast, slow = (i, j) if first is loops.fast else (j, i)
            offset = i * stride(first) + j * stride(second)
            number = loops.number(fast, slow)
            colour = colour_of.get(fast if goes is loops.fast else slow, 0)
            sheet.box(x, y, width, _TALL, FILLS[colour], label=f"{side} {number} @{offset}")
            sheet.words(x, y - 0.03, width, f"{number:,}", _short(offset, width - 0.06))
            _tick(sheet, x, y, width, part.run_bytes // word)
            found[fast, slow] = (x + width / 2, colour)
            x += width
        x += between
    sheet.y += _TALL
    return found


def _short(offset: int, room: float) -> str:
    text = f"+{offset:,}"
    return text if inches(text, 6.5) <= room else f"+{exact_size(offset)}"


def _tick(sheet: Sheet, x: float, y: float, width: float, words: int) -> None:
    """Mark the words of a run along its lower edge: all of them, or the first few of many."""
    each = width / words if 1 < words <= 32 else 0.06
    for tick in range(1, min(words, 32) if words <= 32 else 4):
        at = x + tick * each
        sheet.axes.plot([at, at], [y + _TALL - 0.06, y + _TALL], color=MUTED, linewidth=0.5)


def _draw_tile(sheet: Sheet, part: Part, loops: _Loops, word: int, top: float) -> None:
    if part.spans is None:
        return
    a, b = part.spans
    left, y, each = _LEFT + _BAND + 0.1, top + 0.13, 0.1
    for i in range(4):
        for j in range(4):
            sheet.box(left + i * each, y + j * each, each, each, FILLS[i if a is loops.fast else j], linewidth=0.4)
    sheet.text(left + 0.5, y + 0.1, f"{a.extent:,} × {b.extent:,}", size=8, room=0.65)
    sheet.text(left + 0.5, y + 0.27, f"of {part.run_bytes} B", size=8, room=0.65)
    sheet.text(left, y + 0.54, "turned in tiles", size=7.5, color=MUTED)
    if word > part.run_bytes:
        sheet.text(left, y + 0.69, f"a word is {word // part.run_bytes} of them", size=7.5, color=MUTED, room=1.12)
